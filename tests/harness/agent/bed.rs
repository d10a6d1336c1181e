//! A node with a stand-in for NVIDIA's library (`tests/harness/fake_nvml`) and a process table of its own.

use std::path::{Path, PathBuf};

use agent::gpu::sample::{Probe, ProbeError, ProcessSampling, Sample};
use agent::nvml::probe::NvmlProbe;
use agent::processes::pods::PodsByProcess;
use serde_json::{Value, json};
use server::reports::checked_report::CheckedReport;
use wire::api::condition::DeviceFault;
use wire::api::kind::{ApiVersion, ReportKind};
use wire::report::bodies::Report;
use wire::units::Timestamp;

/// The pod of every process that [`Bed::process`] adds.
pub(crate) const POD: &str = "0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00";

/// Where the names are that the loader of a library reads.
const LOADED: usize = 256 << 10;

/// A copy of the stand-in with a scenario and a process table of its own.
pub(crate) struct Bed {
    folder: tempfile::TempDir,
}

impl Bed {
    pub(crate) fn new(scenario: &Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(built_library(), folder.path().join("libnvidia-ml.so.1")).unwrap();
        let bed = Self { folder };
        bed.play(scenario);
        bed
    }

    /// Changes the hardware.
    pub(crate) fn play(&self, scenario: &Value) {
        // In one step: the library reads at any time.
        let written = self.folder.path().join("next.json");
        std::fs::write(&written, scenario.to_string()).unwrap();
        std::fs::rename(written, self.folder.path().join("scenario.json")).unwrap();
    }

    /// A path in the folder of this test bed.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    pub(crate) fn library(&self) -> PathBuf {
        self.folder.path().join("libnvidia-ml.so.1")
    }

    pub(crate) fn proc_root(&self) -> PathBuf {
        self.folder.path().join("proc")
    }

    /// Lets the driver of the node have no device nodes for MIG instances: they need none then.
    pub(crate) fn has_no_device_nodes(&self) {
        let of_kernel = self.proc_root().join("1/root").join("proc");
        std::fs::create_dir_all(&of_kernel).unwrap();
        std::fs::write(of_kernel.join("devices"), "Character devices:\n").unwrap();
    }

    /// Adds a process with this cgroup to the process table.
    pub(crate) fn process(&self, pid: u32, cgroup: &str) {
        let folder = self.proc_root().join(pid.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("cgroup"), cgroup).unwrap();
        let zeros = "0 ".repeat(18);
        std::fs::write(folder.join("stat"), format!("{pid} (python) S {zeros}100 0\n")).unwrap();
        std::fs::write(self.proc_root().join("uptime"), "9.00 9.00\n").unwrap();
    }

    /// The calls of the library so far, where the scenario has a journal.
    pub(crate) fn calls(&self) -> Vec<String> {
        let journal = std::fs::read_to_string(self.folder.path().join("journal"));
        journal.unwrap_or_default().lines().map(str::to_owned).collect()
    }

    /// Says which modules the kernel has loaded.
    pub(crate) fn load_modules(&self, names: &[&str]) {
        let line = |name: &&str| format!("{name} 57933824 18 - Live 0x0000000000000000 (PO)\n");
        let text: String = names.iter().map(line).collect();
        std::fs::create_dir_all(self.proc_root()).unwrap();
        std::fs::write(self.path("modules.next"), text).unwrap();
        std::fs::rename(self.path("modules.next"), self.proc_root().join("modules")).unwrap();
    }

    /// The processes that have the library open: none may, when a driver is unloaded.
    pub(crate) fn holders(&self) -> Vec<u32> {
        let control = self.path("nvidiactl");
        let has_it = |pid: &u32| {
            let files =
                std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            let mut files = files.filter_map(|file| std::fs::read_link(file.path()).ok());
            files.any(|file| file == control)
        };
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(has_it).collect()
    }

    /// Takes a function out of the library: its name is changed, so that the loader's hash table
    /// leads to another name.
    pub(crate) fn without(self, symbol: &str) -> Self {
        let mut bytes = std::fs::read(self.library()).unwrap();
        let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
        // What the loader reads lies at the beginning; names for debuggers follow.
        let places: Vec<usize> = bytes[..bytes.len().min(LOADED)]
            .windows(name.len())
            .enumerate()
            .filter_map(|(at, window)| (window == name).then_some(at + 1))
            .collect();
        assert!(!places.is_empty(), "{symbol} is exported");
        for at in places {
            bytes[at] = b'X';
        }
        std::fs::write(self.library(), bytes).unwrap();
        self
    }

    /// The limits of memory that were set, in order: group and GiB.
    pub(crate) fn limits_set(&self) -> Vec<(String, u64)> {
        let set = std::fs::read_to_string(self.folder.path().join("limits")).unwrap_or_default();
        let line = |line: &str| {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            let [_, _, hard, group] = words[..] else { panic!("{line}") };
            (group.to_owned(), hard.parse::<u64>().unwrap() >> 30)
        };
        set.lines().map(line).collect()
    }

    pub(crate) fn probe(&self) -> NvmlProbe {
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
        "`{}` is missing: `cargo test` builds it, `cargo test --test integration` alone does not; \
         run `cargo build --example fake_nvml` first",
        library.display()
    );
    library
}

