use proptest::prelude::*;

use super::*;
use crate::hardware::layouts::{LayoutId, Layouts};
use crate::hardware::mig::GEOMETRIES;

/// What NVML would list for a GPU of the table.
fn list_of(geometry: &Geometry) -> Vec<MakeableProfile> {
    let rows = geometry.profiles.iter().rev().flat_map(|profile| {
        let variants = profile.variants.iter().map(String::as_str);
        let names = variants.chain([""]).map(|variant| format!("{}{variant}", profile.name));
        names.map(|name| {
            row(&name, profile.memory_mib, profile.multiprocessors, profile.size, &profile.starts)
        })
    });
    rows.collect()
}

fn row(name: &str, mib: u64, sm_count: u32, size: u32, starts: &[u32]) -> MakeableProfile {
    MakeableProfile {
        profile: MigProfile::new(name),
        memory: MemMib::new(mib),
        sm_count: Some(sm_count),
        size,
        starts: starts.to_vec(),
    }
}

#[test]
fn the_lists_of_known_models_give_their_tables() {
    for known in GEOMETRIES.iter() {
        let found = Geometry::listed(MemMib::new(known.total_mib), &list_of(known)).unwrap();
        assert_eq!(found, Geometry { names: &[], ..(**known).clone() });
        assert!(found.is_listed() && !known.is_listed());
        let [found, known] = [&found, &**known].map(|geometry| Layouts::of(geometry).unwrap());
        assert!(found.ids().eq(known.ids()));
        for (layout, profile) in
            known.ids().flat_map(|layout| known.profiles().map(move |profile| (layout, profile)))
        {
            assert!(found.starts(layout, profile).eq(known.starts(layout, profile)));
        }
    }
}

/// Two units, and the whole GPU.
fn small() -> Vec<MakeableProfile> {
    vec![row("1g.10gb", 9_000, 10, 1, &[0, 1]), row("2g.20gb", 19_000, 20, 2, &[0])]
}

#[test]
fn a_list_that_says_too_little_or_cannot_be_has_a_fault() {
    let with = |more: MakeableProfile| [small(), vec![more]].concat();
    let without_count = MakeableProfile { sm_count: None, ..small().remove(0) };
    let every: Vec<u32> = (0..15).collect();
    let many = vec![row("1g.1gb", 1, 1, 1, &every), row("2g.2gb", 2, 2, 15, &[0])];
    for (list, fault) in [
        (small(), ""),
        (with(row("1g.10gb+me", 9_000, 10, 1, &[0])), ""),
        (with(row("1g.10gb+me", 9_000, 10, 2, &[0])), "variants of profile `1g.10gb` differ"),
        (vec![], "no profile is the whole GPU"),
        (vec![small().remove(0)], "no profile is the whole GPU"),
        (with(row("3g.20gb", 9_000, 10, 1, &[0])), "no profile is the whole GPU"),
        (with(row("1g.11gb", 9_000, 21, 1, &[0])), "no profile is the whole GPU"),
        (with(row("65g.20gb", 9_000, 20, 2, &[0])), "no profile is the whole GPU"),
        (with(row("1g.11gb", 9_000, 10, 1, &[1, 2])), "no profile is the whole GPU"),
        (vec![row("2g.20gb", 19_000, 20, 16, &[0])], "do not lie beside each other"),
        (vec![row("2g.20gb", 19_000, 20, 17, &[0])], "larger than the tables"),
        (with(row("whole.gb", 9_000, 10, 1, &[0])), "`whole.gb` is not of the form"),
        (with(row("1c.1g.10gb", 9_000, 10, 1, &[0])), "is not of the form"),
        (with(row("0g.10gb", 9_000, 10, 1, &[0])), "is not of the form"),
        (with(row("99999999999999999999g.10gb", 9_000, 10, 1, &[0])), "is not of the form"),
        (vec![without_count, small().remove(1)], "of profile `1g.10gb` are not known"),
        (with(row("1g.11gb", 19_001, 10, 1, &[0])), "`1g.11gb` have too much memory"),
        (with(row("1g.11gb", 12_501, 10, 1, &[0, 1])), "`1g.11gb` have too much memory"),
        (with(row("1g.11gb", u64::MAX, 10, 1, &[0, 1])), "`1g.11gb` have too much memory"),
        (many, "too many layouts"),
    ] {
        let found = Geometry::listed(MemMib::new(25_000), &list);
        let text = found.as_ref().err().map(ToString::to_string).unwrap_or_default();
        assert!(text.contains(fault) && found.is_ok() == fault.is_empty(), "{list:?}: {text}");
    }
}

fn any_row() -> impl Strategy<Value = MakeableProfile> {
    let name = (0..9_u32, 0..60_u32, prop::sample::select(vec!["", "+me", "+gfx", "x", "gb"]));
    let starts = prop::collection::btree_set(0..32_u32, 1..9);
    (name, any::<u32>(), prop::option::of(0..200_u32), 1..33_u32, starts).prop_map(
        |((slices, gb, variant), mib, sm_count, size, starts)| MakeableProfile {
            profile: MigProfile::new(format!("{slices}g.{gb}gb{variant}")),
            memory: MemMib::new(u64::from(mib) >> (mib % 32)),
            sm_count,
            size,
            starts: starts.into_iter().collect(),
        },
    )
}

/// Lists that are almost right, and others.
fn any_list() -> impl Strategy<Value = Vec<MakeableProfile>> {
    let known = (0..GEOMETRIES.len()).prop_map(|at| list_of(&GEOMETRIES[at]));
    let base = prop_oneof![Just(small()), known, Just(Vec::new())];
    (base, prop::collection::vec(any_row(), 0..4), any::<prop::sample::Index>()).prop_map(
        |(mut list, more, gone)| {
            if !list.is_empty() && gone.index(2) == 0 {
                list.remove(gone.index(list.len()));
            }
            list.extend(more);
            list
        },
    )
}

proptest! {
    #[test]
    fn a_list_gives_a_geometry_with_tables_or_a_fault(list in any_list(), total in 0..200_000_u64) {
        if let Ok(geometry) = Geometry::listed(MemMib::new(total), &list) {
            let layouts = Layouts::of(&geometry).unwrap();
            prop_assert!(layouts.count() <= MOST_LAYOUTS && geometry.axis <= 16);
            let whole = geometry.profiles.last().unwrap();
            prop_assert_eq!((whole.size, &whole.starts[..]), (geometry.axis, &[0][..]));
            prop_assert!(whole.memory_mib <= total);
            for profile in &geometry.profiles {
                let part = geometry.part_of(profile);
                prop_assert!(part.slices_and_units <= part.slices, "{part:?}");
                prop_assert!(geometry.compute_of(&MigProfile::new(profile.name.as_str())).is_some());
                let index = layouts.profile(&profile.name).unwrap();
                prop_assert!(layouts.fits(LayoutId::EMPTY, index) > 0);
            }
        }
    }
}
