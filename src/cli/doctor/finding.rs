//! What a check finds, and how lists of names stay short.

use crate::api::commands::{Check, CheckState};
use crate::cli::base::reader::Unread;

/// Most names in one line.
const NAMES: usize = 5;

/// Most characters of a text from the cluster in one line.
const TEXT: usize = 300;

/// What one check finds: several lines, or none if it does not apply.
pub(crate) type Findings = Vec<Check>;

/// A check by its name, which makes its findings.
#[derive(Clone, Copy)]
pub(crate) struct Of(pub(crate) &'static str);

impl Of {
    /// As it should be.
    pub(crate) fn ok(self, found: impl Into<String>) -> Check {
        self.make(CheckState::Ok, found.into(), None)
    }

    /// It works, and is worth a look.
    pub(crate) fn warning(self, found: impl Into<String>, fix: impl Into<String>) -> Check {
        self.make(CheckState::Warning, found.into(), Some(fix.into()))
    }

    /// It does not work.
    pub(crate) fn problem(self, found: impl Into<String>, fix: impl Into<String>) -> Check {
        self.make(CheckState::Problem, found.into(), Some(fix.into()))
    }

    /// It could not be read, for a reason of its own.
    pub(crate) fn not_checked(self, found: impl Into<String>, fix: impl Into<String>) -> Check {
        self.make(CheckState::NotChecked, found.into(), Some(fix.into()))
    }

    /// `what` could not be read.
    pub(crate) fn unread(self, what: &str, why: &Unread) -> Check {
        match why {
            Unread::Absent => self.not_checked(format!("{what}: not found"), "install it first"),
            Unread::Forbidden(right) => self.not_checked(
                format!("{what}: needs the right to {right}"),
                "ask for that right (deploy/doctor.yaml), or let a cluster administrator run it",
            ),
            Unread::Failed(text) => self.not_checked(
                format!("{what}: {}", short(text)),
                "see whether the API server answers, and run it again",
            ),
        }
    }

    fn make(self, state: CheckState, found: String, fix: Option<String>) -> Check {
        Check { check: self.0.to_owned(), state, found, fix }
    }
}

/// The beginning of a text.
pub(crate) fn short(text: &str) -> String {
    let mut kept: String = text.chars().take(TEXT).collect();
    if kept.len() < text.len() {
        kept.push('…');
    }
    kept
}

/// The first names, and how many there are besides.
pub(crate) fn names<T: AsRef<str>>(all: &[T]) -> String {
    let first: Vec<String> = all.iter().take(NAMES).map(|name| short(name.as_ref())).collect();
    let first = first.join(", ");
    match all.len().checked_sub(NAMES).filter(|more| *more > 0) {
        Some(more) => format!("{first} and {more} more"),
        None => first,
    }
}

/// A number of things: `1 node`, `3 nodes`.
pub(crate) fn count(number: usize, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{plural}")
}

/// The states of findings, for tests.
#[cfg(test)]
pub(crate) fn states(findings: &[Check]) -> Vec<CheckState> {
    findings.iter().map(|finding| finding.state).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_and_texts_are_cut() {
        let many: Vec<String> = (0..5_000).map(|at| format!("node-{at}")).collect();
        assert_eq!(names(&many), "node-0, node-1, node-2, node-3, node-4 and 4995 more");
        assert_eq!(names(&["a"]), "a");
        assert_eq!(short(&"ä".repeat(1_000)).chars().count(), TEXT + 1);
        assert_eq!((count(1, "node"), count(2, "node")), ("1 node".into(), "2 nodes".into()));
    }

    #[test]
    fn what_is_not_read_is_never_ok() {
        for why in [
            Unread::Absent,
            Unread::Forbidden("list nodes".to_owned()),
            Unread::Failed("x".repeat(9_999)),
        ] {
            let check = Of("a").unread("it", &why);
            assert_eq!(check.state, CheckState::NotChecked);
            assert!(check.fix.is_some() && check.found.len() < 400, "{check:?}");
        }
    }
}
