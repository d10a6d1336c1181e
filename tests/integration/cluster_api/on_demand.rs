//! MIG instances that are made for a bind, given to the container by their UUID, made again after a reboot,
//! and removed after the pod.

use std::sync::Arc;
use std::time::Duration;

use control::bind::edits::restore_edited;
use engine::model::reservation::ReservationState;
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use runtime::clock::Clock;
use serde_json::{Value, json};
use server::api::background;
use wire::ids::PodUid;

use super::binding::{Bed, node, pod_of, requests};
use crate::harness::fake_api_server::{Fake, Fault};

const CONFIG: &str = "pools: {'': {mig: on_demand}}";

/// An A30 in MIG mode whose agent can make instances, with these: UUID, profile, start, size.
fn inventory(instances: &[(&str, &str, u32, u32)]) -> Value {
    let row = |profile: &str, mib: u64, size: u32, starts: &[u32]| json!({"profile": profile, "memoryMib": mib, "size": size, "starts": starts});
    let rows = [
        row("1g.6gb", 5_952, 1, &[0, 1, 2, 3]),
        row("2g.12gb", 11_968, 2, &[0, 2]),
        row("4g.24gb", 24_000, 4, &[0]),
    ];
    let gpu = json!({"id": "GPU-a", "index": 0, "model": "NVIDIA A30", "memoryMib": 24_576,
        "reservedMib": 0, "kind": "MigParent", "healthy": true, "migProfiles": rows});
    let instances = instances.iter().map(|(id, profile, start, size)| {
        json!({"id": id, "index": 0, "model": "NVIDIA A30", "memoryMib": 5_952 * size, "reservedMib": 0,
            "kind": "MigInstance", "parentId": "GPU-a", "migProfile": profile, "healthy": true,
            "migPlacement": {"start": start, "size": size}, "madeHere": true})
    });
    Value::Array(std::iter::once(gpu).chain(instances).collect())
}

/// The same of others.
fn of_others(instances: &[(&str, &str, u32, u32)]) -> Value {
    let mut all = inventory(instances);
    let own = all.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut);
    own.for_each(|it| _ = it.remove("madeHere"));
    all
}

struct Agent {
    sequence: u64,
    session: Value,
    /// What the last orders promised, with their term.
    promised: Value,
}

impl Agent {
    /// It has said what it has.
    fn new() -> Self {
        Self { sequence: 1, session: Value::Null, promised: Value::Null }
    }

    /// Reports, and returns the orders of the reply.
    async fn report(&mut self, bed: &Bed, devices: &Value, failures: Value) -> Value {
        self.sequence += 1;
        let uses = devices.as_array().into_iter().flatten().map(|device| match &device["kind"] {
            kind if kind == "MigParent" => json!({"id": device["id"], "healthy": true}),
            _ => json!({"id": device["id"], "usedMib": 0, "healthy": true, "processes": []}),
        });
        let report = json!({
            "apiVersion": "gpupack.dev/v1alpha1", "agent": "agent-of-n1", "sequence": self.sequence,
            "session": self.session, "inventory": devices, "devices": uses.collect::<Vec<_>>(),
            "migFailures": failures, "migPromises": self.promised,
        });
        let mut reply = bed.send("PUT", "/v1/nodes/n1/report", &report).await;
        self.session = reply["session"].take();
        let mut orders = reply["migOrders"].take();
        let promises = orders.as_object_mut().and_then(|it| it.remove("promises"));
        let promises = promises.unwrap_or_else(|| json!([]));
        if !orders.is_null() {
            self.promised = json!({"term": orders["term"], "instances": promises});
        }
        orders
    }
}

async fn bed(fake: &Fake) -> (Bed, Agent) {
    let config = Config::from_yaml(CONFIG).unwrap();
    let asks = json!({"gpu-memory": "9000", "gpupack.dev/isolation": "hardware"});
    let bed = Bed::made(fake, (config, Clock::start()), asks, &inventory(&[])).await;
    bed.app.lead.set_fenced();
    bed.watch(fake);
    (bed, Agent::new())
}

fn orders(make: &[(&str, u32)], remove: &[&str]) -> Value {
    let make = make
        .iter()
        .map(|(profile, start)| json!({"gpu": "GPU-a", "profile": profile, "start": start}));
    json!({"make": make.collect::<Vec<_>>(), "remove": remove})
}

