//! A model of the API server: pods with versions, preconditions, and a log that watches follow.

use std::collections::{BTreeMap, BTreeSet};

use hyper::Request;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::request::placement::DEVICES;
use serde_json::{Map, Value, json};

/// The annotation with devices and amounts.
pub(super) const PLACEMENT: &str = "placed.gpupack.dev/placement";

/// A class of workloads whose pods are evicted for no other pod, unless they are over their team's quota.
pub(super) const PROTECTED: &str = "protected";

/// What a placement takes of a device: its id, MiB, and millionths.
pub(super) type Take = (String, u64, u64);

/// MIG instances: their profile, and how many.
pub(super) type Instances = (&'static str, u32);

/// What a pod is created with, beside its request.
#[derive(Clone, Debug)]
pub(super) struct Template {
    pub(super) name: String,
    /// Its namespace.
    pub(super) team: &'static str,
    pub(super) scheduler: &'static str,
    pub(super) priority: i64,
    /// Whether its class of workloads is [`PROTECTED`].
    pub(super) is_protected: bool,
    pub(super) cpu: u64,
    /// The only zone that it runs in.
    pub(super) zone: Option<&'static str>,
    pub(super) tolerates: bool,
    /// How much of the memory that it requests its processes use, in percent.
    pub(super) uses: u64,
    /// The MIG instances that it requests.
    pub(super) mig: Option<Instances>,
    /// The ReplicaSet that made it, by the number of its Deployment and of its revision.
    pub(super) owner: Option<(u64, u64)>,
    pub(super) annotations: BTreeMap<String, String>,
    /// Whether the webhook has marked the container that gets the GPU, and kubelet names it.
    pub(super) is_marked: bool,
}

/// One pod as etcd has it.
#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) of: Template,
    pub(super) created: u64,
    pub(super) version: u64,
    pub(super) node: Option<String>,
    pub(super) annotations: BTreeMap<String, String>,
    pub(super) is_deleting: bool,
    /// When it is to have ended, once its deletion was requested.
    pub(super) ends: u64,
    pub(super) is_terminal: bool,
    /// When it was bound.
    pub(super) bound: u64,
    /// How often its placement was edited: each time it is written back later.
    pub(super) edits: u32,
    /// Where the log has this version.
    pub(super) logged: usize,
    /// What it was bound with: edits of its annotations change nothing of that.
    pub(super) takes: Vec<Take>,
    /// What it was to run on when it was bound.
    pub(super) first: Vec<Take>,
    /// The era of its node's MIG instances, as the process knew it that wrote the placement. `u64::MAX` if it was
    /// written late, and was old by then.
    pub(super) era: u64,
    /// Its container with the GPU.
    pub(super) container: Container,
}

/// The container of a pod, as its specification and kubelet have it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Container {
    /// How often it started; zero before the first time.
    pub(super) starts: u64,
    /// Its CPU request in thousandths, and what kubelet has carried out of it.
    pub(super) cpu_milli: u64,
    pub(super) actual_cpu_milli: u64,
    /// Whether kubelet says that it does not carry out a change of it now.
    pub(super) is_pending: bool,
    /// Whether kubelet has named it, in runs in which its start may be blind.
    pub(super) is_named: bool,
}

impl Pod {
    pub(super) fn placement(&self) -> Value {
        let text = self.annotations.get(PLACEMENT);
        text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }

    /// Whether it may be moved.
    pub(super) fn is_movable(&self) -> bool {
        self.of.annotations.contains_key("gpupack.dev/movable")
    }

    /// Whether kubelet restarts its container when that is resized: owners may set that themselves, too.
    pub(super) fn restarts_on_resize(&self) -> bool {
        self.is_movable() || self.of.annotations.contains_key("gpu-fraction.limit")
    }

    /// Whether its annotations say that it runs elsewhere than at home.
    pub(super) fn is_guest(&self) -> bool {
        self.placement()["home"].is_array()
    }

    /// Whether its annotations say that it moves to another MIG instance.
    pub(super) fn changes_instances(&self) -> bool {
        self.is_guest() && self.placement()["guest_mig"].is_object()
    }

