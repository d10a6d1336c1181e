//! The table, entry by entry, and reports that cannot be.

use std::collections::BTreeSet;
use wire::device::MakeableProfile;

use super::*;
use crate::hardware::inventory::NodeInventory;
use wire::device::{DeviceDetails, DeviceIndex, Health, InventoryError, Slot};
use wire::units::Share;

/// All sets of instances that fit together and to which none can be added, as names.
fn fullest<'a>(
    geometry: &'a Geometry,
    taken: u32,
    set: &mut Vec<&'a Profile>,
    seen: &mut Vec<Vec<&'a Profile>>,
) {
    let mut is_full = true;
    for profile in &geometry.profiles {
        for start in &profile.starts {
            let own = profile.units(*start);
            if taken & own == 0 {
                is_full = false;
                // each set once: the first free units first
                if taken == 0 || own > taken {
                    set.push(profile);
                    fullest(geometry, taken | own, set, seen);
                    set.pop();
                }
            }
        }
    }
    if is_full {
        seen.push(set.clone());
    }
}

#[test]
fn every_entry_of_the_table_is_valid() {
    for geometry in GEOMETRIES.iter() {
        let whole = geometry.profiles.last().unwrap();
        assert_eq!((&whole.starts[..], whole.size), (&[0][..], geometry.axis), "{whole:?}");
        let names: BTreeSet<&str> =
            geometry.profiles.iter().map(|profile| profile.name.as_str()).collect();
        assert_eq!(names.len(), geometry.profiles.len(), "no name twice: {:?}", geometry.names);
        for profile in &geometry.profiles {
            let reported = format!("{} of {:?}", profile.name, geometry.names);
            let slices: u32 = profile.name.split_once("g.").unwrap().0.parse().unwrap();
            let gb: u64 =
                profile.name.split_once("g.").unwrap().1.trim_end_matches("gb").parse().unwrap();
            assert!(profile.starts.is_sorted() && !profile.starts.is_empty(), "{reported}");
            assert!(
                profile.starts.iter().all(|start| start + profile.size <= geometry.axis),
                "{reported}"
            );
            assert!(profile.memory_mib < geometry.total_mib, "{reported}");
            // the name rounds the memory to GB, of the board's nominal size
            assert!(profile.memory_mib.abs_diff(gb * 1000) < gb * 150, "{reported}");
            assert!(profile.multiprocessors >= slices * 14, "{reported}");
            assert!(profile.multiprocessors <= whole.multiprocessors, "{reported}");
            let memory_by_units =
                whole.memory_mib * u64::from(profile.size) / u64::from(geometry.axis);
            assert!(
                profile.memory_mib.abs_diff(memory_by_units) * 10 < memory_by_units,
                "{reported}"
            );
        }
    }
}

/// A node with one GPU of so much memory and these instances.
fn inventory(
    model: &str,
    mib: u64,
    instances: &[&Profile],
) -> Result<NodeInventory, InventoryError> {
    let device = |id: String, total, kind| Device {
        id: DeviceId::new(&id).unwrap(),
        index: DeviceIndex(0),
        model: ModelName::new(model),
        total: MemMib::new(total),
        reserved: MemMib::ZERO,
        kind,
        health: Health::Healthy,
    };
    let parent = device("GPU-a".to_owned(), mib, DeviceKind::MigParent);
    let instance = |(at, profile): (usize, &&Profile)| {
        let profile_name = MigProfile::new(profile.name.as_str());
        let kind = DeviceKind::MigInstance { parent: parent.id.clone(), profile: profile_name };
        device(format!("MIG-{at}"), profile.memory_mib, kind)
    };
    let mut devices: Vec<Device> = instances.iter().enumerate().map(instance).collect();
    devices.push(parent);
    NodeInventory::new(devices)
}

#[test]
fn compute_instances_of_any_model_get_no_pod() {
    let part = Profile { name: "1c.3g.90gb".to_owned(), ..a30()[0].clone() };
    let found = inventory("NVIDIA B200", 10_000, &[&part, &part, &a30()[0]]).unwrap();
    let faults: Vec<String> = found.faults().values().map(ToString::to_string).collect();
    assert_eq!(faults.len(), 2);
    assert!(faults[0].contains("`1c.3g.90gb` shares the memory"), "{faults:?}");
}

