//! Random histories of a small cluster, and a player that applies them to a ledger.
//!
//! The player keeps what the API server would know (which pods are bound where, which nodes exist), so
//! a history is legal: a pod is bound to what was reserved for it, and a UID is never used twice.

use std::collections::{BTreeMap, BTreeSet};

use engine::hardware::inventory::NodeInventory;
use engine::hardware::pool::{
    Borrow, Enforcement, InstanceUse, MigUse, PoolRule, PoolRules, Replicas,
};
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::standing::Holder;
use engine::model::event::LedgerEvent;
use engine::model::node_state::NodeState;
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest, Isolation};
use engine::model::reservation::{Reservation, Tenure};
use engine::scoring::context::{ScoringContext, TakenList};
use engine::scoring::strategy::{CustomCost, PlacementCost, Strategy as Ranking};
use engine::waste::compiled_mix::CompiledMix;
use proptest::prelude::*;
use server::reports::reply::allocation;
use sim::run::policy::SimPolicy;
use wire::device::{Device, DeviceIndex, DeviceKind, Health, ModelFilter};
use wire::driver_work::{DriverWork, MigChange, UpgradeState};
use wire::ids::{MigProfile, ModelName, NodeName, PodUid, PoolName};
use wire::report::bodies::Allocation;
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{HostAmount, MemMib, MilliCpu, Share, Timestamp};

use crate::harness::ledger::{device_id, fraction, host, pod, settings};

pub(crate) const NODES: [&str; 4] = ["a", "b", "c", "d"];
const PODS: usize = 8;
/// Kinds of inventory that a node may report; the devices of two kinds have different ids.
pub(crate) const KINDS: usize = 5;

/// Rules of the pools that a node may be in.
pub(crate) const RULES: [PoolRule; 5] = [
    rule(None, InstanceUse::Whole, Enforcement::None),
    rule(Replicas::new(4), InstanceUse::Shared, Enforcement::None),
    rule(None, InstanceUse::Shared, Enforcement::Mps),
    rule(Replicas::new(3), InstanceUse::Shared, Enforcement::Mps),
    rule(None, InstanceUse::Whole, Enforcement::Driver),
];

const fn rule(
    replicas: Option<Replicas>,
    instances: InstanceUse,
    enforcement: Enforcement,
) -> PoolRule {
    PoolRule {
        replicas,
        instances,
        enforcement,
        borrow: Borrow::None,
        driver_limits: false,
        mig: MigUse::Fixed,
    }
}

/// The pool with the rule at this position.
pub(crate) fn pool(at: usize) -> PoolName {
    PoolName::new(format!("pool-{at}"))
}

/// A ledger that knows the pools.
pub(crate) fn ledger_with_pools() -> Ledger {
    let ledger = Ledger::new(settings());
    ledger.share_by(PoolRules::new((0..RULES.len()).map(|at| (pool(at), RULES[at]))));
    ledger
}

/// One thing that happens.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    SeeNode(usize),
    /// A node gets another pool.
    Move(usize, usize),
    /// NVIDIA's tools begin or end something on a node.
    Work(usize, DriverWork),
    LoseNode(usize),
    Hello(usize, usize),
    Report(usize, Vec<Seen>),
    Reserve(usize, usize, PlacementRequest),
    Hold(usize, usize, PlacementRequest),
    DropHold(usize),
    Stand(usize, PlacementRequest),
    StandDown(usize),
    Forget(usize),
    Confirm(usize),
    Bound(usize),
    BoundBare(usize, usize),
    End(usize),
    Pass(u64),
    Learn(PlacementRequest),
}

/// What an agent sees of one device.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) is_healthy: bool,
    pub(crate) used: Option<u64>,
    pub(crate) is_sampled: bool,
    pub(crate) pods: BTreeSet<usize>,
}

/// Costs that differ from call to call, so that no answer may be kept.
#[derive(Debug)]
struct Fickle {
    chance: u64,
}

impl PlacementCost for Fickle {
    fn name(&self) -> &'static str {
        "fickle"
    }

    fn is_repeatable(&self) -> bool {
        false
    }

    fn choose(&self, context: &ScoringContext<'_>, _mix: &CompiledMix) -> (i64, TakenList) {
        let letters = context.node.name().as_str().bytes().map(u64::from);
        let hash =
            letters.fold(self.chance, |hash, letter| (hash ^ letter).wrapping_mul(0x9e37_79b9));
        let taken = context.first_by(|(at, _)| hash.rotate_left(u32::try_from(*at).unwrap_or(0)));
        (i64::try_from(hash >> 1).expect("63 bits fit"), taken)
    }
}

