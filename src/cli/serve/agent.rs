//! `gpupack agent`: flags of the agent, and its start and end as a process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use rustls::pki_types::ServerName;

use crate::base::connect::is_name;
use crate::base::logging;
use crate::base::logging::LogArgs;
use crate::base::signals::stop_signal;
use crate::simulated::fleet::Fleet;
use crate::simulated::run::run_fleet;
use agent::gpu::lent_limits::LentLimits;
use agent::mig::on_demand::MigOnDemand;
use agent::mps::daemons::{Duty, MpsDaemons, MpsSettings, QUERY_EVERY};
use agent::node::client::Proof;
use agent::node::config::AgentConfig;
use agent::node::kubelet::{BesideKubelet, KubeletDevices, SOCKET};
use agent::node::metrics::AgentMetrics;
use agent::node::metrics_port;
use agent::node::replicas::Resolver;
use agent::node::run::run_node;
use agent::nvml::maker::MigMaker;
use agent::nvml::probe::NvmlProbe;
use agent::processes::pods::PodsByProcess;
use kube_api::config::identity::REPLICA_NAME;
use runtime::certificates::{CertificateFiles, Certificates, READ_EVERY, ServerProof};
use runtime::clock::Clock;

/// How long a read of the driver may delay the end of the process.
const GRACE: Duration = Duration::from_secs(2);

/// Reports the GPUs of a node to the extender.
#[derive(Clone, Debug, clap::Args)]
pub struct AgentArgs {
    /// Address of the extender; a name that resolves to several addresses stands for as many replicas,
    /// each of which gets every report. May be given several times.
    #[arg(long, value_name = "URL", required = true)]
    pub extender: Vec<String>,

    /// Certificate in PEM of the CA of the extender, whose addresses are then `https://…`.
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,

    /// Projected token of this pod, made for the audience `gpupack`.
    #[arg(long, value_name = "FILE", requires = "ca_file")]
    pub token_file: Option<PathBuf>,

    /// Name of this node; with `--simulate`, the only node of the file to play.
    #[arg(long, env = "NODE_NAME", required_unless_present = "simulate", value_parser = node_name)]
    pub node: Option<String>,

    /// Play the nodes of this fleet file instead of this node.
    #[arg(long, value_name = "FILE", conflicts_with = "nvml_library")]
    pub simulate: Option<PathBuf>,

    /// Milliseconds between samples; what has not changed is reported every 5 seconds.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub period_ms: u64,

    /// NVIDIA's library, if the loader does not find it.
    #[arg(long, value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,

    /// Mount point of the host's process table.
    #[arg(long, value_name = "PATH", default_value = "/proc")]
    pub proc_root: PathBuf,

    /// Socket of kubelet's `PodResources` service, which reports the devices of kubelet.
    #[arg(long, value_name = "PATH", default_value = SOCKET, conflicts_with = "simulate")]
    pub kubelet_socket: PathBuf,

    /// MPS control daemons, one per GPU: `off` ignores them, `rely` reads the limits of daemons
    /// that another process runs, `manage` also runs them.
    #[arg(long, value_name = "HOW", default_value = "off", conflicts_with = "simulate")]
    pub mps: MpsChoice,

    /// Folder of their pipes, `<UUID>/pipe`: the webhook's `mps_folder`.
    #[arg(long, value_name = "PATH", default_value = "/run/gpupack/mps")]
    pub mps_folder: PathBuf,

    /// NVIDIA's control program of MPS.
    #[arg(long, value_name = "PATH", default_value = "nvidia-cuda-mps-control")]
    pub mps_control: PathBuf,

    /// Limits of the driver for the memory of containers: `read` reports them, `set` also lets pods use more than they
    /// request while no other pod needs it, as the extender orders.
    #[arg(long, value_name = "HOW", default_value = "read", conflicts_with = "simulate")]
    pub memory_limits: LimitsChoice,

    /// Make and remove MIG instances as the extender orders.
    #[arg(long, conflicts_with = "simulate")]
    pub mig_on_demand: bool,

    /// Take over the MIG instances that others have made when the agent starts: idle ones are removed.
    #[arg(long, requires = "mig_on_demand")]
    pub mig_adopt: bool,

    /// Folder with the list of the MIG instances that were made since the last boot.
    #[arg(long, value_name = "PATH", default_value = "/run/gpupack/mig")]
    pub mig_folder: PathBuf,

    /// Address and port of the GPU metrics for Prometheus, for instance `0.0.0.0:9410`; by default
    /// there are none.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "simulate")]
    pub metrics_listen: Option<SocketAddr>,

    /// Level and format of the log lines.
    #[command(flatten)]
    pub log: LogArgs,
}

/// What the agent does with the MPS control daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MpsChoice {
    /// Nothing.
    Off,
    /// Another process runs them.
    Rely,
    /// The agent runs them.
    Manage,
}

/// What the agent does with limits of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LimitsChoice {
    /// It reads them.
    Read,
    /// It reads and sets them.
    Set,
}

impl AgentArgs {
    /// The daemons to watch.
    fn daemons(&self, clock: Clock) -> Option<MpsDaemons> {
        let duty = match self.mps {
            MpsChoice::Off => return None,
            MpsChoice::Rely => Duty::Rely,
            MpsChoice::Manage => Duty::Manage,
        };
        let (folder, program) = (self.mps_folder.clone(), self.mps_control.clone());
        let proc_root = self.proc_root.clone();
        let settings = MpsSettings { folder, program, duty, query_every: QUERY_EVERY, proc_root };
        Some(MpsDaemons::new(settings, clock))
    }
}

