//! Moves of pods from one MIG instance to another of their node so that a waiting pod fits.
//!
//! The simulation of the design has two thirds of what free repacking would gain with one such move per blocked
//! request. A pod is moved by a restart of its container, so its new instance must be there before its old one goes:
//! both are held meanwhile.

use std::collections::BTreeMap;

use crate::hardware::device::{DeviceId, NodeName, PodUid};
use crate::hardware::spots::Spot;
use crate::hardware::units::HostAmount;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::displacement::{Clearing, clearings};
use crate::ledger::suggest::moves::{Board, guest};
use crate::ledger::suggest::requeue::is_candidate;
use crate::ledger::suggest::waiting::{WaitingPod, WaitingState};
use crate::model::device_state::{DeviceState, HoldRule, Origin};
use crate::model::event::LedgerEvent;
use crate::model::fit::HostRule;
use crate::model::node_state::NodeState;
use crate::model::request::Movable;
use crate::model::reservation::{
    Departure, Guest, OtherPod, Placement, PodRef, Reservation, ReservationState,
};
use crate::mutation::{Mutation, mutated};
use crate::scoring::plan;

/// Ways that are tried for one waiting pod: the cheapest ones.
const TRIES: usize = 50;

/// A pod that is to be restarted on another MIG instance, which is not made yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MakingWay {
    /// The pod.
    pub pod: PodRef,
    /// Its node.
    pub node: NodeName,
    /// The instance that it is allocated, where it runs.
    pub home: DeviceId,
    /// Where the other one is to be made.
    pub spot: Spot,
    /// The pod that waits for the room.
    pub waits: PodRef,
}

impl MakingWay {
    /// Whether this is where the pod is to run.
    pub(crate) fn is_to(&self, guest: &Guest) -> bool {
        guest.spot.as_ref() == Some(&self.spot)
    }
}

impl Ledger {
    /// The pod whose move to another MIG instance of its node lets a waiting pod fit, which fits nowhere now: of
    /// those that `may` be moved the one with the smallest instance. Only in pools that allow it.
    ///
    /// Complexity: nodes times instances, for each of the cheapest ways one placement of both pods.
    pub fn making_way(
        &self,
        state: &WaitingState,
        may: impl Fn(&Reservation) -> bool,
    ) -> Option<MakingWay> {
        let WaitingState { waiting, named, .. } = state;
        let node_table = self.node_table();
        let mut ways: Vec<(Clearing, usize)> = Vec::new();
        {
            let cluster = self.cluster();
            let compiled = waiting.query.compile(&cluster.classes);
            for (at, node_entry) in node_table.iter().enumerate() {
                let node_state = node_entry.read();
                let is_open = node_state.rule().mig_moves
                    && is_candidate(at, node_entry, named.as_deref())
                    && node_state.placeable_for(&compiled).is_ok();
                if !is_open {
                    continue;
                }
                let changes = |uid: &PodUid| {
                    let held = node_state.reservation(uid);
                    held.is_some_and(|held| may_change(&node_state, held) && may(held))
                };
                let without = without_holds(&node_state, &waiting.pod.uid);
                let found = clearings(without.as_ref().unwrap_or(&node_state), &compiled, 1);
                let found = found.into_iter();
                let found =
                    found.filter(|way| !way.pods.is_empty() && way.pods.iter().all(changes));
                ways.extend(found.map(|way| (way, at)));
            }
        }
        if ways.is_empty() || self.fits_on_named(state) {
            return None;
        }
        ways.sort();
        ways.truncate(TRIES);
        ways.into_iter().find_map(|(way, at)| {
            let board = Board::new(self, &node_table);
            let (held, spot) = other_spot(board, at, waiting, way.pods.first()?)?;
            let home = held.placement.devices.first()?.id.clone();
            let (node, waits) = (node_table[at].name.clone(), waiting.pod.clone());
            Some(MakingWay { pod: held.pod, node, home, spot, waits })
        })
    }

