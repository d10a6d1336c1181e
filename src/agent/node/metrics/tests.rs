use super::*;
use crate::gpu::health::XidCounts;
use wire::api::condition::DeviceFault;
use wire::api::state::DeviceKind;
use wire::report::bodies::{AllocatedDevice, AllocationState, TenantReport};

fn sample(uses: Vec<DeviceUse>) -> Sample {
    let gpu = |uuid: &String| DeviceReport {
        memory_mib: 1_000,
        reserved_mib: 100,
        ..DeviceReport::new(uuid.clone(), 3, "Tesla \"T4\"".to_owned(), DeviceKind::Gpu)
    };
    let inventory: Vec<_> = uses.iter().map(|device| gpu(&device.uuid)).collect();
    Sample {
        inventory: inventory.into(),
        uses,
        driver: None,
        xids: BTreeMap::from([("GPU-a".to_owned(), XidCounts { application: 2, device: 1 })]),
        unreadable: 0,
        has_unwatched_pods: false,
        draining: BTreeSet::new(),
        mig_failures: Vec::new(),
        memory_limits: None,
        containers: [].into(),
    }
}

fn process(pod: Option<&str>, memory_mib: Option<u64>) -> ProcessUse {
    ProcessUse { pid: 1, pod_uid: pod.map(str::to_owned), memory_mib }
}

fn seen(processes: Option<Vec<ProcessUse>>) -> DeviceUse {
    DeviceUse {
        used_mib: Some(700),
        busy_percent: Some(25),
        healthy: true,
        fault: None,
        processes,
        ..DeviceUse::unread("GPU-a".to_owned(), DeviceFault::Lost)
    }
}

fn allocation(pod: &str, memory_mib: u64) -> Allocation {
    let part = AllocatedDevice { uuid: "GPU-a".to_owned(), memory_mib, share_millionths: 1 };
    let (pod_uid, state) = (pod.to_owned(), AllocationState::Confirmed);
    Allocation { pod_uid, pod: format!("d/{pod}"), state, devices: vec![part], is_guest: false }
}

/// The value of the series whose line has all `parts`.
fn value(metrics: &AgentMetrics, parts: &[&str]) -> Option<String> {
    let text = String::from_utf8(metrics.text()).unwrap();
    let line = text.lines().find(|line| parts.iter().all(|part| line.contains(part)));
    line.and_then(|line| line.rsplit_once(' ')).map(|(_, value)| value.to_owned())
}

