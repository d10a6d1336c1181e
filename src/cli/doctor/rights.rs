//! What `gpupack doctor` reads, and the rights for it.

use serde_json::{Value, json};

use crate::api::commands::Check;
use crate::cli::base::reader::{Answer, Read, Target};
use crate::cli::doctor::finding::{Findings, Of, names};
use crate::config::file::Config;

const ADMISSION: &str = "admissionregistration.k8s.io";

/// Namespaces in which gpupack is, and where pods are tried.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Extender, webhook and scheduler.
    pub(crate) system: String,
    /// The agents.
    pub(crate) agents: String,
    /// Where a pod is tried.
    pub(crate) trial: String,
}

/// All nodes.
pub(crate) fn nodes() -> Target {
    Target::all("", "v1", "nodes")
}

/// All namespaces.
pub(crate) fn namespaces() -> Target {
    Target::all("", "v1", "namespaces")
}

/// Devices that DRA drivers give out.
pub(crate) fn resource_slices() -> Target {
    Target::all("resource.k8s.io", "v1", "resourceslices")
}

/// All quotas.
pub(crate) fn quotas() -> Target {
    Target::all("", "v1", "resourcequotas")
}

/// All PriorityClasses.
pub(crate) fn priority_classes() -> Target {
    Target::all("scheduling.k8s.io", "v1", "priorityclasses")
}

/// All events.
pub(crate) fn events() -> Target {
    Target::all("events.k8s.io", "v1", "events")
}

/// All configurations of webhooks that change objects.
pub(crate) fn webhooks() -> Target {
    Target::all(ADMISSION, "v1", "mutatingwebhookconfigurations")
}

/// A policy, or its binding.
pub(crate) fn policy(resource: &'static str, name: &str) -> Target {
    Target::all(ADMISSION, "v1", resource).named(name)
}

/// The queries as a resource of the API server.
pub(crate) fn api_service() -> Target {
    let services = Target::all("apiregistration.k8s.io", "v1", "apiservices");
    services.named("v1.inspection.gpupack.dev")
}

/// A RuntimeClass.
pub(crate) fn runtime_class(name: &str) -> Target {
    Target::all("node.k8s.io", "v1", "runtimeclasses").named(name)
}

/// The parts of gpupack that are Deployments.
pub(crate) fn deployments(places: &Places) -> Target {
    Target::all("apps", "v1", "deployments").within(&places.system)
}

/// The agents' DaemonSet.
pub(crate) fn daemon_sets(places: &Places) -> Target {
    Target::all("apps", "v1", "daemonsets").within(&places.agents)
}

/// Pods of a namespace.
pub(crate) fn pods(namespace: &str) -> Target {
    Target::all("", "v1", "pods").within(namespace)
}

/// A configuration.
pub(crate) fn config_map(places: &Places, name: &str) -> Target {
    Target::all("", "v1", "configmaps").within(&places.system).named(name)
}

/// A certificate.
pub(crate) fn secret(places: &Places, name: &str) -> Target {
    Target::all("", "v1", "secrets").within(&places.system).named(name)
}

/// The Lease of the extender.
pub(crate) fn lease(namespace: &str, name: &str) -> Target {
    Target::all("coordination.k8s.io", "v1", "leases").within(namespace).named(name)
}

/// The extender's Service.
pub(crate) fn service(places: &Places) -> Target {
    Target::all("", "v1", "services").within(&places.system).named("gpupack")
}

/// What is read in an installation with the shipped names.
pub(crate) fn needed(places: &Places) -> Vec<Target> {
    vec![
        namespaces(),
        nodes(),
        deployments(places),
        pods(&places.system),
        config_map(places, "gpupack"),
        config_map(places, "gpupack-scheduler"),
        lease(&places.system, "gpupack"),
        service(places),
        daemon_sets(places),
        pods(&places.agents),
        webhooks(),
        policy("validatingadmissionpolicies", "gpupack-placement"),
        policy("validatingadmissionpolicybindings", "gpupack-placement"),
        api_service(),
        runtime_class("nvidia"),
        resource_slices(),
        events(),
        quotas(),
        priority_classes(),
        secret(places, "gpupack-webhook-tls"),
        secret(places, "gpupack-extender-tls"),
    ]
}

