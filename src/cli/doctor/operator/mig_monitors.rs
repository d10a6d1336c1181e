//! What keeps MIG instances open on the nodes where gpupack removes them.
//!
//! A program that reads MIG instances through NVIDIA's library holds them as long as it runs, and is in no list of
//! processes: the driver answers IN_USE, and only its restart helps (NVIDIA/DCGM #276). MIG Manager stops these
//! programs before it divides a GPU (`gpu-clients` and the labels of `reconfigure-mig.sh`, NVIDIA/mig-parted).

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Container, PodSpec};

use crate::base::reader::{Read, Unread};
use crate::doctor::finding::{Findings, Found, short};
use crate::doctor::nodes::ClusterFleet;
use crate::doctor::operator::placement::Placement;
use crate::doctor::table::*;

/// Begins the node labels by which the GPU Operator places each of its parts. It leaves values alone that others set.
const SWITCH: &str = "nvidia.com/gpu.deploy.";

/// A part of what an image or a command is called, and the program. The first that fits counts.
const PROGRAMS: [(&str, &str); 4] = [
    ("dcgm-exporter", "dcgm-exporter"),
    ("gpu-feature-discovery", "GPU feature discovery"),
    ("k8s-device-plugin", "NVIDIA's device plugin"),
    ("dcgm", "DCGM"),
];

/// A DaemonSet whose pods have MIG instances open.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Monitor {
    program: &'static str,
    /// Its namespace and name.
    object: String,
    placement: Placement,
}

/// The program that a container runs, if it is one of these.
fn program_of(container: &Container) -> Option<&'static str> {
    let image = container.image.as_deref().unwrap_or_default();
    let name = image.rsplit('/').next().unwrap_or_default();
    // GPU feature discovery is in the image of the device plugin.
    let commands = [&container.command, &container.args].into_iter().flatten().flatten();
    let mut words: Vec<&str> = commands.map(String::as_str).collect();
    words.push(name);
    let fits = |part: &str| words.iter().any(|word| word.contains(part));
    PROGRAMS.iter().find(|(part, _)| fits(part)).map(|(_, program)| *program)
}

impl Monitor {
    /// Of a DaemonSet.
    pub(crate) fn of(set: DaemonSet) -> Option<Self> {
        let pods: PodSpec = set.spec?.template.spec?;
        let program = pods.containers.iter().find_map(program_of)?;
        let (namespace, name) = (set.metadata.namespace, set.metadata.name);
        let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
        Some(Self {
            program,
            object: short(&format!("{namespace}/{name}")),
            placement: Placement::of(&pods),
        })
    }

    /// The label that takes it from a node, where the GPU Operator places it.
    fn switch(&self) -> Option<&str> {
        self.placement.selector.keys().map(String::as_str).find(|key| key.starts_with(SWITCH))
    }
}

