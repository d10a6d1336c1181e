//! What a report says about MIG on demand: the instances that its agent can make, and the orders
//! that it could not carry out.

use std::collections::BTreeSet;

use crate::api::state::{DeviceKind, MigPlacement};
use crate::device::{FailedMigOrder, MAX_UNITS, MakeableProfile, Slot};
use crate::ids::{DeviceId, MigProfile};
use crate::report::bodies::{DeviceReport, MigFailure, MigProfileReport};
use crate::report::refusal::{ReportError, memory, text};
use crate::report::report_limits::{
    MAX_MIG_ERROR_BYTES, MAX_MIG_FAILURES, MAX_MIG_PROFILES, MAX_MIG_STARTS, MAX_NAME_BYTES,
    MAX_SM_COUNT,
};

/// Longest axis of MIG instances that is accepted; in 2026 GPUs have 4, 8 or 12 units.
const MAX_AXIS: u32 = 64;

impl MigFailure {
    /// Whether an extender would accept it.
    pub fn is_believable(&self) -> bool {
        failures(vec![self.clone()]).is_ok()
    }
}

impl MigProfileReport {
    /// What cannot be about it, beside its name and its memory.
    fn fault(&self) -> Option<&'static str> {
        if self.memory_mib == 0 {
            Some("its instances have no memory")
        } else if self.sm_count.is_some_and(|count| !(1..=MAX_SM_COUNT).contains(&count)) {
            Some("its instances have an impossible number of multiprocessors")
        } else if !(1..=MAX_UNITS).contains(&self.size) {
            Some("its size is not between 1 and 32 units")
        } else if self.starts.is_empty() || self.starts.len() > MAX_MIG_STARTS {
            Some("it has no start, or more than 16")
        } else if self.starts.windows(2).any(|pair| pair[0] >= pair[1]) {
            Some("its starts do not rise")
        } else if self.starts.iter().any(|start| *start > MAX_UNITS - self.size) {
            Some("its instances reach beyond unit 32")
        } else {
            None
        }
    }
}

/// Checks where an instance of the GPU `id` lies, or a part of it.
pub(crate) fn slot(id: &DeviceId, placement: MigPlacement) -> Result<Slot, ReportError> {
    let MigPlacement { start, size } = placement;
    let (field, value) = match size {
        1..=MAX_AXIS if start <= MAX_AXIS - size => return Ok(Slot { start, size }),
        1..=MAX_AXIS => ("place of a MIG instance", start),
        _ => ("size of a MIG instance", size),
    };
    Err(ReportError::Detail { uuid: id.clone(), field, value })
}

/// Checks the instances that can be made on the device `id`.
pub(crate) fn profiles(
    id: &DeviceId,
    report: &DeviceReport,
) -> Result<Vec<MakeableProfile>, ReportError> {
    // The version before could switch the MIG mode of some GPUs, and its agents list what they would make there.
    if report.kind == DeviceKind::Gpu {
        return Ok(Vec::new());
    }
    let mut names = BTreeSet::new();
    let mut profiles = Vec::with_capacity(report.mig_profiles.len().min(MAX_MIG_PROFILES));
    for listed in &report.mig_profiles {
        text("migProfiles.profile", &listed.profile, MAX_NAME_BYTES)?;
        let fault = if report.kind != DeviceKind::MigParent {
            Some("the device is no GPU in MIG mode")
        } else if profiles.len() == MAX_MIG_PROFILES {
            Some("the GPU has more than 32 profiles")
        } else if !names.insert(&listed.profile) {
            Some("it is there twice")
        } else {
            listed.fault()
        };
        if let Some(fault) = fault {
            let profile = listed.profile.clone();
            return Err(ReportError::MigProfile { uuid: id.clone(), profile, fault });
        }
        profiles.push(MakeableProfile {
            profile: MigProfile::new(listed.profile.clone()),
            memory: memory(id, listed.memory_mib)?,
            sm_count: listed.sm_count,
            size: listed.size,
            starts: listed.starts.clone(),
        });
    }
    Ok(profiles)
}

/// Checks the orders that could not be carried out.
pub fn failures(failures: Vec<MigFailure>) -> Result<Vec<FailedMigOrder>, ReportError> {
    if failures.len() > MAX_MIG_FAILURES {
        return Err(ReportError::TooManyMigFailures { count: failures.len() });
    }
    failures.into_iter().map(checked_failure).collect()
}

