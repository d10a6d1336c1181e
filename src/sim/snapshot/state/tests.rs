use std::num::NonZeroU32;

use super::*;
use crate::trace::read::{parse_nodes, parse_pods};
use engine::hardware::pool::{Enforcement, InstanceUse, Replicas};
use engine::model::policy::Policy;
use engine::model::request::{Isolation, Limit};
use wire::device::ModelFilter;
use wire::units::{MilliCpu, Share};

fn host(cpu_milli: u64, memory_mib: u64) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(cpu_milli), memory: MemMib::new(memory_mib) }
}

fn node(name: &str, gpus: &[(&str, u64)]) -> ClusterNode {
    let gpu = |(model, mib): &(&str, u64)| ClusterGpu {
        model: (*model).to_owned(),
        memory: MemMib::new(*mib),
        ..ClusterGpu::default()
    };
    let gpus = gpus.iter().map(gpu).collect();
    ClusterNode { name: name.to_owned(), host: host(64_000, 256_000), gpus, ..Default::default() }
}

fn pod(name: &str, node: Option<&str>, gpu: Option<GpuRequest>) -> ClusterPod {
    ClusterPod {
        name: name.to_owned(),
        node: node.map(str::to_owned),
        host: host(2001, 4096),
        gpu,
        ..ClusterPod::default()
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

/// Rows as the file has them, without those of `name,cpu,memory`.
fn rows(snapshot: &Snapshot) -> String {
    let text = String::from_utf8(snapshot.pods_csv().unwrap()).unwrap();
    let row = |line: &str| line.splitn(4, ',').last().unwrap_or_default().to_owned();
    text.lines().map(row).collect::<Vec<_>>().join("\n")
}

fn check(pod: ClusterPod, expected: &str, notes: &[Note]) {
    let nodes =
        vec![node("a", &[("L4", 20_000)]), node("b", &[("H100", 80_000), ("H100", 80_000)])];
    let snapshot = Snapshot::of(nodes, vec![pod.clone()], RowNames::Kept);
    assert_eq!(snapshot.notes.keys().copied().collect::<Vec<_>>(), notes, "{expected}");
    if expected.is_empty() {
        assert_eq!(snapshot.pods, []);
        return;
    }
    assert_eq!(rows(&snapshot), format!("num_gpu,gpu_milli,gpu_spec,{expected}"));
    let read = parse_pods("p.csv", snapshot.pods_csv().unwrap().as_slice()).unwrap();
    let request = read[0].request();
    assert_eq!(request, pod.gpu.map(|gpu| GpuRequest { container: None, ..gpu }), "{expected}");
}

#[test]
fn every_request_is_written_as_it_is() {
    let plain = "creation_time,deletion_time\n";
    let only = |row: &str| format!("{plain}{row}");
    check(pod("t/p", None, one(fraction(250_000))), &only("1,250,,,"), &[]);
    check(pod("t/p", Some("b"), several(Amount::Whole, 2)), &only("2,1000,,,"), &[]);
    check(pod("t/p", Some("a"), None), &only("0,0,,,"), &[]);
    check(pod("p", Some("b"), several(fraction(500_000), 2)), &only("2,500,,,"), &[]);
    check(pod("p", None, one(fraction(10))), &only("1,0.01,,,"), &[]);
    let with = |column: &str, row: &str| format!("creation_time,deletion_time,{column}\n{row}");
    let memory = |mib| one(Amount::Memory(MemMib::new(mib)));
    check(pod("p", Some("b"), memory(20_001)), &with("gpu_memory_mib", "1,0,,,,20001"), &[]);
    check(pod("p", None, memory(90_000)), &with("gpu_memory_mib", "1,0,,,,90000"), &[]);
    let both = Amount::FractionAndMemory(Share::from_millionths(500_000), MemMib::new(15_000));
    check(pod("p", Some("a"), one(both)), &with("gpu_memory_mib", "1,500,,,,15000"), &[]);
    let mig = several(Amount::MigInstance(MigProfile::new("1g.10gb+me")), 3);
    check(pod("p", None, mig), &with("mig_profile", "3,0,,,,1g.10gb+me"), &[]);
    check(pod("p", None, one(Amount::SharedSlot)), &with("gpu_slots", "1,0,,,,1"), &[]);
    let request = GpuRequest {
        isolation: Isolation::Memory,
        limit: Some(Limit::Memory(MemMib::new(900))),
        policy: Some(Policy::Spread),
        min_memory: MemMib::new(64),
        by_instance: true,
        container: Some("main".into()),
        ..memory(800).unwrap()
    };
    let important = ClusterPod { priority: -5, ..pod("p", None, Some(request)) };
    let columns = "gpu_memory_mib,isolation,limit_gpu_memory_mib,policy,min_gpu_memory_mib,by_instance,priority";
    check(important, &with(columns, "1,0,,,,800,memory,900,spread,64,true,-5"), &[]);
    let demand = Demand { memory: MemMib::new(20_003), share: Share::from_millionths(250_037) };
    let at = |gpu| DeviceAt { gpu, instance: None };
    let held = Some((vec![(at(0), demand), (at(1), demand)], ConfiguredIsolation::Driver));
    let placed = ClusterPod { held, ..pod("p", Some("b"), several(fraction(250_000), 2)) };
    let columns = "node,devices,placed_isolation";
    let row = "2,250,,,,b,0:20003:250.037|1:20003:250.037,driver";
    check(placed, &with(columns, row), &[]);
}

#[test]
fn what_the_format_does_not_have_is_counted() {
    check(pod("p", Some("elsewhere"), None), "", &[Note::Elsewhere]);
    check(pod("p", None, None), "", &[Note::Elsewhere]);
    let elsewhere = pod("p", Some("elsewhere"), one(fraction(500_000)));
    check(elsewhere, "creation_time,deletion_time\n1,500,,,", &[Note::OnOtherNode]);
    let held = Some((Vec::new(), ConfiguredIsolation::None));
    let lost = ClusterPod { held, ..pod("p", Some("a"), one(fraction(500_000))) };
    check(lost, "creation_time,deletion_time,node\n1,500,,,,a", &[]);
    let mut huge = pod("p", Some("a"), None);
    huge.host = host(1 << 40, 1);
    check(huge, "creation_time,deletion_time\n0,0,,,", &[Note::Absurd]);
}

#[test]
fn devices_are_written_one_by_one() {
    let instance = |profile: &str, mib, other_use| ClusterInstance {
        profile: MigProfile::new(profile),
        memory: MemMib::new(mib),
        is_unavailable: mib == 4864,
        other_use: MemMib::new(other_use),
    };
    let mut cut = node("m", &[("A100", 40_379), ("A100", 40_379), ("T4", 14_910)]);
    cut.gpus[1].instances = vec![instance("3g.20gb", 19_968, 7), instance("1g.5gb", 4864, 0)];
    cut.gpus[2].other_use = MemMib::new(12);
    cut.rule.instances = InstanceUse::Shared;
    cut.rule.enforcement = Enforcement::Mps;
    cut.rule.replicas = Replicas::new(4);
    let snapshot = Snapshot::of(vec![cut], Vec::new(), RowNames::Kept);
    let text = String::from_utf8(snapshot.nodes_csv().unwrap()).unwrap();
    let expected = "sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib,gpu_models,mig,slots,\
         mig_instances,enforcement,unavailable,other_use_mib\n\
         m,64000,256000,3,A100,40379|40379|14910,A100|A100|T4,|3g.20gb:19968 1g.5gb:4864|,4,\
         shared,mps,1.1,1.0:7|2:12\n";
    assert_eq!(text, expected);
    assert_eq!(parse_nodes("n.csv", text.as_bytes()).unwrap(), snapshot.nodes);
}

#[test]
fn nodes_without_gpus_are_left_out_and_mixed_ones_get_the_main_model() {
    let mixed = node("b", &[("L4", 1), ("A|10\n", 1), ("A|10\n", 1)]);
    let mig = ClusterNode { mig_gpus: 2, ..node("m", &[]) };
    let snapshot = Snapshot::of(vec![node("z", &[]), mixed, mig], Vec::new(), RowNames::Kept);
    let expected = TraceNode {
        name: "b".to_owned(),
        cpu_milli: 64_000,
        memory_mib: 256_000,
        gpus: 3,
        model: "A 10".to_owned(),
        more: snapshot.nodes[0].more.clone(),
    };
    assert_eq!(snapshot.nodes, [expected]);
    assert_eq!(snapshot.nodes[0].more.as_ref().unwrap().gpu_models, ["L4", "A 10", "A 10"]);
    let notes = BTreeMap::from([(Note::MigGpu, 2), (Note::NoGpu, 1)]);
    assert_eq!(snapshot.notes, notes);
}

#[test]
fn pods_are_in_creation_order() {
    let at = |name: &str, created| ClusterPod {
        created_unix_seconds: created,
        ..pod(name, None, one(fraction(500_000)))
    };
    let pods = vec![at("b", Some(170)), at("c", Some(160)), at("z", None), at("y", None)];
    let snapshot = Snapshot::of(vec![node("a", &[("L4", 1)])], pods, RowNames::Kept);
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
    assert_eq!(names(RowNames::Kept), (kept, "n".to_owned(), Some(3)));
    let anonymous = ["pod-1", "pod-2", "pod-3", "pod-4", "pod-5"].map(str::to_owned).to_vec();
    assert_eq!(names(RowNames::Anonymous), (anonymous, "node-1".to_owned(), None));
}

#[test]
fn what_is_written_is_read_back() {
    let nodes = vec![node("n,1", &[("L4, \"big\"", 1)]), node("b", &[("H100", 80_000)])];
    let request =
        GpuRequest { models: ModelFilter::new(["L4", "A 10"]), ..GpuRequest::one(Amount::Whole) };
    let mut pods = vec![pod("t/a", Some("b"), Some(request)), pod("t/b", Some("b"), None)];
    pods[0].created_unix_seconds = Some(1_700_000_000);
    let snapshot = Snapshot::of(nodes, pods, RowNames::Kept);
    let read_nodes = parse_nodes("n.csv", snapshot.nodes_csv().unwrap().as_slice()).unwrap();
    let read_pods = parse_pods("p.csv", snapshot.pods_csv().unwrap().as_slice()).unwrap();
    assert_eq!((read_nodes, read_pods), (snapshot.nodes, snapshot.pods));
}
