//! Which agent may report for a node, in which order, and about which devices.

use std::collections::BTreeMap;

use super::*;
use crate::ledger::ledger_fixture::{
    bound, free, hello, inventory, ledger, node, report, say, seconds, see_node, settings,
    share_request, uid, uses,
};
use crate::model::policy::Policy;
use crate::model::rejection::Rejection;
use crate::scoring::strategy::Strategy;
use crate::waste::request_mix::{EarlierPod, RequestType, Stage};
use wire::device::{Device, DeviceIndex, DeviceKind, Health};
use wire::ids::{MAX_CLASSES_PER_NODE, ModelName};
use wire::units::{MemMib, Share};

#[test]
fn a_repeated_or_late_report_changes_nothing() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "n", "A", 500_000), seconds(0));
    say(&ledger, &report("x", 7, 5, "A")).unwrap();
    ledger.end_pod(&uid("p"), seconds(0));
    for (sequence, spoken) in [(5, Some(7)), (4, Some(7)), (1, None), (5, None), (0, Some(7))] {
        let late = NodeReport { session: spoken, ..hello("x", sequence, "B C") };
        let receipt = say(&ledger, &late).unwrap();
        assert_eq!((receipt.session, receipt.is_taken), (7, false), "sequence {sequence}");
        assert_eq!(receipt.events, []);
        let reported = receipt.allocations.map(|held| held.len());
        assert_eq!(reported, Some(1), "the agent still learns its reservations");
        assert_eq!(free(&ledger), [500]);
    }
    assert!(say(&ledger, &report("x", 7, 6, "A")).unwrap().is_taken);
    assert_eq!(free(&ledger), [500], "one clean report is not enough");
    say(&ledger, &report("x", 7, 6, "A")).unwrap();
    assert_eq!(free(&ledger), [500], "nor is the same one twice");
    let receipt = say(&ledger, &report("x", 7, 7, "A")).unwrap();
    assert_eq!(receipt.events, [LedgerEvent::Room(NodeName::new("n"))]);
    assert_eq!(receipt.allocations, Some(Vec::new()));
    assert_eq!(free(&ledger), [1000]);
}

#[test]
fn reservations_are_sent_on_change_or_when_the_agent_names_no_version() {
    let ledger = ledger("A");
    let reported = |sequence, allocations_version, session: Option<u64>| {
        let report = match session {
            Some(session) => report("x", session, sequence, "A"),
            None => hello("x", sequence, "A"),
        };
        let report = NodeReport { allocations_version, ..report };
        let receipt = say(&ledger, &report).unwrap();
        (receipt.allocations.map(|held| held.len()), receipt.allocations_version)
    };
    let (none, first) = reported(2, None, Some(7));
    assert_eq!(none, Some(0));
    assert_eq!(reported(3, Some(first), Some(7)), (None, first));
    ledger.see_pod(&bound("p", "n", "A", 500_000), seconds(0));
    let (one, second) = reported(4, Some(first), Some(7));
    assert_eq!(one, Some(1));
    assert_eq!(reported(5, Some(second), Some(7)).0, None);
    assert_eq!(reported(5, Some(first), Some(7)).0, Some(1), "the reply before was lost");
    ledger.end_pod(&uid("p"), seconds(0));
    assert_eq!(reported(6, Some(second), Some(7)).0, Some(1), "it is draining now");
    let (_, third) = reported(7, None, Some(7));
    assert_eq!(
        reported(8, Some(third), None).0,
        Some(0),
        "a hello names a version of an unknown session"
    );
}

#[test]
fn only_the_newest_session_may_report_for_a_node() {
    let ledger = ledger("A");
    let old = |session| Err(ReportRefusal::OldSession { session });
    assert_eq!(say(&ledger, &report("x", 6, 2, "A")), old(6));
    assert_eq!(say(&ledger, &report("x", 8, 2, "A")), old(8));
    assert_eq!(say(&ledger, &hello("y", 1, "A")).unwrap().session, 8);
    assert_eq!(say(&ledger, &report("x", 7, 3, "A")), old(7));
    assert_eq!(say(&ledger, &report("x", 8, 3, "A")), old(8), "another agent's session");
    assert!(say(&ledger, &report("y", 8, 2, "A")).unwrap().is_taken);
    let again = say(&ledger, &hello("y", 3, "A")).unwrap();
    assert_eq!((again.session, again.is_taken), (9, true), "its reply was lost: a new session");
}

