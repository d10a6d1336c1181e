//! Reads the two CSV files of a workload trace: nodes, and the pods that request their GPUs.
//!
//! The format is that of the public trace `cluster-trace-gpu-v2023` (repository
//! `alibaba/clusterdata`), the data of the FGD paper, and more optional columns for all else that
//! gpupack places by ([`crate::trace::dimensions`]). Columns are found by the header, so their
//! order is free and other columns are ignored. A trace comes from outside: every value is checked
//! against a range, and the sum of any column fits in 64 bits. This module never shuffles, sorts or
//! repairs: it returns what the file says.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::mem;
use std::num::NonZeroU32;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::trace::dimensions::{
    DeviceAt, GpuColumns, INSTANCES, MoreOfNode, MoreOfPod, RuleColumns, TracePlacement,
};
use crate::trace::forms::{self, Form, milli_up};
use crate::trace::inventory::{RowOfNode, TraceDevice, position};
use crate::trace::table::{CsvTable, TableRow, TraceError};
use engine::hardware::device_class::DeviceClass;
use engine::hardware::pool::PoolRule;
use engine::model::request::{Amount, GpuRequest, Limit};
use wire::device::{InventoryError, ModelFilter};
use wire::ids::{DeviceId, MAX_DEVICES_PER_NODE, ModelName};
use wire::units::{MemMib, Share};

/// Up to 10,000 cores on a node.
pub(crate) const MAX_CPU_MILLI: u64 = 10_000_000;
/// Up to 1 PiB on a node.
pub(crate) const MAX_MEMORY_MIB: u64 = 1 << 30;
/// GPUs of a node or of a pod; NVML itself supports far fewer.
const MAX_GPUS: u64 = 256;
/// Seconds; wide enough for an epoch.
const MAX_SECONDS: u64 = 9_999_999_999;

/// Columns of a node file; it has at least the first five.
pub(crate) const NODE_COLUMNS: &str = "sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib,gpu_models,\
    mig,slots,mig_instances,enforcement,unavailable,other_use_mib";
/// Columns of a pod file; one that gpupack writes has at least the first eight.
pub(crate) const POD_COLUMNS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,\
    creation_time,deletion_time,gpu_memory_mib,mig_profile,gpu_slots,isolation,limit_milli,\
    limit_gpu_memory_mib,policy,min_gpu_memory_mib,\
    by_instance,priority,node,devices,placed_isolation";

/// One row of the node file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceNode {
    /// Unique in the file.
    #[serde(rename = "sn", alias = "name", deserialize_with = "forms::name")]
    pub name: String,
    /// CPU, in thousandths of a core.
    #[serde(deserialize_with = "forms::number::<0, MAX_CPU_MILLI, _, _>")]
    pub cpu_milli: u64,
    /// Host memory, in MiB.
    #[serde(deserialize_with = "forms::number::<0, MAX_MEMORY_MIB, _, _>")]
    pub memory_mib: u64,
    /// How many GPUs the node has; 0 for a node without any.
    #[serde(rename = "gpu", deserialize_with = "forms::number::<0, MAX_GPUS, _, _>")]
    pub gpus: u32,
    /// GPU model, as pods name it in their `gpu_spec`; may be empty.
    #[serde(deserialize_with = "forms::model")]
    pub model: String,
    /// What the optional columns say, if anything.
    #[serde(skip)]
    pub more: Option<Box<MoreOfNode>>,
}

impl TraceNode {
    /// The node's GPU compute in thousandths of a GPU. A MIG instance counts like a GPU.
    #[must_use]
    pub fn capacity_milli(&self) -> u64 {
        self.row().placeable() * 1000
    }

    /// Its devices, in the order of the file; `rank` makes their UUIDs unique.
    pub fn devices(&self, rank: usize) -> Result<Vec<TraceDevice>, InventoryError> {
        self.row().devices(rank)
    }

