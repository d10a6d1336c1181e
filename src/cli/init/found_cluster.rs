//! What a cluster says about itself.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::version::Info;
use serde::Deserialize;

use crate::base::reader::{ObjectPath, Read, Reader};
use crate::doctor::objects::NodeSummary;

/// A taint of a node that keeps pods away.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Taint {
    pub(crate) key: String,
    /// `NoSchedule` or `NoExecute`.
    pub(crate) effect: String,
}

/// Who runs the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Platform {
    /// Not known.
    #[default]
    Unknown,
    Eks,
    Gke,
    Aks,
    /// K3s or RKE2, of SUSE.
    K3s,
    OpenShift,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FoundNode {
    /// Its name, GPUs and labels.
    pub(crate) seen: NodeSummary,
    /// Number of GPUs that its labels or kubelet name.
    pub(crate) gpus: u64,
    pub(crate) taints: BTreeSet<Taint>,
    pub(crate) platform: Platform,
    /// Major version of its driver, as GPU feature discovery labels it.
    pub(crate) driver: Option<u64>,
}

/// Labels with the major version of the driver: of GPU feature discovery, and of its releases before 0.15.
const DRIVER_LABELS: [&str; 2] =
    ["nvidia.com/cuda.driver-version.major", "nvidia.com/cuda.driver.major"];

impl FoundNode {
    /// Of a node.
    pub(crate) fn of(node: Node) -> Self {
        let spec = node.spec.clone().unwrap_or_default();
        let labels = node.metadata.labels.clone().unwrap_or_default();
        let taints = spec.taints.unwrap_or_default().into_iter();
        let taints = taints.filter(|taint| ["NoSchedule", "NoExecute"].contains(&&*taint.effect));
        let is_labeled = |start: &str| labels.keys().any(|key| key.starts_with(start));
        let made_by = spec.provider_id.unwrap_or_default();
        let platform = if is_labeled("node.openshift.io/") {
            Platform::OpenShift
        } else if is_labeled("eks.amazonaws.com/") {
            Platform::Eks
        } else if is_labeled("cloud.google.com/gke-") {
            Platform::Gke
        } else if is_labeled("kubernetes.azure.com/") {
            Platform::Aks
        } else if made_by.starts_with("k3s://") || made_by.starts_with("rke2://") {
            Platform::K3s
        } else {
            Platform::Unknown
        };
        let labeled = labels.get("nvidia.com/gpu.count").and_then(|text| text.parse().ok());
        let driver = DRIVER_LABELS.iter().find_map(|label| labels.get(*label)?.parse().ok());
        let seen = NodeSummary::of(node, &std::collections::BTreeMap::new(), None);
        let advertised = seen.of_kubelet.iter().map(|(_, amount)| *amount).max();
        Self {
            gpus: labeled.or(advertised).unwrap_or(0).min(64),
            taints: taints.map(|taint| Taint { key: taint.key, effect: taint.effect }).collect(),
            platform,
            driver,
            seen,
        }
    }

    /// Whether it has GPUs of NVIDIA.
    pub(crate) fn has_gpus(&self) -> bool {
        self.seen.has_gpus || !self.seen.of_kubelet.is_empty()
    }
}

/// A cluster. What could not be read says why.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    /// Version of the API server.
    pub(crate) version: Read<Info>,
    pub(crate) nodes: Read<Vec<FoundNode>>,
    /// Names of all API groups.
    pub(crate) groups: Read<BTreeSet<String>>,
    /// Namespaces in which NVIDIA's GPU Operator runs.
    pub(crate) operators: Read<BTreeSet<String>>,
    /// Images of the container toolkits that the GPU Operator runs.
    pub(crate) toolkits: Read<BTreeSet<String>>,
    pub(crate) runtime_classes: Read<BTreeSet<String>>,
    /// Whether kube-scheduler is a pod of the cluster.
    pub(crate) has_own_scheduler: Read<bool>,
}

#[derive(Deserialize)]
struct Groups {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    name: String,
}

/// Selects the pods that install the container toolkit for the GPU Operator.
const TOOLKIT_PODS: &str = "&labelSelector=app%3Dnvidia-container-toolkit-daemonset";

