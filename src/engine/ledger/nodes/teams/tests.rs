use super::*;
use crate::hardware::inventory::NodeInventory;
use crate::ledger::change::commits::ReserveError;
use crate::ledger::change::facts::PodFact;
use crate::ledger::change::reports::NodeReport;
use crate::ledger::ledger_fixture::{
    bound, hello, inventory, ledger, seconds, see_node, share_request, uid,
};
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::query::team_limit::PodInNamespace;
use crate::ledger::suggest::standing::Holder;
use crate::model::rejection::Rejection;
use crate::model::request::Amount;
use crate::model::reservation::{PodRef, Tenure};
use wire::device::{Device, DeviceDetails, MakeableProfile, Slot};
use wire::ids::{DeviceId, MigProfile, ModelName};
use wire::units::{MemMib, Timestamp};

fn pod(namespace: &str, name: &str) -> PodRef {
    PodRef { uid: uid(name), name: format!("{namespace}/{name}").into() }
}

/// Two GPUs on node `n`; `a` has 0.5 of a GPU guaranteed and at most 1, others nothing guaranteed.
fn cluster(label: &str) -> Ledger {
    let ledger = ledger("A B");
    let share = |guaranteed, at_most: Option<u64>| TeamShare {
        guaranteed: Share::from_millionths(guaranteed),
        at_most: at_most.map(Share::from_millionths),
    };
    let teams = BTreeMap::from([("a".to_owned(), share(500_000, Some(1_000_000)))]);
    let rules = TeamRules { label: label.to_owned(), teams, others: share(0, None) };
    ledger.teams.rule(rules, Prices::default());
    ledger
}

/// A node with a GPU `C` of so much memory.
fn add_node(ledger: &Ledger, name: &str, mib: u64) {
    see_node(ledger, name);
    let devices = inventory("C").devices().to_vec().into_iter();
    let devices = devices.map(|device| Device { total: MemMib::new(mib), ..device }).collect();
    let inventory = Some(NodeInventory::new(devices).unwrap());
    let report = NodeReport { inventory, ..hello("y", 1, "C") };
    ledger.report(name, &report, Timestamp::START).unwrap();
}

/// A request of so much memory.
fn memory_request(mib: u64) -> PlacementRequest {
    let amount = Amount::Memory(MemMib::new(mib));
    PlacementRequest { gpu: Some(GpuRequest::one(amount)), ..share_request(1) }
}

fn see(
    ledger: &Ledger,
    namespace: &str,
    name: &str,
    millionths: u64,
    priority: i32,
    started_unix_seconds: i64,
) {
    let tenure = Tenure { priority, started_unix_seconds, ..Tenure::default() };
    let device = if millionths > 500_000 { "A" } else { "B" };
    let fact =
        PodFact { pod: pod(namespace, name), tenure, ..bound(name, "n", device, millionths) };
    ledger.see_pod(&fact, Timestamp::START);
}

fn used(ledger: &Ledger, team: &str) -> (u64, u64, usize) {
    let all = ledger.teams.all(std::iter::empty());
    let found = all.iter().find(|team_use| &*team_use.name == team).unwrap();
    (found.used.millionths(), found.over_quota.millionths(), found.pods)
}

#[test]
fn a_team_gets_no_more_than_its_limit() {
    let ledger = cluster("");
    let half = share_request(500_000);
    let reserve = |name: &str| ledger.reserve(&pod("a", name), "n", &half, Timestamp::START);
    reserve("p").unwrap();
    reserve("p").unwrap();
    reserve("q").unwrap();
    let gpu = half.gpu.as_ref().unwrap();
    assert!(
        !ledger.teams.may_have(&uid("r"), "a", gpu) && ledger.teams.may_have(&uid("p"), "a", gpu)
    );
    assert_eq!(reserve("r"), Err(ReserveError::Rejection(Rejection::TeamLimit)));
    assert_eq!(used(&ledger, "a"), (1_000_000, 500_000, 2));
    ledger.forget(&uid("p"));
    reserve("r").unwrap();
    ledger.reserve(&pod("b", "s"), "n", &half, Timestamp::START).unwrap();
    assert_eq!(ledger.teams.left("a"), Some(0));
    assert_eq!(ledger.teams.left("b"), None);
}

#[test]
fn what_does_not_fit_on_the_node_is_not_counted() {
    let ledger = cluster("");
    see(&ledger, "b", "x", 1_000_000, 0, 1);
    see(&ledger, "b", "y", 500_000, 0, 2);
    let most = share_request(600_000);
    let refused = ledger.reserve(&pod("a", "p"), "n", &most, Timestamp::START);
    assert!(
        matches!(refused, Err(ReserveError::Rejection(Rejection::Memory { .. }))),
        "{refused:?}"
    );
    assert_eq!(ledger.teams.left("a"), Some(1_000_000));
}

