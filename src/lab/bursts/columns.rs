//! The columns of a pod file that say how pods use more than they request.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use engine::model::request::Isolation;
use serde::Deserialize;
use sim::trace::read::TracePod;

/// Seconds of a year: bursts and the gaps between them are no longer.
const YEAR: u64 = 31_536_000;

/// How a pod uses its GPU that is idle between bursts. Its container may be restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceBursts {
    /// Mean time from a burst to the next one, in seconds.
    pub gap_seconds: u64,
    /// Mean length of a burst that has the GPU alone, in seconds.
    pub seconds: u64,
    /// Memory of a burst, in thousandths of the limit: 1 to 1000.
    pub memory_milli: u64,
}

/// One row, without what else a pod file has.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BurstRow {
    burst_gap_seconds: Option<u64>,
    burst_seconds: Option<u64>,
    burst_memory_milli: Option<u64>,
}

/// The bursts of each of the pods that were read from this text.
///
/// # Errors
/// A value out of its range, or of a pod that cannot have bursts: they need a limit, one GPU and no isolation.
pub fn bursts_of(text: &[u8], pods: &[TracePod]) -> Result<Vec<Option<TraceBursts>>> {
    let rows = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text).into_deserialize();
    let bursts = rows.zip(pods).map(|(row, pod)| {
        row.map_err(of_value)
            .and_then(|row| bursts(&row, pod))
            .with_context(|| format!("bursts of the pod `{}`", pod.name))
    });
    bursts.collect()
}

/// The same of a file.
///
/// # Errors
/// What is wrong with it.
pub fn read_bursts(path: &Path, pods: &[TracePod]) -> Result<Vec<Option<TraceBursts>>> {
    let bursts = bursts_of(&std::fs::read(path)?, pods);
    bursts.with_context(|| format!("--pods: `{}`", path.display()))
}

/// The error of a value, without its line: `csv` does not count lines as editors do.
fn of_value(error: csv::Error) -> anyhow::Error {
    match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => anyhow!("{err}"),
        _ => error.into(),
    }
}

fn bursts(row: &BurstRow, pod: &TracePod) -> Result<Option<TraceBursts>> {
    let (gap_seconds, seconds) = match (row.burst_gap_seconds, row.burst_seconds) {
        (Some(gap), Some(length)) => (gap, length),
        (None, None) if row.burst_memory_milli.is_none() => return Ok(None),
        _ => bail!("`burst_gap_seconds` and `burst_seconds`, or neither"),
    };
    let memory_milli = row.burst_memory_milli.unwrap_or(1000);
    let more = pod.more.as_deref();
    ensure!(pod.num_gpu == 1, "they need `num_gpu` 1");
    ensure!(more.is_some_and(|more| more.limit.is_some()), "they need a limit of the pod");
    let has_isolation = more.is_some_and(|more| more.isolation != Isolation::None);
    ensure!(!has_isolation, "they need a pod without isolation");
    let are_times = [gap_seconds, seconds].iter().all(|seconds| (1..=YEAR).contains(seconds));
    ensure!(are_times, "expected seconds from 1 to {YEAR}");
    ensure!((1..=1000).contains(&memory_milli), "expected `burst_memory_milli` from 1 to 1000");
    Ok(Some(TraceBursts { gap_seconds, seconds, memory_milli }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sim::trace::read::parse_pods;

    const HEAD: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib,limit_milli,\
        limit_gpu_memory_mib,isolation,burst_gap_seconds,burst_seconds,burst_memory_milli\n";

    fn of(rows: &[&str]) -> Result<Vec<Option<TraceBursts>>> {
        let text = format!("{HEAD}{}\n", rows.join("\n"));
        bursts_of(text.as_bytes(), &parse_pods("p", text.as_bytes()).unwrap())
    }

    #[test]
    fn pods_with_a_limit_may_have_bursts() {
        let rows =
            ["a,1,1,1,250,,500,,,300,40,800", "b,1,1,1,,4000,,9000,,1,1,", "c,1,1,1,5,,,,,,,"];
        let some = |gap_seconds, seconds, memory_milli| {
            Some(TraceBursts { gap_seconds, seconds, memory_milli })
        };
        assert_eq!(of(&rows).unwrap(), [some(300, 40, 800), some(1, 1, 1000), None]);
        for (row, expected) in [
            ("p,1,1,1,250,,,,,9,9,", "they need a limit of the pod"),
            ("p,1,1,2,1000,,,,,9,9,", "they need `num_gpu` 1"),
            ("p,1,1,1,250,,500,,memory,9,9,", "they need a pod without isolation"),
            ("p,1,1,1,250,,500,,,9,,", "`burst_gap_seconds` and `burst_seconds`, or neither"),
            ("p,1,1,1,250,,500,,,,9,", "`burst_gap_seconds` and `burst_seconds`, or neither"),
            ("p,1,1,1,250,,500,,,,,9", "`burst_gap_seconds` and `burst_seconds`, or neither"),
            ("p,1,1,1,250,,500,,,0,9,", "expected seconds from 1 to 31536000"),
            ("p,1,1,1,250,,500,,,9,9,1001", "expected `burst_memory_milli` from 1 to 1000"),
            ("p,1,1,1,250,,500,,,9,often,", "invalid digit"),
        ] {
            let refused = format!("{:#}", of(&[row]).unwrap_err());
            assert!(refused.starts_with("bursts of the pod `p`: "), "{refused}");
            assert!(
                refused.contains(expected) && !refused.contains("line"),
                "{refused}\ninstead of\n{expected}"
            );
        }
    }
}
