//! The annotations that gpupack writes on a pod when it places it.
//!
//! They go out with the Binding, so that node and devices become true in one write: [`DEVICES`] for
//! the container runtime, [`UUIDS`] and [`MEMORY_MIB`] for the workload, [`PLACEMENT`] to rebuild
//! the ledger. A placement has a meaning only on a pod that has a node.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::request::request_error::{RequestError, shown};
use engine::hardware::pool::ConfiguredIsolation;
use engine::hardware::spots::Spot;
use engine::model::request::MAX_DEVICES_PER_POD;
use engine::model::reservation::{Guest, MoveHome, PlacedDevice, Placement};
use wire::device::MAX_UNITS;
use wire::ids::{DeviceId, MAX_DEVICE_MEMORY, MigProfile, NodeName};
use wire::json_object;
use wire::json_object::JsonObject;
use wire::units::{Demand, MemMib, Share};

/// Prefix of the keys that only gpupack writes.
pub const PLACED_PREFIX: &str = "placed.gpupack.dev/";
/// The devices for the container runtime: CDI names, separated by commas.
pub const DEVICES: &str = "placed.gpupack.dev/devices";
/// The UUIDs of the devices, separated by commas, for the workload: NVIDIA's runtime overwrites the
/// variable that it reads the devices from.
pub const UUIDS: &str = "placed.gpupack.dev/uuids";
/// Allocated memory per device in whole MiB. If devices differ it is the least, because a container
/// has one limit for all its devices.
pub const MEMORY_MIB: &str = "placed.gpupack.dev/memory-mib";
/// The memory limit for each container on each of its GPUs, in MiB, which the driver applies. None
/// on MIG instances: the driver takes no limits for them.
pub const DRIVER_MEMORY: &str = "placed.gpupack.dev/driver-memory-limit";
/// The memory that the driver guarantees to each container: none. Written with the limit for pods that the version
/// before admitted with `soft_limits`: the container toolkit does not start them without it.
pub const DRIVER_SOFT_MEMORY: &str = "placed.gpupack.dev/driver-memory-soft-limit";
/// The memory limit of an MPS client on its GPU, in MPS's form: `0=4096M`. Only where MPS is used.
pub const MPS_MEMORY: &str = "placed.gpupack.dev/mps-memory-limit";
/// Percent of the SMs that an MPS client may use; 100 is no limit. Only where MPS limits compute.
pub const MPS_THREADS: &str = "placed.gpupack.dev/mps-thread-percentage";
/// Devices and amounts as compact, versioned JSON.
pub const PLACEMENT: &str = "placed.gpupack.dev/placement";
/// Written to requeue a waiting pod, to fence a late Binding, and with a placement. Its value names
/// the process that wrote it ([`FenceWriter`]); the rest makes it differ from the last one.
pub const FENCE: &str = "placed.gpupack.dev/fence";
/// Which room is being made for a waiting pod, from the first eviction on: see
/// [`crate::request::room_note`]. It means nothing on a pod with a node.
pub const HOLD: &str = "placed.gpupack.dev/hold";
/// What [`FENCE`] was called before. Processes of that time wrote it on each waiting pod, and users
/// may not remove it; it means nothing any more.
pub(crate) const OLD_FENCE: &str = "placed.gpupack.dev/touch";

/// Kind of device before the UUID in a CDI name.
const CDI_KIND: &str = "runtime.nvidia.com/gpu=";
/// The version that is written, and the only one that can be read.
const VERSION: u64 = 1;
/// Longest annotation value that is read or written. [`encode`] produces at most about 64 devices x
/// 150 bytes, and twice that if they are MIG instances that gpupack makes.
const MAX_VALUE_BYTES: usize = 32 << 10;

/// Longest name of a MIG profile; the longest of 2026 have 16 bytes.
const MAX_PROFILE_BYTES: usize = 64;

