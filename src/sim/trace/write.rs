//! Writes a trace in the form that [`crate::sim::trace::read`] reads, without rounding.
//!
//! An optional column is left out if it says nothing in any row, so that a trace of plain shares
//! has the form of the public one.

use crate::hardware::pool::{ConfiguredIsolation, Enforcement, InstanceUse};
use crate::hardware::units::MemMib;
use crate::model::request::{Amount, Isolation, Limit};
use crate::sim::trace::dimensions::{MoreOfNode, MoreOfPod, TracePlacement, held_text, share_text};
use crate::sim::trace::read::{TraceNode, TracePod};

/// Columns that every file has.
const NODE_COLUMNS: [&str; 5] = ["sn", "cpu_milli", "memory_mib", "gpu", "model"];

/// Optional columns.
const MORE_NODE_COLUMNS: [&str; 8] = [
    "gpu_memory_mib",
    "gpu_models",
    "mig",
    "slots",
    "mig_instances",
    "enforcement",
    "unavailable",
    "other_use_mib",
];

/// Columns that every file has.
const POD_COLUMNS: [&str; 8] = [
    "name",
    "cpu_milli",
    "memory_mib",
    "num_gpu",
    "gpu_milli",
    "gpu_spec",
    "creation_time",
    "deletion_time",
];

/// Optional columns.
const MORE_POD_COLUMNS: [&str; 13] = [
    "gpu_memory_mib",
    "mig_profile",
    "gpu_slots",
    "isolation",
    "limit_milli",
    "limit_gpu_memory_mib",
    "policy",
    "min_gpu_memory_mib",
    "by_instance",
    "priority",
    "node",
    "devices",
    "placed_isolation",
];

/// The node file of these nodes.
///
/// # Errors
/// None that is known: rows are written to memory.
pub fn nodes_csv(nodes: &[TraceNode]) -> Result<Vec<u8>, csv::Error> {
    let usual = nodes.iter().map(|node| {
        let numbers = [node.cpu_milli, node.memory_mib, u64::from(node.gpus)];
        let [cpu, memory, gpus] = numbers.map(|number| number.to_string());
        [node.name.clone(), cpu, memory, gpus, node.model.clone()]
    });
    let more = nodes.iter().map(|node| node.more.as_deref().map(more_of_node).unwrap_or_default());
    table((NODE_COLUMNS, usual), (MORE_NODE_COLUMNS, more))
}

/// The pod file of these pods.
///
/// # Errors
/// None that is known: rows are written to memory.
pub fn pods_csv(pods: &[TracePod]) -> Result<Vec<u8>, csv::Error> {
    let usual = pods.iter().map(|pod| {
        let numbers = [pod.cpu_milli, pod.memory_mib, u64::from(pod.num_gpu)];
        let [cpu, memory, gpus] = numbers.map(|number| number.to_string());
        let time = |time: Option<u64>| time.map(|time| time.to_string()).unwrap_or_default();
        let times = (time(pod.creation_time), time(pod.deletion_time));
        let models = pod.gpu_spec.join("|");
        [pod.name.clone(), cpu, memory, gpus, milli(pod), models, times.0, times.1]
    });
    let more = pods.iter().map(|pod| pod.more.as_deref().map(more_of_pod).unwrap_or_default());
    table((POD_COLUMNS, usual), (MORE_POD_COLUMNS, more))
}

/// The share that the pod requests of each GPU.
fn milli(pod: &TracePod) -> String {
    match pod.more.as_ref().and_then(|more| more.amount.as_ref()) {
        None | Some(Amount::Whole) => pod.gpu_milli.to_string(),
        Some(Amount::Fraction(share) | Amount::FractionAndMemory(share, _)) => share_text(*share),
        Some(Amount::Memory(_) | Amount::MigInstance(_) | Amount::SharedSlot) => "0".to_owned(),
    }
}

