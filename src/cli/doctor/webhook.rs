//! Whether the admission webhook is asked, about the right pods, and does what it should; what
//! containers and quotas need.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, ValidatingAdmissionPolicy};
use serde_json::{Value, json};

use crate::api::commands::Check;
use crate::cli::base::reader::{Answer, Read, Unread};
use crate::cli::doctor::finding::{Findings, Of, count, names, short};
use crate::config::file::Config;
use crate::config::webhook::JOBS;
use crate::kube_api::request::resources::{MARKER_SHARE, MARKERS, WHOLE};

/// What is checked about the configuration of the webhook.
const WEBHOOK: Of = Of("admission webhook");

/// What is checked by pods that are never created.
const DRY_RUN: Of = Of("admission of a pod");

/// Label of every namespace: its name.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Where a container takes its devices from.
const DEVICES: &str = "metadata.annotations['placed.gpupack.dev/devices']";

/// The name of the webhook of templates.
const TEMPLATES: &str = "templates.gpupack.dev";

/// The webhook of pods, without those of templates and of others.
pub(crate) fn own(webhooks: Vec<MutatingWebhook>) -> Option<MutatingWebhook> {
    let is_own = |webhook: &MutatingWebhook| {
        webhook.name.ends_with("gpupack.dev") && webhook.name != TEMPLATES
    };
    webhooks.into_iter().find(is_own)
}

/// A problem if Jobs, or kinds of the configuration, are not sent to be completed.
pub(crate) fn templates(webhooks: &[MutatingWebhook], config: &Config) -> Option<Check> {
    let of_templates = webhooks.iter().filter(|webhook| webhook.name == TEMPLATES);
    let rules = of_templates.flat_map(|webhook| webhook.rules.iter().flatten());
    let sent: BTreeSet<String> = rules
        .flat_map(|rule| {
            let groups = rule.api_groups.iter().flatten();
            groups.flat_map(|group| {
                let names = rule.resources.iter().flatten();
                names.map(move |name| format!("{name}.{group}"))
            })
        })
        .collect();
    let jobs = JOBS.to_owned();
    let meant = config.webhook.templates.keys().chain([&jobs]);
    let unsent: Vec<&String> = meant.filter(|name| !sent.contains(*name)).collect();
    (!unsent.is_empty()).then(|| {
        WEBHOOK.warning(
            format!(
                "it is not asked about templates of {}: Kueue counts nothing for them, and their pods are \
                 refused",
                names(&unsent)
            ),
            "set config.webhook.templates in the values of the chart, or run deploy/render with them \
             (docs/admission.md#templates)",
        )
    })
}

/// Namespaces by name that the webhook leaves out.
fn exempt(webhook: &MutatingWebhook) -> BTreeSet<&str> {
    let selector = webhook.namespace_selector.as_ref();
    let all = selector.and_then(|it| it.match_expressions.as_ref()).into_iter().flatten();
    let by_name = all.filter(|it| it.key == NAME_LABEL && it.operator == "NotIn");
    by_name.flat_map(|it| it.values.iter().flatten()).map(String::as_str).collect()
}

/// Text without the blanks that YAML folds.
fn squeezed(text: &str) -> String {
    text.split_whitespace().collect()
}

/// The RuntimeClasses that these conditions take for ones without GPUs.
fn classes<'a>(expressions: impl Iterator<Item = &'a String>) -> Option<BTreeSet<String>> {
    let text: String = expressions.map(|text| squeezed(text)).collect();
    let (_, list) = text.split_once("runtimeClassNamein[")?;
    let (list, _) = list.split_once(']')?;
    let unquoted = list.split(',').map(|name| name.trim_matches('\'').to_owned());
    Some(unquoted.filter(|name| !name.is_empty()).collect())
}