/// The orders without their term.
fn without_term(mut orders: Value) -> Value {
    assert!(orders["term"].as_u64().is_some(), "{orders}");
    orders.as_object_mut().unwrap().remove("term");
    orders
}

fn annotation(fake: &Fake, name: &str) -> String {
    let key = format!("placed.gpupack.dev/{name}");
    fake.bed(|bed| bed.pod.as_ref().unwrap().annotations.get(&key).cloned().unwrap_or_default())
}

/// The watch shows the pod as it is, on its node.
fn see(bed: &Bed, fake: &Fake) {
    let mut pod = pod_of(fake);
    pod["spec"]["nodeName"] = json!("n1");
    bed.app.pod(&SeenPod::from_json(&pod.to_string()).unwrap());
}

/// Binds the pod while an agent makes its instance.
async fn bound(fake: &Fake) -> (Bed, Agent) {
    let (bed, mut agent) = bed(fake).await;
    assert_eq!(bed.filter(&pod_of(fake)).await, json!(["n1"]));
    let made = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        let ordered = agent.report(&bed, &inventory(&[]), json!([])).await;
        assert_eq!(without_term(ordered), orders(&[("2g.12gb", 0)], &[]));
        assert_eq!(requests(fake, "/binding"), 0, "not before it is made");
        let there = inventory(&[("MIG-1", "2g.12gb", 0, 2)]);
        agent.report(&bed, &there, json!([])).await
    };
    let (error, ordered) = tokio::join!(bed.bind(), made);
    assert_eq!((error.as_str(), node(fake).as_deref()), ("", Some("n1")));
    assert_eq!(without_term(ordered), orders(&[], &[]));
    (bed, agent)
}

#[tokio::test]
async fn a_bind_waits_for_its_instance_and_posts_its_uuid() {
    let fake = Fake::with_pod();
    let (bed, _) = bound(&fake).await;
    assert_eq!(annotation(&fake, "uuids"), "MIG-1");
    let placement: Value = serde_json::from_str(&annotation(&fake, "placement")).unwrap();
    let spot = json!({"gpu": "GPU-a", "profile": "2g.12gb", "start": 0});
    assert_eq!(placement["devices"][0]["mig"], spot);
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    bed.app.ledger.audit().unwrap();
    let metrics = bed.text("/metrics").await;
    for line in [
        r#"gpupack_mig_instances{profile="2g.12gb",state="made"} 1"#,
        r#"gpupack_mig_placeable{profile="2g.12gb"} 1"#,
        r#"gpupack_mig_placeable{profile="1g.6gb"} 2"#,
        r#"gpupack_mig_placeable{profile="4g.24gb"} 0"#,
        r#"gpupack_mig_orders_total{outcome="made",profile="2g.12gb"} 1"#,
        r#"gpupack_mig_orders_total{outcome="failed",profile="2g.12gb"} 0"#,
        r#"gpupack_mig_make_seconds_count{profile="2g.12gb"} 1"#,
    ] {
        assert!(metrics.lines().any(|it| it == line), "{line}: {metrics}");
    }
}

#[tokio::test]
async fn an_instance_is_made_again_after_a_reboot_and_its_uuid_is_written() {
    let fake = Fake::with_pod();
    let (bed, mut agent) = bound(&fake).await;
    see(&bed, &fake);
    let ordered = agent.report(&bed, &inventory(&[]), json!([])).await;
    assert_eq!(without_term(ordered), orders(&[("2g.12gb", 0)], &[]));
    see(&bed, &fake); // the watch shows the old UUID: that is no edit
    restore_edited(&bed.app).await;
    assert_eq!(annotation(&fake, "uuids"), "MIG-1", "there is no other yet");
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    agent.report(&bed, &inventory(&[("MIG-2", "2g.12gb", 0, 2)]), json!([])).await;
    for _ in 0..500 {
        if annotation(&fake, "uuids") == "MIG-2" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(annotation(&fake, "uuids"), "MIG-2");
    see(&bed, &fake); // our own write is no edit
    let text = String::from_utf8(bed.app.metrics.text()).unwrap();
    assert!(!text.contains("gpupack_placement_edits_total{result=\"seen\"} 1"), "{text}");
    bed.app.ledger.audit().unwrap();
}

/// What a bind has an agent do that has no instance. The process ends with that.
async fn orders_of_bind(bed: &Bed, agent: &mut Agent) -> Value {
    let ordered = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        agent.report(bed, &inventory(&[]), json!([])).await
    };
    tokio::select! {
        error = bed.bind() => panic!("{error}"),
        ordered = ordered => without_term(ordered),
    }
}

