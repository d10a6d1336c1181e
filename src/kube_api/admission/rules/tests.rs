use serde_json::{Value, json};

use super::*;

/// Rules with changes of the shipped settings.
pub(crate) fn rules(change: impl FnOnce(&mut WebhookConfig)) -> Admission {
    let mut settings = WebhookConfig::default();
    change(&mut settings);
    Admission::new(settings, vec!["gpupack".to_owned(), "gpupack-b".to_owned()])
}

pub(crate) fn shipped() -> Admission {
    rules(|_| ())
}

pub(crate) fn review(object: &Value, sub_resource: &str, old: Option<&Value>) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "4711", "name": "", "namespace": "team-a",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "subResource": sub_resource,
            "operation": if old.is_some() { "UPDATE" } else { "CREATE" },
            "userInfo": {"username": "ann"}, "object": object, "oldObject": old, "dryRun": false,
        },
    })
}

/// What the API server does with the answer: the pod as stored, or why it is refused.
pub(crate) fn answered(rules: &Admission, review: &Value) -> Result<Value, String> {
    let answer = rules.review(review.to_string().as_bytes()).unwrap();
    let text: Value = serde_json::from_slice(&answer.review).unwrap();
    assert_eq!(text["apiVersion"], "admission.k8s.io/v1");
    let response = &text["response"];
    assert_eq!(response["uid"], "4711");
    if response["allowed"] != true {
        assert_eq!(answer.refusal.unwrap().to_string(), response["status"]["message"]);
        assert_eq!(response["patch"], Value::Null);
        return Err(response["status"]["message"].as_str().unwrap().to_owned());
    }
    assert_eq!(answer.refusal, None);
    let mut pod = review["request"]["object"].clone();
    if let Some(bytes) = response["patch"].as_array() {
        assert_eq!(response["patchType"], "JSONPatch");
        let bytes: Vec<u8> =
            bytes.iter().map(|b| b.as_u64().unwrap().try_into().unwrap()).collect();
        let patch: json_patch::Patch = serde_json::from_slice(&bytes).unwrap();
        assert!(!patch.0.is_empty());
        json_patch::patch(&mut pod, &patch).unwrap();
    }
    Ok(pod)
}

/// Admits the pod, and then the result, which must not change again.
pub(crate) fn admitted(rules: &Admission, pod: &Value) -> Result<Value, String> {
    let once = answered(rules, &review(pod, "", None))?;
    let twice = answered(rules, &review(&once, "", None)).unwrap();
    assert_eq!(once, twice, "applied twice");
    Ok(once)
}

/// A pod of two containers and an init container with these annotations, and changes.
pub(crate) fn pod(annotations: Value, change: impl FnOnce(&mut Value)) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": "infer-", "annotations": annotations},
        "spec": {
            "initContainers": [{"name": "setup"}],
            "containers": [
                {"name": "main", "env": [{"name": "A", "value": "$(GPUPACK_DEVICE_UUIDS)"}]},
                {"name": "side"},
            ],
        },
    });
    change(&mut pod);
    pod
}

pub(crate) fn half(change: impl FnOnce(&mut Value)) -> Value {
    pod(json!({"gpu-fraction": "0.5"}), change)
}

/// `NAME=value` or `NAME<annotation` for each variable of a container.
pub(crate) fn env(container: &Value) -> Vec<String> {
    let variables = container["env"].as_array().into_iter().flatten();
    let shown = variables.map(|variable| {
        let name = variable["name"].as_str().unwrap();
        match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some(path) => format!("{name}<{path}"),
            None => format!("{name}={}", variable["value"].as_str().unwrap()),
        }
    });
    shown.collect()
}

const DEVICES: &str = "NVIDIA_VISIBLE_DEVICES<metadata.annotations['placed.gpupack.dev/devices']";
const UUIDS: &str = "GPUPACK_DEVICE_UUIDS<metadata.annotations['placed.gpupack.dev/uuids']";
const MEMORY: &str = "GPUPACK_MEMORY_MIB<metadata.annotations['placed.gpupack.dev/memory-mib']";
const LIMIT: &str =
    "NVIDIA_GPU_MEMORY_LIMIT<metadata.annotations['placed.gpupack.dev/driver-memory-limit']";
