//! The HTTP surface as kube-scheduler, agents and operators meet it: every route, good and bad input.
//! The books themselves are the truth here, so nothing of Kubernetes is needed.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use gpupack::clock::Clock;
use gpupack::config::Config;
use gpupack::extender::app::{App, Truth};
use gpupack::extender::server::{Service, router};
use gpupack::ledger::books::{Ledger, Settings};
use gpupack::packing::device::{NodeName, PoolName};
use gpupack::packing::units::{HostAmount, MemMib, MilliCpu};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

/// Reasons are constant texts: kube-scheduler retries at full speed when one changes.
const NO_MEMORY: &str = "no single GPU has enough free memory";

struct Bed {
    app: Arc<App>,
    router: Router,
    levels: Arc<Mutex<Vec<String>>>,
}

fn data(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/data/extender/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).expect(&path)
}

impl Bed {
    /// An extender that knows no node and has listed nothing.
    fn cold() -> Self {
        let config = Config { max_body_bytes: 1 << 20, ..Config::default() };
        let settings = Settings {
            claim_for: config.claim_for,
            stale_after: Duration::from_secs(3_600),
            drain_limit: config.drain_limit,
            warm_up: config.warm_up,
            unmanaged_tolerance: config.unmanaged_tolerance,
            first_session: 100,
        };
        let ledger = Arc::new(Ledger::new(settings));
        let app = Arc::new(App::new(ledger, Clock::start(), config, Truth::Books));
        let levels: Arc<Mutex<Vec<String>>> = Arc::default();
        let set = Arc::clone(&levels);
        let set_log_level = Arc::new(move |level: &str| match level {
            "info" | "debug" => {
                set.lock().unwrap().push(level.to_owned());
                Ok(())
            }
            _ => Err(format!("log level `{level}` is unknown")),
        });
        let router = router(Service { app: Arc::clone(&app), set_log_level });
        Self { app, router, levels }
    }

    /// An extender with the nodes of the recorded bodies: `gpu-a` has a T4, `gpu-b` two A100 and
    /// `gpu-c` an L4.
    async fn warm() -> Self {
        let bed = Self::cold();
        for node in ["gpu-a", "gpu-b", "gpu-c"] {
            let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(256 << 10) };
            bed.app.ledger.see_node(&NodeName::new(node), host, PoolName::new(""));
        }
        bed.app.ledger.set_listed(bed.app.clock.now());
        bed.app.set_fenced();
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

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: impl Into<Body>,
    ) -> (StatusCode, Vec<u8>) {
        let request = Request::builder().method(method).uri(path).body(body.into()).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        let status = answer.status();
        (status, answer.into_body().collect().await.unwrap().to_bytes().to_vec())
    }

    async fn post(&self, path: &str, body: impl Into<Body>) -> (StatusCode, Value) {
        let (status, body) = self.send(Method::POST, path, body).await;
        (status, read(&body))
    }

    async fn get(&self, path: &str) -> (StatusCode, String) {
        let (status, body) = self.send(Method::GET, path, Body::empty()).await;
        (status, String::from_utf8(body).unwrap())
    }

    async fn report(&self, node: &str, report: &Value) -> (StatusCode, Value) {
        let path = format!("/v1/nodes/{node}/report");
        let (status, body) = self.send(Method::PUT, &path, report.to_string()).await;
        (status, read(&body))
    }

    /// Everything in the books.
    async fn books(&self) -> Value {
        self.app.ledger.audit().unwrap();
        read(self.get("/v1/state").await.1.as_bytes())["nodes"].take()
    }

    async fn filter(&self, pod: Value, nodes: &[&str]) -> Value {
        let body = json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}).to_string();
        let (status, answer) = self.post("/v1/filter", body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        answer
    }
}

fn read(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(body)))
}

