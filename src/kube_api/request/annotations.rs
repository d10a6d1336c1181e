//! How a pod requests a GPU: all annotations that users write, and their only parser.
//!
//! The webhook, the verbs, the watch and a restart all read pods with [`parse_request`], so they
//! agree. The annotations that gpupack writes are in [`crate::request::placement`].
//!
//! Rules beyond the single values. They make sure that a typo is never silently ignored:
//!
//! - On any pod, an annotation under `gpupack.dev/`, or one that begins with `gpu-fraction` or
//!   `gpu-memory`, is refused if it is not listed here. So is an unknown field of NVIDIA's prefix.
//! - An annotation that only qualifies a request (limit, count, container, model, policy,
//!   isolation) is refused without a request: the user wants a GPU and would get none.
//! - Two annotations for one quantity must have the same value.
//! - A container resource of `0` is the same as none. One container may name one kind.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::request::annotation_values::{
    device_count, fraction, isolation, mebibytes, models, movable, policy, quantity,
};
use crate::request::request_error::{RequestError, shown};
use crate::request::resources::{ContainerRequest, ResourceRequest, not_longer, resource_request};
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest, Isolation, Limit, MAX_GROUP, Movable, PodGroup};
use wire::device::ModelFilter;
use wire::units::{MemMib, Share};

/// A share of one GPU.
pub const FRACTION: &str = "gpu-fraction";
/// Memory of one GPU in MiB.
pub const MEMORY: &str = "gpu-memory";
/// Upper limit of the share.
pub const FRACTION_LIMIT: &str = "gpu-fraction.limit";
/// The same in Run:ai's spelling.
pub const FRACTION_LIMIT_HYPHEN: &str = "gpu-fraction-limit";
/// Upper limit of the memory, a quantity with a unit.
pub const MEMORY_LIMIT: &str = "gpu-memory.limit";
/// The same in Run:ai's spelling, in MiB.
pub const MEMORY_LIMIT_HYPHEN: &str = "gpu-memory-limit";
/// The number of distinct GPUs of one node.
pub const DEVICE_COUNT: &str = "gpu-fraction-num-devices";
/// The container that gets the GPU.
pub const CONTAINER: &str = "gpu-fraction-container-name";
/// Prefix of our own annotations.
pub const OWN_PREFIX: &str = "gpupack.dev/";
/// Accepted GPU models.
pub const MODEL: &str = "gpupack.dev/gpu-model";
/// Policy of this pod.
pub const POLICY: &str = "gpupack.dev/policy";
/// Weakest accepted isolation.
pub const ISOLATION: &str = "gpupack.dev/isolation";
/// The group of pods that start together.
pub const GROUP: &str = "gpupack.dev/group";
/// The number of its pods.
pub const GROUP_SIZE: &str = "gpupack.dev/group-size";
/// Whether the pod may be moved on its node.
pub const MOVABLE: &str = "gpupack.dev/movable";
/// How long its container may take to end when it is moved.
pub const MOVE_GRACE: &str = "gpupack.dev/move-grace-seconds";
/// Our own annotations.
const OWN_KEYS: [&str; 7] = [MODEL, POLICY, ISOLATION, GROUP, GROUP_SIZE, MOVABLE, MOVE_GRACE];
/// Prefix of NVIDIA's annotations for a container: `nvidia.com/container.<c>.gpu-memory.request`.
const CONTAINER_PREFIX: &str = "nvidia.com/container.";
/// Longest time in which a container that is moved may end, in seconds.
pub const MAX_MOVE_GRACE: u32 = 30;
const CONTAINER_REQUEST: &str = "request";
const CONTAINER_LIMIT: &str = "limit";
/// Longest name of a container, in bytes: the maximum of Kubernetes.
const MAX_CONTAINER: usize = 63;

/// The annotations without a domain.
const BARE_KEYS: [&str; 8] = [
    FRACTION,
    MEMORY,
    FRACTION_LIMIT,
    FRACTION_LIMIT_HYPHEN,
    MEMORY_LIMIT,
    MEMORY_LIMIT_HYPHEN,
    DEVICE_COUNT,
    CONTAINER,
];
const KNOWN_BARE_KEYS: &str = "`gpu-fraction`, `gpu-memory`, `gpu-fraction.limit`, \
    `gpu-memory.limit`, `gpu-fraction-num-devices` and `gpu-fraction-container-name`";
const KNOWN_OWN_KEYS: &str = "`gpupack.dev/gpu-model`, `gpupack.dev/policy`, \
    `gpupack.dev/isolation`, `gpupack.dev/group`, `gpupack.dev/group-size`, `gpupack.dev/movable` and \
    `gpupack.dev/move-grace-seconds`";
