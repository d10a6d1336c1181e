//! Many equal pods concurrently on one node: a GPU would be allocated twice if the next pod's
//! *filter* call could miss the last pod's bind.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};

#[test]
fn sixteen_concurrent_halves_are_two_on_each_of_eight_gpus() {
    scenario("burst", |bed| async move {
        let rounds = clock::number("GPUPACK_E2E_ROUNDS", 20);
        let stage = bed.stage(Setup::of(Fleet::new().with("burst", 1, (8, A100)))).await;
        let mut times = Vec::new();
        for round in 0..rounds {
            times.push(clock::ms(one_round(&stage, round).await));
        }
        times.sort_unstable();
        let (median, worst) = (times[rounds / 2], times[rounds - 1]);
        stage.figure(&format!(
            "two per GPU in {rounds} of {rounds} rounds; 16 pods bound in {median} ms (median), {worst} ms (worst)"
        ));
        stage.judge().await;
    });
}

/// From the first creation until all are bound.
async fn one_round(stage: &Stage, round: usize) -> Duration {
    let started = clock::now();
    let plans: Vec<PodPlan> =
        (0..16).map(|i| PodPlan::fraction(format!("half-{round}-{i}"), "0.5")).collect();
    stage.cluster.add_pods(&plans).await;
    stage.watching.until_bound(16, Duration::from_secs(30)).await;
    let took = started.elapsed();
    let mut tenants: BTreeMap<String, usize> = BTreeMap::new();
    stage.watching.ask(|pods| {
        for seen in pods.values().filter(|seen| seen.gone.is_none()) {
            for device in seen.devices() {
                *tenants.entry(device.to_owned()).or_default() += 1;
            }
        }
    });
    let expected = stage.fleet.uuids("burst-00").into_iter().map(|uuid| (uuid.to_owned(), 2));
    assert_eq!(tenants, expected.collect(), "round {round}");
    stage.cluster.delete_all_pods().await;
    // The next round needs an empty node: pods gone, and their processes reported gone.
    stage
        .watching
        .until("all pods gone", Duration::from_secs(30), |pods| {
            pods.values().all(|seen| seen.gone.is_some())
        })
        .await;
    stage.until_ledgers_agree().await;
    took
}
