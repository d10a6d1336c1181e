//! The body of an admission call: an AdmissionReview of a pod, or of an object with templates of pods.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionReview};
use serde_json::Value;

use crate::config::webhook::{JOBS, TemplatePath};
use crate::request::bounded::outside_texts;
use crate::request::request_error::shown;
use runtime::causes::shown_long;

/// The version and kind of an AdmissionReview that is understood.
const REVIEW: (&str, &str) = ("admission.k8s.io/v1", "AdmissionReview");

/// Most values of a review. Two versions of a pod with 10,000 variables, and the writers of their
/// fields, have fewer. A value may take a hundred times the memory of its text.
const MOST_VALUES: usize = 250_000;

/// Most objects that have fields; two versions of that pod have about 45,000. Each takes at least
/// 700 bytes, even with a text as short as `{"a":0}`.
const MOST_OBJECTS: usize = 50_000;

/// Maximum memory for the values and objects of a review, beside its text, in bytes.
pub const MOST_REVIEW_BYTES: usize = 700 * MOST_OBJECTS + 64 * MOST_VALUES;

/// Most items of a list, except of texts or variables: one container takes two kilobytes.
const MOST_ITEMS: usize = 1_000;

/// Most items of all these lists together: some take half a kilobyte for the text `{}`.
const MOST_IN_LISTS: usize = 40_000;

/// Most variables of all containers in both versions of the pod.
const MOST_VARIABLES: usize = 20_000;

/// Why a body gets no answer: it is not what an API server sends about a pod that can run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReviewFault {
    /// Not the JSON of a review.
    #[error("the body is not an AdmissionReview: {fault}")]
    Json {
        /// The error of the JSON parser.
        fault: String,
    },
    /// More than in any pod that can run.
    #[error("the AdmissionReview has more than {most} {what}: split the pod")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        most: usize,
    },
    #[error(
        "the body is `{kind}` of `{version}`: only AdmissionReview of admission.k8s.io/v1 is supported"
    )]
    Kind { kind: String, version: String },
    /// No request, or a request without a pod.
    #[error("the AdmissionReview has no `{field}`")]
    Missing { field: &'static str },
    /// A resource that has neither pods nor templates.
    #[error(
        "the AdmissionReview is about `{resource}`: only pods, pods/ephemeralcontainers, Jobs and what is in \
         `webhook.templates` are, so correct the rules of the webhook's configuration"
    )]
    Resource { resource: String },
}

impl ReviewFault {
    /// Short name for the log; a closed set.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Json { .. } => "json",
            Self::TooMany { .. } => "too_many",
            Self::Kind { .. } => "kind",
            Self::Missing { .. } => "missing",
            Self::Resource { .. } => "resource",
        }
    }

    pub(crate) fn json(error: serde_json::Error) -> Self {
        Self::Json { fault: shown_long(&error) }
    }
}

/// The request of a review.
pub(crate) enum ReviewRequest<'a> {
    Pod(Box<AdmissionRequest<Pod>>),
    /// About an object with templates of pods, and the paths to them.
    Templates(Box<AdmissionRequest<DynamicObject>>, &'a [TemplatePath]),
}

/// Where objects have templates, by their resource.
pub(crate) type Templates = BTreeMap<String, Vec<TemplatePath>>;

