//! Who may query what, over TLS: people by token or through the API server, Prometheus by token.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use serde_json::{Value, json};

use super::identities::{Guarded, REPLICA};
use crate::harness::authority::Pair;
use crate::harness::extender::pod;

/// Where the API server asks for a user.
const RESOURCE: &str = "/apis/inspection.gpupack.dev/v1/cluster";

/// The common name in the API server's certificate.
pub(super) const FRONT_PROXY: &str = "front-proxy-client";

/// An API server's answers about people, by the names that [`may`] knows.
pub(super) fn people_server(front_proxy: &str) -> Router<Arc<AtomicUsize>> {
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap",
    "metadata": {"name": "extension-apiserver-authentication", "namespace": "kube-system"},
    "data": {
        "requestheader-client-ca-file": front_proxy,
        "requestheader-allowed-names": json!([FRONT_PROXY]).to_string(),
        "requestheader-username-headers": r#"["X-Remote-User"]"#,
        "requestheader-group-headers": r#"["X-Remote-Group"]"#,
        "requestheader-extra-headers-prefix": r#"["X-Remote-Extra-"]"#,
    }});
    Router::new()
        .route(
            "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication",
            get(move || async move { Json(map) }),
        )
        .route("/apis/authorization.k8s.io/v1/subjectaccessreviews", post(access))
}

/// Tokens such as `person.jane`.
pub(super) fn review_of_person(token: &str) -> Value {
    let status = match token.strip_prefix("person.") {
        Some(name) => json!({"authenticated": true,
            "user": {"username": name, "groups": ["people"], "extra": {"scope": ["all"]}}}),
        None => json!({"authenticated": false}),
    };
    json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "metadata": {},
        "spec": {"token": token}, "status": status})
}

async fn access(State(reviews): State<Arc<AtomicUsize>>, Json(review): Json<Value>) -> Json<Value> {
    reviews.fetch_add(1, Ordering::SeqCst);
    let spec = &review["spec"];
    let (resource, path) = (&spec["resourceAttributes"], &spec["nonResourceAttributes"]);
    let user = spec["user"].as_str().unwrap();
    let is_whole = match user {
        "employee" => spec["groups"].as_array().unwrap().len() == 401,
        _ => spec["groups"] == json!(["people"]),
    };
    let allowed = is_whole && may(user, resource, path);
    Json(json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "metadata": {}, "spec": spec, "status": {"allowed": allowed}}))
}

fn may(user: &str, resource: &Value, path: &Value) -> bool {
    let is_inspection = resource["group"] == "inspection.gpupack.dev"
        && resource["resource"] == "cluster"
        && resource["verb"] == "get";
    let is_clear = resource["group"] == "inspection.gpupack.dev"
        && resource["resource"] == "gpus"
        && resource["verb"] == "update";
    let is_list = resource["resource"] == "pods" && resource["verb"] == "list";
    match user {
        "operator" => is_inspection || is_clear || is_list || path["path"] == "/v1/log-level",
        "jane" | "employee" => is_inspection || (is_list && resource["namespace"] == "team"),
        "mechanic" => is_clear,
        "guest" => is_inspection,
        "prometheus" => path["path"] == "/metrics" && path["verb"] == "get",
        _ => false,
    }
}

/// A query with a token.
fn query(path: &str, token: Option<&str>) -> Request<Full<Bytes>> {
    let mut request = Request::get(path).header("host", "localhost");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    request.body(Full::default()).unwrap()
}

/// A query in the name of a user, as the API server or another replica sends it.
fn query_for(path: &str, user: &str) -> Request<Full<Bytes>> {
    let request = Request::get(path).header("host", "localhost");
    let request = request.header("x-remote-user", user).header("x-remote-group", "people");
    request.header("x-remote-extra-scope", "all").body(Full::default()).unwrap()
}

