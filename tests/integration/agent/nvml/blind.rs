//! Containers that started before the driver was loaded, from the process table to the extender.

use std::time::Duration;

use serde_json::json;

use super::loops::Loops;
use crate::harness::agent::bed::{Bed, POD, a100, with};
use crate::harness::agent::extender::Extender;

/// A container as containerd makes it; as plain runc starts it behind the wrapper of the GPU Operator.
const PLAIN: &str = "\
    2240 1999 0:452 / / rw,relatime master:810 - overlay overlay rw,lowerdir=/var/lib/containerd/1/fs\n\
    2241 2240 0:455 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw\n\
    2242 2240 0:456 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755,inode64\n\
    2246 2240 259:2 /var/lib/kubelet/pods/POD/etc-hosts /etc/hosts rw,relatime - ext4 /dev/nvme0n1p2 rw\n\
    2247 2242 259:2 /var/lib/kubelet/pods/POD/containers/main/1 /dev/termination-log rw,relatime - ext4 /dev/nvme0n1p2 rw\n";

/// What NVIDIA's runtime adds, with a driver in a container.
const DRIVER: &str = "\
    2250 2240 0:61 /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05 /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05 ro,nosuid,nodev,relatime - overlay overlay rw\n\
    2251 2240 0:61 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05 ro,nosuid,nodev,relatime - overlay overlay rw\n";

/// What process 1 of the host sees.
const HOST: &str = "\
    29 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n\
    24 29 0:22 / /proc rw,nosuid,nodev,noexec,relatime shared:13 - proc proc rw\n";

/// Adds a process of the container with this first digit.
fn container(bed: &Bed, pid: u32, first: char, mounts: &str) {
    let id = format!("{first}{}", "0".repeat(63));
    bed.process(pid, &format!("0::/kubepods/burstable/pod{POD}/{id}\n"));
    let mounts = mounts.replace("POD", POD);
    std::fs::write(bed.proc_root().join(pid.to_string()).join("mountinfo"), mounts).unwrap();
}

#[test]
fn a_container_without_the_driver_is_blind_until_it_is_made_again() {
    let bed = Bed::new(&json!({"gpus": [with(a100("GPU-a"), "processes", json!([]))]}));
    bed.process(1, "0::/init.scope\n");
    std::fs::write(bed.proc_root().join("1/mountinfo"), HOST).unwrap();
    container(&bed, 20, 'a', PLAIN);
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 20_000);
    extender.starts(POD, 'a');
    assert_eq!(extender.sight(POD), "Unknown");
    let _loops = Loops::start(&bed, &extender, Duration::from_millis(100));
    extender.until("it is blind", |_| (extender.sight(POD) == "Blind").then_some(()));
    assert_eq!(extender.metric("gpupack_blind_pods"), 1);
    container(&bed, 21, 'b', &format!("{PLAIN}{DRIVER}"));
    std::fs::remove_dir_all(bed.proc_root().join("20")).unwrap();
    extender.starts(POD, 'b');
    extender.until("it sees its GPU", |_| (extender.sight(POD) == "Seen").then_some(()));
    assert_eq!(extender.metric("gpupack_blind_pods"), 0);
}
