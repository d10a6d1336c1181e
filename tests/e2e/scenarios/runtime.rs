//! What NVIDIA's own container runtime makes of the values that gpupack writes: device nodes and
//! control groups, in each of its modes.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use super::containers::pod;
use crate::checker::{DEVICES, PLACEMENT, annotation};
use crate::clock;
use crate::cluster::SeenEvent;
use crate::control_plane::Identity;
use crate::node::driver::MINORS;
use crate::node::image::CUDA;
use crate::node::machine::{GpuRuntime, LIMIT, Machine, Reported, node_scenario};
use crate::node::runtime::NODE;
use crate::node::toolkit::{Mode, Release, Setting};

#[test]
fn the_runtime_provides_only_the_gpu_of_the_reservation() {
    let settings = json!({"webhook": {"unmanaged_runtime_class": "blank"}});
    node_scenario("runtime", GpuRuntime::Nvidia, settings, |mut node| async move {
        for &mode in Release::wanted().modes {
            let setting = Setting { mode, ..Setting::default() };
            node.toolkit.as_ref().expect("NVIDIA's runtime").set(&setting);
            placed_in(&node, mode).await;
            lost_and_found(&node, mode).await;
            if !Release::wanted().is_legacy(mode) {
                nothing_by_image(&node, mode).await;
                named_by_hand(&node, mode).await;
            }
        }
        node.watching.verdict();
        // Nothing moves pods yet; the checker would report a fault.
        moved_in_place(&mut node).await;
    });
}

/// The device node of a GPU, and its minor number.
fn device_of(node: &Machine, uuid: &str) -> (String, String) {
    let index = node.uuids().iter().position(|known| *known == uuid).expect("a GPU of the node");
    (format!("nvidia{}", MINORS[index]), MINORS[index].to_string())
}

/// The container has this GPU and no other, as nodes and by its control group.
pub(crate) fn has_only(node: &Machine, uuid: &str, container: &Reported) {
    let (device, minor) = device_of(node, uuid);
    let nodes = container.nodes();
    assert_eq!(gpus(container), [device.as_str()], "{nodes:?}");
    assert!(nodes.contains(&"nvidiactl") && nodes.contains(&"nvidia-uvm"), "{nodes:?}");
    assert_eq!(container.open(), [minor.as_str()], "what its control group allows it to open");
    assert_eq!(container.uuids(), uuid, "what the workload sees");
}

/// The GPUs among a container's device nodes.
pub(crate) fn gpus(container: &Reported) -> Vec<&str> {
    let is_gpu = |name: &&str| name.trim_start_matches("nvidia").parse::<u32>().is_ok();
    container.nodes().into_iter().filter(is_gpu).collect()
}

pub(crate) fn has_none(container: &Reported) {
    assert_eq!((container.nodes(), container.open()), (vec![], vec![]));
}

/// One GPU, and two.
async fn placed_in(node: &Machine, mode: Mode) {
    let name = format!("share-{}", mode.name());
    let both = format!("both-{}", mode.name());
    node.create(&pod(&name, &json!({"gpu-fraction": "0.5"}))).await;
    let main = node.reported(&name, "main", 0).await;
    has_only(node, &node.placed(&name).await, &main);
    for other in ["setup", "side"] {
        has_none(&node.reported(&name, other, 0).await);
    }
    let devices = json!({"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"});
    node.create(&pod(&both, &devices)).await;
    let main = node.reported(&both, "main", 0).await;
    assert_eq!(gpus(&main), ["nvidia1", "nvidia3"], "both GPUs in mode {}", mode.name());
    assert_eq!(main.open(), ["1", "3"]);
    node.figure(&format!(
        "mode {}: the GPU of the placement, its node and nothing else; both where two are placed",
        mode.name()
    ));
    debugged(node, &name).await;
    node.kill(&name, "main").await;
    has_only(node, &node.placed(&name).await, &node.reported(&name, "main", 1).await);
    node.delete(&name).await;
    node.delete(&both).await;
}

/// A debug container whose image requests every GPU, in a pod that has one.
async fn debugged(node: &Machine, name: &str) {
    let debug = json!({"name": "debug", "image": CUDA, "imagePullPolicy": "Never", "command": ["/bin/tell"]});
    let patch = Patch::Strategic(json!({"spec": {"ephemeralContainers": [debug]}}));
    let api = node.cluster.pods();
    let added = api.patch_ephemeral_containers(name, &PatchParams::default(), &patch).await;
    added.unwrap_or_else(|error| panic!("no debug container: {error}"));
    has_none(&node.reported(name, "debug", 0).await);
}

