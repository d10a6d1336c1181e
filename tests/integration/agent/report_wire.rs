//! Any report of an agent is read or rejected, and what was read is within its limits.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use serde_json::{Value, json};
use server::reports::checked_report::CheckedReport;
use wire::ids::{DeviceId, MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE};
use wire::report::report_limits::MAX_PROCESSES_PER_DEVICE;

/// Any JSON value, of little depth.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,12}", inner, 0..4).prop_map(|map| json!(map)),
        ]
    })
}

/// A number that is often right and sometimes absurd.
fn amount() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0..100_000_u64, 1 => any::<u64>()]
}

/// A UUID of a small set, or any text.
fn uuid() -> impl Strategy<Value = String> {
    prop_oneof![8 => "GPU-[a-e]", 1 => ".{0,100}"]
}

fn device() -> impl Strategy<Value = Value> {
    let kind = prop_oneof!["Gpu", "MigParent", "MigInstance", "[a-z]{1,4}"];
    let number = || prop::option::of(prop_oneof![8 => 0..20_u32, 1 => any::<u32>()]);
    let neighbor = (uuid(), number())
        .prop_map(|(uuid, links)| json!({"id": uuid, "links": links.unwrap_or(1)}));
    let place = (number(), number(), number(), prop::collection::vec(neighbor, 0..3));
    (uuid(), any::<u32>(), amount(), amount(), kind, prop::option::of(uuid()), place).prop_map(
        |(uuid, index, memory_mib, reserved_mib, kind, parent, place)| {
            let (minor, numa_node, start, neighbors) = place;
            let start = start.filter(|_| kind == "MigInstance");
            let slot = start.map(|start| json!({"start": start, "size": numa_node.unwrap_or(1)}));
            let profile = json!({"profile": "1g.5gb", "memoryMib": memory_mib, "smCount": minor,
                "size": numa_node.unwrap_or(1), "starts": [0, index]});
            let profiles = if kind == "MigParent" { vec![profile] } else { Vec::new() };
            json!({"id": uuid, "index": index, "model": "Tesla T4", "memoryMib": memory_mib,
                   "reservedMib": reserved_mib, "kind": kind, "parentId": parent,
                   "migProfile": parent.as_ref().map(|_| "1g.5gb"), "healthy": true,
                   "minor": minor, "numaNode": numa_node, "neighbors": neighbors,
                   "migPlacement": slot, "smCount": start,
                   "migProfiles": profiles, "madeHere": start.is_some()})
        },
    )
}

fn device_use() -> impl Strategy<Value = Value> {
    let process = (any::<u32>(), prop::option::of(".{0,70}"), prop::option::of(amount()))
        .prop_map(|(pid, uid, mib)| json!({"pid": pid, "podUid": uid, "memoryMib": mib}));
    let processes = prop::option::of(prop::collection::vec(process, 0..3));
    let fault = prop::option::of("Xid|Lost|[A-Za-z]{1,9}");
    (uuid(), prop::option::of(amount()), prop::option::of(0..120_u8), processes, fault).prop_map(
        |(uuid, used, busy, processes, fault)| {
            json!({"id": uuid, "usedMib": used, "busyPercent": busy, "healthy": false,
                   "lastXid": used, "fault": fault, "processes": processes})
        },
    )
}

fn failure() -> impl Strategy<Value = Value> {
    (uuid(), ".{0,70}", amount(), prop::option::of(uuid()), ".{0,20}").prop_map(
        |(gpu, profile, start, instance, error)| {
            json!({"gpu": gpu, "profile": profile, "start": start % 40, "instance": instance,
                   "error": error})
        },
    )
}

const FIELDS: [&str; 8] =
    ["apiVersion", "agent", "session", "sequence", "inventory", "driver", "devices", "migFailures"];

/// A report that is nearly right: any of its fields may be replaced by something else.
fn near_report() -> impl Strategy<Value = Value> {
    let inventory = prop::collection::vec(device(), 0..4);
    let uses = prop::collection::vec(device_use(), 0..4);
    let damage = prop::option::of((prop::sample::select(&FIELDS[..]), any_json()));
    (
        "gpupack.dev/v1alpha1|gpupack.dev/v1alpha2",
        prop::option::of(any::<u64>()),
        any::<u64>(),
        inventory,
        uses,
        prop::collection::vec(failure(), 0..2),
        damage,
    )
        .prop_map(|(version, session, sequence, inventory, uses, failures, damage)| {
            let mut report = json!({"apiVersion": version, "agent": "a", "session": session,
                "sequence": sequence, "inventory": inventory, "devices": uses,
                "migFailures": failures});
            if let Some((field, value)) = damage {
                report[field] = value;
            }
            report
        })
}

