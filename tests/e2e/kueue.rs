//! The real Kueue as a process, with its own objects and webhooks on the API server.
//!
//! Only what names a place is changed: its service is this machine, at a free port.

use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::api::{Api, DynamicObject, PostParams};
use kube::{Client, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::binaries::KueueProgram;
use crate::clock;
use crate::control_plane::{ControlPlane, Identity, free_ports};
use crate::leash::Leash;
use crate::manifests::{self, Mode};

/// How long Kueue may take to become ready, its caches filled.
const START_LIMIT: Duration = Duration::from_secs(60);

const NAMESPACE: &str = "kueue-system";
const SERVICE: &str = "kueue-webhook-service";
const SECRET: &str = "kueue-webhook-server-cert";

/// Resources whose versions Kueue converts: those of its `crd/kustomization.yaml`.
const CONVERTED: [&str; 5] =
    ["localqueues", "clusterqueues", "cohorts", "workloads", "multikueueclusters"];

/// The kinds that it manages here.
const FRAMEWORKS: [&str; 4] =
    ["batch/job", "pod", "jobset.x-k8s.io/jobset", "leaderworkerset.x-k8s.io/leaderworkerset"];

/// What its webhooks are asked about here. Cohorts are only validated.
const ASKED: [&str; 8] = [
    "pod",
    "job",
    "jobset",
    "leaderworkerset",
    "clusterqueue",
    "cohort",
    "resourceflavor",
    "workload",
];

/// A running Kueue; it ends when this is dropped.
pub(crate) struct Kueue {
    _process: Leash,
}

impl Kueue {
    /// Gives the API server the objects of Kueue and starts it; answers when it is ready.
    pub(crate) async fn start(
        plane: &ControlPlane,
        admin: &Client,
        program: &KueueProgram,
    ) -> Self {
        let folder = plane.work().join("kueue");
        std::fs::create_dir_all(&folder).expect("the work folder is writable");
        let [port, healthy] = free_ports();
        let config = json!({
            "apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration",
            "namespace": NAMESPACE,
            "health": {"healthProbeBindAddress": format!("127.0.0.1:{healthy}")},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": port, "certDir": folder},
            "leaderElection": {"leaderElect": false},
            "internalCertManagement": {
                "enable": true, "webhookServiceName": SERVICE, "webhookSecretName": SECRET,
            },
            "clientConnection": {"qps": 500, "burst": 1000},
            "integrations": {"frameworks": FRAMEWORKS},
            "fairSharing": {
                "preemptionStrategies": ["LessThanOrEqualToFinalShare", "LessThanInitialShare"],
            },
            "featureGates": {"VisibilityOnDemand": false, "MultiKueue": false},
        });
        let file = folder.join("kueue.json");
        std::fs::write(&file, config.to_string()).expect("the work folder is writable");
        place(admin).await;
        let own = program.sources.join("config/components/crd/bases");
        for folder in program.kinds.iter().chain([&own]) {
            resources(admin, folder, port).await;
        }
        webhooks(admin, &program.sources, port).await;
        let arguments = [
            format!("--config={}", file.display()),
            format!("--kubeconfig={}", plane.kubeconfig(Identity::Admin).display()),
            "--zap-log-level=2".to_owned(),
        ];
        let log = plane.log("kueue");
        let mut process = Leash::start("kueue", &program.program, &arguments, &log);
        mount_certificate(admin, &folder).await;
        ready(&mut process, healthy, &log).await;
        Self { _process: process }
    }
}

/// Its namespace, the Secret that it fills, and its service: this machine.
async fn place(admin: &Client) {
    namespace(admin, NAMESPACE).await;
    let meta = |name: &str| json!({"name": name, "namespace": NAMESPACE});
    for object in [
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": meta(SECRET)}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": meta(SERVICE),
            "spec": {"type": "ExternalName", "externalName": "localhost"}}),
    ] {
        let object = serde_json::from_value(object).expect("an object");
        manifests::keep(admin, "the place of Kueue", &object).await;
    }
}

