//! Certificates that gpupack makes itself: signed again while pods are bound, and a CA that is replaced.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::clock;
use crate::control_plane::{ControlPlane, Identity};
use crate::extender::queried;
use crate::fleet::{A100, Fleet};
use crate::identities::Identities;
use crate::kept::{self, Kept, complaints};
use crate::leash::Leash;
use crate::pods::PodPlan;
use crate::testbed::{Testbed, figure, scenario, until_known};
use crate::watching::{Pods, Watching, is_bound};
use crate::webhook::{dry_run, policies, reported};

/// How long it may take until certificates are signed again: a third of their life, and some.
const RENEWAL_LIMIT: Duration = Duration::from_secs(60);

#[test]
fn certificates_are_signed_again_while_pods_are_bound_and_a_ca_is_replaced() {
    scenario("certificates", |bed| async move {
        let (plane, cluster) = (bed.plane, &bed.cluster);
        let fleet = Fleet::new().with("certificates", 1, (8, A100));
        cluster.add_nodes(&fleet).await;
        let watching = Watching::start(cluster.client.clone(), fleet.clone()).await;
        policies(cluster).await;
        let started = clock::now();
        let section = json!({"make": true, "certificate_seconds": 60});
        let mut kept = Kept::start(plane, &cluster.client, section).await;
        figure(bed.name, &format!("made and served after {} ms", clock::ms(started.elapsed())));
        let leader = kept.leader().await;
        let _agents = start_agents(&bed, &kept, &fleet, leader).await;
        let first = kept.bundle().await;
        until_forwarded(plane).await;
        until_completed(&bed).await;
        let logs = logs(plane);
        let before: Vec<usize> = logs.iter().map(complaints).collect();

        let mut pods = 0;
        for _ in 0..2 {
            until_signed_again(&bed, &watching, &mut pods).await;
        }
        until_completed(&bed).await;
        none_refused(&bed, &logs, &before).await;
        assert_eq!(kept.bundle().await, first, "the CA stays");

        // As docs/install.md says.
        let started = clock::now();
        kept::empty_ca(&cluster.client).await;
        // The same one leads in the end: that is where the stand-ins for Services call.
        for place in [leader, 1 - leader] {
            kept.extenders[place].kill();
            kept.extenders[place].start_again().await;
        }
        kept.restart_scheduler().await;
        until_forwarded(plane).await;
        until_completed(&bed).await;
        for _ in 0..3 {
            bind(&bed, &watching, &mut pods).await;
        }
        figure(bed.name, &format!("CA replaced after {} s", started.elapsed().as_secs()));
        let bundle = kept.bundle().await;
        assert_eq!(bundle.matches("BEGIN").count(), 1);
        assert_ne!(bundle, first);
        let ends = kept.extenders[kept.leader().await]
            .metric("gpupack_certificate_expiry_timestamp_seconds", "certificate=\"ca\"")
            .await;
        assert!(ends > 1_700_000_000.0, "{ends}");
        watching.verdict();
        of_the_api_service_only_its_ca(&bed).await;
        drop(kept);
        kept::remove_objects(&cluster.client).await;
    });
}

/// An agent for each replica, first for the leader, which knows the fleet then.
async fn start_agents(bed: &Testbed, kept: &Kept, fleet: &Fleet, leader: usize) -> Vec<Leash> {
    let file = fleet.write(bed.plane.work(), bed.name);
    let identities = Identities::of(kept.volumes.agents, &bed.cluster.client).await;
    let mut agents = Vec::new();
    for place in [leader, 1 - leader] {
        let address = kept.extenders[place].agents_address();
        agents.extend(identities.start_agents(bed.plane, fleet, (&file, address)).await);
        if place == leader {
            until_known(&kept.extenders[leader], fleet.gpus(), Duration::from_secs(5)).await;
        }
    }
    agents
}

