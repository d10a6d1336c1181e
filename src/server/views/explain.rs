//! `GET /v1/explain`: why one pod waits, by the current ledger, and what would help.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::views::pods::reservation_state;
use crate::views::viewer::Viewer;
use crate::views::waiting::{Queues, since};
use control::pods::group_state::Groups;
use control::pods::memory_guard::{Protection, excesses};
use control::pods::proposals::listed;
use control::pods::wording;
use control::pods::wording::{SUGGESTION_BLIND, SUGGESTION_REQUEST, SUGGESTION_UNPLACED};
use control::shared::app::App;
use engine::hardware::device_class::DeviceClass;
use engine::ledger::query::own_room::Outlook;
use engine::ledger::query::queries::NodeAnswer;
use engine::ledger::query::team_limit::PodInNamespace;
use engine::ledger::suggest::displacement::MOST_MOVES;
use engine::ledger::suggest::waiting::WaitingState;
use engine::model::node_state::{NodeReporting, NodeState};
use engine::model::rejection::Rejection;
use kube_api::pod::seen_pod::SeenPod;
use wire::api::explain::{Explanation, NodeRefusal, Refusal};
use wire::api::waiting::Obstacle;

/// What is said of an over-quota pod.
const OVER_QUOTA: &str =
    "; its team has more than is guaranteed to it, so it may be evicted for a pod of another team";

/// Most nodes listed in an explanation.
const NAMED: usize = 20;

/// Most nodes listed in a sentence.
const NAMED_IN_WORDS: usize = 3;

/// Why a pod waits, or where it is placed; `None` for one that is unknown or hidden.
pub fn explain_named(
    app: &App,
    namespace: &str,
    name: &str,
    viewer: &Viewer,
) -> Option<Explanation> {
    if !viewer.sees(namespace) {
        return None;
    }
    let pod = format!("{namespace}/{name}");
    let gated =
        app.pods.gated.iter().find(|gated| *gated.pod.name == *pod).map(|gated| Arc::clone(&gated));
    let gated = gated.and_then(|gated| Some(gated.waiting_with(app.query(&gated)?)));
    let gated = gated.map(|gated| WaitingState::without_call(gated, app.clock.now()));
    if let Some(waiting) = gated.or_else(|| app.waiting.named(namespace, name)) {
        return Some(explain(app, &waiting, viewer));
    }
    let refused = app.pods.pending.iter().chain(app.pods.gated.iter()).find_map(|pending| {
        let is_named = *pending.pod.name == *pod;
        pending.request.as_ref().err().filter(|_| is_named).map(ToString::to_string)
    });
    if let Some(fault) = refused {
        return Some(Explanation {
            verdict: format!("its GPU request is refused: {fault}"),
            pod,
            blocked_by: Some(Obstacle::Request),
            suggestions: vec![SUGGESTION_REQUEST.to_owned()],
            ..Explanation::default()
        });
    }
    let unreadable = app.pods.unreadable.iter().find(|seen| *seen.pod.name == *pod);
    let unreadable = unreadable.map(|seen| Arc::clone(&seen));
    let nodes = app.ledger.nodes();
    let held = nodes.iter().find_map(|node| {
        node.reservations().values().find(|held| *held.pod.name == *pod).map(|held| (node, held))
    });
    let Some((node, held)) = held else { return explain_unplaced(&*unreadable?) };
    let is_over = app.ledger.teams.over_quota().pods.contains(&held.pod.uid);
    let failure = app.pods.start_failures.get(&held.pod.uid).map(|failure| failure.clone());
    let details = app.ledger.details(node.name().as_str());
    let blind = details.starts.blind_container(&held.pod.uid);
    let devices: Vec<&str> =
        held.placement.devices.iter().map(|device| device.id.as_str()).collect();
    Some(Explanation {
        verdict: format!(
            "placed on node {}, {} ({:?}){}{}{}{}{}{}{}{}",
            node.name(),
            devices.join(", "),
            reservation_state(held),
            wording::guest(held),
            wording::limit(node, held),
            wording::lost(node, held),
            if is_over { OVER_QUOTA } else { "" },
            excesses(&details, &held.pod.uid),
            failure.as_ref().map(|failure| format!("; {failure}")).unwrap_or_default(),
            blind.map(|container| format!("; {}", wording::blind(container))).unwrap_or_default(),
            unreadable.as_deref().map(wording::unreadable).unwrap_or_default()
        ),
        suggestions: failure
            .iter()
            .map(|failure| failure.fault().suggestion())
            .chain(blind.map(|_| SUGGESTION_BLIND))
            .map(str::to_owned)
            .collect(),
        request: held.request.as_deref().map(wording::in_words).unwrap_or_default(),
        pod,
        protection: Protection::of(&app.config).sentence(node, &details, &held.pod.uid),
        fits_on: vec![node.name().to_string()],
        fitting_nodes: 1,
        ..Explanation::default()
    })
}

