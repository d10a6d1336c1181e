//! What must hold, one file per subject.

mod admission;
mod burst;
mod chaos;
mod churn;
mod conflicts;
mod containers;
mod drains;
mod edits;
mod untracked;
mod given_up;
mod guard;
mod in_place;
mod limits;
mod manifests;
mod mixed;
mod mps;
mod overlap;
mod preemption;
mod refusals;
mod requeues;
mod restart;
mod rights;
mod runtime;
mod sharing;
mod throughput;
mod walk;
