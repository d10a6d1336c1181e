//! The fence at the start of a term, before the first call is answered.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;

use crate::shared::app::App;
use crate::shared::in_flight::{HeldPod, NamedPod};
use engine::model::reservation::PodRef;
use kube_api::write::outcome::Fenced;
use kube_api::write::target::PodKey;
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};

/// Pause before the next look whether pods and nodes are listed.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Pause before a pod is fenced again.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Pods that are fenced concurrently at the start.
const FENCED_AT_ONCE: usize = 32;

/// How long a pod that cannot be fenced may delay the start, for instance while an admission
/// webhook is down. The API server gives each request 60 seconds (`--request-timeout`), so a
/// request of a dead process has ended by then.
const FENCE_FOR: Duration = Duration::from_secs(90);

/// Longest time of a list of all pods at the start of a term.
const LISTED_WITHIN: Duration = Duration::from_secs(60);

/// Which Bindings of earlier processes may still arrive.
pub(crate) enum Scope {
    /// Those of any pod that waits.
    All,
    /// Those of these pods; the last leader said so.
    Known {
        bindings: Vec<NamedPod>,
        /// The holds of that leader.
        holds: Vec<HeldPod>,
    },
}

/// A pod to fence, and what the last leader said of it.
type Pending = (PodRef, Option<NamedPod>);

/// Fences every Binding that an earlier process may have left on its way, before the first call is
/// answered. A Binding names the version of its pod, and a write to the pod ends that version. If a
/// pod cannot be written, time has to pass instead. Without the fence, room that such a Binding
/// takes could be given away twice.
///
/// False if pods cannot be listed: another replica may be able to.
pub(crate) async fn fence(app: &Arc<App>, scope: Scope) -> bool {
    if mutated(Mutation::NoStartFence) {
        app.lead.set_fenced();
        return true;
    }
    if app.lead.replica.is_some() && matches!(scope, Scope::All) {
        // The watch may be behind what the earlier process did; a list that begins now is not.
        let listed = app.pods.lists.completed(app.pods.lists.want());
        if app.outside.within(LISTED_WITHIN, listed).await.is_none() {
            tracing::error!("pods could not be listed: this replica cannot lead");
            return false;
        }
        // Pods may have run unseen that the list no longer has.
        app.ledger.wait_for_reports(None);
    }
    while !app.ledger.is_listed() {
        app.outside.sleep(LOOK_EVERY).await;
    }
    let mut pending: Vec<Pending> = match &scope {
        // Also pods whose request is refused now: an earlier process may have accepted it.
        Scope::All => app.pods.pending.iter().map(|pod| (pod.pod.clone(), None)).collect(),
        Scope::Known { .. } if mutated(Mutation::KnownUnfenced) => Vec::new(),
        Scope::Known { bindings, .. } => {
            bindings.iter().map(|pod| (pod.pod(), Some(pod.clone()))).collect()
        }
    };
    pending.sort(); // in an order that can be replayed
    let count = pending.len();
    let value = format!("start-{}", app.clock.unix_seconds());
    futures::stream::iter(pending)
        .for_each_concurrent(FENCED_AT_ONCE, |pod| {
            let value = &value;
            async move {
                let mut tried_for = Duration::ZERO;
                while !fence_waiting(app, &pod, value).await && tried_for < FENCE_FOR {
                    app.outside.sleep(AGAIN_AFTER).await;
                    if app.writer.term().is_valid() {
                        tried_for += AGAIN_AFTER; // else no write was tried
                    }
                }
            }
        })
        .await;
    tracing::info!(pods = count, "Bindings of earlier processes can no longer land");
    if let Scope::Known { holds, .. } = scope {
        take_over(app, holds);
    }
    app.lead.set_fenced();
    true
}

/// Takes over the holds of the last leader.
fn take_over(app: &App, holds: Vec<HeldPod>) {
    let now = app.clock.now();
    for HeldPod { uid, node } in holds {
        let uid = PodUid::new(uid);
        let pod = app.pods.pending.get(&uid).map(|pod| Arc::clone(&pod));
        if let Some(query) = pod.and_then(|pod| app.query(&pod)) {
            app.outbox.push(app.ledger.hold(&uid, &node, &query, now));
        }
    }
}
/// Fences a waiting pod at the start. True if no Binding of an earlier run can succeed any more.
/// One that succeeded meanwhile is in the ledger by then.
async fn fence_waiting(app: &App, (pod, named): &Pending, value: &str) -> bool {
    let Ok(key) = PodKey::of(pod) else { return true };
    let lists = app.pods.lists.count();
    match app.writer.fence_pod(&key, &pod.uid, None, value).await {
        Fenced::Waiting { .. } => true,
        Fenced::Gone => {
            app.settle_pod(&pod.uid); // the watch is late
            let named = named.as_ref().filter(|_| app.ledger.reservation(&pod.uid).is_none());
            if let Some(NamedPod { node, .. }) = named {
                app.ledger.wait_for_reports(node.as_deref()); // it may have run unseen
            }
            true
        }
        Fenced::Bound { pod } => {
            if !mutated(Mutation::BoundAtStartUnseen) {
                app.see_bound(&pod);
            }
            let is_late = lists.is_none() || app.pods.lists.count() != lists;
            if is_late && !mutated(Mutation::LateFenceBelieved) {
                app.pods.lists.want(); // the last one may lack it, so that nothing would say that it ends
            }
            true
        }
        Fenced::Open { pod: Some(now), cause } if now.annotations.full().is_some() => {
            // An earlier run cannot bind it in this version either, and older versions have ended.
            tracing::warn!(pod_uid = %pod.uid, %pod, %cause, "a pod's annotations are full: it cannot get a placement");
            true
        }
        Fenced::Open { cause, .. } => {
            tracing::warn!(pod_uid = %pod.uid, %cause, "could not fence a pod: is the role allowed to `patch` pods, does a webhook refuse it?");
            mutated(Mutation::RefusedFenceCounts)
        }
    }
}
