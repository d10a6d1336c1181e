//! The fields of a pod's JSON that [`SeenPod`](crate::pod::seen_pod::SeenPod) needs.
//! kube-scheduler sends the whole pod with every call, and the API server sends all pods of the
//! cluster. To read all fields takes twice as long.

use std::fmt;

use k8s_openapi::api::core::v1::{
    Container, ContainerResizePolicy, ContainerState, ContainerStatus, EnvVar, Pod, PodCondition,
    PodSchedulingGate, PodSpec, PodStatus, ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Unexpected, Visitor};

use crate::containers::injection::is_of_devices;
use crate::request::bounded::{Bounded, BoundedMap};

/// Most containers, statuses or scheduling gates in one list of a pod that any client may have
/// sent. Objects of the API server have no such limit: it limits their size, and one odd pod must
/// not stop a watch.
const MOST_ITEMS: usize = 1_000;

/// Most annotations or labels of such a pod. Shipped policies allow 1,000; gpupack adds some.
const MOST_KEYS: usize = 1_200;

/// Most resources in one list of amounts of such a pod; real containers have a few.
const MOST_RESOURCES: usize = 64;

/// The fields of a pod that gpupack reads, to make a [`Pod`]. Absent and `null` are the same.
#[derive(Deserialize)]
pub(crate) struct PodFields {
    #[serde(default, deserialize_with = "pod_kind", rename = "kind")]
    _kind: (),
    metadata: Option<Metadata<MOST_KEYS>>,
    spec: Option<Spec<MOST_ITEMS, MOST_RESOURCES>>,
    status: Option<Status<MOST_ITEMS>>,
}

/// Metadata of a pod or node that gpupack reads: at most `MOST` annotations and `MOST` labels.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Metadata<const MOST: usize = { usize::MAX }> {
    annotations: Option<BoundedMap<String, MOST>>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    labels: Option<BoundedMap<String, MOST>>,
    name: Option<String>,
    namespace: Option<String>,
    owner_references: Option<Bounded<OwnerReference, MOST>>,
    resource_version: Option<String>,
    uid: Option<String>,
}

/// The same of the specification: at most `MOST` items per list, `KEYS` resources each.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Spec<const MOST: usize, const KEYS: usize = { usize::MAX }> {
    containers: Option<Bounded<ContainerFields<KEYS>, MOST>>,
    init_containers: Option<Bounded<ContainerFields<KEYS>, MOST>>,
    node_name: Option<String>,
    overhead: Option<BoundedMap<Quantity, KEYS>>,
    preemption_policy: Option<String>,
    priority: Option<i32>,
    priority_class_name: Option<String>,
    resources: Option<ResourceFields<KEYS>>,
    restart_policy: Option<String>,
    scheduler_name: Option<String>,
    scheduling_gates: Option<Bounded<PodSchedulingGate, MOST>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerFields<const KEYS: usize> {
    env: Option<DevicesVariable>,
    name: Option<String>,
    resize_policy: Option<Bounded<ContainerResizePolicy, MOST_RESOURCES>>,
    resources: Option<ResourceFields<KEYS>>,
    restart_policy: Option<String>,
}

#[derive(Deserialize)]
struct ResourceFields<const KEYS: usize> {
    limits: Option<BoundedMap<Quantity, KEYS>>,
    requests: Option<BoundedMap<Quantity, KEYS>>,
}

/// The first variable of a container that takes the devices. No other is read; there may be many.
struct DevicesVariable(Option<EnvVar>);

/// The same of the status.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status<const MOST: usize> {
    conditions: Option<ScheduledCondition>,
    container_statuses: Option<Bounded<ContainerStatusFields, MOST>>,
    init_container_statuses: Option<Bounded<ContainerStatusFields, MOST>>,
    nominated_node_name: Option<String>,
    phase: Option<String>,
    start_time: Option<Time>,
}

/// The condition `PodScheduled`. No other is kept; there may be many.
struct ScheduledCondition(Option<PodCondition>);

#[derive(Deserialize)]
struct ConditionFields {
    message: Option<String>,
    reason: Option<String>,
    status: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerStatusFields {
    #[serde(rename = "containerID")]
    container_id: Option<String>,
    last_state: Option<ContainerState>,
    name: Option<String>,
    resources: Option<ResourceFields<MOST_RESOURCES>>,
    state: Option<ContainerState>,
}

impl<'de> Deserialize<'de> for DevicesVariable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(DevicesVisitor)
    }
}

struct DevicesVisitor;

impl<'de> Visitor<'de> for DevicesVisitor {
    type Value = DevicesVariable;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of variables")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(given) = list.next_element::<EnvVar>()? {
            found = found.or_else(|| Some(given).filter(is_of_devices));
        }
        Ok(DevicesVariable(found))
    }
}

