//! What the columns of a row say together: they must fit each other.

use std::collections::BTreeSet;
use std::mem;

use crate::hardware::device::{DeviceId, MAX_DEVICES_PER_NODE};
use crate::hardware::pool::PoolRule;
use crate::hardware::units::{MemMib, Share};
use crate::model::request::{Amount, Isolation, Limit};
use crate::sim::trace::dimensions::{
    DeviceAt, GpuColumns, INSTANCES, MoreOfNode, MoreOfPod, RuleColumns, TraceBursts,
    TracePlacement,
};
use crate::sim::trace::forms::{Form, milli_up};
use crate::sim::trace::read::{POD_COLUMNS, TraceNode, TracePod};
use crate::sim::trace::table::{Row, TraceError};

/// A row of a node file.
pub(super) fn node(row: Row<'_>) -> Result<TraceNode, TraceError> {
    let mut node: TraceNode = row.part()?;
    let mut more: MoreOfNode = row.part()?;
    let RuleColumns { slots, mig_instances, enforcement } = row.part()?;
    more.rule =
        PoolRule { replicas: slots, instances: mig_instances, enforcement, ..PoolRule::default() };
    check_counts(&row, node.gpus, &more)?;
    if more.gpu_memory.iter().all(|memory| *memory == more.gpu_memory[0]) {
        more.gpu_memory.truncate(1);
    }
    if more.gpu_models.iter().all(|model| *model == node.model) {
        more.gpu_models.clear();
    }
    let mut instances = mem::take(&mut more.instances);
    node.more = Some(Box::new(more));
    for (gpu, of_gpu) in (0..).zip(&mut instances) {
        for instance in of_gpu.iter_mut().filter(|instance| instance.memory == MemMib::ZERO) {
            let Some(memory) = node.memory_of_profile(gpu, &instance.profile) else {
                return row.refuse("mig", INSTANCES);
            };
            instance.memory = memory;
        }
    }
    if let Some(more) = node.more.as_mut().filter(|_| instances.iter().any(|it| !it.is_empty())) {
        more.instances = instances;
    }
    if node.more.as_deref() == Some(&MoreOfNode::default()) {
        node.more = None;
    }
    check_devices(&row, &node)?;
    Ok(node)
}

/// Refuses a list that has not one value for each GPU, and more devices than a node can have.
fn check_counts(row: &Row<'_>, gpus: u32, more: &MoreOfNode) -> Result<(), TraceError> {
    let count = usize::try_from(gpus).unwrap_or(usize::MAX);
    let [memory, instances] = [more.gpu_memory.len(), more.instances.len()];
    // One number is for all GPUs.
    let memory = if memory == 1 { 0 } else { memory };
    for (column, values) in
        [("gpu_memory_mib", memory), ("gpu_models", more.gpu_models.len()), ("mig", instances)]
    {
        if values > 0 && values != count {
            return row.refuse(column, format!("{gpus} values between `|`, one for each GPU"));
        }
    }
    if gpus == 0 && !more.gpu_memory.is_empty() {
        return row.refuse("gpu_memory_mib", "nothing, for a node without GPUs");
    }
    match count + more.instances.iter().map(Vec::len).sum::<usize>() > MAX_DEVICES_PER_NODE {
        true => row.refuse("mig", format!("at most {MAX_DEVICES_PER_NODE} devices")),
        false => Ok(()),
    }
}

/// Refuses what no node can have, so that the error names the line.
fn check_devices(row: &Row<'_>, node: &TraceNode) -> Result<(), TraceError> {
    let Some(more) = &node.more else { return Ok(()) };
    let devices = node.devices(0).or_else(|error| row.refuse("mig", error))?;
    let known: BTreeSet<DeviceAt> = devices.iter().map(|it| it.at).collect();
    if !more.unavailable.is_subset(&known) {
        return row.refuse("unavailable", BTreeSet::<DeviceAt>::allowed());
    }
    if !more.other_use.keys().all(|device| known.contains(device)) {
        return row.refuse("other_use_mib", "devices of the node, such as `0:512|1.2:64`");
    }
    let fault = match TraceNode::inventory(&devices) {
        Err(error) => error.to_string(),
        Ok(inventory) => {
            let is_listed = |id: &DeviceId| {
                devices.iter().any(|it| it.device.id == *id && more.unavailable.contains(&it.at))
            };
            match inventory.faults().iter().find(|(id, _)| !is_listed(id)) {
                Some((_, fault)) => fault.to_string(),
                None => return Ok(()),
            }
        }
    };
    let columns = ["mig", "gpu_memory_mib", "gpu_models"];
    let column = columns.into_iter().find(|column| !row.text(column).is_empty());
    row.refuse(column.unwrap_or("mig"), format!("devices that a node can have: {fault}"))
}

