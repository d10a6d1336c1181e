//! Many threads on one ledger: no deadlock, and a ledger that agrees with itself and with the facts.
//!
//! A deadlock shows as a message after a minute. The threads sweep over the same few pods at about the
//! same time, so that calls about one pod meet.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::harness::ledger::{
    DEVICE_MIB, add_node, bound, fraction, gpus, host, pod, request_of, seconds, seen, settings,
};
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::queries::PlacementRequest;
use engine::model::policy::Policy;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::Demand;

const NODES: [&str; 3] = ["a", "b", "c"];
const THREADS: u64 = 4;
const STEPS: u64 = 6000;

fn ledger() -> Arc<Ledger> {
    let ledger = Ledger::new(settings());
    for node in NODES {
        add_node(&ledger, node, &gpus(node, 4, "A100", DEVICE_MIB), seconds(0));
    }
    Arc::new(ledger)
}

/// A pod that the other threads are busy with at this step too.
fn uid(rng: &mut ChaCha8Rng, step: u64) -> String {
    format!("pod-{}", step / 40 + rng.random_range(0..4))
}

fn query(rng: &mut ChaCha8Rng) -> PlacementRequest {
    let policy = Policy::ALL[rng.random_range(0..Policy::ALL.len())];
    request_of(fraction([200_000, 333_330, 500_000][rng.random_range(0..3)]), 1, policy)
}

fn agent_report(ledger: &Ledger, node: &str, thread: u64, step: u64) -> NodeReport {
    let inventory = gpus(node, 4, "A100", DEVICE_MIB);
    let uses = inventory.devices().iter().map(|device| seen(&device.id, [])).collect();
    let session = ledger.report(
        node,
        &NodeReport {
            allocations_version: None,
            agent: format!("thread-{thread}"),
            session: None,
            sequence: step,
            inventory: Some(inventory),
            uses,
        },
        seconds(0),
    );
    let inventory = gpus(node, 4, "A100", DEVICE_MIB);
    NodeReport {
        allocations_version: None,
        agent: format!("thread-{thread}"),
        session: session.ok().map(|receipt| receipt.session),
        sequence: step,
        inventory: None,
        uses: inventory.devices().iter().map(|device| seen(&device.id, [])).collect(),
    }
}

/// Runs `body` on several threads and waits a minute at most.
fn on_threads(body: impl Fn(u64) + Send + Sync + 'static) {
    let body = Arc::new(body);
    let (done, finished) = channel();
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let (body, done) = (Arc::clone(&body), done.clone());
            std::thread::spawn(move || {
                body(thread);
                done.send(()).expect("the test waits for all threads");
            })
        })
        .collect();
    drop(done);
    for _ in 0..THREADS {
        match finished.recv_timeout(Duration::from_secs(60)) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => panic!("a thread hangs: the locks wait in a circle"),
            Err(RecvTimeoutError::Disconnected) => break, // a panic, which `join` shows
        }
    }
    for thread in threads {
        thread.join().expect("no thread panics");
    }
}

/// Where each pod is allocated; each on one node, and found by its UID there.
fn allocated_pods(ledger: &Ledger) -> BTreeMap<PodUid, NodeName> {
    let mut pods = BTreeMap::new();
    for node in ledger.nodes() {
        for uid in node.reservations().keys() {
            let twice = pods.insert(uid.clone(), node.name().clone());
            assert_eq!(twice, None, "{uid} is allocated on two nodes, one is {}", node.name());
            let found = ledger.reservation(uid).map(|held| held.placement.node);
            assert_eq!(found.as_ref(), Some(node.name()), "{uid} is not found by its UID");
        }
    }
    pods
}

fn check_holds(ledger: &Ledger) {
    let held: Vec<PodUid> =
        ledger.nodes().iter().flat_map(|node| node.holds().keys().cloned()).collect();
    let distinct: BTreeSet<&PodUid> = held.iter().collect();
    assert_eq!(distinct.len(), held.len(), "a pod has two holds: {held:?}");
    assert_eq!(ledger.hold_count(), held.len(), "more holds are counted than exist");
}

fn check_capacity(ledger: &Ledger) {
    for node in ledger.nodes() {
        for device in node.devices() {
            let (capacity, allocated) = (device.capacity(), device.allocated());
            assert!(
                capacity.checked_sub(allocated).is_some(),
                "{} holds {allocated:?} of {capacity:?}",
                device.device().id
            );
        }
    }
}

