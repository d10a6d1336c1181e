//! What pods were seen to use of each device, beside what they hold of it: over-users, and foreign use.
//!
//! Lists of processes are the only source: each list of a device is one sighting of everybody on it.
//! Nothing here frees or takes room; the books take what is used outside of them off what may be placed
//! by themselves. What the driver cannot say of a process makes nobody an over-user.

use std::sync::Arc;

use litemap::LiteMap;

use super::books::{Ledger, locked};
use super::effect::Effect;
use super::slot::Slot;
use crate::packing::device::{DeviceId, NodeName, PodUid};
use crate::packing::node::{DeviceUse, NodeLedger, NodeState};
use crate::packing::request::Limit;
use crate::packing::reservation::{PodRef, Reservation, ReservationState};
use crate::packing::units::{MemMib, Share};

/// What was seen on the devices of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sightings {
    /// As of the last list of each device, by UUID.
    devices: LiteMap<DeviceId, OnDevice>,
}

/// What the last list of processes of a device shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnDevice {
    /// Pods that hold anything on the node, as far as the driver can say what they use.
    pub pods: LiteMap<PodUid, Use>,
    /// Used by processes of no pod that holds anything on the node.
    pub foreign: MemMib,
}

/// What one pod uses of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// Memory of all its processes.
    pub used: MemMib,
    /// What it may use: what it holds, or its limit where that is more.
    pub allowed: MemMib,
    /// Lists, one after the other up to the last, that show more than that and the tolerance.
    pub lists_over: u32,
}

impl Use {
    /// What it uses beyond what it may.
    pub fn excess(&self) -> MemMib {
        self.used.checked_sub(self.allowed).unwrap_or(MemMib::ZERO)
    }
}

/// A pod that uses more of a device than it may, beyond the tolerance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverUser {
    /// Its node.
    pub node: NodeName,
    /// The device.
    pub device: DeviceId,
    /// What it uses there.
    pub seen: Use,
    /// What it holds.
    pub held: Reservation,
    /// Whether the node's agent reports in time, so that this is news.
    pub is_current: bool,
}

/// What is used outside of the books, in the whole cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outside {
    /// Pods that use more of a device than they may.
    pub over_users: u64,
    /// What they use beyond it.
    pub excess: MemMib,
    /// Used by processes of no pod that holds anything on the node.
    pub foreign: MemMib,
}

impl Sightings {
    /// What the last list of a device shows; none before the first.
    pub fn on(&self, device: &DeviceId) -> Option<&OnDevice> {
        self.devices.get(device)
    }

    /// What the last list of each device shows, by UUID.
    pub fn devices(&self) -> impl Iterator<Item = (&DeviceId, &OnDevice)> {
        self.devices.iter()
    }

    /// How many pods are kept, once for each device.
    pub(super) fn count(&self) -> usize {
        self.devices.values().map(|on| on.pods.len()).sum()
    }

    /// Forgets devices and pods that the books do not have.
    pub(super) fn prune(&mut self, books: &NodeLedger) {
        let has = |id: &DeviceId| books.devices().iter().any(|known| known.device().id == *id);
        self.devices.retain(|id, _| has(id));
        for (_, on) in self.devices.iter_mut() {
            on.pods.retain(|uid, _| books.reservation(uid).is_some());
        }
    }

    /// Takes in the lists of a report. Use within `tolerance` of what is allowed is nobody's fault.
    pub(super) fn take(
        &mut self,
        books: &NodeLedger,
        uses: &[DeviceUse],
        tolerance: MemMib,
    ) -> Vec<Effect> {
        // What is kept shares the texts of the books: those of a report are of no use beyond it.
        let device = |id: &DeviceId| {
            let mut devices = books.devices().iter().map(|known| &known.device().id);
            devices.find(|known| *known == id).cloned()
        };
        let mut effects = Vec::new();
        for seen in uses {
            let (Some(id), Some(list)) = (device(&seen.id), &seen.processes) else { continue };
            let before = self.devices.remove(&id).unwrap_or_default();
            let most = list.len().min(books.reservations().len());
            let mut now = OnDevice { pods: LiteMap::with_capacity(most), foreign: MemMib::ZERO };
            let mut unknown = Vec::new();
            for process in list {
                let holder = process.pod.as_ref().and_then(|uid| books.reservation(uid));
                let holder = holder.map(|held| &held.pod.uid);
                let sum = match holder {
                    Some(uid) => &mut now.pods.entry(uid.clone()).or_default().used,
                    None => &mut now.foreign,
                };
                match process.memory {
                    Some(memory) => *sum = sum.checked_add(memory).unwrap_or(BEYOND),
                    None => unknown.extend(holder.cloned()),
                }
            }
            now.pods.retain(|uid, _| !unknown.contains(uid));
            for (uid, used) in &mut now.pods {
                let Some(held) = books.reservation(uid) else { continue };
                used.allowed = allowed(books, held, &seen.id);
                let earlier = before.pods.get(uid).map_or(0, |earlier| earlier.lists_over);
                if used.excess() > tolerance {
                    used.lists_over = earlier.saturating_add(1);
                }
                if used.lists_over == 1 && !is_ending(held) {
                    effects.push(Effect::Overuse {
                        node: books.name().clone(),
                        device: seen.id.clone(),
                        pod: held.pod.clone(),
                        used: used.used,
                        allowed: used.allowed,
                    });
                }
            }
            if now.foreign > tolerance && before.foreign <= tolerance {
                effects.push(Effect::Foreign {
                    node: books.name().clone(),
                    device: seen.id.clone(),
                    used: now.foreign,
                });
            }
            self.devices.insert(id, now);
        }
        effects
    }

