//! Invariants of the ledger after any history: nothing over capacity, nothing lost, answers that keep
//! their promise, and the same ledger for any order of the facts.

mod facts;
mod suggestions;
mod replicas;
mod sharing;

use std::collections::BTreeMap;

use crate::harness::histories::{Event, NODES, Player, history, query};
use crate::harness::ledger::{fraction, pod, request_of};
use engine::ledger::change::commits::ReserveError;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::queries::PlacementRequest;
use engine::model::device_state::{DeviceState, HoldRule};
use engine::model::event::LedgerEvent;
use engine::model::node_state::NodeState;
use engine::model::rejection::Rejection;
use proptest::prelude::*;
use wire::ids::NodeName;
use wire::units::{Demand, MemMib, Timestamp};

/// A quarter of proptest's own number of cases, for a run of seconds; `PROPTEST_CASES` sets it.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases / 4, ..default }
}

/// Sums on every device: within capacity, and free, allocated, held and unallocated use add up.
fn check_sums(ledger: &Ledger) -> Result<(), TestCaseError> {
    for node in ledger.nodes() {
        for device in node.devices() {
            check_device(device)?;
            sharing::check_tenants(&node, device)?;
        }
    }
    prop_assert_eq!(ledger.audit(), Ok(()));
    Ok(())
}

fn check_device(device: &DeviceState) -> Result<(), TestCaseError> {
    let tenants = device.tenants().values().try_fold(Demand::ZERO, |sum, d| sum.checked_add(*d));
    prop_assert_eq!(tenants, Some(device.allocated()));
    let left = device.capacity().checked_sub(device.allocated());
    prop_assert!(left.is_some(), "over capacity: {device:?}");
    // bind may use what is held for others; then nothing is free
    let left = left.and_then(|left| left.checked_sub(device.on_hold())).unwrap_or_default();
    let memory = left.memory.checked_sub(device.unallocated_use()).unwrap_or(MemMib::ZERO);
    let free = if device.is_unread() { Demand::ZERO } else { Demand { memory, ..left } };
    prop_assert_eq!(device.free(), free);
    Ok(())
}

/// Cached answers are those of the current ledger.
fn check_answers(ledger: &Ledger, query: &PlacementRequest) -> Result<(), TestCaseError> {
    let kept = ledger.answers(query, &NODES);
    for (node, kept) in NODES.iter().zip(kept) {
        prop_assert_eq!(kept, ledger.fresh_answer(query, node), "node {}", node);
    }
    let keys = ledger.keys(query, NODES.iter());
    let fresh = NODES.map(|node| (ledger.fresh_answer(query, node).ok().map(|it| it.key()), node));
    let found = keys.places.iter().map(|place| place.map(|at| keys.keys[at]));
    prop_assert!(found.eq(fresh.iter().map(|(key, _)| *key)), "{:?}, {:?}", keys, fresh);
    let first = fresh.iter().filter(|(key, _)| key.is_some()).min();
    let first = first.and_then(|first| fresh.iter().position(|node| node == first));
    let best = keys.best.and_then(|best| keys.places.iter().position(|at| *at == Some(best)));
    prop_assert_eq!(best, first);
    let best = ledger.best(query).map(|(_, rank)| rank);
    let all = ledger.answers(query, &NODES);
    prop_assert_eq!(best, all.into_iter().filter_map(Result::ok).min());
    for listed in [&[0, 1, 2, 3][..], &[3, 1], &[2]] {
        (1..=listed.len()).try_for_each(|most| check_choice(ledger, query, listed, most))?;
    }
    Ok(())
}

/// What is kept of many nodes, by the plain way: sort all that fit, take the best of at most half as many
/// failure domains, and fill up with the best of all.
fn check_choice(
    ledger: &Ledger,
    query: &PlacementRequest,
    listed: &[usize],
    most: usize,
) -> Result<(), TestCaseError> {
    let domain = |at: usize| ["", "east", "west", "west"][at % 4];
    for (at, node) in NODES.iter().enumerate() {
        ledger.see_domain(&NodeName::new(*node), domain(at));
    }
    let (mut fitting, mut refused) = (Vec::new(), [0; Rejection::LABELS.len()]);
    for at in listed {
        match ledger.fresh_answer(query, NODES[*at]) {
            Ok(rank) => fitting.push((rank, NODES[*at], *at)),
            Err(rejection) => refused[rejection.position()] += 1,
        }
    }
    fitting.sort_unstable();
    let mut kept: Vec<usize> = Vec::new();
    let is_first_of = |kept: &[usize], at: usize| {
        !domain(at).is_empty() && kept.iter().all(|other| domain(*other) != domain(at))
    };
    for (_, _, at) in &fitting {
        if kept.len() < most / 2 && is_first_of(&kept, *at) {
            kept.push(*at);
        }
    }
    for (_, _, at) in &fitting {
        if kept.len() < most && !kept.contains(at) {
            kept.push(*at);
        }
    }
    kept.sort_by_key(|at| fitting.iter().position(|(_, _, other)| other == at));
    let choice = ledger.choose(query, listed.iter().map(|at| NODES[*at]), most);
    let chosen: Vec<&str> = choice.kept.iter().map(NodeName::as_str).collect();
    prop_assert_eq!(chosen, kept.into_iter().map(|at| NODES[at]).collect::<Vec<_>>());
    prop_assert_eq!(choice.refused, refused);
    Ok(())
}

