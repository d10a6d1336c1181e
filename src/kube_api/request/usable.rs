//! What a pod may use in its namespace: isolation, policy and class of workloads. Pools are chosen with
//! the node.

use crate::config::pods::requests::RequestRules;
use crate::request::annotations::{ISOLATION, POLICY};
use crate::request::request_error::{RequestError, shown};
use engine::model::request::GpuRequest;
use engine::model::workload::WorkloadClass;

/// The label that chooses the class of workloads of a new pod.
pub const WORKLOAD: &str = "gpupack.dev/workload";

/// The class that the label of a new pod chooses.
///
/// # Errors
/// [`RequestError::Workload`] if there is no such class.
pub fn chosen<'a>(
    rules: &'a RequestRules,
    label: Option<&str>,
) -> Result<Option<&'a WorkloadClass>, RequestError> {
    let Some(name) = label else { return Ok(None) };
    match rules.workloads.named(name) {
        Some(class) => Ok(Some(class)),
        None => Err(RequestError::Workload {
            value: shown(name),
            known: one_of(rules.workloads.names(), "no label: no classes are configured"),
        }),
    }
}

/// The class of a pod that has this `PriorityClass`.
///
/// # Errors
/// [`RequestError`] if the label chooses another one: it had no effect when the pod was created.
pub fn workload_of<'a>(
    rules: &'a RequestRules,
    label: Option<&str>,
    priority_class: &str,
) -> Result<Option<&'a WorkloadClass>, RequestError> {
    match chosen(rules, label)? {
        Some(class) if class.priority_class != priority_class => {
            Err(RequestError::WorkloadIgnored {
                value: shown(&class.name),
                class: class.priority_class.clone(),
            })
        }
        _ => Ok(rules.workloads.of(priority_class)),
    }
}

/// Refuses what pods of the namespace may not use.
///
/// # Errors
/// [`RequestError::NotAllowed`].
pub fn check_use(
    rules: &RequestRules,
    namespace: &str,
    request: &GpuRequest,
) -> Result<(), RequestError> {
    let access = rules.access.of(namespace);
    if let Some(allowed) = &access.isolation
        && !allowed.contains(&request.isolation)
    {
        let allowed = one_of(allowed.iter().map(|isolation| isolation.name()), NOTHING);
        let isolation = request.isolation.name();
        return Err(not_allowed(namespace, "isolation", isolation, ISOLATION, allowed));
    }
    if let (Some(allowed), Some(policy)) = (&access.policies, request.policy)
        && !allowed.contains(&policy)
    {
        let allowed = one_of(allowed.iter().map(|policy| policy.name()), "nothing: leave it out");
        return Err(not_allowed(namespace, "policy", policy.name(), POLICY, allowed));
    }
    Ok(())
}

/// Refuses a class of workloads that pods of the namespace may not have, and a pod without a class that is
/// more important than pods without a PriorityClass: it could do what such a class can.
///
/// # Errors
/// [`RequestError::NotAllowed`].
pub fn check_class(
    rules: &RequestRules,
    namespace: &str,
    class: Option<&WorkloadClass>,
    priority: i32,
) -> Result<(), RequestError> {
    let Some(allowed) = &rules.access.of(namespace).workloads else { return Ok(()) };
    let may = one_of(allowed.iter().map(String::as_str), "nothing: leave it out");
    match class {
        Some(class) if !allowed.contains(&class.name) => {
            Err(not_allowed(namespace, "workload class", &class.name, WORKLOAD, may))
        }
        None if priority > 0 => {
            Err(not_allowed(namespace, "priority", &priority.to_string(), WORKLOAD, may))
        }
        Some(_) | None => Ok(()),
    }
}

fn not_allowed(
    namespace: &str,
    what: &'static str,
    value: &str,
    key: &'static str,
    allowed: String,
) -> RequestError {
    let (value, namespace) = (value.to_owned(), shown(namespace));
    RequestError::NotAllowed { what, value, namespace, key, allowed }
}

const NOTHING: &str = "none: the namespace may use no GPU";

