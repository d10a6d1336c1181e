//! Whether NVIDIA's library may be open: not while the GPU Operator upgrades the driver of the node, or MIG
//! Manager changes its GPUs.
//!
//! These neither evict a DaemonSet nor get on while a process has the driver open. What blocks them
//! are open device files: `nvmlShutdown` closes those, so a library that is shut down counts as
//! closed, even where the loader keeps it in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use wire::mutation::{Mutation, mutated};

/// Longest text of an extender that is kept and logged, in bytes.
const LONGEST_REASON: usize = 256;

/// What is said as long as no extender has answered.
const NOT_ANSWERED: &str = "no extender has answered yet whether the driver may be used";

/// What extenders say about the library; a handle, cheap to copy. The lock is short.
#[derive(Clone, Debug, Default)]
pub struct LibraryGate {
    shared: Arc<SharedGate>,
}

#[derive(Debug, Default)]
struct SharedGate {
    said: Mutex<Said>,
    /// Notified when the library may be open and might not before, or the reverse.
    changed: Notify,
}

/// What extenders said last.
#[derive(Debug, Default)]
struct Said {
    /// By the number of the link.
    extenders: BTreeMap<usize, Answer>,
    /// What counted when one was forgotten and no other one answered.
    left: Option<Answer>,
}

/// What one extender said last.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Answer {
    /// Whether that was its last answer.
    is_live: bool,
    /// Why the library is to be closed.
    closed: Option<String>,
}

impl LibraryGate {
    /// Learns what the extender with this link says: why the library is to be closed, or that it may be open.
    pub fn learn(&self, link: usize, closed: Option<String>) {
        let closed = closed.map(bounded);
        self.change(|said| {
            said.left = None;
            said.extenders.insert(link, Answer { is_live: true, closed });
        });
    }

    /// Learns that the extender with this link did not answer.
    pub fn lose(&self, link: usize) {
        self.change(|said| {
            if let Some(answer) = said.extenders.get_mut(&link) {
                answer.is_live = false;
            }
        });
    }

    /// Forgets the extender with this link.
    pub fn forget(&self, link: usize) {
        self.change(|said| {
            let counted = said.closed();
            let is_known = said.extenders.remove(&link).is_some();
            // What counted stands until another one answers.
            if is_known && !said.extenders.values().any(|answer| answer.is_live) {
                said.left = Some(Answer { is_live: false, closed: counted });
            }
        });
    }

    /// Why the library must be closed now; `None` if it may be open.
    pub fn keeps_closed(&self) -> Option<String> {
        self.said().unwrap_or_else(|| Some(NOT_ANSWERED.to_owned()))
    }

    /// What was said: nothing yet, or why the library must be closed, if it must.
    pub(crate) fn said(&self) -> Option<Option<String>> {
        let said = self.shared.said.lock();
        said.has_answer().then(|| said.closed())
    }

    /// Waits until that has changed.
    pub(crate) async fn changed(&self) {
        self.shared.changed.notified().await;
    }

    fn change(&self, change: impl FnOnce(&mut Said)) {
        let mut said = self.shared.said.lock();
        let before = (said.has_answer(), said.closed().is_some());
        change(&mut said);
        if before != (said.has_answer(), said.closed().is_some()) {
            self.shared.changed.notify_one();
        }
    }
}

impl Said {
    fn has_answer(&self) -> bool {
        !self.extenders.is_empty() || self.left.is_some()
    }

    /// Why it is to be closed: one extender that answers is enough. If none answers, the last answers count: an
    /// upgrade may evict the extenders, and the agent must not come in its way then.
    fn closed(&self) -> Option<String> {
        let is_any_live = self.extenders.values().any(|answer| answer.is_live);
        let counted = self.extenders.values().chain(&self.left);
        let mut counted = counted.filter(|answer| {
            answer.is_live || !is_any_live && !mutated(Mutation::ClosingForgotten)
        });
        counted.find_map(|answer| answer.closed.clone())
    }
}

/// The text, shortened and without control characters.
fn bounded(reason: String) -> String {
    let plain = reason.chars().filter(|letter| !letter.is_control());
    let mut kept = String::new();
    for letter in plain {
        if kept.len() + letter.len_utf8() > LONGEST_REASON {
            break;
        }
        kept.push(letter);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed() -> Option<String> {
        Some("upgrade".to_owned())
    }

    fn is_open(gate: &LibraryGate) -> bool {
        gate.keeps_closed().is_none()
    }

    #[test]
    fn the_library_is_first_opened_when_an_extender_allows_it() {
        let gate = LibraryGate::default();
        assert_eq!(gate.keeps_closed().as_deref(), Some(NOT_ANSWERED));
        gate.lose(1);
        assert!(!is_open(&gate), "it has never answered");
        gate.learn(1, closed());
        assert_eq!(gate.keeps_closed().as_deref(), Some("upgrade"));
        gate.learn(1, None);
        assert!(is_open(&gate));
    }

    #[test]
    fn one_extender_that_answers_is_enough_to_close_it() {
        let gate = LibraryGate::default();
        gate.learn(1, None);
        gate.learn(2, closed());
        gate.learn(1, None);
        assert!(!is_open(&gate));
        gate.lose(2);
        assert!(is_open(&gate), "the only one that answers allows it");
        gate.learn(2, closed());
        gate.forget(2);
        assert!(is_open(&gate));
    }

    #[test]
    fn the_last_answer_stands_while_no_extender_answers() {
        let gate = LibraryGate::default();
        gate.learn(1, closed());
        gate.lose(1);
        assert!(!is_open(&gate), "the upgrade may have evicted it");
        gate.forget(1);
        assert!(!is_open(&gate));
        gate.learn(2, None);
        assert!(is_open(&gate));
        gate.lose(2);
        assert!(is_open(&gate));
        gate.forget(2);
        assert!(is_open(&gate));
    }

    #[test]
    fn one_that_is_forgotten_leaves_its_word_beside_one_that_is_lost() {
        let gate = LibraryGate::default();
        gate.learn(1, closed());
        gate.learn(2, None);
        gate.lose(2);
        gate.lose(1);
        assert!(!is_open(&gate));
        gate.forget(1);
        assert!(!is_open(&gate), "the other one has said nothing new");
        gate.learn(2, None);
        assert!(is_open(&gate));
    }

    #[test]
    fn a_reason_is_short_and_plain() {
        let gate = LibraryGate::default();
        gate.learn(1, Some(format!("a\n{}", "é".repeat(LONGEST_REASON))));
        let kept = gate.keeps_closed().unwrap();
        assert!(kept.starts_with("aé") && kept.len() <= LONGEST_REASON, "{kept}");
    }
}
