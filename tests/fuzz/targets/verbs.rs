use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cli::serve::extender::settings;
use control::shared::app::App;
use engine::ledger::nodes::state::{Ledger, Settings};
use kube_api::config::file::Config;
use kube_api::pod::watch::Sink;
use kube_api::protocol::messages::{ExtenderArgs, ExtenderBindingArgs};
use kube_api::write::target::PodKey;
use runtime::clock::Clock;
use serde_json::{Value, json};
use server::reports::checked_report::CheckedReport;
use server::scheduler::preempt::{ExtenderPreemptionArgs, preempt};
use server::scheduler::verbs::{filter, prioritize};
use wire::ids::{NodeName, PoolName};
use wire::units::{HostAmount, MemMib, MilliCpu};

/// An extender with three nodes, of the names in the recorded bodies.
fn extender() -> App {
    let (clock, config) = (Clock::start(), Config::default());
    let settings = Settings {
        stale_after: Duration::from_secs(3_600),
        first_session: 100,
        ..settings(&config, &clock)
    };
    let ledger = Arc::new(Ledger::new(settings));
    ledger.share_by(config.pools.clone());
    let app = App::alone(ledger, config, clock);
    let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(256 << 10) };
    let now = clock.now();
    let nodes = [
        ("gpu-a", "Tesla T4", 15_360),
        ("gpu-b", "NVIDIA A100-SXM4-80GB", 81_920),
        ("gpu-c", "NVIDIA L4", 23_034),
    ];
    for (node, ..) in nodes {
        app.ledger.see_node(&NodeName::new(node), host, PoolName::new(node));
    }
    app.ledger.set_listed(now);
    app.lead.set_fenced();
    for (node, model, memory) in nodes {
        let id = format!("GPU-{node}-0");
        let device = json!({"id": id, "index": 0, "model": model, "memoryMib": memory,
            "reservedMib": 0, "kind": "Gpu", "healthy": true});
        let seen = json!({"id": id, "usedMib": 0, "healthy": true, "processes": []});
        let hello = json!({"apiVersion": "gpupack.dev/v1alpha1", "agent": node, "sequence": 1,
            "inventory": [device], "devices": [seen]});
        let report = CheckedReport::from_json(hello.to_string().as_bytes()).unwrap();
        app.ledger.report(node, &report.facts, now).unwrap();
    }
    app
}

/// *filter* and *prioritize*: the quick and the slow way read the same, each node has one answer, and nothing is
/// named that was not asked for.
pub(crate) fn filter_and_prioritize(body: &[u8]) {
    thread_local! {
        // A new one takes longer than many calls. The verbs reserve nothing.
        static EXTENDER: App = extender();
    }
    EXTENDER.with(|app| filtered_and_prioritized(app, body));
}

fn filtered_and_prioritized(app: &App, body: &[u8]) {
    let spaced = [b" ", body].concat();
    let args = ExtenderArgs::parse(body);
    let slow = ExtenderArgs::parse(&spaced);
    let (args, slow) = match (args, slow) {
        (Ok(args), Ok(slow)) => (args, slow),
        (args, slow) => {
            assert!(args.is_err() && slow.is_err(), "one way reads it: {args:?}, {slow:?}");
            assert!(filter(app, body).is_err() && prioritize(app, body).is_err());
            return;
        }
    };
    assert_eq!(args.pod, slow.pod);
    // Only what the watch shows gets a hold.
    app.pod(&args.pod);
    called(app, body, &args);
    app.pod_ended(&args.pod.pod.uid);
}

fn called(app: &App, body: &[u8], args: &ExtenderArgs<'_>) {
    let names = args.nodes.names();
    let (Ok((filtered, _)), Ok((prioritized, _))) = (filter(app, body), prioritize(app, body))
    else {
        return;
    };
    check_filtered(&names, &serde_json::from_slice(&filtered).unwrap());
    let scores: Vec<BTreeMap<String, Value>> = serde_json::from_slice(&prioritized).unwrap();
    let hosts: Vec<&str> = scores.iter().map(|it| it["Host"].as_str().unwrap()).collect();
    assert_eq!(hosts, names, "each node has one score");
    assert!(scores.iter().all(|it| (0..=100).contains(&it["Score"].as_i64().unwrap())));
    app.ledger.audit().unwrap();
}

