//! What all clients of a listener together may use: connections, and bytes held for them.
//!
//! Clients have no identity here but their address. When connections or bytes run out, the address
//! that holds the most gives way. So one address, or hundreds of them, cannot lock out a caller with a
//! few short requests, such as kube-scheduler. A semaphore cannot do that: it does not know which
//! connections hold its permits.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::sync::Notify;

use runtime::certificates::Tls;
use runtime::clock::Clock;
use wire::units::Timestamp;

/// How long a connection must have waited for its client before a newer one of the same address may
/// take its bytes. A request that is on its way arrives within milliseconds.
const STALLED_FOR: Duration = Duration::from_secs(1);

/// How long a connection must have waited for its client before one of any other address may take its
/// bytes, even if it holds more itself.
const SLOW_FOR: Duration = Duration::from_secs(20);

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListenerLimits {
    /// Most connections at a time.
    pub(crate) connections: usize,
    /// Most bytes held for all of them: buffers, bodies of requests, answers not yet taken.
    pub(crate) bytes: usize,
    pub(crate) handshake: Duration,
    /// Longest time from the first byte of a head to its last.
    pub(crate) head: Duration,
    /// Longest time for a body.
    pub(crate) body: Duration,
    /// Longest time in which a client takes nothing of an answer.
    pub(crate) answer: Duration,
    /// Longest time without a request.
    pub(crate) idle: Duration,
}

impl ListenerLimits {
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
}

/// All connections of a listener.
pub(crate) struct Clients {
    limits: ListenerLimits,
    clock: Clock,
    table: Mutex<ConnectionTable>,
}

/// One admitted connection; dropping it removes it.
pub(crate) struct Connection {
    clients: Arc<Clients>,
    /// The address of the client.
    pub(crate) address: IpAddr,
    /// Its number in the table. It has another one each time that it begins to wait.
    number: AtomicU64,
    closing: Arc<Notify>,
    /// The certificates of the client, if it showed any.
    pub(crate) peer: OnceLock<PeerProof>,
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
        Arc::ptr_eq(&self.tls, tls) || self.names.iter().any(|name| tls.accepts(&self.chain, name))
    }

    /// How long ago the client showed it.
    pub(crate) fn age(&self) -> Duration {
        self.clock.now().since(self.at)
    }
}

impl Clients {
    pub(crate) fn new(limits: ListenerLimits) -> Arc<Self> {
        Arc::new(Self { limits, clock: Clock::start(), table: Mutex::default() })
    }

    /// Admits a connection from `address`, and closes another one for it if necessary. `None` if
    /// all that could give way are at work for the same address.
    pub(crate) fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Arc<Connection>> {
        let address = address.to_canonical();
        let (closing, since) = (Arc::<Notify>::default(), self.clock.now());
        let entry = Entry { bytes: 0, is_at_work: false, since, closing: Arc::clone(&closing) };
        let mut table = self.table.lock();
        if table.connections >= self.limits.connections {
            let (from, number) = table.gives_way_to(address)?;
            table.close(from, number);
        }
        let number = table.add(address, entry).into();
        let (clients, peer) = (Arc::clone(self), OnceLock::new());
        Some(Arc::new(Connection { clients, address, number, closing, peer }))
    }

    /// Admits a client that others admitted to show its certificate.
    pub(crate) fn admit_proven(
        self: &Arc<Self>,
        connection: Arc<Connection>,
    ) -> Option<Arc<Connection>> {
        if Arc::ptr_eq(self, &connection.clients) {
            return Some(connection);
        }
        let proven = self.admit(connection.address)?;
        connection.peer.get().map(|peer| proven.peer.set(peer.clone()));
        Some(proven)
    }

    /// Whether there is any connection.
    pub(crate) fn is_used(&self) -> bool {
        self.table.lock().connections > 0
    }

    /// The number of connections, and of bytes held for them.
    #[cfg(test)]
    pub(crate) fn held(&self) -> (usize, usize) {
        let table = self.table.lock();
        (table.connections, table.bytes)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let number = self.number();
        self.clients.table.lock().remove(self.address, number);
    }
}

impl Connection {
    pub(crate) fn limits(&self) -> &ListenerLimits {
        &self.clients.limits
    }

    /// The clock of its listener.
    pub(crate) fn clock(&self) -> Clock {
        self.clients.clock
    }

    /// Changes only while the table is locked.
    fn number(&self) -> u64 {
        self.number.load(Ordering::Acquire)
    }

    /// Notes that the server works for the client from now on, or waits for it.
    pub(crate) fn set_at_work(&self, is_at_work: bool) {
        let since = self.clients.clock.now();
        let mut table = self.clients.table.lock();
        let Some(entry) = table.remove(self.address, self.number()) else { return };
        let number = table.add(self.address, Entry { is_at_work, since, ..entry });
        self.number.store(number, Ordering::Release);
    }

    /// The outcome of `work`, unless the connection has to close before.
    pub(crate) async fn unless_closed<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            () = self.closing.notified() => {
                tracing::debug!(address = %self.address, "a connection gave way");
                None
            }
        }
    }

    /// Counts `bytes` as held here; may close other connections. Returns whether there is room.
    #[must_use]
    pub(crate) fn hold(&self, bytes: usize) -> bool {
        let now = self.clients.clock.now();
        let mut table = self.clients.table.lock();
        while table.bytes + bytes > self.clients.limits.bytes {
            let Some((from, number)) = table.frees_bytes_for(self, bytes, now) else {
                return false;
            };
            table.close(from, number);
        }
        table.count(self, |held| held + bytes)
    }

    /// The same for an answer, which counts for at most three quarters of the limit. So the largest
    /// answer can still be sent, one at a time.
    #[must_use]
    pub(crate) fn hold_answer(&self, bytes: usize) -> bool {
        bytes == 0 || self.hold(bytes.min(self.clients.limits.bytes / 4 * 3))
    }

    /// Counts only these bytes as held here from now on.
    pub(crate) fn hold_only(&self, bytes: usize) {
        self.clients.table.lock().count(self, |_| bytes);
    }
}

