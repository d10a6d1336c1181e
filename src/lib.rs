//! **gpupack**: a fraction-aware GPU scheduler extender for Kubernetes.
//!
//! kube-scheduler asks over HTTP where a pod fits (`filter`), where it fits best (`prioritize`) and
//! hands over the final step (`bind`). The answers come from an in-memory model of every GPU of the
//! cluster. Facts flow in (the API server's pods and nodes, the agents' reports), decisions flow out
//! (a Binding that names node and device in one write); both meet only in the `ledger`.
//!
//! Read the modules in this order; each layer looks only at those above it in this list:
//!
//! 1. [`packing`]: pure values. What fits, where, and how good a place is. Beside it [`clock`], the
//!    only reader of the OS clock, and [`report`], what agents and the extender say to each other.
//! 2. `ledger`: the books of all nodes, concurrent.
//! 3. `cluster`, `metrics`: Kubernetes and Prometheus.
//! 4. `extender`, `agent`, `sim`: the services.
//! 5. `cli`: printing and flags.

/// What fits, where, and how good a place is: pure values, no clock, no lock, no I/O.
pub mod packing {
    pub mod device;
    pub mod fit;
    pub mod policy;
    pub mod request;
    pub mod reservation;
    pub mod units;
}

pub mod clock;
pub mod report;

/// What runs on every GPU node: reads the GPUs and reports them to every replica of the extender.
pub mod agent {
    pub mod probe;

    pub mod nvml;
    pub mod processes;

    pub mod fleet;
    pub mod mixed;
    pub mod simulated;

    pub mod cadence;
    pub mod session;

    pub mod client;
    pub mod run;
}

/// Flags and printing; everything else is asked of the layers above.
pub mod cli {
    pub mod agent;
}
