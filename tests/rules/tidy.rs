//! Tidiness as a test: look of files, names, forbidden words, links, and documents that
//! must name everything there is to name. Layers are in `layering.rs`; what clippy sees is clippy's.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Component, Path, PathBuf};

use crate::source::{SourceFile, files, words};
use agent::gpu::sample::Sample;
use agent::node::metrics::AgentMetrics;
use control::metrics::demand::{AccountUse, QueueFigures, TeamFigures};
use control::metrics::fleet::FleetFigures;
use control::metrics::mig::{MakeResult, MigFigures};
use control::metrics::registry::Metrics;
use engine::scoring::device_figures::DeviceFigures;
use kube_api::config::file::Config;
use wire::api::condition::DeviceFault;
use wire::api::state::DeviceKind;
use wire::ids::{MigProfile, ModelName, PoolName};
use wire::report::bodies::{AllocatedDevice, Allocation, AllocationState, DeviceReport, DeviceUse};

/// A file of the product with more lines is reported: it may hold two things.
const SRC_LINES: usize = 450;

/// Likewise for files of tests.
const TEST_LINES: usize = 500;

/// Endings of files that people read and write.
const TEXTS: [&str; 9] = ["rs", "md", "toml", "yaml", "sh", "html", "js", "css", "go"];

/// Parts of names without meaning.
const EMPTY_NAMES: [&str; 6] = ["helper", "helpers", "manager", "util", "utils", "misc"];

/// Beginnings of function names without meaning.
const EMPTY_VERBS: [&str; 3] = ["get_", "do_", "handle_"];

/// Marks of unfinished work, in two halves so that this file does not carry them.
const UNFINISHED: [(&str, &str); 3] = [("TO", "DO"), ("FIX", "ME"), ("X", "XX")];

/// Beginnings of paths of one machine, likewise.
const LOCAL: [(&str, &str); 4] = [("/wo", "rk/"), ("/ro", "ot/"), ("/ho", "me/"), ("/Use", "rs/")];

/// Where `Cargo.lock` has every crate from.
const SOURCE: &str = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";

fn ending(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(_, ending)| ending)
}

fn is_text(path: &str) -> bool {
    TEXTS.contains(&ending(path)) || path.starts_with(".ci/") || path == "test"
}

/// Faults of one file that need nothing but its text.
fn look(file: &SourceFile) -> Vec<String> {
    let SourceFile { path, text } = file;
    let mut faults = Vec::new();
    for (line, number) in text.split('\n').zip(1..) {
        let mut fault = |what: String| faults.push(format!("{path}:{number}: {what}"));
        if line.contains('\t') && ending(path) != "go" {
            fault("a tab".to_owned());
        }
        if line.ends_with([' ', '\r', '\t']) {
            fault("blanks at the end".to_owned());
        }
        for (half, other) in UNFINISHED {
            if line.contains(&format!("{half}{other}")) {
                fault(format!("`{half}{other}`: finish it, or write an issue"));
            }
        }
        for (half, other) in LOCAL {
            if line.contains(&format!("{half}{other}")) && !line.contains("http") {
                fault(format!("`{half}{other}` exists on one machine only"));
            }
        }
    }
    if !text.is_empty() && (!text.ends_with('\n') || text.ends_with("\n\n")) {
        faults.push(format!("{path}: it must end with one line feed"));
    }
    faults
}

/// Reports a long Rust file; length alone is not an error.
fn length(file: &SourceFile) -> Option<String> {
    let SourceFile { path, text } = file;
    let is_test = path.starts_with("tests/") || path.ends_with("/tests.rs");
    let limit = if is_test { TEST_LINES } else { SRC_LINES };
    let lines = text.lines().count();
    let is_long = ending(path) == "rs" && lines > limit;
    is_long.then(|| format!("long: {path} has {lines} lines: does it hold more than one thing?"))
}

