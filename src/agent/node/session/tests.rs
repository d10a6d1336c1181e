use super::*;
use wire::api::condition::{DeviceFault, MpsState};
use wire::api::kind::ReplyKind;
use wire::api::state::DeviceKind;
use wire::report::bodies::AllocationState;

fn sample(uuid: &str) -> Sample {
    let model = "M".to_owned();
    let device = DeviceReport::new(uuid.to_owned(), 0, model, DeviceKind::Gpu);
    Sample {
        inventory: vec![device].into(),
        uses: Vec::new(),
        driver: None,
        xids: BTreeMap::new(),
        unreadable: 0,
        has_unwatched_pods: false,
        draining: BTreeSet::new(),
        mig_failures: Vec::new(),
        memory_limits: None,
        containers: [].into(),
    }
}

fn reply(session: u64, outcome: Outcome) -> Reply {
    Reply {
        api_version: ApiVersion::default(),
        kind: ReplyKind::default(),
        session,
        outcome,
        allocations_version: Some(10 * session),
        allocations: Some(Vec::new()),
        mig_orders: None,
        memory_limits: None,
        clear_orders: None,
        close_library: None,
    }
}

/// Session, sequence, and whether the inventory is there.
fn said(session: &mut Session, sample: &Sample) -> (Option<u64>, u64, bool) {
    let report = session.report(sample);
    (report.session, report.sequence, report.inventory.is_some())
}

#[test]
fn the_inventory_is_sent_with_hello_and_after_a_change() {
    let mut session = Session::new("a", 0);
    let (one, two) = (sample("GPU-a"), sample("GPU-b"));
    let accepted = ExtenderAnswer::Reply(reply(7, Outcome::Accepted));
    assert_eq!(said(&mut session, &one), (None, 1, true));
    assert_eq!(session.settle(&accepted), Next::NextSample);
    assert_eq!(said(&mut session, &sample("GPU-a")), (Some(7), 2, false), "the same again");
    session.settle(&accepted);
    assert_eq!(said(&mut session, &two), (Some(7), 3, true), "changed");
    session.settle(&ExtenderAnswer::Away { error: String::new() });
    assert_eq!(said(&mut session, &two), (Some(7), 3, true), "it may not have arrived");
    session.settle(&ExtenderAnswer::Reply(reply(7, Outcome::Ignored)));
    assert_eq!(said(&mut session, &two), (Some(7), 4, true), "it was not taken in");
    session.settle(&accepted);
    assert_eq!(said(&mut session, &two), (Some(7), 5, false), "now it was");
}

#[test]
fn orders_count_in_the_answer_to_the_newest_report_of_the_session() {
    let mut session = Session::new("a", 0);
    let (given, repeated) = (reply(7, Outcome::Accepted), reply(7, Outcome::Ignored));
    said(&mut session, &sample("GPU-a"));
    assert!(session.obeys(&given) && !session.obeys(&repeated), "a hello has no session yet");
    session.settle(&ExtenderAnswer::Reply(given.clone()));
    assert!(session.obeys(&given) && !session.obeys(&repeated));
    assert!(
        !session.obeys(&reply(6, Outcome::Accepted))
            && !session.obeys(&reply(8, Outcome::Accepted))
    );
    session.settle(&ExtenderAnswer::SessionExpired);
    assert!(session.obeys(&reply(8, Outcome::Accepted)), "it begins again");
}

