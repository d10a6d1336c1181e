//! What a pod requests, and what that means on a given device.
//!
//! The edge parses the annotations once. All other code gets only these types.

use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use crate::hardware::device_class::{ClassKind, DeviceClass, GpuPart};
use crate::hardware::mig::Geometry;
use crate::hardware::pool::Replicas;
use crate::model::policy::Policy;
use crate::model::rejection::Rejection;
use wire::device::{ModelFilter, PoolFilter};
use wire::ids::MigProfile;
use wire::units::{Demand, MemMib, Share};

/// Most devices that one pod may request on one node.
pub const MAX_DEVICES_PER_POD: u32 = 64;

/// Most pods of a group.
pub const MAX_GROUP: u32 = 256;

/// A group of pods that start together or not at all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodGroup {
    /// Its name, within the namespace.
    pub name: Arc<str>,
    /// How many pods it has.
    pub size: u32,
}

/// How much of each device a pod requests.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Amount {
    /// A share of one GPU: that much compute and that share of its memory, rounded down.
    Fraction(Share),
    /// That much memory of one GPU; its compute share follows from the memory, rounded down.
    Memory(MemMib),
    /// A compute share and, independent of it, an amount of memory.
    FractionAndMemory(Share, MemMib),
    /// A whole GPU.
    Whole,
    /// A whole MIG instance of this profile.
    MigInstance(MigProfile),
    /// One slot of a device, in a pool with replicas.
    SharedSlot,
}

/// How much a pod may use while it is free. Kept and checked; it does not change placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Limit {
    /// Up to this share of the GPU.
    Fraction(Share),
    /// Up to this much memory.
    Memory(MemMib),
}

impl Limit {
    /// The same, but no more than `most` of a device with this `capacity`.
    #[must_use]
    pub fn at_most(self, most: Share, capacity: MemMib) -> Self {
        match self {
            Self::Fraction(share) => Self::Fraction(share.min(most)),
            Self::Memory(memory) => Self::Memory(memory.min(most.of(capacity))),
        }
    }

    /// The memory that it means of a device with this `capacity`: whole slots, rounded down, where the device has
    /// slots. That can be less than the request.
    pub fn memory_of(self, replicas: Option<Replicas>, capacity: MemMib) -> MemMib {
        match (self, replicas) {
            (_, Some(replicas)) => replicas.amount(self.slots(replicas, capacity), capacity).memory,
            (Self::Fraction(share), None) => share.min(Share::WHOLE).of(capacity),
            (Self::Memory(memory), None) => memory,
        }
    }

    /// The compute that it means, likewise; `None` if it says nothing of compute.
    pub fn share_of(self, replicas: Option<Replicas>) -> Option<Share> {
        let Self::Fraction(share) = self else { return None };
        Some(match replicas {
            Some(replicas) => {
                replicas.amount(self.slots(replicas, MemMib::ZERO), MemMib::ZERO).share
            }
            None => share.min(Share::WHOLE),
        })
    }

    /// The whole slots in it.
    fn slots(self, replicas: Replicas, capacity: MemMib) -> u32 {
        let all = match self {
            Self::Fraction(share) => Demand { memory: capacity, share },
            Self::Memory(memory) => Demand { memory, share: Share::WHOLE },
        };
        replicas.slots_in(all, capacity)
    }
}

/// The weakest isolation from neighbors that a pod accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isolation {
    /// The pod trusts its neighbors.
    #[default]
    None,
    /// Every tenant of the GPU has a memory limit.
    Memory,
    /// A MIG instance or a whole GPU.
    Hardware,
}

/// Whether a pod may be moved to another GPU of its node, which restarts its container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Movable {
    /// It may not.
    #[default]
    Never,
    /// It may, at any time.
    Restart,
}

/// What a pod is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Its owner's work.
    #[default]
    Work,
    /// To find out what containers get on a node.
    Probe,
}

