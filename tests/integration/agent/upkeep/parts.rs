//! An agent in two parts: one reports, the other one has the driver. Whatever one part does, the other one lives on.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use agent::relay::messages::Seen;
use control::clearing::Ended;
use runtime::clock::Clock;
use serde_json::{Value, json};
use wire::api::condition::ClearResult;

use crate::harness::agent::bed::{Bed, POD, a100, sample, t4, with};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::orders::Replica;
use crate::harness::agent::process::AgentProcess;
use crate::harness::turns::turn;

/// The part that reports to this address.
fn reporting(bed: &Bed, url: &str) -> AgentProcess {
    AgentProcess::start_reporting(bed, url, &["--period-ms", "100"].map(OsStr::new))
}

/// The part with the driver, with more flags.
fn driver_with(bed: &Bed, flags: &[&str]) -> AgentProcess {
    let flags = ["--period-ms", "100"].iter().chain(flags).map(OsStr::new);
    AgentProcess::start_driver(bed, &flags.collect::<Vec<_>>())
}

fn driver(bed: &Bed) -> AgentProcess {
    driver_with(bed, &[])
}

fn until(what: &str, done: impl Fn() -> bool) {
    for _ in 0..3_000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("not within 30 s: {what}");
}

fn one_gpu() -> Value {
    json!({"gpus": [t4("GPU-a")], "events": []})
}

/// A node with one A100 in MIG mode.
fn mig() -> Value {
    let gpu = with(with(a100("GPU-a"), "mig", json!([])), "mig_model", json!("A100-80"));
    json!({"gpus": [gpu]})
}

/// The part with the driver, which makes MIG instances.
fn mig_driver(bed: &Bed) -> AgentProcess {
    bed.has_no_device_nodes();
    let folder = bed.path("mig").to_str().unwrap().to_owned();
    driver_with(bed, &["--mig-on-demand", "--mig-folder", &folder])
}

#[test]
fn both_parts_together_report_as_one_process_does_and_only_one_has_the_driver() {
    let processes = json!([{"pid": 10, "used_mib": 1_500, "lists": ["compute"]}]);
    let gpu = with(with(a100("GPU-a"), "processes", processes), "recovery_action", json!(0));
    let scenario = json!({"gpus": [gpu, t4("GPU-z")], "events": []});
    let bed = Bed::new(&scenario);
    bed.process(10, &format!("0::/kubepods/burstable/pod{POD}/x\n"));
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 1_000);
    let agent = reporting(&bed, &extender.url());
    let driver = driver(&bed);
    extender.until_fault(None);
    assert_eq!(bed.holders(), [driver.id()]);
    let memory = |kind: &str| {
        let kind = format!("kind=\"{kind}\"");
        agent.metric(&["gpupack_gpu_memory_bytes{", "GPU-a", "Hostname=\"n\"", &kind])
    };
    until("the overuse", || memory("over_limit") == Some((500_u64 << 20).to_string()));
    assert_eq!(memory("allocated"), Some((1_000_u64 << 20).to_string()));
    assert!(agent.asked("/readyz").starts_with("HTTP/1.1 200"));

    let mut struck = scenario.clone();
    struck["events"] = json!([{"gpu": 0, "kind": 8, "data": 63}]);
    bed.play(&struck);
    extender.until_fault(Some("Xid"));
    let cleared = Ended { result: ClearResult::Cleared, fault: None };
    assert_eq!(extender.clear("GPU-a"), cleared);
    extender.until_fault(None);

    // The library is closed while the driver is replaced.
    extender.see_work("pod-restart-required", "");
    until("closed", || bed.holders().is_empty());
    extender.until_fault(Some("DriverAway"));
    extender.see_work("uncordon-required", "");
    extender.until_fault(None);

    // The room of a pod is free when it and its processes have ended.
    struck["gpus"][0]["processes"] = json!([]);
    struck["gpus"][0]["used_mib"] = json!(0);
    extender.end(POD, "GPU-a", 1_000);
    extender.until("it drains", |node| {
        (node["devices"][0]["allocated"]["memoryMib"] == 1_000).then_some(())
    });
    std::fs::remove_dir_all(bed.proc_root().join("10")).unwrap();
    bed.play(&struck);
    extender.until("its room is free", |node| {
        (node["devices"][0]["allocated"]["memoryMib"] == 0).then_some(())
    });
    assert!(driver.end().success() && agent.end().success());
    assert!(bed.holders().is_empty());
}

#[test]
fn the_part_with_the_driver_waits_until_an_extender_allows_it() {
    let bed = Bed::new(&with(one_gpu(), "journal", json!(true)));
    let driver = driver(&bed);
    let extender = Extender::start();
    extender.see_work("pod-restart-required", "");
    let agent = reporting(&bed, &extender.url());
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(bed.calls(), Vec::<String>::new());
    extender.see_work("", "");
    extender.until_fault(None);
    // It stays open without an agent, and closed without an agent.
    drop(agent);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(bed.holders(), [driver.id()]);
    extender.see_work("pod-restart-required", "");
    let agent = reporting(&bed, &extender.url());
    until("closed", || bed.holders().is_empty());
    drop(agent);
    std::thread::sleep(Duration::from_secs(3));
    assert!(bed.holders().is_empty());
}

