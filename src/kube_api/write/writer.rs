//! The only writer of pods: it posts Bindings, requeues and fences pods, writes placements again that
//! another client edited, changes CPU in place, and labels the leader.
//!
//! A Binding carries the pod's UID and version as preconditions and its placement as annotations.
//! So device and node become true in one write or not at all. The outcome is not always known: a
//! timeout, a reset, a 429 or a 5xx leave it undecided, and only [`ApiWriter::settle`] finds it.
//! Nothing is tried twice here: the caller decides when that is useful.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

use hyper::Request;
use k8s_openapi::List;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Status};
use kube::api::{GetParams, ListParams, Patch, PatchParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::pod::gpu_container::CpuAmounts;
use crate::pod::seen_parts::PodFence;
use crate::pod::seen_pod::SeenPod;
use crate::request::placement::{FENCE, FenceWriter, HOLD};
use crate::write::outcome::{BindOutcome, Cause, Fenced, PatchOutcome, Settled};
use crate::write::target::{BindTarget, PodKey, Trace};
use crate::write::term::Term;
use runtime::step::outside::{ApiAnswer, Lost, Outside};
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};

/// The label of the pod of the replica that leads, which the Service selects.
const LEADER: &str = "gpupack.dev/leader";

/// The pods of extenders that have it.
const LABELED: &str =
    "app.kubernetes.io/name=gpupack,app.kubernetes.io/component=extender,gpupack.dev/leader";

/// Writes to pods, and reads them back. Cheap to clone.
#[derive(Clone)]
pub struct ApiWriter {
    outside: Outside,
    timeout: Duration,
    term: Term,
}

impl ApiWriter {
    /// A writer whose requests `outside` carries out; `timeout` is for one request and its whole
    /// answer. It writes while `term` is valid.
    pub fn new(outside: Outside, timeout: Duration, term: Term) -> Self {
        Self { outside, timeout, term }
    }

    /// Longest time of one request.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// When it may write.
    pub fn term(&self) -> &Term {
        &self.term
    }

    /// The number of the term in which this process acts now; `None` if it may not.
    pub fn acts_in(&self) -> Option<u64> {
        let writer = self.term.writer().filter(|_| self.term.is_valid());
        writer.map(|writer| writer.term())
    }

    /// What carries its requests out.
    pub fn outside(&self) -> &Outside {
        &self.outside
    }

    /// The process that last wrote [`FENCE`] on this version of the pod: `Equal` for this process
    /// or none, `Less` for one of an earlier term, `Greater` for one of a later term.
    pub fn fenced(&self, fence: PodFence) -> Ordering {
        let (Some(by), Some(own)) = (fence.by, self.term.writer()) else {
            return Ordering::Equal;
        };
        by.cmp(&own)
    }

    /// Binds a pod. A Binding with a placement also writes [`FENCE`], which names this process.
    pub async fn bind(&self, target: &BindTarget) -> BindOutcome {
        let mut annotations = target.annotations.clone();
        if !annotations.is_empty() {
            annotations.insert(FENCE.to_owned(), self.signed("bind"));
        }
        let reply = match self.write(binding_request(target, annotations)).await {
            Ok(reply) => reply,
            Err(Cause::NotLeading) => {
                let message = Cause::NotLeading.to_string();
                return BindOutcome::Refused { code: 503, message };
            }
            Err(cause) => return BindOutcome::Undecided { cause },
        };
        match reply.status {
            200..=299 => BindOutcome::Bound,
            404 => BindOutcome::Gone,
            409 => BindOutcome::Conflict,
            code if is_definite(code) => BindOutcome::Refused { code, message: message_of(&reply) },
            _ => BindOutcome::Undecided { cause: cause_of(&reply) },
        }
    }

    /// The pod as the API server has it now; `None` if there is none.
    ///
    /// # Errors
    /// [`Cause`] if it cannot be read.
    pub async fn read_back(&self, key: &PodKey) -> Result<Option<Pod>, Cause> {
        let request = pods(key).get(key.name(), &GetParams::default());
        let reply = self.exchange(request, self.timeout).await?;
        match reply.status {
            200..=299 => pod_of(&reply).map(Some),
            404 => Ok(None),
            _ => Err(cause_of(&reply)),
        }
    }

