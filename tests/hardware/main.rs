//! What only real hardware can show; `docs/hardware.md` lists it. Without a driver each test says
//! `skipped: …` and passes.

// `cfg(test)` is always true here; it shows clippy that these modules are test code.
#[cfg(test)]
#[path = "../harness/agent/extender.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod extender;
#[cfg(test)]
mod mig;
#[cfg(test)]
mod mps;
#[cfg(test)]
#[path = "../harness/agent/orders.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod orders;

use std::io::Write;

use agent::gpu::sample::{Probe, ProbeError, ProcessSampling, Sample};
use agent::nvml::probe::NvmlProbe;
use agent::processes::pods::{PodsByProcess, pod_in_cgroup};
use nvml_wrapper::Nvml;
use runtime::clock::Clock;
use wire::api::state::DeviceKind;
use wire::units::Timestamp;

/// Prints a text that is visible if the test passes, too.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// A probe of this machine and its first sample; `None` if there is no GPU to read.
fn first_sample(what: &str) -> Option<(NvmlProbe, Sample)> {
    let mut probe = NvmlProbe::new(None, PodsByProcess::new("/proc"));
    match probe.sample(ProcessSampling::List, Timestamp::START) {
        Ok(sample) if sample.inventory.is_empty() => {
            say(&format!("skipped: {what} (this machine has NVIDIA's driver and no GPU)"));
            None
        }
        Ok(sample) => Some((probe, sample)),
        Err(ProbeError::LibraryMissing { .. } | ProbeError::DriverNotLoaded) => {
            say(&format!("skipped: {what} (this machine has no NVIDIA driver)"));
            None
        }
        Err(error) => panic!("a driver exists, but cannot be read: {error}"),
    }
}

/// Says a result, with the driver and the model that it belongs to.
fn report(sample: &Sample, result: &str) {
    let driver = sample.driver.as_ref().map_or("unknown", |driver| &driver.version);
    say(&format!("hardware: driver {driver}, {}: {result}", sample.inventory[0].model));
}

#[test]
fn inventory_is_complete_and_names_problems() {
    let Some((_, sample)) = first_sample("inventory of real GPUs") else { return };
    assert!(sample.driver.is_some(), "{sample:?}");
    for (device, seen) in sample.inventory.iter().zip(&sample.uses) {
        let prefix = if device.kind == DeviceKind::MigInstance { "MIG-" } else { "GPU-" };
        assert!(device.uuid.starts_with(prefix), "{device:?}");
        assert!(device.is_believable() && device.has_believable_details(), "{device:?}");
        assert_eq!(seen.healthy, seen.fault.is_none(), "{seen:?}");
        assert!(device.memory_mib > device.reserved_mib || !seen.healthy, "{device:?}");
        assert!(seen.used_mib <= Some(device.memory_mib), "{device:?} {seen:?}");
        report(&sample, &format!("{device:?} {seen:?}"));
    }
}

#[test]
fn memory_is_reserved_used_or_free() {
    let Some((_, sample)) = first_sample("memory identity of real GPUs") else { return };
    let nvml = Nvml::init().unwrap();
    for index in 0..nvml.device_count().unwrap() {
        let memory = nvml.device_by_index(index).unwrap().memory_info().unwrap();
        let sum = memory.reserved + memory.used + memory.free;
        report(
            &sample,
            &format!("{memory:?}; total less the three: {}", memory.total.abs_diff(sum)),
        );
        assert_eq!(memory.total, sum, "what may be placed is total less reserved");
    }
}

#[test]
fn a_sweep_takes_little_time() {
    const SWEEPS: u32 = 100;
    let Some((mut probe, sample)) = first_sample("cost of a sweep on real GPUs") else { return };
    let clock = Clock::start();
    for (processes, what) in
        [(ProcessSampling::Skip, "without lists"), (ProcessSampling::List, "with lists")]
    {
        let began = clock.precise();
        for _ in 0..SWEEPS {
            probe.sample(processes, Timestamp::START).unwrap();
        }
        let each = (clock.precise() - began) / SWEEPS;
        let devices = sample.inventory.len();
        report(&sample, &format!("{} µs a sweep of {devices} devices {what}", each.as_micros()));
        assert!(each.as_millis() < 100, "a tenth of the period: {each:?}");
    }
}

#[test]
fn process_is_joined_to_its_cgroup() {
    let Some((_, sample)) = first_sample("a process of a real GPU and its cgroup") else { return };
    let lists = sample.uses.iter().filter_map(|seen| seen.processes.as_ref());
    let processes: Vec<_> = lists.flatten().collect();
    let mut joined = 0;
    for process in &processes {
        let cgroup = std::fs::read_to_string(format!("/proc/{}/cgroup", process.pid));
        let Ok(cgroup) = cgroup else { continue };
        let pod = pod_in_cgroup(&cgroup).map(|uid| uid.to_string());
        assert_eq!(process.pod_uid, pod, "{cgroup}");
        joined += 1;
        report(&sample, &format!("process {} is in {}", process.pid, cgroup.trim()));
    }
    if joined == 0 {
        let count = processes.len();
        say(&format!(
            "skipped: a process and its cgroup ({count} processes use a GPU, none is in /proc)"
        ));
    }
}

#[test]
fn symbols_of_the_memory_limit_may_be_missing() {
    let Some((probe, sample)) = first_sample("memory-limit symbols") else { return };
    // The open library is mapped, and its file contains its symbol names.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().find_map(|line| {
        let path = line.get(line.find('/')?..)?;
        path.contains("libnvidia-ml.so").then_some(path)
    });
    let library = std::fs::read(path.expect("the open library is mapped")).unwrap();
    for symbol in ["nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"] {
        let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
        let is_there = library.windows(name.len()).any(|window| window == name);
        report(&sample, &format!("{symbol}: {}", if is_there { "there" } else { "missing" }));
    }
    drop(probe);
}
