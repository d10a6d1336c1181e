//! The files of `deploy/` and what the chart renders, sent to the API server unchanged.

use std::path::Path;

use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};
use serde::Deserialize;

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

/// Whether the API server takes this object, and keeps it in that mode.
///
/// # Errors
///
/// What the API server says.
pub(crate) async fn send(client: &Client, object: &DynamicObject, mode: Mode) -> kube::Result<()> {
    let mut parameters = PatchParams::apply("testbed").validation_strict();
    parameters.dry_run = mode == Mode::DryRun;
    // Objects that another scenario left here are not what is tried.
    parameters.force = mode == Mode::DryRun;
    let (api, name) = (api_of(client, object), object.name_any());
    api.patch(&name, &parameters, &Patch::Apply(object)).await.map(drop)
}

async fn apply_object(client: &Client, file: &str, object: &DynamicObject, mode: Mode) {
    let name = object.name_any();
    let kind = object.types.as_ref().map_or("", |types| types.kind.as_str());
    let applied = send(client, object, mode).await;
    applied.unwrap_or_else(|error| panic!("{file}: {kind} {name}: {error}"));
}
