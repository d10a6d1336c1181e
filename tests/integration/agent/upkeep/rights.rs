//! An agent without rights on GPUs in MIG mode: what it sees, what it says of the rest, and when it ends.

use std::ffi::OsStr;
use std::time::Duration;

use agent::gpu::sample::Sample;
use agent::mps::daemons::{Duty, MpsDaemons, MpsSettings};
use agent::node::client::Proof;
use agent::node::config::AgentConfig;
use agent::node::replicas::Resolver;
use agent::node::run::run_node;
use agent::upkeep::condition::Upkeep;
use runtime::clock::Clock;
use serde_json::{Value, json};

use crate::harness::agent::bed::{Bed, sample, sample_at, with};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::process::AgentProcess;

/// An H200 in MIG mode with instances of `1g` at these units; each has the number of its unit and 7.
fn parent(units: &[u32]) -> Value {
    let instance = |at: &u32| {
        json!({"uuid": format!("MIG-{at}"), "name": "NVIDIA H200 MIG 1g.18gb",
               "total_mib": 16_384, "slot": [7 + at, at, 1], "sms": 16,
               "processes": [{"pid": 100 + at, "used_mib": 90, "lists": ["compute"]}]})
    };
    json!({"uuid": "GPU-p", "name": "NVIDIA H200", "total_mib": 143_771, "reserved_mib": 619,
           "minor": 3, "mig": units.iter().map(instance).collect::<Vec<_>>()})
}

/// A node with this GPU, whose callers have no rights.
fn node(bed: Option<&Bed>, gpu: &Value) -> Value {
    let proc_root = bed.map(|bed| bed.proc_root());
    json!({"gpus": [gpu], "unprivileged": true, "proc_root": proc_root})
}

fn play(bed: &Bed, units: &[u32]) {
    bed.play(&node(Some(bed), &parent(units)));
}

/// A bed with the kernel's files.
fn bed(units: &[u32]) -> Bed {
    let bed = Bed::new(&json!({}));
    std::fs::create_dir_all(bed.proc_root()).unwrap();
    play(&bed, units);
    bed
}

/// Each device with its fault.
fn faults(sample: &Sample) -> Vec<String> {
    let fault = |uuid: &str| sample.uses.iter().find(|it| it.uuid == uuid).unwrap().fault;
    let devices = sample.inventory.iter();
    devices.map(|it| format!("{} {:?}", it.uuid, fault(&it.uuid))).collect()
}

#[test]
fn a_gpu_that_refuses_to_say_its_memory_hides_no_instance() {
    let bed = Bed::new(&node(None, &parent(&[0, 4])));
    let mut probe = bed.probe();
    let seen = sample(&mut probe).unwrap();
    assert_eq!(faults(&seen), ["GPU-p None", "MIG-0 None", "MIG-4 None"]);
    let used: Vec<_> = seen.uses.iter().map(|it| it.used_mib).collect();
    assert_eq!((used[0], seen.unreadable), (None, 0), "unknown is no amount: {used:?}");
    assert!(seen.uses[1].processes.as_ref().is_some_and(|all| all.len() == 1));
}

#[test]
fn the_size_of_a_gpu_stays_known_when_it_gets_its_first_instance() {
    let bed = Bed::new(&node(None, &parent(&[])));
    let mut probe = bed.probe();
    let seen = sample(&mut probe).unwrap();
    assert_eq!((seen.inventory[0].memory_mib, seen.uses[0].used_mib), (143_771, Some(0)));
    bed.play(&node(None, &parent(&[0])));
    let seen = sample(&mut probe).unwrap();
    assert_eq!(faults(&seen), ["GPU-p None"], "the instance is hidden, and no list says so");
    let gpu = &seen.inventory[0];
    assert_eq!((gpu.memory_mib, gpu.reserved_mib, seen.uses[0].used_mib), (143_771, 619, None));
}

#[test]
fn instances_that_are_hidden_are_a_fault_of_their_gpu_alone() {
    let bed = bed(&[0]);
    let mut probe = bed.probe();
    assert_eq!(faults(&sample(&mut probe).unwrap()), ["GPU-p None", "MIG-0 None"]);
    play(&bed, &[0, 4]);
    let hidden = ["GPU-p Some(InstancesHidden)", "MIG-0 None"];
    assert_eq!(faults(&sample(&mut probe).unwrap()), hidden);
    assert_eq!(faults(&sample_at(&mut probe, 1).unwrap()), hidden);
    // Removed again: nothing is hidden.
    play(&bed, &[0]);
    assert_eq!(faults(&sample(&mut probe).unwrap()), ["GPU-p None", "MIG-0 None"]);
    // Another one with the same number has the same node.
    let mut other = parent(&[0]);
    other["mig"][0]["uuid"] = json!("MIG-other");
    bed.play(&node(Some(&bed), &other));
    assert_eq!(faults(&sample(&mut probe).unwrap()), ["GPU-p None", "MIG-other None"]);
    // One half made is not there yet.
    std::fs::create_dir_all(bed.proc_root().join("driver/nvidia/capabilities/gpu3/mig/gi12"))
        .unwrap();
    assert_eq!(faults(&sample(&mut probe).unwrap()), ["GPU-p None", "MIG-other None"]);
}

#[test]
fn an_instance_that_refuses_is_a_fault_with_its_own_name() {
    let mut refusing = parent(&[0, 4]);
    refusing["mig"][1]["failures"] = json!({"nvmlDeviceGetMemoryInfo_v2": 4});
    let bed = Bed::new(&node(None, &refusing));
    let seen = sample(&mut bed.probe()).unwrap();
    assert_eq!(faults(&seen), ["GPU-p None", "MIG-0 None", "MIG-4 Some(NoPermission)"]);
    assert!(!seen.inventory[2].healthy);
}

