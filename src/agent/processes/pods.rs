//! The pod of a process, read from its control group.
//!
//! Kubelet puts each container below a cgroup that names the pod's UID. The path differs by cgroup
//! driver (systemd, cgroupfs), version (1, 2), quality-of-service class, container runtime and by
//! what lies above (nested clusters, a custom root, a private cgroup namespace). So one path
//! component is recognized by its pattern at any position. Process ids are those of the host:
//! the agent needs `hostPID`.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::gpu::lent_limits::{Containers, SetLimit};
use wire::ids::PodUid;

/// Most bytes of a cgroup file that are read: one line per controller, each a path.
pub(crate) const MAX_CGROUP_BYTES: u64 = 64 << 10;

/// Most bytes of a `stat` file that are read: one line of about 300 bytes.
pub(crate) const MAX_STAT_BYTES: u64 = 4 << 10;

/// Mount point of the kernel's control groups, version 2.
pub(crate) const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Most control groups of a process below its pod's that are read; a container has one or two.
const MAX_GROUPS: usize = 4;

/// Clock ticks per second in the kernel's times for processes: `USER_HZ`, which is 100 on every
/// architecture that has NVIDIA's driver.
const TICKS_PER_SECOND: u64 = 100;

/// Most processes of a node among which containers are sought.
pub(crate) const MAX_PROCESSES: usize = 65_536;

/// A time since the boot of the host, in ticks of its process table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTicks(u64);

/// Finds the pod of a process below a `proc` file system.
#[derive(Clone, Debug)]
pub struct PodsByProcess {
    /// Where `proc` is mounted.
    pub(crate) root: PathBuf,
}

impl PodsByProcess {
    /// Reads below `root`, which is `/proc` except in tests.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The present time of the host; `None` if it is not readable.
    pub fn now(&self) -> Option<BootTicks> {
        uptime(&read_lossily(&self.root.join("uptime"), MAX_STAT_BYTES)?)
    }

    /// The folder of the process `pid`.
    pub(crate) fn folder_of(&self, pid: u32) -> PathBuf {
        self.root.join(pid.to_string())
    }

    /// When the process `pid` began; `None` if it has ended or is not readable.
    pub(crate) fn running_since(&self, pid: u32) -> Option<BootTicks> {
        let stat = read_lossily(&self.folder_of(pid).join("stat"), MAX_STAT_BYTES)?;
        began(&stat).filter(|_| is_running(&stat))
    }

    /// The control groups that limit the process `pid`, see [`groups_in_cgroup`].
    pub fn groups_of(&self, pid: u32) -> Vec<String> {
        read_lossily(&self.folder_of(pid).join("cgroup"), MAX_CGROUP_BYTES)
            .map(|text| groups_in_cgroup(&text))
            .unwrap_or_default()
    }

    /// The control groups of the containers of these pods that have a process now, by UID of the pod. Reads the whole
    /// process table.
    ///
    /// # Errors
    /// What that means for their limits, if some may be missing: a process cannot be read now, or there are too many,
    /// or their control groups are never shown by their whole paths.
    pub(crate) fn containers_of(&self, pods: &BTreeSet<PodUid>) -> Result<Containers, SetLimit> {
        let entries = std::fs::read_dir(&self.root).map_err(|_| SetLimit::Failed)?;
        let (mut found, mut count) = (Containers::new(), 0);
        for entry in entries {
            let name = entry.map_err(|_| SetLimit::Failed)?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            count += 1;
            let folder = self.folder_of(pid);
            match read_lossily(&folder.join("cgroup"), MAX_CGROUP_BYTES) {
                _ if count > MAX_PROCESSES => return Err(SetLimit::Failed),
                None if folder.exists() => return Err(SetLimit::Failed),
                None => {}
                Some(text) => {
                    let pod = pod_in_cgroup(&text).filter(|pod| pods.contains(pod));
                    if let Some(pod) = pod {
                        let container = groups_in_cgroup(&text).into_iter().next();
                        let container = container.ok_or(SetLimit::Refused)?;
                        found.entry(pod.to_string()).or_default().insert(container);
                    }
                }
            }
        }
        Ok(found)
    }

