//! What the optional columns of a trace say: a file of the public trace has none of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::trace::forms::{
    self, Form, device_memory, list, parts, profile, share, share_text, whole,
};
use engine::hardware::pool::{ConfiguredIsolation, Enforcement, InstanceUse, PoolRule, Replicas};
use engine::model::policy::Policy;
use engine::model::request::{Amount, Isolation, Limit};
use wire::ids::{MAX_DEVICES_PER_NODE, MigProfile};
use wire::units::{Demand, MemMib, Share};

/// What the optional columns say of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MoreOfNode {
    /// Schedulable memory: one for all GPUs, or one for each; empty where only the model is known.
    #[serde(rename = "gpu_memory_mib", with = "forms")]
    pub gpu_memory: Vec<MemMib>,
    /// The model of each GPU; empty if all have that of the node.
    #[serde(with = "forms")]
    pub gpu_models: Vec<String>,
    /// The MIG instances of each GPU; empty if no GPU is in MIG mode.
    #[serde(rename = "mig", with = "forms")]
    pub instances: Vec<Vec<TraceInstance>>,
    /// How its pool shares the devices.
    #[serde(skip)]
    pub rule: PoolRule,
    /// Devices that take no new pods.
    #[serde(with = "forms")]
    pub unavailable: BTreeSet<DeviceAt>,
    /// Memory in use beyond what is allocated.
    #[serde(rename = "other_use_mib", with = "forms")]
    pub other_use: BTreeMap<DeviceAt, MemMib>,
}

/// A MIG instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceInstance {
    pub profile: MigProfile,
    pub memory: MemMib,
}

/// What the optional columns say of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct MoreOfPod {
    /// The amount of each device; `None` if it is a share in whole thousandths.
    #[serde(skip)]
    pub amount: Option<Amount>,
    /// The weakest isolation that it accepts.
    #[serde(with = "forms")]
    pub isolation: Isolation,
    /// How much it may use while that is free.
    #[serde(skip)]
    pub limit: Option<Limit>,
    /// The policy that it chooses.
    #[serde(with = "forms")]
    pub policy: Option<Policy>,
    /// Least memory of a part of a device.
    #[serde(rename = "min_gpu_memory_mib", with = "forms")]
    pub min_memory: MemMib,
    /// Whether a whole MIG instance may serve it.
    #[serde(with = "forms")]
    pub by_instance: bool,
    /// Its priority.
    #[serde(with = "forms")]
    pub priority: i32,
    /// Where it runs.
    #[serde(skip)]
    pub placed: Option<TracePlacement>,
}

/// Where a pod runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct TracePlacement {
    /// The name of its node.
    #[serde(deserialize_with = "forms::model")]
    pub node: String,
    /// Its devices, with what it holds of each; none for a pod without a GPU, or one whose devices
    /// are gone.
    #[serde(with = "forms")]
    pub devices: Vec<(DeviceAt, Demand)>,
    /// The isolation that it was placed with.
    #[serde(rename = "placed_isolation", with = "forms")]
    pub isolation: ConfiguredIsolation,
}

/// A device of a node: `1` is GPU 1, `1.0` its first MIG instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceAt {
    /// Position of the GPU, from 0.
    pub gpu: u32,
    /// Position of the instance on it, from 0.
    pub instance: Option<u32>,
}

/// The columns with the rule of a node's pool.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RuleColumns {
    #[serde(with = "forms")]
    pub(crate) slots: Option<Replicas>,
    #[serde(with = "forms")]
    pub(crate) mig_instances: InstanceUse,
    #[serde(with = "forms")]
    pub(crate) enforcement: Enforcement,
}

/// The columns with what a pod requests and uses of each GPU.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct GpuColumns {
    #[serde(with = "forms")]
    pub(crate) gpu_milli: Option<Share>,
    #[serde(with = "forms")]
    pub(crate) gpu_memory_mib: MemMib,
    #[serde(with = "forms")]
    pub(crate) mig_profile: Option<MigProfile>,
    #[serde(deserialize_with = "forms::some_number::<0, 1, _>")]
    pub(crate) gpu_slots: Option<u64>,
    #[serde(with = "forms")]
    pub(crate) limit_milli: Option<Share>,
    #[serde(with = "forms")]
    pub(crate) limit_gpu_memory_mib: Option<MemMib>,
}

