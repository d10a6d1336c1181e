//! Whether each node with GPUs has an agent that reports, and one owner of its GPUs.

use std::collections::{BTreeMap, BTreeSet};

use crate::api::commands::Check;
use crate::api::state::{Health, NodeReporting, State};
use crate::cli::base::reader::{Read, Unread};
use crate::cli::doctor::finding::{Findings, Of, count, names, short};
use crate::cli::doctor::objects::{OwnPod, SeenNode, Workload};

/// What is checked about the agents.
const AGENTS: Of = Of("agents");

/// What is checked about kubelets.
const KUBELETS: Of = Of("kubelets");

/// What is checked about pods whose deletion was requested.
const ENDS: Of = Of("pods that end");

/// From this minor version on, kubelet restarts a container whose CPU request is changed in place.
const RESIZES: u32 = 33;

/// What is checked about who gives out GPUs.
const OWNERS: Of = Of("owners of GPUs");

/// What the ledger of the extender says of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reported {
    /// Whether its agent reports.
    pub(crate) reporting: NodeReporting,
    /// Number of its devices.
    pub(crate) devices: usize,
    /// How many of them have a fault.
    pub(crate) unhealthy: usize,
}

/// The ledger, reduced to what the checks look at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reports {
    /// Each node of the cluster.
    pub(crate) nodes: BTreeMap<String, Reported>,
    /// MIG profiles of their instances.
    pub(crate) mig_profiles: BTreeSet<String>,
    /// Pods that hang, each with its node.
    pub(crate) hung: BTreeMap<String, String>,
}

impl Reports {
    /// Of `/v1/state`.
    pub(crate) fn of(state: State) -> Self {
        let mut reports = Self::default();
        for node in state.nodes {
            let profiles = node.devices.iter().filter_map(|device| device.mig_profile.clone());
            reports.mig_profiles.extend(profiles);
            let tenants = node.devices.iter().flat_map(|device| &device.tenants);
            let hung = tenants.filter(|tenant| tenant.hangs);
            reports.hung.extend(hung.map(|tenant| (tenant.pod.clone(), node.name.clone())));
            let unhealthy = node.devices.iter().filter(|it| it.health == Health::Unhealthy);
            let reported = Reported {
                reporting: node.state,
                devices: node.devices.len(),
                unhealthy: unhealthy.count(),
            };
            reports.nodes.insert(node.name, reported);
        }
        reports
    }
}

/// What is known of the nodes with GPUs.
pub(crate) struct Seen<'a> {
    /// All nodes.
    pub(crate) nodes: &'a Read<Vec<SeenNode>>,
    /// The agents' DaemonSet.
    pub(crate) daemon_set: &'a Read<Workload>,
    /// Their pods.
    pub(crate) pods: &'a Read<Vec<OwnPod>>,
    /// What the extender knows.
    pub(crate) reports: &'a Read<Reports>,
    /// Nodes whose GPUs NVIDIA's DRA driver gives out.
    pub(crate) of_dra: &'a Read<BTreeSet<String>>,
}

impl Seen<'_> {
    /// Nodes with GPUs that are gpupack's: an agent runs there, reports from there, or should.
    fn own(&self) -> BTreeSet<&str> {
        let mut own = BTreeSet::new();
        if let Ok(nodes) = self.nodes {
            let is_meant = |node: &&SeenNode| {
                node.has_gpus && (node.is_selected || node.of_kubelet.is_empty())
            };
            own.extend(nodes.iter().filter(is_meant).map(|node| node.name.as_str()));
        }
        if let Ok(pods) = self.pods {
            let placed = pods.iter().filter(|pod| !pod.node.is_empty());
            own.extend(placed.map(|pod| pod.node.as_str()));
        }
        if let Ok(reports) = self.reports {
            let with_gpus = reports
                .nodes
                .iter()
                .filter(|(_, it)| it.devices > 0 && it.reporting != NodeReporting::Gone);
            own.extend(with_gpus.map(|(name, _)| name.as_str()));
        }
        own
    }
}

