//! A simulated cluster in the same [`Ledger`] that answers kube-scheduler. Its nodes are seen and
//! reported, and its pods are requested, reserved, confirmed and ended as in a real one. The
//! simulator has no placement code of its own, only costs to compare with (`baseline`).
//!
//! No kubelet checks CPU and host memory here, so the ledger checks them too.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::hardware::device::{
    Device, DeviceId, DeviceIndex, DeviceKind, Health, ModelFilter, ModelName, NodeName, PodUid,
    PoolName,
};
use crate::hardware::inventory::NodeInventory;
use crate::hardware::units::{HostAmount, MemMib, MilliCpu, Share, Timestamp};
use crate::ledger::change::reports::{NodeReport, ReportRefusal};
use crate::ledger::nodes::per_node::Gauge;
use crate::ledger::nodes::state::{Ledger, Settings};
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::moves::Move;
use crate::model::device_state::{CLEAN_REPORTS_TO_FREE, DeviceUse};
use crate::model::fit::HostRule;
use crate::model::request::{Amount, GpuRequest};
use crate::model::reservation::PodRef;
use crate::scoring::fragmentation::Packing;
use crate::scoring::strategy::Strategy;
use crate::sim::run::policy::{MixSource, SimPolicy};
use crate::sim::trace::read::{TraceNode, TracePod};
use crate::sim::trace::workload::capacity_milli;
use crate::waste::request_mix::{Mix, RequestType, Tally};

/// Longer than any replay: here nothing goes stale.
const FOREVER: Duration = Duration::from_secs(u64::MAX / 1000);

/// A simulated cluster under one policy.
pub(crate) struct SimCluster {
    ledger: Ledger,
    policy: SimPolicy,
    /// The next report of each node's agent, by position in the tie-break order.
    agents: Vec<NodeReport>,
    rank_of: BTreeMap<NodeName, usize>,
    /// The mix that fragmentation is measured against; the same for all policies.
    yardstick: Mix,
    gauge: RefCell<Gauge>,
    chance: ChaCha8Rng,
    capacity_milli: u64,
    used_micro: u64,
    /// Most moves of running pods for one pod that no node fits.
    most_moves: usize,
    moves: u64,
    /// The new seats of pods that have moved, by arrival.
    moved: BTreeMap<usize, Seat>,
    /// Requests that no moves have helped since the last pod ended.
    hopeless: BTreeSet<PlacementRequest>,
}

/// Where a pod runs, and what it takes there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Seat {
    /// Position of the node in the tie-break order.
    pub(crate) node: usize,
    /// GPU share in millionths, over all devices.
    micro: u64,
}