    /// The over-users among the pods that `books` still hold, by device and UID.
    fn over_users(&self, books: &NodeLedger) -> Vec<OverUser> {
        let mut all = Vec::new();
        for (device, on) in &self.devices {
            for (uid, seen) in on.pods.iter().filter(|(_, seen)| seen.lists_over > 0) {
                let Some(held) = books.reservation(uid) else { continue };
                all.push(OverUser {
                    node: books.name().clone(),
                    device: device.clone(),
                    seen: *seen,
                    held: held.clone(),
                    is_current: books.state() == NodeState::Reporting,
                });
            }
        }
        all
    }
}

impl OverUser {
    /// The pod.
    pub fn pod(&self) -> &PodRef {
        &self.held.pod
    }
}

/// More than any device has: what use comes to that leaves the range of the type.
const BEYOND: MemMib = MemMib::new(u64::MAX);

/// Whether a pod has ended, so that nobody need be told what it uses.
fn is_ending(held: &Reservation) -> bool {
    matches!(held.state, ReservationState::Draining { .. })
}

/// What a pod may use of a device: what it holds there, or the limit it asked for where that is more.
/// Of a device on which it holds nothing it may use nothing.
fn allowed(books: &NodeLedger, held: &Reservation, device: &DeviceId) -> MemMib {
    let on_it = books.devices().iter().find(|known| known.device().id == *device);
    let (Some(books), Some(booked)) =
        (on_it, on_it.and_then(|known| known.tenants().get(&held.pod.uid)))
    else {
        return MemMib::ZERO;
    };
    let limit = held.request.as_ref().and_then(|request| request.limit);
    let limit = match limit {
        None => MemMib::ZERO,
        Some(Limit::Fraction(share)) => share.min(Share::WHOLE).of(books.capacity().memory),
        Some(Limit::Memory(memory)) => memory,
    };
    booked.memory.max(limit)
}

impl Ledger {
    /// All over-users, node by node in no particular order.
    pub fn over_users(&self) -> Vec<OverUser> {
        let slots = self.slots();
        let of_node = |slot: &Arc<Slot>| {
            let books = slot.read();
            locked(&slot.details).sightings.over_users(&books)
        };
        slots.iter().flat_map(of_node).collect()
    }

