//! `gpupack webhook` as a process, and the shipped configuration that sends pods to it.
//!
//! Only what names a place is changed: the service becomes an address of the loopback interface.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, PostParams};
use serde_json::{Value, json};

use crate::authority::Authority;
use crate::clock;
use crate::cluster::Cluster;
use crate::control_plane::{ControlPlane, free_ports};
use crate::extender::gpupack;
use crate::leash::Leash;
use crate::manifests::{self, Mode, objects};
use crate::pods::PodPlan;

/// How long the API server may take until it follows a new configuration.
const LIMIT: Duration = Duration::from_secs(30);

/// A running webhook, to which the API server sends pods.
pub(crate) struct Webhook {
    process: Leash,
    port: u16,
}

impl Webhook {
    /// Starts it, gives the API server the shipped configuration, and waits until that is followed.
    /// `settings` are those of the file that extender and webhook share.
    pub(crate) async fn start(plane: &ControlPlane, cluster: &Cluster, settings: Value) -> Self {
        let [port] = free_ports();
        let authority = Authority::new();
        let pair = authority.pair("127.0.0.1");
        let file = |name: &str, text: &str| {
            let path = plane.work().join(name);
            std::fs::write(&path, text).expect("the work folder is writable");
            path
        };
        let mut settings = settings;
        let section = &mut settings["webhook"];
        section["listen"] = format!("127.0.0.1:{port}").into();
        section["certificate_file"] = text_of(&file("webhook.crt", &pair.certificate));
        section["key_file"] = text_of(&file("webhook.key", &pair.key));
        let takes_over = section["take_over_whole_gpus"] == true;
        // JSON is YAML.
        let config = file("webhook.yaml", &settings.to_string());
        let arguments = ["webhook", "--config", config.to_str().expect("the folder is UTF-8")];
        let arguments = arguments.map(str::to_owned);
        let log = plane.log("webhook");
        let process = Leash::start("gpupack webhook", &gpupack(), &arguments, &log);
        runtime_classes(&cluster.client).await;
        let mut configured = configuration(port, &authority.certificate);
        if takes_over {
            let of_pods = condition_of_take_over();
            let of_templates = of_pods.replace("object.", "object.spec.template.");
            for (index, more) in [of_pods, of_templates].into_iter().enumerate() {
                let condition =
                    &mut configured[0].data["webhooks"][index]["matchConditions"][0]["expression"];
                let shipped = condition.as_str().expect("an expression");
                *condition = format!("{more} {shipped}").into();
            }
        }
        // As the chart writes them.
        let kinds = settings["webhook"]["templates"].as_object();
        for kind in kinds.into_iter().flat_map(|kinds| kinds.keys()) {
            let (plural, group) = kind.split_once('.').expect("a resource with its group");
            let rules = configured[0].data["webhooks"][1]["rules"].as_array_mut();
            rules.expect("a list of rules").push(json!({
                "apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"],
                "resources": [plural], "scope": "Namespaced",
            }));
        }
        for object in &configured {
            manifests::keep(&cluster.client, "webhook.yaml", object).await;
        }
        let webhook = Self { process, port };
        webhook.followed(cluster).await;
        webhook
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// Waits until the webhook itself rejects a bad request.
    async fn followed(&self, cluster: &Cluster) {
        let started = clock::now();
        let bad = PodPlan::fraction("probe", "2").for_scheduler("default-scheduler").to_pod();
        loop {
            let refused = dry_run(&cluster.pods(), &bad).await.map(drop);
            if refused.as_ref().is_err_and(|error| error.contains("gpu-fraction")) {
                return;
            }
            assert!(started.elapsed() < LIMIT, "pods are not sent to the webhook: {refused:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Deletes the webhook's configuration, and waits until the API server no longer calls it.
pub(crate) async fn unconfigure(cluster: &Cluster) {
    let webhooks: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    let deleted = webhooks.delete("gpupack", &DeleteParams::default()).await;
    deleted.expect("it was configured");
    until_admitted(cluster, &PodPlan::fraction("probe", "2")).await;
}

/// Waits until pods pass that the webhook and the policies would reject: the API server follows
/// a removed configuration a moment later.
pub(crate) async fn until_none_refuses(cluster: &Cluster) {
    let bad = PodPlan::fraction("probe", "2").annotated("placed.gpupack.dev/fence", "1");
    until_admitted(cluster, &bad).await;
}

async fn until_admitted(cluster: &Cluster, bad: &PodPlan) {
    let started = clock::now();
    while let Err(refused) = dry_run(&cluster.pods(), &bad.to_pod()).await {
        assert!(started.elapsed() < LIMIT, "such a pod is still refused: {refused}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Applies `policies.yaml` and waits until the API server follows it.
pub(crate) async fn policies(cluster: &Cluster) {
    manifests::apply(&cluster.client, "policies.yaml", Mode::Keep).await;
    let started = clock::now();
    // The webhook lets this key pass, so that it is the policy that refuses it.
    let forged = PodPlan::new("probe").annotated("placed.gpupack.dev/fence", "1").to_pod();
    loop {
        let refused = dry_run(&cluster.pods(), &forged).await.map(drop);
        if refused.as_ref().is_err_and(|error| error.contains("gpupack-placement")) {
            return;
        }
        assert!(started.elapsed() < LIMIT, "the policies are not in force: {refused:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Creates the pod without keeping it; the error is what a user would read.
pub(crate) async fn dry_run(api: &Api<Pod>, pod: &Pod) -> Result<Pod, String> {
    let parameters = PostParams { dry_run: true, ..PostParams::default() };
    api.create(&parameters, pod).await.map_err(|error| reported(&error))
}

/// The words of the API server.
pub(crate) fn reported(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => format!("{other:?}"),
    }
}

/// The objects of `webhook.yaml`, with the address of this webhook.
fn configuration(port: u16, authority: &str) -> Vec<DynamicObject> {
    let is_reported = |object: &DynamicObject| {
        let types = object.types.as_ref().expect("every object names its kind");
        types.api_version.starts_with("admissionregistration.k8s.io/")
    };
    let mut reported: Vec<DynamicObject> =
        objects("webhook.yaml").into_iter().filter(is_reported).collect();
    let url = format!("https://127.0.0.1:{port}/webhook");
    let webhooks = reported[0].data["webhooks"].as_array_mut().expect("a list of webhooks");
    assert_eq!(webhooks.len(), 2, "for pods and for templates");
    for webhook in webhooks {
        let client = &mut webhook["clientConfig"];
        assert_eq!(client["service"]["path"], "/webhook", "the path that is served");
        *client = json!({"url": url, "caBundle": base64(authority.as_bytes())});
    }
    reported
}

/// The line that `webhook.yaml` has as a comment for those who take whole GPUs over: what stands
/// indented at the end of the file.
fn condition_of_take_over() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/webhook.yaml");
    let text = std::fs::read_to_string(path).expect("the file is shipped");
    let lines = text.lines().filter_map(|line| line.strip_prefix("    #     "));
    let condition = lines.collect::<Vec<_>>().join(" ");
    assert!(condition.ends_with("||"), "the condition goes before the others: {condition}");
    condition
}

/// The RuntimeClass that the GPU Operator brings (without it the API server refuses every GPU pod), another
/// one of the same runtime, and one of another runtime.
pub(crate) async fn runtime_classes(client: &Client) {
    for (name, handler) in [("nvidia", "nvidia"), ("fast", "nvidia"), ("kata", "kata")] {
        let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
            "metadata": {"name": name}, "handler": handler});
        let class: RuntimeClass = serde_json::from_value(class).expect("a valid class object");
        match Api::all(client.clone()).create(&PostParams::default(), &class).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => panic!("cannot create the RuntimeClass: {error}"),
        }
    }
}

fn text_of(path: &Path) -> Value {
    path.to_str().expect("the target folder is UTF-8").into()
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let byte = |at: usize| u32::from(part.get(at).copied().unwrap_or(0));
        let word = byte(0) << 16 | byte(1) << 8 | byte(2);
        for (at, shift) in [18, 12, 6, 0].into_iter().enumerate() {
            let is_padding = at > part.len();
            let letter = char::from(LETTERS[(word >> shift & 63) as usize]);
            text.push(if is_padding { '=' } else { letter });
        }
    }
    text
}
