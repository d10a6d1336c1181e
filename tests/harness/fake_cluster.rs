//! A fake API server with the objects of an installation, for commands that look at it. It answers from a
//! table of paths, and writes down what it was asked.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::harness::authority::Authority;

/// The path of a resource of the extender, behind the API server's service proxy.
pub(crate) const STATE: &str = "/api/v1/namespaces/gpu-system/services/gpupack:page/proxy/v1/state";

/// Where policies and webhooks are.
pub(crate) const ADMISSION: &str = "/apis/admissionregistration.k8s.io/v1";

/// What is answered to a path: a status and a body.
pub(crate) type Answer = (u16, String);

/// The answers, and what was asked.
#[derive(Default)]
struct Table {
    answers: BTreeMap<String, Answer>,
    /// What every path answers that has no answer of its own.
    otherwise: Option<Answer>,
    /// Method, path with query, and body of each request.
    requests: Vec<(String, String, Value)>,
}

/// The fake API server.
#[derive(Clone, Default)]
pub(crate) struct FakeCluster(Arc<Mutex<Table>>);

/// The objects of a file of the repository.
pub(crate) fn shipped(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents.map(|document| Value::deserialize(document).unwrap()).collect()
}

/// The object of this kind and name in a file.
fn object(file: &str, kind: &str, name: &str) -> Value {
    let mut all = shipped(file).into_iter();
    all.find(|it| it["kind"] == kind && it["metadata"]["name"] == name).unwrap()
}

/// Base64 of a text, as Secrets and bundles have it.
fn encoded(text: &str) -> Value {
    serde_json::to_value(k8s_openapi::ByteString(text.as_bytes().to_vec())).unwrap()
}

/// A refusal of the API server.
pub(crate) fn refusal(code: u16, message: &str) -> Answer {
    let status = json!({"kind": "Status", "status": "Failure", "code": code, "message": message});
    (code, status.to_string())
}

impl FakeCluster {
    /// An API server without objects.
    pub(crate) fn empty() -> Self {
        let fake = Self::default();
        let version = json!({"major": "1", "minor": "36", "gitVersion": "v1.36.3", "buildDate": "",
            "compiler": "", "gitCommit": "", "gitTreeState": "", "goVersion": "", "platform": ""});
        fake.answer("/version", 200, &version);
        fake
    }

    /// The shipped manifests as they are installed, on two nodes with GPUs, with certificates and reports.
    pub(crate) fn sound() -> Self {
        let fake = Self::empty();
        let names = ["default", "kube-system", "kube-public", "kube-node-lease", "gpu-operator"];
        let mut namespaces: Vec<Value> =
            names.iter().map(|name| json!({"metadata": {"name": name}})).collect();
        namespaces
            .extend(shipped("deploy/rbac.yaml").into_iter().filter(|it| it["kind"] == "Namespace"));
        fake.list("/api/v1/namespaces", &namespaces);
        let parts = ["extender", "webhook", "scheduler"].map(|part| {
            let name =
                if part == "extender" { "gpupack".into() } else { format!("gpupack-{part}") };
            let mut deployment = object(&format!("deploy/{part}.yaml"), "Deployment", &name);
            deployment["status"] = json!({"readyReplicas": deployment["spec"]["replicas"]});
            deployment
        });
        fake.list("/apis/apps/v1/namespaces/gpu-system/deployments", &parts);
        let mut agents = object("deploy/agent.yaml", "DaemonSet", "gpupack-agent");
        agents["status"] = json!({"desiredNumberScheduled": 2, "numberReady": 2});
        fake.list("/apis/apps/v1/namespaces/gpupack-agents/daemonsets", &[agents]);
        fake.configurations();
        fake.pods_and_nodes();
        fake.admission();
        fake.answer(
            "/apis/node.k8s.io/v1/runtimeclasses/nvidia",
            200,
            &json!({"handler": "nvidia"}),
        );
        fake.list(
            "/apis/node.k8s.io/v1/runtimeclasses",
            &[json!({"handler": "nvidia",
            "metadata": {"name": "nvidia"}})],
        );
        fake.list("/apis/events.k8s.io/v1/events", &[]);
        fake.list("/api/v1/resourcequotas", &[]);
        fake.list("/apis/scheduling.k8s.io/v1/priorityclasses", &[]);
        fake.list("/apis/resource.k8s.io/v1/resourceslices", &[]);
        let service = json!({"spec": {"clusterIPs": ["10.96.0.7"]}});
        fake.answer("/api/v1/namespaces/gpu-system/services/gpupack", 200, &service);
        fake
    }