/// The leader ends between the order and the Binding.
#[tokio::test]
async fn the_next_leader_keeps_the_place_that_was_promised_to_a_pod() {
    let fake = Fake::with_pod();
    let (first, mut agent) = bed(&fake).await;
    assert_eq!(first.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!(orders_of_bind(&first, &mut agent).await, orders(&[("2g.12gb", 0)], &[]));
    let promised = |start: u32| json!([{"podUid": "u1", "gpu": "GPU-a", "profile": "2g.12gb", "start": start}]);
    assert_eq!(agent.promised["instances"], promised(0));
    // Whatever the next one would choose.
    for start in [0, 2] {
        let (next, mut agent) = bed(&fake).await;
        agent.promised = json!({"term": 1, "instances": promised(start)});
        let idle = inventory(&[("MIG-1", "2g.12gb", start, 2)]);
        let ordered = agent.report(&next, &idle, json!([])).await;
        assert_eq!(without_term(ordered), orders(&[], &["MIG-1"]), "it is made again");
        assert_eq!(next.app.ledger.hold_count(), 1, "{start}");
        assert_eq!(next.filter(&wants("other", "4g.24gb", 1)).await, json!([]), "units are kept");
        assert_eq!(next.filter(&pod_of(&fake)).await, json!(["n1"]));
        assert_eq!(agent.report(&next, &idle, json!([])).await["remove"], json!(["MIG-1"]));
        assert_eq!(agent.promised["instances"], promised(start), "for one more leader");
        let made = orders(&[("2g.12gb", start)], &[]);
        assert_eq!(orders_of_bind(&next, &mut agent).await, made);
        assert_eq!(agent.promised["instances"], promised(start));
    }
}

#[tokio::test]
async fn no_place_is_kept_for_a_pod_that_does_not_wait_or_where_there_is_none() {
    let fake = Fake::with_pod();
    let (bed, mut agent) = bed(&fake).await;
    let of = |uid: &str, profile: &str, start: u32| json!({"podUid": uid, "gpu": "GPU-a", "profile": profile, "start": start});
    for (promised, kept) in [
        (json!([of("gone", "2g.12gb", 0)]), 0),
        (json!([of("u1", "1g.6gb", 0)]), 0), // it requests more
        (json!([of("u1", "2g.12gb", 1)]), 0),
        (json!([of("u1", "2g.12gb", 0), of("u1", "2g.12gb", 2)]), 0),
        (json!([of("u1", "2g.12gb", 2)]), 1),
    ] {
        agent.promised = json!({"term": 1, "instances": promised});
        agent.report(&bed, &inventory(&[]), json!([])).await;
        assert_eq!(bed.app.ledger.hold_count(), kept, "{promised}");
        bed.app.ledger.audit().unwrap();
    }
}

/// The answer to a Binding is lost, and before it is posted again, the instance is destroyed.
#[tokio::test]
async fn an_instance_that_is_gone_is_not_posted_again() {
    let fake = Fake::with_pod().on_bind(Fault::Answer(500));
    fake.bed(|bed| bed.on_fence.push_back(Fault::SilentAfterCommit));
    let (bed, mut agent) = bed(&fake).await;
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    let gone = async {
        while agent.report(&bed, &inventory(&[]), json!([])).await["make"] == json!([]) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        agent.report(&bed, &inventory(&[("MIG-1", "2g.12gb", 0, 2)]), json!([])).await;
        while requests(&fake, "PATCH") == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        agent.report(&bed, &inventory(&[]), json!([])).await
    };
    let (error, _) = tokio::join!(bed.bind(), gone);
    assert_eq!((node(&fake), requests(&fake, "/binding")), (None, 1), "{error}");
    assert!(error.contains("has gone meanwhile"), "{error}");
}

/// While this process was frozen, another one may have had the instance made again, and written that.
#[tokio::test]
async fn an_instance_that_may_be_newer_than_the_last_report_stays_written() {
    for (was_frozen, stays) in [(true, "MIG-2"), (false, "MIG-1")] {
        let fake = Fake::with_pod();
        let (bed, _) = bound(&fake).await;
        see(&bed, &fake);
        if was_frozen {
            let now = bed.app.clock.now();
            bed.app.lead.pulse.tick(now);
            bed.app.lead.pulse.tick(now.plus(Duration::from_secs(60)));
        }
        let edit = |key: &str, to: &str| {
            fake.bed(|bed| {
                let pod = bed.pod.as_mut().unwrap();
                let edited = pod.annotations.iter_mut().filter(|(name, _)| name.contains(key));
                edited.for_each(|(_, it)| *it = it.replace("MIG-1", to).replace("MIG-0", to));
                pod.version += 1;
            });
        };
        edit("uuids", "MIG-0");
        see(&bed, &fake); // which is to be written back
        edit("", "MIG-2");
        restore_edited(&bed.app).await;
        assert_eq!(annotation(&fake, "uuids"), stays, "{was_frozen}");
        bed.app.ledger.audit().unwrap();
    }
}

#[tokio::test]
async fn an_instance_is_removed_after_its_pod() {
    let fake = Fake::with_pod();
    let (bed, mut agent) = bound(&fake).await;
    let there = inventory(&[("MIG-1", "2g.12gb", 0, 2)]);
    bed.app.ledger.end_pod(&PodUid::new("u1"), bed.app.clock.now());
    let mut ordered = Vec::new();
    for _ in 0..3 {
        ordered.push(without_term(agent.report(&bed, &there, json!([])).await));
    }
    // Two lists without a process of it come first.
    let (none, remove) = (orders(&[], &[]), orders(&[], &["MIG-1"]));
    assert_eq!(ordered, [none.clone(), remove.clone(), remove]);
    // No pod gets an instance that goes: another one is made in its place.
    let waits = json!({"metadata": {"uid": "next", "namespace": "team-a", "name": "next",
            "annotations": {"gpu-memory": "20000", "gpupack.dev/isolation": "hardware"}},
        "spec": {"schedulerName": "gpupack", "containers": [{"name": "main"}]}});
    assert_eq!(bed.filter(&waits).await, json!(["n1"]));
    let gone = without_term(agent.report(&bed, &inventory(&[]), json!([])).await);
    assert_eq!(gone, none);
}

#[tokio::test]
async fn instances_that_an_agent_takes_over_go_when_no_pod_has_them() {
    let fake = Fake::with_pod();
    let (bed, mut agent) = bed(&fake).await;
    let there = [("MIG-1", "2g.12gb", 0, 2), ("MIG-2", "1g.6gb", 2, 1)];
    let (adopted, of_others) = (inventory(&there), of_others(&there));
    let (none, remove) = (orders(&[], &[]), |uuid| orders(&[], &[uuid]));
    assert_eq!(without_term(agent.report(&bed, &of_others, json!([])).await), none);
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!((bed.bind().await.as_str(), node(&fake).as_deref()), ("", Some("n1")));
    assert_eq!(annotation(&fake, "uuids"), "MIG-1");
    // The idle one goes, that of the pod stays.
    assert_eq!(without_term(agent.report(&bed, &adopted, json!([])).await), remove("MIG-2"));
    let left = inventory(&[("MIG-1", "2g.12gb", 0, 2)]);
    assert_eq!(without_term(agent.report(&bed, &left, json!([])).await), none);
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    bed.app.ledger.audit().unwrap();
    bed.app.ledger.end_pod(&PodUid::new("u1"), bed.app.clock.now());
    assert_eq!(without_term(agent.report(&bed, &left, json!([])).await), none);
    assert_eq!(without_term(agent.report(&bed, &left, json!([])).await), remove("MIG-1"));
}

#[tokio::test]
async fn a_bind_ends_if_its_instance_cannot_be_made_and_the_next_one_goes_elsewhere() {
    let fake = Fake::with_pod();
    let (bed, mut agent) = bed(&fake).await;
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    let fails = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        let failure =
            json!([{"gpu": "GPU-a", "profile": "2g.12gb", "start": 0, "error": "in use"}]);
        agent.report(&bed, &inventory(&[]), failure).await
    };
    let (error, _) = tokio::join!(bed.bind(), fails);
    assert!(error.contains("could not be made"), "{error}");
    assert!(error.ends_with("the node's agent reports: in use"), "{error}");
    assert_eq!(requests(&fake, "/binding"), 0);
    let failed = r#"gpupack_mig_orders_total{outcome="failed",profile="2g.12gb"} 1"#;
    assert!(bed.text("/metrics").await.contains(failed));
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    let made = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        let ordered = agent.report(&bed, &inventory(&[]), json!([])).await;
        assert_eq!(without_term(ordered), orders(&[("2g.12gb", 2)], &[]));
        agent.report(&bed, &inventory(&[("MIG-1", "2g.12gb", 2, 2)]), json!([])).await
    };
    let (error, _) = tokio::join!(bed.bind(), made);
    assert_eq!((error.as_str(), annotation(&fake, "uuids").as_str()), ("", "MIG-1"));
}