#[test]
fn a_pod_counts_until_its_devices_are_free() {
    let ledger = cluster("");
    see(&ledger, "a", "p", 500_000, 0, 1);
    assert_eq!(ledger.teams.left("a"), Some(500_000));
    ledger.end_pod(&uid("p"), Timestamp::START);
    assert_eq!(ledger.teams.left("a"), Some(500_000), "they drain");
    ledger.tick(seconds(31));
    assert_eq!(ledger.teams.left("a"), Some(1_000_000));
    assert_eq!(ledger.teams.count(), 0);
}

#[test]
fn the_least_important_and_youngest_are_over_quota() {
    let ledger = cluster("");
    see(&ledger, "a", "old", 250_000, 0, 1);
    see(&ledger, "a", "young", 250_000, 0, 9);
    assert!(ledger.teams.over_quota().pods.is_empty());
    see(&ledger, "a", "important", 1_000_000, 7, 9);
    assert_eq!(
        ledger.teams.over_quota().pods,
        BTreeSet::from([uid("important")]),
        "it does not fit"
    );
    ledger.end_pod(&uid("important"), Timestamp::START);
    ledger.tick(seconds(31));
    see(&ledger, "a", "middle", 250_000, 0, 5);
    see(&ledger, "b", "other", 250_000, 1_000, 1);
    let over = ledger.teams.over_quota();
    assert_eq!(over.pods, BTreeSet::from([uid("other"), uid("young")]));
    assert_eq!(used(&ledger, "a"), (750_000, 250_000, 3));
    let gpu = |millionths| share_request(millionths).gpu.unwrap();
    assert!(!ledger.teams.is_guaranteed(&uid("new"), "a", &gpu(100_000)));
    assert!(!ledger.teams.is_guaranteed(&uid("new"), "b", &gpu(100_000)));
    ledger.end_pod(&uid("young"), Timestamp::START);
    ledger.end_pod(&uid("old"), Timestamp::START);
    ledger.tick(seconds(62));
    assert!(ledger.teams.is_guaranteed(&uid("new"), "a", &gpu(250_000)));
}

#[test]
fn kept_room_counts_until_it_ends() {
    let ledger = cluster("");
    let gpu = share_request(1_000_000).gpu.unwrap();
    let (p, q) = (uid("p"), uid("q"));
    assert!(ledger.teams.admit_kept(&p, "a", Share::WHOLE));
    assert!(
        !ledger.teams.admit_kept(&q, "a", Share::WHOLE) && ledger.teams.may_have(&p, "a", &gpu)
    );
    ledger.teams.let_go(&p);
    assert!(ledger.teams.admit_kept(&q, "a", Share::WHOLE));
    ledger.reserve(&pod("a", "q"), "n", &share_request(1_000_000), Timestamp::START).unwrap();
    ledger.teams.let_go(&q);
    assert_eq!(ledger.teams.left("a"), Some(0), "it is placed now");
}

#[test]
fn a_label_makes_one_team_of_several_namespaces() {
    let ledger = cluster("example.com/team");
    ledger.teams.see_namespace("x", Some("a"));
    ledger.teams.see_namespace("y", Some("a"));
    see(&ledger, "x", "p", 500_000, 0, 1);
    see(&ledger, "y", "q", 250_000, 0, 2);
    assert_eq!(ledger.teams.left("y"), Some(250_000));
    assert_eq!(ledger.teams.over_quota().pods, BTreeSet::from([uid("q")]));
    ledger.teams.see_namespace("a", None);
    see(&ledger, "a", "r", 250_000, 0, 3);
    assert_eq!(used(&ledger, "namespace/a"), (250_000, 250_000, 1), "a team of its own");
    let gpu = share_request(100_000).gpu.unwrap();
    assert!(!ledger.teams.may_have(&uid("new"), "unseen", &gpu), "its team is not known");
    see(&ledger, "unseen", "s", 100_000, 0, 4);
    assert!(!ledger.teams.over_quota().pods.contains(&uid("s")), "nor may it be evicted");
    ledger.teams.see_namespace("unseen", None);
    assert!(ledger.teams.may_have(&uid("new"), "unseen", &gpu));
    assert!(ledger.teams.over_quota().pods.contains(&uid("s")));
    ledger.teams.see_namespace("y", None);
    assert_eq!(ledger.teams.left("x"), Some(500_000));
}

