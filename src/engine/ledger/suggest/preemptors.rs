//! The pods for which room is being made, and what the threads that know of them say to the loop that
//! decides. Verbs note what kube-scheduler plans, and ask where a pod may go; writers say how
//! evictions ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::ledger::suggest::preemption::PlannedVictims;
use crate::model::reservation::PodRef;
use wire::ids::{NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::{HostAmount, Timestamp};

/// Most pods whose plans are kept, and most nodes of each; kube-scheduler plans for few at a time.
const MOST_PLANS: usize = 1_000;
const MOST_NODES: usize = 200;

/// Most plans for pods that the watch does not show yet.
const MOST_UNSEEN: usize = 100;

/// Most pods without a GPU that are woken at a time.
const MOST_WOKEN: usize = 50;

/// Most pods without a GPU whose refusals are remembered; kube-scheduler tries others again later.
const MOST_REFUSED: usize = 10_000;

/// kube-scheduler plans again when something changes, and after five minutes at the latest.
const PLAN_LASTS: Duration = Duration::from_secs(300);

/// How the evictions for a pod ended, if not all pods were asked to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A room on the same node on which it relied is not made.
    Again,
    /// Some have gone, and budgets forbid it for these.
    Partly(BTreeSet<PodUid>),
    /// Budgets forbid it for these pods now.
    Protected(BTreeSet<PodUid>),
    /// gpupack has no right to evict.
    Denied,
    /// The API server did not answer, or the pod cannot be written, or a later process has written on it.
    Failed,
}

/// Room that is kept for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Room {
    node: NodeName,
    priority: i32,
    stage: Stage,
    /// Whether a note on the pod may say so.
    is_noted: bool,
    /// Different for each room that is made.
    number: u64,
    /// The pods that are to go for it.
    victims: BTreeSet<PodUid>,
}

impl Room {
    fn is_made(&self, number: u64) -> bool {
        self.stage != Stage::Kept && self.number == number
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// As it becomes free.
    Kept,
    /// It is being made.
    Made,
    /// A pod was asked to go for it. From then on the pod waits for this room.
    Asked,
}

/// Room that is not kept any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndedRoom {
    /// Whether a note on its pod may say that it is kept.
    pub is_noted: bool,
    /// Whether a pod was asked to go for it.
    pub was_asked: bool,
}

/// A pod without a GPU that was refused because room is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRefused {
    /// The pod.
    pub pod: PodRef,
    /// Its priority.
    pub priority: i32,
    /// Its CPU and host memory.
    pub host: HostAmount,
    /// The nodes that refused it.
    pub nodes: Vec<NodeName>,
}

/// What kube-scheduler would evict for a pod.
struct Plan {
    at: Timestamp,
    victims: Arc<PlannedVictims>,
    /// Whether the watch showed the pod then. Any caller can make up another.
    is_shown: bool,
}

#[derive(Default)]
struct Known {
    plans: BTreeMap<PodUid, Plan>,
    rooms: BTreeMap<PodUid, Room>,
    /// Notes about room that are still to be written on waiting pods, by number.
    notes: BTreeMap<PodUid, u64>,
    /// The number of rooms that were made, and of notes.
    numbers: u64,
    ended: Vec<(PodUid, Ended)>,
    /// Pods without a GPU that would take what is kept of a host, and the nodes that refused them.
    refused: BTreeMap<PodUid, HostRefused>,
    /// Pods for which an earlier process was making room; `None` once this one goes on with it.
    before: Option<BTreeSet<PodUid>>,
    /// Those whose notes the watch showed only after that.
    late: BTreeSet<PodUid>,
}

/// The pods for which room is being made.
pub struct Preemptors {
    known: Mutex<Known>,
}

impl Default for Preemptors {
    fn default() -> Self {
        let known = Known { before: Some(BTreeSet::new()), ..Known::default() };
        Self { known: Mutex::new(known) }
    }
}

impl Preemptors {
    /// Notes which pods kube-scheduler would evict for a pod, per node.
    pub fn plan(&self, uid: &PodUid, mut plan: PlannedVictims, is_shown: bool, now: Timestamp) {
        let mut known = self.known.lock();
        while plan.len() > MOST_NODES {
            plan.pop_last();
        }
        let plans = &mut known.plans;
        plans.retain(|_, plan| now.since(plan.at) < PLAN_LASTS);
        plans.insert(uid.clone(), Plan { at: now, victims: Arc::new(plan), is_shown });
        for (of, most) in [(false, MOST_UNSEEN), (true, MOST_PLANS)] {
            let of = |plans: &BTreeMap<PodUid, Plan>| {
                let plans = plans.iter().filter(|(_, plan)| plan.is_shown == of);
                let all: Vec<(Timestamp, PodUid)> =
                    plans.map(|(uid, plan)| (plan.at, uid.clone())).collect();
                all
            };
            let mut all = of(plans);
            if all.len() > most {
                all.sort();
                plans.remove(&all[0].1); // those that were named last stay
            }
        }
    }

