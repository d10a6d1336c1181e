//! Which devices of a node are near each other. It decides for pods with several devices, where
//! more devices fit than they need.

use std::collections::BTreeMap;
use std::sync::Arc;

use wire::device::{Device, DeviceDetails};
use wire::ids::DeviceId;

/// Most devices among which the nearest are searched, the first ones; nodes have 16 GPUs at most.
const MAX_CANDIDATES: usize = 16;

/// How near the devices of a placement are to each other; smaller is nearer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Proximity {
    /// A single device, or NVLink between each two.
    #[default]
    Linked,
    /// Each two have NVLink or one NUMA node in common; some have no NVLink.
    NumaNode,
    /// Farther apart, or unknown.
    Far,
}

/// Twice the active NVLinks between two devices, plus one if both are on one NUMA node. More is
/// nearer, and any link is nearer than none.
type Bond = u32;

/// How near each device of a node is to each other one, by position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// Row by row; zero from a device to itself. Empty if nothing is known. Shared, since node
    /// states are copied.
    bonds: Arc<[Bond]>,
    devices: usize,
}

impl Topology {
    /// What `details` say of the devices, in their order.
    pub(crate) fn of(devices: &[Device], details: &BTreeMap<DeviceId, DeviceDetails>) -> Self {
        let positions: BTreeMap<&DeviceId, usize> =
            devices.iter().enumerate().map(|(at, device)| (&device.id, at)).collect();
        let known: Vec<_> = devices.iter().map(|device| details.get(&device.id)).collect();
        let count = devices.len();
        let mut bonds: Vec<Bond> = vec![0; count * count];
        for (here, details) in known.iter().enumerate() {
            let Some(details) = details else { continue };
            for (other, links) in &details.neighbors {
                let Some(there) = positions.get(other).filter(|there| **there != here) else {
                    continue;
                };
                let bond = links.saturating_mul(2);
                for at in [here * count + there, there * count + here] {
                    bonds[at] = bonds[at].max(bond);
                }
            }
        }
        let numa_nodes: Vec<Option<u32>> =
            known.iter().map(|details| details.and_then(|details| details.numa_node)).collect();
        for (at, bond) in bonds.iter_mut().enumerate() {
            let (here, there) = (at / count, at % count);
            let is_beside = numa_nodes[here].is_some() && numa_nodes[here] == numa_nodes[there];
            *bond = bond.saturating_add((here != there && is_beside).into());
        }
        let is_known = bonds.iter().any(|bond| *bond > 0);
        Self { bonds: if is_known { bonds.into() } else { Arc::default() }, devices: count }
    }

    /// The same without the device at `position`.
    pub(crate) fn without(&self, position: usize) -> Self {
        let all = self.devices;
        let stay = (0..self.bonds.len()).filter(|at| at / all != position && at % all != position);
        Self { bonds: stay.map(|at| self.bonds[at]).collect(), devices: all.saturating_sub(1) }
    }

    fn bond(&self, a: usize, b: usize) -> Bond {
        if a >= self.devices || b >= self.devices {
            return 0; // a MIG instance that is not made yet
        }
        self.bonds.get(a * self.devices + b).copied().unwrap_or(0)
    }

    fn sum_of_bonds<'a>(&self, at: usize, others: impl Iterator<Item = &'a usize>) -> u64 {
        others.map(|other| u64::from(self.bond(*other, at))).sum()
    }

    /// How near these devices are to each other.
    pub fn proximity(&self, positions: impl Iterator<Item = usize> + Clone) -> Proximity {
        let bonds = pairs(positions).map(|(a, b)| self.bond(a, b));
        match bonds.min() {
            None | Some(2..) => Proximity::Linked,
            Some(1) => Proximity::NumaNode,
            Some(0) => Proximity::Far,
        }
    }

    /// The `wanted` of `candidates` that are nearest to each other and to those already `chosen`.
    /// On a tie: those that are least near to the candidates that stay, then the first. In the
    /// order of `candidates`.
    ///
    /// A set grows from each candidate, one device at a time. If topology is nested groups (bridges
    /// or switches, NUMA nodes), no other set has a nearer farthest pair.
    pub(crate) fn nearest(
        &self,
        chosen: &[usize],
        candidates: &[usize],
        wanted: usize,
    ) -> Vec<usize> {
        let candidates = &candidates[..candidates.len().min(wanted.max(MAX_CANDIDATES))];
        if self.bonds.is_empty() || wanted == 0 || candidates.len() <= wanted {
            return candidates[..wanted.min(candidates.len())].to_vec();
        }
        let grown = candidates.iter().map(|seed| self.grown(chosen, *seed, candidates, wanted));
        let best = grown.min_by_key(|set| {
            let together = chosen.iter().chain(set.iter()).copied();
            let inside = pairs(together).map(|(a, b)| self.bond(a, b));
            let worst = inside.clone().min();
            let sum: u64 = inside.map(u64::from).sum();
            let stays = candidates.iter().filter(|at| !set.contains(at));
            let parted: u64 =
                stays.flat_map(|at| set.iter().map(|own| u64::from(self.bond(*own, *at)))).sum();
            (std::cmp::Reverse((worst, sum)), parted)
        });
        let set = best.unwrap_or_default();
        candidates.iter().copied().filter(|at| set.contains(at)).collect()
    }

    /// A set of `wanted` candidates that contains `seed`. Each next one is the nearest to all
    /// before.
    fn grown(
        &self,
        chosen: &[usize],
        seed: usize,
        candidates: &[usize],
        wanted: usize,
    ) -> Vec<usize> {
        let mut set = vec![seed];
        while set.len() < wanted {
            let outside = candidates.iter().filter(|at| !set.contains(at));
            let nearest = outside.clone().min_by_key(|at| {
                let own = chosen.iter().chain(set.iter());
                let worst = own.clone().map(|own| self.bond(*own, **at)).min();
                // On a tie: one with many near ones, as the next ones will be near it.
                std::cmp::Reverse((
                    worst,
                    self.sum_of_bonds(**at, own),
                    self.sum_of_bonds(**at, outside.clone()),
                ))
            });
            let Some(nearest) = nearest else { break };
            set.push(*nearest);
        }
        set
    }
}

fn pairs(all: impl Iterator<Item = usize> + Clone) -> impl Iterator<Item = (usize, usize)> + Clone {
    let firsts = all.clone().enumerate();
    firsts.flat_map(move |(nth, a)| all.clone().skip(nth + 1).map(move |b| (a, b)))
}

#[cfg(test)]
mod tests;
