//! The demo's stream of pods: the requests of a cluster with many teams, as full Pod objects in the
//! form that kube-scheduler 1.36 sends. The same seed gives the same stream.

use std::collections::BTreeMap;

use anyhow::Result;
use k8s_openapi::jiff::Timestamp;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::simulated::mixed::{MIG_POOL, SLOTS_POOL};
use engine::hardware::pool::{Borrow, InstanceUse, PoolRule, PoolRules, Replicas};
use engine::model::reservation::Placement;
use engine::model::team::TeamShare;
use kube_api::config::pods::quota::SharesConfig;
use kube_api::request::placement::encode;
use wire::ids::PoolName;
use wire::units::Share;

/// A Pod object of several KB, with `@…@` for the values that differ.
const TEMPLATE: &str = include_str!("pod.json.in");

/// The teams, each with its part of 100 pods.
const TEAMS: [(&str, u32); 8] = [
    ("search", 22),
    ("recsys", 18),
    ("chat", 16),
    ("vision", 13),
    ("speech", 10),
    ("research", 10),
    ("batch", 7),
    ("notebooks", 4),
];

/// The kinds of pods to draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Draw {
    /// Pods that some node could run, which fill the fleet.
    Sound,
    /// The same and, among them, pods without a GPU, too large ones and invalid ones.
    Everything,
}

/// One pod of the stream.
#[derive(Clone, Debug)]
pub(crate) struct DemoPod {
    pub(crate) uid: String,
    pub(crate) namespace: &'static str,
    pub(crate) name: String,
    pub(crate) json: String,
}

