//! The demo's kube-scheduler: the three calls for a pod in the order, with the bodies and with the
//! choice of kube-scheduler 1.36, over HTTP on a kept-alive connection.
//!
//! *filter* gets all nodes with enough CPU and host memory, as after the plugin `NodeResourcesFit`. If more
//! than one is left, *prioritize* gets those. The best score wins, and chance decides between equals. *bind*
//! gets the winner. There are no other in-tree plugins: the extender's score outweighs them anyway.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::header::CONTENT_TYPE;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::demo::pods::DemoPod;
use crate::simulated::fleet::FleetNode;
use kube_api::pod::seen_pod::SeenPod;
use runtime::http_client::HttpClient;
use wire::units::HostAmount;

/// Longest time for one call, like a usual `httpTimeout` of kube-scheduler.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Largest answer that is read.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Why no node is left before *filter* is called.
const NO_HOST: &str = "insufficient CPU or host memory";

/// What *filter* and *prioritize* leave of the nodes for a pod.
#[derive(Debug)]
pub(crate) enum Choice {
    Node(String),
    /// No node fits; the constant reasons with the number of nodes.
    NoNode(BTreeMap<String, usize>),
}

/// The outcome of a bind.
#[derive(Debug)]
pub(crate) enum Verdict {
    Bound { node: String },
    Conflict { error: String },
}

/// The caller of the verbs.
pub(crate) struct Scheduler {
    calls: Arc<Calls>,
    /// What is free of each node's CPU and host memory.
    free: BTreeMap<Arc<str>, HostAmount>,
    /// All node names, as a JSON list.
    all_nodes: String,
    /// The node of each pod that has one or is on its way there, and what it takes of it.
    placed: BTreeMap<String, (Arc<str>, HostAmount)>,
    /// Decides between nodes of equal score.
    random: ChaCha8Rng,
}

