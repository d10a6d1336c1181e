use super::*;
use crate::room::fixture::waiting_pod;

/// Amounts in a pool of eight GPUs, of which a quarter is the share.
fn of_eight(wanted: u64, kept: u64) -> Amounts {
    Amounts { wanted: wanted * 1_000_000, kept: kept * 1_000_000, at_most: 2_000_000 }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::START.plus(Duration::from_secs(seconds))
}

fn controller(number: u64) -> Owner {
    let namespace: Arc<str> = "team".into();
    let controller = Some(Controller(number));
    Owner { scope: Scope::Namespace(Arc::clone(&namespace)), namespace, controller }
}

const MINUTE: Duration = Duration::from_secs(60);

/// The seconds within which an owner whose room is never used has room, if it takes all that it may.
fn waits(owners: &mut Owners, owner: &Owner, until: u64) -> Vec<(u64, u64)> {
    let pod = waiting_pod("p", 1_000_000, 0);
    let (mut waits, mut now) = (Vec::new(), 0);
    while now < until {
        owners.tick(at(now));
        if owners.is_paused(owner, [&pod], at(now)) {
            now += 1;
            continue;
        }
        owners.begin(owner, at(now));
        let wait = owners.wait(owner, MINUTE).as_secs();
        waits.push((now, wait));
        now += wait;
        owners.fail(owner, editions([&pod]), at(now));
    }
    waits
}

#[test]
fn the_first_wait_is_long_and_later_ones_are_short_and_seldom() {
    let (mut owners, owner) = (Owners::default(), controller(1));
    let expected = [(0, 60), (120, 5), (245, 5), (490, 5), (975, 5)];
    assert_eq!(waits(&mut owners, &owner, 1_800), expected, "pauses double");
    owners.used(&owner);
    assert_eq!(owners.wait(&owner, MINUTE), MINUTE, "one bind resets it");
    assert_eq!(owners.failed.len() + owners.scopes.len(), 0);
}

#[test]
fn pauses_last_half_an_hour_at_most_and_are_forgotten_as_long_after() {
    let (mut owners, owner) = (Owners::default(), controller(1));
    let all = waits(&mut owners, &owner, 30_000);
    let [.., (before, _), (last, wait)] = all[..] else { panic!("{all:?}") };
    assert_eq!((last - before, wait), (1_805, 5));
    owners.tick(at(last + 5 + 1_800 + 1_799));
    assert_eq!(owners.failed.len() + owners.scopes.len(), 2);
    owners.tick(at(last + 5 + 1_800 + 1_800));
    assert_eq!(owners.failed.len() + owners.scopes.len(), 0);
}

#[test]
fn after_a_failure_a_scope_has_its_share() {
    let (mut owners, owner, other) = (Owners::default(), controller(1), controller(2));
    assert!(
        owners.may_keep(&owner, of_eight(8, 0), at(0)),
        "a group of any size has its first try"
    );
    owners.fail(&owner, BTreeMap::new(), at(60));
    assert!(owners.may_keep(&owner, of_eight(2, 0), at(120)));
    assert!(!owners.may_keep(&owner, of_eight(1, 2), at(120)), "the share is in use");
    assert!(owners.may_keep(&owner, of_eight(8, 0), at(120)), "alone, after its pause");
    // Names of controllers are free.
    assert!(owners.may_keep(&other, of_eight(2, 0), at(61)), "its own first try, within the share");
    assert!(!owners.may_keep(&other, of_eight(8, 0), at(61)), "of any size after the pause of all");
    assert!(owners.may_keep(&other, of_eight(8, 0), at(120)));
    assert!(!owners.may_keep(&other, of_eight(8, 1), at(120)), "but not beside others");
    assert_eq!(owners.wait(&other, MINUTE), TURN);
    owners.fail(&other, BTreeMap::new(), at(130));
    assert!(
        !owners.may_keep(&owner, of_eight(8, 0), at(249)),
        "the namespace pauses for two minutes"
    );
    assert!(owners.may_keep(&owner, of_eight(8, 0), at(250)));
    let elsewhere = Scope::Namespace("other".into());
    let elsewhere = Owner { scope: elsewhere, namespace: "other".into(), controller: None };
    assert!(owners.may_keep(&elsewhere, of_eight(8, 8), at(130)), "another namespace");
}

