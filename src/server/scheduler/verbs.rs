//! *filter* and *prioritize*: decode, query the ledger, encode. They make no decision, write
//! nothing to the API server, and hold no lock across an await.
//!
//! Facts about kube-scheduler that shape the answers, all seen on 1.36 (`docs/protocol.md`).
//! Refused nodes go to `FailedAndUnresolvableNodes` with constant texts: `FailedNodes` or a
//! changing text makes it retry without pause. `Error` is for "not ready" only. Every node gets a
//! score, as unscored ones lose ties. It does not call prioritize for a single node, so filter
//! makes the hold.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::scheduler::template;
use control::metrics::labels::{Outcome, VerbAnswer};
use control::shared::app::App;
use engine::ledger::nodes::narrowing::Keys;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::query::reading::Readiness;
use engine::ledger::query::team_limit::PodInNamespace;
use engine::ledger::suggest::preemptors::HostRefused;
use engine::model::rejection::Rejection;
use engine::scoring::cost::Cost;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::protocol::bounds::ProtocolError;
use kube_api::protocol::messages::{
    ExtenderArgs, ExtenderFilterResult, HostPriority, NodesArg, Passed, host_priorities_json,
};
use kube_api::protocol::names::NodeNames;
use kube_api::write::events::NoticeReason;
use wire::ids::{NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// Score of the best node. Multiplied by 10 and the extender's weight it outweighs all in-tree
/// preferences from a weight of 3 on (in-tree totals reach about 1,200, the next node has at most
/// [`NEXT_SCORE`]).
const BEST_SCORE: i64 = 100;

/// Score of the second best node; the others follow in order down to 0.
const NEXT_SCORE: i64 = 50;

/// Most levels of scores below the best: each is a step of [`NEXT_SCORE`] divided by their number.
const SCALE_OF: usize = 64;

/// Up to this number of nodes all fitting ones stay, and each refused one is named with its reason.
/// Above it kube-scheduler itself looks only at a part (its default `minFeasibleNodesToFind`).
const NARROW_FROM: usize = 100;

/// A call may name twice the known nodes, and this number more.
const NODES_BEYOND: usize = 1_000;

/// Answer to a call that comes too early. Constant, like every text that kube-scheduler may show.
const WARMING_UP: &str =
    "gpupack is warming up: pods, nodes, namespaces or agent reports are not complete yet";

/// Reads a body. It may name at most twice the known nodes plus `NODES_BEYOND`, since the watch
/// may be behind and a caller may send nodes that do not exist. Before nodes are listed their
/// number is unknown.
fn parse<'a>(app: &App, body: &'a [u8]) -> Result<ExtenderArgs<'a>, ProtocolError> {
    let args = ExtenderArgs::parse(body)?;
    let count = args.nodes.count();
    if count > NODES_BEYOND && app.ledger.is_listed() {
        let most = 2 * app.ledger.node_count() + NODES_BEYOND;
        if count > most {
            return Err(ProtocolError::TooManyNodes { count, most });
        }
    }
    Ok(args)
}

