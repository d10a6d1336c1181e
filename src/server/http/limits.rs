//! What all clients together may use: the number of connections, the time for each part of a
//! request, and the bytes held for them.
//!
//! Clients have no identity here but their address. When connections or bytes run out, the address
//! that holds the most gives way. So one address, or hundreds of them, cannot lock out a caller with a
//! few short requests, such as kube-scheduler. Time is checked for all connections together, twice
//! a second, so that an idle connection needs no timer.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::sync::Notify;

use crate::certificates::Tls;
use crate::clock::Clock;
use crate::hardware::units::Timestamp;

/// How long a connection must have waited for its client before a newer one of the same address may
/// displace it. A request that is on its way arrives within milliseconds.
const STALLED_FOR: Duration = Duration::from_secs(1);

/// Time between two checks for overdue connections.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No request since the last answer.
    Idle,
    Handshake,
    /// Part of a request's head has come.
    Head,
    /// The head has come, the body has not.
    Body,
    /// The answer is being made. The only phase in which the server does not wait for the client.
    Work,
    /// The client has not yet taken the whole answer.
    Answer,
}

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Most connections at a time.
    pub(crate) connections: usize,
    /// Most bytes held for all of them: buffers, bodies of requests, answers not yet taken.
    pub(crate) bytes: usize,
    pub(crate) handshake: Duration,
    /// Longest time from the first byte of a head to its last.
    pub(crate) head: Duration,
    /// Longest time for a body.
    pub(crate) body: Duration,
    /// Longest time in which an answer makes no progress.
    pub(crate) answer: Duration,
    /// Longest time without a request.
    pub(crate) idle: Duration,
}

impl Limits {
    /// The limits of a listener. kube-scheduler gives up after 10 s and agents after 5 s, so longer
    /// times help no client. Both close idle connections after 90 s. The server must not close
    /// first, since a request may be on its way.
    pub(crate) fn new(connections: usize, bytes: usize) -> Self {
        Self {
            connections,
            bytes,
            handshake: Duration::from_secs(5),
            head: Duration::from_secs(10),
            body: Duration::from_secs(30),
            answer: Duration::from_secs(15),
            idle: Duration::from_secs(180),
        }
    }

    fn of(&self, phase: Phase) -> Duration {
        match phase {
            Phase::Idle => self.idle,
            Phase::Handshake => self.handshake,
            Phase::Head => self.head,
            Phase::Body => self.body,
            Phase::Work => Duration::MAX,
            Phase::Answer => self.answer,
        }
    }
}

/// All connections of a listener.
pub(crate) struct Clients {
    limits: Limits,
    clock: Clock,
    table: Mutex<Table>,
}

/// One connection.
pub(crate) struct Connection {
    clients: Arc<Clients>,
    /// The address of the client.
    pub(crate) address: IpAddr,
    id: u64,
    phase: Mutex<(Phase, Timestamp)>,
    closing: Notify,
    peer: OnceLock<PeerProof>,
}

/// The certificates that a client showed, an extension of each of its requests.
#[derive(Clone, Debug)]
pub(crate) struct PeerProof {
    /// The chain, the own one first. Only the client's possession of its key is checked, unless it has
    /// names.
    pub(crate) chain: Arc<[CertificateDer<'static>]>,
    /// The names that the listener knows, in a certificate of the CA.
    pub(crate) names: Arc<[ServerName<'static>]>,
    /// With which certificates of the listener, and of the CA, the chain was checked.
    pub(crate) tls: Arc<Tls>,
    pub(crate) at: Timestamp,
    pub(crate) clock: Clock,
}

impl PeerProof {
    /// Whether the client has one of its names also in the eyes of these certificates of the CA.
    pub(crate) fn counts_with(&self, tls: &Arc<Tls>) -> bool {
        let is_named = |name: &ServerName<'static>| tls.accepts(&self.chain, name);
        Arc::ptr_eq(&self.tls, tls) || self.names.iter().any(is_named)
    }

    /// How long ago the client showed it.
    pub(crate) fn age(&self) -> Duration {
        self.clock.now().since(self.at)
    }
}

/// One admitted connection; dropping it removes the connection.
pub(crate) struct Place(Arc<Connection>);

impl Place {
    /// The connection itself.
    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.clients.table().remove(self.0.address, self.0.id);
    }
}

impl Clients {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, clock: Clock::start(), table: Mutex::default() })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Admits a connection from `address`, and closes another one for it if necessary. `None` if
    /// all that could give way are at work for the same address.
    pub(crate) fn admit(self: &Arc<Self>, address: IpAddr, phase: Phase) -> Option<Place> {
        self.admit_at(address, phase, self.clock.now())
    }

    fn admit_at(self: &Arc<Self>, address: IpAddr, phase: Phase, now: Timestamp) -> Option<Place> {
        let address = address.to_canonical();
        let mut table = self.table();
        while table.connections >= self.limits.connections {
            let (from, id) = table.gives_way_to(address, now)?;
            table.close(from, id);
        }
        let id = table.next();
        let phase = Mutex::new((phase, now));
        let clients = Arc::clone(self);
        let connection = Arc::new(Connection {
            clients,
            address,
            id,
            phase,
            closing: Notify::new(),
            peer: OnceLock::new(),
        });
        table.add(&connection, now);
        Some(Place(connection))
    }

    /// The number of connections, and of bytes held for them.
    #[cfg(test)]
    pub(crate) fn held(&self) -> (usize, usize) {
        let table = self.table();
        (table.connections, table.bytes)
    }

    /// Closes the overdue connections.
    pub(crate) fn close_overdue(&self) {
        self.close_overdue_at(self.clock.now());
    }

    fn close_overdue_at(&self, now: Timestamp) {
        let mut table = self.table();
        let is_overdue = |(_, _, (phase, since)): &(_, _, (Phase, Timestamp))| {
            now.since(*since) > self.limits.of(*phase)
        };
        let overdue: Vec<_> = table.phases().filter(is_overdue).collect();
        for (from, id, (phase, _)) in overdue {
            tracing::debug!(address = %from, ?phase, "a connection took too long");
            table.close(from, id);
        }
        // Their order matters only if connections soon have to give way.
        if table.connections > self.limits.connections / 4 * 3 {
            table.look_at_all(now);
        }
    }
}

