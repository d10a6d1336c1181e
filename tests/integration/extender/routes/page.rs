//! Requests of the page, as a browser makes them: files, snapshot, events, the request for highlights,
//! search; good and bad input.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use axum::response::Response;
use engine::ledger::suggest::standing::Holder;
use http_body_util::BodyExt;
use kube_api::pod::seen_pod::SeenPod;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use server::api::background;
use server::api::server::serve;
use server::page::live;
use server::page::summary::kept_rooms_of;
use server::views::viewer::Viewer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tower::ServiceExt;
use wire::api::page::{KeptReason, Summary, SummaryDelta};

use crate::harness::extender::{Bed, is_declared, pod, read};

const NODES: [&str; 3] = ["gpu-a", "gpu-b", "gpu-c"];

async fn ask(bed: &Bed, path: &str, headers: &[(&str, &str)]) -> Response {
    let mut request = Request::get(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::empty()).expect("a request of constants");
    bed.router().oneshot(request).await.expect("a router cannot fail")
}

async fn json_of(bed: &Bed, path: &str) -> Value {
    let (status, text) = bed.get(path).await;
    assert_eq!(status, StatusCode::OK, "{path}: {text}");
    read(text.as_bytes())
}

async fn place(bed: &Bed, name: &str, annotations: Value, node: &str) -> bool {
    let answer = bed.filter(pod(name, annotations), &[node]).await;
    if answer["NodeNames"] != json!([node]) {
        return false;
    }
    let bind = json!({"PodName": name, "PodNamespace": "team", "PodUID": name, "Node": node});
    let (_, answer) = bed.post("/v1/bind", bind.to_string()).await;
    answer == json!({"Error": ""})
}