#[test]
fn several_rooms_that_are_not_used_are_one_failure() {
    let (mut owners, owner) = (Owners::default(), controller(1));
    let pod = |name: &str| waiting_pod(name, 1_000_000, 0);
    for name in ["a", "b", "c"] {
        owners.fail(&owner, editions([&pod(name)]), at(60));
    }
    assert!(owners.is_paused(&owner, [&pod("a")], at(119)));
    assert!(!owners.is_paused(&owner, [&pod("a")], at(120)));
    let edited = WaitingPod { edition: 7, ..pod("a") };
    assert!(!owners.is_paused(&owner, [&edited], at(61)), "an edit of each of them counts");
}

#[test]
fn an_edit_ends_a_pause_once_a_minute() {
    let (mut owners, owner) = (Owners::default(), controller(1));
    let pod = |edition| WaitingPod { edition, ..waiting_pod("p", 1_000_000, 0) };
    owners.fail(&owner, editions([&pod(1)]), at(60));
    assert!(owners.is_paused(&owner, [&pod(1)], at(61)));
    assert!(owners.is_paused(&owner, [&waiting_pod("other", 1, 0)], at(61)), "another pod");
    assert!(!owners.is_paused(&owner, [&pod(2)], at(62)));
    assert!(owners.may_keep(&owner, of_eight(2, 0), at(62)));
    assert!(!owners.may_keep(&owner, of_eight(3, 0), at(62)), "more only after a whole pause");
    owners.begin(&owner, at(62));
    owners.fail(&owner, editions([&pod(2)]), at(67));
    assert!(owners.is_paused(&owner, [&pod(3)], at(121)));
    assert!(!owners.is_paused(&owner, [&pod(3)], at(122)));
}

#[test]
fn few_owners_are_remembered() {
    let mut owners = Owners::default();
    for number in 0..MOST_OWNERS as u64 + 5 {
        owners.fail(&controller(number), BTreeMap::new(), at(number));
    }
    assert_eq!(owners.failed.len(), MOST_OWNERS);
    assert!(
        !owners.failed.contains_key(&controller(4)) && owners.failed.contains_key(&controller(5))
    );
}

#[test]
fn pods_that_end_early_fail_once_they_kept_room_idle_as_long_as_one_that_waits() {
    let (mut owners, pod) = (Owners::default(), waiting_pod("p", 1_000_000, 0));
    let seconds = Duration::from_secs;
    let [first, second] = [1, 2].map(controller);
    let is_paused = |owners: &Owners, time| owners.is_paused(&first, [&pod], at(time));
    owners.leave(&first, seconds(59), at(59));
    assert!(!is_paused(&owners, 59), "kube-scheduler may have backed off from it");
    assert_eq!(owners.wait(&first, MINUTE), MINUTE, "that of an honest pod is no shorter");
    owners.used(&first);
    owners.leave(&first, seconds(59), at(200));
    assert!(!is_paused(&owners, 200), "one bind resets it");
    // Several that end together are one, that of the longest.
    [0, 40, 59, 59].map(seconds).into_iter().for_each(|idle| owners.leave(&first, idle, at(200)));
    assert!(!is_paused(&owners, 200));
    owners.leave(&first, seconds(1), at(201));
    assert!(is_paused(&owners, 201));
    assert_eq!(owners.wait(&second, MINUTE), TURN, "another one of its scope");
    owners.leave(&first, Duration::ZERO, at(300));
    assert!(!is_paused(&owners, 300), "a pod whose room was not free has kept none");
    owners.leave(&first, seconds(5), at(300));
    assert!(is_paused(&owners, 419) && !is_paused(&owners, 420), "after a failure less fails");
}

#[test]
fn made_up_controllers_whose_pods_end_early_fail_as_one_scope() {
    let mut owners = Owners::default();
    let has_failed = |owners: &Owners| owners.scopes.contains_key(controller(1).scope());
    for number in 1..=15 {
        assert!(!has_failed(&owners), "{number}");
        owners.leave(&controller(number), Duration::from_secs(4), at(10 * number));
    }
    assert!(has_failed(&owners) && owners.failed.is_empty(), "none of them alone");
    assert_eq!(owners.idle.len(), 15);
    owners.tick(at(150 + 1_799));
    assert_eq!((owners.idle.len(), owners.scopes_idle.len()), (1, 0));
    owners.tick(at(150 + 1_800));
    assert_eq!(owners.idle.len(), 0);
}
