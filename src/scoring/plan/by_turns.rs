//! GPUs that are shared and divided by turns: which mode a pod gets, and when a GPU may be switched.

use std::collections::BTreeMap;

use super::on_demand::Bed;
use super::*;
use crate::hardware::device::{
    Device, DeviceDetails, DeviceId, DeviceIndex, DeviceKind, Health, MakeableProfile, MigProfile,
    ModelName, NodeName, Slot,
};
use crate::hardware::inventory::NodeInventory;
use crate::hardware::pool::MigUse;
use crate::hardware::units::{MemMib, Timestamp};
use crate::ledger::suggest::displacement::clearings;
use crate::model::device_state::{DeviceUse, StandingHold};
use crate::model::event::{LedgerEvent, StateBefore};
use crate::model::reservation::Reservation;
use crate::scoring::fixture::{compiled_request, tenant};
use crate::scoring::lacking::{lacking, lacks_there};

/// A100 GPUs: whether each is in MIG mode, and its instances by name, profile, start and size.
type Gpu = (bool, &'static [(&'static str, &'static str, u32, u32)]);

fn id(text: &str) -> DeviceId {
    DeviceId::new(text).unwrap()
}

fn name(at: usize) -> &'static str {
    ["GPU-a", "GPU-b", "GPU-c"][at]
}

fn inventory(gpus: &[Gpu]) -> NodeInventory {
    let row = |name: &str, memory, size, starts: &[u32]| MakeableProfile {
        profile: MigProfile::new(name),
        memory: MemMib::new(memory),
        sm_count: None,
        size,
        starts: starts.to_vec(),
    };
    let rows = vec![
        row("1g.5gb", 4_864, 1, &[0, 1, 2, 3, 4, 5, 6]),
        row("3g.20gb", 19_968, 4, &[0, 4]),
        row("7g.40gb", 40_192, 8, &[0]),
    ];
    let (mut devices, mut details) = (Vec::new(), BTreeMap::new());
    for (at, (is_in_mig_mode, instances)) in gpus.iter().enumerate() {
        let kind = if *is_in_mig_mode { DeviceKind::MigParent } else { DeviceKind::Gpu };
        let gpu = Device {
            id: id(name(at)),
            index: DeviceIndex(u32::try_from(at).unwrap()),
            model: ModelName::new("NVIDIA A100-SXM4-40GB"),
            total: MemMib::new(40_960),
            reserved: MemMib::new(if *is_in_mig_mode { 600 } else { 500 }),
            kind,
            health: Health::Healthy,
        };
        let more = DeviceDetails {
            mig_profiles: rows.clone(),
            switches_mig: true,
            ..DeviceDetails::default()
        };
        details.insert(gpu.id.clone(), more);
        for (uuid, profile, start, size) in *instances {
            let kind = DeviceKind::MigInstance {
                parent: gpu.id.clone(),
                profile: MigProfile::new(*profile),
            };
            let (total, reserved) = (MemMib::new(4_864 * u64::from(*size)), MemMib::ZERO);
            devices.push(Device { id: id(uuid), total, reserved, kind, ..gpu.clone() });
            let slot = Some(Slot { start: *start, size: *size });
            let more = DeviceDetails { slot, made_here: true, ..DeviceDetails::default() };
            details.insert(id(uuid), more);
        }
        devices.push(gpu);
    }
    NodeInventory::placed(devices, &details).unwrap()
}

impl Bed {
    fn by_turns(gpus: &[Gpu]) -> Self {
        Self::with(&inventory(gpus), MigUse::ByTurns)
    }

    /// The GPUs that are to be out of MIG mode, and the instances that are to be made.
    fn orders(&self) -> (Vec<(String, u64)>, Vec<String>) {
        let orders = self.node.instance_orders();
        let whole = orders.whole.into_iter().map(|(gpu, number)| (gpu.to_string(), number));
        let make = orders.make.iter().map(|spot| spot.id().unwrap().to_string());
        (whole.collect(), make.collect())
    }
}

