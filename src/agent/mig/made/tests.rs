use super::*;

fn work(start: u32, is_new: bool) -> Unfinished {
    let slot = Units { start, size: 1 };
    Unfinished { gpu: "GPU-a".to_owned(), profile: 19, slot, is_new }
}

/// A GPU with instances of one unit: first unit and UUIDs.
fn layout(instances: &[(u32, &[&str])]) -> [GpuLayout; 1] {
    let instance = |(start, devices): &(u32, &[&str])| GpuInstance {
        id: start + 7,
        profile: 19,
        slot: Units { start: *start, size: 1 },
        devices: devices.iter().map(|uuid| (*uuid).to_owned()).collect(),
    };
    let instances = instances.iter().map(instance).collect();
    [GpuLayout {
        uuid: "GPU-a".to_owned(),
        is_in_mig_mode: true,
        instances,
        ..GpuLayout::default()
    }]
}

fn instance(uuid: &str, start: u32) -> DeviceReport {
    DeviceReport {
        parent: Some("GPU-a".to_owned()),
        mig_placement: Some(MigPlacement { start, size: 1 }),
        ..DeviceReport::new(uuid.to_owned(), 0, "M".to_owned(), DeviceKind::MigInstance)
    }
}

fn boot(number: u32) -> Option<String> {
    Some(format!("boot-{number}"))
}

#[test]
fn an_instance_is_known_as_made_here_from_its_beginning_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("mig");
    let mut made = MadeInstances::read(&folder, boot(1));
    assert!(!made.has_made(&instance("MIG-1", 3)));
    made.begin(work(3, true)).unwrap();
    assert!(made.has_made(&instance("MIG-1", 3)), "a sample may see it before it is noted");
    assert!(!made.has_made(&instance("MIG-2", 2)));
    assert!(made.is_making(&instance("MIG-1", 3)) && !made.is_making(&instance("MIG-2", 2)));
    let seen = layout(&[(3, &["MIG-1"]), (2, &["MIG-2"]), (4, &[])]);
    let standing = |made: &MadeInstances| {
        seen[0].instances.iter().map(|it| made.standing(&seen[0], it)).collect::<Vec<_>>()
    };
    assert_eq!(standing(&made), [Standing::New, Standing::Other, Standing::Other]);
    made.settle(&layout(&[(3, &["MIG-1"]), (2, &["MIG-2"])])).unwrap();
    assert_eq!(made.unfinished(), []);
    assert_eq!(standing(&made), [Standing::Made, Standing::Other, Standing::Other]);
    assert!(!made.is_making(&instance("MIG-1", 3)), "it is ready");
    // Another run of the agent.
    let mut made = MadeInstances::read(&folder, boot(1));
    assert!(made.has_made(&instance("MIG-1", 3)) && !made.has_made(&instance("MIG-2", 2)));
    made.begin(work(3, false)).unwrap();
    made.settle(&layout(&[(3, &["MIG-1"])])).unwrap();
    assert!(made.has_made(&instance("MIG-1", 3)), "the removal was refused");
    made.begin(work(3, false)).unwrap();
    made.settle(&layout(&[])).unwrap();
    assert!(!made.has_made(&instance("MIG-1", 3)));
    assert_eq!(MadeInstances::read(&folder, boot(1)).content, made.content);
}

#[test]
fn an_instance_that_others_made_at_that_moment_is_theirs_and_no_order_removes_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut made = MadeInstances::read(folder.path(), None);
    made.begin(work(3, true)).unwrap();
    made.begin(work(4, true)).unwrap();
    let there = layout(&[(3, &["MIG-3"]), (4, &["MIG-4"]), (5, &["MIG-5"])]);
    made.refused(&work(3, true), &there[0]);
    made.settle(&there).unwrap();
    assert!(!made.has_made(&instance("MIG-3", 3)) && made.has_made(&instance("MIG-4", 4)));
    let remove = ["MIG-3", "MIG-4", "MIG-5"].map(str::to_owned).into();
    let orders = MigOrders { term: 7, remove, ..MigOrders::default() };
    let own = made.own(&orders);
    assert_eq!((own.term, own.remove), (7, vec!["MIG-4".to_owned()]));
    // A part of it that a refused call left is still its own.
    made.begin(work(6, true)).unwrap();
    let part = layout(&[(6, &[])]);
    made.refused(&work(6, true), &part[0]);
    assert_eq!(made.unfinished(), [work(6, true)]);
}

