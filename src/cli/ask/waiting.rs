//! `gpupack waiting`: the waiting pods, their obstacles, and what would help.

use std::fmt::Write as _;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::cli::ask::explain::Line;
use crate::cli::base::connect;
use crate::cli::base::connect::{ServerArgs, is_name};
use crate::cli::base::failure::Failure;
use crate::cli::base::plain::{API_VERSION, LookArgs, Output, json, print, span, table, wrapped};

/// Flags of `gpupack waiting`.
#[derive(Debug, Args)]
pub struct WaitingArgs {
    /// Only pods of this namespace
    #[arg(short, long, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// Pods of all namespaces, as without --namespace
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Most pods to show
    #[arg(long, value_name = "COUNT", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,
    /// Form of the output.
    #[command(flatten)]
    look: LookArgs,
    /// Address of the extender.
    #[command(flatten)]
    server: ServerArgs,
}

/// The waiting pods, as read from the extender.
#[derive(Debug, Deserialize)]
struct Answer {
    waiting: u64,
    left_out: u64,
    pods: Vec<Waiting>,
}

/// The same as printed.
#[derive(Debug, Serialize)]
struct List {
    #[serde(rename = "apiVersion")]
    api_version: &'static str,
    kind: &'static str,
    waiting: u64,
    left_out: u64,
    items: Vec<Waiting>,
}

/// A waiting pod.
#[derive(Debug, Deserialize, Serialize)]
struct Waiting {
    pod: String,
    asks: String,
    seconds: u64,
    priority: i32,
    line: Option<Line>,
    blocked_by: String,
    reason: String,
    missing: String,
    nodes: u64,
    mend: Option<String>,
}

/// Runs `gpupack waiting`.
///
/// # Errors
/// No extender answers.
pub fn run(args: &WaitingArgs) -> Result<(), Failure> {
    connect::run(async {
        let mut path = format!("/v1/waiting?limit={}", args.limit);
        if let Some(namespace) = &args.namespace {
            if !is_name(namespace) {
                return Err(Failure::usage(format!("`{namespace}` is no name of a namespace")));
            }
            let _ = write!(path, "&namespace={namespace}");
        }
        let server = args.server.connect().await?;
        let Answer { waiting, left_out, pods } = server.ask(&path).await?;
        let list = List {
            api_version: API_VERSION,
            kind: "WaitingPodList",
            waiting,
            left_out,
            items: pods,
        };
        print(&match args.look.output {
            Output::Json => json(&list)?,
            Output::Table => text(&list, args.look.no_unicode),
        });
        Ok(())
    })
}

/// A row per pod, and below it what would help.
fn text(list: &List, no_unicode: bool) -> String {
    let row = |pod: &Waiting| {
        let line = pod.line.as_ref().map(|line| format!("{}/{}", line.place, line.of));
        let or_none = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
        let line = line.unwrap_or_default();
        vec![
            pod.pod.clone(),
            span(pod.seconds),
            or_none(&line),
            pod.blocked_by.replace(' ', "-"),
            or_none(&pod.asks),
        ]
    };
    let rows: Vec<_> = list.items.iter().map(row).collect();
    let table = table(&["POD", "SINCE", "LINE", "BLOCKED-BY", "ASK"], &[1, 2], rows);
    let mut text = String::new();
    for (at, line) in table.lines().enumerate() {
        let _ = writeln!(text, "{line}");
        let Some(pod) = at.checked_sub(1).and_then(|at| list.items.get(at)) else { continue };
        let why = if pod.missing.is_empty() { &pod.reason } else { &pod.missing };
        let arrow = if no_unicode { "  -> " } else { "  → " };
        text += &wrapped(arrow, pod.mend.as_ref().unwrap_or(why));
    }
    if list.items.is_empty() {
        text += "(none)\n";
    }
    if list.left_out > 0 {
        let _ =
            writeln!(text, "{} of {} pods are not shown: see --limit", list.left_out, list.waiting);
    }
    text
}
