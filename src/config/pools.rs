//! The section `pools`: how the devices of each pool are shared.

use serde_yaml_ng::Value;

use crate::config::reader::Reader;
use crate::config::webhook::MemoryLimit;
use crate::hardware::device::PoolName;
use crate::hardware::pool::{Guard, InstanceUse, PoolRule, PoolRules, Replicas};

/// All keys of one pool, in the order of the docs.
pub const KEYS: [&str; 3] = ["replicas", "mig_instances", "protection"];

/// Takes the rules of all pools out of `reader`. `limit` is how admission limits memory.
pub(crate) fn read(reader: &mut Reader, limit: MemoryLimit) -> PoolRules {
    let allowed = "a mapping of pool names to `replicas`, `mig_instances` and `protection`";
    let pools = match reader.take("pools") {
        None => return PoolRules::default(),
        Some(Value::Mapping(pools)) => pools,
        Some(value) => {
            reader.fault("pools", &value, allowed);
            return PoolRules::default();
        }
    };
    let mut rules = Vec::new();
    for (name, value) in pools {
        match (name.as_str(), value) {
            (Some(name), Value::Mapping(mapping)) => {
                let mut of_pool =
                    Reader { mapping, section: format!("pools.{name}."), faults: Vec::new() };
                rules.push((PoolName::new(name), rule(&mut of_pool, limit)));
                of_pool.unknown_keys(&KEYS);
                reader.faults.append(&mut of_pool.faults);
            }
            (_, value) => reader.fault("pools", &value, allowed),
        }
    }
    PoolRules::new(rules)
}

fn rule(reader: &mut Reader, limit: MemoryLimit) -> PoolRule {
    let range = u64::from(Replicas::MIN)..=u64::from(Replicas::MAX);
    let replicas = reader.number_or_none("replicas", range);
    let replicas = replicas.and_then(|count| Replicas::new(u32::try_from(count).ok()?));
    let instances = if replicas.is_some() { InstanceUse::Shared } else { InstanceUse::default() };
    let guards = [Guard::None, Guard::Mps, Guard::Driver].map(|guard| (guard.name(), guard));
    let rule = PoolRule {
        replicas,
        instances: reader.word(
            "mig_instances",
            &[("whole", InstanceUse::Whole), ("shared", InstanceUse::Shared)],
            instances,
        ),
        guard: reader.word("protection", &guards, Guard::default()),
    };
    if rule.guard == Guard::Driver && limit != MemoryLimit::Driver {
        let value = Value::String(rule.guard.name().to_owned());
        let allowed = "`none` or `mps`, as long as `webhook.memory_limit` is not `driver`: nothing \
            would hand the limits to the driver";
        reader.fault("protection", &value, allowed);
    }
    rule
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;

    fn rule_of(text: &str) -> PoolRule {
        let text = format!("webhook: {{memory_limit: driver}}\npools: {{a: {text}}}");
        Config::from_yaml(&text).unwrap().pools.of(&PoolName::new("a"))
    }

    #[test]
    fn a_pool_says_how_its_devices_are_shared() {
        let four = Replicas::new(4);
        let (whole, shared) = (InstanceUse::Whole, InstanceUse::Shared);
        for (text, replicas, instances, guard) in [
            ("{}", None, whole, Guard::None),
            ("{replicas: 4}", four, shared, Guard::None),
            ("{replicas: 4, mig_instances: whole}", four, whole, Guard::None),
            ("{mig_instances: shared, protection: mps}", None, shared, Guard::Mps),
            ("{protection: driver}", None, whole, Guard::Driver),
            ("{replicas: , protection: none}", None, whole, Guard::None),
        ] {
            assert_eq!(rule_of(text), PoolRule { replicas, instances, guard }, "{text}");
        }
    }

    #[test]
    fn a_pool_that_is_not_named_shares_freely_and_unprotected() {
        let pools =
            Config::from_yaml("pools: {a: {replicas: 8}, '': {replicas: 2}}").unwrap().pools;
        assert_eq!(pools.of(&PoolName::new("b")), PoolRule::default());
        assert_eq!(pools.of(&PoolName::new("")).replicas, Replicas::new(2), "no label is a pool");
        assert_eq!(pools.of(&PoolName::new("a")).replicas, Replicas::new(8));
    }

    #[test]
    fn faults_of_a_pool_are_named_with_pool_key_value_and_range() {
        for (text, part) in [
            ("pools: [a]", "`pools: - a` is not allowed"),
            ("pools: {a: 4}", "`pools: 4` is not allowed"),
            ("pools: {7: {replicas: 4}}", "a mapping of pool names"),
            (
                "pools: {a: {replicas: 1}}",
                "`pools.a.replicas: 1` is not allowed: it must be a whole number from 2 to 64",
            ),
            ("pools: {a: {replicas: 65}}", "`pools.a.replicas: 65`"),
            ("pools: {a: {replicas: 2.5}}", "`pools.a.replicas: 2.5`"),
            ("pools: {a: {replicas: -4}}", "`pools.a.replicas: -4`"),
            ("pools: {a: {mig_instances: split}}", "`whole` or `shared`"),
            ("pools: {a: {protection: mig}}", "`none`, `mps` or `driver`"),
            ("pools: {a: {protection: driver}}", "`webhook.memory_limit` is not `driver`"),
            ("pools: {a: {replica: 4}}", "key `pools.a.replica` is unknown"),
        ] {
            let faults = Config::from_yaml(text).unwrap_err().faults;
            assert_eq!(faults.len(), 1, "{text}: {faults:?}");
            assert!(faults[0].contains(part), "{text}: {faults:?}");
        }
    }
}
