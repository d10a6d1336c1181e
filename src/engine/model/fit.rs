//! The one answer to "does this request fit on this device?". All verbs use it, `bind` on the state
//! at that time, and so do the simulator and `explain`.

use crate::hardware::device_class::{ClassId, DeviceClasses, PerClass};
use crate::hardware::pool::ConfiguredIsolation;
use crate::model::rejection::Rejection;
use crate::model::request::{GpuRequest, Isolation};
use wire::device::Health;
use wire::units::{Demand, HostAmount, MemMib, MilliCpu, Share};

/// Whether CPU and host memory are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostRule {
    /// kube-scheduler checks them. What the ledger has of them serves scoring only.
    Trusted,
    /// No other scheduler checks them, as in the simulator: a shortfall is a rejection.
    Checked,
}

/// A request with what it takes of each device class, so that many nodes can be checked.
#[derive(Clone, Debug)]
pub struct CompiledRequest {
    /// The request; `None` for a pod that requests no GPU.
    pub gpu: Option<GpuRequest>,
    /// The CPU and host memory that the pod requests.
    pub host: HostAmount,
    /// Whether they are checked here.
    pub host_rule: HostRule,
    /// What is taken of a device, and whether that is all of it.
    demand: PerClass<(Result<Demand, Rejection>, bool)>,
}

impl CompiledRequest {
    /// Compiles `gpu` for every class known now.
    pub fn new(
        gpu: Option<GpuRequest>,
        host: HostAmount,
        host_rule: HostRule,
        classes: &DeviceClasses,
    ) -> Self {
        let demand = classes.map(|class| match &gpu {
            Some(request) => {
                let demand = request.demand_on(class);
                (demand, demand == Ok(class.whole()))
            }
            None => (Ok(Demand::ZERO), false),
        });
        Self { gpu, host, host_rule, demand }
    }

    /// What is taken of a device of `class`.
    ///
    /// # Errors
    /// The rejection that no freed room can cure.
    pub fn demand_on(&self, class: ClassId) -> Result<Demand, Rejection> {
        self.demand.of(class).0
    }

    /// Whether the pod takes whole devices.
    pub fn is_whole(&self) -> bool {
        self.gpu.as_ref().is_some_and(|request| request.amount.is_whole())
    }

    /// Whether any MIG instance with enough memory will do. It is taken whole.
    pub fn wants_any_instance(&self) -> bool {
        self.gpu.as_ref().is_some_and(GpuRequest::wants_any_instance)
    }

    /// How many devices are requested; zero for a pod that requests no GPU.
    pub fn count(&self) -> usize {
        let count = self.gpu.as_ref().map_or(0, |request| request.count.get());
        usize::try_from(count).expect("a device count fits into usize")
    }
}

/// What a device has to offer now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Class of the device.
    pub class: ClassId,
    /// Whether it takes new tenants at all.
    pub health: Health,
    /// Free memory and compute share; zero in both where the device is overallocated.
    pub free: Demand,
    /// How its tenants are isolated from each other.
    pub neighbors: NeighborIsolation,
    /// Whether it is a MIG instance that cannot be made, or has to go: others cover its units.
    pub is_covered: bool,
}

/// How the tenants of a shared device are isolated from each other. Isolation is a property of the
/// device: it is worthless to one tenant where another has no memory limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NeighborIsolation {
    /// What limits the memory of a new tenant that leaves room for others.
    pub guard: ConfiguredIsolation,
    /// Whether isolation is configured and not in force; then `guard` is none.
    pub is_isolation_missing: bool,
    /// Whether something without a memory limit uses the device: a tenant placed without isolation,
    /// or use beyond what is allocated.
    pub has_unisolated: bool,
    /// Whether a tenant requires that all have a memory limit.
    pub requires_isolation: bool,
}

impl NeighborIsolation {
    /// Whether a pod may join them without taking the whole device.
    fn admits(self, isolation: Isolation) -> Result<(), Rejection> {
        let is_held = self.guard != ConfiguredIsolation::None;
        match isolation {
            Isolation::None if self.requires_isolation && !is_held => {
                Err(Rejection::IsolatedTenant)
            }
            Isolation::None => Ok(()),
            Isolation::Memory if self.is_isolation_missing => Err(Rejection::UnverifiedIsolation),
            Isolation::Memory if !is_held => Err(Rejection::NoIsolation),
            Isolation::Memory if self.has_unisolated => Err(Rejection::UnisolatedTenant),
            Isolation::Memory => Ok(()),
            Isolation::Hardware => Err(Rejection::PartOfGpu),
        }
    }
}

/// Whether `compiled` fits on a device with this room, and what it takes of it. **The** fit function.
///
/// # Errors
/// The [`Rejection`], with what is missing.
pub fn fit(compiled: &CompiledRequest, room: &Room) -> Result<Demand, Rejection> {
    let demand = compiled.demand_on(room.class)?;
    match room.health {
        Health::Healthy => {}
        Health::KubeletOwned => return Err(Rejection::KubeletOwned),
        Health::Unhealthy => return Err(Rejection::Unhealthy),
    }
    if room.is_covered {
        return Err(Rejection::NoPlace);
    }
    if let Some(request) = &compiled.gpu
        && !compiled.demand.of(room.class).1
    {
        room.neighbors.admits(request.isolation)?;
    }
    if let Some(short) = demand.memory.checked_sub(room.free.memory)
        && short > MemMib::ZERO
    {
        return Err(Rejection::Memory { short });
    }
    if let Some(short) = demand.share.checked_sub(room.free.share)
        && short > Share::ZERO
    {
        return Err(Rejection::Share { short });
    }
    Ok(demand)
}

/// Whether `compiled` fits on a node with `free` CPU and host memory.
///
/// # Errors
/// The [`Rejection`], with what is missing. Never if the request does not check the host.
pub fn fit_host(compiled: &CompiledRequest, free: HostAmount) -> Result<(), Rejection> {
    if compiled.host_rule == HostRule::Trusted {
        return Ok(());
    }
    if let Some(short) = compiled.host.cpu.checked_sub(free.cpu)
        && short > MilliCpu::ZERO
    {
        return Err(Rejection::Cpu { short });
    }
    if let Some(short) = compiled.host.memory.checked_sub(free.memory)
        && short > MemMib::ZERO
    {
        return Err(Rejection::HostMemory { short });
    }
    Ok(())
}
