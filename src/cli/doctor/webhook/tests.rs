use serde::de::DeserializeOwned;

use super::*;
use crate::api::commands::CheckState::{NotChecked, Ok as Good, Problem, Warning};
use crate::cli::doctor::finding::states;

/// An object of `deploy/webhook.yaml`.
fn shipped<T: DeserializeOwned>(kind: &str) -> T {
    let text = include_str!("../../../../deploy/webhook.yaml");
    let mut found = serde_yaml_ng::Deserializer::from_str(text)
        .map(|document| <Value as serde::Deserialize>::deserialize(document).unwrap());
    serde_json::from_value(found.find(|it| it["kind"] == kind).unwrap()).unwrap()
}

fn webhook() -> MutatingWebhook {
    let configuration: Value = shipped("MutatingWebhookConfiguration");
    own(serde_json::from_value(configuration["webhooks"].clone()).unwrap()).unwrap()
}

fn forbidden<T>() -> Read<T> {
    Err(Unread::Forbidden("get it".to_owned()))
}

fn all_namespaces() -> Read<BTreeSet<String>> {
    Ok(exempt(&webhook()).into_iter().map(str::to_owned).collect())
}

fn check(webhook: MutatingWebhook, config: &str) -> Findings {
    let config = Config::from_yaml(config).unwrap();
    let own = ["gpu-system", "gpupack-agents"];
    configured(&Ok(Some(webhook)), Some(&config), &all_namespaces(), own)
}

#[test]
fn the_shipped_webhook_fits_the_default_configuration() {
    let found = check(webhook(), "");
    assert_eq!(states(&found), [Good], "{found:?}");
    let policy = Ok(shipped("ValidatingAdmissionPolicy"));
    assert_eq!(states(&devices_policy(&policy, Some(&Config::default()))), [Good]);
}

#[test]
fn each_disagreement_is_named() {
    let text = |found: &Findings| found[0].found.clone();
    let lenient = MutatingWebhook { failure_policy: Some("Ignore".to_owned()), ..webhook() };
    assert!(text(&check(lenient, "")).contains("failurePolicy"));
    let everywhere = MutatingWebhook { namespace_selector: None, ..webhook() };
    assert!(text(&check(everywhere, "")).contains("gpu-system, gpupack-agents"));
    let unconditional = MutatingWebhook { match_conditions: None, ..webhook() };
    assert_eq!(states(&check(unconditional, "")), [Warning]);
    let found = check(webhook(), "scheduler_names: [gpupack, gpupack-batch]");
    assert!(text(&found).contains("gpupack-batch"), "{found:?}");
    let found =
        check(webhook(), "webhook: {runtime_classes_without_gpus: [crun, kata, runc, wasm]}");
    assert!(text(&found).ends_with(": wasm"), "{found:?}");
    let found = check(webhook(), "webhook: {take_over_whole_gpus: true}");
    assert!(text(&found).contains("take_over_whole_gpus"), "{found:?}");
    let config = Config::default();
    let own = ["gpu-system", "gpupack-agents"];
    let few = Ok(["kube-system".to_owned()].into());
    let found = configured(&Ok(Some(webhook())), Some(&config), &few, own);
    assert!(text(&found).contains("gpu-operator"), "{found:?}");
    let wasm = Config::from_yaml("webhook: {runtime_classes_without_gpus: [wasm]}").unwrap();
    let found = devices_policy(&Ok(shipped("ValidatingAdmissionPolicy")), Some(&wasm));
    assert_eq!(states(&found), [Problem]);
}

#[test]
fn kinds_whose_templates_are_not_sent_are_named() {
    let configuration: Value = shipped("MutatingWebhookConfiguration");
    let all: Vec<MutatingWebhook> =
        serde_json::from_value(configuration["webhooks"].clone()).unwrap();
    assert_eq!(templates(&all, &Config::default()), None);
    let sets = "webhook: {templates: {jobsets.jobset.x-k8s.io: [spec/a], a.b: [spec/c]}}";
    let config = Config::from_yaml(sets).unwrap();
    let found = templates(&all, &config).unwrap();
    assert!(found.found.contains("templates of a.b, jobsets.jobset.x-k8s.io:"), "{found:?}");
    let found = templates(&all[..1], &Config::default()).unwrap();
    assert!(found.found.contains("templates of jobs.batch:"), "{found:?}");
    assert_eq!(own(all).unwrap().name, "pods.gpupack.dev");
}

#[test]
fn what_is_absent_or_forbidden_is_said() {
    let own = ["gpu-system", "gpupack-agents"];
    let of =
        |read: &Read<Option<MutatingWebhook>>| states(&configured(read, None, &forbidden(), own));
    assert_eq!(of(&Ok(None)), [Warning]);
    assert_eq!(of(&forbidden()), [NotChecked]);
    assert_eq!(of(&Ok(Some(webhook()))), [NotChecked, NotChecked]);
    assert_eq!(states(&devices_policy(&Err(Unread::Absent), None)), [Warning]);
    assert_eq!(states(&devices_policy(&forbidden(), None)), [NotChecked]);
}

