//! What is inside of the recipes (`deploy/recipes`): their little programs, run with stand-ins for the
//! libraries of GPUs, and their queries, on Prometheus' own tool. That pods of the recipes are admitted and
//! placed is checked end to end, in `tests/e2e/scenarios/recipes.rs`.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::{Value, json};

/// A stand-in for PyTorch with the calls that the recipes make. The GPUs are those of `TOTAL_MIB`.
const TORCH: &str = r#"
import os

class cuda:
    limits = {}

    def device_count():
        return len(os.environ["TOTAL_MIB"].split(","))

    def mem_get_info(gpu):
        return (1, int(os.environ["TOTAL_MIB"].split(",")[gpu]) * 2**20)

    def set_per_process_memory_fraction(part, gpu):
        cuda.limits[gpu] = part
"#;

/// Likewise for TensorFlow.
const TENSORFLOW: &str = r#"
class config:
    limits = {}

    class LogicalDeviceConfiguration:
        def __init__(self, memory_limit):
            self.memory_limit = memory_limit

    def list_physical_devices(kind):
        return [kind + ":0", kind + ":1"]

    def set_logical_device_configuration(gpu, parts):
        config.limits[gpu] = [part.memory_limit for part in parts]
"#;

/// A program that prints how it was called.
const PRINTS: &str = "#!/bin/sh\necho \"$@\"\n";

fn file(path: &str) -> String {
    let full = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&full).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The objects of a recipe.
fn objects(recipe: &str) -> Vec<Value> {
    let text = file(&format!("deploy/recipes/{recipe}"));
    let documents = serde_yaml_ng::Deserializer::from_str(&text).map(Value::deserialize);
    documents.collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{recipe}: {error}"))
}

/// A program of the recipe's ConfigMap.
fn program(recipe: &str, name: &str) -> String {
    let objects = objects(recipe);
    let map = objects.iter().find(|object| object["kind"] == "ConfigMap").unwrap();
    map["data"][name].as_str().unwrap_or_else(|| panic!("{recipe} has no {name}")).to_owned()
}

/// Whether a program is there; says what is skipped without it.
fn has(name: &str, what: &str) -> bool {
    let found = Command::new(name).arg("--version").output();
    let found = found.is_ok_and(|found| found.status.success());
    if !found {
        let text = format!("skipped: {what} because `{name}` is not installed");
        let _shown = writeln!(std::io::stderr(), "{text}");
    }
    found
}

/// What a command prints in a folder with these files, on its path and on Python's; or how it fails.
fn printed(
    files: &[(&str, &str)],
    command: &[&str],
    variables: &[(&str, &str)],
) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut child = Command::new("sh");
    child.args(["-c", "PATH=\"$PWD:$PATH\" exec \"$@\"", "sh"]).args(command);
    child.current_dir(folder.path()).envs(variables.iter().copied());
    child.env("PYTHONPATH", folder.path()).env("PYTHONDONTWRITEBYTECODE", "1");
    let output = child.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap().trim().to_owned();
    match output.status.success() {
        true => Ok(text(output.stdout)),
        false => Err(text(output.stderr)),
    }
}

