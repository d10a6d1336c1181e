use std::collections::{BTreeMap, BTreeSet};

use agent::processes::pods::{groups_in_cgroup, pod_in_cgroup};
use cli::simulated::fleet::Fleet;
use kube_api::config::file::Config;
use server::history::series::{Moments, read};
use sim::run::placed::{end_of, keep_placements};
use sim::run::policy::SimPolicy;
use sim::snapshot::state::Snapshot;
use sim::trace::read::{
    TraceNode, TracePod, parse_nodes, parse_pods, pods_of_unknown_models, size_up,
};
use sim::trace::write::pods_csv;

/// The configuration: what is read is the same in another form of YAML, and faults are told.
pub(crate) fn config(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    let config = match Config::from_yaml(text) {
        Ok(config) => config,
        Err(faults) => {
            assert!(!faults.faults.is_empty() && !faults.faults.iter().any(String::is_empty));
            return;
        }
    };
    let value: serde_yaml_ng::Value = serde_yaml_ng::from_str(text).unwrap();
    // It cannot write every tag that it reads.
    let Ok(written) = serde_yaml_ng::to_string(&value) else { return };
    assert_eq!(Config::from_yaml(&written), Ok(config), "{written}");
}

/// A fleet of simulated nodes: what is read is written and read alike.
pub(crate) fn fleet(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    let Ok(fleet) = Fleet::from_json(text) else { return };
    let written = serde_json::to_string(&fleet).unwrap();
    assert_eq!(Fleet::from_json(&written).unwrap(), fleet);
    let devices: Vec<String> = fleet
        .nodes
        .iter()
        .flat_map(|node| node.inventory().into_iter().map(|device| device.uuid))
        .collect();
    assert_eq!(devices.iter().collect::<BTreeSet<_>>().len(), devices.len(), "UUIDs are unique");
}

/// A trace, as nodes or as pods: what is read is written and read alike, sums are no more than 2^50, and a cluster of
/// these nodes can be made, on which these pods are placed or not.
pub(crate) fn trace(csv: &[u8]) {
    let (nodes, pods) = (parse_nodes("nodes", csv), parse_pods("pods", csv));
    let (has_nodes, has_pods) = (nodes.is_ok(), pods.is_ok());
    let trace = Snapshot {
        nodes: nodes.unwrap_or_default(),
        pods: pods.unwrap_or_default(),
        notes: BTreeMap::new(),
    };
    if has_nodes {
        let written = trace.nodes_csv().unwrap();
        assert_eq!(parse_nodes("nodes", written.as_slice()).unwrap(), trace.nodes);
        assert!(trace.nodes.iter().map(|node| node.capacity_milli()).sum::<u64>() < 1 << 50);
    }
    if has_pods {
        let written = trace.pods_csv().unwrap();
        assert_eq!(parse_pods("pods", written.as_slice()).unwrap(), trace.pods);
        assert!(trace.pods.iter().map(|pod| pod.demand_milli()).sum::<u64>() < 1 << 50);
    }
    assert!(pods_of_unknown_models(&trace.nodes, &trace.pods) <= trace.pods.len());
    let mut pods = trace.pods.clone();
    size_up(&trace.nodes, &mut pods);
    assert!(pods.iter().map(|pod| pod.demand_milli()).sum::<u64>() < 1 << 50);
    // A ledger takes a while: only for what has more than shares.
    let has_more = trace.nodes.iter().any(|node| node.more.is_some())
        || trace.pods.iter().any(|pod| pod.more.is_some());
    if has_more {
        played(&trace.nodes, pods);
    }
}

/// Places pods on nodes; those that name a node of the trace stay there.
fn played(nodes: &[TraceNode], mut pods: Vec<TracePod>) {
    // Nodes and pods are never read from one file: the other half is ours.
    let nodes = if nodes.is_empty() { two_nodes() } else { nodes.to_vec() };
    if pods.is_empty() {
        pods = two_pods();
    }
    pods.truncate(8);
    if keep_placements(&nodes, &mut pods).is_err() {
        pods.iter_mut().for_each(|pod| pod.place(None));
    }
    // More kinds of devices than the ledger keeps: told, and no more.
    let few = &nodes[..nodes.len().min(8)];
    let Ok(end) = end_of(few, &pods, SimPolicy::BINPACK, 1) else { return };
    assert_eq!(end.pods.len(), pods.len());
    let capacity: u64 = few.iter().map(TraceNode::capacity_milli).sum();
    assert_eq!(end.free.len() * 1000, usize::try_from(capacity).unwrap());
    let written = pods_csv(&end.pods).unwrap();
    let read = parse_pods("end", written.as_slice()).unwrap();
    assert!(read.iter().zip(&end.pods).all(|(read, pod)| read.placed() == pod.placed()));
}

fn two_nodes() -> Vec<TraceNode> {
    let text = "sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib,mig,slots\n\
        n.1,64000,262144,2,A100,40379,3g.20gb:19968 1g.5gb:4864|,\nn,64000,262144,2,T4,,,4\n";
    parse_nodes("ours", text.as_bytes()).unwrap()
}

fn two_pods() -> Vec<TracePod> {
    let text = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib\n\
        a,100,100,1,250,\nb,100,100,2,,4096\n";
    parse_pods("ours", text.as_bytes()).unwrap()
}

/// An answer of Prometheus: only what was asked for, at the moments that were asked for, and no other numbers.
pub(crate) fn prometheus(body: &[u8]) {
    let at = Moments { last: 1_700_000_000, every: 300, count: 4 };
    let wanted = ["uid-a", "uid-b"].into();
    let Ok(found) = read(body, &at, &wanted) else { return };
    for (uid, values) in &found.series {
        assert!(wanted.contains(uid.as_str()) && values.len() == at.count);
        assert!(values.iter().flatten().all(|value| value.is_finite() && *value >= 0.0));
    }
}

/// The control groups of a process: a pod has a UID of 32 digits, and no path leaves those of the kernel.
pub(crate) fn cgroup(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    let pod = pod_in_cgroup(&text);
    if let Some(pod) = &pod {
        let digits = pod.as_str().chars().filter(|c| *c != '-');
        assert!(digits.clone().count() == 32 && digits.clone().all(|c| c.is_ascii_hexdigit()));
    }
    let groups = groups_in_cgroup(&text);
    assert!(groups.len() <= 4);
    for group in &groups {
        assert!(group.starts_with("/sys/fs/cgroup/") && !group.split('/').any(|part| part == ".."));
    }
    assert!(groups.is_empty() || pod.is_some(), "a group of a pod, and no pod: {groups:?}");
}
