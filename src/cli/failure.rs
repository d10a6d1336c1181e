//! How the commands that ask a running extender end: exit codes, and one clear line.

use std::fmt::Display;

use super::plain::clean;

/// Why a command did not do what was asked, as one line and an exit code. 0 is done, and 2 is for flags
/// that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{line}")]
pub struct Failure {
    code: u8,
    line: String,
}

impl Failure {
    /// The server cannot be reached, or is not ready: 4.
    pub(super) fn unreachable(line: impl Display) -> Self {
        Self::of(4, line)
    }

    /// What was asked about is not known: 5.
    pub(super) fn not_found(line: impl Display) -> Self {
        Self::of(5, line)
    }

    /// What was asked cannot be: 2, as for flags.
    pub(super) fn usage(line: impl Display) -> Self {
        Self::of(2, line)
    }

    /// Anything else: 1.
    pub(super) fn other(line: impl Display) -> Self {
        Self::of(1, line)
    }

    fn of(code: u8, line: impl Display) -> Self {
        Self { code, line: clean(&line.to_string()) }
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        self.code
    }

    /// Whether it may be over in a moment.
    pub(super) fn is_passing(&self) -> bool {
        self.code == 4
    }
}
