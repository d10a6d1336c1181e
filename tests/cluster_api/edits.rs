//! Somebody edits the placement of a bound pod: the ledger keeps it, and it is written back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpupack::cluster::placement::decode;
use gpupack::extender::background;
use gpupack::ledger::facts::PodFact;
use gpupack::packing::device::{NodeName, PodUid};
use gpupack::packing::reservation::PodRef;
use gpupack::packing::units::HostAmount;

use crate::binding::Bed;
use crate::fake::{Fake, Fault};

type Edit = Box<dyn FnOnce(&mut BTreeMap<String, String>)>;

const PLACEMENT: &str = "placed.gpupack.dev/placement";
const DEVICES: &str = "placed.gpupack.dev/devices";

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
    }
}

fn annotations(fake: &Fake) -> BTreeMap<String, String> {
    fake.world(|world| world.pod.as_ref().unwrap().annotations.clone())
}

fn edit(fake: &Fake, change: impl FnOnce(&mut BTreeMap<String, String>)) {
    fake.world(|world| {
        let pod = world.pod.as_mut().unwrap();
        change(&mut pod.annotations);
        pod.version += 1;
    });
}

/// A bound pod, with all loops running.
async fn bound(fake: &Fake) -> (Bed, tokio::sync::watch::Sender<bool>) {
    let bed = Bed::new(fake).await;
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
        let effects = bed.app.ledger.see_pod(&fact(&fake), bed.app.clock.now());
        assert_eq!(effects.len(), 1, "{effects:?}");
        bed.app.outbox.push(effects);
        assert_eq!(free_millionths(&bed), 500_000);
        until("written back", || annotations(&fake) == ours).await;
        let effects = bed.app.ledger.see_pod(&fact(&fake), bed.app.clock.now());
        assert_eq!(effects, [], "our own write is no edit");
    }
    let text = String::from_utf8(bed.app.metrics.text()).unwrap();
    assert!(text.contains("gpupack_placement_edits_total{result=\"seen\"} 3"), "{text}");
}

#[tokio::test]
async fn a_write_that_meets_another_is_tried_again_on_the_newest_version() {
    let fake = Fake::with_pod();
    let (bed, _stop) = bound(&fake).await;
    let ours = annotations(&fake);
    fake.world(|world| world.on_touch.extend([Fault::Answer(409), Fault::Answer(500)]));
    edit(&fake, |all| drop(all.remove(PLACEMENT)));
    bed.app.outbox.push(bed.app.ledger.see_pod(&fact(&fake), bed.app.clock.now()));
    until("written back", || annotations(&fake) == ours).await;
    let text = String::from_utf8(bed.app.metrics.text()).unwrap();
    assert!(text.contains("gpupack_placement_edits_total{result=\"failed\"} 2"), "{text}");
}
