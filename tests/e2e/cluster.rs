//! What a scenario does to the cluster, as its administrator.

use std::fmt::Debug;
use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::core::v1::{Event, Namespace, Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::clock;
use crate::fleet::{Fleet, FleetNode};
use crate::pods::PodPlan;
use crate::webhook::until_none_refuses;

/// Requests in flight when many objects are made.
const IN_FLIGHT: usize = 32;

/// The API server, seen from one namespace.
#[derive(Clone)]
pub(crate) struct Cluster {
    /// The administrator's client.
    pub(crate) client: Client,
    /// The namespace of the scenario.
    pub(crate) namespace: String,
}

impl Cluster {
    /// An empty cluster with a namespace of that name: all pods and nodes that earlier scenarios
    /// left, finished or failed, are removed.
    pub(crate) async fn fresh(client: Client, namespace: &str) -> Self {
        let cluster = Self { client, namespace: namespace.to_owned() };
        cluster.admit_everything().await;
        let pods: Api<Pod> = Api::all(cluster.client.clone());
        let left = pods.list(&ListParams::default()).await.expect("pods can be listed");
        stream::iter(left)
            .for_each_concurrent(IN_FLIGHT, |pod| {
                let client = cluster.client.clone();
                async move {
                    let place = pod.metadata.namespace.unwrap_or_default();
                    let name = pod.metadata.name.unwrap_or_default();
                    remove(&Api::<Pod>::namespaced(client, &place), &name).await;
                }
            })
            .await;
        let nodes: Api<Node> = Api::all(cluster.client.clone());
        let left = nodes.list(&ListParams::default()).await.expect("nodes can be listed");
        stream::iter(left)
            .for_each_concurrent(IN_FLIGHT, |node| {
                let nodes = nodes.clone();
                async move { remove(&nodes, &node.metadata.name.unwrap_or_default()).await }
            })
            .await;
        cluster.namespace_created(namespace).await;
        until_none_refuses(&cluster).await;
        cluster
    }

    /// Removes what an earlier scenario left that blocks pods.
    async fn admit_everything(&self) {
        let webhooks: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        remove(&webhooks, "gpupack").await;
        let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(self.client.clone());
        for binding in bindings.list(&ListParams::default()).await.expect("bindings can be listed")
        {
            remove(&bindings, &binding.metadata.name.unwrap_or_default()).await;
        }
    }

    /// The same cluster, seen from another namespace with these labels.
    pub(crate) async fn beside(&self, namespace: &str, labels: Value) -> Self {
        self.namespace_created(namespace).await;
        let cluster = Self { namespace: namespace.to_owned(), ..self.clone() };
        cluster.label(labels).await;
        cluster
    }

    /// Changes labels of the namespace.
    pub(crate) async fn label(&self, labels: Value) {
        let api: Api<Namespace> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
        let patched = api.patch(&self.namespace, &PatchParams::default(), &patch).await;
        patched.expect("the namespace is there");
    }

    async fn namespace_created(&self, name: &str) {
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        let object: Namespace = serde_json::from_value(object).expect("a valid namespace object");
        let api = Api::all(self.client.clone());
        match api.create(&PostParams::default(), &object).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => panic!("cannot create the namespace {name}: {error}"),
        }
    }

    /// The pods of the namespace.
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates the nodes of the fleet, ready and without taints.
    pub(crate) async fn add_nodes(&self, fleet: &Fleet) {
        let api: Api<Node> = Api::all(self.client.clone());
        stream::iter(&fleet.nodes)
            .for_each_concurrent(IN_FLIGHT, |node| add_node(&api, node))
            .await;
    }

    /// Creates the pods, up to 32 at a time. Returns how long that took.
    pub(crate) async fn add_pods(&self, plans: &[PodPlan]) -> Duration {
        let started = clock::now();
        let api = self.pods();
        stream::iter(plans)
            .for_each_concurrent(IN_FLIGHT, |plan| {
                let api = api.clone();
                async move {
                    let created = api.create(&PostParams::default(), &plan.to_pod()).await;
                    created.unwrap_or_else(|error| panic!("cannot create {}: {error}", plan.name));
                }
            })
            .await;
        started.elapsed()
    }

    /// Creates a priority class, and waits until admission knows it: it reads classes from a cache.
    pub(crate) async fn add_priority_class(&self, name: &str, value: i32) {
        self.add_class(name, value, "PreemptLowerPriority").await;
    }

    /// The same whose pods have no others evicted.
    pub(crate) async fn add_class_that_never_preempts(&self, name: &str, value: i32) {
        self.add_class(name, value, "Never").await;
    }

    async fn add_class(&self, name: &str, value: i32, policy: &str) {
        let class = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": {"name": name}, "value": value, "preemptionPolicy": policy});
        let class: PriorityClass = serde_json::from_value(class).expect("a valid class object");
        let api: Api<PriorityClass> = Api::all(self.client.clone());
        match api.create(&PostParams::default(), &class).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => panic!("cannot create the class {name}: {error}"),
        }
        let tried = PodPlan::new(format!("tries-{name}")).important(name).to_pod();
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let until = clock::now() + Duration::from_secs(10);
        while let Err(error) = self.pods().create(&dry, &tried).await {
            assert!(clock::now() < until, "admission does not know the class {name}: {error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// A disruption budget that lets nobody evict the pod of this name. No controller works out its status.
    pub(crate) async fn add_budget(&self, name: &str) -> Api<PodDisruptionBudget> {
        self.add_budget_of(name, name).await
    }

    /// The same with a name of its own.
    pub(crate) async fn add_budget_of(&self, name: &str, pod: &str) -> Api<PodDisruptionBudget> {
        let object = json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"e2e/pod": pod}}},
        });
        let object: PodDisruptionBudget =
            serde_json::from_value(object).expect("a valid disruption budget");
        let budgets = Api::namespaced(self.client.clone(), &self.namespace);
        budgets.create(&PostParams::default(), &object).await.expect("a new budget");
        budgets
    }

    /// Claims of volumes that nobody ever provisions, once a node is chosen for their pod.
    pub(crate) async fn add_claims(&self, names: impl Iterator<Item = String>) {
        let class = json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": {"name": "never"}, "provisioner": "e2e.example.com/never",
            "volumeBindingMode": "WaitForFirstConsumer"});
        let class: StorageClass = serde_json::from_value(class).expect("a valid class");
        match Api::all(self.client.clone()).create(&PostParams::default(), &class).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => panic!("cannot create the class of volumes: {error}"),
        }
        let claims: Api<PersistentVolumeClaim> =
            Api::namespaced(self.client.clone(), &self.namespace);
        for name in names {
            let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {"name": name}, "spec": {"storageClassName": "never",
                    "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "1Gi"}}}});
            let claim = serde_json::from_value(claim).expect("a valid claim");
            claims.create(&PostParams::default(), &claim).await.expect("a new claim");
        }
    }

    /// Lets no more pods be bound to a node.
    pub(crate) async fn cordon(&self, node: &str) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"spec": {"unschedulable": true}}));
        let patched = nodes.patch(node, &PatchParams::default(), &patch).await;
        patched.expect("the node is there");
    }

    /// Deletes a node.
    pub(crate) async fn delete_node(&self, node: &str) {
        remove(&Api::<Node>::all(self.client.clone()), node).await;
    }

    /// Sets a node's condition `Ready` as the node controller does when its kubelet is gone.
    pub(crate) async fn lose_kubelet(&self, node: &str) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let status = json!({"status": {"conditions": [
            {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"},
        ]}});
        let patched =
            nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(status)).await;
        patched.expect("the node is there");
    }

    /// Asks a pod to end, as `kubectl delete` does.
    pub(crate) async fn ask_to_end(&self, name: &str) {
        let asked = self.pods().delete(name, &DeleteParams::default()).await;
        asked.unwrap_or_else(|error| panic!("cannot delete {name}: {error}"));
    }

    /// Deletes one pod immediately, as if its kubelet had ended it.
    pub(crate) async fn delete_pod(&self, name: &str) {
        remove(&self.pods(), name).await;
    }

    /// Deletes all pods of the namespace immediately.
    pub(crate) async fn delete_all_pods(&self) {
        let now = DeleteParams::default().grace_period(0);
        let deleted = self.pods().delete_collection(&now, &ListParams::default()).await;
        deleted.expect("pods can be deleted");
    }

    /// Sets the phase of a pod, as its kubelet would.
    pub(crate) async fn set_phase(&self, name: &str, phase: &str) {
        let patch = Patch::Merge(json!({"status": {"phase": phase}}));
        let patched = self.pods().patch_status(name, &PatchParams::default(), &patch).await;
        patched.unwrap_or_else(|error| panic!("cannot make {name} {phase}: {error}"));
    }

    /// Reason, pod and text of the namespace's events about pods; `count` copies of a repeated one.
    pub(crate) async fn events(&self) -> Vec<SeenEvent> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        let events = api.list(&ListParams::default()).await.expect("events can be listed");
        let seen = |event: Event| SeenEvent {
            reason: event.reason.unwrap_or_default(),
            pod: event.involved_object.name.unwrap_or_default(),
            message: event.message.unwrap_or_default(),
        };
        events.into_iter().map(seen).collect()
    }
}

