use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use engine::ledger::ledger_fixture::ledger;
use kube_api::config::file::Config;
use kube_api::write::leader_lease::LeaseName;
use kube_api::write::target::PodKey;
use runtime::clock::{Clock, SimulatedTime};
use runtime::step::outside::{Action, ApiAnswer, StepEvent};

/// The replica `a`, which leads, and the API server around it.
struct Bed {
    time: &'static SimulatedTime,
    app: Arc<App>,
    /// The label and the version of each pod.
    pods: BTreeMap<&'static str, (Option<&'static str>, u32)>,
    /// Requests that are refused, by their method, and by now.
    refused: Vec<&'static str>,
    /// What another client writes after pods were listed.
    after_list: Option<(&'static str, Option<&'static str>)>,
    calls: usize,
}

impl Bed {
    /// These pods have the label.
    fn new(labeled: &[&'static str]) -> Self {
        let time: &'static SimulatedTime = Box::leak(Box::new(SimulatedTime::starting(1_000_000)));
        let clock = Clock::simulated(time);
        let replica = Replica {
            identity: Replica::identity("a", 1),
            pod: PodKey::new("gpu-system", "a").unwrap(),
            lease: LeaseName { namespace: "gpu-system".to_owned(), name: "gpupack".to_owned() },
            holds_for: Duration::from_secs(3),
            address: String::new(),
            secret: String::new(),
        };
        let app = App::alone(Arc::new(ledger("")), Config::default(), clock).among(replica);
        let app = Arc::new(app);
        app.outside.spawn(keep_label(Arc::clone(&app)));
        let label = |name| (name, (labeled.contains(&name).then_some("true"), 1));
        let pods = ["a", "b", "c"].map(label).into();
        Self { time, app, pods, refused: Vec::new(), after_list: None, calls: 0 }
    }

    fn set(&mut self, name: &'static str, label: Option<&'static str>) {
        self.pods.entry(name).and_modify(|(known, version)| {
            (*known, *version) = (label, *version + 1);
        });
    }

    /// The pods that the Service selects after this time, in steps of 100 ms.
    fn after(&mut self, millis: u64) -> Vec<&'static str> {
        for now in (0..=millis).step_by(100) {
            let start = self.app.clock.now().millis();
            let now = Timestamp::from_millis(if now == 0 { start } else { start + 100 });
            self.time.set(now);
            let mut actions = self.app.outside.step(StepEvent::Changed, now);
            while let Some(action) = actions.pop() {
                let Action::Call { id, request, .. } = action else { panic!("it only calls") };
                let (status, body) = self.answer(&request);
                let body = Some(body.to_string().into_bytes());
                let answer = Ok(ApiAnswer { status, body, date: None });
                actions.extend(self.app.outside.step(StepEvent::Answered { id, answer }, now));
            }
        }
        let selected = self.pods.iter().filter(|(_, (label, _))| *label == Some("true"));
        selected.map(|(name, _)| *name).collect()
    }

    fn answer(&mut self, request: &hyper::Request<Vec<u8>>) -> (u16, Value) {
        self.calls += 1;
        let (method, path) = (request.method().as_str(), request.uri().path());
        if let Some(at) = self.refused.iter().position(|refused| *refused == method) {
            self.refused.remove(at);
            return (500, json!({}));
        }
        if method == "GET" {
            assert_eq!(path, "/api/v1/namespaces/gpu-system/pods");
            assert!(request.uri().query().unwrap().contains("gpupack.dev%2Fleader"));
            let labeled = self.pods.iter().filter_map(|(name, (label, version))| {
                let labels = json!({"gpupack.dev/leader": (*label)?});
                Some(
                    json!({"metadata": {"name": name, "uid": format!("u-{name}"), "labels": labels,
                    "resourceVersion": version.to_string()}}),
                )
            });
            let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {},
                "items": labeled.collect::<Vec<_>>()});
            if let Some((name, label)) = self.after_list.take() {
                self.set(name, label);
            }
            return (200, list);
        }
        let name = *self.pods.keys().find(|name| path.ends_with(**name)).unwrap();
        let body: Value = serde_json::from_slice(request.body()).unwrap();
        let metadata = &body["metadata"];
        let is_set = metadata["labels"]["gpupack.dev/leader"] == "true";
        assert_eq!(is_set, name == "a");
        let seen = metadata["resourceVersion"].as_str().and_then(|seen| seen.parse().ok());
        if !is_set && seen != Some(self.pods[name].1) {
            return (409, json!({}));
        }
        self.set(name, is_set.then_some("true"));
        (200, json!({}))
    }
}

/// The pod that led before may have the label still: its successor ended before it took it away, or never knew it.
#[test]
fn a_leader_has_the_label_alone_whoever_had_it_before() {
    for labeled in [&[][..], &["a"], &["b"], &["a", "b"], &["b", "c"], &["a", "b", "c"]] {
        assert_eq!(Bed::new(labeled).after(0), ["a"], "{labeled:?}");
    }
}

#[test]
fn a_label_that_others_change_is_put_right() {
    for (name, label) in [("a", None), ("a", Some("false")), ("b", Some("true"))] {
        let mut bed = Bed::new(&[]);
        assert_eq!(bed.after(3_000), ["a"]);
        bed.set(name, label);
        assert_eq!(bed.after(10_000), ["a"], "{name} {label:?}");
    }
}

#[test]
fn labels_are_looked_at_again_soon_after_a_failure_and_else_seldom() {
    for refused in ["GET", "PATCH"] {
        let mut bed = Bed::new(&["b"]);
        bed.refused.push(refused);
        assert_eq!(bed.after(0), ["b"], "{refused}");
        assert_eq!(bed.after(1_100), ["a"], "{refused}");
        let calls = bed.calls;
        bed.after(9_000);
        assert_eq!(bed.calls, calls);
    }
}

/// Else it could take the label from a pod that leads by then.
#[test]
fn a_label_is_taken_away_in_the_version_that_was_seen() {
    let mut bed = Bed::new(&["b"]);
    bed.after_list = Some(("b", Some("true")));
    assert_eq!(bed.after(0), ["a", "b"]);
    assert_eq!(bed.after(1_100), ["a"]);
}

#[test]
fn a_replica_that_leads_no_more_labels_nothing() {
    let mut bed = Bed::new(&["b"]);
    bed.app.writer.term().end();
    assert_eq!(bed.after(20_000), ["b"]);
    assert_eq!(bed.calls, 0);
}
