//! Two replicas on the loopback: what one does that does not lead. Who leads is set by the test.

use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use control::shared::leader::Leader;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use runtime::clock::Clock;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use wire::ids::{NodeName, PoolName};
use wire::units::{HostAmount, MemMib, MilliCpu};

use crate::harness::extender::{Addresses, Bed, data, hello, pod, read};

/// Times of kube-scheduler and the API server that a test can wait for.
const SHORT: &str = "scheduler_timeout_seconds: 2";

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
        follower.app.lead.leading.set(Leader::Elsewhere);
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
    assert_eq!(get(format!("{}/nothing", two.at[1].verbs)).await.0, StatusCode::NOT_FOUND);
    assert_eq!(get(format!("{}/healthz", two.others[1][1])).await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_stream_of_events_ends_when_the_leader_changes() {
    let two = Two::start("").await;
    let url = format!("{}/v1/events", two.at[0].page);
    let answer = sent(Method::GET, url, &[], Vec::new()).await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let mut body = answer.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.starts_with(b": gpupack") || first.starts_with(b"retry"), "{first:?}");
    two.leader.app.lead.leading.set(Leader::Unknown);
    let rest = tokio::time::timeout(Duration::from_secs(5), body.collect()).await;
    rest.expect("it ends soon").expect("it ends well");
}

#[tokio::test]
async fn a_call_waits_a_moment_for_this_replica_to_lead() {
    for (verb, body) in [("filter", "filter.json"), ("bind", "bind.json")] {
        for (before, after, status) in [
            (Leader::Unknown, Leader::Here, StatusCode::OK),
            (Leader::Elsewhere, Leader::Here, StatusCode::OK),
            (Leader::Lapsed, Leader::Here, StatusCode::OK),
            (Leader::Unknown, Leader::Elsewhere, StatusCode::SERVICE_UNAVAILABLE),
        ] {
            let two = Two::start("").await;
            two.follower.app.lead.leading.set(before);
            let call = post(&two.at[1], verb, data(body));
            let change = async {
                tokio::time::sleep(Duration::from_millis(200)).await;
                two.follower.app.lead.leading.set(after);
            };
            let ((answered, _, _), ()) = tokio::join!(call, change);
            assert_eq!(answered, status, "{verb}: {before:?} to {after:?}");
        }
    }
}

#[tokio::test]
async fn a_bind_is_open_from_its_head_to_its_answer() {
    let two = Two::start("").await;
    let (app, at) = (&two.leader.app, two.at[0].verbs.strip_prefix("http://").unwrap());
    let until = async |is_open: bool| {
        let reached = async {
            while app.binding.binds.are_open() != is_open {
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
    assert!(!app.binding.binds.are_open());
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
    for before in [Leader::Unknown, Leader::Elsewhere, Leader::Lapsed] {
        let may_be_elsewhere = before != Leader::Unknown;
        two.follower.app.lead.leading.set(before);
        let started = clock.precise();
        for (url, method) in [
            (format!("{}/v1/filter", two.at[1].verbs), Method::POST),
            (format!("{}/v1/bind", two.at[1].verbs), Method::POST),
            (format!("{}/v1/waiting", two.at[1].page), Method::GET),
        ] {
            let (status, headers, body) = asked(method, url.clone(), &[], b"{}".to_vec()).await;
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(headers["retry-after"], "1");
            assert_eq!(headers["connection"], "close", "{url}");
            assert!(read(&body)["error"].as_str().unwrap().contains("Lease"));
        }
        // A verb waits for half of kube-scheduler's time at most, the page for two seconds; where another
        // replica may lead, half a second each.
        let took = clock.precise().saturating_sub(started);
        let times = if may_be_elsewhere { 1..3 } else { 3..6 };
        assert!(times.contains(&took.as_secs()), "{took:?}");
    }
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
    bed.api.put(pod("a", json!({"gpu-fraction": "0.5"})));
    let call = post(&at, "filter", query("a"));
    let fence = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        bed.app.lead.set_fenced();
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
