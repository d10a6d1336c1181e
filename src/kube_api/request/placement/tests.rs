use proptest::prelude::*;

use super::*;

fn node() -> NodeName {
    NodeName::new("n1")
}

fn placement(devices: &[(&str, u64, u64)]) -> Placement {
    let device = |(id, mib, share): &(&str, u64, u64)| {
        let wire = WireDevice { id: (*id).to_owned(), mib: *mib, share: *share, mig: None };
        placed_device(&wire).unwrap()
    };
    Placement {
        node: node(),
        devices: devices.iter().map(device).collect(),
        isolation: ConfiguredIsolation::None,
        guest: None,
        spots: Vec::new(),
    }
}

fn keys(devices: &str, json: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(DEVICES, devices), (PLACEMENT, json)].map(|(k, v)| (k.into(), v.into())))
}

#[test]
fn the_written_form_is_stable() {
    let keys = encode(&placement(&[("GPU-a", 40_660, 500_000), ("GPU-b", 1, 0)])).unwrap();
    assert_eq!(keys[DEVICES], "runtime.nvidia.com/gpu=GPU-a,runtime.nvidia.com/gpu=GPU-b");
    assert_eq!((keys[UUIDS].as_str(), keys[MEMORY_MIB].as_str()), ("GPU-a,GPU-b", "1"));
    assert_eq!(
        keys[PLACEMENT],
        r#"{"v":1,"devices":[{"id":"GPU-a","mib":40660,"share":500000},{"id":"GPU-b","mib":1,"share":0}],"isolation":"none"}"#
    );
}

#[test]
fn a_guest_is_written_where_it_runs_and_read_back_at_home() {
    let on = |id: &str| DeviceId::new(id).unwrap();
    let half = &[("GPU-a", 40_660, 500_000)];
    let guest = Guest { on: on("GPU-b"), spot: None, leaving: None };
    let away = Placement { guest: Some(guest.clone()), ..placement(half) };
    let keys = encode(&away).unwrap();
    assert_eq!(
        (keys[DEVICES].as_str(), keys[UUIDS].as_str()),
        ("runtime.nvidia.com/gpu=GPU-b", "GPU-b")
    );
    assert_eq!(
        keys[PLACEMENT],
        r#"{"v":1,"devices":[{"id":"GPU-b","mib":40660,"share":500000}],"isolation":"none","home":["GPU-a"]}"#
    );
    assert_eq!(decode(&keys, &node()).unwrap(), Some(away));
    let leaving = Some(MoveHome { container: "containerd://c1".into(), cpu_milli: 10 });
    let moved = Placement { guest: Some(Guest { leaving, ..guest }), ..placement(half) };
    let keys = encode(&moved).unwrap();
    assert_eq!(keys[UUIDS], "GPU-a");
    assert_eq!(
        keys[PLACEMENT],
        r#"{"v":1,"devices":[{"id":"GPU-a","mib":40660,"share":500000}],"isolation":"none","moved":{"from":["GPU-b"],"container":"containerd://c1","cpu_milli":10}}"#
    );
    assert_eq!(decode(&keys, &node()).unwrap(), Some(moved));
    assert!(!has_unknown_fields(&keys[PLACEMENT]));
}

