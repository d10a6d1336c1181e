//! Admission of pods: what is refused, and what is written into a pod before it exists.
//!
//! A pure function of the review and the configuration: no books, no API server. So any number of
//! replicas may answer, and each answers the same. Applying it to its own result changes nothing.
//!
//! | Pod | What becomes of it |
//! |---|---|
//! | asks for a GPU, for one of our schedulers or for none by name | checked and completed |
//! | asks kubelet's device plugin for a GPU | left as it is |
//! | asks for no GPU under a RuntimeClass not listed as one without GPUs | as configured: refused, blanked or left |
//! | asks for no GPU, for a scheduler that serves us alone | checked and blanked, as its neighbors may have GPUs |
//! | any other, and pods of other schedulers | left as it is, but for keys that only we write |

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use kube::core::admission::AdmissionResponse;

use crate::config::allowed::NVIDIA_CLASSES;
use crate::config::requests::RequestRules;
use crate::config::webhook::{MemoryLimit, Unmanaged, WebhookConfig, WholeGpus};
use crate::kube_api::admission::confinement::{refuse_container, refuse_pod};
use crate::kube_api::admission::review::{ReviewFault, name_of, request};
use crate::kube_api::containers::admission_error::AdmissionError;
use crate::kube_api::containers::container_view::{ContainerList, ContainerView, containers};
use crate::kube_api::containers::injection::{Changes, Clients, Owned, blank, granted, markers};
use crate::kube_api::containers::mps;
use crate::kube_api::pod::seen_pod::{DEFAULT_SCHEDULER, class_of, container_asks, scheduler_of};
use crate::kube_api::request::annotations::{CONTAINER, DEVICE_COUNT, FRACTION, parse_request};
use crate::kube_api::request::other_keys::{check, other_keys};
use crate::kube_api::request::placement::refuse_reserved_keys;
use crate::kube_api::request::request_error::{RequestError, shown};
use crate::kube_api::request::resources::{ContainerAsk, WHOLE, asks_for, only};
use crate::model::request::GpuRequest;

/// The subresource by which containers are added to a running pod.
const EPHEMERAL: &str = "ephemeralcontainers";

/// An answer to a review.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The review to send back.
    pub review: Vec<u8>,
    /// The pod: namespace and name, or the prefix of a name that is still to be made.
    pub pod: String,
    /// Why it is refused; none where it is admitted.
    pub refusal: Option<AdmissionError>,
}

/// Whose a pod is.
enum Tenant {
    /// Ours: it asks for this.
    Managed(Box<GpuRequest>),
    /// Kubelet's device plugin serves it.
    Kubelet,
    /// It asks nobody for a GPU, or another scheduler.
    Unmanaged,
}

/// The rules of admission, as configured.
#[derive(Clone, Debug)]
pub struct Admission {
    settings: WebhookConfig,
    scheduler_names: Vec<String>,
    requests: RequestRules,
}

impl Admission {
    /// Rules for pods of these schedulers. Pods that name none get the first of them.
    pub fn new(settings: WebhookConfig, scheduler_names: Vec<String>) -> Self {
        Self { settings, scheduler_names, requests: RequestRules::default() }
    }

    /// The same with these rules for requests.
    #[must_use]
    pub fn under(self, requests: RequestRules) -> Self {
        Self { requests, ..self }
    }

