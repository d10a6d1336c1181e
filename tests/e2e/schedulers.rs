//! kube-scheduler processes, run with the unchanged files of `scheduler-config/`.
//!
//! Only what names a place is changed: the extender's well-known address becomes the loopback
//! address, and the kubeconfig becomes the testbed's.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, DeleteParams};
use kube::{Client, Config};
use serde_yaml_ng::Value;

use crate::clock;
use crate::control_plane::{ControlPlane, Identity, free_ports};
use crate::leash::Leash;

/// Where the shipped files expect the extender.
const WELL_KNOWN: &str = "http://gpupack.gpu-system.svc:8080/";

/// How long a scheduler may take to become ready.
const START_LIMIT: Duration = Duration::from_secs(30);

/// A shipped configuration and its user.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SchedulerPlan {
    file: &'static str,
    identity: Identity,
    renamed: Option<&'static str>,
    calls_extender: bool,
    /// The folder with its certificate for the extender.
    certificates: Option<&'static Path>,
}

impl SchedulerPlan {
    /// The second scheduler, for pods that name `gpupack`.
    pub(crate) fn second() -> Self {
        Self {
            file: "second-scheduler.yaml",
            identity: Identity::SecondScheduler,
            renamed: None,
            calls_extender: true,
            certificates: None,
        }
    }

    /// The same configuration without any extender: what kube-scheduler does alone.
    pub(crate) fn second_alone() -> Self {
        Self { calls_extender: false, ..Self::second() }
    }

    /// The same configuration for pods that name another profile, as a third process. It keeps no
    /// lease, since the second one has it.
    pub(crate) fn second_named(name: &'static str) -> Self {
        Self { renamed: Some(name), ..Self::second() }
    }

    /// The cluster's own scheduler.
    pub(crate) fn in_place() -> Self {
        Self {
            file: "in-place.yaml",
            identity: Identity::ClusterScheduler,
            renamed: None,
            calls_extender: true,
            certificates: None,
        }
    }

    /// The cluster's own scheduler, which knows no extender.
    pub(crate) fn plain() -> Self {
        Self { calls_extender: false, ..Self::in_place() }
    }

    /// The same with a certificate for the extender: `scheduler.crt` in this folder.
    pub(crate) fn proving(self, folder: &'static Path) -> Self {
        Self { certificates: Some(folder), ..self }
    }

    /// The configuration with this place's addresses.
    fn configuration(self, address: SocketAddr, kubeconfig: &Path) -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("scheduler-config").join(self.file);
        let text = std::fs::read_to_string(&path).expect("the configuration is shipped");
        let mut config: Value = serde_yaml_ng::from_str(&text).expect("the configuration is YAML");
        let prefix = config["extenders"][0]["urlPrefix"].as_str().expect("one extender");
        let verbs = prefix.strip_prefix(WELL_KNOWN).expect("the shipped address is the well-known");
        let verbs = verbs.to_owned();
        config["extenders"][0]["urlPrefix"] = format!("http://{address}/{verbs}").into();
        if let Some(folder) = self.certificates {
            let file = |name: &str| folder.join(name).to_str().expect("UTF-8").to_owned();
            let tls = [
                ("serverName", "gpupack-extender".to_owned()),
                ("certFile", file("scheduler.crt")),
                ("keyFile", file("scheduler.key")),
                ("caFile", file("ca.crt")),
            ];
            let tls: serde_yaml_ng::Mapping =
                tls.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
            let extender = &mut config["extenders"][0];
            extender["urlPrefix"] = format!("https://{address}/{verbs}").into();
            extender["enableHTTPS"] = true.into();
            extender["tlsConfig"] = tls.into();
        }
        if !self.calls_extender {
            config["extenders"] = Value::Sequence(Vec::new());
        }
        let kubeconfig = kubeconfig.to_str().expect("the target folder is UTF-8");
        config["clientConnection"]["kubeconfig"] = kubeconfig.into();
        if let Some(name) = self.renamed {
            config["profiles"][0]["schedulerName"] = name.into();
            config["leaderElection"]["leaderElect"] = false.into();
        }
        config
    }
}