    /// The pod of the process that had the id `pid` at the time `listed`. `None` if it is in no
    /// pod, has ended, or is not readable. A process that began later only reuses the id; this goes
    /// unnoticed if the time of the list is unknown.
    pub fn pod_of(&self, pid: u32, listed: Option<BootTicks>) -> Option<PodUid> {
        let folder = self.folder_of(pid);
        let stat = folder.join("stat");
        let before = began(&read_lossily(&stat, MAX_STAT_BYTES)?)?;
        if listed.is_some_and(|listed| before > listed) {
            return None;
        }
        let pod = pod_in_cgroup(&read_lossily(&folder.join("cgroup"), MAX_CGROUP_BYTES)?)?;
        // Its id may have been reused during the read.
        (began(&read_lossily(&stat, MAX_STAT_BYTES)?)? == before).then_some(pod)
    }
}

/// The control groups (version 2) that limit a process of a pod, below the pod's own, the outermost
/// first: its container's, and those in it. Empty if the process is in none, or if the paths are
/// relative to this process's own control group, which hides where they lie.
pub fn groups_in_cgroup(text: &str) -> Vec<String> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
    let parts: Vec<&str> = path.split('/').collect();
    let is_whole = path.starts_with('/') && !parts.contains(&"..");
    let pod = parts.iter().position(|part| pod_in_component(part).is_some());
    let Some(pod) = pod.filter(|_| is_whole && !path.ends_with(" (deleted)")) else {
        return Vec::new();
    };
    let ends = (pod + 2..=parts.len()).take(MAX_GROUPS);
    ends.map(|end| format!("{CGROUP_ROOT}{}", parts[..end].join("/"))).collect()
}

/// The first number of `/proc/uptime`: seconds with two decimals.
fn uptime(text: &str) -> Option<BootTicks> {
    let (seconds, hundredths) = text.split_whitespace().next()?.split_once('.')?;
    let seconds: u64 = seconds.parse().ok()?;
    let hundredths = hundredths.parse().ok().filter(|part| *part < TICKS_PER_SECOND)?;
    seconds.checked_mul(TICKS_PER_SECOND)?.checked_add(hundredths).map(BootTicks)
}

/// When a process began: field 22 of its `stat` file. The second field, its name in brackets, may
/// itself contain blanks and brackets.
fn began(text: &str) -> Option<BootTicks> {
    let (_, fields) = text.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok().map(BootTicks)
}

/// Whether a process has not ended, by the third field of its `stat` file: dead ones have. So have
/// zombies, unless they have more than one thread (twentieth field): then only the first has ended.
pub(crate) fn is_running(text: &str) -> bool {
    let mut fields = text.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let (state, threads) = (fields.next(), fields.nth(16).and_then(|count| count.parse().ok()));
    match state {
        Some("Z") => threads.is_some_and(|count: u64| count > 1),
        state => state.is_some_and(|state| !matches!(state, "X" | "x")),
    }
}

/// The first `most` bytes of a file as text; `None` if it is not readable.
pub(crate) fn read_lossily(path: &Path, most: u64) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(most).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The pod named by the text of a `/proc/<pid>/cgroup` file. If pods are nested (a cluster in a
/// pod), the outermost one counts: it belongs to the cluster that owns the node.
pub fn pod_in_cgroup(text: &str) -> Option<PodUid> {
    // A line is `hierarchy:controllers:path`. The path may contain colons (containerd's systemd
    // names do), so only the first two separate.
    text.lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .find_map(|path| path.split('/').find_map(pod_in_component))
}

/// The pod and the container named by the text of a `/proc/<pid>/cgroup` file. Runtimes name a container by 64
/// hexadecimal digits: `<id>`, `crio-<id>.scope`, `…-pod<uid>.slice:cri-containerd:<id>`.
pub(crate) fn container_in_cgroup(text: &str) -> Option<(PodUid, String)> {
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.into_iter().find_map(|path| {
        let mut parts = path.split('/').skip_while(|part| pod_in_component(part).is_none());
        let of_pod = parts.next()?;
        let inside = of_pod.split_once(':').map_or("", |(_, inside)| inside);
        let id = std::iter::once(inside).chain(parts).find_map(container_in_component)?;
        Some((pod_in_component(of_pod)?, id.to_owned()))
    })
}

/// The container named by one component of a cgroup path. The monitor of CRI-O's containers has their ids in its name,
/// and is none.
fn container_in_component(component: &str) -> Option<&str> {
    if component.starts_with("crio-conmon-") {
        return None;
    }
    let mut words = component.split(['-', '.', ':']);
    words.find(|word| word.len() == 64 && word.chars().all(|c| c.is_ascii_hexdigit()))
}

/// The pod named by one component of a cgroup path: `pod<uid>` with cgroupfs,
/// `…-pod<uid with underscores>.slice` with systemd.
fn pod_in_component(component: &str) -> Option<PodUid> {
    // If only kubelet uses the systemd driver, the runtime takes its names literally, and the
    // component goes on: `…-pod<uid>.slice:cri-containerd:<container>`.
    let name = component.split(':').next().unwrap_or(component);
    let uid = match name.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod").map(|(_, uid)| uid),
        None => name.strip_prefix("pod"),
    };
    uid.and_then(to_uid)
}