/// Nodes that filter leaves to a pod with these annotations.
async fn filtered(bed: &Bed, annotations: Value) -> Vec<String> {
    let answer = bed.filter(pod("asks", annotations), &NODES).await;
    let names = answer["NodeNames"].as_array().cloned().unwrap_or_default();
    names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

/// A query to `/v1/fit`, and the annotations of a pod with the same request.
fn request(chance: &mut ChaCha8Rng) -> (String, Value) {
    let (mut query, mut annotations) = (Vec::new(), serde_json::Map::new());
    let kind = chance.random_range(0..4);
    if kind != 1 {
        let fraction =
            ["0.05", "0.1", "0.25", "0.33", "0.5", "0.75", "1"][chance.random_range(0..7)];
        query.push(format!("fraction={fraction}"));
        annotations.insert("gpu-fraction".to_owned(), fraction.into());
    }
    if kind == 1 || kind == 2 {
        let gib = [1_u64, 4, 10, 16, 20, 40, 79, 80, 200][chance.random_range(0..9)];
        query.push(if chance.random() {
            format!("memory={gib}Gi")
        } else {
            format!("memory={}", gib << 10)
        });
        annotations.insert("gpu-memory".to_owned(), (gib << 10).to_string().into());
    }
    if chance.random_range(0..4) == 0 {
        query.push("count=2".to_owned());
        annotations.insert("gpu-fraction-num-devices".to_owned(), "2".into());
    }
    if chance.random_range(0..4) == 0 {
        let model = ["A100", "T4", "L4", "H200"][chance.random_range(0..4)];
        query.push(format!("model={model}"));
        annotations.insert("gpupack.dev/gpu-model".to_owned(), model.into());
    }
    (format!("/v1/fit?{}", query.join("&")), annotations.into())
}

#[tokio::test]
async fn the_page_highlights_the_nodes_that_filter_would_pass() {
    let mut chance = ChaCha8Rng::seed_from_u64(7);
    let (mut fitting, mut refused) = (0, 0);
    for fleet in 0..8 {
        let bed = Bed::warm().await;
        for held in 0..fleet {
            let (_, annotations) = request(&mut chance);
            let node = NODES[chance.random_range(0..3)];
            place(&bed, &format!("held-{held}"), annotations, node).await;
        }
        let node_state = bed.state().await;
        for _ in 0..40 {
            let (path, annotations) = request(&mut chance);
            let found = json_of(&bed, &path).await;
            assert_eq!(bed.state().await, node_state, "{path} changed the ledger");
            assert_eq!(bed.app.ledger.hold_count(), 0, "{path} claims");
            let on = found["gpusByNode"].as_object().unwrap();
            let nodes: Vec<String> = on.keys().cloned().collect();
            assert_eq!(nodes, filtered(&bed, annotations.clone()).await, "{path} {annotations}");
            bed.app.ledger.drop_hold(&wire::ids::PodUid::new("asks"));
            let gpus: usize = on.values().map(|gpus| gpus.as_array().unwrap().len()).sum();
            assert_eq!((&found["gpus"], &found["nodes"]), (&json!(gpus), &json!(nodes.len())));
            fitting += gpus;
            refused += usize::from(nodes.is_empty());
            // each of the GPUs named has room
            for (node, gpus) in on {
                let state = json_of(&bed, &format!("/v1/state?node={node}")).await;
                for gpu in gpus.as_array().unwrap() {
                    let device = &state["nodes"][0]["devices"]
                        [usize::try_from(gpu.as_u64().unwrap()).unwrap()];
                    assert!(
                        device["free"]["shareMillionths"].as_u64() > Some(0),
                        "{path} {device}"
                    );
                }
            }
        }
    }
    assert!(fitting > 200 && refused > 20, "{fitting} {refused}: the cases are one-sided");
}

#[tokio::test]
async fn bad_queries_are_refused_with_a_suggestion() {
    let bed = Bed::warm().await;
    let long = format!("/v1/search?q={}", "x".repeat(318));
    let wide = format!("/v1/fit?model={}", "x".repeat(513));
    for (path, status, part) in [
        ("/v1/fit", 400, "name a request"),
        ("/v1/fit?fraction=2", 400, "up to 1"),
        ("/v1/fit?pod=team/nobody", 400, "no pod `team/nobody` waits"),
        ("/v1/fit?pod=nobody", 400, "no pod `nobody` waits"),
        ("/v1/fit?pod=team/nobody&count=2", 400, "must be the only key"),
        ("/v1/fit?fraction=0.25&fraktion=1", 400, "`fraktion` is no key"),
        ("/v1/fit?memory=16XB", 400, "16XB"),
        ("/v1/fit?memory=", 400, "gpu-memory"),
        ("/v1/fit?memory=18446744073709551616", 400, "gpu-memory"),
        ("/v1/fit?fraction=1&count=0", 400, "gpu-fraction-num-devices"),
        ("/v1/fit?fraction=1&count=4294967297", 400, "gpu-fraction-num-devices"),
        ("/v1/fit?model=A100", 400, "gpu-model"),
        ("/v1/fit?fraction=0.5&model=%00", 400, "gpu-model"),
        ("/v1/fit?fraction=0.5&isolation=strong", 400, "isolation"),
        ("/v1/fit?mig=1g.5gb&fraction=0.5", 400, "nvidia.com/mig-1g.5gb"),
        ("/v1/fit?fraction=%ff", 400, ""),
        (&wide, 400, "longer than 512"),
        ("/v1/search", 400, "what to look for"),
        ("/v1/search?q=%20", 400, "what to look for"),
        (&long, 400, "1 to 317 bytes"),
        ("/page/main.css", 404, "no such file"),
        ("/page/..%2f..%2fserver.rs", 404, "no such file"),
    ] {
        let (answered, text) = bed.get(path).await;
        assert_eq!(answered.as_u16(), status, "{path}: {text}");
        assert!(text.contains(part), "{path}: {text}");
    }
    assert_eq!(json_of(&bed, "/v1/fit?mig=1g.5gb").await["gpus"], 0);
    assert_eq!(json_of(&bed, "/v1/fit?fraction=0.5").await["gpusByNode"]["gpu-b"], json!([0, 1]));
    assert_eq!(json_of(&bed, "/v1/fragmentation").await["shareMillionthsByNode"], json!({}));
}

#[tokio::test]
async fn search_finds_pods_nodes_and_namespaces() {
    let bed = Bed::warm().await;
    assert!(place(&bed, "trainer", json!({"gpu-fraction": "0.5"}), "gpu-b").await);
    bed.filter(pod("waiter", json!({"gpu-memory": "90000"})), &NODES).await;
    let found = json_of(&bed, "/v1/search?q=TRAIN").await;
    let held = &found["pods"][0];
    assert_eq!((&held["pod"], &held["node"]), (&json!("team/trainer"), &json!("gpu-b")));
    assert_eq!(held["gpus"].as_array().unwrap().len(), 1);
    let found = json_of(&bed, "/v1/search?q=team").await;
    assert_eq!(
        (&found["namespaces"], &found["totals"]),
        (&json!(["team"]), &json!({"nodes": 0, "namespaces": 1, "pods": 2}))
    );
    let waits = found["pods"].as_array().unwrap().iter().find(|pod| pod["pod"] == "team/waiter");
    assert_eq!(waits.unwrap().get("node"), None);
    assert_eq!(json_of(&bed, "/v1/search?q=gpu-").await["nodes"], json!(NODES));
    for name in 0..30 {
        bed.filter(pod(&format!("many-{name}"), json!({"gpu-memory": "90000"})), &NODES).await;
    }
    let found = json_of(&bed, "/v1/search?q=many").await;
    assert_eq!(
        (found["pods"].as_array().unwrap().len(), &found["totals"]["pods"]),
        (20, &json!(30))
    );
}

#[tokio::test]
async fn a_snapshot_that_the_browser_has_is_not_sent_again() {
    let bed = Bed::warm().await;
    let tag = |headers: &HeaderMap| headers["etag"].to_str().unwrap().to_owned();
    let first = ask(&bed, "/v1/summary", &[("accept-encoding", "br, gzip")]).await;
    assert_eq!(first.headers()["content-encoding"], "gzip");
    let known = tag(first.headers());
    let packed = first.into_body().collect().await.unwrap().to_bytes();
    let plain = ask(&bed, "/v1/summary", &[]).await.into_body().collect().await.unwrap().to_bytes();
    let mut opened = String::new();
    let mut reader = flate2::read::GzDecoder::new(&packed[..]);
    std::io::Read::read_to_string(&mut reader, &mut opened).unwrap();
    assert_eq!(read(opened.as_bytes())["nodes"], read(&plain)["nodes"]);
    let again = ask(&bed, "/v1/summary", &[("if-none-match", &known)]).await;
    assert_eq!((again.status(), tag(again.headers())), (StatusCode::NOT_MODIFIED, known.clone()));
    assert!(place(&bed, "news", json!({"gpu-fraction": "0.5"}), "gpu-b").await);
    let later = ask(&bed, "/v1/summary", &[("if-none-match", &known)]).await;
    assert_eq!(later.status(), StatusCode::OK);
    assert_ne!(tag(later.headers()), known);
}

/// A browser that listens.
struct Listener {
    body: Body,
    text: String,
}

impl Listener {
    async fn new(bed: &Bed, after: &str) -> Self {
        let response = ask(bed, &format!("/v1/events?after={after}"), &[]).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        Self { body: response.into_body(), text: String::new() }
    }

    /// The next event: its name and data. None when the stream ends.
    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some((event, rest)) = self.text.clone().split_once("\n\n") {
                self.text = rest.to_owned();
                let field = |name: &str| {
                    event.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
                };
                if let (Some(name), Some(data)) = (field("event:"), field("data:")) {
                    if name == "delta" {
                        is_declared::<SummaryDelta<'_>>(data.as_bytes());
                    }
                    return Some((name.to_owned(), read(data.as_bytes())));
                }
                continue;
            }
            let frame = tokio::time::timeout(Duration::from_secs(20), self.body.frame()).await;
            let frame =
                frame.expect("a stream says something within 20 s")?.expect("no broken frame");
            let bytes = frame.into_data().expect("a frame of data");
            self.text += std::str::from_utf8(&bytes).expect("events are text");
        }
    }

    /// The next event about a node.
    async fn next_of(&mut self, node: &str) -> Value {
        loop {
            let (name, delta) = self.next().await.expect("the stream goes on");
            assert_eq!(name, "delta");
            let cells = delta["nodes"].as_array().cloned().unwrap_or_default();
            if let Some(cell) = cells.into_iter().find(|cell| cell["name"] == node) {
                return cell;
            }
        }
    }
}