/// Attributes and names that are not allowed in Rust.
fn rust(file: &SourceFile) -> Vec<String> {
    let SourceFile { path, text } = file;
    let mut faults = Vec::new();
    let name = Path::new(path).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    if EMPTY_NAMES.contains(&name.as_str()) {
        faults.push(format!("{path}: the name says nothing"));
    }
    let words = words(text);
    for pair in words.windows(2) {
        let [first, second] = pair else { continue };
        let (word, line) = (second.text.as_str(), second.line);
        let is_attribute = ["#[", "#!["].contains(&first.text.as_str());
        if is_attribute && word == "allow" {
            faults.push(format!("{path}:{line}: `allow`: write `expect` with a reason"));
        }
        if is_attribute && word == "ignore" {
            faults.push(format!("{path}:{line}: an ignored test proves nothing"));
        }
        let declares = ["fn", "mod", "struct", "enum", "trait", "type", "const", "static"];
        if !declares.contains(&first.text.as_str()) {
            continue;
        }
        let snake = snake_case(word);
        let says_nothing = snake.split('_').any(|part| EMPTY_NAMES.contains(&part));
        let is_empty_verb = first.text == "fn" && EMPTY_VERBS.iter().any(|v| word.starts_with(v));
        if says_nothing || is_empty_verb {
            faults.push(format!("{path}:{line}: the name `{word}` says nothing"));
        }
    }
    faults
}

/// `NodeState` and `node_ledger` alike as `node_ledger`.
fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    let mut was_lower = false;
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && was_lower {
            snake.push('_');
        }
        was_lower = letter.is_ascii_lowercase();
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// Targets of the Markdown links of a text, without code blocks and without addresses elsewhere.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        let parts = line.split("](").skip(1).filter(|_| !is_code);
        for part in parts {
            let target = part.split([')', ' ']).next().unwrap_or_default();
            if !target.contains("://") && !target.starts_with("mailto:") {
                found.push(target.to_owned());
            }
        }
    }
    found
}

/// The anchors that the headings of a Markdown text make, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| -> String {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// A path with `..` and `.` taken out.
fn plain(path: &Path) -> String {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            Component::Normal(name) => plain.push(name),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    plain.to_string_lossy().replace('\\', "/")
}

/// Links of Markdown files that lead nowhere, and documents to which nothing leads.
fn broken_links(files: &[SourceFile]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut reached = BTreeSet::new();
    for file in files.iter().filter(|file| ending(&file.path) == "md") {
        for link in links(&file.text) {
            let (target, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let folder = Path::new(&file.path).parent().unwrap_or(Path::new(""));
            let target =
                if target.is_empty() { file.path.clone() } else { plain(&folder.join(target)) };
            let found = files.iter().find(|known| known.path == target);
            let is_folder =
                || files.iter().any(|known| known.path.starts_with(&format!("{target}/")));
            if found.is_none() && !is_folder() {
                faults.push(format!("{}: link `{link}` leads nowhere", file.path));
            }
            let heads = found.filter(|_| !anchor.is_empty()).map(|found| anchors(&found.text));
            if heads.is_some_and(|heads| !heads.contains(anchor)) {
                faults.push(format!("{}: link `{link}` names no heading", file.path));
            }
            let is_entry = ["README.md", "docs/ARCHITECTURE.md"].contains(&file.path.as_str());
            if is_entry || target.starts_with("docs/images/") {
                reached.insert(target);
            }
        }
    }
    let documents = files.iter().filter(|file| file.path.starts_with("docs/"));
    for lost in documents.filter(|file| !reached.contains(&file.path)) {
        if lost.path != "docs/ARCHITECTURE.md" || !reached.contains("docs/ARCHITECTURE.md") {
            faults.push(format!("{}: neither README nor ARCHITECTURE links to it", lost.path));
        }
    }
    faults
}

/// The names that `document` does not have in backticks.
fn unnamed(document: &str, names: impl IntoIterator<Item = String>) -> Vec<String> {
    names.into_iter().filter(|name| !document.contains(&format!("`{name}`"))).collect()
}

/// The file at `path`.
fn text_of<'a>(files: &'a [SourceFile], path: &str) -> &'a str {
    let found = files.iter().find(|file| file.path == path);
    &found.unwrap_or_else(|| panic!("{path} is missing")).text
}

