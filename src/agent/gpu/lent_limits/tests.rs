use std::cell::RefCell;

use super::*;
use crate::report::wire::PodLimit;

const GIB: u64 = 1 << 30;

/// A driver with these limits: what each control group may use, and uses, in GiB.
#[derive(Default)]
struct Driver {
    groups: RefCell<BTreeMap<String, GroupLimit>>,
    /// What was set, in order.
    set: RefCell<Vec<String>>,
    /// Grows to this when a limit is set.
    grows: BTreeMap<String, u64>,
    refuses: bool,
    counts_parents: bool,
}

impl Driver {
    fn new(groups: &[(&str, Option<u64>, u64)]) -> Self {
        let groups = groups.iter().map(|(name, limit, used)| {
            let found = GroupLimit { limit: limit.map(|gib| gib * GIB), soft: 0, used: used * GIB };
            ((*name).to_owned(), found)
        });
        Self { groups: RefCell::new(groups.collect()), ..Self::default() }
    }
}

impl LimitDriver for Driver {
    fn read(&self, _: &str, group: &str) -> Option<GroupLimit> {
        self.groups.borrow().get(group).copied()
    }

    fn set(&self, _: &str, group: &str, (soft, limit): (u64, u64)) -> SetLimit {
        assert!(soft <= limit, "{group}: {soft} of {limit}");
        if self.refuses {
            return SetLimit::Refused;
        }
        let mut groups = self.groups.borrow_mut();
        let Some(found) = groups.get_mut(group) else { return SetLimit::Failed };
        (found.soft, found.limit) = (soft, Some(limit));
        found.used = self.grows.get(group).map_or(found.used, |gib| gib * GIB);
        let guaranteed = if soft > 0 { format!("{}..", soft / GIB) } else { String::new() };
        self.set.borrow_mut().push(format!("{group}={guaranteed}{}", limit / GIB));
        SetLimit::Done
    }

    fn counts_parents(&self, _: &str) -> bool {
        self.counts_parents
    }

    fn finds_mps(&self, _: &str, pid: u32) -> bool {
        pid < 3
    }
}

/// An order with this number, of these limits in GiB.
fn order(number: u64, pods: &[(&str, u64)]) -> GpuLimits {
    let pods = pods.iter().map(|(pod, gib)| PodLimit {
        pod_uid: (*pod).to_owned(),
        limit_mib: gib << 10,
        keeps_more: false,
    });
    GpuLimits { gpu: "GPU-a".to_owned(), number, pods: pods.collect(), soft: Vec::new() }
}

fn orders(term: u64, gpu: GpuLimits) -> Option<LimitOrders> {
    Some(LimitOrders { term, gpus: vec![gpu] })
}

/// Containers of a pod; each process is the length of its name.
fn containers(names: &[&str]) -> BTreeMap<String, u32> {
    names.iter().map(|name| ((*name).to_owned(), u32::try_from(name.len()).unwrap())).collect()
}

/// Pods with a container each, of the same name.
fn groups(pods: &[&str]) -> Containers {
    pods.iter().map(|pod| ((*pod).to_owned(), containers(&[pod]))).collect()
}

fn gpus() -> BTreeMap<String, bool> {
    BTreeMap::from([("GPU-a".to_owned(), true)])
}

fn obeyed(order: &GpuLimits, containers: &Containers, driver: &Driver) -> SetLimit {
    obey(order, containers, driver, &mut BTreeSet::new())
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_millis(seconds * 1_000)
}

#[test]
fn limits_are_lowered_before_others_are_raised() {
    let driver = Driver::new(&[("p", Some(60), 10), ("q", Some(20), 20)]);
    assert_eq!(
        obeyed(&order(1, &[("q", 40), ("p", 40)]), &groups(&["p", "q"]), &driver),
        SetLimit::Done
    );
    assert_eq!(*driver.set.borrow(), ["p=40", "q=40"]);
    // Once set, nothing is set again.
    assert_eq!(
        obeyed(&order(1, &[("q", 40), ("p", 40)]), &groups(&["p", "q"]), &driver),
        SetLimit::Done
    );
    assert_eq!(driver.set.borrow().len(), 2);
}

