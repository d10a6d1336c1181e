//! The only writer of pods: Bindings, the touch that wakes a pod or fences a late Binding, and placements
//! that somebody else edited.
//!
//! A Binding carries the pod's UID and version as preconditions and its placement as annotations, so
//! that device and node become true in one write or not at all. What the API server did with it is
//! not always known: a timeout, a reset, a 429 or a 5xx leave it open, and only [`ApiWriter::settle`]
//! finds out. Nothing is tried twice here: the caller knows when that is worth it.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::Request;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Status};
use kube::api::{GetParams, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cluster::placement::TOUCH;
use crate::cluster::target::{BindTarget, PodKey, Trace};
use crate::packing::device::PodUid;

/// How long one request may take where nothing else is configured. kube-scheduler gives up on a bind
/// call after its `httpTimeout`, so a configured value should be below that.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why it is not known what the API server did.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// No answer in time.
    #[error("no answer from the API server in time")]
    Timeout,
    /// The connection failed or was cut; the request may or may not have arrived.
    #[error("connection to the API server failed: {fault}")]
    Transport {
        /// What the client says.
        fault: String,
    },
    /// An answer that leaves it open: 429, 5xx, or none of the known classes.
    #[error("the API server answered `{code}`: {message}")]
    Status {
        /// HTTP status.
        code: u16,
        /// Its message.
        message: String,
    },
    /// A success whose body cannot be read.
    #[error("the API server's answer cannot be read: {fault}")]
    Body {
        /// What the JSON parser says.
        fault: String,
    },
}

/// What came of a Binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// The pod is bound, with its placement.
    Bound,
    /// The pod has changed or is bound already (409). It may be bound by an earlier try of ours.
    Conflict,
    /// There is no such pod (404).
    Gone,
    /// Refused for good (any other 4xx): nothing was bound.
    Refused {
        /// HTTP status.
        code: u16,
        /// The API server's message.
        message: String,
    },
    /// It may have been bound, or may yet be.
    Undecided {
        /// Why that is not known.
        cause: Cause,
    },
}

/// What came of a touch.
#[derive(Clone, Debug, PartialEq)]
pub enum TouchOutcome {
    /// Written; the pod as it is now. Every Binding for an older version will conflict.
    Touched {
        /// The pod after the write.
        pod: Box<Pod>,
    },
    /// The pod is no longer in the version asked for (409).
    Conflict,
    /// There is no such pod (404).
    Gone,
    /// Refused for good; 422 where the pod of that name has another UID.
    Refused {
        /// HTTP status.
        code: u16,
        /// The API server's message.
        message: String,
    },
    /// It may have been written.
    Undecided {
        /// Why that is not known.
        cause: Cause,
    },
}

/// What has become of a Binding whose outcome was open.
#[derive(Clone, Debug, PartialEq)]
pub enum Settled {
    /// It succeeded: node and placement are ours.
    Bound {
        /// The pod.
        pod: Box<Pod>,
    },
    /// It did not, and never will: the pod waits in another version.
    NotBound,
    /// The pod is bound, but not by this Binding: to another node, or with another placement.
    BoundElsewhere {
        /// The pod.
        pod: Box<Pod>,
    },
    /// The pod is gone, or another one has its name.
    Gone,
    /// Still not known; ask again later, and free nothing until then.
    StillUndecided {
        /// Why.
        cause: Cause,
    },
}

/// Writes to pods, and reads them back. Cheap to clone.
#[derive(Clone)]
pub struct ApiWriter {
    client: Client,
    timeout: Duration,
}

/// The head of an answer, with its body where that arrived.
pub(super) struct Reply {
    /// HTTP status.
    pub(super) status: u16,
    body: Option<Vec<u8>>,
}

impl ApiWriter {
    /// A writer on a connection of its own, without the retries that `kube` makes by default: they
    /// repeat a Binding after a 503 or 504, for minutes, behind the caller's back.
    ///
    /// # Errors
    /// [`kube::Error`] where `config` makes no client.
    pub fn connect(mut config: Config, timeout: Duration) -> Result<Self, kube::Error> {
        config.default_retry = false;
        Ok(Self::new(Client::try_from(config)?, timeout))
    }

