//! *bind*, the one command: reserve on today's books, then make device and node true in one write.
//!
//! Only a *definite* refusal by the API server takes the reservation back. While it is not known
//! whether a Binding was accepted, the reservation stays and the caller gets no answer: kube-scheduler
//! then times out by itself, which is better than an `Error` for a pod that is bound.

use std::sync::Arc;
use std::time::Duration;

use super::app::{App, ClusterTruth, Truth};
use super::protocol::{ExtenderBindingArgs, ExtenderBindingResult, ProtocolError};
use super::turns::Turn;
use super::verbs::VerbAnswer;
use crate::cluster::mps::ClientLimits;
use crate::cluster::pod::SeenPod;
use crate::cluster::target::{BindTarget, PodKey, TargetError};
use crate::cluster::write::{BindOutcome, Cause, Settled};
use crate::config::webhook::MemoryLimit;
use crate::ledger::commands::ReserveError;
use crate::ledger::reading::Readiness;
use crate::metrics::{BindResult, Outcome};
use crate::packing::device::{NodeName, PodUid};
use crate::packing::figures::Size;
use crate::packing::reservation::Placement;

/// Times a Binding is posted again after the pod changed under it: each needs a further change of
/// the pod within milliseconds, so a third is hardly ever seen.
const ATTEMPTS: u32 = 4;

/// Pause before the API server is asked again about an undecided Binding.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// How long a bind stays with its caller while undecided; then the background loop goes on alone.
/// Longer than any sensible `httpTimeout` of kube-scheduler.
const STAY_FOR: Duration = Duration::from_secs(60);

/// Why a bind failed; nothing is bound by it.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Pods or nodes are not listed yet.
    #[error("gpupack is warming up")]
    WarmingUp,
    /// The pod is not known and cannot be read.
    #[error("pod `{pod}` cannot be read: {cause}")]
    Unreadable {
        /// Namespace and name.
        pod: String,
        /// What the API server said.
        cause: Cause,
    },
    /// The pod of that name has another UID, or none of that name is left.
    #[error("pod `{pod}` with this UID is gone")]
    Gone {
        /// Namespace and name.
        pod: String,
    },
    /// The pod's GPU request is refused.
    #[error("{0}")]
    Request(&'static str),
    /// The books refuse.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The Binding cannot be written safely.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The pod is bound to another node.
    #[error("pod is already bound to another node")]
    BoundElsewhere,
    /// The API server refuses the Binding.
    #[error("the API server refuses the Binding with code {code}: {message}")]
    Refused {
        /// HTTP status.
        code: u16,
        /// Its message.
        message: String,
    },
    /// The pod kept changing while it was bound.
    #[error("pod keeps changing while it is bound")]
    Unsteady,
    /// Whether it is bound cannot be found out.
    #[error("the API server does not say whether the pod is bound")]
    Undecided,
}

impl BindError {
    fn result(&self) -> BindResult {
        match self {
            Self::Reserve(_) | Self::BoundElsewhere | Self::Unsteady => BindResult::Conflict,
            Self::Undecided => BindResult::Undecided,
            Self::WarmingUp
            | Self::Unreadable { .. }
            | Self::Gone { .. }
            | Self::Request(_)
            | Self::Target(_)
            | Self::Refused { .. } => BindResult::Refused,
        }
    }
}

