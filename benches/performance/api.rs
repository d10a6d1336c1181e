//! A stand-in for the API server, as far as an extender uses it: nodes and pods in pages, a watch of both,
//! Bindings and events. Pages are made when they are requested.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::stream;
use runtime::clock::Clock;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::broadcast;

use super::objects::{PODS, PodText, node_json, pod_json};

/// Events of a watch that may wait for a reader.
const WAITING: usize = 10_000;

/// Version of the lists.
const VERSION: &str = "2000000000";

/// The state of the stand-in.
pub(crate) struct Stage {
    nodes: usize,
    clock: Clock,
    /// When the last page of nodes and of pods was made, on the precise clock.
    listed: Mutex<BTreeMap<&'static str, Duration>>,
    /// Pods that came after the lists, by name.
    arrived: Mutex<BTreeMap<String, PodText>>,
    /// Lines of the watch of pods.
    events: broadcast::Sender<Bytes>,
}

/// How lists and watches are requested.
#[derive(Deserialize)]
struct Requested {
    #[serde(default)]
    watch: bool,
    limit: Option<usize>,
    #[serde(rename = "continue")]
    from: Option<usize>,
}

/// Starts a stand-in with a cluster of this many nodes. Returns its address.
pub(crate) async fn start(nodes: usize, clock: Clock) -> (Arc<Stage>, String) {
    let stage = Arc::new(Stage {
        nodes,
        clock,
        listed: Mutex::default(),
        arrived: Mutex::default(),
        events: broadcast::channel(WAITING).0,
    });
    let routes = Router::new()
        .route("/api/v1/nodes", get(list_nodes))
        .route("/api/v1/pods", get(list_pods))
        .route("/api/v1/namespaces/{namespace}/pods/{name}/binding", post(bind))
        .route("/apis/events.k8s.io/v1/namespaces/{namespace}/events", post(event))
        .with_state(Arc::clone(&stage));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("it is bound").to_string();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    (stage, address)
}

impl Stage {
    /// When the last page of both lists was made; none before.
    pub(crate) fn listed(&self) -> Option<Duration> {
        let listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
        Some(*listed.get("NodeList")?.max(listed.get("PodList")?))
    }

    /// Lets a pod come that waits for a node.
    pub(crate) fn arrive(&self, pod: PodText) {
        let line = event_line("ADDED", &pod.pending());
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner).insert(pod.name.clone(), pod);
        let _ = self.events.send(line); // there may be no watch yet
    }

    fn list(
        &self,
        kind: &'static str,
        all: usize,
        requested: &Requested,
        object: impl Fn(usize) -> String,
    ) -> Response {
        let first = requested.from.unwrap_or(0).min(all);
        let end = requested.limit.map_or(all, |limit| all.min(first + limit));
        let mut metadata = json!({ "resourceVersion": VERSION });
        if end < all {
            metadata["continue"] = end.to_string().into();
            metadata["remainingItemCount"] = (all - end).into();
        }
        let mut text =
            format!(r#"{{"kind":"{kind}","apiVersion":"v1","metadata":{metadata},"items":["#);
        for at in first..end {
            text.push_str(if at > first { "," } else { "" });
            text.push_str(&object(at));
        }
        text.push_str("]}");
        if end == all {
            let mut listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
            listed.insert(kind, self.clock.precise());
        }
        answer(StatusCode::OK, text)
    }
}

async fn list_nodes(
    State(stage): State<Arc<Stage>>,
    Query(requested): Query<Requested>,
) -> Response {
    if requested.watch {
        return streamed(stream::pending());
    }
    stage.list("NodeList", stage.nodes, &requested, node_json)
}

async fn list_pods(
    State(stage): State<Arc<Stage>>,
    Query(requested): Query<Requested>,
) -> Response {
    if requested.watch {
        let lines = stream::unfold(stage.events.subscribe(), |mut events| async {
            let line = events.recv().await.ok()?; // a too slow reader is cut off, and lists again
            Some((Ok(line), events))
        });
        return streamed(lines);
    }
    let nodes = stage.nodes;
    stage.list("PodList", nodes * PODS, &requested, |at| pod_json(nodes, at))
}

/// Accepts a Binding and shows the pod on its node, as a kubelet would have it some moments later.
async fn bind(
    State(stage): State<Arc<Stage>>,
    Path((_, name)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let arrived = stage.arrived.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
    let Some(pod) = arrived else { return failure(StatusCode::NOT_FOUND, "pods not found") };
    let binding: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (metadata, node) = (&binding["metadata"], binding["target"]["name"].as_str());
    let is_meant =
        metadata["uid"] == *pod.uid && metadata["resourceVersion"] == *pod.version.to_string();
    let (true, Some(node)) = (is_meant, node) else {
        return failure(StatusCode::CONFLICT, "the object has been modified");
    };
    let written = serde_json::from_value(metadata["annotations"].clone()).unwrap_or_default();
    let bound = PodText { version: pod.version + 1, ..pod };
    let _ = stage.events.send(event_line("MODIFIED", &bound.bound(node, &written)));
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
        "code": 201});
    answer(StatusCode::CREATED, status.to_string())
}

async fn event(body: Bytes) -> Response {
    answer(StatusCode::CREATED, body)
}

fn event_line(kind: &str, object: &str) -> Bytes {
    let object = object.replacen('{', r#"{"kind":"Pod","apiVersion":"v1","#, 1);
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n").into()
}

fn streamed(
    lines: impl stream::Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(lines)).into_response()
}

fn failure(status: StatusCode, message: &str) -> Response {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
        "code": status.as_u16(), "message": message});
    answer(status, body.to_string())
}

fn answer(status: StatusCode, body: impl Into<Body>) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body.into()).into_response()
}
