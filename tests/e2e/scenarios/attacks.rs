//! Clients that mean harm, at the ports of an extender whose clients prove who they are: what *filter* takes
//! meanwhile, and how much memory the process has. It prints figures and asserts answers and bytes, never times.
//!
//! Attackers use the CPUs of this machine, which would be others. So they have the lowest priority.
//!
//! It is small for a debug build, and has its full size with `GPUPACK_E2E_BINARY`. Then the extender and
//! kube-scheduler's calls have one CPU, and the attackers another one; and each attack is first made on a server
//! that does nothing: the difference is the extender's.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use rustix::process::{Resource, Rlimit, getrlimit, setpriority_process, setrlimit};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::authority::{Pair, client_config};
use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::leash::{keep_on, keep_thread_on};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};

/// Most memory of the process under any attack.
const MOST_KIB: u64 = 300 << 10;

/// How large an attack is.
#[derive(Clone, Copy)]
struct Size {
    /// How long each lasts.
    lasts: Duration,
    /// Slow connections at a time.
    slow: usize,
    /// Large bodies at a time.
    bodies: usize,
    /// Waiting pods, each with another request.
    shapes: u64,
    /// Whether attackers have a CPU of their own.
    is_apart: bool,
    /// Whether the figures are worth a comparison.
    is_whole: bool,
}

/// The CPU of the extender and of kube-scheduler's calls, and that of attackers, if they are apart.
const CPUS: [usize; 2] = [0, 1];

impl Size {
    fn chosen() -> Self {
        match clock::path_variable("GPUPACK_E2E_BINARY") {
            Some(_) => Self {
                lasts: Duration::from_secs(10),
                slow: 2_000,
                bodies: 60,
                shapes: 10_000,
                is_apart: std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1),
                is_whole: true,
            },
            None => Self {
                lasts: Duration::from_secs(1),
                slow: 300,
                bodies: 10,
                shapes: 300,
                is_apart: false,
                is_whole: false,
            },
        }
    }
}

#[test]
fn no_client_without_a_proof_slows_kube_scheduler() {
    scenario("attacks", |bed| async move {
        // Shells start programs with a low soft limit, often 1,024.
        let limit = getrlimit(Resource::Nofile);
        let _kept = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        let fleet = Fleet::new().with("attacks", 20, (8, A100));
        let setup = Setup { has_identities: true, schedulers: Vec::new(), ..Setup::of(fleet) };
        let stage = bed.stage(setup).await;
        let clients = Arc::new(Clients::of(&stage));
        let size = Size::chosen();
        if size.is_apart {
            stage.extender.keep_on(CPUS[0]);
            keep_on("self", CPUS[0]);
        }
        let sink = if size.is_whole { Some(sink(&stage, size).await) } else { None };
        let idle = sink.map(|at| ("a server that does nothing", at));
        let [verbs, agents, page] = [
            stage.extender.address(),
            stage.extender.agents_address(),
            stage.extender.page_address(),
        ];
        let nothing = async move || tokio::time::sleep(size.lasts).await;
        beside(&stage, &clients, size, "nothing", nothing).await;
        for (name, at) in idle.into_iter().chain([("verbs", verbs)]) {
            let title = format!("{} handshakes without an end, {name}", size.slow);
            beside(&stage, &clients, size, &title, async move || handshakes(at, size).await).await;
        }
        for (name, at) in idle.into_iter().chain([("agents", agents), ("page", page)]) {
            let title = format!("{} heads without an end, {name}", size.slow);
            let them = Arc::clone(&clients);
            beside(&stage, &clients, size, &title, async move || them.heads(at, size).await).await;
            let title = format!("{} bodies of 32 MiB, {name}", size.bodies);
            let them = Arc::clone(&clients);
            beside(&stage, &clients, size, &title, async move || them.bodies(at, size).await).await;
            let title = format!("unknown tokens, {name}");
            let them = Arc::clone(&clients);
            beside(&stage, &clients, size, &title, async move || them.tokens(at, size).await).await;
        }
        let pods = waiting_pods(&stage, size).await;
        for (name, at) in idle.into_iter().chain([("verbs", verbs)]) {
            let title = format!("{} waiting shapes, {name}", size.shapes);
            let (them, pods) = (Arc::clone(&clients), pods.clone());
            beside(&stage, &clients, size, &title, async move || them.shapes(at, &pods).await)
                .await;
        }
        beside(&stage, &clients, size, "nothing, with all these shapes", nothing).await;
        stage.cluster.delete_all_pods().await;
        stage.judge().await;
    });
}

/// Pods that fit nowhere, each with another request, as the API server has them.
async fn waiting_pods(stage: &Stage, size: Size) -> Arc<Vec<Pod>> {
    let plan = |at: u64| PodPlan::memory(format!("shape-{at}"), 900_000 + at);
    let plans: Vec<PodPlan> = (0..size.shapes).map(plan).collect();
    stage.cluster.add_pods(&plans).await;
    let mut pods = stage.cluster.pods().list(&ListParams::default()).await.expect("pods").items;
    for pod in &mut pods {
        pod.metadata.managed_fields = None; // kube-scheduler does not send it
    }
    Arc::new(pods)
}

