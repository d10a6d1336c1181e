//! The memory guard: how soon ledger, state and metrics show memory use beyond what is allocated.

use std::time::Duration;

use runtime::clock::Clock;
use serde_json::{Value, json};

use super::loops::Loops;
use crate::harness::agent::bed::{Bed, POD, a100, with};
use crate::harness::agent::extender::Extender;
use crate::harness::turns::turn;

/// Another pod.
const NEIGHBOUR: &str = "1d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f01";

/// How long it may take from the allocation until everybody knows.
const LIMIT: Duration = Duration::from_secs(2);

/// The time between samples of an agent without flags.
const PERIOD: Duration = Duration::from_secs(1);

/// One GPU with these processes: pid and MiB.
fn scenario(processes: &[(u32, u64)]) -> Value {
    let used: u64 = processes.iter().map(|(_, mib)| mib).sum();
    let list = processes
        .iter()
        .map(|(pid, mib)| json!({"pid": pid, "used_mib": mib, "lists": ["compute"]}));
    let gpu = with(a100("GPU-a"), "used_mib", json!(used));
    json!({"gpus": [with(gpu, "processes", list.collect())]})
}

/// An extender and an agent with two pods of 20,000 MiB each, which use 1,000.
fn stage() -> (Bed, Extender, Loops) {
    let bed = Bed::new(&scenario(&[(10, 1_000), (11, 1_000)]));
    bed.process(10, &format!("0::/kubepods/burstable/pod{POD}/x\n"));
    bed.process(11, &format!("0::/kubepods/burstable/pod{NEIGHBOUR}/x\n"));
    bed.process(12, "0::/user.slice\n");
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 20_000);
    extender.allocate(NEIGHBOUR, "GPU-a", 20_000);
    let loops = Loops::start(&bed, &extender, PERIOD);
    let uses = |node: &Value| node["devices"][0]["tenants"][1]["usedMib"].as_u64();
    extender.until("the first list", |node| (uses(node) == Some(1_000)).then_some(()));
    assert_eq!(extender.metric("gpupack_over_limit_pods"), 0);
    (bed, extender, loops)
}

/// Lets these processes run; the time until `seen`, in the state and in the metrics.
fn timed(
    (bed, extender): (&Bed, &Extender),
    processes: &[(u32, u64)],
    seen: impl Fn(&Value, &Extender) -> bool,
) -> Duration {
    let clock = Clock::start();
    bed.play(&scenario(processes));
    extender.until("it is seen", |node| seen(node, extender).then_some(()));
    clock.precise()
}

#[test]
fn an_over_limit_pod_is_in_ledger_state_and_metrics_within_two_seconds() {
    let _turn = turn();
    let (bed, extender, _loops) = stage();
    // Within the allocation of all: the idle share of the neighbor would hide it.
    let hidden = timed((&bed, &extender), &[(10, 25_000), (11, 1_000)], |node, extender| {
        let device = &node["devices"][0];
        let over = &device["overLimitPods"][0];
        over["podUid"] == POD
            && over["usedMib"] == 25_000
            && over["allowedMib"] == 20_000
            && device["usedBeyondAllocatedMib"] == 5_000
            && extender.metric("gpupack_over_limit_pods") == 1
            && extender.metric("gpupack_memory_beyond_allocated_bytes{kind=\"over_limit\"}")
                == 5_000 << 20
    });
    // More than all that is allocated.
    let open = timed((&bed, &extender), &[(10, 70_000), (11, 1_000)], |node, extender| {
        node["devices"][0]["usedBeyondAllocatedMib"] == 50_000
            && extender.metric("gpupack_memory_beyond_allocated_bytes{kind=\"over_limit\"}")
                == 50_000 << 20
    });
    println_figure("over-limit pod within the allocation of all", hidden);
    println_figure("over-limit pod beyond the allocation of all", open);
    assert!(hidden < LIMIT && open < LIMIT, "{hidden:?}, {open:?}");
    let untracked = extender.metric("gpupack_memory_beyond_allocated_bytes{kind=\"untracked\"}");
    assert_eq!(untracked, 0, "it does not count as untracked");
    let explained = extender.explained("team", POD);
    assert!(explained.contains("70000 MiB of GPU-a and may use 20000 MiB"), "{explained}");
    // Back within its share: forgotten with the next list.
    bed.play(&scenario(&[(10, 20_000), (11, 1_000)]));
    extender.until("it is within its share", |node| {
        (node["devices"][0]["overLimitPods"].is_null()
            && extender.metric("gpupack_over_limit_pods") == 0)
            .then_some(())
    });
}

#[test]
fn untracked_memory_is_in_ledger_state_and_metrics_within_two_seconds() {
    let _turn = turn();
    let (bed, extender, _loops) = stage();
    let processes = [(10, 1_000), (11, 1_000), (12, 30_000)];
    let took = timed((&bed, &extender), &processes, |node, extender| {
        let device = &node["devices"][0];
        device["untrackedMib"] == 30_000
            && device["usedBeyondAllocatedMib"] == 30_000
            && device["overLimitPods"].is_null()
            && extender.metric("gpupack_memory_beyond_allocated_bytes{kind=\"untracked\"}")
                == 30_000 << 20
    });
    println_figure("untracked memory", took);
    assert!(took < LIMIT, "{took:?}");
    let free = extender.node()["devices"][0]["free"]["memoryMib"].as_u64().unwrap();
    assert_eq!(free, 81_920 - 634 - 40_000 - 30_000, "beside what is allocated and what is used");
}

/// Prints a figure, also where the test harness hides the output of passing tests.
pub(crate) fn println_figure(what: &str, took: Duration) {
    use std::io::Write;
    let millis = took.as_millis();
    let _shown =
        writeln!(std::io::stdout().lock(), "figure: guard: {what}: seen after {millis} ms");
}
