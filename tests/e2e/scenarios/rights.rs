//! What gpupack's own service account may do, on a real API server.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use crate::clock;
use crate::control_plane::Identity;
use crate::fleet::{A100, Fleet};
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, Testbed, scenario};
use crate::watching::is_bound;
use crate::webhook::{policies, reported};

const LIMIT: Duration = Duration::from_secs(30);

/// What a message of the policy under test contains; RBAC would say something else.
const POLICY: &str = "gpupack-extender";

/// A role with which RBAC denies nothing.
const TOO_MUCH: &str = "e2e-too-much";

#[test]
fn the_extender_changes_its_own_annotations_and_nothing_else_of_a_pod() {
    scenario("rights", |bed| async move {
        let plane = bed.plane;
        let stage = bed.stage(Setup::of(Fleet::new().with("rights", 2, (2, A100)))).await;
        policies(&stage.cluster).await;
        label_zones(&stage.cluster.client).await;
        // The shipped extender works under it: Bindings with a placement and without one.
        let plans = [PodPlan::fraction("gpu", "0.5"), PodPlan::new("plain")];
        stage.cluster.add_pods(&plans).await;
        stage.watching.until_bound(2, LIMIT).await;
        stage.cluster.add_pods(&[PodPlan::new("waiting").for_scheduler("nobody")]).await;
        let client = plane.client(Identity::Extender).await;
        let may_all = grant_everything(&stage.cluster.client).await;
        patches(&stage, &client).await;
        named_devices(&stage).await;
        leader_label(&stage, &client).await;
        others(&stage, &client).await;
        bindings(&stage, &client).await;
        may_all.delete(TOO_MUCH, &DeleteParams::default()).await.expect("it is there");
        stage.judge().await;
    });
}

#[test]
fn the_roles_for_evictions_and_for_moves_are_in_separate_files() {
    scenario("rights-apart", |bed| async move {
        let roles: Api<ClusterRoleBinding> = Api::all(bed.cluster.client.clone());
        for role in ["gpupack-evict", "gpupack-move"] {
            let _absent = roles.delete(role, &DeleteParams::default()).await;
        }
        manifests::apply(&bed.cluster.client, "rbac.yaml", Mode::Keep).await;
        moves_are_allowed_by_a_role(&bed).await;
        evictions_are_allowed_by_a_role(&bed).await;
        for role in ["gpupack-evict", "gpupack-move"] {
            let _removed = roles.delete(role, &DeleteParams::default()).await;
        }
    });
}

async fn evictions_are_allowed_by_a_role(bed: &Testbed) {
    let client = bed.plane.client(Identity::Extender).await;
    bed.cluster.add_pods(&[PodPlan::new("sits").for_scheduler("nobody")]).await;
    let evicts = async || {
        let path = format!("/api/v1/namespaces/{}/pods/sits/eviction", bed.cluster.namespace);
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction",
                "metadata": {"name": "sits", "namespace": bed.cluster.namespace},
                "deleteOptions": {"dryRun": ["All"]}});
        post(&client, &path, &eviction).await.map(drop)
    };
    until_refused("cannot create", evicts).await;
    manifests::apply(&bed.cluster.client, "evict.yaml", Mode::Keep).await;
    until_allowed(evicts).await;
}

