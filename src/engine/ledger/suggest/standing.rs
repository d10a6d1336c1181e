//! Standing holds: room that is kept for the first pod of a line until it is bound.
//!
//! kube-scheduler tries a pod only when something changes, and small pods take all that becomes free. So a pod
//! that needs much room at once could wait forever. A standing hold keeps the devices that lack
//! least of its request, as they become free; everything else is left to others.

use std::collections::{BTreeMap, BTreeSet};

use crate::hardware::spots::Makeable;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::nodes::teams::TeamPod;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::query::team_limit::PodInNamespace;
use crate::ledger::suggest::requeue::{Arrival, NamedNodes, is_candidate};
use crate::ledger::suggest::waiting::WaitingPod;
use crate::model::device_state::{DeviceState, HoldRule, KeptFor, StandingHold};
use crate::model::event::LedgerEvent;
use crate::model::fit::CompiledRequest;
use crate::model::node_state::{NodeReporting, NodeState, SpotDevice};
use crate::model::reservation::{Controller, PodRef};
use crate::scoring::lacking::{lacking, lacks_there};
use crate::scoring::plan;
use wire::ids::{DeviceId, MigProfile, NodeName, PodUid, PoolName};
use wire::units::{HostAmount, Share};

/// A standing hold now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The node with the room.
    pub node: NodeName,
    /// Its pool.
    pub pool: PoolName,
    /// What is not free of the room yet, in millionths of a device.
    pub lacks: u64,
}

/// A pod for which room is kept until it is bound.
#[derive(Clone, Copy, Debug)]
pub struct Holder<'a> {
    /// The pod.
    pub uid: &'a PodUid,
    /// Its namespace.
    pub namespace: &'a str,
    /// What it requests.
    pub query: &'a PlacementRequest,
    /// What made it: its older pods do not end for it.
    pub controller: Option<Controller>,
    /// Why room is kept.
    pub kept_for: KeptFor,
}

impl<'a> Holder<'a> {
    /// The first pod of a line.
    pub fn first(uid: &'a PodUid, namespace: &'a str, query: &'a PlacementRequest) -> Self {
        Self { uid, namespace, query, controller: None, kept_for: KeptFor::Line }
    }

    /// A pod that waits.
    pub fn of(pod: &'a WaitingPod, kept_for: KeptFor) -> Self {
        let WaitingPod { pod: PodRef { uid, .. }, namespace, query, controller, .. } = pod;
        Self { uid, namespace, query, controller: *controller, kept_for }
    }

    /// The controller whose older pods it does not wait for: others that are evicted, or leave, make its room
    /// where it does not wait as the first of a line.
    fn waits_for(&self) -> Option<Controller> {
        self.controller.filter(|_| self.kept_for == KeptFor::Line)
    }

    /// What a node lacks for it, and the room to keep there.
    fn lacking(&self, node: &NodeState, compiled: &CompiledRequest) -> Option<(u64, StandingHold)> {
        let (lacks, hold) = lacking(node, compiled, self.waits_for())?;
        Some((lacks, StandingHold { kept_for: self.kept_for, ..hold }))
    }
}

/// The best node so far.
struct Best {
    lacks: u64,
    at: usize,
    hold: StandingHold,
}

/// How many instances that serve a request could be made on the GPUs of a node if these were empty, all of
/// one profile. Those of one profile never overlap.
fn most_instances(node_state: &NodeState, compiled: &CompiledRequest) -> usize {
    let mut counts: BTreeMap<&DeviceId, BTreeMap<&MigProfile, usize>> = BTreeMap::new();
    let serves = |spot: &&SpotDevice| compiled.demand_on(spot.class).is_ok();
    for SpotDevice { makeable: Makeable { spot, .. }, .. } in
        node_state.spots().iter().filter(serves)
    {
        let count = counts.entry(&spot.gpu).or_default().entry(&spot.profile).or_default();
        *count = if spot.profile.has_media() { 1 } else { *count + 1 };
    }
    counts.values().filter_map(|of_gpu| of_gpu.values().max()).sum()
}

impl Ledger {
    /// The standing hold of a pod with this request.
    pub fn standing(&self, uid: &PodUid, query: &PlacementRequest) -> Option<Standing> {
        let at = self.standing.lock().get(uid).copied()?;
        let node_state = self.without_own(at, uid)?;
        let compiled = query.compile(&self.cluster().classes); // later: it knows all classes of the copy
        let held = self.node_entry(at).read().standing_holds().get(uid).cloned()?;
        Some(Standing {
            node: node_state.name().clone(),
            pool: node_state.pool().clone(),
            lacks: lacks_there(&node_state, &compiled, &held)?,
        })
    }

