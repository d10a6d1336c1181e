//! How the commands that query a running extender end: exit codes, and one clear line.

use std::fmt::Display;

/// Why a command failed, as one line and an exit code. Exit code 0 means success, and 2 invalid
/// flags.
#[derive(Debug, thiserror::Error)]
#[error("{line}")]
pub struct Failure {
    code: u8,
    line: String,
}

impl Failure {
    /// The server cannot be reached, or is not ready: 4.
    pub(crate) fn unreachable(line: impl Display) -> Self {
        Self::of(4, line)
    }

    /// The object is not known: 5.
    pub(crate) fn not_found(line: impl Display) -> Self {
        Self::of(5, line)
    }

    /// An invalid value on the command line: 2.
    pub(crate) fn usage(line: impl Display) -> Self {
        Self::of(2, line)
    }

    /// Anything else: 1.
    pub(crate) fn other(line: impl Display) -> Self {
        Self::of(1, line)
    }

    fn of(code: u8, line: impl Display) -> Self {
        Self { code, line: clean(&line.to_string()) }
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        self.code
    }

    /// Whether trying again soon may help.
    pub(crate) fn is_passing(&self) -> bool {
        self.code == 4
    }
}

/// `text` with escapes for characters that a terminal would take as a command or show in another
/// order.
pub(crate) fn clean(text: &str) -> String {
    if text.chars().all(is_plain) {
        return text.to_owned();
    }
    let written = text.chars().map(|c| match is_plain(c) {
        true => c.to_string(),
        false => c.escape_unicode().to_string(),
    });
    written.collect()
}

fn is_plain(c: char) -> bool {
    !c.is_control() && !is_hidden(c)
}

/// Whether a character changes the direction or position of others, or has no width.
pub(crate) fn is_hidden(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}
