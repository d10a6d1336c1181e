//! Certificates that gpupack makes itself, and a change of its CA while pods are bound.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::apps::v1::Deployment;
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
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::testbed::{Testbed, figure, scenario, until_known};
use crate::watching::Watching;
use crate::webhook::{dry_run, policies, reported};

/// How long a change of the CA may take: the old one is dropped when the last certificate of it has ended.
const CHANGE_LIMIT: Duration = Duration::from_secs(300);

fn section(ca_seconds: u64) -> Value {
    json!({"make": true, "certificate_seconds": 60, "ca_seconds": ca_seconds, "spread_seconds": 15})
}

#[test]
fn a_ca_is_made_and_changed_while_pods_are_bound() {
    scenario("certificates", |bed| async move {
        let (plane, cluster) = (bed.plane, &bed.cluster);
        let fleet = Fleet::new().with("certificates", 1, (8, A100));
        cluster.add_nodes(&fleet).await;
        let watching = Watching::start(cluster.client.clone(), fleet.clone()).await;
        policies(cluster).await;
        let started = clock::now();
        let mut kept = Kept::start(plane, &cluster.client, section(400)).await;
        figure(bed.name, &format!("made and served after {} ms", clock::ms(started.elapsed())));
        let leader = kept.leader().await;
        let _agents = start_agents(&bed, &kept, &fleet, leader).await;
        let first = kept.bundle().await;
        assert_eq!(first.matches("BEGIN").count(), 1);
        until_forwarded(plane).await;
        until_completed(&bed).await;
        let logs = logs(plane);
        let before: Vec<usize> = logs.iter().map(complaints).collect();

        // A longer life of the CA makes the present one due.
        for extender in &mut kept.extenders {
            extender.reconfigure(&json!({"certificates": section(1_800)}));
        }
        let (mut pods, started) = (0, clock::now());
        for place in [1 - leader, leader] {
            bind(&bed, &watching, &mut pods).await;
            kept.extenders[place].kill();
            kept.extenders[place].start_again().await;
        }
        let most = until_changed(&bed, &kept, &watching, (&first, &mut pods)).await;
        for _ in 0..3 {
            bind(&bed, &watching, &mut pods).await;
        }
        until_completed(&bed).await;
        figure(
            bed.name,
            &format!("CA changed after {} s, {pods} pods bound", started.elapsed().as_secs()),
        );
        assert_eq!(most, 2, "the old and the new CA are trusted at once");
        let rolls = *kept.rolls.lock().expect("no panic");
        assert!(rolls >= 2, "kube-scheduler was started again: {rolls}");
        none_refused(&bed, &logs, &before).await;
        let ends = kept.extenders[kept.leader().await]
            .metric("gpupack_certificate_expiry_timestamp_seconds", "certificate=\"ca\"")
            .await;
        assert!(ends > 1_700_000_000.0, "{ends}");
        watching.verdict();
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

/// Binds pods and queries until the first CA is no longer trusted. The most CAs that were trusted at once.
async fn until_changed(
    bed: &Testbed,
    kept: &Kept,
    watching: &Watching,
    (first, pods): (&str, &mut usize),
) -> usize {
    let (mut most, started) = (1, clock::now());
    loop {
        bind(bed, watching, pods).await;
        let (code, text) = queried(&top(bed.plane)).await;
        assert_eq!(code, Some(0), "{text}");
        let bundle = kept.bundle().await;
        most = most.max(bundle.matches("BEGIN").count());
        if !bundle.contains(first) && bundle.matches("BEGIN").count() == 1 {
            return most;
        }
        assert!(started.elapsed() < CHANGE_LIMIT, "the CA is not changed:\n{bundle}");
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
    bed.cluster.add_pods(&[plan]).await;
    *pods += 1;
    watching.until_bound(*pods, Duration::from_secs(30)).await;
}

/// Where clients complain about certificates.
fn logs(plane: &ControlPlane) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(plane.work()).expect("it is there").flatten();
    let logs = folder.map(|entry| entry.path());
    logs.filter(|path| path.extension().is_some_and(|end| end == "log")).collect()
}

#[test]
fn a_token_of_the_extender_changes_of_kube_scheduler_one_annotation() {
    scenario("certificate-policy", |bed| async move {
        let admin = &bed.cluster.client;
        manifests::apply(admin, "rbac.yaml", Mode::Keep).await;
        kept::empty_objects(admin).await;
        let client = bed.plane.client(Identity::Extender).await;
        let deployments: Api<Deployment> = Api::namespaced(client.clone(), "gpu-system");
        let services: Api<APIService> = Api::all(client.clone());
        let patch = async |fields: Value| {
            let dry = PatchParams { dry_run: true, ..PatchParams::default() };
            let patched = match fields["spec"]["template"].is_null()
                && fields["spec"]["replicas"].is_null()
            {
                true => {
                    let name = "v1.inspection.gpupack.dev";
                    services.patch(name, &dry, &Patch::Merge(&fields)).await.map(drop)
                }
                false => {
                    let name = "gpupack-scheduler";
                    deployments.patch(name, &dry, &Patch::Strategic(&fields)).await.map(drop)
                }
            };
            patched.map_err(|error| reported(&error))
        };
        let of_pods = |fields: Value| json!({"spec": {"template": fields}});
        let image =
            of_pods(json!({"spec": {"containers": [{"name": "kube-scheduler", "image": "x"}]}}));
        let started = clock::now();
        // The policy is in force a moment after it is there.
        while patch(image.clone()).await.is_ok_and(|()| started.elapsed() < Duration::from_secs(30))
        {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        for (what, fields) in [
            ("image", image),
            ("account", of_pods(json!({"spec": {"serviceAccountName": "x"}}))),
            ("labels of pods", of_pods(json!({"metadata": {"labels": {"x": "y"}}}))),
            ("another annotation", of_pods(json!({"metadata": {"annotations": {"x": "y"}}}))),
            ("replicas", json!({"spec": {"replicas": 0}})),
            ("owner", json!({"metadata": {"annotations": {"x": "y"}}, "spec": {"replicas": 1}})),
            ("service", json!({"spec": {"service": {"name": "x"}}})),
            ("no certificate", json!({"spec": {"insecureSkipTLSVerify": true}})),
        ] {
            let refused = patch(fields).await.expect_err(what);
            assert!(refused.contains("gpupack-certificates"), "{what}: {refused}");
        }
        let annotation =
            json!({"metadata": {"annotations": {"certificates.gpupack.dev/ca-bundle": "1"}}});
        patch(of_pods(annotation)).await.expect("its own annotation");
        let bundle = ByteString(b"x".to_vec());
        let refused = patch(json!({"spec": {"caBundle": bundle}})).await;
        assert!(!refused.is_err_and(|it| it.contains("gpupack-certificates")), "its own field");
        kept::remove_objects(admin).await;
    });
}