#[test]
fn without_rules_nothing_is_counted() {
    let ledger = ledger("A B");
    see(&ledger, "a", "p", 500_000, 0, 1);
    let gpu = share_request(1_000_000).gpu.unwrap();
    assert!(ledger.teams.may_have(&uid("q"), "a", &gpu));
    assert!(!ledger.teams.is_guaranteed(&uid("q"), "a", &gpu));
    assert_eq!((ledger.teams.count(), ledger.teams.all(["x".into()].into_iter()).len()), (0, 0));
    assert_eq!(ledger.teams.over_quota(), OverQuota::default());
}

#[test]
fn pods_that_leave_are_the_last_that_fill_the_guarantee() {
    let ledger = cluster("");
    see(&ledger, "a", "old", 250_000, 9, 1);
    see(&ledger, "a", "young", 250_000, 0, 5);
    see(&ledger, "a", "new", 250_000, 0, 9);
    assert_eq!(ledger.teams.over_quota().pods, BTreeSet::from([uid("new")]));
    ledger.end_pod(&uid("old"), Timestamp::START);
    assert_eq!(ledger.teams.over_quota().pods, BTreeSet::from([uid("old")]), "its devices drain");
    assert_eq!(used(&ledger, "a"), (750_000, 250_000, 3));
}

#[test]
fn a_pod_counts_at_least_the_part_of_the_gpu_that_it_gets() {
    let ledger = cluster("");
    let query = memory_request(600);
    let gpu = query.gpu.clone().unwrap();
    assert!(ledger.teams.charge(&gpu) < Share::from_millionths(10_000), "of 80 GiB");
    let reserve = |name: &str| ledger.reserve(&pod("a", name), "n", &query, Timestamp::START);
    reserve("p").unwrap();
    assert_eq!(ledger.teams.left("a"), Some(400_000), "600 of 1,000 MiB");
    assert_eq!(reserve("q"), Err(ReserveError::Rejection(Rejection::TeamLimit)));
    assert_eq!(ledger.node("n").unwrap().reservations().len(), 1);
    ledger.forget(&uid("p"));
    reserve("q").unwrap();
    ledger.audit().unwrap();
}

#[test]
fn a_share_counts_the_same_on_a_gpu_of_any_size() {
    let ledger = cluster("");
    add_node(&ledger, "odd", 997);
    let third = share_request(333_333);
    for name in ["p", "q", "r"] {
        ledger.reserve(&pod("a", name), "odd", &third, Timestamp::START).unwrap();
    }
    assert_eq!(used(&ledger, "a").0, 999_999, "333 of 997 MiB each");
}

#[test]
fn where_a_pod_counts_more_than_its_team_may_have_it_is_refused_before_the_bind() {
    let ledger = cluster("");
    let query = memory_request(600);
    let gpu = query.gpu.clone().unwrap();
    let answer = |name: &str, namespace: &str| {
        let mut answers = ledger.answers(&query, &["n", "unknown"]);
        ledger.limit_to_team(
            PodInNamespace { uid: &uid(name), namespace },
            &query,
            &["n", "unknown"],
            &mut answers,
        );
        (answers[0].is_ok(), answers[0].as_ref().err().copied())
    };
    assert_eq!(answer("p", "a"), (true, None));
    ledger.hold(&uid("p"), "n", &query, Timestamp::START);
    assert_eq!(answer("p", "a"), (true, None), "its own room");
    ledger.reserve(&pod("a", "p"), "n", &query, Timestamp::START).unwrap();
    assert!(ledger.teams.may_have(&uid("q"), "a", &gpu), "of a GPU of 80 GiB");
    assert_eq!(answer("q", "a"), (false, Some(Rejection::TeamLimitHere)));
    assert_eq!(answer("q", "b"), (true, None), "no limit");
    ledger.forget(&uid("p"));
    assert_eq!(answer("q", "a"), (true, None));
}

#[test]
fn room_is_kept_where_the_team_may_have_what_the_pod_would_count() {
    let ledger = cluster("");
    add_node(&ledger, "large", 4_000);
    let fact = bound("other", "large", "C", 900_000);
    ledger.see_pod(&PodFact { pod: pod("b", "other"), ..fact }, Timestamp::START);
    see(&ledger, "a", "there", 500_000, 0, 1);
    let query = memory_request(800);
    let stand = |namespace| {
        let standing =
            ledger.stand(Holder::first(&uid("p"), namespace, &query), None, |_| true).0.unwrap();
        let node = standing.node.to_string();
        ledger.stand_down(&uid("p"));
        node
    };
    assert_eq!(stand("b"), "n", "it is free there");
    assert_eq!(stand("a"), "large", "it would count 0.8 of a GPU there");
    assert!(ledger.is_limited_on(PodInNamespace { uid: &uid("p"), namespace: "a" }, &query, "n"));
    assert!(!ledger.is_limited_on(PodInNamespace { uid: &uid("p"), namespace: "b" }, &query, "n"));
}

