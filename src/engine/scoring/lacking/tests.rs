use super::*;
use crate::hardware::device_class::DeviceClasses;
use crate::ledger::change::facts::PodFact;
use crate::ledger::ledger_fixture::{bound, ledger, node};
use crate::model::fit::HostRule;
use crate::model::request::{Amount, GpuRequest};
use crate::model::reservation::{Reservation, Tenure};
use wire::ids::PodUid;
use wire::units::{HostAmount, MemMib, Share, Timestamp};

/// What node `n` lacks of a request, and the devices that lack least.
fn lacks(used: &[(&str, u64)], request: GpuRequest) -> Option<(u64, Vec<String>)> {
    let ledger = ledger("A B C");
    for (at, (device, millionths)) in used.iter().enumerate() {
        ledger.see_pod(&bound(&format!("p{at}"), "n", device, *millionths), Timestamp::START);
    }
    let classes: DeviceClasses = ledger.cluster().classes.clone();
    let compiled =
        CompiledRequest::new(Some(request), HostAmount::ZERO, HostRule::Trusted, &classes);
    let (lacks, hold) = lacking(&node(&ledger, "n"), &compiled, None)?;
    assert_eq!(lacks_there(&node(&ledger, "n"), &compiled, &hold), Some(lacks));
    let ids = hold.placement.devices.iter().map(|placed| placed.id.as_str().to_owned());
    Some((lacks, ids.collect()))
}

fn whole(count: u32) -> GpuRequest {
    GpuRequest::several(Amount::Whole, count.try_into().unwrap())
}

#[test]
fn the_devices_that_lack_least_are_kept() {
    let used = [("A", 700_000), ("B", 200_000), ("C", 300_000)];
    let ids = |ids: &[&str]| ids.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(lacks(&used, whole(1)), Some((200_000, ids(&["B"]))));
    assert_eq!(lacks(&used, whole(2)), Some((500_000, ids(&["B", "C"]))));
    assert_eq!(lacks(&used, whole(3)), Some((1_200_000, ids(&["A", "B", "C"]))));
    assert_eq!(lacks(&used, whole(4)), None, "there are three");
    let half = GpuRequest::one(Amount::Fraction(Share::from_millionths(500_000)));
    assert_eq!(lacks(&used, half), Some((0, ids(&["B"]))), "it fits now");
    let memory = GpuRequest::one(Amount::Memory(MemMib::new(900)));
    assert_eq!(lacks(&used, memory), Some((100_000, ids(&["B"]))));
    let large = GpuRequest::one(Amount::Memory(MemMib::new(1_001)));
    assert_eq!(lacks(&used, large), None, "not even an empty device would do");
}

/// Room for half a GPU of one GPU on which others have these parts, of a pod of this controller; what is kept for
/// another pod there.
fn lacks_beside(
    used: &[(u64, bool, Option<u64>)],
    kept: Option<u64>,
    controller: Option<u64>,
) -> Option<u64> {
    let ledger = ledger("A");
    for (at, (millionths, _, controller)) in used.iter().enumerate() {
        let fact = bound(&format!("p{at}"), "n", "A", *millionths);
        let tenure = Tenure { controller: controller.map(Controller), ..fact.tenure };
        ledger.see_pod(&PodFact { tenure, ..fact }, Timestamp::START);
    }
    let classes: DeviceClasses = ledger.cluster().classes.clone();
    let compiled = |share| {
        let request = GpuRequest::one(Amount::Fraction(Share::from_millionths(share)));
        CompiledRequest::new(Some(request), HostAmount::ZERO, HostRule::Trusted, &classes)
    };
    let mut node = node(&ledger, "n");
    let hangs = |held: &Reservation| {
        let at: usize = held.pod.uid.as_str()[1..].parse().unwrap();
        used[at].1
    };
    node.note_hung(hangs);
    if let Some(kept) = kept {
        let (_, hold) = lacking(&node, &compiled(kept), None).unwrap();
        node.stand(PodUid::new("other"), hold);
    }
    lacking(&node, &compiled(500_000), controller.map(Controller)).map(|(lacks, _)| lacks)
}

#[test]
fn what_is_kept_for_others_is_never_waited_for() {
    let runs = [(1_000_000, false, None)];
    assert_eq!(lacks_beside(&runs, None, None), Some(500_000));
    assert_eq!(lacks_beside(&runs, Some(500_000), None), Some(500_000), "the other half");
    assert_eq!(lacks_beside(&runs, Some(600_000), None), None, "too little would be left");
    assert_eq!(lacks_beside(&[], Some(600_000), None), None, "also where it is free already");
}

#[test]
fn a_pod_that_hangs_is_never_waited_for() {
    assert_eq!(lacks_beside(&[(600_000, true, None)], None, None), None);
    let beside = [(400_000, true, None), (600_000, false, None)];
    assert_eq!(lacks_beside(&beside, None, None), Some(500_000), "for the others");
}

#[test]
fn older_pods_of_the_same_controller_are_not_waited_for() {
    let own = [(600_000, false, Some(1))];
    assert_eq!(lacks_beside(&own, None, Some(1)), None, "it runs until the new one does");
    assert_eq!(lacks_beside(&own, None, Some(2)), Some(100_000));
    assert_eq!(lacks_beside(&own, None, None), Some(100_000));
    let others = [(600_000, false, None)];
    assert_eq!(
        lacks_beside(&others, None, None),
        Some(100_000),
        "no controller is not the same one"
    );
}
