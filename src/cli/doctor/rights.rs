//! What `gpupack doctor` reads, and the rights for it; those of the extender.

use serde_json::{Value, json};

use crate::base::reader::{ObjectPath, Read, ReviewAnswer};
use crate::doctor::finding::{CheckRow, Found, names};
use crate::doctor::table::*;
use kube_api::config::file::Config;
use wire::api::commands::Check;

/// Namespaces in which gpupack is, and where pods are tried.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    pub(crate) system: String,
    pub(crate) agents: String,
    /// Where a pod is tried.
    pub(crate) trial: String,
}

const ADMISSION: &str = "admissionregistration.k8s.io";

pub(crate) static NODES: ObjectPath = ObjectPath::all("", "v1", "nodes");
pub(crate) static NAMESPACES: ObjectPath = ObjectPath::all("", "v1", "namespaces");
pub(crate) static PODS: ObjectPath = ObjectPath::all("", "v1", "pods");
pub(crate) static CONFIG_MAPS: ObjectPath = ObjectPath::all("", "v1", "configmaps");
pub(crate) static SECRETS: ObjectPath = ObjectPath::all("", "v1", "secrets");
pub(crate) static SERVICES: ObjectPath = ObjectPath::all("", "v1", "services");
pub(crate) static ALL_QUOTAS: ObjectPath = ObjectPath::all("", "v1", "resourcequotas");
pub(crate) static DEPLOYMENTS: ObjectPath = ObjectPath::all("apps", "v1", "deployments");
pub(crate) static DAEMON_SETS: ObjectPath = ObjectPath::all("apps", "v1", "daemonsets");
pub(crate) static LEASES: ObjectPath = ObjectPath::all("coordination.k8s.io", "v1", "leases");
pub(crate) static EVENTS: ObjectPath = ObjectPath::all("events.k8s.io", "v1", "events");
pub(crate) static CLASSES: ObjectPath =
    ObjectPath::all("scheduling.k8s.io", "v1", "priorityclasses");
pub(crate) static RUNTIME_CLASSES: ObjectPath =
    ObjectPath::all("node.k8s.io", "v1", "runtimeclasses");
pub(crate) static SLICES: ObjectPath = ObjectPath::all("resource.k8s.io", "v1", "resourceslices");
pub(crate) static WEBHOOKS: ObjectPath =
    ObjectPath::all(ADMISSION, "v1", "mutatingwebhookconfigurations");
pub(crate) static POLICIES: ObjectPath =
    ObjectPath::all(ADMISSION, "v1", "validatingadmissionpolicies");
pub(crate) static BINDINGS: ObjectPath =
    ObjectPath::all(ADMISSION, "v1", "validatingadmissionpolicybindings");
pub(crate) static CLUSTER_POLICIES: ObjectPath =
    ObjectPath::all("nvidia.com", "v1", "clusterpolicies");
pub(crate) static NVIDIA_DRIVERS: ObjectPath =
    ObjectPath::all("nvidia.com", "v1alpha1", "nvidiadrivers");
pub(crate) static GPU_CLUSTERS: ObjectPath =
    ObjectPath::all("nvidia.com", "v1alpha1", "gpuclusters");
static API_SERVICES: ObjectPath = ObjectPath::all("apiregistration.k8s.io", "v1", "apiservices");

/// The queries as a resource of the API server.
pub(crate) fn queries() -> ObjectPath {
    API_SERVICES.named("v1.inspection.gpupack.dev")
}