/// An extender whose loops run.
async fn running() -> (Bed, watch::Sender<bool>) {
    let bed = Bed::warm().await;
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(background::run(bed.app.clone(), stopped));
    let service = bed.service.clone();
    tokio::spawn(async move { live::run(&service.app, &service.live).await });
    (bed, stop)
}

#[tokio::test]
async fn a_browser_receives_only_changes() {
    let (bed, _stop) = running().await;
    let snapshot = json_of(&bed, "/v1/summary").await;
    let mut listener = Listener::new(&bed, snapshot["at"].as_str().unwrap()).await;
    assert!(place(&bed, "one", json!({"gpu-fraction": "0.5"}), "gpu-b").await);
    let cell = listener.next_of("gpu-b").await;
    let held: usize =
        cell["gpus"].as_array().unwrap().iter().map(|gpu| gpu[4].as_array().unwrap().len()).sum();
    assert_eq!(held, 1);
    // its events add up to a fresh snapshot
    let mut names = 0;
    assert!(place(&bed, "two", json!({"gpu-fraction": "0.5"}), "gpu-c").await);
    loop {
        let (_, delta) = listener.next().await.unwrap();
        for cell in delta["nodes"].as_array().cloned().unwrap_or_default() {
            assert_ne!(cell["name"], "gpu-a", "it has not changed");
            names += usize::from(cell["name"] == "gpu-c");
        }
        if names > 0 {
            break;
        }
    }
    let fresh = json_of(&bed, "/v1/summary").await;
    let cells = fresh["nodes"].as_array().unwrap();
    assert!(cells.contains(&cell), "{cell} in {fresh}");
}