#[test]
fn an_audit_finds_what_counts_and_is_not_there() {
    let ledger = cluster("");
    see(&ledger, "a", "p", 250_000, 0, 1);
    ledger.audit().unwrap();
    ledger.teams.forget(&uid("p"));
    assert!(ledger.teams.admit_kept(&uid("leaked"), "a", Share::from_millionths(100_000)));
    let faults = ledger.audit().unwrap_err();
    let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
    assert_eq!(faults.len(), 2, "{faults:?}");
    assert!(faults[0].contains("`leaked`") && faults[1].contains("`p`"), "{faults:?}");
}

#[test]
fn a_device_that_is_not_reported_counts_as_the_request_alone() {
    let ledger = cluster("");
    see_node(&ledger, "m");
    let gpu =
        GpuRequest { amount: Amount::Memory(MemMib::new(600)), ..share_request(1).gpu.unwrap() };
    let fact = PodFact {
        pod: pod("a", "p"),
        request: Some(Arc::new(gpu.clone())),
        ..bound("p", "m", "GPU-x", 1_000_000)
    };
    ledger.see_pod(&fact, Timestamp::START);
    let charge = ledger.teams.charge(&gpu).millionths();
    assert_eq!(ledger.teams.left("a"), Some(1_000_000 - charge));
    let hello = hello("y", 1, "GPU-x");
    ledger.report("m", &hello, Timestamp::START).unwrap();
    assert_eq!(ledger.teams.left("a"), Some(0), "it has all of the GPU");
    ledger.audit().unwrap();
}

/// By its name `1g.10gb` is one of seven slices, as on the models with a table. This GPU has four.
#[test]
fn an_instance_counts_what_its_driver_lists() {
    let ledger = cluster("");
    see_node(&ledger, "m");
    let row = |name: &str, mib, size, starts: &[u32]| MakeableProfile {
        profile: MigProfile::new(name),
        memory: MemMib::new(mib),
        sm_count: Some(8 * size),
        size,
        starts: starts.to_vec(),
    };
    let [gpu, instance] = ["GPU-x", "MIG-x"].map(|id| DeviceId::new(id).unwrap());
    let profile = MigProfile::new("1g.10gb");
    let mut parent = inventory("GPU-x").devices()[0].clone();
    (parent.model, parent.total) = (ModelName::new("NVIDIA X999"), MemMib::new(40_000));
    parent.kind = DeviceKind::MigParent;
    let kind = DeviceKind::MigInstance { parent: gpu.clone(), profile };
    let own = Device { id: instance.clone(), kind, total: MemMib::new(9_500), ..parent.clone() };
    let list = vec![row("1g.10gb", 9_500, 1, &[0, 1, 2, 3]), row("4g.40gb", 39_000, 4, &[0])];
    let slot = Some(Slot { start: 0, size: 1 });
    let details = BTreeMap::from([
        (gpu, DeviceDetails { mig_profiles: list, ..DeviceDetails::default() }),
        (instance, DeviceDetails { slot, ..DeviceDetails::default() }),
    ]);
    let inventory = Some(NodeInventory::placed(vec![parent, own], &details).unwrap());
    let report = NodeReport { inventory, uses: Vec::new(), ..hello("y", 1, "GPU-x") };
    ledger.report("m", &report, Timestamp::START).unwrap();
    let request = GpuRequest::one(Amount::MigInstance(MigProfile::new("1g.10gb")));
    assert_eq!(ledger.teams.charge(&request).millionths(), 142_858);
    let fact = PodFact {
        pod: pod("a", "p"),
        request: Some(request.into()),
        ..bound("p", "m", "MIG-x", 1_000_000)
    };
    ledger.see_pod(&fact, Timestamp::START);
    assert_eq!(ledger.teams.left("a"), Some(750_000));
    // A tenth of an instance that pods share.
    let tenth = PodFact { pod: pod("b", "q"), ..bound("q", "m", "MIG-x", 100_000) };
    ledger.see_pod(&tenth, Timestamp::START);
    assert_eq!(used(&ledger, "b").0, 100_000, "as requested, and not all of the instance");
    ledger.audit().unwrap();
}
