//! Checks a report and converts it into the types of [`engine::model`].
//!
//! [`CheckedReport::from_json`] is the only way in. The extender calls it for each report and passes the
//! result to the ledger. Nothing here depends on earlier reports: the ledger compares them.

use std::collections::BTreeMap;
use wire::report::bodies::{ClearOutcome, MigPromise, MigPromises};
use wire::report::details::of_inventory;
use wire::report::report_limits::MAX_MIG_PROMISES;

use engine::hardware::inventory::NodeInventory;
use engine::hardware::model_sizes::ModelSizes;
use engine::hardware::spots::Spot;
use engine::ledger::change::reports::NodeReport;
use engine::usage::node_details::DetailsReport;
use runtime::causes::shown_long;
use wire::device::{DeviceDetails, InventoryError};
use wire::ids::{DeviceId, MAX_DEVICES_PER_NODE, MigProfile, PodUid};
use wire::json_object::JsonObject;
use wire::report::bodies::{API_VERSION, DeviceReport, DeviceUse, LimitsInForce, Report};
use wire::report::details::device_use;
use wire::report::refusal::{ReportError, text};
use wire::report::report_limits::MAX_NAME_BYTES;
use wire::report::{details, mig};
use wire::seen;

/// A report that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedReport {
    /// The part from which the ledger's state is derived.
    pub facts: NodeReport,
    /// The rest: topology and condition of devices, limits of tenants.
    pub details: DetailsReport,
    /// Term of an earlier leader, and the places of MIG instances that it promised, by pod.
    pub promises: Option<(u64, BTreeMap<PodUid, Vec<Spot>>)>,
    /// What became of the order to clear a GPU.
    pub clear_outcome: Option<ClearOutcome>,
}

impl CheckedReport {
    /// Reads and checks the body of a report.
    ///
    /// # Errors
    /// [`ReportError`] for the first error found. A document of another API version gets that
    /// error, even if nothing else in it can be read.
    pub fn from_json(body: &[u8]) -> Result<Self, ReportError> {
        match parse::<Report>(body) {
            Ok(report) => Self::of(report),
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
    pub fn of(report: Report) -> Result<Self, ReportError> {
        text("agent", &report.agent, MAX_NAME_BYTES)?;
        if report.session.is_none() && report.inventory.is_none() {
            return Err(ReportError::HelloWithoutInventory);
        }
        let conditions = details::conditions(&report.devices)?;
        let tenants = details::tenants(&report.devices)?;
        let mig_failures = mig::failures(report.mig_failures)?;
        let limits = report.memory_limits.map(limits).transpose()?;
        let promises = report.mig_promises.map(promises).transpose()?;
        let containers = report.containers.map(details::containers).transpose()?;
        let driver = report.driver.map(details::driver).transpose()?;
        let (inventory, details) = match report.inventory {
            Some(devices) => {
                let details = details::devices(&devices)?;
                (Some(inventory(devices, &details)?), Some((driver, details)))
            }
            None => (None, None),
        };
        let facts = NodeReport {
            agent: report.agent,
            session: report.session,
            sequence: report.sequence,
            inventory,
            uses: uses(report.devices)?,
            allocations_version: report.allocations_version,
        };
        Ok(Self {
            facts,
            details: DetailsReport {
                inventory: details,
                conditions,
                tenants,
                mig_failures,
                limits,
                containers,
            },
            promises,
            clear_outcome: report.clear_outcome,
        })
    }
}

impl CheckedReport {
    /// The same report, where GPUs without memory of their own have the sizes of their models.
    #[must_use]
    pub fn sized(mut self, sizes: &ModelSizes) -> Self {
        let Some(inventory) = self.facts.inventory.take() else { return self };
        let (inventory, gpus) = inventory.sized(sizes);
        self.facts.inventory = Some(inventory);
        if let Some((_, details)) = &mut self.details.inventory {
            for gpu in gpus {
                details.entry(gpu).or_default().is_size_configured = true;
            }
        }
        self
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
    if let Ok(JsonObject(value)) = serde_json::from_slice(body) {
        return Ok(value);
    }
    // Parse again to find the path: to record it the first time costs as much as the parsing.
    let mut document = serde_json::Deserializer::from_slice(body);
    let JsonObject(value) = serde_path_to_error::deserialize(&mut document).map_err(|error| {
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
    let numbered = gpus.into_iter().map(|gpu| Ok((DeviceId::new(&gpu.gpu)?, gpu.number)));
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
    let mut devices = devices.into_iter().map(of_inventory).collect::<Result<Vec<_>, _>>()?;
    for device in &mut devices {
        if let Some((id, _)) = details.get_key_value(&device.id) {
            device.id = id.clone(); // share one copy of the text
        }
    }
    Ok(NodeInventory::placed(devices, details)?)
}

/// Checks what an earlier leader promised: its term, and the places by pod. What is too much is left out.
fn promises(mut reported: MigPromises) -> Result<(u64, BTreeMap<PodUid, Vec<Spot>>), ReportError> {
    reported.instances.truncate(MAX_MIG_PROMISES);
    let mut by_pod = BTreeMap::<PodUid, Vec<Spot>>::new();
    for MigPromise { pod_uid, gpu, profile, start } in reported.instances {
        text("migPromises.podUid", &pod_uid, MAX_NAME_BYTES)?;
        text("migPromises.profile", &profile, MAX_NAME_BYTES)?;
        let spot = Spot { gpu: DeviceId::new(&gpu)?, profile: MigProfile::new(profile), start };
        by_pod.entry(PodUid::new(pod_uid)).or_default().push(spot);
    }
    Ok((reported.term, by_pod))
}

/// Checks the observed use of all devices.
fn uses(devices: Vec<DeviceUse>) -> Result<Vec<seen::DeviceUse>, ReportError> {
    if devices.len() > MAX_DEVICES_PER_NODE {
        return Err(ReportError::TooManyDevices { count: devices.len() });
    }
    let mut names: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(ReportError::Twice { uuid: DeviceId::new(twice[0])? });
    }
    let uses = devices.into_iter();
    uses.map(|device| device_use(DeviceId::new(&device.uuid)?, device)).collect()
}

#[cfg(test)]
mod tests;
