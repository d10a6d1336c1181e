//! The fields of a pod's JSON that [`SeenPod`](super::pod::SeenPod) is made of. kube-scheduler sends the
//! whole pod with every question, the API server the pods of the whole cluster; reading all of one takes
//! twice as long.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, EnvVar, Pod, PodSchedulingGate, PodSpec, PodStatus, ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected};

/// A pod without what nobody looks at: a [`Pod`] is made of it. Absent and `null` are the same, as in Go.
#[derive(Deserialize)]
pub(super) struct PodFields {
    #[serde(default, deserialize_with = "pod_kind", rename = "kind")]
    _kind: (),
    metadata: Option<Metadata>,
    spec: Option<Spec>,
    status: Option<PodStatus>,
}

/// The metadata of a pod or a node, as far as anything looks at it.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metadata {
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    labels: Option<BTreeMap<String, String>>,
    name: Option<String>,
    namespace: Option<String>,
    resource_version: Option<String>,
    uid: Option<String>,
}

/// The specification of a pod, likewise.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Spec {
    containers: Option<Vec<ContainerFields>>,
    init_containers: Option<Vec<ContainerFields>>,
    node_name: Option<String>,
    overhead: Option<BTreeMap<String, Quantity>>,
    priority: Option<i32>,
    priority_class_name: Option<String>,
    resources: Option<ResourceRequirements>,
    scheduler_name: Option<String>,
    scheduling_gates: Option<Vec<PodSchedulingGate>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerFields {
    env: Option<Vec<EnvVar>>,
    name: Option<String>,
    resources: Option<ResourceRequirements>,
    restart_policy: Option<String>,
}

/// Refuses an object of another kind.
fn pod_kind<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    let kind = Option::<String>::deserialize(deserializer)?;
    match kind.as_deref() {
        None | Some("Pod") => Ok(()),
        Some(other) => Err(D::Error::invalid_value(Unexpected::Str(other), &"Pod")),
    }
}

impl From<PodFields> for Pod {
    fn from(fields: PodFields) -> Self {
        Self {
            metadata: fields.metadata.map_or_else(ObjectMeta::default, ObjectMeta::from),
            spec: fields.spec.map(PodSpec::from),
            status: fields.status,
        }
    }
}

impl From<Metadata> for ObjectMeta {
    fn from(fields: Metadata) -> Self {
        Self {
            annotations: fields.annotations,
            creation_timestamp: fields.creation_timestamp,
            deletion_timestamp: fields.deletion_timestamp,
            labels: fields.labels,
            name: fields.name,
            namespace: fields.namespace,
            resource_version: fields.resource_version,
            uid: fields.uid,
            ..Self::default()
        }
    }
}

impl From<Spec> for PodSpec {
    fn from(fields: Spec) -> Self {
        let containers = |of: Vec<ContainerFields>| of.into_iter().map(Container::from).collect();
        Self {
            containers: fields.containers.map(containers).unwrap_or_default(),
            init_containers: fields.init_containers.map(containers),
            node_name: fields.node_name,
            overhead: fields.overhead,
            priority: fields.priority,
            priority_class_name: fields.priority_class_name,
            resources: fields.resources,
            scheduler_name: fields.scheduler_name,
            scheduling_gates: fields.scheduling_gates,
            ..Self::default()
        }
    }
}

impl From<ContainerFields> for Container {
    fn from(fields: ContainerFields) -> Self {
        Self {
            env: fields.env,
            name: fields.name.unwrap_or_default(),
            resources: fields.resources,
            restart_policy: fields.restart_policy,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::pod::SeenPod;
    use serde_json::{Value, json};

    /// A pod with everything that is looked at, and some things that are not.
    fn pod() -> Value {
        let amounts = json!({"cpu": "2", "memory": "3Gi", "nvidia.com/gpu": "1"});
        let variable = json!({
            "name": "NVIDIA_VISIBLE_DEVICES",
            "valueFrom": {"fieldRef": {
                "apiVersion": "v1",
                "fieldPath": "metadata.annotations['placed.gpupack.dev/devices']",
            }},
        });
        let container = json!({
            "name": "main", "image": "x", "env": [{"name": "A", "value": "b"}, variable],
            "resources": {"requests": amounts, "limits": amounts, "claims": [{"name": "c"}]},
            "livenessProbe": {"httpGet": {"port": "http"}},
        });
        let sidecar = json!({
            "name": "side", "restartPolicy": "Always", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
        });
        let failed = json!({
            "name": "main", "image": "x", "imageID": "", "ready": false, "restartCount": 3,
            "state": {"waiting": {
                "reason": "RunContainerError",
                "message": "failed to create: unresolvable CDI devices runtime.nvidia.com/gpu=GPU-a",
            }},
        });
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7", "generateName": "p-",
                "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-02T00:00:00Z",
                "annotations": {"gpu-fraction": "0.5", "a": "b"}, "labels": {"c": "d"},
                "managedFields": [{"manager": "m", "fieldsV1": {"f:x": {}}}],
            },
            "spec": {
                "containers": [container], "initContainers": [sidecar], "nodeName": "n1",
                "overhead": {"cpu": "100m"}, "priority": 5, "priorityClassName": "high",
                "resources": {"requests": {"cpu": "4"}}, "schedulerName": "gpu",
                "schedulingGates": [{"name": "g"}], "volumes": [{"name": "v", "emptyDir": {}}],
            },
            "status": {
                "phase": "Pending", "nominatedNodeName": "n2", "containerStatuses": [failed],
                "conditions": [{"type": "Ready", "status": "False"}],
            },
        })
    }

    /// Every place in a value, as a JSON pointer.
    fn places(value: &Value, at: &str, found: &mut Vec<String>) {
        found.push(at.to_owned());
        let within: Vec<(String, &Value)> = match value {
            Value::Object(fields) => {
                let name = |key: &String| key.replace('~', "~0").replace('/', "~1");
                fields.iter().map(|(key, value)| (name(key), value)).collect()
            }
            Value::Array(items) => {
                items.iter().enumerate().map(|(at, item)| (at.to_string(), item)).collect()
            }
            _ => Vec::new(),
        };
        for (name, value) in within {
            places(value, &format!("{at}/{name}"), found);
        }
    }

    #[test]
    fn a_pod_of_these_fields_is_seen_like_the_whole_one() {
        let mut all = Vec::new();
        places(&pod(), "", &mut all);
        let mut equal = 0;
        for place in &all {
            for other in [Value::Null, json!({}), json!([]), json!("other"), json!(3)] {
                let mut pod = pod();
                *pod.pointer_mut(place).expect("a place in the pod") = other;
                let Ok(whole) = serde_json::from_value::<Pod>(pod.clone()) else { continue };
                let fields: PodFields = serde_json::from_value(pod).expect(place);
                assert_eq!(SeenPod::from_api(&fields.into()), SeenPod::from_api(&whole), "{place}");
                equal += 1;
            }
        }
        assert!(all.len() > 90 && equal > 150, "{equal} of {} places", all.len());
        let whole: Pod = serde_json::from_value(pod()).expect("a pod");
        let seen = SeenPod::from_api(&whole);
        assert!(seen.takes_devices && seen.start_failure.is_some() && seen.is_gated);
    }

    #[test]
    fn another_kind_is_no_pod() {
        let read = |json: &str| serde_json::from_str::<PodFields>(json).map(|_| ()).is_ok();
        assert!(read(r#"{"kind":"Pod"}"#) && !read(r#"{"kind":"Node"}"#) && !read("7"));
    }
}
