//! Why a request does not fit: the reason, what is missing, and what an operator could do about it.

use std::cmp::Reverse;

use wire::api::waiting::Obstacle;
use wire::driver_work::{MigChange, UpgradeState};
use wire::units::{MemMib, MilliCpu, Share};

/// Why a request does not fit, and by how much. An answer, not an error.
///
/// A node is refused with the most helpful rejection of its devices: the one that the smallest
/// change would cure (see [`Rejection::closer`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rejection {
    /// The ledger does not know the node.
    UnknownNode,
    /// The node was deleted from the cluster. What its tenants have stays allocated.
    NodeGone,
    /// No agent has reported this node since the extender started.
    NeverReported,
    /// The node's agent has not reported for too long. What its tenants have stays allocated.
    NotReporting,
    /// The GPU Operator upgrades the driver of the node.
    DriverUpgrade(UpgradeState),
    /// MIG Manager changes the GPUs of the node.
    MigChange(MigChange),
    /// The last pods that started on the node did not get their GPU.
    BlindStarts,
    /// The node has no device at all.
    NoDevices,
    /// Pods of the namespace may not use the node's pool.
    Pool,
    /// No device of a model that the pod accepts.
    Model,
    /// No device of the requested kind (GPU, or MIG instance of that profile).
    Kind,
    /// The pod requests a slot, and the pool has no replicas.
    NoReplicas,
    /// The pod requests a part of a GPU, with isolation by hardware.
    PartOfGpu,
    /// The pod requires memory isolation of its GPU, and none is configured.
    NoIsolation,
    /// The pod requires memory isolation of its GPU, and the configured one is not in force.
    UnverifiedIsolation,
    /// The pod requests more memory than any suitable device has, even when empty.
    TooLarge {
        /// By how much the request exceeds the largest suitable device.
        over: MemMib,
    },
    /// The requested share of such a device is less memory than the operator allows.
    SmallShare {
        /// By how much it is less.
        short: MemMib,
    },
    /// There are fewer suitable devices than requested, even if all were free.
    TooFewDevices {
        /// Devices that would suit if they were empty.
        suitable: u32,
    },
    /// Every suitable device is unhealthy.
    Unhealthy,
    /// Kubelet itself gives out every suitable device that is healthy.
    KubeletOwned,
    /// The pod requires memory isolation of its GPU, and a tenant there has none.
    UnisolatedTenant,
    /// A tenant there requires memory isolation of all, and the pod would have none.
    IsolatedTenant,
    /// Some devices fit, but fewer than requested.
    DevicesTaken {
        /// Devices that fit now.
        fitting: u32,
    },
    /// No GPU has a free place for the MIG instance, which could be made otherwise.
    NoPlace,
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
    /// Less important pods are evicted for the pod on another node.
    RoomElsewhere,
    /// They are evicted on this node, and not all of them have gone.
    RoomHere,
    /// The pods of its group are not all there, or there is no room for all of them.
    GroupWaits,
    /// Its team has as much as it may have, or would have more with this pod.
    TeamLimit,
    /// On the node the pod would count more than its request, and more than its team may have.
    TeamLimitHere,
    /// What the node has left of CPU and host memory is kept for a more important pod.
    HostKept,
    /// The node has too little CPU left.
    Cpu {
        /// What is missing.
        short: MilliCpu,
    },
    /// The node has too little host memory left.
    HostMemory {
        /// What is missing.
        short: MemMib,
    },
}

/// What is said of one reason.
struct Said {
    label: usize,
    obstacle: Obstacle,
    closeness: u8,
    reason: &'static str,
    amount: Amount,
    missing: &'static str,
    suggestion: Option<&'static str>,
    is_met_by_room: bool,
}

/// How much is missing, or how many devices there are.
enum Amount {
    None,
    Memory(MemMib),
    Share(Share),
    Cpu(MilliCpu),
    Devices(u32),
}

impl Said {
    /// Position in [`Rejection::LABELS`], obstacle, closeness (larger is closer), reason.
    const fn of(label: usize, obstacle: Obstacle, closeness: u8, reason: &'static str) -> Self {
        let (amount, suggestion, is_met_by_room) = (Amount::None, None, false);
        let missing = reason;
        Self { label, obstacle, closeness, reason, amount, missing, suggestion, is_met_by_room }
    }

