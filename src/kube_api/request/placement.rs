//! The keys that gpupack writes on a pod when it places it, and what they say.
//!
//! Annotations go out with the Binding, so that device and node become true in one write:
//! [`DEVICES`] is what the container runtime takes, [`UUIDS`] and [`MEMORY_MIB`] are what the
//! workload is told, [`PLACEMENT`] is what the books are rebuilt from. A placement means something only on a pod that has a node.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};

use serde::{Deserialize, Serialize};

use crate::hardware::device::{DeviceId, MAX_DEVICE_MEMORY, NodeName};
use crate::hardware::pool::Protection;
use crate::hardware::units::{Demand, MemMib, Share};
use crate::kube_api::request::request_error::{RequestError, shown};
use crate::model::request::MAX_DEVICES_PER_POD;
use crate::model::reservation::{PlacedDevice, Placement};

/// Prefix of the keys that only gpupack writes.
pub const PLACED_PREFIX: &str = "placed.gpupack.dev/";
/// The devices in the form that the container runtime takes: CDI names, separated by commas.
pub const DEVICES: &str = "placed.gpupack.dev/devices";
/// The UUIDs of the devices, separated by commas: for the workload, as NVIDIA's runtime overwrites
/// the variable that it reads the devices from.
pub const UUIDS: &str = "placed.gpupack.dev/uuids";
/// Booked memory per device in whole MiB; the least where devices differ, because a container has
/// one limit for all its devices.
pub const MEMORY_MIB: &str = "placed.gpupack.dev/memory-mib";
/// What the driver is to hold each container to on each of its GPUs, in MiB; none on MIG instances, of which
/// the driver takes no limits.
pub const DRIVER_MEMORY: &str = "placed.gpupack.dev/driver-memory-limit";
/// What a client of MPS may take of its GPU, as MPS reads it: `0=4096M`. Where MPS is in use.
pub const MPS_MEMORY: &str = "placed.gpupack.dev/mps-memory-limit";
/// Percent of the multiprocessors that a client of MPS may use; 100 is no limit. Where MPS limits compute.
pub const MPS_THREADS: &str = "placed.gpupack.dev/mps-thread-percentage";
/// Devices and amounts as compact, versioned JSON.
pub const PLACEMENT: &str = "placed.gpupack.dev/placement";
/// Written to wake a waiting pod, to make a late Binding fail, and with a placement; its value says which
/// process did so ([`TouchMaker`]), the rest of it only makes it differ from the one before.
pub const TOUCH: &str = "placed.gpupack.dev/touch";

/// Kind of device in front of the UUID in a CDI name.
const CDI_KIND: &str = "runtime.nvidia.com/gpu=";
/// The version that is written, and the only one that is read.
const VERSION: u64 = 1;
/// Longest annotation value that is read or written. The most that [`encode`] can produce is about
/// 64 devices x 150 bytes.
const MAX_VALUE_BYTES: usize = 16 << 10;

/// The process of gpupack that wrote a touch. Processes that started later are greater.
///
/// Anyone who may write a pod may write any value there; that holds up that pod alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TouchMaker {
    started_unix_seconds: u64,
    random: u64,
}

/// A digest of a touch, of which only equality matters.
pub(crate) fn touch_digest(touch: Option<&String>) -> u64 {
    let mut hasher = DefaultHasher::new();
    touch.hash(&mut hasher);
    hasher.finish()
}

impl TouchMaker {
    /// The maker of a value that names none: earlier than every process.
    const UNKNOWN: Self = Self { started_unix_seconds: 0, random: 0 };

    /// A process that started at this time. A random number separates it from others of that second.
    pub fn new(started_unix_seconds: u64) -> Self {
        Self { started_unix_seconds, random: RandomState::new().hash_one(TOUCH) }
    }

    /// The maker of a touch with this value.
    pub fn of(value: &str) -> Self {
        let number = |hex| u64::from_str_radix(hex, 16).ok();
        let parts = value.split_once(' ').and_then(|(maker, _)| maker.split_once('-'));
        let read = parts.and_then(|(started, random)| {
            Some(Self { started_unix_seconds: number(started)?, random: number(random)? })
        });
        read.unwrap_or(Self::UNKNOWN)
    }

    /// The value of a touch by this process; `text` makes it differ from its others.
    pub fn value(&self, text: &str) -> String {
        format!("{:x}-{:x} {text}", self.started_unix_seconds, self.random)
    }
}

