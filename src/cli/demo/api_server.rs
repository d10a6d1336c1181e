//! An API server in memory, for the demo and for tests: the pods of a cluster. It is as strict as the real
//! one with what gpupack writes, and has its preconditions, conflicts and limits.
//!
//! One extender watches it. That has taken in each change before the next request is answered, by the
//! functions that take in what the watch of a cluster shows. So a run can be repeated.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use hyper::{Method, Request, Response};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use control::shared::app::App;
use engine::ledger::nodes::state::Ledger;
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::{PodWatch, WatchEvent};
use kube_api::request::placement::FenceWriter;
use kube_api::write::carry_out;
use kube_api::write::events::notices;
use kube_api::write::term::Term;
use kube_api::write::writer::ApiWriter;
use runtime::clock::Clock;
use runtime::step::outside::Outside;
use wire::ids::PodUid;

/// Most bytes of all annotations of a pod.
const MOST_ANNOTATIONS: usize = 256 << 10;

/// Most pods at a time that were created because of a call.
const MOST_CALLED: usize = 1_000;

/// Most events in the queue of the extender.
const QUEUED_EVENTS: usize = 1000;

/// The API server. Cheap to clone.
#[derive(Clone, Default)]
pub struct ApiServer(Arc<Mutex<Store>>);

#[derive(Default)]
struct Store {
    /// The JSON of each pod, by `namespace/name`.
    pods: BTreeMap<String, Box<str>>,
    names: BTreeMap<PodUid, String>,
    version: u64,
    watch: Option<PodWatch>,
    resized: BTreeSet<PodUid>,
    annotated: BTreeSet<PodUid>,
    evicted: BTreeSet<PodUid>,
    /// The pods that are there because of a call.
    called: BTreeSet<PodUid>,
}

/// The part of a call that is the pod.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Called<'a> {
    #[serde(borrow)]
    pod: Option<&'a RawValue>,
}

/// A status and a body.
type HttpAnswer = (u16, String);

impl ApiServer {
    /// Shows all pods, and from now on each change, to the watch of an extender.
    pub fn show_to(&self, mut watch: PodWatch) {
        let store = &mut *self.0.lock();
        watch.take(WatchEvent::ListBegins);
        for text in store.pods.values() {
            if let Ok(pod) = SeenPod::from_json(text) {
                watch.take(WatchEvent::Seen(pod));
            }
        }
        watch.take(WatchEvent::ListEnds);
        store.watch = Some(watch);
    }

    /// An extender of this server, which sees its pods. For a thread of a tokio runtime, on which its calls are
    /// carried out.
    pub fn extender(&self, ledger: Arc<Ledger>, config: Config, clock: Clock) -> Arc<App> {
        let (client, outside) = (self.client(), Outside::new(clock));
        tokio::spawn(carry_out::run(outside.clone(), Some(client.clone()), None));
        let (timeout, name) = (config.api_timeout, "gpupack".to_owned());
        let (notices, notice_writer) = notices(client, name, QUEUED_EVENTS, timeout);
        tokio::spawn(notice_writer.run());
        let term = Term::alone(clock, FenceWriter::random());
        let writer = ApiWriter::new(outside, timeout, term);
        let app = Arc::new(App::new(ledger, config, writer, notices));
        self.show_to(PodWatch::new(Arc::clone(&app.ledger), app.clone(), clock));
        app
    }

    /// Creates a pod, or replaces it. Another one of its name has ended then.
    pub fn put(&self, pod: Value) {
        let store = &mut *self.0.lock();
        let text = |key: &str| pod["metadata"][key].as_str().unwrap_or_default();
        let before = store.read(&format!("{}/{}", text("namespace"), text("name")));
        let before = before.as_ref().and_then(uid_of).filter(|uid| uid.as_str() != text("uid"));
        before.iter().for_each(|uid| store.remove(uid));
        store.write(pod);
    }

    /// Creates the pod of a call of *filter*, unless it or its name is known.
    ///
    /// # Errors
    /// Why a pod that *filter* could read is not created.
    pub fn create_called(&self, body: &[u8]) -> Result<(), String> {
        let Ok(Called { pod: Some(text) }) = serde_json::from_slice(body) else { return Ok(()) };
        let Ok(SeenPod { pod, .. }) = SeenPod::from_json(text.get()) else { return Ok(()) };
        let store = &mut *self.0.lock();
        let has_name = store.pods.contains_key(pod.name.to_string().as_str());
        if has_name || store.names.contains_key(&pod.uid) {
            return Ok(());
        }
        // Its types are those of the real API server. So what is written into later is an object.
        let created: Pod = serde_json::from_str(text.get())
            .map_err(|error| format!("`Pod`: the API server has no such pod: {error}"))?;
        if store.called.len() == MOST_CALLED {
            return Err(format!("the demo has {MOST_CALLED} pods of calls: start it again"));
        }
        store.called.insert(pod.uid);
        store.write(json!(created));
        Ok(())
    }

