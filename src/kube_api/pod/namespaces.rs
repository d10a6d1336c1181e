//! Namespaces from the API server: the label that names their team.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::IgnoredAny;

use crate::pod::watched::WatchedFacts;
use engine::ledger::nodes::state::Ledger;

/// What gpupack needs of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamespaceFacts {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
}

impl WatchedFacts for NamespaceFacts {
    type Object = Namespace;
    type Spec = IgnoredAny;
    type Status = IgnoredAny;

    fn of(metadata: ObjectMeta, _: Option<IgnoredAny>, _: Option<IgnoredAny>) -> Self {
        let name = metadata.name.unwrap_or_default();
        Self { name, labels: metadata.labels.unwrap_or_default() }
    }
}

/// Takes in what the watch of namespaces shows.
pub(crate) struct NamespaceWatch {
    ledger: Arc<Ledger>,
    label: String,
    known: BTreeSet<String>,
    relisted: Option<BTreeSet<String>>,
}

impl NamespaceWatch {
    /// Before the first list; `None` if the team of a namespace is its name.
    pub(crate) fn new(ledger: &Arc<Ledger>) -> Option<Self> {
        let label = ledger.teams.rules().map(|rules| rules.label.clone());
        let label = label.filter(|label| !label.is_empty())?;
        Some(Self { ledger: Arc::clone(ledger), label, known: BTreeSet::new(), relisted: None })
    }

    /// A list begins.
    pub(crate) fn begin(&mut self) {
        self.relisted = Some(BTreeSet::new());
    }

    /// A namespace of the list, or one that is new or has changed.
    pub(crate) fn see(&mut self, namespace: NamespaceFacts) {
        let team = namespace.labels.get(&self.label).filter(|team| !team.is_empty());
        self.ledger.teams.see_namespace(&namespace.name, team.map(String::as_str));
        self.known.insert(namespace.name.clone());
        if let Some(relisted) = &mut self.relisted {
            relisted.insert(namespace.name);
        }
    }

    /// A namespace is gone.
    pub(crate) fn lose(&mut self, name: &str) {
        self.known.remove(name);
        self.ledger.teams.lose_namespace(name);
    }

    /// The list is complete: what was not in it is gone.
    pub(crate) fn end(&mut self) {
        let listed_now = self.relisted.take().unwrap_or_default();
        let gone: Vec<String> = self.known.difference(&listed_now).cloned().collect();
        gone.iter().for_each(|name| self.lose(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::ledger::ledger_fixture::ledger;
    use engine::model::charge::Prices;
    use engine::model::team::{TeamRules, TeamShare};
    use wire::units::Share;

    fn watch(label: &str) -> Option<NamespaceWatch> {
        let ledger = Arc::new(ledger("A"));
        let others = TeamShare { guaranteed: Share::WHOLE, at_most: None };
        let rules = TeamRules { label: label.to_owned(), others, ..TeamRules::default() };
        ledger.teams.rule(rules, Prices::default());
        NamespaceWatch::new(&ledger)
    }

    fn namespace(name: &str, labels: &[(&str, &str)]) -> NamespaceFacts {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        NamespaceFacts { name: name.to_owned(), labels: labels.collect() }
    }

    #[test]
    fn the_label_is_followed_through_changes_and_lists() {
        assert!(watch("").is_none());
        let mut watch = watch("example.com/team").unwrap();
        let team = |watch: &NamespaceWatch| watch.ledger.teams.team_of("a").to_string();
        watch.begin();
        watch.see(namespace("a", &[("example.com/team", "vision"), ("other", "x")]));
        watch.end();
        assert_eq!(team(&watch), "vision");
        watch.see(namespace("a", &[("example.com/team", "")]));
        assert_eq!(team(&watch), "namespace/a");
        watch.see(namespace("a", &[("example.com/team", "speech")]));
        assert_eq!(team(&watch), "speech");
        watch.begin();
        watch.see(namespace("b", &[]));
        watch.end();
        assert_eq!(team(&watch), "namespace/a", "it was not listed any more");
    }
}
