//! Simulated nodes: the fleet file of `gpupack agent --simulate`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use wire::api::state::DeviceKind;
use wire::device::InventoryError;
use wire::ids::{DeviceId, MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE, NodeName};
use wire::report::bodies::DeviceReport;
use wire::units::{HostAmount, MemMib, MilliCpu};

/// Simulated nodes. Node names and UUIDs are unique, every device is within the limits of the core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fleet {
    /// How long a process outlives its pod.
    #[serde(default)]
    pub process_linger_ms: u64,
    /// Percent of its allocated memory that a process uses; above 100 it plays an over-limit pod.
    #[serde(default = "default_use_percent")]
    pub use_percent: u32,
    /// The same for single pods, by `namespace/name`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub use_percent_of: BTreeMap<String, u32>,
    pub nodes: Vec<FleetNode>,
}

/// One simulated node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetNode {
    pub name: String,
    /// CPU that it offers, in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory that it offers.
    pub memory_mib: u64,
    /// Its pool, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Its GPUs, in the order of NVML's index.
    #[serde(default)]
    pub gpus: Vec<FleetGpu>,
}

/// One simulated GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetGpu {
    /// Its UUID; by default made from node and index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    pub model: String,
    pub memory_mib: u64,
    /// Memory that the driver reserves.
    #[serde(default)]
    pub reserved_mib: u64,
    /// Its MIG instances; a GPU that has any is in MIG mode.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig: Vec<FleetInstance>,
}

/// One simulated MIG instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetInstance {
    /// Its UUID; by default made from node, GPU and position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its profile, for instance `3g.40gb`.
    pub profile: String,
    pub memory_mib: u64,
}

/// The default of [`Fleet::use_percent`].
pub(crate) fn default_use_percent() -> u32 {
    60
}

impl Fleet {
    /// Reads and checks a fleet file.
    ///
    /// # Errors
    /// [`FleetError`] with the path of the file and the first fault found.
    pub fn read(path: &Path) -> Result<Self, FleetError> {
        let fault = |fault| FleetError { path: path.to_owned(), fault };
        let text = std::fs::read_to_string(path).map_err(|cause| fault(cause.into()))?;
        Self::from_json(&text).map_err(fault)
    }

    /// Reads and checks the text of a fleet file.
    ///
    /// # Errors
    /// [`FleetFault`] for the first fault found.
    pub fn from_json(text: &str) -> Result<Self, FleetFault> {
        let mut document = serde_json::Deserializer::from_str(text);
        let fleet: Self = serde_path_to_error::deserialize(&mut document).map_err(|error| {
            FleetFault::Json { at: error.path().to_string(), cause: error.into_inner() }
        })?;
        document.end().map_err(|cause| FleetFault::Json { at: "the end".to_owned(), cause })?;
        fleet.check()?;
        Ok(fleet)
    }

    /// Checks names, UUIDs and amounts.
    pub(crate) fn check(&self) -> Result<(), FleetFault> {
        let mut names = BTreeSet::new();
        let mut uuids = BTreeSet::new();
        for node in &self.nodes {
            let name = &node.name;
            let is_legal = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.');
            if name.is_empty() || name.len() > 253 || !is_legal {
                return Err(FleetFault::NodeName { name: name.clone() });
            }
            if !names.insert(name) {
                return Err(FleetFault::NodeTwice { name: name.clone() });
            }
            let inventory = node.inventory();
            if inventory.len() > MAX_DEVICES_PER_NODE {
                let count = inventory.len();
                return Err(FleetFault::TooManyDevices { node: name.clone(), count });
            }
            for device in inventory {
                let id = DeviceId::new(&device.uuid).map_err(|cause| FleetFault::Device {
                    node: name.clone(),
                    cause: cause.into(),
                })?;
                let (total, reserved) = (device.memory_mib, device.reserved_mib);
                if reserved > total || MemMib::new(total) > MAX_DEVICE_MEMORY {
                    return Err(FleetFault::Memory { node: name.clone(), id, total, reserved });
                }
                if !uuids.insert(id.clone()) {
                    return Err(FleetFault::UuidTwice { node: name.clone(), id });
                }
            }
        }
        Ok(())
    }
}

impl FleetNode {
    /// Its name as the core writes it.
    pub fn node_name(&self) -> NodeName {
        NodeName::new(self.name.as_str())
    }

    /// CPU and host memory that it offers.
    pub fn host(&self) -> HostAmount {
        HostAmount { cpu: MilliCpu::new(self.cpu_milli), memory: MemMib::new(self.memory_mib) }
    }

    /// Its devices as an agent reports them: each GPU, followed by its MIG instances.
    pub fn inventory(&self) -> Vec<DeviceReport> {
        let mut devices = Vec::with_capacity(self.gpus.len());
        for (index, gpu) in (0..).zip(&self.gpus) {
            let seed = format!("{}/{index}", self.name);
            let uuid = gpu.uuid.clone().unwrap_or_else(|| made_uuid("GPU", &seed));
            let kind = if gpu.mig.is_empty() { DeviceKind::Gpu } else { DeviceKind::MigParent };
            devices.push(DeviceReport {
                memory_mib: gpu.memory_mib,
                reserved_mib: gpu.reserved_mib,
                ..DeviceReport::new(uuid.clone(), index, gpu.model.clone(), kind)
            });
            for (position, instance) in gpu.mig.iter().enumerate() {
                let own = instance.uuid.clone();
                let own = own.unwrap_or_else(|| made_uuid("MIG", &format!("{seed}/{position}")));
                devices.push(DeviceReport {
                    memory_mib: instance.memory_mib,
                    parent: Some(uuid.clone()),
                    mig_profile: Some(instance.profile.clone()),
                    ..DeviceReport::new(own, index, gpu.model.clone(), DeviceKind::MigInstance)
                });
            }
        }
        devices
    }
}

