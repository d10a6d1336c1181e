//! Outcomes of writes to a pod, as far as they are known.

use k8s_openapi::api::core::v1::Pod;

use crate::pod::seen_pod::SeenPod;

/// Why an outcome is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// Nothing was sent: another replica may lead.
    #[error("this replica of gpupack does not lead now")]
    NotLeading,
    #[error("no answer from the API server in time")]
    Timeout,
    /// The connection failed; the request may have arrived.
    #[error("connection to the API server failed: {fault}")]
    Transport {
        /// The error of the client.
        fault: String,
    },
    /// An answer that does not settle it: 408, 429, 5xx, another class, or a refusal of a fence.
    #[error("the API server answered `{code}`: {message}")]
    Status { code: u16, message: String },
    /// A success whose body cannot be read.
    #[error("the API server's answer cannot be read: {fault}")]
    Body {
        /// Why it is not the JSON of such an object.
        fault: String,
    },
}

/// The outcome of a Binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// The pod is bound, with its placement.
    Bound,
    /// The pod has changed or is already bound (409), perhaps by an earlier attempt of ours.
    Conflict,
    /// There is no such pod (404).
    Gone,
    /// Refused for good (4xx, except those above, 408 and 429): nothing was bound.
    Refused { code: u16, message: String },
    /// It may have been bound, or may still be.
    Undecided {
        /// Why the outcome is not known.
        cause: Cause,
    },
}

/// The outcome of a write to a pod's annotations.
#[derive(Clone, Debug, PartialEq)]
pub enum PatchOutcome {
    /// Written. Every Binding for an older version will conflict.
    Patched {
        /// The pod after the write.
        pod: Box<Pod>,
    },
    /// The pod is no longer in the required version (409).
    Conflict,
    /// There is no such pod (404).
    Gone,
    /// Refused for good; 422 if the pod of that name has another UID.
    Refused { code: u16, message: String },
    /// It may have been written.
    Undecided {
        /// Why the outcome is not known.
        cause: Cause,
    },
}

/// Whether a Binding of a pod that was sent earlier can still succeed.
#[derive(Clone, Debug, PartialEq)]
pub enum Fenced {
    /// No: the pod waits in a new version, which this process wrote.
    Waiting { pod: Box<SeenPod> },
    /// No: the pod is bound.
    Bound { pod: Box<SeenPod> },
    /// No: the pod is gone, or another pod has its name.
    Gone,
    Open {
        /// The waiting pod, if it could be read.
        pod: Option<Box<SeenPod>>,
        cause: Cause,
    },
}

/// The outcome of an undecided Binding.
#[derive(Clone, Debug, PartialEq)]
pub enum Settled {
    /// It succeeded: node and placement are ours.
    Bound { pod: Box<Pod> },
    /// It failed and can no longer succeed: the pod waits in another version.
    NotBound,
    /// The pod is bound to another node or with another placement, not by this Binding.
    BoundElsewhere { pod: Box<Pod> },
    /// The pod is gone, or another pod has its name.
    Gone,
    /// Still not known. Settle it again later, and free nothing until then.
    StillUndecided {
        /// Why the outcome is not known.
        cause: Cause,
    },
}
