//! MIG on demand: orders in replies, instances on the stand-in's GPUs, and what is reported of both.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use agent::mig::device_nodes::DeviceNodes;
use agent::mig::on_demand::MigOnDemand;
use agent::node::client::Proof;
use agent::node::config::AgentConfig;
use agent::node::replicas::Resolver;
use agent::node::run::run_node;
use agent::nvml::maker::MigMaker;
use agent::upkeep::condition::Upkeep;
use runtime::clock::Clock;
use serde_json::{Value, json};
use wire::api::state::DeviceKind;

use super::guard::println_figure;
use crate::harness::agent::bed::{Bed, a100, with};
use crate::harness::agent::orders::{Replica, Replies};
use crate::harness::agent::process::AgentProcess;
use crate::harness::turns::turn;

pub(super) const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";
pub(super) const CREATE_COMPUTE: &str = "nvmlGpuInstanceCreateComputeInstance";
pub(super) const DESTROY: &str = "nvmlGpuInstanceDestroy";
pub(super) const DESTROY_COMPUTE: &str = "nvmlComputeInstanceDestroy";

/// A period in which a test sees several reports.
pub(super) const QUICK: Duration = Duration::from_millis(100);

/// An instance of somebody else, there since the boot.
pub(super) const FOREIGN: (&str, u32, bool) = ("1g.10gb", 6, false);

/// A node with one A100 in MIG mode, which has an instance since the boot.
pub(super) fn scenario() -> Value {
    let gpu = with(a100("GPU-a"), "mig", json!([]));
    let gpu = with(with(gpu, "mig_model", json!("A100-80")), "at_boot", json!([["1g.10gb", 6]]));
    json!({"gpus": [gpu], "journal": true})
}

/// The same, with one field of the GPU replaced.
pub(super) fn changed(field: &str, value: Value) -> Value {
    let mut scenario = scenario();
    scenario["gpus"][0][field] = value;
    scenario
}

pub(super) fn bed(scenario: &Value) -> Bed {
    let bed = Bed::new(scenario);
    boot(&bed, "first");
    bed
}

/// The id of the boot that the process table shows.
fn boot(bed: &Bed, id: &str) {
    bed.has_no_device_nodes();
    let folder = bed.proc_root().join("sys/kernel/random");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("boot_id"), format!("{id}\n")).unwrap();
}

/// How often a call was made.
pub(super) fn count(bed: &Bed, symbol: &str) -> usize {
    bed.calls().iter().filter(|call| *call == symbol).count()
}

/// GPU instances that exist, with or without a compute instance.
pub(super) fn gpu_instances(bed: &Bed) -> usize {
    let text = std::fs::read_to_string(bed.path("instances.json")).unwrap();
    let made: Value = serde_json::from_str(&text).unwrap();
    made["gpus"]["GPU-a"].as_array().unwrap().len()
}

/// An agent on threads of its own; they end with it.
pub(super) struct Agent(Option<tokio::runtime::Runtime>);

impl Agent {
    /// One that makes instances. Kubelet hands out nothing.
    pub(super) fn start(bed: &Bed, replicas: &[&Replica], period: Duration) -> Self {
        let mig = MigOnDemand::new(&bed.path("mig"), &bed.proc_root());
        let extenders = replicas.iter().map(|replica| replica.url()).collect();
        let clock = Clock::start();
        let config = AgentConfig {
            extenders,
            proof: Proof::default(),
            resolver: Resolver::default(),
            period,
            clock,
            metrics: None,
            mig: Some(mig.clone()),
            limits: None,
            clearing: None,
            upkeep: Upkeep::default(),
            gate: None,
        };
        let probe = bed.probe().with_mig(mig.clone());
        let (_, kubelets) = tokio::sync::watch::channel(Some(BTreeSet::new()));
        let maker = MigMaker::new(Some(bed.library()), mig, clock, kubelets);
        let maker = maker.with_nodes(DeviceNodes::new(&bed.proc_root(), Vec::new()));
        let threads =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let threads = threads.unwrap();
        threads.spawn(maker.run());
        threads.spawn(async move {
            run_node(&config, "n", probe, std::future::pending()).await.unwrap();
        });
        Self(Some(threads))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.0.take().unwrap().shutdown_timeout(Duration::from_secs(10));
    }
}

