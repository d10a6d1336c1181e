//! The section `guard` of the configuration: the memory guard, for pods that use more GPU memory
//! than they may.

use std::time::Duration;

use crate::config::reader::Reader;
use crate::hardware::units::MemMib;

/// What happens to an over-limit pod, beside a report of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverUse {
    /// Nothing.
    #[default]
    Told,
    /// It is evicted.
    Evicted,
}

/// Checked section `guard`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardConfig {
    /// What happens to an over-limit pod.
    pub over_use: OverUse,
    /// The number of successive lists of processes that must show a pod over its limit before it is
    /// evicted; at least 2.
    pub after_sightings: u32,
    /// Use up to this much beyond what a pod may use does not count.
    pub tolerance: MemMib,
    /// How long a pod that is no longer alone on its GPU may still use memory up to its limit.
    pub grace: Duration,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self {
            over_use: OverUse::default(),
            after_sightings: 2,
            tolerance: MemMib::new(128),
            grace: Duration::from_secs(30),
        }
    }
}

/// All keys of the section, in the order of the docs.
pub const KEYS: [&str; 4] = ["evict", "after_sightings", "tolerance_mib", "grace_seconds"];

impl GuardConfig {
    /// Takes the section's keys out of `reader`.
    pub(crate) fn read(reader: &mut Reader) -> Self {
        let default = Self::default();
        let sightings =
            reader.number("after_sightings", 2..=1_000, u64::from(default.after_sightings));
        let tolerance = reader.number("tolerance_mib", 0..=65_536, default.tolerance.mib());
        Self {
            over_use: reader.switch("evict", [OverUse::Told, OverUse::Evicted], default.over_use),
            after_sightings: u32::try_from(sightings).unwrap_or(default.after_sightings),
            tolerance: MemMib::new(tolerance),
            grace: reader.seconds("grace_seconds", 0..=3600, default.grace),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;

    #[test]
    fn every_key_is_read_and_nothing_is_evicted_unless_asked_for() {
        let text = "guard: { evict: true, after_sightings: 3, tolerance_mib: 0, grace_seconds: 7 }";
        let expected = GuardConfig {
            over_use: OverUse::Evicted,
            after_sightings: 3,
            tolerance: MemMib::ZERO,
            grace: Duration::from_secs(7),
        };
        assert_eq!(Config::from_yaml(text).unwrap().guard, expected);
        assert!(KEYS.iter().all(|key| text.contains(&format!("{key}:"))));
        assert_eq!(Config::from_yaml("guard:").unwrap().guard.over_use, OverUse::Told);
    }

    #[test]
    fn faults_name_the_section() {
        let text = "guard: { evict: sure, after_sightings: 1, tolerance_mib: -1, evicts: true }";
        let faults = Config::from_yaml(text).unwrap_err();
        assert_eq!(faults.faults.len(), 4, "{faults}");
        for part in
            ["`guard.evict: sure`", "2 to 1000", "`guard.tolerance_mib: -1`", "guard.evicts"]
        {
            assert!(faults.to_string().contains(part), "{part} in {faults}");
        }
    }
}
