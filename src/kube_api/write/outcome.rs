//! What comes of a write to a pod, as far as that is known.

use k8s_openapi::api::core::v1::Pod;

use crate::kube_api::pod::seen_pod::SeenPod;

/// Why it is not known what the API server did.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// No answer in time.
    #[error("no answer from the API server in time")]
    Timeout,
    /// The connection failed or was cut; the request may or may not have arrived.
    #[error("connection to the API server failed: {fault}")]
    Transport {
        /// What the client says.
        fault: String,
    },
    /// An answer that leaves it open: 429, 5xx, or none of the known classes.
    #[error("the API server answered `{code}`: {message}")]
    Status {
        /// HTTP status.
        code: u16,
        /// Its message.
        message: String,
    },
    /// A success whose body cannot be read.
    #[error("the API server's answer cannot be read: {fault}")]
    Body {
        /// What the JSON parser says.
        fault: String,
    },
}

/// What came of a Binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// The pod is bound, with its placement.
    Bound,
    /// The pod has changed or is bound already (409). It may be bound by an earlier try of ours.
    Conflict,
    /// There is no such pod (404).
    Gone,
    /// Refused for good (any other 4xx): nothing was bound.
    Refused {
        /// HTTP status.
        code: u16,
        /// The API server's message.
        message: String,
    },
    /// It may have been bound, or may yet be.
    Undecided {
        /// Why that is not known.
        cause: Cause,
    },
}

/// What came of a touch.
#[derive(Clone, Debug, PartialEq)]
pub enum TouchOutcome {
    /// Written; the pod as it is now. Every Binding for an older version will conflict.
    Touched {
        /// The pod after the write.
        pod: Box<Pod>,
    },
    /// The pod is no longer in the version asked for (409).
    Conflict,
    /// There is no such pod (404).
    Gone,
    /// Refused for good; 422 where the pod of that name has another UID.
    Refused {
        /// HTTP status.
        code: u16,
        /// The API server's message.
        message: String,
    },
    /// It may have been written.
    Undecided {
        /// Why that is not known.
        cause: Cause,
    },
}

/// Whether every Binding of a pod that was sent before can land no more.
#[derive(Clone, Debug, PartialEq)]
pub enum Fenced {
    /// They cannot: the pod waits in a new version, touched by this process.
    Waiting {
        /// The pod.
        pod: Box<SeenPod>,
    },
    /// They cannot: the pod is bound.
    Bound {
        /// The pod.
        pod: Box<SeenPod>,
    },
    /// They cannot: the pod is gone, or another one has its name.
    Gone,
    /// They still may.
    Open {
        /// The pod, waiting, where it could be read.
        pod: Option<Box<SeenPod>>,
        /// Why it could not be touched.
        cause: Cause,
    },
}

/// What has become of a Binding whose outcome was open.
#[derive(Clone, Debug, PartialEq)]
pub enum Settled {
    /// It succeeded: node and placement are ours.
    Bound {
        /// The pod.
        pod: Box<Pod>,
    },
    /// It did not, and never will: the pod waits in another version.
    NotBound,
    /// The pod is bound, but not by this Binding: to another node, or with another placement.
    BoundElsewhere {
        /// The pod.
        pod: Box<Pod>,
    },
    /// The pod is gone, or another one has its name.
    Gone,
    /// Still not known; ask again later, and free nothing until then.
    StillUndecided {
        /// Why.
        cause: Cause,
    },
}
