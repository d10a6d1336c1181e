//! Pods that borrow what is idle on their node: where they start, and that they go home when another pod
//! needs the room. On the real kubelet and containerd, judged by what the containers say.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::checker::annotation;
use crate::clock;
use crate::control_plane::Identity;
use crate::manifests::{self, Mode};
use crate::node::machine::{GpuRuntime, LIMIT, Machine, node_scenario, pod};
use crate::node::runtime::NODE;
use crate::scenarios::containers::restarts;

const UUIDS: &str = "placed.gpupack.dev/uuids";
const PLACEMENT: &str = "placed.gpupack.dev/placement";

/// Recalls one after the other.
const RECALLS: u32 = 5;

/// Half of a GPU that may use all of it, and may be moved. Its program is deaf to signals, so it ends
/// after its grace period.
fn notebook(name: &str, grace_seconds: u32) -> Value {
    let annotations = json!({"gpu-fraction": "0.5", "gpu-fraction.limit": "1",
        "gpupack.dev/movable": "restart",
        "gpupack.dev/move-grace-seconds": grace_seconds.to_string()});
    pod(name, &annotations)
}

/// The same with a program that ends when it is told to.
fn obedient(name: &str) -> Value {
    let mut pod = notebook(name, 5);
    let program = "trap 'exit 0' TERM; /bin/tell once; while :; do sleep 1000000 & wait; done";
    pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", program]);
    pod
}

fn whole(name: &str) -> Value {
    let mut pod = pod(name, &json!({"gpu-fraction": "1"}));
    pod["spec"]["terminationGracePeriodSeconds"] = 0.into();
    pod
}

/// A node whose pods borrow, with two notebooks that run on a GPU each, and these GPUs.
async fn two_notebooks(node: &Machine, grace_seconds: u32) -> (String, String) {
    run_both(node, [notebook("nb-1", 1), notebook("nb-2", grace_seconds)]).await
}

async fn run_both(node: &Machine, notebooks: [Value; 2]) -> (String, String) {
    manifests::apply(&node.cluster.client, "moves.yaml", Mode::Keep).await;
    node.create(&notebooks[0]).await;
    let first = node.reported("nb-1", "main", 0).await.uuids().to_owned();
    node.create(&notebooks[1]).await;
    let second = node.reported("nb-2", "main", 0).await.uuids().to_owned();
    assert_ne!(first, second, "each runs on a GPU of its own");
    let placement = placement(node, "nb-2").await;
    assert_eq!(placement["home"], json!([first]), "{placement}");
    assert_eq!(placement["devices"][0]["id"], json!(second), "{placement}");
    (first, second)
}

fn settings() -> Value {
    json!({"pools": {"": {"borrow": "compute"}}})
}

async fn placement(node: &Machine, name: &str) -> Value {
    let pod = node.until("placed", name, |pod| annotation(pod, PLACEMENT).is_some()).await;
    serde_json::from_str(annotation(&pod, PLACEMENT).expect("just seen")).expect("JSON")
}

async fn until_bound(node: &Machine, name: &str) -> Pod {
    node.until("bound", name, |pod| annotation(pod, UUIDS).is_some()).await
}

/// The pod went home, with one restart more than before, and the other one goes on.
async fn went_home(node: &Machine, home: &str, life: u32) {
    let moved = node.reported("nb-2", "main", life).await;
    assert_eq!(moved.uuids(), home, "nb-2 went home");
    let count = i32::try_from(life).expect("few");
    node.until("restarted once", "nb-2", |pod| restarts(pod, "main") == count).await;
    assert_eq!(restarts(&node.pod("nb-1").await, "main"), 0, "nb-1 goes on");
}

#[test]
fn two_notebooks_run_on_two_gpus_and_one_gives_way() {
    node_scenario("borrow", GpuRuntime::Plain, settings(), |node| async move {
        each_recall_succeeds(&node).await;
        a_late_end_delays_the_bind(&node).await;
        one_that_cannot_be_moved_stays(&node).await;
        node.watching.verdict();
    });
}

