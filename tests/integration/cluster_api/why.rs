//! Why a pod waits: each cause, at each place that tells it. `/v1/explain`, `/v1/waiting`, the page, events
//! and what *filter* answers must agree, and what they suggest must be true.

use std::collections::BTreeSet;
use std::time::Duration;

use control::pods::reasons;
use control::room::standing::{StandingHolds, StandingRules};
use kube_api::config::file::Config;
use kube_api::config::preemption::PreemptionConfig;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use runtime::clock::Clock;
use serde_json::{Value, json};
use wire::api::explain::Explanation;
use wire::api::page::Summary;
use wire::api::waiting::{Obstacle, WaitingPod, WaitingPodList};
use wire::driver_work::{DriverWork, MigChange, UpgradeState};
use wire::ids::{NodeName, PodUid};
use wire::units::Share;

use super::binding::Bed as Extender;
use crate::harness::fake_api_server::Fake;

/// The pod that is asked about.
const ASKED: &str = "asked";

/// A pod of the team.
fn pod(name: &str, annotations: Value) -> Value {
    json!({"metadata": {"uid": name, "namespace": "team", "name": name, "resourceVersion": "7",
            "annotations": annotations},
        "spec": {"schedulerName": "gpupack", "priority": 0, "containers": [{"name": "main"}]}})
}

fn seen(pod: &Value) -> SeenPod {
    SeenPod::from_json(&pod.to_string()).unwrap()
}

/// An extender of one node, `n1`, with L4 GPUs of 23,034 MiB.
struct Bed {
    fake: Fake,
    extender: Extender,
}

/// All that is told of a pod.
struct Told {
    explained: Explanation,
    listed: WaitingPod,
    on_page: Option<WaitingPod>,
    event: Option<String>,
    /// What *filter* answers for the node.
    refused: Option<String>,
}

impl Bed {
    async fn new(config: &str, gpus: u32) -> Self {
        Self::with(config, gpus, &json!({})).await
    }

    /// The same with these fields of the devices in the report.
    async fn with(config: &str, gpus: u32, fields: &Value) -> Self {
        let fake = Fake::with_pod();
        let inventory: Vec<Value> = (0..gpus)
            .map(|index| {
                json!({"id": format!("GPU-{index}"), "index": index, "model": "NVIDIA L4",
                    "memoryMib": 23_034, "reservedMib": 0, "kind": "Gpu", "healthy": true})
            })
            .collect();
        let config = Config::from_yaml(config).unwrap();
        let clock = Clock::start();
        let mut extender =
            Extender::made(&fake, (config, clock), json!({}), &json!(inventory)).await;
        extender.app.lead.set_fenced();
        if let Some(fields) = fields.as_object().filter(|fields| !fields.is_empty()) {
            let uses = (0..gpus).map(|index| {
                let mut one = json!({"id": format!("GPU-{index}"), "usedMib": 0, "healthy": true,
                    "processes": []});
                one.as_object_mut().unwrap().extend(fields.clone());
                one
            });
            let report = json!({"apiVersion": "gpupack.dev/v1alpha1", "agent": "another", "sequence": 1,
                "inventory": inventory, "devices": uses.collect::<Vec<_>>()});
            extender.send("PUT", "/v1/nodes/n1/report", &report).await;
        }
        let writer = extender.notices.take().unwrap();
        tokio::spawn(writer.run());
        Self { fake, extender }
    }

    /// Another pod of the team has this.
    fn place(&self, name: &str, annotations: Value) {
        self.assume(name, annotations);
        self.extender.app.ledger.confirm(&PodUid::new(name));
    }

    /// The same of a pod whose Binding is on its way. It can be taken back.
    fn assume(&self, name: &str, annotations: Value) {
        let (app, other) = (&self.extender.app, seen(&pod(name, annotations)));
        let query = app.query(&other).unwrap();
        app.ledger.reserve(&other.pod, "n1", &query, app.clock.now()).unwrap();
    }