    /// The pods with a standing hold, and the node of each.
    pub fn standing_nodes(&self) -> BTreeMap<PodUid, NodeName> {
        let standing = self.standing.lock().clone();
        let node_of = |(uid, at): (PodUid, usize)| (uid, self.node_entry(at).name.clone());
        standing.into_iter().map(node_of).collect()
    }

    /// Counts the room that is kept for a pod for its team. `false` if the team may not have as much, or if
    /// the pod does not wait any more: then no room is to be kept.
    pub fn count_kept(&self, pod: &WaitingPod) -> bool {
        self.count_kept_of((&pod.pod.uid, &pod.namespace), &pod.query)
    }

    /// The same of a pod of a namespace with a request.
    pub fn count_kept_of(
        &self,
        (uid, namespace): (&PodUid, &str),
        query: &PlacementRequest,
    ) -> bool {
        // A pod that ends meanwhile, or loses its room, would count for ever.
        self.while_unallocated(uid, |_| {
            let Some(at) = self.standing.lock().get(uid).copied() else { return false };
            let node_entry = self.node_entry(at);
            let charge = {
                let node_state = node_entry.read();
                let Some(hold) = node_state.standing_holds().get(uid) else { return false };
                self.teams.placed_charge(&node_state, &hold.placement, query.gpu.as_ref())
            };
            self.teams.admit_kept(uid, namespace, charge)
        })
    }

    /// Whether the team of a waiting pod may have what it requests.
    pub fn team_may_have(&self, pod: &WaitingPod) -> bool {
        let may_have = |gpu| self.teams.may_have(&pod.pod.uid, &pod.namespace, gpu);
        pod.query.gpu.as_ref().is_none_or(may_have)
    }

    /// A waiting pod as one for which others may be evicted.
    pub fn team_pod(&self, pod: &WaitingPod) -> TeamPod {
        let of = |gpu| self.teams.is_guaranteed(&pod.pod.uid, &pod.namespace, gpu);
        let is_guaranteed = pod.query.gpu.as_ref().is_some_and(of);
        TeamPod { team: self.teams.team_of(&pod.namespace), priority: pod.priority, is_guaranteed }
    }

    /// What sets the line of a waiting pod apart where teams have shares: its namespace, and whether it is
    /// guaranteed. `None` if nothing is said of teams.
    pub fn team_line(&self, pod: &WaitingPod) -> Option<(String, bool)> {
        self.teams.rules()?;
        Some((pod.namespace.clone(), self.team_pod(pod).is_guaranteed))
    }

    /// Whether a pod has a standing hold.
    pub fn has_standing(&self, uid: &PodUid) -> bool {
        self.standing.lock().contains_key(uid)
    }

    /// Why room is kept for a pod, if some is.
    pub fn kept_for(&self, uid: &PodUid) -> Option<KeptFor> {
        let at = self.standing.lock().get(uid).copied()?;
        let node_entry = self.node_entry(at);
        node_entry.read().standing_holds().get(uid).map(|hold| hold.kept_for)
    }

    /// Whether kube-scheduler may choose this node, as far as its Node object says.
    pub fn takes_pods(&self, node: &NodeName) -> bool {
        self.position(node.as_str()).is_some_and(|at| {
            let node_entry = self.node_entry(at);
            let is_there = node_entry.read().state() != NodeReporting::Gone;
            is_there && node_entry.takes_pods()
        })
    }

    /// Whether a pod with these host amounts would take what standing holds keep of a node's host.
    pub fn takes_kept_host(&self, node: &str, host: HostAmount) -> bool {
        let at = self.position(node);
        at.is_some_and(|at| self.node_entry(at).read().takes_kept_host(host))
    }