fn hello(node: &str, model: &str, memory_mib: u64, count: u32) -> Value {
    let uuid = |index| format!("GPU-{node}-{index}");
    let inventory = (0..count).map(|index| {
        json!({"uuid": uuid(index), "index": index, "model": model, "memory_mib": memory_mib,
            "reserved_mib": 0, "kind": "gpu", "healthy": true})
    });
    let uses = (0..count)
        .map(|index| json!({"uuid": uuid(index), "used_mib": 0, "healthy": true, "processes": []}));
    json!({
        "schema_version": 1, "agent": format!("agent-of-{node}"), "sequence": 1,
        "inventory": inventory.collect::<Vec<_>>(), "devices": uses.collect::<Vec<_>>(),
    })
}

fn pod(uid: &str, annotations: Value) -> Value {
    json!({
        "metadata": {"name": uid, "namespace": "team", "uid": uid, "annotations": annotations},
        "spec": {"schedulerName": "gpupack", "containers": [{"name": "main"}]},
    })
}

#[tokio::test]
async fn a_recorded_pod_is_filtered_prioritized_and_bound() {
    let bed = Bed::warm().await;
    let (status, answer) = bed.post("/v1/filter", data("filter.json")).await;
    let expected = json!({
        "Nodes": null, "NodeNames": ["gpu-b"], "FailedNodes": {},
        "FailedAndUnresolvableNodes": {
            "gpu-a": "GPU model is excluded by the pod", "gpu-c": "GPU model is excluded by the pod",
        },
        "Error": "",
    });
    assert_eq!((status, answer), (StatusCode::OK, expected));
    let (status, scores) = bed.post("/v1/prioritize", data("filter.json")).await;
    let expected = json!([
        {"Host": "gpu-c", "Score": 0}, {"Host": "gpu-a", "Score": 0}, {"Host": "gpu-b", "Score": 100},
    ]);
    assert_eq!((status, scores), (StatusCode::OK, expected));
    for attempt in ["first", "repeated"] {
        let (status, answer) = bed.post("/v1/bind", data("bind.json")).await;
        assert_eq!((status, answer), (StatusCode::OK, json!({"Error": ""})), "{attempt}");
        let node = bed.app.ledger.node("gpu-b").unwrap();
        let held: Vec<_> = node.reservations().values().collect();
        assert_eq!(held.len(), 1);
        assert_eq!(held[0].placement.devices[0].demand.memory, MemMib::new(40_960));
        assert!(node.claims().is_empty());
    }
    let elsewhere = String::from_utf8(data("bind.json")).unwrap().replace("gpu-b", "gpu-a");
    let (_, answer) = bed.post("/v1/bind", elsewhere).await;
    assert!(!answer["Error"].as_str().unwrap().is_empty(), "{answer}");
    bed.app.ledger.audit().unwrap();
}

#[tokio::test]
async fn any_casing_of_the_outer_fields_is_read() {
    let bed = Bed::warm().await;
    let body = json!({"pod": pod("a", json!({"gpu-fraction": "0.5"})), "nodenames": ["gpu-c"]});
    let (status, answer) = bed.post("/v1/filter", body.to_string()).await;
    assert_eq!((status, &answer["NodeNames"]), (StatusCode::OK, &json!(["gpu-c"])));
    let body = json!({"podName": "a", "podnamespace": "team", "PODUID": "a", "node": "gpu-c"});
    assert_eq!(bed.post("/v1/bind", body.to_string()).await.1, json!({"Error": ""}));
}