#[test]
fn every_gpu_has_its_series_until_it_is_gone() {
    let metrics = AgentMetrics::new();
    let processes =
        vec![process(Some("p"), Some(400)), process(Some("q"), Some(50)), process(None, None)];
    let allocations = [allocation("p", 300), allocation("idle", 200)];
    metrics.show("n1", &sample(vec![seen(Some(processes))]), &allocations);
    let labels = r#"Hostname="n1",UUID="GPU-a",gpu="3""#;
    for (kind, mib) in [
        ("capacity", 900_u64),
        ("reserved", 100),
        ("allocated", 500),
        ("observed", 700),
        ("over_limit", 100),
        ("untracked", 50),
    ] {
        let kind = format!("kind=\"{kind}\"");
        let found = value(&metrics, &["gpupack_gpu_memory_bytes{", labels, &kind]);
        assert_eq!(found, Some((mib << 20).to_string()), "{kind}");
    }
    assert_eq!(value(&metrics, &["gpupack_gpu_busy_ratio{", labels]).unwrap(), "0.25");
    assert_eq!(value(&metrics, &["gpupack_gpu_healthy{", labels]).unwrap(), "1");
    assert_eq!(value(&metrics, &["gpupack_gpu_share_gpus{", labels]).unwrap(), "0.000002");
    let tenant = |pod: &str, kind: &str| {
        let labels = r#"Hostname="n1",UUID="GPU-a""#;
        let (pod, kind) = (format!("pod=\"{pod}\""), format!("kind=\"{kind}\""));
        let parts = ["gpupack_tenant_memory_bytes{", labels, "namespace=\"d\"", &pod, &kind];
        value(&metrics, &parts).map(|value| value.parse::<u64>().unwrap() >> 20)
    };
    assert_eq!([tenant("p", "allocated"), tenant("p", "used")], [Some(300), Some(400)]);
    assert_eq!([tenant("idle", "allocated"), tenant("idle", "used")], [Some(200), Some(0)]);
    assert_eq!(tenant("p", "limit"), None, "no source confirms one");
    let load =
        |pod: &str| value(&metrics, &["gpupack_tenant_busy_ratio{", &format!("uid=\"{pod}\"")]);
    assert_eq!([load("p"), load("idle")].map(Option::unwrap), ["0.25", "0"], "no process: no part");
    let xids = |class: &str| value(&metrics, &["gpupack_gpu_xid_errors_total{", class]);
    assert_eq!((xids("application").unwrap(), xids("device").unwrap()), ("2".into(), "1".into()));
    metrics.show("n1", &sample(vec![seen(None)]), &allocations);
    let untracked = || value(&metrics, &["gpupack_gpu_memory", "kind=\"untracked\""]);
    assert_eq!(untracked().unwrap(), (50_u64 << 20).to_string(), "known from the last list");
    assert_eq!(tenant("p", "used"), Some(400), "likewise");
    assert_eq!(load("p").unwrap(), "0.25", "likewise");
    let both = vec![process(Some("p"), Some(400)), process(Some("idle"), None)];
    let mut dumb = seen(Some(both));
    metrics.show("n1", &sample(vec![dumb.clone()]), &allocations);
    assert_eq!(
        [load("p"), load("idle")].map(Option::unwrap),
        ["0.125", "0.125"],
        "of equal shares"
    );
    dumb.busy_percent = None;
    metrics.show("n1", &sample(vec![dumb]), &allocations);
    assert_eq!([load("p"), load("idle")], [None, None], "MIG does not say");
    metrics.show("n2", &sample(Vec::new()), &[]);
    assert_eq!(tenant("p", "allocated"), Some(300), "another node does not affect this one");
    let lost = sample(vec![DeviceUse::unread("GPU-a".to_owned(), DeviceFault::Lost)]);
    metrics.show("n1", &lost, &allocations);
    assert_eq!((untracked(), value(&metrics, &["kind=\"observed\""])), (None, None));
    assert_eq!(value(&metrics, &["gpupack_gpu_healthy{"]).unwrap(), "0");
    metrics.show("n1", &sample(Vec::new()), &allocations);
    assert!(
        value(&metrics, &["gpupack_gpu_", "GPU-a"]).is_none() && tenant("p", "allocated").is_some()
    );
    metrics.show("n1", &sample(Vec::new()), &[]);
    assert_eq!(value(&metrics, &["GPU-a"]), None);
    assert_eq!(value(&metrics, &["gpupack_build_info{", "agent"]).unwrap(), "1");
}

#[test]
fn tenant_load_is_that_of_its_own_kernels_if_the_driver_reports_them() {
    let runs = |pod: &str, percent| TenantReport {
        pod_uid: pod.to_owned(),
        limit_mib: None,
        is_unlimited: false,
        is_mps_client: false,
        mps_limit_mib: None,
        busy_percent: Some(percent),
    };
    let both = vec![process(Some("p"), Some(400)), process(Some("q"), None)];
    let tenants = vec![runs("p", 20), runs("q", 0)];
    let metrics = AgentMetrics::new();
    let seen = DeviceUse { tenants, ..seen(Some(both)) };
    metrics.show("n1", &sample(vec![seen]), &[allocation("p", 300), allocation("q", 200)]);
    let load =
        |pod: &str| value(&metrics, &["gpupack_tenant_busy_ratio{", &format!("uid=\"{pod}\"")]);
    assert_eq!([load("p"), load("q")].map(Option::unwrap), ["0.2", "0"]);
}

#[test]
fn untracked_memory_is_reported_separately() {
    let held = BTreeMap::from([("p", 100), ("q", 100)]);
    for (processes, overuse_mib, untracked_mib) in [
        (vec![], 0, 0),
        (vec![process(Some("p"), Some(60)), process(Some("p"), Some(60))], 20, 0),
        (vec![process(Some("p"), Some(60)), process(Some("q"), Some(60))], 0, 0),
        (vec![process(Some("x"), Some(7)), process(None, Some(8))], 0, 15),
        (vec![process(Some("p"), None), process(None, None)], 0, 0),
        (vec![process(None, Some(u64::MAX)), process(None, Some(1))], 0, u64::MAX),
    ] {
        let found = OutsideUse::of(&processes, &held);
        assert_eq!(found, OutsideUse { overuse_mib, untracked_mib }, "{processes:?}");
    }
}
