//! From a cluster and pods to the linear program whose maximum no packing exceeds.
//!
//! Equal nodes form a class and equal pods a type. The variables are how many pods of a type are on
//! a class; fractions of a pod are allowed. Each rule of real packings that is kept makes the bound
//! tighter. Each one that is left out makes it looser, never wrong. Kept are, per class: the sums
//! of CPU, host memory and GPUs, the models that a type accepts, and how many pods of a type one
//! node takes. Kept is, over the cluster, how GPUs can be cut: fractions on one GPU form a path
//! from 0 to at most 1 (the arc-flow model of Valério de Carvalho, "Exact solution of bin-packing
//! problems using column generation and branch-and-bound", 1999), and there are as many paths as
//! GPUs that are not taken whole. Left out is the node, and the class, of a path.

use std::collections::{BTreeMap, BTreeSet};

use crate::lp::{Limit, LinearProgram, LpError};
use sim::trace::read::{TraceNode, TracePod};
use wire::device::ModelFilter;
use wire::ids::ModelName;

/// Fractions are rounded down to this grid, in thousandths of a GPU.
const GRID_MILLI: u32 = 10;

/// Points of the grid on one GPU.
const GRID: usize = (1000 / GRID_MILLI) as usize;

/// Most pairs of type and class. The public traces have up to 6,500. For a larger cluster amounts
/// of CPU and host memory are rounded until it fits, of pods down, of nodes up.
const PAIRS_MAX: usize = 40_000;

/// Equal nodes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Class {
    cpu_milli: u64,
    memory_mib: u64,
    gpus: u32,
    model: String,
}

/// Equal pods.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct PodType {
    cpu_milli: u64,
    memory_mib: u64,
    num_gpu: u32,
    gpu_milli: u32,
    models: BTreeSet<String>,
}

/// Pods of one type.
#[derive(Debug, Clone, Copy, Default)]
struct Pods {
    arrived: u64,
    /// How many of them must be placed.
    forced: u64,
}

impl PodType {
    /// What a pod requests, in thousandths of a GPU.
    fn demand_milli(&self) -> u64 {
        u64::from(self.num_gpu) * u64::from(self.gpu_milli)
    }

    fn is_whole(&self) -> bool {
        self.num_gpu > 0 && self.gpu_milli >= 1000
    }

    /// The fraction on the grid; `None` for whole GPUs, no GPU, or less than a grid unit.
    fn grid_size(&self) -> Option<usize> {
        let units = usize::try_from(self.gpu_milli / GRID_MILLI).ok()?;
        (self.num_gpu == 1 && !self.is_whole() && units > 0).then_some(units)
    }

    /// Pods of this type that fit on one empty node of `class`.
    fn per_node(&self, class: &Class) -> u64 {
        let by_cpu = class.cpu_milli.checked_div(self.cpu_milli);
        let by_memory = class.memory_mib.checked_div(self.memory_mib);
        let by_gpu = match self.num_gpu {
            0 => None,
            _ if !self.accepts(&class.model) => Some(0),
            1 if !self.is_whole() => {
                Some(u64::from(class.gpus) * u64::from(1000 / self.gpu_milli.max(1)))
            }
            gpus => Some(u64::from(class.gpus / gpus)),
        };
        [by_cpu, by_memory, by_gpu].into_iter().flatten().min().unwrap_or(u64::MAX)
    }

    fn accepts(&self, model: &str) -> bool {
        let models = self.models.iter().map(String::as_str);
        ModelFilter::new(models).matches(&ModelName::new(model))
    }
}

/// No packing of `pods` on `nodes` allocates more than this, in thousandths of a GPU. The first
/// `forced` of them must be placed; any other may be left out.
///
/// # Errors
/// [`LpError::Infeasible`] if the forced pods do not fit, else what the solver reports.
pub(crate) fn most_allocated(
    nodes: &[TraceNode],
    pods: &[TracePod],
    forced: usize,
) -> Result<u64, LpError> {
    let (classes, kinds) = grouped(nodes, pods, forced);
    let gpus = program(&classes, &kinds).maximum()?;
    // Packings are whole thousandths. A value this little below one may be its rounding error.
    let milli = (gpus * 1000.0 + 1e-3).floor();
    let cluster: u64 = nodes.iter().map(TraceNode::capacity_milli).sum();
    let requested: u64 = pods.iter().map(TracePod::demand_milli).sum();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a proven maximum is finite, not negative and near the capacity"
    )]
    let milli = milli.max(0.0) as u64;
    Ok(milli.min(cluster).min(requested))
}

