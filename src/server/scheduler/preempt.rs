//! *preempt*: which of kube-scheduler's planned evictions may happen.
//!
//! kube-scheduler plans by what it sees: CPU, memory, ports. It does not know GPU room, so for a GPU
//! pod it would evict the wrong pods, and others could take what they leave. So the answer for a GPU
//! pod is always "nowhere". What kube-scheduler would evict is noted: gpupack evicts these pods
//! itself, together with those that hold the GPU room, once budgets allow all of it and the room is
//! kept. Every other pod gets the plan, without nodes where room is made for a pod that is as
//! important.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use control::metrics::labels::{Outcome, VerbAnswer};
use control::shared::app::App;
use engine::ledger::nodes::teams::TeamPod;
use engine::ledger::query::reading::Readiness;
use engine::ledger::suggest::preemption::PlannedVictims;
use engine::model::reservation::Tenure;
use engine::model::workload::Protection;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::protocol::body_parts::{check_depth, fields, part};
use kube_api::protocol::bounds::{LONGEST_OBJECT, MOST_NODES, ProtocolError};
use kube_api::protocol::messages::{to_json, utf8};
use kube_api::request::bounded::Bounded;
use kube_api::request::room_note::MOST_VICTIMS as MOST_VICTIMS_KEPT;
use wire::ids::{NodeName, PodUid};
use wire::mutation::{Mutation, mutated};

/// Most victims on one node: more pods than kubelet runs.
const MOST_ON_A_NODE: usize = 5_000;

/// Most victims of a plan. kube-scheduler looks at a tenth of the nodes, with about 110 pods each.
const MOST_VICTIMS: usize = 200_000;

/// The body of *preempt*.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtenderPreemptionArgs {
    /// The pod that has no node.
    pub pod: SeenPod,
    /// Per node, the pods that kube-scheduler would evict there. May be empty.
    pub victims: BTreeMap<String, MetaVictims>,
}

/// The victims on one node. Shape and field names follow the type of this name in
/// `k8s.io/kube-scheduler/extender/v1`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaVictims {
    #[serde(rename = "Pods", alias = "pods", default, deserialize_with = "list")]
    pods: Vec<MetaPod>,
    #[serde(
        rename = "NumPDBViolations",
        alias = "numPDBViolations",
        default,
        deserialize_with = "number"
    )]
    pdb_violations: i64,
}

/// One victim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct MetaPod {
    #[serde(rename = "UID", alias = "uid")]
    uid: String,
}

/// The victims on one node as whole pods: the form without `nodeCacheCapable`.
#[derive(Deserialize)]
struct Victims {
    #[serde(rename = "Pods", alias = "pods", default, deserialize_with = "list")]
    pods: Vec<Victim>,
    #[serde(
        rename = "NumPDBViolations",
        alias = "numPDBViolations",
        default,
        deserialize_with = "number"
    )]
    pdb_violations: i64,
}

#[derive(Deserialize)]
struct Victim {
    metadata: VictimMetadata,
}

#[derive(Deserialize)]
struct VictimMetadata {
    uid: String,
}

impl From<Victims> for MetaVictims {
    fn from(victims: Victims) -> Self {
        let pods = victims.pods.into_iter().map(|pod| MetaPod { uid: pod.metadata.uid });
        Self { pods: pods.collect(), pdb_violations: victims.pdb_violations }
    }
}

/// A list; Go writes an empty one as null.
fn list<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let list = Option::<Bounded<T, MOST_ON_A_NODE>>::deserialize(deserializer)?;
    Ok(list.unwrap_or_default().0)
}

/// A number; for Go null is zero.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

