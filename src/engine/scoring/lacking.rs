//! Where the first pod of a line has the least to wait for: what each node lacks of its request.
//!
//! How long pods run is not known, so nothing says which node has room first. The devices that lack
//! least keep the least room idle meanwhile (EASY backfilling, Lifka 1995, in space).

use crate::hardware::spots::Makeable;
use crate::model::device_state::{DeviceState, HoldRule, KeptFor, StandingHold};
use crate::model::fit::{CompiledRequest, NeighborIsolation, Room, fit};
use crate::model::node_state::{NodeState, SpotDevice};
use crate::model::reservation::Controller;
use crate::scoring::context::{Taken, TakenList};
use crate::scoring::plan::placed;
use wire::units::{Demand, HostAmount, MemMib, Share};

/// What a node lacks of the request of a pod that this controller made, in millionths of a device, summed over
/// the devices that lack least of it, and the room to keep there, as for the first of a line. `None` if the
/// request would not fit if all ended there for which the pod can wait: neither does what is kept for other
/// pods, nor pods that hang, nor older ones of the same controller.
pub fn lacking(
    node: &NodeState,
    compiled: &CompiledRequest,
    controller: Option<Controller>,
) -> Option<(u64, StandingHold)> {
    node.placeable_for(compiled).ok()?;
    // Two holds that need the same CPU would stand in each other's way.
    let host = node.host_beside_holds(controller);
    let is_known = node.host_capacity() != HostAmount::ZERO;
    if is_known && (compiled.host.cpu > host.cpu || compiled.host.memory > host.memory) {
        return None;
    }
    let mut lacking: Vec<(u64, Taken)> = (0..node.rooms(HoldRule::Respected).len())
        .filter_map(|at| {
            let lacking = lacking_at(node, at, compiled, controller);
            lacking.map(|(lacks, demand)| (lacks, (at, demand)))
        })
        .collect();
    // Of instances, which are taken whole, the smallest wastes least.
    let size =
        |demand: &Demand| if compiled.wants_any_instance() { demand.memory } else { MemMib::ZERO };
    lacking.sort_by_key(|(lacks, (at, demand))| (*lacks, size(demand), *at));
    let lacking = beside_each_other(node, lacking, compiled.count());
    if lacking.is_empty() || lacking.len() < compiled.count() {
        return None;
    }
    let lacks = lacking.iter().map(|(lacks, _)| lacks).sum();
    let mut taken: TakenList = lacking.into_iter().map(|(_, taken)| taken).collect();
    taken.sort_by_key(|(at, _)| *at);
    let (placement, host) = (placed(node, &taken), compiled.host);
    Some((lacks, StandingHold { kept_for: KeptFor::Line, placement, host }))
}

/// What the devices of a standing hold lack; `None` if one of them cannot be of use any more.
pub fn lacks_there(
    node: &NodeState,
    compiled: &CompiledRequest,
    held: &StandingHold,
) -> Option<u64> {
    node.placeable_for(compiled).ok()?;
    let lacks = held.placement.devices.iter().map(|placed| {
        // An instance of another pod may be promised there.
        let mut spots = node.spots().iter();
        let spot = spots.position(|spot| spot.makeable.device.id == placed.id);
        let spot = spot.map(|spot| node.devices().len() + spot);
        let at = spot.or_else(|| node.position_of(&placed.id))?;
        // A device may have some MiB more or less than when it was kept.
        let is_same = |demand: &Demand| {
            demand.share == placed.demand.share || demand.memory == placed.demand.memory
        };
        let lacking = lacking_at(node, at, compiled, None);
        lacking.filter(|(_, demand)| is_same(demand)).map(|(lacks, _)| lacks)
    });
    lacks.sum()
}

/// The first of these that can be had together: of instances that would overlap, or of two with the media
/// engines of one GPU, only one is there at a time.
fn beside_each_other(node: &NodeState, all: Vec<(u64, Taken)>, count: usize) -> Vec<(u64, Taken)> {
    let mut chosen: Vec<(u64, Taken)> = Vec::new();
    let mut spots: Vec<&Makeable> = Vec::new();
    for (lacks, (at, demand)) in all {
        if chosen.len() == count {
            break;
        }
        let spot = at.checked_sub(node.devices().len()).and_then(|at| node.spots().get(at));
        if let Some(SpotDevice { makeable, .. }) = spot {
            if spots.iter().any(|other| makeable.excludes(other)) {
                continue;
            }
            spots.push(makeable);
        }
        chosen.push((lacks, (at, demand)));
    }
    chosen
}

/// What a position of [`NodeState::rooms`] lacks, in millionths of that device, and what is taken of it.
fn lacking_at(
    node: &NodeState,
    at: usize,
    compiled: &CompiledRequest,
    controller: Option<Controller>,
) -> Option<(u64, Demand)> {
    let room = node.rooms(HoldRule::Respected).get(at)?;
    let most_on = |device: &DeviceState| {
        let out_of_reach = node.out_of_reach(&device.device().id, controller);
        device.capacity().checked_sub(out_of_reach)
    };
    if let Some(device) = node.devices().get(at) {
        // Instances of gpupack end with their pods, and others are made then.
        let is_made = device.spot().is_some();
        return most_on(device)
            .filter(|_| !is_made)
            .and_then(|most| lacking_on((device, most), room, compiled));
    }
    let spot = node.spots().get(at - node.devices().len())?;
    let lacks = node.covered_part(spot, controller)?;
    let whole = Demand { memory: spot.makeable.device.capacity(), share: Share::WHOLE };
    let demand = fit(compiled, &Room { free: whole, is_covered: false, ..*room }).ok()?;
    Some((lacks, demand))
}

/// What a device lacks of which a pod can have so much at most, in millionths of it, and what is taken of it.
fn lacking_on(
    (device, most): (&DeviceState, Demand),
    room: &Room,
    compiled: &CompiledRequest,
) -> Option<(u64, Demand)> {
    let capacity = device.capacity();
    let alone =
        NeighborIsolation { has_unisolated: false, requires_isolation: false, ..room.neighbors };
    let demand = fit(compiled, &Room { free: most, neighbors: alone, ..*room }).ok()?;
    if fit(compiled, &Room { free: most, ..*room }).is_err() {
        return Some((Share::WHOLE.millionths(), demand)); // a neighbor must end, whatever it has
    }
    let lacks_share = demand.share.checked_sub(room.free.share).map_or(0, |it| it.millionths());
    let lacks_memory = demand.memory.checked_sub(room.free.memory).map_or(0, |it| it.mib());
    let whole = u128::from(capacity.memory.mib().max(1));
    let of_memory = (u128::from(lacks_memory) * 1_000_000).div_ceil(whole);
    Some((lacks_share.max(u64::try_from(of_memory).unwrap_or(u64::MAX)), demand))
}

#[cfg(test)]
mod tests;
