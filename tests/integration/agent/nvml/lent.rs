//! Limits of the driver that follow what pods borrow: from the extender's order to the driver, and back.

use std::time::Duration;

use agent::gpu::lent_limits::LentLimits;
use serde_json::{Value, json};

use super::loops::Loops;
use crate::harness::agent::bed::{Bed, POD, a100, with};
use crate::harness::agent::extender::Extender;

/// Another pod.
const OTHER: &str = "9f8e7d6c-5b4a-3928-1706-f5e4d3c2b1a0";

const LENDING: &str = "webhook: {memory_limit: driver}\npools: {\"\": {borrow: memory}}";

const PERIOD: Duration = Duration::from_millis(100);

/// The control group of the container of a pod.
fn group(pod: &str) -> String {
    format!("/sys/fs/cgroup/kubepods/burstable/pod{pod}/main")
}

/// A GPU of 80 GiB with a process of `POD` that uses so much, whose containers were limited to 20 GiB at their start.
fn scenario(used_gib: u64) -> Value {
    let used = used_gib << 10;
    let process = json!([{"pid": 10, "used_mib": used, "lists": ["compute"]}]);
    let gpu = with(a100("GPU-a"), "processes", process);
    let limits = json!({group(POD): 20 << 10, group(OTHER): 20 << 10});
    let gpu = with(with(gpu, "memory_limits", limits), "limited_use", json!({group(POD): used}));
    json!({"gpus": [with(gpu, "used_mib", json!(used))]})
}

struct Stage {
    bed: Bed,
    extender: Extender,
    _loops: Loops,
}

impl Stage {
    /// An agent that sets limits, and a pod of 20 GiB that may use the whole GPU.
    fn start() -> Self {
        let bed = Bed::new(&scenario(10));
        bed.process(10, &format!("0::{}\n", &group(POD)["/sys/fs/cgroup".len()..]));
        let extender = Extender::configured(LENDING);
        let limits = LentLimits::default();
        let probe = bed.probe().with_limits(limits.clone());
        let loops = Loops::setting(probe, &extender, PERIOD, Some(limits));
        extender.until("the GPU", |node| node["devices"].get(0).map(|_| ()));
        extender.lend(POD, "GPU-a", 20 << 10);
        Self { bed, extender, _loops: loops }
    }

    /// Waits until the container of `POD` has this limit.
    fn until_limit(&self, gib: u64) {
        self.extender.until(&format!("a limit of {gib} GiB"), |_| {
            let set = self.bed.limits_set();
            (set.last() == Some(&(group(POD), gib))).then_some(())
        });
    }
}

#[test]
fn a_pod_may_use_what_is_free_until_another_one_comes() {
    let stage = Stage::start();
    let Stage { bed, extender, .. } = &stage;
    stage.until_limit(79); // what the driver leaves of 80
    let verified = |node: &Value| {
        let shown = node["devices"][0]["tenants"][0]["isolation"]["verified"].as_str();
        shown.is_some_and(|it| it.eq_ignore_ascii_case("driver")).then_some(())
    };
    extender.until("verified", verified);
    assert_eq!(extender.node()["devices"][0]["setsMemoryLimits"], true);
    // What it uses above its request counts as free.
    bed.play(&scenario(60));
    let device = |node: &Value, key: &str| node["devices"][0][key].as_u64();
    extender.until("use", |node| (device(node, "usedMib")? >= 60 << 10).then_some(()));
    bed.play(&scenario(10));
    extender.until("use", |node| (device(node, "usedMib")? < 20 << 10).then_some(()));
    extender.allocate(OTHER, "GPU-a", 20 << 10);
    assert!(!extender.may_bind(OTHER), "`POD` may still use all");
    bed.process(11, &format!("0::{}\n", &group(OTHER)["/sys/fs/cgroup".len()..]));
    extender.until("the limit in force", |_| extender.may_bind(OTHER).then_some(()));
    stage.until_limit(59);
    let set = bed.limits_set();
    assert!(set.iter().all(|(of, _)| *of == group(POD)), "`OTHER` borrows nothing: {set:?}");
}

#[test]
fn a_pod_waits_for_one_that_uses_what_it_requests() {
    let stage = Stage::start();
    let Stage { bed, extender, .. } = &stage;
    stage.until_limit(79);
    bed.play(&scenario(70));
    let used = |node: &Value| node["devices"][0]["usedMib"].as_u64();
    extender.until("use", |node| (used(node)? >= 70 << 10).then_some(()));
    extender.allocate(OTHER, "GPU-a", 40 << 10);
    stage.until_limit(70); // its growth is stopped, until its container is restarted
    assert!(!extender.may_bind(OTHER));
    bed.play(&scenario(10));
    extender.until("the limit in force", |_| extender.may_bind(OTHER).then_some(()));
}

#[test]
fn nothing_is_lent_where_the_driver_refuses_limits_or_has_none() {
    for failures in
        [json!({"nvmlDeviceSetMemoryLimits_v1": 4}), json!({"nvmlDeviceSetMemoryLimits_v1": 3})]
    {
        let bed = Bed::new(&with(scenario(10), "failures", failures.clone()));
        bed.process(10, &format!("0::{}\n", &group(POD)["/sys/fs/cgroup".len()..]));
        let extender = Extender::configured(LENDING);
        let limits = LentLimits::default();
        let probe = bed.probe().with_limits(limits.clone());
        let _loops = Loops::setting(probe, &extender, PERIOD, Some(limits.clone()));
        extender.until("the GPU", |node| node["devices"].get(0).map(|_| ()));
        extender.lend(POD, "GPU-a", 20 << 10);
        extender.until("the refusal", |_| limits.in_force().gpus.is_empty().then_some(()));
        extender.allocate(OTHER, "GPU-a", 20 << 10);
        extender.until("no order", |_| extender.may_bind(OTHER).then_some(()));
        assert_eq!(bed.limits_set(), [], "{failures}");
    }
    let older = Bed::new(&scenario(10)).without("nvmlDeviceSetMemoryLimits_v1");
    let limits = LentLimits::default();
    let mut probe = older.probe().with_limits(limits.clone());
    crate::harness::agent::bed::sample(&mut probe).unwrap();
    assert_eq!(limits.in_force().gpus, []);
}
