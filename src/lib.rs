//! **gpupack**: a scheduler extender for Kubernetes that shares GPUs.
//!
//! kube-scheduler calls it over HTTP: `filter` says where a pod fits, `prioritize` where it fits
//! best, and `bind` reserves devices and posts the Binding. The answers come from the
//! [`ledger`], the state of all GPUs in memory. Facts flow in (pods and nodes from the API server,
//! reports from agents), decisions flow out (node and devices in one Binding), only through it.
//!
//! Read this file from top to bottom: **each file imports only files that stand above it here.**
//! The test `layering` checks that.

#[doc(hidden)] // for tests
pub mod mutation;

/// The JSON bodies of `/v1`, each declared once, for the server, its clients and the tests. Plain
/// types; `docs/openapi.json` is generated from them.
#[deny(missing_docs)] // others read it
pub mod api {
    pub mod kind;
    pub mod error;
    pub mod condition;
    pub mod state;
    pub mod waiting;
    pub mod moves;
    pub mod explain;
    pub mod advice;
    pub mod fit;
    pub mod search;
    pub mod page;
    pub mod commands;
}

/// Hardware of a node: GPUs, MIG instances, device classes, topology. Pure values.
#[deny(missing_docs)] // others read it
pub mod hardware {
    pub mod units;
    pub mod ids;
    pub mod device;
    pub mod seen;
    pub mod pool;
    pub mod device_class;
    pub mod mig;
    pub mod layouts;
    pub mod listed;
    pub mod spots;
    pub mod topology;
    pub mod inventory;
}

/// Requests, fit, reservations, and the state of a node. Pure values: no clock, no lock, no I/O.
#[deny(missing_docs)] // others read it
pub mod model {
    pub mod rejection;
    pub mod policy;
    pub mod request;
    pub mod charge;
    pub mod team;
    pub mod workload;
    pub mod fit;
    pub mod reservation;
    pub mod isolation;
    pub mod device_state;
    pub mod node_state;
    pub mod event;
}

/// The request mix, and how much of a node's free room it can probably not use.
#[deny(missing_docs)] // others read it
pub mod waste {
    pub(crate) mod numbers;
    pub mod supply;
    pub mod weights;
    pub(crate) mod demand;
    pub mod request_mix;
    pub(crate) mod mix_rows;
    pub(crate) mod residual;
    pub mod scarcity;
    pub(crate) mod expected_waste;
    /// Where to make MIG instances on demand.
    pub mod mig {
        pub(crate) mod mask_waste;
        pub mod class;
        pub mod types;
        pub mod window;
        pub mod mix;
        pub mod supply;
        pub mod decision;
        pub mod potentials;
    }
    pub mod compiled_mix;
}

/// Which placement is best, of those that fit.
#[deny(missing_docs)] // others read it
pub mod scoring {
    pub mod lent_memory;
    pub mod guests;
    pub mod fragmentation;
    pub mod cost;
    pub mod context;
    pub mod efficiency;
    pub(crate) mod node_waste;
    pub mod strategy;
    pub mod plan;
    pub mod lacking;
    pub mod victims;
    #[cfg(test)]
    pub(crate) mod fixture;
}

/// What pods were seen to use, and their isolation. Pure values.
#[deny(missing_docs)] // others read it
pub mod usage {
    pub mod isolation;
    pub mod samples;
    pub mod history;
    pub mod node_details;
    pub mod over_limit;
}

/// The state of all nodes in memory: facts and commands in, events and copies out.
#[deny(missing_docs)] // others read it
pub mod ledger {
    #[cfg(test)]
    pub(crate) mod fixture;

    /// The state of all nodes, and the kept answers.
    pub mod nodes {
        pub(crate) mod changes;
        pub(crate) mod node_entry;
        pub(crate) mod table;
        pub(crate) mod ranking;
        pub(crate) mod answer_cache;
        pub mod narrowing;
        pub mod per_node;
        pub mod teams;
        pub mod state;
    }

