//! The sections `workloads` and `access` of the configuration: classes of workloads, and what pods of a
//! namespace may use.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

use crate::config::values::{NoContext, number, parsed};
use engine::model::policy::Policy;
use engine::model::request::Isolation;
use engine::model::workload::{Access, AccessRules, Protection, WorkloadClass, Workloads};
use wire::device::PoolFilter;
use wire::ids::PoolName;

/// Longest name of a class, as it is the value of a label.
const LONGEST_NAME: usize = 63;

/// The keys of one class of workloads.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
pub struct WorkloadKeys {
    /// The `PriorityClass` of its pods; `gpupack-NAME` if `None`.
    pub priority_class: Option<String>,
    /// The value of that class; the chart makes the class if it is given.
    pub priority: Option<i32>,
    /// Whether its pods may be evicted for more important ones.
    pub preemptible: bool,
    /// How long its pods run before they may be.
    #[serde(deserialize_with = "some_seconds")]
    pub protect_seconds: Option<u32>,
    /// Policy of its pods that name none.
    #[serde(deserialize_with = "some_policy")]
    pub policy: Option<Policy>,
}

impl Default for WorkloadKeys {
    fn default() -> Self {
        Self {
            priority_class: None,
            priority: None,
            preemptible: true,
            protect_seconds: None,
            policy: None,
        }
    }
}

impl WorkloadKeys {
    /// The `PriorityClass` of the class of this name.
    pub fn class(&self, name: &str) -> String {
        self.priority_class.clone().unwrap_or_else(|| format!("gpupack-{name}"))
    }
}

/// The classes of these keys.
pub(crate) fn workloads(keys: &BTreeMap<String, WorkloadKeys>) -> Workloads {
    Workloads::new(keys.iter().map(|(name, keys)| WorkloadClass {
        name: name.clone(),
        priority_class: keys.class(name),
        protection: match keys.preemptible {
            true => keys.protect_seconds.map(Protection::Seconds),
            false => Some(Protection::Always),
        },
        policy: keys.policy,
    }))
}

/// A rule for the classes of workloads.
pub(crate) fn distinct(classes: &BTreeMap<String, WorkloadKeys>, _: &NoContext) -> garde::Result {
    let mut known = BTreeMap::new();
    for (name, keys) in classes {
        if !is_name(name, LONGEST_NAME, "-_.") {
            return fault(format!("`{name}` must be a value of a label, such as `train`"));
        }
        let class = keys.class(name);
        if !is_name(&class, 253, "-.") || has_capitals(&class) {
            return fault(format!(
                "the `priority_class` of `{name}` must be the name of an object"
            ));
        }
        if !keys.preemptible && keys.protect_seconds.is_some() {
            return fault(format!(
                "`{name}` must have one of `preemptible: false` and `protect_seconds`: the former \
                 protects without an end"
            ));
        }
        if let Some(other) = known.insert(class, name) {
            return fault(format!("`{name}` must have another `priority_class` than `{other}`"));
        }
    }
    Ok(())
}

fn fault(text: String) -> garde::Result {
    Err(garde::Error::new(text))
}

fn has_capitals(text: &str) -> bool {
    text.bytes().any(|byte| byte.is_ascii_uppercase())
}

fn is_name(text: &str, most: usize, also: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric();
    let is_framed = text.starts_with(is_plain) && text.ends_with(is_plain);
    text.len() <= most && is_framed && text.chars().all(|c| is_plain(c) || also.contains(c))
}

fn some_seconds<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    number::<0, 604_800, _, D>(from).map(Some)
}

fn some_policy<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Policy>, D::Error> {
    parsed(from).map(Some)
}

/// Checked section `access`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
pub struct AccessConfig {
    /// What pods of each of these namespaces may use.
    pub namespaces: BTreeMap<String, AccessKeys>,
    /// What pods of each other namespace may use.
    pub others: AccessKeys,
}

/// The keys of one namespace. A list allows nothing else; without it all is allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
pub struct AccessKeys {
    /// Pools, by the value of `pool_label`; empty for nodes without the label.
    pools: Option<Vec<String>>,
    isolation: Option<Vec<Named<Isolation>>>,
    /// Policies that pods may name.
    policies: Option<Vec<Named<Policy>>>,
    workloads: Option<Vec<String>>,
}

/// One of the names that a type knows.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Named<T>(T);

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for Named<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        parsed(from).map(Self)
    }
}

/// What a list allows; all without one.
fn allowed<T: Copy + Ord>(list: Option<&Vec<Named<T>>>) -> Option<BTreeSet<T>> {
    list.map(|all| all.iter().map(|named| named.0).collect())
}

impl AccessConfig {
    /// What pods may use, by their namespace.
    pub(crate) fn rules(&self) -> AccessRules {
        let named = self.namespaces.iter().map(|(name, keys)| (name.clone(), keys.access()));
        AccessRules { namespaces: named.collect(), others: self.others.access() }
    }
}

