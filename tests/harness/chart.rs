//! The Helm chart of `deploy/helm/gpupack`, rendered by `helm` with the files of values in `tests/helm`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;

/// A version that the chart is for: a helm that was built by `go install` knows none.
const KUBERNETES: &str = "--kube-version=1.36.0";

/// The folder of the chart.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/helm/gpupack")
}

/// Why helm cannot be used, if so.
pub(crate) fn missing() -> Option<&'static str> {
    let version = Command::new("helm").arg("version").output();
    let is_there = version.is_ok_and(|output| output.status.success());
    (!is_there).then_some("helm is not installed (`go install helm.sh/helm/v3/cmd/helm`)")
}

/// The files of values, by name.
pub(crate) fn sets() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/helm");
    let files = std::fs::read_dir(folder).expect("the folder is there");
    let mut names: Vec<String> = files
        .map(|file| file.expect("it can be listed").path())
        .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// The file of such a set.
pub(crate) fn file(set: &str) -> String {
    format!("{}/tests/helm/{set}.yaml", env!("CARGO_MANIFEST_DIR"))
}

/// Where a set is installed.
pub(crate) fn namespace(set: &str) -> &'static str {
    if set == "other-namespace" { "other" } else { "gpu-system" }
}

/// What helm prints. The error is what it says.
///
/// # Errors
///
/// If it ends with a failure.
pub(crate) fn helm(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("helm").args(arguments).output().expect("helm can be started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(format!("{}{}", text(&output.stdout), text(&output.stderr)))
}

/// The objects that a set makes, with more flags.
///
/// # Errors
///
/// What helm says if it refuses the values.
pub(crate) fn rendered(set: &str, more: &[&str]) -> Result<Vec<Value>, String> {
    let (file, folder) = (file(set), folder());
    let chart = folder.to_str().expect("the repository's path is UTF-8");
    let mut arguments = vec!["template", "gpupack", chart, KUBERNETES];
    arguments.extend(["--namespace", namespace(set), "--values", &file]);
    arguments.extend(more);
    let text = helm(&arguments)?;
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    let objects = documents.map(|document| Value::deserialize(document).expect("YAML"));
    Ok(objects.filter(|object| !object.is_null()).collect())
}
