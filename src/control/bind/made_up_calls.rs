//! Limits what made-up calls of *bind* cost: most are refused without a call of the API server, and
//! only a few of the others read at once.

use std::sync::Arc;
use std::time::Duration;

use crate::shared::app::App;
use crate::shared::bind_error::BindError;
use crate::shared::passed::{PASSED_FOR, Verdict};
use kube_api::pod::seen_pod::SeenPod;
use kube_api::protocol::messages::ExtenderBindingArgs;
use kube_api::write::target::PodKey;
use wire::ids::PodUid;

/// How long a bind waits for its permit to read the pod.
const READ_WITHIN: Duration = Duration::from_secs(1);

/// Whether *filter* passed the pod on the node. For `PASSED_FOR` after this process began to
/// lead another one may have done so; then the reservation decides, or that a pod without a GPU waits.
pub(crate) fn check_passed(app: &App, uid: &PodUid, node: &str) -> Result<(), BindError> {
    let now = app.clock.now();
    let is_young = now.since(app.lead.since()) < PASSED_FOR;
    match app.binding.passed.verdict(uid, node, now) {
        Verdict::Passed => Ok(()),
        Verdict::Unknown if is_young => Ok(()),
        Verdict::Elsewhere | Verdict::Unknown => Err(BindError::NotPassed),
    }
}

/// The same, earlier, for a pod that may be made up: only the caller has named it so far.
pub(crate) fn check_made_up(app: &App, uid: &PodUid, node: &str) -> Result<(), BindError> {
    let is_held_there =
        || app.ledger.reservation(uid).is_some_and(|held| held.placement.node.as_str() == node);
    if app.pods.pending.contains_key(uid) || app.binding.binds.has(uid) || is_held_there() {
        return Ok(());
    }
    check_passed(app, uid, node)
}

/// Whether the watch shows the pod waiting, maybe with scheduling gates: it is not made up.
pub(crate) fn is_shown(app: &App, uid: &PodUid) -> bool {
    app.pods.is_shown_waiting(uid) || app.pods.gated.contains_key(uid)
}

/// Reads a pod that the watch does not show waiting for a GPU yet.
pub(crate) async fn read_pod(
    app: &App,
    args: &ExtenderBindingArgs,
) -> Result<Arc<SeenPod>, BindError> {
    let pod = format!("{}/{}", args.pod_namespace, args.pod_name);
    let key = PodKey::new(&args.pod_namespace, &args.pod_name)?;
    let is_shown = is_shown(app, &PodUid::new(args.pod_uid.as_str()));
    let read = app.binding.binds.limits.reads(is_shown).acquire();
    let read = app.outside.within(READ_WITHIN, read).await;
    let Some(Ok(_read)) = read else { return Err(BindError::TooMany) };
    let found = match app.writer.read_back(&key).await {
        Err(cause) => return Err(BindError::Unreadable { pod, cause }),
        Ok(found) => found.map(|found| SeenPod::judged(&found, &app.request_rules)),
    };
    let same = found.filter(|seen| seen.pod.uid.as_str() == args.pod_uid);
    same.map(Arc::new).ok_or(BindError::Gone { pod })
}