    /// What is missing; the text has `{}` for the amount.
    const fn missing(self, amount: Amount, missing: &'static str) -> Self {
        Self { amount, missing, ..self }
    }

    /// What an operator could do.
    const fn suggest(self, suggestion: &'static str) -> Self {
        Self { suggestion: Some(suggestion), ..self }
    }

    /// Room that another pod leaves could cure this.
    const fn met_by_room(self) -> Self {
        Self { is_met_by_room: true, ..self }
    }
}

const CHECK_THE_AGENT: &str = "check the gpupack agent on nodes that are not reporting";

const UPGRADE_FAILED: &str = "look at the driver's pod on the node, and set the label \
    nvidia.com/gpu-driver-upgrade-state to upgrade-required to try again";

/// The reason for each state, with the value of the label.
const fn of_upgrade(state: UpgradeState) -> &'static str {
    match state {
        UpgradeState::Required => "driver upgrade of the node: upgrade-required",
        UpgradeState::NodeMaintenance => "driver upgrade of the node: node-maintenance-required",
        UpgradeState::Cordon => "driver upgrade of the node: cordon-required",
        UpgradeState::WaitForJobs => "driver upgrade of the node: wait-for-jobs-required",
        UpgradeState::PodDeletion => "driver upgrade of the node: pod-deletion-required",
        UpgradeState::Drain => "driver upgrade of the node: drain-required",
        UpgradeState::PostMaintenance => "driver upgrade of the node: post-maintenance-required",
        UpgradeState::PodRestart => "driver upgrade of the node: pod-restart-required",
        UpgradeState::Validation => "driver upgrade of the node: validation-required",
        UpgradeState::Uncordon => "driver upgrade of the node: uncordon-required",
        UpgradeState::Failed => "driver upgrade of the node: upgrade-failed",
    }
}

const fn of_mig_change(change: MigChange) -> &'static str {
    match change {
        MigChange::Pending => "MIG Manager changes the GPUs of the node: pending",
        MigChange::Rebooting => "MIG Manager changes the GPUs of the node: rebooting",
    }
}

impl Rejection {
    /// Whether it says what the pod waits for wherever it fits, and nothing of the node.
    pub fn is_of_the_pod(&self) -> bool {
        matches!(self, Self::RoomElsewhere | Self::RoomHere | Self::GroupWaits | Self::TeamLimit)
    }

    /// All labels that [`Rejection::label`] can give, for metrics that must exist from the start.
    pub const LABELS: [&'static str; 31] = [
        "unknown_node",
        "node_gone",
        "never_reported",
        "not_reporting",
        "no_devices",
        "model",
        "kind",
        "no_replicas",
        "part_of_gpu",
        "no_isolation",
        "unverified_isolation",
        "too_large",
        "too_few_devices",
        "unhealthy",
        "kubelet_owned",
        "unisolated_tenant",
        "isolated_tenant",
        "devices_taken",
        "share",
        "memory",
        "host",
        "small_share",
        "room_elsewhere",
        "host_kept",
        "group_waits",
        "team_limit",
        "pool",
        "no_place",
        "driver_upgrade",
        "mig_change",
        "blind_starts",
    ];

