use super::*;

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
    let table = clients.table();
    let peer = table.peers.get(&place.0.address);
    peer.is_none_or(|peer| !peer.connections.contains_key(&place.0.id))
}

/// Lets a connection wait for its client since so long ago. The clock has run for no time worth naming, so
/// "now" is what is moved: later connections are later.
fn waits(place: &Place, phase: Phase, since_ms: u64) {
    *place.0.phase.lock().unwrap() = (phase, Timestamp::from_millis(since_ms));
}

#[test]
fn a_new_connection_takes_the_place_of_the_longest_idle_of_the_address_with_the_most() {
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
    assert!(is_closed(&clients, &crowd[2]), "the crowd makes way for its own");
    assert!(!is_closed(&clients, &scheduler) && !is_closed(&clients, &newcomer));
    drop((scheduler, newcomer, again, crowd));
    let table = clients.table();
    assert_eq!((table.connections, table.bytes, table.peers.len()), (0, 0, 0));
}

#[test]
fn a_crowd_at_work_makes_way_for_another_address_alone() {
    let clients = clients(3, 1_000);
    let crowd: Vec<Place> = (0..3).map(|_| open(&clients, 9)).collect();
    crowd.iter().for_each(|place| waits(place, Phase::Work, 0));
    assert!(clients.admit(address(9), Phase::Idle).is_none());
    let other = open(&clients, 1);
    assert!(is_closed(&clients, &crowd[0]) && !is_closed(&clients, &crowd[1]));
    waits(&other, Phase::Work, 0);
    let even = open(&clients, 2);
    waits(&even, Phase::Work, 0);
    assert!(clients.admit(address(3), Phase::Idle).is_none(), "nobody has more than one");
}

#[test]
fn a_thousand_addresses_are_told_apart_and_one_written_in_two_ways_is_not() {
    let clients = clients(2, 1_000);
    let mapped: IpAddr = "::ffff:10.0.0.9".parse().unwrap();
    let crowd = [open(&clients, 9), clients.admit(mapped, Phase::Idle).unwrap()];
    let other = open(&clients, 1);
    assert!(is_closed(&clients, &crowd[0]), "both are one address, which has the most");
    assert!(!is_closed(&clients, &other));
}

#[test]
fn bytes_are_taken_from_the_address_that_holds_most() {
    let clients = clients(10, 1_000);
    let greedy: Vec<Place> = (0..3).map(|_| open(&clients, 9)).collect();
    for (at, place) in greedy.iter().enumerate() {
        assert!(place.0.hold(300));
        waits(place, Phase::Body, [20, 10, 30][at]);
    }
    let scheduler = open(&clients, 1);
    assert!(scheduler.0.hold(400));
    assert!(is_closed(&clients, &greedy[1]), "it has waited for longest");
    assert!(!scheduler.0.hold(400), "nobody else holds more than it would");
    assert!(!is_closed(&clients, &greedy[0]) && !is_closed(&clients, &greedy[2]));
    greedy[1].0.release(300);
    assert_eq!(clients.table().bytes, 1_000, "what was closed is counted once");
    scheduler.0.release(400);
    assert_eq!(clients.table().bytes, 600);
}

#[test]
fn a_small_request_takes_from_a_large_one_of_its_own_address_and_a_large_one_does_not() {
    let clients = clients(10, 1_000);
    let large = [open(&clients, 9), open(&clients, 9)];
    assert!(large[0].0.hold(480) && large[1].0.hold(500));
    assert!(!large[0].0.hold(40), "the other is about as large");
    let small = open(&clients, 9);
    assert!(small.0.hold(100));
    assert!(is_closed(&clients, &large[1]), "it held most");
}

#[test]
fn what_has_stalled_makes_way_for_its_own_address() {
    let clients = clients(10, 1_000);
    let old = open(&clients, 9);
    assert!(old.0.hold(1_000));
    waits(&old, Phase::Answer, 0);
    let new = open(&clients, 9);
    let later = Timestamp::START.plus(STALLED_FOR);
    let early = Timestamp::START.plus(STALLED_FOR / 2);
    let table = clients.table();
    assert_eq!(table.frees_bytes_for(&new.0, 900, early), None);
    assert_eq!(table.frees_bytes_for(&new.0, 900, later), Some((address(9), old.0.id)));
    drop(table);
}

#[test]
fn the_largest_answer_can_be_given_and_counts_for_three_quarters() {
    let clients = clients(10, 1_000);
    let place = open(&clients, 1);
    assert!(place.0.hold(100));
    assert_eq!(place.0.hold_answer(1 << 40), Some(750));
    place.0.release(750);
    assert_eq!(place.0.hold_answer(7), Some(7));
}

#[test]
fn each_phase_has_its_time_and_work_has_none() {
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
async fn what_is_closed_hears_of_it_even_if_it_listens_later() {
    let clients = clients(1, 1_000);
    let old = open(&clients, 1);
    let _new = open(&clients, 1);
    old.0.closing().await;
}
