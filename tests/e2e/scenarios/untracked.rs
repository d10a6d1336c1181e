//! Pods that gpupack did not place, and pods without a request.

use std::time::Duration;

use crate::checker::{DEVICES, PLACEMENT};
use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::{Pods, find, is_bound};

const LIMIT: Duration = Duration::from_secs(30);

/// A node with a GPU that others have given away twice.
const OVERALLOCATED: &str = "overallocated-00";

#[test]
fn pods_bound_by_others_count_if_they_have_a_placement() {
    scenario("untracked", |bed| async move {
        let fleet =
            Fleet::new().with("untracked", 1, (2, A100)).with("overallocated", 1, (2, A100));
        let node = "untracked-00";
        let [first, second] = [0, 1].map(|i| fleet.uuids(node)[i].to_owned());
        let placed = |name: &str, uuid: &str, share: u64| {
            let mib = share * 81_320 / 1_000_000;
            PodPlan::new(name).placed_on(uuid, mib, share).bound_by_others(node)
        };
        // Older than the install: they are there before any part of gpupack runs.
        let old = [
            placed("old-placed", &first, 600_000),
            PodPlan::fraction("old-silent", "0.5").bound_by_others(node),
            PodPlan::new("old-broken").annotated(PLACEMENT, "{\"v\":1").bound_by_others(node),
            mirror(node),
            PodPlan::fraction("old-waiting", "0.4").only_on(node),
        ];
        bed.cluster.add_pods(&old).await;
        bed.cluster.add_pods(&too_many(&fleet)).await;
        let stage = bed.stage(Setup::of(fleet)).await;
        stage
            .watching
            .until("old-waiting bound", LIMIT, |pods| is_bound(pods, "old-waiting"))
            .await;
        stage.figure("a pod older than the install is bound");
        // 0.6 by others and 0.4 of ours: only one GPU has room for a whole request now, whichever
        // was chosen. Others overallocate the second GPU if it is empty, or the first.
        stage.cluster.add_pods(&[placed("forged", &second, 900_000)]).await;
        stage.until_ledgers_agree().await;
        placed_beside(&stage).await;
        reported(&stage).await;
        only_that_gpu_is_affected(&stage).await;
        a_pod_without_a_request_gets_no_device(&stage).await;
        stage.judge().await;
    });
}

/// What a static pod looks like at the API server.
fn mirror(node: &str) -> PodPlan {
    PodPlan::new("old-static")
        .annotated("kubernetes.io/config.mirror", "0123456789abcdef")
        .annotated("kubernetes.io/config.source", "file")
        .annotated("gpu-fraction", "0.5")
        .bound_by_others(node)
}

/// One more pod: bound only where the placements of all others leave it room.
async fn placed_beside(stage: &Stage) {
    let load = stage.watching.load();
    let free =
        |uuid: &&str| load.get(*uuid).map_or(1_000_000, |(_, s)| 1_000_000 - (*s).min(1_000_000));
    let most = stage.fleet.uuids("untracked-00").iter().map(free).max().unwrap_or_default();
    let (fits, fits_not) = (most.min(50_000), most + 10_000);
    let decimal = |share: u64| format!("0.{:05}", share / 10);
    let plans = [
        PodPlan::fraction("fits", &decimal(fits)),
        PodPlan::fraction("fits-not", &decimal(fits_not)),
    ]
    .map(|plan| plan.only_on("untracked-00"));
    stage.cluster.add_pods(&plans[1..]).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!stage.watching.ask(|pods| is_bound(pods, "fits-not")), "bound over pods of others");
    stage.cluster.add_pods(&plans[..1]).await;
    let took = stage.watching.until("fits bound", LIMIT, |pods| is_bound(pods, "fits")).await;
    stage.figure(&format!(
        "beside pods of others {} is bound in {} ms, {} waits",
        decimal(fits),
        clock::ms(took),
        decimal(fits_not)
    ));
}

/// Pods with a request and without a placement get an event.
async fn reported(stage: &Stage) {
    let started = clock::now();
    for name in ["old-silent", "old-broken"] {
        while !stage.cluster.events().await.iter().any(|event| event.pod == name) {
            assert!(started.elapsed() < LIMIT, "{name} has no event");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    stage.figure("pods bound by others without a valid placement have an event");
}

/// Two pods of 0.8 on the first GPU of the other node.
fn too_many(fleet: &Fleet) -> [PodPlan; 2] {
    let uuid = fleet.uuids(OVERALLOCATED)[0];
    let forged = |name: &str| {
        PodPlan::new(name).placed_on(uuid, 65_056, 800_000).bound_by_others(OVERALLOCATED)
    };
    // To remove the list of devices does not free the room.
    [forged("one"), forged("two").without(DEVICES)]
}

async fn only_that_gpu_is_affected(stage: &Stage) {
    let plans = ["a", "b"].map(|name| PodPlan::fraction(name, "0.5").only_on(OVERALLOCATED));
    stage.cluster.add_pods(&plans).await;
    let both = |pods: &Pods| is_bound(pods, "a") && is_bound(pods, "b");
    stage.watching.until("both bound beside the overallocated GPU", LIMIT, both).await;
    let uuid = stage.fleet.uuids(OVERALLOCATED)[0];
    for name in ["a", "b"] {
        let there = stage
            .watching
            .ask(|pods| find(pods, name).is_some_and(|seen| seen.devices().contains(&uuid)));
        assert!(!there, "{name} was added to an overallocated GPU");
    }
    stage.figure("two pods placed beside an overallocated GPU");
}

async fn a_pod_without_a_request_gets_no_device(stage: &Stage) {
    stage.cluster.add_pods(&[PodPlan::new("plain")]).await;
    let took = stage.watching.until("plain bound", LIMIT, |pods| is_bound(pods, "plain")).await;
    stage.figure(&format!("a pod without a request is bound in {} ms", clock::ms(took)));
    let placed = stage.watching.ask(|pods| {
        let annotations =
            find(pods, "plain").and_then(|seen| seen.pod.metadata.annotations.clone());
        annotations.is_some_and(|all| all.keys().any(|key| key.starts_with("placed.gpupack.dev/")))
    });
    assert!(!placed, "a pod without a request has a placement");
}
