//! Keys by which a pod requests, limits or chooses a GPU of another scheduler, or of kubelet.
//!
//! On a pod of ours gpupack does not follow them: `nvidia.com/gpu: 1` with HAMi's
//! `nvidia.com/gpumem: 4096` would silently become a whole GPU. So it refuses them and names the
//! key to use instead. It never compares parts of words. All of `nvidia.com/` counts; operators
//! list what is not a GPU there. Of other groups only names of GPUs count. Keys that only inform
//! are left alone, such as what other schedulers write about their decisions.

use std::collections::BTreeMap;

use crate::config::pods::requests::{RequestRules, is_like};
use crate::request::quantity::parse_count;
use crate::request::request_error::{RequestError, shown};
use crate::request::resources::{ContainerRequest, is_served};
use engine::model::request::{Amount, GpuRequest, Limit};
use wire::units::Share;

const MEMORY: &str = "write the annotation `gpu-memory` (MiB of one GPU)";
const SHARE: &str = "write the annotation `gpu-fraction` (0 to 1 of one GPU)";
const COUNT: &str = "write the annotation `gpu-fraction` (0 to 1), with `gpu-fraction-num-devices` \
    for several GPUs";
const MIG: &str = "request `nvidia.com/mig-<profile>`";
const NVIDIA: &str =
    "request `nvidia.com/gpu`, or write the annotation `gpu-fraction` or `gpu-memory`";
const OTHER_VENDOR: &str = "gpupack places only NVIDIA GPUs, so choose another `schedulerName`";
const MODEL: &str = "write the annotation `gpupack.dev/gpu-model`, such as `A100|H100`";
const DEVICE: &str =
    "gpupack chooses the GPU, and `gpupack.dev/gpu-model` the models, so write that";
const LIMIT: &str = "write the annotation `gpu-fraction.limit`, or `gpu-memory.limit`";
const TOPOLOGY: &str = "gpupack places a pod's GPUs near each other where possible, so ask for their \
    number";

/// Container resources that request GPUs elsewhere. The first pattern that matches applies.
const RESOURCES: [(&str, &str); 28] = [
    // HAMi, vgpu-manager, nos; then all other names of NVIDIA, except ours.
    ("nvidia.com/gpumem", MEMORY),
    ("nvidia.com/gpumem-percentage", SHARE),
    ("nvidia.com/gpucores", SHARE),
    ("nvidia.com/vgpu-memory", MEMORY),
    ("nvidia.com/vgpu-cores", SHARE),
    ("nvidia.com/vgpu-number", COUNT),
    ("nvidia.com/gpu-*", MEMORY),
    ("nvidia.com/*", NVIDIA),
    // gpushare.
    ("aliyun.com/gpu-mem", MEMORY),
    ("aliyun.com/gpu-*", SHARE),
    ("alibabacloud.com/gpu-mem", MEMORY),
    ("alibabacloud.com/gpu-*", SHARE),
    // Volcano: like HAMi, and its older form.
    ("volcano.sh/vgpu-memory", MEMORY),
    ("volcano.sh/vgpu-number", COUNT),
    ("volcano.sh/vgpu-*", SHARE),
    ("volcano.sh/gpu-memory", MEMORY),
    ("volcano.sh/gpu-number", COUNT),
    ("koordinator.sh/gpu-memory", MEMORY),
    ("koordinator.sh/gpu*", SHARE),
    ("elasticgpu.io/gpu-memory", MEMORY),
    ("elasticgpu.io/gpu-*", SHARE),
    // Tencent has two.
    ("tencent.com/vcuda-*", SHARE),
    ("tke.cloud.tencent.com/qgpu-*", SHARE),
    ("k8s.amazonaws.com/vgpu", SHARE),
    // InstaSlice.
    ("mig.das.com/*", MIG),
    ("amd.com/gpu*", OTHER_VENDOR),
    ("gpu.intel.com/*", OTHER_VENDOR),
    // kube-scheduler makes a ResourceClaim of it, and a DRA driver gives the device.
    ("deviceclass.resource.kubernetes.io/*", NVIDIA),
];

