//! What pods are seen to use over time, in a sketch of fixed size each, and what request would have been
//! enough for them.
//!
//! A sketch is fed by each list of processes (each five seconds). It holds the highest use, how often the
//! use was in which sixteenth of what is booked, and when the pod's GPUs were last busy. It starts anew with
//! the process, since nothing of it is written anywhere.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::books::{Ledger, locked};
use super::sightings::Sightings;
use super::slot::Slot;
use crate::packing::device::{PodUid, PoolName};
use crate::packing::node::{DeviceUse, NodeLedger};
use crate::packing::reservation::{PodRef, Reservation, ReservationState};
use crate::packing::units::{MemMib, Share, Timestamp};

/// How long a pod must have been watched before anything is said about it.
pub const WATCHED_FOR: Duration = Duration::from_secs(600);

/// How long the GPUs of a pod must not have been busy for it to be idle.
pub const IDLE_FOR: Duration = Duration::from_secs(600);

/// Steps of the use over what is booked, each a sixteenth; the last one is for what is beyond.
const STEPS: usize = 17;

/// Room that is advised beyond the highest use: a tenth of it.
const SPARE_PART: u64 = 10;

/// Requests are advised in multiples of this.
const GRAIN: u64 = 256;

/// Largest number of slots that a pool is told it could bear.
const MOST_SLOTS: u64 = 64;

/// Part of a pool's tenants that must find room in a slot, in percent.
const SERVED_PERCENT: usize = 95;

/// What one pod was seen to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// When it was first seen.
    pub since: Timestamp,
    /// Highest use of memory, over all its devices.
    pub peak: MemMib,
    /// When a kernel last ran on one of its GPUs while it had processes there; none: not since then.
    pub last_busy: Option<Timestamp>,
    steps: [u32; STEPS],
}

impl Usage {
    fn new(since: Timestamp) -> Self {
        Self { since, peak: MemMib::ZERO, last_busy: None, steps: [0; STEPS] }
    }

    fn take(&mut self, used: MemMib, booked: MemMib, is_busy: bool, now: Timestamp) {
        self.peak = self.peak.max(used);
        if is_busy {
            self.last_busy = Some(now);
        }
        let sixteenths = (used.mib().saturating_mul(16)).div_ceil(booked.mib().max(1));
        let step = usize::try_from(sixteenths).unwrap_or(STEPS).clamp(1, STEPS) - 1;
        self.steps[step] = self.steps[step].saturating_add(1);
    }

    /// The part of what is booked that was not exceeded in so many percent of the lists, rounded up to a
    /// sixteenth; a whole and a sixteenth where it was.
    pub fn percentile(&self, percent: u64) -> Share {
        let all: u64 = self.steps.iter().map(|count| u64::from(*count)).sum();
        let wanted = (all * percent).div_ceil(100);
        let mut seen = 0;
        let step = self.steps.iter().position(|count| {
            seen += u64::from(*count);
            seen >= wanted
        });
        let sixteenths = u64::try_from(step.unwrap_or(0)).expect("few steps") + 1;
        Share::from_millionths(sixteenths * 1_000_000 / 16)
    }

    /// How long none of its GPUs has been busy.
    pub fn idle_for(&self, now: Timestamp) -> Duration {
        now.since(self.last_busy.unwrap_or(self.since))
    }

    /// Memory that would have been enough: the highest use, a tenth more, in whole steps of 256 MiB.
    pub fn enough(&self) -> MemMib {
        let wanted = self.peak.mib().saturating_add(self.peak.mib() / SPARE_PART);
        MemMib::new(wanted.div_ceil(GRAIN).max(1).saturating_mul(GRAIN))
    }
}

/// The sketches of the pods of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usages(BTreeMap<PodUid, Usage>);

impl Usages {
    /// What a pod was seen to use; none before its first list.
    pub fn of(&self, uid: &PodUid) -> Option<&Usage> {
        self.0.get(uid)
    }

    /// Takes in the lists of a report. A pod whose use the driver cannot say, or of which a device was not
    /// listed, is left as it was.
    pub(super) fn take(
        &mut self,
        books: &NodeLedger,
        (uses, sightings): (&[DeviceUse], &Sightings),
        now: Timestamp,
    ) {
        self.0.retain(|uid, _| books.reservation(uid).is_some());
        for (uid, held) in books.reservations() {
            if held.state != ReservationState::Confirmed {
                continue;
            }
            let (mut used, mut booked, mut is_busy) = (Some(MemMib::ZERO), MemMib::ZERO, false);
            for part in &held.placement.devices {
                let seen = uses.iter().find(|seen| seen.id == part.id && seen.processes.is_some());
                let list = seen.and_then(|seen| seen.processes.as_ref());
                let Some((seen, list)) = seen.zip(list) else {
                    used = None;
                    break;
                };
                let is_there = list.iter().any(|process| process.pod.as_ref() == Some(uid));
                is_busy |= is_there && seen.busy_percent != Some(0);
                let own = match sightings.on(&part.id).and_then(|on| on.pods.get(uid)) {
                    Some(own) => Some(own.used),
                    None => (!is_there).then_some(MemMib::ZERO),
                };
                used = used.zip(own).and_then(|(sum, own)| sum.checked_add(own));
                booked = booked.checked_add(part.demand.memory).unwrap_or(booked);
            }
            let Some(used) = used else { continue };
            let usage = self.0.entry(uid.clone()).or_insert_with(|| Usage::new(now));
            usage.take(used, booked, is_busy, now);
        }
    }
}