/// A running kube-scheduler.
pub(crate) struct Scheduler {
    process: Leash,
    client: Client,
}

impl Scheduler {
    /// Starts it and waits until it is ready.
    pub(crate) async fn start(
        plane: &ControlPlane,
        admin: &Client,
        plan: SchedulerPlan,
        extender: SocketAddr,
    ) -> Self {
        let name = plan.renamed.unwrap_or(plan.file).replace(".yaml", "");
        let kubeconfig = plane.kubeconfig(plan.identity);
        let config = plan.configuration(extender, &kubeconfig);
        release_lease(admin, &config).await;
        let file = plane.work().join(format!("{name}.scheduler.yaml"));
        let text = serde_yaml_ng::to_string(&config).expect("it was YAML before");
        std::fs::write(&file, text).expect("the work folder is writable");
        let [port] = free_ports();
        let arguments = [
            format!("--config={}", file.display()),
            format!("--secure-port={port}"),
            "--bind-address=127.0.0.1".to_owned(),
            // Where to authenticate callers of its own port. In a pod it finds that itself.
            format!("--authentication-kubeconfig={}", kubeconfig.display()),
            format!("--authorization-kubeconfig={}", kubeconfig.display()),
            format!("--cert-dir={}", plane.work().join(format!("{name}.certificates")).display()),
        ];
        let program = &plane.binaries.kube_scheduler;
        let process = Leash::start(&name, program, &arguments, &plane.log(&name));
        let mut scheduler = Self { process, client: own_port(port) };
        scheduler.ready(&plane.log(&name)).await;
        scheduler
    }

    /// Whether it has ended: it does when it cannot renew its own Lease for 10 s.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.ended().is_some()
    }

    /// Sum of a metric's samples whose labels contain `label`.
    pub(crate) async fn metric(&self, name: &str, label: &str) -> f64 {
        let text = self.text("/metrics").await.expect("the scheduler answers its administrator");
        sum_of(&text, name, label)
    }

    async fn ready(&mut self, log: &Path) {
        let started = clock::now();
        while self.text("/readyz").await.is_err() {
            let name = self.process.name().to_owned();
            let ended = self.process.ended();
            assert!(ended.is_none(), "{name} ended ({ended:?}); see {}", log.display());
            let late = started.elapsed() > START_LIMIT;
            assert!(!late, "{name} is not ready after {START_LIMIT:?}; see {}", log.display());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn text(&self, path: &str) -> kube::Result<String> {
        let request = axum::http::Request::get(path).body(Vec::new()).expect("a fixed path");
        self.client.request_text(request).await
    }
}

/// Sum of the samples of a Prometheus text whose labels contain `label`.
pub(crate) fn sum_of(text: &str, name: &str, label: &str) -> f64 {
    let value = |line: &str| {
        let (series, value) = line.rsplit_once(' ')?;
        let (found, labels) = series.split_once('{').unwrap_or((series, ""));
        (found == name && labels.contains(label)).then(|| value.parse::<f64>().ok()).flatten()
    };
    // An empty `sum` is -0.
    text.lines().filter_map(value).fold(0.0, |sum, value| sum + value)
}

/// A client of the scheduler's own port, which has a self-signed certificate.
fn own_port(port: u16) -> Client {
    let address = format!("https://127.0.0.1:{port}").parse().expect("an address of ours");
    let mut config = Config::new(address);
    config.accept_invalid_certs = true;
    config.auth_info.token = Some("admin".to_owned().into());
    Client::try_from(config).expect("a client without certificates")
}

/// Deletes the lease of a scheduler that an earlier scenario killed, so that this one
/// need not wait for it to run out.
async fn release_lease(admin: &Client, config: &Value) {
    let election = &config["leaderElection"];
    let namespace = election["resourceNamespace"].as_str().unwrap_or("kube-system");
    let name = election["resourceName"].as_str().unwrap_or("kube-scheduler");
    let leases: Api<Lease> = Api::namespaced(admin.clone(), namespace);
    let _absent = leases.delete(name, &DeleteParams::default()).await;
}
