use std::time::Duration;

use engine::ledger::nodes::state::{Ledger, Settings};
use serde_json::json;
use server::reports::checked_report::CheckedReport;
use wire::ids::{NodeName, PoolName};
use wire::report::bodies::Report;
use wire::units::{HostAmount, MemMib, MilliCpu, Timestamp};

/// A report: what is read is written and read alike. The ledger takes it once, its sums stay right, and another
/// node's devices stay what they were.
pub(crate) fn report(body: &[u8]) {
    let Ok(report) = CheckedReport::from_json(body) else { return };
    let wire: Report = serde_json::from_slice(body).unwrap();
    assert_eq!(CheckedReport::from_json(&serde_json::to_vec(&wire).unwrap()).unwrap(), report);
    let ledger = Ledger::new(Settings {
        hold_for: Duration::from_secs(5),
        stale_after: Duration::from_secs(10),
        drain_limit: Duration::from_secs(30),
        warm_up: Duration::from_secs(10),
        unmanaged_tolerance: MemMib::new(100),
        first_session: 1,
    });
    let at = Timestamp::from_millis;
    let host = HostAmount { cpu: MilliCpu::new(16_000), memory: MemMib::new(65_536) };
    for node in ["node-a", "node-b"] {
        ledger.see_node(&NodeName::new(node), host, PoolName::new(""));
    }
    ledger.set_listed(at(1));
    let device = json!({"id": "GPU-b", "index": 0, "model": "T4", "memoryMib": 15_360, "kind": "Gpu", "healthy": true});
    let hello = json!({"apiVersion": "gpupack.dev/v1alpha1", "agent": "b", "sequence": 1,
        "inventory": [device], "devices": [{"id": "GPU-b", "healthy": true, "processes": []}]});
    let hello = CheckedReport::from_json(hello.to_string().as_bytes()).unwrap();
    let of_b = ledger.report("node-b", &hello.facts, at(2)).unwrap();
    let first = ledger.report("node-a", &report.facts, at(1_000));
    ledger.audit().unwrap();
    if let Ok(first) = first {
        // The same agent again, in its session.
        let mut next = report.facts.clone();
        next.session = Some(first.session);
        let repeated = ledger.report("node-a", &next, at(2_000));
        assert!(repeated.is_ok_and(|it| !it.is_taken), "each report counts once");
        next.sequence = next.sequence.saturating_add(1);
        let _any = ledger.report("node-a", &next, at(3_000));
        ledger.audit().unwrap();
    }
    let mut next = hello.facts.clone();
    (next.session, next.sequence) = (Some(of_b.session), 2);
    let next = ledger.report("node-b", &next, at(4_000)).unwrap();
    assert!(next.is_taken, "no node ends the session of another one");
    ledger.audit().unwrap();
}
