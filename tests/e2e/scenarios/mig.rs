//! MIG instances on demand: real kube-scheduler and extender, the agent as it runs on a node, and a
//! stand-in for NVML. Judged by the pods of the API server and the instances of the stand-in alone.
//!
//! `GPUPACK_FAULTS_MINUTES=30 cargo test --features e2e --test e2e mig -- --nocapture` lets faults happen
//! for that long, without the variable for 20 seconds. `GPUPACK_E2E_SEED` decides what happens when.
//! `GPUPACK_SHOTS=FOLDER` leaves pictures of the page there, with Chromium.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::checker::PLACEMENT;
use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::leash::Leash;
use crate::manifests::{self, Mode};
use crate::node::driver::{CREATE, Instances, MIG_MODEL, built_library, instances_of};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, Testbed, scenario_within, until_divided};
use crate::watching::{evicted, is_bound};

const LIMIT: Duration = Duration::from_secs(60);

const GPU: &str = "GPU-mig-on-demand";

/// A product of which gpupack has a table.
const KNOWN: &str = "NVIDIA A100-SXM4-80GB";

/// The answer of the driver while something uses the GPU.
const IN_USE: u32 = 19;

/// Memory in MiB, and the profile of an A100 with 80 GB that it gets.
const REQUESTS: [(u64, &str); 4] =
    [(9_000, "1g.10gb"), (18_000, "1g.20gb"), (38_000, "3g.40gb"), (70_000, "7g.80gb")];

/// As how many processes an agent runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parts {
    One,
    /// The driver is in a process of its own.
    Two,
}

/// A node with one GPU and an agent.
struct Node {
    folder: PathBuf,
    name: String,
    boot: u64,
    product: &'static str,
    parts: Parts,
    /// Its processes.
    agent: Vec<Leash>,
    /// How often one of these was ended.
    restarts: usize,
}

impl Node {
    fn start(stage: &Stage, product: &'static str, parts: Parts) -> Self {
        let folder = stage.folder();
        std::fs::create_dir_all(&folder).expect("a folder");
        let library = built_library().expect("cargo builds it");
        std::fs::copy(library, folder.join("libnvidia-ml.so.1")).expect("a copy");
        let name = stage.fleet.nodes[0].name.clone();
        play(&folder, product, 0, &json!({}));
        let agent = start_agent(stage, &folder, &name, parts);
        Self { folder, name, boot: 0, product, parts, agent, restarts: 0 }
    }

    /// Changes what the driver answers.
    fn play(&self, failures: &Value) {
        play(&self.folder, self.product, self.boot, failures);
    }

    /// A process of the agent ends, each in its turn, and another one begins.
    fn restart_agent(&mut self, stage: &Stage) {
        let which = self.restarts % self.agent.len();
        self.restarts += 1;
        self.agent[which].kill();
        self.agent[which] =
            start_agent(stage, &self.folder, &self.name, self.parts).swap_remove(which);
    }

    /// The node boots: no instance is left.
    fn boot(&mut self, stage: &Stage) {
        self.agent.iter_mut().for_each(Leash::kill);
        self.boot += 1;
        self.play(&json!({}));
        self.agent = start_agent(stage, &self.folder, &self.name, self.parts);
    }

    /// The instances that exist, by UUID.
    fn instances(&self) -> Instances {
        let text = std::fs::read_to_string(self.folder.join("instances.json")).unwrap_or_default();
        let kept: Value = serde_json::from_str(&text).unwrap_or_default();
        instances_of(if kept["boot"] == self.boot { &kept } else { &Value::Null })
    }
}

/// Changes the hardware.
fn play(folder: &Path, product: &str, boot: u64, failures: &Value) {
    let random = folder.join("proc/sys/kernel/random");
    std::fs::create_dir_all(&random).expect("a folder");
    std::fs::write(random.join("boot_id"), format!("boot-{boot}\n")).expect("a file");
    // A driver whose instances need no device nodes.
    let of_kernel = folder.join("proc/1/root").join("proc");
    std::fs::create_dir_all(&of_kernel).expect("a folder");
    std::fs::write(of_kernel.join("devices"), "Character devices:\n").expect("a file");
    let delays = json!({CREATE.0: CREATE.1});
    let scenario = json!({"boot": boot, "failures": failures, "delays_ms": delays, "gpus": [
        {"uuid": GPU, "name": product, "total_mib": 81920, "reserved_mib": 634,
            "mig": [], "mig_model": MIG_MODEL},
    ]});
    // In one step: the library reads at any time.
    std::fs::write(folder.join("next.json"), scenario.to_string()).expect("a file");
    std::fs::rename(folder.join("next.json"), folder.join("scenario.json")).expect("a file");
}

