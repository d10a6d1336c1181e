//! What the Helm chart renders is what an API server takes; and Helm installs, upgrades and removes it.

use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::runtime::conditions::is_crd_established;
use kube::runtime::wait::await_condition;
use kube::{Client, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::binaries;
use crate::chart::{file, folder, helm, missing, namespace, rendered, sets};
use crate::control_plane::{ControlPlane, Identity};
use crate::manifests::{Mode, send};
use crate::testbed::{figure, scenario_with};

/// Set where a skipped scenario of the chart is a failure.
const REQUIRED: &str = "GPUPACK_E2E_REQUIRED";

/// Where the kinds of the Prometheus operator and of cert-manager are described.
const MODULES: [(&str, &str, &str); 2] = [
    (
        "github.com/prometheus-operator/prometheus-operator",
        "v0.85.0",
        "example/prometheus-operator-crd",
    ),
    ("github.com/cert-manager/cert-manager", "v1.21.2", "deploy/crds"),
];

/// Those of them that the chart uses.
const KINDS: [&str; 5] =
    ["servicemonitors", "podmonitors", "prometheusrules", "certificates", "issuers"];

fn has_helm(_plane: &ControlPlane) -> Result<(), String> {
    missing().map_or(Ok(()), |why| Err(why.to_owned()))
}

#[test]
fn the_api_server_accepts_what_the_chart_renders() {
    let prepare = |plane: &ControlPlane| {
        has_helm(plane)?;
        let described = MODULES.map(|(module, version, below)| {
            binaries::module(&format!("{module}@{version}")).map(|folder| folder.join(below))
        });
        described.into_iter().collect::<Result<Vec<_>, _>>()
    };
    scenario_with("chart", REQUIRED, prepare, |bed, folders| async move {
        let client = &bed.cluster.client;
        let mut established = 0;
        for folder in folders {
            established += define(client, &folder).await;
        }
        assert_eq!(established, KINDS.len());
        for name in ["other", "other-agents"] {
            namespace_called(client, name).await;
        }
        for set in sets() {
            let objects = rendered(&set, &[]).unwrap_or_else(|fault| panic!("{set}: {fault}"));
            for object in &objects {
                let object: DynamicObject =
                    serde_json::from_value(object.clone()).expect("an object");
                let sent = send(client, &object, Mode::DryRun).await;
                sent.unwrap_or_else(|error| panic!("{set}: {}: {error}", object.name_any()));
            }
            let (count, place) = (objects.len(), namespace(&set));
            figure(bed.name, &format!("{set}: {count} objects accepted in {place} in a dry run"));
        }
    });
}

/// Defines the kinds of a folder that the chart uses.
async fn define(client: &Client, folder: &std::path::Path) -> usize {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let mut count = 0;
    for file in std::fs::read_dir(folder).expect("the module has that folder") {
        let path = file.expect("it can be listed").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if !KINDS.iter().any(|kind| name.ends_with(&format!("_{kind}"))) {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("it can be read");
        let object: DynamicObject = serde_yaml_ng::from_str(&text).expect("one document");
        let parameters = PatchParams::apply("testbed").force();
        let name = object.name_any();
        let sent = api.patch(&name, &parameters, &Patch::Apply(&object)).await;
        sent.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        await_condition(api.clone(), &name, is_crd_established()).await.expect("it is served");
        count += 1;
    }
    count
}

async fn namespace_called(client: &Client, name: &str) {
    let api: Api<Namespace> = Api::all(client.clone());
    let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    let sent = api.patch(name, &PatchParams::apply("testbed"), &Patch::Apply(&object)).await;
    sent.expect("a namespace can be made");
}

/// Helm at the API server of this plane.
fn at(plane: &ControlPlane, arguments: &[&str]) -> Result<String, String> {
    let kubeconfig = plane.kubeconfig(Identity::Admin);
    let kubeconfig = kubeconfig.to_str().expect("the target folder is UTF-8");
    let fixed = ["--kubeconfig", kubeconfig, "--namespace", "gpu-system"];
    helm(&[arguments, &fixed].concat())
}

/// Installs or upgrades with the values of a set and more.
fn install(plane: &ControlPlane, verb: &str, set: &str, more: &[&str]) {
    let (chart, values) = (folder(), file(set));
    let chart = chart.to_str().expect("the repository's path is UTF-8");
    let arguments = [&[verb, "gpupack", chart, "--values", &values][..], more].concat();
    at(plane, &arguments).unwrap_or_else(|fault| panic!("{verb} {set}: {fault}"));
}

async fn data_of(client: &Client, name: &str) -> Value {
    let api: Api<Secret> = Api::namespaced(client.clone(), "gpu-system");
    json!(api.get(name).await.expect("the Secret is there").data)
}

/// A patch of an object's data, as the extender makes it.
async fn fill<K>(client: &Client, namespace: &str, name: &str, data: Value)
where
    K: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + for<'de> Deserialize<'de>,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let patch = Patch::Merge(json!({ "data": data }));
    api.patch(name, &PatchParams::default(), &patch).await.expect("it can be filled");
}

async fn configured_policy(client: &Client) -> String {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), "gpu-system");
    let map = api.get("gpupack").await.expect("the configuration is there");
    let text = map.data.expect("it has data").remove("gpupack.yaml").expect("the file");
    text.lines().find(|line| line.starts_with("policy:")).expect("a policy").to_owned()
}