impl Connection {
    /// The clock of its listener.
    pub(crate) fn clock(&self) -> Clock {
        self.clients.clock
    }

    /// Notes the certificates of the client.
    pub(crate) fn set_peer(&self, peer: PeerProof) {
        let _ = self.peer.set(peer); // there is one handshake
    }

    /// The certificates of the client, if it showed any.
    pub(crate) fn peer(&self) -> Option<&PeerProof> {
        self.peer.get()
    }

    fn phase(&self) -> (Phase, Timestamp) {
        #[cfg(test)]
        tests::count_look();
        *self.phase.lock()
    }

    /// Whether the connection is in this phase.
    pub(crate) fn is_in(&self, phase: Phase) -> bool {
        self.phase().0 == phase
    }

    /// Enters a phase. Entering the current one again restarts its time.
    pub(crate) fn enter(&self, phase: Phase) {
        let now = self.clients.clock.now();
        *self.phase.lock() = (phase, now);
    }

    /// Returns when the connection has to close.
    pub(crate) async fn closing(&self) {
        self.closing.notified().await;
    }

    /// Counts `bytes` as held here; may close other connections. Returns whether there is room.
    #[must_use]
    pub(crate) fn hold(&self, bytes: usize) -> bool {
        let now = self.clients.clock.now();
        let mut table = self.clients.table();
        while table.bytes + bytes > self.clients.limits.bytes {
            let Some((from, id)) = table.frees_bytes_for(self, bytes, now) else { return false };
            table.close(from, id);
        }
        table.count(self, |held| held + bytes)
    }

    /// The same for an answer, which counts for at most three quarters of the limit. So the largest
    /// answer can still be sent, one at a time.
    #[must_use]
    pub(crate) fn hold_answer(&self, bytes: usize) -> Option<usize> {
        let counted = bytes.min(self.clients.limits.bytes / 4 * 3);
        self.hold(counted).then_some(counted)
    }

    /// Counts these bytes as free again.
    pub(crate) fn release(&self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.clients.table().count(self, |held| held - bytes);
    }
}

/// More files than any listener needs.
const MOST_FILES: u64 = 1 << 20;

/// How many files this process may open; `None` if there is no limit. Container runtimes start
/// programs with a low soft limit (containerd 2: 1,024) under a high hard limit, and a pod cannot
/// request more. So this raises the soft limit.
pub(crate) fn open_files() -> Option<usize> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(MOST_FILES, |maximum| maximum.min(MOST_FILES));
    let raised = Rlimit { current: Some(wanted), ..limit };
    let is_low = limit.current.is_some_and(|current| current < wanted);
    let now = if is_low && setrlimit(Resource::Nofile, raised).is_ok() { raised } else { limit };
    usize::try_from(now.current?).ok()
}

/// Most connections that are checked for one choice.
const LOOKS: usize = 16;

/// The smallest step of time.
const TICK: Duration = Duration::from_millis(1);

/// The number of connections of an address, and since when its longest waiting one waits.
type Many = (usize, Reverse<Timestamp>);

