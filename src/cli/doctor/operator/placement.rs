//! The nodes on which the pods of a DaemonSet may run.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec};

/// What the pods require of their node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Placement {
    pub(crate) selector: BTreeMap<String, String>,
    /// One of these has to fit, if there are any.
    terms: Vec<NodeSelectorTerm>,
}

impl Placement {
    /// Of these pods.
    pub(crate) fn of(pods: &PodSpec) -> Self {
        let node = pods.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required =
            node.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
        Self {
            selector: pods.node_selector.clone().unwrap_or_default(),
            terms: required.map(|it| it.node_selector_terms.clone()).unwrap_or_default(),
        }
    }

    /// Whether a node with these labels fits. What is not known here counts as fitting.
    pub(crate) fn may_be_on(&self, labels: &BTreeMap<String, String>) -> bool {
        let is_selected = self.selector.iter().all(|(key, value)| labels.get(key) == Some(value));
        let fits = |term: &NodeSelectorTerm| {
            term.match_expressions.iter().flatten().all(|needed| is_met(needed, labels))
        };
        is_selected && (self.terms.is_empty() || self.terms.iter().any(fits))
    }
}

fn is_met(needed: &NodeSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let value = labels.get(&needed.key);
    let is_one = || needed.values.iter().flatten().any(|one| Some(one) == value);
    match needed.operator.as_str() {
        "In" => is_one(),
        "NotIn" => !is_one(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => true,
    }
}
