//! Every error of every call, missing functions, and false values.

use std::path::PathBuf;

use agent::gpu::sample::{ProbeError, Sample};
use agent::nvml::probe::NvmlProbe;
use agent::processes::pods::PodsByProcess;
use serde_json::{Value, json};
use wire::api::condition::DeviceFault;
use wire::api::state::DeviceKind;

use crate::harness::agent::bed::{Bed, a100, faults, h200_in_mig_mode, sample, t4, with};

/// Every call of the agent about a device.
const DEVICE_CALLS: [&str; 25] = [
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMemoryAffinity",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceGetAttributes_v2",
];

/// Every call of the agent about the node.
const NODE_CALLS: [&str; 8] = [
    "nvmlInit_v2",
    "nvmlShutdown",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlEventSetCreate",
    "nvmlEventSetWait_v2",
    "nvmlEventSetFree",
];

/// Every code that NVML has, one that it may have one day, and success where nothing was done.
fn codes() -> impl Iterator<Item = u32> {
    (0..=29).chain([30, 999])
}

#[test]
fn a_lost_gpu_is_unhealthy_and_other_gpus_stay_visible() {
    let bed = Bed::new(&json!({"gpus": [a100("GPU-a"), t4("GPU-b")]}));
    let mut probe = bed.probe();
    sample(&mut probe).unwrap();
    for (symbol, code) in
        [("*", 15), ("*", 16), ("nvmlDeviceGetUUID", 15), ("nvmlDeviceGetMemoryInfo_v2", 999)]
    {
        let lost = with(a100("GPU-a"), "failures", json!({symbol: code}));
        bed.play(&json!({"gpus": [lost, t4("GPU-b")]}));
        let seen = sample(&mut probe).unwrap();
        let health: Vec<_> = seen.inventory.iter().map(|d| (&*d.uuid, d.healthy)).collect();
        assert_eq!(health, [("GPU-a", false), ("GPU-b", true)], "{symbol} fails with {code}");
        assert_eq!(seen.inventory[0].memory_mib, 81_920, "its size is remembered");
        let used = seen.uses.iter().find(|device| device.uuid == "GPU-a").unwrap();
        assert_eq!((used.healthy, used.used_mib, &used.processes), (false, None, &None));
        assert_eq!(seen.unreadable, 1);
    }
    bed.play(&json!({"gpus": [a100("GPU-a"), t4("GPU-b")]}));
    assert!(sample(&mut probe).unwrap().inventory.iter().all(|device| device.healthy));
    bed.play(&json!({"gpus": [t4("GPU-b")]}));
    assert_eq!(sample(&mut probe).unwrap().inventory.len(), 1, "removed is not lost");
}

#[test]
fn two_gpus_with_one_uuid_are_one_device_that_gets_no_pod() {
    let bed = Bed::new(&json!({"gpus": [a100("GPU-a"), t4("GPU-b"), a100("GPU-a")]}));
    let sample = sample(&mut bed.probe()).unwrap();
    let health: Vec<_> = sample.inventory.iter().map(|d| (&*d.uuid, d.healthy)).collect();
    assert_eq!(health, [("GPU-a", false), ("GPU-b", true)]);
}

#[test]
fn use_above_the_total_is_reported_as_read() {
    let bed = Bed::new(&json!({"gpus": [with(t4("GPU-a"), "used_mib", json!(20_000))]}));
    assert_eq!(sample(&mut bed.probe()).unwrap().uses[0].used_mib, Some(20_000));
}

#[test]
fn a_missing_function_loses_only_its_own_data() {
    let processes = json!([{"pid": 1, "used_mib": 5, "lists": ["compute", "mps"]}]);
    let scenario = json!({"gpus": [with(a100("GPU-a"), "processes", processes)]});
    let bed = Bed::new(&scenario).without("nvmlDeviceGetMPSComputeRunningProcesses_v3");
    let seen = sample(&mut bed.probe()).unwrap();
    assert_eq!(seen.uses[0].processes.as_ref().unwrap().len(), 1);
    let bed = Bed::new(&scenario).without("nvmlDeviceGetUtilizationRates");
    assert_eq!(sample(&mut bed.probe()).unwrap().uses[0].busy_percent, None);
    let bed = Bed::new(&scenario).without("nvmlDeviceGetMemoryInfo_v2");
    let error = sample(&mut bed.probe()).unwrap_err().to_string();
    assert!(error.contains("nvmlDeviceGetMemoryInfo_v2") && error.contains("R510"), "{error}");
    let bed = Bed::new(&scenario).without("nvmlShutdown");
    assert!(matches!(sample(&mut bed.probe()), Err(ProbeError::DriverTooOld { .. })));
}