/// What is said of a pod that runs without a placement that counts; `None` if it has no node.
fn explain_unplaced(pod: &SeenPod) -> Option<Explanation> {
    let request = pod.request.as_ref().ok().and_then(Option::as_ref);
    Some(Explanation {
        verdict: format!(
            "runs on node {}: nothing is allocated to it, and only the memory that it is seen to use counts{}",
            pod.node.as_ref()?,
            wording::unreadable(pod)
        ),
        pod: pod.pod.to_string(),
        request: request.map(wording::in_words).unwrap_or_default(),
        suggestions: vec![SUGGESTION_UNPLACED.to_owned()],
        ..Explanation::default()
    })
}

/// Why a pod waits, by the current ledger.
pub fn explain(app: &App, state: &WaitingState, viewer: &Viewer) -> Explanation {
    let (waiting, query) = (&state.waiting, &state.waiting.query);
    let nodes = app.ledger.nodes();
    let names: Vec<&str> = nodes.iter().map(|node| node.name().as_str()).collect();
    let pod = PodInNamespace { uid: &waiting.pod.uid, namespace: &waiting.namespace };
    let answers = app.ledger.answers_to(pod, query, &names);
    let outlook = Outlook::of(&answers);
    let why = app.why(state, &outlook, &Groups::around(app, waiting));
    let fitting = names.iter().zip(&answers).filter(|(_, answer)| answer.is_ok());
    let fits_on = fitting.map(|(name, _)| (*name).to_owned()).take(NAMED).collect();
    let found = match why.is_helped() {
        true => app.reasons.found(&app.ledger, waiting, app.clock.now()),
        false => Vec::new(),
    };
    let own = app.ledger.own_room(&waiting.pod.uid);
    let is_helped = why.is_helped_by_room() && outlook.fitting == 0;
    let relocation = is_helped.then(|| app.ledger.moves(query, &own, MOST_MOVES)).flatten();
    let mut moves = relocation.map(|found| listed(&found.moves)).unwrap_or_default();
    viewer.hide_moves(&mut moves);
    let profiles = wording::profiles(&app.ledger);
    let refusing = names.iter().zip(&answers).filter_map(|(name, answer)| {
        let rejection = answer.err()?;
        let (name, reason) = ((*name).to_owned(), rejection.reason().to_owned());
        Some(NodeRefusal { name, reason, missing: rejection.missing() })
    });
    Explanation {
        pod: waiting.pod.to_string(),
        suggestions: why
            .suggestions(app, waiting, &profiles, found, &|namespace| viewer.sees(namespace)),
        verdict: why.verdict,
        request: query.gpu.as_ref().map(wording::in_words).unwrap_or_default(),
        blocked_by: Some(why.obstacle),
        age_seconds: Some(since(waiting.created_unix_seconds, app.api_seconds())),
        queue: Queues::of(app).position(waiting),
        fitting_nodes: outlook.fitting,
        restarts: outlook.restarts,
        refusals: groups(&nodes, &answers),
        moves,
        unknown: unknown(state, &nodes),
        nodes: refusing.collect(),
        fits_on,
        ..Explanation::default()
    }
}