    /// The node of the standing hold of a pod with this request, if it fits there now and may go there: beside what is
    /// kept for others, or in its own room.
    pub fn fits_in_room_of(
        &self,
        holder: &PodUid,
        query: &PlacementRequest,
        named: Option<&NamedNodes>,
    ) -> Option<NodeName> {
        let at = self.standing.lock().get(holder).copied()?;
        let hold = self.node_entry(at).read().standing_holds().get(holder).cloned()?;
        let mut node_state = self.without_own(at, holder)?;
        let beside = self.fits_on_copy((at, &node_state), query, named);
        if beside.is_some() || !node_state.spots().is_empty() {
            return beside;
        }
        // Rooms may count on the same CPU that others leave. The first of them gets it.
        let rooms = node_state.standing_holds().iter();
        let later = rooms.filter(|(uid, it)| (it.kept_for, *uid) > (hold.kept_for, holder));
        let later: Vec<PodUid> = later.map(|(uid, _)| uid.clone()).collect();
        later.iter().for_each(|uid| _ = node_state.stand_down(uid));
        let compiled = query.compile(&self.cluster().classes);
        let may_go = is_candidate(at, &self.node_entry(at), named);
        let is_free =
            plan::fits_there(&node_state, &compiled, &hold.placement, HoldRule::Respected);
        (may_go && is_free).then(|| node_state.name().clone())
    }

    /// The same of another pod, if it fits there without that hold.
    pub fn fits_in_place_of(
        &self,
        holder: &PodUid,
        query: &PlacementRequest,
        named: Option<&NamedNodes>,
    ) -> Option<NodeName> {
        let at = self.standing.lock().get(holder).copied()?;
        self.fits_on_copy((at, &self.without_own(at, holder)?), query, named)
    }

    fn fits_on_copy(
        &self,
        (at, node_state): (usize, &NodeState),
        query: &PlacementRequest,
        named: Option<&NamedNodes>,
    ) -> Option<NodeName> {
        let compiled = query.compile(&self.cluster().classes);
        let may_go = is_candidate(at, &self.node_entry(at), named);
        let fits = may_go && plan::fits(node_state, &compiled, HoldRule::Respected);
        fits.then(|| node_state.name().clone())
    }

    /// The pools of all nodes.
    pub fn pools(&self) -> BTreeSet<PoolName> {
        let mut pools = BTreeSet::new();
        self.look_at_each(|node_state| {
            if !pools.contains(node_state.pool()) {
                pools.insert(node_state.pool().clone());
            }
        });
        pools
    }

    /// How many devices of each pool could serve a request if they were empty.
    pub fn pool_sizes(&self, query: &PlacementRequest) -> BTreeMap<PoolName, u64> {
        let classes = self.cluster().classes.clone();
        let compiled = query.compile(&classes);
        let mut sizes = BTreeMap::new();
        self.look_at_each(|node_state| {
            if node_state.placeable_for(&compiled).is_err()
                || !node_state.is_of_classes(classes.count())
            {
                return;
            }
            let serves = |device: &&DeviceState| {
                let is_there = device.is_placeable() && device.spot().is_none();
                is_there && compiled.demand_on(device.class()).is_ok()
            };
            let count = node_state.devices().iter().filter(serves).count();
            let count = count + most_instances(node_state, &compiled);
            *sizes.entry(node_state.pool().clone()).or_default() +=
                u64::try_from(count).unwrap_or(u64::MAX);
        });
        sizes
    }

    /// The most that a request takes of devices that could serve it, in millionths of one.
    pub fn most_of(&self, query: &PlacementRequest) -> u64 {
        let Some(gpu) = &query.gpu else { return 0 };
        let mut most = None;
        self.cluster().classes.map(|class| {
            let Ok(demand) = gpu.demand_on(class) else { return };
            let memory = Share::ratio(demand.memory, class.capacity).unwrap_or(Share::WHOLE);
            most = most.max(Some(demand.share.max(memory)));
        });
        let most = most.unwrap_or(Share::WHOLE).min(Share::WHOLE);
        u64::from(gpu.count.get()).saturating_mul(most.millionths())
    }

    /// Ends all standing holds.
    pub fn stand_down_all(&self) -> Vec<LedgerEvent> {
        let all = self.standing.lock().clone();
        all.keys().flat_map(|uid| self.stand_down(uid)).collect()
    }

    /// How many standing holds there are.
    pub fn standing_count(&self) -> usize {
        self.standing.lock().len()
    }

    /// Whether there is such a node.
    pub fn knows(&self, node: &str) -> bool {
        self.position(node).is_some()
    }

    /// The node, as calls name it.
    pub fn arrival(&self, node: &str) -> Option<Arrival> {
        let at = self.position(node)?;
        Some(Arrival::of(at, &self.node_entry(at)))
    }