#[test]
fn vllm_is_started_with_its_share_of_the_memory_that_it_sees() {
    if !has("python3", "the recipe of vLLM") {
        return;
    }
    let (share, start) = (program("vllm.yaml", "share.py"), program("vllm.yaml", "start.sh"));
    let files =
        [("share.py", &*share), ("start.sh", &*start), ("torch.py", TORCH), ("vllm", PRINTS)];
    let started = |share: &str, totals: &str| {
        let variables = [("GPUPACK_MEMORY_MIB", share), ("TOTAL_MIB", totals), ("MODEL", "m")];
        printed(&files, &["sh", "start.sh", "--port", "8000"], &variables)
    };
    for (share, totals, expected) in [
        // Half of an A100 of 80 GB, of which CUDA shows all.
        ("40660", "81152", "0.4884"),
        // The same where the driver shows the limit as the total.
        ("40660", "40660", "0.9748"),
        // A whole GPU: the driver's reserve is in neither number.
        ("81320", "81152", "0.9894"),
        // The same part of each GPU: of the largest, so that none is exceeded.
        ("10240", "81152,40960", "0.1135"),
        // A total that is less than the share has no part above 1.
        ("9000", "7000", "1.0"),
    ] {
        let line = format!("serve m --gpu-memory-utilization {expected} --port 8000");
        assert_eq!(started(share, totals), Ok(line), "{share} MiB of {totals}");
        let largest: f64 = totals.split(',').map(|it| it.parse().unwrap()).fold(0.0, f64::max);
        let (part, share): (f64, f64) = (expected.parse().unwrap(), share.parse().unwrap());
        assert!(part * largest + 1024.0 <= share || part >= 1.0, "{expected} of {largest} MiB");
    }
    let refused = started("1024", "81152").unwrap_err();
    assert!(refused.contains("leave nothing"), "{refused}");
    assert!(started("", "81152").is_err(), "without the webhook there is no such variable");
}

#[test]
fn the_allocator_of_pytorch_is_limited_to_the_share() {
    if !has("python3", "the recipe of PyTorch") {
        return;
    }
    let share = program("pytorch.yaml", "share.py");
    let main = "import json, sys, torch\nprint(json.dumps([torch.cuda.limits, sys.argv]))\n";
    let files = [("share.py", &*share), ("torch.py", TORCH), ("main.py", main)];
    let limits = |share: &str, more: &[(&str, &str)]| {
        let mut variables = vec![("GPUPACK_MEMORY_MIB", share), ("TOTAL_MIB", "81920,40960")];
        variables.extend(more);
        printed(&files, &["python3", "share.py", "main.py", "--epochs", "3"], &variables)
    };
    let expected = |limits: Value| Ok(json!([limits, ["main.py", "--epochs", "3"]]));
    for (share, more, limit) in [
        ("20992", vec![], json!({"0": 0.25})),
        ("20992", vec![("LOCAL_RANK", "1")], json!({"1": 0.5})),
        ("41984", vec![("PROCESSES_PER_GPU", "2")], json!({"0": 0.25})),
        ("21480", vec![("RESERVE_MIB", "1000")], json!({"0": 0.25})),
        ("90000", vec![], json!({"0": 1.0})),
    ] {
        let found = limits(share, &more).map(|text| serde_json::from_str::<Value>(&text).unwrap());
        assert_eq!(found, expected(limit), "{share} MiB, {more:?}");
    }
    for (share, more) in [("512", vec![]), ("2048", vec![("PROCESSES_PER_GPU", "4")])] {
        let refused = limits(share, &more).unwrap_err();
        assert!(refused.contains("leave nothing"), "{refused}");
    }
}

