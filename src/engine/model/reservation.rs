//! Placements, and the life of a reservation from bind to the end of its processes.

use std::fmt;
use std::sync::Arc;

use crate::hardware::pool::{Borrow, ConfiguredIsolation, Enforcement, PoolRule};
use crate::hardware::spots::Spot;
use crate::model::request::{GpuRequest, Isolation, Movable};
use crate::model::workload::Protection;
use wire::ids::{DeviceId, NodeName, PodUid};
use wire::units::{Demand, HostAmount, MemMib, Share, Timestamp};

/// A pod: its UID, which decides, and its name, which is only shown.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodRef {
    /// UID given by the API server; never reused.
    pub uid: PodUid,
    /// `namespace/name`, for people.
    pub name: Arc<str>,
}

impl PodRef {
    /// Its namespace and name; both empty if the text lacks one of them.
    pub fn parts(&self) -> (&str, &str) {
        self.name.split_once('/').unwrap_or_default()
    }

    /// Its namespace; empty where it has none.
    pub fn namespace(&self) -> &str {
        self.parts().0
    }
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// An amount of one device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlacedDevice {
    /// The device.
    pub id: DeviceId,
    /// What is taken of it.
    pub demand: Demand,
}

/// Node and devices of a pod, with an amount on each of one or more distinct devices.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placement {
    /// The node.
    pub node: NodeName,
    /// The devices, in the order in which the container sees them; none twice, at least one.
    pub devices: Vec<PlacedDevice>,
    /// The configured isolation.
    pub isolation: ConfiguredIsolation,
    /// Where the pod runs, or ran, if not on these devices: a pod with one device only.
    pub guest: Option<Guest>,
    /// Where its MIG instances lie that gpupack makes, by device; empty if it makes none of them. Until one
    /// is made, its device has the id of the spot.
    pub spots: Vec<Option<Spot>>,
}

/// Where a pod runs that does not run on the device that it is allocated, its *home*.
///
/// A guest takes only room that is free there, so it can go home at any time: nothing else has to
/// move for that. Run:ai's node-level scheduler does the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Guest {
    /// The device, of the same class as its home.
    pub on: DeviceId,
    /// Where that lies, if it is a MIG instance which gpupack makes so that the pod leaves its own one. Until it is
    /// made, the device has the id of the spot. The pod is allocated both.
    pub spot: Option<Spot>,
    /// Its move home, once that is written on the pod.
    pub leaving: Option<MoveHome>,
}

impl Guest {
    /// Whether both run at the same place: a MIG instance that was made again has another UUID.
    pub fn is_at_place_of(&self, other: &Self) -> bool {
        self.on == other.on || (self.spot.is_some() && self.spot == other.spot)
    }
}

/// A move home: kubelet restarts the container, because its CPU request is changed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MoveHome {
    /// The container when the move was written, as the runtime names it; empty if there was none.
    pub container: Arc<str>,
    /// Its CPU request at that time, in thousandths.
    pub cpu_milli: u64,
}

/// How far a guest has come on its way home.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Departure {
    /// It stays where it runs.
    #[default]
    Stays,
    /// It is to go home. Its container may still run where it was.
    Recalled,
    /// Its container has ended there. Some of its processes may be left.
    Restarted {
        /// Since when.
        since: Timestamp,
        /// Successive lists of the processes there that show none of the pod.
        clean_lists: u32,
    },
    /// It is at home.
    Gone,
    /// It ran at home and is to run where it is a guest: until its processes at home have ended it counts in both
    /// places.
    Arrives {
        /// Successive lists of the processes at home that show none of the pod, since its container has been
        /// restarted; `None` before.
        clean_lists: Option<u32>,
    },
    /// It cannot be moved, and is to be allocated the room where it runs. Until that is written it is
    /// allocated both.
    Settling,
}

/// What becomes of the memory that a pod uses above its request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BorrowedMemory {
    /// It is free for others: it is taken back when another pod that runs there requests it.
    #[default]
    Free,
    /// Its container is being restarted, so that it loses what it has above its request.
    GivingBack,
    /// It cannot be taken back. So it may use no more than it requests.
    Kept,
}

/// How far a reservation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReservationState {
    /// Bind has chosen. It is unknown if the API server accepted. Time alone never frees it.
    Assumed {
        /// When bind chose.
        since: Timestamp,
    },
    /// The API server says that the pod is bound with this placement.
    Confirmed,
    /// The pod is terminal or gone; its processes may still use the device.
    Draining {
        /// When the end of the pod was seen.
        since: Timestamp,
        /// Successive reports since then that list no process of the pod.
        clean_reports: u32,
        /// When the last report came since then that lists a process of the pod.
        shown: Option<Timestamp>,
    },
}

