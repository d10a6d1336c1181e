//! Programs of simulated pods that use more memory than they request now and then, and the probe that
//! shows them.
//!
//! Who plays kubelet starts, restarts and ends them, and says on which GPUs. Everything else follows from
//! the UID, the number of the start and the time: nothing here reads a clock. A GPU has no more memory than
//! it has: a burst for which there is no room does not happen.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::simulated::fleet::{FNV_START, Fleet, FleetNode, fnv1a};
use crate::simulated::probe::sample_of;
use agent::gpu::sample::{Probe, ProbeError, ProcessSampling, Sample};
use wire::report::bodies::{AllocatedDevice, DeviceReport, ProcessUse};
use wire::units::{Share, Timestamp};

/// Least and most seconds until the next burst: short, since pods of a demo live for a minute.
const GAP_SECONDS: RangeInclusive<u64> = 10..=50;

/// Least and most seconds of a burst.
const BURST_SECONDS: RangeInclusive<u64> = 8..=30;

/// Percent of its request that a program uses between bursts. If it were much less, most bursts would take
/// memory that others request and do not use, and end with a restart.
const REST_PERCENT: u64 = 90;

/// Pause of a program that finds no memory at its start.
const AGAIN: Duration = Duration::from_secs(1);

/// What runs in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The devices, with what is requested of each.
    pub devices: Vec<AllocatedDevice>,
    /// The most memory that it may use of its device, in MiB; `None` for a program without bursts. Only
    /// with one device.
    pub limit_mib: Option<u64>,
}

/// How bursts ended, and what was wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BurstCounts {
    /// Bursts that got the memory that they wanted.
    pub served: u64,
    /// Those for which the GPU had no memory.
    pub refused: u64,
    /// Programs that were started on a device on which others still ran whose requests leave no room: a
    /// fault of the one who places them.
    pub crowded: u64,
}

/// The programs of a fleet.
#[derive(Debug)]
pub struct Programs {
    nodes: BTreeMap<String, Mutex<NodePrograms>>,
}

/// The programs of one node.
#[derive(Debug)]
struct NodePrograms {
    /// Memory of each device in MiB.
    memory_mib: BTreeMap<String, u64>,
    /// By the UID of the pod.
    running: BTreeMap<String, RunningProgram>,
    /// Process id of the next one.
    next_pid: u32,
    counts: BurstCounts,
}

/// A program that runs.
#[derive(Debug)]
struct RunningProgram {
    program: Program,
    pid: u32,
    starts: u64,
    chance: ChaCha8Rng,
    phase: Phase,
    /// Memory in use of each device in MiB, in their order.
    used_mib: Vec<u64>,
    /// When the next phase begins.
    next: Option<Timestamp>,
}

/// What a program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It has no memory yet.
    Starts,
    /// It uses a part of its request.
    Rests,
    /// It uses more than its request.
    Bursts,
}

impl Programs {
    /// None yet, on the nodes of a fleet.
    pub fn new(fleet: &Fleet) -> Self {
        let nodes = fleet.nodes.iter().map(|node| {
            let memory_mib = node
                .inventory()
                .into_iter()
                .map(|device| (device.uuid, device.memory_mib.saturating_sub(device.reserved_mib)));
            let state = NodePrograms {
                memory_mib: memory_mib.collect(),
                running: BTreeMap::new(),
                next_pid: 1_000,
                counts: BurstCounts::default(),
            };
            (node.name.clone(), Mutex::new(state))
        });
        Self { nodes: nodes.collect() }
    }

    /// Starts the program of a pod, or another one instead of that which runs. What that had in memory is
    /// lost, and its process ends.
    pub fn start(&self, node: &str, pod_uid: &str, program: Program, now: Timestamp) {
        if let Some(node) = self.nodes.get(node) {
            let mut node = node.lock();
            node.advance(now);
            node.start(pod_uid, program, now);
        }
    }

