//! Pods and nodes of the watch, converted as soon as each is decoded.
//!
//! A list comes in pages of 100, and `kube` decodes a whole page before it returns the first
//! object. A `Pod` takes a hundred times the memory of what gpupack needs of it: a page would be
//! most of the process. The writers of fields (`managedFields`), a third of the text, are not
//! decoded.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;

use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::pod::host::host_offer;
use crate::pod::labels;
use crate::pod::pod_fields::{Metadata, Spec, Status};
use crate::pod::seen_pod::SeenPod;
use wire::driver_work::DriverWork;
use wire::ids::NodeName;
use wire::units::HostAmount;

/// What gpupack needs of an object of the API server.
pub(crate) trait WatchedFacts: Clone + Debug + Send + 'static {
    /// The type of the object.
    type Object: Resource<DynamicType = ()>;
    /// The part of its `spec` that is decoded.
    type Spec: DeserializeOwned;
    /// The part of its `status` that is decoded.
    type Status: DeserializeOwned;

    /// Reads the object.
    fn of(metadata: ObjectMeta, spec: Option<Self::Spec>, status: Option<Self::Status>) -> Self;
}

/// An object of a list or a watch, of which only the facts are kept.
#[derive(Clone, Debug)]
pub(crate) struct Watched<F> {
    /// Only the version, from which a watch continues.
    metadata: ObjectMeta,
    pub(crate) facts: F,
}

/// What gpupack needs of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFacts {
    pub name: NodeName,
    /// The CPU and memory that pods can request.
    pub host: HostAmount,
    /// Whether it takes no new pods (`kubectl cordon`).
    pub is_unschedulable: bool,
    /// Whether its kubelet says that it is ready, or says nothing of that.
    pub is_ready: bool,
    pub labels: BTreeMap<String, String>,
}

impl NodeFacts {
    /// What NVIDIA's tools do with its driver.
    pub(crate) fn driver_work(&self) -> DriverWork {
        let label = |key: &str| self.labels.get(key).map(String::as_str);
        labels::driver_work(self.name.as_str(), label)
    }

    /// The value of a label; empty without one.
    pub(crate) fn label(&self, key: &str) -> &str {
        self.labels.get(key).map_or("", String::as_str)
    }
}

#[derive(Deserialize)]
struct Parts<Spec, Status> {
    #[serde(default)]
    metadata: Metadata,
    spec: Option<Spec>,
    status: Option<Status>,
}

/// The part of a node's specification that is decoded.
#[derive(Deserialize)]
pub(crate) struct NodeSpec {
    unschedulable: Option<bool>,
}

/// The part of a node's status that is decoded.
#[derive(Deserialize)]
pub(crate) struct Offer {
    allocatable: Option<BTreeMap<String, Quantity>>,
    conditions: Option<Vec<NodeCondition>>,
}

impl WatchedFacts for SeenPod {
    type Object = Pod;
    type Spec = Spec<{ usize::MAX }>;
    type Status = Status<{ usize::MAX }>;

    fn of(metadata: ObjectMeta, spec: Option<Self::Spec>, status: Option<Self::Status>) -> Self {
        let (spec, status) = (spec.map(PodSpec::from), status.map(PodStatus::from));
        Self::from_api(&Pod { metadata, spec, status })
    }
}

impl WatchedFacts for NodeFacts {
    type Object = Node;
    type Spec = NodeSpec;
    type Status = Offer;

    fn of(metadata: ObjectMeta, spec: Option<NodeSpec>, status: Option<Offer>) -> Self {
        let (allocatable, conditions) =
            status.map(|status| (status.allocatable, status.conditions)).unwrap_or_default();
        let allocatable = allocatable.unwrap_or_default();
        let mut conditions = conditions.into_iter().flatten();
        let is_unready = conditions.any(|known| known.type_ == "Ready" && known.status != "True");
        let amount = |name: &str| allocatable.get(name).map(|quantity| quantity.0.as_str());
        Self {
            name: NodeName::new(metadata.name.unwrap_or_default()),
            host: host_offer(amount),
            is_unschedulable: spec.and_then(|spec| spec.unschedulable).unwrap_or_default(),
            is_ready: !is_unready,
            labels: metadata.labels.unwrap_or_default(),
        }
    }
}

impl<'de, F: WatchedFacts> Deserialize<'de> for Watched<F> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts = Parts::<F::Spec, F::Status>::deserialize(deserializer)?;
        let whole = ObjectMeta::from(parts.metadata);
        let resource_version = whole.resource_version.clone();
        let metadata = ObjectMeta { resource_version, ..ObjectMeta::default() };
        Ok(Self { metadata, facts: F::of(whole, parts.spec, parts.status) })
    }
}

