//! What the optional columns of a trace say, and the forms of their values.
//!
//! A file of the public trace has none of these columns. Amounts are exact: memory in MiB, shares
//! in thousandths of a GPU with up to three decimals.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use crate::hardware::device::{MAX_DEVICE_MEMORY, MigProfile};
use crate::hardware::pool::{ConfiguredIsolation, PoolRule};
use crate::hardware::units::{Demand, MemMib, Share};
use crate::model::policy::Policy;
use crate::model::request::{Amount, Isolation, Limit};

/// What the optional columns say of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MoreOfNode {
    /// Schedulable memory: one for all GPUs, or one for each; empty where only the model is known.
    pub gpu_memory: Vec<MemMib>,
    /// The model of each GPU; empty if all have that of the node.
    pub gpu_models: Vec<String>,
    /// The MIG instances of each GPU; empty if no GPU is in MIG mode.
    pub instances: Vec<Vec<TraceInstance>>,
    /// How its pool shares the devices.
    pub rule: PoolRule,
    /// Devices that take no new pods.
    pub unavailable: BTreeSet<DeviceAt>,
    /// Memory in use beyond what is allocated.
    pub other_use: BTreeMap<DeviceAt, MemMib>,
}

/// A MIG instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceInstance {
    /// Its profile.
    pub profile: MigProfile,
    /// Its memory.
    pub memory: MemMib,
}

/// What the optional columns say of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct MoreOfPod {
    /// The amount of each device; `None` if it is a share in whole thousandths.
    pub amount: Option<Amount>,
    /// The weakest isolation that it accepts.
    pub isolation: Isolation,
    /// How much it may use while that is free.
    pub limit: Option<Limit>,
    /// The policy that it chooses.
    pub policy: Option<Policy>,
    /// Least memory of a part of a device.
    pub min_memory: MemMib,
    /// Whether a whole MIG instance may serve it.
    pub by_instance: bool,
    /// Its priority.
    pub priority: i32,
    /// Where it runs.
    pub placed: Option<TracePlacement>,
}

/// Where a pod runs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TracePlacement {
    /// The name of its node.
    pub node: String,
    /// Its devices, with what it holds of each; none for a pod without a GPU, or one whose devices
    /// are gone.
    pub devices: Vec<(DeviceAt, Demand)>,
    /// The isolation that it was placed with.
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

impl fmt::Display for DeviceAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.instance {
            Some(instance) => write!(f, "{}.{instance}", self.gpu),
            None => write!(f, "{}", self.gpu),
        }
    }
}

/// A value of another form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadForm;

impl FromStr for DeviceAt {
    type Err = BadForm;

    fn from_str(text: &str) -> Result<Self, BadForm> {
        let number = |text: &str| u32::try_from(whole(text)?).map_err(|_| BadForm);
        Ok(match text.split_once('.') {
            Some((gpu, instance)) => Self { gpu: number(gpu)?, instance: Some(number(instance)?) },
            None => Self { gpu: number(text)?, instance: None },
        })
    }
}

/// A whole number in digits.
fn whole(text: &str) -> Result<u64, BadForm> {
    let are_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| are_digits).ok_or(BadForm)
}

/// Memory of a device in MiB, at least `least`.
pub(crate) fn device_memory(text: &str, least: u64) -> Result<MemMib, BadForm> {
    let memory = MemMib::new(whole(text)?);
    let is_legal = memory >= MemMib::new(least) && memory <= MAX_DEVICE_MEMORY;
    if is_legal { Ok(memory) } else { Err(BadForm) }
}

/// A share in thousandths with up to three decimals, at most 1000.
pub(crate) fn share(text: &str) -> Result<Share, BadForm> {
    let (milli, decimals) = text.split_once('.').map_or((text, ""), |(a, b)| (a, b));
    let is_legal = decimals.len() <= 3 && !(text.contains('.') && decimals.is_empty());
    let micro = if is_legal { whole(&format!("{decimals:0<3}"))? } else { return Err(BadForm) };
    let millionths = whole(milli)?.checked_mul(1000).and_then(|milli| milli.checked_add(micro));
    let share = Share::from_millionths(millionths.ok_or(BadForm)?);
    if share <= Share::WHOLE { Ok(share) } else { Err(BadForm) }
}

/// The text that [`share`] reads.
pub(crate) fn share_text(share: Share) -> String {
    let (milli, micro) = (share.millionths() / 1000, share.millionths() % 1000);
    match micro {
        0 => milli.to_string(),
        _ => format!("{milli}.{micro:03}").trim_end_matches('0').to_owned(),
    }
}

/// A share in whole thousandths, rounded up.
pub(crate) fn milli_up(share: Share) -> u32 {
    u32::try_from(share.millionths().div_ceil(1000)).unwrap_or(u32::MAX)
}

/// `device:memory:share`, of a pod that runs there.
pub(crate) fn held(text: &str) -> Result<(DeviceAt, Demand), BadForm> {
    let mut parts = text.split(':');
    let mut part = || parts.next().map(str::trim).ok_or(BadForm);
    let (device, memory) = (part()?.parse()?, device_memory(part()?, 0)?);
    let demand = Demand { memory, share: share(part()?)? };
    if parts.next().is_none() { Ok((device, demand)) } else { Err(BadForm) }
}

/// The text that [`held`] reads.
pub(crate) fn held_text((device, demand): &(DeviceAt, Demand)) -> String {
    format!("{device}:{}:{}", demand.memory.mib(), share_text(demand.share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_thousandths_with_up_to_three_decimals() {
        for (text, millionths) in
            [("0", 0), ("1", 1000), ("333.33", 333_330), ("0.001", 1), ("1000", 1_000_000)]
        {
            assert_eq!(share(text), Ok(Share::from_millionths(millionths)));
            assert_eq!(share_text(Share::from_millionths(millionths)), text);
        }
        for bad in
            ["", ".5", "1.", "1.0001", "1000.001", "-1", "1e2", "0x1", "99999999999999999999"]
        {
            assert_eq!(share(bad), Err(BadForm), "{bad}");
        }
        let [none, some, most] = [0, 1, 999_001].map(|it| milli_up(Share::from_millionths(it)));
        assert_eq!((none, some, most), (0, 1, 1000));
    }

    #[test]
    fn devices_and_what_is_held_of_them_are_read_as_written() {
        for text in ["0:0:0", "12:4096:250", "3.6:19968:1000", "0.0:1:0.001"] {
            assert_eq!(held_text(&held(text).unwrap()), text);
        }
        for bad in ["", "0", "0:1", "0:1:1:1", "a:1:1", "0.:1:1", "0:99999999999:1", "0:1:1001"] {
            assert_eq!(held(bad), Err(BadForm), "{bad}");
        }
    }
}