/// Which programs may keep instances open where gpupack makes and removes them; nothing where it makes none.
pub(crate) fn monitors(monitors: &Read<Vec<Option<Monitor>>>, fleet: &ClusterFleet) -> Found {
    let nodes = fleet.nodes.iter().flatten().filter(|node| node.is_divided);
    let divided: Vec<_> = nodes.collect();
    if divided.is_empty() {
        return Ok(Findings::new());
    }
    let monitors = match monitors {
        Ok(monitors) => monitors.iter().flatten(),
        Err(Unread::Absent) => [].iter().flatten(),
        Err(why) => return Err(MONITORS.unread([], why)),
    };
    let mut found = Findings::new();
    for monitor in monitors {
        let on = divided.iter().filter(|node| monitor.placement.may_be_on(&node.labels));
        let on: Vec<&str> = on.map(|node| node.name.as_str()).collect();
        let first = short(on.first().copied().unwrap_or_default());
        let (program, object) = (&monitor.program, &monitor.object);
        found.extend(match monitor.switch() {
            Some(switch) => {
                let switch = short(switch);
                HOLDS_INSTANCES.about_with(&on, [program, object, &first, &switch])
            }
            None => KEEPS_INSTANCES.about_with(&on, [program, object]),
        });
    }
    if found.is_empty() {
        found.push(NO_MONITORS.with([]));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use crate::doctor::finding::{lines, states};
    use crate::doctor::nodes::Reports;
    use crate::doctor::objects::NodeSummary;
    use serde_json::{Value, json};
    use wire::api::commands::CheckState::{NotChecked, Ok as Good, Warning};

    fn set(name: &str, container: &Value, placed: Value) -> Option<Monitor> {
        let mut spec = placed;
        spec["containers"] = json!([{"name": "side", "image": "a/config-manager"}, container]);
        let labels = json!({"app": name});
        let set = json!({"metadata": {"name": name, "namespace": "gpu-operator"},
            "spec": {"selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec}}});
        Monitor::of(serde_json::from_value(set).unwrap())
    }

    /// Name, labels, and whether gpupack makes instances there.
    type TestNode<'a> = (&'a str, &'a [(&'a str, &'a str)], bool);

    fn fleet(nodes: &[TestNode<'_>]) -> ClusterFleet {
        let node = |(name, labels, is_divided): &TestNode<'_>| {
            let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            NodeSummary {
                name: (*name).to_owned(),
                is_divided: *is_divided,
                labels: labels.collect(),
                ..NodeSummary::default()
            }
        };
        ClusterFleet {
            nodes: Ok(nodes.iter().map(node).collect()),
            daemon_set: Err(Unread::Absent),
            agent_sets: Err(Unread::Absent),
            pods: Ok(Vec::new()),
            reports: Ok(Reports::default()),
            of_dra: Err(Unread::Absent),
        }
    }

    const EXPORTER: (&str, &str) = ("nvidia.com/gpu.deploy.dcgm-exporter", "true");

    #[test]
    fn each_program_is_known_by_its_image_or_command() {
        let program = |container: Value| set("a", &container, json!({})).map(|it| it.program);
        let of = |image: &str| program(json!({"name": "a", "image": image}));
        assert_eq!(of("nvcr.io/nvidia/k8s/dcgm-exporter:4.8.4"), Some("dcgm-exporter"));
        assert_eq!(of("nvcr.io/nvidia/cloud-native/dcgm:4.4.2-1-ubuntu22.04"), Some("DCGM"));
        assert_eq!(of("nvcr.io/nvidia/k8s-device-plugin:v0.19.3"), Some("NVIDIA's device plugin"));
        let both = json!({"name": "a", "image": "x/k8s-device-plugin:v1", "command": ["gpu-feature-discovery"]});
        assert_eq!(program(both), Some("GPU feature discovery"));
        assert_eq!(of("dcgm-exporter.example/team/web"), None, "its registry");
        assert_eq!(program(json!({"name": "a"})), None);
    }

    #[test]
    fn monitors_of_on_demand_pools_are_named_with_their_switch() {
        let image = |name: &str| json!({"name": "a", "image": name});
        let selected = json!({"nodeSelector": {EXPORTER.0: "true"}});
        let all = Ok(vec![
            set("nvidia-dcgm-exporter", &image("dcgm-exporter:1"), selected),
            set("dcgm", &image("dcgm:1"), json!({})),
            set("web", &image("web"), json!({})),
        ]);
        let off = &[(EXPORTER.0, "false")][..];
        let bed = fleet(&[("a", &[EXPORTER], true), ("b", off, true), ("c", &[EXPORTER], false)]);
        let found = lines(monitors(&all, &bed));
        assert_eq!(states(&found), [Warning, Warning], "{found:?}");
        let exporter = &found[0];
        assert!(exporter.found.contains("dcgm-exporter (gpu-operator/nvidia-dcgm-exporter)"));
        assert!(exporter.found.ends_with("1 node: a"), "{exporter:?}");
        let fix = exporter.fix.as_ref().unwrap();
        assert!(fix.contains("kubectl label node a nvidia.com/gpu.deploy.dcgm-exporter=false"));
        assert!(found[1].found.ends_with("2 nodes: a, b"), "{found:?}");
        // Without such a pool nothing is said, and without such a program that all is well.
        assert!(lines(monitors(&all, &fleet(&[("c", &[EXPORTER], false)]))).is_empty());
        assert_eq!(states(&lines(monitors(&Ok(vec![None]), &bed))), [Good]);
        let forbidden = Err(Unread::Forbidden("list them".to_owned()));
        assert_eq!(states(&lines(monitors(&forbidden, &bed))), [NotChecked]);
    }

    #[test]
    fn a_node_that_its_affinity_excludes_has_no_monitor() {
        let labels = BTreeMap::from([("pool".to_owned(), "on-demand".to_owned())]);
        for (operator, values, expected) in [
            ("In", json!(["on-demand"]), true),
            ("In", json!(["other"]), false),
            ("NotIn", json!(["on-demand"]), false),
            ("NotIn", json!(["other"]), true),
            ("Exists", json!(null), true),
            ("DoesNotExist", json!(null), false),
            ("Gt", json!(["3"]), true),
        ] {
            let needed = json!({"key": "pool", "operator": operator, "values": values});
            let terms = json!([{"matchExpressions": [needed]}]);
            let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
            let placed = json!({"affinity": {"nodeAffinity": required}});
            let monitor = set("a", &json!({"name": "a", "image": "dcgm"}), placed).unwrap();
            assert_eq!(monitor.placement.may_be_on(&labels), expected, "{operator} {values}");
        }
    }
}
