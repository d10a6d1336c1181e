//! GPUs that are guaranteed to teams: what each gets back, what it may have at most, and that no other pod
//! is evicted for it.

use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceQuota;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::{Pods, evicted, is_bound};
use crate::webhook::{Webhook, dry_run};

const LIMIT: Duration = Duration::from_secs(30);

/// Many times as long as an eviction or a requeue takes.
const LONG_ENOUGH: Duration = Duration::from_secs(8);

#[test]
fn a_team_gets_back_what_is_guaranteed_to_it() {
    scenario("teams-back", |bed| async move {
        let shares = json!({"teams": {"vision": {"guaranteed": 2}, "speech": {"guaranteed": 1}}});
        let stage = bed.stage(setup(Fleet::new().with("teams-back", 4, (1, A100)), shares)).await;
        prepare(&stage).await;
        let speech = stage.cluster.beside("speech", json!({})).await;
        let vision = stage.cluster.beside("vision", json!({})).await;
        let third = stage.cluster.beside("third", json!({})).await;
        for (at, name) in ["s-0", "s-1", "s-2", "s-3"].iter().enumerate() {
            speech.add_pods(&[whole(name).important("e2e-high")]).await;
            stage.watching.until_bound(at + 1, LIMIT).await;
            tokio::time::sleep(Duration::from_millis(1_100)).await; // ages count in seconds
        }
        assert_eq!(explained(&stage, "speech/s-3").await.matches("may be evicted").count(), 1);
        assert_eq!(explained(&stage, "speech/s-0").await.matches("may be evicted").count(), 0);
        // It has nothing guaranteed, however important it is.
        third.add_pods(&[whole("t").important("e2e-high")]).await;
        tokio::time::sleep(LONG_ENOUGH).await;
        assert!(stage.watching.ask(evicted).is_empty());
        let started = clock::now();
        vision.add_pods(&[whole("v-0"), whole("v-1")]).await;
        let both = |pods: &Pods| is_bound(pods, "v-0") && is_bound(pods, "v-1");
        stage.watching.until("its guarantee", LIMIT, both).await;
        let took = started.elapsed();
        assert_eq!(stage.watching.ask(evicted), ["s-2", "s-3"], "the youngest");
        vision.add_pods(&[whole("v-2")]).await;
        let more = PodPlan::fraction("s-4", "0.5").important("e2e-high");
        speech.add_pods(&[more]).await;
        tokio::time::sleep(LONG_ENOUGH).await;
        assert_eq!(
            stage.watching.ask(evicted),
            ["s-2", "s-3"],
            "all have what is guaranteed to them"
        );
        stage.figure(&format!(
            "4 of 4 GPUs used by a team with 1 guaranteed, at high priority; another team with 2 guaranteed \
             asks at low priority: the 2 youngest evicted, both bound after {} ms; then none for 2 more",
            clock::ms(took)
        ));
        let teams = stage.extender.page("/v1/teams").await;
        assert!(teams.contains(r#""team":"speech","guaranteedMillionths":1000000,"usedMillionths":2000000,"overQuotaMillionths":1000000"#), "{teams}");
        stage.judge().await;
    });
}

#[test]
fn teams_of_labeled_namespaces_stay_within_their_limit() {
    scenario("teams-limit", |bed| async move {
        manifests::apply(&bed.cluster.client, "namespaces.yaml", Mode::Keep).await;
        let shares = json!({"label": "e2e/team", "teams": {"small": {"at_most": 1}}});
        let stage = bed.stage(setup(Fleet::new().with("teams-limit", 3, (1, A100)), shares)).await;
        let first = stage.cluster.beside("limit-a", json!({"e2e/team": "small"})).await;
        let second = stage.cluster.beside("limit-b", json!({"e2e/team": "small"})).await;
        let half = |name: &str| PodPlan::fraction(name, "0.5");
        first.add_pods(&[half("a-0")]).await;
        second.add_pods(&[half("b-0")]).await;
        stage.watching.until_bound(2, LIMIT).await;
        let many: Vec<PodPlan> = (1..6).map(|at| half(&format!("a-{at}"))).collect();
        first.add_pods(&many).await;
        second.add_pods(&[half("b-1")]).await;
        tokio::time::sleep(LONG_ENOUGH).await;
        assert_eq!(stage.watching.ask(crate::watching::bound), 2, "it has all that it may have");
        let why = explained(&stage, "limit-b/b-1").await;
        assert!(why.contains("team `small` may have 0 GPUs more"), "{why}");
        let mut slowest = Duration::ZERO;
        for (at, ended) in ["b-0", "a-0"].iter().enumerate() {
            let started = clock::now();
            let of = if at == 0 { &second } else { &first };
            of.delete_pod(ended).await;
            let what = "the next one of the team bound";
            let is_next = |pods: &Pods| crate::watching::bound(pods) == 2;
            stage.watching.until("it ends", LIMIT, |pods| !is_bound_now(pods, ended)).await;
            stage.watching.until(what, LIMIT, is_next).await;
            slowest = slowest.max(started.elapsed());
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(stage.watching.ask(crate::watching::bound), 2);
        stage.figure(&format!(
            "a team of two namespaces with at most 1 GPU, and two free ones beside it: never more than 1, \
             and the next pod is bound at most {} ms after one ends",
            clock::ms(slowest)
        ));
        // A namespace that leaves the team counts apart.
        second.label(json!({"e2e/team": null})).await;
        let is_bound = |pods: &Pods| is_bound(pods, "b-1");
        stage.watching.until("bound as a team of its own", LIMIT, is_bound).await;
        stage.judge().await;
    });
}

#[test]
fn two_classes_and_a_quota_guarantee_gpus_without_shares() {
    scenario("two-classes", |bed| async move {
        let plane = bed.plane;
        let settings = json!({"standing_hold_after_seconds": 0});
        let setup = Setup {
            settings: settings.clone(),
            ..Setup::of(Fleet::new().with("two-classes", 2, (1, A100)))
        };
        let stage = bed.stage(setup).await;
        manifests::apply(&stage.cluster.client, "evict.yaml", Mode::Keep).await;
        let _webhook = Webhook::start(plane, &stage.cluster, settings).await;
        stage.cluster.add_priority_class("gpu-guaranteed", 1_000).await;
        stage.cluster.add_class_that_never_preempts("gpu-borrowed", 0).await;
        let borrowed = |at| whole(&format!("b-{at}")).important("gpu-borrowed");
        stage.cluster.add_pods(&[borrowed(0), borrowed(1)]).await;
        stage.watching.until_bound(2, LIMIT).await;
        quota(&stage).await;
        stage.cluster.add_pods(&[whole("g").important("gpu-guaranteed")]).await;
        stage.watching.until("the guaranteed pod", LIMIT, |pods| is_bound(pods, "g")).await;
        assert_eq!(stage.watching.ask(evicted).len(), 1);
        let beyond = whole("beyond").important("gpu-guaranteed").to_pod();
        let started = clock::now();
        let refusal = loop {
            // No controller counts what the quota has used: the test does.
            let used = json!({"status": {"used": {KEY: "1000000"}}});
            let written = quotas(&stage)
                .patch_status("guaranteed", &PatchParams::default(), &Patch::Merge(&used))
                .await;
            written.expect("a good status");
            match dry_run(&stage.cluster.pods(), &beyond).await {
                Err(refusal) => break refusal,
                Ok(_) => assert!(started.elapsed() < LIMIT, "the quota admits a second pod"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        assert!(refusal.contains("exceeded quota: guaranteed"), "{refusal}");
        let other = whole("other").important("gpu-borrowed").to_pod();
        dry_run(&stage.cluster.pods(), &other)
            .await
            .expect("its class is not in the quota's scope");
        stage.figure("two classes and a quota: one borrowed pod evicted for the guaranteed one, and a second guaranteed one refused by the quota");
        stage.judge().await;
    });
}

const KEY: &str = "requests.gpupack.dev/gpu-share";

fn quotas(stage: &Stage) -> Api<ResourceQuota> {
    Api::namespaced(stage.cluster.client.clone(), &stage.cluster.namespace)
}

/// One GPU for pods of the class `gpu-guaranteed`, with the status that a controller would write.
async fn quota(stage: &Stage) {
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "guaranteed"},
        "spec": {
            "hard": {KEY: "1000000"},
            "scopeSelector": {"matchExpressions": [
                {"operator": "In", "scopeName": "PriorityClass", "values": ["gpu-guaranteed"]},
            ]},
        },
    });
    let quota: ResourceQuota = serde_json::from_value(quota).expect("a quota");
    quotas(stage).create(&PostParams::default(), &quota).await.expect("a good quota");
    let status = json!({"status": {"hard": {KEY: "1000000"}, "used": {KEY: "0"}}});
    let written = quotas(stage)
        .patch_status("guaranteed", &PatchParams::default(), &Patch::Merge(&status))
        .await;
    written.expect("a good status");
    tokio::time::sleep(Duration::from_secs(2)).await; // admission reads quotas from a cache
}

fn setup(fleet: Fleet, shares: Value) -> Setup {
    let settings = json!({"standing_hold_after_seconds": 0, "shares": shares});
    Setup { settings, ..Setup::of(fleet) }
}

fn whole(name: &str) -> PodPlan {
    PodPlan::fraction(name, "1").important("e2e-low")
}

async fn prepare(stage: &Stage) {
    manifests::apply(&stage.cluster.client, "evict.yaml", Mode::Keep).await;
    for (name, value) in [("e2e-high", 1_000), ("e2e-low", 10)] {
        stage.cluster.add_priority_class(name, value).await;
    }
}

/// What `/v1/explain` says of a pod.
async fn explained(stage: &Stage, pod: &str) -> String {
    stage.extender.page(&format!("/v1/explain?pod={pod}")).await
}

fn is_bound_now(pods: &Pods, name: &str) -> bool {
    let is_it = |known: &str| known.rsplit('/').next() == Some(name);
    pods.iter().any(|(known, seen)| is_it(known) && seen.bound.is_some() && seen.gone.is_none())
}
