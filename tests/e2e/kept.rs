//! An installation that makes its own certificates, on the real API server: what kubelet, the controller of
//! Deployments and the Services do is done here.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service};
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::clock;
use crate::control_plane::{ControlPlane, free_ports};
use crate::extender::{Extender, gpupack};
use crate::leash::Leash;
use crate::manifests::{self, Mode};
use crate::schedulers::{Scheduler, SchedulerPlan};
use crate::webhook::runtime_classes;

/// Where all but the agents is.
const NAMESPACE: &str = "gpu-system";

/// The Services by which the API server calls webhook and extender.
const SERVICES: [&str; 2] = ["gpupack", "gpupack-webhook"];

/// How soon a volume follows its object.
const VOLUMES_EVERY: Duration = Duration::from_millis(500);

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(60);

/// What `kubectl rollout restart` sets on pods.
const RESTARTED: &str = "kubectl.kubernetes.io/restartedAt";

/// The folders into which Secrets and the ConfigMap are mounted.
#[derive(Clone, Copy)]
pub(crate) struct Volumes {
    /// `ca.crt` of the ConfigMap.
    pub(crate) agents: &'static Path,
    webhook: &'static Path,
    scheduler: &'static Path,
}

impl Volumes {
    fn new(plane: &ControlPlane) -> Self {
        let folder = |name: &str| -> &'static Path {
            let path = plane.work().join(format!("kept-{name}"));
            std::fs::create_dir_all(&path).expect("the work folder is writable");
            Box::leak(path.into_boxed_path())
        };
        Self {
            agents: folder("agents"),
            webhook: folder("webhook"),
            scheduler: folder("scheduler"),
        }
    }

    /// Copies what is in the objects. kube-scheduler gets the CA too, which it reads when it starts.
    async fn update(self, client: &Client) {
        let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
        for (name, folder) in
            [("gpupack-webhook-tls", self.webhook), ("gpupack-scheduler-tls", self.scheduler)]
        {
            let secret = secrets.get(name).await.expect("it can be read");
            for (key, value) in secret.data.into_iter().flatten() {
                let key = match name {
                    "gpupack-scheduler-tls" => key.replace("tls.", "scheduler."),
                    _ => key,
                };
                write(&folder.join(key), &value.0);
            }
        }
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "gpupack-agents");
        let map = maps.get("gpupack-ca").await.expect("it can be read");
        if let Some(ca) = map.data.as_ref().and_then(|data| data.get("ca.crt")) {
            write(&self.agents.join("ca.crt"), ca.as_bytes());
        }
    }
}

/// Whole or not at all, as kubelet does.
fn write(path: &Path, text: &[u8]) {
    if std::fs::read(path).is_ok_and(|found| found == text) {
        return;
    }
    let beside = path.with_extension("new");
    std::fs::write(&beside, text).expect("the work folder is writable");
    std::fs::rename(&beside, path).expect("the work folder is writable");
}

