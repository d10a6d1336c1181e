//! The fence at the start of the process, before the first call is answered.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;

use crate::control::shared::app::{App, ClusterTruth, Truth};
use crate::kube_api::write::outcome::Fenced;
use crate::kube_api::write::target::PodKey;
use crate::model::reservation::PodRef;

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

/// Fences every Binding that an earlier run may have left on its way, before the first call is
/// answered. A Binding names the version of its pod, and a write to the pod ends that version. If a
/// pod cannot be written, time has to pass instead. Without the fence, room that such a Binding
/// takes could be given away twice.
pub(crate) async fn fence(app: &Arc<App>) {
    let Truth::Cluster(cluster) = &app.truth else { return app.set_fenced() };
    while !app.ledger.is_listed() {
        app.outside.sleep(LOOK_EVERY).await;
    }
    let started = app.clock.now();
    // Also pods whose request is refused now: an earlier run may have accepted it.
    let mut pending: Vec<PodRef> = app.pending.iter().map(|pod| pod.pod.clone()).collect();
    pending.sort(); // in an order that can be replayed
    let count = pending.len();
    let value = format!("start-{}", app.clock.unix_seconds());
    futures::stream::iter(pending)
        .for_each_concurrent(FENCED_AT_ONCE, |pod| {
            let value = &value;
            async move {
                while !fence_waiting(app, cluster, &pod, value).await
                    && app.clock.now().since(started) < FENCE_FOR
                {
                    app.outside.sleep(AGAIN_AFTER).await;
                }
            }
        })
        .await;
    tracing::info!(pods = count, "Bindings of an earlier run can no longer land");
    app.set_fenced();
}

/// Fences a waiting pod at the start. True if no Binding of an earlier run can succeed any more.
/// One that succeeded meanwhile is in the ledger by then.
async fn fence_waiting(app: &App, cluster: &ClusterTruth, pod: &PodRef, value: &str) -> bool {
    let Ok(key) = PodKey::of(pod) else { return true };
    match cluster.writer.fence_pod(&key, &pod.uid, None, value).await {
        Fenced::Waiting { .. } | Fenced::Gone => true,
        Fenced::Bound { pod } => {
            app.see_bound(&pod);
            true
        }
        Fenced::Open { pod: Some(now), cause } if now.full_annotations().is_some() => {
            // An earlier run cannot bind it in this version either, and older versions have ended.
            tracing::warn!(pod_uid = %pod.uid, %pod, %cause, "a pod's annotations are full: it cannot get a placement");
            true
        }
        Fenced::Open { cause, .. } => {
            tracing::warn!(pod_uid = %pod.uid, %cause, "could not fence a pod: is the role allowed to `patch` pods, does a webhook refuse it?");
            false
        }
    }
}