#[test]
fn a_late_hello_of_an_agent_changes_nothing_while_another_one_reports() {
    let ledger = ledger("A");
    assert_eq!(say(&ledger, &hello("y", 5, "A")).unwrap().session, 8);
    assert_eq!(say(&ledger, &hello("z", 1, "A")).unwrap().session, 9);
    let late = Err(ReportRefusal::LateHello { sequence: 4, last: 5 });
    assert_eq!(say(&ledger, &hello("y", 4, "B")), late);
    assert_eq!(node(&ledger, "n").devices()[0].device().id.as_str(), "A");
    assert!(say(&ledger, &report("z", 9, 2, "A")).unwrap().is_taken, "its session stays");
    let repeated = Err(ReportRefusal::LateHello { sequence: 5, last: 5 });
    assert_eq!(say(&ledger, &hello("y", 5, "B")), repeated, "which of both was sent first?");
    let again = say(&ledger, &hello("y", 6, "A")).unwrap();
    assert_eq!((again.session, again.is_taken), (10, true));
    let late = Err(ReportRefusal::LateHello { sequence: 1, last: 2 });
    assert_eq!(say(&ledger, &hello("z", 1, "A")), late);
    for agent in 0..20 {
        say(&ledger, &hello(&format!("agent {agent}"), 5, "A")).unwrap();
    }
    let late = Err(ReportRefusal::LateHello { sequence: 4, last: 5 });
    assert_eq!(say(&ledger, &hello("agent 11", 4, "A")), late);
    assert!(say(&ledger, &hello("agent 10", 4, "A")).is_ok(), "only the last eight are known");
}

#[test]
fn an_agent_that_began_earlier_is_not_believed_while_a_later_one_reports() {
    let ledger = ledger("A");
    let began = 1_767_225_600_000;
    let say = |agent, sequence, device, second| {
        ledger.report("n", &hello(agent, sequence, device), seconds(second))
    };
    assert!(say("y", began, "A", 0).is_ok());
    let earlier = ReportRefusal::EarlierAgent { sequence: began - 1, last: began };
    assert_eq!(say("x", began - 1, "B", 10), Err(earlier), "its hello is late");
    assert_eq!(node(&ledger, "n").devices()[0].device().id.as_str(), "A");
    assert!(say("x", began - 1, "A", 11).is_ok(), "the other one is silent");
    assert!(say("y", began + 1, "A", 12).is_ok(), "it goes on");
    assert!(say("z", 7, "A", 13).is_ok(), "an older version, whose numbers say nothing");
}

#[test]
fn devices_are_free_after_two_lists_of_one_agent() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "n", "A", 500_000), seconds(0));
    ledger.end_pod(&uid("p"), seconds(0));
    say(&ledger, &report("x", 7, 5, "A")).unwrap();
    for (agent, sequence) in [("y", 1), ("x", 6), ("y", 2)] {
        say(&ledger, &hello(agent, sequence, "A")).unwrap();
        assert_eq!(free(&ledger), [500], "{agent} did not hear that the pod has ended");
    }
    say(&ledger, &report("y", 10, 3, "A")).unwrap();
    assert_eq!(free(&ledger), [1000]);
}

#[test]
fn a_hello_needs_a_node_and_an_inventory() {
    let ledger = ledger("A");
    let without = NodeReport { inventory: None, ..hello("y", 1, "A") };
    assert_eq!(say(&ledger, &without), Err(ReportRefusal::NoInventory));
    let unknown = |name: &str| Err(ReportRefusal::UnknownNode { node: name.to_owned() });
    assert_eq!(ledger.report("m", &hello("y", 1, "B"), seconds(0)), unknown("m"));
    ledger.lose_node(&NodeName::new("n"));
    assert_eq!(say(&ledger, &report("x", 7, 2, "A")), unknown("n"));
    see_node(&ledger, "n");
    let old = Err(ReportRefusal::OldSession { session: 7 });
    assert_eq!(say(&ledger, &report("x", 7, 2, "A")), old, "a new node of the same name");
}