pub(crate) const VOID: &str = "NVIDIA_VISIBLE_DEVICES=void";

#[test]
fn a_gpu_pod_is_completed() {
    let done = admitted(&shipped(), &half(|_| ())).unwrap();
    let spec = &done["spec"];
    assert_eq!(
        (&spec["schedulerName"], &spec["runtimeClassName"]),
        (&json!("gpupack"), &json!("nvidia"))
    );
    assert_eq!(env(&spec["containers"][0]), [DEVICES, UUIDS, MEMORY, "A=$(GPUPACK_DEVICE_UUIDS)"]);
    assert_eq!(env(&spec["containers"][1]), [VOID]);
    assert_eq!(env(&spec["initContainers"][0]), [VOID]);
    assert_eq!(
        spec["containers"][0]["resources"],
        json!({"limits": {
            "gpupack.dev/gpu-share": "500000", "gpupack.dev/gpu-memory": "40960",
            "gpupack.dev/gpus": "1",
        }})
    );
    assert_eq!(spec["containers"][1].get("resources"), None);
    assert_eq!(done["metadata"]["annotations"]["gpu-fraction-container-name"], "main");
}

#[test]
fn a_gpu_pod_tolerates_the_taints_of_gpu_nodes_where_configured() {
    let keys = ["nvidia.com/gpu", "team", "team"].map(str::to_owned);
    let rules = rules(|settings| settings.tolerated_taints = keys.into());
    let added = |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoSchedule"});
    let both = json!([added("nvidia.com/gpu"), added("team")]);
    let all = json!({"operator": "Exists"});
    let one = json!({"key": "team", "operator": "Exists", "effect": ""});
    let little = json!({"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"});
    let other = json!({"key": "team", "operator": "Exists", "effect": "NoExecute"});
    for (given, expected) in [
        (Value::Null, both.clone()),
        (json!([]), both.clone()),
        (json!([all]), json!([all])),
        (json!([one]), json!([one, added("nvidia.com/gpu")])),
        (json!([little]), json!([little, added("nvidia.com/gpu"), added("team")])),
        (json!([other]), json!([other, added("nvidia.com/gpu"), added("team")])),
        (both.clone(), both),
    ] {
        let tolerating = |pod: &mut Value| pod["spec"]["tolerations"] = given;
        let done = admitted(&rules, &half(tolerating)).unwrap();
        assert_eq!(done["spec"]["tolerations"], expected);
    }
    let untouched = admitted(&shipped(), &half(|_| ())).unwrap();
    assert_eq!(untouched["spec"].get("tolerations"), None, "by default none");
    let beside = pod(json!({}), |pod| pod["spec"]["schedulerName"] = "gpupack".into());
    let beside = admitted(&rules, &beside).unwrap();
    assert_eq!(beside["spec"].get("tolerations"), None, "a pod without a GPU stays off the node");
    let kubelets = admitted(&rules, &gpus("1", "default-scheduler")).unwrap();
    assert_eq!(kubelets["spec"].get("tolerations"), None, "a pod of the device plugin");
}

#[test]
fn the_named_container_gets_the_gpu() {
    let keys = json!({"gpu-memory": "100", "gpu-fraction-num-devices": "2", "gpu-fraction-container-name": "setup"});
    let done = admitted(&shipped(), &pod(keys, |_| ())).unwrap();
    let spec = &done["spec"];
    assert_eq!(env(&spec["initContainers"][0]), [DEVICES, UUIDS, MEMORY]);
    assert_eq!(env(&spec["containers"][0])[0], VOID);
    let limits = &spec["initContainers"][0]["resources"]["limits"];
    let markers = json!({
        "gpupack.dev/gpu-share": "2442", "gpupack.dev/gpu-memory": "200", "gpupack.dev/gpus": "2",
    });
    assert_eq!(*limits, markers);
}

