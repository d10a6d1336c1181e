//! What each team has of the GPUs, counted by what its pods request.
//!
//! A pod counts from the bind until its devices are free, and while room is kept for it: what its request
//! counts against quotas, and at least the part of the GPUs that it gets. What is checked against a limit
//! and what is counted is one step under one lock, so that no two binds of a team get past its limit
//! together.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::model::charge::{Prices, of_instance};
use crate::model::device_state::DeviceState;
use crate::model::node_state::NodeState;
use crate::model::request::GpuRequest;
use crate::model::reservation::{Placement, Reservation, Tenure};
use crate::model::team::{TeamRules, TeamShare};
use crate::scoring::victims::{Importance, less_important};
use wire::device::{Device, DeviceKind, ModelFilter};
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};
use wire::units::{Demand, Share};

/// The name of a team: a namespace; or a value of a label, or `namespace/NAME` for a namespace that has
/// none. No value of a label has a slash.
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
    known: Mutex<KnownTeams>,
}

#[derive(Default)]
struct KnownTeams {
    /// Whether a label names the teams.
    is_labeled: bool,
    pods: BTreeMap<PodUid, CountedPod>,
    /// What the pods of each namespace count.
    used: BTreeMap<Arc<str>, u64>,
    /// The same of each team.
    by_team: BTreeMap<TeamName, u64>,
    /// The value of the label of each namespace that was seen; `None` if it has none.
    labels: BTreeMap<Arc<str>, Option<TeamName>>,
}

/// The order in which the pods of a team fill what is guaranteed to it: the most important first, then the
/// oldest. `None` is the last: of a pod that is not bound yet, or that is leaving.
type FillOrder = Option<(Reverse<i32>, i64)>;

/// A pod that counts.
#[derive(Clone)]
struct CountedPod {
    namespace: Arc<str>,
    charge: u64,
    order: FillOrder,
    /// Whether only room is kept for it.
    is_kept: bool,
}

impl Teams {
    /// Sets what teams may have. It cannot be changed.
    pub fn rule(&self, rules: TeamRules, prices: Prices) {
        self.known.lock().is_labeled = !rules.label.is_empty();
        drop(self.rules.set((rules, prices)));
    }

    /// What teams may have; `None` if nothing is said of them.
    pub fn rules(&self) -> Option<&TeamRules> {
        self.rules.get().map(|(rules, _)| rules)
    }

    /// What a pod with this request counts, before it has a place.
    pub fn charge(&self, request: &GpuRequest) -> Share {
        let charge = self.rules.get().map_or(0, |(_, prices)| prices.charge(request).equivalents);
        Share::from_millionths(charge)
    }

    /// What a pod counts that is placed on this node.
    pub(crate) fn placed_charge(
        &self,
        node: &NodeState,
        placement: &Placement,
        request: Option<&GpuRequest>,
    ) -> Share {
        let Some((_, prices)) = self.rules.get() else { return Share::ZERO };
        let parts = placement.devices.iter().map(|placed| {
            let known = node.position_of(&placed.id).and_then(|at| node.offered(at));
            match known {
                Some((device, _)) => {
                    let weight = prices.weight_of(&device.model).millionths();
                    let share = u128::from(share_of_gpu(node, device, placed.demand));
                    u64::try_from(share * u128::from(weight) / 1_000_000).unwrap_or(u64::MAX)
                }
                // An agent that has not reported yet says nothing of it.
                None if request.is_some() => 0,
                None => placed.demand.share.millionths(),
            }
        });
        let placed = Share::from_millionths(parts.sum());
        request.map_or(Share::ZERO, |request| self.charge(request)).max(placed)
    }

    /// The team of a namespace.
    pub fn team_of(&self, namespace: &str) -> TeamName {
        self.known.lock().team_of(namespace)
    }

    /// Notes the value of the label of a namespace that is there; `None` if it has none.
    pub fn see_namespace(&self, namespace: &str, team: Option<&str>) {
        self.known.lock().label(namespace, |labels| {
            labels.insert(namespace.into(), team.map(Arc::from));
        });
    }

    /// Notes that a namespace is gone.
    pub fn lose_namespace(&self, namespace: &str) {
        self.known.lock().label(namespace, |labels| {
            labels.remove(namespace);
        });
    }

    /// Whether a team may have what this pod requests. What the pod itself counts already is left out.
    pub fn may_have(&self, uid: &PodUid, namespace: &str, request: &GpuRequest) -> bool {
        self.fits_limit(uid, namespace, self.charge(request))
    }

