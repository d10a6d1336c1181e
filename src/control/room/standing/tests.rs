use super::*;
use crate::room::fixture::{ALL, Bed, waiting_pod};
use engine::ledger::change::facts::PodFact;
use engine::ledger::ledger_fixture::{bound, free, pod, report, share_request, uid};
use engine::model::device_state::StandingHold;
use engine::model::rejection::Rejection;
use engine::model::reservation::{Controller, Tenure};
use kube_api::request::room_note::RoomNote;
use wire::seen::ProcessUse;
use wire::units::{HostAmount, MemMib, MilliCpu};

fn empty() -> Bed {
    let mut bed = Bed::new(Duration::from_secs(60));
    bed.rules.at_most = Share::from_millionths(500_000);
    bed.rules.preemption.enabled = false;
    bed
}

/// A pod `a`, `b`, `c` has half of each GPU.
fn half_full() -> Bed {
    let bed = empty();
    for (name, node, device) in [("a", "n", "A"), ("b", "n", "B"), ("c", "m", "C")] {
        bed.bind(name, node, device, 500_000, 0);
    }
    bed
}

/// A pod of the age and priority was refused on these nodes.
fn refused(bed: &Bed, name: &str, (millionths, age, priority): (u64, i64, i32), nodes: &[&str]) {
    let created_unix_seconds = 1_000 - age;
    let pod = WaitingPod { created_unix_seconds, ..waiting_pod(name, millionths, priority) };
    bed.refused(pod, nodes);
}

/// The pods that are requeued this much later, with their nodes.
fn requeued_after(bed: &mut Bed, seconds: u64) -> Vec<(String, String)> {
    let step = bed.step_after(seconds);
    let ready = step.ready.into_iter().map(|(node, pod)| {
        bed.waiting.requeued(&pod.pod.uid, bed.now);
        (pod.name, node.as_str().to_owned())
    });
    ready.collect()
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
}

#[test]
fn room_is_kept_for_the_first_of_a_line_until_it_is_bound() {
    let mut bed = empty();
    bed.bind("a", "n", "A", 600_000, 0);
    bed.bind("b", "n", "B", 900_000, 0);
    bed.bind("c", "m", "C", 700_000, 0);
    refused(&bed, "large", (1_000_000, 30, 0), ALL);
    assert_eq!(
        (requeued_after(&mut bed, 0), bed.kept()),
        (vec![], vec![]),
        "it has waited for 30 s"
    );
    assert_eq!((requeued_after(&mut bed, 30), bed.kept()), (vec![], pairs(&[("large", "n")])));
    assert_eq!(free(&bed.ledger), [0, 100], "nothing else gets what is free of the GPU");
    bed.ledger.end_pod(&uid("a"), bed.now);
    for sequence in [2, 3] {
        bed.ledger.report("n", &report("x", 7, sequence, "A B"), bed.now).unwrap();
    }
    assert_eq!(free(&bed.ledger), [0, 100], "nor what becomes free");
    let query = share_request(1_000_000);
    assert_eq!(bed.ledger.fits_in_room_of(&uid("large"), &query, None), Some(NodeName::new("n")));
    assert_eq!(requeued_after(&mut bed, 1), pairs(&[("large", "n")]));
    bed.ledger.hold(&uid("large"), "n", &query, bed.now);
    assert_eq!(free(&bed.ledger), [0, 100], "counted once");
    let placement = bed.ledger.reserve(&pod("large"), "n", &query, bed.now).unwrap();
    assert_eq!(placement.devices[0].id.as_str(), "A");
    bed.waiting.remove(&uid("large"));
    assert_eq!((requeued_after(&mut bed, 1), bed.kept()), (vec![], vec![]));
    bed.ledger.audit().unwrap();
}

#[test]
fn one_pod_of_a_pool_has_room_kept_and_a_more_important_one_takes_it_over() {
    let mut bed = half_full();
    refused(&bed, "old", (1_000_000, 300, 0), &["m"]);
    refused(&bed, "young", (900_000, 100, 0), ALL);
    requeued_after(&mut bed, 0);
    assert_eq!(bed.kept(), pairs(&[("old", "m")]), "by age");
    refused(&bed, "important", (900_000, 90, 1), &["n"]);
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), pairs(&[("important", "n")]), "by priority");
    bed.waiting.remove(&uid("important"));
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), pairs(&[("old", "m")]));
    // One that fits in the room kept for a less important pod gets it at once.
    refused(&bed, "urgent", (400_000, 70, 2), &["m"]);
    assert_eq!(requeued_after(&mut bed, 1), pairs(&[("urgent", "m")]));
    assert_eq!(bed.kept(), pairs(&[("urgent", "m")]));
}

