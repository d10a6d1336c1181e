//! All nodes and pods of a cluster, read once, for commands that end. Processes that keep running
//! use [`crate::pod::watch`].

use std::fmt::Debug;

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::{Api, Client};
use serde::de::DeserializeOwned;

use crate::pod::host::host_offer;
use crate::pod::labels::{LabelledGpus, labelled_gpus};
use crate::pod::seen_pod::SeenPod;
use wire::units::HostAmount;

/// Objects per page, the same as `kubectl` uses.
const PAGE: u32 = 500;

/// What gpupack needs of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedNode {
    pub name: String,
    /// The CPU and memory that pods can request.
    pub host: HostAmount,
    /// The GPUs that its labels name.
    pub gpus: Option<LabelledGpus>,
}

impl ListedNode {
    /// Reads a Node object. Missing fields are empty.
    pub fn from_api(node: &Node) -> Self {
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        let amount =
            |name: &str| allocatable.and_then(|all| all.get(name)).map(|value| value.0.as_str());
        let labels = node.metadata.labels.as_ref();
        let label = |name: &str| labels.and_then(|all| all.get(name)).map(String::as_str);
        Self {
            name: node.metadata.name.clone().unwrap_or_default(),
            host: host_offer(amount),
            gpus: labelled_gpus(label, amount),
        }
    }
}

/// All nodes.
///
/// # Errors
/// Errors of the API server or of the connection.
pub fn nodes(client: Client) -> BoxFuture<'static, Result<Vec<ListedNode>, kube::Error>> {
    all(Api::<Node>::all(client), ListedNode::from_api).boxed()
}

/// All pods, also those that have ended.
///
/// # Errors
/// Errors of the API server or of the connection.
pub fn pods(client: Client) -> BoxFuture<'static, Result<Vec<SeenPod>, kube::Error>> {
    all(Api::<Pod>::all(client), SeenPod::from_api).boxed()
}

async fn all<K, Seen>(api: Api<K>, read: fn(&K) -> Seen) -> Result<Vec<Seen>, kube::Error>
where
    K: Clone + Debug + DeserializeOwned,
{
    let mut found = Vec::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = api.list(&page).await?;
        found.extend(list.items.iter().map(read));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(found),
        }
    }
}