/// Answers *bind*. The work goes on when the caller hangs up.
///
/// # Errors
/// [`ProtocolError`] for a body that is no binding.
pub async fn bind(app: &Arc<App>, body: &[u8]) -> Result<VerbAnswer, ProtocolError> {
    let args = ExtenderBindingArgs::parse(body)?;
    let worker = Arc::clone(app);
    let task = tokio::spawn(async move {
        let result = bind_pod(&worker, &args).await;
        match &result {
            Ok(()) => worker.metrics.bind(BindResult::Bound),
            Err(error) => {
                worker.metrics.bind(error.result());
                tracing::warn!(
                    pod_uid = %args.pod_uid, pod = %args.pod_name, node = %args.node, %error,
                    "bind failed"
                );
            }
        }
        result
    });
    let error = match task.await {
        Ok(Ok(())) => String::new(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the bind was given up because of a fault in gpupack".to_owned(),
    };
    let outcome = if error.is_empty() { Outcome::Ok } else { Outcome::Refused };
    Ok((ExtenderBindingResult { error }.to_json(), outcome))
}

async fn bind_pod(app: &Arc<App>, args: &ExtenderBindingArgs) -> Result<(), BindError> {
    if app.readiness() != Readiness::Ready {
        return Err(BindError::WarmingUp);
    }
    let uid = PodUid::new(args.pod_uid.as_str());
    let mut turn = app.binds.take(&uid).await;
    if is_in_the_books(app, &uid, &args.node) {
        return Ok(()); // a repeated call
    }
    let known = app.pending.get(&uid).map(|pod| Arc::clone(&pod));
    let pod = match known {
        Some(pod) => pod,
        None => read_pod(app, args).await?,
    };
    if let Err(error) = &pod.request {
        return Err(BindError::Request(error.reason()));
    }
    let node = NodeName::new(args.node.as_str());
    let Some(question) = app.question(&pod) else {
        let Truth::Cluster(cluster) = &app.truth else { return Err(gone(&pod.pod)) };
        return decide(app, cluster, &mut turn, &pod, |pod| BindTarget::without_gpu(pod, &node))
            .await;
    };
    app.outbox.push(app.ledger.drop_claim_elsewhere(&uid, &args.node));
    let placement = app.ledger.reserve(&pod.pod, &args.node, &question, app.clock.now())?;
    match &app.truth {
        Truth::Books => app.ledger.confirm(&uid),
        Truth::Cluster(cluster) => {
            let limits = client_limits(app, &placement);
            let target = |pod: &SeenPod| BindTarget::new(pod, &placement, &limits);
            decide(app, cluster, &mut turn, &pod, target).await?;
            app.tell_placed(&pod, &placement);
        }
    }
    app.settle_pod(&uid);
    let created = u64::try_from(pod.created_unix_seconds).unwrap_or(0);
    if let Ok(Some(request)) = &pod.request
        && created > 0
    {
        let waited = app.clock.unix_seconds().saturating_sub(created);
        app.metrics.placed(Size::of(request), waited);
    }
    let devices: Vec<&str> = placement.devices.iter().map(|device| device.id.as_str()).collect();
    tracing::info!(
        pod_uid = %uid, pod = %pod.pod, %node, devices = devices.join(","), "placed"
    );
    Ok(())
}

/// The limits that the containers of a pod get with `placement`.
pub(super) fn client_limits(app: &App, placement: &Placement) -> ClientLimits {
    let settings = &app.config.webhook;
    let [placed] = &placement.devices[..] else { return ClientLimits::default() };
    if settings.memory_limit != MemoryLimit::Mps {
        return ClientLimits::default();
    }
    let node = app.ledger.node(placement.node.as_str());
    let books =
        node.as_ref().and_then(|node| node.devices().iter().find(|it| it.device().id == placed.id));
    let model = books.map(|books| &books.device().model);
    ClientLimits::of(placed.demand, model, settings.thread_cap)
}

/// Whether the books, where they are the truth, have the pod on this node already.
fn is_in_the_books(app: &App, uid: &PodUid, node: &str) -> bool {
    let Truth::Books = app.truth else { return false };
    app.ledger.reservation(uid).is_some_and(|held| held.placement.node.as_str() == node)
}

/// Reads a pod that neither the watch nor a verb has shown yet.
async fn read_pod(app: &App, args: &ExtenderBindingArgs) -> Result<Arc<SeenPod>, BindError> {
    let pod = format!("{}/{}", args.pod_namespace, args.pod_name);
    let Truth::Cluster(cluster) = &app.truth else { return Err(BindError::Gone { pod }) };
    let key = PodKey::new(&args.pod_namespace, &args.pod_name)?;
    let found = match cluster.writer.read_back(&key).await {
        Err(cause) => return Err(BindError::Unreadable { pod, cause }),
        Ok(found) => found.map(|found| SeenPod::from_api(&found)),
    };
    let same = found.filter(|seen| seen.pod.uid.as_str() == args.pod_uid);
    same.map(Arc::new).ok_or(BindError::Gone { pod })
}

/// Posts the Binding that `target` makes of the pod until it is decided, and brings the books in line.
/// A pod without a GPU request is in no book, and is bound as kube-scheduler itself would.
async fn decide(
    app: &Arc<App>,
    cluster: &ClusterTruth,
    turn: &mut Turn<'_>,
    pod: &SeenPod,
    target: impl Fn(&SeenPod) -> Result<BindTarget, TargetError>,
) -> Result<(), BindError> {
    let mut pod = pod.clone();
    for _ in 0..ATTEMPTS {
        let target = match target(&pod) {
            Ok(target) => target,
            Err(error) => return Err(taken_back(app, turn, &pod.pod.uid, error.into())),
        };
        *turn.on_its_way = Some(target.clone());
        app.unseen_binds.insert(target.uid().clone(), app.clock.precise());
        match cluster.writer.bind(&target).await {
            BindOutcome::Bound => {
                settled_bound(app, turn, target.uid());
                return Ok(());
            }
            BindOutcome::Gone => {
                return Err(taken_back(app, turn, target.uid(), gone(target.key())));
            }
            BindOutcome::Refused { code, message } => {
                return Err(taken_back(
                    app,
                    turn,
                    target.uid(),
                    BindError::Refused { code, message },
                ));
            }
            BindOutcome::Conflict => {}
            BindOutcome::Undecided { cause } => {
                tracing::warn!(pod_uid = %target.uid(), %cause, "Binding is undecided");
            }
        }
        if settle(app, cluster, turn, &target).await? {
            return Ok(());
        }
        pod = unbound_again(app, cluster, turn, &target, &pod).await?;
    }
    Err(taken_back(app, turn, &pod.pod.uid, BindError::Unsteady))
}

/// Finds out what became of a Binding: whether the pod is bound as decided. If not, this Binding can
/// no longer succeed.
async fn settle(
    app: &Arc<App>,
    cluster: &ClusterTruth,
    turn: &mut Turn<'_>,
    target: &BindTarget,
) -> Result<bool, BindError> {
    let started = app.clock.now();
    loop {
        match cluster.writer.settle(target).await {
            Settled::Bound { .. } => {
                settled_bound(app, turn, target.uid());
                return Ok(true);
            }
            Settled::NotBound => return Ok(false),
            Settled::BoundElsewhere { .. } => {
                return Err(taken_back(app, turn, target.uid(), BindError::BoundElsewhere));
            }
            Settled::Gone => return Err(taken_back(app, turn, target.uid(), gone(target.key()))),
            Settled::StillUndecided { cause } => {
                tracing::warn!(pod_uid = %target.uid(), %cause, "Binding is still undecided");
                if app.clock.now().since(started) >= STAY_FOR {
                    return Err(BindError::Undecided); // the background loop goes on
                }
                tokio::time::sleep(ASK_AGAIN_AFTER).await;
            }
        }
    }
}

/// The pod in its newest version, for another try: it must still ask for the same.
async fn unbound_again(
    app: &App,
    cluster: &ClusterTruth,
    turn: &mut Turn<'_>,
    target: &BindTarget,
    before: &SeenPod,
) -> Result<SeenPod, BindError> {
    let uid = target.uid();
    let read = match cluster.writer.read_back(target.key()).await {
        Err(cause) => {
            let pod = target.key().to_string();
            return Err(taken_back(app, turn, uid, BindError::Unreadable { pod, cause }));
        }
        Ok(read) => read.map(|pod| SeenPod::from_api(&pod)),
    };
    let Some(pod) = read.filter(|pod| pod.pod.uid == *uid) else {
        return Err(taken_back(app, turn, uid, gone(target.key())));
    };
    if pod.node.is_some() {
        return Err(taken_back(app, turn, uid, BindError::BoundElsewhere));
    }
    if pod.request != before.request {
        return Err(taken_back(app, turn, uid, BindError::Unsteady));
    }
    Ok(pod)
}

/// Asks about Bindings that no caller waits for any more.
pub async fn settle_abandoned(app: &Arc<App>) {
    let Truth::Cluster(cluster) = &app.truth else { return };
    for uid in app.binds.abandoned() {
        let turn = &mut app.binds.take(&uid).await;
        let Some(target) = turn.on_its_way.clone() else { continue };
        match cluster.writer.settle(&target).await {
            Settled::Bound { .. } => settled_bound(app, turn, &uid),
            Settled::NotBound | Settled::BoundElsewhere { .. } | Settled::Gone => {
                taken_back(app, turn, &uid, BindError::Undecided);
            }
            Settled::StillUndecided { .. } => {}
        }
    }
}

fn settled_bound(app: &App, turn: &mut Turn<'_>, uid: &PodUid) {
    app.ledger.confirm(uid);
    *turn.on_its_way = None;
}

fn taken_back(app: &App, turn: &mut Turn<'_>, uid: &PodUid, error: BindError) -> BindError {
    app.unseen_binds.remove(uid);
    *turn.on_its_way = None;
    app.outbox.push(app.ledger.forget(uid));
    error
}

fn gone(pod: &impl ToString) -> BindError {
    BindError::Gone { pod: pod.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::config::Config;
    use crate::ledger::fixture::ledger;
    use crate::packing::device::DeviceId;
    use crate::packing::request::Demand;
    use crate::packing::reservation::{PlacedDevice, Protection};
    use crate::packing::units::{MemMib, Share};

    /// The limits that are written for so much of each of these devices.
    fn limits(settings: &str, devices: &[&str]) -> String {
        let config = Config::from_yaml(&format!("webhook: {{{settings}}}")).unwrap();
        let app = App::new(Arc::new(ledger("A")), Clock::start(), config, Truth::Books);
        let demand = Demand { memory: MemMib::new(250), share: Share::from_millionths(255_000) };
        let id = |name: &&str| PlacedDevice { id: DeviceId::new(name).unwrap(), demand };
        let devices = devices.iter().map(id).collect();
        let placement =
            Placement { node: NodeName::new("n"), devices, protection: Protection::None };
        let written = client_limits(&app, &placement).annotations();
        written.into_values().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn limits_of_clients_are_written_where_they_are_configured() {
        let capped = "memory_limit: mps, mps_thread_percentage: share";
        for (settings, devices, written) in [
            ("", &["A"][..], ""),
            ("memory_limit: driver", &["A"], ""),
            ("memory_limit: mps", &["A"], "0=250M"),
            ("memory_limit: mps", &["A", "B"], ""),
            (capped, &["A"], "0=250M 25"),
            (capped, &["gone"], "0=250M 100"),
        ] {
            assert_eq!(limits(settings, devices), written, "{settings} {devices:?}");
        }
    }
}