    /// What its placement annotation allocates, wherever it runs.
    pub(super) fn allocated(&self) -> Vec<Take> {
        let mut takes = self.written();
        if let (Some(home), [take]) = (self.placement()["home"][0].as_str(), &mut takes[..]) {
            take.0 = home.to_owned();
        }
        takes
    }

    /// What it runs on, by its annotations.
    pub(super) fn written(&self) -> Vec<Take> {
        let placement = self.placement();
        let number = |value: &Value| value.as_u64().unwrap_or_default();
        let take = |device: &Value| {
            let id = device["id"].as_str().unwrap_or_default().to_owned();
            (id, number(&device["mib"]), number(&device["share"]))
        };
        placement["devices"].as_array().into_iter().flatten().map(take).collect()
    }

    /// Where its MIG instances lie that gpupack makes: GPU, profile and first unit.
    pub(super) fn places(&self) -> Vec<(String, String, u32)> {
        let text = |place: &Value, key: &str| place[key].as_str().unwrap_or_default().to_owned();
        let start = |place: &Value| place["start"].as_u64().and_then(|it| u32::try_from(it).ok());
        let placement = self.placement();
        let own = placement["devices"].as_array().into_iter().flatten().map(|it| &it["mig"]);
        let other = Some(&placement["guest_mig"]).filter(|_| self.is_guest());
        let places = own.chain(other);
        let known =
            places.filter_map(|it| Some((text(it, "gpu"), text(it, "profile"), start(it)?)));
        known.collect()
    }

    /// The same without the other one to which it moves.
    pub(super) fn home_places(&self) -> Vec<(String, String, u32)> {
        let mut places = self.places();
        places.truncate(self.written().len());
        places
    }

    /// Whether it takes room of its node.
    pub(super) fn is_placed(&self) -> bool {
        self.node.is_some() && !self.is_terminal
    }

    /// How long it may take to end, in ms.
    pub(super) fn grace(&self) -> u64 {
        if self.created.is_multiple_of(3) { 120_000 } else { 30_000 }
    }

    /// Whether its processes use more than it requests.
    pub(super) fn overuses(&self) -> bool {
        self.of.uses > 100
    }

    pub(super) fn wants_gpu(&self) -> bool {
        self.of.mig.is_some() || self.of.annotations.keys().any(|key| key.starts_with("gpu-"))
    }

    fn json(&self, uid: &str) -> Value {
        let Template { name, team, scheduler, priority, cpu, .. } = &self.of;
        let time = |at: u64| {
            let (hour, minute, second) = (at / 3_600_000, at / 60_000 % 60, at / 1_000 % 60);
            format!("2026-01-01T{hour:02}:{minute:02}:{second:02}Z")
        };
        let mut metadata = json!({
            "namespace": team, "name": name, "uid": uid,
            "resourceVersion": self.version.to_string(), "annotations": self.annotations,
            "creationTimestamp": time(self.created),
        });
        if self.is_deleting {
            metadata["deletionTimestamp"] = time(self.ends).into();
        }
        if let Some((of, revision)) = self.of.owner {
            let set = format!("app-{of}-{revision:05}");
            metadata["labels"]["pod-template-hash"] = format!("{revision:05}").into();
            metadata["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet",
                "name": set, "uid": set, "controller": true}]);
        }
        let mut resources = json!({"requests": {"cpu": cpu.to_string()}});
        if let Some((profile, count)) = self.of.mig {
            resources["limits"][format!("nvidia.com/mig-{profile}")] = count.into();
        }
        let mut spec = json!({"schedulerName": scheduler, "priority": priority,
            "containers": [{"name": "main", "resources": resources}]});
        let Container { starts, cpu_milli, actual_cpu_milli, is_pending, .. } = self.container;
        let amount = |milli: u64| json!({"requests": {"cpu": format!("{milli}m")}});
        let mut status = json!({});
        if self.restarts_on_resize() {
            spec["containers"][0]["resources"]["requests"] = amount(cpu_milli)["requests"].clone();
            spec["containers"][0]["resizePolicy"] =
                json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
            if starts > 0 {
                status["containerStatuses"] = json!([{"name": "main",
                    "containerID": format!("c{starts}"), "state": {"running": {}},
                    "resources": amount(actual_cpu_milli)}]);
            }
            if is_pending {
                status["conditions"] = json!([{"type": "PodResizePending", "status": "True",
                    "reason": "Deferred", "message": "Node didn't have enough resource: cpu"}]);
            }
        }
        if self.of.is_marked && self.wants_gpu() {
            let source =
                json!({"fieldRef": {"fieldPath": format!("metadata.annotations['{DEVICES}']")}});
            spec["containers"][0]["env"] =
                json!([{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": source}]);
            if self.container.is_named {
                status["containerStatuses"] = json!([{"name": "main",
                    "containerID": format!("containerd://{uid}"), "state": {"running": {}}}]);
            }
        }
        if self.of.is_protected {
            spec["priorityClassName"] = format!("gpupack-{PROTECTED}").into();
        }
        if let Some(node) = &self.node {
            spec["nodeName"] = node.as_str().into();
        }
        let phase = match (self.is_terminal, &self.node) {
            (true, _) => "Succeeded",
            (false, Some(_)) => "Running",
            (false, None) => "Pending",
        };
        status["phase"] = phase.into();
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec,
            "status": status})
    }
}

