//! What each team holds and uses over time, for chargeback: by namespace and priority class.
//!
//! The books are looked at every few seconds, and what is found counts for the time since the last look:
//! a pod that comes and goes in between does not count, one that is seen counts a little too much or too
//! little, and in the mean that is even.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dashmap::DashMap;

use super::app::App;
use crate::cluster::pod::SeenPod;
use crate::ledger::details::NodeDetails;
use crate::metrics::TeamUse;
use crate::packing::device::PodUid;
use crate::packing::node::{DeviceBooks, NodeLedger};
use crate::packing::units::{Share, Timestamp};

/// Longest time that one look counts for: what was held while the process stood still is not known.
const LONGEST: Duration = Duration::from_secs(60);

/// A namespace and a priority class; the latter empty where a pod has none.
type Team = (String, Arc<str>);

/// Priority classes of pods, and when the books were looked at last.
#[derive(Default)]
pub struct Teams {
    classes: DashMap<PodUid, Arc<str>>,
    last: Mutex<Option<Timestamp>>,
}

impl Teams {
    /// Notes the priority class of a pod that asks for a GPU.
    pub fn see(&self, pod: &SeenPod) {
        if pod.request != Ok(None) && !pod.priority_class.is_empty() {
            let class = || Arc::from(pod.priority_class.as_str());
            self.classes.entry(pod.pod.uid.clone()).or_insert_with(class);
        }
    }

    /// Forgets a pod that holds nothing.
    pub fn forget(&self, uid: &PodUid) {
        self.classes.remove(uid);
    }

    /// How many pods are noted.
    pub(super) fn count(&self) -> usize {
        self.classes.len()
    }

    fn class_of(&self, uid: &PodUid) -> Arc<str> {
        self.classes.get(uid).map_or_else(|| Arc::from(""), |class| Arc::clone(&class))
    }
}

/// Counts what is held and used for the time since the last look.
pub fn account(app: &App) {
    let now = app.clock.now();
    let last = app.teams.last.lock().unwrap_or_else(PoisonError::into_inner).replace(now);
    let Some(last) = last else { return };
    let millis = now.since(last).min(LONGEST).as_millis();
    let mut teams: BTreeMap<Team, TeamUse> = BTreeMap::new();
    let mut holders = BTreeSet::new();
    app.ledger.look_into_each(|node, details| {
        for books in node.devices().iter().filter(|books| !books.tenants().is_empty()) {
            count(app, (node, books, details), millis, &mut teams, &mut holders);
        }
    });
    app.teams.classes.retain(|uid, _| holders.contains(uid) || app.waiting.has(uid));
    for ((namespace, class), used) in teams {
        app.metrics.used(&namespace, &class, used);
    }
}

/// Counts the tenants of one device. Busy time cannot be told apart by tenant: each has the part of it
/// that it has of the booked share.
fn count(
    app: &App,
    (node, books, details): (&NodeLedger, &DeviceBooks, &NodeDetails),
    millis: u128,
    teams: &mut BTreeMap<Team, TeamUse>,
    holders: &mut BTreeSet<PodUid>,
) {
    let seen = details.sightings.on(&books.device().id);
    let all = u128::from(books.booked().share.millionths()).max(1);
    let busy = books
        .busy_percent()
        .map(|percent| u128::from(percent) * u128::from(Share::WHOLE.millionths()) / 100);
    for (uid, held) in books.tenants() {
        let namespace = node.reservation(uid).map_or("", |held| held.pod.namespace());
        let team = teams.entry((namespace.to_owned(), app.teams.class_of(uid))).or_default();
        let share = u128::from(held.share.millionths());
        team.share_booked += share * millis;
        team.share_used += busy.map_or(0, |busy| busy * share / all) * millis;
        team.memory_booked += u128::from(held.memory.mib()) * millis;
        let used = seen.and_then(|seen| seen.pods.get(uid)).map_or(0, |seen| seen.used.mib());
        team.memory_used += u128::from(used) * millis;
        if app.teams.classes.contains_key(uid) {
            holders.insert(uid.clone());
        }
    }
}
