//! The NVML probe against a stand-in for NVIDIA's library (`tests/fake_nvml`).

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use gpupack::agent::nvml::NvmlProbe;
use gpupack::agent::probe::{Probe, ProbeError, ProcessSampling, Sample};
use gpupack::agent::processes::PodsByProcess;
use gpupack::packing::units::Timestamp;
use gpupack::report::{Kind, Report, SCHEMA_VERSION};
use serde_json::{Value, json};

/// A copy of the stand-in with a scenario and a process table of its own.
struct World {
    folder: tempfile::TempDir,
}

impl World {
    fn new(scenario: &Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(built_library(), folder.path().join("libnvidia-ml.so.1")).unwrap();
        let world = Self { folder };
        world.play(scenario);
        world
    }

    /// Changes the hardware.
    fn play(&self, scenario: &Value) {
        // In one step: the library reads at any time.
        let written = self.folder.path().join("next.json");
        std::fs::write(&written, scenario.to_string()).unwrap();
        std::fs::rename(written, self.folder.path().join("scenario.json")).unwrap();
    }

    fn library(&self) -> PathBuf {
        self.folder.path().join("libnvidia-ml.so.1")
    }

    fn proc_root(&self) -> PathBuf {
        self.folder.path().join("proc")
    }

    fn process(&self, pid: u32, cgroup: &str) {
        let folder = self.proc_root().join(pid.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("cgroup"), cgroup).unwrap();
    }

    /// Takes a function out of the library: its name is changed, so that the loader's hash table
    /// leads to another name.
    fn without(self, symbol: &str) -> Self {
        let mut bytes = std::fs::read(self.library()).unwrap();
        let places: Vec<usize> = bytes
            .windows(symbol.len())
            .enumerate()
            .filter_map(|(at, window)| (window == symbol.as_bytes()).then_some(at))
            .collect();
        assert!(!places.is_empty(), "{symbol} is exported");
        for at in places {
            bytes[at] = b'X';
        }
        std::fs::write(self.library(), bytes).unwrap();
        self
    }

    fn probe(&self) -> NvmlProbe {
        NvmlProbe::new(Some(self.library()), PodsByProcess::new(self.proc_root()))
    }
}

/// Where `cargo test` leaves the stand-in.
fn built_library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let library = profile.join("examples/libfake_nvml.so");
    assert!(
        library.exists(),
        "`{}` is missing: `cargo test` builds it, `cargo test --test agent_nvml` alone does not; \
         run `cargo build --example fake_nvml` first",
        library.display()
    );
    library
}

fn sample(probe: &mut NvmlProbe) -> Result<Sample, ProbeError> {
    let sample = probe.sample(ProcessSampling::List, Timestamp::START)?;
    // Whatever the hardware says, the extender can read it.
    let report = Report {
        schema_version: SCHEMA_VERSION,
        agent: "test".to_owned(),
        session: None,
        sequence: 1,
        inventory: Some(sample.inventory.to_vec()),
        devices: sample.uses.clone(),
    };
    report.checked().unwrap();
    Ok(sample)
}

fn a100(uuid: &str) -> Value {
    json!({"uuid": uuid, "name": "NVIDIA A100-SXM4-80GB", "total_mib": 81920,
           "reserved_mib": 634, "used_mib": 5000, "busy_percent": 40})
}

fn t4(uuid: &str) -> Value {
    json!({"uuid": uuid, "name": "Tesla T4", "total_mib": 15360, "reserved_mib": 450})
}

/// `device` with one field replaced.
fn with(mut device: Value, field: &str, value: Value) -> Value {
    device[field] = value;
    device
}

const POD: &str = "0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00";

#[test]
fn gpus_of_different_size_are_read_with_their_reserve_and_rounded_to_the_safe_side() {
    let second = with(t4("GPU-b"), "odd_bytes", json!(1));
    let world = World::new(&json!({"gpus": [a100("GPU-a"), second]}));
    let sample = sample(&mut world.probe()).unwrap();
    let [a, b] = &sample.inventory[..] else { panic!("two GPUs: {sample:?}") };
    assert_eq!((a.uuid.as_str(), a.index, a.kind), ("GPU-a", 0, Kind::Gpu));
    assert_eq!(a.model, "NVIDIA A100-SXM4-80GB");
    assert_eq!((a.memory_mib, a.reserved_mib), (81_920, 634));
    assert_eq!((b.memory_mib, b.reserved_mib), (15_360, 451), "total down, reserve up");
    assert_eq!(sample.uses[0].used_mib, Some(5_000));
    assert_eq!(sample.uses[0].busy_percent, Some(40));
    assert_eq!(sample.uses[1].used_mib, Some(1), "use is rounded up");
    assert_eq!(sample.uses[1].processes, Some(Vec::new()));
    assert_eq!(sample.unreadable, 0);
}