impl Guarded {
    /// A placed and a waiting pod of `team`, and the same of `hidden`.
    async fn fill(&self) {
        for (namespace, node) in [("team", "gpu-a"), ("hidden", "gpu-b")] {
            self.place(namespace, "placed", node).await;
        }
        // It fits if the hidden pod ends.
        let both = json!({"gpu-fraction": "1", "gpu-fraction-num-devices": "2",
            "gpupack.dev/gpu-model": "A100"});
        for namespace in ["team", "hidden"] {
            self.try_to_place(namespace, "waits", both.clone()).await;
        }
    }

    async fn try_to_place(&self, namespace: &str, name: &str, amount: Value) {
        let mut pod = pod(&format!("{namespace}-{name}"), amount);
        pod["metadata"]["namespace"] = namespace.into();
        self.bed.filter(pod, &["gpu-a", "gpu-b", "gpu-c"]).await;
    }

    async fn place(&self, namespace: &str, name: &str, node: &str) {
        self.try_to_place(namespace, name, json!({"gpu-fraction": "0.5"})).await;
        let name = format!("{namespace}-{name}");
        let bind = json!({"PodName": name, "PodNamespace": namespace, "PodUID": name,
            "Node": node});
        let (_, bound) = self.bed.post("/v1/bind", bind.to_string()).await;
        assert_eq!(bound, json!({"Error": ""}));
    }

    /// A stream of events up to this text.
    async fn events_until(&self, end: &str, path: &str, token: &str) -> String {
        let (mut sender, running) = self.open(self.at[2], None).await.unwrap();
        let mut body = sender.send_request(query(path, Some(token))).await.unwrap().into_body();
        let mut text = String::new();
        while !text.contains(end) {
            let frame = tokio::time::timeout(Duration::from_secs(10), body.frame()).await;
            let frame = frame.expect("an event").expect("it goes on").unwrap();
            text += std::str::from_utf8(frame.data_ref().unwrap()).unwrap();
        }
        running.abort();
        text
    }

    /// The answer to a query with a token.
    pub(super) async fn ask(&self, path: &str, token: Option<&str>) -> (u16, String) {
        let (status, text) = self.text(self.at[2], None, query(path, token)).await.unwrap();
        (status.as_u16(), text)
    }

    /// The answer to a query in the name of a user, by a client with this certificate.
    async fn ask_for(&self, shown: Option<&Pair>, path: &str, user: &str) -> (StatusCode, String) {
        self.text(self.at[2], shown, query_for(path, user)).await.unwrap()
    }
}

