//! Limits by MPS: what makes a container a client of its GPU's daemon, and what it may take.
//!
//! Each GPU has its own daemon, with pipes in a folder of its own on the node. Kubelet sets a
//! variable with the GPU from the placement when the container starts, and mounts may refer to
//! variables. All daemons of a node share one folder of shared memory with their clients, because
//! they may run in one container.
//!
//! All of this is cooperative: a program can remove the variables from its own environment.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{EnvVar, HostPathVolumeSource, PodSpec, Volume, VolumeMount};

use crate::config::allowed::{HostFolder, plain};
use crate::config::webhook::ThreadCap;
use crate::containers::admission_error::AdmissionError;
use crate::containers::container_view::{ContainerView, UUIDS_VARIABLE, literal, placed};
use crate::request::placement::{DRIVER_MEMORY, DRIVER_SOFT_MEMORY, MPS_MEMORY, MPS_THREADS};
use crate::request::request_error::shown;
use engine::model::request::{Amount, GpuRequest, Isolation};
use wire::device::ModelFilter;
use wire::ids::ModelName;
use wire::units::{Demand, MemMib, Share};

/// The volume with the folders of all daemons. No other volume of a pod may have this name.
pub(crate) const VOLUME: &str = "gpupack-mps";

/// The folder where a client finds its daemon.
pub(crate) const PIPE_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// The memory of each GPU that a client may take.
pub(crate) const MEMORY_VARIABLE: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// The percentage of the SMs that a client may use.
pub(crate) const THREADS_VARIABLE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// The folder of the pipes inside a container.
const PIPES: &str = "/run/gpupack-mps";
/// The folder of shared memory inside a container; its path is fixed.
const SHARED_MEMORY: &str = "/dev/shm";

/// Parts of product names of Hopper GPUs.
const HOPPER: [&str; 5] = ["H100", "H200", "GH200", "H800", "H20"];

/// Whether the container of a request becomes an MPS client: if its device can have other tenants.
///
/// # Errors
/// [`AdmissionError::SeveralUnderMps`]: a process is a client of one daemon, which has one GPU.
pub(crate) fn is_client(request: &GpuRequest) -> Result<bool, AdmissionError> {
    let is_part = match request.amount {
        Amount::Fraction(_)
        | Amount::Memory(_)
        | Amount::FractionAndMemory(..)
        | Amount::SharedSlot => request.isolation != Isolation::Hardware,
        Amount::Whole | Amount::MigInstance(_) => false,
    };
    match request.count.get() {
        count if is_part && count > 1 => Err(AdmissionError::SeveralUnderMps { count }),
        _ => Ok(is_part),
    }
}

/// The variables of a client.
pub(crate) fn variables(cap: ThreadCap) -> Vec<EnvVar> {
    let mut all = vec![literal(PIPE_VARIABLE, PIPES), placed(MEMORY_VARIABLE, MPS_MEMORY)];
    if cap != ThreadCap::None {
        all.push(placed(THREADS_VARIABLE, MPS_THREADS));
    }
    all
}

/// The volume of a client. If its folder is missing, no agent runs daemons there: then kubelet does
/// not start the pod, and says why.
pub(crate) fn volume(folder: &HostFolder) -> Volume {
    let path = folder.as_str().to_owned();
    let host_path = HostPathVolumeSource { path, type_: Some("Directory".to_owned()) };
    Volume { name: VOLUME.to_owned(), host_path: Some(host_path), ..Volume::default() }
}

/// The mounts of a client. If the variable is empty the path begins with `/`, which kubelet
/// refuses.
pub(crate) fn mounts() -> [VolumeMount; 2] {
    let pipes = format!("$({UUIDS_VARIABLE})/pipe");
    [
        VolumeMount { sub_path_expr: Some(pipes), ..mount(PIPES) },
        VolumeMount { sub_path: Some("shm".to_owned()), ..mount(SHARED_MEMORY) },
    ]
}

fn mount(path: &str) -> VolumeMount {
    VolumeMount { name: VOLUME.to_owned(), mount_path: path.to_owned(), ..VolumeMount::default() }
}