/// `reserve` agrees with a yes, and with a no unless only holds were in the way.
fn check_reserve(
    ledger: &Ledger,
    query: &PlacementRequest,
    now: Timestamp,
) -> Result<(), TestCaseError> {
    for node in NODES {
        let answer = ledger.answers(query, &[node]).remove(0);
        let has_holds = ledger.node(node).is_some_and(|node_state| {
            !node_state.holds().is_empty() || !node_state.standing_holds().is_empty()
        });
        let reserved = ledger.reserve(&pod("probe"), node, query, now);
        match (answer, reserved) {
            (Ok(_), Ok(placement)) => {
                check_sums(ledger)?;
                let devices = placement.devices.len();
                let count = query.gpu.as_ref().map_or(0, |gpu| gpu.count.get());
                prop_assert_eq!(u32::try_from(devices), Ok(count));
            }
            (Ok(rank), Err(error)) => {
                return Err(TestCaseError::fail(format!("{node} said {rank:?}, then {error}")));
            }
            (Err(rejection), Ok(_)) => prop_assert!(has_holds, "{} said {:?}", node, rejection),
            (Err(rejection), Err(ReserveError::Rejection(again))) if !has_holds => {
                prop_assert_eq!(rejection, again);
            }
            (Err(_), Err(ReserveError::Rejection(_))) => {}
            (Err(rejection), Err(error)) => {
                return Err(TestCaseError::fail(format!("{rejection:?}, then {error}")));
            }
        }
        ledger.forget(&pod("probe").uid);
    }
    Ok(())
}

/// Free memory and share of each device of the nodes that take pods.
fn room<'a>(
    nodes: impl IntoIterator<Item = &'a NodeState>,
    holds: HoldRule,
) -> BTreeMap<(String, String), (u64, u64)> {
    let open = nodes.into_iter().filter(|node| node.placeable().is_ok());
    open.flat_map(|node| {
        let devices = node.devices().iter().zip(node.rooms(holds));
        devices.filter(|(device, _)| device.is_placeable()).map(|(device, room)| {
            let key = (node.name().to_string(), device.device().id.to_string());
            (key, (room.free.memory.mib(), room.free.share.millionths()))
        })
    })
    .collect()
}

fn is_kept(node: &NodeState) -> bool {
    !node.standing_holds().is_empty()
}

/// Whether more of some device of a node is free.
fn has_more_room(before: &[NodeState], node: &NodeState, holds: HoldRule) -> bool {
    let old = room(before, holds);
    room([node], holds).iter().any(|(key, (memory, share))| {
        let known = old.get(key).copied();
        *memory > 0 && *share > 0 && known.is_none_or(|(m, s)| *memory > m || *share > s)
    })
}

/// Whether more of the host is free on a node where some of it was kept.
fn has_more_host(before: &[NodeState], node: &NodeState) -> bool {
    let known = before.iter().find(|it| it.name() == node.name() && is_kept(it));
    known.is_some_and(|known| {
        let (old, new) = (known.host_free(), node.host_free());
        new.cpu > old.cpu || new.memory > old.memory
    })
}

/// Room is reported exactly where some device has more than before; where room is kept, also if more of that is free
/// now, or more of the host beside it.
fn check_events(
    before: &[NodeState],
    after: &[NodeState],
    events: &[LedgerEvent],
    event: &Event,
) -> Result<(), TestCaseError> {
    for node in after {
        let grew = has_more_room(before, node, HoldRule::Respected)
            || is_kept(node) && has_more_room(before, node, HoldRule::Ignored)
            || is_kept(node) && has_more_host(before, node);
        let reported = events.contains(&LedgerEvent::Room(node.name().clone()));
        // What was kept may end with the pod for which it was, before what else that pod had does.
        let may_be = grew || has_more_host(before, node);
        prop_assert!(grew <= reported && reported <= may_be, "{:?} at {}", event, node.name());
    }
    Ok(())
}