/// Nodes by class and pods by type, rounded if there would be too many.
fn grouped(
    nodes: &[TraceNode],
    pods: &[TracePod],
    forced: usize,
) -> (BTreeMap<Class, u64>, BTreeMap<PodType, Pods>) {
    let mut step = 1;
    loop {
        let classes = classes(nodes, step);
        let kinds = kinds(pods, forced, step);
        // With the largest step pods differ only in counts, shares and models.
        if classes.len() * kinds.len() <= PAIRS_MAX || step > 1 << 31 {
            return (classes, kinds);
        }
        step *= 2;
    }
}

/// Nodes per class, amounts rounded up to `step`.
fn classes(nodes: &[TraceNode], step: u64) -> BTreeMap<Class, u64> {
    let mut classes = BTreeMap::new();
    for node in nodes {
        let class = Class {
            cpu_milli: node.cpu_milli.next_multiple_of(step),
            memory_mib: node.memory_mib.next_multiple_of(step),
            gpus: node.gpus,
            model: node.model.clone(),
        };
        *classes.entry(class).or_default() += 1;
    }
    classes
}

/// Pods per type, amounts rounded down to `step`. Pods without a GPU that need not be placed only
/// take room away, so they are left out.
fn kinds(pods: &[TracePod], forced: usize, step: u64) -> BTreeMap<PodType, Pods> {
    let mut kinds: BTreeMap<PodType, Pods> = BTreeMap::new();
    for (at, pod) in pods.iter().enumerate() {
        let is_forced = at < forced;
        if pod.num_gpu == 0 && !is_forced {
            continue;
        }
        let kind = PodType {
            cpu_milli: pod.cpu_milli - pod.cpu_milli % step,
            memory_mib: pod.memory_mib - pod.memory_mib % step,
            num_gpu: pod.num_gpu,
            gpu_milli: pod.gpu_milli,
            models: pod.gpu_spec.iter().cloned().collect(),
        };
        let count = kinds.entry(kind).or_default();
        count.arrived += 1;
        count.forced += u64::from(is_forced);
    }
    kinds
}

/// Pods of one type on the nodes of one class.
struct Pair<'k> {
    variable: usize,
    kind: &'k PodType,
}

/// The linear program; its sum is in GPUs.
fn program(classes: &BTreeMap<Class, u64>, kinds: &BTreeMap<PodType, Pods>) -> LinearProgram {
    let mut lp = LinearProgram::default();
    let mut on_class: Vec<Vec<Pair<'_>>> = classes.iter().map(|_| Vec::new()).collect();
    for (kind, pods) in kinds {
        let mut anywhere = Vec::new();
        for ((class, nodes), on_class) in classes.iter().zip(&mut on_class) {
            let room = kind.per_node(class).saturating_mul(*nodes);
            if room == 0 {
                continue;
            }
            let upper = room.min(pods.arrived);
            let variable = lp.variable(kind.demand_milli() as f64 / 1000.0, upper as f64);
            if upper < pods.arrived {
                lp.row(vec![(variable, 1.0)], Limit::AtMost, upper as f64);
            }
            anywhere.push((variable, 1.0));
            on_class.push(Pair { variable, kind });
        }
        place(&mut lp, anywhere, *pods);
    }
    for ((class, nodes), pairs) in classes.iter().zip(&on_class) {
        fill(&mut lp, class, *nodes, pairs);
    }
    let gpus: u64 = classes.iter().map(|(class, nodes)| u64::from(class.gpus) * nodes).sum();
    cut(&mut lp, gpus, &on_class.into_iter().flatten().collect::<Vec<_>>());
    lp
}

/// Limits a type's pods over all classes.
fn place(lp: &mut LinearProgram, anywhere: Vec<(usize, f64)>, pods: Pods) {
    if pods.forced == pods.arrived {
        return lp.row(anywhere, Limit::Exactly, pods.arrived as f64);
    }
    if pods.forced > 0 {
        let taken = anywhere.iter().map(|(variable, one)| (*variable, -one)).collect();
        lp.row(taken, Limit::AtMost, -(pods.forced as f64));
    }
    lp.row(anywhere, Limit::AtMost, pods.arrived as f64);
}

/// What a pod requests of a resource, how much a node has, and the unit of both.
type Offer = (fn(&PodType) -> u64, u64, f64);

