//! What each team has of the GPUs, counted by what its pods request.
//!
//! A pod counts from the bind until its devices are free, and while room is kept for it. What is checked
//! against a limit and what is counted is one step under one lock, so that no two binds of a team get
//! past its limit together.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::hardware::device::PodUid;
use crate::hardware::units::Share;
use crate::model::charge::Prices;
use crate::model::request::GpuRequest;
use crate::model::reservation::{Reservation, Tenure};
use crate::model::team::{TeamRules, TeamShare};
use crate::mutation::{Mutation, mutated};
use crate::scoring::victims::{Importance, less_important};

/// The name of a team: a namespace, or a value of a label.
pub type TeamName = Arc<str>;

/// What one team has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TeamUse {
    /// The team.
    pub name: TeamName,
    /// What it may have.
    pub share: TeamShare,
    /// What its pods count, with kept room.
    pub used: Share,
    /// What its over-quota pods count.
    pub over_quota: Share,
    /// Its pods.
    pub pods: usize,
    /// Its namespaces, as far as they are known.
    pub namespaces: BTreeSet<Arc<str>>,
}

/// What all teams have.
#[derive(Default)]
pub struct Teams {
    rules: OnceLock<(TeamRules, Prices)>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    pods: BTreeMap<PodUid, Counted>,
    /// What the pods of each namespace count.
    used: BTreeMap<Arc<str>, u64>,
    /// The value of the label of each namespace that has it.
    labels: BTreeMap<Arc<str>, TeamName>,
}

/// A pod that counts.
struct Counted {
    namespace: Arc<str>,
    charge: u64,
    /// The order in which the pods of a team fill what is guaranteed to it: the most important first,
    /// then the oldest. Of a pod that is not bound yet it is unknown, and so it is the last.
    order: Option<(Reverse<i32>, i64)>,
    /// Whether only room is kept for it.
    is_kept: bool,
}

impl Teams {
    /// Sets what teams may have. It cannot be changed.
    pub fn rule(&self, rules: TeamRules, prices: Prices) {
        drop(self.rules.set((rules, prices)));
    }

    /// What teams may have; `None` if nothing is said of them.
    pub fn rules(&self) -> Option<&TeamRules> {
        self.rules.get().map(|(rules, _)| rules)
    }

    /// What a pod with this request counts.
    pub fn charge(&self, request: &GpuRequest) -> Share {
        let charge = self.rules.get().map_or(0, |(_, prices)| prices.charge(request).equivalents);
        Share::from_millionths(charge)
    }

    /// The team of a namespace.
    pub fn team_of(&self, namespace: &str) -> TeamName {
        self.known.lock().team_of(namespace, self.rules())
    }

    /// Notes the value of the label of a namespace; `None` if it has none, or is gone.
    pub fn see_label(&self, namespace: &str, team: Option<&str>) {
        let labels = &mut self.known.lock().labels;
        match team {
            Some(team) => _ = labels.insert(namespace.into(), team.into()),
            None => _ = labels.remove(namespace),
        }
    }

    /// Whether a team may have what this pod requests. What the pod itself counts already is left out.
    pub fn may_have(&self, uid: &PodUid, namespace: &str, request: &GpuRequest) -> bool {
        let Some((rules, _)) = self.rules.get() else { return true };
        let charge = self.charge(request).millionths();
        self.known.lock().fits(rules, (uid, namespace, charge), |share| share.at_most)
    }

    /// Whether a team stays within what is guaranteed to it with what this pod requests.
    pub fn is_guaranteed(&self, uid: &PodUid, namespace: &str, request: &GpuRequest) -> bool {
        let Some((rules, _)) = self.rules.get() else { return false };
        let charge = self.charge(request).millionths();
        self.known.lock().fits(rules, (uid, namespace, charge), |it| Some(it.guaranteed))
    }

    /// What the team of a namespace may have more than it has, in millionths of a GPU; `None`: no limit.
    pub fn left(&self, namespace: &str) -> Option<u64> {
        let (rules, _) = self.rules.get()?;
        let known = self.known.lock();
        let team = known.team_of(namespace, Some(rules));
        let at_most = rules.of(&team).at_most?;
        Some(at_most.millionths().saturating_sub(known.used_by(&team, namespace, rules)))
    }