#[test]
fn a_node_named_only_by_a_pod_gets_no_pod() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "ghost", "G", 500_000), seconds(0));
    ledger.report("ghost", &hello("g", 1, "G"), seconds(0)).unwrap();
    let query = share_request(1000);
    assert_eq!(ledger.answers(&query, &["ghost"]), [Err(Rejection::NodeGone)]);
    see_node(&ledger, "ghost");
    assert_eq!(ledger.answers(&query, &["ghost"]), [Err(Rejection::NotReporting)]);
    ledger.report("ghost", &hello("g", 2, "G"), seconds(0)).unwrap();
    assert!(ledger.answers(&query, &["ghost"])[0].is_ok());
}

#[test]
fn a_device_moves_only_from_a_node_that_is_deleted_or_silent() {
    let ledger = ledger("A B");
    see_node(&ledger, "m");
    let untracked = Err(ReportRefusal::DeviceOfOtherNode {
        device: DeviceId::new("B").unwrap(),
        owner: NodeName::new("n"),
    });
    let moved = hello("m", 1, "C B");
    assert_eq!(ledger.report("m", &moved, seconds(9)), untracked);
    assert_eq!(node(&ledger, "m").devices().len(), 0, "no part of it was applied");
    assert_eq!(ledger.tick(seconds(11)), [LedgerEvent::NotReporting(NodeName::new("n"))]);
    let receipt = ledger.report("m", &moved, seconds(12)).unwrap();
    assert_eq!(receipt.events, [LedgerEvent::Room(NodeName::new("m"))]);
    assert_eq!(node(&ledger, "m").devices().len(), 2);
    assert_eq!(node(&ledger, "n").devices().len(), 1);
    let back = ledger.report("n", &hello("x", 2, "A B"), seconds(13));
    assert!(matches!(back, Err(ReportRefusal::DeviceOfOtherNode { .. })), "{back:?}");
    ledger.lose_node(&NodeName::new("m"));
    ledger.report("n", &hello("x", 2, "A B"), seconds(14)).unwrap();
    assert_eq!(free(&ledger), [1000, 1000]);
}

#[test]
fn room_appears_with_recovered_health_and_not_with_an_inventory() {
    let ledger = ledger("A");
    let mut sick = report("x", 7, 2, "A");
    for seen in &mut sick.uses {
        seen.health = Health::Unhealthy;
    }
    assert_eq!(say(&ledger, &sick).unwrap().events, []);
    let still = NodeReport { sequence: 3, inventory: Some(inventory("A")), ..sick };
    assert_eq!(say(&ledger, &still).unwrap().events, []);
    let well = report("x", 7, 4, "A");
    assert_eq!(say(&ledger, &well).unwrap().events, [LedgerEvent::Room(NodeName::new("n"))]);
    let running = NodeReport { uses: uses("A", &["stranger"]), ..report("x", 7, 5, "A") };
    assert_eq!(say(&ledger, &running).unwrap().events, []);
    let silence = ledger.tick(seconds(60));
    assert_eq!(silence, [LedgerEvent::NotReporting(NodeName::new("n"))]);
    let spoken = ledger.report("n", &report("x", 7, 6, "A"), seconds(61)).unwrap();
    assert_eq!(spoken.events, [LedgerEvent::Room(NodeName::new("n"))]);
}

#[test]
fn an_unchanged_report_keeps_cached_answers() {
    let ledger = ledger("A");
    let version = || ledger.node_entry(0).version.load(Ordering::Acquire);
    let known = version();
    let mut busier = report("x", 7, 2, "A");
    busier.uses[0].busy_percent = Some(90);
    say(&ledger, &busier).unwrap();
    assert_eq!(version(), known, "how busy a GPU is decides nothing");
    let mut unhealthy = report("x", 7, 3, "A");
    unhealthy.uses[0].health = Health::Unhealthy;
    say(&ledger, &unhealthy).unwrap();
    assert!(version() > known);
    assert_eq!(ledger.answers(&share_request(500_000), &["n"]), [Err(Rejection::Unhealthy)]);
    say(&ledger, &report("x", 7, 4, "A")).unwrap();
    assert!(ledger.answers(&share_request(500_000), &["n"])[0].is_ok(), "and it is back");
    let known = version();
    let mut untracked = report("x", 7, 5, "A");
    untracked.uses[0].used = Some(MemMib::new(900));
    say(&ledger, &untracked).unwrap();
    assert!(version() > known, "untracked memory is no longer free");
}

