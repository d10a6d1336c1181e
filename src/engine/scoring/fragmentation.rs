//! Free room that no typical request can use, and how full the occupied GPUs are. Both are defined
//! here once; policy, simulator, metrics and pages all call these functions.
//!
//! **Fragmentation** (FGD, USENIX ATC'23, "Beware of Fragmentation", section 4.2, formulas 2, 3).
//! For a node *n* and a typical request *t*, the fragment `f(n, t)` is
//! - all free GPU share of the node, if *t* cannot run there (too little CPU, no accepted model, or
//!   fewer devices with enough room than *t* needs);
//! - else the free share of those GPUs that have less room than *t* takes of one.
//!
//! A node's fragmentation is the mean over the mix, `F(n) = sum of w(t) f(n, t) / sum of w(t)`, in
//! GPUs. A request without a GPU can use no GPU room, so its fragment is all of it. One point
//! differs from the paper: "room" has two dimensions here, compute share and memory.
//!
//! The *fragmentation ratio* of a cluster is the sum of `F(n)` over the sum of free share.
//!
//! **Packing efficiency** is the mean fullness of the occupied GPUs. Fullness is the larger of
//! allocated share and allocated memory, both as a part of the GPU's capacity. A GPU is occupied if
//! it has a tenant. Empty GPUs do not lower it: they can be switched off or allocated whole.
//!
//! All sums are exact integers; a ratio is formed only when it is shown.

use smallvec::SmallVec;

use crate::model::device_state::{DeviceState, HoldRule};
use crate::model::fit::Room;
use crate::model::node_state::NodeState;
use crate::waste::compiled_mix::CompiledMix;
use crate::waste::mix_rows::MixRows;
use wire::device::Health;
use wire::units::{Demand, MemMib, MilliCpu, Share};

/// Free share times weight, in millionths of a GPU times the mix's total weight.
type Weighted = i128;

/// What each typical request can use of a node as it is: it holds until the node or the mix
/// changes.
#[derive(Clone, Debug)]
pub struct Uses {
    total_free: u64,
    per_row: SmallVec<[RowUse; 16]>,
}

#[derive(Clone, Copy, Debug)]
struct RowUse {
    fitting: u32,
    usable: u64,
}

impl Uses {
    /// Checks each typical GPU request on each kind of room: O(requests × devices) at worst.
    pub fn of(mix: &MixRows, rooms: &[Room]) -> Self {
        let mut total_free = 0;
        let mut kinds: SmallVec<[(Room, u32); 8]> = SmallVec::new();
        for room in rooms.iter().filter(|room| is_counted(mix, room)) {
            total_free += room.free.share.millionths();
            match kinds.iter_mut().find(|(kind, _)| kind == room) {
                Some((_, count)) => *count += 1,
                None => kinds.push((*room, 1)),
            }
        }
        let per_row = mix.rows.iter().map(|row| {
            let mut seen = RowUse { fitting: 0, usable: 0 };
            for (room, count) in &kinds {
                if fits(row.demand.of(room.class).as_ref(), room.free) {
                    seen.fitting += count;
                    seen.usable += room.free.share.millionths() * u64::from(*count);
                }
            }
            seen
        });
        Self { total_free, per_row: per_row.collect() }
    }

    /// The same with its mix and rooms: the base for "what if".
    pub fn on<'a>(&'a self, mix: &'a MixRows, rooms: &'a [Room]) -> Usability<'a> {
        Usability { mix, rooms, uses: self }
    }
}

/// What each typical request can use of a node, as it is and after a change.
#[derive(Clone, Copy)]
pub struct Usability<'a> {
    mix: &'a MixRows,
    rooms: &'a [Room],
    uses: &'a Uses,
}