/// The review of whether the user has the right to do this.
pub(crate) fn review(target: &Target, verb: &str) -> Value {
    json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {
            "group": target.group, "version": target.version, "resource": target.resource,
            "namespace": target.namespace, "name": target.name, "verb": verb,
        }},
    })
}

/// Whether the user has none of the rights that were reviewed: then nothing can be checked.
pub(crate) fn has_none(reviews: &[(String, Read<Answer>)]) -> bool {
    let is_refused = |answer: &Read<Answer>| match answer {
        Ok(Answer::Accepted(review)) => review["status"]["allowed"] == false,
        Ok(Answer::Refused(_)) | Err(_) => false,
    };
    !reviews.is_empty() && reviews.iter().all(|(_, answer)| is_refused(answer))
}

/// Whether the user has the rights that were reviewed, by their words.
pub(crate) fn reviewed(reviews: &[(String, Read<Answer>)]) -> Check {
    let of = Of("rights of this user");
    let mut missing = Vec::new();
    for (right, answer) in reviews {
        match answer {
            Ok(Answer::Accepted(review)) if review["status"]["allowed"] == true => {}
            Ok(Answer::Accepted(_)) => missing.push(right.as_str()),
            Ok(Answer::Refused(why)) => return of.not_checked(why.clone(), "see the checks below"),
            Err(why) => return of.unread("its rights", why),
        }
    }
    if missing.is_empty() {
        return of.ok(format!("it has the {} rights that this command needs", reviews.len()));
    }
    let text = match has_none(reviews) {
        true => format!("it has none of the {} rights: nothing else can be checked", reviews.len()),
        false => {
            format!("{} of {} are missing: {}", missing.len(), reviews.len(), names(&missing))
        }
    };
    of.not_checked(
        text,
        "let a cluster administrator run it, or give the user the ClusterRole gpupack-doctor \
         (deploy/doctor.yaml)",
    )
}

/// A right that the extender needs for what its configuration says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeededRight {
    /// What the right allows, in words.
    right: &'static str,
    verb: &'static str,
    subresource: &'static str,
    /// The keys of the configuration that need it.
    keys: &'static str,
    /// How the account gets it.
    fix: &'static str,
}

/// The rights that the extender needs with this configuration, beside those that it always has.
pub(crate) fn of_extender(config: &Config) -> Vec<NeededRight> {
    let evicts = NeededRight {
        right: "create pods/eviction",
        verb: "create",
        subresource: "eviction",
        keys: "guard.evict and preemption",
        fix: "set rbac.evict: true of the chart, or apply deploy/evict.yaml; without evictions set \
              preemption: {enabled: false} and guard: {evict: false}",
    };
    let moves = NeededRight {
        right: "patch pods/resize",
        verb: "patch",
        subresource: "resize",
        keys: "borrow and mig_moves",
        fix: "set rbac.moves: true of the chart, or apply deploy/moves.yaml",
    };
    let has_to = [
        (evicts, config.guard.evict || config.preemption.enabled),
        (moves, config.pools.lends() || config.pools.moves_instances()),
    ];
    has_to.into_iter().filter_map(|(right, is_needed)| is_needed.then_some(right)).collect()
}

impl NeededRight {
    /// The review of whether a service account has the right in all namespaces.
    pub(crate) fn review(&self, namespace: &str, account: &str) -> Value {
        let groups = ["system:serviceaccounts", "system:authenticated"].map(str::to_owned);
        let own = format!("system:serviceaccounts:{namespace}");
        json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "spec": {
                "user": format!("system:serviceaccount:{namespace}:{account}"),
                "groups": groups.into_iter().chain([own]).collect::<Vec<_>>(),
                "resourceAttributes": {
                    "verb": self.verb, "version": "v1", "resource": "pods",
                    "subresource": self.subresource,
                },
            },
        })
    }
}