#[test]
fn a_container_inserted_first_by_another_webhook_gets_no_gpu() {
    let rules = shipped();
    let mut once = admitted(&rules, &half(|_| ())).unwrap();
    let containers = once["spec"]["containers"].as_array_mut().unwrap();
    containers.insert(0, json!({"name": "proxy", "env": []}));
    let again = admitted(&rules, &once).unwrap();
    assert_eq!(env(&again["spec"]["containers"][0]), [VOID]);
    assert_eq!(env(&again["spec"]["containers"][1])[0], DEVICES);
}

#[test]
fn a_template_that_sets_the_devices_itself_is_accepted() {
    let own = json!({"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {
        "apiVersion": "v1", "fieldPath": "metadata.annotations['placed.gpupack.dev/devices']"}}});
    let twice = half(|pod| {
        pod["spec"]["containers"][0]["env"] = json!([own, {"name": "B", "value": "x"}, own])
    });
    let done = admitted(&shipped(), &twice).unwrap();
    assert_eq!(env(&done["spec"]["containers"][0]), [UUIDS, MEMORY, DEVICES, "B=x"]);
    let elsewhere = half(|pod| pod["spec"]["containers"][1]["env"] = json!([own]));
    assert!(admitted(&shipped(), &elsewhere).unwrap_err().contains("`side` sets"));
}

#[test]
fn the_memory_limit_is_set_only_for_shares_and_where_configured() {
    let driver = rules(|settings| settings.memory_limit = MemoryLimit::Driver);
    let done = admitted(&driver, &half(|_| ())).unwrap();
    let given = env(&done["spec"]["containers"][0]);
    assert_eq!(given[..5], [DEVICES, UUIDS, MEMORY, "NVIDIA_GPU_MEMORY_REQUEST=0", LIMIT]);
    assert_eq!(env(&done["spec"]["containers"][1]), [VOID]);
    let whole = admitted(&driver, &pod(json!({"gpu-fraction": "1"}), |_| ())).unwrap();
    assert!(!env(&whole["spec"]["containers"][0]).contains(&LIMIT.to_owned()));
    // It gets a MIG instance, for which the driver takes no limit.
    let instance = json!({"gpu-memory": "4096", "gpupack.dev/isolation": "hardware"});
    let instance = admitted(&driver, &pod(instance, |_| ())).unwrap();
    assert_eq!(env(&instance["spec"]["containers"][0])[..3], [DEVICES, UUIDS, MEMORY]);
    assert!(!instance.to_string().contains("NVIDIA_GPU_MEMORY"), "{instance}");
    let plain = admitted(&shipped(), &half(|_| ())).unwrap();
    assert!(!env(&plain["spec"]["containers"][0]).contains(&LIMIT.to_owned()));
    // A slot is a share like any other: the ledger relies on its limit.
    let slot = pod(json!({}), |pod| {
        pod["spec"]["schedulerName"] = json!("gpupack");
        let one = json!({"limits": {"nvidia.com/gpu.shared": "1"}});
        pod["spec"]["containers"][0]["resources"] = one;
    });
    let slot = admitted(&driver, &slot).unwrap();
    assert!(env(&slot["spec"]["containers"][0]).contains(&LIMIT.to_owned()));
}