impl<'de> Deserialize<'de> for ScheduledCondition {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ConditionsVisitor)
    }
}

struct ConditionsVisitor;

impl<'de> Visitor<'de> for ConditionsVisitor {
    type Value = ScheduledCondition;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of conditions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(condition) = list.next_element::<ConditionFields>()? {
            let is_scheduled = condition.kind.as_deref() == Some("PodScheduled");
            found = found.or_else(|| is_scheduled.then(|| PodCondition::from(condition)));
        }
        Ok(ScheduledCondition(found))
    }
}

impl From<ConditionFields> for PodCondition {
    fn from(fields: ConditionFields) -> Self {
        Self {
            message: fields.message,
            reason: fields.reason,
            status: fields.status.unwrap_or_default(),
            type_: fields.kind.unwrap_or_default(),
            ..Self::default()
        }
    }
}

/// Refuses an object that is not a pod.
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
            status: fields.status.map(PodStatus::from),
        }
    }
}

fn all_from<T, U: From<T>, const MOST: usize>(list: Bounded<T, MOST>) -> Vec<U> {
    list.0.into_iter().map(U::from).collect()
}

impl<const MOST: usize> From<Metadata<MOST>> for ObjectMeta {
    fn from(fields: Metadata<MOST>) -> Self {
        Self {
            annotations: fields.annotations.map(|annotations| annotations.0),
            creation_timestamp: fields.creation_timestamp,
            deletion_timestamp: fields.deletion_timestamp,
            labels: fields.labels.map(|labels| labels.0),
            name: fields.name,
            namespace: fields.namespace,
            owner_references: fields.owner_references.map(|owners| owners.0),
            resource_version: fields.resource_version,
            uid: fields.uid,
            ..Self::default()
        }
    }
}

impl<const MOST: usize, const KEYS: usize> From<Spec<MOST, KEYS>> for PodSpec {
    fn from(fields: Spec<MOST, KEYS>) -> Self {
        Self {
            containers: fields.containers.map(all_from).unwrap_or_default(),
            init_containers: fields.init_containers.map(all_from),
            node_name: fields.node_name,
            overhead: fields.overhead.map(|overhead| overhead.0),
            preemption_policy: fields.preemption_policy,
            priority: fields.priority,
            priority_class_name: fields.priority_class_name,
            resources: fields.resources.map(ResourceRequirements::from),
            restart_policy: fields.restart_policy,
            scheduler_name: fields.scheduler_name,
            scheduling_gates: fields.scheduling_gates.map(|gates| gates.0),
            ..Self::default()
        }
    }
}

impl<const KEYS: usize> From<ContainerFields<KEYS>> for Container {
    fn from(fields: ContainerFields<KEYS>) -> Self {
        Self {
            env: fields.env.map(|env| env.0.into_iter().collect()),
            name: fields.name.unwrap_or_default(),
            resize_policy: fields.resize_policy.map(|policies| policies.0),
            resources: fields.resources.map(ResourceRequirements::from),
            restart_policy: fields.restart_policy,
            ..Self::default()
        }
    }
}

impl<const KEYS: usize> From<ResourceFields<KEYS>> for ResourceRequirements {
    fn from(fields: ResourceFields<KEYS>) -> Self {
        let limits = fields.limits.map(|limits| limits.0);
        Self { limits, requests: fields.requests.map(|requests| requests.0), claims: None }
    }
}

impl<const MOST: usize> From<Status<MOST>> for PodStatus {
    fn from(fields: Status<MOST>) -> Self {
        Self {
            conditions: fields
                .conditions
                .and_then(|scheduled| scheduled.0)
                .map(|condition| vec![condition]),
            container_statuses: fields.container_statuses.map(all_from),
            init_container_statuses: fields.init_container_statuses.map(all_from),
            nominated_node_name: fields.nominated_node_name,
            phase: fields.phase,
            start_time: fields.start_time,
            ..Self::default()
        }
    }
}

