//! How a tenant can be kept apart from its neighbors.

use std::time::Duration;

use crate::hardware::units::{MemMib, Share};

/// What holds a tenant of a device to its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Nothing: time slicing alone.
    None,
    /// Limits of MPS, with which clients must co-operate.
    Mps,
    /// A limit of the driver on the container's control group.
    Driver,
    /// A MIG instance of its own.
    Mig,
    /// It has the whole GPU: there are no neighbours.
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

/// By what a report is judged.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Use within this of what is allowed is nobody's fault: the driver's own figures move by some MiB.
    pub tolerance: MemMib,
    /// What containers that share a GPU are given to.
    pub limits: DriverLimits,
    /// How long a pod that is no longer alone on its GPU may go on to use up to its limit.
    pub grace: Duration,
    /// No limit counts for more than this share of the GPU.
    pub max_limit: Share,
}

/// Whether containers that share a GPU are given to the driver to be limited, or to MPS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverLimits {
    /// They are not.
    Unused,
    /// They are, to the driver.
    Intended,
    /// They are, as clients of MPS.
    OfClients,
}
