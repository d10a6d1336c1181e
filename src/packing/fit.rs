//! The one answer to "does this request fit on this device?", used by every verb, by `bind` again
//! on the books of that moment, by the simulator and by `explain`.

use super::device::{ClassId, DeviceClasses, Health, PerClass};
use super::request::{Demand, GpuRequest};
use super::units::{HostAmount, MemMib, MilliCpu, Share};

/// Why a request does not fit, and by how much; an answer, not an error.
///
/// A node is refused with the most telling misfit of its devices: the one that the smallest change
/// would cure (see [`Misfit::closer`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Misfit {
    /// The node is not in the model.
    UnknownNode,
    /// The node was deleted from the cluster; its tenants are still booked.
    NodeGone,
    /// No agent has reported this node since we started.
    NeverReported,
    /// The node's agent has been silent for too long; its tenants stay booked.
    Silent,
    /// The node has no device at all.
    NoDevices,
    /// No device of a model that the pod accepts.
    Model,
    /// No device of the kind asked for (GPU, or MIG instance of that profile).
    Kind,
    /// A replica slot is asked for and the pool has no replicas.
    NoReplicas,
    /// More memory is asked for than any suitable device has even when empty.
    TooLarge {
        /// By how much the request exceeds the largest suitable device.
        over: MemMib,
    },
    /// Fewer suitable devices exist than are asked for, whatever is free.
    TooFewDevices {
        /// Devices that would suit if they were empty.
        suitable: u32,
    },
    /// Every suitable device is unhealthy.
    Unhealthy,
    /// Some devices fit, but fewer than are asked for.
    DevicesTaken {
        /// Devices that fit now.
        fitting: u32,
    },
    /// No suitable device has enough free compute share.
    Share {
        /// What is missing on the closest device.
        short: Share,
    },
    /// No suitable device has enough free memory.
    Memory {
        /// What is missing on the closest device.
        short: MemMib,
    },
    /// The node has too little processor time left.
    Cpu {
        /// What is missing.
        short: MilliCpu,
    },
    /// The node has too little main memory left.
    HostMemory {
        /// What is missing.
        short: MemMib,
    },
}

impl Misfit {
    /// All labels that [`Misfit::label`] can give, for metrics that must exist from the start.
    pub const LABELS: [&'static str; 15] = [
        "unknown_node",
        "node_gone",
        "never_reported",
        "silent",
        "no_devices",
        "model",
        "kind",
        "no_replicas",
        "too_large",
        "too_few_devices",
        "unhealthy",
        "devices_taken",
        "share",
        "memory",
        "host",
    ];

