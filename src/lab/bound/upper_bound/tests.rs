use proptest::prelude::*;

use super::*;
use sim::trace::read::{TraceNode, TracePod};

/// Nodes as `gpus cpu_milli memory_mib model`.
fn nodes(texts: &[&str]) -> Vec<TraceNode> {
    let node = |(at, text): (usize, &&str)| {
        let parts: Vec<&str> = text.split(' ').collect();
        TraceNode {
            name: format!("n{at}"),
            gpus: parts[0].parse().unwrap(),
            cpu_milli: parts[1].parse().unwrap(),
            memory_mib: parts[2].parse().unwrap(),
            model: parts[3].to_owned(),
            more: None,
        }
    };
    texts.iter().enumerate().map(node).collect()
}

/// Pods as `num_gpu gpu_milli cpu_milli memory_mib`, and models if not all are accepted.
fn pods(texts: &[&str]) -> Vec<TracePod> {
    let pod = |(at, text): (usize, &&str)| {
        let parts: Vec<&str> = text.split(' ').collect();
        TracePod {
            name: format!("p{at}"),
            num_gpu: parts[0].parse().unwrap(),
            gpu_milli: parts[1].parse().unwrap(),
            cpu_milli: parts[2].parse().unwrap(),
            memory_mib: parts[3].parse().unwrap(),
            gpu_spec: parts[4..].iter().map(|model| (*model).to_owned()).collect(),
            creation_time: None,
            deletion_time: None,
            more: None,
        }
    };
    texts.iter().enumerate().map(pod).collect()
}

/// Both bounds after the last arrival.
fn last(node_texts: &[&str], pod_texts: &[&str], first_lost: Option<usize>) -> (f64, f64) {
    let workload = Workload::as_is(nodes(node_texts), pods(pod_texts));
    let bounds = bounds(&workload, first_lost).unwrap();
    (bounds.any.last, bounds.faithful.last)
}

/// One node with two GPUs.
const TWO: [&str; 1] = ["2 8000 8192 T4"];

#[test]
fn waste_by_cutting_gpus_into_shares_is_measured() {
    // Three of 0.6 need two GPUs and get one each: 1.2 of 2.
    assert_eq!(last(&TWO, &["1 600 0 0", "1 600 0 0", "1 600 0 0"], Some(0)).0, 60.0);
    // Fractions of 0.3 and 0.7 fill it.
    let pairs = ["1 700 0 0", "1 700 0 0", "1 300 0 0", "1 300 0 0", "1 300 0 0"];
    assert_eq!(last(&TWO, &pairs, Some(0)).0, 100.0);
    // What is cut leaves one whole GPU.
    assert_eq!(last(&TWO, &["1 700 0 0", "1 1000 0 0", "1 1000 0 0"], Some(1)), (100.0, 85.0));
    // One rule is left out, that a pod is not cut: a tenth of a GPU beside 0.95 pods of two GPUs.
    assert_eq!(last(&TWO, &["1 100 0 0", "2 1000 0 0"], Some(1)), (100.0, 100.0));
}

#[test]
fn cpu_host_memory_models_and_whole_nodes_limit_the_bound() {
    assert_eq!(last(&TWO, &["1 1000 5000 0", "1 1000 5000 0"], Some(0)).0, 50.0);
    assert_eq!(last(&TWO, &["1 1000 0 5000", "1 1000 0 5000"], Some(0)).0, 50.0);
    let mixed = ["1 8000 8192 T4", "1 8000 8192 A10"];
    assert_eq!(last(&mixed, &["1 1000 0 0 T4", "1 1000 0 0 T4"], Some(0)).0, 50.0);
    // Two nodes with a GPU each hold no pod of two GPUs.
    assert_eq!(last(&mixed, &["2 1000 0 0"], Some(0)).0, 0.0);
    // A pod without a GPU takes CPU only if it must be placed.
    let crowd = ["0 0 8000 0", "1 1000 1 0"];
    assert_eq!(last(&TWO, &crowd, Some(0)), (50.0, 50.0));
    assert_eq!(last(&TWO, &crowd, Some(1)), (50.0, 0.0));
}

