//! Which processes' kernels run on a GPU, if the driver reports it.

use std::collections::BTreeMap;
use std::time::Duration;

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;

use crate::nvml::trouble::{Trouble, unless_lost};
use wire::units::Timestamp;

/// Least time between two reads about a GPU. While a pod drains, lists are read more often than the
/// driver takes samples. A list without a new sample would show all pods as idle.
const QUERY_EVERY: Duration = Duration::from_secs(1);

/// The last answer about one GPU.
pub(crate) struct Utilization {
    /// Time of the driver's newest sample, in its own microseconds.
    newest: u64,
    asked: Timestamp,
    /// Percent of the time in which kernels of each process ran; none at the first read.
    busy: Option<BTreeMap<u32, u32>>,
}

/// Percent of the time between the last two reads in which kernels of each process on the GPU
/// `uuid` ran. `None` at the first read, which would cover all that the driver remembers, and if
/// the driver does not report it. The last answers are in `seen`; each is valid for [`QUERY_EVERY`].
pub(crate) fn read(
    device: &Device<'_>,
    uuid: &str,
    seen: &mut BTreeMap<String, Utilization>,
    now: Timestamp,
) -> Result<Option<BTreeMap<u32, u32>>, Trouble> {
    let last = seen.get(uuid);
    if let Some(last) = last.filter(|last| now.since(last.asked) < QUERY_EVERY) {
        return Ok(last.busy.clone());
    }
    let last = last.map(|last| last.newest);
    let samples = match device.process_utilization_stats(last.unwrap_or(0)) {
        // No process has had a sample since: none ran a kernel.
        Err(NvmlError::NotFound) => Vec::new(),
        answer => match unless_lost(answer)? {
            Some(samples) => samples,
            None => {
                seen.remove(uuid);
                return Ok(None);
            }
        },
    };
    let newest = samples.iter().map(|sample| sample.timestamp).max().max(last).unwrap_or(0);
    let mut busy = BTreeMap::new();
    for sample in samples {
        // One sample is the mean of all since; of several the greatest counts.
        let known = busy.entry(sample.pid).or_insert(0);
        *known = sample.sm_util.min(100).max(*known);
    }
    let busy = last.map(|_| busy);
    seen.insert(uuid.to_owned(), Utilization { newest, asked: now, busy: busy.clone() });
    Ok(busy)
}
