//! Layouts: which runs of units the MIG instances of a GPU cover.
//!
//! Where an instance can be made depends only on the runs that are taken, each a start and a length.
//! A geometry has few sets of such runs: 417 on eight units, 26 on an A30. They are counted once, and
//! a GPU is then one number. Two profiles with the same units at the same start leave the same layout,
//! as do a profile with media engines and the one without: only one instance per GPU may have these,
//! which the caller checks.
//!
//! Pure values: nothing here creates an instance.

use std::collections::BTreeSet;

use crate::hardware::mig::{Geometry, Profile};
use wire::device::Slot;

/// Most units of a geometry; the longest known has 12.
const MOST_UNITS: u32 = 16;

/// Most profiles of a geometry; the known ones have six at most.
const MOST_PROFILES: usize = 16;

/// Most layouts of a geometry, which bounds the tables to some megabytes.
const MOST_LAYOUTS: usize = 4_096;

/// Bits of a [`Key`] per unit.
const KEY_BITS: u32 = 4;

/// No layout, in the tables.
const NONE: u16 = u16::MAX;

/// The number of a layout. It has a meaning only together with its [`Layouts`].
///
/// A layout has a greater number than all layouts that are left when runs are taken from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayoutId(u16);

impl LayoutId {
    /// The layout without a run, of every geometry.
    pub const EMPTY: Self = Self(0);

    /// As a position in a table with one entry per layout.
    pub fn position(self) -> usize {
        usize::from(self.0)
    }
}

/// The position of a profile in [`Geometry::profiles`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProfileIndex(u8);

impl ProfileIndex {
    /// As a position in a table with one entry per profile.
    pub fn position(self) -> usize {
        usize::from(self.0)
    }
}

/// The unit at which an instance begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Start(pub u32);

/// Why a geometry has no layouts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum LayoutError {
    /// Too many units or profiles.
    #[error("a geometry of `{units}` units and `{profiles}` profiles is larger than the tables")]
    Size {
        /// Its units.
        units: u32,
        /// Its profiles.
        profiles: usize,
    },
    /// A profile without units, one that leaves the GPU, or one whose starts overlap.
    #[error("the starts of profile `{profile}` do not lie beside each other on the GPU")]
    Starts {
        /// Its name.
        profile: String,
    },
    /// More layouts than tables can have.
    #[error("the geometry has too many layouts")]
    Many,
}

/// A set of runs: for each unit the length of the run that begins there, or zero.
type Key = u64;

/// All layouts of one geometry, with what becomes of each when an instance is made or destroyed.
#[derive(Clone, Debug)]
pub struct Layouts {
    geometry: Geometry,
    /// The layouts in rising order.
    keys: Vec<Key>,
    /// The taken units of each layout.
    masks: Vec<u32>,
    /// By layout, profile and start.
    put: Vec<u16>,
    /// By layout and start.
    take: Vec<u16>,
    /// By layout and profile: how many more fit.
    fits: Vec<u8>,
}

impl Layouts {
    /// Counts the layouts of a geometry. Takes about a millisecond.
    ///
    /// # Errors
    /// Any [`LayoutError`]; none for a geometry of [`crate::hardware::mig::GEOMETRIES`].
    pub fn of(geometry: &Geometry) -> Result<Self, LayoutError> {
        let keys = keys_of(geometry, MOST_LAYOUTS)?;
        let (axis, profiles) = (units_of(geometry.axis), geometry.profiles.len());
        let mut layouts = Self {
            geometry: geometry.clone(),
            masks: keys.iter().map(|key| mask_of(*key)).collect(),
            put: vec![NONE; keys.len() * profiles * axis],
            take: vec![NONE; keys.len() * axis],
            fits: vec![0; keys.len() * profiles],
            keys,
        };
        layouts.fill();
        Ok(layouts)
    }

    fn fill(&mut self) {
        let (axis, profiles) = (units_of(self.geometry.axis), self.geometry.profiles.len());
        for layout in 0..self.keys.len() {
            for (at, profile) in self.geometry.profiles.iter().enumerate() {
                for start in profile.free_starts(self.masks[layout]) {
                    let with = self.keys[layout] | run_key(profile.size, start);
                    let with = self.number(with);
                    let position = (layout * profiles + at) * axis + units_of(start);
                    self.put[position] = with;
                    self.take[usize::from(with) * axis + units_of(start)] =
                        u16::try_from(layout).expect("layouts are few");
                    self.fits[layout * profiles + at] += 1;
                }
            }
        }
    }

    fn number(&self, key: Key) -> u16 {
        let found = self.keys.binary_search(&key).expect("all sets of runs are listed");
        u16::try_from(found).expect("layouts are few")
    }

    /// The geometry.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How many layouts there are.
    pub fn count(&self) -> usize {
        self.keys.len()
    }

    /// All layouts, those with fewer runs before those that have these and more.
    pub fn ids(&self) -> impl Iterator<Item = LayoutId> + use<> {
        (0..self.keys.len()).map(|id| LayoutId(u16::try_from(id).expect("layouts are few")))
    }

    /// All profiles, in the order of the geometry.
    pub fn profiles(&self) -> impl Iterator<Item = ProfileIndex> + use<> {
        let count = u8::try_from(self.geometry.profiles.len()).expect("profiles are few");
        (0..count).map(ProfileIndex)
    }

    /// The profile of this name, without `+me`.
    pub fn profile(&self, name: &str) -> Option<ProfileIndex> {
        self.profiles().find(|index| self.entry(*index).name == name)
    }

    fn entry(&self, profile: ProfileIndex) -> &Profile {
        &self.geometry.profiles[profile.position()]
    }

