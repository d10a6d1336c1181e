//! What pods used before the extender started, from Prometheus: a real one, with the agents' own series
//! of some hours; and stand-ins with false answers.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::convert::Infallible;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use agent::gpu::sample::Sample;
use agent::node::metrics::AgentMetrics;
use axum::body::{Body, Bytes};
use axum::extract::RawQuery;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use engine::hardware::pool::ConfiguredIsolation;
use engine::model::reservation::{PlacedDevice, Placement};
use kube_api::request::placement::encode;
use runtime::clock::Clock;
use serde_json::{Value, json};
use server::api::background;
use tokio::sync::watch;
use wire::api::condition::DeviceFault;
use wire::ids::{DeviceId, NodeName};
use wire::report::bodies::{AllocatedDevice, Allocation, AllocationState, DeviceUse, ProcessUse};
use wire::units::{Demand, MemMib, Share};

use crate::harness::extender::{Bed, hello, pod, read};

const HOUR: u64 = 3_600;

// --- stand-ins --------------------------------------------------------------------------------

/// Serves what a stand-in answers.
async fn served(router: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// What an extender with one pod advises after it queried a stand-in, and how often it did.
async fn advised_after(
    answer: impl Fn() -> (StatusCode, String) + Clone + Send + Sync + 'static,
) -> (Value, usize) {
    let (queried, mut queries) = tokio::sync::mpsc::unbounded_channel();
    let router = Router::new().fallback(move |body: String| {
        let reported = answer();
        queried.send(body).unwrap();
        async move { reported }
    });
    let address = served(router).await;
    let bed =
        Bed::warm_with(&format!("advice: {{ prometheus_url: 'http://{address}/prom' }}")).await;
    bed.filter(pod("a", json!({"gpu-fraction": "0.5"})), &["gpu-a"]).await;
    let bind = json!({"PodName": "a", "PodNamespace": "team", "PodUID": "a", "Node": "gpu-a"});
    assert_eq!(bed.post("/v1/bind", bind.to_string()).await.1, json!({"Error": ""}));
    let (stop, stopped) = watch::channel(false);
    let loops = tokio::spawn(background::run(bed.app.clone(), stopped));
    let first = queries.recv().await.unwrap();
    assert!(first.contains("uid%3D%7E%22a%22"), "by UID: {first}");
    tokio::time::sleep(Duration::from_millis(500)).await;
    let answer = bed.filter(pod("b", json!({"gpu-fraction": "0.25"})), &["gpu-a"]).await;
    assert_eq!(answer["NodeNames"], json!(["gpu-a"]), "calls are still answered");
    let advice = read(bed.get("/v1/advise").await.1.as_bytes());
    stop.send_replace(true);
    loops.await.unwrap();
    bed.app.ledger.audit().unwrap();
    (advice, 1 + queries.len())
}

fn matrix(result: &Value) -> String {
    json!({"status": "success", "data": {"resultType": "matrix", "result": result}}).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_false_or_failing_prometheus_loses_only_its_history() {
    let now = || Clock::start().unix_seconds();
    let strangers: Vec<Value> = (0..1_000)
        .map(|at| json!({"metric": {"uid": format!("s{at}")}, "values": [[now(), "1"]]}))
        .collect();
    let values = ["NaN", "-5", "1e300", "+Inf", "x"];
    let lies: Vec<Value> = (now() - HOUR..=now())
        .zip(values.into_iter().cycle())
        .map(|(at, value)| json!([at, value]))
        .collect();
    for (status, body) in [
        (StatusCode::OK, "<html>not here</html>".to_owned()),
        (StatusCode::OK, String::new()),
        (StatusCode::OK, matrix(&json!([{"metric": {"uid": "a"}, "values": [[0, 1, 2]]}]))),
        (StatusCode::OK, matrix(&json!([{"metric": {"uid": "a"}, "values": lies}]))),
        (StatusCode::OK, matrix(&json!(strangers))),
        (StatusCode::OK, "[".repeat(1 << 20)),
        (StatusCode::OK, " ".repeat(17 << 20)),
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            json!({"status": "error", "error": "\u{1b}[2J"}).to_string(),
        ),
        (StatusCode::FOUND, String::new()),
    ] {
        let said: String = body.chars().take(60).collect();
        let (advice, queried) = advised_after(move || (status, body.clone())).await;
        assert_eq!(
            (advice["watchedPods"].as_u64(), queried <= 2),
            (Some(0), true),
            "{status} {said}"
        );
    }
}

// --- the real one -----------------------------------------------------------------------------

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _ended = self.0.wait();
    }
}

fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output();
    found.is_ok_and(|found| found.status.success())
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// Status and body of an answer; `None` while there is no answer.
fn exchange(port: u16, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
    .ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split_whitespace().nth(1)?.parse().ok()?, body.to_owned()))
}

/// Waits until `found` gives something.
fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    for _ in 0..300 {
        if let Some(found) = found() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("not within 30 s: {what}");
}

/// A pod on one GPU of `gpu-a`, of 15,360 MiB each.
struct Tenant {
    name: &'static str,
    uid: &'static str,
    gpu: usize,
}

const STEADY: Tenant =
    Tenant { name: "steady", uid: "0b5a9c4e-7f0e-4f43-9d24-1d9c3a0c5b11", gpu: 0 };
const WEB_BEFORE: Tenant =
    Tenant { name: "web-0", uid: "11111111-7f0e-4f43-9d24-1d9c3a0c5b11", gpu: 1 };
const WEB: Tenant = Tenant { name: "web-0", uid: "22222222-7f0e-4f43-9d24-1d9c3a0c5b11", gpu: 1 };
const UNKNOWN: Tenant =
    Tenant { name: "unknown", uid: "33333333-7f0e-4f43-9d24-1d9c3a0c5b11", gpu: 2 };

impl Tenant {
    fn device(&self) -> String {
        format!("GPU-gpu-a-{}", self.gpu)
    }

    /// Half a GPU.
    fn allocation(&self) -> Allocation {
        let part =
            AllocatedDevice { uuid: self.device(), memory_mib: 7_680, share_millionths: 500_000 };
        let (pod_uid, pod) = (self.uid.to_owned(), format!("team/{}", self.name));
        Allocation {
            pod_uid,
            pod,
            state: AllocationState::Confirmed,
            devices: vec![part],
            is_guest: false,
        }
    }

    fn seen(&self, mib: u64, busy_percent: u8) -> DeviceUse {
        let (pod_uid, memory_mib) = (Some(self.uid.to_owned()), Some(mib));
        DeviceUse {
            used_mib: Some(mib),
            busy_percent: Some(busy_percent),
            healthy: true,
            fault: None,
            processes: Some(vec![ProcessUse { pid: 1, pod_uid, memory_mib }]),
            ..DeviceUse::unread(self.device(), DeviceFault::Lost)
        }
    }

    /// The pod as the API server shows it.
    fn object(&self) -> Value {
        let demand = Demand { memory: MemMib::new(7_680), share: Share::from_millionths(500_000) };
        let placement = Placement {
            node: NodeName::new("gpu-a"),
            devices: vec![PlacedDevice { id: DeviceId::new(&self.device()).unwrap(), demand }],
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: Vec::new(),
        };
        let mut annotations = encode(&placement).unwrap();
        annotations.insert("gpu-fraction".to_owned(), "0.5".to_owned());
        json!({
            "metadata": {"name": self.name, "namespace": "team", "uid": self.uid, "annotations": annotations,
                "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"nodeName": "gpu-a", "schedulerName": "gpupack", "containers": [{"name": "c"}]},
            "status": {"phase": "Running"},
        })
    }
}

/// Who was there `ago` seconds ago, and what he did: `steady` computed until two hours ago and once used
/// more; half an hour ago `web-0` followed a larger pod of its name.
fn context(ago: u64) -> Vec<(&'static Tenant, DeviceUse)> {
    let mib = if (4 * HOUR..4 * HOUR + 120).contains(&ago) { 6_000 } else { 1_000 };
    let steady = STEADY.seen(mib, if ago > 2 * HOUR { 40 } else { 0 });
    let web = if ago > HOUR / 2 {
        (&WEB_BEFORE, WEB_BEFORE.seen(15_000, 90))
    } else {
        (&WEB, WEB.seen(900, 20))
    };
    vec![(&STEADY, steady), web]
}

/// The series of the node's agent, one scrape a minute for six hours, in the text format with times.
fn scrapes(now: u64) -> String {
    let (agent, mut text) = (AgentMetrics::new(), String::new());
    for minutes in (0..6 * 60).rev() {
        let ago = 60 * minutes;
        let (allocations, uses): (Vec<_>, Vec<_>) =
            context(ago).into_iter().map(|(tenant, seen)| (tenant.allocation(), seen)).unzip();
        let sample = Sample {
            inventory: [].into(),
            uses,
            driver: None,
            xids: Default::default(),
            unreadable: 0,
            has_unwatched_pods: false,
            draining: std::collections::BTreeSet::new(),
            mig_failures: Vec::new(),
            memory_limits: None,
            containers: [].into(),
        };
        agent.show("gpu-a", &sample, &allocations);
        let scrape = String::from_utf8(agent.text()).unwrap();
        for line in scrape.lines().filter(|line| line.starts_with("gpupack_tenant_")) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let labels = series.replacen('{', "{job=\"gpupack-agent\",instance=\"a:9410\",", 1);
            writeln!(text, "{labels} {value} {}", now - ago).unwrap();
        }
    }
    text + "# EOF\n"
}