/// The agents: a ready pod on each node, and reports.
pub(crate) fn agents(seen: &Seen<'_>) -> Findings {
    let own = seen.own();
    let mut found = Findings::new();
    if let Err(why) = seen.nodes {
        found.push(AGENTS.unread("the nodes", why));
    }
    match seen.daemon_set {
        Ok(_) => {}
        Err(Unread::Absent) => found.push(AGENTS.problem(
            "there is no DaemonSet of the agents",
            "install the agents (agents.enabled of the chart, or deploy/agent.yaml), or see agents.namespace of the \
             configuration",
        )),
        Err(why) => found.push(AGENTS.unread("their DaemonSet", why)),
    }
    match seen.pods {
        Ok(pods) => found.extend(pods_of(pods, &own)),
        Err(why) => found.push(AGENTS.unread("their pods", why)),
    }
    match seen.reports {
        Ok(reports) => found.extend(reports_of(reports, &own)),
        Err(Unread::Failed(why)) => found.push(AGENTS.not_checked(
            format!("what they report: {}", short(why)),
            "check that a replica leads; the user needs gpupack-view (deploy/rbac.yaml), and --server \
             or --service name an extender elsewhere",
        )),
        Err(why) => found.push(AGENTS.unread("what they report", why)),
    }
    if own.is_empty() && seen.nodes.is_ok() {
        found.push(AGENTS.warning(
            "no node with GPUs was found",
            "install GPU feature discovery, which labels nodes with nvidia.com/gpu.present, or label \
             them yourself",
        ));
    }
    if found.is_empty() {
        let devices = seen.reports.iter().flat_map(|it| it.nodes.values()).map(|it| it.devices);
        let (nodes, devices) = (count(own.len(), "node"), count(devices.sum(), "device"));
        found.push(AGENTS.ok(format!("each of {nodes} has an agent that reports; {devices}")));
    }
    found
}

fn pods_of(pods: &[OwnPod], own: &BTreeSet<&str>) -> Findings {
    let mut found = Findings::new();
    let with_pod: BTreeSet<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
    let without: Vec<&&str> = own.difference(&with_pod).collect();
    if !without.is_empty() {
        found.push(AGENTS.problem(
            format!(
                "{} with GPUs without an agent: {}",
                count(without.len(), "node"),
                names(&without)
            ),
            "compare the labels and taints of the node with nodeSelector and tolerations of the \
             DaemonSet (deploy/agent.yaml)",
        ));
    }
    let unready: Vec<&str> =
        pods.iter().filter(|pod| !pod.is_ready).map(|pod| pod.node.as_str()).collect();
    if !unready.is_empty() {
        found.push(AGENTS.problem(
            format!("{} not ready on {}", count(unready.len(), "agent"), names(&unready)),
            "kubectl describe pods -A -l app.kubernetes.io/name=gpupack,\
             app.kubernetes.io/component=agent, and read their logs",
        ));
    }
    found
}

fn reports_of(reports: &Reports, own: &BTreeSet<&str>) -> Findings {
    let mut found = Findings::new();
    let state_of = |name: &str| reports.nodes.get(name).map(|it| it.reporting);
    let is_silent = |name: &&&str| state_of(name) != Some(NodeReporting::Reporting);
    let silent: Vec<&&str> = own.iter().filter(is_silent).collect();
    if !silent.is_empty() {
        found.push(AGENTS.problem(
            format!("{} not reporting: {}", count(silent.len(), "node"), names(&silent)),
            "check the agent there (chapter GpupackNodesNotReporting of docs/runbook.md): such a node \
             takes no new GPU pods",
        ));
    }
    let empty = own.iter().filter(|name| {
        reports
            .nodes
            .get(**name)
            .is_some_and(|it| it.devices == 0 && it.reporting == NodeReporting::Reporting)
    });
    let empty: Vec<&&str> = empty.collect();
    if !empty.is_empty() {
        found.push(AGENTS.problem(
            format!("{} whose agent sees no GPU: {}", count(empty.len(), "node"), names(&empty)),
            "check the driver there (nvidia-smi), and that the agent runs under NVIDIA's RuntimeClass",
        ));
    }
    let faulty = reports.nodes.iter().filter(|(_, it)| it.unhealthy > 0);
    let faulty: Vec<&String> = faulty.map(|(name, _)| name).collect();
    if !faulty.is_empty() {
        found.push(AGENTS.warning(
            format!("GPUs with a fault on {}", names(&faulty)),
            "gpupack top gpus shows the faults, docs/runbook.md what to do",
        ));
    }
    found
}

