//! The wire types of kube-scheduler's extender protocol, `k8s.io/kube-scheduler/extender/v1`.
//!
//! Bodies are Go's JSON: exported field names outside (`Pod`, `NodeNames`), camel case inside a
//! pod. Go ignores case in field names, so the outer ones are read in any case. A field given
//! twice is refused, since one of the two would be ignored. Of the pod only the needed fields are
//! read, the nodes stay raw text, and node names stay in the body.
//!
//! The protocol leaves open what a body may be. Here it is one complete document with nothing
//! behind it, at most `MAX_DEPTH` levels deep, also in parts that are not read.

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::pod::seen_pod::{LONGEST_NAME, LONGEST_NAMESPACE, LONGEST_UID, SeenPod};
use crate::protocol::body_parts::{
    Name, NodeObject, OfNodes, check_depth, fields, node_objects, part, quick_parts,
};
use crate::protocol::bounds::{LONGEST_OBJECT, ProtocolError};
use crate::protocol::names::NodeNames;

/// The nodes of a call.
#[derive(Debug)]
pub enum NodesArg<'a> {
    /// Their names, in the order of the body (`nodeCacheCapable: true`).
    Names(NodeNames<'a>),
    /// Whole Node objects, of each name the first (`nodeCacheCapable: false`).
    Objects(Vec<NodeObject<'a>>),
}

impl NodesArg<'_> {
    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            Self::Names(names) => names.len(),
            Self::Objects(nodes) => nodes.len(),
        }
    }

    /// The names of the nodes in the order of the body, each once.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Names(names) => names.distinct(),
            Self::Objects(nodes) => nodes.iter().map(|node| node.name.as_str()).collect(),
        }
    }

    /// Whether certainly no name needs an escape in JSON.
    pub fn are_plain(&self) -> bool {
        match self {
            Self::Names(names) => names.are_plain(),
            Self::Objects(_) => false,
        }
    }
}

/// The body of *filter* and *prioritize*.
#[derive(Debug)]
pub struct ExtenderArgs<'a> {
    pub pod: SeenPod,
    pub nodes: NodesArg<'a>,
}

impl<'a> ExtenderArgs<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// [`ProtocolError`].
    pub fn parse(body: &'a [u8]) -> Result<Self, ProtocolError> {
        let text = utf8(body)?;
        if let Some(args) = Self::parse_quickly(text) {
            return Ok(args);
        }
        let [pod, nodes, names] = fields(text, ["Pod", "Nodes", "NodeNames"])?;
        [pod, nodes].into_iter().flatten().try_for_each(|raw| check_depth(raw.get()))?;
        let names = names.map(part::<OfNodes<Name<'_>>>).transpose()?;
        let pod = pod.ok_or(ProtocolError::Missing { field: "Pod" })?.get();
        ProtocolError::if_longer("Pod", pod.len(), LONGEST_OBJECT)?;
        let nodes = match (names, nodes) {
            (Some(names), _) => {
                let names: Vec<Cow<'_, str>> = names.0.into_iter().map(|name| name.0).collect();
                let longest = names.iter().map(|name| name.len()).max().unwrap_or(0);
                ProtocolError::if_longer("NodeNames", longest, LONGEST_NAME)?;
                NodesArg::Names(NodeNames::copied(&names))
            }
            (None, Some(nodes)) => {
                let (mut nodes, mut known) = (node_objects(nodes)?, BTreeSet::new());
                nodes.retain(|node| known.insert(node.name.clone()));
                NodesArg::Objects(nodes)
            }
            (None, None) => NodesArg::Names(NodeNames::default()),
        };
        Ok(Self { pod: SeenPod::from_json(pod)?, nodes })
    }

    /// Reads a body in the form in which Go writes it. `None` for any other form and for every
    /// fault, which the slow path reports.
    fn parse_quickly(text: &'a str) -> Option<Self> {
        let (pod, names) = quick_parts(text)?;
        ProtocolError::if_longer("Pod", pod.len(), LONGEST_OBJECT).ok()?;
        check_depth(pod).ok()?;
        Some(Self { pod: SeenPod::from_json(pod).ok()?, nodes: NodesArg::Names(names) })
    }
}

/// The body of *bind*.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtenderBindingArgs {
    pub pod_name: String,
    pub pod_namespace: String,
    pub pod_uid: String,
    /// The node that kube-scheduler chose.
    pub node: String,
}

impl ExtenderBindingArgs {
    /// Reads a body.
    ///
    /// # Errors
    /// [`ProtocolError`]; each of the four fields must be there and not empty.
    pub fn parse(body: &[u8]) -> Result<Self, ProtocolError> {
        let names = ["PodName", "PodNamespace", "PodUID", "Node"];
        let [pod_name, pod_namespace, pod_uid, node] = fields(utf8(body)?, names)?;
        Ok(Self {
            pod_name: needed(pod_name, "PodName", LONGEST_NAME)?,
            pod_namespace: needed(pod_namespace, "PodNamespace", LONGEST_NAMESPACE)?,
            pod_uid: needed(pod_uid, "PodUID", LONGEST_UID)?,
            node: needed(node, "Node", LONGEST_NAME)?,
        })
    }
}

