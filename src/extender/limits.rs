//! What all clients together may take of the process: how many connections there are, how long each may
//! take for each part of a request, and how many bytes are held for them.
//!
//! Clients have no identity here but their address. So when connections or bytes run out, the address that
//! holds the most gives way: a caller with a few short requests, as kube-scheduler is, cannot be locked out
//! from one address, nor from some hundreds of them. Time is checked for all connections together, twice a
//! second, so that an idle connection needs no timer.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Notify;

use self::table::Table;
use crate::clock::Clock;
use crate::packing::units::Timestamp;

/// How long a connection must have waited for its client before a newer one of the same address may take its
/// place: a request that is on its way in takes milliseconds.
const STALLED_FOR: Duration = Duration::from_secs(1);

/// Time between two looks for connections that took too long.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(500);

/// The connections by address, and which of them makes way.
mod table;

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
        let connection =
            Arc::new(Connection { clients, address, id, phase, closing: Notify::new() });
        table.add(&connection, now);
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
        let is_overdue = |(_, _, (phase, since)): &(_, _, (Phase, Timestamp))| {
            now.since(*since) > self.limits.of(*phase)
        };
        let overdue: Vec<_> = table.phases().filter(is_overdue).collect();
        for (from, id, (phase, _)) in overdue {
            tracing::debug!(address = %from, ?phase, "a connection took too long");
            table.close(from, id);
        }
        // Only where connections are about to make way their order matters.
        if table.connections > self.limits.connections / 4 * 3 {
            table.look_at_all(now);
        }
    }
}

impl Connection {
    fn phase(&self) -> (Phase, Timestamp) {
        #[cfg(test)]
        tests::count_look();
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
        table.count(self, |held| held + bytes)
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
        self.clients.table().count(self, |held| held - bytes);
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