/// A checked request: the same amount on each of `count` distinct devices of one node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuRequest {
    /// How much of each device.
    pub amount: Amount,
    /// On how many distinct devices, 1 to [`MAX_DEVICES_PER_POD`].
    pub count: NonZeroU32,
    /// Accepted models.
    pub models: ModelFilter,
    /// The weakest isolation accepted.
    pub isolation: Isolation,
    /// How much may be used while it is free.
    pub limit: Option<Limit>,
    /// Whether it may be moved on its node.
    pub movable: Movable,
    /// The policy that the pod chooses instead of the cluster's.
    pub policy: Option<Policy>,
    /// Container that gets the GPU; the first regular one if `None`.
    pub container: Option<Arc<str>>,
    /// Least memory of a part of a device, a rule of the operator; zero without the rule.
    pub min_memory: MemMib,
    /// The pools that it may use, a rule of the operator for its namespace.
    pub pools: PoolFilter,
    /// Whether a whole MIG instance may serve it, though it has no isolation by hardware: a rule of the
    /// operator for amounts of memory.
    pub by_instance: bool,
    /// What the pod is for.
    pub purpose: Purpose,
}

impl Isolation {
    /// All of them, the weakest first.
    pub const ALL: [Self; 3] = [Self::None, Self::Memory, Self::Hardware];

    /// Its name in annotations and in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Memory => "memory",
            Self::Hardware => "hardware",
        }
    }
}

/// A name of isolation that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("isolation `{name}` is unknown: use `none`, `memory` or `hardware`")]
pub struct UnknownIsolation {
    /// The offending name.
    pub name: String,
}

impl FromStr for Isolation {
    type Err = UnknownIsolation;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|isolation| isolation.name() == name)
            .ok_or_else(|| UnknownIsolation { name: name.to_owned() })
    }
}

impl GpuRequest {
    /// A request for one device and nothing special.
    pub fn one(amount: Amount) -> Self {
        Self::several(amount, NonZeroU32::MIN)
    }

    /// A request for the same amount on `count` devices and nothing special.
    pub fn several(amount: Amount, count: NonZeroU32) -> Self {
        Self {
            amount,
            count,
            models: ModelFilter::default(),
            isolation: Isolation::None,
            limit: None,
            movable: Movable::Never,
            policy: None,
            container: None,
            min_memory: MemMib::ZERO,
            pools: PoolFilter::default(),
            by_instance: false,
            purpose: Purpose::Work,
        }
    }

    /// Whether any MIG instance that is large enough will do. It is taken whole.
    pub fn wants_any_instance(&self) -> bool {
        let is_open = self.isolation == Isolation::Hardware || self.by_instance;
        is_open && self.count.get() == 1 && !self.amount.is_whole()
    }

    /// What decides where this fits. Two requests of one shape are placed alike on the same state
    /// under the same policy.
    pub fn shape(&self) -> Self {
        let movable = Movable::Never;
        Self { limit: None, movable, policy: None, container: None, ..self.clone() }
    }

    /// What this request takes from a device of `class`, independent of what is free now.
    ///
    /// # Errors
    /// The [`Rejection`] that no freed room can cure: the pod needs another model or kind of
    /// device, or the device is too small even when empty.
    pub fn demand_on(&self, class: &DeviceClass) -> Result<Demand, Rejection> {
        if !self.models.matches(&class.product()) {
            return Err(Rejection::Model);
        }
        if !self.is_kind(&class.kind) {
            return Err(Rejection::Kind);
        }
        let demand = self.isolated_demand_on(class)?;
        match self.min_memory.checked_sub(demand.memory) {
            Some(short) if short > MemMib::ZERO && demand != class.whole() => {
                Err(Rejection::SmallShare { short })
            }
            _ => Ok(demand),
        }
    }

    fn isolated_demand_on(&self, class: &DeviceClass) -> Result<Demand, Rejection> {
        let demand = self.amount.demand_of(class)?;
        let whole = class.whole();
        match (self.isolation, &class.kind) {
            (_, ClassKind::MigInstance(profile)) => {
                self.amount.fit_instance(class, profile).map(|()| whole)
            }
            (Isolation::None | Isolation::Memory, _) => Ok(demand),
            (Isolation::Hardware, ClassKind::SharedInstance(_)) => Ok(whole),
            (Isolation::Hardware, ClassKind::Gpu | ClassKind::MigParent) if demand == whole => {
                Ok(demand)
            }
            (Isolation::Hardware, ClassKind::Gpu | ClassKind::MigParent) => {
                Err(Rejection::PartOfGpu)
            }
        }
    }

