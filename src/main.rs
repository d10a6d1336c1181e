//! The `gpupack` program.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpupack::cli::extender;

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
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Extender(args) => extender::run(&args),
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