    /// The plan for a pod.
    pub fn planned(&self, uid: &PodUid, now: Timestamp) -> Option<Arc<PlannedVictims>> {
        let known = self.known.lock();
        let plan = known.plans.get(uid)?;
        (now.since(plan.at) < PLAN_LASTS).then(|| Arc::clone(&plan.victims))
    }

    /// Notes that room is kept for a pod on a node, as it becomes free. Returns whether it was not on
    /// this node before.
    pub fn keep(&self, uid: &PodUid, node: NodeName, priority: i32) -> bool {
        let victims = BTreeSet::new();
        let stage = Stage::Kept;
        let room = Room { node: node.clone(), priority, stage, is_noted: true, number: 0, victims };
        let before = self.known.lock().rooms.insert(uid.clone(), room);
        before.is_none_or(|before| before.node != node)
    }

    /// Notes that room is being made for a pod on a node, and gives it a number.
    pub fn begin(
        &self,
        uid: &PodUid,
        (node, priority): (NodeName, i32),
        victims: BTreeSet<PodUid>,
    ) -> u64 {
        let known = &mut *self.known.lock();
        known.numbers += 1;
        let number = known.numbers;
        let is_noted = known.rooms.get(uid).is_some_and(|before| before.is_noted);
        let room = Room { node, priority, stage: Stage::Made, is_noted, number, victims };
        known.rooms.insert(uid.clone(), room);
        number
    }

    /// Notes whether a note may be on the pod, which is taken away when the room ends. Returns what was known
    /// before.
    pub fn note(&self, uid: &PodUid, number: u64, is_noted: bool) -> bool {
        let mut known = self.known.lock();
        let room = known.rooms.get_mut(uid).filter(|room| room.is_made(number));
        room.is_some_and(|room| std::mem::replace(&mut room.is_noted, is_noted))
    }

    /// Notes that a note about room is to be written on a pod, in place of an earlier one. Returns its
    /// number.
    pub fn owe_note(&self, uid: &PodUid) -> u64 {
        let known = &mut *self.known.lock();
        known.numbers += 1;
        known.notes.insert(uid.clone(), known.numbers);
        known.late.remove(uid);
        known.numbers
    }

    /// Whether the note with this number is still to be written.
    pub fn owes_note(&self, uid: &PodUid, number: u64) -> bool {
        self.known.lock().notes.get(uid) == Some(&number)
    }

    /// Notes that it is written.
    pub fn note_written(&self, uid: &PodUid, number: u64) {
        let mut known = self.known.lock();
        if known.notes.get(uid) == Some(&number) {
            known.notes.remove(uid);
        }
    }

    /// Whether a note on a pod may be wrong: another one is still to be written.
    pub fn is_note_open(&self, uid: &PodUid) -> bool {
        self.known.lock().notes.contains_key(uid)
    }

    /// Notes that pods are asked to go for it. Returns whether that is still wanted.
    pub fn ask(&self, uid: &PodUid, number: u64) -> bool {
        let mut known = self.known.lock();
        let room = known.rooms.get_mut(uid).filter(|room| room.is_made(number));
        room.map(|room| (room.stage, room.is_noted) = (Stage::Asked, true)).is_some()
    }

    /// Whether this room is still being made for the pod.
    pub fn is_making(&self, uid: &PodUid, number: u64) -> bool {
        self.known.lock().rooms.get(uid).is_some_and(|room| room.is_made(number))
    }

    /// The rooms on a node whose victims were not asked yet, by pod and number.
    pub fn unasked_on(&self, node: &NodeName) -> Vec<(PodUid, u64)> {
        let known = self.known.lock();
        let rooms =
            known.rooms.iter().filter(|(_, it)| it.stage == Stage::Made && it.node == *node);
        rooms.map(|(uid, room)| (uid.clone(), room.number)).collect()
    }

    /// Whether the victims of this room were asked; `None` if it is not made any more.
    pub fn was_asked(&self, uid: &PodUid, number: u64) -> Option<bool> {
        let known = self.known.lock();
        let room = known.rooms.get(uid).filter(|room| room.is_made(number))?;
        Some(room.stage == Stage::Asked)
    }

