//! What facts from outside may do to a node's state, and what they may not.

use super::*;
use crate::hardware::device_class::DeviceClasses;
use crate::hardware::inventory::NodeInventory;
use crate::hardware::pool::ConfiguredIsolation;
use crate::model::reservation::{Departure, OtherPod, PlacedDevice, Placement, PodRef, Tenure};
use wire::device::{Device, DeviceIndex, DeviceKind, Health};
use wire::ids::{DeviceId, ModelName};
use wire::seen::ProcessUse;
use wire::units::{Demand, MilliCpu, Share};

/// A node with two GPUs, `A` and `B`, of 1000 MiB, whose agent has reported.
fn node() -> NodeState {
    let mut node = NodeState::new(NodeName::new("n"), MemMib::new(10));
    node.see_node(cores(8000), PoolName::new(""));
    node.replace_inventory(&inventory(&["A", "B"], 1000), &mut DeviceClasses::default());
    node.observe(&[clean("A"), clean("B")], Timestamp::START);
    node
}

fn cores(milli: u64) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(milli), memory: MemMib::new(milli) }
}

fn id(text: &str) -> DeviceId {
    DeviceId::new(text).unwrap()
}

fn uid(text: &str) -> PodUid {
    PodUid::new(text)
}

fn inventory(ids: &[&str], mib: u64) -> NodeInventory {
    let devices = ids.iter().zip(0..).map(|(name, index)| Device {
        id: id(name),
        index: DeviceIndex(index),
        model: ModelName::new("T4"),
        total: MemMib::new(mib),
        reserved: MemMib::ZERO,
        kind: DeviceKind::Gpu,
        health: Health::Healthy,
    });
    NodeInventory::new(devices.collect()).unwrap()
}

fn clean(device: &str) -> DeviceUse {
    DeviceUse::idle(id(device))
}

/// A device in use by processes, given as pod and memory.
fn used(device: &str, mib: u64, processes: &[(Option<&str>, Option<u64>)]) -> DeviceUse {
    let process = |(pod, memory): &(Option<&str>, Option<u64>)| ProcessUse {
        pod: pod.map(uid),
        memory: memory.map(MemMib::new),
    };
    DeviceUse {
        used: Some(MemMib::new(mib)),
        processes: Some(processes.iter().map(process).collect()),
        ..clean(device)
    }
}

fn demand(mib: u64, millionths: u64) -> Demand {
    Demand { memory: MemMib::new(mib), share: Share::from_millionths(millionths) }
}

fn placement(device: &str, demand: Demand) -> Placement {
    let devices = vec![PlacedDevice { id: id(device), demand }];
    Placement {
        node: NodeName::new("n"),
        devices,
        isolation: ConfiguredIsolation::None,
        guest: None,
        spots: Vec::new(),
    }
}

fn held(pod: &str, device: &str, demand: Demand) -> Reservation {
    Reservation {
        pod: PodRef { uid: uid(pod), name: pod.into() },
        placement: placement(device, demand),
        host: cores(1000),
        state: ReservationState::Confirmed,
        request: None,
        tenure: None,
        departure: Departure::Stays,
        borrowed: BorrowedMemory::Free,
        is_hung: false,
    }
}

fn free(node: &NodeState) -> Vec<(u64, u64)> {
    let free = node.devices().iter().map(DeviceState::free);
    free.map(|free| (free.memory.mib(), free.share.millionths())).collect()
}

#[test]
fn names_of_a_placement_are_held_once_per_node() {
    let is_shared = |node: &NodeState| {
        let placed = &node.reservation(&uid("p")).unwrap().placement;
        let device = &node.devices()[0].device().id;
        let of = |text: &str| text.as_ptr();
        (of(placed.node.as_str()) == of(node.name().as_str()))
            && of(placed.devices[0].id.as_str()) == of(device.as_str())
    };
    let mut node = node();
    node.allocate(held("p", "A", demand(10, 10)));
    assert!(is_shared(&node), "the pod comes after the inventory");
    node.replace_inventory(&inventory(&["A", "B"], 1000), &mut DeviceClasses::default());
    assert!(is_shared(&node), "the inventory comes after the pod");
}

