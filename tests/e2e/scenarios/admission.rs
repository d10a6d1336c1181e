//! The admission webhook and the policies in a real API server.

use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, figure, scenario};
use crate::watching::{find, is_bound};
use crate::webhook::{Webhook, dry_run, policies, reported, unconfigure};

const LIMIT: Duration = Duration::from_secs(30);

const DEVICES: &str = "metadata.annotations['placed.gpupack.dev/devices']";

#[test]
fn pods_of_all_controllers_are_completed_and_placed() {
    scenario("admission", |bed| async move {
        let plane = bed.plane;
        let stage = bed.stage(Setup::of(Fleet::new().with("admission", 2, (2, A100)))).await;
        // Older than the webhook: placed, with an event that it cannot see its GPU.
        stage.cluster.add_pods(&[PodPlan::fraction("older", "0.25")]).await;
        stage.watching.until("older bound", LIMIT, |pods| is_bound(pods, "older")).await;
        let mut webhook = Webhook::start(plane, &stage.cluster, json!({})).await;
        policies(&stage.cluster).await;
        let api = stage.cluster.pods();
        let made = [deployment_pod(&stage).await, job_pod(&stage).await, bare_pod()];
        let started = clock::now();
        let mut names = Vec::new();
        for pod in &made {
            let stored = api.create(&PostParams::default(), pod).await.map_err(|e| reported(&e));
            let stored = stored.expect("a good pod");
            completed(&stored);
            names.push(stored.metadata.name.expect("every pod has a name"));
        }
        let each = clock::ms(started.elapsed() / 3);
        stage.watching.until_bound(1 + made.len(), LIMIT).await;
        stage.figure(&format!(
            "pods of a Deployment, a Job and no owner completed and placed, {each} ms a creation"
        ));
        reported_without_gpu(&stage, "older").await;
        rejected_with_a_suggestion(&stage).await;
        debug_containers(&stage, &names[0]).await;
        edits(&stage, &names[0]).await;
        many_containers(&stage).await;
        closed_without_the_webhook(&stage, &mut webhook).await;
        no_pod_takes_gpus_once_it_is_gone(&stage, &names[0]).await;
        stage.judge().await;
    });
}

/// A pod as its maker would create it from its template. There is no controller manager here.
fn of_template(template: &PodTemplateSpec, owner: (&str, &str, String)) -> Pod {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": template.metadata, "spec": template.spec});
    let (api_version, kind, uid) = owner;
    pod["metadata"]["generateName"] = format!("{}-", kind.to_lowercase()).into();
    pod["metadata"]["ownerReferences"] = json!([{"apiVersion": api_version, "kind": kind,
        "name": kind.to_lowercase(), "uid": uid, "controller": true}]);
    serde_json::from_value(pod).expect("a template makes a pod")
}

/// A template with a GPU, an init container and a side car, which names neither scheduler nor class.
fn template(annotations: Value, restart: &str) -> Value {
    json!({
        "metadata": {"labels": {"app": "a"}, "annotations": annotations},
        "spec": {
            "restartPolicy": restart,
            "initContainers": [{"name": "setup", "image": "local/none"}],
            "containers": [
                {"name": "main", "image": "local/none", "env": [{"name": "A", "value": "$(GPUPACK_MEMORY_MIB)"}]},
                {"name": "side", "image": "local/none", "resources": {"requests": {"cpu": "10m"}}},
            ],
        },
    })
}

async fn deployment_pod(stage: &Stage) -> Pod {
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"},
        "spec": {"selector": {"matchLabels": {"app": "a"}},
            "template": template(json!({"gpu-fraction": "0.5"}), "Always")}});
    let deployment: Deployment = serde_json::from_value(deployment).expect("a Deployment");
    let api: Api<Deployment> =
        Api::namespaced(stage.cluster.client.clone(), &stage.cluster.namespace);
    let made = api.create(&PostParams::default(), &deployment).await.expect("a good Deployment");
    let uid = made.metadata.uid.expect("every object has a UID");
    of_template(&made.spec.expect("a spec").template, ("apps/v1", "ReplicaSet", uid))
}

