//! Two replicas on the loopback: what one does that does not lead. Who leads is set by the test.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use gpupack::clock::Clock;
use gpupack::control::shared::leader::{Addresses, Leader};
use gpupack::hardware::device::{NodeName, PoolName};
use gpupack::hardware::units::{HostAmount, MemMib, MilliCpu};
use gpupack::server::http::forward::FORWARDED_HEADER;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::harness::extender::{Bed, data, hello, pod, read};

/// Times of kube-scheduler and the API server that a test can wait for.
const SHORT: &str = "api_timeout_seconds: 1\nscheduler_timeout_seconds: 2";

/// A leader and a follower that knows it.
struct Two {
    leader: Bed,
    follower: Bed,
    /// Where both are.
    at: [Addresses; 2],
    /// Where both take reports, and have metrics and health.
    others: [[String; 2]; 2],
    _stop: [watch::Sender<bool>; 2],
}

impl Two {
    async fn start(config: &str) -> Self {
        let (leader, follower) = (Bed::warm_with(config).await, Bed::warm_with(config).await);
        for bed in [&leader, &follower] {
            // Both know the pod of the recorded bodies.
            assert_eq!(bed.post("/v1/filter", data("filter.json")).await.0, StatusCode::OK);
        }
        let (first, first_others, stop_first) = leader.serve_all().await;
        let (second, second_others, stop_second) = follower.serve_all().await;
        follower.app.leading.set(Leader::Elsewhere(first.clone()));
        let others = [first_others, second_others];
        Self { leader, follower, at: [first, second], others, _stop: [stop_first, stop_second] }
    }
}

async fn sent(
    method: Method,
    url: String,
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> hyper::Response<Incoming> {
    let mut request = Request::builder().method(method).uri(url);
    request = request.header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let client = Client::builder(TokioExecutor::new()).build_http();
    let request = request.body(Full::new(Bytes::from(body))).expect("a request of constants");
    client.request(request).await.expect("an answer")
}

async fn asked(
    method: Method,
    url: String,
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> (StatusCode, HeaderMap, Vec<u8>) {
    let (head, body) = sent(method, url, headers, body).await.into_parts();
    (head.status, head.headers, body.collect().await.expect("a whole body").to_bytes().to_vec())
}

async fn post(at: &Addresses, verb: &str, body: Vec<u8>) -> (StatusCode, HeaderMap, Vec<u8>) {
    asked(Method::POST, format!("{}/v1/{verb}", at.verbs), &[], body).await
}

async fn get(url: String) -> (StatusCode, HeaderMap, Vec<u8>) {
    asked(Method::GET, url, &[], Vec::new()).await
}

/// A leader that reads each call, says this much, and closes the connection; and how many calls came.
async fn deaf_leader(says: &'static str) -> (Addresses, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut seen = Vec::new();
            // The bodies of these tests end with a brace.
            let is_whole = |seen: &[u8]| seen.trim_ascii_end().ends_with(b"}");
            while !is_whole(&seen) && stream.read_buf(&mut seen).await.unwrap() > 0 {}
            counted.fetch_add(1, Ordering::SeqCst);
            stream.write_all(says.as_bytes()).await.unwrap();
            stream.shutdown().await.unwrap();
        }
    });
    (Addresses { verbs: url.clone(), page: url }, calls)
}

/// An address where nobody listens.
async fn nowhere() -> Addresses {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    Addresses { verbs: url.clone(), page: url }
}

