//! A running cluster as a trace: nodes, and the requests of its pods, in the files that
//! [`crate::sim::trace::read`] reads.
//!
//! The format can express less than a cluster: whole GPUs, or a share of one in thousandths. Other
//! requests are written as the nearest demand, or left out, and counted in [`Note`]s. This module
//! makes no calls and writes no files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::hardware::device::ModelName;
use crate::hardware::units::{HostAmount, MemMib, Share};
use crate::model::request::{Amount, GpuRequest};
use crate::sim::trace::read::{CPU_MILLI, MEMORY_MIB, TraceNode, TracePod};

/// The longest name of a row.
const NAME_BYTES_MAX: usize = 253;

/// A node as the cluster describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterNode {
    /// Its name.
    pub name: String,
    /// CPU and host memory that it offers to pods.
    pub host: HostAmount,
    /// Its GPUs.
    pub gpus: Vec<ClusterGpu>,
    /// GPUs in MIG mode.
    pub mig_gpus: usize,
}

/// A GPU that can be shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterGpu {
    /// Product name.
    pub model: String,
    /// Memory that can be allocated.
    pub memory: MemMib,
}

/// A pod that runs or waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterPod {
    /// `namespace/name`.
    pub name: String,
    /// Its node; `None` while it waits.
    pub node: Option<String>,
    /// What it requests of the node outside its GPUs.
    pub host: HostAmount,
    /// What it requests of GPUs.
    pub gpu: Option<GpuRequest>,
    /// When it was created, in seconds since 1970, if known.
    pub created_unix_seconds: Option<u64>,
}

/// How rows are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// As in the cluster, `/` written as `.`.
    Kept,
    /// `node-1`, `pod-1` and so on.
    Anonymous,
}

/// What the format cannot express.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Note {
    /// A pod requests memory of a GPU.
    Memory,
    /// A pod requests more memory than any GPU here has.
    MemoryTooLarge,
    /// A pod requests a share of each of several GPUs.
    SharesOfSeveral,
    /// A share has more than three decimals.
    FineShare,
    /// A pod requests MIG instances or replicas.
    OtherDevice,
    /// A GPU is in MIG mode.
    MigGpu,
    /// A GPU is of another model than most of its node.
    OtherModel,
    /// A node has no GPU.
    NoGpu,
    /// A pod requests no GPU and runs on a node that is not written.
    Elsewhere,
    /// An amount of CPU or host memory that no machine has.
    Absurd,
    /// A name that the format does not allow.
    Name,
}

impl Note {
    /// The note on `count` cases.
    fn text(self) -> &'static str {
        match self {
            Self::Memory => "pods request GPU memory: written as the share it is of their GPU",
            Self::MemoryTooLarge => {
                "pods request more GPU memory than any GPU here has: written as whole GPUs"
            }
            Self::SharesOfSeveral => {
                "pods request a share of each of several GPUs: written as a pod per GPU"
            }
            Self::FineShare => "shares have more than three decimals: rounded up",
            Self::OtherDevice => "pods request MIG instances or replicas: left out",
            Self::MigGpu => "GPUs are cut into MIG instances: left out",
            Self::OtherModel => {
                "GPUs have another model than most of their node: written as that model"
            }
            Self::NoGpu => "nodes without a GPU: left out",
            Self::Elsewhere => "pods without a GPU run on none of the nodes written: left out",
            Self::Absurd => "amounts of CPU or memory exceed any machine: cut",
            Self::Name => "names cannot be written: replaced by a number",
        }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// A cluster in the trace format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Nodes with GPUs, by name.
    pub nodes: Vec<TraceNode>,
    /// Pods in the order in which they were created; those with an unknown time come first, by
    /// name.
    pub pods: Vec<TracePod>,
    /// What the format could not express, with the number of cases.
    pub notes: BTreeMap<Note, usize>,
}

