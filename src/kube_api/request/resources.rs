//! Whole devices, as the resources of a container request them.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use crate::request::quantity::parse_count;
use crate::request::request_error::{RequestError, shown};
use engine::model::charge::{Charge, Prices};
use engine::model::request::{Amount, GpuRequest, MAX_DEVICES_PER_POD};
use wire::ids::MigProfile;

/// Whole GPUs.
pub const WHOLE: &str = "nvidia.com/gpu";
/// Slots of a GPU, in pools that are configured with replicas.
pub const SHARED_SLOT: &str = "nvidia.com/gpu.shared";
/// Prefix of MIG instances, before the profile.
pub const MIG_PREFIX: &str = "nvidia.com/mig-";

/// Longest profile of a MIG instance, in bytes; `1g.10gb.me.all` is a long one.
const MAX_PROFILE: usize = 64;

/// Marker that admission adds: the requested share in millionths of a GPU. No node advertises it.
/// It makes a scheduler call gpupack for the pod, and a ResourceQuota can count it.
pub const MARKER_SHARE: &str = "gpupack.dev/gpu-share";
/// The same for the requested memory, in MiB.
pub const MARKER_MEMORY: &str = "gpupack.dev/gpu-memory";
/// The same for the number of devices.
pub const MARKER_DEVICES: &str = "gpupack.dev/gpus";
/// The share weighed by model, where the operator gives models weights.
pub const MARKER_EQUIVALENTS: &str = "gpupack.dev/gpu-equivalents";
/// All markers.
pub const MARKERS: [&str; 4] = [MARKER_SHARE, MARKER_MEMORY, MARKER_DEVICES, MARKER_EQUIVALENTS];

/// The markers of a pod with this request, and their amounts.
pub(crate) fn markers(
    request: &GpuRequest,
    prices: &Prices,
) -> impl Iterator<Item = (&'static str, u64)> {
    let Charge { share, memory, devices, equivalents } = prices.charge(request);
    let all = MARKERS.into_iter().zip([share, memory, devices, equivalents]);
    let is_weighted = prices.are_weighted();
    all.filter(move |(marker, _)| is_weighted || *marker != MARKER_EQUIVALENTS)
}

/// A marker that says less than a request counts.
pub(crate) struct ShortMarker {
    pub(crate) marker: &'static str,
    pub(crate) has: u64,
    pub(crate) needed: u64,
}

/// The first marker of a pod that says less than its request counts. `written` are its
/// [`markers_of`].
pub(crate) fn short_marker(
    request: &GpuRequest,
    prices: &Prices,
    written: [u64; MARKERS.len()],
) -> Option<ShortMarker> {
    let all = markers(request, prices).zip(written);
    let mut all = all.map(|((marker, needed), has)| ShortMarker { marker, has, needed });
    all.find(|marker| marker.has < marker.needed)
}

/// The markers of a pod, as written. A quota counts those of all containers; no sound pod has them
/// on more than one.
pub(crate) fn markers_of(containers: &[ContainerRequest]) -> [u64; MARKERS.len()] {
    MARKERS.map(|marker| {
        let amounts = containers.iter().filter_map(|container| container.resources.get(marker));
        amounts.filter_map(|amount| parse_count(amount).ok()).max().unwrap_or(0)
    })
}

/// The whole devices that a pod requests.
pub(crate) struct ResourceRequest<'a> {
    pub(crate) container: &'a str,
    pub(crate) resource: &'a str,
    /// What the pod gets of each device.
    pub(crate) amount: Amount,
    pub(crate) count: NonZeroU32,
}

/// The GPU resource that a container of the pod names; `None` if no container names one. An amount
/// of zero names nothing.
///
/// # Errors
/// [`RequestError::SeveralRequests`] for a second one, [`RequestError::ResourceCount`] for an amount out
/// of range, [`RequestError::LongName`] for a MIG profile longer than any that exists.
pub(crate) fn resource_request(
    containers: &[ContainerRequest],
) -> Result<Option<ResourceRequest<'_>>, RequestError> {
    let mut found: Option<ResourceRequest<'_>> = None;
    for container in containers {
        for (resource, value) in &container.resources {
            let Some((amount, max)) = kind_of(resource) else { continue };
            let Some(count) = count_of(container, resource, value, max)? else { continue };
            if let Some(profile) = resource.strip_prefix(MIG_PREFIX) {
                not_longer("MIG profile", profile, MAX_PROFILE)?;
            }
            let requested = ResourceRequest { container: &container.name, resource, amount, count };
            if let Some(first) = found {
                return Err(several(&first, &requested));
            }
            found = Some(requested);
        }
    }
    Ok(found)
}

/// Whether a container requests a GPU resource that `is_meant`, with an amount other than zero.
pub(crate) fn has_request(container: &ContainerRequest, is_meant: impl Fn(&str) -> bool) -> bool {
    let mut amounts = container.resources.iter();
    amounts.any(|(resource, value)| {
        kind_of(resource).is_some() && is_meant(resource) && parse_count(value) != Ok(0)
    })
}

/// Whether gpupack serves this container resource.
pub(crate) fn is_served(resource: &str) -> bool {
    kind_of(resource).is_some()
}

/// The container, of its resources only those that are ours.
pub(crate) fn only(
    container: &ContainerRequest,
    is_ours: impl Fn(&str) -> bool,
) -> ContainerRequest {
    let mut only = container.clone();
    only.resources.retain(|resource, _| is_ours(resource));
    only
}

/// What one unit of a resource is and how many a pod may request; `None` for other resources.
fn kind_of(resource: &str) -> Option<(Amount, u32)> {
    match resource {
        WHOLE => Some((Amount::Whole, MAX_DEVICES_PER_POD)),
        SHARED_SLOT => Some((Amount::SharedSlot, 1)),
        _ => resource
            .strip_prefix(MIG_PREFIX)
            .filter(|profile| !profile.is_empty())
            .map(|profile| (Amount::MigInstance(MigProfile::new(profile)), MAX_DEVICES_PER_POD)),
    }
}

fn count_of(
    container: &ContainerRequest,
    resource: &str,
    value: &str,
    max: u32,
) -> Result<Option<NonZeroU32>, RequestError> {
    let count = parse_count(value).ok().and_then(|count| u32::try_from(count).ok());
    count.filter(|count| *count <= max).map(NonZeroU32::new).ok_or_else(|| {
        RequestError::ResourceCount {
            container: shown(&container.name),
            resource: shown(resource),
            value: shown(value),
            max,
        }
    })
}

/// Refuses a name longer than any that exists, because the ledger keeps it with the request.
pub(crate) fn not_longer(what: &'static str, name: &str, most: usize) -> Result<(), RequestError> {
    match name.len() <= most {
        true => Ok(()),
        false => Err(RequestError::LongName { what, value: shown(name), most }),
    }
}

fn several(first: &ResourceRequest<'_>, other: &ResourceRequest<'_>) -> RequestError {
    RequestError::SeveralRequests {
        container: shown(first.container),
        resource: shown(first.resource),
        other_container: shown(other.container),
        other_resource: shown(other.resource),
    }
}

/// The list of a pod that has the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerKind {
    /// `spec.initContainers`, sidecars included.
    Init,
    /// `spec.containers`.
    Regular,
}

/// A container, reduced to what a request needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerRequest {
    pub name: String,
    pub kind: ContainerKind,
    /// Its resources, with amounts as written: the limits, and requests that have no limit.
    pub resources: BTreeMap<String, String>,
}
