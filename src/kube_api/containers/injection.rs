//! What admission writes into a pod, as JSON patch operations.
//!
//! Each operation is made for one field, never as the difference of two pods: fields of a newer
//! Kubernetes that these types do not know stay unchanged. A complete pod gets no operation.

use std::collections::{BTreeMap, BTreeSet};

use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, RemoveOperation};
use k8s_openapi::api::core::v1::{
    ContainerResizePolicy, EnvVar, PodSpec, Toleration, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};

use crate::config::webhook::MemoryLimit;
use crate::containers::admission_error::AdmissionError;
use crate::containers::container_view::{
    ContainerView, UUIDS_VARIABLE, containers, literal, placed,
};
use crate::containers::mps;
use crate::request::placement::{DEVICES, DRIVER_MEMORY, MEMORY_MIB, UUIDS};
use crate::request::quantity::{parse_count, parse_milli};
use crate::request::request_error::shown;
use crate::request::resources::{MARKERS, WHOLE};
use engine::model::request::{Amount, GpuRequest, Isolation, Movable};

/// NVIDIA's runtime reads the devices of a container from this variable.
pub const DEVICES_VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";
/// The value that gives no device. It overrides the `all` of an image.
pub const NO_DEVICE: &str = "void";

/// The allocated memory per device in MiB, for the workload.
pub const MEMORY_VARIABLE: &str = "GPUPACK_MEMORY_MIB";
/// Guaranteed memory, for the toolkit's hook. Without an explicit zero the hook takes the limit.
const HOOK_REQUEST: &str = "NVIDIA_GPU_MEMORY_REQUEST";
/// Says that the container may be restarted on another GPU at any time.
pub const MOVABLE_VARIABLE: &str = "GPUPACK_MOVABLE";
/// Maximum memory, for the toolkit's hook, in MiB.
const HOOK_LIMIT: &str = "NVIDIA_GPU_MEMORY_LIMIT";

/// The variables that only gpupack sets: they give a container devices or their memory, or say what
/// it got. `CUDA_VISIBLE_DEVICES` is not among them: it only chooses among the devices that a
/// container has.
const OWNED: [&str; 8] = [
    DEVICES_VARIABLE,
    HOOK_REQUEST,
    HOOK_LIMIT,
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    UUIDS_VARIABLE,
    MEMORY_VARIABLE,
    MOVABLE_VARIABLE,
];

/// Prefix of the variables by which NVIDIA's container toolkit is configured; new versions add
/// some.
const TOOLKIT: &str = "NVIDIA_";

/// Prefix of the variables that Docker's swarm sets for its resources. Where the toolkit's configuration names one
/// of them as `swarm-resource`, for instance `DOCKER_RESOURCE_GPU`, it is read in place of
/// [`DEVICES_VARIABLE`] (from toolkit 1.19 on).
const SWARM: &str = "DOCKER_RESOURCE_";

/// Variables with this prefix that give no device and no memory: the toolkit's, and those of
/// NVIDIA's images and libraries. They choose parts of the driver, name versions, or are for
/// programs.
const HARMLESS: [&str; 8] = [
    "NVIDIA_API_KEY",
    "NVIDIA_BUILD_ID",
    "NVIDIA_CUDA_VERSION",
    "NVIDIA_DISABLE_REQUIRE",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_PRODUCT_NAME",
    "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_TRITON_SERVER_VERSION",
];

/// Conditions on driver and GPU: they can only prevent a start.
const HARMLESS_PREFIX: &str = "NVIDIA_REQUIRE_";

/// The variables of MPS, if the container is its client.
const OWNED_OF_CLIENTS: [&str; 3] =
    [mps::PIPE_VARIABLE, mps::MEMORY_VARIABLE, mps::THREADS_VARIABLE];

/// Whether containers of a pod become MPS clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clients {
    /// None; a program may still use MPS inside its container.
    None,
    /// The container that gets the GPU does.
    Granted,
}

/// Which variables only gpupack sets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owned<'a> {
    /// Whether they include those of MPS.
    pub(crate) clients: Clients,
    /// NVIDIA's variables that the operator leaves to users.
    pub(crate) allowed: &'a [String],
}

