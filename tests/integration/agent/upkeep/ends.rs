//! The agent ends itself when only a new container helps, and never otherwise.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use agent::mps::daemons::{Duty, MpsDaemons, MpsSettings};
use agent::node::client::Proof;
use agent::node::config::AgentConfig;
use agent::node::metrics::AgentMetrics;
use agent::node::replicas::Resolver;
use agent::node::run::{AgentError, run_node};
use agent::upkeep::condition::Upkeep;
use agent::upkeep::renewal::Renewal;
use runtime::clock::Clock;
use serde_json::{Value, json};

use crate::harness::agent::bed::{Bed, t4, with};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::orders::Replica;
use crate::harness::agent::process::AgentProcess;

/// The exit code that says: make my container again.
const MADE_AGAIN: Option<i32> = Some(75);

/// A node with one GPU.
fn well() -> Value {
    json!({"gpus": [t4("GPU-a")]})
}

/// The same with one more field.
fn well_with(field: &str, value: Value) -> Value {
    with(well(), field, value)
}

/// Takes the library out of the container, as if it had been made by a plain runtime.
fn hide(bed: &Bed) {
    std::fs::rename(bed.library(), bed.path("hidden")).unwrap();
}

fn until(what: &str, done: impl Fn() -> bool) {
    for _ in 0..2_000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("not within 20 s: {what}");
}

#[test]
fn without_a_library_the_agent_ends_once_when_the_module_appears() {
    let bed = Bed::new(&well());
    hide(&bed);
    bed.load_modules(&["ext4", "nvidia_uvm"]);
    let extender = Extender::start();
    let mut agent = AgentProcess::start(&bed, &extender);
    until("it says what is wrong", || !agent.logged("cannot be loaded").is_empty());
    bed.load_modules(&["ext4", "nvidia_uvm", "nvidia_drm", "nvidiafb"]);
    assert_eq!(agent.ends_within(Duration::from_secs(4)), None, "none of these is the module");
    bed.load_modules(&["nvidia_uvm", "nvidia", "ext4"]);
    let (code, took) = agent.ends_within(Duration::from_secs(10)).expect("it ends");
    assert_eq!(code, MADE_AGAIN);
    assert!(took < Duration::from_secs(2), "{took:?}");
    let last = agent.last_line();
    assert!(last.contains("container is made again") && last.contains("code=75"), "{last}");

    // The container that is made next may lack the library, too: no loop.
    let mut agent = AgentProcess::start(&bed, &extender);
    assert_eq!(agent.ends_within(Duration::from_secs(7)), None);
    assert_eq!(agent.logged("delete the agent's pod").len(), 1, "once");
    std::fs::rename(bed.path("hidden"), bed.library()).unwrap();
    extender.until_fault(None);
    assert!(agent.end().success());
}

#[test]
fn with_a_library_the_agent_waits_for_the_module_and_opens_it_at_once() {
    let bed = Bed::new(&json!({"failures": {"nvmlInit_v2": 9}}));
    bed.load_modules(&["ext4"]);
    let extender = Extender::start();
    let mut agent = AgentProcess::start(&bed, &extender);
    until("it says what is wrong", || !agent.logged("is not loaded").is_empty());
    // Long enough that the pauses between two attempts have grown.
    assert_eq!(agent.ends_within(Duration::from_secs(17)), None);
    bed.play(&well());
    bed.load_modules(&["nvidia", "ext4"]);
    let clock = Clock::start();
    extender.until_fault(None);
    let took = clock.precise();
    assert!(took < Duration::from_secs(4), "{took:?}");
    assert!(agent.end().success());
}

#[test]
fn a_library_that_stays_refused_ends_the_agent_after_a_minute_and_nothing_else_does() {
    let started = |scenario: &Value| {
        let bed = Bed::new(scenario);
        bed.load_modules(&["nvidia"]);
        let extender = Extender::start();
        let agent = AgentProcess::start(&bed, &extender);
        extender.until_fault(None);
        (bed, extender, agent)
    };
    let stale = |code: u32| with(well_with("load", json!(1)), "stale_code", json!(code));
    let refused = json!({"nvmlInit_v2": 4, "nvmlDeviceGetCount_v2": 4});
    let cures: [(&str, Value); 3] = [
        ("mismatch", stale(18)),
        ("unknown", stale(999)),
        ("no permission", well_with("failures", refused)),
    ];
    let not_loaded = json!({"nvmlInit_v2": 9, "nvmlDeviceGetCount_v2": 9});
    let of_device =
        |code: u32| json!({"gpus": [with(t4("GPU-a"), "failures", json!({"*": code}))]});
    let others: [(&str, Value); 6] = [
        ("not loaded", well_with("failures", not_loaded)),
        ("a lost GPU", of_device(15)),
        ("no permission on a device", of_device(4)),
        ("an unknown error of a device", of_device(999)),
        ("a mismatch said of a device", of_device(18)),
        ("it opens in between", Value::Null),
    ];
    let mut running: Vec<_> = cures.iter().map(|(what, _)| (*what, started(&well()))).collect();
    let mut staying: Vec<_> = others.iter().map(|(what, _)| (*what, started(&well()))).collect();
    for ((_, scenario), (_, (bed, _, _))) in cures.iter().zip(&running) {
        bed.play(scenario);
    }
    for ((_, scenario), (_, (bed, _, _))) in others.iter().zip(&staying) {
        bed.play(if scenario.is_null() { &cures[2].1 } else { scenario });
    }
    let clock = Clock::start();
    for (what, (_, extender, agent)) in &mut running {
        extender.until_fault(Some("DriverAway"));
        let early = Duration::from_secs(45).saturating_sub(clock.precise());
        assert_eq!(agent.ends_within(early), None, "{what}");
    }
    let (_, (bed, extender, _)) = staying.last().unwrap();
    bed.play(&well());
    extender.until_fault(None);
    bed.play(&cures[2].1);
    for (what, (bed, extender, agent)) in &mut running {
        let (code, _) = agent.ends_within(Duration::from_secs(40)).expect(what);
        assert_eq!(code, MADE_AGAIN, "{what}");
        let last = agent.last_line();
        assert!(last.contains("container is made again"), "{what}: {last}");
        assert!(bed.holders().is_empty(), "{what}");
        // The next process is well, where the library was the fault.
        if *what != "no permission" {
            let next = AgentProcess::start(bed, extender);
            extender.until_fault(None);
            assert_eq!(bed.holders(), [next.id()], "{what}");
            assert!(next.end().success());
        }
    }
    let took = clock.precise();
    assert!(took < Duration::from_secs(90), "{took:?}");
    for (what, (_, _, agent)) in &mut staying {
        let late = Duration::from_secs(80).saturating_sub(clock.precise());
        assert_eq!(agent.ends_within(late.max(Duration::from_millis(1))), None, "{what}");
    }
}