/// Writes the certificate that Kueue makes where it reads it, as kubelet would.
async fn mount_certificate(admin: &Client, folder: &Path) {
    let secrets: Api<Secret> = Api::namespaced(admin.clone(), NAMESPACE);
    let started = clock::now();
    loop {
        let data = secrets.get(SECRET).await.expect("it was created").data.unwrap_or_default();
        if ["tls.key", "tls.crt"].iter().all(|name| data.contains_key(*name)) {
            for name in ["tls.key", "tls.crt"] {
                std::fs::write(folder.join(name), &data[name].0).expect("the folder is writable");
            }
            return;
        }
        assert!(started.elapsed() < START_LIMIT, "Kueue makes no certificate");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The client configuration of a webhook of Kueue at this path.
fn client(path: &str, port: u16) -> Value {
    json!({"service": {"name": SERVICE, "namespace": NAMESPACE, "path": path, "port": port}})
}

/// Creates a namespace, unless it is there.
pub(crate) async fn namespace(admin: &Client, name: &str) {
    let object = json!({"metadata": {"name": name}});
    let object: Namespace = serde_json::from_value(object).expect("a namespace");
    let _exists = Api::all(admin.clone()).create(&PostParams::default(), &object).await;
}

/// The objects in a file of Kueue's sources.
fn objects(path: &Path) -> Vec<DynamicObject> {
    let text = std::fs::read_to_string(path);
    let text = text.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let objects = serde_yaml_ng::Deserializer::from_str(&text).map(DynamicObject::deserialize);
    objects.collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Defines the resources of a folder, and waits until the API server serves them.
async fn resources(admin: &Client, folder: &Path, port: u16) {
    let files = std::fs::read_dir(folder).expect("the module has its definitions");
    let files: Vec<PathBuf> = files.map(|file| file.expect("it is readable").path()).collect();
    for mut object in files.iter().flat_map(|file| objects(file)) {
        let name = object.name_any();
        if CONVERTED.iter().any(|plural| name.starts_with(&format!("{plural}."))) {
            object.data["spec"]["conversion"] = json!({"strategy": "Webhook", "webhook": {
                "clientConfig": client("/convert", port), "conversionReviewVersions": ["v1"]}});
        }
        manifests::keep(admin, "a definition of Kueue", &object).await;
        established(admin, &name).await;
    }
}

async fn established(admin: &Client, name: &str) {
    let path = format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}");
    let started = clock::now();
    loop {
        let request = axum::http::Request::get(&path).body(Vec::new()).expect("a fixed path");
        let object: Value = admin.request(request).await.expect("it was created");
        let conditions = object["status"]["conditions"].as_array();
        let is_it =
            |condition: &Value| condition["type"] == "Established" && condition["status"] == "True";
        if conditions.is_some_and(|all| all.iter().any(is_it)) {
            return;
        }
        assert!(started.elapsed() < START_LIMIT, "{name} is not served: {object}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Sends what Kueue wants to see to its webhooks.
async fn webhooks(admin: &Client, sources: &Path, port: u16) {
    for mut object in objects(&sources.join("config/components/webhook/manifests.yaml")) {
        let name = format!("kueue-{}", object.name_any());
        let expected = ASKED.len() - usize::from(name.contains("mutating"));
        object.metadata.name = Some(name);
        let all = object.data["webhooks"].as_array_mut().expect("a list of webhooks");
        all.retain(|webhook| {
            let name = webhook["name"].as_str().unwrap_or_default();
            ASKED.iter().any(|asked| name[1..] == format!("{asked}.kb.io"))
        });
        assert_eq!(all.len(), expected, "those of its own resources, pods and Jobs");
        for webhook in all {
            let path = webhook["clientConfig"]["service"]["path"].as_str().expect("a path");
            webhook["clientConfig"] = client(path, port);
        }
        manifests::keep(admin, "the webhooks of Kueue", &object).await;
    }
}

async fn ready(process: &mut Leash, port: u16, log: &Path) {
    let started = clock::now();
    let answers = async || {
        let address = format!("http://127.0.0.1:{port}").parse().expect("an address of ours");
        let client = Client::try_from(kube::Config::new(address)).expect("a plain client");
        let request = axum::http::Request::get("/readyz").body(Vec::new()).expect("a fixed path");
        client.request_text(request).await.is_ok()
    };
    while !answers().await {
        let ended = process.ended();
        assert!(ended.is_none(), "Kueue ended ({ended:?}); see {}", log.display());
        let late = started.elapsed() > START_LIMIT;
        assert!(!late, "Kueue is not ready after {START_LIMIT:?}; see {}", log.display());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The objects in the YAML of a page of the documentation, in its order.
pub(crate) fn of_page(page: &str) -> Vec<DynamicObject> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(page);
    let text = std::fs::read_to_string(&path).expect("the page is there");
    let blocks = text.split("\n```yaml\n").skip(1).filter_map(|rest| rest.split("\n```").next());
    let mut found = Vec::new();
    for block in blocks {
        let objects = serde_yaml_ng::Deserializer::from_str(block).map(DynamicObject::deserialize);
        let objects: Result<Vec<_>, _> = objects.collect();
        found.extend(objects.unwrap_or_else(|error| panic!("{page}: {error}: {block}")));
    }
    found
}

/// Gives the API server an object; Kueue may need a moment for its webhooks.
pub(crate) async fn put(admin: &Client, object: &DynamicObject) {
    let started = clock::now();
    while let Err(error) = manifests::send(admin, object, Mode::Keep).await {
        assert!(started.elapsed() < START_LIMIT, "{}: {error}", object.name_any());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
