//! What is promised of evictions for more important pods.

use std::collections::{BTreeMap, BTreeSet};

use kube_api::request::room_note::RoomNote;
use runtime::step::outside::CallId;

/// A process evicts no second set of pods for one that it could not bind within this time.
const PAUSE: u64 = 50_000;

/// What one process asked to go for a pod.
struct Asked {
    life: u64,
    node: String,
    at: u64,
    victims: BTreeSet<String>,
    /// Whether one of them was evicted.
    is_evicted: bool,
    /// Whether the pod has the note.
    is_open: bool,
    /// The first request by which each process took the note away.
    given_up: BTreeMap<u64, CallId>,
    /// The processes that know of it: they wrote the note, or took it away.
    known: BTreeSet<u64>,
}

impl Asked {
    /// Whether an eviction by this request of this process may be for the pod. A process that takes the
    /// note away has given the room up before, and sends no more evictions for it.
    fn may_be_for(&self, (life, id): (u64, CallId)) -> bool {
        self.given_up.get(&life).is_none_or(|given_up| id < *given_up)
    }
}

/// For which pods others were asked to go.
#[derive(Default)]
pub(super) struct Preempted {
    /// By the UID of the important pod.
    asked: BTreeMap<String, Asked>,
    /// The highest priority for which each pod was asked to go.
    by_victim: BTreeMap<String, i64>,
    /// Evictions.
    pub(super) count: u64,
}

impl Preempted {
    /// Whether a pod of this priority was asked to go, for a more important one.
    pub(super) fn may_evict(&self, victim: &str, priority: i64) -> bool {
        self.by_victim.get(victim).is_some_and(|highest| *highest > priority)
    }

    /// Notes that a pod may be evicted whatever its priority.
    pub(super) fn owe(&mut self, victim: &str) {
        self.by_victim.insert(victim.to_owned(), i64::MAX);
    }

    /// Notes that a process sends a note, which takes an earlier one away if it names no victims. It may be
    /// lost: what counts is that the process does not make this room any more.
    pub(super) fn sent(
        &mut self,
        (life, id): (u64, CallId),
        holder: &str,
        note: Option<&RoomNote>,
    ) {
        if let Some(asked) = self.asked.get_mut(holder)
            && note.is_none_or(|note| note.victims.is_empty())
        {
            asked.given_up.entry(life).or_insert(id);
            asked.known.extend(asked.is_open.then_some(life));
        }
    }

    /// Notes that a pod is evicted, by this request of this process. A request does not say for which pod.
    /// One victim may have been named for two: for the first none went, its room was given up, and the second
    /// got the victim (seed 7526). So this counts for a pod whose room was given up only if it can be for no
    /// other.
    pub(super) fn evicted(&mut self, victim: &str, request: (u64, CallId)) {
        self.count += 1;
        let asked = self.asked.values_mut().filter(|asked| asked.victims.contains(victim));
        let (open, given_up): (Vec<_>, Vec<_>) = asked.partition(|asked| asked.may_be_for(request));
        let counts = if open.is_empty() { given_up } else { open };
        counts.into_iter().for_each(|asked| asked.is_evicted = true);
    }

    /// The node and the pods that were evicted there for a pod, and when they were asked to go.
    pub(super) fn evicted_for(&self, holder: &str) -> Option<(&str, &BTreeSet<String>, u64)> {
        let asked = self.asked.get(holder).filter(|asked| asked.is_evicted)?;
        Some((&asked.node, &asked.victims, asked.at))
    }

    /// Notes what a process writes on the important pod.
    pub(super) fn note(
        &mut self,
        life: u64,
        (holder, priority): (&str, i64),
        note: Option<RoomNote>,
        (now, is_in_vain): (u64, bool),
    ) -> Result<(), String> {
        // Without victims, room is kept as it becomes free.
        let Some(note) = note.filter(|note| !note.victims.is_empty()) else {
            if let Some(asked) = self.asked.get_mut(holder) {
                asked.is_open = false;
            }
            return Ok(());
        };
        let victims: BTreeSet<String> = note.victims.iter().map(ToString::to_string).collect();
        let is_other = |it: &&Asked| it.is_open && it.is_evicted && it.victims != victims;
        if let Some(before) = self.asked.get(holder).filter(|it| is_other(it) && !is_in_vain) {
            let Asked { at, victims: earlier, life: by, .. } = before;
            return Err(format!(
                "{victims:?} are to go for {holder}, while {earlier:?} are, as process {by} noted at {at} ms"
            ));
        }
        // Also of another process, if this one could not go on with it and gave it up.
        let before = self.asked.get(holder).filter(|it| it.is_evicted && it.known.contains(&life));
        let is_soon = |it: &&Asked| now < it.at + PAUSE && it.victims != victims && !is_in_vain;
        if let Some(before) = before.filter(is_soon) {
            let Asked { at, victims: earlier, .. } = before;
            return Err(format!(
                "{victims:?} are to go for {holder}, and {earlier:?} went for it since {at} ms"
            ));
        }
        for victim in &victims {
            let highest = self.by_victim.entry(victim.clone()).or_insert(priority);
            *highest = priority.max(*highest);
        }
        let (given_up, known) = (BTreeMap::new(), BTreeSet::from([life]));
        let (node, is_evicted, is_open) = (note.node.to_string(), false, true);
        let asked = Asked { life, node, at: now, victims, is_evicted, is_open, given_up, known };
        self.asked.insert(holder.to_owned(), asked);
        Ok(())
    }
}