/// Answers *filter*.
///
/// # Errors
/// [`ProtocolError`] for a body that is no valid call.
pub fn filter(app: &App, body: &[u8]) -> Result<VerbAnswer, ProtocolError> {
    let mut args = parse(app, body)?;
    args.pod.judge(&app.request_rules);
    let pod = &args.pod;
    let are_plain = args.nodes.are_plain();
    if let Err(error) = &pod.request {
        app.metrics.refused_request();
        // An event on the pod needs what the watch shows: a caller may describe any pod.
        let shown = app.pods.pending.get(&pod.pod.uid).map(|shown| Arc::clone(&shown));
        if let Some(shown) = shown
            && let Err(error) = &shown.request
        {
            app.tell(&shown.pod, NoticeReason::GpuRequestRefused, error.to_string());
        }
        let names = args.nodes.names();
        let result = ExtenderFilterResult {
            passed: passed(&args.nodes, &names, &[]),
            failed_and_unresolvable: names.iter().map(|name| (*name, error.reason())).collect(),
            are_plain,
            ..Default::default()
        };
        return Ok((result.to_json(), Outcome::Refused));
    }
    let Some(query) = query_of(app, pod, &args.nodes) else {
        // The pod requests no GPU: nothing to refuse, ready or not, but what is kept of a host.
        let names = args.nodes.names();
        let answers = without_gpu(app, pod, &names);
        let fitting = names.iter().zip(&answers).filter(|(_, rejection)| rejection.is_none());
        let fitting: Vec<&str> = fitting.map(|(name, _)| *name).collect();
        let passed_on = (fitting.len() < names.len()).then(|| fitting.into_iter());
        note_passed(app, pod, None, passed_on);
        let passed = passed(&args.nodes, &names, &answers);
        return Ok(encode_filter(passed, &names, are_plain, &answers));
    };
    if app.readiness() != Readiness::Ready {
        let result = ExtenderFilterResult { error: WARMING_UP, ..Default::default() };
        return Ok((result.to_json(), Outcome::Error));
    }
    match &args.nodes {
        NodesArg::Objects(objects) => {
            let answers: Vec<Option<Rejection>> = match app
                .is_at_team_limit(in_namespace(pod), &query)
            {
                true => vec![Some(Rejection::TeamLimit); objects.len()],
                false => {
                    template::answers(app, &query, objects).into_iter().map(Result::err).collect()
                }
            };
            let names = args.nodes.names();
            let fitting = names.iter().zip(&answers).filter(|(_, rejection)| rejection.is_none());
            let fitting: Vec<&str> = fitting.map(|(name, _)| *name).collect();
            note_passed(app, pod, Some(&query), Some(fitting.into_iter()));
            let passed = passed(&args.nodes, &names, &answers);
            Ok(encode_filter(passed, &names, are_plain, &answers))
        }
        NodesArg::Names(names) => Ok(compiled(app, pod, &query, names)),
    }
}

/// Answers for a pod of ours that requests no GPU: it may not take what is kept of a host for a pod
/// that is as important.
fn without_gpu(app: &App, pod: &SeenPod, names: &[&str]) -> Vec<Option<Rejection>> {
    let mut answers = vec![None; names.len()];
    if app.ledger.standing_count() > 0 && app.config.serves(&pod.scheduling.scheduler) {
        let kept = app.room.preemptors.nodes_above(pod.scheduling.priority);
        for (answer, name) in answers.iter_mut().zip(names) {
            let is_kept = kept.contains(&NodeName::new(*name));
            let is_taken = is_kept && app.ledger.takes_kept_host(name, pod.host);
            *answer = is_taken.then_some(Rejection::HostKept);
        }
        if app.pods.without_gpu.contains(&pod.pod.uid) {
            let refused = names.iter().zip(&answers).filter(|(_, rejection)| rejection.is_some());
            let nodes = refused.map(|(name, _)| NodeName::new(*name)).collect();
            let (host, priority) = (pod.host, pod.scheduling.priority);
            app.room.preemptors.refuse_host(HostRefused {
                pod: pod.pod.clone(),
                priority,
                host,
                nodes,
            });
        }
    }
    answers
}

/// The request; `None` if it is not valid or needs nothing of gpupack. Of a Node object, which need
/// not exist, only the GPUs are judged.
fn query_of(app: &App, pod: &SeenPod, nodes: &NodesArg<'_>) -> Option<PlacementRequest> {
    let query = app.query(pod);
    match nodes {
        NodesArg::Names(_) => query,
        NodesArg::Objects(_) => query.filter(|query| query.gpu.is_some()),
    }
}

/// A pod and its namespace.
fn in_namespace(pod: &SeenPod) -> PodInNamespace<'_> {
    PodInNamespace { uid: &pod.pod.uid, namespace: &pod.namespace }
}

/// The node where a pod is being bound, or where a place is held that was promised to it.
fn own_node(app: &App, pod: &SeenPod, query: &PlacementRequest) -> Option<NodeName> {
    let uid = &pod.pod.uid;
    app.ledger.assumed_on(uid, query).or_else(|| {
        let promised_on = app.ledger.promised_on(uid, query)?;
        let may_have =
            app.is_known_to_wait(uid, query) && !app.is_at_team_limit(in_namespace(pod), query);
        may_have.then_some(promised_on)
    })
}

