//! Pairs of concurrent calls: in either order the ledger agrees with the facts afterwards.
//!
//! Each round starts two threads at the same moment on a fresh pod. A race that is lost once in some
//! hundred rounds shows here; the number of rounds keeps a run below a second.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::harness;
use crate::harness::ledger::{
    DEVICE_MIB, add_node, fraction, gpus, host, pod, request_of, seconds, seen, settings,
};
use crate::harness::turns::turn;
use engine::hardware::pool::ConfiguredIsolation;
use engine::ledger::change::facts::PodFact;
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::queries::PlacementRequest;
use engine::model::node_state::NodeReporting;
use engine::model::policy::Policy;
use engine::model::reservation::{PlacedDevice, Placement};
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::{Demand, MemMib, Share, Timestamp};

const ROUNDS: u64 = 2000;

/// A race ends after this time too: where the cores are busy, one round takes milliseconds.
const LONGEST: Duration = Duration::from_millis(700);

fn ledger() -> Ledger {
    let ledger = Ledger::new(settings());
    for node in ["a", "b"] {
        add_node(&ledger, node, &gpus(node, 2, "A100", DEVICE_MIB), seconds(0));
    }
    ledger
}

fn half() -> PlacementRequest {
    request_of(fraction(500_000), 1, Policy::BinPack)
}

fn uid_of(round: u64) -> PodUid {
    PodUid::new(format!("pod-{round}"))
}

/// The pod of this round as the API server shows it: bound to `node`, on its first device.
fn bound(round: u64, node: &str) -> PodFact {
    let demand = Demand { memory: MemMib::new(1), share: Share::from_millionths(1) };
    let device = PlacedDevice { id: harness::ledger::device_id(&format!("{node}-0")), demand };
    let placement = Placement {
        node: NodeName::new(node),
        devices: vec![device],
        isolation: ConfiguredIsolation::None,
        guest: None,
        spots: Vec::new(),
    };
    PodFact { bound_by_us: false, ..harness::ledger::bound(uid_of(round).as_str(), &placement) }
}

/// Lets the other thread run on when this one panics: a counter that has passed every round.
struct Release<'a>(&'a AtomicU64);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(u64::MAX / 2, Ordering::Release);
    }
}

/// Runs `left` and `right` at the same moment, round after round: `prepare` before, `settle` after.
fn race(
    left: impl Fn(u64) + Sync,
    right: impl Fn(u64) + Sync,
    prepare: impl Fn(u64),
    settle: impl Fn(u64),
) {
    // Two threads that are to meet need two free cores.
    let _turn = turn();
    let (started, finished) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _release = Release(&finished);
            for round in 1..=ROUNDS {
                wait_for(&started, round);
                if started.load(Ordering::Acquire) > ROUNDS {
                    return; // the other side has stopped
                }
                right(round);
                finished.store(round, Ordering::Release);
            }
        });
        let _release = Release(&started);
        let began = now();
        for round in 1..=ROUNDS {
            if began.elapsed() > LONGEST {
                return;
            }
            prepare(round);
            started.store(round, Ordering::Release);
            left(round);
            wait_for(&finished, round);
            settle(round);
        }
    });
}

#[expect(clippy::disallowed_methods, reason = "only bounds the time that the test takes")]
fn now() -> Instant {
    Instant::now()
}

/// Spins for a moment, so that both sides start together, then leaves the core to others.
fn wait_for(counter: &AtomicU64, round: u64) {
    let mut spins = 0;
    while counter.load(Ordering::Acquire) < round {
        spins += 1;
        if spins < 2000 { spin_loop() } else { std::thread::yield_now() }
    }
}

fn is_allocated(ledger: &Ledger, uid: &PodUid) -> bool {
    let held = ledger.nodes().iter().filter(|node| node.reservation(uid).is_some()).count();
    assert!(held <= 1, "{uid} is allocated on {held} nodes");
    let found = ledger.reservation(uid).is_some();
    assert_eq!(found, held == 1, "{uid} is allocated on {held} nodes; found by its UID: {found}");
    found
}

fn check_holds(ledger: &Ledger, round: u64) {
    let held: usize = ledger.nodes().iter().map(|node| node.holds().len()).sum();
    assert_eq!(ledger.hold_count(), held, "round {round}: holds counted and holds present");
}

#[test]
fn a_late_rejection_does_not_remove_a_bound_pod() {
    let ledger = ledger();
    race(
        |round| drop(ledger.see_pod(&bound(round, "a"), seconds(1))),
        |round| drop(ledger.forget(&uid_of(round))),
        |round| {
            ledger.reserve(&pod(uid_of(round).as_str()), "a", &half(), seconds(1)).unwrap();
        },
        |round| {
            assert!(is_allocated(&ledger, &uid_of(round)), "round {round}");
            ledger.end_pod(&uid_of(round), seconds(1));
            add_report(&ledger, "a", 2 * round, seconds(1));
            add_report(&ledger, "a", 2 * round + 1, seconds(1));
        },
    );
}

