//! The configuration of an agent, and the state that its loops share.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::gpu::clearing::Clearing;
use crate::gpu::lent_limits::LentLimits;
use crate::gpu::library_gate::LibraryGate;
use crate::mig::on_demand::MigOnDemand;
use crate::node::client::{ExtenderClient, Proof};
use crate::node::metrics::AgentMetrics;
use crate::node::replicas::Resolver;
use crate::node::session::{Contact, NodeAllocations};
use crate::upkeep::condition::Upkeep;
use runtime::clock::Clock;

/// The configuration of an agent, whatever it reports.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Addresses of the extender's replicas; each gets every report. A name stands for every address
    /// that it resolves to.
    pub extenders: Vec<String>,
    /// How they and this agent prove who they are.
    pub proof: Proof,
    /// Resolves the names among them.
    pub resolver: Resolver,
    /// Time between samples of one node.
    pub period: Duration,
    /// The clock of this process.
    pub clock: Clock,
    /// Metrics of the GPUs; `None` without an endpoint for them.
    pub metrics: Option<AgentMetrics>,
    /// Orders about MIG instances; `None` if the agent makes none.
    pub mig: Option<MigOnDemand>,
    /// Orders about limits of memory; `None` if the agent sets none.
    pub limits: Option<LentLimits>,
    /// Orders to clear a GPU; `None` for nodes that are played.
    pub clearing: Option<Clearing>,
    /// What the agent looks after.
    pub upkeep: Upkeep,
    /// Whether NVIDIA's library may be open; `None` for nodes that are played.
    pub gate: Option<LibraryGate>,
}

/// One replica of the extender, shared by all nodes of this process.
pub(crate) struct Extender {
    pub(crate) client: ExtenderClient,
    /// When it last answered any node.
    pub(crate) contact: Mutex<Contact>,
    /// Notified when it is lost.
    pub(crate) lost: Arc<Notify>,
}

/// State that the loops of one node share.
pub(crate) struct AgentNode {
    pub(crate) name: String,
    /// The allocations on it, as the extenders report them.
    pub(crate) allocations: Mutex<NodeAllocations>,
    /// Notified when the allocations change.
    pub(crate) news: Notify,
    /// Orders about MIG instances, if the agent makes any.
    pub(crate) mig: Option<MigOnDemand>,
    /// Orders about limits of memory, if the agent sets any.
    pub(crate) limits: Option<LentLimits>,
    /// Orders to clear a GPU, if the agent obeys any.
    pub(crate) clearing: Option<Clearing>,
    /// Whether NVIDIA's library may be open, if there is one.
    pub(crate) gate: Option<LibraryGate>,
}

impl AgentNode {
    /// The allocations. The lock is short and never held across an await.
    pub(crate) fn allocations(&self) -> MutexGuard<'_, NodeAllocations> {
        self.allocations.lock()
    }

    /// Forgets the extender with this link: its allocations, and its orders.
    pub(crate) fn forget(&self, link: usize) {
        self.allocations().forget(link);
        self.lose_orders(link);
        if let Some(gate) = &self.gate {
            gate.forget(link);
        }
    }

    /// Ends the orders of the extender with this link.
    pub(crate) fn lose_orders(&self, link: usize) {
        if let Some(mig) = &self.mig {
            mig.lose(link);
        }
        if let Some(limits) = &self.limits {
            limits.lose(link);
        }
        if let Some(clearing) = &self.clearing {
            clearing.lose(link);
        }
    }

    /// Waits until a GPU is to be cleared.
    pub(crate) async fn clear_ordered(&self) {
        match &self.clearing {
            Some(clearing) => clearing.ordered().await,
            None => std::future::pending().await,
        }
    }

    /// Waits until NVIDIA's library may be open, or may not any more.
    pub(crate) async fn gate_changed(&self) {
        match &self.gate {
            Some(gate) => gate.changed().await,
            None => std::future::pending().await,
        }
    }

    /// Waits until an order about limits of memory begins.
    pub(crate) async fn limits_ordered(&self) {
        match &self.limits {
            Some(limits) => limits.ordered().await,
            None => std::future::pending().await,
        }
    }

    /// Waits until other orders about MIG instances stand.
    pub(crate) async fn mig_ordered(&self) {
        match &self.mig {
            Some(mig) => mig.ordered().await,
            None => std::future::pending().await,
        }
    }

    /// Waits until the agent has made or removed a MIG instance, or failed to.
    pub(crate) async fn mig_changed(&self) {
        match &self.mig {
            Some(mig) => mig.changed().await,
            None => std::future::pending().await,
        }
    }
}
