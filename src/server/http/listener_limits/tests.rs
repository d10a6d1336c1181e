use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

fn clients(connections: usize, bytes: usize) -> Arc<Clients> {
    Clients::new(ListenerLimits::new(connections, bytes))
}

fn address(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

fn open(clients: &Arc<Clients>, from: u8) -> Arc<Connection> {
    clients.admit(address(from)).expect("a place")
}

fn is_closed(connection: &Connection) -> bool {
    let table = connection.clients.table.lock();
    let peer = table.peers.get(&connection.address);
    !peer.is_some_and(|peer| peer.connections.contains_key(&connection.number()))
}

impl ConnectionTable {
    /// Compares each sum with what it is made of.
    fn audit(&self) {
        let bytes = |peer: &Peer| peer.connections.values().map(|entry| entry.bytes).sum::<usize>();
        assert!(self.peers.values().all(|peer| peer.bytes == bytes(peer)));
        assert!(self.peers.values().all(|peer| !peer.connections.is_empty()));
        assert_eq!(self.bytes, self.peers.values().map(bytes).sum::<usize>());
        let connections = self.peers.values().map(|peer| peer.connections.len());
        assert_eq!(self.connections, connections.sum::<usize>());
    }
}

#[test]
fn a_new_connection_replaces_the_longest_idle_of_the_top_address() {
    let clients = clients(4, 1_000);
    let scheduler = open(&clients, 1);
    let crowd: Vec<_> = (0..3).map(|_| open(&clients, 9)).collect();
    for at in [1, 2, 0] {
        crowd[at].set_at_work(false);
    }
    let newcomer = open(&clients, 2);
    assert!(is_closed(&crowd[1]), "it was idle for longest");
    let again = open(&clients, 9);
    assert!(is_closed(&crowd[2]), "the crowd yields to its own address");
    assert!(!is_closed(&scheduler) && !is_closed(&newcomer));
    drop((scheduler, newcomer, again, crowd));
    assert_eq!(clients.held(), (0, 0));
}

#[test]
fn busy_connections_yield_only_to_another_address() {
    let clients = clients(3, 1_000);
    let crowd: Vec<_> = (0..3).map(|_| open(&clients, 9)).collect();
    crowd.iter().for_each(|connection| connection.set_at_work(true));
    assert!(clients.admit(address(9)).is_none());
    let other = open(&clients, 1);
    assert!(is_closed(&crowd[0]) && !is_closed(&crowd[1]));
    other.set_at_work(true);
    let even = open(&clients, 2);
    even.set_at_work(true);
    assert!(clients.admit(address(3)).is_none(), "no address has more than one");
}

#[test]
fn a_thousand_addresses_are_distinct_and_two_spellings_are_one() {
    let clients = clients(2, 1_000);
    let mapped: IpAddr = "::ffff:10.0.0.9".parse().unwrap();
    let crowd = [open(&clients, 9), clients.admit(mapped).unwrap()];
    let other = open(&clients, 1);
    assert!(is_closed(&crowd[0]), "both are one address, which has the most");
    assert!(!is_closed(&other));
}

#[test]
fn a_client_with_a_proof_does_not_give_way_to_those_without() {
    let (clients, arriving) = (clients(2, 1_000), clients(2, 1_000));
    let scheduler = open(&arriving, 9);
    let peer = PeerProof {
        chain: Arc::default(),
        names: Arc::default(),
        tls: Arc::default(),
        at: Timestamp::START,
        clock: Clock::start(),
    };
    scheduler.peer.set(peer).unwrap();
    let scheduler = clients.admit_proven(scheduler).unwrap();
    assert_eq!((arriving.held(), clients.held()), ((0, 0), (1, 0)));
    assert!(scheduler.peer.get().is_some());
    let crowd: Vec<_> = (0..10).map(|_| open(&arriving, 9)).collect();
    assert!(!is_closed(&scheduler) && is_closed(&crowd[7]) && !is_closed(&crowd[8]));
    let scheduler = clients.admit_proven(scheduler).unwrap();
    assert_eq!(clients.held(), (1, 0), "it was admitted before");
    drop(scheduler);
}

#[test]
fn bytes_are_reclaimed_from_the_address_that_holds_most() {
    let clients = clients(10, 1_000);
    let greedy: Vec<_> = (0..3).map(|_| open(&clients, 9)).collect();
    for at in [1, 0, 2] {
        assert!(greedy[at].hold(300));
        greedy[at].set_at_work(false);
    }
    let scheduler = open(&clients, 1);
    assert!(scheduler.hold(400));
    assert!(is_closed(&greedy[1]), "it has waited for longest");
    assert!(!scheduler.hold(400), "no other address holds more than it would");
    assert!(!is_closed(&greedy[0]) && !is_closed(&greedy[2]));
    greedy[1].hold_only(0);
    assert_eq!(clients.held().1, 1_000, "what was closed is counted once");
    scheduler.hold_only(0);
    assert_eq!(clients.held().1, 600);
}

#[test]
fn a_very_slow_connection_yields_to_one_that_asks_for_more() {
    let clients = clients(10, 1_000);
    let slow = open(&clients, 9);
    assert!(slow.hold(500));
    slow.set_at_work(false);
    let new = open(&clients, 1);
    let table = clients.table.lock();
    let yields = |after| table.frees_bytes_for(&new, 600, clients.clock.now().plus(after));
    assert_eq!(yields(SLOW_FOR / 2), None);
    assert_eq!(yields(SLOW_FOR), Some((address(9), slow.number())));
}

#[test]
fn only_small_requests_take_bytes_from_large_ones_of_their_address() {
    let clients = clients(10, 1_000);
    let large = [open(&clients, 9), open(&clients, 9)];
    assert!(large[0].hold(480) && large[1].hold(500));
    assert!(!large[0].hold(40), "the other is about as large");
    let small = open(&clients, 9);
    assert!(small.hold(100));
    assert!(is_closed(&large[1]), "it held most");
}

#[test]
fn a_stalled_connection_yields_to_its_own_address() {
    let clients = clients(10, 1_000);
    let old = open(&clients, 9);
    assert!(old.hold(1_000));
    let new = open(&clients, 9);
    let table = clients.table.lock();
    let yields = |after| table.frees_bytes_for(&new, 900, clients.clock.now().plus(after));
    assert_eq!(yields(STALLED_FOR / 2), None);
    assert_eq!(yields(STALLED_FOR), Some((address(9), old.number())));
}

#[test]
fn the_largest_answer_is_sent_and_counts_three_quarters() {
    let clients = clients(10, 1_000);
    let connection = open(&clients, 1);
    assert!(connection.hold(100));
    assert!(connection.hold_answer(1 << 40));
    assert_eq!(clients.held().1, 850);
    assert!(!connection.hold_answer(1 << 40) && connection.hold_answer(7));
}

#[tokio::test]
async fn a_closed_connection_is_notified_even_if_it_listens_later() {
    let clients = clients(1, 1_000);
    let old = open(&clients, 1);
    let _new = open(&clients, 1);
    assert_eq!(old.unless_closed(std::future::pending::<()>()).await, None);
}

#[test]
fn active_connections_stay_when_their_address_floods_the_server() {
    let clients = clients(1_000, 1_000);
    let agents: Vec<_> = (0..500).map(|_| open(&clients, 9)).collect();
    let mut flood: Vec<_> = (0..500).map(|_| open(&clients, 9)).collect();
    for _ in 0..5 {
        agents.iter().for_each(|agent| agent.set_at_work(false));
        flood.extend((0..400).map(|_| open(&clients, 9)));
    }
    assert!(agents.iter().all(|agent| !is_closed(agent)));
    assert_eq!(flood.iter().filter(|connection| !is_closed(connection)).count(), 500);
}

#[test]
fn sums_are_right_whatever_happens() {
    let mut chance = ChaCha8Rng::seed_from_u64(11);
    for _ in 0..50 {
        let clients = clients(8, 1_000);
        let mut connections: Vec<Arc<Connection>> = Vec::new();
        for _ in 0..200 {
            let at = chance.random_range(0..connections.len().max(1));
            match (chance.random_range(0..5), connections.get(at)) {
                (0, Some(connection)) => connection.set_at_work(chance.random_bool(0.4)),
                (1, Some(connection)) => _ = connection.hold(chance.random_range(0..400)),
                (2, Some(connection)) => connection.hold_only(0),
                (3, Some(_)) => drop(connections.swap_remove(at)),
                _ => connections.extend(clients.admit(address(chance.random_range(0..3)))),
            }
            clients.table.lock().audit();
            let (count, bytes) = clients.held();
            assert!(count <= 8 && bytes <= 1_000);
        }
    }
}
