//! Whose kernels run on a GPU, as far as the driver says it.

use std::collections::BTreeMap;
use std::time::Duration;

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;

use crate::agent::nvml::trouble::{Trouble, unless_lost};
use crate::hardware::units::Timestamp;

/// Least time from one question about a GPU to the next. The driver takes samples more rarely than lists
/// are read while a pod drains, and a list without a new sample would show all pods as idle.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// The last answer about one GPU.
pub(crate) struct Utilization {
    /// Time of the driver's newest sample, in its own microseconds.
    newest: u64,
    /// When it was asked.
    asked: Timestamp,
    /// Percent of the time in which kernels of each process ran; none at the first look.
    busy: Option<BTreeMap<u32, u32>>,
}

/// Percent of the time between the last two questions in which kernels of each process on the GPU `uuid` ran;
/// none at the first question, whose answer would be about all that the driver remembers, and where the
/// driver does not say it. The last answers are in `seen`; each stands for [`ASK_EVERY`].
pub(crate) fn read(
    device: &Device<'_>,
    uuid: &str,
    seen: &mut BTreeMap<String, Utilization>,
    now: Timestamp,
) -> Result<Option<BTreeMap<u32, u32>>, Trouble> {
    let last = seen.get(uuid);
    if let Some(last) = last.filter(|last| now.since(last.asked) < ASK_EVERY) {
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
        // One sample has the mean of all since; of several the greatest counts.
        let known = busy.entry(sample.pid).or_insert(0);
        *known = sample.sm_util.min(100).max(*known);
    }
    let busy = last.map(|_| busy);
    seen.insert(uuid.to_owned(), Utilization { newest, asked: now, busy: busy.clone() });
    Ok(busy)
}