impl Usability<'_> {
    /// The node's fragmentation times the total weight, with `cpu` left.
    pub fn fragments(&self, cpu: MilliCpu) -> Weighted {
        self.fragments_after(&[], cpu)
    }

    /// The same after `taken` (position of a device, amount) and with `cpu` left then: O(requests ×
    /// taken).
    pub fn fragments_after(&self, taken: &[(usize, Demand)], cpu: MilliCpu) -> Weighted {
        let counted = taken.iter().filter(|(at, _)| is_counted(self.mix, &self.rooms[*at]));
        let changes = counted.map(|(position, demand)| {
            let room = &self.rooms[*position];
            (room, room.free.checked_sub(*demand).expect("only what fits is tried"))
        });
        let gone = changes
            .clone()
            .map(|(room, after)| room.free.share.millionths() - after.share.millionths());
        let total_free = self.uses.total_free - gone.sum::<u64>();
        let mut usable: Weighted = 0;
        for (row, seen) in self.mix.rows.iter().zip(&self.uses.per_row) {
            let weight = row.weight_within(cpu);
            if weight == 0 {
                continue;
            }
            let mut seen = *seen;
            for (room, after) in changes.clone() {
                let demand = row.demand.of(room.class).as_ref();
                if fits(demand, room.free) {
                    seen.fitting -= 1;
                    seen.usable -= room.free.share.millionths();
                }
                if fits(demand, after) {
                    seen.fitting += 1;
                    seen.usable += after.share.millionths();
                }
            }
            if seen.fitting >= row.count {
                usable += Weighted::from(weight) * Weighted::from(seen.usable);
            }
        }
        Weighted::from(self.mix.total) * Weighted::from(total_free) - usable
    }

    /// FGD's score of a change of fragmentation from `before` to `after`, 0 to 100:
    /// `floor(100 sigmoid((F(before) - F(after)) / 1 GPU))`.
    pub fn score(&self, before: Weighted, after: Weighted) -> u8 {
        let total = Weighted::from(self.mix.total.max(1));
        // A change of x GPUs is `(before - after) / total` millionths; the thresholds are in
        // thousandths of that.
        let gained = (before - after) * 1000;
        let reached =
            SCORE_THRESHOLDS.partition_point(|limit| gained >= Weighted::from(*limit) * total);
        u8::try_from(reached).expect("there are 99 thresholds")
    }
}

fn is_counted(mix: &MixRows, room: &Room) -> bool {
    room.health == Health::Healthy && *mix.shareable.of(room.class)
}

fn fits(demand: Option<&Demand>, free: Demand) -> bool {
    demand.is_some_and(|demand| demand.memory <= free.memory && demand.share <= free.share)
}

/// `SCORE_THRESHOLDS[s - 1]` is the least gain, in billionths of a GPU and rounded up, for a score
/// of `s`: the logit `ln(s / (100 - s))`. With whole numbers the floor of the sigmoid is exact and
/// the same on every machine. A test computes them again.
#[rustfmt::skip]
const SCORE_THRESHOLDS: [i64; 99] = [
    -4_595_119_850, -3_891_820_298, -3_476_098_689, -3_178_053_830, -2_944_438_979, -2_751_535_313,
    -2_586_689_344, -2_442_347_035, -2_313_634_929, -2_197_224_577, -2_090_741_096, -1_992_430_164,
    -1_900_958_761, -1_815_289_966, -1_734_601_055, -1_658_228_076, -1_585_627_263, -1_516_347_489,
    -1_450_010_175, -1_386_294_361, -1_324_925_414, -1_265_666_373, -1_208_311_205, -1_152_679_509,
    -1_098_612_288, -1_045_968_555, -994_622_575, -944_461_608, -895_384_047, -847_297_860,
    -800_119_300, -753_771_802, -708_185_057, -663_294_217, -619_039_208, -575_364_144,
    -532_216_813, -489_548_225, -447_312_218, -405_465_108, -363_965_377, -322_773_392,
    -281_851_152, -241_162_056, -200_670_695, -160_342_650, -120_144_311, -80_042_707,
    -40_005_334, 0, 40_005_335, 80_042_708, 120_144_312, 160_342_651,
    200_670_696, 241_162_057, 281_851_153, 322_773_393, 363_965_378, 405_465_109,
    447_312_219, 489_548_226, 532_216_814, 575_364_145, 619_039_209, 663_294_218,
    708_185_058, 753_771_803, 800_119_301, 847_297_861, 895_384_048, 944_461_609,
    994_622_576, 1_045_968_556, 1_098_612_289, 1_152_679_510, 1_208_311_206, 1_265_666_374,
    1_324_925_415, 1_386_294_362, 1_450_010_176, 1_516_347_490, 1_585_627_264, 1_658_228_077,
    1_734_601_056, 1_815_289_967, 1_900_958_762, 1_992_430_165, 2_090_741_097, 2_197_224_578,
    2_313_634_930, 2_442_347_036, 2_586_689_345, 2_751_535_314, 2_944_438_980, 3_178_053_831,
    3_476_098_690, 3_891_820_299, 4_595_119_851,
];

