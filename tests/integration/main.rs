//! The tests of the library and of the program, in one binary: each binary links the whole library again.
//!
//! They share one process, so no test changes what belongs to the process: its environment, its current folder,
//! its log. One file alone: `cargo test --test integration races::`.

/// What the tests share: stand-ins for what is around the program, and values in few words.
#[path = "../harness/mod.rs"]
mod harness;

/// The ledger: any history, any order, many threads.
mod ledger {
    mod concurrency;
    mod guests;
    mod instances;
    mod listed;
    mod properties;
    mod races;
    mod simulation;
}

/// The shipped control core in virtual time, among faults.
mod simulation;

/// The extender as kube-scheduler, the API server, people and attackers meet it.
mod extender {
    mod admission;
    mod attacks;
    mod blind;
    mod clear;
    mod dashboards;
    mod history;
    mod http;
    mod identities;
    mod leading;
    mod people;
    mod protocol;
    mod requeues;
    mod routes;
    mod teams;
    mod webhook_tls;
    mod workloads;
}

/// The programs and queries in the recipes of `deploy/recipes`.
mod recipes;

/// The Helm chart.
mod chart;

/// Reading and writing at an API server that loses and refuses.
mod cluster_api {
    #![expect(clippy::unwrap_used, reason = "test fixtures outside of test functions")]

    mod binding;
    mod clocks;
    mod edits;
    mod evicting;
    mod forged;
    mod going_home;
    mod kept;
    mod making_room;
    mod on_demand;
    mod overlapping;
    mod recalling;
    mod taking_over;
    mod unauthorized;
    mod waiting;
    mod why;
    mod writer;
}

/// Certificates that gpupack makes.
mod certificates {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    mod keeper;
}

/// The agent: its reports, its conversation with the extender, and what it reads of NVML.
mod agent {
    mod report_wire;
    mod session;

    /// The agent against a stand-in for NVIDIA's library (`tests/harness/fake_nvml`).
    mod nvml {
        #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

        /// What is read of devices that work.
        mod inventory;
        /// How events and the driver's recovery action change the health of a device.
        mod health;
        /// A person clears a GPU.
        mod clear;
        /// Every error of every call, missing functions, false values.
        mod faults;
        /// The loops: from the hardware to the extender, and how often.
        mod loops;
        /// What is reported at once, and what waits.
        mod changes;
        /// Devices that are kubelet's.
        mod kubelet;
        /// What holds pods to their memory.
        mod isolation;
        mod lent;
        /// MIG instances on demand.
        mod mig;
        mod mig_nodes;
        mod mig_of_others;
        /// Daemons of MPS, and what holds their clients.
        mod mps;
        /// What pods use beyond their request, and memory of no known pod.
        mod guard;
        /// What the agent itself costs.
        mod cost;
        /// Containers without the driver.
        mod blind;
    }

    /// What the agent does about a driver that comes late, goes, or is slow.
    mod upkeep {
        #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

        /// It ends when its container has to be made again, and only then.
        mod ends;
        /// Slow and large nodes.
        mod slow;
        /// An agent without rights on GPUs in MIG mode.
        mod rights;
        /// It closes NVIDIA's library while the driver is replaced.
        mod driver_work;
        /// It runs as two processes, one of which has the driver.
        mod parts;
    }
}

/// All that is read from outside, whatever it says.
mod fuzz;

/// The commands, as their users run them.
mod commands {
    mod ask;
    mod clear;
    mod demo;
    pub(crate) mod doctor;
    mod init;
    mod simulate;
    mod snapshot;
    mod trace_parity;
}
