//! The size that an operator gives to GPUs without memory of their own.
//!
//! The driver of such a GPU (GB10, for instance) reports none, since it shares that of its host. The size says only
//! how pods are counted there: nothing limits them to it, and what they use is not known.

use wire::device::ModelFilter;
use wire::ids::ModelName;
use wire::units::MemMib;

/// How much memory a GPU of a model counts as, if it reports none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelSizes(Vec<(ModelFilter, MemMib)>);

impl ModelSizes {
    /// These sizes, by the names of models as [`ModelFilter`] reads them.
    pub fn new<'a>(sizes: impl IntoIterator<Item = (&'a str, MemMib)>) -> Self {
        let sizes = sizes.into_iter().map(|(name, size)| (ModelFilter::new([name]), size));
        Self(sizes.collect())
    }

    /// The size of a model: the least one, if several names match. `None` if none does.
    pub fn of(&self, model: &ModelName) -> Option<MemMib> {
        let named = self.0.iter().filter(|(name, _)| name.matches(model));
        named.map(|(_, size)| *size).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_size_of_the_names_that_match_counts() {
        let sizes = [("GB10", 100), ("NVIDIA", 300), ("H100", 7)];
        let sizes = ModelSizes::new(sizes.map(|(name, mib)| (name, MemMib::new(mib))));
        for (model, size) in
            [("NVIDIA GB10", Some(100)), ("NVIDIA A30", Some(300)), ("GB100", None)]
        {
            assert_eq!(sizes.of(&ModelName::new(model)), size.map(MemMib::new), "{model}");
        }
    }
}
