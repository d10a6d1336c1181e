//! `PUT /v1/gpus/{gpu}`: who may clear a GPU, what its agent is told, and how the order ends.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::time::Duration;

use axum::http::{Method, StatusCode};
use control::shared::leader::Leader;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use wire::api::commands::Cleared;
use wire::report::bodies::Reply;

use super::identities::Guarded;
use super::people::FRONT_PROXY;
use crate::harness::authority::Pair;
use crate::harness::extender::{Bed, hello, is_declared, read};

/// Where the API server asks for a user.
const RESOURCE: &str = "/apis/inspection.gpupack.dev/v1/gpus/GPU-gpu-a-0";

fn request(url: &str, body: &Value) -> Request<Full<Bytes>> {
    let request = Request::put(url).header("content-type", "application/json");
    request.header("host", "localhost").body(Full::from(body.to_string())).unwrap()
}

/// The answer of a page's port.
async fn put(page: &str, gpu: &str, body: &Value) -> (StatusCode, Value) {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let request = request(&format!("{page}/v1/gpus/{gpu}"), body);
    let (head, body) = client.request(request).await.unwrap().into_parts();
    (head.status, read(&body.collect().await.unwrap().to_bytes()))
}

/// Gives an order for a GPU of `gpu-a`. Returns the question for its outcome: who gives it learns its id at once.
async fn given(page: &str) -> Value {
    let (status, first) = put(page, "GPU-gpu-a-0", &json!({"node": "gpu-a"})).await;
    assert!(status == StatusCode::OK && first.get("result").is_none(), "{first}");
    json!({"node": "gpu-a", "order": first["order"]})
}

/// The reply to a report of the agent of `gpu-a`, which says what became of an order.
async fn report(bed: &Bed, sequence: u64, outcome: Option<Value>) -> Reply {
    let mut report = hello("gpu-a", "Tesla T4", 15_360, 1);
    report["sequence"] = sequence.into();
    if let Some(outcome) = outcome {
        report["clearOutcome"] = outcome;
    }
    let (status, reply) = bed.report("gpu-a", &report).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    is_declared(reply.to_string().as_bytes())
}

/// The outcome of the order in a reply.
fn outcome(reply: &Reply, result: &str) -> Value {
    let orders = reply.clear_orders.as_ref().unwrap();
    let order = orders.order.as_ref().unwrap();
    assert_eq!(order.gpu, "GPU-gpu-a-0");
    json!({"term": orders.term, "number": order.number, "result": result})
}

