//! What is offered to a pod that waits is true at that moment, and the largest there is.

use std::collections::BTreeSet;

use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::own_room::OwnRoom;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::search::{Change, Ends, Lever, Suggestion};
use engine::model::device_state::HoldRule;
use engine::model::request::{Amount, GpuRequest};
use proptest::prelude::*;
use wire::ids::PodUid;
use wire::units::{MemMib, MilliCpu, Share, Timestamp};

use crate::harness::histories::{NODES, Player, history, query};
use crate::harness::ledger::pod;

/// The size that a lever changes, in its own unit; `None` if it is not a number.
fn size(lever: Lever, query: &PlacementRequest) -> Option<u64> {
    let gpu = query.gpu.as_ref();
    match (lever, gpu.map(|gpu| &gpu.amount)) {
        (Lever::Share, Some(Amount::Fraction(share) | Amount::FractionAndMemory(share, _))) => {
            Some(share.millionths().div_ceil(10))
        }
        (Lever::Share, Some(Amount::Whole)) => Some(100_000),
        (Lever::Memory, Some(Amount::Memory(memory) | Amount::FractionAndMemory(_, memory))) => {
            Some(memory.mib())
        }
        (Lever::Devices, Some(_)) => gpu.map(|gpu| u64::from(gpu.count.get())),
        (Lever::Cpu, _) => Some(query.host.cpu.milli()),
        (Lever::HostMemory, _) => Some(query.host.memory.mib()),
        _ => None,
    }
}

/// The request with this size in place of its own.
fn resized(lever: Lever, query: &PlacementRequest, size: u64) -> PlacementRequest {
    let mut other = query.clone();
    match lever {
        Lever::Cpu => other.host.cpu = MilliCpu::new(size),
        Lever::HostMemory => other.host.memory = MemMib::new(size),
        _ => {
            let gpu = other.gpu.as_mut().expect("the other levers are of GPUs");
            let share = Share::from_millionths(size * 10);
            match (lever, &gpu.amount) {
                (Lever::Devices, _) => {
                    let count = u32::try_from(size).ok().and_then(|size| size.try_into().ok());
                    gpu.count = count.expect("small and not zero");
                }
                (Lever::Share, Amount::FractionAndMemory(_, memory)) => {
                    gpu.amount = Amount::FractionAndMemory(share, *memory);
                }
                (Lever::Share, _) => gpu.amount = Amount::Fraction(share),
                (_, Amount::FractionAndMemory(share, _)) => {
                    gpu.amount = Amount::FractionAndMemory(*share, MemMib::new(size));
                }
                _ => gpu.amount = Amount::Memory(MemMib::new(size)),
            }
        }
    }
    other
}

fn fits_somewhere(ledger: &Ledger, query: &PlacementRequest) -> bool {
    NODES.iter().any(|node| ledger.fresh_answer(query, node).is_ok())
}

/// Sizes between `found` and `queried`, both left out: all of few, some of many, and those of whole
/// devices.
fn between(ledger: &Ledger, found: u64, queried: u64) -> BTreeSet<u64> {
    let step = ((queried - found) / 40).max(1);
    let some = (found + 1..queried).step_by(usize::try_from(step).expect("small"));
    let nodes = ledger.nodes();
    let devices = nodes.iter().flat_map(|node| node.devices());
    let whole = devices.map(|node_state| node_state.capacity().memory.mib());
    let near = [found + 1, queried.saturating_sub(1)];
    some.chain(whole).chain(near).filter(|size| (found + 1..queried).contains(size)).collect()
}

fn check_size(
    ledger: &Ledger,
    query: &PlacementRequest,
    lever: Lever,
    found: Option<u64>,
) -> Result<(), TestCaseError> {
    let Some(queried) = size(lever, query) else { return Ok(()) };
    let is_of_host = matches!(lever, Lever::Cpu | Lever::HostMemory);
    // Less than a quarter of an amount of the host is not offered, whether it fits or not.
    let least = if is_of_host { queried.div_ceil(4).saturating_sub(1) } else { 0 };
    let below = found.unwrap_or(least);
    for larger in between(ledger, below, queried) {
        let fits = fits_somewhere(ledger, &resized(lever, query, larger));
        prop_assert!(!fits, "{lever:?} of {larger} fits, offered was {found:?}: {query:?}");
    }
    Ok(())
}