/// A kept room that is replaced on its node frees nothing in between.
#[test]
fn a_larger_kept_room_on_the_same_node_is_no_room() {
    let mut player = Player::new();
    for share in [100_000, 333_330] {
        let event = Event::Stand(6, request_of(fraction(share), 1, Default::default()));
        let before = player.ledger.nodes();
        let events = player.play(&event).unwrap();
        check_events(&before, &player.ledger.nodes(), &events, &event).unwrap();
        assert_eq!(events, []);
        assert_eq!(player.ledger.standing_count(), 1);
    }
}

/// The standing hold of a pod that has a hold on the same node takes nothing there, so it frees nothing.
#[test]
fn what_is_kept_twice_is_room_once() {
    let mut player = Player::new();
    let request = |share| request_of(fraction(share), 1, Default::default());
    let without_gpu = PlacementRequest { gpu: None, ..request(1) };
    for event in
        [Event::Stand(6, request(500_000)), Event::Hold(6, 0, without_gpu), Event::BoundBare(6, 0)]
    {
        let before = player.ledger.nodes();
        let events = player.play(&event).unwrap();
        check_events(&before, &player.ledger.nodes(), &events, &event).unwrap();
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn nothing_is_over_capacity_and_nothing_is_lost(history in history()) {
        let mut player = Player::new();
        for event in &history {
            player.play(event);
            check_sums(&player.ledger)?;
        }
    }

    #[test]
    fn cached_answers_equal_fresh_ones(
        history in history(),
        queries in prop::collection::vec(query(), 1..4),
    ) {
        let mut player = Player::new();
        for event in &history {
            player.play(event);
            for query in &queries {
                check_answers(&player.ledger, query)?;
            }
        }
    }

    #[test]
    fn reserve_agrees_with_filter_answers(
        history in history(),
        queries in prop::collection::vec(query(), 1..4),
    ) {
        let mut player = Player::new();
        for event in &history {
            player.play(event);
        }
        for query in &queries {
            check_reserve(&player.ledger, query, player.now)?;
            check_answers(&player.ledger, query)?;
        }
    }

    #[test]
    fn room_is_reported_exactly_when_it_grows(history in history()) {
        let mut player = Player::new();
        for event in &history {
            let before = player.ledger.nodes();
            if let Some(events) = player.play(event) {
                check_events(&before, &player.ledger.nodes(), &events, event)?;
            }
        }
    }

    #[test]
    fn holds_and_pods_are_found_on_their_nodes(history in history()) {
        let mut player = Player::new();
        for event in &history {
            player.play(event);
            let nodes = player.ledger.nodes();
            let holds: usize = nodes.iter().map(|node| node.holds().len()).sum();
            prop_assert_eq!(player.ledger.hold_count(), holds, "after {:?}", event);
            let standing: usize = nodes.iter().map(|node| node.standing_holds().len()).sum();
            prop_assert_eq!(player.ledger.standing_count(), standing, "after {:?}", event);
            for node in &nodes {
                for uid in node.reservations().keys() {
                    let found = player.ledger.reservation(uid).map(|held| held.placement.node);
                    prop_assert_eq!(found.as_ref(), Some(node.name()));
                }
            }
        }
    }

    #[test]
    fn a_bound_pod_is_allocated_once_with_its_written_placement(history in history()) {
        let mut player = Player::new();
        for event in &history {
            player.play(event);
        }
        for (uid, fact) in &player.bound {
            let nodes = player.ledger.nodes();
            let holding: Vec<_> = nodes.iter().filter(|node| node.reservation(uid).is_some()).collect();
            let written: Vec<_> = fact.placement.iter().collect();
            let placements = holding.iter().filter_map(|node| node.reservation(uid));
            let allocated: Vec<_> = placements
                .map(|held| &held.placement)
                .filter(|placement| !placement.devices.is_empty())
                .collect();
            prop_assert_eq!(allocated, written);
        }
    }

    #[test]
    fn a_pod_without_gpu_fits_wherever_the_host_has_room(history in history()) {
        let mut player = Player::new();
        for event in &history {
            player.play(event);
        }
        let query = PlacementRequest { gpu: None, ..request_of(fraction(1), 1, Default::default()) };
        for (node, answer) in NODES.iter().zip(player.ledger.answers(&query, &NODES)) {
            let is_known = player.ledger.node(node).is_some();
            prop_assert_eq!(answer.err(), (!is_known).then_some(Rejection::UnknownNode));
        }
    }
}