    /// The pod with this UID.
    pub fn pod(&self, uid: &PodUid) -> Option<Pod> {
        let store = self.0.lock();
        serde_json::from_str(store.pods.get(store.names.get(uid)?)?).ok()
    }

    /// Writes the status of a pod, as its kubelet does.
    pub fn set_status(&self, uid: &PodUid, status: Value) {
        let store = &mut *self.0.lock();
        let Some(mut pod) = store.names.get(uid).and_then(|name| store.read(name)) else { return };
        pod["status"] = status;
        store.write(pod);
    }

    /// Deletes a pod, which has ended then.
    pub fn delete(&self, uid: &PodUid) {
        self.0.lock().remove(uid);
    }

    /// The pods with a container whose resources were changed in place since the last call.
    pub fn take_resized(&self) -> BTreeSet<PodUid> {
        std::mem::take(&mut self.0.lock().resized)
    }

    /// The pods whose annotations were patched while they waited since the last call: kube-scheduler tries those
    /// again.
    pub fn take_annotated(&self) -> BTreeSet<PodUid> {
        std::mem::take(&mut self.0.lock().annotated)
    }

    /// The pods that were evicted since the last call.
    pub fn take_evicted(&self) -> BTreeSet<PodUid> {
        std::mem::take(&mut self.0.lock().evicted)
    }

    /// A client of it. For a thread of a tokio runtime.
    pub fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.map_err(io::Error::other)?;
                let (status, text) = server.answer(&Request::from_parts(head, body.to_vec()));
                let response = Response::builder().status(status);
                response.body(Body::from(text.into_bytes())).map_err(io::Error::other)
            }
        });
        Client::new(service, "default")
    }

    /// Answers one request.
    pub fn answer(&self, request: &Request<Vec<u8>>) -> HttpAnswer {
        let (method, path) = (request.method(), request.uri().path());
        let Ok(body) = serde_json::from_slice::<Value>(match request.body().as_slice() {
            [] => b"null",
            body => body,
        }) else {
            return refusal(400, "the body is not JSON");
        };
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let store = &mut *self.0.lock();
        match (method, &parts[..]) {
            // They are not kept.
            (&Method::POST, ["apis", "events.k8s.io", "v1", "namespaces", _, "events"]) => {
                (201, body.to_string())
            }
            (&Method::PATCH, ["apis", "events.k8s.io", "v1", "namespaces", _, "events", _]) => {
                (200, body.to_string())
            }
            (_, ["api", "v1", "namespaces", namespace, "pods", name, rest @ ..]) => {
                let name = format!("{namespace}/{name}");
                let Some(pod) = store.read(&name) else { return refusal(404, "pods not found") };
                match (method, rest) {
                    (&Method::GET, []) => (200, pod.to_string()),
                    (&Method::PATCH, []) => store.annotate(pod, &body),
                    (&Method::PATCH, ["resize"]) => store.resize(pod, &body),
                    (&Method::POST, ["binding"]) => store.bind(pod, &body),
                    (&Method::POST, ["eviction"]) => store.evict(&pod, &body),
                    _ => refusal(405, "this server does not do that with pods"),
                }
            }
            _ => refusal(404, "the server could not find the requested resource"),
        }
    }
}

impl Store {
    fn read(&self, name: &str) -> Option<Value> {
        serde_json::from_str(self.pods.get(name)?).ok()
    }

    /// Gives a pod a new version, and shows it.
    fn write(&mut self, mut pod: Value) -> String {
        self.version += 1;
        pod["metadata"]["resourceVersion"] = self.version.to_string().into();
        let text = pod.to_string();
        let Ok(seen) = SeenPod::from_json(&text) else {
            return text; // without a UID it is no pod
        };
        self.names.insert(seen.pod.uid.clone(), seen.pod.name.to_string());
        self.pods.insert(seen.pod.name.to_string(), text.as_str().into());
        if let Some(watch) = &mut self.watch {
            watch.take(WatchEvent::Seen(seen));
        }
        text
    }