#[tokio::test]
async fn verbs_at_a_follower_are_answered_by_the_leader() {
    let two = Two::start("").await;
    for (verb, body) in
        [("filter", "filter.json"), ("prioritize", "filter.json"), ("bind", "bind.json")]
    {
        let (status, headers, body) = post(&two.at[1], verb, data(body)).await;
        assert_eq!(status, StatusCode::OK, "{verb}");
        assert_eq!(headers["connection"], "close", "{verb}: the next one goes to the leader");
        assert_eq!(headers["content-type"], "application/json");
        let answer = read(&body);
        if verb == "bind" {
            assert_eq!(answer, json!({"Error": ""}));
        }
    }
    let held = |bed: &Bed| bed.app.ledger.node("gpu-b").unwrap().reservations().len();
    assert_eq!((held(&two.leader), held(&two.follower)), (1, 0));
    // What is wrong is said in the leader's words, and what is too long is not read.
    let (status, _, body) = post(&two.at[1], "filter", b"{}".to_vec()).await;
    let (direct, _, same) = post(&two.at[0], "filter", b"{}".to_vec()).await;
    assert_eq!((status, body), (direct, same));
    assert_eq!(status, StatusCode::BAD_REQUEST);
    for (verb, length) in [("filter", (1 << 20) + 1), ("bind", (64 << 10) + 1)] {
        let (status, _, _) = post(&two.at[1], verb, vec![b' '; length]).await;
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE, "{verb}");
    }
    let counted = |bed: &Bed| String::from_utf8(bed.app.metrics.text()).unwrap();
    let binds = "gpupack_verb_duration_seconds_count{outcome=\"ok\",verb=\"bind\"}";
    assert!(counted(&two.leader).contains(&format!("{binds} 1")));
    assert!(counted(&two.follower).contains(&format!("{binds} 0")), "counted once");
    let forwarded = "gpupack_forwarded_calls_total{port=\"verbs\",result=\"answered\"}";
    assert!(counted(&two.leader).contains(&format!("{forwarded} 0")));
    assert!(counted(&two.follower).contains(&format!("{forwarded} 4")));
}

#[tokio::test]
async fn a_follower_answers_for_itself_what_is_about_itself() {
    let two = Two::start("").await;
    for path in ["/healthz", "/readyz", "/metrics", "/metrics/gpus"] {
        let (status, headers, _) = get(format!("{}{path}", two.others[1][1])).await;
        assert_eq!(status, StatusCode::OK, "{path}");
        assert!(!headers.contains_key("connection"), "{path}");
    }
    for (at, leads) in [(0, true), (1, false)] {
        let (_, _, text) = get(format!("{}/metrics", two.others[at][1])).await;
        let text = String::from_utf8(text).unwrap();
        for (part, is_of_cluster) in [
            ("gpupack_build_info{", false),
            ("gpupack_reports_total{result=\"accepted\"} 3", false),
            ("gpupack_watch_events_total{", false),
            ("gpupack_gpus{", true),
            ("gpupack_nodes{", true),
            ("gpupack_waiting_pods{", true),
            ("gpupack_holds ", true),
        ] {
            assert_eq!(text.contains(part), leads || !is_of_cluster, "{at}: {part}");
        }
        let of_one = u8::from(leads);
        for family in ["gpupack_leader", "gpupack_ready"] {
            assert!(text.contains(&format!("\n{family} {of_one}\n")), "{at}: {family}");
        }
        let (_, _, text) = get(format!("{}/metrics/gpus", two.others[at][1])).await;
        let has_series = String::from_utf8(text).unwrap().contains("gpupack_device_tenants{");
        assert_eq!(has_series, leads, "{at}");
    }
    let report = hello("gpu-a", "Tesla T4", 15_360, 1).to_string().into_bytes();
    let path = format!("{}/v1/nodes/gpu-a/report", two.others[1][0]);
    let (status, _, _) = asked(Method::PUT, path, &[], report).await;
    assert_eq!(status, StatusCode::OK);
    two.follower.app.leading.set(Leader::Elsewhere(nowhere().await));
    assert_eq!(get(format!("{}/nothing", two.at[1].verbs)).await.0, StatusCode::NOT_FOUND);
    assert_eq!(get(format!("{}/healthz", two.others[1][1])).await.0, StatusCode::OK);
}

