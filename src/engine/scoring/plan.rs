//! Whether a request fits on a node, at what cost, and which devices it would get.
//!
//! `filter`, `prioritize`, `bind`, `explain` and the simulator all end up in [`evaluate`].

use std::collections::BTreeSet;

use smallvec::SmallVec;

use crate::hardware::pool::ConfiguredIsolation;
use crate::hardware::spots::{Makeable, Spot};
use crate::model::device_state::HoldRule;
use crate::model::fit::{CompiledRequest, Room, fit, fit_host};
use crate::model::node_state::NodeState;
use crate::model::rejection::Rejection;
use crate::model::reservation::{PlacedDevice, Placement};
use crate::scoring::context::{KeptNodeWaste, ScoringContext, Taken, TakenList};
use crate::scoring::cost::LocalCost;
use crate::scoring::strategy::Strategy;
use crate::waste::compiled_mix::CompiledMix;
use wire::ids::PodUid;

/// A placement on a node: its cost, and the devices it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostedPlacement {
    /// The part of its cost that depends on the node alone.
    pub local_cost: LocalCost,
    /// Positions of the devices on the node, with what is taken of each.
    pub taken: TakenList,
}

/// The best placement for `compiled` on `node`. `holds` says whether holds of other pods are respected.
///
/// # Errors
/// The node's closest [`Rejection`]: the one with the smallest change that would help.
pub fn evaluate(
    node: &NodeState,
    compiled: &CompiledRequest,
    strategy: &Strategy,
    mix: &CompiledMix,
    holds: HoldRule,
) -> Result<CostedPlacement, Rejection> {
    evaluate_with(node, compiled, strategy, mix, holds, &KeptNodeWaste::new())
}

/// The same with the node's expected waste, kept from an earlier call with this state and this mix,
/// or to be kept.
///
/// # Errors
/// As [`evaluate`].
pub fn evaluate_with(
    node: &NodeState,
    compiled: &CompiledRequest,
    strategy: &Strategy,
    mix: &CompiledMix,
    holds: HoldRule,
    node_waste: &KeptNodeWaste,
) -> Result<CostedPlacement, Rejection> {
    let fits = fits_on(node, compiled, holds)?;
    let (rooms, host_free) = (node.rooms(holds), node.host_room(holds));
    let context = ScoringContext { node, rooms, compiled, fits: &fits, host_free, node_waste };
    let (local_cost, taken) = strategy.choose(&context, mix);
    Ok(CostedPlacement { local_cost, taken })
}

/// The positions of all devices of `node` that a pod could get: its placement takes some or all.
///
/// # Errors
/// As [`evaluate`].
pub fn fitting(
    node: &NodeState,
    compiled: &CompiledRequest,
    holds: HoldRule,
) -> Result<Vec<usize>, Rejection> {
    Ok(fits_on(node, compiled, holds)?.into_iter().map(|(position, _)| position).collect())
}

/// Whether `compiled` fits anywhere on `node`.
pub fn fits(node: &NodeState, compiled: &CompiledRequest, holds: HoldRule) -> bool {
    fits_on(node, compiled, holds).is_ok()
}

/// Whether it would fit without these pods, with holds of other pods respected.
pub fn fits_without<'a>(
    node: &NodeState,
    compiled: &CompiledRequest,
    gone: impl IntoIterator<Item = &'a PodUid>,
) -> bool {
    let mut node = node.clone();
    for uid in gone {
        node.remove(uid);
    }
    fits(&node, compiled, HoldRule::Respected)
}

/// The devices of `node` that fit, if all that `compiled` needs of the node fits.
fn fits_on(
    node: &NodeState,
    compiled: &CompiledRequest,
    holds: HoldRule,
) -> Result<Fits, Rejection> {
    let mut fits = Fits::new();
    if compiled.count() > 0 {
        node.placeable_for(compiled)?;
        fits = fitting_devices(compiled, node.rooms(holds))?;
        if !node.spots().is_empty() {
            if compiled.count() > 1 {
                fits = together(node, compiled, fits)?;
            }
            // What is in the way of one instance is mostly in the way of others on that GPU, too.
            let sure = fits.iter().filter(|(position, _)| !node.is_last_choice(*position));
            if sure.count() >= compiled.count() {
                fits.retain(|(position, _)| !node.is_last_choice(*position));
            }
        }
    }
    fit_host(compiled, node.host_room(holds))?;
    if holds == HoldRule::Respected && node.takes_kept_host(compiled.host) {
        return Err(Rejection::HostKept);
    }
    Ok(fits)
}

/// Of MIG instances with media engines that could be made, one on each GPU: more do not fit together.
fn together(
    node: &NodeState,
    compiled: &CompiledRequest,
    mut fits: Fits,
) -> Result<Fits, Rejection> {
    let mut gpus = BTreeSet::new();
    fits.retain(|(position, _)| {
        let spot = node.offered(*position).and_then(|(_, spot)| spot);
        spot.is_none_or(|spot| !spot.profile.has_media() || gpus.insert(spot.gpu))
    });
    if fits.len() < compiled.count() {
        return Err(Rejection::DevicesTaken { fitting: device_count(fits.len()) });
    }
    Ok(fits)
}

