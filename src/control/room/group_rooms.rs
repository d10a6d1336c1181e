//! What is remembered of groups between two steps of the standing holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::room::owners::Owner;
use engine::ledger::suggest::preemption::FoundRoom;
use engine::ledger::suggest::requeue::NamedNodes;
use engine::ledger::suggest::together::GroupKey;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::Timestamp;

/// The groups for which room is kept, and those that wait for it.
#[derive(Default)]
pub(crate) struct GroupRooms {
    /// Those for which room was kept at once, until one of their pods has a place.
    pub(crate) started: BTreeMap<GroupKey, Started>,
    /// Those that did not fit.
    pub(crate) missed: BTreeMap<GroupKey, Missed>,
    /// Those whose room went to one that waits long, until their turn.
    pub(crate) in_turn: BTreeSet<GroupKey>,
    /// The pools where one waits long.
    pub(crate) waits_long: BTreeSet<PoolName>,
    /// The group with which the next step begins.
    pub(crate) next: Option<GroupKey>,
    /// Nodes where room appeared since the last step.
    pub(crate) new_rooms: BTreeSet<NodeName>,
}

/// A group for which room is kept until one of its pods has a place.
pub(crate) struct Started {
    pub(crate) pods: BTreeSet<PodUid>,
    pub(crate) owner: Owner,
    pub(crate) pools: BTreeSet<PoolName>,
    /// Since when its room is kept, all of it free.
    pub(crate) since: Timestamp,
    /// How long it is kept.
    pub(crate) wait: Duration,
}

/// A group that did not fit.
pub(crate) struct Missed {
    /// Its pods, and the nodes of the last call for each.
    pub(crate) pods: Vec<(PodUid, Option<Arc<NamedNodes>>)>,
    pub(crate) until: Timestamp,
    /// Whether room that appears ends that.
    pub(crate) ends_early: bool,
}

/// What room takes, in millionths of a GPU.
pub(crate) fn amount(room: &FoundRoom) -> u64 {
    room.hold.placement.share().millionths()
}
