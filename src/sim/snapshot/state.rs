//! A running cluster as a trace: nodes, and the requests of its pods, in the files that
//! [`crate::trace::read`] reads.
//!
//! Amounts are written as they are. What a source does not say, or the format cannot express, is
//! counted in [`Note`]s. This module makes no calls and writes no files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::trace::dimensions::{DeviceAt, MoreOfNode, MoreOfPod, TraceInstance, TracePlacement};
use crate::trace::forms::{NAME_BYTES_MAX, is_name, milli_up, profile};
use crate::trace::read::{MAX_CPU_MILLI, MAX_MEMORY_MIB, TraceNode, TracePod};
use crate::trace::write::{nodes_csv, pods_csv};
use engine::hardware::pool::{ConfiguredIsolation, PoolRule};
use engine::model::request::{Amount, GpuRequest};
use wire::ids::MigProfile;
use wire::units::{Demand, HostAmount, MemMib};

/// A node as the cluster describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterNode {
    pub name: String,
    /// CPU and host memory that it offers.
    pub host: HostAmount,
    pub gpus: Vec<ClusterGpu>,
    /// GPUs in MIG mode whose instances are not known.
    pub mig_gpus: usize,
    /// How its pool shares the devices.
    pub rule: PoolRule,
}

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterGpu {
    pub model: String,
    /// Memory that can be allocated.
    pub memory: MemMib,
    pub instances: Vec<ClusterInstance>,
    /// Whether it takes no new pods.
    pub is_unavailable: bool,
    /// Memory in use beyond what is allocated.
    pub other_use: MemMib,
}

/// A MIG instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterInstance {
    pub profile: MigProfile,
    /// Memory that can be allocated.
    pub memory: MemMib,
    /// Whether it takes no new pods.
    pub is_unavailable: bool,
    /// Memory in use beyond what is allocated.
    pub other_use: MemMib,
}

/// A pod that runs or waits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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
    pub priority: i32,
    /// What it holds of the devices of its node, if known, and the isolation it was placed with.
    pub held: Option<(Vec<(DeviceAt, Demand)>, ConfiguredIsolation)>,
}

/// How rows are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowNames {
    /// As in the cluster, `/` written as `.`.
    Kept,
    /// `node-1`, `pod-1` and so on.
    Anonymous,
}

/// What the format cannot express.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Note {
    /// A GPU is in MIG mode.
    MigGpu,
    /// A node has no GPU.
    NoGpu,
    /// A pod requests no GPU and runs on a node that is not written.
    Elsewhere,
    /// A pod requests GPUs and runs on a node that is not written.
    OnOtherNode,
    /// An amount of CPU or host memory that no machine has.
    Absurd,
    /// A name that the format does not allow.
    Name,
}

impl Note {
    fn text(self) -> &'static str {
        match self {
            Self::MigGpu => "GPUs are cut into MIG instances: left out",
            Self::NoGpu => "nodes without a GPU: left out",
            Self::Elsewhere => "pods without a GPU run on none of the nodes written: left out",
            Self::OnOtherNode => "pods run on none of the nodes written: written as pods that wait",
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
    pub fn of(mut nodes: Vec<ClusterNode>, mut pods: Vec<ClusterPod>, names: RowNames) -> Self {
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
        let begin = pods.iter().filter_map(|pod| pod.created_unix_seconds).min().unwrap_or(0);
        let mut node_rows: Vec<TraceNode> = nodes.iter().map(|node| writer.node(node)).collect();
        let node_names = node_rows.iter_mut().map(|row| &mut row.name);
        writer.rename(node_names, "node", names);
        let written = nodes.iter().zip(&node_rows);
        let written: BTreeMap<&str, &str> =
            written.map(|(node, row)| (node.name.as_str(), row.name.as_str())).collect();
        let rows = pods.iter().filter_map(|pod| writer.pod(pod, &written, begin));
        let mut rows: Vec<TracePod> = rows.collect();
        writer.rename(rows.iter_mut().map(|row| &mut row.name), "pod", names);
        Self { nodes: node_rows, pods: rows, notes: writer.notes }
    }

    /// The node file.
    ///
    /// # Errors
    /// None that is known: rows are written to memory.
    pub fn nodes_csv(&self) -> Result<Vec<u8>, csv::Error> {
        nodes_csv(&self.nodes)
    }

    /// The pod file. A pod that still runs or waits has no time of deletion.
    ///
    /// # Errors
    /// None that is known: rows are written to memory.
    pub fn pods_csv(&self) -> Result<Vec<u8>, csv::Error> {
        pods_csv(&self.pods)
    }
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
        let cut = (amounts.0.min(MAX_CPU_MILLI), amounts.1.min(MAX_MEMORY_MIB));
        self.note(Note::Absurd, usize::from(cut != amounts));
        cut
    }

    fn node(&mut self, node: &ClusterNode) -> TraceNode {
        let mut models: BTreeMap<String, usize> = BTreeMap::new();
        for gpu in &node.gpus {
            *models.entry(written_model(&gpu.model)).or_default() += 1;
        }
        let most = models.iter().max_by_key(|(_, gpus)| **gpus);
        let model = most.map(|(model, _)| model.clone()).unwrap_or_default();
        let (cpu_milli, memory_mib) = self.host(node.host);
        let more = more_of_node(node, models.len() > 1);
        TraceNode {
            name: node.name.clone(),
            cpu_milli,
            memory_mib,
            gpus: u32::try_from(node.gpus.len()).unwrap_or(u32::MAX),
            model,
            more: (more != MoreOfNode::default()).then(|| Box::new(more)),
        }
    }

