//! What there is of the groups whose pods start together, and the events of their pods.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::pods::wording::counted;
use crate::shared::app::App;
use engine::ledger::suggest::together::{GroupKey, agreed_size, group_key};
use engine::ledger::suggest::waiting::{WaitingPod, WaitingState};
use kube_api::pod::seen_pod::SeenPod;
use wire::ids::PodUid;
use wire::units::Share;

/// A pod of a group that waits, in the order in which they start.
type Member = (Reverse<i32>, i64, PodUid);

/// What there is of a group.
#[derive(Debug, Default)]
pub(crate) struct GroupState {
    name: String,
    sizes: BTreeSet<u32>,
    /// Those that wait, with what each counts for its team, and whether a call for it is answered.
    waiting: BTreeMap<Member, (Share, bool)>,
    /// How many are bound or have succeeded.
    bound: usize,
    /// How many have scheduling gates.
    gated: usize,
    /// How many have a request that is refused.
    refused: usize,
}

/// All groups with a pod that waits.
#[derive(Debug, Default)]
pub struct Groups {
    known: BTreeMap<GroupKey, GroupState>,
}

impl Groups {
    /// The current ones.
    pub(crate) fn of(app: &App) -> Self {
        Self::those(app, |_| true)
    }

    /// The one of a pod; none if it is in no group.
    pub fn around(app: &App, pod: &WaitingPod) -> Self {
        match pod.group.as_ref().map(|group| group_key(&pod.namespace, group)) {
            Some(own) => Self::those(app, |key| *key == own),
            None => Self::default(),
        }
    }

    fn those(app: &App, is_wanted: impl Fn(&GroupKey) -> bool) -> Self {
        let mut known: BTreeMap<GroupKey, GroupState> = BTreeMap::new();
        app.waiting.look_at_each(|WaitingState { waiting: pod, named, is_answered, .. }| {
            let Some(group) = &pod.group else { return };
            let key = group_key(&pod.namespace, group);
            if !is_wanted(&key) {
                return;
            }
            let state = known.entry(key).or_default();
            let charge = pod.query.gpu.as_ref().map(|gpu| app.ledger.teams.charge(gpu));
            let member = (Reverse(pod.priority), pod.created_unix_seconds, pod.pod.uid.clone());
            let is_called = named.is_some() && *is_answered;
            state.waiting.insert(member, (charge.unwrap_or(Share::ZERO), is_called));
            state.sizes.insert(group.size);
        });
        for (key, state) in &mut known {
            state.name = key.1.to_string();
            state.bound = app.room.bound_groups.count_of(key);
            state.sizes.extend(app.room.bound_groups.sizes_of(key));
        }
        if known.is_empty() {
            return Self::default();
        }
        for pod in app.pods.gated.iter() {
            let state = key_of(&pod).and_then(|key| known.get_mut(&key));
            state.into_iter().for_each(|state| state.gated += 1);
        }
        for pod in app.pods.pending.iter().filter(|pod| pod.request.is_err()) {
            let state = key_of(&pod).and_then(|key| known.get_mut(&key));
            state.into_iter().for_each(|state| state.refused += 1);
        }
        Self { known }
    }

    /// The one of a pod.
    pub(crate) fn of_pod(&self, pod: &WaitingPod) -> Option<&GroupState> {
        self.known.get(&group_key(&pod.namespace, pod.group.as_ref()?))
    }
}

fn key_of(pod: &SeenPod) -> Option<GroupKey> {
    Some(group_key(&pod.namespace, pod.group.as_ref()?))
}

impl GroupState {
    /// How many pods start next, if all name one size.
    fn needed(&self) -> Option<(usize, usize)> {
        let size = agreed_size(self.sizes.clone()).ok()?;
        Some((size, size.saturating_sub(self.bound).max(1)))
    }