    /// Ends the program of a pod, if one runs.
    pub fn end(&self, node: &str, pod_uid: &str, now: Timestamp) {
        if let Some(node) = self.nodes.get(node) {
            let mut node = node.lock();
            node.advance(now);
            node.running.remove(pod_uid);
        }
    }

    /// The counts of all nodes.
    pub fn counts(&self) -> BurstCounts {
        let all = self.nodes.values().map(|node| node.lock().counts);
        all.fold(BurstCounts::default(), |sum, one| BurstCounts {
            served: sum.served + one.served,
            refused: sum.refused + one.refused,
            crowded: sum.crowded + one.crowded,
        })
    }

    /// The processes on each device of a node.
    fn processes(&self, node: &str, now: Timestamp) -> BTreeMap<String, Vec<ProcessUse>> {
        let Some(node) = self.nodes.get(node) else { return BTreeMap::new() };
        let mut node = node.lock();
        node.advance(now);
        let mut all: BTreeMap<String, Vec<ProcessUse>> = BTreeMap::new();
        for (pod_uid, running) in &node.running {
            for (device, used_mib) in running.program.devices.iter().zip(&running.used_mib) {
                all.entry(device.uuid.clone()).or_default().push(ProcessUse {
                    pid: running.pid,
                    pod_uid: Some(pod_uid.clone()),
                    memory_mib: Some(*used_mib),
                });
            }
        }
        all
    }
}

impl NodePrograms {
    fn start(&mut self, pod_uid: &str, program: Program, now: Timestamp) {
        let starts = self.running.remove(pod_uid).map_or(0, |before| before.starts + 1);
        self.counts.crowded +=
            u64::from(program.devices.iter().any(|device| self.is_crowded_by(device)));
        let running = RunningProgram {
            used_mib: vec![0; program.devices.len()],
            program,
            pid: self.next_pid,
            starts,
            chance: ChaCha8Rng::seed_from_u64(seed(pod_uid, starts)),
            phase: Phase::Starts,
            next: Some(now),
        };
        self.next_pid = self.next_pid.wrapping_add(1).max(1_000);
        self.running.insert(pod_uid.to_owned(), running);
        self.advance(now);
    }

    /// Whether a device has too little for all whose programs run there and one more.
    fn is_crowded_by(&self, more: &AllocatedDevice) -> bool {
        let all = self.running.values().flat_map(|running| &running.program.devices);
        let here: Vec<&AllocatedDevice> = all.filter(|device| device.uuid == more.uuid).collect();
        let memory: u64 = here.iter().map(|device| device.memory_mib).sum();
        let share: u64 = here.iter().map(|device| device.share_millionths).sum();
        let room = self.memory_mib.get(&more.uuid).copied().unwrap_or_default();
        memory + more.memory_mib > room || share + more.share_millionths > Share::WHOLE.millionths()
    }

    /// Lets all that is due happen, in the order of its time. So it does not matter when it is sampled.
    fn advance(&mut self, now: Timestamp) {
        loop {
            let due = self.running.iter().filter_map(|(uid, running)| Some((running.next?, uid)));
            let Some((at, uid)) = due.min().filter(|(at, _)| *at <= now) else { return };
            let uid = uid.clone();
            self.step(&uid, at);
        }
    }

    /// The next phase of a program.
    fn step(&mut self, uid: &str, at: Timestamp) {
        let Some(mut running) = self.running.remove(uid) else { return };
        match running.phase {
            Phase::Starts => {
                let wanted = running.at_rest();
                let has_room = running.program.devices.iter().zip(&wanted);
                if has_room.into_iter().all(|(device, mib)| *mib <= self.unused(&device.uuid)) {
                    running.used_mib = wanted;
                    running.rest(at);
                } else {
                    running.next = Some(at.plus(AGAIN));
                }
            }
            Phase::Rests => {
                let wanted = running.wants();
                let unused =
                    running.program.devices.first().map(|device| self.unused(&device.uuid));
                if unused.is_some_and(|unused| wanted <= unused) {
                    self.counts.served += 1;
                    running.burst(wanted, at);
                } else {
                    self.counts.refused += 1;
                    running.rest(at);
                }
            }
            Phase::Bursts => {
                running.used_mib = running.at_rest();
                running.rest(at);
            }
        }
        self.running.insert(uid.to_owned(), running);
    }