#[test]
fn orders_about_mig_instances_reach_the_part_with_the_driver_and_end_with_the_other_part() {
    let _turn = turn();
    let bed = Bed::new(&mig());
    let replica = Replica::start();
    let agent = reporting(&bed, &replica.url());
    let driver = mig_driver(&bed);
    replica.order(1, &[("2g.20gb", 2)], &[]);
    replica.promise(&[("pod-1", "2g.20gb", 2)]);
    replica.until_instances(&[("2g.20gb", 2, true)]);
    println!("from the order to the report of the instance: {:?}", replica.since_ordered());
    assert_eq!(replica.failures(), []);
    replica.until("the promise", |it| it.promised() == [(1, "pod-1".to_owned(), 2)]);
    let made = replica.instances()[0].uuid.clone();

    // The part that reports ends: its orders do, too, and what was made stays.
    replica.order(1, &[("2g.20gb", 2), ("1g.10gb", 0)], &[]);
    replica.until_instances(&[("1g.10gb", 0, true), ("2g.20gb", 2, true)]);
    drop(agent);
    until("the end is seen", || !driver.logged("that reports is lost").is_empty());
    replica.order(1, &[("2g.20gb", 2), ("1g.10gb", 6)], &[]);
    std::thread::sleep(Duration::from_secs(2));
    let agent = reporting(&bed, &replica.url());
    replica.until_instances(&[("1g.10gb", 0, true), ("2g.20gb", 2, true), ("1g.10gb", 6, true)]);
    assert!(replica.instances().iter().any(|it| it.uuid == made), "it is the same one");

    // The part with the driver is killed, and made again.
    drop(driver);
    let _driver = mig_driver(&bed);
    replica.order(1, &[("1g.10gb", 6)], &[&made]);
    replica.until_instances(&[("1g.10gb", 0, true), ("1g.10gb", 6, true)]);
    assert!(agent.end().success());
}

#[test]
fn without_the_part_with_the_driver_the_gpus_take_no_tenants_until_it_is_back() {
    let bed = Bed::new(&one_gpu());
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 1_000);
    let mut agent = reporting(&bed, &extender.url());
    let driver = driver(&bed);
    extender.until_fault(None);
    let clock = Clock::start();
    drop(driver);
    until("the loss is in the log", || !agent.logged("with the driver is lost").is_empty());
    extender.until_fault(Some("DriverAway"));
    let took = clock.precise();
    assert!(took > Duration::from_secs(8) && took < Duration::from_secs(14), "{took:?}");
    let node = extender.node();
    assert_eq!(node["state"], "Reporting");
    assert_eq!(node["devices"][0]["allocated"]["memoryMib"], 1_000, "the reservation stays");
    assert_eq!(agent.ends_within(Duration::from_secs(1)), None);

    // One that starts again within seconds is not noticed.
    let again = driver_with(&bed, &[]);
    extender.until_fault(None);
    drop(again);
    let again = driver_with(&bed, &[]);
    std::thread::sleep(Duration::from_secs(12));
    extender.until_fault(None);
    assert_eq!(agent.logged("none takes new tenants").len(), 1, "only the first time");

    // A part that hangs is as good as away; the driver alone is the other part's word.
    again.signal("-STOP");
    extender.until_fault(Some("DriverAway"));
    again.signal("-CONT");
    extender.until_fault(None);
    let mut slow = one_gpu();
    slow["delays_ms"] = json!({"nvmlDeviceGetCount_v2": 20_000});
    bed.play(&slow);
    extender.until_fault(Some("DriverAway"));
    assert_eq!(agent.logged("is connected").len(), 4, "the connection stays");
}

#[test]
fn an_agent_that_hangs_loses_its_orders_and_gets_on_afterwards() {
    let bed = Bed::new(&mig());
    let replica = Replica::start();
    let agent = reporting(&bed, &replica.url());
    let driver = mig_driver(&bed);
    replica.order(1, &[("2g.20gb", 2)], &[]);
    replica.until_instances(&[("2g.20gb", 2, true)]);
    agent.signal("-STOP");
    until("it is lost", || !driver.logged("nothing for 10 s").is_empty());
    replica.order(1, &[("2g.20gb", 2), ("1g.10gb", 0)], &[]);
    agent.signal("-CONT");
    replica.until_instances(&[("1g.10gb", 0, true), ("2g.20gb", 2, true)]);
}

