//! The files of `deploy/` are what an API server takes.

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::manifests::{Mode, apply, objects};
use crate::testbed::{Testbed, figure, scenario};
use crate::webhook::{dry_run, runtime_classes};

#[test]
fn the_api_server_accepts_every_manifest_and_only_agents_exceed_the_restricted_profile() {
    scenario("manifests", |bed| async move {
        let files = [
            "rbac.yaml",
            "certificates.yaml",
            "api-service.yaml",
            "agent-privileged.yaml",
            "agent-mig.yaml",
            "extender.yaml",
            "agent.yaml",
            "scheduler.yaml",
            "network-policy.yaml",
            "webhook.yaml",
            "policies.yaml",
            "evict.yaml",
            "moves.yaml",
            "namespaces.yaml",
            "doctor.yaml",
        ];
        for file in files {
            let count = apply(&bed.cluster.client, file, Mode::DryRun).await;
            figure(bed.name, &format!("{file}: {count} objects accepted in a dry run"));
        }
        let pod = &template_of("agent-privileged.yaml")["spec"];
        assert_eq!(pod["initContainers"][0]["name"], "mps-shm");
        let container = &pod["containers"][1];
        assert_eq!(container["name"], "driver");
        assert_eq!(container["securityContext"]["privileged"], true);
        assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true, "as agent.yaml");
        assert_eq!(container["resources"]["limits"]["memory"], Value::Null);
        assert_eq!(
            (&pod["hostPID"], &pod["securityContext"]["runAsUser"]),
            (&json!(true), &json!(0))
        );
        only_the_agents_exceed_the_restricted_profile(&bed).await;
    });
}

async fn only_the_agents_exceed_the_restricted_profile(bed: &Testbed) {
    let client = &bed.cluster.client;
    runtime_classes(client).await;
    for file in ["extender.yaml", "webhook.yaml", "scheduler.yaml"] {
        let template = template_of(file);
        let made = made(client, "gpu-system", &template).await;
        made.unwrap_or_else(|message| panic!("{file}: {message}"));
        figure(bed.name, &format!("{file}: its pod may be created under `restricted`"));
    }
    for agent in ["agent.yaml", "agent-privileged.yaml", "agent-mig.yaml"].map(template_of) {
        made(client, "gpupack-agents", &agent).await.expect("the agents' own namespace");
        let message = made(client, "gpu-system", &agent).await.expect_err("hostPID");
        assert!(message.contains("violates PodSecurity \"restricted"), "{message}");
    }
    figure(bed.name, "the agents' pods are refused there, and created in their own namespace");
}

/// The pod template of the one Deployment or DaemonSet in a file.
fn template_of(file: &str) -> Value {
    let all = objects(file).into_iter().map(|object| object.data["spec"]["template"].clone());
    let templates: Vec<Value> = all.filter(Value::is_object).collect();
    assert_eq!(templates.len(), 1, "{file}");
    templates[0].clone()
}

/// Creates a pod of this template in a dry run.
async fn made(client: &Client, namespace: &str, template: &Value) -> Result<(), String> {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"],
        "spec": template["spec"]});
    pod["metadata"]["name"] = "made".into();
    let pod: Pod = serde_json::from_value(pod).expect("a template makes a pod");
    dry_run(&Api::namespaced(client.clone(), namespace), &pod).await.map(drop)
}
