//! The files of `deploy/`, sent to the API server unchanged.

use std::path::Path;

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

/// Whether the API server keeps what it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Validated, defaulted and admitted, but not stored.
    DryRun,
    /// Kept.
    Keep,
}

/// The objects of one file.
pub(crate) fn objects(file: &str) -> Vec<DynamicObject> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(file);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(DynamicObject::deserialize)
        .collect::<Result<_, _>>()
        .unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Applies all objects of a file on the server's side, refusing fields that the API does not know.
pub(crate) async fn apply(client: &Client, file: &str, mode: Mode) -> usize {
    let objects = objects(file);
    for object in &objects {
        apply_object(client, file, object, mode).await;
    }
    objects.len()
}

/// The shipped agent as the patch in `file` would make it. It must be there already.
pub(crate) async fn patch_agent(client: &Client, file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(file);
    let text = std::fs::read_to_string(path).expect("a shipped file");
    let patch: Value = serde_yaml_ng::from_str(&text).expect("a patch is one document");
    let api: Api<DaemonSet> = Api::namespaced(client.clone(), "gpupack-agents");
    let parameters = PatchParams { dry_run: true, ..PatchParams::default() }.validation_strict();
    let patched = api.patch("gpupack-agent", &parameters, &Patch::Strategic(patch)).await;
    json!(patched.unwrap_or_else(|error| panic!("{file}: {error}")))
}

/// Applies one object, made from a file.
pub(crate) async fn keep(client: &Client, file: &str, object: &DynamicObject) {
    apply_object(client, file, object, Mode::Keep).await;
}

/// Deletes the objects of a file of these kinds, as far as they are there.
pub(crate) async fn delete(client: &Client, file: &str, kinds: &[&str]) {
    for object in objects(file) {
        let kind = object.types.as_ref().map_or("", |types| types.kind.as_str());
        if kinds.contains(&kind) {
            let _absent =
                api_of(client, &object).delete(&object.name_any(), &DeleteParams::default()).await;
        }
    }
}

fn api_of(client: &Client, object: &DynamicObject) -> Api<DynamicObject> {
    let types = object.types.as_ref().expect("every object names its kind");
    let (group, version) =
        types.api_version.split_once('/').unwrap_or(("", types.api_version.as_str()));
    let kind = GroupVersionKind::gvk(group, version, &types.kind);
    let resource = ApiResource::from_gvk(&kind);
    match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    }
}

/// Applies one object, made from a file, or answers why it is not accepted.
pub(crate) async fn accepted(client: &Client, object: &DynamicObject) -> kube::Result<()> {
    sent(client, object, Mode::Keep).await
}

async fn apply_object(client: &Client, file: &str, object: &DynamicObject, mode: Mode) {
    let kind = &object.types.as_ref().expect("every object names its kind").kind;
    let applied = sent(client, object, mode).await;
    applied.unwrap_or_else(|error| panic!("{file}: {kind} {}: {error}", object.name_any()));
}

async fn sent(client: &Client, object: &DynamicObject, mode: Mode) -> kube::Result<()> {
    let api = api_of(client, object);
    let mut parameters = PatchParams::apply("testbed").validation_strict();
    parameters.dry_run = mode == Mode::DryRun;
    api.patch(&object.name_any(), &parameters, &Patch::Apply(object)).await.map(drop)
}
