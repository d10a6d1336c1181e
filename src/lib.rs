//! **gpupack**: a fraction-aware GPU scheduler extender for Kubernetes.
//!
//! kube-scheduler asks over HTTP where a pod fits (`filter`), where it fits best (`prioritize`) and
//! hands over the final step (`bind`). The answers come from an in-memory model of every GPU of the
//! cluster. Facts flow in (the API server's pods and nodes, the agents' reports), decisions flow out
//! (a Binding that names node and device in one write); both meet only in the [`ledger`].
//!
//! Read the modules in this order; each layer looks only at those above it in this list:
//!
//! 1. [`packing`]: pure values. What fits, where, and how good a place is.
//! 2. [`ledger`]: the books of all nodes, concurrent.
//! 3. `cluster`, `metrics`: Kubernetes and Prometheus.
//! 4. `extender`, `agent`, [`sim`]: the services.
//! 5. [`cli`]: printing and flags.

/// What fits, where, and how good a place is: pure values, no clock, no lock, no I/O.
pub mod packing {
    pub mod units;
    pub mod device;
    pub mod request;
    pub mod reservation;
    pub mod node;
    pub mod fit;
    pub mod mix;
    pub mod fragmentation;
    pub mod policy;
    pub mod baseline;
    pub mod plan;
}

/// The books of all nodes, concurrent: facts and commands in, effects and copies out.
pub mod ledger {
    pub mod books;
    pub mod questions;
    pub mod reports;
}

/// The simulator: replays public workload traces and draws the result.
pub mod sim {
    pub mod trace;
    mod table;
    pub mod go_rand;
    mod go_rand_table;
    pub mod workload;
    pub mod policy;
    pub mod curve;
    pub mod engine;
    pub mod chart;
    mod chart_layout;
}

/// Flags and printing: the only layer that writes to the terminal.
pub mod cli {
    pub mod simulate;
    mod simulate_report;
}
