//! What all handlers share: the ledger, the waiting pods, the clock, and the writers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use dashmap::{DashMap, DashSet};

use crate::clearing::Clears;
use crate::metrics::labels::RequeueResult;
use crate::metrics::registry::Metrics;
use crate::moving::Moving;
use crate::shared::bind_locks::BindLocks;
use crate::shared::edited::Edits;
use crate::shared::in_flight::InFlight;
use crate::shared::kept_suggestions::Reasons;
use crate::shared::leader::{Lead, Replica};
use crate::shared::other_fences::OtherFences;
use crate::shared::outbox::{NewRooms, Outbox};
use crate::shared::passed::PassedPods;
use crate::shared::priority_classes::PriorityClasses;
use engine::hardware::pool::ConfiguredIsolation;
use engine::ledger::change::hung::Hung;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::query::reading::Readiness;
use engine::ledger::suggest::preemptors::Preemptors;
use engine::ledger::suggest::search::{Change, Suggestion};
use engine::ledger::suggest::together::BoundGroups;
use engine::ledger::suggest::waiting::{Requeued, WaitingPods};
use engine::model::fit::HostRule;
use engine::model::isolation::DriverLimits;
use engine::model::request::{Amount, GpuRequest, Isolation, Purpose};
use engine::model::reservation::{Placement, PodRef};
use engine::scoring::strategy::Strategy;
use kube_api::config::file::Config;
use kube_api::config::pods::requests::RequestRules;
use kube_api::pod::lists::Lists;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::start_failure::StartFailure;
use kube_api::request::placement::DEVICES;
use kube_api::request::room_note::RoomNote;
use kube_api::write::events::{Notice, NoticeReason, NoticeSender};
use kube_api::write::target::PodKey;
use kube_api::write::term::Term;
use kube_api::write::writer::ApiWriter;
use runtime::clock::Clock;
use runtime::step::outside::Outside;
use wire::ids::{DeviceId, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::MemMib;

/// What a CUDA context takes of a GPU's memory before the program allocates any: typically 300 to
/// 500 MiB on data center GPUs.
const CUDA_CONTEXT: MemMib = MemMib::new(512);

/// What all handlers share.
pub struct App {
    /// The state of all nodes.
    pub ledger: Arc<Ledger>,
    /// The pods without a node, with the answer to their last call.
    pub waiting: WaitingPods,
    /// Suggestions for the pods that wait.
    pub reasons: Reasons,
    /// The pods, as the API server shows them.
    pub pods: KnownPods,
    /// Room that is being made and kept.
    pub room: Rooms,
    /// Bindings and fences.
    pub binding: Bindings,
    /// Orders of people to clear a GPU.
    pub clears: Clears,
    /// Whether this process acts.
    pub lead: Lead,
    pub clock: Clock,
    /// What carries out calls of the API server, times and long work.
    pub outside: Outside,
    pub config: Config,
    pub request_rules: RequestRules,
    pub metrics: Metrics,
    /// Writes Bindings, requeues, fences and placements to the API server.
    pub writer: ApiWriter,
    /// Writes events on pods.
    pub notices: NoticeSender,
    /// Ledger events that background loops have yet to handle.
    pub outbox: Outbox,
}

/// The pods, as the API server shows them. Nothing that a verb's caller says gets here.
#[derive(Default)]
pub struct KnownPods {
    /// Those that wait: what a Binding needs.
    pub pending: DashMap<PodUid, Arc<SeenPod>>,
    /// Pods of ours without a node and without a GPU request.
    pub without_gpu: DashSet<PodUid>,
    /// Pods with scheduling gates that request a GPU. People see them. Otherwise they count like
    /// pods that the watch does not show, since kube-scheduler does not look at them.
    pub gated: DashMap<PodUid, Arc<SeenPod>>,
    /// Pods with a node that request a GPU, and show no placement or no request that can be read.
    pub unreadable: DashMap<PodUid, Arc<SeenPod>>,
    /// The placed pods with a container that could not be started, by UID.
    pub start_failures: DashMap<PodUid, StartFailure>,
    /// The priority classes of the pods that hold something.
    pub classes: PriorityClasses,
    /// Pods whose placement another client edited.
    pub edits: Edits,
    /// What lists of the API server said.
    pub lists: Arc<Lists>,
}

impl KnownPods {
    /// Whether the watch shows a pod as one of ours without a node.
    pub fn is_shown_waiting(&self, uid: &PodUid) -> bool {
        self.pending.contains_key(uid) || self.without_gpu.contains(uid)
    }
}

/// Room that is being made and kept.
#[derive(Default)]
pub struct Rooms {
    /// The pods for which room is being made.
    pub preemptors: Preemptors,
    /// The pods of groups that are bound.
    pub bound_groups: BoundGroups,
    /// The guests that are being moved home.
    pub moves: Moving,
    /// Where room appeared, for the loop that keeps it.
    pub(crate) new_rooms: NewRooms,
}

/// Bindings and fences.
#[derive(Default)]
pub struct Bindings {
    /// The binds that are going on.
    pub binds: BindLocks,
    /// Pods that another process wrote last.
    pub other_fences: OtherFences,
    /// The same of bound pods, as far as this process wanted to write on them.
    pub other_placements: OtherFences,
    /// What *filter* passed in the last 15 minutes.
    pub passed: PassedPods,
    /// Bindings that the watch has not shown yet, with the precise time when each was posted.
    pub unseen_binds: DashMap<PodUid, Duration>,
    /// The Bindings that may be on their way, while this replica leads.
    pub in_flight: InFlight,
}

impl App {
    /// An extender over an empty ledger, with everything that `config` says.
    pub fn new(
        ledger: Arc<Ledger>,
        config: Config,
        writer: ApiWriter,
        notices: NoticeSender,
    ) -> Self {
        let outside = writer.outside().clone();
        if let Some(rules) = config.shares.rules() {
            ledger.teams.rule(rules, config.request_rules().prices);
        }
        Self {
            ledger,
            waiting: WaitingPods::default(),
            reasons: Reasons::default(),
            pods: KnownPods::default(),
            room: Rooms::default(),
            binding: Bindings::default(),
            clears: Clears::default(),
            lead: Lead::new(None),
            clock: outside.clock(),
            outside,
            request_rules: config.request_rules(),
            config,
            metrics: Metrics::new(),
            writer,
            notices,
            outbox: Outbox::default(),
        }
    }

    /// One of several replicas, which does not lead yet.
    #[must_use]
    pub fn among(self, replica: Replica) -> Self {
        Self { lead: Lead::new(Some(replica)), ..self }
    }

    /// An extender without an API server: nothing carries out its calls.
    #[doc(hidden)] // for tests and benches of what makes no call
    pub fn alone(ledger: Arc<Ledger>, config: Config, clock: Clock) -> Self {
        let term = Term::alone(clock, 0);
        let writer = ApiWriter::new(Outside::new(clock), config.api_timeout, term);
        Self::new(ledger, config, writer, NoticeSender::unread())
    }

    /// The placement request of a pod; `None` if it requests no GPU, or its GPU request is faulty.
    /// kube-scheduler checks CPU and host memory.
    pub fn query(&self, pod: &SeenPod) -> Option<PlacementRequest> {
        let request = self.ruled_request(pod)?;
        // Elsewhere any tenant may write the label of probes.
        let is_ours = *pod.namespace == *self.config.agents.namespace;
        let purpose = if is_ours { request.purpose } else { Purpose::Work };
        let gpu = GpuRequest { min_memory: self.config.min_memory, purpose, ..request };
        let strategy = Strategy::Policy(gpu.policy.unwrap_or(self.config.policy));
        let (gpu, host_rule) = (Some(gpu), HostRule::Trusted);
        Some(PlacementRequest { gpu, host: pod.host, host_rule, strategy })
    }

    /// What a pod requests, with the operator's rules for its namespace and class of workloads.
    pub(crate) fn ruled_request(&self, pod: &SeenPod) -> Option<GpuRequest> {
        let request = pod.request.as_ref().ok().and_then(Option::as_ref)?;
        let rules = &self.request_rules;
        let class = rules.workloads.of(&pod.scheduling.priority_class);
        Some(GpuRequest {
            policy: request.policy.or_else(|| class?.policy),
            pools: rules.access.of(&pod.namespace).pools.clone(),
            ..rules.meant(request)
        })
    }

    /// Whether pods of this namespace may do what a suggestion proposes.
    pub(crate) fn may_do(&self, namespace: &str, suggestion: &Suggestion) -> bool {
        let Change::Request(_, changed) = &suggestion.change else { return true };
        // That part of the GPU is not what the fraction would mean.
        let gpu = changed.gpu.as_ref();
        let is_part = gpu.is_some_and(|gpu| matches!(gpu.amount, Amount::Fraction(_)));
        if self.request_rules.fraction_of.is_some() && is_part {
            return false;
        }
        let allowed = &self.request_rules.access.of(namespace).isolation;
        let isolation = gpu.map_or(Isolation::None, |gpu| gpu.isolation);
        allowed.as_ref().is_none_or(|allowed| allowed.contains(&isolation))
    }

    /// Forgets a pod that is bound or gone.
    pub fn settle_pod(&self, uid: &PodUid) {
        self.waiting.remove(uid);
        self.room.preemptors.forget(uid);
        self.pods.pending.remove(uid);
        self.pods.gated.remove(uid);
    }

    /// Notes how a requeue ended, if one did. The room may be for another pod now.
    pub fn requeued(&self, ended: Option<Requeued>) {
        let Some(ended) = ended else { return };
        self.metrics.requeued(match ended {
            Requeued::Helped => RequeueResult::Helped,
            Requeued::Refused => RequeueResult::Refused,
            Requeued::LeftOut => RequeueResult::NodeLeftOut,
            Requeued::Unanswered => RequeueResult::Unanswered,
            Requeued::Gone => RequeueResult::Gone,
        });
        self.outbox.nudge();
    }

    /// Writes a pod event, for `kubectl describe`, if this replica leads. Never waits.
    pub fn tell(&self, pod: &PodRef, reason: NoticeReason, note: String) {
        if !self.lead.leading.is_here() {
            return;
        }
        match PodKey::of(pod) {
            Ok(key) => {
                let notice = Notice { key, uid: pod.uid.clone(), reason, note };
                self.notices.offer(notice, self.clock.now());
            }
            Err(error) => tracing::debug!(pod_uid = %pod.uid, %error, "no event for this pod"),
        }
    }

    /// Whether an event about a pod would be written: the same one was not written within the
    /// minute.
    pub fn is_due(&self, uid: &PodUid, reason: NoticeReason) -> bool {
        !self.notices.is_muted(uid, reason, self.clock.now())
    }

    /// Writes an event where a pod is placed, how it is isolated there, and whether it sees its
    /// GPU. If the operator does not want these events, only a pod that does not see it gets one.
    pub fn tell_placed(&self, pod: &SeenPod, placement: &Placement) {
        if !self.config.placed_events && pod.containers.takes_devices {
            return;
        }
        let mut note = format!("placed on node {}", placement.node);
        for device in &placement.devices {
            let (share, memory) = (device.demand.share, device.demand.memory);
            let _ = write!(note, "; {}: {share} of its compute, {memory}", device.id);
        }
        if let Some(guest) = &placement.guest {
            let _ = write!(note, "; it runs on {} until another pod needs that", guest.on);
        }
        let limits = self.config.webhook.memory_limit.driver_limits();
        note.push_str(match placement.isolation {
            ConfiguredIsolation::None if limits == DriverLimits::Configured => {
                "; the driver is configured to limit its memory; `/v1/state` confirms it later"
            }
            ConfiguredIsolation::None if limits == DriverLimits::OfClients => {
                "; MPS is configured to limit its memory, as far as its programs cooperate; \
                 `/v1/state` confirms once it runs"
            }
            ConfiguredIsolation::None => "; its memory is not isolated from neighbors on the GPU",
            ConfiguredIsolation::Mps => {
                "; MPS is configured to limit the memory of each tenant of the GPU; this is not verified"
            }
            ConfiguredIsolation::Driver => {
                "; the driver is configured to limit the memory of each tenant of the GPU; this is not verified"
            }
            ConfiguredIsolation::Hardware => "; it has no neighbors on the device",
        });
        if !pod.containers.takes_devices {
            note.push_str(
                "; it does not see its GPU: no container has a variable from the annotation ",
            );
            note.push_str(DEVICES);
        }
        self.tell(&pod.pod, NoticeReason::GpuPlaced, note);
    }

    /// Warns about a placement on which a CUDA program can hardly start.
    pub fn tell_small(&self, pod: &SeenPod, placement: &Placement) {
        let least = placement.devices.iter().map(|device| device.demand.memory).min();
        let Some(memory) = least.filter(|memory| *memory < CUDA_CONTEXT) else { return };
        let note = format!(
            "it gets {memory} of GPU memory, and a CUDA context alone takes up to {CUDA_CONTEXT}: ask \
             for more by `gpu-memory` or `gpu-fraction`"
        );
        self.tell(&pod.pod, NoticeReason::GpuMemorySmall, note);
    }

    /// Tells a pod that nothing waits for its GPUs any more, since it does not end.
    pub(crate) fn tell_hung(&self, Hung { pod, node, devices }: &Hung) {
        let devices: Vec<&str> = devices.iter().map(DeviceId::as_str).collect();
        let devices = devices.join(", ");
        tracing::warn!(pod_uid = %pod.uid, %pod, %node, devices, "it should have ended, and still holds its GPUs");
        let note = format!(
            "it should have ended and still holds {devices} on node {node}: no pod waits for that any more; check \
             kubelet on the node, and processes that do not end"
        );
        self.tell(pod, NoticeReason::GpuNotReleased, note);
    }

    /// How many entries the tables have that grow with pods, nodes or calls, by name.
    #[doc(hidden)] // for tests, which compare them with their bounds
    pub fn entries(&self) -> BTreeMap<&'static str, usize> {
        let own = [
            ("waiting", self.waiting.count()),
            ("preemptors", self.room.preemptors.count()),
            ("bound groups", self.room.bound_groups.count()),
            ("pending", self.pods.pending.len()),
            ("without a GPU", self.pods.without_gpu.len()),
            ("fences of other processes", self.binding.other_fences.count()),
            ("placements of other processes", self.binding.other_placements.count()),
            ("gated", self.pods.gated.len()),
            ("unreadable", self.pods.unreadable.len()),
            ("start failures", self.pods.start_failures.len()),
            ("binds", self.binding.binds.count()),
            ("unseen binds", self.binding.unseen_binds.len()),
            ("priority classes", self.pods.classes.count()),
            ("pods of teams", self.ledger.teams.count()),
            ("moves", self.room.moves.count()),
            ("edits", self.pods.edits.count()),
            ("written annotations", self.pods.edits.written_count()),
            ("reasons", self.reasons.count()),
            ("effects", self.outbox.count()),
            ("orders to clear a GPU", self.clears.count()),
            ("in flight", self.binding.in_flight.count()),
            ("notices", self.notices.remembered()),
        ];
        self.ledger.entries().into_iter().chain(own).collect()
    }

    /// The time at the API server, in seconds since 1970: ages of its objects are by this, whatever the clock of
    /// this machine says.
    pub fn api_seconds(&self) -> u64 {
        self.outside.api_server().unix_seconds()
    }

    /// Whether calls are answered now: the ledger is complete, no Binding of an earlier run can
    /// succeed any more, and the room that an earlier process was making is kept. A follower needs the
    /// ledger alone.
    pub fn readiness(&self) -> Readiness {
        let readiness = self.ledger_readiness();
        match readiness == Readiness::Ready
            && self.has_begun()
            && self.room.preemptors.has_earlier()
        {
            true => Readiness::NotListed,
            false => readiness,
        }
    }

    /// The room that earlier processes were making for pods that still wait.
    pub(crate) fn earlier_rooms(&self) -> Vec<(PodUid, RoomNote)> {
        let earlier = self.room.preemptors.earlier().into_iter();
        let noted = earlier.filter_map(|uid| {
            let note = self.pods.pending.get(&uid)?.annotations.room_note.clone()?;
            Some((uid, note))
        });
        noted.collect()
    }

    /// The same without that room.
    pub fn ledger_readiness(&self) -> Readiness {
        let is_fenced = self.lead.is_fenced() || mutated(Mutation::AnswersBeforeFence);
        if self.has_begun() && !is_fenced {
            return Readiness::NotListed;
        }
        self.ledger.readiness(self.clock.now())
    }

    /// Ends this long after the process began to stop.
    pub async fn stopped_for(&self, time: Duration) {
        self.lead.stopped().await;
        self.outside.sleep(time).await;
    }

    /// Whether this process has begun to lead, also if it may not write just now.
    fn has_begun(&self) -> bool {
        self.writer.term().writer().is_some()
    }

    /// Whether this replica leads, and no other one can by now. A process that was frozen has not noticed yet that
    /// its term has ended: what it would answer may be old.
    pub fn leads(&self) -> bool {
        if !mutated(Mutation::StaleAnswer)
            && self.lead.leading.lapse(|| !self.writer.term().is_valid())
        {
            tracing::warn!("the Lease was not renewed in time: nothing is answered until it is");
        }
        self.lead.leading.is_here()
    }
}
