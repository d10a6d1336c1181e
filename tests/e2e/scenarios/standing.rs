//! A pod that needs much room at once, behind a stream of small ones of the same priority.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario_within};
use crate::watching::{Pods, is_bound};

/// `standing_hold_after_seconds`; zero shows how it is without.
const AFTER: usize = 5;

/// How long small pods run.
const RUN_FOR: std::ops::Range<u64> = 3_000..9_000;

/// Small pods that wait at any time.
const WAITING: usize = 8;

/// For a group, from its last pod or from room for it to the last bind.
const LIMIT: Duration = Duration::from_secs(30);

/// Between the end of a pod and the end of its drain, and then its bind.
const MARGIN: Duration = Duration::from_secs(8);

#[test]
fn a_large_pod_does_not_wait_forever_behind_small_ones() {
    scenario_within("standing", Duration::from_secs(180), |bed| async move {
        let after = clock::number("GPUPACK_STANDING_AFTER", AFTER);
        let setup = Setup {
            settings: json!({"standing_hold_after_seconds": after}),
            ..Setup::of(Fleet::new().with("standing", 1, (8, A100)))
        };
        let stage = bed.stage(setup).await;
        let mut stream = Stream::new();
        let full = clock::now();
        while full.elapsed() < Duration::from_secs(8) {
            stream.step(&stage).await;
        }
        let several = PodPlan::fraction("several", "1").annotated("gpu-fraction-num-devices", "2");
        for (name, plan) in [("whole", PodPlan::fraction("whole", "1")), ("several", several)] {
            let created = clock::now();
            stage.cluster.add_pods(&[plan]).await;
            let limit = match after {
                0 => Duration::from_secs(40),
                _ => {
                    Duration::from_secs(after as u64) + Duration::from_millis(RUN_FOR.end) + MARGIN
                }
            };
            while !stage.watching.ask(|pods| is_bound(pods, name)) && created.elapsed() < limit {
                stream.step(&stage).await;
            }
            let is_bound = stage.watching.ask(|pods| is_bound(pods, name));
            let (ended, used) = (stream.ended, stream.used());
            stage.figure(&format!(
                "room is kept after {after} s: `{name}` is bound: {is_bound}, {} ms after it was \
                 created; {ended} small pods have ended, and {used:.3} of the GPUs are allocated",
                clock::ms(created.elapsed()),
            ));
            assert!(is_bound || after == 0, "`{name}` waits behind small pods");
            stage.cluster.delete_pod(name).await;
        }
        stage.cluster.delete_all_pods().await;
        stage.judge().await;
    });
}

/// Small pods that come as others end.
struct Stream {
    chance: ChaCha8Rng,
    made: usize,
    ended: usize,
    /// When those that are bound end.
    ends: BTreeMap<String, Instant>,
    /// Sum of what was allocated at each step, in GPUs, and the number of steps.
    allocated: (f64, u32),
}

impl Stream {
    fn new() -> Self {
        let chance = ChaCha8Rng::seed_from_u64(7);
        Self { chance, made: 0, ended: 0, ends: BTreeMap::new(), allocated: (0.0, 0) }
    }

    async fn step(&mut self, stage: &Stage) {
        let (bound, waiting, share) = stage.watching.ask(|pods| {
            let small = || {
                pods.iter().filter(|(name, seen)| name.contains("small-") && seen.gone.is_none())
            };
            let bound: Vec<String> = small()
                .filter(|(_, seen)| seen.bound.is_some())
                .filter_map(|(_, seen)| seen.pod.metadata.name.clone())
                .collect();
            let share = |seen: &crate::watching::Seen| {
                let keys = seen.pod.metadata.annotations.as_ref();
                keys.and_then(|keys| keys["gpu-fraction"].parse::<f64>().ok()).unwrap_or(0.0)
            };
            let all = pods.values().filter(|seen| seen.bound.is_some() && seen.gone.is_none());
            (bound.clone(), small().count() - bound.len(), all.map(share).sum::<f64>())
        });
        self.allocated = (self.allocated.0 + share / 8.0, self.allocated.1 + 1);
        let now = clock::now();
        for name in bound {
            let run_for = Duration::from_millis(self.chance.random_range(RUN_FOR));
            self.ends.entry(name).or_insert(now + run_for);
        }
        let due: Vec<String> = self
            .ends
            .iter()
            .filter(|(_, end)| **end <= now)
            .map(|(name, _)| name.clone())
            .collect();
        for name in due {
            self.ends.remove(&name);
            self.ended += 1;
            stage.cluster.delete_pod(&name).await;
        }
        let plans: Vec<PodPlan> = (waiting..WAITING)
            .map(|_| {
                self.made += 1;
                let fraction = ["0.3", "0.35", "0.4"][self.made % 3];
                PodPlan::fraction(format!("small-{}", self.made), fraction)
            })
            .collect();
        stage.cluster.add_pods(&plans).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    fn used(&self) -> f64 {
        self.allocated.0 / f64::from(self.allocated.1.max(1))
    }
}

#[test]
fn of_two_groups_that_do_not_fit_together_one_starts_as_a_whole() {
    scenario_within("groups", Duration::from_secs(120), |bed| async move {
        let setup = Setup::of(Fleet::new().with("groups", 2, (4, A100)));
        let stage = bed.stage(setup).await;
        let member = |group: &str, at: usize| {
            PodPlan::fraction(format!("{group}-{at}"), "1")
                .annotated("gpupack.dev/group", group)
                .annotated("gpupack.dev/group-size", "5")
        };
        // One of each at a time, as controllers make them; the last ones later.
        let all = (0..4).flat_map(|at| [member("one", at), member("two", at)]);
        stage.cluster.add_pods(&all.collect::<Vec<_>>()).await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        let early = stage.watching.ask(|pods| pods.values().any(|seen| seen.bound.is_some()));
        assert!(!early, "no group is complete");
        stage.cluster.add_pods(&[member("one", 4), member("two", 4)]).await;
        let bound_of = |pods: &Pods, group: &str| {
            let of = |name: &&String| name.contains(&format!("/{group}-"));
            let bound = pods.iter().filter(|(name, seen)| of(name) && seen.bound.is_some());
            bound.count()
        };
        let is_one_whole = |pods: &Pods| bound_of(pods, "one") == 5 || bound_of(pods, "two") == 5;
        let took = stage.watching.until("a whole group", LIMIT, is_one_whole).await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        let (one, two) = stage.watching.ask(|pods| (bound_of(pods, "one"), bound_of(pods, "two")));
        assert_eq!(one.min(two), 0, "{one} and {two} are bound");
        let (first, second) = if one == 5 { ("one", "two") } else { ("two", "one") };
        for at in 0..5 {
            stage.cluster.delete_pod(&format!("{first}-{at}")).await;
        }
        let is_other_whole = |pods: &Pods| bound_of(pods, second) == 5;
        let then = stage.watching.until("the other group", LIMIT, is_other_whole).await;
        stage.figure(&format!(
            "two groups of five whole GPUs on eight: one is bound after {} ms, and none of the other; \
             that {} ms after the first has gone",
            clock::ms(took),
            clock::ms(then)
        ));
        stage.judge().await;
    });
}