impl From<ContainerStatusFields> for ContainerStatus {
    fn from(fields: ContainerStatusFields) -> Self {
        Self {
            container_id: fields.container_id,
            last_state: fields.last_state,
            name: fields.name.unwrap_or_default(),
            resources: fields.resources.map(ResourceRequirements::from),
            state: fields.state,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::seen_pod::SeenPod;
    use serde_json::{Value, json};

    /// A pod with every field that is read, and some that are not.
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
                "overhead": {"cpu": "100m"}, "preemptionPolicy": "Never", "priority": 5, "priorityClassName": "high",
                "resources": {"requests": {"cpu": "4"}}, "schedulerName": "gpu",
                "schedulingGates": [{"name": "g"}], "volumes": [{"name": "v", "emptyDir": {}}],
            },
            "status": {
                "phase": "Pending", "nominatedNodeName": "n2", "startTime": "2026-01-01T00:00:07Z",
                "containerStatuses": [failed],
                "conditions": [{"type": "Ready", "status": "False"}],
            },
        })
    }

    /// The path of every value, as a JSON pointer.
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
    fn a_pod_reduced_to_these_fields_is_read_like_the_full_pod() {
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
        assert!(seen.containers.takes_devices && seen.containers.start_failure.is_some());
        assert!(seen.scheduling.is_gated && !seen.scheduling.may_preempt);
        assert_eq!(seen.life.started_unix_seconds - seen.life.created_unix_seconds, 7);
    }

    #[test]
    fn a_parsed_pod_uses_far_less_memory_than_its_text() {
        let of = |items: &str| {
            format!(r#"{{"metadata":{{"name":"p","namespace":"n","uid":"u"}},{items}}}"#)
        };
        let many = |item: &str, count: usize| vec![item; count].join(",");
        for list in ["containers", "initContainers", "schedulingGates"] {
            let read = |count| {
                SeenPod::from_json(&of(&format!(r#""spec":{{"{list}":[{}]}}"#, many("{}", count))))
            };
            assert!(read(1_000).is_ok(), "{list}");
            let fault = read(1_001).unwrap_err().to_string();
            assert!(fault.contains("a list of more than 1000 items"), "{list}: {fault}");
        }
        for list in ["containerStatuses", "initContainerStatuses"] {
            let json = of(&format!(r#""status":{{"{list}":[{}]}}"#, many("{}", 1_001)));
            assert!(SeenPod::from_json(&json).is_err(), "{list}");
        }
        let keys = |count: usize| {
            let keys: Vec<String> = (0..count).map(|at| format!(r#""k{at}":"1""#)).collect();
            keys.join(",")
        };
        for (before, after, most) in [
            (r#""spec":{"containers":[{"resources":{"limits":{"#, "}}}]}", 64),
            (r#""spec":{"initContainers":[{"resources":{"requests":{"#, "}}}]}", 64),
            (r#""spec":{"resources":{"requests":{"#, "}}}", 64),
            (r#""spec":{"overhead":{"#, "}}", 64),
        ] {
            let read = |count| SeenPod::from_json(&of(&format!("{before}{}{after}", keys(count))));
            assert!(read(most).is_ok(), "{before}");
            let fault = read(most + 1).unwrap_err().to_string();
            assert!(fault.contains("an object with more than 64 keys"), "{before}: {fault}");
        }
        for part in ["annotations", "labels"] {
            let meta = |count| {
                format!(
                    r#"{{"metadata":{{"name":"p","namespace":"n","uid":"u","{part}":{{{}}}}}}}"#,
                    keys(count)
                )
            };
            assert!(SeenPod::from_json(&meta(1_200)).is_ok(), "{part}");
            let fault = SeenPod::from_json(&meta(1_201)).unwrap_err().to_string();
            assert!(fault.contains("an object with more than 1200 keys"), "{part}: {fault}");
        }
        // What gpupack does not read is not kept, in any amount.
        let empty = many("{}", 100_000);
        let kept = r#"{"name":"A","valueFrom":{"fieldRef":{"fieldPath":"metadata.annotations['placed.gpupack.dev/devices']"}}}"#;
        let container =
            format!(r#"{{"env":[{empty},{kept},{kept}],"resources":{{"claims":[{empty}]}}}}"#);
        let json = of(&format!(
            r#""spec":{{"containers":[{container}],"ephemeralContainers":[{empty}]}},"status":{{"conditions":[{empty}]}}"#
        ));
        let pod = Pod::from(serde_json::from_str::<PodFields>(&json).unwrap());
        let spec = pod.spec.as_ref().unwrap();
        let container = &spec.containers[0];
        assert_eq!(container.env.as_ref().map(Vec::len), Some(1));
        assert!(container.resources.as_ref().unwrap().claims.is_none());
        assert!(spec.ephemeral_containers.is_none() && pod.status.unwrap().conditions.is_none());
        assert!(SeenPod::from_json(&json).unwrap().containers.takes_devices);
    }

    #[test]
    fn an_object_of_another_kind_is_not_a_pod() {
        let read = |json: &str| serde_json::from_str::<PodFields>(json).map(|_| ()).is_ok();
        assert!(read(r#"{"kind":"Pod"}"#) && !read(r#"{"kind":"Node"}"#) && !read("7"));
    }
}
