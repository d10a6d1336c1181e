//! What pods are seen to use over time, in a sketch of fixed size each.
//!
//! A sketch is fed by each list of processes (each five seconds). It holds the highest use, how often the
//! use was in which sixteenth of what is booked, the mean load, and when the pod's GPUs were last busy. It
//! starts anew with the process; what somebody else measured before that can be put under it, once.

use std::collections::BTreeMap;
use std::time::Duration;

use litemap::LiteMap;

use crate::hardware::device::{DeviceId, PodUid};
use crate::hardware::units::{MemMib, Share, Timestamp};
use crate::model::device_state::DeviceUse;
use crate::model::node_state::NodeState;
use crate::model::reservation::{PlacedDevice, Reservation, ReservationState};
use crate::scoring::efficiency::busy_part;
use crate::usage::isolation::Told;
use crate::usage::samples::UsageSamples;

/// Steps of the use over what is booked, each a sixteenth; the last one is for what is beyond.
const STEPS: usize = 17;

/// Room that is advised beyond the highest use: a tenth of it.
const SPARE_PART: u64 = 10;

/// Requests are advised in multiples of this.
const GRAIN: u64 = 256;

/// Pause between two lists of processes, as agents make them: what a stretch of history weighs is the
/// lists that were made in it.
const LIST_EVERY: Duration = Duration::from_secs(5);

/// What one pod was seen to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Highest use of memory, over all its devices.
    pub peak: MemMib,
    /// When this process first saw it.
    since: Timestamp,
    /// When a kernel last ran on one of its GPUs while it had processes there; none: not since then.
    last_busy: Option<Timestamp>,
    /// What was known of it when the process started.
    pub(crate) before: Option<Before>,
    steps: [u32; STEPS],
    /// Sum of the loads of the lists that tell one, in millionths, each times the milliseconds for which it
    /// stands, and the sum of those. Lists come faster while another pod drains, and must not weigh more then.
    load: (u64, u64),
    /// When it was last listed.
    listed: Option<Timestamp>,
}

/// What was known of a pod at [`Timestamp::START`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Before {
    /// For how long it had been watched.
    watched: Duration,
    /// For how long none of its GPUs had been busy, without a gap.
    idle: Duration,
}

/// What a pod uses of all its devices at a moment, or at most in a stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Memory.
    pub memory: MemMib,
    /// Its part of the time in which kernels ran, in GPUs, in the mean of its devices; none where the
    /// driver does not say it.
    pub load: Option<Share>,
}

impl Used {
    /// Whether its GPUs were busy with it. Where the driver does not say, whoever uses memory counts.
    fn is_busy(&self) -> bool {
        self.load.map_or(self.memory > MemMib::ZERO, |load| load > Share::ZERO)
    }
}

/// What somebody else measured of a pod before this process started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    /// How long each stretch is.
    pub every: Duration,
    /// The stretches, one after the other; the last one ends when the process started. None: nothing was
    /// measured in it.
    pub stretches: Vec<Option<Used>>,
}

impl Usage {
    pub(crate) fn new(since: Timestamp) -> Self {
        let (peak, steps, load) = (MemMib::ZERO, [0; STEPS], (0, 0));
        Self { peak, since, last_busy: None, before: None, steps, load, listed: None }
    }

    /// Takes in what a list shows `now`. Its load stands for the time since the list before, or for the
    /// usual pause where that is longer ago.
    fn list(&mut self, used: &Used, booked: MemMib, now: Timestamp) {
        let pause = self.listed.map_or(LIST_EVERY, |at| now.since(at).min(LIST_EVERY));
        self.listed = Some(now);
        self.note(used, booked, (1, pause));
    }

    /// Takes in what so many lists showed in so long a time.
    fn note(&mut self, used: &Used, booked: MemMib, (lists, time): (u32, Duration)) {
        self.peak = self.peak.max(used.memory);
        let sixteenths = (used.memory.mib().saturating_mul(16)).div_ceil(booked.mib().max(1));
        let step = usize::try_from(sixteenths).unwrap_or(STEPS).clamp(1, STEPS) - 1;
        self.steps[step] = self.steps[step].saturating_add(lists);
        if let Some(load) = used.load {
            let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            self.load.0 = self.load.0.saturating_add(load.millionths().saturating_mul(millis));
            self.load.1 = self.load.1.saturating_add(millis);
        }
    }

