use std::cell::RefCell;

use super::*;
use wire::report::bodies::PodLimit;

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
}

impl Driver {
    fn new(groups: &[(&str, Option<u64>, u64)]) -> Self {
        let groups = groups.iter().map(|(name, limit, used)| {
            let found = GroupLimit { limit: limit.map(|gib| gib * GIB), used: used * GIB };
            ((*name).to_owned(), found)
        });
        Self { groups: RefCell::new(groups.collect()), ..Self::default() }
    }
}

impl LimitDriver for Driver {
    fn read(&self, _: &str, group: &str) -> Option<GroupLimit> {
        self.groups.borrow().get(group).copied()
    }

    fn set(&self, _: &str, group: &str, bytes: u64) -> SetLimit {
        if self.refuses {
            return SetLimit::Refused;
        }
        let mut groups = self.groups.borrow_mut();
        let Some(found) = groups.get_mut(group) else { return SetLimit::Failed };
        found.limit = Some(bytes);
        found.used = self.grows.get(group).map_or(found.used, |gib| gib * GIB);
        self.set.borrow_mut().push(format!("{group}={}", bytes / GIB));
        SetLimit::Done
    }
}

/// An order with this number, of these limits in GiB.
fn order(number: u64, pods: &[(&str, u64)]) -> GpuLimits {
    let pods = pods.iter().map(|(pod, gib)| PodLimit {
        pod_uid: (*pod).to_owned(),
        limit_mib: gib << 10,
        keeps_more: false,
    });
    GpuLimits { gpu: "GPU-a".to_owned(), number, pods: pods.collect() }
}

fn orders(term: u64, gpu: GpuLimits) -> Option<LimitOrders> {
    Some(LimitOrders { term, gpus: vec![gpu] })
}

/// Pods with a container each, of the same name.
fn groups(pods: &[&str]) -> Containers {
    pods.iter().map(|pod| ((*pod).to_owned(), BTreeSet::from([(*pod).to_owned()]))).collect()
}

fn gpus() -> BTreeSet<String> {
    BTreeSet::from(["GPU-a".to_owned()])
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
        ("p".to_owned(), BTreeSet::from(["p".to_owned(), "pause".to_owned()])),
        ("q".to_owned(), BTreeSet::from(["q".to_owned()])),
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
        limits.carry_out(orders.as_ref(), &gpus(), Ok(&both), driver, at(0));
        let LimitsInForce { term, gpus } = limits.in_force();
        (term, gpus.into_iter().map(|numbered| numbered.number).collect::<Vec<_>>())
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
        limits.carry_out(orders.as_ref(), &gpus(), Ok(&containers), driver, at(0));
        assert_eq!(limits.in_force().gpus, []);
    }
    limits.set_none();
    assert_eq!(limits.in_force().gpus, []);
}

#[test]
fn nothing_is_in_force_while_the_containers_cannot_be_read() {
    let (limits, driver) = (LentLimits::default(), Driver::new(&[("p", Some(60), 0)]));
    let orders = orders(5, order(7, &[("p", 40)])).unwrap();
    limits.carry_out(Some(&orders), &gpus(), Err(&SetLimit::Failed), &driver, at(0));
    assert_eq!(limits.in_force().gpus[0].number, 0);
    assert!(!limits.are_done(&orders, at(0)));
    limits.carry_out(Some(&orders), &gpus(), Ok(&groups(&["p"])), &driver, at(1));
    assert_eq!(limits.in_force().gpus[0].number, 7);
    assert!(limits.are_done(&orders, at(5)) && !limits.are_done(&orders, at(6)));
    // Where the control groups are hidden, the GPU is not reported again: each other report would say the opposite.
    let hidden = LentLimits::default();
    for containers in [Err(&SetLimit::Refused), Ok(&groups(&["p"]))] {
        hidden.carry_out(Some(&orders), &gpus(), containers, &driver, at(0));
        assert_eq!(hidden.in_force().gpus, []);
    }
    // No GPU has so much.
    let absurd = order(8, &[("p", u64::MAX >> 20)]);
    assert_eq!(obeyed(&absurd, &groups(&["p"]), &driver), SetLimit::Failed);
}

#[test]
fn soft_limits_that_an_older_extender_asks_for_are_ignored() {
    let told = r#"{"term":5,"gpus":[{"gpu":"GPU-a","number":7,
        "pods":[{"podUid":"p","limitMib":40960}],"soft":["p"]}]}"#;
    assert_eq!(serde_json::from_str(told).ok(), orders(5, order(7, &[("p", 40)])));
}
