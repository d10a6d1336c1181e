//! Why a *bind* failed, as kube-scheduler is told.

use crate::kube_api::write::outcome::Cause;
use crate::kube_api::write::target::TargetError;
use crate::ledger::change::commits::ReserveError;
use crate::metrics::labels::BindResult;

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
    /// The pod is for another scheduler.
    #[error("the pod is for scheduler `{scheduler}`, which is not one of `scheduler_names`")]
    NotOurs {
        /// That scheduler.
        scheduler: String,
    },
    /// The pod has scheduling gates.
    #[error("the pod has scheduling gates")]
    Gated,
    /// *Filter* did not pass the pod there.
    #[error("filter did not pass the pod on this node within the last 15 minutes")]
    NotPassed,
    /// Too many binds go on.
    #[error("too many binds go on at once")]
    TooMany,
    /// The process was asked to stop.
    #[error("gpupack is stopping")]
    Stopping,
    /// The answer could come after the caller has given up.
    #[error("no time is left to bind the pod before kube-scheduler gives up")]
    TooLate,
    /// Another process of gpupack has touched the pod.
    #[error("another gpupack process is responsible for the pod")]
    OtherProcess,
    /// A Binding of an earlier process might still land.
    #[error("Bindings of an earlier gpupack process cannot be ruled out: {cause}")]
    Unfenced {
        /// Why the pod could not be touched.
        cause: Cause,
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
    /// The metric of a bind that ended so.
    pub fn result(&self) -> BindResult {
        match self {
            Self::Reserve(_) | Self::BoundElsewhere | Self::Unsteady | Self::OtherProcess => {
                BindResult::Conflict
            }
            Self::Undecided => BindResult::Undecided,
            Self::WarmingUp
            | Self::Unreadable { .. }
            | Self::Gone { .. }
            | Self::NotOurs { .. }
            | Self::Gated
            | Self::NotPassed
            | Self::TooMany
            | Self::Stopping
            | Self::TooLate
            | Self::Unfenced { .. }
            | Self::Request(_)
            | Self::Target(_)
            | Self::Refused { .. } => BindResult::Refused,
        }
    }
}