/// Where gpupack restarts containers, kubelet does so; nothing where it restarts none.
pub(crate) fn kubelets(seen: &Seen<'_>) -> Findings {
    let own = seen.own();
    let (mut old, mut unknown, mut all) = (Vec::new(), Vec::new(), 0);
    let nodes = seen.nodes.iter().flatten();
    for node in nodes.filter(|node| node.moves_pods && own.contains(&*node.name)) {
        all += 1;
        match minor_of(&node.kubelet) {
            Some(..RESIZES) => old.push(node.name.as_str()),
            Some(_) => {}
            None => unknown.push(node.name.as_str()),
        }
    }
    let mut found = Findings::new();
    if !old.is_empty() {
        found.push(KUBELETS.problem(
            format!(
                "kubelet of {} is older than 1.{RESIZES} and cannot restart containers for borrow and mig_moves: {}",
                count(old.len(), "node"),
                names(&old)
            ),
            "upgrade kubelet there to 1.35, or move the nodes to a pool without these keys (docs/borrowing.md)",
        ));
    }
    if !unknown.is_empty() {
        found.push(KUBELETS.not_checked(
            format!("the version of kubelet on {}", names(&unknown)),
            "compare kubeletVersion in the status of the node with docs/borrowing.md",
        ));
    }
    if found.is_empty() && all > 0 {
        found.push(
            KUBELETS
                .ok(format!("1.{RESIZES} or newer on {} whose pods are moved", count(all, "node"))),
        );
    }
    found
}

/// Pods that should have ended still have GPUs; nothing if there are none.
pub(crate) fn ends(seen: &Seen<'_>) -> Findings {
    let Ok(Reports { hung, .. }) = seen.reports else { return Findings::new() };
    let named: Vec<String> = hung.iter().map(|(pod, node)| format!("{pod} on {node}")).collect();
    if named.is_empty() {
        return Findings::new();
    }
    vec![ENDS.warning(
        format!(
            "{} should have ended and still {} GPUs, so nothing is planned there: {}",
            count(named.len(), "pod"),
            if named.len() == 1 { "has" } else { "have" },
            names(&named)
        ),
        "look at kubelet on the node, and for processes that wait for the driver or a file system there",
    )]
}

/// The minor version of a kubelet of version 1.
fn minor_of(version: &str) -> Option<u32> {
    version.strip_prefix("v1.")?.split('.').next()?.parse().ok()
}

/// No GPU has two owners.
pub(crate) fn owners(seen: &Seen<'_>) -> Findings {
    let own = seen.own();
    let mut found = Findings::new();
    match seen.nodes {
        Err(why) => found.push(OWNERS.unread("what kubelet gives out", why)),
        Ok(nodes) => {
            let both: Vec<&SeenNode> = nodes
                .iter()
                .filter(|node| own.contains(&*node.name) && !node.of_kubelet.is_empty())
                .collect();
            found.extend(both_owners(&both));
            found.extend(changes_of_mig(nodes));
            found.extend(mig_managers(nodes));
        }
    }
    match seen.of_dra {
        Err(Unread::Absent) => {}
        Err(why) => found.push(OWNERS.unread("what DRA drivers give out", why)),
        Ok(of_dra) => {
            let both: Vec<&&str> = own.iter().filter(|name| of_dra.contains(**name)).collect();
            if !both.is_empty() {
                found.push(OWNERS.problem(
                    format!(
                        "NVIDIA's DRA driver gives out the GPUs of {} of gpupack: {}",
                        count(both.len(), "node"),
                        names(&both)
                    ),
                    "keep the DRA driver off gpupack's nodes (its kubelet plugin has a nodeSelector)",
                ));
            }
        }
    }
    if found.is_empty() {
        found.push(OWNERS.ok("only gpupack gives out the GPUs of its nodes"));
    }
    found
}