/// How full and how fragmented a node or any set of nodes is: exact sums that add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackingSums {
    /// Devices that can have tenants.
    pub devices: u64,
    /// Devices with at least one tenant.
    pub occupied: u64,
    /// Overallocated devices.
    pub overallocated: u64,
    /// Share of all devices.
    pub capacity_share: Share,
    /// Allocated share, at most all of each device.
    pub allocated_share: Share,
    /// Memory of all devices.
    pub capacity_memory: MemMib,
    /// Allocated memory, at most all of each device.
    pub allocated_memory: MemMib,
    /// Free share of GPUs that may be shared.
    pub free_share: Share,
    /// Sum over the occupied devices of their fullness, in millionths.
    fullness: u64,
    /// Fragmentation times total weight of the mix.
    fragments: Weighted,
    /// Total weight of the mix.
    weight: u64,
}

impl PackingSums {
    /// Measures one node against a mix.
    ///
    /// # Panics
    /// Never for amounts within the limits that are checked on input.
    pub fn of(node: &NodeState, mix: &CompiledMix) -> Self {
        let mix = &mix.typical;
        let mut sum = Self { weight: mix.total, ..Self::default() };
        for device_state in node.devices().iter().filter(|device_state| device_state.is_placeable())
        {
            let (capacity, allocated) = (device_state.capacity(), device_state.allocated());
            sum.devices += 1;
            sum.overallocated += u64::from(device_state.is_overallocated());
            sum.capacity_share = add(sum.capacity_share, capacity.share);
            sum.allocated_share = add(sum.allocated_share, allocated.share.min(capacity.share));
            sum.capacity_memory = add_memory(sum.capacity_memory, capacity.memory);
            let held = allocated.memory.min(capacity.memory);
            sum.allocated_memory = add_memory(sum.allocated_memory, held);
            if !device_state.tenants().is_empty() {
                sum.occupied += 1;
                sum.fullness += fullness(device_state).millionths();
            }
        }
        let rooms = node.rooms(HoldRule::Ignored);
        let uses = Uses::of(mix, rooms);
        sum.free_share = Share::from_millionths(uses.total_free);
        sum.fragments = uses.on(mix, rooms).fragments(node.host_room(HoldRule::Ignored).cpu);
        sum
    }

    /// The sum of two disjoint sets of nodes, measured against the same mix.
    ///
    /// # Panics
    /// If the mixes differ in weight: such fragments cannot be added.
    pub fn and(self, other: Self) -> Self {
        let weight = self.weight.max(other.weight);
        let add_up = [&self, &other].iter().all(|one| one.weight == weight || one.devices == 0);
        assert!(add_up, "only measurements against one mix add up");
        Self {
            devices: self.devices + other.devices,
            occupied: self.occupied + other.occupied,
            overallocated: self.overallocated + other.overallocated,
            capacity_share: add(self.capacity_share, other.capacity_share),
            allocated_share: add(self.allocated_share, other.allocated_share),
            capacity_memory: add_memory(self.capacity_memory, other.capacity_memory),
            allocated_memory: add_memory(self.allocated_memory, other.allocated_memory),
            free_share: add(self.free_share, other.free_share),
            fullness: self.fullness + other.fullness,
            fragments: self.fragments + other.fragments,
            weight,
        }
    }

    /// Allocated share over capacity, in millionths; zero without devices.
    pub fn allocation(&self) -> Share {
        ratio(self.allocated_share.millionths().into(), self.capacity_share.millionths().into())
    }

    /// Packing efficiency, in millionths; zero without an occupied device.
    pub fn efficiency(&self) -> Share {
        ratio(self.fullness.into(), Weighted::from(self.occupied) * 1_000_000)
    }

    /// Fragmentation ratio, in millionths; zero without free share or without a mix.
    pub fn fragmentation(&self) -> Share {
        let free = Weighted::from(self.free_share.millionths()) * Weighted::from(self.weight);
        ratio(self.fragments, free)
    }

    /// Free share that no typical request can use, on average over the mix.
    pub fn fragmented_share(&self) -> Share {
        match u64::try_from(self.fragments / Weighted::from(self.weight.max(1))) {
            Ok(millionths) => Share::from_millionths(millionths),
            Err(_) => Share::ZERO,
        }
    }
}

/// How full a device is: the larger of allocated share and allocated memory, as a part of it.
pub(crate) fn fullness(device_state: &DeviceState) -> Share {
    let (capacity, allocated) = (device_state.capacity(), device_state.allocated());
    let memory = Share::ratio(allocated.memory, capacity.memory).unwrap_or(Share::WHOLE);
    allocated.share.max(memory).min(Share::WHOLE)
}

