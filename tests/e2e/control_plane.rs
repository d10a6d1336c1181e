//! etcd and kube-apiserver on free ports of the loopback interface, about 3 s to ready.
//!
//! There is no controller manager: nothing removes the not-ready taint of nodes, garbage or
//! namespaces, and nothing creates service accounts. Tokens of the few users come from a file; a
//! token whose user is named like a service account has the rights of that service account.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use rand::Rng;

use crate::authority::Authority;
use crate::binaries::Binaries;
use crate::clock;
use crate::leash::Leash;

/// How long etcd and the API server may take to become ready.
const START_LIMIT: Duration = Duration::from_secs(60);

/// What the API server notes of the calls of the extender: who, what, and the answer; of its Bindings
/// all, see [`crate::posted`].
const AUDIT_POLICY: &str = r#"
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Request
    users: ["system:serviceaccount:gpu-system:gpupack"]
    resources: [{group: "", resources: ["pods/binding"]}]
  - level: Metadata
    users: ["system:serviceaccount:gpu-system:gpupack"]
  - level: None
"#;

/// The key of the tokens of service accounts.
const ACCOUNT_KEY: &str = "service-account.key";

/// Where it notes that, a JSON object a line.
const AUDIT_LOG: &str = "audit.log";

/// A user of the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Identity {
    /// May do everything.
    Admin,
    /// The service account of `deploy/extender.yaml`, with the rights of `deploy/rbac.yaml`.
    Extender,
    /// The service account of `deploy/scheduler.yaml`.
    SecondScheduler,
    /// What a cluster's own kube-scheduler is called.
    ClusterScheduler,
    /// The kubelet of the node that runs containers; see [`crate::node`].
    Kubelet,
    /// A person without any right of his own.
    Jane,
}

impl Identity {
    const ALL: [Self; 6] = [
        Self::Admin,
        Self::Extender,
        Self::SecondScheduler,
        Self::ClusterScheduler,
        Self::Kubelet,
        Self::Jane,
    ];

    /// Also the token: the API server listens on loopback only, for the length of a test.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Extender => "extender",
            Self::SecondScheduler => "second-scheduler",
            Self::ClusterScheduler => "cluster-scheduler",
            Self::Kubelet => "kubelet",
            Self::Jane => "jane",
        }
    }

    fn user(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Extender => "system:serviceaccount:gpu-system:gpupack",
            Self::SecondScheduler => "system:serviceaccount:gpu-system:gpupack-scheduler",
            Self::ClusterScheduler => "system:kube-scheduler",
            Self::Kubelet => "system:node:machine",
            Self::Jane => "jane",
        }
    }

    fn groups(self) -> &'static str {
        match self {
            Self::Admin => "system:masters",
            Self::Extender | Self::SecondScheduler => {
                "system:serviceaccounts,system:serviceaccounts:gpu-system"
            }
            Self::ClusterScheduler | Self::Jane => "",
            Self::Kubelet => "system:nodes",
        }
    }
}

/// What else there is besides etcd and the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// No controllers: the API server is reached by loopback.
    Bare,
    /// A whole cluster, whose pods reach the API server by this address.
    Whole(Ipv4Addr),
}

impl Form {
    fn address(self) -> IpAddr {
        match self {
            Self::Bare => Ipv4Addr::LOCALHOST.into(),
            Self::Whole(address) => address.into(),
        }
    }
}

/// One of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Etcd,
    ApiServer,
}

/// The running etcd and API server.
pub(crate) struct ControlPlane {
    /// The programs it was started from.
    pub(crate) binaries: Binaries,
    work: PathBuf,
    server: SocketAddr,
    form: Form,
    ports: (u16, u16),
    etcd: Mutex<Leash>,
    apiserver: Mutex<Leash>,
}

impl ControlPlane {
    /// Starts both and waits until the API server is ready. Must run inside the runtime.
    pub(crate) async fn start(binaries: Binaries, lane: usize) -> Self {
        Self::start_in(binaries, work_folder(&lane.to_string()), Form::Bare).await
    }

    /// The same for a cluster with controllers, whose pods reach the API server by this address.
    pub(crate) async fn start_whole(binaries: Binaries, address: Ipv4Addr) -> Self {
        Self::start_in(binaries, work_folder("whole"), Form::Whole(address)).await
    }

    /// One more besides a running one, for what would be in the way of other tests.
    pub(crate) async fn start_beside(&self, name: &str) -> Self {
        let work = self.work.join(name);
        std::fs::create_dir_all(&work).expect("the work folder is writable");
        Self::start_in(self.binaries.clone(), work, Form::Bare).await
    }

    async fn start_in(binaries: Binaries, work: PathBuf, form: Form) -> Self {
        let [client_port, peer_port, port] = free_ports();
        let server = SocketAddr::new(form.address(), port);
        let etcd = start_etcd(&binaries, &work, client_port, peer_port);
        let apiserver = start_apiserver(&binaries, &work, client_port, server, form);
        let plane = Self {
            binaries,
            work,
            server,
            form,
            ports: (client_port, peer_port),
            etcd: Mutex::new(etcd),
            apiserver: Mutex::new(apiserver),
        };
        plane.ready().await;
        plane
    }

