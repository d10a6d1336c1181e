//! The body of a call for admission: an AdmissionReview of a pod.

use k8s_openapi::api::core::v1::Pod;
use kube::core::admission::{AdmissionRequest, AdmissionReview};
use serde_json::Value;

use crate::cluster::request_error::shown;

/// What an AdmissionReview that is understood calls itself.
const REVIEW: (&str, &str) = ("admission.k8s.io/v1", "AdmissionReview");

/// Why a body is not answered: the caller is no API server, or is configured for other objects.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReviewFault {
    /// Not the JSON of a review.
    #[error("the body is no AdmissionReview: {fault}")]
    Json {
        /// What the JSON parser says.
        fault: String,
    },
    /// Another kind or version.
    #[error(
        "the body is `{kind}` of `{version}`: AdmissionReview of admission.k8s.io/v1 is understood"
    )]
    Kind {
        /// Its kind.
        kind: String,
        /// Its version.
        version: String,
    },
    /// No request, or no pod in it.
    #[error("the AdmissionReview has no `{field}`")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// Another resource than pods.
    #[error(
        "the AdmissionReview is about `{resource}`: pods and pods/ephemeralcontainers are answered, so \
         correct the rules of the webhook's configuration"
    )]
    Resource {
        /// Resource and subresource.
        resource: String,
    },
}

/// The request of a review about pods.
pub(super) fn request(body: &[u8]) -> Result<AdmissionRequest<Pod>, ReviewFault> {
    let json =
        |error: serde_json::Error| ReviewFault::Json { fault: shown_long(&error.to_string()) };
    let value: Value = serde_json::from_slice(body).map_err(json)?;
    let text = |field: &str| value.get(field).and_then(Value::as_str).unwrap_or_default();
    if (text("apiVersion"), text("kind")) != REVIEW {
        let (kind, version) = (shown(text("kind")), shown(text("apiVersion")));
        return Err(ReviewFault::Kind { kind, version });
    }
    let missing = ReviewFault::Missing { field: "request" };
    let about = value.pointer("/request/resource").ok_or(missing.clone())?;
    let part = |field| about.get(field).and_then(Value::as_str).unwrap_or_default();
    if (part("group"), part("resource")) != ("", "pods") {
        let resource = shown(&format!("{}/{}", part("group"), part("resource")));
        return Err(ReviewFault::Resource { resource });
    }
    let review: AdmissionReview<Pod> = serde_json::from_value(value).map_err(json)?;
    review.try_into().map_err(|_| missing)
}

/// Namespace and name of the pod, or the prefix of a name that is still to be made.
pub(super) fn name_of(request: &AdmissionRequest<Pod>, pod: &Pod) -> String {
    let name = pod.metadata.name.as_deref().or(pod.metadata.generate_name.as_deref());
    let namespace = request.namespace.as_deref().unwrap_or_default();
    format!("{}/{}", shown(namespace), shown(name.unwrap_or_default()))
}

/// A message of the JSON parser, which may quote the body.
fn shown_long(text: &str) -> String {
    text.chars().take(200).flat_map(char::escape_debug).collect()
}
