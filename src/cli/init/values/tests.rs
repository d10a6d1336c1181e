use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::doctor::objects::NodeSummary;
use crate::init::found_cluster::FoundNode;

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(ToString::to_string).collect()
}

fn node(name: &str, product: &str, gpus: u64, platform: Platform) -> FoundNode {
    let seen = NodeSummary {
        name: name.to_owned(),
        has_gpus: gpus > 0,
        product: product.to_owned(),
        ..NodeSummary::default()
    };
    FoundNode { seen, gpus, platform, ..FoundNode::default() }
}

fn version(git: &str) -> Read<k8s_openapi::apimachinery::pkg::version::Info> {
    let info = json!({"major": "1", "minor": "36", "gitVersion": git, "buildDate": "",
        "compiler": "", "gitCommit": "", "gitTreeState": "", "goVersion": "", "platform": ""});
    Ok(serde_json::from_value(info).unwrap())
}

/// A bare cluster with two GPU nodes of its own.
fn bare() -> Cluster {
    Cluster {
        version: version("v1.36.3"),
        nodes: Ok(vec![
            node("a", "NVIDIA-A100-SXM4-80GB", 8, Platform::Unknown),
            node("b", "NVIDIA-L4", 1, Platform::Unknown),
            node("cpu", "", 0, Platform::Unknown),
        ]),
        groups: Ok(set(&["apps"])),
        operators: Ok(set(&[])),
        toolkits: Ok(set(&[])),
        runtime_classes: Ok(set(&["nvidia"])),
        has_own_scheduler: Ok(true),
    }
}

/// A cluster of Google's with everything.
fn rich() -> Cluster {
    let mut full = node("g", "NVIDIA-H100", 8, Platform::Gke);
    full.seen.of_kubelet = vec![("nvidia.com/gpu".to_owned(), 8)];
    full.seen.mig_profiles = vec!["1g.5gb".to_owned(), "9g.999gb".to_owned()];
    let taint = |key: &str| Taint { key: key.to_owned(), effect: "NoSchedule".to_owned() };
    let keys = ["sku", "nvidia.com/gpu", "node.kubernetes.io/not-ready"];
    let spot = Taint { key: "spot".to_owned(), effect: "NoExecute".to_owned() };
    full.taints = keys.into_iter().map(taint).chain([spot]).collect();
    Cluster {
        version: version("v1.36.3-gke.1234"),
        nodes: Ok(vec![full]),
        groups: Ok(set(&["cert-manager.io", "monitoring.coreos.com"])),
        operators: Ok(set(&["nvidia-operator"])),
        toolkits: Ok(set(&["nvcr.io/nvidia/k8s/container-toolkit:v1.20.1"])),
        runtime_classes: Ok(set(&["nvidia"])),
        has_own_scheduler: Ok(false),
    }
}

/// A cluster that says nothing.
fn closed() -> Cluster {
    let no = || Unread::Forbidden("get it".to_owned());
    Cluster {
        version: Err(no()),
        nodes: Err(no()),
        groups: Err(no()),
        operators: Err(no()),
        toolkits: Err(no()),
        runtime_classes: Err(no()),
        has_own_scheduler: Err(Unread::Failed("x".repeat(9_999))),
    }
}

/// A cluster whose texts want to be more than texts.
fn hostile() -> Cluster {
    let mut odd = node("x", "L4\nimage: {}\u{1b}[2J", u64::MAX, Platform::Unknown);
    odd.gpus = 64;
    odd.taints = [Taint { key: "a\"]\nb: c".to_owned(), effect: "NoSchedule\n".to_owned() }].into();
    odd.seen.mig_profiles = vec!["\"]\nc: d".to_owned()];
    Cluster {
        version: version("v1.2.3\nd: e"),
        nodes: Ok(vec![odd; 5_000]),
        operators: Ok(set(&["a\"]\nf: g"])),
        toolkits: Ok(set(&["t:v1.2.3\nh: i"])),
        ..bare()
    }
}

