//! Reads objects of a cluster that may be absent, forbidden, huge or of another form, for commands that
//! say what they found.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::{Request, StatusCode};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::base::connect::{ApiServerArgs, said};
use crate::base::failure::Failure;
use runtime::causes::{shown_long, with_causes};
use wire::ids::is_name;

/// Objects per page, the same as `kubectl` uses.
const PAGE: usize = 500;

/// Most pages of one list: 100,000 objects.
const MOST_PAGES: usize = 200;

/// Largest answer that is read; a page of 500 nodes has about 15 MB.
const MAX_BODY_BYTES: usize = 128 << 20;

/// Most characters that are kept of a message of the API server.
const MESSAGE: usize = 400;

/// Why something of the cluster is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    /// The API server has no such object, or no such resource.
    Absent,
    /// The user has not this right.
    Forbidden(String),
    /// No answer, or one of another form.
    Failed(String),
}

/// What was read, or why it was not.
pub(crate) type Read<T> = Result<T, Unread>;

/// An object, or with no name a list of objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObjectPath {
    /// API group; empty for the core.
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) resource: &'static str,
    /// Namespace; `None` for all, and for objects that have none.
    pub(crate) namespace: Option<String>,
    /// Name; `None` for a list.
    pub(crate) name: Option<String>,
}

impl ObjectPath {
    /// All objects of a resource.
    pub(crate) const fn all(
        group: &'static str,
        version: &'static str,
        resource: &'static str,
    ) -> Self {
        Self { group, version, resource, namespace: None, name: None }
    }

    /// The same in one namespace.
    pub(crate) fn within(&self, namespace: &str) -> Self {
        Self { namespace: Some(namespace.to_owned()), ..self.clone() }
    }

    /// The one of this name.
    pub(crate) fn named(&self, name: &str) -> Self {
        Self { name: Some(name.to_owned()), ..self.clone() }
    }

    /// What the user does with it.
    pub(crate) fn verb(&self) -> &'static str {
        if self.name.is_some() { "get" } else { "list" }
    }

    /// The right that it needs, in words.
    pub(crate) fn right(&self) -> String {
        let group = if self.group.is_empty() { "" } else { "." };
        let place = match &self.namespace {
            Some(namespace) => format!(" in namespace {namespace}"),
            None => String::new(),
        };
        let name = self.name.as_ref().map_or(String::new(), |name| format!(" {name}"));
        format!("{} {}{group}{}{name}{place}", self.verb(), self.resource, self.group)
    }

    /// Its path, unless it has a name that no object has.
    fn path(&self) -> Read<String> {
        let names = self.namespace.iter().chain(&self.name);
        if let Some(odd) = names.into_iter().find(|name| !is_name(name)) {
            let odd: String = odd.chars().take(80).collect();
            return Err(Unread::Failed(format!("`{odd}` is no valid name")));
        }
        let root = match self.group {
            "" => format!("/api/{}", self.version),
            group => format!("/apis/{group}/{}", self.version),
        };
        let place = match &self.namespace {
            Some(namespace) => format!("/namespaces/{namespace}"),
            None => String::new(),
        };
        let name = self.name.as_ref().map_or(String::new(), |name| format!("/{name}"));
        Ok(format!("{root}{place}/{}{name}", self.resource))
    }
}

/// A page of a list.
#[derive(Deserialize)]
struct Page<T> {
    #[serde(default)]
    metadata: PageMetadata,
    #[serde(default = "Vec::new")]
    items: Vec<T>,
}

#[derive(Default, Deserialize)]
struct PageMetadata {
    #[serde(rename = "continue")]
    more: Option<String>,
}

/// An answer of the API server to a write that it did not keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReviewAnswer {
    /// It would do so, with this result.
    Accepted(Box<Value>),
    /// It would not, with these words.
    Refused(String),
}

/// Reads through one client.
pub(crate) struct Reader {
    client: kube::Client,
    timeout: Duration,
}