#[test]
fn markers_of_a_user_become_those_of_the_request() {
    let marked = half(|pod| {
        let zero = json!({"gpupack.dev/gpu-share": 0, "cpu": "1"});
        pod["spec"]["containers"][0]["resources"] = json!({"limits": zero, "requests": zero});
        pod["spec"]["containers"][1]["resources"] =
            json!({"limits": {"gpupack.dev/gpu-memory": "7"}});
    });
    let marked = {
        // As strings: the API server sends quantities in no other form.
        let text = marked.to_string().replace("gpu-share\":0", "gpu-share\":\"0\"");
        serde_json::from_str(&text).unwrap()
    };
    let done = admitted(&shipped(), &marked).unwrap();
    let resources = |i: usize| &done["spec"]["containers"][i]["resources"];
    assert_eq!(
        *resources(0),
        json!({"limits": {
            "gpupack.dev/gpu-share": "500000", "gpupack.dev/gpu-memory": "40960",
            "gpupack.dev/gpus": "1", "cpu": "1",
        }, "requests": {"cpu": "1"}})
    );
    assert_eq!(*resources(1), json!({"limits": {}}));
    let canonical = half(|pod| {
        let same = json!({"gpupack.dev/gpu-share": "500k"});
        pod["spec"]["containers"][0]["resources"] = json!({"limits": same, "requests": same});
    });
    let kept = admitted(&shipped(), &canonical).unwrap();
    assert_eq!(
        kept["spec"]["containers"][0]["resources"]["limits"]["gpupack.dev/gpu-share"],
        "500k"
    );
}

fn gpus(count: &str, scheduler: &str) -> Value {
    pod(json!({}), |pod| {
        let limits = json!({"limits": {"nvidia.com/gpu": count, "cpu": "1"}});
        pod["spec"]["containers"][1]["resources"] = limits;
        pod["spec"]["schedulerName"] = scheduler.into();
    })
}

#[test]
fn whole_gpu_resources_are_converted_for_gpupack_pods() {
    let take_over = rules(|settings| settings.take_over_whole_gpus = true);
    for (rules, scheduler, becomes) in
        [(&shipped(), "gpupack-b", "gpupack-b"), (&take_over, "default-scheduler", "gpupack")]
    {
        let done = admitted(rules, &gpus("2", scheduler)).unwrap();
        let keys = json!({"gpu-fraction": "1", "gpu-fraction-num-devices": "2", "gpu-fraction-container-name": "side"});
        assert_eq!(done["metadata"]["annotations"], keys);
        let side = &done["spec"]["containers"][1];
        assert_eq!(
            side["resources"]["limits"],
            json!({
                "cpu": "1", "gpupack.dev/gpu-share": "2000000",
                "gpupack.dev/gpu-memory": "163840", "gpupack.dev/gpus": "2",
            })
        );
        assert_eq!(env(side), [DEVICES, UUIDS, MEMORY]);
        assert_eq!(env(&done["spec"]["containers"][0])[0], VOID);
        assert_eq!(done["spec"]["schedulerName"], becomes);
    }
    for (rules, scheduler) in [(&shipped(), "default-scheduler"), (&take_over, "other")] {
        let kubelets = gpus("2", scheduler);
        assert_eq!(admitted(rules, &kubelets), Ok(kubelets));
    }
    let mut theirs = gpus("1", "volcano");
    theirs["spec"]["runtimeClassName"] = "nvidia".into();
    assert_eq!(admitted(&shipped(), &theirs), Ok(theirs.clone()), "kubelet serves it");
    let mut past = gpus("1", "default-scheduler");
    past["spec"]["nodeName"] = "n1".into();
    assert_eq!(admitted(&shipped(), &past), Ok(past.clone()));
    past["spec"]["runtimeClassName"] = "nvidia".into();
    assert!(admitted(&shipped(), &past).unwrap_err().contains("remove `spec.nodeName`"));
    let mut both = gpus("1", "default-scheduler");
    both["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/mig-1g.5gb": "1"}});
    assert_eq!(admitted(&shipped(), &both), Ok(both.clone()), "kubelet serves both");
    assert!(admitted(&take_over, &both).unwrap_err().contains("one kind of GPU"));
    let mut mixed = gpus("1", "default-scheduler");
    mixed["metadata"]["annotations"] = json!({"gpu-fraction": "0.5"});
    assert!(admitted(&shipped(), &mixed).unwrap_err().contains("remove one of the two"));
}