#[test]
fn pods_that_must_be_placed_cost_room() {
    // Refusing 0.6 twice leaves both GPUs to whole pods.
    let bad_first = ["1 600 0 0", "1 600 0 0", "1 1000 0 0", "1 1000 0 0"];
    assert_eq!(last(&TWO, &bad_first, Some(2)), (100.0, 60.0));
    assert_eq!(last(&TWO, &bad_first, Some(1)), (100.0, 80.0));
    assert_eq!(last(&TWO, &bad_first, Some(0)), (100.0, 100.0));
    assert_eq!(last(&TWO, &["1 600 0 0"], None), (30.0, 30.0), "all of one");
}

#[test]
fn forced_pods_that_do_not_fit_are_rejected() {
    for (texts, first_lost, forced) in [
        (&["1 600 0 0", "1 600 0 0", "1 600 0 0"][..], None, 3),
        (&["1 600 0 0", "1 600 0 0", "1 600 0 0"][..], Some(99), 3),
        (&["3 1000 0 0", "1 1 0 0"][..], Some(1), 1),
        (&["0 0 9000 0", "1 1 0 0"][..], Some(1), 1),
        (&["1 1000 0 0 A10"][..], None, 1),
    ] {
        let workload = Workload::as_is(nodes(&TWO), pods(texts));
        let refused = bounds(&workload, first_lost).unwrap_err();
        assert_eq!(refused, BoundError::Forced { forced }, "{texts:?}");
    }
}

#[test]
fn an_empty_workload_has_a_bound_of_zero() {
    for (node_texts, pod_texts) in
        [(&[][..], &[][..]), (&TWO[..], &[][..]), (&["0 8000 8192 -"][..], &["0 0 1 1"][..])]
    {
        let workload = Workload::as_is(nodes(node_texts), pods(pod_texts));
        let zero = Bound { at_100: None, last: 0.0 };
        let bounds = bounds(&workload, None).unwrap();
        assert_eq!(bounds, Bounds { any: zero, faithful: zero });
    }
    let nowhere = Workload::as_is(Vec::new(), pods(&["1 1000 0 0"]));
    assert_eq!(bounds(&nowhere, Some(0)).unwrap().any.last, 0.0);
}

#[test]
fn at_100_counts_what_has_arrived_in_the_column() {
    // 1990 and 2010 of 2000 are in the column, 2990 is not.
    let texts = ["1 990 0 0", "1 1000 0 0", "1 20 0 0", "1 980 0 0"];
    let workload = Workload::as_is(nodes(&TWO), pods(&texts));
    assert_eq!(arrivals_at_100(&workload), Some(3));
    let found = bounds(&workload, Some(0)).unwrap();
    // 0.99 and 1; with all four, 0.98 and 0.02 on one GPU and 1 on the other.
    assert_eq!((found.any.at_100, found.any.last), (Some(99.5), 100.0));
    let jump = Workload::as_is(nodes(&TWO), pods(&["1 1000 0 0", "2 1000 0 0"]));
    assert_eq!(arrivals_at_100(&jump), Some(1));
    assert_eq!(bounds(&jump, Some(0)).unwrap().any.at_100, Some(50.0));
    let early = Workload::as_is(nodes(&TWO), pods(&["1 1000 0 0"]));
    assert_eq!(bounds(&early, Some(0)).unwrap().any.at_100, None);
}

#[test]
fn percents_are_rounded_up() {
    assert_eq!(percent_up(1, 3000), 0.04);
    assert_eq!(percent_up(1500, 3000), 50.0);
    assert_eq!(percent_up(0, 0), 0.0);
}

/// A node with what is left on it while packings are tried.
#[derive(Clone)]
struct Left {
    cpu_milli: u64,
    memory_mib: u64,
    gpus_milli: Vec<u32>,
    model: String,
}