/// One entry of the log.
pub(super) struct Change {
    pub(super) uid: String,
    pub(super) pod: Pod,
    /// The same as JSON.
    pub(super) text: String,
    /// The same, as gpupack reads it.
    pub(super) seen: SeenPod,
    pub(super) is_deleted: bool,
}

impl Change {
    fn new(uid: &str, pod: &Pod, is_deleted: bool) -> Self {
        let text = pod.json(uid).to_string();
        let seen = SeenPod::from_json(&text).expect("a pod");
        Self { uid: uid.to_owned(), text, seen, pod: pod.clone(), is_deleted }
    }
}

/// The pods, and everything that happened to them.
#[derive(Default)]
pub(super) struct Api {
    pub(super) pods: BTreeMap<String, Pod>,
    pub(super) log: Vec<Change>,
    version: u64,
    /// The Lease of the replicas.
    pub(super) lease: Option<Value>,
    /// The pods with the label of the leader.
    pub(super) labeled: BTreeSet<String>,
    /// The time of the request that it answers.
    pub(super) now: u64,
    /// Pods whose patches are refused, with the status.
    pub(super) denied: BTreeMap<String, u16>,
    /// Whether evictions are refused because of a disruption budget.
    pub(super) has_budget: bool,
    /// What pods with a controller were made from whose deletion was requested since the last look.
    pub(super) deleted: Vec<Template>,
    /// Pods that a request of gpupack evicted or deleted.
    pub(super) ended_by_us: BTreeSet<String>,
}

impl Api {
    pub(super) fn create(&mut self, uid: &str, created: u64, of: Template) {
        let pod = Pod {
            annotations: of.annotations.clone(),
            container: Container {
                cpu_milli: of.cpu * 1_000,
                actual_cpu_milli: of.cpu * 1_000,
                ..Container::default()
            },
            of,
            created,
            version: 0,
            node: None,
            is_deleting: false,
            ends: 0,
            is_terminal: false,
            bound: 0,
            edits: 0,
            logged: 0,
            takes: Vec::new(),
            first: Vec::new(),
            era: 0,
        };
        self.pods.insert(uid.to_owned(), pod);
        self.changed(uid);
    }

    /// Gives the pod a new version, and logs it.
    pub(super) fn changed(&mut self, uid: &str) {
        self.version += 1;
        let Some(pod) = self.pods.get_mut(uid) else { return };
        (pod.version, pod.logged) = (self.version, self.log.len());
        self.log.push(Change::new(uid, pod, false));
    }

    pub(super) fn remove(&mut self, uid: &str) {
        let Some(pod) = self.pods.remove(uid) else { return };
        self.version += 1;
        self.log.push(Change::new(uid, &pod, true));
    }

