//! `gpupack explain`: why a pod waits, and what would help.

use std::fmt::Write as _;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::cli::base::connect;
use crate::cli::base::connect::{ServerArgs, is_name};
use crate::cli::base::failure::{Failure, clean};
use crate::cli::base::plain::{API_VERSION, LookArgs, Output, json, print, span, table, wrapped};

/// Flags of `gpupack explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The pod: NAME, or NAMESPACE/NAME
    pod: String,
    /// Its namespace, if POD names none [default: that of the kubeconfig's context]
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Form of the output.
    #[command(flatten)]
    look: LookArgs,
    /// Address of the extender.
    #[command(flatten)]
    server: ServerArgs,
}

/// Why a pod waits, as read from the extender and as printed.
#[derive(Debug, Deserialize, Serialize)]
struct Explanation {
    #[serde(rename(serialize = "apiVersion"), skip_deserializing)]
    api_version: String,
    #[serde(skip_deserializing)]
    kind: String,
    pod: String,
    verdict: String,
    asks: String,
    blocked_by: String,
    #[serde(default)]
    seconds: Option<u64>,
    #[serde(default)]
    line: Option<Line>,
    fitting_nodes: u64,
    fits_on: Vec<String>,
    refusals: Vec<Refusal>,
    mends: Vec<String>,
    #[serde(default)]
    moves: Vec<Move>,
    unknown: Vec<String>,
}

/// A position in line.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Line {
    pub(crate) place: u64,
    pub(crate) of: u64,
}

/// Similar nodes that refuse for one reason.
#[derive(Debug, Deserialize, Serialize)]
struct Refusal {
    nodes: u64,
    lacks: String,
    reason: String,
    missing: String,
    closest_node: String,
    pool: String,
    gpus: String,
    curable_by_room: bool,
}

/// A running pod that could move.
#[derive(Debug, Deserialize, Serialize)]
struct Move {
    pod: String,
    from: Place,
    to: Place,
}

/// A node and some of its devices.
#[derive(Debug, Deserialize, Serialize)]
struct Place {
    node: String,
    devices: Vec<String>,
}

/// Runs `gpupack explain`.
///
/// # Errors
/// No extender answers, or it does not know the pod.
pub fn run(args: &ExplainArgs) -> Result<(), Failure> {
    connect::run(async {
        let server = args.server.connect().await?;
        let namespace = args.namespace.as_deref().unwrap_or(&server.namespace);
        let (namespace, name) = args.pod.split_once('/').unwrap_or((namespace, &args.pod));
        if args.namespace.as_ref().is_some_and(|named| named != namespace) {
            return Err(Failure::usage(format!("`{}` is not in that --namespace", args.pod)));
        }
        if !is_name(namespace) || !is_name(name) {
            let line = format!("`{}` is no pod: write NAME, or NAMESPACE/NAME", args.pod);
            return Err(Failure::usage(line));
        }
        let path = format!("/v1/explain?pod={namespace}/{name}");
        let mut found: Explanation = server.ask(&path).await?;
        API_VERSION.clone_into(&mut found.api_version);
        "Explanation".clone_into(&mut found.kind);
        print(&match args.look.output {
            Output::Json => json(&found)?,
            Output::Table => found.text(),
        });
        Ok(())
    })
}

impl Explanation {
    fn text(&self) -> String {
        let mut text = wrapped("", &format!("{}: {}", self.pod, self.verdict));
        let mut facts = Vec::new();
        if !self.asks.is_empty() {
            facts.push(format!("asks for {}", self.asks));
        }
        facts.extend(self.seconds.map(|seconds| format!("waits for {}", span(seconds))));
        facts.extend(
            self.line.as_ref().map(|it| format!("place {} of {} in line", it.place, it.of)),
        );
        if !self.blocked_by.is_empty() {
            facts.push(format!("blocked by {}", self.blocked_by));
        }
        if !facts.is_empty() {
            text += &wrapped("", &facts.join("; "));
        }
        if self.fitting_nodes > 0 && !self.blocked_by.is_empty() {
            text += &wrapped("fits on ", &self.fits_on.join(", "));
        }
        if !self.refusals.is_empty() {
            text.push('\n');
            text += &self.groups();
        }
        self.list(&mut text, "What would help, the cheapest first:", &self.mends);
        let moves = self
            .moves
            .iter()
            .map(|one| format!("{} from node {} to {}", one.pod, one.from.node, one.to.node));
        self.list(&mut text, "Or these moves together:", &moves.collect::<Vec<_>>());
        self.list(&mut text, "What is not known:", &self.unknown);
        text
    }

    fn groups(&self) -> String {
        let row = |group: &Refusal| {
            let gpus = if group.gpus.is_empty() { "no GPU" } else { &group.gpus };
            let of = match group.pool.as_str() {
                "" => gpus.to_owned(),
                pool => format!("{gpus}, pool {pool}"),
            };
            vec![
                group.nodes.to_string(),
                group.lacks.clone(),
                group.missing.clone(),
                group.closest_node.clone(),
                of,
            ]
        };
        let rows: Vec<Vec<String>> = self.refusals.iter().map(row).collect();
        let (first, others): (Vec<_>, Vec<_>) = rows
            .into_iter()
            .map(|mut row| {
                let of = row.pop();
                (row, of)
            })
            .unzip();
        let table = table(&["NODES", "LACK", "MISSING", "CLOSEST"], &[0], first);
        let mut text = String::new();
        for (at, line) in table.lines().enumerate() {
            let _ = writeln!(text, "{line}");
            if let Some(Some(of)) = at.checked_sub(1).and_then(|at| others.get(at)) {
                text += &wrapped("       of ", &clean(of));
            }
        }
        text
    }

    fn list(&self, text: &mut String, title: &str, items: &[String]) {
        if items.is_empty() {
            return;
        }
        let _ = writeln!(text, "\n{title}");
        for item in items {
            *text += &wrapped("  - ", item);
        }
    }
}
