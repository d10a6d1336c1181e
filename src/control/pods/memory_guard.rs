//! The memory guard: reports over-limit pods, and evicts them if the operator configured that.
//! [`Evictions`] decides which pod comes next.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use crate::metrics::guard::{EvictionReason, EvictionResult};
use crate::shared::app::App;
use engine::model::isolation::{DriverLimits, Mode};
use engine::model::node_state::NodeState;
use engine::model::reservation::PodRef;
use engine::usage::node_details::NodeDetails;
use engine::usage::over_limit::{EvictionAnswer, Evictions};
use engine::usage::samples::{OnDevice, OverLimitPod, Use};
use engine::usage::tenant_isolation::TenantIsolation;
use kube_api::config::file::Config;
use kube_api::config::guard::GuardConfig;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::write::events::NoticeReason;
use kube_api::write::evict::{EvictOutcome, EvictionRun};
use kube_api::write::target::PodKey;
use wire::api::state;
use wire::api::state::MemoryHolder;
use wire::ids::{DeviceId, NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::MemMib;

/// Pause between two looks for over-limit pods to evict.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Use of a device that is to be reported.
pub(crate) struct OverLimitUse<'a> {
    pub(crate) node: &'a NodeName,
    pub(crate) device: &'a DeviceId,
    pub(crate) used: MemMib,
}

/// Isolation of a pod's memory on a device that is configured and not verified.
pub(crate) struct UnverifiedIsolation<'a> {
    pub(crate) node: &'a NodeName,
    pub(crate) device: &'a DeviceId,
    pub(crate) configured: Mode,
    /// The limit that was read back.
    pub(crate) limit: Option<MemMib>,
}

/// What the configuration does so that pods use no more memory than they may.
#[derive(Clone, Copy, Debug)]
pub struct Protection {
    /// What limits containers that share a GPU.
    pub limits: DriverLimits,
    /// What is done about over-limit pods.
    pub guard: GuardConfig,
}

impl Protection {
    /// Of a configuration.
    pub fn of(config: &Config) -> Self {
        Self { limits: config.webhook.memory_limit.driver_limits(), guard: config.guard }
    }

    /// Who holds a tenant to its memory: what was verified, else the guard where it evicts.
    pub fn holder(self, isolation: TenantIsolation) -> MemoryHolder {
        match isolation.verified {
            Mode::Whole => MemoryHolder::Whole,
            Mode::Mig => MemoryHolder::Mig,
            Mode::Driver => MemoryHolder::Driver,
            Mode::Mps => MemoryHolder::Mps,
            Mode::None if self.guard.evict => MemoryHolder::Guard,
            Mode::None => MemoryHolder::Nobody,
        }
    }

    /// Who holds a pod to its memory, as a sentence: the weakest of its devices counts, and a limit that is
    /// configured and not verified is named beside. `None` if the node lacks its devices.
    pub fn sentence(self, node: &NodeState, details: &NodeDetails, uid: &PodUid) -> Option<String> {
        let held = node.devices().iter().filter_map(|device| {
            let (_, held) = device.tenants().iter().find(|(tenant, _)| *tenant == uid)?;
            Some(details.isolation.of(device, uid, *held, self.limits))
        });
        let weakest = held.min_by_key(|isolation| self.holder(*isolation))?;
        let unverified = match weakest.configured {
            configured if configured == weakest.verified => "",
            Mode::Driver => ", since the configured limit of the driver is not verified",
            Mode::Mps => ", since the configured limit of MPS is not verified",
            Mode::None | Mode::Mig | Mode::Whole => "",
        };
        Some(format!("memory held by: {}{unverified}", self.holder(weakest).words()))
    }
}

/// The over-limit pods on a device of `node`.
pub fn over_limit_pods(node: &NodeState, on: &OnDevice) -> Vec<state::OverLimitPod> {
    let over = on.pods.iter().filter(|(_, seen)| seen.lists_over > 0);
    let views = over.map(|(uid, seen)| state::OverLimitPod {
        pod_uid: uid.to_string(),
        pod: node.reservation(uid).map(|held| held.pod.name.to_string()).unwrap_or_default(),
        used_mib: seen.used.mib(),
        allowed_mib: seen.allowed.mib(),
        samples: seen.lists_over,
    });
    views.collect()
}

/// What a pod uses beyond what it may, as the end of a sentence; empty if nothing.
pub fn excesses(details: &NodeDetails, uid: &PodUid) -> String {
    let mut text = String::new();
    for (device, on) in details.usage_samples.devices() {
        let seen = on.pods.get(uid).filter(|seen| seen.lists_over > 0);
        if let Some(Use { used, allowed, .. }) = seen {
            let _ = write!(text, "; it uses {used} of {device} and may use {allowed}");
        }
    }
    text
}