/// The configuration of the webhook fits that of the extender.
pub(crate) fn configured(
    webhook: &Read<Option<MutatingWebhook>>,
    config: Option<&Config>,
    namespaces: &Read<BTreeSet<String>>,
    own_namespaces: [&str; 2],
) -> Findings {
    let webhook = match webhook {
        Ok(Some(webhook)) => webhook,
        Ok(None) | Err(Unread::Absent) => {
            return vec![WEBHOOK.warning(
                "no MutatingWebhookConfiguration: nothing gives containers their GPU, and no other",
                "install it: docs/admission.md",
            )];
        }
        Err(why) => return vec![WEBHOOK.unread("its MutatingWebhookConfiguration", why)],
    };
    let mut found = Findings::new();
    if webhook.failure_policy.as_deref().is_some_and(|policy| policy != "Fail") {
        found.push(WEBHOOK.problem(
            "failurePolicy is not Fail: while it is down, pods are created without it",
            "set failurePolicy: Fail (deploy/webhook.yaml)",
        ));
    }
    let exempt = exempt(webhook);
    let asked: Vec<&str> =
        own_namespaces.into_iter().filter(|name| !exempt.contains(name)).collect();
    if !asked.is_empty() {
        found.push(WEBHOOK.problem(
            format!(
                "it is asked about pods of {}: gpupack cannot start without itself",
                names(&asked)
            ),
            "leave out its own namespaces in namespaceSelector, as deploy/webhook.yaml does",
        ));
    }
    match namespaces {
        Err(why) => found.push(WEBHOOK.unread("whether the exempt namespaces exist", why)),
        Ok(there) => {
            let missing: Vec<&&str> =
                exempt.iter().filter(|name| !there.contains(**name)).collect();
            if !missing.is_empty() {
                found.push(WEBHOOK.warning(
                    format!("it leaves out namespaces that do not exist: {}", names(&missing)),
                    "take them out of namespaceSelector, here and in the policy gpupack-devices: a \
                     client that creates such a namespace can use every GPU from there",
                ));
            }
        }
    }
    match config {
        Some(config) => found.extend(conditions(webhook, config)),
        None => found.push(WEBHOOK.not_checked(
            "whether its conditions fit the configuration, which is not known",
            "see the check `extender configuration`",
        )),
    }
    if found.is_empty() {
        let left_out = count(exempt.len(), "namespace");
        found.push(WEBHOOK.ok(format!("it fits the configuration; it leaves out {left_out}")));
    }
    found
}

/// The conditions send the pods that the configuration means.
fn conditions(webhook: &MutatingWebhook, config: &Config) -> Findings {
    let conditions = webhook.match_conditions.iter().flatten();
    let expressions: Vec<&String> = conditions.map(|condition| &condition.expression).collect();
    if expressions.is_empty() {
        return vec![WEBHOOK.warning(
            "it has no matchConditions: no pod can be created while it is down",
            "set matchConditions as deploy/webhook.yaml does",
        )];
    }
    let text: String = expressions.iter().map(|text| squeezed(text)).collect();
    let mut found = Findings::new();
    let named = config.scheduler_names.iter().filter(|name| *name != "default-scheduler");
    let unsent: Vec<&String> = named.filter(|name| !text.contains(&format!("'{name}'"))).collect();
    if !unsent.is_empty() {
        found.push(WEBHOOK.problem(
            format!("its conditions do not name the scheduler {}", names(&unsent)),
            "name all of scheduler_names in matchConditions, and in the policy gpupack-devices",
        ));
    }
    found.extend(same_classes(WEBHOOK, expressions.into_iter(), config));
    if config.webhook.take_over_whole_gpus && !text.contains(&format!("'{WHOLE}'")) {
        found.push(WEBHOOK.problem(
            "take_over_whole_gpus is true, but its conditions do not send pods with nvidia.com/gpu",
            "set config.webhook.take_over_whole_gpus in the values of the chart, or run deploy/render with them",
        ));
    }
    found
}