pub(crate) fn query() -> impl Strategy<Value = PlacementRequest> {
    let amount = prop_oneof![
        3 => prop::sample::select(vec![100_000, 333_330, 500_000, 1_000_000]).prop_map(fraction),
        2 => prop::sample::select(vec![1, 3_000, 10_000, 20_000])
            .prop_map(|mib| Amount::Memory(MemMib::new(mib))),
        1 => (1..=1_000_000_u64, 0..12_000_u64).prop_map(|(share, mib)| {
            Amount::FractionAndMemory(Share::from_millionths(share), MemMib::new(mib))
        }),
        1 => Just(Amount::Whole),
        1 => Just(Amount::MigInstance(MigProfile::new("1g.5gb"))),
        1 => Just(Amount::SharedSlot),
    ];
    let models = prop::sample::select(vec![vec![], vec![], vec!["T4"], vec!["A100", "H100"]]);
    let ranking = prop_oneof![
        3 => prop::sample::select(Policy::ALL.to_vec()).prop_map(Ranking::Policy),
        1 => prop::sample::select(vec![
            Ranking::Custom(CustomCost::new(Fickle { chance: 1 })),
            Ranking::Custom(CustomCost::new(Fickle { chance: 2 })),
            (SimPolicy::BESTFIT.strategy)(0),
        ]),
    ];
    let isolation = prop_oneof![
        4 => Just(Isolation::None),
        2 => Just(Isolation::Memory),
        1 => Just(Isolation::Hardware),
    ];
    let gpu =
        (amount, 1..=3_u32, models, isolation).prop_map(|(amount, count, models, isolation)| {
            GpuRequest {
                models: ModelFilter::new(models),
                isolation,
                ..GpuRequest::several(amount, count.try_into().expect("at least one"))
            }
        });
    let cpu = prop::sample::select(vec![0, 500, 9_000]);
    (prop::option::weighted(0.9, gpu), cpu, any::<bool>(), ranking).prop_map(
        |(gpu, cpu, is_checked, strategy)| PlacementRequest {
            gpu,
            host: HostAmount { cpu: MilliCpu::new(cpu), memory: MemMib::new(cpu) },
            host_rule: if is_checked {
                engine::model::fit::HostRule::Checked
            } else {
                engine::model::fit::HostRule::Trusted
            },
            strategy,
        },
    )
}

fn seen() -> impl Strategy<Value = Seen> {
    let used = prop::option::of(prop::sample::select(vec![0, 50, 500, 5_000, 50_000]));
    let pods = prop::collection::btree_set(0..PODS, 0..2);
    (prop::bool::weighted(0.9), used, prop::bool::weighted(0.9), pods).prop_map(
        |(is_healthy, used, is_sampled, pods)| Seen { is_healthy, used, is_sampled, pods },
    )
}

/// Nothing as a rule.
fn work() -> impl Strategy<Value = DriverWork> {
    let upgrade = prop::option::of(prop::sample::select(UpgradeState::ALL.to_vec()));
    let mig = prop::option::weighted(0.2, prop::sample::select(MigChange::ALL.to_vec()));
    let some = (upgrade, mig).prop_map(|(upgrade, mig)| DriverWork { upgrade, mig });
    prop_oneof![1 => Just(DriverWork::default()), 1 => some]
}

pub(crate) fn event() -> impl Strategy<Value = Event> {
    let (node, pod) = (|| 0..NODES.len(), || 0..PODS);
    prop_oneof![
        1 => node().prop_map(Event::SeeNode),
        1 => node().prop_map(Event::LoseNode),
        2 => (node(), 0..RULES.len()).prop_map(|(node, pool)| Event::Move(node, pool)),
        1 => (node(), work()).prop_map(|(node, work)| Event::Work(node, work)),
        2 => (node(), 0..KINDS).prop_map(|(node, kind)| Event::Hello(node, kind)),
        4 => (node(), prop::collection::vec(seen(), 0..4)).prop_map(|(n, s)| Event::Report(n, s)),
        8 => (pod(), node(), query()).prop_map(|(p, n, q)| Event::Reserve(p, n, q)),
        4 => (pod(), node(), query()).prop_map(|(p, n, q)| Event::Hold(p, n, q)),
        1 => pod().prop_map(Event::DropHold),
        3 => (pod(), query()).prop_map(|(p, q)| Event::Stand(p, q)),
        1 => pod().prop_map(Event::StandDown),
        2 => pod().prop_map(Event::Forget),
        2 => pod().prop_map(Event::Confirm),
        4 => pod().prop_map(Event::Bound),
        1 => (pod(), node()).prop_map(|(p, n)| Event::BoundBare(p, n)),
        3 => pod().prop_map(Event::End),
        2 => (0..20_000_u64).prop_map(Event::Pass),
        1 => query().prop_map(Event::Learn),
    ]
}

