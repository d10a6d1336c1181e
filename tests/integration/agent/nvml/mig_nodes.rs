//! Device nodes of the MIG instances that the agent makes, on a node that is a folder. Without root no test can make
//! one; those then say so and end.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde_json::json;
use wire::api::condition::DeviceFault;

use super::mig::{Agent, FOREIGN, QUICK, bed, gpu_instances, process_with, scenario};
use crate::harness::agent::bed::Bed;
use crate::harness::agent::orders::Replica;

/// The minor number of the GPU, which is not its index.
const GPU_MINOR: u32 = 3;

/// The major number of the nodes.
const MAJOR: u32 = 510;

/// The minor numbers of the nodes of a GPU instance and of its compute instance, as the driver counts.
fn minors(instance: u32) -> [u32; 2] {
    let first = 3 + (GPU_MINOR * 15 + instance) * 9;
    [first, first + 1]
}

/// A node whose driver shows its instances under `/proc`; `None` where no device node can be made.
fn node() -> Option<Bed> {
    let bed = bed(&scenario());
    let mut playing = scenario();
    playing["gpus"][0]["minor"] = json!(GPU_MINOR);
    playing["proc_root"] = json!(host(&bed, "proc"));
    bed.play(&playing);
    std::fs::create_dir_all(host(&bed, "dev")).unwrap();
    let mode = Mode::from_raw_mode(0o600);
    let tried = mknodat(CWD, bed.path("tried"), FileType::CharacterDevice, mode, makedev(1, 3));
    if tried.is_err() {
        let text =
            b"skipped: device nodes of MIG instances because they cannot be made without root\n";
        let _ = std::io::stderr().write_all(text);
        return None;
    }
    Some(bed)
}

/// A path of the node.
fn host(bed: &Bed, path: &str) -> PathBuf {
    bed.proc_root().join("1/root").join(path)
}

/// Minor numbers of the device nodes in a folder `dev` of the node, ordered.
fn made(bed: &Bed, dev: &str) -> Vec<u32> {
    let entries = std::fs::read_dir(host(bed, dev).join("nvidia-caps")).into_iter().flatten();
    let numbers = entries.flatten().filter_map(|entry| {
        let about = entry.path().symlink_metadata().ok()?;
        let minor = rustix::fs::minor(about.rdev());
        let is_it = about.file_type().is_char_device()
            && rustix::fs::major(about.rdev()) == MAJOR
            && entry.file_name().to_str() == Some(&format!("nvidia-cap{minor}"));
        is_it.then_some(minor)
    });
    let mut numbers: Vec<u32> = numbers.collect();
    numbers.sort_unstable();
    numbers
}

fn caps(bed: &Bed, dev: &str) -> PathBuf {
    host(bed, dev).join("nvidia-caps")
}

fn remove(folder: &Path) {
    std::fs::remove_dir_all(folder).unwrap();
}

const DRIVER_DEV: &str = "run/nvidia/driver/dev";

#[test]
fn an_instance_that_is_made_is_reported_with_its_nodes_in_both_folders() {
    let Some(bed) = node() else { return };
    std::fs::create_dir_all(host(&bed, DRIVER_DEV)).unwrap();
    let replica = Replica::start();
    let _agent = process_with(&bed, &replica, &[]);
    replica.order(1, &[("2g.20gb", 2)], &[]);
    replica.until_instances(&[("2g.20gb", 2, true), FOREIGN]);
    // The first one is of the boot, and of others.
    for dev in ["dev", DRIVER_DEV] {
        assert_eq!(made(&bed, dev), minors(2), "{dev}");
    }
    assert_eq!(replica.failures(), []);
    // An instance that goes leaves its nodes: the next one here has the same.
    let uuid = replica.instances()[0].uuid.clone();
    replica.order(1, &[], &[&uuid]);
    replica.until_instances(&[FOREIGN]);
    assert_eq!(made(&bed, "dev"), minors(2));
}