const KNOWN_CONTAINER_KEYS: &str = "`nvidia.com/container.<container>.gpu-memory.request` and \
    `nvidia.com/container.<container>.gpu-memory.limit`";

/// What a pod requests: `None` if it requests no GPU.
///
/// It ignores annotations under `placed.gpupack.dev/`: see
/// [`refuse_reserved_keys`](crate::request::placement::refuse_reserved_keys).
///
/// # Errors
/// The first [`RequestError`] found.
pub fn parse_request(
    annotations: &BTreeMap<String, String>,
    containers: &[ContainerRequest],
) -> Result<Option<GpuRequest>, RequestError> {
    let keys = Keys { annotations, containers };
    keys.refuse_unknown()?;
    let resource = resource_request(containers)?;
    let request = match (keys.amount()?, resource) {
        (Some(_), Some(resource)) => return Err(keys.two_kinds(&resource)),
        (Some(amount), None) => keys.shared_request(amount)?,
        (None, Some(resource)) => keys.whole_request(resource)?,
        (None, None) => {
            keys.refuse_orphans()?;
            return Ok(None);
        }
    };
    parse_group(annotations)?;
    parse_move_grace(annotations)?;
    not_longer("container name", request.container.as_deref().unwrap_or_default(), MAX_CONTAINER)?;
    Ok(Some(GpuRequest {
        models: keys.models()?,
        isolation: keys.isolation()?,
        policy: keys.policy()?,
        movable: keys.movable()?,
        ..request
    }))
}

/// The group of a pod, if it is in one.
///
/// # Errors
/// [`RequestError::Group`].
pub fn parse_group(
    annotations: &BTreeMap<String, String>,
) -> Result<Option<PodGroup>, RequestError> {
    let (name, size) = (annotations.get(GROUP), annotations.get(GROUP_SIZE));
    if name.is_none() && size.is_none() {
        return Ok(None);
    }
    let count =
        size.and_then(|size| size.parse().ok()).filter(|count| (2..=MAX_GROUP).contains(count));
    match (name.filter(|name| is_group_name(name)), count) {
        (Some(name), Some(size)) => Ok(Some(PodGroup { name: name.as_str().into(), size })),
        _ => Err(RequestError::Group {
            name: shown(name.map_or("", String::as_str)),
            size: shown(size.map_or("", String::as_str)),
        }),
    }
}

fn is_group_name(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

/// How many seconds the container of a pod may take to end when it is moved, if the pod says so.
///
/// # Errors
/// [`RequestError::MoveGrace`]; also on a pod that may not be moved.
pub fn parse_move_grace(
    annotations: &BTreeMap<String, String>,
) -> Result<Option<u32>, RequestError> {
    let Some(text) = annotations.get(MOVE_GRACE) else { return Ok(None) };
    let is_movable = annotations.get(MOVABLE).is_some_and(|value| value == "restart");
    let seconds = text.parse().ok().filter(|seconds| *seconds <= MAX_MOVE_GRACE && is_movable);
    seconds.map(Some).ok_or_else(|| RequestError::MoveGrace { value: shown(text) })
}

/// A parsed annotation, with its text for messages.
#[derive(Clone, Copy)]
struct Given<'a, T> {
    key: &'a str,
    text: &'a str,
    value: T,
}

/// The amount per device that the annotations give, in parts, to check the limits.
struct SharedAmount<'a> {
    share: Option<Given<'a, Share>>,
    memory: Option<Given<'a, MemMib>>,
    memory_limit: Option<Given<'a, MemMib>>,
}

#[derive(Clone, Copy)]
struct Keys<'a> {
    annotations: &'a BTreeMap<String, String>,
    containers: &'a [ContainerRequest],
}

impl<'a> Keys<'a> {
    fn text(&self, key: &str) -> Option<(&'a str, &'a str)> {
        self.annotations.get_key_value(key).map(|(key, text)| (key.as_str(), text.as_str()))
    }