#[test]
fn a_mig_instance_keeps_its_resource_and_gets_its_variables() {
    let mut pod = gpus("0", "gpupack");
    pod["spec"]["containers"][1]["resources"] = json!({"limits": {"nvidia.com/mig-1g.10gb": "1"}});
    let done = admitted(&shipped(), &pod).unwrap();
    let side = &done["spec"]["containers"][1];
    let limits = json!({
        "nvidia.com/mig-1g.10gb": "1", "gpupack.dev/gpu-share": "142858",
        "gpupack.dev/gpu-memory": "10240", "gpupack.dev/gpus": "1",
    });
    assert_eq!(side["resources"]["limits"], limits);
    assert_eq!(env(side), [DEVICES, UUIDS, MEMORY]);
}

#[test]
fn the_nvidia_runtime_without_a_request_is_treated_as_configured() {
    let plain = |class: &str| pod(json!({}), |pod| pod["spec"]["runtimeClassName"] = class.into());
    for class in ["nvidia", "nvidia-cdi", "nvidia-legacy"] {
        assert!(
            admitted(&shipped(), &plain(class)).unwrap_err().contains("remove `runtimeClassName`")
        );
        let blank = rules(|settings| settings.unmanaged = Unmanaged::Blank);
        let done = admitted(&blank, &plain(class)).unwrap();
        assert_eq!(env(&done["spec"]["containers"][1]), [VOID]);
        assert_eq!(done["spec"].get("schedulerName"), None);
        let allow = rules(|settings| settings.unmanaged = Unmanaged::Allow);
        assert_eq!(admitted(&allow, &plain(class)), Ok(plain(class)));
    }
    for harmless in ["kata", "runc", "crun"] {
        assert_eq!(admitted(&shipped(), &plain(harmless)), Ok(plain(harmless)));
    }
    // With `nvproxy` it hands out GPUs by the same variable.
    assert!(admitted(&shipped(), &plain("gvisor")).is_err());
    // The name of a RuntimeClass says nothing about its runtime.
    let message = admitted(&shipped(), &plain("fast")).unwrap_err();
    assert!(
        message.contains("`fast`") && message.contains("runtime_classes_without_gpus"),
        "{message}"
    );
    let listed = rules(|settings| settings.runtime_classes_without_gpus = vec!["fast".to_owned()]);
    assert_eq!(admitted(&listed, &plain("fast")), Ok(plain("fast")));
    assert!(admitted(&listed, &plain("kata")).is_err(), "the operator's list is the whole list");
    let default = rules(|settings| settings.runtime_class = None);
    assert_eq!(admitted(&default, &half(|_| ())).unwrap()["spec"].get("runtimeClassName"), None);
    let own = half(|pod| pod["spec"]["runtimeClassName"] = "fast".into());
    assert!(admitted(&default, &own).unwrap_err().contains("runtime_classes_without_gpus"));
}

#[test]
fn other_pods_are_left_alone_except_for_gpupack_keys() {
    for annotations in [json!({}), json!({"app": "web"}), json!({"gpu-fraction": "9"})] {
        let theirs = pod(annotations, |pod| pod["spec"]["schedulerName"] = "kai-scheduler".into());
        assert_eq!(admitted(&shipped(), &theirs), Ok(theirs));
    }
    let forged = pod(json!({"placed.gpupack.dev/devices": "x"}), |pod| {
        pod["spec"]["schedulerName"] = "kai-scheduler".into();
        pod["spec"]["nodeName"] = "n1".into();
    });
    assert!(admitted(&shipped(), &forged).unwrap_err().contains("written only by gpupack"));
}