#[tokio::test]
async fn every_dropped_node_is_in_exactly_one_map() {
    let bed = Bed::warm().await;
    let nodes = ["nowhere", "gpu-a", "gpu-b", "gpu-c", "elsewhere"];
    let answer = bed.filter(pod("a", json!({"gpu-memory": "20000"})), &nodes).await;
    let passed = answer["NodeNames"].as_array().unwrap();
    let failed = answer["FailedNodes"].as_object().unwrap();
    let unresolvable = answer["FailedAndUnresolvableNodes"].as_object().unwrap();
    assert!(failed.is_empty(), "kube-scheduler would retry these without a pause");
    for node in nodes {
        let is_passed = passed.contains(&node.into());
        assert_ne!(is_passed, unresolvable.contains_key(node), "{node}");
    }
    let unknown = "node is not known to gpupack: no agent has reported it";
    assert_eq!(
        (&unresolvable["nowhere"], &unresolvable["elsewhere"]),
        (&unknown.into(), &unknown.into())
    );
    assert_eq!(unresolvable["gpu-a"], "request exceeds the memory of every GPU of the node");
    let none = bed.filter(pod("b", json!({"gpu-fraction": "0.5"})), &[]).await;
    assert_eq!((&none["NodeNames"], &none["Error"]), (&json!([]), &json!("")));
}