#[test]
fn amounts_beyond_any_type_overallocate_only_their_device() {
    let mut node = node();
    node.allocate(held("p", "A", demand(u64::MAX, u64::MAX)));
    node.allocate(held("q", "A", demand(1, 1)));
    node.allocate(Reservation {
        host: HostAmount { cpu: MilliCpu::new(u64::MAX), memory: MemMib::new(u64::MAX) },
        ..held("r", "A", demand(u64::MAX, 0))
    });
    node.observe(&[used("A", 700, &[(Some("p"), Some(700))]), clean("B")], Timestamp::START);
    assert_eq!(node.audit(), Ok(()));
    assert_eq!(free(&node), [(0, 0), (1000, 1_000_000)]);
    assert!(node.devices()[0].is_overallocated() && !node.devices()[1].is_overallocated());
    assert_eq!(node.host_free(), HostAmount::ZERO);
    for pod in ["p", "q", "r"] {
        assert!(node.remove(&uid(pod)));
    }
    node.observe(&[clean("A"), clean("B")], Timestamp::START);
    assert_eq!(free(&node), [(1000, 1_000_000), (1000, 1_000_000)]);
}

/// Reports, until the room of the drained pod `p` on device `A` is free.
fn reports_to_free(reports: &[Vec<DeviceUse>]) -> Option<usize> {
    let mut node = node();
    node.allocate(held("p", "A", demand(400, 400_000)));
    assert!(!node.drain(&uid("p"), Timestamp::START));
    reports.iter().position(|uses| {
        let freed = node.observe(uses, Timestamp::START);
        assert_eq!(freed.is_empty(), node.reservation(&uid("p")).is_some());
        !freed.is_empty()
    })
}

#[test]
fn room_of_an_ended_pod_is_free_after_two_reports_in_a_row_without_its_processes() {
    let none = || vec![clean("A"), clean("B")];
    let some = || vec![used("A", 400, &[(Some("p"), Some(400))]), clean("B")];
    let elsewhere = || vec![clean("A"), used("B", 9, &[(Some("p"), None)])];
    let unsampled = || vec![clean("A"), DeviceUse { processes: None, ..clean("B") }];
    for (reports, freed_at) in [
        (vec![none(), none()], Some(1)),
        (vec![none(), some(), none(), none()], Some(3)),
        (vec![some(), elsewhere(), none(), elsewhere(), none()], None),
        (vec![none(), unsampled(), none()], Some(2)),
        (vec![none(), vec![], vec![clean("B")], none()], Some(3)),
        (vec![vec![], vec![clean("B")], vec![], vec![]], None),
    ] {
        assert_eq!(reports_to_free(&reports), freed_at, "{reports:?}");
    }
}

#[test]
fn a_pod_on_a_vanished_device_drains_by_its_remaining_processes() {
    let mut node = node();
    node.allocate(held("p", "A", demand(400, 400_000)));
    node.replace_inventory(&inventory(&["B"], 1000), &mut DeviceClasses::default());
    assert!(!node.drain(&uid("p"), Timestamp::START));
    assert_eq!(node.observe(&[clean("B")], Timestamp::START), []);
    assert_eq!(node.observe(&[clean("B")], Timestamp::START), [uid("p")]);
}

#[test]
fn a_drain_times_out_even_before_the_first_agent_report() {
    let limit = Duration::from_secs(30);
    let mut spoken = node();
    spoken.allocate(held("p", "A", demand(400, 400_000)));
    assert!(!spoken.drain(&uid("p"), Timestamp::from_millis(500)));
    assert_eq!(spoken.host_free(), cores(8000), "the host is free immediately");
    for (millis, is_due) in [(500, false), (30_499, false), (30_500, true)] {
        let now = Timestamp::from_millis(millis);
        assert_eq!(spoken.is_anything_due(limit, now), is_due, "after {millis} ms");
    }
    assert_eq!(spoken.expire(limit, Timestamp::from_millis(30_500)), [uid("p")]);
    assert_eq!(free(&spoken), [(1000, 1_000_000); 2]);

    // after a restart the agent may only be late: the processes may still be there
    let mut restarted = NodeState::new(NodeName::new("n"), MemMib::ZERO);
    restarted.allocate(held("p", "A", demand(400, 400_000)));
    assert!(!restarted.drain(&uid("p"), Timestamp::START));
    restarted.replace_inventory(&inventory(&["A"], 1000), &mut DeviceClasses::default());
    restarted.observe(&[used("A", 0, &[(Some("p"), None)])], Timestamp::START);
    assert_eq!(free(&restarted), [(600, 600_000)]);
    assert_eq!(restarted.expire(limit, Timestamp::from_millis(30_000)), [uid("p")]);
}

