//! What all GPUs in MIG mode have left, in counters that each change updates.

use crate::hardware::layouts::LayoutId;
use crate::waste::mig::class::{MigClass, MigClassId};
use crate::waste::mig::types::{MigType, TypeId};

/// Counters over all GPUs: free starts of each profile, free units, and running instances of each type.
/// Nothing is counted again: a change of a GPU costs two look-ups and one sum per profile.
///
/// An empty GPU that may change to MIG mode counts as one without a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigSupply {
    /// `S`, by class and profile.
    fits: Vec<Vec<u64>>,
    /// `F`
    free_units: u64,
    /// `N`, by type.
    running: Vec<u64>,
}

impl MigSupply {
    /// No GPUs of these classes.
    pub fn none(classes: &[MigClass]) -> Self {
        let profiles = classes.iter().map(|class| class.layouts().profiles().count());
        let fits = profiles.map(|count| vec![0; count]).collect();
        Self { fits, free_units: 0, running: Vec::new() }
    }

    /// A GPU came that has this layout.
    pub fn add(&mut self, classes: &[MigClass], class: MigClassId, layout: LayoutId) {
        let layouts = classes[class.0].layouts();
        for (kept, profile) in self.fits[class.0].iter_mut().zip(layouts.profiles()) {
            *kept += u64::from(layouts.fits(layout, profile));
        }
        self.free_units += u64::from(layouts.free_units(layout));
    }

    /// A GPU left that had this layout.
    ///
    /// # Panics
    /// If no such GPU was added.
    pub fn remove(&mut self, classes: &[MigClass], class: MigClassId, layout: LayoutId) {
        let layouts = classes[class.0].layouts();
        for (kept, profile) in self.fits[class.0].iter_mut().zip(layouts.profiles()) {
            *kept = left(*kept, layouts.fits(layout, profile));
        }
        self.free_units = left(self.free_units, layouts.free_units(layout));
    }

    /// A GPU of the class has another layout now: instances were made or destroyed.
    ///
    /// # Panics
    /// If no GPU of the class had the layout `from`.
    pub fn change(
        &mut self,
        classes: &[MigClass],
        class: MigClassId,
        from: LayoutId,
        to: LayoutId,
    ) {
        let layouts = classes[class.0].layouts();
        for (kept, profile) in self.fits[class.0].iter_mut().zip(layouts.profiles()) {
            let with = *kept + u64::from(layouts.fits(to, profile));
            *kept = left(with, layouts.fits(from, profile));
        }
        let with = self.free_units + u64::from(layouts.free_units(to));
        self.free_units = left(with, layouts.free_units(from));
    }

    /// An instance for a request of the type was made.
    pub fn start(&mut self, kind: TypeId) {
        if self.running.len() <= kind.position() {
            self.running.resize(kind.position() + 1, 0);
        }
        self.running[kind.position()] += 1;
    }

    /// One was destroyed.
    ///
    /// # Panics
    /// If none of the type runs.
    pub fn end(&mut self, kind: TypeId) {
        self.running[kind.position()] = left(self.running[kind.position()], 1);
    }

    /// `S`: how many more instances for requests of the type fit, over all classes that it accepts.
    pub fn fits(&self, kind: &MigType) -> u64 {
        kind.accepted()
            .filter_map(|(class, profile)| Some(self.fits.get(class.0)?[profile.position()]))
            .sum()
    }

    /// `F`: free units of all GPUs.
    pub fn free_units(&self) -> u64 {
        self.free_units
    }

    /// `N`: how many instances for requests of the type run.
    pub fn running(&self, kind: TypeId) -> u64 {
        self.running.get(kind.position()).copied().unwrap_or(0)
    }
}

fn left(kept: u64, gone: u32) -> u64 {
    kept.checked_sub(u64::from(gone)).expect("what goes was counted when it came")
}