/// The request of a review, where objects of these resources have templates.
pub(crate) fn request<'a>(
    body: &[u8],
    templates: &'a Templates,
) -> Result<ReviewRequest<'a>, ReviewFault> {
    refuse_many_values(body)?;
    let value: Value = serde_json::from_slice(body).map_err(ReviewFault::json)?;
    let (version, kind) = (text_of(&value, "apiVersion"), text_of(&value, "kind"));
    if (version, kind) != REVIEW {
        let (kind, version) = (shown(kind), shown(version));
        return Err(ReviewFault::Kind { kind, version });
    }
    let missing = ReviewFault::Missing { field: "request" };
    let about = value.pointer("/request/resource").ok_or(missing.clone())?;
    let (group, plural) = (text_of(about, "group"), text_of(about, "resource"));
    let resource = format!("{plural}.{group}");
    let paths = templates.get(&resource);
    if (group, plural) != ("", "pods") && paths.is_none() {
        let resource = shown(&format!("{group}/{plural}"));
        return Err(ReviewFault::Resource { resource });
    }
    let object = value.pointer("/request/object").filter(|object| object.is_object());
    let can_be_patched = object.is_none_or(|object| object["metadata"].is_object());
    refuse_long_lists(&value, &mut ReviewCounts::default())?;
    if let Some(paths) = paths {
        let review: AdmissionReview<DynamicObject> =
            serde_json::from_value(value).map_err(ReviewFault::json)?;
        let request = review.try_into().map_err(|_| missing)?;
        return Ok(ReviewRequest::Templates(Box::new(request), paths));
    }
    let review: AdmissionReview<Pod> = serde_json::from_value(value).map_err(ReviewFault::json)?;
    if !can_be_patched {
        return Err(ReviewFault::Missing { field: "request.object.metadata" });
    }
    Ok(ReviewRequest::Pod(Box::new(review.try_into().map_err(|_| missing)?)))
}

/// The text in a field; empty without one.
fn text_of<'a>(object: &'a Value, field: &str) -> &'a str {
    object.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// The configured templates, and those of Jobs.
pub(crate) fn with_jobs(configured: &Templates) -> Templates {
    let mut all = configured.clone();
    all.insert(JOBS.to_owned(), vec![TemplatePath::of_jobs()]);
    all
}

/// Refuses a body that would take far more memory as values than as text.
fn refuse_many_values(body: &[u8]) -> Result<(), ReviewFault> {
    let (mut values, mut objects, mut before) = (0, 0, 0);
    for byte in outside_texts(body).filter(|byte| !byte.is_ascii_whitespace()) {
        // Each value except the first follows one of these.
        values += usize::from(matches!(byte, b'{' | b'[' | b','));
        objects += usize::from(before == b'{' && byte != b'}');
        if values > MOST_VALUES {
            return Err(ReviewFault::TooMany { what: "values", most: MOST_VALUES });
        }
        if objects > MOST_OBJECTS {
            return Err(ReviewFault::TooMany { what: "objects", most: MOST_OBJECTS });
        }
        before = byte;
    }
    Ok(())
}

/// What was counted in a review so far.
#[derive(Default)]
struct ReviewCounts {
    variables: usize,
    in_lists: usize,
}

/// Refuses a body that would take far more memory as a pod than as text.
fn refuse_long_lists(value: &Value, counted: &mut ReviewCounts) -> Result<(), ReviewFault> {
    match value {
        Value::Object(fields) => fields.iter().try_for_each(|(name, field)| {
            let items = field.as_array().map_or(&[][..], Vec::as_slice);
            if name == "env" {
                counted.variables += items.len();
            } else {
                let items = items.iter().filter(|item| !item.is_string()).count();
                counted.in_lists += items;
                if items > MOST_ITEMS {
                    return Err(ReviewFault::TooMany { what: "items in a list", most: MOST_ITEMS });
                }
            }
            if counted.variables > MOST_VARIABLES {
                return Err(ReviewFault::TooMany { what: "variables", most: MOST_VARIABLES });
            }
            if counted.in_lists > MOST_IN_LISTS {
                return Err(ReviewFault::TooMany { what: "items in lists", most: MOST_IN_LISTS });
            }
            refuse_long_lists(field, counted)
        }),
        Value::Array(items) => items.iter().try_for_each(|item| refuse_long_lists(item, counted)),
        _ => Ok(()),
    }
}

