//! A person has checked a GPU and clears it: the agent forgets its Xid, and goes on.

use std::time::Duration;

use control::clearing::Ended;
use serde_json::{Value, json};
use wire::api::condition::{ClearResult, DeviceFault};

use super::loops::Loops;
use crate::harness::agent::bed::{Bed, a100, h200_in_mig_mode, t4, with};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::orders::Replica;
use crate::harness::agent::process::AgentProcess;

const PERIOD: Duration = Duration::from_millis(100);

/// An Xid for which the driver requests no action.
fn xid() -> Value {
    json!([{"gpu": 0, "kind": 8, "data": 63}])
}

/// Two GPUs without a fault.
fn calm() -> Value {
    let gpu = with(a100("GPU-a"), "recovery_action", json!(0));
    json!({"gpus": [gpu, t4("GPU-z")], "events": []})
}

/// The first one has an Xid, and its driver requests this.
fn struck(action: u64) -> Value {
    let gpu = with(a100("GPU-a"), "recovery_action", json!(action));
    json!({"gpus": [gpu, t4("GPU-z")], "events": xid()})
}

fn refused(fault: Option<DeviceFault>) -> Ended {
    Ended { result: ClearResult::Refused, fault }
}

#[test]
fn a_gpu_with_an_xid_takes_tenants_again_without_a_new_agent() {
    let bed = Bed::new(&calm());
    let extender = Extender::start();
    let agent = AgentProcess::start(&bed, &extender);
    extender.until_fault(None);
    bed.play(&struck(0));
    extender.until_fault(Some("Xid"));
    let nothing = Ended { result: ClearResult::NothingToClear, fault: None };
    assert_eq!(extender.clear("GPU-z"), nothing, "the other GPU");
    extender.until_fault(Some("Xid"));
    assert_eq!(extender.clear("GPU-a"), Ended { result: ClearResult::Cleared, ..nothing });
    extender.until_fault(None);
    assert_eq!(extender.node()["devices"][0]["lastXid"], 63, "it is still known");
    let mut again = struck(0);
    again["events"].as_array_mut().unwrap().push(xid()[0].clone());
    bed.play(&again);
    extender.until_fault(Some("Xid"));
    assert!(agent.end().success());
}

#[test]
fn an_xid_that_comes_after_the_look_stays() {
    let bed = Bed::new(&calm());
    let extender = Extender::start();
    let _loops = Loops::clearing(&bed, vec![extender.url()], PERIOD);
    extender.until_fault(None);
    let looked = extender.fault_event("GPU-a");
    bed.play(&struck(0));
    extender.until_fault(Some("Xid"));
    assert_eq!(extender.clear_of("GPU-a", looked), refused(Some(DeviceFault::Xid)));
    let looked = extender.fault_event("GPU-a");
    assert!(looked.is_some());
    let mut again = struck(0);
    again["events"].as_array_mut().unwrap().push(xid()[0].clone());
    bed.play(&again);
    extender.until("the second Xid", |_| (extender.fault_event("GPU-a") != looked).then_some(()));
    assert_eq!(extender.clear_of("GPU-a", looked), refused(Some(DeviceFault::Xid)));
    extender.until_fault(Some("Xid"));
    assert_eq!(extender.clear("GPU-a").result, ClearResult::Cleared);
    extender.until_fault(None);
}

#[test]
fn a_gpu_for_which_the_driver_requests_an_action_stays_as_it_is() {
    let bed = Bed::new(&calm());
    let extender = Extender::start();
    let _loops = Loops::clearing(&bed, vec![extender.url()], PERIOD);
    extender.until_fault(None);
    bed.play(&struck(1));
    extender.until_fault(Some("ResetRequired"));
    assert_eq!(extender.clear("GPU-a"), refused(Some(DeviceFault::ResetRequired)));
    extender.until_fault(Some("ResetRequired"));
}

#[test]
fn a_gpu_that_does_not_answer_stays_as_it_is() {
    let bed = Bed::new(&calm());
    let extender = Extender::start();
    let _loops = Loops::clearing(&bed, vec![extender.url()], PERIOD);
    extender.until_fault(None);
    bed.play(&struck(0));
    extender.until_fault(Some("Xid"));
    let mut lost = struck(0);
    lost["gpus"][0]["failures"] = json!({"*": 15});
    bed.play(&lost);
    extender.until_fault(Some("Lost"));
    assert_eq!(extender.clear("GPU-a"), refused(Some(DeviceFault::Lost)));
    assert_eq!(extender.clear("GPU-b"), refused(None), "there is no such GPU");
    let mut away = struck(0);
    away["failures"] = json!({"nvmlDeviceGetCount_v2": 9, "nvmlInit_v2": 9});
    bed.play(&away);
    extender.until_fault(Some("DriverAway"));
    assert_eq!(extender.clear("GPU-a"), refused(Some(DeviceFault::DriverAway)));
}

#[test]
fn a_gpu_is_cleared_with_its_mig_instances() {
    let mut scenario = json!({"gpus": [h200_in_mig_mode(), t4("GPU-z")], "events": []});
    let bed = Bed::new(&scenario);
    let extender = Extender::start();
    let _loops = Loops::clearing(&bed, vec![extender.url()], PERIOD);
    let unhealthy = |count: usize| {
        extender.until(&format!("{count} unhealthy devices"), |node| {
            let devices = node["devices"].as_array()?;
            let found = devices.iter().filter(|it| it["health"] != "Healthy").count();
            (!devices.is_empty() && found == count).then_some(())
        });
    };
    unhealthy(0);
    scenario["events"] = json!([{"gpu": 0, "kind": 8, "data": 95, "instance": 2}]);
    bed.play(&scenario);
    unhealthy(1);
    assert_eq!(extender.clear("GPU-p").result, ClearResult::Cleared);
    unhealthy(0);
}

#[test]
fn an_order_of_an_earlier_leader_is_ignored_and_one_of_the_new_leader_carried_out_once() {
    let bed = Bed::new(&calm());
    let (old, new) = (Replica::start(), Replica::start());
    let _loops = Loops::clearing(&bed, vec![old.url(), new.url()], PERIOD);
    new.clear(6, None);
    new.more_reports(2);
    bed.play(&struck(0));
    new.more_reports(1);
    old.clear(5, Some(1));
    old.more_reports(2);
    assert_eq!((old.cleared(), new.cleared()), (None, None), "it was obeyed");
    new.clear(6, Some(7));
    new.until("the outcome", |it| it.cleared().is_some());
    let cleared = new.cleared().unwrap();
    assert_eq!((cleared.term, cleared.number, cleared.result), (6, 7, ClearResult::Cleared));
    let mut again = struck(0);
    again["events"].as_array_mut().unwrap().push(xid()[0].clone());
    bed.play(&again);
    new.more_reports(3);
    assert_eq!(new.cleared(), Some(cleared), "the same outcome, as long as the order is given");
    new.clear(6, None);
    new.until("no outcome", |it| it.cleared().is_none());
    new.clear(6, Some(8));
    new.until("the outcome", |it| it.cleared().is_some_and(|cleared| cleared.number == 8));
    assert_eq!(new.cleared().unwrap().result, ClearResult::Cleared, "the second Xid was there");
}