    /// The pods that were asked to go for this one.
    pub fn victims(&self, uid: &PodUid) -> BTreeSet<PodUid> {
        let known = self.known.lock();
        known.rooms.get(uid).map(|room| room.victims.clone()).unwrap_or_default()
    }

    /// The node where room is kept for the pod.
    pub fn node(&self, uid: &PodUid) -> Option<NodeName> {
        self.known.lock().rooms.get(uid).map(|room| room.node.clone())
    }

    /// Whether room is being made for the pod.
    pub fn has(&self, uid: &PodUid) -> bool {
        self.known.lock().rooms.get(uid).is_some_and(|room| room.stage != Stage::Kept)
    }

    /// Notes that no room is kept for the pod any more. Returns what was so until now.
    pub fn end(&self, uid: &PodUid) -> EndedRoom {
        let room = self.known.lock().rooms.remove(uid);
        room.map_or_else(EndedRoom::default, |Room { is_noted, stage, .. }| EndedRoom {
            is_noted,
            was_asked: stage == Stage::Asked,
        })
    }

    /// Notes how the evictions for a pod ended.
    pub fn ended(&self, uid: &PodUid, number: u64, ended: Ended) {
        let known = &mut *self.known.lock();
        if known.rooms.get(uid).is_some_and(|room| room.is_made(number)) {
            known.ended.push((uid.clone(), ended));
        }
    }

    /// The preemptors that ended since the last call, and how.
    pub fn take_ended(&self) -> Vec<(PodUid, Ended)> {
        std::mem::take(&mut self.known.lock().ended)
    }

    /// Whether pods were asked to go for this one.
    pub fn is_asked(&self, uid: &PodUid) -> bool {
        self.known.lock().rooms.get(uid).is_some_and(|room| room.stage == Stage::Asked)
    }

    /// The nodes with room that is kept for pods that are at least this important.
    pub fn nodes_above(&self, priority: i32) -> BTreeSet<NodeName> {
        let known = self.known.lock();
        let rooms = known.rooms.values().filter(|room| room.priority >= priority);
        rooms.map(|room| room.node.clone()).collect()
    }

    /// Notes which nodes refused a pod without a GPU; none: it is no longer refused.
    pub fn refuse_host(&self, refused: HostRefused) {
        let mut known = self.known.lock();
        if refused.nodes.is_empty() {
            known.refused.remove(&refused.pod.uid);
        } else if known.refused.len() < MOST_REFUSED {
            known.refused.insert(refused.pod.uid.clone(), refused);
        }
    }

    /// Removes the pods that one of their nodes no longer refuses, and returns them: no room there is kept for
    /// one that is at least as important any more, or the host `is_open`.
    pub fn take_refused(&self, is_open: impl Fn(&NodeName, HostAmount) -> bool) -> Vec<PodRef> {
        let known = &mut *self.known.lock();
        let mut highest: BTreeMap<&NodeName, i32> = BTreeMap::new();
        for room in known.rooms.values() {
            let highest = highest.entry(&room.node).or_insert(room.priority);
            *highest = room.priority.max(*highest);
        }
        let accepts = |node: &NodeName, refused: &HostRefused| {
            let is_kept = highest.get(node).is_some_and(|highest| *highest >= refused.priority);
            !is_kept || is_open(node, refused.host)
        };
        let open = known
            .refused
            .extract_if(.., |_, refused| refused.nodes.iter().any(|it| accepts(it, refused)));
        open.map(|(_, refused)| refused.pod).take(MOST_WOKEN).collect()
    }

    /// Notes whether a note about room is on a waiting pod, and whether an earlier process wrote what the watch
    /// shows.
    pub fn see_note(&self, uid: &PodUid, is_noted: bool, is_of_earlier: bool) {
        let known = &mut *self.known.lock();
        let Known { before, late, rooms, notes, .. } = known;
        let is_new = is_of_earlier && !rooms.contains_key(uid) && !notes.contains_key(uid);
        match (before, is_noted) {
            (Some(before), true) => _ = before.insert(uid.clone()),
            (Some(before), false) => _ = before.remove(uid),
            // The watch was behind when this process began to lead.
            (None, true) if is_new && !mutated(Mutation::LateRoomNoteIgnored) => {
                late.insert(uid.clone());
            }
            (None, true) => {}
            (None, false) => _ = late.remove(uid),
        }
    }

    /// Whether there is room of an earlier process with which this one has yet to go on.
    pub fn has_earlier(&self) -> bool {
        self.known.lock().before.as_ref().is_some_and(|before| !before.is_empty())
    }