/// The usual start of [`fnv1a`].
pub(crate) const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// The FNV-1a hash of 64 bits.
pub(crate) fn fnv1a(start: u64, bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A UUID that depends only on `seed`: two FNV-1a hashes with different starts.
fn made_uuid(prefix: &str, seed: &str) -> String {
    let high = fnv1a(FNV_START, seed.bytes());
    let low = fnv1a(0x9ae1_6a3b_2f90_404f, seed.bytes());
    let digits = format!("{high:016x}{low:016x}");
    let groups = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    format!("{prefix}-{}", groups.join("-"))
}

/// An error in a fleet file.
#[derive(Debug, thiserror::Error)]
#[error("fleet file `{}`: {fault}", path.display())]
pub struct FleetError {
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: FleetFault,
}

/// An error in a fleet.
#[derive(Debug, thiserror::Error)]
pub enum FleetFault {
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// Its content is no fleet.
    #[error("at `{at}`: {cause}")]
    Json {
        /// The position in the document.
        at: String,
        /// The error of the parser.
        cause: serde_json::Error,
    },
    #[error("node name `{name}`: 1 to 253 letters, digits, `-` or `.` are allowed")]
    NodeName { name: String },
    /// Two nodes with one name.
    #[error("node `{name}` is there twice")]
    NodeTwice { name: String },
    /// More devices than a node can hold.
    #[error("node `{node}` has `{count}` devices, at most {MAX_DEVICES_PER_NODE} are allowed")]
    TooManyDevices { node: String, count: usize },
    #[error("node `{node}`: {cause}")]
    Device {
        node: String,
        /// What is wrong with it.
        cause: InventoryError,
    },
    /// Amounts that contradict each other.
    #[error(
        "node `{node}`: device `{id}` has `{total}` MiB and a reserve of `{reserved}`; the reserve \
         is part of the memory, which is at most {MAX_DEVICE_MEMORY}"
    )]
    Memory {
        node: String,
        id: DeviceId,
        /// Its memory in MiB.
        total: u64,
        /// Its reserve in MiB.
        reserved: u64,
    },
    /// Two devices with one UUID.
    #[error("node `{node}`: the UUID `{id}` is there twice")]
    UuidTwice {
        /// The node that has the second one.
        node: String,
        id: DeviceId,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, part: &str) {
        let message = Fleet::from_json(text).unwrap_err().to_string();
        assert!(message.contains(part), "{text}: {message}");
    }

    #[test]
    fn a_fleet_file_gives_inventories_with_stable_uuids() {
        let text = r#"{"process_linger_ms":500,"nodes":[{"name":"n1","cpu_milli":64000,
            "memory_mib":262144,"pool":"a","gpus":[
            {"model":"NVIDIA A100-SXM4-80GB","memory_mib":81920,"reserved_mib":600},
            {"uuid":"GPU-x","model":"NVIDIA A100-SXM4-80GB","memory_mib":81920,
             "mig":[{"profile":"3g.40gb","memory_mib":40192}]}]}]}"#;
        let fleet = Fleet::from_json(text).unwrap();
        let devices = fleet.nodes[0].inventory();
        assert_eq!(devices, Fleet::from_json(text).unwrap().nodes[0].inventory());
        let kinds: Vec<DeviceKind> = devices.iter().map(|device| device.kind).collect();
        assert_eq!(kinds, [DeviceKind::Gpu, DeviceKind::MigParent, DeviceKind::MigInstance]);
        assert_eq!(devices[0].uuid, "GPU-648a3ebb-79e8-2277-2d23-34e4869e6e21");
        assert_eq!(devices[2].parent.as_deref(), Some("GPU-x"));
        assert_eq!((devices[2].index, fleet.use_percent), (1, 60));
    }

    #[test]
    fn faults_of_a_fleet_file_are_named_with_their_place() {
        let node = |name: &str, gpus: &str| {
            format!(r#"{{"name":"{name}","cpu_milli":1,"memory_mib":1,"gpus":[{gpus}]}}"#)
        };
        let fleet = |nodes: &[String]| format!(r#"{{"nodes":[{}]}}"#, nodes.join(","));
        let gpu = r#"{"uuid":"GPU-a","model":"T4","memory_mib":15360}"#;
        check("{", "EOF");
        check(r#"{"nodes":[],"linger":1}"#, "linger");
        check(&fleet(&[node("a", r#"{"modell":"T4"}"#)]), "at `nodes[0].gpus[0]");
        check(&fleet(&[node("", "")]), "node name ``");
        check(&fleet(&[node("a/b", "")]), "node name `a/b`");
        check(&fleet(&[node("a", ""), node("a", "")]), "node `a` is there twice");
        check(&fleet(&[node("a", gpu), node("b", gpu)]), "UUID `GPU-a` is there twice");
        check(&fleet(&[node("a", &gpu.replace("GPU-a", "GPU,a"))]), "`GPU,a`");
        check(&fleet(&[node("a", &gpu.replace("15360", "99999999"))]), "`99999999` MiB");
        check(&fleet(&[node("a", &vec![gpu; 257].join(","))]), "`257` devices");
        let missing = Fleet::read(Path::new("/nowhere/fleet.json")).unwrap_err();
        assert!(missing.to_string().contains("`/nowhere/fleet.json`"), "{missing}");
    }
}