    /// Begins the end of a pod: at once if it has no node.
    pub(super) fn delete(&mut self, uid: &str) {
        match self.pods.get_mut(uid) {
            Some(pod) if pod.node.is_some() && !pod.is_deleting => {
                (pod.is_deleting, pod.ends) = (true, self.now + pod.grace());
                self.deleted.extend(pod.of.owner.map(|_| pod.of.clone()));
                self.changed(uid);
            }
            Some(pod) if pod.node.is_none() => self.remove(uid),
            _ => {}
        }
    }

    /// The entry of the log with this version of a pod.
    pub(super) fn change(&self, pod: &Pod) -> &Change {
        &self.log[pod.logged]
    }

    /// The UID of the pod that a request is about.
    pub(super) fn uid_of(&self, path: &str) -> Option<String> {
        let mut parts = path.split('/').skip(4);
        let (team, name) = (parts.next()?, parts.nth(1)?);
        let is_it = |pod: &Pod| pod.of.team == team && pod.of.name == name;
        self.pods.iter().find(|(_, pod)| is_it(pod)).map(|(uid, _)| uid.clone())
    }

    /// Carries out one request. Status and body.
    pub(super) fn answer(&mut self, request: &Request<Vec<u8>>) -> (u16, String) {
        let path = request.uri().path().to_owned();
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        if path.contains("/leases") {
            return self.answer_lease(request.method().as_str(), body);
        }
        if let Some(name) = path.strip_prefix("/api/v1/namespaces/gpu-system/pods") {
            return self.answer_own(name.trim_start_matches('/'), &body);
        }
        let Some(uid) = self.uid_of(&path) else { return refusal(404, "pods not found") };
        let kind = path.split('/').nth(7);
        match (request.method().as_str(), kind) {
            ("GET", None) => (200, self.change(&self.pods[&uid]).text.clone()),
            ("PATCH", None) => self.patch(&uid, &body),
            ("PATCH", Some("resize")) => self.resize(&uid, &body),
            ("POST", Some("binding")) => self.bind(&uid, &body),
            ("POST", Some("eviction")) => self.evict(uid, &body),
            (method, rest) => panic!("gpupack sent {method} {path} {rest:?}"),
        }
    }

    /// The pods of the extender itself: those with the label of the leader, or a change of one.
    fn answer_own(&mut self, name: &str, patch: &Value) -> (u16, String) {
        match patch["metadata"]["labels"]["gpupack.dev/leader"].is_string() {
            _ if name.is_empty() => {
                let items = self.labeled.iter().map(|name| {
                    json!({"metadata": {"name": name, "labels": {"gpupack.dev/leader": "true"}}})
                });
                return (
                    200,
                    json!({"metadata": {}, "items": items.collect::<Vec<_>>()}).to_string(),
                );
            }
            true => self.labeled.insert(name.to_owned()),
            false => self.labeled.remove(name),
        };
        (200, json!({}).to_string())
    }

    fn answer_lease(&mut self, method: &str, mut lease: Value) -> (u16, String) {
        match (method, &self.lease) {
            ("GET", None) => refusal(404, "leases not found"),
            ("GET", Some(lease)) => (200, lease.to_string()),
            ("POST", Some(_)) => refusal(409, "it exists"),
            ("PUT", None) => refusal(404, "leases not found"),
            ("PUT", Some(known))
                if known["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"] =>
            {
                refusal(409, "the object has been modified")
            }
            _ => {
                self.version += 1;
                lease["metadata"]["resourceVersion"] = self.version.to_string().into();
                let text = lease.to_string();
                self.lease = Some(lease);
                (200, text)
            }
        }
    }