/// The connection to the extender.
struct Calls {
    http: HttpClient,
    base: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct FilterAnswer<'a> {
    #[serde(borrow)]
    node_names: Option<&'a RawValue>,
    #[serde(borrow)]
    failed_and_unresolvable_nodes: Option<&'a RawValue>,
    error: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Score<'a> {
    host: &'a str,
    score: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct BindAnswer {
    error: String,
}

impl Scheduler {
    /// A scheduler of these nodes that calls the extender at `base`.
    pub(crate) fn new(base: String, nodes: &[FleetNode], seed: u64) -> Self {
        let http = HttpClient::new(TIMEOUT, MAX_ANSWER_BYTES);
        let calls = Arc::new(Calls { http, base });
        let free = nodes.iter().map(|node| (node.name.as_str().into(), node.host()));
        let free: BTreeMap<Arc<str>, HostAmount> = free.collect();
        let (all_nodes, placed) = (listed(free.keys()), BTreeMap::new());
        Self { calls, free, all_nodes, placed, random: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Whether a node has enough CPU and host memory for a pod.
    pub(crate) fn has_room(&self, node: &str, host: HostAmount) -> bool {
        self.free.get(node).is_some_and(|free| is_within(host, *free))
    }

    /// Notes that a pod takes CPU and host memory of a node.
    pub(crate) fn assume(&mut self, uid: &str, node: &str, host: HostAmount) {
        let Some((node, free)) = self.free.get_key_value(node) else { return };
        let (node, left) = (Arc::clone(node), free.left_after(host));
        self.placed.insert(uid.to_owned(), (Arc::clone(&node), host));
        self.free.insert(node, left);
    }

    /// Notes that a pod has ended, or could not be bound.
    pub(crate) fn forget(&mut self, uid: &str) {
        let Some((node, host)) = self.placed.remove(uid) else { return };
        let free = self.free.get_mut(&node);
        free.into_iter().for_each(|free| *free = free.checked_add(host).unwrap_or(*free));
    }

    /// Finds a node for `pod`.
    ///
    /// # Errors
    /// No answer, or one that kube-scheduler could not read either.
    pub(crate) async fn choose(&mut self, pod: &DemoPod) -> Result<Choice> {
        let host = host_of(pod)?;
        let nodes = match self.free.values().all(|free| is_within(host, *free)) {
            true => Cow::Borrowed(&self.all_nodes),
            false => {
                let roomy = self.free.iter().filter(|(_, free)| is_within(host, **free));
                Cow::Owned(listed(roomy.map(|(name, _)| name)))
            }
        };
        if *nodes == "[]" {
            return Ok(Choice::NoNode(BTreeMap::from([(NO_HOST.to_owned(), self.free.len())])));
        }
        let body = self.calls.call("filter", query(&pod.json, &nodes)).await?;
        let answer: FilterAnswer<'_> =
            serde_json::from_slice(&body).context("cannot read the answer to filter")?;
        if !answer.error.is_empty() {
            bail!("filter answers with an error: {}", answer.error);
        }
        let names = answer.node_names.map_or("null", RawValue::get);
        let left: Option<Vec<&str>> = serde_json::from_str(names)?;
        Ok(match left.unwrap_or_default().as_slice() {
            [] => Choice::NoNode(reasons(answer.failed_and_unresolvable_nodes)?),
            [only] => Choice::Node((*only).to_owned()),
            _ => {
                let body = self.calls.call("prioritize", query(&pod.json, names)).await?;
                let scores: Vec<Score<'_>> = serde_json::from_slice(&body)
                    .context("cannot read the answer to prioritize")?;
                Choice::Node(self.best(&scores)?)
            }
        })
    }

    /// Binds `pod` to a node. The bind may go on while the next pods are scheduled, as that of
    /// kube-scheduler. The pod counts on the node until it is forgotten.
    ///
    /// # Errors
    /// As [`Scheduler::choose`].
    pub(crate) fn bind(
        &mut self,
        pod: &DemoPod,
        node: String,
    ) -> impl Future<Output = Result<Verdict>> + use<> {
        self.assume(&pod.uid, &node, host_of(pod).unwrap_or(HostAmount::ZERO));
        let requested = serde_json::json!({
            "PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid, "Node": node,
        });
        let calls = Arc::clone(&self.calls);
        async move {
            let body = calls.call("bind", requested.to_string()).await?;
            let answer: BindAnswer =
                serde_json::from_slice(&body).context("cannot read the answer to bind")?;
            Ok(match answer.error {
                error if error.is_empty() => Verdict::Bound { node },
                error => Verdict::Conflict { error },
            })
        }
    }

    /// The node with the best score; a random one of several.
    fn best(&mut self, scores: &[Score<'_>]) -> Result<String> {
        let best = scores.iter().map(|score| score.score).max();
        let ties: Vec<&str> =
            scores.iter().filter(|s| Some(s.score) == best).map(|s| s.host).collect();
        if ties.is_empty() {
            bail!("prioritize scores no node");
        }
        Ok(ties[self.random.random_range(0..ties.len())].to_owned())
    }
}

impl Calls {
    async fn call(&self, verb: &str, body: String) -> Result<Bytes> {
        let request = Request::post(format!("{}/v1/{verb}", self.base))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .context("the call cannot be made")?;
        let answered = self.http.exchange(request).await;
        let (status, body) =
            answered.map_err(|error| anyhow!("{verb} cannot be called: {error}"))?;
        if !status.is_success() {
            bail!("{verb} answers with {status}: {}", String::from_utf8_lossy(&body));
        }
        Ok(body)
    }
}

/// The CPU and host memory that a pod requests.
fn host_of(pod: &DemoPod) -> Result<HostAmount> {
    let seen = SeenPod::from_json(&pod.json).context("cannot read the demo's own pod")?;
    Ok(seen.host)
}

fn is_within(host: HostAmount, free: HostAmount) -> bool {
    host.cpu <= free.cpu && host.memory <= free.memory
}

/// The names of nodes, as a JSON list.
fn listed<'a>(nodes: impl Iterator<Item = &'a Arc<str>>) -> String {
    let names: Vec<&str> = nodes.map(|name| &**name).collect();
    serde_json::to_string(&names).expect("a list of strings always serializes")
}

/// The body of filter and prioritize.
fn query(pod: &str, node_names: &str) -> String {
    format!(r#"{{"Pod":{pod},"Nodes":null,"NodeNames":{node_names}}}"#)
}

/// The number of refused nodes by reason.
fn reasons(failed: Option<&RawValue>) -> Result<BTreeMap<String, usize>> {
    let failed = failed.map_or("null", RawValue::get);
    let failed: Option<BTreeMap<String, String>> = serde_json::from_str(failed)?;
    let mut reasons = BTreeMap::new();
    for reason in failed.unwrap_or_default().into_values() {
        *reasons.entry(reason).or_default() += 1;
    }
    Ok(reasons)
}