/// The agent as it runs on a node, with `--mig-on-demand`.
pub(super) fn process(bed: &Bed, replica: &Replica) -> AgentProcess {
    process_with(bed, replica, &[])
}

/// The same with more flags.
pub(super) fn process_with(bed: &Bed, replica: &Replica, more: &[&str]) -> AgentProcess {
    let folder = bed.path("mig");
    let flags = ["--mig-on-demand", "--period-ms", "100", "--mig-folder"].map(OsStr::new);
    let flags = flags.into_iter().chain([folder.as_os_str()]);
    let flags: Vec<&OsStr> = flags.chain(more.iter().map(OsStr::new)).collect();
    AgentProcess::start_at(bed, &replica.url(), &flags)
}

#[test]
fn an_order_makes_exactly_that_instance_and_it_is_reported_at_once() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let _turn = turn();
    // With so long a period nothing but the change itself brings the report.
    let _agent = Agent::start(&bed, &[&replica], Duration::from_secs(20));
    replica.order(1, &[("2g.20gb", 2)], &[]);
    replica.until_instances(&[("2g.20gb", 2, true), FOREIGN]);
    let took = replica.since_ordered();
    println_figure("order of a MIG instance, until its UUID is reported", took);
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(replica.failures(), []);
    let inventory = replica.inventory();
    let made = inventory.iter().find(|it| it.made_here).unwrap();
    assert_eq!((made.memory_mib, made.sm_count), (19_968, Some(28)));
    assert_eq!(made.mig_placement.unwrap().size, 2);
    let gpu = inventory.iter().find(|it| it.uuid == "GPU-a").unwrap();
    let profiles: Vec<_> =
        gpu.mig_profiles.iter().map(|it| (it.profile.as_str(), it.size, it.starts.len())).collect();
    let expected = [
        ("1g.10gb", 1, 7),
        ("2g.20gb", 2, 3),
        ("3g.40gb", 4, 2),
        ("4g.40gb", 4, 1),
        ("7g.80gb", 8, 1),
        ("1g.10gb+me", 1, 7),
        ("1g.20gb", 2, 4),
    ];
    assert_eq!(profiles, expected);
    assert_eq!(gpu.mig_profiles[2].starts, [0, 4]);
    assert_eq!((gpu.mig_profiles[2].memory_mib, gpu.mig_profiles[2].sm_count), (40_192, Some(42)));
}

/// The header of July 2026 has GPU instance profiles up to 0x11 and compute profiles up to 0x8, later
/// ones will have more.
#[test]
fn profiles_beyond_those_of_the_binding_are_made() {
    let mut newest = changed("mig_model", json!("newest"));
    newest["gpus"][0]["at_boot"] = json!([]);
    let bed = bed(&newest);
    let replica = Replica::start();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.order(1, &[("3g.72gb+gfx", 0)], &[]);
    replica.until_instances(&[("3g.72gb+gfx", 0, true)]);
    assert_eq!(replica.failures(), []);
    let inventory = replica.inventory();
    let gpu = inventory.iter().find(|it| it.uuid == "GPU-a").unwrap();
    let listed: Vec<&str> = gpu.mig_profiles.iter().map(|it| &*it.profile).collect();
    assert_eq!(listed, ["1g.24gb", "7g.96gb", "3g.72gb+gfx"]);
    let made = inventory.iter().find(|it| it.made_here).unwrap().uuid.clone();
    replica.order(1, &[], &[&made]);
    replica.until_instances(&[]);
    replica.order(1, &[("7g.96gb", 0)], &[]);
    // Else its compute instance would be a part of it: `1c.7g.96gb`.
    replica.until_instances(&[("7g.96gb", 0, true)]);
}

