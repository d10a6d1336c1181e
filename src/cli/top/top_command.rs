//! `gpupack top`: what each node, GPU, tenant and team has, holds and uses now.

use std::cmp::Reverse;
use std::io;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use serde::de::DeserializeOwned;

use crate::base::connect;
use crate::base::connect::ServerArgs;
use crate::base::failure::Failure;
use crate::base::plain::{LookArgs, Output, colored, print, table};
use crate::top::rows::TopRow;
use crate::top::sums::Sums;
use wire::api::commands::{DeviceItem, TenantItem};
use wire::api::page::{Team, TeamList};
use wire::api::state::{Node, NodeReporting, State};
use wire::ids::is_name;

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
        /// Fail if no node is there, or the agent of one does not report
        #[arg(long, conflicts_with = "watch")]
        require_reports: bool,
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
    /// Teams: what each may have of the GPUs, and what it has
    #[command(visible_alias = "team")]
    Teams {
        /// Order of the rows
        #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
        sort_by: TeamOrder,
        #[command(flatten)]
        shown: ShowArgs,
    },
}

/// Flags of all that show nodes.
#[derive(Debug, Args)]
struct Common {
    /// Only this node
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    #[command(flatten)]
    shown: ShowArgs,
}

/// Flags of all.
#[derive(Debug, Args)]
struct ShowArgs {
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum TeamOrder {
    /// By name
    #[default]
    Name,
    /// The most GPUs first
    Used,
    /// The most GPUs of over-quota pods first
    OverQuota,
    /// The most waiting pods first
    Waiting,
}

/// Runs `gpupack top`.
///
/// # Errors
/// No extender answers, or there is no such node.
pub fn run(args: &TopArgs) -> Result<(), Failure> {
    connect::run(async {
        match &args.what {
            What::Nodes { sort_by, require_reports, common } => {
                common.show(|nodes| node_rows(nodes, *sort_by)).await?;
                if *require_reports { common.all_report().await } else { Ok(()) }
            }
            What::Gpus { sort_by, common } => common.show(|nodes| gpu_rows(nodes, *sort_by)).await,
            What::Tenants { namespace, sort_by, common, .. } => {
                common.show(|nodes| tenant_rows(nodes, namespace.as_deref(), *sort_by)).await
            }
            What::Teams { sort_by, shown } => {
                shown.show("/v1/teams", |list: TeamList| team_rows(list.items, *sort_by)).await
            }
        }
    })
}

impl Common {
    /// Shows the rows of nodes.
    async fn show<R: TopRow>(&self, rows: impl Fn(Vec<Node>) -> Vec<R>) -> Result<(), Failure> {
        if let Some(node) = self.node.as_ref().filter(|node| !is_name(node)) {
            return Err(Failure::usage(format!("`{node}` is not a valid node name")));
        }
        self.shown.show(&self.path(), |state: State| rows(state.nodes)).await
    }

    fn path(&self) -> String {
        let query = self.node.as_ref().map(|node| format!("?node={node}")).unwrap_or_default();
        format!("/v1/state{query}")
    }

