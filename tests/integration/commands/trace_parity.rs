//! The workload made of a trace and a seed is the one the FGD paper's simulator replays.
//!
//! Two traces are compared. The small one under `tests/data` is ours and always there; what is
//! expected of it was computed by a Go program that calls Go's own `math/rand`. The public one
//! (`cluster-trace-gpu-v2023` of the repository `alibaba/clusterdata`) is not ours to pass on: the
//! environment variable `GPUPACK_TRACES` names the folder with its CSV files, and without it that
//! test says that it was skipped. Should the folder hold recorded workloads
//! (`arrivals/default-<seed>-{pods,nodes}.csv`), these are compared row by row too.

use std::fmt::Write as _;
use std::io::Write as _;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use expect_test::expect_file;
use sim::run::policy::SimPolicy;
use sim::run::replay::replay;
use sim::trace::go_rand::GoRand;
use sim::trace::read::{TraceNode, TracePod, parse_nodes, parse_pods, read_nodes, read_pods};
use sim::trace::workload::Workload;

const LOAD: f64 = 1.3;

/// What a pod requests, as the trace writes it.
fn pod_row(pod: &TracePod) -> String {
    let TracePod { cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec, .. } = pod;
    format!("{cpu_milli},{memory_mib},{num_gpu},{gpu_milli},{}", gpu_spec.join("|"))
}

/// A node without the part of its name that differs between a trace and a recorded workload.
fn node_row(node: &TraceNode) -> String {
    let TraceNode { name, cpu_milli, memory_mib, gpus, model, .. } = node;
    let serial = name.rsplit('-').next().unwrap_or_default();
    format!("{serial},{cpu_milli},{memory_mib},{gpus},{model}")
}