    /// Queries: where a request fits and how well; figures and copies.
    pub mod query {
        pub(crate) mod fleet;
        pub mod queries;
        pub mod reading;
        pub mod team_limit;
        pub mod own_room;
        pub(crate) mod viewing;
    }

    /// Changes of the ledger: facts, commits, reports.
    pub mod change {
        pub mod commits;
        pub mod facts;
        pub mod hung;
        pub(crate) mod pools;
        pub mod reports;
    }

    /// Usage samples from reports, and advice.
    pub mod usage {
        pub mod advice;
        pub(crate) mod observed;
    }

    /// What would help waiting pods, and which of them to requeue.
    pub mod suggest {
        pub mod displacement;
        pub mod moves;
        pub mod requeue;
        pub mod waiting;
        pub mod called_back;
        pub(crate) mod requeue_attempts;
        pub mod standing;
        pub mod preemption;
        pub mod preemptors;
        pub mod together;
        pub mod search;
        pub(crate) mod suggestions;
    }
}

/// When certificates are signed again. Pure values.
pub mod rotation {
    pub mod plan;
}

pub mod causes;
pub(crate) mod json_object;
pub mod clock;
pub mod certificates;
pub(crate) mod http_client;

/// Tasks without I/O: `step(event, now) -> actions`.
pub mod step {
    pub mod api_server;
    pub mod outside;
    pub mod news;
    pub mod pulse;
}

/// The configuration file, checked.
pub mod config {
    pub(crate) mod values;
    pub mod advice;
    pub mod allowed;
    pub mod certificates;
    pub mod gone;
    pub mod guard;
    pub mod identity;
    pub mod lease;
    pub mod webhook;
    pub mod pools;
    /// What pods may request, and what that counts.
    pub mod pods {
        pub mod requests;
        pub mod quota;
        pub mod workloads;
    }
    pub mod file;
}

/// Prometheus families.
pub mod metrics {
    pub(crate) mod make;
    pub mod fleet;
    pub mod demand;
    pub mod labels;
    pub mod guard;
    pub mod mig;
    pub mod moves;
    pub mod registry;
}

/// Reports of the agents, what is believed of them, and the replies.
#[deny(missing_docs)] // others read it
pub mod report {
    pub mod limits;
    pub mod bodies;
    pub mod refusal;
    pub(crate) mod mig;
    pub(crate) mod details;
}

/// Kubernetes: requests, pods and nodes, admission, and the only writer.
pub mod kube_api {
    pub mod connection;

    /// Annotations and resources of pods, read and written.
    pub mod request {
        pub mod request_error;
        pub mod quantity;
        pub mod resources;
        pub(crate) mod values;
        pub mod annotations;
        pub mod bounded;
        pub mod other_keys;
        pub mod usable;
        pub mod placement;
        pub mod room_note;
        pub mod written;
    }

    /// What containers get of a placement.
    pub mod containers {
        pub mod admission_error;
        pub mod container_view;
        pub mod mps;
        pub mod injection;
    }

    /// Pods and nodes from the API server.
    pub mod pod {
        pub mod host;
        pub mod labels;
        pub(crate) mod pod_fields;
        pub mod start_failure;
        pub mod gpu_container;
        pub mod seen_pod;
        pub mod list;
        pub mod watched;
        pub(crate) mod namespaces;
        pub mod lists;
        pub mod watch;
    }

    /// Who calls, as the API server knows them.
    pub mod identity {
        pub mod review;
        pub mod token;
        pub mod people;
        pub mod front_proxy;
    }

    /// All writes to the API server.
    pub mod write {
        pub mod target;
        pub mod events;
        pub mod outcome;
        pub mod term;
        pub mod writer;
        pub mod lease;
        pub mod evict;
        pub mod trust;
        pub mod carry_out;
    }

    /// The rules of the webhook.
    pub mod admission {
        pub(crate) mod pod_security;
        pub(crate) mod confinement;
        pub mod review;
        pub(crate) mod templates;
        pub mod rules;
    }
}

