//! A row of the table of checks, and how it becomes a line about one cluster.

use std::fmt::Display;

use crate::base::reader::{Read, Unread};
use wire::api::commands::{Check, CheckState};

/// Most names in one line.
const NAMES: usize = 5;

/// Most characters of a text from the cluster in one line.
const TEXT: usize = 300;

/// What one check finds: several lines, or none if it does not apply.
pub(crate) type Findings = Vec<Check>;

/// The same, or the line without which nothing more can be said.
pub(crate) type Found = Result<Findings, Check>;

/// Something that a check may find, and how to fix it. In both sentences, `{0}` is the first text of a line,
/// `{#node}` how many nodes it lists, and `{..}` their names. Other braces stand for themselves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckRow {
    pub(crate) check: &'static str,
    pub(crate) state: CheckState,
    /// What is found; or, where it could not be read, what that is.
    pub(crate) found: &'static str,
    /// What to do; empty if it is as it should be.
    pub(crate) fix: &'static str,
}

impl CheckRow {
    /// The same of another check.
    pub(crate) fn of(self, check: &'static str) -> Self {
        Self { check, ..self }
    }

    /// The line with these texts.
    pub(crate) fn with<const N: usize>(&self, texts: [&dyn Display; N]) -> Check {
        self.line(&[], &texts)
    }

    /// The line about these things; none if there are none.
    pub(crate) fn about<T: AsRef<str>>(&self, all: &[T]) -> Option<Check> {
        self.about_with(all, [])
    }

    /// The same with these texts.
    pub(crate) fn about_with<T: AsRef<str>, const N: usize>(
        &self,
        all: &[T],
        texts: [&dyn Display; N],
    ) -> Option<Check> {
        let all: Vec<&str> = all.iter().map(AsRef::as_ref).collect();
        (!all.is_empty()).then(|| self.line(&all, &texts))
    }

    /// What the row names could not be read.
    pub(crate) fn unread<const N: usize>(&self, texts: [&dyn Display; N], why: &Unread) -> Check {
        let what = filled(self.found, &[], &texts);
        let (found, fix) = match why {
            Unread::Absent => (format!("{what}: not found"), "install it first"),
            Unread::Forbidden(right) => (
                format!("{what}: needs the right to {right}"),
                "ask for that right (deploy/doctor.yaml), or let a cluster administrator run it",
            ),
            Unread::Failed(text) => (
                format!("{what}: {}", short(text)),
                "see whether the API server answers, and run it again",
            ),
        };
        let fix = Some(fix.to_owned());
        Check { check: self.check.to_owned(), state: self.state, found, fix }
    }

    fn line(&self, all: &[&str], texts: &[&dyn Display]) -> Check {
        Check {
            check: self.check.to_owned(),
            state: self.state,
            found: filled(self.found, all, texts),
            fix: (!self.fix.is_empty()).then(|| filled(self.fix, all, texts)),
        }
    }
}

/// A sentence with its texts and its things.
fn filled(sentence: &str, all: &[&str], texts: &[&dyn Display]) -> String {
    let mut parts = sentence.split('{');
    let mut filled = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (place, rest) = part.split_once('}').unwrap_or((part, ""));
        let text = place.parse().ok().and_then(|at: usize| texts.get(at));
        filled += &match (place.strip_prefix('#'), text) {
            (Some(thing), _) => count(all.len(), thing),
            (None, Some(text)) => text.to_string(),
            (None, None) if place == ".." => names(all),
            (None, None) => format!("{{{place}}}"),
        };
        filled += rest;
    }
    filled
}

/// What was read; else the line that says why not.
pub(crate) fn known<'a, T>(read: &'a Read<T>, unread: &CheckRow) -> Result<&'a T, Check> {
    read.as_ref().map_err(|why| unread.unread([], why))
}

/// The same, with a line of its own where it is absent.
pub(crate) fn there<T>(read: &Read<T>, unread: CheckRow, absent: CheckRow) -> Result<&T, Check> {
    match read {
        Err(Unread::Absent) => Err(absent.with([])),
        _ => known(read, &unread),
    }
}

/// The lines of a check.
pub(crate) fn lines(found: Found) -> Findings {
    found.unwrap_or_else(|only| vec![only])
}

/// The lines of a check, or this one if it has none.
pub(crate) fn or_ok(found: Findings, ok: impl FnOnce() -> Check) -> Found {
    Ok(if found.is_empty() { vec![ok()] } else { found })
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

    const ROW: CheckRow = CheckRow {
        check: "a",
        state: CheckState::NotChecked,
        found: "it {0} of {#node} ({..}), {b: 1}",
        fix: "{1}, {2}",
    };

    #[test]
    fn long_lists_and_texts_are_cut() {
        let many: Vec<String> = (0..5_000).map(|at| format!("node-{at}")).collect();
        assert_eq!(names(&many), "node-0, node-1, node-2, node-3, node-4 and 4995 more");
        assert_eq!(names(&["a"]), "a");
        assert_eq!(short(&"ä".repeat(1_000)).chars().count(), TEXT + 1);
        assert_eq!((count(1, "node"), count(2, "node")), ("1 node".into(), "2 nodes".into()));
    }

    #[test]
    fn a_sentence_takes_its_texts_once() {
        let line = ROW.about_with(&["x{0}", "y"], [&"{1}", &7]).unwrap();
        assert_eq!(line.found, "it {1} of 2 nodes (x{0}, y), {b: 1}");
        assert_eq!(line.fix.unwrap(), "7, {2}");
        assert_eq!(ROW.about::<&str>(&[]), None);
    }

    #[test]
    fn what_is_not_read_is_never_ok() {
        for why in [
            Unread::Absent,
            Unread::Forbidden("list nodes".to_owned()),
            Unread::Failed("x".repeat(9_999)),
        ] {
            let check = ROW.unread([], &why);
            assert_eq!(check.state, CheckState::NotChecked);
            assert!(check.fix.is_some() && check.found.len() < 400, "{check:?}");
        }
    }
}