/// Clients with the certificate of kube-scheduler and without any.
struct Clients {
    scheduler: TlsConnector,
    stranger: TlsConnector,
    nodes: Vec<String>,
}

type Sender = http1::SendRequest<Full<Bytes>>;

impl Clients {
    fn of(stage: &Stage) -> Self {
        let ca = stage.certificate_of_ca();
        let folder: &Path = ca.parent().expect("a file is in a folder");
        let text = |name: &str| std::fs::read_to_string(folder.join(name)).expect("it is there");
        let scheduler = Pair { certificate: text("scheduler.crt"), key: text("scheduler.key") };
        let scheduler = client_config(&text("ca.crt"), Some(&scheduler));
        let stranger = client_config(&text("ca.crt"), None);
        let connector = |config| TlsConnector::from(Arc::new(config));
        let nodes = stage.fleet.nodes.iter().map(|node| node.name.clone()).collect();
        Self { scheduler: connector(scheduler), stranger: connector(stranger), nodes }
    }

    async fn open(&self, at: SocketAddr) -> Option<TlsStream<TcpStream>> {
        self.stranger.connect(name(), connect(at).await?).await.ok()
    }

    /// kube-scheduler's connection.
    async fn of_scheduler(&self, at: SocketAddr) -> Sender {
        let stream = TcpStream::connect(at).await.expect("it listens");
        stream.set_nodelay(true).expect("an open socket");
        let stream = self.scheduler.connect(name(), stream).await.expect("a known certificate");
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.expect("it speaks HTTP");
        tokio::spawn(connection);
        sender
    }

    /// One call of *filter*; how long it took.
    async fn filter(&self, sender: &mut Sender, pod: &Value) -> Duration {
        let body = json!({"Pod": pod, "Nodes": null, "NodeNames": self.nodes}).to_string();
        let request = Request::post("/v1/filter").header("host", "localhost");
        let request = request.header("content-type", "application/json").body(Full::from(body));
        let started = clock::now();
        sender.ready().await.expect("the connection is kept");
        let answer = sender.send_request(request.expect("a request of constants")).await;
        let answer = answer.expect("filter is answered");
        let status = answer.status();
        let body = answer.into_body().collect().await.expect("a whole answer");
        assert_eq!(status, 200, "{:?}", body.to_bytes());
        started.elapsed()
    }

    /// Begins requests and ends none.
    async fn heads(&self, at: SocketAddr, size: Size) {
        let (until, mut held) = (clock::now() + size.lasts, Vec::new());
        for _ in 0..size.slow {
            let Some(mut stream) = self.open(at).await else { continue };
            let _closed = stream.write_all(b"GET /v1/state HTTP/1.1\r\nhost: ").await;
            held.push(stream);
        }
        rest(until).await;
    }

    /// Sends bodies without a token.
    async fn bodies(&self, at: SocketAddr, size: Size) {
        let (until, mut sending) = (clock::now() + size.lasts, JoinSet::new());
        for _ in 0..size.bodies {
            let Some(mut stream) = self.open(at).await else { continue };
            sending.spawn(async move {
                let head = format!(
                    "PUT /v1/nodes/attacks-00/report HTTP/1.1\r\nhost: localhost\r\n\
                     content-type: application/json\r\ncontent-length: {}\r\n\r\n",
                    32 << 20
                );
                let _closed = stream.write_all(head.as_bytes()).await;
                let piece = vec![b' '; 1 << 20];
                // Nobody reads a body to its end that nobody has asked for.
                let sent = async {
                    for _ in 0..32 {
                        if stream.write_all(&piece).await.is_err() {
                            return;
                        }
                    }
                };
                let _late = tokio::time::timeout_at(until.into(), sent).await;
                rest(until).await;
            });
        }
        sending.join_all().await;
    }

    /// Asks with tokens that nobody knows, on connections of some calls each.
    async fn tokens(&self, at: SocketAddr, size: Size) {
        let (until, mut count) = (clock::now() + size.lasts, 0);
        while clock::now() < until {
            let Some(stream) = self.open(at).await else { continue };
            let (mut sender, connection) =
                http1::handshake(TokioIo::new(stream)).await.expect("it speaks HTTP");
            let running = tokio::spawn(connection);
            for _ in 0..20 {
                count += 1;
                let request = Request::get("/v1/waiting").header("host", "localhost");
                let request = request.header("authorization", format!("Bearer made-up-{count}"));
                let request = request.body(Full::<Bytes>::default());
                let request = request.expect("a request of constants");
                if sender.ready().await.is_ok() {
                    let _any = sender.send_request(request).await;
                }
            }
            running.abort();
        }
    }