#[derive(Default)]
struct ConnectionTable {
    /// Number of the connection that began to wait, or to work, last.
    newest: u64,
    connections: usize,
    bytes: usize,
    peers: BTreeMap<IpAddr, Peer>,
}

/// The connections from one address. The first one has waited longest, or is at work.
#[derive(Default)]
struct Peer {
    bytes: usize,
    connections: BTreeMap<u64, Entry>,
}

struct Entry {
    bytes: usize,
    is_at_work: bool,
    /// Since when it waits for its client, or is at work.
    since: Timestamp,
    closing: Arc<Notify>,
}

impl ConnectionTable {
    fn add(&mut self, address: IpAddr, entry: Entry) -> u64 {
        self.newest += 1;
        self.connections += 1;
        self.bytes += entry.bytes;
        let peer = self.peers.entry(address).or_default();
        peer.bytes += entry.bytes;
        peer.connections.insert(self.newest, entry);
        self.newest
    }

    fn remove(&mut self, address: IpAddr, number: u64) -> Option<Entry> {
        let peer = self.peers.get_mut(&address)?;
        let entry = peer.connections.remove(&number)?;
        peer.bytes -= entry.bytes;
        if peer.connections.is_empty() {
            self.peers.remove(&address);
        }
        self.connections -= 1;
        self.bytes -= entry.bytes;
        Some(entry)
    }

    /// Closes a connection. Its bytes count as free: its task drops it as soon as it is notified.
    fn close(&mut self, from: IpAddr, number: u64) {
        if let Some(entry) = self.remove(from, number) {
            entry.closing.notify_one();
        }
    }

    /// Changes how many bytes a connection holds. Returns whether it still exists.
    fn count(&mut self, connection: &Connection, held: impl FnOnce(usize) -> usize) -> bool {
        let Some(peer) = self.peers.get_mut(&connection.address) else { return false };
        let Some(entry) = peer.connections.get_mut(&connection.number()) else { return false };
        let before = entry.bytes;
        entry.bytes = held(before);
        peer.bytes = peer.bytes - before + entry.bytes;
        self.bytes = self.bytes - before + entry.bytes;
        true
    }

    /// The connection that gives way to a new one from `address`. Of the addresses with the most
    /// connections it is the one that has waited longest for its client. One at work gives way only
    /// to another address, and only if none of its own waits.
    fn gives_way_to(&self, address: IpAddr) -> Option<(IpAddr, u64)> {
        let own = self.peers.get(&address).map_or(0, |peer| peer.connections.len());
        let most = self.peers.values().map(|peer| peer.connections.len()).max()?;
        let top = self.peers.iter().filter(|(_, peer)| peer.connections.len() == most);
        let (from, peer) =
            top.min_by_key(|(_, peer)| peer.longest_waiting().unwrap_or(u64::MAX))?;
        let at_work = peer.connections.keys().next().copied();
        let at_work = at_work.filter(|_| most > own + 1);
        Some((*from, peer.longest_waiting().or(at_work)?))
    }

    /// The connection that gives way for `bytes` more of `asker`: of the other address that holds most,
    /// if that is more than `asker`'s then would, or if it has waited very long. One of `asker`'s
    /// own address must have waited long or hold far more. `None` if there is none.
    fn frees_bytes_for(
        &self,
        asker: &Connection,
        bytes: usize,
        now: Timestamp,
    ) -> Option<(IpAddr, u64)> {
        let own = self.peers.get(&asker.address)?;
        let asks = own.connections.get(&asker.number())?.bytes + bytes;
        let others = self.peers.iter().filter(|(address, _)| **address != asker.address);
        if let Some((address, peer)) = others.max_by_key(|(_, peer)| peer.bytes) {
            let gives = match peer.bytes > own.bytes + bytes {
                true => peer.stalled(asker, now, Duration::ZERO).or_else(|| peer.largest(asker, 0)),
                false => peer.stalled(asker, now, SLOW_FOR),
            };
            if let Some(number) = gives {
                return Some((*address, number));
            }
        }
        let stalled = own.stalled(asker, now, STALLED_FOR);
        let gives = stalled.or_else(|| own.largest(asker, 2 * asks))?;
        Some((asker.address, gives))
    }
}

impl Peer {
    /// The connections that hold bytes, without that of `asker`.
    fn holders(&self, asker: &Connection) -> impl Iterator<Item = (u64, &Entry)> {
        let (number, all) = (asker.number(), self.connections.iter());
        let all = all.map(|(number, entry)| (*number, entry));
        all.filter(move |(other, entry)| *other != number && entry.bytes > 0)
    }

    /// The connection of another client that has waited longest, if that is at least `waited`.
    fn stalled(&self, asker: &Connection, now: Timestamp, waited: Duration) -> Option<u64> {
        let (number, entry) = self.holders(asker).find(|(_, entry)| !entry.is_at_work)?;
        (now.since(entry.since) >= waited).then_some(number)
    }

    /// The connection of another client that holds most, if that is more than `beyond`.
    fn largest(&self, asker: &Connection, beyond: usize) -> Option<u64> {
        let (number, entry) = self.holders(asker).max_by_key(|(_, entry)| entry.bytes)?;
        (entry.bytes > beyond).then_some(number)
    }

    fn longest_waiting(&self) -> Option<u64> {
        let mut all = self.connections.iter();
        all.find(|(_, entry)| !entry.is_at_work).map(|(number, _)| *number)
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

#[cfg(test)]
mod tests;