fn checked_failure(failure: MigFailure) -> Result<FailedMigOrder, ReportError> {
    let MigFailure { gpu, profile, start, instance, error, hidden } = failure;
    let gpu = DeviceId::new(&gpu)?;
    text("migFailures.profile", &profile, MAX_NAME_BYTES)?;
    text("migFailures.error", &error, MAX_MIG_ERROR_BYTES)?;
    if start >= MAX_UNITS {
        let field = "first unit of a MIG instance";
        return Err(ReportError::Detail { uuid: gpu, field, value: start });
    }
    let removed = instance.as_deref().map(DeviceId::new).transpose()?;
    let hidden = hidden.map(|units| slot(&gpu, units)).transpose()?;
    Ok(FailedMigOrder { gpu, profile: MigProfile::new(profile), start, removed, error, hidden })
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::units::MemMib;

    fn parent(mig_profiles: Vec<MigProfileReport>) -> DeviceReport {
        let gpu = DeviceReport::new("GPU-a".to_owned(), 0, "M".to_owned(), DeviceKind::MigParent);
        DeviceReport { mig_profiles, ..gpu }
    }

    fn profile(name: &str, size: u32, starts: &[u32]) -> MigProfileReport {
        MigProfileReport {
            profile: name.to_owned(),
            memory_mib: 9_728,
            sm_count: Some(14),
            size,
            starts: starts.to_vec(),
        }
    }

    #[test]
    fn a_profile_is_carried_over_as_it_is_reported() {
        let id = DeviceId::new("GPU-a").unwrap();
        let without = MigProfileReport { sm_count: None, ..profile("1g.10gb+me", 1, &[0, 6]) };
        let all = profiles(&id, &parent(vec![profile("3g.40gb", 4, &[0, 4]), without])).unwrap();
        let expected = |name: &str, sm_count, size, starts: &[u32]| MakeableProfile {
            profile: MigProfile::new(name),
            memory: MemMib::new(9_728),
            sm_count,
            size,
            starts: starts.to_vec(),
        };
        let whole =
            [expected("3g.40gb", Some(14), 4, &[0, 4]), expected("1g.10gb+me", None, 1, &[0, 6])];
        assert_eq!(all, whole);
    }

    #[test]
    fn a_profile_that_cannot_be_is_refused_with_its_fault() {
        let id = DeviceId::new("GPU-a").unwrap();
        let good = || profile("1g.10gb", 1, &[0, 1]);
        let many: Vec<_> = (0..33).map(|n| profile(&format!("{n}g"), 1, &[0])).collect();
        let starts: Vec<u32> = (0..17).collect();
        for (report, part) in [
            (parent(vec![good(), good()]), "twice"),
            (parent(many), "more than 32 profiles"),
            (parent(vec![profile("", 1, &[0])]), "`migProfiles.profile` has 0 bytes"),
            (parent(vec![profile("a\n", 1, &[0])]), "`migProfiles.profile` has 2 bytes"),
            (parent(vec![profile("a", 0, &[0])]), "its size"),
            (parent(vec![profile("a", u32::MAX, &[0])]), "its size"),
            (parent(vec![profile("a", 1, &[])]), "no start"),
            (parent(vec![profile("a", 1, &starts)]), "more than 16"),
            (parent(vec![profile("a", 1, &[1, 1])]), "do not rise"),
            (parent(vec![profile("a", 1, &[u32::MAX])]), "beyond unit 32"),
            (parent(vec![profile("a", 4, &[0, 29])]), "beyond unit 32"),
            (parent(vec![MigProfileReport { memory_mib: 0, ..good() }]), "no memory"),
            (parent(vec![MigProfileReport { memory_mib: u64::MAX, ..good() }]), "MiB` on device"),
            (parent(vec![MigProfileReport { sm_count: Some(0), ..good() }]), "multiprocessors"),
            (
                DeviceReport { kind: DeviceKind::MigInstance, ..parent(vec![good()]) },
                "no GPU in MIG mode",
            ),
        ] {
            let error = profiles(&id, &report).unwrap_err().to_string();
            assert!(error.contains(part), "{error}: {part}");
            assert!(!report.has_believable_details(), "{report:?}");
        }
        assert!(parent(vec![profile("a", 4, &[0, 28])]).has_believable_details());
    }

    #[test]
    fn failed_orders_are_carried_over_within_their_limits() {
        let failure = |error: &str, start| MigFailure {
            gpu: "GPU-a".to_owned(),
            profile: "1g.10gb".to_owned(),
            start,
            instance: Some("MIG-a".to_owned()),
            error: error.to_owned(),
            hidden: Some(MigPlacement { start: 4, size: 4 }),
        };
        let checked = failures(vec![failure("it is in use", 6)]).unwrap();
        let id = |text| DeviceId::new(text).unwrap();
        let expected = FailedMigOrder {
            gpu: id("GPU-a"),
            profile: MigProfile::new("1g.10gb"),
            start: 6,
            removed: Some(id("MIG-a")),
            error: "it is in use".to_owned(),
            hidden: Some(Slot { start: 4, size: 4 }),
        };
        assert_eq!(checked, [expected]);
        assert!(failures(vec![failure(&"e".repeat(512), 31); 64]).is_ok());
        let unnamed = MigFailure { gpu: String::new(), ..failure("e", 0) };
        let lost = MigFailure { instance: Some("a,b".to_owned()), ..failure("e", 0) };
        let beyond = |start, size| MigFailure {
            hidden: Some(MigPlacement { start, size }),
            ..failure("e", 0)
        };
        for (bad, part) in [
            (vec![beyond(0, 0)], "`0` is no size of a MIG instance"),
            (vec![beyond(0, u32::MAX)], "is no size of a MIG instance"),
            (vec![beyond(u32::MAX, 1)], "is no place of a MIG instance"),
            (vec![failure("e", 0); 65], "`65` failed orders"),
            (vec![failure(&"e".repeat(513), 0)], "`migFailures.error` has 513 bytes"),
            (vec![failure("a\nb", 0)], "`migFailures.error`"),
            (vec![failure("", 0)], "`migFailures.error`"),
            (vec![failure("e", 32)], "`32` is no first unit"),
            (vec![unnamed], ""),
            (vec![lost], "a,b"),
        ] {
            let error = failures(bad).unwrap_err().to_string();
            assert!(error.contains(part), "{error}: {part}");
        }
    }
}
