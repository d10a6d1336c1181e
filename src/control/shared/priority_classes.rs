//! The priority classes of the pods that hold something.

use std::sync::Arc;

use dashmap::DashMap;
use parking_lot::Mutex;

use kube_api::pod::seen_pod::SeenPod;
use wire::ids::PodUid;
use wire::units::Timestamp;

/// A namespace and a priority class; the latter is empty if a pod has none.
pub(crate) type Account = (String, Arc<str>);

/// Priority classes of pods, and when the ledger was sampled last.
#[derive(Default)]
pub struct PriorityClasses {
    pub(crate) of_pods: DashMap<PodUid, Arc<str>>,
    pub(crate) last: Mutex<Option<Timestamp>>,
}

impl PriorityClasses {
    /// Notes the priority class of a pod that requests a GPU.
    pub fn see(&self, pod: &SeenPod) {
        if pod.request != Ok(None) && !pod.scheduling.priority_class.is_empty() {
            let known = self.of_pods.entry(pod.pod.uid.clone());
            known.or_insert_with(|| Arc::from(pod.scheduling.priority_class.as_str()));
        }
    }

    /// How many pods are noted.
    pub(crate) fn count(&self) -> usize {
        self.of_pods.len()
    }

    pub fn class_of(&self, uid: &PodUid) -> Arc<str> {
        self.of_pods.get(uid).map_or_else(|| Arc::from(""), |class| Arc::clone(&class))
    }
}