    /// Changes an annotation that has no other meaning. This requeues a pod that kube-scheduler has
    /// parked, and every Binding for an older version will conflict.
    ///
    /// `value` must differ from the last one: an equal value writes nothing. The name of this
    /// process is put in front of it. With a version the write succeeds only on that version.
    pub async fn write_fence(
        &self,
        key: &PodKey,
        uid: &PodUid,
        resource_version: Option<&str>,
        value: &str,
    ) -> PatchOutcome {
        self.write_note(key, uid, resource_version, value, None).await
    }

    /// The same, and with it the value of [`HOLD`]; the inner `None` removes it.
    pub async fn write_note(
        &self,
        key: &PodKey,
        uid: &PodUid,
        resource_version: Option<&str>,
        value: &str,
        hold: Option<Option<String>>,
    ) -> PatchOutcome {
        let mut annotations = json!({FENCE: self.signed(value)});
        if let Some(hold) = hold {
            annotations[HOLD] = json!(hold);
        }
        self.annotate(key, uid, resource_version, annotations).await
    }

    /// Writes annotations of a placement again, on the pod with this UID in this version; `None`
    /// removes an annotation. Also [`FENCE`]: an earlier process that goes on later sees who knows better.
    /// `fenced_by` wrote it on that version; if that is a later process, it stays.
    pub async fn write_placement(
        &self,
        key: &PodKey,
        uid: &PodUid,
        resource_version: &str,
        fenced_by: Option<FenceWriter>,
        annotations: &BTreeMap<String, Option<String>>,
    ) -> PatchOutcome {
        let mut annotations = annotations.clone();
        if fenced_by <= self.term.writer() || mutated(Mutation::LaterPlacementOverwritten) {
            annotations.insert(FENCE.to_owned(), Some(self.signed("placed")));
        }
        self.annotate(key, uid, Some(resource_version), json!(annotations)).await
    }

    /// Changes CPU request and limit of a container in place, on the pod in this version. Kubelet restarts the container for that, if its `resizePolicy` says so.
    pub async fn resize(
        &self,
        key: &PodKey,
        uid: &PodUid,
        resource_version: &str,
        container: &str,
        cpu: CpuAmounts,
    ) -> PatchOutcome {
        let CpuAmounts { request_milli, limit_milli } = cpu;
        let mut resources = json!({"requests": {"cpu": format!("{request_milli}m")}});
        if let Some(limit_milli) = limit_milli {
            resources["limits"] = json!({"cpu": format!("{limit_milli}m")});
        }
        let patch = json!({
            "metadata": {"uid": uid.as_str(), "resourceVersion": resource_version},
            "spec": {"containers": [{"name": container, "resources": resources}]},
        });
        let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
        self.patch(pods(key).patch_subresource("resize", key.name(), &params, &patch)).await
    }

    /// Labels this pod of gpupack itself as the leader's, and takes the label from others. A pod that is gone
    /// needs none.
    ///
    /// # Errors
    /// [`Cause`] if pods cannot be listed, or one may not be written.
    pub async fn label_leader(&self, own: &PodKey) -> Result<(), Cause> {
        let listed = pods(own).list(&ListParams::default().labels(LABELED));
        let reply = self.exchange(listed, self.timeout).await?;
        if !(200..=299).contains(&reply.status) {
            return Err(cause_of(&reply));
        }
        let (known, others): (Vec<_>, Vec<_>) = listed_pods(&reply)?
            .into_iter()
            .partition(|pod| pod.name.as_deref() == Some(own.name()));
        let labels = known.first().and_then(|pod| pod.labels.as_ref());
        // The new one first: without an endpoint, no connection could be made.
        if labels.and_then(|labels| labels.get(LEADER)).is_none_or(|value| value != "true") {
            self.label(own, json!({"labels": {LEADER: "true"}})).await?;
        }
        for ObjectMeta { name, uid, resource_version, .. } in others {
            let Ok(pod) = PodKey::new(own.namespace(), &name.unwrap_or_default()) else { continue };
            // One that comes late must not take it from a pod that leads by then.
            let seen =
                json!({"uid": uid, "resourceVersion": resource_version, "labels": {LEADER: null}});
            self.label(&pod, seen).await?;
        }
        Ok(())
    }

    async fn label(&self, pod: &PodKey, metadata: Value) -> Result<(), Cause> {
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let request = pods(pod).patch(pod.name(), &PatchParams::default(), &patch);
        let reply = self.write(request).await?;
        match reply.status {
            200..=299 | 404 => Ok(()),
            _ => Err(cause_of(&reply)),
        }
    }