    /// A writer on `client`, which must not repeat requests by itself; `timeout` is for one request,
    /// once until its head and once more until its body has come.
    pub fn new(client: Client, timeout: Duration) -> Self {
        Self { client, timeout }
    }

    /// Binds a pod.
    pub async fn bind(&self, target: &BindTarget) -> BindOutcome {
        let reply = match self.exchange(binding_request(target)).await {
            Ok(reply) => reply,
            Err(cause) => return BindOutcome::Undecided { cause },
        };
        match reply.status {
            200..=299 => BindOutcome::Bound,
            404 => BindOutcome::Gone,
            409 => BindOutcome::Conflict,
            code if is_definite(code) => BindOutcome::Refused { code, message: reply.message() },
            _ => BindOutcome::Undecided { cause: reply.cause() },
        }
    }

    /// The pod as the API server has it at this moment; `None` where there is none.
    ///
    /// # Errors
    /// [`Cause`] where it cannot be read.
    pub async fn read_back(&self, key: &PodKey) -> Result<Option<Pod>, Cause> {
        let request = pods(key).get(key.name(), &GetParams::default());
        let reply = self.exchange(request).await?;
        match reply.status {
            200..=299 => reply.object().map(Some),
            404 => Ok(None),
            _ => Err(reply.cause()),
        }
    }

    /// Changes one annotation that means nothing, which wakes a pod that kube-scheduler has parked
    /// and makes every Binding for an older version conflict.
    ///
    /// `value` must differ from the one before: an equal one writes nothing. With a version the
    /// touch succeeds only on that version.
    pub async fn touch(
        &self,
        key: &PodKey,
        uid: &PodUid,
        resource_version: Option<&str>,
        value: &str,
    ) -> TouchOutcome {
        self.annotate(key, uid, resource_version, json!({TOUCH: value})).await
    }

    /// Writes the annotations of a placement again on the pod with this UID, in this version alone.
    pub async fn write_placement(
        &self,
        key: &PodKey,
        uid: &PodUid,
        resource_version: &str,
        annotations: &BTreeMap<String, String>,
    ) -> TouchOutcome {
        self.annotate(key, uid, Some(resource_version), json!(annotations)).await
    }

    async fn annotate(
        &self,
        key: &PodKey,
        uid: &PodUid,
        resource_version: Option<&str>,
        annotations: Value,
    ) -> TouchOutcome {
        let mut metadata = json!({"uid": uid.as_str(), "annotations": annotations});
        if let Some(version) = resource_version {
            metadata["resourceVersion"] = version.into();
        }
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let request = pods(key).patch(key.name(), &PatchParams::default(), &patch);
        let reply = match self.exchange(request).await {
            Ok(reply) => reply,
            Err(cause) => return TouchOutcome::Undecided { cause },
        };
        match reply.status {
            200..=299 => match reply.object() {
                Ok(pod) => TouchOutcome::Touched { pod: Box::new(pod) },
                Err(cause) => TouchOutcome::Undecided { cause },
            },
            404 => TouchOutcome::Gone,
            409 => TouchOutcome::Conflict,
            code if is_definite(code) => TouchOutcome::Refused { code, message: reply.message() },
            _ => TouchOutcome::Undecided { cause: reply.cause() },
        }
    }

    /// Finds out what became of a Binding, and makes sure that it stays so.
    ///
    /// Reads the pod back. Where it is not bound and still in the version of the Binding, that may
    /// yet arrive: a touch makes it conflict, and the touch's own answer shows who came first.
    pub async fn settle(&self, target: &BindTarget) -> Settled {
        match self.read_trace(target).await {
            Err(settled) => settled,
            Ok(()) => self.fence(target).await,
        }
    }

