use super::*;
use crate::hardware::pool::{MigUse, PoolRule, PoolRules};
use crate::ledger::change::facts::PodFact;
use crate::ledger::change::reports::NodeReport;
use crate::ledger::ledger_fixture::{
    bound, free, hello, ledger, pod, see_node, share_request, uid, uses,
};
use crate::model::request::{Amount, GpuRequest};
use crate::model::reservation::Tenure;
use crate::scoring::plan::on_demand::inventory;
use crate::scoring::victims::less_important;
use wire::ids::{MigProfile, PoolName};
use wire::units::{HostAmount, MemMib, MilliCpu, Timestamp};

/// A ledger with nodes `n` (GPUs A, B) and `m` (GPU C).
fn bed() -> Ledger {
    let ledger = ledger("A B");
    see_node(&ledger, "m");
    ledger.report("m", &hello("y", 1, "C"), Timestamp::START).unwrap();
    ledger
}

fn tenure(priority: i32) -> Tenure {
    Tenure { priority, ..Tenure::default() }
}

/// A pod of this priority on a GPU.
fn bind(ledger: &Ledger, name: &str, (node, device): (&str, &str), millionths: u64, priority: i32) {
    let fact = PodFact { tenure: tenure(priority), ..bound(name, node, device, millionths) };
    ledger.see_pod(&fact, Timestamp::START);
}

/// A pod without a GPU on `m`.
fn bind_plain(ledger: &Ledger, name: &str, priority: i32) {
    let fact = PodFact {
        wants_gpu: false,
        request: None,
        placement: None,
        host: HostAmount { cpu: MilliCpu::new(1_000), memory: MemMib::new(1) },
        tenure: tenure(priority),
        ..bound(name, "m", "C", 1)
    };
    ledger.see_pod(&fact, Timestamp::START);
}

/// Node and victims for pod `p` of priority 10 and these millionths of a GPU.
fn found(
    ledger: &Ledger,
    millionths: u64,
    nodes: &[&str],
    plan: &[(&str, &[&str])],
) -> Option<(String, Vec<String>)> {
    found_with(ledger, millionths, nodes, plan, &[]).map(|found| {
        let names = found.victims.iter().map(|victim| victim.name.to_string());
        (found.node.to_string(), names.collect())
    })
}

fn found_with(
    ledger: &Ledger,
    millionths: u64,
    nodes: &[&str],
    plan: &[(&str, &[&str])],
    leaving: &[&str],
) -> Option<FoundRoom> {
    let named = (!nodes.is_empty()).then(|| ledger.named_nodes(nodes.iter()));
    let uids = |pods: &&[&str]| pods.iter().map(|pod| uid(pod)).collect::<BTreeSet<_>>();
    let planned = plan.iter().map(|(node, pods)| (NodeName::new(*node), uids(pods))).collect();
    let request = RoomRequest {
        uid: &uid("p"),
        namespace: "team",
        query: &share_request(millionths),
        named: named.as_ref(),
        planned: &planned,
        victim: &less_important(10),
        leaving: &uids(&leaving),
        leaving_is_gone: true,
        is_passed: &|other| other.as_str() == "less",
    };
    ledger.find_room(&request)
}

fn on(node: &str, victims: &[&str]) -> Option<(String, Vec<String>)> {
    Some((node.to_owned(), victims.iter().map(|victim| (*victim).to_owned()).collect()))
}

#[test]
fn the_node_that_loses_least_makes_room_among_those_of_the_last_call() {
    let ledger = bed();
    bind(&ledger, "a", ("n", "A"), 900_000, 5);
    bind(&ledger, "b", ("n", "B"), 900_000, 6);
    bind(&ledger, "c", ("m", "C"), 500_000, 1);
    bind(&ledger, "d", ("m", "C"), 400_000, 7);
    assert_eq!(ledger.lowest_priority(), Some(1));
    assert_eq!(found(&ledger, 500_000, &["m", "n"], &[]), on("m", &["c"]), "the lowest priority");
    assert_eq!(found(&ledger, 500_000, &["n"], &[]), on("n", &["a"]), "as the call named it");
    assert_eq!(found(&ledger, 800_000, &["m", "n"], &[]), on("n", &["a"]), "5 is below 7");
    assert_eq!(found(&ledger, 500_000, &[], &[]), None, "no call has named a node");
    ledger.see_unschedulable(&NodeName::new("m"), true);
    assert_eq!(found(&ledger, 500_000, &["m", "n"], &[]), on("n", &["a"]));
}