/// Devices that fit. Nodes have eight as a rule.
type Fits = SmallVec<[Taken; 8]>;

/// The devices that fit, at least as many as are requested.
fn fitting_devices(compiled: &CompiledRequest, rooms: &[Room]) -> Result<Fits, Rejection> {
    let mut fits = Fits::new();
    let mut closest: Option<Rejection> = None;
    for (position, room) in rooms.iter().enumerate() {
        match fit(compiled, room) {
            Ok(demand) => fits.push((position, demand)),
            Err(rejection) => {
                closest = Some(closest.map_or(rejection, |other| other.closer(rejection)));
            }
        }
    }
    if fits.len() >= compiled.count() {
        if compiled.wants_any_instance() {
            // Each is taken whole, so the smallest wastes least.
            let least = fits.iter().map(|(_, demand)| demand.memory).min();
            fits.retain(|(_, demand)| Some(demand.memory) == least);
        }
        return Ok(fits);
    }
    let suitable = rooms.iter().filter(|room| compiled.demand_on(room.class).is_ok()).count();
    if suitable > 0 && suitable < compiled.count() {
        return Err(Rejection::TooFewDevices { suitable: device_count(suitable) });
    }
    if !fits.is_empty() {
        return Err(Rejection::DevicesTaken { fitting: device_count(fits.len()) });
    }
    Err(closest.unwrap_or(Rejection::NoDevices))
}

fn device_count(count: usize) -> u32 {
    u32::try_from(count).expect("a node has few devices")
}

/// The placement that `place` on `node` stands for.
///
/// # Panics
/// If `place` was not found on this state: a position is out of range.
pub fn placement(node: &NodeState, place: &CostedPlacement) -> Placement {
    placed(node, &place.taken)
}

/// The same of devices at their positions.
pub(crate) fn placed(node: &NodeState, taken: &TakenList) -> Placement {
    let offered = taken.iter().map(|(position, demand)| {
        let (device, spot) = node.offered(*position).expect("a position of this state");
        (PlacedDevice { id: device.id.clone(), demand: *demand }, spot)
    });
    let (devices, mut spots): (Vec<PlacedDevice>, Vec<Option<Spot>>) = offered.unzip();
    if spots.iter().all(Option::is_none) {
        spots.clear();
    }
    let isolation = isolation(node, &devices);
    Placement { node: node.name().clone(), devices, isolation, guest: None, spots }
}

/// The placement of a request on instances that are to be made at these spots, if all of them have room for it
/// beside holds.
pub fn on_spots(node: &NodeState, compiled: &CompiledRequest, spots: &[Spot]) -> Option<Placement> {
    let rooms = node.rooms(HoldRule::Respected);
    let known = spots.iter().map(|spot| {
        let mut known = node.spots().iter().map(|known| &known.makeable);
        known.find(|known| known.spot == *spot)
    });
    let known: Vec<&Makeable> = known.collect::<Option<_>>()?;
    let mut both = known.iter().enumerate();
    if both.any(|(at, one)| known[at + 1..].iter().any(|other| one.excludes(other))) {
        return None;
    }
    let taken = spots.iter().map(|spot| {
        let position = node.position_of(&spot.id()?)?;
        Some((position, fit(compiled, rooms.get(position)?).ok()?))
    });
    let placement = placed(node, &taken.collect::<Option<TakenList>>()?);
    let has_host = fit_host(compiled, node.host_room(HoldRule::Respected)).is_ok();
    (has_host && still_fits(node, compiled, &placement)).then_some(placement)
}

/// The weakest isolation of a tenant of these devices.
fn isolation(node: &NodeState, devices: &[PlacedDevice]) -> ConfiguredIsolation {
    let isolations = devices.iter().map(|placed| {
        let found =
            node.devices().iter().find(|device_state| device_state.device().id == placed.id);
        match found {
            Some(device_state) => device_state.isolation_of(placed.demand),
            // An instance that is to be made has one tenant.
            None if node.position_of(&placed.id).is_some() => ConfiguredIsolation::Hardware,
            None => ConfiguredIsolation::None,
        }
    });
    isolations.min().unwrap_or_default()
}

/// Whether a placement that was found earlier still fits, without holds.
pub fn still_fits(node: &NodeState, compiled: &CompiledRequest, placement: &Placement) -> bool {
    fits_there(node, compiled, placement, HoldRule::Ignored)
        && isolation(node, &placement.devices) == placement.isolation
}

/// Whether what a placement takes is free.
pub fn fits_there(
    node: &NodeState,
    compiled: &CompiledRequest,
    placement: &Placement,
    holds: HoldRule,
) -> bool {
    placement.node == *node.name()
        && placement.devices.len() == compiled.count()
        && (compiled.count() == 0 || node.placeable_for(compiled).is_ok())
        && fit_host(compiled, node.host_room(holds)).is_ok()
        && !(holds == HoldRule::Respected && node.takes_kept_host(compiled.host))
        && placement.devices.iter().all(|placed| {
            let room = node.position_of(&placed.id).map(|at| &node.rooms(holds)[at]);
            room.is_some_and(|room| fit(compiled, room) == Ok(placed.demand))
        })
}

#[cfg(test)]
pub(crate) mod on_demand;
#[cfg(test)]
mod tests;
