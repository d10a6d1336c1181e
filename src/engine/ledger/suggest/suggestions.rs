//! What would help a pod that fits on no node: the smallest changes after each of which it fits,
//! by the same fit function on the current state. Nothing is changed here.
//!
//! Each suggestion names a node where it helps, so that one look at that node shows if it still
//! does.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use crate::hardware::device_class::ClassKind;
use crate::hardware::spots::Spot;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::own_room::OwnRoom;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::displacement::{Clearing, MOST_MOVES, clearings};
use crate::ledger::suggest::search::{Change, Ends, Lever, Search, Suggestion};
use crate::model::device_state::HoldRule;
use crate::model::fit::{CompiledRequest, HostRule, Room, fit, fit_host};
use crate::model::node_state::NodeState;
use crate::model::request::{Amount, GpuRequest, Isolation};
use crate::model::reservation::{PodRef, ReservationState};
use crate::scoring::plan;
use wire::device::{Health, ModelFilter};
use wire::ids::{MigProfile, NodeName};
use wire::units::{MemMib, MilliCpu, Share};

/// Users write fractions with at most five decimals.
const FRACTION_STEP_MILLIONTHS: u64 = 10;

/// A suggestion leaves a pod at least a quarter of its CPU and host memory, and never zero: with
/// less it could hardly do its work.
const LEAST_HOST_PART: u64 = 4;

/// Sets of tenants whose end is suggested: the cheapest ones.
const MOST_WAYS: usize = 3;

impl Ledger {
    /// The suggestions for a pod that fits on no node, the cheapest first; empty if it already
    /// fits, or if no single change helps. The pod has `own` room. Looks at every node about ten times.
    pub fn suggestions(&self, query: &PlacementRequest, own: &OwnRoom) -> Vec<Suggestion> {
        let node_table = self.node_table();
        let search = Search::new(&node_table, own, &self.cluster());
        if search.first(query).is_some() {
            return Vec::new();
        }
        let mut found: Vec<Suggestion> = search.waiting(query).into_iter().collect();
        found.extend(search.requesting(query));
        found.extend(search.ending(query));
        found.extend(search.unusable_gpus(query));
        found
    }

    /// Whether a suggestion still helps: a look at one node.
    pub fn still_helps(
        &self,
        query: &PlacementRequest,
        own: &OwnRoom,
        suggestion: &Suggestion,
    ) -> bool {
        let node_table = self.node_table();
        let at = self.position(suggestion.node.as_str());
        let node_entry = at.and_then(|at| node_table.get(at..=at)).unwrap_or_default();
        let search = Search::new(node_entry, own, &self.cluster());
        let compiled = query.compile(&search.classes);
        let Some((_, node_state)) = search.nodes().next() else { return false };
        if plan::fits(&node_state, &compiled, HoldRule::Respected) {
            return false; // not needed any more
        }
        match &suggestion.change {
            Change::HeldElsewhere | Change::KeptForFirst => {
                plan::fits(&node_state, &compiled, HoldRule::Ignored)
            }
            Change::Request(_, changed) => {
                plan::fits(&node_state, &changed.compile(&search.classes), HoldRule::Respected)
            }
            Change::Ending(pods) | Change::End(Ends { pods, .. }) => {
                let gone = pods.iter().map(|pod| &pod.uid);
                plan::fits_without(&node_state, &compiled, gone)
            }
            Change::Kubelet(_) => would_serve(&node_state, &compiled, Health::KubeletOwned) > 0,
            Change::Heal(_) => would_serve(&node_state, &compiled, Health::Unhealthy) > 0,
        }
    }

    /// The classes of devices that could take a request if they were empty, by position. Pods whose
    /// classes overlap wait for the same room.
    pub fn suited(&self, request: &GpuRequest) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut at = 0;
        let _ = self.cluster().classes.map(|class| {
            if request.demand_on(class).is_ok() {
                found.insert(at);
            }
            at += 1;
        });
        found
    }
}

