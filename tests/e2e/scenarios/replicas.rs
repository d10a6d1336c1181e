//! Two replicas of the extender: one acts, and the other takes over when it is killed, stopped or
//! frozen.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::clock;
use crate::extender::Extender;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::replicas::Replicas;
use crate::scenarios::upgrade::{REQUIRED, previous};
use crate::testbed::{Testbed, figure, scenario, scenario_with, scenario_within};
use crate::watching::{Pods, Watching, bound};

/// Pods are created this often, so that take-over shows as a pause of Bindings.
const POD_EVERY: Duration = Duration::from_millis(100);

const LIMIT: Duration = Duration::from_secs(60);

/// Pods that kube-scheduler may ask about while the Service still names a leader that has given the Lease away.
const MOST_REFUSED: usize = 5;

struct Stage {
    bed: Testbed,
    fleet: Fleet,
    replicas: Replicas,
    watching: Watching,
    created: usize,
    /// Pods per phase.
    pods: usize,
}

impl Stage {
    async fn start(bed: Testbed, name: &str, pods: usize) -> Self {
        let fleet = Fleet::new().with(name, 4, (2, A100));
        bed.cluster.add_nodes(&fleet).await;
        let watching = Watching::start(bed.cluster.client.clone(), fleet.clone()).await;
        let replicas = Replicas::start(&bed, &fleet).await;
        for extender in &replicas.extenders {
            until_reported(extender, 4.0).await;
        }
        Self { bed, fleet, replicas, watching, created: 0, pods }
    }

    /// Creates pods for a while, and lets `fault` happen after a third of them.
    async fn phase(&mut self, fault: impl AsyncFnOnce(&mut Replicas)) -> Phase {
        let first = self.created;
        let mut fault = Some(fault);
        let mut broken = clock::now();
        for at in 0..self.pods {
            let plan = PodPlan::fraction(format!("pod-{}", self.created), "0.02");
            self.bed.cluster.add_pods(&[plan]).await;
            self.created += 1;
            if at == self.pods / 3
                && let Some(fault) = fault.take()
            {
                broken = clock::now();
                fault(&mut self.replicas).await;
            }
            tokio::time::sleep(POD_EVERY).await;
        }
        self.watching.until_bound(self.created, LIMIT).await;
        let names = first..self.created;
        let pause = self.watching.ask(|pods| longest_pause(pods, broken));
        let refused = self.bed.cluster.events().await;
        let of_phase = |name: &str| {
            name.strip_prefix("pod-")
                .and_then(|it| it.parse().ok())
                .is_some_and(|it| names.contains(&it))
        };
        let refused = refused
            .into_iter()
            .filter(|event| event.reason == "FailedScheduling" && of_phase(&event.pod))
            .map(|event| event.message);
        Phase { pause, refused: refused.collect() }
    }