    fn parsed<T>(
        &self,
        key: &str,
        parse: fn(&'a str, &'a str) -> Result<T, RequestError>,
    ) -> Result<Option<Given<'a, T>>, RequestError> {
        self.text(key)
            .map(|(key, text)| parse(key, text).map(|value| Given { key, text, value }))
            .transpose()
    }

    fn refuse_unknown(&self) -> Result<(), RequestError> {
        for key in self.annotations.keys().map(String::as_str) {
            if key.starts_with(OWN_PREFIX) && !OWN_KEYS.contains(&key) {
                return unknown(key, KNOWN_OWN_KEYS);
            }
            let is_bare = key.starts_with(FRACTION) || key.starts_with(MEMORY);
            if is_bare && !BARE_KEYS.contains(&key) {
                return unknown(key, KNOWN_BARE_KEYS);
            }
            if let Some((_, field)) = container_key(key)
                && ![CONTAINER_REQUEST, CONTAINER_LIMIT].contains(&field)
            {
                return unknown(key, KNOWN_CONTAINER_KEYS);
            }
        }
        Ok(())
    }

    /// The amounts per device; `None` if no annotation requests part of a GPU.
    fn amount(&self) -> Result<Option<SharedAmount<'a>>, RequestError> {
        self.named_container()?;
        let share = self.parsed(FRACTION, fraction)?;
        let of_container = self.container_memory(CONTAINER_REQUEST)?;
        let container_limit = self.container_memory(CONTAINER_LIMIT)?;
        let memory = agreed(self.parsed(MEMORY, mebibytes)?, of_container)?;
        let memory = memory.or(container_limit);
        let memory_limit = agreed(
            self.parsed(MEMORY_LIMIT, quantity)?,
            self.parsed(MEMORY_LIMIT_HYPHEN, mebibytes)?,
        )?;
        let memory_limit = agreed(memory_limit, container_limit)?;
        let is_request = share.is_some() || memory.is_some();
        Ok(is_request.then_some(SharedAmount { share, memory, memory_limit }))
    }

    /// The memory of NVIDIA's annotation that ends in `field`. There is one at most: see
    /// [`Keys::named_container`].
    fn container_memory(&self, field: &str) -> Result<Option<Given<'a, MemMib>>, RequestError> {
        let mut annotations = self.annotations.iter();
        let found =
            annotations.find(|(key, _)| container_key(key).is_some_and(|(_, own)| own == field));
        let Some((key, text)) = found else { return Ok(None) };
        Ok(Some(Given { key, text, value: quantity(key, text)? }))
    }

    fn shared_request(&self, requested: SharedAmount<'a>) -> Result<GpuRequest, RequestError> {
        let amount = match (requested.share, requested.memory) {
            (Some(share), Some(memory)) => Amount::FractionAndMemory(share.value, memory.value),
            (Some(share), None) if share.value == Share::WHOLE => Amount::Whole,
            (Some(share), None) => Amount::Fraction(share.value),
            (None, Some(memory)) => Amount::Memory(memory.value),
            (None, None) => unreachable!("an amount has a share or memory"),
        };
        let count = self.parsed(DEVICE_COUNT, device_count)?;
        let mut request =
            GpuRequest::several(amount, count.map_or(NonZeroU32::MIN, |count| count.value));
        request.container = self.container()?;
        request.limit = self.limit(&requested)?;
        Ok(request)
    }

    fn whole_request(&self, resource: ResourceRequest<'a>) -> Result<GpuRequest, RequestError> {
        for key in [DEVICE_COUNT, FRACTION_LIMIT, FRACTION_LIMIT_HYPHEN] {
            self.refuse_orphan(key)?;
        }
        for key in [MEMORY_LIMIT, MEMORY_LIMIT_HYPHEN] {
            self.refuse_orphan(key)?;
        }
        if let Some(named) = self.container()?
            && *named != *resource.container
        {
            return Err(RequestError::TwoKinds {
                key: CONTAINER.to_owned(),
                value: shown(&named),
                container: shown(resource.container),
                resource: shown(resource.resource),
            });
        }
        let mut request = GpuRequest::several(resource.amount, resource.count);
        request.container = Some(resource.container.into());
        Ok(request)
    }

    fn limit(&self, requested: &SharedAmount<'a>) -> Result<Option<Limit>, RequestError> {
        let share_limit = agreed(
            self.parsed(FRACTION_LIMIT, fraction)?,
            self.parsed(FRACTION_LIMIT_HYPHEN, fraction)?,
        )?;
        let share_limit = checked_limit(share_limit, requested.share, FRACTION)?;
        let memory_limit = checked_limit(requested.memory_limit, requested.memory, MEMORY)?;
        match (share_limit, memory_limit) {
            (Some(share), Some(memory)) => Err(disagreement(&share, &memory)),
            (Some(share), None) => Ok(Some(Limit::Fraction(share.value))),
            (None, Some(memory)) => Ok(Some(Limit::Memory(memory.value))),
            (None, None) => Ok(None),
        }
    }

    /// The container that the annotations name: all of them the same one.
    fn named_container(&self) -> Result<Option<Given<'a, &'a str>>, RequestError> {
        let mut named = self.text(CONTAINER).map(|(key, text)| Given { key, text, value: text });
        for (key, text) in self.annotations {
            if let Some((container, _)) = container_key(key) {
                match named {
                    Some(first) if first.value != container => {
                        return Err(RequestError::SeveralContainers {
                            key: shown(first.key),
                            container: shown(first.value),
                            other_key: shown(key),
                            other_container: shown(container),
                        });
                    }
                    _ => named = Some(Given { key, text, value: container }),
                }
            }
        }
        Ok(named)
    }

    /// The container that the annotations name, which the pod must have.
    fn container(&self) -> Result<Option<Arc<str>>, RequestError> {
        let Some(named) = self.named_container()? else { return Ok(None) };
        if self.containers.iter().any(|container| container.name == named.value) {
            return Ok(Some(named.value.into()));
        }
        let known: Vec<String> =
            self.containers.iter().take(16).map(|c| format!("`{}`", shown(&c.name))).collect();
        Err(RequestError::Container {
            key: shown(named.key),
            value: shown(named.value),
            known: known.join(", "),
        })
    }

    fn models(&self) -> Result<ModelFilter, RequestError> {
        Ok(self.parsed(MODEL, models)?.map_or_else(ModelFilter::default, |given| given.value))
    }

    fn policy(&self) -> Result<Option<Policy>, RequestError> {
        Ok(self.parsed(POLICY, policy)?.map(|given| given.value))
    }

    fn isolation(&self) -> Result<Isolation, RequestError> {
        Ok(self.parsed(ISOLATION, isolation)?.map_or(Isolation::None, |given| given.value))
    }

    fn movable(&self) -> Result<Movable, RequestError> {
        Ok(self.parsed(MOVABLE, movable)?.map_or(Movable::Never, |given| given.value))
    }

    /// Refuses every annotation that qualifies a request, on a pod without one.
    fn refuse_orphans(&self) -> Result<(), RequestError> {
        for key in BARE_KEYS.into_iter().chain(OWN_KEYS) {
            self.refuse_orphan(key)?;
        }
        Ok(())
    }

    fn refuse_orphan(&self, key: &str) -> Result<(), RequestError> {
        self.text(key).map_or(Ok(()), |(key, text)| {
            Err(RequestError::Orphan { key: shown(key), value: shown(text) })
        })
    }

    fn two_kinds(&self, resource: &ResourceRequest<'_>) -> RequestError {
        let first = self
            .annotations
            .iter()
            .find(|(key, _)| *key == FRACTION || *key == MEMORY || container_key(key).is_some());
        let (key, text) = first.expect("some annotation requests part of a GPU");
        RequestError::TwoKinds {
            key: shown(key),
            value: shown(text),
            container: shown(resource.container),
            resource: shown(resource.resource),
        }
    }
}