/// What makes the pods of one application: a digest of its namespace and UID, and of ReplicaSets, of which a
/// Deployment has one per revision, of their names without the revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Controller(pub u64);

/// What the API server says of a pod that counts when others wait for its room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tenure {
    /// Its priority; the larger the more important.
    pub priority: i32,
    /// When it started, in seconds since 1970; zero if unknown.
    pub started_unix_seconds: i64,
    /// Whether its deletion was requested: its room will be free.
    pub is_ending: bool,
    /// When it is to have ended then, in seconds since 1970.
    pub ends_unix_seconds: i64,
    /// What made it, if a controller did.
    pub controller: Option<Controller>,
    /// What protects it from evictions for others, if its workload class says so.
    pub protection: Option<Protection>,
}

/// What one pod has on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The pod.
    pub pod: PodRef,
    /// Devices and amounts, as they were written.
    pub placement: Placement,
    /// CPU and host memory.
    pub host: HostAmount,
    /// How far it has come.
    pub state: ReservationState,
    /// Its request, if known; without it gpupack cannot say where else the pod could run.
    pub request: Option<Arc<GpuRequest>>,
    /// What the API server says of it since it was bound; `None` before.
    pub tenure: Option<Tenure>,
    /// How far it has come on its way home, if it is a guest.
    pub departure: Departure,
    /// What becomes of the memory that it uses above its request.
    pub borrowed: BorrowedMemory,
    /// Whether it should have ended by now and has not. Its room may be free at any time, or never.
    pub is_hung: bool,
}

/// A pod on a node that has no placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherPod {
    /// `namespace/name`.
    pub name: Arc<str>,
    /// Its CPU and host memory.
    pub host: HostAmount,
    /// Its priority and start.
    pub tenure: Tenure,
}

impl Reservation {
    /// Whether the pod is terminal or gone.
    pub(crate) fn is_draining(&self) -> bool {
        matches!(self.state, ReservationState::Draining { .. })
    }

    /// Whether the pod is ending, or its devices drain.
    pub fn is_ending(&self) -> bool {
        self.tenure.is_some_and(|tenure| tenure.is_ending) || self.is_draining()
    }

    /// The same of one that does not hang: its room will be free.
    pub fn is_leaving(&self) -> bool {
        self.is_ending() && !self.is_hung
    }

    /// Whether a pod of this controller cannot wait for its room: it hangs, or is an older pod of the same
    /// application, which may run until the other one does.
    pub fn outlasts(&self, controller: Option<Controller>) -> bool {
        let own = self.tenure.and_then(|tenure| tenure.controller);
        self.is_hung || own.is_some() && own == controller && !self.is_leaving()
    }

    /// Whether a suggestion may move it: it is bound for certain, is not about to end, and its
    /// request is known.
    pub fn is_movable(&self) -> bool {
        self.state == ReservationState::Confirmed && self.request.is_some()
    }

    /// Whether it may use more than it requests, where its pool lends that: it has one device, and its
    /// container can be restarted.
    pub fn may_borrow(&self) -> bool {
        let allows = self.request.as_deref().is_some_and(|request| {
            request.movable == Movable::Restart && request.isolation == Isolation::None
        });
        allows && !self.is_draining() && self.placement.devices.len() == 1
    }

    /// Whether it may use more memory than it requests where its pool lends memory.
    pub fn may_have_borrowed(&self) -> bool {
        let limit = self.request.as_deref().and_then(|request| request.limit);
        self.may_borrow() && limit.is_some()
    }

    /// The most memory that it may use of the device where it runs and has `demand`, if that is more than
    /// its demand: in a pool that lends memory, of a pod whose container can be restarted.
    pub fn memory_limit(&self, rule: PoolRule, demand: Demand, capacity: MemMib) -> Option<MemMib> {
        let Borrow::Memory { most } = rule.borrow else { return None };
        let request = self.request.as_ref()?;
        let limit = request.limit?.at_most(most, capacity).memory_of(rule.replicas, capacity);
        let is_borrower = self.may_borrow()
            && self.borrowed != BorrowedMemory::Kept
            && rule.enforcement == Enforcement::None;
        (is_borrower && limit > demand.memory).then_some(limit)
    }

