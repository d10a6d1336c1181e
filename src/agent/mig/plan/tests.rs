use super::*;

/// An A100 with instances: number, profile, first unit, UUIDs.
fn gpu(instances: &[(u32, &str, u32, &[&str])]) -> GpuLayout {
    let profile = |id, name: &str, size, starts: &[u32]| NumberedProfile {
        id,
        most: 7,
        report: MigProfileReport {
            profile: name.to_owned(),
            memory_mib: 9_728,
            sm_count: Some(14),
            size,
            starts: starts.to_vec(),
        },
    };
    let profiles = vec![
        profile(19, "1g.10gb", 1, &[0, 1, 2, 3, 4, 5, 6]),
        profile(14, "2g.20gb", 2, &[0, 2, 4]),
        profile(9, "3g.40gb", 4, &[0, 4]),
    ];
    let numbered =
        |name: &str| profiles.iter().find(|profile| profile.report.profile == name).unwrap();
    let instance = |(id, name, start, devices): &(u32, &str, u32, &[&str])| GpuInstance {
        id: *id,
        profile: numbered(name).id,
        slot: Units { start: *start, size: numbered(name).report.size },
        devices: devices.iter().map(|uuid| (*uuid).to_owned()).collect(),
    };
    let instances = instances.iter().map(instance).collect();
    let uuid = "GPU-a".to_owned();
    GpuLayout { uuid, is_in_mig_mode: true, profiles, instances }
}

fn at(gpu: GpuLayout) -> Layouts {
    Layouts { gpus: vec![gpu], ..Layouts::default() }
}

fn place(profile: &str, start: u32) -> MakeInstance {
    MakeInstance { gpu: "GPU-a".to_owned(), profile: profile.to_owned(), start }
}

fn orders(make: &[(&str, u32)], remove: &[&str]) -> MigOrders {
    MigOrders {
        term: 1,
        make: make.iter().map(|(profile, start)| place(profile, *start)).collect(),
        remove: remove.iter().map(|uuid| (*uuid).to_owned()).collect(),
        ..MigOrders::default()
    }
}

fn begun(profile: u32, start: u32, size: u32, is_new: bool) -> Unfinished {
    Unfinished { gpu: "GPU-a".to_owned(), profile, slot: Units { start, size }, is_new }
}

/// A plan in few words: work and place of each step, then the failures.
fn shown(plan: &MigPlan) -> Vec<String> {
    let step = |step: &MigStep| {
        format!("{:?} {} at {}", step.work, step.order.place.profile, step.order.place.start)
    };
    let failure = |(order, obstacle): &(MigOrder, Obstacle)| {
        format!("{}: {}", order.place.profile, obstacle.error)
    };
    plan.steps.iter().map(step).chain(plan.failures.iter().map(failure)).collect()
}

#[test]
fn what_is_ordered_and_missing_is_made_once() {
    let empty = at(gpu(&[]));
    let both = orders(&[("3g.40gb", 4), ("1g.10gb", 0), ("1g.10gb", 0)], &[]);
    let plan = makes(&both, &empty, &[]);
    assert_eq!(shown(&plan), ["Make 1g.10gb at 0", "Make 3g.40gb at 4"]);
    assert_eq!(plan.steps[1].begun, begun(9, 4, 4, true));
    let half = at(gpu(&[(1, "3g.40gb", 4, &["MIG-1"])]));
    assert_eq!(shown(&makes(&both, &half, &[])), ["Make 1g.10gb at 0"]);
    let whole = at(gpu(&[(1, "3g.40gb", 4, &["MIG-1"]), (7, "1g.10gb", 0, &["MIG-2"])]));
    assert_eq!(makes(&both, &whole, &[]), MigPlan::default());
    assert_eq!(makes(&MigOrders::default(), &empty, &[]), MigPlan::default());
}

#[test]
fn an_order_that_cannot_be_is_refused_with_what_is_in_the_way() {
    let there = at(gpu(&[(1, "2g.20gb", 2, &["MIG-1"]), (2, "1g.10gb", 6, &[])]));
    for (order, error) in [
        (("9g.90gb", 0), "the driver has no such profile for this GPU"),
        (("2g.20gb", 1), "an instance of this profile cannot begin at unit 1"),
        (("2g.20gb", u32::MAX), "cannot begin at unit 4294967295"),
        (("3g.40gb", 0), "instance `MIG-1` (2g.20gb at unit 2) has these units"),
        (("1g.10gb", 3), "instance `MIG-1` (2g.20gb at unit 2) has these units"),
        (("1g.10gb", 6), "(1g.10gb at unit 6), which gpupack did not make"),
    ] {
        let plan = makes(&orders(&[order], &[]), &there, &[]);
        assert!(plan.steps.is_empty() && plan.failures.len() == 1, "{plan:?}");
        let obstacle = &plan.failures[0].1;
        assert!(obstacle.error.contains(error), "{plan:?}");
        // A GPU instance without compute instance is in no inventory.
        let hidden = error.contains("did not make").then_some(Units { start: 6, size: 1 });
        assert_eq!(obstacle.hidden, hidden);
    }
    let order = orders(&[("1g.10gb", 0)], &[]);
    let off = GpuLayout { is_in_mig_mode: false, ..gpu(&[]) };
    assert_eq!(shown(&makes(&order, &at(off), &[])), ["1g.10gb: the GPU is not in MIG mode"]);
    let none = Layouts::default();
    assert!(shown(&makes(&order, &none, &[]))[0].contains("no such GPU"));
    let unread = BTreeMap::from([("GPU-a".to_owned(), "no permission".to_owned())]);
    let mute = Layouts { unread, ..none };
    assert_eq!(shown(&makes(&order, &mute, &[])), ["1g.10gb: no permission"]);
}