#[test]
fn what_a_crash_left_stays_noted_until_it_is_settled() {
    let folder = tempfile::tempdir().unwrap();
    let mut made = MadeInstances::read(folder.path(), None);
    made.begin(work(3, true)).unwrap();
    made.begin(work(4, true)).unwrap();
    made.begin(work(5, true)).unwrap();
    let mut made = MadeInstances::read(folder.path(), None);
    made.settle(&[]).unwrap();
    assert_eq!(made.unfinished().len(), 3, "the GPU did not answer");
    // Nothing at 3, a part of it at 4, and at 5 it is whole.
    made.settle(&layout(&[(4, &[]), (5, &["MIG-5"])])).unwrap();
    assert_eq!(made.unfinished(), [work(4, true)]);
    assert!(made.has_made(&instance("MIG-5", 5)));
}

#[test]
fn another_boot_or_a_damaged_file_is_an_empty_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut made = MadeInstances::read(folder.path(), boot(1));
    made.begin(work(3, true)).unwrap();
    made.settle(&layout(&[(3, &["MIG-1"])])).unwrap();
    assert!(!MadeInstances::read(folder.path(), boot(2)).has_made(&instance("MIG-1", 3)));
    assert!(!MadeInstances::read(folder.path(), None).has_made(&instance("MIG-1", 3)));
    let many: BTreeMap<String, String> =
        (0..449).map(|n| (format!("MIG-{n}"), "GPU-a".to_owned())).collect();
    let many = Content { made: many, ..Content::default() };
    let many = serde_json::to_string(&many).unwrap();
    let long = format!("{}{{}}", " ".repeat(300 << 10));
    for damaged in ["", "{", "[]", "{\"made\":3}", "\u{0}\u{0}", &many, &long] {
        std::fs::write(folder.path().join(FILE), damaged).unwrap();
        let mut made = MadeInstances::read(folder.path(), None);
        assert_eq!(made.content, Content::default(), "{damaged:.20}");
        made.begin(work(1, true)).unwrap();
        assert_eq!(MadeInstances::read(folder.path(), None).unfinished(), [work(1, true)]);
    }
}

#[test]
fn an_instance_that_is_gone_is_forgotten_and_a_younger_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut made = MadeInstances::read(folder.path(), None);
    let gpu = DeviceReport::new("GPU-a".to_owned(), 0, "M".to_owned(), DeviceKind::MigParent);
    let begun_at = made.changes();
    made.begin(work(3, true)).unwrap();
    made.settle(&layout(&[(3, &["MIG-1"])])).unwrap();
    made.forget_absent(std::slice::from_ref(&gpu), begun_at);
    assert!(made.has_made(&instance("MIG-1", 3)), "the sample began before it was made");
    made.begin(work(5, true)).unwrap();
    made.forget_absent(std::slice::from_ref(&gpu), made.changes());
    assert!(made.has_made(&instance("MIG-1", 3)), "the sample is of the time of a change");
    made.settle(&layout(&[(3, &["MIG-1"])])).unwrap();
    made.forget_absent(&[], made.changes());
    made.forget_absent(&[gpu.clone(), instance("MIG-1", 3)], made.changes());
    assert!(made.has_made(&instance("MIG-1", 3)), "its GPU is not there, or both are");
    made.forget_absent(&[gpu], made.changes());
    assert!(!made.has_made(&instance("MIG-1", 3)), "a reset of the GPU took it");
}

#[test]
fn nothing_is_noted_where_the_file_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let mut made = MadeInstances::read(&file, None);
    assert!(made.begin(work(3, true)).is_err());
    assert_eq!(made.unfinished(), []);
}

