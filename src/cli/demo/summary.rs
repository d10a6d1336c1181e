//! The end of a demo: what became of the pods, how full the fleet is, whether the books are right.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use crate::cli::demo::board::{Board, Figures, Latency, PodCounts};
use crate::cli::demo::view::{decimal, latencies, percent};
use crate::control::shared::app::App;
use crate::hardware::units::{MemMib, Share};
use crate::metrics::labels::Verb;
use crate::server::views::inspect::PackingView;

/// Reasons that a summary for people names.
const NAMED_REASONS: usize = 8;

/// Everything at the end of a demo.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    /// Nodes of the fleet.
    pub(crate) nodes: u64,
    /// Seed of fleet and stream.
    pub(crate) seed: u64,
    /// What became of the pods.
    pub(crate) pods: PodCounts,
    /// Pods that wait or were refused, by reason.
    pub(crate) not_placed: Vec<NotPlaced>,
    /// How full and fragmented the fleet is.
    pub(crate) packing: PackingView,
    /// Whole HTTP calls of filter.
    pub(crate) filter: Latency,
    /// Whole HTTP calls of prioritize.
    pub(crate) prioritize: Latency,
    /// Whole HTTP calls of bind.
    pub(crate) bind: Latency,
    /// Most GPUs ever seen with more booked than they have.
    pub(crate) overbooked_max: usize,
    /// What is wrong with the books; nothing if all is well.
    pub(crate) faults: Vec<String>,
    /// Milliseconds from the start until the base load was placed.
    pub(crate) filled_after_ms: u64,
    /// Milliseconds from the start to the end.
    pub(crate) ended_after_ms: u64,
}

/// Pods that wait or were refused for one reason.
#[derive(Debug, Serialize)]
pub(crate) struct NotPlaced {
    /// The reason.
    pub(crate) reason: String,
    /// How many pods.
    pub(crate) pods: usize,
}

impl Summary {
    /// The summary of a demo as it is now.
    pub(crate) fn of(app: &App, board: &Board, seed: u64, filled_after: Duration) -> Self {
        let figures = board.figures().clone();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let not_placed = figures.by_reason().into_iter();
        Self {
            nodes: u64::try_from(app.ledger.node_states().len()).unwrap_or(u64::MAX),
            seed,
            pods: figures.pods,
            not_placed: not_placed
                .map(|(reason, pods)| NotPlaced { reason: reason.to_owned(), pods })
                .collect(),
            packing: PackingView::of(&app.ledger.packing()),
            filter: figures.latency(Verb::Filter),
            prioritize: figures.latency(Verb::Prioritize),
            bind: figures.latency(Verb::Bind),
            overbooked_max: figures.overbooked_max,
            faults: faults(app, figures.overbooked_max),
            filled_after_ms: millis(filled_after),
            ended_after_ms: millis(app.clock.precise()),
        }
    }

    /// For people.
    pub(crate) fn to_text(&self, figures: &Figures) -> String {
        let (pods, packing) = (self.pods, &self.packing);
        let mut text = format!(
            "\nSummary after {} s ({} nodes, {} GPUs, seed {})\n",
            decimal(self.ended_after_ms, 1_000),
            self.nodes,
            packing.devices,
            self.seed
        );
        let by = match pods.placed_without_http {
            0 => String::new(),
            direct => format!(" ({direct} of them as base load, without HTTP)"),
        };
        let rows = [
            ("pods arrived", pods.arrived.to_string()),
            ("placed", format!("{}{by}", pods.placed)),
            ("still waiting", pods.waiting.to_string()),
            ("refused", format!("{} (faulty requests)", pods.refused)),
            ("ended, gave up", format!("{}, {}", pods.ended, pods.withdrawn)),
            ("bind conflicts", pods.bind_conflicts.to_string()),
            (
                "GPUs",
                format!(
                    "{} occupied, {} empty, at most {} overbooked",
                    packing.occupied,
                    packing.devices - packing.occupied,
                    self.overbooked_max
                ),
            ),
            ("allocation", format!("{} %", percent(packing.allocation_millionths))),
            ("packing efficiency", format!("{} %", percent(packing.efficiency_millionths))),
            ("fragmentation", format!("{} %", percent(packing.fragmentation_millionths))),
        ];
        for (name, value) in rows {
            let _ = writeln!(text, "  {name:<20}{value}");
        }
        if !self.not_placed.is_empty() {
            text.push_str("\n  why pods wait or were refused\n");
        }
        for entry in self.not_placed.iter().take(NAMED_REASONS) {
            let _ = writeln!(text, "  {:>6}  {}", entry.pods, entry.reason);
        }
        if self.not_placed.len() > NAMED_REASONS {
            let _ = writeln!(text, "          and {} more", self.not_placed.len() - NAMED_REASONS);
        }
        text.push_str("\n  whole HTTP calls\n");
        text.push_str(&latencies(figures));
        match self.faults.as_slice() {
            [] => text.push_str("\n  books audited: every sum is right, no GPU is overbooked\n"),
            faults => faults.iter().for_each(|fault| {
                let _ = writeln!(text, "\n  FAULT: {fault}");
            }),
        }
        text
    }
}

/// What is wrong with the books: their sums worked out anew, and beside that the reservations of
/// each device added up here and held against its capacity.
fn faults(app: &App, overbooked_max: usize) -> Vec<String> {
    let mut faults: Vec<String> =
        app.ledger.audit().err().unwrap_or_default().iter().map(ToString::to_string).collect();
    for node in app.ledger.nodes() {
        let placed = || node.reservations().values().flat_map(|held| &held.placement.devices);
        for books in node.devices() {
            let device = books.device();
            let here = || placed().filter(|placed| placed.id == device.id);
            let memory: u64 = here().map(|placed| placed.demand.memory.mib()).sum();
            let share: u64 = here().map(|placed| placed.demand.share.millionths()).sum();
            if MemMib::new(memory) > device.capacity() || share > Share::WHOLE.millionths() {
                faults.push(format!(
                    "{} of node {} holds {memory} MiB and {share} millionths",
                    device.id,
                    node.name()
                ));
            }
        }
    }
    if overbooked_max > 0 {
        faults.push(format!("{overbooked_max} GPUs of one node were overbooked at one time"));
    }
    faults
}