#[test]
fn none_is_raised_while_a_pod_uses_more_than_its_new_limit() {
    let order = order(1, &[("p", 30), ("q", 50)]);
    let both = groups(&["p", "q"]);
    let held = Driver::new(&[("p", Some(60), 40), ("q", Some(20), 20)]);
    assert_eq!(obeyed(&order, &both, &held), SetLimit::Failed);
    assert_eq!(*held.set.borrow(), ["p=40"], "its growth is stopped");
    // It has grown while its limit was lowered.
    let grown = Driver {
        grows: BTreeMap::from([("p".to_owned(), 31)]),
        ..Driver::new(&[("p", Some(60), 10), ("q", Some(20), 20)])
    };
    assert_eq!(obeyed(&order, &both, &grown), SetLimit::Failed);
    assert_eq!(*grown.set.borrow(), ["p=30"]);
    // One whose limit cannot be read any more, and one that never had any.
    let (gone, mut known) = (Driver::new(&[("p", Some(20), 0)]), BTreeSet::new());
    assert_eq!(obey(&order, &both, &gone, &mut known), SetLimit::Done, "`q` has no limit");
    known.insert(("GPU-a".to_owned(), "q".to_owned()));
    assert_eq!(obey(&order, &both, &gone, &mut known), SetLimit::Failed);
}

#[test]
fn only_the_growth_of_what_cannot_be_taken_back_is_stopped() {
    let driver = Driver::new(&[("p", Some(60), 40), ("q", Some(20), 20)]);
    let mut order = order(1, &[("p", 30), ("q", 35)]);
    order.pods[0].keeps_more = true;
    assert_eq!(obeyed(&order, &groups(&["p", "q"]), &driver), SetLimit::Done);
    assert_eq!(*driver.set.borrow(), ["p=40", "q=35"]);
}

#[test]
fn containers_without_a_limit_are_left_alone() {
    let driver = Driver::new(&[("p", Some(20), 0), ("pause", None, 0), ("q", None, 70)]);
    let all = BTreeMap::from([
        ("p".to_owned(), containers(&["p", "pause"])),
        ("q".to_owned(), containers(&["q"])),
    ]);
    assert_eq!(obeyed(&order(1, &[("p", 60), ("q", 10)]), &all, &driver), SetLimit::Done);
    assert_eq!(*driver.set.borrow(), ["p=60"]);
    // A pod without a container gets its limit when it starts.
    assert_eq!(obeyed(&order(1, &[("r", 60)]), &all, &driver), SetLimit::Done);
}

#[test]
fn what_is_in_force_is_reported_with_the_term_of_its_leader() {
    let (limits, both) = (LentLimits::default(), groups(&["p"]));
    let driver = Driver::new(&[("p", Some(20), 10)]);
    let round = |driver: &Driver| {
        let orders = limits.orders();
        limits.carry_out((orders.as_ref(), at(0)), &gpus(), Ok(&both), driver);
        let LimitsInForce { term, gpus } = limits.in_force();
        (term, gpus.into_iter().map(|it| it.number).collect::<Vec<_>>())
    };
    assert_eq!(round(&driver), (0, vec![0]), "no orders");
    limits.learn(0, orders(5, order(7, &[("p", 40)])), at(1));
    assert_eq!(round(&driver), (5, vec![7]));
    // The next order is not in force as long as the pod uses more.
    limits.learn(0, orders(5, order(8, &[("p", 5)])), at(2));
    assert_eq!(round(&driver), (5, vec![7]));
    driver.groups.borrow_mut().get_mut("p").unwrap().used = GIB;
    assert_eq!(round(&driver), (5, vec![8]));
    limits.lose(0);
    assert_eq!(round(&driver), (5, vec![8]), "a silent leader changes nothing");
    limits.learn(1, orders(4, order(9, &[("p", 60)])), at(3));
    assert_eq!(round(&driver), (5, vec![8]), "an older leader");
    // Numbers of another leader mean something else.
    limits.learn(1, orders(6, order(8, &[("p", 0)])), at(4));
    assert_eq!(round(&driver), (6, vec![0]));
}

