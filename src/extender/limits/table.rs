//! The connections of a listener by the address that they come from, and which of them makes way.
//!
//! Whoever fills the table lets each further connection and each further piece of a body ask for a choice,
//! so a choice looks at a few connections only, however many there are. For that the addresses stand in the
//! order of what they hold, and the connections of each in the order in which they have waited: as far as
//! was looked, since what a connection does changes far more often than one has to make way.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use super::{Connection, Phase, STALLED_FOR};
use crate::packing::units::Timestamp;

/// Most connections that are looked at for one choice.
pub(super) const LOOKS: usize = 16;

/// The smallest step of time.
const TICK: Duration = Duration::from_millis(1);

/// How many connections an address has, and since when one of them waits at the earliest.
type Many = (usize, Reverse<Timestamp>);

#[derive(Default)]
pub(super) struct Table {
    /// Number of the newest connection.
    newest: u64,
    pub(super) connections: usize,
    pub(super) bytes: usize,
    peers: BTreeMap<IpAddr, Peer>,
    /// The addresses; last the one with the most connections, and of several the one that waits longest.
    by_connections: BTreeSet<(Many, IpAddr)>,
    /// The addresses that hold bytes, the one that holds most last.
    by_bytes: BTreeSet<(usize, IpAddr)>,
}

/// The connections from one address.
#[derive(Default)]
struct Peer {
    bytes: usize,
    connections: BTreeMap<u64, Entry>,
    /// All of them by [`Entry::waits`].
    waiting: BTreeSet<(Timestamp, u64)>,
    /// Those that hold bytes, the one that holds most last.
    holding: BTreeSet<(usize, u64)>,
    /// The last of those that was looked at; the next look goes on behind it, so that all get their turn.
    looked_at: (usize, u64),
}

struct Entry {
    bytes: usize,
    /// It has waited for its client since then or later.
    waits: Timestamp,
    connection: Arc<Connection>,
}

impl Table {
    /// The number of another connection.
    pub(super) fn next(&mut self) -> u64 {
        self.newest += 1;
        self.newest
    }

    pub(super) fn add(&mut self, connection: &Arc<Connection>, now: Timestamp) {
        let id = connection.id;
        let entry = Entry { bytes: 0, waits: now, connection: Arc::clone(connection) };
        self.change(connection.address, |peer| {
            peer.waiting.insert((now, id));
            peer.connections.insert(id, entry);
        });
    }

    /// Closes a connection. What it holds counts no more: it is dropped as soon as its task has heard.
    pub(super) fn close(&mut self, from: IpAddr, id: u64) {
        if let Some(connection) = self.remove(from, id) {
            connection.closing.notify_one();
        }
    }

    pub(super) fn remove(&mut self, from: IpAddr, id: u64) -> Option<Arc<Connection>> {
        self.change(from, |peer| {
            let entry = peer.connections.remove(&id)?;
            peer.waiting.remove(&(entry.waits, id));
            peer.holding.remove(&(entry.bytes, id));
            peer.bytes -= entry.bytes;
            Some(entry.connection)
        })
    }

    /// Changes how many bytes a connection holds. Whether it is still there.
    pub(super) fn count(
        &mut self,
        connection: &Connection,
        held: impl FnOnce(usize) -> usize,
    ) -> bool {
        let id = connection.id;
        self.change(connection.address, |peer| {
            let Some(entry) = peer.connections.get_mut(&id) else { return false };
            let before = entry.bytes;
            entry.bytes = held(before);
            peer.bytes = peer.bytes - before + entry.bytes;
            peer.holding.remove(&(before, id));
            if entry.bytes > 0 {
                peer.holding.insert((entry.bytes, id));
            }
            true
        })
    }

    /// What each connection does, and since when.
    pub(super) fn phases(&self) -> impl Iterator<Item = (IpAddr, u64, (Phase, Timestamp))> {
        self.peers.iter().flat_map(|(from, peer)| {
            peer.connections.iter().map(|(id, entry)| (*from, *id, entry.connection.phase()))
        })
    }

    /// Brings the order of all connections up to date.
    pub(super) fn look_at_all(&mut self, now: Timestamp) {
        let of_peer = |(from, peer): (&IpAddr, &Peer)| {
            let from = *from;
            peer.connections.keys().map(move |id| (from, *id)).collect::<Vec<_>>()
        };
        let all: Vec<_> = self.peers.iter().flat_map(of_peer).collect();
        for (from, id) in all {
            self.change(from, |peer| peer.look(id, now));
        }
    }

    /// The connection that makes way for a new one from `address`: of the addresses with the most connections
    /// the one that has waited longest for its client. One at work goes only for another address, and
    /// where none that waits is found soon.
    pub(super) fn gives_way_to(
        &mut self,
        address: IpAddr,
        now: Timestamp,
    ) -> Option<(IpAddr, u64)> {
        let own = self.peers.get(&address).map_or(0, |peer| peer.connections.len());
        let (mut longest, mut at_work) = (None, None);
        for _ in 0..LOOKS {
            let ((most, _), from) = *self.by_connections.last()?;
            let (waits, id) = *self.peers.get(&from)?.waiting.first()?;
            match self.change(from, |peer| peer.look(id, now)) {
                Some(since) if since <= waits => return Some((from, id)),
                Some(since) => longest = longest.into_iter().chain([(since, from, id)]).min(),
                None if most > own + 1 => at_work = at_work.or(Some((from, id))),
                None => {}
            }
        }
        longest.map(|(_, from, id)| (from, id)).or(at_work)
    }

