//! Whatever agents list for GPUs of a model without a table: no report stops the ledger, or makes its sums wrong.

use std::collections::BTreeMap;

use engine::hardware::inventory::NodeInventory;
use engine::hardware::pool::{MigUse, PoolRule};
use engine::ledger::change::reports::NodeReport;
use engine::model::policy::Policy;
use engine::model::request::{Amount, Isolation};
use proptest::prelude::*;
use wire::device::{Device, DeviceDetails, DeviceIndex, DeviceKind, Health, MakeableProfile, Slot};
use wire::ids::{DeviceId, MigProfile, ModelName, NodeName, PodUid, PoolName};
use wire::seen::DeviceUse;
use wire::units::{MemMib, Share};

use crate::harness::ledger::{host, pod, request_of, restarted, seconds};

/// Profiles of eight units: name, MiB, multiprocessors, size, starts.
const SOUND: [(&str, u64, u32, u32, &[u32]); 5] = [
    ("1g.10gb", 9_000, 16, 1, &[0, 1, 2, 3, 4, 5, 6]),
    ("1g.20gb", 19_000, 26, 2, &[0, 2, 4, 6]),
    ("2g.20gb", 19_000, 32, 2, &[0, 2, 4]),
    ("3g.40gb", 39_000, 60, 4, &[0, 4]),
    ("7g.80gb", 79_000, 132, 8, &[0]),
];

fn sound() -> Vec<MakeableProfile> {
    let rows = SOUND.iter().map(|(name, mib, count, size, starts)| MakeableProfile {
        profile: MigProfile::new(*name),
        memory: MemMib::new(*mib),
        sm_count: Some(*count),
        size: *size,
        starts: starts.to_vec(),
    });
    rows.collect()
}

/// A row within the limits of reports.
fn any_row() -> impl Strategy<Value = MakeableProfile> {
    let names =
        prop::sample::select(vec!["1g.10gb", "1g.10gb+me", "2g.20gb", "5g.5gb", "x", "0g.1gb"]);
    let size = 1..=32_u32;
    let start = any::<prop::sample::Index>();
    (names, 1..90_000_u64, prop::option::of(1..200_u32), size, prop::collection::vec(start, 1..9))
        .prop_map(|(name, mib, sm_count, size, starts)| {
            let mut starts: Vec<u32> = starts
                .iter()
                .map(|it| u32::try_from(it.index(33 - size as usize)).expect("at most 32"))
                .collect();
            starts.sort_unstable();
            starts.dedup();
            let (profile, memory) = (MigProfile::new(name), MemMib::new(mib));
            MakeableProfile { profile, memory, sm_count, size, starts }
        })
}

fn any_list() -> impl Strategy<Value = Vec<MakeableProfile>> {
    let base = prop_oneof![2 => Just(sound()), 1 => Just(Vec::new())];
    let more = prop::collection::vec(any_row(), 0..5);
    (base, more, any::<prop::sample::Index>(), any::<bool>()).prop_map(
        |(mut list, more, at, goes)| {
            if goes && !list.is_empty() {
                list.remove(at.index(list.len()));
            }
            for row in more {
                list.retain(|it| it.profile != row.profile);
                list.push(row);
            }
            list
        },
    )
}

/// What an agent reports: for each of two GPUs a list, and instances at these places of the first one.
fn inventory(
    lists: &[Vec<MakeableProfile>; 2],
    instances: &[(usize, u32)],
) -> Option<NodeInventory> {
    let id = |text: &str| DeviceId::new(text).expect("a legal id");
    let device = |id: DeviceId, total: u64, kind| Device {
        id,
        index: DeviceIndex(0),
        model: ModelName::new("NVIDIA B999"),
        total: MemMib::new(total),
        reserved: MemMib::ZERO,
        kind,
        health: Health::Healthy,
    };
    let mut details = BTreeMap::new();
    let mut devices = Vec::new();
    for (list, name) in lists.iter().zip(["GPU-a", "GPU-b"]) {
        let own = DeviceDetails { mig_profiles: list.clone(), ..DeviceDetails::default() };
        details.insert(id(name), own);
        devices.push(device(id(name), 85_000, DeviceKind::MigParent));
    }
    for ((profile, start), number) in instances.iter().zip(0..) {
        let (name, mib, _, size, _) = SOUND[*profile];
        let kind = DeviceKind::MigInstance { parent: id("GPU-a"), profile: MigProfile::new(name) };
        let uuid = id(&format!("MIG-{number}"));
        let slot = Some(Slot { start: *start, size });
        let own = DeviceDetails { slot, made_here: true, ..DeviceDetails::default() };
        details.insert(uuid.clone(), own);
        devices.push(device(uuid, mib, kind));
    }
    NodeInventory::placed(devices, &details).ok()
}

fn amount(which: u64) -> (Amount, Isolation) {
    match which % 4 {
        0 => (
            Amount::Fraction(Share::from_millionths(1 + which * 7_919 % 999_999)),
            Isolation::Hardware,
        ),
        1 => (Amount::Memory(MemMib::new(1 + which * 7_919 % 80_000)), Isolation::Hardware),
        2 => (Amount::MigInstance(MigProfile::new("1g.10gb")), Isolation::None),
        _ => (Amount::MigInstance(MigProfile::new("2g.20gb")), Isolation::None),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn any_list_of_an_agent_leaves_the_ledger_sound(
        steps in prop::collection::vec(
            (
                [any_list(), any_list()],
                prop::collection::vec((0..5_usize, 0..8_u32), 0..3),
                prop::collection::vec(any::<u32>(), 0..4),
            ),
            1..6,
        ),
    ) {
        let ledger = restarted(0, PoolRule { mig: MigUse::OnDemand, ..PoolRule::default() });
        ledger.see_node(&NodeName::new("n"), host(), PoolName::new("p"));
        ledger.set_listed(seconds(0));
        let mut pods = 0;
        for ((lists, instances, requests), at) in steps.iter().zip(1_u64..) {
            let Some(inventory) = inventory(lists, instances) else { continue };
            let uses = inventory.devices().iter().map(|it| DeviceUse::idle(it.id.clone())).collect();
            let report = NodeReport {
                allocations_version: None,
                agent: "agent".to_owned(),
                session: None,
                sequence: at,
                inventory: Some(inventory),
                uses,
            };
            ledger.report("n", &report, seconds(at)).expect("it is taken");
            ledger.tick(seconds(at));
            for which in requests {
                let (amount, isolation) = amount(u64::from(*which));
                let mut query = request_of(amount, 1, Policy::BinPack);
                query.gpu.as_mut().expect("it requests a GPU").isolation = isolation;
                pods += 1;
                let name = format!("p{pods}");
                let fits = ledger.answers(&query, &["n"])[0].is_ok();
                let reserved = ledger.reserve_for_bind(&pod(&name), "n", &query, seconds(at));
                prop_assert_eq!(fits, reserved.is_ok());
                if reserved.is_ok() && which % 3 == 0 {
                    ledger.forget(&PodUid::new(name));
                }
            }
            prop_assert_eq!(ledger.audit(), Ok(()));
            ledger.instance_orders("n");
        }
    }
}
