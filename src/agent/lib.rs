//! The agent of a node: NVML, processes, MPS, MIG.

/// What is read from GPUs, which orders stand, and the limits that are lent.
pub mod gpu {
    pub mod health;
    pub mod library_gate;
    pub mod sample;
    pub(crate) mod leader_orders;
    pub mod clearing;
    pub mod lent_limits;
}

/// The pod of each process.
pub mod processes {
    pub mod pods;
    pub(crate) mod draining;
    pub(crate) mod watched;
    pub(crate) mod mounts;
    pub(crate) mod driver_mounts;
}

/// The daemons of NVIDIA MPS.
pub mod mps {
    pub(crate) mod clients;
    pub(crate) mod control;
    pub(crate) mod memory;
    pub(crate) mod selinux;
    pub mod daemons;
}

/// MIG on demand: which orders stand, what they take, what was made here.
pub mod mig {
    pub mod plan;
    pub mod attempts;
    pub mod made;
    pub mod device_nodes;
    pub(crate) mod config_right;
    pub(crate) mod kept_nodes;
    pub mod on_demand;
    pub(crate) mod capabilities;
}

/// What kubelet's probes see, and when the agent ends so that its container is made again.
pub mod upkeep {
    pub mod renewal;
    pub mod condition;
}

/// The calls of NVML, and what they say.
pub mod nvml {
    pub(crate) mod raw;
    pub(crate) mod raw_mig;
    pub(crate) mod trouble;
    pub(crate) mod library;
    pub mod seen;
    pub(crate) mod cgroup_limits;
    pub(crate) mod instances;
    pub(crate) mod details;
    pub(crate) mod utilization;
    pub(crate) mod sweep;
    pub mod probe;
    pub mod maker;
}

/// Sampling, and the conversation with the extender.
pub mod node {
    pub mod cadence;
    pub mod session;
    pub mod client;
    pub mod metrics;
    pub mod metrics_port;
    pub mod replicas;
    pub mod config;
    pub mod kubelet;
    pub(crate) mod link;
    pub(crate) mod sampler;
    pub mod run;
}

/// The two parts of an agent that runs as two processes, and what they say to each other.
pub mod relay {
    pub(crate) mod watchdog;
    pub mod messages;
    pub(crate) mod conversation;
    pub mod agent_part;
    pub mod driver_part;
}

/// Flags about the driver, and what they start.
pub mod driver;
/// Flags, start and end.
pub mod command;