    /// The same wherever the pod is placed: none counts more than whole GPUs.
    pub fn may_have_anywhere(&self, uid: &PodUid, namespace: &str, request: &GpuRequest) -> bool {
        let whole = Share::WHOLE.millionths() * u64::from(request.count.get());
        let most = self.charge(request).max(Share::from_millionths(whole));
        self.fits_limit(uid, namespace, most)
    }

    /// Whether a team stays within what is guaranteed to it with what this pod requests.
    pub fn is_guaranteed(&self, uid: &PodUid, namespace: &str, request: &GpuRequest) -> bool {
        self.guarantees(uid, namespace, self.charge(request))
    }

    /// Whether a team may have as much.
    pub fn fits_limit(&self, uid: &PodUid, namespace: &str, charge: Share) -> bool {
        let Some((rules, _)) = self.rules.get() else { return true };
        self.known.lock().fits(rules, uid, namespace, charge.millionths(), |share| share.at_most)
    }

    /// Whether a team stays within what is guaranteed to it with as much.
    pub fn guarantees(&self, uid: &PodUid, namespace: &str, charge: Share) -> bool {
        let Some((rules, _)) = self.rules.get() else { return false };
        let known = self.known.lock();
        known.fits(rules, uid, namespace, charge.millionths(), |share| Some(share.guaranteed))
    }

    /// What the team of a namespace may have more than it has, in millionths of a GPU; `None`: no limit.
    pub fn left(&self, namespace: &str) -> Option<u64> {
        let (rules, _) = self.rules.get()?;
        let known = self.known.lock();
        let team = known.team_of(namespace);
        let at_most = rules.of(&team).at_most?;
        Some(at_most.millionths().saturating_sub(known.used_by(&team)))
    }

    /// Counts a pod that is about to be bound, if its team may have as much. Returns whether it may.
    pub(crate) fn admit(&self, uid: &PodUid, namespace: &str, charge: Share) -> bool {
        self.count_if(uid, namespace, charge, false)
    }

    /// Counts the room that is kept for a pod, if its team may have as much. Returns whether it may.
    pub fn admit_kept(&self, uid: &PodUid, namespace: &str, charge: Share) -> bool {
        self.count_if(uid, namespace, charge, true)
    }

    fn count_if(&self, uid: &PodUid, namespace: &str, charge: Share, is_kept: bool) -> bool {
        let Some((rules, _)) = self.rules.get() else { return true };
        let charge = charge.millionths();
        let mut known = self.known.lock();
        let fits = known.fits(rules, uid, namespace, charge, |share| share.at_most)
            || mutated(Mutation::TeamLimitUnchecked);
        if fits {
            let namespace = namespace.into();
            known.count(uid, CountedPod { namespace, charge, order: None, is_kept });
        }
        fits
    }

    /// Counts a pod as its reservation on this node says; without one it does not count.
    pub(crate) fn see(&self, uid: &PodUid, node: &NodeState) {
        if self.rules.get().is_none() {
            return;
        }
        let Some(held) = node.reservation(uid) else { return self.forget(uid) };
        let charge = self.placed_charge(node, &held.placement, held.request.as_deref());
        let counted = CountedPod {
            namespace: held.pod.namespace().into(),
            charge: charge.millionths(),
            order: order(held),
            is_kept: false,
        };
        self.known.lock().count(uid, counted);
    }

    /// Counts the pods of a node again: what part of a GPU they have may be known only now.
    pub(crate) fn see_all(&self, node: &NodeState) {
        node.reservations().keys().for_each(|uid| self.see(uid, node));
    }

    /// Counts a pod no more: it is not placed, or its devices are free.
    pub(crate) fn forget(&self, uid: &PodUid) {
        if self.rules.get().is_some() {
            self.known.lock().forget(uid);
        }
    }

    /// Notes that no room is kept for a pod any more.
    pub fn let_go(&self, uid: &PodUid) {
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
        OverQuota::of(rules, &self.by_team())
    }

