//! An extender behind its router, and the recorded bodies: what the HTTP tests share.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use cli::demo::api_server::ApiServer;
use cli::serve::extender::settings;
use control::shared::app::App;
use engine::ledger::nodes::state::{Ledger, Settings};
use http_body_util::BodyExt;
use kube_api::config::file::Config;
use runtime::clock::Clock;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use server::api::server::{Listeners, router, serve_apart};
use server::page::service::Service;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower::ServiceExt;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::{HostAmount, MemMib, MilliCpu};

/// Where a replica answers, as plain addresses without a final slash.
pub(crate) struct Addresses {
    pub(crate) verbs: String,
    pub(crate) page: String,
}

/// An extender of an API server in memory.
pub(crate) struct Bed {
    pub(crate) app: Arc<App>,
    pub(crate) api: ApiServer,
    pub(crate) service: Service,
}

pub(crate) fn data(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/data/extender/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).expect(&path)
}

impl Bed {
    /// Its routes.
    pub(crate) fn router(&self) -> Router {
        router(self.service.clone())
    }

    /// An extender that knows no node and has listed nothing.
    pub(crate) fn cold() -> Self {
        Self::cold_with(Config::default())
    }

    fn cold_with(config: Config) -> Self {
        let mut config = Config { max_body_bytes: 1 << 20, ..config };
        config.scheduler_names.push("gpu-scheduler".to_owned()); // that of the recorded bodies
        let clock = Clock::start();
        let stale_after = Duration::from_secs(3_600);
        let settings = Settings { stale_after, first_session: 100, ..settings(&config, &clock) };
        let ledger = Arc::new(Ledger::new(settings));
        ledger.share_by(config.pools.clone());
        let api = ApiServer::default();
        let app = api.extender(ledger, config, clock);
        let set_log_level = Arc::new(|level: &str| match level {
            "info" | "debug" => Ok(()),
            _ => Err(format!("log level `{level}` is unknown")),
        });
        let service = Service::new(Arc::clone(&app), set_log_level);
        Self { app, api, service }
    }

    /// An extender with the nodes of the recorded bodies: `gpu-a` has a T4, `gpu-b` two A100 and
    /// `gpu-c` an L4.
    pub(crate) async fn warm() -> Self {
        Self::warm_with("").await
    }

