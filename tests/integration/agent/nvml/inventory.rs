//! What is read of devices that work, and of drivers that say little.

use agent::gpu::sample::{Probe, ProcessSampling};
use agent::nvml::probe::NvmlProbe;
use agent::nvml::seen::{SeenArgs, seen_as_json};
use serde_json::{Value, json};
use wire::api::commands::SeenDevices;
use wire::api::condition::DeviceFault;
use wire::api::state::{DeviceKind, MigPlacement};
use wire::report::bodies::{AllocatedDevice, Allocation, AllocationState};
use wire::units::Timestamp;

use crate::harness::agent::bed::{
    Bed, POD, a100, faults, h200_in_mig_mode, sample, sample_at, t4, with,
};

#[test]
fn gpus_of_different_size_are_read_with_their_reserve_and_rounded_to_the_safe_side() {
    let second = with(t4("GPU-b"), "odd_bytes", json!(1));
    let bed = Bed::new(&json!({"gpus": [a100("GPU-a"), second]}));
    let sample = sample(&mut bed.probe()).unwrap();
    let [a, b] = &sample.inventory[..] else { panic!("two GPUs: {sample:?}") };
    assert_eq!((a.uuid.as_str(), a.index, a.kind), ("GPU-a", 0, DeviceKind::Gpu));
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
    let bed = Bed::new(&json!({"gpus": [with(a100("GPU-a"), "processes", processes)]}));
    let slice = POD.replace('-', "_");
    bed.process(10, &format!("0::/kubepods.slice/kubepods-pod{slice}.slice/crio-x.scope\n"));
    bed.process(11, &format!("0::/kubepods/burstable/pod{POD}/x\n"));
    bed.process(12, "0::/user.slice\n");
    let mut probe = bed.probe();
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
    let bed = Bed::new(&json!({"gpus": [t4("GPU-a"), h200_in_mig_mode()]}));
    let sample = sample(&mut bed.probe()).unwrap();
    let rows: Vec<_> = sample
        .inventory
        .iter()
        .map(|d| (d.uuid.as_str(), d.index, d.kind, d.model.as_str(), d.mig_profile.as_deref()))
        .collect();
    assert_eq!(
        rows,
        [
            ("GPU-a", 0, DeviceKind::Gpu, "Tesla T4", None),
            ("GPU-p", 1, DeviceKind::MigParent, "NVIDIA H200", None),
            ("MIG-a", 1, DeviceKind::MigInstance, "NVIDIA H200", Some("3g.71gb")),
            ("MIG-b", 1, DeviceKind::MigInstance, "NVIDIA H200", Some("1g.18gb+me")),
        ]
    );
    let parent = &sample.uses[1];
    assert_eq!((parent.busy_percent, &parent.processes), (None, &None), "it lists them again");
    assert_eq!(sample.uses[2].processes.as_ref().unwrap()[0].pid, 5);
    assert_eq!(sample.uses[2].busy_percent, None);
    let (a, b) = (&sample.inventory[2], &sample.inventory[3]);
    assert_eq!((a.mig_placement, a.sm_count), (Some(MigPlacement { start: 4, size: 4 }), Some(60)));
    assert_eq!((b.mig_placement, b.sm_count), (Some(MigPlacement { start: 0, size: 1 }), Some(16)));
}

#[test]
fn a_value_the_driver_does_not_report_is_unknown_and_not_zero() {
    let cannot = json!({"nvmlDeviceGetUtilizationRates": 3, "nvmlDeviceGetMigMode": 3,
                        "nvmlDeviceGetComputeRunningProcesses_v3": 4});
    let gpu = with(a100("GPU-a"), "failures", cannot);
    let unified = with(t4("GPU-b"), "failures", json!({"nvmlDeviceGetMemoryInfo_v2": 3}));
    let bed = Bed::new(&json!({"gpus": [gpu, unified]}));
    let sample = sample(&mut bed.probe()).unwrap();
    let a = &sample.uses[0];
    assert_eq!(
        (a.healthy, a.used_mib, a.busy_percent, &a.processes),
        (true, Some(5_000), None, &None)
    );
    assert_eq!(faults(&sample)[1], ("GPU-b", Some(DeviceFault::NoMemory)));
    let (b, used) = (&sample.inventory[1], &sample.uses[1]);
    assert_eq!((b.healthy, b.memory_mib, used.used_mib), (false, 0, None), "nothing to share");
}