#[test]
fn untracked_memory_reduces_free_memory() {
    // device A, of 1000 MiB, has pod p with 400 MiB; 10 MiB are tolerated
    for (total, processes, unallocated_use) in [
        (0, vec![], 0),
        (400, vec![(Some("p"), Some(400))], 0),
        (150, vec![(Some("p"), Some(150))], 0),
        (160, vec![(Some("p"), Some(150))], 0),
        (161, vec![(Some("p"), Some(150))], 11),
        (700, vec![(Some("p"), Some(700))], 300), // an over-limit pod
        (700, vec![(Some("p"), Some(300)), (Some("p"), Some(400))], 300),
        (700, vec![(Some("p"), Some(200)), (None, Some(500))], 500), // untracked memory
        (700, vec![(Some("p"), None)], 300), // unknown use counts as all that it has
        (700, vec![], 700),
        (5000, vec![(Some("p"), Some(u64::MAX)), (Some("p"), Some(1))], 4600),
    ] {
        let mut node = node();
        node.allocate(held("p", "A", demand(400, 400_000)));
        node.observe(&[used("A", total, &processes), clean("B")], Timestamp::START);
        let device = &node.devices()[0];
        assert_eq!(
            device.unallocated_use().mib(),
            unallocated_use,
            "{total} used by {processes:?}"
        );
        assert_eq!(device.free().memory.mib(), 600_u64.saturating_sub(unallocated_use));
        assert_eq!(device.free().share.millionths(), 600_000);
    }
}

#[test]
fn a_report_without_processes_keeps_untracked_memory() {
    let unlisted = |total| DeviceUse { processes: None, ..used("A", total, &[]) };
    let mut node = node();
    node.allocate(held("p", "A", demand(400, 400_000)));
    // p uses 10 of its 400 MiB; 300 MiB are untracked
    let listed = used("A", 310, &[(Some("p"), Some(10)), (None, Some(300))]);
    node.observe(&[listed], Timestamp::START);
    let uses = [(310, 300), (700, 300), (200, 200), (900, 500), (500, 500), (310, 310)];
    for (total, unallocated_use) in uses {
        node.observe(&[unlisted(total)], Timestamp::START);
        assert_eq!(node.devices()[0].unallocated_use().mib(), unallocated_use, "{total} in use");
    }
    // a pod that came after the list does not hide untracked memory either
    node.allocate(held("q", "A", demand(200, 200_000)));
    node.observe(&[unlisted(300)], Timestamp::START);
    assert_eq!(free(&node)[0], (100, 400_000));
    node.observe(&[used("A", 10, &[(Some("p"), Some(10))])], Timestamp::START);
    assert_eq!(free(&node)[0], (400, 400_000));
}

#[test]
fn little_use_counts_until_lists_say_what_it_is() {
    let mut node = NodeState::new(NodeName::new("n"), MemMib::new(100));
    node.replace_inventory(&inventory(&["A"], 1000), &mut DeviceClasses::default());
    let now = Timestamp::START;
    let unlisted = DeviceUse { processes: None, ..used("A", 50, &[]) };
    node.observe(std::slice::from_ref(&unlisted), now);
    assert_eq!(free(&node)[0].0, 950, "a pod that ended before the start may run");
    for left in [950, 1000] {
        node.observe(&[used("A", 50, &[(None, Some(50))])], now);
        assert_eq!(free(&node)[0].0, left);
    }
    node.observe(std::slice::from_ref(&unlisted), now);
    assert_eq!(free(&node)[0].0, 1000, "within the tolerance");
    // Where nothing ever lists processes, it counts for as long as those of an ended pod.
    let mut node = NodeState::new(NodeName::new("n"), MemMib::new(100));
    node.replace_inventory(&inventory(&["A"], 1000), &mut DeviceClasses::default());
    node.observe(&[unlisted], now);
    node.expire(Duration::from_secs(30), Timestamp::from_millis(30_000));
    assert_eq!(free(&node)[0].0, 1000);
}

#[test]
fn a_new_pod_does_not_hide_what_others_use_between_lists() {
    let unlisted = |total| DeviceUse { processes: None, ..used("A", total, &[]) };
    let mut node = node();
    node.observe(&[unlisted(400)], Timestamp::START);
    assert_eq!(free(&node)[0].0, 600);
    node.allocate(held("p", "A", demand(600, 400_000)));
    node.observe(&[unlisted(400)], Timestamp::START);
    assert_eq!(free(&node)[0].0, 0, "the pod has not started yet");
    node.observe(&[unlisted(1_000)], Timestamp::START);
    assert_eq!(free(&node)[0].0, 0);
    node.observe(&[used("A", 600, &[(Some("p"), Some(600))])], Timestamp::START);
    assert_eq!(free(&node)[0].0, 400, "the other one has ended");
    assert_eq!(node.audit(), Ok(()));
}

