//! `gpupack init` as its users run it: it asks a cluster, changes nothing, and prints YAML.

use serde_json::{Value, json};

use crate::commands::doctor::{gpupack, kubeconfig};
use crate::harness::fake_cluster::{FakeCluster, refusal};

/// What it prints, as text and as YAML.
async fn printed(fake: &FakeCluster) -> (String, Value) {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let config = kubeconfig(&folder, &format!("http://{}", fake.serve().await));
    let output = gpupack(&["init", "--kubeconfig", &config]);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).expect("the program writes UTF-8");
    let value = serde_yaml_ng::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    (text, value)
}

fn groups(names: &[&str]) -> Value {
    let groups: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
    json!({"kind": "APIGroupList", "groups": groups})
}

#[tokio::test(flavor = "multi_thread")]
async fn values_fit_the_cluster_and_it_is_only_read() {
    let fake = FakeCluster::sound();
    fake.answer("/apis", 200, &groups(&["cert-manager.io", "monitoring.coreos.com"]));
    fake.list("/api/v1/pods", &[json!({"metadata": {"namespace": "gpu-operator"}})]);
    fake.list("/api/v1/namespaces/kube-system/pods", &[json!({"metadata": {}})]);
    fake.change("/api/v1/nodes", |list| {
        let taint = json!({"key": "team", "value": "ml", "effect": "NoSchedule"});
        list["items"][0]["spec"] = json!({"taints": [taint], "providerID": "aws:///eu/i-1"});
        list["items"][0]["metadata"]["labels"]["eks.amazonaws.com/nodegroup"] = "gpu".into();
        list["items"][0]["metadata"]["labels"]["nvidia.com/gpu.count"] = "8".into();
    });
    let (text, found) = printed(&fake).await;
    assert_eq!(found["scheduler"]["image"]["tag"], "v1.36.3");
    assert_eq!(found["certificates"]["source"], "cert-manager");
    assert_eq!(found["webhook"]["excludedNamespaces"], json!(["gpu-operator"]));
    assert_eq!(found["agents"]["waitForToolkit"], true, "the operator says when it is set up");
    assert_eq!(found["webhook"]["toleratedTaints"], json!(["team"]));
    assert_eq!(found["monitoring"]["serviceMonitor"], true);
    let flat = text.replace("\n#", "");
    assert!(flat.contains("Amazon EKS") && flat.contains("8 × Tesla-T4 on 2 nodes"), "{text}");
    assert!(fake.requests().iter().all(|(method, _, _)| method == "GET"), "{:?}", fake.requests());
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_empty_and_hostile_clusters_get_values_too() {
    let closed = FakeCluster::empty();
    closed.answer_others(refusal(403, "no"));
    let (text, _) = printed(&closed).await;
    assert!(text.contains("needs the right to list nodes"), "{text}");
    let (text, _) = printed(&FakeCluster::empty()).await;
    assert!(text.contains("Nodes: not found"), "{text}");
    for body in ["", "7", "{\"items\": 7}", "{\"items\": [{}], \"groups\": [{\"name\": \"\"}]}"] {
        let fake = FakeCluster::empty();
        fake.answer_others((200, body.to_owned()));
        printed(&fake).await;
    }
    let folder = tempfile::tempdir().expect("a folder can be made");
    let config = kubeconfig(&folder, "http://127.0.0.1:1");
    let output = gpupack(&["init", "--kubeconfig", &config]);
    assert_eq!(output.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot reach the API server"));
}
