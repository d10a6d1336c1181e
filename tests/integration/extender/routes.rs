//! The other routes as agents, operators and browsers meet them: reports, state, explain, metrics, page.

use std::sync::Arc;
use std::time::Duration;

use crate::harness::extender::{Bed, data, hello, is_declared, listeners, pod, read};
use crate::harness::log::Log;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use control::pods::chargeback::account;
use kube_api::admission::rules::Admission;
use kube_api::config::webhook::WebhookConfig;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use serde_json::{Value, json};
use server::api::server::serve_apart;
use server::api::{background, webhook};
use server::page::service::Service;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower::ServiceExt;
use wire::api::advice::Advice;
use wire::api::error::Error;
use wire::api::explain::Explanation;
use wire::api::fit::{Fit, Fragmentation};
use wire::api::moves::MoveProposals;
use wire::api::page::Summary;
use wire::api::search::SearchResults;
use wire::api::state::State;
use wire::api::waiting::WaitingPodList;

mod page;

/// A body for `/v1/log-level`.
const DEBUG: &str = r#"{"level": "debug"}"#;

/// What is changed in a good hello of `gpu-a` (a JSON pointer and the new value), the status of the
/// answer, and part of its text.
const ABSURD: [(&str, &str, u16, &str); 12] = [
    ("/inventory/0/memoryMib", "18446744073709551615", 422, ""),
    ("/inventory/0/reservedMib", "15361", 422, ""),
    ("/inventory/0/id", r#""GPU-gpu-b-0""#, 422, "belongs to node `gpu-b`"),
    ("/inventory/0/id", r#""""#, 422, ""),
    ("/inventory", "null", 422, "must carry the inventory"),
    ("/inventory", "7", 422, "inventory"),
    ("/devices/0/usedMib", "18446744073709551615", 422, ""),
    ("/devices/0/usedMib", "-1", 422, "devices[0].usedMib"),
    ("/devices/0/busyPercent", "101", 422, "101"),
    ("/session", "7", 409, "say hello"),
    ("/apiVersion", r#""gpupack.dev/v9""#, 422, "`gpupack.dev/v9`"),
    ("/agent", r#""""#, 422, "agent"),
];

#[tokio::test]
async fn implausible_reports_have_their_status_and_change_nothing() {
    let bed = Bed::warm().await;
    let before = bed.state().await;
    let mut good = hello("gpu-a", "Tesla T4", 15_360, 1);
    good["agent"] = "another".into();
    good["session"] = Value::Null;
    good["devices"][0]["busyPercent"] = Value::Null;
    for (pointer, value, status, part) in ABSURD {
        let mut report = good.clone();
        *report.pointer_mut(pointer).unwrap() = read(value.as_bytes());
        let (answered, refusal) = bed.report("gpu-a", &report).await;
        assert_eq!(answered.as_u16(), status, "{pointer}: {refusal}");
        assert!(refusal["error"].as_str().unwrap().contains(part), "{pointer}: {refusal}");
        assert_eq!(refusal["reason"] == "SessionExpired", status == 409, "{refusal}");
        let _: Error = is_declared(refusal.to_string().as_bytes());
        assert_eq!(bed.state().await, before, "{pointer}");
    }
    let mut twice = good.clone();
    let first = twice["inventory"][0].clone();
    twice["inventory"].as_array_mut().unwrap().push(first);
    let (status, refusal) = bed.report("gpu-a", &twice).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(refusal["error"].as_str().unwrap().contains("GPU-gpu-a-0"), "{refusal}");
    let (status, refusal) = bed.report("nowhere", &good).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(
        refusal["error"].as_str().unwrap().contains("node `nowhere` does not exist"),
        "{refusal}"
    );
    for body in [&b"{"[..], b"[]", b"\xff\xfe", b""] {
        let (status, _) = bed.send(Method::PUT, "/v1/nodes/gpu-a/report", body.to_vec()).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    }
    assert_eq!(bed.state().await, before);
}

#[tokio::test]
async fn no_client_floods_the_log() {
    const ROUNDS: usize = 100;
    let bed = Bed::warm().await;
    let log = Log::new();
    let (_running, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    let webhook = webhook::router(Arc::new(Admission::new(WebhookConfig::default(), Vec::new())));
    for round in 0..ROUNDS {
        let mut report = hello("gpu-a", "NVIDIA A30", 24_576, 1);
        report["agent"] = format!("agent-{round}").into();
        report["inventory"][0]["id"] = "GPU-gpu-b-0".into();
        assert_eq!(bed.report("gpu-a", &report).await.0, StatusCode::UNPROCESSABLE_ENTITY);
        report["inventory"][0]["id"] = "GPU-gpu-a-0".into();
        report["inventory"][0]["kind"] = "MigParent".into();
        let mut instance = report["inventory"][0].clone();
        for (field, value) in [("id", "MIG"), ("kind", "MigInstance"), ("migProfile", "9g.9gb")] {
            instance[field] = value.into();
        }
        instance["parentId"] = "GPU-gpu-a-0".into();
        report["inventory"].as_array_mut().unwrap().push(instance);
        assert_eq!(bed.report("gpu-a", &report).await.0, StatusCode::OK);
        let call = Request::post("/webhook").header("content-type", "application/json");
        let call = call.body(Body::from("{}")).unwrap();
        let answer = webhook.clone().oneshot(call).await.unwrap();
        assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    }
    tokio::time::sleep(Duration::from_millis(200)).await; // for the events
    let lines = log.text();
    assert!(lines.contains("left_out"), "{lines}");
    for part in ["report refused", "impossible MIG instance", "not an admission review"] {
        let count = lines.lines().filter(|line| line.contains(part)).count();
        // Another test of this process may have written the line of this second.
        assert!(count < ROUNDS / 3, "{part}: {count}");
    }
}

#[tokio::test]
async fn a_repeated_report_is_ignored_and_a_vanished_gpu_keeps_its_pod() {
    let bed = Bed::warm().await;
    let (status, reply) = bed.report("gpu-b", &hello("gpu-b", "Other", 1, 2)).await;
    assert_eq!((status, &reply["outcome"]), (StatusCode::OK, &json!("Ignored")));
    bed.post("/v1/filter", data("filter.json")).await;
    bed.post("/v1/bind", data("bind.json")).await;
    let node = bed.app.ledger.node("gpu-b").unwrap();
    let held = node.reservations().values().next().unwrap().placement.devices[0].id.to_string();
    let mut fewer = hello("gpu-b", "NVIDIA A100-SXM4-80GB", 81_920, 2);
    fewer["sequence"] = json!(2);
    fewer["session"] = reply["session"].clone();
    for list in ["inventory", "devices"] {
        fewer[list].as_array_mut().unwrap().retain(|device| device["id"] != *held);
    }
    let (status, reply) = bed.report("gpu-b", &fewer).await;
    assert_eq!((status, &reply["outcome"]), (StatusCode::OK, &json!("Accepted")));
    assert_eq!(reply["allocations"][0]["devices"][0]["id"], *held);
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
    assert_eq!((status, &explanation["fittingNodes"]), (StatusCode::OK, &json!(0)));
    let refusals = explanation["refusals"].as_array().unwrap();
    assert_eq!(refusals.len(), 3, "each node is of another kind");
    let closest = json!({
        "pool": "gpu-b", "gpus": "2 × NVIDIA A100-SXM4-80GB (81920 MiB)", "blockedBy": "Memory",
        "reason": "request exceeds the memory of every GPU", "nodes": 1,
        "closestNode": "gpu-b", "missing": "8080 MiB more than the largest GPU has",
        "fitsIfPodsEnd": false,
    });
    assert_eq!(refusals[0], closest);
    assert_eq!(
        explanation["suggestions"],
        json!([r#"request `gpu-memory: "81920"` instead of 90000 MiB: it fits on node gpu-b now"#])
    );
    assert_eq!(
        (&explanation["blockedBy"], &explanation["request"]),
        (&json!("Memory"), &json!("90000 MiB"))
    );
    let (_, list) = bed.get("/v1/waiting").await;
    let list = read(list.as_bytes());
    assert_eq!((&list["total"], &list["omitted"]), (&json!(1), &json!(0)));
    assert_eq!(list["items"][0]["suggestion"], explanation["suggestions"][0]);
    let (_, none) = bed.get("/v1/waiting?limit=0").await;
    let expected = json!({"apiVersion": "gpupack.dev/v1alpha1", "kind": "WaitingPodList",
        "total": 1, "omitted": 1, "items": []});
    assert_eq!(read(none.as_bytes()), expected);
    let (_, none) = bed.get("/v1/waiting?namespace=other").await;
    assert_eq!(read(none.as_bytes())["total"], 0);
    let summary = read(bed.get("/v1/summary").await.1.as_bytes());
    let figures = &summary["figures"];
    assert_eq!(figures["waiting"], 1);
    let waits = &figures["waitingPods"][0];
    assert_eq!((&waits["pod"], &waits["request"]), (&json!("team/huge"), &json!("90000 MiB")));
    assert_eq!(waits["reason"], "request exceeds the memory of every GPU");
    assert_eq!(
        (&waits["blockedBy"], &waits["suggestion"]),
        (&json!("Memory"), &explanation["suggestions"][0])
    );
    assert_eq!(waits["queue"], Value::Null, "no GPU could ever take it");
    for (path, status) in [
        ("/v1/explain", StatusCode::BAD_REQUEST),
        ("/v1/explain?pod=huge", StatusCode::BAD_REQUEST),
        ("/v1/explain?pod=team/nobody", StatusCode::NOT_FOUND),
        ("/v1/explain?pod=%ff/%fe", StatusCode::NOT_FOUND),
        ("/v1/state?node=nowhere", StatusCode::NOT_FOUND),
        ("/v1/state?Node=gpu-b", StatusCode::BAD_REQUEST),
        ("/v1/waiting?namespaces=team", StatusCode::BAD_REQUEST),
        ("/v1/advise?node=gpu-b", StatusCode::BAD_REQUEST),
        ("/v1/search?q=gpu&limit=1", StatusCode::BAD_REQUEST),
    ] {
        let (answered, text) = bed.get(path).await;
        assert_eq!(answered, status, "{path}: {text}");
    }
    bed.post("/v1/filter", data("filter.json")).await;
    bed.post("/v1/bind", data("bind.json")).await;
    let (_, text) = bed.get("/v1/explain?pod=team-a/infer-7f9c6d5b8-x2kqz").await;
    assert!(text.contains("placed on node gpu-b"), "{text}");
    let state = read(bed.get("/v1/state?node=gpu-b").await.1.as_bytes());
    assert_eq!(state["nodes"][0]["devices"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_container_that_cannot_start_is_explained_until_it_runs() {
    let bed = Bed::warm().await;
    bed.post("/v1/filter", data("filter.json")).await;
    bed.post("/v1/bind", data("bind.json")).await;
    let uid = read(bed.get("/v1/state").await.1.as_bytes())["pods"][0]["podUid"].take();
    let reported = |state: Value, phase: &str| {
        let mut pod = pod("x", json!({}));
        pod["metadata"]["uid"] = uid.clone();
        pod["status"] = json!({"phase": phase, "containerStatuses": [{"name": "main", "image": "", "imageID": "",
            "ready": false, "restartCount": 1, "state": state}]});
        SeenPod::from_json(&pod.to_string()).unwrap()
    };
    let message = "failed to get device handle from UUID: Not Found";
    let refused = json!({"waiting": {"reason": "RunContainerError", "message": message}});
    let running = json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
    let path = "/v1/explain?pod=team-a/infer-7f9c6d5b8-x2kqz";
    for (state, phase, is_reported) in [
        (&refused, "Running", true),
        (&running, "Running", false),
        (&refused, "Running", true),
        (&refused, "Failed", false),
    ] {
        let seen = reported(state.clone(), phase);
        if seen.life.is_terminal {
            bed.app.pod_ended(&seen.pod.uid);
        } else {
            bed.app.pod(&seen);
        }
        if let Some(failure) = &seen.containers.start_failure {
            bed.app.start_failed(&seen, failure);
        }
        let explanation = read(bed.get(path).await.1.as_bytes());
        let verdict = explanation["verdict"].as_str().unwrap();
        assert_eq!(verdict.contains("; container `main` cannot start: the driver"), is_reported);
        assert_eq!(explanation["suggestions"].as_array().unwrap().len(), usize::from(is_reported));
        let state = read(bed.get("/v1/state").await.1.as_bytes());
        assert_eq!(state["pods"][0]["startFailure"].is_string(), is_reported, "{state}");
    }
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
        r#"gpupack_gpus{model="NVIDIA A100-SXM4-80GB",pool="gpu-b",state="empty"} 2"#,
        r#"gpupack_reports_total{result="accepted"} 3"#,
        r#"gpupack_verb_duration_seconds_count{outcome="ok",verb="filter"} 1"#,
    ] {
        assert!(metrics.lines().any(|seen| seen == line), "{line} in {metrics}");
    }
    let (status, page) = bed.get("/").await;
    assert!(status.is_success() && page.contains("page/main.js"));
    assert_eq!(bed.get("/page/main.js").await.0, StatusCode::OK);
    let (status, body) = bed.send(Method::PUT, "/v1/log-level", DEBUG).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "it is not known where that comes from");
    assert!(String::from_utf8(body).unwrap().contains("loopback"));
}

/// One call over the network to an address, by the name of a host; status and body.
async fn exchange(
    (address, host): (std::net::SocketAddr, &str),
    method: &str,
    path: &str,
    body: &str,
) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    let head =
        format!("{method} {path} HTTP/1.0\r\nhost: {host}\r\ncontent-type: application/json");
    let queried = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(queried.as_bytes()).await.expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("it answers");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.expect("a status"), body.to_owned())
}

#[tokio::test]
async fn each_kind_of_client_has_a_port_and_only_loopback_sets_the_level() {
    let bed = Bed::warm().await;
    let listeners = listeners().await;
    let [verbs, agents, page, metrics] =
        [&listeners.verbs, &listeners.agents, &listeners.page, &listeners.metrics]
            .map(|listener| listener.local_addr().unwrap());
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let set_log_level = Arc::new(|level: &str| match level {
        "debug" => Ok(()),
        _ => Err(format!("log level `{level}` is unknown")),
    });
    let service = Service::new(bed.app.clone(), set_log_level);
    let serving = tokio::spawn(serve_apart(service, listeners, None, stopped));
    let ask = async |address, method: &str, path: &str, body: &str| {
        exchange((address, "localhost"), method, path, body).await.0
    };
    for (address, path) in [(metrics, "/healthz"), (page, "/"), (page, "/v1/state")] {
        let (status, _) = exchange((address, "evil.example"), "GET", path, "").await;
        assert_eq!(status, 421, "{path}: a page of another site");
    }
    for path in ["/", "/page/main.js", "/v1/state", "/v1/summary", "/v1/waiting", "/v1/advise"] {
        assert_eq!(ask(page, "GET", path, "").await, 200, "{path}");
        for other in [verbs, agents, metrics] {
            assert_eq!(ask(other, "GET", path, "").await, 404, "{path}");
        }
    }
    let query = String::from_utf8(data("filter.json")).unwrap();
    for path in ["/healthz", "/readyz", "/metrics", "/metrics/gpus"] {
        assert_eq!(ask(metrics, "GET", path, "").await, 200, "{path}");
        for other in [verbs, agents, page] {
            assert_eq!(ask(other, "GET", path, "").await, 404, "{path}");
        }
    }
    assert_eq!(ask(verbs, "POST", "/v1/filter", &query).await, 200);
    for other in [agents, page, metrics] {
        for path in ["/v1/filter", "/v1/bind", "/v1/replicas/join", "/v1/replicas/bindings"] {
            assert_eq!(ask(other, "POST", path, &query).await, 404, "{path}");
        }
    }
    for (address, status) in [(verbs, 404), (agents, 422), (page, 404), (metrics, 404)] {
        assert_eq!(ask(address, "PUT", "/v1/nodes/gpu-a/report", "{}").await, status);
    }
    for (address, method, path, status, part) in [
        (page, "POST", "/v1/filter", 404, "are on the port of `listen`"),
        (page, "DELETE", "/v1/state", 405, "the header `Allow`"),
        (verbs, "GET", "/v1/state", 404, "are on the port of `page_listen`"),
        (verbs, "GET", "/v1/filter", 405, "the header `Allow`"),
        (agents, "GET", "/metrics", 404, "on that of `metrics_listen`"),
        (metrics, "GET", "/v1/state", 404, "are on the port of `page_listen`"),
    ] {
        let (found, text) = exchange((address, "localhost"), method, path, "").await;
        let error: Error = is_declared(text.as_bytes());
        assert!(found == status && error.error.contains(part), "{path}: {found} {error:?}");
    }
    assert_eq!(ask(page, "PUT", "/v1/log-level", DEBUG).await, 404);
    assert_eq!(ask(metrics, "PUT", "/v1/log-level", DEBUG).await, 200);
    assert_eq!(ask(metrics, "PUT", "/v1/log-level", "debug").await, 400, "no JSON");
    let (status, text) =
        exchange((metrics, "localhost"), "PUT", "/v1/log-level", r#"{"level": "loud"}"#).await;
    assert!(status == 422 && text.contains("`loud`"), "{text}");
    stop.send_replace(true);
    serving.await.unwrap();
}

#[tokio::test]
async fn parameters_longer_than_any_name_are_rejected() {
    let bed = Bed::warm().await;
    let (namespace, name) = ("n".repeat(64), "x".repeat(254));
    for path in [
        format!("/v1/state?node={name}"),
        format!("/v1/explain?pod=team/{name}"),
        format!("/v1/explain?pod={namespace}/a"),
        format!("/v1/waiting?namespace={namespace}"),
        format!("/v1/advise?namespace={namespace}"),
    ] {
        let (status, text) = bed.get(&path).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
        assert!(text.len() < 200, "it is not said back: {text}");
    }
    let report = format!("/v1/nodes/{name}/report");
    let (status, _) = bed.send(Method::PUT, &report, "{}").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn the_page_loads_nothing_from_elsewhere_and_has_no_script_in_it() {
    let bed = Bed::cold();
    let request = Request::get("/").body(Body::empty()).unwrap();
    let answer = bed.router().oneshot(request).await.unwrap();
    let policy = answer.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self'"));
    let (_, page) = bed.get("/").await;
    let named = page.split('"').filter(|it| it.starts_with("page/"));
    let mut texts = vec![page.clone()];
    for name in named {
        let (status, text) = bed.get(&format!("/{name}")).await;
        assert_eq!(status, StatusCode::OK, "{name}");
        texts.push(text);
    }
    assert!(texts.len() > 9, "the page names all scripts and the style, to load them early");
    for text in &texts {
        for forbidden in [
            "https://",
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
            "onclick=",
            "style=\"",
        ] {
            assert!(!text.contains(forbidden), "{forbidden}");
        }
        let other = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!other.contains("http://"), "an address elsewhere");
        // Relative paths: the page also lives below a prefix, behind the API server's proxy.
        for rooted in ["href=\"/", "src=\"/", "\"/v1", "\"/page"] {
            assert!(!text.contains(rooted), "{rooted}");
        }
    }
    assert!(!page.contains("<script>"));
}

#[tokio::test]
async fn every_body_is_the_declared_one() {
    let bed = Bed::warm_with("pools: {gpu-a: {replicas: 4}, gpu-b: {enforcement: mps}}").await;
    let nodes = ["gpu-a", "gpu-b", "gpu-c"];
    for (name, annotations, node) in [
        ("half", json!({"gpu-fraction": "0.5"}), "gpu-b"),
        ("other", json!({"gpu-memory": "4096"}), "gpu-c"),
    ] {
        bed.filter(pod(name, annotations), &[node]).await;
        let bind = json!({"PodName": name, "PodNamespace": "team", "PodUID": name, "Node": node});
        assert_eq!(bed.post("/v1/bind", bind.to_string()).await.1, json!({"Error": ""}));
    }
    let text = async |path: &str| bed.get(path).await.1.into_bytes();
    let moves: MoveProposals = is_declared(&text("/v1/moves").await);
    assert_eq!(moves.to_empty.len(), 1, "{moves:?}");
    bed.filter(pod("whole", json!({"gpu-fraction": "1", "gpupack.dev/gpu-model": "L4"})), &nodes)
        .await;
    let moves: MoveProposals = is_declared(&text("/v1/moves").await);
    assert_eq!(moves.to_place.len(), 1, "{moves:?}");
    let state: State = is_declared(&text("/v1/state").await);
    assert_eq!((state.nodes.len(), state.pods.len()), (3, 3));
    assert!(state.packing.is_some_and(|packing| packing.occupied == 2));
    let one: State = is_declared(&text("/v1/state?node=gpu-c").await);
    assert_eq!((one.nodes.as_slice(), one.pods.len()), (&state.nodes[2..], 1));
    let explanation: Explanation = is_declared(&text("/v1/explain?pod=team/whole").await);
    assert_eq!((explanation.refusals.len(), explanation.moves.len()), (3, 1), "{explanation:?}");
    let list: WaitingPodList = is_declared(&text("/v1/waiting").await);
    assert_eq!((list.total, list.items[0].queue), (1, explanation.queue));
    let summary: Summary<'_> = is_declared(&text("/v1/summary").await);
    assert_eq!((summary.nodes.len(), summary.figures.waiting_pods.len()), (3, 1));
    let fit: Fit = is_declared(&text("/v1/fit?fraction=0.5").await);
    assert_eq!((fit.gpus, fit.nodes), (4, 3), "{fit:?}");
    let found: SearchResults = is_declared(&text("/v1/search?q=half").await);
    assert_eq!((found.pods.len(), found.totals.pods), (1, 1));
    is_declared::<Fragmentation>(&text("/v1/fragmentation").await);
    is_declared::<Advice>(&text("/v1/advise").await);
    for path in ["/v1/state?node=x", "/v1/explain", "/v1/fit", "/v1/search", "/v1/waiting?limit=x"]
    {
        let error: Error = is_declared(&text(path).await);
        assert!(!error.error.is_empty(), "{path}");
    }
}

#[tokio::test]
async fn moves_that_would_help_are_proposed() {
    let bed = Bed::warm().await;
    let place = async |name: &str, fraction: &str, node: &str| {
        bed.filter(pod(name, json!({"gpu-fraction": fraction})), &[node]).await;
        let bind = json!({"PodName": name, "PodNamespace": "team", "PodUID": name, "Node": node});
        let (_, answer) = bed.post("/v1/bind", bind.to_string()).await;
        assert_eq!(answer, json!({"Error": ""}), "{name}");
    };
    // gpu-b has two A100: two large tenants fill both half-way once the first two are gone
    place("a", "0.6", "gpu-b").await;
    place("b", "0.6", "gpu-b").await;
    let proposals = read(bed.get("/v1/moves").await.1.as_bytes());
    assert_eq!(proposals["toPlace"], json!([]));
    place("c", "0.3", "gpu-c").await;
    place("d", "0.4", "gpu-a").await;
    let nodes = ["gpu-a", "gpu-b", "gpu-c"];
    bed.filter(pod("whole", json!({"gpu-fraction": "1"})), &nodes).await;
    let proposals = read(bed.get("/v1/moves").await.1.as_bytes());
    assert_eq!(proposals["toEmpty"], json!([]), "a pod waits");
    let proposal = &proposals["toPlace"][0];
    assert_eq!((&proposal["pod"], &proposal["pods"]), (&json!("team/whole"), &json!(1)));
    assert_eq!(proposal["moves"][0]["pod"], "team/c", "the smallest tenant moves");
    assert_eq!(proposal["to"]["node"], "gpu-c");
    let explanation = read(bed.get("/v1/explain?pod=team/whole").await.1.as_bytes());
    assert_eq!(explanation["moves"], proposal["moves"]);
}

#[tokio::test]
async fn teams_see_what_they_held_and_used() {
    let bed = Bed::warm().await;
    let mut queried = pod("p", json!({"gpu-fraction": "0.25"}));
    queried["spec"]["priorityClassName"] = json!("high");
    bed.filter(queried, &["gpu-b"]).await;
    let body = json!({"PodName": "p", "PodNamespace": "team", "PodUID": "p", "Node": "gpu-b"});
    assert_eq!(bed.post("/v1/bind", body.to_string()).await.1["Error"], "");
    let mut report = hello("gpu-b", "NVIDIA A100-SXM4-80GB", 81_920, 2);
    report["sequence"] = json!(2);
    let process = json!({"pid": 7, "podUid": "p", "memoryMib": 8_192});
    for device in report["devices"].as_array_mut().unwrap() {
        device["busyPercent"] = json!(40);
        device["processes"] = json!([process]);
    }
    assert_eq!(bed.report("gpu-b", &report).await.0, StatusCode::OK);
    account(&bed.app);
    let (_, text) = bed.get("/metrics").await;
    assert!(!text.contains("gpupack_share_seconds_total{"), "nothing before the first look");
    tokio::time::sleep(Duration::from_millis(30)).await;
    account(&bed.app);
    let (_, text) = bed.get("/metrics").await;
    let value = |family: &str, kind: &str| -> f64 {
        let series =
            format!("{family}{{kind=\"{kind}\",namespace=\"team\",priority_class=\"high\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&series));
        line.unwrap_or_else(|| panic!("{series} in {text}")).parse().unwrap()
    };
    let near = |found: f64, wanted: f64| (found - wanted).abs() < wanted * 1e-6;
    let allocated = value("gpupack_share_seconds_total", "allocated");
    assert!(allocated >= 0.25 * 0.03, "{allocated}");
    // Its GPU's only tenant has all of the busy time.
    assert!(near(value("gpupack_share_seconds_total", "used"), allocated / 0.25 * 0.4));
    let memory = value("gpupack_memory_byte_seconds_total", "allocated");
    assert!(near(value("gpupack_memory_byte_seconds_total", "used"), memory * 0.4), "8 of 20 GiB");
}

#[tokio::test]
async fn every_gpu_has_series_on_a_path_of_its_own() {
    let bed = Bed::warm().await;
    let (status, text) = bed.get("/metrics/gpus").await;
    assert_eq!(status, StatusCode::OK);
    let labels = r#"{UUID="GPU-gpu-b-1",Hostname="gpu-b",model="NVIDIA A100-SXM4-80GB",pool="gpu-b",gpu="1""#;
    for line in [
        format!("gpupack_device_share_gpus{labels}}} 0.000000"),
        format!("gpupack_device_memory_bytes{labels},kind=\"allocated\"}} 0"),
        format!("gpupack_device_tenants{labels}}} 0"),
        format!("gpupack_device_placeable{labels}}} 1"),
    ] {
        assert!(text.lines().any(|seen| seen == line), "{line} in {text}");
    }
}

#[tokio::test]
async fn the_guard_uses_the_largest_limit_and_leaves_time_to_go_below_it() {
    let bed = Bed::warm_with("max_limit: 0.5").await;
    let place = async |name: &str, asks: Value| {
        bed.filter(pod(name, asks), &["gpu-a"]).await;
        let body =
            json!({"PodName": name, "PodNamespace": "team", "PodUID": name, "Node": "gpu-a"});
        assert_eq!(bed.post("/v1/bind", body.to_string()).await.1["Error"], "");
    };
    // Of a T4 with 15,360 MiB.
    let over = async |sequence: u64, mib: u64| {
        let mut report = hello("gpu-a", "Tesla T4", 15_360, 1);
        report["sequence"] = sequence.into();
        report["devices"][0]["usedMib"] = mib.into();
        report["devices"][0]["processes"] = json!([{"pid": 7, "podUid": "p", "memoryMib": mib}]);
        assert_eq!(bed.report("gpu-a", &report).await.0, StatusCode::OK);
        bed.app.ledger.over_limit_pods().len()
    };
    place("p", json!({"gpu-memory": "1000", "gpu-memory.limit": "14Gi"})).await;
    assert_eq!((over(2, 7_808).await, over(3, 7_809).await), (0, 1), "half of it and 128 MiB");
    assert_eq!(over(4, 7_808).await, 0);
    place("q", json!({"gpu-memory": "1000"})).await;
    assert_eq!(over(5, 7_808).await, 0, "for 30 s after another came");
}

#[tokio::test]
async fn advice_waits_until_a_pod_was_observed_long_enough() {
    let bed = Bed::warm().await;
    let (status, text) = bed.get("/v1/advise?namespace=%22%3Cb%3E").await;
    let advice = read(text.as_bytes());
    assert_eq!(status, StatusCode::OK);
    assert_eq!((&advice["watchedPods"], &advice["pods"]), (&json!(0), &json!([])));
    assert_eq!(advice["watchedForSeconds"], 600);
}
