//! Waves of pods that come, run and end, and what the extender keeps of them.
//!
//! `GPUPACK_CHURN="pods=15000"` measures; without it the pods are few. What the extender itself lists is
//! counted after each wave. Its host memory is printed and never asserted: real figures need a release
//! build in `GPUPACK_E2E_BINARY`.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use serde_json::Value;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario_within};
use crate::watching::Pods;

/// Longest time for one step of a wave.
const LIMIT: Duration = Duration::from_secs(120);

/// Time between two reports of an agent. Room of an ended pod is free with the second.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// Most pods of a wave. They fit on the 128 GPUs.
const WAVE: usize = 300;

#[test]
fn ended_pods_are_not_listed() {
    let pods = pods();
    let limit =
        Duration::from_secs(600) + Duration::from_millis(100) * u32::try_from(pods).unwrap();
    scenario_within("churn", limit, |bed| async move {
        let fleet = Fleet::new().with("churn", 16, (8, A100));
        let stage = bed.stage(Setup { report_every: REPORT_EVERY, ..Setup::of(fleet) }).await;
        stage.figure(&format!("no pods yet: {} KiB", stage.extender.resident_kib()));
        let mut series = None;
        let each = WAVE.min(pods.div_ceil(3));
        for first in (0..pods).step_by(each) {
            let last = pods.min(first + each);
            let started = clock::now();
            wave(&stage, first..last).await;
            stage.figure(&format!(
                "{last} pods came and ended: {} KiB; the last {} in {} ms",
                stage.extender.resident_kib(),
                last - first,
                clock::ms(started.elapsed())
            ));
            let now = series_of(&stage.extender.page("/metrics").await);
            let before = series.get_or_insert_with(|| now.clone());
            let new: Vec<_> = now.difference(before).collect();
            assert!(new.is_empty(), "new in /metrics after {last} pods: {new:?}");
        }
        stage.judge().await;
    });
}

/// The series of a page of metrics. Those of the only namespace are left out: it is accounted for every
/// five seconds, so its series may begin with any wave.
fn series_of(page: &str) -> BTreeSet<String> {
    let series = page.lines().filter(|line| !line.starts_with('#'));
    let series = series.filter_map(|line| line.rsplit_once(' '));
    let series = series.map(|(series, _)| series.to_owned());
    series.filter(|series| !series.contains("namespace=")).collect()
}

fn pods() -> usize {
    let text = clock::variable("GPUPACK_CHURN").unwrap_or_else(|| "pods=300".to_owned());
    let number = text.strip_prefix("pods=").and_then(|number| number.parse().ok());
    let number = number.filter(|number| *number > 0);
    number.unwrap_or_else(|| panic!("GPUPACK_CHURN is `{text}`: not `pods=` with a number above 0"))
}

/// Some pods from their creation to the free room that they leave.
async fn wave(stage: &Stage, numbers: Range<usize>) {
    // 45 different requests, of a quarter of a GPU in the mean.
    let plan = |i: usize| PodPlan::fraction(format!("churn-{i}"), &format!("0.{:02}", 5 + i % 45));
    let plans: Vec<PodPlan> = numbers.map(plan).collect();
    stage.cluster.add_pods(&plans).await;
    stage.watching.until_bound(plans.len(), LIMIT).await;
    // The agents get the reservations with one report, and report processes with the next.
    tokio::time::sleep(3 * REPORT_EVERY).await;
    stage.cluster.delete_all_pods().await;
    let all_gone = |pods: &Pods| pods.values().all(|seen| seen.gone.is_some());
    stage.watching.until("all pods gone", LIMIT, all_gone).await;
    stage.watching.forget_gone();
    stage.until_ledgers_agree().await;
    let waiting: Value = serde_json::from_str(&stage.extender.page("/v1/waiting").await).unwrap();
    assert_eq!(waiting["total"], 0, "{waiting}");
}
