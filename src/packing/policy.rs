//! The policies: which of the devices and nodes that fit is the best one.
//!
//! A policy gives every place a [`Rank`], an ordered struct whose field order is the policy. Smaller
//! is better, and places of equal rank are ordered by the name of the node, so the answer is the same
//! on every replica.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use smallvec::{SmallVec, smallvec};

use super::baseline::Baseline;
use super::fit::{Ask, Room};
use super::mix::CompiledMix;
use super::nearness::Reach;
use super::node::NodeLedger;
use super::outlook::{self, KeptOutlook};
pub use super::rank::{Merit, Rank};
use super::request::Demand;
use super::units::{HostAmount, Share};

/// How to choose among the places where a request fits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Policy {
    /// Fill the fullest GPU that still fits.
    BinPack,
    /// Prefer the emptiest GPU and node.
    Spread,
    /// Keep the free room usable for the typical requests (FGD).
    #[default]
    Fragmentation,
}

impl Policy {
    /// All policies that pods and operators may name, in the order of their documentation.
    pub const ALL: [Self; 3] = [Self::BinPack, Self::Spread, Self::Fragmentation];

    /// The name in annotations, configuration and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::BinPack => "binpack",
            Self::Spread => "spread",
            Self::Fragmentation => "fragmentation",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A policy name that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy `{name}` is unknown: use `binpack`, `spread` or `fragmentation`")]
pub struct UnknownPolicy {
    /// The offending name.
    pub name: String,
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownPolicy { name: name.to_owned() })
    }
}

/// What ranks the places: a policy of the product, or a baseline of the literature in the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Strategy {
    /// A policy of the product.
    Policy(Policy),
    /// A baseline of the literature.
    Baseline(Baseline),
}

impl Strategy {
    /// Whether equal books give equal ranks: then a rank can be kept until the node changes.
    pub fn is_repeatable(self) -> bool {
        match self {
            Self::Policy(_) => true,
            Self::Baseline(baseline) => !matches!(baseline, Baseline::Random { .. }),
        }
    }

    /// The strategy with the chance of this question taken out: under both the same places fit.
    pub fn without_chance(self) -> Self {
        match self {
            Self::Baseline(Baseline::Random { .. }) => {
                Self::Baseline(Baseline::Random { chance: 0 })
            }
            Self::Policy(_) | Self::Baseline(_) => self,
        }
    }

    /// Whether the ranks depend on the request mix.
    pub fn uses_mix(self) -> bool {
        matches!(self, Self::Policy(Policy::Fragmentation) | Self::Baseline(Baseline::Fgd))
    }
}

/// A device that fits: its position on the node and what is taken of it.
pub type Taken = (usize, Demand);

/// The devices of a place: one as a rule.
pub type TakenList = SmallVec<[Taken; 1]>;

/// One node as a strategy sees it.
pub(super) struct Scene<'a> {
    /// The node.
    pub(super) node: &'a NodeLedger,
    /// Room of its devices, with or without claims.
    pub(super) rooms: &'a [Room],
    /// The request.
    pub(super) ask: &'a Ask,
    /// The devices that fit, by position; at least as many as are asked for.
    pub(super) fits: &'a [Taken],
    /// Processor time and memory that is free, with or without claims.
    pub(super) host_free: HostAmount,
    /// What the node's free room is worth, where that was worked out already.
    pub(super) outlook: &'a KeptOutlook,
}

impl Strategy {
    /// The devices this strategy takes on a node, and how good that is.
    pub(super) fn choose(self, scene: &Scene<'_>, mix: &CompiledMix) -> (Merit, TakenList) {
        if let (Self::Policy(Policy::Fragmentation), Some(forecast)) = (self, &mix.forecast) {
            let (worth, taken) = outlook::choose(forecast, scene, &mix.typical);
            return (Merit::Worth(scene.instance_mib(&taken), worth, scene.reach(&taken)), taken);
        }
        let (rank, taken) = self.rank(scene, mix);
        (Merit::Ranked(rank), taken)
    }

    fn rank(self, scene: &Scene<'_>, mix: &CompiledMix) -> (Rank, TakenList) {
        match self {
            // Before the first request there is nothing to expect.
            Self::Policy(Policy::BinPack | Policy::Fragmentation) => {
                let taken = scene.first_by(|(position, demand)| {
                    (scene.is_empty(*position), scene.left(*position, *demand))
                });
                let rank = Rank::BinPack {
                    instance_mib: scene.instance_mib(&taken),
                    devices_opened: taken.iter().filter(|(at, _)| scene.is_empty(*at)).count(),
                    left_on_devices: total(taken.iter().map(|(at, d)| scene.left(*at, *d))),
                    left_on_node: scene.left_on_node(&taken),
                    reach: scene.reach(&taken),
                };
                (rank, taken)
            }
            Self::Policy(Policy::Spread) => {
                let taken = scene.first_by(|(position, demand)| {
                    (scene.tenants(*position), Reverse(scene.left(*position, *demand)))
                });
                let rank = Rank::Spread {
                    instance_mib: scene.instance_mib(&taken),
                    tenants_met: taken.iter().map(|(at, _)| scene.tenants(*at)).sum(),
                    left_on_devices: Reverse(total(
                        taken.iter().map(|(at, d)| scene.left(*at, *d)),
                    )),
                    left_on_node: Reverse(scene.left_on_node(&taken)),
                    reach: scene.reach(&taken),
                };
                (rank, taken)
            }
            Self::Baseline(baseline) => baseline.choose(scene, mix),
        }
    }
}

