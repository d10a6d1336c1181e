//! Which pod a process belongs to, read from its control group.
//!
//! Kubelet puts each container below a cgroup that names the pod's UID. The path differs by cgroup
//! driver (systemd, cgroupfs), version (1, 2), quality-of-service class, container runtime and by
//! what lies above (nested clusters, a custom root, a private cgroup namespace). So one path
//! component is recognised by its pattern, wherever it stands. Process ids are those of the host:
//! the agent needs `hostPID`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::packing::device::PodUid;

/// Most bytes of a cgroup file that are read: one line per controller, each a path.
const MAX_CGROUP_BYTES: u64 = 64 << 10;

/// Finds the pod of a process below a `proc` file system.
#[derive(Clone, Debug)]
pub struct PodsByProcess {
    /// Where `proc` is mounted.
    root: PathBuf,
}

impl PodsByProcess {
    /// Looks below `root`, which is `/proc` but in tests.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The pod of process `pid`; none when it is no pod's, has ended, or may not be read.
    pub fn pod_of(&self, pid: u32) -> Option<PodUid> {
        read_lossily(&self.root.join(pid.to_string()).join("cgroup"))
            .and_then(|text| pod_in_cgroup(&text))
    }
}

/// The beginning of a file as text; none when it cannot be read.
fn read_lossily(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_CGROUP_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The pod named by the text of a `/proc/<pid>/cgroup` file. Where pods are nested (a cluster in a
/// pod), the outermost one counts: that is the pod of the cluster which owns the node.
pub fn pod_in_cgroup(text: &str) -> Option<PodUid> {
    // A line is `hierarchy:controllers:path`; the path may contain colons (containerd's systemd
    // names do), so only the first two separate.
    text.lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .find_map(|path| path.split('/').find_map(pod_in_component))
}

/// The pod named by one component of a cgroup path: `pod<uid>` with cgroupfs,
/// `…-pod<uid with underscores>.slice` with systemd.
fn pod_in_component(component: &str) -> Option<PodUid> {
    // With a runtime that takes kubelet's systemd names literally (driver set on one side alone),
    // the component goes on: `…-pod<uid>.slice:cri-containerd:<container>`.
    let name = component.split(':').next().unwrap_or(component);
    let uid = match name.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod").map(|(_, uid)| uid),
        None => name.strip_prefix("pod"),
    };
    uid.and_then(to_uid)
}

/// The UID in its usual spelling, or none when it is none: 32 hexadecimal digits, grouped 8-4-4-4-12
/// by dashes or underscores (API server), or not at all (hash of a static pod's manifest).
fn to_uid(text: &str) -> Option<PodUid> {
    if text.len() > 36 {
        return None;
    }
    let uid = text.replace('_', "-");
    let groups: Vec<usize> = uid.split('-').map(str::len).collect();
    let known_shape = matches!(groups[..], [8, 4, 4, 4, 12] | [32]);
    let hexadecimal = uid.chars().all(|c| c == '-' || c.is_ascii_hexdigit());
    (known_shape && hexadecimal).then(|| PodUid::new(uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00";
    const SLICE: &str = "0d5ab2f3_58e1_4f5c_9a4b_1c7d3c1e8f00";
    const STATIC: &str = "9f8e7d6c5b4a39281706f5e4d3c2b1a0";
    const ID: &str = "b2c0a1d4e5f60718293a4b5c6d7e8f90b2c0a1d4e5f60718293a4b5c6d7e8f90";

    #[test]
    fn the_pod_is_found_in_every_form_of_path() {
        let systemd = format!("kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope");
        for (text, uid) in [
            // systemd driver, version 2: burstable, best effort, guaranteed.
            (format!("0::/kubepods.slice/kubepods-burstable.slice/{systemd}\n"), UID),
            (
                format!(
                    "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICE}.slice/crio-{ID}.scope"
                ),
                UID,
            ),
            (
                format!("0::/kubepods.slice/kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope"),
                UID,
            ),
            // Nested below the container: CRI-O's `container` sub-cgroup, an init process's own.
            (
                format!("0::/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{ID}.scope/container"),
                UID,
            ),
            // cgroupfs driver.
            (format!("0::/kubepods/burstable/pod{UID}/{ID}"), UID),
            (format!("0::/kubepods/pod{UID}/{ID}"), UID),
            // Version 1 and hybrid: several lines, some of them elsewhere.
            (
                format!(
                    "12:memory:/system.slice\n11:devices:/kubepods/besteffort/pod{UID}/{ID}\n0::/"
                ),
                UID,
            ),
            (format!("4:cpu,cpuacct:/kubepods/pod{UID}/{ID}\n"), UID),
            // The systemd driver set in kubelet alone.
            (
                format!(
                    "1:name=systemd:/system.slice/containerd.service/kubepods-burstable-pod{SLICE}.slice:cri-containerd:{ID}"
                ),
                UID,
            ),
            // Static pods, a custom root, kind, a private cgroup namespace.
            (
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/crio-{ID}.scope"
                ),
                STATIC,
            ),
            (format!("0::/kubepods/burstable/pod{STATIC}/{ID}"), STATIC),
            (
                format!(
                    "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope"
                ),
                UID,
            ),
            (format!("0::/../../pod{UID}/{ID}"), UID),
            (
                format!(
                    "0::/../../../kubepods-besteffort.slice/kubepods-besteffort-pod{SLICE}.slice/x"
                ),
                UID,
            ),
            // A cluster in a pod: the outer pod counts.
            (format!("0::/kubepods/pod{UID}/{ID}/kubepods/pod{STATIC}/{ID}"), UID),
            // No pod's.
            ("0::/user.slice/user-1000.slice/session-3.scope".to_owned(), ""),
            ("0::/system.slice/podman-123.service".to_owned(), ""),
            (format!("0::/machine.slice/libpod-{ID}.scope"), ""),
            ("0::/kubepods/pod-not-a-uid/x".to_owned(), ""),
            (format!("0::/kubepods/pod{}/x", &UID[1..]), ""),
            (format!("0::/kubepods/pod{}/x", UID.replace('d', "z")), ""),
            (String::new(), ""),
            ("garbage\n::\n\u{fffd}".to_owned(), ""),
        ] {
            let found = pod_in_cgroup(&text).map(|uid| uid.to_string()).unwrap_or_default();
            assert_eq!(found, uid, "{text}");
        }
    }

    #[test]
    fn an_ended_or_unreadable_process_belongs_to_no_pod() {
        let proc = tempfile::tempdir().unwrap();
        let pods = PodsByProcess::new(proc.path());
        assert_eq!(pods.pod_of(7), None);
        std::fs::create_dir_all(proc.path().join("7/cgroup")).unwrap();
        assert_eq!(pods.pod_of(7), None, "a directory cannot be read as a file");
        std::fs::create_dir_all(proc.path().join("8")).unwrap();
        let mut bytes = b"1:x:/\xff\xfe\n".to_vec();
        bytes.extend_from_slice(format!("0::/kubepods/pod{UID}/{ID}").as_bytes());
        std::fs::write(proc.path().join("8/cgroup"), bytes).unwrap();
        assert_eq!(pods.pod_of(8), Some(PodUid::new(UID)));
    }
}
