//! Groups of pods that start together: how they come, and what is promised of them.

use std::collections::BTreeMap;

use rand::Rng;

use super::World;
use super::api::{Pod, Template};

/// A group starts when its pods are there, and they are bound within 60 s and a tick from then.
const LATELY: u64 = 62_000;

/// Once a pod of a group is bound, the others follow within 60 s and a tick, whatever
/// becomes of it.
const FOLLOW_WITHIN: u64 = 62_000;

/// Until when each pod of a group counts as there, by namespace and name of the group.
pub(super) type Seen = BTreeMap<(&'static str, String), BTreeMap<String, u64>>;

/// A group of which not all pods are there yet.
pub(super) struct Open {
    first: Template,
    left: u32,
}

/// Name and size of the group of a pod.
fn group_of(pod: &Template) -> Option<(String, usize)> {
    let name = pod.annotations.get("gpupack.dev/group")?;
    let size = pod.annotations.get("gpupack.dev/group-size")?;
    Some((name.clone(), size.parse().ok()?))
}

impl Pod {
    pub(super) fn has_group(&self) -> bool {
        group_of(&self.of).is_some()
    }
}

impl World {
    /// Makes a new pod one of a group at times: the first of a new one, or the next of one that is not complete.
    /// Some groups never are.
    pub(super) fn join(&mut self, pod: &mut Template) {
        if !self.settings.has_groups {
            return;
        }
        match self.open_group.take() {
            Some(Open { first, left }) if self.rng.random_range(0..3) > 0 => {
                *pod = Template { name: pod.name.clone(), ..first.clone() };
                self.open_group = (left > 1).then(|| Open { first, left: left - 1 });
            }
            Some(open) => self.open_group = Some(open).filter(|_| self.rng.random_range(0..8) > 0),
            None if !pod.annotations.is_empty() && self.rng.random_range(0..3) == 0 => {
                let size = self.rng.random_range(2..=3);
                let keys =
                    [("group", format!("g-{}", self.created)), ("group-size", size.to_string())];
                let keys = keys.map(|(key, value)| (format!("gpupack.dev/{key}"), value));
                pod.annotations.extend(keys);
                self.open_group = Some(Open { first: pod.clone(), left: size - 1 });
            }
            None => {}
        }
    }

    /// Notes which pods of groups are there.
    pub(super) fn note_groups(&mut self) {
        for (uid, pod) in &self.api.pods {
            if let Some((name, _)) = group_of(&pod.of) {
                let time = if pod.node.is_some() { FOLLOW_WITHIN } else { LATELY };
                let group = self.groups.entry((pod.of.team, name)).or_default();
                let until = group.entry(uid.clone()).or_default();
                *until = (*until).max(self.now + time);
                // Once one is bound the others may follow, also if another one goes meanwhile.
                if pod.node.is_some() {
                    let follow = |until: &mut u64| *until = (*until).max(pod.bound + FOLLOW_WITHIN);
                    group.values_mut().for_each(follow);
                }
            }
        }
    }

    /// No pod of a group is bound before as many are there as it says.
    pub(super) fn check_group(&self, uid: &str) -> Result<(), String> {
        let pod = self.api.pods.get(uid);
        let Some((pod, (name, size))) = pod.and_then(|pod| Some((pod, group_of(&pod.of)?))) else {
            return Ok(());
        };
        let seen = self.groups.get(&(pod.of.team, name.clone()));
        let seen: Vec<&String> = seen
            .into_iter()
            .flatten()
            .filter(|(_, until)| self.now < **until)
            .map(|(uid, _)| uid)
            .collect();
        match seen.len() < size {
            true => Err(format!(
                "{uid} is bound, and of the {size} pods of {name} only {seen:?} are there"
            )),
            false => Ok(()),
        }
    }
}
