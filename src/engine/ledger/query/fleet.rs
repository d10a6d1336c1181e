//! What operators see of the whole fleet: figures by model and pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ledger::nodes::per_node::{FleetGauge, ModelInPool, PerNode};
use crate::ledger::nodes::state::Ledger;

use crate::scoring::device_figures::DeviceFigures;
use crate::waste::compiled_mix::CompiledMix;

impl Ledger {
    /// The figures of the fleet, by model and pool. Only nodes that changed since the last call are
    /// measured: O(changed nodes × typical requests × devices + nodes).
    pub fn fleet(&self) -> BTreeMap<ModelInPool, DeviceFigures> {
        let mut gauge = self.fleet.lock();
        let (generation, mix, classes): (u64, Arc<CompiledMix>, usize) = {
            let cluster = self.cluster();
            (cluster.mix_generation, Arc::clone(&cluster.compiled), cluster.classes.count())
        };
        if gauge.generation != Some(generation) {
            *gauge = FleetGauge { generation: Some(generation), nodes: PerNode::default() };
        }
        gauge.nodes.refresh(&self.node_table(), classes, |node_state| {
            (node_state.pool().clone(), DeviceFigures::of(node_state, &mix))
        });
        let mut fleet: BTreeMap<ModelInPool, DeviceFigures> = BTreeMap::new();
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
    use crate::ledger::ledger_fixture::{bound, ledger, uid};
    use wire::units::{Share, Timestamp};

    #[test]
    fn figures_follow_each_change() {
        let ledger = ledger("A B");
        let of = |fleet: &BTreeMap<ModelInPool, DeviceFigures>| {
            let (kind, figures) = fleet.iter().next().unwrap();
            assert_eq!((fleet.len(), kind.1.as_str()), (1, ""));
            (figures.share.allocated, figures.devices)
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
            assert!(details.usage_samples.on(&node.devices()[0].device().id).is_none());
            seen += 1;
        });
        assert_eq!(seen, 1);
    }
}
