//! Everything breaks, again and again, while pods come and end; judged by the API server's objects and
//! the fleet alone.
//!
//! `GPUPACK_FAULTS_MINUTES=30 cargo test --features e2e --test e2e faults -- --nocapture`; without the
//! variable it is skipped. `GPUPACK_E2E_SEED` decides what breaks when; with an even one no room is kept for the first
//! pod of a line, and in pauses each pod that fits has to be bound. It prints a line for each
//! fault, and at the end a table of the times until the next Binding.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use crate::binaries;
use crate::checker;
use crate::clock;
use crate::cluster::Cluster;
use crate::control_plane::Part;
use crate::extender::faketime;
use crate::fleet::{A10, A100, Fleet};
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::posted;
use crate::replicas::Replicas;
use crate::testbed::{Testbed, figure, scenario_within};
use crate::watching::{self, Pods, Seen, Watching};

/// The class of an eighth of the pods. For these, others may be evicted.
const IMPORTANT: &str = "faults-high";

/// Most pods at a time: more than fit.
const ALIVE: usize = 300;

/// Pods that are to be created in each minute: without the API server none are, and 30 minutes are to
/// have more than 5,000.
const PODS_PER_MINUTE: u64 = 300;

/// Time after a fault is over, before the next one.
const PAUSE_MS: std::ops::Range<u64> = 4_000..12_000;

/// In a pause, a pod that fits is bound within this time: the room of a pod that has ended is free after two lists
/// without its processes (3 s), others are tried again within 2 s, and the rest is for kube-scheduler, the Binding
/// and the watch.
const BOUND_WITHIN: Duration = Duration::from_secs(6);

/// After the last fault, everything must be well within this time.
const LIMIT: Duration = Duration::from_secs(120);

/// What breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    KillLeader,
    KillFollower,
    StopLeader,
    FreezeLeader,
    FreezeFollower,
    CutLeader,
    SlowLeader,
    CutFollower,
    KillAgents,
    FreezeAgents,
    KillApiServer,
    FreezeApiServer,
    KillEtcd,
    FreezeEtcd,
    /// The API server has forgotten what the leader's watch has not seen: 410 Gone.
    ExpireLeader,
    StepLeaderClock,
    StepFollowerClock,
}

const FAULTS: [Fault; 17] = [
    Fault::KillLeader,
    Fault::KillFollower,
    Fault::StopLeader,
    Fault::FreezeLeader,
    Fault::FreezeFollower,
    Fault::CutLeader,
    Fault::SlowLeader,
    Fault::CutFollower,
    Fault::KillAgents,
    Fault::FreezeAgents,
    Fault::KillApiServer,
    Fault::FreezeApiServer,
    Fault::KillEtcd,
    Fault::FreezeEtcd,
    Fault::ExpireLeader,
    Fault::StepLeaderClock,
    Fault::StepFollowerClock,
];

/// Steps of a wall clock, in seconds. Backward ones are short: before its first second, the
/// certificate of the API server is not valid.
const STEPS: [i64; 4] = [-600, -2, 90, 86_400];

/// What the API server says to a watch of what it has forgotten.
const EXPIRED: &str = "too old resource version";

struct Stage {
    bed: Testbed,
    replicas: Replicas,
    watching: Watching,
    rng: ChaCha8Rng,
    /// Pods that went, and whether they were important.
    gone: BTreeMap<String, bool>,
    fleet: Fleet,
    /// Whether room is kept for the first pod of a line.
    keeps_room: bool,
    /// How long pods fitted in pauses before they were bound, or fitted no more.
    fitted: Vec<Duration>,
}

/// What the users did.
#[derive(Default)]
struct Use {
    created: u64,
    /// Pods that they ended or deleted, or tried to.
    ended: BTreeSet<String>,
}

