//! How the devices of a pool are shared, as the operator configures it: freely or in equal slots,
//! MIG instances whole or in parts, and with which enforcement of memory limits.
//!
//! A device with R slots is requested in whole slots. *k* slots are k/R of its memory and of its
//! compute, each rounded down. So slots that sum to R always fit together, and R + 1 never do: what
//! rounding leaves of the compute, R millionths at most, is less than a slot.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use wire::device::{Device, DeviceKind};
use wire::ids::PoolName;
use wire::units::{Demand, MemMib, Share};

/// The number of equal slots of each device, 2 to [`Replicas::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Replicas(NonZeroU32);

impl Replicas {
    /// Fewest slots.
    pub const MIN: u32 = 2;
    /// Most slots. With more tenants each gets too little time on the GPU, and an MPS daemon serves
    /// 60 processes at most.
    pub const MAX: u32 = 64;

    /// This many slots; `None` out of the range.
    pub const fn new(count: u32) -> Option<Self> {
        match NonZeroU32::new(count) {
            Some(slots) if count >= Self::MIN && count <= Self::MAX => Some(Self(slots)),
            Some(_) | None => None,
        }
    }

    /// How many slots.
    pub fn count(self) -> u32 {
        self.0.get()
    }

    /// The amount of `slots` slots of a device with `capacity`; at most the whole device.
    pub fn amount(self, slots: u32, capacity: MemMib) -> Demand {
        Demand {
            memory: MemMib::new(self.part(slots, capacity.mib())),
            share: Share::from_millionths(self.part(slots, Share::WHOLE.millionths())),
        }
    }

    fn part(self, slots: u32, whole: u64) -> u64 {
        let slots = slots.min(self.count());
        let part = u128::from(whole) * u128::from(slots) / u128::from(self.count());
        u64::try_from(part).expect("a part is at most the whole")
    }

    /// The fewest slots that have `demand` in both dimensions, from one to all.
    pub fn slots_for(self, demand: Demand, capacity: MemMib) -> u32 {
        let by_memory = self.slots_of(demand.memory.mib(), capacity.mib());
        let by_share = self.slots_of(demand.share.millionths(), Share::WHOLE.millionths());
        let slots = by_memory.max(by_share).max(1);
        u32::try_from(slots).unwrap_or(u32::MAX).min(self.count())
    }

    fn slots_of(self, amount: u64, whole: u64) -> u128 {
        let scaled = u128::from(amount) * u128::from(self.count());
        scaled.div_ceil(u128::from(whole.max(1)))
    }

    /// How many whole slots `free` room has.
    pub fn slots_in(self, free: Demand, capacity: MemMib) -> u32 {
        (1..=self.count())
            .take_while(|slots| free.checked_sub(self.amount(*slots, capacity)).is_some())
            .last()
            .unwrap_or(0)
    }
}

/// Whether MIG instances may have several tenants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InstanceUse {
    /// Each has one tenant.
    #[default]
    Whole,
    /// Each is shared as a GPU is: by fraction, memory or slot of the instance.
    Shared,
}

/// Who divides the GPUs that are in MIG mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MigUse {
    /// The operator, or a tool of another maker. gpupack takes the instances as they are.
    #[default]
    Fixed,
    /// gpupack: the node's agent makes an instance when a pod is bound to it, and removes it after the pod.
    OnDemand,
}

impl MigUse {
    /// Whether gpupack makes instances.
    pub fn makes(self) -> bool {
        self == Self::OnDemand
    }

    /// Whether gpupack makes instances on this device.
    pub(crate) fn divides(self, device: &Device) -> bool {
        self.makes() && device.kind == DeviceKind::MigParent
    }
}

/// What is to limit the tenants of a shared device to their memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Enforcement {
    /// Nothing: tenants share the device in time and trust each other.
    #[default]
    None,
    /// MPS with a memory limit per client.
    Mps,
    /// The driver's limit per control group, from release 615 on.
    Driver,
}

impl Enforcement {
    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mps => "mps",
            Self::Driver => "driver",
        }
    }

    /// The isolation of tenants that share a device of this kind. The driver's limits do not apply
    /// in MIG instances ("Dynamo per-GPU limits guide", NVIDIA); MPS runs in each of them.
    pub fn on(self, kind: &DeviceKind) -> ConfiguredIsolation {
        match (self, kind) {
            (Self::None, _) | (Self::Driver, DeviceKind::MigInstance { .. }) => {
                ConfiguredIsolation::None
            }
            (Self::Mps, _) => ConfiguredIsolation::Mps,
            (Self::Driver, DeviceKind::Gpu | DeviceKind::MigParent) => ConfiguredIsolation::Driver,
        }
    }
}

/// Whether pods with a limit may use more than they request while it is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Borrow {
    /// On their own GPU only: compute, which no rule of gpupack limits, and memory while they are alone.
    #[default]
    None,
    /// Compute. Those that may be restarted run on another GPU of their node that is less busy, until a
    /// pod is allocated the room there. No memory: nothing takes it back.
    Compute,
    /// Compute in the same way. Those that may be restarted also use memory above their request, up to their
    /// limit, while no other pod that runs on the GPU requests it: then their container is restarted.
    Memory {
        /// The most of a device that a pod may use.
        most: Share,
    },
}

impl Borrow {
    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Compute => "compute",
            Self::Memory { .. } => "memory",
        }
    }

    /// Whether memory is lent, too.
    pub fn lends_memory(self) -> bool {
        matches!(self, Self::Memory { .. })
    }
}

