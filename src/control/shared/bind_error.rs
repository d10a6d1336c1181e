//! Why a *bind* failed, in the words of the answer to kube-scheduler.

use crate::metrics::labels::BindResult;
use engine::ledger::change::commits::ReserveError;
use kube_api::write::outcome::Cause;
use kube_api::write::target::TargetError;

/// Why a bind failed, or why its outcome is not known.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Pods or nodes are not listed yet.
    #[error("gpupack is warming up")]
    WarmingUp,
    /// The pod is not known and cannot be read.
    #[error("pod `{pod}` cannot be read: {cause}")]
    Unreadable {
        pod: String,
        /// What the API server said.
        cause: Cause,
    },
    /// The pod of that name has another UID, or none of that name is left.
    #[error("pod `{pod}` with this UID is gone")]
    Gone { pod: String },
    /// The pod is for another scheduler.
    #[error("the pod is for scheduler `{scheduler}`, which is not one of `scheduler_names`")]
    NotOurs { scheduler: String },
    /// The pod has scheduling gates.
    #[error("the pod has scheduling gates")]
    Gated,
    /// *Filter* did not pass the pod there.
    #[error("filter did not pass the pod on this node within the last 15 minutes")]
    NotPassed,
    /// Too many binds go on.
    #[error("too many binds go on at once")]
    TooMany,
    #[error("gpupack is stopping")]
    Stopping,
    /// The answer could come after the caller has given up.
    #[error("no time is left to bind the pod before kube-scheduler gives up")]
    TooLate,
    /// Another gpupack process wrote the pod last.
    #[error("another gpupack process is responsible for the pod")]
    OtherProcess,
    /// A Binding of an earlier process might still succeed.
    #[error("Bindings of an earlier gpupack process cannot be ruled out: {cause}")]
    Unfenced {
        /// Why the pod could not be fenced.
        cause: Cause,
    },
    /// The pod's GPU request is refused.
    #[error("{0}")]
    Request(&'static str),
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// Pods that run there in free room have not left yet.
    #[error(
        "pods that borrow room of its GPUs are being moved: it is tried again when they have left"
    )]
    Recalling,
    /// Its MIG instance is not made yet.
    #[error("its MIG instance is being made: it is tried again when that is done")]
    Making,
    /// Its MIG instance could not be made.
    #[error(
        "its MIG instance could not be made: it is placed elsewhere, or tried again after a minute; \
         {}", agent_reports(.cause.as_deref())
    )]
    NotMade {
        /// What the agent reports, if it does.
        cause: Option<String>,
    },
    /// A device or MIG instance that was chosen for it is gone.
    #[error("a device that was chosen for it has gone meanwhile: it is tried again")]
    Lost,
    /// The Binding cannot be written safely.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The pod is bound to another node.
    #[error("pod is already bound to another node")]
    BoundElsewhere,
    /// The API server refuses the Binding.
    #[error("the API server refuses the Binding with code {code}: {message}")]
    Refused { code: u16, message: String },
    /// The pod kept changing during the bind.
    #[error("pod keeps changing while it is bound")]
    Unsteady,
    /// The API server does not say whether the pod is bound.
    #[error("the API server does not answer whether the pod is bound")]
    Undecided,
}

impl BindError {
    /// The metric of a bind that ended so.
    pub fn result(&self) -> BindResult {
        match self {
            Self::Reserve(_)
            | Self::Recalling
            | Self::Making
            | Self::NotMade { .. }
            | Self::Lost
            | Self::BoundElsewhere
            | Self::Unsteady
            | Self::OtherProcess => BindResult::Conflict,
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

/// Where the cause of a failed order is.
fn agent_reports(cause: Option<&str>) -> String {
    match cause {
        Some(cause) => format!("the node's agent reports: {cause}"),
        None => "the log of the node's agent has the cause".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_that_could_not_be_made_names_what_the_agent_reports() {
        for (cause, end) in [
            (Some("process 7 uses the GPU"), "; the node's agent reports: process 7 uses the GPU"),
            (None, "; the log of the node's agent has the cause"),
        ] {
            let text = BindError::NotMade { cause: cause.map(str::to_owned) }.to_string();
            assert!(text.ends_with(end), "{text}");
        }
    }
}
