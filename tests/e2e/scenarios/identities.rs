//! Every client proves who it is: kube-scheduler by a certificate, agents by the tokens of their pods.

use std::time::Duration;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};

#[test]
fn pods_are_bound_with_certificates_and_tokens_of_the_api_server() {
    scenario("identities", |bed| async move {
        let fleet = Fleet::new().with("identities", 2, (2, A100));
        let setup = Setup { has_identities: true, ..Setup::of(fleet) };
        let stage = bed.stage(setup).await;
        let plans: Vec<PodPlan> =
            (0..6).map(|at| PodPlan::fraction(format!("share-{at}"), "0.5")).collect();
        let started = clock::now();
        stage.cluster.add_pods(&plans).await;
        stage.watching.until_bound(plans.len(), Duration::from_secs(30)).await;
        stage.figure(&format!(
            "6 pods bound in {} ms, over mutual TLS",
            clock::ms(started.elapsed())
        ));
        let refused = stage.extender.metric("gpupack_reports_total", "unproven").await;
        assert!(refused == 0.0, "{refused} reports were refused");
        stage.until_ledgers_agree().await;
        let [first, second] = [0, 1].map(|at| stage.fleet.nodes[at].name.clone());
        for (account, runs_on) in [("intruder", &first), ("gpupack-agent", &second)] {
            let refused = stage.extender.metric("gpupack_reports_total", "unproven").await;
            let _other = stage.start_other_agent(&first, account, runs_on).await;
            until_more(&stage, "unproven", refused).await;
        }
        // Only the newer one of two agents is believed.
        let _newer = stage.start_other_agent(&first, "gpupack-agent", &first).await;
        until_more(&stage, "second_agent", 0.0).await;
        let accepted = stage.extender.metric("gpupack_reports_total", "accepted").await;
        until_more(&stage, "accepted", accepted + 2.0).await;
        stage.until_ledgers_agree().await;
        stage.judge().await;
    });
}

/// Waits until more reports than `before` ended so.
async fn until_more(stage: &Stage, result: &str, before: f64) {
    let started = clock::now();
    while stage.extender.metric("gpupack_reports_total", result).await <= before {
        let limit = Duration::from_secs(30);
        assert!(started.elapsed() < limit, "no more {result} reports after {limit:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
