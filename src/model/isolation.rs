//! How tenants are isolated from each other.

use std::time::Duration;

use crate::hardware::units::{MemMib, Share};

/// What limits the memory of a tenant of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Nothing: time slicing alone.
    None,
    /// Limits of MPS, with which clients must cooperate.
    Mps,
    /// A limit of the driver on the container's control group.
    Driver,
    /// A MIG instance of its own.
    Mig,
    /// It has the whole GPU: there are no neighbors.
    Whole,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 5] = [Self::None, Self::Mps, Self::Driver, Self::Mig, Self::Whole];

    /// Its name, in state and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mps => "mps",
            Self::Driver => "driver",
            Self::Mig => "mig",
            Self::Whole => "whole",
        }
    }
}

/// The rules by which a report is judged.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Use of up to this much above the allowed amount is ignored: NVML's figures vary by some MiB.
    pub tolerance: MemMib,
    /// What limits containers that share a GPU.
    pub limits: DriverLimits,
    /// How long a pod that is no longer alone on its GPU may still use memory up to its limit.
    pub grace: Duration,
    /// Limits above this share of the GPU count as this share.
    pub max_limit: Share,
}

/// Whether the driver or MPS limits containers that share a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverLimits {
    /// Neither does.
    Unused,
    /// The driver does.
    Configured,
    /// MPS does, with the containers as its clients.
    OfClients,
}
