//! Objects of a cluster, reduced to what the checks look at.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use engine::hardware::pool::Borrow;
use kube_api::config::file::Config;
use kube_api::request::quantity::parse_count;
use kube_api::request::resources::{MIG_PREFIX, SHARED_SLOT, WHOLE};
use wire::ids::PoolName;

/// Label with the part of gpupack that an object belongs to.
pub(crate) const COMPONENT: &str = "app.kubernetes.io/component";

/// Label of GPU feature discovery: the node has a GPU of NVIDIA.
const PRESENT: &str = "nvidia.com/gpu.present";

/// Label of GPU feature discovery: product name.
pub(crate) const PRODUCT: &str = "nvidia.com/gpu.product";

/// Label of NVIDIA's MIG Manager: whether it is changing the node.
const MIG_STATE: &str = "nvidia.com/mig.config.state";

/// The same: what it is to make of the node.
const MIG_CONFIG: &str = "nvidia.com/mig.config";

/// Label of the GPU Operator: whether MIG Manager runs on the node.
const MIG_OPERAND: &str = "nvidia.com/gpu.deploy.mig-manager";

/// Label of the GPU Operator, from 26.7 on: whether pods of others that have the driver open may run. It takes the value
/// away while it replaces the driver or divides GPUs, and waits until the pods of a DaemonSet that selects it are gone.
pub(crate) const CLIENTS: &str = "nvidia.com/gpu.deploy.client";

/// A Deployment or a DaemonSet.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct WorkloadSummary {
    pub(crate) name: String,
    /// The part of gpupack that it runs.
    pub(crate) component: String,
    /// Replicas that it should have.
    pub(crate) wanted: i32,
    pub(crate) ready: i32,
    pub(crate) pods: PodSpec,
}

impl WorkloadSummary {
    /// Of a Deployment.
    pub(crate) fn of_deployment(object: Deployment) -> Self {
        let (spec, status) = (object.spec.unwrap_or_default(), object.status.unwrap_or_default());
        let (wanted, ready) = (spec.replicas.unwrap_or(1), status.ready_replicas.unwrap_or(0));
        Self { wanted, ready, ..Self::of(object.metadata, spec.template) }
    }

    /// Of a DaemonSet.
    pub(crate) fn of_daemon_set(object: DaemonSet) -> Self {
        let status = object.status.unwrap_or_default();
        let (wanted, ready) = (status.desired_number_scheduled, status.number_ready);
        let template = object.spec.unwrap_or_default().template;
        Self { wanted, ready, ..Self::of(object.metadata, template) }
    }

    /// One without replicas.
    fn of(metadata: ObjectMeta, template: PodTemplateSpec) -> Self {
        let component = metadata.labels.and_then(|mut labels| labels.remove(COMPONENT));
        Self {
            name: metadata.name.unwrap_or_default(),
            component: component.unwrap_or_default(),
            pods: template.spec.unwrap_or_default(),
            ..Self::default()
        }
    }

    /// The image of its main container.
    pub(crate) fn image(&self) -> &str {
        image_of(&self.pods)
    }

    /// Arguments of its main container.
    pub(crate) fn arguments(&self) -> impl Iterator<Item = &str> {
        let container = self.pods.containers.first();
        let lists =
            container.into_iter().flat_map(|container| [&container.command, &container.args]);
        lists.flatten().flatten().map(String::as_str)
    }

    /// The ConfigMap that its pods mount, and the file in it that `--config` names.
    pub(crate) fn config_map(&self) -> Option<(String, String)> {
        let mut volumes = self.pods.volumes.iter().flatten();
        let map = volumes.find_map(|volume| volume.config_map.as_ref())?.name.clone();
        let flags: Vec<&str> = self.arguments().collect();
        let joined = flags.iter().find_map(|flag| flag.strip_prefix("--config="));
        let apart = flags.windows(2).find(|pair| pair[0] == "--config").map(|pair| pair[1]);
        let file = joined.or(apart)?.rsplit('/').next()?.to_owned();
        Some((map, file))
    }

    /// The Secret that its pods mount where this file is.
    pub(crate) fn secret_of(&self, file: &str) -> Option<String> {
        let container = self.pods.containers.first()?;
        let mounts = container.volume_mounts.iter().flatten();
        let around = mounts.filter(|mount| {
            let rest = file.strip_prefix(mount.mount_path.trim_end_matches('/'));
            rest.is_some_and(|rest| rest.starts_with('/'))
        });
        let mount = around.max_by_key(|mount| mount.mount_path.len())?;
        let mut volumes = self.pods.volumes.iter().flatten();
        let volume = volumes.find(|volume| volume.name == mount.name)?;
        let plain = volume.secret.as_ref().and_then(|secret| secret.secret_name.clone());
        plain.or_else(|| {
            let sources = volume.projected.as_ref()?.sources.as_ref()?;
            sources.iter().find_map(|source| Some(source.secret.as_ref()?.name.clone()))
        })
    }
}