/// How the devices of one pool are shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolRule {
    /// The number of slots of each device; `None` if any fraction may be allocated.
    pub replicas: Option<Replicas>,
    /// Whether MIG instances are shared.
    pub instances: InstanceUse,
    /// What is to limit the tenants of a shared device to their memory.
    pub enforcement: Enforcement,
    /// Whether pods may use more than they request.
    pub borrow: Borrow,
    /// Whether the driver limits how much lent memory each pod uses. Then pods borrow memory only where the node's
    /// agent sets these limits.
    pub driver_limits: bool,
    /// Who divides GPUs in MIG mode.
    pub mig: MigUse,
}

/// The rules of all pools that have one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolRules {
    by_pool: BTreeMap<PoolName, PoolRule>,
}

impl PoolRules {
    /// These rules; every other pool has the default one.
    pub fn new(rules: impl IntoIterator<Item = (PoolName, PoolRule)>) -> Self {
        Self { by_pool: rules.into_iter().collect() }
    }

    /// The pools that have one, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&PoolName, &PoolRule)> {
        self.by_pool.iter()
    }

    /// Whether some pool lends more than compute of the GPU that a pod is allocated.
    pub fn lends(&self) -> bool {
        self.by_pool.values().any(|rule| rule.borrow != Borrow::None)
    }

    /// The same rules, where no pod may use more than this share of the memory of a device.
    pub fn capped(mut self, max_limit: Share) -> Self {
        for rule in self.by_pool.values_mut() {
            if let Borrow::Memory { most } = &mut rule.borrow {
                *most = max_limit;
            }
        }
        self
    }

    /// The same rules, where the driver limits the memory of pods, or does not.
    pub fn limited_by_driver(mut self, is_limited: bool) -> Self {
        for rule in self.by_pool.values_mut() {
            rule.driver_limits = is_limited && rule.borrow.lends_memory();
        }
        self
    }

    /// The rule of a pool.
    pub fn of(&self, pool: &PoolName) -> PoolRule {
        self.by_pool.get(pool).copied().unwrap_or_default()
    }
}

/// The isolation that a placement has by configuration, from weak to strong. What is verified on
/// the node is reported separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConfiguredIsolation {
    /// Nothing limits the tenants of the GPU to their memory.
    #[default]
    None,
    /// MPS is to limit each tenant to its memory.
    Mps,
    /// The driver is to limit each tenant to its memory.
    Driver,
    /// Hardware does: a MIG instance, or a GPU that can have one tenant only.
    Hardware,
}

impl ConfiguredIsolation {
    /// The name in annotations and views.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mps => "mps",
            Self::Driver => "driver",
            Self::Hardware => "hardware",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas(count: u32) -> Replicas {
        Replicas::new(count).unwrap()
    }

    #[test]
    fn pools_can_have_2_to_64_slots() {
        for (count, is_legal) in [(0, false), (1, false), (2, true), (64, true), (65, false)] {
            assert_eq!(Replicas::new(count).is_some(), is_legal, "{count}");
        }
    }

    #[test]
    fn slots_that_sum_to_all_fit_and_one_more_never_does() {
        for count in Replicas::MIN..=Replicas::MAX {
            for mib in [1, 63, 4_864, 15_360, 81_286] {
                let (replicas, capacity) = (replicas(count), MemMib::new(mib));
                let mut free = Demand { memory: capacity, share: Share::WHOLE };
                for taken in 0..count {
                    assert_eq!(replicas.slots_in(free, capacity), count - taken, "{count}, {mib}");
                    free = free.checked_sub(replicas.amount(1, capacity)).unwrap();
                }
                assert_eq!(replicas.slots_in(free, capacity), 0, "{count} of {mib}");
                assert!(free.checked_sub(replicas.amount(1, capacity)).is_none());
            }
        }
    }

    #[test]
    fn a_request_is_rounded_up_to_slots() {
        let capacity = MemMib::new(15_001);
        for (count, millionths, mib, slots) in [
            (4, 1, 0, 1),
            (4, 250_000, 3_750, 1),
            (4, 250_010, 3_750, 2),
            (4, 250_000, 3_751, 2),
            (4, 500_000, 7_500, 2),
            (4, 0, 15_001, 4),
            (3, 333_330, 0, 1),
            (3, 333_340, 0, 2),
            (64, 1_000_000, 15_001, 64),
        ] {
            let share = Share::from_millionths(millionths);
            let demand = Demand { memory: MemMib::new(mib), share };
            let replicas = replicas(count);
            assert_eq!(replicas.slots_for(demand, capacity), slots, "{millionths}, {mib}");
            let given = replicas.amount(slots, capacity);
            assert!(given.checked_sub(demand).is_some(), "{given:?} holds {demand:?}");
        }
        assert_eq!(replicas(4).slots_for(Demand::ZERO, MemMib::ZERO), 1, "no memory, no panic");
    }

    #[test]
    fn the_driver_limits_no_pod_inside_a_mig_instance() {
        let parent = wire::ids::DeviceId::new("GPU-a").unwrap();
        let profile = wire::ids::MigProfile::new("1g.5gb");
        let instance = DeviceKind::MigInstance { parent, profile };
        for (enforcement, on_gpu, on_instance) in [
            (Enforcement::None, ConfiguredIsolation::None, ConfiguredIsolation::None),
            (Enforcement::Mps, ConfiguredIsolation::Mps, ConfiguredIsolation::Mps),
            (Enforcement::Driver, ConfiguredIsolation::Driver, ConfiguredIsolation::None),
        ] {
            let found = (enforcement.on(&DeviceKind::Gpu), enforcement.on(&instance));
            assert_eq!(found, (on_gpu, on_instance), "{}", enforcement.name());
        }
    }
}