#[test]
fn nothing_is_allocated_twice_whatever_breaks() {
    let minutes = u64::try_from(clock::number("GPUPACK_FAULTS_MINUTES", 0)).expect("few");
    if minutes == 0 {
        return binaries::say("skipped: faults because GPUPACK_FAULTS_MINUTES is not set");
    }
    let time = Duration::from_secs(60 * minutes);
    scenario_within("faults", time + 5 * LIMIT, |bed| async move {
        let seed = u64::try_from(clock::number("GPUPACK_E2E_SEED", 1)).expect("64 bits");
        let fleet = Fleet::new().with("faults-a", 8, (4, A100)).with("faults-b", 4, (2, A10));
        bed.cluster.add_nodes(&fleet).await;
        bed.cluster.add_priority_class(IMPORTANT, 100).await;
        manifests::apply(&bed.cluster.client, "evict.yaml", Mode::Keep).await;
        let watching = Watching::start_unsteady(bed.cluster.client.clone(), fleet.clone()).await;
        // Where room is kept for the first of a line shows nowhere outside of gpupack.
        let keeps_room = seed % 2 == 1;
        let settings =
            if keeps_room { json!({}) } else { json!({"standing_hold_after_seconds": 0}) };
        let mut replicas = Replicas::start_with(&bed, &fleet, settings).await;
        if faketime().is_none() {
            binaries::say("skipped: steps of the clock because libfaketime is not installed");
        }
        for extender in &mut replicas.extenders {
            extender.own_wall_clock();
            extender.kill();
            extender.start_again().await;
        }
        let users = tokio::spawn(users(bed.cluster.clone(), seed, clock::now() + time));
        let rng = ChaCha8Rng::seed_from_u64(seed);
        let (gone, fitted) = (BTreeMap::new(), Vec::new());
        let mut stage = Stage { bed, replicas, watching, rng, gone, fleet, keeps_room, fitted };
        let recovered = stage.break_until(clock::now() + time).await;
        let Use { created, ended } = users.await.expect("users go on whatever breaks");
        print_table(&recovered);
        assert!(created >= minutes * PODS_PER_MINUTE / 4, "only {created} pods were created");
        let evicted = stage.evicted(&ended).await;
        stage.settle().await;
        let events = stage.watching.verdict();
        let bindings = posted::verdict(&stage.bed.plane.audit_log());
        assert!(bindings as u64 >= created / 4, "only {bindings} Bindings were noted");
        print_fitted(&mut stage.fitted);
        let faults: usize = recovered.values().map(Vec::len).sum();
        let expired = stage.replicas.extenders[0].logged(EXPIRED);
        let were_expired = recovered.contains_key(&Fault::ExpireLeader);
        assert!(expired > 0 || !were_expired, "no watch was answered with 410");
        figure(
            "faults",
            &format!(
                "seed {seed}: {faults} faults, {created} pods, {events} pod events and {bindings} Bindings, \
                 none wrong, {evicted} pods evicted for more important ones, {expired} watches answered with 410"
            ),
        );
    });
}

impl Stage {
    /// Breaks one thing after the other. For each kind, the times until the next Binding.
    async fn break_until(&mut self, end: Instant) -> BTreeMap<Fault, Vec<Duration>> {
        let mut recovered: BTreeMap<Fault, Vec<Duration>> = BTreeMap::new();
        while clock::now() < end {
            let fault = *FAULTS.choose(&mut self.rng).expect("not empty");
            let steps = matches!(fault, Fault::StepLeaderClock | Fault::StepFollowerClock);
            if steps && faketime().is_none() {
                continue;
            }
            let broken = clock::now();
            self.happens(fault).await;
            let over = clock::now();
            let next = self.next_binding(broken).await;
            figure(
                "faults",
                &format!(
                    "{fault:?}: over after {} ms, next Binding after {} ms",
                    clock::ms(over - broken),
                    clock::ms(next)
                ),
            );
            recovered.entry(fault).or_default().push(next);
            self.until_two_replicas().await;
            let pause = self.rng.random_range(PAUSE_MS);
            self.pause(Duration::from_millis(pause), end).await;
            self.note_gone();
            self.watching.forget_gone();
        }
        recovered
    }

