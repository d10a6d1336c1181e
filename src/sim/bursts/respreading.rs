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
        let chosen = ledger.to_respread(now, |uid, after| self.0.may_respread(uid, after, now));
        let movable = if chosen.is_empty() { BTreeMap::new() } else { ledger.movable_pods() };
        let mut moved = Vec::new();
        for chosen in chosen {
            let (pod, node) = (&chosen.pod, &chosen.node);
            let movable = movable.get(pod.namespace()).copied().unwrap_or_default();
            if !self.0.begin_respread(pod, node, movable, now) {
                continue;
            }
            if ledger.lend(&chosen, now, |_, _| true) {
                self.0.moved(&pod.uid, now);
                moved.push(chosen);
            }
        }
        moved.iter().for_each(|chosen| self.0.end_respread(&chosen.pod.uid));
        moved
    }
}