    /// Touches a pod that was seen unbound in the version of the Binding.
    async fn fence(&self, target: &BindTarget) -> Settled {
        let value = format!("fence-{}", target.resource_version);
        let cause = match self.touch(&target.key, &target.uid, None, &value).await {
            TouchOutcome::Touched { pod } => match concluded(target, pod) {
                Err(settled) => return settled,
                Ok(()) => Cause::Body { fault: "the touch left the version as it was".to_owned() },
            },
            TouchOutcome::Gone => return Settled::Gone,
            TouchOutcome::Conflict => {
                Cause::Status { code: 409, message: "the touch met another write".to_owned() }
            }
            TouchOutcome::Refused { code, message } => Cause::Status { code, message },
            TouchOutcome::Undecided { cause } => cause,
        };
        match self.read_trace(target).await {
            Err(settled) => settled,
            Ok(()) => Settled::StillUndecided { cause },
        }
    }

    /// Reads the pod. The conclusion is the error, so that only an open question goes on.
    async fn read_trace(&self, target: &BindTarget) -> Result<(), Settled> {
        match self.read_back(&target.key).await {
            Ok(Some(pod)) => concluded(target, Box::new(pod)),
            Ok(None) => Err(Settled::Gone),
            Err(cause) => Err(Settled::StillUndecided { cause }),
        }
    }

    /// Sends one request once.
    pub(super) async fn exchange(
        &self,
        request: Result<Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<Reply, Cause> {
        let transport =
            |error: &dyn std::fmt::Display| Cause::Transport { fault: error.to_string() };
        let request = request.map_err(|error| transport(&error))?.map(Body::from);
        let response = tokio::time::timeout(self.timeout, self.client.send(request))
            .await
            .map_err(|_| Cause::Timeout)?
            .map_err(|error| transport(&error))?;
        let status = response.status().as_u16();
        // The status alone says what was done; a body that does not come only costs its contents.
        let body = tokio::time::timeout(self.timeout, response.into_body().collect_bytes()).await;
        Ok(Reply { status, body: body.ok().and_then(Result::ok).map(Into::into) })
    }
}

impl Reply {
    fn object<T: DeserializeOwned>(&self) -> Result<T, Cause> {
        let body = self.body.as_ref().ok_or(Cause::Timeout)?;
        serde_json::from_slice(body).map_err(|error| Cause::Body { fault: error.to_string() })
    }

    /// The message of a failure, or the beginning of whatever was answered.
    pub(super) fn message(&self) -> String {
        let body = self.body.as_deref().unwrap_or_default();
        let status = serde_json::from_slice::<Status>(body).ok().and_then(|status| status.message);
        let message = status.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
        message.chars().take(512).collect()
    }

    /// The status as the reason why an outcome is open.
    pub(super) fn cause(&self) -> Cause {
        Cause::Status { code: self.status, message: self.message() }
    }
}

/// Whether a status other than success says for certain that nothing was done.
pub(super) fn is_definite(code: u16) -> bool {
    (400..=499).contains(&code) && code != 408 && code != 429
}

/// What `pod`, as just read, settles; the question is open where this is `Ok`.
fn concluded(target: &BindTarget, pod: Box<Pod>) -> Result<(), Settled> {
    match target.trace_in(&pod) {
        Trace::Ours => Err(Settled::Bound { pod }),
        Trace::OtherBinding => Err(Settled::BoundElsewhere { pod }),
        Trace::OtherPod => Err(Settled::Gone),
        Trace::Fenced => Err(Settled::NotBound),
        Trace::Unchanged => Ok(()),
    }
}

/// The pods of the namespace of `key`.
pub(super) fn pods(key: &PodKey) -> kube::core::Request {
    kube::core::Request::new(format!("/api/v1/namespaces/{}/pods", key.namespace()))
}

fn binding_request(target: &BindTarget) -> Result<Request<Vec<u8>>, kube::core::request::Error> {
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(target.key.name().to_owned()),
            namespace: Some(target.key.namespace().to_owned()),
            uid: Some(target.uid.to_string()),
            resource_version: Some(target.resource_version.clone()),
            annotations: (!target.annotations.is_empty()).then(|| target.annotations.clone()),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(target.node.to_string()),
            ..ObjectReference::default()
        },
    };
    let body = serde_json::to_vec(&binding).map_err(kube::core::request::Error::SerializeBody)?;
    pods(&target.key).create_subresource("binding", target.key.name(), &PostParams::default(), body)
}
