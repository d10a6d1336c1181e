//! The loops: what happens to the hardware reaches the extender, without a restart of anything.

use std::time::Duration;

use agent::gpu::clearing::Clearing;
use agent::gpu::lent_limits::LentLimits;
use agent::node::client::Proof;
use agent::node::config::AgentConfig;
use agent::node::replicas::Resolver;
use agent::node::run::run_node;
use agent::nvml::probe::NvmlProbe;
use agent::upkeep::condition::Upkeep;
use runtime::clock::Clock;
use serde_json::{Value, json};

use crate::harness::agent::bed::{Bed, POD, a100, t4, with};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::process::AgentProcess;

/// The agent's loops on separate threads; they end with it.
pub(crate) struct Loops(Option<tokio::runtime::Runtime>);

impl Loops {
    pub(crate) fn start(bed: &Bed, extender: &Extender, period: Duration) -> Self {
        Self::start_with(bed.probe(), extender, period)
    }

    /// Starts them with a probe of the caller's.
    pub(crate) fn start_with(probe: NvmlProbe, extender: &Extender, period: Duration) -> Self {
        Self::setting(probe, extender, period, None)
    }

    /// Starts them, obeying orders to clear a GPU, for several extenders.
    pub(crate) fn clearing(bed: &Bed, extenders: Vec<String>, period: Duration) -> Self {
        let clearing = Clearing::default();
        let probe = bed.probe().with_clearing(clearing.clone());
        let config = AgentConfig { clearing: Some(clearing), ..config(extenders, period) };
        Self::run(probe, config)
    }

    /// Starts them, with limits of memory that the agent sets.
    pub(crate) fn setting(
        probe: NvmlProbe,
        extender: &Extender,
        period: Duration,
        limits: Option<LentLimits>,
    ) -> Self {
        Self::run(probe, AgentConfig { limits, ..config(vec![extender.url()], period) })
    }

    fn run(probe: NvmlProbe, config: AgentConfig) -> Self {
        let threads =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let threads = threads.unwrap();
        threads.spawn(async move {
            run_node(&config, "n", probe, std::future::pending()).await.unwrap();
        });
        Self(Some(threads))
    }
}

fn config(extenders: Vec<String>, period: Duration) -> AgentConfig {
    AgentConfig {
        extenders,
        proof: Proof::default(),
        resolver: Resolver::default(),
        period,
        clock: Clock::start(),
        metrics: None,
        mig: None,
        limits: None,
        clearing: None,
        upkeep: Upkeep::default(),
        gate: None,
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        self.0.take().unwrap().shutdown_background();
    }
}

/// How often each of these calls was made.
fn counts<const N: usize>(bed: &Bed, symbols: [&str; N]) -> [usize; N] {
    let calls = bed.calls();
    symbols.map(|symbol| calls.iter().filter(|call| *call == symbol).count())
}

const MEMORY: &str = "nvmlDeviceGetMemoryInfo_v2";
const LISTS: &str = "nvmlDeviceGetComputeRunningProcesses_v3";

#[test]
fn hardware_faults_appear_in_the_extender_and_the_metrics() {
    let processes = json!([{"pid": 10, "used_mib": 1_500, "lists": ["compute"]},
                           {"pid": 11, "used_mib": 300, "lists": ["compute"]}]);
    let gpu = with(with(a100("GPU-a"), "minor", json!(4)), "processes", processes);
    let scenario = json!({"gpus": [gpu, t4("GPU-z")], "events": [], "journal": true});
    let bed = Bed::new(&scenario);
    bed.process(10, &format!("0::/kubepods/burstable/pod{POD}/x\n"));
    bed.process(11, "0::/user.slice\n");
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 1_000);
    let agent = AgentProcess::start(&bed, &extender);
    extender.until_fault(None);
    let node = extender.node();
    assert_eq!((&node["driver"], &node["cuda"]), (&json!("580.95.05"), &json!("13.0")));
    let device = &node["devices"][0];
    assert_eq!((&device["id"], &device["minor"]), (&json!("GPU-a"), &json!(4)));
    assert_eq!(device["usedBeyondAllocatedMib"], 4_000, "5000 are used, and the pod holds 1000");
    // The reservations come with the reply, and are in the metrics with the next sample.
    let memory = |kind: &str| {
        let kind = format!("kind=\"{kind}\"");
        agent.metric(&["gpupack_gpu_memory_bytes{", "GPU-a", "Hostname=\"n\"", &kind])
    };
    extender.until("the overuse", |_| {
        (memory("over_limit") == Some((500_u64 << 20).to_string())).then_some(())
    });
    assert_eq!(memory("allocated"), Some((1_000_u64 << 20).to_string()));
    assert_eq!(memory("untracked"), Some((300_u64 << 20).to_string()));

    let play = |change: &dyn Fn(&mut Value)| {
        let mut next = scenario.clone();
        change(&mut next);
        bed.play(&next);
    };
    let xid = json!([{"gpu": 0, "kind": 8, "data": 79}]);
    play(&|it| it["events"] = xid.clone());
    extender.until_fault(Some("Xid"));
    let device = extender.node()["devices"][0].take();
    assert_eq!((&device["lastXid"], &device["health"]), (&json!(79), &json!("Unhealthy")));
    let series = ["gpupack_gpu_xid_errors_total{", "GPU-a", "class=\"device\""];
    assert_eq!(agent.metric(&series).unwrap(), "1");

    // The driver is upgraded below the agent: first the kernel module goes, then it is another one.
    let codes = |code: u32| json!({"nvmlDeviceGetCount_v2": code, "nvmlInit_v2": code});
    for code in [9, 18] {
        play(&|it| (it["events"], it["failures"]) = (xid.clone(), codes(code)));
        extender.until_fault(Some("DriverAway"));
        let node = extender.node();
        assert_eq!(node["state"], "Reporting");
        assert_eq!(node["devices"].as_array().unwrap().len(), 2, "no device vanishes");
        assert_eq!(node["devices"][0]["tenants"][0]["podUid"], POD, "what is allocated stays");
        assert_eq!(node["devices"][1]["health"], "Unhealthy");
    }
    play(&|it| (it["events"], it["driver"]) = (xid.clone(), json!("590.1")));
    extender.until_fault(None);
    extender.until("the new driver", |node| (node["driver"] == "590.1").then_some(()));

    assert!(agent.end().success());
    let calls = bed.calls();
    assert_eq!(calls[calls.len() - 2..], ["nvmlEventSetFree", "nvmlShutdown"]);
    let [opened, closed] = counts(&bed, ["nvmlInit_v2", "nvmlShutdown"]);
    assert!(opened >= closed && closed == 2, "opened well twice, with failures between: {opened}");
}

