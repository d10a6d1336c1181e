//! A cluster in a live extender, as a snapshot has it.
//!
//! Devices and what is held of them are exact. Pods that have ended are left out: their room is
//! free in a replay, although their last processes may still use it.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use engine::hardware::pool::{ConfiguredIsolation, Enforcement, InstanceUse, PoolRule, Replicas};
use engine::model::request::{Amount, GpuRequest, Isolation, Limit};
use sim::snapshot::state::{ClusterGpu, ClusterInstance, ClusterNode, ClusterPod};
use sim::trace::dimensions::DeviceAt;
use wire::api::state;
use wire::api::state::{
    DeviceKind, Health, IsolationMode, Node, NodeReporting, Pod, PodRequest, PodState,
    RequestedIsolation, State, Tenant, Verification,
};
use wire::device::ModelFilter;
use wire::ids::MigProfile;
use wire::units::{Demand, HostAmount, MemMib, MilliCpu, Share};

/// What a tenant holds of a device.
struct HeldDevice<'s> {
    node: &'s str,
    at: DeviceAt,
    profile: Option<&'s str>,
    tenant: &'s Tenant,
}

/// Nodes that exist, and pods that have not ended.
pub(crate) fn cluster(state: &State) -> (Vec<ClusterNode>, Vec<ClusterPod>) {
    let nodes = || state.nodes.iter().filter(|node| node.state != NodeReporting::Gone);
    let mut held: BTreeMap<&str, Vec<HeldDevice<'_>>> = BTreeMap::new();
    let mut unnamed = Vec::new();
    for one in nodes().flat_map(held_on) {
        match one.tenant.pod_uid.as_str() {
            "" => unnamed.push(one),
            uid => held.entry(uid).or_default().push(one),
        }
    }
    let pods = state.pods.iter().filter(|pod| pod.state != PodState::Draining);
    let mut pods: Vec<ClusterPod> =
        pods.map(|pod| cluster_pod(pod, held.remove(pod.pod_uid.as_str()))).collect();
    // What another team holds, where the caller may not see its pods.
    let others = held.into_values().chain(unnamed.into_iter().map(|one| vec![one]));
    pods.extend((1..).zip(others).map(|(number, held)| hidden_pod(number, &held)));
    (nodes().map(cluster_node).collect(), pods)
}

/// What cannot be written, with the number of cases.
pub(crate) fn unsaid(state: &State) -> Vec<(usize, &'static str)> {
    let runs = state.pods.iter();
    let runs = runs.filter(|pod| pod.node.is_some() && pod.state != PodState::Draining);
    let placed = runs.filter(|pod| pod.devices > 0);
    let unknown = placed.filter(|pod| pod.request.is_none()).count();
    let ended = state.pods.iter().filter(|pod| pod.state == PodState::Draining).count();
    let known: BTreeSet<&str> = state.pods.iter().map(|pod| pod.pod_uid.as_str()).collect();
    let devices = || state.nodes.iter().flat_map(|node| &node.devices);
    let tenants = devices().flat_map(|device| &device.tenants);
    let hidden = tenants.filter(|tenant| !known.contains(tenant.pod_uid.as_str())).count();
    let missing = devices()
        .filter(|device| device.isolation.verification == Some(Verification::Missing))
        .count();
    vec![
        (unknown, "pods whose request is not known: written as what they hold"),
        (ended, "pods have ended and still hold devices: left out"),
        (hidden, "devices are held by pods that you may not see: written without names"),
        (missing, "devices without their configured isolation: their nodes are written without it"),
    ]
}

/// The place of each device of a node in a trace, with the device. An instance is on the GPU with
/// its index.
pub(crate) fn places(node: &Node) -> Vec<(DeviceAt, &state::Device)> {
    let (gpus, mut instances): (Vec<_>, Vec<_>) =
        node.devices.iter().partition(|device| device.kind != DeviceKind::MigInstance);
    let mut places = Vec::new();
    for (gpu, device) in (0..).zip(gpus) {
        places.push((DeviceAt { gpu, instance: None }, device));
        if device.kind != DeviceKind::MigParent {
            continue;
        }
        let (own, others): (Vec<_>, Vec<_>) =
            instances.into_iter().partition(|instance| instance.index == device.index);
        instances = others;
        let own = (0..).zip(own);
        places.extend(own.map(|(at, instance)| (DeviceAt { gpu, instance: Some(at) }, instance)));
    }
    places
}

