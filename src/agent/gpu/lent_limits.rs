//! Limits of the driver for pods that may use more memory of a GPU than they request.
//!
//! NVIDIA's container toolkit sets the limit of a container when it starts: what its pod requests. The extender orders
//! how much more it may use. All limits of a GPU together, with what pods use, are never more than an order allows: so
//! limits are lowered first, and others raised only once no pod uses more than its new limit.
//!
//! Where a pool has soft limits, the container toolkit also sets that of a container when it starts: to what its pod
//! requests. The driver guarantees so much: if a process cannot allocate it, MPS ends a process of another container that
//! uses more than its own soft limit. That works among clients of one daemon of MPS. So the agent reports the soft limits
//! of those pods alone whose containers find the daemon and whose processes are all clients, and none while no daemon
//! answers that acts on them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::agent::gpu::standing::StandingOrders;
use crate::hardware::device::MAX_DEVICE_MEMORY;
use crate::hardware::units::Timestamp;
use crate::mutation::{Mutation, mutated};
use crate::report::wire::{GpuInForce, GpuLimits, LimitOrders, LimitsInForce, SoftLimit};

/// Smaller differences of a limit count as none: a driver may round it.
const STEP_BYTES: u64 = 1 << 20;

/// A pod may use so much more than its new limit, which then stops its growth: the extender counts no less, and the
/// figures of the driver differ.
const TOLERANCE_BYTES: u64 = 128 << 20;

/// Orders that are in force are carried out again after this time: containers may have started since.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// The same while a soft limit is to be reported and is not in force: more is lent once that of a new container is.
const SOFT_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How long a pod counts as one that does not use MPS after it had such a process. Else it could have others restarted
/// for it again and again.
const NO_CLIENT_FOR: Duration = Duration::from_secs(600);

/// The control groups of containers, each with a process in it, by UID of the pod.
pub type Containers = BTreeMap<String, BTreeMap<String, u32>>;

/// What the loops of the agent share about such limits; a handle, cheap to copy. Its locks are short: no call of the
/// driver is made under one, and none is held across an await.
#[derive(Clone, Debug, Default)]
pub struct LentLimits {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    standing: Mutex<StandingOrders<LimitOrders>>,
    in_force: Mutex<LimitsInForce>,
    /// What became of the last order of each GPU.
    outcomes: Mutex<BTreeMap<String, SetLimit>>,
    /// The control groups that have a limit, each with its GPU.
    limited: Mutex<BTreeSet<(String, String)>>,
    /// What lists of processes have shown of each GPU.
    listed: Mutex<BTreeMap<String, Listed>>,
    /// The orders that are in force, and when they were carried out.
    done: Mutex<Option<(LimitOrders, Timestamp)>>,
    /// Notified when a pod has come, which waits until the limits are in force.
    ordered: Notify,
}

/// What lists of the processes of a GPU have shown.
#[derive(Debug, Default)]
struct Listed {
    /// Whether the last one had a process of a pod.
    has_pods: bool,
    /// The pods that had a process in the last one which is no client of MPS.
    last_others: BTreeSet<String>,
    /// Those that had one in two lists, one after the other, and when that was seen last. The driver has two lists, and a
    /// client may end between them.
    no_clients: BTreeMap<String, Timestamp>,
}