#[test]
fn an_empty_gpu_of_the_own_mode_comes_first() {
    let mut bed = Bed::by_turns(&[(false, &[]), (true, &[]), (true, &[])]);
    assert_eq!(bed.place("m", "mig=7g.40gb").unwrap(), "GPU-b/0/7g-40gb");
    assert_eq!(bed.place("s", "whole").unwrap(), "GPU-a");
    // The next one needs a GPU of the other mode.
    let mut other = Bed { node: bed.node.clone(), classes: bed.classes.clone() };
    assert_eq!(other.place("t", "fraction=0.5").unwrap(), "GPU-c/0/whole");
    assert_eq!(other.place("u", "fraction=0.5").unwrap(), "GPU-c/0/whole", "beside it");
    assert_eq!(other.place("v", "fraction=0.5"), Err(Rejection::NoPlace));
    assert_eq!(other.place("n", "mig=1g.5gb"), Err(Rejection::NoPlace), "it is to leave MIG mode");
    assert_eq!(bed.place("n", "mig=7g.40gb").unwrap(), "GPU-c/0/7g-40gb");
    bed.node.remove(&PodUid::new("s"));
    assert_eq!(bed.place("o", "mig=3g.20gb").unwrap(), "GPU-a/0/3g-20gb");
    assert_eq!(bed.place("w", "fraction=0.5"), Err(Rejection::NoPlace));
    assert_eq!(bed.place("p", "mig=3g.20gb").unwrap(), "GPU-a/4/3g-20gb");
}

#[test]
fn any_other_node_is_better_than_a_switch() {
    let key =
        |gpus: &[Gpu], request: &str| match Bed::by_turns(gpus).find(request).unwrap().local_cost {
            LocalCost::Ranked(cost) => cost.key(),
            other => panic!("{other:?}"),
        };
    for request in ["whole", "fraction=0.25", "memory=5000"] {
        let (own, other) = (key(&[(false, &[])], request), key(&[(true, &[])], request));
        assert!(other > own << 1, "{request}: {own} {other}");
    }
    let (own, other) = (key(&[(true, &[])], "mig=1g.5gb"), key(&[(false, &[])], "mig=1g.5gb"));
    assert!(other > own << 1, "{own} {other}");
}

#[test]
fn what_is_used_keeps_its_mode() {
    let mut bed = Bed::by_turns(&[(false, &[])]);
    let used = DeviceUse { used: Some(MemMib::new(300)), ..DeviceUse::idle(id("GPU-a")) };
    bed.node.observe(&[used], Timestamp::from_millis(1));
    assert_eq!(bed.place("m", "mig=1g.5gb"), Err(Rejection::NoPlace), "by a process of others");
    bed.node.observe(&[DeviceUse::idle(id("GPU-a"))], Timestamp::from_millis(2));
    bed.place("s", "fraction=0.1").unwrap();
    assert_eq!(bed.place("m", "mig=1g.5gb"), Err(Rejection::NoPlace), "by a pod");
    assert_eq!(bed.node.placeable_instances(&id("GPU-a")).values().sum::<usize>(), 0);
    assert_eq!(bed.node.divided(HoldRule::Ignored).count(), 0);
    bed.node.remove(&PodUid::new("s"));
    assert_eq!(bed.node.divided(HoldRule::Ignored).count(), 1);
    bed.place("m", "mig=1g.5gb").unwrap();
    assert_eq!(bed.place("s", "fraction=0.1"), Err(Rejection::NoPlace), "by an instance");
    // An instance of others stays, too.
    let mut bed = Bed::by_turns(&[(true, &[("MIG-1", "1g.5gb", 0, 1)])]);
    bed.place("m", "mig=3g.20gb").unwrap();
    assert_eq!(bed.place("s", "whole"), Err(Rejection::NoPlace));
}

