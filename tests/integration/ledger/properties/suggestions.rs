//! What is offered to a pod that waits is true at that moment, and the largest there is.

use std::collections::BTreeSet;

use gpupack::hardware::device::PodUid;
use gpupack::hardware::units::{MemMib, MilliCpu, Share, Timestamp};
use gpupack::ledger::nodes::state::Ledger;
use gpupack::ledger::query::questions::PlacementRequest;
use gpupack::ledger::suggest::search::{Change, Lever, Suggestion};
use gpupack::model::device_state::HoldRule;
use gpupack::model::request::{Amount, GpuRequest};
use proptest::prelude::*;

use crate::harness::histories::{NODES, Player, history, question};
use crate::harness::ledger::pod;

/// The size that a lever moves, in its own unit; none where it is no number.
fn size(lever: Lever, question: &PlacementRequest) -> Option<u64> {
    let gpu = question.gpu.as_ref();
    match (lever, gpu.map(|gpu| &gpu.amount)) {
        (Lever::Share, Some(Amount::Fraction(share) | Amount::FractionAndMemory(share, _))) => {
            Some(share.millionths().div_ceil(10))
        }
        (Lever::Share, Some(Amount::Whole)) => Some(100_000),
        (Lever::Memory, Some(Amount::Memory(memory) | Amount::FractionAndMemory(_, memory))) => {
            Some(memory.mib())
        }
        (Lever::Devices, Some(_)) => gpu.map(|gpu| u64::from(gpu.count.get())),
        (Lever::Cpu, _) => Some(question.host.cpu.milli()),
        (Lever::HostMemory, _) => Some(question.host.memory.mib()),
        _ => None,
    }
}

/// The question with this size in place of its own.
fn resized(lever: Lever, question: &PlacementRequest, size: u64) -> PlacementRequest {
    let mut other = question.clone();
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

fn fits_somewhere(ledger: &Ledger, question: &PlacementRequest) -> bool {
    NODES.iter().any(|node| ledger.fresh_answer(question, node).is_ok())
}

/// Sizes between `found` and `asked`, both left out: all of few, some of many, and those of whole
/// devices.
fn between(ledger: &Ledger, found: u64, asked: u64) -> BTreeSet<u64> {
    let step = ((asked - found) / 40).max(1);
    let some = (found + 1..asked).step_by(usize::try_from(step).expect("small"));
    let nodes = ledger.nodes();
    let devices = nodes.iter().flat_map(|node| node.devices());
    let whole = devices.map(|books| books.capacity().memory.mib());
    let near = [found + 1, asked.saturating_sub(1)];
    some.chain(whole).chain(near).filter(|size| (found + 1..asked).contains(size)).collect()
}

fn check_size(
    ledger: &Ledger,
    question: &PlacementRequest,
    lever: Lever,
    found: Option<u64>,
) -> Result<(), TestCaseError> {
    let Some(asked) = size(lever, question) else { return Ok(()) };
    let is_of_host = matches!(lever, Lever::Cpu | Lever::HostMemory);
    let below = if is_of_host && found.is_none() { 0 } else { found.unwrap_or(0) };
    for larger in between(ledger, below, asked) {
        let fits = fits_somewhere(ledger, &resized(lever, question, larger));
        prop_assert!(!fits, "{lever:?} of {larger} fits, offered was {found:?}: {question:?}");
    }
    Ok(())
}

/// Without these pods it fits on the node, and with any one of them it does not.
fn check_end(
    ledger: &Ledger,
    question: &PlacementRequest,
    suggestion: &Suggestion,
    pods: &BTreeSet<&PodUid>,
) -> Result<(), TestCaseError> {
    let fits_without = |gone: &BTreeSet<&PodUid>| {
        let mut node = ledger.node(suggestion.node.as_str()).expect("the node is known");
        gone.iter().for_each(|uid| assert!(node.remove(uid), "{uid} is there"));
        ledger.answers_on(question, 1, |_, _| Some(node.clone()))[0].is_ok()
    };
    prop_assert!(fits_without(pods), "{suggestion:?}");
    for stays in pods {
        let others = pods.iter().copied().filter(|uid| uid != stays).collect();
        let is_needless = matches!(suggestion.change, Change::End(..)) && fits_without(&others);
        prop_assert!(!is_needless, "{stays} could stay: {suggestion:?}");
    }
    Ok(())
}

fn check_remedy(
    ledger: &Ledger,
    question: &PlacementRequest,
    suggestion: &Suggestion,
    now: Timestamp,
) -> Result<(), TestCaseError> {
    prop_assert!(ledger.still_helps(question, suggestion), "{suggestion:?}");
    match &suggestion.change {
        Change::Claimed => {
            let node = ledger.node(suggestion.node.as_str()).expect("the node is known");
            prop_assert!(!node.holds().is_empty());
            prop_assert!(
                node.rooms(HoldRule::Ignored) != node.rooms(HoldRule::Respected)
                    || node.host_room(HoldRule::Ignored) != node.host_room(HoldRule::Respected)
            );
        }
        Change::CompiledRequest(lever, changed) => {
            let kept = ledger.reserve(&pod("probe"), suggestion.node.as_str(), changed, now);
            prop_assert!(kept.is_ok(), "{lever:?}: {kept:?} {changed:?}");
            ledger.forget(&pod("probe").uid);
            if let (Some(asked), Some(offered)) = (size(*lever, question), size(*lever, changed)) {
                prop_assert!(offered < asked, "{lever:?} of {offered} is not less than {asked}");
            }
            let wanted = |question: &PlacementRequest| question.gpu.as_ref().map(GpuRequest::shape);
            prop_assert!(wanted(question) != wanted(changed) || question.host != changed.host);
        }
        Change::End(_, pods) | Change::Ending(pods) => {
            check_end(ledger, question, suggestion, &pods.iter().map(|pod| &pod.uid).collect())?;
        }
        Change::Kubelet(devices) | Change::Heal(devices) => prop_assert!(*devices > 0),
    }
    Ok(())
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn what_is_offered_is_true_and_the_largest_there_is(
        history in history(),
        questions in prop::collection::vec(question(), 1..6),
    ) {
        let mut player = Player::new();
        for event in &history {
            player.play(event);
        }
        for question in &questions {
            let suggestions = player.ledger.suggestions(question);
            if fits_somewhere(&player.ledger, question) {
                prop_assert_eq!(&suggestions, &[], "it fits as it is");
                continue;
            }
            for suggestion in &suggestions {
                check_remedy(&player.ledger, question, suggestion, player.now)?;
            }
            for lever in [Lever::Share, Lever::Memory, Lever::Devices, Lever::Cpu, Lever::HostMemory] {
                let offered = suggestions.iter().find_map(|suggestion| match &suggestion.change {
                    Change::CompiledRequest(of, changed) if *of == lever => size(lever, changed),
                    _ => None,
                });
                let is_of_host = matches!(lever, Lever::Cpu | Lever::HostMemory);
                if !is_of_host || question.host_rule == gpupack::model::fit::HostRule::Checked {
                    check_size(&player.ledger, question, lever, offered)?;
                }
            }
        }
    }
}