impl Owned<'_> {
    fn own(self, variable: &str) -> bool {
        self.named().any(|name| name == variable)
            || variable.starts_with(SWARM)
            || (variable.starts_with(TOOLKIT) && !self.is_harmless(variable))
    }

    fn is_harmless(self, variable: &str) -> bool {
        HARMLESS.contains(&variable)
            || variable.starts_with(HARMLESS_PREFIX)
            || self.allowed.iter().any(|allowed| allowed == variable)
    }

    fn named(self) -> impl Iterator<Item = &'static str> {
        let is_client = self.clients == Clients::Granted;
        let of_clients = OWNED_OF_CLIENTS.into_iter().filter(move |_| is_client);
        OWNED.into_iter().chain(of_clients)
    }

    /// One of these variables whose name can begin with `prefix`.
    fn made_by(self, prefix: &str) -> Option<&'static str> {
        let of_toolkit = prefix.starts_with(TOOLKIT) && !prefix.starts_with(HARMLESS_PREFIX);
        let of_swarm =
            prefix.starts_with(SWARM) || (!prefix.is_empty() && SWARM.starts_with(prefix));
        let named = self.named().find(|name| !prefix.is_empty() && name.starts_with(prefix));
        let named = named.or(of_toolkit.then_some("NVIDIA_…"));
        named.or(of_swarm.then_some("DOCKER_RESOURCE_…"))
    }
}

/// The variables of the container that gets the devices of `request`.
pub(crate) fn granted(request: &GpuRequest, limit: MemoryLimit) -> Vec<EnvVar> {
    let mut variables = vec![
        placed(DEVICES_VARIABLE, DEVICES),
        placed(UUIDS_VARIABLE, UUIDS),
        placed(MEMORY_VARIABLE, MEMORY_MIB),
    ];
    let is_shared = match request.amount {
        Amount::Fraction(_)
        | Amount::Memory(_)
        | Amount::FractionAndMemory(..)
        | Amount::SharedSlot => true,
        // No other pod is on the device.
        Amount::Whole | Amount::MigInstance(_) => false,
    };
    // The driver takes no limit for a MIG instance. With hardware isolation the device is one, or a
    // whole GPU. For others *bind* decides, and writes the annotation or not. The CDI specification
    // of an instance does not have the hook, so nothing there reads the empty variable.
    if limit == MemoryLimit::Driver && is_shared && request.isolation != Isolation::Hardware {
        variables.push(literal(HOOK_REQUEST, "0"));
        variables.push(placed(HOOK_LIMIT, DRIVER_MEMORY));
    }
    if request.movable == Movable::Restart {
        variables.push(literal(MOVABLE_VARIABLE, "restart"));
    }
    variables
}

/// The variables of a container that gets no device.
pub(crate) fn blank() -> Vec<EnvVar> {
    vec![literal(DEVICES_VARIABLE, NO_DEVICE)]
}

/// Whether a variable of the pod, of any name, takes its value from the annotation of the devices,
/// which comes with the Binding.
pub fn takes_devices(spec: &PodSpec) -> bool {
    let mut given = containers(spec).into_iter().flat_map(|container| container.env);
    given.any(is_of_devices)
}

/// Whether a variable takes its value from the annotation of the devices.
pub(crate) fn is_of_devices(given: &EnvVar) -> bool {
    given.value_from.as_ref().is_some_and(|source| source.field_ref.is_some())
        && plain(given).value_from == placed(DEVICES_VARIABLE, DEVICES).value_from
}

/// `given` without the defaults of the API server.
fn plain(given: &EnvVar) -> EnvVar {
    let mut plain = given.clone();
    plain.value = plain.value.filter(|value| !value.is_empty());
    if let Some(field) = plain.value_from.as_mut().and_then(|source| source.field_ref.as_mut()) {
        field.api_version = field.api_version.take().filter(|version| version != "v1");
    }
    plain
}

/// The policy of a container by which a change of a resource restarts it.
const RESTART_CONTAINER: &str = "RestartContainer";
/// Whether a container with this policy is restarted when its CPU request is changed.
pub(crate) fn restarts_for_cpu(policy: &ContainerResizePolicy) -> bool {
    policy.resource_name == "cpu" && policy.restart_policy == RESTART_CONTAINER
}

/// The CPU request of a container that has none and may be moved.
const LEAST_CPU: &str = "10m";

