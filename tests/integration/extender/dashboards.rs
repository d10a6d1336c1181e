//! The shipped dashboards and rules: their look, that they name what exists, and that a real Prometheus answers
//! every expression of them from a running demo.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

/// Longest wait until Prometheus has scraped often enough for every rate.
const PATIENCE: u32 = 120;

fn file(path: &str) -> String {
    let full = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&full).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn dashboards() -> Vec<(String, Value)> {
    let names = ["fleet", "node", "service"].map(|name| format!("deploy/grafana/{name}.json"));
    names.map(|name| (name.clone(), serde_json::from_str(&file(&name)).unwrap())).into()
}

/// The panels that show something.
fn panels(board: &Value) -> impl Iterator<Item = &Value> {
    board["panels"].as_array().unwrap().iter().filter(|panel| panel["type"] != "row")
}

fn targets(panel: &Value) -> impl Iterator<Item = &str> {
    panel["targets"].as_array().unwrap().iter().map(|target| target["expr"].as_str().unwrap())
}

/// Expressions of the rules, by the name of the record or alert.
fn rules() -> Vec<(String, String)> {
    let parsed: Value = serde_yaml_ng::from_str(&file("deploy/prometheus/rules.yaml")).unwrap();
    let groups = parsed["groups"].as_array().unwrap().iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().unwrap());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    rules
        .map(|rule| {
            let name = rule.get("alert").or_else(|| rule.get("record")).unwrap();
            (text(name), text(&rule["expr"]))
        })
        .collect()
}

/// Words that have the form of our family names.
fn families(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text.split(|c: char| !is_part(c)).filter(|word| word.starts_with("gpupack_"));
    let plain = |word: &str| {
        let cut = ["_bucket", "_count", "_sum"].iter().find_map(|end| word.strip_suffix(end));
        cut.unwrap_or(word).to_owned()
    };
    words.map(plain).collect()
}

/// The rules of Grafana's dashboard linter that matter to users, and our own conventions.
#[test]
fn dashboards_follow_the_conventions() {
    for (name, board) in dashboards() {
        let fault = |what: &str| panic!("{name}: {what}");
        let uid = board["uid"].as_str().unwrap();
        if !uid.starts_with("gpupack-") || board["editable"] != false {
            fault("a fixed uid, not editable");
        }
        assert_eq!(board["tags"], serde_json::json!(["gpupack"]), "{name}");
        assert!(board["links"][0]["tags"][0] == "gpupack", "{name}: links to its sisters");
        let variables = board["templating"]["list"].as_array().unwrap();
        let names: Vec<&str> = variables.iter().map(|it| it["name"].as_str().unwrap()).collect();
        assert_eq!(names[..3], ["datasource", "job", "instance"], "{name}");
        for (at, variable) in variables.iter().enumerate().skip(1) {
            assert_eq!(variable["datasource"]["uid"], "${datasource}", "{name}");
            // Each is limited to what the one before it leaves.
            let query = variable["query"]["query"].as_str().unwrap();
            let before = format!("${}", names[at - 1]);
            assert!(at == 1 || query.contains(&before), "{name}: {query} lacks {before}");
        }
        let mut ids = BTreeSet::new();
        for panel in panels(&board) {
            let title = panel["title"].as_str().unwrap();
            let of = |part: &str| panel[part].as_str().unwrap_or_default().is_empty();
            assert!(!title.is_empty() && !of("description"), "{name}: {title}: title, description");
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{name}: {title}: its own id");
            assert!(panel["type"] != "graph", "{name}: {title}: `graph` is gone");
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{name}: {title}");
            let unit = panel["fieldConfig"]["defaults"]["unit"].as_str();
            assert!(unit.is_some_and(|unit| !unit.is_empty()), "{name}: {title}: a unit");
            for expression in targets(panel) {
                for matcher in ["job=~\"$job", "instance=~"] {
                    assert!(expression.contains(matcher), "{name}: {title}: {matcher}");
                }
                // Counters are shown as rates alone.
                let shown = expression.contains("_total") && !expression.contains("audit_failures");
                let is_rate = expression.contains("rate(") || expression.contains("increase(");
                assert!(!shown || is_rate, "{name}: {title}: a counter needs a rate");
            }
        }
        assert!(ids.len() >= 10, "{name} shows little");
    }
}

#[test]
fn dashboards_and_rules_name_what_exists() {
    let document = families(&file("docs/metrics.md"));
    let mut named: BTreeMap<String, String> = BTreeMap::new();
    for (name, board) in dashboards() {
        let found = families(&board.to_string());
        named.extend(found.into_iter().map(|family| (family, name.clone())));
    }
    for (name, expression) in rules() {
        named.extend(families(&expression).into_iter().map(|family| (family, name.clone())));
    }
    assert!(named.len() > 25, "{named:?}");
    for (family, place) in named {
        assert!(document.contains(&family), "{place} names `{family}`, which is not exported");
    }
}