/// One recall after the other, each of another guest.
async fn each_recall_succeeds(node: &Machine) {
    let (first, second) = two_notebooks(node, 1).await;
    node.figure("two halves of one GPU run on two");
    let mut slowest = Duration::ZERO;
    for recall in 1..=RECALLS {
        let began = clock::now();
        node.create(&whole("train")).await;
        let train = until_bound(node, "train").await;
        slowest = slowest.max(began.elapsed());
        assert_eq!(annotation(&train, UUIDS), Some(&*second));
        went_home(node, &first, 1).await;
        let told = node.cluster.events().await;
        let told = told.iter().find(|event| event.pod == "nb-2" && event.reason == "GpuMoved");
        let told = told.expect("an event").message.clone();
        assert!(told.contains("borrow/train needs the room"), "{told}");
        for name in ["train", "nb-2"] {
            node.delete(name).await;
        }
        until_tenants(node, 1).await;
        if recall < RECALLS {
            node.create(&notebook("nb-2", 1)).await;
            let again = node.reported("nb-2", "main", 0).await;
            assert_ne!(again.uuids(), first, "a guest again");
        }
    }
    let slowest = clock::ms(slowest);
    node.figure(&format!("{RECALLS} recalls, the slowest {slowest} ms; nb-1 never restarted"));
    emptied(node).await;
}