#[test]
fn processes_of_all_lists_are_joined_to_pods_once_each() {
    let processes = json!([
        {"pid": 10, "used_mib": 700, "lists": ["compute", "graphics"]},
        {"pid": 11, "used_mib": 300, "lists": ["mps"]},
        {"pid": 12, "used_mib": null, "lists": ["compute"]},
        {"pid": 13, "used_mib": 20, "lists": ["graphics"]},
    ]);
    let world = World::new(&json!({"gpus": [with(a100("GPU-a"), "processes", processes)]}));
    let slice = POD.replace('-', "_");
    world.process(10, &format!("0::/kubepods.slice/kubepods-pod{slice}.slice/crio-x.scope\n"));
    world.process(11, &format!("0::/kubepods/burstable/pod{POD}/x\n"));
    world.process(12, "0::/user.slice\n");
    let mut probe = world.probe();
    let sample = sample(&mut probe).unwrap();
    let seen: Vec<_> = sample.uses[0].processes.as_ref().unwrap().iter().collect();
    let rows: Vec<(u32, Option<&str>, Option<u64>)> =
        seen.iter().map(|p| (p.pid, p.pod_uid.as_deref(), p.memory_mib)).collect();
    assert_eq!(
        rows,
        [
            (10, Some(POD), Some(700)),
            (11, Some(POD), Some(300)),
            (12, None, None),
            (13, None, Some(20)),
        ],
        "an unknown amount is not zero, a vanished process has no pod"
    );
    let quick = probe.sample(ProcessSampling::Skip, Timestamp::START).unwrap();
    assert_eq!(quick.uses[0].processes, None);
}

#[test]
fn a_gpu_in_mig_mode_is_its_instances() {
    let instance = |uuid: &str, profile: &str, total: u64, pid: u32| {
        json!({"uuid": uuid, "name": format!("NVIDIA H200 MIG {profile}"), "total_mib": total,
               "used_mib": 100, "processes": [{"pid": pid, "used_mib": 90, "lists": ["compute"]}]})
    };
    let mig = json!([
        instance("MIG-a", "3g.71gb", 71168, 5),
        null,
        instance("MIG-b", "1g.18gb+me", 16384, 6)
    ]);
    let parent = json!({"uuid": "GPU-p", "name": "NVIDIA H200", "total_mib": 143771,
                        "reserved_mib": 619, "mig": mig,
                        "processes": [{"pid": 5, "used_mib": 90, "lists": ["compute"]}]});
    let world = World::new(&json!({"gpus": [t4("GPU-a"), parent]}));
    let sample = sample(&mut world.probe()).unwrap();
    let rows: Vec<_> = sample
        .inventory
        .iter()
        .map(|d| (d.uuid.as_str(), d.index, d.kind, d.model.as_str(), d.profile.as_deref()))
        .collect();
    assert_eq!(
        rows,
        [
            ("GPU-a", 0, Kind::Gpu, "Tesla T4", None),
            ("GPU-p", 1, Kind::MigParent, "NVIDIA H200", None),
            ("MIG-a", 1, Kind::MigInstance, "NVIDIA H200", Some("3g.71gb")),
            ("MIG-b", 1, Kind::MigInstance, "NVIDIA H200", Some("1g.18gb+me")),
        ]
    );
    let parent = &sample.uses[1];
    assert_eq!((parent.busy_percent, &parent.processes), (None, &None), "it lists them once more");
    assert_eq!(sample.uses[2].processes.as_ref().unwrap()[0].pid, 5);
    assert_eq!(sample.uses[2].busy_percent, None);
}

#[test]
fn a_lost_gpu_is_unhealthy_and_hides_no_other() {
    let world = World::new(&json!({"gpus": [a100("GPU-a"), t4("GPU-b")]}));
    let mut probe = world.probe();
    sample(&mut probe).unwrap();
    for (symbol, code) in
        [("*", 15), ("*", 16), ("nvmlDeviceGetUUID", 15), ("nvmlDeviceGetMemoryInfo_v2", 999)]
    {
        let lost = with(a100("GPU-a"), "failures", json!({symbol: code}));
        world.play(&json!({"gpus": [lost, t4("GPU-b")]}));
        let seen = sample(&mut probe).unwrap();
        let health: Vec<_> = seen.inventory.iter().map(|d| (&*d.uuid, d.healthy)).collect();
        assert_eq!(health, [("GPU-a", false), ("GPU-b", true)], "{symbol} fails with {code}");
        assert_eq!(seen.inventory[0].memory_mib, 81_920, "its size is remembered");
        let used = seen.uses.iter().find(|device| device.uuid == "GPU-a").unwrap();
        assert_eq!((used.healthy, used.used_mib, &used.processes), (false, None, &None));
        assert_eq!(seen.unreadable, 1);
    }
    world.play(&json!({"gpus": [a100("GPU-a"), t4("GPU-b")]}));
    assert!(sample(&mut probe).unwrap().inventory.iter().all(|device| device.healthy));
    world.play(&json!({"gpus": [t4("GPU-b")]}));
    assert_eq!(sample(&mut probe).unwrap().inventory.len(), 1, "taken out is not lost");
}