/// What is said about one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The pod.
    pub pod: PodRef,
    /// Its node.
    pub node: String,
    /// Pool of that.
    pub pool: PoolName,
    /// What it was seen to use.
    pub usage: Usage,
    /// Memory that it holds on all its devices.
    pub booked: MemMib,
    /// Share that it holds, likewise.
    pub share: Share,
    /// Memory of its devices.
    pub capacity: MemMib,
    /// How long none of its GPUs has been busy.
    pub idle: Duration,
}

impl Advice {
    /// Whether its GPUs have not been busy for long.
    pub fn is_idle(&self) -> bool {
        self.idle >= IDLE_FOR
    }

    /// Memory that it need not hold: all of an idle pod's, else what is beyond enough.
    pub fn reclaimable(&self) -> MemMib {
        let enough = if self.is_idle() { MemMib::ZERO } else { self.usage.enough() };
        self.booked.checked_sub(enough).unwrap_or(MemMib::ZERO)
    }

    /// The same as a share of its devices, at most what it holds.
    pub fn reclaimable_share(&self) -> Share {
        let part = Share::ratio(self.reclaimable(), self.booked).unwrap_or(Share::ZERO);
        let millionths = u128::from(self.share.millionths()) * u128::from(part.millionths());
        let millionths = u64::try_from(millionths / 1_000_000).unwrap_or(u64::MAX);
        Share::from_millionths(millionths.min(self.share.millionths()))
    }
}

/// What the tenants of one pool could share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolAdvice {
    /// Tenants that were watched for long enough.
    pub tenants: usize,
    /// Slots per GPU such that 95 % of the tenants would have found enough memory in one; 1: none.
    pub slots: u64,
}

impl Ledger {
    /// Notes what the lists of an accepted report of `node` show, after [`Ledger::note_use`] took them in.
    pub fn note_usage(&self, node: &str, uses: &[DeviceUse], now: Timestamp) {
        let Some(at) = self.position(node) else { return };
        let slot = self.slot(at);
        let books = slot.read();
        let details = &mut *locked(&slot.details);
        details.usages.take(&books, (uses, &details.sightings), now);
    }

    /// What can be said about the pods of all nodes that were watched for long enough, those first that
    /// hold most without need. O(pods).
    pub fn advice(&self, now: Timestamp) -> Vec<Advice> {
        let mut all = Vec::new();
        for slot in self.slots().iter() {
            advise(slot, now, &mut all);
        }
        all.sort_by(|a, b| {
            let key = |it: &Advice| std::cmp::Reverse(it.reclaimable());
            (key(a), &a.pod.name).cmp(&(key(b), &b.pod.name))
        });
        all
    }
}

fn advise(slot: &Arc<Slot>, now: Timestamp, all: &mut Vec<Advice>) {
    let books = slot.read();
    let details = locked(&slot.details);
    for (uid, held) in books.reservations() {
        let Some(usage) = details.usages.of(uid) else { continue };
        if now.since(usage.since) < WATCHED_FOR {
            continue;
        }
        if let Some(advice) = advice_on(&books, held, *usage, now) {
            all.push(advice);
        }
    }
}

/// What is said about a pod; nothing where it holds a device that is gone.
fn advice_on(
    books: &NodeLedger,
    held: &Reservation,
    usage: Usage,
    now: Timestamp,
) -> Option<Advice> {
    let (mut booked, mut share, mut capacity) = (MemMib::ZERO, Share::ZERO, MemMib::ZERO);
    for part in &held.placement.devices {
        let device = books.devices().iter().find(|device| device.device().id == part.id)?;
        booked = booked.checked_add(part.demand.memory)?;
        share = share.checked_add(part.demand.share)?;
        capacity = capacity.checked_add(device.capacity().memory)?;
    }
    Some(Advice {
        pod: held.pod.clone(),
        node: books.name().to_string(),
        pool: books.pool().clone(),
        usage,
        booked,
        share,
        capacity,
        idle: usage.idle_for(now),
    })
}