/// Each alert has a chapter with all four parts, a case that fires and one that stays silent; the events and
/// commands that the chapters name exist.
#[test]
fn every_alert_has_a_runbook_chapter_and_two_tests() {
    let (runbook, tests) = (file("docs/runbook.md"), file("deploy/prometheus/rules.test.yaml"));
    let alerts: Vec<String> =
        rules().into_iter().map(|(name, _)| name).filter(|name| !name.contains(':')).collect();
    assert!(alerts.len() >= 20, "{alerts:?}");
    let chapters: Vec<&str> = runbook.split("\n## ").skip(1).collect();
    assert_eq!(chapters.len(), alerts.len(), "a chapter for each alert and no other");
    for alert in &alerts {
        let chapter = chapters.iter().find(|chapter| chapter.lines().next() == Some(alert));
        let chapter = chapter.unwrap_or_else(|| panic!("{alert} has no chapter"));
        for part in ["**Meaning.**", "**Impact.**", "**Diagnosis.**", "**Mitigation.**", "```sh"] {
            assert!(chapter.contains(part), "{alert}: {part}");
        }
        for case in ["fires", "stays silent"] {
            assert!(tests.contains(&format!("name: {alert} {case}\n")), "{alert} {case}");
        }
        assert!(
            file("deploy/prometheus/rules.yaml").contains(&format!("#{}\n", alert.to_lowercase()))
        );
    }
    let events = file("src/kube_api/write/events.rs");
    for reason in runbook.split("reason=").skip(1) {
        let reason: String = reason.chars().take_while(char::is_ascii_alphanumeric).collect();
        let is_known = reason == "FailedScheduling" || events.contains(&format!("\"{reason}\""));
        assert!(is_known, "no event has the reason `{reason}`");
    }
}

/// Says why a test does nothing.
fn skip(why: &str) {
    let _shown =
        writeln!(std::io::stderr(), "skipped: dashboards on a real Prometheus because {why}");
}

fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output();
    found.is_ok_and(|found| found.status.success())
}

fn promtool(arguments: &[&str], input: Option<&str>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus");
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(folder).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.unwrap_or_default().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert!(output.status.success(), "promtool {arguments:?}: {said:?}");
    assert!(input.is_none() || said.concat().is_empty(), "promtool {arguments:?}: {said:?}");
}

/// The shape of the dashboards, by Grafana's own types for TypeScript.
#[test]
fn dashboards_have_the_types_of_grafana() {
    if !has("node") || !has("npm") {
        return skip("Node.js with npm is not installed (Debian: nodejs, npm)");
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["package.json", "package-lock.json", "check.mjs"] {
        std::fs::write(folder.path().join(name), file(&format!("tests/grafana/{name}"))).unwrap();
    }
    let run = |program: &str, arguments: &[String]| {
        Command::new(program).args(arguments).current_dir(folder.path()).output().unwrap()
    };
    let install = ["ci", "--no-audit", "--no-fund"].map(str::to_owned);
    let installed = run("npm", &install);
    if !installed.status.success() {
        let said = String::from_utf8_lossy(&installed.stderr).into_owned();
        return skip(&format!("`npm ci` fails: {}", said.lines().next().unwrap_or_default()));
    }
    let name = |name: &str| format!("{}/deploy/grafana/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let script = || "check.mjs".to_owned();
    let checked = run("node", &[script(), name("fleet"), name("node"), name("service")]);
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success(), "{said}");
    let bad = file("deploy/grafana/node.json").replace("\"editable\": false", "\"editable\": 7");
    let wrong = folder.path().join("wrong.json");
    std::fs::write(&wrong, bad).unwrap();
    let checked = run("node", &[script(), wrong.display().to_string()]);
    assert!(!checked.status.success(), "a wrong type is seen");
}

#[test]
fn promtool_accepts_the_rules_and_their_tests() {
    if !has("promtool") {
        return skip("`promtool` is not installed (Debian: prometheus)");
    }
    promtool(&["check", "rules", "rules.yaml"], None);
    promtool(&["test", "rules", "rules.test.yaml"], None);
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _ended = self.0.wait();
    }
}

/// The body of `GET path` on a port of the loopback interface; `None` while there is no answer.
fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.lines().next()?.contains(" 200 ").then(|| body.to_owned())
}

