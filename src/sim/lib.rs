//! Traces, and how they are replayed and drawn.

/// Traces, and the arrival of pods.
pub mod trace {
    pub mod exponential;
    pub mod table;
    pub(crate) mod forms;
    pub mod dimensions;
    pub(crate) mod inventory;
    pub mod read;
    pub mod write;
    pub(crate) mod go_rand_table;
    pub mod go_rand;
    pub mod workload;
    pub mod schedule;
    pub mod churn;
}

/// One run of the simulator.
pub mod run {
    pub mod baseline;
    pub mod policy;
    pub mod cluster;
    pub mod placed;
    pub mod curve;
    pub(crate) mod queue;
    pub mod service;
    pub mod replay;
    pub mod timeline;
}

/// The state of a cluster in a file.
pub mod snapshot {
    pub mod replace;
    pub mod state;
}

/// Charts.
pub mod chart {
    pub(crate) mod chart_layout;
    pub mod draw;
}