/// Writes an event that a pod uses more than it may, with a suggestion.
pub(crate) fn report_over_limit(
    app: &App,
    pod: &PodRef,
    allowed: MemMib,
    excess: &OverLimitUse<'_>,
) {
    let OverLimitUse { node, device, used } = excess;
    let excess = used.checked_sub(allowed).unwrap_or(MemMib::ZERO);
    tracing::warn!(pod_uid = %pod.uid, %pod, %node, %device, %used, %allowed, "a pod uses more GPU memory than it may");
    let suggestion = if allowed == MemMib::ZERO {
        "it has nothing allocated on that device: check that its container gets its placed device \
         and no other"
            .to_owned()
    } else {
        format!(
            "request `gpu-memory: {}` or more, or make the program use less (its cache, its batch)",
            used.mib()
        )
    };
    let threat = match app.config.guard.evict {
        false => "it reduces the free memory there; no pod is evicted",
        true => "the pod is evicted if this lasts",
    };
    let note = format!(
        "uses {used} of {device} on node {node} and may use {allowed}: {excess} too much; {threat}; \
         {suggestion}"
    );
    app.tell(pod, NoticeReason::GpuOverLimit, note);
}

/// Writes an event to the tenants of a device that untracked memory is used on it.
pub(crate) fn report_untracked_memory(app: &App, excess: &OverLimitUse<'_>) {
    let OverLimitUse { node, device, used } = excess;
    tracing::warn!(%node, %device, %used, "a device has untracked memory: processes of no known pod");
    let note = format!(
        "its device {device} on node {node} is used by others too: {used} by processes of no pod that \
         gpupack has placed there; it is taken off what may be placed; `nvidia-smi` on the node lists \
         the processes"
    );
    for pod in app.ledger.tenants(node.as_str(), device) {
        app.tell(&pod, NoticeReason::GpuUntrackedMemory, note.clone());
    }
}

/// Writes an event that a pod's configured memory isolation (driver or MPS) is not verified.
pub(crate) fn report_unverified_isolation(
    app: &App,
    pod: &PodRef,
    found: &UnverifiedIsolation<'_>,
) {
    let UnverifiedIsolation { node, device, configured, limit } = found;
    tracing::warn!(pod_uid = %pod.uid, %pod, %node, %device, ?limit, "configured isolation is not verified");
    let found = match limit {
        Some(limit) => format!("its limit is {limit}, which is more than its share"),
        None => "no limit could be read back for all its processes".to_owned(),
    };
    let takes = match configured {
        Mode::Mps => {
            "Under MPS each of its processes must be a client of the GPU's daemon, all of them together \
             limited to the share, in a pod created through the webhook; the daemon must serve, and the \
             agent must be allowed to read the environment of processes"
        }
        Mode::None | Mode::Driver | Mode::Mig | Mode::Whole => {
            "A limit takes driver r615, container toolkit 1.20.1 and cgroup v2 on the node, a pod created \
             through the webhook, and an agent that sees the host's control groups"
        }
    };
    let note = format!("its memory on {device} of node {node} is not isolated: {found}. {takes}");
    app.tell(pod, NoticeReason::IsolationNotVerified, note);
}

/// Evicts over-limit pods if the operator configured that; otherwise waits forever.
pub(crate) async fn guarding(app: &Arc<App>) {
    if !app.config.guard.evict && !mutated(Mutation::EvictsUnasked) {
        return std::future::pending().await;
    }
    tracing::info!("pods that use more GPU memory than they may are evicted");
    let mut evictions = Evictions::default();
    let mut looks = app.outside.every(LOOK_EVERY);
    loop {
        looks.tick().await;
        if !app.lead.leading.is_here() {
            continue;
        }
        let (ledger, now) = (&app.ledger, app.clock.now());
        let over = ledger.over_limit_pods();
        for chosen in evictions.choose(over, |uid| ledger.reservation(uid).is_some(), now) {
            let pod = chosen.pod();
            let answer = match PodKey::of(pod) {
                Ok(key) if was_moved_there(app, &key, &chosen).await => {
                    tracing::info!(pod_uid = %pod.uid, %pod, device = %chosen.device, "not evicted: it was moved there, or cannot be read");
                    EvictionAnswer::Refused
                }
                Ok(key) => {
                    settle(app, &chosen, &app.writer.evict(&key, &pod.uid, EvictionRun::Real).await)
                }
                Err(error) => {
                    tracing::warn!(pod_uid = %pod.uid, %error, "cannot evict a pod of this name");
                    EvictionAnswer::Refused
                }
            };
            evictions.settle(&pod.uid, answer, app.clock.now());
        }
    }
}

