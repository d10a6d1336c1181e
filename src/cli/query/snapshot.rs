//! `gpupack snapshot`: writes a cluster into the files that `gpupack simulate` replays.
//!
//! It reads once, from a live extender or from the API server, and changes nothing in the cluster.

use std::io;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hyper::Uri;

use crate::base::connect::get;
use crate::query::snapshot_state::{cluster, unsaid};
use crate::serve::extender::kube_config;
use kube_api::pod::list;
use kube_api::pod::list::ListedNode;
use kube_api::pod::seen_pod::SeenPod;
use runtime::http_client::plain_address;
use sim::snapshot::replace::replace;
use sim::snapshot::state::{ClusterGpu, ClusterNode, ClusterPod, RowNames, Snapshot};
use wire::api::state::State;
use wire::units::MemMib;

/// Longest time for an answer of the extender. For 5,000 nodes it takes a second.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The mark in the product name of a GPU that is cut into MIG instances, all of one profile.
const MIG_MARK: &str = "-MIG-";

/// Flags of `gpupack snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Read from the live extender at this address, for instance
    /// http://localhost:8001/apis/inspection.gpupack.dev/v1/cluster behind `kubectl proxy`
    #[arg(long, value_name = "URL", conflicts_with = "kubeconfig")]
    from: Option<String>,

    /// Read from the API server of this kubeconfig; without --from and this, from that of the pod's
    /// service account
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Write nodes into this file (CSV)
    #[arg(long, value_name = "FILE")]
    nodes: PathBuf,

    /// Write pods into this file (CSV)
    #[arg(long, value_name = "FILE")]
    pods: PathBuf,

    /// Write node-1, pod-1 and so on instead of names
    #[arg(long)]
    anonymous: bool,
}

/// The content of a source.
struct Cluster {
    nodes: Vec<ClusterNode>,
    pods: Vec<ClusterPod>,
    /// What the source does not report, with the number of cases.
    unsaid: Vec<(usize, &'static str)>,
}

/// Runs `gpupack snapshot`.
///
/// # Errors
/// A source that does not answer or has nothing to replay, or a file that cannot be written.
pub fn run(args: &SnapshotArgs) -> Result<()> {
    ensure!(args.nodes != args.pods, "--nodes and --pods name the same file: give each its own");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let cluster = runtime.block_on(async {
        match &args.from {
            Some(url) => query_extender(url).await,
            None => query_api_server(args.kubeconfig.as_deref()).await,
        }
    })?;
    let names = if args.anonymous { RowNames::Anonymous } else { RowNames::Kept };
    let unsaid = cluster.unsaid.into_iter().filter(|(cases, _)| *cases > 0);
    let snapshot = Snapshot::of(cluster.nodes, cluster.pods, names);
    ensure!(!snapshot.nodes.is_empty(), "no node with a GPU there: nothing is written");
    ensure!(!snapshot.pods.is_empty(), "no pod runs or waits there: nothing is written");
    let (nodes, pods) = (snapshot.nodes_csv()?, snapshot.pods_csv()?);
    replace(&[(&args.nodes, &nodes), (&args.pods, &pods)])?;
    let mut stderr = io::stderr().lock();
    let notes = snapshot.notes.iter().map(|(note, cases)| (*cases, note.to_string()));
    for (cases, note) in notes.chain(unsaid.map(|(cases, text)| (cases, text.to_owned()))) {
        // If stderr is closed, there is no reader left.
        let _ = writeln!(stderr, "{cases} {note}");
    }
    let (nodes, pods) = (snapshot.nodes.len(), snapshot.pods.len());
    let _ = writeln!(stderr, "wrote {nodes} nodes and {pods} pods");
    Ok(())
}

/// The cluster in the ledger of a live extender.
async fn query_extender(url: &str) -> Result<Cluster> {
    let base = plain_address(url).map_err(|fault| anyhow::anyhow!("--from {fault}"))?;
    let address: Uri = format!("{base}/v1/state").parse().context("--from is no address")?;
    let exchange = async { get(address).await.map_err(|error| anyhow::anyhow!(error)) };
    let (status, body) = tokio::time::timeout(TIMEOUT, exchange)
        .await
        .with_context(|| format!("`{url}` does not answer within {} s", TIMEOUT.as_secs()))?
        .with_context(|| format!("cannot query the extender at `{url}`"))?;
    ensure!(status.is_success(), "`{url}` answers with {status}: is it a gpupack extender?");
    let state: State = serde_json::from_slice(&body).with_context(|| {
        format!("the answer of `{url}` is not the state of a gpupack extender of this version")
    })?;
    let unsaid = unsaid(&state);
    let (nodes, pods) = cluster(&state);
    Ok(Cluster { nodes, pods, unsaid })
}

/// The cluster in the API server. Its GPUs are those in the labels of GPU feature discovery.
async fn query_api_server(kubeconfig: Option<&Path>) -> Result<Cluster> {
    let config = match kubeconfig {
        Some(_) => kube_config(kubeconfig).await,
        None => kube_config(None).await.context("name a source: --from or --kubeconfig"),
    }?;
    let client = kube::Client::try_from(config).context("cannot make a Kubernetes client")?;
    let nodes = list::nodes(client.clone()).await.context("cannot list nodes")?;
    let pods = list::pods(client).await.context("cannot list pods")?;
    let pods: Vec<SeenPod> = pods.into_iter().filter(|pod| !pod.life.is_terminal).collect();
    let refused = pods.iter().filter(|pod| pod.request.is_err()).count();
    Ok(Cluster {
        nodes: nodes.into_iter().map(cluster_node).collect(),
        pods: pods.into_iter().filter_map(cluster_pod).collect(),
        unsaid: vec![(refused, "pods with a rejected GPU request: left out")],
    })
}

fn cluster_node(node: ListedNode) -> ClusterNode {
    let mut seen = ClusterNode { name: node.name, host: node.host, ..ClusterNode::default() };
    let Some(gpus) = node.gpus else { return seen };
    let count = usize::try_from(gpus.count).unwrap_or(usize::MAX);
    if gpus.model.as_str().contains(MIG_MARK) {
        seen.mig_gpus = count;
    } else {
        let (model, memory): (String, MemMib) = (gpus.model.to_string(), gpus.memory);
        seen.gpus = vec![ClusterGpu { model, memory, ..ClusterGpu::default() }; count];
    }
    seen
}

/// The pod; `None` if its request is not valid.
fn cluster_pod(pod: SeenPod) -> Option<ClusterPod> {
    let created = u64::try_from(pod.life.created_unix_seconds).ok();
    Some(ClusterPod {
        name: pod.pod.name.to_string(),
        node: pod.node.map(|node| node.to_string()),
        host: pod.host,
        gpu: pod.request.ok()?,
        created_unix_seconds: created.filter(|at| *at > 0),
        priority: pod.scheduling.priority,
        held: None,
    })
}
