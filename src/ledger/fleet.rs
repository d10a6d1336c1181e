//! What operators see of the whole fleet: figures by model and pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::books::{Ledger, locked};
use super::kept::PerNode;
use crate::packing::device::{ModelName, PoolName};
use crate::packing::figures::Figures;
use crate::packing::mix::CompiledMix;
use crate::packing::node::NodeLedger;

/// A model of GPU in a pool.
pub type Kind = (ModelName, PoolName);

/// Keeps the figures of each node until it changes.
#[derive(Debug, Default)]
pub(super) struct FleetGauge {
    /// Generation of the mix that the figures are measured against.
    generation: Option<u64>,
    nodes: PerNode<OfNode>,
}

/// The pool of a node, and the figures of its devices by model.
type OfNode = (PoolName, Vec<(ModelName, Figures)>);

impl Ledger {
    /// The figures of the fleet, by model and pool. Only nodes that changed since the last call are
    /// measured: O(changed nodes × typical requests × devices + nodes).
    pub fn fleet(&self) -> BTreeMap<Kind, Figures> {
        let mut gauge = locked(&self.fleet);
        let (generation, mix, classes): (u64, Arc<CompiledMix>, usize) = {
            let world = self.world();
            (world.mix_generation, Arc::clone(&world.compiled), world.classes.count())
        };
        if gauge.generation != Some(generation) {
            *gauge = FleetGauge { generation: Some(generation), nodes: PerNode::default() };
        }
        let measure = |books: &NodeLedger| (books.pool().clone(), Figures::of(books, &mix));
        gauge.nodes.refresh(&self.slots(), classes, measure);
        let mut fleet: BTreeMap<Kind, Figures> = BTreeMap::new();
        for (pool, figures) in gauge.nodes.all().flatten() {
            for (model, figures) in figures {
                fleet.entry((model.clone(), pool.clone())).or_default().add(figures);
            }
        }
        fleet
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::fixture::{bound, ledger, uid};
    use crate::packing::units::{Share, Timestamp};

    #[test]
    fn figures_follow_each_change() {
        let ledger = ledger("A B");
        let of = |fleet: &BTreeMap<Kind, Figures>| {
            let (kind, figures) = fleet.iter().next().unwrap();
            assert_eq!((fleet.len(), kind.1.as_str()), (1, ""));
            (figures.share.booked, figures.devices)
        };
        assert_eq!(of(&ledger.fleet()), (Share::ZERO, [2, 0, 0, 0, 0, 0]));
        ledger.see_pod(&bound("p", "n", "A", 500_000), Timestamp::START);
        let half = (Share::from_millionths(500_000), [1, 1, 0, 0, 0, 0]);
        assert_eq!(of(&ledger.fleet()), half);
        assert_eq!(of(&ledger.fleet()), half, "kept");
        ledger.forget(&uid("p"));
        ledger.end_pod(&uid("p"), Timestamp::START);
        let mut seen = 0;
        ledger.look_into_each(|node, details| {
            assert!(details.sightings.on(&node.devices()[0].device().id).is_none());
            seen += 1;
        });
        assert_eq!(seen, 1);
    }
}
