//! Pods of the scenario of bursts that use no GPU are restarted where they may use more, as the extender does.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::control::moving::Moving;
use crate::hardware::device::PodUid;
use crate::hardware::units::{MemMib, Share, Timestamp};
use crate::ledger::change::reports::NodeReport;
use crate::ledger::change::spread::Respread;
use crate::ledger::nodes::state::Ledger;
use crate::model::isolation::{DriverLimits, Rules};
use crate::usage::node_details::DetailsReport;

/// The budgets of such restarts.
#[derive(Default)]
pub(crate) struct Respreading(Moving);

impl Respreading {
    /// Notes what a report says of use: from when on a pod has used no GPU.
    pub(crate) fn note(ledger: &Ledger, report: &NodeReport, now: Timestamp) {
        let seen = DetailsReport {
            inventory: None,
            conditions: BTreeMap::new(),
            tenants: BTreeMap::new(),
            mig_failures: Vec::new(),
            wholes: None,
            limits: None,
        };
        let rules = Rules {
            tolerance: MemMib::ZERO,
            limits: DriverLimits::Unused,
            grace: Duration::ZERO,
            max_limit: Share::WHOLE,
        };
        ledger.note(&report.agent, (&report.uses, seen), rules, now);
    }

    /// Notes that a pod is moved home.
    pub(crate) fn recalled(&self, pod: &PodUid, now: Timestamp) {
        self.0.moved(pod, now);
    }

    /// The pods that are restarted now; the ledger has them where they start.
    pub(crate) fn step(&self, ledger: &Ledger, now: Timestamp) -> Vec<Respread> {
        let mut moved = self.0.begin_respreads(ledger, now);
        moved.iter().for_each(|chosen| self.0.end_respread(&chosen.pod.uid));
        moved.retain(|chosen| ledger.lend(chosen, now));
        moved.iter().for_each(|chosen| self.0.moved(&chosen.pod.uid, now));
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::pool::{Borrow, PoolRule, PoolRules};
    use crate::model::reservation::PodRef;
    use crate::sim::bursts::world::World;
    use crate::sim::run::cluster::{add_node, pool_of, untimed_ledger};
    use crate::sim::run::timeline::{Pace, timeline};
    use crate::sim::trace::churn::NodeOrder;
    use crate::sim::trace::read::{parse_nodes, parse_pods};

    #[test]
    fn a_pod_is_moved_though_another_one_that_may_not_be_would_gain_as_much() {
        let nodes =
            "name,cpu_milli,memory_mib,gpu,model,gpu_memory_mib\nn,9000,9000,2,H100,10000\n";
        let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,limit_milli,creation_time,deletion_time,\
            burst_gap_seconds,burst_seconds\ntrain,1,1,1,1000,,0,9,,\na,1,1,1,500,1000,1,9,1,1\n";
        let nodes = parse_nodes("n", nodes.as_bytes()).unwrap();
        let pods = parse_pods("p", pods.as_bytes()).unwrap();
        let pace = Pace::Compress(1.0);
        let world = World::traced(&timeline(nodes, pods, pace, NodeOrder::AsIs, 0).unwrap());
        let respread_after = Some(Duration::from_secs(10));
        let rule = PoolRule { borrow: Borrow::Compute, respread_after, ..PoolRule::default() };
        let ledger = untimed_ledger();
        ledger.share_by(PoolRules::new([(pool_of(rule), rule)]));
        let (mut report, _) = add_node(&ledger, 0, &world.nodes[0], rule).unwrap();
        ledger.set_listed(Timestamp::START);
        let at = |seconds: u64| Timestamp::from_millis(1_000 * seconds);
        let mut lists = |seconds| {
            report.sequence += 1;
            ledger.report(&report.agent, &report, at(seconds)).unwrap();
            Respreading::note(&ledger, &report, at(seconds));
        };
        let named = |at: usize| PodRef { uid: PodUid::new(at.to_string()), name: "a/p".into() };
        let of_kind =
            |bursts| world.comers.iter().find(|it| it.kind.has_bursts() == bursts).unwrap();
        let (train, notebook) = (of_kind(false), of_kind(true));
        for (number, comer) in [train, notebook, notebook].into_iter().enumerate() {
            let node = ledger.best(&comer.query).unwrap().0;
            ledger.reserve(&named(number), node.as_str(), &comer.query, at(0)).unwrap();
            ledger.confirm(&named(number).uid);
        }
        ledger.end_pod(&named(0).uid, at(1));
        [2, 3, 20].into_iter().for_each(&mut lists);
        let only = |number: usize| {
            move |uid: &PodUid, _: Duration| *uid == PodUid::new(number.to_string())
        };
        for number in [1, 2] {
            let chosen = ledger.to_respread(at(20), only(number));
            assert_eq!(chosen.len(), 1, "{number}");
            assert!(ledger.lend(&chosen[0], at(20)), "{number}");
            assert!(!ledger.lend(&chosen[0], at(20)), "it is on its way");
            ledger.stay_home(&chosen[0].pod.uid, |guest| guest.on == chosen[0].to);
        }
    }
}
