//! The nodes that fit, in the order of their costs, while scarcity prices change.
//!
//! Under `fragmentation` a cost is made of expected waste and of prices, and each bind changes the
//! prices. But of placements that take and spare equal amounts of the same class, the one with more
//! gain is better at any price. They are a *family*, kept in order; a call merges families.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, btree_set};

use crate::hardware::device_class::ClassId;
use crate::ledger::nodes::table::{index, number};
use crate::scoring::cost::{LocalCost, Ties};
use crate::waste::scarcity::{ScarcityPrices, WasteChange};

/// What the placements of a family have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Family {
    /// Their costs do not depend on prices.
    Ranked,
    /// What the prices apply to.
    WasteChange { instance_mib: u32, class: ClassId, share: i64, spared: i64, ties: Ties },
}

/// A node in its family, the better one first; the order of names decides between equals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Member {
    /// Comparable only within the family.
    key: u128,
    order: u32,
    at: u32,
}

/// A node that fits. The better one is less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RankedNode {
    /// Its cost as a number.
    pub(crate) key: u128,
    /// The index of its name in the order of all names: decides between equals.
    pub(crate) order: u32,
    /// Its position.
    pub(crate) at: usize,
}

/// The nodes that fit, by family.
pub(crate) struct Ranking {
    /// How many nodes there were: the order of names is for these.
    pub(crate) nodes: usize,
    families: BTreeMap<Family, BTreeSet<Member>>,
}

fn family_and_key(local_cost: &LocalCost) -> (Family, u128) {
    match *local_cost {
        LocalCost::Ranked(cost) => (Family::Ranked, cost.key()),
        LocalCost::WasteChange(instance_mib, WasteChange { gain, spared, class, share }, ties) => {
            let family = Family::WasteChange { instance_mib, class, share, spared, ties };
            (family, u128::from(i64::MAX.abs_diff(gain)))
        }
    }
}

/// The cost of a member of the family as a number: see [`LocalCost::key`].
fn cost_key(family: Family, key: u128, prices: &ScarcityPrices) -> u128 {
    match family {
        Family::Ranked => key,
        Family::WasteChange { instance_mib, class, share, spared, ties } => {
            let less = u64::try_from(key).expect("it was made of one");
            let gain = i64::MAX.wrapping_sub_unsigned(less);
            LocalCost::WasteChange(instance_mib, WasteChange { gain, spared, class, share }, ties)
                .key(prices)
        }
    }
}

/// The next best node of a family at these prices.
#[inline]
fn next_of(
    family: Family,
    members: &mut btree_set::Iter<'_, Member>,
    prices: &ScarcityPrices,
) -> Option<RankedNode> {
    let Member { key, order, at } = *members.next()?;
    Some(RankedNode { key: cost_key(family, key, prices), order, at: index(at) })
}

fn member(local_cost: &LocalCost, order: u32, at: usize) -> (Family, Member) {
    let (family, key) = family_and_key(local_cost);
    (family, Member { key, order, at: number(at) })
}

impl Ranking {
    /// The order of the nodes that fit, out of `nodes`. Each comes with its position, and the
    /// index of its name in the order of all names.
    pub(crate) fn of<'a>(
        nodes: usize,
        fitting: impl Iterator<Item = (usize, u32, &'a LocalCost)>,
    ) -> Self {
        let mut all: Vec<_> =
            fitting.map(|(at, order, local_cost)| member(local_cost, order, at)).collect();
        all.sort_unstable();
        let families = all.chunk_by(|(one, _), (other, _)| one == other);
        let families = families.map(|family| {
            let members = family.iter().map(|(_, member)| *member).collect();
            (family[0].0, members)
        });
        Self { nodes, families: families.collect() }
    }

    pub(crate) fn insert(&mut self, at: usize, order: u32, local_cost: &LocalCost) {
        let (family, member) = member(local_cost, order, at);
        self.families.entry(family).or_default().insert(member);
    }

    /// Removes a node that was inserted with this cost.
    pub(crate) fn remove(&mut self, at: usize, order: u32, local_cost: &LocalCost) {
        let (family, member) = member(local_cost, order, at);
        let members = self.families.get_mut(&family);
        let (was_there, is_last) =
            members.map_or((false, false), |all| (all.remove(&member), all.is_empty()));
        debug_assert!(was_there, "node {at} was not in its place");
        if is_last {
            self.families.remove(&family);
        }
    }

    /// Whether the families are so small that a look at all nodes is as fast, with less memory.
    pub(crate) fn is_scattered(&self) -> bool {
        self.families.len() > (self.nodes / 8).max(16)
    }