    /// All that is said of this reason. To add a reason, add a row.
    #[inline(always)] // *filter* compares rejections for each device; inlined, only numbers remain
    #[expect(clippy::too_many_lines, reason = "a table")]
    const fn row(self) -> Said {
        match self {
            Self::UnknownNode => {
                Said::of(0, Obstacle::Agent, 0, "no GPU agent on the node").suggest(CHECK_THE_AGENT)
            }
            Self::NodeGone => Said::of(1, Obstacle::Node, 1, "node deleted"),
            Self::NeverReported => {
                Said::of(2, Obstacle::Agent, 2, "GPU agent has not reported yet")
                    .suggest(CHECK_THE_AGENT)
            }
            Self::NotReporting => {
                Said::of(3, Obstacle::Agent, 3, "GPU agent not reporting").suggest(CHECK_THE_AGENT)
            }
            Self::DriverUpgrade(state) => Said::of(28, Obstacle::Node, 3, of_upgrade(state))
                .suggest(match state {
                    UpgradeState::Failed => UPGRADE_FAILED,
                    _ => "wait until the GPU Operator has upgraded the driver of the node",
                }),
            Self::MigChange(change) => Said::of(29, Obstacle::Node, 3, of_mig_change(change))
                .suggest("wait until MIG Manager has changed the GPUs of the node"),
            Self::BlindStarts => {
                Said::of(30, Obstacle::Health, 4, "containers on the node do not get their GPU")
                    .suggest(
                        "check on the node that the NVIDIA driver is loaded and that its container runtime gives \
                         GPUs; see `kubectl gpupack explain` of a pod there. One pod is let in as a trial five \
                         minutes after the last that got none",
                    )
            }
            Self::NoDevices => Said::of(4, Obstacle::Gpu, 4, "no GPU on the node"),
            Self::Pool => Said::of(26, Obstacle::Pool, 4, "pool not allowed for the namespace")
                .suggest("allow the pool for the namespace in the configuration's `access`"),
            Self::Kind => Said::of(6, Obstacle::Kind, 5, "no device of the requested kind"),
            Self::Model => Said::of(5, Obstacle::Model, 6, "no GPU of an allowed model"),
            Self::NoReplicas => {
                Said::of(7, Obstacle::Kind, 7, "no replica slots in the node's pool")
                    .suggest("configure the nodes' pool with `replicas`")
            }
            Self::PartOfGpu => {
                Said::of(8, Obstacle::Isolation, 8, "no hardware isolation for part of a GPU")
            }
            Self::TooLarge { over } => {
                Said::of(11, Obstacle::Memory, 9, "request exceeds the memory of every GPU")
                    .missing(Amount::Memory(over), "{} more than the largest GPU has")
            }
            Self::SmallShare { short } => Said::of(
                21,
                Obstacle::Memory,
                9,
                "insufficient memory per share",
            )
            .missing(Amount::Memory(short), "{} to reach `min_memory_mib`")
            .suggest(
                "raise `gpu-fraction`, or choose larger GPUs by `gpupack.dev/gpu-model`: the \
                    operator gives no share with less memory than `min_memory_mib`",
            ),
            Self::TooFewDevices { suitable } => {
                Said::of(12, Obstacle::Devices, 10, "fewer suitable GPUs than requested")
                    .missing(Amount::Devices(suitable), "more than {} that could take it")
            }
            Self::NoIsolation => {
                Said::of(9, Obstacle::Isolation, 11, "no memory isolation in the node's pool")
                    .suggest("configure the nodes' pool with `enforcement`")
            }
            Self::UnverifiedIsolation => {
                Said::of(10, Obstacle::Isolation, 12, "memory isolation not in force").suggest(
                    "see `isolation` of the node's devices in /v1/state: its driver is too old for \
                    memory limits, or sets none for tenants that must have one",
                )
            }
            Self::Unhealthy => Said::of(13, Obstacle::Health, 13, "no healthy suitable GPU"),
            Self::KubeletOwned => {
                Said::of(14, Obstacle::Kubelet, 14, "every suitable GPU is owned by kubelet")
            }
            Self::UnisolatedTenant => {
                Said::of(15, Obstacle::Isolation, 15, "GPU has tenants without memory isolation")
                    .suggest("wait until the processes without a memory limit have ended")
                    .met_by_room()
            }
            Self::IsolatedTenant => Said::of(
                16,
                Obstacle::Isolation,
                16,
                "GPU has tenants that require memory isolation",
            )
            .suggest(
                "wait until the tenants that require isolation have ended, or configure \
                    `enforcement` for the pool again",
            )
            .met_by_room(),
            Self::Memory { short } => Said::of(19, Obstacle::Memory, 17, "insufficient GPU memory")
                .missing(Amount::Memory(short), "{} of GPU memory")
                .met_by_room(),
            Self::Share { short } => {
                Said::of(18, Obstacle::Compute, 18, "insufficient GPU compute share")
                    .missing(Amount::Share(short), "{} of a GPU's compute share")
                    .met_by_room()
            }
            Self::DevicesTaken { fitting } => {
                Said::of(17, Obstacle::Devices, 19, "insufficient free GPUs")
                    .missing(Amount::Devices(fitting), "room on more than {}")
                    .met_by_room()
            }
            Self::NoPlace => {
                Said::of(27, Obstacle::Devices, 19, "no free place on GPUs that are divided")
                    .met_by_room()
            }
            Self::HostMemory { short } => {
                Said::of(20, Obstacle::HostMemory, 20, "insufficient host memory")
                    .missing(Amount::Memory(short), "{} of host memory")
                    .met_by_room()
            }
            Self::RoomElsewhere => {
                Said::of(22, Obstacle::Room, 22, "room is being made for the pod on another node")
                    .met_by_room()
            }
            Self::RoomHere => {
                Said::of(22, Obstacle::Room, 22, "room is being made for the pod").met_by_room()
            }
            Self::GroupWaits => Said::of(
                24,
                Obstacle::Group,
                22,
                "its group is not complete or does not fit as a whole",
            )
            .met_by_room(),
            Self::TeamLimit => Said::of(25, Obstacle::Team, 22, "GPU limit of the team reached")
                .suggest(
                    "end pods of the team, or raise its `at_most` in the configuration's `shares`",
                ),
            // Less close than room that is lacking on other nodes, for which the pod competes.
            Self::TeamLimitHere => Said::of(
                25,
                Obstacle::Team,
                10,
                "GPU limit of the team reached",
            )
            .missing(
                Amount::None,
                "a larger GPU: of this one it counts more than its team may have",
            )
            .suggest(
                "end pods of the team, raise its `at_most` in the configuration's `shares`, or set \
                    `quota.reference_memory_mib` to the memory of the GPUs",
            ),
            Self::HostKept => {
                Said::of(23, Obstacle::Room, 19, "room on the node is kept for another pod")
                    .met_by_room()
            }
            Self::Cpu { short } => Said::of(20, Obstacle::Cpu, 21, "insufficient CPU")
                .missing(Amount::Cpu(short), "{} of CPU")
                .met_by_room(),
        }
    }

