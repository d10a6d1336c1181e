//! The values of labels: closed sets, so that the number of series is known beforehand.

/// A verb of the extender protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Which nodes fit.
    Filter,
    /// How good each node is.
    Prioritize,
    /// Put the pod on a node.
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

/// How a call of a verb ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// At least one node fits, the pod is bound, or pods may be evicted.
    Ok,
    /// No node fits, the bind was refused, or no pod may be evicted.
    Refused,
    /// The call could not be answered: malformed, or not ready.
    Error,
}

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

/// What became of a placement that somebody else edited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EditResult {
    /// It was seen.
    Seen,
    /// What the ledger has was written back.
    Restored,
    /// It could not be written back; it is tried again.
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

/// How a bind ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindResult {
    /// The pod is bound as decided.
    Bound,
    /// The room was taken in between, or the pod was bound elsewhere.
    Conflict,
    /// The API server or the books refused for good.
    Refused,
    /// Whether the Binding was accepted could not be found out in time.
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
    /// Taken in.
    Accepted,
    /// Repeated or late.
    Ignored,
    /// Refused.
    Refused,
}

impl ReportResult {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Ignored => "ignored",
            Self::Refused => "refused",
        }
    }
}

/// How a requeue ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequeueResult {
    /// The pod's next question found a node that fits.
    Helped,
    /// Its next question named the node, and no node fitted any more.
    Refused,
    /// Its next question did not name the node.
    NodeLeftOut,
    /// kube-scheduler did not ask about it in time.
    Unanswered,
    /// The pod is gone.
    Gone,
    /// The API server did not accept the write.
    Failed,
}

impl RequeueResult {
    /// All of them.
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
