//! Every kind of request on GPUs of every size.

use std::time::Duration;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::checker::GPU;
use crate::clock;
use crate::fleet::{A10, A100, Fleet, T4};
use crate::pods::PodPlan;
use crate::testbed::{Setup, scenario};
use crate::watching::is_bound;

/// More memory than any GPU has.
const TOO_LARGE: usize = 5;

#[test]
fn five_hundred_mixed_pods_fit_on_fifty_nodes() {
    scenario("mixed", |bed| async move {
        let fleet = Fleet::new().with("mixed-a100", 20, (8, A100));
        let fleet = fleet.with("mixed-a10", 15, (4, A10)).with("mixed-t4", 15, (8, T4));
        let stage = bed.stage(Setup::of(fleet)).await;
        let plans = plans(42);
        let started = clock::now();
        stage.cluster.add_pods(&plans).await;
        let fitting = plans.len() - TOO_LARGE;
        stage.watching.until_bound(fitting, Duration::from_secs(180)).await;
        let took = started.elapsed();
        let rate = fitting as f64 / took.as_secs_f64();
        stage.figure(&format!(
            "{fitting} pods on 50 nodes bound in {} ms, {rate:.0} pods/s",
            clock::ms(took)
        ));
        let wrong = (0..TOO_LARGE)
            .any(|i| stage.watching.ask(|pods| is_bound(pods, &format!("too-large-{i}"))));
        assert!(!wrong, "a pod larger than every GPU is bound");
        stage.figure(&format!("binds by outcome: {:?}", stage.extender.binds_of(500.0).await));
        stage.until_ledgers_agree().await;
        stage.judge().await;
    });
}

/// 500 pods that fit and a few that cannot, in an order drawn from the seed. Together they request
/// about 200 of the 340 GPUs, so that no policy can fragment them into a refusal.
fn plans(seed: u64) -> Vec<PodPlan> {
    let fractions = ["0.1", "0.2", "0.25", "0.3", "0.33333", "0.5"];
    let both = |i: usize| {
        PodPlan::fraction(format!("both-{i}"), fractions[i % 3])
            .annotated("gpu-memory", &(1_000 + 70 * i).to_string())
    };
    let two = |i: usize| {
        PodPlan::fraction(format!("two-{i}"), fractions[i % 4])
            .annotated("gpu-fraction-num-devices", "2")
    };
    let mib = |i: usize| u64::try_from(500 + 113 * i).expect("a small number");
    let mut plans: Vec<PodPlan> = Vec::new();
    plans.extend((0..150).map(|i| PodPlan::fraction(format!("fraction-{i}"), fractions[i % 6])));
    plans.extend((0..100).map(|i| PodPlan::memory(format!("memory-{i}"), mib(i))));
    plans.extend((0..100).map(both));
    plans.extend((0..100).map(two));
    plans.extend((0..40).map(|i| PodPlan::fraction(format!("whole-{i}"), "1")));
    // ten pods with the resource of the device plugin
    let named =
        |i: usize| PodPlan::new(format!("named-{i}")).limited(GPU, if i < 5 { "1" } else { "2" });
    plans.extend((0..10).map(named));
    plans.extend((0..TOO_LARGE).map(|i| PodPlan::memory(format!("too-large-{i}"), 100_000)));
    plans.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    plans
}