fn check_filtered(names: &[&str], answer: &Value) {
    let asked: BTreeSet<&str> = names.iter().copied().collect();
    let refused = answer["FailedAndUnresolvableNodes"].as_object().unwrap();
    let passed: Vec<&str> = match (&answer["NodeNames"], &answer["Nodes"]) {
        (Value::Array(names), Value::Null) => names.iter().map(|it| it.as_str().unwrap()).collect(),
        (Value::Null, Value::Object(list)) => {
            let items = list["items"].as_array().unwrap();
            items.iter().map(|it| it["metadata"]["name"].as_str().unwrap()).collect()
        }
        (nothing, others) => {
            assert!(nothing.is_null() && others.is_null(), "one form of nodes: {answer}");
            Vec::new()
        }
    };
    assert!(passed.iter().all(|name| asked.contains(name)), "{answer}");
    assert!(refused.keys().all(|name| asked.contains(name.as_str())), "{answer}");
    assert!(!passed.iter().any(|name| refused.contains_key(*name)), "{answer}");
    let is_answered = answer["Error"] == "" && asked.len() <= 100;
    let answered: BTreeSet<&str> =
        passed.iter().copied().chain(refused.keys().map(String::as_str)).collect();
    assert!(!is_answered || answered == asked, "each node has an answer: {answer}");
}

/// *bind*: what is read is written and read alike, and a name that can be in a URL changes none.
pub(crate) fn bound(body: &[u8]) {
    let Ok(args) = ExtenderBindingArgs::parse(body) else { return };
    let again = json!({"PodName": args.pod_name, "PodNamespace": args.pod_namespace,
        "PodUID": args.pod_uid, "Node": args.node})
    .to_string();
    assert_eq!(ExtenderBindingArgs::parse(again.as_bytes()), Ok(args.clone()));
    if let Ok(key) = PodKey::new(&args.pod_namespace, &args.pod_name) {
        for name in [key.namespace(), key.name()] {
            let is_legal =
                |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
            assert!(!name.is_empty() && name.chars().all(is_legal), "{name}");
            assert!(!name.starts_with('.') && !name.contains(".."), "{name}");
        }
    }
}

/// *preempt*: no victim that was not planned, none for a GPU pod, and an answer sent as the plan is answered alike.
pub(crate) fn preempted(body: &[u8]) {
    thread_local! {
        static EXTENDER: App = extender();
    }
    let preempt = |body: &[u8]| EXTENDER.with(|app| preempt(app, body));
    let parsed = ExtenderPreemptionArgs::parse(body);
    let Ok((answer, _)) = preempt(body) else {
        assert!(parsed.is_err());
        return;
    };
    let wants_gpu = !matches!(parsed.unwrap().pod.request, Ok(None));
    let answer: BTreeMap<String, Value> = serde_json::from_slice(&answer).unwrap();
    assert_eq!(answer.len(), 1);
    let victims = &answer["NodeNameToMetaVictims"];
    assert!(!wants_gpu || victims.as_object().unwrap().is_empty(), "a GPU pod preempts nobody");
    // Keys of any case are accepted, but a text keeps only one of several that are equal.
    // It holds no number beyond a float's range, which gpupack skips.
    let Ok(body) = serde_json::from_slice::<Value>(body) else { return };
    let pod = body.as_object().unwrap().iter().find(|(key, _)| key.eq_ignore_ascii_case("pod"));
    let again = json!({"Pod": pod.unwrap().1, "NodeNameToMetaVictims": victims}).to_string();
    let (again, _) = preempt(again.as_bytes()).unwrap();
    assert_eq!(serde_json::from_slice::<BTreeMap<String, Value>>(&again).unwrap(), answer);
}
