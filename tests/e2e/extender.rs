//! The product's two processes: `gpupack extender` and `gpupack agent --simulate`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::ServerName;
use serde_json::Value;
use wire::api::state::State;

use crate::authority::client_config;
use crate::checker::Load;
use crate::clock;
use crate::control_plane::{ControlPlane, Identity, free_ports};
use crate::leash::{Leash, Used};
use crate::schedulers::sum_of;

/// How long the extender may take from its start to ready, with a filled cluster.
const START_LIMIT: Duration = Duration::from_secs(30);

/// The binary under test: cargo's, or the one that `GPUPACK_E2E_BINARY` names (a release build).
pub(crate) fn gpupack() -> PathBuf {
    clock::path_variable("GPUPACK_E2E_BINARY")
        .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_gpupack")), PathBuf::from)
}

/// The agent that goes with it.
pub(crate) fn gpupack_agent() -> PathBuf {
    gpupack().with_file_name("gpupack-agent")
}

/// A running extender. Its address survives a kill, so that it can be started again there.
pub(crate) struct Extender {
    process: Leash,
    address: SocketAddr,
    agents_address: SocketAddr,
    page_address: SocketAddr,
    metrics_address: SocketAddr,
    config: PathBuf,
    /// The CA by which it proves who it is.
    ca: Option<PathBuf>,
    /// Its name among replicas, if it has others.
    replica: Option<String>,
    program: PathBuf,
    /// Its wall clock, if a test steps it.
    wall_clock: Option<PathBuf>,
    log: PathBuf,
}

/// Debian's libfaketime, which steps the wall clock of one process; `None` if it is not installed.
pub(crate) fn faketime() -> Option<PathBuf> {
    let folder = format!("/usr/lib/{}-linux-gnu/faketime", std::env::consts::ARCH);
    Some(PathBuf::from(folder).join("libfaketime.so.1")).filter(|library| library.exists())
}

impl Extender {
    /// Writes the configuration file, starts the extender and waits until it is ready.
    /// `settings` are further keys of the file.
    pub(crate) async fn start(plane: &ControlPlane, kubeconfig: &Path, settings: Value) -> Self {
        Self::start_as(plane, kubeconfig, settings, None).await
    }

    /// The same for one of several replicas, in the pod of this name.
    pub(crate) async fn start_replica(
        plane: &ControlPlane,
        kubeconfig: &Path,
        settings: Value,
        name: &str,
    ) -> Self {
        Self::start_as(plane, kubeconfig, settings, Some(name.to_owned())).await
    }

    async fn start_as(
        plane: &ControlPlane,
        kubeconfig: &Path,
        settings: Value,
        replica: Option<String>,
    ) -> Self {
        let [address, agents_address, page_address, metrics_address] =
            free_ports().map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let ca = settings["tls"]["ca_file"].as_str().map(PathBuf::from);
        let mut config = settings;
        config["listen"] = address.to_string().into();
        config["agents_listen"] = agents_address.to_string().into();
        config["page_listen"] = page_address.to_string().into();
        config["metrics_listen"] = metrics_address.to_string().into();
        config["kubeconfig"] = kubeconfig.to_str().expect("the target folder is UTF-8").into();
        let path = plane.work().join(format!("extender-{}.yaml", address.port()));
        // JSON is YAML.
        std::fs::write(&path, config.to_string()).expect("the work folder is writable");
        let log = plane.log("extender");
        let program = gpupack();
        let process = run(&program, &path, replica.as_deref(), None, &log);
        let wall_clock = None;
        let mut extender = Self {
            process,
            address,
            agents_address,
            page_address,
            metrics_address,
            config: path,
            ca,
            replica,
            program,
            wall_clock,
            log,
        };
        extender.until_ready().await;
        extender
    }

    /// Where it listens for kube-scheduler.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens for agents.
    pub(crate) fn agents_address(&self) -> SocketAddr {
        self.agents_address
    }

    /// SIGTERM: it answers open requests, and ends.
    pub(crate) fn stop_gently(&self) {
        self.process.stop_gently();
    }

    /// The address of the page and of the queries of people.
    pub(crate) fn page_address(&self) -> SocketAddr {
        self.page_address
    }

    /// A picture of the page with the drawer of the first GPU of a node open, with Chromium, in the folder that
    /// `GPUPACK_SHOTS` names. None if it names none.
    pub(crate) fn picture(&self, node: &str, name: &str) {
        let Some(folder) = clock::variable("GPUPACK_SHOTS") else { return };
        let page = format!("http://{}/#open=gpu:{node}%2F0", self.page_address);
        let file = format!("--screenshot={folder}/{name}.png");
        let flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,760"];
        // The page never ends to load: events come as long as it is open.
        let limits = ["20", "chromium", "--timeout=5000"];
        let taken = Command::new("timeout").args(limits).args(flags).args([&file, &page]).output();
        taken.expect("chromium is installed");
    }

    /// Host memory that the process has now, in KiB.
    pub(crate) fn resident_kib(&self) -> u64 {
        self.process.resident_kib()
    }

