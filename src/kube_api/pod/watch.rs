//! Facts from the API server: pods and nodes, their state and their changes.
//!
//! The watch only translates. The ledger decides what a fact means. What follows outside the ledger
//! (a waiting pod to requeue, an event to write) goes to the caller's sink.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use backon::ExponentialBuilder;
use futures::StreamExt;
use futures::future::BoxFuture;
use hyper::StatusCode;
use kube::runtime::utils::ResetTimerBackoff;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::watch;

use crate::pod::lists::Lists;
use crate::pod::namespaces::{NamespaceFacts, NamespaceWatch};
use crate::pod::seen_pod::SeenPod;
use crate::pod::start_failure::StartFailure;
use crate::pod::watched::{NodeFacts, Watched, WatchedFacts};
use engine::ledger::change::facts::PodFact;
use engine::ledger::nodes::state::Ledger;
use engine::model::event::LedgerEvent;
use engine::model::request::GpuRequest;
use engine::model::reservation::Placement;
use engine::waste::request_mix::{EarlierPod, RequestType, Stage, WINDOW};
use runtime::clock::Clock;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::mutation::{Mutation, mutated};
use wire::units::{Share, Timestamp};

/// Most different requests that are shared; clusters have a few hundred.
const MAX_REQUESTS: usize = 10_000;

/// Objects per page of a list. Each thread that reads one has the text of a page up to three times
/// in memory: 500 pods of a busy cluster are 6 MB.
const PAGE: u32 = 100;

/// What the watch reports outside the ledger.
pub trait Sink: Send + Sync {
    /// A change caused these events.
    fn events(&self, events: Vec<LedgerEvent>);

    /// What a pod requests, with the operator's rules for it.
    fn request(&self, pod: &SeenPod) -> Option<GpuRequest>;

    /// The pod as a fact for the ledger. `request` is the pod's own, which equal pods may share.
    fn fact(&self, pod: &SeenPod, request: Option<Arc<GpuRequest>>) -> PodFact;

    /// A pod was seen; without a node it waits.
    fn pod(&self, pod: &SeenPod);

    /// A container of a placed pod could not be started; reported again at each change of the pod,
    /// also at its end.
    fn start_failed(&self, pod: &SeenPod, failure: &StartFailure);

    /// Pods are listed again. What ran and ended since the last list or change was not seen.
    fn listed_again(&self) {}

    /// A pod is deleted or has ended.
    fn pod_ended(&self, uid: &PodUid);

    /// A pod has ended with success, and is not deleted yet; [`Sink::pod_ended`] was called.
    fn pod_succeeded(&self, _pod: &SeenPod) {}

    /// The watch of `pods`, `nodes` or `namespaces` received something, or failed and starts again.
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

/// Watches pods and nodes until `stop`, and namespaces if a label of theirs names teams. The ledger
/// counts as listed when all lists are complete.
pub fn run(
    client: Client,
    ledger: Arc<Ledger>,
    sink: Arc<dyn Sink>,
    clock: Clock,
    labels: NodeLabels,
    lists: Arc<Lists>,
    stop: watch::Receiver<bool>,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let (nodes_listed, is_nodes_listed) = watch::channel(false);
        let mut pods = PodWatch::new(Arc::clone(&ledger), Arc::clone(&sink), clock);
        let mut nodes = NodeWatch::new(Arc::clone(&ledger), Arc::clone(&sink), labels);
        let mut namespaces = NamespaceWatch::new(&ledger);
        let (namespaces_listed, mut are_namespaces_listed) = watch::channel(namespaces.is_none());
        let all_listed = async {
            let mut is_listed = is_nodes_listed;
            lists.completed(1).await;
            if is_listed.wait_for(|is_listed| *is_listed).await.is_err()
                || are_namespaces_listed.wait_for(|is_listed| *is_listed).await.is_err()
            {
                return;
            }
            tracing::info!("pods and nodes are listed");
            ledger.set_listed(clock.now());
        };
        let mut stop = stop;
        tokio::select! {
            () = follow_pods(client.clone(), clock, &*sink, &lists, |event| pods.take(event)) => {}
            () = follow("nodes", client.clone(), clock, &*sink, |event| {
                if nodes.take(event) {
                    nodes_listed.send_replace(true);
                }
            }) => {}
            () = async {
                let Some(namespaces) = &mut namespaces else { return std::future::pending().await };
                follow("namespaces", client.clone(), clock, &*sink, |event| match event {
                    WatchEvent::ListBegins => namespaces.begin(),
                    WatchEvent::<NamespaceFacts>::Seen(namespace) => namespaces.see(namespace),
                    WatchEvent::Deleted(namespace) => namespaces.lose(&namespace.name),
                    WatchEvent::ListEnds => {
                        namespaces.end();
                        namespaces_listed.send_replace(true);
                    }
                }).await;
            } => {}
            () = async { all_listed.await; std::future::pending::<()>().await } => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    })
}

