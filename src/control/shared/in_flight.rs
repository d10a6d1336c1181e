//! The Bindings that a leader may have on their way, which its followers know.
//!
//! A successor fences exactly these pods. A leader posts a Binding only after each *informed*
//! follower has acknowledged it; the Lease names the informed ones. A follower that does not answer
//! is first struck from the Lease. So a follower that takes over and finds itself named there knows every
//! Binding that may still arrive; any other replica fences all pods that wait.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use engine::model::reservation::PodRef;
use kube_api::pod::lists::Lists;
use kube_api::write::target::PodKey;
use runtime::step::news::News;
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// Most followers of a leader.
const MOST_FOLLOWERS: usize = 8;

/// Most pods in a message, and that a follower remembers.
pub const MOST_PODS: usize = 20_000;

/// A pod that was on its way and has no reservation after this time was not bound: the watch is not
/// so far behind.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// How long a pod that is no longer on its way is named to a follower that joins: its watch may be
/// behind by so much.
const RECENT_FOR: Duration = Duration::from_secs(60);

/// A follower that has heard nothing for this time, or never, lists pods again before it takes a
/// message: its watch may be behind what was bound meanwhile.
const SILENT_FOR: Duration = Duration::from_secs(30);

/// Age of the list from which it lists again: less than [`RECENT_FOR`].
const LIST_AGE: Duration = Duration::from_secs(50);

/// First pause before a follower that did not answer may join again; it doubles.
const FIRST_BAN: Duration = Duration::from_secs(2);

/// The longest such pause.
const LONGEST_BAN: Duration = Duration::from_secs(30);

/// What a leader tells a follower.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Message {
    /// The number of the leader's term.
    pub term: u64,
    /// The secret in the Lease.
    pub secret: String,
    /// The identity of the follower that this is for.
    pub to: String,
    /// The pods whose Bindings may be on their way.
    pub bindings: Vec<NamedPod>,
    pub holds: Vec<HeldPod>,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamedPod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// The node that it may be bound to; none from a leader of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// A pod for which room is kept.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HeldPod {
    pub uid: String,
    pub node: String,
}

/// A follower that wants to be informed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Join {
    /// The number of the leader's term.
    pub term: u64,
    /// The secret in the Lease.
    pub secret: String,
    pub replica: String,
    /// Where it takes messages, such as `http://10.0.0.8:8080`.
    pub address: String,
}

impl NamedPod {
    pub(crate) fn new(key: &PodKey, uid: &PodUid, node: &str) -> Self {
        let (namespace, name) = (key.namespace().to_owned(), key.name().to_owned());
        Self { namespace, name, uid: uid.to_string(), node: Some(node.to_owned()) }
    }

    /// The pod as the ledger names it.
    pub(crate) fn pod(&self) -> PodRef {
        PodRef {
            uid: PodUid::new(&*self.uid),
            name: format!("{}/{}", self.namespace, self.name).into(),
        }
    }
}

/// A leader's Bindings on their way, and its followers.
#[derive(Default)]
pub struct InFlight {
    table: Mutex<InFlightTable>,
    news: News,
}

#[derive(Default)]
struct InFlightTable {
    pods: BTreeMap<PodUid, NamedPod>,
    /// The pods that were on their way lately, the last one at the end.
    recent: VecDeque<(Timestamp, NamedPod)>,
    number: u64,
    followers: BTreeMap<String, Follower>,
    /// When some of `recent` was dropped before its time.
    overflowed: Option<Timestamp>,
    /// Followers that did not answer: until when they may not join, and the last pause.
    banned: BTreeMap<String, (Timestamp, Duration)>,
}

struct Follower {
    address: String,
    stage: FollowerStage,
    /// It knows all pods up to this number.
    knows: u64,
    /// What it has to know before the Lease may name it: all that was posted without waiting for it.
    named_from: u64,
}

impl Follower {
    /// Whether the Lease is to name it and does not, or the other way round.
    fn is_to_change(&self) -> bool {
        self.stage == FollowerStage::Lost
            || self.stage == FollowerStage::Informed && self.may_be_named()
    }