fn read(cluster: &Cluster) -> (String, Value) {
    let text = values(cluster);
    let value = serde_yaml_ng::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    (text, value)
}

#[test]
fn values_follow_from_what_was_found() {
    let (text, found) = read(&bare());
    assert_eq!(found["scheduler"]["image"]["tag"], "v1.36.3");
    assert_eq!(found["certificates"]["source"], "gpupack");
    assert_eq!(found["webhook"]["excludedNamespaces"], json!([]));
    let image = json!({"repository": "ghcr.io/gpupack/gpupack-agent"});
    assert_eq!(found["agents"], json!({"image": image, "runtimeClassName": "nvidia"}));
    assert_eq!(found["webhook"]["toleratedTaints"], Value::Null);
    assert!(found["monitoring"].is_null() && found["priorityClass"].is_null(), "{text}");
    for part in [
        "8 × NVIDIA-A100-SXM4-80GB on 1 node, 1 × NVIDIA-L4 on 1 node; 2 of 3 nodes have GPUs",
        "gpupack in place is possible",
    ] {
        assert!(text.replace("\n#", "").contains(part), "{part} in {text}");
    }
    let (text, found) = read(&rich());
    assert_eq!(found["scheduler"]["image"]["tag"], "v1.36.3");
    assert_eq!(found["scheduler"]["ignoredResources"], json!(["nvidia.com/mig-9g.999gb"]));
    assert_eq!(found["certificates"]["source"], "cert-manager");
    assert_eq!(found["priorityClass"]["create"], true);
    assert_eq!(found["agents"]["priorityClassName"], found["priorityClass"]["name"]);
    assert_eq!(found["webhook"]["excludedNamespaces"], json!(["nvidia-operator"]));
    assert_eq!(found["webhook"]["toleratedTaints"], json!(["nvidia.com/gpu", "sku"]));
    let tolerations = json!([{"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "spot", "operator": "Exists", "effect": "NoExecute"}]);
    assert_eq!(found["agents"]["tolerations"], tolerations);
    assert_eq!(
        (&found["agents"]["metrics"], &found["monitoring"]["podMonitor"]),
        (&json!(true), &json!(true))
    );
    assert!(text.contains("nvidia.com/gpu.deploy.device-plugin=false"), "{text}");
    assert!(text.contains("Google GKE"), "{text}");
}

#[test]
fn the_gpu_operator_stops_agents_where_it_labels_every_gpu_node() {
    let of = |labeled: &[&str]| {
        let mut cluster = bare();
        for node in cluster.nodes.iter_mut().flatten() {
            node.seen.stops_clients = labeled.contains(&&*node.seen.name);
        }
        let (text, found) = read(&cluster);
        (text, found["agents"]["nodeSelector"].clone())
    };
    assert_eq!(of(&[]).1, Value::Null, "an operator before 26.7, or none");
    assert_eq!(of(&["a", "b"]).1, json!({"nvidia.com/gpu.deploy.client": "true"}));
    let (text, selector) = of(&["a"]);
    assert_eq!(selector, Value::Null, "node b would have no agent");
    assert!(text.contains("1 node with GPUs without its label") && text.contains(": b."), "{text}");
}

#[test]
fn what_is_not_known_is_a_comment_and_nothing_hostile_gets_out() {
    let (text, found) = read(&closed());
    let keys: Vec<&String> = found.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["agents", "config", "image", "inPlace"], "{text}");
    assert!(text.contains("it needs the right to get it") && text.len() < 3_000, "{text}");
    let (text, found) = read(&hostile());
    let keys: Vec<&String> = found.as_object().unwrap().keys().collect();
    let known = ["agents", "certificates", "config", "image", "inPlace", "scheduler", "webhook"];
    assert_eq!(keys, known, "{text}");
    assert!(text.len() < 5_000 && !text.contains('\u{1b}'), "{text}");
}

#[test]
fn releases_are_read_from_the_versions_of_platforms() {
    for (text, found) in [
        ("v1.33.5-eks-3025e55", Some("v1.33.5")),
        ("v1.33.4+k3s1", Some("v1.33.4")),
        ("v1.36.3", Some("v1.36.3")),
        ("v1.36", None),
        ("1.36.3", None),
        ("v..", None),
        ("v1.2.9999999999", None),
    ] {
        assert_eq!(release(text).as_deref(), found, "{text}");
    }
}

/// What a schema does not allow of a value, as far as the keys and simple types go.
fn forbidden(schema: &Value, value: &Value, path: &str, found: &mut Vec<String>) {
    let is_type = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64(),
        _ => true,
    };
    let options = schema["enum"].as_array();
    if !is_type || options.is_some_and(|options| !options.contains(value)) {
        found.push(format!("{path}: {value}"));
    }
    for (key, value) in value.as_object().into_iter().flatten() {
        let path = format!("{path}.{key}");
        match schema["properties"].get(key) {
            Some(schema) => forbidden(schema, value, &path, found),
            None if schema["additionalProperties"] == false => found.push(path),
            None => {}
        }
    }
    for value in value.as_array().into_iter().flatten() {
        forbidden(&schema["items"], value, path, found);
    }
}

#[test]
fn the_chart_allows_each_value() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/helm/gpupack/values.schema.json");
    let Ok(text) = std::fs::read_to_string(path) else {
        let _ = writeln!(std::io::stderr(), "skipped: values because there is no chart here");
        return;
    };
    let schema: Value = serde_json::from_str(&text).unwrap();
    let mut found = Vec::new();
    for cluster in [bare(), rich(), closed(), hostile()] {
        forbidden(&schema, &read(&cluster).1, "", &mut found);
    }
    assert!(found.is_empty(), "{found:?}");
    forbidden(&schema, &json!({"other": 1, "inPlace": "no"}), "", &mut found);
    assert_eq!(found.len(), 2, "the schema is read: {found:?}");
}