/// The process of gpupack that wrote [`FENCE`]. Those of later terms are greater.
///
/// A client that may write a pod can write any value there; this delays only that pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FenceWriter {
    /// The seconds since 1970 when its term began, or more: it grows from term to term.
    term: u64,
    random: u64,
}

/// A digest of the value of [`FENCE`]; only equality matters.
pub(crate) fn fence_digest(fence: Option<&String>) -> u64 {
    let mut hasher = DefaultHasher::new();
    fence.hash(&mut hasher);
    hasher.finish()
}

impl FenceWriter {
    /// Stands for a value that names no process: it is earlier than every process.
    const UNKNOWN: Self = Self { term: 0, random: 0 };

    /// A process that writes in this term. A random number separates processes of one second.
    pub fn new(term: u64, random: u64) -> Self {
        Self { term, random }
    }

    /// The number of its term.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// A random number for a process.
    pub fn random() -> u64 {
        RandomState::new().hash_one(FENCE)
    }

    /// The process that wrote this value.
    pub fn of(value: &str) -> Self {
        Self::read(value).unwrap_or(Self::UNKNOWN)
    }

    fn read(value: &str) -> Option<Self> {
        let (term, random) = value.split_once(' ')?.0.split_once('-')?;
        let term = u64::from_str_radix(term, 16).ok()?;
        Some(Self { term, random: u64::from_str_radix(random, 16).ok()? })
    }

    /// Whether the version before this one wrote a placement on a bound pod with this value: this one says `placed`.
    pub fn is_of_version_before(value: &str) -> bool {
        value.ends_with(" placement")
    }

    /// The value that this process writes; `text` makes it differ from its other values.
    pub fn value(&self, text: &str) -> String {
        format!("{:x}-{:x} {text}", self.term, self.random)
    }
}

/// Why gpupack does not write or does not trust placement annotations.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The devices are there without the placement.
    #[error("annotation `{missing}` is missing beside `{present}`")]
    Incomplete {
        /// The annotation that is there.
        present: &'static str,
        /// The annotation that is not.
        missing: &'static str,
    },
    /// A value that is longer than that of any placement.
    #[error("annotation `{key}` has `{bytes}` bytes, at most {MAX_VALUE_BYTES} are allowed")]
    TooLong { key: &'static str, bytes: usize },
    /// Text that is not JSON of the expected form.
    #[error("annotation `{PLACEMENT}` cannot be read: {fault}")]
    Json {
        /// What the JSON parser says.
        fault: String,
    },
    /// A version that this program cannot read.
    #[error(
        "annotation `{PLACEMENT}` has version `{version}`, only version {VERSION} is supported"
    )]
    Version { version: u64 },
    /// No device, or more than a pod may have.
    #[error("a placement on `{count}` devices is not allowed: 1 to {MAX_DEVICES_PER_POD} are")]
    Count { count: usize },
    /// Text that cannot be a device id.
    #[error("device id `{id}` is not a UUID of NVML")]
    DeviceId { id: String },
    #[error("device `{id}` appears twice in a placement")]
    Twice { id: DeviceId },
    /// An amount of zero, or more than any device has.
    #[error(
        "`{mib}` MiB and `{share}` millionths of device `{id}` are not allowed: up to {max} MiB \
         and 1000000 millionths can be, not both zero",
        max = MAX_DEVICE_MEMORY.mib()
    )]
    Amount {
        id: DeviceId,
        /// Memory in MiB.
        mib: u64,
        share: u64,
    },
    /// A guest with several devices.
    #[error("a pod that runs elsewhere than at home has one device, not `{count}`")]
    Guest { count: usize },
    /// A MIG instance that is not made yet.
    #[error("a MIG instance of the placement is not made yet")]
    NotMade,
    /// A place of a MIG instance that no GPU has.
    #[error("a MIG instance `{profile}` at unit {start} is not allowed")]
    Spot {
        profile: String,
        /// The first unit.
        start: u32,
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
            Self::Guest { .. } => "guest",
            Self::NotMade => "not_made",
            Self::Spot { .. } => "spot",
            Self::Disagreement { .. } => "disagreement",
        }
    }
}

