//! `gpupack doctor` at the real API server: an installation of the shipped manifests has nothing to fix, and
//! what breaks is named.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};
use wire::api::commands::{Check, CheckState, Diagnosis};

use crate::authority::Authority;
use crate::clock;
use crate::control_plane::Identity;
use crate::extender::queried;
use crate::fleet::{A100, Fleet};
use crate::kubelet::Kubelet;
use crate::manifests::{self, Mode, objects};
use crate::replicas::Replicas;
use crate::testbed::{Testbed, figure, scenario};
use crate::webhook::{Webhook, policies};

/// How long until an agent that was killed counts as not reporting, and the API server follows a change.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_sound_installation_has_nothing_to_fix_and_what_breaks_is_named() {
    scenario("doctor", |bed| async move {
        let fleet = Fleet::new().with("doctor", 2, (2, A100));
        bed.cluster.add_nodes(&fleet).await;
        let webhook = Webhook::start(bed.plane, &bed.cluster, json!({})).await;
        policies(&bed.cluster).await;
        installed(&bed, &fleet).await;
        let replicas = Replicas::start(&bed, &fleet).await;
        let mut doctor = Doctor { bed, fleet, replicas, webhook };
        doctor.finds_nothing_to_fix().await;
        doctor.names_a_deleted_policy().await;
        doctor.names_a_missing_policy_of_certificates().await;
        doctor.names_a_wrong_bundle().await;
        doctor.names_a_wrong_timeout().await;
        doctor.names_a_second_owner().await;
        doctor.sees_what_a_user_may_not().await;
        doctor.sees_in_a_handshake_what_it_may_not_read().await;
        doctor.prints_values().await;
        doctor.names_agents_that_ended().await;
        removed(&doctor.bed).await;
    });
}

