//! For any pod sent to admission: no panic, and no container that sees a device of its own choice.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use engine::hardware::mig::GEOMETRIES;
use kube_api::admission::rules::Admission;
use kube_api::config::webhook::{MemoryLimit, ThreadCap, Unmanaged, WebhookConfig};
use kube_api::request::annotations::parse_request;
use kube_api::request::resources::{
    ContainerKind, ContainerRequest, MARKERS, MIG_PREFIX, SHARED_SLOT, WHOLE,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use serde_json::{Value, json};

fn rules(settings: WebhookConfig) -> Admission {
    Admission::new(settings, vec!["gpupack".to_owned(), "gpupack-b".to_owned()])
}

fn review(object: &Value, sub_resource: &str) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "4711", "name": "", "namespace": "team-a",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "subResource": sub_resource, "operation": "CREATE",
            "userInfo": {"username": "ann"}, "object": object, "dryRun": false,
        },
    })
}

/// The pod as it is stored; `None` if it is rejected or is not a pod.
fn answered(rules: &Admission, object: &Value) -> Option<Value> {
    let answer = rules.review(review(object, "").to_string().as_bytes()).ok()?;
    let text: Value = serde_json::from_slice(&answer.review).unwrap();
    let mut pod = object.clone();
    if let Some(bytes) = text["response"]["patch"].as_array() {
        let bytes: Vec<u8> =
            bytes.iter().map(|b| u8::try_from(b.as_u64().unwrap()).unwrap()).collect();
        let patch: json_patch::Patch = serde_json::from_slice(&bytes).unwrap();
        json_patch::patch(&mut pod, &patch).unwrap();
    }
    (text["response"]["allowed"] == true).then_some(pod)
}

/// Any JSON, of little depth.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(".{0,8}", inner, 0..4)
                .prop_map(|map| map.into_iter().collect::<serde_json::Map<_, _>>().into()),
        ]
    })
}

fn any_variable() -> impl Strategy<Value = Value> {
    let name = prop_oneof![
        Just("NVIDIA_VISIBLE_DEVICES"),
        Just("NVIDIA_GPU_MEMORY_LIMIT"),
        Just("GPUPACK_MEMORY_MIB"),
        Just("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
        Just("CUDA_MPS_PIPE_DIRECTORY"),
        Just("A"),
        Just("B"),
    ];
    let path = |key: &str| json!({"fieldRef": {"fieldPath": format!("metadata.annotations['placed.gpupack.dev/{key}']")}});
    let source = prop_oneof![
        Just(json!({"value": "void"})),
        Just(json!({"value": "all"})),
        Just(json!({"valueFrom": path("devices")})),
        Just(json!({"valueFrom": path("memory-mib")})),
        Just(json!({"valueFrom": path("mps-memory-limit")})),
        Just(json!({"value": "/run/gpupack-mps"})),
        Just(json!({"valueFrom": path("devices"), "value": ""})),
        Just(json!({})),
    ];
    (name, source).prop_map(|(name, mut variable)| {
        variable["name"] = name.into();
        variable
    })
}

fn any_mount() -> impl Strategy<Value = Value> {
    let name = prop_oneof![Just("gpupack-mps"), Just("data")];
    let path = prop_oneof![Just("/dev/shm"), Just("/run/gpupack-mps"), Just("/data")];
    let part = prop_oneof![Just(None), Just(Some("$(GPUPACK_DEVICE_UUIDS)/pipe"))];
    (name, path, part).prop_map(|(name, path, part)| match part {
        Some(part) => json!({"name": name, "mountPath": path, "subPathExpr": part}),
        None => json!({"name": name, "mountPath": path}),
    })
}

fn any_volume() -> impl Strategy<Value = Value> {
    let name = prop_oneof![Just("gpupack-mps"), Just("data")];
    let path = prop_oneof![Just("/run/gpupack/mps"), Just("/run/gpupack"), Just("/data")];
    (name, path).prop_map(
        |(name, path)| json!({"name": name, "hostPath": {"path": path, "type": "Directory"}}),
    )
}

fn any_container() -> impl Strategy<Value = Value> {
    let env = proptest::option::of(proptest::collection::vec(any_variable(), 0..4));
    let resource = prop_oneof![
        Just("nvidia.com/gpu"),
        Just("gpupack.dev/gpu-share"),
        Just("gpupack.dev/gpu-memory"),
        Just("cpu"),
    ];
    let amounts = || {
        let amount = prop_oneof![Just("0"), Just("1"), Just("500k"), Just("x")];
        proptest::option::of(proptest::collection::btree_map(resource.clone(), amount, 0..3))
    };
    let mounts = proptest::option::weighted(0.2, proptest::collection::vec(any_mount(), 0..3));
    let parts = (env, mounts, proptest::option::of((amounts(), amounts())));
    parts.prop_map(|(env, mounts, resources)| {
        let resources =
            resources.map(|(limits, requests)| json!({"limits": limits, "requests": requests}));
        json!({"name": "", "env": env, "volumeMounts": mounts, "resources": resources})
    })
}

fn any_pod() -> impl Strategy<Value = Value> {
    let keys = prop_oneof![
        Just(json!({})),
        Just(Value::Null),
        Just(json!({"gpu-fraction": "0.5"})),
        Just(json!({"gpu-fraction": "1", "gpu-fraction-num-devices": "3"})),
        Just(json!({"gpu-memory": "9", "gpu-fraction-container-name": "c1"})),
        Just(json!({"a/b~c": "x"})),
    ];
    let word = |words: &'static [&'static str]| proptest::sample::select(words);
    (
        keys,
        proptest::collection::vec(any_container(), 0..4),
        proptest::option::of(proptest::collection::vec(any_container(), 0..3)),
        word(&["", "default-scheduler", "gpupack", "other"]),
        word(&["", "nvidia", "kata"]),
        proptest::option::weighted(0.3, proptest::collection::vec(any_volume(), 0..3)),
        proptest::option::of((".{0,8}", any_json())),
    )
        .prop_map(|(annotations, mut regular, mut init, scheduler, class, volumes, odd)| {
            let all = regular.iter_mut().chain(init.iter_mut().flatten());
            for (number, container) in all.enumerate() {
                container["name"] = format!("c{number}").into();
            }
            let mut pod = json!({"metadata": {"annotations": annotations}, "spec": {
                "containers": regular, "initContainers": init, "schedulerName": scheduler,
                "runtimeClassName": class, "volumes": volumes,
            }});
            if let Some((field, value)) = odd {
                pod["spec"][&field] = value;
            }
            pod
        })
}