#[test]
fn a_node_that_may_get_orders_reports_each_sample_with_what_failed() {
    use wire::report::bodies::{MigFailure, MigProfileReport};
    let plain = sample("GPU-a");
    let needs = |sample: &Sample| {
        let mut session = Session::new("a", 0);
        session.report(sample);
        session.settle(&ExtenderAnswer::Reply(reply(7, Outcome::Accepted)));
        session.needs(sample, Duration::ZERO, Duration::from_secs(1))
    };
    assert!(!needs(&plain));
    let profile = MigProfileReport {
        profile: "1g.10gb".to_owned(),
        memory_mib: 9_728,
        sm_count: None,
        size: 1,
        starts: vec![0],
    };
    let device = DeviceReport { mig_profiles: vec![profile], ..plain.inventory[0].clone() };
    assert!(needs(&Sample { inventory: vec![device].into(), ..plain.clone() }));
    let failure = MigFailure {
        gpu: "GPU-a".to_owned(),
        profile: "1g.10gb".to_owned(),
        start: 0,
        instance: None,
        error: "the GPU is not in MIG mode".to_owned(),
        hidden: None,
    };
    let failed = Sample { mig_failures: vec![failure.clone()], ..plain };
    assert!(needs(&failed));
    assert_eq!(Session::new("a", 0).report(&failed).mig_failures, [failure]);
}

#[test]
fn the_reservations_version_is_sent_only_within_its_session() {
    let (mut session, sample) = (Session::new("a", 0), sample("GPU-a"));
    let mut named = |answer: ExtenderAnswer| {
        session.settle(&answer);
        session.report(&sample).allocations_version
    };
    let reply = |number| reply(number, Outcome::Accepted);
    assert_eq!(named(ExtenderAnswer::Away { error: String::new() }), None);
    assert_eq!(named(ExtenderAnswer::Reply(reply(7))), Some(70));
    assert_eq!(named(ExtenderAnswer::Away { error: String::new() }), Some(70));
    assert_eq!(named(ExtenderAnswer::SessionExpired), None);
    let older = Reply { allocations_version: None, ..reply(8) };
    assert_eq!(named(ExtenderAnswer::Reply(older)), None);
}

#[test]
fn an_expired_session_sends_exactly_one_hello_immediately() {
    let mut session = Session::new("a", 0);
    let one = sample("GPU-a");
    said(&mut session, &one);
    session.settle(&ExtenderAnswer::Reply(reply(7, Outcome::Accepted)));
    said(&mut session, &one);
    assert_eq!(session.settle(&ExtenderAnswer::SessionExpired), Next::NewSession);
    assert_eq!(said(&mut session, &one), (None, 3, true));
    let next = session.settle(&ExtenderAnswer::SessionExpired);
    assert!(matches!(next, Next::Pause(_)), "an expired hello does not shorten the pause");
    assert_eq!(said(&mut session, &one), (None, 4, true), "an earlier hello had this number");
}

#[test]
fn pauses_grow_while_the_extender_is_unavailable() {
    let mut session = Session::new("a", 0);
    let away = ExtenderAnswer::Away { error: "refused".to_owned() };
    let mut pauses = Vec::new();
    for _ in 0..100 {
        let Next::Pause(pause) = session.settle(&away) else { panic!("no pause") };
        pauses.push(pause.as_millis());
    }
    assert_eq!(pauses[..5], [250, 500, 1_000, 2_000, 2_000]);
    assert_eq!(pauses[99], 2_000);
    session.settle(&ExtenderAnswer::Reply(reply(1, Outcome::Accepted)));
    assert_eq!(session.settle(&away), Next::Pause(FIRST_PAUSE));
    let refused = ExtenderAnswer::Refused { error: "absurd".to_owned() };
    assert_eq!(session.settle(&refused), Next::Pause(REFUSED_PAUSE));
}

#[test]
fn an_extender_that_stops_answering_is_reported_lost_once() {
    let mut contact = Contact::default();
    let lost = ContactChange::Lost { error: "e".to_owned() };
    let (away, reply) = (
        ExtenderAnswer::Away { error: "e".to_owned() },
        ExtenderAnswer::Reply(reply(1, Outcome::Accepted)),
    );
    for (millis, answer, change) in [
        (0, &away, None),
        (1_999, &away, None),
        (2_000, &away, Some(lost.clone())),
        (9_000, &away, None),
        (9_001, &reply, Some(ContactChange::Found)),
        (9_002, &away, None),
        (9_003, &reply, None),
        (14_000, &away, None),
        (16_000, &away, Some(lost)),
    ] {
        let now = Timestamp::from_millis(millis);
        assert_eq!(contact.settle(answer, now), change, "{millis}");
    }
}

