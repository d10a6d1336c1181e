//! The crates of the workspace: what the lint and test commands of the top level cover, and what the
//! agent is made of.

use std::process::Command;

use crate::source::{SourceFile, files};

/// The manifests of our crates, beside that of the root.
fn manifests(files: &[SourceFile]) -> impl Iterator<Item = &SourceFile> {
    let is_ours = |path: &str| path.starts_with("src/") && path.ends_with("/Cargo.toml");
    files.iter().filter(move |file| is_ours(&file.path))
}

fn text_of<'a>(files: &'a [SourceFile], path: &str) -> &'a str {
    let found = files.iter().find(|file| file.path == path);
    &found.unwrap_or_else(|| panic!("{path} is missing")).text
}

#[test]
fn every_crate_is_linted_and_tested() {
    let files = files();
    let root = text_of(&files, "Cargo.toml");
    for manifest in manifests(&files) {
        let folder = manifest.path.trim_end_matches("/Cargo.toml");
        assert!(root.contains(&format!("    \"{folder}\",\n")), "{folder} is no member");
        let has = |line| manifest.text.contains(line);
        assert!(has("[lints]\nworkspace = true\n"), "{folder} has lints of its own");
        assert!(!has("test = false"), "{folder} is not tested");
    }
    assert!(manifests(&files).count() >= 10);
    for (path, command) in [
        ("tests/run", "cargo fmt --all --check"),
        ("tests/run", "cargo test --workspace"),
        ("tests/run", "cargo doc --workspace"),
        (".cargo/config.toml", "clippy --workspace --all-targets"),
    ] {
        assert!(text_of(&files, path).contains(command), "{path} lacks `{command}`");
    }
}

/// What `cargo tree` prints of a package as it is shipped, without the crates of its tests.
fn tree_of(package: &str, arguments: &[&str]) -> String {
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--prefix", "none", "--package", package])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo starts");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    String::from_utf8_lossy(&tree.stdout).into_owned()
}

/// The agent runs on each node: it stays small.
#[test]
fn the_agent_has_no_kubernetes_client_web_framework_or_plots() {
    let tree = tree_of("gpupack-agent", &["--edges", "normal"]);
    let names: Vec<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains(&"nvml-wrapper"), "{tree}");
    for unwanted in ["axum", "k8s-openapi", "kube", "kube-client", "plotters"] {
        assert!(!names.contains(&unwanted), "the agent's crate pulls in {unwanted}");
    }
}

/// Neither fixtures nor the faults of the simulation are in what is shipped.
#[test]
fn the_programs_have_nothing_that_tests_switch_on() {
    let tree = tree_of("gpupack", &["--edges", "normal,build", "--format", "{p} {f}"]);
    assert!(tree.contains("gpupack-engine "), "{tree}");
    for line in tree.lines().filter(|line| line.starts_with("gpupack")) {
        let features = line.rsplit(')').next().unwrap_or_default();
        for unwanted in ["test-support", "mutations"] {
            assert!(!features.contains(unwanted), "the programs have a feature of tests: {line}");
        }
    }
}