    /// Memory of a device that no program uses.
    fn unused(&self, uuid: &str) -> u64 {
        let pods = self.running.values();
        let all = pods.flat_map(|pod| pod.program.devices.iter().zip(&pod.used_mib));
        let used: u64 = all.filter(|(device, _)| device.uuid == uuid).map(|(_, used)| used).sum();
        self.memory_mib.get(uuid).copied().unwrap_or_default().saturating_sub(used)
    }
}

impl RunningProgram {
    /// What it uses between bursts.
    fn at_rest(&self) -> Vec<u64> {
        self.program.devices.iter().map(|device| device.memory_mib * REST_PERCENT / 100).collect()
    }

    /// What its next burst wants of its device: between request and limit.
    fn wants(&mut self) -> u64 {
        let requested = self.program.devices.first().map_or(0, |device| device.memory_mib);
        let above = self.program.limit_mib.unwrap_or(requested).saturating_sub(requested);
        requested + above * self.chance.random_range(1..=4) / 4
    }

    fn rest(&mut self, at: Timestamp) {
        self.phase = Phase::Rests;
        let gap = self.drawn(GAP_SECONDS);
        self.next = self.program.limit_mib.map(|_| at.plus(gap));
    }

    fn burst(&mut self, mib: u64, at: Timestamp) {
        self.phase = Phase::Bursts;
        self.used_mib = vec![mib];
        self.next = Some(at.plus(self.drawn(BURST_SECONDS)));
    }

    fn drawn(&mut self, seconds: RangeInclusive<u64>) -> Duration {
        let millis = seconds.start() * 1_000..=seconds.end() * 1_000;
        Duration::from_millis(self.chance.random_range(millis))
    }
}

/// A seed that depends on the pod and the number of its start alone (FNV-1a).
fn seed(pod_uid: &str, starts: u64) -> u64 {
    fnv1a(FNV_START, pod_uid.bytes().chain(starts.to_le_bytes()))
}

/// Shows the programs of one node.
#[derive(Debug)]
pub struct ProgramProbe {
    node: String,
    inventory: Arc<[DeviceReport]>,
    programs: Arc<Programs>,
}

impl ProgramProbe {
    /// Shows those of `node`.
    pub fn new(node: &FleetNode, programs: Arc<Programs>) -> Self {
        Self { node: node.name.clone(), inventory: node.inventory().into(), programs }
    }
}

impl Probe for ProgramProbe {
    /// Lists processes each time, whatever is requested: it costs nothing here.
    fn sample(&mut self, _: ProcessSampling, now: Timestamp) -> Result<Sample, ProbeError> {
        let mut processes = self.programs.processes(&self.node, now);
        Ok(sample_of(&self.inventory, |uuid| processes.remove(uuid).unwrap_or_default()))
    }

