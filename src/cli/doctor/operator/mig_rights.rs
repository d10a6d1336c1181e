//! Whether the agents of the nodes where gpupack makes MIG instances are to make them, and have the rights for that.
//! Manifests of another release, or of a user, may lack some; `deploy/agent-mig.yaml` has all.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, PodSpec};

use crate::base::reader::Unread;
use crate::doctor::finding::{Findings, Found, or_ok};
use crate::doctor::nodes::ClusterFleet;
use crate::doctor::operator::placement::Placement;
use crate::doctor::table::*;

/// The flag by which a container of the agent's pod makes instances.
const FLAG: &str = "--mig-on-demand";

/// The variable by which the container toolkit gives a container the right.
const VARIABLE: &str = "NVIDIA_MIG_CONFIG_DEVICES";

/// What a DaemonSet of agents lacks; nothing if it has all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lack {
    /// No container is to make instances.
    Flag,
    /// The one that is to make them has not these.
    Rights(Vec<String>),
}

fn is_maker(container: &Container) -> bool {
    let words = [&container.command, &container.args].into_iter().flatten().flatten();
    words.into_iter().any(|word| word == FLAG)
}

fn lack_of(pods: &PodSpec) -> Option<Lack> {
    let Some(maker) = pods.containers.iter().find(|container| is_maker(container)) else {
        return Some(Lack::Flag);
    };
    let context = maker.security_context.as_ref();
    let is_privileged = context.and_then(|context| context.privileged) == Some(true);
    let of_pod = pods.security_context.as_ref().and_then(|context| context.run_as_user);
    // The image has a user of its own.
    let user = context.and_then(|context| context.run_as_user).or(of_pod);
    let variable = maker.env.iter().flatten().find(|it| it.name == VARIABLE);
    let has_variable =
        variable.is_some_and(|it| it.value_from.is_some() || it.value.as_deref() == Some("all"));
    let all = [
        (is_privileged, "`privileged: true`".to_owned()),
        (user == Some(0), "`runAsUser: 0`".to_owned()),
        (has_variable, format!("`{VARIABLE}=all`")),
        (pods.host_pid == Some(true), "`hostPID: true`".to_owned()),
    ];
    let lacks: Vec<String> =
        all.into_iter().filter(|(is_there, _)| !is_there).map(|(_, name)| name).collect();
    (!lacks.is_empty()).then_some(Lack::Rights(lacks))
}