impl Reader {
    /// A reader of the API server that the flags name, which has answered and knows the user.
    ///
    /// # Errors
    /// A kubeconfig that cannot be used, no answer, or a user that is not known.
    pub(crate) async fn connected(args: &ApiServerArgs) -> Result<Self, Failure> {
        let (client, address) = args.client().await?;
        let reader = Self { client, timeout: args.timeout() };
        match reader.answers().await {
            Ok(true) | Err(Unread::Absent) => Ok(reader),
            Ok(false) => Err(Failure::other(format!(
                "what answers at {address} is no API server of Kubernetes: see the address in the kubeconfig"
            ))),
            Err(Unread::Failed(why)) => Err(Failure::unreachable(format!(
                "cannot reach the API server at {address}: {why}"
            ))),
            Err(Unread::Forbidden(why)) => Err(Failure::other(format!(
                "the API server does not know the user of the kubeconfig ({why}): log in again"
            ))),
        }
    }

    /// Whether what answers is an API server: it says its version, or refuses to. It must know the user.
    ///
    /// # Errors
    /// [`Unread::Failed`] without an answer, [`Unread::Forbidden`] for a user that it does not know.
    async fn answers(&self) -> Read<bool> {
        match self.exchange("GET", "/version", Vec::new()).await? {
            (StatusCode::UNAUTHORIZED, body) => {
                Err(Unread::Forbidden(message(StatusCode::UNAUTHORIZED, &body)))
            }
            (status, body) if status.is_success() => {
                let said: Option<Value> = serde_json::from_slice(&body).ok();
                Ok(said.is_some_and(|said| said["gitVersion"].is_string()))
            }
            _ => Ok(true),
        }
    }

    /// What is at a path that is no object.
    pub(crate) async fn path<T: DeserializeOwned>(&self, path: &str) -> Read<T> {
        let (status, body) = self.exchange("GET", path, Vec::new()).await?;
        decoded(status, &body, &format!("get {path}"))
    }

    /// An object.
    pub(crate) async fn object<T: DeserializeOwned>(&self, target: &ObjectPath) -> Read<T> {
        let (status, body) = self.exchange("GET", &target.path()?, Vec::new()).await?;
        decoded(status, &body, &target.right())
    }

    /// All objects of a list that fit `query` (`&labelSelector=…`, or empty for all), each as `keep` makes
    /// it: of large objects only a part is kept.
    pub(crate) async fn list<T: DeserializeOwned, K>(
        &self,
        target: &ObjectPath,
        query: &str,
        keep: impl Fn(T) -> K,
    ) -> Read<Vec<K>> {
        let path = target.path()?;
        let mut kept = Vec::new();
        let mut more = String::new();
        for _ in 0..MOST_PAGES {
            let page = format!("{path}?limit={PAGE}{query}{more}");
            let (status, body) = self.exchange("GET", &page, Vec::new()).await?;
            let page: Page<T> = decoded(status, &body, &target.right())?;
            kept.extend(page.items.into_iter().map(&keep));
            match page.metadata.more.filter(|token| !token.is_empty()) {
                None => return Ok(kept),
                Some(token) => {
                    let token = percent_encoding::utf8_percent_encode(
                        &token,
                        percent_encoding::NON_ALPHANUMERIC,
                    );
                    more = format!("&continue={token}");
                }
            }
        }
        Err(Unread::Failed(format!("{} has more than {} objects", path, PAGE * MOST_PAGES)))
    }

    /// What the API server answers to a POST, as a rule one that keeps nothing: a dry run, or a review.
    pub(crate) async fn review(&self, path: &str, body: &Value) -> Read<ReviewAnswer> {
        let (status, answer) = self.exchange("POST", path, body.to_string().into_bytes()).await?;
        if status.is_success() {
            let value = decoded(status, &answer, path)?;
            return Ok(ReviewAnswer::Accepted(Box::new(value)));
        }
        match status {
            StatusCode::NOT_FOUND => Err(Unread::Absent),
            _ => Ok(ReviewAnswer::Refused(message(status, &answer))),
        }
    }

    /// Creates an object of this kind.
    pub(crate) async fn create(&self, all: &ObjectPath, object: &Value) -> Read<ReviewAnswer> {
        self.review(&all.path()?, object).await
    }

    /// Deletes an object, a pod at once.
    pub(crate) async fn delete(&self, target: &ObjectPath) -> Read<()> {
        let path = format!("{}?gracePeriodSeconds=0", target.path()?);
        let (status, body) = self.exchange("DELETE", &path, Vec::new()).await?;
        let right = target.right().replacen(target.verb(), "delete", 1);
        decoded::<Value>(status, &body, &right).map(drop)
    }

