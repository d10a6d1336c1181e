//! The layouts of each geometry, counted in another way.

use proptest::prelude::*;

use super::*;
use crate::hardware::mig::{GEOMETRIES, Profile};

fn profile(name: &str, memory_mib: u64, starts: &[u32], size: u32) -> Profile {
    let (name, starts) = (name.to_owned(), starts.to_vec());
    Profile { name, multiprocessors: size, memory_mib, starts, size, variants: Vec::new() }
}

fn eight() -> Layouts {
    Layouts::of(&GEOMETRIES[1]).unwrap()
}

/// The layout of instances of these profiles at these starts.
fn with(layouts: &Layouts, instances: &[(&str, u32)]) -> LayoutId {
    instances.iter().fold(LayoutId::EMPTY, |layout, (name, start)| {
        layouts.put(layout, layouts.profile(name).unwrap(), Start(*start)).unwrap()
    })
}

#[test]
fn layouts_and_masks_are_as_many_as_the_profiles_allow() {
    for (geometry, layouts, masks) in GEOMETRIES.iter().map(|geometry| match geometry.axis {
        8 => (geometry, 417, 192),
        // two halves with nothing, one of two, both or the pair, and the whole
        _ => (geometry, 5 * 5 + 1, 16),
    }) {
        let found = Layouts::of(geometry).unwrap();
        assert_eq!(found.count(), layouts, "{:?}", geometry.names);
        let distinct: BTreeSet<u32> = found.ids().map(|id| found.mask(id)).collect();
        assert_eq!(distinct.len(), masks, "{:?}", geometry.names);
    }
}

#[test]
fn what_fits_is_what_the_free_starts_allow() {
    let layouts = eight();
    for (instances, expected) in [
        (&[][..], [7, 4, 3, 2, 1, 1]),
        (&[("1g.5gb", 0)], [6, 3, 2, 1, 0, 0]),
        (&[("2g.10gb", 0)], [5, 3, 2, 1, 0, 0]),
        (&[("1g.10gb", 6)], [6, 3, 3, 1, 1, 0]),
        (&[("1g.5gb", 6)], [6, 3, 3, 1, 1, 0]),
        (&[("3g.20gb", 4)], [4, 2, 2, 1, 1, 0]),
        (&[("4g.20gb", 0), ("3g.20gb", 4)], [0; 6]),
        (&[("7g.40gb", 0)], [0; 6]),
    ] {
        let layout = with(&layouts, instances);
        let fits: Vec<u32> =
            layouts.profiles().map(|profile| layouts.fits(layout, profile)).collect();
        assert_eq!(fits, expected, "{instances:?}");
        let starts = layouts.profiles().map(|profile| layouts.starts(layout, profile).count());
        assert_eq!(starts.collect::<Vec<_>>(), expected.map(units_of), "{instances:?}");
    }
}

#[test]
fn profiles_of_the_same_units_leave_the_same_layout() {
    let layouts = eight();
    assert_eq!(with(&layouts, &[("1g.10gb", 2)]), with(&layouts, &[("2g.10gb", 2)]));
    assert_eq!(with(&layouts, &[("3g.20gb", 0)]), with(&layouts, &[("4g.20gb", 0)]));
    let halves = with(&layouts, &[("3g.20gb", 4), ("3g.20gb", 0)]);
    assert_eq!(layouts.runs(halves).collect::<Vec<_>>(), [(Start(0), 4), (Start(4), 4)]);
    assert_ne!(halves, with(&layouts, &[("7g.40gb", 0)]), "the units are taken by other runs");
    assert_eq!(layouts.mask(halves), 0xff);
}

#[test]
fn the_smallest_profile_has_the_least_memory_and_then_the_least_compute() {
    let layouts = eight();
    for (gib, multiprocessors, expected) in [
        (0, 0, Some("1g.5gb")),
        (4, 0, Some("1g.5gb")),
        (5, 0, Some("1g.10gb")),
        (5, 20, Some("2g.10gb")),
        (10, 0, Some("3g.20gb")),
        (10, 49, Some("4g.20gb")),
        (1, 98, Some("7g.40gb")),
        (39, 0, Some("7g.40gb")),
        (40, 0, None),
    ] {
        let found = layouts.smallest(|profile| {
            profile.memory_mib >= gib * 1024 && profile.multiprocessors >= multiprocessors
        });
        let name = found.map(|index| layouts.geometry().profiles[index.position()].name.as_str());
        assert_eq!(name, expected, "{gib} GiB, {multiprocessors}");
    }
}

#[test]
fn geometries_that_no_table_can_have_are_errors() {
    let of = |axis, profiles| {
        Layouts::of(&Geometry { axis, profiles, ..(*GEOMETRIES[7]).clone() }).err()
    };
    assert_eq!(
        of(17, GEOMETRIES[7].profiles.clone()),
        Some(LayoutError::Size { units: 17, profiles: 3 })
    );
    assert_eq!(of(0, Vec::new()), Some(LayoutError::Size { units: 0, profiles: 0 }));
    for wrong in [
        profile("a", 1, &[0, 1], 2),
        profile("a", 1, &[15], 2),
        profile("a", 1, &[0], 0),
        profile("a", 1, &[0], 16),
        profile("a", 1, &[u32::MAX], 1),
    ] {
        assert_eq!(
            of(16, vec![wrong.clone()]),
            Some(LayoutError::Starts { profile: "a".to_owned() }),
            "{wrong:?}"
        );
    }
    let every: Vec<u32> = (0..16).collect();
    assert_eq!(of(16, vec![profile("a", 1, &every, 1)]), Some(LayoutError::Many));
}

proptest! {
    #[test]
    fn instances_begin_at_legal_starts_and_never_overlap(
        geometry in 0..GEOMETRIES.len(),
        steps in prop::collection::vec((0..6_usize, 0..12_u32, any::<bool>()), 0..40),
    ) {
        let geometry = &GEOMETRIES[geometry];
        let layouts = Layouts::of(geometry).unwrap();
        let profiles: Vec<ProfileIndex> = layouts.profiles().collect();
        let mut made: Vec<(u32, u32)> = Vec::new();
        let mut layout = LayoutId::EMPTY;
        for (profile, start, is_taken) in steps {
            if is_taken {
                let gone = made.iter().position(|(at, _)| *at == start);
                let without = layouts.take(layout, Start(start));
                prop_assert_eq!(gone.is_some(), without.is_some());
                if let (Some(gone), Some(without)) = (gone, without) {
                    made.remove(gone);
                    prop_assert!(without < layout);
                    layout = without;
                }
            } else if let Some(index) = profiles.get(profile) {
                let known = &geometry.profiles[profile];
                let is_legal = known.starts.contains(&start);
                let overlaps = |(at, length): &(u32, u32)| {
                    *at < start + known.size && start < at + length
                };
                let with = layouts.put(layout, *index, Start(start));
                prop_assert_eq!(with.is_some(), is_legal && !made.iter().any(overlaps));
                if let Some(with) = with {
                    made.push((start, known.size));
                    prop_assert!(with > layout);
                    layout = with;
                }
            }
            made.sort_unstable();
            let runs: Vec<(u32, u32)> =
                layouts.runs(layout).map(|(start, length)| (start.0, length)).collect();
            prop_assert_eq!(&runs, &made);
            let taken: u32 = made.iter().map(|(_, length)| length).sum();
            prop_assert_eq!(layouts.free_units(layout), geometry.axis - taken);
        }
    }
}