/// Why each of the nodes is refused, or `None`. `waits_for` is what refuses all of them.
fn rejections(
    app: &App,
    pod: &SeenPod,
    query: &PlacementRequest,
    names: &[&str],
    waits_for: Option<Rejection>,
) -> Vec<Option<Rejection>> {
    let uid = &pod.pod.uid;
    match waits_for {
        Some(Rejection::RoomElsewhere) => {
            let own = app.room.preemptors.node(uid);
            let own = own.as_ref().map(NodeName::as_str);
            let answers = names.iter().map(|name| match own == Some(*name) {
                true => Some(Rejection::RoomHere),
                false => Some(Rejection::RoomElsewhere),
            });
            answers.collect()
        }
        Some(rejection) => vec![Some(rejection); names.len()],
        None => {
            let mut answers = app.ledger.answers(query, names);
            app.ledger.limit_to_team(in_namespace(pod), query, names, &mut answers);
            app.ledger.refuse_with_own(uid, query, names, &mut answers);
            answers.into_iter().map(Result::err).collect()
        }
    }
}

/// The node that the call names and where the pod has room of its own.
fn named_room(
    app: &App,
    pod: &SeenPod,
    query: &PlacementRequest,
    names: &NodeNames<'_>,
) -> Option<NodeName> {
    let uid = &pod.pod.uid;
    let is_named = |node: &NodeName| names.iter().any(|name| name == node.as_str());
    // Its Binding may still succeed there, and its own reservation would count against it.
    let own = own_node(app, pod, query).filter(is_named);
    if own.is_some() && !mutated(Mutation::OwnRoomCounts) {
        return own;
    }
    // Room was kept for it, and now all of it is free. What victims have of the host may not be.
    let kept = app.ledger.fits_in_room_of(uid, query, None).filter(is_named)?;
    let is_its = app.is_known_to_wait(uid, query) && !app.has_victims(uid);
    (is_its && !mutated(Mutation::StandingUnseen)).then_some(kept)
}

/// Answers for known nodes. A single node left gets the hold, as no prioritize call follows.
fn compiled(
    app: &App,
    pod: &SeenPod,
    query: &PlacementRequest,
    names: &NodeNames<'_>,
) -> VerbAnswer {
    let uid = &pod.pod.uid;
    let now = app.clock.now();
    app.note_named(pod, query, now);
    if let Some(own) = named_room(app, pod, query, names) {
        let kept = vec![own.as_str()];
        note_fitting(app, pod, &kept, query, now);
        let result = ExtenderFilterResult { passed: Passed::Names(kept), ..Default::default() };
        return (result.to_json(), Outcome::Ok);
    }
    let waits_for = app.waits_for(in_namespace(pod), pod.group.as_ref(), query);
    let teams = &app.ledger.teams;
    let gpu = query.gpu.as_ref();
    if let Some(most) = app.config.keep_best
        && names.len() > NARROW_FROM
        && waits_for.is_none()
        && gpu.is_none_or(|gpu| teams.may_have_anywhere(uid, &pod.namespace, gpu))
    {
        let choice = app.ledger.choose(query, names.bytes(), most.get());
        let kept: Vec<&str> = choice.kept.iter().map(NodeName::as_str).collect();
        if !kept.is_empty() {
            app.metrics.refused(&choice.refused);
            note_fitting(app, pod, &kept, query, now);
            let passed = Passed::Names(kept);
            let result = ExtenderFilterResult { passed, ..Default::default() };
            return (result.to_json(), Outcome::Ok);
        }
    }
    let are_plain = names.are_plain();
    let names = names.distinct();
    let answers = rejections(app, pod, query, &names, waits_for);
    let mut refused = [0; Rejection::LABELS.len()];
    answers.iter().flatten().for_each(|rejection| refused[rejection.position()] += 1);
    app.metrics.refused(&refused);
    let fitting = names.iter().zip(&answers).filter(|(_, rejection)| rejection.is_none());
    let fitting: Vec<&str> = fitting.map(|(name, _)| *name).collect();
    if fitting.is_empty() {
        let mut rejections: Vec<(Rejection, usize)> = Vec::new(); // few are different
        for rejection in answers.iter().flatten() {
            match rejections.iter_mut().find(|(known, _)| known == rejection) {
                Some((_, nodes)) => *nodes += 1,
                None => rejections.push((*rejection, 1)),
            }
        }
        let rejections: BTreeMap<Rejection, usize> = rejections.into_iter().collect();
        // kube-scheduler first tries the node it has nominated alone, and then all others.
        let nominated = pod.scheduling.nominated.as_ref().map(NodeName::as_str);
        let is_about_all = !matches!(&names[..], [only] if nominated == Some(*only));
        let named = is_about_all.then(|| app.ledger.named_nodes(names.iter()));
        app.note_refused(uid, query, rejections, named);
    } else {
        note_fitting(app, pod, &fitting, query, now);
    }
    encode_filter(Passed::Names(fitting), &names, are_plain, &answers)
}