/// What a watch shows: a list begins, its objects, it ends, and then changes.
#[derive(Debug)]
pub enum WatchEvent<F> {
    /// A list begins: at the start, and after the watch was lost.
    ListBegins,
    /// An object of the list, or one that is new or has changed.
    Seen(F),
    Deleted(F),
    /// The list is complete. What was not in it is gone.
    ListEnds,
}

impl<F> From<watcher::Event<Watched<F>>> for WatchEvent<F> {
    fn from(event: watcher::Event<Watched<F>>) -> Self {
        match event {
            watcher::Event::Init => Self::ListBegins,
            watcher::Event::InitApply(object) | watcher::Event::Apply(object) => {
                Self::Seen(object.facts)
            }
            watcher::Event::Delete(object) => Self::Deleted(object.facts),
            watcher::Event::InitDone => Self::ListEnds,
        }
    }
}

/// Watches pods, and begins again with a list whenever one is wanted.
async fn follow_pods(
    client: Client,
    clock: Clock,
    sink: &dyn Sink,
    lists: &Lists,
    mut take: impl FnMut(WatchEvent<SeenPod>) -> bool,
) {
    loop {
        let (newest, mut number) = (lists.newest(), 0);
        let watched = follow("pods", client.clone(), clock, sink, |event| {
            if matches!(event, WatchEvent::ListBegins) {
                number = lists.begin();
            }
            if take(event) {
                lists.complete(number);
            }
        });
        tokio::select! {
            () = watched => return,
            () = lists.wanted_after(newest) => {}
        }
    }
}

/// The first pause after a failure, and the longest. Up to as much is added by chance.
const PAUSES: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(2)];

/// How long no watch must have failed for the pauses to begin again, and for one that has expired to be listed
/// without a pause. Longer than [`WATCHED_FOR`].
const CALM_FOR: Duration = Duration::from_secs(60);

/// Seconds after which the API server ends a watch, which goes on where it was. A connection that
/// brings nothing is given up soon after that: what happened meanwhile would not be seen.
const WATCHED_FOR: u32 = 25;

/// Watches the objects of one resource.
///
/// After a failure there is a pause: until it goes on nothing that happens is seen. The pauses of client-go, which kube
/// has by default, grow to 30 s. If the API server has forgotten what the watch has not seen, as after a restart of its own, the
/// objects are listed at once.
async fn follow<F: WatchedFacts>(
    resource: &'static str,
    client: Client,
    clock: Clock,
    sink: &dyn Sink,
    mut take: impl FnMut(WatchEvent<F>),
) {
    let [first, longest] = PAUSES;
    let pauses = ExponentialBuilder::new()
        .with_min_delay(first)
        .with_max_delay(longest)
        .without_max_times()
        .with_jitter();
    let mut pauses = ResetTimerBackoff::new(watcher::ExponentialBackoff::from(pauses), CALM_FOR);
    let mut expired: Option<Timestamp> = None;
    loop {
        let config = watcher::Config::default().page_size(PAGE).timeout(WATCHED_FOR);
        let mut events = std::pin::pin!(watcher(Api::<Watched<F>>::all(client.clone()), config));
        while let Some(event) = events.next().await {
            sink.watched(resource, event.is_err());
            let error = match event {
                Ok(event) => {
                    take(event.into());
                    continue;
                }
                Err(error) => error,
            };
            let (now, is_expired) = (clock.now(), is_expired(&error));
            let before = expired.filter(|before| now.since(*before) < CALM_FOR);
            if is_expired {
                expired = Some(now);
            }
            if is_expired && before.is_none() {
                tracing::info!(%error, resource, "a watch has expired: the objects are listed again");
            } else {
                tracing::warn!(%error, resource, "a watch failed, gpupack retries it");
                tokio::time::sleep(pauses.next().unwrap_or(longest)).await;
            }
            // This one would begin where it was.
            if is_expired {
                break;
            }
        }
    }
}

