//! A report in the words of the core, and everything that is not believed.
//!
//! [`Report::from_json`] is the only way in; the extender calls it for each report and hands the
//! result to the ledger. Nothing here looks at what was reported before: that is the ledger's business.

use std::collections::BTreeMap;

use super::details;
use super::{
    Ailment, DeviceReport, DeviceUse, Kind, ProcessUse, Report, SCHEMA_VERSION, is_readable,
};
use crate::ledger::details::DetailsReport;
use crate::ledger::reports::NodeReport;
use crate::packing::details::DeviceDetails;
use crate::packing::device::{
    Device, DeviceId, DeviceIndex, DeviceKind, Health, InventoryError, MAX_DEVICE_MEMORY,
    MAX_DEVICES_PER_NODE, MigProfile, ModelName, NodeInventory, PodUid,
};
use crate::packing::node;
use crate::packing::units::MemMib;

/// Most processes of one device that are believed in one report.
pub const MAX_PROCESSES_PER_DEVICE: usize = 4096;

/// Longest instance id of an agent, pod UID and MIG profile.
pub(super) const MAX_NAME_BYTES: usize = 64;

/// Longest product name of a GPU; NVML's own buffer has 96 bytes.
const MAX_MODEL_BYTES: usize = 128;

/// Why a report is not believed.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Not JSON, or not a report.
    #[error("the report cannot be read at `{at}`: {cause}")]
    Malformed {
        /// Where in the document.
        at: String,
        /// What the parser says.
        cause: serde_json::Error,
    },
    /// Another generation of the schema.
    #[error(
        "schema version `{version}` is not understood, only {SCHEMA_VERSION} and its neighbours: \
         bring agent and extender within one version of each other"
    )]
    Version {
        /// The version of the report.
        version: u32,
    },
    /// A name that cannot be one.
    #[error("`{field}` has {bytes} bytes; 1 to {max} printable characters are allowed")]
    Text {
        /// Which name.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// The longest that is allowed.
        max: usize,
    },
    /// A report without a session must carry the inventory.
    #[error("a report without a session says hello and must carry the inventory")]
    HelloWithoutInventory,
    /// An instance without parent or profile, or a GPU with them.
    #[error(
        "device `{uuid}` of kind `{kind:?}`: parent and profile belong to instances, and to each"
    )]
    Kind {
        /// The device.
        uuid: DeviceId,
        /// Its kind.
        kind: Kind,
    },
    /// An inventory that cannot be one.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// Use of more devices than a node can hold.
    #[error("use of `{count}` devices is reported, at most {MAX_DEVICES_PER_NODE} are believed")]
    TooManyDevices {
        /// How many.
        count: usize,
    },
    /// Use of one device, twice.
    #[error("use of device `{uuid}` is reported twice")]
    Twice {
        /// The device.
        uuid: DeviceId,
    },
    /// More memory than any device has.
    #[error("use of `{mib} MiB` on device `{uuid}`, at most {MAX_DEVICE_MEMORY} are believed")]
    Memory {
        /// The device.
        uuid: DeviceId,
        /// The amount.
        mib: u64,
    },
    /// More than all the time.
    #[error("device `{uuid}` is busy `{percent}` percent of the time")]
    Busy {
        /// The device.
        uuid: DeviceId,
        /// The amount.
        percent: u8,
    },
    /// A number that belongs to no device.
    #[error("device `{uuid}`: `{value}` is no {field}")]
    Detail {
        /// The device.
        uuid: DeviceId,
        /// What it should be.
        field: &'static str,
        /// The number.
        value: u32,
    },
    /// More processes than a GPU can serve.
    #[error(
        "`{count}` processes on device `{uuid}`, at most {MAX_PROCESSES_PER_DEVICE} are believed"
    )]
    TooManyProcesses {
        /// The device.
        uuid: DeviceId,
        /// How many.
        count: usize,
    },
}