    /// The leader's ledger is what the API server's objects say.
    async fn until_ledger_agrees(&self) {
        let started = clock::now();
        loop {
            let leader = self.replicas.leader(None).await;
            if self.replicas.extenders[leader].metric("gpupack_ready", "").await == 1.0 {
                let allocated = self.replicas.extenders[leader].allocated().await;
                let placed = self.watching.load();
                if allocated == placed {
                    break;
                }
                let late = started.elapsed() > Duration::from_secs(10);
                assert!(!late, "ledger and annotations differ:\n{allocated:#?}\n{placed:#?}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

struct Phase {
    /// The longest time without a Binding after the fault.
    pause: Duration,
    /// What kube-scheduler said of pods that it could not place.
    refused: Vec<String>,
}

impl Phase {
    /// While the leader changes, kube-scheduler may ask one that does not lead about some pods, or find none that
    /// listens; no pod was told that there is no room.
    fn only_asked_the_wrong_one(&self) {
        let is_told = |message: &&String| message.contains("nodes are available");
        assert_eq!(self.refused.iter().find(is_told), None);
        assert!(self.refused.len() <= MOST_REFUSED, "{:#?}", self.refused);
    }
}

/// The longest time between two Bindings after `broken`.
fn longest_pause(pods: &Pods, broken: Instant) -> Duration {
    let mut times: Vec<Instant> = pods.values().filter_map(|seen| seen.bound).collect();
    times.retain(|at| *at > broken);
    times.push(broken);
    times.sort();
    times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

#[test]
fn another_replica_takes_over_from_one_that_is_killed_stopped_or_frozen() {
    scenario("replicas", |bed| async move {
        let mut stage = Stage::start(bed, "replicas", 60).await;

        let mut leader = stage.replicas.leader(None).await;
        let killed = leader;
        let phase = stage.phase(async |replicas| replicas.extenders[killed].kill()).await;
        figure("replicas", &format!("SIGKILL: no Binding for {} ms", clock::ms(phase.pause)));
        assert!(phase.pause < Duration::from_secs(8), "{:?}", phase.pause);
        leader = stage.replicas.leader(Some(killed)).await;
        stage.replicas.extenders[killed].start_again().await;
        stage.until_ledger_agrees().await;

        let stopped = leader;
        let phase = stage.phase(async |replicas| replicas.extenders[stopped].stop_gently()).await;
        figure(
            "replicas",
            &format!(
                "SIGTERM: no Binding for {} ms, refused {:?}",
                clock::ms(phase.pause),
                phase.refused
            ),
        );
        phase.only_asked_the_wrong_one();
        leader = stage.replicas.leader(Some(stopped)).await;
        until_ended(&mut stage.replicas.extenders[stopped]).await;
        stage.replicas.extenders[stopped].start_again().await;
        stage.until_ledger_agrees().await;

        let frozen = leader;
        let phase = stage.phase(async |replicas| replicas.extenders[frozen].signal("STOP")).await;
        figure("replicas", &format!("SIGSTOP: no Binding for {} ms", clock::ms(phase.pause)));
        stage.replicas.leader(Some(frozen)).await;
        stage.replicas.extenders[frozen].signal("CONT");
        until_ended(&mut stage.replicas.extenders[frozen]).await;
        stage.replicas.extenders[frozen].start_again().await;
        stage.until_ledger_agrees().await;

        assert_eq!(stage.watching.ask(bound), stage.created);
        let events = stage.watching.verdict();
        figure(
            "replicas",
            &format!("no fault in {events} pod events on {} GPUs", stage.fleet.gpus()),
        );
    });
}

#[test]
fn replicas_are_replaced_one_by_one_by_those_of_another_version_and_back() {
    scenario_with(
        "rolling",
        REQUIRED,
        |_| previous(),
        |bed, previous| async move {
            let mut stage = Stage::start(bed, "rolling", 30).await;
            // First with agents of this version alone, then with those of the other.
            for program in [Some(previous.clone()), None] {
                let leader = stage.replicas.leader(None).await;
                for place in [1 - leader, leader] {
                    let phase =
                        stage.phase(async |replicas| replicas.extenders[place].stop_gently()).await;
                    phase.only_asked_the_wrong_one();
                    let replica = &mut stage.replicas.extenders[place];
                    until_ended(replica).await;
                    replica.run_program(program.clone());
                    replica.start_again().await;
                    until_reported(replica, 4.0).await;
                    stage.until_ledger_agrees().await;
                }
                if program.is_some() {
                    stage.replicas.start_agents_of(&previous);
                }
            }
            assert_eq!(stage.watching.ask(bound), stage.created);
            let events = stage.watching.verdict();
            let what = "four replicas of two versions replaced one by one";
            figure(
                "rolling",
                &format!("{what}: no pod lacked room, no fault in {events} pod events"),
            );
        },
    );
}

/// Waits until a replica has two reports of each node. One that does not lead has no figures of GPUs.
async fn until_reported(extender: &Extender, nodes: f64) {
    let started = clock::now();
    while extender.metric("gpupack_reports_total", "result=\"accepted\"").await < 2.0 * nodes {
        assert!(started.elapsed() < LIMIT, "an agent does not report to each replica");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Pods of a burst.
const BURST: usize = 100;

/// The least part of the rate without a follower that is left with one, on a busy machine.
const LEAST: f64 = 0.5;

#[test]
fn a_second_replica_costs_binds_little() {
    scenario("replicas-burst", |bed| async move {
        let fleet = Fleet::new().with("replicas-burst", 20, (4, A100));
        bed.cluster.add_nodes(&fleet).await;
        let watching = Watching::start(bed.cluster.client.clone(), fleet.clone()).await;
        let mut replicas = Replicas::start(&bed, &fleet).await;
        let follower = 1 - replicas.leader(None).await;
        let mut rates = [Vec::new(), Vec::new()];
        for round in 0..6 {
            let is_alone = round % 2 == 1;
            match is_alone {
                true => replicas.extenders[follower].kill(),
                false if round > 0 => _ = replicas.extenders[follower].start_again().await,
                false => {}
            }
            let name = |at| format!("burst-{round}-{at}");
            let plans: Vec<PodPlan> =
                (0..BURST).map(|at| PodPlan::fraction(name(at), "0.01")).collect();
            let started = clock::now();
            bed.cluster.add_pods(&plans).await;
            watching.until_bound((round + 1) * BURST, LIMIT).await;
            rates[usize::from(is_alone)].push(BURST as f64 / started.elapsed().as_secs_f64());
        }
        let [with, alone] = rates.map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2]
        });
        let ratio = with / alone;
        figure(
            "replicas-burst",
            &format!("{with:.0} pods/s with a follower, {alone:.0} without: {ratio:.2}"),
        );
        assert!(ratio > LEAST, "{ratio:.2}");
        assert_eq!(watching.ask(bound), 6 * BURST);
        watching.verdict();
    });
}

/// Pods that wait while the leader is killed; `GPUPACK_WAITING` names another number.
const WAITING: usize = 60;

/// Nodes of that scenario. Each gets pods of its own, so that each shows when it takes pods again.
const NODES: usize = 10;

#[test]
fn pods_that_wait_are_tried_again_after_the_leader_is_killed() {
    let waiting = clock::number("GPUPACK_WAITING", WAITING);
    scenario_within("replicas-waiting", Duration::from_secs(500), |bed| async move {
        let fleet = Fleet::new().with("replicas-waiting", NODES, (4, A100));
        bed.cluster.add_nodes(&fleet).await;
        let watching = Watching::start(bed.cluster.client.clone(), fleet.clone()).await;
        let mut replicas = Replicas::start(&bed, &fleet).await;
        let nodes: Vec<&str> = fleet.nodes.iter().map(|node| &*node.name).collect();
        let mut small = Vec::new();
        let mut add_small = async || {
            let round = small.len();
            let of =
                |node: &&str| PodPlan::fraction(format!("s{round}-{node}"), "0.01").only_on(node);
            let plans: Vec<PodPlan> = nodes.iter().map(of).collect();
            bed.cluster.add_pods(&plans).await;
            small.push(());
        };
        add_small().await;
        watching.until_bound(NODES, LIMIT).await;
        let large = |at| {
            PodPlan::fraction(format!("w{at}"), "1").annotated("gpu-fraction-num-devices", "4")
        };
        let large: Vec<PodPlan> = (0..waiting).map(large).collect();
        bed.cluster.add_pods(&large).await;
        let leader = replicas.leader(None).await;
        until_refused(&replicas.extenders[leader], waiting).await;

        let (killed, bound_before) = (clock::now(), watching.ask(bound));
        replicas.extenders[leader].kill();
        let follower = &replicas.extenders[1 - leader];
        let tried = async {
            until_refused(follower, waiting).await;
            killed.elapsed()
        };
        let placed = async {
            let mut first = None;
            loop {
                add_small().await;
                let since = watching.ask(|pods| first_bound(pods, killed));
                first = first.or(since.values().min().copied());
                if since.len() == NODES {
                    break since;
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        };
        let (tried, placed) = futures::join!(tried, placed);
        let first = placed.values().min().expect("a node");
        let last = placed.values().max().expect("a node");
        figure(
            "replicas-waiting",
            &format!(
                "SIGKILL with {waiting} pods waiting: first Binding after {} ms, each node takes pods after {} ms, \
                 all were tried again after {} ms",
                clock::ms(*first),
                clock::ms(*last),
                clock::ms(tried)
            ),
        );
        assert!(watching.ask(bound) > bound_before);
        watching.verdict();
    });
}

/// By node, how long after `killed` a pod was bound there first.
fn first_bound(pods: &Pods, killed: Instant) -> BTreeMap<String, Duration> {
    let mut first = BTreeMap::new();
    for seen in pods.values() {
        let node = seen.pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let Some((node, at)) = node.zip(seen.bound.filter(|at| *at > killed)) else { continue };
        let known = first.entry(node).or_insert(at - killed);
        *known = (*known).min(at - killed);
    }
    first
}

/// Waits until a replica has refused so many pods.
async fn until_refused(extender: &Extender, count: usize) {
    let started = clock::now();
    let limit = Duration::from_secs(count as u64); // far more than a pod takes
    let refusals = "outcome=\"refused\",verb=\"filter\"";
    while extender.metric("gpupack_verb_duration_seconds_count", refusals).await < count as f64 {
        assert!(started.elapsed() < limit, "not all pods were tried");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn until_ended(extender: &mut Extender) {
    let started = clock::now();
    while extender.ended().is_none() {
        assert!(started.elapsed() < Duration::from_secs(30), "a replaced leader goes on");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