/// Whether the extender has the rights that it needs; nothing where it needs no more than it always has.
pub(crate) fn held(reviews: &[(NeededRight, Read<Answer>)]) -> Findings {
    let of = Of("rights of the extender");
    let one = |(needed, answer): &(NeededRight, Read<Answer>)| match answer {
        Ok(Answer::Accepted(review)) if review["status"]["allowed"] == true => of.ok(format!(
            "it may {}, which {} in the configuration need",
            needed.right, needed.keys
        )),
        Ok(Answer::Accepted(_)) => of.problem(
            format!("it may not {}, which {} in the configuration need", needed.right, needed.keys),
            needed.fix,
        ),
        Ok(Answer::Refused(_)) => of.not_checked(
            format!(
                "whether it may {}: needs the right to create subjectaccessreviews",
                needed.right
            ),
            "let a cluster administrator run it",
        ),
        Err(why) => of.unread("its rights", why),
    };
    reviews.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::commands::CheckState::{NotChecked, Ok as Good, Problem};
    use crate::cli::base::reader::Unread;

    #[test]
    fn missing_rights_are_listed() {
        let answer =
            |allowed: bool| Ok(Answer::Accepted(Box::new(json!({"status": {"allowed": allowed}}))));
        let of = |second: Read<Answer>| {
            reviewed(&[("list a".to_owned(), answer(true)), ("get b".to_owned(), second)])
        };
        assert_eq!(of(answer(true)).state, Good);
        let found = of(answer(false));
        assert_eq!((found.state, &*found.found), (NotChecked, "1 of 2 are missing: get b"));
        let rights = |text: &str| of_extender(&Config::from_yaml(text).unwrap());
        let off = "preemption: {enabled: false}";
        assert!(rights(off).is_empty());
        let moves = format!("{off}\npools: {{a: {{mig: on_demand, mig_moves: restart}}}}");
        let guard = format!("{off}\nguard: {{evict: true}}");
        for (text, right) in [(&*moves, "resize"), (&guard, "eviction"), ("", "eviction")] {
            let needed = rights(text);
            let review = needed[0].review("gpu-system", "gpupack");
            assert_eq!(review["spec"]["resourceAttributes"]["subresource"], right);
            assert_eq!(review["spec"]["user"], "system:serviceaccount:gpu-system:gpupack");
            let of = |answer| held(&[(needed[0], answer)])[0].state;
            assert_eq!((needed.len(), of(answer(true)), of(answer(false))), (1, Good, Problem));
            assert_eq!(of(Ok(Answer::Refused("no".to_owned()))), NotChecked);
        }
        let none = [("list a".to_owned(), answer(false)), ("get b".to_owned(), answer(false))];
        assert!(reviewed(&none).found.contains("none of the 2 rights"));
        let unknown = [("list a".to_owned(), Ok(Answer::Refused("no".to_owned())))];
        assert!(has_none(&none) && !has_none(&unknown) && !has_none(&[]));
        assert_eq!(of(Err(Unread::Absent)).state, NotChecked);
        assert_eq!(of(Ok(Answer::Refused("no".to_owned()))).state, NotChecked);
        assert_eq!(of(Ok(Answer::Accepted(Box::new(Value::Null)))).state, NotChecked);
    }

    #[test]
    fn the_shipped_role_gives_what_is_read_but_secrets() {
        let text = include_str!("../../../deploy/doctor.yaml");
        let role: Value = serde_yaml_ng::from_str(text).unwrap();
        let has = |list: &Value, text: &str| list.as_array().unwrap().iter().any(|it| it == text);
        let grants = |target: &Target| {
            role["rules"].as_array().unwrap().iter().any(|rule| {
                has(&rule["apiGroups"], target.group)
                    && has(&rule["resources"], target.resource)
                    && has(&rule["verbs"], target.verb())
            })
        };
        let places = Places { system: "a".into(), agents: "b".into(), trial: "c".into() };
        for target in needed(&places) {
            assert_eq!(grants(&target), target.resource != "secrets", "{}", target.right());
        }
    }
}
