//! What a load tool from outside sees: whole HTTP calls on one connection that is kept alive, while agents
//! report and pods are bound.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use gpupack::sim::chart::Curve;

use super::bodies::bodies;
use super::{NODES, Row};

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
    /// A cluster half full, into which 50 pods a second come and 5,000 reports at most.
    fn start(nodes: usize, log: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let address = port.expect("a port is free").to_string();
        let log = std::fs::File::create(log).expect("the folder is writable");
        let process = Command::new(env!("CARGO_BIN_EXE_gpupack"))
            .args(["demo", "--gpus-per-node", "8", "--fill", "0.5", "--arrival-rate", "50"])
            .args(["--report-rate", "5000", "--log-level", "error"])
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

/// The lines of the table; curves are added.
pub(crate) fn measure(curves: &mut Vec<Curve>) -> Vec<Row> {
    let row = |verb: &str, goal| Row::new(&format!("`{verb}`, whole HTTP call, all names"), goal);
    let goal = "median ≤ 250 µs, p99 ≤ 1 ms";
    let mut verbs = [("filter", row("filter", goal)), ("prioritize", row("prioritize", goal))];
    let mut memory =
        Row::new("peak memory of the whole demo, fleet on paper included", "≤ 150 MiB");
    let folder = std::env::temp_dir().join(format!("gpupack-performance-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("there is room for temporary files");
    std::fs::write(folder.join("ask.lua"), SCRIPT).expect("the folder is writable");
    let has_wrk = Command::new("wrk").arg("-v").output().is_ok();
    curves.extend(
        verbs.iter().map(|(verb, _)| Curve { label: (*verb).to_owned(), points: Vec::new() }),
    );
    for nodes in NODES.into_iter().filter(|_| has_wrk) {
        eprintln!("over HTTP: {nodes} nodes");
        // The demo counts its nodes from zero, with five digits.
        let names: Vec<String> = (0..nodes).map(|node| format!("node-{node:05}")).collect();
        let lines: Vec<String> = bodies(&names)
            .into_iter()
            .map(|body| String::from_utf8(body).expect("JSON is text"))
            .collect();
        std::fs::write(folder.join("bodies"), lines.join("\n")).expect("the folder is writable");
        let demo = Demo::start(nodes, &folder.join("demo.log"));
        until_filled(&demo, nodes);
        for (at, (verb, row)) in verbs.iter_mut().enumerate() {
            let runs: Vec<(f64, f64)> =
                (0..3).filter_map(|_| wrk(&demo, &folder, verb, 5)).collect();
            let mut medians: Vec<f64> = runs.iter().map(|(median, _)| *median).collect();
            let mut tails: Vec<f64> = runs.iter().map(|(_, p99)| *p99).collect();
            medians.sort_unstable_by(f64::total_cmp);
            tails.sort_unstable_by(f64::total_cmp);
            if let (Some(median), Some(p99)) =
                (medians.get(medians.len() / 2), tails.get(tails.len() / 2))
            {
                row.measured.push((nodes, format!("{median:.0} µs, p99 {p99:.0} µs")));
                curves[1 + at].points.push((nodes as f64, *median));
            }
        }
        if let Some(mib) = demo.peak_mib() {
            memory.measured.push((nodes, format!("{mib} MiB")));
        }
    }
    let _ = std::fs::remove_dir_all(&folder);
    let [(_, filter), (_, prioritize)] = verbs;
    vec![filter, prioritize, memory]
}

/// Waits until the demo is ready and its base load is booked: its first answer has a node, and the figures
/// no longer say that it starts.
fn until_filled(demo: &Demo, nodes: usize) {
    for _ in 0..120 {
        std::thread::sleep(std::time::Duration::from_secs(1));
        let text = demo.metrics().unwrap_or_default();
        let value = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.rsplit(' ').next()?.parse::<f64>().ok()
        };
        let is_there = value("gpupack_ready") == Some(1.0)
            && value("gpupack_nodes{state=\"reporting\"}") == Some(nodes as f64)
            && value("gpupack_binds_total{outcome=\"bound\"}").is_some_and(|binds| binds > 0.0);
        if is_there {
            return;
        }
    }
    panic!("the demo of {nodes} nodes has not become ready within two minutes");
}