impl ExtenderPreemptionArgs {
    /// Reads a body. If it has both forms of victims, the short one counts.
    ///
    /// # Errors
    /// [`ProtocolError`].
    pub fn parse(body: &[u8]) -> Result<Self, ProtocolError> {
        let text = utf8(body)?;
        check_depth(text)?;
        let names = ["Pod", "NodeNameToMetaVictims", "NodeNameToVictims"];
        let [pod, short, whole] = fields(text, names)?;
        let pod = pod.ok_or(ProtocolError::Missing { field: "Pod" })?.get();
        ProtocolError::if_longer("Pod", pod.len(), LONGEST_OBJECT)?;
        let victims = match (short, whole) {
            (Some(short), _) => part::<VictimsByNode<MetaVictims>>(short)?.victims,
            (None, Some(whole)) => part::<VictimsByNode<Victims>>(whole)?.victims,
            (None, None) => BTreeMap::new(),
        };
        Ok(Self { pod: SeenPod::from_json(pod)?, victims })
    }
}

/// The victims of all nodes in the form `V`. Reading stops with an error above the limits.
struct VictimsByNode<V> {
    victims: BTreeMap<String, MetaVictims>,
    form: PhantomData<V>,
}

impl<'de, V: Deserialize<'de> + Into<MetaVictims>> Deserialize<'de> for VictimsByNode<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(VictimsByNodeVisitor(PhantomData))
    }
}

struct VictimsByNodeVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de> + Into<MetaVictims>> Visitor<'de> for VictimsByNodeVisitor<V> {
    type Value = VictimsByNode<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with the victims of each node")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut victims, mut count) = (BTreeMap::new(), 0);
        // For Go null is a pointer to no victims. The answer has an empty list for it: kube-scheduler
        // reads what such a pointer points to.
        while let Some((node, on_node)) = map.next_entry::<String, Option<V>>()? {
            let on_node: MetaVictims = on_node.map(Into::into).unwrap_or_default();
            count += on_node.pods.len();
            victims.insert(node, on_node);
            if victims.len() > MOST_NODES || count > MOST_VICTIMS {
                let error = format!("more than {MOST_NODES} nodes or {MOST_VICTIMS} victims");
                return Err(A::Error::custom(error));
            }
        }
        Ok(VictimsByNode { victims, form: PhantomData })
    }
}

/// The answer to *preempt*. kube-scheduler takes only this form, whatever it sent.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct ExtenderPreemptionResult {
    node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}

/// Answers *preempt*.
///
/// # Errors
/// [`ProtocolError`] for a body that is no valid call.
pub fn preempt(app: &App, body: &[u8]) -> Result<VerbAnswer, ProtocolError> {
    let ExtenderPreemptionArgs { pod, mut victims } = ExtenderPreemptionArgs::parse(body)?;
    // A request that cannot be read counts as one for a GPU.
    match pod.request {
        Ok(None) => {
            let kept = app.room.preemptors.nodes_above(pod.scheduling.priority);
            let may_go = may_go(app, &pod);
            victims.retain(|node, on_node| {
                !kept.contains(&NodeName::new(node.as_str()))
                    && on_node.pods.iter().all(|pod| may_go(pod.uid.as_str()))
            });
        }
        _ if mutated(Mutation::PreemptsForGpu) => {}
        Ok(Some(_)) | Err(_) => {
            note_plan(app, &pod, &victims);
            victims.clear();
        }
    }
    let outcome = if victims.is_empty() { Outcome::Refused } else { Outcome::Ok };
    let result = ExtenderPreemptionResult { node_name_to_meta_victims: victims };
    Ok((to_json(&result), outcome))
}

/// Which pods with a GPU may go for a pod without one, for CPU or memory. kube-scheduler knows neither teams
/// nor classes of workloads.
fn may_go<'a>(app: &'a App, pod: &SeenPod) -> impl Fn(&str) -> bool + 'a {
    let has_rules = app.request_rules.workloads.protect() || app.ledger.teams.rules().is_some();
    // Before the lists are complete it is not known which these pods are.
    let is_known = !has_rules || app.readiness() == Readiness::Ready;
    let over = app.ledger.teams.over_quota();
    let team = app.ledger.teams.team_of(&pod.namespace);
    let of = TeamPod { team, priority: pod.scheduling.priority, is_guaranteed: false };
    let now = i64::try_from(app.api_seconds()).unwrap_or(i64::MAX);
    move |uid| {
        let uid = PodUid::new(uid);
        let Some(held) = app.ledger.reservation(&uid) else { return is_known };
        // The watch may not have shown it bound yet.
        let class = app.request_rules.workloads.of(&app.pods.classes.class_of(&uid));
        let tenure =
            held.tenure.unwrap_or(Tenure { started_unix_seconds: now, ..Tenure::default() });
        let protection = tenure.protection.or_else(|| class?.protection);
        let is_of_others = over.is_on && over.victim(&of, &uid, tenure, true).is_none();
        is_known
            && !is_of_others
            && !Protection::holds(protection, tenure.started_unix_seconds, now, 0, false)
    }
}

