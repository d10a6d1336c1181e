//! Checks a report and converts it into the types of [`crate::model`].
//!
//! [`Report::from_json`] is the only way in. The extender calls it for each report and passes the
//! result to the ledger. Nothing here depends on earlier reports: the ledger compares them.

use std::collections::BTreeMap;

use crate::api::state;
use crate::causes::shown_long;
use crate::hardware::device::{Device, DeviceDetails, DeviceIndex, DeviceKind, InventoryError};
use crate::hardware::ids::{
    DeviceId, MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE, MigProfile, ModelName, PodUid,
};
use crate::hardware::inventory::NodeInventory;
use crate::hardware::spots::Spot;
use crate::hardware::units::MemMib;
use crate::json_object::Object;
use crate::ledger::change::reports::NodeReport;
use crate::model::device_state;
use crate::report::bodies::{API_VERSION, DeviceReport, DeviceUse, LimitsInForce, Report};
use crate::report::details::{device_use, health};
use crate::report::limits::MAX_NAME_BYTES;
use crate::report::refusal::{ReportError, text};
use crate::report::{details, mig};
use crate::usage::node_details::DetailsReport;

/// Longest product name of a GPU in bytes; NVML's own buffer has 96.
const MAX_MODEL_BYTES: usize = 128;

/// A report that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedReport {
    /// The part from which the ledger's state is derived.
    pub facts: NodeReport,
    /// The rest: topology and condition of devices, limits of tenants.
    pub details: DetailsReport,
    /// Term of an earlier leader, and the places of MIG instances that it promised, by pod.
    pub promises: Option<(u64, BTreeMap<PodUid, Vec<Spot>>)>,
}

impl Report {
    /// Reads and checks the body of a report.
    ///
    /// # Errors
    /// [`ReportError`] for the first error found. A document of another API version gets that
    /// error, even if nothing else in it can be read.
    pub fn from_json(body: &[u8]) -> Result<CheckedReport, ReportError> {
        match parse::<Self>(body) {
            Ok(report) => report.checked(),
            Err(error) => Err(match parse::<Header>(body) {
                Ok(header) => readable(&header.api_version).err().unwrap_or(error),
                Err(_) => error,
            }),
        }
    }

    /// Checks every field and converts the report into the types of the core.
    ///
    /// # Errors
    /// [`ReportError`] for the first error found.
    pub fn checked(self) -> Result<CheckedReport, ReportError> {
        text("agent", &self.agent, MAX_NAME_BYTES)?;
        if self.session.is_none() && self.inventory.is_none() {
            return Err(ReportError::HelloWithoutInventory);
        }
        let conditions = details::conditions(&self.devices)?;
        let tenants = details::tenants(&self.devices)?;
        let mig_failures = mig::failures(self.mig_failures)?;
        let limits = self.memory_limits.map(limits).transpose()?;
        let promises = self.mig_promises.map(mig::promises).transpose()?;
        let driver = self.driver.map(details::driver).transpose()?;
        let (inventory, details) = match self.inventory {
            Some(devices) => {
                let details = details::devices(&devices)?;
                (Some(inventory(devices, &details)?), Some((driver, details)))
            }
            None => (None, None),
        };
        let facts = NodeReport {
            agent: self.agent,
            session: self.session,
            sequence: self.sequence,
            inventory,
            uses: uses(self.devices)?,
            allocations_version: self.allocations_version,
        };
        Ok(CheckedReport {
            facts,
            details: DetailsReport {
                inventory: details,
                conditions,
                tenants,
                mig_failures,
                limits,
            },
            promises,
        })
    }
}

/// The field that all API versions have.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    api_version: String,
}

/// Checks that this side can read `version`.
fn readable(version: &str) -> Result<(), ReportError> {
    if version == API_VERSION {
        return Ok(());
    }
    text("apiVersion", version, MAX_NAME_BYTES)?; // the error repeats it
    Err(ReportError::Version { version: version.to_owned() })
}

/// Reads one JSON document with nothing after it; an error has the path in the document.
fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, ReportError> {
    if let Ok(Object(value)) = serde_json::from_slice(body) {
        return Ok(value);
    }
    // Parse again to find the path: to record it the first time costs as much as the parsing.
    let mut document = serde_json::Deserializer::from_slice(body);
    let Object(value) = serde_path_to_error::deserialize(&mut document).map_err(|error| {
        ReportError::Malformed { at: shown_long(error.path()), cause: shown_long(error.inner()) }
    })?;
    document.end().map_err(|error| ReportError::Malformed {
        at: "the end".to_owned(),
        cause: shown_long(&error),
    })?;
    Ok(value)
}

/// Checks which limits of memory an agent has in force: their term, and the GPUs with the numbers of orders.
fn limits(in_force: LimitsInForce) -> Result<(u64, BTreeMap<DeviceId, u64>), ReportError> {
    let LimitsInForce { term, gpus } = in_force;
    if gpus.len() > MAX_DEVICES_PER_NODE {
        return Err(InventoryError::TooManyDevices { count: gpus.len() }.into());
    }
    let numbered = gpus.into_iter().map(|it| Ok((DeviceId::new(&it.gpu)?, it.number)));
    Ok((term, numbered.collect::<Result<_, ReportError>>()?))
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
            device.id = id.clone(); // share one copy of the text
        }
    }
    Ok(NodeInventory::placed(devices, details)?)
}

impl DeviceReport {
    /// Whether an extender would accept its name, kind and memory.
    pub fn is_believable(&self) -> bool {
        let alone = device(self.clone()).map(|device| (device.reserved, device.total));
        alone.is_ok_and(|(reserved, total)| reserved <= total && total <= MAX_DEVICE_MEMORY)
    }
}

/// Checks one device of an inventory.
fn device(report: DeviceReport) -> Result<Device, ReportError> {
    let id = DeviceId::new(&report.uuid)?;
    text("model", &report.model, MAX_MODEL_BYTES)?;
    let kind = match (report.kind, report.parent, report.mig_profile) {
        (state::DeviceKind::Gpu, None, None) => DeviceKind::Gpu,
        (state::DeviceKind::MigParent, None, None) => DeviceKind::MigParent,
        (state::DeviceKind::MigInstance, Some(parent), Some(profile)) => {
            text("migProfile", &profile, MAX_NAME_BYTES)?;
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

/// Checks the observed use of all devices.
fn uses(devices: Vec<DeviceUse>) -> Result<Vec<device_state::DeviceUse>, ReportError> {
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

#[cfg(test)]
mod tests;
