//! What each release of NVIDIA's container toolkit gives a container behind the GPU Operator's wrapper, by the
//! settings that decide: with and without the driver's module, wherever the driver is, and with the variable
//! accepted from unprivileged containers or not.
//!
//! `GPUPACK_TOOLKIT=1.17.8 cargo test --features e2e --test e2e scenarios::toolkits:: -- --nocapture` tries
//! another release: 1.17.8, 1.18.0, 1.19.1, or 1.20.1 as without the variable. The scenarios `runtime`,
//! `limits` and `install` follow it too. `docs/platforms.md` has what was seen.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::containers::pod;
use super::runtime::{gpus, greedy, has_none, has_only};
use crate::clock;
use crate::node::machine::{GpuRuntime, Machine, node_scenario};
use crate::node::toolkit::{Mode, Release, Root, Setting, Toolkit};
use crate::webhook::reported;

/// The path by which the toolkit takes devices from mounts, without a slash and with a name behind it.
const MOUNTED: &str = "/var/run/nvidia-container-devicesall";

/// The variable that the toolkit's own text has as an example of `swarm-resource`.
const SWARM: &str = "DOCKER_RESOURCE_GPU";

#[test]
fn what_is_placed_is_what_each_release_gives() {
    // Without the list, a mount of `/dev/null` alone would be refused already.
    let settings = json!({"webhook":
        {"unmanaged_runtime_class": "blank", "allowed_host_paths": ["/dev/null"]}});
    node_scenario("toolkits", GpuRuntime::Nvidia, settings, |node| async move {
        before_the_driver(&node).await;
        for root in [Root::Container, Root::Machine] {
            if root == Root::Machine && !is_on_the_machine(&node) {
                continue;
            }
            given(&node, Setting { root, ..Setting::default() }).await;
        }
        ignored(&node).await;
        toolkit(&node).set(&Setting::default());
        by_other_ways(&node).await;
        node.watching.verdict();
    });
}

fn toolkit(node: &Machine) -> &Toolkit {
    node.toolkit.as_ref().expect("NVIDIA's runtime")
}

/// Puts the driver on the machine itself, or says why not.
fn is_on_the_machine(node: &Machine) -> bool {
    let driven = toolkit(node).drive_the_machine(&node.runtime.cage, &node.driver);
    if let Err(why) = &driven {
        node.figure(&format!("driver root /: not tried, because {why}"));
    }
    driven.is_ok()
}

/// A container that starts before the driver is loaded runs without a GPU, with no error, for its whole life.
async fn before_the_driver(node: &Machine) {
    toolkit(node).unload_module();
    node.create(&pod("early", &json!({"gpu-fraction": "0.5"}))).await;
    let main = node.reported("early", "main", 0).await;
    has_none(&main);
    assert_eq!(main.libraries(), "0");
    let placed = node.placed("early").await;
    assert_eq!(main.devices(), format!("runtime.nvidia.com/gpu={placed}"), "no runtime read it");
    toolkit(node).load_module();
    node.kill("early", "main").await;
    let main = node.reported("early", "main", 1).await;
    has_only(node, &placed, &main);
    assert_ne!(main.libraries(), "0");
    node.figure(
        "before the driver: it runs with no device, no library and no error; after a restart of its \
         container with its GPU",
    );
    node.delete("early").await;
}

/// One GPU in part, two in part and one whole, each in a pod of several containers.
async fn given(node: &Machine, wanted: Setting) {
    toolkit(node).set(&wanted);
    let root = wanted.root.path();
    let requests = [
        ("part", json!({"gpu-fraction": "0.5"})),
        ("parts", json!({"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"})),
        ("whole", json!({"gpu-fraction": "1"})),
    ];
    let mut said = Vec::new();
    let setting = format!("{}-root", root.replace('/', "-"));
    for (kind, annotations) in &requests {
        let name = format!("{kind}{setting}");
        node.create(&pod(&name, annotations)).await;
        let main = node.reported(&name, "main", 0).await;
        let placed = node.placed(&name).await;
        for other in ["setup", "side"] {
            has_none(&node.reported(&name, other, 0).await);
        }
        if placed.contains(',') {
            assert_eq!((gpus(&main).len(), main.open().len()), (2, 2));
        } else {
            has_only(node, &placed, &main);
        }
        said.push(format!("{kind}: {}", told(&main.nodes())));
        node.delete(&name).await;
    }
    if Release::wanted().is_legacy(wanted.mode) {
        // `all` would go to `libnvidia-container`.
        toolkit(node).set(&Setting { mode: Mode::Cdi, ..wanted });
    }
    let agent = every_gpu(node, &greedy(&format!("agent{setting}"), Some("nvidia"))).await;
    assert_eq!(agent.len(), 2, "an agent without privileges");
    said.push(format!("`all`, as for an agent: {}", told(&agent)));
    let Release { version, operator, .. } = Release::wanted();
    node.figure(&format!(
        "{version} (operator {operator}), root {root}, variable accepted: {}",
        said.join("; ")
    ));
}

