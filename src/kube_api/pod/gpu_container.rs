//! The container of a pod that has the GPU, as far as a move needs it: kubelet restarts it when its CPU
//! request is changed in place. And the containers that are to have it, with their ids.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::containers::injection::{DEVICES_VARIABLE, is_of_devices, restarts_for_cpu};
use crate::request::quantity::parse_milli;
use engine::model::request::GpuRequest;
use engine::model::reservation::MoveHome;
use engine::usage::starts::{ContainerChoice, MAX_WANTED, WantedContainer, WantedContainers};

/// A container that kubelet restarts on request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuContainer {
    pub name: String,
    /// As the runtime names it now; empty before it first ran.
    pub id: String,
    pub is_running: bool,
    /// Its CPU request in thousandths.
    pub cpu_milli: u64,
    /// The same as kubelet has carried it out; `None` if it does not report that.
    pub actual_cpu_milli: Option<u64>,
    /// Its CPU limit in thousandths.
    pub cpu_limit_milli: Option<u64>,
}

/// Longest id of a container in its runtime, in bytes; those of containerd and CRI-O have 64.
const MAX_ID_BYTES: usize = 64;

/// The containers of `pod` that take the devices of its placement, sidecars too; of a pod without any such, all of its
/// regular ones.
pub(crate) fn wanted_containers(pod: &Pod) -> WantedContainers {
    let Some(spec) = &pod.spec else { return WantedContainers::default() };
    let init = spec.init_containers.iter().flatten();
    let takes = |container: &&Container| {
        let mut given = container.env.iter().flatten();
        given.any(|given| given.name == DEVICES_VARIABLE && is_of_devices(given))
    };
    let marked: Vec<&Container> = spec.containers.iter().chain(init).filter(takes).collect();
    let (choice, containers) = match marked.is_empty() {
        false => (ContainerChoice::Marked, marked),
        true => (ContainerChoice::Any, spec.containers.iter().collect()),
    };
    let wanted = containers.into_iter().take(MAX_WANTED).map(|container| WantedContainer {
        name: container.name.clone(),
        id: container_id(pod, &container.name),
    });
    WantedContainers { containers: wanted.collect(), choice }
}

/// The id of a container in its runtime: what follows `containerd://` and the like. `None` before it first started.
fn container_id(pod: &Pod, name: &str) -> Option<String> {
    let status = pod.status.as_ref()?;
    let lists = [&status.container_statuses, &status.init_container_statuses];
    let status = lists.into_iter().flatten().flatten().find(|status| status.name == name)?;
    let (_, id) = status.container_id.as_deref()?.split_once("://")?;
    Some(id.to_owned()).filter(|id| !id.is_empty() && id.len() <= MAX_ID_BYTES)
}

/// CPU of a container in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuAmounts {
    pub request_milli: u64,
    pub limit_milli: Option<u64>,
}

impl GpuContainer {
    /// The container of `pod` that has the GPU of `request`, if kubelet can restart it.
    pub fn of(pod: &Pod, request: &GpuRequest) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let named = request.container.as_deref();
        let mut containers = spec.containers.iter();
        let container =
            containers.find(|container| named.is_none_or(|named| named == container.name))?;
        let resources = container.resources.as_ref();
        let is_never = spec.restart_policy.as_deref() == Some("Never");
        if is_never || spec.resources.is_some() || !restarts_on_resize(container) {
            return None;
        }
        let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
        let status = statuses.into_iter().flatten().find(|status| status.name == container.name);
        let state = status.and_then(|status| status.state.as_ref());
        Some(Self {
            name: container.name.clone(),
            id: status.and_then(|status| status.container_id.clone()).unwrap_or_default(),
            is_running: state.is_some_and(|state| state.running.is_some()),
            // Without a CPU request the quality of service would change.
            cpu_milli: requested_cpu(resources).filter(|cpu| *cpu > 0)?,
            actual_cpu_milli: requested_cpu(status.and_then(actual)),
            cpu_limit_milli: cpu(resources.and_then(|all| all.limits.as_ref())),
        })
    }

    /// Whether the container has ended that ran when the move was written. A later one got its device
    /// from the annotations of the move: kubelet sees changes of a pod in their order, and carries out
    /// the change of the request, which was made after them.
    pub fn has_left(&self, leaving: &MoveHome) -> bool {
        // Not one that kubelet has not made yet: it may start from an older version of the pod.
        let is_resized =
            self.cpu_milli != leaving.cpu_milli && self.actual_cpu_milli == Some(self.cpu_milli);
        is_resized && (*self.id != *leaving.container || !self.is_running)
    }

    /// CPU requests and limits that make kubelet restart it, the better one first. The
    /// quality of service of a pod may not change, so equal ones stay equal. From an even request to the
    /// next smaller one and back, so that many restarts take no CPU away. The request that it had before
    /// its move home comes last: with that a later process would take the move for one that has not
    /// happened yet, and restart it once more.
    pub fn resized(&self, moved: Option<&MoveHome>) -> impl Iterator<Item = CpuAmounts> {
        let is_equal = self.cpu_limit_milli == Some(self.cpu_milli);
        let less = self.cpu_milli.checked_sub(1).filter(|cpu| *cpu > 0);
        let more = self.cpu_milli.checked_add(1);
        let mut all = if self.cpu_milli.is_multiple_of(2) { [less, more] } else { [more, less] };
        let before = moved.map(|moved| moved.cpu_milli);
        // Nor the one that runs: kubelet may not have seen the change before, and would restart nothing.
        let is_last = |cpu: &Option<u64>| *cpu == before || *cpu == self.actual_cpu_milli;
        all.sort_by_key(|cpu| cpu.is_some() && is_last(cpu));
        all.into_iter().flatten().map(move |request_milli| CpuAmounts {
            request_milli,
            limit_milli: is_equal.then_some(request_milli),
        })
    }
}

