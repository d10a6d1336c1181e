//! Limits of the driver for pods that may use more memory of a GPU than they request.
//!
//! NVIDIA's container toolkit sets the limit of a container when it starts: what its pod requests. The extender orders
//! how much more it may use. All limits of a GPU together, with what pods use, are never more than an order allows: so
//! limits are lowered first, and others raised only once no pod uses more than its new limit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::gpu::leader_orders::StandingOrders;
use wire::ids::MAX_DEVICE_MEMORY;
use wire::mutation::{Mutation, mutated};
use wire::report::bodies::{GpuLimits, LimitOrders, LimitsInForce, NumberedGpu};
use wire::units::Timestamp;

/// Smaller differences of a limit count as none: a driver may round it.
const STEP_BYTES: u64 = 1 << 20;

/// A pod may use so much more than its new limit, which then stops its growth: the extender counts no less, and the
/// figures of the driver differ.
const TOLERANCE_BYTES: u64 = 128 << 20;

/// Orders that are in force are carried out again after this time: containers may have started since.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// The control groups of containers, by UID of the pod.
pub type Containers = BTreeMap<String, BTreeSet<String>>;

/// What the loops of the agent share about such limits; a handle, cheap to copy. Its locks are short: no call of the
/// driver is made under one, and none is held across an await.
#[derive(Clone, Debug, Default)]
pub struct LentLimits {
    shared: Arc<SharedLimits>,
}

#[derive(Debug, Default)]
struct SharedLimits {
    standing: Mutex<StandingOrders<LimitOrders>>,
    in_force: Mutex<LimitsInForce>,
    /// What became of the last order of each GPU.
    outcomes: Mutex<BTreeMap<String, SetLimit>>,
    /// The control groups that have a limit, each with its GPU.
    limited: Mutex<BTreeSet<(String, String)>>,
    /// The orders that are in force, and when they were carried out.
    done: Mutex<Option<(LimitOrders, Timestamp)>>,
    /// Notified when a pod has come, which waits until the limits are in force.
    ordered: Notify,
}

impl LentLimits {
    /// Learns what the replica with this link orders now.
    pub fn learn(&self, link: usize, orders: Option<LimitOrders>, now: Timestamp) {
        let mut standing = self.shared.standing.lock();
        let before = numbers(standing.orders());
        if standing.learn(link, orders, now) && numbers(standing.orders()) != before {
            self.shared.ordered.notify_one();
        }
    }

    /// Learns that the replica with this link did not answer. The limits stay as they are.
    pub fn lose(&self, link: usize) {
        self.shared.standing.lock().lose(link);
    }

    /// The orders that stand.
    pub fn orders(&self) -> Option<LimitOrders> {
        self.shared.standing.lock().orders().cloned()
    }

    /// Waits until an order begins.
    pub(crate) async fn ordered(&self) {
        self.shared.ordered.notified().await;
    }

    /// What is in force.
    pub fn in_force(&self) -> LimitsInForce {
        self.shared.in_force.lock().clone()
    }

    /// Whether these orders are in force, and were carried out a short time ago.
    pub(crate) fn are_done(&self, orders: &LimitOrders, now: Timestamp) -> bool {
        let done = self.shared.done.lock();
        done.as_ref().is_some_and(|(last, at)| last == orders && now.since(*at) < AGAIN_AFTER)
    }

    /// Notes that the agent can set no limits now.
    pub fn set_none(&self) {
        self.shared.in_force.lock().gpus.clear();
        *self.shared.done.lock() = None;
    }

    /// Carries out these orders on the GPUs whose limits can be set. `containers` are those of the pods in them, or what
    /// becomes of the orders without.
    pub fn carry_out(
        &self,
        orders: Option<&LimitOrders>,
        gpus: &BTreeSet<String>,
        containers: Result<&Containers, &SetLimit>,
        driver: &impl LimitDriver,
        now: Timestamp,
    ) {
        let before = self.in_force();
        let number = |gpu: &str| {
            let known = before.gpus.iter().find(|known| known.gpu == gpu);
            let is_same_term = orders.is_none_or(|orders| orders.term == before.term);
            known.filter(|_| is_same_term).map_or(0, |known| known.number)
        };
        let mut limited = std::mem::take(&mut *self.shared.limited.lock());
        limited.retain(|(_, group)| {
            let containers = containers.ok();
            containers.is_none_or(|all| all.values().any(|groups| groups.contains(group)))
        });
        let mut outcomes = std::mem::take(&mut *self.shared.outcomes.lock());
        let (mut in_force, mut are_done) = (Vec::new(), true);
        for gpu in gpus {
            if outcomes.get(gpu) == Some(&SetLimit::Refused) {
                continue;
            }
            let order =
                orders.iter().flat_map(|orders| &orders.gpus).find(|limits| limits.gpu == *gpu);
            let Some(order) = order else {
                outcomes.remove(gpu);
                in_force.push(NumberedGpu { gpu: gpu.clone(), number: number(gpu) });
                continue;
            };
            let outcome = match containers {
                Ok(containers) => obey(order, containers, driver, &mut limited),
                Err(outcome) => *outcome,
            };
            if outcomes.insert(gpu.clone(), outcome) != Some(outcome) {
                outcome.log(gpu);
            }
            are_done &= outcome == SetLimit::Done;
            let number = if outcome == SetLimit::Done { order.number } else { number(gpu) };
            if outcome != SetLimit::Refused {
                in_force.push(NumberedGpu { gpu: gpu.clone(), number });
            }
        }
        *self.shared.limited.lock() = limited;
        *self.shared.outcomes.lock() = outcomes;
        let term = orders.map_or(before.term, |orders| orders.term);
        *self.shared.in_force.lock() = LimitsInForce { term, gpus: in_force };
        *self.shared.done.lock() = orders.filter(|_| are_done).map(|all| (all.clone(), now));
    }
}