fn any_rules() -> impl Strategy<Value = Admission> {
    let unmanaged =
        proptest::sample::select(&[Unmanaged::Refuse, Unmanaged::Blank, Unmanaged::Allow]);
    let limits =
        proptest::sample::select(&[MemoryLimit::None, MemoryLimit::Driver, MemoryLimit::Mps]);
    (unmanaged, any::<bool>(), limits).prop_map(
        |(unmanaged, take_over_whole_gpus, memory_limit)| {
            rules(WebhookConfig {
                unmanaged,
                take_over_whole_gpus,
                memory_limit,
                allowed_host_paths: vec!["/data".parse().unwrap()],
                ..WebhookConfig::default()
            })
        },
    )
}

proptest! {
    #[test]
    fn no_body_makes_the_webhook_panic(body in any_json(), object in any_json()) {
        let rules = rules(WebhookConfig::default());
        let _ = rules.review(body.to_string().as_bytes());
        let _ = rules.review(review(&object, "").to_string().as_bytes());
        let pod = json!({"spec": object});
        let _ = rules.review(review(&pod, "ephemeralcontainers").to_string().as_bytes());
    }

    /// A pod of ours has one container with our variable and `void` in all others, each as the only
    /// one of its name; and admitting it again changes nothing.
    #[test]
    fn an_admitted_gpu_pod_sees_only_allocated_devices(pod in any_pod(), rules in any_rules()) {
        let Some(done) = answered(&rules, &pod) else { return Ok(()) };
        let again = answered(&rules, &done);
        prop_assert_eq!(again.as_ref(), Some(&done), "applied twice");
        let annotations = &done["metadata"]["annotations"];
        let asks = ["gpu-fraction", "gpu-memory"].iter().any(|key| annotations.get(*key).is_some());
        if !asks || done["spec"]["schedulerName"] == "other" {
            return Ok(());
        }
        let lists = ["containers", "initContainers"].map(|list| done["spec"][list].as_array());
        let containers: Vec<&Value> = lists.into_iter().flatten().flatten().collect();
        let mut granted = 0;
        for container in &containers {
            let env = container["env"].as_array().unwrap();
            let ours: Vec<_> = env.iter().filter(|v| v["name"] == "NVIDIA_VISIBLE_DEVICES").collect();
            prop_assert_eq!(ours.len(), 1);
            if ours[0]["value"].as_str() != Some("void") {
                granted += 1;
                let path = &ours[0]["valueFrom"]["fieldRef"]["fieldPath"];
                prop_assert_eq!(path, "metadata.annotations['placed.gpupack.dev/devices']");
            }
        }
        // A pod without a regular container is refused by the API server.
        let is_whole = lists[0].is_some_and(|regular| !regular.is_empty());
        prop_assert!(granted == 1 || !is_whole && granted == 0, "{} containers", granted);
        prop_assert_eq!(&done["spec"]["schedulerName"], "gpupack");
    }
}