/// A pod without a request whose image says `all`.
pub(crate) fn greedy(name: &str, class: Option<&str>) -> Value {
    let mut pod = pod(name, &json!({}));
    let main = json!([{"name": "main", "image": CUDA, "imagePullPolicy": "Never", "command": ["/bin/tell"]}]);
    pod["spec"]["containers"] = main;
    pod["spec"]["initContainers"] = json!([]);
    pod["spec"]["schedulerName"] = "default-scheduler".into();
    pod["spec"]["nodeName"] = NODE.into();
    if let Some(class) = class {
        pod["spec"]["runtimeClassName"] = class.into();
    }
    pod
}

/// An image that says `all` gets nothing. That it would get everything is shown where gpupack leaves
/// pods alone.
async fn nothing_by_image(node: &Machine, mode: Mode) {
    let blanked = format!("blanked-{}", mode.name());
    node.create(&greedy(&blanked, Some("nvidia"))).await;
    has_none(&node.reported(&blanked, "main", 0).await);
    let plain = format!("plain-{}", mode.name());
    node.create(&greedy(&plain, None)).await;
    has_none(&node.reported(&plain, "main", 0).await);
    let exempt = format!("exempt-{}", mode.name());
    let mut pod = greedy(&exempt, Some("nvidia"));
    pod["metadata"]["namespace"] = "kube-system".into();
    node.create(&pod).await;
    let exempt = format!("kube-system/{exempt}");
    let all = node.reported(&exempt, "main", 0).await;
    assert_eq!(gpus(&all), ["nvidia1", "nvidia3"], "without gpupack it gets every GPU");
    node.figure(&format!(
        "mode {}: image with `all`: no GPU under the class, in a side car or as debug container; \
         every GPU in a namespace that gpupack leaves alone",
        mode.name()
    ));
    for name in [&blanked, &plain, &exempt] {
        node.delete(name).await;
    }
}

/// The status of the container with the GPU.
fn main_status(pod: &Pod) -> Option<&ContainerStatus> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == "main")
}

/// Why the container could not be started, in the runtime's words.
fn start_error(pod: &Pod) -> Option<String> {
    let status = main_status(pod)?;
    let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
    let refused = waiting.filter(|it| it.reason.as_deref() == Some("RunContainerError"));
    let ended = status.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let failed = ended.filter(|it| it.reason.as_deref() == Some("StartError"));
    refused.and_then(|it| it.message.clone()).or_else(|| failed.and_then(|it| it.message.clone()))
}

fn is_running(pod: &Pod) -> bool {
    main_status(pod).and_then(|it| it.state.as_ref()).is_some_and(|it| it.running.is_some())
}

/// The driver loses a GPU, and its tenant's container has to restart.
async fn lost_and_found(node: &Machine, mode: Mode) {
    let name = format!("lost-{}", mode.name());
    node.create(&pod(&name, &json!({"gpu-fraction": "0.5"}))).await;
    node.reported(&name, "main", 0).await;
    let placed = node.placed(&name).await;
    node.driver.lose(&node.fleet.nodes[0].gpus, &placed);
    node.kill(&name, "main").await;
    let pod = node.until("refused by the runtime", &name, |pod| start_error(pod).is_some()).await;
    let message = start_error(&pod).expect("it was there");
    node.figure(&format!("mode {}: a lost GPU: {message}", mode.name()));
    explained(node, &name).await;
    node.driver.play(&node.fleet.nodes[0].gpus, &[]);
    let pod = node.until("started anew", &name, is_running).await;
    let life = main_status(&pod).map_or(0, |it| it.restart_count);
    let main = node.reported(&name, "main", life.unsigned_abs()).await;
    has_only(node, &placed, &main);
    let path = format!("/v1/explain?pod={}/{name}", node.cluster.namespace);
    let explanation = node.extender.page(&path).await;
    assert!(!explanation.contains("cannot start"), "{explanation}");
    node.delete(&name).await;
}

