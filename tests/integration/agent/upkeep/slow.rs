//! Large nodes, where opening the library takes long and so does each lookup.

use std::time::Duration;

use agent::gpu::sample::{Probe, ProcessSampling, Sample};
use runtime::clock::Clock;
use serde_json::{Value, json};
use wire::units::Timestamp;

use crate::harness::agent::bed::{Bed, t4, with};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::orders::Replica;
use crate::harness::agent::process::AgentProcess;

/// The calls that look a device up.
const LOOKUPS: [&str; 3] = [
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
];

/// A GPU in MIG mode with seven instances.
fn parent(number: u32) -> Value {
    let instance = |at: u32| {
        json!({"uuid": format!("MIG-{number}-{at}"), "name": "NVIDIA H200 MIG 1g.18gb",
               "total_mib": 16_384, "slot": [7 + at, at, 1], "sms": 16})
    };
    json!({"uuid": format!("GPU-{number}"), "name": "NVIDIA H200", "total_mib": 143_771,
           "reserved_mib": 619, "minor": number, "mig": (0..7).map(instance).collect::<Vec<_>>()})
}

fn lookups(bed: &Bed) -> usize {
    bed.calls().iter().filter(|call| LOOKUPS.contains(&call.as_str())).count()
}

/// The number of devices that the extender knows, and of those that are healthy.
fn counts(extender: &Extender) -> (usize, usize) {
    let node = extender.node();
    let Some(devices) = node["devices"].as_array() else { return (0, 0) };
    let healthy = devices.iter().filter(|device| device["health"] == "Healthy");
    (devices.len(), healthy.count())
}

/// Scaled down from 20 s to open and 8 s for a lookup: one walk over all devices still takes longer than a sweep may.
#[test]
fn sixteen_gpus_with_seven_instances_each_stay_healthy_however_slow_a_lookup_is() {
    let delays: Value =
        json!({"nvmlInit_v2": 6_000, LOOKUPS[0]: 50, LOOKUPS[1]: 50, LOOKUPS[2]: 8_000});
    let gpus: Vec<Value> = (0..16).map(parent).collect();
    let bed = Bed::new(&json!({"gpus": gpus, "delays_ms": delays, "journal": true}));
    let extender = Extender::start();
    let agent = AgentProcess::start(&bed, &extender);
    extender.until("all devices are reported", |_| (counts(&extender).0 == 128).then_some(()));
    let before = lookups(&bed);
    let clock = Clock::start();
    while clock.precise() < Duration::from_secs(25) {
        let (all, healthy) = counts(&extender);
        // Parents are no devices that take pods.
        assert!(all == 128 && healthy >= 112, "{healthy} of {all} after {:?}", clock.precise());
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(lookups(&bed), before, "no lookup in a sweep");
    assert!(agent.logged("cannot be read").is_empty());
    assert!(agent.end().success());
}

/// A GPU is lost, and for its sake the library is opened again, which takes longer than the extender waits for reports.
#[test]
fn reports_go_on_and_other_gpus_stay_healthy_while_the_library_opens_slowly() {
    let scenario = |gpu: Value, opening: u64| {
        let delays = json!({"nvmlInit_v2": opening});
        json!({"gpus": [t4("GPU-z"), gpu], "delays_ms": delays, "journal": true})
    };
    let lost = with(t4("GPU-a"), "failures", json!({"*": 15}));
    let bed = Bed::new(&scenario(t4("GPU-a"), 0));
    let (extender, replica) = (Extender::start(), Replica::start());
    let flags = ["--extender", &replica.url()].map(std::ffi::OsString::from);
    let flags: Vec<&std::ffi::OsStr> = flags.iter().map(AsRef::as_ref).collect();
    let agent = AgentProcess::start_with(&bed, &extender, &flags);
    let fault = |uuid: &str| {
        let node = extender.node();
        let devices = node["devices"].as_array().cloned().unwrap_or_default();
        let device = devices.into_iter().find(|device| device["id"] == uuid);
        device.and_then(|device| device["fault"].as_str().map(str::to_owned))
    };
    extender.until("both", |_| (counts(&extender) == (2, 2)).then_some(()));
    bed.play(&scenario(lost, 18_000));
    extender.until("it is lost", |_| (fault("GPU-a").as_deref() == Some("Lost")).then_some(()));
    let (first, clock) = (replica.reports().len() - 1, Clock::start());
    while clock.precise() < Duration::from_secs(55) {
        assert_eq!(fault("GPU-z"), None, "after {:?}", clock.precise());
        std::thread::sleep(Duration::from_millis(100));
    }
    let reports = replica.reports();
    let longest = reports[first..].windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    assert!(longest < Duration::from_secs(8), "{longest:?} without a report");
    let opened = bed.calls().iter().filter(|call| *call == "nvmlInit_v2").count();
    assert!(opened >= 2, "it was opened again");
    assert!(agent.end().success());
}

/// Others remove, make and renumber instances below kept handles.
#[test]
fn instances_are_seen_as_they_are_although_handles_are_kept() {
    let instance = |letter: &str, at: u32| {
        json!({"uuid": format!("MIG-{letter}"), "name": "NVIDIA H200 MIG 1g.18gb",
               "total_mib": 16_384, "slot": [7 + at, at, 1], "sms": 16})
    };
    let scenario = |letters: &[Option<&str>]| {
        let mut gpu = parent(0);
        let all = letters.iter().zip(0..);
        gpu["mig"] = all.map(|(letter, at)| letter.map(|letter| instance(letter, at))).collect();
        json!({"gpus": [gpu], "journal": true})
    };
    let bed = Bed::new(&scenario(&[Some("a"), None, Some("b")]));
    let mut probe = bed.probe();
    let mut seen = |letters: &[Option<&str>], processes: ProcessSampling| {
        bed.play(&scenario(letters));
        let sample: Sample = probe.sample(processes, Timestamp::START).unwrap();
        assert_eq!(sample.unreadable, 0, "{letters:?}");
        assert!(sample.uses.iter().all(|it| it.healthy), "{letters:?}: {:?}", sample.uses);
        let instances = sample.inventory.iter().filter(|it| it.parent.is_some());
        instances.map(|it| it.uuid.trim_start_matches("MIG-").to_owned()).collect::<String>()
    };
    let (list, skip) = (ProcessSampling::List, ProcessSampling::Skip);
    assert_eq!(seen(&[Some("a"), None, Some("b")], skip), "ab", "also without lists at first");
    assert_eq!(seen(&[Some("c"), None, Some("b")], skip), "bc", "another one at the same place");
    assert_eq!(seen(&[None, None, Some("b")], skip), "b");
    assert_eq!(seen(&[Some("b"), None, None], skip), "b", "it has another number");
    assert_eq!(seen(&[Some("b"), Some("d"), None], skip), "b", "not before the next list");
    assert_eq!(seen(&[Some("b"), Some("d"), None], list), "bd");
    let before = lookups(&bed);
    assert_eq!(seen(&[Some("b"), Some("d"), None], skip), "bd");
    assert_eq!(lookups(&bed), before);
}
