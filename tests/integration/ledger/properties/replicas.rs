//! Two ledgers with the same facts answer the same; out-of-order messages of agents change nothing.

use std::num::NonZeroU32;

use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use proptest::prelude::*;
use wire::ids::PodUid;

use crate::harness::histories::{
    Event, KINDS, NODES, Player, history, inventory, query, snapshots,
};
use crate::harness::ledger::{add_node, pod, seconds, settings};

fn replica(kinds: &[usize], order: &[usize]) -> Ledger {
    let ledger = Ledger::new(settings());
    for at in order {
        add_node(&ledger, NODES[*at], &inventory(NODES[*at], kinds[*at]), seconds(0));
    }
    ledger
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn the_best_node_does_not_depend_on_node_order(
        kinds in prop::collection::vec(0..KINDS, NODES.len()),
        order in Just((0..NODES.len()).collect::<Vec<_>>()).prop_shuffle(),
        queries in prop::collection::vec(query(), 1..20),
    ) {
        let one = replica(&kinds, &[0, 1, 2, 3]);
        let other = replica(&kinds, &order);
        for (at, query) in queries.iter().enumerate() {
            let best = one.best(query);
            prop_assert_eq!(&best, &other.best(query), "{:?}", query);
            let Some((node, _)) = best else { continue };
            let pod = pod(&format!("pod-{at}"));
            let placed = one.reserve(&pod, node.as_str(), query, seconds(0));
            prop_assert_eq!(&placed, &other.reserve(&pod, node.as_str(), query, seconds(0)));
            prop_assert!(placed.is_ok());
            for ledger in [&one, &other] {
                ledger.learn(PodUid::new(format!("pod-{at}")), query);
            }
        }
        prop_assert_eq!(snapshots(&one), snapshots(&other));
    }

    #[test]
    fn the_best_node_is_the_first_of_equals(count in 1..4_u32, mut query in query()) {
        let ledger = replica(&[1, 1, 1, 1], &[2, 0, 3, 1]);
        prop_assume!(query.strategy.is_repeatable());
        if let Some(gpu) = &mut query.gpu {
            gpu.count = NonZeroU32::new(count).expect("from one");
        }
        if let Some((node, _)) = ledger.best(&query) {
            prop_assert_eq!(node.as_str(), "a");
        }
    }

    #[test]
    fn out_of_order_agent_messages_change_nothing(
        history in history(),
        noise in prop::collection::vec((0..NODES.len(), 0..KINDS, any::<bool>()), 1..10),
    ) {
        let mut player = Player::new();
        for event in &history {
            player.play(event);
        }
        for at in 0..NODES.len() {
            player.play(&Event::Hello(at, 0));
        }
        let before = snapshots(&player.ledger);
        for (at, kind, is_known) in noise {
            // a session that is not the newest, or a sequence number that was used
            let agent = if is_known { format!("agent-{at}") } else { "ghost".to_owned() };
            let report = NodeReport {
                allocations_version: None,
                agent,
                session: (!is_known).then_some(0),
                sequence: 0,
                inventory: player.present.contains(&at).then(|| inventory(NODES[at], kind)),
                uses: Vec::new(),
            };
            let receipt = player.ledger.report(NODES[at], &report, player.now);
            prop_assert!(receipt.is_err() || receipt.is_ok_and(|receipt| !receipt.is_taken));
            prop_assert_eq!(&snapshots(&player.ledger), &before);
        }
    }
}
