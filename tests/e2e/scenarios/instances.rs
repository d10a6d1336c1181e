//! MIG instances on the real kubelet and containerd, made and removed by the agent with a stand-in for NVML:
//! judged by what the containers say of themselves, and by the instances of the stand-in.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::clock;
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
