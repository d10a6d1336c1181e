//! The demo's kubelets: they start the program of each bound pod, and end and restart it.
//!
//! Where pods borrow, they also play the API server's part in moves: a pod keeps the annotations, the CPU
//! request and the status that it would have, and the ledger sees them by [`App::see_bound`] as the watch
//! would show them. What is decided is decided by the ledger: who goes home, who gives memory back, and when
//! a bind has its room.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStatus, Pod, PodStatus,
    ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use parking_lot::Mutex;

use crate::agent::simulated::fleet::FleetNode;
use crate::agent::simulated::programs::{Program, ProgramProbe, Programs};
use crate::api::commands::DemoBorrowing;
use crate::cli::demo::pods::DemoPod;
use crate::control::bind::take_back::SAMPLED_WITHIN;
use crate::control::shared::app::App;
use crate::hardware::ids::{DeviceId, NodeName, PodUid};
use crate::hardware::units::Timestamp;
use crate::kube_api::pod::gpu_container::GpuContainer;
use crate::kube_api::pod::seen_pod::SeenPod;
use crate::kube_api::pod::watch::Sink;
use crate::kube_api::request::placement::encode;
use crate::metrics::moves::{MoveReason, MoveResult};
use crate::model::reservation::{BorrowedMemory, Departure, Guest, Move, Placement};
use crate::report::bodies::AllocatedDevice;

/// Pause between two looks at what is to be restarted.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// From the change of the CPU request until the container has started again.
const RESTART: Duration = Duration::from_secs(1);

/// All kubelets of the demo.
pub(crate) struct Kubelet {
    app: Arc<App>,
    programs: Arc<Programs>,
    pods: Mutex<BTreeMap<PodUid, Hosted>>,
    counts: Mutex<DemoBorrowing>,
}

/// A bound pod.
struct Hosted {
    node: NodeName,
    /// Its object, if its container may be restarted.
    movable: Option<Movable>,
}

/// A pod that may be restarted, as the API server would have it.
struct Movable {
    pod: Pod,
    /// Containers that it has had.
    containers: u32,
    order: Option<Order>,
}

/// A restart that was ordered.
struct Order {
    reason: MoveReason,
    /// The device that is to be free, or has too little memory.
    device: DeviceId,
    due: Timestamp,
    /// Whether the container has been restarted.
    is_done: bool,
}

impl Kubelet {
    /// Kubelets without pods, whose programs are shown by the probes of `programs`.
    pub(crate) fn new(app: Arc<App>, programs: Arc<Programs>) -> Self {
        let (pods, counts) = (Mutex::default(), Mutex::default());
        Self { app, programs, pods, counts }
    }

    /// Restarts what the ledger wants restarted, forever.
    pub(crate) async fn run(&self) -> Infallible {
        let mut looks = tokio::time::interval(LOOK_EVERY);
        loop {
            looks.tick().await;
            self.look(self.app.clock.now());
        }
    }

    /// The probe of a node, which shows the programs there.
    pub(crate) fn probe(&self, node: &FleetNode) -> ProgramProbe {
        ProgramProbe::new(node, Arc::clone(&self.programs))
    }

    /// What happened so far.
    pub(crate) fn counts(&self) -> DemoBorrowing {
        let bursts = self.programs.counts();
        DemoBorrowing {
            bursts: bursts.served,
            bursts_refused: bursts.refused,
            ..*self.counts.lock()
        }
    }

    /// Programs that were started where others still ran who leave them no room.
    pub(crate) fn crowded(&self) -> u64 {
        self.programs.counts().crowded
    }

    /// Starts a pod that was just bound, with the placement that the ledger has for it.
    ///
    /// # Errors
    /// A pod of the stream that cannot be read.
    pub(crate) fn start(&self, pod: &DemoPod, now: Timestamp) -> Result<()> {
        let uid = PodUid::new(pod.uid.as_str());
        let Some(held) = self.app.ledger.reservation(&uid) else { return Ok(()) };
        let mut pod: Pod =
            serde_json::from_str(&pod.json).context("cannot read the demo's own pod")?;
        let mut pods = self.pods.lock();
        let movable = SeenPod::from_api(&pod).gpu_container.map(|container| {
            let annotations = encode(&held.placement).ok().into_iter().flatten();
            pod.metadata.annotations.get_or_insert_default().extend(annotations);
            if let Some(spec) = &mut pod.spec {
                spec.node_name = Some(held.placement.node.to_string());
            }
            let mut movable = Movable { pod, containers: 0, order: None };
            movable.run_next(&container.name, container.cpu_milli);
            self.app.see_bound(&SeenPod::from_api(&movable.pod));
            movable
        });
        self.start_program(&uid, &held.placement, now);
        pods.insert(uid, Hosted { node: held.placement.node.clone(), movable });
        Ok(())
    }

