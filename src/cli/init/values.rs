//! Values for the Helm chart that fit a cluster, with the reason for each.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::base::failure::clean;
use crate::base::reader::{Read, Unread};
use crate::doctor::finding::{count, lines, names, short};
use crate::doctor::objects::CLIENTS;
use crate::doctor::parts::kubernetes;
use crate::doctor::scheduler_file::SchedulerFile;
use crate::init::found_cluster::{Cluster, FoundNode, Platform, Taint};
use crate::init::memory_limit::choose;
use kube_api::config::values::is_key_of_kubernetes;
use kube_api::request::resources::MIG_PREFIX;
use wire::api::commands::CheckState;

/// Columns at which comments wrap.
const WIDTH: usize = 100;

/// The PriorityClass that the chart makes where no pod may have one of Kubernetes' own.
const OWN_CLASS: &str = "gpupack-critical";

/// Most taints that become tolerations.
const MOST_TAINTS: usize = 20;

/// The file that lists the resources which gpupack counts.
const SCHEDULER: &str = include_str!("../../../scheduler-config/second-scheduler.yaml");

/// YAML in the making.
#[derive(Default)]
struct Sheet(String);

impl Sheet {
    /// A comment, in lines.
    fn note(&mut self, indent: usize, text: &str) {
        let first = format!("{:indent$}#", "");
        let mut line = first.clone();
        for word in clean(text).split_whitespace() {
            if line.chars().count() + 1 + word.chars().count() > WIDTH && line != first {
                let _ = writeln!(self.0, "{line}");
                line.clone_from(&first);
            }
            let _ = write!(line, " {word}");
        }
        let _ = writeln!(self.0, "{line}");
    }

    /// A line as it is.
    fn line(&mut self, text: &str) {
        let _ = writeln!(self.0, "{text}");
    }
}

/// A text as a value: JSON is YAML.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Why something is not known.
fn unknown(what: &str, why: &Unread) -> String {
    match why {
        Unread::Absent => format!("{what}: not found."),
        Unread::Forbidden(right) => format!("{what}: not known; it needs the right to {right}."),
        Unread::Failed(text) => format!("{what}: not known: {}", short(text)),
    }
}

/// The values, as a file.
pub(crate) fn values(cluster: &Cluster) -> String {
    let mut sheet = Sheet::default();
    head(&mut sheet, cluster);
    sheet.line("");
    sheet.note(0, "Where your nodes pull what deploy/images/build made; agents.image is below.");
    sheet.line("image:\n  repository: ghcr.io/gpupack/gpupack");
    scheduler(&mut sheet, cluster);
    certificates(&mut sheet, cluster);
    priority(&mut sheet, cluster);
    webhook(&mut sheet, cluster);
    memory_limit(&mut sheet, cluster);
    agents(&mut sheet, cluster);
    monitoring(&mut sheet, cluster);
    sheet.0
}

fn head(sheet: &mut Sheet, cluster: &Cluster) {
    sheet.note(
        0,
        "Values for the Helm chart of gpupack, made by `gpupack init`. Look at each line, then:",
    );
    sheet.line("#\n#   helm install gpupack deploy/helm/gpupack --namespace gpu-system --create-namespace \\\n#     --values FILE\n#   gpupack doctor\n#");
    for check in lines(kubernetes(&cluster.version)) {
        let advice = match (check.state, check.fix) {
            (CheckState::Ok, _) | (_, None) => String::new(),
            (_, Some(fix)) => format!(". {fix}"),
        };
        sheet.note(0, &format!("Kubernetes {}{advice}", check.found));
    }
    let (name, advice) = of_platform(cluster.platform());
    sheet.note(0, &format!("Platform: {name}. {advice}"));
    let nodes = match &cluster.nodes {
        Ok(nodes) => nodes,
        Err(why) => return sheet.note(0, &unknown("Nodes", why)),
    };
    let mut models: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for node in cluster.gpu_nodes() {
        let product =
            if node.seen.product.is_empty() { "unknown model" } else { &node.seen.product };
        let sum = models.entry(product).or_default();
        *sum = (sum.0 + 1, sum.1 + node.gpus);
    }
    let with_gpus = cluster.gpu_nodes().count();
    let models: Vec<String> = models
        .into_iter()
        .map(|(model, (nodes, gpus))| {
            format!("{gpus} × {} on {}", short(model), count(nodes, "node"))
        })
        .collect();
    let models = if models.is_empty() { "none".to_owned() } else { names(&models) };
    sheet.note(
        0,
        &format!("GPUs: {models}; {with_gpus} of {} have GPUs.", count(nodes.len(), "node")),
    );
    owners(sheet, cluster);
}

