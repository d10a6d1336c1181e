//! What a load tool from outside sees of the demo, the quickest way to a cluster: whole HTTP calls on one
//! connection that is kept alive.

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
    fn start(nodes: usize) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let address = port.expect("a port is free").to_string();
        let process = Command::new(env!("CARGO_BIN_EXE_gpupack"))
            .args(["demo", "--gpus-per-node", "8", "--fill", "0.5", "--log-level", "error"])
            .args(["--arrival-rate", "0", "--report-rate", "500"])
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

/// The lines of the table; curves are added.
pub(crate) fn measure(sizes: &[usize], curves: &mut Vec<Curve>) -> Vec<Row> {
    const GOAL: &str = "median ≤ 250 µs, p99 ≤ 1 ms";
    let row = |verb: &str| Row::new(&format!("the demo: `{verb}`, whole HTTP call"), GOAL);
    let mut verbs = [("filter", row("filter")), ("prioritize", row("prioritize"))];
    let mut memory = Row::new("the demo: peak memory, fleet on paper included", "");
    let first = curves.len();
    let curve = |verb: &str| Curve { label: format!("{verb} of the demo"), points: Vec::new() };
    curves.extend(verbs.iter().map(|(verb, _)| curve(verb)));
    let wrk = Wrk::find("http");
    for (&nodes, wrk) in sizes.iter().filter_map(|nodes| Some((nodes, wrk.as_ref()?))) {
        eprintln!("the demo: {nodes} nodes");
        // The demo counts its nodes from zero, with five digits.
        wrk.ask_about(&(0..nodes).map(|node| format!("node-{node:05}")).collect::<Vec<_>>());
        let demo = Demo::start(nodes);
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
