//! `gpupack top`: what each node, GPU and tenant has, holds and uses now.

use std::cmp::Reverse;
use std::io;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use crate::cli::base::connect;
use crate::cli::base::connect::{Server, ServerArgs, is_name};
use crate::cli::base::failure::Failure;
use crate::cli::base::plain::{API_VERSION, LookArgs, Output, coloured, json, print, table};
use crate::cli::top::rows::Row;
use crate::cli::top::state::{GpuItem, List, Node, NodeItem, State, TenantItem};

/// Flags of `gpupack top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// What to show.
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Nodes: GPUs, what is allocated, the largest free part of one GPU
    #[command(visible_alias = "node")]
    Nodes {
        /// Order of the rows
        #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
        sort_by: NodeOrder,
        #[command(flatten)]
        common: Common,
    },
    /// GPUs, each with a bar of its tenants
    #[command(visible_alias = "gpu")]
    Gpus {
        /// Order of the rows
        #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
        sort_by: GpuOrder,
        #[command(flatten)]
        common: Common,
    },
    /// Pods that hold part of a GPU, with what they use
    #[command(visible_aliases = ["tenant", "pods"])]
    Tenants {
        /// Only pods of this namespace
        #[arg(short, long, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
        namespace: Option<String>,
        /// Pods of all namespaces, as without --namespace
        #[arg(short = 'A', long)]
        all_namespaces: bool,
        /// Order of the rows
        #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
        sort_by: TenantOrder,
        #[command(flatten)]
        common: Common,
    },
}

