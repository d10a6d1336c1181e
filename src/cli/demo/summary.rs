//! The output of the demo: a line of progress, and at the end the fate of the pods, their packing,
//! and whether the ledger is right.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use crate::demo::drive::{DemoFigures, overallocated};
use crate::demo::kubelet::Kubelet;
use crate::simulate::figures::percent;
use control::shared::app::App;
use server::views::state as state_view;
use wire::api::commands::{DemoSummary, NotPlaced, PodCounts};
use wire::api::kind::{ApiVersion, DemoSummaryKind};
use wire::api::state::Packing;
use wire::units::Share;

/// Most reasons in a summary for people.
const NAMED_REASONS: usize = 5;

/// The current summary of a demo.
pub(crate) fn summary(
    app: &App,
    figures: &DemoFigures,
    kubelet: Option<&Kubelet>,
    seed: u64,
) -> DemoSummary {
    let nodes = app.ledger.nodes();
    let now = nodes.iter().map(overallocated).max();
    let overallocated_max = figures.overallocated_max.max(now.unwrap_or(0));
    let mut faults: Vec<String> =
        app.ledger.audit().err().unwrap_or_default().iter().map(ToString::to_string).collect();
    if overallocated_max > 0 {
        faults.push(format!("{overallocated_max} GPUs of one node were overallocated"));
    }
    if let Some(crowded @ 1..) = kubelet.map(Kubelet::crowded) {
        faults.push(format!("{crowded} programs were started where guests still ran"));
    }
    DemoSummary {
        api_version: ApiVersion::default(),
        kind: DemoSummaryKind::default(),
        nodes: nodes.len(),
        seed,
        pods: figures.pods,
        not_placed: not_placed(&figures.reasons),
        packing: state_view::packing(&app.ledger.packing()),
        overallocated_max,
        faults,
        borrowing: kubelet.map(Kubelet::counts),
        filled_after_ms: millis(figures.filled_after),
        ended_after_ms: millis(app.clock.precise()),
    }
}

/// The summary for people.
pub(crate) fn text(summary: &DemoSummary) -> String {
    let DemoSummary { pods, packing, seed, nodes, .. } = summary;
    let Packing { devices: gpus, occupied, .. } = packing;
    let percent_text = |part| format!("{:.1} %", percent(Share::from_millionths(part)));
    let audit = match summary.faults.as_slice() {
        [] => "all sums are correct, no GPU was overallocated".to_owned(),
        faults => format!("FAULT: {}", faults.join("; ")),
    };
    let borrowing = summary.borrowing.iter().flat_map(|counts| {
        let restarts = format!(
            "{} guests moved home, {} to take memory back, {} failed",
            counts.recalls, counts.take_backs, counts.failed
        );
        let bursts =
            format!("{} with their memory, {} refused", counts.bursts, counts.bursts_refused);
        [("restarts", restarts), ("bursts", bursts)]
    });
    let rows = [
        ("fleet", format!("{nodes} nodes, {gpus} GPUs, {occupied} occupied, seed {seed}")),
        ("pods", format!("{} arrived, {}", pods.arrived, outcome(pods))),
        ("allocation", percent_text(packing.allocation_millionths)),
        ("packing efficiency", percent_text(packing.efficiency_millionths)),
        ("fragmentation", percent_text(packing.fragmentation_millionths)),
    ];
    let mut text = String::new();
    for (name, value) in rows.into_iter().chain(borrowing).chain([("audit", audit)]) {
        let _ = writeln!(text, "{name:<20}{value}");
    }
    if !summary.not_placed.is_empty() {
        text.push_str("why pods wait or were rejected\n");
    }
    for NotPlaced { reason, pods } in summary.not_placed.iter().take(NAMED_REASONS) {
        let _ = writeln!(text, "{pods:>6}  {reason}");
    }
    if let Some(more @ 1..) = summary.not_placed.len().checked_sub(NAMED_REASONS) {
        let _ = writeln!(text, "        and {more} more reasons");
    }
    text
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The progress in one line.
pub(crate) fn progress(app: &App, pods: &PodCounts) -> String {
    let seconds = app.clock.precise().as_secs();
    let efficiency = percent(app.ledger.packing().efficiency());
    format!("{seconds} s: pods {}; packing efficiency {efficiency:.1} %", outcome(pods))
}

fn outcome(pods: &PodCounts) -> String {
    let PodCounts { placed, waiting, refused, withdrawn, .. } = pods;
    format!("{placed} placed, {waiting} waiting, {refused} refused, {withdrawn} withdrawn")
}

fn not_placed(reasons: &BTreeMap<String, String>) -> Vec<NotPlaced> {
    let mut counts: BTreeMap<&String, usize> = BTreeMap::new();
    for reason in reasons.values() {
        *counts.entry(reason).or_default() += 1;
    }
    let rows = counts.into_iter().map(|(reason, pods)| NotPlaced { reason: reason.clone(), pods });
    let mut rows: Vec<NotPlaced> = rows.collect();
    rows.sort_by_key(|row| Reverse(row.pods));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_counted_by_pod_and_sorted_by_frequency() {
        let reasons = [("a", "z"), ("b", "y"), ("c", "y"), ("d", "x")];
        let reasons = reasons.map(|(uid, reason)| (uid.to_owned(), reason.to_owned())).into();
        let rows = not_placed(&reasons);
        let rows: Vec<_> = rows.iter().map(|row| (row.reason.as_str(), row.pods)).collect();
        assert_eq!(rows, [("y", 2), ("x", 1), ("z", 1)]);
    }
}