    /// A connection to a port of a pod, through the API server and kubelet.
    ///
    /// # Errors
    /// What the API server or kubelet says.
    pub(crate) async fn forwarded(
        &self,
        namespace: &str,
        pod: &str,
        port: u16,
    ) -> Result<impl AsyncRead + AsyncWrite + Unpin + use<>, String> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let forwarded = pods.portforward(pod, &[port]).await;
        let mut forwarded = forwarded.map_err(|error| said(&error))?;
        forwarded.take_stream(port).ok_or_else(|| "no stream of that port".to_owned())
    }

    async fn exchange(&self, method: &str, path: &str, body: Vec<u8>) -> Read<(StatusCode, Bytes)> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .body(kube::client::Body::from(body))
            .map_err(|error| Unread::Failed(error.to_string()))?;
        let exchange = async {
            let answer = self.client.send(request).await;
            let answer = answer.map_err(|error| Unread::Failed(said(&error)))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), MAX_BODY_BYTES).collect().await;
            let body = body.map_err(|error| Unread::Failed(with_causes(&*error)))?;
            Ok((status, body.to_bytes()))
        };
        tokio::time::timeout(self.timeout, exchange).await.map_err(|_| {
            let seconds = self.timeout.as_secs();
            Unread::Failed(format!("the API server does not answer within {seconds} s"))
        })?
    }
}

/// The body of an answer, or why it has none that can be used.
fn decoded<T: DeserializeOwned>(status: StatusCode, body: &[u8], right: &str) -> Read<T> {
    match status {
        StatusCode::NOT_FOUND => Err(Unread::Absent),
        StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED => {
            Err(Unread::Forbidden(right.to_owned()))
        }
        status if status.is_success() => serde_json::from_slice(body)
            .map_err(|error| Unread::Failed(format!("it cannot be read: {}", shown_long(&error)))),
        status => Err(Unread::Failed(message(status, body))),
    }
}

/// The words of a refusal.
fn message(status: StatusCode, body: &[u8]) -> String {
    let said: Option<Value> = serde_json::from_slice(body).ok();
    let said = said.as_ref().and_then(|said| said["message"].as_str());
    said.map_or_else(|| status.to_string(), |said| said.chars().take(MESSAGE).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_has_a_path_and_a_right() {
        let leases = ObjectPath::all("coordination.k8s.io", "v1", "leases");
        let lease = leases.within("gpu-system").named("gpupack");
        for (target, path, right) in [
            (&leases, "/apis/coordination.k8s.io/v1/leases", "list leases.coordination.k8s.io"),
            (
                &lease,
                "/apis/coordination.k8s.io/v1/namespaces/gpu-system/leases/gpupack",
                "get leases.coordination.k8s.io gpupack in namespace gpu-system",
            ),
            (&ObjectPath::all("", "v1", "nodes"), "/api/v1/nodes", "list nodes"),
        ] {
            assert_eq!(
                (target.path().unwrap(), target.right()),
                (path.to_owned(), right.to_owned())
            );
        }
        for odd in ["", "../../secrets", "a b", "a?b", "ä"] {
            let target = ObjectPath::all("", "v1", "secrets").within("a").named(odd);
            assert!(matches!(target.path(), Err(Unread::Failed(_))), "{odd}");
        }
    }

    #[test]
    fn each_status_has_its_meaning() {
        let read = |status: u16, body: &str| {
            decoded::<Vec<u8>>(StatusCode::from_u16(status).unwrap(), body.as_bytes(), "get x")
        };
        assert_eq!(read(200, "[1]"), Ok(vec![1]));
        assert_eq!(read(404, ""), Err(Unread::Absent));
        assert_eq!(read(403, ""), Err(Unread::Forbidden("get x".to_owned())));
        assert_eq!(read(500, r#"{"message": "etcd"}"#), Err(Unread::Failed("etcd".to_owned())));
        assert!(matches!(read(200, "{}"), Err(Unread::Failed(text)) if text.contains("cannot be")));
        let long = format!("{{\"message\": \"{}\"}}", "x".repeat(100_000));
        assert!(matches!(read(500, &long), Err(Unread::Failed(text)) if text.len() == MESSAGE));
    }
}