/// NVIDIA documents NOT_SUPPORTED for its GPU instances then.
#[test]
fn the_profiles_of_a_gpu_outside_mig_mode_are_listed_without_its_instances() {
    let bed = bed(&changed("mig", json!(null)));
    let listed = bed.probe().listed_mig_profiles().unwrap();
    assert_eq!(listed["GPU-a"].len(), 7, "{listed:?}");
}

/// The next leader may know nothing of it.
#[test]
fn what_a_leader_promised_is_in_each_report_until_another_one_gives_orders() {
    let bed = bed(&scenario());
    let (first, second) = (Replica::start(), Replica::start());
    let _agent = Agent::start(&bed, &[&first, &second], QUICK);
    first.order(5, &[("2g.20gb", 2)], &[]);
    first.promise(&[("u1", "2g.20gb", 2)]);
    let both = |told: &[(u64, String, u32)]| {
        for replica in [&first, &second] {
            replica.until("it is told", |it| it.promised() == told);
        }
    };
    both(&[(5, "u1".to_owned(), 2)]);
    first.until_instances(&[("2g.20gb", 2, true), FOREIGN]);
    assert_eq!(count(&bed, CREATE), 1, "what is promised makes nothing");
    // It is gone. One that led before it does not count.
    first.withdraw();
    second.order(4, &[], &[]);
    second.promise(&[("u2", "2g.20gb", 4)]);
    second.more_reports(10);
    both(&[(5, "u1".to_owned(), 2)]);
    second.order(6, &[], &[]);
    both(&[]);
}

#[test]
fn a_repeated_order_changes_nothing_and_a_removal_takes_only_its_instance() {
    let mut scenario = changed("mig_model", json!("H100-80"));
    scenario["gpus"][0]["name"] = json!("NVIDIA H100 80GB HBM3");
    scenario["gpus"][0]["total_mib"] = json!(81_559);
    let bed = bed(&scenario);
    let replica = Replica::start();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.order(1, &[("1g.10gb+me", 0), ("1g.20gb", 2)], &[]);
    replica.until_instances(&[("1g.10gb+me", 0, true), ("1g.20gb", 2, true), FOREIGN]);
    let before = replica.instances();
    replica.more_reports(15);
    assert_eq!((count(&bed, CREATE), count(&bed, DESTROY)), (2, 0));
    assert_eq!(replica.instances(), before);
    let sms: Vec<_> = replica.inventory().iter().map(|it| it.sm_count).collect();
    assert!(sms.contains(&Some(26)) && sms.contains(&Some(16)), "{sms:?}");
    // To be there and to go: it stays. The other one goes. What others made stays, whatever is ordered.
    let uuid = |start: u32| before.iter().find(|it| it.start == start).unwrap().uuid.clone();
    replica.order(1, &[("1g.20gb", 2)], &[&uuid(0), &uuid(2), "MIG-of-nobody"]);
    replica.until_instances(&[("1g.20gb", 2, true), FOREIGN]);
    replica.order(1, &[], &[&uuid(6)]);
    replica.more_reports(15);
    replica.until_instances(&[("1g.20gb", 2, true), FOREIGN]);
    assert_eq!((replica.failures(), count(&bed, DESTROY)), (Vec::new(), 1));
}

