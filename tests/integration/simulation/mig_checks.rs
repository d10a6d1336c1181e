//! What is checked about GPUs in MIG mode: what pods have, where they start, and what is left at the end.

use std::collections::{BTreeMap, BTreeSet};

use agent::mig::plan::GpuInstance;
use engine::model::reservation::ReservationState;
use hyper::Request;
use runtime::step::outside::CallId;
use serde_json::Value;
use wire::device::Slot;
use wire::ids::PodUid;
use wire::report::bodies::DeviceReport;

use super::World;
use super::api::{PLACEMENT, Pod};
use super::checks::is_later;
use super::mig::{MigNode, PROFILES, devices_of, row};

/// Without faults an instance that no pod has is gone after this time, and a pod runs on its own.
const SETTLED_WITHIN: u64 = 20_000;

impl World {
    /// What a process writes on a pod names instances that are there, if a report has said so, and that
    /// no other pod has.
    pub(super) fn check_mig_write(&mut self, call: (u64, CallId), request: &Request<Vec<u8>>) {
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let Some(text) = body["metadata"]["annotations"][PLACEMENT].as_str() else { return };
        let placement: Value = serde_json::from_str(text).unwrap_or_default();
        let uid = body["metadata"]["uid"].as_str().unwrap_or_default();
        let target = body["target"]["name"].as_str().map(str::to_owned);
        let node = target.or_else(|| self.api.pods.get(uid)?.node.clone());
        let at = self.nodes.iter().position(|it| Some(&it.name) == node.as_ref());
        let (Some(at), Some(replica)) = (at, self.process(call.0)) else { return };
        let Some(mig) = &self.nodes[at].mig else { return };
        let known = replica.eras.get(&at).copied();
        let mut broken = None;
        let is_known = |(id, _): &(String, Value)| known == Some(mig.era) && mig.is_of_gpus(id);
        if let Some(pod) = self.api.pods.get(uid).filter(|pod| pod.changes_instances()) {
            let uses = |id: &String| {
                let process = self.processes.get(uid);
                process.is_some_and(|it| it.occupies(self.now).any(|(used, _)| used == id))
            };
            if !placement["home"].is_array() && placement["moved"].is_null() {
                self.lent.moved_instances += 1;
            }
            let named = |id: &String| placement.to_string().contains(&**id);
            let mut all = pod.written().into_iter().chain(pod.allocated()).map(|(id, ..)| id);
            if let Some(id) = all.find(|id| uses(id) && !named(id)) {
                broken = Some(format!("{uid} has {id} no more, and runs there"));
            }
        }
        if placement["home"].is_array() {
            let begins = self.api.pods.get(uid).is_some_and(|pod| !pod.changes_instances());
            let (now, since) = (self.now, &mut self.lent.changes_since);
            _ = if begins { since.insert(uid.to_owned(), now) } else { None };
        }
        for (id, _) in devices_of(&placement).into_iter().filter(is_known) {
            if !mig.has(&id) {
                broken = Some(format!("{uid} gets {id}, which is not there"));
            }
            let has = |(other, pod): &(&String, &Pod)| {
                let is_there = pod.is_placed() && pod.written().iter().any(|(it, ..)| *it == id);
                *other != uid && is_there
            };
            if let Some((other, _)) = self.api.pods.iter().find(has) {
                broken = Some(format!("{uid} gets {id}, which {other} has"));
            }
        }
        self.mig_writes.insert(call, (known.unwrap_or_default(), broken));
    }

