//! A pod that the version before moved has both instances until it runs on one alone.

use std::sync::Arc;

use super::*;
use crate::hardware::pool::{MigUse, PoolRule, PoolRules};
use crate::hardware::spots::Spot;
use crate::ledger::change::facts::{MoveFact, PodFact};
use crate::ledger::change::reports::NodeReport;
use crate::ledger::ledger_fixture::{bound, hello, ledger, node, pod, seconds, see_node, uid};
use crate::model::event::LedgerEvent;
use crate::model::request::{Amount, GpuRequest, Movable};
use crate::model::reservation::Tenure;
use crate::scoring::plan::on_demand::inventory;
use wire::ids::{DeviceId, MigProfile, PoolName};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{MemMib, Timestamp};

/// The instances of node `m`, which has two A30, each 1g: UUID and first unit. Those of the second GPU are called
/// `MIG-b…`.
type Made<'a> = &'a [(&'a str, u32)];

struct Cluster {
    ledger: Ledger,
    sequence: u64,
    session: Option<u64>,
}

fn request() -> GpuRequest {
    let amount = Amount::MigInstance(MigProfile::new("1g.6gb"));
    GpuRequest { movable: Movable::Restart, ..GpuRequest::one(amount) }
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
    fn new(made: Made<'_>) -> Self {
        let ledger = ledger("A");
        let rule = PoolRule { mig: MigUse::OnDemand, ..PoolRule::default() };
        ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
        see_node(&ledger, "m");
        let mut bed = Self { ledger, sequence: 0, session: None };
        bed.report(made, &[]);
        for (id, start) in made {
            let fact = PodFact {
                request: Some(Arc::new(request())),
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

    /// The version before was to move the pod of `MIG-a1` to this instance.
    fn moves(&self, to: &str, start: u32) {
        let spot = Spot {
            gpu: DeviceId::new("GPU-b").unwrap(),
            profile: MigProfile::new("1g.6gb"),
            start,
        };
        let on = DeviceId::new(to).unwrap();
        self.ledger.change_guest(&uid("MIG-a1"), |node| node.move_out(&uid("MIG-a1"), on, spot));
    }

    /// What the pod has of each instance, in MiB.
    fn has(&self, pod: &str) -> Vec<String> {
        let node = node(&self.ledger, "m");
        let held = node.devices().iter().filter(|it| it.tenants().contains_key(&uid(pod)));
        held.map(|it| it.device().id.to_string()).collect()
    }
}

#[test]
fn a_pod_that_nobody_moves_any_more_is_called_home() {
    let before = [("MIG-a1", 0), ("MIG-b1", 0), ("MIG-b2", 1), ("MIG-b9", 2)];
    let mut bed = Cluster::new(&before);
    bed.moves("MIG-b9", 2);
    bed.report(&before, &[]);
    assert_eq!(bed.ledger.recalled(None), []);
    bed.ledger.call_back();
    assert_eq!(bed.ledger.recalled(None), [pod("MIG-a1")]);
    assert!(!bed.ledger.let_stay(&uid("MIG-a1")), "it may have started there");
    assert_eq!(bed.has("MIG-a1"), ["MIG-a1", "MIG-b9"]);
    assert!(!bed.ledger.settle_guest(&uid("MIG-a1")), "it has both already");
}

#[test]
fn a_replica_believes_the_one_that_moves_a_pod() {
    let before = [("MIG-a1", 0), ("MIG-b1", 0)];
    for (is_of_other, is_of_earlier, has) in [
        (true, false, "MIG-b2"),
        (false, true, "MIG-b2"),
        (false, false, "MIG-a1"), // of this process: an edit
    ] {
        let mut bed = Cluster::new(&before);
        bed.report(&[before[0], before[1], ("MIG-b2", 1)], &[]);
        let moves = MoveFact { is_of_other, is_of_earlier, ..MoveFact::default() };
        let moved = PodFact { moves, ..fact("MIG-a1", ("MIG-b2", 1)) };
        let events = bed.ledger.see_pod(&moved, seconds(2));
        let is_edit = |it: &LedgerEvent| matches!(it, LedgerEvent::PlacementEdited { .. });
        assert_eq!(events.iter().any(is_edit), has == "MIG-a1", "{events:?}");
        assert_eq!(bed.has("MIG-a1"), [has]);
    }
}