#[test]
fn room_moves_only_to_where_less_is_lacking() {
    let mut bed = empty();
    bed.bind("a", "n", "A", 600_000, 0);
    bed.bind("b", "n", "B", 900_000, 0);
    bed.bind("c", "m", "C", 700_000, 0);
    refused(&bed, "large", (1_000_000, 100, 0), ALL);
    requeued_after(&mut bed, 0);
    assert_eq!(bed.kept(), pairs(&[("large", "n")]));
    bed.bind("d", "m", "C", 100_000, 0);
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), pairs(&[("large", "n")]));
    bed.ledger.end_pod(&uid("c"), bed.now);
    let report = report("y", 8, 2, "C");
    for sequence in [2, 3] {
        let report = engine::ledger::change::reports::NodeReport { sequence, ..report.clone() };
        bed.ledger.report("m", &report, bed.now).unwrap();
    }
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]));
    assert_eq!(free(&bed.ledger), [400, 100]);
}

#[test]
fn room_moves_away_from_a_node_that_takes_no_pods() {
    let mut bed = half_full();
    refused(&bed, "large", (1_000_000, 100, 0), ALL);
    requeued_after(&mut bed, 0);
    let (from, to) = ("m", "n");
    assert_eq!(bed.kept(), pairs(&[("large", from)]));
    bed.ledger.see_unschedulable(&NodeName::new(from), true);
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), pairs(&[("large", to)]));
    bed.ledger.see_unschedulable(&NodeName::new(to), true);
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), vec![]);
}

#[test]
fn a_pod_that_is_not_bound_leaves_its_room_to_others_for_a_while() {
    let mut bed = empty();
    for (name, node, device) in [("a", "n", "A"), ("b", "n", "B")] {
        bed.bind(name, node, device, 500_000, 0);
    }
    for (name, controller, created_unix_seconds) in [("stuck", 1, 900), ("next", 2, 910)] {
        let controller = Some(Controller(controller));
        let pod = waiting_pod(name, 1_000_000, 0);
        bed.refused(WaitingPod { controller, created_unix_seconds, ..pod }, &["m"]);
    }
    assert_eq!(requeued_after(&mut bed, 0), pairs(&[("stuck", "m")]), "all of it is free");
    assert_eq!(requeued_after(&mut bed, 1), vec![], "a requeue is under way");
    requeued_after(&mut bed, 30);
    assert_eq!(bed.kept(), pairs(&[("stuck", "m")]));
    requeued_after(&mut bed, 40);
    assert_eq!(bed.kept(), pairs(&[("next", "m")]));
    bed.waiting.remove(&uid("next"));
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), vec![], "a minute of pause");
    requeued_after(&mut bed, 60);
    assert_eq!(bed.kept(), pairs(&[("stuck", "m")]));
    bed.waiting.remove(&uid("stuck"));
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), vec![]);
    requeued_after(&mut bed, 10_000);
    assert!(bed.holds.pauses.is_empty(), "nothing is remembered of pods that are gone");
}

#[test]
fn much_of_a_small_pool_is_not_kept() {
    for (count, is_kept) in [(1, true), (2, false)] {
        let mut bed = empty();
        for (name, device) in [("a", "A"), ("b", "B")] {
            bed.bind(name, "n", device, 500_000, 0);
        }
        refused(&bed, "large", (1_000_000, 100, 0), &["n"]);
        let mut pod = bed.waiting.pod(&uid("large")).unwrap().waiting;
        pod.query.gpu.as_mut().unwrap().count = count.try_into().unwrap();
        let _ = bed.waiting.see(pod.clone(), bed.now);
        bed.waiting.begin_call(pod, bed.now);
        let short = Rejection::DevicesTaken { fitting: 0 };
        bed.waiting.refuse(&uid("large"), BTreeMap::from([(short, 1)]), None);
        requeued_after(&mut bed, 0);
        assert_eq!(!bed.kept().is_empty(), is_kept, "{count} of three devices");
    }
}

#[test]
fn a_pod_in_whose_way_room_is_kept_gets_it_before_that_is_kept_again() {
    let mut bed = half_full();
    refused(&bed, "large", (1_000_000, 100, 0), &["m"]);
    requeued_after(&mut bed, 0);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]));
    refused(&bed, "urgent", (400_000, 30, 1), &["m"]); // not old enough for room of its own
    refused(&bed, "important", (400_000, 90, 1), &["m"]);
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), pairs(&[("important", "m")]));
    bed.waiting.remove(&uid("important"));
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), vec![]);
    requeued_after(&mut bed, 5);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]));
}