/// All queries that show pods; `{}` stands for a namespace.
const QUERIES: [&str; 9] = [
    "/v1/state",
    "/v1/state?node=gpu-b",
    "/v1/waiting",
    "/v1/moves",
    "/v1/advise",
    "/v1/search?q=e",
    "/v1/summary",
    "/v1/explain?pod={}/{}-placed",
    "/v1/fit?pod={}/{}-waits",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_user_sees_the_pods_that_he_may_list_and_anonymous_blocks() {
    let guarded = Guarded::start().await;
    guarded.fill().await;
    for path in QUERIES {
        let of = |namespace: &str| path.replace("{}", namespace);
        let shows = |answer: &(u16, String), namespace: &str| {
            answer.0 == 200 && answer.1.contains(&format!("{namespace}-")) || {
                let placed = answer.1.contains("gpusByNode") || path == "/v1/moves";
                answer.0 == 200 && (placed || path == "/v1/advise")
            }
        };
        for namespace in ["team", "hidden"] {
            if path == "/v1/state?node=gpu-b" && namespace == "team" {
                continue; // the other pod is there
            }
            let seen = guarded.ask(&of(namespace), Some("person.operator")).await;
            assert!(shows(&seen, namespace), "{path} of {namespace}: {seen:?}");
        }
        let seen = guarded.ask(&of("team"), Some("person.jane")).await;
        assert!(seen.0 == 200 && !seen.1.contains("hidden"), "{path}: {seen:?}");
        let seen = guarded.ask(&of("team"), Some("person.guest")).await;
        assert!(!seen.1.contains("hidden"), "{path}: {seen:?}");
        let is_of_pod = path.contains("{}");
        assert_eq!(seen.0 == 200, !is_of_pod, "{path}: {seen:?}");
        assert!(is_of_pod || !seen.1.contains("team-"), "{path}: {seen:?}");
    }
    let (_, text) = guarded.ask("/v1/explain?pod=team/team-waits", Some("person.operator")).await;
    assert!(text.contains("end hidden/hidden-placed"), "{text}");
    for path in ["/v1/explain?pod=team/team-waits", "/v1/waiting", "/v1/summary"] {
        let (_, text) = guarded.ask(path, Some("person.jane")).await;
        assert!(!text.contains("hidden"), "{text}");
        let is_explained = path.starts_with("/v1/explain");
        assert!(!is_explained || text.contains("end 1 pod of another team"), "{text}");
    }
    // The answer for a pod that is hidden is that for a pod that does not exist.
    for path in ["/v1/explain?pod=hidden/NAME", "/v1/fit?pod=hidden/NAME"] {
        let answer = async |name: &str| {
            let (status, text) =
                guarded.ask(&path.replace("NAME", name), Some("person.jane")).await;
            (status, text.replace(name, "NAME"))
        };
        assert_eq!(answer("hidden-waits").await, answer("no-such-pod").await);
    }
    let summary = async |token| -> Value {
        serde_json::from_str(&guarded.ask("/v1/summary", Some(token)).await.1).unwrap()
    };
    let (all, hers) = (summary("person.operator").await, summary("person.jane").await);
    assert_eq!(all["figures"]["packing"], hers["figures"]["packing"]);
    let tenants = |summary: &Value| summary["nodes"][1]["gpus"][0][4][0].clone();
    let (all, hers) = (tenants(&all), tenants(&hers));
    assert!(all[0].is_number() && hers[0].is_null(), "{all} {hers}");
    assert_eq!(all.as_array().unwrap()[1..], hers.as_array().unwrap()[1..], "how much it holds");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_new_is_hidden_too() {
    let guarded = Guarded::start().await;
    guarded.fill().await;
    let before = async |user: &str| {
        let (_, text) = guarded.ask("/v1/summary", Some(user)).await;
        let summary: Value = serde_json::from_str(&text).unwrap();
        summary["at"].as_str().unwrap().to_owned()
    };
    let (all, hers) = (before("person.operator").await, before("person.jane").await);
    guarded.place("hidden", "more", "gpu-b").await;
    guarded.try_to_place("hidden", "waits-too", json!({"gpu-memory": "90000"})).await;
    for (user, after, sees) in [("person.operator", &all, true), ("person.jane", &hers, false)] {
        let path = format!("/v1/events?after={after}");
        let text = guarded.events_until("waitingPods", &path, user).await;
        assert_eq!(text.contains("hidden-waits-too"), sees, "{user}: {text}");
        assert!(text.contains("gpu-b") && (sees || !text.contains("hidden")), "{user}: {text}");
    }
    // It goes on from what this user sees, and from nothing else.
    let path = format!("/v1/events?after={all}");
    let text = guarded.events_until("data:", &path, "person.jane").await;
    assert!(text.contains("event: reload") && !text.contains("gpu-b"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_names_users_and_nobody_else_does() {
    let guarded = Guarded::start().await;
    guarded.fill().await;
    let api_server = guarded.front_proxy.pair(FRONT_PROXY);
    let path = format!("{RESOURCE}/v1/state");
    let (status, text) = guarded.ask_for(Some(&api_server), &path, "jane").await;
    assert_eq!(status, 200, "{text}");
    assert!(text.contains("team-placed") && !text.contains("hidden"), "{text}");
    let (status, text) = guarded.ask_for(Some(&api_server), &path, "stranger").await;
    assert!(status == 403 && text.contains("gpupack-view"), "{text}");
    let others = [
        guarded.front_proxy.pair("other"),
        guarded.authority.pair("other"),
        guarded.authority.pair(REPLICA),
        guarded.authority.pair(FRONT_PROXY),
    ];
    for shown in others.iter().map(Some).chain([None]) {
        let (status, text) = guarded.ask_for(shown, "/v1/state", "operator").await;
        assert_eq!(status, 401, "{text}");
    }
    // A company may have many groups.
    let mut request = query_for(&format!("{RESOURCE}/v1/state"), "employee");
    for at in 0..400 {
        let group = format!("group-{at}").parse().unwrap();
        request.headers_mut().append("x-remote-group", group);
    }
    let (status, text) = guarded.text(guarded.at[2], Some(&api_server), request).await.unwrap();
    assert_eq!(status, 200, "{text}");
    // The page is below the resource, and its addresses are relative.
    let (status, text) = guarded.ask_for(Some(&api_server), &format!("{RESOURCE}/"), "jane").await;
    assert!(status == 200 && text.contains("page/main.js"), "{status} {text}");
    let path = format!("{RESOURCE}/page/main.js");
    assert_eq!(guarded.ask_for(Some(&api_server), &path, "jane").await.0, 200);
    assert_eq!(guarded.ask_for(Some(&api_server), RESOURCE, "jane").await.0, 308);
    let (status, text) = guarded.ask("/apis/inspection.gpupack.dev/v1", None).await;
    assert!(status == 200 && text.contains("APIResourceList"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_need_a_token_that_the_api_server_knows() {
    let guarded = Guarded::start().await;
    for (token, expected) in [
        (None, 401),
        (Some("unknown"), 401),
        (Some("person.stranger"), 403),
        (Some("person.prometheus"), 403),
        (Some("person.guest"), 200),
    ] {
        for path in ["/v1/state", "/", "/v1/events"] {
            if path == "/v1/events" && expected == 200 {
                continue; // it does not end
            }
            let (status, text) = guarded.ask(path, token).await;
            assert_eq!(status, expected, "{path} with {token:?}: {text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_need_a_right_and_probes_none() {
    let guarded = Guarded::start().await;
    let ask = async |path: &str, token| {
        guarded.text(guarded.at[3], None, query(path, token)).await.unwrap().0.as_u16()
    };
    for path in ["/metrics", "/metrics/gpus"] {
        assert_eq!(ask(path, None).await, 401);
        assert_eq!(ask(path, Some("person.jane")).await, 403);
        assert_eq!(ask(path, Some("person.prometheus")).await, 200);
    }
    assert_eq!(ask("/healthz", None).await, 200);
    let put = async |user: &str| {
        let request = Request::put("/v1/log-level").header("host", "localhost");
        let request = request.header("content-type", "application/json");
        let request = request.header("authorization", format!("Bearer person.{user}"));
        let request = request.body(Full::from(r#"{"level": "info"}"#)).unwrap();
        guarded.text(guarded.at[3], None, request).await.unwrap().0.as_u16()
    };
    assert_eq!(put("prometheus").await, 403);
    assert_ne!(put("operator").await, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_cannot_make_the_api_server_busy_with_unknown_tokens() {
    let guarded = Guarded::start().await;
    assert_eq!(guarded.ask("/v1/waiting", Some("person.guest")).await.0, 200);
    let before = guarded.reviews();
    let mut refused = Vec::new();
    for at in 0..80 {
        refused.push(guarded.ask("/v1/waiting", Some(&format!("made-up-{at}"))).await.0);
    }
    assert_eq!(guarded.reviews() - before, 50, "{refused:?}");
    assert!(refused[..50].iter().all(|status| *status == 401), "{refused:?}");
    assert!(refused[50..].iter().all(|status| *status == 429), "{refused:?}");
    // Who was accepted before is not locked out.
    assert_eq!(guarded.ask("/v1/waiting", Some("person.guest")).await.0, 200);
    assert_eq!(guarded.ask("/v1/waiting", Some("person.jane")).await.0, 429);
}
