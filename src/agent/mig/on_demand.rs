//! What the loops of the agent share about MIG on demand: orders, failures, instances made here.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::gpu::leader_orders::StandingOrders;
use crate::mig::made::MadeInstances;
use wire::report::bodies::{DeviceReport, MigFailure, MigOrders, MigPromises};
use wire::report::report_limits::MAX_MIG_PROMISES;
use wire::units::Timestamp;

/// How long a change of an instance may take before the driver counts as hanging. Most take less than a second, a few take 20 s.
const CHANGES_WITHIN: Duration = Duration::from_secs(60);

/// MIG on demand on this node; a handle, cheap to copy. Its locks are short: no call of the driver
/// is made under one, and none is held across an await.
#[derive(Clone, Debug)]
pub struct MigOnDemand {
    shared: Arc<SharedMig>,
}

/// A change of an instance that is under way.
#[derive(Debug)]
pub(crate) struct ChangeUnderWay(MigOnDemand);

impl Drop for ChangeUnderWay {
    fn drop(&mut self) {
        *self.0.shared.changing.lock() = None;
    }
}

#[derive(Debug)]
struct SharedMig {
    standing: Mutex<StandingOrders<MigOrders>>,
    /// What the newest leader has promised to pods.
    promises: Mutex<MigPromises>,
    made: Mutex<MadeInstances>,
    /// Orders that could not be carried out.
    failures: Mutex<Vec<MigFailure>>,
    /// UUIDs of the instances whose device nodes are missing.
    nodeless: Mutex<BTreeSet<String>>,
    /// When the change of an instance began that is under way.
    changing: Mutex<Option<Timestamp>>,
    /// Notified when other orders stand.
    ordered: Notify,
    /// Notified when instances or failures have changed.
    changed: Notify,
}

impl MigOnDemand {
    /// Orders that another process carries out: this one only knows which stand.
    pub fn of_others() -> Self {
        Self::with(MadeInstances::default())
    }

    /// Reads what an earlier run of the agent noted in `folder` since the last boot, which
    /// `proc_root` names.
    pub fn new(folder: &Path, proc_root: &Path) -> Self {
        let boot = std::fs::read_to_string(proc_root.join("sys/kernel/random/boot_id")).ok();
        let boot = boot.map(|boot| boot.trim().to_owned());
        Self::with(MadeInstances::read(folder, boot))
    }

    fn with(made: MadeInstances) -> Self {
        let made = Mutex::new(made);
        Self {
            shared: Arc::new(SharedMig {
                standing: Mutex::default(),
                promises: Mutex::default(),
                made,
                failures: Mutex::default(),
                nodeless: Mutex::default(),
                changing: Mutex::default(),
                ordered: Notify::new(),
                changed: Notify::new(),
            }),
        }
    }

    /// Learns what the replica with this link orders now.
    pub fn learn(&self, link: usize, mut orders: Option<MigOrders>, now: Timestamp) {
        let promised = orders.as_mut().map(|orders| {
            let mut instances = std::mem::take(&mut orders.promises);
            instances.truncate(MAX_MIG_PROMISES);
            MigPromises { term: orders.term, instances }
        });
        let mut standing = self.shared.standing.lock();
        let are_new = standing.learn(link, orders, now);
        let term = standing.orders().map(|orders| orders.term);
        drop(standing);
        // Of a leader that is obeyed. They stay when it does not answer any more.
        if let Some(promised) = promised.filter(|promises| Some(promises.term) == term) {
            *self.shared.promises.lock() = promised;
        }
        if are_new {
            self.shared.ordered.notify_one();
        }
    }

    /// Learns that the replica with this link did not answer.
    pub fn lose(&self, link: usize) {
        if self.shared.standing.lock().lose(link) {
            self.shared.ordered.notify_one();
        }
    }

    /// The orders that stand; without any, empty ones.
    pub fn orders(&self) -> MigOrders {
        self.standing().unwrap_or_default()
    }

    /// The orders that stand, if any do.
    pub(crate) fn standing(&self) -> Option<MigOrders> {
        self.shared.standing.lock().orders().cloned()
    }

    /// What the newest leader has promised to pods; `None` if that is nothing.
    pub fn promises(&self) -> Option<MigPromises> {
        let known = self.shared.promises.lock();
        (!known.instances.is_empty()).then(|| known.clone())
    }

    /// Waits until other orders stand.
    pub(crate) async fn ordered(&self) {
        self.shared.ordered.notified().await;
    }

    /// Notes that a change of an instance begins. It is under way until what this gives is dropped.
    pub(crate) fn begin_change(&self, now: Timestamp) -> ChangeUnderWay {
        *self.shared.changing.lock() = Some(now);
        ChangeUnderWay(self.clone())
    }

    /// Whether a change of an instance is under way that began less than [`CHANGES_WITHIN`] ago. Calls for the GPU may
    /// wait for it.
    pub(crate) fn is_changing(&self, now: Timestamp) -> bool {
        self.shared.changing.lock().is_some_and(|began| now.since(began) < CHANGES_WITHIN)
    }

    /// Notes that instances have changed, so that the devices are read again at once.
    pub(crate) fn note_change(&self) {
        self.shared.changed.notify_one();
    }

    /// Waits until instances or failures have changed.
    pub(crate) async fn changed(&self) {
        self.shared.changed.notified().await;
    }

    /// The orders that could not be carried out.
    pub fn failures(&self) -> Vec<MigFailure> {
        self.shared.failures.lock().clone()
    }

    /// Notes the orders that could not be carried out.
    pub fn note_failures(&self, failures: Vec<MigFailure>) {
        let mut known = self.shared.failures.lock();
        if *known != failures {
            *known = failures;
            drop(known);
            self.note_change();
        }
    }

    /// Whether the device nodes of the instance with this UUID are missing.
    pub(crate) fn lacks_nodes(&self, uuid: &str) -> bool {
        self.shared.nodeless.lock().contains(uuid)
    }

    /// Notes the instances whose device nodes are missing.
    pub(crate) fn note_nodeless(&self, nodeless: BTreeSet<String>) {
        let mut known = self.shared.nodeless.lock();
        if *known != nodeless {
            *known = nodeless;
            drop(known);
            self.note_change();
        }
    }

    /// The instances that were made here.
    pub fn made(&self) -> MutexGuard<'_, MadeInstances> {
        self.shared.made.lock()
    }

    /// Whether this instance is being made: it is not reported before it is ready.
    pub fn is_making(&self, device: &DeviceReport) -> bool {
        self.made().is_making(device)
    }

    /// Marks the instances of an inventory that were made here, and forgets those that it lacks.
    /// `changes` is [`MadeInstances::changes`] from before the inventory was read.
    pub fn mark(&self, inventory: &mut [DeviceReport], changes: u64) {
        let mut made = self.made();
        for device in inventory.iter_mut() {
            device.made_here = made.has_made(device);
        }
        made.forget_absent(inventory, changes);
    }
}
