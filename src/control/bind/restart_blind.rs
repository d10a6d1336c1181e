//! Restarts the container of a pod that started without its GPU, where the pod allows it (`gpupack.dev/movable:
//! restart`): the runtime then makes it again, with the driver that was loaded since. The CPU request is changed in
//! place, as for moves.
//!
//! A process that stops in between leaves nothing behind. The next leader restarts none of the pods whose owners
//! have the event already.

use std::sync::Arc;

use crate::bind::recall::{Ends, Next, Read, Resized, STAY_FOR, read, resize};
use crate::shared::app::App;
use engine::model::reservation::PodRef;
use engine::usage::starts::Sight;
use kube_api::write::events::NoticeReason;
use kube_api::write::target::PodKey;

/// Restarts the container of a blind pod, in a task of its own.
pub(crate) fn restart_blind(app: &Arc<App>, pod: &PodRef) {
    let acts = app.lead.leading.is_here() && app.lead.is_fenced();
    if !acts || !app.room.moves.begin(&pod.uid) {
        return;
    }
    let (worker, pod) = (Arc::clone(app), pod.clone());
    app.outside.spawn(async move {
        let _ends = Ends { app: &worker, uid: &pod.uid };
        restart(&worker, &pod).await;
    });
}

async fn restart(app: &App, pod: &PodRef) {
    let Ok(key) = PodKey::of(pod) else { return };
    let began = app.clock.now();
    while app.clock.now().since(began) < STAY_FOR && app.lead.leading.is_here() {
        match step(app, pod, &key).await {
            Next::Done => return,
            Next::After(pause) => app.outside.sleep(pause).await,
        }
    }
}

async fn step(app: &App, pod: &PodRef, key: &PodKey) -> Next {
    let Some(held) = app.ledger.reservation(&pod.uid) else { return Next::Done };
    let is_blind = app.ledger.starts(held.placement.node.as_str()).of(&pod.uid) == Sight::Blind;
    if !is_blind || !app.room.moves.may_restart(&pod.uid, app.clock.now()) {
        return Next::Done;
    }
    let Read { seen, .. } = match read(app, pod, key).await {
        Ok(read) => read,
        Err(next) => return next,
    };
    if seen.containers.gpu.is_none() {
        return Next::Done; // its owner does not allow it, or kubelet would not restart it
    }
    match resize(app, (pod, key), &seen).await {
        Resized::Accepted | Resized::Undecided => {
            app.room.moves.restarted(&pod.uid, app.clock.now());
            tracing::info!(pod_uid = %pod.uid, %pod, "a container that started without its GPU is restarted");
            Next::Done
        }
        Resized::Not(next) => next,
        Resized::Refused(fault) => {
            let note = format!(
                "its container started without its GPU and cannot be restarted: {fault}; delete the pod"
            );
            app.tell(pod, NoticeReason::GpuMoveFailed, note);
            Next::Done
        }
    }
}