#[derive(Serialize, Deserialize)]
struct WirePlacement {
    v: u64,
    #[serde(deserialize_with = "json_object::list")]
    devices: Vec<WireDevice>,
    #[serde(default, deserialize_with = "isolation", serialize_with = "name_of")]
    isolation: Option<ConfiguredIsolation>,
    /// What `isolation` was called before.
    #[serde(default, deserialize_with = "isolation", skip_serializing)]
    protection: Option<ConfiguredIsolation>,
    /// The device that it is allocated, if `devices` has the one where it is a guest. Older readers
    /// allocate it the latter, which has room for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    home: Option<Vec<String>>,
    /// Its move home, which may not have happened yet.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    moved: Option<WireMove>,
    /// Where the MIG instance lies on which it is a guest.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    guest_mig: Option<WireSpot>,
}

#[derive(Serialize, Deserialize)]
struct WireMove {
    from: Vec<String>,
    container: String,
    cpu_milli: u64,
}

#[derive(Serialize, Deserialize)]
struct WireDevice {
    id: String,
    mib: u64,
    share: u64,
    /// Where it lies, if it is a MIG instance that gpupack made: it may have to be made again.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    mig: Option<WireSpot>,
}

#[derive(Serialize, Deserialize)]
struct WireSpot {
    gpu: String,
    profile: String,
    start: u32,
}

/// Reads the name of an isolation. Anything else, for instance a word from a newer writer, means no
/// isolation: the amounts still count, and gpupack promises nothing that it does not understand.
fn isolation<'de, D>(deserializer: D) -> Result<Option<ConfiguredIsolation>, D::Error>
where
    D: Deserializer<'de>,
{
    let name = <&RawValue>::deserialize(deserializer)?.get();
    let name = serde_json::from_str::<String>(name).unwrap_or_default();
    let known =
        [ConfiguredIsolation::Mps, ConfiguredIsolation::Driver, ConfiguredIsolation::Hardware];
    Ok(Some(known.into_iter().find(|known| known.name() == name).unwrap_or_default()))
}

#[expect(clippy::ref_option, reason = "the form that serde calls")]
fn name_of<S: Serializer>(
    isolation: &Option<ConfiguredIsolation>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(isolation.unwrap_or_default().name())
}

/// Whether a placement has fields that this version does not read, or has not their types: a newer
/// gpupack wrote it.
pub(crate) fn has_unknown_fields(placement: &str) -> bool {
    let mut is_unknown = false;
    let mut json = serde_json::Deserializer::from_str(placement);
    let read = serde_ignored::deserialize::<_, _, WirePlacement>(&mut json, |_| is_unknown = true);
    read.is_err() || json.end().is_err() || is_unknown
}

/// The version alone: the other fields may mean something else in another version.
#[derive(Deserialize)]
struct WireVersion {
    v: u64,
}

