use std::num::NonZeroU32;

use super::*;
use crate::hardware::device::{MigProfile, ModelFilter};
use crate::hardware::units::MilliCpu;
use crate::sim::trace::read::{parse_nodes, parse_pods};

fn host(cpu_milli: u64, memory_mib: u64) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(cpu_milli), memory: MemMib::new(memory_mib) }
}

fn node(name: &str, gpus: &[(&str, u64)]) -> ClusterNode {
    let gpu = |(model, mib): &(&str, u64)| ClusterGpu {
        model: (*model).to_owned(),
        memory: MemMib::new(*mib),
    };
    let gpus = gpus.iter().map(gpu).collect();
    ClusterNode { name: name.to_owned(), host: host(64_000, 256_000), gpus, mig_gpus: 0 }
}

fn pod(name: &str, node: Option<&str>, gpu: Option<GpuRequest>) -> ClusterPod {
    ClusterPod {
        name: name.to_owned(),
        node: node.map(str::to_owned),
        host: host(2001, 4096),
        gpu,
        created_unix_seconds: None,
    }
}

fn fraction(millionths: u64) -> Amount {
    Amount::Fraction(Share::from_millionths(millionths))
}

fn one(amount: Amount) -> Option<GpuRequest> {
    Some(GpuRequest::one(amount))
}

fn several(amount: Amount, count: u32) -> Option<GpuRequest> {
    Some(GpuRequest::several(amount, NonZeroU32::new(count).unwrap()))
}

/// Rows as `name cpu num_gpu gpu_milli`.
fn rows(snapshot: &Snapshot) -> Vec<String> {
    let row = |pod: &TracePod| {
        format!("{} {} {} {}", pod.name, pod.cpu_milli, pod.num_gpu, pod.gpu_milli)
    };
    snapshot.pods.iter().map(row).collect()
}

fn check(pod: ClusterPod, expected: &[&str], notes: &[Note]) {
    let nodes =
        vec![node("a", &[("L4", 20_000)]), node("b", &[("H100", 80_000), ("H100", 80_000)])];
    let snapshot = Snapshot::of(nodes, vec![pod], Names::Kept);
    assert_eq!(rows(&snapshot), expected);
    assert_eq!(snapshot.notes.keys().copied().collect::<Vec<_>>(), notes, "{expected:?}");
}

#[test]
fn expressible_requests_are_written_unchanged() {
    check(pod("t/p", None, one(fraction(250_000))), &["t.p 2001 1 250"], &[]);
    check(pod("t/p", Some("b"), several(Amount::Whole, 2)), &["t.p 2001 2 1000"], &[]);
    check(pod("t/p", Some("b"), several(fraction(1_000_000), 2)), &["t.p 2001 2 1000"], &[]);
    check(pod("t/p", Some("a"), None), &["t.p 2001 0 0"], &[]);
}

#[test]
fn inexpressible_requests_become_the_nearest_one_and_are_counted() {
    let memory = |mib| one(Amount::Memory(MemMib::new(mib)));
    check(pod("p", Some("b"), memory(20_000)), &["p 2001 1 250"], &[Note::Memory]);
    check(pod("p", None, memory(10_000)), &["p 2001 1 500"], &[Note::Memory]);
    check(pod("p", None, memory(20_001)), &["p 2001 1 251"], &[Note::Memory, Note::FineShare]);
    check(pod("p", None, memory(90_000)), &["p 2001 1 1000"], &[Note::MemoryTooLarge]);
    let both = |share, mib| {
        one(Amount::FractionAndMemory(Share::from_millionths(share), MemMib::new(mib)))
    };
    check(pod("p", Some("a"), both(500_000, 10_000)), &["p 2001 1 500"], &[]);
    check(pod("p", Some("a"), both(500_000, 15_000)), &["p 2001 1 750"], &[Note::Memory]);
    check(pod("p", None, one(fraction(1))), &["p 2001 1 1"], &[Note::FineShare]);
    check(
        pod("p", Some("b"), several(fraction(500_000), 2)),
        &["p.gpu1 1001 1 500", "p.gpu2 1001 1 500"],
        &[Note::SharesOfSeveral],
    );
    let mig = one(Amount::MigInstance(MigProfile::new("1g.10gb")));
    check(pod("p", None, mig), &[], &[Note::OtherDevice]);
    check(pod("p", None, one(Amount::SharedSlot)), &[], &[Note::OtherDevice]);
    check(pod("p", Some("elsewhere"), None), &[], &[Note::Elsewhere]);
    check(pod("p", None, None), &[], &[Note::Elsewhere]);
    let mut huge = pod("p", Some("a"), None);
    huge.host = host(1 << 40, 1);
    check(huge, &["p 10000000 0 0"], &[Note::Absurd]);
}

