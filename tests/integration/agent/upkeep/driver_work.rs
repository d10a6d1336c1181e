//! The library is closed while NVIDIA's tools replace the driver of the node or change its GPUs.
//!
//! What blocks a driver from being unloaded is an open device file, which the stand-in has from its
//! start to its end. A library that the loader keeps in memory after `nvmlShutdown` blocks nothing.

use std::net::TcpListener;
use std::time::Duration;

use agent::gpu::library_gate::LibraryGate;
use agent::mig::on_demand::MigOnDemand;
use agent::mps::daemons::{Duty, MpsDaemons, MpsSettings};
use agent::nvml::maker::MigMaker;
use runtime::clock::Clock;
use serde_json::json;
use wire::api::condition::MpsState;
use wire::api::state::DeviceKind;
use wire::report::bodies::{DeviceReport, MakeInstance, MigOrders};
use wire::units::Timestamp;

use crate::harness::agent::bed::{Bed, POD, a100, t4};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::process::AgentProcess;

/// The calls that open the library.
fn opened(bed: &Bed) -> usize {
    bed.calls().iter().filter(|call| *call == "nvmlInit_v2").count()
}

/// Waits until these processes have the library open.
fn until_held_by(bed: &Bed, processes: &[u32], what: &str) {
    for _ in 0..2_000 {
        if bed.holders() == processes {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("not within 20 s: {what}; it is open in {:?}, not {processes:?}", bed.holders());
}

#[test]
fn the_library_is_closed_from_the_first_eviction_until_the_new_driver_is_loaded() {
    let bed = Bed::new(&json!({"gpus": [t4("GPU-a")], "journal": true}));
    let extender = Extender::start();
    let agent = AgentProcess::start(&bed, &extender);
    let held = [agent.id()];
    extender.until_fault(None);
    extender.allocate(POD, "GPU-a", 1_000);
    for (upgrade, mig) in [
        ("pod-deletion-required", ""),
        ("drain-required", ""),
        ("pod-restart-required", ""),
        ("", "pending"),
        ("", "rebooting"),
    ] {
        let what = format!("{upgrade}{mig}");
        extender.see_work("wait-for-jobs-required", "");
        until_held_by(&bed, &held, &format!("open before {what}"));
        extender.see_work(upgrade, mig);
        until_held_by(&bed, &[], &format!("closed in {what}"));
        extender.until_fault(Some("DriverAway"));
        let node = extender.node();
        assert_eq!(node["state"], "Reporting", "{what}");
        let allocated = &node["devices"][0]["allocated"]["memoryMib"];
        assert_eq!(*allocated, 1_000, "the reservation stays: {node}");
        extender.see_work("validation-required", "");
        until_held_by(&bed, &held, &format!("open after {what}"));
        extender.until_fault(None);
    }
}

#[test]
fn a_closed_library_stays_closed_without_an_extender() {
    let bed = Bed::new(&json!({"gpus": [t4("GPU-a")], "journal": true}));
    let extender = Extender::start();
    let agent = AgentProcess::start(&bed, &extender);
    extender.until_fault(None);
    extender.see_work("drain-required", "");
    until_held_by(&bed, &[], "closed");
    let times = opened(&bed);
    let address = extender.url().replace("http://", "");
    drop(extender); // the drain evicts it, too
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!(opened(&bed), times, "nothing says that the driver may be used again");
    let extender = Extender::start_at(&address);
    until_held_by(&bed, &[agent.id()], "open again");
    extender.until_fault(None);
}

#[test]
fn an_agent_that_starts_while_the_driver_is_replaced_asks_first() {
    let bed = Bed::new(&json!({"gpus": [t4("GPU-a")], "journal": true}));
    let extender = Extender::start();
    extender.see_work("pod-restart-required", "");
    let agent = AgentProcess::start(&bed, &extender);
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!((bed.holders(), opened(&bed)), (Vec::new(), 0), "it did not wait");
    assert!(agent.metrics().contains("HTTP/1.1 200"), "its metrics are served meanwhile");
    extender.see_work("uncordon-required", "");
    until_held_by(&bed, &[agent.id()], "open");
    extender.until_fault(None);
}

#[test]
fn an_agent_without_an_extender_waits_with_its_first_open() {
    let bed = Bed::new(&json!({"gpus": [t4("GPU-a")], "journal": true}));
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let agent = AgentProcess::start_at(&bed, &format!("http://{address}"), &[]);
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!((bed.holders(), opened(&bed)), (Vec::new(), 0), "it did not wait");
    let extender = Extender::start_at(&address);
    until_held_by(&bed, &[agent.id()], "open");
    extender.until_fault(None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn no_instance_is_made_while_the_library_is_closed() {
    let mut gpu = a100("GPU-a");
    gpu["mig"] = json!([]);
    let bed = Bed::new(&json!({"gpus": [gpu], "journal": true}));
    let gate = LibraryGate::default();
    gate.learn(1, Some("nvidia.com/mig.config.state=pending".to_owned()));
    let on_demand = MigOnDemand::new(&bed.path("mig"), &bed.proc_root());
    let (_, kubelet) = tokio::sync::watch::channel(Some(Default::default()));
    let maker = MigMaker::new(Some(bed.library()), on_demand.clone(), Clock::start(), kubelet);
    let making = tokio::spawn(maker.with_gate(gate.clone()).run());
    let (gpu, profile) = ("GPU-a".to_owned(), "1g.5gb".to_owned());
    let make = vec![MakeInstance { gpu, profile, start: 0 }];
    on_demand.learn(1, Some(MigOrders { term: 1, make, ..MigOrders::default() }), Timestamp::START);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(opened(&bed), 0, "MIG Manager is at work");
    gate.learn(1, None);
    for _ in 0..1_000 {
        if opened(&bed) > 0 {
            return making.abort();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the order is forgotten");
}

/// The stand-in for NVIDIA's control program of MPS.
const CONTROL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/harness/mps_control");

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_daemon_of_mps_without_clients_ends_while_the_library_is_closed() {
    let bed = Bed::new(&json!({"gpus": [t4("GPU-a")]}));
    let (gate, clock) = (LibraryGate::default(), Clock::start());
    gate.learn(1, None);
    let settings = MpsSettings {
        folder: bed.path("mps"),
        program: CONTROL.into(),
        duty: Duty::Manage,
        query_every: Duration::from_millis(100),
        proc_root: bed.proc_root(),
    };
    let daemons = MpsDaemons::gated(settings, clock, Some(gate.clone()));
    let loops = daemons.start();
    let (uuid, model) = ("GPU-a".to_owned(), "T4".to_owned());
    daemons.learn(&[DeviceReport::new(uuid, 0, model, DeviceKind::Gpu)]);
    let until = async |state: MpsState| {
        for _ in 0..1_000 {
            if daemons.state("GPU-a", clock.now()) == Some(state) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not within 10 s: {state:?}");
    };
    until(MpsState::Idle).await;
    let pipes = bed.path("mps/GPU-a/pipe");
    std::fs::write(pipes.join("clients-7"), "42\n").unwrap();
    std::fs::write(pipes.join("servers"), "7\n").unwrap();
    until(MpsState::Serving).await;
    gate.learn(1, Some("nvidia.com/gpu-driver-upgrade-state=pod-restart-required".to_owned()));
    tokio::time::sleep(Duration::from_secs(1)).await;
    until(MpsState::Serving).await;
    assert!(!pipes.join("quit").exists(), "its client has the driver open itself");
    std::fs::write(pipes.join("clients-7"), "").unwrap();
    until(MpsState::Absent).await;
    assert!(pipes.join("quit").exists());
    tokio::time::sleep(Duration::from_secs(2)).await;
    until(MpsState::Absent).await;
    gate.learn(1, None);
    until(MpsState::Serving).await;
    loops.end().await;
}
