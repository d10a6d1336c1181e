//! Whose pods a caller may see. Every rule about what is hidden from others is here.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use control::shared::app::App;
use wire::api::moves::{Move, MoveProposals};
use wire::api::state::{Guest, Node, OverLimitPod, Tenant};

/// Whose pods a caller may see. Of other pods it sees how much they hold, and no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Viewer {
    /// All: an operator, or anyone where clients do not prove who they are.
    All,
    Namespaces(Arc<BTreeSet<String>>),
}

impl Viewer {
    /// Whether the caller may see the pods of a namespace.
    pub fn sees(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::Namespaces(namespaces) => namespaces.contains(namespace),
        }
    }

    /// Whether the caller may see a pod, by its `namespace/name`.
    pub fn sees_pod(&self, pod: &str) -> bool {
        match self {
            Self::All => true,
            Self::Namespaces(_) => {
                pod.split_once('/').is_some_and(|(namespace, _)| self.sees(namespace))
            }
        }
    }

    /// What this caller may see, for names of snapshots: equal if it is equal.
    pub(crate) fn tag(&self) -> String {
        match self {
            Self::All => "all".to_owned(),
            Self::Namespaces(namespaces) => {
                let mut hasher = DefaultHasher::new();
                namespaces.hash(&mut hasher);
                format!("{:x}", hasher.finish())
            }
        }
    }

    /// Hides the names of other pods on a node.
    pub(crate) fn hide_tenants(&self, node: &mut Node) {
        for device in &mut node.devices {
            for Tenant { pod, pod_uid, .. } in &mut device.tenants {
                self.hide(pod, pod_uid);
            }
            for Guest { pod, pod_uid, .. } in &mut device.guests {
                self.hide(pod, pod_uid);
            }
            for OverLimitPod { pod, pod_uid, .. } in &mut device.over_limit_pods {
                self.hide(pod, pod_uid);
            }
        }
    }

    fn hide(&self, pod: &mut String, uid: &mut String) {
        if !self.sees_pod(pod) {
            (*pod, *uid) = (String::new(), String::new());
        }
    }

    /// Hides the names of other pods that would move.
    pub(crate) fn hide_moves(&self, moves: &mut [Move]) {
        let hidden = moves.iter_mut().filter(|one| !self.sees_pod(&one.pod));
        hidden.for_each(|one| one.pod = String::new());
    }

    /// The same in all proposals.
    pub(crate) fn hide_proposals(&self, proposals: &mut MoveProposals) {
        proposals.to_place.iter_mut().for_each(|one| self.hide_moves(&mut one.moves));
        proposals.to_empty.iter_mut().for_each(|one| self.hide_moves(&mut one.moves));
    }
}

/// The namespaces of all pods that hold a GPU or wait for one: O(pods).
pub(crate) fn namespaces(app: &App) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut see = |namespace: &str| {
        if !found.contains(namespace) {
            found.insert(namespace.to_owned());
        }
    };
    app.ledger.look_at_each(|node| {
        node.reservations().values().for_each(|held| see(held.pod.namespace()));
    });
    app.waiting.look_at_each(|state| see(&state.waiting.namespace));
    app.pods
        .pending
        .iter()
        .chain(app.pods.gated.iter())
        .for_each(|pending| see(&pending.namespace));
    found
}
