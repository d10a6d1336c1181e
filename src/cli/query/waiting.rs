//! `gpupack waiting`: the waiting pods, their obstacles, and what would help.

use std::fmt::Write as _;

use clap::Args;

use crate::base::connect;
use crate::base::connect::ServerArgs;
use crate::base::failure::Failure;
use crate::base::plain::{LookArgs, Output, json, print, span, table, wrapped};
use crate::query::explain::words;
use wire::api::waiting::{WaitingPod, WaitingPodList};
use wire::ids::is_name;

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

/// Runs `gpupack waiting`.
///
/// # Errors
/// No extender answers.
pub fn run(args: &WaitingArgs) -> Result<(), Failure> {
    connect::run(async {
        let mut path = format!("/v1/waiting?limit={}", args.limit);
        if let Some(namespace) = &args.namespace {
            if !is_name(namespace) {
                return Err(Failure::usage(format!("`{namespace}` is not a valid namespace name")));
            }
            let _ = write!(path, "&namespace={namespace}");
        }
        let server = args.server.connect().await?;
        let list: WaitingPodList = server.ask(&path).await?;
        print(&match args.look.output {
            Output::Json => json(&list)?,
            Output::Table => text(&list, args.look.no_unicode),
        });
        Ok(())
    })
}

fn row_of(pod: &WaitingPod) -> Vec<String> {
    let queue = pod.queue.map(|place| format!("{}/{}", place.position, place.length));
    let request = Some(pod.request.clone()).filter(|request| !request.is_empty());
    let [queue, request] = [queue, request].map(|text| text.unwrap_or_else(|| "-".to_owned()));
    let blocked_by = words(pod.blocked_by).replace(' ', "-");
    vec![pod.pod.clone(), span(pod.age_seconds), queue, blocked_by, request]
}

/// A row per pod, and below it what would help.
fn text(list: &WaitingPodList, no_unicode: bool) -> String {
    let rows: Vec<_> = list.items.iter().map(row_of).collect();
    let table = table(&["POD", "AGE", "QUEUE", "BLOCKED-BY", "REQUEST"], &[1, 2], rows);
    let mut text = String::new();
    for (at, line) in table.lines().enumerate() {
        let _ = writeln!(text, "{line}");
        let Some(pod) = at.checked_sub(1).and_then(|at| list.items.get(at)) else { continue };
        let arrow = if no_unicode { "  -> " } else { "  → " };
        let why = match pod.missing.as_str() {
            "" => pod.reason.clone(),
            missing if missing == pod.reason => pod.reason.clone(),
            missing => format!("missing: {missing}"),
        };
        text += &wrapped(arrow, pod.suggestion.as_ref().unwrap_or(&why));
    }
    if list.items.is_empty() {
        text += "(none)\n";
    }
    if list.omitted > 0 {
        let _ =
            writeln!(text, "{} of {} pods are not shown: see --limit", list.omitted, list.total);
    }
    text
}
