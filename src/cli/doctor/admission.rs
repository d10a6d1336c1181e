//! Whether the admission webhook is asked, about the right pods, and does what it should; whether the API
//! server has the admission policies that this program came with.

use std::collections::BTreeSet;

use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, ValidatingAdmissionPolicy};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::base::reader::{ObjectPath, Read, ReviewAnswer, Unread};
use crate::doctor::finding::{Findings, Found, count, known, names, or_ok, short, there};
use crate::doctor::rights::{BINDINGS, POLICIES};
use crate::doctor::table::*;
use kube_api::config::file::Config;
use kube_api::config::webhook::JOBS;
use kube_api::request::resources::{MARKER_SHARE, WHOLE};
use wire::api::commands::Check;

/// Label of every namespace: its name.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Where a container takes its devices from.
const DEVICES_FIELD: &str = "metadata.annotations['placed.gpupack.dev/devices']";

/// The name of the webhook of templates.
const TEMPLATES: &str = "templates.gpupack.dev";

/// The webhook of pods, without those of templates and of others.
pub(crate) fn own(webhooks: &[MutatingWebhook]) -> Option<&MutatingWebhook> {
    let mut of_pods = webhooks.iter().filter(|webhook| webhook.name != TEMPLATES);
    of_pods.find(|webhook| webhook.name.ends_with("gpupack.dev"))
}

/// A problem if Jobs, or kinds of the configuration, are not sent to be completed.
pub(crate) fn templates(webhooks: &[MutatingWebhook], config: &Config) -> Option<Check> {
    let of_templates = webhooks.iter().filter(|webhook| webhook.name == TEMPLATES);
    let rules: Vec<_> = of_templates.flat_map(|webhook| webhook.rules.iter().flatten()).collect();
    let jobs = JOBS.to_owned();
    let meant = config.webhook.templates.keys().chain([&jobs]);
    let unsent = meant.filter(|kind| {
        let (name, group) = kind.split_once('.').unwrap_or((kind, ""));
        !rules.iter().any(|rule| {
            rule.resources.iter().flatten().any(|resource| resource == name)
                && rule.api_groups.iter().flatten().any(|known| known == group)
        })
    });
    TEMPLATES_UNSENT.about(&unsent.collect::<Vec<_>>())
}

/// Namespaces by name that the webhook leaves out.
fn exempt(webhook: &MutatingWebhook) -> BTreeSet<&str> {
    let selector = webhook.namespace_selector.iter();
    let all = selector.flat_map(|selector| selector.match_expressions.iter().flatten());
    let by_name = all.filter(|term| term.key == NAME_LABEL && term.operator == "NotIn");
    by_name.flat_map(|term| term.values.iter().flatten()).map(String::as_str).collect()
}

/// All conditions in one text, without the blanks that YAML folds.
fn squeezed<'a>(expressions: impl Iterator<Item = &'a String>) -> String {
    expressions.flat_map(|text| text.split_whitespace()).collect()
}

/// The RuntimeClasses that these conditions take for ones without GPUs.
fn classes(text: &str) -> Option<BTreeSet<String>> {
    let (list, _) = text.split_once("runtimeClassNamein[")?.1.split_once(']')?;
    let unquoted = list.split(',').map(|name| name.trim_matches('\'').to_owned());
    Some(unquoted.filter(|name| !name.is_empty()).collect())
}