#[test]
fn tensorflow_is_limited_to_the_share_on_each_gpu() {
    if !has("python3", "the recipe of TensorFlow") {
        return;
    }
    let share = program("tensorflow.yaml", "share.py");
    let main = "import json, tensorflow\nprint(json.dumps(tensorflow.config.limits))\n";
    let files = [("share.py", &*share), ("tensorflow.py", TENSORFLOW), ("main.py", main)];
    let limits = |share: &str| {
        printed(&files, &["python3", "share.py", "main.py"], &[("GPUPACK_MEMORY_MIB", share)])
    };
    assert_eq!(limits("10240").as_deref(), Ok(r#"{"GPU:0": [9216], "GPU:1": [9216]}"#));
    let refused = limits("1024").unwrap_err();
    assert!(refused.contains("leave nothing"), "{refused}");
}

#[test]
fn training_runs_a_process_for_each_gpu() {
    let start = program("training.yaml", "start.sh");
    let files = [("start.sh", &*start), ("torchrun", PRINTS)];
    for (uuids, count) in [("GPU-a", 1), ("GPU-a,GPU-b,GPU-c,GPU-d", 4)] {
        let variables = [("GPUPACK_DEVICE_UUIDS", uuids)];
        let said = printed(&files, &["sh", "start.sh", "train.py"], &variables);
        assert_eq!(said, Ok(format!("--standalone --nproc-per-node {count} train.py")));
    }
    let without = printed(&files, &["env", "-u", "GPUPACK_DEVICE_UUIDS", "sh", "start.sh"], &[]);
    assert!(without.unwrap_err().contains("GPUPACK_DEVICE_UUIDS"), "nothing is guessed");
}

/// The rule for the adapter, as it asks Prometheus for the pods of the Deployment.
fn adapter_query() -> String {
    let values = &objects("prometheus-adapter.yaml")[0];
    let rule = &values["rules"]["custom"][0];
    let autoscaler = objects("autoscaling.yaml");
    let metric = &autoscaler[1]["spec"]["metrics"][0]["pods"]["metric"]["name"];
    assert_eq!(*metric, rule["name"]["as"], "the autoscaler asks for what the rule is named");
    let query = rule["metricsQuery"].as_str().unwrap();
    let matchers = "namespace=\"default\",pod=~\"classify-a|classify-b|classify-c\"";
    query.replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", matchers)
}

#[test]
fn the_autoscalers_measure_use_by_share() {
    let document = file("docs/metrics.md");
    let objects = objects("scale-to-zero.yaml");
    let triggers = objects[1]["spec"]["triggers"].as_array().unwrap();
    let queries: Vec<&str> =
        triggers.iter().map(|one| one["metadata"]["query"].as_str().unwrap()).collect();
    let adapter = adapter_query();
    for query in queries.iter().copied().chain([&*adapter]) {
        let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        for family in words.filter(|word| word.starts_with("gpupack_")) {
            assert!(document.contains(&format!("`{family}`")), "{family} is not exported");
        }
    }
    if !has("promtool", "the queries of the recipes") {
        return;
    }
    let series = |family: &str, pod: &str, uuid: &str, value: f64| {
        json!({"series": format!("gpupack_tenant_{family}{{namespace=\"default\",pod=\"{pod}\",UUID=\"{uuid}\"}}"),
            "values": format!("{value}x40")})
    };
    let mut given = Vec::new();
    for (app, pods) in [("classify", ["a", "b"]), ("transcribe", ["a", "b"])] {
        let name = |at: usize| format!("{app}-{}", pods[at]);
        // One with half of its share in use, and one with two GPUs, beyond its share.
        given.push(series("busy_ratio", &name(0), "GPU-1", 0.125));
        given.push(series("share_gpus", &name(0), "GPU-1", 0.25));
        for uuid in ["GPU-2", "GPU-3"] {
            given.push(series("busy_ratio", &name(1), uuid, 0.375));
            given.push(series("share_gpus", &name(1), uuid, 0.25));
        }
    }
    given.push(series("busy_ratio", "other", "GPU-1", 0.5));
    given.push(series("share_gpus", "other", "GPU-1", 0.5));
    let ingress = "nginx_ingress_controller_requests{exported_namespace=\"default\",exported_service=\"transcribe\"}";
    given.push(json!({"series": ingress, "values": "0+30x40"}));
    let one = |value: f64| json!([{"labels": "{}", "value": value}]);
    let pods = json!([{"labels": "{pod=\"classify-a\"}", "value": 0.5},
        {"labels": "{pod=\"classify-b\"}", "value": 1.5}]);
    let asked = |query: &str, samples: Value| json!({"expr": query, "eval_time": "5m", "exp_samples": samples});
    let tests = json!({"evaluation_interval": "15s", "tests": [
        {"interval": "15s", "input_series": given, "promql_expr_test": [
            asked(&adapter, pods), asked(queries[0], one(2.0)), asked(queries[1], one(2.0))]},
        // At zero pods and without requests.
        {"interval": "15s", "input_series": [], "promql_expr_test": [
            asked(&adapter, json!([])), asked(queries[0], one(0.0)), asked(queries[1], one(0.0))]},
    ]});
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tests.yaml");
    std::fs::write(&path, tests.to_string()).unwrap();
    let mut tool = Command::new("promtool");
    let output = tool.args(["test", "rules"]).arg(&path).stdin(Stdio::null()).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}