#[test]
fn a_late_old_copy_does_not_allocate_an_ended_pod() {
    let ledger = ledger();
    race(
        |round| drop(ledger.see_pod(&bound(round, "a"), seconds(1))),
        |round| drop(ledger.end_pod(&uid_of(round), seconds(1))),
        |_| {},
        |round| {
            ledger.tick(seconds(100));
            assert!(!is_allocated(&ledger, &uid_of(round)), "round {round}");
        },
    );
}

#[test]
fn a_pod_whose_hold_ends_during_reserve_is_still_found() {
    let ledger = ledger();
    race(
        |round| {
            ledger.reserve(&pod(uid_of(round).as_str()), "a", &half(), seconds(100)).unwrap();
        },
        |_| drop(ledger.tick(seconds(100))),
        |round| {
            add_report(&ledger, "a", round, seconds(100));
            ledger.hold(&uid_of(round), "a", &half(), seconds(1));
        },
        |round| {
            assert!(is_allocated(&ledger, &uid_of(round)), "round {round}");
            check_holds(&ledger, round);
            ledger.forget(&uid_of(round));
            assert!(!is_allocated(&ledger, &uid_of(round)), "round {round}");
        },
    );
}

#[test]
fn two_holds_of_one_pod_leave_one() {
    let ledger = ledger();
    race(
        |round| drop(ledger.hold(&uid_of(round), "a", &half(), seconds(1))),
        |round| drop(ledger.hold(&uid_of(round), "b", &half(), seconds(1))),
        |_| {},
        |round| {
            check_holds(&ledger, round);
            ledger.drop_hold(&uid_of(round));
            check_holds(&ledger, round);
        },
    );
}

#[test]
fn a_hold_that_races_with_its_bind_leaves_nothing_behind() {
    let ledger = ledger();
    race(
        |round| drop(ledger.hold(&uid_of(round), "a", &half(), seconds(1))),
        |round| {
            ledger.reserve(&pod(uid_of(round).as_str()), "a", &half(), seconds(1)).unwrap();
        },
        |_| {},
        |round| {
            check_holds(&ledger, round);
            assert_eq!(ledger.hold_count(), 0, "round {round}: the pod is reserved");
            ledger.forget(&uid_of(round));
        },
    );
}

#[test]
fn a_pod_seen_while_its_node_is_deleted_stays_allocated() {
    let ledger = ledger();
    race(
        |round| drop(ledger.see_pod(&bound(round, "a"), seconds(1))),
        |_| ledger.lose_node(&NodeName::new("a")),
        |_| {},
        |round| {
            assert!(is_allocated(&ledger, &uid_of(round)), "round {round}");
            ledger.end_pod(&uid_of(round), seconds(1));
            ledger.tick(seconds(100));
            ledger.see_node(&NodeName::new("a"), host(), PoolName::new(""));
        },
    );
}

/// A report of a node's running agent that sees no process.
fn add_report(ledger: &Ledger, node: &str, sequence: u64, now: Timestamp) {
    let inventory = gpus(node, 2, "A100", DEVICE_MIB);
    let report = NodeReport {
        allocations_version: None,
        agent: "racer".to_owned(),
        session: None,
        sequence,
        uses: inventory.devices().iter().map(|device| seen(&device.id, [])).collect(),
        inventory: Some(inventory),
    };
    ledger.report(node, &report, now).expect("a hello with an inventory is accepted");
}

#[test]
fn a_node_that_reports_just_in_time_is_not_silent() {
    let ledger = ledger();
    race(
        |round| add_report(&ledger, "a", round, seconds(100 * round)),
        |round| drop(ledger.tick(seconds(100 * round))),
        |_| {},
        |round| {
            // If the tick came first, the report after it ends the silence.
            let state = ledger.node("a").unwrap().state();
            assert_eq!(state, NodeReporting::Reporting, "round {round}");
        },
    );
}

#[test]
fn a_node_deleted_just_before_it_becomes_silent_stays_deleted() {
    let ledger = ledger();
    ledger.see_pod(&bound(0, "a"), seconds(0)); // else no part of the node is kept
    race(
        |_| ledger.lose_node(&NodeName::new("a")),
        |round| drop(ledger.tick(seconds(100 * round + 50))),
        |round| {
            ledger.see_node(&NodeName::new("a"), host(), PoolName::new(""));
            add_report(&ledger, "a", round, seconds(100 * round));
        },
        |round| {
            let state = ledger.node("a").unwrap().state();
            assert_eq!(state, NodeReporting::Gone, "round {round}");
        },
    );
}
