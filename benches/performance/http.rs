//! What a load tool from outside sees: whole HTTP calls on one connection that is kept alive, while agents
//! report and pods are bound.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use gpupack::sim::chart::Curve;

use super::bodies::bodies;
use super::{NODES, Row, shown};

/// Takes the bodies in turn. The path comes as argument.
const SCRIPT: &str = r#"
local requests, at = {}, 0
init = function(args)
  for body in io.lines(os.getenv("BODIES")) do
    requests[#requests + 1] = wrk.format("POST", args[1], {["Content-Type"] = "application/json"}, body)
  end
end
request = function()
  at = at % #requests + 1
  return requests[at]
end
done = function(summary, latency, _)
  io.write(string.format("figures %f %f %d %d\n", latency:percentile(50), latency:percentile(99),
    summary.requests, summary.errors.status + summary.errors.timeout))
end
"#;

/// A demo that is ended when it is dropped.
struct Demo {
    process: Child,
    address: String,
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Demo {
    /// A cluster half full.
    fn start(nodes: usize, load: &Load, log: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let address = port.expect("a port is free").to_string();
        let log = std::fs::File::create(log).expect("the folder is writable");
        let process = Command::new(env!("CARGO_BIN_EXE_gpupack"))
            .args(["demo", "--gpus-per-node", "8", "--fill", "0.5", "--log-level", "error"])
            .args(["--arrival-rate", load.arrivals, "--report-rate", load.reports])
            .args(["--nodes", &nodes.to_string(), "--listen", &address])
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .spawn();
        Self { process: process.expect("gpupack can be started"), address }
    }

    /// What Prometheus would read.
    fn metrics(&self) -> std::io::Result<String> {
        let mut connection = TcpStream::connect(&self.address)?;
        connection.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        connection.read_to_string(&mut text)?;
        Ok(text)
    }

    /// Most memory that it ever held, in MiB: the fleet on paper and its scheduler included.
    fn peak_mib(&self) -> Option<u64> {
        let status = std::fs::File::open(format!("/proc/{}/status", self.process.id())).ok()?;
        let lines = BufReader::new(status).lines().map_while(Result::ok);
        let line = lines.into_iter().find(|line| line.starts_with("VmHWM:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
    }
}

/// One run of wrk: median and 99th percentile in microseconds.
fn wrk(demo: &Demo, folder: &Path, verb: &str, seconds: u32) -> Option<(f64, f64)> {
    let run = Command::new("wrk")
        .env("BODIES", folder.join("bodies"))
        .args(["-t1", "-c1", &format!("-d{seconds}s"), "--timeout", "10s", "-s"])
        .arg(folder.join("ask.lua"))
        .args([&format!("http://{}", demo.address), "--", &format!("/v1/{verb}")])
        .stderr(Stdio::inherit())
        .output();
    let out = String::from_utf8(run.ok()?.stdout).ok()?;
    let figures = out.lines().find_map(|line| line.strip_prefix("figures "))?;
    let numbers: Vec<f64> = figures.split(' ').filter_map(|number| number.parse().ok()).collect();
    let [median, p99, requests, errors] = numbers[..] else { return None };
    assert!(requests > 0.0 && errors == 0.0, "{requests} calls, {errors} of them failed: {out}");
    Some((median, p99))
}

/// What goes on in the same process besides the calls of the load tool.
struct Load {
    name: &'static str,
    /// Pods a second that are filtered, prioritized and bound over HTTP.
    arrivals: &'static str,
    /// Most reports a second of all agents, over HTTP as well.
    reports: &'static str,
}

const LOADS: [Load; 2] = [
    Load { name: "500 reports a second beside it", arrivals: "0", reports: "500" },
    Load {
        name: "50 binds and up to 5,000 reports a second beside it",
        arrivals: "50",
        reports: "5000",
    },
];

/// The lines of the table; curves are added.
pub(crate) fn measure(curves: &mut Vec<Curve>) -> Vec<Row> {
    let folder = std::env::temp_dir().join(format!("gpupack-performance-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("there is room for temporary files");
    std::fs::write(folder.join("ask.lua"), SCRIPT).expect("the folder is writable");
    let mut rows = Vec::new();
    for load in &LOADS {
        rows.extend(measure_with(load, &folder, curves));
    }
    let _ = std::fs::remove_dir_all(&folder);
    rows
}

fn measure_with(load: &Load, folder: &Path, curves: &mut Vec<Curve>) -> Vec<Row> {
    const GOAL: &str = "median ≤ 250 µs, p99 ≤ 1 ms";
    let row = |verb: &str| Row::new(&format!("`{verb}`, whole HTTP call, {}", load.name), GOAL);
    let mut verbs = [("filter", row("filter")), ("prioritize", row("prioritize"))];
    let what = format!("peak memory of the demo, fleet on paper included; {}", load.name);
    let mut memory = Row::new(&what, "≤ 150 MiB");
    let has_wrk = Command::new("wrk").arg("-v").output().is_ok();
    let first = curves.len();
    let label = |verb: &str| {
        format!("{verb}, {}", if load.arrivals == "0" { "alone" } else { "under load" })
    };
    curves.extend(verbs.iter().map(|(verb, _)| Curve { label: label(verb), points: Vec::new() }));
    for nodes in NODES.into_iter().filter(|_| has_wrk) {
        eprintln!("over HTTP, {}: {nodes} nodes", load.name);
        // The demo counts its nodes from zero, with five digits.
        let names: Vec<String> = (0..nodes).map(|node| format!("node-{node:05}")).collect();
        let lines =
            bodies(&names).into_iter().map(|body| String::from_utf8(body).expect("JSON is text"));
        let lines: Vec<String> = lines.collect();
        std::fs::write(folder.join("bodies"), lines.join("\n")).expect("the folder is writable");
        let demo = Demo::start(nodes, load, &folder.join("demo.log"));
        until_filled(&demo, nodes);
        for (at, (verb, row)) in verbs.iter_mut().enumerate() {
            let runs: Vec<(f64, f64)> =
                (0..3).filter_map(|_| wrk(&demo, folder, verb, 4)).collect();
            let middle = |of: fn(&(f64, f64)) -> f64| {
                let mut all: Vec<f64> = runs.iter().map(of).collect();
                all.sort_unstable_by(f64::total_cmp);
                all.get(all.len() / 2).copied()
            };
            if let (Some(median), Some(p99)) = (middle(|run| run.0), middle(|run| run.1)) {
                row.measured.push((nodes, format!("{}, p99 {}", shown(median), shown(p99))));
                curves[first + at].points.push((nodes as f64, median));
            }
        }
        if let Some(mib) = demo.peak_mib() {
            memory.measured.push((nodes, format!("{mib} MiB")));
        }
    }
    let [(_, filter), (_, prioritize)] = verbs;
    vec![filter, prioritize, memory]
}

/// Waits until the demo is ready and its base load is booked.
fn until_filled(demo: &Demo, nodes: usize) {
    let target = 8.0 * nodes as f64 * 0.45;
    for _ in 0..120 {
        std::thread::sleep(std::time::Duration::from_secs(1));
        let text = demo.metrics().unwrap_or_default();
        let booked = text.lines().filter(|line| {
            line.starts_with("gpupack_share_gpus{") && line.contains("state=\"booked\"")
        });
        let booked = booked.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        if text.contains("gpupack_ready 1") && booked.sum::<f64>() >= target {
            return;
        }
    }
    panic!("the demo of {nodes} nodes has not become ready within two minutes");
}