    /// Notes on a pod what the process knew that wrote its placement.
    pub(super) fn note_era(&mut self, call: (u64, CallId), uid: &str, request: &Request<Vec<u8>>) {
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let placement = body["metadata"]["annotations"][PLACEMENT].as_str();
        let (Some(placement), Some((era, broken))) = (placement, self.mig_writes.remove(&call))
        else {
            return;
        };
        // What a process sent that has ended since may name an instance that its successor has removed. The
        // container does not start, as after a boot, until the UUID of the next one is written.
        let is_late = self.process(call.0).is_none();
        let value: Value = serde_json::from_str(placement).unwrap_or_default();
        let is_gone = |mig: &MigNode| {
            let devices = devices_of(&value);
            devices.iter().any(|(id, _)| mig.is_of_gpus(id) && !mig.has(id))
        };
        let node = self.api.pods.get(uid).and_then(|pod| pod.node.as_ref());
        let node = self.nodes.iter().find(|it| Some(&it.name) == node);
        let is_stale = is_late && node.and_then(|it| it.mig.as_ref()).is_some_and(is_gone);
        let era = if is_stale { u64::MAX } else { era };
        let pod = self.api.pods.get_mut(uid);
        let is_written = |pod: &&mut Pod| {
            pod.node.is_some() && pod.annotations.get(PLACEMENT).is_some_and(|it| it == placement)
        };
        // One that is refused, as that of a process that was replaced, does no harm.
        if let Some(pod) = pod.filter(is_written) {
            pod.era = era;
            broken.into_iter().for_each(|broken| self.broke(broken));
        }
    }

    /// Whether an agent made this instance, though it may have lost its list since, or it is gone.
    pub(super) fn is_made(&self, uuid: &str) -> bool {
        let mut all = self.nodes.iter().filter_map(|node| node.mig.as_ref());
        self.settings.has_mig && !all.any(|mig| mig.foreign.contains(uuid))
    }

    /// No two pods have the same units of a GPU.
    pub(super) fn check_units(&self) -> Result<(), String> {
        let mut taken: BTreeMap<String, (u32, String)> = BTreeMap::new();
        for (uid, pod) in self.api.pods.iter().filter(|(_, pod)| pod.is_placed()) {
            for (gpu, profile, start) in pod.places() {
                let size = PROFILES.iter().find(|it| it.0 == profile).map_or(0, |it| it.2);
                let units = Slot { start, size }.units();
                let (all, by) = taken.entry(gpu.clone()).or_default();
                if *all & units != 0 {
                    return Err(format!("{uid} and {by} have the same units of {gpu}"));
                }
                (*all, *by) = (*all | units, uid.clone());
            }
        }
        Ok(())
    }

    /// Whether the container of a pod can start: its instances are there.
    pub(super) fn starts_on_instances(&mut self, uid: &str) -> bool {
        let Some(pod) = self.api.pods.get(uid) else { return false };
        let node = self.nodes.iter().find(|it| Some(&it.name) == pod.node.as_ref());
        let Some((mig, node)) = node.and_then(|node| Some((node.mig.as_ref()?, node))) else {
            return true;
        };
        if self.now < mig.down_until {
            return false;
        }
        let mut broken = None;
        for (id, place) in devices_of(&pod.placement()) {
            let found = mig.instances().find(|(uuid, ..)| *uuid == id);
            let Some((_, gpu, instance)) = found else {
                if pod.era == mig.era && mig.is_of_gpus(&id) {
                    broken = Some(format!("{uid} starts on {id}, which is not on {}", node.name));
                }
                if broken.is_none() {
                    return false; // until the new UUID is written
                }
                continue;
            };
            let is_it = place["gpu"] == gpu.uuid
                && place["profile"] == row(instance).0
                && place["start"] == instance.slot.start;
            if !is_it && place.is_object() {
                broken = Some(format!("{uid} starts on {id}, which is not {place}"));
            }
            let mut others = self.processes.iter().filter(|(other, _)| *other != uid);
            if let Some((other, _)) = others.find(|(_, process)| process.uses(&id)) {
                broken = Some(format!("{uid} starts on {id}, which {other} uses"));
            }
        }
        let is_broken = broken.is_some();
        broken.into_iter().for_each(|broken| self.broke(broken));
        !is_broken
    }