    fn remove(&mut self, uid: &PodUid) {
        let Some(text) = self.names.remove(uid).and_then(|name| self.pods.remove(&name)) else {
            return;
        };
        self.version += 1;
        self.resized.remove(uid);
        self.annotated.remove(uid);
        self.called.remove(uid);
        if let (Some(watch), Ok(pod)) = (&mut self.watch, SeenPod::from_json(&text)) {
            watch.take(WatchEvent::Deleted(pod));
        }
    }

    /// Changes annotations and labels.
    fn annotate(&mut self, mut pod: Value, patch: &Value) -> HttpAnswer {
        if let Some(refused) = refused_patch(&pod["metadata"], &patch["metadata"]) {
            return refused;
        }
        let parts = patch.as_object();
        if !parts.is_some_and(|parts| parts.keys().all(|key| key == "metadata")) {
            return refusal(422, "pod updates may not change fields other than these: metadata");
        }
        let before = pod.clone();
        for part in ["annotations", "labels"] {
            for (key, value) in patch["metadata"][part].as_object().into_iter().flatten() {
                match value {
                    Value::Null => {
                        pod["metadata"][part].as_object_mut().map(|known| known.remove(key));
                    }
                    value => pod["metadata"][part][key] = value.clone(),
                }
            }
        }
        if pod == before {
            return (200, pod.to_string());
        }
        let annotations = pod["metadata"]["annotations"].as_object().into_iter().flatten();
        let bytes = annotations.map(|(key, value)| key.len() + value.as_str().map_or(0, str::len));
        if bytes.sum::<usize>() > MOST_ANNOTATIONS {
            return refusal(
                422,
                "metadata.annotations: Too long: may not be more than 262144 bytes",
            );
        }
        if pod["spec"]["nodeName"].is_null() {
            self.annotated.extend(uid_of(&pod));
        }
        (200, self.write(pod))
    }

    /// Changes the resources of containers in place.
    fn resize(&mut self, mut pod: Value, patch: &Value) -> HttpAnswer {
        if let Some(refused) = refused_patch(&pod["metadata"], &patch["metadata"]) {
            return refused;
        }
        for changed in patch["spec"]["containers"].as_array().into_iter().flatten() {
            let mut containers = pod["spec"]["containers"].as_array_mut().into_iter().flatten();
            let Some(known) = containers.find(|known| known["name"] == changed["name"]) else {
                return refusal(422, "spec.containers: Forbidden: no container may be added");
            };
            for kind in ["requests", "limits"] {
                let amounts = changed["resources"][kind].as_object().into_iter().flatten();
                amounts.for_each(|(name, amount)| known["resources"][kind][name] = amount.clone());
            }
        }
        self.resized.extend(uid_of(&pod));
        (200, self.write(pod))
    }

    /// Gives a pod its node, and the annotations of the Binding.
    fn bind(&mut self, mut pod: Value, binding: &Value) -> HttpAnswer {
        let metadata = &binding["metadata"];
        for key in ["uid", "resourceVersion"] {
            if !metadata[key].is_null() && metadata[key] != pod["metadata"][key] {
                return refusal(409, &format!("the {key} in the precondition does not match"));
            }
        }
        if pod["metadata"]["deletionTimestamp"].is_string() {
            return refusal(409, "the pod is being deleted, cannot be assigned to a host");
        }
        if let Some(node) = pod["spec"]["nodeName"].as_str() {
            return refusal(409, &format!("the pod is already assigned to node \"{node}\""));
        }
        if pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty()) {
            return refusal(409, "the pod has non-empty .spec.schedulingGates");
        }
        let Some(node) = binding["target"]["name"].as_str().filter(|name| !name.is_empty()) else {
            return refusal(422, "target.name: Required value");
        };
        pod["spec"]["nodeName"] = node.into();
        for (key, value) in metadata["annotations"].as_object().into_iter().flatten() {
            pod["metadata"]["annotations"][key] = value.clone();
        }
        uid_of(&pod).iter().for_each(|uid| _ = self.annotated.remove(uid));
        self.write(pod);
        (201, success())
    }

    /// Ends a pod. No disruption budget protects it.
    fn evict(&mut self, pod: &Value, eviction: &Value) -> HttpAnswer {
        let options = &eviction["deleteOptions"];
        let wanted = &options["preconditions"]["uid"];
        if !wanted.is_null() && *wanted != pod["metadata"]["uid"] {
            return refusal(409, "the UID in the precondition does not match");
        }
        let dry_run = options["dryRun"].as_array().into_iter().flatten();
        if !dry_run.into_iter().any(|stage| stage == "All") {
            uid_of(pod).iter().for_each(|uid| self.remove(uid));
            self.evicted.extend(uid_of(pod));
        }
        (201, success())
    }
}