/// The configuration of the webhook fits that of the extender.
pub(crate) fn configured(
    webhooks: &Read<Vec<MutatingWebhook>>,
    config: Option<&Config>,
    namespaces: &Read<BTreeSet<String>>,
    own_namespaces: [&str; 2],
) -> Found {
    let webhook = own(there(webhooks, WEBHOOK, NO_WEBHOOK)?).ok_or_else(|| NO_WEBHOOK.with([]))?;
    let mut found = Findings::new();
    if webhook.failure_policy.as_deref().is_some_and(|policy| policy != "Fail") {
        found.push(LENIENT.with([]));
    }
    let exempt = exempt(webhook);
    let asked = own_namespaces.into_iter().filter(|name| !exempt.contains(name));
    found.extend(ASKED_ITSELF.about(&asked.collect::<Vec<_>>()));
    match known(namespaces, &EXEMPT) {
        Err(check) => found.push(check),
        Ok(there) => {
            let missing = exempt.iter().filter(|name| !there.contains(**name));
            found.extend(EXEMPT_MISSING.about(&missing.collect::<Vec<_>>()));
        }
    }
    match config {
        Some(config) => found.extend(conditions(webhook, config)),
        None => found.push(CONDITIONS_UNKNOWN.with([])),
    }
    or_ok(found, || WEBHOOK_OK.with([&count(exempt.len(), "namespace")]))
}

/// The conditions send the pods that the configuration means.
fn conditions(webhook: &MutatingWebhook, config: &Config) -> Findings {
    let conditions = webhook.match_conditions.iter().flatten();
    let text = squeezed(conditions.map(|condition| &condition.expression));
    if webhook.match_conditions.iter().flatten().next().is_none() {
        return vec![NO_CONDITIONS.with([])];
    }
    let mut found = Findings::new();
    let named = config.scheduler_names.iter().filter(|name| *name != "default-scheduler");
    let unsent = named.filter(|name| !text.contains(&format!("'{name}'")));
    found.extend(SCHEDULER_UNNAMED.about(&unsent.collect::<Vec<_>>()));
    found.extend(same_classes("admission webhook", &text, config));
    if config.webhook.take_over_whole_gpus && !text.contains(&format!("'{WHOLE}'")) {
        found.push(NOT_TAKEN_OVER.with([]));
    }
    found
}

fn same_classes(check: &'static str, text: &str, config: &Config) -> Option<Check> {
    let meant = config.webhook.runtime_classes_without_gpus.iter().cloned().collect();
    let differ: Vec<String> = classes(text)?.symmetric_difference(&meant).cloned().collect();
    OTHER_CLASSES.of(check).about(&differ)
}

/// The policy that looks last at a pod's devices.
pub(crate) fn devices_policy(
    policy: &Read<ValidatingAdmissionPolicy>,
    config: Option<&Config>,
) -> Found {
    let policy = there(policy, DEVICES, NO_DEVICES_POLICY)?;
    let conditions = policy.spec.iter().flat_map(|spec| spec.match_conditions.iter().flatten());
    let text = squeezed(conditions.map(|condition| &condition.expression));
    let fault = config.and_then(|config| same_classes(DEVICES.check, &text, config));
    Ok(vec![fault.unwrap_or_else(|| DEVICES_OK.with([]))])
}

/// A pod for a dry run: that of a careful user, with this share of a GPU.
pub(crate) fn trial(name: &str, share: &str, scheduler: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "annotations": {"gpu-fraction": share}},
        "spec": {
            "schedulerName": scheduler, "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65_532,
                "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "main", "image": "gpupack.invalid/never-created",
                "resources": {"requests": {"cpu": "1m", "memory": "1Mi"},
                    "limits": {"cpu": "1m", "memory": "1Mi"}},
                "securityContext": {"allowPrivilegeEscalation": false,
                    "capabilities": {"drop": ["ALL"]}},
            }],
        },
    })
}

/// What the API server would do with a good pod and with a bad one.
pub(crate) struct Trials<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) good: &'a Read<ReviewAnswer>,
    pub(crate) bad: &'a Read<ReviewAnswer>,
}

