//! The life of the demo's cluster: pods come, are scheduled, wait, run and end.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use crate::demo::api_server::ApiServer;
use crate::demo::kubelet::Kubelet;
use crate::demo::pods::{DemoPod, Draw, PodStream};
use crate::demo::scheduler::{Choice, Scheduler, Verdict};
use crate::simulated::fleet::FleetNode;
use control::shared::app::App;
use engine::model::node_state::NodeState;
use engine::waste::request_mix::WINDOW;
use kube_api::pod::seen_pod::SeenPod;
use wire::api::commands::PodCounts;
use wire::ids::PodUid;
use wire::units::Share;

/// Pods refused in a row after which the fleet counts as full.
const FULL_AFTER: u32 = 200;

/// Most binds at a time while the base load is placed, so that it ends near its target.
const BINDS_MAX: usize = 8;

/// Nodes that are filled together if the base load does not go over HTTP.
const ZONE: usize = 100;

/// Pods refused in a zone after which it counts as full.
const ZONE_FULL_AFTER: usize = 50;

/// First pause before a waiting pod is tried again, and the longest one, as in kube-scheduler.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// How long a pod waits before its owner deletes it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Shortest mean life of a pod, so that a small demo can be read.
const LIFE_MIN: Duration = Duration::from_secs(10);

/// The fate of the pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct DemoFigures {
    pub(crate) pods: PodCounts,
    /// Last refusal of each pod that waits or was refused, by its UID.
    pub(crate) reasons: BTreeMap<String, String>,
    /// Most overallocated devices at a time on a node to which a pod was just bound.
    pub(crate) overallocated_max: usize,
    /// From the start until the base load was placed.
    pub(crate) filled_after: Duration,
}

/// The pods that come after the base load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Arrivals {
    /// Their number; `None`: no end.
    pub(crate) pods: Option<u64>,
    /// Pods per second; `None`: one after the other without a pause.
    pub(crate) per_second: Option<f64>,
    /// Whether pods end, and waiting ones are tried again.
    pub(crate) is_alive: bool,
}

/// A waiting pod.
struct Waiting {
    pod: DemoPod,
    since: Duration,
    pause: Duration,
}

/// The demo's cluster.
pub(crate) struct Drive {
    app: Arc<App>,
    api: ApiServer,
    figures: watch::Sender<DemoFigures>,
    stream: PodStream,
    scheduler: Scheduler,
    random: ChaCha8Rng,
    stop: watch::Receiver<bool>,
    running: Vec<PodUid>,
    ends: BinaryHeap<Reverse<(Duration, PodUid)>>,
    /// Waiting pods by the time of their next try.
    waiting: BTreeMap<(Duration, u64), Waiting>,
    tries: u64,
    /// Allocated share of running pods, in millionths of a GPU.
    allocated_millionths: u64,
    life: Option<Duration>,
    /// Runs the bound pods, where they borrow.
    kubelet: Option<Arc<Kubelet>>,
    /// Binds that wait until others have made room. Only with kubelets: they take seconds.
    binding: JoinSet<(Waiting, Result<Verdict>)>,
}

impl Drive {
    /// Adds pods that request slots, instances and isolation.
    pub(crate) fn request_of_pools(&mut self) {
        self.stream.request_of_pools();
    }

    /// Adds notebooks that borrow. The kubelets run all pods.
    pub(crate) fn lend(&mut self, kubelet: Arc<Kubelet>) {
        self.stream.burst();
        self.kubelet = Some(kubelet);
    }

    /// A cluster without pods.
    pub(crate) fn new(
        app: Arc<App>,
        api: ApiServer,
        figures: watch::Sender<DemoFigures>,
        scheduler: Scheduler,
        seed: u64,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self {
            app,
            api,
            figures,
            stream: PodStream::new(seed),
            scheduler,
            random: ChaCha8Rng::seed_from_u64(seed ^ 1),
            stop,
            running: Vec::new(),
            ends: BinaryHeap::new(),
            waiting: BTreeMap::new(),
            tries: 0,
            allocated_millionths: 0,
            life: None,
            kubelet: None,
            binding: JoinSet::new(),
        }
    }

    fn is_stopped(&self) -> bool {
        *self.stop.borrow()
    }

    // --- base load -------------------------------------------------------------------------------

    /// Places valid pods over HTTP until `target` of all compute is allocated, or nothing fits.
    ///
    /// # Errors
    /// A call without a proper answer.
    pub(crate) async fn fill(&mut self, target: Share) -> Result<()> {
        let mut failures = 0;
        while self.allocated_millionths < target.millionths()
            && failures < FULL_AFTER
            && !self.is_stopped()
        {
            let pod = self.next_pod(Draw::Sound);
            failures = if self.arrive(pod).await? { 0 } else { failures + 1 };
            while self.binding.len() >= BINDS_MAX {
                self.next_bound().await?;
            }
        }
        while !self.binding.is_empty() && !self.is_stopped() {
            self.next_bound().await?;
        }
        Ok(())
    }

