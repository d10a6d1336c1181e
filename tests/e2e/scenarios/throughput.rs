//! How many pods a second kube-scheduler binds with gpupack as its extender, beside the same
//! kube-scheduler without any.
//!
//! `GPUPACK_THROUGHPUT="nodes=5000 pods=2000 rounds=3 keep=16,50,0"` measures that; without it, a small
//! cluster shows that the comparison works. `keep` lists values of the extender's `keep_best`. No time
//! is asserted. Real figures need a release build in `GPUPACK_E2E_BINARY`.
//!
//! Each round binds the same pods once without gpupack and once with each `keep_best`, in an order that
//! alternates from one round to the next. Without gpupack neither extender nor agents run. All pods
//! are created before the scheduler starts, so that its queue is full and nothing but its work is
//! measured: the rate is that from the first pod seen bound to the last, waits after a refused bind
//! included. The simulated agents, which in a real cluster have cores of their own, report less often
//! than real ones, so that they leave the two compared the machine.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::leash::Used;
use crate::pods::PodPlan;
use crate::schedulers::{Scheduler, SchedulerPlan};
use crate::testbed::{Setup, Stage, scenario_within};
use crate::watching;

/// Reports a second of all simulated agents together.
const REPORTS_PER_SECOND: usize = 250;

/// What the pods request, in turn: 100 pods need 43 GPUs at least.
const FRACTIONS: [&str; 10] =
    ["0.1", "0.25", "0.5", "0.2", "1", "0.3", "0.75", "0.4", "0.15", "0.65"];

#[test]
fn all_pods_are_bound_with_and_without_gpupack_at_reported_rates() {
    let size = Size::queried();
    scenario_within("throughput", size.limit(), |bed| async move {
        let report_every = Duration::from_millis(1_000 * size.nodes as u64)
            .div_f64(REPORTS_PER_SECOND as f64)
            .max(Duration::from_secs(1));
        let setup = Setup {
            schedulers: Vec::new(),
            settings: json!({"report_stale_seconds": 15 + 6 * report_every.as_secs()}),
            report_every,
            ..Setup::of(Fleet::new().with("throughput", size.nodes, (8, A100)))
        };
        let mut stage = bed.stage(setup).await;
        let mut measured = Vec::new();
        for round in 0..size.rounds {
            let mut variants = size.variants();
            if round % 2 == 1 {
                variants.reverse();
            }
            for variant in variants {
                measured.push(measure(&mut stage, &size, round, variant).await);
            }
        }
        tell(&stage, &size, &measured);
        stage.judge().await;
    });
}

/// How much is measured.
struct Size {
    nodes: usize,
    pods: usize,
    rounds: usize,
    keep: Vec<usize>,
}

impl Size {
    /// What the environment requests; else a small cluster, in which the extender narrows already.
    fn queried() -> Self {
        let mut size = Self { nodes: 120, pods: 60, rounds: 1, keep: vec![50, 0] };
        let text = clock::variable("GPUPACK_THROUGHPUT").unwrap_or_default();
        for word in text.split_whitespace() {
            let fault = || -> ! {
                panic!(
                    "GPUPACK_THROUGHPUT has `{word}`: not `nodes=`, `pods=` or `rounds=` with a whole number above 0 (`pods` above 1), nor `keep=` with a list such as `16,0`"
                )
            };
            let (key, value) = word.split_once('=').unwrap_or_else(|| fault());
            let numbers: Result<Vec<usize>, _> = value.split(',').map(str::parse).collect();
            match (key, numbers.unwrap_or_else(|_| fault()).as_slice()) {
                ("nodes", &[nodes]) if nodes > 0 => size.nodes = nodes,
                ("pods", &[pods]) if pods > 1 => size.pods = pods,
                ("rounds", &[rounds]) if rounds > 0 => size.rounds = rounds,
                ("keep", keep) => size.keep = keep.to_vec(),
                _ => fault(),
            }
        }
        assert!(size.pods <= 8 * size.nodes, "each pod must fit, even one to a GPU");
        size
    }

    fn variants(&self) -> Vec<Variant> {
        std::iter::once(None).chain(self.keep.iter().copied().map(Some)).collect()
    }

    /// How long the pods of one variant may take: three a second.
    fn patience(&self) -> Duration {
        Duration::from_secs(60 + self.pods as u64 / 3)
    }

    /// How long all may take, with some minutes for many nodes.
    fn limit(&self) -> Duration {
        let runs = self.rounds * self.variants().len();
        let each = self.patience() + Duration::from_secs(120);
        Duration::from_secs(300) + each * u32::try_from(runs).expect("a small number")
    }