/// What an agent reports of an instance that DCGM has open.
fn held_open() -> Value {
    json!([{"gpu": "GPU-a", "profile": "2g.12gb", "start": 0, "instance": "MIG-1",
        "error": "a process or a monitor has it open"}])
}

#[tokio::test]
async fn units_that_a_monitor_keeps_are_promised_to_no_pod_until_it_lets_go() {
    let fake = Fake::with_pod();
    let (bed, mut agent) = bed(&fake).await;
    let there = inventory(&[("MIG-1", "2g.12gb", 0, 2)]);
    let ordered = agent.report(&bed, &there, json!([])).await;
    assert_eq!(without_term(ordered), orders(&[], &["MIG-1"]), "no pod has it");
    assert_eq!(bed.filter(&wants("whole", "4g.24gb", 1)).await, json!(["n1"]));
    for _ in 0..3 {
        let ordered = agent.report(&bed, &there, held_open()).await;
        assert_eq!(without_term(ordered), orders(&[], &["MIG-1"]), "it is tried again");
        assert_eq!(bed.filter(&wants("whole", "4g.24gb", 1)).await, json!([]));
        assert_eq!(bed.filter(&wants("two", "2g.12gb", 2)).await, json!([]));
        assert_eq!(bed.filter(&wants("half", "2g.12gb", 1)).await, json!(["n1"]));
    }
    bed.app.ledger.audit().unwrap();
    agent.report(&bed, &inventory(&[]), json!([])).await;
    assert_eq!(bed.filter(&wants("whole", "4g.24gb", 1)).await, json!(["n1"]));
}

