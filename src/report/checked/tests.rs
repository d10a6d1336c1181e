use super::*;
use crate::hardware::device::{Health, PodUid};

fn check(body: &str, part: &str) {
    let error = Report::from_json(body.as_bytes()).unwrap_err();
    assert!(error.to_string().contains(part), "{body}: {error}");
}

fn hello(inventory: &str, devices: &str) -> String {
    format!(
        r#"{{"schema_version":1,"agent":"a","sequence":1,"inventory":[{inventory}],
            "devices":[{devices}]}}"#
    )
}

const GPU: &str = r#"{"uuid":"GPU-a","index":0,"model":"Tesla T4","memory_mib":15360,
    "reserved_mib":450,"healthy":true}"#;

#[test]
fn a_hello_of_a_newer_agent_is_read_in_the_words_of_the_core() {
    let instance = r#"{"uuid":"MIG-a","index":1,"model":"M","memory_mib":9,"kind":"mig_instance",
        "parent":"GPU-a","profile":"1g.5gb","healthy":false,"novelty":[1,{}]}"#;
    let used = r#"{"uuid":"GPU-a","used_mib":99999,"busy_percent":100,"healthy":true,
        "processes":[{"pid":7,"pod_uid":"p"},{"pid":8,"memory_mib":0}]}"#;
    let body = hello(&format!("{GPU},{instance}"), used)
        .replace(r#""schema_version":1"#, r#""schema_version":2,"novelty":{"a":1}"#);
    let report = Report::from_json(body.as_bytes()).unwrap().books;
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
fn lists_not_looked_for_and_empty_lists_stay_apart() {
    let body = hello(GPU, r#"{"uuid":"GPU-a","healthy":true,"processes":[]}"#);
    let uses = Report::from_json(body.as_bytes()).unwrap().books.uses;
    assert_eq!(uses[0].processes, Some(Vec::new()));
    let body = hello(GPU, r#"{"uuid":"GPU-a","healthy":true}"#);
    assert_eq!(Report::from_json(body.as_bytes()).unwrap().books.uses[0].processes, None);
}

#[test]
fn other_generations_are_named_even_when_they_cannot_be_read() {
    check(r#"{"schema_version":7,"agent":{"id":1}}"#, "schema version `7`");
    check(&hello(GPU, "").replace("version\":1", "version\":3"), "schema version `3`");
    assert!(is_readable(0) && is_readable(2));
}