/// A cluster whose GPU nodes have these drivers, and whose operator runs these toolkits.
fn with(drivers: &[Option<u64>], toolkits: &[&str]) -> Cluster {
    let nodes = drivers.iter().map(|driver| FoundNode {
        driver: *driver,
        ..node("n", "NVIDIA-L4", 1, Platform::Unknown)
    });
    let images = toolkits.iter().map(|version| format!("nvcr.io/t/container-toolkit:{version}"));
    Cluster { nodes: Ok(nodes.collect()), toolkits: Ok(images.collect()), ..bare() }
}

#[test]
fn the_driver_holds_memory_where_every_node_can() {
    for (drivers, toolkits, limit, why) in [
        (&[Some(615), Some(620)][..], &["v1.20.1-ubi9", "v1.21.0"][..], "driver", "cgroup v2"),
        (&[Some(615), Some(580)], &["v1.20.1"], "none", "nodes have r580"),
        (&[Some(615), None], &["v1.20.1"], "none", "not all GPU nodes name their driver"),
        (&[], &["v1.20.1"], "none", "not all GPU nodes name their driver"),
        (&[Some(615)], &["v1.20.1", "v1.18.0-ubi8"], "none", "1.18.0 runs, which would ignore it"),
        (&[Some(615)], &[], "none", "only the GPU Operator's pods name"),
        (&[Some(615)], &["latest"], "none", "only the GPU Operator's pods name"),
        (&[Some(615)], &["v1.20.1", "latest"], "none", "only the GPU Operator's pods name"),
    ] {
        let (text, found) = read(&with(drivers, toolkits));
        assert_eq!(found["config"]["webhook"]["memory_limit"], limit, "{text}");
        assert_eq!(found["agents"]["privileged"] == true, limit == "driver", "{text}");
        assert!(text.replace("\n#", "").contains(why), "{why} in {text}");
    }
}