/// What a container of a pod has to do with MPS: its variables, and its mounts of the volume or of
/// places that a client needs.
fn of_mps(container: &Value) -> (Vec<String>, Vec<String>) {
    let list = |field: &str| container[field].as_array().cloned().unwrap_or_default();
    let variables = list("env").into_iter().filter_map(|variable| {
        let name = variable["name"].as_str()?.strip_prefix("CUDA_MPS_")?.to_owned();
        let path = variable["valueFrom"]["fieldRef"]["fieldPath"].as_str();
        Some(format!("{name}={}", path.or(variable["value"].as_str()).unwrap_or_default()))
    });
    let mounts = list("volumeMounts").into_iter().filter_map(|mount| {
        let (name, path) = (mount["name"].as_str()?, mount["mountPath"].as_str()?);
        let is_ours = name == "gpupack-mps" || ["/dev/shm", "/run/gpupack-mps"].contains(&path);
        let part = mount["subPathExpr"].as_str().or(mount["subPath"].as_str()).unwrap_or_default();
        is_ours.then(|| format!("{name} {part} {path}"))
    });
    let (mut variables, mut mounts): (Vec<_>, Vec<_>) = (variables.collect(), mounts.collect());
    variables.sort();
    mounts.sort();
    (variables, mounts)
}

/// The variables and mounts of a client of MPS.
fn client() -> (Vec<String>, Vec<String>) {
    let limit = "metadata.annotations['placed.gpupack.dev/mps-memory-limit']";
    let pipe = "PIPE_DIRECTORY=/run/gpupack-mps".to_owned();
    let pipes = "gpupack-mps $(GPUPACK_DEVICE_UUIDS)/pipe /run/gpupack-mps";
    let mounts = vec![pipes.to_owned(), "gpupack-mps shm /dev/shm".to_owned()];
    (vec![format!("PINNED_DEVICE_MEM_LIMIT={limit}"), pipe], mounts)
}

proptest! {
    /// Under MPS the container with the GPU is a client with our limit and our mounts, once each, and
    /// no other container reaches the folders of the daemons.
    #[test]
    fn a_share_under_mps_is_a_client_and_no_other_pod_has_daemon_access(pod in any_pod()) {
        let memory_limit = MemoryLimit::Mps;
        let allowed_host_paths = vec!["/data".parse().unwrap()];
        let default = WebhookConfig::default();
        let rules = rules(WebhookConfig { memory_limit, allowed_host_paths, ..default });
        let Some(done) = answered(&rules, &pod) else { return Ok(()) };
        let again = answered(&rules, &done);
        prop_assert_eq!(again.as_ref(), Some(&done), "applied twice");
        let lists = ["containers", "initContainers"].map(|list| done["spec"][list].as_array());
        let containers: Vec<&Value> = lists.into_iter().flatten().flatten().collect();
        let variables = |c: &&&Value| {
            c["env"].as_array().is_some_and(|env| env.iter().any(|v| v["name"] == "GPUPACK_MEMORY_MIB"))
        };
        let annotations = &done["metadata"]["annotations"];
        let is_share = annotations["gpu-fraction"] == "0.5" || annotations["gpu-memory"] == "9";
        if done["spec"]["schedulerName"] != "gpupack" || !is_share || containers.is_empty() {
            return Ok(());
        }
        for other in containers.iter().filter(|c| !variables(c)) {
            let (own, mounts) = of_mps(other);
            prop_assert!(own.is_empty(), "{:?}", own);
            prop_assert!(mounts.iter().all(|it| !it.starts_with("gpupack-mps")), "{:?}", mounts);
        }
        for granted in containers.iter().filter(variables) {
            prop_assert_eq!(of_mps(granted), client());
        }
        let folder = json!({"path": "/run/gpupack/mps", "type": "Directory"});
        let volumes = done["spec"]["volumes"].as_array().unwrap();
        let names: BTreeSet<String> = volumes.iter().map(|it| it["name"].to_string()).collect();
        if names.len() < volumes.len() {
            return Ok(()); // the API server refuses two volumes of one name
        }
        for volume in volumes {
            let is_ours = volume["name"] == "gpupack-mps" && volume["hostPath"] == folder;
            let is_other = volume["name"] == "data" && volume["hostPath"]["path"] == "/data";
            prop_assert!(is_ours || is_other, "{}", volume);
        }
    }
}