/// Whether the API server has forgotten what a watch has not seen.
fn is_expired(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchError(status)
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => {
            status.code == StatusCode::GONE.as_u16()
        }
        _ => false,
    }
}

/// Takes in what the watch of pods shows.
pub struct PodWatch {
    ledger: Arc<Ledger>,
    sink: Arc<dyn Sink>,
    clock: Clock,
    known: BTreeSet<PodUid>,
    relisted: Option<BTreeSet<PodUid>>,
    /// The requests of the pods, each once: thousands of pods have the same.
    requests: BTreeSet<Arc<GpuRequest>>,
    /// During the first list: the pods with a GPU that were created last, by their creation.
    recalled: Option<BTreeMap<(i64, PodUid), EarlierPod>>,
}

impl PodWatch {
    /// Before the first list.
    pub fn new(ledger: Arc<Ledger>, sink: Arc<dyn Sink>, clock: Clock) -> Self {
        Self {
            ledger,
            sink,
            clock,
            known: BTreeSet::new(),
            relisted: None,
            requests: BTreeSet::new(),
            recalled: Some(BTreeMap::new()),
        }
    }

    /// Takes in an event. Whether a list is complete now.
    pub fn take(&mut self, event: WatchEvent<SeenPod>) -> bool {
        match event {
            WatchEvent::ListBegins => {
                self.relisted = Some(BTreeSet::new());
                // A pod that is gone before the watch has shown it is in no list.
                self.known.extend(self.ledger.placed());
            }
            WatchEvent::Seen(pod) => self.see(&pod),
            WatchEvent::Deleted(pod) => self.end(&pod.pod.uid),
            WatchEvent::ListEnds => {
                let listed_now = self.relisted.take().unwrap_or_default();
                let gone: Vec<PodUid> = self.known.difference(&listed_now).cloned().collect();
                if !mutated(Mutation::RelistKeepsGone) {
                    gone.iter().for_each(|uid| self.end(uid));
                }
                if self.recalled.is_none() {
                    self.sink.listed_again();
                }
                self.recall();
                return true;
            }
        }
        false
    }

    /// Gives the ledger the pods of the first list. Long-lived pods are frequent
    /// among them; new pods correct that.
    fn recall(&mut self) {
        let pods: Vec<EarlierPod> =
            self.recalled.take().map(|pods| pods.into_values().collect()).unwrap_or_default();
        if !pods.is_empty() {
            tracing::info!(
                pods = pods.len(),
                "the request mix is initialized from the existing pods"
            );
            self.ledger.recall(&pods);
        }
    }

