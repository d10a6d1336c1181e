use proptest::prelude::*;

use super::*;
use crate::model::reservation::PlacedDevice;
use crate::scoring::node_fixture::{compiled_request, node, tenant};
use wire::ids::DeviceId;

/// A tenant of the test: devices, millionths of each, priority.
type Some3 = (Vec<&'static str>, u64, i32);

/// A node with devices `A` and `B` of 1,000 MiB, and these tenants, named by their number.
fn with(tenants: &[Some3]) -> (NodeState, crate::hardware::device_class::DeviceClasses) {
    let (mut node, classes) = node("A:1000/1000 B:1000/1000");
    for (at, (devices, millionths, priority)) in tenants.iter().enumerate() {
        let share = Share::from_millionths(*millionths);
        let memory = wire::units::MemMib::new(millionths / 1_000);
        let placed = devices.iter().map(|id| PlacedDevice {
            id: DeviceId::new(id).unwrap(),
            demand: Demand { memory, share },
        });
        let tenure = Tenure {
            priority: *priority,
            started_unix_seconds: i64::try_from(at).unwrap(),
            ..Tenure::default()
        };
        let placed = placed.collect();
        node.allocate(Reservation { tenure: Some(tenure), ..tenant(&at.to_string(), placed) });
    }
    (node, classes)
}

fn all(uid: &PodUid, tenure: Tenure, has_gpu: bool) -> Option<Importance> {
    less_important(10)(uid, tenure, has_gpu)
}

/// The victims on such a node of a pod with priority 10.
fn victims(tenants: &[Some3], request: &str) -> Option<Vec<String>> {
    let (node, classes) = with(tenants);
    let compiled = compiled_request(request, &classes);
    let sets = Cell::new(MOST_SETS);
    let preemptor =
        Preemptor { compiled: &compiled, victim: &all, leaving_is_gone: true, sets: &sets };
    let room = room_to_make(&node, &preemptor, &BTreeSet::new())?;
    assert_eq!(room.loss.count, room.victims.len());
    Some(room.victims.iter().map(ToString::to_string).collect())
}

#[test]
fn the_least_important_go_and_no_more_than_needed() {
    let a = |millionths, priority| (vec!["A"], millionths, priority);
    let b = |millionths, priority| (vec!["B"], millionths, priority);
    let full = (vec!["B"], 1_000_000, 10);
    for (tenants, request, expected) in [
        (vec![a(600_000, 0), full.clone()], "fraction=0.5", vec!["0"]),
        (vec![a(600_000, 5), a(400_000, 0), full.clone()], "fraction=0.4", vec!["1"]),
        (vec![a(600_000, 5), a(400_000, 0), full.clone()], "fraction=0.5", vec!["0"]),
        (
            vec![a(300_000, 0), a(200_000, 0), a(500_000, 0), full.clone()],
            "fraction=0.5",
            vec!["2"],
        ),
        (vec![a(500_000, 0), a(500_000, 0), full.clone()], "fraction=0.5", vec!["1"]),
        (vec![a(900_000, 1), b(900_000, 0)], "whole", vec!["1"]),
        (vec![a(900_000, 1), b(900_000, 0)], "whole count=2", vec!["0", "1"]),
        (vec![(vec!["A", "B"], 500_000, 0)], "whole count=2", vec!["0"]),
        (vec![a(900_000, 0), full.clone()], "memory=500", vec!["0"]),
        (vec![a(900_000, 0)], "fraction=0.5", vec![]),
    ] {
        let expected: Vec<String> = expected.iter().map(ToString::to_string).collect();
        assert_eq!(victims(&tenants, request), Some(expected), "{tenants:?} {request}");
    }
    for (tenants, request) in [
        (vec![a(900_000, 10), full.clone()], "fraction=0.5"), // equally important
        (vec![a(900_000, 0), full.clone()], "whole count=2"),
        (vec![a(900_000, 0), full], "memory=1001"),
    ] {
        assert_eq!(victims(&tenants, request), None, "{tenants:?} {request}");
    }
}

#[test]
fn pods_that_leave_anyway_cost_nothing_and_others_may_be_protected() {
    let (mut node, classes) = with(&[(vec!["A"], 600_000, 0), (vec!["B"], 600_000, 0)]);
    let compiled = compiled_request("fraction=0.5", &classes);
    let no_b = |uid: &PodUid, it: Tenure, has_gpu: bool| {
        all(uid, it, has_gpu).filter(|_| uid.as_str() != "1")
    };
    let find = |node: &NodeState, gone: &[&str], may: &Victims<'_>| {
        let sets = Cell::new(MOST_SETS);
        let preemptor =
            Preemptor { compiled: &compiled, victim: may, leaving_is_gone: true, sets: &sets };
        let gone = gone.iter().map(|uid| PodUid::new(*uid)).collect();
        let room = room_to_make(node, &preemptor, &gone)?;
        let on = room.hold.placement.devices[0].id.to_string();
        Some((room.victims.iter().map(ToString::to_string).collect::<Vec<_>>(), on))
    };
    let victim = |name: &str, on: &str| Some((vec![name.to_owned()], on.to_owned()));
    assert_eq!(find(&node, &[], &no_b), victim("0", "A"));
    assert_eq!(find(&node, &[], &|_, _, _| None), None);
    assert_eq!(find(&node, &["1"], &all), Some((vec![], "B".to_owned())));
    let drains = |node: &mut NodeState| {
        assert!(!node.drain(&PodUid::new("1"), wire::units::Timestamp::START));
    };
    drains(&mut node);
    assert_eq!(find(&node, &[], &|_, _, _| None), Some((vec![], "B".to_owned())));
    let unknown =
        Reservation { tenure: None, ..node.reservation(&PodUid::new("0")).unwrap().clone() };
    node.allocate(unknown);
    assert_eq!(
        find(&node, &[], &all),
        Some((vec![], "B".to_owned())),
        "the watch has not shown it"
    );
}

