//! *filter* and *prioritize*: decode, ask the ledger, encode. No decision is made here, nothing is
//! written to the API server, and no lock is held across an await.
//!
//! Facts about kube-scheduler that shape the answers, all seen on 1.36 (`docs/protocol.md`): refused
//! nodes go to `FailedAndUnresolvableNodes` with constant texts, because `FailedNodes` or a text that
//! changes makes it retry without pause; `Error` is for "not ready" only; every node gets a score,
//! because unscored nodes lose ties; prioritize is not called for a single node, so filter claims it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::app::App;
use super::protocol::{
    ExtenderArgs, ExtenderFilterResult, HostPriority, NodesArg, Passed, ProtocolError,
    host_priorities_json,
};
use super::template;
use crate::cluster::events::NoticeReason;
use crate::cluster::pod::SeenPod;
use crate::ledger::questions::{Answer, Question};
use crate::ledger::reading::Readiness;
use crate::metrics::Outcome;
use crate::packing::fit::Misfit;
use crate::packing::policy::Rank;

/// Score of the best node. Multiplied by 10 and the extender's weight it outweighs all in-tree
/// preferences from a weight of 3 on (in-tree totals reach about 1,200, the next node has at most
/// [`NEXT_SCORE`]).
const BEST_SCORE: i64 = 100;

/// Score of the second best node; the others follow in order down to 0.
const NEXT_SCORE: i64 = 50;

/// Answer to a question that comes too early. Constant, like every text kube-scheduler may show.
const WARMING_UP: &str = "gpupack is warming up: pods, nodes or agent reports are not complete yet";

/// A body and how the call ended.
pub type VerbAnswer = (Vec<u8>, Outcome);

/// Answers *filter*.
///
/// # Errors
/// [`ProtocolError`] for a body that is no question.
pub fn filter(app: &App, body: &[u8]) -> Result<VerbAnswer, ProtocolError> {
    let args = ExtenderArgs::parse(body)?;
    let pod = args.seen_pod()?;
    let names = args.nodes.names();
    if let Err(error) = &pod.request {
        app.metrics.refused_request();
        app.tell(&pod.pod, NoticeReason::GpuRequestRefused, error.to_string());
        let result = ExtenderFilterResult {
            passed: no_node(&args.nodes),
            failed_and_unresolvable: names.iter().map(|name| (*name, error.reason())).collect(),
            ..Default::default()
        };
        return Ok((result.to_json(), Outcome::Refused));
    }
    let Some(question) = question_of(app, &pod, &args.nodes) else {
        // No GPU is asked for: nothing to object to, ready or not.
        return Ok(encode_filter(&args.nodes, &names, &vec![None; names.len()]));
    };
    if app.readiness() != Readiness::Ready {
        let result = ExtenderFilterResult { error: WARMING_UP, ..Default::default() };
        return Ok((result.to_json(), Outcome::Error));
    }
    let answers = match &args.nodes {
        NodesArg::Objects(objects) => {
            let answers = template::answers(app, &question, objects);
            answers.into_iter().map(Result::err).collect()
        }
        NodesArg::Names(_) => ask(app, &pod, &question, &names),
    };
    Ok(encode_filter(&args.nodes, &names, &answers))
}

/// What is asked; none for a faulty request, and where no GPU is asked for. Nothing but the GPUs of a
/// Node object that need not exist is ever judged.
fn question_of(app: &App, pod: &SeenPod, nodes: &NodesArg<'_>) -> Option<Question> {
    let is_judged = |question: &Question| match nodes {
        NodesArg::Names(_) => true,
        NodesArg::Objects(_) => question.gpu.is_some(),
    };
    app.question(pod).filter(is_judged)
}

/// Asks about known nodes: what the pod held back before is seen again, its request is learnt from,
/// and a single node left is claimed at once, since prioritize will not be called.
fn ask(app: &App, pod: &SeenPod, question: &Question, names: &[&str]) -> Vec<Option<Misfit>> {
    let uid = &pod.pod.uid;
    let now = app.clock.now();
    app.outbox.push(app.ledger.drop_claim(uid));
    app.waiting.ask(App::waiting_pod(pod, question.clone()), now);
    app.pending.entry(uid.clone()).or_insert_with(|| Arc::new(pod.clone()));
    app.teams.see(pod);
    app.ledger.learn(uid.clone(), question);
    let answers = app.ledger.answers(question, names);
    let mut misfits: BTreeMap<Misfit, usize> = BTreeMap::new();
    for misfit in answers.iter().filter_map(|answer| answer.err()) {
        *misfits.entry(misfit).or_default() += 1;
    }
    for (misfit, nodes) in &misfits {
        app.metrics.refused(*misfit, *nodes);
    }
    let fitting: Vec<&str> = fitting(names, &answers).collect();
    match fitting.as_slice() {
        [] => {
            app.waiting.refuse(uid, misfits);
            app.reasons.refused(uid);
        }
        [only] => {
            app.waiting.fits(uid);
            app.outbox.push(app.ledger.claim(uid, only, question, now));
        }
        _ => app.waiting.fits(uid),
    }
    answers.into_iter().map(Result::err).collect()
}

