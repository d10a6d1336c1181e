//! The demo's kubelets: they start the program of each bound pod, and end and restart it.
//!
//! A container whose CPU request was changed in place restarts a second later, on the devices that the
//! annotations of its pod name then. They write the status of pods whose containers may be restarted, and
//! decide nothing: who goes home and who gives memory back is gpupack's to say.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;

use crate::demo::api_server::ApiServer;
use crate::simulated::fleet::FleetNode;
use crate::simulated::programs::{Program, ProgramProbe, Programs};
use control::metrics::moves::{MoveReason, MoveResult};
use control::shared::app::App;
use engine::model::reservation::Placement;
use kube_api::pod::seen_pod::SeenPod;
use wire::api::commands::DemoBorrowing;
use wire::ids::{NodeName, PodUid};
use wire::report::bodies::AllocatedDevice;
use wire::units::Timestamp;

/// Pause between two looks at what is to be restarted.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// From the change of the CPU request until the container has started again.
const RESTART: Duration = Duration::from_secs(1);

/// All kubelets of the demo.
pub(crate) struct Kubelet {
    app: Arc<App>,
    api: ApiServer,
    programs: Arc<Programs>,
    pods: Mutex<BTreeMap<PodUid, Hosted>>,
}

/// A bound pod.
struct Hosted {
    node: NodeName,
    /// Containers that it has had.
    containers: u32,
    /// When its container is to be restarted.
    due: Option<Timestamp>,
}

impl Kubelet {
    /// Kubelets without pods, whose programs are shown by the probes of `programs`.
    pub(crate) fn new(app: Arc<App>, api: ApiServer, programs: Arc<Programs>) -> Self {
        Self { app, api, programs, pods: Mutex::default() }
    }

    /// Restarts what is to be restarted, forever.
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
        let metrics = &self.app.metrics;
        DemoBorrowing {
            bursts: bursts.served,
            bursts_refused: bursts.refused,
            recalls: metrics.moves(MoveReason::Recall, MoveResult::Done),
            take_backs: metrics.moves(MoveReason::TakeBack, MoveResult::Done),
            failed: metrics.moves(MoveReason::TakeBack, MoveResult::Failed),
        }
    }

    /// Programs that were started where others still ran who leave them no room.
    pub(crate) fn crowded(&self) -> u64 {
        self.programs.counts().crowded
    }

    /// Starts a pod that was just bound.
    pub(crate) fn start(&self, uid: &PodUid, now: Timestamp) {
        let mut pods = self.pods.lock(); // what is resized meanwhile is looked at later
        let Some(pod) = self.api.pod(uid).map(|pod| SeenPod::from_api(&pod)) else { return };
        let Some(node) = pod.node.clone() else { return };
        let mut hosted = Hosted { node, containers: 0, due: None };
        self.run_next(&pod, &mut hosted, now);
        pods.insert(uid.clone(), hosted);
    }

    /// Ends a pod.
    pub(crate) fn end(&self, uid: &PodUid, now: Timestamp) {
        if let Some(hosted) = self.pods.lock().remove(uid) {
            self.programs.end(hosted.node.as_str(), uid.as_str(), now);
        }
    }

    fn look(&self, now: Timestamp) {
        let mut pods = self.pods.lock();
        for uid in self.api.take_resized() {
            if let Some(hosted) = pods.get_mut(&uid) {
                hosted.due.get_or_insert(now.plus(RESTART));
            }
        }
        for (uid, hosted) in pods.iter_mut() {
            if hosted.due.take_if(|due| *due <= now).is_some()
                && let Some(pod) = self.api.pod(uid)
            {
                self.run_next(&SeenPod::from_api(&pod), hosted, now);
            }
        }
    }

    /// Starts the next container of a pod, and writes its status if it may be restarted.
    fn run_next(&self, pod: &SeenPod, hosted: &mut Hosted, now: Timestamp) {
        let uid = &pod.pod.uid;
        if let Ok(Some(placement)) = &pod.placement {
            self.start_program(uid, placement, now);
        }
        if let Some(container) = &pod.containers.gpu {
            let requests = json!({"cpu": format!("{}m", container.cpu_milli)});
            let status = json!({"name": container.name, "image": "", "imageID": "", "ready": true,
                "containerID": format!("demo://{}", hosted.containers),
                "restartCount": hosted.containers, "state": {"running": {}},
                "resources": {"requests": requests}});
            let status = json!({"phase": "Running", "containerStatuses": [status]});
            self.api.set_status(uid, status);
        }
        hosted.containers += 1;
    }

    /// The program of a container, on the devices that the annotations of its pod name.
    fn start_program(&self, uid: &PodUid, placement: &Placement, now: Timestamp) {
        let node = self.app.ledger.node(placement.node.as_str());
        let runs_on = placement.runs_on();
        let devices = runs_on.iter().zip(&placement.devices).map(|(on, placed)| AllocatedDevice {
            uuid: on.to_string(),
            memory_mib: placed.demand.memory.mib(),
            share_millionths: placed.demand.share.millionths(),
        });
        let limit = runs_on.first().and_then(|on| {
            let devices = node.as_ref()?.devices();
            devices.iter().find(|device| device.device().id == *on)?.memory_limit(uid)
        });
        let limit_mib = limit.map(|limit| limit.mib());
        let program = Program { devices: devices.collect(), limit_mib };
        self.programs.start(placement.node.as_str(), uid.as_str(), program, now);
    }
}

#[cfg(test)]
mod tests;
