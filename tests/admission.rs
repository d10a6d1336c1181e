//! Whatever pod is sent to admission: no panic, and no container that sees a device by its own choice.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use gpupack::cluster::admission::Admission;
use gpupack::config::WebhookConfig;
use gpupack::config::webhook::{MemoryLimit, Unmanaged, WholeGpus};
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

/// The pod as it is stored; none where it is refused, or is no pod.
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
        Just("A"),
        Just("B"),
    ];
    let path = |key: &str| json!({"fieldRef": {"fieldPath": format!("metadata.annotations['placed.gpupack.dev/{key}']")}});
    let source = prop_oneof![
        Just(json!({"value": "void"})),
        Just(json!({"value": "all"})),
        Just(json!({"valueFrom": path("devices")})),
        Just(json!({"valueFrom": path("memory-mib")})),
        Just(json!({"valueFrom": path("devices"), "value": ""})),
        Just(json!({})),
    ];
    (name, source).prop_map(|(name, mut variable)| {
        variable["name"] = name.into();
        variable
    })
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
    (env, proptest::option::of((amounts(), amounts()))).prop_map(|(env, resources)| {
        let resources =
            resources.map(|(limits, requests)| json!({"limits": limits, "requests": requests}));
        json!({"name": "", "env": env, "resources": resources})
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
        proptest::option::of((".{0,8}", any_json())),
    )
        .prop_map(|(annotations, mut regular, mut init, scheduler, class, odd)| {
            let all = regular.iter_mut().chain(init.iter_mut().flatten());
            for (number, container) in all.enumerate() {
                container["name"] = format!("c{number}").into();
            }
            let mut pod = json!({"metadata": {"annotations": annotations}, "spec": {
                "containers": regular, "initContainers": init, "schedulerName": scheduler,
                "runtimeClassName": class,
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
    let whole_gpus = proptest::sample::select(&[WholeGpus::Kubelet, WholeGpus::TakenOver]);
    let limits = proptest::sample::select(&[MemoryLimit::None, MemoryLimit::Driver]);
    (unmanaged, whole_gpus, limits).prop_map(|(unmanaged, whole_gpus, memory_limit)| {
        rules(WebhookConfig { unmanaged, whole_gpus, memory_limit, ..WebhookConfig::default() })
    })
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
    fn an_admitted_gpu_pod_sees_no_device_but_ours(pod in any_pod(), rules in any_rules()) {
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