/// Everything of the shipped manifests that needs controllers to run, as if they had.
async fn installed(bed: &Testbed, fleet: &Fleet) {
    let admin = &bed.cluster.client;
    let parts = ["extender.yaml", "scheduler.yaml", "agent.yaml"];
    for file in ["rbac.yaml", "evict.yaml", "doctor.yaml"].into_iter().chain(parts) {
        manifests::apply(admin, file, Mode::Keep).await;
    }
    for object in objects("webhook.yaml") {
        let types = object.types.as_ref().expect("every object names its kind");
        if !types.api_version.starts_with("admissionregistration.k8s.io/") {
            manifests::keep(admin, "webhook.yaml", &object).await;
        }
    }
    in_plain_text(bed).await;
    let namespaces: Api<Namespace> = Api::all(admin.clone());
    if namespaces.get_opt("gpu-operator").await.expect("it can be read").is_none() {
        keep(
            bed,
            json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": "gpu-operator"}}),
        )
        .await;
    }
    let certificate = |name: &str| {
        let text = std::fs::read(bed.plane.work().join(name)).expect("the webhook's file");
        json!(ByteString(text))
    };
    keep(
        bed,
        json!({"apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "gpupack-webhook-tls", "namespace": "gpu-system"},
        "data": {"tls.crt": certificate("webhook.crt"), "tls.key": certificate("webhook.key")}}),
    )
    .await;
    let deployments: Api<Deployment> = Api::namespaced(admin.clone(), "gpu-system");
    for (name, replicas) in [("gpupack", 2), ("gpupack-webhook", 2), ("gpupack-scheduler", 2)] {
        let status = json!({"status": {"replicas": replicas, "readyReplicas": replicas,
            "availableReplicas": replicas}});
        let merge = Patch::Merge(&status);
        let patched = deployments.patch_status(name, &PatchParams::default(), &merge).await;
        patched.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let many = fleet.nodes.len();
    let status = json!({"status": {"currentNumberScheduled": many, "desiredNumberScheduled": many,
        "numberReady": many, "numberMisscheduled": 0}});
    let sets: Api<DaemonSet> = Api::namespaced(admin.clone(), "gpupack-agents");
    let merge = Patch::Merge(&status);
    let patched = sets.patch_status("gpupack-agent", &PatchParams::default(), &merge).await;
    patched.expect("the DaemonSet is there");
    for node in &fleet.nodes {
        agent_pod(bed, &node.name).await;
    }
}

/// The extenders of this scenario have no certificates: the whole walk of an installation has.
async fn in_plain_text(bed: &Testbed) {
    let maps: Api<ConfigMap> = Api::namespaced(bed.cluster.client.clone(), "gpu-system");
    let map = maps.get("gpupack").await.expect("it was applied");
    let text = &map.data.expect("the file")["gpupack.yaml"];
    let mut config: Value = serde_yaml_ng::from_str(text).expect("YAML");
    let keys = config.as_object_mut().expect("a mapping");
    let removed = ["tls", "certificates"].map(|key| keys.remove(key).is_some());
    assert_eq!(removed, [true, true], "what is shipped proves who it is");
    keys.insert("plain_text".to_owned(), true.into());
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/scheduler-config/second-scheduler.yaml");
    let scheduler = std::fs::read_to_string(file).expect("it is shipped");
    for (name, file, text) in [
        ("gpupack", "gpupack.yaml", config.to_string()),
        ("gpupack-scheduler", "config.yaml", scheduler),
    ] {
        keep(
            bed,
            json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": "gpu-system"}, "data": {file: text}}),
        )
        .await;
    }
}

/// The pod of a node's agent, and the label of GPU feature discovery.
async fn agent_pod(bed: &Testbed, node: &str) {
    let admin = &bed.cluster.client;
    let labels = json!({"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}});
    let nodes: Api<Node> = Api::all(admin.clone());
    let patched = nodes.patch(node, &PatchParams::default(), &Patch::Merge(&labels)).await;
    patched.expect("the node is there");
    let name = format!("gpupack-agent-{node}");
    keep(
        bed,
        json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "gpupack-agents", "labels": {
            "app.kubernetes.io/name": "gpupack", "app.kubernetes.io/component": "agent"}},
        "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "agent", "image": "ghcr.io/gpupack/gpupack:0.1.0"}]}}),
    )
    .await;
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    let pods: Api<Pod> = Api::namespaced(admin.clone(), "gpupack-agents");
    let patched = pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(&ready)).await;
    patched.expect("the pod is there");
}

/// A pod of the webhook, as far as the API server knows.
async fn webhook_pod(bed: &Testbed, node: &str) {
    let name = "gpupack-webhook-0";
    keep(
        bed,
        json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "gpu-system", "labels": {
            "app.kubernetes.io/name": "gpupack", "app.kubernetes.io/component": "webhook"}},
        "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "webhook", "image": "ghcr.io/gpupack/gpupack:0.1.0",
                "securityContext": {"allowPrivilegeEscalation": false,
                    "capabilities": {"drop": ["ALL"]}}}]}}),
    )
    .await;
    let ready = json!({"status": {"phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}]}});
    let pods: Api<Pod> = Api::namespaced(bed.cluster.client.clone(), "gpu-system");
    let patched = pods.patch_status(name, &PatchParams::default(), &Patch::Merge(&ready)).await;
    patched.expect("the pod is there");
}

/// `forwarder` may what the shipped role may, and forward ports of gpupack's pods.
pub(crate) fn rights_to_forward() -> [Value; 3] {
    let group = "rbac.authorization.k8s.io";
    let version = format!("{group}/v1");
    let role = |kind: &str, name: &str| json!({"kind": kind, "name": name, "apiGroup": group});
    let forwarder = json!([{"kind": "User", "name": "forwarder", "apiGroup": group}]);
    let meta = json!({"name": "forwarder", "namespace": "gpu-system"});
    [
        json!({"apiVersion": version, "kind": "ClusterRoleBinding",
            "metadata": {"name": "forwarder"}, "subjects": forwarder,
            "roleRef": role("ClusterRole", "gpupack-doctor")}),
        json!({"apiVersion": version, "kind": "Role", "metadata": meta,
            "rules": [{"apiGroups": [""], "resources": ["pods/portforward"],
                "verbs": ["create", "get"]}]}),
        json!({"apiVersion": version, "kind": "RoleBinding", "metadata": meta,
            "subjects": forwarder, "roleRef": role("Role", "forwarder")}),
    ]
}

/// Takes away what other scenarios would meet.
async fn removed(bed: &Testbed) {
    let admin = &bed.cluster.client;
    for (file, kinds) in [
        ("extender.yaml", &["Deployment", "ConfigMap"][..]),
        ("scheduler.yaml", &["Deployment", "ConfigMap"]),
        ("webhook.yaml", &["Deployment"]),
        ("agent.yaml", &["DaemonSet"]),
        ("certificates.yaml", &["Secret"]),
    ] {
        manifests::delete(admin, file, kinds).await;
    }
}

async fn keep(bed: &Testbed, object: Value) {
    let object: DynamicObject = serde_json::from_value(object).expect("an object");
    manifests::keep(&bed.cluster.client, "installed", &object).await;
}

struct Doctor {
    bed: Testbed,
    fleet: Fleet,
    replicas: Replicas,
    webhook: Webhook,
}

impl Doctor {
    /// Exit code and findings.
    async fn says(&self, flags: &[&str]) -> (Option<i32>, Vec<Check>) {
        let leader = self.replicas.leader(None).await;
        let page = format!("http://{}", self.replicas.extenders[leader].page_address());
        let kubeconfig = self.bed.plane.kubeconfig(Identity::Admin);
        let kubeconfig = kubeconfig.to_str().expect("the target folder is UTF-8");
        let namespace = &self.bed.cluster.namespace;
        let arguments = [
            "doctor",
            "--kubeconfig",
            kubeconfig,
            "--server",
            &page,
            "--namespace",
            namespace,
            "-o",
            "json",
        ];
        let (code, text) = queried(&[&arguments, flags].concat()).await;
        let found: Diagnosis =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        (code, found.items)
    }

    /// Waits until a check names a problem with this fix, and says how long that took.
    async fn until_named(&self, check: &str, found: &str, fix: &str) {
        let started = clock::now();
        loop {
            let (code, checks) = self.says(&[]).await;
            let is_it = |it: &&Check| it.check == check && it.found.contains(found);
            if let Some(named) = checks.iter().find(is_it) {
                assert_eq!((code, named.state), (Some(1), CheckState::Problem), "{named:?}");
                assert!(named.fix.as_ref().is_some_and(|it| it.contains(fix)), "{named:?}");
                figure("doctor", &format!("{check}: {}", named.found));
                return;
            }
            assert!(started.elapsed() < LIMIT, "{check} does not name `{found}`: {checks:#?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn finds_nothing_to_fix(&self) {
        let started = clock::now();
        loop {
            let (code, checks) = self.says(&[]).await;
            let odd: Vec<&Check> =
                checks.iter().filter(|check| check.state != CheckState::Ok).collect();
            // That clients prove nothing is real: the shipped manifests say `plain_text`.
            let is_expected =
                |it: &&Check| it.state == CheckState::Warning && it.found.contains("plain text");
            if code == Some(0) && odd.iter().all(is_expected) {
                let total = checks.len();
                figure("doctor", &format!("{total} findings, of them {} warning", odd.len()));
                return;
            }
            assert!(started.elapsed() < LIMIT, "not sound: {odd:#?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn names_a_deleted_policy(&self) {
        let admin = self.bed.cluster.client.clone();
        let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(admin);
        let deleted = bindings.delete("gpupack-placement", &DeleteParams::default()).await;
        deleted.expect("it is there");
        let (found, fix) = ("binding of policy gpupack-placement does not exist", "policies.yaml");
        self.until_named("policies", found, fix).await;
        policies(&self.bed.cluster).await;
        self.finds_nothing_to_fix().await;
    }

    /// As if the extender made its certificates: other checks then miss what this scenario has not.
    async fn names_a_missing_policy_of_certificates(&self) {
        let admin = &self.bed.cluster.client;
        let mut shipped = objects("extender.yaml").into_iter();
        let is_own = |it: &DynamicObject| it.data["data"]["gpupack.yaml"].is_string();
        let configuration = shipped.find(is_own).expect("it is shipped");
        manifests::keep(admin, "extender.yaml", &configuration).await;
        let (found, fix) =
            ("binding of policy gpupack-certificates does not exist", "certificates.yaml");
        self.until_named("policies", found, fix).await;
        for object in objects("certificates.yaml") {
            let kind = object.types.as_ref().map(|types| types.kind.as_str());
            if kind.is_some_and(|kind| kind.starts_with("ValidatingAdmissionPolicy")) {
                manifests::keep(admin, "certificates.yaml", &object).await;
            }
        }
        let (_, checks) = self.says(&[]).await;
        let policies = checks.iter().find(|it| it.check == "policies").expect("it is checked");
        assert!(policies.found.starts_with("8 policies and bindings"), "{policies:?}");
        in_plain_text(&self.bed).await;
        self.finds_nothing_to_fix().await;
    }

    async fn names_a_wrong_bundle(&self) {
        let admin = self.bed.cluster.client.clone();
        let webhooks: Api<MutatingWebhookConfiguration> = Api::all(admin);
        let mut configured = webhooks.get("gpupack").await.expect("it is there");
        let bundle = |it: &mut MutatingWebhookConfiguration, ca: Option<ByteString>| {
            let webhook = it.webhooks.as_mut().and_then(|all| all.first_mut());
            let client = &mut webhook.expect("one webhook").client_config;
            std::mem::replace(&mut client.ca_bundle, ca)
        };
        let other = ByteString(Authority::new().certificate.into_bytes());
        let right = bundle(&mut configured, Some(other));
        let replaced = webhooks.replace("gpupack", &Default::default(), &configured).await;
        let mut configured = replaced.expect("it can be replaced");
        let (found, fix) = ("does not fit caBundle", "docs/admission.md");
        self.until_named("certificate of the webhook", found, fix).await;
        self.until_named("admission of a pod", "x509", "caBundle").await;
        bundle(&mut configured, right);
        let replaced = webhooks.replace("gpupack", &Default::default(), &configured).await;
        replaced.expect("it can be replaced");
        self.finds_nothing_to_fix().await;
    }

    async fn names_a_wrong_timeout(&self) {
        let maps: Api<ConfigMap> = Api::namespaced(self.bed.cluster.client.clone(), "gpu-system");
        let text = async || {
            let map = maps.get("gpupack-scheduler").await.expect("it is there");
            map.data.and_then(|mut data| data.remove("config.yaml")).expect("the file")
        };
        let set = async |text: String| {
            let merge = Patch::Merge(json!({"data": {"config.yaml": text}}));
            let patched = maps.patch("gpupack-scheduler", &PatchParams::default(), &merge).await;
            patched.expect("it can be changed");
        };
        let shipped = text().await;
        set(shipped.replace("httpTimeout: 10s", "httpTimeout: 3s")).await;
        let check = "kube-scheduler configuration";
        self.until_named(check, "httpTimeout is 3s", "httpTimeout: 10s").await;
        set(shipped).await;
        self.finds_nothing_to_fix().await;
    }

    async fn names_a_second_owner(&self) {
        let nodes: Api<Node> = Api::all(self.bed.cluster.client.clone());
        let name = &self.fleet.nodes[1].name;
        let set = async |amount: Value| {
            let status = json!({"status": {"capacity": {"nvidia.com/gpu": amount},
                "allocatable": {"nvidia.com/gpu": amount}}});
            let merge = Patch::Merge(&status);
            let patched = nodes.patch_status(name, &PatchParams::default(), &merge).await;
            patched.expect("the node is there");
        };
        set("2".into()).await;
        let fix = format!("kubectl label node {name} nvidia.com/gpu.deploy.device-plugin=false");
        self.until_named("owners of GPUs", "kubelet also gives out", &fix).await;
        set(Value::Null).await;
        self.finds_nothing_to_fix().await;
    }

    /// A user with the shipped role sees everything but Secrets, and cannot try a pod.
    async fn sees_what_a_user_may_not(&self) {
        let group = "rbac.authorization.k8s.io";
        keep(
            &self.bed,
            json!({"apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding",
            "metadata": {"name": "gpupack-doctor"},
            "roleRef": {"kind": "ClusterRole", "name": "gpupack-doctor", "apiGroup": group},
            "subjects": [{"kind": "User", "name": "looker", "apiGroup": group}]}),
        )
        .await;
        let started = clock::now();
        loop {
            let (code, checks) = self.says(&["--as", "looker"]).await;
            let of = |state| checks.iter().filter(move |check| check.state == state);
            let left: Vec<&str> =
                of(CheckState::NotChecked).map(|check| check.check.as_str()).collect();
            let expected =
                ["rights of this user", "admission of a pod", "certificate of the webhook"];
            if code == Some(3) && left == expected {
                break;
            }
            assert!(started.elapsed() < LIMIT, "{left:?}: {checks:#?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let (code, checks) = self.says(&["--as", "nobody"]).await;
        assert_eq!(code, Some(3), "{checks:#?}");
        let good = checks.iter().filter(|check| check.state == CheckState::Ok);
        assert_eq!(good.count(), 1, "but its version: {checks:#?}");
        figure("doctor", "the role gpupack-doctor is enough for all but Secrets and dry runs");
    }

    /// A user who may forward ports, and read no Secret, learns of the certificate by a handshake.
    async fn sees_in_a_handshake_what_it_may_not_read(&self) {
        let kubelet = Kubelet::forwarding_to(self.webhook.address()).await;
        let node = &self.fleet.nodes[0].name;
        let admin = &self.bed.cluster.client;
        let status = json!({"status": {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.port}}}});
        let nodes: Api<Node> = Api::all(admin.clone());
        let merge = Patch::Merge(&status);
        let patched = nodes.patch_status(node, &PatchParams::default(), &merge).await;
        patched.expect("the node is there");
        webhook_pod(&self.bed, node).await;
        for object in rights_to_forward() {
            keep(&self.bed, object).await;
        }
        let started = clock::now();
        let seen = loop {
            let (_, checks) = self.says(&["--as", "forwarder"]).await;
            let seen = checks.iter().find(|it| it.check == "certificate of the webhook");
            match seen.filter(|it| it.state == CheckState::Ok) {
                Some(seen) => break seen.found.clone(),
                None => assert!(started.elapsed() < LIMIT, "no handshake: {seen:?}"),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        assert!(seen.starts_with("pod gpupack-webhook-0: ends in "), "{seen}");
        assert!(seen.ends_with("fits caBundle of the MutatingWebhookConfiguration"), "{seen}");
        figure("doctor", &format!("without the right to the Secret: {seen}"));
        drop(kubelet);
        let (_, checks) = self.says(&["--as", "forwarder"]).await;
        let seen = checks.iter().find(|it| it.check == "certificate of the webhook");
        let seen = seen.expect("it is checked");
        assert_eq!(seen.state, CheckState::NotChecked, "{seen:?}");
        assert!(seen.found.contains("or a handshake with pod gpupack-webhook-0: "), "{seen:?}");
    }

    async fn prints_values(&self) {
        let kubeconfig = self.bed.plane.kubeconfig(Identity::Admin);
        let kubeconfig = kubeconfig.to_str().expect("the target folder is UTF-8");
        // Another scenario may have brought the kinds of cert-manager.
        let groups = self.bed.cluster.client.list_api_groups().await.expect("there are some");
        let has_manager = groups.groups.iter().any(|group| group.name == "cert-manager.io");
        let source = if has_manager { "cert-manager" } else { "gpupack" };
        let (code, text) = queried(&["init", "--kubeconfig", kubeconfig]).await;
        let value: Value =
            serde_yaml_ng::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert_eq!((code, &value["certificates"]["source"]), (Some(0), &json!(source)), "{text}");
        assert_eq!(value["agents"]["runtimeClassName"], "nvidia", "{text}");
    }

    async fn names_agents_that_ended(&mut self) {
        self.replicas.agents.kill();
        self.until_named("agents", "2 nodes not reporting", "GpupackNodesNotReporting").await;
    }
}
