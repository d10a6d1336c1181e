//! The sections `quota` and `shares` of the configuration: what GPU pods count against quotas of their
//! namespaces, and what teams may have of the GPUs.

use std::collections::BTreeMap;

use garde::Validate;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_yaml_ng::Value;

use crate::config::pods::requests::{decimal, share};
use crate::config::values::{NoContext, label, mib, some_mib};
use engine::model::charge::ModelPrice;
use engine::model::team::{TeamRules, TeamShare};
use wire::device::ModelFilter;
use wire::units::{MemMib, Share};

/// Checked section `quota`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Validate)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
#[garde(allow_unvalidated)]
pub struct QuotaConfig {
    /// Whether a waiting pod is refused whose markers are missing or less than it counts.
    pub required: bool,
    /// Memory of the GPU that a pod is charged for if it names no model with a price.
    #[serde(rename = "reference_memory_mib", deserialize_with = "mib::<1_024, 1_048_576, _>")]
    pub reference: MemMib,
    /// What a GPU of a model counts, by words of its name.
    #[garde(custom(below(self.reference)))]
    pub models: BTreeMap<String, PriceKeys>,
}

/// The keys of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
pub struct PriceKeys {
    /// Memory of the GPU; that of the reference if `None`.
    #[serde(rename = "memory_mib", deserialize_with = "some_mib::<1_024, 1_048_576, _>")]
    memory: Option<MemMib>,
    /// What it is worth, in GPUs of the reference.
    #[serde(deserialize_with = "share")]
    weight: Share,
}

impl Default for PriceKeys {
    fn default() -> Self {
        Self { memory: None, weight: Share::WHOLE }
    }
}

impl Default for QuotaConfig {
    fn default() -> Self {
        Self { required: false, reference: MemMib::new(81_920), models: BTreeMap::new() }
    }
}

impl QuotaConfig {
    /// What GPUs of the models count.
    pub(crate) fn models(&self) -> Vec<ModelPrice> {
        let prices = self.models.iter().map(|(model, keys)| ModelPrice {
            model: model.clone(),
            memory: keys.memory.unwrap_or(self.reference),
            weight: keys.weight,
        });
        prices.collect()
    }
}

/// A rule for models: a pod that names none is charged for the reference, which must not be cheaper.
fn below(reference: MemMib) -> impl FnOnce(&BTreeMap<String, PriceKeys>, &()) -> garde::Result {
    move |models, ()| {
        if let Some(model) = models.keys().find(|model| !ModelFilter::is_name(model)) {
            return Err(garde::Error::new(format!(
                "`{model}` must be the name of a model, such as `H100`, of letters, digits, blanks and \
                 `-./()+_`, a letter or digit first"
            )));
        }
        let larger =
            models.iter().find(|(_, keys)| keys.memory.is_some_and(|memory| memory > reference));
        larger.map_or(Ok(()), |(model, _)| {
            Err(garde::Error::new(format!(
                "the memory of `{model}` must be at most `quota.reference_memory_mib`, {}: pods that \
                 name no model are charged for that",
                reference.mib()
            )))
        })
    }
}

/// Most GPUs that a team may have; more than any cluster has.
const MOST: Share = Share::from_millionths(1_000_000 * Share::WHOLE.millionths());

/// Checked section `shares`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Validate)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
#[garde(allow_unvalidated)]
pub struct SharesConfig {
    /// The label of namespaces whose value is the team; empty: each namespace is a team.
    #[garde(custom(key_or_empty))]
    pub label: String,
    /// What each team may have, by its name.
    #[garde(custom(named))]
    pub teams: BTreeMap<String, ShareKeys>,
    /// What each other team may have.
    #[garde(custom(ordered("others")))]
    pub others: ShareKeys,
}

/// The keys of one team.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
pub struct ShareKeys {
    /// GPUs that it gets back from over-quota pods of others.
    #[serde(deserialize_with = "gpus")]
    guaranteed: Share,
    /// Most GPUs that it has; as many as there are if `None`.
    #[serde(deserialize_with = "some_gpus")]
    at_most: Option<Share>,
}

impl SharesConfig {
    /// Shares of teams by namespace.
    pub fn of(teams: impl Iterator<Item = (String, TeamShare)>) -> Self {
        let teams = teams.map(|(team, TeamShare { guaranteed, at_most })| {
            (team, ShareKeys { guaranteed, at_most })
        });
        Self { teams: teams.collect(), ..Self::default() }
    }

    /// What teams may have; `None` if nothing is said.
    pub fn rules(&self) -> Option<TeamRules> {
        (*self != Self::default()).then(|| TeamRules {
            label: self.label.clone(),
            teams: self.teams.iter().map(|(team, keys)| (team.clone(), keys.share())).collect(),
            others: self.others.share(),
        })
    }
}

impl ShareKeys {
    fn share(self) -> TeamShare {
        TeamShare { guaranteed: self.guaranteed, at_most: self.at_most }
    }
}

fn gpus<'de, D: Deserializer<'de>>(from: D) -> Result<Share, D::Error> {
    let gpus = some_gpus(from)?;
    Ok(gpus.unwrap_or_default())
}

