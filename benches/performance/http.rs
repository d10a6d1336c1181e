//! What a load tool from outside sees: whole HTTP calls on one connection that is kept alive, while agents
//! report and pods are bound.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use gpupack::sim::chart::Curve;

use super::wrk::Wrk;
use super::{Row, megabytes};

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
    fn start(nodes: usize, load: &Load) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let address = port.expect("a port is free").to_string();
        let process = Command::new(env!("CARGO_BIN_EXE_gpupack"))
            .args(["demo", "--gpus-per-node", "8", "--fill", "0.5", "--log-level", "error"])
            .args(["--arrival-rate", load.arrivals, "--report-rate", load.reports])
            .args(["--nodes", &nodes.to_string(), "--listen", &address])
            .stdout(Stdio::null())
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
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).ok()?;
        megabytes(&status, "VmHWM:")
    }
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
pub(crate) fn measure(sizes: &[usize], curves: &mut Vec<Curve>) -> Vec<Row> {
    let wrk = Wrk::find("http");
    LOADS.iter().flat_map(|load| measure_with(load, wrk.as_ref(), sizes, curves)).collect()
}

fn measure_with(
    load: &Load,
    wrk: Option<&Wrk>,
    sizes: &[usize],
    curves: &mut Vec<Curve>,
) -> Vec<Row> {
    const GOAL: &str = "median ≤ 250 µs, p99 ≤ 1 ms";
    let row = |verb: &str| Row::new(&format!("`{verb}`, whole HTTP call, {}", load.name), GOAL);
    let mut verbs = [("filter", row("filter")), ("prioritize", row("prioritize"))];
    let what = format!("peak memory of the demo, fleet on paper included; {}", load.name);
    let mut memory = Row::new(&what, "≤ 150 MiB");
    let first = curves.len();
    let label = |verb: &str| {
        format!("{verb}, {}", if load.arrivals == "0" { "alone" } else { "under load" })
    };
    curves.extend(verbs.iter().map(|(verb, _)| Curve { label: label(verb), points: Vec::new() }));
    for (&nodes, wrk) in sizes.iter().filter_map(|nodes| Some((nodes, wrk?))) {
        eprintln!("over HTTP, {}: {nodes} nodes", load.name);
        // The demo counts its nodes from zero, with five digits.
        wrk.ask_about(&(0..nodes).map(|node| format!("node-{node:05}")).collect::<Vec<_>>());
        let demo = Demo::start(nodes, load);
        until_filled(&demo, nodes);
        for (at, (verb, row)) in verbs.iter_mut().enumerate() {
            if let Some(took) = wrk.measure(&demo.address, verb) {
                row.measured.push((nodes, took.shown()));
                curves[first + at].points.push((nodes as f64, took.median));
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
