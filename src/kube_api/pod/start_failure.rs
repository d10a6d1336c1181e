//! Containers that could not be started with their GPU, as kubelet reports in the pod's status.
//!
//! NVIDIA's runtime gives a container the device of its placement, on the node, after every
//! decision. If it refuses, kubelet retries forever and reports the reason as text. This file
//! knows the texts of NVIDIA's container toolkit, 1.17.8 to 1.20.1, about devices and memory limits, as they were
//! seen. It ignores containers that fail for other reasons.

use std::fmt;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

/// Longest part of the runtime's text that is shown, in bytes.
const MAX_WORDS_BYTES: usize = 280;

/// Reasons of a waiting container that the runtime refused to start.
const REFUSED: [&str; 2] = ["RunContainerError", "CreateContainerError"];

/// Reason of the end of such a container, until the next attempt.
const ENDED: &str = "StartError";

/// Why the runtime refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartFault {
    /// The driver of the node does not know the device.
    UnknownDevice,
    /// The runtime cannot resolve the name to a device: it is old, or not one of NVIDIA's.
    UnresolvedName,
    /// The runtime finds no driver.
    NoDriver,
    /// The memory of the container cannot be limited.
    MemoryLimit,
}

/// Texts of the runtime and what they mean. The first that matches applies.
const KNOWN: [(&str, StartFault); 9] = [
    ("GPU memory limits", StartFault::MemoryLimit),
    ("set memory limits for gpu", StartFault::MemoryLimit),
    ("nvmlDeviceSetMemoryLimits", StartFault::MemoryLimit),
    ("NVIDIA_GPU_MEMORY_", StartFault::MemoryLimit),
    ("device handle from UUID", StartFault::UnknownDevice),
    ("not a valid UUID or index", StartFault::UnknownDevice),
    // Toolkits 1.17 and 1.18 say of a device that the driver does not have that no file describes it.
    ("unresolvable CDI devices runtime.nvidia.com/", StartFault::UnknownDevice),
    ("unresolvable CDI devices", StartFault::UnresolvedName),
    ("ERROR_LIBRARY_NOT_FOUND", StartFault::NoDriver),
];

impl StartFault {
    /// The cause, as the end of a sentence about a container.
    fn cause(self) -> &'static str {
        match self {
            Self::UnknownDevice => {
                "the driver of its node does not have the device of its placement"
            }
            Self::UnresolvedName => {
                "the container runtime has no device with the name in its placement"
            }
            Self::NoDriver => "the container runtime finds no driver on its node",
            Self::MemoryLimit => "its node cannot limit the memory of its share",
        }
    }

    /// What the reader can do.
    pub fn suggestion(self) -> &'static str {
        match self {
            Self::UnknownDevice => {
                "delete the pod, so that it is placed again; where `nvidia-smi -L` on the node does not \
                 show the device, the GPU was lost or taken out, or its MIG instance destroyed"
            }
            Self::UnresolvedName => {
                "take `NVIDIA_VISIBLE_DEVICES` from the annotation `placed.gpupack.dev/devices`, as the \
                 webhook does, and use NVIDIA's container toolkit 1.17.8 or later as the handler of \
                 the pod's RuntimeClass on this node"
            }
            Self::NoDriver => {
                "install the driver on the node, or wait until its operator installs it"
            }
            Self::MemoryLimit => {
                "set `webhook.memory_limit: none` and create the pod again, or give every node of \
                 gpupack driver r615 and control groups version 2"
            }
        }
    }
}

/// One container of a pod that the runtime refused to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartFailure {
    container: String,
    fault: StartFault,
    words: String,
}

impl StartFailure {
    /// The first container whose latest attempt failed for a known reason; `None` if it now runs.
    pub fn of(pod: &Pod) -> Option<Self> {
        let status = pod.status.as_ref()?;
        let init = status.init_container_statuses.iter().flatten();
        let regular = status.container_statuses.iter().flatten();
        init.chain(regular).find_map(of_container)
    }

    /// Why the runtime refused.
    pub fn fault(&self) -> StartFault {
        self.fault
    }

    /// Whether the runtime refused the device of this container, so that it may start with another one.
    pub fn is_of_device_of(&self, container: &str) -> bool {
        let is_of_device = match self.fault {
            StartFault::UnknownDevice | StartFault::UnresolvedName => true,
            StartFault::NoDriver | StartFault::MemoryLimit => false,
        };
        is_of_device && self.container == container
    }

    /// The cause, the fix, and the text of the runtime.
    pub fn note(&self) -> String {
        format!("{self}: {}. The runtime says: {}", self.fault.suggestion(), self.words)
    }
}

impl fmt::Display for StartFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "container `{}` cannot start: {}", self.container, self.fault.cause())
    }
}

fn of_container(status: &ContainerStatus) -> Option<StartFailure> {
    let message = refusal(status)?;
    let known = KNOWN.iter().find(|(words, _)| message.contains(words));
    let (words, fault) = known?;
    Some(StartFailure {
        container: status.name.clone(),
        fault: *fault,
        words: around(message, words),
    })
}

/// The text of the runtime, if it refused the container in the latest attempt.
fn refusal(status: &ContainerStatus) -> Option<&str> {
    let state = status.state.as_ref()?;
    if state.running.is_some() {
        return None;
    }
    let waiting = state.waiting.as_ref();
    let refused = waiting.filter(|waiting| {
        waiting.reason.as_deref().is_some_and(|reason| REFUSED.contains(&reason))
    });
    if let Some(message) = refused.and_then(|refused| refused.message.as_deref()) {
        return Some(message);
    }
    let before = status.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let ended = state.terminated.as_ref().or(before)?;
    ended.message.as_deref().filter(|_| ended.reason.as_deref() == Some(ENDED))
}

