//! `gpupack advise`: which pods hold GPUs without need, and what request would have been enough.

use std::fmt::Write as _;

use clap::Args;

use crate::base::connect;
use crate::base::connect::ServerArgs;
use crate::base::failure::Failure;
use crate::base::plain::{LookArgs, Output, json, print, span, table, wrapped};
use wire::api::advice::{Advice, BurstAdvice, PodAdvice, PoolAdvice};
use wire::ids::is_name;

/// Most rows of the table.
const ROWS: usize = 30;

/// Flags of `gpupack advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    /// Only pods of this namespace
    #[arg(short, long, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// Pods of all namespaces, as without --namespace
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Form of the output.
    #[command(flatten)]
    look: LookArgs,
    /// Address of the extender.
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs `gpupack advise`.
///
/// # Errors
/// No extender answers.
pub fn run(args: &AdviseArgs) -> Result<(), Failure> {
    connect::run(async {
        let mut path = "/v1/advise".to_owned();
        if let Some(namespace) = &args.namespace {
            if !is_name(namespace) {
                return Err(Failure::usage(format!("`{namespace}` is not a valid namespace name")));
            }
            let _ = write!(path, "?namespace={namespace}");
        }
        let server = args.server.connect().await?;
        let advice: Advice = server.ask(&path).await?;
        print(&match args.look.output {
            Output::Json => json(&advice)?,
            Output::Table => text(&advice),
        });
        Ok(())
    })
}

/// The sums, a row per pod, and the possible slots of each pool.
fn text(advice: &Advice) -> String {
    let mut text = String::new();
    if advice.watched_pods == 0 {
        let long = span(advice.watched_for_seconds);
        let _ = writeln!(text, "No pod has been watched for {long} yet: try again then.");
        return text;
    }
    let _ = writeln!(
        text,
        "{} of {} pods are idle (for {} and more); {} of memory and {} GPUs\ncould be given back.\n",
        advice.idle_pods,
        advice.watched_pods,
        span(advice.idle_after_seconds),
        gib(advice.reclaimable.memory_mib),
        gpus(advice.reclaimable.share_millionths)
    );
    let titles = ["POD", "HOLDS", "PEAK", "P95", "LOAD", "IDLE", "ENOUGH", "COULD-FREE"];
    let rows: Vec<_> = advice.pods.iter().take(ROWS).map(row_of).collect();
    text += &table(&titles, &[1, 2, 3, 4, 5, 6, 7], rows);
    if advice.pods.is_empty() {
        text += "(none)\n";
    }
    if let Some(more) = advice.pods.len().checked_sub(ROWS).filter(|more| *more > 0) {
        let _ = writeln!(text, "{more} more: see --output json");
    }
    if !advice.bursting.is_empty() {
        text += "\nPods that use memory above their request:\n\n";
        let titles = ["POD", "HOLDS", "LIMIT", "PEAK", "ADVICE"];
        let rows = advice.bursting.iter().take(ROWS).map(row_of_bursting).collect();
        text += &table(&titles, &[1, 2, 3], rows);
    }
    for pool in advice.pools.iter().filter(|pool| lends_in_vain(pool)) {
        let sentence = format!(
            "Pool `{}` lends {}, and no pod of it borrows: none has a limit and \
             `gpupack.dev/movable: restart`.",
            pool.pool, pool.borrow
        );
        text.push('\n');
        text += &wrapped("", &sentence);
    }
    if !advice.pools.is_empty() {
        text += "\nSlots per GPU that would have fit 95 % of a pool's pods:\n\n";
        let titles = ["POOL", "PODS", "SLOTS", "BY-MEMORY", "BY-LOAD", "LIMITED-BY"];
        let rows = advice.pools.iter().map(slots_of).collect();
        text += &table(&titles, &[1, 2, 3, 4], rows);
    }
    text
}

/// What a pod holds, uses and needs, as a row.
fn row_of(pod: &PodAdvice) -> Vec<String> {
    vec![
        pod.pod.clone(),
        gib(pod.allocated.memory_mib),
        gib(pod.peak_mib),
        percent(pod.p95_use_millionths),
        pod.mean_load_millionths.map_or("?".to_owned(), percent),
        if pod.idle { span(pod.idle_seconds) } else { "-".to_owned() },
        if pod.idle { "nothing".to_owned() } else { format!("{}Mi", pod.sufficient_mib) },
        gib(pod.reclaimable_mib),
    ]
}

/// A pod that uses more than it requests, as a row.
fn row_of_bursting(pod: &BurstAdvice) -> Vec<String> {
    let advice = match pod.at_limit {
        true => "request more: it reaches its limit",
        false => "-",
    };
    let [holds, limit, peak] = [pod.allocated_mib, pod.limit_mib, pod.peak_mib].map(gib);
    vec![pod.pod.clone(), holds, limit, peak, advice.to_owned()]
}

/// Whether a pool lends and no pod may borrow.
fn lends_in_vain(pool: &PoolAdvice) -> bool {
    !matches!(&*pool.borrow, "" | "none") && pool.borrowers == 0
}

/// The possible slots of a pool, as a row.
fn slots_of(pool: &PoolAdvice) -> Vec<String> {
    vec![
        if pool.pool.is_empty() { "(none)".to_owned() } else { pool.pool.clone() },
        pool.tenants.to_string(),
        pool.replicas.to_string(),
        pool.replicas_by_memory.to_string(),
        pool.replicas_by_load.map_or("?".to_owned(), |slots| slots.to_string()),
        pool.limited_by.map_or("-".to_owned(), |limit| format!("{limit:?}")),
    ]
}

fn gib(mib: u64) -> String {
    let tenths = mib.saturating_mul(10) / 1024;
    format!("{}.{}Gi", tenths / 10, tenths % 10)
}

fn gpus(millionths: u64) -> String {
    let hundredths = millionths / 10_000;
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

fn percent(millionths: u64) -> String {
    format!("{}%", millionths / 10_000)
}