#[test]
fn a_gpu_whose_driver_refuses_is_not_reported_again() {
    let limits = LentLimits::default();
    let refusing = Driver { refuses: true, ..Driver::new(&[("p", Some(20), 0)]) };
    limits.learn(0, orders(5, order(7, &[("p", 40)])), at(1));
    for driver in [&refusing, &Driver::new(&[("p", Some(20), 0)])] {
        let (orders, containers) = (limits.orders(), groups(&["p"]));
        limits.carry_out((orders.as_ref(), at(0)), &gpus(), Ok(&containers), driver);
        assert_eq!(limits.in_force().gpus, []);
    }
    limits.set_none();
    assert_eq!(limits.in_force().gpus, []);
}

#[test]
fn nothing_is_in_force_while_the_containers_cannot_be_read() {
    let (limits, driver) = (LentLimits::default(), Driver::new(&[("p", Some(60), 0)]));
    let orders = orders(5, order(7, &[("p", 40)])).unwrap();
    limits.carry_out((Some(&orders), at(0)), &gpus(), Err(&SetLimit::Failed), &driver);
    assert_eq!(limits.in_force().gpus[0].number, 0);
    assert!(!limits.are_done(&orders, at(0)));
    limits.carry_out((Some(&orders), at(1)), &gpus(), Ok(&groups(&["p"])), &driver);
    assert_eq!(limits.in_force().gpus[0].number, 7);
    assert!(limits.are_done(&orders, at(5)) && !limits.are_done(&orders, at(6)));
    // Where the control groups are hidden, the GPU is not reported again: each other report would say the opposite.
    let hidden = LentLimits::default();
    for containers in [Err(&SetLimit::Refused), Ok(&groups(&["p"]))] {
        hidden.carry_out((Some(&orders), at(0)), &gpus(), containers, &driver);
        assert_eq!(hidden.in_force().gpus, []);
    }
    // No GPU has so much.
    let absurd = order(8, &[("p", u64::MAX >> 20)]);
    assert_eq!(obeyed(&absurd, &groups(&["p"]), &driver), SetLimit::Failed);
}

/// A driver with these soft limits and limits in GiB.
fn soft_driver(groups: &[(&str, u64, u64)]) -> Driver {
    let groups = groups.iter().map(|(name, soft, limit)| {
        let found = GroupLimit { limit: Some(limit * GIB), soft: soft * GIB, used: 0 };
        ((*name).to_owned(), found)
    });
    Driver { groups: RefCell::new(groups.collect()), ..Driver::default() }
}

/// An order with these limits in GiB, and with these pods whose soft limits are to be reported.
fn soft_order(limits: &[(&str, u64)], soft: &[&str]) -> GpuLimits {
    GpuLimits { soft: soft.iter().map(|pod| (*pod).to_owned()).collect(), ..order(1, limits) }
}

/// The soft limits that are reported after an order was carried out.
fn reported(
    limits: &LentLimits,
    order: Option<&GpuLimits>,
    has_mps: bool,
    seen: (Result<&Containers, &SetLimit>, &Driver),
) -> String {
    let orders = order.and_then(|order| orders(1, order.clone()));
    let gpus = BTreeMap::from([("GPU-a".to_owned(), has_mps)]);
    limits.carry_out((orders.as_ref(), at(0)), &gpus, seen.0, seen.1);
    let soft = limits.in_force().gpus.remove(0).soft;
    let soft = soft.iter().map(|it| format!("{}={}", it.pod_uid, it.soft_mib >> 10));
    soft.collect::<Vec<_>>().join(" ")
}

/// Nothing but clients of MPS was seen.
fn listed() -> LentLimits {
    let limits = LentLimits::default();
    limits.list("GPU-a", (true, BTreeSet::new()), at(0));
    limits
}