/// The families of a text in Prometheus' format.
fn families(text: &str) -> Vec<String> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.filter_map(|rest| rest.split(' ').next()).map(str::to_owned).collect()
}

/// The families of an agent that has read a GPU.
fn agent_families() -> Vec<String> {
    let device = DeviceReport::new("GPU-a".to_owned(), 0, "Tesla T4".to_owned(), DeviceKind::Gpu);
    let seen = DeviceUse {
        busy_percent: Some(1),
        processes: Some(Vec::new()),
        ..DeviceUse::unread(device.uuid.clone(), DeviceFault::Lost)
    };
    let sample = Sample {
        inventory: vec![device].into(),
        uses: vec![seen],
        driver: None,
        xids: BTreeMap::new(),
        unreadable: 0,
        has_unwatched_pods: false,
        draining: BTreeSet::new(),
        mig_failures: Vec::new(),
        memory_limits: None,
        containers: [].into(),
    };
    let metrics = AgentMetrics::new();
    metrics.show_outdated("n", false);
    let part = AllocatedDevice { uuid: "GPU-a".to_owned(), memory_mib: 1, share_millionths: 1 };
    let allocation = Allocation {
        pod_uid: "p".to_owned(),
        pod: "d/p".to_owned(),
        state: AllocationState::Confirmed,
        devices: vec![part],
        is_guest: false,
    };
    metrics.show("n", &sample, &[allocation]);
    families(&String::from_utf8(metrics.text()).expect("the text format is UTF-8"))
}

/// Annotation and resource keys: the constants of these files in the form of Kubernetes keys.
fn keys(text: &str) -> Vec<String> {
    let is_key = |value: &str| {
        value.starts_with("gpu-") || (value.contains(".dev/") || value.contains("nvidia.com/"))
    };
    let values = text.lines().filter(|line| line.starts_with("pub const ")).filter_map(|line| {
        let (_, value) = line.split_once("&str = \"")?;
        value.strip_suffix("\";").map(str::to_owned)
    });
    values.filter(|value| is_key(value) && !value.ends_with(['/', '-'])).collect()
}