fn fitting<'a>(names: &'a [&'a str], answers: &'a [Answer]) -> impl Iterator<Item = &'a str> {
    names.iter().zip(answers).filter(|(_, answer)| answer.is_ok()).map(|(name, _)| *name)
}

fn no_node<'a>(nodes: &NodesArg<'a>) -> Passed<'a> {
    match nodes {
        NodesArg::Names(_) => Passed::Names(Vec::new()),
        NodesArg::Objects(_) => Passed::Objects(Vec::new()),
    }
}

fn encode_filter(nodes: &NodesArg<'_>, names: &[&str], answers: &[Option<Misfit>]) -> VerbAnswer {
    let fits = |at: &usize| answers[*at].is_none();
    let passed: Vec<usize> = (0..names.len()).filter(fits).collect();
    let outcome = if passed.is_empty() { Outcome::Refused } else { Outcome::Ok };
    let result = ExtenderFilterResult {
        passed: match nodes {
            NodesArg::Names(_) => Passed::Names(passed.iter().map(|at| names[*at]).collect()),
            NodesArg::Objects(objects) => {
                Passed::Objects(passed.iter().map(|at| objects[*at].raw).collect())
            }
        },
        failed_and_unresolvable: names
            .iter()
            .zip(answers)
            .filter_map(|(name, answer)| answer.map(|misfit| (*name, misfit.reason())))
            .collect(),
        ..Default::default()
    };
    (result.to_json(), outcome)
}

/// Answers *prioritize*, and claims the favourite for the pod.
///
/// # Errors
/// [`ProtocolError`] for a body that is no question.
pub fn prioritize(app: &App, body: &[u8]) -> Result<VerbAnswer, ProtocolError> {
    let args = ExtenderArgs::parse(body)?;
    let pod = args.seen_pod()?;
    let names = args.nodes.names();
    let is_ready = app.readiness() == Readiness::Ready;
    let question = question_of(app, &pod, &args.nodes).filter(|_| is_ready);
    let Some(question) = question else {
        // No GPU is asked for, or nothing is known yet: no preference, and no node left unscored.
        let level: Vec<_> = names.iter().map(|host| HostPriority { host, score: 0 }).collect();
        return Ok((host_priorities_json(&level), Outcome::Ok));
    };
    let answers: Vec<Answer> = match &args.nodes {
        NodesArg::Names(_) => {
            app.outbox.push(app.ledger.drop_claim(&pod.pod.uid));
            app.ledger.answers(&question, &names)
        }
        NodesArg::Objects(objects) => template::answers(app, &question, objects),
    };
    let best = favourite(&names, &answers);
    if let (Some(best), NodesArg::Names(_)) = (best, &args.nodes) {
        let now = app.clock.now();
        app.outbox.push(app.ledger.claim(&pod.pod.uid, names[best], &question, now));
    }
    let outcome = if best.is_some() { Outcome::Ok } else { Outcome::Refused };
    Ok((host_priorities_json(&scores(&names, &answers, best)), outcome))
}

/// Position of the best node that fits; ties go to the first name.
fn favourite(names: &[&str], answers: &[Answer]) -> Option<usize> {
    let fitting = answers.iter().enumerate().filter_map(|(at, answer)| Some((answer.ok()?, at)));
    fitting.min_by_key(|(rank, at)| (*rank, names[*at])).map(|(_, at)| at)
}

/// A score for every node: the best has [`BEST_SCORE`], the others follow in the order of their ranks,
/// equal ranks with equal scores, and those that do not fit have 0.
fn scores<'a>(names: &[&'a str], answers: &[Answer], best: Option<usize>) -> Vec<HostPriority<'a>> {
    let ranks: BTreeSet<Rank> = answers.iter().filter_map(|answer| answer.ok()).collect();
    let ranks: Vec<Rank> = ranks.into_iter().collect();
    let levels = i64::try_from(ranks.len()).unwrap_or(i64::MAX).max(1);
    let score = |at: usize| match &answers[at] {
        Ok(_) if best == Some(at) => BEST_SCORE,
        Ok(rank) => {
            let level = ranks.partition_point(|better| better < rank);
            NEXT_SCORE * (levels - i64::try_from(level).unwrap_or(levels)) / levels
        }
        Err(_) => 0,
    };
    names.iter().enumerate().map(|(at, host)| HostPriority { host, score: score(at) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packing::nearness::Reach;

    fn rank(cost: i64) -> Answer {
        Ok(Rank::Fragmentation { cost, reach: Reach::default() })
    }

    #[test]
    fn the_best_node_stands_out_and_every_node_is_scored() {
        let names = ["d", "c", "b", "a"];
        let score = |answers: &[Answer]| -> Vec<i64> {
            let best = favourite(&names, answers);
            scores(&names, answers, best).iter().map(|priority| priority.score).collect()
        };
        let none = Err(Misfit::Silent);
        assert_eq!(score(&[rank(7), rank(5), rank(9), none]), [33, 100, 16, 0]);
        assert_eq!(score(&[none, rank(5), none, none]), [0, 100, 0, 0]);
        assert_eq!(score(&[none; 4]), [0, 0, 0, 0]);
        let ties = [rank(5), rank(5), rank(5), rank(6)];
        assert_eq!(score(&ties), [50, 50, 100, 25], "of equal ranks the first name");
    }
}
