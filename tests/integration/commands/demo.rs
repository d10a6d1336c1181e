//! `gpupack demo` as a user runs it.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use wire::api::commands::DemoSummary;

fn demo(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack"));
    command.arg("demo").args(line.split_whitespace()).output().unwrap()
}

/// The summary of a demo that ends well, without what the clock decides.
fn summary(line: &str) -> Value {
    let output = demo(line);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let declared: DemoSummary = serde_json::from_slice(&output.stdout).unwrap();
    let mut summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(serde_json::to_value(declared).unwrap(), summary);
    let mut time = |name| summary.as_object_mut().unwrap().remove(name).unwrap().as_u64();
    assert!(time("filledAfterMs") <= time("endedAfterMs"));
    summary
}

#[test]
fn one_run_places_everything_and_a_second_run_does_the_same() {
    let line = "--once --nodes 4 --gpus-per-node 4 --pods 40 --seed 7 -o json";
    let first = summary(line);
    assert_eq!(first, summary(line), "the same seed gives the same placements");
    let (pods, packing) = (&first["pods"], &first["packing"]);
    let pods = |name: &str| pods[name].as_u64().unwrap();
    assert!(pods("placed") > 30, "{first}");
    assert_eq!(pods("arrived"), pods("placed") + pods("waiting") + pods("refused"));
    assert_eq!(pods("placedWithoutHttp"), 0);
    assert_eq!(packing["devices"], 16);
    assert_eq!((&packing["overallocated"], &first["overallocatedMax"]), (&0.into(), &0.into()));
    assert!(packing["allocationMillionths"].as_u64() >= Some(750_000), "{packing}");
    assert_eq!(first["faults"], serde_json::json!([]));
    let reasons = first["notPlaced"].as_array().unwrap();
    let unplaced: u64 = reasons.iter().map(|entry| entry["pods"].as_u64().unwrap()).sum();
    assert_eq!(unplaced, pods("waiting") + pods("refused"));
    let other = summary(&line.replace("--seed 7", "--seed 8"));
    assert_ne!(first["packing"], other["packing"]);
}

#[test]
fn the_base_load_of_a_large_fleet_goes_directly_into_the_ledger() {
    let line = "--once --nodes 201 --gpus-per-node 1 --fill 0.2 --pods 5 --output json";
    let first = summary(line);
    let direct = first["pods"]["placedWithoutHttp"].as_u64().unwrap();
    assert!(direct > 40, "{first}");
    assert!(first["packing"]["allocationMillionths"].as_u64() >= Some(200_000));
}

#[test]
fn slots_and_instances_are_placed_too() {
    let line = "--once --nodes 4 --gpus-per-node 2 --pods 60 --pools --seed 7 --output json";
    let first = summary(line);
    assert_eq!(first, summary(line), "the same seed gives the same placements");
    assert_eq!(first["packing"]["devices"], 3 * 2 + 2 * 4, "three nodes of GPUs, one of instances");
    assert_eq!(
        (&first["packing"]["overallocated"], &first["faults"]),
        (&0.into(), &serde_json::json!([]))
    );
    assert!(first["pods"]["placed"].as_u64() > Some(30), "{first}");
    let without = summary(&line.replace("--pools", ""));
    assert_eq!(without["packing"]["devices"], 8);
}

#[test]
fn the_text_summary_is_short_and_says_why_pods_wait() {
    let output = demo("--once --nodes 2 --gpus-per-node 2 --fill 1 --pods 20");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("page: http://127.0.0.1:"), "{text}");
    let (rows, reasons) = text.split_once("why pods wait or were rejected\n").unwrap();
    for part in [" placed, ", "packing efficiency  ", "all sums are correct, no GPU was"] {
        assert!(rows.contains(part), "{part} in {text}");
    }
    assert!((1..=6).contains(&reasons.lines().count()), "{text}");
    let most = reasons.lines().next().unwrap().trim().split_once("  ").unwrap();
    assert!(most.0.parse::<u64>().unwrap() > 0 && !most.1.is_empty(), "{text}");
    assert!(text.lines().count() < 20 && text.lines().all(|line| line.chars().count() <= 80));
    assert!(!text.contains('\x1b'), "no control sequences");
}

#[test]
fn a_demo_that_is_stopped_ends_with_its_summary() {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_gpupack"))
        .args(["demo", "--nodes", "2", "--gpus-per-node", "2", "--arrival-rate", "0"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(demo.stdout.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    assert!(lines.next().unwrap().ends_with("; Ctrl-C ends the demo)"));
    lines.find(|line| line.starts_with("base load placed")).unwrap();
    let id = demo.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    assert!(lines.any(|line| line.starts_with("audit ")), "a summary at the end");
    assert_eq!(demo.wait().unwrap().code(), Some(0));
}

/// The value of a family or series in the metrics of a running demo.
fn metric(base: &str, series: &str) -> Option<f64> {
    let address = base.strip_prefix("http://").unwrap().trim_end_matches('/');
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(series))?;
    line.trim().parse().ok()
}

#[test]
fn pods_that_borrow_are_moved_home_and_no_gpu_is_overallocated() {
    let line = "demo --bursts --nodes 4 --gpus-per-node 4 --seed 7 -o json";
    let mut demo = Command::new(env!("CARGO_BIN_EXE_gpupack"))
        .args(line.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(demo.stderr.take().unwrap()).lines().map_while(Result::ok);
    let page = said.next().unwrap();
    let base = page.split_whitespace().nth(1).unwrap().to_owned();
    said.find(|line| line.starts_with("base load placed")).unwrap();
    let recalls = r#"gpupack_moves_total{outcome="done",reason="recall"}"#;
    let is_seen = (0..900).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        let all = [recalls, "gpupack_bind_recall_seconds_count"];
        all.iter().all(|series| metric(&base, series) > Some(0.0))
    });
    let guests = metric(&base, "gpupack_guests ");
    let id = demo.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = demo.wait_with_output().unwrap();
    assert!(is_seen && guests.is_some(), "guests go home, and binds wait for them: {guests:?}");
    assert_eq!(output.status.code(), Some(0));
    let summary: DemoSummary = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((summary.overallocated_max, summary.faults), (0, Vec::new()));
    let borrowing = summary.borrowing.unwrap();
    assert!(borrowing.recalls > 0 && borrowing.failed == 0, "{borrowing:?}");
}

#[test]
fn bursts_need_time_and_a_fleet_that_is_filled_over_http() {
    let once = demo("--bursts --once");
    assert_eq!(once.status.code(), Some(2));
    let errors = String::from_utf8(once.stderr).unwrap();
    assert!(errors.contains("'--bursts' cannot be used with '--once'"), "{errors}");
    let large = demo("--bursts --nodes 201");
    assert_eq!(large.status.code(), Some(1));
    let errors = String::from_utf8(large.stderr).unwrap();
    assert_eq!(errors, "gpupack: `--bursts` is for at most 200 nodes, not 201\n");
}

#[test]
fn bad_flags_are_rejected_with_code_2() {
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
fn an_address_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let output = demo(&format!("--once --listen {address}"));
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains(&format!("cannot listen on {address}")), "{errors}");
}