    /// Fails if no node is there, or the agent of one does not report.
    async fn all_report(&self) -> Result<(), Failure> {
        let state: State = self.shown.server.connect().await?.ask(&self.path()).await?;
        let is_silent = |node: &&Node| {
            matches!(node.state, NodeReporting::NotReporting | NodeReporting::NeverReported)
        };
        let silent: Vec<&str> =
            state.nodes.iter().filter(is_silent).map(|node| node.name.as_str()).collect();
        if !silent.is_empty() {
            let silent = silent.join(", ");
            return Err(Failure::other(format!(
                "the agents of these nodes do not report: {silent}"
            )));
        }
        match state.nodes.iter().any(|node| node.state == NodeReporting::Reporting) {
            true => Ok(()),
            false => Err(Failure::other("no GPU node reports: check the agents")),
        }
    }
}

impl ShowArgs {
    /// Shows the rows of an answer once, or again and again until the output is closed.
    async fn show<A: DeserializeOwned, R: TopRow>(
        &self,
        path: &str,
        rows: impl Fn(A) -> Vec<R>,
    ) -> Result<(), Failure> {
        let server = self.server.connect().await?;
        let in_place = io::stdout().is_terminal() && self.look.output == Output::Table;
        let mut is_first = true;
        loop {
            match server.ask::<A>(path).await {
                Ok(answer) => {
                    let text = self.text(rows(answer), in_place)?;
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

    fn text<R: TopRow>(&self, rows: Vec<R>, in_place: bool) -> Result<String, Failure> {
        if self.look.output == Output::Json {
            return R::json(rows);
        }
        let cells = rows.iter().map(|row| row.cells(self.look.no_unicode)).collect();
        let text = table(R::TITLES, R::RIGHT, cells);
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        if self.look.is_colored() {
            for (line, row) in lines.iter_mut().skip(1).zip(&rows) {
                *line = colored(line, row.mood());
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

fn node_rows(mut nodes: Vec<Node>, order: NodeOrder) -> Vec<Node> {
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    nodes.sort_by_cached_key(|node| {
        let sums = Sums::of(node);
        Reverse(match order {
            NodeOrder::Name => 0,
            NodeOrder::Share => sums.allocated.share_millionths,
            NodeOrder::Mem => sums.allocated.memory_mib,
            NodeOrder::FreeMax => sums.largest_free_share_millionths,
            NodeOrder::Tenants => u64::try_from(sums.tenants).unwrap_or(u64::MAX),
        })
    });
    nodes
}

fn gpu_rows(nodes: Vec<Node>, order: GpuOrder) -> Vec<DeviceItem> {
    let mut rows: Vec<DeviceItem> = Vec::new();
    for node in nodes {
        rows.extend(node.devices.into_iter().map(|device| DeviceItem {
            node: node.name.clone(),
            node_state: node.state,
            pool: node.pool.clone(),
            device,
        }));
    }
    rows.sort_by_cached_key(|row| (row.node.clone(), row.device.index, row.device.id.clone()));
    rows.sort_by_key(|DeviceItem { device, .. }| {
        Reverse(match order {
            GpuOrder::Name => 0,
            GpuOrder::Share => device.allocated.share_millionths,
            GpuOrder::Mem => device.allocated.memory_mib,
            GpuOrder::Used => device.used_mib.unwrap_or(0),
            GpuOrder::Free => device.free.share_millionths,
            GpuOrder::Tenants => u64::try_from(device.tenants.len()).unwrap_or(u64::MAX),
        })
    });
    rows
}

fn team_rows(mut rows: Vec<Team>, order: TeamOrder) -> Vec<Team> {
    rows.sort_by(|a, b| a.team.cmp(&b.team));
    rows.sort_by_key(|team| {
        Reverse(match order {
            TeamOrder::Name => 0,
            TeamOrder::Used => team.used_millionths,
            TeamOrder::OverQuota => team.over_quota_millionths,
            TeamOrder::Waiting => u64::try_from(team.waiting).unwrap_or(u64::MAX),
        })
    });
    rows
}

fn namespace_of(row: &TenantItem) -> &str {
    row.tenant.pod.split_once('/').map_or("", |(namespace, _)| namespace)
}

fn place_of(row: &TenantItem) -> impl Ord + use<> {
    (row.node.clone(), row.device_index, row.device_id.clone())
}

fn tenant_rows(nodes: Vec<Node>, namespace: Option<&str>, order: TenantOrder) -> Vec<TenantItem> {
    let mut rows: Vec<TenantItem> = Vec::new();
    for node in nodes {
        for device in node.devices {
            rows.extend(device.tenants.into_iter().map(|tenant| TenantItem {
                node: node.name.clone(),
                device_index: device.index,
                device_id: device.id.clone(),
                tenant,
            }));
        }
    }
    rows.retain(|row| namespace.is_none_or(|namespace| namespace_of(row) == namespace));
    rows.sort_by_cached_key(|row| {
        (namespace_of(row).to_owned(), row.tenant.pod.clone(), place_of(row))
    });
    match order {
        TenantOrder::Name => {}
        TenantOrder::Node => rows.sort_by_cached_key(place_of),
        TenantOrder::Share => {
            rows.sort_by_key(|row| Reverse(row.tenant.allocated.share_millionths))
        }
        TenantOrder::Mem => rows.sort_by_key(|row| Reverse(row.tenant.allocated.memory_mib)),
        TenantOrder::Used => rows.sort_by_key(|row| Reverse(row.tenant.used_mib.unwrap_or(0))),
    }
    rows
}