/// A change of a pod with half a GPU, and what the refusal must name: the fault and the fix.
type Bad = (fn(&mut Value), [&'static str; 2]);

const REFUSED: &[Bad] = &[
    (
        |p| p["metadata"]["annotations"]["gpu-fraction"] = "1.5".into(),
        ["`1.5`", "for instance `0.5`"],
    ),
    (|p| p["metadata"]["annotations"]["gpupack.dev/modle"] = "x".into(), ["modle", "correct"]),
    (|p| p["metadata"]["labels"] = json!({"placed.gpupack.dev/x": ""}), ["placed.", "remove"]),
    (|p| p["spec"]["nodeName"] = "n1".into(), ["`n1`", "remove `spec.nodeName`"]),
    (|p| p["spec"]["runtimeClassName"] = "kata".into(), ["`kata`", "`nvidia`"]),
    (|p| p["spec"]["hostPID"] = true.into(), ["`hostPID`", "remove"]),
    (|p| p["spec"]["hostIPC"] = true.into(), ["`hostIPC`", "remove"]),
    (
        |p| {
            p["spec"]["containers"][1]["env"] =
                json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])
        },
        ["container `side` sets `NVIDIA_VISIBLE_DEVICES`", "remove"],
    ),
    (
        |p| {
            p["spec"]["containers"][0]["env"] =
                json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}])
        },
        ["container `main` sets", "remove"],
    ),
    (
        |p| {
            p["spec"]["initContainers"][0]["env"] =
                json!([{"name": "NVIDIA_GPU_MEMORY_LIMIT", "value": "1"}])
        },
        ["`setup` sets `NVIDIA_GPU_MEMORY_LIMIT`", "remove"],
    ),
    (
        |p| {
            p["spec"]["containers"][0]["envFrom"] =
                json!([{"prefix": "NVIDIA_", "configMapRef": {"name": "x"}}])
        },
        ["`NVIDIA_`", "another prefix"],
    ),
    (
        |p| p["spec"]["initContainers"][0]["securityContext"] = json!({"privileged": true}),
        ["`setup` is privileged", "remove"],
    ),
    (
        |p| {
            p["spec"]["containers"][0]["securityContext"] =
                json!({"capabilities": {"add": ["CHOWN", "CAP_SYS_ADMIN"]}})
        },
        ["`CAP_SYS_ADMIN`", "remove"],
    ),
    (
        |p| p["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/dev/nvidia0"}}]),
        ["`/dev/nvidia0`", "remove"],
    ),
    (
        |p| {
            p["spec"]["containers"][1]["volumeMounts"] =
                json!([{"name": "v", "mountPath": "/var/run/nvidia-container-devices/all"}])
        },
        ["nvidia-container-devices/all`", "remove"],
    ),
    // The runtime compares the beginning alone: it takes `all` from both of these.
    (
        |p| {
            p["spec"]["containers"][1]["volumeMounts"] =
                json!([{"name": "v", "mountPath": "/var/run/nvidia-container-devicesall"}])
        },
        ["nvidia-container-devicesall`", "remove"],
    ),
    (
        |p| {
            p["spec"]["containers"][1]["volumeMounts"] =
                json!([{"name": "v", "mountPath": "/var/run/../run/nvidia-container-devicescdi/x"}])
        },
        ["nvidia-container-devicescdi/x`", "remove"],
    ),
    (|p| p["metadata"]["annotations"]["cdi.k8s.io/x"] = "y".into(), ["`cdi.k8s.io/x`", "remove"]),
    (
        |p| p["metadata"]["annotations"]["io.kubernetes.cri-o.Devices"] = "/dev/nvidia0".into(),
        ["`io.kubernetes.cri-o.Devices`", "remove"],
    ),
    (
        |p| p["metadata"]["annotations"]["nvidia.cdi.k8s.io/container.main"] = "y".into(),
        ["`nvidia.cdi.k8s.io/", "remove"],
    ),
];

#[test]
fn every_rejection_names_the_error_and_a_suggestion() {
    for (change, parts) in REFUSED {
        let message = admitted(&shipped(), &half(change)).unwrap_err();
        for part in parts {
            assert!(message.contains(part), "`{part}` is not in `{message}`");
        }
    }
    let ordinary = half(|pod| {
        pod["spec"]["containers"][0]["securityContext"] = json!({"privileged": false});
        pod["spec"]["containers"][0]["env"] =
            json!([{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]);
        pod["spec"]["containers"][0]["envFrom"] = json!([{"configMapRef": {"name": "x"}}]);
        pod["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/data"}}]);
    });
    let listed = rules(|settings| settings.allowed_host_paths = vec!["/data".parse().unwrap()]);
    assert!(admitted(&listed, &ordinary).is_ok());
}