    /// Keeps room for a pod where it lacks least, among the nodes that its last call named and whose
    /// pool `is_open`, and where its team may have what it would count. Its standing hold moves only to
    /// where it lacks strictly less. Looks at all nodes, and locks one at a time. `None`, and no hold, if it
    /// would fit on no node.
    pub fn stand(
        &self,
        holder: Holder<'_>,
        named: Option<&NamedNodes>,
        is_open: impl Fn(&PoolName) -> bool,
    ) -> (Option<Standing>, Vec<LedgerEvent>) {
        let _stays = self.stay();
        let Holder { uid, namespace, query, .. } = holder;
        let (node_table, classes) = (self.node_table(), self.cluster().classes.clone());
        let compiled = query.compile(&classes);
        let current = self.standing.lock().get(uid).copied();
        let mut best: Option<Best> = None;
        for (at, node_entry) in node_table.iter().enumerate() {
            if !is_candidate(at, node_entry, named) {
                continue;
            }
            let found = match current == Some(at) {
                true => self
                    .without_own(at, uid)
                    .filter(|node| node.is_of_classes(classes.count()))
                    .and_then(|node| holder.lacking(&node, &compiled)),
                false => {
                    let node = node_entry.read();
                    let may = node.is_of_classes(classes.count()) && is_open(node.pool());
                    may.then(|| holder.lacking(&node, &compiled)).flatten()
                }
            };
            let Some((lacks, hold)) = found else { continue };
            let node_state = node_entry.read();
            let pod = PodInNamespace { uid, namespace };
            if !self.may_have_placed(pod, query, &node_state, &hold.placement) {
                continue;
            }
            let order = |at: usize| node_table.order(at);
            if best.as_ref().is_none_or(|best| (lacks, order(at)) < (best.lacks, order(best.at))) {
                best = Some(Best { lacks, at, hold });
            }
        }
        drop(node_table);
        let now = self.standing(uid, query);
        let stays = |now: &Standing| best.as_ref().is_some_and(|best| best.lacks >= now.lacks);
        let may_go = |at| is_candidate(at, &self.node_entry(at), named);
        if let Some(now) = now.filter(|now| stays(now) && current.is_some_and(may_go)) {
            return (Some(now), Vec::new());
        }
        let Some(Best { lacks, at, hold }) = best else { return (None, self.stand_down(uid)) };
        // On the same node one change replaces the other, so that only what grew in all is reported.
        let mut events = if current == Some(at) { Vec::new() } else { self.stand_down(uid) };
        let kept = self.keep_room(uid, at, hold, &mut events);
        if kept.is_none() {
            events.extend(self.stand_down(uid));
        }
        (kept.map(|(node, pool)| Standing { node, pool, lacks }), events)
    }

    /// Keeps room for a pod on this node, as an earlier process did. `None` if it would not fit there, or
    /// if its pool is not open.
    pub fn stand_again(
        &self,
        holder: Holder<'_>,
        node: &NodeName,
        is_open: impl Fn(&PoolName) -> bool,
    ) -> (Option<Standing>, Vec<LedgerEvent>) {
        let _stays = self.stay();
        let Holder { uid, query, .. } = holder;
        let mut events = Vec::new();
        let classes = self.cluster().classes.clone();
        let compiled = query.compile(&classes);
        let Some(at) = self.position(node.as_str()) else { return (None, events) };
        let node_state = self.node_entry(at).read().clone();
        let may = node_state.is_of_classes(classes.count()) && is_open(node_state.pool());
        let Some((lacks, hold)) = may.then(|| holder.lacking(&node_state, &compiled)).flatten()
        else {
            return (None, events);
        };
        let kept = self.keep_room(uid, at, hold, &mut events);
        (kept.map(|(node, pool)| Standing { node, pool, lacks }), events)
    }

    /// Keeps room on a node for a pod that is on none. Returns where, if it is kept.
    pub(crate) fn keep_room(
        &self,
        uid: &PodUid,
        at: usize,
        hold: StandingHold,
        events: &mut Vec<LedgerEvent>,
    ) -> Option<(NodeName, PoolName)> {
        let mut kept = None;
        self.while_unallocated(uid, |_| {
            self.standing.lock().insert(uid.clone(), at);
            events.extend(self.change_node(at, |node_state| {
                node_state.stand(uid.clone(), hold);
                kept = Some((node_state.name().clone(), node_state.pool().clone()));
            }));
        });
        kept
    }

    /// A copy of a node as if nothing were held there for the pod.
    fn without_own(&self, at: usize, uid: &PodUid) -> Option<NodeState> {
        let mut node_state = self.node_entry(at).read().clone();
        node_state.stand_down(uid)?;
        node_state.release(uid);
        Some(node_state)
    }
}
