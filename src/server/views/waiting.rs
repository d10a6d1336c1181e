//! `GET /v1/waiting`: the waiting pods, each with its request, the obstacle, a suggestion and its
//! position in the queue. Also the page's list of them.

use std::collections::{BTreeMap, BTreeSet};

use crate::views::viewer::Viewer;
use control::pods::why::Whys;
use control::pods::wording;
use control::pods::wording::{Profiles, SUGGESTION_REQUEST};
use control::shared::app::App;
use engine::ledger::suggest::waiting::{WaitingPod, WaitingState};
use engine::model::request::GpuRequest;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::request::request_error::RequestError;
use wire::api::kind::{ApiVersion, WaitingPodListKind};
use wire::api::waiting;
use wire::api::waiting::{Obstacle, QueuePosition, WaitingPodList, WaitingQuery};

/// Pods in the list if the query names no limit.
const DEFAULT_LIMIT: usize = 500;

/// Most pods in the list and in all queues: those with the highest priority, then the oldest.
const MOST: usize = 10_000;

/// The pods that fit on no node, by the devices that they wait for. Pods in two queues with a
/// common device class compete.
pub(crate) struct Queues {
    pods: Vec<WaitingState>,
    classes: BTreeMap<GpuRequest, BTreeSet<usize>>,
}

impl Queues {
    /// The current queues.
    pub(crate) fn of(app: &App) -> Self {
        let mut pods = app.waiting.all();
        pods.retain(|state| state.refused.is_some());
        pods.truncate(MOST);
        let mut classes = BTreeMap::new();
        for request in pods.iter().filter_map(|state| state.waiting.query.gpu.as_ref()) {
            let shape = request.shape();
            classes.entry(shape).or_insert_with_key(|shape| app.ledger.suited(shape));
        }
        Self { pods, classes }
    }

    /// The pods, by priority, then the oldest first.
    pub(crate) fn pods(&self) -> &[WaitingState] {
        &self.pods
    }

    fn classes_of(&self, waiting: &WaitingPod) -> Option<&BTreeSet<usize>> {
        self.classes.get(&waiting.query.gpu.as_ref()?.shape())
    }

    /// The position of one pod; `None` if no device could ever take it, or it is in no queue.
    pub(crate) fn position(&self, waiting: &WaitingPod) -> Option<QueuePosition> {
        let at = self.pods.iter().position(|state| state.waiting.pod.uid == waiting.pod.uid)?;
        self.places(at..=at).pop().flatten()
    }

    /// The positions of the first pods.
    pub(crate) fn first(&self, count: usize) -> Vec<Option<QueuePosition>> {
        match count.min(self.pods.len()) {
            0 => Vec::new(),
            count => self.places(0..=count - 1),
        }
    }

    /// The positions of some pods: O(pods × different sets of devices).
    fn places(&self, wanted: std::ops::RangeInclusive<usize>) -> Vec<Option<QueuePosition>> {
        let mut counts: BTreeMap<&BTreeSet<usize>, usize> = BTreeMap::new();
        let mut ahead = Vec::new();
        for (at, state) in self.pods.iter().enumerate() {
            let Some(own) = self.classes_of(&state.waiting).filter(|own| !own.is_empty()) else {
                if wanted.contains(&at) {
                    ahead.push(None);
                }
                continue;
            };
            if wanted.contains(&at) {
                ahead.push(Some((own, competing(&counts, own) + 1)));
            }
            *counts.entry(own).or_default() += 1;
        }
        let places = ahead.into_iter().map(|one| {
            let (own, position) = one?;
            Some(QueuePosition { position, length: competing(&counts, own) })
        });
        places.collect()
    }
}

/// How many pods wait for one of these device classes, by the classes that they wait for.
fn competing(counts: &BTreeMap<&BTreeSet<usize>, usize>, own: &BTreeSet<usize>) -> usize {
    counts.iter().filter(|(other, _)| !other.is_disjoint(own)).map(|(_, pods)| *pods).sum()
}

/// The first pods that fit on no node and that the viewer sees, for the page.
pub(crate) fn refused(app: &App, most: usize, viewer: &Viewer) -> Vec<waiting::WaitingPod> {
    let (queues, mut list) = (Queues::of(app), List::of(app, viewer));
    let places = match viewer {
        Viewer::All => queues.first(most),
        Viewer::Namespaces(_) => queues.first(queues.pods().len()),
    };
    let pods = queues.pods().iter().zip(places);
    let seen = pods.filter(|(state, _)| viewer.sees(&state.waiting.namespace)).take(most);
    seen.map(|(state, queue)| list.view(state, queue, SuggestionSearch::Never)).collect()
}

