//! Whether each node with GPUs has an agent that reports, and one owner of its GPUs.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::reader::{Read, Unread};
use crate::doctor::finding::{Findings, Found, count, known, names, or_ok, short, there};
use crate::doctor::objects::{NodeSummary, OwnPod, WorkloadSummary};
use crate::doctor::table::*;
use wire::api::state::{Health, NodeReporting, State};

/// From this minor version on, kubelet restarts a container whose CPU request is changed in place.
const RESIZES: u32 = 33;

/// What the ledger of the extender says of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reported {
    pub(crate) reporting: NodeReporting,
    pub(crate) devices: usize,
    /// How many of them have a fault.
    pub(crate) unhealthy: usize,
    /// Whether its kernel has no module for CUDA.
    pub(crate) lacks_uvm: bool,
}

impl Reported {
    fn has_devices(&self) -> bool {
        self.devices > 0 && self.reporting != NodeReporting::Gone
    }

    fn is_reporting(&self) -> bool {
        self.reporting == NodeReporting::Reporting
    }
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
            let unhealthy = node.devices.iter().filter(|device| device.health == Health::Unhealthy);
            let (devices, unhealthy) = (node.devices.len(), unhealthy.count());
            let (reporting, lacks_uvm) = (node.state, node.lacks_uvm);
            let reported = Reported { reporting, devices, unhealthy, lacks_uvm };
            reports.nodes.insert(node.name, reported);
        }
        reports
    }

    /// Names of the nodes that are so.
    fn nodes_that(&self, is_so: impl Fn(&Reported) -> bool) -> impl Iterator<Item = &str> {
        let nodes = self.nodes.iter().filter(move |(_, reported)| is_so(reported));
        nodes.map(|(name, _)| name.as_str())
    }
}

/// What is known of the nodes with GPUs.
#[derive(Debug)]
pub(crate) struct ClusterFleet {
    pub(crate) nodes: Read<Vec<NodeSummary>>,
    pub(crate) daemon_set: Read<WorkloadSummary>,
    /// All DaemonSets of agents: parts of a cluster may have their own.
    pub(crate) agent_sets: Read<Vec<WorkloadSummary>>,
    pub(crate) pods: Read<Vec<OwnPod>>,
    pub(crate) reports: Result<Reports, String>,
    /// Nodes whose GPUs NVIDIA's DRA driver gives out.
    pub(crate) of_dra: Read<BTreeSet<String>>,
}

impl ClusterFleet {
    /// Nodes with GPUs that are gpupack's: an agent runs there, reports from there, or should.
    pub(crate) fn own(&self) -> BTreeSet<&str> {
        let meant = self
            .nodes_that(|node| node.has_gpus && (node.is_selected || node.of_kubelet.is_empty()));
        let placed = self.pods.iter().flatten().map(|pod| pod.node.as_str());
        let reported = self.reports.iter();
        let reported = reported.flat_map(|reports| reports.nodes_that(Reported::has_devices));
        meant.chain(placed.filter(|name| !name.is_empty())).chain(reported).collect()
    }

    /// Nodes from which an agent reports devices.
    pub(crate) fn reporting(&self) -> BTreeSet<&str> {
        let there = |node: &Reported| node.devices > 0 && node.is_reporting();
        self.reports.iter().flat_map(|reports| reports.nodes_that(there)).collect()
    }

    /// Names of the nodes that are so.
    fn nodes_that(&self, is_so: impl Fn(&NodeSummary) -> bool) -> impl Iterator<Item = &str> {
        let nodes = self.nodes.iter().flatten();
        nodes.filter(move |node| is_so(node)).map(|node| node.name.as_str())
    }

    /// Profiles of MIG instances, of agents and of kubelet.
    pub(crate) fn mig_profiles(&self) -> BTreeSet<String> {
        let reported = self.reports.iter().flat_map(|reports| reports.mig_profiles.iter().cloned());
        let nodes = self.nodes.iter().flatten().flat_map(|node| node.mig_profiles.iter().cloned());
        reported.chain(nodes).collect()
    }
}

