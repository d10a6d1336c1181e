//! A simulated cluster in the same [`Ledger`] that answers kube-scheduler. Its nodes are seen and
//! reported, and its pods are requested, reserved, confirmed and ended as in a real one. The
//! simulator has no placement code of its own, only costs to compare with (`baseline`).
//!
//! No kubelet checks CPU and host memory here, so the ledger checks them too.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::run::policy::{MixSource, SimPolicy};
use crate::trace::dimensions::{DeviceAt, TracePlacement};
use crate::trace::inventory::RowOfNode;
use crate::trace::read::{TraceNode, TracePod};
use crate::trace::workload::capacity_milli;
use engine::hardware::pool::{ConfiguredIsolation, PoolRule, PoolRules};
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::change::reports::{NodeReport, ReportRefusal};
use engine::ledger::nodes::per_node::Gauge;
use engine::ledger::nodes::state::{Ledger, Settings};
use engine::ledger::query::own_room::OwnRoom;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::moves::Move;
use engine::ledger::suggest::standing::Holder;
use engine::model::device_state::CLEAN_REPORTS_TO_FREE;
use engine::model::fit::HostRule;
use engine::model::policy::Policy;
use engine::model::reservation::{PlacedDevice, Placement, PodRef, Tenure};
use engine::scoring::fragmentation::PackingSums;
use engine::scoring::strategy::Strategy;
use engine::waste::request_mix::{Mix, RequestType, Tally};
use wire::device::DeviceKind;
use wire::ids::{DeviceId, ModelName, NodeName, PodUid, PoolName};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{Demand, HostAmount, MemMib, MilliCpu, Share, Timestamp};

/// Longer than any replay: here nothing goes stale.
const FOREVER: Duration = Duration::from_secs(u64::MAX / 1000);

/// A simulated cluster under one policy.
pub struct SimCluster {
    ledger: Ledger,
    policy: SimPolicy,
    nodes: SimNodes,
    /// Whether the mix learns the requests that come.
    is_learning: bool,
    /// The mix that fragmentation is measured against; the same for all policies.
    yardstick: Mix,
    gauge: RefCell<Gauge>,
    /// GPUs of the pod that requests the most.
    largest: usize,
    chance: ChaCha8Rng,
    capacity_milli: u64,
    used_micro: u64,
    moves: SimMoves,
}

/// The nodes, by position in the tie-break order.
struct SimNodes {
    /// The next report of each one's agent.
    agents: Vec<NodeReport>,
    /// The devices of each, by their place in the trace.
    devices: Vec<BTreeMap<DeviceAt, DeviceId>>,
    rank_of: BTreeMap<NodeName, usize>,
    /// The same by the name in the trace.
    rank_in_trace: BTreeMap<String, usize>,
}

/// Moves of running pods for others.
#[derive(Default)]
struct SimMoves {
    /// Most moves for one pod that no node fits.
    most: usize,
    done: u64,
    /// The new seats of pods that have moved, by arrival.
    seats: BTreeMap<usize, Seat>,
    /// Requests that no moves have helped since the last pod ended.
    hopeless: BTreeSet<PlacementRequest>,
}

/// Where a pod runs, and what it takes there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seat {
    /// Position of the node in the tie-break order.
    pub(crate) node: usize,
    /// GPU share in millionths, over all devices.
    pub(crate) micro: u64,
}

/// What is free on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreeOnDevice {
    pub node: String,
    pub device: DeviceAt,
    /// The model of its GPU.
    pub model: ModelName,
    pub free: Demand,
}

impl SimCluster {
    /// A cluster of `nodes`, the first of which wins a tie. The pods of the trace are the
    /// `population`: the measure of fragmentation, and the mix that `fgd` knows from the start.
    pub fn new(
        nodes: &[TraceNode],
        population: &[TracePod],
        policy: SimPolicy,
        seed: i64,
        most_moves: usize,
    ) -> Result<Self, ReportRefusal> {
        let ledger = untimed_ledger();
        let rules: BTreeSet<PoolRule> = nodes.iter().map(TraceNode::rule).collect();
        ledger.share_by(PoolRules::new(rules.iter().map(|rule| (pool_of(*rule), *rule))));
        let added = nodes.iter().enumerate();
        let added = added.map(|(rank, node)| add_node(&ledger, rank, node, node.rule()));
        let added = added.collect::<Result<Vec<_>, ReportRefusal>>()?;
        let (agents, devices): (Vec<NodeReport>, Vec<_>) = added.into_iter().unzip();
        let named = agents.iter().enumerate();
        let rank_of = named.map(|(rank, agent)| (NodeName::new(agent.agent.as_str()), rank));
        let rank_of = rank_of.collect();
        let rank_in_trace = (0..).zip(nodes).map(|(rank, node)| (node.name.clone(), rank));
        let yardstick = mix_of(population);
        if let Some(weights) = policy.weights {
            ledger.weigh(weights);
        }
        if policy.mix == MixSource::Population {
            ledger.set_mix(yardstick.clone());
        }
        let is_learning = match policy.mix {
            MixSource::Arrivals => true,
            MixSource::Population => false,
            // A pod may choose a policy that needs the mix.
            MixSource::None => population.iter().any(|pod| own_policy(pod).is_some()),
        };
        Ok(Self {
            ledger,
            policy,
            nodes: SimNodes { agents, devices, rank_of, rank_in_trace: rank_in_trace.collect() },
            is_learning,
            gauge: RefCell::new(Gauge::new(yardstick.clone())),
            yardstick,
            largest: population
                .iter()
                .filter_map(|pod| pod.num_gpu.try_into().ok())
                .max()
                .unwrap_or(0),
            chance: ChaCha8Rng::seed_from_u64(seed.cast_unsigned()),
            capacity_milli: capacity_milli(nodes),
            used_micro: 0,
            moves: SimMoves { most: most_moves, ..SimMoves::default() },
        })
    }

