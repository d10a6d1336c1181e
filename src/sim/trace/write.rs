//! Writes a trace in the form that [`crate::trace::read`] reads, without rounding.
//!
//! An optional column is left out if it says nothing in any row, so that a trace of plain shares
//! has the form of the public one.

use crate::trace::dimensions::{GpuColumns, MoreOfPod, RuleColumns};
use crate::trace::read::{NODE_COLUMNS, POD_COLUMNS, TraceNode, TracePod};
use crate::trace::table::written;
use engine::model::request::{Amount, Limit};
use wire::units::{MemMib, Share};

/// The node file of these nodes.
///
/// # Errors
/// None that is known: rows are written to memory.
pub fn nodes_csv(nodes: &[TraceNode]) -> Result<Vec<u8>, csv::Error> {
    let rows = nodes.iter().map(|node| {
        let rule = node.rule();
        let (slots, mig_instances) = (rule.replicas, rule.instances);
        let rule = RuleColumns { slots, mig_instances, enforcement: rule.enforcement };
        (node, node.more.clone().unwrap_or_default(), rule)
    });
    written(rows, NODE_COLUMNS, 5)
}

/// The pod file of these pods.
///
/// # Errors
/// None that is known: rows are written to memory.
pub fn pods_csv(pods: &[TracePod]) -> Result<Vec<u8>, csv::Error> {
    let rows = pods.iter().map(|pod| {
        let more = pod.more.clone().unwrap_or_default();
        let placed = more.placed.clone().unwrap_or_default();
        (pod, gpu_columns(pod.gpu_milli, &more), more, placed)
    });
    written(rows, POD_COLUMNS, 8)
}

fn gpu_columns(gpu_milli: u32, more: &MoreOfPod) -> GpuColumns {
    let mut columns = GpuColumns { gpu_milli: Some(Share::ZERO), ..GpuColumns::default() };
    let whole_milli = Share::from_millionths(u64::from(gpu_milli) * 1000);
    let (share, memory) = match &more.amount {
        None | Some(Amount::Whole) => (whole_milli, MemMib::ZERO),
        Some(Amount::Fraction(share)) => (*share, MemMib::ZERO),
        Some(Amount::FractionAndMemory(share, memory)) => (*share, *memory),
        Some(Amount::Memory(memory)) => (Share::ZERO, *memory),
        Some(Amount::MigInstance(_) | Amount::SharedSlot) => (Share::ZERO, MemMib::ZERO),
    };
    (columns.gpu_milli, columns.gpu_memory_mib) = (Some(share), memory);
    match &more.amount {
        Some(Amount::MigInstance(profile)) => columns.mig_profile = Some(profile.clone()),
        Some(Amount::SharedSlot) => columns.gpu_slots = Some(1),
        _ => {}
    }
    match more.limit {
        Some(Limit::Fraction(share)) => columns.limit_milli = Some(share),
        Some(Limit::Memory(memory)) => columns.limit_gpu_memory_mib = Some(memory),
        None => {}
    }
    columns
}