    /// What is used outside of the books, in the whole cluster.
    pub fn outside(&self) -> Outside {
        let mut outside = Outside::default();
        let add = |sum: &mut MemMib, more| *sum = sum.checked_add(more).unwrap_or(BEYOND);
        for slot in self.slots().iter() {
            let books = slot.read();
            let details = locked(&slot.details);
            for over in details.sightings.over_users(&books) {
                outside.over_users += 1;
                add(&mut outside.excess, over.seen.excess());
            }
            for on in details.sightings.devices.values() {
                add(&mut outside.foreign, on.foreign);
            }
        }
        outside
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::details::{DetailsReport, Rules};
    use crate::ledger::fixture::{bound, hello, ledger, report, say, seconds, uid};
    use crate::ledger::protection::DriverLimits;
    use crate::packing::node::ProcessUse;
    use crate::packing::units::Timestamp;

    fn note(ledger: &Ledger, node: &str, uses: &[DeviceUse]) -> Vec<Effect> {
        let rules = Rules { tolerance: MemMib::new(50), limits: DriverLimits::Unused };
        ledger.note(node, (uses, DetailsReport::default()), rules, Timestamp::START)
    }

    /// A report of one device with these processes; `?` is an amount that the driver cannot say.
    fn list(device: &str, processes: &str) -> Vec<DeviceUse> {
        let mut uses = crate::ledger::fixture::uses(device, &[]);
        let process = |text: &str| {
            let (pod, mib) = text.split_once('=').unwrap();
            let pod = (pod != "host").then(|| uid(pod));
            ProcessUse { pod, memory: (mib != "?").then(|| MemMib::new(mib.parse().unwrap())) }
        };
        uses[0].processes = Some(processes.split_whitespace().map(process).collect());
        uses
    }

    /// The ledger with two GPUs of 1000 MiB; `p` holds half of A, `q` a fifth of A, `r` half of B.
    fn tenanted() -> Ledger {
        let ledger = ledger("A B");
        for (name, device, share) in [("p", "A", 500_000), ("q", "A", 200_000), ("r", "B", 500_000)]
        {
            ledger.see_pod(&bound(name, "n", device, share), Timestamp::START);
        }
        ledger
    }

    fn shown(effects: &[Effect]) -> String {
        let shown = effects.iter().map(|effect| match effect {
            Effect::Overuse { device, pod, used, allowed, .. } => {
                format!("{pod} {}/{} on {device}", used.mib(), allowed.mib())
            }
            Effect::Foreign { device, used, .. } => format!("foreign {} on {device}", used.mib()),
            other => format!("{other:?}"),
        });
        shown.collect::<Vec<_>>().join(", ")
    }

    fn check(ledger: &Ledger, processes: &str, effects: &str, over: &str) {
        let told = note(ledger, "n", &list("A", processes));
        assert_eq!(shown(&told), effects, "{processes}");
        let found = ledger.over_users();
        let rows = found
            .iter()
            .map(|it| format!("{} +{} x{}", it.pod(), it.seen.excess().mib(), it.seen.lists_over));
        assert_eq!(rows.collect::<Vec<_>>().join(", "), over, "{processes}");
    }

    #[test]
    fn an_over_user_is_told_once_and_counted_with_each_list() {
        let ledger = tenanted();
        check(&ledger, "p=500 q=250", "", "");
        check(&ledger, "p=400 p=151 q=200", "p 551/500 on A", "p +51 x1");
        check(&ledger, "p=600 q=251", "q 251/200 on A", "p +100 x2, q +51 x1");
        check(&ledger, "p=550 q=300", "", "q +100 x2");
        check(&ledger, "p=600", "p 600/500 on A", "p +100 x1");
        check(&ledger, "p=600 p=?", "", "");
        check(&ledger, "", "", "");
    }

    #[test]
    fn a_report_without_lists_changes_nothing() {
        let ledger = tenanted();
        check(&ledger, "p=600", "p 600/500 on A", "p +100 x1");
        let mut uses = list("A", "");
        uses[0].processes = None;
        assert_eq!(note(&ledger, "n", &uses), []);
        assert_eq!(ledger.over_users().len(), 1);
    }

    #[test]
    fn a_pod_on_a_device_that_it_does_not_hold_is_an_over_user_there() {
        let ledger = tenanted();
        check(&ledger, "r=51", "r 51/0 on A", "r +51 x1");
    }

    #[test]
    fn a_limit_may_be_used_and_not_more() {
        let ledger = tenanted();
        for (limit, allowed) in [
            (Limit::Fraction(Share::from_millionths(800_000)), 800),
            (Limit::Memory(MemMib::new(700)), 700),
            (Limit::Memory(MemMib::new(1)), 500),
        ] {
            let mut fact = bound("p", "n", "A", 500_000);
            let mut request = (**fact.request.as_ref().unwrap()).clone();
            request.limit = Some(limit);
            fact.request = Some(request.into());
            ledger.see_pod(&fact, Timestamp::START);
            check(&ledger, &format!("p={}", allowed + 50), "", "");
            let told = format!("p {}/{allowed} on A", allowed + 51);
            check(&ledger, &format!("p={}", allowed + 51), &told, "p +51 x1");
            check(&ledger, "", "", "");
        }
    }

    #[test]
    fn foreign_use_is_told_when_it_begins_and_summed() {
        let ledger = tenanted();
        check(&ledger, "host=30 x=20", "", "");
        check(&ledger, "host=30 x=21 p=600", "p 600/500 on A, foreign 51 on A", "p +100 x1");
        check(&ledger, "host=900 p=600", "", "p +100 x2");
        let expected =
            Outside { over_users: 1, excess: MemMib::new(100), foreign: MemMib::new(900) };
        assert_eq!(ledger.outside(), expected);
        check(&ledger, "host=18446744073709551615 x=1", "", "");
        assert_eq!(ledger.outside().foreign, BEYOND, "absurd sums stop nothing");
    }

    #[test]
    fn pods_and_devices_that_are_gone_are_forgotten() {
        let ledger = tenanted();
        check(&ledger, "p=600", "p 600/500 on A", "p +100 x1");
        ledger.end_pod(&uid("p"), seconds(1));
        let told = note(&ledger, "n", &list("A", "p=700"));
        assert_eq!(shown(&told), "", "it is ending");
        say(&ledger, &report("x", 7, 2, "A B")).unwrap();
        say(&ledger, &report("x", 7, 3, "A B")).unwrap();
        assert_eq!(ledger.over_users(), [], "it is out of the books");
        say(&ledger, &hello("y", 1, "B")).unwrap();
        assert_eq!(note(&ledger, "n", &list("A", "host=900")), []);
        assert_eq!(ledger.outside(), Outside::default());
        assert_eq!(note(&ledger, "nobody", &list("A", "host=900")), []);
    }
}