#[test]
fn an_instance_with_a_process_stays_and_the_failure_is_reported_until_it_ends() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.order(1, &[("3g.40gb", 0)], &[]);
    replica.until_instances(&[("3g.40gb", 0, true), FOREIGN]);
    let uuid = replica.instances()[0].uuid.clone();
    let processes = json!({"0": [{"pid": 77, "used_mib": 500, "lists": ["compute"]}]});
    bed.play(&changed("mig_processes", processes));
    replica.order(1, &[], &[&uuid]);
    replica.until("the failure", |it| !it.failures().is_empty());
    let failure = replica.failures()[0].clone();
    assert_eq!(failure.instance.as_deref(), Some(uuid.as_str()));
    assert_eq!((failure.profile.as_str(), failure.start), ("3g.40gb", 0));
    assert_eq!(failure.error, "process 77 uses it");
    assert_eq!((count(&bed, DESTROY_COMPUTE), count(&bed, DESTROY)), (0, 0));
    // The driver sees a client that no list shows.
    bed.play(&changed("failures", json!({ DESTROY_COMPUTE: 19 })));
    replica.until("the driver's word", |it| it.failures()[0].error.contains("IN_USE"));
    assert_eq!(replica.instances().len(), 2);
    bed.play(&scenario());
    replica.until_instances(&[FOREIGN]);
    replica.until("no failure", |it| it.failures().is_empty());
}

#[test]
fn a_refused_order_is_reported_with_its_cause_and_tried_again() {
    let refused = |code: u32| changed("failures", json!({ CREATE: code }));
    for (scenario, order, cause) in [
        (refused(23), ("1g.10gb", 0), "INSUFFICIENT_RESOURCES"),
        (refused(19), ("1g.10gb", 0), "IN_USE"),
        (refused(4), ("1g.10gb", 0), "NO_PERMISSION"),
        (refused(999), ("1g.10gb", 0), "the driver refuses"),
        (changed("mig", Value::Null), ("1g.10gb", 0), "the GPU is not in MIG mode"),
        (changed("failures", json!({ CREATE_COMPUTE: 23 })), ("1g.10gb", 0), "compute instance"),
    ] {
        let bed = bed(&scenario);
        let replica = Replica::start();
        let _agent = Agent::start(&bed, &[&replica], QUICK);
        replica.order(1, &[order], &[]);
        replica.until(cause, |it| it.failures().iter().any(|it| it.error.contains(cause)));
        assert_eq!(replica.failures().len(), 1);
        assert!(replica.shown().iter().all(|(_, start, _)| *start == 6));
        bed.play(&self::scenario());
        replica.until_instances(&[("1g.10gb", 0, true), FOREIGN]);
        replica.until("no failure", |it| it.failures().is_empty());
        assert_eq!(gpu_instances(&bed), 2);
    }
}

#[test]
fn an_impossible_order_makes_no_call_and_an_order_that_ends_ends_its_failure() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    for (order, cause) in [
        (("9g.10gb", 0), "no such profile"),
        (("2g.20gb", 1), "cannot begin at unit 1"),
        (("3g.40gb", 4), "(1g.10gb at unit 6) has these units"),
    ] {
        replica.order(1, &[order], &[]);
        replica.until(cause, |it| it.failures().iter().any(|it| it.error.contains(cause)));
    }
    replica.withdraw();
    replica.until("no failure", |it| it.failures().is_empty());
    assert_eq!(count(&bed, CREATE), 0);
}

#[test]
fn what_is_left_of_an_instance_is_completed_or_removed() {
    let codes = json!({ CREATE_COMPUTE: 999, DESTROY: 19 });
    for is_withdrawn in [false, true] {
        let bed = bed(&changed("failures", codes.clone()));
        let replica = Replica::start();
        let _agent = Agent::start(&bed, &[&replica], QUICK);
        replica.order(1, &[("1g.10gb", 3)], &[]);
        replica.until("the failure", |it| {
            it.failures().iter().any(|it| it.error.contains("its GPU instance stays"))
        });
        assert_eq!(gpu_instances(&bed), 2);
        if is_withdrawn {
            replica.withdraw();
            replica.more_reports(3);
        }
        bed.play(&scenario());
        if is_withdrawn {
            replica.until("it is removed", |_| gpu_instances(&bed) == 1);
            replica.until_instances(&[FOREIGN]);
        } else {
            replica.until_instances(&[("1g.10gb", 3, true), FOREIGN]);
            assert_eq!(count(&bed, CREATE), 1, "it was completed");
        }
    }
}