#[test]
fn adjacent_instances_never_exceed_their_gpu() {
    for geometry in GEOMETRIES.iter() {
        let mut seen = Vec::new();
        fullest(geometry, 0, &mut Vec::new(), &mut seen);
        assert!(seen.len() > 4, "{:?}", geometry.names);
        for set in seen {
            let names: Vec<&str> = set.iter().map(|profile| profile.name.as_str()).collect();
            let memory: u64 = set.iter().map(|profile| profile.memory_mib).sum();
            let multiprocessors: u32 = set.iter().map(|profile| profile.multiprocessors).sum();
            assert!(memory <= geometry.total_mib, "{names:?}");
            let all = geometry.profiles.last().unwrap().multiprocessors;
            assert!(multiprocessors <= all, "{names:?}");
            let mut places: Vec<_> = set.iter().map(|profile| (*profile, None)).collect();
            assert!(geometry.is_possible(0, &mut places), "{names:?}");
            let own = geometry.names[0];
            for (model, mib, is_sound) in [
                (own, geometry.total_mib, true),
                ("unlisted", memory, true),
                ("unlisted", memory - 1, false),
            ] {
                let found = inventory(model, mib, &set);
                assert_eq!(
                    found.is_ok_and(|inventory| inventory.faults().is_empty()),
                    is_sound,
                    "{names:?}"
                );
            }
        }
    }
}

#[test]
fn a_model_is_identified_by_name_and_then_by_memory() {
    for (model, mib, whole) in [
        ("NVIDIA A30", 24_576, Some("4g.24gb")),
        ("NVIDIA A100-SXM4-40GB", 40_536, Some("7g.40gb")),
        ("NVIDIA A100-PCIE-40GB", 40_960, Some("7g.40gb")),
        ("NVIDIA A100-SXM4-80GB", 81_920, Some("7g.80gb")),
        ("NVIDIA H100 80GB HBM3", 81_559, Some("7g.80gb")),
        ("NVIDIA H100 NVL", 95_830, Some("7g.94gb")),
        ("NVIDIA GH200 480GB", 97_871, Some("7g.96gb")),
        ("NVIDIA H200", 143_771, Some("7g.141gb")),
        ("NVIDIA A100-SXM4-80GB", 60_000, None),
        ("NVIDIA A10", 23_028, None),
        ("NVIDIA B200", 183_359, None),
    ] {
        let found = Geometry::of(&ModelName::new(model), MemMib::new(mib));
        let found = found.and_then(|geometry| geometry.profiles.last());
        let found = found.map(|profile| profile.name.as_str());
        assert_eq!(found, whole, "{model} with {mib} MiB");
    }
}

#[test]
fn the_compute_of_an_instance_is_counted_in_multiprocessors() {
    let of = |model: &str, mib, profile| {
        Geometry::of(&ModelName::new(model), MemMib::new(mib))
            .and_then(|geometry| geometry.compute_of(&MigProfile::new(profile)))
            .map(Share::millionths)
    };
    assert_eq!(of("H200", 143_771, "1g.35gb"), Some(196_969), "not one seventh");
    assert_eq!(of("H200", 143_771, "1g.18gb+me"), Some(121_212));
    assert_eq!(of("A30", 24_576, "2g.12gb"), Some(500_000));
    assert_eq!(of("A30", 24_576, "3g.18gb"), None);
}

/// The faults of an A100 with 40 GB and these instances: `1g.5gb` or, with a start, `1g.5gb@6`.
fn check(instances: &[&str], expected: &[(&str, &str)]) {
    check_listed(&[], instances, expected);
}