fn both_owners(both: &[&SeenNode]) -> Option<Check> {
    let first = both.first()?;
    let devices: Vec<String> = first
        .of_kubelet
        .iter()
        .map(|(name, amount)| format!("{}: {amount}", short(name)))
        .collect();
    let all: Vec<&str> = both.iter().map(|node| node.name.as_str()).collect();
    Some(OWNERS.problem(
        format!(
            "kubelet also gives out GPUs of {} of gpupack ({}; {})",
            count(both.len(), "node"),
            names(&all),
            names(&devices)
        ),
        format!(
            "turn off NVIDIA's device plugin there: kubectl label node {} \
             nvidia.com/gpu.deploy.device-plugin=false --overwrite",
            short(&first.name)
        ),
    ))
}

fn changes_of_mig(nodes: &[SeenNode]) -> Findings {
    let of_state = |state: &[&str]| -> Vec<&str> {
        let found = nodes.iter().filter(|node| state.contains(&node.mig_state.as_str()));
        found.map(|node| node.name.as_str()).collect()
    };
    let (busy, failed) = (of_state(&["pending", "rebooting"]), of_state(&["failed"]));
    let mut found = Findings::new();
    if !busy.is_empty() {
        found.push(OWNERS.warning(
            format!("MIG Manager is changing {}: {}", count(busy.len(), "node"), names(&busy)),
            "wait until nvidia.com/mig.config.state is `success`",
        ));
    }
    if !failed.is_empty() {
        found.push(OWNERS.warning(
            format!("MIG Manager failed on {}: {}", count(failed.len(), "node"), names(&failed)),
            "read its log there; it cannot change a GPU that pods use",
        ));
    }
    found
}

