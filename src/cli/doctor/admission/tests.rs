use serde::de::DeserializeOwned;

use super::*;
use crate::doctor::finding::{lines, states};
use wire::api::commands::CheckState::{NotChecked, Ok as Good, Problem, Warning};

/// An object of `deploy/webhook.yaml`.
fn object<T: DeserializeOwned>(kind: &str) -> T {
    let text = include_str!("../../../../deploy/webhook.yaml");
    let mut found = serde_yaml_ng::Deserializer::from_str(text)
        .map(|document| <Value as Deserialize>::deserialize(document).unwrap());
    serde_json::from_value(found.find(|object| object["kind"] == kind).unwrap()).unwrap()
}

fn webhook() -> MutatingWebhook {
    let configuration: Value = object("MutatingWebhookConfiguration");
    let all: Vec<_> = serde_json::from_value(configuration["webhooks"].clone()).unwrap();
    own(&all).unwrap().clone()
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
    lines(configured(&Ok(vec![webhook]), Some(&config), &all_namespaces(), own))
}

#[test]
fn the_shipped_webhook_fits_the_default_configuration() {
    let found = check(webhook(), "");
    assert_eq!(states(&found), [Good], "{found:?}");
    let policy = Ok(object("ValidatingAdmissionPolicy"));
    assert_eq!(states(&lines(devices_policy(&policy, Some(&Config::default())))), [Good]);
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
    let found = lines(configured(&Ok(vec![webhook()]), Some(&config), &few, own));
    assert!(text(&found).contains("gpu-operator"), "{found:?}");
    let wasm = Config::from_yaml("webhook: {runtime_classes_without_gpus: [wasm]}").unwrap();
    let found = lines(devices_policy(&Ok(object("ValidatingAdmissionPolicy")), Some(&wasm)));
    assert_eq!(states(&found), [Problem]);
}

#[test]
fn kinds_whose_templates_are_not_sent_are_named() {
    let configuration: Value = object("MutatingWebhookConfiguration");
    let all: Vec<MutatingWebhook> =
        serde_json::from_value(configuration["webhooks"].clone()).unwrap();
    assert_eq!(templates(&all, &Config::default()), None);
    let sets = "webhook: {templates: {jobsets.jobset.x-k8s.io: [spec/a], a.b: [spec/c]}}";
    let config = Config::from_yaml(sets).unwrap();
    let found = templates(&all, &config).unwrap();
    assert!(found.found.contains("templates of a.b, jobsets.jobset.x-k8s.io:"), "{found:?}");
    let found = templates(&all[..1], &Config::default()).unwrap();
    assert!(found.found.contains("templates of jobs.batch:"), "{found:?}");
    assert_eq!(own(&all).unwrap().name, "pods.gpupack.dev");
}

#[test]
fn what_is_absent_or_forbidden_is_said() {
    let own = ["gpu-system", "gpupack-agents"];
    let of = |read: &Read<Vec<MutatingWebhook>>| {
        states(&lines(configured(read, None, &forbidden(), own)))
    };
    assert_eq!((of(&Ok(vec![])), of(&Err(Unread::Absent))), (vec![Warning], vec![Warning]));
    assert_eq!(of(&forbidden()), [NotChecked]);
    assert_eq!(of(&Ok(vec![webhook()])), [NotChecked, NotChecked]);
    assert_eq!(states(&lines(devices_policy(&Err(Unread::Absent), None))), [Warning]);
    assert_eq!(states(&lines(devices_policy(&forbidden(), None))), [NotChecked]);
}

/// The good pod as the webhook completes it.
fn done() -> Value {
    let mut pod = trial("a", "0.5", "gpupack");
    let container = &mut pod["spec"]["containers"][0];
    container["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES",
        "valueFrom": {"fieldRef": {"fieldPath": DEVICES_FIELD}}}]);
    container["resources"]["limits"][MARKER_SHARE] = "500000".into();
    pod
}

fn tried(good: &Read<ReviewAnswer>, bad: &Read<ReviewAnswer>, namespace: &str) -> Findings {
    let trials = Trials { namespace, good, bad };
    lines(dry_run(&trials, &webhook(), Some(&Config::default())))
}

fn accepted(pod: Value) -> Read<ReviewAnswer> {
    Ok(ReviewAnswer::Accepted(Box::new(pod)))
}

fn refused(why: &str) -> Read<ReviewAnswer> {
    Ok(ReviewAnswer::Refused(why.to_owned()))
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

/// As the API server shows it.
fn stored(policy: &Policy) -> Value {
    let mut object = json!({"metadata": {"name": policy.target.name}, "spec": policy.spec});
    if let Some(constraints) = object["spec"]["matchConstraints"].as_object_mut() {
        constraints.insert("matchPolicy".to_owned(), "Equivalent".into());
        constraints.insert("namespaceSelector".to_owned(), json!({}));
        constraints.insert("objectSelector".to_owned(), json!({}));
        for rule in constraints["resourceRules"].as_array_mut().into_iter().flatten() {
            rule["scope"] = "*".into();
        }
    }
    object
}

#[test]
fn the_shipped_ones_are_found_again_with_the_fields_that_the_api_server_adds() {
    let all = shipped("gpu-system", "gpupack");
    assert_eq!(all.len(), 6);
    assert!(SHIPPED.contains(ACCOUNT), "the account is replaced by this text");
    let read: Vec<_> = all.iter().map(|policy| (policy.clone(), Ok(stored(policy)))).collect();
    let found = lines(compared(&read));
    assert_eq!(states(&found), [Good], "{found:?}");
    let further = of_certificates("gpu-system", "gpupack");
    assert_eq!(further.len(), 2);
    let is_own = |policy: &Policy| policy.target.name.as_deref() == Some("gpupack-certificates");
    assert!(further.iter().all(is_own), "{further:?}");
    for (elsewhere, all) in
        [(shipped("gpus", "extender"), all), (of_certificates("gpus", "extender"), further)]
    {
        assert_ne!(elsewhere, all);
        let text = serde_json::to_string(&elsewhere[0].spec).unwrap();
        assert!(text.contains("system:serviceaccount:gpus:extender'"), "{text}");
    }
}

fn one(policy: &Policy, found: Read<Value>) -> Check {
    lines(compared(&[(policy.clone(), found)])).remove(0)
}

#[test]
fn each_change_is_named() {
    let all = shipped("gpu-system", "gpupack");
    let policy = &all[0];
    for (change, part) in [
        (("/spec/failurePolicy", json!("Ignore")), "spec.failurePolicy"),
        (("/spec/validations/0/expression", json!("true")), "spec.validations[0].expression"),
        (("/spec/validations", json!([])), "spec.validations"),
        (("/spec/matchConstraints/objectSelector", json!({"a": 1})), "objectSelector"),
        (("/spec", json!(7)), "spec"),
    ] {
        let mut object = stored(policy);
        *object.pointer_mut(change.0).unwrap() = change.1;
        let found = one(policy, Ok(object));
        assert_eq!(found.state, Problem, "{part}");
        assert!(found.found.contains(part), "{found:?}");
    }
    let mut more = stored(policy);
    more["spec"]["matchConstraints"]["excludeResourceRules"] = json!([{}]);
    assert_eq!(one(policy, Ok(more)).state, Problem);
    assert_eq!(one(policy, Err(Unread::Absent)).state, Problem);
    assert_eq!(one(policy, forbidden()).state, NotChecked);
    let both = [(policy.clone(), forbidden()), (policy.clone(), Ok(stored(policy)))];
    assert_eq!(lines(compared(&both)).len(), 1, "what is as it should be is left out");
}