    /// The same with pools in the configuration; each node is in a pool of its own name.
    pub(crate) async fn warm_with(config: &str) -> Self {
        let bed = Self::cold_with(Config::from_yaml(config).expect("a sound configuration"));
        for node in ["gpu-a", "gpu-b", "gpu-c"] {
            let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(256 << 10) };
            bed.app.ledger.see_node(&NodeName::new(node), host, PoolName::new(node));
        }
        bed.app.ledger.set_listed(bed.app.clock.now());
        bed.app.lead.set_fenced();
        for (node, model, memory, count) in [
            ("gpu-a", "Tesla T4", 15_360, 1),
            ("gpu-b", "NVIDIA A100-SXM4-80GB", 81_920, 2),
            ("gpu-c", "NVIDIA L4", 23_034, 1),
        ] {
            let report = hello(node, model, memory, count);
            let (status, reply) = bed.report(node, &report).await;
            assert_eq!(status, StatusCode::OK, "{reply}");
        }
        bed
    }

    /// Serves on the loopback until the sender says so: the addresses of verbs and page.
    pub(crate) async fn serve(&self) -> (Addresses, watch::Sender<bool>) {
        let (addresses, _, stop) = self.serve_all().await;
        (addresses, stop)
    }

    /// The same with the addresses for agents and of metrics.
    pub(crate) async fn serve_all(&self) -> (Addresses, [String; 2], watch::Sender<bool>) {
        let listeners = listeners().await;
        let url = |it: &TcpListener| format!("http://{}", it.local_addr().expect("it listens"));
        let addresses = Addresses { verbs: url(&listeners.verbs), page: url(&listeners.page) };
        let others = [url(&listeners.agents), url(&listeners.metrics)];
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(serve_apart(self.service.clone(), listeners, None, stopped));
        (addresses, others, stop)
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: impl Into<Body>,
    ) -> (StatusCode, Vec<u8>) {
        let request = Request::builder().method(method).uri(path);
        let request = request.header("content-type", "application/json").body(body.into());
        let request = request.expect("a request of constants");
        let answer = self.router().oneshot(request).await.expect("a router cannot fail");
        let status = answer.status();
        (status, answer.into_body().collect().await.expect("a whole body").to_bytes().to_vec())
    }

    /// Creates the pod of a call, as the API server has it before kube-scheduler calls.
    fn create_called(&self, body: &[u8]) {
        let call: Value = serde_json::from_slice(body).unwrap_or_default();
        let pod =
            ["Pod", "pod"].into_iter().find_map(|key| call.get(key).filter(|it| it.is_object()));
        let Some(pod) = pod else { return };
        let uid = PodUid::new(pod["metadata"]["uid"].as_str().unwrap_or_default());
        let known = self.api.pod(&uid).and_then(|known| known.spec?.node_name);
        if known.is_none() {
            self.api.put(pod.clone());
        }
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<Vec<u8>>) -> (StatusCode, Value) {
        let body = body.into();
        if ["/v1/filter", "/v1/prioritize"].contains(&path) {
            self.create_called(&body);
        }
        let (status, body) = self.send(Method::POST, path, body).await;
        (status, read(&body))
    }

    pub(crate) async fn get(&self, path: &str) -> (StatusCode, String) {
        let (status, body) = self.send(Method::GET, path, Body::empty()).await;
        (status, String::from_utf8(body).expect("answers are text"))
    }

    pub(crate) async fn report(&self, node: &str, report: &Value) -> (StatusCode, Value) {
        let path = format!("/v1/nodes/{node}/report");
        let (status, body) = self.send(Method::PUT, &path, report.to_string()).await;
        (status, read(&body))
    }

    /// Everything in the ledger.
    pub(crate) async fn state(&self) -> Value {
        self.app.ledger.audit().expect("the sums are right");
        read(self.get("/v1/state").await.1.as_bytes())["nodes"].take()
    }

    pub(crate) async fn filter(&self, pod: Value, nodes: &[&str]) -> Value {
        let body = json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}).to_string();
        let (status, answer) = self.post("/v1/filter", body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        answer
    }
}

/// Listeners on free ports of the loopback interface.
pub(crate) async fn listeners() -> Listeners {
    let bind = async || TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let (verbs, agents) = (bind().await, bind().await);
    Listeners { verbs, agents, page: bind().await, metrics: bind().await }
}

/// Reads a body as the type that declares it, which must have all its fields and no other.
pub(crate) fn is_declared<T: DeserializeOwned + Serialize>(body: &[u8]) -> T {
    let text = String::from_utf8_lossy(body);
    let found: T = serde_json::from_slice(body).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(serde_json::to_value(&found).expect("it came from JSON"), read(body));
    found
}

pub(crate) fn read(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(body)))
}

pub(crate) fn hello(node: &str, model: &str, memory_mib: u64, count: u32) -> Value {
    let uuid = |index| format!("GPU-{node}-{index}");
    let inventory = (0..count).map(|index| {
        json!({"id": uuid(index), "index": index, "model": model, "memoryMib": memory_mib,
            "reservedMib": 0, "kind": "Gpu", "healthy": true})
    });
    let uses = (0..count)
        .map(|index| json!({"id": uuid(index), "usedMib": 0, "healthy": true, "processes": []}));
    json!({
        "apiVersion": "gpupack.dev/v1alpha1", "agent": format!("agent-of-{node}"), "sequence": 1,
        "inventory": inventory.collect::<Vec<_>>(), "devices": uses.collect::<Vec<_>>(),
    })
}

pub(crate) fn pod(uid: &str, annotations: Value) -> Value {
    json!({
        "metadata": {"name": uid, "namespace": "team", "uid": uid, "annotations": annotations},
        "spec": {"schedulerName": "gpupack", "containers": [{"name": "main"}]},
    })
}
