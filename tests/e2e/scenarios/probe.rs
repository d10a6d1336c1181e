//! `gpupack doctor --probe` on a node with NVIDIA's runtime: it sees what containers really get, by the right of a
//! user who may do nothing else there, and leaves nothing behind.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};
use wire::api::commands::{Check, CheckState, Diagnosis};

use super::containers::pod;
use crate::clock;
use crate::control_plane::Identity;
use crate::extender::{gpupack, gpupack_agent, queried};
use crate::manifests::{self, Mode, objects};
use crate::node::image::{BOX, write_program};
use crate::node::machine::{GpuRuntime, LIMIT, Machine, node_scenario};
use crate::node::toolkit::{Setting, Toolkit};
use crate::webhook::{dry_run, reported};

/// The namespace of agents and probes.
const AGENTS: &str = "gpupack-agents";

#[test]
fn what_containers_get_is_probed_and_nothing_is_left() {
    node_scenario("probe", GpuRuntime::Nvidia, json!({}), |node| async move {
        installed(&node).await;
        admits_no_other(&node).await;
        killed(&node).await;
        let found = probed(&node).await;
        assert_eq!(found.state, CheckState::Ok, "{found:?}");
        node.figure(&format!("ok: {}", found.found));
        ignored(&node).await;
        full(&node).await;
        for object in
            [("agent.yaml", "DaemonSet"), ("probe.yaml", "ValidatingAdmissionPolicyBinding")]
        {
            manifests::delete(&node.cluster.client, object.0, &[object.1]).await;
        }
    });
}

fn toolkit(node: &Machine) -> &Toolkit {
    node.toolkit.as_ref().expect("NVIDIA's runtime")
}

/// The manifests, the rights of the user, and the image of the agents.
async fn installed(node: &Machine) {
    let admin = &node.cluster.client;
    for file in ["rbac.yaml", "doctor.yaml", "agent.yaml", "probe.yaml"] {
        manifests::apply(admin, file, Mode::Keep).await;
    }
    let group = "rbac.authorization.k8s.io";
    let version = format!("{group}/v1");
    let jane = json!([{"kind": "User", "name": "jane", "apiGroup": group}]);
    let role = |kind: &str, name: &str| json!({"kind": kind, "name": name, "apiGroup": group});
    for binding in [
        json!({"apiVersion": version, "kind": "ClusterRoleBinding", "metadata": {"name": "jane"},
            "subjects": jane, "roleRef": role("ClusterRole", "gpupack-doctor")}),
        json!({"apiVersion": version, "kind": "RoleBinding",
            "metadata": {"name": "jane", "namespace": AGENTS},
            "subjects": jane, "roleRef": role("Role", "gpupack-probe")}),
    ] {
        let object = serde_json::from_value(binding).expect("an object");
        manifests::keep(admin, "the rights of jane", &object).await;
    }
    let agents =
        objects("agent.yaml").into_iter().find(|it| it.data["spec"]["template"].is_object());
    let agents = agents.expect("a DaemonSet");
    let image = agents.data["spec"]["template"]["spec"]["containers"][0]["image"].clone();
    let image = image.as_str().expect("an image");
    let archive = write_program(&node.work, &gpupack_agent(), image).expect("an image");
    node.runtime.import(&archive).expect("an image is imported");
}