/// How many series Prometheus finds now.
fn query(port: u16, expression: &str) -> Result<usize, String> {
    let encoded: String = expression.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(|error| error.to_string())?;
    write!(stream, "GET /api/v1/query?query={encoded} HTTP/1.0\r\nHost: localhost\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(|error| error.to_string())?;
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
    let body: Value = serde_json::from_str(body).map_err(|_| answer.clone())?;
    match body["data"]["result"].as_array() {
        Some(found) => Ok(found.len()),
        None => Err(body.to_string()),
    }
}

/// What Grafana puts in place of its variables.
fn substituted(expression: &str, node: &str) -> String {
    let mut text = expression.to_owned();
    for (variable, value) in [
        ("$__rate_interval", "30s"),
        ("$__range", "1m"),
        ("job=~\"$job.*\"", "job=~\"gpupack.*\""),
        ("$job", ".*"),
        ("$instance", ".*"),
        ("$model", ".*"),
        ("$pool", ".*"),
        ("$node", node),
        ("[5m]", "[30s]"),
    ] {
        text = text.replace(variable, value);
    }
    text
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// Starts the demo with simulated agents that show their metrics; it places and refuses pods all the time.
fn demo(port: u16, agents: u16) -> Running {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack"));
    let line = format!(
        "demo --nodes 4 --gpus-per-node 2 --fill 0.9 --arrival-rate 20 --listen 127.0.0.1:{port} \
         --agent-metrics 127.0.0.1:{agents}"
    );
    command.args(line.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    std::thread::spawn(move || lines.for_each(drop)); // it must not wait for a reader
    Running(child)
}

/// Prometheus with the shipped rules, which scrapes both each second.
fn prometheus(folder: &Path, port: u16, extender: u16, agents: u16) -> Running {
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus/rules.yaml");
    let job = |name: &str, port: u16| {
        format!(
            "  - job_name: {name}\n    honor_labels: true\n    static_configs:\n      - targets: ['127.0.0.1:{port}']\n"
        )
    };
    let config = format!(
        "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\nrule_files: ['{}']\nscrape_configs:\n{}{}",
        rules.display(),
        job("gpupack", extender),
        job("gpupack-agent", agents)
    );
    let file = folder.join("prometheus.yaml");
    std::fs::write(&file, config).unwrap();
    let child = Command::new("prometheus")
        .arg(format!("--config.file={}", file.display()))
        .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(folder.join("log")).unwrap())
        .spawn();
    Running(child.unwrap())
}

#[test]
fn a_real_prometheus_answers_every_expression() {
    if !has("prometheus") || !has("promtool") {
        return skip("`prometheus` is not installed (Debian: prometheus)");
    }
    let folder: PathBuf = tempfile::tempdir().unwrap().keep();
    let (extender, agents, port) = (free_port(), free_port(), free_port());
    let _demo = demo(extender, agents);
    let _prometheus = prometheus(&folder, port, extender, agents);
    let mut open: BTreeMap<String, String> = BTreeMap::new();
    for (name, board) in dashboards() {
        for panel in panels(&board) {
            for (nth, expression) in targets(panel).enumerate() {
                let place = format!("{name}: {} #{nth}", panel["title"].as_str().unwrap());
                open.insert(place, substituted(expression, ".*"));
            }
        }
    }
    let is_alert = |name: &str| !name.contains(':');
    for (name, expression) in rules().into_iter().filter(|(name, _)| !is_alert(name)) {
        open.insert(format!("rule {name}"), name.clone());
        open.insert(format!("expression of {name}"), substituted(&expression, ".*"));
    }
    assert!(open.len() > 60, "{}", open.len());
    for _ in 0..PATIENCE {
        std::thread::sleep(Duration::from_secs(1));
        // The demo makes no MIG instances: of them there is no data, and no fault either.
        let is_answered =
            |expression: &str, found| found > 0 || expression.contains("gpupack_mig_");
        open.retain(|_, it| !query(port, it).is_ok_and(|found| is_answered(it, found)));
        if open.is_empty() {
            break;
        }
    }
    let why = |expression: &String| (expression.clone(), query(port, expression));
    let unanswered: BTreeMap<_, _> = open.iter().map(|(place, e)| (place, why(e))).collect();
    assert!(unanswered.is_empty(), "no data for {unanswered:#?}");
    // Alerts have no data while all is well, but none may fail.
    for (name, expression) in rules().into_iter().filter(|(name, _)| is_alert(name)) {
        query(port, &expression).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    for (port, what) in [(extender, "the extender"), (agents, "the agents")] {
        let text = get(port, "/metrics").unwrap_or_else(|| panic!("{what} shows no metrics"));
        promtool(&["check", "metrics"], Some(&text));
    }
    let text = get(extender, "/metrics/gpus").unwrap();
    promtool(&["check", "metrics"], Some(&text));
    std::fs::remove_dir_all(&folder).unwrap();
}