#[test]
fn a_container_added_later_gets_no_gpu() {
    let bound = half(|pod| {
        pod["metadata"]["annotations"]["placed.gpupack.dev/devices"] =
            "runtime.nvidia.com/gpu=GPU-a".into();
        pod["spec"]["nodeName"] = "n1".into();
        pod["spec"]["ephemeralContainers"] = json!([{"name": "older"}]);
    });
    let added = |container: Value| {
        let mut now = bound.clone();
        now["spec"]["ephemeralContainers"].as_array_mut().unwrap().push(container);
        answered(&shipped(), &review(&now, "ephemeralcontainers", Some(&bound)))
    };
    let now = added(json!({"name": "debug", "image": "cuda"})).unwrap();
    assert_eq!(env(&now["spec"]["ephemeralContainers"][1]), [VOID]);
    assert_eq!(env(&now["spec"]["ephemeralContainers"][0]), [""; 0], "it can no longer change");
    assert_eq!(now["spec"]["containers"], bound["spec"]["containers"]);
    for (bad, part) in [
        (
            json!({"name": "d", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}),
            "remove the variable",
        ),
        (json!({"name": "d", "securityContext": {"privileged": true}}), "privileged"),
    ] {
        let message = added(bad).unwrap_err();
        assert!(message.contains(part), "{message}");
    }
    let mut unmanaged = bound.clone();
    unmanaged["metadata"]["annotations"] = json!({});
    let same = answered(&shipped(), &review(&unmanaged, "ephemeralcontainers", None));
    assert_eq!(same, Ok(unmanaged.clone()));
    unmanaged["spec"]["runtimeClassName"] = "nvidia".into();
    let now = answered(&shipped(), &review(&unmanaged, "ephemeralcontainers", None)).unwrap();
    assert_eq!(env(&now["spec"]["ephemeralContainers"][0]), [VOID]);
}

#[test]
fn a_body_without_a_pod_review_is_an_error() {
    let good = review(&half(|_| ()), "", None);
    let with = |path: &str, value: Value| {
        let mut changed = good.clone();
        *changed.pointer_mut(path).unwrap() = value;
        changed.to_string()
    };
    for (body, part) in [
        (String::new(), "not an AdmissionReview"),
        ("null".to_owned(), "only AdmissionReview of admission.k8s.io/v1 is supported"),
        ("[".repeat(10_000), "not an AdmissionReview"),
        (with("/kind", json!("Pod")), "`Pod`"),
        (with("/apiVersion", json!("admission.k8s.io/v1beta1")), "v1beta1"),
        (with("/request", Value::Null), "no `request`"),
        (with("/request/object", Value::Null), "no `request.object`"),
        (
            with("/request/object", json!({"kind": "Node", "apiVersion": "v1"})),
            "not an AdmissionReview",
        ),
        (with("/request/object/spec/containers", json!(7)), "not an AdmissionReview"),
        (with("/request/resource/resource", json!("nodes")), "`/nodes`"),
        (with("/request/subResource", json!("status")), "`pods/status`"),
        (with("/request/uid", Value::Null), "not an AdmissionReview"),
    ] {
        let fault = shipped().review(body.as_bytes()).unwrap_err().to_string();
        assert!(fault.contains(part) && fault.len() < 400, "{part}: {fault}");
    }
}

fn with_classes() -> Admission {
    let text = "
workloads: {train: {}, serve: {priority_class: high}}
access: {namespaces: {team-a: {isolation: [none], policies: [spread], workloads: [train]}}}
";
    shipped().under(crate::config::file::Config::from_yaml(text).unwrap().request_rules())
}