pub(crate) fn history() -> impl Strategy<Value = Vec<Event>> {
    prop::collection::vec(event(), 1..60)
}

/// The devices of an inventory of this kind on this node.
pub(crate) fn inventory(node: &str, kind: usize) -> NodeInventory {
    let gpu = |index: u32, model: &str, mib: u64| Device {
        id: device_id(&format!("{node}-{kind}-{index}")),
        index: DeviceIndex(index),
        model: ModelName::new(model),
        total: MemMib::new(mib),
        reserved: MemMib::new(mib / 50),
        kind: DeviceKind::Gpu,
        health: Health::Healthy,
    };
    let mut parent = gpu(0, "A100", 40_000);
    parent.kind = DeviceKind::MigParent;
    let instance = |index| Device {
        kind: DeviceKind::MigInstance {
            parent: device_id(&format!("{node}-{kind}-0")),
            profile: MigProfile::new("1g.5gb"),
        },
        ..gpu(index, "A100", 5_000)
    };
    let devices = match kind {
        0 => vec![gpu(0, "T4", 10_000), gpu(1, "T4", 10_000)],
        1 => (0..3).map(|index| gpu(index, "A100", 20_000)).collect(),
        2 => vec![gpu(0, "T4", 10_000), gpu(1, "A100", 20_000)],
        3 => vec![],
        _ => vec![parent, instance(1), instance(2), gpu(3, "H100", 30_000)],
    };
    NodeInventory::new(devices).expect("a sound inventory")
}

/// A ledger with the history that it has seen, and what the API server knows.
pub(crate) struct Player {
    pub(crate) ledger: Ledger,
    pub(crate) now: Timestamp,
    pub(crate) bound: BTreeMap<PodUid, PodFact>,
    pub(crate) present: BTreeSet<usize>,
    kinds: [usize; 4],
    pub(crate) pools: [usize; 4],
    works: [DriverWork; 4],
    sessions: [Option<u64>; 4],
    /// What each agent was told of the allocations in its session, with their version.
    reported: [Option<(u64, Vec<Allocation>)>; 4],
    sequence: u64,
    lives: [usize; PODS],
}

impl Player {
    /// A cluster of two nodes that have reported, one that has not, and one that is unknown.
    pub(crate) fn new() -> Self {
        let mut player = Self {
            ledger: ledger_with_pools(),
            now: Timestamp::START,
            bound: BTreeMap::new(),
            present: BTreeSet::new(),
            kinds: [0; 4],
            pools: [0; 4],
            works: [DriverWork::default(); 4],
            sessions: [None; 4],
            reported: [const { None }; 4],
            sequence: 0,
            lives: [0; PODS],
        };
        for event in [
            Event::SeeNode(0),
            Event::SeeNode(1),
            Event::SeeNode(2),
            Event::Hello(0, 1),
            Event::Hello(1, 2),
        ] {
            player.play(&event);
        }
        player
    }

    /// A fresh ledger at the time of `live`, whose agents have the same devices.
    pub(crate) fn new_like(live: &Self) -> Self {
        let bound = live.bound.clone();
        let present = live.present.clone();
        let (kinds, pools, works, lives) = (live.kinds, live.pools, live.works, live.lives);
        let ledger = ledger_with_pools();
        Self {
            ledger,
            now: live.now,
            bound,
            present,
            kinds,
            pools,
            works,
            sessions: [None; 4],
            reported: [const { None }; 4],
            sequence: 0,
            lives,
        }
    }

    fn uid(&self, at: usize) -> PodUid {
        PodUid::new(format!("pod-{at}-{}", self.lives[at]))
    }