    /// The pods for which an earlier process was making room: all until [`Preemptors::lead`], and those whose notes
    /// come later once.
    pub fn earlier(&self) -> BTreeSet<PodUid> {
        let known = &mut *self.known.lock();
        let mut all = known.before.clone().unwrap_or_default();
        all.append(&mut known.late);
        all
    }

    /// Notes that this process decides, and goes on with the rooms of earlier ones.
    pub fn lead(&self) {
        self.known.lock().before = None;
    }

    /// Forgets a pod that is bound or gone.
    pub fn forget(&self, uid: &PodUid) {
        let mut known = self.known.lock();
        known.plans.remove(uid);
        known.rooms.remove(uid);
        known.notes.remove(uid);
        known.late.remove(uid);
        if let Some(before) = &mut known.before {
            before.remove(uid);
        }
    }

    /// Forgets that a pod without a GPU was refused.
    pub fn forget_refused(&self, uid: &PodUid) {
        self.known.lock().refused.remove(uid);
    }

    /// Forgets all: another process decides. What it begins is noted.
    pub fn follow(&self, earlier: impl Iterator<Item = PodUid>) {
        let known = &mut *self.known.lock();
        // What is under way keeps its number, which no later room or note gets.
        let numbers = known.numbers;
        *known = Known { before: Some(earlier.collect()), numbers, ..Known::default() };
    }

    /// Whether this process decides, as far as it knows.
    pub fn is_following(&self) -> bool {
        self.known.lock().before.is_some()
    }