    /// Puts what was measured before the process started under what it has seen itself; a second time
    /// changes nothing. A stretch that nobody measured breaks idleness: nobody knows.
    pub(crate) fn recall(&mut self, history: &History, booked: MemMib) {
        let all = &history.stretches;
        let first = all.iter().position(Option::is_some);
        let (None, Some(first)) = (self.before, first) else { return };
        let lists = history.every.as_secs() / LIST_EVERY.as_secs();
        let lists = u32::try_from(lists).unwrap_or(u32::MAX);
        all.iter().flatten().for_each(|used| self.note(used, booked, (lists, history.every)));
        let is_idle = |used: &&Option<Used>| used.is_some_and(|used| !used.is_busy());
        let idle = all.iter().rev().take_while(is_idle).count();
        let long = |stretches: usize| {
            history.every.saturating_mul(u32::try_from(stretches).unwrap_or(u32::MAX))
        };
        // It may have begun anywhere in the first one.
        let watched = long(all.len() - first - 1);
        self.before = Some(Before { watched, idle: long(idle).min(watched) });
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

    /// For how long it was watched.
    pub fn watched_for(&self, now: Timestamp) -> Duration {
        match self.before {
            Some(before) => now.since(Timestamp::START).saturating_add(before.watched),
            None => now.since(self.since),
        }
    }

    /// How long none of its GPUs has been busy.
    pub fn idle_for(&self, now: Timestamp) -> Duration {
        match (self.last_busy, self.before) {
            (Some(at), _) => now.since(at),
            (None, Some(before)) => now.since(Timestamp::START).saturating_add(before.idle),
            (None, None) => now.since(self.since),
        }
    }

    /// Memory that would have been enough: the highest use, a tenth more, in whole steps of 256 MiB.
    pub fn enough(&self) -> MemMib {
        let wanted = self.peak.mib().saturating_add(self.peak.mib() / SPARE_PART);
        MemMib::new(wanted.div_ceil(GRAIN).max(1).saturating_mul(GRAIN))
    }

    /// Its part of the time in which kernels ran on its devices, in GPUs, in the mean of the time for which
    /// lists tell it; none where none does.
    pub fn mean_load(&self) -> Option<Share> {
        let (sum, millis) = self.load;
        (millis > 0).then(|| Share::from_millionths(sum / millis))
    }
}

/// The sketches of the pods of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usages(pub(crate) LiteMap<PodUid, Usage>);

impl Usages {
    /// What a pod was seen to use; none before its first list.
    pub fn of(&self, uid: &PodUid) -> Option<&Usage> {
        self.0.get(uid)
    }

    /// How many pods are kept.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Forgets pods that the books do not hold.
    pub(crate) fn prune(&mut self, books: &NodeState) {
        self.0.retain(|uid, _| books.reservation(uid).is_some());
    }

    /// Takes in the lists of a report, after the sightings did. A pod whose use the driver cannot say, or of
    /// which a device was not listed, is left as it was.
    pub(crate) fn take(
        &mut self,
        books: &NodeState,
        (uses, told): (&[DeviceUse], &BTreeMap<DeviceId, BTreeMap<PodUid, Told>>),
        sightings: &UsageSamples,
        now: Timestamp,
    ) {
        let busy = |uid: &PodUid, device: &DeviceId| told.get(device)?.get(uid)?.busy_percent;
        for (uid, held) in books.reservations() {
            if held.state != ReservationState::Confirmed {
                continue;
            }
            let parts = held.placement.devices.iter();
            let on = |part: &PlacedDevice| {
                let busy_percent = busy(uid, &part.id);
                OnDevice::of((uid, busy_percent), part, books, (uses, sightings))
            };
            let seen: Option<Vec<OnDevice>> = parts.map(on).collect();
            let Some(seen) = seen else { continue };
            let memory = seen.iter().try_fold(MemMib::ZERO, |sum, on| sum.checked_add(on.memory));
            let Some(memory) = memory else { continue };
            let loads: Option<Vec<u64>> =
                seen.iter().map(|on| on.load.map(Share::millionths)).collect();
            let load = loads.filter(|loads| !loads.is_empty()).map(|loads| {
                let count = u64::try_from(loads.len()).expect("a pod has few devices");
                Share::from_millionths(loads.iter().sum::<u64>() / count)
            });
            let usage = self.0.entry(uid.clone()).or_insert_with(|| Usage::new(now));
            usage.list(&Used { memory, load }, booked(held), now);
            if seen.iter().any(|on| on.is_busy) {
                usage.last_busy = Some(now);
            }
        }
    }
}

/// What the last list shows of a pod on one of its devices.
struct OnDevice {
    memory: MemMib,
    load: Option<Share>,
    is_busy: bool,
}

impl OnDevice {
    /// None where the device was not listed, or the driver cannot say what the pod uses. Where it does not
    /// say whose kernels run either, the time in which any ran is divided by what pods hold, and a process
    /// that exists counts as busy with it.
    fn of(
        (uid, own_busy_percent): (&PodUid, Option<u8>),
        part: &PlacedDevice,
        books: &NodeState,
        (uses, sightings): (&[DeviceUse], &UsageSamples),
    ) -> Option<Self> {
        let seen = uses.iter().find(|seen| seen.id == part.id)?;
        let list = seen.processes.as_ref()?;
        let is_here = |uid: &PodUid| list.iter().any(|process| process.pod.as_ref() == Some(uid));
        if !is_here(uid) {
            // Where the driver never says it, having no process says nothing about the load either.
            let load = seen.busy_percent.map(|_| Share::ZERO);
            return Some(Self { memory: MemMib::ZERO, load, is_busy: false });
        }
        let own = sightings.on(&part.id).and_then(|on| on.pods.get(uid))?;
        if let Some(percent) = own_busy_percent {
            let load = Share::from_millionths(u64::from(percent) * 10_000);
            return Some(Self { memory: own.used, load: Some(load), is_busy: percent > 0 });
        }
        let device = books.devices().iter().find(|device| device.device().id == part.id);
        let present = device.into_iter().flat_map(|device| device.tenants());
        let present = present
            .filter(|(uid, _)| is_here(uid))
            .fold(Share::ZERO, |sum, (_, held)| sum.checked_add(held.share).unwrap_or(sum));
        let load = seen.busy_percent.map(|busy| busy_part(busy, part.demand.share, present));
        Some(Self { memory: own.used, load, is_busy: seen.busy_percent != Some(0) })
    }
}

/// Memory that a pod holds on all its devices.
pub(crate) fn booked(held: &Reservation) -> MemMib {
    let parts = held.placement.devices.iter();
    parts.fold(MemMib::ZERO, |sum, part| sum.checked_add(part.demand.memory).unwrap_or(sum))
}

#[cfg(test)]
mod tests;