/// Binds pods and queries until the certificate of the webhook is another one.
async fn until_signed_again(bed: &Testbed, watching: &Watching, pods: &mut usize) {
    let secrets: Api<Secret> = Api::namespaced(bed.cluster.client.clone(), "gpu-system");
    let certificate = async || secrets.get("gpupack-webhook-tls").await.expect("it is there").data;
    let (before, started) = (certificate().await, clock::now());
    while certificate().await == before {
        bind(bed, watching, pods).await;
        let (code, text) = queried(&top(bed.plane)).await;
        assert_eq!(code, Some(0), "{text}");
        assert!(started.elapsed() < RENEWAL_LIMIT, "the certificate is not signed again");
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
}

/// No client and no server has complained about a certificate since these counts.
async fn none_refused(bed: &Testbed, logs: &[PathBuf], before: &[usize]) {
    for (log, before) in logs.iter().zip(before) {
        assert_eq!(complaints(log), *before, "a call was refused: {}", log.display());
    }
    figure(bed.name, &format!("no complaint in {} logs", logs.len()));
    // kube-scheduler says there why a call failed.
    let mut events = bed.cluster.events().await.into_iter();
    let signs = ["x509", "tls:", "certificate signed"];
    let refused = events.find(|event| signs.iter().any(|sign| event.message.contains(sign)));
    assert!(refused.is_none(), "{refused:?}");
}

fn top(plane: &ControlPlane) -> [&'static str; 4] {
    let kubeconfig = plane.kubeconfig(Identity::Admin);
    let kubeconfig: &'static str = kubeconfig.to_str().expect("UTF-8").to_owned().leak();
    ["top", "gpus", "--kubeconfig", kubeconfig]
}

/// Waits until the API server forwards queries.
async fn until_forwarded(plane: &ControlPlane) {
    let started = clock::now();
    loop {
        let (code, text) = queried(&top(plane)).await;
        if code == Some(0) {
            return;
        }
        let limit = Duration::from_secs(60);
        assert!(started.elapsed() < limit, "the API server calls nobody: {text}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Waits until the API server has pods completed by the webhook.
async fn until_completed(bed: &Testbed) {
    let started = clock::now();
    let pod = PodPlan::fraction("probe", "0.05").to_pod();
    loop {
        let admitted = dry_run(&bed.cluster.pods(), &pod).await;
        let class =
            admitted.as_ref().map(|pod| pod.spec.clone().and_then(|it| it.runtime_class_name));
        if class.as_ref().is_ok_and(|class| class.as_deref() == Some("nvidia")) {
            return;
        }
        let limit = Duration::from_secs(60);
        assert!(started.elapsed() < limit, "the API server does not call the webhook: {class:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Another pod, which the webhook completes and kube-scheduler binds through the extender.
async fn bind(bed: &Testbed, watching: &Watching, pods: &mut usize) {
    let plan = PodPlan::fraction(format!("share-{pods}"), "0.05");
    bed.cluster.add_pods(std::slice::from_ref(&plan)).await;
    *pods += 1;
    let is_there = |pods: &Pods| is_bound(pods, &plan.name);
    watching.until("the pod is bound", Duration::from_secs(30), is_there).await;
}

/// Where clients complain about certificates.
fn logs(plane: &ControlPlane) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(plane.work()).expect("it is there").flatten();
    let logs = folder.map(|entry| entry.path());
    logs.filter(|path| path.extension().is_some_and(|end| end == "log")).collect()
}

/// What a token of the extender may change.
async fn of_the_api_service_only_its_ca(bed: &Testbed) {
    let client = bed.plane.client(Identity::Extender).await;
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), "gpu-system");
    let services: Api<APIService> = Api::all(client.clone());
    let dry = PatchParams { dry_run: true, ..PatchParams::default() };
    let patch = async |fields: Value| {
        let name = "v1.inspection.gpupack.dev";
        let patched = services.patch(name, &dry, &Patch::Merge(&fields)).await;
        patched.map(drop).map_err(|error| reported(&error))
    };
    let service = json!({"spec": {"service": {"name": "x"}}});
    for (what, fields) in [
        ("service", service),
        ("labels", json!({"metadata": {"labels": {"x": "y"}}})),
        ("no certificate", json!({"spec": {"caBundle": null, "insecureSkipTLSVerify": true}})),
    ] {
        let refused = patch(fields).await.expect_err(what);
        assert!(refused.contains("gpupack-certificates"), "{what}: {refused}");
    }
    let bundle = ByteString(b"x".to_vec());
    let refused = patch(json!({"spec": {"caBundle": bundle}})).await;
    assert!(!refused.is_err_and(|it| it.contains("gpupack-certificates")), "its own field");
    let scale = Patch::Merge(json!({"spec": {"replicas": 0}}));
    let refused = deployments.patch("gpupack-scheduler", &dry, &scale).await;
    let refused = refused.map(drop).map_err(|error| reported(&error)).expect_err("no right");
    assert!(refused.contains("forbidden"), "{refused}");
}