/// Why a patch with these preconditions is refused.
fn refused_patch(known: &Value, patch: &Value) -> Option<HttpAnswer> {
    let differs = |key: &str| !patch[key].is_null() && patch[key] != known[key];
    if differs("uid") {
        return Some(refusal(422, "metadata.uid: Invalid value: field is immutable"));
    }
    differs("resourceVersion").then(|| refusal(409, "the object has been modified"))
}

fn uid_of(pod: &Value) -> Option<PodUid> {
    pod["metadata"]["uid"].as_str().map(PodUid::new)
}

fn success() -> String {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}).to_string()
}

fn refusal(code: u16, message: &str) -> HttpAnswer {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
        "message": message});
    (code, status.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "/api/v1/namespaces/team/pods/infer";

    fn waiting() -> ApiServer {
        let server = ApiServer::default();
        server.put(json!({
            "metadata": {"namespace": "team", "name": "infer", "uid": "u1", "annotations": {"a": "1"}},
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "10m"}}}]},
        }));
        server
    }

    /// The status of the answer to each request, and the pod then.
    fn after(server: &ApiServer, requests: &[(&str, &str, Value)]) -> (Vec<u16>, Value) {
        let ask = |method: &str, path: &str, body: &Value| {
            let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
            server.answer(&Request::builder().method(method).uri(path).body(body).unwrap())
        };
        let asked = requests
            .iter()
            .map(|(method, rest, body)| ask(method, &format!("{POD}{rest}"), body).0);
        let statuses = asked.collect();
        (statuses, serde_json::from_str(&ask("GET", POD, &Value::Null).1).unwrap())
    }

    fn call(pod: &Value) -> Vec<u8> {
        json!({"Pod": pod, "NodeNames": ["a"]}).to_string().into_bytes()
    }

    fn binding(uid: &str, version: &str) -> Value {
        json!({"metadata": {"uid": uid, "resourceVersion": version, "annotations": {"a": "2", "b": "3"}},
            "target": {"kind": "Node", "name": "n1"}})
    }

    #[test]
    fn a_call_creates_its_pod_once_and_takes_no_name() {
        let server = waiting();
        let called = |name: &str, uid: &str| {
            let pod = json!({"metadata": {"namespace": "team", "name": name, "uid": uid},
                "spec": {"containers": [{"name": "c"}]}});
            server.create_called(&call(&pod)).unwrap();
            server.pod(&PodUid::new(uid)).and_then(|pod| pod.metadata.resource_version)
        };
        let version = called("other", "u-2");
        assert!(version.is_some());
        assert_eq!(called("other", "u-2"), version, "it is not written again");
        assert_eq!(called("infer", "u-3"), None, "another pod has the name");
        server.create_called(b"{\"Pod\": 7}").unwrap();
        server.create_called(b"no call").unwrap();
    }

    #[test]
    fn a_call_creates_no_pod_that_a_write_could_not_change() {
        let server = ApiServer::default();
        let pod = |metadata: Value| json!({"metadata": metadata, "spec": {"containers": []}});
        let sound = json!({"namespace": "team", "name": "infer", "uid": "u1"});
        let text = |pod: &Value| SeenPod::from_json(&pod.to_string()).map(|pod| pod.pod.uid);
        for (part, value) in [
            ("/metadata", json!([{}, "infer", "team", "u1"])),
            ("/metadata/labels", json!(["a"])),
            ("/metadata/annotations", json!("a")),
            ("/spec", json!([])),
            ("/spec/containers", json!([[]])),
        ] {
            let mut odd = pod(sound.clone());
            odd["metadata"]["labels"] = json!({});
            odd["metadata"]["annotations"] = json!({});
            *odd.pointer_mut(part).unwrap() = value;
            let refused = server.create_called(&call(&odd));
            assert_eq!(refused.is_err(), text(&odd).is_ok(), "{part}: {refused:?}");
            assert!(server.0.lock().pods.is_empty(), "{part}");
        }
        server.create_called(&call(&pod(sound))).unwrap();
        let (statuses, _) = after(&server, &[("POST", "/binding", binding("u1", "1"))]);
        assert_eq!(statuses, [201]);
    }

    #[test]
    fn a_call_too_many_says_so_and_one_that_ends_makes_room() {
        let server = ApiServer::default();
        let create = |number: usize| {
            let (name, uid) = (format!("p{number}"), format!("u{number}"));
            let metadata = json!({"namespace": "team", "name": name, "uid": uid});
            server.create_called(&call(&json!({"metadata": metadata})))
        };
        (0..MOST_CALLED).for_each(|number| create(number).unwrap());
        assert!(create(MOST_CALLED).unwrap_err().contains("start it again"));
        server.delete(&PodUid::new("u7"));
        create(MOST_CALLED).unwrap();
    }

    #[test]
    fn a_binding_needs_its_uid_and_version_and_succeeds_once() {
        let server = waiting();
        let (statuses, pod) = after(
            &server,
            &[
                ("POST", "/binding", binding("other", "1")),
                ("POST", "/binding", binding("u1", "7")),
                ("POST", "/binding", binding("u1", "1")),
                ("POST", "/binding", binding("u1", "2")),
            ],
        );
        assert_eq!(statuses, [409, 409, 201, 409]);
        assert_eq!(
            (&pod["spec"]["nodeName"], &pod["metadata"]["resourceVersion"]),
            (&json!("n1"), &json!("2"))
        );
        assert_eq!(pod["metadata"]["annotations"], json!({"a": "2", "b": "3"}));
        let ends = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let gated = json!({"schedulingGates": [{"name": "quota"}]});
        for (version, metadata, spec) in [("3", ends, json!({})), ("4", json!({}), gated)] {
            let mut pod = json!({"metadata": metadata, "spec": spec});
            for (key, value) in [("namespace", "team"), ("name", "infer"), ("uid", "u1")] {
                pod["metadata"][key] = value.into();
            }
            server.put(pod);
            let (statuses, _) = after(&server, &[("POST", "/binding", binding("u1", version))]);
            assert_eq!(statuses, [409], "{version}");
        }
    }

    #[test]
    fn a_patch_changes_annotations_of_its_version_and_nothing_else() {
        let server = waiting();
        let patch = |metadata: Value| json!({"metadata": metadata});
        let long = "x".repeat(MOST_ANNOTATIONS);
        let (statuses, pod) = after(
            &server,
            &[
                ("PATCH", "", patch(json!({"uid": "other", "annotations": {"a": "4"}}))),
                ("PATCH", "", patch(json!({"resourceVersion": "7", "annotations": {"a": "4"}}))),
                ("PATCH", "", patch(json!({"annotations": {"a": long}}))),
                ("PATCH", "", json!({"spec": {"nodeName": "n1"}})),
                ("PATCH", "", patch(json!({"annotations": {"a": "1"}}))),
                (
                    "PATCH",
                    "",
                    patch(json!({"resourceVersion": "1", "annotations": {"a": null, "b": "5"}})),
                ),
            ],
        );
        assert_eq!(statuses, [422, 409, 422, 422, 200, 200]);
        assert_eq!(pod["metadata"]["annotations"], json!({"b": "5"}));
        assert_eq!(
            pod["metadata"]["resourceVersion"], "2",
            "one that changes nothing is no version"
        );
        assert_eq!(server.take_annotated(), BTreeSet::from([PodUid::new("u1")]));
    }

    #[test]
    fn a_resize_changes_a_container_and_an_eviction_ends_its_pod_alone() {
        let server = waiting();
        let resize = |name: &str| {
            let container = json!({"name": name, "resources": {"requests": {"cpu": "11m"}}});
            json!({"spec": {"containers": [container]}})
        };
        let (statuses, pod) = after(
            &server,
            &[("PATCH", "/resize", resize("other")), ("PATCH", "/resize", resize("main"))],
        );
        assert_eq!(statuses, [422, 200]);
        assert_eq!(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"], "11m");
        assert_eq!(server.take_resized(), BTreeSet::from([PodUid::new("u1")]));
        let of = |uid: &str| json!({"deleteOptions": {"preconditions": {"uid": uid}}});
        let tried = json!({"deleteOptions": {"preconditions": {"uid": "u1"}, "dryRun": ["All"]}});
        let (statuses, gone) = after(
            &server,
            &[
                ("POST", "/eviction", of("other")),
                ("POST", "/eviction", tried),
                ("POST", "/eviction", of("u1")),
                ("POST", "/eviction", of("u1")),
            ],
        );
        assert_eq!((statuses, &gone["code"]), (vec![409, 201, 201, 404], &json!(404)));
    }
}
