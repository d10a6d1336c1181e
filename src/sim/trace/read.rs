//! Reads the two CSV files of a workload trace: nodes, and the pods that request their GPUs.
//!
//! The format is that of the public trace `cluster-trace-gpu-v2023` (repository
//! `alibaba/clusterdata`), the data of the FGD paper, and more optional columns for all else that
//! gpupack places by ([`crate::sim::trace::dimensions`]). Columns are found by the header, so their
//! order is free and other columns are ignored. A trace comes from outside: every value is checked
//! against a range, and the sum of any column fits in 64 bits. This module never shuffles, sorts or
//! repairs: it returns what the file says.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;

use crate::hardware::device::{InventoryError, ModelFilter, ModelName};
use crate::hardware::device_class::DeviceClass;
use crate::hardware::pool::PoolRule;
use crate::hardware::units::Share;
use crate::model::request::{Amount, GpuRequest};
use crate::sim::trace::dimensions::{DeviceAt, MoreOfNode, MoreOfPod, TracePlacement, milli_up};
use crate::sim::trace::inventory::{RowOfNode, RowOfPod, TraceDevice};
use crate::sim::trace::optional::{NodeColumns, PodColumns};
use crate::sim::trace::table::{Table, TraceError};

/// Up to 10,000 cores on a node.
pub(crate) const CPU_MILLI: RangeInclusive<u64> = 0..=10_000_000;
/// Up to 1 PiB on a node.
pub(crate) const MEMORY_MIB: RangeInclusive<u64> = 0..=1 << 30;
/// GPUs of a node or of a pod; NVML itself supports far fewer.
const GPUS: RangeInclusive<u32> = 0..=256;
/// Seconds; wide enough for an epoch.
const SECONDS: RangeInclusive<u64> = 0..=9_999_999_999;

/// One row of the node file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TraceNode {
    /// Unique in the file.
    pub name: String,
    /// CPU, in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory, in MiB.
    pub memory_mib: u64,
    /// How many GPUs the node has; 0 for a node without any.
    pub gpus: u32,
    /// GPU model, as pods name it in their `gpu_spec`; may be empty.
    pub model: String,
    /// What the optional columns say, if anything.
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
        let is_instance = |at| usize::try_from(at).is_ok_and(|at: usize| at < instances);
        at.gpu < self.gpus && at.instance.map_or(instances == 0, is_instance)
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
        devices.iter().map(|it| DeviceClass::of(&it.device, self.rule()).product()).collect()
    }

    fn row(&self) -> RowOfNode<'_> {
        RowOfNode { gpus: self.gpus, model: &self.model, more: self.more.as_deref() }
    }
}

/// One row of the pod file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TracePod {
    /// Unique in the file.
    pub name: String,
    /// CPU request, in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory request, in MiB.
    pub memory_mib: u64,
    /// How many GPUs the pod requests; 0 for a CPU-only pod.
    pub num_gpu: u32,
    /// Share of each GPU, in thousandths, rounded up: 0 without GPUs. For a pod that requests no
    /// share this is what the amount is of one, see [`size_up`]; figures count it.
    pub gpu_milli: u32,
    /// Models that the pod accepts, in the file's order, repetitions kept; empty accepts any.
    pub gpu_spec: Vec<String>,
    /// When the pod was submitted, in seconds since the trace began, if the file says so.
    pub creation_time: Option<u64>,
    /// When the pod was gone, in seconds since the trace began, if the file says so.
    pub deletion_time: Option<u64>,
    /// What the optional columns say, if anything.
    pub more: Option<Box<MoreOfPod>>,
}

impl TracePod {
    /// What it requests of GPUs; `None` for a pod without a GPU.
    #[must_use]
    pub fn request(&self) -> Option<GpuRequest> {
        let TracePod { num_gpu, gpu_milli, gpu_spec, more, .. } = self;
        let more = more.as_deref();
        RowOfPod { num_gpu: *num_gpu, gpu_milli: *gpu_milli, gpu_spec, more }.request()
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
            devices.into_iter().map(|it| DeviceClass::of(&it.device, node.rule()))
        })
        .collect();
    let mut known: BTreeMap<GpuRequest, u32> = BTreeMap::new();
    for pod in pods.iter_mut().filter(|pod| pod.unsized_amount().is_some()) {
        let Some(request) = pod.request() else { continue };
        let largest = |request: &GpuRequest| {
            let demands = classes.iter().filter_map(|class| request.demand_on(class).ok());
            milli_up(demands.map(|demand| demand.share).max().unwrap_or(Share::WHOLE))
        };
        pod.gpu_milli = match known.get(&request) {
            Some(milli) => *milli,
            None => *known.entry(request.clone()).or_insert(largest(&request)),
        };
    }
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
    File::open(path).map_err(|source| TraceError::Open { file: file.to_owned(), source })
}

/// Reads nodes from `reader`; `file` is its name in errors.
///
/// The name is in the column `sn` or, without one, `name`.
///
/// # Errors
/// Any [`TraceError`] except `Open`.
pub fn parse_nodes(file: &str, reader: impl Read) -> Result<Vec<TraceNode>, TraceError> {
    let mut table = Table::new(file, reader)?;
    let name = match table.find("sn")? {
        Some(column) => column,
        None => table.require("name")?,
    };
    let [cpu, memory] = [table.require("cpu_milli")?, table.require("memory_mib")?];
    let [gpus, model] = [table.require("gpu")?, table.require("model")?];
    let optional = NodeColumns::find(&table)?;
    table.rows(name, |row| {
        let (gpus, model) = (row.number(gpus, GPUS)?, row.model(model)?);
        Ok(TraceNode {
            name: row.text(name).to_owned(),
            cpu_milli: row.number(cpu, CPU_MILLI)?,
            memory_mib: row.number(memory, MEMORY_MIB)?,
            more: optional.read(row, (gpus, &model))?,
            gpus,
            model,
        })
    })
}

/// Reads pods from `reader`; `file` is its name in errors.
///
/// The columns `gpu_spec`, `creation_time` and `deletion_time` may be absent, like all of
/// [`crate::sim::trace::dimensions`].
///
/// # Errors
/// Any [`TraceError`] except `Open`.
pub fn parse_pods(file: &str, reader: impl Read) -> Result<Vec<TracePod>, TraceError> {
    let mut table = Table::new(file, reader)?;
    let name = table.require("name")?;
    let [cpu, memory] = [table.require("cpu_milli")?, table.require("memory_mib")?];
    let num = table.require("num_gpu")?;
    let optional = PodColumns::find(&table)?;
    let spec = table.find("gpu_spec")?;
    let [created, deleted] = [table.find("creation_time")?, table.find("deletion_time")?];
    table.rows(name, |row| {
        let num_gpu = row.number(num, GPUS)?;
        let (cpu_milli, memory_mib) =
            (row.number(cpu, CPU_MILLI)?, row.number(memory, MEMORY_MIB)?);
        let requested = optional.read(row, num_gpu)?;
        Ok(TracePod {
            name: row.text(name).to_owned(),
            cpu_milli,
            memory_mib,
            num_gpu,
            gpu_milli: requested.gpu_milli,
            more: requested.more,
            gpu_spec: spec.map_or(Ok(Vec::new()), |column| row.models(column))?,
            creation_time: created.map_or(Ok(None), |column| row.number_if_any(column, SECONDS))?,
            deletion_time: deleted.map_or(Ok(None), |column| row.number_if_any(column, SECONDS))?,
        })
    })
}

#[cfg(test)]
mod tests;
