//! Somebody edits the placement of a bound pod, in a cluster without the policy that prevents it.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::checker::{DEVICES, PLACEMENT, annotation};
use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::{find, is_bound};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn an_edited_placement_frees_no_room_and_is_restored() {
    scenario("edits", |bed| async move {
        let stage = bed.stage(Setup::of(Fleet::new().with("edits", 1, (1, A100)))).await;
        stage.cluster.add_pods(&[PodPlan::fraction("first", "0.9")]).await;
        stage.watching.until("first bound", LIMIT, |pods| is_bound(pods, "first")).await;
        let ours = placement(&stage).expect("it is placed");
        let devices: Value = serde_json::from_str(&ours).expect("a placement is JSON");
        let mut tiny = devices.clone();
        tiny["devices"][0]["mib"] = 1.into();
        tiny["devices"][0]["share"] = 1.into();
        edit(&stage, &json!({PLACEMENT: tiny.to_string()})).await;
        stage.cluster.add_pods(&[PodPlan::fraction("second", "0.9")]).await;
        until_back(&stage, &ours).await;
        edit(&stage, &json!({PLACEMENT: null, DEVICES: null})).await;
        until_back(&stage, &ours).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(!stage.watching.ask(|pods| is_bound(pods, "second")), "0.9 beside 0.9");
        let events = stage.cluster.events().await;
        let reported = |event: &&_| is_reported(event);
        assert_eq!(events.iter().filter(reported).count(), 1, "once a minute");
        let seen = stage.extender.metric("gpupack_placement_edits_total", "seen").await;
        assert!(seen >= 2.0, "{seen} edits seen");
        // The checker has seen the edits themselves; what counts is what was bound by them.
        stage.until_ledgers_agree().await;
    });
}

fn is_reported(event: &crate::cluster::SeenEvent) -> bool {
    event.pod == "first" && event.reason == "PlacementEdited"
}

fn placement(stage: &Stage) -> Option<String> {
    let seen = |pod: &Pod| annotation(pod, PLACEMENT).map(str::to_owned);
    stage.watching.ask(|pods| find(pods, "first").and_then(|first| seen(&first.pod)))
}

async fn edit(stage: &Stage, annotations: &Value) {
    let api: Api<Pod> = stage.cluster.pods();
    let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
    api.patch("first", &PatchParams::default(), &patch).await.expect("an administrator may");
}

/// Waits until the API server has the placement that gpupack wrote.
async fn until_back(stage: &Stage, ours: &str) {
    let started = clock::now();
    loop {
        let pod = stage.cluster.pods().get("first").await.expect("it is there");
        if annotation(&pod, PLACEMENT) == Some(ours) && annotation(&pod, DEVICES).is_some() {
            break;
        }
        assert!(started.elapsed() < LIMIT, "the placement is not restored");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    stage.figure(&format!("the placement is back after {} ms", clock::ms(started.elapsed())));
}