    /// Short name for metrics; a closed set.
    pub fn label(self) -> &'static str {
        match self {
            Self::UnknownNode => "unknown_node",
            Self::NodeGone => "node_gone",
            Self::NeverReported => "never_reported",
            Self::Silent => "silent",
            Self::NoDevices => "no_devices",
            Self::Model => "model",
            Self::Kind => "kind",
            Self::NoReplicas => "no_replicas",
            Self::TooLarge { .. } => "too_large",
            Self::TooFewDevices { .. } => "too_few_devices",
            Self::Unhealthy => "unhealthy",
            Self::DevicesTaken { .. } => "devices_taken",
            Self::Share { .. } => "share",
            Self::Memory { .. } => "memory",
            Self::Cpu { .. } | Self::HostMemory { .. } => "host",
        }
    }

    /// Constant text for kube-scheduler: it never holds a number, since a reason that changes makes
    /// kube-scheduler retry the pod at full speed.
    pub fn reason(self) -> &'static str {
        match self {
            Self::UnknownNode => "node is not known to gpupack: no agent has reported it",
            Self::NodeGone => "node was deleted",
            Self::NeverReported => "the node's gpupack agent has not reported yet",
            Self::Silent => "the node's gpupack agent is silent",
            Self::NoDevices => "node has no GPU",
            Self::Model => "GPU model is excluded by the pod",
            Self::Kind => "node has no device of the kind asked for",
            Self::NoReplicas => "node's pool has no replica slots",
            Self::TooLarge { .. } => "request exceeds the memory of every GPU of the node",
            Self::TooFewDevices { .. } => "node has fewer suitable GPUs than are asked for",
            Self::Unhealthy => "every suitable GPU is unhealthy",
            Self::DevicesTaken { .. } => "too few GPUs of the node have enough room at once",
            Self::Share { .. } => "no single GPU has enough free compute share",
            Self::Memory { .. } => "no single GPU has enough free memory",
            Self::Cpu { .. } => "node has too little free CPU",
            Self::HostMemory { .. } => "node has too little free memory",
        }
    }

    /// What is missing, with its amount, for people.
    pub fn missing(self) -> String {
        match self {
            Self::TooLarge { over } => format!("{over} more than the largest GPU has"),
            Self::TooFewDevices { suitable } => {
                format!("only {suitable} suitable GPUs exist there")
            }
            Self::DevicesTaken { fitting } => format!("only {fitting} GPUs have room at once"),
            Self::Share { short } => format!("{short} of a GPU's compute share"),
            Self::Memory { short } => format!("{short} of GPU memory"),
            Self::Cpu { short } => format!("{}m of CPU", short.milli()),
            Self::HostMemory { short } => format!("{short} of main memory"),
            Self::UnknownNode
            | Self::NodeGone
            | Self::NeverReported
            | Self::Silent
            | Self::NoDevices
            | Self::Model
            | Self::Kind
            | Self::NoReplicas
            | Self::Unhealthy => self.reason().to_owned(),
        }
    }

    /// The smallest change that would cure this, for people; none where nothing small would.
    pub fn mend(self) -> Option<String> {
        match self {
            Self::TooLarge { over } => Some(format!("ask for {over} less memory")),
            Self::TooFewDevices { suitable: 0 } => None,
            Self::TooFewDevices { suitable } => Some(format!("ask for {suitable} devices")),
            Self::DevicesTaken { fitting } => {
                Some(format!("ask for {fitting} devices, or wait until more have room at once"))
            }
            Self::Share { short } => {
                Some(format!("ask for {short} less compute share, or wait until that much is free"))
            }
            Self::Memory { short } => {
                Some(format!("ask for {short} less memory, or wait until that much is free"))
            }
            Self::Model => Some("accept more models in `gpupack.dev/gpu-model`".to_owned()),
            Self::NeverReported | Self::Silent => {
                Some("see to the gpupack agent of the nodes that do not report".to_owned())
            }
            Self::Cpu { short } => Some(format!("ask for {}m less CPU", short.milli())),
            Self::HostMemory { short } => Some(format!("ask for {short} less main memory")),
            Self::UnknownNode
            | Self::NodeGone
            | Self::NoDevices
            | Self::Kind
            | Self::NoReplicas
            | Self::Unhealthy => None,
        }
    }

    /// Whether room that another pod leaves could cure this.
    pub fn is_curable_by_room(self) -> bool {
        match self {
            Self::DevicesTaken { .. }
            | Self::Share { .. }
            | Self::Memory { .. }
            | Self::Cpu { .. }
            | Self::HostMemory { .. } => true,
            Self::UnknownNode
            | Self::NodeGone
            | Self::NeverReported
            | Self::Silent
            | Self::NoDevices
            | Self::Model
            | Self::Kind
            | Self::NoReplicas
            | Self::TooLarge { .. }
            | Self::TooFewDevices { .. }
            | Self::Unhealthy => false,
        }
    }

    /// How close this is to a fit, larger is closer: the kind of obstacle first, then how little is
    /// missing.
    pub fn closeness(self) -> (u8, std::cmp::Reverse<u64>) {
        let (kind, missing) = match self {
            Self::UnknownNode => (0, 0),
            Self::NodeGone => (1, 0),
            Self::NeverReported => (2, 0),
            Self::Silent => (3, 0),
            Self::NoDevices => (4, 0),
            Self::Kind => (5, 0),
            Self::Model => (6, 0),
            Self::NoReplicas => (7, 0),
            Self::TooLarge { over } => (8, over.mib()),
            Self::TooFewDevices { suitable } => (9, u64::from(u32::MAX - suitable)),
            Self::Unhealthy => (10, 0),
            Self::Memory { short } => (11, short.mib()),
            Self::Share { short } => (12, short.millionths()),
            Self::DevicesTaken { fitting } => (13, u64::from(u32::MAX - fitting)),
            Self::HostMemory { short } => (14, short.mib()),
            Self::Cpu { short } => (15, short.milli()),
        };
        (kind, std::cmp::Reverse(missing))
    }

    /// The one of two misfits that a smaller change would cure.
    pub fn closer(self, other: Self) -> Self {
        if self.closeness() >= other.closeness() { self } else { other }
    }
}

