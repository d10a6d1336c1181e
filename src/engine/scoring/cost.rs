//! How good a placement is: costs, their order as numbers, and the part that needs no prices.

use std::cmp::Reverse;

use crate::hardware::topology::Proximity;
use crate::waste::scarcity::{ScarcityPrices, WasteChange};
use wire::units::Share;

/// What decides between placements that are equally good for packing; smaller is better. First how near
/// the chosen devices are to each other, then the containers that would be restarted, then the empty GPUs of
/// the node, or the free units of GPUs where MIG instances would be made. One number, since each cost that is compared has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ties(u16);

impl Ties {
    /// Bits of the number.
    const BITS: u32 = 2 + 6 + 8;

    /// Most containers that count.
    const MOST: usize = (1 << 6) - 1;

    /// Of devices that are so near to each other, where `restarts` containers borrow what the pod is
    /// allocated. More of `preferred` is better: the empty GPUs of the node in pools that spread; of MIG instances
    /// that would be made, 255 less the free units of their GPUs; else zero.
    pub fn new(proximity: Proximity, restarts: usize, preferred: usize) -> Self {
        let others = u8::MAX - u8::try_from(preferred).unwrap_or(u8::MAX);
        let restarts = u8::try_from(restarts.min(Self::MOST)).unwrap_or(u8::MAX);
        Self((proximity as u16) << 14 | u16::from(restarts) << 8 | u16::from(others))
    }

    /// Containers that would be restarted; 63 stands for more.
    pub fn restarts(self) -> usize {
        usize::from(self.0 >> 8) & Self::MOST
    }

    #[inline]
    fn key(self) -> u128 {
        u128::from(self.0)
    }
}

/// How good a placement is; smaller is better. Fields are compared from top to bottom, for costs of
/// one strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cost {
    /// Fullest first.
    BinPack {
        /// Memory of the MIG instance, for a request that takes any large enough one; else 0. More than any
        /// has on a node that is the last choice.
        instance_mib: u32,
        /// Empty devices that it takes.
        devices_opened: usize,
        /// What stays free on the chosen devices: the larger of share and memory of each, summed.
        left_on_devices: Share,
        /// What stays free on the node, likewise.
        left_on_node: Share,
        /// What decides between placements that are equal so far.
        ties: Ties,
    },
    /// Emptiest first.
    Spread {
        /// As for `BinPack`: the smallest instance first.
        instance_mib: u32,
        /// Tenants that are already on the chosen devices.
        tenants_met: usize,
        /// What stays free on the chosen devices; more is better.
        left_on_devices: Reverse<Share>,
        /// What stays free on the node; more is better.
        left_on_node: Reverse<Share>,
        /// What decides between placements that are equal so far.
        ties: Ties,
    },
    /// Least expected waste first.
    Fragmentation {
        /// As for `BinPack`: the smallest instance first.
        instance_mib: u32,
        /// Expected waste that the placement causes at the current prices, in billionths of a GPU.
        cost: i64,
        /// What decides between placements that are equal so far.
        ties: Ties,
    },
    /// Highest score first.
    Custom {
        /// The score that a [`PlacementCost`](crate::scoring::strategy) gives.
        score: Reverse<i64>,
    },
}

impl Cost {
    /// What decides between it and others that are equal so far.
    pub fn ties(&self) -> Ties {
        match self {
            Self::BinPack { ties, .. }
            | Self::Spread { ties, .. }
            | Self::Fragmentation { ties, .. } => *ties,
            Self::Custom { .. } => Ties::default(),
        }
    }

    /// A number in the same order as the costs of one strategy: it compares faster. Exact for
    /// shares below 4,294 GPUs, fewer than 65,536 devices and tenants, and instances below 1,024 TiB.
    #[inline]
    pub fn key(&self) -> u128 {
        match *self {
            Self::BinPack { instance_mib, devices_opened, left_on_devices, left_on_node, ties } => {
                let (devices, node) = (key_of_share(left_on_devices), key_of_share(left_on_node));
                after(instance_mib, joined(devices_opened, devices, node, ties))
            }
            Self::Spread { instance_mib, tenants_met, left_on_devices, left_on_node, ties } => {
                let devices = MOST_SHARE - key_of_share(left_on_devices.0);
                let node = MOST_SHARE - key_of_share(left_on_node.0);
                after(instance_mib, joined(tenants_met, devices, node, ties))
            }
            Self::Fragmentation { instance_mib, cost, ties } => {
                key_of_cost(instance_mib, cost, ties)
            }
            Self::Custom { score } => u128::from(u64::MAX) - from_least(score.0),
        }
    }
}

/// Bits of a share in a number, and the largest one.
const SHARE: u32 = 32;
const MOST_SHARE: u128 = (1 << SHARE) - 1;

#[inline]
fn key_of_share(share: Share) -> u128 {
    u128::from(share.millionths()).min(MOST_SHARE)
}

/// A number of devices or tenants, two shares as numbers, and ties, in this order.
#[inline]
fn joined(count: usize, devices: u128, node: u128, ties: Ties) -> u128 {
    let count = u128::from(u16::try_from(count).unwrap_or(u16::MAX));
    ((count << SHARE | devices) << SHARE | node) << Ties::BITS | ties.key()
}

/// Bits of the number of any policy without the size of an instance.
const KEY: u32 = 16 + 32 + 32 + Ties::BITS;

/// The size of an instance decides before anything else.
#[inline]
fn after(instance_mib: u32, key: u128) -> u128 {
    u128::from(instance_mib.min((1 << 31) - 1)) << KEY | key
}

#[inline]
fn key_of_cost(instance_mib: u32, cost: i64, ties: Ties) -> u128 {
    after(instance_mib, from_least(cost) << Ties::BITS | ties.key())
}

/// The number minus the least one.
fn from_least(number: i64) -> u128 {
    u128::from(number.cast_unsigned() ^ 1 << 63)
}

/// The part of a cost that depends on the node alone. It holds until the node changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalCost {
    /// The cost itself.
    Ranked(Cost),
    /// Memory of the MIG instance in MiB, as in [`Cost`]; the change of the node's expected waste,
    /// which is a cost at the current prices; and what decides between equal ones.
    WasteChange(u32, WasteChange, Ties),
}

impl LocalCost {
    /// Its cost at these prices as a number: see [`Cost::key`]. Once for each node of a call.
    #[inline(always)]
    pub fn key(&self, prices: &ScarcityPrices) -> u128 {
        match self {
            Self::Ranked(cost) => cost.key(),
            Self::WasteChange(instance_mib, waste_change, ties) => {
                key_of_cost(*instance_mib, prices.cost(waste_change), *ties)
            }
        }
    }

    /// The cost at these prices.
    pub fn cost(self, prices: &ScarcityPrices) -> Cost {
        match self {
            Self::Ranked(cost) => cost,
            Self::WasteChange(instance_mib, waste_change, ties) => {
                Cost::Fragmentation { instance_mib, cost: prices.cost(&waste_change), ties }
            }
        }
    }
}
