//! Flags of the agent, and its start and end as a process.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use rustls::pki_types::ServerName;

use crate::gpu::clearing::Clearing;
use crate::gpu::lent_limits::LentLimits;
use crate::gpu::library_gate::LibraryGate;
use crate::mig::device_nodes::{DeviceNodes, OPERATORS_ROOT};
use crate::mig::on_demand::MigOnDemand;
use crate::mps::daemons::{Duty, MpsDaemons, MpsSettings, QUERY_EVERY};
use crate::node::client::Proof;
use crate::node::config::AgentConfig;
use crate::node::kubelet::{BesideKubelet, KubeletDevices, SOCKET};
use crate::node::metrics::AgentMetrics;
use crate::node::metrics_port::{self, Shown};
use crate::node::replicas::Resolver;
use crate::node::run::{AgentError, run_node};
use crate::nvml::maker::MigMaker;
use crate::nvml::probe::NvmlProbe;
use crate::processes::pods::PodsByProcess;
use crate::upkeep::condition::{CAPABILITIES, Upkeep};
use crate::upkeep::renewal::MADE_AGAIN;
use runtime::certificates::{
    CertificateFiles, Certificates, READ_EVERY, REPLICA_NAME, ServerProof,
};
use runtime::clock::Clock;
use runtime::process::logging::{self, LogArgs};
use runtime::process::signals::stop_signal;
use wire::ids::is_name;

/// How long a read of the driver may delay the end of the process.
pub const GRACE: Duration = Duration::from_secs(2);

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

    /// Milliseconds between samples; what has not changed is reported every 5 seconds.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub period_ms: u64,

    /// NVIDIA's library, if the loader does not find it.
    #[arg(long, value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,

    /// Mount point of the host's process table.
    #[arg(long, value_name = "PATH", default_value = "/proc")]
    pub proc_root: PathBuf,

    /// The host's `/proc/driver`, for the kernel's list of MIG instances, where the container has another one; by default
    /// the folder `driver` of the process table.
    #[arg(long, value_name = "PATH")]
    pub proc_driver: Option<PathBuf>,

    /// Socket of kubelet's `PodResources` service, which reports the devices of kubelet.
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    pub kubelet_socket: PathBuf,

    /// MPS control daemons of the node.
    #[command(flatten)]
    pub mps: MpsArgs,

    /// Limits of the driver for the memory of containers: `read` reports them, `set` also lets pods use more than they
    /// request while no other pod needs it, as the extender orders.
    #[arg(long, value_name = "HOW", default_value = "read")]
    pub memory_limits: LimitsChoice,

    /// MIG instances of the node.
    #[command(flatten)]
    pub mig: MigOnDemandArgs,

    /// Xids that are no reason to keep pods off a GPU, beside those of applications: numbers with commas between them.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..))]
    pub ignore_xids: Vec<u16>,

    /// Address and port of the GPU metrics for Prometheus, for instance `0.0.0.0:9410`; by default
    /// there are none.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics_listen: Option<SocketAddr>,

    /// Address and port of the answers to kubelet's probes, `/livez` and `/readyz`, for instance
    /// `0.0.0.0:9411`; the port of the metrics has them, too.
    #[arg(long, value_name = "ADDRESS")]
    pub probes_listen: Option<SocketAddr>,

    /// Level and format of the log lines.
    #[command(flatten)]
    pub log: LogArgs,
}

/// What the agent does with the MPS control daemons, and where they are.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)] // else usage lines would list it
pub struct MpsArgs {
    /// MPS control daemons, one per GPU: `off` ignores them, `rely` reads the limits of daemons
    /// that another process runs, `manage` also runs them.
    #[arg(long, value_name = "HOW", default_value = "off")]
    pub mps: MpsChoice,

    /// Folder of their pipes, `<UUID>/pipe`: the webhook's `mps_folder`.
    #[arg(long, value_name = "PATH", default_value = "/run/gpupack/mps")]
    pub mps_folder: PathBuf,

    /// NVIDIA's control program of MPS.
    #[arg(long, value_name = "PATH", default_value = "nvidia-cuda-mps-control")]
    pub mps_control: PathBuf,
}

