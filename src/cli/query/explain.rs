//! `gpupack explain`: why a pod waits, and what would help.

use std::fmt::Write as _;

use clap::Args;

use crate::base::connect;
use crate::base::connect::ServerArgs;
use crate::base::failure::Failure;
use crate::base::plain::{LookArgs, Output, json, print, span, table, wrapped};
use wire::api::explain::{Explanation, Refusal};
use wire::api::waiting::Obstacle;
use wire::ids::is_name;

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
            let line = format!("`{}` is not a pod: write NAME, or NAMESPACE/NAME", args.pod);
            return Err(Failure::usage(line));
        }
        let path = format!("/v1/explain?pod={namespace}/{name}");
        let found: Explanation = server.ask(&path).await?;
        print(&match args.look.output {
            Output::Json => json(&found)?,
            Output::Table => text(&found),
        });
        Ok(())
    })
}

/// An obstacle in words.
pub(crate) const fn words(obstacle: Obstacle) -> &'static str {
    match obstacle {
        Obstacle::Node => "node",
        Obstacle::Agent => "agent",
        Obstacle::Gpu => "GPU",
        Obstacle::Kind => "kind",
        Obstacle::Pool => "pool",
        Obstacle::Model => "model",
        Obstacle::Isolation => "isolation",
        Obstacle::Memory => "memory",
        Obstacle::Compute => "compute",
        Obstacle::Devices => "devices",
        Obstacle::Health => "health",
        Obstacle::Kubelet => "kubelet",
        Obstacle::HostMemory => "host memory",
        Obstacle::Group => "group",
        Obstacle::Team => "team",
        Obstacle::Cpu => "CPU",
        Obstacle::Room => "kept room",
        Obstacle::KubeScheduler => "kube-scheduler",
        Obstacle::Request => "request",
    }
}

fn text(found: &Explanation) -> String {
    let mut text = wrapped("", &format!("{}: {}", found.pod, found.verdict));
    let mut facts = Vec::new();
    if !found.request.is_empty() {
        facts.push(format!("requests {}", found.request));
    }
    facts.extend(found.age_seconds.map(|seconds| format!("created {} ago", span(seconds))));
    facts.extend(
        found.queue.map(|at| format!("position {} of {} in the queue", at.position, at.length)),
    );
    facts.extend(found.blocked_by.map(|obstacle| format!("blocked by {}", words(obstacle))));
    if !facts.is_empty() {
        text += &wrapped("", &facts.join("; "));
    }
    if let Some(protection) = &found.protection {
        text += &wrapped("", protection);
    }
    if found.fitting_nodes > 0 && found.blocked_by.is_some() {
        text += &wrapped("fits on ", &found.fits_on.join(", "));
    }
    if !found.refusals.is_empty() {
        text.push('\n');
        text += &groups(&found.refusals);
    }
    list(&mut text, "Suggestions, the cheapest first:", &found.suggestions);
    let moves = found.moves.iter().map(|one| {
        let (from, to) = (&one.from.node, &one.to.node);
        let pod = if one.pod.is_empty() { "a pod of another team" } else { &one.pod };
        if from == to {
            return format!("{pod} to another device of node {to}");
        }
        format!("{pod} from node {from} to {to}")
    });
    list(&mut text, "Or these moves together:", &moves.collect::<Vec<_>>());
    list(&mut text, "What is not known:", &found.unknown);
    text
}

fn groups(refusals: &[Refusal]) -> String {
    let rows = refusals.iter().map(|group| {
        let lack = words(group.blocked_by).to_owned();
        vec![group.nodes.to_string(), lack, group.missing.clone(), group.closest_node.clone()]
    });
    let table = table(&["NODES", "LACK", "MISSING", "CLOSEST"], &[0], rows.collect());
    let mut text = String::new();
    for (at, line) in table.lines().enumerate() {
        let _ = writeln!(text, "{line}");
        let Some(group) = at.checked_sub(1).and_then(|at| refusals.get(at)) else { continue };
        let gpus = if group.gpus.is_empty() { "no GPU" } else { &group.gpus };
        let of = match group.pool.as_str() {
            "" => gpus.to_owned(),
            pool => format!("{gpus}, pool {pool}"),
        };
        text += &wrapped("       of ", &of);
    }
    text
}

fn list(text: &mut String, title: &str, items: &[String]) {
    if items.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n{title}");
    for item in items {
        *text += &wrapped("  - ", item);
    }
}