    /// How much of the compute of a device it may use that has `demand`: its limit, where its pool lends compute.
    pub fn compute_limit(&self, rule: PoolRule, demand: Demand) -> Share {
        let limit = self.request.as_ref().and_then(|request| request.limit);
        let lends = rule.borrow != Borrow::None && rule.enforcement == Enforcement::None;
        let limit = limit.filter(|_| lends).and_then(|limit| limit.share_of(rule.replicas));
        limit.map_or(demand.share, |limit| limit.max(demand.share))
    }

    /// What is written on its pod once it is allocated the room where it is a guest.
    pub fn settled_placement(&self) -> Placement {
        let mut placement = self.placement.at_home();
        if let (Some(guest), Some(placed)) = (&self.placement.guest, placement.devices.first_mut())
        {
            placed.id = guest.on.clone();
            if guest.spot.is_some() {
                placement.spots = vec![guest.spot.clone()];
            }
        }
        placement
    }

    /// The device other than its own on which it runs, or may still run.
    pub fn guest_on(&self) -> Option<&DeviceId> {
        let guest = self.placement.guest.as_ref()?;
        (self.departure != Departure::Gone).then_some(&guest.on)
    }

    /// Whether it counts as a tenant of both devices: it is to be allocated where it runs, or moves to another MIG
    /// instance.
    pub fn has_both(&self) -> bool {
        let is_settling = self.guest_on().is_some() && self.departure == Departure::Settling;
        is_settling || self.changes_instances()
    }

    /// Whether it moves to another MIG instance, or back from there.
    pub fn changes_instances(&self) -> bool {
        let guest = self.placement.guest.as_ref();
        self.guest_on().is_some() && guest.is_some_and(|guest| guest.spot.is_some())
    }

    /// Whether it is on its way home.
    pub fn is_going_home(&self) -> bool {
        match self.departure {
            Departure::Recalled | Departure::Restarted { .. } => self.guest_on().is_some(),
            Departure::Stays
            | Departure::Gone
            | Departure::Arrives { .. }
            | Departure::Settling => false,
        }
    }

    /// Whether its container is restarted anyway, for a move that goes on. A pod that is not restarted elsewhere after
    /// all may use its home for long.
    pub fn is_being_restarted(&self) -> bool {
        self.is_going_home() || self.departure == Departure::Arrives { clean_lists: None }
    }

    /// Whether it is on its way from its home to where it is a guest.
    pub fn is_arriving(&self) -> bool {
        matches!(self.departure, Departure::Arrives { .. })
    }
}

impl Placement {
    /// The compute share of all its devices together.
    pub fn share(&self) -> Share {
        let shares = self.devices.iter().map(|placed| placed.demand.share.millionths());
        Share::from_millionths(shares.sum())
    }

    /// The same without the place of the guest: what is allocated.
    pub fn at_home(&self) -> Self {
        Self { guest: None, ..self.clone() }
    }

    /// Whether a pod is a guest at the same place in both, or in none of them.
    pub fn is_guest_as(&self, other: &Self) -> bool {
        match (&self.guest, &other.guest) {
            (Some(own), Some(its)) => own.is_at_place_of(its),
            (None, None) => true,
            _ => false,
        }
    }

    /// Whether both allocate the same but for MIG instances that were made again: these have other UUIDs.
    pub fn is_on_spots_of(&self, other: &Self) -> bool {
        let mut both = self.devices.iter().zip(&other.devices).enumerate();
        self.devices.len() == other.devices.len()
            && both.all(|(at, (own, its))| {
                let is_made = self.spots.get(at).is_some_and(Option::is_some);
                own == its || is_made
            })
            && self.without_devices() == other.without_devices()
    }

    fn without_devices(&self) -> Self {
        Self { devices: Vec::new(), ..self.at_home() }
    }

    /// Its devices, each with its spot if it is a MIG instance that gpupack makes.
    pub fn parts(&self) -> impl Iterator<Item = (&PlacedDevice, Option<&Spot>)> {
        let spots = self.spots.iter().map(Option::as_ref).chain(std::iter::repeat(None));
        self.devices.iter().zip(spots)
    }

    /// The devices that the pod runs on, or will after its move, in its order.
    pub fn runs_on(&self) -> Vec<DeviceId> {
        match &self.guest {
            Some(Guest { on, leaving: None, .. }) => vec![on.clone()],
            Some(_) | None => self.devices.iter().map(|placed| placed.id.clone()).collect(),
        }
    }
}