fn same_classes<'a>(
    of: Of,
    expressions: impl Iterator<Item = &'a String>,
    config: &Config,
) -> Option<Check> {
    let listed = classes(expressions)?;
    let meant: BTreeSet<String> =
        config.webhook.runtime_classes_without_gpus.iter().cloned().collect();
    (listed != meant).then(|| {
        let differ: Vec<&String> = listed.symmetric_difference(&meant).collect();
        of.problem(
            format!("its RuntimeClasses without GPUs are not those of the configuration: {}", names(&differ)),
            "list the same ones in webhook.runtime_classes_without_gpus, in matchConditions and in the \
             policy gpupack-devices",
        )
    })
}

/// The policy that looks last at a pod's devices.
pub(crate) fn devices_policy(
    policy: &Read<ValidatingAdmissionPolicy>,
    config: Option<&Config>,
) -> Findings {
    let of = Of("policy gpupack-devices");
    let expressions = match policy {
        Ok(policy) => policy.spec.iter().flat_map(|spec| spec.match_conditions.iter().flatten()),
        Err(Unread::Absent) => {
            return vec![of.warning(
                "it does not exist: a later webhook can open every GPU to a pod",
                "helm upgrade, or deploy/render and kubectl apply -f deploy/webhook.yaml; not with \
                 unmanaged_runtime_class: allow",
            )];
        }
        Err(why) => return vec![of.unread("the policy", why)],
    };
    let expressions: Vec<&String> = expressions.map(|condition| &condition.expression).collect();
    let fault = config.and_then(|config| same_classes(of, expressions.into_iter(), config));
    vec![fault.unwrap_or_else(|| of.ok("it exists, with the RuntimeClasses of the configuration"))]
}

/// A pod for a dry run: that of a careful user, with this share of a GPU.
pub(crate) fn trial(name: &str, share: &str, scheduler: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "annotations": {"gpu-fraction": share}},
        "spec": {
            "schedulerName": scheduler,
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": 65_532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "main", "image": "gpupack.invalid/never-created",
                "resources": {
                    "requests": {"cpu": "1m", "memory": "1Mi"},
                    "limits": {"cpu": "1m", "memory": "1Mi"},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    })
}

/// What the API server would do with a good pod and with a bad one.
pub(crate) struct Trials<'a> {
    /// Where it was tried.
    pub(crate) namespace: &'a str,
    /// The good one.
    pub(crate) good: &'a Read<Answer>,
    /// The bad one.
    pub(crate) bad: &'a Read<Answer>,
}

/// A good pod is completed, a bad one is refused.
pub(crate) fn dry_run(
    trials: &Trials<'_>,
    webhook: Option<&MutatingWebhook>,
    config: Option<&Config>,
) -> Findings {
    let Some(webhook) = webhook else {
        return vec![
            DRY_RUN.not_checked("there is no webhook", "see the check `admission webhook`"),
        ];
    };
    let namespace = trials.namespace;
    if exempt(webhook).contains(namespace) {
        return vec![DRY_RUN.not_checked(
            format!("the webhook leaves out the namespace {}", short(namespace)),
            "name another one with --namespace",
        )];
    }
    let good = match trials.good {
        Ok(Answer::Accepted(pod)) => completed(pod, config),
        Ok(Answer::Refused(why)) => vec![refusal(why, namespace)],
        Err(Unread::Absent) => vec![DRY_RUN.not_checked(
            format!("namespace {} does not exist", short(namespace)),
            "name another one with --namespace",
        )],
        Err(why) => vec![DRY_RUN.unread("a dry run", why)],
    };
    let mut found = good;
    if found.iter().any(|check| check.fix.is_some()) {
        return found; // the bad pod has the same fate, and says nothing more
    }
    match trials.bad {
        Ok(Answer::Refused(why)) if why.contains("gpu-fraction") => {}
        Ok(Answer::Refused(why)) => found.push(DRY_RUN.warning(
            format!("a pod with `gpu-fraction: 2` is refused for another reason: {}", short(why)),
            "try another namespace with --namespace",
        )),
        Ok(Answer::Accepted(_)) => found.push(DRY_RUN.problem(
            "a pod with `gpu-fraction: 2` would be created",
            "compare the MutatingWebhookConfiguration with deploy/webhook.yaml",
        )),
        Err(why) => found.push(DRY_RUN.unread("a dry run of a bad pod", why)),
    }
    found
}