    /// Lets the process run on one CPU alone.
    pub(crate) fn keep_on(&self, cpu: usize) {
        self.process.keep_on(cpu);
    }

    /// What the process has used since its start.
    pub(crate) fn used(&self) -> Used {
        self.process.used()
    }

    /// Sends a signal, such as `STOP` and `CONT`.
    pub(crate) fn signal(&self, name: &str) {
        self.process.signal(name);
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// Changes keys of its configuration; read at its next start.
    pub(crate) fn reconfigure(&self, settings: &Value) {
        let text = std::fs::read_to_string(&self.config).expect("we wrote that file");
        let mut config: Value = serde_json::from_str(&text).expect("we wrote JSON");
        for (key, value) in settings.as_object().expect("keys and values") {
            config[key] = value.clone();
        }
        config.as_object_mut().expect("keys and values").retain(|_, value| !value.is_null());
        std::fs::write(&self.config, config.to_string()).expect("the work folder is writable");
    }

    /// The program that its next start runs; `None` is the one under test.
    pub(crate) fn run_program(&mut self, program: Option<PathBuf>) {
        self.program = program.unwrap_or_else(gpupack);
    }

    /// From its next start on, its wall clock can be stepped.
    pub(crate) fn own_wall_clock(&mut self) {
        self.wall_clock = Some(self.config.with_extension("clock"));
        self.step_wall_clock(0);
    }

    /// Its wall clock is so many seconds ahead of the system's from now on. Its monotonic clock goes on.
    pub(crate) fn step_wall_clock(&self, seconds: i64) {
        let file = self.wall_clock.as_ref().expect("it has a wall clock of its own");
        std::fs::write(file, format!("{seconds:+}\n")).expect("the work folder is writable");
    }

    /// How often its log has this text.
    pub(crate) fn logged(&self, text: &str) -> usize {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        log.matches(text).count()
    }

    /// Starts it again with the same configuration; answers when it is ready, and how long it took.
    pub(crate) async fn start_again(&mut self) -> Duration {
        let started = clock::now();
        self.start_at_once();
        self.until_ready().await;
        started.elapsed()
    }

    /// From its next start on, it is the replica in the pod of this name.
    pub(crate) fn become_replica(&mut self, name: &str) {
        self.replica = Some(name.to_owned());
    }

    /// Starts it again with the same configuration, and waits for nothing.
    pub(crate) fn start_at_once(&mut self) {
        let (replica, wall_clock) = (self.replica.as_deref(), self.wall_clock.as_deref());
        self.process = run(&self.program, &self.config, replica, wall_clock, &self.log);
    }

    async fn until_ready(&mut self) {
        let started = clock::now();
        loop {
            if matches!(
                fetch(self.metrics_address, "/readyz", self.ca.as_deref()).await,
                Ok((StatusCode::OK, _))
            ) {
                return;
            }
            let ended = self.process.ended();
            assert!(ended.is_none(), "the extender ended ({ended:?}); see {}", self.log.display());
            assert!(
                started.elapsed() < START_LIMIT,
                "the extender is not ready after {START_LIMIT:?}; see {}",
                self.log.display()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The body of a page, which must be there.
    pub(crate) async fn page(&self, path: &str) -> String {
        let of_metrics = ["/metrics", "/healthz", "/readyz"];
        let is_metric = of_metrics.iter().any(|start| path.starts_with(start));
        let address = if is_metric { self.metrics_address } else { self.page_address };
        match fetch(address, path, self.ca.as_deref()).await {
            Ok((StatusCode::OK, body)) => body,
            Ok((status, body)) => panic!("GET {path}: {status}: {body}"),
            Err(error) => panic!("GET {path}: {error}"),
        }
    }

    /// Asks for the waiting pods, whatever the answer.
    pub(crate) async fn try_query(&self) {
        let _any = fetch(self.page_address, "/v1/waiting", self.ca.as_deref()).await;
    }

    /// Sum of a metric's samples whose labels contain `label`.
    pub(crate) async fn metric(&self, name: &str, label: &str) -> f64 {
        sum_of(&self.page("/metrics").await, name, label)
    }

    /// Calls of a verb so far.
    pub(crate) async fn calls(&self, verb: &str) -> f64 {
        let label = format!("verb=\"{verb}\"");
        self.metric("gpupack_verb_duration_seconds_count", &label).await
    }

    /// Binds so far, by outcome.
    pub(crate) async fn binds(&self) -> BTreeMap<String, f64> {
        let text = self.page("/metrics").await;
        let sample = |line: &str| {
            let rest = line.strip_prefix("gpupack_binds_total{")?;
            let (labels, value) = rest.rsplit_once(' ')?;
            let outcome = labels.split_once("outcome=\"")?.1.split_once('"')?.0;
            Some((outcome.to_owned(), value.parse().ok()?))
        };
        text.lines().filter_map(sample).filter(|(_, count)| *count > 0.0).collect()
    }

    /// The same once `count` binds have ended: a watch may show a pod as bound before the verb that
    /// bound it has its answer. Stops after some seconds, and returns what it has.
    pub(crate) async fn binds_of(&self, count: f64) -> BTreeMap<String, f64> {
        let started = clock::now();
        loop {
            let binds = self.binds().await;
            if binds.values().sum::<f64>() >= count || started.elapsed() > Duration::from_secs(5) {
                return binds;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// What the extender reports as allocated on each device. Only for comparison.
    pub(crate) async fn allocated(&self) -> Load {
        let state: State = serde_json::from_str(&self.page("/v1/state").await).expect("a state");
        let devices = state.nodes.into_iter().flat_map(|node| node.devices);
        devices
            .map(|it| (it.id, (it.allocated.memory_mib, it.allocated.share_millionths)))
            .filter(|(_, load)| *load != (0, 0))
            .collect()
    }

    /// How many devices the extender knows from reports.
    pub(crate) async fn known_devices(&self) -> f64 {
        self.metric("gpupack_gpus", "").await
    }
}

fn run(
    program: &Path,
    config: &Path,
    replica: Option<&str>,
    wall_clock: Option<&Path>,
    log: &Path,
) -> Leash {
    let config = config.to_str().expect("the target folder is UTF-8");
    let mut arguments = vec!["extender", "--config", config];
    if let Some(name) = replica {
        arguments.extend(["--replica", name, "--replica-address", "127.0.0.1"]);
    }
    let mut arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
    let Some((wall_clock, library)) = wall_clock.zip(faketime()) else {
        return Leash::start("gpupack extender", program, &arguments, log);
    };
    let environment = [
        format!("LD_PRELOAD={}", library.display()),
        format!("FAKETIME_TIMESTAMP_FILE={}", wall_clock.display()),
        "FAKETIME_DONT_FAKE_MONOTONIC=1".to_owned(),
        "FAKETIME_CACHE_DURATION=1".to_owned(),
        program.to_str().expect("the target folder is UTF-8").to_owned(),
    ];
    arguments.splice(0..0, environment);
    Leash::start("gpupack extender", Path::new("env"), &arguments, log)
}

/// Starts simulated agents for all nodes of the fleet file, each reporting once in `period`.
pub(crate) fn start_agents(
    plane: &ControlPlane,
    fleet: &Path,
    period: Duration,
    extenders: &[SocketAddr],
) -> Leash {
    start_agents_of(&gpupack(), plane, fleet, period, extenders)
}

/// The same with another program.
pub(crate) fn start_agents_of(
    program: &Path,
    plane: &ControlPlane,
    fleet: &Path,
    period: Duration,
    extenders: &[SocketAddr],
) -> Leash {
    let mut arguments = vec![
        "agent".to_owned(),
        "--simulate".to_owned(),
        fleet.to_str().expect("the target folder is UTF-8").to_owned(),
        format!("--period-ms={}", period.as_millis()),
    ];
    for extender in extenders {
        arguments.extend(["--extender".to_owned(), format!("http://{extender}")]);
    }
    Leash::start("gpupack agent", program, &arguments, &plane.log("agent"))
}

/// One GET on a new connection, over TLS if a CA is given.
async fn fetch(
    address: SocketAddr,
    path: &str,
    ca: Option<&Path>,
) -> Result<(StatusCode, String), String> {
    let builder = Client::builder(TokioExecutor::new());
    let get = |scheme: &str| {
        let request = Request::get(format!("{scheme}://{address}{path}"));
        // Over TLS it asks whose the token is.
        let request = request.header("authorization", format!("Bearer {}", Identity::Admin.name()));
        request.body(Empty::<Bytes>::new()).expect("an address of ours")
    };
    let answer = match ca {
        None => builder.build_http().request(get("http")).await,
        Some(ca) if !ca.exists() => return Err("it has no certificate yet".to_owned()),
        Some(ca) => builder.build(trusting(ca)).request(get("https")).await,
    };
    let response = answer.map_err(|error| format!("{error:?}"))?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(|error| error.to_string())?;
    Ok((status, String::from_utf8_lossy(&body.to_bytes()).into_owned()))
}

/// Connections to servers of this CA that are gpupack.
fn trusting(ca: &Path) -> HttpsConnector<HttpConnector> {
    let ca = std::fs::read_to_string(ca).expect("we wrote that file");
    let name = ServerName::try_from("gpupack-extender").expect("a DNS name");
    let builder = HttpsConnectorBuilder::new().with_tls_config(client_config(&ca, None));
    let builder = builder.https_only();
    builder.with_server_name_resolver(FixedServerNameResolver::new(name)).enable_http1().build()
}

/// Exit code and all output of the program.
pub(crate) async fn queried(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(gpupack());
    command.args(arguments).env_remove("KUBERNETES_SERVICE_HOST");
    let output = tokio::task::spawn_blocking(move || command.output()).await.expect("no panic");
    let output = output.expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text.into_owned())
}
