//! `gpupack demo` as a user runs it.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::process::{Command, Output};

use serde_json::Value;

fn demo(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack"));
    command.arg("demo").args(line.split_whitespace()).output().unwrap()
}

/// The summary of a demo that ends well, without what the clock decides.
fn summary(line: &str) -> Value {
    let output = demo(line);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let mut summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    for verb in ["filter", "prioritize", "bind"] {
        let latency = summary.as_object_mut().unwrap().remove(verb).unwrap();
        assert!(latency["calls"].as_u64() > Some(0), "{latency}");
        assert!(latency["p50_us"].as_u64() <= latency["p99_us"].as_u64(), "{latency}");
        assert!(latency["p99_us"].as_u64() <= latency["max_us"].as_u64(), "{latency}");
    }
    for time in ["filled_after_ms", "ended_after_ms"] {
        summary.as_object_mut().unwrap().remove(time).unwrap();
    }
    summary
}

#[test]
fn once_places_everything_and_twice_the_same() {
    let line = "--once --nodes 4 --gpus-per-node 4 --pods 40 --seed 7 --output json";
    let first = summary(line);
    assert_eq!(first, summary(line), "the same seed gives the same placements");
    let (pods, packing) = (&first["pods"], &first["packing"]);
    let pods = |name: &str| pods[name].as_u64().unwrap();
    assert!(pods("placed") > 30, "{first}");
    assert_eq!(pods("arrived"), pods("placed") + pods("waiting") + pods("refused"));
    assert_eq!(pods("placed_without_http"), 0);
    assert_eq!(packing["devices"], 16);
    assert_eq!((&packing["overbooked"], &first["overbooked_max"]), (&0.into(), &0.into()));
    assert!(packing["allocation_millionths"].as_u64() >= Some(750_000), "{packing}");
    assert_eq!(first["faults"], serde_json::json!([]));
    let reasons = first["not_placed"].as_array().unwrap();
    let unplaced: u64 = reasons.iter().map(|entry| entry["pods"].as_u64().unwrap()).sum();
    assert_eq!(unplaced, pods("waiting") + pods("refused"));
    let other = summary(&line.replace("--seed 7", "--seed 8"));
    assert_ne!(first["packing"], other["packing"]);
}

#[test]
fn the_base_load_of_a_large_fleet_goes_straight_into_the_books() {
    let line = "--once --nodes 201 --gpus-per-node 1 --fill 0.2 --pods 5 --output json";
    let first = summary(line);
    let direct = first["pods"]["placed_without_http"].as_u64().unwrap();
    assert!(direct > 40, "{first}");
    assert!(first["packing"]["allocation_millionths"].as_u64() >= Some(200_000));
}

#[test]
fn slots_and_instances_are_placed_too() {
    let line = "--once --nodes 4 --gpus-per-node 2 --pods 60 --pools --seed 7 --output json";
    let first = summary(line);
    assert_eq!(first, summary(line), "the same seed gives the same placements");
    assert_eq!(first["packing"]["devices"], 3 * 2 + 2 * 4, "three nodes of GPUs, one of instances");
    assert_eq!(
        (&first["packing"]["overbooked"], &first["faults"]),
        (&0.into(), &serde_json::json!([]))
    );
    assert!(first["pods"]["placed"].as_u64() > Some(30), "{first}");
    let without = summary(&line.replace("--pools", ""));
    assert_eq!(without["packing"]["devices"], 8);
}

#[test]
fn the_summary_for_people_says_what_matters() {
    let output = demo("--once --nodes 2 --gpus-per-node 2 --fill 0 --pods 6");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["page    http://127.0.0.1:", "placed", "packing efficiency", "filter", "audited"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains('\x1b'), "no terminal, no control sequences");
}

#[test]
fn bad_flags_are_refused_with_code_2() {
    for bad in [
        "--nodes 0",
        "--nodes many",
        "--gpus-per-node 0",
        "--fill 1.01",
        "--fill half",
        "--arrival-rate -2",
        "--pods -1",
        "--seed x",
        "--listen 8080",
        "--output xml",
        "--frobnicate",
    ] {
        let output = demo(bad);
        assert_eq!(output.status.code(), Some(2), "{bad}");
        assert!(output.stdout.is_empty(), "{bad}");
        let errors = String::from_utf8(output.stderr).unwrap();
        let first = errors.lines().next().unwrap();
        assert!(first.starts_with("error: "), "{bad}: {errors}");
    }
}

#[test]
fn an_address_that_is_taken_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let output = demo(&format!("--once --listen {address}"));
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains(&format!("cannot listen on {address}")), "{errors}");
}
