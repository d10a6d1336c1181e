//! Classes of workloads, and what pods of a namespace may use.
//!
//! The class of a pod is that of its `PriorityClass`, which cannot be changed. A label chooses it when
//! the pod is created.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::policy::Policy;
use crate::model::request::Isolation;
use wire::device::PoolFilter;
use wire::mutation::{Mutation, mutated};

/// What protects a placed pod from being evicted for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protection {
    /// It stays for this many seconds from its start.
    Seconds(u32),
    /// It stays. As an over-quota pod, for a team that is guaranteed its room, it is protected as long as
    /// a pod without a class.
    Always,
}

impl Protection {
    /// Whether a pod that `started` then must stay `now`, both in seconds since 1970. A pod without a class
    /// stays for `default` seconds. `is_owed` says whether it would go as an over-quota pod of another team.
    pub fn holds(
        protection: Option<Self>,
        started: i64,
        now: i64,
        default: i64,
        is_owed: bool,
    ) -> bool {
        let seconds = match protection {
            Some(Self::Always) if !is_owed && !mutated(Mutation::ProtectionIgnored) => return true,
            Some(Self::Seconds(seconds)) => i64::from(seconds),
            Some(Self::Always) | None => default,
        };
        now.saturating_sub(started) < seconds
    }
}

/// A class of workloads, such as training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadClass {
    /// Its name: the value of the label.
    pub name: String,
    /// The `PriorityClass` of its pods.
    pub priority_class: String,
    /// What protects its pods; `None`: as long as all pods.
    pub protection: Option<Protection>,
    /// Policy of its pods that name none; `None`: that of the cluster.
    pub policy: Option<Policy>,
}

/// All classes of workloads, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workloads(Vec<WorkloadClass>);

impl Workloads {
    /// These classes.
    pub fn new(classes: impl IntoIterator<Item = WorkloadClass>) -> Self {
        Self(classes.into_iter().collect())
    }

    /// The class of this name.
    pub fn named(&self, name: &str) -> Option<&WorkloadClass> {
        self.0.iter().find(|class| class.name == name)
    }

    /// The class of pods with this `PriorityClass`.
    pub fn of(&self, priority_class: &str) -> Option<&WorkloadClass> {
        self.0.iter().find(|class| class.priority_class == priority_class)
    }

    /// Whether one of them protects its pods.
    pub fn protect(&self) -> bool {
        self.0.iter().any(|class| class.protection.is_some())
    }

    /// The names of all.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|class| class.name.as_str())
    }
}

/// What pods may use. Each set allows nothing else; `None` allows all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Pools whose nodes they may use.
    pub pools: PoolFilter,
    /// Kinds of isolation that they may request; no request is [`Isolation::None`].
    pub isolation: Option<BTreeSet<Isolation>>,
    /// Policies that they may name.
    pub policies: Option<BTreeSet<Policy>>,
    /// Classes of workloads, by name.
    pub workloads: Option<BTreeSet<String>>,
}

/// What pods may use, by their namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessRules {
    /// The namespaces that are named.
    pub namespaces: BTreeMap<String, Access>,
    /// Each other namespace.
    pub others: Access,
}

impl AccessRules {
    /// What pods of a namespace may use.
    pub fn of(&self, namespace: &str) -> &Access {
        self.namespaces.get(namespace).unwrap_or(&self.others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protection_ends_with_its_time_or_for_a_team_that_is_owed() {
        let (minute, always) = (Some(Protection::Seconds(60)), Some(Protection::Always));
        for (protection, now, is_owed, holds) in [
            (minute, 159, true, true),
            (minute, 160, false, false),
            (Some(Protection::Seconds(0)), 100, false, false),
            (Some(Protection::Seconds(u32::MAX)), i64::MIN, false, true),
            (always, i64::MAX, false, true),
            (always, 109, true, true),
            (always, 110, true, false),
            (None, 109, false, true),
            (None, 110, false, false),
        ] {
            let found = Protection::holds(protection, 100, now, 10, is_owed);
            assert_eq!(found, holds, "{protection:?} {now}");
        }
    }
}