#[test]
fn a_driver_without_its_module_for_cuda_is_reported() {
    let bed = Bed::new(&json!({"gpus": [a100("GPU-a")]}));
    let mut probe = bed.probe();
    let mut lacks_uvm = || sample(&mut probe).unwrap().driver.unwrap().lacks_uvm;
    assert!(!lacks_uvm(), "a list that cannot be read proves nothing");
    std::fs::create_dir_all(bed.proc_root()).unwrap();
    let mut list = |rest: &str| {
        let text = format!("Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n{rest}");
        std::fs::write(bed.proc_root().join("devices"), text).unwrap();
        lacks_uvm()
    };
    assert!(list(""));
    assert!(list("509 nvidia-uvm-tools\n"));
    assert!(!list("510 nvidia-uvm\n"), "it is loaded now");
    assert!(list(""), "and gone again");
}

/// On Grace the operating system has pages of the GPU's memory, and keeps them when processes end.
#[test]
fn memory_that_belongs_to_the_operating_system_is_judged_by_processes_alone() {
    let gpu = |mode: Value, processes: Value| {
        let fields = json!({"uuid": "GPU-a", "name": "NVIDIA GH200 480GB", "total_mib": 97_871,
                            "reserved_mib": 600, "used_mib": 60_000, "addressing_mode": mode});
        json!({"gpus": [with(fields, "processes", processes)]})
    };
    let process = |pid: u32, mib: Value| json!({"pid": pid, "used_mib": mib, "lists": ["compute"]});
    let known = json!([process(10, json!(700)), process(11, json!(41))]);
    let bed = Bed::new(&gpu(json!(2), known.clone()));
    let mut probe = bed.probe();
    let mut look = |scenario: &Value, processes: ProcessSampling| {
        bed.play(scenario);
        let seen = probe.sample(processes, Timestamp::START).unwrap();
        let inventory = serde_json::to_value(&seen.inventory[0]).unwrap();
        let used = serde_json::to_value(&seen.uses[0]).unwrap();
        (inventory["addressingMode"].clone(), used["usedMib"].clone(), used["fault"].clone())
    };
    use ProcessSampling::{List, Skip};
    let healthy = (json!("Ats"), json!(741), json!(null));
    assert_eq!(look(&gpu(json!(2), known.clone()), List), healthy);
    assert_eq!(look(&gpu(json!(2), json!([])), Skip), healthy, "as of the last list");
    let unknown = json!([process(10, json!(700)), process(11, json!(null))]);
    let faulty = (json!("Ats"), json!(null), json!("UnknownUse"));
    assert_eq!(look(&gpu(json!(2), unknown.clone()), List), faulty);
    assert_eq!(look(&gpu(json!(2), known.clone()), Skip), faulty, "until it is listed again");
    assert_eq!(look(&gpu(json!(2), known.clone()), List), healthy);
    let mut failing = gpu(json!(2), known.clone());
    failing["gpus"][0]["failures"] = json!({"nvmlDeviceGetComputeRunningProcesses_v3": 4});
    assert_eq!(look(&failing, List), faulty, "a list that cannot be read says nothing");
    assert_eq!(look(&gpu(json!(2), json!([])), List).1, json!(0));
    for (mode, name) in
        [(json!(1), json!("Hmm")), (json!(0), json!("Off")), (json!(null), json!(null))]
    {
        let bed = Bed::new(&gpu(mode, unknown.clone()));
        let seen = sample(&mut bed.probe()).unwrap();
        let inventory = serde_json::to_value(&seen.inventory[0]).unwrap();
        assert_eq!(inventory["addressingMode"], name);
        assert_eq!((seen.uses[0].used_mib, seen.uses[0].fault), (Some(60_000), None));
    }
    let older = Bed::new(&gpu(json!(2), known)).without("nvmlDeviceGetAddressingMode");
    assert_eq!(sample(&mut older.probe()).unwrap().uses[0].used_mib, Some(60_000));
}

