//! What a caller without rights does not get in MIG mode.
//!
//! Whether callers have the rights to monitor and to configure MIG: `unprivileged` of the scenario says so for all,
//! the environment variable `FAKE_NVML_PRIVILEGED` (`true` or `false`) for one process. Others get, as from the driver:
//!
//! * from the first GPU instance on, `NO_PERMISSION` for the memory and the processes of the GPU itself;
//! * `NO_PERMISSION` for the calls that list GPU instances and their places, and for those that change them;
//! * of the MIG devices those alone whose two capability nodes existed when the process made its first call: the
//!   container of a process gets its nodes when it is made. Nodes have the numbers of instances, so a later
//!   instance with the number of an earlier one is seen. The list is the file `nodes-<pid>` beside the scenario;
//!   to remove it is to make the container again.

use std::collections::BTreeSet;
use std::ffi::c_uint;

use super::NO_PERMISSION;
use super::instances::Made;
use super::scenario::{Gpu, Scenario, lines_of, write_line_to};

/// Whether this process has the rights.
fn has_rights(scenario: &Scenario) -> bool {
    #[expect(clippy::disallowed_methods, reason = "no flag reaches a library")]
    match std::env::var("FAKE_NVML_PRIVILEGED").as_deref() {
        Ok("true") => true,
        Ok("false") => false,
        Ok(_) | Err(_) => !scenario.unprivileged,
    }
}

/// The capability nodes of a MIG device, by GPU, GPU instance and compute instance; none if the scenario does not
/// say which instance it is.
fn nodes_of(gpu: &Gpu, device: &Gpu) -> Option<String> {
    let (id, ..) = device.slot?;
    Some(format!("{} {id} {}", gpu.uuid, device.compute))
}

/// Notes what this process has no right to, and hides the MIG devices whose nodes it lacks.
pub(crate) fn apply(scenario: &mut Scenario, made: Option<&Made>) {
    let is_refused = !has_rights(scenario);
    for gpu in &mut scenario.gpus {
        let has_instances = made.is_some_and(|made| !made.of(gpu).is_empty())
            || gpu.mig.iter().flatten().any(Option::is_some);
        (gpu.is_refused, gpu.is_divided) = (is_refused, gpu.mig.is_some() && has_instances);
    }
    if !is_refused {
        return;
    }
    let file = format!("nodes-{}", std::process::id());
    let mut known = lines_of(&file);
    if known.is_empty() {
        let devices = |gpu: &Gpu| gpu.mig.iter().flatten().flatten().cloned().collect::<Vec<_>>();
        let of_gpu =
            |gpu: &Gpu| devices(gpu).iter().filter_map(|it| nodes_of(gpu, it)).collect::<Vec<_>>();
        let all: Vec<String> = scenario.gpus.iter().flat_map(of_gpu).collect();
        known = format!("nodes\n{}", all.join("\n"));
        write_line_to(&file, &known);
    }
    let known: BTreeSet<&str> = known.lines().collect();
    for gpu in &mut scenario.gpus {
        let Some(mut mig) = gpu.mig.take() else { continue };
        for place in &mut mig {
            let nodes = place.as_ref().and_then(|device| nodes_of(gpu, device));
            if nodes.is_some_and(|nodes| !known.contains(nodes.as_str())) {
                *place = None;
            }
        }
        gpu.mig = Some(mig);
    }
}

/// Refuses what a GPU with instances does not let everybody read. `device` is the handle of the call.
pub(crate) fn may_read(gpu: &Gpu, device: usize) -> Result<(), c_uint> {
    let is_parent = device & 0xff == 0;
    if is_parent && gpu.is_divided && gpu.is_refused { Err(NO_PERMISSION) } else { Ok(()) }
}

/// Refuses the calls that need the right to configure MIG.
pub(crate) fn may_configure(gpu: &Gpu) -> Result<(), c_uint> {
    if gpu.is_refused { Err(NO_PERMISSION) } else { Ok(()) }
}
