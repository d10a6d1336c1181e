//! The agent against a stand-in for NVIDIA's library (`tests/fake_nvml`): what it reads, what becomes
//! of faults, and its loops.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

/// What is read of devices that work.
mod inventory;
/// What events and the driver's wishes make of a device.
mod health;
/// Every error of every call, functions that are missing, lies.
mod faults;
/// The loops: from the hardware to the extender, and how often.
mod loops;
/// Devices that are kubelet's.
mod kubelet;
/// What holds pods to their memory.
mod protection;
/// Daemons of MPS, and what holds their clients.
mod mps;
/// What is used outside of the books.
mod guard;
/// What the agent itself costs.
mod cost;
/// A node of its own for each test.
mod world;
/// An extender for the agent to report to.
mod extender;
/// The agent as a process.
mod process;