fn start_agent(stage: &Stage, folder: &Path, node: &str, parts: Parts) -> Vec<Leash> {
    let flag = |name: &str, file: &str| format!("{name}={}", folder.join(file).display());
    let node = || format!("--node={node}");
    let reporting =
        [flag("--kubelet-socket", "kubelet.sock"), "--metrics-listen=127.0.0.1:0".to_owned()];
    let driving = [
        flag("--nvml-library", "libnvidia-ml.so.1"),
        flag("--proc-root", "proc"),
        flag("--mig-folder", "mig"),
        "--mig-on-demand".to_owned(),
    ];
    match parts {
        Parts::One => vec![stage.start_agent(reporting.into_iter().chain(driving).chain([node()]))],
        Parts::Two => {
            let reporting = reporting.into_iter();
            let sockets =
                ["--driver-socket", "--socket"].map(|name| [flag(name, "driver.sock"), node()]);
            let [of_agent, of_driver] = sockets;
            vec![
                stage.start_agent(reporting.chain(of_agent)),
                stage.start_driver(driving.into_iter().chain(of_driver)),
            ]
        }
    }
}

/// What runs, as kubelet would have it: the UUID on which the container of each pod started.
#[derive(Default)]
struct Kubelet {
    running: BTreeMap<String, String>,
    starts: usize,
}

/// The annotation of a placement, of a bound pod.
fn placement(pod: &Pod) -> Option<Value> {
    pod.spec.as_ref()?.node_name.as_ref()?;
    let text = pod.metadata.annotations.as_ref()?.get(PLACEMENT)?;
    serde_json::from_str(text).ok()
}

fn name(pod: &Pod) -> String {
    pod.metadata.name.clone().expect("it has one")
}

impl Kubelet {
    /// Looks at the pods: those whose instance is there start on it. It must be as requested, lie where the
    /// placement says, and be used by no other pod.
    fn look(&mut self, node: &Node, pods: &[Pod]) {
        let instances = node.instances();
        let is_there = |pod: &str| pods.iter().any(|it| name(it) == pod);
        self.running.retain(|pod, uuid| is_there(pod) && instances.contains_key(uuid));
        for pod in pods {
            let Some(placement) = placement(pod) else { continue };
            let device = &placement["devices"][0];
            let uuid = device["id"].as_str().expect("a UUID").to_owned();
            let Some((profile, start)) = instances.get(&uuid) else { continue };
            let wanted = pod.metadata.labels.as_ref().and_then(|labels| labels.get("profile"));
            // A larger one, where the driver has refused to make all those of the smallest.
            let wanted = wanted.map_or(0, |wanted| gigabytes(wanted));
            assert!(gigabytes(profile) >= wanted, "{} starts on {uuid}, {profile}", name(pod));
            assert_eq!(device["mig"]["start"], *start, "{} starts on {uuid}", name(pod));
            let mut others = self.running.iter().filter(|(other, _)| **other != name(pod));
            let other = others.find(|(_, on)| **on == uuid);
            assert_eq!(other, None, "{} starts on {uuid}", name(pod));
            let before = self.running.insert(name(pod), uuid.clone());
            self.starts += usize::from(before != Some(uuid));
        }
    }
}

/// The memory in the name of a profile.
fn gigabytes(profile: &str) -> u64 {
    let memory = profile.split_once('.').and_then(|(_, memory)| memory.split_once("gb"));
    memory.and_then(|(number, _)| number.parse().ok()).expect("the name of a profile")
}

async fn pods(stage: &Stage) -> Vec<Pod> {
    stage.cluster.pods().list(&ListParams::default()).await.expect("pods can be listed").items
}

fn plan(name: &str, (mib, profile): (u64, &str)) -> PodPlan {
    PodPlan::memory(name, mib)
        .annotated("gpupack.dev/isolation", "hardware")
        .labelled("profile", profile)
}