    /// The same without HTTP, by the ledger's functions that the verbs call. It fills one zone of
    /// `nodes` after the other to `fill`, so that not every pod checks every node. Pods that fit
    /// into no zone come over HTTP at the end.
    ///
    /// # Errors
    /// A call without a proper answer.
    pub(crate) async fn fill_directly(&mut self, nodes: &[FleetNode], fill: Share) -> Result<()> {
        let mut ready: VecDeque<DemoPod> = self.learnt().into();
        let mut target = 0;
        for zone in nodes.chunks(ZONE) {
            let names: Vec<&str> = zone.iter().map(|node| node.name.as_str()).collect();
            let gpus = zone.iter().map(|node| u64::try_from(node.gpus.len()).unwrap_or(0));
            target += gpus.sum::<u64>() * fill.millionths();
            let mut left_over = Vec::new();
            while self.allocated_millionths < target
                && left_over.len() < ZONE_FULL_AFTER
                && !self.is_stopped()
            {
                let pod = ready.pop_front().unwrap_or_else(|| self.next_pod(Draw::Sound));
                if !self.allocate(&pod, &names)? {
                    left_over.push(pod);
                }
            }
            left_over.into_iter().rev().for_each(|pod| ready.push_front(pod));
            tokio::task::yield_now().await;
        }
        for pod in ready.into_iter().take(ZONE_FULL_AFTER) {
            if self.allocated_millionths < target && !self.is_stopped() {
                self.arrive(pod).await?;
            }
        }
        Ok(())
    }

    /// Enough pods for the request mix, which learns them before the first is placed. So the
    /// typical requests do not change during the base load, and kept answers stay valid.
    fn learnt(&mut self) -> Vec<DemoPod> {
        let pods: Vec<DemoPod> = (0..WINDOW).map(|_| self.next_pod(Draw::Sound)).collect();
        for pod in &pods {
            let Ok(seen) = SeenPod::from_json(&pod.json) else { continue };
            let Some(query) = self.app.query(&seen) else { continue };
            self.app.ledger.learn(seen.pod.uid, &query);
        }
        pods
    }

    /// Reserves the best node of a zone for a pod, and makes it a bound pod of the API server. Returns whether
    /// it fitted.
    fn allocate(&mut self, pod: &DemoPod, zone: &[&str]) -> Result<bool> {
        let seen = SeenPod::from_json(&pod.json).context("cannot read the demo's own pod")?;
        let Some(query) = self.app.query(&seen) else { return Ok(false) };
        let roomy = zone.iter().filter(|node| self.scheduler.has_room(node, seen.host));
        let zone: Vec<&str> = roomy.copied().collect();
        let answers = self.app.ledger.answers(&query, &zone);
        let ranked =
            answers.iter().zip(&zone).filter_map(|(answer, node)| Some((answer.ok()?, *node)));
        let Some((_, node)) = ranked.min() else { return Ok(false) };
        // Otherwise the loop that settles dead binds could take it for one.
        let app = Arc::clone(&self.app);
        let _bind = app.binding.binds.try_take(&seen.pod.uid);
        let placement = self.app.ledger.reserve(&seen.pod, node, &query, self.app.clock.now())?;
        self.app.ledger.confirm(&seen.pod.uid);
        self.scheduler.assume(&pod.uid, node, seen.host);
        self.api.put(pod.bound(&placement)?);
        self.figures.send_modify(|figures| {
            figures.pods.arrived += 1;
            figures.pods.placed_without_http += 1;
        });
        self.bound(&pod.uid, node);
        Ok(true)
    }

    // --- arrivals --------------------------------------------------------------------------------

    /// Lets pods come, run and end until all have come or the demo is stopped.
    ///
    /// # Errors
    /// A call without a proper answer.
    pub(crate) async fn run(&mut self, arrivals: Arrivals) -> Result<()> {
        let gap = arrivals.per_second.filter(|rate| *rate > 0.0);
        let gap = gap.map(|rate| Duration::from_secs_f64(1.0 / rate));
        if let Some(gap) = gap.filter(|_| arrivals.is_alive) {
            self.start_ending(gap);
        }
        let mut left = match (arrivals.per_second, gap) {
            (Some(_), None) => 0, // a rate of zero: no pods come
            _ => arrivals.pods.unwrap_or(u64::MAX),
        };
        let mut next = self.app.clock.precise();
        while (arrivals.is_alive || left > 0) && !self.is_stopped() {
            let now = self.app.clock.precise();
            self.end_due(now);
            while let Some(done) = self.binding.try_join_next() {
                self.joined(done)?;
            }
            if arrivals.is_alive {
                self.retry_due(now).await?;
            }
            if left > 0 && next <= now {
                let pod = self.next_pod(Draw::Everything);
                self.arrive(pod).await?;
                left -= 1;
                // If it is late by more than a second, the stream does not catch up.
                next = (next + gap.unwrap_or_default()).max(now.saturating_sub(BACK_OFF.0));
            } else {
                self.rest((left > 0).then_some(next), now).await?;
            }
        }
        Ok(())
    }

