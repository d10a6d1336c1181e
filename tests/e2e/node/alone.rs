//! One container without kubelet and containerd, on version 2 of control groups.
//!
//! Limits of memory need version 2. Where this machine's kubelet runs on version 1, its containers cannot
//! have them; but the second hierarchy can be mounted beside it, in a mount namespace, and NVIDIA's
//! runtime alone can start a container there. What kubelet would have done is done here: the variables
//! of the pod are filled in from its annotations, and the group is named as kubelet names it.

use std::path::Path;

use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use serde_json::{Value, json};

use super::image;
use super::machine::Machine;
use crate::checker::annotation;

/// Whether the control groups of this machine are those of version 2 alone.
pub(crate) fn is_version_2() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").is_file()
}

/// Mounts version 2 in place of version 1, and has the runtime ($1) create and start a container of the
/// bundle ($2) under the name $3, in two steps as containerd does: in the first NVIDIA's runtime changes
/// the bundle.
const START: &str = r#"
set -e
if [ ! -f /sys/fs/cgroup/cgroup.controllers ]; then
    umount -R /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
"$1" --root /run/containerd/alone create --bundle "$2" "$3"
exec "$1" --root /run/containerd/alone start "$3"
"#;

/// Name of the container: 64 letters, as containerd's.
pub(crate) const ID: &str = "a10e000000000000000000000000000000000000000000000000000000000000";

/// Starts a container of the pod by NVIDIA's runtime alone; answers the path of its group under the root
/// of version 2. What it prints goes to `alone.log`.
pub(crate) fn start(node: &Machine, pod: &Pod, container: &Container) -> String {
    let bundle = node.work.join("bundle");
    std::fs::create_dir_all(&bundle).expect("the work folder is writable");
    let uid = pod.metadata.uid.as_deref().expect("every object has a UID");
    let group = format!("{}/kubepods/besteffort/pod{uid}/{ID}", node.runtime.group());
    let mut env = vec!["PATH=/bin".to_owned()];
    env.extend(container.env.iter().flatten().map(|variable| filled_in(pod, variable)));
    std::fs::write(bundle.join("config.json"), config(&node.work, &group, &env).to_string())
        .expect("the work folder is writable");
    let runtime = node.toolkit.as_ref().expect("NVIDIA's runtime").program();
    let paths = [&runtime, &bundle].map(|path| path.display().to_string());
    let mut arguments = ["--mount", "sh", "-c", START, "alone"].map(str::to_owned).to_vec();
    arguments.extend(paths);
    arguments.push(ID.to_owned());
    node.runtime.cage.start(Path::new("unshare"), &arguments, &node.work.join("alone.log"));
    group
}

/// A variable as kubelet hands it to the container.
fn filled_in(pod: &Pod, variable: &EnvVar) -> String {
    let source = variable.value_from.as_ref().and_then(|source| source.field_ref.as_ref());
    let value = match source {
        None => variable.value.as_deref().unwrap_or_default(),
        Some(field) => {
            let key = field.field_path.strip_prefix("metadata.annotations['");
            let key = key.and_then(|key| key.strip_suffix("']")).expect("an annotation");
            annotation(pod, key).unwrap_or_default()
        }
    };
    format!("{}={value}", variable.name)
}

/// What containerd writes for such a container, as far as it matters.
fn config(work: &Path, group: &str, env: &[String]) -> Value {
    let mount = |to: &str, kind: &str, options: &[&str]| json!({"destination": to, "type": kind, "source": kind, "options": options});
    let namespaces = ["pid", "mount", "ipc", "uts"].map(|kind| json!({"type": kind}));
    let capabilities = ["CAP_MKNOD", "CAP_KILL"];
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/bin/tell"], "env": env,
            "capabilities": {"bounding": capabilities, "effective": capabilities,
                "permitted": capabilities},
        },
        "root": {"path": image::root(work)},
        "mounts": [
            mount("/proc", "proc", &[]),
            mount("/dev", "tmpfs", &["nosuid", "mode=755"]),
        ],
        "linux": {
            "cgroupsPath": group,
            "resources": {"devices": [
                {"allow": false, "access": "rwm"},
                {"allow": true, "type": "c", "access": "m"},
            ]},
            "namespaces": namespaces,
        },
    })
}
