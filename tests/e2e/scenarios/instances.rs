//! MIG instances on the real kubelet and containerd, made and removed by the agent with a stand-in for NVML:
//! judged by what the containers say of themselves, and by the instances of the stand-in.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::clock;
use crate::node::driver::{Instances, MINORS};
use crate::node::machine::{GpuRuntime, LIMIT, Machine, Reported, node_scenario, pod};
use crate::node::toolkit::{Release, Root, Setting};

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

/// The nodes of an instance as the driver's files have them: those of the GPU instance and of its compute instance.
fn nodes_of(gpu: u32, instance: u64) -> [String; 2] {
    [0, 1].map(|part| format!("nvidia-cap{gpu}{instance}{part}"))
}

/// The container has its parent's node and those two of its instance, and may open no other.
fn has_only_its_instance(node: &Machine, container: &Reported) -> Vec<String> {
    let (gpu, instance) =
        node.driver.numbers(&node.uuids(), container.uuids()).expect("an instance");
    let expected = nodes_of(MINORS[gpu], instance).to_vec();
    assert_eq!(container.instance_nodes(), expected, "on {}", container.uuids());
    assert_eq!(container.instance_rights(), expected, "what its control group allows it to open");
    assert_eq!(container.open(), [MINORS[gpu].to_string()], "the parent");
    assert!(container.nodes().contains(&format!("nvidia{}", MINORS[gpu]).as_str()));
    expected
}

/// NVIDIA's runtime leaves out a node that it does not find, and starts the container all the same.
#[test]
fn a_container_opens_the_nodes_of_its_instance_and_no_others() {
    let settings = json!({"pools": {"": {"mig": "on_demand"}}});
    node_scenario("instance-nodes", GpuRuntime::Nvidia, settings, |node| async move {
        let toolkit = node.toolkit.as_ref().expect("NVIDIA's runtime");
        for root in [Root::Container, Root::Machine] {
            if root == Root::Machine
                && let Err(why) = toolkit.drive_the_machine(&node.runtime.cage, &node.driver)
            {
                node.figure(&format!("driver root /: not tried, because {why}"));
                continue;
            }
            for &mode in Release::wanted().modes {
                toolkit.set(&Setting { mode, root, ..Setting::default() });
                opened(&node, &format!("{}-{}", mode.name(), root.name())).await;
            }
        }
    });
}

/// Two pods, each on an instance that is made for it, on a node that has no node of any instance.
async fn opened(node: &Machine, setting: &str) {
    let folders = ["/dev/nvidia-caps", "/run/nvidia/driver/dev/nvidia-caps"];
    let removed = node.runtime.cage.said("rm", &["-rf", folders[0], folders[1]]);
    removed.expect("they are the agent's alone");
    let mut all = Vec::new();
    let names = ["a", "b"].map(|name| format!("{name}-{setting}"));
    for name in &names {
        let began = clock::now();
        node.create(&instance(name, 9_000)).await;
        let main = node.reported(name, "main", 0).await;
        let nodes = has_only_its_instance(node, &main);
        all.push(format!("{} after {} ms", nodes.join(" and "), clock::ms(began.elapsed())));
    }
    node.figure(&format!("{setting}: {}", all.join("; ")));
    for name in &names {
        node.delete(name).await;
    }
    until_made(node, &[]).await;
}
