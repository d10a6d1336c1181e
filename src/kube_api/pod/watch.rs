//! Facts from the API server: pods and nodes, as they are and as they change.
//!
//! The watch only translates. What a fact means is the ledger's business; what follows from it beyond
//! the books (a waiting pod to wake, an event to write) is returned to the caller's sink.

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

/// Most requests that are kept to be shared; clusters have some hundred.
const MAX_REQUESTS: usize = 10_000;

/// Objects of one page of a list. The text of a page is held up to three times, by each thread that reads
/// one: 500 pods of a busy cluster are 6 MB.
const PAGE: u32 = 100;

/// What the watch tells beyond the books.
pub trait Sink: Send + Sync {
    /// A change has these effects.
    fn effects(&self, effects: Vec<LedgerEvent>);

    /// Whether this process wrote the Binding of a bound pod, as far as the pod tells.
    fn is_bound_by_us(&self, pod: &SeenPod) -> bool;

    /// A pod was seen; `None` for its node means that it waits.
    fn pod(&self, pod: &SeenPod);

    /// A pod that was placed has a container that could not be started; told anew at each change of the
    /// pod, also at its end.
    fn start_failed(&self, pod: &SeenPod, failure: &StartFailure);

    /// A pod is gone or terminal.
    fn pod_ended(&self, uid: &PodUid);

    /// The watch of `pods` or `nodes` brought something, or failed and begins anew.
    fn watched(&self, resource: &'static str, is_failure: bool);
}

/// The labels of nodes that are looked at.
#[derive(Clone, Debug)]
pub struct NodeLabels {
    /// Its value is the node's pool.
    pub pool: String,
    /// Its value is the node's failure domain.
    pub domain: String,
}

/// Watches pods and nodes until `stop`; the ledger counts as listed once both lists are complete.
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
    /// The requests of the pods, each once: thousands of pods ask for the same.
    requests: BTreeSet<Arc<GpuRequest>>,
    /// While the first list is read: what the pods ask for that were created last, by when that was.
    recalled: Option<BTreeMap<(i64, PodUid), (RequestType, MemMib)>>,
}

impl PodWatch {
    async fn run(mut self, client: Client, listed: watch::Sender<bool>) {
        let api: Api<Watched<SeenPod>> = Api::all(client);
        let events = watcher(api, watcher::Config::default().page_size(PAGE)).default_backoff();
        let mut events = std::pin::pin!(events.map_err(|error| {
            tracing::warn!(%error, "the watch of pods failed, it will be tried again");
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

    /// Lets the ledger learn from the pods of the first list what is asked for in this cluster. Pods that
    /// stay for long are many among them; those that come will put that right.
    fn recall(&mut self) {
        let recalled = self.recalled.take().into_iter().flatten();
        let requests: Vec<_> =
            recalled.map(|((_, uid), (kind, memory))| (uid, kind, memory)).collect();
        if !requests.is_empty() {
            tracing::info!(
                pods = requests.len(),
                "the request mix is learnt from the pods there are"
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
        let effects = self.ledger.see_pod(&fact, self.clock.now());
        if seen.is_terminal {
            self.sink.pod_ended(&seen.pod.uid);
        } else {
            self.sink.pod(seen);
        }
        // Of pods that had ended before they were listed this is no news.
        let is_news = !seen.is_terminal || self.relisted.is_none();
        if let (true, Ok(Some(_)), Some(failure)) = (is_news, &seen.placement, &seen.start_failure)
        {
            self.sink.start_failed(seen, failure);
        }
        self.sink.effects(effects);
    }

    /// The request, as the pods before had it.
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
        let effects = self.ledger.end_pod(uid, self.clock.now());
        self.sink.pod_ended(uid);
        self.sink.effects(effects);
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
            tracing::warn!(%error, "the watch of nodes failed, it will be tried again");
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
        let effects = self.ledger.see_node(name, node.host, pool);
        self.ledger.see_domain(name, node.label(&self.labels.domain));
        self.ledger.see_unschedulable(name, node.is_unschedulable);
        self.sink.effects(effects);
    }

    fn lose(&mut self, name: &NodeName) {
        self.known.remove(name);
        self.ledger.lose_node(name);
    }
}