/// Notes what kube-scheduler would evict for a waiting pod, on nodes where no budget forbids it.
fn note_plan(app: &App, pod: &SeenPod, victims: &BTreeMap<String, MetaVictims>) {
    let uid = &pod.pod.uid;
    let Some(query) = app.query(pod).filter(|_| app.config.preemption.enabled) else { return };
    // The watch may not show the pod yet. kube-scheduler does not call again before something changes.
    if victims.is_empty() || !app.may_note(uid, Some(&query)) || app.room.preemptors.has(uid) {
        return;
    }
    let allowed = victims.iter().filter(|(_, on_node)| on_node.pdb_violations == 0);
    // Only of what the ledger knows: a caller may write anything.
    let known = allowed.filter(|(node, _)| app.ledger.knows(node));
    let plan = known.map(|(node, on_node)| {
        let pods = on_node.pods.iter().map(|pod| PodUid::new(pod.uid.as_str()));
        let pods: BTreeSet<PodUid> = pods.filter(|pod| app.ledger.has_pod(pod)).collect();
        (NodeName::new(node.as_str()), pods)
    });
    let plan: PlannedVictims = plan.filter(|(_, pods)| pods.len() <= MOST_VICTIMS_KEPT).collect();
    app.room.preemptors.plan(uid, plan, app.pods.is_shown_waiting(uid), app.clock.now());
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::ledger::change::facts::PodFact;
    use engine::ledger::ledger_fixture::{bound, ledger};
    use runtime::clock::Clock;

    fn app() -> App {
        let config = kube_api::config::file::Config::default();
        App::alone(std::sync::Arc::new(ledger("A")), config, Clock::start())
    }

    const PLAIN: &str = r#"{"metadata":{"name":"p","namespace":"n","uid":"u"}}"#;
    const META: &str = r#"{"a":{"Pods":[{"UID":"1"},{"UID":"2"}],"NumPDBViolations":1},"b":{"Pods":null,"NumPDBViolations":0}}"#;

    fn annotated(annotations: &str) -> String {
        format!(
            r#"{{"metadata":{{"name":"p","namespace":"n","uid":"u","annotations":{annotations}}}}}"#
        )
    }

    fn answer(body: &str) -> (String, Outcome) {
        let (json, outcome) = preempt(&app(), body.as_bytes()).expect(body);
        (String::from_utf8(json).unwrap(), outcome)
    }

    #[test]
    fn a_pod_without_a_gpu_request_gets_the_plan_of_kube_scheduler() {
        let expected = META.replace("null", "[]");
        let whole = r#"{"a":{"Pods":[{"metadata":{"uid":"1","name":"x"},"spec":{}},{"metadata":{"uid":"2"}}],"NumPDBViolations":1},"b":{"Pods":[]}}"#;
        for body in [
            format!(r#"{{"Pod":{PLAIN},"NodeNameToVictims":null,"NodeNameToMetaVictims":{META}}}"#),
            format!(r#"{{"pod":{PLAIN},"nodenametometavictims":{META},"more":[1]}}"#),
            format!(
                r#"{{"Pod":{PLAIN},"NodeNameToVictims":{whole},"NodeNameToMetaVictims":null}}"#
            ),
            format!(r#"{{"Pod":{PLAIN},"NodeNameToVictims":{{}},"NodeNameToMetaVictims":{META}}}"#),
        ] {
            let expected = format!(r#"{{"NodeNameToMetaVictims":{expected}}}"#);
            assert_eq!(answer(&body), (expected, Outcome::Ok), "{body}");
        }
        let none = format!(r#"{{"Pod":{PLAIN}}}"#);
        assert_eq!(answer(&none), (r#"{"NodeNameToMetaVictims":{}}"#.to_owned(), Outcome::Refused));
    }

    #[test]
    fn null_is_what_it_is_for_go() {
        let none = r#"{"Pods":[],"NumPDBViolations":0}"#;
        for victims in ["null", "{}", r#"{"Pods":null,"NumPDBViolations":null}"#] {
            for form in ["NodeNameToMetaVictims", "NodeNameToVictims"] {
                let body = format!(r#"{{"Pod":{PLAIN},"{form}":{{"n1":{victims}}}}}"#);
                let expected = format!(r#"{{"NodeNameToMetaVictims":{{"n1":{none}}}}}"#);
                assert_eq!(answer(&body), (expected, Outcome::Ok), "{body}");
                let gpu = body.replace(PLAIN, &annotated(r#"{"gpu-fraction":"0.5"}"#));
                assert_eq!(answer(&gpu).1, Outcome::Refused, "{gpu}");
            }
        }
    }

    #[test]
    fn pods_that_a_class_of_workloads_protects_do_not_go_for_pods_without_a_gpu() {
        let config = "workloads: {kept: {preemptible: false}, new: {protect_seconds: 9}}";
        let config = kube_api::config::file::Config::from_yaml(config).unwrap();
        let ledger = std::sync::Arc::new(ledger("A"));
        let app = App::alone(ledger, config, Clock::start());
        let protected = |name: &str, started_unix_seconds, protection| {
            let tenure = Tenure { started_unix_seconds, protection, ..Tenure::default() };
            let fact = PodFact { tenure, ..bound(name, "n", "A", 100_000) };
            app.ledger.see_pod(&fact, app.clock.now());
        };
        let now = i64::try_from(app.api_seconds()).unwrap();
        protected("always", now - 100, Some(Protection::Always));
        protected("new", now, Some(Protection::Seconds(1_000)));
        protected("old", now - 2_000, Some(Protection::Seconds(1_000)));
        protected("other", now, None);
        let victims = ["always", "new", "old", "other", "unknown"].map(|uid| {
            format!(r#""of-{uid}":{{"Pods":[{{"UID":"other"}},{{"UID":"{uid}"}}],"NumPDBViolations":0}}"#)
        });
        let victims = victims.join(",");
        let body = format!(r#"{{"Pod":{PLAIN},"NodeNameToMetaVictims":{{{victims}}}}}"#);
        let nodes = || {
            let (json, _) = preempt(&app, body.as_bytes()).unwrap();
            let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
            let nodes = json["NodeNameToMetaVictims"].as_object().unwrap();
            nodes.keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(nodes(), Vec::<String>::new(), "it does not know all pods yet");
        app.ledger.set_listed(app.clock.now());
        app.lead.set_fenced();
        assert_eq!(nodes(), ["of-old", "of-other", "of-unknown"]);
    }

    #[test]
    fn pods_of_other_teams_do_not_go_for_a_pod_without_a_gpu() {
        let config =
            kube_api::config::file::Config::from_yaml("shares: {teams: {n: {guaranteed: 1}}}");
        let ledger = std::sync::Arc::new(ledger("A"));
        let app = App::alone(ledger, config.unwrap(), Clock::start());
        app.ledger.set_listed(app.clock.now());
        app.lead.set_fenced();
        for name in ["n/own", "other/pod"] {
            app.ledger.see_pod(&bound(name, "n", "A", 100_000), app.clock.now());
        }
        let victims = ["n/own", "other/pod"].map(|uid| {
            format!(r#""of-{uid}":{{"Pods":[{{"UID":"{uid}"}}],"NumPDBViolations":0}}"#)
        });
        let pod = PLAIN.replace(r#""uid":"u"}"#, r#""uid":"u"},"spec":{"priority":9}"#);
        let body = format!(r#"{{"Pod":{pod},"NodeNameToMetaVictims":{{{}}}}}"#, victims.join(","));
        let (json, _) = preempt(&app, body.as_bytes()).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let nodes = json["NodeNameToMetaVictims"].as_object().unwrap();
        assert_eq!(nodes.keys().collect::<Vec<_>>(), ["of-n/own"]);
    }

    #[test]
    fn no_pod_is_evicted_for_a_pod_that_wants_a_gpu() {
        for annotations in [
            r#"{"gpu-fraction":"0.5"}"#,
            r#"{"gpu-memory":"4096"}"#,
            r#"{"gpu-fraction":"half"}"#,
            r#"{"gpupack.dev/policy":"spread"}"#,
        ] {
            let pod = annotated(annotations);
            let body = format!(r#"{{"Pod":{pod},"NodeNameToMetaVictims":{META}}}"#);
            let expected = r#"{"NodeNameToMetaVictims":{}}"#.to_owned();
            assert_eq!(answer(&body), (expected, Outcome::Refused), "{annotations}");
        }
    }

    #[test]
    fn no_parsed_body_uses_far_more_memory_than_its_text() {
        let many = |count: usize, item: fn(usize) -> String| {
            (0..count).map(item).collect::<Vec<String>>().join(",")
        };
        let containers = many(1_001, |_| "{}".to_owned());
        let long = format!(r#"{{"x":"{}"}}"#, "y".repeat(LONGEST_OBJECT));
        let uids = many(MOST_ON_A_NODE + 1, |_| r#"{"UID":""}"#.to_owned());
        let whole = many(MOST_ON_A_NODE + 1, |_| r#"{"metadata":{"uid":""}}"#.to_owned());
        let nodes = many(MOST_NODES + 1, |at| format!(r#""{at}":{{}}"#));
        let full = many(MOST_VICTIMS / MOST_ON_A_NODE + 1, |at| {
            format!(r#""{at}":{{"Pods":[{}]}}"#, vec![r#"{"UID":""}"#; MOST_ON_A_NODE].join(","))
        });
        let meta = |map: &str| format!(r#"{{"Pod":{PLAIN},"NodeNameToMetaVictims":{{{map}}}}}"#);
        for (body, part) in [
            (format!(r#"{{"Pod":{{"spec":{{"containers":[{containers}]}}}}}}"#), "1000 items"),
            (format!(r#"{{"Pod":{long}}}"#), "at most `4194304`"),
            (meta(&format!(r#""a":{{"Pods":[{uids}]}}"#)), "5000 items"),
            (
                format!(r#"{{"Pod":{PLAIN},"NodeNameToVictims":{{"a":{{"Pods":[{whole}]}}}}}}"#),
                "5000 items",
            ),
            (meta(&nodes), "more than 50000 nodes"),
            (meta(&full), "200000 victims"),
        ] {
            let error = preempt(&app(), body.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn bad_bodies_are_clear_errors() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        for (body, reason) in [
            (String::new(), "json"),
            ("[]".to_owned(), "json"),
            (format!(r#"{{"NodeNameToMetaVictims":{META}}}"#), "missing"),
            (format!(r#"{{"Pod":null,"NodeNameToMetaVictims":{META}}}"#), "missing"),
            (format!(r#"{{"Pod":{{}},"NodeNameToMetaVictims":{META}}}"#), "pod"),
            (format!(r#"{{"Pod":{PLAIN},"pod":{PLAIN}}}"#), "json"),
            (format!(r#"{{"Pod":{PLAIN},"NodeNameToMetaVictims":7}}"#), "json"),
            (format!(r#"{{"Pod":{PLAIN},"NodeNameToMetaVictims":{{"a":7}}}}"#), "json"),
            (
                format!(r#"{{"Pod":{PLAIN},"NodeNameToMetaVictims":{{"a":{{"Pods":[{{}}]}}}}}}"#),
                "json",
            ),
            (format!(r#"{{"Pod":{PLAIN},"NodeNameToVictims":{{"a":{{"Pods":[{{}}]}}}}}}"#), "json"),
            (format!(r#"{{"Pod":{PLAIN},"x":{deep}}}"#), "depth"),
        ] {
            let error = preempt(&app(), body.as_bytes()).unwrap_err();
            let start: String = body.chars().take(80).collect();
            assert_eq!(error.reason(), reason, "{start}: {error}");
        }
    }
}
