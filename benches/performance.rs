//! Writes `docs/performance.md`: what is measured beside its goal, and a chart of cost against the number of
//! nodes.
//!
//! `cargo bench --bench performance` needs `wrk` (Debian has it) for the HTTP figures; without it, without
//! the public trace (`GPUPACK_TRACES`) or without a run of the control plane the lines say that they were not
//! measured. It takes some ten minutes. Times are medians; on a busy machine only ratios of one run count.
//! `cargo bench --bench performance -- alone 1000` prints one part (`inside`, `http`, `alone`, `simulate`) or
//! size alone, and writes nothing.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "it prints the table and its progress"
)]

#[path = "performance/agents.rs"]
mod agents;
#[path = "performance/alone.rs"]
mod alone;
#[path = "performance/api.rs"]
mod api;
#[path = "performance/arrivals.rs"]
mod arrivals;
#[path = "common/bodies.rs"]
mod bodies;
mod common;
#[path = "common/extender.rs"]
mod extender;
#[path = "performance/http.rs"]
mod http;
#[path = "performance/inside.rs"]
mod inside;
#[path = "performance/objects.rs"]
mod objects;
#[path = "performance/served.rs"]
mod served;
#[path = "common/typical.rs"]
mod typical;
#[path = "performance/wrk.rs"]
mod wrk;

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use runtime::clock::Clock;
use sim::chart::draw::{Chart, Curve, write_svg};

/// Sizes of the clusters, in nodes of 8 GPUs.
const NODES: [usize; 4] = [100, 1_000, 5_000, 20_000];

/// Parts of the table that can be requested.
const PARTS: [&str; 4] = ["inside", "http", "alone", "simulate"];

/// A line of the table.
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) goal: &'static str,
    /// By number of nodes.
    pub(crate) measured: Vec<(usize, String)>,
}

impl Row {
    pub(crate) fn new(what: &str, goal: &'static str) -> Self {
        Self { what: what.to_owned(), goal, measured: Vec::new() }
    }
}

/// Runs `run` repeatedly. Returns the median of its time in microseconds.
pub(crate) fn median_us(clock: Clock, times: usize, mut run: impl FnMut()) -> f64 {
    run();
    let mut took: Vec<f64> = (0..times)
        .map(|_| {
            let started = clock.precise();
            run();
            (clock.precise() - started).as_secs_f64() * 1e6
        })
        .collect();
    took.sort_unstable_by(f64::total_cmp);
    took[took.len() / 2]
}

/// Microseconds, or milliseconds where they are many.
pub(crate) fn shown(us: f64) -> String {
    if us < 1_000.0 { format!("{us:.1} µs") } else { format!("{:.2} ms", us / 1_000.0) }
}

fn simulated() -> Row {
    let mut row = Row::new("`simulate`, one seed of the public trace, `fragmentation`", "≤ 0.5 s");
    if let Some(traces) = std::env::var_os("GPUPACK_TRACES") {
        let clock = Clock::start();
        let file = |name: &str| Path::new(&traces).join(name);
        let mut took: Vec<f64> = (0..3)
            .map(|_| {
                let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack"));
                command.arg("simulate").args(["--policy", "fragmentation", "--seeds", "42..42"]);
                command.arg("--nodes").arg(file("openb_node_list_gpu_node.csv"));
                command.arg("--pods").arg(file("openb_pod_list_default.csv"));
                let started = clock.precise();
                let ended = command.output().expect("gpupack can be started");
                assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
                (clock.precise() - started).as_secs_f64()
            })
            .collect();
        took.sort_unstable_by(f64::total_cmp);
        row.measured.push((1_213, format!("{:.2} s (the trace has 1,213 nodes)", took[1])));
    }
    row
}

fn table(rows: &[Row], sizes: &[usize]) -> String {
    let mut text = String::from("| What | Goal at 5,000 nodes |");
    sizes.iter().for_each(|nodes| write!(text, " {nodes} nodes |").expect("into memory"));
    text.push_str("\n|---|---|");
    text.push_str(&"---|".repeat(sizes.len()));
    text.push('\n');
    for row in rows {
        write!(text, "| {} | {} |", row.what, row.goal).expect("into memory");
        let other = row.measured.iter().find(|(nodes, _)| !NODES.contains(nodes));
        for &nodes in sizes {
            let found = row.measured.iter().find(|(of, _)| *of == nodes);
            let found = found.or(other.filter(|_| nodes == 5_000));
            write!(text, " {} |", found.map_or("not measured", |(_, text)| text))
                .expect("into memory");
        }
        text.push('\n');
    }
    text
}

fn chart(curves: Vec<Curve>, folder: &Path) {
    let chart = Chart {
        rows: Vec::new(),
        title: "Cost against the number of nodes (8 GPUs each, half full)".to_owned(),
        x_label: "nodes".to_owned(),
        y_label: "median, microseconds".to_owned(),
        curves,
    };
    write_svg(&folder.join("performance.svg"), &[chart]).expect("the folder is writable");
}

/// The part of the document between these marks is written again.
const MARKS: [&str; 2] = ["<!-- measured -->\n", "<!-- end of measured -->\n"];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` requests a quick look only.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let requested = |part: &str| arguments.iter().any(|argument| argument == part);
    let is_whole = !PARTS.iter().any(|part| requested(part));
    let mut sizes: Vec<usize> = arguments.iter().filter_map(|text| text.parse().ok()).collect();
    let is_all = is_whole && sizes.is_empty();
    if sizes.is_empty() {
        sizes.extend(NODES);
    }
    let (mut rows, mut curves) = (Vec::new(), Vec::new());
    let [inside, http, alone, simulate] = PARTS.map(|part| is_whole || requested(part));
    if inside {
        (rows, curves) = inside::measure(&sizes);
    }
    if http {
        rows.extend(http::measure(&sizes, &mut curves));
    }
    if alone {
        rows.extend(alone::measure(&sizes));
    }
    if simulate {
        rows.push(simulated());
    }
    let table = table(&rows, &sizes);
    println!("{table}");
    if is_all {
        write(&table, curves);
    }
}

/// Puts the table and the chart of the curves into the documents.
fn write(table: &str, curves: Vec<Curve>) {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    chart(curves, &docs.join("images"));
    let path = docs.join("performance.md");
    let before = std::fs::read_to_string(&path).expect("the document is there");
    let (head, rest) = before.split_once(MARKS[0]).expect("the document has its first mark");
    let (_, tail) = rest.split_once(MARKS[1]).expect("the document has its second mark");
    let text = format!("{head}{}\n{table}\n{}{tail}", MARKS[0], MARKS[1]);
    std::fs::write(&path, text).expect("the document is writable");
    println!("written to docs/performance.md and docs/images/performance.svg");
}