/// A good pod is completed, a bad one is refused.
pub(crate) fn dry_run(
    trials: &Trials<'_>,
    webhook: &MutatingWebhook,
    config: Option<&Config>,
) -> Found {
    let namespace = short(trials.namespace);
    if exempt(webhook).contains(trials.namespace) {
        return Err(TRIAL_EXEMPT.with([&namespace]));
    }
    let mut found = match trials.good {
        Ok(ReviewAnswer::Accepted(pod)) => completed(pod, config),
        Ok(ReviewAnswer::Refused(why)) => return Err(refusal(why, trials.namespace)),
        Err(Unread::Absent) => return Err(NO_TRIAL_NAMESPACE.with([&namespace])),
        Err(why) => return Err(DRY_RUN.unread([], why)),
    };
    if found.iter().any(|check| check.fix.is_some()) {
        return Ok(found); // the bad pod has the same fate, and says nothing more
    }
    match trials.bad {
        Ok(ReviewAnswer::Refused(why)) if why.contains("gpu-fraction") => {}
        Ok(ReviewAnswer::Refused(why)) => found.push(BAD_REFUSED_ODDLY.with([&short(why)])),
        Ok(ReviewAnswer::Accepted(_)) => found.push(BAD_CREATED.with([])),
        Err(why) => found.push(BAD_DRY_RUN.unread([], why)),
    }
    Ok(found)
}

/// What a good pod is refused for, and how to fix that: the first that fits.
const REFUSALS: [([&str; 2], &str); 5] = [
    (
        ["x509", "certificate"],
        "set caBundle of the MutatingWebhookConfiguration to the CA of the webhook's certificate \
         (docs/admission.md#install)",
    ),
    (
        ["failed calling webhook"; 2],
        "see why no replica of the webhook answers: kubectl -n gpu-system get pods,endpointslices",
    ),
    (["RuntimeClass"; 2], "install NVIDIA's RuntimeClass, or set webhook.runtime_class"),
    (["exceeded quota"; 2], "name a namespace with room in its ResourceQuota with --namespace"),
    ([""; 2], "read the message; another namespace can be named with --namespace"),
];

/// Why a good pod is refused.
fn refusal(why: &str, namespace: &str) -> Check {
    if why.contains("cannot create resource") {
        let right = format!("create pods in namespace {namespace}");
        return DRY_RUN.unread([], &Unread::Forbidden(right));
    }
    let mut fits = REFUSALS.iter().filter(|(parts, _)| parts.iter().any(|part| why.contains(part)));
    let fix = fits.next().map_or("", |(_, fix)| fix);
    REFUSED.with([&short(namespace), &short(why), &fix])
}

/// What the webhook must have written into the good pod.
fn completed(pod: &Value, config: Option<&Config>) -> Findings {
    let container = &pod["spec"]["containers"][0];
    let variables = container["env"].as_array().map_or(&[][..], Vec::as_slice);
    let variable = variables.iter().find(|variable| variable["name"] == "NVIDIA_VISIBLE_DEVICES");
    let source = variable.map(|variable| &variable["valueFrom"]["fieldRef"]["fieldPath"]);
    let mut found = Findings::new();
    if source.is_none_or(|field| field != DEVICES_FIELD) {
        found.push(NO_DEVICES.with([]));
    }
    if container["resources"]["limits"][MARKER_SHARE].is_null() {
        found.push(NO_MARKER.with([]));
    }
    let scheduler = pod["spec"]["schedulerName"].as_str().unwrap_or_default();
    let first = config.and_then(|config| config.scheduler_names.first());
    if let Some(first) = first.filter(|first| *first != scheduler) {
        found.push(OTHER_SCHEDULER.with([&short(scheduler), &names(&[first])]));
    }
    if found.is_empty() { vec![ADMISSION_OK.with([&short(scheduler)])] } else { found }
}

/// The file with those that each installation has.
const SHIPPED: &str = include_str!("../../../deploy/policies.yaml");

/// The file with the one about what the extender may do to publish a CA.
const OF_CERTIFICATES: &str = include_str!("../../../deploy/certificates.yaml");