#[test]
fn room_of_which_nothing_more_becomes_free_is_given_up() {
    let mut bed = empty();
    bed.bind("service", "m", "C", 100_000, 0);
    refused(&bed, "large", (1_000_000, 100, 0), &["m"]);
    requeued_after(&mut bed, 0);
    requeued_after(&mut bed, 1_799);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]));
    requeued_after(&mut bed, 1);
    assert_eq!(bed.kept(), vec![]);
    requeued_after(&mut bed, 60);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]), "after a pause");
    // An edit does not begin the times again.
    refused(&bed, "large", (900_000, 100, 0), &["m"]);
    refused(&bed, "large", (950_000, 100, 0), &["m"]);
    requeued_after(&mut bed, 1);
    requeued_after(&mut bed, 60);
    assert_eq!(bed.kept(), vec![], "the second pause is longer");
}

#[test]
fn a_later_process_keeps_the_room_of_an_earlier_one() {
    let note = |node: &str| RoomNote { node: NodeName::new(node), victims: BTreeSet::new() };
    let mut bed = half_full();
    bed.bind("d", "n", "A", 300_000, 0); // B and C lack less
    refused(&bed, "large", (1_000_000, 60, 0), ALL);
    refused(&bed, "other", (1_000_000, 70, 0), ALL);
    refused(&bed, "young", (1_000_000, 50, 9), ALL);
    let noted = [("large", "n"), ("young", "m"), ("other", "n")];
    let noted: Vec<_> = noted.iter().map(|(name, node)| (uid(name), note(node))).collect();
    let step = bed.resume(&noted);
    assert_eq!(
        bed.kept(),
        pairs(&[("other", "n")]),
        "one of a pool, by age; `young` has not waited"
    );
    let lost: Vec<&str> = step.abandoned.iter().map(|pod| &*pod.name).collect();
    assert_eq!(lost, ["young", "large"], "their notes go");
    requeued_after(&mut bed, 0);
    assert_eq!(bed.kept(), pairs(&[("other", "n")]), "and it stays");
    assert!(bed.preemptors.end(&uid("other")).is_noted, "its note goes when it ends");
}

#[test]
fn no_room_is_kept_where_it_is_being_made_for_another_pod() {
    let mut bed = Bed::new(Duration::from_secs(1));
    bed.bind("victim", "n", "A", 1_000_000, 0);
    bed.bind("b", "n", "B", 1_000_000, 20);
    bed.bind("c", "m", "C", 1_000_000, 20);
    let query = share_request(1_000_000);
    bed.refused(waiting_pod("unimportant", 1_000_000, 0), ALL);
    bed.step_after(2);
    assert_eq!(bed.kept(), pairs(&[("unimportant", "m")]), "the first that could have it");
    bed.refused(waiting_pod("important", 1_000_000, 10), ALL);
    let step = bed.step_after(5);
    assert_eq!(step.evict.len(), 1, "the victim");
    bed.preemptors.ask(&uid("important"), step.evict[0].number);
    let made = || ("important".to_owned(), "n".to_owned());
    for seconds in [1, 5, 60, 100] {
        bed.step_after(seconds);
        let on_n: Vec<_> = bed.kept().into_iter().filter(|(_, node)| node == "n").collect();
        assert_eq!(on_n, [made()], "no other room is kept there, whatever the victim takes");
    }
    bed.ledger.end_pod(&uid("victim"), bed.now);
    for sequence in [2, 3] {
        let report = report("x", 7, sequence, "A B");
        bed.ledger.report("n", &report, bed.now).unwrap();
    }
    let fits = bed.ledger.fits_in_room_of(&uid("important"), &query, None);
    assert_eq!(fits, Some(NodeName::new("n")), "at once");
}