async fn moves_are_allowed_by_a_role(bed: &Testbed) {
    let client = bed.plane.client(Identity::Extender).await;
    let admin = &bed.cluster.client;
    let nodes: Api<Node> = Api::all(admin.clone());
    let node: Node = serde_json::from_value(json!({"metadata": {"name": "rights-moves"},
            "status": {"allocatable": {"cpu": "1", "memory": "1Gi"}}}))
    .expect("a node");
    nodes.create(&PostParams::default(), &node).await.expect("a node");
    for (name, movable) in [("moves", "restart"), ("stays", "never")] {
        let pod = json!({
            "metadata": {"name": name, "annotations": {
                "gpupack.dev/movable": movable, "placed.gpupack.dev/placement": "{}"}},
            "spec": {"nodeName": "rights-moves", "containers": [{"name": "main", "image": "none",
                "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "RestartContainer"}],
                "resources": {"requests": {"cpu": "10m", "memory": "1Mi"}}}]},
        });
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        bed.cluster.pods().create(&PostParams::default(), &pod).await.expect("a pod");
    }
    policies(&bed.cluster).await;
    let pods: Api<Pod> = Api::namespaced(client, &bed.cluster.namespace);
    let dry_run = PatchParams { dry_run: true, ..PatchParams::default() };
    let resizes = async |name: &str, resource: &str, amount: &str| {
        let resources = json!({"requests": {resource: amount}});
        let containers = json!([{"name": "main", "resources": resources}]);
        let patch = Patch::Strategic(json!({"spec": {"containers": containers}}));
        let patched = pods.patch_subresource("resize", name, &dry_run, &patch).await;
        patched.map(drop).map_err(|error| reported(&error))
    };
    until_refused("cannot patch resource \"pods/resize\"", async || {
        resizes("moves", "cpu", "9m").await
    })
    .await;
    manifests::apply(admin, "moves.yaml", Mode::Keep).await;
    until_allowed(async || resizes("moves", "cpu", "9m").await).await;
    let refused = resizes("stays", "cpu", "9m").await.expect_err("it did not opt in");
    assert!(refused.contains("resizes no pod without"), "{refused}");
    let refused = resizes("moves", "memory", "2Mi").await.expect_err("memory");
    assert!(refused.contains("changes no memory request"), "{refused}");
    let _removed = nodes.delete("rights-moves", &DeleteParams::default()).await;
}

/// Labels all nodes as cloud providers do: from 1.35 on the API server copies these labels to each Binding.
async fn label_zones(admin: &Client) {
    let labels = json!({"metadata": {"labels": {
        "topology.kubernetes.io/region": "r", "topology.kubernetes.io/zone": "r-a"}}});
    let nodes: Api<Node> = Api::all(admin.clone());
    for node in nodes.list(&ListParams::default()).await.expect("nodes") {
        let patch = Patch::Merge(&labels);
        let labelled = nodes.patch(&node.name_any(), &PatchParams::default(), &patch).await;
        labelled.expect("a label");
    }
}

/// Gives the extender's account every right on pods, so that what refuses is the policy.
async fn grant_everything(admin: &Client) -> Api<ClusterRoleBinding> {
    let role = json!({"metadata": {"name": TOO_MUCH}, "rules": [
        {"apiGroups": [""], "resources": ["pods", "pods/status", "pods/ephemeralcontainers",
            "pods/binding", "bindings"], "verbs": ["*"]}]});
    let role: ClusterRole = serde_json::from_value(role).expect("a role");
    let binding = json!({"metadata": {"name": TOO_MUCH},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": TOO_MUCH},
        "subjects": [{"kind": "ServiceAccount", "name": "gpupack", "namespace": "gpu-system"}]});
    let binding: ClusterRoleBinding = serde_json::from_value(binding).expect("a binding");
    let parameters = PatchParams::apply("testbed");
    let roles: Api<ClusterRole> = Api::all(admin.clone());
    roles.patch(TOO_MUCH, &parameters, &Patch::Apply(&role)).await.expect("a role");
    let bindings: Api<ClusterRoleBinding> = Api::all(admin.clone());
    bindings.patch(TOO_MUCH, &parameters, &Patch::Apply(&binding)).await.expect("a binding");
    bindings
}