    fn configurations(&self) {
        let maps = "/api/v1/namespaces/gpu-system/configmaps";
        let mut own = object("deploy/extender.yaml", "ConfigMap", "gpupack");
        let text = in_plain_text(own["data"]["gpupack.yaml"].as_str().unwrap());
        own["data"]["gpupack.yaml"] = text.into();
        self.answer(&format!("{maps}/gpupack"), 200, &own);
        let file =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("scheduler-config/second-scheduler.yaml");
        let text = std::fs::read_to_string(file).unwrap();
        let scheduler = json!({"data": {"config.yaml": text}});
        self.answer(&format!("{maps}/gpupack-scheduler"), 200, &scheduler);
    }

    fn pods_and_nodes(&self) {
        let pod = |name: &str, node: &str, labels: Value| {
            json!({
                "metadata": {"name": name, "labels": labels},
                "spec": {"nodeName": node, "containers": [
                    {"name": "c", "image": "ghcr.io/gpupack/gpupack:0.1.0"}]},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            })
        };
        let replicas = [
            pod("gpupack-a", "cpu", json!({"gpupack.dev/leader": "true"})),
            pod("gpupack-b", "cpu", json!({})),
        ];
        self.list("/api/v1/namespaces/gpu-system/pods", &replicas);
        let agents = ["gpu-a", "gpu-b"].map(|node| pod(&format!("agent-{node}"), node, json!({})));
        self.list("/api/v1/namespaces/gpupack-agents/pods", &agents);
        let now = k8s_openapi::jiff::Timestamp::now();
        let lease = json!({"metadata": {"annotations": {"gpupack.dev/secret": "not-to-be-shown"}},
            "spec": {"holderIdentity": "gpupack-a_1f", "leaseDurationSeconds": 3,
                "renewTime": format!("{now:.6}")}});
        let leases = "/apis/coordination.k8s.io/v1/namespaces/gpu-system/leases";
        self.answer(&format!("{leases}/gpupack"), 200, &lease);
        let node = |name: &str, labels: Value| json!({"metadata": {"name": name, "labels": labels}, "status": {"allocatable": {"cpu": "8"}}});
        let labels =
            json!({"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "Tesla-T4"});
        let nodes = [node("gpu-a", labels.clone()), node("gpu-b", labels), node("cpu", json!({}))];
        self.list("/api/v1/nodes", &nodes);
        let state = ["gpu-a", "gpu-b"].map(state_of_node);
        let state = json!({"apiVersion": "gpupack.dev/v1alpha1", "kind": "State", "nodes": state,
            "pods": []});
        self.answer(STATE, 200, &state);
    }

    fn admission(&self) {
        let authority = Authority::new();
        let pair = authority.pair("gpupack-webhook.gpu-system.svc");
        let secret = json!({"data": {"tls.crt": encoded(&pair.certificate),
            "tls.key": encoded(&pair.key), "ca.crt": encoded(&authority.certificate)}});
        let secrets = "/api/v1/namespaces/gpu-system/secrets";
        self.answer(&format!("{secrets}/gpupack-webhook-tls"), 200, &secret);
        let mut webhook = object("deploy/webhook.yaml", "MutatingWebhookConfiguration", "gpupack");
        webhook["webhooks"][0]["clientConfig"]["caBundle"] = encoded(&authority.certificate);
        self.list(&format!("{ADMISSION}/mutatingwebhookconfigurations"), &[webhook]);
        let policies =
            shipped("deploy/policies.yaml").into_iter().chain(shipped("deploy/webhook.yaml"));
        for policy in policies {
            let resource = match policy["kind"].as_str() {
                Some("ValidatingAdmissionPolicy") => "validatingadmissionpolicies",
                Some("ValidatingAdmissionPolicyBinding") => "validatingadmissionpolicybindings",
                _ => continue,
            };
            let name = policy["metadata"]["name"].as_str().unwrap();
            self.answer(&format!("{ADMISSION}/{resource}/{name}"), 200, &policy);
        }
    }

    /// Answers a path so from now on.
    pub(crate) fn answer(&self, path: &str, status: u16, body: &Value) {
        self.answer_text(path, (status, body.to_string()));
    }

    /// The same with any text.
    pub(crate) fn answer_text(&self, path: &str, answer: Answer) {
        self.0.lock().unwrap().answers.insert(path.to_owned(), answer);
    }

    /// Answers every path so that has no answer of its own.
    pub(crate) fn answer_others(&self, answer: Answer) {
        self.0.lock().unwrap().otherwise = Some(answer);
    }

    /// Forgets the answer to a path.
    pub(crate) fn forget(&self, path: &str) {
        let forgotten = self.0.lock().unwrap().answers.remove(path);
        assert!(forgotten.is_some(), "{path} is not there");
    }

    /// The paths with answers.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.0.lock().unwrap().answers.keys().cloned().collect()
    }

    /// Changes a body.
    pub(crate) fn change(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let mut table = self.0.lock().unwrap();
        let (_, text) = table.answers.get_mut(path).unwrap_or_else(|| panic!("{path}"));
        let mut body: Value = serde_json::from_str(text).unwrap();
        change(&mut body);
        *text = body.to_string();
    }

    /// Answers a list.
    pub(crate) fn list(&self, path: &str, items: &[Value]) {
        self.answer(path, 200, &json!({"kind": "List", "metadata": {}, "items": items}));
    }

    /// What it was asked.
    pub(crate) fn requests(&self) -> Vec<(String, String, Value)> {
        self.0.lock().unwrap().requests.clone()
    }

    /// Serves until the test ends.
    pub(crate) async fn serve(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(answered).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }
}

fn state_of_node(name: &str) -> Value {
    let nothing = json!({"memoryMib": 0, "shareMillionths": 0});
    json!({"name": name, "pool": "", "state": "Reporting",
        "capacity": {"cpuMilli": 1, "memoryMib": 1}, "free": {"cpuMilli": 1, "memoryMib": 1},
        "devices": [{"id": format!("GPU-{name}"), "index": 0, "model": "Tesla T4", "kind": "Gpu",
            "isolation": {"configured": "None"}, "health": "Healthy", "canLimitMemory": false,
            "capacityMib": 15_360, "allocated": nothing, "held": nothing, "free": nothing,
            "usedBeyondAllocatedMib": 0, "untrackedMib": 0, "overallocated": false, "tenants": []}]})
}

async fn answered(
    State(FakeCluster(table)): State<FakeCluster>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut table = table.lock().unwrap();
    table.requests.push((method.to_string(), uri.to_string(), body.clone()));
    let of_table = table.answers.get(uri.path()).or(table.otherwise.as_ref()).cloned();
    let reviews = "/apis/authorization.k8s.io/v1/";
    let is_trial = method == Method::POST && uri.path().ends_with("/pods");
    let (status, text) = match of_table {
        Some(answer) => answer,
        None if uri.path().starts_with(reviews) => {
            (201, json!({"status": {"allowed": true}}).to_string())
        }
        None if is_trial => tried(body),
        None => refusal(404, "the server could not find the requested resource"),
    };
    let status = StatusCode::from_u16(status).unwrap();
    (status, [(header::CONTENT_TYPE, "application/json")], text).into_response()
}

/// What admission makes of a pod.
fn tried(mut pod: Value) -> Answer {
    if pod["metadata"]["annotations"]["gpu-fraction"] != "0.5" {
        return refusal(
            403,
            "admission webhook denied the request: `gpu-fraction: 2` is not allowed",
        );
    }
    let container = &mut pod["spec"]["containers"][0];
    let path = "metadata.annotations['placed.gpupack.dev/devices']";
    container["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES",
        "valueFrom": {"fieldRef": {"fieldPath": path}}}]);
    container["resources"]["limits"]["gpupack.dev/gpu-share"] = "500000".into();
    (201, pod.to_string())
}

/// A configuration of an extender whose clients prove nothing: this cluster has no certificates but the
/// webhook's. `doctor` is tried with all of them where the chart is installed (`tests/e2e/scenarios/install.rs`).
fn in_plain_text(text: &str) -> String {
    let mut is_tls = false;
    let kept = text.lines().filter(|line| {
        is_tls = line.starts_with("tls:") || (is_tls && line.starts_with(' '));
        !is_tls && !line.starts_with("certificates:")
    });
    let kept: Vec<&str> = kept.collect();
    assert!(kept.len() + 5 == text.lines().count(), "what is shipped proves who it is: {text}");
    kept.join("\n").replace("[\"gpupack\"]", "[gpupack]") + "\nplain_text: true\n"
}