    fn patch(&mut self, uid: &str, patch: &Value) -> (u16, String) {
        if let Some(code) = self.denied.get(uid) {
            return refusal(*code, "a webhook refuses it");
        }
        let pod = self.pods.get_mut(uid).expect("found above");
        let metadata = &patch["metadata"];
        if metadata["uid"] != uid {
            return refusal(422, "metadata.uid: field is immutable");
        }
        let version = &metadata["resourceVersion"];
        if !version.is_null() && *version != *pod.version.to_string() {
            return refusal(409, "the object has been modified");
        }
        let before = pod.annotations.clone();
        let (was_guest, was_on) = (pod.is_guest(), pod.written());
        for (key, value) in metadata["annotations"].as_object().unwrap_or(&Map::new()) {
            match value.as_str() {
                Some(value) => drop(pod.annotations.insert(key.clone(), value.to_owned())),
                None => drop(pod.annotations.remove(key)),
            }
        }
        // A guest that cannot be moved is allocated what it runs on.
        if was_guest && !pod.is_guest() && pod.written() == was_on {
            pod.takes = was_on;
        }
        // Its instances were made again: it has the new ones at the same places.
        let written = pod.allocated();
        if metadata["annotations"][PLACEMENT].is_string()
            && !pod.places().is_empty()
            && written.len() == pod.takes.len()
        {
            pod.takes.iter_mut().zip(written).for_each(|(take, (id, ..))| take.0 = id);
        }
        if pod.annotations != before {
            self.changed(uid);
        }
        (200, self.change(&self.pods[uid]).text.clone())
    }

    /// Changes the CPU request of a container in place.
    fn resize(&mut self, uid: &str, patch: &Value) -> (u16, String) {
        if let Some(code) = self.denied.get(uid) {
            return refusal(*code, "a webhook refuses it");
        }
        let pod = self.pods.get_mut(uid).expect("found above");
        let metadata = &patch["metadata"];
        if metadata["uid"] != uid || metadata["resourceVersion"] != *pod.version.to_string() {
            return refusal(409, "the object has been modified");
        }
        let cpu = &patch["spec"]["containers"][0]["resources"]["requests"]["cpu"];
        let milli = cpu.as_str().and_then(|cpu| cpu.strip_suffix('m')?.parse().ok());
        pod.container.cpu_milli = milli.expect("thousandths");
        self.changed(uid);
        (200, self.change(&self.pods[uid]).text.clone())
    }

    /// The API server checks the preconditions that a Binding has.
    fn bind(&mut self, uid: &str, binding: &Value) -> (u16, String) {
        let pod = self.pods.get_mut(uid).expect("found above");
        let metadata = &binding["metadata"];
        let differs = |value: &Value, is: &str| !value.is_null() && *value != *is;
        let version = pod.version.to_string();
        if differs(&metadata["uid"], uid) || differs(&metadata["resourceVersion"], &version) {
            return refusal(409, "the object has been modified");
        }
        if pod.node.is_some() || pod.is_deleting {
            return refusal(409, "pod is already assigned, or is being deleted");
        }
        pod.node = binding["target"]["name"].as_str().map(str::to_owned);
        for (key, value) in metadata["annotations"].as_object().unwrap_or(&Map::new()) {
            pod.annotations.insert(key.clone(), value.as_str().expect("a text").to_owned());
        }
        (pod.takes, pod.first, pod.bound) = (pod.allocated(), pod.written(), self.now);
        self.changed(uid);
        (201, success())
    }

    fn evict(&mut self, uid: String, eviction: &Value) -> (u16, String) {
        if eviction["deleteOptions"]["preconditions"]["uid"] != *uid {
            return refusal(409, "the UID in the precondition does not match");
        }
        if self.has_budget {
            return refusal(429, "it would violate the pod's disruption budget");
        }
        if is_dry_run(eviction) {
            return (201, success());
        }
        self.delete(&uid);
        self.ended_by_us.insert(uid);
        (201, success())
    }
}

/// Whether an eviction is only tried.
pub(super) fn is_dry_run(eviction: &Value) -> bool {
    eviction["deleteOptions"]["dryRun"].as_array().is_some_and(|of| of.iter().any(|it| it == "All"))
}

fn success() -> String {
    json!({"kind": "Status", "status": "Success", "code": 201}).to_string()
}

pub(super) fn refusal(code: u16, message: &str) -> (u16, String) {
    let status = json!({"kind": "Status", "status": "Failure", "code": code, "message": message});
    (code, status.to_string())
}