#[tokio::test]
async fn a_pod_that_was_promised_units_which_a_monitor_keeps_gets_others() {
    let fake = Fake::with_pod();
    let (bed, mut agent) = bed(&fake).await;
    let there = inventory(&[("MIG-1", "2g.12gb", 0, 2)]);
    agent.report(&bed, &there, json!([])).await;
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    let clock = Clock::start();
    let began = clock.precise();
    let fails = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        let ordered = agent.report(&bed, &there, json!([])).await;
        assert_eq!(without_term(ordered), orders(&[], &["MIG-1"]), "that has to go first");
        agent.report(&bed, &there, held_open()).await
    };
    let (error, _) = tokio::join!(bed.bind(), fails);
    assert!(
        error.ends_with(
            "`MIG-1` on these units cannot be removed: a process or a monitor has it open"
        ),
        "{error}"
    );
    assert!(clock.precise() - began < Duration::from_secs(2), "not after its patience");
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    let made = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        let ordered = agent.report(&bed, &there, held_open()).await;
        assert_eq!(without_term(ordered), orders(&[("2g.12gb", 2)], &["MIG-1"]));
        let both = inventory(&[("MIG-1", "2g.12gb", 0, 2), ("MIG-2", "2g.12gb", 2, 2)]);
        agent.report(&bed, &both, held_open()).await
    };
    let (error, _) = tokio::join!(bed.bind(), made);
    assert_eq!((error.as_str(), annotation(&fake, "uuids").as_str()), ("", "MIG-2"));
    bed.app.ledger.audit().unwrap();
}

/// A GPU of a model without a table, in MIG mode, with the list of its agent. On units 6 and 7, an instance of others.
fn unlisted(sm_counts: [Option<u32>; 4], made: &[(&str, &str, u32, u32)]) -> Value {
    let rows = [
        ("1g.23gb", 22_528, 1, vec![0, 1, 2, 3, 4, 5, 6]),
        ("2g.47gb", 46_592, 2, vec![0, 2, 4]),
        ("4g.93gb", 93_000, 4, vec![0]),
        ("7g.186gb", 186_000, 8, vec![0]),
    ];
    let rows = rows.iter().zip(sm_counts).map(|((profile, mib, size, starts), sm_count)| {
        json!({"profile": profile, "memoryMib": mib, "size": size, "starts": starts, "smCount": sm_count})
    });
    let gpu = json!({"id": "GPU-a", "index": 0, "model": "NVIDIA GB200", "memoryMib": 189_471,
        "kind": "MigParent", "healthy": true, "migProfiles": rows.collect::<Vec<_>>()});
    let others = ("MIG-0", "1g.23gb", 6, 1);
    let instances = std::iter::once(&others).chain(made).map(|(id, profile, start, size)| {
        json!({"id": id, "index": 0, "model": "NVIDIA GB200", "memoryMib": 22_000 * size,
            "kind": "MigInstance", "parentId": "GPU-a", "migProfile": profile, "healthy": true,
            "migPlacement": {"start": start, "size": size}, "madeHere": *id != "MIG-0"})
    });
    Value::Array(std::iter::once(gpu).chain(instances).collect())
}