#[test]
fn soft_limits_are_read_back_and_stay_when_others_change() {
    let driver = soft_driver(&[("p", 20, 20), ("q", 30, 30), ("r", 0, 10)]);
    let (limits, all) = (listed(), groups(&["p", "q", "r", "four"]));
    let order = soft_order(&[("p", 80)], &["p", "q", "r", "s"]);
    let found = reported(&limits, Some(&order), true, (Ok(&all), &driver));
    assert_eq!(found, "p=20 q=30", "`r` has none, and `s` no container");
    assert_eq!(*driver.set.borrow(), ["p=20..80"], "the soft limit stays");
    let lower = soft_order(&[("p", 25)], &["p", "q"]);
    assert_eq!(reported(&limits, Some(&lower), true, (Ok(&all), &driver)), "p=20 q=30");
    assert_eq!(*driver.set.borrow(), ["p=20..80", "p=20..25"]);
    // It goes on between two containers, and while no leader answers or no process can be read.
    let one = groups(&["q"]);
    assert_eq!(reported(&limits, Some(&lower), true, (Ok(&one), &driver)), "p=20 q=30");
    assert_eq!(reported(&limits, None, true, (Ok(&one), &driver)), "p=20 q=30");
    let unread = Err(&SetLimit::Failed);
    assert_eq!(reported(&limits, Some(&lower), true, (unread, &driver)), "p=20 q=30");
    // Its soft limit is kept when containers of one pod overlap; then the order is not done.
    let overlap = BTreeMap::from([("q".to_owned(), containers(&["q", "p"]))]);
    let half = soft_order(&[("q", 30)], &[]);
    reported(&limits, Some(&half), true, (Ok(&overlap), &driver));
    assert_eq!(driver.set.borrow().last().unwrap(), "p=20..20");
    assert_eq!(obey(&half, &overlap, &driver, &mut BTreeSet::new()), SetLimit::Failed);
    assert_eq!(reported(&limits, Some(&lower), true, (Ok(&all), &driver)), "p=20 q=30");
    // The next container of `p` has none.
    driver.groups.borrow_mut().get_mut("p").unwrap().soft = 0;
    assert_eq!(reported(&limits, Some(&lower), true, (Ok(&all), &driver)), "q=30");
}

#[test]
fn only_what_mps_acts_on_is_reported() {
    let (all, order) = (groups(&["p", "q"]), soft_order(&[], &["p", "q"]));
    let driver = soft_driver(&[("p", 20, 20), ("q", 30, 30)]);
    let report = |limits: &LentLimits, has_mps, all: &Containers, driver: &Driver| {
        reported(limits, Some(&order), has_mps, (Ok(all), driver))
    };
    assert_eq!(report(&LentLimits::default(), true, &all, &driver), "", "nothing was listed");
    let limits = listed();
    assert_eq!(report(&limits, false, &all, &driver), "", "no daemon acts on them");
    let elsewhere = BTreeMap::from([
        ("p".to_owned(), containers(&["p"])),
        ("q".to_owned(), BTreeMap::from([("q".to_owned(), 3)])),
    ]);
    assert_eq!(report(&limits, true, &elsewhere, &driver), "p=20", "`q` does not find the daemon");
    let unread = BTreeMap::from([("p".to_owned(), containers(&["p", "x"]))]);
    assert_eq!(report(&listed(), true, &unread, &driver), "", "one group cannot be read");
    let nested = Driver { counts_parents: true, ..soft_driver(&[("p", 20, 20)]) };
    assert_eq!(report(&listed(), true, &all, &nested), "", "they would stay on parents");
    let absurd = soft_driver(&[("p", 1 << 20, 1 << 20)]);
    assert_eq!(report(&listed(), true, &all, &absurd), "", "no GPU has so much");
}

#[test]
fn a_pod_that_was_no_client_of_mps_has_no_soft_limit_for_ten_minutes() {
    let (all, order) = (groups(&["p", "q"]), soft_order(&[], &["p", "q"]));
    let driver = soft_driver(&[("p", 20, 20), ("q", 30, 30)]);
    let limits = listed();
    let report = || reported(&limits, Some(&order), true, (Ok(&all), &driver));
    let p = || BTreeSet::from(["p".to_owned()]);
    limits.list("GPU-b", (true, p()), at(0));
    assert_eq!(report(), "p=20 q=30", "on another GPU");
    limits.list("GPU-a", (true, p()), at(0));
    assert_eq!(report(), "q=30");
    limits.list("GPU-a", (true, BTreeSet::new()), at(0));
    assert_eq!(report(), "p=20 q=30", "one list alone may be wrong");
    limits.list("GPU-a", (true, p()), at(1));
    limits.list("GPU-a", (true, p()), at(1));
    assert_eq!(report(), "q=30");
    limits.list("GPU-a", (false, BTreeSet::new()), at(600));
    assert_eq!((report(), limits.has_pods("GPU-a")), ("q=30".to_owned(), false));
    limits.list("GPU-a", (true, BTreeSet::new()), at(601));
    assert_eq!((report(), limits.has_pods("GPU-a")), ("p=20 q=30".to_owned(), true));
}