    /// The row of a pod; `None` for one without a GPU on none of the nodes. `nodes` has the names
    /// that nodes are written with.
    fn pod(
        &mut self,
        pod: &ClusterPod,
        nodes: &BTreeMap<&str, &str>,
        begin: u64,
    ) -> Option<TracePod> {
        let (cpu_milli, memory_mib) = self.host(pod.host);
        let node = pod.node.as_deref().and_then(|node| nodes.get(node));
        if pod.gpu.is_none() && node.is_none() {
            self.note(Note::Elsewhere, 1);
            return None;
        }
        self.note(Note::OnOtherNode, usize::from(pod.node.is_some() && node.is_none()));
        let placed = node.zip(pod.held.clone()).map(|(node, (devices, isolation))| {
            TracePlacement { node: (*node).to_owned(), devices, isolation }
        });
        let mut more = MoreOfPod { placed, priority: pod.priority, ..MoreOfPod::default() };
        let mut row = TracePod {
            name: pod.name.clone(),
            cpu_milli,
            memory_mib,
            creation_time: pod.created_unix_seconds.map(|created| created - begin),
            ..TracePod::default()
        };
        if let Some(request) = &pod.gpu {
            (row.gpu_milli, more.amount) = written_amount(&request.amount);
            row.num_gpu = request.count.get();
            row.gpu_spec = request.models.names().map(written_model).collect();
            more.isolation = request.isolation;
            more.limit = request.limit;
            more.policy = request.policy;
            more.min_memory = request.min_memory;
            more.by_instance = request.by_instance;
        }
        row.more = (more != MoreOfPod::default()).then(|| Box::new(more));
        Some(row)
    }

    /// Gives rows names that the format allows, no two the same.
    fn rename<'n>(
        &mut self,
        rows: impl Iterator<Item = &'n mut String>,
        kind: &str,
        names: RowNames,
    ) {
        let mut taken = BTreeSet::new();
        for (at, name) in rows.enumerate() {
            let number = format!("{kind}-{}", at + 1);
            let kept = Some(name.replace('/', "."))
                .filter(|kept| names == RowNames::Kept && is_name(kept) && !taken.contains(kept));
            self.note(Note::Name, usize::from(names == RowNames::Kept && kept.is_none()));
            *name = kept.unwrap_or(number);
            while !taken.insert(name.clone()) {
                name.push_str("-again");
            }
        }
    }
}

fn more_of_node(node: &ClusterNode, are_mixed: bool) -> MoreOfNode {
    let mut more = MoreOfNode { rule: node.rule, ..MoreOfNode::default() };
    more.gpu_memory = node.gpus.iter().map(|gpu| gpu.memory.max(MemMib::new(1))).collect();
    if more.gpu_memory.iter().all(|memory| *memory == more.gpu_memory[0]) {
        more.gpu_memory.truncate(1);
    }
    if are_mixed {
        more.gpu_models = node.gpus.iter().map(|gpu| written_model(&gpu.model)).collect();
    }
    let mut note = |at, is_unavailable: bool, other_use: MemMib| {
        if is_unavailable {
            more.unavailable.insert(at);
        }
        if other_use > MemMib::ZERO {
            more.other_use.insert(at, other_use);
        }
    };
    for (gpu, found) in (0..).zip(&node.gpus) {
        note(DeviceAt { gpu, instance: None }, found.is_unavailable, found.other_use);
        for (at, instance) in (0..).zip(&found.instances) {
            let at = DeviceAt { gpu, instance: Some(at) };
            note(at, instance.is_unavailable, instance.other_use);
        }
    }
    if node.gpus.iter().any(|gpu| !gpu.instances.is_empty()) {
        let by_gpu = node.gpus.iter().map(|gpu| gpu.instances.iter().map(written_instance));
        more.instances = by_gpu.map(Iterator::collect).collect();
    }
    more
}

/// The share in thousandths, and the amount if that does not say all: as it is read again.
fn written_amount(amount: &Amount) -> (u32, Option<Amount>) {
    match amount {
        Amount::Whole => (1000, None),
        Amount::Fraction(share) if share.millionths().is_multiple_of(1000) => {
            (milli_up(*share), None)
        }
        Amount::Fraction(share) | Amount::FractionAndMemory(share, _) => {
            (milli_up(*share), Some(amount.clone()))
        }
        Amount::Memory(_) | Amount::SharedSlot => (0, Some(amount.clone())),
        Amount::MigInstance(wanted) => (1000, Some(Amount::MigInstance(written_profile(wanted)))),
    }
}

fn written_instance(instance: &ClusterInstance) -> TraceInstance {
    let memory = instance.memory.max(MemMib::new(1));
    TraceInstance { profile: written_profile(&instance.profile), memory }
}

/// A profile with a name that the format allows.
fn written_profile(known: &MigProfile) -> MigProfile {
    let legal = known.as_str().chars().filter(|c| profile(&c.to_string()).is_some());
    let clean: String = legal.take(64).collect();
    profile(&clean).unwrap_or_else(|| MigProfile::new("unknown"))
}

/// A model name without the characters that separate models in a file.
fn written_model(model: &str) -> String {
    let clean = model.chars().map(|c| if c.is_control() || c == '|' { ' ' } else { c });
    clean.collect::<String>().trim().chars().take(NAME_BYTES_MAX / 4).collect()
}

#[cfg(test)]
mod tests;