    /// Sleeps until something is due, a bind is done, or the demo is stopped.
    async fn rest(&mut self, arrival: Option<Duration>, now: Duration) -> Result<()> {
        let end = self.ends.peek().map(|Reverse((end, _))| *end);
        let retry = self.waiting.keys().next().map(|(at, _)| *at);
        let due = [arrival, end, retry].into_iter().flatten().min();
        let pause = due.map_or(BACK_OFF.0, |due| due.saturating_sub(now).min(BACK_OFF.0));
        let done = tokio::select! {
            () = tokio::time::sleep(pause) => None,
            _ = self.stop.wait_for(|stop| *stop) => None,
            Some(done) = self.binding.join_next() => Some(done),
        };
        done.map_or(Ok(()), |done| self.joined(done))
    }

    /// Waits for the next bind that is done.
    async fn next_bound(&mut self) -> Result<()> {
        let done = self.binding.join_next().await;
        done.map_or(Ok(()), |done| self.joined(done))
    }

    fn joined(&mut self, done: Result<(Waiting, Result<Verdict>), JoinError>) -> Result<()> {
        let (waiting, verdict) = done.context("a bind has panicked")?;
        self.decided(waiting, verdict?)?;
        self.count_waiting();
        Ok(())
    }

    fn next_pod(&mut self, draw: Draw) -> DemoPod {
        self.stream.next(draw, self.app.clock.unix_seconds())
    }

    /// Schedules a new pod immediately. Returns whether it was bound, or is being bound.
    async fn arrive(&mut self, pod: DemoPod) -> Result<bool> {
        self.figures.send_modify(|figures| figures.pods.arrived += 1);
        self.api.put(serde_json::from_str(&pod.json).context("cannot read the demo's own pod")?);
        let since = self.app.clock.precise();
        self.attempt(Waiting { pod, since, pause: BACK_OFF.0 }).await
    }

    /// Tries to schedule a pod, which waits if there is no room. Returns whether it was bound, or is
    /// being bound.
    async fn attempt(&mut self, waiting: Waiting) -> Result<bool> {
        let is_bound = match self.scheduler.choose(&waiting.pod).await? {
            Choice::Node(node) if self.kubelet.is_some() => {
                let bind = self.scheduler.bind(&waiting.pod, node);
                self.binding.spawn(async move { (waiting, bind.await) });
                true
            }
            Choice::Node(node) => {
                let verdict = self.scheduler.bind(&waiting.pod, node).await?;
                self.decided(waiting, verdict)?
            }
            Choice::NoNode(reasons) => {
                let uid = PodUid::new(waiting.pod.uid.as_str());
                let first = reasons.into_keys().next();
                let first = first.unwrap_or_else(|| "no node is known".to_owned());
                // The reason as `explain` shows it.
                let pod = self.app.waiting.pod(&uid);
                let closest = pod.and_then(|pod| Some(pod.closest()?.0.reason().to_owned()));
                match self.app.pods.pending.get(&uid).is_some_and(|pod| pod.request.is_err()) {
                    true => self.refuse(&uid, first),
                    false => self.wait(waiting, closest.unwrap_or(first)),
                }
                false
            }
        };
        self.count_waiting();
        Ok(is_bound)
    }

    /// Notes the outcome of a bind. Returns whether the pod is bound.
    fn decided(&mut self, waiting: Waiting, verdict: Verdict) -> Result<bool> {
        match verdict {
            Verdict::Bound { node } => {
                if let Some(kubelet) = &self.kubelet {
                    kubelet.start(&PodUid::new(waiting.pod.uid.as_str()), self.app.clock.now());
                }
                self.bound(&waiting.pod.uid, &node);
                Ok(true)
            }
            Verdict::Conflict { error } => {
                self.scheduler.forget(&waiting.pod.uid);
                self.figures.send_modify(|figures| figures.pods.bind_conflicts += 1);
                self.wait(waiting, error);
                Ok(false)
            }
        }
    }

    /// Pods that are being bound wait, too.
    fn count_waiting(&self) {
        let waits = u64::try_from(self.waiting.len() + self.binding.len()).unwrap_or(u64::MAX);
        self.figures.send_modify(|figures| figures.pods.waiting = waits);
    }

