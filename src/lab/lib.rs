//! **gpupack-lab**: what only papers and figures need, on top of gpupack's simulator. It is not shipped.
//!
//! Read this file from top to bottom: **each file imports only files that stand above it here**, and what
//! gpupack has.

/// A linear program, with a bound on its maximum that is proven.
pub(crate) mod lp;

/// Policies for comparison: of the literature, and ours without a part.
pub mod policies {
    pub(crate) mod literature;
    pub(crate) mod ablation;
    pub mod all;
}

/// The best that any policy could achieve.
pub mod bound {
    pub(crate) mod relaxation;
    pub mod upper_bound;
    pub mod bound_command;
}

/// Worlds on which no policy was made.
pub mod stress {
    pub(crate) mod draw;
    pub mod stress_worlds;
    pub(crate) mod report;
    pub mod stress_command;
}

/// Pods that use more than they request now and then.
pub mod bursts {
    pub mod columns;
    pub(crate) mod world;
    pub mod scenario;
    pub mod compare_rules;
    pub mod bursts_command;
}

/// Pods that come and end, with lifetimes that depend on what they are.
pub mod times {
    pub(crate) mod life;
    pub mod times_worlds;
    pub(crate) mod times_report;
    pub mod times_command;
}

/// Requests for MIG instances that are made on demand.
pub mod mig {
    pub mod mig_worlds;
    pub(crate) mod packing;
    pub(crate) mod requests;
    pub(crate) mod fleet;
    pub mod policy;
    pub(crate) mod moves;
    pub(crate) mod play;
    pub(crate) mod bound;
    pub mod series;
    pub mod compare_policies;
    pub mod mig_command;
}