    fn may_block(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node with two GPUs of 1,000 MiB.
    fn fleet() -> Fleet {
        let json = r#"{"nodes":[{"name":"n","cpu_milli":1,"memory_mib":1,"gpus":[
            {"uuid":"GPU-a","model":"M","memory_mib":1100,"reserved_mib":100},
            {"uuid":"GPU-b","model":"M","memory_mib":1000}]}]}"#;
        Fleet::from_json(json).unwrap()
    }

    fn program(uuid: &str, memory_mib: u64, limit_mib: Option<u64>) -> Program {
        let share_millionths = memory_mib * 1_000;
        let device = AllocatedDevice { uuid: uuid.to_owned(), memory_mib, share_millionths };
        Program { devices: vec![device], limit_mib }
    }

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    /// `device pid pod MiB` of each process at a time.
    fn seen(programs: &Programs, millis: u64) -> Vec<String> {
        let all = programs.processes("n", at(millis)).into_iter();
        let shown = all.flat_map(|(uuid, processes)| {
            processes.into_iter().map(move |process| {
                let (pod, mib) = (process.pod_uid.unwrap(), process.memory_mib.unwrap());
                format!("{uuid} {} {pod} {mib}", process.pid)
            })
        });
        shown.collect()
    }

    fn used(programs: &Programs, millis: u64) -> u64 {
        let all = programs.processes("n", at(millis));
        all["GPU-a"].iter().filter_map(|process| process.memory_mib).sum()
    }

    #[test]
    fn a_restart_gives_a_new_process_on_another_device_and_an_end_none() {
        let programs = Programs::new(&fleet());
        programs.start("n", "p", program("GPU-a", 500, None), at(0));
        assert_eq!(seen(&programs, 0), ["GPU-a 1000 p 450"]);
        assert_eq!(seen(&programs, 600_000), ["GPU-a 1000 p 450"], "it has no bursts");
        programs.start("n", "p", program("GPU-b", 500, None), at(600_000));
        assert_eq!(seen(&programs, 600_000), ["GPU-b 1001 p 450"]);
        programs.end("n", "p", at(600_001));
        assert_eq!(seen(&programs, 600_001), Vec::<String>::new());
        programs.start("elsewhere", "p", program("GPU-b", 500, None), at(600_001));
    }

    #[test]
    fn bursts_go_up_to_the_limit_and_depend_on_the_pod_and_the_time_alone() {
        let [one, two] = [(); 2].map(|()| Programs::new(&fleet()));
        for programs in [&one, &two] {
            programs.start("n", "p", program("GPU-a", 200, Some(800)), at(0));
        }
        let all: Vec<u64> = (0..600).map(|second| used(&one, second * 1_000)).collect();
        assert!(all.contains(&180) && all.contains(&800), "{all:?}");
        assert!(all.iter().all(|mib| [180, 350, 500, 650, 800].contains(mib)), "{all:?}");
        let seldom: Vec<u64> = (0..60).map(|tenth| used(&two, tenth * 10_000)).collect();
        let same: Vec<u64> = all.iter().copied().step_by(10).collect();
        assert_eq!(seldom, same, "it does not matter how often it is sampled");
        assert_eq!(one.counts().refused, 0);
        assert!(one.counts().served > 8, "{:?}", one.counts());
        two.start("n", "p", program("GPU-a", 200, Some(800)), at(600_000));
        assert_eq!(used(&two, 600_000), 180, "a restart loses what was above the request");
        let second: Vec<u64> = (0..60).map(|tenth| used(&two, 600_000 + tenth * 10_000)).collect();
        assert_ne!(second, seldom, "each start has other bursts");
    }

    #[test]
    fn a_gpu_has_no_more_memory_than_it_has() {
        let programs = Programs::new(&fleet());
        for pod in ["p", "q", "r"] {
            programs.start("n", pod, program("GPU-a", 300, Some(450)), at(0));
        }
        let most = (0..3_000).map(|second| used(&programs, second * 1_000)).max();
        assert!(most <= Some(1_000) && most > Some(900), "{most:?}");
        let counts = programs.counts();
        assert!(counts.served > 20 && counts.refused > 20, "{counts:?}");
        assert_eq!(counts.crowded, 0);
        programs.start("n", "s", program("GPU-a", 200, None), at(3_000_000));
        assert_eq!(programs.counts().crowded, 1, "1,100 MiB are requested of 1,000");
    }

    #[test]
    fn a_program_without_room_starts_as_soon_as_there_is_some() {
        let programs = Programs::new(&fleet());
        programs.start("n", "p", program("GPU-a", 1_000, None), at(0));
        programs.start("n", "q", program("GPU-a", 1_000, None), at(0));
        assert_eq!(seen(&programs, 500), ["GPU-a 1000 p 900", "GPU-a 1001 q 0"]);
        programs.end("n", "p", at(700));
        assert_eq!(seen(&programs, 900), ["GPU-a 1001 q 0"]);
        assert_eq!(seen(&programs, 1_000), ["GPU-a 1001 q 900"]);
    }
}