#[test]
fn a_missing_library_or_driver_is_named_with_a_suggestion() {
    let nowhere = PathBuf::from("/nowhere/libnvidia-ml.so.1");
    let mut probe = NvmlProbe::new(Some(nowhere), PodsByProcess::new("/proc"));
    let error = sample(&mut probe).unwrap_err().to_string();
    assert!(error.contains("`/nowhere/libnvidia-ml.so.1`"), "{error}");
    assert!(error.contains("--nvml-library"), "{error}");

    let fails = |code: u32| json!({"failures": {"nvmlInit_v2": code}});
    let bed = Bed::new(&fails(9));
    let mut probe = bed.probe();
    assert_eq!(sample(&mut probe), Err(ProbeError::DriverNotLoaded));
    bed.play(&fails(18));
    assert_eq!(sample(&mut probe), Err(ProbeError::DriverMismatch));
    bed.play(&json!({"gpus": [t4("GPU-a")]}));
    assert_eq!(sample(&mut probe).unwrap().inventory.len(), 1);
    // A driver upgrade under a running agent: closed, and opened again afterwards.
    bed.play(&json!({"failures": {"nvmlDeviceGetCount_v2": 18}, "gpus": [t4("GPU-a")]}));
    assert_eq!(sample(&mut probe), Err(ProbeError::DriverMismatch));
    bed.play(&json!({"gpus": [t4("GPU-a")]}));
    assert_eq!(sample(&mut probe).unwrap().inventory.len(), 1);
}

/// A node with a GPU that has everything, one in MIG mode, and a plain one.
fn rich() -> Value {
    let first = json!({"uuid": "GPU-a", "name": "NVIDIA H200", "total_mib": 143_771,
        "reserved_mib": 619, "used_mib": 700, "minor": 2, "bus": 1, "numa_node": 0,
        "recovery_action": 0, "links": [{"gpu": 9}, {"switch": 3}],
        "processes": [{"pid": 10, "used_mib": 700, "lists": ["compute"]}]});
    let last = with(t4("GPU-z"), "bus", json!(9));
    json!({"gpus": [first, h200_in_mig_mode(), last], "events": []})
}

/// The rich node, in which `symbol` fails with `code` for the devices at `paths`.
fn failing(paths: &[&str], symbol: &str, code: u32) -> Value {
    let mut scenario = rich();
    for path in paths {
        scenario.pointer_mut(path).unwrap()["failures"] = json!({symbol: code});
    }
    scenario
}

/// Whether a code concerns the whole library.
fn is_of_library(code: u32) -> bool {
    [1, 9, 12, 18].contains(&code)
}

/// Whether a code means that a device is gone.
fn is_of_loss(code: u32) -> bool {
    [15, 16].contains(&code)
}

/// What cannot be known without these.
fn is_needed(symbol: &str) -> bool {
    ["HandleByIndex_v2", "UUID", "Name", "MemoryInfo_v2", "Index", "MigMode"]
        .iter()
        .any(|end| symbol == format!("nvmlDeviceGet{end}"))
}

/// UUID, kind and memory of every device.
fn sizes(sample: &Sample) -> Vec<(String, DeviceKind, u64, u64)> {
    let devices = sample.inventory.iter();
    devices.map(|it| (it.uuid.clone(), it.kind, it.memory_mib, it.reserved_mib)).collect()
}

/// What holds for a sample after any failure on devices other than the last.
fn is_sound(sample: &Sample, what: &str) {
    for (device, seen) in sample.inventory.iter().map(|device| {
        let seen = sample.uses.iter().find(|seen| seen.uuid == device.uuid);
        (device, seen.unwrap_or_else(|| panic!("{what}: nothing is reported of {}", device.uuid)))
    }) {
        assert_eq!(device.healthy, seen.healthy, "{what}");
        assert_eq!(seen.healthy, seen.fault.is_none(), "{what}: it has a reason");
        let is_parent = device.kind == DeviceKind::MigParent; // only its instances are shared
        assert!(device.memory_mib > 0 || !device.healthy || is_parent, "{what}: nothing to share");
    }
    let last = sample.inventory.last().unwrap();
    assert_eq!((&*last.uuid, last.healthy, last.memory_mib), ("GPU-z", true, 15_360), "{what}");
}