/// Why a good pod is refused.
fn refusal(why: &str, namespace: &str) -> Check {
    let text = format!("a GPU pod cannot be created in {}: {}", short(namespace), short(why));
    if why.contains("cannot create resource") {
        let right = Unread::Forbidden(format!("create pods in namespace {namespace}"));
        return DRY_RUN.unread("a dry run", &right);
    }
    let fix = if why.contains("x509") || why.contains("certificate") {
        "set caBundle of the MutatingWebhookConfiguration to the CA of the webhook's certificate \
         (docs/admission.md#install)"
    } else if why.contains("failed calling webhook") {
        "see why no replica of the webhook answers: kubectl -n gpu-system get pods,endpointslices"
    } else if why.contains("RuntimeClass") {
        "install NVIDIA's RuntimeClass, or set webhook.runtime_class"
    } else if why.contains("exceeded quota") {
        "name a namespace with room in its ResourceQuota with --namespace"
    } else {
        "read the message; another namespace can be named with --namespace"
    };
    DRY_RUN.problem(text, fix)
}

/// What the webhook must have written into the good pod.
fn completed(pod: &Value, config: Option<&Config>) -> Findings {
    let container = &pod["spec"]["containers"][0];
    let variables = container["env"].as_array().map_or(&[][..], Vec::as_slice);
    let variable = variables.iter().find(|it| it["name"] == "NVIDIA_VISIBLE_DEVICES");
    let is_of_placement =
        variable.is_some_and(|it| it["valueFrom"]["fieldRef"]["fieldPath"] == DEVICES);
    let fix = "see why the webhook is not asked: matchConditions and namespaceSelector of the \
               MutatingWebhookConfiguration, and docs/admission.md";
    let mut found = Findings::new();
    if !is_of_placement {
        let text = "its container does not take NVIDIA_VISIBLE_DEVICES from the placement";
        found.push(DRY_RUN.problem(text, fix));
    }
    if container["resources"]["limits"][MARKER_SHARE].is_null() {
        found.push(DRY_RUN.problem(format!("its container has no marker {MARKER_SHARE}"), fix));
    }
    let scheduler = pod["spec"]["schedulerName"].as_str().unwrap_or_default();
    let first = config.and_then(|config| config.scheduler_names.first());
    if first.is_some_and(|first| first != scheduler) {
        found.push(DRY_RUN.problem(
            format!(
                "it gets the scheduler {}, not {}",
                short(scheduler),
                names(&[first.map_or("", String::as_str)])
            ),
            "restart extender and webhook after a change of scheduler_names",
        ));
    }
    if found.is_empty() {
        let text = format!("a GPU pod is completed for {}, a bad one refused", short(scheduler));
        found.push(DRY_RUN.ok(text));
    }
    found
}

/// RuntimeClasses that pods of gpupack name.
pub(crate) fn runtime_classes(classes: &[(&str, Read<()>)]) -> Findings {
    let of = Of("container runtime");
    let mut found = Findings::new();
    for (name, read) in classes {
        match read {
            Ok(()) => {}
            Err(Unread::Absent) => found.push(of.problem(
                format!("RuntimeClass {} does not exist: pods that name it are refused", short(name)),
                "install NVIDIA's container toolkit or the GPU Operator, or set webhook.runtime_class",
            )),
            Err(why) => found.push(of.unread(&format!("RuntimeClass {}", short(name)), why)),
        }
    }
    if found.is_empty() {
        let all: Vec<&str> = classes.iter().map(|(name, _)| *name).collect();
        let text = match all.as_slice() {
            [] => "NVIDIA's runtime is the default of the nodes (`runtime_class: none`)".to_owned(),
            all => format!("RuntimeClass {} exists", names(all)),
        };
        found.push(of.ok(text));
    }
    found
}