/// A running installation.
pub(crate) struct Kept {
    /// Two replicas.
    pub(crate) extenders: Vec<Extender>,
    /// The mounted files.
    pub(crate) volumes: Volumes,
    /// How often kube-scheduler was started.
    rolls: Arc<Mutex<usize>>,
    client: Client,
    _webhook: Option<Leash>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Kept {
    /// Installs empty objects, starts both replicas at once, and then all others.
    pub(crate) async fn start(
        plane: &'static ControlPlane,
        client: &Client,
        section: Value,
    ) -> Self {
        manifests::apply(client, "rbac.yaml", Mode::Keep).await;
        empty_objects(client).await;
        let [webhook_port] = free_ports();
        let (mut extenders, kubeconfig) =
            (Vec::new(), plane.kubeconfig(crate::control_plane::Identity::Extender));
        let settings = |name: &str| settings(plane, name, &section);
        for name in ["gpupack-0", "gpupack-1"] {
            crate::replicas::make_pod(client, name).await;
        }
        let (first, second) = tokio::join!(
            Extender::start_replica(plane, &kubeconfig, settings("gpupack-0"), "gpupack-0"),
            Extender::start_replica(plane, &kubeconfig, settings("gpupack-1"), "gpupack-1"),
        );
        extenders.extend([first, second]);
        let volumes = Volumes::new(plane);
        volumes.update(client).await;
        let mut kept = Self {
            extenders,
            volumes,
            rolls: Arc::default(),
            client: client.clone(),
            _webhook: None,
            tasks: Vec::new(),
        };
        let leader = kept.leader().await;
        kept.point_services(webhook_port, leader).await;
        kept._webhook = Some(start_webhook(plane, volumes.webhook, webhook_port));
        let address = kept.extenders[leader].address();
        let following = client.clone();
        kept.tasks.push(tokio::spawn(async move {
            loop {
                volumes.update(&following).await;
                tokio::time::sleep(VOLUMES_EVERY).await;
            }
        }));
        let rolling = roll(plane, client.clone(), volumes, address, Arc::clone(&kept.rolls));
        kept.tasks.push(tokio::spawn(rolling));
        kept.until_rolled(1).await;
        kept
    }

    async fn until_rolled(&self, times: usize) {
        let started = clock::now();
        while *self.rolls.lock().unwrap_or_else(PoisonError::into_inner) < times {
            assert!(started.elapsed() < LIMIT, "kube-scheduler is not started");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// As `kubectl rollout restart` does.
    pub(crate) async fn restart_scheduler(&self) {
        let deployments: Api<Deployment> = Api::namespaced(self.client.clone(), NAMESPACE);
        let fields =
            json!({"spec": {"template": {"metadata": {"annotations": {RESTARTED: "now"}}}}});
        let fields = Patch::Merge(fields);
        let parameters = PatchParams::default();
        let patched = deployments.patch("gpupack-scheduler", &parameters, &fields).await;
        patched.expect("it is there");
        self.until_rolled(2).await;
    }

    /// The place of the replica that leads.
    pub(crate) async fn leader(&self) -> usize {
        let started = clock::now();
        loop {
            for (place, extender) in self.extenders.iter().enumerate() {
                if extender.metric("gpupack_leader", "").await == 1.0 {
                    return place;
                }
            }
            assert!(started.elapsed() < LIMIT, "no replica leads");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The CAs that agents are to trust.
    pub(crate) async fn bundle(&self) -> String {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), "gpupack-agents");
        let map = maps.get("gpupack-ca").await.expect("it can be read");
        map.data.and_then(|mut data| data.remove("ca.crt")).unwrap_or_default()
    }

    /// Nothing here forwards what is sent to the address of a Service, so it is that of another name: this
    /// machine's. Only the ports change.
    async fn point_services(&self, webhook_port: u16, leader: usize) {
        let page = self.extenders[leader].page_address().port();
        let to_port = |path: &[&str], port: u16| {
            let mut fields = json!(port);
            for key in path.iter().rev() {
                fields = json!({ *key: fields });
            }
            fields
        };
        patch(&self.client, "api-service.yaml", to_port(&["spec", "service", "port"], page)).await;
        let hook = json!({"webhooks": [{"name": "pods.gpupack.dev",
            "clientConfig": {"service": {"port": webhook_port}}}]});
        patch(&self.client, "webhook.yaml", hook).await;
    }
}

/// The keys of an extender with a folder of its own for its certificate.
pub(crate) fn settings(plane: &ControlPlane, name: &str, section: &Value) -> Value {
    let folder = plane.work().join(name);
    std::fs::create_dir_all(&folder).expect("the work folder is writable");
    let file = |name: &str| folder.join(name);
    json!({"tls": {"certificate_file": file("tls.crt"), "key_file": file("tls.key"),
        "ca_file": file("ca.crt")}, "certificates": section})
}

/// Changes the port in an object of a shipped file that is there.
async fn patch(client: &Client, file: &str, fields: Value) {
    use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
    use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
    let parameters = PatchParams::default();
    if file == "webhook.yaml" {
        let api: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
        let patched = api.patch("gpupack", &parameters, &Patch::Strategic(fields)).await;
        patched.expect("it is there");
    } else {
        let api: Api<APIService> = Api::all(client.clone());
        let patched =
            api.patch("v1.inspection.gpupack.dev", &parameters, &Patch::Merge(fields)).await;
        patched.expect("it is there");
    }
}

/// Removes the objects, so that other scenarios are without them.
pub(crate) async fn remove_objects(client: &Client) {
    manifests::delete(client, "api-service.yaml", &["APIService"]).await;
    manifests::delete(client, "webhook.yaml", &["MutatingWebhookConfiguration"]).await;
    manifests::delete(client, "scheduler.yaml", &["Deployment"]).await;
    let bindings = [
        "RoleBinding",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ];
    manifests::delete(client, "certificates.yaml", &bindings).await;
    remove_filled(client).await;
}

/// Removes what the extender fills, and the Services of this machine.
async fn remove_filled(client: &Client) {
    manifests::delete(client, "certificates.yaml", &["Secret", "ConfigMap"]).await;
    let services: Api<Service> = Api::namespaced(client.clone(), NAMESPACE);
    for name in SERVICES {
        let _absent = services.delete(name, &DeleteParams::default()).await;
    }
}

/// The shipped objects, without anything in them.
pub(crate) async fn empty_objects(client: &Client) {
    remove_filled(client).await;
    for (file, kind) in [
        ("scheduler.yaml", "Deployment"),
        ("api-service.yaml", "APIService"),
        ("webhook.yaml", "MutatingWebhookConfiguration"),
    ] {
        manifests::delete(client, file, &[kind]).await;
    }
    manifests::apply(client, "certificates.yaml", Mode::Keep).await;
    manifests::apply(client, "scheduler.yaml", Mode::Keep).await;
    for name in SERVICES {
        let service = json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"type": "ExternalName", "externalName": "localhost"}});
        let service = serde_json::from_value(service).expect("an object");
        manifests::keep(client, "service", &service).await;
    }
    manifests::apply(client, "api-service.yaml", Mode::Keep).await;
    runtime_classes(client).await;
    for object in manifests::objects("webhook.yaml") {
        if object.types.as_ref().is_some_and(|types| types.kind == "MutatingWebhookConfiguration") {
            manifests::keep(client, "webhook.yaml", &object).await;
        }
    }
}