/// Whether the agent makes MIG instances, and where it notes them.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct MigOnDemandArgs {
    /// Make and remove MIG instances as the extender orders.
    #[arg(long)]
    pub mig_on_demand: bool,

    /// Take over the MIG instances that others have made when the agent starts: idle ones are removed.
    #[arg(long, requires = "mig_on_demand")]
    pub mig_adopt: bool,

    /// Folder with the list of the MIG instances that were made since the last boot.
    #[arg(long, value_name = "PATH", default_value = "/run/gpupack/mig")]
    pub mig_folder: PathBuf,

    /// Folder on the node in which a driver has its own `dev`, beside `/`: the device nodes of instances are made there,
    /// too. May be given several times.
    #[arg(long, value_name = "PATH", default_value = OPERATORS_ROOT)]
    pub driver_root: Vec<PathBuf>,
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
    /// The kernel's list of MIG instances.
    fn capabilities(&self) -> PathBuf {
        match &self.proc_driver {
            Some(driver) => driver.join("nvidia/capabilities"),
            None => self.proc_root.join(CAPABILITIES),
        }
    }

    /// What all its loops share. It needs a runtime: it follows the file of the CA from now on.
    ///
    /// # Errors
    /// A certificate that cannot be used.
    pub fn config(&self, clock: Clock) -> anyhow::Result<AgentConfig> {
        let mig = &self.mig;
        let mig = mig.mig_on_demand.then(|| MigOnDemand::new(&mig.mig_folder, &self.proc_root));
        Ok(AgentConfig {
            extenders: self.extender.clone(),
            proof: proof(self)?,
            resolver: Resolver::default(),
            period: Duration::from_millis(self.period_ms),
            clock,
            metrics: self.metrics_listen.map(|_| AgentMetrics::new()),
            mig,
            limits: (self.memory_limits == LimitsChoice::Set).then(LentLimits::default),
            clearing: None,
            upkeep: Upkeep::default(),
            gate: None,
        })
    }
}

impl MpsArgs {
    /// The daemons to watch.
    fn daemons(&self, proc_root: &Path, clock: Clock, gate: &LibraryGate) -> Option<MpsDaemons> {
        let duty = match self.mps {
            MpsChoice::Off => return None,
            MpsChoice::Rely => Duty::Rely,
            MpsChoice::Manage => Duty::Manage,
        };
        let (folder, program) = (self.mps_folder.clone(), self.mps_control.clone());
        let proc_root = proc_root.to_owned();
        let settings = MpsSettings { folder, program, duty, query_every: QUERY_EVERY, proc_root };
        Some(MpsDaemons::gated(settings, clock, Some(gate.clone())))
    }
}

/// A name that needs no escaping in the path of a report.
///
/// # Errors
/// What it must be.
pub fn node_name(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err("write the name of the Node object, such as gpu-node-1".to_owned()),
    }
}

/// What to say of a word of the command line that is not known, if it was there in the version before.
/// Kept for this version alone.
pub fn gone(word: &str) -> Option<String> {
    let advice = match word {
        "agent" => "leave it out; this program is the agent",
        "--mig-switch" => "leave it out; the agent makes instances on GPUs that are in MIG mode",
        "--mig-reset" => "leave it out; the agent switches no MIG mode",
        "--server-name" => {
            "leave it out; the certificate of every replica needs `gpupack-extender`"
        }
        "--mps-protocol" => "leave it out; the agent speaks protocol 2 with daemons of MPS",
        _ => return None,
    };
    Some(format!("`{word}` is gone: {advice}"))
}

/// Ends when the process is asked to end.
///
/// # Errors
/// The error of the operating system.
pub fn stop() -> anyhow::Result<impl Future<Output = ()>> {
    let requested = stop_signal()?;
    Ok(async {
        requested.await;
        tracing::info!("stopping on a signal");
    })
}

/// How the agent ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// As it was asked to.
    Stopped,
    /// So that its container is made again.
    Outdated,
}

impl Ended {
    /// The exit code of the process.
    pub fn code(self) -> u8 {
        match self {
            Self::Stopped => 0,
            Self::Outdated => MADE_AGAIN,
        }
    }
}

/// Reports the node of this name, and carries out orders on it, until SIGTERM or SIGINT, or until only a new container
/// helps.
///
/// # Errors
/// An address or a file that cannot be used.
pub fn run(args: AgentArgs, node: &str, clock: Clock) -> anyhow::Result<Ended> {
    logging::start(args.log.level(), args.log.format())?;
    // One node is little work: a second thread would only cost memory.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the event loop")?;
    let result = runtime.block_on(run_until_signal(args, node, clock));
    // A call of a hanging driver cannot be interrupted.
    runtime.shutdown_timeout(GRACE);
    result
}