    /// Whether it has a device.
    #[must_use]
    pub fn has_device(&self, at: DeviceAt) -> bool {
        let instances = self.row().instances(at.gpu).len();
        at.gpu < self.gpus && at.instance.map_or(instances == 0, |own| position(own) < instances)
    }

    /// How its pool shares them.
    pub fn rule(&self) -> PoolRule {
        self.more.as_ref().map(|more| more.rule).unwrap_or_default()
    }

    /// The product names of its devices.
    fn products(&self) -> Vec<ModelName> {
        if self.more.is_none() {
            return vec![ModelName::new(self.model.as_str())];
        }
        let devices = self.devices(0).unwrap_or_default();
        let classes = devices.iter().map(|device| DeviceClass::of(&device.device, self.rule()));
        classes.map(|class| class.product()).collect()
    }

    fn row(&self) -> RowOfNode<'_> {
        RowOfNode { gpus: self.gpus, model: &self.model, more: self.more.as_deref() }
    }
}

/// One row of the pod file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TracePod {
    /// Unique in the file.
    #[serde(deserialize_with = "forms::name")]
    pub name: String,
    /// CPU request, in thousandths of a core.
    #[serde(deserialize_with = "forms::number::<0, MAX_CPU_MILLI, _, _>")]
    pub cpu_milli: u64,
    /// Host memory request, in MiB.
    #[serde(deserialize_with = "forms::number::<0, MAX_MEMORY_MIB, _, _>")]
    pub memory_mib: u64,
    /// How many GPUs the pod requests; 0 for a CPU-only pod.
    #[serde(deserialize_with = "forms::number::<0, MAX_GPUS, _, _>")]
    pub num_gpu: u32,
    /// Share of each GPU, in thousandths, rounded up: 0 without GPUs. For a pod that requests no
    /// share this is what the amount is of one, see [`size_up`]; figures count it.
    #[serde(skip)]
    pub gpu_milli: u32,
    /// Models that the pod accepts, in the file's order, repetitions kept; empty accepts any.
    #[serde(with = "forms")]
    pub gpu_spec: Vec<String>,
    /// When the pod was submitted, in seconds since the trace began, if the file says so.
    #[serde(deserialize_with = "forms::some_number::<0, MAX_SECONDS, _>")]
    pub creation_time: Option<u64>,
    /// When the pod was gone, in seconds since the trace began, if the file says so.
    #[serde(deserialize_with = "forms::some_number::<0, MAX_SECONDS, _>")]
    pub deletion_time: Option<u64>,
    /// What the optional columns say, if anything.
    #[serde(skip)]
    pub more: Option<Box<MoreOfPod>>,
}

impl TracePod {
    /// What it requests of GPUs; `None` for a pod without a GPU.
    #[must_use]
    pub fn request(&self) -> Option<GpuRequest> {
        let count = NonZeroU32::new(self.num_gpu)?;
        let models = ModelFilter::new(self.gpu_spec.iter().map(String::as_str));
        let amount = match self.more.as_ref().and_then(|more| more.amount.clone()) {
            Some(amount) => amount,
            None if self.gpu_milli >= 1000 => Amount::Whole,
            None => Amount::Fraction(Share::from_millionths(u64::from(self.gpu_milli) * 1000)),
        };
        let plain = GpuRequest { models, ..GpuRequest::several(amount, count) };
        let Some(more) = &self.more else { return Some(plain) };
        Some(GpuRequest {
            isolation: more.isolation,
            limit: more.limit,
            policy: more.policy,
            min_memory: more.min_memory,
            by_instance: more.by_instance,
            ..plain
        })
    }