/// Annotations by which users request, limit or choose GPUs of other schedulers.
const ANNOTATIONS: [(&str, &str); 14] = [
    // HAMi and Volcano.
    ("nvidia.com/use-gpuuuid", DEVICE),
    ("nvidia.com/nouse-gpuuuid", DEVICE),
    ("nvidia.com/use-gputype", MODEL),
    ("nvidia.com/nouse-gputype", MODEL),
    // vgpu-manager.
    ("nvidia.com/include-gpu-uuid", DEVICE),
    ("nvidia.com/exclude-gpu-uuid", DEVICE),
    ("nvidia.com/include-gpu-type", MODEL),
    ("nvidia.com/exclude-gpu-type", MODEL),
    // gpushare in Alibaba's simulators and clusters.
    ("alibabacloud.com/gpu-milli", SHARE),
    ("alibabacloud.com/gpu-mem", MEMORY),
    ("alibabacloud.com/gpu-count", COUNT),
    ("alibabacloud.com/gpu-card-model", MODEL),
    // Koordinator, in both of its groups.
    ("scheduling.koordinator.sh/gpu-partition-spec", TOPOLOGY),
    ("koordinator.sh/gpu-partition-spec", TOPOLOGY),
];

/// Prefix of KAI's keys for a container, before its name. A part beginning with `gpu-` follows it.
const KAI_CONTAINER: &str = "kai.scheduler/container.";

/// A key of a pod that requests, limits or chooses a GPU of another scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OtherKey {
    /// A resource of a container.
    Resource {
        container: String,
        /// The full name of the resource.
        resource: String,
        instead: &'static str,
    },
    Annotation {
        key: String,
        instead: &'static str,
    },
}

/// The keys of a pod that concern GPUs of another scheduler; nearly every pod has none. A resource
/// with the amount zero does not count.
pub fn other_keys(
    annotations: &BTreeMap<String, String>,
    containers: &[ContainerRequest],
) -> Vec<OtherKey> {
    let resources = containers.iter().flat_map(|container| {
        let meant = container.resources.iter().filter(|(_, value)| parse_count(value) != Ok(0));
        meant.filter_map(|(resource, _)| {
            let instead = instead_of_resource(resource)?;
            let (container, resource) = (container.name.clone(), resource.clone());
            Some(OtherKey::Resource { container, resource, instead })
        })
    });
    let written = annotations.keys().filter_map(|key| {
        let instead = instead_of_annotation(key)?;
        Some(OtherKey::Annotation { key: key.clone(), instead })
    });
    resources.chain(written).collect()
}

fn instead_of_resource(resource: &str) -> Option<&'static str> {
    let found = RESOURCES.iter().find(|(pattern, _)| is_like(pattern, resource));
    found.filter(|_| !is_served(resource)).map(|(_, instead)| *instead)
}

fn instead_of_annotation(key: &str) -> Option<&'static str> {
    if let Some(rest) = key.strip_prefix(KAI_CONTAINER) {
        let (_, field) =
            rest.rsplit_once(".gpu-").filter(|(container, _)| !container.is_empty())?;
        return Some(if field.ends_with("limit") { LIMIT } else { MEMORY });
    }
    ANNOTATIONS.iter().find(|(known, _)| *known == key).map(|(_, instead)| *instead)
}

/// Refuses what the operator's rules forbid a pod of ours. `others` are its [`other_keys`].
///
/// # Errors
/// [`RequestError`].
pub fn check(
    rules: &RequestRules,
    request: Option<&GpuRequest>,
    others: &[OtherKey],
) -> Result<(), RequestError> {
    for other in others {
        match other {
            OtherKey::Resource { resource, .. } if rules.is_other(resource) => {}
            OtherKey::Resource { container, resource, instead } => {
                let (container, resource) = (shown(container), shown(resource));
                return Err(RequestError::OtherResource { container, resource, instead });
            }
            OtherKey::Annotation { key, instead } => {
                return Err(RequestError::OtherAnnotation { key: shown(key), instead });
            }
        }
    }
    let Some(request) = request else { return Ok(()) };
    if let Amount::Memory(memory) | Amount::FractionAndMemory(_, memory) =
        rules.meant(request).amount
        && memory < rules.min_memory
    {
        return Err(RequestError::SmallMemory { memory, least: rules.min_memory });
    }
    let share = match request.amount {
        Amount::Fraction(share) | Amount::FractionAndMemory(share, _) => share,
        Amount::Memory(_) | Amount::MigInstance(_) | Amount::SharedSlot => Share::ZERO,
        Amount::Whole => Share::WHOLE,
    };
    match request.limit {
        // A limit equal to the request gives nothing beyond it.
        Some(Limit::Fraction(limit)) if limit > rules.max_limit && limit > share => {
            Err(RequestError::LimitAboveMax { limit, most: rules.max_limit })
        }
        // The part that an amount of memory is depends on the GPU: the memory guard caps it there.
        Some(Limit::Fraction(_) | Limit::Memory(_)) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