#[tokio::test(flavor = "multi_thread")]
async fn the_right_to_update_gpus_is_required() {
    let guarded = Guarded::start().await;
    let body = json!({"node": "gpu-x"});
    let ask = async |shown: Option<&Pair>, path: &str, headers: &[(&'static str, &str)]| {
        let mut request = request(path, &body);
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        guarded.text(guarded.at[2], shown, request).await.unwrap()
    };
    for (token, expected) in [
        ("unknown", 401),
        ("person.jane", 403),
        ("person.guest", 403),
        ("person.prometheus", 403),
        ("person.operator", 404),
        ("person.mechanic", 404),
    ] {
        let header = format!("Bearer {token}");
        for path in ["/v1/gpus/GPU-gpu-a-0", RESOURCE] {
            let (status, text) = ask(None, path, &[("authorization", &header)]).await;
            assert_eq!(status, expected, "{token} {path}: {text}");
            let names_role = text.contains("gpupack-clear");
            assert_eq!(names_role, expected == 403, "{token}: {text}");
        }
    }
    let (status, text) = guarded.ask("/v1/state", Some("person.mechanic")).await;
    assert_eq!(status, 403, "the right to clear is none to read: {text}");
    let (status, _) = ask(None, RESOURCE, &[]).await;
    assert_eq!(status, 401, "the loopback interface is no right where people prove who they are");
    let api_server = guarded.front_proxy.pair(FRONT_PROXY);
    for (user, expected) in [("jane", 403), ("operator", 404)] {
        let headers = [("x-remote-user", user), ("x-remote-group", "people")];
        let (status, text) = ask(Some(&api_server), RESOURCE, &headers).await;
        assert_eq!(status, expected, "{user}: {text}");
        let (status, text) = ask(None, RESOURCE, &headers).await;
        assert_eq!(status, 401, "{user} without the API server: {text}");
    }
    let (status, text) = guarded
        .text(guarded.at[2], None, Request::get(RESOURCE).body(Full::default()).unwrap())
        .await
        .unwrap();
    assert!(status == 401 || status == 405, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_gets_the_order_until_it_reports_the_outcome() {
    let bed = Bed::warm().await;
    let (at, _stop) = bed.serve().await;
    let idle = report(&bed, 2, None).await.clear_orders.unwrap();
    assert_eq!(idle.order, None, "{idle:?}");
    let order = given(&at.page).await;
    let answer = put(&at.page, "GPU-gpu-a-0", &order);
    let agent = async {
        let mut sequence = 3;
        let reply = loop {
            let reply = report(&bed, sequence, None).await;
            sequence += 1;
            if reply.clear_orders.as_ref().unwrap().order.is_some() {
                break reply;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let mut old = outcome(&reply, "Cleared");
        old["term"] = (old["term"].as_u64().unwrap() - 1).into();
        let still = report(&bed, sequence, Some(old)).await;
        assert_eq!(still.clear_orders, reply.clear_orders, "that is another order");
        let mut other = hello("gpu-c", "NVIDIA L4", 23_034, 1);
        (other["sequence"], other["clearOutcome"]) = (2.into(), outcome(&reply, "Cleared"));
        assert_eq!(bed.report("gpu-c", &other).await.0, StatusCode::OK);
        let again = report(&bed, sequence + 1, None).await;
        assert_eq!(again.clear_orders, reply.clear_orders, "another node's agent says nothing");
        let mut refused = outcome(&reply, "Refused");
        refused["fault"] = "ResetRequired".into();
        let done = report(&bed, sequence + 2, Some(refused)).await;
        assert_eq!(done.clear_orders.unwrap().order, None, "it is done");
    };
    let ((status, answer), ()) = tokio::join!(answer, agent);
    assert_eq!(status, StatusCode::OK, "{answer}");
    let _cleared: Cleared = is_declared(answer.to_string().as_bytes());
    assert_eq!((&answer["result"], &answer["fault"]), (&json!("Refused"), &json!("ResetRequired")));
    assert_eq!(put(&at.page, "GPU-gpu-a-0", &order).await, (StatusCode::OK, answer), "again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_before_the_order_and_another_gpu_of_the_node_waits() {
    let bed = Bed::warm().await;
    let (at, _stop) = bed.serve().await;
    let wanted = json!({"node": "gpu-b"});
    let (status, answer) = put(&at.page, "GPU-gpu-b-0", &wanted).await;
    assert!(status == StatusCode::OK && answer.get("result").is_none(), "{answer}");
    let (status, other) = put(&at.page, "GPU-gpu-b-1", &wanted).await;
    assert_eq!(status, StatusCode::CONFLICT, "{other}");
    let again = bed.app.clears.count();
    let order = json!({"node": "gpu-b", "order": answer["order"]});
    assert_eq!(put(&at.page, "GPU-gpu-b-0", &order).await.1["order"], answer["order"]);
    assert_eq!(bed.app.clears.count(), again, "it only waits");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_ends_with_its_leader() {
    let (old, new) = (Bed::warm().await, Bed::warm().await);
    let ((old_at, _stop), (new_at, _stop_too)) = (old.serve().await, new.serve().await);
    new.app.lead.leading.set(Leader::Elsewhere);
    let wanted = json!({"node": "gpu-a"});
    let order = given(&old_at.page).await;
    let answer = put(&old_at.page, "GPU-gpu-a-0", &order);
    let change = async {
        while report(&old, 2, None).await.clear_orders.and_then(|it| it.order).is_none() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        old.app.lead.leading.set(Leader::Elsewhere);
        new.app.lead.leading.set(Leader::Here);
    };
    let ((status, body), ()) = tokio::join!(answer, change);
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{body}");
    assert_eq!(report(&old, 9, None).await.clear_orders, None, "a follower orders nothing");
    let (status, body) = put(&new_at.page, "GPU-gpu-a-0", &order).await;
    assert!(status == StatusCode::CONFLICT && body["error"].as_str().unwrap().contains("leader"));
    let (status, body) = put(&old_at.page, "GPU-gpu-a-0", &wanted).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "a follower: {body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_cleared_is_refused_at_once() {
    let bed = Bed::warm().await;
    let (at, _stop) = bed.serve().await;
    let long = "n".repeat(254);
    for (gpu, body, expected) in [
        ("GPU-gpu-a-0", json!({"node": "gpu-x"}), 404),
        ("GPU-gpu-a-0", json!({"node": "gpu-b"}), 404),
        ("GPU-a,b", json!({"node": "gpu-a"}), 400),
        ("GPU-gpu-a-0", json!({"node": long}), 400),
        ("GPU-gpu-a-0", json!({}), 400),
        ("GPU-gpu-a-0", json!({"node": "gpu-a", "all": true}), 400),
        ("GPU-gpu-a-0", json!({"node": "gpu-a", "order": "1"}), 400),
        ("GPU-gpu-a-0", json!({"node": "gpu-a", "order": "1-1"}), 409),
    ] {
        let (status, answer) = put(&at.page, gpu, &body).await;
        assert_eq!(status, expected, "{gpu} {body}: {answer}");
    }
    let from_elsewhere =
        bed.send(Method::PUT, "/v1/gpus/GPU-gpu-a-0", json!({"node": "gpu-a"}).to_string());
    let (status, body) = from_elsewhere.await;
    assert!(status == StatusCode::FORBIDDEN, "{}", String::from_utf8_lossy(&body));
    assert_eq!(bed.app.clears.count(), 0);
}