#[test]
fn memory_is_judged_by_accepted_models_only() {
    let request = GpuRequest {
        models: ModelFilter::new(["H100"]),
        ..GpuRequest::one(Amount::Memory(MemMib::new(20_000)))
    };
    check(pod("p", None, Some(request)), &["p 2001 1 250"], &[Note::Memory]);
}

#[test]
fn nodes_without_gpus_are_left_out_and_mixed_ones_get_the_main_model() {
    let mixed = node("b", &[("L4", 1), ("A|10\n", 1), ("A|10\n", 1)]);
    let mig = ClusterNode { mig_gpus: 2, ..node("m", &[]) };
    let snapshot = Snapshot::of(vec![node("z", &[]), mixed, mig], Vec::new(), Names::Kept);
    let expected = TraceNode {
        name: "b".to_owned(),
        cpu_milli: 64_000,
        memory_mib: 256_000,
        gpus: 3,
        model: "A 10".to_owned(),
    };
    assert_eq!(snapshot.nodes, [expected]);
    let notes = BTreeMap::from([(Note::MigGpu, 2), (Note::OtherModel, 1), (Note::NoGpu, 1)]);
    assert_eq!(snapshot.notes, notes);
}

#[test]
fn pods_are_in_creation_order() {
    let at = |name: &str, created| ClusterPod {
        created_unix_seconds: created,
        ..pod(name, None, one(fraction(500_000)))
    };
    let pods = vec![at("b", Some(170)), at("c", Some(160)), at("z", None), at("y", None)];
    let snapshot = Snapshot::of(vec![node("a", &[("L4", 1)])], pods, Names::Kept);
    let read: Vec<_> =
        snapshot.pods.iter().map(|pod| (pod.name.as_str(), pod.creation_time)).collect();
    assert_eq!(read, [("y", None), ("z", None), ("c", Some(0)), ("b", Some(10))]);
}

#[test]
fn names_are_valid_unique_and_anonymous_on_request() {
    let names = |names| {
        let long = "x".repeat(254);
        let pods =
            ["t/a", "t.a", "ü", &long, "pod-2"].map(|name| pod(name, None, one(fraction(1))));
        let snapshot = Snapshot::of(vec![node("n", &[("L4", 1)])], pods.to_vec(), names);
        let seen: Vec<String> = snapshot.pods.into_iter().map(|pod| pod.name).collect();
        (seen, snapshot.nodes[0].name.clone(), snapshot.notes.get(&Note::Name).copied())
    };
    let kept = ["pod-2", "t.a", "pod-3", "pod-4", "pod-5"].map(str::to_owned).to_vec();
    assert_eq!(names(Names::Kept), (kept, "n".to_owned(), Some(3)));
    let anonymous = ["pod-1", "pod-2", "pod-3", "pod-4", "pod-5"].map(str::to_owned).to_vec();
    assert_eq!(names(Names::Anonymous), (anonymous, "node-1".to_owned(), None));
}

#[test]
fn what_is_written_is_read_back() {
    let nodes = vec![node("n,1", &[("L4, \"big\"", 1)]), node("b", &[("H100", 80_000)])];
    let request =
        GpuRequest { models: ModelFilter::new(["L4", "A 10"]), ..GpuRequest::one(Amount::Whole) };
    let mut pods = vec![pod("t/a", Some("b"), Some(request)), pod("t/b", Some("b"), None)];
    pods[0].created_unix_seconds = Some(1_700_000_000);
    let snapshot = Snapshot::of(nodes, pods, Names::Kept);
    let read_nodes = parse_nodes("n.csv", snapshot.nodes_csv().unwrap().as_slice()).unwrap();
    let read_pods = parse_pods("p.csv", snapshot.pods_csv().unwrap().as_slice()).unwrap();
    assert_eq!((read_nodes, read_pods), (snapshot.nodes, snapshot.pods));
}