    /// Whether a waiting pod fits on a node where it may go.
    pub(crate) fn fits_on_named(&self, WaitingState { waiting, named, .. }: &WaitingState) -> bool {
        let cluster = self.cluster();
        let compiled = waiting.query.compile(&cluster.classes);
        let node_table = self.node_table();
        node_table.iter().enumerate().any(|(at, node_entry)| {
            is_candidate(at, node_entry, named.as_deref())
                && plan::fits(&node_entry.read(), &compiled, HoldRule::Respected)
        })
    }

    /// Promises a pod the other instance, if it still may be moved and that can still be made. Whether it is: the
    /// pod has both from now on.
    pub fn promise_other(&self, chosen: &MakingWay) -> bool {
        let (uid, Some(on)) = (&chosen.pod.uid, chosen.spot.id()) else { return false };
        let mut is_promised = false;
        self.change_guest(uid, |node_state| {
            let held = node_state.reservation(uid);
            let is_same = held.is_some_and(|held| {
                may_change(node_state, held) && held.placement.devices[0].id == chosen.home
            });
            is_promised = is_same && node_state.open_spots().any(|open| *open == on);
            if is_promised {
                node_state.move_out(uid, on, chosen.spot.clone());
            }
        });
        is_promised
    }

    /// What has become of the instance to which a pod moves.
    pub fn other_instance(&self, chosen: &MakingWay) -> Option<OtherInstance> {
        let held = self.reservation(&chosen.pod.uid)?;
        let guest = held.placement.guest.as_ref().filter(|guest| guest.leaving.is_none())?;
        if !chosen.is_to(guest) || held.state != ReservationState::Confirmed {
            return None;
        }
        let at = self.position(chosen.node.as_str())?;
        self.node_entry(at).look(|_, node_state| {
            let it = node_state.devices().iter().find(|it| it.device().id == guest.on)?;
            Some(match (it.origin() == Origin::Promised, held.departure) {
                (true, _) if node_state.has_failed(&guest.on) => OtherInstance::Failed,
                (true, _) => OtherInstance::Promised,
                (false, Departure::Arrives { clean_lists: Some(_) })
                    if mutated(Mutation::InstanceLeftEarly) =>
                {
                    OtherInstance::Taken
                }
                (false, Departure::Arrives { .. }) => OtherInstance::Made,
                (false, Departure::Stays) => OtherInstance::Taken,
                (false, _) => return None,
            })
        })
    }

    /// Notes that the container of such a pod has ended at home.
    pub fn moved_out(&self, uid: &PodUid) {
        self.change_guest(uid, |node_state| node_state.moved_out(uid));
    }

    /// Notes that such a pod stays at home, unless it has become another guest since: the move is not written on it,
    /// or not any more.
    pub fn stay_home(&self, chosen: &MakingWay) -> Vec<LedgerEvent> {
        let uid = &chosen.pod.uid;
        self.change_guest(uid, |node_state| {
            let held = node_state.reservation(uid);
            let guest = held.and_then(|held| held.placement.guest.as_ref());
            let is_it = guest.is_some_and(|guest| chosen.is_to(guest) && guest.leaving.is_none());
            let is_under_way = held.is_some_and(|held| held.is_arriving() || held.is_going_home());
            if is_it && is_under_way {
                node_state.start_at_home(uid);
            }
        })
    }

    /// How many pods of each namespace may be moved.
    pub fn movable_pods(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        self.look_at_each(|node_state| {
            for held in node_state.reservations().values().filter(|held| held.may_borrow()) {
                *counts.entry(held.pod.namespace().to_owned()).or_default() += 1;
            }
        });
        counts
    }

    /// Whether the container of a pod has ended at home since it was to be a guest.
    pub fn has_moved_out(&self, uid: &PodUid) -> bool {
        let arrives = |held: Reservation| match held.departure {
            Departure::Arrives { clean_lists } => clean_lists.is_some(),
            _ => false,
        };
        self.reservation(uid).is_some_and(arrives)
    }

    /// Allocates a pod that has arrived the other instance alone, as soon as that is written.
    pub fn settle_other(&self, chosen: &MakingWay) {
        let is_taken = self.other_instance(chosen) == Some(OtherInstance::Taken);
        if is_taken {
            self.change_guest(&chosen.pod.uid, |node_state| {
                node_state.settle_guest(&chosen.pod.uid)
            });
        }
    }