#[test]
fn a_promised_gpu_becomes_the_pods_own_once_it_is_out_of_mig_mode() {
    let mut bed = Bed::by_turns(&[(true, &[("MIG-1", "1g.5gb", 0, 1)])]);
    bed.node.observe(&[DeviceUse::idle(id("MIG-1"))], Timestamp::from_millis(1));
    assert_eq!(bed.place("s", "whole").unwrap(), "GPU-a/0/whole", "the idle one goes");
    assert_eq!(bed.orders(), (vec![("GPU-a".to_owned(), 1)], vec![]));
    assert_eq!(bed.node.instance_orders().remove, [id("MIG-1")]);
    bed.see_all(&inventory(&[(true, &[])]));
    assert_eq!(bed.of("s"), "GPU-a/0/whole");
    bed.see_all(&inventory(&[(false, &[])]));
    let held = bed.node.reservation(&PodUid::new("s")).unwrap().placement.clone();
    assert_eq!((bed.of("s").as_str(), held.spots.len()), ("GPU-a", 0));
    assert_eq!(held.devices[0].demand.memory, MemMib::new(40_460), "all of it");
    assert_eq!(bed.orders(), (vec![("GPU-a".to_owned(), 1)], vec![]));
    // After a boot in which MIG mode was lost an instance is made again.
    let mut bed = Bed::by_turns(&[(true, &[])]);
    bed.place("m", "mig=3g.20gb").unwrap();
    bed.see_all(&inventory(&[(true, &[("MIG-1", "3g.20gb", 0, 4)])]));
    assert_eq!(bed.of("m"), "MIG-1");
    bed.see_all(&inventory(&[(false, &[])]));
    assert_eq!(bed.of("m"), "GPU-a/0/3g-20gb");
    assert_eq!(bed.orders(), (vec![], vec!["GPU-a/0/3g-20gb".to_owned()]));
}

#[test]
fn a_pod_waits_until_the_agent_obeys_the_very_order() {
    let mut bed = Bed::by_turns(&[(false, &[])]);
    let gpu = id("GPU-a");
    assert!(bed.node.may_be_divided(&gpu), "the agent has said nothing yet");
    bed.node.note_wholes([(gpu.clone(), 1)].into());
    assert!(!bed.node.may_be_divided(&gpu));
    bed.place("s", "fraction=0.5").unwrap();
    bed.node.remove(&PodUid::new("s"));
    assert_eq!(bed.orders().0, [("GPU-a".to_owned(), 1)], "an empty GPU keeps its mode");
    bed.place("m", "mig=1g.5gb").unwrap();
    assert_eq!(bed.orders(), (vec![], vec!["GPU-a/0/1g-5gb".to_owned()]));
    bed.node.remove(&PodUid::new("m"));
    assert_eq!(
        bed.orders(),
        (vec![("GPU-a".to_owned(), 2)], vec![]),
        "it may be switched meanwhile"
    );
    assert!(bed.node.may_be_divided(&gpu));
    bed.node.note_wholes([(gpu.clone(), 2)].into());
    assert!(!bed.node.may_be_divided(&gpu) && !bed.node.may_be_divided(&id("GPU-x")));
}

#[test]
fn the_first_of_a_line_waits_for_a_gpu_of_the_other_mode() {
    let mut bed = Bed::by_turns(&[(false, &[])]);
    bed.place("s", "fraction=0.5").unwrap();
    let request = compiled_request("mig=3g.20gb", &bed.classes);
    let (lacks, hold) = lacking(&bed.node, &request, None).unwrap();
    assert_eq!((lacks, hold.placement.devices[0].id.as_str()), (1_000_000, "GPU-a/0/3g-20gb"));
    assert_eq!(lacks_there(&bed.node, &request, &hold), Some(1_000_000));
    let pods = clearings(&bed.node, &request, 3);
    assert_eq!(pods.len(), 1, "without the pod that shares it: {pods:?}");
    bed.node.stand(PodUid::new("m"), hold);
    assert_eq!(bed.node.audit(), Ok(()));
    let before = StateBefore::of(&bed.node);
    bed.node.remove(&PodUid::new("s"));
    assert_eq!(before.events(&bed.node), [LedgerEvent::Room(NodeName::new("n"))]);
    assert_eq!(bed.place("t", "fraction=0.5"), Err(Rejection::NoPlace), "it is kept");

    let mut bed = Bed::by_turns(&[(true, &[])]);
    bed.place("m", "mig=3g.20gb").unwrap();
    let request = compiled_request("whole", &bed.classes);
    let (lacks, hold) = lacking(&bed.node, &request, None).unwrap();
    assert_eq!((lacks, hold.placement.devices[0].id.as_str()), (500_000, "GPU-a/0/whole"));
    assert_eq!(clearings(&bed.node, &request, 3).len(), 1);
    bed.node.stand(PodUid::new("s"), hold);
    assert_eq!(bed.place("n", "mig=3g.20gb"), Err(Rejection::NoPlace), "it is kept");
}