    fn may_be_named(&self) -> bool {
        match self.stage {
            FollowerStage::Informed => {
                self.knows >= self.named_from || mutated(Mutation::NamedTooEarly)
            }
            FollowerStage::Named => true,
            FollowerStage::Joins | FollowerStage::Lost => false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FollowerStage {
    /// It knows nothing yet, and no Binding waits for it.
    Joins,
    /// It knows all, and is to be named in the Lease. From now on each Binding waits for it.
    Informed,
    Named,
    /// It did not answer: each Binding waits until the Lease does not name it.
    Lost,
}

impl InFlight {
    /// Notes a pod whose Binding is about to be posted, and waits until each informed follower knows
    /// it.
    pub async fn announce(&self, pod: NamedPod) {
        let number = {
            let table = &mut *self.table.lock();
            table.number += 1;
            table.pods.insert(PodUid::new(&*pod.uid), pod);
            table.number
        };
        self.news.ring();
        if !mutated(Mutation::UnannouncedBind) {
            self.until(|table| table.know(number)).await;
        }
    }

    /// Notes that no Binding of the pod is on its way any more.
    pub fn ended(&self, uid: &PodUid, now: Timestamp) {
        let InFlightTable { pods, recent, overflowed, .. } = &mut *self.table.lock();
        recent.extend(pods.remove(uid).map(|pod| (now, pod)));
        while recent.front().is_some_and(|(at, _)| now.since(*at) >= RECENT_FOR) {
            recent.pop_front();
        }
        if recent.len() > MOST_PODS {
            recent.pop_front();
            *overflowed = Some(now);
        }
    }

    /// How many pods there are.
    pub fn count(&self) -> usize {
        self.table.lock().pods.len()
    }

    /// Adds a follower; false if it has joined already, if there are too many, or if it did not
    /// answer lately.
    pub fn join(&self, replica: &str, address: &str, now: Timestamp) -> bool {
        let InFlightTable { followers, overflowed, banned, .. } = &mut *self.table.lock();
        let is_banned = banned.get(replica).is_some_and(|(until, _)| now < *until);
        let is_incomplete = overflowed.is_some_and(|at| now.since(at) < RECENT_FOR);
        let is_full = followers.len() >= MOST_FOLLOWERS;
        if is_banned || is_incomplete || is_full || followers.contains_key(replica) {
            return false;
        }
        let address = address.to_owned();
        let joins = Follower { address, stage: FollowerStage::Joins, knows: 0, named_from: 0 };
        followers.insert(replica.to_owned(), joins);
        true
    }

    /// Whether a follower has joined.
    pub fn has_joined(&self, replica: &str) -> bool {
        self.table.lock().followers.contains_key(replica)
    }

    /// What a follower has yet to hear: its address, the number up to which it will know all, and
    /// the pods. `None` if it is lost. A pod that `is_over` has left nothing behind.
    pub(crate) fn news_for(
        &self,
        replica: &str,
        is_over: impl Fn(&PodUid) -> bool,
    ) -> Option<(String, u64, Vec<NamedPod>)> {
        let table = self.table.lock();
        let follower = table
            .followers
            .get(replica)
            .filter(|follower| follower.stage != FollowerStage::Lost)?;
        let mut pods: Vec<NamedPod> = table.pods.values().cloned().collect();
        if follower.stage != FollowerStage::Named && !mutated(Mutation::RecentUntold) {
            let recent = table.recent.iter().map(|(_, pod)| pod);
            pods.extend(recent.filter(|pod| !is_over(&PodUid::new(&*pod.uid))).cloned());
        }
        Some((follower.address.clone(), table.number, pods))
    }

    /// Waits until there is a pod that the follower does not know.
    pub(crate) async fn news(&self, replica: &str) {
        self.until(|table| {
            table.followers.get(replica).is_none_or(|follower| follower.knows < table.number)
        })
        .await;
    }

    /// Notes that a follower knows all pods up to this number.
    pub(crate) fn knows(&self, replica: &str, number: u64) {
        let table = &mut *self.table.lock();
        if let Some(follower) = table.followers.get_mut(replica) {
            follower.knows = follower.knows.max(number);
            if follower.stage == FollowerStage::Joins {
                (follower.stage, follower.named_from) = (FollowerStage::Informed, table.number);
            }
        }
        self.news.ring();
    }

    /// Notes that a follower did not answer. One that was waited for may not join again at once.
    pub(crate) fn lost(&self, replica: &str, now: Timestamp) {
        let InFlightTable { followers, banned, .. } = &mut *self.table.lock();
        match followers.get_mut(replica) {
            Some(joins) if joins.stage == FollowerStage::Joins => _ = followers.remove(replica),
            Some(known) => {
                known.stage = FollowerStage::Lost;
                banned.retain(|_, (until, _)| now.since(*until) < LONGEST_BAN);
                let last = banned.get(replica).map(|(_, pause)| *pause * 2);
                let pause = last.unwrap_or(FIRST_BAN).min(LONGEST_BAN);
                if banned.len() >= MOST_FOLLOWERS && last.is_none() {
                    banned.pop_first();
                }
                banned.insert(replica.to_owned(), (now.plus(pause), pause));
            }
            None => {}
        }
        self.news.ring();
    }

    /// The followers that the Lease is to name.
    pub(crate) fn informed(&self) -> Vec<String> {
        let table = self.table.lock();
        let informed = table.followers.iter().filter(|(_, follower)| follower.may_be_named());
        informed.map(|(replica, _)| replica.clone()).collect()
    }

    /// Notes that the Lease names these followers and no others.
    pub(crate) fn written(&self, informed: &[String]) {
        self.table.lock().followers.retain(|replica, follower| {
            let is_named = informed.contains(replica);
            if is_named && follower.stage == FollowerStage::Informed {
                follower.stage = FollowerStage::Named;
            }
            is_named || follower.stage != FollowerStage::Lost
        });
        self.news.ring();
    }

    /// Waits until the Lease names other followers than it should.
    pub(crate) async fn is_to_be_written(&self) {
        self.until(|table| table.followers.values().any(Follower::is_to_change)).await;
    }

    async fn until(&self, is_so: impl Fn(&InFlightTable) -> bool) {
        self.news.until(|| is_so(&self.table.lock())).await;
    }
}

impl InFlightTable {
    /// Whether each follower that a successor could be knows all pods up to this number.
    fn know(&self, number: u64) -> bool {
        self.followers.values().all(|follower| {
            let is_forgotten =
                follower.stage == FollowerStage::Lost && mutated(Mutation::LostFollowerForgotten);
            follower.stage == FollowerStage::Joins || follower.knows >= number || is_forgotten
        })
    }
}

/// What a follower has heard from its leader.
#[derive(Default)]
pub struct Heard {
    state: Mutex<HeardState>,
}

#[derive(Default)]
struct HeardState {
    /// Term and secret of the leader. `None` before one is known, and once this replica leads.
    leader: Option<(u64, String)>,
    bindings: BTreeMap<PodUid, (NamedPod, Option<Timestamp>)>,
    holds: Vec<HeldPod>,
    /// When the last message was taken.
    last: Option<Timestamp>,
    /// The list that is waited for before the first one, and since when.
    list: Option<(u64, Timestamp)>,
}

impl Heard {
    /// Listens to the leader of this term.
    pub(crate) fn listen(&self, term: u64, secret: &str) {
        let state = &mut *self.state.lock();
        let is_known =
            state.leader.as_ref().is_some_and(|known| (known.0, &*known.1) == (term, secret));
        if !is_known {
            *state =
                HeardState { leader: Some((term, secret.to_owned())), ..HeardState::default() };
        }
    }

    /// Takes in a message; false if it is not from the leader, or not yet. Pods that are no longer on
    /// their way are kept until `is_allocated` says that the ledger has them.
    pub fn take(
        &self,
        message: Message,
        lists: &Lists,
        is_allocated: impl Fn(&PodUid) -> bool,
        now: Timestamp,
    ) -> bool {
        let state = &mut *self.state.lock();
        if state.leader.as_ref() != Some(&(message.term, message.secret)) {
            return false;
        }
        let was_silent = state.last.is_none_or(|last| now.since(last) >= SILENT_FOR);
        if was_silent && !mutated(Mutation::MessageTakenUnlisted) {
            // Only a message says that the leader has fenced what its predecessor may have bound.
            let fresh = state.list.filter(|(_, at)| now.since(*at) < LIST_AGE);
            let (number, since) = fresh.unwrap_or_else(|| (lists.want(), now));
            state.list = Some((number, since));
            if !lists.is_complete(number) {
                return false;
            }
        }
        (state.last, state.list) = (Some(now), None);
        state.bindings.retain(|uid, (_, ended)| {
            let ended = *ended.get_or_insert(now);
            now.since(ended) < FORGOTTEN_AFTER && !is_allocated(uid)
        });
        for pod in message.bindings {
            state.bindings.insert(PodUid::new(&*pod.uid), (pod, None));
        }
        state.holds = message.holds;
        state.bindings.len() <= MOST_PODS
    }

    /// Listens no more, and returns what it has heard: this replica leads.
    pub(crate) fn close(&self) -> (Vec<NamedPod>, Vec<HeldPod>) {
        let state = std::mem::take(&mut *self.state.lock());
        (state.bindings.into_values().map(|(pod, _)| pod).collect(), state.holds)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const START: Timestamp = Timestamp::START;

    fn pod(uid: &str) -> NamedPod {
        let node = Some("n1".to_owned());
        NamedPod { namespace: "a".to_owned(), name: uid.to_owned(), uid: uid.to_owned(), node }
    }

    #[test]
    fn a_binding_waits_for_each_informed_follower_until_the_lease_does_not_name_it() {
        let leader = InFlight::default();
        assert!(leader.announce(pod("alone")).now_or_never().is_some());
        assert!(leader.join("b", "http://b", START) && !leader.join("b", "http://b", START));
        assert!(leader.announce(pod("1")).now_or_never().is_some(), "it may not be alive");
        let (_, number, pods) = leader.news_for("b", |_| false).unwrap();
        assert_eq!(pods, [pod("1"), pod("alone")]);
        leader.join("late", "http://late", START);
        assert!(leader.announce(pod("1b")).now_or_never().is_some());
        leader.knows("b", number);
        assert!(leader.is_to_be_written().now_or_never().is_none(), "it does not know that one");
        let (_, number, pods) = leader.news_for("b", |_| false).unwrap();
        assert_eq!(pods, [pod("1"), pod("1b"), pod("alone")]);
        leader.knows("b", number);
        leader.lost("late", START);
        assert!(leader.is_to_be_written().now_or_never().is_some());
        leader.written(&leader.informed());
        assert!(leader.is_to_be_written().now_or_never().is_none());
        {
            let mut waits = std::pin::pin!(leader.announce(pod("2")));
            assert!(waits.as_mut().now_or_never().is_none());
            assert!(leader.news("b").now_or_never().is_some());
            leader.knows("b", number);
            assert!(waits.as_mut().now_or_never().is_none(), "that was the message before");
            leader.lost("b", START);
            assert!(waits.as_mut().now_or_never().is_none(), "the Lease still names it");
            assert_eq!(leader.informed(), [""; 0]);
            leader.written(&["b".to_owned()]);
            assert!(waits.as_mut().now_or_never().is_none());
            leader.written(&[]);
            assert!(waits.as_mut().now_or_never().is_some());
        }
        assert!(leader.news_for("b", |_| false).is_none());
        let at = Timestamp::from_millis;
        assert!(!leader.join("b", "http://b", at(1_999)), "it would delay each Binding again");
        assert!(leader.join("b", "http://b", at(2_000)));
        leader.lost("b", at(2_000));
        assert!(leader.join("b", "http://b", at(2_000)), "nothing waited for it");
        leader.knows("b", 0);
        leader.lost("b", at(3_000));
        leader.written(&[]);
        assert!(
            !leader.join("b", "http://b", at(6_999)) && leader.join("b", "http://b", at(7_000))
        );
        leader.lost("b", at(7_000));
        leader.ended(&PodUid::new("1"), START);
        leader.ended(&PodUid::new("1b"), START);
        assert_eq!(leader.count(), 2);
        assert!(leader.join("c", "http://c", START));
        let pods = leader.news_for("c", |_| false).unwrap().2;
        assert_eq!(
            pods,
            [pod("2"), pod("alone"), pod("1"), pod("1b")],
            "the watch of `c` may be behind"
        );
        let is_over = |uid: &PodUid| uid.as_str() == "1";
        let pods = leader.news_for("c", is_over).unwrap().2;
        assert_eq!(pods, [pod("2"), pod("alone"), pod("1b")], "it has left nothing behind");
        leader.ended(&PodUid::new("2"), Timestamp::from_millis(60_000));
        assert_eq!(leader.news_for("c", |_| false).unwrap().2, [pod("alone"), pod("2")]);
    }

    #[test]
    fn a_follower_remembers_a_pod_until_its_own_ledger_has_it() {
        let (heard, at) = (Heard::default(), Timestamp::from_millis);
        let message = |uids: &[&str]| Message {
            term: 7,
            secret: "s".to_owned(),
            to: "b".to_owned(),
            bindings: uids.iter().map(|uid| pod(uid)).collect(),
            holds: Vec::new(),
        };
        let (none, lists) = (|_: &PodUid| false, Lists::default());
        let take = |message, is_allocated: &dyn Fn(&PodUid) -> bool, now| {
            heard.take(message, &lists, is_allocated, now)
        };
        let list = || lists.complete(lists.begin());
        assert!(!take(message(&["1"]), &none, at(0)), "it has no leader");
        heard.listen(7, "s");
        assert!(!take(Message { term: 8, ..message(&["1"]) }, &none, at(0)));
        assert!(!take(Message { secret: String::new(), ..message(&["1"]) }, &none, at(0)));
        list();
        assert!(!take(message(&["1", "2", "3"]), &none, at(0)), "its list began before");
        list();
        assert!(take(message(&["1", "2", "3"]), &none, at(0)));
        assert!(take(message(&["3"]), &|uid| uid.as_str() == "2", at(1)));
        heard.listen(7, "s");
        assert_eq!(heard.close().0, [pod("1"), pod("3")]);
        assert!(!take(message(&[]), &none, at(2)), "it leads");
        heard.listen(7, "s");
        assert!(!take(message(&["1"]), &none, at(0)));
        list();
        assert!(take(message(&["1"]), &none, at(0)) && take(message(&[]), &none, at(1)));
        assert!(!take(message(&[]), &none, at(700_000)), "it has heard nothing for long");
        list();
        assert!(take(message(&[]), &none, at(700_000)));
        assert_eq!(heard.close().0, [], "it was not bound");
    }
}