    /// Whether devices of this kind can serve it at all.
    ///
    /// An instance that is not shared serves a part of a GPU only with isolation by hardware, or by a
    /// rule of the operator, and as a whole. A share of a GPU is a share of an instance only in a pool that
    /// shares them. Several instances are not several GPUs: a process sees at most one of them.
    fn is_kind(&self, kind: &ClassKind) -> bool {
        match (kind, &self.amount) {
            (ClassKind::Gpu, amount) => !matches!(amount, Amount::MigInstance(_)),
            (ClassKind::MigParent, _) => false,
            (
                ClassKind::MigInstance(profile) | ClassKind::SharedInstance(profile),
                Amount::MigInstance(wanted),
            ) => wanted.means(profile),
            (ClassKind::MigInstance(_) | ClassKind::SharedInstance(_), Amount::Whole) => false,
            (ClassKind::MigInstance(_), Amount::SharedSlot) => false,
            (ClassKind::MigInstance(_), _) => self.wants_any_instance(),
            (ClassKind::SharedInstance(_), _) => self.count.get() == 1,
        }
    }
}

fn check_size(memory: MemMib, capacity: MemMib) -> Result<(), Rejection> {
    match memory.checked_sub(capacity) {
        Some(over) if over > MemMib::ZERO => Err(Rejection::TooLarge { over }),
        _ => Ok(()),
    }
}

/// Which part of its GPU a MIG instance is, by the table of its model.
fn part_by_table(class: &DeviceClass, profile: &MigProfile) -> Option<GpuPart> {
    let geometry = Geometry::of_instance(&class.model, profile, class.capacity)?;
    Some(geometry.part_of(geometry.profile(profile)?))
}

impl Amount {
    /// What this amount takes of a device of `class`, of any kind: whole slots, where the
    /// device is cut into slots.
    ///
    /// # Errors
    /// [`Rejection::TooLarge`] if even an empty device is too small, [`Rejection::NoReplicas`] for
    /// a slot of a device that is not cut into slots.
    pub fn demand_of(&self, class: &DeviceClass) -> Result<Demand, Rejection> {
        let capacity = class.capacity;
        let demand = self.exact_demand_of(class)?;
        Ok(match class.replicas {
            Some(replicas) => replicas.amount(replicas.slots_for(demand, capacity), capacity),
            None => demand,
        })
    }

    fn exact_demand_of(&self, class: &DeviceClass) -> Result<Demand, Rejection> {
        let capacity = class.capacity;
        match self {
            Self::Fraction(share) => Ok(Demand { memory: share.of(capacity), share: *share }),
            Self::Memory(memory) => {
                check_size(*memory, capacity)?;
                let share =
                    Share::ratio(*memory, capacity).ok_or(Rejection::TooLarge { over: *memory })?;
                Ok(Demand { memory: *memory, share })
            }
            Self::FractionAndMemory(share, memory) => {
                check_size(*memory, capacity)?;
                Ok(Demand { memory: *memory, share: *share })
            }
            Self::Whole | Self::MigInstance(_) => Ok(class.whole()),
            Self::SharedSlot => {
                class.replicas.map(|all| all.amount(1, capacity)).ok_or(Rejection::NoReplicas)
            }
        }
    }

    /// Whether an instance of this profile is large enough: for a share, if it is that part of its GPU, in
    /// slices and in units, as the table of its model or the list of NVML says.
    fn fit_instance(&self, class: &DeviceClass, profile: &MigProfile) -> Result<(), Rejection> {
        let share = match self {
            Self::Fraction(share) | Self::FractionAndMemory(share, _) => *share,
            _ => return Ok(()), // memory is compared as on any device
        };
        let part = class.part.or_else(|| part_by_table(class, profile));
        let part = part.ok_or(Rejection::Kind)?;
        let over = share.of(part.usable).checked_sub(class.capacity);
        let part = self.part_in(part);
        match over.filter(|over| *over > MemMib::ZERO) {
            _ if share <= part => Ok(()),
            Some(over) => Err(Rejection::TooLarge { over }),
            None => Err(Rejection::Kind),
        }
    }

    /// Which share of its GPU an instance serves: with an amount of memory beside the share, that of the slices
    /// alone.
    pub(crate) fn part_in(&self, part: GpuPart) -> Share {
        match self {
            Self::FractionAndMemory(..) => part.slices,
            _ => part.slices_and_units,
        }
    }

