//! Nodes, GPUs and pods of a made-up cluster, as an API server and the agents report them. Each is made
//! from its number when it is requested: nothing is held.

use std::collections::BTreeMap;

use engine::hardware::pool::ConfiguredIsolation;
use engine::model::reservation::{PlacedDevice, Placement};
use kube_api::request::placement::encode;
use serde_json::json;
use wire::api::state::{DeviceKind, Neighbor};
use wire::ids::{DeviceId, NodeName};
use wire::report::bodies::{DeviceReport, DeviceUse, ProcessUse};
use wire::units::{Demand, MemMib, Share};

use super::bodies::{POD, filled, usual};

/// GPUs of each node.
pub(crate) const GPUS: usize = 8;

/// What the pods of each GPU of a node request, in millionths: half of all is allocated, one GPU is free.
const ALLOCATED: [&[u64]; GPUS] = [
    &[100_000, 500_000, 200_000],
    &[200_000, 250_000, 250_000],
    &[250_000, 250_000, 250_000, 250_000],
    &[500_000, 250_000],
    &[250_000],
    &[200_000, 100_000],
    &[200_000],
    &[],
];

/// Placed pods of each node.
pub(crate) const PODS: usize = {
    let (mut pods, mut gpu) = (0, 0);
    while gpu < GPUS {
        pods += ALLOCATED[gpu].len();
        gpu += 1;
    }
    pods
};

/// Models with their memory, and whether NVLink connects the GPUs of a node.
const MODELS: [(&str, u64, bool); 4] = [
    ("Tesla T4", 15_360, false),
    ("NVIDIA L40S", 46_068, false),
    ("NVIDIA A100-SXM4-80GB", 81_920, true),
    ("NVIDIA H100 80GB HBM3", 81_559, true),
];

/// Memory that the driver keeps of each GPU.
const RESERVED_MIB: u64 = 512;

/// The managed fields of a running pod, as an API server returns them in every list of pods.
const MANAGED_FIELDS: &str = include_str!("pod_managed_fields.json.in");

/// Status of a running pod.
const STATUS: &str = include_str!("pod_status.json.in");

/// A Node object of 12 KB, with `@…@` where nodes differ.
const NODE: &str = include_str!("node.json.in");

/// Failure domains.
const ZONES: usize = 3;

/// A UUID that depends only on two numbers.
fn uuid(kind: u64, number: usize) -> String {
    let mix = |seed: u64| {
        let mut bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits ^ (bits >> 31)
    };
    let number = u64::try_from(number).expect("lengths fit into 64 bits");
    let digits = format!("{:016x}{:016x}", mix(number * 8 + kind), mix(number * 8 + kind + 4));
    let groups = [&digits[..8], &digits[8..12], &digits[13..16], &digits[17..20], &digits[20..]];
    format!("{}-{}-4{}-a{}-{}", groups[0], groups[1], groups[2], groups[3], groups[4])
}

/// Name of a node.
pub(crate) fn node_name(node: usize) -> String {
    format!("node-{node:05}")
}

fn gpu_uuid(node: usize, gpu: usize) -> String {
    format!("GPU-{}", uuid(1, node * GPUS + gpu))
}

/// A placed pod, by its number.
#[derive(Clone, Copy)]
pub(crate) struct Placed(usize);

impl Placed {
    fn on(node: usize, gpu: usize) -> impl Iterator<Item = Self> {
        let row = (node + gpu) % GPUS;
        let first = node * PODS + ALLOCATED[..row].iter().map(|pods| pods.len()).sum::<usize>();
        (first..first + ALLOCATED[row].len()).map(Self)
    }

    fn node(self) -> usize {
        self.0 / PODS
    }

    /// Its GPU, and what it requests.
    fn place(self) -> (usize, u64) {
        let all = ALLOCATED.iter().enumerate();
        let mut all = all.flat_map(|(row, pods)| pods.iter().map(move |share| (row, *share)));
        let (row, share) = all.nth(self.0 % PODS).expect("a node has this many");
        ((row + GPUS - self.node() % GPUS) % GPUS, share)
    }

    fn uid(self) -> String {
        uuid(2, self.0)
    }

    fn share(self) -> Share {
        Share::from_millionths(self.place().1)
    }

    fn memory(self) -> MemMib {
        let (_, mib, _) = MODELS[self.node() % MODELS.len()];
        self.share().of(MemMib::new(mib - RESERVED_MIB))
    }

    /// The annotations that bind wrote.
    fn annotations(self) -> BTreeMap<String, String> {
        let id = DeviceId::new(&gpu_uuid(self.node(), self.place().0)).expect("a legal id");
        let placement = Placement {
            node: NodeName::new(node_name(self.node())),
            devices: vec![PlacedDevice {
                id,
                demand: Demand { memory: self.memory(), share: self.share() },
            }],
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: Vec::new(),
        };
        encode(&placement).expect("a sound placement")
    }