/// The names in backticks, or what to use if there are none.
fn one_of<'a>(names: impl Iterator<Item = &'a str>, nothing: &str) -> String {
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    match names.split_last() {
        None => nothing.to_owned(),
        Some((last, [])) => last.clone(),
        Some((last, first)) => format!("{} or {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;
    use engine::model::policy::Policy;
    use engine::model::request::{Amount, Isolation};
    use wire::units::Share;

    const RULES: &str = "
workloads: {train: {}, serve: {priority_class: high}}
access:
  namespaces:
    open: {}
    apart: {isolation: [memory, hardware]}
    none: {isolation: [], policies: [], workloads: []}
  others: {isolation: [none, memory], policies: [spread], workloads: [train]}
";

    fn rules() -> RequestRules {
        Config::from_yaml(RULES).unwrap().request_rules()
    }

    fn used(namespace: &str, isolation: Isolation, policy: Option<Policy>) -> Result<(), String> {
        let amount = Amount::Fraction(Share::from_millionths(500_000));
        let request = GpuRequest { isolation, policy, ..GpuRequest::one(amount) };
        check_use(&rules(), namespace, &request).map_err(|error| error.to_string())
    }

    fn of_class(namespace: &str, class: Option<&str>, priority: i32) -> Result<(), String> {
        let rules = rules();
        let class = class.map(|name| rules.workloads.named(name).unwrap());
        check_class(&rules, namespace, class, priority).map_err(|error| error.to_string())
    }

    #[test]
    fn what_a_namespace_may_not_use_is_refused_with_what_it_may() {
        let (none, spread) = (Isolation::None, Some(Policy::Spread));
        assert_eq!(used("open", Isolation::Hardware, Some(Policy::BinPack)), Ok(()));
        assert_eq!(used("other", Isolation::Memory, spread), Ok(()));
        assert_eq!(used("other", none, None), Ok(()), "that of the cluster is always allowed");
        assert_eq!(of_class("open", Some("serve"), 9), Ok(()));
        assert_eq!(of_class("open", None, i32::MAX), Ok(()));
        assert_eq!(of_class("other", Some("train"), 9), Ok(()));
        assert_eq!(of_class("other", None, 0), Ok(()));
        for (found, text) in [
            (
                used("other", Isolation::Hardware, None),
                "pods of the namespace `other` may not use the isolation `hardware`: for \
                 `gpupack.dev/isolation` use `none` or `memory`",
            ),
            (
                used("apart", none, None),
                "pods of the namespace `apart` may not use the isolation `none`: for \
                 `gpupack.dev/isolation` use `memory` or `hardware`",
            ),
            (
                used("other", none, Some(Policy::BinPack)),
                "pods of the namespace `other` may not use the policy `binpack`: for \
                 `gpupack.dev/policy` use `spread`",
            ),
            (
                of_class("other", Some("serve"), 0),
                "pods of the namespace `other` may not use the workload class `serve`: for \
                 `gpupack.dev/workload` use `train`",
            ),
            (
                of_class("other", None, 1),
                "pods of the namespace `other` may not use the priority `1`: for \
                 `gpupack.dev/workload` use `train`",
            ),
            (
                of_class("none", Some("train"), 0),
                "pods of the namespace `none` may not use the workload class `train`: for \
                 `gpupack.dev/workload` use nothing: leave it out",
            ),
            (
                used("none", none, None),
                "pods of the namespace `none` may not use the isolation `none`: for \
                 `gpupack.dev/isolation` use none: the namespace may use no GPU",
            ),
        ] {
            assert_eq!(found, Err(text.to_owned()));
        }
    }

    #[test]
    fn the_class_is_that_of_the_priority_class_and_the_label_must_agree() {
        let rules = rules();
        let of = |label, class| {
            let found = workload_of(&rules, label, class);
            found.map(|class| class.map(|class| class.name.clone())).map_err(|error| error.label())
        };
        let name = |name: &str| Ok(Some(name.to_owned()));
        assert_eq!(of(None, ""), Ok(None));
        assert_eq!(of(None, "other"), Ok(None));
        assert_eq!(of(None, "high"), name("serve"), "without the label, too");
        assert_eq!(of(Some("train"), "gpupack-train"), name("train"));
        assert_eq!(of(Some("train"), "high"), Err("workload_ignored"));
        assert_eq!(of(Some("train"), ""), Err("workload_ignored"));
        assert_eq!(of(Some("trian"), "high"), Err("workload"));
        let text = chosen(&rules, Some("trian")).unwrap_err().to_string();
        assert_eq!(text, "label `gpupack.dev/workload` is `trian`: use `serve` or `train`");
        let text = chosen(&RequestRules::default(), Some("train")).unwrap_err().to_string();
        assert!(text.ends_with("use no label: no classes are configured"), "{text}");
    }
}
