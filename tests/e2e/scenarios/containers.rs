//! What is placed is what runs: pods on the real kubelet and containerd, judged by what their own
//! containers say.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::node::image::{BOX, CUDA};
use crate::node::machine::{GpuRuntime, Machine, node_scenario};
use crate::webhook::reported;

/// A pod with an init container, the container of the GPU, and one more whose image requests every GPU.
pub(crate) fn pod(name: &str, annotations: &Value) -> Value {
    let container = |name: &str, image: &str, command: &[&str]| {
        json!({"name": name, "image": image, "imagePullPolicy": "Never", "command": command,
               "resources": {"requests": {"cpu": "10m"}}})
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {
            "schedulerName": "gpupack", "hostNetwork": true, "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "initContainers": [container("setup", CUDA, &["/bin/tell", "once"])],
            "containers": [
                container("main", BOX, &["/bin/tell"]),
                container("side", CUDA, &["/bin/tell"]),
            ],
        },
    })
}

/// How often a container was restarted.
pub(crate) fn restarts(pod: &Pod, container: &str) -> i32 {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    let mut all = statuses.into_iter().flatten().filter(|status| status.name == container);
    all.next().map_or(0, |status| status.restart_count)
}

#[test]
fn containers_get_the_gpu_of_their_reservation() {
    node_scenario("containers", GpuRuntime::Plain, json!({}), |node| async move {
        node.create(&pod("half-a", &json!({"gpu-fraction": "0.5"}))).await;
        node.create(&pod("half-b", &json!({"gpu-fraction": "0.5"}))).await;
        node.create(&pod("memory", &json!({"gpu-memory": "20000"}))).await;
        for name in ["half-a", "half-b", "memory"] {
            as_in_the_ledger(&node, name, 0).await;
        }
        let mut sharers: Vec<usize> = Vec::new();
        for uuid in node.uuids() {
            sharers.push(node.tenants(uuid).await.len());
        }
        sharers.sort_unstable();
        assert_eq!(sharers, [1, 2], "two halves fill one GPU, the third pod has the other");
        node.figure("0.5 + 0.5 + 20000 MiB run on two GPUs; 9 containers see their reservation");
        joined_by_the_agent(&node).await;
        kept_by_a_restart(&node).await;
        node.watching.verdict();
    });
}

/// The container with the GPU sees what the record and the ledger say, and the others see nothing.
async fn as_in_the_ledger(node: &Machine, name: &str, life: u32) {
    let main = node.reported(name, "main", life).await;
    let placed = node.placed(name).await;
    assert!(node.uuids().contains(&placed.as_str()), "{name} has one GPU of the node: {placed}");
    let full_name = format!("{}/{name}", node.cluster.namespace);
    assert!(node.tenants(&placed).await.contains(&full_name), "{name} in the ledger of {placed}");
    assert_eq!(main.devices(), format!("runtime.nvidia.com/gpu={placed}"), "{name}");
    assert_eq!(main.uuids(), placed, "{name}");
    let mib: u64 = main.mib().parse().expect("a whole number");
    assert_eq!(mib, if name == "memory" { 20_000 } else { 40_660 }, "{name}");
    for other in ["setup", "side"] {
        let other = node.reported(name, other, 0).await;
        assert_eq!((other.devices(), other.uuids()), ("void", ""), "{name}");
    }
}

/// The agent finds the pod of a process by the control groups that this kubelet makes.
async fn joined_by_the_agent(node: &Machine) {
    let placed = node.placed("memory").await;
    let index = node.uuids().iter().position(|uuid| *uuid == placed).expect("a GPU of the node");
    let (_, process) = node.process("memory", "main").await;
    node.driver.play(&node.fleet.nodes[0].gpus, &[(index, process, 12_345)]);
    let used = node.until_used(&placed, "memory").await;
    assert_eq!(used, 12_345, "what the process uses is the pod's");
    node.driver.play(&node.fleet.nodes[0].gpus, &[]);
    node.figure("a process in a container of this kubelet is counted as its pod's");
}

async fn kept_by_a_restart(node: &Machine) {
    let before = node.placed("half-a").await;
    node.kill("half-a", "main").await;
    let main = node.reported("half-a", "main", 1).await;
    assert_eq!(main.uuids(), before, "the same GPU after a restart");
    as_in_the_ledger(node, "half-a", 1).await;
    edited(node, &before).await;
    node.kill("half-a", "main").await;
    let main = node.reported("half-a", "main", 2).await;
    assert_eq!(main.uuids(), before, "the same GPU after an edit that was refused");
    let pod = node.until("restarted twice", "half-a", |pod| restarts(pod, "main") == 2).await;
    assert_eq!(restarts(&pod, "side"), 0);
    node.figure("two restarts of a container keep its GPU; an edit in between is refused");
}

/// A user with all rights tries to give the pod the other GPU.
async fn edited(node: &Machine, uuid: &str) {
    let uuids = node.uuids();
    let other = uuids.iter().find(|other| **other != uuid).expect("two GPUs");
    for (key, value) in [
        ("placed.gpupack.dev/devices", format!("runtime.nvidia.com/gpu={other}")),
        ("placed.gpupack.dev/uuids", (*other).to_owned()),
    ] {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {key: value}}}));
        let patched = node.cluster.pods().patch("half-a", &PatchParams::default(), &patch).await;
        let message = reported(&patched.expect_err("an edit of what is ours"));
        assert!(message.contains("only by gpupack"), "{message}");
    }
}