/// What the tests read of an event.
#[derive(Debug, Clone)]
pub(crate) struct SeenEvent {
    /// Its reason, one word.
    pub(crate) reason: String,
    /// Name of the pod.
    pub(crate) pod: String,
    /// Its text.
    pub(crate) message: String,
}

async fn add_node(api: &Api<Node>, node: &FleetNode) {
    let name = &node.name;
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {
        "name": name, "labels": {"kubernetes.io/hostname": name},
    }});
    let object: Node = serde_json::from_value(object).expect("a valid node object");
    let created = api.create(&PostParams::default(), &object).await;
    created.unwrap_or_else(|error| panic!("cannot create node {name}: {error}"));
    let amounts = json!({
        "cpu": format!("{}m", node.cpu_milli),
        "memory": format!("{}Mi", node.memory_mib),
        "pods": "500",
    });
    let status = json!({"status": {
        "capacity": amounts, "allocatable": amounts,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Simulated"}],
    }});
    let patched = api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await;
    patched.unwrap_or_else(|error| panic!("cannot set the status of node {name}: {error}"));
    // Admission adds the not-ready taint, and there is no controller that would remove it.
    let untainted = Patch::Merge(json!({"spec": {"taints": null}}));
    let patched = api.patch(name, &PatchParams::default(), &untainted).await;
    patched.unwrap_or_else(|error| panic!("cannot remove the taints of node {name}: {error}"));
}

/// Deletes an object without a grace period; one that is gone already is fine.
async fn remove<K>(api: &Api<K>, name: &str)
where
    K: Resource + Clone + Debug + DeserializeOwned,
{
    match api.delete(name, &DeleteParams::default().grace_period(0)).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => panic!("cannot delete {name}: {error}"),
    }
}
