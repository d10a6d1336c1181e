//! Pods as the templates of controllers have them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::tests::{admitted, answered, env, half, pod, review, rules, shipped};
use super::*;
use crate::admission::review::ReviewFault;
use crate::config::webhook::TemplatePath;

const SHARE: &str = "gpupack.dev/gpu-share";

/// A review of an object of this resource.
fn review_of(resource: &str, object: &Value, old: Option<&Value>) -> Value {
    let (resource, group) = resource.split_once('.').unwrap();
    let mut review = review(object, "", old);
    review["request"]["resource"] = json!({"group": group, "version": "v1", "resource": resource});
    review["request"]["kind"] = json!({"group": group, "version": "v1", "kind": "Any"});
    review
}

fn stored(rules: &Admission, resource: &str, object: &Value) -> Result<Value, String> {
    let once = answered(rules, &review_of(resource, object, None))?;
    let twice = answered(rules, &review_of(resource, &once, None)).unwrap();
    assert_eq!(once, twice, "applied twice");
    let changed = answered(rules, &review_of(resource, &once, Some(&once))).unwrap();
    assert_eq!(once, changed, "changed later");
    Ok(once)
}

fn job(template: &Value) -> Value {
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"},
        "spec": {"suspend": true, "template": template}})
}

/// A template like this pod.
fn template(pod: &Value) -> Value {
    let mut template = json!({"metadata": pod["metadata"], "spec": pod["spec"]});
    template["metadata"].as_object_mut().unwrap().remove("generateName");
    template
}

fn path(text: &str) -> TemplatePath {
    TemplatePath::try_from(text.to_owned()).unwrap()
}

fn with_job_sets() -> Admission {
    rules(|settings| {
        settings.templates = BTreeMap::from([
            (
                "jobsets.jobset.x-k8s.io".to_owned(),
                vec![path("spec/replicatedJobs/*/template/spec/template")],
            ),
            (
                "leaderworkersets.leaderworkerset.x-k8s.io".to_owned(),
                vec![
                    path("spec/leaderWorkerTemplate/leaderTemplate"),
                    path("spec/leaderWorkerTemplate/workerTemplate"),
                    path("spec/leaderWorkerTemplate/*"),
                ],
            ),
        ]);
    })
}

#[test]
fn a_pod_of_a_completed_template_is_complete() {
    for (pod, change) in [
        (half(|_| ()), json!({})),
        (pod(json!({"gpu-memory": "100"}), |_| ()), json!({})),
        (
            pod(json!({}), |pod| {
                pod["spec"]["schedulerName"] = "gpupack".into();
                pod["spec"]["containers"][1]["resources"]["limits"]["nvidia.com/gpu"] = 2.into();
            }),
            json!({"schedulerName": "gpupack"}),
        ),
    ] {
        let rules = shipped();
        let object = stored(&rules, "jobs.batch", &job(&template(&pod))).unwrap();
        let made = &object["spec"]["template"];
        let mut expected = admitted(&rules, &pod).unwrap();
        expected["metadata"].as_object_mut().unwrap().remove("generateName");
        assert_eq!(made["spec"], expected["spec"], "{change}");
        assert_eq!(made["metadata"], expected["metadata"], "{change}");
        let of_template = json!({"metadata": made["metadata"], "spec": made["spec"]});
        assert_eq!(admitted(&rules, &of_template).unwrap(), of_template, "its pods do not change");
    }
}