fn unknown(key: &str, known: &'static str) -> Result<(), RequestError> {
    Err(RequestError::UnknownKey { key: shown(key), known })
}

/// Container and field of an annotation of NVIDIA's memory family, `None` for any other.
fn container_key(key: &str) -> Option<(&str, &str)> {
    key.strip_prefix(CONTAINER_PREFIX)?.split_once(".gpu-memory.")
}

/// The value of either spelling of a quantity. If both are present they must be equal.
fn agreed<'a, T: PartialEq>(
    one: Option<Given<'a, T>>,
    other: Option<Given<'a, T>>,
) -> Result<Option<Given<'a, T>>, RequestError> {
    match (one, other) {
        (Some(one), Some(other)) if one.value != other.value => Err(disagreement(&one, &other)),
        (one, other) => Ok(one.or(other)),
    }
}

/// `limit`, if there is a `request` in `request_key` that is not above it.
fn checked_limit<'a, T: PartialOrd>(
    limit: Option<Given<'a, T>>,
    request: Option<Given<'a, T>>,
    request_key: &str,
) -> Result<Option<Given<'a, T>>, RequestError> {
    let Some(limit) = limit else { return Ok(None) };
    let (key, value) = (shown(limit.key), shown(limit.text));
    match request {
        None => Err(RequestError::LimitStyle { key, value, missing: request_key.to_owned() }),
        Some(request) if limit.value < request.value => {
            Err(RequestError::LimitBelowRequest { key, value, request: shown(request.text) })
        }
        Some(_) => Ok(Some(limit)),
    }
}

fn disagreement<T, U>(one: &Given<'_, T>, other: &Given<'_, U>) -> RequestError {
    RequestError::Disagreement {
        key: shown(one.key),
        value: shown(one.text),
        other_key: shown(other.key),
        other_value: shown(other.text),
    }
}

#[cfg(test)]
mod tests;