#[test]
fn allocations_of_several_extenders_are_joined_by_pod() {
    let allocation = |uid: &str, state| Allocation {
        pod_uid: uid.to_owned(),
        pod: format!("d/{uid}"),
        state,
        devices: Vec::new(),
        is_guest: false,
    };
    let shown = |all: &NodeAllocations| {
        let merged = all.merged();
        let rows = merged
            .iter()
            .map(|allocation| format!("{} {:?}", allocation.pod_uid, allocation.state));
        rows.collect::<Vec<_>>().join(", ")
    };
    let mut all = NodeAllocations::default();
    let (assumed, confirmed) = (AllocationState::Assumed, AllocationState::Confirmed);
    assert!(all.learn(0, Some(vec![allocation("p", confirmed), allocation("q", assumed)])));
    assert!(all.learn(1, Some(vec![allocation("p", AllocationState::Draining)])));
    assert!(!all.learn(1, Some(vec![allocation("p", AllocationState::Draining)])));
    assert_eq!(shown(&all), "p Draining, q Assumed");
    assert_eq!(all.draining().len(), 1);
    assert!(!all.learn(1, None), "they are as before");
    all.lose(1);
    assert!(all.learn(1, None), "it counts again");
    all.lose(1);
    assert_eq!(shown(&all), "p Confirmed, q Assumed", "only who replies counts");
    assert!(all.draining().is_empty());
    all.lose(0);
    assert_eq!(shown(&all), "p Draining, q Assumed", "no reply: the last state stays");
    assert!(all.draining().is_empty(), "and nobody waits");
    all.forget(1);
    all.forget(0);
    assert_eq!(shown(&all), "p Draining, q Assumed", "also of those that are gone");
    assert!(all.learn(2, Some(vec![allocation("q", confirmed)])));
    assert_eq!(shown(&all), "q Confirmed", "until another one replies");
    all.forget(2);
    assert_eq!(shown(&all), "q Confirmed");
}

#[test]
fn a_list_taken_before_a_pod_drained_is_not_reported() {
    let mut session = Session::new("a", 0);
    let listed = |draining: &[&str]| {
        let unread = DeviceUse::unread("GPU-a".to_owned(), DeviceFault::Lost);
        let uses = vec![DeviceUse { processes: Some(Vec::new()), ..unread }];
        let draining = draining.iter().map(|uid| (*uid).to_owned()).collect();
        Sample { uses, draining, ..sample("GPU-a") }
    };
    let drains = |uid: &str, state| {
        let (pod_uid, pod) = (uid.to_owned(), format!("d/{uid}"));
        let allocations =
            Some(vec![Allocation { pod_uid, pod, state, devices: Vec::new(), is_guest: false }]);
        ExtenderAnswer::Reply(Reply { allocations, ..reply(7, Outcome::Accepted) })
    };
    let same = ExtenderAnswer::Reply(Reply { allocations: None, ..reply(7, Outcome::Accepted) });
    let away = ExtenderAnswer::Away { error: String::new() };
    let mut is_sent = |answer: Option<&ExtenderAnswer>, draining: &[&str]| {
        if let Some(answer) = answer {
            session.settle(answer);
        }
        session.report(&listed(draining)).devices[0].processes.is_some()
    };
    assert!(is_sent(None, &[]), "hello");
    assert!(is_sent(Some(&drains("p", AllocationState::Confirmed)), &[]), "none drains");
    assert!(!is_sent(Some(&drains("p", AllocationState::Draining)), &[]), "taken before");
    assert!(!is_sent(Some(&same), &["q"]), "p was not searched for");
    assert!(is_sent(Some(&same), &["p", "q"]));
    assert!(is_sent(Some(&away), &["p"]), "one of the two counts");
    assert!(!is_sent(Some(&away), &["p"]), "the answer that got lost may have had news");
    assert!(is_sent(Some(&same), &["p"]));
    assert!(is_sent(Some(&drains("p", AllocationState::Confirmed)), &[]));
    assert!(is_sent(Some(&away), &[]) && !is_sent(Some(&away), &[]));
    assert!(
        is_sent(Some(&ExtenderAnswer::SessionExpired), &[]),
        "an extender that has started knows nothing"
    );
}

