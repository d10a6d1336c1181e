//! Why a request does not fit: the reason, what is missing, and what an operator could do about it.

use crate::hardware::units::{MemMib, MilliCpu, Share};

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
    /// Part of a GPU is asked for, and isolation by hardware.
    PartOfGpu,
    /// The pod wants all tenants of its GPU held to their memory, and nothing is to hold them.
    Unprotected,
    /// The pod wants all tenants of its GPU held to their memory, and what is meant to hold them does not.
    UnverifiedGuard,
    /// More memory is asked for than any suitable device has even when empty.
    TooLarge {
        /// By how much the request exceeds the largest suitable device.
        over: MemMib,
    },
    /// A share is asked for that is less memory than the operator hands out of such a device.
    SmallShare {
        /// By how much it is less.
        short: MemMib,
    },
    /// Fewer suitable devices exist than are asked for, whatever is free.
    TooFewDevices {
        /// Devices that would suit if they were empty.
        suitable: u32,
    },
    /// Every suitable device is unhealthy.
    Unhealthy,
    /// Kubelet hands out every suitable device by itself, but for unhealthy ones.
    KubeletOwned,
    /// The pod wants all tenants of its GPU held to their memory, and one that is there is not.
    UnheldTenant,
    /// A tenant that is there wants all tenants held to their memory, and the pod would not be.
    ProtectedTenant,
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
    pub const LABELS: [&'static str; 22] = [
        "unknown_node",
        "node_gone",
        "never_reported",
        "silent",
        "no_devices",
        "model",
        "kind",
        "no_replicas",
        "part_of_gpu",
        "unprotected",
        "unverified_guard",
        "too_large",
        "too_few_devices",
        "unhealthy",
        "kubelet_owned",
        "unheld_tenant",
        "protected_tenant",
        "devices_taken",
        "share",
        "memory",
        "host",
        "small_share",
    ];

    /// Position of the label in [`Misfit::LABELS`].
    pub fn position(&self) -> usize {
        match self {
            Self::UnknownNode => 0,
            Self::NodeGone => 1,
            Self::NeverReported => 2,
            Self::Silent => 3,
            Self::NoDevices => 4,
            Self::Model => 5,
            Self::Kind => 6,
            Self::NoReplicas => 7,
            Self::PartOfGpu => 8,
            Self::Unprotected => 9,
            Self::UnverifiedGuard => 10,
            Self::UnheldTenant => 15,
            Self::ProtectedTenant => 16,
            Self::TooLarge { .. } => 11,
            Self::TooFewDevices { .. } => 12,
            Self::Unhealthy => 13,
            Self::KubeletOwned => 14,
            Self::DevicesTaken { .. } => 17,
            Self::Share { .. } => 18,
            Self::Memory { .. } => 19,
            Self::Cpu { .. } | Self::HostMemory { .. } => 20,
            Self::SmallShare { .. } => 21,
        }
    }

    /// Short name for metrics; a closed set.
    pub fn label(self) -> &'static str {
        Self::LABELS[self.position()]
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
            Self::PartOfGpu => "part of a GPU has no isolation by hardware",
            Self::Unprotected => "node's pool holds no tenant of a shared GPU to its memory",
            Self::UnverifiedGuard => "protection of the node's GPUs does not hold",
            Self::UnheldTenant => "something on every protected GPU is not held to its memory",
            Self::ProtectedTenant => {
                "tenants of the GPU accept only neighbours held to their memory"
            }
            Self::TooLarge { .. } => "request exceeds the memory of every GPU of the node",
            Self::SmallShare { .. } => "insufficient memory per share",
            Self::TooFewDevices { .. } => "node has fewer suitable GPUs than are asked for",
            Self::Unhealthy => "every suitable GPU is unhealthy",
            Self::KubeletOwned => "every suitable GPU is handed out by kubelet itself",
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
            Self::SmallShare { short } => format!("{short} for the least share that is given"),
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
            | Self::PartOfGpu
            | Self::Unprotected
            | Self::UnverifiedGuard
            | Self::Unhealthy
            | Self::KubeletOwned
            | Self::UnheldTenant
            | Self::ProtectedTenant => self.reason().to_owned(),
        }
    }

    /// What is lacking, in a word or two; a closed set.
    pub fn lack(self) -> &'static str {
        match self {
            Self::UnknownNode | Self::NeverReported | Self::Silent => "agent",
            Self::NodeGone => "node",
            Self::NoDevices => "GPU",
            Self::Model => "model",
            Self::Kind | Self::NoReplicas => "kind",
            Self::PartOfGpu
            | Self::Unprotected
            | Self::UnverifiedGuard
            | Self::UnheldTenant
            | Self::ProtectedTenant => "isolation",
            Self::TooFewDevices { .. } | Self::DevicesTaken { .. } => "devices",
            Self::Unhealthy => "health",
            Self::KubeletOwned => "kubelet",
            Self::Share { .. } => "compute",
            Self::TooLarge { .. } | Self::SmallShare { .. } | Self::Memory { .. } => "memory",
            Self::Cpu { .. } => "CPU",
            Self::HostMemory { .. } => "main memory",
        }
    }

    /// What an operator could do about it, for people; none where that is for the books to say
    /// (see the ledger's remedies).
    pub fn mend(self) -> Option<&'static str> {
        match self {
            Self::UnknownNode | Self::NeverReported | Self::Silent => {
                Some("see to the gpupack agent of the nodes that do not report")
            }
            Self::NoReplicas => Some("configure the nodes' pool with `replicas`"),
            Self::Unprotected => Some("configure the nodes' pool with `protection`"),
            Self::UnverifiedGuard => Some(
                "see `protection_evidence` of the node in /v1/state: its driver is too old for memory \
                 limits, or sets none for tenants that should have one",
            ),
            Self::SmallShare { .. } => Some(
                "raise `gpu-fraction`, or choose larger GPUs by `gpupack.dev/gpu-model`: the operator \
                 gives no share with less memory than `min_memory_mib`",
            ),
            Self::UnheldTenant => Some("wait until what nothing holds there has left"),
            Self::ProtectedTenant => Some(
                "wait until the tenants that want protection have left, or give the pool its \
                 `protection` back",
            ),
            Self::NodeGone
            | Self::NoDevices
            | Self::Model
            | Self::Kind
            | Self::PartOfGpu
            | Self::TooLarge { .. }
            | Self::TooFewDevices { .. }
            | Self::Unhealthy
            | Self::KubeletOwned
            | Self::DevicesTaken { .. }
            | Self::Share { .. }
            | Self::Memory { .. }
            | Self::Cpu { .. }
            | Self::HostMemory { .. } => None,
        }
    }

    /// Whether room that another pod leaves could cure this.
    pub fn is_curable_by_room(self) -> bool {
        match self {
            Self::DevicesTaken { .. }
            | Self::Share { .. }
            | Self::Memory { .. }
            | Self::UnheldTenant
            | Self::ProtectedTenant
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
            | Self::PartOfGpu
            | Self::Unprotected
            | Self::UnverifiedGuard
            | Self::TooLarge { .. }
            | Self::SmallShare { .. }
            | Self::TooFewDevices { .. }
            | Self::Unhealthy
            | Self::KubeletOwned => false,
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
            Self::PartOfGpu => (8, 0),
            Self::TooLarge { over } => (9, over.mib()),
            Self::SmallShare { short } => (9, short.mib()),
            Self::TooFewDevices { suitable } => (10, u64::from(u32::MAX - suitable)),
            Self::Unprotected => (11, 0),
            Self::UnverifiedGuard => (12, 0),
            Self::Unhealthy => (13, 0),
            Self::KubeletOwned => (14, 0),
            Self::UnheldTenant => (15, 0),
            Self::ProtectedTenant => (16, 0),
            Self::Memory { short } => (17, short.mib()),
            Self::Share { short } => (18, short.millionths()),
            Self::DevicesTaken { fitting } => (19, u64::from(u32::MAX - fitting)),
            Self::HostMemory { short } => (20, short.mib()),
            Self::Cpu { short } => (21, short.milli()),
        };
        (kind, std::cmp::Reverse(missing))
    }

    /// The one of two misfits that a smaller change would cure.
    pub fn closer(self, other: Self) -> Self {
        if self.closeness() >= other.closeness() { self } else { other }
    }
}