#[test]
fn an_instance_without_its_nodes_is_not_reported_and_its_order_fails_until_they_are_there() {
    for is_withdrawn in [false, true] {
        let Some(bed) = node() else { return };
        std::fs::create_dir_all(caps(&bed, "dev")).unwrap();
        let in_the_way = caps(&bed, "dev").join(format!("nvidia-cap{}", minors(2)[1]));
        std::fs::write(&in_the_way, "of somebody").unwrap();
        let replica = Replica::start();
        let agent = Agent::start(&bed, &[&replica], QUICK);
        replica.order(1, &[("2g.20gb", 2)], &[]);
        replica.until("the failure", |it| !it.failures().is_empty());
        let failure = replica.failures()[0].clone();
        let path = format!("/dev/nvidia-caps/nvidia-cap{}", minors(2)[1]);
        let named = format!("`{path}` of the node is a file: remove it");
        assert!(failure.error.starts_with(&named), "{}", failure.error);
        let hidden = failure.hidden.expect("no other instance fits there");
        assert_eq!((hidden.start, hidden.size, failure.instance), (2, 2, None));
        assert_eq!((gpu_instances(&bed), replica.shown().len()), (2, 1));
        replica.more_reports(10);
        assert_eq!((replica.failures().len(), replica.shown().len()), (1, 1), "still not");
        // Not by the next run either.
        drop(agent);
        let _agent = Agent::start(&bed, &[&replica], QUICK);
        replica.more_reports(10);
        assert_eq!((replica.failures().len(), replica.shown().len()), (1, 1), "still not");
        assert_eq!(std::fs::read_to_string(&in_the_way).unwrap(), "of somebody");
        if is_withdrawn {
            replica.withdraw();
            replica.until("it is removed", |_| gpu_instances(&bed) == 1);
            replica.until("no failure", |it| it.failures().is_empty());
        } else {
            std::fs::remove_file(&in_the_way).unwrap();
            replica.until_instances(&[("2g.20gb", 2, true), FOREIGN]);
            replica.until("no failure", |it| it.failures().is_empty());
            assert_eq!(made(&bed, "dev"), minors(2));
        }
    }
}

#[test]
fn nodes_come_back_after_restarts_of_the_agent_and_of_the_drivers_container() {
    let Some(bed) = node() else { return };
    let replica = Replica::start();
    let agent = process_with(&bed, &replica, &[]);
    replica.order(1, &[("1g.20gb", 0)], &[]);
    replica.until_instances(&[("1g.20gb", 0, true), FOREIGN]);
    replica.withdraw();
    // The driver's container comes, and comes again. Nothing is ordered.
    for _ in 0..2 {
        std::fs::create_dir_all(host(&bed, DRIVER_DEV)).unwrap();
        replica.until("its nodes", |_| made(&bed, DRIVER_DEV) == minors(2));
        remove(&host(&bed, "run/nvidia/driver"));
    }
    drop(agent);
    remove(&caps(&bed, "dev"));
    let agent = process_with(&bed, &replica, &[]);
    replica.until("the nodes of an instance that is known", |_| made(&bed, "dev") == minors(2));
    drop(agent);
    // What others made gets its own when it is taken over, and not before.
    remove(&caps(&bed, "dev"));
    let _agent = process_with(&bed, &replica, &["--mig-adopt"]);
    let all = [minors(1), minors(2)].concat();
    replica.until("the nodes of what was taken over", |_| made(&bed, "dev") == all);
}

#[test]
fn an_instance_whose_nodes_vanish_has_a_fault_until_they_are_back() {
    let Some(bed) = node() else { return };
    let replica = Replica::start();
    let agent = Agent::start(&bed, &[&replica], QUICK);
    replica.order(1, &[("2g.20gb", 2)], &[]);
    replica.until_instances(&[("2g.20gb", 2, true), FOREIGN]);
    assert_eq!(replica.faulty(), BTreeMap::new());
    // They can be made again: that is no fault.
    remove(&caps(&bed, "dev"));
    replica.until("its nodes", |_| made(&bed, "dev") == minors(2));
    let in_the_way = caps(&bed, "dev").join(format!("nvidia-cap{}", minors(2)[1]));
    std::fs::remove_file(&in_the_way).unwrap();
    std::fs::write(&in_the_way, "of somebody").unwrap();
    let instances = replica.instances();
    let own = instances.iter().find(|it| it.made_here).unwrap().uuid.clone();
    let fault = BTreeMap::from([(own, DeviceFault::NodesMissing)]);
    replica.until("the fault", |it| it.faulty() == fault);
    assert_eq!(replica.instances(), instances, "it is reported all the same");
    // The next run sees it, too, also if nothing is ordered.
    drop(agent);
    replica.withdraw();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.more_reports(2);
    replica.until("the fault", |it| it.faulty() == fault);
    std::fs::remove_file(&in_the_way).unwrap();
    replica.until("no fault", |it| it.faulty().is_empty());
    assert_eq!(made(&bed, "dev"), minors(2));
}