    /// Ends a pod. The ledger knows of it already.
    pub(crate) fn end(&self, uid: &PodUid, now: Timestamp) {
        if let Some(hosted) = self.pods.lock().remove(uid) {
            self.programs.end(hosted.node.as_str(), uid.as_str(), now);
            self.app.pod_ended(uid);
        }
    }

    /// The program of a container, on the devices that the annotations of its pod name.
    fn start_program(&self, uid: &PodUid, placement: &Placement, now: Timestamp) {
        let node = self.app.ledger.node(placement.node.as_str());
        let limit_of = |on: &DeviceId| {
            let device = node.as_ref()?.devices().iter().find(|it| it.device().id == *on)?;
            device.memory_limit(uid)
        };
        let runs_on = placement.runs_on();
        let devices = runs_on.iter().zip(&placement.devices).map(|(on, placed)| AllocatedDevice {
            uuid: on.to_string(),
            memory_mib: placed.demand.memory.mib(),
            share_millionths: placed.demand.share.millionths(),
        });
        let limit_mib = runs_on.first().and_then(limit_of).map(|limit| limit.mib());
        let program = Program { devices: devices.collect(), limit_mib };
        self.programs.start(placement.node.as_str(), uid.as_str(), program, now);
    }

    fn look(&self, now: Timestamp) {
        let mut pods = self.pods.lock();
        for pod in self.app.ledger.recalled(None) {
            if let Some(movable) = idle(&mut pods, &pod.uid) {
                self.call_home(&pod.uid, movable, now);
            }
        }
        for pod in self.app.ledger.to_give_back(None) {
            if let Some(movable) = idle(&mut pods, &pod.uid) {
                self.take_back(&pod.uid, movable, now);
            }
        }
        for (uid, hosted) in pods.iter_mut() {
            if let Some(movable) = &mut hosted.movable {
                self.proceed(uid, &hosted.node, movable, now);
            }
        }
    }

    /// Both writes of a move home, as `control/bind/recall` makes them: first the annotations, then the CPU
    /// request.
    fn call_home(&self, uid: &PodUid, movable: &mut Movable, now: Timestamp) {
        let ledger = &self.app.ledger;
        let Some(held) = ledger.reservation(uid).filter(|it| it.departure == Departure::Recalled)
        else {
            return;
        };
        if ledger.let_stay(uid) || ledger.waits_for_memory_at_home(uid) {
            return;
        }
        let seen = SeenPod::from_api(&movable.pod);
        let (Some(container), Some(guest)) = (&seen.gpu_container, &held.placement.guest) else {
            return;
        };
        let (name, cpu_milli) = (container.id.as_str().into(), container.cpu_milli);
        let leaving = Some(Move { container: name, cpu_milli });
        let written = Guest { leaving: leaving.clone(), ..guest.clone() };
        let written = Placement { guest: Some(written), ..held.placement.clone() };
        let Ok(annotations) = encode(&written) else { return };
        ledger.write_move(uid, leaving);
        self.app.edits.wrote(uid, &written.node, &annotations);
        movable.pod.metadata.annotations.get_or_insert_default().extend(annotations);
        movable.resize(container);
        let (reason, device) = (MoveReason::Recall, guest.on.clone());
        movable.order = Some(Order { reason, device, due: now.plus(RESTART), is_done: false });
    }