    /// Capacity of all GPUs, in thousandths of one.
    pub(crate) fn capacity_milli(&self) -> u64 {
        self.capacity_milli
    }

    /// What is allocated of it.
    pub(crate) fn used_milli(&self) -> u64 {
        self.used_micro / 1000
    }

    /// How full and fragmented it is, against the mix of the whole trace.
    pub(crate) fn packing(&self) -> PackingSums {
        self.ledger.packing_by(&mut self.gauge.borrow_mut())
    }

    /// What is free on nodes that have as many wholly free GPUs as the largest pod requests, in thousandths of a GPU.
    pub(crate) fn room_for_largest_milli(&self) -> u64 {
        self.ledger.free_on_nodes_with(self.largest) / 1000
    }

    /// The free share of each GPU that the typical requests of the trace cannot use.
    pub(crate) fn stranded(&self) -> Vec<Share> {
        self.ledger.stranded_against(&self.yardstick)
    }

    /// Notes that a pod has come; a policy that learns the mix does so now.
    pub fn meet(&self, arrival: usize, pod: &TracePod) {
        if self.is_learning {
            let strategy = (self.policy.strategy)(0); // the mix learns the request only
            self.ledger.learn(uid(arrival), &query_of(pod, strategy));
        }
    }

    /// Searches, reserves and confirms, as the verbs of the extender do. `None` if no node fits. A
    /// pod that stays where it runs is seen there, as after a restart of the extender.
    pub fn place(&mut self, arrival: usize, pod: &TracePod) -> Option<Seat> {
        if let Some(placed) = pod.placed() {
            return self.seat(arrival, pod, placed);
        }
        let query = self.query(pod);
        let found = self.ledger.best(&query).map(|(node, _)| node);
        let node = found.or_else(|| self.make_room(&query))?;
        Some(self.reserve(arrival, pod, self.nodes.rank_of[&node], &query))
    }

    /// Notes a pod that runs. `None` if its node or a device of it does not exist.
    fn seat(&mut self, arrival: usize, pod: &TracePod, placed: &TracePlacement) -> Option<Seat> {
        let node = *self.nodes.rank_in_trace.get(&placed.node)?;
        let name = NodeName::new(self.nodes.agents[node].agent.as_str());
        let devices = placed.devices.iter().map(|(at, demand)| {
            let id = self.nodes.devices[node].get(at)?.clone();
            Some(PlacedDevice { id, demand: *demand })
        });
        let devices = devices.collect::<Option<Vec<PlacedDevice>>>()?;
        let micro = devices.iter().map(|placed| placed.demand.share.millionths()).sum();
        let placement = Placement {
            node: name.clone(),
            devices,
            isolation: placed.isolation,
            guest: None,
            spots: Vec::new(),
        };
        let fact = PodFact {
            pod: PodRef { uid: uid(arrival), name: pod.name.as_str().into() },
            node: Some(name),
            host: host_of(pod.cpu_milli, pod.memory_mib),
            is_terminal: false,
            wants_gpu: !placement.devices.is_empty(),
            request: pod.request().map(Arc::new),
            placement: Some(placement).filter(|placement| !placement.devices.is_empty()),
            bound_by_us: true,
            moves: MoveFact::default(),
            tenure: Tenure::default(),
        };
        self.ledger.see_pod(&fact, Timestamp::START);
        self.used_micro += micro;
        Some(Seat { node, micro })
    }