#[test]
fn less_important_pods_end_for_an_instance_that_is_to_be_made() {
    let ledger = ledger("A");
    let rule = PoolRule { mig: MigUse::OnDemand, ..PoolRule::default() };
    ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
    see_node(&ledger, "m");
    let instances = inventory(&[("MIG-1", "1g.6gb", 0, 1, true), ("MIG-2", "1g.6gb", 3, 1, true)]);
    let seen = uses("GPU-a GPU-b MIG-1 MIG-2", &[]);
    let report = NodeReport { inventory: Some(instances), uses: seen, ..hello("y", 1, "") };
    ledger.report("m", &report, Timestamp::START).unwrap();
    let profile = |name: &str| GpuRequest::one(Amount::MigInstance(MigProfile::new(name)));
    let found = |name: &str| {
        let named = ledger.named_nodes(["m", "n"].iter());
        let request = RoomRequest {
            uid: &uid("p"),
            namespace: "team",
            query: &PlacementRequest { gpu: Some(profile(name)), ..share_request(1) },
            named: Some(&named),
            planned: &BTreeMap::new(),
            victim: &less_important(6),
            leaving: &BTreeSet::new(),
            leaving_is_gone: true,
            is_passed: &|_| false,
        };
        let found = ledger.find_room(&request)?;
        Some(found.victims.iter().map(|victim| victim.name.to_string()).collect::<Vec<_>>())
    };
    assert_eq!(found("4g.24gb"), Some(vec![]), "nothing is in the way");
    bind(&ledger, "a", ("m", "MIG-1"), 1_000_000, 5);
    bind(&ledger, "b", ("m", "MIG-2"), 1_000_000, 6);
    assert_eq!(found("4g.24gb"), Some(vec![]), "the second GPU is empty");
    let query = PlacementRequest { gpu: Some(profile("4g.24gb")), ..share_request(1) };
    ledger.reserve_for_bind(&pod("big"), "m", &query, Timestamp::START).unwrap();
    assert_eq!(found("4g.24gb"), None, "`b` is as important");
    assert_eq!(found("2g.12gb"), Some(vec!["a".to_owned()]));
}

#[test]
fn what_is_kept_stays_and_is_counted_once() {
    let ledger = bed();
    bind(&ledger, "a", ("n", "A"), 900_000, 0);
    bind(&ledger, "b", ("n", "B"), 1_000_000, 20);
    let first = found_with(&ledger, 500_000, &["n"], &[], &[]).unwrap();
    let (is_kept, _) = ledger.keep_found(&uid("first"), &first);
    assert!(is_kept);
    assert_eq!(free(&ledger), [0, 0]);
    let second = found_with(&ledger, 500_000, &["n"], &[], &["a"]).unwrap();
    assert!(second.victims.is_empty(), "half of the GPU is left when `a` has gone");
    assert_eq!(found_with(&ledger, 600_000, &["n"], &[], &["a"]), None);
    // A less important pod loses its standing hold to a more important one.
    ledger.stand_down(&uid("first"));
    let (is_kept, _) = ledger.keep_found(&uid("less"), &first);
    assert!(is_kept);
    let third = found_with(&ledger, 600_000, &["n"], &[], &["a"]).unwrap();
    assert_eq!(third.passed, [uid("less")]);
    ledger.keep_found(&uid("p"), &third);
    assert_eq!(ledger.standing_nodes().keys().cloned().collect::<Vec<_>>(), [uid("p")]);
    ledger.end_pod(&uid("p"), Timestamp::START);
    assert_eq!(ledger.keep_found(&uid("p"), &third), (false, vec![]), "it has ended");
    ledger.audit().unwrap();
}

