//! The annotation [`HOLD`](crate::request::placement::HOLD): which room is being made for a
//! waiting pod. A later process goes on with it instead of evicting other pods.
//!
//! Any client that may write the pod can write it. So it is a hint: a pod is evicted only if that
//! would be right without it.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::json;

use crate::request::bounded::Bounded;
use wire::ids::{NodeName, PodUid};

/// The version that is written, and the only one that is read.
const VERSION: u64 = 1;

/// Longest value that is read; [`MOST_VICTIMS`] UIDs of the API server have 10 KiB.
const MOST_BYTES: usize = 16 << 10;

/// Most pods that are named: more than share the GPUs of one node in practice.
pub const MOST_VICTIMS: usize = 256;

/// Which room is being made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomNote {
    pub node: NodeName,
    pub victims: BTreeSet<PodUid>,
}

#[derive(Deserialize)]
struct RoomNoteFields {
    v: u64,
    node: String,
    victims: Bounded<String, MOST_VICTIMS>,
}

impl RoomNote {
    /// Reads a value; `None` if it is not one of this version.
    pub fn read(value: &str) -> Option<Self> {
        let fits = value.len() <= MOST_BYTES;
        let written: RoomNoteFields = fits.then(|| serde_json::from_str(value).ok())??;
        let victims = written.victims.0.into_iter().map(PodUid::new).collect();
        (written.v == VERSION).then(|| Self { node: NodeName::new(written.node), victims })
    }

    /// The value; `None` for more pods than can be read.
    pub fn value(&self) -> Option<String> {
        let victims: Vec<&str> = self.victims.iter().map(PodUid::as_str).collect();
        let value = json!({"v": VERSION, "node": self.node.as_str(), "victims": victims});
        let value = value.to_string();
        (self.victims.len() <= MOST_VICTIMS && value.len() <= MOST_BYTES).then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(victims: usize) -> RoomNote {
        let uid = |at| PodUid::new(format!("0b6e5a3c-0000-4000-8000-{at:012}"));
        RoomNote { node: NodeName::new("n"), victims: (0..victims).map(uid).collect() }
    }

    #[test]
    fn what_is_written_is_read() {
        for victims in [0, 1, MOST_VICTIMS] {
            let note = note(victims);
            assert_eq!(RoomNote::read(&note.value().unwrap()), Some(note));
        }
        assert_eq!(note(MOST_VICTIMS + 1).value(), None);
    }

    #[test]
    fn other_values_mean_nothing() {
        let many = vec!["\"u\""; MOST_VICTIMS + 1].join(",");
        for value in [
            "",
            "{}",
            "[]",
            r#"{"v":2,"node":"n","victims":[]}"#,
            r#"{"v":1,"node":7,"victims":[]}"#,
            r#"{"v":1,"node":"n"}"#,
            &format!(r#"{{"v":1,"node":"n","victims":[{many}]}}"#),
            &format!(r#"{{"v":1,"node":"{}","victims":[]}}"#, "n".repeat(MOST_BYTES)),
        ] {
            assert_eq!(RoomNote::read(value), None, "{}", &value[..value.len().min(60)]);
        }
    }
}