/// The effect of taints that keep pods off a node unless they tolerate it.
const NO_SCHEDULE: &str = "NoSchedule";

/// Whether a pod with this toleration tolerates every such taint of the key.
fn is_enough(given: &Toleration, key: &str) -> bool {
    given.operator.as_deref() == Some("Exists")
        && includes(given.key.as_deref(), key)
        && includes(given.effect.as_deref(), NO_SCHEDULE)
}

/// Whether the value of a toleration, where none means any, includes another one.
fn includes(value: Option<&str>, wanted: &str) -> bool {
    value.is_none_or(|value| value.is_empty() || value == wanted)
}

/// Operations on one pod, in the order in which they must be applied.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    operations: Vec<PatchOperation>,
    /// What the client that creates the pod is to know.
    pub(crate) warning: Option<&'static str>,
}

impl Changes {
    /// The operations as a patch; `None` if the pod stays as it is.
    pub(crate) fn into_patch(self) -> Option<json_patch::Patch> {
        (!self.operations.is_empty()).then_some(json_patch::Patch(self.operations))
    }

    /// The same operations on a template at this place of an object.
    pub(crate) fn within(self, place: &PointerBuf, template: &Value) -> Self {
        let needs_metadata = self.operations.iter().any(|operation| {
            operation.path().tokens().next().is_some_and(|token| token.decoded() == "metadata")
        });
        let mut operations = Vec::new();
        if needs_metadata && !template["metadata"].is_object() {
            let path = place.with_trailing_token("metadata");
            operations.push(PatchOperation::Add(AddOperation { path, value: json!({}) }));
        }
        for mut operation in self.operations {
            if let PatchOperation::Add(AddOperation { path, .. })
            | PatchOperation::Remove(RemoveOperation { path }) = &mut operation
            {
                *path = place.concat(path);
            }
            operations.push(operation);
        }
        Self { operations, ..self }
    }

    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Adds operations that are applied after these.
    pub(crate) fn append(&mut self, more: Self) {
        self.operations.extend(more.operations);
        self.warning = self.warning.or(more.warning);
    }

    pub(crate) fn set(&mut self, field: &str, value: &str) {
        self.add(&["spec", field], json!(value));
    }

    /// Sets annotations, on a pod that has the annotations `present`.
    pub(crate) fn annotate(
        &mut self,
        present: &BTreeMap<String, String>,
        wanted: &[(&str, String)],
    ) {
        let missing = wanted.iter().filter(|(key, value)| present.get(*key) != Some(value));
        if present.is_empty() && missing.clone().next().is_some() {
            self.add(&["metadata", "annotations"], json!({}));
        }
        for (key, value) in missing {
            self.add(&["metadata", "annotations", key], json!(value));
        }
    }

    /// Gives a container each variable of `wanted` once. Missing ones go in front of all others,
    /// which may then refer to them.
    ///
    /// # Errors
    /// [`AdmissionError::Variable`] and [`AdmissionError::EnvFromPrefix`] if the pod sets one of
    /// our variables differently.
    pub(crate) fn variables(
        &mut self,
        container: &ContainerView<'_>,
        wanted: &[EnvVar],
        owned: Owned<'_>,
    ) -> Result<(), AdmissionError> {
        refuse_prefixes(container, owned)?;
        let mut present = Vec::new();
        let mut repeated = Vec::new();
        for (index, given) in container.env.iter().enumerate() {
            if !owned.own(&given.name) {
                continue;
            }
            match wanted.iter().position(|wanted| *wanted == plain(given)) {
                None => {
                    let (container, variable) = (shown(container.name), shown(&given.name));
                    return Err(AdmissionError::Variable { container, variable });
                }
                Some(which) if present.contains(&which) => repeated.push(index),
                Some(which) => present.push(which),
            }
        }
        let (list, place) = (container.list.field(), container.index.to_string());
        for index in repeated.into_iter().rev() {
            self.remove(&["spec", list, &place, "env", &index.to_string()]);
        }
        let missing = wanted.iter().enumerate().filter(|(which, _)| !present.contains(which));
        let missing: Vec<Value> = missing.map(|(_, variable)| json!(variable)).collect();
        if container.env.is_empty() {
            if !missing.is_empty() {
                self.add(&["spec", list, &place, "env"], Value::Array(missing));
            }
            return Ok(());
        }
        for variable in missing.into_iter().rev() {
            self.add(&["spec", list, &place, "env", "0"], variable);
        }
        Ok(())
    }