#[test]
fn numa_nodes_and_links_of_devices_are_read() {
    let gpu = |uuid: &str, bus: u32, minor: u32, numa: u32, links: Value| {
        let fields = json!({"uuid": uuid, "name": "NVIDIA H200", "total_mib": 143_771, "bus": bus,
                            "minor": minor, "numa_node": numa});
        with(fields, "links", links)
    };
    // Four GPUs: two pairs by direct links, and three of them on switches.
    let scenario = json!({"driver": "615.43", "cuda": 13_040, "gpus": [
        gpu("GPU-a", 1, 7, 0, json!([{"gpu": 2}, {"gpu": 2}, "down", {"switch": 90}])),
        gpu("GPU-b", 2, 6, 0, json!([{"gpu": 1}, {"gpu": 1}, {"switch": 91}, {"switch": 91}])),
        gpu("GPU-c", 3, 5, 65, json!([{"switch": 90}, {"switch": 91}, {"gpu": 77}])),
        gpu("GPU-d", 4, 4, 1, json!([])),
    ]});
    let bed = Bed::new(&scenario);
    let mut probe = bed.probe();
    let seen = sample(&mut probe).unwrap();
    let driver = seen.driver.as_ref().unwrap();
    assert_eq!((&*driver.version, driver.cuda.as_deref()), ("615.43", Some("13.4")));
    let rows: Vec<String> = seen
        .inventory
        .iter()
        .map(|it| {
            let near = it.neighbors.iter().map(|n| format!("{} {}", n.id, n.links));
            let near: Vec<String> = near.collect();
            format!("{} {:?} {:?}: {}", it.uuid, it.minor, it.numa_node, near.join(", "))
        })
        .collect();
    assert_eq!(
        rows,
        [
            "GPU-a Some(7) Some(0): GPU-b 3, GPU-c 1",
            "GPU-b Some(6) Some(0): GPU-a 3, GPU-c 2",
            "GPU-c Some(5) Some(65): GPU-a 1, GPU-b 2",
            "GPU-d Some(4) Some(1): ",
        ]
    );
    let text = serde_json::to_string(&seen.inventory[3]).unwrap();
    assert!(
        !text.contains("neighbors") && !text.contains("migPlacement"),
        "no such fields: {text}"
    );
    // One that is taken out is nobody's neighbor.
    let mut fewer = scenario.clone();
    fewer["gpus"].as_array_mut().unwrap().remove(1);
    bed.play(&fewer);
    let seen = sample(&mut probe).unwrap();
    let near: Vec<&str> = seen.inventory[0].neighbors.iter().map(|it| &*it.id).collect();
    assert_eq!(near, ["GPU-c"]);
}

#[test]
fn more_processes_than_expected_are_read_up_to_a_maximum() {
    let gpu = |count: u32| {
        let process = |pid: u32| json!({"pid": pid, "used_mib": 1, "lists": ["compute", "mps"]});
        let processes: Vec<_> = (1..=count).map(process).collect();
        json!({"gpus": [with(a100("GPU-a"), "processes", json!(processes))]})
    };
    let bed = Bed::new(&gpu(256));
    let mut probe = bed.probe();
    for (count, listed) in [(256, Some(256)), (257, Some(257)), (4_096, Some(4_096)), (5_000, None)]
    {
        bed.play(&gpu(count));
        let seen = sample(&mut probe).unwrap();
        let found = seen.uses[0].processes.as_ref().map(Vec::len);
        assert_eq!((found, seen.uses[0].healthy), (listed, true), "{count}");
    }
}