/// The agents: a ready pod on each node, and reports.
pub(crate) fn agents(fleet: &ClusterFleet) -> Found {
    let own = fleet.own();
    let mut found = Findings::new();
    found.extend(known(&fleet.nodes, &NODES_WITH_GPUS).err());
    found.extend(there(&fleet.daemon_set, DAEMON_SET, NO_DAEMON_SET).err());
    match &fleet.pods {
        Ok(pods) => {
            let with_pod: BTreeSet<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
            found.extend(NO_AGENT.about(&own.difference(&with_pod).collect::<Vec<_>>()));
            let unready = pods.iter().filter(|pod| !pod.is_ready).map(|pod| pod.node.as_str());
            found.extend(UNREADY.about(&unready.collect::<Vec<_>>()));
        }
        Err(why) => found.push(AGENT_PODS.unread([], why)),
    }
    match &fleet.reports {
        Ok(reports) => {
            let heard: BTreeSet<&str> = reports.nodes_that(Reported::is_reporting).collect();
            found.extend(SILENT.about(&own.difference(&heard).collect::<Vec<_>>()));
            let empty = reports.nodes_that(|node| node.devices == 0 && node.is_reporting());
            let empty = empty.filter(|name| own.contains(name));
            found.extend(SEES_NO_GPU.about(&empty.collect::<Vec<_>>()));
            let faulty = reports.nodes_that(|node| node.unhealthy > 0);
            found.extend(FAULTY.about(&faulty.collect::<Vec<_>>()));
            let without = reports.nodes_that(|node| node.lacks_uvm && node.is_reporting());
            found.extend(NO_UVM.about(&without.collect::<Vec<_>>()));
        }
        Err(why) => found.push(NO_REPORTS.with([&short(why)])),
    }
    if own.is_empty() && fleet.nodes.is_ok() {
        found.push(NO_GPUS.with([]));
    }
    let reported = fleet.reports.iter().flat_map(|reports| reports.nodes.values());
    let devices = reported.map(|reported| reported.devices).sum();
    or_ok(found, || AGENTS_OK.with([&count(own.len(), "node"), &count(devices, "device")]))
}

/// Where gpupack restarts containers, kubelet does so; nothing where it restarts none.
pub(crate) fn kubelets(fleet: &ClusterFleet) -> Found {
    let own = fleet.own();
    let (mut old, mut unknown, mut all) = (Vec::new(), Vec::new(), 0);
    let nodes = fleet.nodes.iter().flatten();
    for node in nodes.filter(|node| node.moves_pods && own.contains(&*node.name)) {
        all += 1;
        match minor_of(&node.kubelet) {
            Some(..RESIZES) => old.push(&node.name),
            Some(_) => {}
            None => unknown.push(&node.name),
        }
    }
    let found = OLD_KUBELETS.about(&old).into_iter().chain(UNKNOWN_KUBELETS.about(&unknown));
    match all {
        0 => Ok(Findings::new()),
        _ => or_ok(found.collect(), || KUBELETS_OK.with([&count(all, "node")])),
    }
}

/// Pods that should have ended still have GPUs; nothing if there are none.
pub(crate) fn ends(fleet: &ClusterFleet) -> Found {
    let hung = fleet.reports.iter().flat_map(|reports| &reports.hung);
    let named: Vec<String> = hung.map(|(pod, node)| format!("{pod} on {node}")).collect();
    let verb = if named.len() == 1 { "has" } else { "have" };
    Ok(HUNG.about_with(&named, [&verb]).into_iter().collect())
}

/// The minor version of a kubelet of version 1.
fn minor_of(version: &str) -> Option<u32> {
    version.strip_prefix("v1.")?.split('.').next()?.parse().ok()
}