    /// The watch shows a pod that waits, and kube-scheduler calls for it. What *filter* answers.
    async fn call(&self, pod: &Value) -> Option<String> {
        self.extender.app.pod(&seen(pod));
        let body = json!({"Pod": pod, "Nodes": null, "NodeNames": ["n1"]});
        let answer = self.extender.send("POST", "/v1/filter", &body).await;
        answer["FailedAndUnresolvableNodes"]["n1"].as_str().map(str::to_owned)
    }

    /// One step of the loop that keeps room.
    fn step(&self, holds: &mut StandingHolds, enabled: bool) {
        let app = &self.extender.app;
        let preemption =
            PreemptionConfig { enabled, after: Duration::ZERO, ..PreemptionConfig::default() };
        let rules = StandingRules {
            after: Duration::from_secs(u64::from(!enabled)),
            at_most: Share::WHOLE,
            preemption,
        };
        let facts = (&app.waiting, &app.room.preemptors, &*app.ledger, &app.room.bound_groups);
        let step = holds.step(facts, rules, (app.clock.now(), 1_000_000));
        for order in step.evict {
            assert!(app.room.preemptors.ask(&order.pod.pod.uid, order.number));
        }
    }

    /// Calls for the pod, and reads every place.
    async fn told(&self, asked: &Value) -> Told {
        let refused = self.call(asked).await;
        self.told_after(refused, true).await
    }

    /// Reads every place. `is_told`: whether an event is to come.
    async fn told_after(&self, refused: Option<String>, is_told: bool) -> Told {
        let (app, uid) = (&self.extender.app, PodUid::new(ASKED));
        reasons::tell(app, &uid);
        let event = app.waiting.pod(&uid).filter(|it| it.refused.is_some());
        let event = match event.filter(|_| is_told) {
            Some(_) => Some(self.event("NoGpuFits").await),
            None => None,
        };
        let explained = self.extender.text(&format!("/v1/explain?pod=team/{ASKED}")).await;
        let listed: WaitingPodList =
            serde_json::from_str(&self.extender.text("/v1/waiting").await).unwrap();
        let summary = self.extender.text("/v1/summary").await;
        let summary: Summary<'_> = serde_json::from_str(&summary).unwrap();
        let of =
            |pods: &[WaitingPod]| pods.iter().find(|it| it.pod == format!("team/{ASKED}")).cloned();
        Told {
            explained: serde_json::from_str(&explained).unwrap(),
            listed: of(&listed.items).unwrap(),
            on_page: of(&summary.figures.waiting_pods),
            event,
            refused,
        }
    }