    /// The pods of a round, in an order drawn from its number.
    fn plans(&self, round: usize, variant: Variant) -> Vec<PodPlan> {
        let plan = |i: usize| {
            let name = format!("{}-{round}-{i}", name(variant));
            let plan = PodPlan::fraction(name, FRACTIONS[i % FRACTIONS.len()]);
            if variant.is_none() { plan.without_gpupack() } else { plan }
        };
        let mut plans: Vec<PodPlan> = (0..self.pods).map(plan).collect();
        plans.shuffle(&mut ChaCha8Rng::seed_from_u64(round as u64));
        plans
    }
}

/// The extender's `keep_best`; none: kube-scheduler without any extender.
type Variant = Option<usize>;

fn name(variant: Variant) -> String {
    variant.map_or_else(|| "alone".to_owned(), |keep| format!("keep-{keep}"))
}

/// One variant of one round.
struct Measured {
    round: usize,
    variant: Variant,
    /// Pods bound a second.
    rate: f64,
    /// Attempts of the scheduler that ended as an error.
    errors: f64,
    /// The scheduler's own mean time for the choice of one node.
    choice_ms: f64,
    packed: Option<Packed>,
}

/// What only gpupack reports.
struct Packed {
    /// Binds that needed more than one attempt.
    conflicts: f64,
    /// Mean fullness of the GPUs with tenants.
    efficiency: f64,
    /// GPUs with tenants.
    opened: f64,
    /// Mean time of each verb.
    verb_ms: BTreeMap<&'static str, f64>,
    /// What the extender used for each pod while they were bound, reports included.
    used: UsedPerPod,
}

/// What the extender used, for each pod.
#[derive(Clone, Copy)]
struct UsedPerPod {
    processor_ms: f64,
    /// How often one of its threads began to wait.
    waits: f64,
}

async fn measure(stage: &mut Stage, size: &Size, round: usize, variant: Variant) -> Measured {
    let plan = match variant {
        None => {
            stage.stop_gpupack();
            SchedulerPlan::second_alone()
        }
        Some(keep) => {
            stage.stop_gpupack();
            stage.start_gpupack(&json!({"keep_best": keep})).await;
            SchedulerPlan::second()
        }
    };
    stage.cluster.add_pods(&size.plans(round, variant)).await;
    let scheduler = stage.start_scheduler(plan).await;
    let before = variant.map(|_| stage.extender.used());
    let rate = rate(stage, size).await;
    let used = before.map(|before| per_pod(before, stage.extender.used(), size.pods));
    let result = "result=\"error\"";
    let errors = scheduler.metric("scheduler_schedule_attempts_total", result).await;
    let choice_ms = mean_choice_ms(&scheduler).await;
    let packed = match used {
        None => None,
        Some(used) => {
            let packed = packed(stage, size.pods as f64, used).await;
            stage.until_ledgers_agree().await;
            Some(packed)
        }
    };
    drop(scheduler);
    let measured = Measured { round, variant, rate, errors, choice_ms, packed };
    stage.figure(&measured.text());
    stage.judge().await;
    stage.cluster.delete_all_pods().await;
    let all_gone = |pods: &watching::Pods| pods.values().all(|seen| seen.gone.is_some());
    stage.watching.until("all pods gone", Duration::from_secs(120), all_gone).await;
    stage.watching.forget_gone();
    measured
}