/// Which nodes of pools with `mig: on_demand` have agents that cannot make instances; nothing where there is no such
/// node, or no agent.
pub(crate) fn mig_rights(fleet: &ClusterFleet) -> Found {
    let divided = fleet.nodes.iter().flatten().filter(|node| node.is_divided);
    let divided: Vec<_> = divided.collect();
    if divided.is_empty() {
        return Ok(Findings::new());
    }
    let sets = match &fleet.agent_sets {
        Ok(sets) => sets,
        Err(Unread::Absent) => return Ok(Findings::new()),
        Err(why) => return Err(AGENT_SETS.unread([], why)),
    };
    let mut lacks: BTreeMap<Lack, Vec<&str>> = BTreeMap::new();
    let mut has_agents = false;
    for node in divided {
        let there = sets.iter().filter(|set| Placement::of(&set.pods).may_be_on(&node.labels));
        let all: Vec<Option<Lack>> = there.map(|set| lack_of(&set.pods)).collect();
        has_agents |= !all.is_empty();
        // Where several may run, one that has all is enough; else the one that lacks rights is the one that is meant.
        if !all.contains(&None)
            && let Some(lack) = all.into_iter().flatten().max()
        {
            lacks.entry(lack).or_default().push(&node.name);
        }
    }
    let found = lacks.iter().filter_map(|(lack, nodes)| match lack {
        Lack::Flag => NOT_MAKING.about(nodes),
        Lack::Rights(rights) => LACKS_RIGHTS.about_with(nodes, [&rights.join(", ")]),
    });
    match has_agents {
        true => or_ok(found.collect(), || MIG_RIGHTS_OK.with([])),
        false => Ok(Findings::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::{lines, states};
    use crate::doctor::nodes::Reports;
    use crate::doctor::objects::{NodeSummary, WorkloadSummary};
    use serde_json::{Value, json};
    use wire::api::commands::CheckState::{NotChecked, Ok as Good, Problem};

    /// What is other in manifests.
    type Change = fn(&mut Value);

    /// The pods of agents that make instances, as deploy/agent-mig.yaml has them.
    fn shipped() -> Value {
        let text = include_str!("../../../../deploy/agent-mig.yaml");
        let document = serde_yaml_ng::Deserializer::from_str(text).next().unwrap();
        let set = <Value as serde::Deserialize>::deserialize(document).unwrap();
        set["spec"]["template"]["spec"].clone()
    }

    fn of(pods: &Value) -> WorkloadSummary {
        let pods = serde_json::from_value(pods.clone()).unwrap();
        WorkloadSummary { pods, ..WorkloadSummary::default() }
    }

    fn fleet(sets: &[Value]) -> ClusterFleet {
        let node = |name: &str, is_divided| NodeSummary {
            name: name.to_owned(),
            is_divided,
            labels: [("nvidia.com/gpu.present".to_owned(), "true".to_owned())].into(),
            ..NodeSummary::default()
        };
        ClusterFleet {
            nodes: Ok(vec![node("a", true), node("b", false)]),
            daemon_set: Err(Unread::Absent),
            agent_sets: Ok(sets.iter().map(of).collect()),
            pods: Ok(Vec::new()),
            reports: Ok(Reports::default()),
            of_dra: Err(Unread::Absent),
        }
    }

    #[test]
    fn each_right_that_agents_lack_is_named() {
        let changes: [(Change, &str); 6] = [
            (|pods| pods["hostPID"] = false.into(), "lack `hostPID: true`,"),
            (|pods| pods["securityContext"]["runAsUser"] = json!(null), "lack `runAsUser: 0`,"),
            (
                |pods| pods["containers"][1]["securityContext"] = json!({"runAsUser": 1}),
                "lack `privileged: true`, `runAsUser: 0`,",
            ),
            (
                |pods| pods["containers"][1]["env"] = json!([]),
                "lack `NVIDIA_MIG_CONFIG_DEVICES=all`,",
            ),
            (|pods| pods["containers"][1]["args"] = json!(["driver"]), "without `--mig-on-demand`"),
            (|pods| drop(pods["containers"].as_array_mut().unwrap().pop()), "`--mig-on-demand`"),
        ];
        for (change, named) in changes {
            let mut pods = shipped();
            change(&mut pods);
            let found = lines(mig_rights(&fleet(&[pods])));
            assert_eq!(states(&found), [Problem], "{found:?}");
            assert!(found[0].found.contains(named), "{named}: {found:?}");
            assert!(found[0].found.ends_with("1 node: a"), "{found:?}");
        }
    }

    #[test]
    fn nothing_is_said_without_such_nodes_and_one_set_with_all_is_enough() {
        let found = lines(mig_rights(&fleet(&[shipped()])));
        assert_eq!(states(&found), [Good], "{found:?}");
        // An agent of one container may have all.
        let mut alone = shipped();
        alone["containers"].as_array_mut().unwrap().remove(0);
        let mut plain = shipped();
        plain["containers"].as_array_mut().unwrap().pop();
        assert_eq!(states(&lines(mig_rights(&fleet(&[plain.clone(), alone])))), [Good]);
        // One that runs elsewhere says nothing about the node.
        plain["nodeSelector"] = json!({"other": "true"});
        assert!(lines(mig_rights(&fleet(&[plain]))).is_empty());
        let mut bed = fleet(&[]);
        bed.agent_sets = Err(Unread::Forbidden("list them".to_owned()));
        assert_eq!(states(&lines(mig_rights(&bed))), [NotChecked]);
        bed.nodes = Ok(Vec::new());
        assert!(lines(mig_rights(&bed)).is_empty());
    }
}
