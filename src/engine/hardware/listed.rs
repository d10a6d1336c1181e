//! The geometry of a GPU whose model has no table, from the profiles that NVML lists for it.
//!
//! The list comes with an agent's report. It is checked before it is used to choose places, and a GPU whose list
//! fails has no geometry: its instances are made at the first free spot. A geometry only says what places cost and
//! which part of its GPU an instance is. Where an instance may lie is a matter of the list and of the other
//! instances, so another list than before changes no placement.

use std::collections::BTreeSet;

use crate::hardware::layouts;
use crate::hardware::layouts::LayoutError;
use crate::hardware::mig::{Geometry, Profile};
use wire::device::MakeableProfile;
use wire::ids::MigProfile;
use wire::units::MemMib;

/// Most layouts of a listed geometry. Eight units as on A100 have 417. The waste of each is computed again for each
/// request mix.
const MOST_LAYOUTS: usize = 1_024;

/// Most slices of a GPU; in 2026 there are seven at most.
const MOST_SLICES: u64 = 64;

/// Why the list of a GPU gives no geometry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum ListFault {
    /// The name says no slices and no memory.
    #[error("the name of profile `{profile}` is not of the form `2g.20gb`")]
    Name {
        /// Its name.
        profile: String,
    },
    /// A variant of another size.
    #[error("the variants of profile `{profile}` differ in size")]
    Variant {
        /// Its name, without the variant.
        profile: String,
    },
    /// None begins at unit 0 and covers all units, or one has more slices or multiprocessors than that.
    #[error("no profile is the whole GPU")]
    Whole,
    /// The driver does not report them.
    #[error("the multiprocessors of profile `{profile}` are not known")]
    Multiprocessors {
        /// Its name.
        profile: String,
    },
    /// More than a larger profile has, or together more than the GPU.
    #[error("the instances of profile `{profile}` have too much memory")]
    Memory {
        /// Its name.
        profile: String,
    },
    /// No layouts can be counted.
    #[error(transparent)]
    Layouts(#[from] LayoutError),
    /// Too many different lists on one node.
    #[error("the GPUs of its node have too many different lists of profiles")]
    Lists,
}

impl Geometry {
    /// The geometry of a GPU with this much memory, for which NVML lists these profiles.
    ///
    /// # Errors
    /// The first [`ListFault`].
    pub fn listed(total: MemMib, list: &[MakeableProfile]) -> Result<Self, ListFault> {
        let mut plain: Vec<&MakeableProfile> = Vec::new();
        let names: BTreeSet<&str> = list.iter().map(|entry| entry.profile.plain()).collect();
        for name in names {
            let mut variants = list.iter().filter(|entry| entry.profile.plain() == name);
            let usual = variants.clone().find(|entry| entry.profile.as_str() == name);
            let Some(first) = usual.or_else(|| variants.clone().next()) else { continue };
            if variants.any(|entry| entry.size != first.size) {
                return Err(ListFault::Variant { profile: name.to_owned() });
            }
            plain.push(first);
        }
        let profiles: Result<Vec<Profile>, ListFault> =
            plain.into_iter().map(|entry| profile(entry, list)).collect();
        let mut profiles = profiles?;
        profiles.sort_by(|a, b| order(a).cmp(&order(b)));
        let axis = profiles.iter().map(end).max().unwrap_or(0);
        let geometry = Self { names: &[], total_mib: total.mib(), axis, profiles };
        check(&geometry)?;
        layouts::check(&geometry, MOST_LAYOUTS)?;
        Ok(geometry)
    }

    /// Whether it is from a list of NVML, and not of the table.
    pub fn is_listed(&self) -> bool {
        self.names.is_empty()
    }
}

/// The first unit that no instance of the profile covers.
fn end(profile: &Profile) -> u32 {
    profile.starts.iter().max().map_or(0, |start| start.saturating_add(profile.size))
}

/// Small ones first.
fn order(profile: &Profile) -> (u32, u64, u32, u64, &str) {
    let Profile { name, multiprocessors, memory_mib, size, .. } = profile;
    (*size, profile.slices(), *multiprocessors, *memory_mib, name)
}

/// One profile of the list, with what follows its name in others.
fn profile(entry: &MakeableProfile, list: &[MakeableProfile]) -> Result<Profile, ListFault> {
    let name = entry.profile.plain().to_owned();
    if !MigProfile::new(name.as_str()).has_usual_name() {
        return Err(ListFault::Name { profile: name });
    }
    let Some(multiprocessors) = entry.sm_count else {
        return Err(ListFault::Multiprocessors { profile: name });
    };
    let variants = list.iter().filter_map(|other| other.profile.as_str().strip_prefix(&name));
    let variants = variants.filter(|variant| !variant.is_empty()).map(str::to_owned).collect();
    let (memory_mib, starts) = (entry.memory.mib(), entry.starts.clone());
    Ok(Profile { name, multiprocessors, memory_mib, starts, size: entry.size, variants })
}

/// Whether the last profile is the whole GPU, and the others are parts of it.
fn check(geometry: &Geometry) -> Result<(), ListFault> {
    let whole = geometry.profiles.last().ok_or(ListFault::Whole)?;
    let is_whole = whole.starts == [0] && whole.size == geometry.axis;
    let are_parts = geometry.profiles.iter().all(|part| {
        part.slices() <= whole.slices().min(MOST_SLICES)
            && part.multiprocessors <= whole.multiprocessors
    });
    if !is_whole || !are_parts {
        return Err(ListFault::Whole);
    }
    for profile in &geometry.profiles {
        let count = u64::try_from(profile.starts.len()).unwrap_or(u64::MAX);
        let mut larger = geometry.profiles.iter().filter(|other| other.size > profile.size);
        let is_too_much = profile.memory_mib.saturating_mul(count) > geometry.total_mib
            || larger.any(|other| other.memory_mib < profile.memory_mib);
        if is_too_much {
            return Err(ListFault::Memory { profile: profile.name.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
