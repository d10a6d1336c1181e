//! What an agent is started with, and what its loops share.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::agent::node::client::ExtenderClient;
use crate::agent::node::metrics::AgentMetrics;
use crate::agent::node::session::{Contact, NodeBooks};
use crate::clock::Clock;

/// What the agent needs to know, whatever it reports.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Addresses of the extender's replicas; each gets every report.
    pub extenders: Vec<String>,
    /// Time between reports of one node.
    pub period: Duration,
    /// The clock of this process.
    pub clock: Clock,
    /// Where figures of the GPUs go, where anybody wants them.
    pub metrics: Option<AgentMetrics>,
}

/// One replica of the extender, as all nodes of this process see it.
pub(crate) struct Extender {
    /// The way to it.
    pub(crate) client: ExtenderClient,
    /// When it last answered anyone.
    pub(crate) contact: Mutex<Contact>,
}

/// What the loops of one node share.
pub(crate) struct Node {
    /// Its name.
    pub(crate) name: String,
    /// What the extenders say is booked on it.
    pub(crate) books: Mutex<NodeBooks>,
    /// Told when the bookings changed.
    pub(crate) news: Notify,
}

impl Node {
    /// The bookings; held for moments only, never across an await.
    pub(crate) fn books(&self) -> MutexGuard<'_, NodeBooks> {
        self.books.lock()
    }
}