    /// Answers the body of a call.
    ///
    /// # Errors
    /// [`ReviewFault`] where it is not a review of a pod; there is nobody to answer then.
    pub fn review(&self, body: &[u8]) -> Result<Answer, ReviewFault> {
        let request = request(body)?;
        let pod =
            request.object.as_ref().ok_or(ReviewFault::Missing { field: "request.object" })?;
        let decided = match request.sub_resource.as_deref().unwrap_or_default() {
            "" => self.admit(pod),
            EPHEMERAL => self.admit_ephemeral(pod, request.old_object.as_ref()),
            other => {
                let resource = shown(&format!("{}/{other}", request.resource.resource));
                return Err(ReviewFault::Resource { resource });
            }
        };
        let response = AdmissionResponse::from(&request);
        let unreadable = |fault: String| ReviewFault::Json { fault };
        let (response, refusal) = match decided {
            Ok(changes) => match changes.into_patch() {
                None => (response, None),
                Some(patch) => {
                    let patched = response.with_patch(patch);
                    (patched.map_err(|error| unreadable(error.to_string()))?, None)
                }
            },
            Err(error) => (response.deny(&error), Some(error)),
        };
        let review = serde_json::to_vec(&response.into_review())
            .map_err(|error| unreadable(error.to_string()))?;
        Ok(Answer { review, pod: name_of(&request, pod), refusal })
    }

    /// What is written into a pod that is created.
    ///
    /// # Errors
    /// [`AdmissionError`] where it must not exist.
    fn admit(&self, pod: &Pod) -> Result<Changes, AdmissionError> {
        let none = BTreeMap::new();
        let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
        let labels = pod.metadata.labels.as_ref().unwrap_or(&none);
        refuse_reserved_keys(annotations.keys().chain(labels.keys()))?;
        let Some(spec) = &pod.spec else { return Ok(Changes::default()) };
        match self.tenant(annotations, spec)? {
            Tenant::Managed(request) => self.complete(annotations, spec, &request),
            Tenant::Kubelet => self.leave_to_kubelet(spec),
            Tenant::Unmanaged => self.keep_out(annotations, spec),
        }
    }

    /// Whose the pod is.
    fn tenant(
        &self,
        annotations: &BTreeMap<String, String>,
        spec: &PodSpec,
    ) -> Result<Tenant, RequestError> {
        let scheduler = scheduler_of(spec);
        let asks = container_asks(spec);
        let left = match asks.iter().any(|ask| asks_for(ask, |_| true)) {
            true => Tenant::Kubelet,
            false => Tenant::Unmanaged,
        };
        let is_named = self.scheduler_names.iter().any(|name| name == scheduler);
        if !is_named && scheduler != DEFAULT_SCHEDULER {
            return Ok(left);
        }
        // The cluster's own scheduler also serves those who ask kubelet.
        let is_ours = |resource: &str| match self.settings.whole_gpus {
            _ if scheduler != DEFAULT_SCHEDULER => true,
            WholeGpus::TakenOver => resource == WHOLE,
            WholeGpus::Kubelet => false,
        };
        let ours: Vec<ContainerAsk> = asks.iter().map(|ask| only(ask, is_ours)).collect();
        let others = other_keys(annotations, &asks);
        if parse_request(annotations, &ours)?.is_none() {
            if scheduler != DEFAULT_SCHEDULER {
                check(&self.requests, None, &others)?;
            }
            return Ok(left);
        }
        // With all that it asks for, so that nothing is asked of both.
        let request = parse_request(annotations, &asks)?;
        check(&self.requests, request.as_ref(), &others)?;
        Ok(request.map_or(left, |request| Tenant::Managed(Box::new(request))))
    }

