//! The annotations under gpupack's own prefix on a bound pod, in short: enough to detect edits, and
//! to write back what the placement does not say.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use crate::kube_api::request::placement::{
    DRIVER_MEMORY, FENCE, MPS_MEMORY, MPS_THREADS, OLD_FENCE, PLACED_PREFIX,
};
use crate::model::reservation::Placement;

/// Their values follow from the configuration at the time of the Binding, not from the placement.
const LIMITS: [&str; 3] = [DRIVER_MEMORY, MPS_MEMORY, MPS_THREADS];

/// Longest value of them that is kept; gpupack writes numbers.
const LONGEST_LIMIT: usize = 32;

/// Secret to the process, so that no client can find two sets of annotations with one digest.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The annotations of a pod that only gpupack writes, except [`FENCE`]. Equal if all are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Digest of all keys and values; zero without any.
    mark: u64,
    limits: Box<[(&'static str, Box<str>)]>,
}

impl Written {
    /// Reads the annotations of a pod.
    pub fn of(annotations: &BTreeMap<String, String>) -> Self {
        let ours: Vec<(&String, &String)> =
            annotations.iter().filter(|(key, _)| is_owned(key)).collect();
        if ours.is_empty() {
            return Self::default();
        }
        let limit = |key: &'static str| {
            let value = annotations.get(key).filter(|value| value.len() <= LONGEST_LIMIT)?;
            Some((key, value.as_str().into()))
        };
        Self {
            mark: HASHER.hash_one(&ours),
            limits: LIMITS.into_iter().filter_map(limit).collect(),
        }
    }

    /// The limits of the containers, as annotations.
    pub fn limits(&self) -> impl Iterator<Item = (String, String)> {
        self.limits.iter().map(|(key, value)| ((*key).to_owned(), value.to_string()))
    }
}

/// A number that is equal for equal placements within one process.
pub fn placement_mark(placement: &Placement) -> u64 {
    HASHER.hash_one(placement)
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

fn is_owned(key: &str) -> bool {
    key.starts_with(PLACED_PREFIX) && key != FENCE && key != OLD_FENCE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn every_gpupack_key_counts_except_the_fence() {
        let ours = all(&[("placed.gpupack.dev/uuids", "GPU-a"), (DRIVER_MEMORY, "4096")]);
        let written = Written::of(&ours);
        for (key, value, is_same) in [
            ("placed.gpupack.dev/uuids", "GPU-b", false),
            (DRIVER_MEMORY, "8192", false),
            (MPS_MEMORY, "0=1M", false),
            ("placed.gpupack.dev/new", "", false),
            (FENCE, "1", true),
            (OLD_FENCE, "1", true),
            ("note", "1", true),
        ] {
            let mut edited = ours.clone();
            edited.insert(key.to_owned(), value.to_owned());
            assert_eq!(Written::of(&edited) == written, is_same, "{key}");
        }
        assert_ne!(Written::of(&all(&[(DRIVER_MEMORY, "4096")])), written);
        assert_eq!(Written::of(&all(&[(FENCE, "1")])), Written::default());
    }

    #[test]
    fn written_limits_are_kept_except_long_values() {
        let long = "9".repeat(LONGEST_LIMIT + 1);
        let written = Written::of(&all(&[(MPS_MEMORY, &long), (MPS_THREADS, "50"), ("b", "c")]));
        assert_eq!(written.limits().collect::<BTreeMap<_, _>>(), all(&[(MPS_THREADS, "50")]));
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