/// The orders for each GPU: their term and their numbers.
fn numbers(orders: Option<&LimitOrders>) -> Vec<(u64, u64)> {
    let orders = orders.into_iter();
    orders.flat_map(|all| all.gpus.iter().map(|gpu| (all.term, gpu.number))).collect()
}

/// The limit of a control group on a GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// `None`: it has no limit.
    pub limit: Option<u64>,
    /// What its processes use now.
    pub used: u64,
}

/// Reads and sets limits.
pub trait LimitDriver {
    /// The limit of a control group; `None` if it cannot be read.
    fn read(&self, gpu: &str, group: &str) -> Option<GroupLimit>;

    /// Sets it.
    fn set(&self, gpu: &str, group: &str, bytes: u64) -> SetLimit;
}

/// What became of a limit, or of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SetLimit {
    Done,
    Failed,
    /// This agent can never set limits on this GPU: the driver does not let it, or it does not see containers.
    Refused,
}

impl SetLimit {
    /// Logs it as news of this GPU.
    fn log(self, gpu: &str) {
        match self {
            Self::Done => tracing::info!(gpu, "limits of memory are in force"),
            Self::Failed => tracing::info!(gpu, "limits of memory are not in force yet"),
            Self::Refused => tracing::error!(
                gpu,
                "the agent cannot set limits of memory: the driver refuses them, or the host's control groups are \
                 hidden; nothing is lent on this GPU until the agent starts again: run it as root and privileged, or \
                 without `--memory-limits set`"
            ),
        }
    }
}

/// Carries out the order for one GPU. It is done when all limits that are to be lower are, and no pod uses more than
/// its limit.
///
/// Containers without a limit are left alone: they have no GPU, or nothing limits them.
fn obey(
    order: &GpuLimits,
    containers: &Containers,
    driver: &impl LimitDriver,
    known: &mut BTreeSet<(String, String)>,
) -> SetLimit {
    let done_if = |is_done: bool| if is_done { SetLimit::Done } else { SetLimit::Failed };
    let (mut raise, mut outcome) = (Vec::new(), SetLimit::Done);
    for pod in &order.pods {
        if pod.limit_mib > MAX_DEVICE_MEMORY.mib() {
            return SetLimit::Failed;
        }
        let mut limited = Vec::new();
        for group in containers.get(&pod.pod_uid).into_iter().flatten() {
            let key = (order.gpu.clone(), group.clone());
            match driver.read(&order.gpu, group) {
                Some(GroupLimit { limit: Some(limit), used }) => {
                    limited.push((group, limit, used));
                    known.insert(key);
                }
                Some(GroupLimit { limit: None, .. }) => _ = known.remove(&key),
                None => outcome = outcome.max(done_if(!known.contains(&key))),
            }
        }
        let share = (pod.limit_mib << 20) / u64::try_from(limited.len()).unwrap_or(u64::MAX).max(1);
        for (group, limit, used) in limited {
            // What it uses cannot be taken away: only its growth is stopped then.
            let least = share.max(used);
            if limit > least.saturating_add(STEP_BYTES) {
                if !mutated(Mutation::LimitsNotLowered) {
                    outcome = outcome.max(driver.set(&order.gpu, group, least));
                }
            } else if limit.saturating_add(STEP_BYTES) < share {
                raise.push((group, share));
            }
            // Read after the limit was lowered: it may have grown until then.
            let used = driver.read(&order.gpu, group).map(|now| now.used);
            let most = share.saturating_add(TOLERANCE_BYTES);
            outcome = outcome.max(done_if(used.is_some_and(|used| pod.keeps_more || used <= most)));
        }
    }
    if outcome == SetLimit::Done {
        for (group, share) in raise {
            let raised = driver.set(&order.gpu, group, share);
            outcome = if raised == SetLimit::Refused { raised } else { outcome };
        }
    }
    outcome
}

#[cfg(test)]
mod tests;
