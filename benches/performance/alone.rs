//! An extender alone, as it runs in a cluster: a separate process with a stand-in for the API server,
//! with all pods placed and all agents reporting.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use runtime::clock::Clock;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::Row;
use super::agents::Agents;
use super::api::{self, Stage};
use super::arrivals::Arrivals;
use super::bodies::{bodies, bodies_of};
use super::objects::{GPUS, PODS, node_name};
use super::served::Served;
use super::wrk::{Took, Wrk};

/// Longest time until an extender is ready.
const READY_WITHIN: Duration = Duration::from_secs(600);

/// Pause between two checks.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How long the idle phase and the phase with reports last, while CPU time is counted.
const IDLE: Duration = Duration::from_secs(4);
const BUSY: Duration = Duration::from_secs(10);

/// Starts an extender that uses the API server at `api`; its files are in `folder`.
fn extender(api: &str, folder: &Path) -> Served {
    let kubeconfig = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{{name: c, cluster: {{server: \"http://{api}\"}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         users: [{{name: u, user: {{token: none}}}}]\n"
    );
    // Nodes stay in the ledger while their agents are silent.
    let keys = "report_stale_seconds: 3600\n";
    let path = folder.join("kubeconfig");
    std::fs::write(&path, kubeconfig).expect("the folder is writable");
    Served::extender(keys, path.to_str().expect("a folder with a plain name"), folder)
}

/// A cluster with its extender. What ends first stands first.
struct Bed {
    extender: Served,
    /// Of the extender's files.
    _folder: TempDir,
    agents: Agents,
    stage: Arc<Stage>,
    runtime: Runtime,
    clock: Clock,
    names: Vec<String>,
}

/// How the start went; times in seconds.
struct Started {
    /// From the start of the process until all lists are in the ledger.
    listed: f64,
    /// From the making of the last page until then.
    after_last_page: f64,
    /// From the first of all first reports until the extender is ready.
    heard: f64,
    /// CPU time of the extender for all of that.
    cpu: f64,
    /// Peak memory with the lists in the ledger, before an agent has connected.
    listed_mib: u64,
    /// Peak memory after all agents have connected and reported.
    ready_mib: u64,
}

impl Bed {
    fn start(nodes: usize) -> (Self, Started) {
        let clock = Clock::start();
        let runtime = Runtime::new().expect("threads can be started");
        let (stage, api) = runtime.block_on(api::start(nodes, clock));
        let begun = clock.precise();
        let since = |at: Duration| (at - begun).as_secs_f64();
        let folder = tempfile::tempdir().expect("there is room for temporary files");
        let extender = extender(&api, folder.path());
        until("it listens", clock, || extender.get("/healthz").is_some());
        let says = |text: &str| extender.get("/readyz").is_some_and(|said| said.contains(text));
        until("pods and nodes are listed", clock, || says("have not reported yet"));
        let listed = since(clock.precise());
        let last_page = since(stage.listed().expect("it logs that all is listed"));
        let (listed_cpu, listed_mib) = (extender.cpu(), extender.peak_mib());
        let guard = runtime.enter();
        let agents = Agents::start(&extender.agents, nodes);
        drop(guard);
        until("the agents are connected", clock, || agents.are_connected());
        let (greeted, connected_cpu) = (clock.precise(), extender.cpu());
        agents.greet();
        until("it is ready", clock, || says("200 OK"));
        let heard = (clock.precise() - greeted).as_secs_f64();
        until("all agents have greeted", clock, || agents.have_greeted());
        let started = Started {
            listed,
            after_last_page: listed - last_page,
            heard,
            cpu: listed_cpu + extender.cpu() - connected_cpu,
            listed_mib,
            ready_mib: extender.peak_mib(),
        };
        let names = (0..nodes).map(node_name).collect();
        (Self { extender, _folder: folder, agents, stage, runtime, clock, names }, started)
    }

    /// What a verb takes.
    fn took(&self, wrk: &Wrk, (verb, about): (&str, About)) -> Option<Took> {
        wrk.ask(about.bodies(&self.names));
        wrk.measure(&self.extender.address, &format!("/v1/{verb}"))
    }

    /// What the actions of the agents cost: share of a core, CPU time each, and how many a
    /// second.
    fn cost(&self, begin: impl FnOnce(&Agents)) -> String {
        let idle = self.extender.load(self.clock, IDLE);
        begin(&self.agents);
        std::thread::sleep(Duration::from_secs(self.agents.every));
        let (before, started) = (self.agents.taken(), self.clock.precise());
        let busy = self.extender.load(self.clock, BUSY);
        let taken = self.agents.taken() - before;
        let rate = taken as f64 / (self.clock.precise() - started).as_secs_f64();
        self.agents.hush();
        let (percent, each) = ((busy - idle) * 100.0, (busy - idle) * 1e6 / rate);
        format!("{percent:.1} % of a core, {each:.0} µs each, {rate:.0} a second")
    }
}

fn until(what: &str, clock: Clock, is_so: impl Fn() -> bool) {
    let started = clock.precise();
    while !is_so() {
        assert!(clock.precise() - started < READY_WITHIN, "not in time: {what}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The load while a verb is measured.
const BESIDE: [&str; 3] =
    ["nothing beside it", "each node reports", "each node reports, 50 binds a second"];

/// Verbs and their request bodies.
const VERBS: [(&str, About); 3] =
    [("filter", About::All), ("prioritize", About::All), ("prioritize", About::Few)];

/// The most expensive answer, measured without other load.
const NOWHERE: (&str, About) = ("filter", About::NothingFits);

/// What a question is about.
#[derive(Clone, Copy)]
enum About {
    /// All nodes, and each request fits on some of them.
    All,
    /// All nodes, for requests that fit on none: each is named with its reason.
    NothingFits,
    /// The nodes that *filter* leaves to *prioritize*, if nothing else is configured.
    Few,
}

/// How many these are.
const KEPT: usize = 50;

impl About {
    /// For a line of the table.
    fn text(self) -> String {
        match self {
            Self::All => String::new(),
            Self::NothingFits => " for pods that fit on no node".to_owned(),
            Self::Few => format!(" about {KEPT} nodes"),
        }
    }

    fn bodies(self, names: &[String]) -> Vec<Vec<u8>> {
        match self {
            Self::All => bodies(names),
            // One GPU of each node is free.
            Self::NothingFits => bodies_of(names, |number| {
                format!(
                    r#""gpu-fraction":"1","gpu-fraction-num-devices":"{}""#,
                    2 + number % (GPUS - 1)
                )
            }),
            Self::Few => bodies(&names[..KEPT]),
        }
    }
}

/// The lines of the table.
pub(crate) fn measure(sizes: &[usize]) -> Vec<Row> {
    let mut start = Row::new(
        "an extender alone: from its start to the lists in the ledger; first reports of all nodes to \
         ready; its CPU time for both",
        "≤ 1 s without the API server",
    );
    let mut memory = Row::new(
        "an extender alone: peak memory with the lists in the ledger; with reports of all agents",
        "≤ 150 MiB",
    );
    let mut reports = Row::new("an extender alone: reports over HTTP", "≤ 10 % of a core");
    let mut knocks = Row::new(
        "an extender alone: a path that is not there, as often, over the same connections (what HTTP costs)",
        "",
    );
    let mut at_end = Row::new("an extender alone: peak memory at the end of all this", "≤ 150 MiB");
    let verb_row = |(verb, about): (&str, About), beside: &str| {
        let about = about.text();
        let what = format!("an extender alone: `{verb}`{about}, whole HTTP call, {beside}");
        Row::new(&what, "median ≤ 250 µs, p99 ≤ 1 ms")
    };
    let mut nowhere = verb_row(NOWHERE, BESIDE[0]);
    let mut verbs: Vec<Row> =
        BESIDE.iter().flat_map(|beside| VERBS.map(|verb| verb_row(verb, beside))).collect();
    let wrk = Wrk::find();
    for &nodes in sizes {
        eprintln!("an extender alone: {nodes} nodes");
        let (bed, took) = Bed::start(nodes);
        let Started { listed, after_last_page, heard, cpu, listed_mib, ready_mib } = took;
        start.measured.push((
            nodes,
            format!(
                "{listed:.2} s, {after_last_page:.2} s of it after the last page was made; \
                 {heard:.2} s; {cpu:.2} s"
            ),
        ));
        let (pods, connections) = (nodes * PODS, bed.agents.connections);
        memory.measured.push((
            nodes,
            format!("{listed_mib} MiB, {pods} pods; {ready_mib} MiB, {connections} connections"),
        ));
        reports.measured.push((nodes, bed.cost(Agents::report)));
        knocks.measured.push((nodes, bed.cost(Agents::knock)));
        if let Some(wrk) = &wrk {
            if let Some(took) = bed.took(wrk, NOWHERE) {
                nowhere.measured.push((nodes, took.shown()));
            }
            under_load(&bed, wrk, nodes, &mut verbs);
            at_end.measured.push((nodes, format!("{} MiB", bed.extender.peak_mib())));
        }
    }
    let mut rows = vec![start, memory, reports, knocks, nowhere];
    rows.extend(verbs);
    rows.push(at_end);
    rows
}

/// Measures each verb with increasing load.
fn under_load(bed: &Bed, wrk: &Wrk, nodes: usize, rows: &mut [Row]) {
    for (beside, rows) in rows.chunks_mut(VERBS.len()).enumerate() {
        if beside > 0 {
            bed.agents.report();
        }
        let guard = bed.runtime.enter();
        let arrivals = (beside > 1)
            .then(|| Arrivals::start(Arc::clone(&bed.stage), &bed.extender.address, &bed.names));
        drop(guard);
        for (verb, row) in VERBS.into_iter().zip(rows) {
            let (started, before) = (bed.clock.precise(), arrivals.as_ref().map(Arrivals::bound));
            let Some(took) = bed.took(wrk, verb) else { continue };
            let mut cell = took.shown();
            if let Some((arrivals, before)) = arrivals.as_ref().zip(before) {
                let seconds = (bed.clock.precise() - started).as_secs_f64();
                let rate = (arrivals.bound() - before) as f64 / seconds;
                if rate < 45.0 {
                    cell.push_str(&format!(" ({rate:.0} binds a second)"));
                }
            }
            row.measured.push((nodes, cell));
        }
        bed.agents.hush();
        bed.agents.taken(); // all of them
    }
}