/// The extender's account in these files.
const ACCOUNT: &str = "system:serviceaccount:gpu-system:gpupack'";

/// A policy, or its binding.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Policy {
    pub(crate) target: ObjectPath,
    /// The shipped file with it.
    file: &'static str,
    spec: Value,
}

/// The shipped policies and bindings, for an extender in this namespace with this ServiceAccount.
pub(crate) fn shipped(namespace: &str, account: &str) -> Vec<Policy> {
    of_file("policies.yaml", SHIPPED, [namespace, account])
}

/// The further ones for an extender that changes objects of others to publish a CA.
pub(crate) fn of_certificates(namespace: &str, account: &str) -> Vec<Policy> {
    of_file("certificates.yaml", OF_CERTIFICATES, [namespace, account])
}

fn of_file(file: &'static str, text: &str, [namespace, account]: [&str; 2]) -> Vec<Policy> {
    let text = text.replace(ACCOUNT, &format!("system:serviceaccount:{namespace}:{account}'"));
    let text = text.replace("'gpu-system'", &format!("'{namespace}'"));
    let documents = serde_yaml_ng::Deserializer::from_str(&text).map(Value::deserialize);
    let read = documents.filter_map(Result::ok).filter_map(|mut object| {
        let all = match object["kind"].as_str()? {
            "ValidatingAdmissionPolicy" => &POLICIES,
            "ValidatingAdmissionPolicyBinding" => &BINDINGS,
            _ => return None,
        };
        let target = all.named(object["metadata"]["name"].as_str()?);
        Some(Policy { target, file, spec: object["spec"].take() })
    });
    read.collect()
}

/// The policies are there as they were shipped: one line for all, or one for each that is not so.
pub(crate) fn compared(all: &[(Policy, Read<Value>)]) -> Found {
    let wrong: Vec<Check> = all.iter().filter_map(|(policy, is)| differing(policy, is)).collect();
    if wrong.is_empty() { Ok(vec![POLICIES_OK.with([&all.len()])]) } else { Ok(wrong) }
}

fn differing(shipped: &Policy, found: &Read<Value>) -> Option<Check> {
    let Policy { target, file, spec } = shipped;
    let kind = match target.resource == POLICIES.resource {
        true => "policy",
        false => "the binding of policy",
    };
    let name = target.name.as_deref().unwrap_or_default();
    match found {
        Err(Unread::Absent) => Some(NO_POLICY.with([&kind, &name, file])),
        Err(why) => Some(POLICY.unread([&kind, &name], why)),
        Ok(object) => {
            let path = first_difference(spec, &object["spec"], "spec")?;
            Some(OTHER_POLICY.with([&kind, &name, file, &path]))
        }
    }
}

/// The path of the first field that differs. What the API server fills in is no difference.
fn first_difference(shipped: &Value, found: &Value, path: &str) -> Option<String> {
    match (shipped, found) {
        (Value::Object(is), Value::Object(now)) => {
            let is_more = |key: &&String| !is.contains_key(*key) && !is_default(key, &found[*key]);
            let mut keys = is.keys().chain(now.keys().filter(is_more));
            keys.find_map(|key| {
                first_difference(&shipped[key], &found[key], &format!("{path}.{key}"))
            })
        }
        (Value::Array(is), Value::Array(now)) if is.len() == now.len() => {
            let mut pairs = is.iter().zip(now).enumerate();
            pairs.find_map(|(at, (is, now))| first_difference(is, now, &format!("{path}[{at}]")))
        }
        (is, now) => (is != now).then(|| path.to_owned()),
    }
}

/// Whether the API server sets this if it is missing.
fn is_default(key: &str, value: &Value) -> bool {
    match key {
        "namespaceSelector" | "objectSelector" => *value == json!({}),
        "matchPolicy" => *value == json!("Equivalent"),
        "scope" => *value == json!("*"),
        "failurePolicy" => *value == json!("Fail"),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