/// Whether kubelet gives out GPUs or parts of them under this name.
fn is_gpu(resource: &str) -> bool {
    resource == WHOLE || resource == SHARED_SLOT || resource.starts_with(MIG_PREFIX)
}

fn image_of(spec: &PodSpec) -> &str {
    spec.containers.first().and_then(|container| container.image.as_deref()).unwrap_or_default()
}

/// A pod of gpupack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OwnPod {
    pub(crate) name: String,
    /// Its node; empty if it has none.
    pub(crate) node: String,
    pub(crate) is_ready: bool,
    /// The image of its main container.
    pub(crate) image: String,
    /// Whether it has the label of the replica that leads.
    pub(crate) is_leader: bool,
}

impl OwnPod {
    /// Of a pod.
    pub(crate) fn of(pod: Pod) -> Self {
        let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
        let mut conditions = status.conditions.iter().flatten();
        let leads = pod.metadata.labels.as_ref().and_then(|all| all.get("gpupack.dev/leader"));
        Self {
            name: pod.metadata.name.unwrap_or_default(),
            is_ready: conditions
                .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
            image: image_of(&spec).to_owned(),
            is_leader: leads.is_some_and(|value| value == "true"),
            node: spec.node_name.unwrap_or_default(),
        }
    }
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeSummary {
    pub(crate) name: String,
    /// Whether GPU feature discovery found a GPU.
    pub(crate) has_gpus: bool,
    /// Product name of its GPUs; empty if it is not labeled.
    pub(crate) product: String,
    /// Whether the agents' node selector chooses it.
    pub(crate) is_selected: bool,
    /// Devices that kubelet gives out there, with their number.
    pub(crate) of_kubelet: Vec<(String, u64)>,
    /// MIG profiles among these, without prefix.
    pub(crate) mig_profiles: Vec<String>,
    /// What MIG Manager does there; empty if it does nothing.
    pub(crate) mig_state: String,
    /// Whether MIG Manager is there, or is to divide its GPUs.
    pub(crate) has_mig_manager: bool,
    /// Whether the GPU Operator stops pods there that have the driver open, before it replaces that.
    pub(crate) stops_clients: bool,
    /// Whether gpupack makes MIG instances in its pool.
    pub(crate) is_divided: bool,
    /// Its labels, if so.
    pub(crate) labels: BTreeMap<String, String>,
    /// Whether gpupack restarts containers of its pool: it lends.
    pub(crate) moves_pods: bool,
    /// The version of its kubelet, as that reports it.
    pub(crate) kubelet: String,
}

impl NodeSummary {
    /// Of a node, where this selects the agents' nodes.
    pub(crate) fn of(
        node: Node,
        selector: &BTreeMap<String, String>,
        config: Option<&Config>,
    ) -> Self {
        let labels = node.metadata.labels.unwrap_or_default();
        let label = |key: &str| labels.get(key).cloned().unwrap_or_default();
        let status = node.status.unwrap_or_default();
        let allocatable = status.allocatable.unwrap_or_default();
        let devices = allocatable.iter().filter(|(name, _)| is_gpu(name));
        let counted =
            devices.filter_map(|(name, amount)| Some((name.clone(), parse_count(&amount.0).ok()?)));
        let pool = config.map(|config| config.pools.of(&PoolName::new(label(&config.pool_label))));
        let has_mig_manager = match label(MIG_OPERAND).as_str() {
            "false" => false,
            "" => labels.contains_key(MIG_CONFIG),
            _ => true, // also while it is paused
        };
        let profiles = allocatable.keys().filter_map(|name| name.strip_prefix(MIG_PREFIX));
        let is_divided = pool.is_some_and(|rule| rule.mig.makes());
        Self {
            has_gpus: label(PRESENT) == "true",
            product: label(PRODUCT),
            is_selected: selector.iter().all(|(key, value)| labels.get(key) == Some(value)),
            of_kubelet: counted.filter(|(_, amount)| *amount > 0).collect(),
            mig_profiles: profiles.map(str::to_owned).collect(),
            mig_state: label(MIG_STATE),
            has_mig_manager,
            stops_clients: labels.contains_key(CLIENTS),
            is_divided,
            moves_pods: pool.is_some_and(|rule| rule.borrow != Borrow::None),
            kubelet: status.node_info.map(|info| info.kubelet_version).unwrap_or_default(),
            name: node.metadata.name.unwrap_or_default(),
            labels: if is_divided { labels } else { BTreeMap::new() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::hardware::pool::{MigUse, PoolRule, PoolRules};
    use serde::de::DeserializeOwned;
    use serde_json::json;

    fn shipped<T: DeserializeOwned>(text: &str, kind: &str) -> T {
        let documents = serde_yaml_ng::Deserializer::from_str(text);
        let mut values = documents.map(|document| {
            <serde_json::Value as serde::Deserialize>::deserialize(document).expect("YAML")
        });
        let found = values.find(|value| value["kind"] == kind).expect("it is there");
        serde_json::from_value(found).expect("an object")
    }

    #[test]
    fn the_shipped_workloads_name_their_configuration() {
        let extender = shipped(include_str!("../../../deploy/extender.yaml"), "Deployment");
        let extender = WorkloadSummary::of_deployment(extender);
        let map = |map: &str, file: &str| Some((map.to_owned(), file.to_owned()));
        assert_eq!(extender.config_map(), map("gpupack", "gpupack.yaml"));
        assert_eq!((extender.wanted, extender.ready, &*extender.component), (2, 0, "extender"));
        assert_eq!(extender.secret_of("/etc/gpupack/tls/tls.crt"), None, "a ConfigMap is there");
        let scheduler = shipped(include_str!("../../../deploy/scheduler.yaml"), "Deployment");
        let scheduler = WorkloadSummary::of_deployment(scheduler);
        assert_eq!(scheduler.config_map(), map("gpupack-scheduler", "config.yaml"));
        let webhook = shipped(include_str!("../../../deploy/webhook.yaml"), "Deployment");
        let webhook = WorkloadSummary::of_deployment(webhook);
        let secret = webhook.secret_of("/etc/gpupack/tls/tls.crt");
        assert_eq!(secret.as_deref(), Some("gpupack-webhook-tls"));
        assert_eq!(WorkloadSummary::default().config_map(), None);
    }

    #[test]
    fn a_node_has_what_kubelet_gives_out() {
        let selector = BTreeMap::from([("nvidia.com/gpu.present".to_owned(), "true".to_owned())]);
        let node = |labels: serde_json::Value, allocatable: serde_json::Value| {
            let node = json!({"metadata": {"name": "a", "labels": labels},
                "status": {"allocatable": allocatable}});
            let pool = PoolRule { mig: MigUse::OnDemand, ..PoolRule::default() };
            let lends = PoolRule { borrow: Borrow::Compute, ..PoolRule::default() };
            let pools = [("p", pool), ("lends", lends)];
            let pools = PoolRules::new(pools.map(|(name, rule)| (PoolName::new(name), rule)));
            let config = Config { pools, ..Config::default() };
            NodeSummary::of(serde_json::from_value(node).unwrap(), &selector, Some(&config))
        };
        let labels = json!({"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "L4",
            "nvidia.com/mig.config.state": "pending"});
        let seen = node(labels, json!({"nvidia.com/gpu": "2", "nvidia.com/mig-1g.5gb": "0"}));
        assert!(seen.has_gpus && seen.is_selected);
        assert_eq!(seen.of_kubelet, [("nvidia.com/gpu".to_owned(), 2)]);
        assert_eq!(seen.mig_profiles, ["1g.5gb"]);
        assert_eq!((&*seen.product, &*seen.mig_state), ("L4", "pending"));
        for (labels, expected) in [
            (json!({"nvidia.com/mig.config": "all-disabled"}), true),
            (json!({"nvidia.com/gpu.deploy.mig-manager": "true"}), true),
            (
                json!({"nvidia.com/gpu.deploy.mig-manager": "false", "nvidia.com/mig.config": "a"}),
                false,
            ),
        ] {
            assert_eq!(node(labels.clone(), json!({})).has_mig_manager, expected, "{labels}");
        }
        assert!(node(json!({"nvidia.com/gpu.deploy.client": "paused"}), json!({})).stops_clients);
        let of_pool = |pool: &str| node(json!({"gpupack.dev/pool": pool}), json!({}));
        assert!(of_pool("p").is_divided);
        let moves_pods = ["p", "lends", ""].map(|pool| of_pool(pool).moves_pods);
        assert_eq!(moves_pods, [false, true, false]);
        let info = json!({"metadata": {}, "status": {"nodeInfo": {"architecture": "", "bootID": "",
            "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "",
            "kubeletVersion": "v1.32.4", "machineID": "", "operatingSystem": "", "osImage": "",
            "systemUUID": ""}}});
        let seen = NodeSummary::of(serde_json::from_value(info).unwrap(), &selector, None);
        assert_eq!(seen.kubelet, "v1.32.4");
        let other = node(json!({}), json!({"nvidia.com/gpu": "many", "cpu": "3"}));
        assert_eq!(other, NodeSummary { name: "a".to_owned(), ..NodeSummary::default() });
    }
}
