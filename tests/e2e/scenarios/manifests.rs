//! The files of `deploy/` are what an API server takes.

use crate::manifests::{Mode, apply};
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
        ];
        for file in files {
            let count = apply(&bed.cluster.client, file, Mode::DryRun).await;
            figure(bed.name, &format!("{file}: {count} objects accepted in a dry run"));
        }
    });
}