/// The bodies of kube-scheduler's calls.
pub mod protocol {
    pub mod bounds;
    pub mod names;
    pub mod wire;
    pub mod messages;
}

/// Actions outside the ledger: Bindings, requeues, evictions.
pub mod control {
    pub mod moving;

    /// What the others of this module share.
    pub mod shared {
        pub mod bind_error;
        pub mod bind_locks;
        pub mod edited;
        pub mod leader;
        pub mod in_flight;
        pub mod kept_suggestions;
        pub mod other_fences;
        pub mod outbox;
        pub mod passed;
        pub mod priority_classes;
        pub mod app;
        pub(crate) mod log_limit;
    }

    /// A Binding, from the call to the proof of its outcome.
    pub mod bind {
        pub(crate) mod limits;
        pub mod settle;
        pub(crate) mod start_fence;
        pub(crate) mod client_limits;
        pub(crate) mod recall;
        pub(crate) mod take_back;
        pub mod binding;
        pub mod edits;
    }

    /// Waiting pods, and over-limit pods.
    pub mod pods {
        pub(crate) mod known_pods;
        pub mod memory_guard;
        pub(crate) mod pod_events;
        pub mod proposals;
        pub(crate) mod wording;
        pub(crate) mod group_state;
        pub(crate) mod why;
        pub mod reasons;
        pub mod requeue;
        pub(crate) mod requeue_write;
        pub mod chargeback;
        pub(crate) mod ledger_events;
    }

    /// Room that is kept for waiting pods, and made for important ones.
    pub mod room {
        pub(crate) mod owners;
        pub(crate) mod group_rooms;
        pub mod standing;
        pub(crate) mod preempting;
        pub(crate) mod groups;
        pub(crate) mod team_limits;
        pub(crate) mod make_room;
        #[cfg(test)]
        pub(crate) mod fixture;
    }

    /// Which replica leads.
    pub mod lead {
        pub mod informing;
        pub(crate) mod candidate;
        pub(crate) mod election;
    }

    pub mod loops;
}

/// Certificates that gpupack makes, checks and keeps in Secrets.
pub mod issuing {
    pub mod pair;
    pub mod checked;
    pub mod authority;
    pub mod objects;
    pub mod own_files;
    pub mod faults;
    pub mod keeper;
}

/// The service that kube-scheduler calls.
pub mod server {
    /// Connections and their limits, and what browsers may do.
    pub mod http {
        pub(crate) mod bell;
        pub(crate) mod respond;
        pub mod browser;
        pub(crate) mod leading;
        pub(crate) mod limits;
        pub mod tls;
        pub(crate) mod exchange;
        pub(crate) mod connections;
    }

    /// The verbs *filter*, *prioritize* and *preempt*.
    pub mod scheduler {
        pub mod preempt;
        pub mod template;
        pub mod verbs;
    }

    /// Reports of the agents for the ledger, and what the replies have.
    #[deny(missing_docs)] // others read it
    pub mod reports {
        pub mod checked;
        pub mod reply;
    }

    /// Answers for people.
    pub mod views {
        pub mod viewer;
        pub mod advice;
        pub(crate) mod pods;
        pub mod waiting;
        pub mod teams;
        pub mod explain;
        pub(crate) mod fits;
        pub(crate) mod devices;
        pub mod inspect;
        pub(crate) mod search;
    }

    /// The page in the browser.
    pub mod page {
        pub mod cells;
        pub mod summary;
        pub(crate) mod trend;
        pub mod live;
        pub mod service;
        pub(crate) mod stream;
        pub(crate) mod routes;
    }

    /// What Prometheus has from before the start.
    pub mod history {
        pub mod series;
        pub(crate) mod recall;
    }

    /// Routes and background loops.
    pub mod api {
        pub mod background;
        pub(crate) mod queries;
        pub mod agents;
        pub mod people;
        pub(crate) mod resources;
        pub mod reports;
        pub(crate) mod replicas;
        pub(crate) mod scrape;
        pub mod server;
        pub mod openapi;
        pub mod webhook;
    }
}

