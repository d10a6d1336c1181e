//! Names of nodes, pools, models, pods, MIG profiles and devices, and how much of a node there may be.

use std::fmt;
use std::sync::Arc;

use crate::units::MemMib;

/// Most devices that one node may report: twice the room of 16 GPUs with 7 MIG instances each.
pub const MAX_DEVICES_PER_NODE: usize = 256;

/// Most device classes of one node: some times what a node with all MIG profiles of two models has.
pub const MAX_CLASSES_PER_NODE: usize = 64;

/// Most places at which the MIG profiles of the GPUs of one node may begin, all together. A GPU has 40 at most in 2026.
pub const MAX_MIG_PLACES: usize = 4_096;

/// Largest accepted memory of one device: 16 TiB, about 50 times the largest GPU of 2026.
pub const MAX_DEVICE_MEMORY: MemMib = MemMib::new(16 << 20);

/// Whether this is a valid name of a Kubernetes object.
pub fn is_name(text: &str) -> bool {
    (1..=253).contains(&text.len())
        && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'))
}

/// Declares a cheap, ordered name type: a shared string that is only compared and printed.
macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Wraps the name as it is, unchecked.
            pub fn new(name: impl Into<Arc<str>>) -> Self {
                Self(name.into())
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

name_type! {
    /// Name of a node in Kubernetes.
    NodeName
}
name_type! {
    /// Value of the configured pool label of a node; empty if the node has none.
    PoolName
}
name_type! {
    /// Product name of a GPU as NVML reports it, for instance `NVIDIA A100-SXM4-80GB`.
    ModelName
}
name_type! {
    /// UID of a pod, as the API server gave it.
    PodUid
}
name_type! {
    /// Name of a MIG profile without the prefix, for instance `3g.40gb`.
    MigProfile
}

/// A text that is no UUID of a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("device id `{id}` is not a UUID of NVML: 1 to 96 letters, digits, `-` or `/` are allowed")]
pub struct NotAUuid {
    /// The text, cut to 96 characters.
    pub id: String,
}

/// UUID of a device as NVML reports it (`GPU-…` or `MIG-…`).
///
/// Only ASCII letters, digits, `-` and `/` (old MIG form), at most 96 characters. It is part of an
/// annotation value and of a CDI device name, where commas and spaces have a meaning.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(Arc<str>);

impl DeviceId {
    /// Checks and wraps a UUID.
    ///
    /// # Errors
    /// [`NotAUuid`] if it is empty, too long or has other characters.
    pub fn new(id: &str) -> Result<Self, NotAUuid> {
        let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'/';
        if id.is_empty() || id.len() > 96 || !id.bytes().all(is_legal) {
            let shown: String = id.chars().take(96).collect();
            return Err(NotAUuid { id: shown });
        }
        Ok(Self(id.into()))
    }

    /// The UUID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl MigProfile {
    /// Whether a request for `self` means this profile. Resource names have no `+`, so NVIDIA's
    /// device plugin writes `1g.10gb.me` for `1g.10gb+me`.
    pub fn means(&self, profile: &Self) -> bool {
        self == profile || *self.0 == profile.0.replace('+', ".")
    }

    /// The name without the variant, and the variant: `1g.10gb` and `+me` of `1g.10gb+me`.
    pub fn parts(&self) -> (&str, &str) {
        let end = self.as_str().find("gb").map_or(self.as_str().len(), |at| at + "gb".len());
        self.as_str().split_at(end)
    }

    /// The name without the variant.
    pub fn plain(&self) -> &str {
        self.parts().0
    }

    /// Whether it is named as NVIDIA names profiles: `2g.20gb`, perhaps with a variant such as `+me`.
    pub fn has_usual_name(&self) -> bool {
        let (plain, variant) = self.parts();
        let numbers = plain.strip_suffix("gb").and_then(|rest| rest.split_once("g."));
        let is_plain =
            numbers.is_some_and(|(slices, memory)| is_positive(slices) && is_positive(memory));
        is_plain && ["", "+me", "+me.all", "-me", "+gfx", ".me"].contains(&variant)
    }

    /// Whether it has the media engines, which one instance of a GPU may have.
    pub fn has_media(&self) -> bool {
        let variant = self.parts().1;
        ["+me", ".me"].iter().any(|media| variant.starts_with(media))
    }
}

fn is_positive(text: &str) -> bool {
    text.parse::<u64>().is_ok_and(|number| number > 0)
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_id_cannot_carry_a_separator() {
        for bad in ["", "GPU-a,GPU-b", "GPU a", "GPU-é", &"x".repeat(97)] {
            assert!(DeviceId::new(bad).is_err(), "{bad}");
        }
        assert!(DeviceId::new("MIG-GPU-0f3c/1/0").is_ok());
    }
}