/// Who gives out the GPUs now.
fn owners(sheet: &mut Sheet, cluster: &Cluster) {
    let kubelet: Vec<&str> = cluster
        .gpu_nodes()
        .filter(|node| !node.seen.of_kubelet.is_empty())
        .map(|node| node.seen.name.as_str())
        .collect();
    if kubelet.is_empty() {
        return;
    }
    sheet.note(
        0,
        &format!(
            "A device plugin gives out the GPUs of {} now: {}. A node has one owner: turn the plugin off on \
             those that are to be gpupack's (docs/admission.md). With the GPU Operator: kubectl label node \
             NAME nvidia.com/gpu.deploy.device-plugin=false --overwrite",
            count(kubelet.len(), "node"),
            names(&kubelet)
        ),
    );
}

/// The name of a platform, and what matters there.
fn of_platform(platform: Platform) -> (&'static str, &'static str) {
    match platform {
        Platform::Unknown => (
            "not recognized",
            "Where the control plane is yours, gpupack can also run in place; the second kube-scheduler \
             works everywhere.",
        ),
        Platform::Eks => (
            "Amazon EKS",
            "The control plane is managed: a second kube-scheduler is the way. The security group of the \
             nodes must let the control plane reach the ports 8443 (webhook) and 8081 (queries).",
        ),
        Platform::Gke => (
            "Google GKE",
            "The control plane is managed: a second kube-scheduler is the way. In a private cluster, add a \
             firewall rule by which the control plane reaches the ports 8443 (webhook) and 8081 (queries). \
             Make GPU node pools without GKE's own device plugin (label \
             gke-no-default-nvidia-gpu-device-plugin=true), and install NVIDIA's GPU Operator.",
        ),
        Platform::Aks => (
            "Azure AKS",
            "The control plane is managed: a second kube-scheduler is the way. Make GPU node pools without \
             AKS' own driver and device plugin, and install NVIDIA's GPU Operator.",
        ),
        Platform::K3s => (
            "K3s or RKE2",
            "It makes the RuntimeClass nvidia where it finds NVIDIA's container toolkit.",
        ),
        Platform::OpenShift => (
            "OpenShift",
            "The agents need a SecurityContextConstraint that allows hostPID: bind `privileged` to their \
             ServiceAccount.",
        ),
    }
}

/// Whether somebody else runs the control plane.
fn is_managed(cluster: &Cluster) -> bool {
    matches!(cluster.platform(), Platform::Eks | Platform::Gke | Platform::Aks)
}

/// `v1.36.3` of `v1.36.3-eks-1234`.
fn release(git_version: &str) -> Option<String> {
    let numbers = git_version.strip_prefix('v')?;
    let end = numbers.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(numbers.len());
    let release = numbers[..end].trim_end_matches('.');
    let parts: Vec<&str> = release.split('.').collect();
    let are_numbers = parts.iter().all(|part| !part.is_empty() && part.len() <= 6);
    (parts.len() == 3 && are_numbers).then(|| format!("v{release}"))
}

fn scheduler(sheet: &mut Sheet, cluster: &Cluster) {
    sheet.line("");
    let why = match (&cluster.has_own_scheduler, is_managed(cluster)) {
        (_, true) => {
            "The control plane cannot be changed, so GPU pods have a kube-scheduler of their own."
        }
        (Ok(true), _) => {
            "GPU pods have a kube-scheduler of their own, which leaves all others alone. kube-scheduler is a \
             pod of this cluster, so gpupack in place is possible, too: scheduler-config/in-place.yaml."
        }
        (Ok(false) | Err(_), _) => {
            "GPU pods have a kube-scheduler of their own, which leaves all others alone."
        }
    };
    sheet.note(0, why);
    sheet.line("inPlace: false");
    let tag = cluster.version.as_ref().ok().and_then(|info| release(&info.git_version));
    let mut section = Sheet::default();
    match tag {
        Some(tag) => {
            section.note(2, "The version of the API server.");
            section.line(&format!("  image:\n    tag: {}", quoted(&tag)));
        }
        None => section.note(
            2,
            "image.tag: without it, the version of the API server, which is not known here.",
        ),
    }
    let profiles: BTreeSet<&String> =
        cluster.gpu_nodes().flat_map(|node| &node.seen.mig_profiles).collect();
    let shipped = SchedulerFile::from_yaml(SCHEDULER).ok();
    let is_listed = |name: &str| {
        shipped
            .as_ref()
            .is_some_and(|file| file.profiles.iter().all(|profile| profile.ignores(name)))
    };
    let unlisted = profiles.into_iter().map(|profile| format!("{MIG_PREFIX}{profile}"));
    let unlisted: Vec<String> =
        unlisted.filter(|name| !is_listed(name)).take(50).map(|name| quoted(&name)).collect();
    if !unlisted.is_empty() {
        section.note(2, "MIG profiles of this cluster that the shipped list lacks.");
        section.line(&format!("  ignoredResources: [{}]", unlisted.join(", ")));
    }
    open(sheet, "scheduler", &section);
}