/// Half a GPU for `main`, beside a container `side`, changed.
fn half(change: impl FnOnce(&mut Value)) -> Value {
    let mut pod = json!({"metadata": {"annotations": {"gpu-fraction": "0.5"}},
        "spec": {"containers": [{"name": "main"}, {"name": "side"}]}});
    change(&mut pod);
    pod
}

/// Why a pod is rejected under MPS; empty if it is not.
fn refused(pod: &Value, sub_resource: &str) -> String {
    let memory_limit = MemoryLimit::Mps;
    let rules = rules(WebhookConfig { memory_limit, ..WebhookConfig::default() });
    let answer = rules.review(review(pod, sub_resource).to_string().as_bytes()).unwrap();
    answer.refusal.map(|refusal| refusal.to_string()).unwrap_or_default()
}

#[test]
fn bypasses_of_mps_limits_are_rejected_with_a_suggestion() {
    let mount = |name: &str, path: &str| json!([{"name": name, "mountPath": path}]);
    let folder = |path: &str| json!([{"name": "v", "hostPath": {"path": path}}]);
    let mine = json!([{"name": "gpupack-mps", "emptyDir": {}}]);
    let environment = |name: &str| json!([{"name": name, "value": "1"}]);
    let from = json!([{"prefix": "CUDA_MPS_", "configMapRef": {"name": "x"}}]);
    let at = |path: &'static str, value: Value| {
        half(|pod| {
            let (parent, field) = path.rsplit_once('/').unwrap();
            pod.pointer_mut(parent).unwrap()[field] = value;
        })
    };
    let main = "/spec/containers/0/env";
    for (pod, parts) in [
        (at(main, environment("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")), ["`main` sets", "remove"]),
        (at(main, environment("CUDA_MPS_PIPE_DIRECTORY")), ["PIPE_DIRECTORY`", "remove"]),
        (at(main, environment("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")), ["PERCENTAGE`", "remove"]),
        (at("/spec/containers/0/envFrom", from), ["`CUDA_MPS_`", "another prefix"]),
        (at("/spec/containers/0/volumeMounts", mount("d", "/dev/shm/")), ["`/dev/shm/`", "remove"]),
        (at("/spec/containers/0/volumeMounts", mount("d", "/dev/./shm")), ["shm`", "remove"]),
        (
            at("/spec/containers/0/volumeMounts", mount("d", "/var/run/gpupack-mps/control")),
            ["/control`", "remove"],
        ),
        (at("/spec/containers/1/volumeMounts", mount("gpupack-mps", "/x")), ["`side`", "remove"]),
        (at("/spec/volumes", mine), ["volume `gpupack-mps`", "another name"]),
        (at("/spec/volumes", folder("/run/gpupack/mps/GPU-a")), ["(`/run/gpupack/mps`)", "remove"]),
        (at("/spec/volumes", folder("/var/run/gpupack")), ["(`/run/gpupack/mps`)", "remove"]),
        (
            at("/metadata/annotations/gpu-fraction-num-devices", json!("2")),
            ["parts of `2` GPUs", "a part of one GPU"],
        ),
    ] {
        let message = refused(&pod, "");
        for part in parts {
            assert!(message.contains(part), "`{part}` is not in `{message}`: {pod}");
        }
    }
    let debug = json!([{"name": "d", "volumeMounts": mount("gpupack-mps", "/x")}]);
    let message = refused(&at("/spec/ephemeralContainers", debug), "ephemeralcontainers");
    assert!(message.contains("container `d` mounts"), "{message}");
    let ordinary = at("/spec/containers/1/volumeMounts", mount("d", "/dev/shm"));
    assert_eq!(refused(&ordinary, ""), "", "only the client's shared memory is the daemon's");
}