/// The part of a message around `found`: messages begin with the names of all programs that passed
/// them on. Control characters become blanks.
fn around(message: &str, found: &str) -> String {
    let at = message.find(found).unwrap_or(0);
    let end = message.len().min(at + found.len() + MAX_WORDS_BYTES / 2);
    let end = message.floor_char_boundary(end);
    let start = message.ceil_char_boundary(end.saturating_sub(MAX_WORDS_BYTES));
    let part = &message[start..end];
    // Begin at the next step of the chain, if one is in front of `found`.
    let step = part.find(": ").map_or(0, |colon| colon + 2);
    let part = if start == 0 || start + step > at { part } else { &part[step..] };
    part.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Text of kubelet 1.36 and containerd 1.6 with NVIDIA's toolkit 1.20.1.
    const LOST: &str = "failed to create containerd task: failed to create shim task: OCI runtime \
        create failed: could not apply required modification to OCI specification: error modifying OCI \
        spec: failed to create the automatic CDI modifier: failed to generate CDI spec for mode \
        \"auto\": failed to construct device spec generators: failed to get device handle from UUID: \
        Not Found: unknown";

    fn failure(container: Value) -> Option<StartFailure> {
        let mut container = container;
        for (key, value) in [("name", json!("main")), ("image", json!("")), ("imageID", json!(""))]
        {
            container[key] = value;
        }
        container["ready"] = false.into();
        container["restartCount"] = 3.into();
        let pod = json!({"metadata": {}, "status": {"containerStatuses": [container]}});
        StartFailure::of(&serde_json::from_value(pod).unwrap())
    }

    #[track_caller]
    fn check(container: Value, expected: Option<StartFault>) {
        assert_eq!(failure(container).map(|failure| failure.fault()), expected);
    }

    #[test]
    fn a_lost_device_is_recognized_in_each_kubelet_format() {
        let lost = Some(StartFault::UnknownDevice);
        let ended =
            json!({"terminated": {"exitCode": 128, "reason": "StartError", "message": LOST}});
        let crashing = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}});
        for reason in REFUSED {
            check(json!({"state": {"waiting": {"reason": reason, "message": LOST}}}), lost);
        }
        check(json!({"state": crashing, "lastState": ended}), lost);
        check(json!({"state": ended}), lost);
        check(json!({"state": {"running": {}}, "lastState": ended}), None);
        check(json!({"state": {"waiting": {"reason": "ErrImagePull", "message": LOST}}}), None);
        check(json!({"lastState": ended}), None);
    }

    #[test]
    fn faults_are_classified_by_the_runtime_message() {
        for (message, fault) in [
            (
                "unresolvable CDI devices management.nvidia.com/gpu=GPU-a",
                StartFault::UnresolvedName,
            ),
            (
                "failed to inject CDI devices: unresolvable CDI devices runtime.nvidia.com/gpu=GPU-a: unknown",
                StartFault::UnknownDevice,
            ),
            ("failed to initialize NVML: ERROR_LIBRARY_NOT_FOUND", StartFault::NoDriver),
            ("setting GPU memory limits is only supported in cgroup v2", StartFault::MemoryLimit),
            ("undefined symbol: nvmlDeviceSetMemoryLimits_v1", StartFault::MemoryLimit),
            ("failed to parse NVIDIA_GPU_MEMORY_LIMIT: invalid syntax", StartFault::MemoryLimit),
        ] {
            let state = json!({"waiting": {"reason": "RunContainerError", "message": message}});
            check(json!({ "state": state }), Some(fault));
            let of_device = [StartFault::UnresolvedName, StartFault::UnknownDevice];
            let is_of_device = of_device.contains(&fault);
            let failure = failure(json!({ "state": state })).unwrap();
            assert_eq!(failure.is_of_device_of("main"), is_of_device, "{message}");
            assert!(!failure.is_of_device_of("beside"));
            assert!(!fault.suggestion().is_empty() && !fault.cause().is_empty());
        }
        let other = json!({"waiting": {"reason": "RunContainerError", "message": "no such file"}});
        check(json!({ "state": other }), None);
        check(json!({"state": {"waiting": {"reason": "RunContainerError"}}}), None);
    }

    #[test]
    fn the_excerpt_is_cut_around_the_match() {
        let long = format!("{}\u{1b}é{LOST}{}", "ä".repeat(5_000), "ö".repeat(5_000));
        let state = json!({"waiting": {"reason": "RunContainerError", "message": long}});
        let text = failure(json!({ "state": state })).unwrap().note();
        assert!(text.contains("from UUID: Not Found") && text.len() < 800, "{text}");
        assert!(
            text.starts_with("container `main` cannot start: the driver of its node"),
            "{text}"
        );
        assert!(text.contains("delete the pod") && !text.contains('\u{1b}'), "{text}");
        let seen = json!({"waiting": {"reason": REFUSED[0], "message": LOST}});
        let text = failure(json!({ "state": seen })).unwrap().note();
        let start =
            "The runtime says: could not apply required modification to OCI specification: ";
        assert!(text.contains(start) && text.ends_with("Not Found: unknown"), "{text}");
    }
}