fn held_on(node: &Node) -> Vec<HeldDevice<'_>> {
    let mut held = Vec::new();
    for (at, device) in places(node) {
        let tenants = device.tenants.iter().filter(|tenant| tenant.state != PodState::Draining);
        held.extend(tenants.map(|tenant| HeldDevice {
            node: &node.name,
            at,
            profile: device.mig_profile.as_deref(),
            tenant,
        }));
    }
    held
}

fn cluster_node(node: &Node) -> ClusterNode {
    let is_silent = node.state != NodeReporting::Reporting;
    let is_unavailable = |device: &state::Device| is_silent || device.health != Health::Healthy;
    let mut gpus: Vec<ClusterGpu> = Vec::new();
    for (at, device) in places(node) {
        let memory = MemMib::new(device.capacity_mib);
        let other_use = MemMib::new(device.used_beyond_allocated_mib);
        match (at.instance, gpus.last_mut()) {
            (Some(_), Some(gpu)) => gpu.instances.push(ClusterInstance {
                profile: MigProfile::new(device.mig_profile.as_deref().unwrap_or_default()),
                memory,
                is_unavailable: is_unavailable(device),
                other_use,
            }),
            _ => gpus.push(ClusterGpu {
                model: device.model.clone(),
                memory,
                instances: Vec::new(),
                is_unavailable: is_unavailable(device),
                other_use,
            }),
        }
    }
    for (gpu, (_, device)) in
        gpus.iter_mut().zip(places(node).iter().filter(|(at, _)| at.instance.is_none()))
    {
        // A GPU in MIG mode without instances takes no pod.
        gpu.is_unavailable |= device.kind == DeviceKind::MigParent && gpu.instances.is_empty();
    }
    ClusterNode {
        name: node.name.clone(),
        host: host(&node.capacity),
        gpus,
        mig_gpus: 0,
        rule: rule(node),
    }
}

/// How the pool of the node shares its devices, as far as they show it.
fn rule(node: &Node) -> PoolRule {
    let slots = node.devices.iter().find_map(|device| Some(device.slots.as_ref()?.total));
    let is_shared = node.devices.iter().any(|device| device.shared_instance);
    let is_missing = node
        .devices
        .iter()
        .any(|device| device.isolation.verification == Some(Verification::Missing));
    let enforcement = node.devices.iter().find_map(|device| match device.isolation.configured {
        IsolationMode::Mps => Some(Enforcement::Mps),
        IsolationMode::Driver => Some(Enforcement::Driver),
        IsolationMode::None | IsolationMode::Mig | IsolationMode::Whole => None,
    });
    PoolRule {
        replicas: slots.and_then(Replicas::new),
        instances: if is_shared { InstanceUse::Shared } else { InstanceUse::Whole },
        enforcement: enforcement.filter(|_| !is_missing).unwrap_or_default(),
        ..PoolRule::default()
    }
}

fn cluster_pod(pod: &Pod, held: Option<Vec<HeldDevice<'_>>>) -> ClusterPod {
    let held = held.unwrap_or_default();
    let isolation = pod.isolation.map_or(ConfiguredIsolation::None, configured);
    let request = pod.request.as_ref().and_then(request);
    let devices = held.iter().map(|one| (one.at, amount(one))).collect();
    ClusterPod {
        gpu: request.or_else(|| request_of_held(&held)),
        name: if pod.pod.is_empty() { pod.pod_uid.clone() } else { pod.pod.clone() },
        node: pod.node.clone(),
        host: host(&pod.host),
        created_unix_seconds: pod.created_unix_seconds,
        priority: pod.priority.unwrap_or(0),
        held: pod.node.is_some().then_some((devices, isolation)),
    }
}