#[test]
fn probes_say_whether_the_loop_turns_and_whether_reports_are_accepted() {
    let slow = |delay: u64| well_with("delays_ms", json!({"nvmlDeviceGetCount_v2": delay}));
    let bed = Bed::new(&slow(0));
    let replica = Replica::start();
    // Another extender that never answers.
    let urls = [OsStr::new("--extender"), OsStr::new("http://127.0.0.1:1")];
    let nowhere = AgentProcess::start_at(&bed, "http://127.0.0.1:1", &[]);
    let agent = AgentProcess::start_at(&bed, &replica.url(), &urls);
    until("a report is accepted", || agent.asked("/readyz").starts_with("HTTP/1.1 200"));
    assert!(nowhere.asked("/readyz").starts_with("HTTP/1.1 503"));
    assert!(nowhere.asked("/livez").starts_with("HTTP/1.1 200"), "alive without any extender");
    // The driver hangs: neither liveness nor readiness looks at it.
    bed.play(&slow(40_000));
    std::thread::sleep(Duration::from_secs(6));
    let clock = Clock::start();
    assert!(agent.asked("/livez").starts_with("HTTP/1.1 200"));
    assert!(clock.precise() < Duration::from_secs(1));
    // Without a report for 30 s it is not ready.
    drop(replica);
    std::thread::sleep(Duration::from_secs(20));
    assert!(agent.asked("/readyz").starts_with("HTTP/1.1 200"));
    std::thread::sleep(Duration::from_secs(13));
    assert!(agent.asked("/readyz").starts_with("HTTP/1.1 503"));
    assert!(agent.asked("/livez").starts_with("HTTP/1.1 200"));
}

#[test]
fn with_clients_of_mps_the_agent_waits_until_they_have_left() {
    let bed = Bed::new(&well());
    let (extender, clock) = (Extender::start(), Clock::start());
    let settings = MpsSettings {
        folder: bed.path("mps"),
        program: PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/harness/mps_control")),
        duty: Duty::Manage,
        query_every: Duration::from_millis(100),
        proc_root: bed.proc_root(),
    };
    let daemons = MpsDaemons::new(settings, clock);
    let metrics = AgentMetrics::new();
    let upkeep = Upkeep {
        proc_root: Some(bed.proc_root()),
        daemons: Some(daemons.clone()),
        refused_for: Duration::from_secs(2),
        ..Upkeep::default()
    };
    let config = AgentConfig {
        extenders: vec![extender.url()],
        proof: Proof::default(),
        resolver: Resolver::default(),
        period: Duration::from_millis(100),
        clock,
        metrics: Some(metrics.clone()),
        mig: None,
        limits: None,
        clearing: None,
        upkeep,
        gate: None,
    };
    let threads =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let threads = threads.unwrap();
    let loops = threads.block_on(async { daemons.start() });
    let probe = bed.probe().with_mps(daemons);
    let ended =
        threads.spawn(async move { run_node(&config, "n", probe, std::future::pending()).await });
    extender.until_fault(None);
    let daemon = bed.path("mps/GPU-a/pipe/pid");
    until("the daemon runs", || daemon.exists());
    let said = |file: &str, text: &str| {
        std::fs::write(bed.path(&format!("mps/GPU-a/pipe/{file}")), text).unwrap();
    };
    said("clients-7", "101\n");
    said("servers", "7\n");
    bed.play(&with(well_with("load", json!(1)), "stale_code", json!(999)));
    extender.until_fault(Some("AgentOutdated"));
    let shows = |value: u32| {
        let line = format!("gpupack_agent_outdated{{Hostname=\"n\"}} {value}\n");
        String::from_utf8(metrics.text()).unwrap().contains(&line)
    };
    assert!(shows(1));
    std::thread::sleep(Duration::from_secs(7));
    assert!(!ended.is_finished() && daemon.exists() && shows(1));
    said("clients-7", "");
    until("it ends", || ended.is_finished());
    let end = threads.block_on(ended).unwrap();
    assert!(matches!(end, Err(AgentError::MadeAgain { cause: Renewal::Refused })), "{end:?}");
    threads.block_on(loops.end());
}
