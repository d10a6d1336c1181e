//! How events and the driver's recovery action change the health of a device.

use agent::gpu::health::XidCounts;
use agent::gpu::sample::{ProbeError, Sample};
use agent::nvml::probe::NvmlProbe;
use serde_json::{Value, json};
use wire::api::condition::DeviceFault;

use crate::harness::agent::bed::{
    Bed, a100, faults, h200_in_mig_mode, sample, sample_at, t4, with,
};

/// NVML's bits for kinds of events.
const DOUBLE_BIT_ERROR: u64 = 2;
const XID: u64 = 8;
const UNAVAILABLE: u64 = 0x4000;
const RECOVERY: u64 = 0x8000;

/// Two GPUs of a driver that reports recovery actions and events.
struct Story {
    bed: Bed,
    probe: NvmlProbe,
    scenario: Value,
}

impl Story {
    fn new(first: Value) -> Self {
        let scenario = json!({"gpus": [first, t4("GPU-z")], "events": []});
        let bed = Bed::new(&scenario);
        let mut probe = bed.probe();
        let seen = sample(&mut probe).unwrap();
        assert!(seen.inventory.iter().all(|it| it.healthy), "{seen:?}");
        Self { bed, probe, scenario }
    }

    /// Two GPUs of a driver without a recovery action.
    fn of_new_driver() -> Self {
        Self::new(with(a100("GPU-a"), "recovery_action", json!(0)))
    }

    /// Something happens to the first GPU.
    fn happens(&mut self, kind: u64, data: u64) -> Sample {
        self.tell(json!({"gpu": 0, "kind": kind, "data": data}))
    }

    fn tell(&mut self, event: Value) -> Sample {
        self.scenario["events"].as_array_mut().unwrap().push(event);
        self.next()
    }

    /// Something changes at the first GPU.
    fn changes(&mut self, field: &str, value: Value) -> Sample {
        self.scenario["gpus"][0][field] = value;
        self.next()
    }

    fn next(&mut self) -> Sample {
        self.bed.play(&self.scenario);
        sample(&mut self.probe).unwrap()
    }
}

/// The fault of the first GPU; the other one is healthy.
fn first(sample: &Sample) -> Option<DeviceFault> {
    let [(_, fault), (_, None)] = faults(sample)[..] else { panic!("{sample:?}") };
    fault
}

#[test]
fn a_hardware_xid_marks_the_gpu_unhealthy_with_its_number() {
    let mut story = Story::of_new_driver();
    for number in [13, 31, 43, 45, 68, 109] {
        let seen = story.happens(XID, number);
        assert_eq!((first(&seen), seen.uses[0].last_xid), (None, Some(number)));
        assert!(seen.inventory[0].healthy);
    }
    let seen = story.happens(XID, 79);
    assert_eq!((first(&seen), seen.uses[0].last_xid), (Some(DeviceFault::Xid), Some(79)));
    assert_eq!((seen.inventory[0].healthy, seen.inventory[0].memory_mib), (false, 81_920));
    assert_eq!(seen.uses[0].used_mib, Some(5_000), "what it uses is still read");
    assert_eq!(seen.xids["GPU-a"], XidCounts { application: 6, device: 1 });
    assert_eq!(seen.xids["GPU-z"], XidCounts::default());
    assert_eq!(first(&story.next()), Some(DeviceFault::Xid), "each event is told once");
    assert_eq!(story.next().xids["GPU-a"], XidCounts { application: 6, device: 1 });
}

#[test]
fn a_gpu_heals_only_when_the_driver_requests_no_action() {
    let mut story = Story::of_new_driver();
    story.happens(XID, 48);
    assert_eq!(
        first(&story.changes("recovery_action", json!(1))),
        Some(DeviceFault::ResetRequired)
    );
    assert_eq!(
        first(&story.changes("recovery_action", json!(2))),
        Some(DeviceFault::RebootRequired)
    );
    let fails = json!({"nvmlDeviceGetFieldValues": 999});
    assert_eq!(first(&story.changes("failures", fails)), Some(DeviceFault::RebootRequired));
    story.changes("failures", json!({}));
    assert_eq!(
        first(&story.changes("recovery_action", json!(null))),
        Some(DeviceFault::RebootRequired)
    );
    assert_eq!(first(&story.changes("recovery_action", json!(0))), None);
}

#[test]
fn a_recovery_action_of_the_driver_is_followed_from_any_source() {
    let mut story = Story::of_new_driver();
    for (event, action, fault) in [
        ((RECOVERY, 0), 3, DeviceFault::DrainRequired),
        ((XID, 154), 4, DeviceFault::ResetRequired),
        ((XID, 154), 99, DeviceFault::ResetRequired),
    ] {
        story.scenario["gpus"][0]["recovery_action"] = json!(action);
        assert_eq!(first(&story.happens(event.0, event.1)), Some(fault));
        assert_eq!(first(&story.changes("recovery_action", json!(0))), None);
    }
    assert_eq!(first(&story.happens(XID, 154)), None, "nothing is wanted");
    assert_eq!(
        first(&story.changes("recovery_action", json!(1))),
        Some(DeviceFault::ResetRequired)
    );
}