    /// Whether it starts next, and alone: the others of its group have their places.
    pub(crate) fn starts_alone(&self, uid: &PodUid) -> bool {
        let is_first = self.waiting.keys().next().is_some_and(|(.., first)| first == uid);
        is_first && self.needed().is_some_and(|(_, needed)| needed == 1)
    }

    /// What the pods that start next count together, if all of them are there and their team may only
    /// have `left`, in millionths of a GPU.
    pub(crate) fn beyond_limit(&self, left: Option<u64>) -> Option<Share> {
        let (_, needed) = self.needed().filter(|(_, needed)| self.waiting.len() >= *needed)?;
        let charges = self.waiting.values().take(needed).map(|(charge, _)| charge.millionths());
        let sum: u64 = charges.sum();
        (sum > left?).then(|| Share::from_millionths(sum))
    }

    /// What is said of what they count.
    pub(crate) fn counts(&self, charge: Share) -> String {
        let needed = self.needed().map_or(0, |(_, needed)| needed);
        match needed {
            1 => format!("the next pod of its group `{}` counts {charge}: it waits", self.name),
            _ => format!(
                "{needed} pods of its group `{}` count {charge} together: they wait",
                self.name
            ),
        }
    }

    /// What the owner of the pods can do, if that is the only thing that helps.
    pub(crate) fn suggestion(&self) -> Option<String> {
        self.needed().is_none().then(|| {
            format!(
                "create the pods of group `{}` again with one `gpupack.dev/group-size`, or give each run \
                 another `gpupack.dev/group`",
                self.name
            )
        })
    }

    /// Why a pod of it waits.
    pub(crate) fn verdict(&self, uid: &PodUid) -> String {
        let name = &self.name;
        let Some((size, needed)) = self.needed() else {
            let sizes: Vec<String> = self.sizes.iter().map(ToString::to_string).collect();
            return format!(
                "the pods of its group `{name}` disagree on `gpupack.dev/group-size`: they name {}, and none \
                 of them starts until all name the same",
                sizes.join(" and ")
            );
        };
        let there = self.waiting.len() + self.bound;
        if there < size {
            return format!(
                "it waits for the other pods of its group `{name}`: {there} of {size} exist{}",
                self.others()
            );
        }
        let called = self.waiting.values().filter(|(_, is_called)| *is_called).count();
        if called < needed {
            let missing = needed - called;
            return format!(
                "all {size} pods of its group `{name}` exist, and kube-scheduler has not called for {missing} of \
                 them: its own filters may refuse every node"
            );
        }
        let beyond = there - size;
        let is_beyond = !self.waiting.keys().take(needed).any(|(.., one)| one == uid);
        let start = match (self.bound, is_beyond) {
            (_, true) => "this one starts alone, after the others, once it fits".to_owned(),
            (0, false) if needed > 1 => {
                format!("{needed} pods start once there is room for all of them at the same time")
            }
            (_, false) if needed > 1 => {
                format!("the other {needed} start once there is room for them at the same time")
            }
            (_, false) => "this one starts once it fits".to_owned(),
        };
        let bound = match self.bound {
            0 => String::new(),
            bound => {
                let are = counted(bound, "pod is bound or has", "pods are bound or have");
                format!("{are} succeeded; ")
            }
        };
        let too_many = match beyond {
            0 => String::new(),
            _ => format!(
                "it has {there} pods, {beyond} more than `gpupack.dev/group-size`, and each beyond that starts \
                 alone; "
            ),
        };
        format!("it starts with its group `{name}` of {size}: {too_many}{bound}{start}")
    }

    /// What is said of pods that are there and cannot start.
    fn others(&self) -> String {
        let mut others = String::new();
        if self.gated > 0 {
            let more = counted(self.gated, "more has", "more have");
            others += &format!(", and {more} scheduling gates");
        }
        if self.refused > 0 {
            let more = counted(self.refused, "more has", "more have");
            others += &format!(", and {more} a request that is refused");
        }
        others
    }
}