/// Neither another pod of that user there, nor a pod with the label elsewhere.
async fn admits_no_other(node: &Machine) {
    let jane: Api<Pod> = Api::namespaced(node.plane.client(Identity::Jane).await, AGENTS);
    let container = json!({"name": "main", "image": BOX, "command": ["/bin/sh"]});
    let labels = json!({"gpupack.dev/probe": "true"});
    let other = json!({"metadata": {"name": "other"}, "spec": {"containers": [container]}});
    let mut labeled = other.clone();
    labeled["metadata"]["labels"] = labels;
    let started = clock::now();
    let said = loop {
        let other: Pod = serde_json::from_value(other.clone()).expect("a pod");
        match jane.create(&PostParams { dry_run: true, ..PostParams::default() }, &other).await {
            Err(error) => break reported(&error),
            Ok(_) => assert!(started.elapsed() < LIMIT, "the policy is not in force"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    };
    assert!(said.contains("agents and probes alone"), "{said}");
    let labeled: Pod = serde_json::from_value(labeled).expect("a pod");
    let said = dry_run(&jane, &labeled).await.expect_err("it is no probe");
    assert!(said.contains("as gpupack doctor --probe makes it"), "{said}");
    let said = dry_run(&node.cluster.pods(), &labeled).await.expect_err("it is elsewhere");
    assert!(said.contains("only probes of gpupack doctor"), "{said}");
}

fn arguments(node: &Machine) -> Vec<String> {
    let kubeconfig = node.plane.kubeconfig(Identity::Jane);
    let page = format!("http://{}", node.extender.page_address());
    let namespace = &node.cluster.namespace;
    let kubeconfig = kubeconfig.to_str().expect("the target folder is UTF-8");
    let words = [
        "doctor",
        "--kubeconfig",
        kubeconfig,
        "--server",
        &page,
        "--namespace",
        namespace,
        "--probe",
    ];
    words.iter().chain(&["-o", "json"]).map(|word| (*word).to_owned()).collect()
}

/// The line of the probe, and that no pod of it is left.
async fn probed(node: &Machine) -> Check {
    let found = checked(node).await;
    assert_eq!(probes(node).await, 0, "a probe is left");
    found
}

/// The line of the probe.
async fn checked(node: &Machine) -> Check {
    let arguments = arguments(node);
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let started = clock::now();
    let (_, text) = queried(&words).await;
    let found: Diagnosis =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    node.figure(&format!("probed in {} ms", clock::ms(started.elapsed())));
    let mut of_probe = found.items.into_iter().filter(|check| check.check == "probe");
    of_probe.next().expect("a line of the probe")
}

async fn probes(node: &Machine) -> usize {
    let api: Api<Pod> = Api::namespaced(node.cluster.client.clone(), AGENTS);
    let labeled = ListParams::default().labels("gpupack.dev/probe=true");
    api.list(&labeled).await.expect("pods can be listed").items.len()
}

/// A command that is killed leaves its pod, which ends without it.
async fn killed(node: &Machine) {
    let mut command = std::process::Command::new(gpupack());
    let mut running = command.args(arguments(node)).spawn().expect("it starts");
    let started = clock::now();
    while probes(node).await == 0 {
        assert!(started.elapsed() < LIMIT, "no probe is started");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    running.kill().expect("it runs");
    running.wait().expect("it ran");
    assert_eq!(probes(node).await, 1, "it was killed before it could remove its pod");
    // It may be that of a command of somebody else: the next one leaves it alone while it is young.
    let found = checked(node).await;
    assert_eq!((found.state, probes(node).await), (CheckState::Ok, 1), "{found:?}");
    let api: Api<Pod> = Api::namespaced(node.cluster.client.clone(), AGENTS);
    let labeled = ListParams::default().labels("gpupack.dev/probe=true");
    let started = clock::now();
    let name = loop {
        let pod = api.list(&labeled).await.expect("pods can be listed").items.remove(0);
        if matches!(pod.status.and_then(|it| it.phase).as_deref(), Some("Succeeded" | "Failed")) {
            break pod.metadata.name.expect("it has one");
        }
        assert!(started.elapsed() < LIMIT, "it does not end");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    };
    api.delete(&name, &DeleteParams::default()).await.expect("it is there");
}

/// A toolkit that does not accept the variable.
async fn ignored(node: &Machine) {
    toolkit(node).set(&Setting { accepts_variable: false, ..Setting::default() });
    let Check { state, found, fix, .. } = probed(node).await;
    let fix = fix.expect("there is something to do");
    assert_eq!(state, CheckState::Problem, "{found}");
    assert!(fix.contains("accept-nvidia-visible-devices-envvar-when-unprivileged"), "{fix}");
    node.figure(&format!("the variable is not accepted: {found}: {fix}"));
    toolkit(node).set(&Setting::default());
}

/// A full node is not checked, and loses no pod.
async fn full(node: &Machine) {
    let both = json!({"gpu-fraction": "1", "gpu-fraction-num-devices": "2"});
    node.create(&pod("full", &both)).await;
    node.reported("full", "main", 0).await;
    let found = probed(node).await;
    assert_eq!(found.state, CheckState::NotChecked, "{found:?}");
    assert!(found.found.contains("not placed"), "{found:?}");
    let pod: Value = serde_json::to_value(node.pod("full").await).expect("a pod");
    assert!(pod["metadata"]["deletionTimestamp"].is_null(), "it was evicted");
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    node.figure(&format!("a full node: {}", found.found));
}
