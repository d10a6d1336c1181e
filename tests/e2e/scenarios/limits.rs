//! The limit of memory that the webhook writes, from the pod to the driver and back into the state.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use wire::api::state::IsolationMode;

use super::containers::pod;
use super::runtime::{has_only, until_explained};
use crate::clock;
use crate::node::alone::{self, is_version_2};
use crate::node::machine::{GpuRuntime, LIMIT, Machine, Reported, node_scenario};
use crate::node::toolkit::Release;

/// What the pod requests, and is held to.
const MIB: u64 = 4_096;

#[test]
fn the_driver_gets_the_limit_of_the_share() {
    let settings = json!({"webhook": {"memory_limit": "driver"}});
    node_scenario("limits", GpuRuntime::Nvidia, settings, |node| async move {
        node.create(&pod("limited", &json!({"gpu-memory": MIB.to_string()}))).await;
        if !Release::wanted().limits_memory() {
            return ignored(&node).await;
        }
        let process = if is_version_2() {
            node.reported("limited", "main", 0).await;
            node.process("limited", "main").await.1
        } else {
            on_version_1(&node).await
        };
        let placed = node.placed("limited").await;
        let group = passed_to_the_driver(&node, &placed).await;
        node.figure(&format!("the driver got: soft 0, hard {MIB} MiB, for {group}"));
        verified(&node, &placed, process).await;
        node.watching.verdict();
    });
}

/// A toolkit that does not know the variables: the container runs without a limit, and no state says that it has
/// one.
async fn ignored(node: &Machine) {
    let reported = node.reported("limited", "main", 0).await;
    let placed = node.placed("limited").await;
    has_only(node, &placed, &reported);
    let process = node.process("limited", "main").await.1;
    let index = node.uuids().iter().position(|uuid| *uuid == placed).expect("a GPU of the node");
    node.driver.play(&node.fleet.nodes[0].gpus, &[(index, process, 1_000)]);
    assert_eq!(node.until_used(&placed, "limited").await, 1_000);
    assert_eq!(node.driver.limits(), "", "the driver was never called");
    let (configured, verified) = node.isolation(&placed, "limited").await;
    assert_eq!(configured, IsolationMode::Driver);
    assert_eq!(verified, IsolationMode::None, "nothing can be read back");
    let version = Release::wanted().version;
    node.figure(&format!("{version}: no limit and no error; configured `Driver`, verified `None`"));
    node.watching.verdict();
}

/// kubelet cannot start such a container on version 1, which is explained; the runtime alone can, on
/// version 2. Returns the container's first process.
async fn on_version_1(node: &Machine) -> u32 {
    let note = until_explained(node, "limited").await;
    for part in ["its node cannot limit the memory", "`webhook.memory_limit: none`", "cgroup v2"] {
        assert!(note.contains(part), "{note}");
    }
    node.figure(&format!("on control groups version 1: {note}"));
    reported_at_its_end(node).await;
    let pod = node.pod("limited").await;
    let containers = &pod.spec.as_ref().expect("a spec").containers;
    let main = containers.iter().find(|it| it.name == "main").expect("a container");
    alone::start(node, &pod, main);
    let log = node.work.join("alone.log");
    let started = clock::now();
    loop {
        let printed = std::fs::read_to_string(&log).unwrap_or_default();
        if let Some(reported) = Reported::of(&printed) {
            has_only(node, &node.placed("limited").await, &reported);
            node.figure("by the runtime alone on version 2: its GPU and no other");
            return node.runtime.process(alone::ID).expect("it runs").1;
        }
        assert!(
            started.elapsed() < LIMIT,
            "the runtime alone does not start a container: {printed}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A pod that is not retried ends immediately, and still has its event.
async fn reported_at_its_end(node: &Machine) {
    let mut once = pod("once", &json!({"gpu-memory": MIB.to_string()}));
    once["spec"]["restartPolicy"] = "Never".into();
    once["spec"]["containers"].as_array_mut().expect("a list").truncate(1);
    node.create(&once).await;
    let has_failed = |pod: &Pod| {
        pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Failed")
    };
    node.until("failed", "once", has_failed).await;
    until_explained(node, "once").await;
    node.figure("a pod that is not tried again fails, and has the event too");
}

/// The driver has the limit for a group of this pod, and nothing else. Returns the group.
async fn passed_to_the_driver(node: &Machine, placed: &str) -> String {
    let uid = node.pod("limited").await.metadata.uid.expect("every object has a UID");
    let limits = node.driver.limits();
    let lines: Vec<&str> = limits.lines().collect();
    let [line] = lines[..] else { panic!("one call on one GPU: {lines:?}") };
    let hard = MIB << 20;
    let group = line.strip_prefix(&format!("{placed} 0 {hard} /sys/fs/cgroup/"));
    let group = group.unwrap_or_else(|| panic!("not the limit of the share: {line}"));
    assert!(group.contains(&format!("/pod{uid}/")), "not the container's own group: {line}");
    group.to_owned()
}

/// The agent reads the limit back for a process of the container, and the state shows it.
async fn verified(node: &Machine, placed: &str, process: u32) {
    let index = node.uuids().iter().position(|uuid| *uuid == placed).expect("a GPU of the node");
    node.driver.play(&node.fleet.nodes[0].gpus, &[(index, process, 1_000)]);
    assert_eq!(node.until_used(placed, "limited").await, 1_000);
    let started = clock::now();
    loop {
        let (configured, verified) = node.isolation(placed, "limited").await;
        assert_eq!(configured, IsolationMode::Driver);
        if verified == IsolationMode::Driver {
            break;
        }
        assert!(started.elapsed() < LIMIT, "the limit is not read back: {verified:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    node.figure("the agent read the limit back: configured `Driver`, verified `Driver`");
}