fn restarts_on_resize(container: &Container) -> bool {
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(restarts_for_cpu)
}

fn actual(status: &ContainerStatus) -> Option<&ResourceRequirements> {
    status.resources.as_ref()
}

fn requested_cpu(resources: Option<&ResourceRequirements>) -> Option<u64> {
    cpu(resources?.requests.as_ref()).or_else(|| cpu(resources?.limits.as_ref()))
}

fn cpu(amounts: Option<&BTreeMap<String, Quantity>>) -> Option<u64> {
    parse_milli(&amounts?.get("cpu")?.0).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pod::seen_pod::SeenPod;
    use engine::model::request::Movable;

    /// A pod whose container has this CPU request, id and state, and the CPU that kubelet reports.
    fn seen(cpu: &str, id: &str, state: &str, actual: Option<&str>) -> GpuContainer {
        let mut status = json!({"name": "main", "containerID": id, "state": {state: {}}});
        if let Some(actual) = actual {
            status["resources"] = json!({"requests": {"cpu": actual}});
        }
        let pod = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u",
                "annotations": {"gpu-fraction": "0.5", "gpupack.dev/movable": "restart"}},
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}},
                "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]}]},
            "status": {"containerStatuses": [status]},
        });
        SeenPod::from_json(&pod.to_string()).unwrap().containers.gpu.unwrap()
    }

    #[test]
    fn a_container_has_left_once_it_ended_after_the_resize_was_carried_out() {
        let leaving = MoveHome { container: "c1".into(), cpu_milli: 10 };
        for (cpu, id, state, actual, has_left) in [
            ("10m", "c1", "running", Some("10m"), false), // the first write alone
            ("10m", "c2", "running", Some("10m"), false), // it crashed: of which device it is is not known
            ("9m", "c1", "running", Some("10m"), false),  // kubelet is about to restart it
            ("9m", "c2", "running", Some("10m"), false), // it crashed meanwhile, and restarts again
            ("9m", "c2", "running", Some("9m"), true),
            ("9m", "c1", "waiting", Some("9m"), true), // it waits for its next start
            ("9m", "c1", "running", Some("9m"), false),
            ("9m", "c2", "running", None, false),
            ("9m", "", "waiting", None, false), // it may start from an older version of the pod
            ("8m", "c2", "running", Some("10m"), false), // a resize that kubelet has not accepted
            ("8m", "c2", "running", Some("8m"), true),
        ] {
            let seen = seen(cpu, id, state, actual);
            assert_eq!(seen.has_left(&leaving), has_left, "{cpu} {id} {state} {actual:?}");
        }
    }

    #[test]
    fn a_resize_changes_as_little_as_possible() {
        let of = |cpu, limit| {
            let seen = GpuContainer { cpu_limit_milli: limit, ..seen(cpu, "c1", "running", None) };
            seen.resized(None).map(|cpu| (cpu.request_milli, cpu.limit_milli)).collect::<Vec<_>>()
        };
        assert_eq!(of("10m", None), [(9, None), (11, None)]);
        assert_eq!(of("10m", Some(500)), [(9, None), (11, None)]);
        assert_eq!(of("2", Some(2_000)), [(1_999, Some(1_999)), (2_001, Some(2_001))]);
        assert_eq!(of("1m", None), [(2, None)]);
    }

    /// The containers of a pod that are to have its devices: `!` if they are marked.
    fn wanted(spec: serde_json::Value, status: serde_json::Value) -> String {
        let metadata = json!({"name": "p", "namespace": "n", "uid": "u", "annotations": {"gpu-fraction": "0.5"}});
        let pod = json!({"metadata": metadata, "spec": spec, "status": status});
        let wanted = SeenPod::from_json(&pod.to_string()).unwrap().containers.wanted;
        let mark = if wanted.choice == ContainerChoice::Marked { "!" } else { "?" };
        let show =
            |it: &WantedContainer| format!("{}={}", it.name, it.id.as_deref().unwrap_or("-"));
        let shown: Vec<String> = wanted.containers.iter().map(show).collect();
        format!("{mark} {}", shown.join(" "))
    }

    #[test]
    fn the_containers_that_are_to_have_the_devices_have_names_and_ids() {
        let taking = |name: &str, variable: &str| {
            let path = "metadata.annotations['placed.gpupack.dev/devices']";
            let source = json!({"fieldRef": {"apiVersion": "v1", "fieldPath": path}});
            json!({"name": name, "env": [{"name": variable, "valueFrom": source}]})
        };
        let gets = |name: &str| taking(name, "NVIDIA_VISIBLE_DEVICES");
        let side =
            json!({"name": "side", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]});
        let running = |name: &str, id: &str| json!({"name": name, "containerID": id, "state": {"running": {}}});
        let ended = json!({"name": "main", "containerID": "cri-o://c2",
            "state": {"terminated": {"exitCode": 1}}});
        let two = json!({"containerStatuses": [running("side", "containerd://c1"), running("main", "containerd://c2")]});
        let bound =
            |containers: serde_json::Value| json!({"nodeName": "a", "containers": containers});
        for (spec, status, expected) in [
            (bound(json!([gets("main"), side])), two.clone(), "! main=c2"),
            (bound(json!([gets("main"), side])), json!({}), "! main=-"),
            (bound(json!([gets("main")])), json!({"containerStatuses": [ended]}), "! main=c2"),
            (json!({"containers": [gets("main")]}), two.clone(), "? "), // it waits
            (bound(json!([{"name": "main"}, side])), two.clone(), "? main=c2 side=c1"),
            (bound(json!([taking("main", "MINE"), side])), two.clone(), "? main=c2 side=c1"),
            (
                json!({"nodeName": "a", "containers": [side],
                    "initContainers": [gets("server")]}),
                json!({"initContainerStatuses": [running("server", "containerd://c3")]}),
                "! server=c3",
            ),
            (
                bound(json!([gets("main")])),
                json!({"containerStatuses": [running("main", "c2")]}),
                "! main=-",
            ),
            (
                bound(json!([gets("main")])),
                json!({"containerStatuses": [running("main", &format!("x://{}", "0".repeat(65)))]}),
                "! main=-",
            ),
        ] {
            assert_eq!(wanted(spec.clone(), status), expected, "{spec}");
        }
    }

    /// Nothing is lent to such a pod, which could not be taken back.
    #[test]
    fn a_pod_whose_container_kubelet_cannot_restart_is_not_movable() {
        for (requests, restart_policy, is_movable) in [
            (json!({"cpu": "10m"}), "Always", true),
            (json!({"cpu": "0"}), "Always", false),
            (json!({}), "Always", false),
            (json!({"cpu": "10m"}), "Never", false),
        ] {
            let pod = json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u",
                    "annotations": {"gpu-fraction": "0.5", "gpupack.dev/movable": "restart"}},
                "spec": {"restartPolicy": restart_policy, "containers": [{"name": "main",
                    "resources": {"requests": requests},
                    "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]}]},
            });
            let seen = SeenPod::from_json(&pod.to_string()).unwrap();
            let movable = if is_movable { Movable::Restart } else { Movable::Never };
            assert_eq!(seen.containers.gpu.is_some(), is_movable, "{pod}");
            assert_eq!(seen.request.unwrap().unwrap().movable, movable, "{pod}");
        }
    }

    #[test]
    fn a_container_is_not_resized_to_what_it_still_runs_with() {
        let next = |cpu, actual| {
            let seen = seen(cpu, "c1", "running", Some(actual));
            seen.resized(None).next().map(|cpu| cpu.request_milli)
        };
        assert_eq!(next("999m", "1000m"), Some(998), "kubelet has not seen 999 yet");
        assert_eq!(next("1000m", "999m"), Some(1_001));
        assert_eq!(next("999m", "999m"), Some(1_000));
    }

    #[test]
    fn a_container_that_came_home_is_not_resized_to_what_it_was_before() {
        for (cpu, before, after) in [
            ("999m", 1_000, [998, 1_000]),
            ("998m", 1_000, [997, 999]),
            ("1002m", 1_001, [1_003, 1_001]),
            ("2m", 1, [3, 1]),
            ("1m", 2, [2, 0]), // there is no other one
        ] {
            let moved = MoveHome { container: "c1".into(), cpu_milli: before };
            let seen = seen(cpu, "c2", "running", Some(cpu));
            let all: Vec<u64> = seen.resized(Some(&moved)).map(|cpu| cpu.request_milli).collect();
            let after: Vec<u64> = after.into_iter().filter(|cpu| *cpu > 0).collect();
            assert_eq!(all, after, "{cpu}");
            let next = format!("{}m", all[0]);
            let next = self::seen(&next, "c3", "running", Some(&next));
            assert_eq!(next.has_left(&moved), cpu != "1m", "{cpu}: it has left once for all");
        }
    }
}