fn ratio(part: Weighted, whole: Weighted) -> Share {
    let millionths = (part * 1_000_000).checked_div(whole).unwrap_or(0);
    Share::from_millionths(u64::try_from(millionths).unwrap_or(0))
}

pub(crate) fn add(a: Share, b: Share) -> Share {
    a.checked_add(b).expect("shares of all devices of a cluster fit into 64 bits")
}

pub(crate) fn add_memory(a: MemMib, b: MemMib) -> MemMib {
    a.checked_add(b).expect("memory of all devices of a cluster fits into 64 bits")
}

/// For each healthy GPU of `node` that can be shared, by its position: the free share that typical
/// requests cannot use, on average over the mix and rounded down. Before rounding the sum over the
/// devices is the node's fragmentation. Zero without a mix. O(requests × devices).
///
/// # Panics
/// Never: what is stranded of a device is at most its free share.
pub fn stranded_by_device(node: &NodeState, mix: &CompiledMix) -> Vec<(usize, Share)> {
    let mix = &mix.typical;
    let rooms = node.rooms(HoldRule::Ignored);
    let uses = Uses::of(mix, rooms);
    let cpu = node.host_room(HoldRule::Ignored).cpu;
    let rows = mix.rows.iter().zip(&uses.per_row);
    let runnable: Vec<_> = rows
        .filter(|(row, seen)| seen.fitting >= row.count)
        .map(|(row, _)| (row, row.weight_within(cpu)))
        .collect();
    let counted = rooms.iter().enumerate().filter(|(_, room)| is_counted(mix, room));
    let stranded = counted.map(|(at, room)| {
        let users = runnable
            .iter()
            .filter(|(row, _)| fits(row.demand.of(room.class).as_ref(), room.free))
            .map(|(_, weight)| Weighted::from(*weight));
        let others = Weighted::from(mix.total) - users.sum::<Weighted>();
        let part = Weighted::from(room.free.share.millionths()) * others;
        let millionths = part / Weighted::from(mix.total.max(1));
        let millionths = u64::try_from(millionths).expect("at most the free share");
        (at, Share::from_millionths(millionths))
    });
    stranded.collect()
}

#[cfg(test)]
mod stranded_tests {
    use super::*;
    use crate::scoring::node_fixture;

    fn check(node: &str, mix: &str, expected: &[u64]) {
        let (node, classes) = node_fixture::node(node);
        let mix = node_fixture::compiled(mix, &node, &classes);
        let found = stranded_by_device(&node, &mix);
        let millionths: Vec<u64> = found.iter().map(|(_, share)| share.millionths()).collect();
        assert_eq!(millionths, expected);
        let sum: u64 = millionths.iter().sum();
        assert_eq!(sum, PackingSums::of(&node, &mix).fragmented_share().millionths());
    }