    /// Position of the label in [`Rejection::LABELS`].
    pub fn position(&self) -> usize {
        self.row().label
    }

    /// Short name for metrics; a closed set.
    pub fn label(self) -> &'static str {
        Self::LABELS[self.position()]
    }

    /// Constant text for kube-scheduler, never with a number: a reason that changes makes
    /// kube-scheduler retry the pod at full speed.
    pub fn reason(self) -> &'static str {
        self.row().reason
    }

    /// What is missing, with its amount, for people.
    pub fn missing(self) -> String {
        let Said { amount, missing, .. } = self.row();
        let amount = match amount {
            Amount::None => String::new(),
            Amount::Memory(memory) => memory.to_string(),
            Amount::Share(share) => share.to_string(),
            Amount::Cpu(cpu) => format!("{}m", cpu.milli()),
            Amount::Devices(1) => "1 GPU".to_owned(),
            Amount::Devices(devices) => format!("{devices} GPUs"),
        };
        missing.replace("{}", &amount)
    }

    /// What is in the way of the pod.
    pub fn obstacle(self) -> Obstacle {
        self.row().obstacle
    }

    /// What an operator could do about it, for people; `None` where the state of the nodes decides
    /// (see the ledger's suggestions).
    pub fn suggestion(self) -> Option<&'static str> {
        self.row().suggestion
    }

    /// Whether room that another pod leaves could cure this.
    pub fn is_met_by_room(self) -> bool {
        self.row().is_met_by_room
    }

    /// How close this is to a fit, larger is closer: the kind of obstacle first, then how little is
    /// missing.
    pub fn closeness(self) -> (u8, Reverse<u64>) {
        let Said { closeness, amount, .. } = self.row();
        let missing = match amount {
            Amount::None => 0,
            Amount::Memory(memory) => memory.mib(),
            Amount::Share(share) => share.millionths(),
            Amount::Cpu(cpu) => cpu.milli(),
            Amount::Devices(devices) => u64::from(u32::MAX - devices),
        };
        (closeness, Reverse(missing))
    }

    /// The one of two rejections that a smaller change would cure.
    pub fn closer(self, other: Self) -> Self {
        if self.closeness() >= other.closeness() { self } else { other }
    }
}