impl Search<'_> {
    /// What only takes a short time.
    fn waiting(&self, query: &PlacementRequest) -> Option<Suggestion> {
        let compiled = query.compile(&self.classes);
        let on_hold = self.find(|node_state| {
            !node_state.holds().is_empty() && plan::fits(node_state, &compiled, HoldRule::Ignored)
        });
        if let Some(node) = on_hold {
            return Some(Suggestion { node, change: Change::HeldElsewhere });
        }
        let is_kept = |node_state: &NodeState| {
            !node_state.standing_holds().is_empty()
                && plan::fits(node_state, &compiled, HoldRule::Ignored)
        };
        if let Some(node) = self.find(is_kept) {
            return Some(Suggestion { node, change: Change::KeptForFirst });
        }
        self.nodes().find_map(|(name, node_state)| {
            let held = node_state.reservations().values();
            let ending: Vec<PodRef> = held
                .filter(|held| matches!(held.state, ReservationState::Draining { .. }))
                .map(|held| held.pod.clone())
                .collect();
            let gone = ending.iter().map(|pod| &pod.uid);
            let helps = !ending.is_empty() && plan::fits_without(&node_state, &compiled, gone);
            helps.then(|| Suggestion { node: name.clone(), change: Change::Ending(ending) })
        })
    }

    /// Requests that fit now and are as near to this one as possible, each changed in one way.
    fn requesting(&self, query: &PlacementRequest) -> Vec<Suggestion> {
        let mut found = Vec::new();
        if let Some(request) = &query.gpu {
            found.extend(self.smaller(query, request));
        }
        if query.host_rule == HostRule::Checked {
            let cpu = |milli| {
                let mut less = query.clone();
                less.host.cpu = MilliCpu::new(milli);
                less
            };
            found.extend(self.largest(Lever::Cpu, host_range(query.host.cpu.milli()), &[], cpu));
            let memory = |mib| {
                let mut less = query.clone();
                less.host.memory = MemMib::new(mib);
                less
            };
            let range = host_range(query.host.memory.mib());
            found.extend(self.largest(Lever::HostMemory, range, &[], memory));
        }
        let Some(request) = &query.gpu else { return found };
        let devices = |count| {
            let count = u32::try_from(count).ok().and_then(NonZeroU32::new);
            let count = count.unwrap_or(NonZeroU32::MIN);
            requesting(query, GpuRequest { count, ..request.clone() })
        };
        let named = u64::from(request.count.get());
        found.extend(self.largest(Lever::Devices, (1, named), &[], devices));
        for (lever, other) in self.others(request) {
            let changed = requesting(query, other);
            let node = self.first(&changed);
            let change =
                |node| Suggestion { node, change: Change::Request(lever, Box::new(changed)) };
            found.extend(node.map(change));
        }
        found
    }

    /// The largest smaller amounts that fit.
    fn smaller(&self, query: &PlacementRequest, request: &GpuRequest) -> Vec<Suggestion> {
        let compiled = |amount| requesting(query, GpuRequest { amount, ..request.clone() });
        let share_of = |steps| Share::from_millionths(steps * FRACTION_STEP_MILLIONTHS);
        let steps = |share: Share| share.millionths().div_ceil(FRACTION_STEP_MILLIONTHS);
        let by_share = |named: Share, make: &dyn Fn(Share) -> Amount| {
            self.largest(Lever::Share, (1, steps(named)), &[], |size| {
                compiled(make(share_of(size)))
            })
        };
        let mut capacities = Vec::new();
        let _ = self.classes.map(|class| capacities.push(class.capacity.mib()));
        let by_memory = |named: MemMib, make: &dyn Fn(MemMib) -> Amount| {
            let range = (1, named.mib());
            self.largest(Lever::Memory, range, &capacities, |mib| compiled(make(MemMib::new(mib))))
        };
        let found = match &request.amount {
            Amount::Fraction(share) => [by_share(*share, &Amount::Fraction), None],
            Amount::Whole => [by_share(Share::WHOLE, &Amount::Fraction), None],
            Amount::Memory(memory) => [by_memory(*memory, &Amount::Memory), None],
            Amount::FractionAndMemory(share, memory) => [
                by_share(*share, &|share| Amount::FractionAndMemory(share, *memory)),
                by_memory(*memory, &|memory| Amount::FractionAndMemory(*share, memory)),
            ],
            Amount::MigInstance(_) | Amount::SharedSlot => [None, None],
        };
        found.into_iter().flatten().collect()
    }

    /// Requests of the same size that more devices could serve, the nearest first.
    fn others(&self, request: &GpuRequest) -> Vec<(Lever, GpuRequest)> {
        let (mut profiles, mut products) = (BTreeSet::<MigProfile>::new(), BTreeSet::new());
        let _ = self.classes.map(|class| {
            products.insert(class.product());
            if let ClassKind::MigInstance(profile) | ClassKind::SharedInstance(profile) =
                &class.kind
            {
                profiles.insert(profile.clone());
            }
        });
        let mut others = Vec::new();
        if let Amount::MigInstance(wanted) = &request.amount {
            for profile in profiles.into_iter().filter(|profile| !wanted.means(profile)) {
                let amount = Amount::MigInstance(profile);
                others.push((Lever::Profile, GpuRequest { amount, ..request.clone() }));
            }
        }
        for product in products.iter().filter(|product| !request.models.matches(product)) {
            let names = request.models.names().chain([product.as_str()]).map(str::to_owned);
            let models = ModelFilter::new(names.collect::<Vec<_>>());
            if models.matches(product) {
                others.push((Lever::Model, GpuRequest { models, ..request.clone() }));
            }
        }
        let is_part = !request.amount.is_whole() && request.isolation != Isolation::None;
        if is_part {
            others.push((Lever::Whole, GpuRequest { amount: Amount::Whole, ..request.clone() }));
        }
        for weaker in [Isolation::Memory, Isolation::None] {
            if weaker < request.isolation {
                let other = GpuRequest { isolation: weaker, ..request.clone() };
                others.push((Lever::Isolation, other));
            }
        }
        others
    }

    /// The cheapest sets of pods without which it fits: fewest pods, then the least share.
    fn ending(&self, query: &PlacementRequest) -> Vec<Suggestion> {
        let compiled = query.compile(&self.classes);
        let mut ways: Vec<(Clearing, NodeName, Vec<PodRef>, Vec<Spot>)> = Vec::new();
        for (name, node_state) in self.nodes() {
            if node_state.placeable_for(&compiled).is_err() {
                continue;
            }
            // Sets of tenants are tried on a copy, so that the node is not locked meanwhile.
            let copy = node_state.clone();
            drop(node_state);
            let node_state = copy;
            let ends = |way: Clearing| {
                let mut held: Vec<_> =
                    way.pods.iter().filter_map(|uid| node_state.reservation(uid)).collect();
                held.sort_by_key(|held| held.placement.devices.iter().map(|d| d.demand).max());
                let spots = held.iter().flat_map(|held| held.placement.spots.iter().flatten());
                let spots = spots.cloned().collect();
                (way, name.clone(), held.into_iter().map(|held| held.pod.clone()).collect(), spots)
            };
            let found = clearings(&node_state, &compiled, MOST_MOVES).into_iter().take(MOST_WAYS);
            ways.extend(found.map(ends));
            ways.sort();
            ways.truncate(MOST_WAYS);
        }
        let suggestion = |(way, node, pods, instances)| Suggestion {
            node,
            change: Change::End(Ends { way, pods, instances }),
        };
        ways.into_iter().map(suggestion).collect()
    }

    /// GPUs that gpupack cannot use now, and that would take it.
    fn unusable_gpus(&self, query: &PlacementRequest) -> Vec<Suggestion> {
        let compiled = query.compile(&self.classes);
        let mut found = Vec::new();
        for (health, change) in [
            (Health::KubeletOwned, Change::Kubelet as fn(usize) -> Change),
            (Health::Unhealthy, Change::Heal),
        ] {
            let (mut devices, mut first) = (0, None);
            for (name, node_state) in self.nodes() {
                let of_node = would_serve(&node_state, &compiled, health);
                devices += of_node;
                if of_node > 0 {
                    first.get_or_insert_with(|| name.clone());
                }
            }
            found.extend(first.map(|node| Suggestion { node, change: change(devices) }));
        }
        found
    }
}