/// All waiting pods, whatever they wait for. Checks every node for some requests: tens of
/// milliseconds each in a large cluster.
pub fn waiting(app: &App, query: &WaitingQuery, viewer: &Viewer) -> WaitingPodList {
    let is_wanted = |namespace: &str| {
        query.namespace.as_deref().is_none_or(|of| of == namespace) && viewer.sees(namespace)
    };
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT).min(MOST);
    let now = app.api_seconds();
    let mut pods: Vec<waiting::WaitingPod> = Vec::new();
    let mut gated: Vec<WaitingPod> = Vec::new();
    let pending = app.pods.pending.iter().chain(app.pods.gated.iter());
    for pending in pending.filter(|pending| is_wanted(&pending.namespace)) {
        match &pending.request {
            Err(fault) => pods.push(refused_request(&pending, fault, now)),
            Ok(_) if !pending.scheduling.is_gated => {}
            Ok(_) => gated.extend(app.query(&pending).map(|query| pending.waiting_with(query))),
        }
    }
    pods.sort_by(|a, b| a.pod.cmp(&b.pod));
    gated.sort_by(|a, b| a.pod.name.cmp(&b.pod.name));
    let queues = Queues::of(app);
    let places: BTreeMap<_, _> = queues
        .pods()
        .iter()
        .map(|state| state.waiting.pod.uid.clone())
        .zip(queues.first(queues.pods().len()))
        .collect();
    let all = app.waiting.all().into_iter();
    let all: Vec<WaitingState> = all.filter(|state| is_wanted(&state.waiting.namespace)).collect();
    let total = pods.len() + all.len() + gated.len();
    let gated = gated.into_iter().map(|pod| WaitingState::without_call(pod, app.clock.now()));
    let mut list = List::of(app, viewer);
    pods.truncate(limit);
    for state in all.into_iter().chain(gated).take(limit - pods.len()) {
        let queue = places.get(&state.waiting.pod.uid).copied().flatten();
        pods.push(list.view(&state, queue, SuggestionSearch::OfFirst));
    }
    WaitingPodList {
        api_version: ApiVersion::default(),
        kind: WaitingPodListKind::default(),
        total,
        omitted: total - pods.len(),
        items: pods,
    }
}

/// For which pods of a list suggestions are searched for; others have those that are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SuggestionSearch {
    /// For none.
    Never,
    /// For those with the first different requests.
    OfFirst,
}

/// A list of waiting pods while it is made.
struct List<'a> {
    app: &'a App,
    viewer: &'a Viewer,
    whys: Whys<'a>,
    profiles: Profiles<'a>,
    now_unix_seconds: u64,
}

impl<'a> List<'a> {
    fn of(app: &'a App, viewer: &'a Viewer) -> Self {
        Self {
            app,
            viewer,
            whys: Whys::of(app),
            profiles: wording::profiles(&app.ledger),
            now_unix_seconds: app.api_seconds(),
        }
    }

    /// A pod with why it waits, and the first suggestion.
    fn view(
        &mut self,
        state: &WaitingState,
        queue: Option<QueuePosition>,
        search: SuggestionSearch,
    ) -> waiting::WaitingPod {
        let (app, waiting) = (self.app, &state.waiting);
        let (why, is_current) = self.whys.why(state);
        let found = match search {
            _ if !why.is_helped() => Some(Vec::new()),
            SuggestionSearch::OfFirst if is_current => {
                Some(app.reasons.recent(&app.ledger, waiting, app.clock.now()))
            }
            SuggestionSearch::OfFirst | SuggestionSearch::Never => {
                app.reasons.known(&app.ledger, waiting)
            }
        };
        let suggestion = found.and_then(|found| {
            let sees = &|namespace: &str| self.viewer.sees(namespace);
            why.suggestions(app, waiting, &self.profiles, found, sees).into_iter().next()
        });
        waiting::WaitingPod {
            pod: waiting.pod.to_string(),
            request: waiting
                .query
                .gpu
                .as_ref()
                .map_or_else(|| "no GPU".to_owned(), wording::in_words),
            reason: why.reason,
            blocked_by: why.obstacle,
            missing: why.missing,
            nodes: why.nodes,
            age_seconds: since(waiting.created_unix_seconds, self.now_unix_seconds),
            priority: waiting.priority,
            suggestion,
            queue,
        }
    }
}

fn refused_request(
    pod: &SeenPod,
    fault: &RequestError,
    now_unix_seconds: u64,
) -> waiting::WaitingPod {
    waiting::WaitingPod {
        pod: pod.pod.to_string(),
        request: String::new(),
        reason: fault.reason().to_owned(),
        blocked_by: Obstacle::Request,
        missing: fault.to_string(),
        nodes: 0,
        age_seconds: since(pod.life.created_unix_seconds, now_unix_seconds),
        priority: pod.scheduling.priority,
        suggestion: Some(SUGGESTION_REQUEST.to_owned()),
        queue: None,
    }
}

/// Seconds since a time; zero if it is unknown or in the future.
pub(crate) fn since(created_unix_seconds: i64, now_unix_seconds: u64) -> u64 {
    let created = u64::try_from(created_unix_seconds).ok().filter(|created| *created > 0);
    created.map_or(0, |created| now_unix_seconds.saturating_sub(created))
}
