//! `gpupack doctor` as its users run it, against an API server with the shipped manifests: whole, with
//! one thing broken at a time, closed, empty and hostile.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;
use wire::api::commands::{Check, CheckState, Diagnosis};

use crate::harness::extender::is_declared;
use crate::harness::fake_cluster::{ADMISSION, FakeCluster, STATE, refusal, shipped};

/// A kubeconfig for this API server.
pub(crate) fn kubeconfig(folder: &TempDir, server: &str) -> String {
    let path = folder.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    std::fs::write(&path, config.to_string()).expect("a file can be written");
    path.display().to_string()
}

/// The program with these arguments, which must meet no cluster but that of the test.
pub(crate) fn gpupack(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack"));
    for name in ["KUBERNETES_SERVICE_HOST", "KUBECONFIG", "HOME", "GPUPACK_SERVER", "NO_COLOR"] {
        command.env_remove(name);
    }
    command.args(arguments).output().expect("the program starts")
}

/// Exit code, and the text for people.
async fn told(fake: &FakeCluster, flags: &[&str]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let config = kubeconfig(&folder, &format!("http://{}", fake.serve().await));
    let arguments = [&["doctor", "--kubeconfig", &config], flags].concat();
    let output = gpupack(&arguments);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    (output.status.code(), String::from_utf8(output.stdout).expect("the program writes UTF-8"))
}

/// Exit code, and what programs read.
async fn diagnosed(fake: &FakeCluster, flags: &[&str]) -> (Option<i32>, Vec<Check>) {
    let (code, text) = told(fake, &[flags, &["-o", "json"]].concat()).await;
    let found: Diagnosis = is_declared(text.as_bytes());
    assert!(!text.contains("PRIVATE") && !text.contains("not-to-be-shown"), "{text}");
    (code, found.items)
}