#[test]
fn helm_installs_upgrades_rolls_back_and_removes() {
    scenario_with("chart-life", REQUIRED, has_helm, |bed, ()| async move {
        let plane = bed.plane.start_beside("chart-life").await;
        let client = plane.client(Identity::Admin).await;
        certificates_of_the_extender_are_kept(&plane, &client).await;
        figure(bed.name, "an upgrade and a rollback leave what the extender wrote into Secrets");
        nothing_is_left(&plane, &client).await;
        figure(bed.name, "uninstall leaves no object of the chart in its namespace");
        certificates_of_helm_are_kept(&plane, &client).await;
        figure(bed.name, "an upgrade keeps certificates that Helm made");
    });
}

async fn certificates_of_the_extender_are_kept(plane: &ControlPlane, client: &Client) {
    install(plane, "install", "default", &["--create-namespace"]);
    let certificates = json!({"tls.crt": "Y2VydA==", "tls.key": "a2V5", "ca.crt": "Y2E="});
    for name in ["gpupack-extender-tls", "gpupack-scheduler-tls", "gpupack-webhook-tls"] {
        assert_eq!(data_of(client, name).await, Value::Null, "made empty");
        fill::<Secret>(client, "gpu-system", name, certificates.clone()).await;
    }
    fill::<ConfigMap>(client, "gpupack-agents", "gpupack-ca", json!({"ca.crt": "ca"})).await;

    install(plane, "upgrade", "default", &["--set", "config.policy=spread"]);
    assert_eq!(configured_policy(client).await, "policy: spread");
    at(plane, &["rollback", "gpupack", "1"]).expect("the first revision is known");
    assert_eq!(configured_policy(client).await, "policy: fragmentation");
    assert_eq!(data_of(client, "gpupack-extender-tls").await, certificates);
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "gpupack-agents");
    let ca = maps.get("gpupack-ca").await.expect("it is there").data;
    assert_eq!(json!(ca), json!({"ca.crt": "ca"}));
}

async fn nothing_is_left(plane: &ControlPlane, client: &Client) {
    at(plane, &["uninstall", "gpupack"]).expect("it can be removed");
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "gpu-system");
    let left = secrets.list(&kube::api::ListParams::default()).await.expect("a list");
    assert_eq!(left.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), [""; 0]);
    // There is no controller that would end the namespace.
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let mut ending = namespaces.get("gpupack-agents").await.expect("it is there");
    ending.spec.get_or_insert_default().finalizers = None;
    let now = PostParams::default();
    let ended = namespaces.replace_subresource("finalize", "gpupack-agents", &now, &ending).await;
    ended.expect("it can be ended");
}

async fn certificates_of_helm_are_kept(plane: &ControlPlane, client: &Client) {
    install(plane, "install", "helm-certificates", &["--create-namespace"]);
    let before = data_of(client, "gpupack-extender-tls").await;
    assert!(before["tls.key"].is_string(), "it has a key");
    let more = ["--set", "config.policy=spread"];
    install(plane, "upgrade", "helm-certificates", &more);
    assert_eq!(configured_policy(client).await, "policy: spread");
    assert_eq!(data_of(client, "gpupack-extender-tls").await, before);
}