/// The mounts of `wanted` that a container lacks.
///
/// # Errors
/// [`AdmissionError::MpsMount`] if it mounts the volume differently, or something else at or below
/// the path of such a mount.
pub(crate) fn missing_mounts(
    container: &ContainerView<'_>,
    wanted: &[VolumeMount],
) -> Result<Vec<VolumeMount>, AdmissionError> {
    for mount in container.mounts.iter().filter(|mount| !wanted.contains(*mount)) {
        let place = plain(&mount.mount_path);
        let is_there = |ours: &VolumeMount| {
            let rest = place.strip_prefix(&ours.mount_path);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if mount.name == VOLUME || wanted.iter().any(is_there) {
            let (container, path) = (shown(container.name), shown(&mount.mount_path));
            return Err(AdmissionError::MpsMount { container, path });
        }
    }
    Ok(wanted.iter().filter(|mount| !container.mounts.contains(*mount)).cloned().collect())
}

/// Whether a pod already has the volume of MPS clients.
///
/// # Errors
/// [`AdmissionError::MpsVolume`] if another volume has its name.
pub(crate) fn has_volume(spec: &PodSpec, wanted: Option<&Volume>) -> Result<bool, AdmissionError> {
    let present = spec.volumes.iter().flatten().find(|volume| volume.name == VOLUME);
    match present {
        Some(present) if Some(present) != wanted => Err(AdmissionError::MpsVolume),
        present => Ok(present.is_some()),
    }
}

/// The limits of a container, by MPS or the driver, which are written when its pod is placed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientLimits {
    annotations: BTreeMap<String, String>,
}

impl ClientLimits {
    /// The limits of a client with `demand` of a device of this model; `None` if it is not known.
    pub fn of(demand: Demand, model: Option<&ModelName>, cap: ThreadCap) -> Self {
        // By ordinal: an entry for a GPU that the process cannot see makes MPS drop all limits.
        let memory = (MPS_MEMORY, format!("0={}M", demand.memory.mib()));
        let threads = match cap {
            ThreadCap::None => None,
            ThreadCap::Share => Some((MPS_THREADS, percent(demand.share, model).to_string())),
        };
        let all = std::iter::once(memory).chain(threads);
        Self { annotations: all.map(|(key, value)| (key.to_owned(), value)).collect() }
    }

    /// The memory limit that the driver applies to a container on each of its GPUs.
    pub fn of_driver(memory: MemMib) -> Self {
        let limits = [(DRIVER_MEMORY, memory), (DRIVER_SOFT_MEMORY, MemMib::ZERO)];
        let limits = limits.map(|(key, amount)| (key.to_owned(), amount.mib().to_string()));
        Self { annotations: limits.into() }
    }

    /// The limits as annotations.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        self.annotations.clone()
    }
}

/// Percent of the SMs for a share, rounded down, at least 1; 100 on Hopper, or an unknown model.
fn percent(share: Share, model: Option<&ModelName>) -> u64 {
    let is_other = model.is_some_and(|model| !ModelFilter::new(HOPPER).matches(model));
    if is_other { (share.millionths() / 10_000).clamp(1, 100) } else { 100 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(mib: u64, millionths: u64, model: Option<&str>, cap: ThreadCap) -> String {
        let share = Share::from_millionths(millionths);
        let model = model.map(ModelName::new);
        let demand = Demand { memory: MemMib::new(mib), share };
        let annotations = ClientLimits::of(demand, model.as_ref(), cap).annotations();
        let words: Vec<&str> = annotations.values().map(String::as_str).collect();
        words.join(" ")
    }

    #[test]
    fn memory_limits_are_set_by_ordinal_and_in_mebibytes() {
        assert_eq!(limits(4_096, 250_000, None, ThreadCap::None), "0=4096M");
        let annotations = ClientLimits::of(Demand::ZERO, None, ThreadCap::None).annotations();
        assert_eq!(annotations.into_keys().collect::<Vec<_>>(), [MPS_MEMORY]);
        assert!(ClientLimits::default().annotations().is_empty());
    }

    #[test]
    fn compute_is_limited_unless_a_problem_is_known() {
        let (a100, h200) = (Some("NVIDIA A100-SXM4-80GB"), Some("NVIDIA H200"));
        let share = ThreadCap::Share;
        for (millionths, model, percent) in [
            (250_000, a100, "25"),
            (259_999, a100, "25"),
            (1, a100, "1"),
            (0, a100, "1"),
            (1_000_000, a100, "100"),
            (250_000, h200, "100"),
            (250_000, Some("NVIDIA H100 80GB HBM3"), "100"),
            (250_000, Some("NVIDIA GH200 480GB"), "100"),
            (250_000, None, "100"),
        ] {
            assert_eq!(limits(1, millionths, model, share), format!("0=1M {percent}"), "{model:?}");
        }
    }
}
