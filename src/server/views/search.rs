//! `GET /v1/search`: pods, nodes and namespaces by a part of their name.

use std::collections::BTreeSet;

use crate::views::viewer::Viewer;
use control::shared::app::App;
use engine::model::reservation::PodRef;
use wire::api::search::{FoundPod, SearchResults, SearchTotals};

/// Longest search text: the longest `namespace/name` of Kubernetes.
pub(crate) const MAX_TEXT: usize = 63 + 1 + 253;

/// Most results listed of each kind.
const NAMED: usize = 20;

/// The first results of a kind by name, and the number of all.
struct First<T>(BTreeSet<T>, usize);

impl<T: Ord> First<T> {
    fn see(&mut self, thing: T) {
        self.1 += 1;
        self.0.insert(thing);
        if self.0.len() > NAMED {
            self.0.pop_last();
        }
    }
}

/// Everything with `text` in its name: O(pods). Kubernetes names are in lower case, so upper case
/// in the text matches, too. Lists the first 20 of each kind.
pub(crate) fn search(app: &App, text: &str, viewer: &Viewer) -> SearchResults {
    let lower = text.to_lowercase();
    let has_text = |name: &str| name.contains(text) || name.contains(&lower);
    let mut nodes = First(BTreeSet::new(), 0);
    let mut pods = First(BTreeSet::new(), 0);
    let mut namespaces: BTreeSet<String> = BTreeSet::new();
    let mut see = |pod: &PodRef| {
        let namespace = pod.namespace();
        if !viewer.sees(namespace) {
            return false;
        }
        if has_text(namespace) && !namespaces.contains(namespace) {
            namespaces.insert(namespace.to_owned());
        }
        has_text(&pod.name)
    };
    app.ledger.look_at_each(|node| {
        if has_text(node.name().as_str()) {
            nodes.see(node.name().to_string());
        }
        for held in node.reservations().values() {
            if held.placement.devices.is_empty() || !see(&held.pod) {
                continue;
            }
            let places = held.placement.devices.iter().filter_map(|placed| {
                node.devices().iter().position(|device_state| device_state.device().id == placed.id)
            });
            let (pod, gpus) = (held.pod.name.to_string(), places.collect());
            pods.see(FoundPod { pod, node: Some(node.name().to_string()), gpus });
        }
    });
    app.waiting.look_at_each(|state| {
        let pod = &state.waiting.pod;
        if see(pod) {
            pods.see(FoundPod { pod: pod.to_string(), node: None, gpus: Vec::new() });
        }
    });
    SearchResults {
        totals: SearchTotals { nodes: nodes.1, namespaces: namespaces.len(), pods: pods.1 },
        nodes: nodes.0.into_iter().collect(),
        namespaces: namespaces.into_iter().take(NAMED).collect(),
        pods: pods.0.into_iter().collect(),
        ..SearchResults::default()
    }
}
