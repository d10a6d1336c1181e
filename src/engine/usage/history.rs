//! What pods use over time, in a sketch of fixed size each.
//!
//! Each list of processes (every five seconds) adds to a sketch. It has the highest use, how often
//! use was in each sixteenth of the allocated memory, the mean load, and when the GPUs were busy
//! last. It starts empty; what another source measured before this process can be added, once.

use std::time::Duration;

use litemap::LiteMap;

use crate::model::device_state::DeviceState;
use crate::model::node_state::NodeState;
use crate::model::reservation::{PlacedDevice, Reservation, ReservationState};
use crate::usage::samples::UsageSamples;
use crate::usage::tenant_isolation::ReportedLists;
use wire::ids::PodUid;
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{MemMib, Share, Timestamp, busy_part};

/// Steps of use relative to what is allocated, each a sixteenth; the last is for more than that.
const STEPS: usize = 17;

/// Advised room beyond the highest use: one part in this many.
const SPARE_PART: u64 = 10;

/// Advised requests are multiples of this, in MiB.
const GRAIN: u64 = 256;

/// Pause between two lists of an agent. It gives the number of lists that a stretch of history
/// counts as.
const LIST_EVERY: Duration = Duration::from_secs(5);

/// A pod that no list has shown for so long, six lists, may have been busy.
const UNMEASURED: Duration = Duration::from_secs(30);

/// What one pod used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Highest use of memory, summed over all its devices.
    pub peak: MemMib,
    /// When this process first saw it.
    since: Timestamp,
    /// When a kernel last ran on a GPU with processes of it; `None`: not since then.
    last_busy: Option<Timestamp>,
    /// What was known of it when the process started.
    pub(crate) before: Option<Before>,
    steps: [u32; STEPS],
    /// Sum of load in millionths times the milliseconds of its list, and the sum of these, of lists
    /// with a load. Lists come faster while another pod drains, and must not count more then.
    load: (u64, u64),
    /// When it was last listed.
    listed: Option<Timestamp>,
}

/// What was known of a pod at [`Timestamp::START`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Before {
    /// How long it had been watched.
    watched: Duration,
    /// How long none of its GPUs had been busy, without a gap.
    idle: Duration,
}

/// What a pod uses of all its devices: at one time, or at most in a stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Memory.
    pub memory: MemMib,
    /// Its part of the time in which kernels ran, in GPUs, as a mean of its devices; `None` where
    /// the driver cannot say.
    pub load: Option<Share>,
}

impl Used {
    /// Whether it kept its GPUs busy; if the driver cannot say, whether it uses memory.
    fn is_busy(&self) -> bool {
        self.load.map_or(self.memory > MemMib::ZERO, |load| load > Share::ZERO)
    }
}

/// What another source measured of a pod before this process started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    /// Length of each stretch.
    pub every: Duration,
    /// Successive stretches; the last one ends when the process started. `None`: not measured.
    pub stretches: Vec<Option<Used>>,
}

impl History {
    fn duration_of(&self, stretches: usize) -> Duration {
        self.every.saturating_mul(u32::try_from(stretches).unwrap_or(u32::MAX))
    }
}

impl Usage {
    pub(crate) fn new(since: Timestamp) -> Self {
        let (peak, steps, load) = (MemMib::ZERO, [0; STEPS], (0, 0));
        Self { peak, since, last_busy: None, before: None, steps, load, listed: None }
    }

    /// Adds what a list shows `now`. Its load stands for the time since the previous list, but at
    /// most for the usual pause.
    fn list(&mut self, used: &Used, allocated: MemMib, now: Timestamp) {
        let pause = self.listed.map_or(LIST_EVERY, |at| now.since(at).min(LIST_EVERY));
        if self.listed.is_some_and(|at| now.since(at) > UNMEASURED) {
            self.last_busy = Some(now); // it may have been, meanwhile
        }
        self.listed = Some(now);
        self.note(used, allocated, 1, pause);
    }