#[test]
fn room_on_a_node_that_takes_no_pods_is_given_up_and_looked_for_elsewhere_at_once() {
    for leaves in ["cordoned", "not ready", "deleted"] {
        let mut bed = Bed::new(Duration::ZERO);
        bed.bind("a", "n", "A", 1_000_000, 0);
        bed.bind("b", "n", "B", 1_000_000, 20);
        bed.bind("c", "m", "C", 1_000_000, 1);
        bed.refused(waiting_pod("p", 1_000_000, 10), ALL);
        let step = bed.step_after(5);
        assert_eq!(step.evict[0].node, NodeName::new("n"));
        bed.preemptors.ask(&uid("p"), step.evict[0].number);
        let node = NodeName::new("n");
        match leaves {
            "cordoned" => bed.ledger.see_unschedulable(&node, true),
            "not ready" => bed.ledger.see_ready(&node, false),
            _ => bed.ledger.lose_node(&node),
        }
        let step = bed.step_after(1);
        let orders: Vec<_> = step.evict.iter().map(|order| order.node.as_str()).collect();
        assert_eq!(orders, ["m"], "{leaves}");
        bed.ledger.audit().unwrap();
    }
}

#[test]
fn a_victim_that_hangs_ends_the_room_and_is_in_no_later_plan() {
    let mut bed = Bed::new(Duration::from_secs(1));
    bed.bind("a", "n", "A", 1_000_000, 0);
    bed.bind("b", "n", "B", 1_000_000, 20);
    bed.bind("c", "m", "C", 1_000_000, 1);
    bed.refused(waiting_pod("p", 1_000_000, 10), ALL);
    let step = bed.step_after(5);
    bed.preemptors.ask(&uid("p"), step.evict[0].number);
    let fact = bound("a", "n", "A", 1_000_000);
    let tenure = Tenure { is_ending: true, ends_unix_seconds: 1_010, ..Tenure::default() };
    bed.ledger.see_pod(&PodFact { tenure, ..fact }, bed.now);
    assert!(bed.step_after(35).evict.is_empty(), "it has until 1,040 s");
    let step = bed.step_after(1);
    assert_eq!(step.hung.len(), 1);
    assert_eq!(step.evict.iter().map(|it| it.node.as_str()).collect::<Vec<_>>(), ["m"]);
    // The next important one does not wait for it either, and nothing is kept there.
    bed.refused(waiting_pod("q", 1_000_000, 0), ALL);
    bed.step_after(5);
    let node = bed.ledger.node("n").unwrap();
    let on = |hold: &StandingHold| hold.placement.devices[0].id.as_str() == "A";
    assert!(!node.standing_holds().values().any(on), "{:?}", node.standing_holds());
}

#[test]
fn no_room_is_kept_that_only_older_pods_of_the_same_controller_could_leave() {
    let mut bed = empty();
    let controller = Some(Controller(7));
    for (name, node, device) in [("old-1", "n", "A"), ("old-2", "n", "B"), ("old-3", "m", "C")] {
        let fact = bound(name, node, device, 600_000);
        let tenure = Tenure { controller, ..Tenure::default() };
        bed.ledger.see_pod(&PodFact { tenure, ..fact }, bed.now);
    }
    let new = WaitingPod { controller, ..waiting_pod("new", 600_000, 0) };
    bed.refused(WaitingPod { created_unix_seconds: 0, ..new }, ALL);
    bed.step_after(5);
    assert_eq!(bed.kept(), [], "a pod of 0.4 could use what is left");
    bed.ledger.end_pod(&uid("old-2"), bed.now);
    for sequence in [2, 3] {
        let report = report("x", 7, sequence, "A B");
        bed.ledger.report("n", &report, bed.now).unwrap();
    }
    bed.bind("other", "n", "B", 600_000, 0);
    bed.step_after(5);
    assert_eq!(bed.kept(), pairs(&[("new", "n")]), "another pod may leave that");
}

/// `x` has GPU A, room is kept of A for `p` and of B for `q`, which is free.
#[test]
fn a_pod_does_not_take_the_room_of_another_one() {
    use engine::ledger::suggest::standing::Holder;
    use engine::model::device_state::KeptFor;
    for (of_p, of_q) in [
        (KeptFor::Preemptor, KeptFor::Preemptor),
        (KeptFor::Preemptor, KeptFor::Group),
        (KeptFor::Preemptor, KeptFor::Line),
        (KeptFor::Group, KeptFor::Line),
        (KeptFor::Group, KeptFor::Group),
    ] {
        let bed = empty();
        bed.bind("x", "n", "A", 1_000_000, 0);
        let query = share_request(1_000_000);
        let (p, q, node) = (uid("p"), uid("q"), NodeName::new("n"));
        let keep = |uid, kept_for| {
            let holder = Holder { kept_for, ..Holder::first(uid, "team", &query) };
            bed.ledger.stand_again(holder, &node, |_| true).0.unwrap().lacks
        };
        assert_eq!(keep(&q, of_q), 0, "B");
        assert_eq!(keep(&p, of_p), 1_000_000, "A");
        assert!(bed.ledger.fits_in_room_of(&q, &query, None).is_some());
        let is_free = bed.ledger.fits_in_room_of(&p, &query, None).is_some();
        assert!(!is_free, "{of_p:?} before {of_q:?}: A is not free, and B is for q");
    }
}