    /// Notes which instances no pod has.
    pub(super) fn note_idle(&mut self) {
        let now = self.now;
        let leader = self.replicas[self.serving()].as_ref();
        let mut used: BTreeSet<String> = BTreeSet::new();
        if let Some(replica) = leader {
            replica.app.ledger.look_at_each(|node| {
                let held = node.reservations().values();
                let held = held.filter(|it| !matches!(it.state, ReservationState::Draining { .. }));
                for held in held {
                    used.extend(held.placement.devices.iter().map(|it| it.id.to_string()));
                    // Of one whose GPU is gone a pod never leaves the other one.
                    used.extend(held.placement.guest.iter().map(|guest| guest.on.to_string()));
                }
            });
        }
        let placed = self.api.pods.values().filter(|pod| pod.is_placed());
        used.extend(placed.flat_map(Pod::written).map(|(id, ..)| id));
        let running = self.processes.values().flat_map(|it| it.occupies(now));
        used.extend(running.map(|(id, _)| id.clone()));
        for mig in self.nodes.iter_mut().filter_map(|node| node.mig.as_mut()) {
            let inventory = mig.devices().0;
            let made = inventory.iter();
            let goes = |it: &DeviceReport| mig.has_made(it) || mig.adopted.contains(&it.uuid);
            let made = made.filter(|it| !used.contains(&it.uuid) && goes(it));
            let since = |uuid: &String| mig.idle.get(uuid).copied().unwrap_or(now);
            mig.idle = made.map(|it| (it.uuid.clone(), since(&it.uuid))).collect();
        }
    }

    /// Whether no instance is made for a pod any more: others made it, its GPU is gone, or an administrator has
    /// taken its place.
    pub(super) fn is_lost(&self, pod: &Pod) -> bool {
        let has = |gpu: &str| self.nodes.iter().any(|node| node.gpu_ids().any(|it| it == gpu));
        let places = pod.places();
        self.settings.has_mig
            && (places.len() < pod.written().len()
                || !places.iter().all(|(gpu, ..)| has(gpu))
                || self.has_foreign(&places))
    }

    /// Whether others made an instance on one of the GPUs of these places, or part of one is left of which the
    /// agent has lost its list.
    fn has_foreign(&self, places: &[(String, String, u32)]) -> bool {
        let all = self.nodes.iter().filter_map(|node| node.mig.as_ref());
        let mut gpus = all.flat_map(|mig| mig.gpus.iter().map(move |gpu| (mig, gpu)));
        gpus.any(|(mig, gpu)| {
            let is_of_others = |it: &GpuInstance| match &it.devices[..] {
                [] => !mig.on_demand.made().unfinished().iter().any(|known| known.is(gpu, it)),
                devices => devices.iter().any(|uuid| mig.foreign.contains(uuid)),
            };
            places.iter().any(|(on, ..)| *on == gpu.uuid) && gpu.instances.iter().any(is_of_others)
        })
    }

    /// At the end each pod runs, and no instance is left that no pod has.
    pub(super) fn check_mig_end(&self) -> Result<(), String> {
        let is_old = |since: u64| since + SETTLED_WITHIN < self.now;
        let is_late = |(uid, pod): &(&String, &Pod)| {
            let leader = self.replicas[self.serving()].as_ref();
            let is_left = self.is_lost(pod) || leader.is_some_and(|it| is_later(it, pod));
            let runs = self.processes.contains_key(*uid) || pod.is_deleting || is_left;
            pod.is_placed() && !runs && is_old(pod.bound)
        };
        if let Some((uid, pod)) = self.api.pods.iter().find(is_late) {
            let held = self.replicas[self.serving()].as_ref();
            let held = held.and_then(|it| it.app.ledger.reservation(&PodUid::new(uid.as_str())));
            return Err(format!("{uid} never starts on {:?}: {held:?}", pod.written()));
        }
        let is_half_done = |(_, pod): &(&String, &Pod)| {
            let is_left = || {
                let leader = self.replicas[self.serving()].as_ref();
                self.is_lost(pod) || leader.is_some_and(|it| is_later(it, pod))
            };
            pod.is_placed() && !pod.is_deleting && pod.changes_instances() && !is_left()
        };
        let is_half_done = |(uid, pod): &(&String, &Pod)| {
            let since = self.lent.changes_since.get(*uid);
            is_half_done(&(uid, pod)) && since.is_none_or(|since| is_old(*since))
        };
        if let Some((uid, pod)) = self.api.pods.iter().find(is_half_done) {
            return Err(format!("the move of {uid} never ends: {}", pod.placement()));
        }
        for node in &self.nodes {
            let idle = node.mig.iter().flat_map(|mig| &mig.idle);
            let mut old = idle.filter(|(_, since)| is_old(**since));
            if let Some((uuid, since)) = old.next() {
                return Err(format!("since {since} ms no pod has {uuid} on {}", node.name));
            }
        }
        Ok(())
    }
}