/// The same where NVML lists these profiles, each with its size and starts. An instance has the size that is
/// listed for its profile, and else one unit.
fn check_listed(
    listed: &[(&str, u32, &[u32])],
    instances: &[&str],
    expected: &[(&str, &str)],
) -> NodeInventory {
    let device = |id: &str, total: u64, kind: DeviceKind| Device {
        id: DeviceId::new(id).unwrap(),
        index: DeviceIndex(0),
        model: ModelName::new("NVIDIA A100-SXM4-40GB"),
        total: MemMib::new(total),
        reserved: MemMib::ZERO,
        kind,
        health: Health::Healthy,
    };
    let mut devices = vec![device("GPU-a", 40_960, DeviceKind::MigParent)];
    let profiles = listed.iter().map(|(name, size, starts)| MakeableProfile {
        profile: MigProfile::new(*name),
        memory: MemMib::new(4_864),
        sm_count: None,
        size: *size,
        starts: starts.to_vec(),
    });
    let gpu = DeviceDetails { mig_profiles: profiles.collect(), ..DeviceDetails::default() };
    let mut details = BTreeMap::from([(DeviceId::new("GPU-a").unwrap(), gpu)]);
    for (at, text) in instances.iter().enumerate() {
        let (profile, start) = text.split_once('@').unwrap_or((text, ""));
        let kind = DeviceKind::MigInstance {
            parent: DeviceId::new("GPU-a").unwrap(),
            profile: MigProfile::new(profile),
        };
        let id = format!("MIG-{at}");
        let size =
            listed.iter().find(|(name, ..)| *name == profile).map_or(1, |(_, size, _)| *size);
        let slot = start.parse().ok().map(|start| Slot { start, size });
        let known = DeviceDetails { slot, ..DeviceDetails::default() };
        details.insert(DeviceId::new(&id).unwrap(), known);
        devices.push(device(&id, 4_864, kind));
    }
    let inventory = NodeInventory::placed(devices, &details).unwrap();
    let found: Vec<_> = inventory.faults().iter().collect();
    assert_eq!(found.len(), expected.len(), "{instances:?}: {found:?}");
    for ((id, fault), (expected_id, part)) in found.into_iter().zip(expected) {
        assert_eq!(id.as_str(), *expected_id, "{instances:?}");
        assert!(fault.to_string().contains(part), "{instances:?}: {fault}");
    }
    for device in inventory.devices() {
        let is_ill = device.health == Health::Unhealthy;
        assert_eq!(is_ill, inventory.faults().contains_key(&device.id), "{instances:?}");
    }
    inventory
}

#[test]
fn a_node_has_only_so_many_places() {
    let row = MakeableProfile {
        profile: MigProfile::new("1g.5gb"),
        memory: MemMib::new(4_864),
        sm_count: None,
        size: 1,
        starts: (0..16).collect(),
    };
    for (rows, is_refused) in [(32, false), (33, true)] {
        let mig_profiles = vec![row.clone(); rows];
        let gpus = (0..8).map(|at| {
            let id = DeviceId::new(&format!("GPU-{at}")).unwrap();
            (id, DeviceDetails { mig_profiles: mig_profiles.clone(), ..DeviceDetails::default() })
        });
        let refused = NodeInventory::placed(Vec::new(), &gpus.collect()).err();
        let count = rows * 16 * 8;
        assert_eq!(refused, is_refused.then_some(InventoryError::TooManyPlaces { count }));
    }
}

#[test]
fn impossible_instances_are_reported_and_get_no_pod() {
    check(&["1g.5gb"; 7], &[]);
    check(&["1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"], &[]);
    check(&["3g.20gb@4", "1g.5gb@3", "2g.10gb", "1g.5gb+me"], &[]);
    check(&["1g.5gb", "1g.6gb"], &[("MIG-1", "no MIG profile `1g.6gb`")]);
    check(&["1c.3g.20gb"], &[("MIG-0", "`1c.3g.20gb`")]);
    check(&["7g.40gb+me"], &[("MIG-0", "`7g.40gb+me`")]);
    check(&["3g.20gb@2", "1g.5gb"], &[("MIG-0", "cannot begin at unit 2")]);
    check(&["1g.5gb@4294967295"], &[("MIG-0", "unit 4294967295")]);
    let overlap = [("MIG-0", "overlaps instance `MIG-1`"), ("MIG-1", "overlaps instance `MIG-0`")];
    check(&["3g.20gb@4", "2g.10gb@4", "1g.5gb@0"], &overlap);
    check(&["7g.40gb", "1g.5gb"], &[("MIG-0", "the 2 MIG"), ("MIG-1", "beside each other")]);
    let media = [("MIG-0", "media engines, too, and one can"), ("MIG-1", "destroy one of the two")];
    check(&["1g.5gb+me", "1g.5gb+me", "2g.10gb"], &media);
    let eight: Vec<(String, &str)> = (0..8).map(|at| (format!("MIG-{at}"), "the 8")).collect();
    let eight: Vec<(&str, &str)> = eight.iter().map(|(id, part)| (id.as_str(), *part)).collect();
    check(&["1g.5gb"; 8], &eight);
    // 4g covers units 0 to 3 and 3g units 4 to 7: none is left for 1g
    check(
        &["4g.20gb", "3g.20gb", "1g.5gb"],
        &[("MIG-0", "the 3"), ("MIG-1", "the 3"), ("MIG-2", "the 3")],
    );
}