/// What a MIG profile with its memory is written like.
pub(crate) const INSTANCES: &str = "`profile:MiB` of each instance, such as `1g.10gb:9728`, with \
    blanks between those of a GPU and `|` between GPUs; MiB may be left out for a listed model";

forms::forms! {
    Vec<Vec<TraceInstance>>: INSTANCES,
        |text| parts(text, instances),
        |all| list(all, |of_gpu: &Vec<TraceInstance>| instances_text(of_gpu));
    BTreeSet<DeviceAt>: "devices of the node, such as `0|1.2`",
        |text| parts(text, device_at), |all| list(all, DeviceAt::to_string);
    BTreeMap<DeviceAt, MemMib>:
        "`device:MiB` of different devices, such as `0:512|1.2:64`", other_use, other_use_text;
    Vec<(DeviceAt, Demand)>:
        "`device:MiB:thousandths` of different devices, such as `0:4096:250|1.2:9728:1000`",
        devices, |all| list(all, |(device, demand): &(DeviceAt, Demand)| held_text(*device, *demand));
}

/// The instances of a GPU; one whose memory is left out has none yet.
fn instances(text: &str) -> Option<Vec<TraceInstance>> {
    let instances = text.split_whitespace().map(|text| {
        let (name, memory) = text.split_once(':').map_or((text, None), |(a, b)| (a, Some(b)));
        let memory = memory.map_or(Some(MemMib::ZERO), |memory| device_memory(memory, 1))?;
        Some(TraceInstance { profile: profile(name)?, memory })
    });
    instances.collect()
}

fn instances_text(all: &[TraceInstance]) -> String {
    let texts =
        all.iter().map(|instance| format!("{}:{}", instance.profile, instance.memory.mib()));
    texts.collect::<Vec<String>>().join(" ")
}

fn device_at(text: &str) -> Option<DeviceAt> {
    Some(match text.split_once('.') {
        Some((gpu, instance)) => DeviceAt { gpu: whole(gpu)?, instance: Some(whole(instance)?) },
        None => DeviceAt { gpu: whole(text)?, instance: None },
    })
}

impl fmt::Display for DeviceAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.instance {
            Some(instance) => write!(f, "{}.{instance}", self.gpu),
            None => write!(f, "{}", self.gpu),
        }
    }
}

fn other_use(text: &str) -> Option<BTreeMap<DeviceAt, MemMib>> {
    different(parts(text, |part| {
        let (device, memory) = part.split_once(':')?;
        Some((device_at(device)?, device_memory(memory, 1)?))
    })?)
}

fn other_use_text(all: &BTreeMap<DeviceAt, MemMib>) -> String {
    let texts = all.iter().map(|(device, memory)| format!("{device}:{}", memory.mib()));
    texts.collect::<Vec<String>>().join("|")
}

/// The devices that a pod holds.
fn devices(text: &str) -> Option<Vec<(DeviceAt, Demand)>> {
    let all: Vec<_> = parts(text, held)?;
    let by_device: BTreeMap<DeviceAt, Demand> = different(all.clone())?;
    (by_device.len() <= MAX_DEVICES_PER_NODE).then_some(all)
}

/// Values of devices; `None` if one is named twice.
fn different<T>(all: Vec<(DeviceAt, T)>) -> Option<BTreeMap<DeviceAt, T>> {
    let count = all.len();
    Some(BTreeMap::from_iter(all)).filter(|all| all.len() == count)
}

/// `device:memory:share`, of a pod that runs there.
fn held(text: &str) -> Option<(DeviceAt, Demand)> {
    let (device, amounts) = text.split_once(':')?;
    let (memory, share) = amounts.split_once(':')?;
    let memory = device_memory(memory.trim(), 0)?;
    Some((device_at(device.trim())?, Demand { memory, share: self::share(share.trim())? }))
}

fn held_text(device: DeviceAt, demand: Demand) -> String {
    format!("{device}:{}:{}", demand.memory.mib(), share_text(demand.share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_what_is_held_of_them_are_read_as_written() {
        for text in ["0:0:0", "12:4096:250", "3.6:19968:1000", "0.0:1:0.001"] {
            let (device, demand) = held(text).unwrap();
            assert_eq!(held_text(device, demand), text);
        }
        for bad in ["", "0", "0:1", "0:1:1:1", "a:1:1", "0.:1:1", "0:99999999999:1", "0:1:1001"] {
            assert_eq!(held(bad), None, "{bad}");
        }
    }
}