    async fn annotate(
        &self,
        key: &PodKey,
        uid: &PodUid,
        resource_version: Option<&str>,
        annotations: Value,
    ) -> PatchOutcome {
        let mut metadata = json!({"uid": uid.as_str(), "annotations": annotations});
        if let Some(version) = resource_version {
            metadata["resourceVersion"] = version.into();
        }
        let patch = Patch::Merge(json!({"metadata": metadata}));
        self.patch(pods(key).patch(key.name(), &PatchParams::default(), &patch)).await
    }

    async fn patch(
        &self,
        request: Result<Request<Vec<u8>>, kube::core::request::Error>,
    ) -> PatchOutcome {
        let reply = match self.write(request).await {
            Ok(reply) => reply,
            Err(cause) => return PatchOutcome::Undecided { cause },
        };
        match reply.status {
            200..=299 => match pod_of(&reply) {
                Ok(pod) => PatchOutcome::Patched { pod: Box::new(pod) },
                Err(cause) => PatchOutcome::Undecided { cause },
            },
            404 => PatchOutcome::Gone,
            409 => PatchOutcome::Conflict,
            code if is_definite(code) => {
                PatchOutcome::Refused { code, message: message_of(&reply) }
            }
            _ => PatchOutcome::Undecided { cause: cause_of(&reply) },
        }
    }

    /// Fences a pod: no Binding that was sent earlier can succeed. The answer says what the pod is
    /// then. With a version only that version is fenced.
    pub async fn fence_pod(
        &self,
        key: &PodKey,
        uid: &PodUid,
        resource_version: Option<&str>,
        value: &str,
    ) -> Fenced {
        let cause = match self.write_fence(key, uid, resource_version, value).await {
            PatchOutcome::Patched { pod } => {
                let pod = Box::new(SeenPod::from_api(&pod));
                return if pod.node.is_some() {
                    Fenced::Bound { pod }
                } else {
                    Fenced::Waiting { pod }
                };
            }
            PatchOutcome::Gone => return Fenced::Gone,
            PatchOutcome::Conflict => met_another_write(),
            PatchOutcome::Refused { code, message } => Cause::Status { code, message },
            PatchOutcome::Undecided { cause } => cause,
        };
        match self.read_back(key).await {
            Err(_) => Fenced::Open { pod: None, cause },
            Ok(read) => match read.map(|pod| Box::new(SeenPod::from_api(&pod))) {
                Some(pod) if pod.pod.uid != *uid => Fenced::Gone,
                None => Fenced::Gone,
                Some(pod) if pod.node.is_some() => Fenced::Bound { pod },
                pod => Fenced::Open { pod, cause },
            },
        }
    }

    /// Finds the outcome of a Binding, and makes sure that it stays.
    ///
    /// Reads the pod back. If it is unbound and in the version of the Binding, the Binding may
    /// still arrive: a fence makes it conflict, and the fence's own answer shows which came first.
    pub async fn settle(&self, target: &BindTarget) -> Settled {
        match self.read_trace(target).await {
            Err(settled) => settled,
            Ok(()) if mutated(Mutation::UndecidedUnfenced) => Settled::NotBound,
            Ok(()) => self.fence(target).await,
        }
    }

    /// Fences a pod that is unbound, only in the version of the Binding: an earlier write of
    /// [`FENCE`] by another process must stay visible.
    async fn fence(&self, target: &BindTarget) -> Settled {
        let version = target.resource_version.as_str();
        let value = format!("fence-{version}");
        let only = (!mutated(Mutation::SettledOnAnyVersion)).then_some(version);
        let cause = match self.write_fence(&target.key, &target.uid, only, &value).await {
            PatchOutcome::Patched { pod } => match concluded(target, pod) {
                Err(settled) => return settled,
                Ok(()) => Cause::Body { fault: "the fence left the version as it was".to_owned() },
            },
            PatchOutcome::Gone => return Settled::Gone,
            PatchOutcome::Conflict => met_another_write(),
            PatchOutcome::Refused { code, message } => Cause::Status { code, message },
            PatchOutcome::Undecided { cause } => cause,
        };
        match self.read_trace(target).await {
            Err(settled) => settled,
            Ok(()) => Settled::StillUndecided { cause },
        }
    }

