//! The section `quota` of the configuration: what GPU pods count against quotas of their namespaces.

use std::collections::BTreeMap;

use garde::Validate;
use serde::Deserialize;

use crate::config::requests::share;
use crate::config::values::{mib, some_mib};
use crate::hardware::device::words;
use crate::hardware::units::{MemMib, Share};
use crate::model::charge::ModelPrice;

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
        let price = |(model, keys): (&String, &PriceKeys)| ModelPrice {
            model: model.clone(),
            memory: keys.memory.unwrap_or(self.reference),
            weight: keys.weight,
        };
        self.models.iter().map(price).collect()
    }
}

/// A rule for models: a pod that names none is charged for the reference, which must not be cheaper.
fn below(reference: MemMib) -> impl FnOnce(&BTreeMap<String, PriceKeys>, &()) -> garde::Result {
    move |models, ()| {
        if let Some(model) = models.keys().find(|model| words(model).is_empty()) {
            return Err(garde::Error::new(format!("`{model}` must be a model, such as `H100`")));
        }
        let larger = models.iter().find(|(_, keys)| keys.memory.is_some_and(|it| it > reference));
        larger.map_or(Ok(()), |(model, _)| {
            Err(garde::Error::new(format!(
                "the memory of `{model}` must be at most `quota.reference_memory_mib`, {}: pods that \
                 name no model are charged for that",
                reference.mib()
            )))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};
    use crate::hardware::pool::Replicas;

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
        assert!(prices.replicas.iter().copied().eq([4, 8].map(|it| Replicas::new(it).unwrap())));
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
            ("models: {'-': {}}", "must be a model"),
            ("models: {A10: {price: 1}}", "unknown field"),
            ("limit: 7", "unknown field"),
        ] {
            let fault = Config::from_yaml(&format!("quota: {{{keys}}}")).unwrap_err().to_string();
            assert!(fault.contains(part) && fault.contains("`quota."), "{keys}: {fault}");
        }
    }
}
