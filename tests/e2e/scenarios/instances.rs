//! MIG instances on the real kubelet and containerd, made and removed by the agent with a stand-in for NVML:
//! judged by what the containers say of themselves, and by the instances of the stand-in.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::clock;
use crate::manifests::{self, Mode};
use crate::node::driver::Instances;
use crate::node::machine::{GpuRuntime, LIMIT, Machine, node_scenario, pod};

/// It ends at once.
fn brief(name: &str, annotations: &Value) -> Value {
    let mut pod = pod(name, annotations);
    pod["spec"]["terminationGracePeriodSeconds"] = 0.into();
    pod
}

fn instance(name: &str, mib: u64) -> Value {
    let annotations = json!({"gpu-memory": mib.to_string(), "gpupack.dev/isolation": "hardware"});
    brief(name, &annotations)
}

/// Creates a pod, and waits until its container has said on which device it runs: the device, and the time.
async fn run(node: &Machine, pod: &Value) -> (String, Duration) {
    let name = pod["metadata"]["name"].as_str().expect("it has one");
    let began = clock::now();
    node.create(pod).await;
    let on = node.reported(name, "main", 0).await.uuids().to_owned();
    (on, began.elapsed())
}

/// Waits until these instances are there and no others.
async fn until_made(node: &Machine, uuids: &[&str]) -> Duration {
    let started = clock::now();
    loop {
        let there: Instances = node.driver.instances();
        if there.keys().map(String::as_str).eq(uuids.iter().copied()) {
            return started.elapsed();
        }
        assert!(started.elapsed() < LIMIT, "{there:?} are there, not {uuids:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn is_running(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|it| it.phase.as_deref()) == Some("Running")
}

#[test]
fn containers_run_on_instances_that_are_made_for_them() {
    let settings = json!({"pools": {"": {"mig": "on_demand"}}});
    node_scenario("instances", GpuRuntime::Plain, settings, |node| async move {
        let (first, took) = run(&node, &instance("a", 9_000)).await;
        assert_eq!(node.driver.instances()[&first].0, "1g.10gb");
        node.until("running", "a", is_running).await;
        let (second, again) = run(&node, &instance("b", 38_000)).await;
        assert_eq!(node.driver.instances()[&second].0, "3g.40gb");
        // Kubelet restarts a container on the instance that its pod has.
        node.kill("b", "main").await;
        assert_eq!(node.reported("b", "main", 1).await.uuids(), second);
        node.delete("a").await;
        let gone = until_made(&node, &[&second]).await;
        node.figure(&format!(
            "containers run {} and {} ms after their pods were created, each on an instance made for it; \
             an instance is removed {} ms after its pod",
            clock::ms(took),
            clock::ms(again),
            clock::ms(gone)
        ));
    });
}

#[test]
fn a_container_moves_to_another_instance_so_that_a_pod_fits() {
    let settings = json!({"pools": {"": {"mig": "on_demand", "mig_moves": "restart"}}});
    node_scenario("making-way", GpuRuntime::Plain, settings, |node| async move {
        manifests::apply(&node.cluster.client, "moves.yaml", Mode::Keep).await;
        let (first, _) = run(&node, &instance("a", 38_000)).await;
        let (second, _) = run(&node, &instance("b", 38_000)).await;
        let mut small = instance("x", 9_000);
        small["metadata"]["annotations"]["gpupack.dev/movable"] = "restart".into();
        let (before, _) = run(&node, &small).await;
        let gpu_of = |uuid: &str| node.driver.gpu_of(uuid);
        let (full, other) = (gpu_of(&first), gpu_of(&before));
        assert_eq!((gpu_of(&second) == full, other == full), (true, false), "it had to go there");
        node.delete("a").await;
        until_made(&node, &sorted(&[&second, &before])).await;

        let began = clock::now();
        let (large, took) = run(&node, &instance("w", 75_000)).await;
        assert_eq!(gpu_of(&large), other);
        let after = node.reported("x", "main", 1).await.uuids().to_owned();
        assert_eq!(gpu_of(&after), full);
        until_made(&node, &sorted(&[&second, &after, &large])).await;
        node.until("restarted once", "x", |pod| is_running(pod) && restarts(pod) == 1).await;
        node.figure(&format!(
            "a pod that fits nowhere runs {} s after it was created: ten seconds later another one begins to move \
             to an instance on another GPU",
            took.as_secs_f32()
        ));
        assert!(began.elapsed() < 2 * LIMIT);
    });
}

fn sorted<'a>(uuids: &[&'a str]) -> Vec<&'a str> {
    let mut uuids = uuids.to_vec();
    uuids.sort_unstable();
    uuids
}

fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.map(|status| status.restart_count).sum()
}
