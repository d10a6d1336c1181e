//! The `gpupack` program.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpupack::cli::simulate;

/// A fraction-aware GPU scheduler extender for Kubernetes.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Replay a public GPU trace through the packing code and compare policies.
    Simulate(simulate::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Simulate(args) => match simulate::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => refused(&error, error.exit_code()),
        },
    }
}

/// Tells an error and its causes in one line.
fn refused(error: &dyn Error, code: u8) -> ExitCode {
    let mut line = format!("gpupack: {error}");
    let mut cause = error.source();
    while let Some(inner) = cause {
        line.push_str(&format!(": {inner}"));
        cause = inner.source();
    }
    // Where stderr is gone there is nobody left to tell.
    let _ = writeln!(io::stderr(), "{line}");
    ExitCode::from(code)
}