/// Runs the agent until SIGTERM or SIGINT.
///
/// # Errors
/// A fleet file or an address that cannot be used.
pub fn run(args: AgentArgs, clock: Clock) -> anyhow::Result<()> {
    logging::start(args.log.level(), args.log.format())?;
    // One node is little work: a second thread would only cost memory.
    let mut builder = match &args.simulate {
        Some(_) => tokio::runtime::Builder::new_multi_thread(),
        None => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().worker_threads(2).build();
    let runtime = runtime.context("cannot start the event loop")?;
    let result = runtime.block_on(run_until_signal(args, clock));
    // A call of a hanging driver cannot be interrupted.
    runtime.shutdown_timeout(GRACE);
    result
}

/// Runs the agent that `args` describe.
/// A name that needs no escaping in the path of a report.
fn node_name(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err("write the name of the Node object, such as gpu-node-1".to_owned()),
    }
}

async fn run_until_signal(args: AgentArgs, clock: Clock) -> anyhow::Result<()> {
    let requested = stop_signal()?;
    let stop = async {
        requested.await;
        tracing::info!("stopping on a signal");
    };
    let period = Duration::from_millis(args.period_ms);
    let metrics = args.metrics_listen.map(|_| AgentMetrics::new());
    if let (Some(address), Some(metrics)) = (args.metrics_listen, &metrics) {
        let listener = metrics_port::listen(address)
            .with_context(|| format!("cannot listen on `{address}` (`--metrics-listen`)"))?;
        let address = listener.local_addr().unwrap_or(address);
        tokio::spawn(metrics_port::serve(metrics.clone(), listener));
        tracing::info!(%address, "showing metrics");
    }
    let proof = proof(&args)?;
    let on_demand = || MigOnDemand::new(&args.mig_folder, &args.proc_root);
    let mig = args.mig_on_demand.then(on_demand);
    let limits = (args.memory_limits == LimitsChoice::Set).then(LentLimits::default);
    let config = AgentConfig {
        extenders: args.extender.clone(),
        proof,
        resolver: Resolver::default(),
        period,
        clock,
        metrics,
        mig,
        limits,
    };
    match (args.simulate.clone(), args.node.clone()) {
        (Some(file), only) => {
            let mut fleet = Fleet::read(&file)?;
            if let Some(only) = only {
                fleet.nodes.retain(|node| node.name == only);
                if fleet.nodes.is_empty() {
                    bail!("fleet file `{}` has no node `{only}`", file.display());
                }
            }
            tracing::info!(nodes = fleet.nodes.len(), "playing a fleet");
            run_fleet(&config, &fleet, stop).await?;
        }
        (None, Some(node)) => run_here(args, (&node, &config), stop).await?,
        (None, None) => bail!("the name of this node is missing: set `--node` or `--simulate`"),
    }
    Ok(())
}

/// Reports this node, and carries out orders on it, until `stop` is done.
async fn run_here(
    args: AgentArgs,
    (node, config): (&str, &AgentConfig),
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let (clock, daemons) = (config.clock, args.daemons(config.clock));
    let pods = PodsByProcess::new(args.proc_root);
    let mut probe = NvmlProbe::new(args.nvml_library.clone(), pods);
    let kubelet = KubeletDevices::new(args.kubelet_socket);
    kubelet.refresh().await; // before any pod can be placed there
    tokio::spawn(kubelet.clone().run());
    if let Some(mig) = &config.mig {
        probe = probe.with_mig(mig.clone());
        let mut maker = MigMaker::new(args.nvml_library, mig.clone(), clock, kubelet.owned());
        if args.mig_adopt {
            maker = maker.adopting();
        }
        tokio::spawn(maker.run());
    }
    if let Some(daemons) = &daemons {
        probe = probe.with_mps(daemons.clone());
    }
    if let Some(limits) = &config.limits {
        probe = probe.with_limits(limits.clone());
    }
    let loops = daemons.map(|daemons| daemons.start());
    let result = run_node(config, node, BesideKubelet { probe, kubelet }, stop).await;
    if let Some(loops) = loops {
        loops.end().await;
    }
    Ok(result?)
}

/// How the extender and this agent prove who they are; follows the file of the CA from now on.
fn proof(args: &AgentArgs) -> anyhow::Result<Proof> {
    let Some(ca) = &args.ca_file else { return Ok(Proof::default()) };
    let name = ServerName::try_from(REPLICA_NAME)?;
    let files = CertificateFiles { own: None, ca: Some(ca.clone()), read_every: READ_EVERY };
    let certificates = Certificates::read(files)?;
    let server = Some(ServerProof { tls: certificates.current(), name });
    tokio::spawn(certificates.follow());
    Ok(Proof { server, token_file: args.token_file.clone() })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: AgentArgs,
    }

    fn parsed(line: &str) -> Result<AgentArgs, clap::Error> {
        let words = std::iter::once("agent").chain(line.split_whitespace());
        Command::try_parse_from(words).map(|command| command.args)
    }

    #[test]
    fn flags_name_the_extenders_and_the_node_or_a_fleet() {
        let args = parsed("--extender http://a:1 --extender http://b:1 --node n").unwrap();
        assert_eq!((args.extender.len(), args.period_ms), (2, 1_000));
        assert!(!args.mig_on_demand);
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