    /// The note of an event of the pod.
    async fn event(&self, reason: &str) -> String {
        let told = async {
            loop {
                match self.events(reason).pop() {
                    Some(note) => return note,
                    None => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(10), told).await.expect(reason)
    }
}

impl Bed {
    /// The notes of events of the pod so far.
    fn events(&self, reason: &str) -> Vec<String> {
        let events = self.fake.bed(|bed| bed.events.clone());
        let of_pod = |it: &&Value| it["regarding"]["uid"] == ASKED && it["reason"] == reason;
        let notes = events.iter().filter(of_pod).map(|it| it["note"].as_str().unwrap());
        notes.map(str::to_owned).collect()
    }
}

impl Told {
    /// All places agree, and say this.
    fn agree(&self, obstacle: Obstacle, words: &str) {
        let Self { explained, listed, on_page, event, refused } = self;
        let what = format!("{explained:#?} {listed:#?} {on_page:#?} {event:?} {refused:?}");
        assert_eq!(explained.blocked_by, Some(obstacle), "{what}");
        assert_eq!(listed.blocked_by, obstacle, "{what}");
        let said = [&listed.missing, &listed.reason, &explained.verdict];
        assert!(said.iter().any(|it| it.contains(words)), "`{words}` in {what}");
        let of_nodes = explained.refusals.first().map(|it| &it.missing);
        if !listed.missing.is_empty() {
            let is_said =
                explained.verdict.contains(&listed.missing) || of_nodes == Some(&listed.missing);
            assert!(is_said, "{what}");
        }
        assert_eq!(explained.suggestions.first(), listed.suggestion.as_ref(), "{what}");
        if let Some(on_page) = on_page {
            assert_eq!(on_page, listed, "{what}");
        }
        if let Some(event) = event {
            assert!(event.contains(&listed.missing), "{what}");
            for suggestion in explained.suggestions.iter().take(3) {
                assert!(event.contains(suggestion), "{what}");
            }
            let is_suggested = event.contains("suggestion: ");
            assert_eq!(is_suggested, !explained.suggestions.is_empty(), "{what}");
        }
        if let Some(refused) = refused.as_ref().filter(|_| obstacle != Obstacle::KubeScheduler) {
            assert_eq!(*refused, listed.reason, "{what}");
        }
        let is_told = obstacle != Obstacle::KubeScheduler;
        assert_eq!(event.is_some(), is_told && on_page.is_some(), "{what}");
    }
}

/// What nodes refuse: the configuration, what is in use, what is requested, the obstacle and its words.
type OfNodes = (&'static str, Option<Value>, Value, Obstacle, &'static str);

fn of_nodes() -> Vec<OfNodes> {
    let used = |fraction: &str| Some(json!({"gpu-fraction": fraction}));
    vec![
        ("", used("0.6"), json!({"gpu-fraction": "0.6"}), Obstacle::Memory, "MiB of GPU memory"),
        (
            "",
            Some(json!({"gpu-memory": "100", "gpu-fraction": "0.6"})),
            json!({"gpu-fraction": "0.6", "gpu-memory": "100"}),
            Obstacle::Compute,
            "0.2 of a GPU's compute share",
        ),
        (
            "",
            used("0.6"),
            json!({"gpu-fraction": "0.6", "gpu-fraction-num-devices": "2"}),
            Obstacle::Devices,
            "room on more than 1 GPU",
        ),
        ("", None, json!({"gpu-memory": "90000"}), Obstacle::Memory, "66966 MiB more"),
        (
            "",
            None,
            json!({"gpu-fraction": "1", "gpu-fraction-num-devices": "3"}),
            Obstacle::Devices,
            "more than 2 GPUs",
        ),
        (
            "",
            None,
            json!({"gpu-fraction": "1", "gpupack.dev/gpu-model": "A100"}),
            Obstacle::Model,
            "no GPU of an allowed model",
        ),
        (
            "",
            None,
            json!({"gpu-fraction": "0.5", "gpupack.dev/isolation": "memory"}),
            Obstacle::Isolation,
            "no memory isolation",
        ),
        (
            "min_memory_mib: 4096",
            None,
            json!({"gpu-fraction": "0.1"}),
            Obstacle::Memory,
            "to reach `min_memory_mib`",
        ),
        (
            "access: {namespaces: {team: {pools: [other]}}}\npools: {other: {}}",
            None,
            json!({"gpu-fraction": "0.1"}),
            Obstacle::Pool,
            "pool not allowed",
        ),
    ]
}

#[tokio::test]
async fn what_nodes_refuse_is_told_alike() {
    for (config, used, request, obstacle, words) in of_nodes() {
        let bed = Bed::new(config, 2).await;
        if let Some(used) = used {
            bed.place("other", used.clone());
            if obstacle != Obstacle::Devices {
                bed.place("second", used);
            }
        }
        bed.told(&pod(ASKED, request)).await.agree(obstacle, words);
    }
    let mig = |resource: &str| {
        let mut asked = pod(ASKED, json!({}));
        asked["spec"]["containers"][0]["resources"] = json!({"limits": {resource: "1"}});
        asked
    };
    let bed = Bed::new("", 1).await;
    bed.told(&mig("nvidia.com/mig-1g.5gb")).await.agree(Obstacle::Kind, "of the requested kind");
    let bed = Bed::new("", 1).await;
    bed.told(&mig("nvidia.com/gpu.shared")).await.agree(Obstacle::Kind, "no replica slots");
}

#[tokio::test]
async fn what_nodes_and_gpus_are_is_told_alike() {
    let half = || pod(ASKED, json!({"gpu-fraction": "0.5"}));
    for (fields, obstacle) in [
        (json!({"healthy": false}), Obstacle::Health),
        (json!({"healthy": false, "fault": "KubeletOwned"}), Obstacle::Kubelet),
    ] {
        let bed = Bed::with("", 2, &fields).await;
        bed.told(&half()).await.agree(obstacle, "suitable GPU");
    }
    let bed = Bed::new("", 0).await;
    bed.told(&half()).await.agree(Obstacle::Gpu, "no GPU on the node");
    let bed = Bed::new("", 1).await;
    bed.extender.app.ledger.lose_node(&NodeName::new("n1"));
    let told = bed.told(&half()).await;
    assert_eq!(told.explained.blocked_by, Some(Obstacle::Node), "{:?}", told.explained);
    assert_eq!(told.listed.blocked_by, Obstacle::Node, "{:?}", told.listed);
    assert_eq!(told.explained.verdict, "no node is known");
    let bed = Bed::new("", 1).await;
    let ledger = &bed.extender.app.ledger;
    ledger.lose_node(&NodeName::new("n1"));
    let host = wire::units::HostAmount::ZERO;
    let pool = wire::ids::PoolName::new("");
    ledger.see_node(&NodeName::new("n1"), host, pool);
    bed.told(&half()).await.agree(Obstacle::Agent, "GPU agent has not reported yet");
}

#[tokio::test]
async fn work_on_the_driver_of_a_node_is_told_alike() {
    let node = NodeName::new("n1");
    let refusing = UpgradeState::ALL.into_iter().filter(|state| state.refuses_pods());
    let upgrades = refusing.map(|state| DriverWork { upgrade: Some(state), mig: None });
    let changes = MigChange::ALL.map(|change| DriverWork { upgrade: None, mig: Some(change) });
    for work in upgrades.chain(changes) {
        let bed = Bed::new("", 1).await;
        bed.extender.app.ledger.see_driver_work(&node, work);
        let value = work.upgrade.map_or_else(|| work.mig.unwrap().value(), UpgradeState::value);
        let told = bed.told(&pod(ASKED, json!({"gpu-fraction": "0.5"}))).await;
        told.agree(Obstacle::Node, value);
        let refused = told.refused.unwrap();
        assert!(refused.ends_with(value) && !refused.contains(|it: char| it.is_ascii_digit()));
        let query = bed.extender.app.query(&seen(&pod(ASKED, json!({"gpu-fraction": "0.5"}))));
        let (query, now) = (query.unwrap(), bed.extender.app.clock.now());
        let asked = seen(&pod(ASKED, json!({"gpu-fraction": "0.5"})));
        let reserved = bed.extender.app.ledger.reserve(&asked.pod, "n1", &query, now);
        assert_eq!(reserved.unwrap_err().to_string(), refused, "bind says the same");
    }
    for (upgrade, mig) in [
        (Some(UpgradeState::Required), None),
        (Some(UpgradeState::NodeMaintenance), None),
        (None, None),
    ] {
        let bed = Bed::new("", 1).await;
        bed.extender.app.ledger.see_driver_work(&node, DriverWork { upgrade, mig });
        assert_eq!(
            bed.call(&pod(ASKED, json!({"gpu-fraction": "0.5"}))).await,
            None,
            "{upgrade:?}"
        );
    }
}

const SHARES: &str = "shares: {teams: {team: {guaranteed: 0.5, at_most: 1}}}";

#[tokio::test]
async fn the_limit_of_a_team_is_told_alike() {
    let bed = Bed::new(SHARES, 2).await;
    bed.place("other", json!({"gpu-fraction": "0.75"}));
    let told = bed.told(&pod(ASKED, json!({"gpu-fraction": "0.5"}))).await;
    told.agree(Obstacle::Team, "its team `team` may have 0.25 GPU more, and this pod counts 0.5");
    let of_node = &told.explained.refusals[0].missing;
    assert_eq!(of_node, "GPU limit of the team reached", "no larger GPU helps");
    // No node has room either: what helps against that alone does not help.
    let bed = Bed::new(SHARES, 1).await;
    bed.place("other", json!({"gpu-fraction": "0.75"}));
    let told = bed.told(&pod(ASKED, json!({"gpu-fraction": "0.5"}))).await;
    told.agree(Obstacle::Team, "its team `team` may have 0.25 GPU more");
    let suggested = &told.explained.suggestions;
    assert!(!suggested.iter().any(|it| it.starts_with("end team/")), "{suggested:?}");
    assert!(suggested[0].starts_with("request `gpu-fraction: \"0.25\"`"), "{suggested:?}");
}

#[tokio::test]
async fn a_pod_that_gpupack_does_not_hold_up_is_told_so() {
    // It fits: room came since its last call.
    let bed = Bed::new("", 1).await;
    bed.assume("other", json!({"gpu-fraction": "0.75"}));
    let asked = pod(ASKED, json!({"gpu-fraction": "0.5"}));
    bed.call(&asked).await;
    bed.extender.app.ledger.forget(&PodUid::new("other"));
    bed.told_after(None, false).await.agree(Obstacle::KubeScheduler, "a node fits");
    assert_eq!(bed.events("NoGpuFits"), [""; 0], "kube-scheduler is about to call again");
    // It fits on a node that kube-scheduler did not name.
    let bed = Bed::new("", 1).await;
    bed.extender.app.pod(&seen(&asked));
    let body = json!({"Pod": asked, "Nodes": null, "NodeNames": ["n9"]});
    bed.extender.send("POST", "/v1/filter", &body).await;
    bed.told_after(None, false).await.agree(Obstacle::KubeScheduler, "a node fits");
    let event = bed.event("NoGpuFits").await;
    assert!(event.contains("1 of 1 node fits now") && event.contains("own filters"), "{event}");
    // It has gates.
    let bed = Bed::new("", 1).await;
    let mut gated = asked.clone();
    gated["spec"]["schedulingGates"] = json!([{"name": "quota"}]);
    bed.extender.app.pod(&seen(&gated));
    bed.told_after(None, false).await.agree(Obstacle::KubeScheduler, "scheduling gates");
    // It is being bound.
    let bed = Bed::new("", 1).await;
    bed.assume("other", json!({"gpu-fraction": "0.75"}));
    bed.call(&asked).await;
    bed.extender.app.ledger.forget(&PodUid::new("other"));
    let (app, own) = (&bed.extender.app, seen(&asked));
    let query = app.query(&own).unwrap();
    app.ledger.reserve(&own.pod, "n1", &query, app.clock.now()).unwrap();
    bed.told_after(None, false).await.agree(Obstacle::KubeScheduler, "it is being bound");
    // Its request is refused.
    let bed = Bed::new("", 1).await;
    let told = bed.told(&pod(ASKED, json!({"gpu-fraction": "2"}))).await;
    assert_eq!(told.explained.blocked_by, Some(Obstacle::Request));
    assert_eq!(told.listed.blocked_by, Obstacle::Request);
    assert!(told.explained.verdict.ends_with(&told.listed.missing), "{:?}", told.explained);
    assert_eq!(told.explained.suggestions.first(), told.listed.suggestion.as_ref());
    assert_eq!(bed.event("GpuRequestRefused").await, told.listed.missing);
}

#[tokio::test]
async fn room_that_is_made_for_a_pod_is_told_alike() {
    let bed = Bed::new("", 1).await;
    let placement = json!({"v": 1, "isolation": "none",
        "devices": [{"id": "GPU-0", "mib": 23_034, "share": 1_000_000}]});
    let mut other = pod(
        "other",
        json!({"gpu-fraction": "1",
        "placed.gpupack.dev/placement": placement.to_string()}),
    );
    other["spec"]["nodeName"] = json!("n1");
    other["status"] = json!({"phase": "Running"});
    bed.extender.app.see_bound(&seen(&other));
    let mut asked = pod(ASKED, json!({"gpu-fraction": "1"}));
    asked["spec"]["priority"] = json!(10);
    bed.call(&asked).await;
    let mut holds = StandingHolds::default();
    bed.step(&mut holds, true);
    assert!(bed.extender.app.room.preemptors.is_asked(&PodUid::new(ASKED)));
    let told = bed.told(&asked).await;
    told.agree(Obstacle::Room, "room is being made for the pod");
    let verdict = &told.explained.verdict;
    let kept = "; other pods leave for it, and room is kept for it on node n1: 1 GPU of that is not free yet";
    assert!(verdict.ends_with(kept), "{verdict}");
}

#[tokio::test]
async fn room_that_is_kept_for_a_pod_counts_as_its_own() {
    let bed = Bed::new("", 1).await;
    bed.place("other", json!({"gpu-memory": "2987"}));
    let asked = pod(ASKED, json!({"gpu-memory": "20480"}));
    let before = bed.told(&asked).await;
    before.agree(Obstacle::Memory, "433 MiB of GPU memory");
    let mut holds = StandingHolds::default();
    bed.step(&mut holds, false);
    assert!(bed.extender.app.ledger.has_standing(&PodUid::new(ASKED)));
    let told = bed.told(&asked).await;
    told.agree(Obstacle::Memory, "433 MiB of GPU memory");
    assert_eq!(told.explained.suggestions, before.explained.suggestions);
    assert_eq!(
        told.explained.suggestions,
        [
            "request `gpu-memory: \"20047\"` instead of 20480 MiB: it fits on node n1 now",
            "end team/other (0.129677 GPU): it fits on node n1 then"
        ]
    );
    let kept = "; it is the first of its line, and room is kept for it on node n1: 0.018799 GPU of that is not free yet";
    assert!(told.explained.verdict.ends_with(kept), "{:?}", told.explained);
    // For any other pod that room is taken.
    let behind = pod("behind", json!({"gpu-memory": "20000"}));
    assert_eq!(bed.call(&behind).await.as_deref(), Some("insufficient GPU memory"));
    let list = bed.extender.text("/v1/waiting").await;
    let list: WaitingPodList = serde_json::from_str(&list).unwrap();
    let own = list.items.iter().find(|it| it.pod == "team/behind").unwrap();
    assert_eq!(own.missing, "20000 MiB of GPU memory");
    assert!(own.suggestion.as_deref().unwrap().contains("kept for the first pod of the line"));
    // Where it fits: nowhere, and there once all of that is free.
    let bed = Bed::new("", 1).await;
    bed.assume("other", json!({"gpu-memory": "2987"}));
    bed.call(&asked).await;
    bed.step(&mut StandingHolds::default(), false);
    let fits = async || {
        let text = bed.extender.text(&format!("/v1/fit?pod=team/{ASKED}")).await;
        serde_json::from_str::<Value>(&text).unwrap()["gpus"].clone()
    };
    assert_eq!(fits().await, 0);
    bed.extender.app.ledger.forget(&PodUid::new("other"));
    assert_eq!(fits().await, 1);
}

/// A pod of group `g`.
fn member(name: &str, size: u32, fraction: &str) -> Value {
    let size = size.to_string();
    pod(
        name,
        json!({"gpu-fraction": fraction, "gpupack.dev/group": "g", "gpupack.dev/group-size": size}),
    )
}

#[tokio::test]
async fn why_a_group_waits_is_told_alike() {
    // Not all of its pods exist. That another pod ends does not help.
    let bed = Bed::new("", 1).await;
    bed.place("other", json!({"gpu-fraction": "0.5"}));
    bed.call(&member("b", 3, "0.6")).await;
    let told = bed.told(&member(ASKED, 3, "0.6")).await;
    told.agree(Obstacle::Group, "it waits for the other pods of its group `g`: 2 of 3 exist");
    assert_eq!(told.explained.suggestions, [""; 0]);
    // All exist, and kube-scheduler has not called for one.
    let bed = Bed::new("", 1).await;
    bed.extender.app.pod(&seen(&member("b", 2, "0.6")));
    let told = bed.told(&member(ASKED, 2, "0.6")).await;
    told.agree(Obstacle::Group, "kube-scheduler has not called for 1 of them");
    // There is no room for all at the same time.
    bed.call(&member("b", 2, "0.6")).await;
    let told = bed.told_after(None, true).await;
    let words = "2 pods start once there is room for all of them at the same time";
    assert!(told.explained.verdict.contains(words), "{:?}", told.explained);
    assert!(told.listed.missing.contains(words), "{:?}", told.listed);
    // Their team may not have all of them.
    let bed = Bed::new(SHARES, 2).await;
    bed.call(&member("b", 2, "0.6")).await;
    let told = bed.told(&member(ASKED, 2, "0.6")).await;
    told.agree(Obstacle::Team, "2 pods of its group `g` count 1.2 together: they wait");
}

#[tokio::test]
async fn pods_of_a_group_that_disagree_on_its_size_wait_and_are_told_so() {
    for order in [["a", "b", ASKED], [ASKED, "b", "a"]] {
        let bed = Bed::new("", 2).await;
        for name in order {
            bed.call(&member(name, if name == "a" { 3 } else { 2 }, "0.5")).await;
        }
        let mut holds = StandingHolds::default();
        bed.step(&mut holds, false);
        assert_eq!(bed.extender.app.ledger.standing_count(), 0, "none of them starts");
        let told = bed.told(&member(ASKED, 2, "0.5")).await;
        told.agree(Obstacle::Group, "disagree on `gpupack.dev/group-size`: they name 2 and 3");
        assert!(told.explained.suggestions[0].contains("with one `gpupack.dev/group-size`"));
        // They agree once the other one is gone. One that is bound is not gone.
        let mut bound = member("a", 3, "0.5");
        bound["spec"]["nodeName"] = json!("n1");
        bed.extender.app.pod(&seen(&bound));
        bed.step(&mut holds, false);
        assert_eq!(bed.extender.app.ledger.standing_count(), 0);
        bed.extender.app.pod_ended(&PodUid::new("a"));
        bed.step(&mut holds, false);
        assert_eq!(bed.extender.app.ledger.standing_count(), 2);
    }
}

#[tokio::test]
async fn pods_beyond_the_size_of_a_group_are_told_that_they_start_alone() {
    let bed = Bed::new("", 1).await;
    bed.place("other", json!({"gpu-fraction": "1"}));
    for name in ["a", "b"] {
        bed.call(&member(name, 2, "0.5")).await;
    }
    let told = bed.told(&member(ASKED, 2, "0.5")).await;
    told.agree(Obstacle::Group, "it has 3 pods, 1 more than `gpupack.dev/group-size`");
    // The others are bound: it starts alone, and only the node is in its way.
    for name in ["a", "b"] {
        let mut bound = member(name, 2, "0.5");
        bound["spec"]["nodeName"] = json!("n1");
        bed.extender.app.pod(&seen(&bound));
    }
    let told = bed.told_after(None, true).await;
    let verdict = &told.explained.verdict;
    assert!(
        verdict.contains("2 pods are bound or have succeeded; this one starts once it fits"),
        "{verdict}"
    );
    assert!(verdict.contains("; the only node tried does not fit"), "{verdict}");
    assert_eq!(told.listed.blocked_by, Obstacle::Memory);
    assert!(told.explained.suggestions.iter().any(|it| it.starts_with("end team/other")));
}

/// gpupack checks CPU and host memory only in the simulator.
#[test]
fn every_obstacle_is_tried_and_documented() {
    let document: Value = serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
    let names = document["components"]["schemas"]["Obstacle"]["enum"].as_array().unwrap();
    let (operations, tests) = (include_str!("../../../docs/operations.md"), include_str!("why.rs"));
    let of_simulator = BTreeSet::from(["Cpu", "HostMemory"]);
    for name in names.iter().map(|name| name.as_str().unwrap()) {
        assert!(operations.contains(&format!("`{name}`")), "docs/operations.md names `{name}`");
        let is_tried = tests.contains(&format!("Obstacle::{name}"));
        assert!(is_tried || of_simulator.contains(name), "{name} is tried");
    }
}