/// The driver derives the UUID from the numbers of an instance, which the next one on its units gets.
#[test]
fn an_instance_of_others_with_the_uuid_of_an_earlier_one_is_theirs() {
    let folder = tempfile::tempdir().unwrap();
    let mut made = MadeInstances::read(folder.path(), None);
    let begin = |made: &mut MadeInstances| {
        made.begin(work(3, true)).unwrap();
        made.settle(&layout(&[(3, &["MIG-1"])])).unwrap();
        assert!(made.has_made(&instance("MIG-1", 3)) && !made.has_made(&instance("MIG-1", 4)));
    };
    let remove = vec!["MIG-1".to_owned()];
    let orders = MigOrders { remove: remove.clone(), ..MigOrders::default() };
    begin(&mut made);
    made.settle(&layout(&[(3, &["MIG-1"])])).unwrap();
    assert_eq!(made.own(&orders).remove, remove);
    made.settle(&layout(&[(4, &["MIG-1"])])).unwrap();
    assert!(made.own(&orders).remove.is_empty() && made.content.places.is_empty());
    begin(&mut made);
    let mut other = layout(&[(3, &["MIG-1"])]);
    other[0].instances[0].profile = 20;
    made.settle(&other).unwrap();
    assert!(made.own(&orders).remove.is_empty(), "with the media engines");
    begin(&mut made);
    let gpu = DeviceReport::new("GPU-a".to_owned(), 0, "M".to_owned(), DeviceKind::MigParent);
    made.forget_absent(&[gpu, instance("MIG-1", 4)], made.changes());
    assert!(made.own(&orders).remove.is_empty());
    // The list of an earlier version says no more than the UUID.
    std::fs::write(
        folder.path().join(FILE),
        r#"{"boot": null, "made": {"MIG-1": "GPU-a"}, "unfinished": []}"#,
    )
    .unwrap();
    let made = MadeInstances::read(folder.path(), None);
    assert_eq!(made.own(&orders).remove, remove);
}

#[test]
fn what_others_made_is_taken_over_and_known_after_a_restart() {
    let none = BTreeSet::new();
    let folder = tempfile::tempdir().unwrap();
    let mut made = MadeInstances::read(folder.path(), boot(1));
    made.begin(work(1, true)).unwrap();
    let there = layout(&[(0, &["MIG-0"]), (1, &[]), (2, &[]), (3, &["MIG-3", "MIG-4"])]);
    assert_eq!(made.adopt(&there, &none).unwrap(), 4, "three instances, and the half at unit 2");
    assert_eq!(made.adopt(&there, &none).unwrap(), 0);
    assert_eq!(made.unfinished(), [work(1, true), work(2, false)]);
    let made = MadeInstances::read(folder.path(), boot(1));
    for (uuid, start) in [("MIG-0", 0), ("MIG-3", 3), ("MIG-4", 3)] {
        assert!(made.has_made(&instance(uuid, start)), "{uuid}");
    }
    let mut outside = layout(&[(0, &["MIG-0"])]);
    outside[0].is_in_mig_mode = false;
    let mut made = MadeInstances::read(folder.path(), boot(2));
    assert_eq!(made.adopt(&outside, &none).unwrap(), 0);
    // Never more than the list may have.
    let names: Vec<String> = (0..=MAX_INSTANCES).map(|number| format!("MIG-{number}")).collect();
    let mut many = layout(&[]);
    many[0].instances = names
        .iter()
        .map(|name| GpuInstance {
            id: 0,
            profile: 19,
            slot: Units { start: 0, size: 1 },
            devices: vec![name.clone()],
        })
        .collect();
    assert!(made.adopt(&many, &none).unwrap() < MAX_INSTANCES);
}

#[test]
fn what_kubelet_hands_out_is_not_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let mut made = MadeInstances::read(folder.path(), boot(1));
    let there = layout(&[(0, &["MIG-0"]), (3, &["MIG-3"])]);
    let of_kubelet = BTreeSet::from(["MIG-3".to_owned()]);
    assert_eq!(made.adopt(&there, &of_kubelet).unwrap(), 1);
    let has_made = |uuid, start| made.has_made(&instance(uuid, start));
    assert_eq!((has_made("MIG-0", 0), has_made("MIG-3", 3)), (true, false));
}