#[tokio::test]
async fn a_returning_browser_gets_missed_changes_or_a_reset() {
    let (bed, _stop) = running().await;
    let at = json_of(&bed, "/v1/summary").await["at"].as_str().unwrap().to_owned();
    for at_once in 0..3 {
        assert!(place(&bed, &format!("p{at_once}"), json!({"gpu-fraction": "0.2"}), "gpu-b").await);
    }
    json_of(&bed, "/v1/summary").await;
    let mut late = Listener::new(&bed, &at).await;
    let cell = late.next_of("gpu-b").await;
    let held: usize =
        cell["gpus"].as_array().unwrap().iter().map(|gpu| gpu[4].as_array().unwrap().len()).sum();
    assert_eq!(held, 3, "all of it in one message");
    let (known, number) = at.rsplit_once('.').unwrap();
    let future = format!("{known}.{}", number.parse::<u64>().unwrap() + 1_000_000);
    for strange in ["", "x", "0-0-0.1", "%00.1", &future, &format!("{known}.-1")] {
        let mut stranger = Listener::new(&bed, strange).await;
        assert_eq!(stranger.next().await.unwrap().0, "reload", "{strange:?}");
        assert_eq!(stranger.next().await, None, "the stream ends");
    }
}

#[tokio::test]
async fn a_stalled_browser_keeps_one_message_and_then_gets_the_newest() {
    let (bed, _stop) = running().await;
    let at = json_of(&bed, "/v1/summary").await["at"].as_str().unwrap().to_owned();
    let mut stalled = Listener::new(&bed, &at).await;
    for round in 0..6 {
        assert!(place(&bed, &format!("p{round}"), json!({"gpu-fraction": "0.1"}), "gpu-b").await);
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    let mut messages = 0;
    loop {
        let cell = stalled.next_of("gpu-b").await;
        messages += 1;
        let gpus = cell["gpus"].as_array().unwrap();
        let held: usize = gpus.iter().map(|gpu| gpu[4].as_array().unwrap().len()).sum();
        if held == 6 {
            break;
        }
    }
    assert!(messages <= 3, "{messages} messages were kept for a browser that took none");
}

#[tokio::test]
async fn listening_browsers_are_limited_and_all_released_at_shutdown() {
    let bed = Bed::warm().await;
    let mut listeners = Vec::new();
    for _ in 0..64 {
        listeners.push(Listener::new(&bed, "").await);
    }
    let at = json_of(&bed, "/v1/summary").await["at"].as_str().unwrap().to_owned();
    let mut last = Listener::new(&bed, &at).await;
    assert_eq!(listeners[0].next().await, None, "it gave way");
    bed.service.live.close();
    assert_eq!(last.next().await, None);
    let refused = ask(&bed, "/v1/events", &[]).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.headers()["retry-after"], "30");
}

