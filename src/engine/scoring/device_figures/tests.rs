use super::*;
use crate::scoring::fragmentation::PackingSums;
use crate::scoring::node_fixture;

fn figures(node: &str, mix: &str) -> Vec<(ModelName, DeviceFigures)> {
    let (node, classes) = node_fixture::node(node);
    DeviceFigures::of(&node, &node_fixture::compiled(mix, &node, &classes))
}

#[test]
fn the_parts_add_up_to_capacity_and_the_states_to_all_devices() {
    let text = "A:500/1000 B:0/1000 C:1000/1000 D!:300/1000 E:200/2000@T4 F:900/1000,0";
    let all = figures(text, "1 fraction=0.5; 1 whole");
    let names: Vec<&str> = all.iter().map(|(model, _)| model.as_str()).collect();
    assert_eq!(names, ["GPU", "T4"]);
    let gpu = &all[0].1;
    assert_eq!(gpu.devices, [1, 1, 2, 1, 0, 0], "C is empty, A shared, B and F full, D unhealthy");
    let ShareParts { allocated, stranded, free, unavailable } = gpu.share;
    let shares = [allocated, stranded, free, unavailable].map(Share::millionths);
    // a whole GPU cannot use what is left of A: half of the requests lose it
    assert_eq!(shares, [3_200_000, 250_000, 1_250_000, 300_000]);
    assert_eq!((gpu.largest_share, gpu.largest_memory), (Share::WHOLE, MemMib::new(1_000)));
    assert_eq!(gpu.by_free_share, [2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]);
    assert_eq!(gpu.by_tenants, [1, 3, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(all[1].1.devices, [0, 1, 0, 0, 0, 0]);
}

#[test]
fn ratios_are_those_of_the_whole_node() {
    let mix = "4 fraction=0.3; 3 fraction=0.5; 2 whole; 1 cpu=1000";
    for text in ["A:500/1000 B:200/1000", "A:1000/1000 B:0/1000 C:700/1000,0.1", "A:5/1000@T4", ""]
    {
        let mut sum = DeviceFigures::default();
        figures(text, mix).iter().for_each(|(_, figures)| sum.add(figures));
        let (node, classes) = node_fixture::node(text);
        let packing = PackingSums::of(&node, &node_fixture::compiled(mix, &node, &classes));
        let (occupied, fullness) = sum.occupied;
        let efficiency = fullness.checked_div(occupied).unwrap_or(0);
        assert_eq!(efficiency, packing.efficiency().millionths(), "{text}");
        let (stranded, free) = (sum.share.stranded.millionths(), sum.share.free.millionths());
        let fragmentation = (stranded * 1_000_000).checked_div(stranded + free).unwrap_or(0);
        let apart = fragmentation.abs_diff(packing.fragmentation().millionths());
        assert!(apart <= 10, "{text}: rounded device by device");
        assert_eq!(sum.share.allocated, packing.allocated_share, "{text}");
    }
}

#[test]
fn room_is_reported_for_each_size() {
    let text = "A:20000/40000 B:3000/40000 C:40000/40000,0.3";
    let all = figures(text, "");
    let room = |name: &str| {
        let at = SIZES.iter().position(|size| size.name == name).unwrap();
        (all[0].1.room[at].fitting, all[0].1.room[at].stranded.mib())
    };
    assert_eq!(room("0.25"), (3, 3_000), "two on A, one on C");
    assert_eq!(room("1"), (0, 63_000));
    assert_eq!(room("4GiB"), (4 + 2, 3_000), "C has little share beside its memory");
    assert_eq!(room("80GiB"), (0, 63_000), "more than any of them has");
}

#[test]
fn requests_have_the_name_of_the_smallest_size_that_holds_them() {
    for (request, name) in [
        ("fraction=0.1", "0.1"),
        ("fraction=0.11", "0.25"),
        ("fraction=0.25 count=2", "0.5"),
        ("whole", "1"),
        ("fraction=0.6 count=2", "2"),
        ("whole count=8", "8"),
        ("whole count=9", "more"),
        ("memory=1024", "1GiB"),
        ("memory=1025", "2GiB"),
        ("memory=999999", "moreGiB"),
        ("mig=1g.5gb", "mig"),
        ("slot", "slot"),
    ] {
        assert_eq!(Size::of(&node_fixture::request(request).0.unwrap()), name, "{request}");
    }
    let names = SIZES.iter().map(|size| size.name).chain(OTHER_SIZES);
    assert_eq!(names.collect::<std::collections::BTreeSet<_>>().len(), 20, "no name twice");
}