    fn see(&mut self, seen: &SeenPod) {
        let request = self.sink.request(seen);
        if let (Some(recalled), Some(request)) = (&mut self.recalled, &request) {
            let pod = earlier(seen, request);
            recalled.insert((pod.created_unix_seconds, pod.uid.clone()), pod);
            if recalled.len() > WINDOW {
                recalled.pop_first();
            }
        }
        self.known.insert(seen.pod.uid.clone());
        if let Some(relisted) = &mut self.relisted {
            relisted.insert(seen.pod.uid.clone());
        }
        let request = request.map(|request| self.shared(&request));
        let fact = self.sink.fact(seen, request);
        let events = self.ledger.see_pod(&fact, self.clock.now());
        if seen.life.is_terminal {
            self.sink.pod_ended(&seen.pod.uid);
            if seen.life.has_succeeded {
                self.sink.pod_succeeded(seen);
            }
        } else {
            self.sink.pod(seen);
        }
        // A pod that had already ended when it was listed is not news.
        let is_news = !seen.life.is_terminal || self.relisted.is_none();
        if let (true, Ok(Some(_)), Some(failure)) =
            (is_news, &seen.placement, &seen.containers.start_failure)
        {
            self.sink.start_failed(seen, failure);
        }
        let now = self.clock.now();
        let started = self.ledger.see_containers(&seen.pod.uid, &seen.containers.wanted, now);
        self.sink.events(events);
        self.sink.events(started);
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

/// A pod of the first list.
fn earlier(seen: &SeenPod, request: &GpuRequest) -> EarlierPod {
    let placement = seen.placement.as_ref().ok().and_then(Option::as_ref);
    EarlierPod {
        uid: seen.pod.uid.clone(),
        kind: RequestType::new(Some(request), seen.host.cpu),
        memory: seen.host.memory,
        created_unix_seconds: seen.life.created_unix_seconds,
        share: placement.map_or(Share::ZERO, Placement::share),
        stage: match (&seen.node, seen.life.is_terminal) {
            (_, true) => Stage::Ended,
            (Some(_), false) => Stage::Runs,
            (None, false) => Stage::Waits,
        },
    }
}

/// Takes in what the watch of nodes shows.
pub struct NodeWatch {
    ledger: Arc<Ledger>,
    sink: Arc<dyn Sink>,
    labels: NodeLabels,
    known: BTreeSet<NodeName>,
    relisted: Option<BTreeSet<NodeName>>,
}

impl NodeWatch {
    /// Before the first list.
    pub fn new(ledger: Arc<Ledger>, sink: Arc<dyn Sink>, labels: NodeLabels) -> Self {
        Self { ledger, sink, labels, known: BTreeSet::new(), relisted: None }
    }

    /// Takes in an event. Whether a list is complete now.
    pub fn take(&mut self, event: WatchEvent<NodeFacts>) -> bool {
        match event {
            WatchEvent::ListBegins => self.relisted = Some(BTreeSet::new()),
            WatchEvent::Seen(node) => self.see(&node),
            WatchEvent::Deleted(node) => self.lose(&node.name),
            WatchEvent::ListEnds => {
                let listed_now = self.relisted.take().unwrap_or_default();
                let gone: Vec<NodeName> = self.known.difference(&listed_now).cloned().collect();
                gone.iter().for_each(|name| self.lose(name));
                return true;
            }
        }
        false
    }

    fn see(&mut self, node: &NodeFacts) {
        let name = &node.name;
        self.known.insert(name.clone());
        if let Some(relisted) = &mut self.relisted {
            relisted.insert(name.clone());
        }
        let pool = PoolName::new(node.label(&self.labels.pool));
        let mut events = self.ledger.see_node(name, node.host, pool);
        events.extend(self.ledger.see_driver_work(name, node.driver_work()));
        self.ledger.see_domain(name, node.label(&self.labels.domain));
        self.ledger.see_unschedulable(name, node.is_unschedulable);
        self.ledger.see_ready(name, node.is_ready);
        self.sink.events(events);
    }

    fn lose(&mut self, name: &NodeName) {
        self.known.remove(name);
        self.ledger.lose_node(name);
    }
}

#[cfg(test)]
mod tests {
    use kube::client::Body;
    use parking_lot::Mutex;
    use serde_json::json;

    use crate::request::placement::encode;
    use engine::ledger::ledger_fixture::{bound, hello, ledger, share_request};
    use engine::ledger::query::queries::PlacementRequest;
    use engine::model::policy::Policy;
    use engine::scoring::strategy::Strategy;
    use wire::units::{HostAmount, MemMib, MilliCpu};

    use super::*;

    /// What was called and seen, in order.
    type Log = Arc<Mutex<Vec<&'static str>>>;

    /// An API server whose lists have no object, and whose watches have expired: it says so in the stream, or instead.
    fn api_server(log: Log, in_stream: bool) -> Client {
        let service = tower::service_fn(move |request: hyper::Request<Body>| {
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch="));
            log.lock().push(if is_watch { "watch" } else { "list" });
            let gone = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                "reason": "Expired", "code": 410, "message": "too old"});
            let (code, answer) = match (is_watch, in_stream) {
                (true, true) => (200, json!({"type": "ERROR", "object": gone})),
                (true, false) => (410, gone),
                (false, _) => (
                    200,
                    json!({"kind": "NodeList", "apiVersion": "v1",
                        "metadata": {"resourceVersion": "1"}, "items": []}),
                ),
            };
            let body = Body::from(format!("{answer}\n").into_bytes());
            let response = hyper::Response::builder().status(code).body(body);
            async move { response }
        });
        Client::new(service, "default")
    }