/// The agent on each GPU node: reads the GPUs and reports them.
pub mod agent {
    /// What is read from GPUs.
    pub mod gpu {
        pub mod health;
        pub mod probe;
        pub(crate) mod standing;
        pub mod lent_limits;
    }

    /// The pod of each process.
    pub mod processes {
        pub mod pods;
        pub(crate) mod draining;
        pub(crate) mod watched;
        pub(crate) mod mounts;
    }

    /// The daemons of NVIDIA MPS.
    pub mod mps {
        pub(crate) mod clients;
        pub(crate) mod control;
        pub(crate) mod memory;
        pub mod daemons;
    }

    /// MIG on demand: which orders stand, what they take, what was made here.
    pub mod mig {
        pub mod plan;
        pub mod attempts;
        pub mod made;
        pub mod on_demand;
    }

    /// NVML.
    pub mod nvml {
        pub(crate) mod limits;
        pub(crate) mod raw;
        pub(crate) mod raw_mig;
        pub(crate) mod trouble;
        pub(crate) mod library;
        pub(crate) mod instances;
        pub(crate) mod details;
        pub(crate) mod utilization;
        pub(crate) mod sweep;
        pub mod probe;
        pub mod maker;
    }

    /// The agent itself.
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
}

/// The simulator: replays public traces and draws the result.
pub mod sim {
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
        pub mod engine;
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
}

/// Flags and printing; the modules above do the rest.
pub mod cli {
    /// Simulated nodes without GPUs, for demos and tests.
    pub mod simulated {
        pub mod fleet;
        pub mod mixed;
        pub mod probe;
        pub mod run;
        pub mod programs;
    }

    /// What all commands share.
    pub mod base {
        pub mod failure;
        pub(crate) mod connect;
        pub(crate) mod reader;
        pub mod logging;
        pub(crate) mod plain;
        pub(crate) mod signals;
    }

    /// `gpupack extender`, `agent` and `webhook`
    pub mod serve {
        pub mod agent;
        pub mod extender;
        pub mod webhook;
    }

    /// Commands that query a running extender.
    pub mod query {
        pub mod advise;
        pub mod completion;
        pub mod explain;
        pub(crate) mod snapshot_state;
        pub mod snapshot;
        pub mod waiting;
    }

    /// `gpupack doctor`
    pub mod doctor {
        pub(crate) mod finding;
        /// What each check may find, and how to fix it.
        pub(crate) mod table;
        pub(crate) mod rights;
        pub(crate) mod objects;
        pub(crate) mod parts;
        pub(crate) mod scheduler_file;
        pub(crate) mod scheduler;
        /// Certificates: of Secrets, and as pods show them.
        pub(crate) mod proof {
            pub(crate) mod certificates;
            pub(crate) mod handshake;
        }
        pub(crate) mod nodes;
        pub(crate) mod admission;
        pub(crate) mod facts;
        pub(crate) mod checks;
        pub mod command;
    }

    /// `gpupack init`
    pub mod init {
        pub(crate) mod facts;
        pub(crate) mod values;
        pub mod command;
    }

    /// `gpupack simulate`
    pub mod simulate {
        pub mod figures;
        pub mod jobs;
        pub mod flags;
        pub mod charts;
        pub mod report;
        pub(crate) mod timed_figures;
        pub(crate) mod timed_json;
        pub(crate) mod timed;
        pub(crate) mod ends;
        pub mod command;
    }

    /// `gpupack demo`
    pub mod demo {
        pub mod api_server;
        pub(crate) mod pods;
        pub(crate) mod scheduler;
        pub(crate) mod kubelet;
        pub(crate) mod drive;
        pub(crate) mod summary;
        pub mod command;
    }

    /// `gpupack top`
    pub mod top {
        pub(crate) mod sums;
        pub(crate) mod rows;
        pub mod command;
    }
}
