use serde_json::{Value, json};

use super::*;
use crate::pod::seen_parts::MAX_ANNOTATIONS;

fn pod(change: impl FnOnce(&mut Value)) -> SeenPod {
    let mut pod = json!({
        "metadata": {
            "name": "infer-7", "namespace": "team-a", "uid": "0b6e", "resourceVersion": "812",
            "creationTimestamp": "1970-01-02T00:00:00Z",
            "annotations": {"gpu-fraction": "0.5"},
        },
        "spec": {
            "schedulerName": "gpu", "priority": 7,
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}],
        },
        "status": {"phase": "Pending"},
    });
    change(&mut pod);
    SeenPod::from_json(&pod.to_string()).unwrap()
}

const PLACEMENT: &str =
    r#"{"v":1,"devices":[{"id":"GPU-a","mib":4,"share":5}],"isolation":"none"}"#;

fn place(pod: &mut Value) {
    pod["metadata"]["annotations"]["placed.gpupack.dev/placement"] = PLACEMENT.into();
    pod["metadata"]["annotations"]["placed.gpupack.dev/devices"] =
        "runtime.nvidia.com/gpu=GPU-a".into();
}

#[test]
fn a_waiting_pod_is_read() {
    let seen = pod(|_| ());
    assert_eq!(seen.pod.to_string(), "team-a/infer-7");
    assert_eq!((seen.pod.uid.as_str(), seen.resource_version.as_str()), ("0b6e", "812"));
    assert_eq!((seen.scheduling.priority, seen.life.created_unix_seconds), (7, 86_400));
    assert_eq!((seen.scheduling.scheduler.as_str(), seen.host.cpu.milli()), ("gpu", 1000));
    assert_eq!((seen.annotations.bytes, seen.node.is_none()), (15, true));
    assert!(seen.request.unwrap().is_some());
    assert!(!seen.life.is_terminal && !seen.life.is_deleting);
    assert!(!seen.scheduling.is_gated && !seen.containers.takes_devices);
    let path = "metadata.annotations['placed.gpupack.dev/devices']";
    let variable =
        json!({"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let done = pod(|pod| pod["spec"]["containers"][0]["env"] = json!([variable]));
    assert!(done.containers.takes_devices);
}

#[test]
fn a_placement_counts_only_on_a_pod_with_a_node() {
    let bound = pod(|pod| {
        place(pod);
        pod["spec"]["nodeName"] = "n1".into();
    });
    assert_eq!(bound.placement.unwrap().unwrap().node, NodeName::new("n1"));
    assert!(bound.request.unwrap().is_some());
    let forged = pod(place);
    assert_eq!(forged.placement, Ok(None));
    assert_eq!(forged.request.unwrap_err().label(), "reserved_key");
    let label = pod(|pod| pod["metadata"]["labels"]["placed.gpupack.dev/x"] = "1".into());
    assert_eq!(label.request.unwrap_err().label(), "reserved_key");
    let fenced = pod(|pod| pod["metadata"]["annotations"]["placed.gpupack.dev/fence"] = "9".into());
    assert!(fenced.request.is_ok());
}

#[test]
fn too_many_annotations_for_gpupack_to_write_are_rejected() {
    let with = |count: usize| {
        let mut seen = pod(|pod| {
            let notes = &mut pod["metadata"]["annotations"];
            (1..count).for_each(|at| notes[format!("note-{at}")] = "".into());
            notes["placed.gpupack.dev/fence"] = "9".into();
        });
        seen.judge(&RequestRules::default());
        seen
    };
    assert!(with(MAX_ANNOTATIONS).request.is_ok(), "its own requeue key does not count");
    let many = with(MAX_ANNOTATIONS + 1);
    assert_eq!(many.request.as_ref().unwrap_err().label(), "many_annotations");
    assert_eq!(many.annotations.full(), many.request.err());
}

#[test]
fn the_end_of_a_pod_differs_from_its_start() {
    assert!(pod(|pod| pod["status"]["phase"] = "Failed".into()).life.is_terminal);
    let deleting = pod(|pod| pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into());
    assert!(deleting.life.is_deleting && !deleting.life.is_terminal);
    assert!(pod(|pod| pod["spec"]["schedulingGates"] = json!([{"name": "g"}])).scheduling.is_gated);
}

#[test]
fn a_pod_that_cannot_be_allocated_is_an_error() {
    for (json, part) in [
        ("null", "cannot be read"),
        ("7", "cannot be read"),
        (r#"{"metadata":{"name":"a","namespace":"b"}}"#, "no `metadata.uid`"),
        (r#"{"metadata":{"uid":"a","name":"b","namespace":""}}"#, "no `metadata.namespace`"),
        (r#"{"metadata":{"uid":"a","namespace":"b"},"spec":null}"#, "no `metadata.name`"),
        (r#"{"kind":"Node","metadata":{"uid":"a"}}"#, "cannot be read"),
    ] {
        let message = SeenPod::from_json(json).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn values_longer_than_kubernetes_allows_are_errors() {
    let read = |pointer: &str, bytes: usize| {
        let mut pod = json!({
            "metadata": {"name": "a", "namespace": "b", "uid": "c", "resourceVersion": "1",
                "annotations": {"": ""}},
            "spec": {"schedulerName": "d", "priorityClassName": "e", "nodeName": "f"},
            "status": {"nominatedNodeName": "g"},
        });
        *pod.pointer_mut(pointer).unwrap() = "x".repeat(bytes).into();
        SeenPod::from_json(&pod.to_string()).map(|_| ())
    };
    for (pointer, most) in [
        ("/metadata/uid", 64),
        ("/metadata/namespace", 63),
        ("/metadata/name", 253),
        ("/metadata/resourceVersion", 253),
        ("/metadata/annotations/", 256 << 10),
        ("/spec/nodeName", 253),
        ("/spec/schedulerName", 253),
        ("/spec/priorityClassName", 253),
        ("/status/nominatedNodeName", 253),
    ] {
        assert_eq!(read(pointer, most), Ok(()), "{pointer}");
        let fault = read(pointer, most + 1).unwrap_err();
        assert!(matches!(&fault, PodFault::TooLong { bytes, .. } if *bytes == most + 1));
        let field = pointer.trim_matches('/').replace('/', ".");
        assert!(fault.to_string().starts_with(&format!("`{field}`")), "{fault}");
    }
}

#[test]
fn a_waiting_pod_needs_the_markers_of_its_request_where_quotas_require_them() {
    let rules = RequestRules { needs_markers: true, ..RequestRules::default() };
    let pod = |fraction: &str, limits: Value, node: Option<&str>| {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"uid": "u", "namespace": "t", "name": "p", "annotations": {"gpu-fraction": fraction}},
            "spec": {"schedulerName": "gpupack", "nodeName": node, "containers": [
                {"name": "side"}, {"name": "main", "resources": {"limits": limits}},
            ]},
        }))
        .unwrap();
        let seen = SeenPod::judged(&pod, &rules);
        seen.request.map(|_| ()).map_err(|error| (error.label(), error.to_string()))
    };
    let all = json!({
        "gpupack.dev/gpu-share": "500k", "gpupack.dev/gpu-memory": "40960", "gpupack.dev/gpus": "1",
    });
    assert_eq!(pod("0.5", all.clone(), None), Ok(()));
    assert_eq!(pod("0.25", all.clone(), None), Ok(()), "cheaper than when it was created");
    let (label, text) = pod("0.75", all.clone(), None).unwrap_err();
    assert_eq!(label, "marker");
    assert!(text.contains("`500000`") && text.contains("`750000`"), "{text}");
    for marker in ["gpu-share", "gpu-memory", "gpus"] {
        let mut without = all.clone();
        without.as_object_mut().unwrap().remove(&format!("gpupack.dev/{marker}"));
        assert!(pod("0.5", without, None).unwrap_err().1.contains(marker), "{marker}");
    }
    assert_eq!(pod("0.75", json!({}), Some("n")), Ok(()), "it keeps what it got");
}

#[test]
fn a_waiting_pod_needs_the_class_of_its_label_and_obeys_the_rules_of_its_namespace() {
    let text = "
workloads: {train: {}}
access: {namespaces: {default: {isolation: [none]}}}
";
    let rules = crate::config::file::Config::from_yaml(text).unwrap().request_rules();
    let judged = |change: fn(&mut Value), node: Option<&str>| {
        let mut pod = json!({
            "metadata": {"uid": "u", "namespace": "default", "name": "p",
                "annotations": {"gpu-fraction": "0.5"}, "labels": {}},
            "spec": {"nodeName": node, "containers": [{"name": "main"}]},
        });
        change(&mut pod);
        let seen = SeenPod::judged(&serde_json::from_value(pod).unwrap(), &rules);
        seen.request.map(|_| ()).map_err(|error| error.label())
    };
    let label =
        |pod: &mut Value| pod["metadata"]["labels"] = json!({"gpupack.dev/workload": "train"});
    let apart = |pod: &mut Value| {
        pod["metadata"]["annotations"]["gpupack.dev/isolation"] = "memory".into();
    };
    assert_eq!(judged(|_| (), None), Ok(()));
    assert_eq!(judged(label, None), Err("workload_ignored"), "it did not come through the webhook");
    assert_eq!(judged(apart, None), Err("not_allowed"));
    assert_eq!((judged(label, Some("n")), judged(apart, Some("n"))), (Ok(()), Ok(())), "it runs");
}

#[test]
fn a_probe_is_known_by_its_label() {
    for (value, purpose) in [("true", Purpose::Probe), ("", Purpose::Work)] {
        let seen = pod(|pod| pod["metadata"]["labels"] = json!({"gpupack.dev/probe": value}));
        assert_eq!(seen.request.unwrap().unwrap().purpose, purpose);
    }
    assert_eq!(pod(|_| ()).request.unwrap().unwrap().purpose, Purpose::Work);
}