#[test]
fn guests_that_cannot_be_are_not_trusted() {
    let two = r#"[{"id":"GPU-a","mib":4,"share":5},{"id":"GPU-b","mib":4,"share":5}]"#;
    let one = r#"[{"id":"GPU-a","mib":4,"share":5}]"#;
    let moved = r#""moved":{"from":["GPU-b"],"container":"c","cpu_milli":1}"#;
    for (devices, field, label) in [
        (one, r#""home":["GPU-a"]"#, "twice"),
        (one, r#""home":["x y"]"#, "device_id"),
        (one, r#""home":[]"#, "guest"),
        (one, r#""home":["GPU-b","GPU-c"]"#, "guest"),
        (two, r#""home":["GPU-c"]"#, "guest"),
        (two, moved, "guest"),
        (one, r#""moved":{"from":[],"container":"c","cpu_milli":1}"#, "guest"),
        (one, r#""moved":{"from":["GPU-a"],"container":"c","cpu_milli":1}"#, "twice"),
        (one, r#""moved":{"from":["GPU-b"],"container":"c","cpu_milli":-1}"#, "json"),
        (one, r#""moved":[]"#, "json"),
    ] {
        let json = format!(r#"{{"v":1,"devices":{devices},{field}}}"#);
        let keys = BTreeMap::from([(PLACEMENT.to_owned(), json)]);
        let error = decode(&keys, &node()).unwrap_err();
        assert_eq!(error.label(), label, "{field}: {error}");
    }
}

#[test]
fn unknown_fields_of_newer_writers_are_ignored() {
    let json = r#"{"v":1,"runs_on":["GPU-c"],"devices":[{"id":"GPU-a","mib":4,"share":5,"x":{}}],"isolation":"vault"}"#;
    let read = decode(&keys("runtime.nvidia.com/gpu=GPU-a", json), &node()).unwrap().unwrap();
    assert_eq!(read, placement(&[("GPU-a", 4, 5)]));
    assert!(has_unknown_fields(json) && has_unknown_fields("{") && has_unknown_fields("{} {}"));
    for (json, is_unknown) in [
        (r#"{"v":1,"devices":[{"id":"GPU-a","mib":4,"share":5}],"isolation":"vault"}"#, false),
        (r#"{"v":1,"devices":[{"id":"GPU-a","mib":4,"share":5,"x":{}}]}"#, true),
        (r#"{"v":1,"devices":[],"moved":{"from":[],"container":"","cpu_milli":1,"x":1}}"#, true),
        (r#"{"v":1,"devices":[],"guest_mig":{"gpu":"","profile":"","start":0}}"#, false),
        (r#"{"v":1,"devices":[],"guest_mig":{"gpu":"","profile":"","start":0,"x":null}}"#, true),
    ] {
        assert_eq!(has_unknown_fields(json), is_unknown, "{json}");
    }
}

#[test]
fn the_amounts_count_whatever_the_isolation_is() {
    use ConfiguredIsolation::{Driver, Hardware, Mps, None};
    for (fields, isolation) in [
        (r#""isolation":"mps""#, Mps),
        (r#""protection":"driver""#, Driver),
        (r#""isolation":"hardware","protection":"hardware""#, Hardware),
        (r#""isolation":"hardware","protection":"mps""#, Mps),
        (r#""isolation":"mps","protection":"driver""#, Mps),
        (r#""isolation":null,"protection":"driver""#, None),
        (r#""isolation":"driver","protection":{"a":[]}"#, None),
        (r#""isolation":5"#, None),
        (r#""isolation":null"#, None),
        (r#""isolation":"Hardware""#, None),
        (r#""isolation":{"hardware":null}"#, None),
        (r#""isolation":["hardware"]"#, None),
        (r#""x":1"#, None),
    ] {
        let json = format!(r#"{{"v":1,"devices":[{{"id":"GPU-a","mib":4,"share":5}}],{fields}}}"#);
        let read = decode(&keys("runtime.nvidia.com/gpu=GPU-a", &json), &node()).expect(fields);
        let expected = Placement { isolation, ..placement(&[("GPU-a", 4, 5)]) };
        assert_eq!(read, Some(expected), "{fields}");
    }
}

#[test]
fn impossible_values_are_rejected() {
    let a = "runtime.nvidia.com/gpu=GPU-a";
    let device = |json: &str| format!(r#"{{"v":1,"devices":[{json}],"isolation":"none"}}"#);
    let good = r#"{"id":"GPU-a","mib":4,"share":5}"#;
    let many = vec![good; 65].join(",");
    for (devices, json, label) in [
        (a, device(r#"{"id":"GPU-a","mib":16777217,"share":5}"#), "amount"),
        (a, device(r#"{"id":"GPU-a","mib":4,"share":1000001}"#), "amount"),
        (a, device(r#"{"id":"GPU-a","mib":0,"share":0}"#), "amount"),
        (a, device(r#"{"id":"GPU-a","mib":-1,"share":0}"#), "json"),
        (a, device(r#"{"id":"GPU-a","mib":1e3,"share":0}"#), "json"),
        (a, device(r#"{"id":"GPU,a","mib":1,"share":0}"#), "device_id"),
        (a, device(&format!("{good},{good}")), "twice"),
        (a, device(&many), "count"),
        ("", device(""), "count"),
        ("runtime.nvidia.com/gpu=GPU-b", device(good), "disagreement"),
        ("GPU-a", device(good), "disagreement"),
        (a, r#"{"v":2,"place":7}"#.to_owned(), "version"),
        (a, r#"{"v":18446744073709551616}"#.to_owned(), "json"),
        (a, "[".repeat(10_000), "json"),
        (a, "[".repeat(40_000), "too_long"),
        (a, "null".to_owned(), "json"),
        (a, r#"[1,[{"id":"GPU-a","mib":4,"share":5}],"none"]"#.to_owned(), "json"),
        (a, device(r#"["GPU-a",4,5]"#), "json"),
        (a, r#"{"v":1,"devices":null}"#.to_owned(), "json"),
        (a, format!(r#"{{"v":1,"devices":[{good}],"devices":[{good}]}}"#), "json"),
    ] {
        let error = decode(&keys(devices, &json), &node()).expect_err(&json);
        assert_eq!(error.label(), label, "{error}");
    }
    let half = BTreeMap::from([(DEVICES.to_owned(), a.to_owned())]);
    assert_eq!(decode(&half, &node()).unwrap_err().label(), "incomplete");
    assert_eq!(decode(&BTreeMap::new(), &node()), Ok(None));
    assert_eq!(encode(&placement(&[])).unwrap_err().label(), "count");
}

#[test]
fn reserved_keys_are_rejected_except_the_fence() {
    let refused = |keys: &[&str]| {
        let keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
        refuse_reserved_keys(&keys).err().map(|error| error.to_string())
    };
    assert_eq!(refused(&["app", FENCE, OLD_FENCE, HOLD, "gpu-fraction"]), None);
    assert!(refused(&["app", DEVICES]).unwrap().contains("`placed.gpupack.dev/devices`"));
    assert!(refused(&["placed.gpupack.dev/"]).is_some());
}

prop_compose! {
    fn any_placement()(
        amounts in proptest::collection::vec((0..=MAX_DEVICE_MEMORY.mib(), 1..=1_000_000_u64), 1..=64),
        isolation in proptest::sample::select(vec![
            ConfiguredIsolation::None, ConfiguredIsolation::Mps, ConfiguredIsolation::Driver, ConfiguredIsolation::Hardware,
        ]),
        tail in "[A-Za-z0-9/-]{1,80}",
        moved in proptest::option::of(proptest::option::of(("[ -~]{0,80}", 0_u64..9))),
    ) -> Placement {
        let id = |i: usize| DeviceId::new(&format!("GPU-{i}-{tail}")).unwrap();
        let demand = |(mib, share)| {
            Demand { memory: MemMib::new(mib), share: Share::from_millionths(share) }
        };
        let leaving =
            |(container, cpu_milli): (String, u64)| MoveHome { container: container.into(), cpu_milli };
        let is_one = amounts.len() == 1;
        let guest = moved.filter(|_| is_one);
        let spot = |at: usize| Spot {
            gpu: id(100 + at),
            profile: MigProfile::new("1g.10gb+me"),
            start: u32::try_from(at % 8).unwrap(),
        };
        let is_made = |at: usize| amounts[at].0 % 3 == 0;
        let guest = guest.map(|moved| {
            let spot = is_made(0).then(|| spot(1));
            Guest { on: id(1), spot, leaving: moved.map(leaving) }
        });
        let mut spots: Vec<_> =
            (0..amounts.len()).map(|at| is_made(at).then(|| spot(at))).collect();
        if spots.iter().all(Option::is_none) {
            spots.clear();
        }
        Placement {
            node: node(),
            devices: amounts
                .into_iter()
                .enumerate()
                .map(|(i, amount)| PlacedDevice { id: id(i), demand: demand(amount) })
                .collect(),
            isolation,
            guest,
            spots,
        }
    }
}

proptest! {
    #[test]
    fn what_is_written_reads_back_the_same(placement in any_placement()) {
        let keys = encode(&placement).unwrap();
        prop_assert_eq!(decode(&keys, &node()), Ok(Some(placement)));
    }

    #[test]
    fn no_text_makes_the_reader_panic(devices in ".{0,40}", json in ".{0,60}|\\{\"v\":1,\"devices\":\\[.{0,40}\\]\\}") {
        prop_assert!(decode(&keys(&devices, &json), &node()).is_err());
    }
}

#[test]
fn the_amounts_alone_are_enough_for_a_reservation() {
    let placement = r#"{"v":1,"devices":[{"id":"GPU-a","mib":10,"share":20}]}"#;
    let annotations = BTreeMap::from([(PLACEMENT.to_owned(), placement.to_owned())]);
    let read = decode(&annotations, &NodeName::new("n")).unwrap().unwrap();
    assert_eq!(read.devices[0].demand.memory.mib(), 10);
    let devices = BTreeMap::from([(DEVICES.to_owned(), "runtime.nvidia.com/gpu=GPU-a".to_owned())]);
    assert!(decode(&devices, &NodeName::new("n")).is_err(), "without amounts nothing is reserved");
}

#[test]
fn a_fence_names_its_process() {
    let (earlier, later) = (FenceWriter::new(1_700_000_000, 9), FenceWriter::new(1_700_000_001, 7));
    assert_eq!(FenceWriter::of(&earlier.value("start-7")), earlier);
    assert!(earlier < later && earlier != FenceWriter::new(1_700_000_000, 8));
    for value in
        ["", " ", "requeue-1-2", "1-2", "1-x y", "-1-2 x", "11111111111111111-1 x", "é-é é"]
    {
        assert!(FenceWriter::of(value) < earlier, "{value}");
    }
}

#[test]
fn a_pod_that_moves_to_another_mig_instance_has_both() {
    let spot = |gpu: &str, start| Spot {
        gpu: DeviceId::new(gpu).unwrap(),
        profile: MigProfile::new("1g.6gb"),
        start,
    };
    let (here, there) = (spot("GPU-a", 0), spot("GPU-b", 3));
    let on = DeviceId::new("MIG-2").unwrap();
    let mut moving = Placement {
        spots: vec![Some(here)],
        guest: Some(Guest { on, spot: Some(there.clone()), leaving: None }),
        ..placement(&[("MIG-1", 5_952, 1_000_000)])
    };
    let written = encode(&moving).unwrap();
    assert!(
        written[PLACEMENT].contains(r#""guest_mig":{"gpu":"GPU-b","profile":"1g.6gb","start":3}"#)
    );
    assert_eq!(written[DEVICES], format!("{CDI_KIND}MIG-2"));
    assert_eq!(decode(&written, &node()).unwrap(), Some(moving.clone()));

    // It starts only where an instance is; one that it leaves may be gone.
    let guest = moving.guest.as_mut().unwrap();
    guest.on = there.id().unwrap();
    assert_eq!(encode(&moving), Err(PlacementError::NotMade));
    let leaving = MoveHome { container: "c1".into(), cpu_milli: 1 };
    moving.guest.as_mut().unwrap().leaving = Some(leaving);
    assert_eq!(decode(&encode(&moving).unwrap(), &node()).unwrap(), Some(moving.clone()));
    moving.devices[0].id = spot("GPU-a", 0).id().unwrap();
    assert_eq!(encode(&moving), Err(PlacementError::NotMade));

    for bad in [
        r#"{"gpu":"","profile":"1g.6gb","start":3}"#,
        r#"{"gpu":"GPU-b","profile":"","start":3}"#,
        "7",
    ] {
        let mut edited = written.clone();
        let text =
            edited[PLACEMENT].replace(r#"{"gpu":"GPU-b","profile":"1g.6gb","start":3}"#, bad);
        edited.insert(PLACEMENT.to_owned(), text);
        assert!(decode(&edited, &node()).is_err(), "{bad}");
    }
}