    /// Adds what `lists` lists showed in `time`.
    fn note(&mut self, used: &Used, allocated: MemMib, lists: u32, time: Duration) {
        self.peak = self.peak.max(used.memory);
        let sixteenths = (used.memory.mib().saturating_mul(16)).div_ceil(allocated.mib().max(1));
        let step = usize::try_from(sixteenths).unwrap_or(STEPS).clamp(1, STEPS) - 1;
        self.steps[step] = self.steps[step].saturating_add(lists);
        if let Some(load) = used.load {
            let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            self.load.0 = self.load.0.saturating_add(load.millionths().saturating_mul(millis));
            self.load.1 = self.load.1.saturating_add(millis);
        }
    }

    /// Adds what was measured before the process started; a second call changes nothing. A stretch
    /// that was not measured ends idleness, since the pod may have been busy.
    pub(crate) fn recall(&mut self, history: &History, allocated: MemMib) {
        let all = &history.stretches;
        let first = all.iter().position(Option::is_some);
        let (None, Some(first)) = (self.before, first) else { return };
        let lists = history.every.as_secs() / LIST_EVERY.as_secs();
        let lists = u32::try_from(lists).unwrap_or(u32::MAX);
        all.iter().flatten().for_each(|used| self.note(used, allocated, lists, history.every));
        let last = all.iter().rev();
        let idle = last.take_while(|used| used.is_some_and(|used| !used.is_busy())).count();
        // It may have begun at any time in the first one.
        let watched = history.duration_of(all.len() - first - 1);
        self.before = Some(Before { watched, idle: history.duration_of(idle).min(watched) });
    }

    /// The part of what is allocated that `percent` of the lists did not exceed, rounded up to a
    /// sixteenth; 17 sixteenths if they used more than all of it.
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

    /// How long it was watched.
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

    /// Memory that would have been enough: the highest use and a tenth more, in steps of 256 MiB.
    pub fn enough(&self) -> MemMib {
        let wanted = self.peak.mib().saturating_add(self.peak.mib() / SPARE_PART);
        MemMib::new(wanted.div_ceil(GRAIN).max(1).saturating_mul(GRAIN))
    }

    /// Its mean part of the time in which kernels ran on its devices, in GPUs; `None` if no list
    /// shows a load.
    pub fn mean_load(&self) -> Option<Share> {
        let (sum, millis) = self.load;
        (millis > 0).then(|| Share::from_millionths(sum / millis))
    }
}

/// The sketches of the pods of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usages(pub(crate) LiteMap<PodUid, Usage>);

impl Usages {
    /// What a pod was seen to use; `None` before its first list.
    pub fn of(&self, uid: &PodUid) -> Option<&Usage> {
        self.0.get(uid)
    }

    /// How many pods are kept.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Forgets pods without a reservation.
    pub(crate) fn prune(&mut self, node_state: &NodeState) {
        self.0.retain(|uid, _| node_state.reservation(uid).is_some());
    }