#[test]
fn an_agent_that_is_killed_half_way_leaves_nothing_behind() {
    for is_withdrawn in [false, true] {
        let mut slow = scenario();
        slow["delays_ms"] = json!({ CREATE_COMPUTE: 60_000 });
        let bed = bed(&slow);
        let replica = Replica::start();
        let agent = process(&bed, &replica);
        replica.order(1, &[("1g.10gb", 3)], &[]);
        replica.until("the second call", |_| count(&bed, CREATE_COMPUTE) == 1);
        drop(agent); // SIGKILL
        assert_eq!(gpu_instances(&bed), 2, "one has no compute instance");
        bed.play(&scenario());
        if is_withdrawn {
            replica.withdraw();
        }
        let _agent = process(&bed, &replica);
        if is_withdrawn {
            replica.until("it is removed", |_| gpu_instances(&bed) == 1);
            replica.until_instances(&[FOREIGN]);
        } else {
            replica.until_instances(&[("1g.10gb", 3, true), FOREIGN]);
            // Before the order came again, the part may have been removed.
            assert_eq!(gpu_instances(&bed), 2);
        }
    }
}

#[test]
fn an_instance_is_known_as_made_here_until_the_next_boot() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let agent = process(&bed, &replica);
    replica.order(1, &[("1g.20gb", 0)], &[]);
    replica.until_instances(&[("1g.20gb", 0, true), FOREIGN]);
    let first = replica.instances()[0].uuid.clone();
    replica.withdraw();
    assert!(agent.end().success());
    let agent = process(&bed, &replica);
    replica.more_reports(3);
    assert_eq!(
        replica.shown(),
        [("1g.20gb".to_owned(), 0, true), ("1g.10gb".to_owned(), 6, false)]
    );
    assert_eq!(replica.instances()[0].uuid, first);
    drop(agent);
    // After a boot the instances are gone, and those of the boot script are others.
    let mut next = changed("at_boot", json!([["1g.20gb", 0]]));
    next["boot"] = json!(1);
    bed.play(&next);
    boot(&bed, "second");
    let _agent = process(&bed, &replica);
    replica.until_instances(&[("1g.20gb", 0, false)]);
    replica.order(1, &[("1g.10gb", 6)], &[]);
    replica.until_instances(&[("1g.20gb", 0, false), ("1g.10gb", 6, true)]);
    assert_ne!(replica.instances()[0].uuid, first);
}

#[test]
fn an_agent_takes_over_what_others_made_if_it_is_told_to() {
    // Half of an instance is left, too, of which no list knows.
    let bed = bed(&changed("failures", json!({ CREATE_COMPUTE: 999, DESTROY: 19 })));
    let replica = Replica::start();
    let agent = process(&bed, &replica);
    replica.order(1, &[("1g.10gb", 3)], &[]);
    replica.until("the failure", |it| {
        it.failures().iter().any(|it| it.error.contains("its GPU instance stays"))
    });
    replica.withdraw();
    drop(agent);
    std::fs::remove_dir_all(bed.path("mig")).unwrap();
    bed.play(&scenario());
    let agent = process(&bed, &replica);
    replica.more_reports(3);
    assert_eq!((gpu_instances(&bed), replica.shown().len()), (2, 1), "they are of others");
    drop(agent);

    let adopting = process_with(&bed, &replica, &["--mig-adopt"]);
    replica.until_instances(&[("1g.10gb", 6, true)]);
    replica.until("the half is removed", |_| gpu_instances(&bed) == 1);
    let uuid = replica.instances()[0].uuid.clone();
    replica.order(1, &[], &[&uuid]);
    replica.until_instances(&[]);
    drop(adopting);
}

