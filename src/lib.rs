//! **gpupack**: a fraction-aware GPU scheduler extender for Kubernetes.
//!
//! kube-scheduler asks over HTTP where a pod fits (`filter`), where it fits best (`prioritize`) and
//! hands over the final step (`bind`); `preempt` keeps it from evicting pods for a GPU pod. The
//! answers come from an in-memory ledger of every GPU of the cluster. Facts flow in (the API server's
//! pods and nodes, the agents' reports), decisions flow out (a Binding that names node and device in
//! one write, annotations that requeue or fence waiting pods); both meet only in the [`ledger`].
//!
//! Read the modules in this order; each uses only modules that come before it in this list:
//!
//! 1. [`packing`]: pure values. What fits, where, and how good a placement is.
//! 2. [`ledger`]: the state of all nodes, concurrent.
//! 3. [`clock`], [`config`], [`metrics`], [`report`], [`cluster`]: the edges. Time, settings,
//!    Prometheus, what agents report, Kubernetes.
//! 4. [`extender`], [`agent`], [`sim`]: the extender and its webhook, the agent, the simulator.
//! 5. `cli`: printing and flags.

/// What fits, where, and how good a placement is: pure values, no clock, no lock, no I/O.
pub mod packing {
    pub mod units;
    pub mod device;
    pub mod pool;
    pub mod details;
    pub mod mig;
    pub mod nearness;
    pub mod inventory;
    pub mod request;
    pub mod reservation;
    pub mod device_books;
    pub mod node;
    pub mod misfit;
    pub mod fit;
    pub mod supply;
    pub mod mix;
    pub mod term;
    pub mod holes;
    pub mod prices;
    pub mod forecast;
    pub mod fragmentation;
    pub mod figures;
    pub mod outlook;
    pub mod rank;
    pub mod policy;
    pub mod baseline;
    pub mod plan;
    pub mod moves;
    #[cfg(test)]
    mod fixture;
}

/// The state of all nodes, concurrent: facts and commands in, ledger events and copies out.
pub mod ledger {
    pub mod books;
    mod pools;
    mod changes;
    pub mod choice;
    mod slot;
    mod slots;
    mod ranking;
    mod shapes;
    mod kept;
    pub mod effect;
    pub mod facts;
    pub mod commands;
    pub mod questions;
    pub mod reports;
    pub mod sightings;
    pub mod usage;
    pub mod advice;
    pub mod evictions;
    pub mod protection;
    pub mod details;
    pub mod reading;
    pub mod fleet;
    pub mod viewing;
    pub mod moves;
    pub mod remedies;
    pub mod requeue;
    pub mod waiting;
    #[cfg(test)]
    pub(crate) mod fixture;
}

mod causes;
pub mod clock;
pub mod config;
pub mod metrics;
pub mod report;

/// Kubernetes: what pods ask for, what is watched, admission, events, and the only writer of pods.
pub mod cluster {
    pub mod bounded;
    pub mod quantity;
    pub mod request_error;
    pub mod resources;
    mod values;
    pub mod annotations;
    pub mod other_keys;
    pub mod placement;
    pub mod written;
    pub mod mps;
    pub mod host;
    pub mod start_failure;
    mod pod_fields;
    pub mod pod;
    pub mod labels;
    pub mod target;
    pub mod outcome;
    pub mod write;
    pub mod evict;
    pub mod events;
    mod watched;
    pub mod watch;
    pub mod list;
    pub mod admission_error;
    mod containers;
    mod pod_security;
    mod confinement;
    pub mod injection;
    pub mod review;
    pub mod admission;
}

/// The service that kube-scheduler, agents and people call, and the admission webhook.
pub mod extender {
    mod names;
    mod wire;
    pub mod protocol;
    pub mod turns;
    pub mod edits;
    mod log_limit;
    pub mod passed;
    pub mod other_touches;
    pub mod outbox;
    pub mod app;
    mod believed;
    pub mod template;
    mod pod_events;
    pub mod verbs;
    pub mod preempt;
    pub mod bind_error;
    mod bind_limits;
    pub mod settle;
    pub mod bind;
    pub mod reports;
    pub mod proposals;
    pub mod guard;
    mod mends;
    pub mod reasons;
    pub mod details;
    pub mod sharing;
    pub mod tenants;
    pub mod inspect;
    pub mod pods;
    pub mod waiting;
    pub mod explain;
    pub mod summary;
    pub mod cells;
    mod trend;
    pub mod live;
    mod fits;
    mod search;
    mod stream;
    mod page;
    mod queries;
    mod limits;
    mod bell;
    mod exchange;
    mod connections;
    pub mod browser;
    pub mod wakes;
    mod series;
    mod history;
    pub mod background;
    pub mod advice;
    mod scrape;
    pub mod teams;
    pub mod server;
    pub mod webhook;
    pub mod tls;
}

/// What runs on every GPU node: reads the GPUs and reports them to the extender.
pub mod agent {
    pub mod health;
    pub mod probe;
    pub mod nvml;
    mod draining;
    pub mod processes;
    mod mounts;
    mod mps_clients;
    mod mps_memory;
    mod mps_control;
    pub mod mps;
    pub mod fleet;
    pub mod mixed;
    pub mod simulated;
    pub mod kubelet;
    pub mod cadence;
    pub mod session;
    pub mod client;
    pub mod metrics;
    mod link;
    mod sampler;
    pub mod run;
}

/// The simulator: replays workload traces, public ones or snapshots, and draws the result.
pub mod sim {
    pub mod trace;
    mod table;
    pub mod go_rand;
    mod go_rand_table;
    pub mod workload;
    mod exponential;
    pub mod schedule;
    pub mod churn;
    pub mod timeline;
    pub mod policy;
    pub mod curve;
    mod cluster;
    mod queue;
    pub mod service;
    pub mod engine;
    #[cfg(feature = "bound")]
    mod lp;
    #[cfg(feature = "bound")]
    mod relaxation;
    pub mod bound;
    pub mod snapshot;
    pub mod replace;
    pub mod chart;
    mod chart_layout;
}

/// Flags and printing; everything else is in the modules above.
pub mod cli {
    pub mod logging;
    mod signals;
    pub mod failure;
    mod plain;
    mod connect;
    pub mod extender;
    pub mod agent;
    pub mod webhook;
    pub mod webhook_cert;
    pub mod simulate;
    mod simulate_jobs;
    mod figures;
    mod simulate_bound;
    mod simulate_report;
    mod simulate_timed_figures;
    mod simulate_timed_json;
    mod simulate_timed;
    mod simulate_charts;
    pub mod snapshot;
    mod snapshot_state;
    mod top_state;
    mod top_rows;
    pub mod top;
    pub mod explain;
    pub mod advise;
    pub mod waiting;
    pub mod completion;
    mod demo_pods;
    mod demo_board;
    mod demo_scheduler;
    mod demo_drive;
    mod demo_view;
    mod demo_summary;
    pub mod demo;
}