/// Refusing nodes grouped by their GPUs and reason, the closest first.
fn groups(nodes: &[NodeState], answers: &[NodeAnswer]) -> Vec<Refusal> {
    let mut groups: BTreeMap<(&str, String, &'static str), (usize, Rejection, &NodeState)> =
        BTreeMap::new();
    for (node, answer) in nodes.iter().zip(answers) {
        let Err(rejection) = answer else { continue };
        let key = (node.pool().as_str(), gpus(node), rejection.reason());
        let group = groups.entry(key).or_insert((0, *rejection, node));
        group.0 += 1;
        if group.1 != *rejection && group.1.closer(*rejection) == *rejection {
            (group.1, group.2) = (*rejection, node);
        }
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (_, rejection, _))| Reverse(rejection.closeness()));
    let groups = groups.into_iter();
    let refusals = groups.map(|((pool, gpus, reason), (nodes, rejection, closest))| Refusal {
        pool: pool.to_owned(),
        gpus,
        blocked_by: rejection.obstacle(),
        reason: reason.to_owned(),
        nodes,
        closest_node: closest.name().to_string(),
        missing: rejection.missing(),
        fits_if_pods_end: rejection.is_met_by_room(),
    });
    refusals.collect()
}

/// The devices of a node, equal ones together.
fn gpus(node: &NodeState) -> String {
    let mut alike: BTreeMap<(String, u64), usize> = BTreeMap::new();
    for device_state in node.devices() {
        let device = device_state.device();
        let product = DeviceClass::of(device, node.rule()).product().to_string();
        *alike.entry((product, device.capacity().mib())).or_default() += 1;
    }
    let kinds = alike.into_iter();
    let kinds = kinds.map(|((product, mib), count)| format!("{count} × {product} ({mib} MiB)"));
    kinds.collect::<Vec<_>>().join(" + ")
}

/// What an explanation cannot know: nodes without reports, memory that the driver does not report,
/// and refusals of kube-scheduler's own filters.
fn unknown(state: &WaitingState, nodes: &[NodeState]) -> Vec<String> {
    let mut unknown = Vec::new();
    for (of, what) in [
        (NodeReporting::NeverReported, "not reported since the extender started"),
        (NodeReporting::NotReporting, "stopped reporting: what is free there now is not known"),
    ] {
        let of_state = nodes.iter().filter(|node| node.state() == of);
        let names: Vec<&str> = of_state.map(|node| node.name().as_str()).collect();
        let first = names.iter().take(NAMED_IN_WORDS).copied().collect::<Vec<_>>().join(", ");
        let more = if names.len() > NAMED_IN_WORDS { " and more" } else { "" };
        if !names.is_empty() {
            let nodes = wording::counted(names.len(), "node has", "nodes have");
            unknown.push(format!("{nodes} {what} ({first}{more})"));
        }
    }
    let devices = nodes.iter().flat_map(|node| node.devices());
    let unread = devices
        .filter(|device_state| device_state.is_placeable() && device_state.used().is_none())
        .count();
    if unread > 0 {
        let gpus = wording::counted(unread, "GPU does", "GPUs do");
        unknown.push(format!("{gpus} not report how much memory is in use"));
    }
    let called: usize = state.refused.iter().flatten().map(|(_, nodes)| *nodes).sum();
    if called > 0 && called < nodes.len() {
        unknown.push(format!(
            "kube-scheduler called for {called} of {} nodes: its own filters (taints, affinity, CPU) \
             refuse the others, and may also refuse nodes that the suggestions name",
            nodes.len()
        ));
    }
    unknown
}
