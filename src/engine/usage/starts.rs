//! Which pods got their GPU: what agents see in containers, joined with what the pods say of them.
//!
//! *Allocated* says what the ledger gave a pod, *seen* whether it arrived. An agent sees whether a container has the
//! driver, and that a process of the pod uses a device. Which devices a container has, it does not see.

use std::collections::BTreeMap;

use litemap::LiteMap;

use crate::model::node::intake::Start;
use crate::model::node_state::NodeState;
use crate::model::reservation::PodRef;
use wire::ids::PodUid;
use wire::seen::{DeviceUse, StartedContainer, StartedContainers};

/// Most containers of a pod that are looked at; a pod has one with a GPU, as a rule.
pub const MAX_WANTED: usize = 16;

/// Most containers of a pod that are kept: its agent names those that were restarted, too.
const MAX_KEPT: usize = 64;

/// The containers of a pod that are to have its devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedContainers {
    /// Each of them, in the order of the pod.
    pub containers: Vec<WantedContainer>,
    /// How it is known that these are.
    pub choice: ContainerChoice,
}

/// How it is known which containers of a pod are to have its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContainerChoice {
    /// They take them from the placement, as the webhook writes it.
    Marked,
    /// None does so: each may have them.
    #[default]
    Any,
}

/// A container that is to have devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedContainer {
    /// Its name in the pod.
    pub name: String,
    /// Its id in the container runtime; `None` before it first started.
    pub id: Option<String>,
}

/// Whether a pod got its GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sight {
    /// Not known (yet).
    #[default]
    Unknown,
    /// A container that is to have a device has no driver, and no process of the pod uses one.
    Blind,
    /// Its containers have the driver, or a process of it uses a device.
    Seen,
}

/// A pod that has started, with or without its GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodStart {
    pub(crate) pod: PodRef,
    pub(crate) start: Start,
    /// Whether it is a sign for later pods of the node.
    pub(crate) is_sign: bool,
    /// The container without the driver; empty where it has one.
    pub(crate) container: String,
}

/// What is known of the containers of the pods of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Starts(LiteMap<PodUid, PodContainers>);

/// What is known of the containers of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct PodContainers {
    /// What its agent saw, by id.
    seen: BTreeMap<String, StartedContainer>,
    /// What the pod says.
    wanted: WantedContainers,
    /// Whether a list has shown a process of it since these containers are known.
    uses_device: bool,
    /// The containers by which it was last judged, and the verdict.
    judged: (WantedContainers, Sight),
}

impl PodContainers {
    /// Whether the pod got its GPU; and where it has none, the container, and whether that is older than the agent.
    fn sight(&self) -> (Sight, Option<(&WantedContainer, bool)>) {
        let all = || self.wanted.containers.iter();
        let found = |container: &WantedContainer| {
            container.id.as_ref().and_then(|id| self.seen.get(id)).copied()
        };
        let lacks = |container: &WantedContainer| found(container).is_some_and(|it| !it.has_driver);
        let has = |container: &WantedContainer| found(container).is_some_and(|it| it.has_driver);
        let is_any = all().next().is_some();
        let (is_blind, is_seen) = match self.wanted.choice {
            ContainerChoice::Marked => (all().any(lacks), is_any && all().all(has)),
            ContainerChoice::Any => (is_any && all().all(lacks), all().any(has)),
        };
        if is_blind {
            let mut lacking = all().filter(|container| lacks(container));
            let of = |it: &WantedContainer| found(it).is_some_and(|seen| seen.is_older);
            (Sight::Blind, lacking.next().map(|container| (container, of(container))))
        } else {
            (if is_seen { Sight::Seen } else { Sight::Unknown }, None)
        }
    }
}

impl Starts {
    /// Whether a pod got its GPU.
    pub fn of(&self, uid: &PodUid) -> Sight {
        self.0.get(uid).map_or(Sight::Unknown, |known| known.judged.1)
    }