    /// Checks and completes a pod that is ours.
    fn complete(
        &self,
        annotations: &BTreeMap<String, String>,
        spec: &PodSpec,
        request: &GpuRequest,
    ) -> Result<Changes, AdmissionError> {
        if let Some(node) = spec.node_name.as_deref().filter(|node| !node.is_empty()) {
            return Err(AdmissionError::NodeName { node: shown(node) });
        }
        self.check_grace(spec)?;
        let clients = match self.settings.memory_limit {
            MemoryLimit::Mps if mps::is_client(request)? => Clients::Granted,
            MemoryLimit::Mps | MemoryLimit::Driver | MemoryLimit::None => Clients::None,
        };
        let volume = (clients == Clients::Granted).then(|| mps::volume(&self.settings.mps_folder));
        refuse_pod(annotations, spec, &self.settings, volume.as_ref())?;
        let all = containers(spec);
        let mut changes = Changes::default();
        self.direct(spec, &mut changes)?;
        let has_volume = mps::has_volume(spec, volume.as_ref())?;
        if let Some(volume) = volume.filter(|_| !has_volume) {
            changes.volume(spec, &volume);
        }
        let taken =
            container_asks(spec).into_iter().find(|ask| asks_for(ask, |name| name == WHOLE));
        let first = spec.containers.first().map_or("", |container| container.name.as_str());
        let gets = request.container.as_deref().unwrap_or(first);
        let mut wanted = Vec::new();
        if taken.is_some() {
            wanted.push((FRACTION, "1".to_owned()));
            wanted.push((DEVICE_COUNT, request.count.to_string()));
        }
        if !gets.is_empty() && (taken.is_some() || request.container.is_none()) {
            // Written down, because another webhook may put a container in front of the first.
            wanted.push((CONTAINER, gets.to_owned()));
        }
        changes.annotate(annotations, &wanted);
        let (mut granted, blank) = (granted(request, self.settings.memory_limit), blank());
        let mut mounts = Vec::new();
        if clients == Clients::Granted {
            granted.extend(mps::variables(self.settings.thread_cap));
            mounts.extend(mps::mounts());
        }
        let markers = markers(request);
        for container in &all {
            refuse_container(container, &self.settings)?;
            let gets_it = container.name == gets && container.list != ContainerList::Ephemeral;
            let owned = self.owned(clients);
            changes.variables(container, if gets_it { &granted } else { &blank }, owned)?;
            changes.mounts(container, if gets_it { &mounts } else { &[] })?;
            if container.list != ContainerList::Ephemeral {
                changes.mark(container, if gets_it { &markers } else { &[] });
            }
            if taken.as_ref().is_some_and(|ask| ask.name == container.name) {
                changes.take_over(container);
            }
        }
        Ok(changes)
    }

    /// Gives a pod scheduler and RuntimeClass, where it names none.
    fn direct(&self, spec: &PodSpec, changes: &mut Changes) -> Result<(), AdmissionError> {
        let scheduler = scheduler_of(spec);
        if !self.scheduler_names.iter().any(|name| name == scheduler)
            && let Some(ours) = self.scheduler_names.first()
        {
            changes.set("schedulerName", ours);
        }
        let Some(expected) = self.settings.runtime_class.as_deref() else {
            return match class_of(spec).filter(|class| self.leads_to_gpus(class)) {
                Some(class) => Err(AdmissionError::UnknownRuntimeClass { class: shown(class) }),
                None => Ok(()),
            };
        };
        match class_of(spec) {
            None => changes.set("runtimeClassName", expected),
            Some(found) if found == expected => {}
            Some(found) => {
                let (found, expected) = (shown(found), expected.to_owned());
                return Err(AdmissionError::RuntimeClass { found, expected });
            }
        }
        Ok(())
    }

    /// Leaves a pod to kubelet's device plugin, unless it names its node itself: where no plugin ever
    /// ran, on nodes of ours, kubelet passes over the resource, and NVIDIA's runtime would give it
    /// whatever its variables or its image name.
    fn leave_to_kubelet(&self, spec: &PodSpec) -> Result<Changes, AdmissionError> {
        let node = spec.node_name.as_deref().filter(|node| !node.is_empty());
        match (node, class_of(spec)) {
            (Some(node), Some(class))
                if self.settings.unmanaged != Unmanaged::Allow && self.leads_to_gpus(class) =>
            {
                Err(AdmissionError::NodeName { node: shown(node) })
            }
            _ => Ok(Changes::default()),
        }
    }