/// The good pod as the webhook completes it.
fn done() -> Value {
    let mut pod = trial("a", "0.5", "gpupack");
    let container = &mut pod["spec"]["containers"][0];
    container["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES",
        "valueFrom": {"fieldRef": {"fieldPath": DEVICES}}}]);
    container["resources"]["limits"][MARKER_SHARE] = "500000".into();
    pod
}

fn tried(good: &Read<Answer>, bad: &Read<Answer>, namespace: &str) -> Findings {
    let trials = Trials { namespace, good, bad };
    dry_run(&trials, Some(&webhook()), Some(&Config::default()))
}

fn accepted(pod: Value) -> Read<Answer> {
    Ok(Answer::Accepted(Box::new(pod)))
}

fn refused(why: &str) -> Read<Answer> {
    Ok(Answer::Refused(why.to_owned()))
}

#[test]
fn a_dry_run_shows_what_admission_does() {
    let bad = refused("annotation `gpu-fraction: 2` is not allowed");
    assert_eq!(states(&tried(&accepted(done()), &bad, "default")), [Good]);
    let found = tried(&accepted(done()), &accepted(done()), "default");
    assert_eq!(states(&found), [Good, Problem], "{found:?}");
    let found = tried(&accepted(trial("a", "0.5", "gpupack")), &bad, "default");
    assert_eq!(states(&found), [Problem, Problem], "{found:?}");
    let mut other = done();
    other["spec"]["schedulerName"] = "other".into();
    assert_eq!(states(&tried(&accepted(other), &bad, "default")), [Problem]);
    assert_eq!(states(&tried(&accepted(Value::Null), &bad, "default")), [Problem; 3]);
    assert_eq!(states(&tried(&accepted(done()), &bad, "kube-system")), [NotChecked]);
    assert_eq!(states(&tried(&accepted(done()), &refused("no room"), "default")), [Good, Warning]);
    let none = Trials { namespace: "a", good: &bad, bad: &bad };
    assert_eq!(states(&dry_run(&none, None, None)), [NotChecked]);
}

#[test]
fn each_refusal_has_its_fix() {
    let bad = refused("gpu-fraction");
    for (why, state, fix) in [
        ("failed calling webhook \"x\": x509: unknown authority", Problem, "caBundle"),
        ("failed calling webhook \"x\": no endpoints available", Problem, "no replica"),
        ("pod rejected: RuntimeClass \"nvidia\" not found", Problem, "webhook.runtime_class"),
        ("exceeded quota: a", Problem, "--namespace"),
        ("User \"u\" cannot create resource \"pods\"", NotChecked, "right"),
        ("anything else", Problem, "--namespace"),
    ] {
        let found = tried(&refused(why), &bad, "default");
        assert_eq!(states(&found), [state], "{why}");
        assert!(found[0].fix.as_ref().unwrap().contains(fix), "{found:?}");
    }
    assert_eq!(states(&tried(&Err(Unread::Absent), &bad, "nowhere")), [NotChecked]);
}

#[test]
fn classes_of_workloads_need_their_priority_classes() {
    let config =
        Config::from_yaml("workloads: {train: {priority: 100}, serve: {priority_class: high}}")
            .unwrap();
    let found = |all: &[(&str, i32)]| {
        let all = all.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let check = workload_classes(Some(&config), &Ok(all));
        (check.state, check.found)
    };
    assert_eq!(found(&[("gpupack-train", 100), ("high", -1)]).0, Good);
    let (state, text) = found(&[("gpupack-train", 7)]);
    assert_eq!(state, Problem);
    for part in ["high does not exist", "gpupack-train has the value 7, not 100"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(workload_classes(Some(&Config::default()), &Ok(BTreeMap::new())).state, Good);
    assert_eq!(workload_classes(Some(&config), &forbidden()).state, NotChecked);
    assert_eq!(workload_classes(None, &Ok(BTreeMap::new())).state, NotChecked);
}

#[test]
fn classes_starts_and_quotas() {
    let class = |read| states(&runtime_classes(&[("nvidia", read)]));
    assert_eq!(class(Ok(())), [Good]);
    assert_eq!(class(Err(Unread::Absent)), [Problem]);
    assert_eq!(class(forbidden()), [NotChecked]);
    assert_eq!(states(&runtime_classes(&[])), [Good]);
    let event = ("a/b".to_owned(), "x".repeat(100_000));
    let found = start_failures(&Ok(vec![event]));
    assert_eq!((found.state, found.found.len() < 400), (Warning, true));
    assert_eq!(start_failures(&Ok(vec![])).state, Good);
    let quota = |keys: &[&str]| {
        let keys = keys.iter().map(ToString::to_string).collect();
        quotas(&Ok(vec![("a/q".to_owned(), keys)])).state
    };
    assert_eq!(quota(&["requests.nvidia.com/gpu", "pods"]), Warning);
    assert_eq!(quota(&["requests.nvidia.com/gpu", "requests.gpupack.dev/gpu-share"]), Good);
    assert_eq!(quota(&["requests.cpu"]), Good);
    for useless in ["gpupack.dev/gpu-share", "limits.gpupack.dev/gpus", "requests.gpupack.dev/gpu"]
    {
        assert_eq!(quota(&[useless]), Warning, "{useless}");
    }
    assert_eq!(quotas(&forbidden()).state, NotChecked);
}
