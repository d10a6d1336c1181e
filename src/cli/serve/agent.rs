//! `gpupack agent`: the agent of this node, or a played fleet.

use std::path::{Path, PathBuf};

use agent::command::{AgentArgs, Ended, GRACE, node_name, stop};
use anyhow::{Context, bail};
use runtime::clock::Clock;
use runtime::process::logging;

use crate::simulated::fleet::Fleet;
use crate::simulated::run::run_fleet;

/// Flags of the agent, and those for a fleet that has no GPUs.
#[derive(Clone, Debug, clap::Args)]
pub struct SimulatedArgs {
    #[command(flatten)]
    agent: AgentArgs,

    /// Name of this node; with `--simulate`, the only node of the file to play.
    #[arg(long, env = "NODE_NAME", required_unless_present = "simulate", value_parser = node_name)]
    node: Option<String>,

    /// Play the nodes of this fleet file instead of this node.
    #[arg(long, value_name = "FILE", conflicts_with_all = OF_A_NODE)]
    simulate: Option<PathBuf>,
}

/// Flags that mean nothing without a node.
const OF_A_NODE: [&str; 8] = [
    "nvml_library",
    "kubelet_socket",
    "driver_socket",
    "mps",
    "memory_limits",
    "mig_on_demand",
    "metrics_listen",
    "probes_listen",
];

/// Runs the agent until SIGTERM or SIGINT, or until only a new container helps.
///
/// # Errors
/// A fleet file or an address that cannot be used.
pub fn run(args: SimulatedArgs, clock: Clock) -> anyhow::Result<Ended> {
    match (args.simulate, args.node) {
        (Some(file), only) => play(&args.agent, &file, only.as_deref(), clock),
        (None, Some(node)) => agent::command::run(args.agent, &node, clock),
        (None, None) => bail!("the name of this node is missing: set `--node` or `--simulate`"),
    }
}

/// Plays the nodes of a fleet file, or one of them.
fn play(args: &AgentArgs, file: &Path, only: Option<&str>, clock: Clock) -> anyhow::Result<Ended> {
    logging::start(args.log.level(), args.log.format())?;
    let mut fleet = Fleet::read(file)?;
    if let Some(only) = only {
        fleet.nodes.retain(|node| node.name == only);
        if fleet.nodes.is_empty() {
            bail!("fleet file `{}` has no node `{only}`", file.display());
        }
    }
    tracing::info!(nodes = fleet.nodes.len(), "playing a fleet");
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.enable_all().worker_threads(2).build();
    let runtime = runtime.context("cannot start the event loop")?;
    let result = runtime.block_on(async {
        let stop = stop()?;
        run_fleet(&args.config(clock)?, &fleet, stop).await?;
        Ok(Ended::Stopped)
    });
    // A name that is being resolved cannot be interrupted.
    runtime.shutdown_timeout(GRACE);
    result
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: SimulatedArgs,
    }

    fn parsed(line: &str) -> Result<SimulatedArgs, clap::Error> {
        let words = std::iter::once("agent").chain(line.split_whitespace());
        Command::try_parse_from(words).map(|command| command.args)
    }

    #[test]
    fn flags_name_the_extenders_and_the_node_or_a_fleet() {
        let args = parsed("--extender http://a:1 --extender http://b:1 --node n").unwrap().agent;
        assert_eq!((args.extender.len(), args.driver.period_ms), (2, 1_000));
        assert!(!args.driver.mig.mig_on_demand);
        assert!(parsed("--extender http://a:1 --simulate f.json").is_ok());
        for bad in [
            "--node n",
            "--extender http://a:1 --node n --period-ms 1",
            "--extender http://a:1 --node n1/report?x=",
            "--extender http://a:1 --simulate f --nvml-library l",
            "--extender http://a:1 --simulate f --mps rely",
            "--extender http://a:1 --node n --mps sometimes",
            "--extender http://a:1 --simulate f --memory-limits set",
            "--extender http://a:1 --simulate f --mig-on-demand",
            "--extender http://a:1 --simulate f --kubelet-socket s",
            "--extender http://a:1 --simulate f --driver-socket s",
            "--extender http://a:1 --simulate f --metrics-listen 127.0.0.1:0",
            "--extender http://a:1 --simulate f --probes-listen 127.0.0.1:0",
            "--extender http://a:1 --node n --mig-adopt",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_unusable_fleet_file_is_named() {
        let args = parsed("--extender http://a:1 --simulate /nowhere/f.json").unwrap();
        let error = run(args, Clock::start()).unwrap_err().to_string();
        assert!(error.contains("/nowhere/f.json"), "{error}");
    }
}