    /// Gives a container each mount of `wanted` once.
    ///
    /// # Errors
    /// [`AdmissionError::MpsMount`].
    pub(crate) fn mounts(
        &mut self,
        container: &ContainerView<'_>,
        wanted: &[VolumeMount],
    ) -> Result<(), AdmissionError> {
        let missing = mps::missing_mounts(container, wanted)?;
        let (list, place) = (container.list.field(), container.index.to_string());
        for (index, given) in container.mounts.iter().enumerate().rev() {
            if wanted.contains(given) && container.mounts[..index].contains(given) {
                self.remove(&["spec", list, &place, "volumeMounts", &index.to_string()]);
            }
        }
        if container.mounts.is_empty() && !missing.is_empty() {
            self.add(&["spec", list, &place, "volumeMounts"], json!([]));
        }
        for mount in missing {
            self.add(&["spec", list, &place, "volumeMounts", "-"], json!(mount));
        }
        Ok(())
    }

    pub(crate) fn volume(&mut self, spec: &PodSpec, volume: &Volume) {
        if spec.volumes.as_ref().is_none_or(Vec::is_empty) {
            self.add(&["spec", "volumes"], json!([]));
        }
        self.add(&["spec", "volumes", "-"], json!(volume));
    }

    /// Makes a pod tolerate taints of these keys that have the effect `NoSchedule`, whatever their
    /// value: what the API server's own plugin `ExtendedResourceToleration` adds to pods of a device
    /// plugin.
    pub(crate) fn tolerate(&mut self, spec: &PodSpec, keys: &[String]) {
        let given = spec.tolerations.as_deref().unwrap_or_default();
        let missing: BTreeSet<&String> =
            keys.iter().filter(|key| !given.iter().any(|one| is_enough(one, key))).collect();
        if given.is_empty() && !missing.is_empty() {
            self.add(&["spec", "tolerations"], json!([]));
        }
        for key in missing {
            let toleration = json!({"key": key, "operator": "Exists", "effect": NO_SCHEDULE});
            self.add(&["spec", "tolerations", "-"], toleration);
        }
    }

    /// Gives a pod this PriorityClass. The API server writes the value of the class itself, and refuses
    /// one that another class has left there.
    pub(crate) fn prioritize(&mut self, spec: &PodSpec, class: &str) {
        if spec.priority_class_name.as_deref() == Some(class) {
            return;
        }
        self.set("priorityClassName", class);
        let left = [
            ("priority", spec.priority.is_some()),
            ("preemptionPolicy", spec.preemption_policy.is_some()),
        ];
        for (field, _) in left.into_iter().filter(|(_, is_there)| *is_there) {
            let path = PointerBuf::from_tokens(["spec", field]);
            self.operations.push(PatchOperation::Remove(RemoveOperation { path }));
        }
    }

    /// Sets the longest time in which the containers of a pod end.
    pub(crate) fn end_within(&mut self, spec: &PodSpec, seconds: u32) {
        if spec.termination_grace_period_seconds != Some(i64::from(seconds)) {
            self.add(&["spec", "terminationGracePeriodSeconds"], json!(seconds));
        }
    }

    /// Lets kubelet restart a container when its CPU request is changed, and gives it one.
    pub(crate) fn restart_on_resize(&mut self, container: &ContainerView<'_>) {
        let (list, place) = (container.list.field(), container.index.to_string());
        if !container.resize.iter().any(restarts_for_cpu) {
            let others = container.resize.iter().filter(|policy| policy.resource_name != "cpu");
            let mut policies: Vec<Value> = others.map(|policy| json!(policy)).collect();
            policies.push(json!({"resourceName": "cpu", "restartPolicy": RESTART_CONTAINER}));
            self.add(&["spec", list, &place, "resizePolicy"], Value::Array(policies));
        }
        let resources = container.resources;
        let requests = resources.and_then(|all| all.requests.as_ref());
        if has_cpu(requests) || has_cpu(resources.and_then(|all| all.limits.as_ref())) {
            return;
        }
        // A pod without any request could not be resized: its QoS class may not change.
        if resources.is_none() {
            self.make(&["spec", list, &place, "resources"]);
        }
        if requests.is_none() {
            self.make(&["spec", list, &place, "resources", "requests"]);
        }
        self.add(&["spec", list, &place, "resources", "requests", "cpu"], json!(LEAST_CPU));
    }

