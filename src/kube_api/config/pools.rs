//! The sections `pools`, how the devices of each pool are shared, and `models`, the size of GPUs that have no
//! memory of their own.

use std::collections::BTreeMap;

use garde::Validate;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use crate::config::values::{NoContext, mib, number};
use crate::config::webhook::MemoryLimit;
use engine::hardware::model_sizes::ModelSizes;
use engine::hardware::pool::{
    Borrow, Enforcement, InstanceUse, MigUse, PoolRule, PoolRules, Replicas,
};
use wire::device::ModelFilter;
use wire::ids::PoolName;
use wire::units::{MemMib, Share};

/// The keys of one pool, in the order of the docs.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
struct PoolKeys {
    #[serde(deserialize_with = "replicas")]
    replicas: Option<Replicas>,
    mig_instances: Option<MigInstances>,
    #[serde(deserialize_with = "EnforcementName::deserialize")]
    enforcement: Enforcement,
    borrow: BorrowName,
    #[serde(deserialize_with = "MigUseName::deserialize")]
    mig: MigUse,
}

impl PoolKeys {
    /// Whether devices, or MIG instances, have several tenants by these keys alone.
    fn shares(&self) -> bool {
        self.replicas.is_some() || matches!(self.mig_instances, Some(MigInstances::Shared))
    }

    fn rule(self) -> PoolRule {
        PoolRule {
            replicas: self.replicas,
            instances: match self.mig_instances {
                Some(MigInstances::Whole) => InstanceUse::Whole,
                Some(MigInstances::Shared) => InstanceUse::Shared,
                None if self.replicas.is_some() => InstanceUse::Shared,
                None => InstanceUse::default(),
            },
            enforcement: self.enforcement,
            borrow: match self.borrow {
                BorrowName::None => Borrow::None,
                BorrowName::Compute => Borrow::Compute,
                BorrowName::Memory => Borrow::Memory { most: Share::WHOLE },
            },
            driver_limits: false, // a key of another section says so
            mig: self.mig,
        }
    }
}

/// The names of [`MigUse`].
#[derive(Deserialize)]
#[serde(remote = "MigUse", rename_all = "snake_case")]
enum MigUseName {
    Fixed,
    OnDemand,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum MigInstances {
    Whole,
    Shared,
}

/// The names of [`Enforcement`], which knows no file.
#[derive(Deserialize)]
#[serde(remote = "Enforcement", rename_all = "lowercase")]
enum EnforcementName {
    None,
    Mps,
    Driver,
}

/// The names of [`Borrow`].
#[derive(Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum BorrowName {
    #[default]
    None,
    Compute,
    Memory,
}

/// Reads the rules of all pools.
pub(crate) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<PoolRules, D::Error> {
    let pools = BTreeMap::<String, PoolKeys>::deserialize(from)?;
    let both = pools.iter().find(|(_, keys)| keys.mig.makes() && keys.shares());
    if let Some((pool, _)) = both {
        return Err(D::Error::custom(format!(
            "pool `{pool}` has `mig: on_demand`, which makes each instance for one pod: leave out \
             `replicas` and `mig_instances: shared`"
        )));
    }
    Ok(PoolRules::new(pools.into_iter().map(|(name, keys)| (PoolName::new(name), keys.rule()))))
}

fn replicas<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Replicas>, D::Error> {
    const { assert!(Replicas::MIN == 2 && Replicas::MAX == 64) };
    number::<2, 64, _, D>(from).map(Replicas::new)
}

/// A rule for the pools: `limit` is how the webhook limits memory.
pub(crate) fn enforceable(limit: MemoryLimit) -> impl FnOnce(&PoolRules, &()) -> garde::Result {
    move |pools, ()| {
        let by_driver = pools.iter().filter(|(_, rule)| rule.enforcement == Enforcement::Driver);
        let named: Vec<String> = by_driver.map(|(pool, _)| format!("`{pool}`")).collect();
        if named.is_empty() || limit == MemoryLimit::Driver {
            return Ok(());
        }
        Err(garde::Error::new(format!(
            "the enforcement of {} must be `none` or `mps`, as long as `webhook.memory_limit` is not \
             `driver`: nothing would give the limits to the driver",
            named.join(", ")
        )))
    }
}

