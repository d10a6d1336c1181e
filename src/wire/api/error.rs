//! Errors, and the log level.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::kind::{ApiVersion, ErrorKind, LogLevelKind};

/// The body of a refusal: what the path cannot answer, with a status of 400 and above.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Error {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Error`.
    pub kind: ErrorKind,
    /// What is wrong and what to do, in one sentence for people.
    pub error: String,
    /// The cause, where a client has to act on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<ErrorReason>,
}

impl Error {
    /// An error for people.
    pub fn new(error: String) -> Self {
        Self { error, ..Self::default() }
    }
}

/// A cause on which a client has to act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ErrorReason {
    /// The session of a report is not the newest of its node: begin a new session.
    SessionExpired,
    /// The port has no such path.
    UnknownPath,
    /// A reason that only a newer extender has.
    #[serde(other)]
    Other,
}

/// The log level.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LogLevel {
    /// Version of this body; may be left out in a request.
    #[serde(default)]
    pub api_version: ApiVersion,
    /// `LogLevel`; may be left out in a request.
    #[serde(default)]
    pub kind: LogLevelKind,
    /// The filter, as in the configuration: `debug`, or `info,gpupack=trace`.
    pub level: String,
}