#[test]
fn a_template_without_metadata_is_completed() {
    let whole = json!({"spec": {"schedulerName": "gpupack", "containers": [
        {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}});
    for metadata in [None, Some(Value::Null), Some(json!({})), Some(json!({"annotations": {}}))] {
        let mut template = whole.clone();
        if let Some(metadata) = metadata {
            template["metadata"] = metadata;
        }
        let object = stored(&shipped(), "jobs.batch", &job(&template)).unwrap();
        let made = &object["spec"]["template"];
        assert_eq!(made["metadata"]["annotations"]["gpu-fraction"], "1");
        let limits = &made["spec"]["containers"][0]["resources"]["limits"];
        assert_eq!((&limits[SHARE], limits.get("nvidia.com/gpu")), (&json!("1000000"), None));
    }
    for object in [job(&json!({"spec": {"containers": []}})), job(&Value::Null), json!({})] {
        assert_eq!(stored(&shipped(), "jobs.batch", &object).unwrap(), object, "no GPU");
    }
}

/// The marker of the share that the first container of a template has.
fn share(template: &Value) -> Value {
    template["spec"]["containers"][0]["resources"]["limits"][SHARE].clone()
}

#[test]
fn each_template_of_a_configured_kind_is_completed_once() {
    let rules = with_job_sets();
    let (gpu, none) = (template(&half(|_| ())), json!({"spec": {"containers": [{"name": "a"}]}}));
    let set = json!({"spec": {"replicatedJobs": [
        {"name": "leader", "template": {"spec": {"template": none}}},
        {"name": "workers", "template": {"spec": {"template": gpu}}},
    ]}});
    let object = stored(&rules, "jobsets.jobset.x-k8s.io", &set).unwrap();
    let made =
        |index: usize| &object["spec"]["replicatedJobs"][index]["template"]["spec"]["template"];
    assert_eq!(*made(0), none);
    assert_eq!(share(made(1)), "500000");
    let set = json!({"spec": {"leaderWorkerTemplate": {
        "leaderTemplate": gpu, "workerTemplate": gpu, "size": 2, "other": [1]}}});
    let object = stored(&rules, "leaderworkersets.leaderworkerset.x-k8s.io", &set).unwrap();
    for name in ["leaderTemplate", "workerTemplate"] {
        let made = &object["spec"]["leaderWorkerTemplate"][name];
        assert_eq!((share(made), env(&made["spec"]["containers"][0]).len()), ("500000".into(), 4));
    }
    let unknown = review_of("jobsets.jobset.x-k8s.io", &set, None);
    let fault = shipped().review(unknown.to_string().as_bytes()).unwrap_err();
    assert!(matches!(fault, ReviewFault::Resource { .. }), "{fault}");
    let many = vec![json!({"template": {"spec": {"template": none}}}); 101];
    let many =
        review_of("jobsets.jobset.x-k8s.io", &json!({"spec": {"replicatedJobs": many}}), None);
    let fault = rules.review(many.to_string().as_bytes()).unwrap_err().to_string();
    assert!(fault.contains("more than 100 templates"), "{fault}");
    let half = vec![json!({"name": "c"}); 501];
    let half = json!({"template": {"spec": {"template": {"spec": {"containers": half}}}}});
    let large = |count: usize| json!({"spec": {"replicatedJobs": vec![half.clone(); count]}});
    let fault = |object: &Value, old: Option<&Value>| {
        let review = review_of("jobsets.jobset.x-k8s.io", object, old).to_string();
        rules.review(review.as_bytes()).err().map(|fault| fault.to_string())
    };
    assert_eq!(fault(&large(1), Some(&large(1))), None);
    for (object, old) in [(large(2), large(1)), (large(1), large(2))] {
        let fault = fault(&object, Some(&old)).unwrap();
        assert!(fault.contains("more than 1000 containers"), "{fault}");
    }
    for part in ["status", "scale"] {
        let mut of_part = review_of("jobs.batch", &job(&gpu), None);
        of_part["request"]["subResource"] = part.into();
        let fault = rules.review(of_part.to_string().as_bytes()).unwrap_err();
        assert!(matches!(fault, ReviewFault::Resource { .. }), "{fault}");
    }
}

#[test]
fn a_bad_template_is_refused_where_the_object_is_created() {
    let bad = template(&pod(json!({"gpu-fraction": "2"}), |_| ()));
    let refused = stored(&shipped(), "jobs.batch", &job(&bad)).unwrap_err();
    assert!(refused.starts_with("`spec/template`: annotation `gpu-fraction` is `2`"), "{refused}");
    let privileged = template(&half(|pod| {
        pod["spec"]["containers"][1]["securityContext"] = json!({"privileged": true});
    }));
    let refused = stored(&shipped(), "jobs.batch", &job(&privileged)).unwrap_err();
    assert!(refused.contains("is privileged"), "{refused}");
}

#[test]
fn a_template_that_is_older_than_the_webhook_stays() {
    let rules = shipped();
    let old = job(&template(&half(|_| ())));
    let mut new = old.clone();
    new["spec"]["suspend"] = false.into();
    assert_eq!(answered(&rules, &review_of("jobs.batch", &new, Some(&old))).unwrap(), new);
    // One with a fault can still be changed, for instance to let it be deleted.
    let bad = job(&template(&pod(json!({"gpu-fraction": "2"}), |_| ())));
    assert_eq!(answered(&rules, &review_of("jobs.batch", &bad, Some(&bad))).unwrap(), bad);
    // One that was complete stays complete, whatever its owner applies again.
    let complete = stored(&rules, "jobs.batch", &old).unwrap();
    let again = answered(&rules, &review_of("jobs.batch", &old, Some(&complete))).unwrap();
    assert_eq!(again, complete);
    let raised = job(&template(&pod(json!({"gpu-fraction": "1"}), |_| ())));
    let raised = answered(&rules, &review_of("jobs.batch", &raised, Some(&complete))).unwrap();
    let limits = &raised["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"];
    assert_eq!(limits[SHARE], "1000000");
    let refused = answered(&rules, &review_of("jobs.batch", &bad, Some(&complete))).unwrap_err();
    assert!(refused.contains("gpu-fraction"), "{refused}");
}

fn parent(name: &str) -> Value {
    json!({"annotations": {"kueue.x-k8s.io/pod-suspending-parent": name}})
}

/// Writes keys of Kueue on a pod.
fn mark(pod: &mut Value, keys: &Value) {
    json_patch::merge(&mut pod["metadata"], keys);
}

#[test]
fn a_pod_that_kueue_counted_for_less_is_refused() {
    let by_label = json!({"labels": {"kueue.x-k8s.io/podset": "main"}});
    let by_workload = json!({"annotations": {"kueue.x-k8s.io/workload": "job-a"}});
    let sets = "leaderworkerset.x-k8s.io/leaderworkerset";
    for (keys, is_counted) in [
        (by_label, true),
        (by_workload, true),
        (parent(sets), true),
        (parent("statefulset"), false),
        (json!({"labels": {"kueue.x-k8s.io/managed": "true"}}), false),
        (json!({"labels": {"kueue.x-k8s.io/pod-group-name": "a"}}), false),
    ] {
        let bare = half(|pod| mark(pod, &keys));
        let answer = admitted(&shipped(), &bare);
        assert_eq!(answer.is_err(), is_counted, "{keys}");
        if let Err(refused) = answer {
            assert!(refused.contains("`gpupack.dev/gpu-share` is `0` there"), "{refused}");
            assert!(
                refused.contains("counts `500000`") && refused.contains("Create the Job again")
            );
        }
        let complete = admitted(&shipped(), &half(|_| ())).unwrap();
        let mut good = complete.clone();
        mark(&mut good, &keys);
        assert!(admitted(&shipped(), &good).is_ok(), "{keys}");
        for (marker, less) in [(SHARE, "499999"), ("gpupack.dev/gpus", "0")] {
            let mut less_than = good.clone();
            less_than["spec"]["containers"][0]["resources"]["limits"][marker] = less.into();
            assert_eq!(admitted(&shipped(), &less_than).is_err(), is_counted, "{keys} {marker}");
        }
        let none = pod(json!({}), |pod| mark(pod, &keys));
        assert_eq!(admitted(&shipped(), &none).unwrap(), none, "a pod without a GPU");
        // Kueue writes its keys into a template when the Job starts.
        let marked = job(&template(&good));
        assert_eq!(stored(&shipped(), "jobs.batch", &marked).unwrap(), marked);
        assert!(stored(&shipped(), "jobs.batch", &job(&template(&bare))).is_ok(), "{keys}");
    }
}

#[test]
fn templates_get_the_class_of_their_label_and_obey_the_rules_of_their_namespace() {
    let text = "
workloads: {train: {}}
access: {namespaces: {team-a: {isolation: [none]}}}
";
    let requests = crate::config::file::Config::from_yaml(text).unwrap().request_rules();
    let rules = shipped().under(requests);
    let labelled = template(&half(|pod| {
        pod["metadata"]["labels"] = json!({"gpupack.dev/workload": "train"});
    }));
    let stored = stored(&rules, "jobs.batch", &job(&labelled)).unwrap();
    assert_eq!(stored["spec"]["template"]["spec"]["priorityClassName"], "gpupack-train");
    // A Job that is there gets the label later: its class could not change, and its pods get it.
    let mut later = stored.clone();
    later["spec"]["template"]["spec"].as_object_mut().unwrap().remove("priorityClassName");
    let mut before = later.clone();
    before["spec"]["template"]["metadata"]["labels"] = json!({});
    let changed = answered(&rules, &review_of("jobs.batch", &later, Some(&before))).unwrap();
    assert_eq!(changed, later);
    let apart = template(&half(|pod| {
        pod["metadata"]["annotations"]["gpupack.dev/isolation"] = "hardware".into();
    }));
    let text = answered(&rules, &review_of("jobs.batch", &job(&apart), None)).unwrap_err();
    assert!(text.contains("isolation `hardware`") && text.contains("use `none`"), "{text}");
}