    /// The pod as the API server lists it.
    fn json(self) -> String {
        let millionths = self.share().millionths();
        let request = format!("0.{}", format!("{millionths:06}").trim_end_matches('0'));
        let pod = PodText {
            name: format!("infer-{:06}-7f9c6d5b8-{:05x}", self.0, self.0 * 7 % 0xf_ffff),
            uid: self.uid(),
            version: 100_000 + self.0,
            request,
        };
        pod.bound(&node_name(self.node()), &self.annotations())
    }
}

/// What pods differ in.
#[derive(Clone, Debug)]
pub(crate) struct PodText {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) version: usize,
    /// Its fraction of a GPU.
    pub(crate) request: String,
}

impl PodText {
    /// A pod that comes while others are measured.
    pub(crate) fn arriving(number: usize) -> Self {
        Self {
            name: format!("arriving-{number}"),
            uid: uuid(3, number),
            version: 1_000_000_000 + number,
            request: ["0.1", "0.2", "0.25"][number % 3].to_owned(),
        }
    }

    /// The pod before it is bound.
    pub(crate) fn pending(&self) -> String {
        self.json(&BTreeMap::new())
    }

    /// The pod as it runs on a node.
    pub(crate) fn bound(&self, node: &str, written: &BTreeMap<String, String>) -> String {
        let text = self.json(written);
        let managed = format!(r#""managedFields":{},"ownerReferences""#, MANAGED_FIELDS.trim_end());
        let text = text.replacen(r#""ownerReferences""#, &managed, 1);
        let bound = format!(r#""nodeName":"{node}","schedulerName""#);
        let text = text.replacen(r#""schedulerName""#, &bound, 1);
        let end = text.rfind(r#""status""#).expect("the pod has a status");
        format!(r#"{}"status":{}}}"#, &text[..end], STATUS.trim_end())
    }

    fn json(&self, written: &BTreeMap<String, String>) -> String {
        let mut annotations = format!(r#","gpu-fraction":"{}""#, self.request);
        for (key, value) in written {
            annotations.push_str(&format!(",{}:{}", json!(key), json!(value)));
        }
        filled(POD, |piece| match piece {
            "name" => self.name.clone(),
            "uid" => self.uid.clone(),
            "version" => self.version.to_string(),
            "annotations" => annotations.clone(),
            other => usual(other).to_owned(),
        })
    }
}

/// A Node object.
pub(crate) fn node_json(node: usize) -> String {
    filled(NODE, |piece| match piece {
        "name" => node_name(node),
        "number" => format!("{node:016x}"),
        "product" => MODELS[node % MODELS.len()].0.replace(' ', "-"),
        "sign" => "@".to_owned(),
        "uid" => uuid(0, node),
        "version" => (10_000 + node).to_string(),
        "zone" => (node % ZONES).to_string(),
        unknown => panic!("the template names the value `{unknown}`"),
    })
}

/// The pods of a cluster, as the API server lists them: by name, and so of all nodes mixed.
pub(crate) fn pod_json(nodes: usize, at: usize) -> String {
    let pods = nodes * PODS;
    // A step that has no factor in common with the number of pods, so that each comes once.
    let step = (pods * 5 / 8..).find(|step| greatest_factor(*step, pods) == 1);
    Placed(at * step.expect("there are primes") % pods).json()
}

fn greatest_factor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_factor(b, a % b) }
}

/// The devices of a node, as its agent reports them.
pub(crate) fn inventory(node: usize) -> Vec<DeviceReport> {
    let (model, memory_mib, is_linked) = MODELS[node % MODELS.len()];
    let neighbors = |gpu: usize| {
        let others = (0..GPUS).filter(move |other| is_linked && *other != gpu);
        others.map(|other| Neighbor { id: gpu_uuid(node, other), links: 12 }).collect()
    };
    let device = |gpu: usize| {
        let index = u32::try_from(gpu).expect("few GPUs");
        DeviceReport {
            memory_mib,
            reserved_mib: RESERVED_MIB,
            minor: Some(index),
            numa_node: Some(index / 4),
            neighbors: neighbors(gpu),
            ..DeviceReport::new(gpu_uuid(node, gpu), index, model.to_owned(), DeviceKind::Gpu)
        }
    };
    (0..GPUS).map(device).collect()
}

/// Use of the devices of a node: each pod has a process that uses most of what it holds.
pub(crate) fn uses(node: usize, has_lists: bool) -> Vec<DeviceUse> {
    let device = |gpu: usize| {
        let process = |pod: Placed| ProcessUse {
            pid: u32::try_from(4_000 + pod.0 % PODS).expect("few pods"),
            pod_uid: Some(pod.uid()),
            memory_mib: Some(pod.memory().mib() * 3 / 5),
        };
        let processes: Vec<ProcessUse> = Placed::on(node, gpu).map(process).collect();
        DeviceUse {
            uuid: gpu_uuid(node, gpu),
            used_mib: Some(processes.iter().filter_map(|process| process.memory_mib).sum()),
            busy_percent: Some(40),
            healthy: true,
            fault: None,
            last_xid: None,
            fault_event: None,
            mps: None,
            processes: has_lists.then_some(processes),
            tenants: Vec::new(),
        }
    };
    (0..GPUS).map(device).collect()
}