/// The annotations of a placement.
///
/// # Errors
/// [`PlacementError`] for a placement that [`decode`] would refuse: a write cannot be taken back,
/// and the API server checks nothing in a Binding.
pub fn encode(placement: &Placement) -> Result<BTreeMap<String, String>, PlacementError> {
    check(&placement.devices)?;
    check_guest(&placement.devices, placement.guest.as_ref())?;
    let devices = running_devices(placement);
    let guest = placement.guest.as_ref();
    let spots = placement.parts().map(|(_, spot)| spot);
    let are_made = placement.parts().all(|(device, spot)| is_made(&device.id, spot));
    let guest_spot = guest.and_then(|guest| guest.spot.as_ref());
    // One that it leaves may be gone.
    let away = guest.filter(|guest| guest.leaving.is_none());
    if !are_made || !away.is_none_or(|guest| is_made(&guest.on, guest_spot)) {
        return Err(PlacementError::NotMade);
    }
    let home = placement.devices.iter().map(|device| device.id.to_string());
    let wire = WirePlacement {
        v: VERSION,
        devices: devices
            .iter()
            .zip(spots)
            .map(|(device, spot)| wire_device(device, spot))
            .collect(),
        isolation: Some(placement.isolation),
        protection: None,
        home: away.map(|_| home.collect()),
        moved: guest.and_then(|guest| {
            let MoveHome { container, cpu_milli } = guest.leaving.clone()?;
            let from = vec![guest.on.to_string()];
            Some(WireMove { from, container: container.to_string(), cpu_milli })
        }),
        guest_mig: guest_spot.map(wire_spot),
    };
    let json = serde_json::to_string(&wire)
        .map_err(|error| PlacementError::Json { fault: error.to_string() })?;
    let least = placement.devices.iter().map(|device| device.demand.memory.mib()).min();
    let written = [
        (DEVICES, cdi_names(&devices)),
        (UUIDS, uuids(&devices)),
        (MEMORY_MIB, least.unwrap_or_default().to_string()),
        (PLACEMENT, json),
    ];
    for (key, value) in &written {
        check_length(key, value)?;
    }
    Ok(written.map(|(key, value)| (key.to_owned(), value)).into())
}

/// The placement in the annotations of a pod on `node`; `None` if there is none.
///
/// Unknown fields are ignored: a newer gpupack may have written them. The amounts are enough: a
/// user who removes the list of devices does not free them.
///
/// # Errors
/// [`PlacementError`] if annotations are present and cannot be trusted.
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
    let JsonObject(WireVersion { v: version }) = serde_json::from_str(json).map_err(unreadable)?;
    if version != VERSION {
        return Err(PlacementError::Version { version });
    }
    let JsonObject::<WirePlacement>(wire) = serde_json::from_str(json).map_err(unreadable)?;
    let placed = wire.devices.iter().map(placed_device).collect::<Result<Vec<_>, _>>()?;
    check(&placed)?;
    if let Some(devices) = devices {
        check_length(DEVICES, devices)?;
        if cdi_names(&placed) != *devices {
            return Err(PlacementError::Disagreement { devices: shown(devices) });
        }
    }
    // With both names, the weaker one counts.
    let isolation = wire.isolation.into_iter().chain(wire.protection).min().unwrap_or_default();
    let spots = wire.devices.into_iter().map(|device| device.mig.map(spot).transpose());
    let mut spots = spots.collect::<Result<Vec<_>, _>>()?;
    if spots.iter().all(Option::is_none) {
        spots.clear();
    }
    let (devices, mut guest) = at_home(placed, wire.home.as_deref(), wire.moved)?;
    if let Some(guest) = &mut guest {
        guest.spot = wire.guest_mig.map(spot).transpose()?;
    }
    check_guest(&devices, guest.as_ref())?;
    Ok(Some(Placement { node: node.clone(), devices, isolation, guest, spots }))
}

fn unreadable(error: serde_json::Error) -> PlacementError {
    PlacementError::Json { fault: shown(&error.to_string()) }
}

/// Whether a device is there: not the MIG instance that is yet to be made at this place.
fn is_made(id: &DeviceId, spot: Option<&Spot>) -> bool {
    spot.and_then(Spot::id).as_ref() != Some(id)
}

/// The devices that a pod runs on, or will after its move.
fn running_devices(placement: &Placement) -> Vec<PlacedDevice> {
    let ids = placement.runs_on().into_iter();
    ids.zip(&placement.devices)
        .map(|(id, placed)| PlacedDevice { id, demand: placed.demand })
        .collect()
}

