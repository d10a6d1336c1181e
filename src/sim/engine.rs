//! Replays a workload against the books: every arrival is asked, reserved and confirmed through the
//! same [`Ledger`] that answers kube-scheduler. There is no placement logic of the simulator's own.
//!
//! Arrivals come one at a time and nothing ever ends. A pod that fits nowhere is lost and not tried
//! again. As nobody else looks after CPU and main memory here, the ledger checks them too.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::curve::Curve;
use super::policy::{MixSource, SimPolicy};
use super::trace::{TraceNode, TracePod};
use super::workload::Workload;
use crate::ledger::books::{Ledger, Settings};
use crate::ledger::questions::Question;
use crate::ledger::reports::{NodeReport, ReportRefusal};
use crate::packing::device::{
    Device, DeviceId, DeviceIndex, DeviceKind, Health, ModelName, NodeInventory, NodeName, PodUid,
    PoolName,
};
use crate::packing::fit::HostRule;
use crate::packing::mix::{Mix, RequestType, Tally};
use crate::packing::request::{Amount, GpuRequest, ModelFilter};
use crate::packing::reservation::PodRef;
use crate::packing::units::{HostAmount, MemMib, MilliCpu, Share, Timestamp};

/// Longer than any replay: here nothing goes stale.
const FOREVER: Duration = Duration::from_secs(u64::MAX / 1000);

/// Load before which a lost pod is a fault of the policy rather than of the cluster, in percent.
const EARLY_LOAD: u64 = 90;

/// What one replay of one policy gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The policy.
    pub policy: SimPolicy,
    /// The seed of the workload, and of the chance that `random` plays with.
    pub seed: i64,
    /// Pods that arrived.
    pub arrivals: u64,
    /// Pods that fitted nowhere.
    pub lost: u64,
    /// Of those, the ones lost while less than 90 % of the cluster's GPUs had been asked for.
    pub lost_before_90: u64,
    /// Place of the first lost pod among the arrivals, from 0; none when every pod found room.
    pub first_lost: Option<usize>,
    /// Allocation against arrived load.
    pub curve: Curve,
    /// State of the cluster each time the load reached another whole percent.
    pub samples: Vec<Sample>,
    /// State of the cluster after the last arrival.
    pub end: Sample,
}

/// State of the cluster after an arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The load that had arrived, in whole percent of the cluster's GPUs, rounded down.
    pub load_percent: u64,
    /// Fragmentation ratio of the free room, against the mix of the whole trace.
    pub fragmentation: Share,
    /// Packing efficiency.
    pub efficiency: Share,
}

impl Run {
    /// Fragmentation ratio when 100 % load had arrived; `None` when the load ends before.
    #[must_use]
    pub fn fragmentation_at_100(&self) -> Option<Share> {
        self.samples.iter().find(|sample| sample.load_percent >= 100).map(|s| s.fragmentation)
    }
}

/// Replays `workload` under `policy`. `progress` is called after every arrival with how many there
/// have been.
///
/// # Errors
/// [`ReportRefusal::Inventory`] for a node with more GPUs than a node can have.
pub fn replay(
    workload: &Workload,
    policy: SimPolicy,
    seed: i64,
    mut progress: impl FnMut(usize),
) -> Result<Run, ReportRefusal> {
    let mut replay = Replay::start(workload, policy, seed)?;
    for (earlier, pod) in workload.arrivals.iter().enumerate() {
        let is_placed = replay.arrive(pod);
        if !is_placed && replay.run.first_lost.is_none() {
            replay.run.first_lost = Some(earlier);
        }
        progress(earlier + 1);
    }
    Ok(replay.finish())
}

/// A replay in progress.
struct Replay {
    ledger: Ledger,
    /// What fragmentation is measured against; the same for all policies.
    yardstick: Mix,
    chance: ChaCha8Rng,
    used_micro: u64,
    run: Run,
}

impl Replay {
    fn start(workload: &Workload, policy: SimPolicy, seed: i64) -> Result<Self, ReportRefusal> {
        let ledger = Ledger::new(Settings {
            claim_for: FOREVER,
            stale_after: FOREVER,
            drain_limit: FOREVER,
            warm_up: Duration::ZERO,
            unmanaged_tolerance: MemMib::ZERO,
            first_session: 1,
        });
        for (rank, node) in workload.nodes.iter().enumerate() {
            add_node(&ledger, rank, node)?;
        }
        let yardstick = mix_of(&workload.population);
        if policy.mix_source() == MixSource::Population {
            ledger.set_mix(yardstick.clone());
        }
        let curve = Curve::new(workload.capacity_milli());
        let end = sample(&ledger, &yardstick, &curve);
        let samples = vec![end];
        let run = Run {
            policy,
            seed,
            arrivals: 0,
            lost: 0,
            lost_before_90: 0,
            first_lost: None,
            curve,
            samples,
            end,
        };
        let chance = ChaCha8Rng::seed_from_u64(seed.cast_unsigned());
        Ok(Self { ledger, yardstick, chance, used_micro: 0, run })
    }

