//! One node among many: its state behind a lock, and what follows from each change.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::ledger::nodes::changes::{Changes, Session};
use crate::model::node_state::NodeState;
use crate::scoring::context::KeptNodeWaste;
use crate::usage::node_details::NodeDetails;
use crate::waste::supply::{NodeSupply, Supply};
use wire::ids::NodeName;

/// One node: its state, and a version that grows with each change.
pub(crate) struct NodeEntry {
    pub(crate) name: NodeName,
    pub(crate) version: AtomicU64,
    /// How many nodes came before this one did, or before it came back.
    since: AtomicU64,
    /// Whether its Node object says that it takes no new pods.
    pub(crate) is_unschedulable: AtomicBool,
    /// Whether its Node object says that its kubelet is ready.
    is_ready: AtomicBool,
    at: usize,
    node_state: Mutex<NodeState>,
    /// The expected waste of the node, for a version of the node and a generation of the mix.
    node_waste: Mutex<(u64, u64, KeptNodeWaste)>,
    /// What the node adds to the supply of the cluster; changed while the state is locked.
    supplied: Mutex<NodeSupply>,
    shared: Arc<SharedByNodes>,
    pub(crate) session: Mutex<Session>,
    /// What agents report beside the state.
    pub(crate) details: Mutex<NodeDetails>,
}

/// What each change of a node updates.
#[derive(Default)]
pub(crate) struct SharedByNodes {
    pub(crate) supply: Mutex<Supply>,
    pub(crate) changes: Mutex<Changes>,
    /// How many nodes have come; one that came back counts again.
    arrivals: AtomicU64,
}

impl SharedByNodes {
    /// How many nodes have come so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Acquire)
    }
}

impl NodeEntry {
    pub(crate) fn new(at: usize, node_state: NodeState, shared: Arc<SharedByNodes>) -> Self {
        Self {
            name: node_state.name().clone(),
            version: AtomicU64::new(1),
            since: AtomicU64::new(shared.arrivals.fetch_add(1, Ordering::AcqRel)),
            is_unschedulable: AtomicBool::new(false),
            is_ready: AtomicBool::new(true),
            at,
            node_state: Mutex::new(node_state),
            node_waste: Mutex::default(),
            supplied: Mutex::default(),
            shared,
            session: Mutex::new(Session::default()),
            details: Mutex::default(),
        }
    }

    /// How many nodes came before this one did, or before it came back.
    pub(crate) fn since(&self) -> u64 {
        self.since.load(Ordering::Acquire)
    }

    /// Notes whether its Node object says that its kubelet is ready.
    pub(crate) fn see_ready(&self, is_ready: bool) {
        self.is_ready.store(is_ready, Ordering::Release);
    }

    /// Whether its Node object says that its kubelet is ready.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Acquire)
    }

    /// Whether kube-scheduler may choose it, as far as its Node object says.
    pub(crate) fn takes_pods(&self) -> bool {
        self.is_ready() && !self.is_unschedulable.load(Ordering::Acquire)
    }

    /// Notes that the node with this name is another one from now on.
    pub(crate) fn arrive_again(&self) {
        let arrivals = self.shared.arrivals.fetch_add(1, Ordering::AcqRel);
        self.since.store(arrivals, Ordering::Release);
    }

    /// The state, for reading. A panic under this lock leaves no lasting error: the next change
    /// derives the sums again, and `audit` compares them.
    pub(crate) fn read(&self) -> MutexGuard<'_, NodeState> {
        self.node_state.lock()
    }

    /// Changes the state; the version grows while it is locked.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut NodeState) -> T) -> T {
        self.change_if(|node_state| (change(node_state), true))
    }

    /// Changes the state; `change` says whether answers may differ now. Only then the version
    /// grows.
    pub(crate) fn change_if<T>(&self, change: impl FnOnce(&mut NodeState) -> (T, bool)) -> T {
        let mut node_state = self.read();
        let (answer, is_news) = change(&mut node_state);
        if is_news {
            self.version.fetch_add(1, Ordering::Release);
            self.supply_again(&node_state);
            self.shared.changes.lock().note(self.at);
        }
        answer
    }

    /// What `look` sees of the state and its version.
    pub(crate) fn look<T>(&self, look: impl FnOnce(u64, &NodeState) -> T) -> T {
        let node_state = self.read();
        look(self.version.load(Ordering::Acquire), &node_state)
    }

    /// The same with the expected waste under the mix of this generation, as far as it is kept.
    pub(crate) fn look_with_waste<T>(
        &self,
        mix_generation: u64,
        look: impl FnOnce(&NodeState, &KeptNodeWaste) -> T,
    ) -> (u64, T) {
        let node_state = self.read();
        let version = self.version.load(Ordering::Acquire);
        let mut kept = self.node_waste.lock();
        if (kept.0, kept.1) != (version, mix_generation) {
            *kept = (version, mix_generation, KeptNodeWaste::new());
        }
        (version, look(&node_state, &kept.2))
    }

    /// Updates the supply of the cluster from the state.
    fn supply_again(&self, node_state: &NodeState) {
        let now = NodeSupply::of(node_state);
        let mut before = self.supplied.lock();
        if *before != now {
            self.shared.supply.lock().replace(&before, &now);
            *before = now;
        }
    }
}