    /// The change of the CPU request by which `control/bind/take_back` has a container restarted, unless
    /// that was done often in vain.
    fn take_back(&self, uid: &PodUid, movable: &mut Movable, now: Timestamp) {
        let app = &self.app;
        let Some(debt) = app.ledger.owes_memory(uid) else { return };
        if !app.moves.may_restart(uid, now) {
            app.outbox.push(app.ledger.note_borrowed(uid, BorrowedMemory::Kept));
            app.metrics.moved(MoveReason::TakeBack, MoveResult::Failed);
            self.counts.lock().failed += 1;
            return;
        }
        let Some(container) = SeenPod::from_api(&movable.pod).gpu_container else { return };
        app.outbox.push(app.ledger.note_borrowed(uid, BorrowedMemory::GivingBack));
        app.moves.restarted(uid, now);
        movable.resize(&container);
        let (reason, device) = (MoveReason::TakeBack, debt.device);
        movable.order = Some(Order { reason, device, due: now.plus(RESTART), is_done: false });
    }

    /// Restarts a container that is due, and later notes that this has had its effect.
    fn proceed(&self, uid: &PodUid, node: &NodeName, movable: &mut Movable, now: Timestamp) {
        let Some(order) = movable.order.as_mut().filter(|order| order.due <= now) else { return };
        if !order.is_done {
            (order.is_done, order.due) = (true, now);
            let seen = SeenPod::from_api(&movable.pod);
            let Some(container) = &seen.gpu_container else { return };
            movable.run_next(&container.name, container.cpu_milli);
            if let Ok(Some(placement)) = &seen.placement {
                self.start_program(uid, placement, now);
            }
            return self.app.see_bound(&SeenPod::from_api(&movable.pod));
        }
        let ledger = &self.app.ledger;
        let is_shown = match order.reason {
            MoveReason::Recall => {
                ledger.reservation(uid).is_none_or(|held| held.departure == Departure::Gone)
            }
            MoveReason::TakeBack => {
                let listed = ledger.listed(node.as_str(), &order.device);
                listed.is_some_and(|listed| listed > order.due.plus(SAMPLED_WITHIN))
            }
        };
        if !is_shown {
            return;
        }
        self.app.metrics.moved(order.reason, MoveResult::Done);
        let mut counts = self.counts.lock();
        match order.reason {
            MoveReason::Recall => counts.recalls += 1,
            MoveReason::TakeBack => counts.take_backs += 1,
        }
        self.app.outbox.push(ledger.end_giving_back(uid));
        movable.order = None;
    }
}

/// A movable pod of which no restart is ordered.
fn idle<'p>(pods: &'p mut BTreeMap<PodUid, Hosted>, uid: &PodUid) -> Option<&'p mut Movable> {
    pods.get_mut(uid)?.movable.as_mut().filter(|movable| movable.order.is_none())
}

impl Movable {
    /// The status after the start of its next container.
    fn run_next(&mut self, name: &str, cpu_milli: u64) {
        let running = ContainerState {
            running: Some(ContainerStateRunning::default()),
            ..ContainerState::default()
        };
        let requests = BTreeMap::from([("cpu".to_owned(), Quantity(format!("{cpu_milli}m")))]);
        let resources =
            ResourceRequirements { requests: Some(requests), ..ResourceRequirements::default() };
        let status = ContainerStatus {
            name: name.to_owned(),
            container_id: Some(format!("demo://{}", self.containers)),
            restart_count: i32::try_from(self.containers).unwrap_or(i32::MAX),
            state: Some(running),
            resources: Some(resources),
            ..ContainerStatus::default()
        };
        self.containers += 1;
        self.pod.status = Some(PodStatus {
            phase: Some("Running".to_owned()),
            container_statuses: Some(vec![status]),
            ..self.pod.status.take().unwrap_or_default()
        });
    }

    /// Changes the CPU request of its container as little as possible. Pods of the stream have no limit.
    fn resize(&mut self, container: &GpuContainer) {
        let written = SeenPod::from_api(&self.pod).placement.ok().flatten();
        let moved = written.and_then(|it| it.guest?.leaving);
        let cpu = container.resized(moved.as_ref()).next();
        let containers = self.pod.spec.iter_mut().flat_map(|spec| &mut spec.containers);
        let is_it = |it: &&mut Container| it.name == container.name;
        let requests = containers.into_iter().find(is_it).and_then(|it| it.resources.as_mut());
        if let (Some((cpu, _)), Some(resources)) = (cpu, requests) {
            let requests = resources.requests.get_or_insert_default();
            requests.insert("cpu".to_owned(), Quantity(format!("{cpu}m")));
        }
    }
}

#[cfg(test)]
mod tests;