    /// What each team has that is named, or has pods or one of these namespaces, by name.
    pub fn all(&self, also: impl Iterator<Item = Arc<str>>) -> Vec<TeamUse> {
        let Some((rules, _)) = self.rules.get() else { return Vec::new() };
        let mut teams = self.by_team();
        let over = OverQuota::of(rules, &teams);
        let mut namespaces: BTreeMap<TeamName, BTreeSet<Arc<str>>> = BTreeMap::new();
        let named = rules.teams.keys().map(|team| Arc::from(team.as_str()));
        {
            let known = self.known.lock();
            let labeled = known.labels.iter().filter(|(_, team)| team.is_some());
            let labeled = labeled.map(|(namespace, _)| Arc::clone(namespace));
            for namespace in known.used.keys().cloned().chain(labeled).chain(also) {
                let team = known.team_of(&namespace);
                namespaces.entry(team).or_default().insert(namespace);
            }
        }
        for team in named.clone().filter(|_| rules.label.is_empty()) {
            namespaces.entry(Arc::clone(&team)).or_default().insert(team);
        }
        for team in named.chain(namespaces.keys().cloned()) {
            teams.entry(team).or_default();
        }
        let teams = teams.into_iter().map(|(name, pods)| {
            let of_over = pods.iter().filter(|pod| over.pods.contains(&pod.uid));
            let over_quota = of_over.map(|pod| pod.counted.charge).sum();
            TeamUse {
                share: rules.of(&name),
                used: Share::from_millionths(pods.iter().map(|pod| pod.counted.charge).sum()),
                over_quota: Share::from_millionths(over_quota),
                pods: pods.len(),
                namespaces: namespaces.get(&name).cloned().unwrap_or_default(),
                name,
            }
        });
        teams.collect()
    }

    /// The pods of each team, in their order. Others may count meanwhile: it is sorted without the lock.
    fn by_team(&self) -> BTreeMap<TeamName, Vec<TeamMember>> {
        let mut teams: BTreeMap<TeamName, Vec<TeamMember>> = BTreeMap::new();
        {
            let known = self.known.lock();
            for (uid, counted) in &known.pods {
                let team = known.team_of(&counted.namespace);
                let is_seen = known.is_seen(&counted.namespace);
                let member = TeamMember { uid: uid.clone(), counted: counted.clone(), is_seen };
                teams.entry(team).or_default().push(member);
            }
        }
        teams.values_mut().for_each(|pods| pods.sort_by(|a, b| a.order().cmp(&b.order())));
        teams
    }

    /// The pods that count.
    pub(crate) fn counted(&self) -> Vec<PodUid> {
        self.known.lock().pods.keys().cloned().collect()
    }

    /// Whether a pod counts.
    pub(crate) fn counts(&self, uid: &PodUid) -> bool {
        self.known.lock().pods.contains_key(uid)
    }

    /// How many pods are counted.
    pub fn count(&self) -> usize {
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
    /// Finds them among the pods of each team, which are in their order.
    fn of(rules: &TeamRules, teams: &BTreeMap<TeamName, Vec<TeamMember>>) -> Self {
        let mut found = Self { is_on: true, ..Self::default() };
        for (team, pods) in teams {
            let mut left = rules.of(team).guaranteed.millionths();
            for pod in pods {
                match left.checked_sub(pod.counted.charge) {
                    Some(rest) => left = rest,
                    None if pod.is_seen => _ = found.pods.insert(pod.uid.clone()),
                    None => {}
                }
                found.teams.insert(pod.uid.clone(), Arc::clone(team));
            }
        }
        found
    }

    /// How important a pod is as a victim for another one; `None` if it is not to be evicted for it.
    ///
    /// Within a team priority alone decides. Of other teams only over-quota pods are victims, whatever
    /// their priority, and only for a pod that is guaranteed. Pods that have no GPU count for no team.
    pub fn victim(
        &self,
        preemptor: &TeamPod,
        uid: &PodUid,
        tenure: Tenure,
        has_gpu: bool,
    ) -> Option<Importance> {
        let by_priority = less_important(preemptor.priority)(uid, tenure, has_gpu);
        let is_guaranteed = !self.pods.contains(uid);
        let importance = Importance { is_guaranteed, priority: tenure.priority };
        match self.teams.get(uid) {
            None if self.is_on && has_gpu => None, // it came after this was found
            None => by_priority,
            Some(team) if *team == preemptor.team => by_priority.map(|_| importance),
            Some(_) => {
                let is_owed = preemptor.is_guaranteed && !is_guaranteed;
                (is_owed || mutated(Mutation::GuaranteeIgnored)).then_some(importance)
            }
        }
    }

    /// Whether a pod goes only because it is over the quota of its team, which is not this one.
    pub fn is_owed_by(&self, uid: &PodUid, preemptor: &TeamPod) -> bool {
        self.teams.get(uid).is_some_and(|team| *team != preemptor.team)
    }
}

/// A pod among those of its team.
struct TeamMember {
    uid: PodUid,
    counted: CountedPod,
    /// Whether its namespace was seen.
    is_seen: bool,
}

impl TeamMember {
    /// What comes first is less.
    fn order(&self) -> (bool, FillOrder, &PodUid) {
        (self.counted.order.is_none(), self.counted.order, &self.uid)
    }
}

fn order(held: &Reservation) -> FillOrder {
    let tenure = held.tenure.filter(|_| !held.is_ending());
    tenure.map(|tenure| (Reverse(tenure.priority), tenure.started_unix_seconds))
}

impl KnownTeams {
    fn team_of(&self, namespace: &str) -> TeamName {
        if !self.is_labeled {
            return namespace.into();
        }
        let label = self.labels.get(namespace).and_then(Option::as_ref);
        label.map_or_else(|| format!("namespace/{namespace}").into(), Arc::clone)
    }