/// A toolkit that does not accept the variable: containers get nothing, with no error. After two of them no pod is
/// bound there any more.
async fn ignored(node: &Machine) {
    let mut wanted = Setting { accepts_variable: false, ..Setting::default() };
    if Release::wanted().is_legacy(wanted.mode) {
        wanted.mode = Mode::Cdi; // the other one takes `libnvidia-container`
    }
    toolkit(node).set(&wanted);
    let agent = every_gpu(node, &greedy("agent-ignored", Some("nvidia"))).await;
    assert!(agent.is_empty(), "an agent without privileges");
    for name in ["ignored-1", "ignored-2"] {
        node.create(&pod(name, &json!({"gpu-fraction": "0.5"}))).await;
        let main = node.reported(name, "main", 0).await;
        has_none(&main);
        assert_eq!(main.libraries(), "0");
        // What an owner, or a probe, can tell it by: a runtime that acts on the variable empties it.
        assert!(main.devices().starts_with("runtime.nvidia.com/gpu="), "{}", main.devices());
    }
    let is_refused = |pod: &Pod| {
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let mut messages = conditions.filter_map(|condition| condition.message.as_deref());
        messages.any(|message| message.contains("containers on the node do not get their GPU"))
    };
    let third = pod("ignored-3", &json!({"gpu-fraction": "0.5"}));
    let began = clock::now();
    while began.elapsed() < Duration::from_secs(15) {
        node.create(&third).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        if is_refused(&node.pod("ignored-3").await) {
            node.figure("variable not accepted: two pods have nothing, and no third one is bound");
            return;
        }
        node.delete("ignored-3").await;
    }
    panic!("pods are bound to a node whose containers get no GPU");
}

fn told(nodes: &[impl AsRef<str>]) -> String {
    let nodes: Vec<&str> = nodes.iter().map(AsRef::as_ref).collect();
    if nodes.is_empty() { "nothing".to_owned() } else { nodes.join(" ") }
}

/// The GPUs of a container in a namespace that gpupack leaves alone.
async fn every_gpu(node: &Machine, pod: &Value) -> Vec<String> {
    let mut pod = pod.clone();
    pod["metadata"]["namespace"] = "kube-system".into();
    node.create(&pod).await;
    let name = format!("kube-system/{}", pod["metadata"]["name"].as_str().expect("it has one"));
    let reported = node.reported(&name, "main", 0).await;
    node.delete(&name).await;
    gpus(&reported).into_iter().map(str::to_owned).collect()
}

/// Two more ways by which a container names devices, where the toolkit is configured so: the webhook refuses
/// both.
async fn by_other_ways(node: &Machine) {
    let (release, void) =
        (Release::wanted(), json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]));
    let mut mounting = greedy("mounting", Some("nvidia"));
    mounting["spec"]["containers"][0]["env"] = void.clone();
    mounting["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "null", "mountPath": MOUNTED}]);
    mounting["spec"]["volumes"] = json!([{"name": "null", "hostPath": {"path": "/dev/null"}}]);
    let setting = Setting { mode: Mode::Cdi, ..Setting::default() };
    toolkit(node).set(&Setting { accepts_mounts: true, ..setting });
    let got = every_gpu(node, &mounting).await;
    node.figure(&format!("{}: a mount at {MOUNTED} gives {}", release.version, told(&got)));
    refused(node, &mounting, "nvidia-container-devicesall").await;

    let mut swarming = greedy("swarming", Some("nvidia"));
    swarming["spec"]["containers"][0]["env"] = void;
    let named = json!({"name": SWARM, "value": "all"});
    swarming["spec"]["containers"][0]["env"].as_array_mut().expect("a list").push(named);
    toolkit(node).set(&Setting { swarm_resource: SWARM, ..setting });
    let got = every_gpu(node, &swarming).await;
    assert_eq!(!got.is_empty(), release.reads_swarm_resource());
    node.figure(&format!("{}: {SWARM}=all beside `void` gives {}", release.version, told(&got)));
    refused(node, &swarming, SWARM).await;
}

/// A user's pod of this kind, with a request for a part of a GPU.
async fn refused(node: &Machine, pod: &Value, part: &str) {
    let mut pod = pod.clone();
    pod["metadata"]["annotations"] = json!({"gpu-fraction": "0.5"});
    let spec = pod["spec"].as_object_mut().expect("a spec");
    spec.remove("nodeName");
    spec.insert("schedulerName".to_owned(), "gpupack".into());
    let env = pod["spec"]["containers"][0]["env"].as_array_mut().expect("a list");
    env.retain(|variable| variable["name"] != "NVIDIA_VISIBLE_DEVICES");
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let created = node.cluster.pods().create(&PostParams::default(), &pod).await;
    let message = reported(&created.expect_err("it would get every GPU"));
    assert!(message.contains(part), "{message}");
}