/// Why placement annotations are not written or not believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// One of the two annotations is missing.
    #[error("annotation `{missing}` is missing beside `{present}`")]
    Incomplete {
        /// The annotation that is there.
        present: &'static str,
        /// The annotation that is not.
        missing: &'static str,
    },
    /// Longer than any placement can be.
    #[error("annotation `{key}` has `{bytes}` bytes, at most {MAX_VALUE_BYTES} are believed")]
    TooLong {
        /// The annotation.
        key: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// No JSON of the expected shape.
    #[error("annotation `{PLACEMENT}` cannot be read: {fault}")]
    Json {
        /// What the JSON parser says.
        fault: String,
    },
    /// A version that this program does not know.
    #[error("annotation `{PLACEMENT}` has version `{version}`, version {VERSION} is understood")]
    Version {
        /// The version found.
        version: u64,
    },
    /// No device, or more than a pod may have.
    #[error("a placement on `{count}` devices is not believed: 1 to {MAX_DEVICES_PER_POD} can be")]
    Count {
        /// How many are named.
        count: usize,
    },
    /// A device id that cannot be one.
    #[error("device id `{id}` is not a UUID of NVML")]
    DeviceId {
        /// The offending text.
        id: String,
    },
    /// The same device twice.
    #[error("device `{id}` is placed on twice")]
    Twice {
        /// The device.
        id: DeviceId,
    },
    /// An amount that no device has.
    #[error(
        "`{mib}` MiB and `{share}` millionths of device `{id}` are not believed: up to {max} MiB \
         and 1000000 millionths can be, not both zero",
        max = MAX_DEVICE_MEMORY.mib()
    )]
    Amount {
        /// The device.
        id: DeviceId,
        /// Memory in MiB.
        mib: u64,
        /// Share in millionths.
        share: u64,
    },
    /// The two annotations name different devices.
    #[error("annotation `{DEVICES}` is `{devices}`, which are not the devices of `{PLACEMENT}`")]
    Disagreement {
        /// The value of the devices annotation, cut.
        devices: String,
    },
}

impl PlacementError {
    /// Short name for metrics; a closed set.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Incomplete { .. } => "incomplete",
            Self::TooLong { .. } => "too_long",
            Self::Json { .. } => "json",
            Self::Version { .. } => "version",
            Self::Count { .. } => "count",
            Self::DeviceId { .. } => "device_id",
            Self::Twice { .. } => "twice",
            Self::Amount { .. } => "amount",
            Self::Disagreement { .. } => "disagreement",
        }
    }
}

#[derive(Serialize, Deserialize)]
struct WirePlacement {
    v: u64,
    devices: Vec<WireDevice>,
    #[serde(default)]
    protection: WireProtection,
}

#[derive(Serialize, Deserialize)]
struct WireDevice {
    id: String,
    mib: u64,
    share: u64,
}

/// A word that a newer writer may add is read as no protection: the tenant must be booked anyway,
/// and nothing that is not understood may be promised.
#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WireProtection {
    Hardware,
    Driver,
    Mps,
    #[default]
    #[serde(other)]
    None,
}

/// The version alone, for a text whose other fields may have changed their meaning.
#[derive(Deserialize)]
struct WireVersion {
    v: u64,
}

/// The annotations of a placement.
///
/// # Errors
/// [`PlacementError`] for a placement that [`decode`] would refuse: what is written once cannot be
/// taken back, and the API server checks nothing of a Binding.
pub fn encode(placement: &Placement) -> Result<BTreeMap<String, String>, PlacementError> {
    check(&placement.devices)?;
    let wire = WirePlacement {
        v: VERSION,
        devices: placement.devices.iter().map(wire_device).collect(),
        protection: match placement.protection {
            Protection::None => WireProtection::None,
            Protection::Mps => WireProtection::Mps,
            Protection::Driver => WireProtection::Driver,
            Protection::Hardware => WireProtection::Hardware,
        },
    };
    let json = serde_json::to_string(&wire)
        .map_err(|error| PlacementError::Json { fault: error.to_string() })?;
    let least = placement.devices.iter().map(|device| device.demand.memory.mib()).min();
    let written = [
        (DEVICES, cdi_names(&placement.devices)),
        (UUIDS, uuids(&placement.devices)),
        (MEMORY_MIB, least.unwrap_or_default().to_string()),
        (PLACEMENT, json),
    ];
    for (key, value) in &written {
        check_length(key, value)?;
    }
    Ok(written.map(|(key, value)| (key.to_owned(), value)).into())
}