    /// Adds the lists of a report; the usage samples must have it already. Skips a pod whose use
    /// the driver cannot say, which counts as busy then, or of which a device was not listed.
    pub(crate) fn take(
        &mut self,
        node_state: &NodeState,
        lists: ReportedLists<'_>,
        usage_samples: &UsageSamples,
        now: Timestamp,
    ) {
        for (uid, held) in node_state.reservations() {
            if held.state != ReservationState::Confirmed {
                continue;
            }
            let parts = held.placement.runs_on().into_iter().zip(&held.placement.devices);
            let seen = parts.map(|(id, part)| {
                let part = PlacedDevice { id, demand: part.demand };
                PodOnDevice::of(uid, &part, node_state, lists, usage_samples)
            });
            let Some(seen) = seen.collect::<Option<Vec<PodOnDevice>>>() else {
                let is_shown = lists.uses.iter().any(|device| shows(device, uid));
                if let Some(usage) = self.0.get_mut(uid).filter(|_| is_shown) {
                    usage.last_busy = Some(now); // what it does is not known
                }
                continue;
            };
            let memory = seen.iter().try_fold(MemMib::ZERO, |sum, on| sum.checked_add(on.memory));
            let Some(memory) = memory else { continue };
            let loads: Option<Vec<u64>> =
                seen.iter().map(|on| on.load.map(Share::millionths)).collect();
            let load = loads.filter(|loads| !loads.is_empty()).map(|loads| {
                let count = u64::try_from(loads.len()).expect("a pod has few devices");
                Share::from_millionths(loads.iter().sum::<u64>() / count)
            });
            let usage = self.0.entry(uid.clone()).or_insert_with(|| Usage::new(now));
            usage.list(&Used { memory, load }, allocated(held), now);
            // Until it is restarted elsewhere it may use what it is allocated.
            let is_at_home = held.is_arriving()
                && lists.uses.iter().any(|device| {
                    let mut own = held.placement.devices.iter();
                    own.any(|placed| placed.id == device.id) && shows(device, uid)
                });
            if is_at_home || seen.iter().any(|on| on.is_busy) {
                usage.last_busy = Some(now);
            }
        }
    }
}

/// Whether a pod has a process on a device, as far as these were listed.
fn shows(device: &DeviceUse, uid: &PodUid) -> bool {
    device.processes.as_ref().is_some_and(|list| lists_pod(list, uid))
}

fn lists_pod(list: &[ProcessUse], uid: &PodUid) -> bool {
    list.iter().any(|process| process.pod.as_ref() == Some(uid))
}

/// What the last list shows of a pod on one of its devices.
struct PodOnDevice {
    memory: MemMib,
    load: Option<Share>,
    is_busy: bool,
}

impl PodOnDevice {
    /// `None` if the device was not listed, or the driver cannot say what the pod uses. If it
    /// cannot say whose kernels run either, the busy time is divided by what pods have, and a pod
    /// with a process counts as busy.
    fn of(
        uid: &PodUid,
        part: &PlacedDevice,
        node_state: &NodeState,
        lists: ReportedLists<'_>,
        usage_samples: &UsageSamples,
    ) -> Option<Self> {
        let seen = lists.device(&part.id)?;
        let list = seen.processes.as_ref()?;
        if !lists_pod(list, uid) {
            // If the driver never reports load, a pod without a process has no known load either.
            let load = seen.busy_percent.map(|_| Share::ZERO);
            return Some(Self { memory: MemMib::ZERO, load, is_busy: false });
        }
        let own = usage_samples.on(&part.id).and_then(|on| on.pods.get(uid))?;
        if let Some(percent) = lists.tenant(&part.id, uid).and_then(|tenant| tenant.busy_percent) {
            let load = Share::from_millionths(u64::from(percent) * 10_000);
            return Some(Self { memory: own.used, load: Some(load), is_busy: percent > 0 });
        }
        let device = node_state.devices().iter().find(|device| device.device().id == part.id);
        let present = device.into_iter().flat_map(DeviceState::running);
        let present = present
            .filter(|(uid, _)| lists_pod(list, uid))
            .fold(Share::ZERO, |sum, (_, held)| sum.checked_add(held.share).unwrap_or(sum));
        let load = seen.busy_percent.map(|busy| busy_part(busy, part.demand.share, present));
        Some(Self { memory: own.used, load, is_busy: seen.busy_percent != Some(0) })
    }
}

/// Memory allocated to a pod on all its devices.
pub(crate) fn allocated(held: &Reservation) -> MemMib {
    let parts = held.placement.devices.iter();
    parts.fold(MemMib::ZERO, |sum, part| sum.checked_add(part.demand.memory).unwrap_or(sum))
}

#[cfg(test)]
mod tests;
