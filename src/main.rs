//! The `gpupack` program.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpupack::cli::{agent, demo, extender, simulate, snapshot, webhook, webhook_cert};
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
    /// Serve the API server: check and complete pods that ask for a GPU
    Webhook(webhook::WebhookArgs),
    /// Print a certificate for the webhook as a Secret, for clusters without cert-manager
    WebhookCert(webhook_cert::WebhookCertArgs),
    /// Watch it work: a simulated fleet and stream of pods, no Kubernetes and no GPU needed
    Demo(demo::DemoArgs),
    /// Replay a public GPU trace through the packing code and compare policies
    Simulate(simulate::SimulateArgs),
    /// Write the nodes and pods of a running cluster down as a trace for simulate
    Snapshot(snapshot::SnapshotArgs),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Extender(args) => ended(extender::run(&args), 1),
        Command::Agent(args) => ended(agent::run(args, Clock::start()), 1),
        Command::Webhook(args) => ended(webhook::run(&args), 1),
        Command::WebhookCert(args) => ended(webhook_cert::run(&args, Clock::start()), 1),
        Command::Demo(args) => ended(demo::run(&args, Clock::start()), 1),
        Command::Snapshot(args) => ended(snapshot::run(&args), 1),
        Command::Simulate(args) => match simulate::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                let code = error.exit_code();
                ended(Err(error.into()), code)
            }
        },
    }
}

/// The exit code, and on stderr in one line what went wrong and why.
fn ended(result: anyhow::Result<()>, code: u8) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where stderr is gone there is nobody left to tell.
            let _ = writeln!(io::stderr(), "gpupack: {error:#}");
            ExitCode::from(code)
        }
    }
}