/// The fate of one call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Answered,
    AnswerLost,
    Lost,
}

/// Runs these calls against a fake extender that accepts each sequence number once. Returns how
/// many lists it has accepted after each reply that arrived.
fn lists_taken(calls: impl Iterator<Item = Call>) -> Vec<usize> {
    let unread = DeviceUse::unread("GPU-a".to_owned(), DeviceFault::Lost);
    let uses = vec![DeviceUse { processes: Some(Vec::new()), ..unread }];
    let (mut session, sample) = (Session::new("a", 0), Sample { uses, ..sample("GPU-a") });
    let (mut newest, mut taken) = (0, vec![0]);
    for call in calls {
        let report = session.report(&sample);
        let is_new = report.sequence > newest;
        if call != Call::Lost && is_new {
            newest = report.sequence;
            *taken.last_mut().unwrap() += usize::from(report.devices[0].processes.is_some());
        }
        let outcome = if is_new { Outcome::Accepted } else { Outcome::Ignored };
        if call == Call::Answered {
            session.settle(&ExtenderAnswer::Reply(reply(7, outcome)));
            taken.push(0);
        } else {
            session.settle(&ExtenderAnswer::Away { error: String::new() });
        }
    }
    taken
}

#[test]
fn at_most_one_list_counts_between_two_replies() {
    let calls = [Call::Answered, Call::AnswerLost, Call::Lost];
    for number in 0..3_usize.pow(8) {
        let calls = (0..8).map(|at| calls[number / 3_usize.pow(at) % 3]);
        let taken = lists_taken(calls);
        assert!(taken.iter().all(|lists| *lists <= 1), "{number}: {taken:?}");
    }
}

#[test]
fn lists_complete_when_every_second_call_fails() {
    for fails in [Call::AnswerLost, Call::Lost] {
        let taken = lists_taken([fails, Call::Answered].into_iter().cycle().take(20));
        assert_eq!(taken, [&[1; 10][..], &[0]].concat());
    }
}