impl AccessKeys {
    fn access(&self) -> Access {
        let pools = self.pools.as_ref().map(|pools| {
            PoolFilter::only(pools.iter().map(|pool| PoolName::new(pool.as_str())).collect())
        });
        Access {
            pools: pools.unwrap_or_default(),
            isolation: allowed(self.isolation.as_ref()),
            policies: allowed(self.policies.as_ref()),
            workloads: self.workloads.clone().map(BTreeSet::from_iter),
        }
    }
}

/// A rule for the section `access`, whose classes of workloads must be these.
pub(crate) fn known(
    classes: &BTreeMap<String, WorkloadKeys>,
) -> impl FnOnce(&AccessConfig, &()) -> garde::Result {
    let known: BTreeSet<String> = classes.keys().cloned().collect();
    move |access, ()| {
        if let Some(name) =
            access.namespaces.keys().find(|name| !is_name(name, 63, "-") || has_capitals(name))
        {
            return Err(garde::Error::new(format!("`{name}` must be the name of a namespace")));
        }
        let named = access.namespaces.iter().map(|(name, keys)| (name.as_str(), keys));
        for (name, keys) in named.chain([("others", &access.others)]) {
            let mut classes = keys.workloads.iter().flatten();
            if let Some(class) = classes.find(|class| !known.contains(*class)) {
                return Err(garde::Error::new(format!(
                    "`{class}`, which `{name}` may use, must be a class of `workloads`"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

    const TEXT: &str = "
workloads:
  train: {}
  notebook: {priority_class: interactive, priority: 200, protect_seconds: 3600, policy: binpack}
  serve: {preemptible: false, policy: spread}
access:
  namespaces:
    research: {pools: [training, ''], isolation: [none], policies: [spread], workloads: [train]}
  others: {pools: []}
";

    #[test]
    fn every_key_is_read() {
        let rules = Config::from_yaml(TEXT).unwrap().request_rules();
        let class = |name: &str| rules.workloads.named(name).unwrap().clone();
        let notebook = WorkloadClass {
            name: "notebook".to_owned(),
            priority_class: "interactive".to_owned(),
            protection: Some(Protection::Seconds(3_600)),
            policy: Some(Policy::BinPack),
        };
        assert_eq!(rules.workloads.of("interactive"), Some(&notebook));
        assert_eq!(class("train").priority_class, "gpupack-train");
        assert_eq!((class("train").protection, class("train").policy), (None, None));
        assert_eq!(class("serve").protection, Some(Protection::Always));
        let research = rules.access.of("research");
        let may = |name: &str, access: &Access| access.pools.accepts(&PoolName::new(name));
        assert!(may("training", research) && may("", research) && !may("other", research));
        assert_eq!(research.isolation, Some([Isolation::None].into()));
        assert_eq!(research.policies, Some([Policy::Spread].into()));
        assert_eq!(research.workloads, Some(["train".to_owned()].into()));
        assert!(!may("training", rules.access.of("x")) && !may("", rules.access.of("x")));
        for section in ["workloads.any", "access", "access.others"] {
            assert!(keys_of(section).iter().all(|key| TEXT.contains(&format!("{key}:"))));
        }
        let without = Config::from_yaml("workloads:\naccess:").unwrap().request_rules();
        assert_eq!(without.workloads.names().count(), 0);
        assert!(may("any", without.access.of("x")));
    }

    #[test]
    fn faults_name_what_is_allowed() {
        for (text, part) in [
            ("workloads: {Ä: {}}", "`Ä` must be a value of a label"),
            ("workloads: {a: {priority_class: 'x y'}}", "`priority_class` of `a` must be the name"),
            (
                "workloads: {a: {preemptible: false, protect_seconds: 1}}",
                "one of `preemptible: false`",
            ),
            (
                "workloads: {a: {priority_class: x}, b: {priority_class: x}}",
                "another `priority_class`",
            ),
            ("workloads: {a: {policy: best}}", "use `binpack`, `spread` or `fragmentation`"),
            ("workloads: {a: {protect_seconds: 604801}}", "0 to 604800"),
            ("access: {others: {workloads: [a]}}", "`a`, which `others` may use, must be a class"),
            ("access: {namespaces: {'a/b': {}}}", "`a/b` must be the name of a namespace"),
            ("access: {namespaces: {Research: {}}}", "`Research` must be the name of a namespace"),
            ("workloads: {Train: {}}", "`priority_class` of `Train` must be the name"),
            ("access: {others: {isolation: [some]}}", "access.others.isolation"),
            ("access: {others: {policies: [some]}}", "access.others.policies"),
            ("access: {others: {pool: []}}", "access.others.pool"),
        ] {
            let faults = Config::from_yaml(text).unwrap_err();
            assert_eq!(faults.faults.len(), 1, "{faults}");
            assert!(faults.to_string().contains(part), "{part} in {faults}");
        }
    }
}