/// Makes a storage of these scrapes.
fn store(folder: &Path) {
    let text = folder.join("scrapes");
    fs::write(&text, scrapes(Clock::start().unix_seconds())).unwrap();
    let made = Command::new("promtool")
        .args(["tsdb", "create-blocks-from", "openmetrics"])
        .args([&text, &folder.join("data")])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    fs::write(folder.join("prometheus.yaml"), "global: {}\n").unwrap();
}

/// Prometheus over that storage.
fn prometheus(folder: &Path, port: u16) -> Running {
    let child = Command::new("prometheus")
        .arg(format!("--config.file={}", folder.join("prometheus.yaml").display()))
        .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .stdout(Stdio::null())
        .stderr(fs::File::create(folder.join("prometheus.log")).unwrap())
        .spawn();
    let running = Running(child.unwrap());
    until("Prometheus is ready", || {
        exchange(port, "GET", "/-/ready", "").filter(|answer| answer.0 == 200)
    });
    running
}

/// An API server with the node and its pods; nothing ever changes.
fn api_server() -> Router {
    let list = |kind: &'static str, items: Vec<Value>| {
        get(move |RawQuery(query): RawQuery| async move {
            if query.is_some_and(|query| query.contains("watch=true") || query.contains("watch=1"))
            {
                let silence = futures::stream::pending::<Result<Bytes, Infallible>>();
                return Body::from_stream(silence);
            }
            let list = json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items});
            Body::from(list.to_string())
        })
    };
    let node = json!({"metadata": {"name": "gpu-a", "resourceVersion": "1", "labels": {"gpupack.dev/pool": "p"}},
        "status": {"allocatable": {"cpu": "64", "memory": "256Gi"}}});
    let pods = [&STEADY, &WEB, &UNKNOWN].map(Tenant::object);
    Router::new()
        .route("/api/v1/pods", list("PodList", pods.into()))
        .route("/api/v1/nodes", list("NodeList", vec![node]))
        .fallback(|| async {
            (StatusCode::NOT_FOUND, Json(json!({"kind": "Status", "code": 404})))
        })
}

/// A new extender with that API server, to which the node's agent has reported.
fn extender(folder: &Path, prometheus: u16) -> (Running, u16) {
    let (agents, page, metrics) = (free_port(), free_port(), free_port());
    let config = format!(
        "listen: 127.0.0.1:0\nagents_listen: 127.0.0.1:{agents}\npage_listen: 127.0.0.1:{page}\n\
         metrics_listen: 127.0.0.1:{metrics}\nkubeconfig: {}\nreport_stale_seconds: 600\n\
         advice: {{ prometheus_url: 'http://127.0.0.1:{prometheus}' }}\n",
        folder.join("kubeconfig").display()
    );
    fs::write(folder.join("gpupack.yaml"), config).unwrap();
    let log = fs::File::create(folder.join("gpupack.log")).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_gpupack"))
        .args(["extender", "--config", &folder.join("gpupack.yaml").display().to_string()])
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn();
    let running = Running(child.unwrap());
    let mut report = hello("gpu-a", "Tesla T4", 15_360, 3);
    let now: Vec<Value> =
        context(0).iter().map(|(_, seen)| serde_json::to_value(seen).unwrap()).collect();
    let devices = report["devices"].as_array_mut().unwrap();
    devices.splice(0..2, now);
    let report = report.to_string();
    until("the report is taken", || {
        exchange(agents, "PUT", "/v1/nodes/gpu-a/report", &report).filter(|answer| answer.0 == 200)
    });
    let is_ready = || exchange(metrics, "GET", "/readyz", "").filter(|answer| answer.0 == 200);
    until("it is ready", is_ready);
    (running, page)
}