/// A text that is not empty, and not longer than `most`.
fn needed(
    raw: Option<&RawValue>,
    field: &'static str,
    most: usize,
) -> Result<String, ProtocolError> {
    let value: String = raw.map(part).transpose()?.unwrap_or_default();
    ProtocolError::if_longer(field, value.len(), most)?;
    if value.is_empty() { Err(ProtocolError::Missing { field }) } else { Ok(value) }
}

/// The answer to *filter*. Built once per call, so names and texts are borrowed.
#[derive(Debug, Default)]
pub struct ExtenderFilterResult<'a> {
    /// The nodes that pass, in the form of the call.
    pub passed: Passed<'a>,
    /// Nodes that are refused, with a constant text each; no name twice. `FailedNodes` stays empty,
    /// since it invites preemption.
    pub failed_and_unresolvable: Vec<(&'a str, &'static str)>,
    /// Why there is no answer now; empty otherwise. The attempt then ends as an error.
    pub error: &'a str,
    /// Whether certainly no name needs an escape.
    pub are_plain: bool,
}

/// The nodes that pass a filter.
#[derive(Debug, Default)]
pub enum Passed<'a> {
    /// No list at all, which kube-scheduler reads as "no node".
    #[default]
    Nothing,
    Names(Vec<&'a str>),
    /// Node objects as they came.
    Objects(Vec<&'a RawValue>),
}

impl ExtenderFilterResult<'_> {
    /// The body of the answer. Written piece by piece, since it may have an entry for each of
    /// thousands of nodes.
    pub fn to_json(&self) -> Vec<u8> {
        let (nodes, names) = match &self.passed {
            Passed::Nothing => (null(), null()),
            Passed::Names(names) => (null(), to_json(names)),
            Passed::Objects(items) => (to_json(&NodeListOut { items }), null()),
        };
        let mut json = b"{\"Nodes\":".to_vec();
        json.extend_from_slice(&nodes);
        json.extend_from_slice(b",\"NodeNames\":");
        json.extend_from_slice(&names);
        json.extend_from_slice(b",\"FailedNodes\":{},\"FailedAndUnresolvableNodes\":");
        self.push_reasons(&mut json, &self.failed_and_unresolvable);
        json.extend_from_slice(b",\"Error\":");
        json.extend_from_slice(&to_json(self.error));
        json.push(b'}');
        json
    }

    /// Writes why each of some nodes is refused.
    fn push_reasons(&self, json: &mut Vec<u8>, reasons: &[(&str, &'static str)]) {
        let mut written: Vec<(&'static str, Vec<u8>)> = Vec::new(); // few are different
        json.reserve(reasons.len() * 80 + 64);
        json.push(b'{');
        for (at, (name, reason)) in reasons.iter().enumerate() {
            json.extend_from_slice(if at == 0 { b"\"" } else { b",\"" });
            push_name(json, name, self.are_plain);
            json.extend_from_slice(b"\":");
            match written.iter().find(|(known, _)| std::ptr::eq(*known, *reason)) {
                Some((_, text)) => json.extend_from_slice(text),
                None => {
                    let text = to_json(reason);
                    json.extend_from_slice(&text);
                    written.push((reason, text));
                }
            }
        }
        json.push(b'}');
    }
}

fn null() -> Vec<u8> {
    to_json(&())
}

/// Writes a name without its quotes.
fn push_name(json: &mut Vec<u8>, name: &str, is_plain: bool) {
    if is_plain {
        json.extend_from_slice(name.as_bytes());
    } else {
        let quoted = to_json(name);
        json.extend_from_slice(&quoted[1..quoted.len() - 1]);
    }
}

#[derive(Serialize)]
struct NodeListOut<'a> {
    items: &'a [&'a RawValue],
}

/// One entry of the answer to *prioritize*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPriority<'a> {
    pub host: &'a str,
    /// Its score; kube-scheduler adds `score × weight × 10` to its own, unclamped.
    pub score: i64,
}

/// The body of the answer to *prioritize*: a bare list. Written piece by piece, since it has an
/// entry for each of thousands of nodes. `are_plain` says that no name needs an escape.
pub fn host_priorities_json<'a>(
    priorities: impl Iterator<Item = HostPriority<'a>>,
    are_plain: bool,
) -> Vec<u8> {
    let mut json = Vec::with_capacity(priorities.size_hint().0 * 64 + 2);
    json.push(b'[');
    for HostPriority { host, score } in priorities {
        json.extend_from_slice(if json.len() == 1 { b"{\"Host\":\"" } else { b",{\"Host\":\"" });
        push_name(&mut json, host, are_plain);
        json.extend_from_slice(b"\",\"Score\":");
        json.extend_from_slice(itoa::Buffer::new().format(score).as_bytes());
        json.push(b'}');
    }
    json.push(b']');
    json
}

/// The answer to *bind*.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderBindingResult {
    /// Why the pod was not bound, or that this is not known; empty if it was bound.
    pub error: String,
}

impl ExtenderBindingResult {
    /// The body of the answer.
    pub fn to_json(&self) -> Vec<u8> {
        to_json(self)
    }
}

/// One complete document. Only strings, numbers, lists and maps with text keys are written, into
/// memory. That cannot fail.
pub fn to_json<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("answers consist of strings and numbers")
}

pub fn utf8(body: &[u8]) -> Result<&str, ProtocolError> {
    str::from_utf8(body).map_err(|error| ProtocolError::Encoding { offset: error.valid_up_to() })
}

#[cfg(test)]
mod tests;