impl Scene<'_> {
    /// Processor time and memory that would be left.
    pub(super) fn host_left(&self) -> HostAmount {
        self.host_free.left_after(self.ask.host)
    }

    /// The memory of the instance that is taken in MiB, where any will do that has enough; else 0.
    fn instance_mib(&self, taken: &[Taken]) -> u32 {
        let first = taken.first().filter(|_| self.ask.wants_any_instance());
        first.map_or(0, |(_, demand)| u32::try_from(demand.memory.mib()).unwrap_or(u32::MAX))
    }

    /// How near devices are to each other.
    fn reach(&self, taken: &[Taken]) -> Reach {
        self.node.nearness().reach(taken.iter().map(|(at, _)| *at))
    }

    /// The first devices by `key`, as many as are asked for; of those alike the nearest to each other,
    /// then the first by position.
    pub(super) fn first_by<K: Ord>(&self, key: impl Fn(&Taken) -> K) -> TakenList {
        if self.ask.count() == 1 {
            return self.fits.iter().min_by_key(|fit| key(fit)).copied().into_iter().collect();
        }
        self.nearest_of(self.fits.iter().map(|fit| (key(fit), *fit)).collect())
    }

    /// As many of these as are asked for, the least keys first. Those of the last key among them may
    /// be more than are needed: of these the nearest to each other and to the rest.
    fn nearest_of<K: Ord>(&self, mut keyed: Vec<(K, Taken)>) -> TakenList {
        keyed.sort_by(|(a, (at, _)), (b, (other, _))| (a, at).cmp(&(b, other)));
        let count = self.ask.count();
        let Some(last) = count.checked_sub(1).and_then(|last| keyed.get(last)) else {
            return TakenList::new();
        };
        let sure = keyed.partition_point(|(key, _)| *key < last.0);
        let alike = keyed.partition_point(|(key, _)| *key <= last.0);
        let positions: Vec<usize> = keyed[..alike].iter().map(|(_, (at, _))| *at).collect();
        let (chosen, choice) = positions.split_at(sure);
        let nearest = self.node.nearness().nearest(chosen, choice, count - sure);
        let is_taken = |at: &usize| chosen.contains(at) || nearest.contains(at);
        keyed.iter().map(|(_, fit)| *fit).filter(|(at, _)| is_taken(at)).collect()
    }

    /// Devices that are all alike: those nearest to each other, then the first.
    pub(super) fn any(&self) -> TakenList {
        self.first_by(|_| ())
    }

    /// The same with the key of the first one, where the key depends on nothing but the room of the
    /// device: of devices with equal room it is worked out for the first one only.
    pub(super) fn first_of_distinct_by<K: Ord + Copy>(
        &self,
        key: impl Fn(&Taken) -> K,
    ) -> (K, TakenList) {
        let twin = |at: usize| {
            let room = self.rooms[self.fits[at].0];
            self.fits[..at].iter().position(|earlier| self.rooms[earlier.0] == room)
        };
        let distinct = (0..self.fits.len()).filter(|at| twin(*at).is_none());
        if self.ask.count() == 1 {
            let keyed = distinct.map(|at| (key(&self.fits[at]), at));
            let best = keyed.min().expect("at least as many devices fit as are asked for");
            return (best.0, smallvec![self.fits[best.1]]);
        }
        let known: BTreeMap<usize, K> = distinct.map(|at| (at, key(&self.fits[at]))).collect();
        let key_of = |at: usize| known[&twin(at).unwrap_or(at)];
        let keyed: Vec<(K, Taken)> =
            (0..self.fits.len()).map(|at| (key_of(at), self.fits[at])).collect();
        let first = keyed.iter().map(|(key, _)| *key).min();
        let first = first.expect("at least as many devices fit as are asked for");
        (first, self.nearest_of(keyed))
    }

    /// Tenants of a device, claims not counted.
    fn tenants(&self, position: usize) -> usize {
        self.node.devices()[position].tenants().len()
    }

    /// Whether nothing of a device is booked or claimed.
    fn is_empty(&self, position: usize) -> bool {
        let books = &self.node.devices()[position];
        books.booked() == Demand::ZERO && books.claimed() == Demand::ZERO
    }

    /// What stays free on a device: the larger of share and memory, as a part of the device.
    fn left(&self, position: usize, taken: Demand) -> Share {
        let left = self.rooms[position].free.checked_sub(taken).expect("only what fits is taken");
        let capacity = self.node.devices()[position].capacity().memory;
        left.share.max(Share::ratio(left.memory, capacity).unwrap_or(Share::ZERO))
    }

    /// Whether the devices that fit are all of one class.
    pub(super) fn is_of_one_class(&self) -> bool {
        let mut classes = self.fits.iter().map(|(position, _)| self.rooms[*position].class);
        let first = classes.next();
        classes.all(|class| Some(class) == first)
    }

    /// What stays free on the devices that take tenants at all.
    fn left_on_node(&self, taken: &[Taken]) -> Share {
        let is_open = |position: &usize| self.node.devices()[*position].is_placeable();
        let of = |position| {
            let found = taken.iter().find(|(at, _)| *at == position);
            self.left(position, found.map_or(Demand::ZERO, |(_, demand)| *demand))
        };
        total((0..self.rooms.len()).filter(is_open).map(of))
    }
}

fn total(shares: impl Iterator<Item = Share>) -> Share {
    shares.fold(Share::ZERO, |sum, share| {
        sum.checked_add(share).expect("shares of one node fit into 64 bits")
    })
}

#[cfg(test)]
mod tests;
