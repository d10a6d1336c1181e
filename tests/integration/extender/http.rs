//! The verbs over HTTP as kube-scheduler calls them, with good and bad input. The API server is one in
//! memory, so no Kubernetes is needed.

use crate::harness::extender::{Bed, data, hello, is_declared, pod, read};
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use server::scheduler::verbs::{filter, prioritize};
use tower::ServiceExt;
use wire::api::error::{Error, ErrorReason};
use wire::ids::{NodeName, PoolName};
use wire::units::{HostAmount, MemMib, MilliCpu};

mod objects;
mod pools;

/// Reasons are constant texts: kube-scheduler retries at full speed when one changes.
const NO_MEMORY: &str = "insufficient GPU memory";

#[tokio::test]
async fn a_recorded_pod_is_filtered_prioritized_and_bound() {
    let bed = Bed::warm().await;
    let (status, answer) = bed.post("/v1/filter", data("filter.json")).await;
    let expected = json!({
        "Nodes": null, "NodeNames": ["gpu-b"], "FailedNodes": {},
        "FailedAndUnresolvableNodes": {
            "gpu-a": "no GPU of an allowed model", "gpu-c": "no GPU of an allowed model",
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
        assert!(node.holds().is_empty());
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
async fn every_rejected_node_is_in_exactly_one_map() {
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
    let unknown = "no GPU agent on the node";
    assert_eq!(
        (&unresolvable["nowhere"], &unresolvable["elsewhere"]),
        (&unknown.into(), &unknown.into())
    );
    assert_eq!(unresolvable["gpu-a"], "request exceeds the memory of every GPU");
    let none = bed.filter(pod("b", json!({"gpu-fraction": "0.5"})), &[]).await;
    assert_eq!((&none["NodeNames"], &none["Error"]), (&json!([]), &json!("")));
}

#[tokio::test]
async fn a_name_that_comes_twice_is_answered_once() {
    let bed = Bed::warm().await;
    let twice = ["gpu-b", "nowhere", "gpu-b", "gpu-a", "nowhere"];
    let many = twice.repeat(24);
    for (annotations, passed, refused) in [
        (json!({"gpu-fraction": "0.5"}), 2, 1),
        (json!({"gpu-memory": "20000"}), 1, 2),
        (json!({"gpu-memory": "200000"}), 0, 3),
        (json!({"gpu-fraction": "half"}), 0, 3),
    ] {
        let asks = pod("a", annotations);
        for names in [&twice[..], &many] {
            let objects: Vec<_> =
                names.iter().map(|name| json!({"metadata": {"name": name}})).collect();
            for body in [
                json!({"Pod": asks, "NodeNames": names, "Nodes": null}),
                json!({"Pod": asks, "Nodes": null, "NodeNames": names}),
                json!({"Pod": asks, "Nodes": {"items": objects}, "NodeNames": null}),
            ] {
                let body = body.to_string();
                let (answer, _) = filter(&bed.app, body.as_bytes()).unwrap();
                let answer = String::from_utf8(answer).unwrap();
                let answer: Answer = serde_json::from_str(&answer).unwrap();
                let left = answer.names.into_iter().flatten().count()
                    + answer.nodes.into_iter().flat_map(|nodes| nodes.items).count();
                assert_eq!(left, passed, "{body}");
                // With more than 100 names the refused ones are not named, unless all are.
                let named = if names.len() > 100 && passed > 0 && !body.contains("items") {
                    0
                } else {
                    refused
                };
                assert_eq!(answer.refused.get().matches("\":").count(), named, "{body}");
                let (scores, _) = prioritize(&bed.app, body.as_bytes()).unwrap();
                let scores: Vec<Value> = serde_json::from_slice(&scores).unwrap();
                let hosts: Vec<_> = scores.iter().map(|it| it["Host"].as_str().unwrap()).collect();
                assert_eq!(hosts, ["gpu-b", "nowhere", "gpu-a"], "{body}");
            }
        }
    }
}

/// The answer to *filter*, with the text of its refusals: a map would hide a name that comes twice.
#[derive(serde::Deserialize)]
struct Answer<'a> {
    #[serde(rename = "NodeNames")]
    names: Option<Vec<String>>,
    #[serde(rename = "Nodes")]
    nodes: Option<Items>,
    #[serde(rename = "FailedAndUnresolvableNodes", borrow)]
    refused: &'a RawValue,
}

#[derive(serde::Deserialize)]
struct Items {
    items: Vec<Value>,
}

#[tokio::test]
async fn only_the_best_nodes_remain_or_all_are_rejected_by_name() {
    for (config, kept) in [("", 50), ("keep_best: 7", 7), ("keep_best: 0", 120)] {
        let bed = Bed::warm_with(config).await;
        let names: Vec<String> = (0..120).map(|at| format!("more-{at:03}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(256 << 10) };
        for node in &names {
            bed.app.ledger.see_node(&NodeName::new(*node), host, PoolName::new(""));
            let (status, reply) = bed.report(node, &hello(node, "Tesla T4", 15_360, 1)).await;
            assert_eq!(status, StatusCode::OK, "{reply}");
        }
        // A node with a tenant is better packed; it is the last of all by name.
        let first = pod("first", json!({"gpu-fraction": "0.5"}));
        assert_eq!(bed.filter(first, &["more-119"]).await["NodeNames"], json!(["more-119"]));
        let queried = |uid, fraction| {
            pod(uid, json!({"gpu-fraction": fraction, "gpupack.dev/policy": "binpack"}))
        };
        let answer = bed.filter(queried("fits", "0.25"), &names).await;
        let left = answer["NodeNames"].as_array().unwrap();
        assert_eq!(left.len(), kept, "{config}");
        assert!(left.contains(&json!("more-119")), "{config}: the best one is left");
        assert_eq!(answer["FailedAndUnresolvableNodes"], json!({}), "{config}");
        // Of a hundred nodes all are left.
        let answer = bed.filter(queried("few", "0.25"), &names[..100]).await;
        assert_eq!(answer["NodeNames"].as_array().unwrap().len(), 100, "{config}");
        let large = pod("large", json!({"gpu-memory": "20000"}));
        let answer = bed.filter(large, &names).await;
        assert_eq!(answer["NodeNames"], json!([]), "{config}");
        assert_eq!(answer["FailedAndUnresolvableNodes"].as_object().unwrap().len(), 120);
    }
}

#[tokio::test]
async fn invalid_bodies_are_rejected_and_change_nothing() {
    let bed = Bed::warm().await;
    let before = bed.state().await;
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
    assert_eq!(bed.state().await, before);
}

#[tokio::test]
async fn a_body_over_the_limit_is_413_and_a_smaller_one_is_read() {
    let bed = Bed::warm().await;
    let names: Vec<String> = (0..60_000).map(|number| format!("node-{number:015}")).collect();
    let long = json!({"Pod": pod("a", json!({"gpu-fraction": "1"})), "NodeNames": names});
    let (status, _) = bed.send(Method::POST, "/v1/filter", long.to_string()).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let names = &names[..1_000];
    let fits = json!({"Pod": pod("a", json!({"gpu-fraction": "1"})), "NodeNames": names});
    let (status, answer) = bed.post("/v1/filter", fits.to_string()).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(answer["FailedAndUnresolvableNodes"].as_object().unwrap().len(), 1_000);
    let report = vec![b' '; 9 << 20];
    let (status, _) = bed.send(Method::PUT, "/v1/nodes/gpu-a/report", report).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn preempt_plans_nothing_for_gpu_pods_and_keeps_plans_for_others() {
    let plan = json!({"gpu-a": {"Pods": [{"UID": "1"}, {"UID": "2"}], "NumPDBViolations": 0}});
    for bed in [Bed::cold(), Bed::warm().await] {
        for (annotations, expected) in [
            (json!({}), &plan),
            (json!({"gpu-fraction": "0.5"}), &json!({})),
            (json!({"gpu-fraction": "half"}), &json!({})),
        ] {
            let pod = pod("a", annotations);
            let body =
                json!({"Pod": pod, "NodeNameToVictims": null, "NodeNameToMetaVictims": plan});
            let (status, answer) = bed.post("/v1/preempt", body.to_string()).await;
            let expected = json!({"NodeNameToMetaVictims": expected});
            assert_eq!((status, answer), (StatusCode::OK, expected));
        }
        let (status, answer) = bed.post("/v1/preempt", "{}").await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        let (_, metrics) = bed.get("/metrics").await;
        for (outcome, count) in [("ok", 1), ("refused", 2), ("error", 1)] {
            let labels = format!(r#"{{outcome="{outcome}",verb="preempt"}} {count}"#);
            let line = format!("gpupack_verb_duration_seconds_count{labels}");
            assert!(metrics.contains(&line), "{line} in {metrics}");
        }
    }
}

#[tokio::test]
async fn invalid_names_are_rejected_and_leave_no_state() {
    let bed = Bed::warm().await;
    let fraction = json!({"gpu-fraction": "0.5"});
    let named = |count: usize| (0..count).map(|at| format!("n{at}")).collect::<Vec<_>>();
    let (name, long) = ("x".repeat(253), "x".repeat(254));
    let mut of_namespace = pod("a", fraction.clone());
    of_namespace["metadata"]["namespace"] = "x".repeat(64).into();
    let mut of_name = pod("a", fraction.clone());
    of_name["metadata"]["name"] = long.clone().into();
    let good = pod("a", fraction.clone());
    for (pod, nodes, part) in [
        (&of_namespace, vec!["gpu-a".to_owned()], "`metadata.namespace` of the pod has `64` bytes"),
        (&of_name, vec!["gpu-a".to_owned()], "`metadata.name` of the pod has `254` bytes"),
        (
            &pod(&"u".repeat(65), fraction.clone()),
            vec![],
            "`metadata.uid` of the pod has `65` bytes",
        ),
        (&good, vec![long.clone()], "`NodeNames` has `254` bytes"),
        // Three nodes are known.
        (&good, named(1_007), "names `1007` nodes, at most `1006` are allowed"),
    ] {
        let body = json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}).to_string();
        for verb in ["filter", "prioritize"] {
            let (status, answer) =
                bed.send(Method::POST, &format!("/v1/{verb}"), body.clone()).await;
            let answer = read(&answer);
            assert_eq!(status, StatusCode::BAD_REQUEST, "{part}");
            assert!(answer["error"].as_str().unwrap().contains(part), "{part}: {answer}");
        }
    }
    assert!(bed.app.pods.pending.is_empty());
    let body = json!({"PodName": "a", "PodNamespace": "team", "PodUID": "a", "Node": long});
    let (status, answer) = bed.post("/v1/bind", body.to_string()).await;
    assert_eq!(
        (status, &answer["error"]),
        (StatusCode::BAD_REQUEST, &json!("`Node` has `254` bytes, at most `253` are allowed"))
    );
    assert_eq!(
        bed.send(Method::POST, "/v1/bind", vec![b' '; 65 << 10]).await.0,
        StatusCode::PAYLOAD_TOO_LARGE
    );
    bed.filter(good, &[&name]).await;
    let cold = Bed::cold();
    let body = json!({"Pod": pod("a", json!({})), "Nodes": null, "NodeNames": named(1_007)});
    let (status, _) = cold.post("/v1/filter", body.to_string()).await;
    assert_eq!(status, StatusCode::OK, "the number of nodes is not known yet");
}

#[tokio::test]
async fn pages_of_other_sites_cannot_make_a_browser_send_requests() {
    let bed = Bed::warm().await;
    let body = data("filter.json");
    let queried = async |headers: &[(&'static str, &str)]| {
        let mut request = Request::post("/v1/filter");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.clone())).unwrap();
        let answer = bed.router().oneshot(request).await.unwrap();
        assert_eq!(answer.headers()["x-content-type-options"], "nosniff");
        answer.status().as_u16()
    };
    let json = ("content-type", "application/json");
    let own = ("host", "gpupack.gpu-system.svc:8080");
    assert_eq!(queried(&[own, json]).await, 200, "as kube-scheduler asks");
    assert_eq!(queried(&[own]).await, 415);
    assert_eq!(queried(&[own, ("content-type", "text/plain")]).await, 415, "a form can send that");
    assert_eq!(
        queried(&[("host", "evil.example:8080"), json]).await,
        421,
        "rebound to our address"
    );
    assert_eq!(queried(&[own, json, ("sec-fetch-site", "cross-site")]).await, 403);
    assert_eq!(queried(&[own, json, ("origin", "http://evil.example")]).await, 403);
    for path in ["/nowhere", "/healthz", "/", "/v1/state"] {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let answer = bed.router().oneshot(request).await.unwrap();
        assert_eq!(answer.headers()["x-content-type-options"], "nosniff", "{path}");
    }
}

#[tokio::test]
async fn an_unknown_path_is_404_and_a_wrong_method_405() {
    let bed = Bed::warm().await;
    let (status, answer) = bed.post("/v1/preempt-everything", "{}").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let error: Error = is_declared(answer.to_string().as_bytes());
    assert!(error.error.contains("no `/v1/preempt-everything`"), "{error:?}");
    for path in ["/nowhere", "/v1", "/v1/nope", "/v1/state/", "/v1/nodes/gpu-a"] {
        let (status, text) = bed.get(path).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{path}");
        let error: Error = is_declared(text.as_bytes());
        assert_eq!(error.reason, Some(ErrorReason::UnknownPath), "{path}");
    }
    for (method, path, allowed) in [
        (Method::GET, "/v1/filter", "POST"),
        (Method::POST, "/v1/state", "GET,HEAD"),
        (Method::DELETE, "/", "GET,HEAD"),
        (Method::DELETE, "/healthz", "GET,HEAD"),
        (Method::POST, "/v1/nodes/gpu-a/report", "PUT"),
    ] {
        let request = Request::builder().method(method).uri(path);
        let request = request.header("content-type", "application/json").body(Body::empty());
        let answer = bed.router().oneshot(request.unwrap()).await.unwrap();
        assert_eq!(answer.status(), StatusCode::METHOD_NOT_ALLOWED, "{path}");
        assert_eq!(answer.headers()["allow"], allowed, "{path}");
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let error: Error = is_declared(&body);
        assert!(error.error.contains(&format!("`{path}` has other methods")), "{error:?}");
    }
    let (status, answer) = bed.post("/v1/bind", " ".repeat(70_000)).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let error: Error = is_declared(answer.to_string().as_bytes());
    assert!(error.error.contains("`max_body_mib`"), "{error:?}");
    let (status, answer) = bed.send(Method::PUT, "/v1/nodes/%ff/report", "{}").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let _: Error = is_declared(&answer);
}

/// Annotations and resource limits that are refused, and the reason.
const FAULTY: [(&str, &str, &str); 25] = [
    (r#"{"gpu-fraction":"1.5"}"#, "{}", "a fraction is not a decimal in (0, 1]"),
    (r#"{"gpu-fraction":"0"}"#, "{}", "a fraction is not a decimal in (0, 1]"),
    (r#"{"gpu-fraction":"NaN"}"#, "{}", "a fraction is not a decimal in (0, 1]"),
    (r#"{"gpu-memory":"-1"}"#, "{}", "memory is not a whole number of MiB"),
    (r#"{"gpu-memory":"8Gi"}"#, "{}", "memory is not a whole number of MiB"),
    (
        r#"{"gpu-memory":"8","gpu-memory.limit":"9 apples"}"#,
        "{}",
        "memory is not a quantity with a unit",
    ),
    (
        r#"{"gpu-fraction":"0.5","gpu-fraction-num-devices":"65"}"#,
        "{}",
        "the device count is out of range",
    ),
    (
        r#"{"gpu-fraction":"0.5","gpu-fraction-container-name":"sidecar"}"#,
        "{}",
        "it names a container that the pod does not have",
    ),
    (
        r#"{"gpu-fraction":"0.5","gpupack.dev/gpu-model":"|"}"#,
        "{}",
        "the model filter is no list of model names",
    ),
    (r#"{"gpu-fraction":"1","gpupack.dev/policy":"best"}"#, "{}", "the policy is unknown"),
    (r#"{"gpu-fraction":"1","gpupack.dev/isolation":"x"}"#, "{}", "the isolation is unknown"),
    (r#"{"gpu-fraction":"0.5","gpu-fraction.limit":"0.4"}"#, "{}", "a limit is below its request"),
    (
        r#"{"gpu-fraction":"0.5","gpu-memory.limit":"8Gi"}"#,
        "{}",
        "a limit has no request of its style",
    ),
    (r#"{"gpupack.dev/policy":"binpack"}"#, "{}", "a key qualifies a request that is missing"),
    (
        r#"{"gpu-fraction":"0.5","gpu-fraction.limit":"0.6","gpu-fraction-limit":"0.7"}"#,
        "{}",
        "two annotations disagree",
    ),
    (r#"{"gpu-fractions":"0.5"}"#, "{}", "an annotation is unknown"),
    (r#"{"gpupack.dev/polizy":"binpack"}"#, "{}", "an annotation is unknown"),
    (r#"{"placed.gpupack.dev/placement":"{}"}"#, "{}", "it carries a key that only gpupack writes"),
    ("{}", r#"{"nvidia.com/gpu":"0.5"}"#, "a GPU resource of a container is out of range"),
    (
        "{}",
        r#"{"nvidia.com/gpu":"1","nvidia.com/mig-1g.5gb":"1"}"#,
        "it requests several kinds of GPU, or GPUs in several containers",
    ),
    (
        r#"{"gpu-fraction":"0.5"}"#,
        r#"{"nvidia.com/gpu":"1"}"#,
        "it requests part of a GPU and whole devices",
    ),
    (
        "{}",
        r#"{"nvidia.com/gpu":"1","nvidia.com/gpumem":"4096"}"#,
        "a container resource is not served by gpupack",
    ),
    (
        r#"{"gpu-fraction":"0.5","kai.scheduler/container.main.gpu-memory.portion.limit":"0.8"}"#,
        "{}",
        "an annotation belongs to another scheduler",
    ),
    (r#"{"gpu-memory":"63"}"#, "{}", "too little memory is requested"),
    (
        r#"{"gpu-fraction":"0.2","gpu-fraction.limit":"0.9"}"#,
        "{}",
        "a limit is above what the operator allows",
    ),
];

#[tokio::test]
async fn each_faulty_request_has_its_constant_reason_on_every_node() {
    let bed = Bed::warm_with("max_limit: 0.8").await;
    let before = bed.state().await;
    let nodes = ["gpu-a", "gpu-b", "gpu-c"];
    for (annotations, limits, reason) in FAULTY {
        let mut asks = pod("a", read(annotations.as_bytes()));
        asks["spec"]["containers"][0]["resources"] = json!({"limits": read(limits.as_bytes())});
        let answer = bed.filter(asks, &nodes).await;
        assert_eq!((&answer["NodeNames"], &answer["Error"]), (&json!([]), &json!("")));
        for node in nodes {
            let expected = format!("GPU request refused: {reason}");
            assert_eq!(answer["FailedAndUnresolvableNodes"][node], expected, "{annotations}");
        }
    }
    assert_eq!(bed.state().await, before);
    let (_, metrics) = bed.get("/metrics").await;
    assert!(metrics.contains(r#"gpupack_refusals_total{reason="bad_request"} 25"#), "{metrics}");
}

#[tokio::test]
async fn excluded_resources_are_no_gpu_request_and_tiny_shares_are_rejected() {
    let bed = Bed::warm_with("other_resources: ['nvidia.com/host*']").await;
    let nodes = ["gpu-a", "gpu-b"];
    let mut asks = pod("a", json!({"gpu-fraction": "0.5"}));
    asks["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/hostdev": "1"}});
    assert_eq!(bed.filter(asks, &nodes).await["NodeNames"], json!(nodes));
    // 0.004 is 61 MiB of the T4 and 327 MiB of the A100.
    let answer = bed.filter(pod("b", json!({"gpu-fraction": "0.004"})), &nodes).await;
    assert_eq!(answer["NodeNames"], json!(["gpu-b"]));
    assert_eq!(answer["FailedAndUnresolvableNodes"]["gpu-a"], "insufficient memory per share");
}

#[tokio::test]
async fn before_ready_it_answers_only_with_an_error() {
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
    assert!(bed.get("/v1/summary").await.1.contains(r#""readiness":"NotListed""#));
}

#[tokio::test]
async fn binds_that_do_not_fit_give_a_reason_and_allocate_nothing() {
    let bed = Bed::warm().await;
    let bind = |uid: &str, node: &str| {
        json!({"PodName": uid, "PodNamespace": "team", "PodUID": uid, "Node": node}).to_string()
    };
    let (_, answer) = bed.post("/v1/bind", bind("never-seen", "gpu-a")).await;
    assert_eq!(answer["Error"], "pod `team/never-seen` with this UID is gone");
    let not_passed = "filter did not pass the pod on this node within the last 15 minutes";
    let before = bed.state().await;
    bed.filter(pod("large", json!({"gpu-memory": "20000"})), &["gpu-a", "gpu-b", "gpu-c"]).await;
    let (_, answer) = bed.post("/v1/bind", bind("large", "gpu-a")).await;
    assert_eq!(answer["Error"], not_passed);
    let (_, answer) = bed.post("/v1/bind", bind("large", "nowhere")).await;
    assert_eq!(answer["Error"], not_passed);
    assert_eq!(bed.state().await, before);
    assert_eq!(bed.post("/v1/bind", bind("large", "gpu-c")).await.1["Error"], "");
    let answer = bed.filter(pod("late", json!({"gpu-memory": "20000"})), &["gpu-c"]).await;
    assert_eq!(answer["FailedAndUnresolvableNodes"]["gpu-c"], NO_MEMORY);
    assert_eq!(bed.post("/v1/bind", bind("late", "gpu-c")).await.1["Error"], NO_MEMORY);
}

/// The node with the highest score for a pod, after *filter* passed some.
async fn tried(bed: &Bed, pod: &Value, nodes: &[&str]) -> String {
    let passed = bed.filter(pod.clone(), nodes).await["NodeNames"].take();
    let body = json!({"Pod": pod, "Nodes": null, "NodeNames": passed}).to_string();
    let (_, scores) = bed.post("/v1/prioritize", body).await;
    let scores = scores.as_array().expect("a list").iter();
    let best = scores.max_by_key(|score| score["Score"].as_i64()).expect("a node");
    best["Host"].as_str().expect("a name").to_owned()
}

#[tokio::test]
async fn pods_that_are_tried_many_times_before_the_first_bind_all_have_their_room() {
    let bed = Bed::warm().await;
    let nodes = ["gpu-a", "gpu-c"];
    let halves = ["p", "q", "r", "s"].map(|uid| pod(uid, json!({"gpu-fraction": "0.5"})));
    let mut last = Vec::new();
    for _ in 0..20 {
        last.clear();
        for half in &halves {
            last.push(tried(&bed, half, &nodes).await);
        }
    }
    for (half, node) in halves.iter().zip(&last) {
        let name = &half["metadata"]["name"];
        let body = json!({"PodName": name, "PodNamespace": "team", "PodUID": name, "Node": node});
        let (_, answer) = bed.post("/v1/bind", body.to_string()).await;
        assert_eq!(answer["Error"], "", "{name} on {node}, of {last:?}");
    }
}
