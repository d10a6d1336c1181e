use std::path::PathBuf;

use super::*;
use wire::report::bodies::AllocationState;

const UID: &str = "0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00";
const OTHER: &str = "1d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00";

/// What the host sees: its root, and what runtimes mount for containers.
const HOST: &str = "\
    22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
    25 22 0:5 / /proc rw,nosuid shared:12 - proc proc rw\n\
    300 22 0:60 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/c/rootfs rw - overlay overlay rw\n";

/// A container as containerd makes it, without a GPU.
const PLAIN: &str = "\
    700 699 0:200 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/var/lib/nvidia-image\n\
    701 700 0:201 / /proc rw,nosuid - proc proc rw\n\
    702 700 0:202 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k\n\
    703 702 0:203 / /dev/shm rw - tmpfs shm rw\n\
    704 700 259:1 /var/lib/kubelet/pods/0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00/etc-hosts /etc/hosts rw,relatime - ext4 /dev/root rw\n\
    705 700 259:1 /var/lib/kubelet/pods/0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00/containers/m/1 /dev/termination-log rw - ext4 /dev/root rw\n";

/// What CDI adds for compute: one file each.
const CDI: &str = "\
    710 700 259:1 /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05 /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05 ro,nosuid,nodev,relatime - ext4 /dev/root rw\n\
    711 700 259:1 /usr/bin/nvidia-smi /usr/bin/nvidia-smi ro,nosuid,nodev,relatime - ext4 /dev/root rw\n";

/// What `libnvidia-container` adds for utilities alone, of a driver in a container.
const LEGACY: &str = "\
    720 700 0:300 / /proc/driver/nvidia rw,nosuid,nodev,noexec,relatime - tmpfs tmpfs rw,mode=555\n\
    721 700 0:77 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.172.08 /usr/lib64/libnvidia-ml.so.570.172.08 ro,nosuid,nodev,relatime - overlay overlay rw\n\
    722 702 0:6 /nvidiactl /dev/nvidiactl ro,nosuid,noexec,relatime - devtmpfs udev rw\n";

/// A process table in a folder of its own.
struct Table(tempfile::TempDir);

impl Table {
    fn new() -> Self {
        let table = Self(tempfile::tempdir().unwrap());
        table.process(1, 1, "0::/init.scope", HOST);
        table
    }

    fn file(&self, pid: u32, name: &str) -> PathBuf {
        self.0.path().join(pid.to_string()).join(name)
    }

    fn process(&self, pid: u32, began: u64, cgroup: &str, mounts: &str) {
        std::fs::create_dir_all(self.file(pid, "")).unwrap();
        let zeros = "0 ".repeat(18);
        let stat = format!("{pid} (runc:[2:INIT]) S {zeros}{began} 0\n");
        std::fs::write(self.file(pid, "stat"), stat).unwrap();
        std::fs::write(self.file(pid, "cgroup"), cgroup).unwrap();
        std::fs::write(self.file(pid, "mountinfo"), mounts).unwrap();
    }

    fn end(&self, pid: u32) {
        std::fs::remove_dir_all(self.file(pid, "")).unwrap();
    }

    fn pods(&self) -> PodsByProcess {
        PodsByProcess::new(self.0.path())
    }
}

/// The id of a container, of which only the first digit is said.
fn id(first: char) -> String {
    format!("{first}{}", "0".repeat(63))
}

fn group(uid: &str, container: char) -> String {
    let slice = uid.replace('-', "_");
    let id = id(container);
    format!("0::/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{id}.scope\n")
}

fn allocation(uid: &str, state: AllocationState) -> Allocation {
    let (pod_uid, pod) = (uid.to_owned(), "d/p".to_owned());
    Allocation { pod_uid, pod, state, devices: Vec::new(), is_guest: false }
}

fn seconds(seconds: u64) -> Timestamp {
    Timestamp::from_millis(1_000 * seconds)
}

