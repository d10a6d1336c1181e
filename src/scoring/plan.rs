//! The questions: does this fit on that node, how good is it there, and which devices would it get.
//!
//! `filter`, `prioritize`, `bind`, `explain` and the simulator all end up in [`evaluate`].

use smallvec::SmallVec;

use crate::hardware::device::PodUid;
use crate::hardware::pool::Protection;
use crate::model::device_state::ClaimRule;
use crate::model::fit::{Ask, Room, fit, fit_host};
use crate::model::node_state::NodeLedger;
use crate::model::rejection::Misfit;
use crate::model::reservation::{PlacedDevice, Placement};
use crate::scoring::context::{KeptOutlook, Scene, Taken, TakenList};
use crate::scoring::cost::Merit;
use crate::scoring::strategy::Strategy;
use crate::waste::compiled_mix::CompiledMix;

/// A place on a node: how good it is, and which devices it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// How good it is.
    pub merit: Merit,
    /// Positions of the devices on the node, with what is taken of each.
    pub taken: TakenList,
}

/// The best place for `ask` on `node` under `strategy`, claims of other pods respected or not.
///
/// # Errors
/// The most telling [`Misfit`] of the node: the one that the smallest change would cure.
pub fn evaluate(
    node: &NodeLedger,
    ask: &Ask,
    strategy: Strategy,
    mix: &CompiledMix,
    claims: ClaimRule,
) -> Result<Place, Misfit> {
    evaluate_with(node, ask, strategy, mix, claims, &KeptOutlook::new())
}

/// The same with what the free room of the node is worth, kept from an earlier question about these very
/// books and this very mix, or to be kept.
///
/// # Errors
/// As [`evaluate`].
pub fn evaluate_with(
    node: &NodeLedger,
    ask: &Ask,
    strategy: Strategy,
    mix: &CompiledMix,
    claims: ClaimRule,
    outlook: &KeptOutlook,
) -> Result<Place, Misfit> {
    let fits = fits_on(node, ask, claims)?;
    let (rooms, host_free) = (node.rooms(claims), node.host_room(claims));
    let scene = Scene { node, rooms, ask, fits: &fits, host_free, outlook };
    let (merit, taken) = strategy.choose(&scene, mix);
    Ok(Place { merit, taken })
}

/// The positions of all devices of `node` that a pod could get: its placement takes some of them, or all.
///
/// # Errors
/// As [`evaluate`].
pub fn fitting(node: &NodeLedger, ask: &Ask, claims: ClaimRule) -> Result<Vec<usize>, Misfit> {
    Ok(fits_on(node, ask, claims)?.into_iter().map(|(position, _)| position).collect())
}

/// Whether `ask` fits on `node`, wherever there.
pub fn fits(node: &NodeLedger, ask: &Ask, claims: ClaimRule) -> bool {
    fits_on(node, ask, claims).is_ok()
}

/// Whether it would fit, claims of other pods respected, if these pods were not there.
pub fn fits_without<'a>(
    node: &NodeLedger,
    ask: &Ask,
    gone: impl IntoIterator<Item = &'a PodUid>,
) -> bool {
    let mut node = node.clone();
    for uid in gone {
        node.remove(uid);
    }
    fits(&node, ask, ClaimRule::Respected)
}

/// The devices of `node` that fit, where all that `ask` wants of the node fits.
fn fits_on(node: &NodeLedger, ask: &Ask, claims: ClaimRule) -> Result<Fits, Misfit> {
    let mut fits = Fits::new();
    if ask.count() > 0 {
        node.placeable()?;
        fits = fitting_devices(ask, node.rooms(claims))?;
    }
    fit_host(ask, node.host_room(claims))?;
    Ok(fits)
}

/// Devices that fit. Nodes have eight as a rule.
type Fits = SmallVec<[Taken; 8]>;

/// The devices that fit, at least as many as are asked for.
fn fitting_devices(ask: &Ask, rooms: &[Room]) -> Result<Fits, Misfit> {
    let mut fits = Fits::new();
    let mut closest: Option<Misfit> = None;
    for (position, room) in rooms.iter().enumerate() {
        match fit(ask, room) {
            Ok(demand) => fits.push((position, demand)),
            Err(misfit) => {
                closest = Some(closest.map_or(misfit, |other| other.closer(misfit)));
            }
        }
    }
    if fits.len() >= ask.count() {
        if ask.wants_any_instance() {
            // Each is taken whole, so the smallest wastes least.
            let least = fits.iter().map(|(_, demand)| demand.memory).min();
            fits.retain(|(_, demand)| Some(demand.memory) == least);
        }
        return Ok(fits);
    }
    let count = |number: usize| u32::try_from(number).expect("a node has few devices");
    let suitable = rooms.iter().filter(|room| ask.demand_on(room.class).is_ok()).count();
    if suitable > 0 && suitable < ask.count() {
        return Err(Misfit::TooFewDevices { suitable: count(suitable) });
    }
    if !fits.is_empty() {
        return Err(Misfit::DevicesTaken { fitting: count(fits.len()) });
    }
    Err(closest.unwrap_or(Misfit::NoDevices))
}

/// The placement that a place on `node` stands for.
///
/// # Panics
/// When `place` was not found on these books: a position is out of range.
pub fn placement(node: &NodeLedger, place: &Place) -> Placement {
    let devices = place.taken.iter().map(|(position, demand)| PlacedDevice {
        id: node.devices()[*position].device().id.clone(),
        demand: *demand,
    });
    let devices: Vec<PlacedDevice> = devices.collect();
    let protection = protection(node, &devices);
    Placement { node: node.name().clone(), devices, protection }
}

/// The weakest of what protects a tenant of these devices.
fn protection(node: &NodeLedger, devices: &[PlacedDevice]) -> Protection {
    let of = |placed: &PlacedDevice| {
        let found = node.devices().iter().find(|books| books.device().id == placed.id);
        found.map_or(Protection::None, |books| books.protection_of(placed.demand))
    };
    devices.iter().map(of).min().unwrap_or_default()
}

/// Whether a placement that was found earlier still fits the books, claims not counted.
pub fn still_fits(node: &NodeLedger, ask: &Ask, placement: &Placement) -> bool {
    let fits = |placed: &PlacedDevice| {
        let found = node.devices().iter().find(|books| books.device().id == placed.id);
        found.is_some_and(|books| fit(ask, &books.room(ClaimRule::Ignored)) == Ok(placed.demand))
    };
    placement.node == *node.name()
        && placement.devices.len() == ask.count()
        && (ask.count() == 0 || node.placeable().is_ok())
        && fit_host(ask, node.host_room(ClaimRule::Ignored)).is_ok()
        && placement.devices.iter().all(fits)
        && protection(node, &placement.devices) == placement.protection
}

#[cfg(test)]
mod tests;