/// Whether the node's processor time and memory are part of the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostRule {
    /// kube-scheduler has checked them itself; our books serve scoring only.
    Trusted,
    /// Nobody else checks (simulator, demo): a shortfall is a misfit.
    Checked,
}

/// A request worked out for every class of device: the form in which it is asked of many nodes.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The request; none for a pod that wants no GPU.
    pub gpu: Option<GpuRequest>,
    /// What the pod wants of the node outside its GPUs.
    pub host: HostAmount,
    /// Whether that is checked here.
    pub host_rule: HostRule,
    demand: PerClass<Result<Demand, Misfit>>,
}

impl Ask {
    /// Works out `gpu` for every class known now.
    pub fn new(
        gpu: Option<GpuRequest>,
        host: HostAmount,
        host_rule: HostRule,
        classes: &DeviceClasses,
    ) -> Self {
        let demand = classes.map(|class| match &gpu {
            Some(request) => request.demand_on(class),
            None => Ok(Demand::ZERO),
        });
        Self { gpu, host, host_rule, demand }
    }

    /// What is taken of a device of `class`.
    ///
    /// # Errors
    /// The misfit that no freed room can cure.
    pub fn demand_on(&self, class: ClassId) -> Result<Demand, Misfit> {
        *self.demand.of(class)
    }

    /// Whether the pod takes whole devices.
    pub fn is_whole(&self) -> bool {
        self.gpu.as_ref().is_some_and(|request| request.amount.is_whole())
    }

    /// How many devices are asked for; zero for a pod that wants no GPU.
    pub fn count(&self) -> usize {
        let count = self.gpu.as_ref().map_or(0, |request| request.count.get());
        usize::try_from(count).expect("a device count fits into an address")
    }
}

/// What a device has to offer at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Class of the device.
    pub class: ClassId,
    /// Whether it takes new tenants at all.
    pub health: Health,
    /// Free memory and compute share; zero in both where the device is overbooked.
    pub free: Demand,
}

/// Whether `ask` fits on a device with this room, and what it takes of it. **The** fit function.
///
/// # Errors
/// The [`Misfit`], with what is missing.
pub fn fit(ask: &Ask, room: &Room) -> Result<Demand, Misfit> {
    let demand = ask.demand_on(room.class)?;
    if room.health == Health::Unhealthy {
        return Err(Misfit::Unhealthy);
    }
    if let Some(short) = demand.memory.checked_sub(room.free.memory)
        && short > MemMib::ZERO
    {
        return Err(Misfit::Memory { short });
    }
    if let Some(short) = demand.share.checked_sub(room.free.share)
        && short > Share::ZERO
    {
        return Err(Misfit::Share { short });
    }
    Ok(demand)
}

/// Whether `ask` fits beside what else runs on a node with `free` processor time and memory.
///
/// # Errors
/// The [`Misfit`], with what is missing. Never where the host is not part of the question.
pub fn fit_host(ask: &Ask, free: HostAmount) -> Result<(), Misfit> {
    if ask.host_rule == HostRule::Trusted {
        return Ok(());
    }
    if let Some(short) = ask.host.cpu.checked_sub(free.cpu)
        && short > MilliCpu::ZERO
    {
        return Err(Misfit::Cpu { short });
    }
    if let Some(short) = ask.host.memory.checked_sub(free.memory)
        && short > MemMib::ZERO
    {
        return Err(Misfit::HostMemory { short });
    }
    Ok(())
}