/// Waits until each bound pod runs, and no other instance is left.
async fn until_settled(stage: &Stage, node: &Node, kubelet: &mut Kubelet) -> Duration {
    let started = clock::now();
    loop {
        let pods = pods(stage).await;
        kubelet.look(node, &pods);
        let (bound, instances) = (pods.iter().filter_map(placement).count(), node.instances());
        if kubelet.running.len() == bound && instances.len() == bound {
            return started.elapsed();
        }
        let running = &kubelet.running;
        assert!(started.elapsed() < LIMIT, "{bound} bound, {running:?} run, {instances:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A node whose GPU, of this product, is divided as pods request it.
async fn on_demand(bed: Testbed, prefix: &str, product: &'static str) -> (Stage, Node) {
    on_demand_in(bed, prefix, product, Parts::One).await
}

/// The same, with an agent of so many parts.
async fn on_demand_in(
    bed: Testbed,
    prefix: &str,
    product: &'static str,
    parts: Parts,
) -> (Stage, Node) {
    let settings = json!({"pools": {"": {"mig": "on_demand"}}});
    let fleet = Fleet::new().with(prefix, 1, (1, A100));
    let mut stage = bed.stage(Setup { settings, ..Setup::of(fleet) }).await;
    stage.stop_agents();
    let node = Node::start(&stage, product, parts);
    until_divided(&stage.extender, 1).await;
    (stage, node)
}

#[test]
fn pods_get_mig_instances_that_are_made_for_them() {
    let minutes = u64::try_from(clock::number("GPUPACK_FAULTS_MINUTES", 0)).expect("few");
    let time = Duration::from_secs((60 * minutes).max(20));
    scenario_within("mig", time + 6 * LIMIT, |bed| async move {
        let (mut stage, mut node) = on_demand(bed, "mig", KNOWN).await;
        let mut kubelet = Kubelet::default();
        stage.extender.picture(&node.name, "mig-1");
        let mut times = Vec::new();
        for (pod, request) in [("a", REQUESTS[1]), ("b", REQUESTS[0]), ("c", REQUESTS[2])] {
            stage.cluster.add_pods(&[plan(pod, request)]).await;
            times.push(
                stage.watching.until("bound", LIMIT, |pods| is_bound(pods, pod)).await.as_millis(),
            );
            stage.extender.picture(&node.name, &format!("mig-{}", 1 + times.len()));
        }
        until_settled(&stage, &node, &mut kubelet).await;
        stage.figure(&format!("bound after {times:?} ms, each with an instance made for it"));
        stage.cluster.delete_pod("a").await;
        let gone = until_settled(&stage, &node, &mut kubelet).await;
        stage.figure(&format!("an instance is removed {} ms after its pod", clock::ms(gone)));
        stage.extender.picture(&node.name, "mig-5");
        // Beside c there is a place for one of two; what waits gets the place of c.
        stage.cluster.delete_pod("b").await;
        stage.cluster.add_pods(&[plan("d", REQUESTS[2]), plan("e", REQUESTS[2])]).await;
        let waits = |pods: &_| is_bound(pods, "d") != is_bound(pods, "e");
        stage.watching.until("one of two bound", LIMIT, waits).await;
        explained(&stage).await;
        stage.cluster.delete_pod("c").await;
        let both = |pods: &_| is_bound(pods, "d") && is_bound(pods, "e");
        let waited = stage.watching.until("both bound", LIMIT, both).await;
        stage.figure(&format!("a pod that waited is bound {} ms after another", clock::ms(waited)));
        until_settled(&stage, &node, &mut kubelet).await;
        node.boot(&stage);
        let again = until_settled(&stage, &node, &mut kubelet).await;
        stage.figure(&format!("made again {} ms after a boot", clock::ms(again)));
        faults(&mut stage, &mut node, &mut kubelet, time).await;
    });
}

#[test]
fn pods_get_mig_instances_of_an_agent_whose_driver_is_in_another_process() {
    scenario_within("mig-parts", 6 * LIMIT, |bed| async move {
        let (mut stage, mut node) = on_demand_in(bed, "parts", KNOWN, Parts::Two).await;
        let mut kubelet = Kubelet::default();
        let mut times = Vec::new();
        for (pod, request) in [("a", REQUESTS[1]), ("b", REQUESTS[0]), ("c", REQUESTS[2])] {
            stage.cluster.add_pods(&[plan(pod, request)]).await;
            times.push(clock::ms(bound(&stage, pod).await));
        }
        until_settled(&stage, &node, &mut kubelet).await;
        stage.figure(&format!("bound after {times:?} ms, each with an instance made for it"));
        for part in ["reports", "has the driver"] {
            let before = node.instances();
            node.restart_agent(&stage);
            stage.cluster.delete_pod("a").await;
            let gone = until_settled(&stage, &node, &mut kubelet).await;
            stage.figure(&format!(
                "an order is done {} ms after the part ended that {part}",
                clock::ms(gone)
            ));
            assert!(node.instances().keys().all(|uuid| before.contains_key(uuid)), "others stay");
            stage.cluster.add_pods(&[plan("a", REQUESTS[1])]).await;
            bound(&stage, "a").await;
            until_settled(&stage, &node, &mut kubelet).await;
        }
        node.boot(&stage);
        until_settled(&stage, &node, &mut kubelet).await;
        faults(&mut stage, &mut node, &mut kubelet, Duration::from_secs(20)).await;
    });
}

#[test]
fn a_gpu_without_a_table_is_divided_as_its_driver_lists() {
    scenario_within("mig-listed", 3 * LIMIT, |bed| async move {
        let (stage, node) = on_demand(bed, "listed", "NVIDIA X100-SXM9-80GB").await;
        let mut kubelet = Kubelet::default();
        for (pod, request) in [("a", REQUESTS[2]), ("b", REQUESTS[0]), ("c", REQUESTS[1])] {
            stage.cluster.add_pods(&[plan(pod, request)]).await;
            bound(&stage, pod).await;
        }
        until_settled(&stage, &node, &mut kubelet).await;
        // As on an A100, which has the same list.
        let mut places: Vec<_> = node.instances().into_values().collect();
        places.sort();
        let expected = [("1g.10gb", 0), ("2g.20gb", 2), ("3g.40gb", 4)];
        assert_eq!(places, expected.map(|(profile, start)| (profile.to_owned(), start)));
        stage.cluster.add_pods(&[plan("d", REQUESTS[2])]).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(stage.watching.ask(|pods| !is_bound(pods, "d")), "there is no place");
        stage.cluster.delete_pod("a").await;
        bound(&stage, "d").await;
        until_settled(&stage, &node, &mut kubelet).await;
    });
}

#[test]
fn pods_get_instances_after_a_kill_and_important_ones_those_of_others() {
    scenario_within("mig-killed", 9 * LIMIT, |bed| async move {
        let (mut stage, node) = on_demand(bed, "killed", KNOWN).await;
        killed_as_an_instance_was_made(&mut stage, &node).await;
        stage.extender.kill();
        stage.extender.reconfigure(&json!({"standing_hold_after_seconds": 0}));
        stage.extender.start_again().await;
        until_divided(&stage.extender, 1).await;
        important_pods_get_those_of_others(&stage).await;
    });
}

/// The agent keeps the promise for the next process, which has the instance made again there.
async fn killed_as_an_instance_was_made(stage: &mut Stage, node: &Node) {
    let mut kubelet = Kubelet::default();
    let mut times = Vec::new();
    for at in 0..5 {
        let pod = format!("p{at}");
        stage.cluster.add_pods(&[plan(&pod, REQUESTS[2])]).await;
        let started = clock::now();
        while node.instances().is_empty() {
            assert!(started.elapsed() < LIMIT, "no instance is made");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        stage.extender.kill();
        let killed = clock::now();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let is_first = !stage.watching.ask(|pods| is_bound(pods, &pod));
        stage.extender.start_again().await;
        bound(stage, &pod).await;
        if is_first {
            times.push(clock::ms(killed.elapsed()));
        }
        until_settled(stage, node, &mut kubelet).await;
        assert_eq!(node.instances().len(), 1, "the first one is gone");
        stage.cluster.delete_pod(&pod).await;
        until_settled(stage, node, &mut kubelet).await;
    }
    assert!(!times.is_empty(), "each Binding was posted before the end of its process");
    stage.figure(&format!(
        "bound {times:?} ms after the extender was killed between instance and Binding"
    ));
}

async fn important_pods_get_those_of_others(stage: &Stage) {
    stage.watching.forget_gone();
    manifests::apply(&stage.cluster.client, "evict.yaml", Mode::Keep).await;
    for (class, priority) in [("mig-high", 1_000), ("mig-mid", 100), ("mig-low", 10)] {
        stage.cluster.add_priority_class(class, priority).await;
    }
    let half = |name: &str| plan(name, REQUESTS[2]).important("mig-low");
    stage.cluster.add_pods(&[half("s1"), half("s2")]).await;
    stage.watching.until_bound(2, LIMIT).await;
    let (m1, m2) = (plan("m1", REQUESTS[2]), plan("m2", REQUESTS[0]));
    let mut times = Vec::new();
    // One after the other: `m2` may take the room that others left for `m1`, which pauses for a minute then.
    for (pod, plan) in [("m1", m1.important("mig-mid")), ("m2", m2.important("mig-high"))] {
        stage.cluster.add_pods(&[plan]).await;
        times.push(clock::ms(bound(stage, pod).await));
    }
    assert_eq!(stage.watching.ask(evicted), ["s1", "s2"], "each needs the units of one");
    stage.cluster.add_pods(&[plan("i", REQUESTS[2]).important("mig-high")]).await;
    times.push(clock::ms(bound(stage, "i").await));
    assert_eq!(stage.watching.ask(evicted), ["m1", "s1", "s2"], "the less important one goes");
    stage.cluster.add_pods(&[plan("j", REQUESTS[1]).important("mig-high")]).await;
    times.push(clock::ms(bound(stage, "j").await));
    assert_eq!(stage.watching.ask(evicted).len(), 3, "there is a place beside them");
    stage.figure(&format!("important pods are bound after {times:?} ms"));
}

/// Waits until a pod is bound.
async fn bound(stage: &Stage, pod: &str) -> Duration {
    stage.watching.until("bound", LIMIT, |pods| is_bound(pods, pod)).await
}

/// The pod that waits is told whose end makes a place.
async fn explained(stage: &Stage) {
    let waits = stage.watching.ask(|pods| if is_bound(pods, "d") { "e" } else { "d" });
    let path = format!("/v1/explain?pod={}/{waits}", stage.cluster.namespace);
    let started = clock::now();
    loop {
        let explained = stage.extender.page(&path).await;
        if explained.contains("3g.40gb at unit") && explained.contains("it fits on node") {
            return;
        }
        assert!(started.elapsed() < LIMIT, "{explained}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Faults for a while, and then none: no start on a wrong instance, and everything settles.
async fn faults(stage: &mut Stage, node: &mut Node, kubelet: &mut Kubelet, time: Duration) {
    let seed = u64::try_from(clock::number("GPUPACK_E2E_SEED", 1)).expect("64 bits");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (began, mut created, mut counts) = (clock::now(), 0, BTreeMap::new());
    let mut refuses = false;
    while began.elapsed() < time {
        let all = pods(stage).await;
        kubelet.look(node, &all);
        let what = match rng.random_range(0..100) {
            0..30 if all.len() < 8 => {
                created += 1;
                let request = REQUESTS[[0, 0, 0, 1, 1, 2, 3][rng.random_range(0..7)]];
                let pod = format!("p{created}");
                stage.cluster.add_pods(&[plan(&pod, request)]).await;
                "pods"
            }
            30..50 if !all.is_empty() => {
                let gone = &all[rng.random_range(0..all.len())];
                stage.cluster.delete_pod(&name(gone)).await;
                "ends"
            }
            50..53 => {
                node.restart_agent(stage);
                "agents killed"
            }
            53..55 => {
                node.boot(stage);
                "boots"
            }
            55..57 => {
                stage.extender.kill();
                stage.extender.start_again().await;
                "extenders killed"
            }
            57..60 => {
                refuses = !refuses;
                let code = if refuses { IN_USE } else { 0 };
                node.play(&json!({CREATE.0: code}));
                "refusals"
            }
            _ => {
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        *counts.entry(what).or_insert(0) += 1;
    }
    node.play(&json!({}));
    let settled = until_settled(stage, node, kubelet).await;
    stage.figure(&format!(
        "{} s of faults {counts:?}: {} starts, none on a wrong instance; settled after {} ms",
        time.as_secs(),
        kubelet.starts,
        clock::ms(settled)
    ));
}