    /// Applies one event. Returns the ledger events, if the call returns them.
    pub(crate) fn play(&mut self, event: &Event) -> Option<Vec<LedgerEvent>> {
        let (ledger, now) = (&self.ledger, self.now);
        match event {
            Event::SeeNode(at) => {
                self.present.insert(*at);
                let pool = pool(self.pools[*at]);
                let name = NodeName::new(NODES[*at]);
                let mut events = ledger.see_node(&name, host(), pool);
                events.extend(ledger.see_driver_work(&name, self.works[*at]));
                Some(events)
            }
            Event::Work(at, work) => {
                self.works[*at] = *work;
                let is_there = self.present.contains(at);
                is_there.then(|| ledger.see_driver_work(&NodeName::new(NODES[*at]), *work))
            }
            Event::Move(at, to) => {
                self.pools[*at] = *to;
                if self.present.contains(at) {
                    ledger.see_node(&NodeName::new(NODES[*at]), host(), pool(*to));
                }
                None // what fits may change without any room
            }
            Event::LoseNode(at) => {
                self.present.remove(at);
                ledger.lose_node(&NodeName::new(NODES[*at]));
                None
            }
            Event::Hello(at, kind) => self.hello(*at, *kind),
            Event::Report(at, seen) => self.report(*at, seen),
            Event::Reserve(at, node, query) => {
                let uid = self.uid(*at);
                drop(ledger.reserve(&pod(uid.as_str()), NODES[*node], query, now));
                None
            }
            Event::Hold(at, node, query) => {
                Some(ledger.hold(&self.uid(*at), NODES[*node], query, now))
            }
            Event::DropHold(at) => Some(ledger.drop_hold(&self.uid(*at))),
            Event::Stand(at, query) => {
                Some(ledger.stand(Holder::first(&self.uid(*at), "", query), None, |_| true).1)
            }
            Event::StandDown(at) => Some(ledger.stand_down(&self.uid(*at))),
            // the API server refuses no Binding that it has accepted
            Event::Forget(at) => Some(ledger.forget(&self.uid(*at))),
            Event::Confirm(at) => self.bind(*at, |ledger, fact, _| {
                ledger.confirm(&fact.pod.uid);
                None
            }),
            Event::Bound(at) => self.bind(*at, |ledger, fact, now| Some(ledger.see_pod(fact, now))),
            Event::BoundBare(at, node) => self.bind_bare(*at, *node),
            Event::End(at) => {
                let uid = self.uid(*at);
                self.bound.remove(&uid);
                let events = self.ledger.end_pod(&uid, now);
                self.lives[*at] += 1;
                Some(events)
            }
            Event::Pass(millis) => {
                self.now = Timestamp::from_millis(now.millis() + millis);
                let events = ledger.tick(self.now);
                ledger.forget_gone_nodes(); // as time does where there are many
                Some(events)
            }
            Event::Learn(query) => {
                ledger.learn(PodUid::new(format!("asked-{}", self.sequence)), query);
                None
            }
        }
    }

    /// The agent of a node starts: it names every device. A `Report` that begins a session may leave some out.
    fn hello(&mut self, at: usize, kind: usize) -> Option<Vec<LedgerEvent>> {
        self.kinds[at] = kind;
        self.sessions[at] = None;
        let named =
            |_| Seen { is_healthy: true, used: None, is_sampled: false, pods: BTreeSet::new() };
        self.report(at, &(0..4).map(named).collect::<Vec<_>>())
    }

    fn bind(
        &mut self,
        at: usize,
        tell: impl Fn(&Ledger, &PodFact, Timestamp) -> Option<Vec<LedgerEvent>>,
    ) -> Option<Vec<LedgerEvent>> {
        let uid = self.uid(at);
        if let Some(held) = self.ledger.reservation(&uid) {
            let is_placed = !held.placement.devices.is_empty();
            self.bound.entry(uid.clone()).or_insert_with(|| PodFact {
                pod: held.pod,
                node: Some(held.placement.node.clone()),
                host: held.host,
                is_terminal: false,
                request: held.request,
                wants_gpu: is_placed,
                placement: Some(held.placement).filter(|_| is_placed),
                bound_by_us: true,
                moves: MoveFact::default(),
                tenure: Tenure::default(),
            });
        }
        let fact = self.bound.get(&uid)?;
        tell(&self.ledger, fact, self.now)
    }

    /// Another scheduler binds the pod, without a placement.
    fn bind_bare(&mut self, at: usize, node: usize) -> Option<Vec<LedgerEvent>> {
        let uid = self.uid(at);
        let fact = self.bound.entry(uid.clone()).or_insert_with(|| PodFact {
            pod: pod(uid.as_str()),
            node: Some(NodeName::new(NODES[node])),
            host: HostAmount { cpu: MilliCpu::new(300), memory: MemMib::new(300) },
            is_terminal: false,
            request: None,
            wants_gpu: true,
            placement: None,
            bound_by_us: false,
            moves: MoveFact::default(),
            tenure: Tenure::default(),
        });
        Some(self.ledger.see_pod(fact, self.now))
    }

