//! What the tests of `tests/integration` share; nothing here is a test.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

/// An API server with the objects of an installation.
pub(crate) mod fake_cluster;
/// Settings, devices, pods and requests in few words.
pub(crate) mod ledger;
/// Random histories of a small cluster, and a player of them.
pub(crate) mod histories;
/// An extender behind its router, and the recorded bodies.
pub(crate) mod extender;
/// A CA of a test.
pub(crate) mod authority;
/// The Helm chart, rendered.
pub(crate) mod chart;
/// An API server that loses and refuses.
pub(crate) mod fake_api_server;

/// An API server with any objects.
pub(crate) mod objects;

/// The log of one test.
pub(crate) mod log;

/// The shipped core in steps.
pub(crate) mod steps;

/// One after another, for tests that measure.
pub(crate) mod turns;

/// What an agent has around it.
pub(crate) mod agent {
    /// A node of its own for each test.
    pub(crate) mod bed;
    /// An extender for the agent to report to.
    pub(crate) mod extender;
    /// A replica that orders MIG instances.
    pub(crate) mod orders;
    /// The agent as a process.
    pub(crate) mod process;
}