    /// Calls home the pods that were to be moved to other instances, where no task of this process does that any
    /// more: what is written on them does not say whether they have started there.
    pub fn call_back(&self, is_moved: impl Fn(&PodUid) -> bool) {
        if mutated(Mutation::StrayMoveStays) {
            return;
        }
        for node_entry in self.node_table().iter() {
            let strays: Vec<PodUid> = {
                let node_state = node_entry.read();
                let held = node_state.reservations().values().filter(|held| is_stray(held));
                held.map(|held| held.pod.uid.clone()).filter(|uid| !is_moved(uid)).collect()
            };
            for uid in strays {
                self.change_guest(&uid, |node_state| {
                    if node_state.reservation(&uid).is_some_and(is_stray) {
                        node_state.recall(std::slice::from_ref(&uid));
                    }
                });
            }
        }
    }
}

/// What has become of an instance to which a pod moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherInstance {
    /// The agent is to make it.
    Promised,
    /// The agent could not make it.
    Failed,
    /// It is there.
    Made,
    /// The pod runs there, and nothing of it is left on the one before.
    Taken,
}

/// Whether a pod that is bound was to be moved to another instance.
fn is_stray(held: &Reservation) -> bool {
    let guest = held.placement.guest.as_ref();
    guest.is_some_and(|guest| guest.spot.is_some())
        && held.state == ReservationState::Confirmed
        && matches!(held.departure, Departure::Stays | Departure::Arrives { .. })
}

/// Whether a pod may be restarted on another instance: it has one that gpupack made, and allows it.
fn may_change(node: &NodeState, held: &Reservation) -> bool {
    let Placement { devices, guest, spots, .. } = &held.placement;
    let ([placed], [Some(_)]) = (&devices[..], &spots[..]) else { return false };
    let is_its = |it: &DeviceState| {
        it.device().id == placed.id && it.origin() == Origin::Made && it.is_placeable()
    };
    guest.is_none()
        && held.state == ReservationState::Confirmed
        && held.request.as_ref().is_some_and(|request| request.movable == Movable::Restart)
        && held.tenure.is_some_and(|tenure| !tenure.is_ending)
        && node.devices().iter().any(is_its)
}

/// The node without what is kept there for the pod that waits: that is for itself.
fn without_holds(node: &NodeState, uid: &PodUid) -> Option<NodeState> {
    let has_any = node.standing_holds().contains_key(uid) || node.holds().contains_key(uid);
    has_any.then(|| {
        let mut without = node.clone();
        without.release(uid);
        without.stand_down(uid);
        without
    })
}

/// Where an instance like that of a pod can be made now, beside all that are there, so that `query` fits once the
/// pod has left its own one.
fn other_spot(
    mut board: Board<'_>,
    at: usize,
    WaitingPod { pod, query, .. }: &WaitingPod,
    uid: &PodUid,
) -> Option<(Reservation, Spot)> {
    let without = without_holds(board.node_state(at), &pod.uid);
    if let Some(without) = without {
        *board.node_state(at) = without;
    }
    let held = board.node_state(at).reservation(uid)?.clone();
    let request = held.request.as_deref()?.clone();
    let tenure = held.tenure?;
    // Its CPU and memory stay in use.
    let other = OtherPod { name: held.pod.name.clone(), host: held.host, tenure };
    board.node_state(at).allocate_host(uid.clone(), other);
    let placement = board.place_on(at, query)?;
    board.allocate(at, guest(placement, query));
    board.allocate(at, held.clone());
    let own = PlacementRequest {
        gpu: Some(request),
        host: HostAmount::ZERO,
        host_rule: HostRule::Trusted,
        strategy: query.strategy.clone(),
    };
    let Placement { spots, .. } = board.place_on(at, &own)?;
    let ([Some(spot)], [Some(before)]) = (&spots[..], &held.placement.spots[..]) else {
        return None;
    };
    (spot.profile == before.profile).then(|| (held, spot.clone()))
}

#[cfg(test)]
mod tests;
