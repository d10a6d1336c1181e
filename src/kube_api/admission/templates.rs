//! Templates of pods in Jobs and other objects: where they are, and the keys by which Kueue marks pods that it has
//! counted by their template.

use std::collections::BTreeMap;

use json_patch::jsonptr::PointerBuf;
use serde_json::Value;

use crate::admission::review::ReviewFault;
use crate::config::webhook::TemplatePath;

/// Most templates of one object. Kinds with more than two have a dozen.
const MOST_TEMPLATES: usize = 100;

/// Most containers of all templates of one object: as many as one pod may have in a list. The answer has some
/// operations for each.
const MOST_CONTAINERS: usize = 1_000;

/// Kueue's label on the template of what it has admitted: the name of the set of pods that it counted.
const KUEUE_POD_SET: &str = "kueue.x-k8s.io/podset";

/// Kueue's annotation there: the workload that it counted. It also gets it on plain pods, but after their
/// creation.
const KUEUE_WORKLOAD: &str = "kueue.x-k8s.io/workload";

/// Kueue's annotation on templates of kinds whose pods wait one by one.
const KUEUE_PARENT: &str = "kueue.x-k8s.io/pod-suspending-parent";

/// The one of these kinds that Kueue counts by its templates, not by its pods.
const COUNTED_PARENT: &str = "leaderworkerset.x-k8s.io/leaderworkerset";

/// The templates of an object, by their place in it. What has no template at a path has none.
///
/// # Errors
/// [`ReviewFault::TooMany`].
pub(crate) fn templates<'a>(
    object: &'a Value,
    paths: &[TemplatePath],
) -> Result<BTreeMap<PointerBuf, &'a Value>, ReviewFault> {
    let mut found = BTreeMap::new();
    for path in paths {
        let parts: Vec<&str> = path.parts().collect();
        follow(object, &parts, PointerBuf::new(), &mut found)?;
    }
    if found.values().map(|template| container_count(template)).sum::<usize>() > MOST_CONTAINERS {
        let what = "containers in templates of pods";
        return Err(ReviewFault::TooMany { what, most: MOST_CONTAINERS });
    }
    Ok(found)
}

fn container_count(template: &Value) -> usize {
    let lists = ["containers", "initContainers", "ephemeralContainers"];
    lists.iter().map(|list| template["spec"][*list].as_array().map_or(0, Vec::len)).sum()
}

fn follow<'a>(
    value: &'a Value,
    parts: &[&str],
    at: PointerBuf,
    found: &mut BTreeMap<PointerBuf, &'a Value>,
) -> Result<(), ReviewFault> {
    let Some((part, rest)) = parts.split_first() else {
        if value.is_object() {
            found.insert(at, value);
        }
        if found.len() > MOST_TEMPLATES {
            return Err(ReviewFault::TooMany { what: "templates of pods", most: MOST_TEMPLATES });
        }
        return Ok(());
    };
    match (*part, value) {
        ("*", Value::Array(items)) => items
            .iter()
            .enumerate()
            .try_for_each(|(index, item)| follow(item, rest, at.with_trailing_token(index), found)),
        ("*", Value::Object(fields)) => fields.iter().try_for_each(|(name, field)| {
            follow(field, rest, at.with_trailing_token(name.as_str()), found)
        }),
        (name, Value::Object(fields)) => fields
            .get(name)
            .map_or(Ok(()), |field| follow(field, rest, at.with_trailing_token(name), found)),
        _ => Ok(()),
    }
}

/// Whether Kueue has counted this new pod by a template, so that what is written into it now comes too late.
pub(crate) fn is_counted_by_template(
    annotations: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
) -> bool {
    labels.contains_key(KUEUE_POD_SET)
        || annotations.contains_key(KUEUE_WORKLOAD)
        || annotations.get(KUEUE_PARENT).is_some_and(|parent| parent == COUNTED_PARENT)
}