    /// Keeps a pod that asks for no GPU from getting one by its RuntimeClass.
    fn keep_out(
        &self,
        annotations: &BTreeMap<String, String>,
        spec: &PodSpec,
    ) -> Result<Changes, AdmissionError> {
        let mut changes = Changes::default();
        if !self.is_confined(spec) {
            return Ok(changes);
        }
        if let Some(class) = class_of(spec).filter(|class| self.leads_to_gpus(class))
            && self.settings.unmanaged == Unmanaged::Refuse
        {
            let (is_nvidias, class) = (self.is_nvidias(class), shown(class));
            return Err(match is_nvidias {
                true => AdmissionError::UnmanagedRuntimeClass { class },
                false => AdmissionError::UnknownRuntimeClass { class },
            });
        }
        refuse_pod(annotations, spec, &self.settings, None)?;
        for container in &containers(spec) {
            refuse_container(container, &self.settings)?;
            changes.variables(container, &blank(), self.owned(Clients::None))?;
        }
        Ok(changes)
    }

    /// Whether a pod that asks for no GPU is held to what pods with one may have: under a runtime that may
    /// hand out GPUs, and where its scheduler is ours alone, since it may then run beside them. Pods of the
    /// cluster's own scheduler may, too, but where they will run is not known yet.
    fn is_confined(&self, spec: &PodSpec) -> bool {
        let scheduler = scheduler_of(spec);
        let is_named = self.scheduler_names.iter().any(|name| name == scheduler);
        let is_beside = is_named && scheduler != DEFAULT_SCHEDULER;
        let is_suspect = class_of(spec).is_some_and(|class| self.leads_to_gpus(class));
        self.settings.unmanaged != Unmanaged::Allow && (is_beside || is_suspect)
    }

    /// Refuses a pod that could keep its GPU for long after its deletion. It is not made shorter without a
    /// word: whoever wrote it may count on it, for instance to save its work.
    fn check_grace(&self, spec: &PodSpec) -> Result<(), AdmissionError> {
        let most = self.settings.allowed.max_grace_seconds;
        match spec.termination_grace_period_seconds {
            Some(seconds) if u64::try_from(seconds).is_ok_and(|seconds| seconds > most) => {
                Err(AdmissionError::GracePeriod { seconds, most })
            }
            _ => Ok(()),
        }
    }

    fn owned(&self, clients: Clients) -> Owned<'_> {
        Owned { clients, allowed: &self.settings.allowed.variables }
    }

    /// What is written into containers that are added to a running pod. Only those may change now.
    ///
    /// # Errors
    /// [`AdmissionError`] where one of them could reach a GPU.
    fn admit_ephemeral(&self, pod: &Pod, old: Option<&Pod>) -> Result<Changes, AdmissionError> {
        let none = BTreeMap::new();
        let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
        let mut changes = Changes::default();
        let Some(spec) = &pod.spec else { return Ok(changes) };
        let is_confined = match self.tenant(annotations, spec) {
            // Whoever debugs a pod need not mend its request.
            Ok(Tenant::Managed(_)) | Err(_) => true,
            Ok(Tenant::Kubelet) => false,
            Ok(Tenant::Unmanaged) => self.is_confined(spec),
        };
        if !is_confined {
            return Ok(changes);
        }
        let old = old.and_then(|old| old.spec.as_ref()).map(containers).unwrap_or_default();
        let is_ephemeral = |c: &&ContainerView<'_>| c.list == ContainerList::Ephemeral;
        let present: BTreeSet<&str> = old.iter().filter(is_ephemeral).map(|c| c.name).collect();
        let now = containers(spec);
        for added in now.iter().filter(is_ephemeral).filter(|c| !present.contains(c.name)) {
            refuse_container(added, &self.settings)?;
            changes.variables(added, &blank(), self.owned(Clients::None))?;
            changes.mounts(added, &[])?;
        }
        Ok(changes)
    }

    /// Whether a RuntimeClass may lead to NVIDIA's runtime, under whatever name.
    fn leads_to_gpus(&self, class: &str) -> bool {
        !self.settings.allowed.classes_without_gpus.iter().any(|listed| listed == class)
    }

    /// Whether it is known to.
    fn is_nvidias(&self, class: &str) -> bool {
        NVIDIA_CLASSES.contains(&class) || self.settings.runtime_class.as_deref() == Some(class)
    }
}

#[cfg(test)]
mod beside;
#[cfg(test)]
mod tests;