/// The least amount of the host that is suggested instead of `named`, and `named`.
fn host_range(named: u64) -> (u64, u64) {
    (named.div_ceil(LEAST_HOST_PART).max(1), named)
}

fn requesting(query: &PlacementRequest, request: GpuRequest) -> PlacementRequest {
    PlacementRequest { gpu: Some(request), ..query.clone() }
}

/// Devices of this health on a node where the request would fit if they were healthy.
fn would_serve(node: &NodeState, compiled: &CompiledRequest, health: Health) -> usize {
    if compiled.count() == 0 || node.placeable_for(compiled).is_err() {
        return 0;
    }
    let fits_if_healthy = |room: &&Room| {
        let is_ill = room.health == health;
        let health = if is_ill { Health::Healthy } else { room.health };
        fit(compiled, &Room { health, ..**room }).is_ok()
    };
    let serving = node.rooms(HoldRule::Respected).iter().filter(fits_if_healthy);
    let (ill, well): (Vec<&Room>, Vec<&Room>) = serving.partition(|room| room.health == health);
    let is_enough = ill.len() + well.len() >= compiled.count();
    let has_host = fit_host(compiled, node.host_room(HoldRule::Respected)).is_ok();
    if is_enough && has_host { ill.len() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::ledger_fixture::{hello, say, settings, share_request};
    use wire::ids::PoolName;
    use wire::units::HostAmount;

    /// The amounts of CPU and host memory that are suggested to a pod with 1000m and 1000 MiB, on
    /// a node with as much as `node` has.
    fn suggested(node: (u64, u64)) -> Vec<u64> {
        let host =
            |(milli, mib)| HostAmount { cpu: MilliCpu::new(milli), memory: MemMib::new(mib) };
        let ledger = Ledger::new(settings());
        ledger.see_node(&NodeName::new("n"), host(node), PoolName::new(""));
        say(&ledger, &hello("x", 1, "A")).expect("a hello is accepted");
        let named = host((1000, 1000));
        let query = PlacementRequest {
            host: named,
            host_rule: HostRule::Checked,
            ..share_request(100_000)
        };
        let found = ledger.suggestions(&query, &OwnRoom::default()).into_iter();
        let amount = found.filter_map(|suggestion| match suggestion.change {
            Change::Request(Lever::Cpu, changed) => Some(changed.host.cpu.milli()),
            Change::Request(Lever::HostMemory, changed) => Some(changed.host.memory.mib()),
            _ => None,
        });
        amount.collect()
    }

    #[test]
    fn a_pod_keeps_a_quarter_of_its_cpu_and_host_memory() {
        assert_eq!(suggested((300, 1000)), [300_u64]);
        assert_eq!(suggested((1000, 250)), [250_u64]);
        for node in [(249, 1000), (0, 1000), (1000, 249), (1000, 0)] {
            assert_eq!(suggested(node), [0_u64; 0], "{node:?}");
        }
    }
}
