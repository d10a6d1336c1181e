//! What the labels of a Node object say: about its GPUs before an agent reports them, and about their driver.

use crate::request::quantity::{parse_count, parse_whole};
use wire::driver_work::{DriverWork, MigChange, UpgradeState};
use wire::ids::ModelName;
use wire::units::MemMib;

/// Number of GPUs in a node's allocatable resources.
const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// Label of GPU feature discovery: number of GPUs.
const COUNT_LABEL: &str = "nvidia.com/gpu.count";

/// Label of GPU feature discovery: memory of each GPU in MiB.
const MEMORY_LABEL: &str = "nvidia.com/gpu.memory";

/// Label of GPU feature discovery: product name, with `-` for blanks.
const PRODUCT_LABEL: &str = "nvidia.com/gpu.product";

/// Most GPUs that are accepted from a label; no node has more.
const MAX_GPUS: u32 = 64;

/// Whether the name of a label or resource concerns GPUs.
pub fn is_of_gpus(key: &str) -> bool {
    [GPU_RESOURCE, COUNT_LABEL, MEMORY_LABEL, PRODUCT_LABEL].contains(&key)
}

/// The GPUs that a Node object names; all are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelledGpus {
    /// How many, at most 64.
    pub count: u32,
    pub memory: MemMib,
    /// Product name; may be empty.
    pub model: ModelName,
}

/// The GPUs that allocatable resources and labels of GPU feature discovery name; `None` if they
/// name no GPU or no memory.
pub fn labelled_gpus<'a>(
    label: impl Fn(&str) -> Option<&'a str>,
    allocatable: impl Fn(&str) -> Option<&'a str>,
) -> Option<LabelledGpus> {
    let advertised = allocatable(GPU_RESOURCE).and_then(|text| parse_count(text).ok());
    let labelled = label(COUNT_LABEL).and_then(|text| parse_whole(text).ok());
    let count = advertised.filter(|count| *count > 0).or(labelled)?;
    let memory = label(MEMORY_LABEL).and_then(|text| parse_whole(text).ok())?;
    Some(LabelledGpus {
        count: u32::try_from(count).unwrap_or(u32::MAX).min(MAX_GPUS),
        memory: MemMib::new(memory),
        model: ModelName::new(label(PRODUCT_LABEL).unwrap_or_default()),
    })
}

/// What NVIDIA's tools do with the driver of a node, by its labels. An unknown value means nothing: a newer
/// operator may have one.
pub fn driver_work<'a>(node: &str, label: impl Fn(&str) -> Option<&'a str>) -> DriverWork {
    let unknown = |key: &str, value: &str| {
        tracing::debug!(
            node,
            label = key,
            value,
            "a label has an unknown value, which means nothing"
        );
    };
    let upgrade = label(DriverWork::UPGRADE_LABEL).and_then(|value| {
        let state = UpgradeState::ALL.into_iter().find(|state| state.value() == value);
        if state.is_none() && !["", "upgrade-done"].contains(&value) {
            unknown(DriverWork::UPGRADE_LABEL, value);
        }
        state
    });
    let mig = label(DriverWork::MIG_LABEL).and_then(|value| {
        let change = MigChange::ALL.into_iter().find(|change| change.value() == value);
        if change.is_none() && !["", "success", "failed"].contains(&value) {
            unknown(DriverWork::MIG_LABEL, value);
        }
        change
    });
    DriverWork { upgrade, mig }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_other_values_mean_nothing() {
        let of = |upgrade: Option<&'static str>, mig: Option<&'static str>| {
            driver_work("n", |key| match key {
                "nvidia.com/gpu-driver-upgrade-state" => upgrade,
                "nvidia.com/mig.config.state" => mig,
                _ => None,
            })
        };
        let none = DriverWork::default();
        for (upgrade, mig) in [
            (None, None),
            (Some(""), Some("")),
            (Some("upgrade-done"), Some("success")),
            (Some("Drain-Required"), Some("failed")),
            (Some("some-day"), Some("some-day")),
        ] {
            assert_eq!(of(upgrade, mig), none, "{upgrade:?} {mig:?}");
        }
        assert_eq!(
            of(Some("drain-required"), Some("pending")),
            DriverWork { upgrade: Some(UpgradeState::Drain), mig: Some(MigChange::Pending) }
        );
    }
}
