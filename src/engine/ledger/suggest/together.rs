//! Room for all pods of a group at once.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::moves::{Board, guest};
use crate::ledger::suggest::preemption::FoundRoom;
use crate::ledger::suggest::requeue::{NamedNodes, is_candidate};
use crate::ledger::suggest::waiting::WaitingState;
use crate::model::device_state::{KeptFor, StandingHold};
use crate::model::fit::HostRule;
use crate::model::request::{Amount, PodGroup};
use crate::model::reservation::{PodRef, Reservation};
use wire::ids::PodUid;
use wire::units::Share;

impl Ledger {
    /// A place for each of these pods, if there is one for all of them at the same time, on the nodes
    /// that the last call for each named. Looks at all nodes for each pod.
    pub fn fit_together(&self, pods: &[WaitingState]) -> Option<Vec<(PodUid, FoundRoom)>> {
        let node_table = self.node_table();
        let mut board = Board::new(self, &node_table);
        let mut largest: Vec<&WaitingState> = pods.iter().collect();
        largest.sort_by_key(|state| Reverse(size(&state.waiting.query)));
        let mut found = Vec::new();
        for state in largest {
            let uid = &state.waiting.pod.uid;
            let named: &NamedNodes = state.named.as_deref()?;
            // kube-scheduler looked at each pod alone.
            let query =
                PlacementRequest { host_rule: HostRule::Checked, ..state.waiting.query.clone() };
            let may = |at: usize| is_candidate(at, &node_table[at], Some(named));
            let at = board.best(&query, may, |_| true)?;
            let placement = board.place_on(at, &query)?;
            let node_state = board.node_state(at);
            let (node, pool) = (node_state.name().clone(), node_state.pool().clone());
            let pod = PodRef { uid: uid.clone(), name: state.waiting.pod.name.clone() };
            board.allocate(at, Reservation { pod, ..guest(placement.clone(), &query) });
            let (kept_for, host) = (KeptFor::Group, query.host);
            let hold = StandingHold { kept_for, placement, host };
            let (victims, passed) = (Vec::new(), Vec::new());
            found.push((uid.clone(), FoundRoom { node, pool, victims, passed, at, hold }));
        }
        Some(found)
    }
}

/// Namespace and name of a group.
pub type GroupKey = (Arc<str>, Arc<str>);

/// The key of a group in a namespace.
pub fn group_key(namespace: &str, group: &PodGroup) -> GroupKey {
    (namespace.into(), group.name.clone())
}

/// The size of a group that its pods name: none of them starts while they do not agree.
///
/// # Errors
/// The sizes, if they differ.
pub fn agreed_size(sizes: BTreeSet<u32>) -> Result<usize, BTreeSet<u32>> {
    match sizes.first() {
        Some(size) if sizes.len() == 1 => Ok(usize::try_from(*size).unwrap_or(usize::MAX)),
        Some(_) | None => Err(sizes),
    }
}

/// The pods of groups that are bound and not ending, or have ended with success.
#[derive(Default)]
pub struct BoundGroups {
    known: Mutex<Members>,
}

#[derive(Default)]
struct Members {
    /// With the size of the group that each names.
    by_group: BTreeMap<GroupKey, BTreeMap<PodUid, u32>>,
    groups: BTreeMap<PodUid, GroupKey>,
}

impl BoundGroups {
    /// Notes that a pod of a group is bound, and the size that it names.
    pub fn see(&self, uid: &PodUid, group: GroupKey, size: u32) {
        let known = &mut *self.known.lock();
        if known.groups.get(uid) != Some(&group) {
            known.forget(uid);
            known.groups.insert(uid.clone(), group.clone());
        }
        known.by_group.entry(group).or_default().insert(uid.clone(), size);
    }

    /// Forgets a pod that has ended.
    pub fn forget(&self, uid: &PodUid) {
        self.known.lock().forget(uid);
    }

    /// How many pods of a group are bound.
    pub fn count_of(&self, group: &GroupKey) -> usize {
        self.known.lock().by_group.get(group).map_or(0, BTreeMap::len)
    }