/// The best victims by trying every set of tenants that may go.
fn brute_force(
    node: &NodeState,
    compiled: &CompiledRequest,
    tenants: &[Some3],
) -> Option<(Option<i32>, usize)> {
    let may_go: Vec<usize> = (0..tenants.len()).filter(|at| tenants[*at].2 < 10).collect();
    let sets = (0_u32..1 << may_go.len()).filter_map(|mask| {
        let set = || may_go.iter().enumerate().filter(move |(bit, _)| mask & (1 << bit) != 0);
        let uids: Vec<PodUid> = set().map(|(_, at)| PodUid::new(at.to_string())).collect();
        plan::fits_without(node, compiled, &uids)
            .then(|| (set().map(|(_, at)| tenants[*at].2).max(), uids.len()))
    });
    sets.min()
}

fn tenants() -> impl Strategy<Value = Vec<Some3>> {
    let device = prop_oneof![
        4 => Just(vec!["A"]), 4 => Just(vec!["B"]), 1 => Just(vec!["A", "B"])
    ];
    let one = (device, 1_u64..8, prop_oneof![0_i32..3, Just(10)]);
    prop::collection::vec(one, 0..10).prop_map(|all| {
        let mut left = [10_u64, 10];
        let fits = |(devices, tenths, priority): (Vec<&'static str>, u64, i32)| {
            let at = |id: &&str| usize::from(*id == "B");
            let fits = devices.iter().all(|id| left[at(id)] >= tenths);
            if fits {
                devices.iter().for_each(|id| left[at(id)] -= tenths);
            }
            fits.then_some((devices, tenths * 100_000, priority))
        };
        all.into_iter().filter_map(fits).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn victims_equal_those_of_trying_every_set(
        tenants in tenants(),
        request in prop::sample::select(vec![
            "fraction=0.3", "fraction=0.7", "whole", "whole count=2", "fraction=0.4 count=2",
            "memory=250", "fraction=0.2 memory=800",
        ]),
    ) {
        let (node, classes) = with(&tenants);
        let compiled = compiled_request(request, &classes);
        let sets = Cell::new(MOST_SETS);
        let preemptor = Preemptor { compiled: &compiled, victim: &all, leaving_is_gone: true, sets: &sets };
        let room = room_to_make(&node, &preemptor, &BTreeSet::new());
        let found = room.as_ref().map(|room| (room.loss.highest.map(|highest| highest.priority), room.loss.count));
        prop_assert_eq!(found, brute_force(&node, &compiled, &tenants));
        if let Some(room) = room {
            prop_assert!(plan::fits_without(&node, &compiled, &room.victims));
        }
    }
}