async fn job_pod(stage: &Stage) -> Pod {
    let keys = json!({"gpu-memory": "8192", "gpu-fraction-num-devices": "2"});
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"},
        "spec": {"template": template(keys, "Never")}});
    let job: Job = serde_json::from_value(job).expect("a Job");
    let api: Api<Job> = Api::namespaced(stage.cluster.client.clone(), &stage.cluster.namespace);
    let made = api.create(&PostParams::default(), &job).await.expect("a good Job");
    let uid = made.metadata.uid.expect("every object has a UID");
    of_template(&made.spec.expect("a spec").template, ("batch/v1", "Job", uid))
}

/// Whole GPUs for our scheduler, which become annotations.
fn bare_pod() -> Pod {
    let mut pod = json!(PodPlan::new("bare").limited("nvidia.com/gpu", "1").to_pod());
    pod["spec"]["containers"]
        .as_array_mut()
        .expect("a list")
        .insert(0, json!({"name": "side", "image": "local/none"}));
    serde_json::from_value(pod).expect("still a pod")
}

/// What the API server stored is complete: one container with the devices, none for the others.
fn completed(pod: &Pod) {
    let spec = pod.spec.as_ref().expect("a spec");
    assert_eq!(spec.scheduler_name.as_deref(), Some("gpupack"));
    assert_eq!(spec.runtime_class_name.as_deref(), Some("nvidia"));
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    for container in containers {
        let seen = container.env.iter().flatten().filter(|v| v.name == "NVIDIA_VISIBLE_DEVICES");
        let seen: Vec<_> = seen.collect();
        assert_eq!(seen.len(), 1, "{}", container.name);
        let source = seen[0].value_from.as_ref().and_then(|source| source.field_ref.as_ref());
        let path = source.map(|field| field.field_path.as_str());
        let limits =
            container.resources.as_ref().and_then(|r| r.limits.clone()).unwrap_or_default();
        let is_marked = limits.keys().any(|key| key.starts_with("gpupack.dev/"));
        assert!(!limits.contains_key("nvidia.com/gpu"), "kubelet would give it another one");
        match container.name.as_str() {
            "main" => assert_eq!((path, is_marked), (Some(DEVICES), true)),
            _ => assert_eq!((seen[0].value.as_deref(), is_marked), (Some("void"), false)),
        }
    }
}

async fn reported_without_gpu(stage: &Stage, name: &str) {
    let started = clock::now();
    loop {
        let events = stage.cluster.events().await;
        let mut placed = events.iter().filter(|event| event.reason == "GpuPlaced");
        let blind = |message: &str| message.contains("does not see its GPU");
        if placed.clone().count() >= 4 {
            assert!(
                placed.all(|event| blind(&event.message) == (event.pod == name)),
                "{events:#?}"
            );
            return;
        }
        assert!(started.elapsed() < LIMIT, "not all pods have their event: {events:#?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn rejected_with_a_suggestion(stage: &Stage) {
    let api = stage.cluster.pods();
    let mut taking = json!(PodPlan::fraction("taking", "0.5").to_pod());
    taking["spec"]["containers"][0]["env"] =
        json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    let mut privileged = json!(PodPlan::fraction("privileged", "0.5").to_pod());
    privileged["spec"]["containers"][0]["securityContext"] = json!({"privileged": true});
    let mut stranger = json!(PodPlan::new("stranger").for_scheduler("default-scheduler").to_pod());
    stranger["spec"]["runtimeClassName"] = "nvidia".into();
    // An unknown class and an amount of zero give no access.
    let mut unknown = stranger.clone();
    unknown["spec"]["runtimeClassName"] = "fast".into();
    let mut zero = stranger.clone();
    zero["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/gpu": "0"}});
    let spec = |field: &str, value: Value| {
        let mut pod = json!(PodPlan::fraction("beyond", "0.5").to_pod());
        pod["spec"][field] = value;
        pod
    };
    let data = json!([{"name": "data", "hostPath": {"path": "/data"}}]);
    let hami = PodPlan::new("hami").limited("nvidia.com/gpu", "1");
    for (pod, part) in [
        (
            json!(hami.limited("nvidia.com/gpumem", "4096").to_pod()),
            "`gpu-memory` (MiB of one GPU)",
        ),
        (json!(PodPlan::fraction("word", "half").to_pod()), "for instance `0.5`"),
        (
            json!(PodPlan::memory("unit", 1).annotated("gpu-memory", "8Gi").to_pod()),
            "without a unit",
        ),
        (taking, "remove the variable"),
        (privileged, "remove `securityContext.privileged`"),
        (stranger, "or remove `runtimeClassName`"),
        (unknown, "webhook.runtime_classes_without_gpus"),
        (zero, "or remove `runtimeClassName`"),
        (spec("hostNetwork", true.into()), "webhook.allow_host_network"),
        (spec("volumes", data), "webhook.allowed_host_paths"),
        (spec("terminationGracePeriodSeconds", 3600.into()), "set `600` or less"),
        (
            spec("resourceClaims", json!([{"name": "gpu", "resourceClaimName": "gpu"}])),
            "webhook.allow_resource_claims",
        ),
        (
            json!(PodPlan::new("forged").annotated("placed.gpupack.dev/devices", "x").to_pod()),
            "only by gpupack",
        ),
    ] {
        let pod: Pod = serde_json::from_value(pod).expect("still a pod");
        let message = api.create(&PostParams::default(), &pod).await.map_err(|e| reported(&e));
        let message = message.expect_err(part);
        let by_webhook = message.starts_with("admission webhook \"pods.gpupack.dev\" denied");
        assert!(by_webhook && message.contains(part), "{message}");
    }
    let mut harmless = json!(PodPlan::new("kata").for_scheduler("default-scheduler").to_pod());
    harmless["spec"]["runtimeClassName"] = "kata".into();
    let harmless: Pod = serde_json::from_value(harmless).expect("still a pod");
    dry_run(&api, &harmless).await.expect("a runtime that provides no GPU");
    stage.figure("13 bad pods rejected at their creation, each with a suggestion");
}