/// The UID in its usual spelling: 32 hexadecimal digits, grouped 8-4-4-4-12 by dashes or
/// underscores (API server), or not at all (hash of a static pod's manifest). Otherwise `None`.
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const UID: &str = "0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00";
    const SLICE: &str = "0d5ab2f3_58e1_4f5c_9a4b_1c7d3c1e8f00";
    const STATIC: &str = "9f8e7d6c5b4a39281706f5e4d3c2b1a0";
    const ID: &str = "b2c0a1d4e5f60718293a4b5c6d7e8f90b2c0a1d4e5f60718293a4b5c6d7e8f90";

    /// Checks the UID of each text of a cgroup file; empty: no pod.
    fn check<const N: usize>(texts: [(String, &str); N]) {
        for (text, uid) in texts {
            let found = pod_in_cgroup(&text).map(|uid| uid.to_string()).unwrap_or_default();
            assert_eq!(found, uid, "{text}");
        }
    }

    #[test]
    fn containers_are_found_by_their_processes_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let process = |pid: &str, group: &str| {
            std::fs::create_dir_all(folder.path().join(pid)).unwrap();
            std::fs::write(folder.path().join(pid).join("cgroup"), format!("0::{group}\n"))
                .unwrap();
        };
        let found = || {
            let pods = BTreeSet::from([PodUid::new(UID)]);
            PodsByProcess::new(folder.path()).containers_of(&pods)
        };
        std::fs::create_dir(folder.path().join("sys")).unwrap();
        for (pid, group) in [("7", "main"), ("8", "main/inner"), ("9", "side")] {
            process(pid, &format!("/kubepods/pod{UID}/{group}"));
        }
        process("10", &format!("/kubepods/pod{STATIC}/main"));
        process("11", "/user.slice");
        let path = |name: &str| format!("/sys/fs/cgroup/kubepods/pod{UID}/{name}");
        let both = BTreeSet::from([path("main"), path("side")]);
        assert_eq!(found(), Ok(Containers::from([(UID.to_owned(), both)])));
        process("12", &format!("/../pod{UID}/main"));
        assert_eq!(found(), Err(SetLimit::Refused), "the host's paths are hidden");
        std::fs::remove_file(folder.path().join("12/cgroup")).unwrap();
        assert_eq!(found(), Err(SetLimit::Failed), "one that runs cannot be read");
        assert_eq!(
            PodsByProcess::new("/nowhere").containers_of(&BTreeSet::new()),
            Err(SetLimit::Failed)
        );
    }

    #[test]
    fn the_container_is_found_in_every_form_of_path() {
        let slice = format!("kubepods-pod{SLICE}.slice");
        for text in [
            format!("0::/kubepods.slice/{slice}/cri-containerd-{ID}.scope"),
            format!("0::/kubepods.slice/{slice}/crio-{ID}.scope/container"),
            format!("0::/kubepods/burstable/pod{UID}/{ID}/init.scope"),
            format!("12:memory:/system.slice\n11:devices:/kubepods/pod{UID}/{ID}\n0::/"),
            format!("1:name=systemd:/system.slice/containerd.service/{slice}:cri-containerd:{ID}"),
            format!("0::/../../pod{UID}/{ID}"),
        ] {
            assert_eq!(
                container_in_cgroup(&text),
                Some((PodUid::new(UID), ID.to_owned())),
                "{text}"
            );
        }
        for text in [
            format!("0::/kubepods/pod{UID}"),
            format!("0::/kubepods/pod{UID}/crio-conmon"),
            format!(
                "0::/kubepods.slice/kubepods-pod{UID}.slice/crio-conmon-{}.scope",
                "a".repeat(64)
            ),
            format!("0::/{ID}/kubepods/pod{UID}"),
            format!("0::/system.slice/docker-{ID}.scope"),
            String::new(),
        ] {
            assert_eq!(container_in_cgroup(&text), None, "{text}");
        }
    }

    #[test]
    fn a_process_has_ended_when_all_its_threads_have() {
        let stat = |state: &str, threads: &str| {
            format!("7 (a) R) {state} 1 7 7 0 -1 4 0 0 0 0 0 0 0 0 20 0 {threads} 0 100\n")
        };
        for (text, expected) in [
            (stat("S", "1"), true),
            (stat("Z", "1"), false),
            (stat("Z", "2"), true),
            (stat("X", "2"), false),
            ("7 (a) Z".to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(is_running(&text), expected, "{text}");
        }
    }

    #[test]
    fn the_pod_is_found_in_every_form_of_path() {
        let systemd = format!("kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope");
        check([
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
        ]);
    }

    #[test]
    fn the_pod_is_found_below_any_parent_path() {
        check([
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
            // The cgroup of a process that is ending, and a slice below the pod's own.
            (format!("0::/kubepods/burstable/pod{UID}/{ID} (deleted)"), UID),
            (
                format!(
                    "0::/kubepods.slice/kubepods-pod{SLICE}.slice/kubepods-pod{SLICE}-x.slice/y"
                ),
                UID,
            ),
            // kind: the node itself is a container.
            (
                format!(
                    "0::/system.slice/docker-{ID}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{ID}.scope"
                ),
                UID,
            ),
            (format!("11:devices:/docker/{ID}/kubelet/kubepods/pod{UID}/{ID}"), UID),
            // cgroupfs with CRI-O.
            (format!("0::/kubepods/burstable/pod{UID}/crio-{ID}"), UID),
            // A cluster in a pod: the outer pod counts.
            (format!("0::/kubepods/pod{UID}/{ID}/kubepods/pod{STATIC}/{ID}"), UID),
            // Of no pod.
            ("0::/user.slice/user-1000.slice/session-3.scope".to_owned(), ""),
            ("0::/system.slice/podman-123.service".to_owned(), ""),
            (format!("0::/machine.slice/libpod-{ID}.scope"), ""),
            ("0::/kubepods/pod-not-a-uid/x".to_owned(), ""),
            (format!("0::/kubepods/pod{}/x", &UID[1..]), ""),
            (format!("0::/kubepods/pod{}/x", UID.replace('d', "z")), ""),
            (String::new(), ""),
            ("garbage\n::\n\u{fffd}".to_owned(), ""),
        ]);
    }

    #[test]
    fn the_groups_of_a_container_are_those_below_its_pod() {
        let pod = format!("kubepods.slice/kubepods-pod{SLICE}.slice");
        let scope = format!("/{pod}/crio-{ID}.scope");
        let deep = ["a", "b", "c", "d", "e"].join("/");
        for (text, groups) in [
            (format!("0::{scope}\n"), vec![scope.clone()]),
            (
                format!("1:name=systemd:/x\n0::{scope}/container"),
                vec![scope.clone(), format!("{scope}/container")],
            ),
            (format!("0::/kubepods/pod{UID}/{ID}"), vec![format!("/kubepods/pod{UID}/{ID}")]),
            (format!("0::/{pod}"), vec![]),
            (format!("0::/../../{pod}/x"), vec![]),
            (format!("0::/{pod}/x (deleted)"), vec![]),
            (format!("4:cpu:{scope}"), vec![]),
            ("0::/system.slice/x".to_owned(), vec![]),
            (String::new(), vec![]),
        ] {
            let expected: Vec<String> =
                groups.iter().map(|path| format!("/sys/fs/cgroup{path}")).collect();
            assert_eq!(groups_in_cgroup(&text), expected, "{text}");
        }
        assert_eq!(groups_in_cgroup(&format!("0::{scope}/{deep}")).len(), MAX_GROUPS);
    }

    /// A process table in a folder of its own.
    struct Table(tempfile::TempDir);

    impl Table {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn write(&self, path: &str, text: impl AsRef<[u8]>) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn process(&self, pid: u32, name: &str, began: u64) {
            let zeros = "0 ".repeat(18);
            self.write(&format!("{pid}/stat"), format!("{pid} ({name}) S {zeros}{began} 0 0\n"));
            self.write(&format!("{pid}/cgroup"), format!("0::/kubepods/pod{UID}/{ID}"));
        }

        fn pods(&self) -> PodsByProcess {
            PodsByProcess::new(self.0.path())
        }
    }

    #[test]
    fn an_ended_or_unreadable_process_belongs_to_no_pod() {
        let table = Table::new();
        let pods = table.pods();
        assert_eq!(pods.pod_of(7, None), None);
        table.process(7, "python", 5);
        std::fs::remove_file(table.0.path().join("7/cgroup")).unwrap();
        std::fs::create_dir(table.0.path().join("7/cgroup")).unwrap();
        assert_eq!(pods.pod_of(7, None), None, "a directory cannot be read as a file");
        table.process(8, "python", 5);
        let mut bytes = b"1:x:/\xff\xfe\n".to_vec();
        bytes.extend_from_slice(format!("0::/kubepods/pod{UID}/{ID}").as_bytes());
        table.write("8/cgroup", bytes);
        assert_eq!(pods.pod_of(8, None), Some(PodUid::new(UID)));
        std::fs::remove_file(table.0.path().join("8/stat")).unwrap();
        assert_eq!(pods.pod_of(8, None), None, "it is vanishing");
        for text in ["", "8", "8 (a) S 1 2", "8 (a) S x", "(", ")"] {
            table.write("8/stat", text);
            assert_eq!(pods.pod_of(8, None), None, "{text}");
        }
    }

    #[test]
    fn a_process_with_a_reused_id_belongs_to_no_pod() {
        let table = Table::new();
        let pods = table.pods();
        assert_eq!(pods.now(), None);
        table.process(7, "a) R 1 (b", 12_345);
        for (uptime, listed, pod) in [
            ("123.45 900.00\n", Some(12_345), Some(UID)),
            ("123.46 900.00\n", Some(12_346), Some(UID)),
            ("123.44 900.00\n", Some(12_344), None),
            ("0.00 0.00\n", Some(0), None),
            ("garbage", None, Some(UID)),
            ("1.100", None, Some(UID)),
            ("99999999999999999999.00", None, Some(UID)),
        ] {
            table.write("uptime", uptime);
            assert_eq!(pods.now(), listed.map(BootTicks), "{uptime}");
            let found = pods.pod_of(7, pods.now());
            assert_eq!(found.as_ref().map(PodUid::as_str), pod, "{uptime}");
        }
    }

    #[test]
    fn the_current_process_can_be_read() {
        let pods = PodsByProcess::new("/proc");
        let listed = pods.now().unwrap();
        let text = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert!(began(&text).unwrap() <= listed, "both count from the same time");
    }

    #[test]
    fn a_table_that_vanishes_during_the_read_causes_no_error() {
        let table = Table::new();
        let pods = table.pods();
        let done = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&done);
        let reading = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                if let Some(pod) = pods.pod_of(7, pods.now()) {
                    assert_eq!(pod, PodUid::new(UID));
                }
            }
        });
        for _ in 0..2_000 {
            table.process(7, "python", 5);
            std::fs::remove_dir_all(table.0.path().join("7")).unwrap();
        }
        table.process(7, "python", 5);
        assert_eq!(table.pods().pod_of(7, None), Some(PodUid::new(UID)));
        done.store(true, Ordering::Relaxed);
        reading.join().unwrap();
    }
}