fn more_of_node(more: &MoreOfNode) -> [String; 8] {
    let memory = more.gpu_memory.iter().map(|memory| memory.mib().to_string());
    let instances = more.instances.iter().map(|of_gpu| {
        let instances = of_gpu.iter().map(|it| format!("{}:{}", it.profile, it.memory.mib()));
        instances.collect::<Vec<String>>().join(" ")
    });
    let slots = more.rule.replicas.map(|slots| slots.count().to_string());
    let shared = match more.rule.instances {
        InstanceUse::Whole => "",
        InstanceUse::Shared => "shared",
    };
    let enforcement = match more.rule.enforcement {
        Enforcement::None => "",
        some @ (Enforcement::Mps | Enforcement::Driver) => some.name(),
    };
    let unavailable = more.unavailable.iter().map(ToString::to_string);
    let other_use = more.other_use.iter();
    let other_use = other_use.map(|(device, memory)| format!("{device}:{}", memory.mib()));
    [
        list(memory),
        more.gpu_models.join("|"),
        list(instances),
        slots.unwrap_or_default(),
        shared.to_owned(),
        enforcement.to_owned(),
        list(unavailable),
        list(other_use),
    ]
}

fn more_of_pod(more: &MoreOfPod) -> [String; 13] {
    let mib = |memory: MemMib| memory.mib().to_string();
    let memory = match &more.amount {
        Some(Amount::Memory(memory) | Amount::FractionAndMemory(_, memory)) => mib(*memory),
        _ => String::new(),
    };
    let (profile, slots) = match &more.amount {
        Some(Amount::MigInstance(profile)) => (profile.to_string(), ""),
        Some(Amount::SharedSlot) => (String::new(), "1"),
        _ => (String::new(), ""),
    };
    let isolation = match more.isolation {
        Isolation::None => "",
        some @ (Isolation::Memory | Isolation::Hardware) => some.name(),
    };
    let (limit, memory_limit) = match more.limit {
        Some(Limit::Fraction(share)) => (share_text(share), String::new()),
        Some(Limit::Memory(memory)) => (String::new(), mib(memory)),
        None => (String::new(), String::new()),
    };
    let min_memory = Some(more.min_memory).filter(|memory| *memory > MemMib::ZERO).map(mib);
    let priority = Some(more.priority).filter(|priority| *priority != 0);
    let [node, devices, placed_isolation] = more.placed.as_ref().map(placed).unwrap_or_default();
    [
        memory,
        profile,
        slots.to_owned(),
        isolation.to_owned(),
        limit,
        memory_limit,
        more.policy.map(|policy| policy.name().to_owned()).unwrap_or_default(),
        min_memory.unwrap_or_default(),
        if more.by_instance { "true".to_owned() } else { String::new() },
        priority.map(|priority| priority.to_string()).unwrap_or_default(),
        node,
        devices,
        placed_isolation,
    ]
}

fn placed(placed: &TracePlacement) -> [String; 3] {
    let isolation = match placed.isolation {
        ConfiguredIsolation::None => "",
        some => some.name(),
    };
    [placed.node.clone(), list(placed.devices.iter().map(held_text)), isolation.to_owned()]
}

fn list(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<String>>().join("|")
}

/// A table with the usual columns, and those of the others that say something.
fn table<const USUAL: usize, const MORE: usize>(
    (titles, usual): ([&str; USUAL], impl Iterator<Item = [String; USUAL]>),
    (more_titles, more): ([&str; MORE], impl Iterator<Item = [String; MORE]> + Clone),
) -> Result<Vec<u8>, csv::Error> {
    let mut is_kept = [false; MORE];
    for row in more.clone() {
        for (is_kept, value) in is_kept.iter_mut().zip(&row) {
            *is_kept |= !value.is_empty();
        }
    }
    let kept = |at: &usize| is_kept[*at];
    let mut writer = csv::Writer::from_writer(Vec::new());
    let more_titles = (0..MORE).filter(kept).map(|at| more_titles[at]);
    writer.write_record(titles.into_iter().chain(more_titles))?;
    for (usual, more) in usual.zip(more) {
        let more = more.into_iter().enumerate().filter(|(at, _)| kept(at)).map(|(_, it)| it);
        writer.write_record(usual.into_iter().chain(more))?;
    }
    writer.into_inner().map_err(|error| error.into_error().into())
}