#[test]
fn other_events_are_not_xids() {
    let mut story = Story::of_new_driver();
    let error = json!({"gpu": 0, "kind": DOUBLE_BIT_ERROR, "data": 79});
    assert_eq!(first(&story.tell(error.clone())), None, "nobody requested it");
    let seen = story.tell(with(error, "unasked", json!(true)));
    assert_eq!((first(&seen), seen.uses[0].last_xid), (None, None), "and it is still reported");
    let seen = story.happens(UNAVAILABLE, 79);
    assert_eq!((first(&seen), seen.uses[0].last_xid), (Some(DeviceFault::Unavailable), None));
}

/// As NVIDIA's device plugin does it.
#[test]
fn an_event_by_a_handle_that_nobody_has_seen_counts_for_the_gpu_that_the_handle_names() {
    let mut story = Story::of_new_driver();
    let event = json!({"gpu": 0, "kind": XID, "data": 79, "by_new_handle": true});
    let seen = story.tell(event.clone());
    assert_eq!((first(&seen), seen.uses[0].last_xid), (Some(DeviceFault::Xid), Some(79)));
    let mut story = Story::new(h200_in_mig_mode());
    let seen = story.tell(with(event, "instance", json!(2)));
    let xid = Some(DeviceFault::Xid);
    let struck = [("GPU-p", None), ("GPU-z", None), ("MIG-a", xid), ("MIG-b", None)];
    assert_eq!(faults(&seen), struck, "the instance that it names");
}

#[test]
fn an_event_of_a_gpu_that_does_not_say_who_it_is_makes_every_gpu_suspect() {
    let xid = Some(DeviceFault::Xid);
    let mut story = Story::of_new_driver();
    let stranger = |data: u64| json!({"gpu": 40, "kind": XID, "data": data, "unasked": true});
    assert_eq!(faults(&story.tell(stranger(13))), [("GPU-a", None), ("GPU-z", None)]);
    let seen = story.tell(stranger(79));
    assert_eq!(faults(&seen), [("GPU-a", xid), ("GPU-z", xid)]);
    assert_eq!(seen.uses[1].last_xid, Some(79));
    let mut story = Story::of_new_driver();
    story.scenario["gpus"][1]["failures"] = json!({"nvmlDeviceGetUUID": 999});
    let mute = json!({"gpu": 1, "kind": XID, "data": 79, "by_new_handle": true});
    assert_eq!(faults(&story.tell(mute))[0], ("GPU-a", xid));
}

#[test]
fn an_xid_of_the_skip_list_is_reported_and_keeps_no_pod_off() {
    let mut story = Story::of_new_driver();
    story.probe = story.bed.probe().ignoring([48, 79].into());
    story.next();
    for number in [48, 79] {
        let seen = story.happens(XID, number);
        assert_eq!((first(&seen), seen.uses[0].last_xid), (None, Some(number)));
    }
    assert_eq!(story.next().xids["GPU-a"], XidCounts { application: 2, device: 0 });
    assert_eq!(first(&story.happens(XID, 63)), Some(DeviceFault::Xid));
    let seen = story.changes("recovery_action", json!(1));
    assert_eq!(first(&seen), Some(DeviceFault::ResetRequired), "what the driver requests counts");
}

#[test]
fn an_event_of_a_gpu_that_this_agent_does_not_report_is_no_fault_of_others() {
    let mut story = Story::of_new_driver();
    story.scenario["gpus"].as_array_mut().unwrap().push(t4("GPU-hidden"));
    story.scenario["count"] = json!(2);
    let event = json!({"gpu": 2, "kind": XID, "data": 79, "unasked": true});
    assert_eq!(faults(&story.tell(event)), [("GPU-a", None), ("GPU-z", None)]);
}

#[test]
fn a_driver_without_recovery_action_heals_on_gpu_return_or_reload() {
    for away in [15, 16] {
        let mut story = Story::new(a100("GPU-a"));
        assert_eq!(first(&story.happens(XID, 79)), Some(DeviceFault::Xid));
        let gone = [(15, DeviceFault::Lost), (16, DeviceFault::ResetRequired)];
        let gone = gone.into_iter().find(|(code, _)| *code == away).map(|(_, fault)| fault);
        assert_eq!(first(&story.changes("failures", json!({"*": away}))), gone);
        assert_eq!(first(&story.changes("failures", json!({}))), None);
    }
    let mut story = Story::new(a100("GPU-a"));
    assert_eq!(first(&story.happens(XID, 79)), Some(DeviceFault::Xid));
    story.scenario["failures"] = json!({"nvmlDeviceGetCount_v2": 18});
    story.bed.play(&story.scenario);
    assert_eq!(sample(&mut story.probe), Err(ProbeError::DriverMismatch));
    story.scenario["failures"] = json!({});
    assert_eq!(first(&story.next()), None, "the new set gets no earlier events");
}