/// A section, also if only comments are in it: they then stand alone.
fn open(sheet: &mut Sheet, name: &str, section: &Sheet) {
    let is_empty = section.0.lines().all(|line| line.trim_start().starts_with('#'));
    if !is_empty {
        sheet.line(&format!("{name}:"));
    }
    sheet.0 += &section.0;
}

fn certificates(sheet: &mut Sheet, cluster: &Cluster) {
    sheet.line("");
    match cluster.has_group("cert-manager.io") {
        Some(true) => {
            sheet.note(0, "cert-manager is there: it makes and renews the certificates.");
            sheet.line("certificates:\n  source: cert-manager");
        }
        Some(false) => {
            sheet.note(
                0,
                "There is no cert-manager: the extender makes and renews the certificates.",
            );
            sheet.line("certificates:\n  source: gpupack");
        }
        None => {
            sheet.note(0, &unknown_groups(&cluster.groups, "certificates.source", "cert-manager"))
        }
    }
}

fn unknown_groups(groups: &Read<BTreeSet<String>>, key: &str, product: &str) -> String {
    let what = format!("{key}: whether {product} is there");
    groups.as_ref().err().map_or(what.clone(), |why| unknown(&what, why))
}

fn priority(sheet: &mut Sheet, cluster: &Cluster) {
    if cluster.platform() == Platform::Gke {
        sheet.line("");
        sheet.note(
            0,
            "GKE allows system classes outside kube-system only where a ResourceQuota names them, so gpupack \
             has a class of its own, which its agents use as well.",
        );
        sheet.line(&format!("priorityClass:\n  name: {OWN_CLASS}\n  create: true"));
    }
}

fn webhook(sheet: &mut Sheet, cluster: &Cluster) {
    sheet.line("");
    let mut section = Sheet::default();
    match &cluster.operators {
        Ok(namespaces) if namespaces.is_empty() => {
            section.note(
                2,
                "No GPU Operator was found (pods with the label app=gpu-operator). Name the namespace of what \
                 installs your driver, if it is in pods: they need every GPU.",
            );
            section.line("  excludedNamespaces: []");
        }
        Ok(namespaces) => {
            let named: Vec<String> = namespaces.iter().take(10).map(|name| quoted(name)).collect();
            section.note(2, "The GPU Operator is there: its own pods need every GPU.");
            section.line(&format!("  excludedNamespaces: [{}]", named.join(", ")));
        }
        Err(why) => section.note(2, &unknown("excludedNamespaces: the GPU Operator's", why)),
    }
    let taints = cluster.gpu_nodes().flat_map(|node| &node.taints);
    let tolerated = taints.filter(|taint| is_tolerated_by_the_webhook(taint));
    let keys: BTreeSet<&str> = tolerated.map(|taint| taint.key.as_str()).collect();
    if !keys.is_empty() {
        let keys: Vec<String> = keys.into_iter().take(MOST_TAINTS).map(quoted).collect();
        section.note(2, "The taints of the GPU nodes: GPU pods and agents get their tolerations.");
        section.line(&format!("  toleratedTaints: [{}]", keys.join(", ")));
    }
    open(sheet, "webhook", &section);
}

/// Whether the webhook can let GPU pods onto nodes with this taint.
fn is_tolerated_by_the_webhook(taint: &Taint) -> bool {
    taint.effect == "NoSchedule" && !is_key_of_kubernetes(&taint.key)
}

/// Whether neither the webhook nor a shipped file tolerates this taint.
fn is_left_to_users(taint: &Taint) -> bool {
    let is_known = taint.key.starts_with("node.kubernetes.io/") || taint.key == "nvidia.com/gpu";
    !is_known && !is_tolerated_by_the_webhook(taint)
}

/// Who holds memory on shared GPUs.
fn memory_limit(sheet: &mut Sheet, cluster: &Cluster) {
    let choice = choose(cluster);
    sheet.line("");
    sheet.note(0, &choice.reason);
    sheet.line(&format!("config:\n  webhook:\n    memory_limit: {}", choice.limit));
}

