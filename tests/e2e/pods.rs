//! Pods as the scenarios write them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::checker::{DEVICES, PLACEMENT};

/// The profile of `scheduler-config/second-scheduler.yaml`.
pub(crate) const GPUPACK: &str = "gpupack";

/// Label of pods that gpupack did not place: the checker does not compare their placement with
/// their request, and does not miss a placement they do not have.
pub(crate) const UNTRACKED: &str = "e2e/foreign";

/// A pod to create.
#[derive(Debug, Clone)]
pub(crate) struct PodPlan {
    /// Name in the scenario's namespace.
    pub(crate) name: String,
    scheduler: String,
    node: Option<String>,
    selected: Option<String>,
    untracked: bool,
    class: Option<String>,
    annotations: BTreeMap<String, String>,
    labels: BTreeMap<String, String>,
    limits: BTreeMap<String, String>,
    cpu: &'static str,
    ends_within: u64,
    claim: Option<String>,
    replica_set: Option<String>,
}

impl PodPlan {
    /// A pod without any request, for the scheduler `gpupack`.
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            scheduler: GPUPACK.to_owned(),
            node: None,
            selected: None,
            untracked: false,
            class: None,
            annotations: BTreeMap::new(),
            labels: BTreeMap::new(),
            limits: BTreeMap::new(),
            cpu: "10m",
            ends_within: 0,
            claim: None,
            replica_set: None,
        }
    }

    /// A pod with that share of one GPU.
    pub(crate) fn fraction(name: impl Into<String>, fraction: &str) -> Self {
        Self::new(name).annotated("gpu-fraction", fraction)
    }

    /// A pod with that much memory of one GPU.
    pub(crate) fn memory(name: impl Into<String>, mib: u64) -> Self {
        Self::new(name).annotated("gpu-memory", &mib.to_string())
    }

    /// Adds an annotation.
    pub(crate) fn annotated(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Adds a label.
    pub(crate) fn labelled(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Takes an annotation away.
    pub(crate) fn without(mut self, key: &str) -> Self {
        self.annotations.remove(key);
        self
    }

    /// Adds a resource to the limits of the container.
    pub(crate) fn limited(mut self, resource: &str, quantity: &str) -> Self {
        self.limits.insert(resource.to_owned(), quantity.to_owned());
        self
    }

    /// Requests this much CPU.
    pub(crate) fn with_cpu(mut self, cpu: &'static str) -> Self {
        self.cpu = cpu;
        self
    }

    /// Lets it take so many seconds to end. Somebody has to play its kubelet then.
    pub(crate) fn ending_within(mut self, seconds: u64) -> Self {
        self.ends_within = seconds;
        self
    }

    /// Mounts the claim of this name.
    pub(crate) fn claiming(mut self, claim: &str) -> Self {
        self.claim = Some(claim.to_owned());
        self
    }

    /// Makes it a replica of the Deployment in this revision, as the controllers do.
    pub(crate) fn replica_of(mut self, deployment: &str, revision: &str) -> Self {
        self.replica_set = Some(format!("{deployment}-{revision}"));
        self.labelled("app", deployment).labelled("pod-template-hash", revision)
    }

    /// Names another scheduler.
    pub(crate) fn for_scheduler(mut self, name: &str) -> Self {
        name.clone_into(&mut self.scheduler);
        self
    }

    /// Writes a placement on one device, as gpupack would: both annotations.
    pub(crate) fn placed_on(self, uuid: &str, mib: u64, share: u64) -> Self {
        let text = json!({
            "v": 1, "devices": [{"id": uuid, "mib": mib, "share": share}], "isolation":"none",
        });
        self.annotated(PLACEMENT, &text.to_string())
            .annotated(DEVICES, &format!("runtime.nvidia.com/gpu={uuid}"))
    }

    /// Binds the pod at creation, past every scheduler.
    pub(crate) fn bound_by_others(mut self, node: &str) -> Self {
        self.node = Some(node.to_owned());
        self.untracked = true;
        self
    }

    /// Lets kube-scheduler leave all other nodes out.
    pub(crate) fn only_on(mut self, node: &str) -> Self {
        self.selected = Some(node.to_owned());
        self
    }

    /// Leaves it without a placement: a scheduler without gpupack binds it.
    pub(crate) fn without_gpupack(mut self) -> Self {
        self.untracked = true;
        self
    }

    /// Gives it a priority class.
    pub(crate) fn important(mut self, class: &str) -> Self {
        self.class = Some(class.to_owned());
        self
    }

    /// The object. Its container requests 10m CPU if not told otherwise, so that CPU never decides.
    pub(crate) fn to_pod(&self) -> Pod {
        let mut labels = BTreeMap::from([("e2e/pod", self.name.as_str())]);
        labels.extend(self.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())));
        if self.untracked {
            labels.insert(UNTRACKED, "true");
        }
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "annotations": self.annotations, "labels": labels},
            "spec": {
                "schedulerName": self.scheduler,
                "terminationGracePeriodSeconds": self.ends_within,
                "automountServiceAccountToken": false,
                "containers": [{
                    "name": "main", "image": "local/none",
                    "resources": {"requests": {"cpu": self.cpu}, "limits": self.limits},
                }],
            },
        });
        if let Some(node) = &self.node {
            pod["spec"]["nodeName"] = node.as_str().into();
        }
        if let Some(node) = &self.selected {
            pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
        }
        if let Some(class) = &self.class {
            pod["spec"]["priorityClassName"] = class.as_str().into();
        }
        if let Some(claim) = &self.claim {
            let volume = json!({"name": "data", "persistentVolumeClaim": {"claimName": claim}});
            pod["spec"]["volumes"] = json!([volume]);
        }
        if let Some(name) = &self.replica_set {
            pod["metadata"]["ownerReferences"] = json!([{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name,
                "uid": format!("uid-of-{name}"), "controller": true, "blockOwnerDeletion": true,
            }]);
        }
        serde_json::from_value(pod).expect("the object has the shape of a pod")
    }
}