#[test]
fn the_library_is_reopened_while_a_gpu_is_lost_without_healing_it() {
    let scenario = |failures: Value| {
        let lost = with(a100("GPU-a"), "failures", failures);
        let events = json!([{"gpu": 1, "kind": XID, "data": 48}]);
        json!({"gpus": [lost, t4("GPU-z")], "events": events, "journal": true})
    };
    let mut before = scenario(json!({}));
    before["events"] = json!([]);
    let bed = Bed::new(&before);
    let mut probe = bed.probe();
    let openings = || bed.calls().iter().filter(|call| *call == "nvmlInit_v2").count();
    sample_at(&mut probe, 0).unwrap();
    bed.play(&scenario(json!({"*": 15})));
    // After 30 s, then after 60.
    for (seconds, expected) in [(1, 1), (29, 1), (31, 1), (32, 2), (63, 2), (92, 2), (93, 3)] {
        let seen = sample_at(&mut probe, seconds).unwrap();
        let both = [("GPU-a", Some(DeviceFault::Lost)), ("GPU-z", Some(DeviceFault::Xid))];
        assert_eq!(faults(&seen), both, "{seconds}");
        assert_eq!(openings(), expected, "after {seconds} s");
    }
    bed.play(&scenario(json!({})));
    let seen = sample_at(&mut probe, 94).unwrap();
    assert_eq!(faults(&seen), [("GPU-a", None), ("GPU-z", Some(DeviceFault::Xid))]);
}

#[test]
fn an_xid_of_an_instance_marks_that_instance_unhealthy() {
    let mut story = Story::new(h200_in_mig_mode());
    let seen = story.tell(json!({"gpu": 0, "kind": XID, "data": 95, "instance": 2}));
    let xid = Some(DeviceFault::Xid);
    let struck = [("GPU-p", None), ("GPU-z", None), ("MIG-a", xid), ("MIG-b", None)];
    assert_eq!(faults(&seen), struck);
    let seen = story.tell(json!({"gpu": 0, "kind": XID, "data": 79}));
    let all = [("GPU-p", xid), ("GPU-z", None), ("MIG-a", xid), ("MIG-b", xid)];
    assert_eq!(faults(&seen), all);
    let seen = story.changes("recovery_action", json!(1));
    assert_eq!(faults(&seen)[2], ("MIG-a", Some(DeviceFault::ResetRequired)));
    assert!(story.changes("recovery_action", json!(0)).uses.iter().all(|it| it.healthy));
}

#[test]
fn an_xid_of_an_unknown_instance_marks_the_whole_gpu_unhealthy() {
    let xid = Some(DeviceFault::Xid);
    let all = [("GPU-p", xid), ("GPU-z", None), ("MIG-a", xid), ("MIG-b", xid)];
    let mut story = Story::new(h200_in_mig_mode());
    let seen = story.tell(json!({"gpu": 0, "kind": XID, "data": 95, "instance": 7}));
    assert_eq!(faults(&seen), all);
    let mut parent = h200_in_mig_mode();
    parent["mig"][0]["failures"] = json!({"nvmlDeviceGetGpuInstanceId": 3});
    let mut story = Story::new(parent);
    let seen = story.tell(json!({"gpu": 0, "kind": XID, "data": 95, "instance": 2}));
    assert_eq!(faults(&seen), all);
}

#[test]
fn a_gpu_without_events_is_judged_by_recovery_action_alone() {
    let mut story = Story::new(with(a100("GPU-a"), "event_types", json!(0)));
    assert_eq!(first(&story.happens(XID, 79)), None);
    assert_eq!(
        first(&story.changes("recovery_action", json!(1))),
        Some(DeviceFault::ResetRequired)
    );
    let fails = json!({"nvmlDeviceRegisterEvents": 3, "nvmlDeviceGetFieldValues": 3});
    let mut story = Story::new(with(a100("GPU-a"), "failures", fails));
    assert_eq!(first(&story.happens(XID, 79)), None);
}

#[test]
fn a_broken_event_set_is_recreated_and_keeps_reporting() {
    let mut story = Story::of_new_driver();
    story.scenario["failures"] = json!({"nvmlEventSetWait_v2": 999});
    assert_eq!(first(&story.next()), None);
    story.scenario["failures"] = json!({});
    assert_eq!(first(&story.next()), None);
    assert_eq!(first(&story.happens(XID, 79)), Some(DeviceFault::Xid));
}

#[test]
fn many_events_are_read_in_batches() {
    let mut story = Story::of_new_driver();
    let storm = vec![json!({"gpu": 0, "kind": XID, "data": 13}); 200];
    story.scenario["events"].as_array_mut().unwrap().extend(storm);
    let counts: Vec<u64> = (0..5).map(|_| story.next().xids["GPU-a"].application).collect();
    assert_eq!(counts, [64, 128, 192, 200, 200]);
}