fn hidden_pod(number: usize, held: &[HeldDevice<'_>]) -> ClusterPod {
    let isolation = held.first().map(|one| configured(one.tenant.isolation.configured));
    ClusterPod {
        name: format!("hidden-{number}"),
        node: held.first().map(|one| one.node.to_owned()),
        gpu: request_of_held(held),
        held: Some((
            held.iter().map(|one| (one.at, amount(one))).collect(),
            isolation.unwrap_or_default(),
        )),
        ..ClusterPod::default()
    }
}

fn amount(held: &HeldDevice<'_>) -> Demand {
    let allocated = &held.tenant.allocated;
    Demand {
        memory: MemMib::new(allocated.memory_mib),
        share: Share::from_millionths(allocated.share_millionths).min(Share::WHOLE),
    }
}

fn configured(mode: IsolationMode) -> ConfiguredIsolation {
    match mode {
        IsolationMode::None => ConfiguredIsolation::None,
        IsolationMode::Mps => ConfiguredIsolation::Mps,
        IsolationMode::Driver => ConfiguredIsolation::Driver,
        IsolationMode::Mig | IsolationMode::Whole => ConfiguredIsolation::Hardware,
    }
}

/// The GPUs that a pod requests.
fn request(pod: &PodRequest) -> Option<GpuRequest> {
    let share = pod.share_millionths.map(Share::from_millionths);
    let amount = match (share, pod.memory_mib.map(MemMib::new)) {
        (Some(share), Some(memory)) => Amount::FractionAndMemory(share, memory),
        (Some(share), None) if share >= Share::WHOLE => Amount::Whole,
        (Some(share), None) => Amount::Fraction(share),
        (None, Some(memory)) => Amount::Memory(memory),
        (None, None) => match &pod.mig_profile {
            Some(profile) => Amount::MigInstance(MigProfile::new(profile.as_str())),
            None => Amount::SharedSlot,
        },
    };
    let limit_share = pod.limit_share_millionths.map(Share::from_millionths).map(Limit::Fraction);
    let limit_memory = pod.limit_memory_mib.map(MemMib::new).map(Limit::Memory);
    Some(GpuRequest {
        models: ModelFilter::new(pod.models.iter().map(String::as_str)),
        isolation: match pod.isolation {
            RequestedIsolation::None => Isolation::None,
            RequestedIsolation::Memory => Isolation::Memory,
            RequestedIsolation::Hardware => Isolation::Hardware,
        },
        limit: limit_share.or(limit_memory),
        policy: pod.policy.as_deref().and_then(|policy| policy.parse().ok()),
        min_memory: MemMib::new(pod.min_memory_mib),
        by_instance: pod.by_instance,
        ..GpuRequest::several(amount, NonZeroU32::new(pod.devices)?)
    })
}

/// The request of a pod of which only what it holds is known; `None` if it holds no device.
fn request_of_held(held: &[HeldDevice<'_>]) -> Option<GpuRequest> {
    let first = held.first()?;
    let share = held.iter().map(|one| amount(one).share).max()?;
    let memory = held.iter().map(|one| amount(one).memory).max()?;
    let amount = match first.profile {
        Some(profile) if share >= Share::WHOLE => Amount::MigInstance(MigProfile::new(profile)),
        _ if share >= Share::WHOLE => Amount::Whole,
        _ if share == Share::ZERO && memory > MemMib::ZERO => Amount::Memory(memory),
        _ if memory == MemMib::ZERO => Amount::Fraction(share.max(Share::from_millionths(1))),
        _ => Amount::FractionAndMemory(share, memory),
    };
    let count = NonZeroU32::new(u32::try_from(held.len()).ok()?)?;
    Some(GpuRequest::several(amount, count))
}

fn host(amount: &state::HostAmount) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(amount.cpu_milli), memory: MemMib::new(amount.memory_mib) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use sim::snapshot::state::{RowNames, Snapshot};

    fn amount(mib: u64, millionths: u64) -> Value {
        json!({"memoryMib": mib, "shareMillionths": millionths})
    }

    fn device(id: &str, index: u32, kind: &str, mib: u64, more: &Value) -> Value {
        let mut device = json!({"id": id, "index": index, "model": "A100", "kind": kind,
            "isolation": {"configured": "None"}, "health": "Healthy", "canLimitMemory": false,
            "capacityMib": mib, "allocated": amount(0, 0), "held": amount(0, 0),
            "free": amount(0, 0), "usedBeyondAllocatedMib": 0, "untrackedMib": 0,
            "overallocated": false, "tenants": []});
        for (key, value) in more.as_object().into_iter().flatten() {
            device[key] = value.clone();
        }
        device
    }

    fn tenant(uid: &str, state: &str, allocated: &Value) -> Value {
        json!({"podUid": uid, "pod": "", "state": state, "allocated": allocated,
            "isolation": {"configured": "Mps", "verified": "None"}})
    }

    fn state() -> State {
        let parts = [
            tenant("", "Confirmed", &amount(100, 250_001)),
            tenant("unknown", "Confirmed", &amount(200, 0)),
            tenant("gone", "Draining", &amount(300, 100_000)),
        ];
        let mps = json!({"configured": "Mps", "verification": "Verified"});
        let shared = json!({"migProfile": "3g.20gb", "sharedInstance": true,
            "slots": {"total": 7, "free": 7}, "isolation": mps});
        let ill = json!({"migProfile": "1g.5gb", "health": "Unhealthy"});
        // In the order of the ledger; instances have the index of their GPU.
        let devices = [
            device("GPU-a", 0, "Gpu", 40_379, &json!({"tenants": parts, "isolation": mps})),
            device("GPU-b", 1, "MigParent", 40_379, &json!({})),
            device("MIG-x", 1, "MigInstance", 19_968, &shared),
            device("MIG-y", 1, "MigInstance", 4_864, &ill),
            device("GPU-c", 2, "MigParent", 40_379, &json!({})),
        ];
        let node = |name: &str, state: &str, devices: &[Value]| {
            json!({"name": name, "pool": "", "state": state, "devices": devices,
                "capacity": {"cpuMilli": 1, "memoryMib": 2}, "free": {"cpuMilli": 1, "memoryMib": 2}})
        };
        let silent = device("GPU-s", 0, "Gpu", 9, &json!({"usedBeyondAllocatedMib": 4}));
        let pod = |uid: &str, state: &str, node: &str| {
            json!({"podUid": uid, "pod": format!("t/{uid}"), "node": node, "state": state,
                "host": {"cpuMilli": 5, "memoryMib": 6}, "devices": 1, "models": []})
        };
        let nodes = [
            node("n", "Reporting", &devices),
            node("s", "NotReporting", &[silent]),
            node("z", "Gone", &[device("GPU-z", 0, "Gpu", 9, &json!({}))]),
        ];
        let pods = [pod("unknown", "Confirmed", "n"), pod("gone", "Draining", "n")];
        let state = json!({"apiVersion": "gpupack.dev/v1alpha1", "kind": "State", "nodes": nodes,
            "pods": pods});
        serde_json::from_value(state).unwrap()
    }

    #[test]
    fn devices_and_tenants_are_as_the_extender_has_them() {
        let state = state();
        let (nodes, pods) = cluster(&state);
        let snapshot = Snapshot::of(nodes, pods, RowNames::Kept);
        let text = |csv: Vec<u8>| String::from_utf8(csv).unwrap();
        assert_eq!(
            text(snapshot.nodes_csv().unwrap()),
            "sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib,mig,slots,mig_instances,enforcement,\
             unavailable,other_use_mib\n\
             n,1,2,3,A100,40379,|3g.20gb:19968 1g.5gb:4864|,7,shared,mps,1.1|2,\n\
             s,1,2,1,A100,9,,,,,0,0:4\n"
        );
        assert_eq!(
            text(snapshot.pods_csv().unwrap()),
            "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time,\
             gpu_memory_mib,node,devices,placed_isolation\n\
             hidden-1,0,0,1,250.001,,,,100,n,0:100:250.001,mps\n\
             t.unknown,5,6,1,0,,,,200,n,0:200:0,\n"
        );
        let said = unsaid(&state);
        assert_eq!(said.iter().map(|(cases, _)| *cases).collect::<Vec<_>>(), [1, 1, 1, 0]);
    }

    #[test]
    fn a_node_with_a_device_without_its_isolation_is_written_without_it() {
        let mut state = state();
        state.nodes[0].devices[0].isolation.verification = Some(Verification::Missing);
        assert_eq!(unsaid(&state)[3].0, 1);
        assert_eq!(cluster(&state).0[0].rule.enforcement, Enforcement::None);
    }
}