    /// Whether the team of a namespace is known.
    fn is_seen(&self, namespace: &str) -> bool {
        !self.is_labeled || self.labels.contains_key(namespace)
    }

    /// Changes the label of a namespace, and takes what its pods count along.
    fn label(
        &mut self,
        namespace: &str,
        change: impl FnOnce(&mut BTreeMap<Arc<str>, Option<TeamName>>),
    ) {
        let used = self.used.get(namespace).copied().unwrap_or(0);
        self.take_off(namespace, used);
        change(&mut self.labels);
        self.add(namespace, used);
    }

    fn add(&mut self, namespace: &str, charge: u64) {
        if charge > 0 {
            *self.by_team.entry(self.team_of(namespace)).or_default() += charge;
        }
    }

    fn take_off(&mut self, namespace: &str, charge: u64) {
        let team = self.team_of(namespace);
        if let Some(used) = self.by_team.get_mut(&team) {
            *used = used.saturating_sub(charge);
            if *used == 0 {
                self.by_team.remove(&team);
            }
        }
    }

    /// Whether a pod fits into a limit of its team; not while the team is unknown.
    fn fits(
        &self,
        rules: &TeamRules,
        uid: &PodUid,
        namespace: &str,
        charge: u64,
        limit: impl FnOnce(TeamShare) -> Option<Share>,
    ) -> bool {
        if !self.is_seen(namespace) {
            return false;
        }
        let team = self.team_of(namespace);
        let Some(limit) = limit(rules.of(&team)) else { return true };
        let own = self.pods.get(uid).filter(|counted| self.team_of(&counted.namespace) == team);
        let others = self.used_by(&team).saturating_sub(own.map_or(0, |counted| counted.charge));
        others.saturating_add(charge) <= limit.millionths()
    }

    /// What a team has.
    fn used_by(&self, team: &TeamName) -> u64 {
        self.by_team.get(team).copied().unwrap_or(0)
    }

    fn count(&mut self, uid: &PodUid, counted: CountedPod) {
        self.forget(uid);
        self.add(&counted.namespace, counted.charge);
        *self.used.entry(Arc::clone(&counted.namespace)).or_default() += counted.charge;
        self.pods.insert(uid.clone(), counted);
    }

    fn forget(&mut self, uid: &PodUid) {
        let Some(CountedPod { namespace, charge, .. }) = self.pods.remove(uid) else { return };
        self.take_off(&namespace, charge);
        if let Some(used) = self.used.get_mut(&namespace) {
            *used = used.saturating_sub(charge);
            if *used == 0 {
                self.used.remove(&namespace);
            }
        }
    }
}

/// Which part of a GPU a demand takes on a device, in millionths: the larger of its share and its memory.
fn share_of_gpu(node: &NodeState, device: &Device, demand: Demand) -> u64 {
    let share = u128::from(demand.share.millionths());
    // The memory of a share is rounded up to whole MiB. That does not count.
    let at_least = millionths_of(device, demand.memory.mib().saturating_sub(1));
    let of_memory = if at_least < share { 0 } else { millionths_of(device, demand.memory.mib()) };
    let share = share.max(of_memory).min(1_000_000) * u128::from(part_of_gpu(node, device));
    u64::try_from(share.div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

fn millionths_of(device: &Device, mib: u64) -> u128 {
    u128::from(mib) * 1_000_000 / u128::from(device.capacity().mib().max(1))
}

/// Which part of a GPU a device is, in millionths. A MIG instance is a device of its own, and its part that of its
/// profile, by the tables or by the list of NVML, what is more.
fn part_of_gpu(node: &NodeState, device: &Device) -> u64 {
    let DeviceKind::MigInstance { parent, profile } = &device.kind else { return 1_000_000 };
    let model = ModelFilter::new([device.model.as_str()]);
    let counted = of_instance(profile, &model).map_or(1_000_000, |charge| charge.share);
    let gpu = node.devices().iter().map(DeviceState::device).find(|gpu| gpu.id == *parent);
    let geometry = gpu.and_then(|gpu| node.mig().geometry_of(gpu));
    let slices =
        geometry.and_then(|geometry| Some(geometry.part_of(geometry.profile(profile)?).slices));
    counted.max(slices.map_or(0, Share::millionths))
}

#[cfg(test)]
mod tests;
