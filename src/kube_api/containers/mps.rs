//! Limits by MPS: what makes a container a client of the daemon of its GPU, and what it is told to take.
//!
//! Each GPU has a daemon of its own, with pipes in a folder of its own on the node, by which clients find
//! it. Which GPU it is stands in a variable that kubelet fills from the placement when the container
//! starts, and mounts may refer to variables. Shared memory, which daemons and clients need in common, is
//! one folder for all daemons of a node, since they may run in one container.
//!
//! All of it is co-operative: a program can take the variables out of its own environment.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{EnvVar, HostPathVolumeSource, PodSpec, Volume, VolumeMount};

use crate::config::allowed::{HostFolder, plain};
use crate::config::webhook::ThreadCap;
use crate::hardware::device::{ModelFilter, ModelName};
use crate::hardware::units::{Demand, MemMib, Share};
use crate::kube_api::containers::admission_error::AdmissionError;
use crate::kube_api::containers::container_view::{ContainerView, UUIDS_VARIABLE, literal, placed};
use crate::kube_api::request::placement::{DRIVER_MEMORY, MPS_MEMORY, MPS_THREADS};
use crate::kube_api::request::request_error::shown;
use crate::model::request::{Amount, GpuRequest, Isolation};

/// The volume with the folders of all daemons. Pods have no other use for the name.
pub(crate) const VOLUME: &str = "gpupack-mps";

/// Where a client finds its daemon.
pub(crate) const PIPE_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// What a client may take of the memory of each GPU.
pub(crate) const MEMORY_VARIABLE: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// Which part of the multiprocessors a client may use.
pub(crate) const THREADS_VARIABLE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// Where the pipes are inside of a container.
const PIPES: &str = "/run/gpupack-mps";
/// Where shared memory is inside of a container: the place cannot be chosen.
const SHARED_MEMORY: &str = "/dev/shm";

/// Percentages of multiprocessors on Hopper of which nothing bad is known, as ranges. Between them, on an
/// H200 with driver 580.178, matrix products of half precision were said to leave parts of their results
/// unwritten (a single report of October 2026, not confirmed by NVIDIA).
const CLEAN_ON_HOPPER: [(u64, u64); 4] = [(1, 13), (23, 27), (47, 51), (90, 100)];

/// Words of product names of GPUs of the Hopper generation.
const HOPPER: [&str; 5] = ["H100", "H200", "GH200", "H800", "H20"];

/// Whether the container of a request is to be a client of MPS: where it has neighbours on its device.
///
/// # Errors
/// [`AdmissionError::SeveralUnderMps`]: a process is the client of one daemon, which has one GPU.
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

/// The volume of a client. Where the folder is missing, nobody looks after daemons: then kubelet does not
/// start the pod, and says why.
pub(crate) fn volume(folder: &HostFolder) -> Volume {
    let path = folder.as_str().to_owned();
    let host_path = HostPathVolumeSource { path, type_: Some("Directory".to_owned()) };
    Volume { name: VOLUME.to_owned(), host_path: Some(host_path), ..Volume::default() }
}

/// The mounts of a client. With an empty variable the path would begin with `/`, which kubelet refuses.
pub(crate) fn mounts() -> [VolumeMount; 2] {
    let mount = |path: &str| VolumeMount {
        name: VOLUME.to_owned(),
        mount_path: path.to_owned(),
        ..VolumeMount::default()
    };
    let pipes = format!("$({UUIDS_VARIABLE})/pipe");
    [
        VolumeMount { sub_path_expr: Some(pipes), ..mount(PIPES) },
        VolumeMount { sub_path: Some("shm".to_owned()), ..mount(SHARED_MEMORY) },
    ]
}

/// Which of the `wanted` mounts a container lacks.
///
/// # Errors
/// [`AdmissionError::MpsMount`] where it mounts the volume in another way, or something else at or below
/// such a place.
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