#[test]
fn a_sample_is_reported_if_it_shows_a_change_or_is_needed_otherwise() {
    let calm = DeviceUse {
        used_mib: Some(1_000),
        busy_percent: Some(10),
        healthy: true,
        fault: None,
        ..DeviceUse::unread("GPU-a".to_owned(), DeviceFault::Xid)
    };
    let of = |uses: Vec<DeviceUse>| Sample { uses, ..sample("GPU-a") };
    let used = |mib| of(vec![DeviceUse { used_mib: mib, ..calm.clone() }]);
    let listed = DeviceUse { processes: Some(Vec::new()), ..calm.clone() };
    let other = DeviceUse { uuid: "GPU-b".to_owned(), ..calm.clone() };
    let driver = Some(DriverReport { version: "1".to_owned(), cuda: None, lacks_uvm: false });
    let rows = [
        ("the same", used(Some(1_000)), 4_499, false),
        ("a heartbeat", used(Some(1_000)), 4_500, true),
        ("other utilization", of(vec![DeviceUse { busy_percent: None, ..calm.clone() }]), 0, false),
        ("little more memory", used(Some(1_064)), 0, false),
        ("more memory", used(Some(1_065)), 0, true),
        ("less memory", used(Some(935)), 0, true),
        ("unknown memory", used(None), 0, true),
        ("a list, even an empty one", of(vec![listed.clone()]), 0, true),
        ("a fault", of(vec![DeviceUse { healthy: false, ..calm.clone() }]), 0, true),
        ("an Xid", of(vec![DeviceUse { last_xid: Some(31), ..calm.clone() }]), 0, true),
        ("MPS", of(vec![DeviceUse { mps: Some(MpsState::Absent), ..calm.clone() }]), 0, true),
        ("another device", of(vec![other.clone()]), 0, true),
        ("one more device", of(vec![calm.clone(), other]), 0, true),
        ("no device", of(Vec::new()), 0, true),
        ("an inventory", Sample { uses: vec![calm.clone()], ..sample("GPU-b") }, 0, true),
        ("a driver", Sample { driver, ..used(Some(1_000)) }, 0, true),
        ("a blind spot", Sample { has_unwatched_pods: true, ..used(Some(1_000)) }, 0, true),
    ];
    let mut session = Session::new("a", 0);
    let accepted = ExtenderAnswer::Reply(reply(7, Outcome::Accepted));
    let second = Duration::from_secs(1);
    assert!(session.needs(&used(Some(1_000)), Duration::ZERO, second), "the first");
    session.report(&of(vec![listed]));
    session.settle(&accepted);
    for (what, sample, elapsed, expected) in rows {
        assert_eq!(
            session.needs(&sample, Duration::from_millis(elapsed), second),
            expected,
            "{what}"
        );
    }
    for answer in [
        ExtenderAnswer::Reply(reply(7, Outcome::Ignored)),
        ExtenderAnswer::Away { error: String::new() },
        ExtenderAnswer::SessionExpired,
        ExtenderAnswer::Refused { error: String::new() },
    ] {
        session.report(&used(Some(1_000)));
        session.settle(&accepted);
        assert!(!session.needs(&used(Some(1_000)), Duration::ZERO, second));
        session.report(&used(Some(1_000)));
        session.settle(&answer);
        assert!(session.needs(&used(Some(1_000)), Duration::ZERO, second), "{answer:?}");
    }
}

#[test]
fn containers_are_sent_once_in_each_session_and_after_a_change() {
    let container = |id: &str| ContainerReport {
        pod_uid: "p".to_owned(),
        id: id.to_owned(),
        has_driver: false,
        is_older: false,
    };
    let of = |ids: &[&str]| Sample {
        containers: ids.iter().map(|id| container(id)).collect(),
        ..sample("GPU-a")
    };
    let mut session = Session::new("a", 0);
    let sent = |session: &mut Session, sample: &Sample| {
        session.report(sample).containers.map(|all| all.len())
    };
    let accepted = ExtenderAnswer::Reply(reply(7, Outcome::Accepted));
    let (none, one, two) = (of(&[]), of(&["c"]), of(&["c", "d"]));
    assert_eq!(sent(&mut session, &none), None, "a hello");
    session.settle(&accepted);
    let soon = Duration::from_millis(1);
    assert!(session.needs(&one, soon, soon) && !session.needs(&none, soon, soon));
    assert_eq!(sent(&mut session, &one), Some(1));
    session.settle(&ExtenderAnswer::Away { error: String::new() });
    assert_eq!(sent(&mut session, &one), Some(1), "no answer came");
    session.settle(&ExtenderAnswer::Reply(reply(7, Outcome::Ignored)));
    assert_eq!(sent(&mut session, &one), Some(1), "it changed nothing");
    session.settle(&accepted);
    assert_eq!(sent(&mut session, &one), None);
    session.settle(&accepted);
    assert_eq!(sent(&mut session, &two), Some(2));
    session.settle(&accepted);
    assert_eq!(sent(&mut session, &none), Some(0), "the pod is gone");
    session.settle(&accepted);
    assert_eq!(sent(&mut session, &two), Some(2));
    session.settle(&ExtenderAnswer::SessionExpired);
    assert_eq!(sent(&mut session, &two), Some(2), "the extender started again");
}