/// The devices that a pod is allocated, and where it is a guest, from those that it runs on.
fn at_home(
    runs_on: Vec<PlacedDevice>,
    home: Option<&[String]>,
    moved: Option<WireMove>,
) -> Result<(Vec<PlacedDevice>, Option<Guest>), PlacementError> {
    match (home, moved) {
        (None, None) => Ok((runs_on, None)),
        (Some([home]), _) if runs_on.len() == 1 => {
            let PlacedDevice { id: on, demand } = runs_on[0].clone();
            let devices = vec![PlacedDevice { id: device_id(home)?, demand }];
            Ok((devices, Some(Guest { on, spot: None, leaving: None })))
        }
        (None, Some(WireMove { from, container, cpu_milli })) if from.len() == 1 => {
            let leaving = Some(MoveHome { container: container.into(), cpu_milli });
            Ok((runs_on, Some(Guest { on: device_id(&from[0])?, spot: None, leaving })))
        }
        (Some(home), _) => Err(PlacementError::Guest { count: home.len() }),
        (None, Some(moved)) => Err(PlacementError::Guest { count: moved.from.len() }),
    }
}

/// Checks where a pod is a guest: it has one device, and another one is its home.
fn check_guest(devices: &[PlacedDevice], guest: Option<&Guest>) -> Result<(), PlacementError> {
    match (guest, devices) {
        (None, _) => Ok(()),
        (Some(guest), [home]) if guest.on == home.id => {
            Err(PlacementError::Twice { id: home.id.clone() })
        }
        (Some(_), [_]) => Ok(()),
        (Some(_), _) => Err(PlacementError::Guest { count: devices.len() }),
    }
}

/// Refuses a key that only gpupack writes, in the annotations or labels of a pod without a node.
///
/// It accepts what gpupack writes on waiting pods: [`FENCE`], and `OLD_FENCE`, its name in older
/// processes.
///
/// # Errors
/// [`RequestError::ReservedKey`] with the first such key.
pub fn refuse_reserved_keys<'a>(
    keys: impl IntoIterator<Item = &'a String>,
) -> Result<(), RequestError> {
    match keys.into_iter().find(|key| key.starts_with(PLACED_PREFIX) && !is_of_waiting_pods(key)) {
        Some(key) => Err(RequestError::ReservedKey { key: shown(key) }),
        None => Ok(()),
    }
}

/// Whether gpupack writes an annotation on waiting pods.
pub(crate) fn is_of_waiting_pods(key: &str) -> bool {
    matches!(key, FENCE | OLD_FENCE | HOLD)
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

/// Checks devices that are written and devices that were read.
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

fn wire_device(device: &PlacedDevice, spot: Option<&Spot>) -> WireDevice {
    WireDevice {
        mig: spot.map(wire_spot),
        id: device.id.as_str().to_owned(),
        mib: device.demand.memory.mib(),
        share: device.demand.share.millionths(),
    }
}

fn wire_spot(spot: &Spot) -> WireSpot {
    let Spot { gpu, profile, start } = spot;
    WireSpot { gpu: gpu.to_string(), profile: profile.to_string(), start: *start }
}

fn placed_device(wire: &WireDevice) -> Result<PlacedDevice, PlacementError> {
    let demand =
        Demand { memory: MemMib::new(wire.mib), share: Share::from_millionths(wire.share) };
    Ok(PlacedDevice { id: device_id(&wire.id)?, demand })
}

fn device_id(text: &str) -> Result<DeviceId, PlacementError> {
    DeviceId::new(text).map_err(|_| PlacementError::DeviceId { id: shown(text) })
}

/// Where a MIG instance lies that gpupack made.
fn spot(wire: WireSpot) -> Result<Spot, PlacementError> {
    let gpu = device_id(&wire.gpu)?;
    let WireSpot { profile, start, .. } = wire;
    if profile.is_empty() || profile.len() > MAX_PROFILE_BYTES || start >= MAX_UNITS {
        return Err(PlacementError::Spot { profile: shown(&profile), start });
    }
    Ok(Spot { gpu, profile: MigProfile::new(profile), start })
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