/// Waits until as few pods hold room of the GPUs.
async fn until_tenants(node: &Machine, most: usize) {
    let began = clock::now();
    loop {
        let mut count = 0;
        for uuid in node.uuids() {
            count += node.tenants(uuid).await.len();
        }
        if count <= most {
            return;
        }
        assert!(began.elapsed() < LIMIT, "{count} pods hold room");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Ends all pods, for what comes next on this node.
async fn emptied(node: &Machine) {
    node.driver.play(&node.fleet.nodes[0].gpus, &[]);
    node.cluster.delete_all_pods().await;
    until_tenants(node, 0).await;
}

async fn a_late_end_delays_the_bind(node: &Machine) {
    let (first, _) = two_notebooks(node, 7).await;
    node.extender.picture(NODE, "borrow-1");
    let began = clock::now();
    let binds = || node.extender.logged("pods that borrow room of its GPUs are being moved");
    let before = binds();
    node.create(&whole("train")).await;
    node.extender.picture(NODE, "borrow-2");
    until_bound(node, "train").await;
    let took = clock::ms(began.elapsed());
    went_home(node, &first, 1).await;
    node.extender.picture(NODE, "borrow-3");
    let failed = binds() - before;
    assert!(failed > 0 && took > 7_000, "after {took} ms, {failed} binds failed");
    node.figure(&format!("a guest with 7 s of grace: bound after {took} ms, {failed} failed"));
    emptied(node).await;
}

/// It keeps the GPU on which it runs.
async fn one_that_cannot_be_moved_stays(node: &Machine) {
    let (_, second) = two_notebooks(node, 1).await;
    let roles: Api<ClusterRoleBinding> = Api::all(node.cluster.client.clone());
    roles.delete("gpupack-move", &DeleteParams::default()).await.expect("it is there");
    until_refused(node).await;
    node.create(&whole("train")).await;
    let is_at_home = |pod: &Pod| {
        annotation(pod, PLACEMENT)
            .is_some_and(|text| !text.contains("home") && !text.contains("moved"))
    };
    node.until("allocated what it runs on", "nb-2", is_at_home).await;
    let now = placement(node, "nb-2").await;
    assert_eq!(now["devices"][0]["id"], json!(second), "{now}");
    let told = node.cluster.events().await;
    let told = told.iter().find(|event| event.pod == "nb-2" && event.reason == "GpuMoveFailed");
    let told = told.expect("an event").message.clone();
    assert!(told.contains("pods/resize") || told.contains("403"), "{told}");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(annotation(&node.pod("train").await, UUIDS), None, "no GPU is empty now");
    assert_eq!(restarts(&node.pod("nb-2").await, "main"), 0);
    node.delete("nb-1").await;
    until_bound(node, "train").await;
    node.figure("without the right a guest keeps its GPU, and the other pod waits");
}

#[test]
fn two_notebooks_run_on_two_shared_mig_instances_and_one_gives_way() {
    let settings = json!({"pools": {"": {"borrow": "compute", "mig_instances": "shared"}}});
    node_scenario("instances-lent", GpuRuntime::Plain, settings, |node| async move {
        let (first, second) = two_notebooks(&node, 1).await;
        assert!([&first, &second].iter().all(|it| it.starts_with("MIG-")), "{first} {second}");
        let mut most = pod("train", &json!({"gpu-fraction": "0.75"}));
        most["spec"]["terminationGracePeriodSeconds"] = 0.into();
        node.create(&most).await;
        let train = until_bound(&node, "train").await;
        assert_eq!(annotation(&train, UUIDS), Some(&*second));
        went_home(&node, &first, 1).await;
        assert_eq!(node.reported("train", "main", 0).await.uuids(), second);
    });
}

#[test]
fn a_killed_extender_neither_repeats_nor_forgets_a_move() {
    node_scenario("borrow-killed", GpuRuntime::Plain, settings(), |mut node| async move {
        killed_between_the_resize_and_the_binding(&mut node).await;
        killed_between_the_two_writes(&mut node).await;
        node.watching.verdict();
    });
}

async fn killed_between_the_resize_and_the_binding(node: &mut Machine) {
    let (first, second) = two_notebooks(node, 3).await;
    node.create(&whole("train")).await;
    let is_resized = |pod: &Pod| {
        let container = &pod.spec.as_ref().expect("a pod").containers[0];
        let resources = container.resources.as_ref();
        let requests = resources.and_then(|resources| resources.requests.as_ref());
        requests.is_some_and(|requests| requests["cpu"].0 == "9m")
    };
    node.until("resized", "nb-2", is_resized).await;
    node.extender.kill();
    assert_eq!(annotation(&node.pod("train").await, UUIDS), None, "not before nb-2 has left");
    node.extender.start_again().await;
    let train = until_bound(node, "train").await;
    assert_eq!(annotation(&train, UUIDS), Some(&*second));
    went_home(node, &first, 1).await;
    node.figure("killed between the resize and the Binding: bound once, one restart");
    emptied(node).await;
}

async fn killed_between_the_two_writes(node: &mut Machine) {
    let (first, second) = two_notebooks(node, 1).await;
    node.extender.kill();
    // The first of the two writes, as a process makes it that is killed before the second.
    let before = node.pod("nb-2").await;
    let status = before.status.expect("it runs");
    let container = status.container_statuses.expect("one")[0].container_id.clone();
    let mut moved = placement(node, "nb-2").await;
    moved["devices"][0]["id"] = first.as_str().into();
    moved["home"] = Value::Null;
    moved.as_object_mut().expect("an object").remove("home");
    moved["moved"] = json!({"from": [second], "container": container, "cpu_milli": 10});
    let patch = json!({"metadata": {"annotations": {
        "placed.gpupack.dev/devices": format!("runtime.nvidia.com/gpu={first}"),
        UUIDS: first, PLACEMENT: moved.to_string()}}});
    let client = node.plane.client(Identity::Extender).await;
    let pods: Api<Pod> = Api::namespaced(client, &node.cluster.namespace);
    let patched = pods.patch("nb-2", &PatchParams::default(), &Patch::Merge(patch)).await;
    patched.expect("gpupack's account may write it");
    node.extender.start_again().await;
    went_home(node, &first, 1).await;
    node.create(&whole("train")).await;
    let train = until_bound(node, "train").await;
    assert_eq!(annotation(&train, UUIDS), Some(&*second));
    assert_eq!(restarts(&node.pod("nb-2").await, "main"), 1, "once is enough");
    node.figure("a move that was half done was completed by the next process");
}

/// What the programs of both notebooks use of the GPU on which each runs, in MiB.
const USED: u64 = 70_000;

#[test]
fn memory_above_the_request_is_given_back_when_another_pod_needs_it() {
    let settings = json!({"pools": {"": {"borrow": "memory"}}});
    node_scenario("borrow-memory", GpuRuntime::Plain, settings, |node| async move {
        given_back(&node, None).await;
        emptied(&node).await;
        taken_again(&node).await;
        node.watching.verdict();
    });
}

/// The same where MPS limits containers: each may take all of its GPU at first, and half after its restart.
/// No daemon runs here.
#[test]
fn a_container_that_gives_memory_back_gets_a_lower_limit_of_mps() {
    let folder = tempfile::tempdir().expect("a folder");
    let webhook = json!({"memory_limit": "mps", "mps_folder": folder.path()});
    let settings = json!({"pools": {"": {"borrow": "memory"}}, "webhook": webhook});
    node_scenario("borrow-mps", GpuRuntime::Plain, settings, |node| async move {
        given_back(&node, Some([81_320, 40_660])).await;
        node.watching.verdict();
    });
}

/// What the container of a pod may take of its GPU, if MPS limits that: as written, and in its process.
async fn check_limit(node: &Machine, name: &str, mib: u64) {
    let pod = node.pod(name).await;
    let limit = format!("0={mib}M");
    assert_eq!(annotation(&pod, "placed.gpupack.dev/mps-memory-limit"), Some(&*limit), "{name}");
    let (process, _) = node.process(name, "main").await;
    let variables = std::fs::read(format!("/proc/{process}/environ")).expect("its environment");
    let variables = String::from_utf8_lossy(&variables);
    let variable = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={limit}");
    assert!(variables.split('\0').any(|it| it == variable), "{name}: {variables}");
}

async fn given_back(node: &Machine, limits: Option<[u64; 2]>) {
    let (first, second) = run_both(node, [obedient("nb-1"), obedient("nb-2")]).await;
    if let Some([alone, _]) = limits {
        check_limit(node, "nb-1", alone).await;
        check_limit(node, "nb-2", alone).await;
    }
    use_memory(node, [&first, &second]).await;
    assert_eq!(node.until_used(&first, "nb-1").await, USED);
    node.figure("two halves of one GPU use 70000 MiB each, of two");
    let began = clock::now();
    node.create(&whole("train")).await;
    let train = loop {
        use_memory(node, [&first, &second]).await;
        let train = node.pod("train").await;
        if annotation(&train, UUIDS).is_some() {
            break train;
        }
        assert!(began.elapsed() < LIMIT, "{:#?}", node.cluster.events().await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let took = began.elapsed();
    assert_eq!(annotation(&train, UUIDS), Some(&*second));
    for name in ["nb-1", "nb-2"] {
        assert_eq!(node.reported(name, "main", 1).await.uuids(), first, "{name}");
        node.until("restarted once", name, |pod| restarts(pod, "main") == 1).await;
        if let Some([_, beside]) = limits {
            check_limit(node, name, beside).await;
        }
    }
    let told = node.cluster.events().await;
    for (name, reason) in [("nb-1", "GpuMemoryTakenBack"), ("nb-2", "GpuMoved")] {
        let found = told.iter().any(|it| it.pod == name && it.reason == reason);
        assert!(found, "{name}, {reason}: {told:#?}");
    }
    assert!(!told.iter().any(|it| it.reason == "GpuOverLimit"), "{told:#?}");
    node.figure(&format!("the third pod had its GPU after {} ms", clock::ms(took)));
}

/// A program that takes its memory again is restarted three times and lends no more.
async fn taken_again(node: &Machine) {
    manifests::apply(&node.cluster.client, "moves.yaml", Mode::Keep).await;
    node.create(&obedient("nb-1")).await;
    let first = node.reported("nb-1", "main", 0).await.uuids().to_owned();
    let index = node.uuids().iter().position(|uuid| *uuid == first).expect("a GPU");
    let grab = async || {
        let (here, process) = node.process("nb-1", "main").await;
        let lives = std::path::Path::new("/proc").join(here.to_string()).exists();
        let uses = lives.then_some((index, process, USED));
        node.driver.play(&node.fleet.nodes[0].gpus, uses.as_slice());
    };
    grab().await;
    assert_eq!(node.until_used(&first, "nb-1").await, USED);
    let began = clock::now();
    let half = pod("half", &json!({"gpu-fraction": "0.5"}));
    node.create(&half).await;
    let bound = loop {
        grab().await;
        let half = node.pod("half").await;
        if annotation(&half, UUIDS).is_some() {
            break half;
        }
        assert!(began.elapsed() < 2 * LIMIT, "{:#?}", node.cluster.events().await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let took = clock::ms(began.elapsed());
    assert_ne!(annotation(&bound, UUIDS), Some(&*first), "it gets the other GPU");
    let restarts = restarts(&node.pod("nb-1").await, "main");
    assert!((1..=3).contains(&restarts), "{restarts}");
    let told = node.cluster.events().await;
    let found = told.iter().any(|it| it.pod == "nb-1" && it.reason == "GpuMoveFailed");
    assert!(found, "{told:#?}");
    node.figure(&format!("after {restarts} restarts in vain and {took} ms on the other GPU"));
}

/// Lets the first containers of the notebooks use memory of these GPUs, as long as they run.
async fn use_memory(node: &Machine, gpus: [&str; 2]) {
    let mut processes = Vec::new();
    for (name, gpu) in ["nb-1", "nb-2"].into_iter().zip(gpus) {
        let index = node.uuids().iter().position(|uuid| *uuid == gpu).expect("a GPU of the node");
        if restarts(&node.pod(name).await, "main") == 0 {
            let (here, process) = node.process(name, "main").await;
            let lives = std::path::Path::new("/proc").join(here.to_string()).exists();
            processes.extend(lives.then_some((index, process, USED)));
        }
    }
    node.driver.play(&node.fleet.nodes[0].gpus, &processes);
}

/// Waits until the API server refuses gpupack's resizes: it follows a changed role a moment later.
async fn until_refused(node: &Machine) {
    let client = node.plane.client(Identity::Extender).await;
    let pods: Api<Pod> = Api::namespaced(client, &node.cluster.namespace);
    let dry_run = PatchParams { dry_run: true, ..PatchParams::default() };
    let patch = Patch::Strategic(json!({"spec": {"containers": [
        {"name": "main", "resources": {"requests": {"cpu": "9m"}}}]}}));
    let began = clock::now();
    while pods.patch_subresource("resize", "nb-2", &dry_run, &patch).await.is_ok() {
        assert!(began.elapsed() < LIMIT, "still allowed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