    /// Whether this takes the whole device of any size.
    pub fn is_whole(&self) -> bool {
        match self {
            Self::Whole | Self::MigInstance(_) => true,
            Self::Fraction(share) => *share == Share::WHOLE,
            Self::Memory(_) | Self::FractionAndMemory(..) | Self::SharedSlot => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::ids::ModelName;

    fn class(model: &str, kind: ClassKind) -> DeviceClass {
        DeviceClass {
            model: ModelName::new(model),
            capacity: MemMib::new(15_360),
            kind,
            replicas: None,
            part: None,
        }
    }

    #[test]
    fn a_model_name_matches_whole_words_only() {
        for (wanted, model, matches) in [
            ("A100", "NVIDIA A100-SXM4-80GB", true),
            ("a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB", true),
            ("A10", "NVIDIA A100-SXM4-80GB", false),
            ("A100 80GB", "NVIDIA A100-SXM4-80GB", false),
            ("H100 80GB HBM3", "NVIDIA H100 80GB HBM3", true),
            ("H200", "NVIDIA H200 NVL", true),
            ("--", "NVIDIA H200 NVL", false),
        ] {
            let filter = ModelFilter::new([wanted]);
            assert_eq!(filter.matches(&ModelName::new(model)), matches, "{wanted} on {model}");
        }
        assert!(ModelFilter::default().matches(&ModelName::new("anything")));
    }

    #[test]
    fn a_demand_is_rounded_down_in_the_derived_dimension() {
        let gpu = class("T4", ClassKind::Gpu);
        for (amount, memory, share) in [
            (Amount::Fraction(Share::from_millionths(333_330)), 5_119, 333_330),
            (Amount::Memory(MemMib::new(15_360)), 15_360, 1_000_000),
            (Amount::Memory(MemMib::new(1)), 1, 65),
            (Amount::FractionAndMemory(Share::from_millionths(10), MemMib::new(9)), 9, 10),
            (Amount::Whole, 15_360, 1_000_000),
        ] {
            let demand = GpuRequest::one(amount.clone()).demand_on(&gpu).unwrap();
            assert_eq!(
                (demand.memory.mib(), demand.share.millionths()),
                (memory, share),
                "{amount:?}"
            );
        }
    }

    #[test]
    fn a_limit_is_rounded_down_to_whole_slots() {
        let memory = |mib| Limit::Memory(MemMib::new(mib));
        let share = |millionths| Limit::Fraction(Share::from_millionths(millionths));
        for (limit, slots, mib, millionths) in [
            (share(600_000), None, 9_216, Some(600_000)),
            (share(600_000), Some(4), 7_680, Some(500_000)),
            (share(200_000), Some(4), 0, Some(0)),
            (share(500_000), Some(4), 7_680, Some(500_000)),
            (share(333_333), Some(3), 5_120, Some(333_333)), // to the MiB, as a request is
            (share(666_666), Some(3), 10_240, Some(666_666)),
            (share(1_000_000), Some(3), 15_360, Some(1_000_000)),
            (share(1_200_000), None, 15_360, Some(1_000_000)),
            (memory(8_000), None, 8_000, None),
            (memory(8_000), Some(4), 7_680, None),
            (memory(20_000), Some(4), 15_360, None),
        ] {
            let replicas = slots.and_then(Replicas::new);
            let found = limit.memory_of(replicas, MemMib::new(15_360)).mib();
            let share = limit.share_of(replicas).map(Share::millionths);
            assert_eq!((found, share), (mib, millionths), "{limit:?} in {slots:?}");
        }
    }

    #[test]
    fn a_share_below_the_minimum_memory_fits_nowhere() {
        let gpu = class("T4", ClassKind::Gpu);
        let requested = |share, min_memory| {
            let share = Amount::Fraction(Share::from_millionths(share));
            let request =
                GpuRequest { min_memory: MemMib::new(min_memory), ..GpuRequest::one(share) };
            request.demand_on(&gpu).map(|demand| demand.memory.mib())
        };
        // 0.00416 of 15,360 MiB is 63.9 MiB.
        assert_eq!(requested(4_160, 64), Err(Rejection::SmallShare { short: MemMib::new(1) }));
        assert_eq!(requested(4_170, 64), Ok(64));
        assert_eq!(requested(10, 1), Err(Rejection::SmallShare { short: MemMib::new(1) }));
        assert_eq!(requested(10, 0), Ok(0), "the simulator has no minimum");
        assert_eq!(requested(1_000_000, 20_000), Ok(15_360), "a whole device is not a part");
        assert_eq!(Rejection::SmallShare { short: MemMib::new(1) }.label(), "small_share");
    }

    #[test]
    fn rejections_that_free_room_cannot_fix_are_listed_separately() {
        let gpu = class("T4", ClassKind::Gpu);
        let mig = ClassKind::MigInstance(MigProfile::new("1g.5gb"));
        let half = Amount::Fraction(Share::from_millionths(500_000));
        let requested =
            |amount: Amount, class: &DeviceClass| GpuRequest::one(amount).demand_on(class);
        let over = MemMib::new(1);
        assert_eq!(
            requested(Amount::Memory(MemMib::new(15_361)), &gpu),
            Err(Rejection::TooLarge { over })
        );
        assert_eq!(
            requested(Amount::MigInstance(MigProfile::new("1g.5gb")), &gpu),
            Err(Rejection::Kind)
        );
        assert_eq!(requested(half.clone(), &class("A100", mig.clone())), Err(Rejection::Kind));
        assert_eq!(requested(half, &class("A100", ClassKind::MigParent)), Err(Rejection::Kind));
        assert_eq!(requested(Amount::SharedSlot, &gpu), Err(Rejection::NoReplicas));
        assert!(
            requested(Amount::MigInstance(MigProfile::new("1g.5gb")), &class("A100", mig)).is_ok()
        );
    }

    #[test]
    fn any_instance_that_is_large_enough_serves_a_part_of_a_gpu_apart_or_by_a_rule() {
        let instance = |profile: &str, mib| DeviceClass {
            capacity: MemMib::new(mib),
            ..class("NVIDIA A100-SXM4-80GB", ClassKind::MigInstance(MigProfile::new(profile)))
        };
        let share = |millionths| Amount::Fraction(Share::from_millionths(millionths));
        let memory = |mib| Amount::Memory(MemMib::new(mib));
        let apart =
            |amount| GpuRequest { isolation: Isolation::Hardware, ..GpuRequest::one(amount) };
        let open = |amount| GpuRequest { by_instance: true, ..GpuRequest::one(amount) };
        let [small, wide] = [instance("1g.10gb", 9_728), instance("1g.20gb", 19_968)];
        let [two, all] = [instance("2g.20gb", 19_968), instance("7g.80gb", 80_896)];
        let fits = |request: &GpuRequest| {
            let instances = [&small, &two, &all].into_iter();
            let fitting = instances.filter(|class| match request.demand_on(class) {
                Ok(demand) => demand == class.whole(),
                Err(_) => false,
            });
            fitting.map(|class| class.capacity.mib()).collect::<Vec<_>>()
        };
        for request in [apart(memory(9_729)), open(memory(9_729))] {
            assert_eq!(fits(&request), [19_968, 80_896]);
        }
        assert!(fits(&GpuRequest::one(memory(1))).is_empty());
        // A share is one of eight units and of seven slices.
        assert_eq!(fits(&apart(share(125_000))), [9_728, 19_968, 80_896]);
        assert_eq!(fits(&apart(share(125_010))), [19_968, 80_896]);
        assert_eq!(fits(&apart(share(250_000))), [19_968, 80_896]);
        assert_eq!(fits(&apart(share(250_010))), [80_896]);
        let over = MemMib::new(40_448 - 19_968);
        assert_eq!(apart(share(500_000)).demand_on(&two), Err(Rejection::TooLarge { over }));
        assert_eq!(apart(share(142_857)).demand_on(&wide), Ok(wide.whole()));
        assert_eq!(apart(share(142_858)).demand_on(&wide), Err(Rejection::Kind), "one of seven");
        let [three, four] = [instance("3g.40gb", 40_192), instance("4g.40gb", 40_192)];
        assert!(apart(share(500_000)).demand_on(&three).is_err(), "three of seven");
        assert_eq!(apart(share(500_000)).demand_on(&four), Ok(four.whole()));
        let both = Amount::FractionAndMemory(Share::from_millionths(10), MemMib::new(9_729));
        assert_eq!(fits(&apart(both)), [19_968, 80_896]);
        let several = GpuRequest { count: 2.try_into().unwrap(), ..apart(memory(1)) };
        assert!(fits(&several).is_empty());
        let unknown = DeviceClass { model: ModelName::new("New"), ..small.clone() };
        assert_eq!(apart(share(10)).demand_on(&unknown), Err(Rejection::Kind));
        assert_eq!(apart(memory(10)).demand_on(&unknown), Ok(unknown.whole()));
    }
}