/// Seconds within which pods may keep room that none of them uses: the first time a minute, then little.
const AT_MOST: usize = 60 + 1_800 / 20;

/// A bed of which all may be kept.
fn open() -> Bed {
    let mut bed = empty();
    bed.rules.at_most = Share::WHOLE;
    bed
}

#[test]
fn pods_that_end_at_once_keep_no_more_room_than_one_that_waits() {
    let (mut bed, mut kept) = (open(), 0);
    refused(&bed, "p0", (1_000_000, 100, 0), &["m"]);
    for second in 1..1_800 {
        refused(&bed, &format!("p{second}"), (1_000_000, 100, 0), &["m"]);
        bed.waiting.remove(&uid(&format!("p{}", second - 1)));
        bed.step_after(1);
        kept += bed.kept().len();
    }
    assert!((60..AT_MOST).contains(&kept), "{kept} s of 1,800");
}

#[test]
fn pods_that_take_over_from_each_other_keep_no_more_room_than_one_that_waits() {
    let (mut bed, mut kept) = (open(), 0);
    for round in 0..30 {
        let [low, high] = ["low", "high"].map(|name| format!("{name}-{round}"));
        refused(&bed, &low, (1_000_000, 100, 0), &["m"]);
        for second in 0..60 {
            if second == 55 {
                refused(&bed, &high, (1_000_000, 100, 1), &["m"]);
            }
            if second == 57 {
                [&low, &high].into_iter().for_each(|name| bed.waiting.remove(&uid(name)));
            }
            bed.step_after(1);
            kept += bed.kept().len();
        }
    }
    assert!((60..AT_MOST).contains(&kept), "{kept} s of 1,800");
}

#[test]
fn room_that_is_not_free_for_a_moment_is_kept_no_longer() {
    let (mut bed, mut kept, mut flickered) = (open(), 0, false);
    bed.bind("service", "m", "C", 100_000, 0);
    refused(&bed, "large", (900_000, 100, 0), &["m"]);
    for second in 0..1_800 {
        let memory = MemMib::new(if second % 50 == 49 { 200 } else { 50 });
        let mut report = report("y", 8, 2 + second, "C");
        let process = ProcessUse { pod: Some(uid("service")), memory: Some(memory) };
        (report.uses[0].used, report.uses[0].processes) = (Some(memory), Some(vec![process]));
        bed.ledger.report("m", &report, bed.now).unwrap();
        bed.step_after(1);
        kept += bed.kept().len();
        let held = bed.holds.held.get(&uid("large"));
        flickered |= held.is_some_and(|held| held.ready.is_none());
    }
    assert!(flickered, "it was not free for a moment");
    assert!((60..AT_MOST).contains(&kept), "{kept} s of 1,800");
}

/// What a pod keeps of the host beside room that is made for another one is not free while that one's victim runs.
#[test]
fn a_free_gpu_without_its_host_is_no_free_room() {
    let mut bed = open();
    let host = |cpu| HostAmount { cpu: MilliCpu::new(cpu), memory: MemMib::ZERO };
    bed.ledger.see_node(&NodeName::new("m"), host(4_000), PoolName::new(""));
    let fact = PodFact {
        wants_gpu: false,
        placement: None,
        request: None,
        host: host(2_000),
        ..bound("plain", "m", "C", 1)
    };
    bed.ledger.see_pod(&fact, bed.now);
    let of = |name, cpu| {
        let query = PlacementRequest { host: host(cpu), ..share_request(500_000) };
        WaitingPod { query, created_unix_seconds: 900, ..waiting_pod(name, 500_000, 0) }
    };
    // Room of a pod that waits for the host, and of one that fits beside it in all but that.
    let other = of("other", 2_000);
    assert!(bed.ledger.stand(Holder::of(&other, KeptFor::Preemptor), None, |_| true).0.is_some());
    bed.refused(of("p", 2_000), &["m"]);
    for _ in 0..90 {
        let step = bed.step_after(1);
        assert!(step.ready.is_empty(), "it would be called in vain");
    }
    let held = bed.holds.held.get(&uid("p")).expect("its room is kept");
    assert_eq!((held.ready, held.idle(bed.now)), (None, Duration::ZERO));
}