async fn debug_containers(stage: &Stage, name: &str) {
    let api = stage.cluster.pods();
    let added = async |container: Value| {
        let patch = Patch::Strategic(json!({"spec": {"ephemeralContainers": [container]}}));
        let patched = api.patch_ephemeral_containers(name, &PatchParams::default(), &patch).await;
        patched.map_err(|error| reported(&error))
    };
    let pod =
        added(json!({"name": "debug", "image": "local/cuda"})).await.expect("a harmless container");
    let debug = &pod.spec.expect("a spec").ephemeral_containers.expect("it is there")[0];
    let variable = &debug.env.as_ref().expect("it has variables")[0];
    assert_eq!(
        (variable.name.as_str(), variable.value.as_deref()),
        ("NVIDIA_VISIBLE_DEVICES", Some("void"))
    );
    for (bad, part) in [
        (
            json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}),
            "remove the variable",
        ),
        (json!({"securityContext": {"privileged": true}}), "privileged"),
    ] {
        let mut container = json!({"name": "more", "image": "local/cuda"});
        container.as_object_mut().expect("a map").extend(bad.as_object().expect("a map").clone());
        let message = added(container).await.expect_err(part);
        assert!(message.contains(part), "{message}");
    }
    stage.figure("a debug container gets `void`, two that would take a GPU are refused");
}