#[test]
fn no_error_of_any_call_about_a_device_makes_a_wrong_inventory() {
    let bed = Bed::new(&rich());
    let whole = sizes(&sample(&mut bed.probe()).unwrap());
    assert_eq!(whole.len(), 5);
    let places = ["/gpus/0", "/gpus/1", "/gpus/1/mig/0", "/gpus/1/mig/2"];
    for symbol in DEVICE_CALLS {
        bed.play(&rich());
        let mut probe = bed.probe();
        sample(&mut probe).unwrap();
        for code in codes() {
            let what = format!("{symbol} fails with {code}");
            let scenario = failing(&places, symbol, code);
            // On devices that are known.
            bed.play(&scenario);
            match sample(&mut probe) {
                Err(error) => assert!(is_of_library(code), "{what}: {error}"),
                Ok(seen) => {
                    is_sound(&seen, &what);
                    let is_gap =
                        symbol == "nvmlDeviceGetMigDeviceHandleByIndex" && [2, 6].contains(&code);
                    if code != 0 && !is_gap {
                        assert_eq!(sizes(&seen), whole, "{what}: no device vanishes or changes");
                    }
                    // A known GPU is not looked up again.
                    let is_called = symbol != "nvmlDeviceGetHandleByIndex_v2";
                    if is_called && is_needed(symbol) && is_of_loss(code) {
                        assert!(seen.inventory[..4].iter().all(|it| !it.healthy), "{what}");
                    }
                }
            }
            // All is well again without a restart.
            bed.play(&rich());
            let seen = sample(&mut probe).unwrap();
            assert_eq!(sizes(&seen), whole, "{what}, then it has ended");
            assert!(
                seen.inventory.iter().all(|it| it.healthy),
                "{what}, then it has ended: {seen:?}"
            );
            // From the start.
            bed.play(&scenario);
            match sample(&mut bed.probe()) {
                Err(error) => {
                    assert!(is_of_library(code), "{what}: {error}");
                    assert!(error.to_string().contains("NVIDIA"), "{what}: {error}");
                }
                Ok(seen) => {
                    is_sound(&seen, &what);
                    let first = seen.inventory.iter().find(|it| it.uuid == "GPU-a");
                    if !is_needed(symbol) && !is_of_loss(code) {
                        assert!(first.is_some_and(|it| it.healthy), "{what}: {seen:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn no_error_of_any_call_about_the_node_makes_a_wrong_inventory() {
    let bed = Bed::new(&rich());
    let whole = sizes(&sample(&mut bed.probe()).unwrap());
    for symbol in NODE_CALLS {
        for code in codes() {
            let what = format!("{symbol} fails with {code}");
            let scenario = with(rich(), "failures", json!({symbol: code}));
            for is_known in [false, true] {
                bed.play(&rich());
                let mut probe = bed.probe();
                if is_known {
                    sample(&mut probe).unwrap();
                }
                bed.play(&scenario);
                match sample(&mut probe) {
                    Ok(seen) if symbol == "nvmlDeviceGetCount_v2" => {
                        assert_eq!((code, seen.inventory.len()), (0, 0), "success without a count");
                    }
                    Ok(seen) => assert_eq!(sizes(&seen), whole, "{what}"),
                    Err(error) => {
                        assert_ne!(code, 0, "{what}");
                        let is_needed = ["nvmlInit_v2", "nvmlDeviceGetCount_v2"].contains(&symbol);
                        assert!(is_needed || is_of_library(code), "{what}: {error}");
                        assert!(error.to_string().contains("NVIDIA"), "{what}: {error}");
                    }
                }
                bed.play(&rich());
                assert_eq!(sizes(&sample(&mut probe).unwrap()), whole, "{what}, then it has ended");
            }
        }
    }
}

#[test]
fn each_missing_function_loses_only_its_own_data() {
    for symbol in DEVICE_CALLS.into_iter().chain(NODE_CALLS) {
        let bed = Bed::new(&rich()).without(symbol);
        let mut probe = bed.probe();
        match sample(&mut probe) {
            Ok(seen) => is_sound(&seen, symbol),
            Err(error) => {
                let is_needed = [
                    "nvmlInit_v2",
                    "nvmlShutdown",
                    "nvmlDeviceGetCount_v2",
                    "nvmlDeviceGetHandleByIndex_v2",
                    "nvmlDeviceGetUUID",
                    "nvmlDeviceGetName",
                    "nvmlDeviceGetMemoryInfo_v2",
                    "nvmlDeviceGetMaxMigDeviceCount",
                    "nvmlDeviceGetMigDeviceHandleByIndex",
                ];
                assert!(is_needed.contains(&symbol), "{symbol}: {error}");
                assert!(matches!(error, ProbeError::DriverTooOld { .. }), "{symbol}: {error}");
                assert!(error.to_string().contains(symbol), "{symbol}: {error}");
            }
        }
    }
}

#[test]
fn an_impossible_device_report_affects_only_that_device() {
    let known = with(a100("GPU-a"), "bus", json!(1));
    let lie = |field: &str, value: Value| with(known.clone(), field, value);
    let (absurd, silent) = (Some(DeviceFault::Absurd), Some(DeviceFault::NotAnswering));
    for (device, fault) in [
        (lie("uuid", json!("GPU,a")), silent),
        (lie("uuid", json!("")), silent),
        (lie("uuid", json!("\u{ff}\u{fe}")), silent),
        (lie("name", json!("")), absurd),
        (lie("name", json!("\u{7}bell")), absurd),
        (lie("name", json!("\u{ff}\u{fe}")), silent),
        (lie("total_mib", json!(17 << 20)), absurd),
        (lie("reserved_mib", json!(81_921)), absurd),
        (lie("used_mib", json!(17 << 20)), absurd),
    ] {
        let bed = Bed::new(&json!({"gpus": [known, t4("GPU-b")]}));
        let mut probe = bed.probe();
        sample(&mut probe).unwrap();
        let lying = json!({"gpus": [device, t4("GPU-b")]});
        bed.play(&lying);
        let seen = sample(&mut probe).unwrap();
        assert_eq!(faults(&seen), [("GPU-a", fault), ("GPU-b", None)], "{lying}");
        assert_eq!((seen.unreadable, seen.inventory[0].memory_mib), (1, 81_920), "{lying}");
        let cold = sample(&mut bed.probe()).unwrap();
        assert_eq!(faults(&cold), [("GPU-b", None)], "{lying}");
    }
}

#[test]
fn invalid_detail_numbers_are_left_out() {
    let odd = json!({"minor": u32::MAX, "numa_node": 1_023, "bus": 1, "recovery_action": null});
    let mut gpu = a100("GPU-a");
    gpu.as_object_mut().unwrap().extend(odd.as_object().unwrap().clone());
    let mut parent = h200_in_mig_mode();
    parent["mig"][0]["slot"] = json!([2, 70, 4]);
    parent["mig"][2]["sms"] = json!(0);
    let bed = Bed::new(&json!({"gpus": [gpu, parent]}));
    let seen = sample(&mut bed.probe()).unwrap();
    assert!(seen.inventory.iter().all(|device| device.healthy), "{seen:?}");
    let [a, _, odd_slot, odd_count] = &seen.inventory[..] else { panic!("{seen:?}") };
    assert_eq!((a.minor, a.numa_node), (None, None));
    assert_eq!((odd_slot.mig_placement, odd_slot.sm_count), (None, None));
    assert!(odd_count.mig_placement.is_some() && odd_count.sm_count.is_none());
    let bed = Bed::new(&json!({"driver": "5\u{7}", "gpus": [t4("GPU-a")]}));
    assert_eq!(sample(&mut bed.probe()).unwrap().driver, None);
}

#[test]
fn a_wrong_gpu_count_is_soon_corrected() {
    let gpus = json!([a100("GPU-a"), t4("GPU-b")]);
    let bed = Bed::new(&json!({"gpus": gpus}));
    let mut probe = bed.probe();
    sample(&mut probe).unwrap();
    for count in [3, 300, u32::MAX] {
        bed.play(&json!({"gpus": gpus, "count": count}));
        let seen = sample(&mut probe).unwrap();
        assert_eq!(seen.inventory.len(), 2, "{count}");
        assert!(seen.inventory.iter().all(|it| it.healthy), "{count}");
        assert!(seen.unreadable > 0 && seen.unreadable < 256, "{count}");
    }
    bed.play(&json!({"gpus": gpus, "count": 1}));
    assert_eq!(sample(&mut probe).unwrap().inventory.len(), 1, "nothing is known of the other");
    bed.play(&json!({"gpus": gpus}));
    assert_eq!(sample(&mut probe).unwrap().inventory.len(), 2);
    let parent = with(h200_in_mig_mode(), "mig_count", json!(u32::MAX));
    bed.play(&json!({"gpus": [parent]}));
    assert_eq!(sample(&mut probe).unwrap().inventory.len(), 3);
}

#[test]
fn uncountable_instances_stay_and_get_no_pod() {
    let scenario =
        |failures: Value| json!({"gpus": [with(h200_in_mig_mode(), "failures", failures)]});
    let bed = Bed::new(&scenario(json!({})));
    let mut probe = bed.probe();
    sample(&mut probe).unwrap();
    for symbol in ["nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigMode"] {
        bed.play(&scenario(json!({symbol: 3})));
        let seen = sample(&mut probe).unwrap();
        let away = Some(DeviceFault::NotAnswering);
        assert_eq!(faults(&seen)[1..], [("MIG-a", away), ("MIG-b", away)], "{symbol}");
        assert_eq!(
            seen.inventory[0].kind,
            DeviceKind::MigParent,
            "{symbol}: it is not a whole GPU"
        );
    }
}