/// FNV-1a over lines: short enough to write down, and any moved or changed row shows.
fn fingerprint(rows: impl Iterator<Item = String>) -> u64 {
    let text: String = rows.flat_map(|row| [row, "\n".to_owned()]).collect();
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Number of arrivals, then the fingerprints of arrivals and nodes.
fn summary(workload: &Workload) -> (usize, u64, u64) {
    let pods = fingerprint(workload.arrivals.iter().map(pod_row));
    let nodes = fingerprint(workload.nodes.iter().map(node_row));
    (workload.arrivals.len(), pods, nodes)
}

/// The recipe of the small trace: 24 nodes of four kinds, and 200 pods whose kind, size and
/// models are drawn from a generator with seed 2023. `UPDATE_EXPECT=1` writes the files again.
fn small_trace() -> (String, String) {
    let kinds =
        ["64000,262144,4,P100", "96000,393216,8,V100M32", "96000,786432,8,G2", "32000,131072,4,T4"];
    let mut nodes = String::from("sn,cpu_milli,memory_mib,gpu,model\n");
    for (serial, kind) in kinds.iter().cycle().take(24).enumerate() {
        writeln!(nodes, "small-node-{serial:04},{kind}").expect("writing to a string");
    }
    let mut rand = GoRand::new(2023);
    let mut below = |n: usize| rand.intn(NonZeroUsize::new(n).expect("the recipe has no zero"));
    let mut pods = String::from(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,\
         deletion_time,scheduled_time\n",
    );
    for serial in 0..200 {
        let (num_gpu, gpu_milli) = match below(20) {
            0..=1 => (0, 0),
            2..=14 => (1, 10 * (1 + below(99))),
            15..=18 => (1, 1000),
            _ => ([2, 4, 8][below(3)], 1000),
        };
        let (cpu, memory) = (1000 * (1 + below(12)), 1024 * (1 + below(32)));
        let models = ["", "", "", "", "T4", "P100|V100M32"][below(6)];
        let created = 60 * below(10_000);
        let deleted = created + 60 * (1 + below(5_000));
        writeln!(
            pods,
            "small-pod-{serial:04},{cpu},{memory},{num_gpu},{gpu_milli},{models},LS,Running,\
             {created},{deleted},{created}"
        )
        .expect("writing to a string");
    }
    (nodes, pods)
}

#[test]
fn the_small_trace_matches_its_generator() {
    let (nodes, pods) = small_trace();
    expect_file!["../../data/small-nodes.csv"].assert_eq(&nodes);
    expect_file!["../../data/small-pods.csv"].assert_eq(&pods);
}

#[test]
fn the_workload_of_the_small_trace_is_the_one_go_computes() {
    let (nodes, pods) = small_trace();
    let nodes = parse_nodes("small-nodes.csv", nodes.as_bytes()).unwrap();
    let pods = parse_pods("small-pods.csv", pods.as_bytes()).unwrap();
    for (seed, load, expected) in [
        (42, LOAD, (237, 0x687e_1df5_0c13_36d7, 0x8642_4629_0085_2d19)),
        (43, LOAD, (257, 0x69a5_a510_b4f8_3677, 0x79ec_4731_156c_92cf)),
        (0, LOAD, (245, 0x4582_78de_a497_2be3, 0xff99_0b77_345d_364d)),
        (-5, LOAD, (237, 0x0821_5c31_2819_7865, 0xd954_f7fa_95aa_e17f)),
        (42, 0.5, (82, 0x9868_8c0a_751c_e5fc, 0x91e4_bd30_5b8a_4819)),
        (43, 0.5, (90, 0x434b_46a5_02d0_d685, 0xe449_77bb_de44_a80f)),
    ] {
        let workload = Workload::paper(nodes.clone(), pods.clone(), seed, load).unwrap();
        assert_eq!(summary(&workload), expected, "seed {seed}, load {load}");
    }
}

#[expect(clippy::disallowed_methods, reason = "a test has no flags for the folder")]
fn public_traces() -> Option<PathBuf> {
    std::env::var("GPUPACK_TRACES").ok().filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// Says that a test was skipped, past the capture of the test harness: it must be seen.
fn skipped(what: &str, why: &str) {
    let mut terminal = std::io::stderr();
    let _ = writeln!(terminal, "skipped: {what} ({why})");
}

const NO_TRACE: &str =
    "GPUPACK_TRACES is not set; the README says where to download the public trace";

#[test]
fn the_workload_of_the_public_trace_is_the_paper_s() {
    let Some(folder) = public_traces() else {
        skipped("parity of the workload with the public trace", NO_TRACE);
        return;
    };
    let nodes = read_nodes(&folder.join("openb_node_list_gpu_node.csv")).unwrap();
    let pods = read_pods(&folder.join("openb_pod_list_default.csv")).unwrap();
    for (seed, expected) in PUBLIC {
        let workload = Workload::paper(nodes.clone(), pods.clone(), seed, LOAD).unwrap();
        assert_eq!(summary(&workload), expected, "seed {seed}");
        compare_with_recorded(&folder, seed, &workload);
    }
}

/// Seeds 42 to 51 on the trace `default`.
const PUBLIC: [(i64, (usize, u64, u64)); 10] = [
    (42, (10_866, 0x8d36_491a_303c_7265, 0xe270_5c66_f57f_5bd3)),
    (43, (10_793, 0x29f2_e350_107f_1a4f, 0x8dc4_6aa0_0ab2_a21b)),
    (44, (10_863, 0xc148_de75_08c8_2540, 0x87d4_08e2_907c_ab59)),
    (45, (10_813, 0x50c9_d03c_a7b8_6268, 0x97bb_9db5_773c_f8eb)),
    (46, (10_814, 0x43c6_a035_452d_b8f8, 0x8727_e486_0c87_0d1d)),
    (47, (10_831, 0x426a_bbc0_ebb5_24c8, 0xeadd_f715_e944_0841)),
    (48, (10_805, 0x101f_9256_1601_1ee5, 0x7c4b_2bcb_e426_da4f)),
    (49, (10_835, 0x8803_0f5b_6182_b284, 0x26aa_c327_b529_182f)),
    (50, (10_766, 0xdbb2_86df_907b_2c65, 0x7747_6928_d3b3_20f9)),
    (51, (10_859, 0x2a81_d7f7_abe2_a31d, 0x3e59_08c2_1f5c_d5bb)),
];

fn compare_with_recorded(folder: &Path, seed: i64, workload: &Workload) {
    let file = |what: &str| folder.join(format!("arrivals/default-{seed}-{what}.csv"));
    if !file("pods").exists() {
        return;
    }
    let nodes = read_nodes(&file("nodes")).expect("a recorded workload is a trace");
    let pods = read_pods(&file("pods")).expect("a recorded workload is a trace");
    let recorded = Workload::as_is(nodes, pods);
    assert_eq!(workload.arrivals.len(), recorded.arrivals.len(), "seed {seed}");
    for (row, (ours, theirs)) in workload.arrivals.iter().zip(&recorded.arrivals).enumerate() {
        assert_eq!(pod_row(ours), pod_row(theirs), "seed {seed}, arrival {row}");
    }
    assert_eq!(workload.nodes.len(), recorded.nodes.len(), "seed {seed}");
    for (row, (ours, theirs)) in workload.nodes.iter().zip(&recorded.nodes).enumerate() {
        assert_eq!(node_row(ours), node_row(theirs), "seed {seed}, node {row}");
    }
}

/// Seed, policy, and its allocation at 100 % load and at the end, as the paper's simulator has it.
const RECORDED: [(i64, SimPolicy, f64, f64); 4] = [
    (42, SimPolicy::FGD, 95.23, 95.39),
    (42, SimPolicy::BESTFIT, 92.90, 93.07),
    (43, SimPolicy::FGD, 95.32, 95.49),
    (43, SimPolicy::BESTFIT, 92.83, 93.11),
];

/// Mean allocation at 100 % load over seeds 42 to 51 on the trace `default`, as published.
const PUBLISHED: [(SimPolicy, f64); 2] = [(SimPolicy::FGD, 95.23), (SimPolicy::BESTFIT, 92.86)];

/// The folder of the public trace, where replays of it are affordable.
fn folder_for_replays(what: &str) -> Option<PathBuf> {
    let folder = public_traces();
    match folder {
        None => skipped(what, NO_TRACE),
        Some(_) if cfg!(debug_assertions) => skipped(what, "it needs `cargo test --release`"),
        Some(_) => return folder,
    }
    None
}

#[test]
fn recorded_arrivals_are_packed_as_in_the_paper() {
    let Some(folder) = folder_for_replays("allocation on recorded arrivals") else { return };
    for (seed, policy, at_100, last) in RECORDED {
        let file = |what: &str| folder.join(format!("arrivals/default-{seed}-{what}.csv"));
        if !file("pods").exists() {
            skipped("allocation on recorded arrivals", "the folder holds no `arrivals`");
            return;
        }
        let nodes = read_nodes(&file("nodes")).unwrap();
        let workload = Workload::as_is(nodes, read_pods(&file("pods")).unwrap());
        let run = replay(&workload, policy, seed, 0, |_| {}).unwrap();
        let ours = (run.curve.at_100().unwrap(), run.curve.last());
        let off = (ours.0 - at_100).abs().max((ours.1 - last).abs());
        assert!(
            off <= 0.02,
            "{}, seed {seed}: {ours:?}, expected {at_100} and {last}",
            policy.name
        );
    }
}

#[test]
fn mean_allocation_on_the_public_trace_is_the_published_one() {
    let Some(folder) = folder_for_replays("mean allocation on the public trace") else { return };
    let nodes = read_nodes(&folder.join("openb_node_list_gpu_node.csv")).unwrap();
    let pods = read_pods(&folder.join("openb_pod_list_default.csv")).unwrap();
    for (policy, published) in PUBLISHED {
        let at_100 = PUBLIC.map(|(seed, _)| {
            let workload = Workload::paper(nodes.clone(), pods.clone(), seed, LOAD).unwrap();
            replay(&workload, policy, seed, 0, |_| {}).unwrap().curve.at_100().unwrap()
        });
        let mean = at_100.iter().sum::<f64>() / 10.0;
        assert!(
            (mean - published).abs() <= 0.3,
            "{}: {mean:.2}, published {published}",
            policy.name
        );
    }
}
