//! Limits of a body of kube-scheduler, and why one is refused.

use crate::pod::seen_pod::PodFault;
use runtime::causes::shown_long;

/// Deepest nesting of a body, equal to the limit of `serde_json` for typed values.
pub const MAX_DEPTH: u32 = 127;

/// Most nodes of a body, ten times what Kubernetes supports. The verbs allow far fewer once they
/// know the nodes of the cluster.
pub const MOST_NODES: usize = 50_000;

/// Longest JSON of one pod or node: the API server takes objects of up to 3 MiB.
pub const LONGEST_OBJECT: usize = 4 << 20;

/// Why a body is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Bytes that are no text.
    #[error("the body is not UTF-8 from byte `{offset}` on")]
    Encoding {
        /// Where the first illegal sequence begins.
        offset: usize,
    },
    /// No JSON of the expected form.
    #[error("the body cannot be read: {fault}")]
    Json {
        /// What the JSON parser says, with line and column, cut.
        fault: String,
    },
    /// Nested more deeply than any real body.
    #[error("the body is nested more than `{MAX_DEPTH}` levels deep")]
    Depth,
    /// A field that the verb needs is missing.
    #[error("the body has no `{field}`")]
    Missing {
        /// The field, in kube-scheduler's spelling.
        field: &'static str,
    },
    /// A name or an object that is longer than Kubernetes allows.
    #[error("`{field}` has `{bytes}` bytes, at most `{most}` are allowed")]
    TooLong {
        /// The field, in kube-scheduler's spelling.
        field: &'static str,
        bytes: usize,
        /// The longest that is allowed.
        most: usize,
    },
    /// More nodes than the cluster can have.
    #[error("the body names `{count}` nodes, at most `{most}` are allowed")]
    TooManyNodes { count: usize, most: usize },
    /// A pod that cannot be read.
    #[error(transparent)]
    Pod(#[from] PodFault),
}

impl ProtocolError {
    /// Short name for metrics; a closed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Encoding { .. } => "encoding",
            Self::Json { .. } => "json",
            Self::Depth => "depth",
            Self::Missing { .. } => "missing",
            Self::TooLong { .. } | Self::TooManyNodes { .. } => "too_large",
            Self::Pod(_) => "pod",
        }
    }

    pub(crate) fn json(error: &serde_json::Error) -> Self {
        Self::Json { fault: shown_long(error) }
    }

    /// Refuses what is longer than `most`.
    pub fn if_longer(field: &'static str, bytes: usize, most: usize) -> Result<(), Self> {
        if bytes > most { Err(Self::TooLong { field, bytes, most }) } else { Ok(()) }
    }
}