/// Waits for the event on a pod whose container cannot start. Returns its text.
pub(crate) async fn until_explained(node: &Machine, name: &str) -> String {
    let started = clock::now();
    let (cluster, short) = node.place(name);
    let is_reported = |event: &SeenEvent| event.pod == short && event.reason == "GpuStartFailed";
    loop {
        let events = cluster.events().await;
        if let Some(event) = events.into_iter().find(|event| is_reported(event)) {
            return event.message;
        }
        assert!(started.elapsed() < LIMIT, "no event on {name}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The event on the pod, and the explanation, name the suggestion.
async fn explained(node: &Machine, name: &str) {
    let started = clock::now();
    let note = until_explained(node, name).await;
    let took = clock::ms(started.elapsed());
    let path = format!("/v1/explain?pod={}/{name}", node.cluster.namespace);
    let explanation = node.extender.page(&path).await;
    for part in ["delete the pod", "container `main` cannot start: the driver of its node"] {
        assert!(note.contains(part) && explanation.contains(part), "{note}\n{explanation}");
    }
    let state = node.extender.page("/v1/state").await;
    assert!(state.contains("\"startFailure\":\"container `main`"), "{state}");
    node.figure(&format!(
        "the event `GpuStartFailed`, {took} ms after kubelet reported it: {note}"
    ));
}

/// Without the webhook, a template that takes the bare UUID: good enough for two modes, and explained
/// in the third.
async fn named_by_hand(node: &Machine, mode: Mode) {
    let short = format!("bare-{}", mode.name());
    let mut bare = pod(&short, &json!({"gpu-fraction": "0.5"}));
    bare["metadata"]["namespace"] = "kube-system".into();
    bare["spec"]["runtimeClassName"] = "nvidia".into();
    bare["spec"]["initContainers"] = json!([]);
    let from =
        |key: &str| json!({"fieldRef": {"fieldPath": format!("metadata.annotations['{key}']")}});
    let uuids = "placed.gpupack.dev/uuids";
    let containers = bare["spec"]["containers"].as_array_mut().expect("a list");
    containers.truncate(1);
    containers[0]["env"] = json!([
        {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": from(uuids)},
        {"name": "GPUPACK_DEVICE_UUIDS", "valueFrom": from(uuids)},
    ]);
    node.create(&bare).await;
    let name = format!("kube-system/{short}");
    if mode == Mode::Cdi {
        let note = until_explained(node, &name).await;
        for part in ["`placed.gpupack.dev/devices`", "unresolvable CDI devices"] {
            assert!(note.contains(part), "{note}");
        }
        node.figure(&format!("mode {}: a bare UUID: {note}", mode.name()));
    } else {
        let main = node.reported(&name, "main", 0).await;
        has_only(node, &node.placed(&name).await, &main);
        node.figure(&format!("mode {}: a bare UUID: that GPU and no other", mode.name()));
    }
    node.delete(&name).await;
}

/// Only gpupack may give a pod another GPU of its node: a changed record and the end
/// of a process are enough.
async fn moved_in_place(node: &mut Machine) {
    node.create(&pod("moved", &json!({"gpu-fraction": "0.5"}))).await;
    let main = node.reported("moved", "main", 0).await;
    has_only(node, &node.placed("moved").await, &main);
    let (before, from) = (node.pod("moved").await, node.placed("moved").await);
    let uuids = node.uuids();
    let to = uuids.iter().find(|other| **other != from).expect("two GPUs").to_string();
    let to = to.as_str();
    let mut keys = serde_json::Map::new();
    for key in [PLACEMENT, DEVICES, "placed.gpupack.dev/uuids"] {
        let value = annotation(&before, key).expect("it is placed").replace(&from, to);
        keys.insert(key.to_owned(), value.into());
    }
    // A running extender takes this for an edit by somebody else, and writes back what was there.
    node.extender.kill();
    let ours = node.plane.client(Identity::Extender).await;
    let api: Api<Pod> = Api::namespaced(ours, &node.cluster.namespace);
    let patch = Patch::Merge(json!({"metadata": {"annotations": keys}}));
    let patched = api.patch("moved", &PatchParams::default(), &patch).await;
    patched.unwrap_or_else(|error| panic!("gpupack may move its pods: {error}"));
    // Kubelet makes the next container from the pod as it knows it, and does not report that: its watch
    // brings the change within milliseconds, but a process that ends sooner finds the old record.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let started = clock::now();
    node.kill("moved", "main").await;
    let main = node.reported("moved", "main", 1).await;
    let took = clock::ms(started.elapsed());
    has_only(node, to, &main);
    let after = node.pod("moved").await;
    node.extender.start_again().await;
    assert_eq!(before.metadata.uid, after.metadata.uid, "the same pod");
    assert_eq!((node.tenants(&from).await.len(), node.tenants(to).await.len()), (0, 1));
    node.figure(&format!(
        "moved to the other GPU in the same pod, {took} ms after its process ended"
    ));
}