/// A GPU with the instance of a pod, and what would be kept of it for one that needs half.
fn half_of_a_divided_gpu() -> (Bed, StandingHold) {
    let mut bed = Bed::by_turns(&[(true, &[])]);
    bed.place("m", "mig=3g.20gb").unwrap();
    let half = compiled_request("fraction=0.5", &bed.classes);
    let (_, hold) = lacking(&bed.node, &half, None).unwrap();
    (bed, hold)
}

#[test]
fn nobody_gets_part_of_a_gpu_that_is_kept_before_it_is_empty() {
    let (mut bed, hold) = half_of_a_divided_gpu();
    assert_eq!(hold.placement.devices[0].id.as_str(), "GPU-a/0/whole");
    bed.node.stand(PodUid::new("s"), hold);
    assert_eq!(bed.place("t", "fraction=0.5"), Err(Rejection::NoPlace), "beside what is kept");
    bed.node.remove(&PodUid::new("m"));
    assert_eq!(bed.place("t", "fraction=0.5").unwrap(), "GPU-a/0/whole");
    assert_eq!(bed.place("u", "fraction=0.5"), Err(Rejection::NoPlace), "the rest is kept");
    assert_eq!(bed.node.audit(), Ok(()));
}

#[test]
fn what_is_kept_stays_when_the_gpu_leaves_mig_mode() {
    let (mut bed, hold) = half_of_a_divided_gpu();
    bed.node.remove(&PodUid::new("m"));
    bed.node.stand(PodUid::new("s"), hold);
    bed.place("t", "fraction=0.25").unwrap();
    bed.see_all(&inventory(&[(false, &[])]));
    assert_eq!(bed.of("t"), "GPU-a");
    let kept = bed.node.standing_holds()[&PodUid::new("s")].clone();
    assert_eq!((kept.placement.devices[0].id.as_str(), kept.placement.spots.len()), ("GPU-a", 0));
    let half = compiled_request("fraction=0.5", &bed.classes);
    assert!(lacks_there(&bed.node, &half, &kept).is_some(), "though its capacity is another one");
    assert!(bed.place("u", "fraction=0.5").is_err(), "half of it is kept");
    assert_eq!(bed.node.audit(), Ok(()));
}

#[test]
fn the_other_half_of_what_is_promised_lacks_nothing() {
    let mut bed = Bed::by_turns(&[(true, &[])]);
    let half = compiled_request("fraction=0.5", &bed.classes);
    bed.place("t", "fraction=0.5").unwrap();
    let (lacks, hold) = lacking(&bed.node, &half, None).unwrap();
    assert_eq!((lacks, hold.placement.devices[0].id.as_str()), (0, "GPU-a/0/whole"));
    bed.node.stand(PodUid::new("s"), hold.clone());
    assert_eq!(lacks_there(&bed.node, &half, &hold), Some(500_000), "beside its own");
    bed.node.stand_down(&PodUid::new("s"));
    assert_eq!(lacks_there(&bed.node, &half, &hold), Some(0));
    assert_eq!(
        lacking(&bed.node, &compiled_request("whole", &bed.classes), None).unwrap().0,
        500_000
    );
}

#[test]
fn nobody_waits_for_the_end_of_an_instance_that_no_pod_has() {
    let mut bed = Bed::by_turns(&[(true, &[("MIG-1", "1g.5gb", 0, 1)])]);
    let whole = compiled_request("whole", &bed.classes);
    let used = DeviceUse { used: Some(MemMib::new(900)), ..DeviceUse::idle(id("MIG-1")) };
    bed.node.observe(&[used], Timestamp::from_millis(1));
    assert!(lacking(&bed.node, &whole, None).is_none(), "a process of others uses it");
    bed.node.observe(&[DeviceUse::idle(id("MIG-1"))], Timestamp::from_millis(2));
    assert_eq!(lacking(&bed.node, &whole, None).unwrap().0, 0, "it goes");
}