const COUNTED: [Option<u32>; 4] = [Some(18), Some(38), Some(76), Some(148)];

#[tokio::test]
async fn a_model_without_a_table_is_divided_by_the_list_of_its_agent() {
    let fake = Fake::with_pod();
    let config = Config::from_yaml(CONFIG).unwrap();
    let asks = json!({"gpu-fraction": "0.25", "gpupack.dev/isolation": "hardware"});
    let start = unlisted(COUNTED, &[]);
    let bed = Bed::made(&fake, (config, Clock::start()), asks, &start).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let mut agent = Agent::new();
    bed.app.ledger.tick(bed.app.clock.now());
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    let made = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        // Beside the instance of others, so that units 0 to 3 stay whole: not the first free place.
        let ordered = agent.report(&bed, &start, json!([])).await;
        assert_eq!(without_term(ordered), orders(&[("2g.47gb", 4)], &[]));
        agent.report(&bed, &unlisted(COUNTED, &[("MIG-1", "2g.47gb", 4, 2)]), json!([])).await
    };
    let (error, _) = tokio::join!(bed.bind(), made);
    assert_eq!((error.as_str(), node(&fake).as_deref()), ("", Some("n1")));
    assert_eq!(annotation(&fake, "uuids"), "MIG-1");
    let placement: Value = serde_json::from_str(&annotation(&fake, "placement")).unwrap();
    let spot = json!({"gpu": "GPU-a", "profile": "2g.47gb", "start": 4});
    assert_eq!(placement["devices"][0]["mig"], spot);
    let state: Value = serde_json::from_str(&bed.text("/v1/state").await).unwrap();
    let devices = state["nodes"][0]["devices"].as_array().unwrap();
    let own = devices.iter().find(|it| it["id"] == "MIG-1").unwrap();
    assert_eq!(own["computeMillionths"], 38 * 1_000_000 / 148, "{own}");
    bed.app.ledger.audit().unwrap();
    // Another list does not move what is there, and one that gives no geometry serves no part of a GPU.
    let there = [("MIG-1", "2g.47gb", 4, 2)];
    agent.report(&bed, &unlisted([None; 4], &there), json!([])).await;
    bed.app.ledger.tick(bed.app.clock.now());
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    bed.app.ledger.audit().unwrap();
    let next = |amount: Value| {
        json!({"metadata": {"uid": "next", "namespace": "team-a", "name": "next", "annotations": amount},
            "spec": {"schedulerName": "gpupack", "containers": [{"name": "main"}]}})
    };
    let part = next(json!({"gpu-fraction": "0.25", "gpupack.dev/isolation": "hardware"}));
    let memory = next(json!({"gpu-memory": "46000", "gpupack.dev/isolation": "hardware"}));
    assert_eq!(bed.filter(&part).await, json!([]));
    assert_eq!(bed.filter(&memory).await, json!(["n1"]));
    agent.report(&bed, &unlisted(COUNTED, &there), json!([])).await;
    assert_eq!(bed.filter(&part).await, json!(["n1"]));
}

