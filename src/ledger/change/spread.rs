//! Pods that use no GPU, and may use more on another one of their node.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::hardware::device::{DeviceId, NodeName, PodUid};
use crate::hardware::units::Timestamp;
use crate::ledger::nodes::node_entry::NodeEntry;
use crate::ledger::nodes::state::Ledger;
use crate::model::device_state::DeviceState;
use crate::model::event::LedgerEvent;
use crate::model::node_state::{NodeReporting, NodeState};
use crate::model::reservation::{Guest, PodRef, Reservation};
use crate::mutation::{Mutation, mutated};
use crate::scoring::guests;
use crate::usage::node_details::NodeDetails;

/// A pod that is to be restarted on another GPU of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Respread {
    /// The pod.
    pub pod: PodRef,
    /// Its node.
    pub node: NodeName,
    /// The GPU that it is allocated, where it runs.
    pub home: DeviceId,
    /// The other one.
    pub to: DeviceId,
}

/// How old the last list of a device may be, three lists.
const RECENT: Duration = Duration::from_secs(15);

impl Ledger {
    /// Of each node the pod that is best restarted as a guest, see [`guests::respread`]: it has used no GPU for as
    /// long as its pool says, and `may` says that it may be restarted after such a time.
    pub fn to_respread(
        &self,
        now: Timestamp,
        may: impl Fn(&PodUid, Duration) -> bool,
    ) -> Vec<Respread> {
        let mut all = Vec::new();
        for node_entry in self.node_table().iter() {
            let node_state = node_entry.read();
            all.extend(respread(&node_state, node_entry, now, &may));
        }
        all
    }

    /// Lets a pod be a guest, if that is still its best place. Whether it is: it is to be written.
    pub fn lend(&self, chosen: &Respread, now: Timestamp) -> bool {
        let may = |uid: &PodUid, _: Duration| *uid == chosen.pod.uid;
        let Some(at) = self.position(chosen.node.as_str()) else { return false };
        let mut is_lent = false;
        // Where it starts counts from now on: nothing becomes free.
        self.change_guest(&chosen.pod.uid, |node_state| {
            is_lent = respread(node_state, &self.node_entry(at), now, may).as_ref() == Some(chosen);
            if is_lent {
                node_state.move_out(&chosen.pod.uid, chosen.to.clone(), None);
            }
        });
        is_lent
    }

    /// Whether a pod that was chosen still uses no GPU. Not while its node does not report: no list would show that
    /// it has left its home.
    pub fn is_at_rest(&self, chosen: &Respread, now: Timestamp) -> bool {
        let Some(at) = self.position(chosen.node.as_str()) else { return false };
        let node_entry = self.node_entry(at);
        node_entry.look(|_, node_state| {
            let held = node_state.reservation(&chosen.pod.uid);
            let home = node_state.devices().iter().find(|it| it.device().id == chosen.home);
            let home = home.filter(|_| node_state.state() == NodeReporting::Reporting);
            let Some(((held, home), after)) = held.zip(home).zip(node_state.rule().respread_after)
            else {
                return false;
            };
            rests(&node_entry.details.lock(), (held, home), (now, after))
        })
    }

    /// Notes that the container of such a pod has ended at home.
    pub fn moved_out(&self, uid: &PodUid) {
        self.change_guest(uid, |node_state| node_state.moved_out(uid));
    }

    /// Notes that such a pod stays at home, unless it has become another guest since: that it is restarted
    /// elsewhere is not written on it, or not any more.
    pub fn stay_home(&self, uid: &PodUid, is_it: impl Fn(&Guest) -> bool) -> Vec<LedgerEvent> {
        self.change_guest(uid, |node_state| {
            let held = node_state.reservation(uid);
            let guest = held.and_then(|held| held.placement.guest.as_ref());
            let is_it = guest.is_some_and(|guest| is_it(guest) && guest.leaving.is_none());
            let is_under_way = held.is_some_and(|held| held.is_arriving() || held.is_going_home());
            if is_it && is_under_way {
                node_state.start_at_home(uid);
            }
        })
    }

    /// How many pods of each namespace may be restarted elsewhere.
    pub fn movable_pods(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        self.look_at_each(|node_state| {
            for held in node_state.reservations().values().filter(|held| held.may_borrow()) {
                *counts.entry(held.pod.namespace().to_owned()).or_default() += 1;
            }
        });
        counts
    }
}

