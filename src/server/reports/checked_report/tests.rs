use serde_json::json;

use super::*;
use wire::device::{DeviceKind, Health};
use wire::ids::PodUid;
use wire::report::bodies::MigOrders;
use wire::units::MemMib;

fn check(body: &str, part: &str) {
    let error = CheckedReport::from_json(body.as_bytes()).unwrap_err();
    assert!(error.to_string().contains(part), "{body}: {error}");
}

fn hello(inventory: &str, devices: &str) -> String {
    format!(
        r#"{{"apiVersion":"gpupack.dev/v1alpha1","agent":"a","sequence":1,"inventory":[{inventory}],
            "devices":[{devices}]}}"#
    )
}

const GPU: &str = r#"{"id":"GPU-a","index":0,"model":"Tesla T4","memoryMib":15360,
    "reservedMib":450,"healthy":true}"#;

#[test]
fn a_hello_of_a_newer_agent_is_read_with_its_core_fields() {
    let instance = r#"{"id":"MIG-a","index":1,"model":"M","memoryMib":9,"kind":"MigInstance",
        "parentId":"GPU-a","migProfile":"1g.5gb","healthy":false,"novelty":[1,{}]}"#;
    let used = r#"{"id":"GPU-a","usedMib":99999,"busyPercent":100,"healthy":true,
        "processes":[{"pid":7,"podUid":"p"},{"pid":8,"memoryMib":0}]}"#;
    let body = hello(&format!("{GPU},{instance}"), used)
        .replace(r#""agent":"a""#, r#""agent":"a","novelty":{"a":1}"#);
    let report = CheckedReport::from_json(body.as_bytes()).unwrap().facts;
    let inventory = report.inventory.unwrap();
    assert_eq!(inventory.devices()[0].capacity(), MemMib::new(14_910));
    assert_eq!(inventory.devices()[1].health, Health::Unhealthy);
    let use_of_gpu = &report.uses[0];
    assert_eq!(use_of_gpu.used, Some(MemMib::new(99_999)), "more than it has is still a fact");
    let processes = use_of_gpu.processes.as_ref().unwrap();
    assert_eq!(processes[0].pod, Some(PodUid::new("p")));
    assert_eq!(processes[0].memory, None, "unknown is not zero");
    assert_eq!(processes[1].memory, Some(MemMib::ZERO));
}