#[test]
fn processes_that_outlive_the_drain_keep_their_memory() {
    let now = Timestamp::from_millis(30_000);
    let mut node = node();
    node.allocate(held("p", "A", demand(400, 400_000)));
    node.allocate(held("q", "A", demand(300, 300_000)));
    node.observe(&[used("A", 350, &[(Some("p"), Some(350))])], Timestamp::START);
    node.drain(&uid("p"), Timestamp::START);
    assert_eq!(node.expire(Duration::from_secs(30), now), [uid("p")]);
    assert_eq!(free(&node)[0], (350, 700_000));
    // the next report lists nothing, the one after it shows a process of no known tenant
    node.observe(&[DeviceUse { processes: None, ..used("A", 350, &[]) }], now);
    assert_eq!(free(&node)[0], (350, 700_000));
    node.observe(&[used("A", 350, &[(Some("p"), Some(350))])], now);
    assert_eq!(free(&node)[0], (350, 700_000));
    node.observe(&[clean("A")], now);
    assert_eq!(free(&node)[0], (699, 700_000), "one list may have missed it");
    node.observe(&[clean("A")], now);
    assert_eq!(free(&node)[0], (700, 700_000));
    assert_eq!(node.audit(), Ok(()));
}

#[test]
fn room_of_an_ended_pod_is_not_free_while_reports_list_its_processes() {
    let (limit, at) =
        (Duration::from_secs(30), |seconds: u64| Timestamp::from_millis(1000 * seconds));
    let shown = || [used("A", 400, &[(Some("p"), Some(400))]), clean("B")];
    let unsampled = || [DeviceUse { processes: None, ..used("A", 400, &[]) }, clean("B")];
    let mut node = node();
    node.allocate(held("p", "A", demand(400, 400_000)));
    node.drain(&uid("p"), at(0));
    for second in (5..3600).step_by(5) {
        assert_eq!(node.observe(&shown(), at(second)), []);
        assert_eq!(node.observe(&unsampled(), at(second + 1)), []);
        assert_eq!(node.expire(limit, at(second + 4)), []);
        assert_eq!(node.overdue_drains(limit, at(second)), usize::from(second >= 30));
    }
    assert_eq!(free(&node)[0], (600, 600_000));
    let mut silent = node.clone();
    let mut clean_twice = node.clone();
    // Two lists without it free it immediately.
    assert_eq!(clean_twice.observe(&[clean("A"), clean("B")], at(3600)), []);
    assert_eq!(clean_twice.observe(&[clean("A"), clean("B")], at(3601)), [uid("p")]);
    assert_eq!(free(&clean_twice)[0], (1000, 1_000_000));
    // Where reports end, so does the proof: the last list came at 3,595 s.
    assert!(!silent.is_anything_due(limit, at(3624)));
    assert_eq!(silent.expire(limit, at(3625)), [uid("p")]);
    assert_eq!(free(&silent)[0], (600, 1_000_000), "what it used stays in use");
}

/// What is free of `A` after each of these lists, if 50 MiB of unknown use are tolerated.
fn free_after_lists(node: &mut NodeState, lists: &[(u64, &[&str])]) -> Vec<u64> {
    let list = |(second, pods): &(u64, &[&str])| {
        let processes: Vec<_> = pods.iter().map(|pod| (Some(*pod), Some(9))).collect();
        let total = 9 * u64::try_from(pods.len()).unwrap();
        let now = Timestamp::from_millis(1000 * second);
        node.observe(&[used("A", total, &processes), clean("B")], now);
        if node.is_anything_due(Duration::from_secs(30), now) {
            node.expire(Duration::from_secs(30), now);
        }
        assert_eq!(node.audit(), Ok(()));
        free(node)[0].0
    };
    lists.iter().map(list).collect()
}

