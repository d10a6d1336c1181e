//! End-to-end tests: the real etcd, kube-apiserver and kube-scheduler, the real `gpupack extender`
//! and `gpupack agent --simulate`, on one machine and without root.
//!
//! `cargo test --features e2e --test e2e`. The first run builds the control plane with Go
//! (minutes) and keeps it in a cache folder; see [`binaries`]. Without Go and without
//! `KUBEBUILDER_ASSETS` every test prints `skipped: … because …` and passes, unless
//! `GPUPACK_E2E_REQUIRED=1` is set.
//!
//! One control plane serves all tests of a run, and [`testbed::scenario`] lets only one test run
//! at a time: each has the cluster for itself and starts by emptying it. `--test-threads` makes no
//! difference.
//!
//! What is judged is judged by [`checker`], which reads pods from the API server and GPUs from the
//! fleet file, and nothing of gpupack's own account.

// `cfg(test)` is always true here; it tells clippy that these modules are test code.
#[cfg(test)]
mod binaries;
#[cfg(test)]
mod checker;
#[cfg(test)]
mod clock;
#[cfg(test)]
mod cluster;
#[cfg(test)]
mod control_plane;
#[cfg(test)]
mod extender;
#[cfg(test)]
mod fleet;
#[cfg(test)]
mod leash;
#[cfg(test)]
mod manifests;
#[cfg(test)]
mod pods;
#[cfg(test)]
mod proxy;
#[cfg(test)]
mod schedulers;
#[cfg(test)]
mod testbed;
#[cfg(test)]
mod watching;
#[cfg(test)]
mod webhook;

#[cfg(test)]
mod scenarios;