    /// Starts kube-controller-manager with these controllers; `*` is all of them.
    pub(crate) fn start_controllers(&self, program: &Path, which: &str) -> Leash {
        let [port] = free_ports();
        let flags = [
            format!("--kubeconfig={}", self.kubeconfig(Identity::Admin).display()),
            format!("--controllers={which}"),
            "--leader-elect=false".to_owned(),
            format!("--secure-port={port}"),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--cert-dir={}", self.work.join("controllers.certificates").display()),
            // What pods get to know the API server by.
            format!("--root-ca-file={}", self.certificate().display()),
            format!("--service-account-private-key-file={}", self.work.join(ACCOUNT_KEY).display()),
        ];
        let name = "kube-controller-manager";
        Leash::start(name, program, &flags, &self.log(name))
    }

    /// Where the API server listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.server
    }

    /// Sends a signal to etcd, or to the API server.
    pub(crate) fn signal(&self, part: Part, name: &str) {
        self.part(part).signal(name);
    }

    /// Starts etcd or the API server again, after SIGKILL.
    pub(crate) fn start_again(&self, part: Part) {
        let (client_port, peer_port) = self.ports;
        let mut running = self.part(part);
        running.kill();
        *running = match part {
            Part::Etcd => start_etcd(&self.binaries, &self.work, client_port, peer_port),
            Part::ApiServer => {
                start_apiserver(&self.binaries, &self.work, client_port, self.server, self.form)
            }
        };
    }

    fn part(&self, part: Part) -> MutexGuard<'_, Leash> {
        let leash = match part {
            Part::Etcd => &self.etcd,
            Part::ApiServer => &self.apiserver,
        };
        leash.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Folder of this run: data, logs, configuration files.
    pub(crate) fn work(&self) -> &Path {
        &self.work
    }

    /// What the API server has noted of the extender's calls, a JSON object a line.
    pub(crate) fn audit_log(&self) -> PathBuf {
        self.work.join(AUDIT_LOG)
    }

    /// Where a program of this run writes what it prints.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.work.join(format!("{name}.log"))
    }

    /// Writes a kubeconfig file for the user. Returns its path.
    pub(crate) fn kubeconfig(&self, identity: Identity) -> PathBuf {
        self.kubeconfig_via(identity, identity.name(), &format!("https://{}", self.server))
    }

    /// The same, through another server: a proxy.
    pub(crate) fn kubeconfig_via(&self, identity: Identity, file: &str, server: &str) -> PathBuf {
        let mut cluster = serde_json::json!({"server": server});
        if server.starts_with("https:") {
            cluster["certificate-authority"] =
                self.certificate().to_str().expect("the target folder is UTF-8").into();
        }
        let text = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "testbed",
            "clusters": [{"name": "testbed", "cluster": cluster}],
            "users": [{"name": "user", "user": {"token": identity.name()}}],
            "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "user"}}],
        });
        let path = self.work.join(format!("{file}.kubeconfig"));
        std::fs::write(&path, text.to_string()).expect("the work folder is writable");
        path
    }

    /// A separate client for the user. It never retries a request.
    pub(crate) async fn client(&self, identity: Identity) -> Client {
        let file = Kubeconfig::read_from(self.kubeconfig(identity)).expect("we wrote that file");
        let mut config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .expect("the kubeconfig is complete");
        config.default_retry = false;
        Client::try_from(config).expect("the certificate can be read")
    }

    /// The API server makes its own certificate at its first start.
    pub(crate) fn certificate(&self) -> PathBuf {
        self.work.join("certificates/apiserver.crt")
    }

    async fn ready(&self) {
        let started = clock::now();
        loop {
            if self.certificate().is_file() && self.answers_ready().await {
                break;
            }
            assert!(
                started.elapsed() < START_LIMIT,
                "the API server is not ready after {START_LIMIT:?}; see {}",
                self.log("kube-apiserver").display()
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        println!("control plane ready after {} ms", clock::ms(started.elapsed()));
    }

    async fn answers_ready(&self) -> bool {
        let client = self.client(Identity::Admin).await;
        let request = axum::http::Request::get("/readyz").body(Vec::new()).expect("a fixed path");
        client.request_text(request).await.is_ok()
    }
}

fn start_etcd(binaries: &Binaries, work: &Path, client_port: u16, peer_port: u16) -> Leash {
    let client = format!("http://127.0.0.1:{client_port}");
    let peer = format!("http://127.0.0.1:{peer_port}");
    let arguments = [
        "--unsafe-no-fsync".to_owned(),
        "--name=testbed".to_owned(),
        format!("--data-dir={}", work.join("etcd").display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=testbed={peer}"),
    ];
    Leash::start("etcd", &binaries.etcd, &arguments, &work.join("etcd.log"))
}

fn start_apiserver(
    binaries: &Binaries,
    work: &Path,
    etcd_port: u16,
    server: SocketAddr,
    form: Form,
) -> Leash {
    let tokens: String = Identity::ALL
        .iter()
        .map(|id| format!("{0},{1},{0},\"{2}\"\n", id.name(), id.user(), id.groups()))
        .collect();
    let token_file = work.join("tokens.csv");
    std::fs::write(&token_file, tokens).expect("the work folder is writable");
    let key_file = work.join(ACCOUNT_KEY);
    std::fs::write(&key_file, service_account_key()).expect("the work folder is writable");
    let folder = work.join("front-proxy");
    if !folder.exists() {
        std::fs::create_dir(&folder).expect("the work folder is writable");
        let authority = Authority::new();
        authority.write(&folder, &authority.pair("front-proxy-client"));
    }
    let policy = work.join("audit-policy.yaml");
    std::fs::write(&policy, AUDIT_POLICY).expect("the work folder is writable");
    let front_proxy = |name: &str| folder.join(name).display().to_string();
    let mut arguments = vec![
        format!("--etcd-servers=http://127.0.0.1:{etcd_port}"),
        format!("--secure-port={}", server.port()),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        format!("--cert-dir={}", work.join("certificates").display()),
        format!("--service-account-key-file={}", key_file.display()),
        format!("--service-account-signing-key-file={}", key_file.display()),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--token-auth-file={}", token_file.display()),
        "--authorization-mode=Node,RBAC".to_owned(),
        // As kubeadm and others have it: the agent may be privileged.
        "--allow-privileged=true".to_owned(),
        "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
        format!("--audit-policy-file={}", policy.display()),
        format!("--audit-log-path={}", work.join(AUDIT_LOG).display()),
        "--audit-log-maxsize=1000".to_owned(), // in MB; then another file begins
        // In batches, what is not written yet would be lost when it is killed.
        "--audit-log-mode=blocking".to_owned(),
        // How it proves itself to the servers behind an APIService.
        format!("--requestheader-client-ca-file={}", front_proxy("ca.crt")),
        format!("--proxy-client-cert-file={}", front_proxy("tls.crt")),
        format!("--proxy-client-key-file={}", front_proxy("tls.key")),
        "--requestheader-allowed-names=front-proxy-client".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
    ];
    match form {
        Form::Bare => arguments.extend([
            "--bind-address=127.0.0.1".to_owned(),
            // It requires the account of every pod's namespace, which a controller would create.
            "--disable-admission-plugins=ServiceAccount".to_owned(),
        ]),
        Form::Whole(address) => arguments.extend([
            "--bind-address=0.0.0.0".to_owned(),
            format!("--advertise-address={address}"),
        ]),
    }
    let log = work.join("kube-apiserver.log");
    Leash::start("kube-apiserver", &binaries.kube_apiserver, &arguments, &log)
}

/// A folder for a control plane of this process under cargo's target folder. Folders of runs that have
/// ended are removed first, so the logs of the last run are always there to read.
fn work_folder(name: &str) -> PathBuf {
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR")).join("e2e");
    for old in std::fs::read_dir(&parent).into_iter().flatten().flatten() {
        if !Path::new("/proc").join(old.file_name()).exists() {
            let _kept = std::fs::remove_dir_all(old.path());
        }
    }
    let work = parent.join(std::process::id().to_string()).join(name);
    std::fs::create_dir_all(&work)
        .unwrap_or_else(|error| panic!("cannot create {}: {error}", work.display()));
    work
}

/// Ports that are free now, and that no other caller gets.
pub(crate) fn free_ports<const N: usize>() -> [u16; N] {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    std::array::from_fn(|_| {
        loop {
            let listener = TcpListener::bind(("127.0.0.1", 0)).expect("there is a free port");
            let port = listener.local_addr().expect("a bound socket has an address").port();
            if given.insert(port) {
                break port;
            }
        }
    })
}

/// A fresh key for service account tokens: 32 random bytes as a SEC 1 `ECPrivateKey` on P-256
/// (RFC 5915), whose public half is optional and is computed by the reader.
fn service_account_key() -> String {
    let mut scalar: [u8; 32] = rand::rng().random();
    scalar[0] &= 0x7f; // below the order of the curve
    let mut der = vec![0x30, 0x31, 0x02, 0x01, 0x01, 0x04, 0x20];
    der.extend(scalar);
    der.extend([0xa0, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07]);
    let body = base64(&der);
    // In two parts, so that no tool takes this line for a key.
    format!("-----BEGIN EC {key}-----\n{body}\n-----END EC {key}-----\n", key = "PRIVATE KEY")
}

/// Base64 of a length that divides by three, which needs no padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (triples, rest) = bytes.as_chunks::<3>();
    assert!(rest.is_empty(), "51 bytes divide by three");
    triples
        .iter()
        .flat_map(|[a, b, c]| {
            let word = u32::from_be_bytes([0, *a, *b, *c]);
            [18, 12, 6, 0].map(|shift| char::from(LETTERS[(word >> shift & 63) as usize]))
        })
        .collect()
}