    /// The sizes of a group that its bound pods name.
    pub fn sizes_of(&self, group: &GroupKey) -> BTreeSet<u32> {
        let known = self.known.lock();
        known.by_group.get(group).into_iter().flat_map(BTreeMap::values).copied().collect()
    }

    /// How many pods are known.
    pub fn count(&self) -> usize {
        self.known.lock().groups.len()
    }
}

impl Members {
    fn forget(&mut self, uid: &PodUid) {
        let Some(group) = self.groups.remove(uid) else { return };
        if let Some(pods) = self.by_group.get_mut(&group) {
            pods.remove(uid);
            if pods.is_empty() {
                self.by_group.remove(&group);
            }
        }
    }
}

/// How much a pod requests of devices: of equal pods, any order does.
fn size(query: &PlacementRequest) -> (u32, Share) {
    let Some(gpu) = &query.gpu else { return (0, Share::ZERO) };
    let share = match gpu.amount {
        Amount::Fraction(share) | Amount::FractionAndMemory(share, _) => share,
        Amount::Memory(_) | Amount::SharedSlot | Amount::MigInstance(_) => Share::ZERO,
        Amount::Whole => Share::WHOLE,
    };
    (gpu.count.get(), share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::ledger_fixture::{bound, hello, ledger, pod, see_node, share_request};
    use crate::ledger::suggest::waiting::WaitingPod;
    use wire::units::Timestamp;

    fn member(ledger: &Ledger, name: &str, millionths: u64, nodes: &[&str]) -> WaitingState {
        let waiting = WaitingPod {
            pod: pod(name),
            namespace: "team".to_owned(),
            name: name.to_owned(),
            query: share_request(millionths),
            priority: 0,
            may_preempt: true,
            created_unix_seconds: 0,
            controller: None,
            edition: 0,
            group: None,
        };
        let mut state = WaitingState::without_call(waiting, Timestamp::START);
        state.named = Some(ledger.named_nodes(nodes.iter()).into());
        state
    }

    fn places(ledger: &Ledger, members: &[(&str, u64, &[&str])]) -> Option<Vec<String>> {
        let members: Vec<WaitingState> = members
            .iter()
            .map(|(name, millionths, nodes)| member(ledger, name, *millionths, nodes))
            .collect();
        let found = ledger.fit_together(&members)?;
        let mut places: Vec<String> = found
            .iter()
            .map(|(uid, room)| {
                let device = &room.hold.placement.devices[0].id;
                format!("{uid} {} {device}", room.node)
            })
            .collect();
        places.sort();
        Some(places)
    }

    #[test]
    fn all_pods_fit_together_or_none_has_a_place() {
        let ledger = ledger("A B");
        see_node(&ledger, "m");
        ledger.report("m", &hello("y", 1, "C"), Timestamp::START).unwrap();
        ledger.see_pod(&bound("a", "n", "A", 500_000), Timestamp::START);
        let all: &[&str] = &["m", "n"];
        let two = [("p", 1_000_000, all), ("q", 1_000_000, all)];
        let expected =
            ["p", "q"].map(|name| places(&ledger, &two).unwrap().join(",").contains(name));
        assert_eq!(expected, [true, true]);
        let three = [("p", 1_000_000, all), ("q", 1_000_000, all), ("r", 1_000_000, all)];
        assert_eq!(places(&ledger, &three), None, "A is half full");
        let mixed = [("small", 500_000, all), ("p", 1_000_000, all), ("q", 1_000_000, all)];
        let found = places(&ledger, &mixed).unwrap();
        assert_eq!(found[2], "small n A", "the large ones first: {found:?}");
        let on_m: &[&str] = &["m"];
        assert_eq!(places(&ledger, &[("p", 1_000_000, on_m), ("q", 1_000_000, on_m)]), None);
        assert_eq!(places(&ledger, &[]), Some(vec![]));
        assert_eq!(ledger.standing_count(), 0, "nothing is kept yet");
    }
}