/// The largest allocation over all packings of `pods`, of which the first `forced` must be placed,
/// in thousandths of a GPU; `None` if these do not fit.
fn best(nodes: &mut Vec<Left>, pods: &[TracePod], forced: usize) -> Option<u64> {
    let Some((pod, rest)) = pods.split_first() else { return Some(0) };
    let later = forced.saturating_sub(1);
    let mut found = if forced > 0 { None } else { best(nodes, rest, later) };
    for at in 0..nodes.len() {
        let node = nodes[at].clone();
        let accepts = pod.gpu_spec.is_empty() || pod.gpu_spec.contains(&node.model);
        if node.cpu_milli < pod.cpu_milli
            || node.memory_mib < pod.memory_mib
            || pod.num_gpu > 0 && !accepts
        {
            continue;
        }
        for gpus in choices(&node.gpus_milli, pod) {
            nodes[at].cpu_milli -= pod.cpu_milli;
            nodes[at].memory_mib -= pod.memory_mib;
            for gpu in gpus {
                nodes[at].gpus_milli[gpu] -= pod.gpu_milli;
            }
            found = found.max(best(nodes, rest, later).map(|sum| sum + pod.demand_milli()));
            nodes[at] = node.clone();
        }
    }
    found
}

/// Ways to take the pod's GPUs out of those left: each one that a share fits on, or the first
/// wholly free ones, as wholly free GPUs are equal.
fn choices(left: &[u32], pod: &TracePod) -> Vec<Vec<usize>> {
    let fits = |gpu: &usize| left[*gpu] >= pod.gpu_milli;
    let fitting: Vec<usize> = (0..left.len()).filter(fits).collect();
    let wanted = usize::try_from(pod.num_gpu).unwrap();
    match wanted {
        1 => fitting.into_iter().map(|gpu| vec![gpu]).collect(),
        _ if fitting.len() >= wanted => vec![fitting[..wanted].to_vec()],
        _ => Vec::new(),
    }
}

fn some_nodes() -> impl Strategy<Value = Vec<TraceNode>> {
    let node = (0..=2_u32, 1..=4_u64, 1..=4_u64, prop::sample::select(vec!["T4", "A10"]));
    prop::collection::vec(node, 1..=3).prop_map(|nodes| {
        let texts: Vec<String> = nodes
            .iter()
            .map(|(gpus, cpu, memory, model)| format!("{gpus} {cpu}000 {memory}000 {model}"))
            .collect();
        self::nodes(&texts.iter().map(String::as_str).collect::<Vec<_>>())
    })
}

fn some_pods() -> impl Strategy<Value = Vec<TracePod>> {
    let share = prop::sample::select(vec![1, 5, 119, 205, 333, 334, 500, 501, 666, 810, 999, 1000]);
    let gpus = prop_oneof![Just((0, 0)), share.prop_map(|milli| (1, milli)), Just((2, 1000))];
    let models = prop::sample::select(vec!["", "", "", " T4", " A10"]);
    prop::collection::vec((gpus, 0..=2500_u64, 0..=2500_u64, models), 0..=6).prop_map(|pods| {
        let texts: Vec<String> = pods
            .iter()
            .map(|((num, milli), cpu, memory, models)| {
                format!("{num} {milli} {cpu} {memory}{models}")
            })
            .collect();
        self::pods(&texts.iter().map(String::as_str).collect::<Vec<_>>())
    })
}

proptest! {
    #[test]
    fn no_packing_exceeds_its_bound(nodes in some_nodes(), pods in some_pods(), kept in 0..=6_usize) {
        let kept = kept.min(pods.len());
        let mut left: Vec<Left> = nodes
            .iter()
            .map(|node| Left {
                cpu_milli: node.cpu_milli,
                memory_mib: node.memory_mib,
                gpus_milli: vec![1000; usize::try_from(node.gpus).unwrap()],
                model: node.model.clone(),
            })
            .collect();
        let any = best(&mut left, &pods, 0).unwrap();
        let faithful = best(&mut left, &pods, kept);
        let workload = Workload::as_is(nodes, pods);
        let percent = |milli: u64| percent_up(milli, workload.capacity_milli());
        let found = bounds(&workload, Some(kept));
        match (faithful, found) {
            (Some(faithful), Ok(found)) => {
                prop_assert!(found.any.last >= percent(any));
                prop_assert!(found.faithful.last >= percent(faithful));
                prop_assert!(found.faithful.last <= found.any.last);
                prop_assert!(found.any.at_100.is_none_or(|at_100| at_100 <= found.any.last));
            }
            (None, Ok(found)) => prop_assert!(found.any.last >= percent(any)),
            (None, Err(BoundError::Forced { .. })) => {}
            (expected, found) => prop_assert!(false, "{expected:?}, found {found:?}"),
        }
    }
}