    fn wait(&mut self, waiting: Waiting, reason: String) {
        self.figures.send_modify(|figures| {
            figures.reasons.insert(waiting.pod.uid.clone(), reason);
        });
        self.tries += 1;
        let at = self.app.clock.precise() + waiting.pause;
        let pause = (waiting.pause * 2).min(BACK_OFF.1);
        self.waiting.insert((at, self.tries), Waiting { pause, ..waiting });
    }

    /// Counts a pod with an invalid request; its owner deletes it.
    fn refuse(&self, uid: &PodUid, reason: String) {
        self.api.delete(uid);
        self.figures.send_modify(|figures| {
            figures.pods.refused += 1;
            figures.reasons.insert(uid.to_string(), reason);
        });
    }

    /// Counts a bound pod, checks whether its node is overallocated, and sets its end.
    fn bound(&mut self, uid: &str, node: &str) {
        let node_state = self.app.ledger.node(node);
        let overallocated = node_state.as_ref().map_or(0, overallocated);
        let uid_of_pod = PodUid::new(uid);
        let held = node_state.as_ref().and_then(|node| node.reservation(&uid_of_pod));
        let devices = held.iter().flat_map(|held| &held.placement.devices);
        self.allocated_millionths += devices.map(|d| d.demand.share.millionths()).sum::<u64>();
        self.figures.send_modify(|figures| {
            figures.pods.placed += 1;
            figures.reasons.remove(uid);
            figures.overallocated_max = figures.overallocated_max.max(overallocated);
        });
        match self.life {
            None => self.running.push(uid_of_pod),
            Some(life) => self.set_end(uid_of_pod, life),
        }
    }

    // --- ends ------------------------------------------------------------------------------------

    /// Lets pods end from now on. Their mean life is such that as many end as come.
    fn start_ending(&mut self, gap: Duration) {
        let count = u32::try_from(self.running.len()).unwrap_or(u32::MAX).max(1);
        let life = gap.saturating_mul(count).max(LIFE_MIN);
        self.life = Some(life);
        for uid in std::mem::take(&mut self.running) {
            self.set_end(uid, life);
        }
    }

    fn set_end(&mut self, uid: PodUid, life: Duration) {
        // Exponential: a pod of any age is as likely to end now as any other.
        let factor = -self.random.random_range(f64::EPSILON..1.0).ln();
        self.ends.push(Reverse((self.app.clock.precise() + life.mul_f64(factor), uid)));
    }

    /// Ends pods whose time has come, and those that gpupack evicted.
    fn end_due(&mut self, now: Duration) {
        for uid in self.api.take_evicted() {
            self.running.retain(|running| *running != uid);
            self.ends.retain(|Reverse((_, ends))| *ends != uid);
            self.end(&uid);
        }
        while let Some(Reverse((end, _))) = self.ends.peek()
            && *end <= now
            && let Some(Reverse((_, uid))) = self.ends.pop()
        {
            self.end(&uid);
        }
    }

    fn end(&mut self, uid: &PodUid) {
        if let Some(kubelet) = &self.kubelet {
            kubelet.end(uid, self.app.clock.now());
        }
        self.scheduler.forget(uid.as_str());
        self.api.delete(uid);
        self.figures.send_modify(|figures| figures.pods.ended += 1);
    }

    /// Tries waiting pods again after their pause, or when gpupack requeued them, and deletes those that waited
    /// too long.
    async fn retry_due(&mut self, now: Duration) -> Result<()> {
        let requeued = self.api.take_annotated();
        let requeued =
            self.waiting.extract_if(.., |_, waiting| requeued.contains(waiting.pod.uid.as_str()));
        let requeued: Vec<_> = requeued.collect();
        self.waiting.extend(requeued.into_iter().map(|((_, at), waiting)| ((now, at), waiting)));
        while !self.is_stopped()
            && let Some(entry) = self.waiting.first_entry()
            && entry.key().0 <= now
        {
            let waiting = entry.remove();
            if now.saturating_sub(waiting.since) < PATIENCE {
                self.attempt(waiting).await?;
                continue;
            }
            self.api.delete(&PodUid::new(waiting.pod.uid.as_str()));
            self.figures.send_modify(|figures| {
                figures.pods.withdrawn += 1;
                figures.pods.waiting -= 1;
                figures.reasons.remove(&waiting.pod.uid);
            });
        }
        Ok(())
    }
}

/// The number of overallocated devices of a node.
pub(crate) fn overallocated(node: &NodeState) -> usize {
    node.devices().iter().filter(|device| device.is_overallocated()).count()
}

#[cfg(test)]
mod tests;
