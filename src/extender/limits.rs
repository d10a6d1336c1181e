//! What all clients together may take of the process: how many connections there are, how long each may
//! take for each part of a request, and how many bytes are held for them.
//!
//! Clients have no identity here but their address. So when connections or bytes run out, the address that
//! holds the most gives way: a caller with a few short requests, as kube-scheduler is, cannot be locked out
//! from one address, nor from some hundreds of them. Time is checked for all connections together, twice a
//! second, so that an idle connection needs no timer.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Notify;

use crate::clock::Clock;
use crate::packing::units::Timestamp;

/// How long a connection must have waited for its client before a newer one of the same address may take its
/// place: a request that is on its way in takes milliseconds.
const STALLED_FOR: Duration = Duration::from_secs(1);

/// Time between two looks for connections that took too long.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nothing was asked since the last answer.
    Idle,
    /// The TLS handshake.
    Handshake,
    /// A part of a request's head has come.
    Head,
    /// The head has come, the body not yet.
    Body,
    /// The answer is being made. The only phase in which the client is not waited for.
    Work,
    /// The client has not yet taken the whole answer.
    Answer,
}

/// Bounds of a listener.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Most connections at a time.
    pub(super) connections: usize,
    /// Most bytes held for all of them: buffers, bodies of requests, answers not yet taken.
    pub(super) bytes: usize,
    /// Longest TLS handshake.
    pub(super) handshake: Duration,
    /// Longest time from the first byte of a head to its last.
    pub(super) head: Duration,
    /// Longest time for a body.
    pub(super) body: Duration,
    /// Longest time in which an answer gets no further.
    pub(super) answer: Duration,
    /// How long nothing may be asked.
    pub(super) idle: Duration,
}

impl Limits {
    /// The bounds of a listener. kube-scheduler gives up after 10 s and agents after 5 s, so times beyond these
    /// serve nobody. Both close idle connections after 90 s: the server must not be first, since a request
    /// may be on its way.
    pub(super) fn new(connections: usize, bytes: usize) -> Self {
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
pub(super) struct Clients {
    limits: Limits,
    clock: Clock,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// Number of the newest connection.
    newest: u64,
    connections: usize,
    bytes: usize,
    peers: BTreeMap<IpAddr, Peer>,
}

/// The connections from one address.
#[derive(Default)]
struct Peer {
    bytes: usize,
    connections: BTreeMap<u64, Entry>,
}

struct Entry {
    bytes: usize,
    connection: Arc<Connection>,
}

/// One connection.
pub(super) struct Connection {
    clients: Arc<Clients>,
    /// Where it comes from.
    pub(super) address: IpAddr,
    id: u64,
    phase: Mutex<(Phase, Timestamp)>,
    closing: Notify,
}

/// A place among the connections; given back when it is dropped.
pub(super) struct Place(Arc<Connection>);

impl Place {
    /// The connection that has it.
    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.clients.table().remove(self.0.address, self.0.id);
    }
}

impl Clients {
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, clock: Clock::start(), table: Mutex::default() })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection from `address`; another connection is closed for it if need be. None where
    /// all that could give way are at work for the same address.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr, phase: Phase) -> Option<Place> {
        let address = address.to_canonical();
        let now = self.clock.now();
        let mut table = self.table();
        while table.connections >= self.limits.connections {
            let (from, id) = table.gives_way_to(address)?;
            table.close(from, id);
        }
        table.newest += 1;
        let id = table.newest;
        let phase = Mutex::new((phase, now));
        let clients = Arc::clone(self);
        let connection =
            Arc::new(Connection { clients, address, id, phase, closing: Notify::new() });
        let entry = Entry { bytes: 0, connection: Arc::clone(&connection) };
        table.peers.entry(address).or_default().connections.insert(id, entry);
        table.connections += 1;
        Some(Place(connection))
    }

    /// How many connections there are, and how many bytes are held for them.
    #[cfg(test)]
    pub(super) fn held(&self) -> (usize, usize) {
        let table = self.table();
        (table.connections, table.bytes)
    }

    /// Closes what took too long.
    pub(super) fn close_overdue(&self) {
        self.close_overdue_at(self.clock.now());
    }

    fn close_overdue_at(&self, now: Timestamp) {
        let mut table = self.table();
        let all = table.peers.iter().flat_map(|(from, peer)| {
            peer.connections.iter().map(|(id, entry)| (*from, *id, entry.connection.phase()))
        });
        let is_overdue = |(_, _, (phase, since)): &(_, _, (Phase, Timestamp))| {
            now.since(*since) > self.limits.of(*phase)
        };
        let overdue: Vec<_> = all.filter(is_overdue).collect();
        for (from, id, (phase, _)) in overdue {
            tracing::debug!(address = %from, ?phase, "a connection took too long");
            table.close(from, id);
        }
    }
}

impl Table {
    /// Closes a connection. What it holds counts no more: it is dropped as soon as its task has heard.
    fn close(&mut self, from: IpAddr, id: u64) {
        if let Some(entry) = self.remove(from, id) {
            entry.connection.closing.notify_one();
        }
    }

    fn remove(&mut self, from: IpAddr, id: u64) -> Option<Entry> {
        let peer = self.peers.get_mut(&from)?;
        let entry = peer.connections.remove(&id)?;
        peer.bytes -= entry.bytes;
        self.bytes -= entry.bytes;
        self.connections -= 1;
        if peer.connections.is_empty() {
            self.peers.remove(&from);
        }
        Some(entry)
    }