#[tokio::test]
async fn the_page_of_a_follower_is_the_leaders() {
    let two = Two::start("").await;
    assert_eq!(post(&two.at[0], "bind", data("bind.json")).await.0, StatusCode::OK);
    let placed = async |at: &Addresses| {
        let (status, _, body) = get(format!("{}/v1/state?node=gpu-b", at.page)).await;
        assert_eq!(status, StatusCode::OK);
        read(&body)["pods"].clone()
    };
    let pods = placed(&two.at[0]).await;
    assert_eq!(pods.as_array().map_or(0, Vec::len), 1, "{pods}");
    assert_eq!(placed(&two.at[1]).await, pods);
    assert_eq!(get(format!("{}/v1/state?node=none", two.at[1].page)).await.0, 404);
    assert_eq!(get(format!("{}/", two.at[1].page)).await.0, StatusCode::OK);
    // Compression and names of snapshots work through the follower.
    let summary = async |headers: &[(&str, &str)]| {
        asked(Method::GET, format!("{}/v1/summary", two.at[1].page), headers, Vec::new()).await
    };
    let (status, headers, _) = summary(&[("accept-encoding", "gzip")]).await;
    assert_eq!((status, &headers["content-encoding"]), (StatusCode::OK, &"gzip".parse().unwrap()));
    assert_eq!(headers.get_all("x-content-type-options").iter().count(), 1);
    let tag = headers["etag"].to_str().unwrap();
    assert_eq!(summary(&[("if-none-match", tag)]).await.0, StatusCode::NOT_MODIFIED);
}

#[tokio::test]
async fn the_leader_judges_the_host_that_the_client_named() {
    let leader = Bed::warm().await;
    let follower = Bed::warm_with("allowed_hosts: [front.example]").await;
    let (first, _stop) = leader.serve().await;
    let (second, _stop_too) = follower.serve().await;
    follower.app.leading.set(Leader::Elsewhere(first));
    let of = async |host: &str| {
        let url = format!("{}/v1/state?node=gpu-a", second.page);
        let (status, _, body) = asked(Method::GET, url, &[("host", host)], Vec::new()).await;
        (status.as_u16(), String::from_utf8(body).unwrap())
    };
    assert_eq!(of("localhost").await.0, 200);
    for host in ["evil.example", "front.example"] {
        let (status, text) = of(host).await;
        assert!(status == 421 && text.contains(host), "{text}");
    }
}

#[tokio::test]
async fn a_stream_of_events_ends_when_the_leader_changes() {
    let two = Two::start("").await;
    for at in [1, 0] {
        let url = format!("{}/v1/events", two.at[at].page);
        let answer = sent(Method::GET, url, &[], Vec::new()).await;
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        let mut body = answer.into_body();
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert!(first.starts_with(b": gpupack") || first.starts_with(b"retry"), "{first:?}");
        let bed = if at == 1 { &two.follower } else { &two.leader };
        bed.app.leading.set(Leader::Unknown);
        let rest = tokio::time::timeout(Duration::from_secs(5), body.collect()).await;
        rest.expect("it ends soon").expect("it ends well");
    }
}

#[tokio::test]
async fn a_call_waits_for_the_next_leader() {
    for (verb, body) in [("filter", "filter.json"), ("bind", "bind.json")] {
        let two = Two::start("").await;
        let elsewhere = || Leader::Elsewhere(two.at[0].clone());
        for (before, after) in [
            (Leader::Unknown, elsewhere()),
            (Leader::Unknown, Leader::Here),
            (Leader::Elsewhere(nowhere().await), elsewhere()),
            (Leader::Elsewhere(nowhere().await), Leader::Here),
        ] {
            two.follower.app.leading.set(before.clone());
            let call = post(&two.at[1], verb, data(body));
            let change = async {
                tokio::time::sleep(Duration::from_millis(300)).await;
                two.follower.app.leading.set(after.clone());
            };
            let ((status, _, body), ()) = tokio::join!(call, change);
            let error = read(&body)["Error"].clone();
            assert_eq!((status, error), (StatusCode::OK, json!("")), "{before:?} to {after:?}");
        }
    }
}

