//! Room that is kept for the first pod of a line: for whom, and that there is some.

use std::collections::{BTreeMap, BTreeSet};

use engine::ledger::query::reading::Readiness;
use engine::ledger::suggest::waiting::WaitingState;
use engine::model::device_state::{DeviceState, Origin};
use engine::model::node_state::{NodeReporting, SpotDevice};
use wire::device::{DeviceKind, Health};
use wire::ids::PodUid;

use super::replica::{Replica, api_seconds};
use super::{GPU_MIB, World};

/// Without a fault, the first pod of a line gets room within this time. It is looked for each second,
/// and one that made way for another pod pauses for 5 s.
const KEPT_WITHIN: u64 = 8_000;

/// For how long room that is kept may be free in all: from 60 s without a bind on, nothing is kept for that owner for
/// a while. Here that is the namespace, since nothing made the pods.
const MOST_IDLE: u64 = 50_000;

/// How often that is added up.
const ADDED_EVERY: u64 = 250;

/// How far the time at the API server may be off as a process knows it, in seconds: answers have whole ones.
const OFF_BY: u64 = 1;

impl World {
    /// Seconds after which room is kept for the first pod of a line; zero: never.
    pub(super) fn standing_after(&self) -> u64 {
        match self.settings.seed % 3 {
            0 => 0,
            1 => 2,
            _ => 10,
        }
    }

    /// Room is kept for one pod of a pool at most (all nodes are of one pool), and only where it runs
    /// no risk: the pod waits as far as this process knows. If none is kept, no pod is first in line
    /// that never had any.
    pub(super) fn check_standing(&mut self) -> Result<(), String> {
        let (now, after) = (self.now, self.standing_after());
        // What is guaranteed to a team goes before the first of a line.
        // Nor is room kept where pods hang, or older ones of the same controller run.
        let is_calm = !self.settings.has_teams
            && !self.settings.has_slow_ends
            && now > self.disturbed_until
            && self.nodes.iter().all(|node| node.gpus.iter().all(|gpu| gpu.mib == GPU_MIB));
        let open = self.nodes.iter().filter(|node| !node.is_cordoned);
        let open: BTreeSet<&str> = open.map(|node| &*node.name).collect();
        let waiting = self.api.pods.iter().filter(|(_, pod)| pod.node.is_none());
        let waiting: BTreeSet<PodUid> = waiting.map(|(uid, _)| PodUid::new(uid.as_str())).collect();
        for replica in self.replicas.iter_mut().flatten().chain(&mut self.overlapping) {
            check_kept(replica, &waiting)?;
            if !self.settings.preempts && !self.settings.has_teams {
                check_age(replica, (now, after))?;
            }
            replica
                .stood
                .extend(replica.app.ledger.standing_nodes().keys().map(ToString::to_string));
            add_idle(replica, now);
            let is_calm = is_calm && replica.idle.0 < MOST_IDLE;
            let first =
                if is_calm && after > 0 { unkept(replica, (now, after), &open) } else { None };
            let since = replica.unkept.take().filter(|(uid, _)| first.as_ref() == Some(uid));
            replica.unkept = since.or_else(|| first.map(|uid| (uid, now)));
            if let Some((uid, since)) = &replica.unkept
                && now > since + KEPT_WITHIN
            {
                return Err(format!("no room is kept for {uid}, first in line since {since} ms"));
            }
        }
        Ok(())
    }
}

/// Adds up for how long room that is kept is free.
fn add_idle(replica: &mut Replica, now: u64) {
    let (sum, last) = replica.idle;
    if now < last + ADDED_EVERY {
        return;
    }
    let ledger = &replica.app.ledger;
    let is_free = |uid: &PodUid| {
        let state = replica.app.waiting.pod(uid);
        state.is_some_and(|it| ledger.fits_in_room_of(uid, &it.waiting.query, None).is_some())
    };
    let is_idle = ledger.standing_nodes().keys().any(is_free);
    replica.idle = (sum + if is_idle { now - last } else { 0 }, now);
}

