//! What pods used before this process started, read from a Prometheus that scrapes the agents.
//!
//! It is queried once after the start, in the background, for all placed pods by UID: an earlier
//! pod of the same name does not count. If there is no answer, only this history is missing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::history::series::{Moments, Prometheus, SeriesValues, read};
use control::shared::app::App;
use engine::ledger::query::reading::Readiness;
use engine::usage::history::{History, Used};
use wire::ids::{MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE, PodUid};
use wire::units::{MemMib, Share};

/// Length of one stretch of history: half of the time after which a pod is idle.
const EVERY: Duration = Duration::from_secs(300);

/// How far back it reads.
const LOOK_BACK: Duration = Duration::from_secs(24 * 3_600);

/// Values per query. Each takes about 30 bytes of the answer.
const VALUES_AT_ONCE: usize = 150_000;

/// Pods per query: the query contains their UIDs.
const PODS_AT_ONCE: usize = 500;

/// Pause after each pair of queries, so that Prometheus can do its own work.
const PAUSE: Duration = Duration::from_millis(100);

/// Pauses before each try.
const TRIES: [Duration; 4] =
    [Duration::ZERO, Duration::from_secs(15), Duration::from_secs(60), Duration::from_secs(300)];

/// Pause between two checks whether the extender is ready.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Sums over all answers.
#[derive(Debug, Default)]
struct Tally {
    known: usize,
    absurd: usize,
}

