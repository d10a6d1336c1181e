//! Which limit of GPU memory fits the drivers and container toolkits of a cluster: `webhook.memory_limit`.

use std::collections::BTreeSet;

use crate::base::reader::Read;
use crate::doctor::finding::names;
use crate::init::found_cluster::{Cluster, FoundNode};

/// The first driver that limits the memory of a container.
const FIRST_DRIVER: u64 = 615;

/// The first container toolkit that hands the limit to the driver: older ones ignore it, without a word.
const FIRST_TOOLKIT: ToolkitVersion = ToolkitVersion([1, 20, 1]);

/// Most versions or nodes that a reason names.
const NAMED: usize = 5;

/// Version of a container toolkit: major, minor, patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ToolkitVersion([u64; 3]);

impl ToolkitVersion {
    /// Of the image that the GPU Operator's toolkit pods run: `…/container-toolkit:v1.18.0-ubuntu20.04`.
    pub(crate) fn of_image(image: &str) -> Option<Self> {
        let (_, tag) = image.rsplit_once(':')?;
        let numbers = tag.strip_prefix('v').unwrap_or(tag).split('-').next()?;
        let mut parts = numbers.split('.').map(|part| part.parse().ok());
        let version = Self([parts.next()??, parts.next()??, parts.next()??]);
        parts.next().is_none().then_some(version)
    }
}

impl std::fmt::Display for ToolkitVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// A choice and its reason.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The value of `webhook.memory_limit`.
    pub(crate) limit: &'static str,
    pub(crate) reason: String,
}

/// Chooses the limit. A limit that one node cannot give is none: the container would be refused there, or would
/// run without.
pub(crate) fn choose(cluster: &Cluster) -> Choice {
    let lacks: Vec<String> = [lacking_driver(cluster), lacking_toolkit(&cluster.toolkits)]
        .into_iter()
        .flatten()
        .collect();
    if lacks.is_empty() {
        let reason = "Drivers and container toolkits limit the memory of each container. All nodes need cgroup v2: \
             on version 1 the toolkit refuses containers that share a GPU. Memory is held by the driver.";
        return Choice { limit: "driver", reason: reason.to_owned() };
    }
    let reason = format!(
        "No limit of the driver: {}. So nobody holds memory on a shared GPU, but gpupack reports who takes too much, \
         and evicts with config.guard.evict: true. For honest programs MPS can hold it: memory_limit: mps with \
         agents.mps: manage.",
        lacks.join("; ")
    );
    Choice { limit: "none", reason }
}

/// What the drivers lack.
fn lacking_driver(cluster: &Cluster) -> Option<String> {
    let nodes: Vec<&FoundNode> = cluster.gpu_nodes().collect();
    let older = nodes.iter().filter_map(|node| node.driver).filter(|major| *major < FIRST_DRIVER);
    let older: BTreeSet<String> = older.map(|major| format!("r{major}")).take(NAMED).collect();
    if !older.is_empty() {
        let older: Vec<String> = older.into_iter().collect();
        return Some(format!(
            "it begins with driver r{FIRST_DRIVER}, and nodes have {}",
            names(&older)
        ));
    }
    let is_known = !nodes.is_empty() && nodes.iter().all(|node| node.driver.is_some());
    (!is_known).then(|| {
        "not all GPU nodes name their driver (label nvidia.com/cuda.driver-version.major)"
            .to_owned()
    })
}

/// What the toolkits lack. Those that the GPU Operator runs are known, those on the host are not.
fn lacking_toolkit(toolkits: &Read<BTreeSet<String>>) -> Option<String> {
    let images = toolkits.as_ref().map(BTreeSet::len).unwrap_or(0);
    let versions = toolkits.iter().flatten().filter_map(|image| ToolkitVersion::of_image(image));
    let versions: BTreeSet<ToolkitVersion> = versions.collect();
    let older: Vec<String> = versions
        .iter()
        .filter(|version| **version < FIRST_TOOLKIT)
        .take(NAMED)
        .map(ToString::to_string)
        .collect();
    if !older.is_empty() {
        return Some(format!(
            "it begins with container toolkit {FIRST_TOOLKIT}, and {} runs, which would ignore it without a word",
            names(&older)
        ));
    }
    (versions.is_empty() || versions.len() < images).then(|| {
        format!("it takes container toolkit {FIRST_TOOLKIT}, whose version only the GPU Operator's pods name")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_images() {
        for (image, version) in [
            ("nvcr.io/nvidia/k8s/container-toolkit:v1.18.0-ubuntu20.04", Some([1, 18, 0])),
            ("mirror:5000/container-toolkit:v1.20.1", Some([1, 20, 1])),
            ("container-toolkit:1.19.0", Some([1, 19, 0])),
            ("container-toolkit", None),
            ("mirror:5000/container-toolkit", None),
            ("container-toolkit:latest", None),
            ("container-toolkit:v1.20", None),
            ("container-toolkit:v1.20.1.2", None),
            ("container-toolkit@sha256:0123", None),
            ("container-toolkit:v99999999999999999999.1.1", None),
        ] {
            assert_eq!(ToolkitVersion::of_image(image), version.map(ToolkitVersion), "{image}");
        }
    }
}