/// Limits the pods of a class by its nodes, in cores, GiB and GPUs: so factors are of one size.
fn fill(lp: &mut LinearProgram, class: &Class, nodes: u64, pairs: &[Pair<'_>]) {
    let offers: [Offer; 3] = [
        (|kind| kind.cpu_milli, class.cpu_milli, 1000.0),
        (|kind| kind.memory_mib, class.memory_mib, 1024.0),
        (PodType::demand_milli, u64::from(class.gpus) * 1000, 1000.0),
    ];
    for (requested, offered, unit) in offers {
        let terms: Vec<_> = pairs
            .iter()
            .filter(|pair| requested(pair.kind) > 0)
            .map(|pair| (pair.variable, requested(pair.kind) as f64 / unit))
            .collect();
        if !terms.is_empty() {
            lp.row(terms, Limit::AtMost, (offered * nodes) as f64 / unit);
        }
    }
}

/// How the cluster's GPUs are cut. An arc of length `s` from `v` is a pod of size `s` on a GPU of
/// which larger or equal ones already fill `v`. The next arc starts at its end.
fn cut(lp: &mut LinearProgram, gpus: u64, pairs: &[Pair<'_>]) {
    let mut of_size: BTreeMap<usize, Vec<(usize, f64)>> = BTreeMap::new();
    let mut starts: Vec<(usize, f64)> = Vec::new();
    for pair in pairs {
        if let Some(size) = pair.kind.grid_size() {
            of_size.entry(size).or_default().push((pair.variable, 1.0));
        } else if pair.kind.is_whole() {
            starts.push((pair.variable, f64::from(pair.kind.num_gpu)));
        }
    }
    // Terms of "what leaves the point came there".
    let mut points: Vec<Vec<(usize, f64)>> = vec![Vec::new(); GRID + 1];
    let mut is_reached = [false; GRID + 1];
    is_reached[0] = true;
    for (size, mut pods) in of_size.into_iter().rev() {
        for from in 0..=GRID - size {
            if !is_reached[from] {
                continue;
            }
            is_reached[from + size] = true;
            let arc = lp.variable(0.0, gpus as f64);
            pods.push((arc, -1.0));
            points[from].push((arc, 1.0));
            points[from + size].push((arc, -1.0));
        }
        lp.row(pods, Limit::AtMost, 0.0);
    }
    starts.append(&mut points[0]);
    lp.row(starts, Limit::AtMost, gpus as f64);
    for terms in points.into_iter().skip(1).filter(|terms| terms.iter().any(|(_, f)| *f > 0.0)) {
        lp.row(terms, Limit::AtMost, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(cpu_milli: u64) -> TraceNode {
        let (name, model) = (cpu_milli.to_string(), "T4".to_owned());
        TraceNode { name, cpu_milli, memory_mib: 1001, gpus: 1, model, more: None }
    }

    fn pod(cpu_milli: u64) -> TracePod {
        TracePod {
            name: cpu_milli.to_string(),
            cpu_milli,
            memory_mib: 101,
            num_gpu: 1,
            gpu_milli: 500,
            gpu_spec: Vec::new(),
            creation_time: None,
            deletion_time: None,
            more: None,
        }
    }

    #[test]
    fn too_many_kinds_of_pods_and_nodes_are_merged() {
        let nodes: Vec<TraceNode> = (2001..2501).map(node).collect();
        let pods: Vec<TracePod> = (1001..1201).map(pod).collect();
        let (classes, kinds) = grouped(&nodes, &pods, 0);
        assert!(classes.len() * kinds.len() <= PAIRS_MAX, "{} {}", classes.len(), kinds.len());
        assert_eq!(classes.values().sum::<u64>(), 500);
        assert_eq!(kinds.values().map(|pods| pods.arrived).sum::<u64>(), 200);
        let smallest = classes.keys().next().map(|class| (class.cpu_milli, class.memory_mib));
        assert!(smallest >= Some((2001, 1001)), "{smallest:?}");
        let largest = kinds.keys().next_back().map(|kind| (kind.cpu_milli, kind.memory_mib));
        assert!(largest <= Some((1200, 101)), "{largest:?}");
        assert_eq!(most_allocated(&nodes, &pods, 0), Ok(100_000));
    }

    #[test]
    fn fractions_are_rounded_to_the_grid() {
        let size = |num_gpu, gpu_milli| {
            let mut kinds = kinds(&[TracePod { num_gpu, gpu_milli, ..pod(1) }], 1, 1);
            kinds.pop_first().and_then(|(kind, _)| kind.grid_size())
        };
        assert_eq!([size(1, 999), size(1, 10), size(1, 19)], [Some(99), Some(1), Some(1)]);
        assert_eq!([size(1, 9), size(1, 1000), size(2, 1000), size(0, 0)], [None; 4]);
    }
}
