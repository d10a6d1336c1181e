//! The `gpupack-agent` program: it runs on each node with GPUs.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::{self, ExitCode};
use std::time::Duration;

use agent::command::{self, AgentArgs, DriverPartArgs, Ended, node_name};
use agent::nvml::seen::{SeenArgs, seen_as_json};
use clap::Parser;
use clap::error::{ContextKind, ContextValue};
use runtime::causes::with_causes;
use runtime::clock::Clock;

/// Takes less memory and time than that of the C library (`docs/performance.md`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Report the GPUs of a node to the extender of gpupack.
#[derive(Debug, Parser)]
#[command(name = "gpupack-agent", version)]
struct Cli {
    /// Name of this node.
    #[arg(long, env = "NODE_NAME", value_parser = node_name)]
    node: String,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Read the GPUs of a node and carry out orders, for a `gpupack-agent --driver-socket` beside it.
#[derive(Debug, Parser)]
#[command(name = "gpupack-agent driver")]
struct Driver {
    /// Name of this node, for the log.
    #[arg(long, env = "NODE_NAME", value_parser = node_name)]
    node: String,
    #[command(flatten)]
    part: DriverPartArgs,
}

/// Print what this container has of the GPUs of its node, as JSON, and end: for `gpupack doctor --probe`.
#[derive(Debug, Parser)]
#[command(name = "gpupack-agent devices")]
struct Devices {
    #[command(flatten)]
    seen: SeenArgs,
}

fn main() -> ExitCode {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    if words.get(1).is_some_and(|word| word == "devices") {
        words.remove(1);
        return devices(&Devices::parse_from(words).seen);
    }
    if words.get(1).is_some_and(|word| word == "driver") {
        words.remove(1);
        let driver = Driver::try_parse_from(words).unwrap_or_else(|error| refuse(&error));
        return ended(command::run_driver(driver.part, &driver.node, Clock::start()));
    }
    let cli = Cli::try_parse().unwrap_or_else(|error| refuse(&error));
    ended(command::run(cli.agent, &cli.node, Clock::start()))
}

/// The exit code, and on stderr in one line what went wrong and why.
fn ended(result: anyhow::Result<Ended>) -> ExitCode {
    match result {
        Ok(ended) => ExitCode::from(ended.code()),
        Err(error) => {
            // Without stderr there is no place for the message.
            let _ = writeln!(io::stderr(), "gpupack-agent: {}", with_causes(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Prints what is seen here.
fn devices(args: &SeenArgs) -> ExitCode {
    let text = seen_as_json(args);
    let kept = args.to.as_ref().map_or(Ok(()), |file| std::fs::write(file, &text));
    match kept.and_then(|()| writeln!(io::stdout(), "{text}")) {
        Ok(()) => {
            std::thread::sleep(Duration::from_secs(args.stay));
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "gpupack-agent: {error}"); // as below
            ExitCode::FAILURE
        }
    }
}

/// Ends the process with what is wrong with its flags, or with what to do in place of one that is gone.
fn refuse(error: &clap::Error) -> ! {
    let Some(ContextValue::String(unknown)) = error.get(ContextKind::InvalidArg) else {
        error.exit()
    };
    let Some(gone) = command::gone(unknown) else { error.exit() };
    let _ = writeln!(io::stderr(), "gpupack-agent: {gone}"); // without stderr there is no place for it
    process::exit(2) // as clap does
}