#[test]
fn orders_of_an_older_term_are_ignored() {
    let bed = bed(&scenario());
    let (old, new) = (Replica::start(), Replica::start());
    let _agent = Agent::start(&bed, &[&old, &new], QUICK);
    old.order(5, &[("1g.10gb", 0)], &[]);
    old.until_instances(&[("1g.10gb", 0, true), FOREIGN]);
    new.order(4, &[("1g.10gb", 1)], &[]);
    new.more_reports(10);
    assert_eq!(count(&bed, CREATE), 1);
    // A new leader has nothing to do, and the old one does not know of it.
    new.order(6, &[], &[]);
    new.more_reports(3);
    old.order(5, &[("1g.10gb", 2)], &[]);
    old.more_reports(10);
    assert_eq!(count(&bed, CREATE), 1);
    new.order(6, &[("1g.10gb", 3)], &[]);
    new.until_instances(&[("1g.10gb", 0, true), ("1g.10gb", 3, true), FOREIGN]);
    assert_eq!(count(&bed, CREATE), 2);
}

#[test]
fn orders_of_a_stale_reply_are_ignored() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.more_reports(2);
    for replies in [Replies::Repeated, Replies::OtherSession] {
        replica.reply(replies);
        replica.more_reports(2);
        replica.order(1, &[("1g.10gb", 0)], &[]);
        replica.more_reports(10);
        assert_eq!(count(&bed, CREATE), 0);
    }
    replica.reply(Replies::New);
    replica.until_instances(&[("1g.10gb", 0, true), FOREIGN]);
}

/// Other calls for the GPU wait in the driver meanwhile, as on a real one. On a full GPU no place is left to look at, for
/// which a read may take longer anyway.
#[test]
fn a_change_of_twenty_seconds_delays_no_report_and_is_no_fault() {
    let others: Vec<Value> = (1..7).map(|start| json!(["1g.10gb", start])).collect();
    let quick = changed("at_boot", others.into());
    let mut slow = quick.clone();
    slow["delays_ms"] = json!({ CREATE: 20_000, DESTROY_COMPUTE: 20_000 });
    let bed = bed(&slow);
    let replica = Replica::start();
    let _turn = turn();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.until("six instances", |it| it.instances().len() == 6);
    let before = replica.reports().len();
    replica.order(1, &[("1g.10gb", 0)], &[]);
    replica.until("the seventh", |it| it.instances().len() == 7);
    assert!(replica.since_ordered() >= Duration::from_millis(19_900));
    replica.more_reports(3);
    let uuid = replica.instances()[0].uuid.clone();
    replica.order(1, &[], &[&uuid]);
    replica.until("its end", |it| it.instances().len() == 6);
    assert!(replica.since_ordered() >= Duration::from_millis(19_900));
    let reports = replica.reports();
    let gaps = reports[before - 1..].windows(2).map(|pair| pair[1] - pair[0]);
    let longest = gaps.max().unwrap();
    println_figure("longest time between reports while a MIG instance is changed", longest);
    assert!(longest < Duration::from_secs(7), "{longest:?}");
    assert_eq!(replica.faults(), Vec::<String>::new());
    bed.play(&quick);
}

