//! What goes on between the questions: time passes, room appears, Bindings get settled, the books are
//! audited. Each loop ends when `stop` says so.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::sync::watch;

use super::app::{App, Truth, rooms};
use super::bind::settle_abandoned;
use crate::cluster::events::NoticeReason;
use crate::cluster::target::PodKey;
use crate::cluster::write::TouchOutcome;
use crate::ledger::effect::Effect;
use crate::ledger::reading::Readiness;
use crate::ledger::waiting::WaitingPod;
use crate::packing::device::{NodeName, PodUid};
use crate::packing::units::Timestamp;

/// Beat of the slow loop: silence, claims and drains are exact to this.
const BEAT: Duration = Duration::from_secs(1);

/// Beats between two audits of the whole ledger.
const AUDIT_EVERY: u64 = 60;

/// Pods that are touched at once at the start.
const TOUCHES_AT_ONCE: usize = 32;

/// Room that appears within this time is handled together: one event of the API server often brings
/// several.
const GATHER_FOR: Duration = Duration::from_millis(10);

/// A pod that was woken and is still waiting after this time will not take the room: kube-scheduler
/// asks within milliseconds, in-tree filters or a queue of thousands may hold it longer.
const NEXT_AFTER: Duration = Duration::from_secs(2);

/// Runs all loops until `stop`.
pub async fn run(app: Arc<App>, stop: watch::Receiver<bool>) {
    let mut stop = stop;
    tokio::select! {
        () = beats(&app) => {}
        () = async { fence(&app).await; std::future::pending::<()>().await } => {}
        () = effects(&app) => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

/// Makes every Binding that an earlier run may have left on its way conflict, before the first
/// question is answered: it asks for the version of its pod that was decided on, and a touch ends that
/// version. Room that such a Binding would take could otherwise be given away twice.
async fn fence(app: &Arc<App>) {
    let Truth::Cluster(cluster) = &app.truth else { return app.set_fenced() };
    while app.ledger.readiness(app.clock.now()) == Readiness::NotListed {
        tokio::time::sleep(GATHER_FOR).await;
    }
    let pending: Vec<WaitingPod> =
        app.waiting.all().into_iter().map(|state| state.waiting).collect();
    let count = pending.len();
    let value = format!("start-{}", app.clock.unix_seconds());
    futures::stream::iter(pending)
        .for_each_concurrent(TOUCHES_AT_ONCE, |pod| {
            let value = &value;
            async move {
                let Ok(key) = PodKey::new(&pod.namespace, &pod.name) else { return };
                loop {
                    match cluster.writer.touch(&key, &pod.pod.uid, None, value).await {
                        TouchOutcome::Undecided { cause } => {
                            tracing::warn!(pod_uid = %pod.pod.uid, %cause, "could not fence a pod");
                            tokio::time::sleep(BEAT).await;
                        }
                        TouchOutcome::Touched { .. }
                        | TouchOutcome::Conflict
                        | TouchOutcome::Gone => return,
                        TouchOutcome::Refused { code, message } => {
                            tracing::error!(pod_uid = %pod.pod.uid, code, message, "may not fence a pod: the role needs `patch` on pods");
                            return;
                        }
                    }
                }
            }
        })
        .await;
    tracing::info!(pods = count, "Bindings of an earlier run can land no more");
    app.set_fenced();
}

async fn beats(app: &Arc<App>) {
    let mut interval = tokio::time::interval(BEAT);
    let mut was_ready = false;
    for beat in 0_u64.. {
        interval.tick().await;
        let now = app.clock.now();
        app.outbox.push(app.ledger.tick(now));
        app.forget_unseen();
        settle_abandoned(app).await;
        if beat.is_multiple_of(AUDIT_EVERY) {
            audit(app);
        }
        let is_ready = app.readiness() == Readiness::Ready;
        if is_ready != was_ready {
            tracing::info!(is_ready, "readiness changed");
            was_ready = is_ready;
        }
    }
}

/// Compares the derived sums of every node with what they are derived from.
fn audit(app: &App) {
    let faults = app.ledger.audit().err().unwrap_or_default();
    app.metrics.audited(faults.len());
    for fault in faults {
        tracing::error!(%fault, "the ledger's own arithmetic is broken, please report this");
    }
}

async fn effects(app: &Arc<App>) {
    let mut wakes = Wakes::default();
    loop {
        let taken = tokio::select! {
            taken = app.outbox.take() => taken,
            () = tokio::time::sleep(wakes.rest(app.clock.now())) => Vec::new(),
        };
        if !taken.is_empty() {
            tokio::time::sleep(GATHER_FOR).await;
        }
        for effect in &taken {
            tell(app, effect);
        }
        let now = app.clock.now();
        wakes.room(rooms(&taken), now);
        for pod in wakes.due(app, now) {
            wake(app, pod);
        }
    }
}

fn tell(app: &App, effect: &Effect) {
    match effect {
        Effect::Room(_) => {}
        Effect::Overbooked { node, device } => {
            tracing::error!(%node, %device, "more is booked on a device than it has: bound by others, a smaller replacement, or a forged annotation");
            let note = format!(
                "its device {device} on node {node} holds more than it has: nothing more is placed there, nothing is taken away"
            );
            for pod in app.ledger.tenants(node.as_str(), device) {
                app.tell(&pod, NoticeReason::Overbooked, note.clone());
            }
        }
        Effect::Unplaced { pod, node } => {
            tracing::warn!(pod_uid = %pod.uid, %pod, %node, "a pod with a GPU request runs without a placement of gpupack: only its observed use counts");
            let note = format!(
                "runs on node {node} without a placement of gpupack: it counts only by the memory that it is seen to use"
            );
            app.tell(pod, NoticeReason::PlacedByOthers, note);
        }
        Effect::Silent(node) => {
            tracing::warn!(%node, "the node's agent is silent: the node takes no new pods");
        }
    }
}

/// Touches a waiting pod, so that kube-scheduler looks at it again.
fn wake(app: &Arc<App>, pod: WaitingPod) {
    app.metrics.woke();
    tracing::debug!(pod_uid = %pod.pod.uid, pod = %pod.pod, "woken: room appeared");
    let app = Arc::clone(app);
    tokio::spawn(async move {
        let Truth::Cluster(cluster) = &app.truth else { return };
        let Ok(key) = PodKey::new(&pod.namespace, &pod.name) else { return };
        let value = format!("wake-{}-{}", app.clock.unix_seconds(), app.clock.now().millis());
        let touched = cluster.writer.touch(&key, &pod.pod.uid, None, &value).await;
        if let TouchOutcome::Refused { .. } | TouchOutcome::Undecided { .. } = touched {
            tracing::warn!(pod_uid = %pod.pod.uid, pod = %pod.pod, ?touched, "could not wake a waiting pod");
        }
    });
}

/// Nodes with new room, and the pods that were woken for it. One pod at a time is woken per node; the
/// next one only when the first did not take the room, so that nothing is woken in vain.
#[derive(Default)]
struct Wakes {
    nodes: BTreeMap<NodeName, Chain>,
}

/// The pods woken for the room of one node.
struct Chain {
    tried: BTreeSet<PodUid>,
    last: Option<PodUid>,
    due: Timestamp,
}

impl Wakes {
    fn room(&mut self, nodes: Vec<NodeName>, now: Timestamp) {
        for node in nodes {
            self.nodes.insert(node, Chain { tried: BTreeSet::new(), last: None, due: now });
        }
    }

    /// How long until a chain is due.
    fn rest(&self, now: Timestamp) -> Duration {
        let next = self.nodes.values().map(|chain| chain.due).min();
        next.map_or(Duration::from_secs(3600), |due| due.since(now))
    }

    /// The pods to wake now.
    fn due(&mut self, app: &App, now: Timestamp) -> Vec<WaitingPod> {
        let mut due: Vec<NodeName> = Vec::new();
        self.nodes.retain(|node, chain| {
            let is_taken = chain.last.as_ref().is_some_and(|last| app.waiting.pod(last).is_none());
            if chain.due <= now && !is_taken {
                due.push(node.clone());
            }
            !is_taken
        });
        let mut woken = Vec::new();
        for node in due {
            let Some(chain) = self.nodes.get_mut(&node) else { continue };
            match app.waiting.to_wake(&app.ledger, &node, &chain.tried, now) {
                Some(pod) => {
                    chain.tried.insert(pod.pod.uid.clone());
                    chain.last = Some(pod.pod.uid.clone());
                    chain.due = now.plus(NEXT_AFTER);
                    woken.push(pod);
                }
                None => {
                    self.nodes.remove(&node);
                }
            }
        }
        woken
    }
}