/// The image of such a pod.
fn toolkit_image(pod: Pod) -> String {
    let container = pod.spec.and_then(|spec| spec.containers.into_iter().next());
    container.and_then(|container| container.image).unwrap_or_default()
}

impl Cluster {
    /// Asks the API server.
    pub(crate) async fn read(reader: &Reader) -> Self {
        let nodes = ObjectPath::all("", "v1", "nodes");
        let pods = ObjectPath::all("", "v1", "pods");
        let system_pods = pods.within("kube-system");
        let classes = ObjectPath::all("node.k8s.io", "v1", "runtimeclasses");
        let (version, nodes, groups, operators, toolkits, schedulers, classes) = tokio::join!(
            reader.path::<Info>("/version"),
            reader.list(&nodes, "", FoundNode::of),
            reader.path::<Groups>("/apis"),
            reader.list(&pods, "&labelSelector=app%3Dgpu-operator", |pod: Pod| {
                pod.metadata.namespace.unwrap_or_default()
            }),
            reader.list(&pods, TOOLKIT_PODS, toolkit_image),
            reader.list(&system_pods, "&labelSelector=component%3Dkube-scheduler", |_: Pod| ()),
            reader.list(&classes, "", |class: RuntimeClass| {
                class.metadata.name.unwrap_or_default()
            }),
        );
        Self {
            version,
            nodes,
            groups: groups.map(|all| all.groups.into_iter().map(|group| group.name).collect()),
            operators: operators.map(|all| all.into_iter().collect()),
            toolkits: toolkits.map(|images| images.into_iter().collect()),
            runtime_classes: classes.map(|all| all.into_iter().collect()),
            has_own_scheduler: schedulers.map(|pods| !pods.is_empty()),
        }
    }

    /// Whether the API server has this group; `None` if that is not known.
    pub(crate) fn has_group(&self, name: &str) -> Option<bool> {
        self.groups.as_ref().ok().map(|groups| groups.contains(name))
    }

    /// Its nodes with GPUs; none if nodes could not be read.
    pub(crate) fn gpu_nodes(&self) -> impl Iterator<Item = &FoundNode> {
        self.nodes.iter().flatten().filter(|node| node.has_gpus())
    }

    /// Who runs it.
    pub(crate) fn platform(&self) -> Platform {
        let version = self.version.as_ref().map_or("", |info| info.git_version.as_str());
        let of_version = [
            ("-eks-", Platform::Eks),
            ("-gke.", Platform::Gke),
            ("+k3s", Platform::K3s),
            ("+rke2", Platform::K3s),
        ];
        let of_version = of_version.into_iter().find(|(part, _)| version.contains(part));
        if self.has_group("config.openshift.io") == Some(true) {
            return Platform::OpenShift;
        }
        let of_nodes = self.nodes.iter().flatten().map(|node| node.platform).max();
        of_version.map(|(_, platform)| platform).or(of_nodes).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_node_shows_its_gpus_taints_and_platform() {
        let node = |labels: Value, spec: Value, allocatable: Value| {
            let node = json!({"metadata": {"name": "a", "labels": labels}, "spec": spec,
                "status": {"allocatable": allocatable}});
            FoundNode::of(serde_json::from_value(node).unwrap())
        };
        let taints = json!({"taints": [
            {"key": "sku", "value": "gpu", "effect": "NoSchedule"},
            {"key": "soft", "effect": "PreferNoSchedule"}]});
        let found = node(
            json!({"nvidia.com/gpu.present": "true", "nvidia.com/gpu.count": "8",
                "kubernetes.azure.com/cluster": "x"}),
            taints,
            json!({}),
        );
        assert_eq!((found.gpus, found.platform, found.has_gpus()), (8, Platform::Aks, true));
        assert_eq!(found.taints.len(), 1, "{found:?}");
        let found =
            node(json!({}), json!({"providerID": "k3s://a"}), json!({"nvidia.com/gpu": "2"}));
        assert_eq!((found.gpus, found.platform, found.has_gpus()), (2, Platform::K3s, true));
        let found = node(json!({"nvidia.com/gpu.count": "-1"}), Value::Null, json!({}));
        assert_eq!((found.gpus, found.has_gpus()), (0, false));
    }
}
