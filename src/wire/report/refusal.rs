//! Why a report is refused.

use crate::api::state::DeviceKind;
use crate::device::InventoryError;
use crate::ids::{DeviceId, MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE, NotAUuid};
use crate::report::bodies::API_VERSION;
use crate::report::report_limits::{MAX_MIG_FAILURES, MAX_PROCESSES_PER_DEVICE};
use crate::units::MemMib;

/// Why a report is refused.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Not the JSON of a report.
    #[error("the report cannot be read at `{at}`: {cause}")]
    Malformed {
        /// The path in the document, cut.
        at: String,
        /// What the parser says, cut.
        cause: String,
    },
    /// Another API version.
    #[error(
        "API version `{version}` is unknown, this extender's is `{API_VERSION}`: install agent and \
         extender of one release"
    )]
    Version {
        /// The version of the report.
        version: String,
    },
    /// An empty or long name, or one with control characters.
    #[error("`{field}` has {bytes} bytes; 1 to {max} printable characters are allowed")]
    Text {
        /// The name of the field.
        field: &'static str,
        /// Its length, in bytes.
        bytes: usize,
        /// The maximum, in bytes.
        max: usize,
    },
    /// A report without a session must carry the inventory.
    #[error("a report without a session says hello and must carry the inventory")]
    HelloWithoutInventory,
    /// A MIG instance without parent or profile, or a GPU with them.
    #[error(
        "device `{uuid}` of kind `{kind:?}`: parent and profile belong to instances, and to each"
    )]
    Kind {
        /// The device.
        uuid: DeviceId,
        /// Its kind.
        kind: DeviceKind,
    },
    /// An inventory that is not possible.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// More devices, or neighbors of a device, than a node can have.
    #[error("use of `{count}` devices is reported, at most {MAX_DEVICES_PER_NODE} are believed")]
    TooManyDevices {
        /// The number of them.
        count: usize,
    },
    /// The same device twice.
    #[error("use of device `{uuid}` is reported twice")]
    Twice {
        /// The device.
        uuid: DeviceId,
    },
    /// A device among its own neighbors, or a neighbor twice.
    #[error("device `{uuid}` names its neighbor `{neighbor}` twice, or is its own neighbor")]
    Neighbor {
        /// The device.
        uuid: DeviceId,
        /// The neighbor.
        neighbor: DeviceId,
    },
    /// More memory than any device has.
    #[error("use of `{mib} MiB` on device `{uuid}`, at most {MAX_DEVICE_MEMORY} are believed")]
    Memory {
        /// The device.
        uuid: DeviceId,
        /// The amount.
        mib: u64,
    },
    /// A percentage above 100.
    #[error("device `{uuid}` is busy `{percent}` percent of the time")]
    Busy {
        /// The device.
        uuid: DeviceId,
        /// The percentage.
        percent: u8,
    },
    /// A number outside the range of a device.
    #[error("device `{uuid}`: `{value}` is no {field}")]
    Detail {
        /// The device.
        uuid: DeviceId,
        /// What the number should be.
        field: &'static str,
        /// The number.
        value: u32,
    },
    /// A MIG profile that cannot be, or on a device on which no instance can be made.
    #[error("device `{uuid}`: MIG profile `{profile}`: {fault}")]
    MigProfile {
        /// The device.
        uuid: DeviceId,
        /// The profile.
        profile: String,
        /// What is wrong.
        fault: &'static str,
    },
    /// More failed orders than are allowed.
    #[error("`{count}` failed orders about MIG instances, at most {MAX_MIG_FAILURES} are believed")]
    TooManyMigFailures {
        /// The number of them.
        count: usize,
    },
    /// More processes on a device than are allowed.
    #[error(
        "`{count}` processes on device `{uuid}`, at most {MAX_PROCESSES_PER_DEVICE} are believed"
    )]
    TooManyProcesses {
        /// The device.
        uuid: DeviceId,
        /// The number of them.
        count: usize,
    },
}

impl From<NotAUuid> for ReportError {
    fn from(error: NotAUuid) -> Self {
        Self::Inventory(error.into())
    }
}

/// Checks that a name is short and can be printed.
pub fn text(field: &'static str, value: &str, max: usize) -> Result<(), ReportError> {
    if value.is_empty() || value.len() > max || value.chars().any(char::is_control) {
        return Err(ReportError::Text { field, bytes: value.len(), max });
    }
    Ok(())
}

/// Checks that an amount of memory on the device `id` is possible.
pub(crate) fn memory(id: &DeviceId, mib: u64) -> Result<MemMib, ReportError> {
    let memory = MemMib::new(mib);
    if memory > MAX_DEVICE_MEMORY {
        return Err(ReportError::Memory { uuid: id.clone(), mib });
    }
    Ok(memory)
}
