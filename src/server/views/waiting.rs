//! `GET /v1/waiting`: the waiting pods, each with its request, the obstacle, a suggestion and its
//! position in the queue.

use std::collections::{BTreeMap, BTreeSet};

use crate::api::kind::{ApiVersion, WaitingPodListKind};
use crate::api::waiting;
use crate::api::waiting::{Obstacle, QueuePosition, WaitingPodList, WaitingQuery};
use crate::control::pods::wording;
use crate::control::pods::wording::{FITS_NOW, GATED, NOT_REFUSED, Profiles, SUGGESTION_REQUEST};
use crate::control::shared::app::App;
use crate::kube_api::pod::seen_pod::SeenPod;
use crate::kube_api::request::request_error::RequestError;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::search::Suggestion;
use crate::ledger::suggest::waiting::{WaitingPod, WaitingState};
use crate::model::request::GpuRequest;
use crate::server::views::viewer::Viewer;

/// Pods in the list if the query names no limit.
const DEFAULT_LIMIT: usize = 500;

/// Most pods in the list and in all queues: those with the highest priority, then the oldest.
const MOST: usize = 10_000;

/// Most different requests that one list evaluates, those of the most important pods first.
const MOST_REQUESTS: usize = 20;

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
        let beside = |counts: &BTreeMap<&BTreeSet<usize>, usize>, own: &BTreeSet<usize>| {
            let in_the_way = counts.iter().filter(|(other, _)| !other.is_disjoint(own));
            in_the_way.map(|(_, pods)| *pods).sum::<usize>()
        };
        let mut ahead = Vec::new();
        for (at, state) in self.pods.iter().enumerate() {
            let Some(own) = self.classes_of(&state.waiting).filter(|own| !own.is_empty()) else {
                if wanted.contains(&at) {
                    ahead.push(None);
                }
                continue;
            };
            if wanted.contains(&at) {
                ahead.push(Some((own, beside(&counts, own) + 1)));
            }
            *counts.entry(own).or_default() += 1;
        }
        let place = |(own, position)| QueuePosition { position, length: beside(&counts, own) };
        ahead.into_iter().map(|one| one.map(place)).collect()
    }
}

/// The first pods that fit on no node and that the viewer sees, for the page.
pub(crate) fn refused(app: &App, most: usize, viewer: &Viewer) -> Vec<waiting::WaitingPod> {
    let (lines, profiles) = (Queues::of(app), wording::profiles(&app.ledger));
    let now = app.clock.unix_seconds();
    let places = match viewer {
        Viewer::All => lines.first(most),
        Viewer::Namespaces(_) => lines.first(lines.pods().len()),
    };
    let pods = lines.pods().iter().zip(places);
    let seen = pods.filter(|(state, _)| viewer.sees(&state.waiting.namespace)).take(most);
    seen.map(|(state, queue)| {
        let known = app.reasons.known(&app.ledger, &state.waiting.query);
        let suggestion =
            known.and_then(|known| suggestions_of((app, &profiles), state, known, viewer));
        waiting::WaitingPod { suggestion, queue, ..view(state, false, now) }
    })
    .collect()
}

