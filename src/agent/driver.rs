//! Flags about the driver of a node, and what they start: the same in an agent that is one process, and in the part of
//! it that has the driver.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;

use crate::gpu::clearing::Clearing;
use crate::gpu::lent_limits::LentLimits;
use crate::gpu::library_gate::LibraryGate;
use crate::mig::config_right::{self, DEVICES};
use crate::mig::device_nodes::{DeviceNodes, OPERATORS_ROOT};
use crate::mig::on_demand::MigOnDemand;
use crate::mps::daemons::{Duty, MpsDaemons, MpsLoops, MpsSettings, QUERY_EVERY};
use crate::node::client::Proof;
use crate::node::config::AgentConfig;
use crate::node::kubelet::BesideKubelet;
use crate::node::replicas::Resolver;
use crate::nvml::maker::MigMaker;
use crate::nvml::probe::NvmlProbe;
use crate::processes::pods::PodsByProcess;
use crate::upkeep::condition::{CAPABILITIES, Upkeep};
use runtime::clock::Clock;

/// What is read and done on a node.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)] // else usage lines would list it
pub struct DriverArgs {
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

/// What is started on a node with a driver.
pub(crate) struct Started {
    pub(crate) probe: BesideKubelet<NvmlProbe>,
    /// The loops of the daemons of MPS, if there are any.
    pub(crate) daemons: Option<MpsLoops>,
}

impl DriverArgs {
    /// The kernel's list of MIG instances.
    fn capabilities(&self) -> PathBuf {
        match &self.proc_driver {
            Some(driver) => driver.join("nvidia/capabilities"),
            None => self.proc_root.join(CAPABILITIES),
        }
    }

    /// The configuration of a node without extenders and without driver.
    pub(crate) fn config(&self, clock: Clock) -> AgentConfig {
        let mig = &self.mig;
        AgentConfig {
            extenders: Vec::new(),
            proof: Proof::default(),
            resolver: Resolver::default(),
            period: Duration::from_millis(self.period_ms),
            clock,
            metrics: None,
            mig: mig.mig_on_demand.then(|| MigOnDemand::new(&mig.mig_folder, &self.proc_root)),
            limits: (self.memory_limits == LimitsChoice::Set).then(LentLimits::default),
            clearing: None,
            upkeep: Upkeep::default(),
            gate: None,
        }
    }

    /// The same of a node with a driver.
    pub(crate) fn with_driver(&self, config: AgentConfig) -> AgentConfig {
        let (gate, proc_root) = (LibraryGate::default(), Some(self.proc_root.clone()));
        let daemons = self.mps.daemons(&self.proc_root, config.clock, &gate);
        let capabilities = Some(self.capabilities());
        let upkeep = Upkeep { proc_root, capabilities, daemons, ..config.upkeep };
        let upkeep = Upkeep { was_loaded: upkeep.is_module_loaded(), ..upkeep };
        AgentConfig { gate: Some(gate), clearing: Some(Clearing::default()), upkeep, ..config }
    }

    /// Logs which right is missing for what the flags say, where the driver is loaded.
    fn advise(&self, config: &AgentConfig) {
        if config.mig.is_none() || config.upkeep.was_loaded != Some(true) {
            return;
        }
        if let Err(missing) = config_right::check(&self.proc_root, Path::new(DEVICES)) {
            tracing::error!(
                %missing,
                "the right to make MIG instances is missing (`--mig-on-demand`): this container needs root and \
                 `privileged`, as the chart's `agents.migOnDemand` has it"
            );
        }
    }

    /// Starts what runs beside the sampler. `of_kubelet` are the devices that kubelet hands out, once these are known.
    pub(crate) fn start(
        self,
        config: &AgentConfig,
        of_kubelet: watch::Receiver<Option<BTreeSet<String>>>,
    ) -> Started {
        self.advise(config);
        let capabilities = self.capabilities();
        let pods = PodsByProcess::new(self.proc_root.clone());
        let ignored = self.ignore_xids.iter().copied().map(u64::from).collect();
        let mut probe = NvmlProbe::new(self.nvml_library.clone(), pods).ignoring(ignored);
        probe = probe.with_capabilities(capabilities);
        if let Some(gate) = &config.gate {
            probe = probe.with_gate(gate.clone());
        }
        if let Some(clearing) = &config.clearing {
            probe = probe.with_clearing(clearing.clone());
        }
        if let Some(mig) = &config.mig {
            probe = probe.with_mig(mig.clone());
            let maker =
                MigMaker::new(self.nvml_library, mig.clone(), config.clock, of_kubelet.clone());
            let nodes = DeviceNodes::new(&self.proc_root, self.mig.driver_root);
            let maker = maker.with_nodes(nodes);
            let maker = if self.mig.mig_adopt { maker.adopting() } else { maker };
            let maker = match &config.gate {
                Some(gate) => maker.with_gate(gate.clone()),
                None => maker,
            };
            tokio::spawn(maker.run());
        }
        let daemons = config.upkeep.daemons.clone();
        if let Some(daemons) = &daemons {
            probe = probe.with_mps(daemons.clone());
        }
        if let Some(limits) = &config.limits {
            probe = probe.with_limits(limits.clone());
        }
        let daemons = daemons.map(|daemons| daemons.start());
        Started { probe: BesideKubelet { probe, of_kubelet }, daemons }
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
