//! What must hold, one file per subject.

mod admission;
mod burst;
mod chaos;
mod conflicts;
mod foreign;
mod guard;
mod in_place;
mod manifests;
mod mixed;
mod refusals;
mod restart;
mod sharing;
mod walk;
