//! Reads the two CSV files of a workload trace: nodes, and the pods that request their GPUs.
//!
//! The format is that of the public trace `cluster-trace-gpu-v2023` (repository
//! `alibaba/clusterdata`), the data of the FGD paper. Columns are found by the header, so their
//! order is free and other columns are ignored. A trace comes from outside: every value is checked
//! against a range, and the sum of any column fits in 64 bits. This module never shuffles, sorts or
//! repairs: it returns what the file says.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;

use crate::hardware::device::{ModelFilter, ModelName};
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
#[derive(Debug, Clone, PartialEq, Eq)]
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
}

impl TraceNode {
    /// The node's GPU compute in thousandths of a GPU.
    #[must_use]
    pub fn capacity_milli(&self) -> u64 {
        u64::from(self.gpus) * 1000
    }
}

/// One row of the pod file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracePod {
    /// Unique in the file.
    pub name: String,
    /// CPU request, in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory request, in MiB.
    pub memory_mib: u64,
    /// How many GPUs the pod requests; 0 for a CPU-only pod.
    pub num_gpu: u32,
    /// Share of each GPU, in thousandths: 0 without GPUs, 1..=1000 of one, 1000 of each of several.
    pub gpu_milli: u32,
    /// Models that the pod accepts, in the file's order, repetitions kept; empty accepts any.
    pub gpu_spec: Vec<String>,
    /// When the pod was submitted, in seconds since the trace began, if the file says so.
    pub creation_time: Option<u64>,
    /// When the pod was gone, in seconds since the trace began, if the file says so.
    pub deletion_time: Option<u64>,
}

impl TracePod {
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
    let models = nodes.iter().filter(|node| node.gpus > 0).map(|node| node.model.as_str());
    let models: Vec<ModelName> =
        models.collect::<BTreeSet<_>>().into_iter().map(ModelName::new).collect();
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
    table.rows(name, |row| {
        Ok(TraceNode {
            name: row.text(name).to_owned(),
            cpu_milli: row.number(cpu, CPU_MILLI)?,
            memory_mib: row.number(memory, MEMORY_MIB)?,
            gpus: row.number(gpus, GPUS)?,
            model: row.model(model)?,
        })
    })
}

/// Reads pods from `reader`; `file` is its name in errors.
///
/// The columns `gpu_spec`, `creation_time` and `deletion_time` may be absent.
///
/// # Errors
/// Any [`TraceError`] except `Open`.
pub fn parse_pods(file: &str, reader: impl Read) -> Result<Vec<TracePod>, TraceError> {
    let mut table = Table::new(file, reader)?;
    let name = table.require("name")?;
    let [cpu, memory] = [table.require("cpu_milli")?, table.require("memory_mib")?];
    let [num, milli] = [table.require("num_gpu")?, table.require("gpu_milli")?];
    let spec = table.find("gpu_spec")?;
    let [created, deleted] = [table.find("creation_time")?, table.find("deletion_time")?];
    table.rows(name, |row| {
        let num_gpu = row.number(num, GPUS)?;
        let shares: RangeInclusive<u32> = match num_gpu {
            0 => 0..=0,
            1 => 1..=1000,
            2.. => 1000..=1000,
        };
        Ok(TracePod {
            name: row.text(name).to_owned(),
            cpu_milli: row.number(cpu, CPU_MILLI)?,
            memory_mib: row.number(memory, MEMORY_MIB)?,
            num_gpu,
            gpu_milli: row.number(milli, shares)?,
            gpu_spec: spec.map_or(Ok(Vec::new()), |column| row.models(column))?,
            creation_time: created.map_or(Ok(None), |column| row.number_if_any(column, SECONDS))?,
            deletion_time: deleted.map_or(Ok(None), |column| row.number_if_any(column, SECONDS))?,
        })
    })
}

#[cfg(test)]
mod tests;