#[tokio::test]
async fn bodies_that_are_no_questions_are_refused_and_change_nothing() {
    let bed = Bed::warm().await;
    let before = bed.books().await;
    let whole = data("filter.json");
    let deep = format!(r#"{{"Pod":{}{},"NodeNames":[]}}"#, "[".repeat(4_000), "]".repeat(4_000));
    let deep_labels = format!(
        r#"{{"Pod":{{"metadata":{{"uid":"a","name":"b","namespace":"c","x":{}1{}}}}},"NodeNames":[]}}"#,
        r#"{"a":"#.repeat(3_000),
        "}".repeat(3_000)
    );
    let mut not_utf8 = whole.clone();
    not_utf8[20] = 0xff;
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", Vec::new(), "cannot be read"),
        ("not JSON", b"<html>".to_vec(), "cannot be read"),
        ("truncated", whole[..whole.len() / 2].to_vec(), "cannot be read"),
        ("no pod", br#"{"NodeNames":[]}"#.to_vec(), "no `Pod`"),
        ("twice", br#"{"Pod":{},"pod":{}}"#.to_vec(), "duplicate field"),
        ("a list", b"[]".to_vec(), "cannot be read"),
        ("a pod without UID", br#"{"Pod":{"metadata":{"name":"a"}}}"#.to_vec(), "metadata.uid"),
        ("deep", deep.into_bytes(), "deep"),
        ("deep in a pod", deep_labels.into_bytes(), "deep"),
        ("not UTF-8", not_utf8, "not UTF-8 from byte `20`"),
    ];
    for verb in ["filter", "prioritize"] {
        for (name, body, part) in &cases {
            let (status, answer) = bed.post(&format!("/v1/{verb}"), body.clone()).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{verb} {name}: {answer}");
            assert!(answer["error"].as_str().unwrap().contains(part), "{verb} {name}: {answer}");
        }
    }
    for (name, body) in [
        ("empty", "{}"),
        ("no node", r#"{"PodName":"a","PodNamespace":"b","PodUID":"c"}"#),
        ("empty node", r#"{"PodName":"a","PodNamespace":"b","PodUID":"c","Node":""}"#),
        ("numbers", r#"{"PodName":1}"#),
    ] {
        let (status, answer) = bed.post("/v1/bind", body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{name}: {answer}");
    }
    assert_eq!(bed.books().await, before);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_413_and_one_below_is_read() {
    let bed = Bed::warm().await;
    let names: Vec<String> = (0..60_000).map(|number| format!("node-{number:015}")).collect();
    let long = json!({"Pod": pod("a", json!({"gpu-fraction": "1"})), "NodeNames": names});
    let (status, _) = bed.send(Method::POST, "/v1/filter", long.to_string()).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let names = &names[..40_000];
    let fits = json!({"Pod": pod("a", json!({"gpu-fraction": "1"})), "NodeNames": names});
    let (status, answer) = bed.post("/v1/filter", fits.to_string()).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(answer["FailedAndUnresolvableNodes"].as_object().unwrap().len(), 40_000);
    let report = vec![b' '; 9 << 20];
    let (status, _) = bed.send(Method::PUT, "/v1/nodes/gpu-a/report", report).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn what_is_not_there_is_404_and_a_wrong_method_405() {
    let bed = Bed::warm().await;
    let (status, answer) = bed.post("/v1/preempt-everything", "{}").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(answer["error"].as_str().unwrap().contains("`preempt-everything` is unknown"));
    assert_eq!(bed.get("/nowhere").await.0, StatusCode::NOT_FOUND);
    for (method, path) in [
        (Method::GET, "/v1/filter"),
        (Method::POST, "/v1/state"),
        (Method::DELETE, "/"),
        (Method::POST, "/v1/nodes/gpu-a/report"),
    ] {
        let (status, _) = bed.send(method, path, Body::empty()).await;
        assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED, "{path}");
    }
}

#[tokio::test]
async fn each_faulty_request_has_its_constant_reason_on_every_node() {
    let bed = Bed::warm().await;
    let before = bed.books().await;
    let nodes = ["gpu-a", "gpu-b", "gpu-c"];
    for (annotations, reason) in [
        (json!({"gpu-fraction": "1.5"}), "a fraction is not a decimal in (0, 1]"),
        (json!({"gpu-fraction": "0"}), "a fraction is not a decimal in (0, 1]"),
        (json!({"gpu-fraction": "NaN"}), "a fraction is not a decimal in (0, 1]"),
        (json!({"gpu-memory": "-1"}), "memory is not a whole number of MiB"),
        (json!({"gpu-memory": "8Gi"}), "memory is not a whole number of MiB"),
        (
            json!({"gpu-memory": "8", "gpu-memory.limit": "9 apples"}),
            "memory is not a quantity with a unit",
        ),
        (
            json!({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "65"}),
            "the device count is out of range",
        ),
        (
            json!({"gpu-fraction": "0.5", "gpu-fraction-container-name": "sidecar"}),
            "it names a container that the pod does not have",
        ),
        (
            json!({"gpu-fraction": "0.5", "gpupack.dev/gpu-model": "|"}),
            "the model filter names no model",
        ),
        (json!({"gpu-fraction": "0.5", "gpupack.dev/policy": "best"}), "the policy is unknown"),
        (json!({"gpu-fraction": "0.5", "gpupack.dev/isolation": "x"}), "the isolation is unknown"),
        (
            json!({"gpu-fraction": "0.5", "gpu-fraction.limit": "0.4"}),
            "a limit is below its request",
        ),
        (
            json!({"gpu-fraction": "0.5", "gpu-memory.limit": "8Gi"}),
            "a limit has no request of its style",
        ),
        (json!({"gpupack.dev/policy": "binpack"}), "a key qualifies a request that is missing"),
        (
            json!({"gpu-fraction": "0.5", "gpu-fraction.limit": "0.6", "gpu-fraction-limit": "0.7"}),
            "two annotations disagree",
        ),
        (json!({"gpu-fractions": "0.5"}), "an annotation is unknown"),
        (json!({"gpupack.dev/polizy": "binpack"}), "an annotation is unknown"),
        (
            json!({"placed.gpupack.dev/placement": "{}"}),
            "it carries a key that only gpupack writes",
        ),
    ] {
        let answer = bed.filter(pod("a", annotations.clone()), &nodes).await;
        assert_eq!((&answer["NodeNames"], &answer["Error"]), (&json!([]), &json!("")));
        for node in nodes {
            let expected = format!("GPU request refused: {reason}");
            assert_eq!(answer["FailedAndUnresolvableNodes"][node], expected, "{annotations}");
        }
    }
    for (limits, reason) in [
        (json!({"nvidia.com/gpu": "0.5"}), "a GPU resource of a container is out of range"),
        (
            json!({"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": "1"}),
            "it asks for several kinds of GPU or in several containers",
        ),
    ] {
        let mut asks = pod("a", json!({}));
        asks["spec"]["containers"][0]["resources"] = json!({"limits": limits});
        let answer = bed.filter(asks, &nodes).await;
        let expected = format!("GPU request refused: {reason}");
        assert_eq!(answer["FailedAndUnresolvableNodes"]["gpu-b"], expected);
    }
    let mut both = pod("a", json!({"gpu-fraction": "0.5"}));
    both["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/gpu": "1"}});
    let answer = bed.filter(both, &nodes).await;
    let expected = "GPU request refused: it asks for part of a GPU and for whole devices";
    assert_eq!(answer["FailedAndUnresolvableNodes"]["gpu-b"], expected);
    assert_eq!(bed.books().await, before);
    let (_, metrics) = bed.get("/metrics").await;
    assert!(metrics.contains(r#"gpupack_refusals_total{reason="bad_request"} 21"#), "{metrics}");
}

#[tokio::test]
async fn before_it_is_ready_it_says_error_and_nothing_else() {
    let bed = Bed::cold();
    let (status, answer) = bed.post("/v1/filter", data("filter.json")).await;
    assert_eq!(status, StatusCode::OK);
    assert!(answer["Error"].as_str().unwrap().starts_with("gpupack is warming up"));
    assert_eq!((&answer["NodeNames"], &answer["Nodes"]), (&Value::Null, &Value::Null));
    let (status, scores) = bed.post("/v1/prioritize", data("filter.json")).await;
    assert_eq!((status, scores.as_array().unwrap().len()), (StatusCode::OK, 3));
    assert!(scores.as_array().unwrap().iter().all(|score| score["Score"] == 0));
    let (status, answer) = bed.post("/v1/bind", data("bind.json")).await;
    assert_eq!((status, answer), (StatusCode::OK, json!({"Error": "gpupack is warming up"})));
    let (status, refusal) = bed.report("gpu-a", &hello("gpu-a", "Tesla T4", 15_360, 1)).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{refusal}");
    assert_eq!(bed.get("/readyz").await.0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(bed.get("/healthz").await, (StatusCode::OK, "ok\n".to_owned()));
    assert!(bed.get("/v1/summary").await.1.contains(r#""readiness":"not_listed""#));
}

#[tokio::test]
async fn binds_that_do_not_fit_say_why_and_book_nothing() {
    let bed = Bed::warm().await;
    let bind = |uid: &str, node: &str| {
        json!({"PodName": uid, "PodNamespace": "team", "PodUID": uid, "Node": node}).to_string()
    };
    let (_, answer) = bed.post("/v1/bind", bind("never-seen", "gpu-a")).await;
    assert_eq!(answer["Error"], "pod `team/never-seen` with this UID is gone");
    let before = bed.books().await;
    bed.filter(pod("large", json!({"gpu-memory": "20000"})), &["gpu-a", "gpu-b", "gpu-c"]).await;
    let (_, answer) = bed.post("/v1/bind", bind("large", "gpu-a")).await;
    assert_eq!(answer["Error"], "request exceeds the memory of every GPU of the node");
    let (_, answer) = bed.post("/v1/bind", bind("large", "nowhere")).await;
    assert_eq!(answer["Error"], "node is not known to gpupack: no agent has reported it");
    assert_eq!(bed.books().await, before);
    assert_eq!(bed.post("/v1/bind", bind("large", "gpu-c")).await.1["Error"], "");
    bed.filter(pod("late", json!({"gpu-memory": "20000"})), &["gpu-c"]).await;
    assert_eq!(bed.post("/v1/bind", bind("late", "gpu-c")).await.1["Error"], NO_MEMORY);
}

#[tokio::test]
async fn a_pod_without_a_gpu_is_placed_by_its_processor_time_where_the_books_are_the_truth() {
    let bed = Bed::warm().await;
    let mut web = pod("web", json!({}));
    web["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "40"}});
    let answer = bed.filter(web.clone(), &["gpu-a", "gpu-b"]).await;
    assert_eq!(answer["NodeNames"], json!(["gpu-a", "gpu-b"]));
    let bind = json!({"PodName": "web", "PodNamespace": "team", "PodUID": "web", "Node": "gpu-a"});
    assert_eq!(bed.post("/v1/bind", bind.to_string()).await.1, json!({"Error": ""}));
    assert_eq!(bed.app.ledger.node("gpu-a").unwrap().host_free().cpu, MilliCpu::new(24_000));
    web["metadata"]["uid"] = "web-2".into();
    let answer = bed.filter(web, &["gpu-a", "gpu-b"]).await;
    assert_eq!(answer["NodeNames"], json!(["gpu-b"]));
    assert_eq!(answer["FailedAndUnresolvableNodes"]["gpu-a"], "node has too little free CPU");
}

#[tokio::test]
async fn full_node_objects_are_answered_without_a_trace() {
    let bed = Bed::warm().await;
    let before = bed.books().await;
    let node = |name: &str, labels: Value, gpus: &str| {
        json!({"metadata": {"name": name, "labels": labels},
            "status": {"allocatable": {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": gpus}}})
    };
    let template = |memory: &str, product: &str| {
        json!({"nvidia.com/gpu.count": "4", "nvidia.com/gpu.memory": memory,
            "nvidia.com/gpu.product": product})
    };
    let items = json!([
        node("gpu-b", json!({}), "0"),
        node("gpu-a", json!({}), "0"),
        node("new-large", template("81920", "NVIDIA-A100-SXM4-80GB"), "4"),
        node("new-small", template("15360", "Tesla-T4"), "4"),
        node("new-unlabelled", json!({}), "4"),
    ]);
    let asks = pod("a", json!({"gpu-memory": "20000", "gpupack.dev/gpu-model": "A100|T4"}));
    let body = json!({"Pod": asks, "Nodes": {"items": items}, "NodeNames": null}).to_string();
    let (status, answer) = bed.post("/v1/filter", body.clone()).await;
    assert_eq!((status, &answer["NodeNames"]), (StatusCode::OK, &Value::Null));
    let passed = answer["Nodes"]["items"].as_array().unwrap();
    assert_eq!(passed, &[items[0].clone(), items[2].clone()], "objects are sent back unchanged");
    let too_large = "request exceeds the memory of every GPU of the node";
    let expected = json!({
        "gpu-a": too_large, "new-small": too_large, "new-unlabelled": "node has no GPU",
    });
    assert_eq!(answer["FailedAndUnresolvableNodes"], expected);
    let (status, scores) = bed.post("/v1/prioritize", body).await;
    assert_eq!((status, scores.as_array().unwrap().len()), (StatusCode::OK, 5));
    assert_eq!(bed.books().await, before, "no claim, no booking, no node");
    assert!(bed.get("/v1/summary").await.1.contains(r#""waiting":0"#), "nobody waits by it");
    assert_eq!(bed.app.ledger.claim_count(), 0);
}

#[tokio::test]
async fn reports_that_are_not_believed_have_their_status_and_change_nothing() {
    let bed = Bed::warm().await;
    let before = bed.books().await;
    let good = hello("gpu-a", "Tesla T4", 15_360, 1);
    let with = |change: &dyn Fn(&mut Value)| {
        let mut report = good.clone();
        report["agent"] = "another".into();
        change(&mut report);
        report
    };
    let unprocessable = StatusCode::UNPROCESSABLE_ENTITY;
    for (name, node, report, status, part) in [
        ("unknown node", "nowhere", good.clone(), StatusCode::NOT_FOUND, "`nowhere` is not known"),
        (
            "absurd memory",
            "gpu-a",
            with(&|r| r["inventory"][0]["memory_mib"] = json!(u64::MAX)),
            unprocessable,
            "",
        ),
        (
            "a reserve beyond the memory",
            "gpu-a",
            with(&|r| r["inventory"][0]["reserved_mib"] = json!(15_361)),
            unprocessable,
            "",
        ),
        (
            "absurd use",
            "gpu-a",
            with(&|r| r["devices"][0]["used_mib"] = json!(u64::MAX)),
            unprocessable,
            "",
        ),
        (
            "busier than time",
            "gpu-a",
            with(&|r| r["devices"][0]["busy_percent"] = json!(101)),
            unprocessable,
            "101",
        ),
        (
            "a negative number",
            "gpu-a",
            with(&|r| r["devices"][0]["used_mib"] = json!(-1)),
            unprocessable,
            "devices[0].used_mib",
        ),
        (
            "a UUID twice",
            "gpu-a",
            with(&|r| {
                let first = r["inventory"][0].clone();
                r["inventory"].as_array_mut().unwrap().push(first);
            }),
            unprocessable,
            "GPU-gpu-a-0",
        ),
        (
            "a UUID of another node",
            "gpu-a",
            with(&|r| r["inventory"][0]["uuid"] = json!("GPU-gpu-b-0")),
            unprocessable,
            "belongs to node `gpu-b`",
        ),
        (
            "hello without inventory",
            "gpu-a",
            with(&|r| r["inventory"] = Value::Null),
            unprocessable,
            "must carry the inventory",
        ),
        (
            "an old session",
            "gpu-a",
            with(&|r| r["session"] = json!(7)),
            StatusCode::CONFLICT,
            "say hello",
        ),
        (
            "a far schema",
            "gpu-a",
            with(&|r| r["schema_version"] = json!(9)),
            unprocessable,
            "schema version `9`",
        ),
    ] {
        let (answered, refusal) = bed.report(node, &report).await;
        assert_eq!(answered, status, "{name}: {refusal}");
        assert!(refusal["error"].as_str().unwrap().contains(part), "{name}: {refusal}");
        if answered == StatusCode::CONFLICT {
            assert_eq!(refusal["reason"], "session_expired");
        }
        assert_eq!(bed.books().await, before, "{name}");
    }
    for body in [&b"{"[..], b"[]", b"\xff\xfe", b""] {
        let (status, _) = bed.send(Method::PUT, "/v1/nodes/gpu-a/report", body.to_vec()).await;
        assert_eq!(status, unprocessable);
    }
    assert_eq!(bed.books().await, before);
}

#[tokio::test]
async fn a_repeated_report_is_ignored_and_a_vanished_gpu_keeps_its_pod_booked() {
    let bed = Bed::warm().await;
    let (status, reply) = bed.report("gpu-b", &hello("gpu-b", "Other", 1, 2)).await;
    assert_eq!((status, &reply["outcome"]), (StatusCode::OK, &json!("ignored")));
    bed.post("/v1/filter", data("filter.json")).await;
    bed.post("/v1/bind", data("bind.json")).await;
    let node = bed.app.ledger.node("gpu-b").unwrap();
    let held = node.reservations().values().next().unwrap().placement.devices[0].id.to_string();
    let mut fewer = hello("gpu-b", "NVIDIA A100-SXM4-80GB", 81_920, 2);
    fewer["sequence"] = json!(2);
    fewer["session"] = reply["session"].clone();
    for list in ["inventory", "devices"] {
        fewer[list].as_array_mut().unwrap().retain(|device| device["uuid"] != *held);
    }
    let (status, reply) = bed.report("gpu-b", &fewer).await;
    assert_eq!((status, &reply["outcome"]), (StatusCode::OK, &json!("accepted")));
    assert_eq!(reply["bookings"][0]["devices"][0]["uuid"], *held);
    let node = bed.app.ledger.node("gpu-b").unwrap();
    assert_eq!((node.devices().len(), node.reservations().len()), (1, 1));
    bed.app.ledger.audit().unwrap();
}

#[tokio::test]
async fn a_waiting_pod_is_listed_and_explained() {
    let bed = Bed::warm().await;
    let nodes = ["gpu-a", "gpu-b", "gpu-c"];
    bed.filter(pod("huge", json!({"gpu-memory": "90000"})), &nodes).await;
    let (status, text) = bed.get("/v1/explain?pod=team/huge").await;
    let explanation = read(text.as_bytes());
    assert_eq!((status, &explanation["fitting_nodes"]), (StatusCode::OK, &json!(0)));
    assert_eq!(explanation["refusals"][0]["nodes"], 3);
    assert_eq!(explanation["mends"][0], "ask for 8080 MiB less memory");
    let summary = read(bed.get("/v1/summary").await.1.as_bytes());
    assert_eq!(summary["waiting"], 1);
    let waits = &summary["waiting_pods"][0];
    assert_eq!((&waits["pod"], &waits["asks"]), (&json!("team/huge"), &json!("90000 MiB")));
    assert_eq!(waits["reason"], "request exceeds the memory of every GPU of the node");
    for (path, status) in [
        ("/v1/explain", StatusCode::BAD_REQUEST),
        ("/v1/explain?pod=huge", StatusCode::BAD_REQUEST),
        ("/v1/explain?pod=team/nobody", StatusCode::NOT_FOUND),
        ("/v1/explain?pod=%ff/%fe", StatusCode::NOT_FOUND),
        ("/v1/state?node=nowhere", StatusCode::NOT_FOUND),
    ] {
        let (answered, text) = bed.get(path).await;
        assert_eq!(answered, status, "{path}: {text}");
    }
    bed.post("/v1/filter", data("filter.json")).await;
    bed.post("/v1/bind", data("bind.json")).await;
    let (_, text) = bed.get("/v1/explain?pod=team-a/infer-7f9c6d5b8-x2kqz").await;
    assert!(text.contains("placed on node gpu-b"), "{text}");
    let node = read(bed.get("/v1/state?node=gpu-b").await.1.as_bytes());
    assert_eq!(node["devices"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn operators_see_readiness_metrics_page_and_set_the_log_level() {
    let bed = Bed::warm().await;
    assert_eq!(bed.get("/readyz").await, (StatusCode::OK, "ready\n".to_owned()));
    bed.filter(pod("a", json!({"gpu-fraction": "0.5"})), &["gpu-a", "gpu-b"]).await;
    let (_, metrics) = bed.get("/metrics").await;
    for line in [
        "gpupack_ready 1",
        r#"gpupack_nodes{state="reporting"} 3"#,
        r#"gpupack_gpus{state="empty"} 4"#,
        r#"gpupack_reports_total{result="accepted"} 3"#,
        r#"gpupack_verb_duration_seconds_count{outcome="ok",verb="filter"} 1"#,
    ] {
        assert!(metrics.lines().any(|seen| seen == line), "{line} in {metrics}");
    }
    let (status, page) = bed.get("/").await;
    assert!(status.is_success() && page.contains("page.js"));
    assert_eq!(bed.get("/page.js").await.0, StatusCode::OK);
    let (status, _) = bed.send(Method::PUT, "/v1/log-level", "debug\n").await;
    assert_eq!(status, StatusCode::OK);
    let (status, body) = bed.send(Method::PUT, "/v1/log-level", "loud").await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(String::from_utf8(body).unwrap().contains("`loud`"));
    assert_eq!(*bed.levels.lock().unwrap(), ["debug"]);
}

#[tokio::test]
async fn the_page_loads_nothing_from_elsewhere_and_has_no_script_in_it() {
    let bed = Bed::cold();
    let request = Request::get("/").body(Body::empty()).unwrap();
    let answer = bed.router.clone().oneshot(request).await.unwrap();
    let policy = answer.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self'"));
    let (_, page) = bed.get("/").await;
    let (_, script) = bed.get("/page.js").await;
    for forbidden in ["http://", "https://", "innerHTML", "insertAdjacentHTML", "eval(", "onclick="]
    {
        assert!(!page.contains(forbidden) && !script.contains(forbidden), "{forbidden}");
    }
    assert!(!page.contains("<script>"));
    // Relative paths: the page also lives below a prefix, behind the API server's proxy.
    assert!(!page.contains("href=\"/") && !page.contains("src=\"/") && !script.contains("\"/v1"));
}
