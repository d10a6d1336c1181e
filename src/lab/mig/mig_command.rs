//! `gpupack-lab mig`: policies for MIG instances on demand, compared.

use std::io;
use std::num::NonZeroUsize;

use clap::Args;
use cli::simulate::flags::RunArgs;
use cli::simulate::simulate_command::{Output, print};

use crate::mig::compare_policies::compare;
use crate::mig::mig_worlds::MigWorld;
use crate::mig::policy::MigPolicy;
use crate::mig::series::{Bounds, Comparing};

/// Flags of `gpupack-lab mig`.
#[derive(Debug, Args)]
pub struct MigArgs {
    /// What is requested: `all` nine mixes, or names of mixes; two with `-` between for a mix that changes.
    #[arg(value_name = "MIX", value_delimiter = ',', required = true, value_parser = mixes)]
    mixes: Vec<Mixes>,

    /// GPUs of the fleet.
    #[arg(long, value_name = "N", default_value = "100")]
    gpus: NonZeroUsize,

    /// Let instances end, so that requests are this part of what the GPUs can hold at best; without it none
    /// ends.
    #[arg(long, value_name = "LOAD", value_parser = load)]
    churn: Option<f64>,

    /// Also compare ours with one running instance moved for a request that fits nowhere.
    #[arg(long)]
    one_move: bool,

    /// Also print what no policy can exceed.
    #[arg(long)]
    bound: bool,

    #[command(flatten)]
    run: RunArgs,

    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// One value of `MIX`: a world, or all mixes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mixes(Vec<MigWorld>);

fn mixes(name: &str) -> Result<Mixes, String> {
    match name {
        "all" => Ok(Mixes(MigWorld::mixes())),
        name => name.parse().map(|world| Mixes(vec![world])),
    }
}

/// A part of what GPUs can hold at best.
fn load(text: &str) -> Result<f64, String> {
    let load = text.parse::<f64>().ok().filter(|load| (0.05..=2.0).contains(load));
    load.ok_or_else(|| "it must be a number from 0.05 to 2".to_owned())
}

/// Runs `gpupack-lab mig`.
///
/// # Errors
/// Of standard output.
pub fn run(args: &MigArgs) -> io::Result<()> {
    let mut policies = MigPolicy::ALL.to_vec();
    policies.retain(|policy| *policy != MigPolicy::OursWithMove || args.one_move);
    let comparison = compare(Comparing {
        worlds: args.mixes.iter().flat_map(|Mixes(worlds)| worlds.clone()).collect(),
        gpus: args.gpus,
        load: args.churn,
        seeds: args.run.all_seeds().iter().map(|seed| seed.unsigned_abs()).collect(),
        policies,
        bounds: if args.bound { Bounds::All } else { Bounds::None },
        jobs: args.run.jobs,
    });
    print(&match args.output {
        Output::Table => comparison.table(),
        Output::Json => comparison.json(),
        Output::Csv => comparison.csv(),
    })
}