    /// Counts a pod, for which room is kept or which is about to be bound, if its team may have it.
    /// Returns whether it may.
    pub fn admit(
        &self,
        uid: &PodUid,
        namespace: &str,
        request: &GpuRequest,
        is_kept: bool,
    ) -> bool {
        let Some((rules, _)) = self.rules.get() else { return true };
        let charge = self.charge(request).millionths();
        let mut known = self.known.lock();
        let fits = known.fits(rules, (uid, namespace, charge), |share| share.at_most);
        if fits || mutated(Mutation::TeamLimitUnchecked) {
            let namespace = namespace.into();
            known.count(uid, Counted { namespace, charge, order: None, is_kept });
        }
        fits || mutated(Mutation::TeamLimitUnchecked)
    }

    /// Counts a pod as its reservation says; without one it does not count.
    pub(crate) fn see(&self, uid: &PodUid, held: Option<&Reservation>) {
        if self.rules.get().is_none() {
            return;
        }
        let Some(held) = held else { return self.forget(uid) };
        let charge = match &held.request {
            Some(request) => self.charge(request).millionths(),
            None => held.placement.devices.iter().map(|it| it.demand.share.millionths()).sum(),
        };
        let order =
            held.tenure.map(|tenure| (Reverse(tenure.priority), tenure.started_unix_seconds));
        let namespace = held.pod.namespace().into();
        let counted = Counted { namespace, charge, order, is_kept: false };
        self.known.lock().count(uid, counted);
    }

    /// Counts a pod no more: it is not placed, or its devices are free.
    pub(crate) fn forget(&self, uid: &PodUid) {
        if self.rules.get().is_some() {
            self.known.lock().forget(uid);
        }
    }

    /// Notes that no room is kept for a pod any more.
    pub(crate) fn let_go(&self, uid: &PodUid) {
        if self.rules.get().is_some() {
            let mut known = self.known.lock();
            if known.pods.get(uid).is_some_and(|counted| counted.is_kept) {
                known.forget(uid);
            }
        }
    }

    /// The pods that do not fit into what is guaranteed to their teams, and the team of each pod.
    pub fn over_quota(&self) -> OverQuota {
        let Some((rules, _)) = self.rules.get() else { return OverQuota::default() };
        let known = self.known.lock();
        let mut found = OverQuota { is_on: true, ..OverQuota::default() };
        for (team, pods) in known.by_team(rules) {
            let mut left = rules.of(&team).guaranteed.millionths();
            for (_, uid, counted) in pods {
                let fits = left.checked_sub(counted.charge);
                left = fits.unwrap_or(0);
                if fits.is_none() {
                    found.pods.insert(uid.clone());
                }
                found.teams.insert(uid.clone(), Arc::clone(&team));
            }
        }
        found
    }

    /// What each team has that is named, or has pods or one of these namespaces, by name.
    pub fn all(&self, also: impl Iterator<Item = Arc<str>>) -> Vec<TeamUse> {
        let Some((rules, _)) = self.rules.get() else { return Vec::new() };
        let over = self.over_quota();
        let known = self.known.lock();
        let mut teams = known.by_team(rules);
        let mut namespaces: BTreeMap<TeamName, BTreeSet<Arc<str>>> = BTreeMap::new();
        let named = rules.teams.keys().map(|team| Arc::from(team.as_str()));
        let labeled = known.labels.keys().cloned();
        for namespace in known.used.keys().cloned().chain(labeled).chain(also) {
            let team = known.team_of(&namespace, Some(rules));
            namespaces.entry(team).or_default().insert(namespace);
        }
        for team in named.clone().filter(|_| rules.label.is_empty()) {
            namespaces.entry(Arc::clone(&team)).or_default().insert(team);
        }
        for team in named.chain(namespaces.keys().cloned()) {
            teams.entry(team).or_default();
        }
        let sum = |charges: &mut dyn Iterator<Item = u64>| Share::from_millionths(charges.sum());
        let team_use = |(name, pods): (TeamName, Vec<Place<'_>>)| TeamUse {
            share: rules.of(&name),
            used: sum(&mut pods.iter().map(|(.., counted)| counted.charge)),
            over_quota: sum(&mut pods
                .iter()
                .filter(|(_, uid, _)| over.pods.contains(*uid))
                .map(|(.., counted)| counted.charge)),
            pods: pods.len(),
            namespaces: namespaces.get(&name).cloned().unwrap_or_default(),
            name,
        };
        teams.into_iter().map(team_use).collect()
    }

    /// How many pods are counted.
    pub(crate) fn count(&self) -> usize {
        self.known.lock().pods.len()
    }
}

