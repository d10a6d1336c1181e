//! MIG on demand while others change the same GPUs: MIG Manager, an administrator, a monitor.

use serde_json::{Value, json};

use super::mig::{
    Agent, CREATE, DESTROY, DESTROY_COMPUTE, FOREIGN, QUICK, bed, changed, count, gpu_instances,
    process_with, scenario,
};
use crate::harness::agent::bed::Bed;
use crate::harness::agent::orders::Replica;

const FIND: &str = "nvmlDeviceGetGpuInstanceById";

/// Number of the profile `1g.10gb`, and its compute slices.
const SMALL: (u32, u32) = (19, 1);

/// A compute instance of a GPU instance, with the UUID of its MIG device.
fn compute(uuid: &str) -> Value {
    json!({"id": 0, "slices": SMALL.1, "uuid": uuid})
}

/// An instance of the profile `1g.10gb`.
fn small(id: u32, start: u32, uuid: &str) -> Value {
    json!({"id": id, "profile": SMALL.0, "start": start, "computes": [compute(uuid)]})
}

/// Others change the instances of `GPU-a`, in one step.
fn by_hand(bed: &Bed, change: impl FnOnce(&mut Vec<Value>)) {
    let path = bed.path("instances.json");
    // There is none before the first change.
    let text = std::fs::read_to_string(&path);
    let text = text.unwrap_or_else(|_| r#"{"boot": 0, "next": 9, "gpus": {"GPU-a": []}}"#.into());
    let mut all: Value = serde_json::from_str(&text).unwrap();
    change(all["gpus"]["GPU-a"].as_array_mut().unwrap());
    let next = bed.path("instances.by-hand");
    std::fs::write(&next, all.to_string()).unwrap();
    std::fs::rename(next, path).unwrap();
}

/// The instances of `GPU-a` by their start, each with the UUIDs of its devices.
fn there(bed: &Bed) -> Vec<(u64, Vec<String>)> {
    let text = std::fs::read_to_string(bed.path("instances.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let uuids = |it: &Value| {
        let computes = it["computes"].as_array().unwrap();
        computes.iter().map(|it| it["uuid"].as_str().unwrap().to_owned()).collect()
    };
    let all = all["gpus"]["GPU-a"].as_array().unwrap().iter();
    let mut all: Vec<_> = all.map(|it| (it["start"].as_u64().unwrap(), uuids(it))).collect();
    all.sort();
    all
}

/// An agent with one instance that it made at unit 0, and its UUID.
fn with_one(bed: &Bed, replica: &Replica) -> (Agent, String) {
    let agent = Agent::start(bed, &[replica], QUICK);
    replica.order(1, &[("1g.10gb", 0)], &[]);
    replica.until_instances(&[("1g.10gb", 0, true), FOREIGN]);
    let uuid = replica.instances()[0].uuid.clone();
    (agent, uuid)
}

/// Orders that an instance goes, and waits until its handle is looked up, which takes 3 s then.
fn until_about_to_go(bed: &Bed, replica: &Replica, mut slow: Value, uuid: &str) {
    slow["delays_ms"] = json!({ FIND: 3_000 });
    bed.play(&slow);
    let before = count(bed, FIND);
    replica.order(1, &[], &[uuid]);
    replica.until("it is about to go", |_| count(bed, FIND) > before);
}

/// While its handle is looked up, others put an instance of their own in its place. The driver gives the number of an
/// instance to the next one on its units, and derives the UUID from it (`nvGenerateSmcUuid`, open-gpu-kernel-modules).
#[test]
fn an_instance_that_took_the_number_of_one_that_is_to_go_stays() {
    for (profile, id) in [("1g.10gb", SMALL.0), ("1g.10gb+me", 20)] {
        let bed = bed(&scenario());
        let replica = Replica::start();
        let (_agent, own) = with_one(&bed, &replica);
        let uuid = if id == SMALL.0 { "MIG-of-others" } else { &*own };
        until_about_to_go(&bed, &replica, scenario(), &own);
        by_hand(&bed, |all| {
            let own = all.iter_mut().find(|it| it["start"] == 0).unwrap();
            (own["profile"], own["computes"]) = (json!(id), json!([compute(uuid)]));
        });
        replica.until_instances(&[(profile, 0, false), FOREIGN]);
        bed.play(&scenario());
        replica.more_reports(20);
        replica.until_instances(&[(profile, 0, false), FOREIGN]);
        assert_eq!((count(&bed, DESTROY_COMPUTE), count(&bed, DESTROY)), (0, 0), "{profile}");
        assert_eq!(there(&bed)[0], (0, vec![uuid.to_owned()]));
    }
}

/// What others put there has no compute instance yet.
#[test]
fn half_an_instance_of_others_in_the_place_of_one_that_is_to_go_stays() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let (agent, own) = with_one(&bed, &replica);
    until_about_to_go(&bed, &replica, scenario(), &own);
    by_hand(&bed, |all| {
        let own = all.iter_mut().find(|it| it["start"] == 0).unwrap();
        own["computes"] = json!([]);
    });
    bed.play(&scenario());
    replica.until_instances(&[FOREIGN]);
    replica.order(1, &[], &[]);
    // An agent that starts again does not know of it either.
    drop(agent);
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.more_reports(30);
    assert_eq!((gpu_instances(&bed), count(&bed, DESTROY)), (2, 0));
}

/// An administrator adds a compute instance to a GPU instance of gpupack just before it goes.
#[test]
fn an_instance_that_others_have_added_to_stays() {
    let mut bigger = scenario();
    bigger["gpus"][0]["at_boot"] = json!([]);
    let bed = bed(&bigger);
    let replica = Replica::start();
    let _agent = Agent::start(&bed, &[&replica], QUICK);
    replica.order(1, &[("2g.20gb", 0)], &[]);
    replica.until_instances(&[("2g.20gb", 0, true)]);
    let own = replica.instances()[0].uuid.clone();
    until_about_to_go(&bed, &replica, bigger, &own);
    by_hand(&bed, |all| {
        let computes = all[0]["computes"].as_array_mut().unwrap();
        computes[0]["slices"] = json!(1);
        computes.push(json!({"id": 1, "slices": 1, "uuid": "MIG-of-others"}));
    });
    replica.until("why it stays", |it| {
        it.failures().iter().any(|it| it.error.contains("other compute instances"))
    });
    assert_eq!((count(&bed, DESTROY_COMPUTE), count(&bed, DESTROY)), (0, 0));
    assert_eq!(there(&bed)[0].1.len(), 2);
}

/// NVIDIA/DCGM #276: compute instances and GPU instances are held open, with an empty list of processes.
#[test]
fn an_instance_that_a_monitor_has_open_goes_when_that_lets_go() {
    let half = changed("failures", json!({ DESTROY: 19 }));
    for (held, is_half) in [(changed("monitored", json!([0])), false), (half, true)] {
        let bed = bed(&scenario());
        let replica = Replica::start();
        let (_agent, uuid) = with_one(&bed, &replica);
        bed.play(&held);
        replica.order(1, &[], &[&uuid]);
        replica.until("the failure", |it| {
            it.failures().iter().any(|it| it.error.contains("a monitor (DCGM, dcgm-exporter"))
        });
        if is_half {
            // No inventory has it any more, so the report says which units are taken.
            replica.until("its units", |it| {
                let failures = it.failures();
                failures.iter().any(|it| it.hidden.is_some_and(|it| (it.start, it.size) == (0, 1)))
            });
            assert_eq!(replica.failures()[0].instance, None);
        }
        // Meanwhile others are made where there is room.
        let gone: &[&str] = if is_half { &[] } else { &[&uuid] };
        replica.order(1, &[("1g.10gb", 3)], gone);
        replica.until("another one", |it| it.shown().iter().any(|it| it.1 == 3));
        assert_eq!(gpu_instances(&bed), 3);
        bed.play(&scenario());
        replica.until_instances(&[("1g.10gb", 3, true), FOREIGN]);
        replica.until("no failure", |it| it.failures().is_empty());
        replica.until("it is gone", |_| gpu_instances(&bed) == 2);
    }
}

/// MIG Manager replaces the whole layout while instances of gpupack have tenants, and one is about to be made.
#[test]
fn a_layout_that_others_make_stays_whatever_is_ordered() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let (_agent, own) = with_one(&bed, &replica);
    let uuids = [0, 1, 2].map(|start| format!("MIG-of-manager-{start}"));
    let layout = (0..).zip(&uuids).map(|(start, uuid)| small(start + 1, start, uuid));
    by_hand(&bed, |all| *all = layout.collect());
    let theirs = [("1g.10gb", 0, false), ("1g.10gb", 1, false), ("1g.10gb", 2, false)];
    replica.until_instances(&theirs);
    // The tenant's instance is to be there again, an idle one to go, another one to be made, all at once.
    replica.order(1, &[("1g.10gb", 0), ("2g.20gb", 2)], &[&own, "MIG-of-manager-1"]);
    replica.until("what is in the way", |it| {
        it.failures().iter().any(|it| it.error.contains("`MIG-of-manager-2` (1g.10gb at unit 2)"))
    });
    replica.more_reports(20);
    replica.until_instances(&theirs);
    assert_eq!(
        (count(&bed, CREATE), count(&bed, DESTROY_COMPUTE), count(&bed, DESTROY)),
        (1, 0, 0)
    );
    // The next one that the agent makes there is its own again, also with the number of an earlier one.
    by_hand(&bed, Vec::clear);
    replica.order(1, &[("1g.10gb", 0)], &[]);
    replica.until_instances(&[("1g.10gb", 0, true)]);
}