/// What is read in an installation with the shipped names.
pub(crate) fn needed(Places { system, agents, .. }: &Places) -> Vec<ObjectPath> {
    vec![
        NAMESPACES.clone(),
        NODES.clone(),
        DEPLOYMENTS.within(system),
        PODS.within(system),
        CONFIG_MAPS.within(system).named("gpupack"),
        CONFIG_MAPS.within(system).named("gpupack-scheduler"),
        LEASES.within(system).named("gpupack"),
        SERVICES.within(system).named("gpupack"),
        DAEMON_SETS.within(agents),
        DAEMON_SETS.clone(),
        PODS.within(agents),
        WEBHOOKS.clone(),
        POLICIES.named("gpupack-placement"),
        BINDINGS.named("gpupack-placement"),
        queries(),
        RUNTIME_CLASSES.named("nvidia"),
        SLICES.clone(),
        EVENTS.clone(),
        ALL_QUOTAS.clone(),
        CLASSES.clone(),
        CLUSTER_POLICIES.clone(),
        NVIDIA_DRIVERS.clone(),
        GPU_CLUSTERS.clone(),
        SECRETS.within(system).named("gpupack-webhook-tls"),
        SECRETS.within(system).named("gpupack-extender-tls"),
    ]
}

/// The review of whether the user has the right to do this, with this part of it.
pub(crate) fn review(target: &ObjectPath, verb: &str, subresource: &str) -> Value {
    json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {
            "group": target.group, "version": target.version, "resource": target.resource,
            "namespace": target.namespace, "name": target.name, "verb": verb,
            "subresource": subresource,
        }},
    })
}

/// What a review says; `None` without an answer to it.
pub(crate) fn is_allowed(answer: &Read<ReviewAnswer>) -> Option<bool> {
    match answer {
        Ok(ReviewAnswer::Accepted(review)) => review["status"]["allowed"].as_bool(),
        Ok(ReviewAnswer::Refused(_)) | Err(_) => None,
    }
}

/// Whether the user has none of the rights that were reviewed: then nothing can be checked.
pub(crate) fn has_none(reviews: &[(String, Read<ReviewAnswer>)]) -> bool {
    !reviews.is_empty() && reviews.iter().all(|(_, answer)| is_allowed(answer) == Some(false))
}

/// Whether the user has the rights that were reviewed, by their words.
pub(crate) fn reviewed(reviews: &[(String, Read<ReviewAnswer>)]) -> Found {
    let mut missing = Vec::new();
    for (right, answer) in reviews {
        match answer {
            Ok(ReviewAnswer::Accepted(_)) if is_allowed(answer) == Some(true) => {}
            Ok(ReviewAnswer::Accepted(_)) => missing.push(right.as_str()),
            Ok(ReviewAnswer::Refused(why)) => return Err(USER_NOT_REVIEWED.with([why])),
            Err(why) => return Err(USER.unread([], why)),
        }
    }
    let all = reviews.len();
    let text = match missing.len() {
        0 => return Ok(vec![USER_OK.with([&all])]),
        _ if has_none(reviews) => {
            format!("it has none of the {all} rights: nothing else can be checked")
        }
        some => format!("{some} of {all} are missing: {}", names(&missing)),
    };
    Ok(vec![USER_LACKS.with([&text])])
}

/// A right that the extender needs for what its configuration says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeededRight {
    verb: &'static str,
    subresource: &'static str,
    /// The keys of the configuration that need it.
    keys: &'static str,
    /// What is said where it is missing.
    missing: CheckRow,
}

/// The rights that the extender needs with this configuration, beside those that it always has.
pub(crate) fn of_extender(config: &Config) -> Vec<NeededRight> {
    let (keys, missing) = ("guard.evict and preemption", MAY_NOT_EVICT);
    let evicts = NeededRight { verb: "create", subresource: "eviction", keys, missing };
    let (keys, missing) = ("pools with `borrow`", MAY_NOT_MOVE);
    let moves = NeededRight { verb: "patch", subresource: "resize", keys, missing };
    let has_to =
        [(evicts, config.guard.evict || config.preemption.enabled), (moves, config.pools.lends())];
    has_to.into_iter().filter_map(|(right, is_needed)| is_needed.then_some(right)).collect()
}

