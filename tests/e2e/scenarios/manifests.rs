//! The files of `deploy/` are what an API server takes.

use serde_json::{Value, json};

use crate::manifests::{Mode, apply, patch_agent};
use crate::testbed::{figure, scenario};

#[test]
fn the_api_server_takes_every_manifest() {
    scenario("manifests", |bed| async move {
        // Without webhook-certificate.yaml: its kinds are cert-manager's.
        let files = [
            "rbac.yaml",
            "extender.yaml",
            "agent.yaml",
            "scheduler.yaml",
            "network-policy.yaml",
            "webhook.yaml",
            "policies.yaml",
            "evict.yaml",
        ];
        for file in files {
            let count = apply(&bed.cluster.client, file, Mode::DryRun).await;
            figure(bed.name, &format!("{file}: {count} objects accepted in a dry run"));
        }
        apply(&bed.cluster.client, "agent.yaml", Mode::Keep).await;
        let patched = patch_agent(&bed.cluster.client, "agent-privileged.yaml").await;
        let pod = &patched["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        assert_eq!(container["securityContext"]["privileged"], true);
        assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true, "it is kept");
        assert_eq!(container["env"].as_array().map(Vec::len), Some(3), "merged by name");
        assert_eq!(container["resources"]["limits"]["memory"], Value::Null);
        assert_eq!(
            (&pod["hostPID"], &pod["securityContext"]["runAsUser"]),
            (&json!(true), &json!(0))
        );
        figure(bed.name, "agent-privileged.yaml: accepted as a patch of agent.yaml");
    });
}
