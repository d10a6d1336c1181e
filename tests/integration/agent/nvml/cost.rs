//! What the agent itself costs: CPU time and memory of the process, on 8 GPUs with 40 processes.
//!
//! An unoptimised build says little about time, so this is requested:
//!
//! ```sh
//! cargo build --release --example fake_nvml
//! GPUPACK_AGENT_COST_SECONDS=300 cargo test --release --test integration the_agent_uses_little_memory_and_cpu -- --nocapture
//! ```

use std::io::Write;
use std::time::Duration;

use serde_json::json;

use crate::harness::agent::bed::{Bed, POD};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::process::AgentProcess;

/// Thousandths of a core that the agent may take.
const MILLI_CPU_MAX: u64 = 5;

/// Resident memory that it may take.
const RESIDENT_MIB_MAX: u64 = 20;

/// Ticks in a second of the times in `/proc/<pid>/stat`.
const TICKS_PER_SECOND: u64 = 100;

/// What a process has used so far: ticks of CPU time.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum()
}

/// A line of `/proc/<pid>/status` in KiB.
fn kib(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn the_agent_uses_little_memory_and_cpu() {
    #[expect(clippy::disallowed_methods, reason = "a test has no flags for a number")]
    let queried = std::env::var("GPUPACK_AGENT_COST_SECONDS").ok();
    let Some(seconds) = queried.and_then(|text| text.parse::<u64>().ok()).filter(|it| *it > 0)
    else {
        // Not `eprintln`: what a test prints itself is shown only when it fails.
        let text = "skipped: the cost of the agent (GPUPACK_AGENT_COST_SECONDS is not set)\n";
        let _ = std::io::stderr().write_all(text.as_bytes());
        return;
    };
    let gpu = |number: u32| {
        let process = |each: u32| json!({"pid": number * 5 + each + 100, "used_mib": 2_000, "lists": ["compute"]});
        let links = vec![json!({"switch": 99}); 18];
        json!({"uuid": format!("GPU-{number}"), "name": "NVIDIA H200", "total_mib": 143_771,
               "reserved_mib": 619, "used_mib": 10_000, "busy_percent": 50, "minor": number,
               "bus": number, "numa_node": number / 4, "recovery_action": 0, "links": links,
               "processes": (0..5).map(process).collect::<Vec<_>>()})
    };
    let gpus: Vec<_> = (0..8).map(gpu).collect();
    let bed = Bed::new(&json!({"gpus": gpus}));
    let extender = Extender::start();
    for pid in 100..140 {
        bed.process(pid, &format!("0::/kubepods/burstable/pod{POD}/{pid}\n"));
    }
    extender.allocate(POD, "GPU-0", 10_000);
    let agent = AgentProcess::start(&bed, &extender);
    extender.until_fault(None);
    let before = ticks(agent.id());
    std::thread::sleep(Duration::from_secs(seconds));
    let used = ticks(agent.id()) - before;
    let micro_cpu = used * 1_000_000 / TICKS_PER_SECOND / seconds;
    let (resident, anonymous, peak) =
        (kib(agent.id(), "VmRSS:"), kib(agent.id(), "RssAnon:"), kib(agent.id(), "VmHWM:"));
    let text = format!(
        "cost of the agent over {seconds} s: {micro_cpu} millionths of a core, resident {resident} \
         KiB (of that anonymous {anonymous} KiB), peak {peak} KiB\n"
    );
    let _ = std::io::stderr().write_all(text.as_bytes());
    assert!(resident <= RESIDENT_MIB_MAX << 10 || cfg!(debug_assertions), "{text}");
    assert!(micro_cpu <= MILLI_CPU_MAX * 1_000 || cfg!(debug_assertions), "{text}");
}