/// What each pool could bear, by the highest use of its tenants with one device.
pub fn by_pool(all: &[Advice]) -> BTreeMap<PoolName, PoolAdvice> {
    let mut slots: BTreeMap<PoolName, Vec<u64>> = BTreeMap::new();
    for advice in all {
        let enough = advice.usage.enough().mib().max(1);
        let fits = (advice.capacity.mib() / enough).clamp(1, MOST_SLOTS);
        slots.entry(advice.pool.clone()).or_default().push(fits);
    }
    let bearable = |mut slots: Vec<u64>| {
        slots.sort_unstable();
        let tenants = slots.len();
        let spared = tenants * (100 - SERVED_PERCENT) / 100;
        PoolAdvice { tenants, slots: slots.get(spared).copied().unwrap_or(1) }
    };
    slots.into_iter().map(|(pool, slots)| (pool, bearable(slots))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::fixture::{bound, ledger, seconds, uid, uses};
    use crate::packing::node::ProcessUse;

    fn note(ledger: &Ledger, seen: &[DeviceUse], at: u64) {
        ledger.note_use("n", seen, MemMib::ZERO);
        ledger.note_usage("n", seen, seconds(at));
    }

    /// A list of A: what `p` uses (none: no process), and how busy the GPU is.
    fn list(ledger: &Ledger, mib: Option<u64>, busy_percent: Option<u8>, at: u64) {
        let mut seen = uses("A", &[]);
        seen[0].busy_percent = busy_percent;
        let process = |mib| ProcessUse { pod: Some(uid("p")), memory: Some(MemMib::new(mib)) };
        seen[0].processes = Some(mib.map(process).into_iter().collect());
        note(ledger, &seen, at);
    }

    /// The ledger with one GPU of 1000 MiB, half of it held by `p`.
    fn tenanted() -> Ledger {
        let ledger = ledger("A");
        ledger.see_pod(&bound("p", "n", "A", 500_000), Timestamp::START);
        ledger
    }

    #[test]
    fn what_was_seen_is_summed_up_and_advice_waits_for_it() {
        let ledger = tenanted();
        for at in 0..100 {
            let mib = if at < 95 { 100 } else { 230 };
            list(&ledger, Some(mib), Some(7), at * 5);
        }
        assert_eq!(ledger.advice(seconds(599)), [], "not watched for long enough");
        list(&ledger, Some(0), Some(7), 600);
        let all = ledger.advice(seconds(700));
        let [advice] = &all[..] else { panic!("{all:?}") };
        assert_eq!((advice.usage.peak, advice.booked), (MemMib::new(230), MemMib::new(500)));
        assert_eq!(advice.usage.percentile(50), Share::from_millionths(250_000), "100 of 500");
        assert_eq!(advice.usage.percentile(99), Share::from_millionths(500_000), "230 of 500");
        assert_eq!(advice.usage.enough(), MemMib::new(256), "230 and a tenth, in steps of 256");
        assert_eq!((advice.is_idle(), advice.reclaimable()), (false, MemMib::new(244)));
        assert_eq!(advice.reclaimable_share(), Share::from_millionths(244_000));
        let pools = by_pool(&all);
        let wanted = PoolAdvice { tenants: 1, slots: 3 };
        assert_eq!(pools.values().collect::<Vec<_>>(), [&wanted], "1000 over 256");
    }

    #[test]
    fn a_pod_is_idle_when_its_gpus_have_not_been_busy_for_long() {
        for (mib, busy, is_idle) in [
            (Some(400), Some(0), true),
            (Some(400), Some(1), false),
            (Some(400), None, false), // MIG does not say
            (None, Some(99), true),   // others are busy there
        ] {
            let ledger = tenanted();
            for at in 0..=130 {
                list(&ledger, mib, busy, at * 5);
            }
            let advice = ledger.advice(seconds(650)).remove(0);
            assert_eq!(advice.is_idle(), is_idle, "{mib:?} {busy:?}");
            let free = if is_idle { 500 } else { 0 }; // 512 would be enough
            assert_eq!(advice.reclaimable(), MemMib::new(free), "{mib:?} {busy:?}");
        }
    }

    #[test]
    fn what_the_driver_cannot_say_and_what_is_over_are_forgotten() {
        let ledger = tenanted();
        let mut seen = uses("A", &["p"]);
        note(&ledger, &seen, 0); // memory of the process: not known
        seen[0].processes = None;
        note(&ledger, &seen, 1);
        assert!(ledger.details("n").usages.of(&uid("p")).is_none());
        list(&ledger, Some(9), None, 2);
        assert!(ledger.details("n").usages.of(&uid("p")).is_some());
        ledger.end_pod(&uid("p"), seconds(3));
        list(&ledger, None, None, 4);
        ledger.tick(seconds(1_000));
        list(&ledger, None, None, 1_001);
        assert!(ledger.details("n").usages.of(&uid("p")).is_none());
    }

    #[test]
    fn absurd_amounts_do_no_harm() {
        let mut usage = Usage::new(Timestamp::START);
        usage.take(MemMib::new(u64::MAX), MemMib::ZERO, false, Timestamp::START);
        assert_eq!(usage.percentile(100).millionths(), 1_062_500, "beyond all");
        assert!(usage.enough() >= MemMib::new(u64::MAX - 255));
        assert_eq!(Usage::new(Timestamp::START).enough(), MemMib::new(256));
    }
}
