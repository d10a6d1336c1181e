//! Somebody edits the placement of a bound pod: the ledger keeps it, and it is written back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use control::bind::edits;
use control::shared::other_fences::GONE_AFTER;
use engine::hardware::pool::ConfiguredIsolation;
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::model::reservation::{PlacedDevice, Placement, PodRef, Tenure};
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use kube_api::request::placement::{decode, encode};
use runtime::clock::Clock;
use serde_json::json;
use server::api::background;
use wire::ids::{DeviceId, NodeName, PodUid};
use wire::units::{Demand, HostAmount, MemMib, Share, Timestamp};

use super::binding::{Bed, node, pod_of, requests};
use crate::harness::fake_api_server::{Fake, Fault};

type Edit = Box<dyn FnOnce(&mut BTreeMap<String, String>)>;

const PLACEMENT: &str = "placed.gpupack.dev/placement";
const DEVICES: &str = "placed.gpupack.dev/devices";
const FENCE: &str = "placed.gpupack.dev/fence";
const DRIVER_MEMORY: &str = "placed.gpupack.dev/driver-memory-limit";

/// The pod as the watch shows it now.
fn fact(fake: &Fake) -> PodFact {
    let annotations = annotations(fake);
    let node = NodeName::new("n1");
    PodFact {
        pod: PodRef { uid: PodUid::new("u1"), name: "team-a/infer".into() },
        placement: decode(&annotations, &node).ok().flatten(),
        node: Some(node),
        host: HostAmount::ZERO,
        is_terminal: false,
        wants_gpu: true,
        request: None,
        bound_by_us: true,
        moves: MoveFact::default(),
        tenure: Tenure::default(),
    }
}

/// All but the one that says who wrote the others: an edit of it means nothing.
fn annotations(fake: &Fake) -> BTreeMap<String, String> {
    let mut all = fake.bed(|bed| bed.pod.as_ref().unwrap().annotations.clone());
    all.remove(FENCE);
    all
}

fn edit(fake: &Fake, change: impl FnOnce(&mut BTreeMap<String, String>)) {
    fake.bed(|bed| {
        let pod = bed.pod.as_mut().unwrap();
        change(&mut pod.annotations);
        pod.version += 1;
    });
}

/// A bound pod, with all loops running.
async fn bound(fake: &Fake) -> (Bed, tokio::sync::watch::Sender<bool>) {
    run(Bed::new(fake).await).await
}