    struct Counted(Log);

    impl Sink for Counted {
        fn events(&self, _events: Vec<LedgerEvent>) {}
        fn request(&self, _pod: &SeenPod) -> Option<GpuRequest> {
            None
        }
        fn fact(&self, _pod: &SeenPod, _request: Option<Arc<GpuRequest>>) -> PodFact {
            unreachable!("no pod is watched")
        }
        fn pod(&self, _pod: &SeenPod) {}
        fn start_failed(&self, _pod: &SeenPod, _failure: &StartFailure) {}
        fn pod_ended(&self, _uid: &PodUid) {}
        fn watched(&self, _resource: &'static str, is_failure: bool) {
            if is_failure {
                self.0.lock().push("failure");
            }
        }
    }

    #[test]
    fn the_labels_of_a_node_say_what_is_done_with_its_driver() {
        let (ledger, log) = (Arc::new(ledger("A")), Log::default());
        let labels = NodeLabels { pool: "pool".to_owned(), domain: "zone".to_owned() };
        let mut watch = NodeWatch::new(Arc::clone(&ledger), Arc::new(Counted(log)), labels);
        let mut see = |labels: serde_json::Value| {
            let node = json!({"metadata": {"name": "n", "labels": labels}});
            let node: Watched<NodeFacts> = serde_json::from_value(node).unwrap();
            watch.take(WatchEvent::Seen(node.facts));
            ledger.closes_library("n")
        };
        let (upgrade, mig) = ("nvidia.com/gpu-driver-upgrade-state", "nvidia.com/mig.config.state");
        assert_eq!(
            see(json!({upgrade: "drain-required"})),
            Some(format!("{upgrade}=drain-required"))
        );
        assert_eq!(
            see(json!({upgrade: "a-state-to-come", mig: "pending"})),
            Some(format!("{mig}=pending"))
        );
        assert_eq!(see(json!({upgrade: "upgrade-done", mig: "success"})), None);
        assert_eq!(see(json!({})), None);
    }

    /// All pods are bound, with what is written on them.
    struct Placing;

    impl Sink for Placing {
        fn events(&self, _events: Vec<LedgerEvent>) {}
        fn request(&self, pod: &SeenPod) -> Option<GpuRequest> {
            pod.request.clone().expect("a legal request")
        }
        fn fact(&self, pod: &SeenPod, _request: Option<Arc<GpuRequest>>) -> PodFact {
            let placement = pod.placement.clone().expect("a legal placement");
            let fact = bound(pod.pod.uid.as_str(), "n", "A", 1);
            let (node, is_terminal) = (pod.node.clone(), pod.life.is_terminal);
            PodFact { node, is_terminal, placement, ..fact }
        }
        fn pod(&self, _pod: &SeenPod) {}
        fn start_failed(&self, _pod: &SeenPod, _failure: &StartFailure) {}
        fn pod_ended(&self, _uid: &PodUid) {}
        fn watched(&self, _resource: &'static str, _is_failure: bool) {}
    }

    fn seen(uid: &str, node: &str, device: &str, created: &str) -> WatchEvent<SeenPod> {
        let placement = bound(uid, node, device, 1_000_000).placement.expect("it is bound");
        let mut annotations = encode(&placement).expect("a short one");
        annotations.insert("gpu-fraction".to_owned(), "1".to_owned());
        let pod = json!({
            "metadata": {"uid": uid, "namespace": "n", "name": uid, "creationTimestamp": created,
                "annotations": annotations},
            "spec": {"nodeName": node, "containers": [{"name": "main"}]},
        });
        WatchEvent::Seen(SeenPod::from_json(&pod.to_string()).expect("a pod"))
    }

