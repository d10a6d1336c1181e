//! The CPU and host memory that a pod requests, counted as kube-scheduler counts them.
//!
//! Only for scoring: kube-scheduler decides whether CPU and memory are sufficient.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::request::quantity::{NumberError, parse_memory, parse_milli};
use wire::units::{HostAmount, MemMib, MilliCpu};

/// Most CPU (in thousandths) or memory (in MiB) that is accepted as the request of one container:
/// far above any node, and so small that no sum over a cluster overflows.
const MAX_AMOUNT: u64 = 1 << 40;

/// The CPU and memory of a node that pods can request (`allocatable`); zero without a readable
/// value.
pub fn host_offer<'a>(allocatable: impl Fn(&str) -> Option<&'a str>) -> HostAmount {
    HostAmount {
        cpu: allocatable("cpu")
            .and_then(|text| parse_milli(text).ok())
            .map_or(MilliCpu::ZERO, MilliCpu::new),
        memory: allocatable("memory")
            .and_then(|text| parse_memory(text).ok())
            .unwrap_or(MemMib::ZERO),
    }
}

/// What `spec` requests of its node: the sum over regular containers and sidecars, or the maximum
/// during the start-up sequence if that is more, plus the overhead of the RuntimeClass.
/// `spec.resources` overrides the containers for the amounts that it names.
///
/// After `PodRequests` of `k8s.io/component-helpers/resource` v0.36, but without `status` during a
/// resize in place. A quantity that cannot be read counts as zero, one above the accepted maximum
/// counts as that maximum.
pub fn host_amount(spec: &PodSpec) -> HostAmount {
    let mut running = sum(spec.containers.iter().map(container_amount));
    let mut sidecars = HostAmount::ZERO;
    let mut start_up = HostAmount::ZERO;
    for container in spec.init_containers.iter().flatten() {
        let requested = container_amount(container);
        let moment = add(sidecars, requested);
        if is_sidecar(container) {
            sidecars = moment;
            running = add(running, requested);
        }
        start_up = larger(start_up, moment);
    }
    let containers = larger(running, start_up);
    let requested = match &spec.resources {
        Some(whole_pod) => HostAmount {
            cpu: cpu(whole_pod).unwrap_or(containers.cpu),
            memory: memory(whole_pod).unwrap_or(containers.memory),
        },
        None => containers,
    };
    add(requested, overhead(spec))
}

/// Whether an init container keeps running with the regular ones.
fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

fn container_amount(container: &Container) -> HostAmount {
    container.resources.as_ref().map_or(HostAmount::ZERO, |resources| HostAmount {
        cpu: cpu(resources).unwrap_or(MilliCpu::ZERO),
        memory: memory(resources).unwrap_or(MemMib::ZERO),
    })
}

fn overhead(spec: &PodSpec) -> HostAmount {
    HostAmount {
        cpu: cpu_of(spec.overhead.as_ref()).unwrap_or(MilliCpu::ZERO),
        memory: memory_of(spec.overhead.as_ref()).unwrap_or(MemMib::ZERO),
    }
}

/// The requested CPU. If only a limit is set, the API server uses it as the request.
fn cpu(resources: &ResourceRequirements) -> Option<MilliCpu> {
    cpu_of(resources.requests.as_ref()).or_else(|| cpu_of(resources.limits.as_ref()))
}

/// The requested memory. If only a limit is set, the API server uses it as the request.
fn memory(resources: &ResourceRequirements) -> Option<MemMib> {
    memory_of(resources.requests.as_ref()).or_else(|| memory_of(resources.limits.as_ref()))
}

fn cpu_of(amounts: Option<&BTreeMap<String, Quantity>>) -> Option<MilliCpu> {
    let text = &amounts?.get("cpu")?.0;
    Some(MilliCpu::new(believed(parse_milli(text))))
}

fn memory_of(amounts: Option<&BTreeMap<String, Quantity>>) -> Option<MemMib> {
    let text = &amounts?.get("memory")?.0;
    Some(MemMib::new(believed(parse_memory(text).map(MemMib::mib))))
}

fn believed(amount: Result<u64, NumberError>) -> u64 {
    match amount {
        Ok(amount) => amount.min(MAX_AMOUNT),
        Err(NumberError::Range) => MAX_AMOUNT,
        Err(NumberError::Syntax | NumberError::Unit) => 0,
    }
}

fn sum(amounts: impl Iterator<Item = HostAmount>) -> HostAmount {
    amounts.fold(HostAmount::ZERO, add)
}

/// The sum. Each part is at most [`MAX_AMOUNT`], and an API object of a few MiB has far fewer than
/// 2^20 containers.
fn add(a: HostAmount, b: HostAmount) -> HostAmount {
    a.checked_add(b).expect("a pod has fewer than a million containers")
}

fn larger(a: HostAmount, b: HostAmount) -> HostAmount {
    HostAmount { cpu: a.cpu.max(b.cpu), memory: a.memory.max(b.memory) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn amount_of(spec: serde_json::Value) -> (u64, u64) {
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        let amount = host_amount(&spec);
        (amount.cpu.milli(), amount.memory.mib())
    }

    fn container(cpu: &str, memory: &str) -> serde_json::Value {
        serde_json::json!({"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}}})
    }

    fn sidecar(cpu: &str, memory: &str) -> serde_json::Value {
        let mut sidecar = container(cpu, memory);
        sidecar["restartPolicy"] = "Always".into();
        sidecar
    }

    #[test]
    fn regular_containers_are_added_up() {
        let spec =
            serde_json::json!({"containers": [container("500m", "1Gi"), container("1", "1G")]});
        assert_eq!(amount_of(spec), (1500, 1024 + 954));
    }

    #[test]
    fn init_containers_count_by_their_maximum_and_sidecars_always() {
        let spec = serde_json::json!({
            "initContainers": [sidecar("1", "100Mi"), container("4", "10Mi"), sidecar("1", "1Mi")],
            "containers": [container("1", "500Mi")],
        });
        assert_eq!(amount_of(spec), (5000, 601));
    }

    #[test]
    fn pod_level_resources_override_and_overhead_is_added() {
        let spec = serde_json::json!({
            "containers": [container("1", "500Mi")],
            "resources": {"requests": {"cpu": "3"}},
            "overhead": {"cpu": "250m", "memory": "120Mi"},
        });
        assert_eq!(amount_of(spec), (3250, 620));
    }

    #[test]
    fn a_limit_replaces_a_missing_request_and_invalid_values_count_as_zero() {
        let spec = serde_json::json!({"containers": [
            {"name": "c", "resources": {"limits": {"cpu": "2", "memory": "1e90"}}},
            {"name": "d", "resources": {"requests": {"cpu": "-9", "memory": "many"}}},
        ]});
        assert_eq!(amount_of(spec), (2000, MAX_AMOUNT));
    }
}