#[test]
fn only_the_part_with_the_driver_is_made_again() {
    let bed = Bed::new(&one_gpu());
    std::fs::rename(bed.library(), bed.path("hidden")).unwrap();
    bed.load_modules(&["ext4"]);
    let extender = Extender::start();
    let mut agent = reporting(&bed, &extender.url());
    let mut driver = driver(&bed);
    until("it says what is wrong", || !driver.logged("cannot be loaded").is_empty());
    bed.load_modules(&["ext4", "nvidia"]);
    let (code, _) = driver.ends_within(Duration::from_secs(10)).expect("it ends");
    assert_eq!(code, Some(75));
    std::fs::rename(bed.path("hidden"), bed.library()).unwrap();
    let _driver = driver_with(&bed, &[]);
    extender.until_fault(None);
    assert_eq!(agent.ends_within(Duration::from_millis(1)), None);
}

/// Lines that no part may say.
fn hostile() -> Vec<Vec<u8>> {
    let deep = b"[".repeat(100_000);
    let long = [b"{\"sample\":\"".to_vec(), b"x".repeat(9 << 20)].concat();
    let many = format!("{{\"sample\":{{\"inventory\":[{}null]}}}}\n", "{},".repeat(100_000));
    let gpu = "{\"id\":\"a\",\"healthy\":true},".repeat(300);
    let uses = format!(
        "{{\"sample\":{{\"inventory\":[],\"uses\":[{}],\"driver\":null,\"xids\":{{}},\"unreadable\":0,\
         \"hasUnwatchedPods\":false,\"draining\":[],\"migFailures\":[],\"memoryLimits\":null,\
         \"containers\":[]}},\"clearOutcome\":null}}\n",
        gpu.trim_end_matches(',')
    );
    // Orders by their form, with more devices than a node has.
    let kubelet = |count: usize| {
        let all: Vec<String> = (0..count).map(|number| format!("\"{number}\"")).collect();
        format!(
            "{{\"allocations\":[],\"isAnswered\":true,\"library\":\"unknown\",\"mig\":null,\"limits\":null,\
             \"clear\":null,\"ofKubelet\":[{}]}}\n",
            all.join(",")
        )
    };
    vec![
        kubelet(200_000).into_bytes(),
        kubelet(900_000).into_bytes(),
        b"\xff\xfe\0\n".to_vec(),
        b"{}\n".to_vec(),
        b"null\n".to_vec(),
        b"{\"sample\":null,\"clearOutcome\":null,\"run\":\"sh\"}\n".to_vec(),
        [deep, b"\n".to_vec()].concat(),
        b"\n".repeat(1 << 20),
        b"{\"allocations\":[".to_vec(),
        many.into_bytes(),
        uses.into_bytes(),
        long,
    ]
}

#[test]
fn no_bytes_of_one_part_end_or_fill_the_other_one() {
    let _turn = turn();
    let bed = Bed::new(&one_gpu());
    let extender = Extender::start();
    let agent = reporting(&bed, &extender.url());
    for bytes in hostile() {
        let mut stream = UnixStream::connect(bed.path("driver.sock")).unwrap();
        // It may hang up before the end.
        let _ = stream.write_all(&bytes);
    }
    let seen = agent.logged("a message of it");
    assert!(!seen.is_empty() && seen.iter().all(|line| line.len() < 400), "{seen:?}");
    // One that never ends its line, beside the real one: the newest counts.
    let mut slow = UnixStream::connect(bed.path("driver.sock")).unwrap();
    slow.write_all(b"{").unwrap();
    let driver = driver(&bed);
    extender.until_fault(None);
    let most = agent.memory_kib("VmHWM");
    assert!(most < 90 << 10, "{most} KiB");
    assert!(agent.end().success());

    // The same from the part that reports.
    let socket = bed.path("driver.sock");
    std::fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    for bytes in hostile() {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(&bytes);
    }
    drop(listener);
    let most = driver.memory_kib("VmHWM");
    assert!(most < 90 << 10, "{most} KiB");
    let _agent = reporting(&bed, &extender.url());
    extender.until_fault(None);
    assert!(driver.end().success());
}

/// Two lists without its processes free what a pod held: one that is sent again must not count as the second.
#[test]
fn a_list_that_is_sent_again_after_a_loss_counts_once() {
    let bed = Bed::new(&one_gpu());
    let seen = {
        let mut seen = sample(&mut bed.probe()).unwrap();
        seen.draining = BTreeSet::from([POD.to_owned()]);
        serde_json::to_vec(&Seen { sample: Some(Arc::new(seen)), clear_outcome: None }).unwrap()
    };
    let line = [seen, b"\n".to_vec()].concat();
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 1_000);
    extender.end(POD, "GPU-a", 1_000);
    let _agent = reporting(&bed, &extender.url());
    let say = |times: usize| {
        let mut stream = UnixStream::connect(bed.path("driver.sock")).unwrap();
        for _ in 0..times {
            stream.write_all(&line).unwrap();
            std::thread::sleep(Duration::from_millis(500));
        }
        stream
    };
    let allocated = || extender.node()["devices"][0]["allocated"]["memoryMib"].clone();
    let streams: Vec<UnixStream> = (0..4).map(|_| say(1)).collect();
    assert_eq!(allocated(), 1_000);
    let _stream = say(3);
    until("two lists of one connection free it", || allocated() == 0);
    drop(streams);
}