fn some_gpus<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Share>, D::Error> {
    let text = match Value::deserialize(from)? {
        Value::Null => return Ok(None),
        Value::Number(number) => number.to_string(),
        other => other.as_str().unwrap_or_default().to_owned(),
    };
    let gpus = decimal(&text).filter(|gpus| *gpus <= MOST);
    gpus.map(Some).ok_or_else(|| {
        D::Error::custom(
            "it must be a number of GPUs up to 1000000 with at most 5 decimals, such as `8` or `0.5`",
        )
    })
}

fn key_or_empty(key: &str, _: &NoContext) -> garde::Result {
    if key.is_empty() { Ok(()) } else { label(key, &()) }
}

fn named(teams: &BTreeMap<String, ShareKeys>, _: &NoContext) -> garde::Result {
    if teams.keys().any(|team| team.is_empty() || team.contains('/')) {
        return Err(garde::Error::new("a team must have a name without a slash"));
    }
    teams.iter().try_for_each(|(team, keys)| ordered(team)(keys, &()))
}

fn ordered(team: &str) -> impl FnOnce(&ShareKeys, &()) -> garde::Result {
    move |keys, ()| match keys.at_most {
        Some(at_most) if at_most < keys.guaranteed => Err(garde::Error::new(format!(
            "`at_most` of `{team}` must be at least its `guaranteed`"
        ))),
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};
    use engine::hardware::pool::Replicas;

    #[test]
    fn every_key_is_read() {
        let text = "quota: {required: true, reference_memory_mib: 90000, models: {A10: {memory_mib: \
            24576, weight: 0.25}, H100: {}}}\npools: {a: {replicas: 4}, b: {replicas: 8}, c: {}}";
        let rules = Config::from_yaml(text).unwrap().request_rules();
        let prices = &rules.prices;
        let price = |model: &str, memory, weight| ModelPrice {
            model: model.to_owned(),
            memory: MemMib::new(memory),
            weight: Share::from_millionths(weight),
        };
        assert_eq!(
            prices.models,
            [price("A10", 24_576, 250_000), price("H100", 90_000, 1_000_000)]
        );
        assert_eq!((prices.reference, rules.needs_markers), (MemMib::new(90_000), true));
        assert!(
            prices.replicas.iter().copied().eq([4, 8].map(|count| Replicas::new(count).unwrap()))
        );
        assert!(keys_of("quota").iter().all(|key| text.contains(&format!("{key}:"))));
        assert_eq!(Config::from_yaml("quota:").unwrap().quota, QuotaConfig::default());
    }

    #[test]
    fn faults_name_the_key() {
        for (keys, part) in [
            ("required: 1", "`quota.required: 1`"),
            ("reference_memory_mib: 7", "1024 to 1048576"),
            ("models: {A10: {weight: 2}}", "above 0 and up to 1"),
            ("models: {A10: {memory_mib: 99999}}", "`A10` must be at most"),
            ("models: {'-': {}}", "must be the name of a model"),
            ("models: {'!H100': {}}", "`!H100` must be the name of a model"),
            ("models: {'A100|H100': {}}", "letters, digits, blanks"),
            ("models: {A10: {price: 1}}", "unknown field"),
            ("limit: 7", "unknown field"),
        ] {
            let fault = Config::from_yaml(&format!("quota: {{{keys}}}")).unwrap_err().to_string();
            assert!(fault.contains(part) && fault.contains("`quota."), "{keys}: {fault}");
        }
    }

    #[test]
    fn every_key_of_shares_is_read() {
        let text = "shares: {label: example.com/team, teams: {vision: {guaranteed: 8, at_most: '16.5'}, \
            speech: {}}, others: {guaranteed: 0.25}}";
        let rules = Config::from_yaml(text).unwrap().shares.rules().unwrap();
        let share = |guaranteed, at_most: Option<u64>| TeamShare {
            guaranteed: Share::from_millionths(guaranteed),
            at_most: at_most.map(Share::from_millionths),
        };
        assert_eq!(rules.label, "example.com/team");
        assert_eq!(rules.of("vision"), share(8_000_000, Some(16_500_000)));
        assert_eq!(rules.of("speech"), share(0, None));
        assert_eq!(rules.of("another"), share(250_000, None));
        assert_eq!(rules.guaranteed(), Share::from_millionths(8_000_000));
        assert!(keys_of("shares").iter().all(|key| text.contains(&format!("{key}:"))));
        for nothing in ["shares:", "shares: {}", "shares: {others: {guaranteed: 0}}"] {
            assert_eq!(Config::from_yaml(nothing).unwrap().shares.rules(), None, "{nothing}");
        }
    }

    #[test]
    fn faults_of_shares_name_the_key() {
        for (keys, part) in [
            ("label: 'a b'", "the key of a label"),
            ("teams: {a: {guaranteed: -1}}", "a number of GPUs"),
            ("teams: {a: {guaranteed: 0.123456}}", "at most 5 decimals"),
            ("teams: {a: {guaranteed: 3, at_most: 2}}", "`at_most` of `a`"),
            ("teams: {'': {guaranteed: 3}}", "must have a name without a slash"),
            ("others: {guaranteed: 3, at_most: 2}", "`at_most` of `others`"),
            ("others: {at_least: 3}", "unknown field"),
            ("weights: {}", "unknown field"),
        ] {
            let fault = Config::from_yaml(&format!("shares: {{{keys}}}")).unwrap_err().to_string();
            assert!(fault.contains(part) && fault.contains("`shares."), "{keys}: {fault}");
        }
    }
}