async fn run(bed: Bed) -> (Bed, tokio::sync::watch::Sender<bool>) {
    assert_eq!(bed.bind().await, "");
    let (stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    (bed, stop)
}

fn free_millionths(bed: &Bed) -> u64 {
    bed.app.ledger.node("n1").unwrap().devices()[0].free().share.millionths()
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..1_000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("not within 20 s: {what}");
}

#[tokio::test]
async fn an_edited_placement_frees_nothing_and_is_written_back() {
    let fake = Fake::with_pod();
    let (bed, _stop) = bound(&fake).await;
    let ours = annotations(&fake);
    let tiny = ours[PLACEMENT].replace("\"share\":500000", "\"share\":1");
    assert_ne!(tiny, ours[PLACEMENT]);
    let edits: [Edit; 3] = [
        Box::new(|all| drop(all.insert(PLACEMENT.to_owned(), tiny))),
        Box::new(|all| all.retain(|key, _| !key.starts_with("placed."))),
        Box::new(|all| drop(all.insert(DEVICES.to_owned(), "runtime.nvidia.com/gpu=GPU-b".into()))),
    ];
    for change in edits {
        edit(&fake, change);
        let events = bed.app.ledger.see_pod(&fact(&fake), bed.app.clock.now());
        assert_eq!(events.len(), 1, "{events:?}");
        bed.app.outbox.push(events);
        assert_eq!(free_millionths(&bed), 500_000);
        until("written back", || annotations(&fake) == ours).await;
        let events = bed.app.ledger.see_pod(&fact(&fake), bed.app.clock.now());
        assert_eq!(events, [], "our own write is no edit");
    }
    let text = String::from_utf8(bed.app.metrics.text()).unwrap();
    assert!(text.contains("gpupack_placement_edits_total{result=\"seen\"} 3"), "{text}");
}

#[tokio::test]
async fn explain_says_what_of_a_bound_pod_cannot_be_read() {
    let fake = Fake::with_pod();
    assert_eq!(Bed::new(&fake).await.bind().await, "");
    let ours = fake.bed(|bed| bed.pod.as_ref().unwrap().annotations.clone());
    let unplaced = "runs on node n1: nothing is allocated to it";
    let cases: [(&str, Option<&str>, &[&str], &str); 6] = [
        ("gpu-fraction", Some("0.5"), &["placed on node n1, GPU-a (Confirmed)"], "0.5 GPU"),
        (
            PLACEMENT,
            Some("{\"v\":1"),
            &[unplaced, "`placed.gpupack.dev/placement` cannot be read"],
            "0.5 GPU",
        ),
        (PLACEMENT, None, &[unplaced, "`placed.gpupack.dev/placement` is missing"], "0.5 GPU"),
        (DEVICES, Some("GPU-b"), &[unplaced, "which are not the devices"], "0.5 GPU"),
        (
            "gpu-fraction",
            Some("half"),
            &["placed on node n1", "annotation `gpu-fraction` is `half`"],
            "",
        ),
        ("gpu-fraction", None, &["placed on node n1", "its keys request no GPU"], ""),
    ];
    let shown = || {
        let mut pod = pod_of(&fake);
        pod["spec"]["nodeName"] = json!("n1");
        SeenPod::from_json(&pod.to_string()).unwrap()
    };
    for (key, value, parts, request) in cases {
        // A process that starts knows no more than what the pod shows.
        let bed = Bed::starting(&fake, Config::default(), json!({})).await;
        edit(&fake, |all| {
            all.clone_from(&ours);
            match value {
                Some(value) => drop(all.insert(key.to_owned(), value.to_owned())),
                None => drop(all.remove(key)),
            }
        });
        bed.app.see_bound(&shown());
        let explained =
            async || bed.send("GET", "/v1/explain?pod=team-a/infer", &json!(null)).await;
        let found = explained().await;
        let verdict = found["verdict"].as_str().unwrap();
        assert!(parts.iter().all(|part| verdict.contains(part)), "{key} {value:?}: {verdict}");
        assert_eq!(found["request"], request, "{verdict}");
        assert_eq!(
            found["suggestions"].as_array().unwrap().len(),
            usize::from(verdict.contains(unplaced))
        );
        // Repaired, it is a pod like others; and nothing is kept of one that is gone.
        edit(&fake, |all| all.clone_from(&ours));
        bed.app.see_bound(&shown());
        let verdict = explained().await["verdict"].take();
        assert!(verdict.as_str().unwrap().ends_with("GPU-a (Confirmed)"), "{verdict}");
        assert_eq!(bed.app.entries()["unreadable"], 0);
    }
    let bed = Bed::starting(&fake, Config::default(), json!({})).await;
    edit(&fake, |all| drop(all.remove(PLACEMENT)));
    bed.app.see_bound(&shown());
    assert_eq!(bed.app.entries()["unreadable"], 1);
    bed.app.pod_ended(&PodUid::new("u1"));
    assert_eq!(bed.app.entries()["unreadable"], 0);
}

#[tokio::test]
async fn what_a_later_process_wrote_stays_until_that_process_is_gone() {
    let fake = Fake::with_pod();
    let gpu = json!([{"id": "GPU-a", "index": 0, "model": "NVIDIA L4", "memoryMib": 23_034,
        "reservedMib": 0, "kind": "Gpu", "healthy": true}]);
    let made = (Config::default(), Clock::started_ago(GONE_AFTER));
    let bed = Bed::made(&fake, made, json!({"gpu-fraction": "0.5"}), &gpu).await;
    bed.app.lead.set_fenced();
    let (bed, _stop) = run(bed).await;
    let ours = annotations(&fake);
    edit(&fake, |all| {
        all.insert(PLACEMENT.to_owned(), ours[PLACEMENT].replace("500000", "400000"));
        all.insert(FENCE.to_owned(), "ffffffffff-1 placement".to_owned());
    });
    bed.app.outbox.push(bed.app.ledger.see_pod(&fact(&fake), bed.app.clock.now()));
    until("it wanted to write", || bed.app.binding.other_placements.count() == 1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_ne!(annotations(&fake), ours, "it may live");
    let uid = PodUid::new("u1");
    let fence = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap().fence.digest;
    bed.app.binding.other_placements.forget(&uid);
    let at = Timestamp::from_millis(bed.app.clock.now().millis() - 300_000);
    bed.app.binding.other_placements.see(&uid, fence, at);
    until("written back", || annotations(&fake) == ours).await;
    bed.app.pod_ended(&uid);
    assert_eq!(bed.app.binding.other_placements.count(), 0);
}

#[tokio::test]
async fn a_conflicting_write_is_retried_on_the_newest_version() {
    let fake = Fake::with_pod();
    let (bed, _stop) = bound(&fake).await;
    let ours = annotations(&fake);
    fake.bed(|bed| bed.on_fence.extend([Fault::WrittenBefore, Fault::Answer(500)]));
    edit(&fake, |all| drop(all.remove(PLACEMENT)));
    bed.app.outbox.push(bed.app.ledger.see_pod(&fact(&fake), bed.app.clock.now()));
    until("written back", || annotations(&fake) == ours).await;
    let text = String::from_utf8(bed.app.metrics.text()).unwrap();
    assert!(text.contains("gpupack_placement_edits_total{result=\"failed\"} 2"), "{text}");
}

/// An extender configured so that the driver limits memory, or nothing does.
async fn limiting(fake: &Fake, memory_limit: &str) -> Bed {
    let config = format!("webhook: {{memory_limit: {memory_limit}}}");
    let config = Config::from_yaml(&config).unwrap();
    let bed = Bed::starting(fake, config, json!({"gpu-fraction": "0.5"})).await;
    bed.app.lead.set_fenced();
    bed.watch(fake);
    bed
}

/// The watch shows the bound pod; how many edits were seen so far.
fn show(bed: &Bed, fake: &Fake) -> Option<String> {
    assert_eq!(bed.app.ledger.see_pod(&fact(fake), bed.app.clock.now()), []);
    show_written(bed, fake)
}

/// The same beside the ledger.
fn show_written(bed: &Bed, fake: &Fake) -> Option<String> {
    let mut pod = pod_of(fake);
    pod["spec"]["nodeName"] = "n1".into();
    bed.app.pod(&SeenPod::from_json(&pod.to_string()).unwrap());
    edits_seen(bed)
}

fn edits_seen(bed: &Bed) -> Option<String> {
    let text = String::from_utf8(bed.app.metrics.text()).unwrap();
    let seen = "gpupack_placement_edits_total{result=\"seen\"} ";
    text.lines().find_map(|line| line.strip_prefix(seen)).map(str::to_owned)
}

#[tokio::test]
async fn an_edit_of_other_keys_is_reported_and_written_back_in_full() {
    fn key(name: &str) -> String {
        format!("placed.gpupack.dev/{name}")
    }
    let edits: [Edit; 7] = [
        Box::new(|all| drop(all.insert(DRIVER_MEMORY.to_owned(), "23034".into()))),
        Box::new(|all| drop(all.remove(DRIVER_MEMORY))),
        Box::new(|all| drop(all.remove(DEVICES))),
        Box::new(|all| drop(all.insert(key("uuids"), "GPU-b".into()))),
        Box::new(|all| drop(all.insert(key("memory-mib"), "23034".into()))),
        Box::new(|all| drop(all.insert(key("mps-memory-limit"), "0=23034M".into()))),
        Box::new(|all| drop(all.insert(key("unknown"), String::new()))),
    ];
    for change in edits {
        let fake = Fake::with_pod();
        let (bed, _stop) = run(limiting(&fake, "driver").await).await;
        let ours = annotations(&fake);
        assert!(ours.contains_key(DRIVER_MEMORY), "{ours:?}");
        assert_eq!(show(&bed, &fake).as_deref(), Some("0"));
        edit(&fake, change);
        assert_eq!(show(&bed, &fake).as_deref(), Some("1"), "{:?}", annotations(&fake));
        until("written back", || annotations(&fake) == ours).await;
        edit(&fake, |all| drop(all.insert(key("fence"), "1".into())));
        assert_eq!(show(&bed, &fake).as_deref(), Some("1"), "our write and a fence are no edits");
    }
}

#[tokio::test]
async fn an_edit_before_the_watch_shows_the_bound_pod_is_detected() {
    let fake = Fake::with_pod();
    let (bed, _stop) = run(limiting(&fake, "driver").await).await;
    let ours = annotations(&fake);
    edit(&fake, |all| drop(all.insert(DRIVER_MEMORY.to_owned(), "23034".into())));
    assert_eq!(show(&bed, &fake).as_deref(), Some("1"));
    until("written back", || annotations(&fake) == ours).await;
}

#[tokio::test]
async fn after_a_start_the_first_limits_that_are_read_count() {
    let fake = Fake::with_pod();
    let before = limiting(&fake, "driver").await;
    assert_eq!(before.bind().await, "");
    let ours = annotations(&fake);
    // It started long before: both do so within a second here.
    edit(&fake, |all| drop(all.insert(FENCE.to_owned(), "1-1 bind".into())));
    let bed = Bed::starting(&fake, Config::default(), json!({})).await;
    bed.app.lead.set_fenced();
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    assert_eq!(show(&bed, &fake).as_deref(), Some("0"));
    assert_eq!(bed.app.pods.edits.written_count(), 1);
    edit(&fake, |all| drop(all.insert(DRIVER_MEMORY.to_owned(), "23034".into())));
    assert_eq!(show(&bed, &fake).as_deref(), Some("1"));
    until("written back", || annotations(&fake) == ours).await;
    // Else an earlier process that goes on would write what it knew, such as a MIG instance that is gone.
    let fence = fake.bed(|bed| bed.pod.as_ref().unwrap().annotations[FENCE].clone());
    assert!(fence.ends_with(" placed"), "{fence}");
    bed.app.pod_ended(&PodUid::new("u1"));
    assert_eq!(bed.app.pods.edits.written_count(), 0);
}

/// The Binding of another process to half of `device`, with this limit of the driver.
fn binding_to(device: &str, mib: u64, limit: &str) -> serde_json::Value {
    let demand = Demand { memory: MemMib::new(mib), share: Share::from_millionths(500_000) };
    let devices = vec![PlacedDevice { id: DeviceId::new(device).unwrap(), demand }];
    let node = NodeName::new("n1");
    let placement = Placement {
        node,
        devices,
        isolation: ConfiguredIsolation::None,
        guest: None,
        spots: Vec::new(),
    };
    let mut annotations = encode(&placement).unwrap();
    annotations.insert(DRIVER_MEMORY.to_owned(), limit.to_owned());
    json!({
        "metadata": {"uid": "u1", "resourceVersion": "7", "annotations": annotations},
        "target": {"name": "n1"},
    })
}

/// An extender with two GPUs, configured so that the driver limits memory. It chooses the small one.
async fn with_two_gpus(fake: &Fake) -> Bed {
    let gpu = |index: usize, uuid: &str, memory_mib: u64| {
        json!({"id": uuid, "index": index, "model": "NVIDIA L4", "memoryMib": memory_mib,
            "reservedMib": 0, "kind": "Gpu", "healthy": true})
    };
    let gpus = json!([gpu(0, "GPU-a", 10_000), gpu(1, "GPU-b", 80_000)]);
    let config = Config::from_yaml("webhook: {memory_limit: driver}").unwrap();
    let bed = Bed::with(fake, config, &gpus).await;
    let pod = SeenPod::from_json(&pod_of(fake).to_string()).unwrap();
    let query = bed.app.query(&pod).unwrap();
    let chosen = bed.app.ledger.reserve(&pod.pod, "n1", &query, bed.app.clock.now()).unwrap();
    assert_eq!(chosen.devices[0].id.as_str(), "GPU-a");
    drop(bed.app.ledger.forget(&pod.pod.uid));
    bed
}

#[tokio::test]
async fn an_own_placement_is_ignored_after_the_binding_of_another() {
    for (device, mib, limit, is_shown_first) in [
        ("GPU-b", 40_000, "40000", false),
        ("GPU-b", 40_000, "40000", true),
        // The same placement by a process with another configuration.
        ("GPU-a", 5_000, "4000", false),
        // Its devices with other amounts.
        ("GPU-a", 4_000, "4000", false),
        ("GPU-a", 4_000, "4000", true),
    ] {
        let fake = Fake::with_pod();
        let bed = with_two_gpus(&fake).await;
        fake.bed(|bed| assert_eq!(bed.bind(&binding_to(device, mib, limit)).0, 201));
        let theirs = annotations(&fake);
        if is_shown_first {
            fake.bed(|bed| bed.on_read.push_back(Fault::Answer(500)));
        }
        let watch = async {
            while requests(&fake, "GET") == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if is_shown_first {
                let mut pod = pod_of(&fake);
                pod["spec"]["nodeName"] = "n1".into();
                bed.app.see_bound(&SeenPod::from_json(&pod.to_string()).unwrap());
                show_written(&bed, &fake);
            }
        };
        let (error, ()) = tokio::join!(bed.bind(), watch);
        assert_eq!((error.as_str(), requests(&fake, "/binding")), ("", 1), "bound to the node");
        assert_eq!(edits_seen(&bed).as_deref(), Some("0"), "{device} {mib} {is_shown_first}");
        let held = bed.app.ledger.reservation(&PodUid::new("u1")).unwrap();
        assert_eq!(held.placement.devices[0].demand.memory.mib(), mib, "{device} {is_shown_first}");
        edits::restore_edited(&bed.app).await;
        assert_eq!(annotations(&fake), theirs);
        // From here on an edit is one.
        edit(&fake, |all| drop(all.insert(DRIVER_MEMORY.to_owned(), "79000".into())));
        assert_eq!(show(&bed, &fake).as_deref(), Some("1"));
        edits::restore_edited(&bed.app).await;
        assert_eq!(annotations(&fake), theirs);
    }
}

#[tokio::test]
async fn a_placement_edited_before_its_binding_is_decided_is_written_back() {
    let fake = Fake::with_pod().on_bind(Fault::SilentAfterCommit);
    fake.bed(|bed| bed.on_read.push_back(Fault::Answer(500)));
    let bed = limiting(&fake, "driver").await;
    let editor = async {
        while node(&fake).is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let ours = annotations(&fake);
        let tiny = ours[PLACEMENT].replace("\"share\":500000", "\"share\":1");
        edit(&fake, |all| {
            all.insert(PLACEMENT.to_owned(), tiny);
            all.insert(DRIVER_MEMORY.to_owned(), "23034".into());
        });
        assert_ne!(annotations(&fake), ours);
        ours
    };
    let ((bed, _stop), ours) = tokio::join!(run(bed), editor);
    assert_eq!(free_millionths(&bed), 500_000);
    until("written back", || annotations(&fake) == ours).await;
    assert_eq!(edits_seen(&bed).as_deref(), Some("1"));
}
