//! What must hold, one file per subject.

mod manifests;
