//! The condition of a device: why it takes no new tenants, and the state of its MPS daemon.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a device takes no new tenants. What is allocated on it stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub enum DeviceFault {
    /// The driver is missing, is being upgraded or hangs: the state of all devices is unknown.
    DriverAway,
    /// It is no longer on the PCIe bus.
    Lost,
    /// The driver requires a reset.
    ResetRequired,
    /// The driver requires a reboot of the node.
    RebootRequired,
    /// The driver requires that its traffic to other GPUs ends.
    DrainRequired,
    /// The driver says that it is not available.
    Unavailable,
    /// An Xid that no application caused; its number is in
    /// [`DeviceUse::last_xid`](crate::report::wire::DeviceUse::last_xid).
    Xid,
    /// It does not answer, or only in part.
    NotAnswering,
    /// Another device has the same UUID.
    UuidTwice,
    /// It reports impossible values.
    Absurd,
    /// It has no memory of its own to share.
    NoMemory,
    /// Kubelet gives it to pods.
    KubeletOwned,
    /// A reason that only a newer agent knows.
    #[serde(other)]
    Other,
}

impl DeviceFault {
    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DriverAway => "DriverAway",
            Self::Lost => "Lost",
            Self::ResetRequired => "ResetRequired",
            Self::RebootRequired => "RebootRequired",
            Self::DrainRequired => "DrainRequired",
            Self::Unavailable => "Unavailable",
            Self::Xid => "Xid",
            Self::NotAnswering => "NotAnswering",
            Self::UuidTwice => "UuidTwice",
            Self::Absurd => "Absurd",
            Self::NoMemory => "NoMemory",
            Self::KubeletOwned => "KubeletOwned",
            Self::Other => "Other",
        }
    }
}

/// The state of an MPS control daemon; greater is worse for its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub enum MpsState {
    /// It answers. It has no server, so no clients.
    Idle,
    /// It answers, and all its servers take clients.
    Serving,
    /// A server is not ready yet.
    Starting,
    /// A server no longer takes clients, or does not say.
    Faulted,
    /// Nothing answers at its pipes.
    Absent,
    /// A state that only a newer agent knows.
    #[serde(other)]
    Other,
}

impl MpsState {
    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "Idle",
            Self::Serving => "Serving",
            Self::Starting => "Starting",
            Self::Faulted => "Faulted",
            Self::Absent => "Absent",
            Self::Other => "Other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::wire::{DeviceUse, TenantReport};
    use crate::usage::node_details::Condition;

    #[test]
    fn mps_states_have_wire_names_and_may_be_missing_or_newer() {
        let read = |field: &str| {
            let seen = format!(r#"{{"uuid":"GPU-a","healthy":true{field}}}"#);
            serde_json::from_str::<DeviceUse>(&seen).unwrap().mps
        };
        for state in [
            MpsState::Idle,
            MpsState::Serving,
            MpsState::Starting,
            MpsState::Faulted,
            MpsState::Absent,
            MpsState::Other,
        ] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
            assert_eq!(read(&format!(r#","mps":"{}""#, state.name())), Some(state));
        }
        let is_away = |state: &MpsState| {
            let mps = Some(state.name());
            Condition { mps, ..Condition::default() }.is_mps_away()
        };
        assert!([MpsState::Absent, MpsState::Faulted].iter().all(is_away));
        assert!(![MpsState::Idle, MpsState::Serving, MpsState::Starting].iter().any(is_away));
        assert_eq!(read(r#","mps":"Partitioned""#), Some(MpsState::Other));
        assert_eq!(read(""), None);
        let older = r#"{"podUid":"p","limitMib":7,"isMpsClient":true}"#;
        let older: TenantReport = serde_json::from_str(older).unwrap();
        assert_eq!((older.is_mps_client, older.mps_limit_mib), (true, None));
    }
}