fn check_kept(replica: &Replica, waiting: &BTreeSet<PodUid>) -> Result<(), String> {
    let ledger = &replica.app.ledger;
    let standing = ledger.standing_nodes();
    // The room of a pod that is bound or gone ends with the next look, a second later. A late watch may
    // show meanwhile that it waits.
    let app = &replica.app;
    let waits = |uid: &PodUid| app.waiting.has(uid) && waiting.contains(uid);
    let is_alone = |uid: &PodUid| app.waiting.pod(uid).is_some_and(|it| it.waiting.group.is_none());
    let is_first = |uid: &&PodUid| !app.room.preemptors.has(uid) && waits(uid) && is_alone(uid);
    if standing.keys().filter(is_first).count() > 1 {
        let (life, leads) = (replica.life, app.lead.leading.is_here());
        return Err(format!(
            "process {life}, which leads: {leads}, keeps room for several pods: {standing:?}"
        ));
    }
    let mut on_nodes = BTreeMap::new();
    ledger.look_at_each(|node| {
        let kept = node.standing_holds().keys();
        on_nodes.extend(kept.map(|uid| (uid.clone(), node.name().clone())));
    });
    if on_nodes != standing {
        return Err(format!("room is kept on {on_nodes:?}, and noted for {standing:?}"));
    }
    match standing.keys().find(|uid| ledger.reservation(uid).is_some()) {
        Some(uid) => Err(format!("room is kept for {uid}, which has some")),
        None => Ok(()),
    }
}

/// Room is kept only for a pod that has waited for so long at the API server, whatever the clock of the machine says.
fn check_age(replica: &Replica, (now, after): (u64, u64)) -> Result<(), String> {
    let standing = replica.app.ledger.standing_nodes();
    let is_new = |uid: &&PodUid| !replica.stood.contains(uid.as_str());
    for uid in standing.keys().filter(is_new) {
        let Some(state) = replica.app.waiting.pod(uid) else { continue };
        let created = u64::try_from(state.waiting.created_unix_seconds).unwrap_or(0);
        let age = (api_seconds(now) + OFF_BY).saturating_sub(created);
        if state.waiting.group.is_none() && age < after {
            return Err(format!("room is kept for {uid}, which was created {age} s ago at most"));
        }
    }
    Ok(())
}

/// The pod that is first in line, if no room is kept for any pod, and this one never had some. No room
/// is kept where the last call for the pod did not name the node, or where no pod may go.
fn unkept(replica: &Replica, (now, after): (u64, u64), open: &BTreeSet<&str>) -> Option<String> {
    let (app, ledger) = (&replica.app, &replica.app.ledger);
    let is_ready =
        !replica.is_frozen && app.lead.leading.is_here() && app.readiness() == Readiness::Ready;
    if !is_ready || !ledger.standing_nodes().is_empty() {
        return None;
    }
    let mut are_well = true;
    ledger.look_at_each(|node| {
        let is_parent = |device: &DeviceState| device.device().kind == DeviceKind::MigParent;
        let is_well = |device: &DeviceState| {
            let can_be_made = device.health() == Health::Healthy && !node.spots().is_empty();
            !device.is_unread() && (device.is_placeable() || is_parent(device) && can_be_made)
        };
        // Where others have an instance, or one could not be made, none is made.
        let is_others =
            |device: &DeviceState| device.slot().is_some() && device.origin() == Origin::Found;
        let has_failed = |spot: &SpotDevice| node.has_failed(&spot.makeable.device.id);
        are_well &= node.state() == NodeReporting::Reporting
            && node.devices().iter().all(|device| is_well(device) && !is_others(device))
            && !node.spots().iter().any(has_failed);
    });
    let created_by = api_seconds(now).saturating_sub(after);
    let firsts = app.waiting.firsts(|state: &WaitingState| {
        let pod = &state.waiting;
        let is_single = pod.query.gpu.as_ref().is_some_and(|gpu| gpu.count.get() == 1);
        let is_old = u64::try_from(pod.created_unix_seconds).is_ok_and(|at| at <= created_by);
        let waits_for_room = || state.closest().is_some_and(|(why, _)| why.is_met_by_room());
        is_single && is_old && pod.group.is_none() && waits_for_room()
    });
    let may_go = |state: &&WaitingState| {
        let named = replica.named.get(state.waiting.pod.uid.as_str());
        open.iter().any(|node| named.is_none_or(|named| named.contains(*node)))
    };
    let first = firsts.iter().find(may_go).filter(|_| are_well)?;
    let uid = first.waiting.pod.uid.as_str().to_owned();
    (!replica.stood.contains(&uid)).then_some(uid)
}
