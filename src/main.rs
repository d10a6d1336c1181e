//! The `gpupack` program.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpupack::cli::{agent, demo, extender};
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
    /// Watch it work: a simulated fleet and stream of pods, no Kubernetes and no GPU needed
    Demo(demo::DemoArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Extender(args) => extender::run(&args),
        Command::Agent(args) => agent::run(args, Clock::start()),
        Command::Demo(args) => demo::run(&args, Clock::start()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where stderr is gone there is nobody left to tell.
            let _ = writeln!(io::stderr(), "gpupack: {error:#}");
            ExitCode::FAILURE
        }
    }
}