    /// The smallest profile that is accepted: least memory first, then least compute.
    pub fn smallest(&self, is_accepted: impl Fn(&Profile) -> bool) -> Option<ProfileIndex> {
        let accepted = self.profiles().filter(|index| is_accepted(self.entry(*index)));
        accepted.min_by_key(|index| {
            let Profile { memory_mib, multiprocessors, .. } = self.entry(*index);
            (*memory_mib, *multiprocessors, *index)
        })
    }

    /// The units of an instance of a profile.
    pub fn units(&self, profile: ProfileIndex) -> u32 {
        self.entry(profile).size
    }

    /// The layout after an instance of the profile is made at `start`. `None` if it cannot begin there,
    /// or a unit of it is taken.
    pub fn put(&self, layout: LayoutId, profile: ProfileIndex, start: Start) -> Option<LayoutId> {
        if start.0 >= self.geometry.axis {
            return None;
        }
        let row = layout.position() * self.geometry.profiles.len() + profile.position();
        listed(self.put[row * units_of(self.geometry.axis) + units_of(start.0)])
    }

    /// The layout after the instance that begins at `start` is destroyed. `None` if none does.
    pub fn take(&self, layout: LayoutId, start: Start) -> Option<LayoutId> {
        if start.0 >= self.geometry.axis {
            return None;
        }
        listed(self.take[layout.position() * units_of(self.geometry.axis) + units_of(start.0)])
    }

    /// Where an instance of the profile can begin, lowest start first, each with the layout after that.
    pub fn starts(
        &self,
        layout: LayoutId,
        profile: ProfileIndex,
    ) -> impl Iterator<Item = (Start, LayoutId)> + use<'_> {
        let starts = self.entry(profile).starts.iter().map(|start| Start(*start));
        starts.filter_map(move |start| Some((start, self.put(layout, profile, start)?)))
    }

    /// How many more instances of the profile fit. Its starts never overlap, so these are the free ones.
    pub fn fits(&self, layout: LayoutId, profile: ProfileIndex) -> u32 {
        let row = layout.position() * self.geometry.profiles.len();
        u32::from(self.fits[row + profile.position()])
    }

    /// The runs of a layout, lowest start first: start and length in units.
    pub fn runs(&self, layout: LayoutId) -> impl Iterator<Item = (Start, u32)> + use<> {
        let key = self.keys[layout.position()];
        (0..self.geometry.axis)
            .map(move |start| (Start(start), length_at(key, start)))
            .filter(|(_, length)| *length > 0)
    }

    /// The taken units, one bit each; bit 0 is the first unit.
    pub fn mask(&self, layout: LayoutId) -> u32 {
        self.masks[layout.position()]
    }

    /// The free units.
    pub fn free_units(&self, layout: LayoutId) -> u32 {
        self.geometry.axis - self.mask(layout).count_ones()
    }
}

fn listed(layout: u16) -> Option<LayoutId> {
    (layout != NONE).then_some(LayoutId(layout))
}

fn units_of(units: u32) -> usize {
    usize::try_from(units).expect("units are few")
}

/// Checks that a geometry has layouts, and not more than `most`.
///
/// # Errors
/// Any [`LayoutError`].
pub(crate) fn check(geometry: &Geometry, most: usize) -> Result<(), LayoutError> {
    keys_of(geometry, most).map(drop)
}

fn check_size(geometry: &Geometry) -> Result<(), LayoutError> {
    let (units, profiles) = (geometry.axis, geometry.profiles.len());
    if !(1..=MOST_UNITS).contains(&units) || profiles > MOST_PROFILES {
        return Err(LayoutError::Size { units, profiles });
    }
    for profile in &geometry.profiles {
        if !has_separate_starts(profile, units) {
            return Err(LayoutError::Starts { profile: profile.name.clone() });
        }
    }
    Ok(())
}

/// Whether the starts of a profile lie beside each other on a GPU with this many units.
fn has_separate_starts(profile: &Profile, units: u32) -> bool {
    let mut taken = 0_u32;
    profile.starts.iter().all(|start| {
        let is_on_it = start.checked_add(profile.size).is_some_and(|end| end <= units);
        // the length of a run has four bits
        if !(1..1 << KEY_BITS).contains(&profile.size) || !is_on_it {
            return false;
        }
        let own = profile.units(*start);
        let is_free = taken & own == 0;
        taken |= own;
        is_free
    })
}

/// All sets of runs that instances can cover, in rising order. A set is greater than its parts.
fn keys_of(geometry: &Geometry, most: usize) -> Result<Vec<Key>, LayoutError> {
    check_size(geometry)?;
    let (mut known, mut new) = (BTreeSet::from([0]), vec![0]);
    while let Some(key) = new.pop() {
        let taken = mask_of(key);
        for profile in &geometry.profiles {
            for start in profile.free_starts(taken) {
                let with = key | run_key(profile.size, start);
                if known.insert(with) {
                    new.push(with);
                }
            }
        }
        if known.len() > most {
            return Err(LayoutError::Many);
        }
    }
    Ok(known.into_iter().collect())
}

fn run_key(length: u32, start: u32) -> Key {
    u64::from(length) << (KEY_BITS * start)
}

fn length_at(key: Key, start: u32) -> u32 {
    u32::try_from(key >> (KEY_BITS * start) & 0xf).expect("four bits")
}

fn mask_of(key: Key) -> u32 {
    (0..MOST_UNITS)
        .map(|start| Slot { start, size: length_at(key, start) }.units())
        .fold(0, |mask, own| mask | own)
}

#[cfg(test)]
mod tests;