#[test]
fn an_instance_that_nvml_lists_for_its_gpu_is_sound() {
    let listed: [(&str, u32, &[u32]); 3] =
        [("2g.10gb+me", 2, &[0, 2, 4]), ("5g.25gb", 5, &[3]), ("3g.20gb", 4, &[0, 2, 4])];
    // the table lacks this profile, this variant, and this start
    check_listed(&listed, &["5g.25gb@3"], &[]);
    check_listed(&listed, &["2g.10gb+me@4"], &[]);
    let inventory = check_listed(&listed, &["3g.20gb@2", "1g.5gb@0", "1g.5gb@1"], &[]);
    let overruled: Vec<(&str, String)> = inventory
        .not_in_table()
        .map(|(id, spot)| (id.as_str(), format!("{} {} {}", spot.gpu, spot.profile, spot.start)))
        .collect();
    assert_eq!(overruled, [("MIG-0", "GPU-a 3g.20gb 2".to_owned())]);
    // what NVML does not list is judged by the table
    check_listed(&listed, &["1g.5gb@6", "2g.10gb@4"], &[]);
    check_listed(&listed, &["5g.25gb@2"], &[("MIG-0", "no MIG profile `5g.25gb`")]);
    check_listed(&listed, &["5g.25gb"], &[("MIG-0", "no MIG profile `5g.25gb`")]);
    check_listed(&listed, &["3g.20gb@1"], &[("MIG-0", "cannot begin at unit 1")]);
    check_listed(&listed, &["1c.3g.20gb@0"], &[("MIG-0", "`1c.3g.20gb`")]);
}

#[test]
fn instances_that_nvml_lists_lie_beside_the_others() {
    let listed: [(&str, u32, &[u32]); 2] = [("5g.25gb", 5, &[3]), ("2g.10gb+me", 2, &[0])];
    let overlap = [("MIG-0", "overlaps instance `MIG-1`"), ("MIG-1", "overlaps instance `MIG-0`")];
    check_listed(&listed, &["5g.25gb@3", "1g.5gb@6"], &overlap);
    // units 0 to 2 are left for those whose start is not known
    check_listed(&listed, &["5g.25gb@3", "1g.5gb", "1g.5gb", "1g.5gb"], &[]);
    check_listed(
        &listed,
        &["5g.25gb@3", "2g.10gb", "2g.10gb"],
        &[("MIG-0", "the 3"), ("MIG-1", "the 3"), ("MIG-2", "the 3")],
    );
    let media = [("MIG-0", "media engines"), ("MIG-1", "media engines")];
    check_listed(&listed, &["2g.10gb+me@0", "1g.5gb+me@2"], &media);
}

#[test]
fn variants_of_a_profile_are_at_its_places() {
    let model = ModelName::new("NVIDIA RTX PRO 6000 Blackwell Server Edition");
    let geometry = Geometry::of(&model, MemMib::new(97_887)).unwrap();
    assert_eq!((geometry.axis, geometry.slices(), GEOMETRIES[2].slices()), (12, 4, 7));
    for (name, is_known, has_media) in [
        ("1g.24gb", true, false),
        ("1g.24gb+me", true, true),
        ("1g.24gb+me.all", true, true),
        ("1g.24gb+gfx", true, false),
        ("1g.24gb-me", true, false),
        ("2g.48gb+me", false, true),
        ("4g.96gb+gfx", true, false),
        ("4g.96gb-me", false, false),
        ("1g.24gb+", false, false),
        ("1g.10gb", false, false),
    ] {
        let name = MigProfile::new(name);
        let found = geometry.profile(&name);
        assert_eq!(found.is_some(), is_known, "{name}");
        assert_eq!(name.has_media(), has_media, "{name}");
        assert!(found.is_none_or(|found| found.name == name.plain()), "{name}");
    }
    let quarter = geometry.compute_of(&MigProfile::new("1g.24gb+gfx")).unwrap();
    assert_eq!(quarter, Share::from_millionths(244_680), "46 of 188");
}
