//! Pods that borrow what is idle on their node: where they start, and that they go home when another pod
//! needs the room. On the real kubelet and containerd, judged by what the containers say.

use std::time::Duration;

use serde_json::{Value, json};

use crate::checker::annotation;
use crate::clock;
use crate::manifests::{self, Mode};
use crate::node::image::BOX;
use crate::node::machine::{GpuRuntime, Machine, node_scenario};
use crate::scenarios::containers::restarts;

/// Longest time from the call for the third pod to its Binding, with a restart.
const STORY_WITHIN: Duration = Duration::from_secs(5);

fn pod(name: &str, annotations: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {
            "schedulerName": "gpupack", "hostNetwork": true, "restartPolicy": "Always",
            "automountServiceAccountToken": false, "enableServiceLinks": false,
            "containers": [{"name": "main", "image": BOX, "imagePullPolicy": "Never",
                "command": ["/bin/tell"], "resources": {"requests": {"cpu": "10m"}}}],
        },
    })
}

/// Half of a GPU that may use all of it, and may be moved. Its program is deaf to signals.
fn notebook(name: &str) -> Value {
    let annotations = json!({"gpu-fraction": "0.5", "gpu-fraction.limit": "1",
        "gpupack.dev/movable": "restart", "gpupack.dev/move-grace-seconds": "1"});
    pod(name, &annotations)
}

#[test]
fn two_notebooks_run_on_two_gpus_and_one_gives_way() {
    let settings = json!({"pools": {"": {"borrow": "compute"}}});
    node_scenario("borrow", GpuRuntime::Plain, settings, |node| async move {
        manifests::apply(&node.cluster.client, "moves.yaml", Mode::Keep).await;
        node.create(&notebook("nb-1")).await;
        let first = node.reported("nb-1", "main", 0).await.uuids().to_owned();
        node.create(&notebook("nb-2")).await;
        let second = node.reported("nb-2", "main", 0).await.uuids().to_owned();
        assert_ne!(first, second, "each runs on a GPU of its own");
        let placement = placement(&node, "nb-2").await;
        assert_eq!(placement["home"], json!([first]), "{placement}");
        assert_eq!(placement["devices"][0]["id"], json!(second), "{placement}");
        node.figure("two halves of one GPU run on two");
        let began = clock::now();
        node.create(&pod("train", &json!({"gpu-fraction": "1"}))).await;
        let train = node
            .until("bound", "train", |pod| annotation(pod, "placed.gpupack.dev/uuids").is_some())
            .await;
        let took = began.elapsed();
        assert_eq!(annotation(&train, "placed.gpupack.dev/uuids"), Some(&*second));
        let moved = node.reported("nb-2", "main", 1).await;
        assert_eq!(moved.uuids(), first, "nb-2 went home");
        let seen = node.until("restarted once", "nb-2", |pod| restarts(pod, "main") == 1).await;
        assert_eq!(restarts(&seen, "main"), 1);
        let other = node.until("there", "nb-1", |_| true).await;
        assert_eq!(restarts(&other, "main"), 0, "nb-1 goes on");
        assert!(took < STORY_WITHIN, "{took:?}");
        node.figure(&format!("the third pod had its GPU after {} ms", clock::ms(took)));
        node.watching.verdict();
    });
}

async fn placement(node: &Machine, name: &str) -> Value {
    let pod = node
        .until("placed", name, |pod| annotation(pod, "placed.gpupack.dev/placement").is_some())
        .await;
    let text = annotation(&pod, "placed.gpupack.dev/placement").expect("just seen");
    serde_json::from_str(text).expect("JSON")
}
