//! The condition of a device: why it takes no new tenants, and the state of its MPS daemon.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a device takes no new tenants. What is allocated on it stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub enum DeviceFault {
    /// The driver is missing, is being upgraded or hangs: the state of all devices is unknown.
    DriverAway,
    /// The agent's container was made for another driver. It waits for clients of MPS before it ends itself.
    AgentOutdated,
    /// It is no longer on the PCIe bus.
    Lost,
    /// The driver requires a reset.
    ResetRequired,
    /// The driver requires a reboot of the node.
    RebootRequired,
    /// The driver requires that its traffic to other GPUs ends.
    DrainRequired,
    /// The driver says that it is not available.
    Unavailable,
    /// An Xid that no application caused; `lastXid` has its number.
    Xid,
    /// It does not answer, or only in part.
    NotAnswering,
    /// Another device has the same UUID.
    UuidTwice,
    /// It reports impossible values.
    Absurd,
    /// It has no memory of its own to share, and the configuration gives its model no size.
    NoMemory,
    /// Its memory belongs to the operating system, and what a process on it uses is not known.
    UnknownUse,
    /// It is a GPU in MIG mode with instances that the driver hides from the agent.
    InstancesHidden,
    /// It is a MIG instance whose device nodes are missing on its node: a container that starts there gets no GPU.
    NodesMissing,
    /// The driver does not let the agent read it.
    NoPermission,
    /// Kubelet gives it to pods.
    KubeletOwned,
    /// A reason that only a newer agent knows.
    #[serde(other)]
    Other,
}

/// What became of an order to clear a GPU: that its agent forgets the faults of past events there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ClearResult {
    /// They are forgotten.
    Cleared,
    /// There were none.
    NothingToClear,
    /// They stay: the driver still requests an action for the GPU, or the GPU does not answer.
    Refused,
    /// The agent did not answer in time. It may still have carried the order out.
    NoAnswer,
    /// A result that only a newer agent knows.
    #[serde(other)]
    Other,
}

/// How a GPU addresses the memory of its host, as NVML reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum AddressingMode {
    /// Not at all.
    Off,
    /// By a copy of the host's page tables (Heterogeneous Memory Management).
    Hmm,
    /// By those tables themselves (Address Translation Services), as on Grace: its own memory may then be a NUMA node
    /// of the host.
    Ats,
    /// A mode that only a newer agent knows.
    #[serde(other)]
    Other,
}

/// The state of an MPS control daemon; greater is worse for its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub enum MpsState {
    /// It answers. It has no server, so no clients.
    Idle,
    /// It answers, and all its servers take clients.
    Serving,
    /// A server is not ready yet.
    Starting,
    /// A server no longer takes clients, or does not say.
    Faulted,
    /// Nothing answers at its pipes.
    Absent,
    /// A state that only a newer agent knows.
    #[serde(other)]
    Other,
}