#[tokio::test]
async fn a_listening_browser_does_not_delay_shutdown() {
    let bed = Bed::warm().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = watch::channel(false);
    let serving = tokio::spawn(serve(bed.service.clone(), bed.router(), listener, stopped));
    let mut browser = TcpStream::connect(address).await.unwrap();
    let at = json_of(&bed, "/v1/summary").await["at"].as_str().unwrap().to_owned();
    let queried = format!("GET /v1/events?after={at} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    browser.write_all(queried.as_bytes()).await.unwrap();
    let mut head = [0; 15];
    browser.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    stop.send_replace(true);
    let ended = tokio::time::timeout(Duration::from_secs(5), serving).await;
    ended.expect("it ends in time").unwrap();
}

#[tokio::test]
async fn room_that_is_kept_is_listed_for_those_who_see_the_pod() {
    let bed = Bed::warm().await;
    let call = |name: &str| {
        let pod = pod(name, json!({"gpu-fraction": "1"}));
        json!({"Pod": pod, "NodeNames": ["gpu-a", "gpu-b", "gpu-c"]})
    };
    let query_of = |name: &str| {
        let seen = SeenPod::from_json(&call(name)["Pod"].to_string()).expect("a pod");
        (bed.app.query(&seen).expect("a request"), seen)
    };
    for (at, node) in ["gpu-a", "gpu-b", "gpu-b", "gpu-c"].into_iter().enumerate() {
        let (query, seen) = query_of(&format!("runs-{at}"));
        let now = bed.app.clock.now();
        bed.app.ledger.reserve(&seen.pod, node, &query, now).expect("an empty GPU");
    }
    bed.post("/v1/filter", call("waits").to_string()).await;
    let (query, seen) = query_of("waits");
    let standing = bed.app.ledger.stand(Holder::first(&seen.pod.uid, "", &query), None, |_| true).0;
    let standing = standing.expect("some node could have it");
    let (_, summary) = bed.get("/v1/summary").await;
    let summary: Summary<'_> = serde_json::from_str(&summary).expect("a summary");
    let [room] = &summary.figures.kept_rooms[..] else { panic!("{:?}", summary.figures) };
    assert_eq!((&*room.pod, &*room.node), ("team/waits", standing.node.as_str()));
    assert_eq!((room.reason, room.lacks_millionths), (KeptReason::FirstOfLine, 1_000_000));
    let viewer = |namespace: &str| {
        let namespaces = BTreeSet::from([namespace.to_owned()]);
        Viewer::Namespaces(Arc::new(namespaces))
    };
    for (namespace, count) in [("team", 1), ("other", 0)] {
        assert_eq!(kept_rooms_of(&bed.app, &viewer(namespace)).len(), count, "{namespace}");
    }
}