/// Which pods are over the quota of their team.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverQuota {
    /// Whether anything is said of teams.
    pub is_on: bool,
    /// These pods.
    pub pods: BTreeSet<PodUid>,
    /// The teams of all pods.
    pub teams: BTreeMap<PodUid, TeamName>,
}

/// A pod for which others may be evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TeamPod {
    /// Its team.
    pub team: TeamName,
    /// Its priority.
    pub priority: i32,
    /// Whether its team stays within what is guaranteed to it with this pod.
    pub is_guaranteed: bool,
}

impl OverQuota {
    /// How important a pod is as a victim for another one; `None` if it is not to be evicted for it.
    ///
    /// Within a team priority alone decides. Of other teams only over-quota pods are victims, whatever
    /// their priority, and only for a pod that is guaranteed. Pods that request no GPU count for no team.
    pub fn victim(&self, preemptor: &TeamPod, uid: &PodUid, tenure: Tenure) -> Option<Importance> {
        let by_priority = less_important(preemptor.priority)(uid, tenure);
        let is_guaranteed = !self.pods.contains(uid);
        let importance = Importance { is_guaranteed, priority: tenure.priority };
        match self.teams.get(uid) {
            None => by_priority,
            Some(team) if *team == preemptor.team => by_priority.map(|_| importance),
            Some(_) => {
                let is_owed = preemptor.is_guaranteed && !is_guaranteed;
                (is_owed || mutated(Mutation::GuaranteeIgnored)).then_some(importance)
            }
        }
    }
}

/// A pod among those of its team: its order, where an unknown one is the last.
type Place<'a> = ((bool, Option<(Reverse<i32>, i64)>), &'a PodUid, &'a Counted);

impl Known {
    fn team_of(&self, namespace: &str, rules: Option<&TeamRules>) -> TeamName {
        let is_labeled = rules.is_some_and(|rules| !rules.label.is_empty());
        let label = self.labels.get(namespace).filter(|_| is_labeled);
        label.map_or_else(|| namespace.into(), Arc::clone)
    }

    /// Whether a pod fits into a limit of its team.
    fn fits(
        &self,
        rules: &TeamRules,
        (uid, namespace, charge): (&PodUid, &str, u64),
        limit: impl FnOnce(TeamShare) -> Option<Share>,
    ) -> bool {
        let team = self.team_of(namespace, Some(rules));
        let Some(limit) = limit(rules.of(&team)) else { return true };
        let of_team = |namespace: &str| self.team_of(namespace, Some(rules)) == team;
        let used = self.used_by(&team, namespace, rules);
        let own = self.pods.get(uid).filter(|counted| of_team(&counted.namespace));
        let others = used.saturating_sub(own.map_or(0, |counted| counted.charge));
        others.saturating_add(charge) <= limit.millionths()
    }

    /// What the team of a namespace has.
    fn used_by(&self, team: &TeamName, namespace: &str, rules: &TeamRules) -> u64 {
        if rules.label.is_empty() {
            return self.used.get(namespace).copied().unwrap_or(0);
        }
        let is_its = |namespace: &str| self.team_of(namespace, Some(rules)) == *team;
        self.used.iter().filter(|(namespace, _)| is_its(namespace)).map(|(_, used)| used).sum()
    }

    fn count(&mut self, uid: &PodUid, counted: Counted) {
        self.forget(uid);
        *self.used.entry(Arc::clone(&counted.namespace)).or_default() += counted.charge;
        self.pods.insert(uid.clone(), counted);
    }

    fn forget(&mut self, uid: &PodUid) {
        let Some(Counted { namespace, charge, .. }) = self.pods.remove(uid) else { return };
        if let Some(used) = self.used.get_mut(&namespace) {
            *used = used.saturating_sub(charge);
            if *used == 0 {
                self.used.remove(&namespace);
            }
        }
    }

    /// The pods of each team, in their order.
    fn by_team(&self, rules: &TeamRules) -> BTreeMap<TeamName, Vec<Place<'_>>> {
        let mut teams: BTreeMap<TeamName, Vec<Place<'_>>> = BTreeMap::new();
        for (uid, counted) in &self.pods {
            let team = self.team_of(&counted.namespace, Some(rules));
            let order = (counted.order.is_none(), counted.order);
            teams.entry(team).or_default().push((order, uid, counted));
        }
        teams.values_mut().for_each(|pods| pods.sort_by_key(|(order, uid, _)| (*order, *uid)));
        teams
    }
}

#[cfg(test)]
mod tests;
