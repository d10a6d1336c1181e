//! The container of a pod that has the GPU, as far as a move needs it: kubelet restarts it when its CPU
//! request is changed in place.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::kube_api::containers::injection::RESTART_CONTAINER;
use crate::kube_api::request::quantity::parse_milli;
use crate::model::request::GpuRequest;
use crate::model::reservation::Move;

/// A container that kubelet restarts on request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuContainer {
    /// Its name.
    pub name: String,
    /// As the runtime names it now; empty before it first ran.
    pub id: String,
    /// Whether it runs.
    pub is_running: bool,
    /// Its CPU request in thousandths.
    pub cpu_milli: u64,
    /// The same as kubelet has carried it out; `None` if it does not report that.
    pub actual_cpu_milli: Option<u64>,
    /// Its CPU limit in thousandths.
    pub cpu_limit_milli: Option<u64>,
}

impl GpuContainer {
    /// The container of `pod` that has the GPU of `request`, if kubelet can restart it.
    pub fn of(pod: &Pod, request: &GpuRequest) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let is_it = |name: &str| request.container.as_deref().is_none_or(|it| it == name);
        let container = spec.containers.iter().find(|it| is_it(&it.name))?;
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
            cpu_milli: requested_cpu(resources)?,
            actual_cpu_milli: requested_cpu(status.and_then(actual)),
            cpu_limit_milli: cpu(resources.and_then(|all| all.limits.as_ref())),
        })
    }

    /// Whether the container has ended that ran when the move was written. A later one got its device
    /// from the annotations of the move: kubelet sees changes of a pod in their order, and carries out
    /// the change of the request, which was made after them.
    pub fn has_left(&self, leaving: &Move) -> bool {
        let is_resized =
            self.cpu_milli != leaving.cpu_milli && self.actual_cpu_milli != Some(leaving.cpu_milli);
        is_resized && (*self.id != *leaving.container || !self.is_running)
    }

    /// CPU requests and limits, in thousandths, that make kubelet restart it, the better one first. The
    /// quality of service of a pod may not change, so equal ones stay equal.
    pub fn resized(&self) -> impl Iterator<Item = (u64, Option<u64>)> {
        let is_equal = self.cpu_limit_milli == Some(self.cpu_milli);
        let less = self.cpu_milli.checked_sub(1).filter(|cpu| *cpu > 0);
        let all = less.into_iter().chain(self.cpu_milli.checked_add(1));
        all.map(move |cpu| (cpu, is_equal.then_some(cpu)))
    }
}

fn restarts_on_resize(container: &Container) -> bool {
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(|it| it.resource_name == "cpu" && it.restart_policy == RESTART_CONTAINER)
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