    /// Three of four GPUs are free on the node `m`, two on `n`. Returns the watch after its first list, with
    /// a hundred pods created at these minutes, most of which share the GPU of `small`.
    fn listed(minute: fn(u32) -> u32) -> PodWatch {
        let ledger = ledger("A B C D");
        let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(64_000) };
        for (node, devices) in [("m", Some("E F G H")), ("n", None), ("small", Some("S"))] {
            ledger.see_node(&NodeName::new(node), host, PoolName::new(""));
            if let Some(devices) = devices {
                ledger.report(node, &hello(node, 1, devices), Timestamp::START).unwrap();
            }
        }
        let mut watch = PodWatch::new(Arc::new(ledger), Arc::new(Placing), Clock::start());
        watch.take(WatchEvent::ListBegins);
        for at in 0..100 {
            let (node, device) = match at {
                10 => ("n", "A"),
                50 => ("n", "B"),
                90 => ("m", "E"),
                _ => ("small", "S"),
            };
            let (hour, minute) = (minute(at) / 60, minute(at) % 60);
            let created = format!("2026-11-29T{hour:02}:{minute:02}:00Z");
            watch.take(seen(&format!("listed-{at:02}"), node, device, &created));
        }
        assert!(watch.take(WatchEvent::ListEnds));
        watch
    }

    /// Where a pod for a GPU goes.
    fn best(watch: &PodWatch) -> String {
        let request = PlacementRequest {
            strategy: Strategy::Policy(Policy::Fragmentation),
            ..share_request(1_000_000)
        };
        watch.ledger.best(&request).expect("two nodes fit").0.to_string()
    }

    #[test]
    fn where_running_pods_tell_that_others_have_ended_free_gpus_are_kept_together() {
        assert_eq!(best(&listed(|at| at)), "m", "one a minute: nothing has ended, all are equal");
        assert_eq!(best(&listed(|at| at * at / 10)), "m", "fewer and fewer");
        let late = |at| if at < 20 { 20 * at } else { 600 + at };
        assert_eq!(best(&listed(late)), "n", "most came in the last of many minutes");
    }

    #[test]
    fn where_pods_end_free_gpus_are_kept_together() {
        for event in ["deleted", "ended", "none"] {
            let mut watch = listed(|at| at);
            for at in 0..64 {
                let uid = PodUid::new(format!("p{at}"));
                watch.ledger.learn(uid.clone(), &share_request(10_000));
                let mut pod = seen(uid.as_str(), "m", "E", "2026-11-29T04:00:00Z");
                let WatchEvent::Seen(seen) = &mut pod else { unreachable!() };
                let mut ended = seen.clone();
                ended.life.is_terminal = true;
                watch.take(pod);
                match event {
                    "deleted" => drop(watch.take(WatchEvent::Deleted(ended))),
                    "ended" => drop(watch.take(WatchEvent::Seen(ended))),
                    _ => {}
                }
            }
            watch.ledger.tick(Timestamp::START);
            assert_eq!(best(&watch), if event == "none" { "m" } else { "n" }, "{event}");
        }
    }

    #[tokio::test]
    async fn objects_are_listed_again_after_their_watch_has_expired() {
        for in_stream in [true, false] {
            let log = Log::default();
            let (client, sink) =
                (api_server(Arc::clone(&log), in_stream), Counted(Arc::clone(&log)));
            let mut lists = 0;
            let (seen, mut is_seen) = watch::channel(0);
            let watched = follow::<NodeFacts>("nodes", client, Clock::start(), &sink, |event| {
                lists += u32::from(matches!(event, WatchEvent::ListEnds));
                seen.send_replace(lists);
            });
            tokio::select! {
                () = watched => {}
                _ = is_seen.wait_for(|lists| *lists == 3) => {}
            }
            let log = log.lock();
            let expected = ["list", "watch", "failure"].repeat(2);
            assert_eq!(log[..6], expected, "{in_stream}");
        }
    }
}