/// Events of containers that did not start because of their GPU: their pods and texts.
pub(crate) fn start_failures(events: &Read<Vec<(String, String)>>) -> Check {
    let of = Of("container starts");
    match events {
        Err(why) => of.unread("events GpuStartFailed", why),
        Ok(events) => match events.split_first() {
            None => of.ok("no event GpuStartFailed"),
            Some(((_, text), _)) => {
                let pods: Vec<&String> = events.iter().map(|(pod, _)| pod).collect();
                of.warning(
                    format!("containers of {} could not start: {}", names(&pods), short(text)),
                    "gpupack explain NAMESPACE/POD says what to do",
                )
            }
        },
    }
}

/// ResourceQuotas that count no GPU pod of gpupack: as `namespace/name` with their keys.
pub(crate) fn quotas(quotas: &Read<Vec<(String, Vec<String>)>>) -> Check {
    let of = Of("quotas");
    let quotas = match quotas {
        Ok(quotas) => quotas,
        Err(why) => return of.unread("ResourceQuotas", why),
    };
    let (theirs, ours) = (format!("requests.{WHOLE}"), "requests.gpupack.dev/gpu-");
    let is_blind =
        |keys: &[String]| keys.contains(&theirs) && !keys.iter().any(|key| key.starts_with(ours));
    let blind: Vec<&String> =
        quotas.iter().filter(|(_, keys)| is_blind(keys)).map(|(name, _)| name).collect();
    let useless = quotas.iter().flat_map(|(name, keys)| {
        keys.iter().filter(|key| counts_nothing(key)).map(move |key| format!("{name}: {key}"))
    });
    let useless: Vec<String> = useless.collect();
    if !useless.is_empty() {
        return of.warning(
            format!("keys that count nothing: {}", names(&useless)),
            "write `requests.` before the name of a marker, such as requests.gpupack.dev/gpu-share; \
             the API server accepts other keys and counts nothing for them",
        );
    }
    if blind.is_empty() {
        return of.ok("none that counts nvidia.com/gpu alone, or nothing");
    }
    of.warning(
        format!("{theirs} counts no fraction of a GPU: {}", names(&blind)),
        "add requests.gpupack.dev/gpu-share, in millionths of a GPU (docs/requests.md), unless only \
         kubelet's GPU pods are meant",
    )
}

/// The PriorityClasses, by name and value, that the classes of workloads in the configuration need.
pub(crate) fn workload_classes(
    config: Option<&Config>,
    classes: &Read<BTreeMap<String, i32>>,
) -> Check {
    let of = Of("workload classes");
    let Some(config) = config else {
        return of
            .not_checked("which there are is not known", "see the check `extender configuration`");
    };
    let classes = match classes {
        Ok(classes) => classes,
        Err(why) => return of.unread("PriorityClasses", why),
    };
    if config.workloads.is_empty() {
        return of.ok("none are configured");
    }
    let wrong = config.workloads.iter().filter_map(|(name, keys)| {
        let class = keys.class(name);
        match (classes.get(&class), keys.priority) {
            (None, _) => Some(format!("{class} does not exist")),
            (Some(found), Some(said)) if *found != said => {
                Some(format!("{class} has the value {found}, not {said}"))
            }
            (Some(_), _) => None,
        }
    });
    let wrong: Vec<String> = wrong.collect();
    if wrong.is_empty() {
        let all: Vec<&String> = config.workloads.keys().collect();
        return of.ok(format!("the PriorityClasses of {} exist", names(&all)));
    }
    of.problem(
        format!("PriorityClasses: {}", names(&wrong)),
        "create them: pods whose label chooses such a class are refused, or get another priority than \
         `workloads` says. A value cannot be changed: delete the class first",
    )
}

/// Whether a key of a quota is meant for a marker, but is none that the API server counts.
fn counts_nothing(key: &str) -> bool {
    let is_counted = |marker| MARKERS.contains(&marker);
    key.contains("gpupack.dev/") && !key.strip_prefix("requests.").is_some_and(is_counted)
}

#[cfg(test)]
mod tests;
