//! The values of labels. They are closed sets, which limits the number of series.

/// A verb of the extender protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// On which nodes the pod fits.
    Filter,
    /// How good each node is.
    Prioritize,
    /// The pod is bound to a node.
    Bind,
    /// Which pods may be evicted for it.
    Preempt,
}

impl Verb {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Prioritize => "prioritize",
            Self::Bind => "bind",
            Self::Preempt => "preempt",
        }
    }
}

/// The outcome of a call of a verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// At least one node fits, the pod is bound, or pods may be evicted.
    Ok,
    /// No node fits, the bind was refused, or no pod may be evicted.
    Refused,
    /// The call could not be answered: malformed, or not ready.
    Error,
}

/// The body of an answer and how the call ended.
pub type VerbAnswer = (Vec<u8>, Outcome);

impl Outcome {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Error => "error",
        }
    }
}

/// What happened to a placement that another client edited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EditResult {
    Seen,
    /// The placement in the ledger was written back.
    Restored,
    /// It could not be written back; gpupack tries again.
    Failed,
}

impl EditResult {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Seen => "seen",
            Self::Restored => "restored",
            Self::Failed => "failed",
        }
    }
}

/// The outcome of a bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindResult {
    /// The pod is bound as decided.
    Bound,
    /// Another pod took the room, or the pod was bound elsewhere.
    Conflict,
    /// The API server or the ledger refused for good.
    Refused,
    /// It could not be found out in time whether the Binding was accepted.
    Undecided,
}

impl BindResult {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Bound => "bound",
            Self::Conflict => "conflict",
            Self::Refused => "refused",
            Self::Undecided => "undecided",
        }
    }
}

/// What became of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportResult {
    Accepted,
    Ignored,
    Refused,
    /// Of a client that has not proven to be the agent of the node.
    Unproven,
    /// Of another agent of a node that is reported for.
    SecondAgent,
}

impl ReportResult {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Accepted, Self::Ignored, Self::Refused, Self::Unproven, Self::SecondAgent];

    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Ignored => "ignored",
            Self::Refused => "refused",
            Self::Unproven => "unproven",
            Self::SecondAgent => "second_agent",
        }
    }
}

/// The outcome of a requeue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequeueResult {
    /// The next *filter* call of the pod found a node that fits.
    Helped,
    /// The next call named the node, and no node fits any more.
    Refused,
    /// The next call did not name the node.
    NodeLeftOut,
    /// kube-scheduler did not call about the pod in time.
    Unanswered,
    Gone,
    /// The API server did not accept the write.
    Failed,
}

impl RequeueResult {
    /// All outcomes.
    pub const ALL: [Self; 6] = [
        Self::Helped,
        Self::Refused,
        Self::NodeLeftOut,
        Self::Unanswered,
        Self::Gone,
        Self::Failed,
    ];

    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Helped => "helped",
            Self::Refused => "refused",
            Self::NodeLeftOut => "node_left_out",
            Self::Unanswered => "unanswered",
            Self::Gone => "gone",
            Self::Failed => "failed",
        }
    }
}

/// Whose certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateLabel {
    Ca,
    Extender,
    Scheduler,
    Webhook,
}

impl CertificateLabel {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ca, Self::Extender, Self::Scheduler, Self::Webhook];

    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ca => "ca",
            Self::Extender => "extender",
            Self::Scheduler => "scheduler",
            Self::Webhook => "webhook",
        }
    }
}
