//! The pod of a probe. The policy `gpupack-probe` admits this one and no other: change both.

use kube_api::config::file::Config;
use kube_api::config::webhook::MemoryLimit;
use kube_api::request::annotations::MEMORY;
use kube_api::request::placement::{DEVICES, DRIVER_MEMORY};
use serde_json::{Value, json};

use crate::doctor::objects::WorkloadSummary;

/// Label of probes: only gpupack's own have it.
pub(crate) const LABEL: &str = "gpupack.dev/probe";

/// The PriorityClass of probes, below all others, which evicts no pod.
const CLASS: &str = "gpupack-probe";

/// Where its container leaves what it saw, from which kubelet takes it into the status of the pod.
const SAID_IN: &str = "/dev/termination-log";

/// Seconds for which the container goes on: the node's agent learns of the pod with its next reply, after 5 s at most, and
/// then sees that the container has its GPU.
const STAY: &str = "8";

/// How long its container may run, in seconds: also if no one deletes it.
const DEADLINE_SECONDS: u32 = 60;

/// The pod for a node. It is like a pod of a user, with the image of the agents, which holds a device by a
/// placement of its own, and writes itself what the webhook would.
pub(crate) fn probe_pod(node: &str, agents: &WorkloadSummary, config: &Config) -> Value {
    let of_placement =
        |key: &str| json!({"fieldRef": {"fieldPath": format!("metadata.annotations['{key}']")}});
    let mut env = vec![
        json!({"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": of_placement(DEVICES)}),
        json!({"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"}),
    ];
    if config.webhook.memory_limit == MemoryLimit::Driver {
        env.push(json!({"name": "NVIDIA_GPU_MEMORY_REQUEST", "value": "0"}));
        env.push(
            json!({"name": "NVIDIA_GPU_MEMORY_LIMIT", "valueFrom": of_placement(DRIVER_MEMORY)}),
        );
    }
    let pull = agents.pods.containers.first().and_then(|it| it.image_pull_policy.clone());
    let labels = json!({"app.kubernetes.io/name": "gpupack", "app.kubernetes.io/component": "probe",
        LABEL: "true"});
    let field = json!({"key": "metadata.name", "operator": "In", "values": [node]});
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": "gpupack-probe-", "labels": labels,
            "annotations": {MEMORY: config.min_memory.mib().to_string()}},
        "spec": {
            "schedulerName": config.scheduler_names.first(),
            "runtimeClassName": config.webhook.runtime_class,
            "priorityClassName": CLASS, "restartPolicy": "Never",
            "activeDeadlineSeconds": DEADLINE_SECONDS, "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false, "enableServiceLinks": false,
            "tolerations": agents.pods.tolerations, "imagePullSecrets": agents.pods.image_pull_secrets,
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
                {"nodeSelectorTerms": [{"matchFields": [field]}]}}},
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "probe", "image": agents.image(), "imagePullPolicy": pull,
                "args": ["devices", "--to", SAID_IN, "--stay", STAY], "env": env,
                "resources": {"requests": {"cpu": "10m", "memory": "32Mi"},
                    "limits": {"memory": "128Mi"}},
                "securityContext": {"allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    });
    // A field without a value is left out: the API server takes `null` for what a user wrote.
    if let Some(spec) = pod["spec"].as_object_mut() {
        spec.retain(|_, value| !value.is_null());
    }
    if let Some(container) = pod["spec"]["containers"][0].as_object_mut() {
        container.retain(|_, value| !value.is_null());
    }
    pod
}
