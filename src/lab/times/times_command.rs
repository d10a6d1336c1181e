//! `gpupack-lab times`: replays worlds in which pods come and end, and compares the first policy with the
//! best of the others.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use cli::simulate::charts::{Album, time_charts};
use cli::simulate::flags::{RunArgs, TraceArgs};
use cli::simulate::jobs::Experiment;
use cli::simulate::simulate_command::{Output, make_folder, policy_of, print, time};
use sim::run::policy::SimPolicy;
use sim::run::replay::Overflow;
use sim::trace::workload::WorkloadError;

use crate::policies::all::all;
use crate::times::times_report::{TimesReport, WorldHead};
use crate::times::times_worlds::{KINDS, TimesKind, TimesScale};

/// The default policies: ours, and those it must not fall behind.
const POLICIES: [SimPolicy; 4] =
    [SimPolicy::FRAGMENTATION, SimPolicy::FGD, SimPolicy::BESTFIT, SimPolicy::BINPACK];

/// Flags of `gpupack-lab times`.
#[derive(Debug, Args)]
pub struct TimesWorldsArgs {
    #[command(flatten)]
    trace: TraceArgs,

    /// Only worlds of this kind; give it again for more [default: all].
    #[arg(long = "kind", value_name = "KIND", value_delimiter = ',', value_parser = kind())]
    kinds: Vec<TimesKind>,

    /// GPU time that pods request, of that of the cluster; give it again for more.
    #[arg(
        long = "load",
        value_name = "LOAD",
        value_delimiter = ',',
        default_values_t = [0.85, 0.95]
    )]
    loads: Vec<f64>,

    /// Number of nodes, drawn from those of the trace.
    #[arg(long, value_name = "N", default_value = "150")]
    fleet: NonZeroUsize,

    /// A pod that fits nowhere waits until it does; without this flag it is lost.
    #[arg(long)]
    queue: bool,

    /// Keep room for the first waiting pod once it has waited this many seconds: a standing hold.
    #[arg(long, value_name = "SECONDS", requires = "queue", value_parser = time)]
    standing_hold_after: Option<f64>,

    /// Policy to replay; give it again to compare several [default: fragmentation, fgd, bestfit, binpack].
    #[arg(
        long = "policy",
        value_name = "POLICY",
        value_delimiter = ',',
        value_parser = policy_of(all())
    )]
    policies: Vec<SimPolicy>,

    #[command(flatten)]
    run: RunArgs,

    /// Also draw the results into SVG files in this folder, with the points as JSON.
    #[arg(long, value_name = "FOLDER")]
    charts: Option<PathBuf>,

    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Reads the name of a kind.
fn kind() -> impl TypedValueParser<Value = TimesKind> {
    PossibleValuesParser::new(KINDS.map(|kind| kind.name)).try_map(|name| {
        KINDS.into_iter().find(|kind| kind.name == name).ok_or("it is none of them")
    })
}

/// Runs `gpupack-lab times`.
///
/// # Errors
/// What is wrong with flags or trace.
pub fn run(args: &TimesWorldsArgs) -> Result<()> {
    let chosen = if args.policies.is_empty() { &POLICIES } else { &args.policies[..] };
    make_folder(args.charts.as_ref())?;
    let experiment = args.trace.experiment(&args.run, chosen.to_vec(), false)?;
    let (report, album) = times(experiment, args)?;
    if let Some(folder) = &args.charts {
        album.write(folder)?;
    }
    Ok(print(&match args.output {
        Output::Table => report.table(),
        Output::Json => report.json(),
        Output::Csv => report.csv(),
    })?)
}

/// Replays the worlds of each trace, and draws them.
fn times(mut experiment: Experiment, args: &TimesWorldsArgs) -> Result<(TimesReport, Album)> {
    let (overflow, what) = match args.queue {
        false => (Overflow::Lost, "lost"),
        true => (Overflow::Queued, "waiting"),
    };
    let how = format!("on {} nodes, blocked pods {what}", args.fleet);
    let title = experiment.title(&how);
    let first_seed = experiment.seeds.first().copied().unwrap_or_default();
    let sources = std::mem::take(&mut experiment.traces);
    let kinds = if args.kinds.is_empty() { &KINDS[..] } else { &args.kinds[..] };
    let (mut made, mut heads, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
    for source in &sources {
        for kind in kinds {
            for load in &args.loads {
                let trace = source.world(kind.name, sources.len());
                let scale = TimesScale { nodes: args.fleet.get(), load: *load };
                match kind.workload(&experiment.nodes, &source.pods, scale, first_seed) {
                    Err(WorkloadError::NoDemand { .. }) => {
                        left_out.push(trace.label);
                        break;
                    }
                    Err(error) => return Err(error.into()),
                    Ok(_) => made.push((source, kind, scale)),
                }
                let label = trace.label.clone();
                heads.push(WorldHead { kind: label, is_seen: kind.is_seen, load: *load });
                experiment.traces.push(trace);
            }
        }
    }
    let results = experiment.timed_replays(overflow, args.standing_hold_after, |at, seed| {
        let (source, kind, scale) = made[at];
        anyhow::Ok(kind.workload(&experiment.nodes, &source.pods, scale, seed)?)
    })?;
    let pages = heads.iter().zip(&results).map(|(head, result)| {
        let page = time_charts(result, overflow);
        page.named(format!("{}-{}", head.kind, head.load))
    });
    let album = Album::new(pages);
    let report = TimesReport::new(title, heads, &results, overflow).without(left_out);
    let album = album.with_front("times", "blocked", report.chart());
    Ok((report, album))
}