    /// The node's agent reports: it sends a hello if it has no session.
    pub(crate) fn report(&mut self, at: usize, seen: &[Seen]) -> Option<Vec<LedgerEvent>> {
        self.sequence += 1;
        let devices = inventory(NODES[at], self.kinds[at]);
        let is_hello = self.sessions[at].is_none();
        let report = NodeReport {
            allocations_version: self.reported[at].as_ref().map(|(version, _)| *version),
            agent: format!("agent-{at}"),
            session: self.sessions[at],
            sequence: self.sequence,
            uses: devices.devices().iter().zip(seen).map(|(d, s)| self.use_of(d, s)).collect(),
            inventory: is_hello.then_some(devices),
        };
        let receipt = self.ledger.report(NODES[at], &report, self.now);
        self.sessions[at] = receipt.as_ref().ok().map(|receipt| receipt.session);
        let before = self.reported[at].take();
        let receipt = receipt.ok()?;
        let held = |all: &[Reservation]| all.iter().map(allocation).collect::<Vec<_>>();
        let allocations = receipt.allocations.as_deref().map(held);
        let known =
            allocations.or(before.map(|(_, known)| known)).expect("the reply to a hello has them");
        let node_state = self.ledger.node(NODES[at]).expect("it has reported");
        let now: Vec<Reservation> = node_state.reservations().values().cloned().collect();
        assert_eq!(known, held(&now), "the agent knows the reservations");
        self.reported[at] = Some((receipt.allocations_version, known));
        Some(receipt.events)
    }

    fn use_of(&self, device: &Device, seen: &Seen) -> DeviceUse {
        let process = |pod: &usize| ProcessUse {
            // of this life or the last one
            pod: Some(PodUid::new(format!("pod-{pod}-{}", self.lives[*pod].saturating_sub(1)))),
            memory: seen.used.map(MemMib::new),
        };
        DeviceUse {
            id: device.id.clone(),
            used: seen.used.map(MemMib::new),
            busy_percent: None,
            health: if seen.is_healthy { Health::Healthy } else { Health::Unhealthy },
            processes: seen.is_sampled.then(|| seen.pods.iter().map(process).collect()),
        }
    }

    /// Lets everything settle: bindings are decided, ended pods drained, holds over, and every
    /// present node reports that nothing runs.
    pub(crate) fn settle(&mut self) {
        for node in self.ledger.nodes() {
            for uid in node.reservations().keys() {
                if !self.bound.contains_key(uid) {
                    self.ledger.forget(uid);
                }
            }
        }
        self.play(&Event::Pass(100_000));
        let idle =
            |_| Seen { is_healthy: true, used: Some(0), is_sampled: true, pods: BTreeSet::new() };
        for at in self.present.clone() {
            let seen: Vec<Seen> = (0..4).map(idle).collect();
            // the first answer may request a hello from the agent
            for _ in 0..2 {
                self.report(at, &seen);
            }
        }
    }
}

/// The ledger of a node without times: what must be equal if two ledgers got the same facts.
pub(crate) fn snapshot(node: &NodeState) -> String {
    let reservations: Vec<_> = node
        .reservations()
        .values()
        .map(|held| (&held.pod, &held.placement, held.host, state_name(held.state)))
        .collect();
    let devices: Vec<_> = node
        .devices()
        .iter()
        .map(|d| {
            let sums = (d.allocated(), d.on_hold(), d.free());
            (d.device(), sums, d.health(), d.tenants(), d.neighbors(), d.slots())
        })
        .collect();
    let is_gone = node.state() == engine::model::node_state::NodeReporting::Gone;
    // of a deleted node only the tenants count
    let rest = (!is_gone).then(|| (node.host_free(), node.pool(), devices));
    format!("{} {:?} {reservations:#?} {rest:#?}", node.name(), node.state())
}

fn state_name(state: engine::model::reservation::ReservationState) -> &'static str {
    use engine::model::reservation::ReservationState;
    match state {
        ReservationState::Assumed { .. } => "assumed",
        ReservationState::Confirmed => "confirmed",
        ReservationState::Draining { .. } => "draining",
    }
}

pub(crate) fn snapshots(ledger: &Ledger) -> Vec<String> {
    ledger.nodes().iter().map(snapshot).collect()
}