/// All waiting pods, whatever they wait for. Checks every node for some requests: tens of
/// milliseconds each in a large cluster.
pub fn waiting(app: &App, query: &WaitingQuery, viewer: &Viewer) -> WaitingPodList {
    let is_wanted = |namespace: &str| {
        query.namespace.as_deref().is_none_or(|of| of == namespace) && viewer.sees(namespace)
    };
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT).min(MOST);
    let now = app.clock.unix_seconds();
    let mut pods: Vec<waiting::WaitingPod> = Vec::new();
    let mut gated: Vec<WaitingPod> = Vec::new();
    let pending = app.pending.iter().chain(app.gated.iter());
    for pending in pending.filter(|pending| is_wanted(&pending.namespace)) {
        match &pending.request {
            Err(fault) => pods.push(refused_request(&pending, fault, now)),
            Ok(_) if !pending.is_gated => {}
            Ok(_) => gated.extend(app.query(&pending).map(|it| App::waiting_pod(&pending, it))),
        }
    }
    pods.sort_by(|a, b| a.pod.cmp(&b.pod));
    gated.sort_by(|a, b| a.pod.name.cmp(&b.pod.name));
    let lines = Queues::of(app);
    let places: BTreeMap<_, _> = lines
        .pods()
        .iter()
        .map(|state| state.waiting.pod.uid.clone())
        .zip(lines.first(lines.pods().len()))
        .collect();
    let all = app.waiting.all().into_iter();
    let all: Vec<WaitingState> = all.filter(|state| is_wanted(&state.waiting.namespace)).collect();
    let total = pods.len() + all.len() + gated.len();
    let mut looked: BTreeMap<&PlacementRequest, bool> = BTreeMap::new();
    let profiles = wording::profiles(&app.ledger);
    pods.truncate(limit);
    for state in all.iter().take(limit - pods.len()) {
        let query = &state.waiting.query;
        if looked.len() < MOST_REQUESTS {
            looked.entry(query).or_insert_with(|| app.ledger.best(query).is_some());
        }
        let known = match looked.get(query) {
            Some(true) => None,
            Some(false) => Some(app.reasons.recent(&app.ledger, query, app.clock.now())),
            None => app.reasons.known(&app.ledger, query),
        };
        let suggestion =
            known.and_then(|known| suggestions_of((app, &profiles), state, known, viewer));
        let queue = places.get(&state.waiting.pod.uid).copied().flatten();
        let fits = looked.get(query) == Some(&true);
        pods.push(waiting::WaitingPod { suggestion, queue, ..view(state, fits, now) });
    }
    for gated in gated.into_iter().take(limit - pods.len()) {
        let state = WaitingState::without_call(gated, app.clock.now());
        pods.push(waiting::WaitingPod { reason: GATED.to_owned(), ..view(&state, true, now) });
    }
    WaitingPodList {
        api_version: ApiVersion::default(),
        kind: WaitingPodListKind::default(),
        total,
        omitted: total - pods.len(),
        items: pods,
    }
}

/// The first suggestion for a pod that fits on no node.
fn suggestions_of(
    (app, profiles): (&App, &Profiles<'_>),
    state: &WaitingState,
    mut known: Vec<Suggestion>,
    viewer: &Viewer,
) -> Option<String> {
    known.retain(|it| app.may_do(&state.waiting.namespace, it));
    let rejections = state.refused.as_ref()?.keys().copied();
    let sees = |namespace: &str| viewer.sees(namespace);
    let found = (profiles, &known[..]);
    wording::suggestions(&state.waiting.query, found, rejections, &sees).into_iter().next()
}

/// A pod as at its last refusal, or as one that `fits` now.
fn view(state: &WaitingState, fits: bool, now_unix_seconds: u64) -> waiting::WaitingPod {
    let waiting = &state.waiting;
    let closest = state.closest().filter(|_| !fits);
    let (reason, blocked_by) = match closest {
        Some((rejection, _)) => (rejection.reason(), rejection.obstacle()),
        None if fits => (FITS_NOW, Obstacle::KubeScheduler),
        None => (NOT_REFUSED, Obstacle::KubeScheduler),
    };
    waiting::WaitingPod {
        pod: waiting.pod.to_string(),
        request: waiting.query.gpu.as_ref().map_or_else(|| "no GPU".to_owned(), wording::in_words),
        reason: reason.to_owned(),
        blocked_by,
        missing: closest.map(|(rejection, _)| rejection.missing()).unwrap_or_default(),
        nodes: closest.map_or(0, |(_, nodes)| nodes),
        age_seconds: since(waiting.created_unix_seconds, now_unix_seconds),
        priority: waiting.priority,
        suggestion: None,
        queue: None,
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
        age_seconds: since(pod.created_unix_seconds, now_unix_seconds),
        priority: pod.priority,
        suggestion: Some(SUGGESTION_REQUEST.to_owned()),
        queue: None,
    }
}

/// Seconds since a time; zero if it is unknown or in the future.
pub(crate) fn since(created_unix_seconds: i64, now_unix_seconds: u64) -> u64 {
    let created = u64::try_from(created_unix_seconds).ok().filter(|created| *created > 0);
    created.map_or(0, |created| now_unix_seconds.saturating_sub(created))
}
