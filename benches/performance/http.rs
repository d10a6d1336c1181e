//! What a load tool from outside sees of the demo, the quickest way to a cluster: whole HTTP calls on one
//! connection that is kept alive.

use sim::chart::draw::Curve;

use super::Row;
use super::bodies::bodies;
use super::served::Served;
use super::wrk::Wrk;

/// A cluster half full.
fn demo(nodes: usize) -> Served {
    let nodes = nodes.to_string();
    let cluster = ["--gpus-per-node", "8", "--fill", "0.5", "--nodes", &nodes];
    Served::demo(&[&cluster[..], &["--arrival-rate", "0"]].concat())
}

/// The lines of the table; curves are added.
pub(crate) fn measure(sizes: &[usize], curves: &mut Vec<Curve>) -> Vec<Row> {
    const GOAL: &str = "median ≤ 250 µs, p99 ≤ 1 ms";
    let row = |verb: &str| Row::new(&format!("the demo: `{verb}`, whole HTTP call"), GOAL);
    let mut verbs = [("filter", row("filter")), ("prioritize", row("prioritize"))];
    let mut empty = Row::new("the demo: `GET /healthz`, whole HTTP call (what HTTP costs)", "");
    let mut memory = Row::new("the demo: peak memory, fleet on paper included", "");
    let first = curves.len();
    let curve = |verb: &str| Curve { label: format!("{verb} of the demo"), points: Vec::new() };
    curves.extend(verbs.iter().map(|(verb, _)| curve(verb)));
    let wrk = Wrk::find();
    for (&nodes, wrk) in sizes.iter().filter_map(|nodes| Some((nodes, wrk.as_ref()?))) {
        eprintln!("the demo: {nodes} nodes");
        // The demo counts its nodes from zero, with five digits.
        wrk.ask(bodies(&(0..nodes).map(|node| format!("node-{node:05}")).collect::<Vec<_>>()));
        let demo = demo(nodes);
        until_filled(&demo, nodes);
        for (at, (verb, row)) in verbs.iter_mut().enumerate() {
            if let Some(took) = wrk.measure(&demo.address, &format!("/v1/{verb}")) {
                row.measured.push((nodes, took.shown()));
                curves[first + at].points.push((nodes as f64, took.median));
            }
        }
        if let Some(took) = wrk.measure(&demo.address, "/healthz") {
            empty.measured.push((nodes, took.shown()));
        }
        memory.measured.push((nodes, format!("{} MiB", demo.peak_mib())));
    }
    let [(_, filter), (_, prioritize)] = verbs;
    vec![filter, prioritize, empty, memory]
}

/// Waits until the demo is ready and its base load is allocated.
fn until_filled(demo: &Served, nodes: usize) {
    let target = 8.0 * nodes as f64 * 0.45;
    for _ in 0..120 {
        std::thread::sleep(std::time::Duration::from_secs(1));
        let text = demo.get("/metrics").unwrap_or_default();
        let allocated = text.lines().filter(|line| {
            line.starts_with("gpupack_share_gpus{") && line.contains("state=\"allocated\"")
        });
        let allocated = allocated.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        if text.contains("gpupack_ready 1") && allocated.sum::<f64>() >= target {
            return;
        }
    }
    panic!("the demo of {nodes} nodes has not become ready within two minutes");
}
