//! Facts from the API server: pods and nodes, their state and their changes.
//!
//! The watch only translates. The ledger decides what a fact means. What follows outside the ledger
//! (a waiting pod to requeue, an event to write) goes to the caller's sink.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;

use crate::clock::Clock;
use crate::hardware::device::{NodeName, PodUid, PoolName};
use crate::hardware::units::MemMib;
use crate::kube_api::pod::seen_pod::SeenPod;
use crate::kube_api::pod::start_failure::StartFailure;
use crate::kube_api::pod::watched::{NodeFacts, Watched};
use crate::ledger::change::facts::PodFact;
use crate::ledger::nodes::state::Ledger;
use crate::model::event::LedgerEvent;
use crate::model::request::GpuRequest;
use crate::waste::request_mix::{RequestType, WINDOW};

/// Most different requests that are shared; clusters have a few hundred.
const MAX_REQUESTS: usize = 10_000;

/// Objects per page of a list. Each thread that reads one has the text of a page up to three times
/// in memory: 500 pods of a busy cluster are 6 MB.
const PAGE: u32 = 100;

/// What the watch reports outside the ledger.
pub trait Sink: Send + Sync {
    /// A change caused these events.
    fn events(&self, events: Vec<LedgerEvent>);

    /// Whether this process wrote the Binding of a bound pod, as far as the pod shows.
    fn is_bound_by_us(&self, pod: &SeenPod) -> bool;

    /// A pod was seen; without a node it waits.
    fn pod(&self, pod: &SeenPod);

    /// A container of a placed pod could not be started; reported again at each change of the pod,
    /// also at its end.
    fn start_failed(&self, pod: &SeenPod, failure: &StartFailure);

    /// A pod is deleted or has ended.
    fn pod_ended(&self, uid: &PodUid);