#[test]
fn a_device_that_the_first_report_leaves_out_gets_no_pod_until_one_names_it() {
    let ledger = ledger("A");
    let mut first = hello("y", 1, "A B");
    first.uses.retain(|seen| seen.id.as_str() == "A");
    let session = say(&ledger, &first).unwrap().session;
    let free = || {
        ledger.nodes()[0].devices().iter().map(|device| device.free().share.millionths()).collect()
    };
    let free = || -> Vec<u64> { free() };
    assert_eq!(free(), [1_000_000, 0]);
    let second = NodeReport { session: Some(session), inventory: None, ..hello("y", 2, "A B") };
    let receipt = say(&ledger, &second).unwrap();
    assert_eq!(receipt.events, [LedgerEvent::Room(NodeName::new("n"))]);
    assert_eq!(free(), [1_000_000, 1_000_000]);
    first.sequence = 3;
    say(&ledger, &first).unwrap();
    assert_eq!(free(), [1_000_000, 1_000_000], "an earlier report has named it");
}

/// An A30 in MIG mode, or an instance of it.
fn of_a30(id: &str, mib: u64, kind: DeviceKind) -> Device {
    Device {
        id: DeviceId::new(id).unwrap(),
        index: DeviceIndex(0),
        model: ModelName::new("NVIDIA A30"),
        total: MemMib::new(mib),
        reserved: MemMib::ZERO,
        kind,
        health: Health::Healthy,
    }
}

#[test]
fn an_impossible_instance_is_reported_and_gets_no_pod() {
    use wire::ids::MigProfile;
    let ledger = ledger("A");
    let instance = |id, profile| {
        let profile = MigProfile::new(profile);
        of_a30(id, 5_952, DeviceKind::MigInstance { parent: DeviceId::new("P").unwrap(), profile })
    };
    let devices = vec![
        of_a30("P", 24_576, DeviceKind::MigParent),
        instance("M-good", "1g.6gb"),
        instance("M-bad", "3g.18gb"),
    ];
    let inventory = NodeInventory::new(devices).unwrap();
    let said = NodeReport { inventory: Some(inventory), ..hello("y", 1, "P M-good M-bad") };
    let events = say(&ledger, &said).unwrap().events;
    let reported: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            LedgerEvent::Impossible { device, fault, .. } => {
                Some((device.as_str(), fault.to_string()))
            }
            _ => None,
        })
        .collect();
    let fault = "a GPU of model `NVIDIA A30` has no MIG profile `3g.18gb`".to_owned();
    assert_eq!(reported, [("M-bad", fault)]);
    for (profile, rejection) in [("1g.6gb", None), ("3g.18gb", Some(Rejection::Unhealthy))] {
        let mut query = share_request(1);
        query.gpu = Some(crate::model::request::GpuRequest::one(
            crate::model::request::Amount::MigInstance(MigProfile::new(profile)),
        ));
        assert_eq!(ledger.answers(&query, &["n"])[0].err(), rejection, "{profile}");
    }
}