#[test]
fn only_what_is_ordered_to_go_is_removed() {
    let there = at(gpu(&[
        (1, "2g.20gb", 2, &["MIG-1"]),
        (2, "1g.10gb", 6, &["MIG-2"]),
        (3, "1g.10gb", 0, &[]),
        (4, "3g.40gb", 4, &["MIG-4a", "MIG-4b"]),
    ]));
    let plan = removals(&orders(&[], &["MIG-2", "MIG-gone"]), &there, &[]);
    assert_eq!(shown(&plan), ["Remove(2) 1g.10gb at 6"]);
    assert_eq!(plan.steps[0].order.wish, Wish::Gone("MIG-2".to_owned()));
    assert_eq!(plan.steps[0].begun, begun(19, 6, 1, false));
    assert_eq!(removals(&MigOrders::default(), &there, &[]), MigPlan::default());
    let both = orders(&[("1g.10gb", 6)], &["MIG-2"]);
    assert_eq!(removals(&both, &there, &[]), MigPlan::default(), "it is to be there");
    let part = removals(&orders(&[], &["MIG-4a"]), &there, &[]);
    assert!(part.steps.is_empty() && part.failures[0].1.error.contains("other compute instances"));
    let all = removals(&orders(&[], &["MIG-4b", "MIG-4a"]), &there, &[]);
    assert_eq!(shown(&all), ["Remove(4) 3g.40gb at 4"]);
}

#[test]
fn what_a_crash_left_is_completed_if_it_is_ordered_and_else_removed() {
    let there = at(gpu(&[(3, "1g.10gb", 0, &[])]));
    let left = [begun(19, 0, 1, true)];
    let ordered = orders(&[("1g.10gb", 0)], &[]);
    assert_eq!(removals(&ordered, &there, &left), MigPlan::default());
    assert_eq!(shown(&makes(&ordered, &there, &left)), ["Complete(3) 1g.10gb at 0"]);
    let none = MigOrders::default();
    assert_eq!(shown(&removals(&none, &there, &left)), ["Remove(3) 1g.10gb at 0"]);
    let cleared = &removals(&none, &there, &left).steps[0].order;
    assert_eq!(cleared.failed("e".to_owned(), None), None, "it is no order");
    // What is there is not what was begun.
    for other in [begun(20, 0, 1, true), begun(19, 1, 1, true), begun(19, 0, 2, true)] {
        assert_eq!(removals(&none, &there, &[other]), MigPlan::default());
    }
    let full = at(gpu(&[(3, "1g.10gb", 0, &["MIG-3"])]));
    assert_eq!(removals(&none, &full, &left), MigPlan::default(), "it is whole");
}

#[test]
fn an_instance_without_device_nodes_fails_its_order_and_is_removed_when_that_ends() {
    let slot = Units { start: 2, size: 2 };
    let error = "no node".to_owned();
    let devices = vec!["MIG-new".to_owned()];
    let nodeless = vec![Nodeless { gpu: "GPU-a".to_owned(), slot, devices, error: error.clone() }];
    let layouts = Layouts { nodeless, ..at(gpu(&[(5, "2g.20gb", 2, &[])])) };
    let begun = Unfinished { gpu: "GPU-a".to_owned(), profile: 14, slot, is_new: true };
    for wanted in [place("2g.20gb", 2), place("1g.10gb", 3)] {
        let orders = MigOrders { make: vec![wanted.clone()], ..MigOrders::default() };
        let plan = makes(&orders, &layouts, std::slice::from_ref(&begun));
        let obstacle = Obstacle { error: error.clone(), hidden: Some(slot) };
        assert_eq!(plan.failures, [(MigOrder::to_make(wanted), obstacle)]);
        assert!(plan.steps.is_empty(), "it has a compute instance: nothing completes it");
    }
    let plan = removals(&MigOrders::default(), &layouts, &[begun]);
    assert_eq!(plan.steps.len(), 1);
    assert_eq!(plan.steps[0].work, Work::Remove(5));
    assert_eq!(plan.steps[0].devices, ["MIG-new"], "that one, and no other");
    assert!(plan.steps[0].begun.is_new, "until it is gone, it is not ready");
}