impl ReportError {
    /// The label of this error in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Malformed { .. } => "malformed",
            Self::Version { .. } => "version",
            Self::HelloWithoutInventory => "no_inventory",
            Self::Inventory(_) | Self::Kind { .. } => "inventory",
            Self::Text { .. }
            | Self::TooManyDevices { .. }
            | Self::Twice { .. }
            | Self::Memory { .. }
            | Self::Busy { .. }
            | Self::Detail { .. }
            | Self::TooManyProcesses { .. } => "absurd",
        }
    }
}

/// A report that is believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedReport {
    /// What the books are made of.
    pub books: NodeReport,
    /// What stands beside them.
    pub details: DetailsReport,
}

impl Report {
    /// Reads and checks the body of a report.
    ///
    /// # Errors
    /// [`ReportError`] for the first fault found. A document of another generation of the schema is
    /// named as such, even where it cannot be read.
    pub fn from_json(body: &[u8]) -> Result<CheckedReport, ReportError> {
        match parse::<Self>(body) {
            Ok(report) => report.checked(),
            Err(error) => Err(match parse::<Header>(body) {
                Ok(Header { schema_version }) if !is_readable(schema_version) => {
                    ReportError::Version { version: schema_version }
                }
                _ => error,
            }),
        }
    }

    /// Checks every field and turns the report into the types of the core.
    ///
    /// # Errors
    /// [`ReportError`] for the first fault found.
    pub fn checked(self) -> Result<CheckedReport, ReportError> {
        if !is_readable(self.schema_version) {
            return Err(ReportError::Version { version: self.schema_version });
        }
        text("agent", &self.agent, MAX_NAME_BYTES)?;
        if self.session.is_none() && self.inventory.is_none() {
            return Err(ReportError::HelloWithoutInventory);
        }
        let conditions = details::conditions(&self.devices)?;
        let tenants = details::tenants(&self.devices)?;
        let driver = self.driver.map(details::driver).transpose()?;
        let (inventory, details) = match self.inventory {
            Some(devices) => {
                let details = details::devices(&devices)?;
                (Some(inventory(devices, &details)?), Some((driver, details)))
            }
            None => (None, None),
        };
        let books = NodeReport {
            agent: self.agent,
            session: self.session,
            sequence: self.sequence,
            inventory,
            uses: uses(self.devices)?,
            bookings_version: self.bookings_version,
        };
        Ok(CheckedReport {
            books,
            details: DetailsReport { inventory: details, conditions, tenants },
        })
    }
}

/// What every generation of the schema has in common.
#[derive(serde::Deserialize)]
struct Header {
    /// Version of the schema that the rest is written in.
    schema_version: u32,
}

/// Reads one JSON document and nothing after it; errors name the place.
fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, ReportError> {
    if let Ok(value) = serde_json::from_slice(body) {
        return Ok(value);
    }
    // Once more, to learn the place: noting it on the way costs as much as the reading.
    let mut document = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut document).map_err(|error| {
        ReportError::Malformed { at: error.path().to_string(), cause: error.into_inner() }
    })?;
    let end = document.end();
    end.map_err(|cause| ReportError::Malformed { at: "the end".to_owned(), cause })?;
    Ok(value)
}

/// Checks that a name is short and can be printed.
pub(super) fn text(field: &'static str, value: &str, max: usize) -> Result<(), ReportError> {
    if value.is_empty() || value.len() > max || value.chars().any(char::is_control) {
        return Err(ReportError::Text { field, bytes: value.len(), max });
    }
    Ok(())
}

/// Checks an inventory.
fn inventory(
    devices: Vec<DeviceReport>,
    details: &BTreeMap<DeviceId, DeviceDetails>,
) -> Result<NodeInventory, ReportError> {
    if devices.len() > MAX_DEVICES_PER_NODE {
        return Err(InventoryError::TooManyDevices { count: devices.len() }.into());
    }
    let mut devices = devices.into_iter().map(device).collect::<Result<Vec<_>, _>>()?;
    for device in &mut devices {
        if let Some((id, _)) = details.get_key_value(&device.id) {
            device.id = id.clone(); // the same text, once
        }
    }
    Ok(NodeInventory::placed(devices, details)?)
}

