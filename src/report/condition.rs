//! How a device is: why it takes no new tenants, and how its daemon of MPS is.

use serde::{Deserialize, Serialize};

/// Why a device takes no new tenants. Its bookings stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ailment {
    /// The driver is away, in the middle of an upgrade or hangs: nothing is known of any device.
    DriverAway,
    /// It has fallen off the bus.
    Lost,
    /// The driver wants it to be reset.
    ResetRequired,
    /// The driver wants the node to be rebooted.
    RebootRequired,
    /// The driver wants its traffic to other GPUs to end.
    DrainRequired,
    /// The driver says that it is not available.
    Unavailable,
    /// An Xid that is no application's fault; the number is in [`DeviceUse::last_xid`](crate::report::wire::DeviceUse::last_xid).
    Xid,
    /// It does not answer, or not in full.
    NotAnswering,
    /// Another device has the same UUID.
    UuidTwice,
    /// What it says of itself cannot be.
    Absurd,
    /// It has no memory of its own that could be shared.
    NoMemory,
    /// Kubelet hands it out by itself.
    KubeletOwned,
    /// Something that only a newer agent knows.
    #[serde(other)]
    Other,
}

impl Ailment {
    /// Its name, as on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DriverAway => "driver_away",
            Self::Lost => "lost",
            Self::ResetRequired => "reset_required",
            Self::RebootRequired => "reboot_required",
            Self::DrainRequired => "drain_required",
            Self::Unavailable => "unavailable",
            Self::Xid => "xid",
            Self::NotAnswering => "not_answering",
            Self::UuidTwice => "uuid_twice",
            Self::Absurd => "absurd",
            Self::NoMemory => "no_memory",
            Self::KubeletOwned => "kubelet_owned",
            Self::Other => "other",
        }
    }
}

/// How a control daemon of MPS is; what is worse for its clients is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MpsState {
    /// It answers, and has no server: it has no clients.
    Idle,
    /// It answers, and each of its servers takes clients.
    Serving,
    /// A server is not ready yet.
    Starting,
    /// A server takes no clients any more, or does not say.
    Faulted,
    /// Nobody answers at its pipes.
    Absent,
    /// Something that only a newer agent knows.
    #[serde(other)]
    Other,
}

impl MpsState {
    /// Its name, as on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Serving => "serving",
            Self::Starting => "starting",
            Self::Faulted => "faulted",
            Self::Absent => "absent",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::wire::{DeviceUse, TenantReport};
    use crate::usage::node_details::Condition;

    #[test]
    fn states_of_mps_are_spelt_as_on_the_wire_and_may_be_missing_or_newer() {
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
        assert_eq!(read(r#","mps":"partitioned""#), Some(MpsState::Other));
        assert_eq!(read(""), None);
        let older = r#"{"pod_uid":"p","limit_mib":7,"is_mps_client":true}"#;
        let older: TenantReport = serde_json::from_str(older).unwrap();
        assert_eq!((older.is_mps_client, older.mps_limit_mib), (true, None));
    }
}
