//! Classes of workloads, and what pods of a namespace may use.

use engine::model::event::LedgerEvent;
use engine::model::policy::Policy;
use engine::model::workload::Protection;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use serde_json::{Value, json};
use wire::api::explain::Explanation;
use wire::api::waiting::Obstacle;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::{HostAmount, MemMib, MilliCpu};

use crate::harness::extender::{Bed, is_declared, pod};

const NODES: [&str; 3] = ["gpu-a", "gpu-b", "gpu-c"];

/// `gpu-a` is in the pool `training`; the others are in none.
async fn bed(config: &str) -> Bed {
    let bed = Bed::warm_with(config).await;
    let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(256 << 10) };
    for (node, pool) in NODES.into_iter().zip(["training", "", ""]) {
        bed.app.ledger.see_node(&NodeName::new(node), host, PoolName::new(pool));
    }
    bed
}

fn of(namespace: &str, uid: &str, class: &str) -> Value {
    let mut pod = pod(uid, json!({"gpu-fraction": "0.5"}));
    pod["metadata"]["namespace"] = namespace.into();
    pod["spec"]["priorityClassName"] = class.into();
    pod
}

#[tokio::test]
async fn pods_get_only_the_pools_of_their_namespace() {
    let bed = bed(
        "access: {namespaces: {team: {pools: [training]}, open: {}, none: {pools: []}}, others: {pools: ['']}}",
    )
    .await;
    for (namespace, passed) in
        [("team", &NODES[..1]), ("open", &NODES[..]), ("else", &NODES[1..]), ("none", &[])]
    {
        let answer = bed.filter(of(namespace, namespace, ""), &NODES).await;
        assert_eq!(answer["NodeNames"], json!(passed), "{namespace}: {answer}");
        let refused = answer["FailedAndUnresolvableNodes"].as_object();
        let refused: Vec<&Value> = refused.into_iter().flat_map(|nodes| nodes.values()).collect();
        assert_eq!(refused.len(), 3 - passed.len(), "{namespace}");
        assert!(
            refused.iter().all(|why| **why == "pool not allowed for the namespace"),
            "{answer}"
        );
    }
    let (_, explained) = bed.get("/v1/explain?pod=none/none").await;
    let explained: Explanation = is_declared(explained.as_bytes());
    assert_eq!(explained.blocked_by, Some(Obstacle::Pool));
    assert!(explained.suggestions.iter().any(|it| it.contains("`access`")), "{explained:?}");
    // *bind* decides again, whatever *filter* said before.
    let body =
        json!({"PodName": "team", "PodNamespace": "team", "PodUID": "team", "Node": "gpu-b"});
    let (_, answer) = bed.post("/v1/bind", body.to_string()).await;
    assert!(!answer["Error"].as_str().unwrap().is_empty());
    assert_eq!(bed.app.ledger.reservation(&PodUid::new("team")), None);
}

#[tokio::test]
async fn a_class_gives_its_pods_policy_and_protection() {
    let bed = bed(
        "workloads: {serve: {priority_class: high, preemptible: false, policy: spread}, train: {}}",
    )
    .await;
    let seen = |class: &str, policy: Option<&str>, node: Option<&str>| {
        let mut pod = of("team", "p", class);
        if let Some(policy) = policy {
            pod["metadata"]["annotations"]["gpupack.dev/policy"] = policy.into();
        }
        pod["spec"]["nodeName"] = node.into();
        SeenPod::from_json(&pod.to_string()).unwrap()
    };
    let policy = |pod: &SeenPod| bed.app.query(pod).unwrap().gpu.unwrap().policy;
    assert_eq!(policy(&seen("high", None, None)), Some(Policy::Spread));
    assert_eq!(policy(&seen("high", Some("binpack"), None)), Some(Policy::BinPack), "its own");
    assert_eq!(policy(&seen("gpupack-train", None, None)), None, "that of the cluster");
    assert_eq!(policy(&seen("", None, None)), None);
    let protection = |class: &str| {
        let pod = seen(class, None, Some("gpu-a"));
        bed.app.fact(&pod, bed.app.request(&pod).map(Into::into)).tenure.protection
    };
    assert_eq!(protection("high"), Some(Protection::Always));
    assert_eq!((protection("gpupack-train"), protection("")), (None, None));
}

#[tokio::test]
async fn a_pod_with_what_is_not_allowed_is_refused_with_a_constant_reason() {
    let bed = bed(
        "workloads: {train: {}}\naccess: {others: {isolation: [none], policies: [spread], workloads: []}}",
    )
    .await;
    let mut annotated = of("team", "policy", "");
    annotated["metadata"]["annotations"]["gpupack.dev/policy"] = "binpack".into();
    let mut labelled = of("team", "label", "");
    labelled["metadata"]["labels"] = json!({"gpupack.dev/workload": "train"});
    for (pod, why) in [
        (annotated, "GPU request refused: it uses what is not allowed in its namespace"),
        (
            of("team", "class", "gpupack-train"),
            "GPU request refused: it uses what is not allowed in its namespace",
        ),
        (labelled, "GPU request refused: its label chooses another class of workloads than it has"),
    ] {
        let answer = bed.filter(pod, &NODES).await;
        let refused = answer["FailedAndUnresolvableNodes"].as_object().unwrap();
        assert!(refused.len() == 3 && refused.values().all(|it| it == why), "{answer}");
    }
    let answer = bed.filter(of("team", "plain", ""), &NODES).await;
    assert_eq!(answer["NodeNames"], json!(NODES), "{answer}");
}

#[tokio::test]
async fn a_node_that_comes_into_an_allowed_pool_is_room() {
    let bed = bed("access: {others: {pools: [training]}}").await;
    let see = |pool: &str| {
        let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(256 << 10) };
        bed.app.ledger.see_node(&NodeName::new("gpu-b"), host, PoolName::new(pool))
    };
    let room = LedgerEvent::Room(NodeName::new("gpu-b"));
    assert!(!see("").contains(&room), "it was there before");
    assert!(see("training").contains(&room));
    let answer = bed.filter(of("team", "p", ""), &NODES).await;
    assert_eq!(answer["NodeNames"], json!(["gpu-a", "gpu-b"]));
}

#[tokio::test]
async fn no_suggestion_names_an_isolation_that_is_not_allowed() {
    for (access, is_suggested) in [("{}", true), ("{isolation: [memory]}", false)] {
        let bed = bed(&format!("access: {{others: {access}}}")).await;
        let mut pod = of("team", "p", "");
        pod["metadata"]["annotations"]["gpupack.dev/isolation"] = "memory".into();
        bed.filter(pod, &NODES).await;
        let (_, explained) = bed.get("/v1/explain?pod=team/p").await;
        assert_eq!(
            explained.contains("accept `gpupack.dev/isolation: none`"),
            is_suggested,
            "{explained}"
        );
    }
}

#[tokio::test]
async fn a_pod_without_a_gpu_obeys_the_rules_for_classes_too() {
    let bed = bed("workloads: {train: {}}\naccess: {others: {workloads: []}}").await;
    for (class, priority, is_refused) in [("gpupack-train", 0, true), ("", 1, true), ("", 0, false)]
    {
        let mut pod = of("team", &format!("p-{class}{priority}"), class);
        pod["metadata"]["annotations"] = json!({});
        pod["spec"]["priority"] = priority.into();
        let answer = bed.filter(pod, &NODES).await;
        assert_eq!(answer["NodeNames"] == json!([]), is_refused, "{class} {priority}: {answer}");
    }
}