/// Notes that the pod fits somewhere, and makes a hold on the only node that is left.
fn note_fitting(
    app: &App,
    pod: &SeenPod,
    fitting: &[&str],
    query: &PlacementRequest,
    now: Timestamp,
) {
    app.note_fits(&pod.pod.uid, query);
    note_passed(app, pod, Some(query), Some(fitting.iter().copied()));
    if let [only] = fitting {
        hold(app, &pod.pod.uid, only, query, now);
    }
}

/// Notes on which nodes a pod of ours may be bound now; `None` means any node.
fn note_passed<'a>(
    app: &App,
    pod: &SeenPod,
    query: Option<&PlacementRequest>,
    nodes: Option<impl ExactSizeIterator<Item = &'a str>>,
) {
    let uid = &pod.pod.uid;
    if app.config.serves(&pod.scheduling.scheduler) && app.may_note(uid, query) {
        app.binding.passed.pass(uid, nodes, app.pods.is_shown_waiting(uid), app.clock.now());
    }
}

/// Makes a hold for a pod, or, if the watch does not show the pod yet, as soon as it does. Any
/// client can make up a pod, and a hold takes room from real ones. A pod that keeps coming back
/// without being bound gets no hold for a while.
fn hold(app: &App, uid: &PodUid, node: &str, query: &PlacementRequest, now: Timestamp) {
    if app.is_known_to_wait(uid, query) || mutated(Mutation::HoldForMadeUp) {
        if app.may_hold(uid) {
            app.outbox.push(app.ledger.hold(uid, node, query, now));
        }
        return;
    }
    if !app.may_note(uid, Some(query)) {
        return;
    }
    app.binding.passed.hold_later(uid, node);
    if app.is_known_to_wait(uid, query) {
        // The watch has shown it meanwhile.
        app.outbox.push(app.ledger.hold(uid, node, query, now));
    }
}

/// The nodes that fit, by the answers for `names` and in the form of the call.
fn passed<'a>(
    nodes: &'a NodesArg<'_>,
    names: &[&'a str],
    answers: &[Option<Rejection>],
) -> Passed<'a> {
    let fitting = (0..answers.len()).filter(|at| answers[*at].is_none());
    match nodes {
        NodesArg::Names(_) => Passed::Names(fitting.map(|at| names[at]).collect()),
        NodesArg::Objects(objects) => Passed::Objects(fitting.map(|at| objects[at].raw).collect()),
    }
}

fn encode_filter(
    passed: Passed<'_>,
    names: &[&str],
    are_plain: bool,
    answers: &[Option<Rejection>],
) -> VerbAnswer {
    let fits = answers.iter().any(Option::is_none);
    let outcome = if fits { Outcome::Ok } else { Outcome::Refused };
    let refused = names.iter().zip(answers);
    let refused =
        refused.filter_map(|(name, answer)| answer.map(|rejection| (*name, rejection.reason())));
    let failed_and_unresolvable = refused.collect();
    let result =
        ExtenderFilterResult { passed, failed_and_unresolvable, are_plain, ..Default::default() };
    (result.to_json(), outcome)
}

