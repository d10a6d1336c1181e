//! Parsers for the values of single annotations, each with its own error.

use std::num::NonZeroU32;

use crate::request::quantity::{parse_fraction, parse_memory_with_unit, parse_whole};
use crate::request::request_error::{MAX_MODEL_FILTER, MAX_MODELS, RequestError, shown};
use engine::model::policy::Policy;
use engine::model::request::{Isolation, MAX_DEVICES_PER_POD, Movable};
use wire::device::ModelFilter;
use wire::ids::MAX_DEVICE_MEMORY;
use wire::units::{MemMib, Share};

/// A share above zero, up to a whole GPU.
pub(crate) fn fraction(key: &str, text: &str) -> Result<Share, RequestError> {
    match parse_fraction(text) {
        Ok(share) if share > Share::ZERO => Ok(share),
        _ => Err(RequestError::Fraction { key: shown(key), value: shown(text) }),
    }
}

/// Memory above zero in whole MiB, up to the largest device.
pub(crate) fn mebibytes(key: &str, text: &str) -> Result<MemMib, RequestError> {
    match parse_whole(text).map(MemMib::new) {
        Ok(memory) if memory > MemMib::ZERO && memory <= MAX_DEVICE_MEMORY => Ok(memory),
        _ => Err(RequestError::MemoryMib { key: shown(key), value: shown(text) }),
    }
}

/// Memory above zero with its unit, up to the largest device.
pub(crate) fn quantity(key: &str, text: &str) -> Result<MemMib, RequestError> {
    match parse_memory_with_unit(text) {
        Ok(memory) if memory > MemMib::ZERO && memory <= MAX_DEVICE_MEMORY => Ok(memory),
        _ => Err(RequestError::MemoryQuantity { key: shown(key), value: shown(text) }),
    }
}

/// A count of devices, from 1 to the maximum of a pod.
pub(crate) fn device_count(key: &str, text: &str) -> Result<NonZeroU32, RequestError> {
    parse_whole(text)
        .ok()
        .and_then(|count| u32::try_from(count).ok())
        .filter(|count| *count <= MAX_DEVICES_PER_POD)
        .and_then(NonZeroU32::new)
        .ok_or_else(|| RequestError::DeviceCount { key: shown(key), value: shown(text) })
}

/// Names of GPU models between `|`. Blanks around them are ignored.
pub(crate) fn models(key: &str, text: &str) -> Result<ModelFilter, RequestError> {
    let names = text.split('|').map(|name| name.trim_matches(' '));
    let is_legal = text.len() <= MAX_MODEL_FILTER
        && names.clone().count() <= MAX_MODELS
        && names.clone().all(ModelFilter::is_name);
    if is_legal {
        Ok(ModelFilter::new(names))
    } else {
        Err(RequestError::Model { key: shown(key), value: shown(text) })
    }
}

pub(crate) fn policy(key: &str, text: &str) -> Result<Policy, RequestError> {
    text.parse().map_err(|_| RequestError::Policy { key: shown(key), value: shown(text) })
}

pub(crate) fn isolation(key: &str, text: &str) -> Result<Isolation, RequestError> {
    text.parse().map_err(|_| RequestError::Isolation { key: shown(key), value: shown(text) })
}

pub(crate) fn movable(_key: &str, text: &str) -> Result<Movable, RequestError> {
    match text {
        "never" => Ok(Movable::Never),
        "restart" => Ok(Movable::Restart),
        _ => Err(RequestError::Movable { value: shown(text) }),
    }
}