#[test]
fn a_hanging_driver_is_reported_and_called_once_until_it_answers() {
    let scenario = |delay: u64| {
        let delays = json!({"nvmlDeviceGetCount_v2": delay});
        json!({"gpus": [t4("GPU-a")], "delays_ms": delays, "journal": true})
    };
    let bed = Bed::new(&scenario(0));
    let extender = Extender::start();
    let _loops = Loops::start(&bed, &extender, Duration::from_millis(50));
    extender.until_fault(None);
    bed.play(&scenario(8_000));
    extender.until_fault(Some("DriverAway"));
    bed.play(&scenario(0));
    let [before] = counts(&bed, ["nvmlDeviceGetCount_v2"]);
    extender.until_fault(None);
    let [after] = counts(&bed, ["nvmlDeviceGetCount_v2"]);
    assert!(after > before, "{before}, {after}");
    let [opened, closed] = counts(&bed, ["nvmlInit_v2", "nvmlShutdown"]);
    assert_eq!((opened, closed), (1, 0), "it was only slow");
}

#[test]
fn process_lists_are_read_rarely_unless_use_differs_from_the_ledger() {
    let scenario =
        |used: u64| json!({"gpus": [with(t4("GPU-a"), "used_mib", json!(used))], "journal": true});
    let bed = Bed::new(&scenario(800));
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 1_000);
    let _loops = Loops::start(&bed, &extender, Duration::from_millis(200));
    extender.until("some periods", |_| (counts(&bed, [MEMORY])[0] >= 40).then_some(()));
    let [memory, lists] = counts(&bed, [MEMORY, LISTS]);
    // 25 samples in the five seconds between two lists; a busy machine takes fewer.
    assert!(lists >= 2 && lists <= 2 + memory / 10, "{memory} samples, {lists} lists");
    // Within the allocation, with any change.
    bed.play(&scenario(1_000));
    extender.until("the sample", |node| (node["devices"][0]["usedMib"] == 1_000).then_some(()));
    let [memory_calm, lists_calm] = counts(&bed, [MEMORY, LISTS]);
    assert!(lists_calm <= lists + 1 + (memory_calm - memory) / 10);
    // Beyond the allocation: immediately, and once.
    bed.play(&scenario(3_000));
    let [memory_before, lists_before] = counts(&bed, [MEMORY, LISTS]);
    extender.until("a list", |_| (counts(&bed, [LISTS])[0] > lists_before).then_some(()));
    let [memory_then] = counts(&bed, [MEMORY]);
    assert!(memory_then <= memory_before + 4, "{memory_before} to {memory_then}");
    extender
        .until("some periods", |_| (counts(&bed, [MEMORY])[0] >= memory_then + 10).then_some(()));
    let [memory_after, lists_after] = counts(&bed, [MEMORY, LISTS]);
    let most = lists_before + 2 + (memory_after - memory_then) / 10;
    assert!(lists_after <= most, "{lists_after} lists, at most {most}");
    extender.until("it is taken off", |node| {
        // No process of the pod is listed: the memory is not the pod's.
        (node["devices"][0]["usedBeyondAllocatedMib"] == 3_000).then_some(())
    });
}