/// No GPU has two owners.
pub(crate) fn owners(fleet: &ClusterFleet) -> Found {
    let own = fleet.own();
    let mut found = Findings::new();
    found.extend(known(&fleet.nodes, &OF_KUBELET).err());
    let nodes = fleet.nodes.iter().flatten();
    let mut both = nodes.filter(|node| own.contains(&*node.name) && !node.of_kubelet.is_empty());
    if let Some(first) = both.next() {
        let devices =
            first.of_kubelet.iter().map(|(name, number)| format!("{}: {number}", short(name)));
        let devices = names(&devices.collect::<Vec<_>>());
        let all: Vec<&String> = [first].into_iter().chain(both).map(|node| &node.name).collect();
        found.extend(KUBELET_OWNS.about_with(&all, [&devices, &short(&first.name)]));
    }
    let in_state = |states: &[&str]| -> Vec<&str> {
        fleet.nodes_that(|node| states.contains(&node.mig_state.as_str())).collect()
    };
    found.extend(MIG_CHANGES.about(&in_state(&["pending", "rebooting"])));
    found.extend(MIG_FAILED.about(&in_state(&["failed"])));
    let managed = fleet.nodes_that(|node| node.is_divided && node.has_mig_manager);
    let managed: Vec<&str> = managed.collect();
    let first = short(managed.first().copied().unwrap_or_default());
    found.extend(MIG_MANAGED.about_with(&managed, [&first]));
    match &fleet.of_dra {
        Err(Unread::Absent) => {}
        Err(why) => found.push(OF_DRA.unread([], why)),
        Ok(of_dra) => {
            let both = own.iter().filter(|name| of_dra.contains(**name));
            found.extend(DRA_OWNS.about(&both.collect::<Vec<_>>()));
        }
    }
    or_ok(found, || OWNERS_OK.with([]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::{lines, states};
    use wire::api::commands::CheckState::{NotChecked, Ok as Good, Problem, Warning};

    impl ClusterFleet {
        /// Two nodes of gpupack, one of kubelet, one without GPU.
        fn sound() -> Self {
            let node = |name: &str, has_gpus, is_selected| NodeSummary {
                name: name.to_owned(),
                has_gpus,
                is_selected,
                ..NodeSummary::default()
            };
            let kubelet = NodeSummary {
                of_kubelet: vec![("nvidia.com/gpu".to_owned(), 8)],
                ..node("kubelet", true, false)
            };
            let pod =
                |name: &str| OwnPod { node: name.to_owned(), is_ready: true, ..OwnPod::default() };
            let of = |reporting, devices| Reported {
                reporting,
                devices,
                unhealthy: 0,
                lacks_uvm: false,
            };
            let nodes = [
                ("a", of(NodeReporting::Reporting, 2)),
                ("b", of(NodeReporting::Reporting, 1)),
                ("cpu", of(NodeReporting::NeverReported, 0)),
                ("gone", of(NodeReporting::Gone, 1)),
            ];
            let nodes = nodes.map(|(name, number)| (name.to_owned(), number)).into();
            Self {
                nodes: Ok(vec![
                    node("a", true, true),
                    node("b", true, true),
                    kubelet,
                    node("cpu", false, false),
                ]),
                daemon_set: Ok(WorkloadSummary::default()),
                agent_sets: Ok(vec![WorkloadSummary::default()]),
                pods: Ok(vec![pod("a"), pod("b")]),
                reports: Ok(Reports { nodes, ..Reports::default() }),
                of_dra: Err(Unread::Absent),
            }
        }
    }

    /// What the agents' check finds after a change.
    fn after(change: impl FnOnce(&mut ClusterFleet)) -> (Findings, Findings) {
        let mut bed = ClusterFleet::sound();
        change(&mut bed);
        (lines(agents(&bed)), lines(owners(&bed)))
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
        let (found, _) = after(|bed| {
            bed.reports.as_mut().unwrap().nodes.get_mut("a").unwrap().lacks_uvm = true;
        });
        assert!(text(&found).contains("nvidia-uvm is not loaded on a"), "{found:?}");
        let (found, _) = after(|bed| bed.daemon_set = Err(Unread::Absent));
        assert_eq!(states(&found), [Problem]);
    }

    #[test]
    fn a_pod_that_hangs_is_named() {
        let mut bed = ClusterFleet::sound();
        assert!(lines(ends(&bed)).is_empty());
        let reports = bed.reports.as_mut().unwrap();
        reports.hung.insert("team/old".to_owned(), "a".to_owned());
        let found = lines(ends(&bed));
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
            bed.reports = Err("no answer".to_owned());
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
            let mut bed = ClusterFleet::sound();
            for (node, version) in bed.nodes.as_mut().unwrap().iter_mut().zip(versions) {
                (node.moves_pods, node.kubelet) = (moves_pods, version.to_owned());
            }
            lines(kubelets(&bed))
        };
        let old = found(true, ["v1.32.11-gke.100", "v1.33.0+k3s1"]);
        assert_eq!(states(&old), [Problem]);
        assert!(old[0].found.starts_with("kubelet of 1 node is") && old[0].found.ends_with(": a"));
        assert_eq!(states(&found(true, ["v1.35.0", "v1.33.1"])), [Good]);
        assert_eq!(states(&found(true, ["v1.9.0", ""])), [Problem, NotChecked]);
        assert_eq!(found(false, ["v1.32.0", ""]), []);
        let mut bed = ClusterFleet::sound();
        bed.nodes.as_mut().unwrap()[2].moves_pods = true;
        assert_eq!(lines(kubelets(&bed)), [], "not a node of gpupack");
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
            let node = |at| NodeSummary {
                name: format!("node-{at}"),
                has_gpus: true,
                is_selected: true,
                ..NodeSummary::default()
            };
            bed.nodes = Ok((0..5_000).map(node).collect());
        });
        let length = found.iter().map(|finding| finding.found.len()).max();
        assert!(length < Some(150), "{found:?}");
        assert!(found[0].found.contains("5000 nodes with GPUs without an agent"), "{found:?}");
    }
}