/// A walk over all devices takes more than six seconds, and to find one by its UUID eight.
#[test]
fn a_creation_takes_little_more_than_the_driver_where_lookups_are_slow() {
    let gpu = |number: usize| {
        let own = if number == 0 { 6 } else { 7 };
        let at_boot: Vec<Value> = (0..own).map(|start| json!(["1g.10gb", start])).collect();
        let uuid = if number == 0 { "GPU-a".to_owned() } else { format!("GPU-{number}") };
        let gpu = with(with(a100(&uuid), "mig", json!([])), "mig_model", json!("A100-80"));
        with(gpu, "at_boot", at_boot.into())
    };
    let delays = json!({"nvmlDeviceGetHandleByIndex_v2": 50, "nvmlDeviceGetHandleByUUID": 8_000,
        "nvmlDeviceGetMigDeviceHandleByIndex": 50, CREATE: 2_000, CREATE_COMPUTE: 500});
    let gpus: Vec<Value> = (0..16).map(gpu).collect();
    let bed = bed(&json!({"gpus": gpus, "delays_ms": delays, "journal": true}));
    let replica = Replica::start();
    let _turn = turn();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.until("all devices", |it| it.inventory().len() == 16 + 16 * 7 - 1);
    replica.order(1, &[("1g.10gb", 6)], &[]);
    replica.until("the new one", |it| it.inventory().iter().any(|device| device.made_here));
    let took = replica.since_ordered();
    println_figure("order on a node with slow lookups, until the UUID is reported", took);
    assert!(took < Duration::from_millis(2_500 + 3_000), "{took:?}");
    assert_eq!(count(&bed, "nvmlDeviceGetHandleByUUID"), 0);
    assert_eq!((replica.failures(), replica.faults()), (Vec::new(), Vec::new()));
}

/// As the driver answers before a switch of the mode is done.
#[test]
fn profiles_that_are_not_listed_yet_are_read_again() {
    let bed = bed(&changed("failures", json!({"nvmlDeviceGetGpuInstances": 3})));
    let replica = Replica::start();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.until("an inventory", |it| it.inventory().len() == 2);
    replica.more_reports(2);
    assert!(replica.inventory().iter().all(|it| it.mig_profiles.is_empty()));
    bed.play(&scenario());
    replica.until("the profiles", |it| {
        it.inventory().iter().any(|it| it.uuid == "GPU-a" && it.mig_profiles.len() == 7)
    });
}

#[test]
fn without_the_flag_nothing_is_made_and_nothing_else_changes() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let flags = ["--period-ms", "100"].map(OsStr::new);
    let _agent = AgentProcess::start_at(&bed, &replica.url(), &flags);
    replica.order(1, &[("1g.10gb", 0)], &[]);
    replica.until("an inventory", |it| it.inventory().len() == 2);
    std::thread::sleep(Duration::from_secs(2));
    assert!(replica.inventory().iter().all(|it| it.mig_profiles.is_empty() && !it.made_here));
    assert_eq!((replica.failures(), replica.shown().len()), (Vec::new(), 1));
    let calls = bed.calls();
    let is_of_making =
        |call: &String| [CREATE, DESTROY, "nvmlDeviceGetGpuInstances"].contains(&call.as_str());
    assert!(!calls.iter().any(is_of_making));
    assert!(!Path::exists(&bed.path("mig")));
}

#[test]
fn an_agent_without_the_right_says_that_it_can_make_nothing() {
    let bed = bed(&changed("failures", json!({"nvmlDeviceGetGpuInstances": 4})));
    let replica = Replica::start();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.order(1, &[("1g.10gb", 0)], &[]);
    replica.until("the failure", |it| {
        it.failures().iter().any(|it| it.error.contains("NO_PERMISSION"))
    });
    assert!(replica.inventory().iter().all(|it| it.mig_profiles.is_empty()));
    assert_eq!(count(&bed, CREATE), 0);
}

#[test]
fn a_gpu_that_others_put_into_mig_mode_gets_its_instance() {
    let bed = bed(&changed("mig", Value::Null));
    let replica = Replica::start();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.order(1, &[("3g.40gb", 0)], &[]);
    replica.until("the failure", |it| {
        it.failures().iter().any(|it| it.error == "the GPU is not in MIG mode")
    });
    let gpu = replica.inventory().remove(0);
    assert!(gpu.kind == DeviceKind::Gpu && gpu.mig_profiles.is_empty());
    bed.play(&changed("at_boot", json!([])));
    replica.until_instances(&[("3g.40gb", 0, true)]);
    let gpu = replica.inventory().remove(0);
    assert_eq!((gpu.kind, gpu.mig_profiles.len()), (DeviceKind::MigParent, 7));
    replica.until("no failure", |it| it.failures().is_empty());
}