impl Snapshot {
    /// Makes a snapshot. Nodes without GPUs are left out, and pods without a GPU that run on them.
    #[must_use]
    pub fn of(mut nodes: Vec<ClusterNode>, mut pods: Vec<ClusterPod>, names: Names) -> Self {
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        pods.sort_by(|a, b| {
            (a.created_unix_seconds, &a.name).cmp(&(b.created_unix_seconds, &b.name))
        });
        let mut writer = Writer { notes: BTreeMap::new() };
        nodes.retain(|node| {
            writer.note(Note::MigGpu, node.mig_gpus);
            writer.note(Note::NoGpu, usize::from(node.gpus.is_empty() && node.mig_gpus == 0));
            !node.gpus.is_empty()
        });
        let by_name: BTreeMap<&str, &ClusterNode> =
            nodes.iter().map(|node| (node.name.as_str(), node)).collect();
        let begin = pods.iter().filter_map(|pod| pod.created_unix_seconds).min().unwrap_or(0);
        let mut rows: Vec<TracePod> =
            pods.iter().flat_map(|pod| writer.pods(pod, &by_name, begin)).collect();
        let mut node_rows: Vec<TraceNode> = nodes.iter().map(|node| writer.node(node)).collect();
        let node_names = node_rows.iter_mut().map(|row| &mut row.name);
        writer.rename(node_names, "node", names);
        writer.rename(rows.iter_mut().map(|row| &mut row.name), "pod", names);
        Self { nodes: node_rows, pods: rows, notes: writer.notes }
    }

    /// The node file.
    ///
    /// # Errors
    /// None that is known: rows are written to memory.
    pub fn nodes_csv(&self) -> Result<Vec<u8>, csv::Error> {
        let rows = self.nodes.iter().map(|node| {
            let numbers = [node.cpu_milli, node.memory_mib, u64::from(node.gpus)];
            let [cpu, memory, gpus] = numbers.map(|number| number.to_string());
            [node.name.clone(), cpu, memory, gpus, node.model.clone()]
        });
        table(["sn", "cpu_milli", "memory_mib", "gpu", "model"], rows)
    }

    /// The pod file. A pod that still runs or waits has no time of deletion.
    ///
    /// # Errors
    /// None that is known: rows are written to memory.
    pub fn pods_csv(&self) -> Result<Vec<u8>, csv::Error> {
        let header = [
            "name",
            "cpu_milli",
            "memory_mib",
            "num_gpu",
            "gpu_milli",
            "gpu_spec",
            "creation_time",
            "deletion_time",
        ];
        let rows = self.pods.iter().map(|pod| {
            let numbers =
                [pod.cpu_milli, pod.memory_mib, u64::from(pod.num_gpu), u64::from(pod.gpu_milli)];
            let [cpu, memory, gpus, milli] = numbers.map(|number| number.to_string());
            let time = |time: Option<u64>| time.map(|time| time.to_string()).unwrap_or_default();
            let models = pod.gpu_spec.join("|");
            let times = (time(pod.creation_time), time(pod.deletion_time));
            [pod.name.clone(), cpu, memory, gpus, milli, models, times.0, times.1]
        });
        table(header, rows)
    }
}

fn table<const COLUMNS: usize>(
    header: [&str; COLUMNS],
    rows: impl Iterator<Item = [String; COLUMNS]>,
) -> Result<Vec<u8>, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(header)?;
    for row in rows {
        writer.write_record(row)?;
    }
    writer.into_inner().map_err(|error| error.into_error().into())
}

/// Writes rows and counts what they cannot say.
struct Writer {
    notes: BTreeMap<Note, usize>,
}

impl Writer {
    fn note(&mut self, note: Note, cases: usize) {
        if cases > 0 {
            *self.notes.entry(note).or_default() += cases;
        }
    }

    /// CPU and host memory, within what the format allows.
    fn host(&mut self, host: HostAmount) -> (u64, u64) {
        let amounts = (host.cpu.milli(), host.memory.mib());
        let cut = (amounts.0.min(*CPU_MILLI.end()), amounts.1.min(*MEMORY_MIB.end()));
        self.note(Note::Absurd, usize::from(cut != amounts));
        cut
    }

    fn node(&mut self, node: &ClusterNode) -> TraceNode {
        let mut models: BTreeMap<&str, usize> = BTreeMap::new();
        for gpu in &node.gpus {
            *models.entry(&gpu.model).or_default() += 1;
        }
        let most = models.iter().max_by_key(|(_, gpus)| **gpus);
        let (model, of_it) = most.map_or(("", 0), |(model, gpus)| (*model, *gpus));
        self.note(Note::OtherModel, node.gpus.len() - of_it);
        let (cpu_milli, memory_mib) = self.host(node.host);
        TraceNode {
            name: node.name.clone(),
            cpu_milli,
            memory_mib,
            gpus: u32::try_from(node.gpus.len()).unwrap_or(u32::MAX),
            model: written_model(model),
        }
    }

