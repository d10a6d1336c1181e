use serde_json::json;

use super::*;
use crate::doctor::finding::{lines, states};
use wire::api::commands::CheckState::{NotChecked, Ok as Good, Problem, Warning};

fn forbidden<T>() -> Read<T> {
    Err(Unread::Forbidden("get it".to_owned()))
}

#[test]
fn old_versions_lack_policies_and_hints() {
    for (major, minor, state) in [
        ("1", "36", Good),
        ("1", "32+", Good),
        ("1", "31", Warning),
        ("1", "29-gke.1", Problem),
        ("1", "29+", Problem),
        ("2", "0", Good),
        ("x", "", NotChecked),
    ] {
        let info = json!({"major": major, "minor": minor, "gitVersion": "v", "buildDate": "",
            "compiler": "", "gitCommit": "", "gitTreeState": "", "goVersion": "", "platform": ""});
        let found = lines(kubernetes(&Ok(serde_json::from_value(info).unwrap())));
        assert_eq!(states(&found), [state], "{major}.{minor}: {found:?}");
    }
    assert_eq!(states(&lines(kubernetes(&forbidden()))), [NotChecked]);
}

#[test]
fn namespaces_have_their_standards() {
    let labeled = |value: &str| Ok(BTreeMap::from([(ENFORCED.to_owned(), value.to_owned())]));
    for (labels, standard, state) in [
        (labeled("restricted"), "restricted", Good),
        (labeled("baseline"), "restricted", Warning),
        (Ok(BTreeMap::new()), "restricted", Warning),
        (labeled("privileged"), "privileged", Good),
        (Ok(BTreeMap::new()), "privileged", Good),
        (labeled("baseline"), "privileged", Problem),
        (Err(Unread::Absent), "restricted", Problem),
        (forbidden(), "restricted", NotChecked),
    ] {
        assert_eq!(namespace("n", &labels, standard).state, state, "{labels:?} {standard}");
    }
}

#[test]
fn replicas_must_be_ready() {
    let of = |wanted, ready| Ok(WorkloadSummary { wanted, ready, ..WorkloadSummary::default() });
    for (found, state) in [
        (of(2, 2), Good),
        (of(2, 1), Warning),
        (of(2, 0), Problem),
        (of(0, 0), Problem),
        (Err(Unread::Absent), Problem),
        (forbidden(), NotChecked),
    ] {
        assert_eq!(lines(deployment("extender", &found))[0].state, state, "{found:?}");
    }
}

fn extender() -> WorkloadSummary {
    let pods = json!({"containers": [{"name": "e", "args": ["extender", "--replica", "$(POD)"]}]});
    WorkloadSummary { pods: serde_json::from_value(pods).unwrap(), ..WorkloadSummary::default() }
}

fn held(holder: &str, renewed: &str) -> Read<Lease> {
    let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 3, "renewTime": renewed});
    let lease = json!({"metadata": {}, "spec": spec});
    Ok(serde_json::from_value(lease).unwrap())
}

fn replica(name: &str, is_leader: bool) -> OwnPod {
    OwnPod { name: name.to_owned(), is_leader, ..OwnPod::default() }
}

#[test]
fn the_lease_is_held_renewed_and_shown_by_a_label() {
    let now = 1_767_225_605; // 2026-01-01T00:00:05Z
    let fresh = || held("gpupack-a_1f", "2026-01-01T00:00:04.000000Z");
    let both = |first, second| Ok(vec![replica("gpupack-a", first), replica("gpupack-b", second)]);
    for (lease, pods, expected) in [
        (fresh(), both(true, false), vec![Good]),
        (fresh(), both(false, false), vec![Problem]),
        (fresh(), both(false, true), vec![Problem]),
        (fresh(), both(true, true), vec![Problem]),
        (fresh(), forbidden(), vec![NotChecked]),
        (held("gpupack-a_1f", "2025-12-31T23:00:00.000000Z"), both(true, false), vec![Problem]),
        (held("", "2026-01-01T00:00:04.000000Z"), both(true, false), vec![Problem]),
        (Ok(Lease::default()), both(true, false), vec![Problem]),
        (Err(Unread::Absent), both(true, false), vec![Problem]),
        (forbidden(), both(true, false), vec![NotChecked]),
    ] {
        let found = lines(leader(&extender(), &lease, &pods, now));
        assert_eq!(states(&found), expected, "{lease:?}: {found:?}");
    }
    let absent = Err(Unread::Absent);
    let alone = lines(leader(&WorkloadSummary::default(), &absent, &both(false, false), now));
    assert_eq!(states(&alone), [Good], "it has no --replica");
}