#[test]
fn files_look_alike() {
    let mut faults = Vec::new();
    for file in files().iter().filter(|file| is_text(&file.path)) {
        faults.extend(look(file));
        if let Some(note) = length(file) {
            // Past the capture of the test harness.
            let _ = writeln!(std::io::stderr(), "{note}");
        }
        if ending(&file.path) == "rs" {
            faults.extend(rust(file));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn links_are_valid_and_every_document_is_linked() {
    let faults = broken_links(&files());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_license_file_exists() {
    let files = files();
    assert!(text_of(&files, "LICENSE").contains("Apache License"), "the license is Apache-2.0");
    assert!(text_of(&files, "NOTICE").contains("gpupack"), "the notice names the project");
}

#[test]
fn crates_come_from_the_public_registry() {
    let files = files();
    let locked = text_of(&files, "Cargo.lock").lines().filter(|line| line.starts_with("source"));
    let untracked: Vec<&str> = locked.filter(|line| *line != SOURCE).collect();
    assert!(untracked.is_empty(), "{untracked:?}");
    let settings = text_of(&files, ".cargo/config.toml");
    assert!(!settings.contains("[source") && !settings.contains("[registr"), "{settings}");
}

#[test]
fn a_release_notices_sums_that_overflow() {
    let files = files();
    let (_, rest) = text_of(&files, "Cargo.toml").split_once("[profile.release]").unwrap();
    let profile = rest.split("\n[").next().unwrap();
    assert!(profile.lines().any(|line| line == "overflow-checks = true"), "{profile}");
}

#[test]
fn every_configuration_key_is_documented() {
    let files = files();
    let mut keys = Vec::new();
    for (section, prefix) in [
        ("unknown: 1", ""),
        ("guard: {unknown: 1}", "guard."),
        ("advice: {unknown: 1}", "advice."),
        ("webhook: {unknown: 1}", "webhook."),
        ("pools: {a: {unknown: 1}}", "pools.<pool>."),
        ("models: {a: {memory_mib: 2048, unknown: 1}}", "models.<model>."),
        ("preemption: {unknown: 1}", "preemption."),
        ("quota: {unknown: 1}", "quota."),
        ("shares: {unknown: 1}", "shares."),
        ("shares: {teams: {a: {unknown: 1}}}", "shares.teams.<team>."),
    ] {
        let faults = Config::from_yaml(section).expect_err("no key has this name").to_string();
        let (_, known) = faults.split_once("expected ").expect("the fault names all keys");
        let known = known.split('`').skip(1).step_by(2);
        keys.extend(known.map(|key| format!("{prefix}{key}")));
    }
    assert!(keys.len() > 50, "{keys:?}");
    let missing = unnamed(text_of(&files, "docs/configuration.md"), keys);
    assert!(missing.is_empty(), "docs/configuration.md lacks {missing:?}");
}

#[test]
fn every_metric_family_is_documented() {
    let metrics = Metrics::new();
    let kinds = [((ModelName::new("T4"), PoolName::new("")), DeviceFigures::default())].into();
    metrics.set_fleet(&FleetFigures { kinds, ..FleetFigures::default() }, &QueueFigures::default());
    metrics.used("team", "", AccountUse::default());
    metrics.set_teams(&[TeamFigures::default()]);
    let profile = MigProfile::new("1g.5gb");
    metrics.mig_ordered([&profile].into_iter(), MakeResult::Made);
    metrics.waited_for_mig(&profile, std::time::Duration::from_secs(1));
    metrics.set_mig(&[(profile, MigFigures::default())].into());
    let text = String::from_utf8(metrics.text()).expect("the text format is UTF-8");
    let mut exported = families(&text);
    assert!(exported.len() >= 20, "{exported:?}");
    let of_agent = agent_families();
    assert_eq!(of_agent.len(), 10, "{of_agent:?}");
    exported.extend(of_agent);
    // Printed by hand, on a path of their own.
    exported.extend(
        ["share_gpus", "memory_bytes", "tenants", "placeable"]
            .map(|name| format!("gpupack_device_{name}")),
    );
    let files = files();
    let document = text_of(&files, "docs/metrics.md");
    let missing = unnamed(document, exported.iter().cloned());
    assert!(missing.is_empty(), "docs/metrics.md lacks {missing:?}");
    let named = document.split('`').skip(1).step_by(2).filter(|name| name.starts_with("gpupack_"));
    let stale: Vec<&str> =
        named.filter(|name| !exported.iter().any(|family| family == name)).collect();
    assert!(stale.is_empty(), "docs/metrics.md names what is not exported: {stale:?}");
}

#[test]
fn every_key_of_a_pod_is_documented() {
    let files = files();
    let mut found = Vec::new();
    for file in ["annotations", "placement", "resources"] {
        found.extend(keys(text_of(&files, &format!("src/kube_api/request/{file}.rs"))));
    }
    assert!(found.len() >= 16, "{found:?}");
    let missing = unnamed(text_of(&files, "docs/requests.md"), found);
    assert!(missing.is_empty(), "docs/requests.md lacks {missing:?}");
}

#[cfg(test)]
mod checks {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn failed_lookup_is_detected() {
        let unfinished = format!("// {}{}\n", UNFINISHED[0].0, UNFINISHED[0].1);
        let local = format!("cd {}{}x\n", LOCAL[0].0, LOCAL[0].1);
        for bad in ["\tx\n", "x \n", "x", "x\n\n", "x\r\n", &unfinished, &local] {
            assert_eq!(look(&file("a.md", bad)).len(), 1, "{bad:?}");
        }
        assert_eq!(look(&file("a.md", "x\n\ny\n")), Vec::<String>::new());
        assert_eq!(look(&file("a.go", "\tx\n")), Vec::<String>::new());
    }

    #[test]
    fn a_too_long_file_is_detected() {
        let long = |path: &str, lines: usize| length(&file(path, &"x\n".repeat(lines))).is_some();
        assert!(long("src/a.rs", 451) && long("tests/a.rs", 501));
        assert!(!long("src/a.rs", 450) && !long("tests/a.rs", 500) && !long("src/a/tests.rs", 500));
        assert!(!long("docs/a.md", 900), "people scroll");
    }

    #[test]
    fn bad_attributes_and_names_are_detected() {
        for bad in [
            "#[allow(dead_code)]",
            "#![allow(dead_code)]",
            "#[ignore]\nfn a() {}",
            "fn get_node() {}",
            "fn do_it() {}",
            "struct PodManager;",
            "mod string_utils {}",
        ] {
            assert_eq!(rust(&file("src/a.rs", bad)).len(), 1, "{bad}");
        }
        assert_eq!(rust(&file("src/helpers.rs", "")).len(), 1);
        for good in ["// #[allow(x)]", "fn target_of() {}", "let s = \"fn get_x\";", "#[expect(a)]"]
        {
            assert_eq!(rust(&file("src/a.rs", good)), Vec::<String>::new(), "{good}");
        }
    }

    #[test]
    fn broken_links_and_unlinked_documents_are_detected() {
        let readme = file(
            "README.md",
            "[a](docs/ARCHITECTURE.md) [b](docs/a.md#two-words) [c](docs) [d](https://x.y/z)\n\
             ```\n[e](nowhere)\n```\n",
        );
        let a = file("docs/a.md", "# Two words\n[up](../README.md) [me](#two-words)\n");
        let architecture = file("docs/ARCHITECTURE.md", "[a](a.md)\n");
        let good = [readme, a, architecture];
        assert_eq!(broken_links(&good), Vec::<String>::new());
        let lost = [file("README.md", "[x](y.md) [a](docs/a.md#no)\n"), file("docs/a.md", "")];
        assert_eq!(broken_links(&lost).len(), 2, "{:?}", broken_links(&lost));
        assert_eq!(broken_links(&[file("docs/b.md", "")]).len(), 1);
    }

    #[test]
    fn undocumented_names_in_sources_are_detected() {
        assert_eq!(families("# HELP a b\n# TYPE gpupack_a counter\ngpupack_a 1\n"), ["gpupack_a"]);
        let source = "pub const A: &str = \"gpu-fraction\";\npub const B: &str = \"gpupack.dev/\";\n\
                      const C: &str = \"gpu-x\";\npub const D: &str = \"some text\";\n";
        assert_eq!(keys(source), ["gpu-fraction"]);
        assert_eq!(unnamed("has `a`, not b", ["a", "b"].map(str::to_owned)), ["b"]);
        assert_eq!(snake_case("PodManager"), "pod_manager");
    }
}

#[test]
fn tests_that_documents_name_are_there() {
    let files = files();
    let rust: String = files
        .iter()
        .filter(|file| file.path.ends_with(".rs"))
        .map(|file| file.text.as_str())
        .collect();
    let document = text_of(&files, "docs/security.md");
    let lines = document.lines().filter(|line| line.starts_with("| ") && line.contains("| `"));
    let column = lines.filter_map(|line| line.trim_end_matches([' ', '|']).rsplit_once(" | "));
    let named: Vec<&str> =
        column.flat_map(|(_, tests)| tests.split('`').skip(1).step_by(2)).collect();
    assert!(named.len() > 20, "the table of tests was not found: {named:?}");
    let missing: Vec<&&str> =
        named.iter().filter(|name| !rust.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "docs/security.md names tests that are not there: {missing:?}");
}

/// A filter of a test binary that names no test would run nothing, and pass.
#[test]
fn scenarios_of_the_core_are_there() {
    let files = files();
    let script = text_of(&files, "tests/run");
    let core: Vec<&str> =
        script.lines().filter_map(|line| line.trim().strip_prefix("scenarios::")).collect();
    assert_eq!(core.len(), 15, "the core is 15 scenarios: {core:?}");
    for scenario in core {
        let (module, name) = scenario.split_once("::").expect("a module and a function");
        let text = text_of(&files, &format!("tests/e2e/scenarios/{module}.rs"));
        assert!(text.contains(&format!("#[test]\nfn {name}()")), "there is no {scenario}");
    }
}