    /// The connection that makes way for a new one from `address`: of the addresses with the most connections
    /// the one that has waited longest for its client. One at work goes only for another address.
    fn gives_way_to(&self, address: IpAddr) -> Option<(IpAddr, u64)> {
        let most = self.peers.values().map(|peer| peer.connections.len()).max()?;
        let own = self.peers.get(&address).map_or(0, |peer| peer.connections.len());
        let heaviest = || self.peers.iter().filter(|(_, peer)| peer.connections.len() == most);
        let waiting = heaviest().filter_map(|(from, peer)| {
            peer.longest_waiting(|_| true).map(|(id, since)| (since, *from, id))
        });
        if let Some((_, from, id)) = waiting.min() {
            return Some((from, id));
        }
        let (from, peer) = heaviest().next().filter(|_| most > own + 1)?;
        peer.connections.keys().next().map(|id| (*from, *id))
    }

    /// The connection that makes way for `bytes` more of `asker`. None where no other address holds more, and
    /// of its own address none has waited long or holds far more.
    fn frees_bytes_for(
        &self,
        asker: &Connection,
        bytes: usize,
        now: Timestamp,
    ) -> Option<(IpAddr, u64)> {
        let own = self.peers.get(&asker.address)?;
        let (from, heaviest) = self.peers.iter().max_by_key(|(_, peer)| peer.bytes)?;
        let most_bytes = |peer: &Peer, beyond: usize| {
            let others = peer.connections.iter().filter(|(_, entry)| entry.bytes > beyond);
            others.max_by_key(|(_, entry)| entry.bytes).map(|(id, _)| *id)
        };
        if heaviest.bytes > own.bytes + bytes {
            let waiting = heaviest.longest_waiting(|entry| entry.bytes > 0);
            let id = waiting.map(|(id, _)| id).or_else(|| most_bytes(heaviest, 0));
            return id.map(|id| (*from, id));
        }
        let has_stalled =
            |(id, since): &(u64, Timestamp)| *id != asker.id && now.since(*since) >= STALLED_FOR;
        let waiting = own.longest_waiting(|entry| entry.bytes > 0).filter(has_stalled);
        let asks = own.connections.get(&asker.id)?.bytes + bytes;
        let id = waiting.map(|(id, _)| id).or_else(|| most_bytes(own, 2 * asks));
        id.map(|id| (asker.address, id))
    }
}

impl Peer {
    /// Of those connections the one that has waited longest for its client, and since when.
    fn longest_waiting(&self, may_go: impl Fn(&Entry) -> bool) -> Option<(u64, Timestamp)> {
        let all = self.connections.iter().filter(|(_, entry)| may_go(entry));
        let waiting = all.filter_map(|(id, entry)| {
            let (phase, since) = entry.connection.phase();
            (phase != Phase::Work).then_some((*id, since))
        });
        waiting.min_by_key(|(_, since)| *since)
    }
}

impl Connection {
    fn phase(&self) -> (Phase, Timestamp) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is doing this now.
    pub(super) fn is_in(&self, phase: Phase) -> bool {
        self.phase().0 == phase
    }

    /// Notes what it does from now on; the same again begins its time again.
    pub(super) fn enter(&self, phase: Phase) {
        let now = self.clients.clock.now();
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = (phase, now);
    }

    /// Returns when the connection is to be closed.
    pub(super) async fn closing(&self) {
        self.closing.notified().await;
    }

    /// Counts `bytes` as held for this connection; others may be closed for them. Whether there is room.
    #[must_use]
    pub(super) fn hold(&self, bytes: usize) -> bool {
        let now = self.clients.clock.now();
        let mut table = self.clients.table();
        while table.bytes + bytes > self.clients.limits.bytes {
            let Some((from, id)) = table.frees_bytes_for(self, bytes, now) else { return false };
            table.close(from, id);
        }
        let Some(peer) = table.peers.get_mut(&self.address) else { return false };
        let Some(entry) = peer.connections.get_mut(&self.id) else { return false };
        entry.bytes += bytes;
        peer.bytes += bytes;
        table.bytes += bytes;
        true
    }

    /// The same for an answer, which counts for three quarters of all at most: the largest one can still be
    /// given, and one at a time.
    #[must_use]
    pub(super) fn hold_answer(&self, bytes: usize) -> Option<usize> {
        let counted = bytes.min(self.clients.limits.bytes / 4 * 3);
        self.hold(counted).then_some(counted)
    }

    /// Counts them no more.
    pub(super) fn release(&self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut table = self.clients.table();
        let Some(peer) = table.peers.get_mut(&self.address) else { return };
        let Some(entry) = peer.connections.get_mut(&self.id) else { return };
        entry.bytes -= bytes;
        peer.bytes -= bytes;
        table.bytes -= bytes;
    }
}

/// More files than any listener needs.
const MOST_FILES: u64 = 1 << 20;

/// How many files this process may have open; none where there is no limit. Container runtimes start programs
/// with a low soft limit (containerd 2: 1,024) under a high hard one, and a pod cannot ask for more: so the
/// soft one is raised.
pub(super) fn open_files() -> Option<usize> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(MOST_FILES, |maximum| maximum.min(MOST_FILES));
    let raised = Rlimit { current: Some(wanted), ..limit };
    let is_low = limit.current.is_some_and(|current| current < wanted);
    let now = if is_low && setrlimit(Resource::Nofile, raised).is_ok() { raised } else { limit };
    usize::try_from(now.current?).ok()
}

#[cfg(test)]
mod tests;