/// Empties the Secret of the CA, so that the extender makes another one.
pub(crate) async fn empty_ca(client: &Client) {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let fields = Patch::Merge(json!({"data": null}));
    let patched = secrets.patch("gpupack-ca", &PatchParams::default(), &fields).await;
    patched.expect("it is there");
}

fn start_webhook(plane: &ControlPlane, folder: &Path, port: u16) -> Leash {
    let config = plane.work().join("kept-webhook.yaml");
    let settings = json!({"webhook": {"listen": format!("127.0.0.1:{port}"),
        "certificate_file": folder.join("tls.crt"), "key_file": folder.join("tls.key")}});
    std::fs::write(&config, settings.to_string()).expect("the work folder is writable");
    let arguments = ["webhook", "--config", config.to_str().expect("the folder is UTF-8")];
    let arguments = arguments.map(str::to_owned);
    Leash::start("gpupack webhook", &gpupack(), &arguments, &plane.log("kept-webhook"))
}

/// Starts kube-scheduler, and starts it again when its Deployment is.
async fn roll(
    plane: &'static ControlPlane,
    client: Client,
    volumes: Volumes,
    extender: SocketAddr,
    rolls: Arc<Mutex<usize>>,
) {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let mut running: Option<Scheduler> = None;
    let mut last = None;
    loop {
        let deployment = deployments.get("gpupack-scheduler").await.expect("it can be read");
        let template = deployment.spec.and_then(|spec| spec.template.metadata);
        let annotations = template.and_then(|template| template.annotations).unwrap_or_default();
        let wanted = annotations.get(RESTARTED).cloned();
        if last.as_ref() != Some(&wanted) {
            drop(running.take());
            volumes.update(&client).await;
            let plan = SchedulerPlan::second().proving(volumes.scheduler);
            running = Some(Scheduler::start(plane, &client, plan, extender).await);
            last = Some(wanted);
            *rolls.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// How often a log has one of these texts.
pub(crate) fn complaints(log: &PathBuf) -> usize {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let signs =
        ["x509:", "tls: ", "UnknownIssuer", "unknown certificate", "UnknownCA", "BadCertificate"];
    text.lines().filter(|line| signs.iter().any(|sign| line.contains(sign))).count()
}
