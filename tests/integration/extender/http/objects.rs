//! Calls with whole Node objects, whose nodes need not exist.

use std::time::Duration;

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::harness::extender::{Bed, pod};

#[tokio::test]
async fn full_node_objects_leave_no_state() {
    let bed = Bed::warm().await;
    let before = bed.state().await;
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
    let too_large = "request exceeds the memory of every GPU";
    let expected = json!({
        "gpu-a": too_large, "new-small": too_large, "new-unlabelled": "no GPU on the node",
    });
    assert_eq!(answer["FailedAndUnresolvableNodes"], expected);
    let (status, scores) = bed.post("/v1/prioritize", body).await;
    assert_eq!((status, scores.as_array().unwrap().len()), (StatusCode::OK, 5));
    assert_eq!(bed.state().await, before, "no hold, no reservation, no node");
    assert!(bed.get("/v1/summary").await.1.contains(r#""waiting":0"#), "no pod counts as waiting");
    assert_eq!(bed.app.ledger.hold_count(), 0);
}

#[tokio::test]
async fn the_node_object_of_a_silent_node_does_not_count_as_empty() {
    let bed = Bed::warm().await;
    bed.app.ledger.tick(bed.app.clock.now().plus(Duration::from_secs(7_200)));
    let labels = json!({"nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "81920",
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"});
    let node = |name: &str| {
        json!({"metadata": {"name": name, "labels": labels},
            "status": {"allocatable": {"cpu": "32", "memory": "128Gi"}}})
    };
    let asks = pod("a", json!({"gpu-fraction": "0.5"}));
    let items = [node("gpu-b"), node("thought-of")];
    let body = json!({"Pod": asks, "Nodes": {"items": items}, "NodeNames": null}).to_string();
    let (_, answer) = bed.post("/v1/filter", body).await;
    assert_eq!(answer["Nodes"]["items"], json!([node("thought-of")]));
    let silent = json!({"gpu-b": "GPU agent not reporting"});
    assert_eq!(answer["FailedAndUnresolvableNodes"], silent);
}

#[tokio::test]
async fn node_objects_of_unknown_models_are_answered_while_the_mix_is_learned() {
    let bed = Bed::warm().await;
    let nodes = ["gpu-a", "gpu-b", "gpu-c"];
    bed.filter(pod("first", json!({"gpu-fraction": "0.5"})), &nodes).await;
    let node = |name: &str, product: &str| {
        json!({"metadata": {"name": name, "labels": {"nvidia.com/gpu.count": "2",
                "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": product}},
            "status": {"allocatable": {"cpu": "32", "memory": "128Gi"}}})
    };
    let items = [node("new-a", "NVIDIA-H200"), node("gpu-c", ""), node("new-b", "NVIDIA-B200")];
    let asks = pod("second", json!({"gpu-fraction": "0.5"}));
    let body = json!({"Pod": asks, "Nodes": {"items": items}, "NodeNames": null}).to_string();
    let (status, answer) = bed.post("/v1/filter", body.clone()).await;
    assert_eq!((status, &answer["Nodes"]["items"]), (StatusCode::OK, &json!(items)));
    let (status, scores) = bed.post("/v1/prioritize", body).await;
    assert_eq!((status, scores.as_array().unwrap().len()), (StatusCode::OK, 3));
}

#[tokio::test]
async fn node_objects_add_only_a_few_models() {
    let bed = Bed::warm().await;
    let node = |at: usize, model: usize| {
        json!({"metadata": {"name": format!("new-{at}"), "labels": {"nvidia.com/gpu.count": "64",
                "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": format!("M-{model}")}},
            "status": {"allocatable": {"cpu": "32", "memory": "128Gi"}}})
    };
    let items: Vec<Value> = (0..40).map(|at| node(at, at % 20)).collect();
    let asks = pod("a", json!({"gpu-fraction": "0.5"}));
    let body = json!({"Pod": asks, "Nodes": {"items": items}, "NodeNames": null}).to_string();
    let (status, answer) = bed.post("/v1/filter", body).await;
    assert_eq!(status, StatusCode::OK);
    let of_first_models: Vec<&Value> = items[..16].iter().chain(&items[20..36]).collect();
    assert_eq!(answer["Nodes"]["items"], json!(of_first_models));
    let refused = answer["FailedAndUnresolvableNodes"].as_object().unwrap();
    assert_eq!((refused.len(), &refused["new-39"]), (8, &json!("no GPU on the node")));
}