async fn run_until_signal(args: AgentArgs, node: &str, clock: Clock) -> anyhow::Result<Ended> {
    let stop = stop()?;
    // At once: the module may be loaded while the rest gets ready.
    let host = Upkeep { proc_root: Some(args.proc_root.clone()), ..Upkeep::default() };
    let was_loaded = host.is_module_loaded();
    let gate = LibraryGate::default();
    let clearing = Clearing::default();
    let config = args.config(clock)?;
    let mut config =
        AgentConfig { gate: Some(gate.clone()), clearing: Some(clearing.clone()), ..config };
    show(&args, &config)?;
    let daemons = args.mps.daemons(&args.proc_root, clock, &gate);
    let upkeep = config.upkeep;
    let (proc_root, managed) = (Some(args.proc_root.clone()), daemons.clone());
    let capabilities = args.capabilities();
    let listed = Some(capabilities.clone());
    config.upkeep =
        Upkeep { proc_root, capabilities: listed, was_loaded, daemons: managed, ..upkeep };
    let pods = PodsByProcess::new(args.proc_root.clone());
    let ignored = args.ignore_xids.iter().copied().map(u64::from).collect();
    let probe = NvmlProbe::new(args.nvml_library.clone(), pods).ignoring(ignored);
    let probe = probe.with_capabilities(capabilities);
    let mut probe = probe.with_gate(gate.clone()).with_clearing(clearing);
    let kubelet = KubeletDevices::new(args.kubelet_socket);
    kubelet.refresh().await; // before any pod can be placed there
    tokio::spawn(kubelet.clone().run());
    if let Some(mig) = &config.mig {
        probe = probe.with_mig(mig.clone());
        let maker = MigMaker::new(args.nvml_library, mig.clone(), clock, kubelet.owned());
        let nodes = DeviceNodes::new(&args.proc_root, args.mig.driver_root);
        let mut maker = maker.with_gate(gate.clone()).with_nodes(nodes);
        if args.mig.mig_adopt {
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
    let result = run_node(&config, node, BesideKubelet { probe, kubelet }, stop).await;
    if let Some(loops) = loops {
        loops.end().await;
    }
    match result {
        Ok(()) => Ok(Ended::Stopped),
        Err(AgentError::MadeAgain { cause }) => {
            tracing::error!(code = MADE_AGAIN, "{cause}");
            Ok(Ended::Outdated)
        }
        Err(error) => Err(error.into()),
    }
}

/// Opens the ports for Prometheus and kubelet.
fn show(args: &AgentArgs, config: &AgentConfig) -> anyhow::Result<()> {
    let ports = [
        (args.probes_listen, None, "--probes-listen", "answering probes"),
        (args.metrics_listen, config.metrics.clone(), "--metrics-listen", "showing metrics"),
    ];
    for (address, metrics, flag, what) in ports {
        let Some(address) = address else { continue };
        let listener = metrics_port::listen(address)
            .with_context(|| format!("cannot listen on `{address}` (`{flag}`)"))?;
        let address = listener.local_addr().unwrap_or(address);
        let accepted = config.upkeep.accepted.clone();
        let shown = Shown { metrics, accepted, clock: config.clock };
        tokio::spawn(metrics_port::serve(shown, listener));
        tracing::info!(%address, "{what}");
    }
    Ok(())
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

    #[test]
    fn a_gone_flag_says_what_to_do() {
        for word in ["agent", "--mig-switch", "--mig-reset", "--server-name", "--mps-protocol"] {
            let said = gone(word).unwrap();
            assert!(said.starts_with(&format!("`{word}` is gone: leave it out; ")), "{said}");
        }
        assert_eq!(gone("--mig-adopt"), None);
    }

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: AgentArgs,
    }

    #[test]
    fn ignored_xids_are_whole_numbers_with_commas_between_them() {
        let read = |text: &str| {
            let line = Line::try_parse_from(["agent", "--extender=http://e", text]);
            line.ok().map(|line| line.args.ignore_xids)
        };
        assert_eq!(read("--period-ms=100"), Some(Vec::new()));
        assert_eq!(read("--ignore-xids=48,63"), Some(vec![48, 63]));
        for bad in ["", "0", "48,", "48,,63", "48;63", "-1", "65536", "all", "0x30", "4 8"] {
            assert_eq!(read(&format!("--ignore-xids={bad}")), None, "{bad}");
        }
    }

    #[test]
    fn the_name_of_a_node_needs_no_escaping_in_a_path() {
        assert_eq!(node_name("gpu-1.example"), Ok("gpu-1.example".to_owned()));
        assert!(node_name("n1/report?x=").is_err());
    }
}