/// The fault of the GPU, and the number of its instances, as the extender has them.
fn until(extender: &Extender, fault: Option<&str>, instances: usize) {
    extender.until(&format!("{fault:?} with {instances} instances"), |node| {
        let devices = node["devices"].as_array()?;
        let gpu = devices.iter().find(|it| it["id"] == "GPU-p")?;
        let is_it = gpu["fault"].as_str() == fault && devices.len() == 1 + instances;
        is_it.then_some(())
    });
}

#[test]
fn the_agent_ends_once_per_change_of_the_instances_that_are_hidden() {
    let bed = bed(&[0]);
    let extender = Extender::start();
    let mut agent = AgentProcess::start(&bed, &extender);
    until(&extender, None, 1);
    play(&bed, &[0, 4]);
    until(&extender, Some("InstancesHidden"), 1);
    let (code, took) = agent.ends_within(Duration::from_secs(15)).expect("it ends");
    assert_eq!(code, Some(75), "{took:?}");
    let last = agent.last_line();
    assert!(last.contains("container is made again") && last.contains("MIG"), "{last}");
    // The next container has the nodes of both.
    let mut agent = AgentProcess::start(&bed, &extender);
    until(&extender, None, 2);
    assert_eq!(agent.ends_within(Duration::from_secs(8)), None, "nothing is hidden");
    // A third one that no container gets a node of.
    play(&bed, &[0, 4, 6]);
    let (code, _) = agent.ends_within(Duration::from_secs(15)).expect("it ends again");
    assert_eq!(code, Some(75));
}

#[test]
fn what_was_hidden_from_the_start_ends_no_agent() {
    let bed = Bed::new(&node(None, &parent(&[0, 4])));
    // One of the kernel's has no device node anywhere.
    for id in [7, 9, 11] {
        let folder = format!("driver/nvidia/capabilities/gpu3/mig/gi{id}/ci0");
        std::fs::create_dir_all(bed.proc_root().join(folder)).unwrap();
    }
    let extender = Extender::start();
    let mut agent = AgentProcess::start(&bed, &extender);
    until(&extender, Some("InstancesHidden"), 2);
    assert!(agent.ends_within(Duration::from_secs(12)).is_none(), "a new one would be the same");
    assert!(agent.end().success());
}

#[test]
fn a_list_elsewhere_is_read_where_the_flag_says() {
    let bed = bed(&[0]);
    let extender = Extender::start();
    // As behind the legacy runtime: an empty file system hides the driver's files in the container.
    let elsewhere = bed.path("host-driver");
    std::fs::create_dir_all(elsewhere.join("nvidia/capabilities/gpu3/mig/gi7/ci0")).unwrap();
    bed.play(&node(None, &parent(&[0])));
    let flags = [OsStr::new("--proc-driver"), elsewhere.as_os_str()];
    let mut agent = AgentProcess::start_with(&bed, &extender, &flags);
    until(&extender, None, 1);
    bed.play(&node(None, &parent(&[0, 4])));
    std::fs::create_dir_all(elsewhere.join("nvidia/capabilities/gpu3/mig/gi11/ci0")).unwrap();
    until(&extender, Some("InstancesHidden"), 1);
    let (code, _) = agent.ends_within(Duration::from_secs(15)).expect("it ends");
    assert_eq!(code, Some(75));
}

#[test]
fn with_clients_of_mps_an_agent_from_which_instances_are_hidden_goes_on() {
    let bed = bed(&[0]);
    let (extender, clock) = (Extender::start(), Clock::start());
    let settings = MpsSettings {
        folder: bed.path("mps"),
        program: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/harness/mps_control").into(),
        duty: Duty::Manage,
        query_every: Duration::from_millis(100),
        proc_root: bed.proc_root(),
    };
    let daemons = MpsDaemons::new(settings, clock);
    let upkeep = Upkeep {
        proc_root: Some(bed.proc_root()),
        capabilities: Some(bed.proc_root().join("driver/nvidia/capabilities")),
        daemons: Some(daemons.clone()),
        ..Upkeep::default()
    };
    let config = AgentConfig {
        extenders: vec![extender.url()],
        proof: Proof::default(),
        resolver: Resolver::default(),
        period: Duration::from_millis(100),
        clock,
        metrics: None,
        mig: None,
        limits: None,
        clearing: None,
        upkeep,
        gate: None,
    };
    let threads =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let threads = threads.unwrap();
    let loops = threads.block_on(async { daemons.start() });
    let whole = with(crate::harness::agent::bed::t4("GPU-a"), "minor", json!(0));
    let both = |units: &[u32]| {
        bed.play(&with(node(Some(&bed), &parent(units)), "gpus", json!([whole, parent(units)])));
    };
    both(&[0]);
    let probe = bed.probe().with_mps(daemons);
    let ended =
        threads.spawn(async move { run_node(&config, "n", probe, std::future::pending()).await });
    let pipe = bed.path("mps/GPU-a/pipe");
    extender.until("the daemon runs", |_| pipe.join("pid").exists().then_some(()));
    std::fs::write(pipe.join("clients-7"), "101\n").unwrap();
    std::fs::write(pipe.join("servers"), "7\n").unwrap();
    both(&[0, 4]);
    until(&extender, Some("InstancesHidden"), 2);
    std::thread::sleep(Duration::from_secs(10));
    assert!(!ended.is_finished(), "its clients would end with it");
    std::fs::write(pipe.join("clients-7"), "").unwrap();
    extender.until("it ends", |_| ended.is_finished().then_some(()));
    assert!(threads.block_on(ended).unwrap().is_err());
    threads.block_on(loops.end());
}