/// Reads the JSON of a pod as the watch does.
///
/// # Errors
/// It is not the JSON of a pod.
pub fn watched_pod(json: &str) -> Result<SeenPod, serde_json::Error> {
    serde_json::from_str::<Watched<SeenPod>>(json).map(|pod| pod.facts)
}

impl<F: WatchedFacts> Resource for Watched<F> {
    type DynamicType = ();
    type Scope = <F::Object as Resource>::Scope;

    fn kind(_: &Self::DynamicType) -> Cow<'_, str> {
        F::Object::kind(&())
    }

    fn group(_: &Self::DynamicType) -> Cow<'_, str> {
        F::Object::group(&())
    }

    fn version(_: &Self::DynamicType) -> Cow<'_, str> {
        F::Object::version(&())
    }

    fn plural(_: &Self::DynamicType) -> Cow<'_, str> {
        F::Object::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod() -> Value {
        json!({
            "metadata": {
                "name": "infer-7", "namespace": "team-a", "uid": "0b6e", "resourceVersion": "812",
                "creationTimestamp": "1970-01-02T00:00:00Z",
                "deletionTimestamp": "1970-01-03T00:00:00Z", "labels": {"team": "a"},
                "annotations": {
                    "gpu-fraction": "0.5",
                    "placed.gpupack.dev/placement":
                        r#"{"v":1,"devices":[{"id":"GPU-a","mib":4,"share":5}],"isolation":"none"}"#,
                },
                "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {"f:phase": {}}}}],
            },
            "spec": {
                "nodeName": "n1", "schedulerName": "gpu", "priority": 7, "priorityClassName": "high",
                "schedulingGates": [{"name": "g"}],
                "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}],
            },
            "status": {"phase": "Failed", "nominatedNodeName": "n2", "containerStatuses": [{
                "name": "main", "image": "i", "imageID": "", "ready": false, "restartCount": 1,
                "state": {"waiting": {"reason": "CreateContainerError", "message": "unresolvable CDI devices"}},
            }]},
        })
    }

    #[test]
    fn a_pod_is_read_as_from_the_whole_object() {
        let mut unbound = pod();
        unbound["spec"]["nodeName"] = Value::Null;
        let mut labelled = unbound.clone();
        labelled["metadata"]["annotations"] = Value::Null;
        labelled["metadata"]["labels"]["placed.gpupack.dev/x"] = "1".into();
        for pod in [pod(), unbound, labelled, json!({}), json!({"metadata": {}, "spec": null})] {
            let watched: Watched<SeenPod> = serde_json::from_value(pod.clone()).unwrap();
            let whole = SeenPod::from_api(&serde_json::from_value(pod).unwrap());
            assert_eq!(watched.facts, whole);
            assert_eq!(
                watched.meta().resource_version.clone().unwrap_or_default(),
                whole.resource_version
            );
        }
    }

    #[test]
    fn unknown_node_fields_are_ignored() {
        let node = json!({
            "metadata": {"name": "n1", "resourceVersion": "3", "labels": {"zone": "a"}},
            "spec": {"podCIDR": 7},
            "status": {"allocatable": {"cpu": "1500m", "memory": "2Gi"}, "images": "none"},
        });
        let watched: Watched<NodeFacts> = serde_json::from_value(node).unwrap();
        let facts = watched.facts;
        assert_eq!(
            (facts.name.as_str(), facts.label("zone"), facts.label("rack")),
            ("n1", "a", "")
        );
        assert!(!facts.is_unschedulable);
        let cordoned = json!({"metadata": {"name": "n1"}, "spec": {"unschedulable": true}});
        let cordoned: Watched<NodeFacts> = serde_json::from_value(cordoned).unwrap();
        assert!(cordoned.facts.is_unschedulable && cordoned.facts.is_ready);
        for (status, is_ready) in [("True", true), ("False", false), ("Unknown", false)] {
            let conditions = json!([{"type": "DiskPressure", "status": "False"},
                {"type": "Ready", "status": status}]);
            let node = json!({"metadata": {"name": "n1"}, "status": {"conditions": conditions}});
            let node: Watched<NodeFacts> = serde_json::from_value(node).unwrap();
            assert_eq!(node.facts.is_ready, is_ready, "{status}");
        }
        assert_eq!((facts.host.cpu.milli(), facts.host.memory.mib()), (1500, 2048));
        let bare: Watched<NodeFacts> = serde_json::from_value(json!({})).unwrap();
        assert_eq!(bare.facts.host, HostAmount::ZERO);
    }

    #[test]
    fn an_object_is_requested_at_its_path() {
        assert_eq!(Watched::<SeenPod>::url_path(&(), None), "/api/v1/pods");
        assert_eq!(Watched::<NodeFacts>::url_path(&(), None), "/api/v1/nodes");
    }
}