/// Without these pods it fits on the node, and with any one of them it does not.
fn check_end(
    ledger: &Ledger,
    query: &PlacementRequest,
    suggestion: &Suggestion,
    pods: &BTreeSet<&PodUid>,
) -> Result<(), TestCaseError> {
    let fits_without = |gone: &BTreeSet<&PodUid>| {
        let mut node = ledger.node(suggestion.node.as_str()).expect("the node is known");
        gone.iter().for_each(|uid| assert!(node.remove(uid), "{uid} is there"));
        ledger.answers_on(query, 1, |_, _| Some(node.clone()))[0].is_ok()
    };
    prop_assert!(fits_without(pods), "{suggestion:?}");
    for stays in pods {
        let others = pods.iter().copied().filter(|uid| uid != stays).collect();
        let is_needless = matches!(suggestion.change, Change::End(..)) && fits_without(&others);
        prop_assert!(!is_needless, "{stays} could stay: {suggestion:?}");
    }
    Ok(())
}

fn check_suggestion(
    ledger: &Ledger,
    query: &PlacementRequest,
    suggestion: &Suggestion,
    now: Timestamp,
) -> Result<(), TestCaseError> {
    prop_assert!(ledger.still_helps(query, &OwnRoom::default(), suggestion), "{suggestion:?}");
    match &suggestion.change {
        Change::HeldElsewhere => {
            let node = ledger.node(suggestion.node.as_str()).expect("the node is known");
            prop_assert!(!node.holds().is_empty());
            prop_assert!(
                node.rooms(HoldRule::Ignored) != node.rooms(HoldRule::Respected)
                    || node.host_room(HoldRule::Ignored) != node.host_room(HoldRule::Respected)
            );
        }
        Change::KeptForFirst => {
            let node = ledger.node(suggestion.node.as_str()).expect("the node is known");
            prop_assert!(!node.standing_holds().is_empty());
        }
        Change::Request(lever, changed) => {
            let kept = ledger.reserve(&pod("probe"), suggestion.node.as_str(), changed, now);
            prop_assert!(kept.is_ok(), "{lever:?}: {kept:?} {changed:?}");
            ledger.forget(&pod("probe").uid);
            if let (Some(queried), Some(offered)) = (size(*lever, query), size(*lever, changed)) {
                prop_assert!(
                    offered < queried,
                    "{lever:?} of {offered} is not less than {queried}"
                );
                let is_of_host = matches!(lever, Lever::Cpu | Lever::HostMemory);
                prop_assert!(offered > 0 && (!is_of_host || offered * 4 >= queried));
            }
            let wanted = |query: &PlacementRequest| query.gpu.as_ref().map(GpuRequest::shape);
            prop_assert!(wanted(query) != wanted(changed) || query.host != changed.host);
        }
        Change::End(Ends { pods, .. }) | Change::Ending(pods) => {
            check_end(ledger, query, suggestion, &pods.iter().map(|pod| &pod.uid).collect())?;
        }
        Change::Kubelet(devices) | Change::Heal(devices) => prop_assert!(*devices > 0),
    }
    Ok(())
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn the_offered_size_fits_and_is_the_largest(
        history in history(),
        queries in prop::collection::vec(query(), 1..6),
    ) {
        let mut player = Player::new();
        for event in &history {
            player.play(event);
        }
        for query in &queries {
            let suggestions = player.ledger.suggestions(query, &OwnRoom::default());
            if fits_somewhere(&player.ledger, query) {
                prop_assert_eq!(&suggestions, &[], "it fits as it is");
                continue;
            }
            for suggestion in &suggestions {
                check_suggestion(&player.ledger, query, suggestion, player.now)?;
            }
            for lever in [Lever::Share, Lever::Memory, Lever::Devices, Lever::Cpu, Lever::HostMemory] {
                let offered = suggestions.iter().find_map(|suggestion| match &suggestion.change {
                    Change::Request(of, changed) if *of == lever => size(lever, changed),
                    _ => None,
                });
                let is_of_host = matches!(lever, Lever::Cpu | Lever::HostMemory);
                if !is_of_host || query.host_rule == engine::model::fit::HostRule::Checked {
                    check_size(&player.ledger, query, lever, offered)?;
                }
            }
        }
    }
}