    /// Makes the marker resources of a container equal to `markers`, in its limits.
    pub(crate) fn mark(&mut self, container: &ContainerView<'_>, markers: &[(&str, u64)]) {
        let none = BTreeMap::new();
        let limits = container.resources.and_then(|all| all.limits.as_ref()).unwrap_or(&none);
        let requests = container.resources.and_then(|all| all.requests.as_ref()).unwrap_or(&none);
        let (list, place) = (container.list.field(), container.index.to_string());
        for key in MARKERS {
            let wanted = markers.iter().find(|(name, _)| *name == key).map(|(_, amount)| *amount);
            for (part, amounts) in [("limits", limits), ("requests", requests)] {
                let given = amounts.get(key);
                if given.is_some() && !wanted.is_some_and(|wanted| says(given, wanted)) {
                    self.remove(&["spec", list, &place, "resources", part, key]);
                }
            }
        }
        let missing = markers.iter().filter(|(key, amount)| !says(limits.get(*key), *amount));
        let missing: Vec<_> = missing.collect();
        if missing.is_empty() {
            return;
        }
        if container.resources.is_none() {
            self.make(&["spec", list, &place, "resources"]);
        }
        if container.resources.is_none_or(|all| all.limits.is_none()) {
            self.add(&["spec", list, &place, "resources", "limits"], json!({}));
        }
        for (key, amount) in missing {
            let tokens = ["spec", list, &place, "resources", "limits", *key];
            self.add(&tokens, json!(amount.to_string()));
        }
    }

    /// Removes whole GPUs from the resources of a container, so that kubelet gives it none.
    pub(crate) fn take_over(&mut self, container: &ContainerView<'_>) {
        let Some(resources) = container.resources else { return };
        let (list, place) = (container.list.field(), container.index.to_string());
        for (part, amounts) in [("limits", &resources.limits), ("requests", &resources.requests)] {
            if amounts.as_ref().is_some_and(|amounts| amounts.contains_key(WHOLE)) {
                self.remove(&["spec", list, &place, "resources", part, WHOLE]);
            }
        }
    }

    /// Adds an empty object, unless an operation has added it.
    fn make(&mut self, tokens: &[&str]) {
        let path = PointerBuf::from_tokens(tokens.iter().copied());
        let is_added = self.operations.iter().any(|operation| {
            matches!(operation, PatchOperation::Add(_)) && *operation.path() == path
        });
        if !is_added {
            self.add(tokens, json!({}));
        }
    }

    fn add(&mut self, tokens: &[&str], value: Value) {
        let path = PointerBuf::from_tokens(tokens.iter().copied());
        self.operations.push(PatchOperation::Add(AddOperation { path, value }));
    }

    fn remove(&mut self, tokens: &[&str]) {
        let path = PointerBuf::from_tokens(tokens.iter().copied());
        self.operations.push(PatchOperation::Remove(RemoveOperation { path }));
    }
}

fn has_cpu(amounts: Option<&BTreeMap<String, Quantity>>) -> bool {
    let cpu = amounts.and_then(|amounts| amounts.get("cpu"));
    cpu.is_some_and(|cpu| parse_milli(&cpu.0).is_ok_and(|milli| milli > 0))
}

fn says(given: Option<&Quantity>, amount: u64) -> bool {
    given.is_some_and(|given| parse_count(&given.0) == Ok(amount))
}

/// Refuses an `envFrom` whose prefix could make one of our variables. Admission does not know what
/// is in a ConfigMap or Secret; a variable that we set overrides it.
fn refuse_prefixes(container: &ContainerView<'_>, owned: Owned<'_>) -> Result<(), AdmissionError> {
    for prefix in container.env_from.iter().filter_map(|source| source.prefix.as_deref()) {
        if let Some(variable) = owned.made_by(prefix) {
            let (container, prefix) = (shown(container.name), shown(prefix));
            return Err(AdmissionError::EnvFromPrefix { container, prefix, variable });
        }
    }
    Ok(())
}
