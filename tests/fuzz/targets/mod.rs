//! All that gpupack reads from outside, as targets: what must hold whatever the bytes are. A target panics where
//! it does not hold.
//!
//! `tests/fuzz` searches for such bytes, guided by coverage. `tests/integration/fuzz.rs` replays the kept corpus
//! and changes it at random. So both include this file, and it uses nothing of either.

#![expect(clippy::unwrap_used, reason = "a target fails by panicking")]

/// The bodies of kube-scheduler's calls.
mod verbs;
/// Pods: requests, amounts, placements, admission.
mod pods;
/// What agents, replicas and the API server's proxy send.
mod clients;
/// Files, and answers of other programs.
mod files;

/// A target: the name of its corpus, and what it does with an input.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All targets.
pub(crate) const TARGETS: [Target; 14] = [
    ("filter", verbs::filter_and_prioritize),
    ("bind", verbs::bound),
    ("preempt", verbs::preempted),
    ("pod", pods::pod),
    ("request", pods::request),
    ("quantity", pods::quantity),
    ("placement", pods::placement),
    ("review", pods::review),
    ("report", clients::report),
    ("config", files::config),
    ("fleet", files::fleet),
    ("trace", files::trace),
    ("prometheus", files::prometheus),
    ("cgroup", files::cgroup),
];

/// Most bytes of an input. Limits of sizes have tests of their own, with inputs made for them.
pub(crate) const LONGEST_INPUT: usize = 16 << 10;
