//! The judge of Bindings: reads which ones the extender posted, as the API server has noted them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

/// What names the process that wrote something on a pod: `term-process text`.
const FENCE: &str = "placed.gpupack.dev/fence";

/// The Bindings with a placement in the audit log: how many there are.
///
/// # Panics
///
/// When one has no preconditions, two processes posted one for the same version of a pod, or two
/// succeeded for the same pod.
pub(crate) fn verdict(audit_log: &Path) -> usize {
    let text = std::fs::read_to_string(audit_log).expect("the API server writes it");
    let (count, faults) = judge(&text);
    assert!(faults.is_empty(), "Bindings that are wrong:\n{}", faults.join("\n"));
    count
}

fn judge(text: &str) -> (usize, Vec<String>) {
    let (mut count, mut faults) = (0, Vec::new());
    let mut writers = BTreeMap::<(String, String), BTreeSet<String>>::new();
    let mut bound = BTreeSet::<String>::new();
    for line in text.lines().filter(|line| line.contains("\"binding\"")) {
        let Ok(call) = serde_json::from_str::<Value>(line) else { continue }; // the end, after a kill
        let metadata = &call["requestObject"]["metadata"];
        let Some(fence) = metadata["annotations"][FENCE].as_str() else { continue };
        count += 1;
        let of = |key: &str| metadata[key].as_str().unwrap_or_default().to_owned();
        let (name, uid, version) = (of("name"), of("uid"), of("resourceVersion"));
        if uid.is_empty() || version.is_empty() {
            faults.push(format!("{name}: a Binding without preconditions"));
            continue;
        }
        let Some((_, process)) = fence.split(' ').next().and_then(|maker| maker.split_once('-'))
        else {
            faults.push(format!("{name}: a Binding of no process: `{fence}`"));
            continue;
        };
        let posted = writers.entry((uid.clone(), version.clone())).or_default();
        posted.insert(process.to_owned());
        if posted.len() > 1 {
            faults.push(format!("{name}: processes {posted:?} posted version {version}"));
        }
        let succeeded = call["responseStatus"]["code"] == 201;
        if succeeded && !bound.insert(uid) {
            faults.push(format!("{name} was bound twice"));
        }
    }
    (count, faults)
}

mod tests {
    use super::*;
    use serde_json::json;

    fn post(uid: &str, version: &str, fence: &str, code: u16) -> String {
        let metadata = json!({"name": "a", "uid": uid, "resourceVersion": version,
            "annotations": {FENCE: fence}});
        json!({"objectRef": {"subresource": "binding"}, "requestObject": {"metadata": metadata},
            "responseStatus": {"code": code}})
        .to_string()
    }

    #[test]
    fn bindings_of_two_processes_for_one_version_are_noticed() {
        let check = |lines: &[String], expected: Option<&str>| {
            let (count, faults) = judge(&lines.join("\n"));
            assert_eq!(count, lines.len());
            assert_eq!(faults.len(), usize::from(expected.is_some()), "{faults:?}");
            assert!(expected.is_none_or(|text| faults[0].contains(text)), "{faults:?}");
        };
        check(&[post("u", "1", "5-a bind", 409), post("u", "1", "6-a bind", 201)], None);
        check(&[post("u", "1", "5-a bind", 409), post("u", "2", "6-b bind", 201)], None);
        let two = [post("u", "1", "5-a bind", 409), post("u", "1", "6-b bind", 201)];
        check(&two, Some("posted version 1"));
        let twice = [post("u", "1", "5-a bind", 201), post("u", "2", "6-b bind", 201)];
        check(&twice, Some("bound twice"));
        check(&[post("u", "", "5-a bind", 201)], Some("without preconditions"));
        check(&[post("u", "1", "bind", 201)], Some("of no process"));
    }
}