/// The administrator may do everything but this.
async fn edits(stage: &Stage, name: &str) {
    let api = stage.cluster.pods();
    let parameters = PatchParams::default();
    let placed = stage.watching.ask(|pods| find(pods, name).map(|seen| seen.pod.clone()));
    let placed = placed.and_then(|pod| pod.metadata.annotations).expect("it is placed");
    assert!(placed.contains_key("placed.gpupack.dev/uuids"), "{placed:?}");
    let keys = |key: &str, value: Value| json!({"metadata": {"annotations": {key: value}}});
    let request = "does not change while the pod";
    for (patch, part) in [
        (
            keys("placed.gpupack.dev/devices", "runtime.nvidia.com/gpu=GPU-x".into()),
            "only by gpupack",
        ),
        (keys("placed.gpupack.dev/placement", Value::Null), "only by gpupack"),
        (keys("placed.gpupack.dev/new", "x".into()), "only by gpupack"),
        (json!({"metadata": {"labels": {"placed.gpupack.dev/x": "y"}}}), "only by gpupack"),
        (keys("gpu-fraction", "0.1".into()), request),
        (keys("gpu-fraction", Value::Null), request),
        (keys("gpupack.dev/policy", "spread".into()), request),
        (keys("cdi.k8s.io/x", "nvidia.com/gpu=all".into()), request),
        (keys("io.kubernetes.cri-o.Devices", "/dev/nvidia0".into()), request),
    ] {
        for is_status in [false, true] {
            let merge = Patch::Merge(&patch);
            let patched = match is_status {
                false => api.patch(name, &parameters, &merge).await,
                true => api.patch_status(name, &parameters, &merge).await,
            };
            let message = reported(&patched.expect_err("an edit of what is ours"));
            assert!(message.contains(part), "{message}");
        }
    }
    forged_binding(stage).await;
    let notes: serde_json::Map<String, Value> =
        (0..5_000).map(|at| (format!("note-{at}"), "".into())).collect();
    for metadata in [json!({"annotations": notes}), json!({"labels": notes})] {
        let mut pod = json!(PodPlan::new("many").for_scheduler("nobody").to_pod());
        for (field, values) in metadata.as_object().expect("a map") {
            pod["metadata"][field] = values.clone();
        }
        let pod: Pod = serde_json::from_value(pod).expect("still a pod");
        let message = dry_run(&api, &pod).await.expect_err("more than the policies look at");
        assert!(message.contains("at most 1,000 annotations"), "{message}");
    }
    let harmless = keys("team", "a".into());
    api.patch(name, &parameters, &Patch::Merge(&harmless))
        .await
        .expect("an annotation of the user");
    stage.cluster.set_phase(name, "Running").await;
    stage.figure(
        "9 edits of what is ours refused, on pod and status; the user's own and kubelet's pass",
    );
}

/// The conditions check the limits of at most a hundred containers: more cost the API server seconds.
async fn many_containers(stage: &Stage) {
    let api = stage.cluster.pods();
    let limits: serde_json::Map<String, Value> =
        (0..99).map(|at| (format!("e.io/{at}"), "1".into())).collect();
    let mut took = Vec::new();
    for (count, is_sent) in [(100, false), (900, true)] {
        let mut pod = json!(PodPlan::new("long").for_scheduler("nobody").to_pod());
        let container = |at| json!({"name": format!("c-{at}"), "image": "local/none", "resources": {"limits": limits}});
        pod["spec"]["containers"] = (0..count).map(container).collect();
        let pod: Pod = serde_json::from_value(pod).expect("still a pod");
        let started = clock::now();
        let answer = dry_run(&api, &pod).await;
        took.push(clock::ms(started.elapsed()));
        let by_webhook = answer.is_err_and(|error| error.contains("pods.gpupack.dev"));
        assert_eq!(by_webhook, is_sent, "{count}: the webhook rejects this many limits");
    }
    stage.figure(&format!("pods of 100 and 900 containers, 99 limits each: {took:?} ms"));
}

/// A Binding brings annotations past every check of the pod but the policy's.
async fn forged_binding(stage: &Stage) {
    let plan = PodPlan::fraction("waiting", "0.5").annotated("gpupack.dev/gpu-model", "H100");
    stage.cluster.add_pods(&[plan]).await;
    let path = format!("/api/v1/namespaces/{}/pods/waiting/binding", stage.cluster.namespace);
    for (key, part) in [
        ("placed.gpupack.dev/devices", "only by gpupack"),
        ("gpu-fraction", "does not change"),
        ("cdi.k8s.io/x", "does not change"),
    ] {
        let binding = json!({"apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": "waiting", "annotations": {key: "1"}},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "admission-00"}});
        let request = axum::http::Request::post(&path).header("content-type", "application/json");
        let request = request.body(binding.to_string().into_bytes()).expect("a sound request");
        let bound = stage.cluster.client.request::<Value>(request).await;
        let message = reported(&bound.expect_err("a Binding with what is ours"));
        assert!(message.contains(part), "{message}");
    }
    stage.cluster.delete_pod("waiting").await;
}

