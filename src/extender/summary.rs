//! The figures of the page: how well the cluster is packed, and who waits.

use std::num::NonZeroU32;

use serde::Serialize;

use super::app::App;
use super::inspect::PackingView;
use super::protocol::to_json;
use crate::ledger::reading::Readiness;
use crate::ledger::waiting::WaitingState;
use crate::packing::request::{Amount, GpuRequest};

/// Waiting pods that are named; the most important and oldest ones.
const NAMED: usize = 100;

/// The figures of the page.
#[derive(Debug, Default, Serialize)]
pub struct Figures {
    /// `ready`, `not_listed` or `awaiting_reports`.
    pub readiness: &'static str,
    /// Nodes that hold pods and have not reported, while that is waited for.
    pub awaited_nodes: usize,
    /// How full and fragmented the cluster is.
    pub packing: PackingView,
    /// Free share that no typical request can use, in millionths of a GPU.
    pub fragmented_share_millionths: u64,
    /// Pods that no node fitted last time.
    pub waiting: usize,
    /// How long ago the oldest of them was created.
    pub longest_wait_seconds: u64,
    /// The first 100 of them, the most important and oldest first.
    pub waiting_pods: Vec<WaitingView>,
}

/// A pod that waits.
#[derive(Debug, Serialize)]
pub struct WaitingView {
    /// `namespace/name`.
    pub pod: String,
    /// What it asks for, in words.
    pub asks: String,
    /// The closest obstacle, as kube-scheduler is told it.
    pub reason: &'static str,
    /// Nodes with that obstacle.
    pub nodes: usize,
    /// How long ago it was created.
    pub seconds: u64,
    /// Its priority.
    pub priority: i32,
}

/// The figures as they are now: O(nodes + waiting pods).
pub(super) fn figures(app: &App) -> Figures {
    let (readiness, awaited_nodes) = match app.readiness() {
        Readiness::Ready => ("ready", 0),
        Readiness::NotListed => ("not_listed", 0),
        Readiness::AwaitingReports { nodes } => ("awaiting_reports", nodes),
    };
    let mut waiting = app.waiting.all();
    waiting.retain(|state| state.refused.is_some());
    let now = app.clock.unix_seconds();
    let packing = app.ledger.packing();
    Figures {
        readiness,
        awaited_nodes,
        packing: PackingView::of(&packing),
        fragmented_share_millionths: packing.fragmented_share().millionths(),
        waiting: waiting.len(),
        longest_wait_seconds: waiting.iter().map(|state| age(state, now)).max().unwrap_or(0),
        waiting_pods: waiting.iter().take(NAMED).map(|state| waiting_view(state, now)).collect(),
    }
}

impl Figures {
    /// The figures as JSON without what time alone changes: equal when nothing else happened.
    pub(super) fn ageless(&mut self) -> Vec<u8> {
        let longest = std::mem::take(&mut self.longest_wait_seconds);
        let each = self.waiting_pods.iter_mut().map(|pod| std::mem::take(&mut pod.seconds));
        let ages: Vec<u64> = each.collect();
        let text = to_json(self);
        self.longest_wait_seconds = longest;
        self.waiting_pods.iter_mut().zip(ages).for_each(|(pod, age)| pod.seconds = age);
        text
    }
}

/// How long ago a pod was created.
fn age(state: &WaitingState, now_unix_seconds: u64) -> u64 {
    let created = u64::try_from(state.waiting.created_unix_seconds).unwrap_or(0);
    now_unix_seconds.saturating_sub(created)
}

fn waiting_view(state: &WaitingState, now_unix_seconds: u64) -> WaitingView {
    let waiting = &state.waiting;
    let misfits = state.refused.iter().flatten();
    let closest = misfits.max_by_key(|(misfit, _)| misfit.closeness());
    WaitingView {
        pod: waiting.pod.to_string(),
        asks: waiting.question.gpu.as_ref().map_or_else(|| "no GPU".to_owned(), in_words),
        reason: closest.map_or("no node is asked about", |(misfit, _)| misfit.reason()),
        nodes: closest.map_or(0, |(_, nodes)| *nodes),
        seconds: age(state, now_unix_seconds),
        priority: waiting.priority,
    }
}

/// What a pod asks for, for people.
pub(super) fn in_words(request: &GpuRequest) -> String {
    let amount = match &request.amount {
        Amount::Fraction(share) => format!("{share} GPU"),
        Amount::Memory(memory) => memory.to_string(),
        Amount::FractionAndMemory(share, memory) => format!("{share} GPU with {memory}"),
        Amount::Whole => "1 whole GPU".to_owned(),
        Amount::MigInstance(profile) => format!("MIG {profile}"),
        Amount::SharedSlot => "a replica slot".to_owned(),
    };
    let mut words = match request.count {
        NonZeroU32::MIN => amount,
        count => format!("{count} × {amount}"),
    };
    if !request.models.is_any() {
        words += " on ";
        words += &request.models.names().collect::<Vec<_>>().join(" or ");
    }
    words
}