impl LentLimits {
    /// Learns what the replica with this link orders now.
    pub fn learn(&self, link: usize, orders: Option<LimitOrders>, now: Timestamp) {
        let mut standing = self.shared.standing.lock();
        let numbers = |standing: &StandingOrders<LimitOrders>| -> Vec<(u64, u64)> {
            let orders = standing.orders().into_iter();
            orders.flat_map(|all| all.gpus.iter().map(|gpu| (all.term, gpu.number))).collect()
        };
        let before = numbers(&standing);
        if standing.learn(link, orders, now) && numbers(&standing) != before {
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
        let in_force = self.shared.in_force.lock();
        let has_it = |gpu: &GpuLimits, pod: &String| {
            let known = in_force.gpus.iter().find(|it| it.gpu == gpu.gpu);
            known.is_some_and(|known| known.soft.iter().any(|it| it.pod_uid == *pod))
        };
        let mut gpus = orders.gpus.iter();
        let is_missing = gpus.any(|gpu| gpu.soft.iter().any(|pod| !has_it(gpu, pod)));
        let again_after = if is_missing { SOFT_AGAIN_AFTER } else { AGAIN_AFTER };
        done.as_ref().is_some_and(|(last, at)| last == orders && now.since(*at) < again_after)
    }

    /// Learns of a list of the processes of a GPU: whether pods have any, and which have some that are no clients of MPS.
    pub fn list(
        &self,
        gpu: &str,
        (has_pods, no_clients): (bool, BTreeSet<String>),
        now: Timestamp,
    ) {
        let mut all = self.shared.listed.lock();
        let listed = all.entry(gpu.to_owned()).or_default();
        listed.has_pods = has_pods;
        listed.no_clients.retain(|_, seen| now.since(*seen) < NO_CLIENT_FOR);
        let again = no_clients.iter().filter(|pod| listed.last_others.contains(*pod));
        listed.no_clients.extend(again.map(|pod| (pod.clone(), now)));
        listed.last_others = no_clients;
    }

    /// Whether the last list of a GPU had a process of a pod.
    pub(crate) fn has_pods(&self, gpu: &str) -> bool {
        self.shared.listed.lock().get(gpu).is_some_and(|listed| listed.has_pods)
    }

    /// Notes that the agent can set no limits now.
    pub fn set_none(&self) {
        self.shared.in_force.lock().gpus.clear();
        *self.shared.done.lock() = None;
    }

    /// Carries out these orders on the GPUs whose limits can be set. `containers` are those of the pods in them, or what
    /// becomes of the orders without. Of each GPU it is said whether a daemon of MPS acts on soft limits there.
    pub fn carry_out(
        &self,
        (orders, now): (Option<&LimitOrders>, Timestamp),
        gpus: &BTreeMap<String, bool>,
        containers: Result<&Containers, &SetLimit>,
        driver: &impl LimitDriver,
    ) {
        let before = self.in_force();
        let number = |gpu: &str| {
            let known = before.gpus.iter().find(|it| it.gpu == gpu);
            let of_term = orders.is_none_or(|orders| orders.term == before.term);
            known.filter(|_| of_term).map_or(0, |known| known.number)
        };
        let mut limited = std::mem::take(&mut *self.shared.limited.lock());
        limited.retain(|(_, group)| {
            let is_there = |all: &Containers| all.values().any(|groups| groups.contains_key(group));
            containers.ok().is_none_or(is_there)
        });
        let mut outcomes = std::mem::take(&mut *self.shared.outcomes.lock());
        let (mut in_force, mut are_done) = (Vec::new(), true);
        for (gpu, has_mps) in gpus {
            if outcomes.get(gpu) == Some(&SetLimit::Refused) {
                continue;
            }
            let known = before.gpus.iter().find(|it| it.gpu == *gpu);
            let soft_before = known.filter(|_| *has_mps).map_or(&[][..], |known| &known.soft);
            let order = orders.iter().flat_map(|orders| &orders.gpus).find(|it| it.gpu == *gpu);
            let Some(order) = order else {
                outcomes.remove(gpu);
                // While no leader says anything, they stay as they are.
                let soft_before = if orders.is_none() { soft_before.to_vec() } else { Vec::new() };
                let soft = self.without_others(gpu, soft_before);
                in_force.push(GpuInForce { gpu: gpu.clone(), number: number(gpu), soft });
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
                let soft = match containers {
                    Ok(containers) if *has_mps => {
                        self.guaranteed((order, soft_before), containers, driver)
                    }
                    Ok(_) => Vec::new(),
                    Err(_) => self.without_others(gpu, soft_before.to_vec()),
                };
                in_force.push(GpuInForce { gpu: gpu.clone(), number, soft });
            }
        }
        *self.shared.limited.lock() = limited;
        *self.shared.outcomes.lock() = outcomes;
        let term = orders.map_or(before.term, |orders| orders.term);
        *self.shared.in_force.lock() = LimitsInForce { term, gpus: in_force };
        *self.shared.done.lock() = orders.filter(|_| are_done).map(|all| (all.clone(), now));
    }

    /// The soft limits of the pods of an order that are in force. One of a pod without a container now is, if it was
    /// `before`: its next container gets it, too.
    fn guaranteed(
        &self,
        (order, before): (&GpuLimits, &[SoftLimit]),
        containers: &Containers,
        driver: &impl LimitDriver,
    ) -> Vec<SoftLimit> {
        let of_pod = |pod_uid: &String| {
            let mut found: Option<u64> = None;
            for (group, pid) in containers.get(pod_uid).into_iter().flatten() {
                let GroupLimit { limit, soft, .. } = driver.read(&order.gpu, group)?;
                if limit.is_none() {
                    continue; // it has no GPU
                }
                if driver.counts_parents(group) || !driver.finds_mps(&order.gpu, *pid) {
                    return None;
                }
                found = Some(found.unwrap_or(0).saturating_add(soft));
            }
            let before = before.iter().find(|it| it.pod_uid == *pod_uid);
            match found {
                Some(bytes) => Some(SoftLimit { pod_uid: pod_uid.clone(), soft_mib: bytes >> 20 }),
                None => before.cloned(),
            }
        };
        let all: Vec<SoftLimit> = order.soft.iter().filter_map(of_pod).collect();
        self.without_others(&order.gpu, all)
    }

    /// These soft limits without those of pods that have had a process on the GPU which is no client of MPS.
    fn without_others(&self, gpu: &str, mut soft: Vec<SoftLimit>) -> Vec<SoftLimit> {
        let listed = self.shared.listed.lock();
        let Some(listed) = listed.get(gpu) else { return Vec::new() };
        let is_other =
            |pod: &String| listed.last_others.contains(pod) || listed.no_clients.contains_key(pod);
        let is_sane = |mib: u64| (1..=MAX_DEVICE_MEMORY.mib()).contains(&mib);
        soft.retain(|it| is_sane(it.soft_mib) && !is_other(&it.pod_uid));
        soft
    }
}

/// The limits of a control group on a GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// `None`: it has no limit.
    pub limit: Option<u64>,
    /// What the driver guarantees to it.
    pub soft: u64,
    /// What its processes use now.
    pub used: u64,
}