async fn patches(stage: &Stage, client: &Client) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &stage.cluster.namespace);
    let annotation = |key: &str, value: Value| json!({"metadata": {"annotations": {key: value}}});
    let fence = annotation("placed.gpupack.dev/fence", "1".into());
    let change = async |patch: &Value| {
        let patched =
            pods.patch("waiting", &PatchParams::default(), &Patch::Strategic(patch)).await;
        patched.map_err(|error| reported(&error))
    };
    // Until the role that gives too much is in force, RBAC refuses this.
    let status = async || {
        let patch = Patch::Merge(&fence);
        let patched = pods.patch_status("waiting", &PatchParams::default(), &patch).await;
        patched.map(drop).map_err(|error| reported(&error))
    };
    until_refused(POLICY, status).await;
    change(&fence).await.expect("a fence");
    let admin = stage.cluster.pods();
    let note = annotation("team", "a".into());
    admin.patch("waiting", &PatchParams::default(), &Patch::Merge(&note)).await.expect("a note");
    change(&annotation("placed.gpupack.dev/fence", Value::Null)).await.expect("its own");
    for patch in [
        annotation("team", "b".into()),
        annotation("team", Value::Null),
        annotation("more", "x".into()),
        annotation("placed.gpupack.dev/devices", "runtime.nvidia.com/gpu=all".into()),
        annotation("placed.gpupack.dev/uuids", "all".into()),
        annotation("kubectl.kubernetes.io/restartedAt", "x".into()),
        json!({"metadata": {"labels": {"app": "other"}}}),
        json!({"metadata": {"labels": {"gpupack.dev/leader": "true"}}}),
        json!({"metadata": {"labels": {"e2e/pod": null}}}),
        json!({"metadata": {"finalizers": ["example.com/keep"]}}),
        json!({"metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet",
            "name": "x", "uid": "1"}]}}),
        json!({"spec": {"activeDeadlineSeconds": 1}}),
        json!({"spec": {"containers": [{"name": "main", "image": "evil/image"}]}}),
    ] {
        let message = change(&patch).await.expect_err("a change of what is not its own");
        assert!(message.contains(POLICY), "{patch}: {message}");
    }
    stage.figure("2 changes of its own annotations pass, 13 others of a pod are refused");
}

/// The label of the replica that leads: on the extender's own pods, and no other label.
async fn leader_label(stage: &Stage, client: &Client) {
    let admin: Api<Pod> = Api::namespaced(stage.cluster.client.clone(), "gpu-system");
    let mut replica = PodPlan::new("replica").for_scheduler("nobody").to_pod();
    let labels = [("name", "gpupack"), ("component", "extender")];
    let labels = labels.map(|(key, value)| (format!("app.kubernetes.io/{key}"), value.to_owned()));
    replica.metadata.labels = Some(labels.into());
    replica.metadata.namespace = Some("gpu-system".to_owned());
    for container in &mut replica.spec.as_mut().expect("a spec").containers {
        let restricted = json!({"allowPrivilegeEscalation": false, "runAsNonRoot": true,
            "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}});
        container.security_context = serde_json::from_value(restricted).ok();
    }
    admin.create(&PostParams::default(), &replica).await.expect("a pod of the extender");
    let pods: Api<Pod> = Api::namespaced(client.clone(), "gpu-system");
    let label = async |key: &str, value: Value| {
        let patch = json!({"metadata": {"labels": {key: value}}});
        let patched = pods.patch("replica", &PatchParams::default(), &Patch::Merge(&patch)).await;
        patched.map_err(|error| reported(&error))
    };
    label("gpupack.dev/leader", "true".into()).await.expect("it leads");
    label("gpupack.dev/leader", Value::Null).await.expect("it leads no more");
    for key in ["app", "app.kubernetes.io/component"] {
        let message = label(key, "other".into()).await.expect_err("another label");
        assert!(message.contains(POLICY), "{key}: {message}");
    }
    admin.delete("replica", &DeleteParams::default()).await.expect("it is there");
    stage.figure("the leader's label passes on the extender's own pods, other labels do not");
}

/// Annotations that name devices: on no pod, whether it requests a GPU or not.
async fn named_devices(stage: &Stage) {
    let whole = PodPlan::new("whole").limited("nvidia.com/gpu", "1").for_scheduler("nobody");
    stage.cluster.add_pods(&[whole]).await;
    let (api, parameters) = (stage.cluster.pods(), PatchParams::default());
    let patch = json!({"metadata": {"annotations": {"devices.nri.io/container.main": "x"}}});
    let patch = Patch::Merge(&patch);
    for name in ["gpu", "whole", "plain"] {
        let message = reported(&api.patch(name, &parameters, &patch).await.expect_err(name));
        assert!(message.contains("names devices"), "{message}");
    }
    stage.cluster.delete_pod("whole").await;
}

/// Creation, deletion, status and debug containers.
async fn others(stage: &Stage, client: &Client) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &stage.cluster.namespace);
    let (post, patch) = (PostParams::default(), PatchParams::default());
    let status = Patch::Merge(json!({"status": {"phase": "Failed"}}));
    let debug = Patch::Strategic(
        json!({"spec": {"ephemeralContainers": [{"name": "debug", "image": "local/none"}]}}),
    );
    let new = PodPlan::new("new").to_pod();
    for refused in [
        pods.create(&post, &new).await.map(drop),
        pods.delete("plain", &DeleteParams::default()).await.map(drop),
        pods.patch_status("waiting", &patch, &status).await.map(drop),
        pods.patch_ephemeral_containers("waiting", &patch, &debug).await.map(drop),
    ] {
        let message = reported(&refused.expect_err("not the extender's to do"));
        assert!(message.contains(POLICY), "{message}");
    }
    stage.figure("creation, deletion, status and debug containers are refused");
}