/// A sample with processes, at the start of time.
pub(crate) fn sample(probe: &mut NvmlProbe) -> Result<Sample, ProbeError> {
    sample_at(probe, 0)
}

/// A sample with processes after this many seconds. For any hardware the extender can read
/// it.
pub(crate) fn sample_at(probe: &mut NvmlProbe, seconds: u64) -> Result<Sample, ProbeError> {
    let now = Timestamp::from_millis(1_000 * seconds);
    let sample = probe.sample(ProcessSampling::List, now)?;
    let report = Report {
        api_version: ApiVersion::default(),
        kind: ReportKind::default(),
        agent: "test".to_owned(),
        session: None,
        sequence: 1,
        inventory: Some(sample.inventory.to_vec()),
        driver: sample.driver.clone(),
        allocations_version: None,
        devices: sample.uses.clone(),
        mig_failures: Vec::new(),
        memory_limits: None,
        mig_promises: None,
        clear_outcome: None,
        containers: None,
    };
    CheckedReport::of(report).unwrap();
    Ok(sample)
}

/// The fault of each device, by UUID.
pub(crate) fn faults(sample: &Sample) -> Vec<(&str, Option<DeviceFault>)> {
    let mut all: Vec<_> = sample.uses.iter().map(|it| (&*it.uuid, it.fault)).collect();
    all.sort_by_key(|(uuid, _)| *uuid);
    all
}

pub(crate) fn a100(uuid: &str) -> Value {
    json!({"uuid": uuid, "name": "NVIDIA A100-SXM4-80GB", "total_mib": 81920,
           "reserved_mib": 634, "used_mib": 5000, "busy_percent": 40})
}

pub(crate) fn t4(uuid: &str) -> Value {
    json!({"uuid": uuid, "name": "Tesla T4", "total_mib": 15360, "reserved_mib": 450})
}

/// `device` with one field replaced.
pub(crate) fn with(mut device: Value, field: &str, value: Value) -> Value {
    device[field] = value;
    device
}

/// An H200 in MIG mode with two instances, and a gap between them.
pub(crate) fn h200_in_mig_mode() -> Value {
    let instance = |uuid: &str, profile: &str, total: u64, slot: [u32; 3], sms: u32, pid: u32| {
        json!({"uuid": uuid, "name": format!("NVIDIA H200 MIG {profile}"), "total_mib": total,
               "used_mib": 100, "slot": slot, "sms": sms,
               "processes": [{"pid": pid, "used_mib": 90, "lists": ["compute"]}]})
    };
    let mig = json!([
        instance("MIG-a", "3g.71gb", 71_168, [2, 4, 4], 60, 5),
        null,
        instance("MIG-b", "1g.18gb+me", 16_384, [9, 0, 1], 16, 6)
    ]);
    json!({"uuid": "GPU-p", "name": "NVIDIA H200", "total_mib": 143_771, "reserved_mib": 619,
           "minor": 3, "bus": 7, "numa_node": 1, "mig": mig, "recovery_action": 0,
           "processes": [{"pid": 5, "used_mib": 90, "lists": ["compute"]}]})
}