impl SimCluster {
    /// A cluster of `nodes`, the first of which wins a tie. The pods of the trace are the
    /// `population`: the measure of fragmentation, and the mix that `fgd` knows from the start.
    pub(crate) fn new(
        nodes: &[TraceNode],
        population: &[TracePod],
        policy: SimPolicy,
        seed: i64,
        most_moves: usize,
    ) -> Result<Self, ReportRefusal> {
        let ledger = Ledger::new(Settings {
            hold_for: FOREVER,
            stale_after: FOREVER,
            drain_limit: FOREVER,
            warm_up: Duration::ZERO,
            unmanaged_tolerance: MemMib::ZERO,
            first_session: 1,
        });
        let agents = nodes.iter().enumerate().map(|(rank, node)| add_node(&ledger, rank, node));
        let agents = agents.collect::<Result<Vec<NodeReport>, ReportRefusal>>()?;
        let named = agents.iter().enumerate();
        let rank_of = named.map(|(rank, agent)| (NodeName::new(agent.agent.as_str()), rank));
        let rank_of = rank_of.collect();
        let yardstick = mix_of(population);
        if let SimPolicy::Without(term) = policy {
            ledger.weigh(term.left_out());
        }
        if policy.mix_source() == MixSource::Population {
            ledger.set_mix(yardstick.clone());
        }
        Ok(Self {
            ledger,
            policy,
            agents,
            rank_of,
            gauge: RefCell::new(Gauge::new(yardstick.clone())),
            yardstick,
            chance: ChaCha8Rng::seed_from_u64(seed.cast_unsigned()),
            capacity_milli: capacity_milli(nodes),
            used_micro: 0,
            most_moves,
            moves: 0,
            moved: BTreeMap::new(),
            hopeless: BTreeSet::new(),
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
    pub(crate) fn packing(&self) -> Packing {
        self.ledger.packing_by(&mut self.gauge.borrow_mut())
    }

    /// The free share of each GPU that the typical requests of the trace cannot use.
    pub(crate) fn stranded(&self) -> Vec<Share> {
        self.ledger.stranded_against(&self.yardstick)
    }

    /// Notes that a pod has come; a policy that learns the mix does so now.
    pub(crate) fn meet(&self, arrival: usize, pod: &TracePod) {
        if self.policy.mix_source() == MixSource::Arrivals {
            let strategy = self.policy.strategy(|| 0); // the mix learns the request only
            self.ledger.learn(uid(arrival), &query_of(pod, strategy));
        }
    }

    /// Searches, reserves and confirms, as the verbs of the extender do. `None` if no node fits.
    pub(crate) fn place(&mut self, arrival: usize, pod: &TracePod) -> Option<Seat> {
        let query = self.query(pod);
        let found = self.ledger.best(&query).map(|(node, _)| node);
        let node = found.or_else(|| self.make_room(&query))?;
        Some(self.reserve(arrival, pod, self.rank_of[&node], &query))
    }

    /// Moves running pods so that a pod fits that no node fits now. Returns its node.
    fn make_room(&mut self, query: &PlacementRequest) -> Option<NodeName> {
        if self.most_moves == 0 || self.hopeless.contains(query) {
            return None;
        }
        let Some(way) = self.ledger.moves(query, self.most_moves) else {
            // With new chances the next search may find some.
            if query.strategy.is_repeatable() {
                self.hopeless.insert(query.clone());
            }
            return None;
        };
        for Move { pod, to, .. } in way.moves {
            let arrival = pod.uid.as_str().parse().expect("pods are named by their arrival");
            let shares = to.devices.iter().map(|placed| placed.demand.share.millionths());
            let seat = Seat { node: self.rank_of[&to.node], micro: shares.sum() };
            self.moved.insert(arrival, seat);
            self.moves += 1;
            self.ledger.replace_placement(&pod.uid, to);
        }
        Some(way.placement.node)
    }

    pub(crate) fn moves(&self) -> u64 {
        self.moves
    }

    /// The same on the node at position `rank` alone.
    pub(crate) fn place_on(&mut self, rank: usize, arrival: usize, pod: &TracePod) -> Option<Seat> {
        let query = self.query(pod);
        let answers = self.ledger.answers(&query, &[&self.agents[rank].agent]);
        let is_free = answers.iter().all(Result::is_ok);
        is_free.then(|| self.reserve(arrival, pod, rank, &query))
    }

    fn query(&mut self, pod: &TracePod) -> PlacementRequest {
        let strategy = self.policy.strategy(|| self.chance.next_u64());
        query_of(pod, strategy)
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
            .reserve(&pod, &self.agents[rank].agent, query, Timestamp::START)
            .expect("what a query found is there: nothing else changes this ledger");
        self.ledger.confirm(&pod.uid);
        let shares = placement.devices.iter().map(|placed| placed.demand.share.millionths());
        let micro = shares.sum::<u64>();
        self.used_micro += micro;
        Seat { node: rank, micro }
    }

    /// Ends a pod: the API server reports it, and the agent's next reports show none of its
    /// processes. Returns the position of its node in the tie-break order.
    pub(crate) fn end(&mut self, arrival: usize, seat: Seat) -> usize {
        let seat = self.moved.remove(&arrival).unwrap_or(seat);
        self.hopeless.clear();
        self.ledger.end_pod(&uid(arrival), Timestamp::START);
        self.used_micro -= seat.micro;
        if seat.micro == 0 {
            return seat.node; // CPU and host memory are free at once
        }
        let agent = &mut self.agents[seat.node];
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

/// Arrivals are numbered, as a trace pod may come several times.
fn uid(arrival: usize) -> PodUid {
    PodUid::new(arrival.to_string())
}

/// Adds a node to the ledger as the API server and the node's agent would. Returns the agent's next
/// report: no device has a process.
///
/// The ledger breaks ties by name, so the name begins with the position in the tie-break order.
fn add_node(ledger: &Ledger, rank: usize, node: &TraceNode) -> Result<NodeReport, ReportRefusal> {
    let name = NodeName::new(format!("{rank:07}.{}", node.name));
    ledger.see_node(&name, host_of(node.cpu_milli, node.memory_mib), PoolName::new(""));
    let devices = (0..node.gpus).map(|index| {
        Ok(Device {
            id: DeviceId::new(&format!("GPU-{rank:07}-{index:03}"))?,
            index: DeviceIndex(index),
            model: ModelName::new(node.model.as_str()),
            total: gpu_memory(&node.model),
            reserved: MemMib::ZERO,
            kind: DeviceKind::Gpu,
            health: Health::Healthy,
        })
    });
    let devices = devices.collect::<Result<Vec<Device>, ReportRefusal>>()?;
    let uses = devices.iter().map(|device| DeviceUse::idle(device.id.clone())).collect();
    let inventory = Some(NodeInventory::new(devices)?);
    let mut report = NodeReport {
        agent: name.to_string(),
        session: None,
        sequence: 1,
        inventory,
        uses,
        allocations_version: None,
    };
    let receipt = ledger.report(name.as_str(), &report, Timestamp::START)?;
    report.session = Some(receipt.session);
    report.inventory = None;
    Ok(report)
}

/// Memory of a GPU of the trace, which names models but not their memory. Pods request shares only,
/// and memory follows the share, so it decides nothing. The trace hides what `G1` to `G3` are.
fn gpu_memory(model: &str) -> MemMib {
    MemMib::new(match model {
        "T4" => 15_360,
        "A10" | "G2" => 24_576,
        "V100M32" => 32_768,
        "G3" => 81_920,
        _ => 16_384,
    })
}

fn host_of(cpu_milli: u64, memory_mib: u64) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(cpu_milli), memory: MemMib::new(memory_mib) }
}

fn gpu_request(pod: &TracePod) -> Option<GpuRequest> {
    let count = NonZeroU32::new(pod.num_gpu)?;
    let amount = match pod.gpu_milli {
        1000.. => Amount::Whole,
        milli => Amount::Fraction(Share::from_millionths(u64::from(milli) * 1000)),
    };
    let models = ModelFilter::new(pod.gpu_spec.iter().map(String::as_str));
    Some(GpuRequest { models, ..GpuRequest::several(amount, count) })
}

fn request_type(pod: &TracePod) -> RequestType {
    RequestType::new(gpu_request(pod).as_ref(), MilliCpu::new(pod.cpu_milli))
}

fn query_of(pod: &TracePod, strategy: Strategy) -> PlacementRequest {
    PlacementRequest {
        gpu: gpu_request(pod),
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
