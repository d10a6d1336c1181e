//! Pods with `gpupack.dev/movable`, and what the webhook answers to them.

use serde_json::{Value, json};

use super::tests::{admitted, answered, review, shipped};

fn pod(annotations: Value, spec: Value) -> Value {
    let mut pod = json!({"metadata": {"name": "p", "namespace": "team-a", "annotations": annotations},
        "spec": {"schedulerName": "gpupack", "containers": [{"name": "main", "image": "x"}]}});
    for (key, value) in spec.as_object().unwrap() {
        pod["spec"][key] = value.clone();
    }
    pod
}

fn movable() -> Value {
    json!({"gpu-fraction": "0.5", "gpu-fraction.limit": "1", "gpupack.dev/movable": "restart"})
}

#[test]
fn a_movable_pod_gets_what_its_move_needs() {
    let side =
        json!({"containers": [{"name": "main", "image": "x"}, {"name": "side", "image": "y"}]});
    let done = admitted(&shipped(), &pod(movable(), side)).unwrap();
    let main = &done["spec"]["containers"][0];
    let policy = json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
    assert_eq!(
        (&main["resizePolicy"], &main["resources"]["requests"]["cpu"]),
        (&policy, &json!("10m"))
    );
    assert_eq!(main["resources"]["limits"]["gpupack.dev/gpus"], "1", "the markers stay");
    let variables = main["env"].as_array().unwrap();
    let variable = variables.iter().find(|variable| variable["name"] == "GPUPACK_MOVABLE").unwrap();
    assert_eq!(variable["value"], "restart");
    assert_eq!(done["spec"]["containers"][1]["resizePolicy"], Value::Null, "only the GPU's");
    assert_eq!(done["spec"]["terminationGracePeriodSeconds"], 5);
}

fn policy(resource: &str, restart: &str) -> Value {
    json!({"resourceName": resource, "restartPolicy": restart})
}

#[test]
fn what_a_movable_pod_has_stays_as_far_as_possible() {
    let container = json!({"name": "main", "image": "x",
        "resources": {"limits": {"cpu": "2"}},
        "resizePolicy": [policy("cpu", "NotRequired"), policy("memory", "NotRequired")]});
    let done = pod(movable(), json!({"containers": [container]}));
    let done = admitted(&shipped(), &done).unwrap();
    let main = &done["spec"]["containers"][0];
    let kept = json!([policy("memory", "NotRequired"), policy("cpu", "RestartContainer")]);
    assert_eq!((&main["resizePolicy"], &main["resources"]["requests"]), (&kept, &Value::Null));
    for (grace, key, expected) in [
        (json!(30), None, 5),
        (json!(12), None, 12),
        (json!(12), Some("0"), 0),
        (json!(null), Some("30"), 30),
    ] {
        let mut annotations = movable();
        if let Some(key) = key {
            annotations["gpupack.dev/move-grace-seconds"] = key.into();
        }
        let spec = match grace.is_null() {
            true => json!({}),
            false => json!({"terminationGracePeriodSeconds": grace}),
        };
        let done = admitted(&shipped(), &pod(annotations, spec)).unwrap();
        assert_eq!(done["spec"]["terminationGracePeriodSeconds"], expected, "{grace} {key:?}");
    }
}

/// Annotations of a movable pod, and one more.
fn with(key: &str, value: &str) -> Value {
    let mut annotations = movable();
    annotations[key] = value.into();
    annotations
}

#[test]
fn pods_that_cannot_be_moved_are_refused_with_the_fix() {
    let init = json!({"initContainers": [{"name": "first", "image": "x"}]});
    for (annotations, spec, part) in [
        (movable(), json!({"restartPolicy": "Never"}), "use `Always` or `OnFailure`"),
        (movable(), json!({"terminationGracePeriodSeconds": 31}), "is above 30"),
        (
            movable(),
            json!({"resources": {"requests": {"cpu": "1"}}}),
            "resources of its containers",
        ),
        (with("gpu-fraction-container-name", "first"), init, "give it to a regular one"),
        (with("gpupack.dev/movable", "yes"), json!({}), "use `never` or `restart`"),
        (with("gpupack.dev/move-grace-seconds", "31"), json!({}), "must be 0 to 30"),
        (with("gpupack.dev/move-grace-seconds", "-1"), json!({}), "must be 0 to 30"),
        (with("gpu-fraction.limit", "0.25"), json!({}), "raise the limit"),
        (
            json!({"gpu-fraction": "0.5", "gpupack.dev/move-grace-seconds": "5"}),
            json!({}),
            "beside `gpupack.dev/movable: restart`",
        ),
    ] {
        let refused = answered(&shipped(), &review(&pod(annotations, spec), "", None)).unwrap_err();
        assert!(refused.contains(part), "{refused}");
    }
}