#[tokio::test]
async fn a_bind_is_open_from_its_head_to_its_answer() {
    let two = Two::start("").await;
    let (app, at) = (&two.leader.app, two.at[0].verbs.strip_prefix("http://").unwrap());
    let until = async |is_open: bool| {
        let reached = async {
            while app.binds.are_open() != is_open {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached).await.expect("it is so soon");
    };
    let body = data("bind.json");
    let head = format!(
        "POST /v1/bind HTTP/1.1\r\nhost: {at}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(at).await.unwrap();
    assert!(!app.binds.are_open());
    stream.write_all(head.as_bytes()).await.unwrap();
    until(true).await; // one that hands over waits for it
    stream.write_all(&body).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    until(false).await;
}

#[tokio::test]
async fn without_a_leader_callers_are_told_where_to_look() {
    let two = Two::start(SHORT).await;
    let clock = Clock::start();
    for before in [Leader::Unknown, Leader::Elsewhere(nowhere().await), Leader::Lapsed] {
        let has_lapsed = before == Leader::Lapsed;
        two.follower.app.leading.set(before);
        let started = clock.precise();
        for (url, method) in [
            (format!("{}/v1/filter", two.at[1].verbs), Method::POST),
            (format!("{}/v1/bind", two.at[1].verbs), Method::POST),
            (format!("{}/v1/waiting", two.at[1].page), Method::GET),
        ] {
            let (status, headers, body) = asked(method, url.clone(), &[], b"{}".to_vec()).await;
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(headers["retry-after"], "1");
            let closes = headers.get("connection").is_some_and(|it| it == "close");
            assert_eq!(closes, url.starts_with(&two.at[1].verbs), "{url}");
            assert!(read(&body)["error"].as_str().unwrap().contains("Lease"));
        }
        // A verb waits for half of kube-scheduler's time at most, the page for two seconds; where another
        // replica may lead, half a second each.
        let took = clock.precise().saturating_sub(started);
        let times = if has_lapsed { 1..3 } else { 3..6 };
        assert!(times.contains(&took.as_secs()), "{took:?}");
    }
}

#[tokio::test]
async fn a_bind_is_sent_once_and_ends_in_silence() {
    let part = "HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{\"Err";
    for says in ["", part] {
        let two = Two::start(SHORT).await;
        let (deaf, calls) = deaf_leader(says).await;
        two.follower.app.leading.set(Leader::Elsewhere(deaf));
        let clock = Clock::start();
        let call = post(&two.at[1], "bind", data("bind.json"));
        let change = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            two.follower.app.leading.set(Leader::Elsewhere(two.at[0].clone()));
        };
        let ((status, _, body), ()) = tokio::join!(call, change);
        assert_eq!(status, StatusCode::GATEWAY_TIMEOUT, "{}", String::from_utf8_lossy(&body));
        assert!(clock.precise() >= Duration::from_secs(2), "kube-scheduler has given up by then");
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        assert!(two.leader.app.ledger.node("gpu-b").unwrap().reservations().is_empty());
    }
}

#[tokio::test]
async fn a_filter_whose_answer_is_lost_goes_to_the_next_leader() {
    let two = Two::start(SHORT).await;
    let (deaf, calls) = deaf_leader("").await;
    two.follower.app.leading.set(Leader::Elsewhere(deaf));
    let call = post(&two.at[1], "filter", data("filter.json"));
    let change = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        two.follower.app.leading.set(Leader::Elsewhere(two.at[0].clone()));
    };
    let ((status, _, _), ()) = tokio::join!(call, change);
    assert_eq!(status, StatusCode::OK);
    assert!(calls.load(Ordering::SeqCst) > 1);
}

