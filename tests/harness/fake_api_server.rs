//! A fake API server with one pod and a script of faults.
//!
//! It keeps the pod as etcd would: a version that every write raises, preconditions of a Binding, and
//! a Binding that is committed although its answer never arrives, or arrives late.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::{Request, Response};
use kube::Client;
use kube::client::Body;
use kube_api::request::placement::FenceWriter;
use kube_api::write::carry_out;
use kube_api::write::term::Term;
use kube_api::write::writer::ApiWriter;
use runtime::clock::Clock;
use runtime::step::outside::Outside;
use serde_json::{Value, json};

/// How long the writer under test waits.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(40);

/// What goes wrong with the next request of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// Answers with this status and does nothing.
    Answer(u16),
    /// Executes the request, then cuts the connection.
    CutAfterCommit,
    /// Executes the request, and never answers.
    SilentAfterCommit,
    /// Never answers; executes the request just before the next fence.
    LateBeforeFence,
    /// Never answers; executes the request just after the next fence.
    LateAfterFence,
    /// Answers success with half a body.
    HalfBody,
    /// Another process writes this fence on the pod just before.
    FencedBefore(&'static str),
    /// Somebody writes the pod just before.
    WrittenBefore,
}

#[derive(Clone, Debug)]
pub(crate) struct PodState {
    pub(crate) uid: String,
    pub(crate) version: u64,
    pub(crate) node: Option<String>,
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) scheduler: &'static str,
    pub(crate) gates: &'static [&'static str],
}

#[derive(Default)]
pub(crate) struct Bed {
    pub(crate) pod: Option<PodState>,
    pub(crate) on_bind: VecDeque<Fault>,
    pub(crate) on_read: VecDeque<Fault>,
    pub(crate) on_fence: VecDeque<Fault>,
    pub(crate) on_evict: VecDeque<Fault>,
    pub(crate) before_fence: Vec<Value>,
    pub(crate) after_fence: Vec<Value>,
    pub(crate) events: Vec<Value>,
    pub(crate) late_answers: Vec<u16>,
    pub(crate) requests: Vec<String>,
}

impl Bed {
    pub(crate) fn bind(&mut self, binding: &Value) -> (u16, Value) {
        let Some(pod) = &mut self.pod else { return refusal(404, "pods not found") };
        let metadata = &binding["metadata"];
        let version = pod.version.to_string();
        if metadata["uid"] != pod.uid || metadata["resourceVersion"] != *version {
            return refusal(409, "the object has been modified");
        }
        if let Some(node) = &pod.node {
            return refusal(409, &format!("pod is already assigned to node \"{node}\""));
        }
        pod.node = binding["target"]["name"].as_str().map(str::to_owned);
        let annotations: BTreeMap<String, String> =
            serde_json::from_value(metadata["annotations"].clone()).unwrap_or_default();
        pod.annotations.extend(annotations);
        pod.version += 1;
        (201, json!({"kind": "Status", "status": "Success", "code": 201}))
    }

    fn read(&self) -> (u16, Value) {
        let gate = |name: &&str| json!({"name": *name});
        let gates: Vec<Value> =
            self.pod.iter().flat_map(|pod| pod.gates.iter().map(gate)).collect();
        match &self.pod {
            None => refusal(404, "pods not found"),
            Some(pod) => (
                200,
                json!({
                    "apiVersion": "v1", "kind": "Pod",
                    "metadata": {
                        "namespace": "team-a", "name": "infer", "uid": pod.uid,
                        "resourceVersion": pod.version.to_string(), "annotations": pod.annotations,
                    },
                    "spec": {"nodeName": pod.node, "schedulerName": pod.scheduler,
                        "schedulingGates": gates, "containers": [{"name": "main"}]},
                }),
            ),
        }
    }

    fn evict(&mut self, eviction: &Value) -> (u16, Value) {
        let Some(pod) = &self.pod else { return refusal(404, "pods not found") };
        if eviction["deleteOptions"]["preconditions"]["uid"] != pod.uid {
            return refusal(409, "the UID in the precondition does not match");
        }
        self.pod = None;
        (201, json!({"kind": "Status", "status": "Success", "code": 201}))
    }

    fn fence(&mut self, patch: &Value) -> (u16, Value) {
        let Some(pod) = &mut self.pod else { return refusal(404, "pods not found") };
        let metadata = &patch["metadata"];
        if metadata["uid"] != pod.uid {
            return refusal(422, "metadata.uid: field is immutable");
        }
        let version = pod.version.to_string();
        if !metadata["resourceVersion"].is_null() && metadata["resourceVersion"] != *version {
            return refusal(409, "the object has been modified");
        }
        let patch: BTreeMap<String, Option<String>> =
            serde_json::from_value(metadata["annotations"].clone()).unwrap();
        let before = pod.annotations.clone();
        for (key, value) in patch {
            match value {
                Some(value) => drop(pod.annotations.insert(key, value)),
                None => drop(pod.annotations.remove(&key)),
            }
        }
        if pod.annotations.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
            > 256 << 10
        {
            pod.annotations = before;
            return refusal(
                422,
                "metadata.annotations: Too long: may not be more than 262144 bytes",
            );
        }
        if pod.annotations.len() > 1_100 {
            pod.annotations = before;
            return refusal(
                403,
                "denied: writes nothing on a pod with more than 1,100 annotations",
            );
        }
        pod.version += u64::from(pod.annotations != before);
        self.read()
    }
}

