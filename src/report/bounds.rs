//! What a report may hold at most, and why one is refused.

use crate::hardware::device::{DeviceId, InventoryError, MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE};
use crate::hardware::units::MemMib;
use crate::report::wire::{Kind, SCHEMA_VERSION};

/// Most processes of one device that are believed in one report.
pub const MAX_PROCESSES_PER_DEVICE: usize = 4096;

/// Longest instance id of an agent, pod UID and MIG profile.
pub(crate) const MAX_NAME_BYTES: usize = 64;

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

/// Checks that a name is short and can be printed.
pub(crate) fn text(field: &'static str, value: &str, max: usize) -> Result<(), ReportError> {
    if value.is_empty() || value.len() > max || value.chars().any(char::is_control) {
        return Err(ReportError::Text { field, bytes: value.len(), max });
    }
    Ok(())
}

/// Checks an amount of memory on the device `id`.
pub(crate) fn memory(id: &DeviceId, mib: u64) -> Result<MemMib, ReportError> {
    let memory = MemMib::new(mib);
    if memory > MAX_DEVICE_MEMORY {
        return Err(ReportError::Memory { uuid: id.clone(), mib });
    }
    Ok(memory)
}