/// Queries Prometheus once the ledger is complete, and ends.
pub(crate) async fn recalling(app: &Arc<App>) {
    let advice = &app.config.advice;
    let Some(address) = &advice.series_url else { return };
    let started = app.clock.unix_seconds().saturating_sub(app.clock.now().millis() / 1_000);
    while app.readiness() != Readiness::Ready {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let stretches = LOOK_BACK.as_secs() / EVERY.as_secs();
    let count = usize::try_from(stretches).unwrap_or(1).max(1);
    let at = Moments { last: started, every: EVERY.as_secs(), count };
    let store = Prometheus::new(address);
    let mut pods = app.ledger.pods_without_history();
    pods.retain(is_askable);
    let (all, mut tally) = (pods.len(), Tally::default());
    for (nth, pause) in TRIES.into_iter().enumerate() {
        tokio::time::sleep(pause).await;
        match query_all(app, &store, &at, &mut pods, &mut tally).await {
            Ok(()) => return tell(address, all, &tally),
            Err(error) if nth + 1 < TRIES.len() => {
                tracing::warn!(%address, %error, "Prometheus does not answer what pods used before the start; gpupack queries it again");
            }
            Err(error) => {
                tracing::error!(%address, %error, pods = pods.len(), "Prometheus did not answer what pods used before the start: advice on them begins with the start; check `advice.prometheus_url` and restart");
            }
        }
    }
}

/// Logs the outcome.
fn tell(address: &str, all: usize, Tally { known, absurd }: &Tally) {
    tracing::info!(%address, pods = all, known, "read from Prometheus what pods used before the start");
    if *known == 0 && all > 0 {
        tracing::warn!(%address, "Prometheus knows none of the pods: it must scrape the agents (`--metrics-listen`) of this version, whose series name the UID");
    }
    if *absurd > 0 {
        tracing::warn!(%address, absurd, "values of Prometheus are ignored: no number, out of range, or of a pod that was not queried; does something else write `gpupack_tenant_…` there?");
    }
}

/// Queries the history of `pods`, and removes the answered ones from the list.
async fn query_all(
    app: &Arc<App>,
    store: &Prometheus,
    at: &Moments,
    pods: &mut Vec<PodUid>,
    tally: &mut Tally,
) -> Result<(), String> {
    let at_once = (VALUES_AT_ONCE / at.count).clamp(1, PODS_AT_ONCE);
    while !pods.is_empty() {
        let some = pods[..pods.len().min(at_once)].to_vec();
        let [memory, load] = expressions(&some);
        let memory = store.ask(&memory, at).await?;
        let load = store.ask(&load, at).await?;
        let (app, at, count) = (Arc::clone(app), *at, some.len());
        let taken = tokio::task::spawn_blocking(move || take(&app, &some, &at, &memory, &load));
        let taken = taken.await.map_err(|error| format!("its answer caused a bug: {error}"))??;
        tally.known += taken.known;
        tally.absurd += taken.absurd;
        pods.drain(..count);
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// Whether a UID can be used in an expression without quoting.
fn is_askable(uid: &PodUid) -> bool {
    let uid = uid.as_str();
    (1..=64).contains(&uid.len())
        && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Highest use of memory in each stretch, and mean load. If two jobs scrape one agent, a series
/// counts once.
fn expressions(pods: &[PodUid]) -> [String; 2] {
    let uids: Vec<&str> = pods.iter().map(PodUid::as_str).collect();
    let (uids, every) = (uids.join("|"), EVERY.as_secs());
    [
        format!(
            "sum by (uid) (max by (uid, UUID) (max_over_time(gpupack_tenant_memory_bytes{{kind=\"used\",uid=~\"{uids}\"}}[{every}s])))"
        ),
        format!(
            "avg by (uid) (max by (uid, UUID) (avg_over_time(gpupack_tenant_busy_ratio{{uid=~\"{uids}\"}}[{every}s])))"
        ),
    ]
}

/// Takes in both answers about some pods.
fn take(
    app: &App,
    pods: &[PodUid],
    at: &Moments,
    memory: &[u8],
    load: &[u8],
) -> Result<Tally, String> {
    let wanted: BTreeSet<&str> = pods.iter().map(PodUid::as_str).collect();
    let (memory, load) = (read(memory, at, &wanted)?, read(load, at, &wanted)?);
    let mut tally = Tally { known: 0, absurd: memory.absurd + load.absurd };
    for uid in pods {
        let Some(used) = memory.series.get(uid.as_str()) else { continue };
        let stretches = used.iter().enumerate().map(|(position, bytes)| {
            let memory = within(bytes.as_ref(), mib, &mut tally)?;
            let load = value(&load, uid, position);
            Some(Used { memory, load: within(load, part, &mut tally) })
        });
        let history = History { every: EVERY, stretches: stretches.collect() };
        if history.stretches.iter().any(Option::is_some) && app.ledger.recall_use(uid, &history) {
            tally.known += 1;
        }
    }
    Ok(tally)
}

fn value<'a>(values: &'a SeriesValues, uid: &PodUid, position: usize) -> Option<&'a f64> {
    values.series.get(uid.as_str())?.get(position)?.as_ref()
}

/// A value as an amount. A value that is no possible amount counts as absurd.
fn within<T>(value: Option<&f64>, amount: fn(f64) -> Option<T>, tally: &mut Tally) -> Option<T> {
    let value = *value?;
    let found = amount(value);
    tally.absurd += usize::from(found.is_none());
    found
}

/// Bytes as memory, rounded up; `None` above what a node can have.
fn mib(bytes: f64) -> Option<MemMib> {
    let most = MAX_DEVICE_MEMORY.mib().saturating_mul(u64::try_from(MAX_DEVICES_PER_NODE).ok()?);
    whole(bytes / 1_048_576.0).filter(|mib| *mib <= most).map(MemMib::new)
}

/// A part of the time, at most all of it.
fn part(ratio: f64) -> Option<Share> {
    let millionths = whole(ratio * 1e6)?;
    (millionths <= Share::WHOLE.millionths() + 1)
        .then(|| Share::from_millionths(millionths.min(Share::WHOLE.millionths())))
}

/// A float of at least zero, rounded up.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in range")]
fn whole(value: f64) -> Option<u64> {
    let value = value.ceil();
    (0.0..9e15).contains(&value).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_uids_are_queried() {
        for (uid, is_plain) in [
            ("0b5a9c4e-7f0e-4f43-9d24-1d9c3a0c5b11", true),
            ("4f1e2d3c4b5a69788796a5b4c3d2e1f0", true), // of a static pod
            ("a\"}) or vector(1", false),
            ("a|.*", false),
            ("", false),
        ] {
            assert_eq!(is_askable(&PodUid::new(uid)), is_plain, "{uid}");
        }
        assert!(!is_askable(&PodUid::new("a".repeat(65))));
        let [memory, load] = expressions(&[PodUid::new("a"), PodUid::new("b")]);
        assert!(memory.contains(r#"kind="used",uid=~"a|b"}[300s]"#), "{memory}");
        assert!(load.contains(r#"gpupack_tenant_busy_ratio{uid=~"a|b"}[300s]"#), "{load}");
    }

    #[test]
    fn impossible_amounts_are_none() {
        assert_eq!(mib(1_048_577.0), Some(MemMib::new(2)));
        assert_eq!((mib(1e300), mib(f64::MAX), mib(9e18)), (None, None, None));
        assert_eq!(part(0.25), Some(Share::from_millionths(250_000)));
        assert_eq!(part(1.000_000_1), Some(Share::WHOLE), "a mean of ones is not exactly one");
        assert_eq!((part(1.1), part(1e9)), (None, None));
    }
}