/// Pods a second from the first one bound to the last. Looks now and then only, so as not to take
/// the time of what it measures.
async fn rate(stage: &Stage, size: &Size) -> f64 {
    let started = clock::now();
    while stage.watching.ask(watching::bound) < size.pods {
        let bound = stage.watching.ask(watching::bound);
        let late = started.elapsed() > size.patience();
        assert!(!late, "{bound} of {} pods bound after {:?}", size.pods, size.patience());
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let bound: Vec<Instant> =
        stage.watching.ask(|pods| pods.values().filter_map(|seen| seen.bound).collect());
    let (first, last) = (bound.iter().min(), bound.iter().max());
    let took = last.expect("pods are bound").duration_since(*first.expect("pods are bound"));
    (size.pods - 1) as f64 / took.as_secs_f64()
}

async fn mean_choice_ms(scheduler: &Scheduler) -> f64 {
    let name = "scheduler_scheduling_algorithm_duration_seconds";
    let sum = scheduler.metric(&format!("{name}_sum"), "").await;
    1_000.0 * sum / scheduler.metric(&format!("{name}_count"), "").await
}

fn per_pod(before: Used, after: Used, pods: usize) -> UsedPerPod {
    let processor = after.processor.saturating_sub(before.processor);
    UsedPerPod {
        processor_ms: 1_000.0 * processor.as_secs_f64() / pods as f64,
        waits: after.waits.saturating_sub(before.waits) as f64 / pods as f64,
    }
}

async fn packed(stage: &Stage, pods: f64, used: UsedPerPod) -> Packed {
    let binds = stage.extender.binds_of(pods).await;
    let mut verb_ms = BTreeMap::new();
    for verb in ["filter", "prioritize", "bind"] {
        let label = format!("verb=\"{verb}\"");
        let sum = stage.extender.metric("gpupack_verb_duration_seconds_sum", &label).await;
        verb_ms.insert(verb, 1_000.0 * sum / stage.extender.calls(verb).await);
    }
    Packed {
        conflicts: binds.values().sum::<f64>() - pods,
        efficiency: stage.extender.metric("gpupack_packing_efficiency_ratio", "").await,
        opened: stage.extender.metric("gpupack_gpus_occupied", "").await,
        verb_ms,
        used,
    }
}

impl Measured {
    fn text(&self) -> String {
        let Self { round, rate, errors, choice_ms, .. } = self;
        let packed = self.packed.as_ref().map_or_else(String::new, |packed| {
            let Packed { conflicts, efficiency, opened, verb_ms, used } = packed;
            let UsedPerPod { processor_ms, waits } = used;
            let verbs: Vec<String> =
                verb_ms.iter().map(|(verb, ms)| format!("{verb} {ms:.2} ms")).collect();
            let verbs = verbs.join(", ");
            format!(
                "; {conflicts} binds refused; efficiency {efficiency:.4} on {opened} GPUs; {verbs}; the extender used {processor_ms:.2} ms and waited {waits:.1} times for each pod"
            )
        });
        format!(
            "round {round}, {}: {rate:.1} pods/s, a choice takes {choice_ms:.2} ms, {errors} attempts ended as error{packed}",
            name(self.variant)
        )
    }
}

/// A line for each variant, and one for tools.
fn tell(stage: &Stage, size: &Size, measured: &[Measured]) {
    let of = |variant: Variant| measured.iter().filter(move |one| one.variant == variant);
    let alone = |round: usize| {
        let same = of(None).find(|one| one.round == round);
        same.expect("each round has a run without gpupack").rate
    };
    let mut variants: Vec<Value> = Vec::new();
    for variant in size.variants() {
        let rate = median(of(variant).map(|one| one.rate));
        let ratios: Vec<f64> = of(variant).map(|one| one.rate / alone(one.round)).collect();
        let ratio = median(ratios.iter().copied());
        let mut object = json!({
            "keep_best": variant, "pods_per_second": rate, "ratio": ratio,
            "ratios": ratios,
            "choice_ms": median(of(variant).map(|one| one.choice_ms)),
            "errors": of(variant).map(|one| one.errors).sum::<f64>(),
        });
        let mut text = format!("{}: {rate:.1} pods/s, ratio {ratio:.3}", name(variant));
        if variant.is_some() {
            let packed = || of(variant).filter_map(|one| one.packed.as_ref());
            let conflicts: f64 = packed().map(|it| it.conflicts).sum();
            let efficiency = median(packed().map(|it| it.efficiency));
            let opened = median(packed().map(|it| it.opened));
            text += &format!(
                ", {conflicts} binds refused, efficiency {efficiency:.4} on {opened} GPUs"
            );
            let processor_ms = median(packed().map(|it| it.used.processor_ms));
            let waits = median(packed().map(|it| it.used.waits));
            text += &format!(
                ", the extender used {processor_ms:.2} ms and waited {waits:.1} times for each pod"
            );
            object["extender_ms_per_pod"] = processor_ms.into();
            object["extender_waits_per_pod"] = waits.into();
            object["conflicts"] = conflicts.into();
            object["efficiency"] = efficiency.into();
            object["gpus_opened"] = opened.into();
        }
        stage.figure(&text);
        variants.push(object);
    }
    let summary = json!({
        "nodes": size.nodes, "gpus_per_node": 8, "pods": size.pods, "rounds": size.rounds,
        "variants": variants,
    });
    stage.figure(&summary.to_string());
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { values[middle - 1].midpoint(values[middle]) }
}
