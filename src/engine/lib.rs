//! Devices, requests, fit, packing, and the cluster in memory. No I/O, no clock; but for the ledger also no lock.

/// Hardware of a node: GPUs, MIG instances, device classes, topology. Pure values.
#[deny(missing_docs)] // others read it
pub mod hardware {
    pub mod pool;
    pub mod device_class;
    pub mod mig;
    pub mod layouts;
    pub mod listed;
    pub mod spots;
    pub mod topology;
    pub mod model_sizes;
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
    /// Parts of the state of a node.
    pub mod node {
        pub mod intake;
    }
    pub mod isolation;
    pub mod device_state;
    pub mod node_state;
    pub mod event;
}

/// The request mix, and how much of a node's free room it can probably not use.
#[deny(missing_docs)] // others read it
pub mod waste {
    pub(crate) mod numbers;
    pub(crate) mod turnover;
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
        pub mod mig_supply;
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
    pub mod device_figures;
    pub(crate) mod node_waste;
    pub mod strategy;
    pub mod plan;
    pub mod lacking;
    pub mod victims;
    #[cfg(any(test, feature = "test-support"))]
    pub mod node_fixture;
}

/// What pods were seen to use, their isolation, and driver and faults of nodes. Pure values.
#[deny(missing_docs)] // others read it
pub mod usage {
    pub mod tenant_isolation;
    pub mod samples;
    pub mod starts;
    pub mod history;
    pub mod node_details;
    pub mod over_limit;
}

/// The state of all nodes in memory: facts and commands in, events and copies out.
#[deny(missing_docs)] // others read it
pub mod ledger {
    #[cfg(any(test, feature = "test-support"))]
    pub mod ledger_fixture;

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

    /// What would help waiting pods, which of them to requeue, whom to preempt, and for whom room is kept.
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