    /// Takes the next pod in. Returns whether it fitted.
    fn arrive(&mut self, pod: &TracePod) -> bool {
        let policy = self.run.policy;
        let question = Question {
            gpu: gpu_request(pod),
            host: host_of(pod.cpu_milli, pod.memory_mib),
            host_rule: HostRule::Checked,
            strategy: policy.strategy(|| self.chance.next_u64()),
        };
        let uid = PodUid::new(pod.name.as_str());
        if policy.mix_source() == MixSource::Arrivals {
            self.ledger.learn(uid.clone(), &question);
        }
        let is_placed = self.place(PodRef { uid, name: pod.name.as_str().into() }, &question);
        let before = self.run.curve.percent_arrived();
        self.run.curve.arrive(pod.demand_milli(), self.used_micro / 1000);
        let now = self.run.curve.percent_arrived();
        self.run.arrivals += 1;
        self.run.lost += u64::from(!is_placed);
        self.run.lost_before_90 += u64::from(!is_placed && now < EARLY_LOAD);
        if now > before {
            self.run.samples.push(sample(&self.ledger, &self.yardstick, &self.run.curve));
        }
        is_placed
    }

    /// Asks, reserves and confirms, as the verbs of the extender do. Returns whether it fitted.
    fn place(&mut self, pod: PodRef, question: &Question) -> bool {
        let Some((node, _)) = self.ledger.best(question) else { return false };
        let placement = self
            .ledger
            .reserve(&pod, node.as_str(), question, Timestamp::START)
            .expect("what a question found is there: nobody else changes these books");
        self.ledger.confirm(&pod.uid);
        let shares = placement.devices.iter().map(|placed| placed.demand.share.millionths());
        self.used_micro += shares.sum::<u64>();
        true
    }

    fn finish(mut self) -> Run {
        self.run.end = sample(&self.ledger, &self.yardstick, &self.run.curve);
        self.run
    }
}

fn sample(ledger: &Ledger, yardstick: &Mix, curve: &Curve) -> Sample {
    let packing = ledger.packing_against(yardstick);
    Sample {
        load_percent: curve.percent_arrived(),
        fragmentation: packing.fragmentation(),
        efficiency: packing.efficiency(),
    }
}

/// Tells the ledger of a node as the API server and the node's agent would.
///
/// The ledger breaks ties by name, so the name begins with the place in the tie-break order.
fn add_node(ledger: &Ledger, rank: usize, node: &TraceNode) -> Result<(), ReportRefusal> {
    let name = NodeName::new(format!("{rank:07}.{}", node.name));
    ledger.see_node(&name, host_of(node.cpu_milli, node.memory_mib), PoolName::new(""));
    let devices = (0..node.gpus).map(|index| {
        Ok(Device {
            id: DeviceId::new(&format!("GPU-{rank:07}-{index:03}"))?,
            index: DeviceIndex(index),
            model: ModelName::new(node.model.as_str()),
            total: gpu_memory(&node.model),
            reserved: MemMib::ZERO,
            kind: DeviceKind::Gpu,
            health: Health::Healthy,
        })
    });
    let inventory = NodeInventory::new(devices.collect::<Result<_, ReportRefusal>>()?)?;
    let hello = NodeReport {
        agent: name.to_string(),
        session: None,
        sequence: 1,
        inventory: Some(inventory),
        uses: Vec::new(),
    };
    ledger.report(name.as_str(), &hello, Timestamp::START).map(|_| ())
}

/// Memory of a GPU of the trace, which names models but not their memory. Pods ask for shares only,
/// and memory follows the share, so it decides nothing; the trace hides what `G1` to `G3` are.
fn gpu_memory(model: &str) -> MemMib {
    MemMib::new(match model {
        "T4" => 15_360,
        "A10" | "G2" => 24_576,
        "V100M32" => 32_768,
        "G3" => 81_920,
        _ => 16_384,
    })
}

fn host_of(cpu_milli: u64, memory_mib: u64) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(cpu_milli), memory: MemMib::new(memory_mib) }
}

fn gpu_request(pod: &TracePod) -> Option<GpuRequest> {
    let count = NonZeroU32::new(pod.num_gpu)?;
    let amount = match pod.gpu_milli {
        1000.. => Amount::Whole,
        milli => Amount::Fraction(Share::from_millionths(u64::from(milli) * 1000)),
    };
    let models = ModelFilter::new(pod.gpu_spec.iter().map(String::as_str));
    Some(GpuRequest { models, ..GpuRequest::several(amount, count) })
}

