//! The agent's own condition: what its probes show, and what it has to know before it ends itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::mig::capabilities;
use crate::mig::capabilities::ListedInstances;
use crate::mps::daemons::MpsDaemons;
use crate::processes::pods::read_lossily;
use crate::upkeep::renewal::{REFUSED_FOR, has_driver};
use wire::units::Timestamp;

/// How long an accepted report makes the agent ready: six heartbeats.
pub const READY_FOR: Duration = Duration::from_secs(30);

/// Where the kernel's list of MIG instances is, below the host's `/proc`.
pub(crate) const CAPABILITIES: &str = "driver/nvidia/capabilities";

/// Most bytes of the list of modules that are read; a node has about 20 KiB.
const MAX_MODULES_BYTES: u64 = 1 << 20;

/// Whether the kernel has loaded NVIDIA's module; `None` if that cannot be read. The list is the host's in every
/// container.
pub(crate) fn is_module_loaded(proc_root: &Path) -> Option<bool> {
    let modules = read_lossily(&proc_root.join("modules"), MAX_MODULES_BYTES)?;
    Some(has_driver(&modules))
}

/// What an agent has to look after.
#[derive(Clone, Debug)]
pub struct Upkeep {
    /// Where the host's process table is, with the list of the kernel's modules; none if devices are played.
    pub proc_root: Option<PathBuf>,
    /// Where the kernel's list of MIG instances is; none if devices are played.
    pub capabilities: Option<PathBuf>,
    /// Whether NVIDIA's module was loaded when the process began; none if that is not known.
    pub was_loaded: Option<bool>,
    /// The daemons of MPS that end with this process.
    pub daemons: Option<MpsDaemons>,
    /// How long the library may refuse to start.
    pub refused_for: Duration,
    /// When a report was accepted.
    pub accepted: LastAccepted,
}

impl Default for Upkeep {
    fn default() -> Self {
        let accepted = LastAccepted::default();
        Self {
            proc_root: None,
            capabilities: None,
            was_loaded: None,
            daemons: None,
            refused_for: REFUSED_FOR,
            accepted,
        }
    }
}

impl Upkeep {
    /// Whether the kernel has loaded NVIDIA's module; `None` if that cannot be read.
    pub(crate) fn is_module_loaded(&self) -> Option<bool> {
        is_module_loaded(self.proc_root.as_ref()?)
    }

    /// The MIG instances that the kernel lists; `None` if there is no list.
    pub(crate) fn listed_instances(&self) -> Option<ListedInstances> {
        capabilities::all(self.capabilities.as_ref()?)
    }

    /// Whether daemons that end with this process have clients, as far as they say.
    pub(crate) async fn has_clients(&self) -> bool {
        match &self.daemons {
            Some(daemons) => daemons.have_clients().await,
            None => false,
        }
    }
}

/// When an extender last accepted a report of this process; a handle, cheap to copy.
#[derive(Clone, Debug, Default)]
pub struct LastAccepted(Arc<Mutex<Option<Timestamp>>>);

impl LastAccepted {
    /// Notes that one was accepted.
    pub fn note(&self, now: Timestamp) {
        *self.0.lock() = Some(now);
    }

    /// Whether that is recent enough.
    pub fn is_recent(&self, now: Timestamp) -> bool {
        self.0.lock().is_some_and(|accepted| now.since(accepted) < READY_FOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_accepted_report_makes_ready_for_half_a_minute() {
        let accepted = LastAccepted::default();
        let at = Timestamp::from_millis;
        assert!(!accepted.is_recent(at(0)));
        accepted.note(at(5_000));
        assert!(accepted.is_recent(at(34_999)) && !accepted.is_recent(at(35_000)));
    }

    #[test]
    fn modules_that_cannot_be_read_are_neither_there_nor_absent() {
        let folder = tempfile::tempdir().unwrap();
        let upkeep = Upkeep { proc_root: Some(folder.path().to_owned()), ..Upkeep::default() };
        assert_eq!(upkeep.is_module_loaded(), None);
        assert_eq!(Upkeep::default().is_module_loaded(), None);
        for (modules, expected) in [(&b"\xff\nnvidia 1\n"[..], true), (b"nvidia_uvm 1\n", false)] {
            std::fs::write(folder.path().join("modules"), modules).unwrap();
            assert_eq!(upkeep.is_module_loaded(), Some(expected));
        }
    }
}