    /// The rows of a pod: usually one.
    fn pods(
        &mut self,
        pod: &ClusterPod,
        nodes: &BTreeMap<&str, &ClusterNode>,
        begin: u64,
    ) -> Vec<TracePod> {
        let (cpu_milli, memory_mib) = self.host(pod.host);
        let row = TracePod {
            name: pod.name.clone(),
            cpu_milli,
            memory_mib,
            num_gpu: 0,
            gpu_milli: 0,
            gpu_spec: Vec::new(),
            creation_time: pod.created_unix_seconds.map(|created| created - begin),
            deletion_time: None,
        };
        let Some(request) = &pod.gpu else {
            let is_here = pod.node.as_deref().is_some_and(|node| nodes.contains_key(node));
            self.note(Note::Elsewhere, usize::from(!is_here));
            return if is_here { vec![row] } else { Vec::new() };
        };
        let Some(share) = self.share(pod, request, nodes) else { return Vec::new() };
        let count = request.count.get();
        let gpu_milli = self.milli(share);
        let gpu_spec = request.models.names().map(written_model).collect();
        let row = TracePod { num_gpu: count, gpu_milli, gpu_spec, ..row };
        if count == 1 || gpu_milli == 1000 {
            return vec![row];
        }
        self.note(Note::SharesOfSeveral, 1);
        let part = |amount: u64| amount.div_ceil(u64::from(count));
        let piece = |at: u32| TracePod {
            name: format!("{}.gpu{at}", pod.name),
            cpu_milli: part(cpu_milli),
            memory_mib: part(memory_mib),
            num_gpu: 1,
            ..row.clone()
        };
        (1..=count).map(piece).collect()
    }

    /// The share of each GPU that the pod takes; `None` if the format cannot express it.
    fn share(
        &mut self,
        pod: &ClusterPod,
        request: &GpuRequest,
        nodes: &BTreeMap<&str, &ClusterNode>,
    ) -> Option<Share> {
        let (share, memory) = match &request.amount {
            Amount::Whole => return Some(Share::WHOLE),
            Amount::Fraction(share) => return Some(*share),
            Amount::Memory(memory) => (Share::ZERO, *memory),
            Amount::FractionAndMemory(share, memory) => (*share, *memory),
            Amount::MigInstance(_) | Amount::SharedSlot => {
                self.note(Note::OtherDevice, 1);
                return None;
            }
        };
        let Some(gpu) = smallest_gpu(pod, request, memory, nodes) else {
            self.note(Note::MemoryTooLarge, 1);
            return Some(Share::WHOLE);
        };
        // The share includes this much memory anyway.
        if memory <= share.of(gpu) {
            return Some(share);
        }
        self.note(Note::Memory, 1);
        Some(share.max(Share::ratio(memory, gpu).unwrap_or(Share::WHOLE)))
    }

    /// Thousandths of a GPU, rounded up, at least one.
    fn milli(&mut self, share: Share) -> u32 {
        let millionths = share.millionths();
        self.note(Note::FineShare, usize::from(!millionths.is_multiple_of(1000)));
        u32::try_from(millionths.div_ceil(1000).clamp(1, 1000)).unwrap_or(1000)
    }

    /// Gives rows names that the format allows, no two the same.
    fn rename<'n>(&mut self, rows: impl Iterator<Item = &'n mut String>, kind: &str, names: Names) {
        let mut taken = BTreeSet::new();
        for (at, name) in rows.enumerate() {
            let number = format!("{kind}-{}", at + 1);
            let kept = Some(name.replace('/', "."))
                .filter(|kept| names == Names::Kept && is_legal(kept) && !taken.contains(kept));
            self.note(Note::Name, usize::from(names == Names::Kept && kept.is_none()));
            *name = kept.unwrap_or(number);
            while !taken.insert(name.clone()) {
                name.push_str("-again");
            }
        }
    }
}

/// Memory of the smallest GPU that the pod could have: of its node, or of any while it waits.
fn smallest_gpu(
    pod: &ClusterPod,
    request: &GpuRequest,
    memory: MemMib,
    nodes: &BTreeMap<&str, &ClusterNode>,
) -> Option<MemMib> {
    let own = pod.node.as_deref().and_then(|node| nodes.get(node));
    let gpus = nodes.values().filter(|node| own.is_none_or(|own| own.name == node.name));
    gpus.flat_map(|node| &node.gpus)
        .filter(|gpu| request.models.matches(&ModelName::new(gpu.model.as_str())))
        .map(|gpu| gpu.memory)
        .filter(|capacity| *capacity >= memory)
        .min()
}

fn is_legal(name: &str) -> bool {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(legal)
}

/// A model name without the characters that separate models in a file.
fn written_model(model: &str) -> String {
    let clean = model.chars().map(|c| if c.is_control() || c == '|' { ' ' } else { c });
    clean.collect::<String>().trim().chars().take(NAME_BYTES_MAX / 4).collect()
}

#[cfg(test)]
mod tests;