/// The typical requests among `pods`.
fn mix_of(pods: &[TracePod]) -> Mix {
    let mut counts: BTreeMap<RequestType, Tally> = BTreeMap::new();
    for pod in pods {
        let kind = RequestType::new(gpu_request(pod).as_ref(), MilliCpu::new(pod.cpu_milli));
        counts.entry(kind).or_default().count(MemMib::new(pod.memory_mib));
    }
    Mix::of(&counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packing::policy::Policy;

    fn node(name: &str, gpus: u32, model: &str) -> TraceNode {
        TraceNode {
            name: name.to_owned(),
            cpu_milli: 8000,
            memory_mib: 8192,
            gpus,
            model: model.to_owned(),
        }
    }

    /// A pod as `cpu_milli num_gpu gpu_milli models`.
    fn pod(name: usize, text: &str) -> TracePod {
        let parts: Vec<&str> = text.split(' ').collect();
        TracePod {
            name: name.to_string(),
            cpu_milli: parts[0].parse().unwrap(),
            memory_mib: 1024,
            num_gpu: parts[1].parse().unwrap(),
            gpu_milli: parts[2].parse().unwrap(),
            gpu_spec: parts[3..].iter().map(|model| (*model).to_owned()).collect(),
            creation_time: None,
            deletion_time: None,
        }
    }

    fn run(nodes: &[TraceNode], pods: &[&str], policy: SimPolicy) -> Run {
        let pods = pods.iter().enumerate().map(|(name, text)| pod(name, text)).collect();
        replay(&Workload::as_is(nodes.to_vec(), pods), policy, 1, |_| {}).unwrap()
    }

    #[test]
    fn no_policy_loses_a_pod_that_fits_nor_places_one_that_does_not() {
        let nodes = [node("b", 2, "T4"), node("a", 1, "G2")];
        let early = ["9000 0 0", "1000 1 600 T4", "1000 1 600 T4", "1000 1 1000 G2", "4000 0 0"];
        let late = ["1000 1 500", "1000 2 1000", "1000 1 10 P100", "1000 1 400", "1000 1 400"];
        let pods: Vec<&str> = early.iter().chain(&late).copied().collect();
        for policy in SimPolicy::ALL {
            let run = run(&nodes, &pods, policy);
            assert_eq!((run.arrivals, run.lost, run.lost_before_90), (10, 4, 1), "{policy}");
            assert_eq!(run.first_lost, Some(0), "{policy}");
            assert_eq!((run.curve.at_100(), run.curve.last()), (Some(73.33), 100.0), "{policy}");
        }
    }

    #[test]
    fn the_state_is_sampled_as_the_load_grows_and_at_the_end() {
        let run =
            run(&[node("a", 2, "T4")], &["1000 1 500", "1000 1 1000", "0 0 0"], SimPolicy::Fgd);
        let loads: Vec<u64> = run.samples.iter().map(|sample| sample.load_percent).collect();
        assert_eq!(loads, [0, 25, 75]);
        assert_eq!((run.fragmentation_at_100(), run.first_lost), (None, None));
        assert_eq!((run.curve.last(), run.end.load_percent), (75.0, 75));
        // One GPU is half full, one full; half a GPU is free, which the pod of half a GPU can use:
        // the other two of the three typical pods cannot.
        assert_eq!(run.end.efficiency, Share::from_millionths(750_000));
        assert_eq!(run.end.fragmentation, Share::from_millionths(666_666));
    }

    #[test]
    fn the_upper_of_two_equal_nodes_is_taken() {
        let nodes = [node("z", 1, "T4"), node("a", 1, "G2")];
        for (second, lost) in [("1000 1 1000 G2", 0), ("1000 1 1000 T4", 1)] {
            for policy in [SimPolicy::BestFit, SimPolicy::Product(Policy::BinPack)] {
                let run = run(&nodes, &["1000 1 1000", second], policy);
                assert_eq!(run.lost, lost, "{policy} {second}");
            }
        }
    }

    #[test]
    fn nothing_at_all_can_be_replayed() {
        for policy in SimPolicy::ALL {
            let empty = run(&[], &[], policy);
            assert_eq!((empty.arrivals, empty.curve.at_100(), empty.samples.len()), (0, None, 1));
            let nowhere = run(&[node("a", 0, "")], &["1000 1 1000", "1000 0 0"], policy);
            assert_eq!((nowhere.arrivals, nowhere.lost, nowhere.curve.last()), (2, 1, 0.0));
        }
    }

    #[test]
    fn a_node_with_too_many_gpus_is_refused() {
        let workload = Workload::as_is(vec![node("a", 257, "T4")], Vec::new());
        let refused = replay(&workload, SimPolicy::Fgd, 1, |_| {}).unwrap_err();
        assert!(refused.to_string().contains("`257` devices"), "{refused}");
    }
}
