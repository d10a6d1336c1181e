//! The commands of `gpupack`.

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
    pub(crate) mod plain;
}

/// `gpupack extender`, `agent` and `webhook`
pub mod serve {
    pub mod agent;
    pub mod extender;
    pub mod webhook;
}

/// Commands that query a running extender, and the one that clears a GPU.
pub mod query {
    pub mod advise;
    pub mod clear;
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
    pub(crate) mod scheduler_checks;
    /// Certificates: of Secrets, and as pods show them.
    pub(crate) mod proof {
        pub(crate) mod certificates;
        pub(crate) mod handshake;
    }
    pub(crate) mod nodes;
    /// Objects of NVIDIA's GPU Operator.
    pub(crate) mod operator {
        pub(crate) mod driver_upgrades;
        pub(crate) mod placement;
        pub(crate) mod mig_monitors;
        pub(crate) mod mig_rights;
    }
    pub(crate) mod admission;
    pub(crate) mod cluster_facts;
    /// `--probe`: pods that say what their containers get.
    pub(crate) mod probe {
        pub(crate) mod probe_pod;
        pub(crate) mod verdict;
        pub(crate) mod probing;
    }
    pub(crate) mod checks;
    pub mod doctor_command;
}

/// `gpupack init`
pub mod init {
    pub(crate) mod found_cluster;
    pub(crate) mod memory_limit;
    pub(crate) mod values;
    pub mod init_command;
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
    pub mod simulate_command;
}

/// `gpupack demo`
pub mod demo {
    pub mod api_server;
    pub(crate) mod pods;
    pub(crate) mod scheduler;
    pub(crate) mod kubelet;
    pub(crate) mod drive;
    pub(crate) mod summary;
    pub mod demo_command;
}

/// `gpupack top`
pub mod top {
    pub(crate) mod sums;
    pub(crate) mod rows;
    pub mod top_command;
}