    #[test]
    fn devices_share_the_fragmentation_of_their_node() {
        let node = "A:500/1000 B:200/1000";
        check(node, "1 fraction=0.3", &[0, 200_000]);
        check(node, "1 fraction=0.2 count=2", &[0, 0]);
        check(node, "1 whole", &[500_000, 200_000]);
        // A: lost to the whole GPU and the CPU pod, 3 of 10; B: to these, 0.3 and 0.5, 10 of 10.
        check(node, "4 fraction=0.3; 3 fraction=0.5; 2 whole; 1 cpu=1000", &[150_000, 200_000]);
        check(node, "", &[0, 0]);
        check("A:500/1000 B!:1000/1000", "1 whole", &[500_000]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scoring::node_fixture;

    #[test]
    #[expect(clippy::cast_possible_truncation, reason = "logits of percentages are small")]
    fn thresholds_are_the_logits_of_the_scores() {
        for (index, threshold) in SCORE_THRESHOLDS.iter().enumerate() {
            let score = f64::from(u32::try_from(index).unwrap() + 1);
            let logit = (score / (100.0 - score)).ln() * 1e9;
            assert_eq!(*threshold, logit.ceil() as i64, "score {score}");
        }
    }

    /// Two GPUs with 0.5 and 0.2 free, 0.7 in all. By the paper's definition the fragment is, for
    /// 0.3 and for 0.5 of a GPU: 0.2, the device that is too small; for a whole GPU, a pod without
    /// a GPU, and more cores than the node has: all 0.7; for twice 0.2: nothing.
    const NODE: &str = "A:500/1000 B:200/1000";
    const MIX: &str = "4 fraction=0.3; 3 fraction=0.5; 2 whole; 1 cpu=1000";

    fn packing(node: &str, mix: &str) -> PackingSums {
        let (node, classes) = node_fixture::node(node);
        PackingSums::of(&node, &node_fixture::compiled(mix, &node, &classes))
    }

    #[test]
    fn fragmentation_is_the_mean_of_what_each_request_cannot_use() {
        for (mix, millionths) in [
            ("1 fraction=0.3", 200_000),
            ("1 fraction=0.5", 200_000),
            ("1 whole", 700_000),
            ("1 cpu=1000", 700_000),
            ("1 fraction=0.1 cpu=16001", 700_000),
            ("1 fraction=0.2 count=2", 0),
            ("1 fraction=0.3 count=2", 700_000),
            ("1 memory=300", 200_000),
            ("1 fraction=0.1 model=A100", 700_000),
            ("1 mig=1g.5gb", 700_000),
            (MIX, 350_000), // (4 x 0.2 + 3 x 0.2 + 2 x 0.7 + 1 x 0.7) / 10
            ("", 0),
        ] {
            assert_eq!(packing(NODE, mix).fragmented_share().millionths(), millionths, "{mix}");
        }
        assert_eq!(packing(NODE, MIX).fragmentation().millionths(), 500_000);
        // room has two dimensions: B has compute without memory
        let lopsided = packing("A:500/1000 B:0/1000,0.4", "1 fraction=0.4");
        assert_eq!(lopsided.fragmented_share().millionths(), 400_000);
        assert_eq!(packing("", MIX).fragmentation(), Share::ZERO);
    }

    #[test]
    fn a_placement_is_scored_by_the_fragmentation_it_adds() {
        let (node, classes) = node_fixture::node(NODE);
        let mix = node_fixture::compiled(MIX, &node, &classes);
        let rooms: Vec<Room> = node
            .devices()
            .iter()
            .map(|device_state| device_state.room(HoldRule::Respected))
            .collect();
        let uses = Uses::of(&mix.typical, &rooms);
        let usability = uses.on(&mix.typical, &rooms);
        let cpu = MilliCpu::new(16_000);
        let demand = |millionths: u64| Demand {
            memory: MemMib::new(millionths / 1000),
            share: Share::from_millionths(millionths),
        };
        for (taken, after, score) in [
            (vec![], 3_500_000, 50),
            // 0.2 and 0.2 are left, which no request can use: F = 0.4, 100 / (1 + e^0.05) = 48.7
            (vec![(0, demand(300_000))], 4_000_000, 48),
            // 0.5 is left: F = (2 x 0.5 + 1 x 0.5) / 10 = 0.15, 100 / (1 + e^-0.2) = 54.98
            (vec![(1, demand(200_000))], 1_500_000, 54),
            // nothing is left: 100 / (1 + e^-0.35) = 58.7
            (vec![(0, demand(500_000)), (1, demand(200_000))], 0, 58),
        ] {
            let fragments = usability.fragments_after(&taken, cpu);
            assert_eq!(fragments, after, "{taken:?}");
            assert_eq!(usability.score(usability.fragments(cpu), fragments), score, "{taken:?}");
        }
    }

    #[test]
    fn packing_efficiency_is_the_mean_fullness_of_occupied_gpus() {
        for (node, efficiency, allocation) in [
            ("A:500/1000 B:200/1000 C:1000/1000", 650_000, 433_333),
            ("A:900/1000,0.2", 800_000, 800_000), // the fuller of both dimensions
            ("A:100/1000,0.8", 900_000, 200_000),
            ("A:1000/1000 B:1000/1000", 0, 0),
            ("A:0/1000 B!:1000/1000", 1_000_000, 1_000_000), // unhealthy devices are not packed
            ("", 0, 0),
        ] {
            let packing = packing(node, "");
            assert_eq!(packing.efficiency().millionths(), efficiency, "{node}");
            assert_eq!(packing.allocation().millionths(), allocation, "{node}");
        }
        let both = packing(NODE, MIX).and(packing("A:1000/1000", MIX));
        assert_eq!((both.devices, both.occupied), (3, 2));
        assert_eq!(both.efficiency().millionths(), 650_000);
        // the empty GPU is a fragment only for the pod without a GPU: (3.5 + 1 x 1.0) / 10 of 1.7
        assert_eq!(both.fragmentation().millionths(), 264_705);
    }
}