/// A switch of the mode takes all instances away.
#[test]
fn instances_are_made_again_after_others_have_switched_the_mode() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let (_agent, own) = with_one(&bed, &replica);
    bed.play(&changed("mig", Value::Null));
    replica.until("what is in the way", |it| {
        it.failures().iter().any(|it| it.error == "the GPU is not in MIG mode")
    });
    assert!(replica.instances().is_empty());
    by_hand(&bed, Vec::clear);
    bed.play(&scenario());
    replica.until("it is made again", |it| it.shown() == [("1g.10gb".to_owned(), 0, true)]);
    assert_ne!(replica.instances()[0].uuid, own);
    replica.until("no failure", |it| it.failures().is_empty());
    replica.order(1, &[], &[&own]);
    replica.more_reports(20);
    assert_eq!(gpu_instances(&bed), 1, "an order about the earlier one");
}

/// What an agent takes over, others replace before it is ordered to go.
#[test]
fn an_instance_in_the_place_of_one_that_was_taken_over_stays() {
    let bed = bed(&scenario());
    let replica = Replica::start();
    let _agent = process_with(&bed, &replica, &["--mig-adopt"]);
    replica.until_instances(&[("1g.10gb", 6, true)]);
    let adopted = replica.instances()[0].uuid.clone();
    by_hand(&bed, |all| *all = vec![small(1, 6, "MIG-of-others")]);
    replica.order(1, &[], &[&adopted, "MIG-of-others"]);
    replica.until_instances(&[("1g.10gb", 6, false)]);
    replica.more_reports(20);
    assert_eq!(there(&bed), [(6, vec!["MIG-of-others".to_owned()])]);
    assert_eq!((count(&bed, DESTROY_COMPUTE), count(&bed, DESTROY)), (0, 0));
}