/// What the events on pods say, once all are written.
async fn notes(fake: &Fake, reason: &str) -> Vec<String> {
    for _ in 0..100 {
        let written = fake.bed(|bed| bed.events.clone());
        let of = written.iter().filter(|event| event["reason"] == reason);
        let notes: Vec<String> = of.map(|it| it["note"].as_str().unwrap().to_owned()).collect();
        if !notes.is_empty() {
            return notes;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Vec::new()
}

/// What `/v1/explain` says of a pod.
async fn verdict(bed: &Bed, pod: &str) -> String {
    let explained = bed.send("GET", &format!("/v1/explain?pod={pod}"), &Value::Null).await;
    explained["verdict"].as_str().unwrap().to_owned()
}

/// A waiting pod that requests a MIG instance of this profile.
fn wants(name: &str, profile: &str, count: u32) -> Value {
    let limits = json!({format!("nvidia.com/mig-{profile}"): count.to_string()});
    json!({"metadata": {"uid": name, "namespace": "team-a", "name": name},
        "spec": {"schedulerName": "gpupack", "containers": [{"name": "main", "resources": {"limits": limits}}]}})
}

#[tokio::test]
async fn an_instance_that_is_destroyed_under_its_pod_is_named_and_its_place_stays_allocated() {
    let fake = Fake::with_pod();
    let (mut bed, mut agent) = bound(&fake).await;
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    tokio::spawn(bed.notices.take().unwrap().run());
    let ordered = agent.report(&bed, &inventory(&[]), json!([])).await;
    assert_eq!(without_term(ordered), orders(&[("2g.12gb", 0)], &[]));
    let said = notes(&fake, "DeviceLost").await;
    assert_eq!(said.len(), 1, "{said:?}");
    let starts = "its MIG instance MIG-1 on node n1 is gone, by a boot or because another program";
    assert!(said[0].starts_with(starts) && said[0].contains("restart its container"), "{said:?}");
    let explained = verdict(&bed, "team-a/infer").await;
    assert!(explained.contains("is gone, and is made again at the same place"), "{explained}");
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    assert_eq!(bed.filter(&wants("other", "4g.24gb", 1)).await, json!([]), "two units are its own");
    agent.report(&bed, &inventory(&[("MIG-2", "2g.12gb", 0, 2)]), json!([])).await;
    assert!(!verdict(&bed, "team-a/infer").await.contains("is gone"));
    bed.app.ledger.audit().unwrap();
}

#[tokio::test]
async fn an_instance_of_others_that_is_destroyed_under_a_pod_stays_allocated_to_it() {
    let fake = Fake::with_pod();
    let asks = json!({"gpu-memory": "9000", "gpupack.dev/isolation": "hardware"});
    let there = inventory(&[("MIG-1", "2g.12gb", 0, 2)]);
    let mut bed = Bed::made(&fake, (Config::default(), Clock::start()), asks, &there).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let mut agent = Agent::new();
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!((bed.bind().await.as_str(), annotation(&fake, "uuids").as_str()), ("", "MIG-1"));
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    tokio::spawn(bed.notices.take().unwrap().run());
    agent.report(&bed, &inventory(&[("MIG-2", "1g.6gb", 0, 1)]), json!([])).await;
    let said = notes(&fake, "DeviceLost").await;
    assert_eq!(
        said,
        [
            "its device MIG-1 on node n1 has vanished: it stays allocated, nothing more is placed there; delete the \
          pod to get another one"
        ]
    );
    let explained = verdict(&bed, "team-a/infer").await;
    assert!(explained.contains("is not there any more: delete the pod"), "{explained}");
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    // Another one with its UUID is the pod's again.
    agent.report(&bed, &there, json!([])).await;
    assert_eq!(bed.filter(&wants("other", "2g.12gb", 1)).await, json!([]));
    assert!(!verdict(&bed, "team-a/infer").await.contains("any more"));
    bed.app.ledger.audit().unwrap();
}

/// MIG Manager, or an administrator, divides the GPU anew while a pod runs there. The driver gives the UUID of an
/// instance to the next one on its units.
#[tokio::test]
async fn instances_that_others_make_under_a_pod_are_given_to_no_pod_and_go_by_no_order() {
    for uuid in ["MIG-9", "MIG-1"] {
        let fake = Fake::with_pod();
        let (mut bed, mut agent) = bound(&fake).await;
        see(&bed, &fake);
        let (_stop, stopped) = tokio::sync::watch::channel(false);
        tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
        tokio::spawn(bed.notices.take().unwrap().run());
        let theirs = of_others(&[(uuid, "1g.6gb", 0, 1), ("MIG-8", "2g.12gb", 2, 2)]);
        for _ in 0..3 {
            let ordered = agent.report(&bed, &theirs, json!([])).await;
            assert_eq!(without_term(ordered), orders(&[("2g.12gb", 0)], &[]), "{uuid}");
        }
        let said = notes(&fake, "DeviceLost").await;
        assert!(said.len() == 1 && said[0].starts_with("its MIG instance MIG-1 "), "{said:?}");
        assert_eq!(bed.state(), Some(ReservationState::Confirmed));
        assert_eq!(bed.filter(&wants("other", "1g.6gb", 1)).await, json!([]), "{uuid}");
        assert_eq!(bed.filter(&wants("half", "2g.12gb", 1)).await, json!(["n1"]), "MIG-8");
        assert_eq!(bed.filter(&wants("two", "2g.12gb", 2)).await, json!([]));
        assert_eq!(annotation(&fake, "uuids"), "MIG-1");
        bed.app.ledger.audit().unwrap();
        // They remove it, and the pod gets its own again.
        let mut all = of_others(&[("MIG-8", "2g.12gb", 2, 2)]);
        let again = inventory(&[("MIG-5", "2g.12gb", 0, 2)])[1].clone();
        agent.report(&bed, &all, json!([])).await;
        all.as_array_mut().unwrap().push(again);
        agent.report(&bed, &all, json!([])).await;
        for _ in 0..500 {
            if annotation(&fake, "uuids") == "MIG-5" {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(annotation(&fake, "uuids"), "MIG-5", "{uuid}");
    }
}

/// The mode of a GPU is switched off and on under a pod.
#[tokio::test]
async fn a_pod_gets_its_instance_again_after_others_have_switched_the_mode() {
    let fake = Fake::with_pod();
    let (mut bed, mut agent) = bound(&fake).await;
    see(&bed, &fake);
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    tokio::spawn(bed.notices.take().unwrap().run());
    let undivided = json!([{"id": "GPU-a", "index": 0, "model": "NVIDIA A30", "memoryMib": 24_576,
        "reservedMib": 0, "kind": "Gpu", "healthy": true}]);
    let ordered = agent.report(&bed, &undivided, json!([])).await;
    assert!(ordered.is_null() || ordered["make"] == json!([]), "{ordered}");
    assert_eq!(notes(&fake, "DeviceLost").await.len(), 1);
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    bed.app.ledger.audit().unwrap();
    let ordered = agent.report(&bed, &inventory(&[]), json!([])).await;
    assert_eq!(without_term(ordered), orders(&[("2g.12gb", 0)], &[]));
    assert_eq!(bed.filter(&wants("whole", "4g.24gb", 1)).await, json!([]), "its units");
    bed.app.ledger.audit().unwrap();
}

#[tokio::test]
async fn a_profile_that_no_gpu_has_is_named_with_those_that_are_there() {
    let fake = Fake::with_pod();
    let (bed, mut agent) = bed(&fake).await;
    let suggested = async |pod: Value| {
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        bed.app.pod(&SeenPod::from_json(&pod.to_string()).unwrap());
        assert_eq!(bed.filter(&pod).await, json!([]));
        let path = format!("/v1/explain?pod=team-a/{name}");
        bed.send("GET", &path, &Value::Null).await["suggestions"][0].clone()
    };
    // Names that no profile has are not passed on.
    let mut lies = inventory(&[]);
    let row = json!({"profile": "!call evil", "memoryMib": 5_952, "size": 1, "starts": [0]});
    lies[0]["migProfiles"].as_array_mut().unwrap().push(row);
    agent.report(&bed, &lies, json!([])).await;
    assert_eq!(
        suggested(wants("unknown", "9g.99gb", 1)).await,
        "no GPU of the cluster has the MIG profile `9g.99gb`: request one that is there, such as \
         `nvidia.com/mig-1g.6gb` or `nvidia.com/mig-2g.12gb` or `nvidia.com/mig-4g.24gb`"
    );
    // One of the GPU has the media engines.
    let mut media = inventory(&[]);
    let row =
        json!({"profile": "1g.6gb+me", "memoryMib": 5_952, "size": 1, "starts": [0, 1, 2, 3]});
    media[0]["migProfiles"].as_array_mut().unwrap().push(row);
    agent.report(&bed, &media, json!([])).await;
    assert_eq!(
        suggested(wants("twice", "1g.6gb.me", 2)).await,
        "one MIG instance of each GPU can have the media engines: request `nvidia.com/mig-1g.6gb` if the pod \
         does without them"
    );
    // Without any MIG.
    let gpu = json!([{"id": "GPU-a", "index": 0, "model": "NVIDIA A30", "memoryMib": 24_576, "reservedMib": 0,
        "kind": "Gpu", "healthy": true}]);
    agent.report(&bed, &gpu, json!([])).await;
    assert_eq!(
        suggested(wants("none", "1g.6gb", 1)).await,
        "no GPU of the cluster has MIG instances, and none can be made: request `gpu-memory` or `gpu-fraction` \
         instead"
    );
}
