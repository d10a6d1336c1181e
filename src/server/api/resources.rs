//! The queries as a resource of the API server (an `APIService`): it knows its users by whatever they
//! log in with, which no other way brings here.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::http::respond::json;
use kube_api::identity::people::{GPUS, GROUP, RESOURCE};
use kube_api::protocol::messages::to_json;

/// The path of the API group's version.
pub(crate) const VERSION_PATH: &str = "/apis/inspection.gpupack.dev/v1";

/// The path of the API group.
pub const GROUP_PATH: &str = "/apis/inspection.gpupack.dev";

/// The path of the resource.
pub const RESOURCE_PATH: &str = "/apis/inspection.gpupack.dev/v1/cluster";

/// Where the page is below it, whose addresses are relative.
pub(crate) const PAGE_PATH: &str = "/apis/inspection.gpupack.dev/v1/cluster/";

/// What the group has: see `APIResourceList` of
/// [k8s.io/apimachinery/pkg/apis/meta/v1](https://pkg.go.dev/k8s.io/apimachinery/pkg/apis/meta/v1).
/// Nothing of it can be listed, so no controller of the cluster does.
pub(crate) async fn discovery() -> Response {
    let resource = json!({"name": RESOURCE, "singularName": RESOURCE, "namespaced": false,
        "kind": "Cluster", "verbs": ["get"]});
    let gpus = json!({"name": GPUS, "singularName": "gpu", "namespaced": false, "kind": "Gpu",
        "verbs": ["update"]});
    let list = json!({"kind": "APIResourceList", "apiVersion": "v1",
        "groupVersion": format!("{GROUP}/v1"), "resources": [resource, gpus]});
    json(StatusCode::OK, to_json(&list))
}

/// To the page, for a browser that leaves the final slash out.
pub(crate) async fn to_page() -> Response {
    (StatusCode::PERMANENT_REDIRECT, [(header::LOCATION, "cluster/")]).into_response()
}