    /// The connection that makes way for `bytes` more of `asker`: of the address that holds most, or where that
    /// is no other one, one of its own that has waited long or holds far more. None where none was found.
    pub(super) fn frees_bytes_for(
        &mut self,
        asker: &Connection,
        bytes: usize,
        now: Timestamp,
    ) -> Option<(IpAddr, u64)> {
        let own = self.peers.get(&asker.address)?;
        let asks = own.connections.get(&asker.id)?.bytes + bytes;
        let (most, heaviest) = *self.by_bytes.last()?;
        let (from, waited, beyond) = if most > own.bytes + bytes {
            (heaviest, Duration::ZERO, 0)
        } else {
            (asker.address, STALLED_FOR, 2 * asks)
        };
        let id = self.change(from, |peer| {
            let longest = peer.longest_holding(asker.id, now);
            let stalled = longest.filter(|(since, _)| now.since(*since) >= waited);
            let largest = peer.holding.last().filter(|(held, _)| *held > beyond);
            stalled.map(|(_, id)| id).or(largest.map(|(_, id)| *id))
        });
        id.map(|id| (from, id))
    }

    /// Changes what is noted of an address, and keeps its place among the others.
    fn change<T>(&mut self, address: IpAddr, change: impl FnOnce(&mut Peer) -> T) -> T {
        let peer = self.peers.entry(address).or_default();
        let (many_before, bytes_before) = (peer.many(), peer.bytes);
        let changed = change(peer);
        let (many, bytes) = (peer.many(), peer.bytes);
        if peer.connections.is_empty() {
            self.peers.remove(&address);
        }
        if many != many_before {
            self.by_connections.remove(&(many_before, address));
            self.connections = self.connections - many_before.0 + many.0;
            if many.0 > 0 {
                self.by_connections.insert((many, address));
            }
        }
        if bytes != bytes_before {
            self.by_bytes.remove(&(bytes_before, address));
            self.bytes = self.bytes - bytes_before + bytes;
            if bytes > 0 {
                self.by_bytes.insert((bytes, address));
            }
        }
        changed
    }
}

impl Peer {
    fn many(&self) -> Many {
        let waits = self.waiting.first().map_or(Timestamp::START, |(waits, _)| *waits);
        (self.connections.len(), Reverse(waits))
    }

    /// Sees since when a connection waits for its client, and notes it; none while it is at work.
    fn look(&mut self, id: u64, now: Timestamp) -> Option<Timestamp> {
        let entry = self.connections.get_mut(&id)?;
        let (phase, since) = entry.connection.phase();
        let waits = (phase != Phase::Work).then_some(since);
        // What is at work begins to wait later than whatever waits now.
        let noted = std::mem::replace(&mut entry.waits, waits.unwrap_or(now.plus(TICK)));
        if noted != entry.waits {
            self.waiting.remove(&(noted, id));
            self.waiting.insert((entry.waits, id));
        }
        waits
    }

    /// Looks at some of the connections that hold bytes. The one other than `asker` that has waited longest, and
    /// since when.
    fn longest_holding(&mut self, asker: u64, now: Timestamp) -> Option<(Timestamp, u64)> {
        let behind = (Bound::Excluded(self.looked_at), Bound::Unbounded);
        let all = self.holding.range(behind).chain(self.holding.range(..=self.looked_at));
        let some: Vec<(usize, u64)> = all.take(LOOKS).copied().collect();
        self.looked_at = *some.last()?;
        let others = some.into_iter().map(|(_, id)| id).filter(|id| *id != asker);
        others.filter_map(|id| self.look(id, now).map(|since| (since, id))).min()
    }
}

#[cfg(test)]
impl Table {
    pub(super) fn has(&self, from: IpAddr, id: u64) -> bool {
        self.peers.get(&from).is_some_and(|peer| peer.connections.contains_key(&id))
    }

    /// Each connection, and how many bytes it holds.
    pub(super) fn all(&self) -> Vec<(IpAddr, u64, usize)> {
        let of_peer = |(from, peer): (&IpAddr, &Peer)| {
            let from = *from;
            peer.connections.iter().map(move |(id, entry)| (from, *id, entry.bytes)).collect()
        };
        self.peers.iter().flat_map::<Vec<_>, _>(of_peer).collect()
    }

    /// Compares everything that is derived with what it is derived from.
    pub(super) fn audit(&self) {
        let (mut connections, mut bytes) = (0, 0);
        let (mut by_connections, mut by_bytes) = (BTreeSet::new(), BTreeSet::new());
        for (from, peer) in &self.peers {
            let entries = || peer.connections.iter();
            assert!(entries().all(|(_, entry)| {
                let (phase, since) = entry.connection.phase();
                phase == Phase::Work || entry.waits <= since
            }));
            assert_eq!(peer.waiting, entries().map(|(id, it)| (it.waits, *id)).collect());
            let holding = entries().filter(|(_, it)| it.bytes > 0).map(|(id, it)| (it.bytes, *id));
            assert_eq!(peer.holding, holding.collect());
            assert_eq!(peer.bytes, entries().map(|(_, it)| it.bytes).sum::<usize>());
            assert!(!peer.connections.is_empty());
            connections += peer.connections.len();
            bytes += peer.bytes;
            by_connections.insert((peer.many(), *from));
            by_bytes.extend((peer.bytes > 0).then_some((peer.bytes, *from)));
        }
        assert_eq!((self.connections, self.bytes), (connections, bytes));
        assert_eq!((&self.by_connections, &self.by_bytes), (&by_connections, &by_bytes));
    }
}