/// What gpupack reads of a pod of the stream.
#[derive(Deserialize, Serialize)]
struct Bare {
    metadata: BareMetadata,
    spec: BareSpec,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct BareMetadata {
    namespace: String,
    name: String,
    uid: String,
    creation_timestamp: Option<String>,
    annotations: BTreeMap<String, String>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct BareSpec {
    node_name: Option<String>,
    scheduler_name: String,
    containers: Vec<BareContainer>,
}

#[derive(Deserialize, Serialize)]
struct BareContainer {
    name: String,
    resources: Value,
}

impl DemoPod {
    /// The object of a pod with this placement. Of a large fleet there are hundreds of thousands: it has only
    /// what gpupack reads.
    ///
    /// # Errors
    /// A placement that cannot be written, or a pod that cannot be read.
    pub(crate) fn bound(&self, placement: &Placement) -> Result<Value> {
        let mut pod: Bare = serde_json::from_str(&self.json)?;
        pod.metadata.annotations.extend(encode(placement)?);
        pod.spec.node_name = Some(placement.node.to_string());
        Ok(serde_json::to_value(pod)?)
    }
}

/// A kind of pod.
struct PodKind {
    workload: &'static str,
    weight: u32,
    annotations: &'static str,
    /// Whole devices, by the name of the resource.
    devices: Option<(&'static str, u32)>,
    /// CPU in thousandths of a core: little, so that GPUs run out before cores.
    cpu_milli: u32,
    memory_mib: u32,
    /// Whether its container may be restarted, as the webhook prepares it.
    is_movable: bool,
}

/// A kind that some node could run.
const fn kind(
    workload: &'static str,
    weight: u32,
    annotations: &'static str,
    cpu_milli: u32,
    memory_mib: u32,
) -> PodKind {
    let (devices, is_movable) = (None, false);
    PodKind { workload, weight, annotations, devices, cpu_milli, memory_mib, is_movable }
}

/// Pods that fill the fleet: shares, memory, both, two devices, model filters, whole GPUs.
const SOUND: [PodKind; 16] = [
    kind("embedder", 12, r#","gpu-fraction":"0.1""#, 500, 2_048),
    kind("ranker", 11, r#","gpu-fraction":"0.2""#, 1_000, 4_096),
    kind("notebook", 13, r#","gpu-fraction":"0.25""#, 1_000, 6_144),
    kind("reranker", 6, r#","gpu-fraction":"0.3","gpu-fraction.limit":"0.6""#, 1_500, 8_192),
    kind("chat-7b", 14, r#","gpu-fraction":"0.5""#, 3_000, 12_288),
    kind("chat-13b", 5, r#","gpu-fraction":"0.75""#, 4_000, 16_384),
    kind("ocr", 6, r#","gpu-memory":"4096""#, 1_000, 4_096),
    kind("asr", 6, r#","gpu-memory":"8192","gpu-memory.limit":"12Gi""#, 2_000, 8_192),
    kind("diffusion", 4, r#","gpu-memory":"16384""#, 3_000, 12_288),
    kind("vectors", 5, r#","gpu-fraction":"0.25","gpu-memory":"10240""#, 1_500, 8_192),
    kind(
        "tensor-pair",
        3,
        r#","gpu-fraction":"0.5","gpu-fraction-num-devices":"2""#,
        4_000,
        16_384,
    ),
    kind(
        "chat-34b",
        4,
        r#","gpu-fraction":"0.5","gpupack.dev/gpu-model":"A100|H100|H200""#,
        4_000,
        24_576,
    ),
    kind("edge", 3, r#","gpu-fraction":"0.25","gpupack.dev/gpu-model":"L4|T4|A10""#, 1_000, 4_096),
    kind("canary", 2, r#","gpu-fraction":"0.2","gpupack.dev/policy":"spread""#, 1_000, 4_096),
    PodKind { devices: Some(("nvidia.com/gpu", 1)), ..kind("finetune", 5, "", 6_000, 24_576) },
    PodKind { devices: Some(("nvidia.com/gpu", 2)), ..kind("train", 1, "", 12_000, 49_152) },
];

/// Pods for pools: slots, instances, parts of instances, isolation.
const POOLED: [PodKind; 4] = [
    PodKind { devices: Some(("nvidia.com/gpu.shared", 1)), ..kind("lab", 6, "", 1_000, 4_096) },
    PodKind { devices: Some(("nvidia.com/mig-1g.5gb", 1)), ..kind("exam", 3, "", 1_000, 4_096) },
    kind(
        "tutorial",
        3,
        r#","gpu-fraction":"0.5","gpupack.dev/gpu-model":"MIG 3g.20gb""#,
        1_000,
        4_096,
    ),
    kind("tenant", 2, r#","gpu-memory":"9000","gpupack.dev/isolation":"hardware""#, 1_000, 4_096),
];

/// A notebook that may use more than it requests while that is free.
const fn lab(workload: &'static str, weight: u32, annotations: &'static str) -> PodKind {
    PodKind { is_movable: true, ..kind(workload, weight, annotations, 1_000, 6_144) }
}

/// Notebooks for pools that lend.
const BURSTING: [PodKind; 3] = [
    lab(
        "lab-small",
        12,
        r#","gpu-fraction":"0.125","gpu-fraction.limit":"0.5","gpupack.dev/movable":"restart""#,
    ),
    lab(
        "lab-medium",
        12,
        r#","gpu-fraction":"0.25","gpu-fraction.limit":"0.8","gpupack.dev/movable":"restart""#,
    ),
    lab(
        "lab-large",
        10,
        r#","gpu-fraction":"0.5","gpu-fraction.limit":"1","gpupack.dev/movable":"restart""#,
    ),
];

/// What the webhook writes into a container that may be restarted.
const RESIZE_POLICY: &str =
    r#","resizePolicy":[{"resourceName":"cpu","restartPolicy":"RestartContainer"}]"#;

/// Odd pods: no GPU at all, more than any GPU has, a model that no node has, typing errors.
const ODD: [PodKind; 6] = [
    kind("web", 4, "", 500, 1_024),
    kind("huge", 1, r#","gpu-memory":"200000""#, 4_000, 16_384),
    kind("wishful", 1, r#","gpu-fraction":"0.5","gpupack.dev/gpu-model":"B200""#, 2_000, 8_192),
    kind("typo", 1, r#","gpu-fraction":"1.5""#, 1_000, 4_096),
    kind("misspelt", 1, r#","gpu-fractions":"0.5""#, 1_000, 4_096),
    kind("orphan", 1, r#","gpu-fraction.limit":"0.5""#, 1_000, 4_096),
];

/// What the teams may have of this number of GPUs: two thirds of what they use on average are guaranteed,
/// and the smallest team may have no more than that.
pub(crate) fn shares(gpus: u64) -> SharesConfig {
    SharesConfig::of(TEAMS.into_iter().map(|(name, weight)| {
        let part = gpus * u64::from(weight) * Share::WHOLE.millionths() / 150;
        let guaranteed = Share::from_millionths(part / 500_000 * 500_000);
        let at_most = (name == "notebooks").then_some(guaranteed.max(Share::WHOLE));
        (name.to_owned(), TeamShare { guaranteed, at_most })
    }))
}

/// Slots of GPUs in one pool, shared MIG instances in the other.
pub(crate) fn pools() -> PoolRules {
    let slots = PoolRule { replicas: Replicas::new(4), ..PoolRule::default() };
    let instances = PoolRule { instances: InstanceUse::Shared, ..PoolRule::default() };
    PoolRules::new([(PoolName::new(SLOTS_POOL), slots), (PoolName::new(MIG_POOL), instances)])
}

/// Pools in which pods may use more than they request while it is free: all nodes that are in none of
/// [`pools`].
pub(crate) fn lending(pools: &PoolRules) -> PoolRules {
    let borrow = Borrow::Memory { most: Share::WHOLE };
    let lends = (PoolName::new(""), PoolRule { borrow, ..PoolRule::default() });
    PoolRules::new(pools.iter().map(|(name, rule)| (name.clone(), *rule)).chain([lends]))
}

/// The stream.
pub(crate) struct PodStream {
    random: ChaCha8Rng,
    /// The template, split at its `@`: text and names of values alternate.
    pieces: Vec<&'static str>,
    made: u64,
    pooled: &'static [PodKind],
    bursting: &'static [PodKind],
}

impl PodStream {
    /// The stream of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        let pieces = TEMPLATE.trim_end().split('@').collect();
        Self {
            random: ChaCha8Rng::seed_from_u64(seed),
            pieces,
            made: 0,
            pooled: &[],
            bursting: &[],
        }
    }

    /// Adds pods that request slots, instances and isolation to the others.
    pub(crate) fn request_of_pools(&mut self) {
        self.pooled = &POOLED;
    }

    /// Adds notebooks that may use more than they request.
    pub(crate) fn burst(&mut self) {
        self.bursting = &BURSTING;
    }

    /// The next pod, with this creation time on the wall clock.
    pub(crate) fn next(&mut self, draw: Draw, created_unix_seconds: u64) -> DemoPod {
        let sound = SOUND.iter().chain(self.pooled).chain(self.bursting);
        let kind = match draw {
            Draw::Sound => drawn(&mut self.random, sound),
            Draw::Everything => drawn(&mut self.random, sound.chain(&ODD)),
        };
        let teams: u32 = TEAMS.iter().map(|(_, weight)| weight).sum();
        let mut left = self.random.random_range(0..teams);
        let team = TEAMS.iter().find(|(_, weight)| {
            let hit = left < *weight;
            left = left.saturating_sub(*weight);
            hit
        });
        let namespace = team.map_or("batch", |(name, _)| name);
        self.made += 1;
        let (number, bits) = (self.made, self.random.random::<u64>());
        let uid = format!("{:08x}-0000-4000-8000-{:012x}", bits >> 32, number);
        // Different ones for a million pods: the multiplier is odd.
        let suffix = number.wrapping_mul(0x9_e375) & 0xf_ffff;
        let name = format!("{}-7f9c6d5b8-{suffix:05x}", kind.workload);
        let pod = DemoPod { uid, namespace, name, json: String::new() };
        DemoPod { json: self.written(kind, &pod, created_unix_seconds), ..pod }
    }

    fn written(&self, kind: &PodKind, pod: &DemoPod, created_unix_seconds: u64) -> String {
        let seconds = i64::try_from(created_unix_seconds).unwrap_or(0);
        let created = Timestamp::from_second(seconds).unwrap_or_default().to_string();
        let devices = match kind.devices {
            None => String::new(),
            Some((resource, count)) => format!(r#","{resource}":"{count}""#),
        };
        let (cpu, memory) = (kind.cpu_milli.to_string(), kind.memory_mib.to_string());
        let version = (100_000 + self.made).to_string();
        let mut json = String::with_capacity(TEMPLATE.len() + 512);
        for (at, piece) in self.pieces.iter().enumerate() {
            json.push_str(match *piece {
                text if at % 2 == 0 => text,
                "name" => &pod.name,
                "workload" => kind.workload,
                "namespace" => pod.namespace,
                "uid" => &pod.uid,
                "version" => &version,
                "created" => &created,
                "annotations" => kind.annotations,
                "devices" => &devices,
                "cpu" => &cpu,
                "memory" => &memory,
                "resize" if kind.is_movable => RESIZE_POLICY,
                "resize" => "",
                "sign" => "@",
                unknown => unreachable!("the template names the value `{unknown}`"),
            });
        }
        json
    }
}

fn drawn<'a>(
    random: &mut ChaCha8Rng,
    kinds: impl Iterator<Item = &'a PodKind> + Clone,
) -> &'a PodKind {
    let weights: u32 = kinds.clone().map(|kind| kind.weight).sum();
    let mut left = random.random_range(0..weights);
    let mut kinds = kinds;
    let hit = kinds.find(|kind| {
        let hit = left < kind.weight;
        left = left.saturating_sub(kind.weight);
        hit
    });
    hit.expect("a number below the sum of weights hits one of them")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use engine::model::request::Movable;
    use kube_api::pod::seen_pod::SeenPod;

    fn drawn(seed: u64, draw: Draw) -> Vec<(DemoPod, SeenPod)> {
        let mut stream = PodStream::new(seed);
        let pods = (0..2_000).map(|_| stream.next(draw, 1_772_442_847));
        pods.map(|pod| (SeenPod::from_json(&pod.json).unwrap(), pod)).map(|(a, b)| (b, a)).collect()
    }

    #[test]
    fn the_stream_has_real_pods_and_depends_only_on_its_seed() {
        let pods = drawn(7, Draw::Everything);
        let uids: BTreeSet<&str> = pods.iter().map(|(pod, _)| pod.uid.as_str()).collect();
        assert_eq!(uids.len(), pods.len());
        for (pod, seen) in &pods {
            assert_eq!(seen.pod.uid.as_str(), pod.uid);
            assert_eq!(seen.pod.to_string(), format!("{}/{}", pod.namespace, pod.name));
            assert_eq!(seen.life.created_unix_seconds, 1_772_442_847);
            assert!(pod.json.len() > 3_000 && !pod.json.contains("@a"), "{}", pod.json);
        }
        let same = drawn(7, Draw::Everything);
        assert!(pods.iter().zip(&same).all(|(a, b)| a.0.json == b.0.json));
        assert_ne!(drawn(8, Draw::Everything)[0].0.json, pods[0].0.json);
    }

    #[test]
    fn the_initial_fill_is_valid_and_the_stream_sometimes_is_not() {
        let sound = drawn(7, Draw::Sound);
        assert!(sound.iter().all(|(_, seen)| matches!(seen.request, Ok(Some(_)))));
        let shapes: BTreeSet<String> =
            sound.iter().map(|(_, seen)| format!("{:?}", seen.request)).collect();
        assert_eq!(shapes.len(), SOUND.len());
        let all = drawn(7, Draw::Everything);
        let refused: BTreeSet<&str> =
            all.iter().filter_map(|(_, seen)| Some(seen.request.as_ref().err()?.label())).collect();
        assert_eq!(refused.into_iter().collect::<Vec<_>>(), ["fraction", "orphan", "unknown_key"]);
        assert!(all.iter().any(|(_, seen)| seen.request == Ok(None)));
    }

    #[test]
    fn bursting_notebooks_may_borrow_and_only_come_where_pools_lend() {
        let mut stream = PodStream::new(7);
        stream.burst();
        let pods: Vec<DemoPod> = (0..500).map(|_| stream.next(Draw::Sound, 1)).collect();
        for kind in &BURSTING {
            let of_kind: Vec<&DemoPod> =
                pods.iter().filter(|pod| pod.name.starts_with(kind.workload)).collect();
            assert!(of_kind.len() > 20, "{}", kind.workload);
            for pod in of_kind {
                let seen = SeenPod::from_json(&pod.json).unwrap();
                let request = seen.request.unwrap().unwrap();
                assert_eq!(request.movable, Movable::Restart);
                assert!(request.limit.is_some() && seen.containers.gpu.is_some(), "{}", pod.json);
            }
        }
        for (_, seen) in drawn(7, Draw::Sound) {
            assert!(seen.containers.gpu.is_none(), "{seen:?}");
        }
        let rules = lending(&pools());
        assert!(rules.lends() && !pools().lends());
        assert_eq!(rules.iter().count(), 3);
    }

    #[test]
    fn pool_pods_are_valid_and_only_generated_with_pools() {
        let mut stream = PodStream::new(7);
        stream.request_of_pools();
        let pods: Vec<DemoPod> = (0..500).map(|_| stream.next(Draw::Sound, 1)).collect();
        for kind in &POOLED {
            let of_kind = || pods.iter().filter(|pod| pod.name.starts_with(kind.workload));
            assert!(of_kind().count() > 2, "{}", kind.workload);
            assert!(of_kind().all(|pod| {
                matches!(SeenPod::from_json(&pod.json).unwrap().request, Ok(Some(_)))
            }));
            let without = drawn(7, Draw::Sound);
            assert!(!without.iter().any(|(pod, _)| pod.name.starts_with(kind.workload)));
        }
    }
}
