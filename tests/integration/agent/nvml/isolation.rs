//! Memory isolation is reported as verified only if the driver confirms it.

use std::time::Duration;

use serde_json::{Value, json};

use super::loops::Loops;
use crate::harness::agent::bed::{Bed, POD, a100, sample, with};
use crate::harness::agent::extender::Extender;

const SCOPE: &str =
    "/kubepods.slice/kubepods-pod0d5ab2f3_58e1_4f5c_9a4b_1c7d3c1e8f00.slice/crio-1.scope";

/// A GPU with two processes of one pod, and these limits: control group and MiB.
fn scenario(list: &str, limits: &[(&str, u64)]) -> Value {
    let process = |pid: u32| json!({"pid": pid, "used_mib": 500, "lists": [list]});
    let limits = limits.iter().map(|(group, mib)| (format!("/sys/fs/cgroup{group}"), json!(mib)));
    let gpu = with(a100("GPU-a"), "processes", json!([process(10), process(11)]));
    json!({"gpus": [with(gpu, "memory_limits", limits.collect::<serde_json::Map<_, _>>().into())],
           "journal": true})
}

/// A test bed in which the processes have these control groups.
fn bed(scenario: &Value, groups: [&str; 2]) -> Bed {
    let bed = Bed::new(scenario);
    for (pid, group) in [10, 11].into_iter().zip(groups) {
        bed.process(pid, &format!("0::{group}\n"));
    }
    bed
}

/// What is reported of the pod: its limit, whether it has none, and whether it is a client
/// of MPS.
fn reported(bed: &Bed) -> (Option<u64>, bool, bool) {
    let sample = sample(&mut bed.probe()).unwrap();
    match &sample.uses[0].tenants[..] {
        [] => (None, false, false),
        [only] => {
            assert_eq!(only.pod_uid, POD);
            (only.limit_mib, only.is_unlimited, only.is_mps_client)
        }
        more => panic!("{more:?}"),
    }
}

#[test]
fn a_limit_counts_when_it_applies_to_every_process_of_the_pod() {
    let other = SCOPE.replace("crio-1", "crio-2");
    let inner = format!("{SCOPE}/container");
    for (limits, groups, limit, is_unlimited) in [
        (&[][..], [SCOPE, SCOPE], None, true),
        (&[(SCOPE, 1_000)], [SCOPE, SCOPE], Some(1_000), false),
        (&[(SCOPE, 1_000)], [SCOPE, &inner], Some(1_000), false),
        (&[(SCOPE, 1_000), (&inner, 400)], [&inner, &inner], Some(400), false),
        (&[(SCOPE, 1_000)], [SCOPE, &other], None, true),
        (&[(SCOPE, 1_000), (&other, 500)], [SCOPE, &other], Some(1_500), false),
        // In one of two groups only one process is held; the other could take all.
        (&[(&inner, 400)], [SCOPE, &inner], None, true),
        // More than any GPU has is no limit; of a path is not known where it lies.
        (&[(SCOPE, 1 << 40)], [SCOPE, SCOPE], None, true),
        (&[(SCOPE, 1_000)], [&format!("/../..{SCOPE}"), SCOPE], None, false),
    ] {
        let bed = bed(&scenario("compute", limits), groups);
        assert_eq!(reported(&bed), (limit, is_unlimited, false), "{limits:?} {groups:?}");
    }
}

