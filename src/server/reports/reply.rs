//! What an agent gets in the reply to a report.

use engine::model::reservation::{BorrowedMemory, Reservation, ReservationState};
use wire::report::bodies::{AllocatedDevice, Allocation, AllocationState};

/// The reservation as the agent gets it.
pub fn allocation(reservation: &Reservation) -> Allocation {
    let runs_on = reservation.placement.runs_on();
    let devices = runs_on.iter().zip(&reservation.placement.devices);
    Allocation {
        pod_uid: reservation.pod.uid.to_string(),
        pod: reservation.pod.name.to_string(),
        state: match reservation.state {
            // Its processes are to be listed as often.
            _ if reservation.is_going_home() => AllocationState::Draining,
            _ if reservation.borrowed == BorrowedMemory::GivingBack => AllocationState::Draining,
            ReservationState::Assumed { .. } => AllocationState::Assumed,
            ReservationState::Confirmed => AllocationState::Confirmed,
            ReservationState::Draining { .. } => AllocationState::Draining,
        },
        devices: devices
            .map(|(id, placed)| AllocatedDevice {
                uuid: id.to_string(),
                memory_mib: placed.demand.memory.mib(),
                share_millionths: placed.demand.share.millionths(),
            })
            .collect(),
        is_guest: reservation.guest_on().is_some(),
    }
}
