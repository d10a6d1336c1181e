use std::cell::Cell;
use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::server::http::limits::LOOKS;

thread_local! {
    /// How often this thread read the phase of a connection.
    static LOOKED: Cell<usize> = const { Cell::new(0) };
}

pub(crate) fn count_look() {
    LOOKED.set(LOOKED.get() + 1);
}

/// How often it did since the last call.
fn looks() -> usize {
    LOOKED.replace(0)
}

fn clients(connections: usize, bytes: usize) -> Arc<Clients> {
    Clients::new(Limits::new(connections, bytes))
}

fn address(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

fn open(clients: &Arc<Clients>, from: u8) -> Place {
    clients.admit(address(from), Phase::Idle).expect("a place")
}

fn is_closed(clients: &Clients, place: &Place) -> bool {
    !clients.table().has(place.0.address, place.0.id)
}

/// Makes a connection wait for its client since `since_ms`. The clock has hardly run, so the tests
/// move "now" instead: later connections are later.
fn waits(place: &Place, phase: Phase, since_ms: u64) {
    *place.0.phase.lock() = (phase, Timestamp::from_millis(since_ms));
}

#[test]
fn a_new_connection_replaces_the_longest_idle_of_the_top_address() {
    let clients = clients(4, 1_000);
    let scheduler = open(&clients, 1);
    let crowd: Vec<Place> = (0..3).map(|_| open(&clients, 9)).collect();
    waits(&scheduler, Phase::Idle, 0);
    for (at, place) in crowd.iter().enumerate() {
        waits(place, Phase::Idle, [30, 10, 20][at]);
    }
    let newcomer = open(&clients, 2);
    assert!(is_closed(&clients, &crowd[1]), "it was idle for longest");
    let again = open(&clients, 9);
    assert!(is_closed(&clients, &crowd[2]), "the crowd yields to its own address");
    assert!(!is_closed(&clients, &scheduler) && !is_closed(&clients, &newcomer));
    drop((scheduler, newcomer, again, crowd));
    clients.table().audit();
    assert_eq!(clients.held(), (0, 0));
}

#[test]
fn busy_connections_yield_only_to_another_address() {
    let clients = clients(3, 1_000);
    let crowd: Vec<Place> = (0..3).map(|_| open(&clients, 9)).collect();
    crowd.iter().for_each(|place| waits(place, Phase::Work, 0));
    assert!(clients.admit(address(9), Phase::Idle).is_none());
    let other = open(&clients, 1);
    assert!(is_closed(&clients, &crowd[0]) && !is_closed(&clients, &crowd[1]));
    waits(&other, Phase::Work, 0);
    let even = open(&clients, 2);
    waits(&even, Phase::Work, 0);
    assert!(clients.admit(address(3), Phase::Idle).is_none(), "no address has more than one");
}

#[test]
fn a_thousand_addresses_are_distinct_and_two_spellings_are_one() {
    let clients = clients(2, 1_000);
    let mapped: IpAddr = "::ffff:10.0.0.9".parse().unwrap();
    let crowd = [open(&clients, 9), clients.admit(mapped, Phase::Idle).unwrap()];
    let other = open(&clients, 1);
    assert!(is_closed(&clients, &crowd[0]), "both are one address, which has the most");
    assert!(!is_closed(&clients, &other));
}

#[test]
fn bytes_are_reclaimed_from_the_address_that_holds_most() {
    let clients = clients(10, 1_000);
    let greedy: Vec<Place> = (0..3).map(|_| open(&clients, 9)).collect();
    for (at, place) in greedy.iter().enumerate() {
        assert!(place.0.hold(300));
        waits(place, Phase::Body, [20, 10, 30][at]);
    }
    let scheduler = open(&clients, 1);
    assert!(scheduler.0.hold(400));
    assert!(is_closed(&clients, &greedy[1]), "it has waited for longest");
    assert!(!scheduler.0.hold(400), "no other address holds more than it would");
    assert!(!is_closed(&clients, &greedy[0]) && !is_closed(&clients, &greedy[2]));
    greedy[1].0.release(300);
    assert_eq!(clients.table().bytes, 1_000, "what was closed is counted once");
    scheduler.0.release(400);
    assert_eq!(clients.table().bytes, 600);
}

#[test]
fn only_small_requests_take_bytes_from_large_ones_of_their_address() {
    let clients = clients(10, 1_000);
    let large = [open(&clients, 9), open(&clients, 9)];
    assert!(large[0].0.hold(480) && large[1].0.hold(500));
    assert!(!large[0].0.hold(40), "the other is about as large");
    let small = open(&clients, 9);
    assert!(small.0.hold(100));
    assert!(is_closed(&clients, &large[1]), "it held most");
}

#[test]
fn a_stalled_connection_yields_to_its_own_address() {
    let clients = clients(10, 1_000);
    let old = open(&clients, 9);
    assert!(old.0.hold(1_000));
    waits(&old, Phase::Answer, 0);
    let new = open(&clients, 9);
    let later = Timestamp::START.plus(STALLED_FOR);
    let early = Timestamp::START.plus(STALLED_FOR / 2);
    let mut table = clients.table();
    assert_eq!(table.frees_bytes_for(&new.0, 900, early), None);
    assert_eq!(table.frees_bytes_for(&new.0, 900, later), Some((address(9), old.0.id)));
    drop(table);
}

#[test]
fn the_largest_answer_is_sent_and_counts_three_quarters() {
    let clients = clients(10, 1_000);
    let place = open(&clients, 1);
    assert!(place.0.hold(100));
    assert_eq!(place.0.hold_answer(1 << 40), Some(750));
    place.0.release(750);
    assert_eq!(place.0.hold_answer(7), Some(7));
}

#[test]
fn each_phase_has_a_time_limit_and_work_has_none() {
    let clients = clients(10, 1_000);
    let limits = clients.limits;
    for (phase, limit) in [
        (Phase::Idle, limits.idle),
        (Phase::Handshake, limits.handshake),
        (Phase::Head, limits.head),
        (Phase::Body, limits.body),
        (Phase::Answer, limits.answer),
    ] {
        let place = open(&clients, 1);
        waits(&place, phase, 0);
        clients.close_overdue_at(Timestamp::START.plus(limit));
        assert!(!is_closed(&clients, &place), "{phase:?}");
        clients.close_overdue_at(Timestamp::START.plus(limit + Duration::from_millis(1)));
        assert!(is_closed(&clients, &place), "{phase:?}");
    }
    let place = open(&clients, 1);
    waits(&place, Phase::Work, 0);
    clients.close_overdue_at(Timestamp::START.plus(Duration::from_secs(1 << 30)));
    assert!(!is_closed(&clients, &place), "a bind may take its time");
}

#[tokio::test]
async fn a_closed_connection_is_notified_even_if_it_listens_later() {
    let clients = clients(1, 1_000);
    let old = open(&clients, 1);
    let _new = open(&clients, 1);
    old.0.closing().await;
}

/// Milliseconds: more than all real time of these tests. The times that they set are later.
const LATER: u64 = 1 << 40;

#[test]
fn a_choice_checks_few_connections_of_one_address() {
    for phase in [Phase::Idle, Phase::Head, Phase::Work] {
        let clients = clients(4_096, 1_000);
        let crowd: Vec<Place> = (0..4_096).map(|_| open(&clients, 9)).collect();
        // Each was active since it came, some more often than others.
        for (at, place) in (LATER..).zip(&crowd) {
            waits(place, phase, at % 97 + at / 2);
        }
        let (mut own, mut others) = (Vec::new(), Vec::new());
        looks();
        for at in 0..200 {
            let now = Timestamp::from_millis(LATER + 10_000 + at);
            own.extend(clients.admit_at(address(9), Phase::Idle, now));
            assert!(looks() <= LOOKS, "{phase:?}");
            let other = address(u8::try_from(at).unwrap() + 20);
            others.push(clients.admit_at(other, Phase::Idle, now).expect("at once"));
            assert!(looks() <= LOOKS, "{phase:?}");
        }
        assert!(others.iter().all(|place| !is_closed(&clients, place)), "{phase:?}");
        assert_eq!(own.is_empty(), phase == Phase::Work);
        clients.table().audit();
    }
}

#[test]
fn active_connections_stay_when_their_address_floods_the_server() {
    let clients = clients(1_000, 1_000);
    let agents: Vec<Place> = (0..500).map(|_| open(&clients, 9)).collect();
    let mut flood: Vec<Place> = (0..500).map(|_| open(&clients, 9)).collect();
    for second in 0..5 {
        let now = LATER + 1_000 * second;
        agents.iter().zip(0..).for_each(|(agent, at)| waits(agent, Phase::Idle, now + at));
        clients.close_overdue_at(Timestamp::from_millis(now)); // as the service does twice a second
        for at in 500..900 {
            let now = Timestamp::from_millis(now + at);
            flood.push(clients.admit_at(address(9), Phase::Idle, now).unwrap());
        }
    }
    assert!(agents.iter().all(|place| !is_closed(&clients, place)));
    assert_eq!(flood.iter().filter(|place| !is_closed(&clients, place)).count(), 500);
}

#[test]
fn a_choice_checks_few_byte_holders_and_each_gets_checked() {
    let clients = clients(2_000, 1_000_000);
    let crowd: Vec<Place> = (0..1_000).map(|_| open(&clients, 9)).collect();
    crowd.iter().for_each(|place| assert!(place.0.hold(1_000)));
    let now = Timestamp::from_millis(LATER);
    // All are at work but one, which has stalled: others of its address get its bytes.
    crowd.iter().for_each(|place| waits(place, Phase::Work, LATER));
    waits(&crowd[700], Phase::Body, 0);
    let new = open(&clients, 9);
    looks();
    let mut tries = 0;
    let found = loop {
        tries += 1;
        let found = clients.table().frees_bytes_for(&new.0, 1_000, now);
        assert!(looks() <= LOOKS);
        if found.is_some() || tries > 1_000 {
            break found;
        }
    };
    assert_eq!(found, Some((address(9), crowd[700].0.id)));
    assert!(tries <= 1_000 / LOOKS + 1, "{tries}");
    // Another address gets as many bytes as it needs, immediately.
    let other = open(&clients, 1);
    looks();
    assert!(other.0.hold(100_000));
    let closed = crowd.iter().filter(|place| is_closed(&clients, place)).count();
    assert_eq!(closed, 100);
    assert!(looks() <= LOOKS * closed);
    clients.table().audit();
}

/// The longest waiting connection of the addresses with the most connections, by a full search.
fn longest_of_all(clients: &Clients) -> Option<Timestamp> {
    let table = clients.table();
    let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
    table.all().iter().for_each(|(from, ..)| *counts.entry(*from).or_default() += 1);
    let most = counts.values().max()?;
    let waiting = table
        .phases()
        .filter(|(from, _, (phase, _))| counts[from] == *most && *phase != Phase::Work);
    waiting.map(|(_, _, (_, since))| since).min()
}

#[test]
fn the_cached_order_always_equals_a_full_sort() {
    let mut chance = ChaCha8Rng::seed_from_u64(11);
    for _ in 0..50 {
        let clients = clients(8, 1_000);
        let mut places: Vec<Place> = Vec::new();
        for now in (LATER..).take(200) {
            let at = chance.random_range(0..places.len().max(1));
            let now = Timestamp::from_millis(now);
            match (chance.random_range(0..5), places.get(at)) {
                (0, Some(place)) => {
                    let work = chance.random_bool(0.4);
                    let phase = if work { Phase::Work } else { Phase::Idle };
                    *place.0.phase.lock() = (phase, now);
                }
                (1, Some(place)) => _ = place.0.hold(chance.random_range(0..400)),
                (2, Some(place)) => {
                    let id = place.0.id;
                    let held = clients.table().all().into_iter().find(|(_, it, _)| *it == id);
                    place.0.release(held.map_or(0, |(.., bytes)| bytes));
                }
                (3, Some(_)) => drop(places.swap_remove(at)),
                _ => {
                    let from = address(chance.random_range(0..3));
                    let expected = longest_of_all(&clients);
                    let chosen = clients.table().gives_way_to(from, now);
                    let since = chosen.and_then(|(_, id)| {
                        let table = clients.table();
                        let chosen = table.phases().find(|(_, it, _)| *it == id);
                        chosen.map(|(.., (phase, since))| (phase, since))
                    });
                    let waits = since.filter(|(phase, _)| *phase != Phase::Work);
                    assert_eq!(waits.map(|(_, since)| since), expected);
                    places.extend(clients.admit_at(from, Phase::Idle, now));
                }
            }
            clients.table().audit();
        }
    }
}
