//! `gpupack clear`: from the command to the agent's report and back, also across a change of the leader.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::put;
use axum::{Json, Router};
use serde_json::{Value, json};
use wire::api::commands::Cleared;

use super::ask::{gpupack, kubeconfig, printed, refused, served, status, text};
use crate::harness::extender::{Bed, hello, is_declared};

/// Where the API server has the group of gpupack.
const GROUP: &str = "/apis/inspection.gpupack.dev/v1";

/// The agent of `gpu-a`, which answers orders to clear its GPU with this.
async fn answer_orders(bed: &Bed, outcome: Value) {
    let (mut sequence, mut known) = (2, None);
    loop {
        let mut report = hello("gpu-a", "Tesla T4", 15_360, 1);
        report["sequence"] = sequence.into();
        if let Some(order) = known.take() {
            report["clearOutcome"] = order;
        }
        let (_, reply) = bed.report("gpu-a", &report).await;
        let (orders, number) = (&reply["clearOrders"], &reply["clearOrders"]["order"]["number"]);
        if number.is_u64() {
            let mut told = outcome.clone();
            (told["term"], told["number"]) = (orders["term"].clone(), number.clone());
            known = Some(told);
        }
        sequence += 1;
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
}

/// What the command says while the agent answers with this outcome: exit code, standard output and error.
async fn said(bed: &Bed, outcome: Value, arguments: &[&str]) -> (Option<i32>, String, String) {
    let arguments: Vec<String> = arguments.iter().map(|it| (*it).to_owned()).collect();
    let command = tokio::task::spawn_blocking(move || {
        gpupack(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    });
    tokio::select! {
        () = answer_orders(bed, outcome) => unreachable!("it goes on"),
        output = command => {
            let output = output.expect("the command runs");
            (output.status.code(), text(&output.stdout), text(&output.stderr))
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_waits_for_the_outcome_and_says_it() {
    let bed = Bed::warm().await;
    let (at, _stop) = bed.serve().await;
    let url = at.page.as_str();
    let cleared = json!({"result": "Cleared"});
    let (code, out, error) = said(&bed, cleared, &["clear", "gpu-a", "0", "--server", url]).await;
    let table = "NODE   GPU          RESULT   FAULT\ngpu-a  GPU-gpu-a-0  Cleared  -\n";
    assert_eq!((code, &*out, &*error), (Some(0), table, ""));
    let refused_by_driver = json!({"result": "Refused", "fault": "ResetRequired"});
    let by_uuid = ["clear", "gpu-a", "GPU-gpu-a-0", "-o", "json", "--server", url];
    let (code, out, error) = said(&bed, refused_by_driver, &by_uuid).await;
    assert!(code == Some(1) && error.contains("`ResetRequired`"), "{code:?} {error}");
    let declared: Cleared = is_declared(out.as_bytes());
    assert_eq!((&*declared.node, &*declared.gpu), ("gpu-a", "GPU-gpu-a-0"));
    for (code, node, gpu, part) in [
        (5, "gpu-x", "0", "`gpu-x` is not known"),
        (5, "gpu-a", "1", "has no GPU `1`"),
        (5, "gpu-a", "GPU-gpu-b-0", "has no GPU"),
        (2, "a b", "0", "node name"),
    ] {
        let line = refused(code, &["clear", node, gpu, "--server", url]);
        assert!(line.contains(part), "{line}");
    }
}

/// How often the order was put.
type Calls = Arc<AtomicUsize>;

/// An API server behind which the leader changes: nothing answers first, then an order is given, then it is known.
async fn changing(
    State(calls): State<Calls>,
    Path(gpu): Path<String>,
    Json(body): Json<Value>,
) -> Response {
    let answer = |result: Option<&str>| {
        let mut answer = json!({"apiVersion": "gpupack.dev/v1alpha1", "kind": "Cleared",
            "node": body["node"], "gpu": gpu, "order": "7-1"});
        if let Some(result) = result {
            answer["result"] = result.into();
        }
        Json(answer).into_response()
    };
    match calls.fetch_add(1, Ordering::SeqCst) {
        0 if body["order"].is_null() => {
            status(StatusCode::SERVICE_UNAVAILABLE, "no endpoints").into_response()
        }
        1 if body["order"].is_null() => answer(None),
        2 if body["order"] == "7-1" && gpu == "GPU-gpu-b-1" => answer(Some("NothingToClear")),
        3 => answer(None),
        4 => {
            let error = json!({"apiVersion": "gpupack.dev/v1alpha1", "kind": "Error",
                "error": "the order `7-1` ended with its leader"});
            (StatusCode::CONFLICT, Json(error)).into_response()
        }
        _ => status(StatusCode::FORBIDDEN, "jane cannot update resource \"gpus\"").into_response(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_goes_through_the_api_server_and_meets_a_change_of_the_leader() {
    let bed = Bed::warm().await;
    let calls = Calls::default();
    let clears = Router::new().route("/gpus/{gpu}", put(changing)).with_state(Arc::clone(&calls));
    let router = Router::new().nest(GROUP, clears).nest(&format!("{GROUP}/cluster"), bed.router());
    let router = router.fallback(|| async { status(StatusCode::FORBIDDEN, "not allowed") });
    let folder = tempfile::tempdir().expect("a folder");
    let config = kubeconfig(folder.path(), &format!("http://{}", served(router).await));
    let clear = ["clear", "gpu-b", "1", "--kubeconfig", &config];
    let out = printed(&clear);
    assert!(out.ends_with("gpu-b  GPU-gpu-b-1  NothingToClear  -\n"), "{out}");
    assert_eq!(calls.load(Ordering::SeqCst), 3, "it waits for the order that it gave");
    let line = refused(1, &clear);
    assert!(line.contains("ended with its leader"), "{line}");
    let line = refused(1, &clear);
    assert!(line.contains("gpupack-clear") && line.contains("jane"), "{line}");
}