    /// The watch of `pods` or `nodes` received something, or failed and starts again.
    fn watched(&self, resource: &'static str, is_failure: bool);
}

/// The labels of nodes that gpupack reads.
#[derive(Clone, Debug)]
pub struct NodeLabels {
    /// Its value is the node's pool.
    pub pool: String,
    /// Its value is the node's failure domain.
    pub domain: String,
}

/// Watches pods and nodes until `stop`. The ledger counts as listed when both lists are complete.
pub async fn run(
    client: Client,
    ledger: Arc<Ledger>,
    sink: Arc<dyn Sink>,
    clock: Clock,
    labels: NodeLabels,
    stop: watch::Receiver<bool>,
) {
    let (pods_listed, is_pods_listed) = watch::channel(false);
    let (nodes_listed, is_nodes_listed) = watch::channel(false);
    let pods = PodWatch {
        ledger: Arc::clone(&ledger),
        sink: Arc::clone(&sink),
        clock,
        known: BTreeSet::new(),
        relisted: None,
        requests: BTreeSet::new(),
        recalled: Some(BTreeMap::new()),
    };
    let nodes = NodeWatch {
        ledger: Arc::clone(&ledger),
        sink,
        labels,
        known: BTreeSet::new(),
        relisted: None,
    };
    let both_listed = async {
        for mut is_listed in [is_pods_listed, is_nodes_listed] {
            if is_listed.wait_for(|is_listed| *is_listed).await.is_err() {
                return;
            }
        }
        tracing::info!("pods and nodes are listed");
        ledger.set_listed(clock.now());
    };
    let mut stop = stop;
    tokio::select! {
        () = pods.run(client.clone(), pods_listed) => {}
        () = nodes.run(client, nodes_listed) => {}
        () = async { both_listed.await; std::future::pending::<()>().await } => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

struct PodWatch {
    ledger: Arc<Ledger>,
    sink: Arc<dyn Sink>,
    clock: Clock,
    known: BTreeSet<PodUid>,
    relisted: Option<BTreeSet<PodUid>>,
    /// The requests of the pods, each once: thousands of pods have the same.
    requests: BTreeSet<Arc<GpuRequest>>,
    /// During the first list: the requests of the pods that were created last, by their creation.
    recalled: Option<BTreeMap<(i64, PodUid), (RequestType, MemMib)>>,
}

impl PodWatch {
    async fn run(mut self, client: Client, listed: watch::Sender<bool>) {
        let api: Api<Watched<SeenPod>> = Api::all(client);
        let events = watcher(api, watcher::Config::default().page_size(PAGE)).default_backoff();
        let mut events = std::pin::pin!(events.map_err(|error| {
            tracing::warn!(%error, "the watch of pods failed, gpupack retries it");
        }));
        while let Some(event) = events.next().await {
            self.sink.watched("pods", event.is_err());
            match event {
                Err(()) => {}
                Ok(watcher::Event::Init) => self.relisted = Some(BTreeSet::new()),
                Ok(watcher::Event::InitApply(pod) | watcher::Event::Apply(pod)) => {
                    self.see(&pod.facts);
                }
                Ok(watcher::Event::Delete(pod)) => self.end(&pod.facts.pod.uid),
                Ok(watcher::Event::InitDone) => {
                    let listed_now = self.relisted.take().unwrap_or_default();
                    let gone: Vec<PodUid> = self.known.difference(&listed_now).cloned().collect();
                    gone.iter().for_each(|uid| self.end(uid));
                    self.recall();
                    listed.send_replace(true);
                }
            }
        }
    }

    /// Gives the ledger the requests of the pods of the first list. Long-lived pods are frequent
    /// among them; new pods correct that.
    fn recall(&mut self) {
        let recalled = self.recalled.take().into_iter().flatten();
        let requests: Vec<_> =
            recalled.map(|((_, uid), (kind, memory))| (uid, kind, memory)).collect();
        if !requests.is_empty() {
            tracing::info!(
                pods = requests.len(),
                "the request mix is initialized from the existing pods"
            );
            self.ledger.recall(requests.into_iter());
        }
    }

    fn see(&mut self, seen: &SeenPod) {
        if let (Some(recalled), Ok(Some(request))) = (&mut self.recalled, &seen.request) {
            let kind = RequestType::new(Some(request), seen.host.cpu);
            let key = (seen.created_unix_seconds, seen.pod.uid.clone());
            recalled.insert(key, (kind, seen.host.memory));
            if recalled.len() > WINDOW {
                recalled.pop_first();
            }
        }
        self.known.insert(seen.pod.uid.clone());
        if let Some(relisted) = &mut self.relisted {
            relisted.insert(seen.pod.uid.clone());
        }
        let request = seen.request.as_ref().ok().and_then(Option::as_ref);
        let bound_by_us = self.sink.is_bound_by_us(seen);
        let fact = seen.fact(request.map(|request| self.shared(request)));
        let fact = PodFact { bound_by_us, ..fact };
        let events = self.ledger.see_pod(&fact, self.clock.now());
        if seen.is_terminal {
            self.sink.pod_ended(&seen.pod.uid);
        } else {
            self.sink.pod(seen);
        }
        // A pod that had already ended when it was listed is not news.
        let is_news = !seen.is_terminal || self.relisted.is_none();
        if let (true, Ok(Some(_)), Some(failure)) = (is_news, &seen.placement, &seen.start_failure)
        {
            self.sink.start_failed(seen, failure);
        }
        self.sink.events(events);
    }

    /// The request, shared with earlier pods that have an equal one.
    fn shared(&mut self, request: &GpuRequest) -> Arc<GpuRequest> {
        if let Some(known) = self.requests.get(request) {
            return Arc::clone(known);
        }
        if self.requests.len() >= MAX_REQUESTS {
            self.requests.retain(|request| Arc::strong_count(request) > 1);
        }
        let request = Arc::new(request.clone());
        if self.requests.len() < MAX_REQUESTS {
            self.requests.insert(Arc::clone(&request));
        }
        request
    }

    fn end(&mut self, uid: &PodUid) {
        self.known.remove(uid);
        let events = self.ledger.end_pod(uid, self.clock.now());
        self.sink.pod_ended(uid);
        self.sink.events(events);
    }
}

struct NodeWatch {
    ledger: Arc<Ledger>,
    sink: Arc<dyn Sink>,
    labels: NodeLabels,
    known: BTreeSet<NodeName>,
    relisted: Option<BTreeSet<NodeName>>,
}

impl NodeWatch {
    async fn run(mut self, client: Client, listed: watch::Sender<bool>) {
        let api: Api<Watched<NodeFacts>> = Api::all(client);
        let events = watcher(api, watcher::Config::default().page_size(PAGE)).default_backoff();
        let mut events = std::pin::pin!(events.map_err(|error| {
            tracing::warn!(%error, "the watch of nodes failed, gpupack retries it");
        }));
        while let Some(event) = events.next().await {
            self.sink.watched("nodes", event.is_err());
            match event {
                Err(()) => {}
                Ok(watcher::Event::Init) => self.relisted = Some(BTreeSet::new()),
                Ok(watcher::Event::InitApply(node) | watcher::Event::Apply(node)) => {
                    self.see(&node.facts);
                }
                Ok(watcher::Event::Delete(node)) => self.lose(&node.facts.name),
                Ok(watcher::Event::InitDone) => {
                    let listed_now = self.relisted.take().unwrap_or_default();
                    let gone: Vec<NodeName> = self.known.difference(&listed_now).cloned().collect();
                    gone.iter().for_each(|name| self.lose(name));
                    listed.send_replace(true);
                }
            }
        }
    }

    fn see(&mut self, node: &NodeFacts) {
        let name = &node.name;
        self.known.insert(name.clone());
        if let Some(relisted) = &mut self.relisted {
            relisted.insert(name.clone());
        }
        let pool = PoolName::new(node.label(&self.labels.pool));
        let events = self.ledger.see_node(name, node.host, pool);
        self.ledger.see_domain(name, node.label(&self.labels.domain));
        self.ledger.see_unschedulable(name, node.is_unschedulable);
        self.sink.events(events);
    }

    fn lose(&mut self, name: &NodeName) {
        self.known.remove(name);
        self.ledger.lose_node(name);
    }
}
