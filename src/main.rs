//! The `gpupack` program.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{self, ExitCode};

use ::agent::command::gone as gone_of_agent;
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use cli::base::failure::Failure;
use cli::query::{advise, clear, completion, explain, snapshot, waiting};
use cli::serve::{agent, extender, webhook};
use cli::{demo, doctor, init, simulate, top};
use kube_api::config::gone;
use runtime::causes::with_causes;
use runtime::clock::Clock;

/// Takes a quarter less time for reports than that of the C library (`docs/performance.md`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
    Agent(Box<agent::SimulatedArgs>),
    /// Serve the API server: check and complete pods that request a GPU
    Webhook(webhook::WebhookArgs),
    /// Show what nodes, GPUs and tenants have, hold and use now
    Top(top::top_command::TopArgs),
    /// Say why a pod waits, and what would help
    Explain(explain::ExplainArgs),
    /// List the pods that wait, with what is in the way of each
    Waiting(waiting::WaitingArgs),
    /// Say who holds GPUs without need, and what request would have been enough
    Advise(advise::AdviseArgs),
    /// Let a GPU take tenants again after an Xid, once you have checked it
    Clear(clear::ClearArgs),
    /// Check an installation, and say what to fix
    Doctor(doctor::doctor_command::DoctorArgs),
    /// Print values for the Helm chart that fit a cluster
    Init(init::init_command::InitArgs),
    /// Watch it work: a simulated fleet and stream of pods, no Kubernetes and no GPU needed
    Demo(demo::demo_command::DemoArgs),
    /// Replay a public GPU trace through the packing code and compare policies
    Simulate(simulate::simulate_command::SimulateArgs),
    /// Write the nodes and pods of a running cluster down as a trace for simulate
    Snapshot(snapshot::SnapshotArgs),
    /// Print completions for a shell
    Completion(completion::CompletionArgs),
    /// Print the manual page
    Man(completion::ManArgs),
}

/// The program under the name that it was called by: as a plugin of kubectl its file is called
/// `kubectl-gpupack`, and its help says `kubectl gpupack`.
fn named() -> clap::Command {
    let called = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    let is_plugin = called.file_stem().is_some_and(|name| name == "kubectl-gpupack");
    let command = Cli::command();
    if is_plugin { command.name("kubectl-gpupack").bin_name("kubectl gpupack") } else { command }
}

fn main() -> ExitCode {
    let matches = named().try_get_matches().unwrap_or_else(|error| refuse(&error));
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match cli.command {
        Command::Extender(args) => ended(extender::run(&args), 1),
        Command::Agent(args) => match agent::run(*args, Clock::start()) {
            Ok(ended) => ExitCode::from(ended.code()),
            Err(error) => ended(Err(error), 1),
        },
        Command::Webhook(args) => ended(webhook::run(&args), 1),
        Command::Demo(args) => ended(demo::demo_command::run(&args, Clock::start()), 1),
        Command::Snapshot(args) => ended(snapshot::run(&args), 1),
        Command::Top(args) => answered(top::top_command::run(&args)),
        Command::Explain(args) => answered(explain::run(&args)),
        Command::Waiting(args) => answered(waiting::run(&args)),
        Command::Advise(args) => answered(advise::run(&args)),
        Command::Clear(args) => answered(clear::run(&args)),
        Command::Doctor(args) => match doctor::doctor_command::run(&args, Clock::start()) {
            Ok(code) => ExitCode::from(code),
            Err(error) => answered(Err(error)),
        },
        Command::Init(args) => answered(init::init_command::run(&args)),
        Command::Completion(args) => {
            completion::completion(&args, named());
            ExitCode::SUCCESS
        }
        Command::Man(args) => answered(completion::man(&args, named())),
        Command::Simulate(args) => match simulate::simulate_command::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                let code = error.exit_code();
                ended(Err(error.into()), code)
            }
        },
    }
}

/// Ends the process with what is wrong with its flags, or with what to do in place of one that is gone.
fn refuse(error: &clap::Error) -> ! {
    let command = std::env::args_os().nth(1).unwrap_or_default();
    let mut words = vec![command.to_string_lossy().into_owned()];
    for kind in [ContextKind::InvalidArg, ContextKind::InvalidValue] {
        if let Some(ContextValue::String(text)) = error.get(kind) {
            words.extend(text.split(' ').next().map(str::to_owned)); // without the name of its value
        }
    }
    let of_agent = words.get(1).filter(|_| command == "agent").and_then(|flag| gone_of_agent(flag));
    let Some(gone) = of_agent.or_else(|| gone::words(&words.join(" "))) else { error.exit() };
    let _ = writeln!(io::stderr(), "gpupack: {gone}"); // without stderr there is no place for it
    process::exit(2) // as clap does
}

fn answered(result: Result<(), Failure>) -> ExitCode {
    let code = result.as_ref().err().map_or(0, Failure::exit_code);
    ended(result.map_err(Into::into), code)
}

/// The exit code, and on stderr in one line what went wrong and why.
fn ended(result: anyhow::Result<()>, code: u8) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without stderr there is no place for the message.
            let _ = writeln!(io::stderr(), "gpupack: {}", with_causes(&*error));
            ExitCode::from(code)
        }
    }
}
