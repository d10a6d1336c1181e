//! Types of requests for a MIG instance: which profile a request gets on each class that it accepts.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use crate::hardware::layouts::ProfileIndex;
use crate::waste::mig::class::{MigClass, MigClassId};

/// Most types that are counted.
const MOST_TYPES: usize = 4_096;

/// What decides where a request can go: its profile on each class, `None` on those that it does not
/// accept. Requests for different amounts of memory are of one type if the same profiles serve them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MigType(SmallVec<[Option<ProfileIndex>; 4]>);

impl MigType {
    /// The type of a request that gets these profiles, one entry per class.
    pub fn new(profiles: impl IntoIterator<Item = Option<ProfileIndex>>) -> Self {
        Self(profiles.into_iter().collect())
    }

    /// The profile on a class. `None` also for a class that came after the type.
    pub fn on(&self, class: MigClassId) -> Option<ProfileIndex> {
        self.0.get(class.0).copied().flatten()
    }

    /// The classes that it accepts, with the profile there.
    pub fn accepted(&self) -> impl Iterator<Item = (MigClassId, ProfileIndex)> + use<'_> {
        let classes = self.0.iter().enumerate();
        classes.filter_map(|(class, profile)| Some((MigClassId(class), (*profile)?)))
    }

    /// Its units on the class where they are fewest; `None` if no class serves it.
    pub fn units(&self, classes: &[MigClass]) -> Option<u32> {
        self.accepted()
            .filter_map(|(class, profile)| Some(classes.get(class.0)?.layouts().units(profile)))
            .min()
    }
}

/// The number of a type among the [`Types`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TypeId(u16);

impl TypeId {
    /// As a position in a table with one entry per type.
    pub fn position(self) -> usize {
        usize::from(self.0)
    }
}

/// The types that were seen, each with a number. There are few: profiles of classes that serve the same
/// requests grow together.
#[derive(Clone, Debug, Default)]
pub struct Types {
    kinds: Vec<MigType>,
    ids: BTreeMap<MigType, TypeId>,
}

impl Types {
    /// The number of a type, a new one if it was not seen before. `None` if 4,096 others were: then it is
    /// not counted, and can be placed all the same.
    pub fn id(&mut self, kind: &MigType) -> Option<TypeId> {
        if let Some(id) = self.ids.get(kind) {
            return Some(*id);
        }
        if self.kinds.len() == MOST_TYPES {
            return None;
        }
        let id = TypeId(u16::try_from(self.kinds.len()).expect("types are few"));
        self.kinds.push(kind.clone());
        self.ids.insert(kind.clone(), id);
        Some(id)
    }

    /// All numbers, in the order in which the types were first seen.
    pub fn ids(&self) -> impl Iterator<Item = TypeId> + use<> {
        (0..self.kinds.len()).map(|id| TypeId(u16::try_from(id).expect("types are few")))
    }

    /// The type of a number.
    pub fn kind(&self, id: TypeId) -> &MigType {
        &self.kinds[id.position()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::layouts::Layouts;
    use crate::hardware::mig::GEOMETRIES;

    #[test]
    fn a_type_has_one_number_and_classes_that_it_does_not_accept() {
        let layouts = Layouts::of(&GEOMETRIES[0]).unwrap();
        let profiles: Vec<ProfileIndex> = layouts.profiles().collect();
        let both = MigType::new([Some(profiles[0]), Some(profiles[1])]);
        let second = MigType::new([None, Some(profiles[1])]);
        let mut types = Types::default();
        let ids = [&both, &second, &both].map(|kind| types.id(kind).unwrap());
        assert_eq!(ids, [TypeId(0), TypeId(1), TypeId(0)]);
        assert_eq!(types.kind(TypeId(1)), &second);
        assert_eq!(second.accepted().collect::<Vec<_>>(), [(MigClassId(1), profiles[1])]);
        assert_eq!(both.on(MigClassId(1)), second.on(MigClassId(1)));
        assert_eq!(both.on(MigClassId(2)), None);
    }

    #[test]
    fn the_number_of_types_is_bounded() {
        let layouts = Layouts::of(&GEOMETRIES[1]).unwrap();
        let profiles: Vec<ProfileIndex> = layouts.profiles().collect();
        let digits = |mut number: usize| {
            MigType::new((0..6).map(|_| {
                let digit = number % 6;
                number /= 6;
                Some(profiles[digit])
            }))
        };
        let mut types = Types::default();
        let known = (0..5_000).filter(|number| types.id(&digits(*number)).is_some()).count();
        assert_eq!(known, MOST_TYPES);
        assert!(types.id(&digits(7)).is_some());
    }
}
