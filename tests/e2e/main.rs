//! End-to-end tests: the real etcd, kube-apiserver and kube-scheduler, the real `gpupack extender`
//! and `gpupack agent --simulate`, on one machine and without root.
//!
//! `cargo test --features e2e --test e2e`. The first run builds the control plane with Go
//! (minutes) and keeps it in a cache folder; see [`binaries`]. Without Go and without
//! `KUBEBUILDER_ASSETS` every test prints `skipped: … because …` and passes, unless
//! `GPUPACK_E2E_REQUIRED=1` is set.
//!
//! The scenarios of `scenarios/containers.rs` and its neighbors start containers too, on the real
//! kubelet with containerd: see [`node`]. They need root and some packages of Debian (`containerd`,
//! `runc`, `busybox-static`), and are skipped without; unless `GPUPACK_NODE_REQUIRED=1` is set.
//!
//! `scenarios/install.rs` walks from nothing to a running GPU pod on a whole cluster, as `docs/install.md`
//! says it; only with `GPUPACK_E2E_INSTALL=1`, or with `GPUPACK_INSTALL_REQUIRED=1`.
//!
//! `scenarios/kueue.rs` needs the real Kueue, which is built from its Go module; only with
//! `GPUPACK_E2E_KUEUE=1`, or with `GPUPACK_KUEUE_REQUIRED=1`.
//!
//! A scenario has a cluster for itself and starts by emptying it. Three run side by side, each on a control
//! plane of its own, which serves others after it; what measures runs alone. `--test-threads=6` lets others
//! wait that need the one node, or a control plane.
//!
//! `GPUPACK_THROUGHPUT` makes a measurement at thousands of nodes of `scenarios/throughput.rs`, which is
//! small without it; `GPUPACK_E2E_BINARY` names another build of gpupack to test, for figures a release
//! build.
//!
//! What is judged is judged by [`checker`], which reads pods from the API server and GPUs from the
//! fleet file, and nothing that gpupack reports.

// `cfg(test)` is always true here; it shows clippy that these modules are test code.
#[cfg(test)]
#[path = "../harness/authority.rs"]
mod authority;
#[cfg(test)]
mod binaries;
#[cfg(test)]
#[path = "../page/browser.rs"]
mod browser;
#[cfg(test)]
#[path = "../harness/chart.rs"]
mod chart;
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
mod identities;
#[cfg(test)]
mod kept;
#[cfg(test)]
mod kubelet;
#[cfg(test)]
mod kueue;
#[cfg(test)]
mod leash;
#[cfg(test)]
mod manifests;
/// Images, as the builder of gpupack's own writes them.
#[cfg(test)]
#[path = "../../deploy/images/oci.rs"]
mod oci;
#[cfg(test)]
mod pods;
#[cfg(test)]
mod posted;
#[cfg(test)]
mod proxy;
#[cfg(test)]
mod relay;
#[cfg(test)]
mod replicas;
#[cfg(test)]
mod scene;
#[cfg(test)]
mod schedulers;
#[cfg(test)]
mod testbed;
#[cfg(test)]
#[path = "../../deploy/images/tree.rs"]
mod tree;
#[cfg(test)]
mod watching;
#[cfg(test)]
mod webhook;

/// A node that runs containers: the real kubelet and containerd, in separate namespaces.
#[cfg(test)]
mod node {
    pub(crate) mod alone;
    pub(crate) mod cage;
    pub(crate) mod driver;
    pub(crate) mod image;
    pub(crate) mod machine;
    pub(crate) mod network;
    pub(crate) mod programs;
    pub(crate) mod runtime;
    pub(crate) mod toolkit;
}

#[cfg(test)]
mod scenarios;