/// Answers *prioritize*, and makes a hold on the best node for the pod.
///
/// # Errors
/// [`ProtocolError`] for a body that is no valid call.
pub fn prioritize(app: &App, body: &[u8]) -> Result<VerbAnswer, ProtocolError> {
    let mut args = parse(app, body)?;
    args.pod.judge(&app.request_rules);
    let pod = &args.pod;
    let names = args.nodes.names();
    let is_ready = app.readiness() == Readiness::Ready;
    let query = query_of(app, pod, &args.nodes).filter(|_| is_ready);
    let Some(query) = query else {
        // The pod requests no GPU, or nothing is known yet: no preference, but each node has a
        // score.
        let level = names.iter().map(|host| HostPriority { host, score: 0 });
        return Ok((host_priorities_json(level, args.nodes.are_plain()), Outcome::Ok));
    };
    let keys = match &args.nodes {
        NodesArg::Names(_) => {
            if app.is_known_to_wait(&pod.pod.uid, &query) {
                app.outbox.push(app.ledger.drop_chosen_hold(&pod.pod.uid, &query));
            }
            app.ledger.keys(&query, names.iter())
        }
        NodesArg::Objects(objects) => {
            let answers = template::answers(app, &query, objects);
            let keys = answers.iter().map(|answer| answer.as_ref().ok().map(Cost::key));
            Keys::of(names.iter().copied().zip(keys))
        }
    };
    let best = keys.places.iter().position(|place| place.is_some() && *place == keys.best);
    if let (NodesArg::Names(_), Some(best)) = (&args.nodes, best) {
        let now = app.clock.now();
        hold(app, &pod.pod.uid, names[best], &query, now);
    }
    let outcome = if keys.best.is_some() { Outcome::Ok } else { Outcome::Refused };
    let scores = scores(&keys);
    let priorities = names
        .iter()
        .zip(&keys.places)
        .map(|(host, place)| HostPriority { host, score: place.map_or(0, |at| scores[at]) });
    Ok((host_priorities_json(priorities, args.nodes.are_plain()), outcome))
}

/// A score for each cost in `keys`: the best has [`BEST_SCORE`], the others follow in order; equal
/// costs have equal scores.
fn scores(Keys { keys, best, .. }: &Keys) -> Vec<i64> {
    let scale = scale(keys);
    let levels = i64::try_from(scale.len()).unwrap_or(i64::MAX).max(1);
    let by_level: Vec<i64> = (0..=levels).map(|at| NEXT_SCORE * (levels - at) / levels).collect();
    let scores = keys.iter().enumerate().map(|(at, key)| match best {
        Some(best) if *best == at => BEST_SCORE,
        _ => by_level[scale.partition_point(|better| better < key)],
    });
    scores.collect()
}

/// The costs at which the score changes, in order: each one of few, an even sample of many.
fn scale(keys: &[u128]) -> Vec<u128> {
    let every = keys.len().div_ceil(SCALE_OF).max(1);
    let mut scale: Vec<u128> = keys.iter().copied().step_by(every).collect();
    scale.sort_unstable();
    scale.dedup();
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::scoring::cost::Ties;

    fn cost(cost: i64) -> Option<u128> {
        Some(Cost::Fragmentation { instance_mib: 0, cost, ties: Ties::default() }.key())
    }

    fn score(nodes: &[(&str, Option<u128>)]) -> Vec<i64> {
        let keys = Keys::of(nodes.iter().copied());
        let scores = scores(&keys);
        keys.places.iter().map(|place| place.map_or(0, |at| scores[at])).collect()
    }

    #[test]
    fn the_best_node_has_the_top_score_and_every_node_has_a_score() {
        let score = |keys: [Option<u128>; 4]| {
            let nodes: Vec<_> = ["d", "c", "b", "a"].into_iter().zip(keys).collect();
            score(&nodes)
        };
        assert_eq!(score([cost(7), cost(5), cost(9), None]), [33, 100, 16, 0]);
        assert_eq!(score([None, cost(5), None, None]), [0, 100, 0, 0]);
        assert_eq!(score([None; 4]), [0, 0, 0, 0]);
        let ties = [cost(5), cost(5), cost(5), cost(6)];
        assert_eq!(score(ties), [50, 50, 100, 25], "of equal costs the first name");
    }

    #[test]
    fn scores_of_many_nodes_follow_their_costs() {
        let keys = (0..5_000_i64).map(|at| cost(at * 7_919 % 5_003));
        let names: Vec<String> = (0..5_000).map(|at| format!("{at}")).collect();
        let nodes: Vec<_> = names.iter().map(String::as_str).zip(keys).collect();
        let scores = score(&nodes);
        let mut seen: Vec<_> = nodes.iter().map(|(_, key)| key).zip(&scores).collect();
        seen.sort_unstable();
        assert_eq!((seen[0].1, seen[1].1, seen[4_999].1), (&100, &49, &0));
        assert!(seen.is_sorted_by(|a, b| a.1 >= b.1));
        let distinct: std::collections::BTreeSet<_> = scores.iter().collect();
        assert_eq!(distinct.len(), 51, "0 to 49, and the best");
    }
}