#[test]
fn a_plan_of_kube_scheduler_counts_only_for_less_important_pods() {
    let ledger = bed();
    bind(&ledger, "a", ("m", "C"), 600_000, 1);
    bind(&ledger, "b", ("m", "C"), 400_000, 2);
    bind_plain(&ledger, "low", 1);
    bind_plain(&ledger, "high", 10);
    let plan = |pods: &[&str], millionths| found(&ledger, millionths, &[], &[("m", pods)]);
    assert_eq!(plan(&["low"], 500_000), on("m", &["a", "low"]), "both are needed");
    assert_eq!(plan(&["a"], 500_000), on("m", &["a"]), "one is enough");
    assert_eq!(plan(&["b"], 500_000), on("m", &["a", "b"]));
    assert_eq!(plan(&["high"], 500_000), None, "equally important");
    assert_eq!(plan(&["gone"], 500_000), on("m", &["a"]), "a pod that has gone");
    assert_eq!(found(&ledger, 500_000, &["m"], &[("m", &["low"])]), on("m", &["a"]));
}

#[test]
fn a_pod_of_a_plan_stays_if_its_cpu_is_not_needed() {
    let ledger = bed();
    let host = |cpu| HostAmount { cpu: MilliCpu::new(cpu), memory: MemMib::new(1_000) };
    ledger.see_node(&NodeName::new("m"), host(6_000), PoolName::new(""));
    let of = |name: &str, fact: PodFact, cpu, priority| {
        let fact = PodFact { host: host(cpu), tenure: tenure(priority), ..fact };
        ledger.see_pod(
            &PodFact { host: HostAmount { memory: MemMib::new(1), ..fact.host }, ..fact },
            Timestamp::START,
        );
        uid(name)
    };
    let plain = |name: &str| PodFact {
        wants_gpu: false,
        request: None,
        placement: None,
        ..bound(name, "m", "C", 1)
    };
    of("gpu", bound("gpu", "m", "C", 1_000_000), 4_000, 1);
    of("plain", plain("plain"), 2_000, 1);
    let named = PlannedVictims::from([(NodeName::new("m"), BTreeSet::from([uid("plain")]))]);
    let query = PlacementRequest {
        host: HostAmount { memory: MemMib::new(1), ..host(3_000) },
        ..share_request(500_000)
    };
    let request = RoomRequest {
        uid: &uid("p"),
        namespace: "team",
        query: &query,
        named: None,
        planned: &named,
        victim: &less_important(10),
        leaving: &BTreeSet::new(),
        leaving_is_gone: true,
        is_passed: &|_| false,
    };
    let found = ledger.find_room(&request).unwrap();
    let victims: Vec<&str> = found.victims.iter().map(|victim| &*victim.name).collect();
    assert_eq!(victims, ["gpu"], "its CPU is enough");
}

#[test]
fn of_equal_nodes_the_one_whose_pods_ran_for_the_shortest_time_loses_them() {
    for (ages, expected) in
        [([1, 2, 3], ("m", "c")), ([1, 3, 2], ("n", "b")), ([3, 2, 1], ("n", "a"))]
    {
        let ledger = bed();
        let places = [("a", "n", "A"), ("b", "n", "B"), ("c", "m", "C")];
        for ((name, node, device), started_unix_seconds) in places.into_iter().zip(ages) {
            let tenure = Tenure { started_unix_seconds, ..tenure(1) };
            let fact = PodFact { tenure, ..bound(name, node, device, 1_000_000) };
            ledger.see_pod(&fact, Timestamp::START);
        }
        let (node, victim) = expected;
        assert_eq!(found(&ledger, 500_000, &["m", "n"], &[]), on(node, &[victim]), "{ages:?}");
    }
}