#[test]
fn what_the_driver_cannot_say_is_unknown_and_not_zero() {
    let cannot = json!({"nvmlDeviceGetUtilizationRates": 3, "nvmlDeviceGetMigMode": 3,
                        "nvmlDeviceGetComputeRunningProcesses_v3": 4});
    let gpu = with(a100("GPU-a"), "failures", cannot);
    let unified = with(t4("GPU-b"), "failures", json!({"nvmlDeviceGetMemoryInfo_v2": 3}));
    let world = World::new(&json!({"gpus": [gpu, unified]}));
    let sample = sample(&mut world.probe()).unwrap();
    let a = &sample.uses[0];
    assert_eq!(
        (a.healthy, a.used_mib, a.busy_percent, &a.processes),
        (true, Some(5_000), None, &None)
    );
    let (b, used) = (&sample.inventory[1], &sample.uses[1]);
    assert_eq!((b.healthy, b.memory_mib, used.used_mib), (false, 0, None), "nothing to share");
}

#[test]
fn a_missing_function_costs_only_what_it_tells() {
    let processes = json!([{"pid": 1, "used_mib": 5, "lists": ["compute", "mps"]}]);
    let scenario = json!({"gpus": [with(a100("GPU-a"), "processes", processes)]});
    let world = World::new(&scenario).without("nvmlDeviceGetMPSComputeRunningProcesses_v3");
    let seen = sample(&mut world.probe()).unwrap();
    assert_eq!(seen.uses[0].processes.as_ref().unwrap().len(), 1);
    let world = World::new(&scenario).without("nvmlDeviceGetUtilizationRates");
    assert_eq!(sample(&mut world.probe()).unwrap().uses[0].busy_percent, None);
    let world = World::new(&scenario).without("nvmlDeviceGetMemoryInfo_v2");
    let error = sample(&mut world.probe()).unwrap_err().to_string();
    assert!(error.contains("nvmlDeviceGetMemoryInfo_v2") && error.contains("R510"), "{error}");
    let world = World::new(&scenario).without("nvmlShutdown");
    assert!(matches!(sample(&mut world.probe()), Err(ProbeError::DriverTooOld { .. })));
}

#[test]
fn two_gpus_of_one_uuid_are_one_that_nobody_gets() {
    let world = World::new(&json!({"gpus": [a100("GPU-a"), t4("GPU-b"), a100("GPU-a")]}));
    let sample = sample(&mut world.probe()).unwrap();
    let health: Vec<_> = sample.inventory.iter().map(|d| (&*d.uuid, d.healthy)).collect();
    assert_eq!(health, [("GPU-a", false), ("GPU-b", true)]);
}

#[test]
fn use_above_the_total_is_passed_on_as_a_fact() {
    let world = World::new(&json!({"gpus": [with(t4("GPU-a"), "used_mib", json!(20_000))]}));
    assert_eq!(sample(&mut world.probe()).unwrap().uses[0].used_mib, Some(20_000));
}

#[test]
fn a_missing_library_or_driver_is_named_with_its_mend_and_needs_no_restart() {
    let nowhere = PathBuf::from("/nowhere/libnvidia-ml.so.1");
    let mut probe = NvmlProbe::new(Some(nowhere), PodsByProcess::new("/proc"));
    let error = sample(&mut probe).unwrap_err().to_string();
    assert!(error.contains("`/nowhere/libnvidia-ml.so.1`"), "{error}");
    assert!(error.contains("--nvml-library"), "{error}");

    let fails = |code: u32| json!({"failures": {"nvmlInit_v2": code}});
    let world = World::new(&fails(9));
    let mut probe = world.probe();
    assert_eq!(sample(&mut probe), Err(ProbeError::DriverNotLoaded));
    world.play(&fails(18));
    assert_eq!(sample(&mut probe), Err(ProbeError::DriverMismatch));
    world.play(&json!({"gpus": [t4("GPU-a")]}));
    assert_eq!(sample(&mut probe).unwrap().inventory.len(), 1);
    // An upgrade below a running agent: closed, and opened anew afterwards.
    world.play(&json!({"failures": {"nvmlDeviceGetCount_v2": 18}, "gpus": [t4("GPU-a")]}));
    assert_eq!(sample(&mut probe), Err(ProbeError::DriverMismatch));
    world.play(&json!({"gpus": [t4("GPU-a")]}));
    assert_eq!(sample(&mut probe).unwrap().inventory.len(), 1);
}