/// A row of a pod file.
pub(super) fn pod(mut row: Row<'_>) -> Result<TracePod, TraceError> {
    let mut pod: TracePod = row.part()?;
    if pod.gpu_spec.iter().any(String::is_empty) {
        return row.refuse("gpu_spec", "GPU models separated by `|`");
    }
    if pod.num_gpu == 0 {
        // A pod without a GPU that qualifies one is a mistake.
        let optional = POD_COLUMNS.split(',').skip(8);
        let of_gpus = optional.filter(|column| !["priority", "node"].contains(column));
        row.refuse_all(&of_gpus.collect::<Vec<&str>>(), "nothing, as `num_gpu` is 0")?;
    }
    let columns: GpuColumns = row.part()?;
    let mut more: MoreOfPod = row.part()?;
    if pod.num_gpu > 0 {
        (pod.gpu_milli, more.amount) = amount(&row, pod.num_gpu, &columns)?;
        more.limit = limit(&row, &columns)?;
        more.bursts = bursts(&row, pod.num_gpu, &more, &columns)?;
    } else if columns.gpu_milli != Some(Share::ZERO) {
        return row.refuse("gpu_milli", 0);
    }
    more.placed = placed(&row)?;
    pod.more = Some(Box::new(more)).filter(|more| **more != MoreOfPod::default());
    Ok(pod)
}

/// The share in thousandths, rounded up, and the amount if that does not say all.
fn amount(
    row: &Row<'_>,
    num_gpu: u32,
    columns: &GpuColumns,
) -> Result<(u32, Option<Amount>), TraceError> {
    let GpuColumns { gpu_memory_mib: memory, mig_profile, gpu_slots, .. } = columns;
    let (share, has_slot) = (columns.gpu_milli.unwrap_or_default(), *gpu_slots == Some(1));
    let milli = milli_up(share);
    if let Some(profile) = mig_profile {
        return match *memory > MemMib::ZERO || has_slot || ![0, 1000].contains(&milli) {
            true => row.refuse("mig_profile", "a profile and no `gpu_memory_mib`, slot or share"),
            false => Ok((1000, Some(Amount::MigInstance(profile.clone())))),
        };
    }
    let has_amount = *memory > MemMib::ZERO || share > Share::ZERO;
    if has_slot {
        return match has_amount || num_gpu != 1 {
            true => row.refuse("gpu_slots", "`1`, with `num_gpu` 1 and without share and memory"),
            false => Ok((0, Some(Amount::SharedSlot))),
        };
    }
    Ok(match *memory {
        _ if !has_amount => return row.refuse("gpu_milli", Share::allowed()),
        MemMib::ZERO if share.millionths().is_multiple_of(1000) => (milli, None),
        MemMib::ZERO => (milli, Some(Amount::Fraction(share))),
        memory if share == Share::ZERO => (0, Some(Amount::Memory(memory))),
        memory => (milli, Some(Amount::FractionAndMemory(share, memory))),
    })
}

fn limit(row: &Row<'_>, columns: &GpuColumns) -> Result<Option<Limit>, TraceError> {
    let GpuColumns { gpu_milli, gpu_memory_mib: memory, .. } = columns;
    match (columns.limit_milli, columns.limit_gpu_memory_mib) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => row.refuse("limit_milli", "nothing beside `limit_gpu_memory_mib`"),
        (Some(limit), None) => match gpu_milli.filter(|share| *share > Share::ZERO) {
            Some(share) if limit >= share && columns.mig_profile.is_none() => {
                Ok(Some(Limit::Fraction(limit)))
            }
            _ => row.refuse("limit_milli", "thousandths from the requested share to 1000"),
        },
        (None, Some(limit)) if *memory > MemMib::ZERO && limit >= *memory => {
            Ok(Some(Limit::Memory(limit)))
        }
        (None, Some(_)) => {
            row.refuse("limit_gpu_memory_mib", "MiB, at least the requested `gpu_memory_mib`")
        }
    }
}

/// When it uses more than it requests. Only a pod that may be a guest does.
fn bursts(
    row: &Row<'_>,
    num_gpu: u32,
    more: &MoreOfPod,
    columns: &GpuColumns,
) -> Result<Option<TraceBursts>, TraceError> {
    let all = ["burst_gap_seconds", "burst_seconds", "burst_memory_milli"];
    let Some(column) = all.into_iter().find(|column| !row.text(column).is_empty()) else {
        return Ok(None);
    };
    if num_gpu != 1 {
        return row.refuse(column, "nothing, as `num_gpu` is not 1");
    }
    if more.limit.is_none() {
        return row.refuse(column, "nothing without a limit of the pod");
    }
    if more.isolation != Isolation::None {
        return row.refuse(column, "nothing beside an isolation");
    }
    let memory_milli = columns.burst_memory_milli.unwrap_or(1000);
    match (columns.burst_gap_seconds, columns.burst_seconds) {
        (Some(gap_seconds), Some(seconds)) => {
            Ok(Some(TraceBursts { gap_seconds, seconds, memory_milli }))
        }
        _ => row.refuse(column, "`burst_gap_seconds` and `burst_seconds`, or neither"),
    }
}

fn placed(row: &Row<'_>) -> Result<Option<TracePlacement>, TraceError> {
    let placed: TracePlacement = row.part()?;
    if !placed.node.is_empty() {
        return Ok(Some(placed));
    }
    match ["devices", "placed_isolation"].into_iter().find(|column| !row.text(column).is_empty()) {
        Some(column) => row.refuse(column, "nothing without a `node`"),
        None => Ok(None),
    }
}
