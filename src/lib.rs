//! **gpupack**: a fraction-aware GPU scheduler extender for Kubernetes.
//!
//! kube-scheduler asks over HTTP where a pod fits (`filter`), where it fits best (`prioritize`) and
//! hands over the final step (`bind`). The answers come from an in-memory model of every GPU of the
//! cluster. Facts flow in (the API server's pods and nodes, the agents' reports), decisions flow out
//! (a Binding that names node and device in one write); both meet only in the `ledger`.
//!
//! Read the modules in this order; each layer looks only at those above it in this list:
//!
//! 1. [`packing`]: pure values. What fits, where, and how good a place is.
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

/// Kubernetes: what pods ask for in their annotations, and the only writer to the API server.
pub mod cluster {
    pub mod quantity;
    pub mod request_error;
    pub mod resources;
    mod values;
    pub mod annotations;
    pub mod placement;
    pub mod host;
    pub mod pod;
    pub mod target;
    pub mod write;
    pub mod events;
}

/// The service that kube-scheduler calls.
pub mod extender {
    mod wire;
    pub mod protocol;
}