impl DeviceReport {
    /// Whether an extender would believe what it says of name, kind and memory.
    pub fn is_believable(&self) -> bool {
        let alone = device(self.clone()).map(|device| (device.reserved, device.total));
        alone.is_ok_and(|(reserved, total)| reserved <= total && total <= MAX_DEVICE_MEMORY)
    }
}

/// Checks one device of an inventory.
fn device(report: DeviceReport) -> Result<Device, ReportError> {
    let id = DeviceId::new(&report.uuid)?;
    text("model", &report.model, MAX_MODEL_BYTES)?;
    let kind = match (report.kind, report.parent, report.profile) {
        (Kind::Gpu, None, None) => DeviceKind::Gpu,
        (Kind::MigParent, None, None) => DeviceKind::MigParent,
        (Kind::MigInstance, Some(parent), Some(profile)) => {
            text("profile", &profile, MAX_NAME_BYTES)?;
            DeviceKind::MigInstance {
                parent: DeviceId::new(&parent)?,
                profile: MigProfile::new(profile),
            }
        }
        (kind, _, _) => return Err(ReportError::Kind { uuid: id, kind }),
    };
    Ok(Device {
        id,
        index: DeviceIndex(report.index),
        model: ModelName::new(report.model),
        total: MemMib::new(report.memory_mib),
        reserved: MemMib::new(report.reserved_mib),
        kind,
        health: health(report.healthy),
    })
}

/// The flag of the wire as a type.
fn health(healthy: bool) -> Health {
    if healthy { Health::Healthy } else { Health::Unhealthy }
}

/// Checks the observed use of all devices.
fn uses(devices: Vec<DeviceUse>) -> Result<Vec<node::DeviceUse>, ReportError> {
    if devices.len() > MAX_DEVICES_PER_NODE {
        return Err(ReportError::TooManyDevices { count: devices.len() });
    }
    let mut names: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(ReportError::Twice { uuid: DeviceId::new(twice[0])? });
    }
    let use_of = |device: DeviceUse| device_use(DeviceId::new(&device.uuid)?, device);
    devices.into_iter().map(use_of).collect()
}

/// Checks the observed use of one device.
pub(super) fn device_use(id: DeviceId, device: DeviceUse) -> Result<node::DeviceUse, ReportError> {
    let used = device.used_mib.map(|mib| memory(&id, mib)).transpose()?;
    if let Some(percent) = device.busy_percent
        && percent > 100
    {
        return Err(ReportError::Busy { uuid: id, percent });
    }
    if let Some(processes) = &device.processes
        && processes.len() > MAX_PROCESSES_PER_DEVICE
    {
        return Err(ReportError::TooManyProcesses { uuid: id, count: processes.len() });
    }
    let processes = device.processes.map(|list| {
        list.into_iter().map(|process| checked_process(&id, process)).collect::<Result<_, _>>()
    });
    Ok(node::DeviceUse {
        used,
        busy_percent: device.busy_percent,
        health: match device.ailment {
            Some(Ailment::KubeletOwned) if !device.healthy => Health::KubeletOwned,
            _ => health(device.healthy),
        },
        processes: processes.transpose()?,
        id,
    })
}

/// Checks one process of the device `id`.
fn checked_process(id: &DeviceId, process: ProcessUse) -> Result<node::ProcessUse, ReportError> {
    if let Some(uid) = &process.pod_uid {
        text("pod_uid", uid, MAX_NAME_BYTES)?;
    }
    let memory = process.memory_mib.map(|mib| memory(id, mib)).transpose()?;
    Ok(node::ProcessUse { pod: process.pod_uid.map(PodUid::new), memory })
}

/// Checks an amount of memory on the device `id`.
pub(super) fn memory(id: &DeviceId, mib: u64) -> Result<MemMib, ReportError> {
    let memory = MemMib::new(mib);
    if memory > MAX_DEVICE_MEMORY {
        return Err(ReportError::Memory { uuid: id.clone(), mib });
    }
    Ok(memory)
}

#[cfg(test)]
mod tests;