pub(crate) fn refusal(code: u16, message: &str) -> (u16, Value) {
    (code, json!({"kind": "Status", "status": "Failure", "code": code, "message": message}))
}

/// The fake API server.
#[derive(Clone, Default)]
pub(crate) struct Fake(Arc<Mutex<Bed>>);

impl Fake {
    /// One waiting pod with UID `u1` in version 7.
    pub(crate) fn with_pod() -> Self {
        let fake = Self::default();
        let uid = "u1".to_owned();
        fake.bed(|bed| {
            let (annotations, scheduler) = (BTreeMap::new(), "gpupack");
            bed.pod =
                Some(PodState { uid, version: 7, node: None, annotations, scheduler, gates: &[] });
        });
        fake
    }

    pub(crate) fn bed<T>(&self, act: impl FnOnce(&mut Bed) -> T) -> T {
        act(&mut self.0.lock().unwrap())
    }

    pub(crate) fn on_bind(self, fault: Fault) -> Self {
        self.bed(|bed| bed.on_bind.push_back(fault));
        self
    }

    pub(crate) fn client(&self) -> Client {
        let fake = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let fake = fake.clone();
            async move { fake.answer(request).await }
        });
        Client::new(service, "default")
    }

    pub(crate) fn writer(&self) -> ApiWriter {
        connected(self.client(), TIMEOUT, Clock::start())
    }

    async fn answer(&self, request: Request<Body>) -> Result<Response<Body>, io::Error> {
        let reported = format!("{} {}", request.method(), request.uri().path());
        let body = request.into_body().collect_bytes().await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let reply = self.bed(|bed| {
            bed.requests.push(reported.clone());
            respond(bed, &reported, &body)
        });
        match reply {
            Reply::Answer(code, body) => Ok(response(code, body.to_string())),
            Reply::Half(code) => Ok(response(code, "{\"kind\":".to_owned())),
            Reply::Cut => Err(io::Error::from(io::ErrorKind::ConnectionReset)),
            Reply::Silence => std::future::pending().await,
        }
    }
}

/// A writer whose requests are carried out on the runtime of the test.
pub(crate) fn connected(client: Client, timeout: Duration, clock: Clock) -> ApiWriter {
    let outside = Outside::new(clock);
    tokio::spawn(carry_out::run(outside.clone(), Some(client), None));
    let term = Term::alone(outside.clock(), FenceWriter::random());
    ApiWriter::new(outside, timeout, term)
}

enum Reply {
    Answer(u16, Value),
    Half(u16),
    Cut,
    Silence,
}

fn response(code: u16, body: String) -> Response<Body> {
    Response::builder().status(code).body(Body::from(body.into_bytes())).unwrap()
}

/// What one request changes in the test bed, and its answer.
type Act = fn(&mut Bed, &Value) -> (u16, Value);

fn respond(bed: &mut Bed, reported: &str, body: &Value) -> Reply {
    const POD: &str = "/api/v1/namespaces/team-a/pods/infer";
    let (queue, act): (_, Act) = if *reported == format!("POST {POD}/binding") {
        (&mut bed.on_bind, |bed, body| bed.bind(body))
    } else if *reported == format!("POST {POD}/eviction") {
        assert_eq!(body["apiVersion"], "policy/v1", "{body}");
        assert_eq!(body["metadata"]["name"], "infer", "{body}");
        (&mut bed.on_evict, |bed, body| bed.evict(body))
    } else if *reported == format!("GET {POD}") {
        (&mut bed.on_read, |bed, _| bed.read())
    } else if *reported == format!("PATCH {POD}") {
        for binding in std::mem::take(&mut bed.before_fence) {
            let code = bed.bind(&binding).0;
            bed.late_answers.push(code);
        }
        (&mut bed.on_fence, |bed, body| bed.fence(body))
    } else if reported.starts_with("GET") {
        return Reply::Silence; // another pod, which is forged
    } else {
        bed.events.push(body.clone());
        return Reply::Answer(201, body.clone());
    };
    let fault = queue.pop_front();
    let reply = match fault {
        None => {
            let (code, answer) = act(bed, body);
            Reply::Answer(code, answer)
        }
        Some(Fault::Answer(code)) => {
            let (code, answer) = refusal(code, "scripted");
            Reply::Answer(code, answer)
        }
        Some(Fault::CutAfterCommit) => {
            act(bed, body);
            Reply::Cut
        }
        Some(Fault::SilentAfterCommit) => {
            act(bed, body);
            Reply::Silence
        }
        Some(fault @ (Fault::FencedBefore(_) | Fault::WrittenBefore)) => {
            let pod = bed.pod.as_mut().unwrap();
            pod.version += 1;
            if let Fault::FencedBefore(value) = fault {
                pod.annotations.insert("placed.gpupack.dev/fence".to_owned(), value.to_owned());
            }
            let (code, answer) = act(bed, body);
            Reply::Answer(code, answer)
        }
        Some(Fault::HalfBody) => Reply::Half(act(bed, body).0),
        Some(Fault::LateBeforeFence) => {
            bed.before_fence.push(body.clone());
            Reply::Silence
        }
        Some(Fault::LateAfterFence) => {
            bed.after_fence.push(body.clone());
            Reply::Silence
        }
    };
    if reported.starts_with("PATCH") {
        for binding in std::mem::take(&mut bed.after_fence) {
            let code = bed.bind(&binding).0;
            bed.late_answers.push(code);
        }
    }
    reply
}