    /// Calls *filter* for each pod.
    async fn shapes(&self, at: SocketAddr, pods: &[Pod]) {
        let mut sender = self.of_scheduler(at).await;
        for pod in pods {
            let pod = serde_json::to_value(pod).expect("it came from JSON");
            self.filter(&mut sender, &pod).await;
        }
    }
}

/// A connection from another address than kube-scheduler's, which is 127.0.0.1.
async fn connect(at: SocketAddr) -> Option<TcpStream> {
    let socket = TcpSocket::new_v4().ok()?;
    socket.bind((Ipv4Addr::new(127, 0, 0, 2), 0).into()).ok()?;
    socket.connect(at).await.ok()
}

async fn rest(until: Instant) {
    tokio::time::sleep_until(until.into()).await;
}

fn name() -> ServerName<'static> {
    ServerName::try_from("gpupack-extender").expect("a DNS name")
}

/// Opens connections and begins no handshake, or not all of one.
async fn handshakes(at: SocketAddr, size: Size) {
    let (until, mut held) = (clock::now() + size.lasts, Vec::new());
    for begun in 0..size.slow {
        let Some(mut stream) = connect(at).await else { continue };
        if begun % 2 == 0 {
            // The first bytes of a ClientHello of 512 bytes.
            let _closed = stream.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]).await;
        }
        held.push(stream);
    }
    rest(until).await;
}

/// Runs an attack beside kube-scheduler's calls, in a thread of the lowest priority.
async fn beside<F: Future<Output = ()>>(
    stage: &Stage,
    clients: &Clients,
    size: Size,
    title: &str,
    attack: impl FnOnce() -> F + Send + 'static,
) {
    let mut sender = clients.of_scheduler(stage.extender.address()).await;
    let (ended, mut end) = oneshot::channel();
    let attacking = std::thread::spawn(move || {
        stand_back(size);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a thread can have one").block_on(attack());
        let _waits = ended.send(());
    });
    let pod = json!({"metadata": {"name": "scheduler", "namespace": "attacks", "uid": "scheduler",
            "annotations": {"gpu-fraction": "0.5"}},
        "spec": {"schedulerName": "gpupack", "containers": [{"name": "main"}]}});
    let (mut took, mut peak) = (Vec::new(), 0);
    let (began, before) = (clock::now(), stage.extender.used().processor);
    loop {
        took.push(clients.filter(&mut sender, &pod).await);
        peak = peak.max(stage.extender.resident_kib());
        tokio::select! {
            ended = &mut end => break ended.expect("the attack does not fail"),
            () = tokio::time::sleep(Duration::from_millis(5)) => {}
        }
    }
    let used = stage.extender.used().processor.saturating_sub(before);
    let percent = 100 * used.as_millis() / began.elapsed().as_millis().max(1);
    attacking.join().expect("the attack does not fail");
    took.sort_unstable();
    let at = |of_thousand: usize| took[(took.len() * of_thousand / 1000).min(took.len() - 1)];
    stage.figure(&format!(
        "{title}: memory {} MiB, {percent} % of a CPU, {} calls of filter, p50 {:.1?}, p99 {:.1?}",
        peak >> 10,
        took.len(),
        at(500),
        at(990)
    ));
    assert!(peak < MOST_KIB, "{title}: {peak} KiB");
}

/// A server of TLS that reads all and answers each request with nothing, in a thread of the lowest priority.
async fn sink(stage: &Stage, size: Size) -> SocketAddr {
    let acceptor = sink_acceptor(stage);
    let (bound, address) = oneshot::channel();
    std::thread::spawn(move || {
        stand_back(size);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a thread can have one").block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            bound.send(listener.local_addr().expect("it listens")).expect("the test waits");
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let mut piece = vec![0; 64 << 10];
                    while let Ok(1..) = stream.read(&mut piece).await {
                        // Heads, and bodies of *filter*, come in one piece.
                        if [&b"GET /v1/waiting"[..], b"POST"].iter().any(|it| piece.starts_with(it))
                        {
                            let nothing = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
                            let _closed = stream.write_all(nothing).await;
                        }
                    }
                });
            }
        });
    });
    address.await.expect("it listens")
}

/// Gives this thread the lowest priority, and a CPU of its own where attackers have one.
fn stand_back(size: Size) {
    setpriority_process(None, 19).expect("a lower priority");
    if size.is_apart {
        keep_thread_on(CPUS[1]);
    }
}

/// With the extender's own certificate.
fn sink_acceptor(stage: &Stage) -> TlsAcceptor {
    let ca = stage.certificate_of_ca();
    let file = |name: &str| ca.with_file_name(name);
    let chain = vec![CertificateDer::from_pem_file(file("tls.crt")).expect("its certificate")];
    let key = PrivateKeyDer::from_pem_file(file("tls.key")).expect("its key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().expect("versions of the provider");
    let config = config.with_no_client_auth().with_single_cert(chain, key).expect("a pair");
    TlsAcceptor::from(Arc::new(config))
}
