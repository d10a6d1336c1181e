//! Which pod is moved for another one, and that it has both instances until it runs on the second one alone.

use std::sync::Arc;

use super::*;
use crate::hardware::device::{MigProfile, PoolName};
use crate::hardware::pool::{MigUse, PoolRule, PoolRules};
use crate::hardware::units::{MemMib, Timestamp};
use crate::ledger::change::facts::{MoveFact, PodFact};
use crate::ledger::change::reports::NodeReport;
use crate::ledger::fixture::{
    bound, hello, ledger, node, pod, seconds, see_node, share_query, uid,
};
use crate::model::device_state::{DeviceUse, ProcessUse};
use crate::model::event::LedgerEvent;
use crate::model::request::{Amount, GpuRequest};
use crate::model::reservation::Tenure;
use crate::scoring::plan::on_demand::inventory;

/// The instances of node `m`, which has two A30, each 1g: UUID and first unit. Those of the second GPU are called
/// `MIG-b…`.
type Made<'a> = &'a [(&'a str, u32)];

struct Cluster {
    ledger: Ledger,
    sequence: u64,
    session: Option<u64>,
}

fn request(profile: &str, movable: Movable) -> GpuRequest {
    let amount = Amount::MigInstance(MigProfile::new(profile));
    GpuRequest { movable, ..GpuRequest::one(amount) }
}

fn waiting(profile: &str) -> WaitingState {
    let query = PlacementRequest { gpu: Some(request(profile, Movable::Never)), ..share_query(1) };
    let waiting = WaitingPod {
        pod: pod("w"),
        namespace: "team".to_owned(),
        name: "w".to_owned(),
        query,
        priority: 0,
        may_preempt: false,
        created_unix_seconds: 0,
        controller: None,
        edition: 0,
        group: None,
    };
    WaitingState::without_call(waiting, Timestamp::START)
}

/// A pod that has this instance.
fn fact(pod: &str, (id, start): (&str, u32)) -> PodFact {
    let fact = bound(pod, "m", id, 1_000_000);
    let mut placement = fact.placement.unwrap();
    let gpu = if id.starts_with("MIG-b") { "GPU-b" } else { "GPU-a" };
    let (gpu, profile) = (DeviceId::new(gpu).unwrap(), MigProfile::new("1g.6gb"));
    placement.devices[0].demand.memory = MemMib::new(5_952);
    placement.spots = vec![Some(Spot { gpu, profile, start })];
    PodFact { placement: Some(placement), ..fact }
}

impl Cluster {
    /// A pod on each of the instances: its name is that of the instance.
    fn new(made: Made<'_>, movable: Movable, mig_moves: bool) -> Self {
        let ledger = ledger("A");
        let rule = PoolRule { mig: MigUse::OnDemand, mig_moves, ..PoolRule::default() };
        ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
        see_node(&ledger, "m");
        let mut bed = Self { ledger, sequence: 0, session: None };
        bed.report(made, &[]);
        for (id, start) in made {
            let fact = PodFact {
                request: Some(Arc::new(request("1g.6gb", movable))),
                tenure: Tenure::default(),
                ..fact(id, (id, *start))
            };
            bed.ledger.see_pod(&fact, Timestamp::START);
        }
        bed
    }

    /// A report of these instances, with the pod that uses each of some.
    fn report(&mut self, made: Made<'_>, used: &[(&str, &str)]) {
        let all: Vec<_> = made.iter().map(|(id, start)| (*id, "1g.6gb", *start, 1, true)).collect();
        let ids = ["GPU-a", "GPU-b"].into_iter().chain(made.iter().map(|(id, _)| *id));
        let of = |id: &str| {
            let on = used.iter().filter(|(on, _)| *on == id);
            let processes = on.map(|(_, pod)| ProcessUse { pod: Some(uid(pod)), memory: None });
            let processes = Some(processes.collect());
            DeviceUse { processes, ..DeviceUse::idle(DeviceId::new(id).unwrap()) }
        };
        self.sequence += 1;
        let report = NodeReport {
            inventory: Some(inventory(&all)),
            uses: ids.map(of).collect(),
            session: self.session,
            ..hello("y", self.sequence, "A")
        };
        let receipt = self.ledger.report("m", &report, seconds(self.sequence)).unwrap();
        self.session = Some(receipt.session);
        self.ledger.audit().unwrap();
    }

    fn chosen(&self, profile: &str) -> Option<MakingWay> {
        self.ledger.making_way(&waiting(profile), |_| true)
    }

    fn fits(&self, profile: &str) -> bool {
        self.ledger.best(&waiting(profile).waiting.query).is_some()
    }

    /// What the pod has of each instance, in MiB.
    fn has(&self, pod: &str) -> Vec<String> {
        let node = node(&self.ledger, "m");
        let held = node.devices().iter().filter(|it| it.tenants().contains_key(&uid(pod)));
        held.map(|it| it.device().id.to_string()).collect()
    }
}

#[test]
fn a_pod_makes_way_within_its_node_if_all_allow_it() {
    let made = [("MIG-a1", 0), ("MIG-b1", 0), ("MIG-b2", 1)];
    let bed = Cluster::new(&made, Movable::Restart, true);
    let found = bed.chosen("4g.24gb").unwrap();
    let text = |chosen: &MakingWay| format!("{}>{}", chosen.pod, chosen.spot.gpu);
    assert_eq!((text(&found), found.home.as_str()), ("MIG-a1>GPU-b".to_owned(), "MIG-a1"));
    assert!((2..4).contains(&found.spot.start), "{found:?}");
    assert_eq!(bed.chosen("2g.12gb"), None, "it fits already");
    assert_eq!(bed.chosen("7g.80gb"), None, "no GPU has that");
    let of_others =
        bed.ledger.making_way(&waiting("4g.24gb"), |held| held.pod.uid != found.pod.uid);
    assert_eq!(of_others, None, "two are on the other GPU");

    assert_eq!(Cluster::new(&made, Movable::Never, true).chosen("4g.24gb"), None);
    assert_eq!(Cluster::new(&made, Movable::Restart, false).chosen("4g.24gb"), None);
    let full: Vec<(String, u32)> =
        (0..4).map(|at| (format!("MIG-b{at}"), at)).chain([("MIG-a1".to_owned(), 0)]).collect();
    let full: Vec<(&str, u32)> = full.iter().map(|(id, start)| (id.as_str(), *start)).collect();
    let bed = Cluster::new(&full, Movable::Restart, true);
    assert_eq!(bed.chosen("4g.24gb"), None, "there is no other place for it on its node");
}

#[test]
fn a_pod_has_both_instances_until_it_runs_on_the_second_one_alone() {
    let before = [("MIG-a1", 0), ("MIG-b1", 0), ("MIG-b2", 1)];
    let mut bed = Cluster::new(&before, Movable::Restart, true);
    let chosen = bed.chosen("4g.24gb").unwrap();
    assert!(bed.ledger.promise_other(&chosen));
    assert!(!bed.ledger.promise_other(&chosen), "it goes on");
    assert_eq!(bed.chosen("4g.24gb"), None, "it is on its way");
    assert_eq!(bed.ledger.other_instance(&chosen), Some(OtherInstance::Promised));
    let orders = bed.ledger.instance_orders("m").unwrap();
    assert_eq!((orders.make, orders.remove), (vec![chosen.spot.clone()], vec![]));

    let start = chosen.spot.start;
    let both = [("MIG-a1", 0), ("MIG-b1", 0), ("MIG-b2", 1), ("MIG-b9", start)];
    bed.report(&both, &[("MIG-a1", "MIG-a1")]);
    assert_eq!(bed.ledger.other_instance(&chosen), Some(OtherInstance::Made));
    assert_eq!(bed.has("MIG-a1"), ["MIG-a1", "MIG-b9"]);
    assert_eq!(bed.ledger.instance_orders("m").unwrap().remove, []);

    bed.ledger.moved_out(&chosen.pod.uid);
    for used in [&[("MIG-a1", "MIG-a1"), ("MIG-b9", "MIG-a1")][..], &[("MIG-b9", "MIG-a1")]] {
        bed.report(&both, used);
        assert_eq!(bed.ledger.other_instance(&chosen), Some(OtherInstance::Made), "{used:?}");
        bed.ledger.settle_other(&chosen);
        assert_eq!(bed.has("MIG-a1"), ["MIG-a1", "MIG-b9"]);
    }
    bed.report(&both, &[("MIG-b9", "MIG-a1")]);
    assert_eq!(bed.ledger.other_instance(&chosen), Some(OtherInstance::Taken));
    bed.ledger.settle_other(&chosen);
    assert_eq!(bed.has("MIG-a1"), ["MIG-a1", "MIG-b9"], "until that is written");
    let held = bed.ledger.reservation(&chosen.pod.uid).unwrap();
    let settled = held.settled_placement();
    assert_eq!(settled.spots, [Some(chosen.spot.clone())]);
    bed.ledger.settled(&chosen.pod.uid);
    let held = bed.ledger.reservation(&chosen.pod.uid).unwrap();
    assert_eq!((&held.placement, held.departure), (&settled, Departure::Stays));
    assert_eq!(bed.has("MIG-a1"), ["MIG-b9"]);
    let orders = bed.ledger.instance_orders("m").unwrap();
    assert_eq!((orders.make, orders.remove), (vec![], vec![chosen.home.clone()]));
    assert!(bed.fits("4g.24gb"), "the agent removes the first one before");
    bed.report(&both[1..], &[("MIG-b9", "MIG-a1")]);
    assert!(bed.fits("4g.24gb"));
}

#[test]
fn a_pod_that_nobody_moves_any_more_is_called_home() {
    let before = [("MIG-a1", 0), ("MIG-b1", 0), ("MIG-b2", 1)];
    let mut bed = Cluster::new(&before, Movable::Restart, true);
    let chosen = bed.chosen("4g.24gb").unwrap();
    bed.ledger.promise_other(&chosen);
    bed.report(&[before[0], before[1], before[2], ("MIG-b9", chosen.spot.start)], &[]);
    bed.ledger.call_back(|uid| *uid == chosen.pod.uid);
    assert_eq!(bed.ledger.recalled(None), []);
    bed.ledger.call_back(|_| false);
    assert_eq!(bed.ledger.recalled(None), std::slice::from_ref(&chosen.pod));
    assert!(!bed.ledger.let_stay(&chosen.pod.uid), "it may have started there");
    assert_eq!(bed.has("MIG-a1"), ["MIG-a1", "MIG-b9"]);
    assert!(!bed.ledger.settle_guest(&chosen.pod.uid), "it has both already");
    assert_eq!(bed.has("MIG-a1"), ["MIG-a1", "MIG-b9"]);

    let mut bed = Cluster::new(&before, Movable::Restart, true);
    bed.ledger.promise_other(&chosen);
    bed.ledger.stay_home(&chosen);
    assert_eq!(bed.has("MIG-a1"), ["MIG-a1"]);
    bed.report(&[before[0], before[1], before[2], ("MIG-b9", chosen.spot.start)], &[]);
    let orders = bed.ledger.instance_orders("m").unwrap();
    assert_eq!(orders.remove, [DeviceId::new("MIG-b9").unwrap()], "an order was under way");
}

#[test]
fn a_replica_believes_the_one_that_moves_a_pod() {
    let before = [("MIG-a1", 0), ("MIG-b1", 0)];
    for (is_of_other, is_of_earlier, mig_moves, has) in [
        (true, false, true, "MIG-b2"),
        (false, true, true, "MIG-b2"),
        (false, false, true, "MIG-a1"), // of this process: an edit
        (true, false, false, "MIG-a1"),
    ] {
        let mut bed = Cluster::new(&before, Movable::Restart, mig_moves);
        bed.report(&[before[0], before[1], ("MIG-b2", 1)], &[]);
        let moves = MoveFact { is_of_other, is_of_earlier, ..MoveFact::default() };
        let moved = PodFact { moves, ..fact("MIG-a1", ("MIG-b2", 1)) };
        let events = bed.ledger.see_pod(&moved, seconds(2));
        let is_edit = |it: &LedgerEvent| matches!(it, LedgerEvent::PlacementEdited { .. });
        assert_eq!(events.iter().any(is_edit), has == "MIG-a1", "{events:?}");
        assert_eq!(bed.has("MIG-a1"), [has]);
    }
}

#[test]
fn an_instance_to_which_a_pod_moves_is_kept_for_it_also_after_a_boot() {
    let before = [("MIG-a1", 0), ("MIG-b1", 0), ("MIG-b2", 1)];
    let mut bed = Cluster::new(&before, Movable::Restart, true);
    let chosen = bed.chosen("4g.24gb").unwrap();
    bed.ledger.promise_other(&chosen);
    let start = chosen.spot.start;
    bed.report(&[before[0], before[1], before[2], ("MIG-b9", start)], &[]);
    bed.ledger.moved_out(&chosen.pod.uid);
    bed.report(&[], &[]); // all are gone
    let orders = bed.ledger.instance_orders("m").unwrap();
    assert!(orders.make.contains(&chosen.spot), "no other pod gets its place: {orders:?}");
    let again = [("MIG-a3", 0), ("MIG-b3", 0), ("MIG-b4", 1), ("MIG-b5", start)];
    bed.report(&again, &[]);
    assert_eq!(bed.has("MIG-a1"), ["MIG-a3", "MIG-b5"]);
}
