//! The one answer to "does this request fit on this device?", used by every verb, by `bind` again
//! on the books of that moment, by the simulator and by `explain`.

use crate::hardware::device::Health;
use crate::hardware::device_class::{ClassId, DeviceClasses, PerClass};
use crate::hardware::pool::Protection;
use crate::hardware::units::{Demand, HostAmount, MemMib, MilliCpu, Share};
use crate::model::rejection::Rejection;
use crate::model::request::{GpuRequest, Isolation};

/// Whether the node's processor time and memory are part of the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostRule {
    /// kube-scheduler has checked them itself; our books serve scoring only.
    Trusted,
    /// Nobody else checks (simulator, demo): a shortfall is a misfit.
    Checked,
}

/// A request worked out for every class of device: the form in which it is asked of many nodes.
#[derive(Clone, Debug)]
pub struct CompiledRequest {
    /// The request; none for a pod that wants no GPU.
    pub gpu: Option<GpuRequest>,
    /// What the pod wants of the node outside its GPUs.
    pub host: HostAmount,
    /// Whether that is checked here.
    pub host_rule: HostRule,
    /// What is taken of a device, and whether that is all of it.
    demand: PerClass<(Result<Demand, Rejection>, bool)>,
}

impl CompiledRequest {
    /// Works out `gpu` for every class known now.
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
    /// The misfit that no freed room can cure.
    pub fn demand_on(&self, class: ClassId) -> Result<Demand, Rejection> {
        self.demand.of(class).0
    }

    /// Whether the pod takes whole devices.
    pub fn is_whole(&self) -> bool {
        self.gpu.as_ref().is_some_and(|request| request.amount.is_whole())
    }

    /// Whether any MIG instance will do that has the memory, to be taken whole.
    pub fn wants_any_instance(&self) -> bool {
        self.gpu.as_ref().is_some_and(|request| {
            request.isolation == Isolation::Hardware
                && request.count.get() == 1
                && !request.amount.is_whole()
        })
    }

    /// How many devices are asked for; zero for a pod that wants no GPU.
    pub fn count(&self) -> usize {
        let count = self.gpu.as_ref().map_or(0, |request| request.count.get());
        usize::try_from(count).expect("a device count fits into an address")
    }
}

/// What a device has to offer at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Class of the device.
    pub class: ClassId,
    /// Whether it takes new tenants at all.
    pub health: Health,
    /// Free memory and compute share; zero in both where the device is overbooked.
    pub free: Demand,
    /// How its tenants are protected from each other.
    pub company: NeighborIsolation,
}

/// How the tenants of a shared device are protected from each other. Protection is a property of the
/// device: it is worth nothing to one tenant where another is not held to its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NeighborIsolation {
    /// What is to hold a tenant that comes now and leaves room for others.
    pub guard: Protection,
    /// Whether something was to hold them and does not; then `guard` is none.
    pub is_guard_missing: bool,
    /// Whether something uses the device that nothing holds: a tenant placed without protection, or
    /// use that no booking covers.
    pub has_unheld: bool,
    /// Whether a tenant came on the condition that all of them are held.
    pub needs_guard: bool,
}

impl NeighborIsolation {
    /// Whether a pod may join them without taking the whole device.
    fn admits(self, isolation: Isolation) -> Result<(), Rejection> {
        let is_held = self.guard != Protection::None;
        match isolation {
            Isolation::None if self.needs_guard && !is_held => Err(Rejection::ProtectedTenant),
            Isolation::None => Ok(()),
            Isolation::Memory if self.is_guard_missing => Err(Rejection::UnverifiedGuard),
            Isolation::Memory if !is_held => Err(Rejection::Unprotected),
            Isolation::Memory if self.has_unheld => Err(Rejection::UnheldTenant),
            Isolation::Memory => Ok(()),
            Isolation::Hardware => Err(Rejection::PartOfGpu),
        }
    }
}

/// Whether `ask` fits on a device with this room, and what it takes of it. **The** fit function.
///
/// # Errors
/// The [`Rejection`], with what is missing.
pub fn fit(ask: &CompiledRequest, room: &Room) -> Result<Demand, Rejection> {
    let demand = ask.demand_on(room.class)?;
    match room.health {
        Health::Healthy => {}
        Health::KubeletOwned => return Err(Rejection::KubeletOwned),
        Health::Unhealthy => return Err(Rejection::Unhealthy),
    }
    if let Some(request) = &ask.gpu
        && !ask.demand.of(room.class).1
    {
        room.company.admits(request.isolation)?;
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

/// Whether `ask` fits beside what else runs on a node with `free` processor time and memory.
///
/// # Errors
/// The [`Rejection`], with what is missing. Never where the host is not part of the question.
pub fn fit_host(ask: &CompiledRequest, free: HostAmount) -> Result<(), Rejection> {
    if ask.host_rule == HostRule::Trusted {
        return Ok(());
    }
    if let Some(short) = ask.host.cpu.checked_sub(free.cpu)
        && short > MilliCpu::ZERO
    {
        return Err(Rejection::Cpu { short });
    }
    if let Some(short) = ask.host.memory.checked_sub(free.memory)
        && short > MemMib::ZERO
    {
        return Err(Rejection::HostMemory { short });
    }
    Ok(())
}