#[test]
fn soft_limits_that_an_older_agent_reports_are_ignored() {
    let gpu = r#"{"gpu":"GPU-a","number":7,"soft":[{"podUid":"p","softMib":4096}]}"#;
    let limits = format!(r#""memoryLimits":{{"term":3,"gpus":[{gpu}]}},"agent""#);
    let body = hello(GPU, "").replace(r#""agent""#, &limits);
    let limits = CheckedReport::from_json(body.as_bytes()).unwrap().details.limits;
    assert_eq!(limits, Some((3, BTreeMap::from([(DeviceId::new("GPU-a").unwrap(), 7)]))));
}

#[test]
fn lists_not_read_differ_from_empty_lists() {
    let body = hello(GPU, r#"{"id":"GPU-a","healthy":true,"processes":[]}"#);
    let uses = CheckedReport::from_json(body.as_bytes()).unwrap().facts.uses;
    assert_eq!(uses[0].processes, Some(Vec::new()));
    let body = hello(GPU, r#"{"id":"GPU-a","healthy":true}"#);
    assert_eq!(CheckedReport::from_json(body.as_bytes()).unwrap().facts.uses[0].processes, None);
}

#[test]
fn another_version_is_refused_by_name_even_if_nothing_else_can_be_read() {
    for version in ["gpupack.dev/v2", "gpupack.dev/v1alpha", "v1alpha1"] {
        let both =
            format!("API version `{version}` is unknown, this extender's is `{API_VERSION}`");
        check(&format!(r#"{{"apiVersion":"{version}","agent":{{"id":1}}}}"#), &both);
        check(&hello(GPU, "").replace(API_VERSION, version), &both);
    }
    check(&hello(GPU, "").replace(API_VERSION, &"v".repeat(65)), "`apiVersion` has 65 bytes");
    check(r#"{"schema_version":1,"agent":"a"}"#, "missing field `apiVersion`");
}

#[test]
fn an_error_does_not_repeat_a_large_report() {
    let long = "A".repeat(1 << 20);
    for body in [
        format!("\"{long}\""),
        hello(&GPU.replace(r#""index":0"#, &format!(r#""index":"{long}""#)), ""),
        hello(&GPU.replace(r#""index":0"#, &format!(r#""index":0,"kind":"{long}""#)), ""),
        hello("", &format!(r#"{{"{long}":}}"#)),
    ] {
        let error = CheckedReport::from_json(body.as_bytes()).unwrap_err().to_string();
        assert!(error.len() < 600, "{error:.700}");
    }
}

#[test]
fn mig_instances_that_cannot_be_are_refused_and_lost_ones_are_not() {
    let instance = |id: &str, parent: &str, mib: u64, healthy: bool| {
        format!(
            r#"{{"id":"{id}","index":0,"model":"M","memoryMib":{mib},"kind":"MigInstance",
                "parentId":"{parent}","migProfile":"1g.5gb","healthy":{healthy}}}"#
        )
    };
    let parent = r#"{"id":"GPU-p","index":0,"model":"M","memoryMib":1000,"kind":"MigParent",
        "healthy":true}"#;
    let of = |devices: &[&str]| hello(&devices.join(","), "");
    check(
        &of(&[&instance("MIG-a", "MIG-a", 9, true)]),
        "device `MIG-a`, which is not a GPU in MIG",
    );
    check(&of(&[&instance("MIG-a", "MIG-a", 9, false)]), "which is not a GPU in MIG mode");
    check(&of(&[GPU, &instance("MIG-a", "GPU-a", 9, true)]), "`GPU-a`, which is not a GPU in MIG");
    check(&of(&[GPU, &instance("MIG-a", "GPU-b", 9, true)]), "`GPU-b`, which is not reported");
    let a = |mib, healthy| instance("MIG-a", "GPU-p", mib, healthy);
    let b = |mib, healthy| instance("MIG-b", "GPU-p", mib, healthy);
    check(&of(&[parent, &a(1001, true)]), "of GPU `GPU-p` have more memory than its 1000 MiB");
    check(&of(&[parent, &a(500, true), &b(501, true)]), "with instance `MIG-b`, the instances");
    check(&of(&[parent, &a(16 << 20, true), &b(16 << 20, true)]), "more memory than its 1000 MiB");
    for known in [
        of(&[parent, &a(500, true), &b(500, true)]),
        of(&[parent, &a(500, true), &b(501, false)]),
        of(&[GPU, &instance("MIG-a", "GPU-a", 9, false)]),
    ] {
        assert!(CheckedReport::from_json(known.as_bytes()).is_ok(), "{known}");
    }
}

#[test]
fn only_objects_are_read_as_structs() {
    check(r#"["gpupack.dev/v1alpha1","a",null,5,[],null,null,[]]"#, "sequence, expected an object");
    let list = r#"["GPU-a",0,"Tesla T4",15360,450,"Gpu",null,null,true]"#;
    check(&hello(list, ""), "at `inventory[0]`: invalid type: sequence, expected an object");
    let used = |field: &str| format!(r#"{{"id":"GPU-a","healthy":true,{field}}}"#);
    check(&hello(GPU, r#"["GPU-a",1,2,true]"#), "at `devices[0]`: invalid type: sequence");
    check(&hello(GPU, &used(r#""processes":[[7,"p"]]"#)), "at `devices[0].processes[0]`");
    check(&hello(GPU, &used(r#""tenants":[["p",9]]"#)), "at `devices[0].tenants[0]`");
    let gpu = |field: &str| GPU.replace(r#""index":0"#, &format!(r#""index":0,{field}"#));
    check(&hello(&gpu(r#""neighbors":[["GPU-b",1]]"#), ""), "at `inventory[0].neighbors[0]`");
    check(
        &hello(&gpu(r#""migPlacement":[0,1]"#), ""),
        "at `inventory[0].migPlacement`: invalid type: sequence",
    );
    let driver = hello(GPU, "").replace(r#""agent":"a""#, r#""agent":"a","driver":["580"]"#);
    check(&driver, "at `driver`: invalid type: sequence");
    let none = r#""migPlacement":null,"parentId":null"#;
    assert!(CheckedReport::from_json(hello(&gpu(none), "").as_bytes()).is_ok());
}

#[test]
fn a_device_is_not_its_own_neighbor() {
    let of = |neighbors: &str| {
        let field = format!(r#""index":0,"neighbors":[{neighbors}]"#);
        hello(&GPU.replace(r#""index":0"#, &field), "")
    };
    let link = |id: &str| format!(r#"{{"id":"{id}","links":1}}"#);
    let (own, other) = (link("GPU-a"), link("GPU-b"));
    check(&of(&own), "device `GPU-a` names its neighbor `GPU-a` twice, or is its own neighbor");
    check(&of(&format!("{other},{other}")), "device `GPU-a` names its neighbor `GPU-b` twice");
}

#[test]
fn what_the_version_before_says_of_switching_is_ignored() {
    let gpu = json!({
        "id": "GPU-a", "index": 0, "model": "M", "memoryMib": 81_920, "kind": "Gpu", "healthy": true,
        "migProfiles": [{"profile": "1g.10gb", "memoryMib": 9_728, "smCount": 14, "size": 1, "starts": [0]}],
        "switchesMig": true,
    });
    let report = json!({
        "apiVersion": API_VERSION, "agent": "a", "sequence": 1, "inventory": [gpu],
        "whole": {"term": 3, "gpus": [{"gpu": "GPU-a", "number": 7}]},
        "migFailures": [{"gpu": "GPU-a", "profile": "whole", "start": 0, "error": "in use"}],
        "migPromises": {"term": 3, "instances": [
            {"podUid": "p", "gpu": "GPU-a", "profile": "whole", "start": 0},
        ]},
    });
    let report = CheckedReport::from_json(report.to_string().as_bytes()).unwrap();
    let inventory = report.facts.inventory.unwrap();
    assert_eq!(inventory.devices()[0].kind, DeviceKind::Gpu);
    assert_eq!(inventory.mig().profiles, []);
    // Nor does an agent act on such an order.
    let orders =
        json!({"term": 3, "make": [], "remove": [], "whole": [{"gpu": "GPU-a", "number": 7}]});
    let orders: MigOrders = serde_json::from_value(orders).unwrap();
    assert_eq!(orders, MigOrders { term: 3, ..MigOrders::default() });
}
