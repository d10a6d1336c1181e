//! A model of the API server: pods with versions, preconditions, and a log that watches follow.

use std::collections::BTreeMap;

use gpupack::kube_api::pod::seen_pod::SeenPod;
use hyper::Request;
use serde_json::{Map, Value, json};

/// One pod as etcd has it.
#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) created: u64,
    pub(crate) version: u64,
    pub(crate) priority: i64,
    pub(crate) node: Option<String>,
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) is_deleting: bool,
    pub(crate) is_terminal: bool,
    /// What its placement annotation takes of each device: MiB and millionths.
    pub(crate) takes: Vec<(String, u64, u64)>,
}

impl Pod {
    fn taken(&self) -> Vec<(String, u64, u64)> {
        let Some(text) = self.annotations.get("placed.gpupack.dev/placement") else {
            return Vec::new();
        };
        let placement: Value = serde_json::from_str(text).expect("gpupack writes JSON");
        let devices = placement["devices"].as_array().expect("a list of devices");
        let number = |value: &Value| value.as_u64().expect("a number");
        let take = |device: &Value| {
            let id = device["id"].as_str().expect("a device id").to_owned();
            (id, number(&device["mib"]), number(&device["share"]))
        };
        devices.iter().map(take).collect()
    }

    pub(crate) fn json(&self, uid: &str) -> Value {
        let mut metadata = json!({
            "namespace": "team", "name": self.name, "uid": uid,
            "resourceVersion": self.version.to_string(), "annotations": self.annotations,
            "creationTimestamp": format!("2026-01-01T{:02}:{:02}:{:02}Z", self.created / 3_600_000,
                self.created / 60_000 % 60, self.created / 1_000 % 60),
        });
        if self.is_deleting {
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        }
        let mut spec = json!({"schedulerName": "gpupack", "priority": self.priority,
            "containers": [{"name": "main"}]});
        if let Some(node) = &self.node {
            spec["nodeName"] = node.as_str().into();
        }
        let phase = match (self.is_terminal, &self.node) {
            (true, _) => "Succeeded",
            (false, Some(_)) => "Running",
            (false, None) => "Pending",
        };
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec,
            "status": {"phase": phase}})
    }
}

/// A change that watches show.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) uid: String,
    pub(crate) pod: Value,
    pub(crate) seen: SeenPod,
    pub(crate) is_deleted: bool,
}

impl Change {
    fn new(uid: &str, pod: &Pod, is_deleted: bool) -> Self {
        let pod = pod.json(uid);
        Self { uid: uid.to_owned(), seen: seen(&pod), pod, is_deleted }
    }
}

/// A pod as gpupack reads it.
pub(crate) fn seen(pod: &Value) -> SeenPod {
    SeenPod::from_json(&pod.to_string()).expect("a pod")
}

/// The pods, and everything that happened to them.
#[derive(Default)]
pub(crate) struct Api {
    pub(crate) pods: BTreeMap<String, Pod>,
    pub(crate) log: Vec<Change>,
    version: u64,
    /// Pods that were evicted or deleted by a request of gpupack.
    pub(crate) ended_by_us: Vec<String>,
}

impl Api {
    pub(crate) fn create(&mut self, uid: &str, created: u64, priority: i64, annotations: Value) {
        let annotations = serde_json::from_value(annotations).expect("texts");
        let pod = Pod {
            name: uid.to_owned(),
            created,
            version: 0,
            priority,
            node: None,
            annotations,
            is_deleting: false,
            is_terminal: false,
            takes: Vec::new(),
        };
        self.pods.insert(uid.to_owned(), pod);
        self.changed(uid);
    }

    /// Gives the pod a new version, and logs it.
    pub(crate) fn changed(&mut self, uid: &str) {
        self.version += 1;
        let Some(pod) = self.pods.get_mut(uid) else { return };
        pod.version = self.version;
        pod.takes = pod.taken();
        self.log.push(Change::new(uid, pod, false));
    }

    pub(crate) fn remove(&mut self, uid: &str) {
        let Some(pod) = self.pods.remove(uid) else { return };
        self.version += 1;
        self.log.push(Change::new(uid, &pod, true));
    }

    /// Carries out one request. Status and body.
    pub(crate) fn answer(&mut self, request: &Request<Vec<u8>>) -> (u16, Value) {
        let path = request.uri().path().to_owned();
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let mut parts = path.trim_start_matches("/api/v1/namespaces/team/pods/").split('/');
        let name = parts.next().unwrap_or_default().to_owned();
        let Some(uid) = self.pods.iter().find(|(_, pod)| pod.name == name) else {
            return refusal(404, "pods not found");
        };
        let uid = uid.0.clone();
        match (request.method().as_str(), parts.next()) {
            ("GET", None) => (200, self.pods[&uid].json(&uid)),
            ("PATCH", None) => self.patch(&uid, &body),
            ("POST", Some("binding")) => self.bind(&uid, &body),
            ("POST", Some("eviction")) => {
                self.ended_by_us.push(uid);
                refusal(429, "no evictions here")
            }
            (method, rest) => panic!("gpupack sent {method} {path} {rest:?}"),
        }
    }

    fn patch(&mut self, uid: &str, patch: &Value) -> (u16, Value) {
        let pod = self.pods.get_mut(uid).expect("found above");
        let metadata = &patch["metadata"];
        if metadata["uid"] != uid {
            return refusal(409, "the UID in the precondition does not match");
        }
        let version = &metadata["resourceVersion"];
        if !version.is_null() && *version != *pod.version.to_string() {
            return refusal(409, "the object has been modified");
        }
        let before = pod.annotations.clone();
        for (key, value) in metadata["annotations"].as_object().unwrap_or(&Map::new()) {
            match value.as_str() {
                Some(value) => drop(pod.annotations.insert(key.clone(), value.to_owned())),
                None => drop(pod.annotations.remove(key)),
            }
        }
        if pod.annotations != before {
            self.changed(uid);
        }
        (200, self.pods[uid].json(uid))
    }

    fn bind(&mut self, uid: &str, binding: &Value) -> (u16, Value) {
        let pod = self.pods.get_mut(uid).expect("found above");
        let metadata = &binding["metadata"];
        if metadata["uid"] != uid || metadata["resourceVersion"] != *pod.version.to_string() {
            return refusal(409, "the object has been modified");
        }
        if pod.node.is_some() || pod.is_deleting {
            return refusal(409, "pod is already assigned, or is being deleted");
        }
        pod.node = binding["target"]["name"].as_str().map(str::to_owned);
        for (key, value) in metadata["annotations"].as_object().unwrap_or(&Map::new()) {
            pod.annotations.insert(key.clone(), value.as_str().expect("a text").to_owned());
        }
        self.changed(uid);
        (201, json!({"kind": "Status", "status": "Success", "code": 201}))
    }
}

pub(crate) fn refusal(code: u16, message: &str) -> (u16, Value) {
    (code, json!({"kind": "Status", "status": "Failure", "code": code, "message": message}))
}