impl NeededRight {
    /// The review of whether a service account has the right in all namespaces.
    pub(crate) fn review(&self, namespace: &str, account: &str) -> Value {
        let own = format!("system:serviceaccounts:{namespace}");
        let mut review = review(&PODS, self.verb, self.subresource);
        review["kind"] = "SubjectAccessReview".into();
        review["spec"]["user"] = format!("system:serviceaccount:{namespace}:{account}").into();
        review["spec"]["groups"] = json!(["system:serviceaccounts", "system:authenticated", own]);
        review
    }

    fn held(&self, answer: &Read<ReviewAnswer>) -> Check {
        let right = format!("{} pods/{}", self.verb, self.subresource);
        match answer {
            Ok(ReviewAnswer::Refused(_)) => NOT_REVIEWED.with([&right]),
            Err(why) => EXTENDER.unread([], why),
            Ok(_) if is_allowed(answer) == Some(true) => EXTENDER_MAY.with([&right, &self.keys]),
            Ok(_) => self.missing.with([&right, &self.keys]),
        }
    }
}

/// Whether the extender has the rights that it needs; nothing where it needs no more than it always has.
pub(crate) fn held(reviews: &[(NeededRight, Read<ReviewAnswer>)]) -> Found {
    Ok(reviews.iter().map(|(needed, answer)| needed.held(answer)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::reader::Unread;
    use crate::doctor::finding::lines;
    use wire::api::commands::CheckState::{NotChecked, Ok as Good, Problem};

    #[test]
    fn missing_rights_are_listed() {
        let answer = |allowed: bool| {
            Ok(ReviewAnswer::Accepted(Box::new(json!({"status": {"allowed": allowed}}))))
        };
        let of = |second: Read<ReviewAnswer>| {
            let reviews = [("list a".to_owned(), answer(true)), ("get b".to_owned(), second)];
            lines(reviewed(&reviews)).remove(0)
        };
        assert_eq!(of(answer(true)).state, Good);
        let found = of(answer(false));
        assert_eq!((found.state, &*found.found), (NotChecked, "1 of 2 are missing: get b"));
        let rights = |text: &str| of_extender(&Config::from_yaml(text).unwrap());
        let off = "preemption: {enabled: false}";
        assert!(rights(off).is_empty());
        let moves = format!("{off}\npools: {{a: {{borrow: compute}}}}");
        let guard = format!("{off}\nguard: {{evict: true}}");
        for (text, right) in [(&*moves, "resize"), (&guard, "eviction"), ("", "eviction")] {
            let needed = rights(text);
            let review = needed[0].review("gpu-system", "gpupack");
            assert_eq!(review["spec"]["resourceAttributes"]["subresource"], right);
            assert_eq!(review["spec"]["user"], "system:serviceaccount:gpu-system:gpupack");
            let of = |answer| lines(held(&[(needed[0], answer)]))[0].state;
            assert_eq!((needed.len(), of(answer(true)), of(answer(false))), (1, Good, Problem));
            assert_eq!(of(Ok(ReviewAnswer::Refused("no".to_owned()))), NotChecked);
        }
        let none = [("list a".to_owned(), answer(false)), ("get b".to_owned(), answer(false))];
        assert!(lines(reviewed(&none))[0].found.contains("none of the 2 rights"));
        let unknown = [("list a".to_owned(), Ok(ReviewAnswer::Refused("no".to_owned())))];
        assert!(has_none(&none) && !has_none(&unknown) && !has_none(&[]));
        assert_eq!(of(Err(Unread::Absent)).state, NotChecked);
        assert_eq!(of(Ok(ReviewAnswer::Refused("no".to_owned()))).state, NotChecked);
        assert_eq!(of(Ok(ReviewAnswer::Accepted(Box::new(Value::Null)))).state, NotChecked);
    }

    #[test]
    fn the_shipped_role_gives_what_is_read_but_secrets() {
        let text = include_str!("../../../deploy/doctor.yaml");
        let role: Value = serde_yaml_ng::from_str(text).unwrap();
        let has =
            |list: &Value, text: &str| list.as_array().unwrap().iter().any(|item| item == text);
        let grants = |target: &ObjectPath| {
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