/// What holds for every report that was believed.
fn believe(body: &[u8]) -> Result<(), TestCaseError> {
    let Ok(checked) = CheckedReport::from_json(body) else { return Ok(()) };
    let report = checked.facts;
    prop_assert!(report.agent.len() <= 64);
    prop_assert!(report.session.is_some() || report.inventory.is_some());
    prop_assert!(report.uses.len() <= MAX_DEVICES_PER_NODE);
    let mut ids: Vec<_> = report.uses.iter().map(|device| &device.id).collect();
    ids.sort();
    ids.dedup();
    prop_assert_eq!(ids.len(), report.uses.len());
    for device in &report.uses {
        prop_assert!(device.used.is_none_or(|used| used <= MAX_DEVICE_MEMORY));
        prop_assert!(device.busy_percent.is_none_or(|percent| percent <= 100));
        let processes = device.processes.as_deref().unwrap_or_default();
        prop_assert!(processes.len() <= MAX_PROCESSES_PER_DEVICE);
        for process in processes {
            prop_assert!(process.memory.is_none_or(|memory| memory <= MAX_DEVICE_MEMORY));
        }
    }
    prop_assert!(checked.details.conditions.keys().all(|id| ids.contains(&id)));
    let (_, devices) = checked.details.inventory.unwrap_or_default();
    let inventory = report.inventory.unwrap_or_default();
    let is_there = |id: &DeviceId| inventory.devices().iter().any(|device| device.id == *id);
    for (id, details) in &devices {
        prop_assert!(is_there(id));
        prop_assert!(details.neighbors.iter().all(|(other, _)| other != id && is_there(other)));
        prop_assert!(details.numa_node.is_none_or(|node| node < 1_024));
        prop_assert!(details.slot.is_none_or(|slot| slot.size > 0 && slot.start < 64));
        for it in &details.mig_profiles {
            prop_assert!(it.memory <= MAX_DEVICE_MEMORY && it.size > 0 && !it.starts.is_empty());
            prop_assert!(it.starts.iter().all(|start| start + it.size <= 32));
        }
    }
    for failure in &checked.details.mig_failures {
        prop_assert!(failure.start < 32 && (1..=512).contains(&failure.error.len()));
    }
    Ok(())
}

proptest! {
    #[test]
    fn any_json_is_read_or_rejected(value in any_json()) {
        believe(value.to_string().as_bytes())?;
    }

    #[test]
    fn any_similar_report_is_read_or_rejected(value in near_report(), cut in 0..2_000_usize) {
        let text = value.to_string();
        believe(text.as_bytes())?;
        let cut = text.as_bytes().get(..cut).unwrap_or_default();
        prop_assert!(cut.len() == text.len() || CheckedReport::from_json(cut).is_err());
    }

    #[test]
    fn any_bytes_are_read_or_rejected(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        believe(&bytes)?;
    }
}

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
fn malformed_bodies_are_rejected_with_the_position() {
    check("", "cannot be read");
    check("\u{1}", "cannot be read");
    check(&"[".repeat(100_000), "cannot be read");
    check(&(hello(GPU, "") + "x"), "trailing");
    check(&hello(GPU, r#"{"id":"GPU-a","usedMib":-1,"healthy":true}"#), "devices[0].usedMib");
    check(&hello(&GPU.replace("15360", "1e99"), ""), "inventory[0].memoryMib");
    assert!(
        CheckedReport::from_json(b"{\"apiVersion\":\"gpupack.dev/v1alpha1\",\"agent\":\"\xff\"}")
            .is_err()
    );
}

#[test]
fn absurd_reports_are_rejected_with_the_offending_value() {
    let used = |rest: &str| hello(GPU, &format!(r#"{{"id":"GPU-a","healthy":true{rest}}}"#));
    let once = r#"{"id":"GPU-a","healthy":true}"#;
    let crowd = vec![r#"{"pid":1}"#; 4097].join(",");
    let long = "x".repeat(65);
    for (body, part) in [
        (used(r#","usedMib":16777217"#), "`16777217 MiB`"),
        (used(r#","busyPercent":101"#), "`101` percent"),
        (used(&format!(r#","processes":[{crowd}]"#)), "`4097` processes"),
        (used(r#","processes":[{"pid":1,"memoryMib":99999999999}]"#), "`99999999999 MiB`"),
        (used(r#","processes":[{"pid":1,"podUid":""}]"#), "`podUid` has 0 bytes"),
        (hello(GPU, &format!("{once},{once}")), "`GPU-a` is reported twice"),
        (hello(GPU, &vec![once; 257].join(",")), "`257` devices"),
        (hello(&vec![GPU; 257].join(","), ""), "`257` devices"),
        (hello(&format!("{GPU},{GPU}"), ""), "`GPU-a` is reported twice"),
        (hello(&GPU.replace("450", "15361"), ""), "reserve of `15361 MiB`"),
        (hello(&GPU.replace("GPU-a", "GPU,a"), ""), "`GPU,a`"),
        (hello(&GPU.replace("Tesla T4", "T\\n4"), ""), "`model` has 3 bytes"),
        (hello(&GPU.replace("450", r#"450,"kind":"MigInstance""#), ""), "MigInstance"),
        (hello(GPU, "").replace(r#""a","seq"#, &format!(r#""{long}","seq"#)), "`agent` has 65"),
        (hello(GPU, "").replace(&format!(r#""inventory":[{GPU}],"#), ""), "says hello"),
    ] {
        check(&body, part);
    }
}