fn advice(page: u16) -> Value {
    read(exchange(page, "GET", "/v1/advise", "").unwrap().1.as_bytes())
}

/// The advice as soon as Prometheus has answered: what happened before the process started.
fn knows_what_was(page: u16) {
    let advice =
        until("history is known", || Some(advice(page)).filter(|it| it["watchedPods"] == 2));
    let of = |name: &str| {
        let pods = advice["pods"].as_array().unwrap();
        pods.iter()
            .find(|it| it["pod"] == format!("team/{name}"))
            .unwrap_or_else(|| panic!("{name}: {advice}"))
    };
    let figure =
        |pod: &Value, key: &str| pod[key].as_u64().unwrap_or_else(|| panic!("{key}: {pod}"));
    let steady = of("steady");
    assert_eq!((figure(steady, "peakMib"), &steady["idle"]), (6_000, &json!(true)), "{steady}");
    assert!((6_600..7_800).contains(&figure(steady, "idleSeconds")), "{steady}");
    assert!((20_000..22_200).contains(&figure(steady, "watchedSeconds")), "{steady}");
    assert!(
        (250_000..285_000).contains(&figure(steady, "meanLoadMillionths")),
        "40 % for two thirds: {steady}"
    );
    assert_eq!(figure(steady, "medianUseMillionths"), 187_500, "1,000 of 7,680 MiB in sixteenths");
    let web = of("web-0");
    assert_eq!(
        (figure(web, "peakMib"), &web["idle"]),
        (900, &json!(false)),
        "not its predecessor's: {web}"
    );
    assert!((1_200..2_200).contains(&figure(web, "watchedSeconds")), "{web}");
    assert_eq!(figure(web, "meanLoadMillionths"), 200_000, "{web}");
    let pool = &advice["pools"][0];
    assert_eq!((&pool["pool"], &pool["tenants"]), (&json!("p"), &json!(2)), "{pool}");
    assert_eq!(
        (&pool["replicasByMemory"], &pool["replicasByLoad"]),
        (&json!(2), &json!(3)),
        "{pool}"
    );
    assert_eq!((&pool["replicas"], &pool["limitedBy"]), (&json!(2), &json!("Memory")), "{pool}");
}

#[test]
fn a_restarted_extender_reads_usage_history_from_prometheus() {
    if !has("prometheus") || !has("promtool") {
        let why = "`prometheus` is not installed (Debian: prometheus)";
        let _shown =
            writeln!(std::io::stderr(), "skipped: history from a real Prometheus because {why}");
        return;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let api = runtime.block_on(served(api_server()));
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{api}")}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    fs::write(folder.path().join("kubeconfig"), kubeconfig.to_string()).unwrap();
    let port = free_port();
    store(folder.path());
    let running = prometheus(folder.path(), port);
    for _ in 0..2 {
        let (mut killed, extender) = extender(folder.path(), port);
        knows_what_was(extender);
        killed.0.kill().unwrap();
    }
    drop(running);
    let (_running, extender) = extender(folder.path(), port);
    let log = || fs::read_to_string(folder.path().join("gpupack.log")).unwrap();
    until("the log names it", || log().contains("gpupack queries it again").then_some(()));
    assert_eq!(advice(extender)["watchedPods"], 0, "all else goes on");
    let _running_again = prometheus(folder.path(), port);
    knows_what_was(extender);
    until("the log tells it", || {
        log().contains("read from Prometheus what pods used").then_some(())
    });
}