    /// Its priority.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.more.as_ref().map_or(0, |more| more.priority)
    }

    /// Where it runs, if it is to stay there.
    #[must_use]
    pub fn placed(&self) -> Option<&TracePlacement> {
        self.more.as_ref()?.placed.as_ref()
    }

    /// Sets where it runs; `None` forgets that.
    pub fn place(&mut self, placed: Option<TracePlacement>) {
        if placed.is_none() && self.more.is_none() {
            return;
        }
        let more = self.more.get_or_insert_default();
        more.placed = placed;
        if **more == MoreOfPod::default() {
            self.more = None;
        }
    }

    /// The amount of each device, if it has no share.
    fn unsized_amount(&self) -> Option<&Amount> {
        let amount = self.more.as_ref()?.amount.as_ref()?;
        matches!(amount, Amount::Memory(_) | Amount::SharedSlot).then_some(amount)
    }

    /// All that the pod requests, over its GPUs, in thousandths of a GPU.
    #[must_use]
    pub fn demand_milli(&self) -> u64 {
        u64::from(self.num_gpu) * u64::from(self.gpu_milli)
    }
}

/// How many of `pods` accept only GPU models that none of `nodes` has. They never fit: no fault of
/// the file, but users should know.
#[must_use]
pub fn pods_of_unknown_models(nodes: &[TraceNode], pods: &[TracePod]) -> usize {
    let models: BTreeSet<ModelName> =
        nodes.iter().filter(|node| node.gpus > 0).flat_map(TraceNode::products).collect();
    let mut known: BTreeMap<&[String], bool> = BTreeMap::new();
    let specs = pods.iter().filter(|pod| pod.num_gpu > 0).map(|pod| pod.gpu_spec.as_slice());
    let unknown = specs.filter(|spec| {
        *known.entry(*spec).or_insert_with(|| {
            let filter = ModelFilter::new(spec.iter().map(String::as_str));
            !filter.is_any() && !models.iter().any(|model| filter.matches(model))
        })
    });
    unknown.count()
}

/// Gives the pods that request no share the one that figures count: what the request is of the
/// smallest device of these nodes that is large enough, or a whole GPU if none is.
pub fn size_up(nodes: &[TraceNode], pods: &mut [TracePod]) {
    if pods.iter().all(|pod| pod.unsized_amount().is_none()) {
        return;
    }
    let classes: BTreeSet<DeviceClass> = nodes
        .iter()
        .flat_map(|node| {
            let devices = node.devices(0).unwrap_or_default();
            devices.into_iter().map(|device| DeviceClass::of(&device.device, node.rule()))
        })
        .collect();
    let mut known: BTreeMap<GpuRequest, u32> = BTreeMap::new();
    for pod in pods.iter_mut().filter(|pod| pod.unsized_amount().is_some()) {
        let Some(request) = pod.request() else { continue };
        pod.gpu_milli =
            *known.entry(request).or_insert_with_key(|request| largest_milli(request, &classes));
    }
}

/// The largest share that a request takes of a device of these classes, in thousandths.
fn largest_milli(request: &GpuRequest, classes: &BTreeSet<DeviceClass>) -> u32 {
    let demands = classes.iter().filter_map(|class| request.demand_on(class).ok());
    milli_up(demands.map(|demand| demand.share).max().unwrap_or(Share::WHOLE))
}

/// Reads the node file at `path`, in the file's order.
///
/// # Errors
/// Any [`TraceError`].
pub fn read_nodes(path: &Path) -> Result<Vec<TraceNode>, TraceError> {
    let file = path.display().to_string();
    parse_nodes(&file, open(path, &file)?)
}

/// Reads the pod file at `path`, in the file's order.
///
/// # Errors
/// Any [`TraceError`].
pub fn read_pods(path: &Path) -> Result<Vec<TracePod>, TraceError> {
    let file = path.display().to_string();
    parse_pods(&file, open(path, &file)?)
}

fn open(path: &Path, file: &str) -> Result<File, TraceError> {
    File::open(path).map_err(|source| TraceError::Open(file.to_owned(), source))
}

