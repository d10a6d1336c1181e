//! Whether the API server has the admission policies that this program came with.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api::commands::Check;
use crate::cli::base::reader::{Read, Unread};
use crate::cli::doctor::finding::Of;

/// The file with those that each installation has.
const SHIPPED: &str = include_str!("../../../deploy/policies.yaml");

/// The file with the one about what the extender may do to publish a CA.
const OF_CERTIFICATES: &str = include_str!("../../../deploy/certificates.yaml");

/// The policy in it.
const CERTIFICATES: &str = "gpupack-certificates";

/// The extender's account in these files.
const ACCOUNT: &str = "system:serviceaccount:gpu-system:gpupack'";

/// A policy, or its binding.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Policy {
    /// Resource, in the plural.
    pub(crate) resource: &'static str,
    /// Its name.
    pub(crate) name: String,
    /// Its spec.
    spec: Value,
}

/// The shipped policies and bindings, for an extender in this namespace with this ServiceAccount.
pub(crate) fn shipped(namespace: &str, account: &str) -> Vec<Policy> {
    of_file(SHIPPED, namespace, account)
}

/// The further ones for an extender that changes objects of others to publish a CA.
pub(crate) fn of_certificates(namespace: &str, account: &str) -> Vec<Policy> {
    of_file(OF_CERTIFICATES, namespace, account)
}

fn of_file(text: &str, namespace: &str, account: &str) -> Vec<Policy> {
    let text = text.replace(ACCOUNT, &format!("system:serviceaccount:{namespace}:{account}'"));
    let text = text.replace("'gpu-system'", &format!("'{namespace}'"));
    let documents = serde_yaml_ng::Deserializer::from_str(&text).map(Value::deserialize);
    let read = documents.filter_map(Result::ok).filter_map(|mut object| {
        let resource = match object["kind"].as_str()? {
            "ValidatingAdmissionPolicy" => "validatingadmissionpolicies",
            "ValidatingAdmissionPolicyBinding" => "validatingadmissionpolicybindings",
            _ => return None,
        };
        let name = object["metadata"]["name"].as_str()?.to_owned();
        Some(Policy { resource, name, spec: object["spec"].take() })
    });
    read.collect()
}

/// A policy is there, as it was shipped.
pub(crate) fn compared(shipped: &Policy, found: &Read<Value>) -> Check {
    let of = Of("policies");
    let kind = match shipped.resource {
        "validatingadmissionpolicies" => "policy",
        _ => "the binding of policy",
    };
    let what = format!("{kind} {}", shipped.name);
    let file = if shipped.name == CERTIFICATES { "certificates.yaml" } else { "policies.yaml" };
    let fix = format!(
        "helm upgrade with the chart of this program's release, or deploy/render and kubectl apply -f \
         deploy/{file}"
    );
    match found {
        Err(Unread::Absent) => {
            of.problem(format!("{what} does not exist: it keeps nothing from being edited"), &fix)
        }
        Err(why) => of.unread(&what, why),
        Ok(object) => match first_difference(&shipped.spec, &object["spec"], "spec") {
            None => of.ok(format!("{what} is the one of this program")),
            Some(path) => {
                of.problem(format!("{what} is not the one of this program: {path} differs"), &fix)
            }
        },
    }
}

/// All in one line if all are as they should be, else those that are not.
pub(crate) fn summed_up(found: Vec<Check>) -> Vec<Check> {
    let total = found.len();
    let wrong: Vec<Check> = found.into_iter().filter(|check| check.fix.is_some()).collect();
    if wrong.is_empty() {
        let text = format!("{total} policies and bindings are those of this program");
        return vec![Of("policies").ok(text)];
    }
    wrong
}

/// The path of the first field that differs. What the API server fills in is no difference.
fn first_difference(shipped: &Value, found: &Value, path: &str) -> Option<String> {
    let differs = || Some(path.to_owned());
    match (shipped, found) {
        (Value::Object(shipped), Value::Object(found)) => {
            let (empty, none) = (Map::new(), Value::Null);
            let of = |map: &Map<String, Value>, key: &String| map.get(key).cloned();
            let keys = shipped.keys().chain(found.keys().filter(|key| !shipped.contains_key(*key)));
            for key in keys {
                let path = format!("{path}.{key}");
                match (of(shipped, key), of(found, key)) {
                    (None, Some(extra)) if is_default(key, &extra, &empty) => {}
                    (is, now) => {
                        let (is, now) = (is.unwrap_or(none.clone()), now.unwrap_or(none.clone()));
                        if let Some(path) = first_difference(&is, &now, &path) {
                            return Some(path);
                        }
                    }
                }
            }
            None
        }
        (Value::Array(shipped), Value::Array(found)) if shipped.len() == found.len() => {
            let mut pairs = shipped.iter().zip(found).enumerate();
            pairs.find_map(|(at, (is, now))| first_difference(is, now, &format!("{path}[{at}]")))
        }
        (is, now) if is == now => None,
        _ => differs(),
    }
}

/// Whether the API server sets this if it is missing.
fn is_default(key: &str, value: &Value, empty: &Map<String, Value>) -> bool {
    match key {
        "namespaceSelector" | "objectSelector" => value.as_object() == Some(empty),
        "matchPolicy" => *value == json!("Equivalent"),
        "scope" => *value == json!("*"),
        "failurePolicy" => *value == json!("Fail"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::commands::CheckState;

    /// As the API server shows it.
    fn stored(policy: &Policy) -> Value {
        let mut object = json!({"metadata": {"name": policy.name}, "spec": policy.spec});
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
        for policy in &all {
            let found = compared(policy, &Ok(stored(policy)));
            assert_eq!(found.state, CheckState::Ok, "{found:?}");
        }
        let further = of_certificates("gpu-system", "gpupack");
        assert_eq!(further.len(), 2);
        assert!(further.iter().all(|it| it.name == CERTIFICATES), "{further:?}");
        for (elsewhere, all) in
            [(shipped("gpus", "extender"), all), (of_certificates("gpus", "extender"), further)]
        {
            assert_ne!(elsewhere, all);
            let text = serde_json::to_string(&elsewhere[0].spec).unwrap();
            assert!(text.contains("system:serviceaccount:gpus:extender'"), "{text}");
        }
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
            let found = compared(policy, &Ok(object));
            assert_eq!(found.state, CheckState::Problem, "{part}");
            assert!(found.found.contains(part), "{found:?}");
        }
        let mut more = stored(policy);
        more["spec"]["matchConstraints"]["excludeResourceRules"] = json!([{}]);
        assert_eq!(compared(policy, &Ok(more)).state, CheckState::Problem);
        assert_eq!(compared(policy, &Err(Unread::Absent)).state, CheckState::Problem);
        let forbidden = Err(Unread::Forbidden("get".to_owned()));
        assert_eq!(compared(policy, &forbidden).state, CheckState::NotChecked);
        let sum =
            summed_up(vec![compared(policy, &forbidden), compared(policy, &Ok(stored(policy)))]);
        assert_eq!(sum.len(), 1, "what is as it should be is left out");
    }
}