#[test]
fn processes_of_deleted_pods_block_whole_device_requests() {
    let fresh = || {
        let mut node = NodeState::new(NodeName::new("n"), MemMib::new(50));
        node.replace_inventory(&inventory(&["A", "B"], 1000), &mut DeviceClasses::default());
        node
    };
    let gone: &[&str] = &["gone"];
    // Until two lists no longer show it.
    let lists = [(0, gone), (5, gone), (10, &[]), (15, gone), (20, &[]), (25, &[])];
    assert_eq!(free_after_lists(&mut fresh(), &lists), [991, 991, 999, 991, 999, 1000]);
    // At most for the time of a drain. A second pod has a time of its own.
    let lists = [(0, gone), (29, gone), (30, gone), (40, &["gone", "other"]), (70, gone)];
    assert_eq!(free_after_lists(&mut fresh(), &lists), [991, 991, 1000, 982, 1000]);
    let plain =
        OtherPod { name: "a/plain".into(), host: HostAmount::ZERO, tenure: Tenure::default() };
    // This is not about processes of pods on the node, known before or after the list.
    let mut node = fresh();
    node.allocate_host(uid("plain"), plain.clone());
    assert_eq!(free_after_lists(&mut node, &[(0, &["plain", "late"])]), [982]);
    node.allocate(held("late", "A", demand(100, 1)));
    assert_eq!(free_after_lists(&mut node, &[(5, &["plain", "late"])]), [900]);
    assert_eq!(free_after_lists(&mut node, &[(10, &["plain", "late"])]), [900]);
    let mut node = fresh();
    assert_eq!(free_after_lists(&mut node, &[(0, &["plain"])]), [991]);
    node.allocate_host(uid("plain"), plain.clone());
    assert_eq!(free_after_lists(&mut node, &[(5, &["plain"])]), [1000]);
    // A new session of the agent does not forget them, and their number is bounded.
    let mut node = fresh();
    assert_eq!(free_after_lists(&mut node, &[(0, gone)]), [991]);
    node.replace_inventory(&inventory(&["A", "B"], 1000), &mut DeviceClasses::default());
    assert_eq!(free(&node)[0].0, 991);
    let many: Vec<String> = (0..100).map(|at| at.to_string()).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    free_after_lists(&mut node, &[(5, &many)]);
    assert_eq!(node.entries(), 64);
}

#[test]
fn the_parent_of_mig_instances_delays_no_drain() {
    let mut devices = inventory(&["A", "B"], 1000).devices().to_vec();
    devices[1].kind = DeviceKind::MigParent;
    let mut node = node();
    node.replace_inventory(&NodeInventory::new(devices).unwrap(), &mut DeviceClasses::default());
    node.allocate(held("p", "A", demand(400, 400_000)));
    node.drain(&uid("p"), Timestamp::START);
    let reports = [clean("A"), DeviceUse { processes: None, ..clean("B") }];
    assert_eq!(node.observe(&reports, Timestamp::START), []);
    assert_eq!(node.observe(&reports, Timestamp::START), [uid("p")]);
}

#[test]
fn a_new_inventory_keeps_what_was_seen_until_it_is_seen_again() {
    let mut node = node();
    let sick = DeviceUse { health: Health::Unhealthy, ..used("A", 300, &[(None, Some(300))]) };
    node.allocate(held("p", "A", demand(400, 400_000)));
    node.observe(&[sick, clean("B")], Timestamp::START);
    let before = free(&node);
    node.replace_inventory(&inventory(&["A", "B"], 1000), &mut DeviceClasses::default());
    assert_eq!(free(&node), before);
    assert_eq!(node.devices()[0].health(), Health::Unhealthy);
    node.observe(&[clean("A"), clean("B")], Timestamp::START);
    assert_eq!(node.devices()[0].health(), Health::Healthy);
    assert_eq!(free(&node)[0], (600, 600_000));
}

#[test]
fn a_smaller_replacement_is_overallocated_until_its_tenants_end() {
    let mut node = node();
    node.allocate(held("p", "A", demand(700, 100_000)));
    node.allocate(held("q", "A", demand(200, 100_000)));
    let smaller = NodeInventory::new(
        [inventory(&["A"], 600), inventory(&["B"], 1000)]
            .iter()
            .flat_map(|part| part.devices().iter().cloned())
            .collect(),
    );
    node.replace_inventory(&smaller.unwrap(), &mut DeviceClasses::default());
    assert!(node.devices()[0].is_overallocated());
    assert_eq!(free(&node), [(0, 0), (1000, 1_000_000)]);
    node.remove(&uid("p"));
    assert_eq!(free(&node), [(400, 900_000), (1000, 1_000_000)]);
    assert_eq!(node.audit(), Ok(()));
}

#[test]
fn a_pod_without_devices_has_nothing_to_drain() {
    let mut node = node();
    let placement = Placement { devices: Vec::new(), ..placement("A", demand(0, 0)) };
    node.allocate(Reservation { placement, ..held("p", "A", demand(0, 0)) });
    assert_eq!(node.host_free(), cores(7000));
    node.drain(&uid("p"), Timestamp::START);
    assert!(!node.has_pod(&uid("p")));
}