    /// Nothing breaks: pods that fit are bound, unless room is kept.
    async fn pause(&mut self, time: Duration, users_end: Instant) {
        if self.keeps_room {
            return tokio::time::sleep(time).await;
        }
        if !self.is_scheduled_again(users_end).await {
            return;
        }
        let end = clock::now() + BOUND_WITHIN + time;
        let mut since = BTreeMap::<String, Instant>::new();
        while clock::now() < end {
            let now = clock::now();
            let fit = self.watching.ask(|pods| fit(pods, &self.fleet));
            since.retain(|name, since| {
                let still = fit.contains(name);
                if !still {
                    self.fitted.push(now - *since);
                }
                still
            });
            for name in fit {
                let since = *since.entry(name.clone()).or_insert(now);
                let message = self.watching.ask(|pods| watching::reason(&pods[&name]));
                assert!(now - since < BOUND_WITHIN, "{name} fits and is not bound: {message}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until kube-scheduler has looked at a pod that is created from now on: its own watch goes on up to 30 s
    /// after the API server. False once users create no more.
    async fn is_scheduled_again(&self, users_end: Instant) -> bool {
        let now = clock::now();
        let is_looked_at = |seen: &Seen| seen.bound.is_some() || !watching::reason(seen).is_empty();
        let looks = |pods: &Pods| pods.values().any(|it| it.created > now && is_looked_at(it));
        while !self.watching.ask(looks) {
            if clock::now() > users_end {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        true
    }

    fn note_gone(&mut self) {
        let gone = self.watching.ask(|pods| {
            let gone = pods.values().filter(|seen| seen.gone.is_some()).map(|seen| {
                (seen.pod.metadata.name.clone().unwrap_or_default(), is_important(&seen.pod))
            });
            gone.collect::<BTreeMap<_, _>>()
        });
        self.gone.extend(gone);
    }

    /// How many pods went that no user ended: less important ones alone.
    async fn evicted(&mut self, ended: &BTreeSet<String>) -> usize {
        self.note_gone();
        let pods = self.bed.cluster.pods().list(&ListParams::default()).await.expect("all is well");
        // While the watch lists pods again, they seem to be gone.
        let alive: BTreeSet<String> =
            pods.into_iter().filter_map(|pod| pod.metadata.name).collect();
        let evicted =
            self.gone.iter().filter(|(name, _)| !ended.contains(*name) && !alive.contains(*name));
        let (important, less): (Vec<_>, Vec<_>) =
            evicted.partition(|(_, is_important)| **is_important);
        assert!(
            important.is_empty(),
            "no user ended them, and none is more important: {important:?}"
        );
        less.len()
    }

    /// The time from `broken` to the next Binding; a minute at most, since all may be full.
    async fn next_binding(&mut self, broken: Instant) -> Duration {
        let is_new = |pods: &Pods| {
            pods.values().filter_map(|seen| seen.bound).filter(|at| *at > broken).min()
        };
        let limit = broken + Duration::from_secs(60);
        loop {
            if let Some(at) = self.watching.ask(is_new) {
                return at - broken;
            }
            if clock::now() > limit {
                return Duration::from_secs(60);
            }
            self.replicas.keep_scheduler().await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn happens(&mut self, fault: Fault) {
        let leader = match fault {
            Fault::KillLeader
            | Fault::KillFollower
            | Fault::StopLeader
            | Fault::FreezeLeader
            | Fault::FreezeFollower
            | Fault::CutLeader
            | Fault::SlowLeader
            | Fault::CutFollower
            | Fault::ExpireLeader
            | Fault::StepLeaderClock
            | Fault::StepFollowerClock => self.replicas.leader(None).await,
            _ => 0,
        };
        let follower = 1 - leader;
        let time = Duration::from_millis(self.rng.random_range(500..12_000));
        match fault {
            Fault::KillLeader => self.replicas.extenders[leader].kill(),
            Fault::KillFollower => self.replicas.extenders[follower].kill(),
            Fault::StopLeader => self.replicas.extenders[leader].stop_gently(),
            Fault::FreezeLeader => self.freeze(leader, time).await,
            Fault::FreezeFollower => self.freeze(follower, time).await,
            Fault::CutLeader => self.cut(leader, time).await,
            Fault::CutFollower => self.cut(follower, time).await,
            Fault::SlowLeader => {
                self.replicas.relays[leader].delay(Duration::from_millis(300));
                tokio::time::sleep(time).await;
                self.replicas.relays[leader].delay(Duration::ZERO);
            }
            Fault::KillAgents => {
                self.replicas.agents.kill();
                tokio::time::sleep(time).await;
                self.replicas.start_agents_again();
            }
            Fault::FreezeAgents => {
                self.replicas.agents.signal("STOP");
                tokio::time::sleep(time).await;
                self.replicas.agents.signal("CONT");
            }
            Fault::KillApiServer => self.restart(Part::ApiServer, time).await,
            Fault::KillEtcd => self.restart(Part::Etcd, time / 4).await,
            Fault::FreezeApiServer => self.freeze_part(Part::ApiServer, time).await,
            Fault::FreezeEtcd => self.freeze_part(Part::Etcd, time).await,
            Fault::ExpireLeader => {
                self.replicas.relays[leader].cut(true);
                tokio::time::sleep(time / 2).await;
                self.restart(Part::ApiServer, Duration::ZERO).await; // its watch cache starts empty
                tokio::time::sleep(time / 2).await;
                self.replicas.relays[leader].cut(false);
            }
            Fault::StepLeaderClock => self.step_clock(leader, time).await,
            Fault::StepFollowerClock => self.step_clock(follower, time).await,
        }
    }

    async fn step_clock(&mut self, at: usize, time: Duration) {
        let by = *STEPS.choose(&mut self.rng).expect("not empty");
        self.replicas.extenders[at].step_wall_clock(by);
        tokio::time::sleep(time).await;
        self.replicas.extenders[at].step_wall_clock(0);
    }

    async fn freeze(&mut self, at: usize, time: Duration) {
        self.replicas.extenders[at].signal("STOP");
        tokio::time::sleep(time).await;
        self.replicas.extenders[at].signal("CONT");
    }

    async fn cut(&mut self, at: usize, time: Duration) {
        self.replicas.relays[at].cut(true);
        tokio::time::sleep(time).await;
        self.replicas.relays[at].cut(false);
    }

    async fn restart(&mut self, part: Part, time: Duration) {
        self.bed.plane.signal(part, "KILL");
        tokio::time::sleep(time).await;
        self.bed.plane.start_again(part);
    }

    async fn freeze_part(&mut self, part: Part, time: Duration) {
        self.bed.plane.signal(part, "STOP");
        tokio::time::sleep(time).await;
        self.bed.plane.signal(part, "CONT");
    }

    /// Starts replicas again that have ended, as kubelet would.
    async fn until_two_replicas(&mut self) {
        let until = clock::now() + Duration::from_secs(8);
        while clock::now() < until {
            self.replicas.keep_scheduler().await;
            for extender in &mut self.replicas.extenders {
                if extender.ended().is_some() {
                    extender.start_again().await;
                }
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// The faults are over: the leader's ledger is what the API server says, and pods are bound.
    async fn settle(&mut self) {
        self.until_two_replicas().await;
        let started = clock::now();
        loop {
            let leader = self.replicas.leader(None).await;
            let allocated = self.replicas.extenders[leader].allocated().await;
            if allocated == self.watching.load() {
                break;
            }
            assert!(started.elapsed() < LIMIT, "ledger and annotations differ after the faults");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        self.bed.cluster.delete_all_pods().await;
        let probe = "faults-probe";
        self.bed.cluster.add_pods(&[PodPlan::fraction(probe, "0.5")]).await;
        let is_probe = |name: &str| name.rsplit_once('/').is_some_and(|(_, name)| name == probe);
        let is_bound =
            |pods: &Pods| pods.iter().any(|(name, seen)| is_probe(name) && seen.bound.is_some());
        self.watching.until("a pod is bound after the faults", LIMIT, is_bound).await;
    }
}

/// The pods that wait and fit. Room may be kept on one node for each important pod that waits.
fn fit(pods: &Pods, fleet: &Fleet) -> BTreeSet<String> {
    let is_waiting = |seen: &&Seen| {
        seen.bound.is_none()
            && seen.gone.is_none()
            && seen.pod.metadata.deletion_timestamp.is_none()
    };
    let (load, waiting) = (watching::load(pods), pods.values().filter(is_waiting));
    let kept = waiting.clone().filter(|seen| is_important(&seen.pod)).count();
    let fit = waiting.filter(|seen| checker::fits(&seen.pod, &load, fleet) > kept);
    fit.map(|seen| checker::full_name(&seen.pod)).collect()
}

fn is_important(pod: &Pod) -> bool {
    pod.spec.as_ref().and_then(|spec| spec.priority_class_name.as_deref()) == Some(IMPORTANT)
}

/// Creates, ends and deletes pods until `end`, whatever the API server says.
async fn users(cluster: Cluster, seed: u64, end: Instant) -> Use {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 1);
    let (mut tried, mut alive, mut done) = (0, Vec::<String>::new(), Use::default());
    let api = cluster.pods();
    while clock::now() < end {
        tokio::time::sleep(Duration::from_millis(60_000 / PODS_PER_MINUTE)).await;
        tried += 1; // one whose creation was not answered may exist
        let name = format!("faults-{tried}");
        let pod = plan(&name, &mut rng).to_pod();
        if api.create(&PostParams::default(), &pod).await.is_ok() {
            done.created += 1;
            alive.push(name);
        }
        if alive.len() > ALIVE || rng.random_range(0..2) == 0 && alive.len() > ALIVE / 2 {
            let ended = alive.swap_remove(rng.random_range(0..alive.len()));
            done.ended.insert(ended.clone());
            let patch = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
            if rng.random_range(0..2) == 0 {
                let _ = api.patch_status(&ended, &PatchParams::default(), &patch).await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let now = DeleteParams::default().grace_period(0);
            match api.delete(&ended, &now).await {
                Err(kube::Error::Api(answer)) if answer.code == 404 => {}
                Err(_) => alive.push(ended),
                Ok(_) => {}
            }
        }
    }
    done
}

/// A mix of shapes, selectors and priorities.
fn plan(name: &str, rng: &mut ChaCha8Rng) -> PodPlan {
    let plan = match rng.random_range(0..10) {
        0..4 => {
            let share = ["0.1", "0.25", "0.33", "0.5"].choose(rng).expect("not empty");
            PodPlan::fraction(name, share)
        }
        4..6 => PodPlan::memory(name, rng.random_range(2_000..20_000)),
        6 => PodPlan::fraction(name, "0.4").annotated("gpu-memory", "9000"),
        7 => PodPlan::fraction(name, "0.5").annotated("gpu-fraction-num-devices", "2"),
        8 => PodPlan::fraction(name, "1"),
        _ => PodPlan::new(name),
    };
    let plan = if rng.random_range(0..8) == 0 { plan.important(IMPORTANT) } else { plan };
    match rng.random_range(0..12) {
        0 => plan.only_on("faults-a-01"),
        _ => plan,
    }
}

/// For each kind of fault: how often, and percentiles of the time until the next Binding.
fn print_table(recovered: &BTreeMap<Fault, Vec<Duration>>) {
    figure(
        "faults",
        &format!("{:16} {:>5} {:>9} {:>9} {:>9}", "fault", "times", "p50 ms", "p90 ms", "max ms"),
    );
    for (fault, times) in recovered {
        let mut times = times.clone();
        times.sort();
        // The nearest rank.
        let at = |percent: usize| clock::ms(times[(times.len() * percent).div_ceil(100) - 1]);
        let name = format!("{fault:?}");
        figure(
            "faults",
            &format!("{name:16} {:>5} {:>9} {:>9} {:>9}", times.len(), at(50), at(90), at(100)),
        );
    }
}

/// How long waiting pods fitted in pauses: percentiles by nearest rank.
fn print_fitted(times: &mut [Duration]) {
    times.sort();
    let at = |percent: usize| {
        let rank = (times.len() * percent).div_ceil(100).checked_sub(1);
        rank.map_or(0, |rank| clock::ms(times[rank]))
    };
    figure(
        "faults",
        &format!(
            "in pauses {} pods waited and fitted: p50 {} ms, p90 {} ms, max {} ms",
            times.len(),
            at(50),
            at(90),
            at(100)
        ),
    );
}
