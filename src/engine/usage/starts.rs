//! Which pods got their GPU: what agents see in containers, joined with what the pods say of them.
//!
//! *Allocated* says what the ledger gave a pod, *seen* whether it arrived. An agent sees whether a container has the
//! driver, and that a process of the pod uses a device. Which devices a container has, it does not see.

use std::collections::{BTreeMap, BTreeSet};

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
    /// The last verdict.
    sight: Sight,
    /// The last verdict that was news, and the id of the container that decided it: another container that starts again
    /// is no news.
    news: (Sight, String),
}

impl PodContainers {
    /// Whether the pod got its GPU, as far as mounts say, and the container that decides it.
    fn by_mounts(&self) -> (Sight, Option<Deciding<'_>>) {
        let found = |container: &WantedContainer| {
            container.id.as_ref().and_then(|id| self.seen.get(id)).copied()
        };
        let all = || self.wanted.containers.iter().map(|it| (it, found(it)));
        let mut lacks = all().filter(|(_, seen)| seen.is_some_and(|seen| !seen.has_driver));
        let mut has = all().filter(|(_, seen)| seen.is_some_and(|seen| seen.has_driver));
        let (count, with) = (self.wanted.containers.len(), has.clone().count());
        let (is_blind, is_seen) = match self.wanted.choice {
            ContainerChoice::Marked => (lacks.clone().next().is_some(), with == count),
            ContainerChoice::Any => (lacks.clone().count() == count, with > 0),
        };
        let (sight, deciding) = match (count, is_blind, is_seen) {
            (0, _, _) | (_, false, false) => (Sight::Unknown, None),
            (_, true, _) => (Sight::Blind, lacks.next()),
            (_, false, true) => (Sight::Seen, has.next()),
        };
        let is_older = |seen: Option<StartedContainer>| seen.is_some_and(|seen| seen.is_older);
        let deciding =
            deciding.map(|(container, seen)| Deciding { container, is_older: is_older(seen) });
        (sight, deciding)
    }

    /// The verdict about the pod, by all that is known.
    fn verdict(&self) -> (Sight, Option<Verdict>) {
        let (by_mounts, deciding) = self.by_mounts();
        // That a program ends its use of a device makes no container blind.
        let sight = if self.uses_device { Sight::Seen } else { by_mounts };
        let start = match sight {
            Sight::Unknown => return (sight, None),
            Sight::Blind => Start::Blind,
            Sight::Seen => Start::Seen,
        };
        let id = deciding.as_ref().and_then(|it| it.container.id.clone()).unwrap_or_default();
        let lacking = deciding.filter(|_| sight == Sight::Blind);
        let is_older = lacking.as_ref().is_some_and(|it| it.is_older);
        let is_marked = self.wanted.choice == ContainerChoice::Marked;
        let container = lacking.map(|it| it.container.name.clone()).unwrap_or_default();
        let is_sign = self.uses_device || (is_marked && !is_older);
        (sight, Some(Verdict { start, id, is_sign, container }))
    }
}

/// The news of a pod that has started.
struct Verdict {
    start: Start,
    /// The id of the container that decides it, if one does.
    id: String,
    /// Whether it is a sign for later pods of the node.
    is_sign: bool,
    /// The container without the driver; empty where it has one.
    container: String,
}

/// The container by which a pod is judged.
struct Deciding<'a> {
    container: &'a WantedContainer,
    /// Whether it is older than its agent.
    is_older: bool,
}

impl Starts {
    /// Whether a pod got its GPU.
    pub fn of(&self, uid: &PodUid) -> Sight {
        self.0.get(uid).map_or(Sight::Unknown, |known| known.sight)
    }

    /// The container of a blind pod without the driver.
    pub fn blind_container(&self, uid: &PodUid) -> Option<&str> {
        let known = self.0.get(uid).filter(|known| known.sight == Sight::Blind)?;
        known.by_mounts().1.map(|it| &*it.container.name)
    }

    /// The pods on the node that did not get their GPU.
    pub(crate) fn blind<'a>(
        &'a self,
        node_state: &'a NodeState,
    ) -> impl Iterator<Item = &'a PodUid> {
        let blind = self.0.iter().filter(|(_, known)| known.sight == Sight::Blind);
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
            // What was said of a container first stays: its mounts never change.
            for (id, seen) in seen.into_iter().take(MAX_KEPT) {
                kept.seen.entry(id).or_insert(seen);
            }
        }
    }

    /// Notes what a pod with devices says of its containers. Returns whether that is news.
    pub(crate) fn want(&mut self, uid: &PodUid, wanted: &WantedContainers) -> bool {
        let known = self.0.get(uid).map(|kept| &kept.wanted);
        if known.map_or(wanted.containers.is_empty(), |known| known == wanted) {
            return false;
        }
        let kept = self.0.entry(uid.clone()).or_default();
        let ids = |wanted: &WantedContainers| -> BTreeSet<String> {
            wanted.containers.iter().filter_map(|container| container.id.clone()).collect()
        };
        // Which of its containers uses the device is not known.
        kept.uses_device &= !ids(&kept.wanted).is_disjoint(&ids(wanted));
        kept.wanted = wanted.clone();
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
            let (sight, verdict) = known.verdict();
            known.sight = sight;
            let is_news = |verdict: &Verdict| known.news != (sight, verdict.id.clone());
            let Some(verdict) = verdict.filter(is_news) else { continue };
            started.push(PodStart {
                pod: held.pod.clone(),
                start: verdict.start,
                is_sign: verdict.is_sign,
                container: verdict.container,
            });
            known.news = (sight, verdict.id);
        }
        started.sort_by_key(|started| started.start);
        started
    }
}

#[cfg(test)]
mod tests;
