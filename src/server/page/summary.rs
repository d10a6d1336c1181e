//! The figures of the page: how well the cluster is packed, and which pods wait.

use serde::Serialize;

use crate::control::shared::app::App;
use crate::ledger::query::reading::Readiness;
use crate::protocol::messages::to_json;
use crate::server::views::inspect::PackingView;
use crate::server::views::waiting;
use crate::server::views::waiting::{WaitingView, since};

/// Waiting pods in the list: those with the highest priority, then the oldest.
const NAMED: usize = 100;

/// The figures of the page.
#[derive(Debug, Default, Serialize)]
pub struct Figures {
    /// `ready`, `not_listed` or `awaiting_reports`.
    pub readiness: &'static str,
    /// Nodes that hold pods and have not reported, while the extender waits for them.
    pub awaited_nodes: usize,
    /// How full and fragmented the cluster is.
    pub packing: PackingView,
    /// Free share that no typical request can use, in millionths of a GPU.
    pub fragmented_share_millionths: u64,
    /// Pods that fitted on no node at the last try.
    pub waiting: usize,
    /// How long ago the oldest of them was created.
    pub longest_wait_seconds: u64,
    /// The first 100 of them, by priority, then the oldest first.
    pub waiting_pods: Vec<WaitingView>,
}

/// The current figures: O(nodes + waiting pods).
pub(crate) fn figures(app: &App) -> Figures {
    let (readiness, awaited_nodes) = match app.readiness() {
        Readiness::Ready => ("ready", 0),
        Readiness::NotListed => ("not_listed", 0),
        Readiness::AwaitingReports { nodes } => ("awaiting_reports", nodes),
    };
    let (mut waiting, mut longest) = (0, 0);
    let now = app.clock.unix_seconds();
    app.waiting.look_at_each(|state| {
        if state.refused.is_some() {
            waiting += 1;
            longest = since(state.waiting.created_unix_seconds, now).max(longest);
        }
    });
    let packing = app.ledger.packing();
    Figures {
        readiness,
        awaited_nodes,
        packing: PackingView::of(&packing),
        fragmented_share_millionths: packing.fragmented_share().millionths(),
        waiting,
        longest_wait_seconds: longest,
        waiting_pods: waiting::refused(app, NAMED),
    }
}

impl Figures {
    /// The figures as JSON without ages: equal if nothing but time has changed.
    pub(crate) fn ageless(&mut self) -> Vec<u8> {
        let longest = std::mem::take(&mut self.longest_wait_seconds);
        let each = self.waiting_pods.iter_mut().map(|pod| std::mem::take(&mut pod.seconds));
        let ages: Vec<u64> = each.collect();
        let text = to_json(self);
        self.longest_wait_seconds = longest;
        self.waiting_pods.iter_mut().zip(ages).for_each(|(pod, age)| pod.seconds = age);
        text
    }
}