/// The placement that the annotations of a pod on `node` tell of; `None` where it has none.
///
/// Fields that are not known are ignored: a newer gpupack may have written them. The amounts alone
/// are enough: a user who takes the list of devices away does not thereby free their room.
///
/// # Errors
/// [`PlacementError`] where the annotations are there and cannot be believed.
pub fn decode(
    annotations: &BTreeMap<String, String>,
    node: &NodeName,
) -> Result<Option<Placement>, PlacementError> {
    let (json, devices) = match (annotations.get(PLACEMENT), annotations.get(DEVICES)) {
        (None, None) => return Ok(None),
        (None, Some(_)) => return Err(incomplete(DEVICES, PLACEMENT)),
        (Some(json), devices) => (json, devices),
    };
    check_length(PLACEMENT, json)?;
    let fault =
        |error: serde_json::Error| PlacementError::Json { fault: shown(&error.to_string()) };
    let version = serde_json::from_str::<WireVersion>(json).map_err(fault)?.v;
    if version != VERSION {
        return Err(PlacementError::Version { version });
    }
    let wire: WirePlacement = serde_json::from_str(json).map_err(fault)?;
    let placed = wire.devices.iter().map(placed_device).collect::<Result<Vec<_>, _>>()?;
    check(&placed)?;
    if let Some(devices) = devices {
        check_length(DEVICES, devices)?;
        if cdi_names(&placed) != *devices {
            return Err(PlacementError::Disagreement { devices: shown(devices) });
        }
    }
    let protection = match wire.protection {
        WireProtection::None => Protection::None,
        WireProtection::Mps => Protection::Mps,
        WireProtection::Driver => Protection::Driver,
        WireProtection::Hardware => Protection::Hardware,
    };
    Ok(Some(Placement { node: node.clone(), devices: placed, protection }))
}

/// Refuses a pod without a node whose annotations or labels carry a key that only gpupack writes.
///
/// [`TOUCH`] is let through: it is written to pods that wait.
///
/// # Errors
/// [`RequestError::ReservedKey`] with the first such key.
pub fn refuse_reserved_keys<'a>(
    keys: impl IntoIterator<Item = &'a String>,
) -> Result<(), RequestError> {
    match keys.into_iter().find(|key| key.starts_with(PLACED_PREFIX) && *key != TOUCH) {
        Some(key) => Err(RequestError::ReservedKey { key: shown(key) }),
        None => Ok(()),
    }
}

fn incomplete(present: &'static str, missing: &'static str) -> PlacementError {
    PlacementError::Incomplete { present, missing }
}

fn check_length(key: &'static str, value: &str) -> Result<(), PlacementError> {
    match value.len() {
        bytes if bytes > MAX_VALUE_BYTES => Err(PlacementError::TooLong { key, bytes }),
        _ => Ok(()),
    }
}

/// What must hold for devices that are written and for devices that were read.
fn check(devices: &[PlacedDevice]) -> Result<(), PlacementError> {
    let count = devices.len();
    if u32::try_from(count).map_or(true, |count| count == 0 || count > MAX_DEVICES_PER_POD) {
        return Err(PlacementError::Count { count });
    }
    let mut seen = BTreeSet::new();
    for PlacedDevice { id, demand } in devices {
        let absurd = demand.memory > MAX_DEVICE_MEMORY || demand.share > Share::WHOLE;
        if absurd || *demand == Demand::ZERO {
            return Err(PlacementError::Amount {
                id: id.clone(),
                mib: demand.memory.mib(),
                share: demand.share.millionths(),
            });
        }
        if !seen.insert(id) {
            return Err(PlacementError::Twice { id: id.clone() });
        }
    }
    Ok(())
}

fn wire_device(device: &PlacedDevice) -> WireDevice {
    WireDevice {
        id: device.id.as_str().to_owned(),
        mib: device.demand.memory.mib(),
        share: device.demand.share.millionths(),
    }
}

fn placed_device(wire: &WireDevice) -> Result<PlacedDevice, PlacementError> {
    let id =
        DeviceId::new(&wire.id).map_err(|_| PlacementError::DeviceId { id: shown(&wire.id) })?;
    let demand =
        Demand { memory: MemMib::new(wire.mib), share: Share::from_millionths(wire.share) };
    Ok(PlacedDevice { id, demand })
}

fn cdi_names(devices: &[PlacedDevice]) -> String {
    let names: Vec<String> = devices.iter().map(|d| format!("{CDI_KIND}{}", d.id)).collect();
    names.join(",")
}

fn uuids(devices: &[PlacedDevice]) -> String {
    let uuids: Vec<&str> = devices.iter().map(|device| device.id.as_str()).collect();
    uuids.join(",")
}

#[cfg(test)]
mod tests;
