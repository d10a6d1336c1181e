//! The `gpupack-lab` program.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use cli::simulate::simulate_command::{self, SimulateArgs, policy_of};
use gpupack_lab::policies::all::all;
use gpupack_lab::{bound, bursts, mig, stress, times};
use runtime::causes::with_causes;

/// Research on gpupack's simulator
#[derive(Debug, Parser)]
struct LabCli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// `gpupack simulate` with more policies: of the literature, and ours without a part or with the mix
    /// known beforehand
    Replay(SimulateArgs),
    /// Compare the first policy with the best of the others in worlds that are made from a trace
    Stress(stress::stress_command::StressArgs),
    /// Compare the first policy with the best of the others where pods come and end, with lifetimes that
    /// depend on what they are
    Times(times::times_command::TimesWorldsArgs),
    /// Print how much any policy could have allocated of a trace
    Bound(bound::bound_command::BoundArgs),
    /// Play pods that use more than they request now and then, under each rule of `borrow`
    Bursts(bursts::bursts_command::BurstArgs),
    /// Compare policies for MIG instances that are made on demand
    Mig(mig::mig_command::MigArgs),
}

fn run() -> anyhow::Result<()> {
    let command = LabCli::command().mut_subcommand("replay", |replay| {
        replay.mut_arg("policies", |policies| policies.value_parser(policy_of(all())))
    });
    let cli = LabCli::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit());
    match cli.command {
        Command::Replay(args) => Ok(simulate_command::run(&args)?),
        Command::Stress(args) => stress::stress_command::run(&args),
        Command::Times(args) => times::times_command::run(&args),
        Command::Bound(args) => bound::bound_command::run(&args),
        Command::Bursts(args) => bursts::bursts_command::run(&args),
        Command::Mig(args) => Ok(mig::mig_command::run(&args)?),
    }
}

fn main() -> ExitCode {
    let Err(error) = run() else { return ExitCode::SUCCESS };
    // Without stderr there is no place for the message.
    let _ = writeln!(io::stderr(), "gpupack-lab: {}", with_causes(&*error));
    ExitCode::FAILURE
}