async fn closed_without_the_webhook(stage: &Stage, webhook: &mut Webhook) {
    webhook.kill();
    let api = stage.cluster.pods();
    let started = clock::now();
    let refused = dry_run(&api, &PodPlan::fraction("late", "0.25").to_pod()).await;
    let took = clock::ms(started.elapsed());
    let message = refused.expect_err("no webhook completed it");
    assert!(message.contains("pods.gpupack.dev"), "{message}");
    let plain = PodPlan::new("plain").for_scheduler("default-scheduler");
    dry_run(&api, &plain.to_pod()).await.expect("a pod without a GPU is not affected");
    let system: Api<Pod> = Api::namespaced(stage.cluster.client.clone(), "kube-system");
    let pod = PodPlan::fraction("system", "0.25").to_pod();
    dry_run(&system, &pod).await.expect("system namespaces are not affected");
    figure(
        "admission",
        &format!("without the webhook a GPU pod is refused in {took} ms, others pass"),
    );
}

/// What the policy of `webhook.yaml` enforces when the webhook is not called.
async fn no_pod_takes_gpus_once_it_is_gone(stage: &Stage, name: &str) {
    let api = stage.cluster.pods();
    unconfigure(&stage.cluster).await;
    let under_nvidia = |env: Value| {
        let mut pod = json!(PodPlan::fraction("taking", "0.5").to_pod());
        pod["spec"]["runtimeClassName"] = "nvidia".into();
        pod["spec"]["containers"][0]["env"] = env;
        serde_json::from_value::<Pod>(pod).expect("still a pod")
    };
    let variable = |value: &str| json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": value});
    let ours = json!({"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": DEVICES}}});
    // Where the toolkit's configuration names it as `swarm-resource`.
    let swarm = json!({"name": "DOCKER_RESOURCE_GPU", "value": "all"});
    for bad in [
        json!([]),
        json!([variable("all")]),
        json!([ours, variable("all")]),
        json!([ours, swarm]),
        json!([variable("void"), swarm]),
    ] {
        let message = dry_run(&api, &under_nvidia(bad.clone())).await.expect_err("it takes a GPU");
        assert!(message.contains("gpupack-devices"), "{bad}: {message}");
    }
    let limited = |class: &str, limits: Value, node: Value| {
        let plan = PodPlan::new("limited").for_scheduler("default-scheduler");
        let mut pod = json!(plan.to_pod());
        pod["spec"]["runtimeClassName"] = class.into();
        pod["spec"]["nodeName"] = node;
        pod["spec"]["containers"][0]["env"] = json!([variable("all")]);
        pod["spec"]["containers"][0]["resources"] = json!({"limits": limits});
        serde_json::from_value::<Pod>(pod).expect("still a pod")
    };
    let one = json!({"nvidia.com/gpu": "1"});
    for bad in [
        limited("nvidia", json!({"nvidia.com/x": "0"}), Value::Null),
        limited("nvidia", json!({"nvidia.com/x": "1"}), Value::Null),
        limited("nvidia", json!({"nvidia.com/gpu": "0"}), Value::Null),
        limited("nvidia", json!({"nvidia.com/mig-1g.5gb": "0"}), Value::Null),
        limited("nvidia", one.clone(), "admission-00".into()),
        limited("fast", json!({}), Value::Null),
    ] {
        let message = dry_run(&api, &bad).await.expect_err("it takes every GPU");
        assert!(message.contains("gpupack-devices"), "{message}");
    }
    for good in [limited("nvidia", one, Value::Null), limited("kata", json!({}), Value::Null)] {
        dry_run(&api, &good).await.expect("kubelet's, and one of another runtime");
    }
    for good in [json!([ours]), json!([variable("void")])] {
        dry_run(&api, &under_nvidia(good)).await.expect("as the webhook writes it");
    }
    let debug = json!({"name": "late", "image": "local/cuda", "env": [variable("all")]});
    let patch = Patch::Strategic(json!({"spec": {"ephemeralContainers": [debug]}}));
    let patched = api.patch_ephemeral_containers(name, &PatchParams::default(), &patch).await;
    let message = reported(&patched.expect_err("it takes every GPU"));
    assert!(message.contains("gpupack-devices"), "{message}");
    stage.figure("with the webhook's configuration deleted, 12 ways to take every GPU are refused");
}