#[test]
fn commands_from_many_threads_leave_a_consistent_ledger() {
    let ledger = ledger();
    let shared = Arc::clone(&ledger);
    on_threads(move |thread| {
        let mut rng = ChaCha8Rng::seed_from_u64(thread);
        for step in 1..=STEPS {
            let node = NODES[rng.random_range(0..NODES.len())];
            let uid = uid(&mut rng, step);
            let query = query(&mut rng);
            // Time runs fast enough for holds and drains to end while others use them.
            let now = seconds(step / 10);
            match rng.random_range(0..10) {
                0..=2 => drop(shared.reserve(&pod(&uid), node, &query, now)),
                3 => drop(shared.forget(&PodUid::new(uid))),
                4..=5 => drop(shared.hold(&PodUid::new(uid), node, &query, now)),
                6 if step % 40 > 20 => drop(shared.end_pod(&PodUid::new(uid), now)),
                6 => drop(shared.drop_hold(&PodUid::new(uid))),
                7 => drop(shared.tick(now)),
                8 => {
                    let report = agent_report(&shared, node, thread, step);
                    drop(shared.report(node, &report, now));
                }
                _ => {
                    shared.answers(&query, &NODES);
                    check_capacity(&shared);
                }
            }
        }
    });
    assert_eq!(ledger.audit(), Ok(()));
    check_capacity(&ledger);
    check_holds(&ledger);
    allocated_pods(&ledger);
    for step in 0..=STEPS / 40 + 4 {
        ledger.end_pod(&PodUid::new(format!("pod-{step}")), seconds(10_000));
    }
    ledger.tick(seconds(20_000));
    assert_eq!(allocated_pods(&ledger), BTreeMap::new(), "every pod has ended and was found");
    assert_eq!(ledger.hold_count(), 0);
    for node in ledger.nodes() {
        assert!(node.devices().iter().all(|device| device.allocated() == Demand::ZERO));
    }
}

#[derive(Default)]
struct Facts {
    bound: BTreeSet<PodUid>,
    ended: BTreeSet<PodUid>,
}

/// One thread's step among facts about pods: what the API server says must win.
fn step_of_facts(ledger: &Ledger, facts: &Mutex<Facts>, rng: &mut ChaCha8Rng, step: u64) {
    let node = NODES[rng.random_range(0..NODES.len())];
    let uid = uid(rng, step);
    let query = query(rng);
    let now = seconds(step / 10);
    match rng.random_range(0..10) {
        0..=3 => {
            if let Ok(placement) = ledger.reserve(&pod(&uid), node, &query, now) {
                ledger.see_pod(&bound(&uid, &placement), now);
                facts.lock().expect("no thread panics").bound.insert(PodUid::new(uid));
            }
        }
        4..=5 => drop(ledger.forget(&PodUid::new(uid))),
        6 => drop(ledger.hold(&PodUid::new(uid), node, &query, now)),
        7 if step % 40 > 20 => {
            ledger.end_pod(&PodUid::new(uid.clone()), now);
            facts.lock().expect("no thread panics").ended.insert(PodUid::new(uid));
        }
        7 => drop(ledger.tick(now)),
        8 if node == "c" => {
            ledger.lose_node(&NodeName::new(node));
            ledger.see_node(&NodeName::new(node), host(), PoolName::new(""));
        }
        _ => drop(ledger.answers(&query, &NODES)),
    }
}

#[test]
fn bound_pods_stay_allocated_and_ended_pods_do_not_in_any_interleaving() {
    let ledger = ledger();
    let facts = Arc::new(Mutex::new(Facts::default()));
    let (shared, seen_facts) = (Arc::clone(&ledger), Arc::clone(&facts));
    on_threads(move |thread| {
        let mut rng = ChaCha8Rng::seed_from_u64(100 + thread);
        for step in 1..=STEPS {
            step_of_facts(&shared, &seen_facts, &mut rng, step);
        }
    });
    assert_eq!(ledger.audit(), Ok(()));
    ledger.tick(seconds(20_000));
    let allocated: BTreeSet<PodUid> = allocated_pods(&ledger).into_keys().collect();
    let facts = facts.lock().unwrap();
    let lost: Vec<_> =
        facts.bound.difference(&facts.ended).filter(|uid| !allocated.contains(*uid)).collect();
    assert!(lost.is_empty(), "bound pods that are not allocated: {lost:?}");
    let risen: Vec<_> = facts.ended.intersection(&allocated).collect();
    assert!(risen.is_empty(), "ended pods that are allocated: {risen:?}");
    check_holds(&ledger);
}