#[test]
fn an_instance_that_nvml_lists_and_the_table_lacks_gets_pods_and_is_named_once() {
    use wire::device::{DeviceDetails, MakeableProfile, Slot};
    use wire::ids::MigProfile;
    let ledger = ledger("A");
    let profile = MigProfile::new("3g.18gb");
    let row = MakeableProfile {
        profile: profile.clone(),
        memory: MemMib::new(17_856),
        sm_count: None,
        size: 3,
        starts: vec![1],
    };
    let said = |sequence, instances: &[&str]| {
        let kind = DeviceKind::MigInstance {
            parent: DeviceId::new("P").unwrap(),
            profile: profile.clone(),
        };
        let gpu = DeviceDetails { mig_profiles: vec![row.clone()], ..DeviceDetails::default() };
        let mut details = BTreeMap::from([(DeviceId::new("P").unwrap(), gpu)]);
        let mut devices = vec![of_a30("P", 24_576, DeviceKind::MigParent)];
        for id in instances {
            let slot = Some(Slot { start: 1, size: 3 });
            let own = DeviceDetails { slot, ..DeviceDetails::default() };
            details.insert(DeviceId::new(id).unwrap(), own);
            devices.push(of_a30(id, 17_856, kind.clone()));
        }
        let inventory = Some(NodeInventory::placed(devices, &details).unwrap());
        let names = format!("P {}", instances.join(" "));
        let report = NodeReport { inventory, ..hello("y", sequence, &names) };
        let events = say(&ledger, &report).unwrap().events.into_iter();
        let named = events.filter_map(|event| match event {
            LedgerEvent::NotInTable { spot, .. } => Some(spot.id().unwrap().to_string()),
            LedgerEvent::Impossible { fault, .. } => Some(fault.to_string()),
            _ => None,
        });
        named.collect::<Vec<_>>()
    };
    assert_eq!(said(1, &[]), [""; 0]);
    assert_eq!(said(2, &["M-1"]), ["P/1/3g-18gb"]);
    assert_eq!(said(3, &["M-1"]), [""; 0], "no new one");
    let mut query = share_request(1);
    query.gpu = Some(crate::model::request::GpuRequest::one(
        crate::model::request::Amount::MigInstance(profile.clone()),
    ));
    assert_eq!(ledger.answers(&query, &["n"])[0].as_ref().err(), None);
}

#[test]
fn a_list_that_gives_no_geometry_is_named_once() {
    use crate::hardware::pool::{MigUse, PoolRule, PoolRules};
    use wire::device::{DeviceDetails, MakeableProfile};
    use wire::ids::{MigProfile, PoolName};
    let said = |mig: MigUse, lists: &[Option<u32>]| {
        let ledger = ledger("A");
        let rule = PoolRule { mig, ..PoolRule::default() };
        ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
        let named = lists.iter().zip(1..).map(|(sm_count, sequence)| {
            let row = MakeableProfile {
                profile: MigProfile::new("1g.10gb"),
                memory: MemMib::new(10_000),
                sm_count: *sm_count,
                size: 1,
                starts: vec![0],
            };
            let gpu = DeviceDetails { mig_profiles: vec![row], ..DeviceDetails::default() };
            let details = BTreeMap::from([(DeviceId::new("P").unwrap(), gpu)]);
            let device = of_a30("P", 24_576, DeviceKind::MigParent);
            let device = Device { model: ModelName::new("NVIDIA B300"), ..device };
            let inventory = Some(NodeInventory::placed(vec![device], &details).unwrap());
            let report = NodeReport { inventory, ..hello("y", sequence, "P") };
            let events = say(&ledger, &report).unwrap().events.into_iter();
            let is_it = |event: &LedgerEvent| matches!(event, LedgerEvent::NoGeometry { .. });
            events.filter(is_it).count()
        });
        named.collect::<Vec<_>>()
    };
    let lists = [None, None, Some(10), Some(10), None];
    assert_eq!(said(MigUse::OnDemand, &lists), [1, 0, 0, 0, 1]);
    assert_eq!(said(MigUse::Fixed, &lists), [0; 5]);
}

/// A hello with `count` GPUs of as many models.
fn of_models(sequence: u64, prefix: &str, count: usize) -> NodeReport {
    let names: Vec<String> = (0..count).map(|at| format!("{prefix}-{at}")).collect();
    let known = hello("y", sequence, &names.join(" "));
    let own =
        |device: &Device| Device { model: ModelName::new(device.id.as_str()), ..device.clone() };
    let devices = known.inventory.as_ref().unwrap().devices().iter().map(own);
    NodeReport { inventory: Some(NodeInventory::new(devices.collect()).unwrap()), ..known }
}