/// One that knows a pod since the start of time.
fn with_pod() -> DriverMounts {
    let mut found = DriverMounts::default();
    found.observe(&[allocation(UID, AllocationState::Confirmed)], seconds(0));
    found
}

/// First digits of the containers, `+` for those with the driver.
fn shown(found: &DriverMounts) -> String {
    let show = |report: ContainerReport| {
        format!("{}{}", if report.has_driver { "+" } else { "-" }, &report.id[..1])
    };
    found.reports().into_iter().map(show).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_driver_is_seen_by_the_mounts_of_its_libraries() {
    for (mounts, expected) in [
        (PLAIN.to_owned(), "-a"),
        (format!("{PLAIN}{CDI}"), "+a"),
        (format!("{PLAIN}{LEGACY}"), "+a"),
        // A folder with the driver, as on GKE; graphics alone.
        (format!("{PLAIN}710 700 259:1 /opt/driver /usr/local/nvidia ro - ext4 /dev/a rw\n"), ""),
        (format!("{PLAIN}722 702 0:6 /nvidiactl /dev/nvidiactl ro - devtmpfs udev rw\n"), ""),
        // Stubs and libraries of the image are files of its own, and the pod's volumes are no libraries.
        (format!("{PLAIN}710 700 259:1 /v /usr/local/cuda/libcuda rw - ext4 /dev/a rw\n"), "-a"),
        // A volume that is called like one.
        (
            format!(
                "{PLAIN}710 700 259:1 /var/lib/kubelet/pods/{UID}/volumes/c/x /x/libcuda.so.1 ro - ext4 /dev/a rw\n"
            ),
            "-a",
        ),
        // A program that has changed its root to a volume of the pod, with files like kubelet's in it.
        (
            format!(
                "700 699 259:1 /var/lib/kubelet/pods/{UID}/volumes/e/v / rw - ext4 /dev/a rw\n\
             701 700 259:1 /var/lib/kubelet/pods/{UID}/volume-subpaths/e/etc-hosts /etc/hosts rw - ext4 /dev/a rw\n"
            ),
            "",
        ),
        // Not whole yet, or `chroot`: what is missing may be there.
        (HOST.to_owned(), ""),
        (PLAIN.replace(" / / rw", " / /elsewhere rw"), ""),
        (String::new(), ""),
        ("\0 \\".to_owned(), ""),
        (format!("{PLAIN}{}", PLAIN.repeat(4_000)), ""),
    ] {
        let (table, mut found) = (Table::new(), with_pod());
        table.process(7, 100, &group(UID, 'a'), &mounts);
        found.look(&table.pods(), seconds(1));
        assert_eq!(shown(&found), expected, "{:.2000}", mounts);
    }
}

#[test]
fn what_cannot_be_read_stays_unknown_until_it_can() {
    let (table, mut found) = (Table::new(), with_pod());
    table.process(7, 100, &group(UID, 'a'), HOST);
    found.look(&table.pods(), seconds(1));
    assert_eq!(shown(&found), "", "mounts are being made");
    table.process(7, 100, &group(UID, 'a'), &format!("{PLAIN}{CDI}"));
    found.look(&table.pods(), seconds(2));
    assert_eq!(shown(&found), "+a");
    let (table, mut found) = (Table::new(), with_pod());
    table.process(7, 100, &group(UID, 'a'), PLAIN);
    std::fs::remove_file(table.file(1, "mountinfo")).unwrap();
    found.look(&table.pods(), seconds(1));
    assert_eq!(shown(&found), "", "what the host sees is not known");
}

#[test]
fn a_program_with_users_of_its_own_may_hide_mounts() {
    for (users, expected) in [("0 0 4294967295", "-a"), ("0 1000 1", "")] {
        let (table, mut found) = (Table::new(), with_pod());
        table.process(7, 100, &group(UID, 'a'), PLAIN);
        std::fs::write(table.file(1, "uid_map"), "0 0 4294967295").unwrap();
        std::fs::write(table.file(7, "uid_map"), users).unwrap();
        found.look(&table.pods(), seconds(1));
        assert_eq!(shown(&found), expected, "{users}");
    }
}

#[test]
fn a_container_is_judged_by_its_oldest_process_and_once() {
    let (table, mut found) = (Table::new(), with_pod());
    table.process(9, 100, &group(UID, 'a'), &format!("{PLAIN}{CDI}"));
    table.process(7, 200, &group(UID, 'a'), PLAIN); // a container in the container
    table.process(8, 100, &group(UID, 'b'), PLAIN);
    table.process(6, 100, &group(OTHER, 'c'), PLAIN);
    table.process(5, 100, "0::/system.slice", PLAIN);
    found.look(&table.pods(), seconds(1));
    assert_eq!(shown(&found), "+a -b");
    std::fs::remove_file(table.file(9, "mountinfo")).unwrap();
    found.look(&table.pods(), seconds(2));
    assert_eq!(shown(&found), "+a -b", "its mounts are not read again");
    table.end(9);
    table.end(7);
    table.process(4, 300, &group(UID, 'd'), PLAIN);
    found.look(&table.pods(), seconds(3));
    assert_eq!(shown(&found), "+a -b -d", "it was restarted");
    found.observe(&[allocation(UID, AllocationState::Draining)], seconds(4));
    table.process(3, 300, &group(UID, 'e'), PLAIN);
    found.look(&table.pods(), seconds(4));
    assert_eq!(shown(&found), "+a -b -d", "it has ended");
    found.observe(&[], seconds(5));
    assert_eq!(shown(&found), "");
}

#[test]
fn the_process_table_is_read_rarely_once_all_is_known() {
    let (table, mut found) = (Table::new(), with_pod());
    let mut check = |second: u64, expected: &str, why: &str| {
        found.look(&table.pods(), seconds(second));
        assert_eq!(shown(&found), expected, "{why}");
    };
    check(1, "", "no container yet");
    table.process(7, 100, &group(UID, 'a'), PLAIN);
    check(2, "-a", "the pod is new: each sample");
    check(100, "-a", "");
    table.process(8, 100, &group(UID, 'b'), &format!("{PLAIN}{CDI}"));
    check(104, "-a", "");
    check(105, "-a +b", "one alone may be its sandbox: every five seconds");
    table.process(9, 100, &group(UID, 'c'), PLAIN);
    check(150, "-a +b", "all is known");
    check(165, "-a +b -c", "every minute");
    table.end(8);
    table.process(10, 500, &group(UID, 'd'), PLAIN);
    check(170, "-a +b -c", "two others run");
    table.end(9);
    check(175, "-a +b -c -d", "only one is left");
}

#[test]
fn containers_of_before_the_agent_are_marked() {
    let (table, mut found) = (Table::new(), with_pod());
    table.process(std::process::id(), 150, "0::/", PLAIN);
    table.process(7, 100, &group(UID, 'a'), PLAIN);
    table.process(8, 200, &group(UID, 'b'), PLAIN);
    found.look(&table.pods(), seconds(1));
    let older: Vec<bool> = found.reports().iter().map(|report| report.is_older).collect();
    assert_eq!(older, [true, false]);
}

#[test]
fn a_pod_that_restarts_for_ever_takes_bounded_memory() {
    let (table, mut found) = (Table::new(), with_pod());
    for restart in 0..100_u64 {
        let id = format!("{restart:064x}");
        let pid = 100 + u32::try_from(restart).unwrap();
        table.process(pid, 100 + restart, &format!("0::/kubepods/pod{UID}/{id}"), PLAIN);
        found.look(&table.pods(), seconds(restart / 10));
        table.end(pid);
    }
    let reports = found.reports();
    assert_eq!(reports.len(), MAX_OF_POD);
    assert!(reports.iter().any(|report| report.id == format!("{:064x}", 99)), "the last is kept");
}