    /// Moves running pods so that a pod fits that no node fits now. Returns its node.
    fn make_room(&mut self, query: &PlacementRequest) -> Option<NodeName> {
        if self.moves.most == 0 || self.moves.hopeless.contains(query) {
            return None;
        }
        let Some(way) = self.ledger.moves(query, &OwnRoom::default(), self.moves.most) else {
            // With new chances the next search may find some.
            if query.strategy.is_repeatable() {
                self.moves.hopeless.insert(query.clone());
            }
            return None;
        };
        for Move { pod, to, .. } in way.moves {
            let arrival = pod.uid.as_str().parse().expect("pods are named by their arrival");
            let micro = to.share().millionths();
            let seat = Seat { node: self.nodes.rank_of[&to.node], micro };
            self.moves.seats.insert(arrival, seat);
            self.moves.done += 1;
            self.ledger.replace_placement(&pod.uid, to);
        }
        Some(way.placement.node)
    }

    pub(crate) fn moves(&self) -> u64 {
        self.moves.done
    }

    /// Places a pod as [`SimCluster::place`] does, on the node at position `rank` alone.
    pub(crate) fn place_on(&mut self, rank: usize, arrival: usize, pod: &TracePod) -> Option<Seat> {
        let query = self.query(pod);
        let answers = self.ledger.answers(&query, &[&self.nodes.agents[rank].agent]);
        let is_free = answers.iter().all(Result::is_ok);
        is_free.then(|| self.reserve(arrival, pod, rank, &query))
    }

    /// Keeps room for a waiting pod where it lacks least, on all nodes or on the one that has just
    /// changed. Returns its seat once all of that is free.
    pub(crate) fn stand(
        &mut self,
        arrival: usize,
        pod: &TracePod,
        changed: Option<usize>,
    ) -> Option<Seat> {
        let (uid, query) = (uid(arrival), self.query(pod));
        let named = changed.map(|changed| {
            let kept = self.ledger.standing_nodes().get(&uid).map(ToString::to_string);
            let names = kept.into_iter().chain([self.nodes.agents[changed].agent.clone()]);
            self.ledger.named_nodes(names)
        });
        self.ledger.stand(Holder::first(&uid, "", &query), named.as_ref(), |_| true);
        let node = self.ledger.fits_in_room_of(&uid, &query, None)?;
        Some(self.reserve(arrival, pod, self.nodes.rank_of[&node], &query))
    }

    fn query(&mut self, pod: &TracePod) -> PlacementRequest {
        let strategy = (self.policy.strategy)(self.chance.next_u64());
        query_of(pod, strategy)
    }

    /// Where a pod runs, by the names of the trace.
    pub fn placement(&self, arrival: usize, seat: Seat) -> Option<TracePlacement> {
        let rank = self.moves.seats.get(&arrival).unwrap_or(&seat).node;
        let node = unranked(&self.nodes.agents[rank].agent).to_owned();
        let Some(held) = self.ledger.reservation(&uid(arrival)) else {
            let isolation = ConfiguredIsolation::None;
            return Some(TracePlacement { node, devices: Vec::new(), isolation });
        };
        let devices = held.placement.devices.iter().map(|placed| {
            let (at, _) = self.nodes.devices[rank].iter().find(|(_, id)| **id == placed.id)?;
            Some((*at, placed.demand))
        });
        let isolation = held.placement.isolation;
        Some(TracePlacement { node, devices: devices.collect::<Option<_>>()?, isolation })
    }

    /// What is free on each device that can have pods, in the order of the trace.
    pub fn free(&self) -> Vec<FreeOnDevice> {
        let mut free = Vec::new();
        for (rank, agent) in self.nodes.agents.iter().enumerate() {
            let Some(node) = self.ledger.node(&agent.agent) else { continue };
            for found in node.devices() {
                let device = found.device();
                let at = self.nodes.devices[rank].iter().find(|(_, id)| **id == device.id);
                if let Some((at, _)) = at
                    && device.kind != DeviceKind::MigParent
                {
                    free.push(FreeOnDevice {
                        node: unranked(&agent.agent).to_owned(),
                        device: *at,
                        model: device.model.clone(),
                        free: found.free(),
                    });
                }
            }
        }
        free
    }

    fn reserve(
        &mut self,
        arrival: usize,
        pod: &TracePod,
        rank: usize,
        query: &PlacementRequest,
    ) -> Seat {
        let pod = PodRef { uid: uid(arrival), name: pod.name.as_str().into() };
        let placement = self
            .ledger
            .reserve(&pod, &self.nodes.agents[rank].agent, query, Timestamp::START)
            .expect("what a query found is there: nothing else changes this ledger");
        self.ledger.confirm(&pod.uid);
        let micro = placement.share().millionths();
        self.used_micro += micro;
        Seat { node: rank, micro }
    }