fn respread(
    node: &NodeState,
    node_entry: &NodeEntry,
    now: Timestamp,
    may: impl Fn(&PodUid, Duration) -> bool,
) -> Option<Respread> {
    let after = node.rule().respread_after?;
    let details = node_entry.details.lock();
    let rests = |held: &Reservation, home: &DeviceState| {
        rests(&details, (held, home), (now, after)) && may(&held.pod.uid, after)
    };
    let (uid, to) = guests::respread(node, rests)?;
    let held = node.reservation(&uid)?;
    let home = held.placement.devices.first()?.id.clone();
    Some(Respread { pod: held.pod.clone(), node: node.name().clone(), home, to })
}

/// Whether a pod has used no GPU for so long, and does not end.
fn rests(
    details: &NodeDetails,
    (held, home): (&Reservation, &DeviceState),
    (now, after): (Timestamp, Duration),
) -> bool {
    let uid = &held.pod.uid;
    let samples = details.usage_samples.on(&home.device().id);
    let is_listed = samples.is_none_or(|on| on.pods.get(uid).is_some());
    let is_idle = details.usages.of(uid).is_some_and(|usage| usage.idle_for(now) >= after);
    // Lists that cannot be read any more say nothing of now.
    let is_recent = home.listed.is_some_and(|at| now.since(at) <= RECENT);
    let is_ending = held.tenure.is_some_and(|tenure| tenure.is_ending);
    // One whose use the driver cannot say is in no sample, and covers all that it has.
    let is_at_rest = is_idle && is_recent && !is_listed && home.covered(uid).mib() == 0
        || mutated(Mutation::BusyPodRespread);
    is_at_rest && !is_ending
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::device::PoolName;
    use crate::hardware::pool::{Borrow, PoolRule, PoolRules};
    use crate::hardware::units::{MemMib, Share};
    use crate::ledger::change::facts::PodFact;
    use crate::ledger::fixture::{bound, ledger, report, seconds, uses};
    use crate::model::isolation::{DriverLimits, Rules};
    use crate::model::request::{GpuRequest, Limit, Movable};
    use crate::usage::node_details::DetailsReport;

    #[test]
    fn a_restart_is_not_ordered_while_the_node_does_not_report_and_no_other_one_before_it_is_verified()
     {
        let ledger = ledger("A B");
        let respread_after = Some(Duration::from_secs(1));
        let rule = PoolRule { borrow: Borrow::Compute, respread_after, ..PoolRule::default() };
        ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
        for name in ["p", "q"] {
            let fact = bound(name, "n", "A", 500_000);
            let request = (**fact.request.as_ref().unwrap()).clone();
            let limit = Some(Limit::Fraction(Share::WHOLE));
            let request = GpuRequest { limit, movable: Movable::Restart, ..request };
            ledger.see_pod(&PodFact { request: Some(request.into()), ..fact }, seconds(0));
        }
        let rules = Rules {
            tolerance: MemMib::ZERO,
            limits: DriverLimits::Unused,
            grace: Duration::ZERO,
            max_limit: Share::WHOLE,
        };
        let list = |sequence, at: u64| {
            let report = report("x", 7, sequence, "A B");
            ledger.report("n", &report, seconds(at)).unwrap();
            ledger.note("n", (&uses("A B", &[]), DetailsReport::default()), rules, seconds(at));
        };
        let chosen = |at| ledger.to_respread(seconds(at), |_, _| true);
        for (sequence, at) in [(2, 2), (3, 3), (4, 20)] {
            list(sequence, at);
        }
        let first = chosen(20).pop().unwrap();
        assert!(ledger.lend(&first, seconds(20)) && ledger.is_at_rest(&first, seconds(29)));
        // The list is recent, and the node is silent for ten seconds.
        ledger.tick(seconds(31));
        assert!(!ledger.is_at_rest(&first, seconds(31)));
        ledger.moved_out(&first.pod.uid);
        assert_eq!(chosen(31), [], "what was ordered is not verified");
        list(5, 40);
        assert_eq!(chosen(40), [], "one list without it at home is not enough");
        assert!(!ledger.lend(&first, seconds(40)));
    }
}
