//! What is reported at once, and what waits for the next heartbeat.

use std::time::Duration;

use runtime::clock::Clock;
use serde_json::{Value, json};

use super::guard::println_figure;
use super::loops::Loops;
use crate::harness::agent::bed::{Bed, POD, a100, with};
use crate::harness::agent::extender::Extender;
use crate::harness::turns::turn;

/// The period of an agent without flags.
const PERIOD: Duration = Duration::from_secs(1);

/// A period in which a change is reported, and what a busy machine adds.
const SOON: Duration = Duration::from_millis(2_500);

/// One GPU with so much memory in use and these processes: pid and MiB.
fn scenario(used_mib: u64, processes: &[(u32, u64)]) -> Value {
    let process =
        |(pid, mib): &(u32, u64)| json!({"pid": pid, "used_mib": mib, "lists": ["compute"]});
    let gpu = with(a100("GPU-a"), "used_mib", json!(used_mib));
    json!({"gpus": [with(gpu, "processes", processes.iter().map(process).collect())]})
}

/// Reports that were accepted so far.
fn reports(extender: &Extender) -> u64 {
    extender.metric("gpupack_reports_total{result=\"accepted\"}")
}

/// The time until the node is as `done` says.
fn timed(extender: &Extender, what: &str, done: impl Fn(&Value) -> bool) -> Duration {
    let clock = Clock::start();
    extender.until(what, |node| done(node).then_some(()));
    clock.precise()
}

/// A node with one pod of 20,000 MiB, which uses 10,000 in one process.
fn stage() -> (Bed, Extender, Loops) {
    let bed = Bed::new(&scenario(10_000, &[(10, 10_000)]));
    bed.process(10, &format!("0::/kubepods/burstable/pod{POD}/x\n"));
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 20_000);
    let loops = Loops::start(&bed, &extender, PERIOD);
    extender.until("the process", |node| {
        (node["devices"][0]["tenants"][0]["usedMib"] == 10_000).then_some(())
    });
    (bed, extender, loops)
}

fn has_no_tenant(node: &Value) -> bool {
    node["devices"][0]["tenants"].as_array().is_some_and(Vec::is_empty)
}

#[test]
fn a_node_without_changes_reports_every_five_seconds_and_a_jump_within_a_second() {
    let (bed, extender, _loops) = stage();
    let (before, clock) = (reports(&extender), Clock::start());
    extender
        .until("eleven seconds", |_| (clock.precise() >= Duration::from_secs(11)).then_some(()));
    let idle = reports(&extender) - before;
    assert!((1..=4).contains(&idle), "{idle} reports in eleven seconds");
    let _turn = turn();
    // Less than was listed, and less than is allocated: no list is read, and it is reported.
    bed.play(&scenario(4_000, &[(10, 4_000)]));
    let took = timed(&extender, "less use", |node| node["devices"][0]["usedMib"] == 4_000);
    println_figure("memory that was freed, until the state shows it", took);
    assert!(took < SOON, "{took:?}");
    bed.play(&scenario(15_000, &[(10, 15_000)]));
    let took =
        timed(&extender, "more use", |node| node["devices"][0]["tenants"][0]["usedMib"] == 15_000);
    println_figure("memory that was taken, until the state shows whose it is", took);
    assert!(took < SOON, "{took:?}");
}

#[test]
fn the_end_of_a_process_is_seen_without_nvml_and_frees_the_device() {
    let (bed, extender, _loops) = stage();
    let _turn = turn();
    // The driver shows no change of use: only the process table shows that it has ended.
    bed.play(&scenario(10_000, &[]));
    std::fs::remove_dir_all(bed.proc_root().join("10")).unwrap();
    let took = timed(&extender, "the list", |node| {
        node["devices"][0]["tenants"][0]["usedMib"].as_u64().unwrap_or(0) == 0
    });
    println_figure("end of a process, until the state shows it", took);
    assert!(took < SOON, "{took:?}");
    // The API server says later that the pod has ended: the agent asks until it does.
    std::thread::sleep(Duration::from_millis(1_500));
    extender.end(POD, "GPU-a", 20_000);
    let took = timed(&extender, "a free device", has_no_tenant);
    println_figure("end of a pod whose process had ended, until the device is free", took);
    assert!(took < SOON, "{took:?}");
}

#[test]
fn a_pod_that_ends_without_ever_having_a_process_frees_its_device_as_soon() {
    let (_bed, extender, _loops) = stage();
    let idle = "1d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f01";
    extender.allocate(idle, "GPU-a", 1_000);
    let tenants = |node: &Value| node["devices"][0]["tenants"].as_array().map_or(0, Vec::len);
    // The agent hears of it with the next heartbeat at the latest.
    std::thread::sleep(Duration::from_secs(6));
    let _turn = turn();
    extender.end(idle, "GPU-a", 1_000);
    let took = timed(&extender, "a free share", |node| tenants(node) == 1);
    println_figure("end of a pod without a process, until its share is free", took);
    assert!(took < SOON, "{took:?}");
}

#[test]
fn an_extender_that_was_restarted_has_a_report_within_a_heartbeat() {
    let (_bed, extender, _loops) = stage();
    let _turn = turn();
    let extender = extender.restart();
    let took = timed(&extender, "a report", |node| node["state"] == "Reporting");
    println_figure("restart of the extender, until the node has reported", took);
    assert!(took < Duration::from_millis(6_500), "{took:?}");
}