    /// The container of a blind pod without the driver.
    pub fn blind_container(&self, uid: &PodUid) -> Option<&str> {
        let known = self.0.get(uid).filter(|known| known.judged.1 == Sight::Blind)?;
        known.sight().1.map(|(container, _)| &*container.name)
    }

    /// The pods on the node that did not get their GPU.
    pub(crate) fn blind<'a>(
        &'a self,
        node_state: &'a NodeState,
    ) -> impl Iterator<Item = &'a PodUid> {
        let blind = self.0.iter().filter(|(_, known)| known.judged.1 == Sight::Blind);
        blind.map(|(uid, _)| uid).filter(|uid| node_state.reservation(uid).is_some())
    }

    /// How many pods are kept.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Forgets pods that the node does not have.
    pub(crate) fn prune(&mut self, node_state: &NodeState) {
        self.0.retain(|uid, _| node_state.reservation(uid).is_some());
    }

    /// Notes what an agent saw, of pods with devices.
    pub(crate) fn see(&mut self, node_state: &NodeState, started: StartedContainers) {
        for (uid, seen) in started {
            let Some(held) = node_state.reservation(&uid) else { continue };
            let kept = self.0.entry(held.pod.uid.clone()).or_default();
            // An agent names all that it knows. One that comes later does not know those that have ended.
            if kept.seen.len() + seen.len() > MAX_KEPT {
                kept.seen.clear();
            }
            kept.seen.extend(seen.into_iter().take(MAX_KEPT));
        }
    }

    /// Notes what a pod with devices says of its containers. Returns whether that is news.
    pub(crate) fn want(&mut self, uid: &PodUid, wanted: &WantedContainers) -> bool {
        let known = self.0.get(uid).map(|kept| &kept.wanted);
        if known.map_or(wanted.containers.is_empty(), |known| known == wanted) {
            return false;
        }
        let kept = self.0.entry(uid.clone()).or_default();
        (kept.wanted, kept.uses_device) = (wanted.clone(), false);
        true
    }

    /// Notes which pods use devices, by lists of processes. One that drains may be listed for its container alone.
    pub(crate) fn see_lists(&mut self, node_state: &NodeState, uses: &[DeviceUse]) {
        let listed = uses.iter().flat_map(|seen| seen.processes.iter().flatten());
        for uid in listed.filter_map(|process| process.pod.as_ref()) {
            let held = node_state.reservation(uid).filter(|held| !held.is_draining());
            if let Some(held) = held {
                self.0.entry(held.pod.uid.clone()).or_default().uses_device = true;
            }
        }
    }

    /// Judges all pods again, and returns those that have started since, blind ones first.
    pub(crate) fn judge(&mut self, node_state: &NodeState) -> Vec<PodStart> {
        let mut started = Vec::new();
        for (uid, known) in self.0.iter_mut() {
            let Some(held) = node_state.reservation(uid) else { continue };
            let (by_mounts, lacking) = known.sight();
            // That a program ends its use of a device makes no container blind.
            let sight = if known.uses_device { Sight::Seen } else { by_mounts };
            let judged = (known.wanted.clone(), sight);
            if judged == known.judged {
                continue;
            }
            let start = match sight {
                Sight::Unknown => None,
                Sight::Blind => Some(Start::Blind),
                Sight::Seen => Some(Start::Seen),
            };
            let is_marked = known.wanted.choice == ContainerChoice::Marked;
            let is_older = lacking.is_some_and(|(_, is_older)| is_older);
            started.extend(start.map(|start| PodStart {
                pod: held.pod.clone(),
                start,
                is_sign: start == Start::Seen || (is_marked && !is_older),
                container: lacking.map(|(container, _)| container.name.clone()).unwrap_or_default(),
            }));
            known.judged = judged;
        }
        started.sort_by_key(|started| started.start);
        started
    }
}

#[cfg(test)]
mod tests;