    /// Ends a pod: the API server reports it, and the agent's next reports show none of its
    /// processes. Returns the position of its node in the tie-break order.
    pub fn end(&mut self, arrival: usize, seat: Seat) -> usize {
        let seat = self.moves.seats.remove(&arrival).unwrap_or(seat);
        self.moves.hopeless.clear();
        self.ledger.end_pod(&uid(arrival), Timestamp::START);
        self.used_micro -= seat.micro;
        if seat.micro == 0 {
            return seat.node; // CPU and host memory are free at once
        }
        let agent = &mut self.nodes.agents[seat.node];
        for _ in 0..CLEAN_REPORTS_TO_FREE {
            agent.sequence += 1;
            self.ledger
                .report(&agent.agent, agent, Timestamp::START)
                .expect("the agent reports in its session and sends no inventory");
        }
        seat.node
    }

    /// The ledger, for tests to check.
    #[cfg(test)]
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

/// A ledger in which time ends nothing.
pub fn untimed_ledger() -> Ledger {
    Ledger::new(Settings {
        hold_for: FOREVER,
        stale_after: FOREVER,
        drain_limit: FOREVER,
        warm_up: Duration::ZERO,
        unmanaged_tolerance: MemMib::ZERO,
        first_session: 1,
    })
}

/// Arrivals are numbered, as a trace pod may come several times.
fn uid(arrival: usize) -> PodUid {
    PodUid::new(arrival.to_string())
}

/// Adds a node to the ledger, in the pool of this rule, as the API server and the node's agent would. Returns the agent's next
/// report: no device has a process of a pod.
///
/// The ledger breaks ties by name, so the name begins with the position in the tie-break order.
pub fn add_node(
    ledger: &Ledger,
    rank: usize,
    node: &TraceNode,
    rule: PoolRule,
) -> Result<(NodeReport, BTreeMap<DeviceAt, DeviceId>), ReportRefusal> {
    let name = NodeName::new(format!("{rank:07}.{}", node.name));
    ledger.see_node(&name, host_of(node.cpu_milli, node.memory_mib), pool_of(rule));
    let devices = node.devices(rank)?;
    let other_uses = node.more.as_ref().map(|more| &more.other_use);
    let uses = devices.iter().map(|device| {
        let idle =
            DeviceUse { health: device.device.health, ..DeviceUse::idle(device.device.id.clone()) };
        let other_use = other_uses.and_then(|all| all.get(&device.at)).copied();
        if other_use.is_none() {
            return idle;
        }
        // Of a process outside of all pods.
        let process = ProcessUse { pod: None, memory: other_use };
        DeviceUse { used: other_use, processes: Some(vec![process]), ..idle }
    });
    let mut report = NodeReport {
        agent: name.to_string(),
        session: None,
        sequence: 1,
        uses: uses.collect(),
        inventory: Some(RowOfNode::inventory(&devices)?),
        allocations_version: None,
    };
    let receipt = ledger.report(name.as_str(), &report, Timestamp::START)?;
    report.session = Some(receipt.session);
    report.inventory = None;
    Ok((report, devices.into_iter().map(|device| (device.at, device.device.id)).collect()))
}

/// The name of a node in the trace.
fn unranked(name: &str) -> &str {
    name.split_once('.').map_or(name, |(_, name)| name)
}

/// A pool for each rule; the usual one has no name.
pub fn pool_of(rule: PoolRule) -> PoolName {
    let is_usual = rule == PoolRule::default();
    PoolName::new(if is_usual { String::new() } else { format!("{rule:?}") })
}

/// The policy that a pod chooses.
fn own_policy(pod: &TracePod) -> Option<Policy> {
    pod.more.as_ref()?.policy
}

fn host_of(cpu_milli: u64, memory_mib: u64) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(cpu_milli), memory: MemMib::new(memory_mib) }
}

fn request_type(pod: &TracePod) -> RequestType {
    RequestType::new(pod.request().as_ref(), MilliCpu::new(pod.cpu_milli))
}

/// The query for a pod. The policy that it chooses counts beside those of the product.
pub fn query_of(pod: &TracePod, strategy: Strategy) -> PlacementRequest {
    let strategy = match (strategy, own_policy(pod)) {
        (Strategy::Policy(_), Some(own)) => Strategy::Policy(own),
        (usual, _) => usual,
    };
    PlacementRequest {
        gpu: pod.request(),
        host: host_of(pod.cpu_milli, pod.memory_mib),
        host_rule: HostRule::Checked,
        strategy,
    }
}

/// The requests of `pods`.
fn mix_of(pods: &[TracePod]) -> Mix {
    let mut counts: BTreeMap<RequestType, Tally> = BTreeMap::new();
    for pod in pods {
        counts.entry(request_type(pod)).or_default().count(MemMib::new(pod.memory_mib));
    }
    Mix::of(&counts)
}