async fn bindings(stage: &Stage, client: &Client) {
    let namespace = &stage.cluster.namespace;
    let binding = |metadata: Value| {
        let mut binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": "rights-00"}});
        binding["metadata"]["name"] = "waiting".into();
        binding
    };
    let whole = |devices: &str| json!({"annotations": {"placed.gpupack.dev/devices": devices, "placed.gpupack.dev/placement": "{}"}});
    for metadata in [
        json!({"annotations": {"placed.gpupack.dev/devices": "runtime.nvidia.com/gpu=all"}}),
        json!({"annotations": {"placed.gpupack.dev/placement": "{}"}}),
        whole("runtime.nvidia.com/gpu=all"),
        whole("management.nvidia.com/gpu=all"),
        json!({"annotations": {"placed.gpupack.dev/devices": "runtime.nvidia.com/gpu=GPU-a",
            "placed.gpupack.dev/placement": "{}", "placed.gpupack.dev/uuids": "all"}}),
        whole("runtime.nvidia.com/gpu=GPU-a,runtime.nvidia.com/gpu=0"),
        json!({"annotations": {"team": "x"}}),
        json!({"labels": {"app": "other"}}),
    ] {
        for path in [
            format!("/api/v1/namespaces/{namespace}/pods/waiting/binding"),
            format!("/api/v1/namespaces/{namespace}/bindings"),
        ] {
            let message = post(client, &path, &binding(metadata.clone())).await;
            let message = message.expect_err("no Binding of gpupack's");
            assert!(message.contains(POLICY), "{metadata} at {path}: {message}");
        }
    }
    assert!(!stage.watching.ask(|pods| is_bound(pods, "waiting")), "a refused Binding bound it");
    let bound = stage.cluster.pods().get("gpu").await.expect("it is there");
    assert!(bound.annotations().contains_key("placed.gpupack.dev/placement"), "the real one");
    stage.figure("Bindings with a whole placement and with none pass, 8 others are refused");
}

async fn post(client: &Client, path: &str, body: &Value) -> Result<Value, String> {
    let request = axum::http::Request::post(path).header("content-type", "application/json");
    let request = request.body(body.to_string().into_bytes()).expect("a sound request");
    client.request::<Value>(request).await.map_err(|error| reported(&error))
}

/// Waits until a call is refused with these words: the API server follows a changed role a moment later.
async fn until_refused(part: &str, call: impl AsyncFn() -> Result<(), String>) {
    let started = clock::now();
    loop {
        let reported = call().await;
        if reported.as_ref().is_err_and(|message| message.contains(part)) {
            return;
        }
        assert!(started.elapsed() < LIMIT, "not refused with `{part}`: {reported:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until a call is no longer rejected.
async fn until_allowed(call: impl AsyncFn() -> Result<(), String>) {
    let started = clock::now();
    while let Err(message) = call().await {
        assert!(started.elapsed() < LIMIT, "still refused: {message}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