/// Whether a pod has the volume of its clients already.
///
/// # Errors
/// [`AdmissionError::MpsVolume`] where another volume has its name.
pub(crate) fn has_volume(spec: &PodSpec, wanted: Option<&Volume>) -> Result<bool, AdmissionError> {
    let present = spec.volumes.iter().flatten().find(|volume| volume.name == VOLUME);
    match present {
        Some(present) if Some(present) != wanted => Err(AdmissionError::MpsVolume),
        present => Ok(present.is_some()),
    }
}

/// The limits of a container, of MPS or of the driver, that are written when its pod is placed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientLimits {
    annotations: BTreeMap<String, String>,
}

impl ClientLimits {
    /// The limits of a client that holds `demand` of a device of this model; none: not known.
    pub fn of(demand: Demand, model: Option<&ModelName>, cap: ThreadCap) -> Self {
        // By ordinal: an entry for a GPU that the process cannot see makes MPS drop all limits.
        let memory = (MPS_MEMORY, format!("0={}M", demand.memory.mib()));
        let threads = match cap {
            ThreadCap::None => None,
            ThreadCap::Share | ThreadCap::ShareOnHopper => {
                Some((MPS_THREADS, percent(demand.share, model, cap).to_string()))
            }
        };
        let all = std::iter::once(memory).chain(threads);
        Self { annotations: all.map(|(key, value)| (key.to_owned(), value)).collect() }
    }

    /// The limit of a container that the driver is to hold to so much of each of its GPUs.
    pub fn of_driver(memory: MemMib) -> Self {
        let limit = (DRIVER_MEMORY.to_owned(), memory.mib().to_string());
        Self { annotations: BTreeMap::from([limit]) }
    }

    /// They as annotations.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        self.annotations.clone()
    }
}

/// Percent of the multiprocessors for a share, rounded down, 1 at least: 0 would be no number of them.
fn percent(share: Share, model: Option<&ModelName>, cap: ThreadCap) -> u64 {
    let percent = (share.millionths() / 10_000).clamp(1, 100);
    let is_other = model.is_some_and(|model| !ModelFilter::new(HOPPER).matches(model));
    match cap {
        _ if is_other => percent,
        ThreadCap::None | ThreadCap::Share => 100,
        ThreadCap::ShareOnHopper => {
            let below = CLEAN_ON_HOPPER.into_iter().filter(|(first, _)| *first <= percent);
            below.map(|(_, last)| last.min(percent)).max().unwrap_or(1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(mib: u64, millionths: u64, model: Option<&str>, cap: ThreadCap) -> String {
        let share = Share::from_millionths(millionths);
        let model = model.map(ModelName::new);
        let demand = Demand { memory: MemMib::new(mib), share };
        let told = ClientLimits::of(demand, model.as_ref(), cap).annotations();
        let words: Vec<&str> = told.values().map(String::as_str).collect();
        words.join(" ")
    }

    #[test]
    fn memory_is_told_by_ordinal_and_in_mebibytes() {
        assert_eq!(limits(4_096, 250_000, None, ThreadCap::None), "0=4096M");
        let told = ClientLimits::of(Demand::ZERO, None, ThreadCap::None).annotations();
        assert_eq!(told.into_keys().collect::<Vec<_>>(), [MPS_MEMORY]);
        assert!(ClientLimits::default().annotations().is_empty());
    }

    #[test]
    fn compute_is_limited_where_nothing_bad_is_known_of_it() {
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

    #[test]
    fn on_hopper_percentages_are_rounded_down_to_clean_ones() {
        for (percent, clean) in [
            (1, 1),
            (13, 13),
            (14, 13),
            (22, 13),
            (23, 23),
            (27, 27),
            (46, 27),
            (50, 50),
            (52, 51),
            (89, 51),
            (90, 90),
            (100, 100),
        ] {
            let told = |model| limits(1, 10_000 * percent, model, ThreadCap::ShareOnHopper);
            for model in [Some("NVIDIA H200 NVL"), None] {
                assert_eq!(told(model), format!("0=1M {clean}"), "{percent} of {model:?}");
            }
            assert_eq!(told(Some("Tesla T4")), format!("0=1M {percent}"));
        }
    }
}
