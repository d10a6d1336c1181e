//! The `gpupack` program.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpupack::cli::{agent, extender, simulate};
use gpupack::clock::Clock;

/// A fraction-aware GPU scheduler extender for Kubernetes.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve kube-scheduler: filter, prioritize and bind
    Extender(extender::ExtenderArgs),
    /// Report the GPUs of a node to the extender
    Agent(agent::AgentArgs),
    /// Replay a public GPU trace through the packing code and compare policies
    Simulate(simulate::SimulateArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Extender(args) => extender::run(&args),
        Command::Agent(args) => agent::run(args, Clock::start()),
        Command::Simulate(args) => simulate::run(&args).map_err(Into::into),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where stderr is gone there is nobody left to tell.
            let _ = writeln!(io::stderr(), "gpupack: {error:#}");
            let simulate = error.downcast_ref().map(simulate::SimulateError::exit_code);
            simulate.map_or(ExitCode::FAILURE, ExitCode::from)
        }
    }
}