#[test]
fn a_gpu_that_cannot_be_switched_is_left_out_for_a_minute() {
    let mut bed = Bed::by_turns(&[(false, &[]), (false, &[])]);
    bed.place("m", "mig=1g.5gb").unwrap();
    let failed = bed.node.instance_orders().make;
    bed.node.remove(&PodUid::new("m"));
    bed.node.note_failures(failed.into_iter().map(|it| (it, None)), Timestamp::START);
    assert_eq!(bed.place("m", "mig=1g.5gb").unwrap(), "GPU-b/0/1g-5gb", "and no other start of it");
    assert_eq!(bed.place("s", "whole").unwrap(), "GPU-a", "it can be shared");
    bed.node.remove(&PodUid::new("s"));
    // Nor does its agent say that it is left out of MIG mode.
    assert!(bed.node.may_be_divided(&id("GPU-a")));
    bed.node.note_unheeded(&[id("GPU-a")], Timestamp::START);
    assert_eq!(bed.place("s", "whole"), Err(Rejection::NoPlace));
    assert_eq!(bed.node.audit(), Ok(()));
    assert_eq!(bed.orders().0, [("GPU-a".to_owned(), 3)]);
    bed.node.note_wholes([(id("GPU-a"), 3)].into());
    assert_eq!(bed.node.audit(), Ok(()));
    assert_eq!(bed.place("s", "whole").unwrap(), "GPU-a", "as soon as it does");
}

#[test]
fn no_instance_is_ordered_on_a_gpu_that_pods_have() {
    let mut bed = Bed::by_turns(&[(true, &[])]);
    bed.place("m", "mig=3g.20gb").unwrap();
    bed.see_all(&inventory(&[(true, &[("MIG-1", "3g.20gb", 0, 4)])]));
    // After a boot the agent does not know the profiles at first, and a pod gets the GPU.
    let held = Placement {
        node: NodeName::new("n"),
        devices: vec![PlacedDevice { id: id("GPU-a"), demand: Demand::ZERO }],
        isolation: ConfiguredIsolation::None,
        guest: None,
        spots: Vec::new(),
    };
    bed.node.allocate(Reservation { placement: held, ..tenant("s", Vec::new()) });
    bed.see_all(&inventory(&[(false, &[])]));
    assert_eq!(bed.of("m"), "GPU-a/0/3g-20gb");
    assert_eq!(bed.orders(), (vec![("GPU-a".to_owned(), 1)], vec![]));
    // If others turn MIG mode on, the agent gets another order.
    bed.node.note_wholes([(id("GPU-a"), 1)].into());
    bed.see_all(&inventory(&[(true, &[])]));
    assert_eq!(bed.orders(), (vec![("GPU-a".to_owned(), 2)], vec![]));
    bed.node.remove(&PodUid::new("s"));
    assert_eq!(bed.orders(), (vec![], vec!["GPU-a/0/3g-20gb".to_owned()]));
}

#[test]
fn two_kept_rooms_of_different_modes_do_not_lock_each_other_out() {
    for is_shared_first in [true, false] {
        let mut bed = Bed::by_turns(&[(false, &[])]);
        bed.place("t", "whole").unwrap();
        let shared = compiled_request("fraction=0.5", &bed.classes);
        let instance = compiled_request("mig=3g.20gb", &bed.classes);
        let (first, later) =
            if is_shared_first { (&shared, &instance) } else { (&instance, &shared) };
        let (_, hold) = lacking(&bed.node, first, None).unwrap();
        bed.node.stand(PodUid::new("first"), hold);
        assert!(lacking(&bed.node, later, None).is_none(), "a share first: {is_shared_first}");
    }
}

#[test]
fn nobody_waits_for_a_pod_that_hangs_on_a_shared_gpu() {
    let mut bed = Bed::by_turns(&[(false, &[])]);
    bed.place("t", "fraction=0.5").unwrap();
    bed.node.note_hung(|_| true);
    let instance = compiled_request("mig=3g.20gb", &bed.classes);
    assert!(lacking(&bed.node, &instance, None).is_none());
}