/// MIG Manager where gpupack makes the instances.
fn mig_managers(nodes: &[SeenNode]) -> Option<Check> {
    let both = nodes.iter().filter(|node| node.is_divided && node.has_mig_manager);
    let both: Vec<&str> = both.map(|node| node.name.as_str()).collect();
    let first = both.first()?;
    Some(OWNERS.problem(
        format!(
            "MIG Manager may change {} whose MIG instances gpupack makes: {}",
            count(both.len(), "node"),
            names(&both)
        ),
        format!(
            "turn MIG Manager off there: kubectl label node {} nvidia.com/gpu.deploy.mig-manager=false \
             nvidia.com/mig.config- --overwrite",
            short(first)
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::commands::CheckState::{NotChecked, Ok as Good, Problem, Warning};
    use crate::cli::doctor::finding::states;

    struct Bed {
        nodes: Read<Vec<SeenNode>>,
        daemon_set: Read<Workload>,
        pods: Read<Vec<OwnPod>>,
        reports: Read<Reports>,
        of_dra: Read<BTreeSet<String>>,
    }

    impl Bed {
        /// Two nodes of gpupack, one of kubelet, one without GPU.
        fn new() -> Self {
            let node = |name: &str, has_gpus, is_selected| SeenNode {
                name: name.to_owned(),
                has_gpus,
                is_selected,
                ..SeenNode::default()
            };
            let kubelet = SeenNode {
                of_kubelet: vec![("nvidia.com/gpu".to_owned(), 8)],
                ..node("kubelet", true, false)
            };
            let pod =
                |name: &str| OwnPod { node: name.to_owned(), is_ready: true, ..OwnPod::default() };
            let of = |reporting, devices| Reported { reporting, devices, unhealthy: 0 };
            let nodes = [
                ("a", of(NodeReporting::Reporting, 2)),
                ("b", of(NodeReporting::Reporting, 1)),
                ("cpu", of(NodeReporting::NeverReported, 0)),
                ("gone", of(NodeReporting::Gone, 1)),
            ];
            let nodes = nodes.map(|(name, it)| (name.to_owned(), it)).into();
            Self {
                nodes: Ok(vec![
                    node("a", true, true),
                    node("b", true, true),
                    kubelet,
                    node("cpu", false, false),
                ]),
                daemon_set: Ok(Workload::default()),
                pods: Ok(vec![pod("a"), pod("b")]),
                reports: Ok(Reports { nodes, ..Reports::default() }),
                of_dra: Err(Unread::Absent),
            }
        }

        fn seen(&self) -> Seen<'_> {
            let Self { nodes, daemon_set, pods, reports, of_dra } = self;
            Seen { nodes, daemon_set, pods, reports, of_dra }
        }
    }

    /// What the agents' check finds after a change.
    fn after(change: impl FnOnce(&mut Bed)) -> (Findings, Findings) {
        let mut bed = Bed::new();
        change(&mut bed);
        (agents(&bed.seen()), owners(&bed.seen()))
    }

    #[test]
    fn a_sound_fleet_has_no_finding() {
        let (agents, owners) = after(|_| {});
        assert_eq!((states(&agents), states(&owners)), (vec![Good], vec![Good]), "{agents:?}");
        assert!(agents[0].found.contains("each of 2 nodes"), "{agents:?}");
    }

    #[test]
    fn a_missing_unready_or_silent_agent_is_named() {
        let text = |findings: &Findings| findings[0].found.clone();
        let (found, _) = after(|bed| drop(bed.pods.as_mut().unwrap().pop()));
        assert_eq!((states(&found), text(&found).contains(": b")), (vec![Problem], true));
        let (found, _) = after(|bed| bed.pods.as_mut().unwrap()[0].is_ready = false);
        assert!(text(&found).contains("1 agent not ready on a"), "{found:?}");
        let (found, _) = after(|bed| {
            let nodes = &mut bed.reports.as_mut().unwrap().nodes;
            nodes.get_mut("a").unwrap().reporting = NodeReporting::NotReporting;
        });
        assert!(text(&found).contains("1 node not reporting: a"), "{found:?}");
        let (found, _) = after(|bed| {
            bed.reports.as_mut().unwrap().nodes.get_mut("a").unwrap().devices = 0;
        });
        assert!(text(&found).contains("sees no GPU: a"), "{found:?}");
        let (found, _) = after(|bed| {
            bed.reports.as_mut().unwrap().nodes.get_mut("a").unwrap().unhealthy = 1;
        });
        assert_eq!(states(&found), [Warning]);
        let (found, _) = after(|bed| bed.daemon_set = Err(Unread::Absent));
        assert_eq!(states(&found), [Problem]);
    }

    #[test]
    fn a_pod_that_hangs_is_named() {
        let mut bed = Bed::new();
        assert!(ends(&bed.seen()).is_empty());
        let reports = bed.reports.as_mut().unwrap();
        reports.hung.insert("team/old".to_owned(), "a".to_owned());
        let found = ends(&bed.seen());
        assert_eq!(states(&found), [Warning]);
        assert!(
            found[0].found.starts_with("1 pod should have ended and still has GPUs"),
            "{found:?}"
        );
        assert!(found[0].found.ends_with(": team/old on a"), "{found:?}");
    }

    #[test]
    fn what_cannot_be_read_is_not_checked() {
        let no = || Unread::Forbidden("list it".to_owned());
        let (agents, owners) = after(|bed| {
            bed.nodes = Err(no());
            bed.daemon_set = Err(no());
            bed.pods = Err(no());
            bed.reports = Err(no());
            bed.of_dra = Err(no());
        });
        assert_eq!(states(&agents), [NotChecked; 4]);
        assert_eq!(states(&owners), [NotChecked; 2]);
        let (agents, _) = after(|bed| {
            (bed.nodes, bed.pods, bed.reports) = (Ok(vec![]), Ok(vec![]), Ok(Reports::default()));
        });
        assert_eq!(states(&agents), [Warning], "no GPU anywhere");
    }

    #[test]
    fn two_owners_of_a_gpu_are_a_problem() {
        let (_, found) = after(|bed| {
            let node = &mut bed.nodes.as_mut().unwrap()[0];
            node.of_kubelet = vec![("nvidia.com/gpu".to_owned(), 2)];
        });
        assert_eq!(states(&found), [Problem]);
        assert!(found[0].found.contains("(a; nvidia.com/gpu: 2)"), "{found:?}");
        assert!(found[0].fix.as_ref().unwrap().contains("kubectl label node a"), "{found:?}");
        let (_, found) =
            after(|bed| bed.of_dra = Ok(["b".to_owned(), "kubelet".to_owned()].into()));
        assert_eq!((states(&found), found[0].found.contains(": b")), (vec![Problem], true));
        let (_, found) = after(|bed| bed.of_dra = Ok(["kubelet".to_owned()].into()));
        assert_eq!(states(&found), [Good]);
    }

    #[test]
    fn changes_of_mig_are_a_warning() {
        for (state, expected) in
            [("pending", Warning), ("failed", Warning), ("success", Good), ("", Good)]
        {
            let (_, found) =
                after(|bed| bed.nodes.as_mut().unwrap()[0].mig_state = state.to_owned());
            assert_eq!(states(&found), [expected], "{state}");
        }
    }

    #[test]
    fn an_old_kubelet_is_a_problem_where_containers_are_restarted() {
        let found = |moves_pods: bool, versions: [&str; 2]| {
            let mut bed = Bed::new();
            for (node, version) in bed.nodes.as_mut().unwrap().iter_mut().zip(versions) {
                (node.moves_pods, node.kubelet) = (moves_pods, version.to_owned());
            }
            kubelets(&bed.seen())
        };
        let old = found(true, ["v1.32.11-gke.100", "v1.33.0+k3s1"]);
        assert_eq!(states(&old), [Problem]);
        assert!(old[0].found.starts_with("kubelet of 1 node is") && old[0].found.ends_with(": a"));
        assert_eq!(states(&found(true, ["v1.35.0", "v1.33.1"])), [Good]);
        assert_eq!(states(&found(true, ["v1.9.0", ""])), [Problem, NotChecked]);
        assert_eq!(found(false, ["v1.32.0", ""]), []);
        let mut bed = Bed::new();
        bed.nodes.as_mut().unwrap()[2].moves_pods = true;
        assert_eq!(kubelets(&bed.seen()), [], "not a node of gpupack");
    }

    #[test]
    fn two_makers_of_instances_are_a_problem() {
        for (is_divided, has_mig_manager, expected) in
            [(true, true, Problem), (true, false, Good), (false, true, Good)]
        {
            let (_, found) = after(|bed| {
                let node = &mut bed.nodes.as_mut().unwrap()[0];
                (node.is_divided, node.has_mig_manager) = (is_divided, has_mig_manager);
            });
            assert_eq!(states(&found), [expected], "{is_divided} {has_mig_manager}");
        }
    }

    #[test]
    fn thousands_of_nodes_make_short_lines() {
        let (found, _) = after(|bed| {
            let node = |at| SeenNode {
                name: format!("node-{at}"),
                has_gpus: true,
                is_selected: true,
                ..SeenNode::default()
            };
            bed.nodes = Ok((0..5_000).map(node).collect());
        });
        let length = found.iter().map(|finding| finding.found.len()).max();
        assert!(length < Some(150), "{found:?}");
        assert!(found[0].found.contains("5000 nodes with GPUs without an agent"), "{found:?}");
    }
}