#[tokio::test]
async fn a_bind_that_has_waited_has_less_time_at_the_leader() {
    let two = Two::start("").await;
    let url = format!("{}/v1/bind", two.at[0].verbs);
    for (spent, part) in [("0", ""), ("9000", "no time is left")] {
        let headers = [(FORWARDED_HEADER, spent)];
        let bed = Bed::warm().await;
        assert_eq!(bed.post("/v1/filter", data("filter.json")).await.0, StatusCode::OK);
        let (at, _stop) = bed.serve().await;
        let url = url.replace(&two.at[0].verbs, &at.verbs);
        let (status, _, body) = asked(Method::POST, url, &headers, data("bind.json")).await;
        let answer = read(&body)["Error"].as_str().unwrap().to_owned();
        assert!(status == StatusCode::OK && answer.contains(part), "{spent}: {answer}");
        assert_eq!(answer.is_empty(), part.is_empty(), "{spent}: {answer}");
    }
    let headers = [(FORWARDED_HEADER, "soon")];
    let (status, _, _) = asked(Method::POST, url, &headers, data("bind.json")).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn two_that_take_each_other_for_the_leader_make_no_loop() {
    let two = Two::start(SHORT).await;
    two.leader.app.leading.set(Leader::Elsewhere(two.at[1].clone()));
    let (status, _, _) = post(&two.at[1], "bind", data("bind.json")).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    let held = |bed: &Bed| bed.app.ledger.node("gpu-b").unwrap().reservations().len();
    assert_eq!((held(&two.leader), held(&two.follower)), (0, 0));
    // The one that is taken for the leader becomes it.
    let call = post(&two.at[1], "bind", data("bind.json"));
    let change = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        two.leader.app.leading.set(Leader::Here);
    };
    let ((_, _, body), ()) = tokio::join!(call, change);
    assert_eq!(read(&body), json!({"Error": ""}));
    assert_eq!((held(&two.leader), held(&two.follower)), (1, 0));
}

#[tokio::test]
async fn a_call_waits_for_a_leader_that_is_not_ready_yet() {
    let bed = Bed::cold();
    let (at, _stop) = bed.serve().await;
    let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(256 << 10) };
    bed.app.ledger.see_node(&NodeName::new("gpu-a"), host, PoolName::new(""));
    bed.app.ledger.set_listed(bed.app.clock.now());
    bed.report("gpu-a", &hello("gpu-a", "Tesla T4", 15_360, 1)).await;
    let query = |uid| {
        let body = json!({"Pod": pod(uid, json!({"gpu-fraction": "0.5"})), "NodeNames": ["gpu-a"]});
        body.to_string().into_bytes()
    };
    let call = post(&at, "filter", query("a"));
    let fence = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        bed.app.set_fenced();
    };
    let ((_, _, body), ()) = tokio::join!(call, fence);
    assert_eq!(read(&body)["NodeNames"], json!(["gpu-a"]), "{}", read(&body));
    let bind = json!({"PodName": "a", "PodNamespace": "team", "PodUID": "a", "Node": "gpu-a"});
    let (_, _, body) = post(&at, "bind", bind.to_string().into_bytes()).await;
    assert_eq!(read(&body), json!({"Error": ""}));
    // One that does not become ready holds up all calls together for two seconds, not each one.
    let cold = Bed::cold();
    let (at, _stop_too) = cold.serve().await;
    let clock = Clock::start();
    for _ in 0..5 {
        let (_, _, body) = post(&at, "filter", query("b")).await;
        assert!(read(&body)["Error"].as_str().unwrap().contains("warming up"));
    }
    let took = clock.precise();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_secs(4), "{took:?}");
}