#[test]
fn models_that_come_and_go_are_forgotten_and_answers_stay_right() {
    let ledger = ledger("A B");
    see_node(&ledger, "m");
    let mut query = share_request(250_000);
    query.strategy = Strategy::Policy(Policy::Fragmentation);
    let learn = |ledger: &Ledger| {
        let kind = RequestType::new(query.gpu.as_ref(), query.host.cpu);
        ledger.recall(&[EarlierPod {
            uid: uid("p"),
            kind,
            memory: MemMib::ZERO,
            created_unix_seconds: 0,
            share: Share::ZERO,
            stage: Stage::Waits,
        }]);
    };
    learn(&ledger);
    let check = |why: &dyn std::fmt::Debug| {
        let fresh = ["n", "m"].map(|node| ledger.fresh_answer(&query, node));
        assert_eq!(ledger.answers(&query, &["n", "m"]), fresh, "{why:?}");
    };
    for round in 0..100 {
        let flood = of_models(round + 1, &format!("{round}"), MAX_CLASSES_PER_NODE);
        ledger.report("m", &flood, seconds(round)).unwrap();
        check(&round);
        assert_eq!(
            ledger.suited(query.gpu.as_ref().unwrap()).len(),
            ledger.cluster().classes.kept()
        );
        assert!(ledger.cluster().classes.kept() <= 2 * MAX_CLASSES_PER_NODE + 1, "{round}");
        if round % 3 == 0 {
            ledger.tick(seconds(round)); // counts the nodes again
            check(&round);
        }
        ledger.report("n", &report("x", 7, round + 2, "A B"), seconds(round)).unwrap();
    }
    let told = hello("y", 1_000, "C D");
    ledger.report("m", &told, seconds(200)).unwrap();
    ledger.report("m", &of_models(1_001, "E", 64), seconds(200)).unwrap();
    ledger.report("m", &NodeReport { sequence: 1_002, ..told.clone() }, seconds(200)).unwrap();
    ledger.report("n", &report("x", 7, 1_000, "A B"), seconds(200)).unwrap();
    check(&"as before");
    let calm = self::ledger("A B");
    see_node(&calm, "m");
    learn(&calm);
    calm.report("m", &told, seconds(200)).unwrap();
    calm.report("n", &report("x", 7, 1_000, "A B"), seconds(200)).unwrap();
    for ledger in [&ledger, &calm] {
        ledger.tick(seconds(201));
    }
    assert_eq!(ledger.answers(&query, &["n", "m"]), calm.answers(&query, &["n", "m"]));
    assert_eq!(ledger.packing(), calm.packing());
}

#[test]
fn a_cluster_has_a_limited_number_of_models_and_known_ones_are_always_accepted() {
    let ledger = Ledger::new(settings());
    let say = |node: &str, report: &NodeReport| ledger.report(node, report, seconds(0));
    let full = MAX_CLASSES / MAX_CLASSES_PER_NODE;
    let nodes: Vec<String> = (0..=full).map(|at| format!("n{at}")).collect();
    nodes.iter().for_each(|node| see_node(&ledger, node));
    for node in &nodes[..full] {
        say(node, &of_models(1, node, MAX_CLASSES_PER_NODE)).unwrap();
    }
    let refused = say(&nodes[full], &of_models(1, "new", 1));
    assert_eq!(refused, Err(ReportRefusal::TooManyClasses { count: MAX_CLASSES + 1 }));
    assert_eq!(node(&ledger, &nodes[full]).devices().len(), 0);
    // A node whose false inventory filled the table can tell the truth.
    say("n0", &hello("y", 2, "A")).unwrap();
    say("n1", &hello("y", 2, "B")).unwrap();
    say(&nodes[full], &hello("y", 1, "C")).unwrap();
    assert!(ledger.answers(&share_request(500_000), &nodes).iter().all(Result::is_ok));
}

#[test]
fn nothing_is_free_on_a_node_that_a_report_is_waited_for() {
    let ledger = ledger("A B");
    for node in [Some("n"), None] {
        ledger.wait_for_reports(node);
        assert_eq!(free(&ledger), [0, 0], "{node:?}");
        say(&ledger, &report("x", 7, 1, "A B")).unwrap();
        assert_eq!(free(&ledger), [0, 0], "that one is older");
        let sequence = if node.is_some() { 2 } else { 4 };
        let receipt = say(&ledger, &report("x", 7, sequence, "A")).unwrap();
        assert_eq!(receipt.events, [LedgerEvent::Room(NodeName::new("n"))]);
        assert_eq!(free(&ledger), [1000, 0], "it does not name the other GPU");
        say(&ledger, &report("x", 7, sequence + 1, "A B")).unwrap();
        ledger.wait_for_reports(Some("unknown"));
        assert_eq!(free(&ledger), [1000, 1000]);
    }
}