fn agents(sheet: &mut Sheet, cluster: &Cluster) {
    sheet.line("");
    let mut section = Sheet::default();
    let labeled = cluster.gpu_nodes().filter(|node| node.seen.has_gpus).count();
    let all = cluster.gpu_nodes().count();
    if labeled < all {
        let text = format!(
            "{} with GPUs without the label nvidia.com/gpu.present, which chooses the agents' nodes: install \
             GPU feature discovery (the GPU Operator brings it), or set nodeSelector.",
            count(all - labeled, "node")
        );
        section.note(2, &text);
    }
    section.line("  image:\n    repository: ghcr.io/gpupack/gpupack-agent");
    if cluster.platform() == Platform::Gke {
        section.line(&format!("  priorityClassName: {OWN_CLASS}"));
    }
    clients(&mut section, cluster);
    let taints = cluster.gpu_nodes().flat_map(|node| &node.taints);
    let taints: BTreeSet<&Taint> = taints.filter(|taint| is_left_to_users(taint)).collect();
    if !taints.is_empty() {
        section.note(
            2,
            "Other taints of the GPU nodes. GPU pods need these tolerations in their templates, too.",
        );
        section.line("  tolerations:");
        section.line("    - {key: nvidia.com/gpu, operator: Exists}");
        for taint in taints.iter().take(MOST_TAINTS) {
            let (key, effect) = (quoted(&taint.key), quoted(&taint.effect));
            section.line(&format!("    - {{key: {key}, operator: Exists, effect: {effect}}}"));
        }
    }
    match &cluster.runtime_classes {
        Ok(classes) if classes.contains("nvidia") => section.line("  runtimeClassName: nvidia"),
        Ok(_) => section.note(
            2,
            "There is no RuntimeClass nvidia: install NVIDIA's container toolkit or the GPU Operator first. \
             Neither agents nor GPU pods can be created without it.",
        ),
        Err(why) => section.note(2, &unknown("runtimeClassName", why)),
    }
    if cluster.operators.as_ref().is_ok_and(|namespaces| !namespaces.is_empty()) {
        section.note(
            2,
            "The GPU Operator writes a file when driver and toolkit of a node are set up; a container that is made \
             before has no library. Take this out if agents run on nodes with nvidia.com/gpu.deploy.operands=false: \
             there it never comes.",
        );
        section.line("  waitForToolkit: true");
    }
    if choose(cluster).limit == "driver" {
        section.note(2, "Only privileged agents can verify the limits of the driver.");
        section.line("  privileged: true");
    }
    if cluster.has_group("monitoring.coreos.com") == Some(true) {
        section.line("  metrics: true");
    }
    open(sheet, "agents", &section);
}

/// The label by which the GPU Operator stops agents while it replaces a driver. It labels nodes from 26.7 on, but
/// those of a GPUCluster. A selector that some node lacks would leave that one without an agent.
fn clients(section: &mut Sheet, cluster: &Cluster) {
    let (with, without): (Vec<&FoundNode>, Vec<&FoundNode>) =
        cluster.gpu_nodes().partition(|node| node.seen.stops_clients);
    if with.is_empty() {
        return;
    }
    if without.is_empty() {
        section.note(
            2,
            "The GPU Operator is of 26.7 or newer: it stops the agent of a node before it replaces the driver or \
             divides GPUs there, and starts it again.",
        );
        section.line(&format!("  nodeSelector:\n    {CLIENTS}: \"true\""));
        return;
    }
    let lacking: Vec<&str> = without.iter().map(|node| node.seen.name.as_str()).collect();
    section.note(
        2,
        &format!(
            "nodeSelector: the GPU Operator is of 26.7 or newer, but {} with GPUs without its label {CLIENTS}: {}. \
             Agents close the driver themselves while it is replaced; without that label they run on all nodes.",
            count(lacking.len(), "node"),
            names(&lacking)
        ),
    );
}

fn monitoring(sheet: &mut Sheet, cluster: &Cluster) {
    sheet.line("");
    match cluster.has_group("monitoring.coreos.com") {
        Some(true) => {
            sheet.note(
                0,
                "The Prometheus operator is there. Add the labels by which your Prometheus selects monitors and \
                 rules (monitoring.labels), and its account (rbac.metricsServiceAccounts).",
            );
            sheet.line("monitoring:\n  serviceMonitor: true\n  podMonitor: true\n  prometheusRule: true");
        }
        Some(false) => sheet.note(
            0,
            "There is no Prometheus operator: deploy/prometheus has a scrape configuration and the rules.",
        ),
        None => sheet.note(0, &unknown_groups(&cluster.groups, "monitoring", "the Prometheus operator")),
    }
}

#[cfg(test)]
mod tests;