#[test]
fn only_shares_become_clients_and_percentages_are_optional() {
    let settings = WebhookConfig { memory_limit: MemoryLimit::Mps, ..WebhookConfig::default() };
    let main = |settings: &WebhookConfig, annotations: Value| {
        let pod = half(|pod| pod["metadata"]["annotations"] = annotations);
        let done = answered(&rules(settings.clone()), &pod).unwrap();
        of_mps(&done["spec"]["containers"][0])
    };
    let plain = (Vec::new(), Vec::new());
    assert_eq!(main(&settings, json!({"gpu-memory": "100"})), client());
    let hardware = json!({"gpu-memory": "100", "gpupack.dev/isolation": "hardware"});
    for alone in [json!({"gpu-fraction": "1"}), hardware] {
        assert_eq!(main(&settings, alone), plain);
    }
    let several = json!({"gpu-fraction": "1", "gpu-fraction-num-devices": "2"});
    assert_eq!(main(&settings, several), plain, "whole GPUs have no neighbors");
    let own = half(|pod| {
        pod["metadata"]["annotations"]["gpu-fraction"] = "1".into();
        pod["spec"]["containers"][0]["env"] =
            json!([{"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp/own"}]);
    });
    assert_eq!(refused(&own, ""), "", "on a GPU of its own a pod may run MPS as it likes");
    let capped = WebhookConfig { thread_cap: ThreadCap::Share, ..settings };
    let (variables, _) = main(&capped, json!({"gpu-fraction": "0.5"}));
    let warnings = |settings: &WebhookConfig| {
        let answer =
            rules(settings.clone()).review(review(&half(|_| ()), "").to_string().as_bytes());
        let answer: Value = serde_json::from_slice(&answer.unwrap().review).unwrap();
        answer["response"]["warnings"].clone()
    };
    assert!(warnings(&capped)[0].as_str().unwrap().contains("100 on Hopper GPUs"));
    assert_eq!(warnings(&WebhookConfig::default()), Value::Null);
    let percentage =
        "ACTIVE_THREAD_PERCENTAGE=metadata.annotations['placed.gpupack.dev/mps-thread-percentage']";
    assert_eq!(variables[0], percentage);
    assert_eq!(main(&WebhookConfig::default(), json!({"gpu-fraction": "0.5"})), plain);
}

#[test]
fn the_pods_of_the_property_are_often_admitted() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut granted = 0;
    for _ in 0..1_000 {
        let (pod, rules) = (any_pod(), any_rules()).new_tree(&mut runner).unwrap().current();
        let done = answered(&rules, &pod);
        granted +=
            usize::from(done.is_some_and(|done| done.to_string().contains("placed.gpupack.dev")));
    }
    assert!(granted > 50, "only {granted} of 1,000 pods get a device");
}

/// `second-scheduler.yaml` leaves to gpupack what gpupack counts, and nothing else of NVIDIA's group.
#[test]
fn the_second_scheduler_ignores_exactly_the_resources_that_are_served() {
    let text = include_str!("../../../scheduler-config/second-scheduler.yaml");
    let yaml: serde_yaml_ng::Value = serde_yaml_ng::from_str(text).unwrap();
    let plugins = yaml["profiles"][0]["pluginConfig"].as_sequence().unwrap();
    let fit = plugins.iter().find(|plugin| plugin["name"] == "NodeResourcesFit").unwrap();
    assert_eq!(fit["args"]["ignoredResourceGroups"], serde_yaml_ng::Value::Null);
    let ignored = fit["args"]["ignoredResources"].as_sequence().unwrap();
    let ignored: Vec<&str> = ignored.iter().map(|name| name.as_str().unwrap()).collect();
    let instances = GEOMETRIES.iter().flat_map(|geometry| &geometry.profiles).flat_map(|profile| {
        let plain = format!("{MIG_PREFIX}{}", profile.name);
        let variants = profile.variants.iter().map(|it| format!("{plain}{}", it.replace('+', ".")));
        [plain.clone()].into_iter().chain(variants.collect::<Vec<_>>())
    });
    let fixed = [WHOLE, SHARED_SLOT].into_iter().chain(MARKERS).map(str::to_owned);
    let served: BTreeSet<String> = instances.chain(fixed).collect();
    assert_eq!(ignored.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>(), served);
    assert_eq!(ignored.len(), served.len(), "each is listed once");
    for resource in served.iter().filter(|name| name.starts_with("nvidia.com/")) {
        let resources = [(resource.clone(), "1".to_owned())].into();
        let (name, kind) = ("main".to_owned(), ContainerKind::Regular);
        let queried =
            parse_request(&BTreeMap::new(), &[ContainerRequest { name, kind, resources }]);
        assert!(matches!(queried, Ok(Some(_))), "{resource}");
    }
}