#[test]
fn an_unreadable_limit_is_not_verified() {
    let limits = [(SCOPE, 1_000)];
    let scenario = scenario("mps", &limits);
    let full = bed(&scenario, [SCOPE; 2]);
    assert_eq!(reported(&full), (Some(1_000), false, true));
    assert!(sample(&mut full.probe()).unwrap().inventory[0].can_limit_memory);
    let older = bed(&scenario, [SCOPE; 2]).without("nvmlDeviceGetMemoryLimits_v1");
    assert_eq!(reported(&older), (None, false, true), "an MPS client alone verifies nothing");
    assert!(!sample(&mut older.probe()).unwrap().inventory[0].can_limit_memory);
    for code in [1, 2, 3, 4, 13, 15, 25, 999] {
        let failures = json!({"nvmlDeviceGetMemoryLimits_v1": code});
        let mut failing = scenario.clone();
        failing["gpus"][0]["failures"] = failures;
        let bed = bed(&failing, [SCOPE; 2]);
        assert_eq!(reported(&bed), (None, false, true), "code {code}");
        let gpu = &sample(&mut bed.probe()).unwrap().inventory[0];
        assert!(!gpu.can_limit_memory, "code {code} does not show that the call works");
    }
    let mut without = scenario.clone();
    without["gpus"][0]["failures"] = json!({"nvmlDeviceGetMemoryLimits_v1": 6});
    let without = bed(&without, [SCOPE; 2]);
    assert_eq!(reported(&without), (None, true, true), "the call works, and finds no limit");
    assert!(sample(&mut without.probe()).unwrap().inventory[0].can_limit_memory);
    let first = bed(&scenario, [SCOPE; 2]);
    first.process(11, &format!("5:memory:{SCOPE}\n"));
    assert_eq!(reported(&first), (None, false, true), "version 1 of control groups");
}

/// GB10 (DGX Spark): its memory is that of the host, and no process has a figure.
#[test]
fn a_size_of_the_configuration_verifies_nothing_and_ends_no_other_fault() {
    let process = json!({"pid": 10, "used_mib": null, "lists": ["compute"]});
    let fields = json!({"uuid": "GPU-a", "name": "NVIDIA GB10", "total_mib": 0, "used_mib": 0,
                        "addressing_mode": 2, "processes": [process]});
    let failing = json!({"nvmlDeviceGetMemoryInfo_v2": 3});
    for gpu in [fields.clone(), with(fields, "failures", failing)] {
        let mut scenario = json!({"gpus": [gpu], "events": []});
        let bed = bed(&scenario, [SCOPE; 2]);
        let without = Extender::start();
        let loops = Loops::start(&bed, &without, Duration::from_millis(100));
        without.until_fault(Some("NoMemory"));
        drop(loops);
        let extender = Extender::configured("models: {GB10: {memory_mib: 100000}}");
        extender.allocate(POD, "GPU-a", 1_000);
        let _loops = Loops::start(&bed, &extender, Duration::from_millis(100));
        extender.until_fault(None);
        let device = extender.node()["devices"][0].clone();
        assert_eq!(
            (&device["capacityMib"], &device["capacityConfigured"]),
            (&json!(100_000), &json!(true))
        );
        assert_eq!(device["free"]["memoryMib"], 99_000, "{device}");
        assert_eq!((&device["usedMib"], &device["overLimitPods"]), (&json!(null), &json!(null)));
        assert_eq!(device["tenants"][0]["isolation"]["verified"], "None", "{device}");
        scenario["events"] = json!([{"gpu": 0, "kind": 8, "data": 79}]);
        bed.play(&scenario);
        extender.until_fault(Some("Xid"));
    }
}

#[test]
fn the_extender_shows_verified_beside_configured_isolation() {
    let bed = bed(&scenario("compute", &[(SCOPE, 1_000)]), [SCOPE; 2]);
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 1_000);
    let _loops = Loops::start(&bed, &extender, Duration::from_millis(100));
    let wait = |configured: &str, verified: &str| {
        extender.until(&format!("{configured}, {verified}"), |node| {
            let tenant = &node["devices"][0]["tenants"][0];
            let is = |key: &str, mode: &str| {
                let shown = tenant["isolation"][key].as_str();
                shown.is_some_and(|shown| shown.eq_ignore_ascii_case(mode))
            };
            (is("configured", configured) && is("verified", verified)).then_some(())
        });
        let count = |state: &str, mode: &str| {
            let labels = format!("{{isolation=\"{mode}\",state=\"{state}\"}}");
            extender.metric(&format!("gpupack_tenants{labels}"))
        };
        assert_eq!((count("configured", configured), count("verified", verified)), (1, 1));
    };
    wait("driver", "driver");
    assert_eq!(extender.node()["devices"][0]["canLimitMemory"], true);
    // A limit that was widened below us no longer holds anybody to his share.
    bed.play(&scenario("compute", &[(SCOPE, 1_001)]));
    wait("none", "none");
    bed.play(&scenario("mps", &[]));
    wait("mps", "none");
}