/// Reads nodes from `reader`; `file` is its name in errors.
///
/// The name is in the column `sn` or, without one, `name`.
///
/// # Errors
/// Any [`TraceError`] except `Open`.
pub fn parse_nodes(file: &str, reader: impl Read) -> Result<Vec<TraceNode>, TraceError> {
    let mut table = CsvTable::new(file, reader)?;
    let name = if table.has("sn") { "sn" } else { "name" };
    if name == "sn" {
        table.ignore("name");
    }
    table.check(&NODE_COLUMNS.replacen("sn", name, 1), 5)?;
    table.rows(node_of, |node| &node.name)
}

/// Reads pods from `reader`; `file` is its name in errors.
///
/// The columns `gpu_spec`, `creation_time` and `deletion_time` may be absent, like all of
/// [`crate::trace::dimensions`].
///
/// # Errors
/// Any [`TraceError`] except `Open`.
pub fn parse_pods(file: &str, reader: impl Read) -> Result<Vec<TracePod>, TraceError> {
    let mut table = CsvTable::new(file, reader)?;
    table.check(POD_COLUMNS, 5)?;
    table.rows(pod_of, |pod| &pod.name)
}

/// A row of a node file.
fn node_of(row: TableRow<'_>) -> Result<TraceNode, TraceError> {
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
            let Some(memory) = node.row().memory_of_profile(gpu, &instance.profile) else {
                return row.refuse("mig", INSTANCES);
            };
            instance.memory = memory;
        }
    }
    if let Some(more) =
        node.more.as_mut().filter(|_| instances.iter().any(|of_gpu| !of_gpu.is_empty()))
    {
        more.instances = instances;
    }
    if node.more.as_deref() == Some(&MoreOfNode::default()) {
        node.more = None;
    }
    check_devices(&row, &node)?;
    Ok(node)
}

/// Refuses a list that has not one value for each GPU, and more devices than a node can have.
fn check_counts(row: &TableRow<'_>, gpus: u32, more: &MoreOfNode) -> Result<(), TraceError> {
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
fn check_devices(row: &TableRow<'_>, node: &TraceNode) -> Result<(), TraceError> {
    let Some(more) = &node.more else { return Ok(()) };
    let devices = node.devices(0).or_else(|error| row.refuse("mig", error))?;
    let known: BTreeSet<DeviceAt> = devices.iter().map(|device| device.at).collect();
    if !more.unavailable.is_subset(&known) {
        return row.refuse("unavailable", BTreeSet::<DeviceAt>::allowed());
    }
    if !more.other_use.keys().all(|device| known.contains(device)) {
        return row.refuse("other_use_mib", "devices of the node, such as `0:512|1.2:64`");
    }
    let fault = match RowOfNode::inventory(&devices) {
        Err(error) => error.to_string(),
        Ok(inventory) => {
            let is_listed = |id: &DeviceId| {
                devices
                    .iter()
                    .any(|device| device.device.id == *id && more.unavailable.contains(&device.at))
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
fn pod_of(mut row: TableRow<'_>) -> Result<TracePod, TraceError> {
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
    } else if columns.gpu_milli != Some(Share::ZERO) {
        return row.refuse("gpu_milli", 0);
    }
    more.placed = placed(&row)?;
    pod.more = Some(Box::new(more)).filter(|more| **more != MoreOfPod::default());
    Ok(pod)
}

/// The share in thousandths, rounded up, and the amount if that does not say all.
fn amount(
    row: &TableRow<'_>,
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

fn limit(row: &TableRow<'_>, columns: &GpuColumns) -> Result<Option<Limit>, TraceError> {
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

fn placed(row: &TableRow<'_>) -> Result<Option<TracePlacement>, TraceError> {
    let placed: TracePlacement = row.part()?;
    if !placed.node.is_empty() {
        return Ok(Some(placed));
    }
    match ["devices", "placed_isolation"].into_iter().find(|column| !row.text(column).is_empty()) {
        Some(column) => row.refuse(column, "nothing without a `node`"),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests;