#[test]
fn an_incomplete_process_list_is_rejected() {
    let processes = json!([{"pid": 1, "used_mib": 5, "lists": ["compute"]}]);
    let gpu = with(a100("GPU-a"), "processes", processes);
    let bed = Bed::new(&json!({"gpus": [gpu]}));
    let mut probe = bed.probe();
    for list in ["ComputeRunning", "MPSComputeRunning", "GraphicsRunning"] {
        let symbol = format!("nvmlDeviceGet{list}Processes_v3");
        for code in [3, 4, 13, 999] {
            let failing = with(gpu.clone(), "failures", json!({symbol.clone(): code}));
            bed.play(&json!({"gpus": [failing]}));
            let seen = &sample(&mut probe).unwrap().uses[0];
            // A driver without MPS or graphics has no processes of that kind.
            let is_absent = [3, 13].contains(&code) && list != "ComputeRunning";
            let listed = seen.processes.as_ref().map(Vec::len);
            assert_eq!(listed, is_absent.then_some(1), "{symbol} fails with {code}");
            assert!(seen.healthy, "{symbol} fails with {code}");
        }
    }
}

#[test]
fn pods_with_recent_kernels_are_reported_if_the_driver_knows_them() {
    let gpu = |processes: Value| json!({"gpus": [with(a100("GPU-a"), "processes", processes)]});
    let process = |pid: u32, list: &str, samples: Value| json!({"pid": pid, "used_mib": 500, "lists": [list], "samples": samples});
    let bed = Bed::new(&gpu(json!([process(10, "compute", json!([[1_000, 90]]))])));
    for pid in [10, 11] {
        bed.process(
            pid,
            &format!("0::/kubepods.slice/kubepods-pod{}.slice/a.scope\n", POD.replace('-', "_")),
        );
    }
    let probe = &mut bed.probe();
    let mut millis = 0;
    let mut reported_after = |pause: u64, processes: Value| {
        bed.play(&gpu(processes));
        millis += pause;
        let now = Timestamp::from_millis(millis);
        let sample = probe.sample(ProcessSampling::List, now).unwrap();
        let tenants = sample.uses.into_iter().next().unwrap().tenants;
        tenants.first().and_then(|tenant| tenant.busy_percent)
    };
    let mut reported = |processes: Value| reported_after(1_000, processes);
    let first = json!([process(10, "compute", json!([[1_000, 90]]))]);
    assert_eq!(
        reported(first.clone()),
        None,
        "the first look is about all that the driver remembers"
    );
    assert_eq!(reported(first), Some(0), "no sample since: it only exists");
    let busy = [[1_000, 90], [2_000, 30], [2_500, 50]];
    let idle = process(11, "graphics", json!([]));
    assert_eq!(reported(json!([process(10, "compute", json!(busy)), idle])), Some(40));
    let later = [[2_000, 30], [3_000, 70]];
    let both = [process(10, "compute", json!(later)), process(11, "compute", json!([[3_000, 60]]))];
    assert_eq!(reported(json!(both)), Some(100), "both together");
    let clients = [process(10, "compute", json!([[4_000, 9]])), process(11, "mps", json!([]))];
    assert_eq!(reported(json!(clients)), None, "unknown beside clients of MPS");
    assert_eq!(reported(json!([process(10, "compute", json!([]))])), Some(0));
    let busy = json!([process(10, "compute", json!([[5_000, 70]]))]);
    assert_eq!(reported_after(1_000, busy.clone()), Some(70));
    for _ in 0..3 {
        let seen = reported_after(250, busy.clone());
        assert_eq!(seen, Some(70), "the driver's next sample is not due: no pod became idle");
    }
    assert_eq!(reported_after(250, busy), Some(0), "it is, and there is none");
}

#[test]
fn without_process_samples_the_old_rule_applies() {
    let gpu =
        with(a100("GPU-a"), "processes", json!([{"pid": 10, "used_mib": 1, "lists": ["compute"]}]));
    let failing = with(gpu.clone(), "failures", json!({"nvmlDeviceGetProcessUtilization": 3}));
    let old = Bed::new(&json!({"gpus": [gpu]})).without("nvmlDeviceGetProcessUtilization");
    for bed in [Bed::new(&json!({"gpus": [failing]})), old] {
        bed.process(
            10,
            &format!("0::/kubepods.slice/kubepods-pod{}.slice/a.scope\n", POD.replace('-', "_")),
        );
        let probe = &mut bed.probe();
        for _ in 0..3 {
            let seen = sample(probe).unwrap().uses.remove(0);
            assert_eq!((seen.fault, seen.tenants.len()), (None, 0));
            assert_eq!(seen.processes.map(|list| list.len()), Some(1), "the list is whole");
        }
    }
}