/// Namespace and name of the object, or the prefix of a name that the API server will complete.
pub(crate) fn name_of<K: Resource>(request: &AdmissionRequest<K>, metadata: &ObjectMeta) -> String {
    let name = metadata.name.as_deref().or(metadata.generate_name.as_deref());
    let namespace = request.namespace.as_deref().unwrap_or_default();
    format!("{}/{}", shown(namespace), shown(name.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(body: &[u8]) -> Result<(), ReviewFault> {
        super::request(body, &Templates::new()).map(|_| ())
    }

    fn review(pod: &Value) -> String {
        json!({
            "apiVersion": REVIEW.0, "kind": REVIEW.1,
            "request": {
                "uid": "1", "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "operation": "UPDATE", "name": "p", "namespace": "n", "userInfo": {},
                "object": pod, "oldObject": pod, "dryRun": false,
            },
        })
        .to_string()
    }

    #[test]
    fn a_parsed_review_uses_far_less_memory_than_its_text() {
        let spec = |containers: Value| json!({"metadata": {"name": "p"}, "spec": {"containers": containers}});
        let many = |item: Value, count: usize| Value::from(vec![item; count]);
        let variables =
            |count| spec(json!([{"name": "c", "env": many(json!({"name": "A"}), count)}]));
        for (body, part) in [
            (format!("[{}0]", "0,".repeat(4 << 20)), "250000 values"),
            (format!("{{\"a\":[{}0]}}", "{},".repeat(200_000)), "250000 values"),
            (review(&spec(many(json!({}), 1_001))), "1000 items in a list"),
            (
                review(
                    &json!({"metadata": {}, "spec": {"containers": [], "volumes": many(json!({}), 1_001)}}),
                ),
                "1000 items",
            ),
            (review(&variables(10_001)), "20000 variables"),
            (format!("[{}0]", "{ \"a\" :0},".repeat(50_001)), "50000 objects"),
            (format!("[{}]", "{\"a\":".repeat(100_000)), "50000 objects"),
            (
                review(
                    &json!({"metadata": {}, "spec": {"containers": [], "volumes": many(json!({"projected": {"sources": many(json!({}), 1_000)}}), 20)}}),
                ),
                "40000 items in lists",
            ),
        ] {
            let fault = request(body.as_bytes()).unwrap_err().to_string();
            assert!(fault.contains(part), "{part}: {fault}");
        }
        assert!(request(review(&spec(many(json!({"name": "c"}), 1_000))).as_bytes()).is_ok());
        assert!(request(review(&variables(10_000)).as_bytes()).is_ok());
        let empty = format!("[{}0]", "{ },".repeat(100_000));
        let fault = request(empty.as_bytes()).unwrap_err();
        assert!(
            matches!(fault, ReviewFault::Kind { .. }),
            "an empty object uses little memory: {fault}"
        );
    }

    #[test]
    fn a_pod_without_metadata_is_refused_as_no_patch_could_be_applied() {
        let spec = json!({"spec": {"containers": [{"name": "c"}]}, "metadata": null});
        let missing = ReviewFault::Missing { field: "request.object.metadata" };
        assert_eq!(request(review(&spec).as_bytes()).unwrap_err(), missing);
    }

    #[test]
    fn a_pod_of_the_largest_size_in_kubernetes_is_read() {
        // 500 containers with 20 variables and arguments each, and writers of fields: about 2 MiB.
        let names: Vec<String> = (0..20).map(|at| format!("VARIABLE_{at:04}")).collect();
        let wrote = names.iter().map(|name| {
            (format!("k:{{\"name\":\"{name}\"}}"), json!({".": {}, "f:name": {}, "f:value": {}}))
        });
        let wrote: serde_json::Map<String, Value> = wrote.collect();
        let env: Vec<Value> =
            names.iter().map(|name| json!({"name": name, "value": "x".repeat(100)})).collect();
        let containers: Vec<Value> = (0..500)
            .map(|at| json!({"name": format!("c-{at}"), "image": "x", "env": env, "args": names}))
            .collect();
        let owned: serde_json::Map<String, Value> = (0..500)
            .map(|at| (format!("k:{{\"name\":\"c-{at}\"}}"), json!({"f:env": wrote})))
            .collect();
        let pod = json!({
            "metadata": {"name": "p", "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {"f:containers": owned}}}]},
            "spec": {"containers": containers},
        });
        let body = review(&pod);
        assert!(body.len() > 4 << 20, "{}", body.len());
        assert_eq!(request(body.as_bytes()), Ok(()));
    }
}