fn of_state(checks: &[Check], state: CheckState) -> Vec<&Check> {
    checks.iter().filter(|check| check.state == state).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sound_installation_has_nothing_to_fix_and_is_only_read() {
    let fake = FakeCluster::sound();
    let (code, checks) = diagnosed(&fake, &[]).await;
    let warnings = of_state(&checks, CheckState::Warning);
    assert_eq!((code, warnings.len()), (Some(0), 1), "{checks:#?}");
    assert!(warnings[0].found.contains("plain text"), "{warnings:?}");
    assert_eq!(of_state(&checks, CheckState::Ok).len(), checks.len() - 1, "{checks:#?}");
    assert!(checks.len() > 18, "{checks:#?}");
    for (method, path, _) in fake.requests() {
        match method.as_str() {
            "GET" => {}
            "POST" if path.ends_with("subjectaccessreviews") => {}
            "POST" => assert!(path.ends_with("/pods?dryRun=All"), "{path}"),
            other => panic!("{other} {path}"),
        }
    }
    let (code, text) = told(&fake, &[]).await;
    assert_eq!(code, Some(0));
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(text.ends_with(" ok, 1 to look at, 0 to fix, 0 not checked\n"), "{text}");
    let (_, text) = told(&fake, &["--no-unicode", "--color", "always"]).await;
    assert!(text.is_ascii() && text.contains("\u{1b}[33mwarning\u{1b}[0m "), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_read_is_one_whose_right_is_reviewed() {
    let fake = FakeCluster::sound();
    diagnosed(&fake, &[]).await;
    let (mut reviewed, mut read) = (BTreeSet::new(), BTreeSet::new());
    for (method, path, body) in fake.requests() {
        let attributes = &body["spec"]["resourceAttributes"];
        if attributes.is_object() {
            let part = |key: &str| attributes[key].as_str().unwrap_or_default().to_owned();
            reviewed.insert([part("verb"), part("group"), part("resource"), part("namespace")]);
        } else if method == "GET" && path != "/version" && !path.contains("/v1/state") {
            read.insert(right_of(&path));
        }
    }
    reviewed.retain(|right| right[0] != "create");
    assert_eq!(read, reviewed);
}

/// Verb, group, resource and namespace of a path.
fn right_of(path: &str) -> [String; 4] {
    let path = path.split('?').next().unwrap_or_default();
    let mut parts: Vec<&str> = path.split('/').skip(1).collect();
    let group = if parts.remove(0) == "api" { "" } else { parts.remove(0) };
    parts.remove(0);
    let namespace = match parts.as_slice() {
        ["namespaces", namespace, _, ..] => {
            let namespace = *namespace;
            parts.drain(..2);
            namespace
        }
        _ => "",
    };
    let verb = if parts.len() > 1 { "get" } else { "list" };
    [verb, group, parts[0], namespace].map(str::to_owned)
}

/// Puts gpu-b into a pool with MIG on demand, where these are the agents.
fn divide(fake: &FakeCluster, agents: &[Value]) {
    let divided = "policy: fragmentation\npools: {a: {mig: on_demand}}";
    replace("gpupack", "gpupack.yaml", "policy: fragmentation", divided, fake);
    fake.change("/api/v1/nodes", |list| {
        list["items"][1]["metadata"]["labels"]["gpupack.dev/pool"] = "a".into();
    });
    fake.list("/apis/apps/v1/namespaces/gpupack-agents/daemonsets", &agents[..1]);
}

/// Something that goes wrong in a cluster.
type Break = fn(&FakeCluster);

const MAPS: &str = "/api/v1/namespaces/gpu-system/configmaps";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/gpu-system/deployments";
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
const ACCESS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
const AGENT_PODS: &str = "/api/v1/namespaces/gpupack-agents/pods";

fn replace(map: &str, file: &str, from: &str, to: &str, fake: &FakeCluster) {
    fake.change(&format!("{MAPS}/{map}"), |map| {
        let text = map["data"][file].as_str().expect("a file");
        assert!(text.contains(from), "{from} in {text}");
        map["data"][file] = text.replacen(from, to, 1).into();
    });
}

/// What breaks, the check that names it, a part of what it says, and a part of the fix.
const BREAKS: [(Break, &str, &str, &str); 28] = [
    (
        |fake| {
            let policy = json!({"autoUpgrade": true, "drain": {"enable": false}});
            let spec = json!({"driver": {"upgradePolicy": policy}});
            let policy = json!({"metadata": {"name": "cluster-policy"}, "spec": spec});
            let path = "/apis/nvidia.com/v1/clusterpolicies";
            fake.answer(path, 200, &json!({"items": [policy]}));
        },
        "driver upgrades",
        "ClusterPolicy cluster-policy: drivers are upgraded automatically without a drain",
        "waitForCompletion",
    ),
    (
        |fake| {
            let driver = json!({"metadata": {"name": "l4"}, "spec": {"upgradePolicy": {"drain": {"enable": true}}}});
            let path = "/apis/nvidia.com/v1alpha1/nvidiadrivers";
            fake.answer(path, 200, &json!({"items": [driver]}));
        },
        "driver upgrades",
        "NVIDIADriver l4: drivers are upgraded automatically, and the drain follows only",
        "docs/platforms.md#driver-upgrades",
    ),
    (
        |fake| {
            let lent = "policy: fragmentation\npools: {a: {borrow: compute}}";
            replace("gpupack", "gpupack.yaml", "policy: fragmentation", lent, fake);
            fake.answer(ACCESS, 201, &json!({"status": {"allowed": false}}));
        },
        "rights of the extender",
        "it may not patch pods/resize",
        "rbac.moves: true",
    ),
    (
        |fake| fake.forget(&format!("{ADMISSION}/validatingadmissionpolicies/gpupack-request")),
        "policies",
        "policy gpupack-request does not exist",
        "deploy/policies.yaml",
    ),
    (
        |fake| {
            let path = format!("{ADMISSION}/validatingadmissionpolicybindings/gpupack-placement");
            fake.change(&path, |it| it["spec"]["validationActions"] = json!(["Warn"]));
        },
        "policies",
        "spec.validationActions[0] differs",
        "deploy/policies.yaml",
    ),
    (
        |fake| {
            replace(
                "gpupack-scheduler",
                "config.yaml",
                "httpTimeout: 10s",
                "httpTimeout: 30s",
                fake,
            )
        },
        "kube-scheduler configuration",
        "httpTimeout is 30s, but scheduler_timeout_seconds is 10",
        "httpTimeout: 10s",
    ),
    (
        |fake| replace("gpupack", "gpupack.yaml", "policy: fragmentation", "polcy: x", fake),
        "extender configuration",
        "polcy",
        "docs/configuration.md",
    ),
    (
        |fake| {
            fake.change(&format!("{ADMISSION}/mutatingwebhookconfigurations"), |list| {
                let client = &mut list["items"][0]["webhooks"][0]["clientConfig"];
                client["caBundle"] = "bm8gUEVN".into();
            });
        },
        "certificate of the webhook",
        "does not fit caBundle",
        "docs/admission.md",
    ),
    (
        |fake| fake.forget("/api/v1/namespaces/gpu-system/secrets/gpupack-webhook-tls"),
        "certificate of the webhook",
        "Secret gpupack-webhook-tls does not exist",
        "docs/install.md",
    ),
    (
        |fake| fake.list(&format!("{ADMISSION}/mutatingwebhookconfigurations"), &[]),
        "admission webhook",
        "no MutatingWebhookConfiguration",
        "docs/admission.md",
    ),
    (
        |fake| {
            let why = "failed calling webhook \"pods.gpupack.dev\": no endpoints available";
            fake.answer_text("/api/v1/namespaces/default/pods", refusal(500, why));
        },
        "admission of a pod",
        "no endpoints available",
        "no replica of the webhook",
    ),
    (
        |fake| {
            fake.change("/api/v1/nodes", |list| {
                list["items"][1]["status"]["allocatable"]["nvidia.com/gpu"] = "4".into();
            })
        },
        "owners of GPUs",
        "kubelet also gives out GPUs of 1 node of gpupack (gpu-b; nvidia.com/gpu: 4)",
        "kubectl label node gpu-b",
    ),
    (
        |fake| divide(fake, &shipped("deploy/agent.yaml")),
        "rights for MIG",
        "agents without `--mig-on-demand` make no MIG instances, in pools with mig: on_demand, on 1 node: gpu-b",
        "deploy/agent-mig.yaml",
    ),
    (
        |fake| {
            let mut set = shipped("deploy/agent-mig.yaml");
            let container = &mut set[0]["spec"]["template"]["spec"]["containers"][1];
            container["securityContext"]["privileged"] = false.into();
            divide(fake, &set);
        },
        "rights for MIG",
        "agents that are to make MIG instances lack `privileged: true`, on 1 node: gpu-b",
        "docs/platforms.md#rights-for-mig",
    ),
    (
        |fake| {
            let divided = "policy: fragmentation\npools: {a: {mig: on_demand}}";
            replace("gpupack", "gpupack.yaml", "policy: fragmentation", divided, fake);
            let switch = "nvidia.com/gpu.deploy.dcgm";
            fake.change("/api/v1/nodes", |list| {
                for (label, value) in [("gpupack.dev/pool", "a"), (switch, "true")] {
                    list["items"][1]["metadata"]["labels"][label] = value.into();
                }
            });
            let labels = json!({"app": "nvidia-dcgm"});
            let pods = json!({"nodeSelector": {switch: "true"}, "containers":
                [{"name": "nvidia-dcgm-ctr", "image": "nvcr.io/nvidia/cloud-native/dcgm:4.4.2"}]});
            let set = json!({"metadata": {"name": "nvidia-dcgm", "namespace": "gpu-operator"},
                "spec": {"selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": pods}}});
            fake.list("/apis/apps/v1/daemonsets", &[set]);
        },
        "monitors of MIG instances",
        "DCGM (gpu-operator/nvidia-dcgm) keeps MIG instances open that gpupack is to remove, on 1 node: gpu-b",
        "kubectl label node gpu-b nvidia.com/gpu.deploy.dcgm=false --overwrite",
    ),
    (
        |fake| {
            let slice = json!({"spec": {"driver": "gpu.nvidia.com", "nodeName": "gpu-a", "pool":
                {"name": "gpu-a", "generation": 1, "resourceSliceCount": 1}}});
            fake.list("/apis/resource.k8s.io/v1/resourceslices", &[slice]);
        },
        "owners of GPUs",
        "DRA driver gives out the GPUs of 1 node",
        "DRA driver off",
    ),
    (
        |fake| {
            fake.forget("/apis/resource.k8s.io/v1/resourceslices");
            let slice = json!({"spec": {"driver": "gpu.nvidia.com", "nodeName": "gpu-b", "pool":
                {"name": "gpu-b", "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0", "basic": {"attributes": {}}}]}});
            fake.list("/apis/resource.k8s.io/v1beta1/resourceslices", &[slice]);
        },
        "owners of GPUs",
        "DRA driver gives out the GPUs of 1 node of gpupack: gpu-b",
        "DRA driver off",
    ),
    (
        |fake| fake.change(AGENT_PODS, |list| drop(list["items"].as_array_mut().map(Vec::pop))),
        "agents",
        "1 node with GPUs without an agent: gpu-b",
        "tolerations",
    ),
    (
        |fake| fake.change(STATE, |state| state["nodes"][0]["state"] = "NotReporting".into()),
        "agents",
        "1 node not reporting: gpu-a",
        "GpupackNodesNotReporting",
    ),
    (
        |fake| {
            fake.change(DEPLOYMENTS, |list| {
                list["items"][0]["status"]["readyReplicas"] = 0.into();
            })
        },
        "extender",
        "0 of 2 replicas ready",
        "kubectl describe pods",
    ),
    (
        |fake| {
            fake.change(DEPLOYMENTS, |list| {
                list["items"][1]["spec"]["template"]["spec"]["containers"][0]["image"] =
                    "a:2".into();
            })
        },
        "versions",
        "the webhook is 2, the extender 0.1.0",
        "images of one release",
    ),
    (
        |fake| {
            fake.change("/api/v1/namespaces/gpu-system/pods", |list| {
                list["items"][0]["metadata"]["labels"] = json!({});
            })
        },
        "leader",
        "gpupack-a holds the Lease, but no pod has the label",
        "gpupack-extender",
    ),
    (
        |fake| fake.forget("/apis/node.k8s.io/v1/runtimeclasses/nvidia"),
        "container runtime",
        "RuntimeClass nvidia does not exist",
        "runtime_class",
    ),
    (
        |fake| {
            let event = json!({"reason": "GpuStartFailed", "note": "no such device\u{1b}[2J",
                "regarding": {"namespace": "a", "name": "b"}});
            fake.list("/apis/events.k8s.io/v1/events", &[event]);
        },
        "container starts",
        "a/b could not start: no such device",
        "gpupack explain",
    ),
    (
        |fake| {
            let quota = json!({"metadata": {"namespace": "a", "name": "q"},
                "spec": {"hard": {"requests.nvidia.com/gpu": "4"}}});
            fake.list("/api/v1/resourcequotas", &[quota]);
        },
        "quotas",
        "counts no fraction of a GPU: a/q",
        "gpupack.dev/gpu-share",
    ),
    (
        |fake| {
            fake.change("/api/v1/namespaces", |list| {
                list["items"]
                    .as_array_mut()
                    .expect("a list")
                    .retain(|it| it["metadata"]["name"] != "gpu-operator");
            })
        },
        "admission webhook",
        "namespaces that do not exist: gpu-operator",
        "namespaceSelector",
    ),
    (
        |fake| fake.change("/version", |version| version["minor"] = "29".into()),
        "Kubernetes version",
        "no admission policies",
        "1.32",
    ),
    (
        |fake| fake.forget("/apis/coordination.k8s.io/v1/namespaces/gpu-system/leases/gpupack"),
        "leader",
        "there is no Lease",
        "GpupackNoLeader",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn each_thing_that_breaks_is_named_with_its_fix() {
    for (breaks, check, found, fix) in BREAKS {
        let fake = FakeCluster::sound();
        breaks(&fake);
        let (code, checks) = diagnosed(&fake, &[]).await;
        let named = checks.iter().find(|it| it.check == check && it.found.contains(found));
        let named = named.unwrap_or_else(|| panic!("{check}: {found}: {checks:#?}"));
        assert!(named.fix.as_ref().is_some_and(|it| it.contains(fix)), "{fix}: {named:?}");
        let has_problem = !of_state(&checks, CheckState::Problem).is_empty();
        assert_eq!(code == Some(1), has_problem, "{check}");
        let has_unchecked = !of_state(&checks, CheckState::NotChecked).is_empty();
        assert!(has_problem || (code == Some(3)) == has_unchecked, "{check}: {checks:#?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_policy_of_certificates_is_checked_where_the_extender_publishes_a_ca() {
    let fake = FakeCluster::sound();
    let mut own = shipped("deploy/extender.yaml").into_iter();
    let own = own.find(|it| it["kind"] == "ConfigMap").expect("it has one");
    fake.answer(&format!("{MAPS}/gpupack"), 200, &own);
    let named = async |found: &str| {
        let (_, checks) = diagnosed(&fake, &[]).await;
        let named = checks.iter().find(|it| it.check == "policies" && it.found.contains(found));
        named.unwrap_or_else(|| panic!("{found}: {checks:#?}")).clone()
    };
    let missing = named("policy gpupack-certificates does not exist").await;
    assert!(missing.fix.is_some_and(|fix| fix.contains("deploy/certificates.yaml")));
    named("the binding of policy gpupack-certificates does not exist").await;
    for policy in shipped("deploy/certificates.yaml") {
        let resource = match policy["kind"].as_str() {
            Some("ValidatingAdmissionPolicy") => "validatingadmissionpolicies",
            Some("ValidatingAdmissionPolicyBinding") => "validatingadmissionpolicybindings",
            _ => continue,
        };
        fake.answer(&format!("{ADMISSION}/{resource}/gpupack-certificates"), 200, &policy);
    }
    named("8 policies and bindings are those of this program").await;
    let path = format!("{ADMISSION}/validatingadmissionpolicies/gpupack-certificates");
    fake.change(&path, |it| it["spec"]["validations"][1]["expression"] = "true".into());
    named("spec.validations[1].expression differs").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_user_may_not_read_is_not_checked_and_never_ok() {
    let fake = FakeCluster::empty();
    fake.answer_others(refusal(403, "users cannot list it"));
    let (code, checks) = diagnosed(&fake, &[]).await;
    assert_eq!(code, Some(3), "{checks:#?}");
    let good: Vec<&str> =
        of_state(&checks, CheckState::Ok).iter().map(|it| it.check.as_str()).collect();
    assert_eq!(good, ["Kubernetes version"], "{checks:#?}");
    assert!(of_state(&checks, CheckState::Problem).is_empty(), "{checks:#?}");
    let (code, _) = diagnosed(&fake, &["--accept-unchecked"]).await;
    assert_eq!(code, Some(0));
    // One right alone is missing.
    let fake = FakeCluster::sound();
    let secret = "/api/v1/namespaces/gpu-system/secrets/gpupack-webhook-tls";
    fake.answer_text(secret, refusal(403, "no"));
    let (code, checks) = diagnosed(&fake, &[]).await;
    let left = of_state(&checks, CheckState::NotChecked);
    assert_eq!((code, left.len()), (Some(3), 1), "{checks:#?}");
    assert!(
        left[0].found.contains("needs the right to get secrets gpupack-webhook-tls"),
        "{left:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_cluster_is_told_what_to_install() {
    let (code, checks) = diagnosed(&FakeCluster::empty(), &[]).await;
    assert_eq!(code, Some(1));
    let fixes: String = checks.iter().filter_map(|check| check.fix.clone()).collect();
    for part in ["deploy/rbac.yaml", "deploy/policies.yaml", "deploy/agent.yaml", "admission.md"] {
        assert!(fixes.contains(part), "{part} in {checks:#?}");
    }
    let nowhere = diagnosed(&FakeCluster::sound(), &["--system-namespace", "elsewhere"]).await;
    assert_eq!(nowhere.0, Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_answers_are_findings() {
    let huge =
        format!("{{\"items\": [{{\"metadata\": {{\"name\": \"{}\"}}}}]}}", "x".repeat(2 << 20));
    let deep = "[".repeat(100_000);
    let many: Vec<Value> = vec![json!({"metadata": {"name": "a\u{1b}[2J\u{202e}"}}); 400];
    let many =
        json!({"items": many, "data": {"gpupack.yaml": "\u{1b}: &a [*a]", "tls.crt": "AA=="},
        "spec": {"holderIdentity": "\u{1b}", "x": {}}})
        .to_string();
    let texts = [
        "",
        "<html>",
        "7",
        "\"text\"",
        "[]",
        "{}",
        "{\"items\": 7}",
        "{\"items\": [null]}",
        "{\"spec\": \"x\", \"data\": 7, \"status\": [], \"metadata\": 1}",
        &deep,
        &huge,
        &many,
    ];
    for text in texts {
        let fake = FakeCluster::empty();
        fake.answer_others((200, text.to_owned()));
        let (code, found) = told(&fake, &[]).await;
        let cut: String = text.chars().take(40).collect();
        assert!([Some(1), Some(3)].contains(&code), "{cut}: {found}");
        assert!(found.len() < 30_000 && !found.contains(['\u{1b}', '\u{202e}']), "{cut}: {found}");
    }
    // One bad answer among good ones does not hide the others.
    let fake = FakeCluster::sound();
    for path in fake.paths().into_iter().filter(|path| path != "/version") {
        let fake = FakeCluster::sound();
        fake.answer_text(&path, (200, "{\"items\": 7, \"spec\": 7, \"data\": 7}".to_owned()));
        let (code, checks) = diagnosed(&fake, &[]).await;
        let is_unused = path.ends_with("runtimeclasses") || path.ends_with("runtimeclasses/nvidia");
        let is_unused = is_unused
            || path.ends_with("bindings/gpupack-devices")
            || path.ends_with("services/gpupack"); // for addresses alone
        assert_eq!(code == Some(0), is_unused, "{path}: {checks:#?}");
        assert!(of_state(&checks, CheckState::Ok).len() > 4, "{path}: {checks:#?}");
    }
    let fake = FakeCluster::sound();
    fake.change("/api/v1/nodes", |list| list["metadata"]["continue"] = "again".into());
    let (code, checks) = diagnosed(&fake, &[]).await;
    assert_eq!(code, Some(3), "a list without an end");
    assert!(checks.iter().any(|check| check.found.contains("more than 100000")), "{checks:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_nodes_make_a_short_text() {
    let fake = FakeCluster::sound();
    fake.change("/api/v1/nodes", |list| {
        let node = |at| {
            json!({"metadata": {"name": format!("node-{at}"), "labels":
            {"nvidia.com/gpu.present": "true"}}, "status": {"allocatable": {"cpu": "8"}}})
        };
        list["items"] = (0..5_000).map(node).collect();
    });
    let (code, text) = told(&fake, &[]).await;
    assert_eq!(code, Some(1));
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(joined.contains("5000 nodes with GPUs without an agent: node-0, node-1, "), "{text}");
    assert!(joined.contains("and 4995 more") && text.len() < 8_000, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn in_place_the_file_of_the_control_plane_is_named() {
    let fake = FakeCluster::sound();
    fake.change(DEPLOYMENTS, |list| drop(list["items"].as_array_mut().map(Vec::pop)));
    let names = ("scheduler_names: [gpupack]", "scheduler_names: [default-scheduler]");
    replace("gpupack", "gpupack.yaml", names.0, names.1, &fake);
    let (code, checks) = diagnosed(&fake, &[]).await;
    let left = of_state(&checks, CheckState::NotChecked);
    assert_eq!(left.len(), 1, "{checks:#?}");
    assert!(
        left[0].fix.as_ref().is_some_and(|fix| fix.contains("--scheduler-config FILE")),
        "{left:?}"
    );
    assert_eq!(code, Some(3), "{checks:#?}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("scheduler-config/in-place.yaml");
    let file = file.to_str().expect("UTF-8");
    let (code, checks) = diagnosed(&fake, &["--scheduler-config", file]).await;
    assert_eq!(code, Some(0), "{checks:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_answer_it_says_so() {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let config = kubeconfig(&folder, "http://127.0.0.1:1");
    let text = folder.path().join("text").display().to_string();
    std::fs::write(&text, "hello\n").expect("a file can be written");
    for (code, part, flags) in [
        (4, "cannot reach the API server at http://127.0.0.1:1: ", vec!["--kubeconfig", &config]),
        (1, "No such file or directory (os error 2)): name one", vec!["--kubeconfig", "/nowhere"]),
        (
            1,
            "YAML: error: line 1 column 1: expected mapping start): name one",
            vec!["--kubeconfig", &text],
        ),
        (
            1,
            "failed to load current context: other",
            vec!["--kubeconfig", &config, "--context", "other"],
        ),
        (2, "it is no name of a user", vec!["--kubeconfig", &config, "--as", "a\nb"]),
        (2, "cannot read `/nowhere`", vec!["--scheduler-config", "/nowhere"]),
        (2, "no valid name", vec!["--namespace", "A/../b"]),
    ] {
        let output = gpupack(&[&["doctor"][..], &flags].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(part) && output.stdout.is_empty(), "{part} in {text}");
        let is_of_flags = code == 2 && !text.starts_with("gpupack: ");
        assert!(is_of_flags || (text.lines().count() == 1 && !text.contains("\\u{")), "{text}");
    }
    for text in ["<html>", "{}", "{\"gitVersion\": 7}"] {
        let fake = FakeCluster::default();
        fake.answer_others((200, text.to_owned()));
        let config = kubeconfig(&folder, &format!("http://{}", fake.serve().await));
        for command in ["doctor", "init"] {
            let output = gpupack(&[command, "--kubeconfig", &config]);
            let line = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{text}: {line}");
            assert!(line.contains("is no API server of Kubernetes"), "{text}: {line}");
        }
    }
    let fake = FakeCluster::empty();
    fake.answer(REVIEWS, 201, &json!({"status": {"allowed": false}}));
    let (code, checks) = diagnosed(&fake, &[]).await;
    assert_eq!((code, checks.len()), (Some(3), 2), "{checks:#?}");
    assert!(checks[1].found.contains("none of the 26 rights"), "{checks:#?}");
    let fake = FakeCluster::empty();
    fake.answer_text("/version", refusal(401, "Unauthorized"));
    let config = kubeconfig(&folder, &format!("http://{}", fake.serve().await));
    let output = gpupack(&["doctor", "--kubeconfig", &config]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("log in again"), "{text}");
}