/// Whether an earlier leader of the version before this one has moved a pod, which used no GPU, to the device where the
/// ledger has nothing for it: the watch may not show that yet.
async fn was_moved_there(app: &App, key: &PodKey, chosen: &OverLimitPod) -> bool {
    if chosen.seen.allowed != MemMib::ZERO || !chosen.held.may_borrow() {
        return false;
    }
    let Ok(read) = app.writer.read_back(key).await else { return true };
    let Some(seen) = read.map(|read| SeenPod::from_api(&read)) else { return false };
    let is_same = seen.pod.uid == chosen.pod().uid && app.is_of_earlier(&seen);
    let written = seen.placement.ok().flatten().filter(|_| is_same);
    written.is_some_and(|written| {
        let is_there = written.guest.as_ref().is_some_and(|guest| guest.on == chosen.device);
        is_there && written.at_home() == chosen.held.placement.at_home()
    })
}

/// Reports the outcome of an eviction.
fn settle(app: &App, chosen: &OverLimitPod, outcome: &EvictOutcome) -> EvictionAnswer {
    let (pod, node, device) = (chosen.pod(), &chosen.node, &chosen.device);
    let (used, allowed) = (chosen.seen.used, chosen.seen.allowed);
    let (result, answer) = match outcome {
        EvictOutcome::Evicted => {
            tracing::warn!(pod_uid = %pod.uid, %pod, %node, %device, %used, %allowed, "evicted: it used more GPU memory than it may");
            let note = format!(
                "evicted from node {node}: it used {used} of {device} and may use {allowed}, in {} \
                 lists of processes one after the other",
                chosen.seen.lists_over
            );
            app.tell(pod, NoticeReason::GpuEvicted, note);
            (EvictionResult::Evicted, EvictionAnswer::Ending)
        }
        EvictOutcome::Gone => (EvictionResult::Gone, EvictionAnswer::Ending),
        EvictOutcome::Blocked { message } => {
            tracing::info!(pod_uid = %pod.uid, %pod, message, "cannot evict an over-limit pod now");
            (EvictionResult::Blocked, EvictionAnswer::Refused)
        }
        EvictOutcome::Refused { code, message } => {
            tracing::error!(pod_uid = %pod.uid, %pod, code, message, "may not evict: apply deploy/evict.yaml");
            (EvictionResult::Failed, EvictionAnswer::Refused)
        }
        EvictOutcome::Undecided { cause } => {
            tracing::warn!(pod_uid = %pod.uid, %pod, %cause, "the outcome of an eviction is not known");
            (EvictionResult::Failed, EvictionAnswer::Open)
        }
    };
    app.metrics.evicted(EvictionReason::OverLimit, result);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::ledger::ledger_fixture::{bound, ledger};
    use wire::units::Timestamp;

    fn protection(text: &str) -> Protection {
        Protection::of(&Config::from_yaml(text).unwrap())
    }

    #[test]
    fn what_was_verified_holds_memory_else_the_guard_where_it_evicts() {
        let (idle, evicts) = (protection("guard:"), protection("guard: { evict: true }"));
        for (verified, held, guarded) in [
            (Mode::None, MemoryHolder::Nobody, MemoryHolder::Guard),
            (Mode::Mps, MemoryHolder::Mps, MemoryHolder::Mps),
            (Mode::Driver, MemoryHolder::Driver, MemoryHolder::Driver),
            (Mode::Mig, MemoryHolder::Mig, MemoryHolder::Mig),
            (Mode::Whole, MemoryHolder::Whole, MemoryHolder::Whole),
        ] {
            let isolation = TenantIsolation { configured: Mode::Driver, verified };
            let found = (idle.holder(isolation), evicts.holder(isolation));
            assert_eq!(found, (held, guarded), "{verified:?}");
        }
    }

    #[test]
    fn a_limit_that_is_configured_and_not_verified_is_named_and_does_not_count() {
        for (millionths, config, said) in [
            (500_000, "guard:", Some("memory held by: nobody")),
            (500_000, "guard: { evict: true }", Some("memory held by: guard")),
            (
                500_000,
                "webhook: { memory_limit: driver }",
                Some(
                    "memory held by: nobody, since the configured limit of the driver is not verified",
                ),
            ),
            (
                500_000,
                "{webhook: { memory_limit: mps }, guard: { evict: true }}",
                Some("memory held by: guard, since the configured limit of MPS is not verified"),
            ),
            (1_000_000, "webhook: { memory_limit: driver }", Some("memory held by: whole GPU")),
        ] {
            let ledger = ledger("A B");
            let fact = bound("p", "n", "A", millionths);
            ledger.see_pod(&fact, Timestamp::START);
            let (node, details) = (ledger.node("n").unwrap(), ledger.details("n"));
            let sentence = |uid| protection(config).sentence(&node, &details, &PodUid::new(uid));
            assert_eq!(sentence("p").as_deref(), said, "{config}");
            assert_eq!(sentence("q"), None, "it is not there");
        }
    }
}