/// Most models that are named; each is compared with each GPU of a report.
const MODELS_MAX: usize = 64;

/// Checked section `models`, by the names of models.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Validate)]
#[serde(transparent)]
pub struct ModelsConfig(#[garde(custom(named))] BTreeMap<String, ModelKeys>);

/// The keys of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
struct ModelKeys {
    /// How much memory such a GPU counts as.
    #[serde(rename = "memory_mib", deserialize_with = "mib::<1_024, 16_777_216, _>")]
    memory: MemMib,
}

impl ModelsConfig {
    /// The size of each model.
    pub fn sizes(&self) -> ModelSizes {
        ModelSizes::new(self.0.iter().map(|(model, keys)| (model.as_str(), keys.memory)))
    }
}

/// A rule for models.
fn named(models: &BTreeMap<String, ModelKeys>, _: &NoContext) -> garde::Result {
    if models.len() > MODELS_MAX {
        return Err(garde::Error::new(format!("it must name at most {MODELS_MAX} models")));
    }
    match models.keys().find(|model| !ModelFilter::is_name(model)) {
        Some(model) => Err(garde::Error::new(format!(
            "`{model}` must be the name of a model, such as `GB10`, of letters, digits, blanks and \
             `-./()+_`, a letter or digit first"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;
    use wire::ids::ModelName;

    fn rule_of(text: &str) -> PoolRule {
        let text = format!("webhook: {{memory_limit: driver}}\npools: {{a: {text}}}");
        Config::from_yaml(&text).unwrap().pools.of(&PoolName::new("a"))
    }

    #[test]
    fn a_pool_says_how_its_devices_are_shared() {
        let four = Replicas::new(4);
        let (whole, shared) = (InstanceUse::Whole, InstanceUse::Shared);
        for (text, replicas, instances, enforcement) in [
            ("{}", None, whole, Enforcement::None),
            ("{replicas: 4}", four, shared, Enforcement::None),
            ("{replicas: 4, mig_instances: whole}", four, whole, Enforcement::None),
            ("{mig_instances: shared, enforcement: mps}", None, shared, Enforcement::Mps),
            ("{enforcement: driver}", None, whole, Enforcement::Driver),
            ("{replicas: , enforcement: none}", None, whole, Enforcement::None),
        ] {
            assert_eq!(
                rule_of(text),
                PoolRule { replicas, instances, enforcement, ..PoolRule::default() },
                "{text}"
            );
        }
    }

    #[test]
    fn a_pool_lends_memory_up_to_the_highest_limit() {
        let text = "max_limit: 0.75\npools: {a: {borrow: memory}, b: {borrow: compute}, c: {}}";
        let pools = Config::from_yaml(text).unwrap().pools;
        let borrow = |pool| pools.of(&PoolName::new(pool)).borrow;
        let most = Share::from_millionths(750_000);
        let found = [borrow("a"), borrow("b"), borrow("c")];
        assert_eq!(found, [Borrow::Memory { most }, Borrow::Compute, Borrow::None]);
        let limited = |text: &str| {
            Config::from_yaml(text).unwrap().pools.of(&PoolName::new("a")).driver_limits
        };
        assert!(limited("webhook: {memory_limit: driver}\npools: {a: {borrow: memory}}"));
        assert!(!limited("webhook: {memory_limit: driver}\npools: {a: {borrow: compute}}"));
        assert!(!limited("webhook: {memory_limit: mps}\npools: {a: {borrow: memory}}"));
    }

    #[test]
    fn an_unnamed_pool_shares_freely_and_without_isolation() {
        let pools =
            Config::from_yaml("pools: {a: {replicas: 8}, '': {replicas: 2}}").unwrap().pools;
        assert_eq!(pools.of(&PoolName::new("b")), PoolRule::default());
        assert_eq!(
            pools.of(&PoolName::new("")).replicas,
            Replicas::new(2),
            "a missing label is a pool"
        );
        assert_eq!(pools.of(&PoolName::new("a")).replicas, Replicas::new(8));
    }

    #[test]
    fn faults_of_a_pool_are_named_with_pool_key_value_and_range() {
        for (text, part) in [
            ("pools: [a]", "`pools: - a` is not allowed"),
            ("pools: {a: 4}", "`pools.a: 4` is not allowed"),
            ("pools: {7: {replicas: 4}}", "`: 7` is not allowed: a key must be a text"),
            (
                "pools: {a: {replicas: 1}}",
                "`pools.a.replicas: 1` is not allowed: it must be a whole number from 2 to 64",
            ),
            ("pools: {a: {replicas: 65}}", "`pools.a.replicas: 65`"),
            ("pools: {a: {replicas: 2.5}}", "`pools.a.replicas: 2.5`"),
            ("pools: {a: {replicas: -4}}", "`pools.a.replicas: -4`"),
            ("pools: {a: {mig_instances: split}}", "expected `whole` or `shared`"),
            ("pools: {a: {enforcement: mig}}", "expected one of `none`, `mps`, `driver`"),
            ("pools: {a: {enforcement: driver}}", "`webhook.memory_limit` is not `driver`"),
            (
                "pools: {a: {enforcement: driver}, b: {enforcement: driver}}",
                "the enforcement of `a`, `b` must be",
            ),
            ("pools: {a: {borrow: all}}", "expected one of `none`, `compute`, `memory`"),
            ("pools: {a: {mig: on_demand, replicas: 4}}", "`mig: on_demand`, which makes each"),
            (
                "pools: {a: {mig: on_demand, mig_instances: shared}}",
                "`mig: on_demand`, which makes each",
            ),
            ("pools: {a: {mig: sometimes}}", "expected `fixed` or `on_demand`"),
            ("pools: {a: {replica: 4}}", "`pools.a.replica: 4` is not allowed: unknown field"),
        ] {
            let faults = Config::from_yaml(text).unwrap_err().faults;
            assert_eq!(faults.len(), 1, "{text}: {faults:?}");
            assert!(faults[0].contains(part), "{text}: {faults:?}");
        }
    }

    #[test]
    fn a_model_without_memory_of_its_own_has_a_size() {
        let sizes =
            Config::from_yaml("models: {GB10: {memory_mib: 122880}}").unwrap().models.sizes();
        let of = |model| sizes.of(&ModelName::new(model));
        assert_eq!(of("NVIDIA GB10"), Some(MemMib::new(122_880)));
        assert_eq!(of("NVIDIA H100"), None);
        for (text, part) in [
            ("models: {GB10: {memory_mib: 1023}}", "`models.GB10.memory_mib: 1023` is not allowed"),
            ("models: {GB10: {memory_mib: 16777217}}", "from 1024 to 16777216"),
            ("models: {GB10: {memory_mib: 120G}}", "from 1024 to 16777216"),
            ("models: {GB10: {}}", "missing field `memory_mib`"),
            ("models: {GB10: {memory: 1}}", "unknown field"),
            ("models: {'*': {memory_mib: 2048}}", "`*` must be the name of a model"),
        ] {
            let faults = Config::from_yaml(text).unwrap_err().faults;
            assert!(faults[0].contains(part), "{text}: {faults:?}");
        }
        let many = (0..65).map(|at| format!("m{at}: {{memory_mib: 2048}}")).collect::<Vec<_>>();
        let faults =
            Config::from_yaml(&format!("models: {{{}}}", many.join(", "))).unwrap_err().faults;
        assert!(faults[0].contains("at most 64"), "{faults:?}");
    }
}