#[test]
fn a_label_chooses_the_class_of_workloads() {
    let rules = with_classes();
    let train = half(|pod| {
        pod["metadata"]["labels"] = json!({"gpupack.dev/workload": "train"});
        // As the API server has completed it.
        pod["spec"]["priorityClassName"] = "the-default".into();
        pod["spec"]["priority"] = 7.into();
        pod["spec"]["preemptionPolicy"] = "Never".into();
    });
    let spec = admitted(&rules, &train).unwrap()["spec"].take();
    assert_eq!(spec["priorityClassName"], "gpupack-train");
    assert!(spec.get("priority").is_none() && spec.get("preemptionPolicy").is_none());
    // Completed again after the API server has written the value of the class.
    let complete = half(|pod| {
        pod["metadata"]["labels"] = json!({"gpupack.dev/workload": "train"});
        pod["spec"]["priorityClassName"] = "gpupack-train".into();
        pod["spec"]["priority"] = 7.into();
    });
    assert_eq!(admitted(&rules, &complete).unwrap()["spec"]["priority"], 7);
    let without = half(|pod| pod["spec"]["priorityClassName"] = "gpupack-train".into());
    assert_eq!(admitted(&rules, &without).unwrap()["spec"]["priorityClassName"], "gpupack-train");
    assert_eq!(admitted(&rules, &half(|_| ())).unwrap()["spec"].get("priorityClassName"), None);
    let typo = half(|pod| pod["metadata"]["labels"] = json!({"gpupack.dev/workload": "trian"}));
    let text = admitted(&rules, &typo).unwrap_err();
    assert_eq!(text, "label `gpupack.dev/workload` is `trian`: use `serve` or `train`");
    let no_gpu = pod(json!({}), |pod| {
        pod["metadata"]["labels"] = json!({"gpupack.dev/workload": "trian"});
    });
    assert_eq!(admitted(&rules, &no_gpu), Ok(no_gpu), "it is no pod of gpupack");
}

#[test]
fn what_the_namespace_may_not_use_is_refused() {
    let rules = with_classes();
    let with =
        |key: &str, value: &str| half(|pod| pod["metadata"]["annotations"][key] = value.into());
    for (pod, part) in [
        (with("gpupack.dev/isolation", "memory"), "isolation `memory`"),
        (with("gpupack.dev/policy", "binpack"), "policy `binpack`"),
        (half(|pod| pod["spec"]["priorityClassName"] = "high".into()), "workload class `serve`"),
        (
            half(|pod| pod["metadata"]["labels"] = json!({"gpupack.dev/workload": "serve"})),
            "workload class `serve`",
        ),
    ] {
        let text = admitted(&rules, &pod).unwrap_err();
        assert!(text.contains("namespace `team-a` may not use") && text.contains(part), "{text}");
        let mut elsewhere = review(&pod, "", None);
        elsewhere["request"]["namespace"] = "team-b".into();
        assert!(answered(&rules, &elsewhere).is_ok(), "{part}");
    }
    assert!(admitted(&rules, &with("gpupack.dev/policy", "spread")).is_ok());
    // Also a pod without a GPU could have others evicted, for CPU or memory.
    let plain = |scheduler: &str, class: &str, priority: i32| {
        pod(json!({}), |pod| {
            pod["spec"]["schedulerName"] = scheduler.into();
            pod["spec"]["priorityClassName"] = class.into();
            pod["spec"]["priority"] = priority.into();
        })
    };
    for (class, priority, part) in [("high", 300, "class `serve`"), ("other", 1, "priority `1`")] {
        let text = admitted(&rules, &plain("gpupack", class, priority)).unwrap_err();
        assert!(text.contains(part), "{text}");
        assert!(admitted(&rules, &plain("default-scheduler", class, priority)).is_ok());
    }
    assert!(admitted(&rules, &plain("gpupack", "gpupack-train", 100)).is_ok());
    assert!(admitted(&rules, &plain("gpupack", "", 0)).is_ok());
}