    /// Reads the pod. A conclusion is the error: only an undecided Binding goes on.
    async fn read_trace(&self, target: &BindTarget) -> Result<(), Settled> {
        match self.read_back(&target.key).await {
            Ok(Some(pod)) => concluded(target, Box::new(pod)),
            Ok(None) => Err(Settled::Gone),
            Err(cause) => Err(Settled::StillUndecided { cause }),
        }
    }

    /// A value of [`FENCE`] that names this process.
    fn signed(&self, text: &str) -> String {
        self.term.writer().map_or_else(|| text.to_owned(), |writer| writer.value(text))
    }

    /// Sends one request that changes something, if this process leads now.
    pub(crate) async fn write(
        &self,
        request: Result<Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<ApiAnswer, Cause> {
        match self.term.is_valid() {
            true => self.exchange(request, self.timeout).await,
            false => Err(Cause::NotLeading),
        }
    }

    /// Sends one request once.
    pub(crate) async fn exchange(
        &self,
        request: Result<Request<Vec<u8>>, kube::core::request::Error>,
        within: Duration,
    ) -> Result<ApiAnswer, Cause> {
        let request = request.map_err(|error| Cause::Transport { fault: error.to_string() })?;
        let answer = self.outside.call(request, within).await;
        answer.map_err(|lost| match lost {
            Lost::Timeout => Cause::Timeout,
            Lost::Transport { fault } => Cause::Transport { fault },
        })
    }
}

/// The object in the body of an answer.
pub(crate) fn object_of<T: DeserializeOwned>(answer: &ApiAnswer) -> Result<T, Cause> {
    let body = answer.body.as_ref().ok_or(Cause::Timeout)?;
    // From text, as kube-rs reads: from bytes, all would be built a second time.
    let text = str::from_utf8(body).map_err(|error| Cause::Body { fault: error.to_string() })?;
    serde_json::from_str(text).map_err(|error| Cause::Body { fault: error.to_string() })
}

// Functions of one type: what waits for them in other crates does not build them again.
fn pod_of(answer: &ApiAnswer) -> Result<Pod, Cause> {
    object_of(answer)
}

fn listed_pods(answer: &ApiAnswer) -> Result<Vec<ObjectMeta>, Cause> {
    let pods: List<Pod> = object_of(answer)?;
    Ok(pods.items.into_iter().map(|pod| pod.metadata).collect())
}

/// The message of a failure, or the beginning of another body.
pub(crate) fn message_of(answer: &ApiAnswer) -> String {
    let body = answer.body.as_deref().unwrap_or_default();
    let status = serde_json::from_slice::<Status>(body).ok().and_then(|status| status.message);
    let message = status.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    message.chars().take(512).collect()
}

/// Why a call failed, by its answer.
pub(crate) fn cause_of(answer: &ApiAnswer) -> Cause {
    Cause::Status { code: answer.status, message: message_of(answer) }
}

/// Whether a status that is no success means that nothing was done.
pub(crate) fn is_definite(code: u16) -> bool {
    (400..=499).contains(&code) && code != 408 && code != 429
}

fn met_another_write() -> Cause {
    Cause::Status { code: 409, message: "the fence met another write".to_owned() }
}

/// What `pod`, as just read, settles; `Ok` if the Binding is still undecided.
fn concluded(target: &BindTarget, pod: Box<Pod>) -> Result<(), Settled> {
    match target.trace_in(&pod) {
        Trace::Ours => Err(Settled::Bound { pod }),
        Trace::OtherBinding => Err(Settled::BoundElsewhere { pod }),
        Trace::OtherPod => Err(Settled::Gone),
        Trace::Fenced => Err(Settled::NotBound),
        Trace::Unchanged => Ok(()),
    }
}

pub(crate) fn pods(key: &PodKey) -> kube::core::Request {
    kube::core::Request::new(format!("/api/v1/namespaces/{}/pods", key.namespace()))
}

fn binding_request(
    target: &BindTarget,
    annotations: BTreeMap<String, String>,
) -> Result<Request<Vec<u8>>, kube::core::request::Error> {
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(target.key.name().to_owned()),
            namespace: Some(target.key.namespace().to_owned()),
            uid: (!mutated(Mutation::BindWithoutUid)).then(|| target.uid.to_string()),
            resource_version: (!mutated(Mutation::BindWithoutVersion))
                .then(|| target.resource_version.clone()),
            annotations: (!annotations.is_empty()).then_some(annotations),
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
