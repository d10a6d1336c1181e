//! The annotations under gpupack's own prefix on a bound pod, in short: enough to detect edits, and
//! to write back what the placement does not say.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use crate::request::placement::{
    DEVICES, MEMORY_MIB, PLACED_PREFIX, PLACEMENT, UUIDS, has_unknown_fields, is_of_waiting_pods,
};
use engine::model::reservation::Placement;

/// Most annotations of a pod that are kept, and their longest value.
const MOST_KEPT: usize = 8;
const LONGEST_KEPT: usize = 4 << 10;

/// Secret to the process, so that no client can find two sets of annotations with one digest.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The annotations of a pod that only gpupack writes, except those of waiting pods. Equal if all are
/// equal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WrittenAnnotations {
    /// Digest of all keys and values; zero without any.
    mark: u64,
    /// What does not follow from the placement: limits, which follow from the configuration at the
    /// time of the Binding, and what a newer gpupack wrote.
    kept: Box<[(Box<str>, Box<str>)]>,
}

impl WrittenAnnotations {
    /// Reads the annotations of a pod.
    pub fn of(annotations: &BTreeMap<String, String>) -> Self {
        let ours: Vec<(&String, &String)> =
            annotations.iter().filter(|(key, _)| is_owned(key)).collect();
        if ours.is_empty() {
            return Self::default();
        }

        // The placement first: others may have written many keys that sort before it.
        let (placement, others): (Vec<_>, Vec<_>) = ours
            .iter()
            .filter(|(key, value)| is_kept(key, value))
            .partition(|(key, _)| key.as_str() == PLACEMENT);
        let kept = placement.into_iter().chain(others).take(MOST_KEPT);
        let kept = kept.map(|(key, value)| (key.as_str().into(), value.as_str().into())).collect();
        Self { mark: HASHER.hash_one(&ours), kept }
    }

    /// The annotations that do not follow from the placement.
    pub fn kept(&self) -> impl Iterator<Item = (String, String)> {
        self.kept.iter().map(|(key, value)| (key.to_string(), value.to_string()))
    }
}

/// A number that is equal for equal placements within one process.
pub fn placement_mark(placement: &Placement) -> u64 {
    HASHER.hash_one(placement)
}

/// The annotations that only gpupack writes, except those of waiting pods.
pub fn owned(annotations: &BTreeMap<String, String>) -> impl Iterator<Item = (String, String)> {
    let ours = annotations.iter().filter(|(key, _)| is_owned(key));
    ours.map(|(key, value)| (key.clone(), value.clone()))
}

/// A patch that makes the annotations that only gpupack writes equal to `wanted`: it removes all
/// others of its prefix.
pub fn patch_to(
    wanted: &BTreeMap<String, String>,
    there: &BTreeMap<String, String>,
) -> BTreeMap<String, Option<String>> {
    let unknown = there.keys().filter(|key| is_owned(key)).map(|key| (key.clone(), None));
    let ours = wanted.iter().map(|(key, value)| (key.clone(), Some(value.clone())));
    unknown.chain(ours).collect()
}

/// Whether an annotation does not follow from the placement.
fn is_kept(key: &str, value: &str) -> bool {
    match key {
        DEVICES | UUIDS | MEMORY_MIB => false,
        PLACEMENT => has_unknown_fields(value),
        _ => value.len() <= LONGEST_KEPT,
    }
}

fn is_owned(key: &str) -> bool {
    key.starts_with(PLACED_PREFIX) && !is_of_waiting_pods(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::placement::{
        DRIVER_MEMORY, FENCE, HOLD, MPS_MEMORY, MPS_THREADS, OLD_FENCE,
    };

    fn all(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn every_gpupack_key_counts_except_the_fence() {
        let ours = all(&[("placed.gpupack.dev/uuids", "GPU-a"), (DRIVER_MEMORY, "4096")]);
        let written = WrittenAnnotations::of(&ours);
        for (key, value, is_same) in [
            ("placed.gpupack.dev/uuids", "GPU-b", false),
            (DRIVER_MEMORY, "8192", false),
            (MPS_MEMORY, "0=1M", false),
            ("placed.gpupack.dev/new", "", false),
            (FENCE, "1", true),
            (OLD_FENCE, "1", true),
            (HOLD, "1", true),
            ("note", "1", true),
        ] {
            let mut edited = ours.clone();
            edited.insert(key.to_owned(), value.to_owned());
            assert_eq!(WrittenAnnotations::of(&edited) == written, is_same, "{key}");
        }
        assert_ne!(WrittenAnnotations::of(&all(&[(DRIVER_MEMORY, "4096")])), written);
        assert_eq!(WrittenAnnotations::of(&all(&[(FENCE, "1")])), WrittenAnnotations::default());
    }

    #[test]
    fn limits_and_what_a_newer_version_wrote_are_kept() {
        let long = "9".repeat(LONGEST_KEPT + 1);
        let newer = "placed.gpupack.dev/newer";
        let known = r#"{"v":1,"devices":[{"id":"GPU-a","mib":1,"share":2}],"isolation":"none"}"#;
        let (more, deeper) =
            (known.replace('}', ",\"n\":1}"), known.replace("\"v\"", "\"n\":[],\"v\""));
        for (there, kept) in [
            (
                vec![(MPS_MEMORY, &*long), (MPS_THREADS, "50"), ("b", "c"), (FENCE, "f")],
                vec![(MPS_THREADS, "50")],
            ),
            (vec![(UUIDS, "GPU-a"), (PLACEMENT, known)], vec![]),
            (vec![(PLACEMENT, &*more), (newer, "{}")], vec![(PLACEMENT, &*more), (newer, "{}")]),
            (vec![(PLACEMENT, &*deeper)], vec![(PLACEMENT, &*deeper)]),
        ] {
            let written = WrittenAnnotations::of(&all(&there));
            assert_eq!(written.kept().collect::<BTreeMap<_, _>>(), all(&kept), "{there:?}");
        }
        let many: Vec<String> = (0..20).map(|at| format!("{newer}-{at}")).collect();
        let many: Vec<_> = many.iter().map(|key| (key.as_str(), "")).collect();
        assert_eq!(WrittenAnnotations::of(&all(&many)).kept().count(), MOST_KEPT);
        let before: Vec<String> = (0..20).map(|at| format!("{PLACED_PREFIX}a{at}")).collect();
        let before = before.iter().map(|key| (key.as_str(), "")).chain([(PLACEMENT, &*more)]);
        let written = WrittenAnnotations::of(&all(&before.collect::<Vec<_>>()));
        assert!(written.kept().any(|(key, _)| key == PLACEMENT), "{written:?}");
    }

    #[test]
    fn unwanted_gpupack_annotations_are_removed() {
        let there =
            all(&[("placed.gpupack.dev/x", "1"), (MPS_THREADS, "9"), (FENCE, "t"), ("b", "")]);
        let patch = patch_to(&all(&[(MPS_THREADS, "5")]), &there);
        let expected = [("placed.gpupack.dev/x", None), (MPS_THREADS, Some("5"))];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.map(str::to_owned)));
        assert_eq!(patch, BTreeMap::from(expected));
    }
}