#[test]
fn a_container_of_an_ended_pod_without_gpu_use_is_listed_with_no_memory() {
    let gpu = |processes: Value| json!({"gpus": [with(a100("GPU-a"), "processes", processes)]});
    let bed = Bed::new(&gpu(json!([])));
    let group = format!("0::/kubepods.slice/kubepods-pod{}.slice/a.scope\n", POD.replace('-', "_"));
    bed.process(10, &group);
    let mut probe = bed.probe();
    let listed = |probe: &mut NvmlProbe, seconds| {
        let seen = sample_at(probe, seconds).unwrap().uses.remove(0);
        assert_eq!(seen.tenants, [], "only its existence is reported");
        let list = seen.processes.unwrap().into_iter();
        list.map(|it| (it.pid, it.pod_uid.unwrap(), it.memory_mib)).collect::<Vec<_>>()
    };
    assert_eq!(listed(&mut probe, 0), [], "it lives, and may use no GPU");
    let part = AllocatedDevice { uuid: "GPU-a".to_owned(), memory_mib: 9, share_millionths: 10 };
    let (pod_uid, pod, devices) = (POD.to_owned(), "d/p".to_owned(), vec![part]);
    let allocation =
        Allocation { pod_uid, pod, state: AllocationState::Draining, devices, is_guest: false };
    probe.observe(&[allocation], Timestamp::START);
    for seconds in 1..4 {
        assert_eq!(listed(&mut probe, seconds), [(10, POD.to_owned(), Some(0))]);
    }
    bed.process(11, &group);
    bed.play(&gpu(json!([{"pid": 11, "used_mib": 500, "lists": ["mps"]}])));
    let seen = sample_at(&mut probe, 4).unwrap().uses.remove(0).processes.unwrap();
    assert_eq!(
        seen.iter().map(|it| (it.pid, it.memory_mib)).collect::<Vec<_>>(),
        [(11, Some(500))]
    );
    bed.play(&gpu(json!([])));
    for pid in ["10", "11"] {
        std::fs::remove_dir_all(bed.proc_root().join(pid)).unwrap();
    }
    assert_eq!(listed(&mut probe, 5), []);
}

#[test]
fn what_a_container_sees_is_printed_for_a_probe() {
    let seen = |bed: &Bed, variable: &str| -> SeenDevices {
        let visible_devices = variable.to_owned();
        let args = SeenArgs {
            nvml_library: Some(bed.library()),
            proc_root: bed.proc_root(),
            to: None,
            stay: 0,
            visible_devices,
        };
        serde_json::from_str(&seen_as_json(&args)).unwrap()
    };
    let bed = Bed::new(&json!({"gpus": [a100("GPU-a"), t4("GPU-b")]}));
    let all = seen(&bed, "void");
    let found: Vec<_> = all.items.iter().map(|it| (it.uuid.as_str(), it.memory_mib)).collect();
    assert_eq!(found, [("GPU-a", 81_920), ("GPU-b", 15_360)]);
    assert_eq!((all.error, all.module_loaded, &*all.visible_devices), (None, None, "void"));
    let bed = Bed::new(&json!({"gpus": [h200_in_mig_mode()]}));
    let kinds: Vec<_> = seen(&bed, "void").items.iter().map(|it| it.device_kind).collect();
    assert!(kinds.contains(&DeviceKind::MigParent) && kinds.contains(&DeviceKind::MigInstance));
    for (modules, is_loaded) in [("nvidia_uvm 1\nnvidia 1 1\n", true), ("nvidia_uvm 1\n", false)] {
        std::fs::create_dir_all(bed.proc_root()).unwrap();
        std::fs::write(bed.proc_root().join("modules"), modules).unwrap();
        assert_eq!(seen(&bed, "").module_loaded, Some(is_loaded));
    }
    std::fs::remove_file(bed.library()).unwrap();
    let blind = seen(&bed, "runtime.nvidia.com/gpu=GPU-a");
    assert!(blind.items.is_empty() && blind.error.is_some(), "{blind:?}");
}