#[derive(Default)]
struct Table {
    /// Number of the newest connection.
    newest: u64,
    connections: usize,
    bytes: usize,
    peers: BTreeMap<IpAddr, Peer>,
    /// By connections. The last one has the most, and among equals has waited longest.
    by_connections: BTreeSet<(Many, IpAddr)>,
    /// The addresses that hold bytes. The last one holds the most.
    by_bytes: BTreeSet<(usize, IpAddr)>,
}

/// The connections from one address.
#[derive(Default)]
struct Peer {
    bytes: usize,
    connections: BTreeMap<u64, Entry>,
    /// All of them by [`Entry::waits`].
    waiting: BTreeSet<(Timestamp, u64)>,
    /// Those that hold bytes. The last one holds the most.
    holding: BTreeSet<(usize, u64)>,
    /// The last checked one of those. The next check continues behind it, so that all get checked.
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
    fn next(&mut self) -> u64 {
        self.newest += 1;
        self.newest
    }

    fn add(&mut self, connection: &Arc<Connection>, now: Timestamp) {
        let id = connection.id;
        let entry = Entry { bytes: 0, waits: now, connection: Arc::clone(connection) };
        self.change(connection.address, |peer| {
            peer.waiting.insert((now, id));
            peer.connections.insert(id, entry);
        });
    }

    /// Closes a connection. Its bytes count as free: its task drops it as soon as it is notified.
    fn close(&mut self, from: IpAddr, id: u64) {
        if let Some(connection) = self.remove(from, id) {
            connection.closing.notify_one();
        }
    }

    fn remove(&mut self, from: IpAddr, id: u64) -> Option<Arc<Connection>> {
        self.change(from, |peer| {
            let entry = peer.connections.remove(&id)?;
            peer.waiting.remove(&(entry.waits, id));
            peer.holding.remove(&(entry.bytes, id));
            peer.bytes -= entry.bytes;
            Some(entry.connection)
        })
    }

    /// Changes how many bytes a connection holds. Returns whether it still exists.
    fn count(&mut self, connection: &Connection, held: impl FnOnce(usize) -> usize) -> bool {
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

    /// The phase of each connection, and since when.
    fn phases(&self) -> impl Iterator<Item = (IpAddr, u64, (Phase, Timestamp))> {
        self.peers.iter().flat_map(|(from, peer)| {
            peer.connections.iter().map(|(id, entry)| (*from, *id, entry.connection.phase()))
        })
    }

    /// Brings the order of all connections up to date.
    fn look_at_all(&mut self, now: Timestamp) {
        let of_peer = |(from, peer): (&IpAddr, &Peer)| {
            let from = *from;
            peer.connections.keys().map(move |id| (from, *id)).collect::<Vec<_>>()
        };
        let all: Vec<_> = self.peers.iter().flat_map(of_peer).collect();
        for (from, id) in all {
            self.change(from, |peer| peer.look(id, now));
        }
    }

    /// The connection that gives way to a new one from `address`. Of the addresses with the most
    /// connections it is the one that has waited longest for its client. One at work gives way only
    /// to another address, and only if no waiting one is found soon.
    fn gives_way_to(&mut self, address: IpAddr, now: Timestamp) -> Option<(IpAddr, u64)> {
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

    /// The connection that gives way for `bytes` more of `asker`: of the address that holds most.
    /// If that is `asker`'s own, it must have waited long or hold far more. `None` if there is
    /// none.
    fn frees_bytes_for(
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

    /// Changes the entry of an address, and updates its position in the orders.
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

    /// Reads and notes since when a connection waits for its client; `None` while it is at work.
    fn look(&mut self, id: u64, now: Timestamp) -> Option<Timestamp> {
        let entry = self.connections.get_mut(&id)?;
        let (phase, since) = entry.connection.phase();
        let waits = (phase != Phase::Work).then_some(since);
        // A connection at work begins to wait later than any that waits now.
        let noted = std::mem::replace(&mut entry.waits, waits.unwrap_or(now.plus(TICK)));
        if noted != entry.waits {
            self.waiting.remove(&(noted, id));
            self.waiting.insert((entry.waits, id));
        }
        waits
    }

    /// Checks some of the connections that hold bytes. Returns the one other than `asker` that has
    /// waited longest, and since when.
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
    fn has(&self, from: IpAddr, id: u64) -> bool {
        self.peers.get(&from).is_some_and(|peer| peer.connections.contains_key(&id))
    }

    /// Each connection, and how many bytes it holds.
    fn all(&self) -> Vec<(IpAddr, u64, usize)> {
        let of_peer = |(from, peer): (&IpAddr, &Peer)| {
            let from = *from;
            peer.connections.iter().map(move |(id, entry)| (from, *id, entry.bytes)).collect()
        };
        self.peers.iter().flat_map::<Vec<_>, _>(of_peer).collect()
    }

    /// Compares everything that is derived with its source.
    fn audit(&self) {
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

#[cfg(test)]
mod tests;