/// A leader that answers each call with nothing, and what it reads: all heads of requests, in lower case.
async fn recording_leader() -> (Addresses, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let heads = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&heads);
    let service = service_fn(move |request: Request<Incoming>| {
        let noted = Arc::clone(&noted);
        async move {
            let (head, body) = request.into_parts();
            let length = body.collect().await.map_or(0, |body| body.to_bytes().len());
            let mut lines = vec![format!("{} {} with {length} bytes", head.method, head.uri)];
            lines.extend(head.headers.iter().map(|(name, value)| format!("{name}: {value:?}")));
            noted.lock().push(lines.join("\n").to_ascii_lowercase());
            Ok::<_, Infallible>(hyper::Response::new(Full::<Bytes>::default()))
        }
    });
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let served =
                http1::Builder::new().serve_connection(TokioIo::new(stream), service.clone());
            tokio::spawn(served);
        }
    });
    (Addresses { verbs: url.clone(), page: url }, heads)
}

/// How long an answer may take that does not end the connection.
const LIMIT: Duration = Duration::from_secs(5);

/// Sends these bytes, and returns all that is answered until the connection ends.
async fn raw(url: &str, bytes: &str) -> String {
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).await.unwrap();
    stream.write_all(bytes.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A client that ends its half has given up.
    let _reset = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn no_form_of_a_call_leads_a_follower_elsewhere_or_becomes_two() {
    let follower = Bed::warm().await;
    let (at, _stop) = follower.serve().await;
    let (leader, heads) = recording_leader().await;
    follower.app.leading.set(Leader::Elsewhere(leader));
    // Targets: none of them is a path of the page, and one is a path of another host.
    for (target, is_handed_on) in [
        ("/v1/state?node=/../x", true),
        ("http://evil.example/v1/state", false),
        ("http://localhost/v1/state", true),
        ("*", false),
        ("//evil.example/v1/state", false),
        ("/v1/../v1/state", false),
        ("/v1/state/../../x", false),
        ("/v1%2fstate", false),
        ("@evil.example/v1/state", false),
        ("evil.example:80", false),
        ("/v1/state#@evil.example", true),
    ] {
        let before = heads.lock().len();
        let answer = raw(
            &at.page,
            &format!("GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"),
        )
        .await;
        let seen = heads.lock()[before..].to_vec();
        assert_eq!(seen.len(), usize::from(is_handed_on), "{target}: {answer} {seen:?}");
        assert!(seen.iter().all(|it| it.starts_with("get /v1/state")), "{target}: {seen:?}");
        assert!(!seen.iter().any(|it| it.contains("evil.example")), "{target}: {seen:?}");
    }
    // Bodies whose length is said twice, or cut: one call or none, and none with what follows.
    let inner = "POST /v1/bind HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n";
    for (headers, body, most) in [
        ("content-length: 4\r\ntransfer-encoding: chunked", format!("0\r\n\r\n{inner}"), 2),
        ("transfer-encoding: chunked\r\ncontent-length: 4", format!("0\r\n\r\n{inner}"), 2),
        ("content-length: 0\r\ncontent-length: 62", inner.to_owned(), 0),
        ("content-length: 2, 2", format!("{{}}{inner}"), 2),
        ("transfer-encoding: gzip, chunked", format!("0\r\n\r\n{inner}"), 2),
        ("transfer-encoding: xchunked", inner.to_owned(), 0),
        ("transfer-encoding: chunked", format!("ffffffffffffffff1\r\n{inner}"), 0),
        ("content-length: -1", inner.to_owned(), 0),
        ("content-length: 62\r\nconnection: content-length", inner.to_owned(), 1),
    ] {
        let before = heads.lock().len();
        let call = format!(
            "POST /v1/filter HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             {headers}\r\n\r\n{body}"
        );
        let answer = raw(&at.verbs, &call).await;
        let seen = heads.lock()[before..].to_vec();
        assert!(seen.len() <= most, "{headers}: {answer} {seen:?}");
        for head in &seen {
            let lengths = head.lines().filter(|line| line.starts_with("content-length:")).count();
            assert!(lengths <= 1 && !head.contains("transfer-encoding:"), "{headers}: {head}");
        }
    }
}