/// Reads and sets limits.
pub trait LimitDriver {
    /// The limit of a control group; `None` if it cannot be read.
    fn read(&self, gpu: &str, group: &str) -> Option<GroupLimit>;

    /// Sets what the driver guarantees to it, and the most that it may use.
    fn set(&self, gpu: &str, group: &str, soft_and_limit: (u64, u64)) -> SetLimit;

    /// Whether what is guaranteed to a control group also counts for those above it. Then it stays there when the group
    /// goes first, and the guarantees of other pods are wrong.
    fn counts_parents(&self, group: &str) -> bool;

    /// Whether a process finds the daemon of MPS of a GPU.
    fn finds_mps(&self, gpu: &str, pid: u32) -> bool;
}

/// What became of a limit, or of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SetLimit {
    /// It is in force.
    Done,
    /// Not yet.
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
        for group in containers.get(&pod.pod_uid).into_iter().flat_map(BTreeMap::keys) {
            let key = (order.gpu.clone(), group.clone());
            match driver.read(&order.gpu, group) {
                Some(GroupLimit { limit: Some(limit), soft, used }) => {
                    limited.push((group, limit, soft, used));
                    known.insert(key);
                }
                Some(GroupLimit { limit: None, .. }) => _ = known.remove(&key),
                None => outcome = outcome.max(done_if(!known.contains(&key))),
            }
        }
        let share = (pod.limit_mib << 20) / u64::try_from(limited.len()).unwrap_or(u64::MAX).max(1);
        for (group, limit, soft, used) in limited {
            // What it uses cannot be taken away: only its growth is stopped then. Nor what is guaranteed to it: that is
            // more than its share only if containers of one pod overlap.
            let least = share.max(used).max(soft);
            outcome = outcome.max(done_if(soft <= share.saturating_add(STEP_BYTES)));
            if limit > least.saturating_add(STEP_BYTES) {
                if !mutated(Mutation::LimitsNotLowered) {
                    outcome = outcome.max(driver.set(&order.gpu, group, (soft, least)));
                }
            } else if limit.saturating_add(STEP_BYTES) < share {
                raise.push((group, (soft, share)));
            }
            // Read after the limit was lowered: it may have grown until then.
            let used = driver.read(&order.gpu, group).map(|now| now.used);
            let is_within = |used| pod.keeps_more || used <= share.saturating_add(TOLERANCE_BYTES);
            outcome = outcome.max(done_if(used.is_some_and(is_within)));
        }
    }
    if outcome == SetLimit::Done {
        for (group, soft_and_limit) in raise {
            let raised = driver.set(&order.gpu, group, soft_and_limit);
            outcome = if raised == SetLimit::Refused { raised } else { outcome };
        }
    }
    outcome
}

#[cfg(test)]
mod tests;