/// Flags of all three.
#[derive(Debug, Args)]
struct Common {
    /// Only this node
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Show it again and again, in place on a terminal
    #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2",
        value_parser = clap::value_parser!(u64).range(1..=3_600))]
    watch: Option<u64>,
    /// Form of the output.
    #[command(flatten)]
    look: LookArgs,
    /// Address of the extender.
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum NodeOrder {
    /// By name
    #[default]
    Name,
    /// The most allocated compute first
    Share,
    /// The most allocated memory first
    Mem,
    /// The largest free part of one GPU first
    FreeMax,
    /// The most tenants first
    Tenants,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum GpuOrder {
    /// By node and index
    #[default]
    Name,
    /// The most allocated compute first
    Share,
    /// The most allocated memory first
    Mem,
    /// The most memory in use first
    Used,
    /// The most free compute first
    Free,
    /// The most tenants first
    Tenants,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum TenantOrder {
    /// By namespace and name
    #[default]
    Name,
    /// The largest share first
    Share,
    /// The most allocated memory first
    Mem,
    /// The most memory in use first
    Used,
    /// By node and GPU
    Node,
}

/// Runs `gpupack top`.
///
/// # Errors
/// No extender answers, or there is no such node.
pub fn run(args: &TopArgs) -> Result<(), Failure> {
    connect::run(async {
        match &args.what {
            What::Nodes { sort_by, common } => {
                common.show(|nodes| node_rows(nodes, *sort_by)).await
            }
            What::Gpus { sort_by, common } => common.show(|nodes| gpu_rows(nodes, *sort_by)).await,
            What::Tenants { namespace, sort_by, common, .. } => {
                common.show(|nodes| tenant_rows(nodes, namespace.as_deref(), *sort_by)).await
            }
        }
    })
}

impl Common {
    /// Shows the rows once, or again and again until the output is closed.
    async fn show<R: Row>(&self, rows: impl Fn(&[Node]) -> Vec<R>) -> Result<(), Failure> {
        if let Some(node) = self.node.as_ref().filter(|node| !is_name(node)) {
            return Err(Failure::usage(format!("`{node}` is no name of a node")));
        }
        let server = self.server.connect().await?;
        let in_place = io::stdout().is_terminal() && self.look.output == Output::Table;
        let mut is_first = true;
        loop {
            match self.nodes(&server).await {
                Ok(nodes) => {
                    let text = self.text(&rows(&nodes), in_place)?;
                    // To the upper left corner, and clear from there to the end.
                    let again = if in_place && self.watch.is_some() { "\x1b[H\x1b[J" } else { "" };
                    if !print(&(again.to_owned() + &text)) {
                        return Ok(());
                    }
                }
                Err(failure) if is_first || !failure.is_passing() => return Err(failure),
                Err(failure) => {
                    let _ = writeln!(io::stderr(), "gpupack: {failure}; trying again");
                }
            }
            let Some(seconds) = self.watch else { return Ok(()) };
            is_first = false;
            tokio::time::sleep(Duration::from_secs(seconds)).await;
        }
    }

    async fn nodes(&self, server: &Server) -> Result<Vec<Node>, Failure> {
        match &self.node {
            Some(node) => Ok(vec![server.ask(&format!("/v1/state?node={node}")).await?]),
            None => Ok(server.ask::<State>("/v1/state").await?.nodes),
        }
    }

    fn text<R: Row>(&self, rows: &[R], in_place: bool) -> Result<String, Failure> {
        if self.look.output == Output::Json {
            return json(&List { api_version: API_VERSION, kind: R::KIND, items: rows });
        }
        let cells = rows.iter().map(|row| row.cells(self.look.no_unicode)).collect();
        let text = table(R::TITLES, R::RIGHT, cells);
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        if self.look.is_coloured() {
            for (line, row) in lines.iter_mut().skip(1).zip(rows) {
                *line = coloured(line, row.mood());
            }
        }
        if rows.is_empty() {
            lines.push("(none)".to_owned());
        }
        let height = terminal_size::terminal_size().map(|(_, rows)| usize::from(rows.0));
        if let Some(height) = height.filter(|_| in_place && self.watch.is_some())
            && lines.len() >= height.max(4)
        {
            let shown = height.max(4) - 2;
            let more = format!("{} more rows: the screen is full", lines.len() - shown);
            lines.truncate(shown);
            lines.push(more);
        }
        Ok(lines.join("\n") + "\n")
    }
}

fn node_rows(nodes: &[Node], order: NodeOrder) -> Vec<NodeItem> {
    let mut rows: Vec<NodeItem> = nodes.iter().map(NodeItem::of).collect();
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    rows.sort_by_key(|row| match order {
        NodeOrder::Name => Reverse(0),
        NodeOrder::Share => Reverse(row.booked_share_millionths),
        NodeOrder::Mem => Reverse(row.booked_mib),
        NodeOrder::FreeMax => Reverse(row.largest_free_share_millionths),
        NodeOrder::Tenants => Reverse(u64::try_from(row.tenants).unwrap_or(u64::MAX)),
    });
    rows
}

fn gpu_rows(nodes: &[Node], order: GpuOrder) -> Vec<GpuItem> {
    let of_node = |node: &Node| {
        let devices = node.devices.iter();
        devices.map(|device| GpuItem::of(node, device)).collect::<Vec<_>>()
    };
    let mut rows: Vec<GpuItem> = nodes.iter().flat_map(of_node).collect();
    rows.sort_by(|a, b| (&a.node, a.index, &a.id).cmp(&(&b.node, b.index, &b.id)));
    rows.sort_by_key(|row| match order {
        GpuOrder::Name => Reverse(0),
        GpuOrder::Share => Reverse(row.booked_share_millionths),
        GpuOrder::Mem => Reverse(row.booked_mib),
        GpuOrder::Used => Reverse(row.used_mib.unwrap_or(0)),
        GpuOrder::Free => Reverse(row.free_share_millionths),
        GpuOrder::Tenants => Reverse(u64::try_from(row.tenants).unwrap_or(u64::MAX)),
    });
    rows
}

fn tenant_rows(nodes: &[Node], namespace: Option<&str>, order: TenantOrder) -> Vec<TenantItem> {
    let mut rows: Vec<TenantItem> = Vec::new();
    for node in nodes {
        for device in &node.devices {
            rows.extend(device.tenants.iter().map(|one| TenantItem::of(node, device, one)));
        }
    }
    rows.retain(|row| namespace.is_none_or(|namespace| row.namespace == namespace));
    let place = |row: &TenantItem| (row.node.clone(), row.gpu_index, row.gpu_id.clone());
    rows.sort_by_cached_key(|row| (row.namespace.clone(), row.pod.clone(), place(row)));
    match order {
        TenantOrder::Name => {}
        TenantOrder::Node => rows.sort_by_cached_key(place),
        TenantOrder::Share => rows.sort_by_key(|row| Reverse(row.share_millionths)),
        TenantOrder::Mem => rows.sort_by_key(|row| Reverse(row.memory_mib)),
        TenantOrder::Used => rows.sort_by_key(|row| Reverse(row.used_mib.unwrap_or(0))),
    }
    rows
}