#[test]
fn all_parts_are_of_one_release() {
    for (image, version) in [
        ("ghcr.io/gpupack/gpupack:0.1.0", "0.1.0"),
        ("localhost:5000/gpupack", "latest"),
        ("r/g:1@sha256:ab", "1"),
        ("r/g@sha256:ab", "sha256:ab"),
        ("", "latest"),
    ] {
        assert_eq!(version_of(image), version);
    }
    let check = |extender: &[&'static str], agents: &[&'static str]| {
        let part = |part, images: &[&'static str]| Images { part, images: images.to_vec() };
        states(&lines(versions("0.1.0", &[part("extender", extender), part("agents", agents)])))
    };
    assert_eq!(check(&["a:0.1.0", "a:0.1.0"], &["b:0.1.0"]), [Good]);
    assert_eq!(check(&["a:mine"], &["a:mine"]), [Good], "a tag that is no version");
    assert_eq!(check(&["a:0.1.0", "a:0.2.0"], &["a:0.1.0"]), [Warning, Warning]);
    assert_eq!(check(&["a:0.1.0"], &["a:0.2.0"]), [Problem]);
    assert_eq!(check(&["a:v0.2.0"], &["a:v0.2.0"]), [Warning]);
    assert_eq!(check(&["a:0.1.0"], &[]), [Good]);
    assert_eq!(check(&[], &[]), [NotChecked]);
}

#[test]
fn a_configuration_shows_all_of_its_faults() {
    let of = |text: &str| configuration(&Ok(text.to_owned()));
    let (found, config) = of("polcy: x\nhold_seconds: 0\n");
    assert_eq!((states(&found), config.is_none()), (vec![Problem, Problem], true), "{found:?}");
    assert!(found[0].found.contains("polcy"), "{found:?}");
    let (found, config) = of("listen: 0.0.0.0:8080");
    assert_eq!((states(&found), config.is_some()), (vec![Problem], true));
    let (found, _) = of("listen: 0.0.0.0:8080\nplain_text: true");
    assert_eq!(states(&found), [Warning]);
    let (found, _) = of("tls: {}\nlisten: 0.0.0.0:8080");
    assert_eq!(states(&found), [Good], "{found:?}");
    let (found, _) = of("tls: {}\nwebhook: {memory_limit: mps, mps_thread_percentage: share}");
    assert_eq!(states(&found), [Good, Warning], "{found:?}");
    assert!(found[1].found.contains("100 on Hopper GPUs"), "{found:?}");
    let many: String = (0..200).map(|at| format!("key{at}: 1\n")).collect();
    assert_eq!(of(&many).0.len(), 21);
    assert_eq!(of("a: [").0[0].state, Problem);
    for (why, state) in [(Unread::Absent, Problem), (Unread::Failed("x".to_owned()), NotChecked)] {
        assert_eq!(configuration(&Err(why)).0[0].state, state);
    }
}

#[test]
fn classes_of_workloads_need_their_priority_classes() {
    let config =
        Config::from_yaml("workloads: {train: {priority: 100}, serve: {priority_class: high}}")
            .unwrap();
    let found = |all: &[(&str, i32)]| {
        let all = all.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let check = lines(workload_classes(Some(&config), &Ok(all))).remove(0);
        (check.state, check.found)
    };
    assert_eq!(found(&[("gpupack-train", 100), ("high", -1)]).0, Good);
    let (state, text) = found(&[("gpupack-train", 7)]);
    assert_eq!(state, Problem);
    for part in ["high does not exist", "gpupack-train has the value 7, not 100"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let none = Config::default();
    for (config, classes, expected) in [
        (Some(&none), Ok(vec![]), Good),
        (Some(&config), forbidden(), NotChecked),
        (None, Ok(vec![]), NotChecked),
    ] {
        assert_eq!(states(&lines(workload_classes(config, &classes))), [expected]);
    }
}

#[test]
fn classes_starts_and_quotas() {
    let config = Config::default();
    let class =
        |read| states(&lines(runtime_classes(&[("nvidia".to_owned(), read)], Some(&config))));
    assert_eq!(class(Ok(())), [Good]);
    assert_eq!(class(Err(Unread::Absent)), [Problem]);
    assert_eq!(class(forbidden()), [NotChecked]);
    assert_eq!(states(&lines(runtime_classes(&[], Some(&config)))), [Good]);
    assert_eq!(states(&lines(runtime_classes(&[], None))), [NotChecked]);
    let event = ("a/b".to_owned(), "x".repeat(100_000));
    let found = lines(start_failures(&Ok(vec![event]))).remove(0);
    assert_eq!((found.state, found.found.len() < 400), (Warning, true));
    assert_eq!(states(&lines(start_failures(&Ok(vec![])))), [Good]);
    let quota = |keys: &[&str]| {
        let keys = keys.iter().map(ToString::to_string).collect();
        lines(quotas(&Ok(vec![("a/q".to_owned(), keys)])))[0].state
    };
    assert_eq!(quota(&["requests.nvidia.com/gpu", "pods"]), Warning);
    assert_eq!(quota(&["requests.nvidia.com/gpu", "requests.gpupack.dev/gpu-share"]), Good);
    assert_eq!(quota(&["requests.cpu"]), Good);
    for useless in ["gpupack.dev/gpu-share", "limits.gpupack.dev/gpus", "requests.gpupack.dev/gpu"]
    {
        assert_eq!(quota(&[useless]), Warning, "{useless}");
    }
    assert_eq!(states(&lines(quotas(&forbidden()))), [NotChecked]);
}