    /// How many entries it has.
    pub fn count(&self) -> usize {
        let known = self.known.lock();
        let before = known.before.as_ref().map_or(0, BTreeSet::len) + known.late.len();
        let rooms = known.rooms.len() + known.notes.len();
        known.plans.len() + known.refused.len() + rooms + known.ended.len() + before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::ledger_fixture::uid;

    #[test]
    fn plans_are_bounded_and_end() {
        let preemptors = Preemptors::default();
        let node = |at: usize| (NodeName::new(format!("{at:04}")), BTreeSet::new());
        let plan: PlannedVictims = (0..MOST_NODES + 5).map(node).collect();
        let at = Timestamp::from_millis;
        for pod in 0..MOST_PLANS + 5 {
            let millis = u64::try_from(pod).unwrap();
            preemptors.plan(&uid(&format!("p{pod}")), plan.clone(), true, at(millis));
        }
        assert_eq!(preemptors.count(), MOST_PLANS);
        assert_eq!(preemptors.planned(&uid("p4"), at(2_000)), None, "the oldest has gone");
        let planned = preemptors.planned(&uid("p7"), at(300_006)).unwrap();
        assert_eq!(planned.len(), MOST_NODES);
        assert_eq!(preemptors.planned(&uid("p7"), at(300_007)), None);
        for pod in 0..MOST_UNSEEN + 5 {
            preemptors.plan(&uid(&format!("made-up-{pod}")), plan.clone(), false, at(9_000));
        }
        assert_eq!(preemptors.count(), MOST_PLANS + MOST_UNSEEN, "they displace no others");
        preemptors.plan(&uid("late"), plan, true, at(400_000));
        assert_eq!(preemptors.count(), 1);
    }

    #[test]
    fn a_pod_waits_for_its_room_once_others_are_asked_to_go() {
        let (preemptors, p) = (Preemptors::default(), uid("p"));
        assert!(!preemptors.ask(&p, 1), "nothing was begun");
        preemptors.keep(&p, NodeName::new("n"), 7);
        assert!(!preemptors.ask(&p, 0) && !preemptors.has(&p));
        let begin = || preemptors.begin(&p, (NodeName::new("n"), 7), BTreeSet::from([uid("v")]));
        let number = begin();
        assert!(!preemptors.is_asked(&p));
        assert!(preemptors.ask(&p, number) && preemptors.is_asked(&p));
        assert_eq!(preemptors.victims(&p), BTreeSet::from([uid("v")]));
        assert_eq!(preemptors.nodes_above(7), BTreeSet::from([NodeName::new("n")]));
        assert!(preemptors.nodes_above(8).is_empty());
        let ended = EndedRoom { is_noted: true, was_asked: true };
        assert_eq!((preemptors.end(&p), preemptors.end(&p)), (ended, EndedRoom::default()));
        assert!(!preemptors.ask(&p, number) && !preemptors.has(&p) && preemptors.count() == 0);
        let next = begin();
        assert!(!preemptors.ask(&p, number) && preemptors.is_making(&p, next));
        preemptors.ended(&p, number, Ended::Failed);
        assert_eq!(preemptors.take_ended(), [], "of an earlier room");
        preemptors.forget(&p);
        assert!(!preemptors.is_making(&p, next), "it is bound or gone");
    }

    #[test]
    fn a_note_that_may_have_been_written_is_taken_away() {
        let (preemptors, p) = (Preemptors::default(), uid("p"));
        let begin = || preemptors.begin(&p, (NodeName::new("n"), 7), BTreeSet::from([uid("v")]));
        let number = begin();
        assert!(!preemptors.note(&p, number, true), "no note was there before");
        assert!(!preemptors.note(&p, number + 1, false), "of another room");
        assert_eq!(preemptors.end(&p), EndedRoom { is_noted: true, was_asked: false });
        let number = begin();
        let before = preemptors.note(&p, number, true);
        preemptors.note(&p, number, before); // it was refused
        assert_eq!(preemptors.end(&p), EndedRoom::default());
    }

    #[test]
    fn a_note_is_open_until_the_last_one_is_written() {
        let (preemptors, p) = (Preemptors::default(), uid("p"));
        let first = preemptors.owe_note(&p);
        assert!(preemptors.owes_note(&p, first) && preemptors.is_note_open(&p));
        let second = preemptors.owe_note(&p);
        assert!(!preemptors.owes_note(&p, first), "another one replaces it");
        preemptors.note_written(&p, first);
        assert!(preemptors.owes_note(&p, second) && preemptors.is_note_open(&p));
        preemptors.note_written(&p, second);
        assert!(!preemptors.is_note_open(&p));
        let third = preemptors.owe_note(&p);
        preemptors.follow([].into_iter());
        assert!(!preemptors.is_note_open(&p) && preemptors.owe_note(&p) > third);
        preemptors.forget(&p);
        assert_eq!((preemptors.is_note_open(&p), preemptors.count()), (false, 0));
    }

    #[test]
    fn a_pod_without_a_gpu_is_woken_when_only_less_important_ones_keep_its_node() {
        let (preemptors, node) = (Preemptors::default(), NodeName::new("n"));
        let refused = |uid| HostRefused {
            pod: PodRef { uid, name: "plain".into() },
            priority: 2,
            host: HostAmount::ZERO,
            nodes: vec![node.clone()],
        };
        preemptors.keep(&uid("p"), node.clone(), 2);
        preemptors.refuse_host(refused(uid("plain")));
        assert_eq!(preemptors.take_refused(|_, _| false), []);
        preemptors.keep(&uid("low"), node.clone(), 1);
        assert_eq!(preemptors.take_refused(|_, _| false), [], "`p` is as important");
        preemptors.end(&uid("p"));
        let woken = preemptors.take_refused(|_, _| false);
        assert_eq!(woken.len(), 1, "the room of `low` is not in its way");
        preemptors.refuse_host(refused(uid("plain")));
        preemptors.keep(&uid("p"), node.clone(), 2);
        assert_eq!(preemptors.take_refused(|_, _| true).len(), 1, "there is enough for both");
    }

    #[test]
    fn room_of_an_earlier_process_is_taken_over_once() {
        let (preemptors, p) = (Preemptors::default(), uid("p"));
        preemptors.see_note(&p, true, true);
        assert!(preemptors.has_earlier());
        assert_eq!(preemptors.earlier(), BTreeSet::from([p.clone()]));
        preemptors.lead();
        preemptors.see_note(&p, true, false); // its own note
        assert!(!preemptors.has_earlier() && preemptors.earlier().is_empty());
        preemptors.follow([p.clone()].into_iter());
        assert!(preemptors.has_earlier());
        preemptors.see_note(&p, false, true);
        assert!(!preemptors.has_earlier(), "it has given up");
    }

    #[test]
    fn room_whose_note_the_watch_shows_late_is_taken_over_as_well() {
        let (preemptors, p) = (Preemptors::default(), uid("p"));
        let late = |is_noted| {
            preemptors.see_note(&p, is_noted, true);
            preemptors.earlier().len()
        };
        preemptors.lead();
        assert_eq!((late(true), preemptors.earlier().len()), (1, 0), "once");
        preemptors.see_note(&p, true, true);
        assert!(!preemptors.has_earlier(), "questions are answered meanwhile");
        assert_eq!((late(false), late(true)), (0, 1));
        preemptors.owe_note(&p);
        assert_eq!(late(true), 0, "another note is to be written");
        preemptors.forget(&p);
        preemptors.keep(&p, NodeName::new("n"), 1);
        assert_eq!(late(true), 0, "this process has room for it");
    }
}