    /// The nodes with their costs at these prices, the best first. O(families), and O(log families)
    /// for each node that is taken.
    pub(crate) fn in_order(&self, prices: &ScarcityPrices) -> impl Iterator<Item = RankedNode> {
        let mut families: Vec<_> =
            self.families.iter().map(|(family, members)| (*family, members.iter())).collect();
        let heads = families.iter_mut().enumerate();
        let heads = heads.filter_map(|(at, (family, members))| {
            Some(Reverse((next_of(*family, members, prices)?, at)))
        });
        let mut heads: BinaryHeap<_> = heads.collect();
        std::iter::from_fn(move || {
            let mut head = heads.peek_mut()?;
            let Reverse((best, at)) = *head;
            let (family, members) = &mut families[at];
            match next_of(*family, members, prices) {
                Some(second) => head.0.0 = second,
                None => {
                    PeekMut::pop(head);
                }
            }
            Some(best)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hardware::device_class::{ClassKind, DeviceClass, DeviceClasses};
    use crate::hardware::topology::Proximity;
    use crate::scoring::cost::Cost;
    use wire::ids::ModelName;
    use wire::units::{MemMib, Share};

    fn class(number: usize) -> ClassId {
        let mut classes = DeviceClasses::default();
        let class = |model: &str| DeviceClass {
            model: ModelName::new(model),
            capacity: MemMib::new(1),
            kind: ClassKind::Gpu,
            replicas: None,
            part: None,
        };
        let ids = ["A", "B"].map(|model| classes.id_of(class(model)));
        ids[number]
    }

    /// Few values each, so that families have several members and costs are often equal.
    fn merits() -> impl Strategy<Value = Vec<LocalCost>> {
        let proximity =
            prop::sample::select(vec![Proximity::Linked, Proximity::NumaNode, Proximity::Far]);
        let ties = (proximity, 0..2_usize, 0..2_usize);
        let ties =
            ties.prop_map(|(proximity, restarts, empty)| Ties::new(proximity, restarts, empty));
        let gain = prop_oneof![-3..3_i64, Just(-1_000_000_000_000), Just(1_000_000_000_000)];
        let instance = || (0..2_u32).prop_map(|size| size * 4_864);
        let waste_change = (instance(), gain, 0..3_i64, 0..2_usize, 1..3_i64, ties);
        let waste_change =
            waste_change.prop_map(|(instance_mib, gain, spared, number, share, ties)| {
                LocalCost::WasteChange(
                    instance_mib,
                    WasteChange { gain, spared, class: class(number), share },
                    ties,
                )
            });
        let ranked = (instance(), 0..3_usize, 0..3_u64);
        let ranked = ranked.prop_map(|(instance_mib, devices_opened, left)| {
            let left = Share::from_millionths(left);
            let ties = Ties::default();
            let (left_on_devices, left_on_node) = (left, left);
            LocalCost::Ranked(Cost::BinPack {
                instance_mib,
                devices_opened,
                left_on_devices,
                left_on_node,
                ties,
            })
        });
        prop_oneof![
            prop::collection::vec(waste_change, 0..20),
            prop::collection::vec(ranked, 0..20)
        ]
    }

    proptest! {
        #[test]
        fn the_merged_families_are_in_cost_order(
            merits in merits(),
            changes in prop::collection::vec(any::<(prop::sample::Index, bool)>(), 0..20),
            (several, prices) in (0..5_000_i64, prop::array::uniform2(0..5_000_i64)),
        ) {
            let prices = ScarcityPrices::of(several, &prices);
            let order = |at: usize| number(merits.len() - at); // any but the order of positions
            let mut is_in: Vec<bool> = merits.iter().enumerate().map(|(at, _)| at % 2 == 0).collect();
            let fitting = merits.iter().enumerate().step_by(2);
            let mut ranking =
                Ranking::of(merits.len(), fitting.map(|(at, local_cost)| (at, order(at), local_cost)));
            for (which, is_wanted) in changes.into_iter().filter(|_| !merits.is_empty()) {
                let at = which.index(merits.len());
                match (is_in[at], is_wanted) {
                    (false, true) => ranking.insert(at, order(at), &merits[at]),
                    (true, false) => ranking.remove(at, order(at), &merits[at]),
                    (true, true) | (false, false) => {}
                }
                is_in[at] = is_wanted;
            }
            let candidate =
                |at: usize| RankedNode { key: merits[at].key(&prices), order: order(at), at };
            let mut sorted: Vec<RankedNode> =
                (0..merits.len()).filter(|at| is_in[*at]).map(candidate).collect();
            sorted.sort_unstable();
            prop_assert_eq!(ranking.in_order(&prices).collect::<Vec<_>>(), sorted);
        }
    }
}
