//! The cage of a node: a PID and a mount namespace in which containerd, kubelet, their shims and all
//! containers live.
//!
//! When its first process is killed, the kernel kills every other process in it, and its mounts go with
//! the last of them: nothing remains to clean up but control groups, which are removed by
//! [`ControlGroups`]. The cage is killed when it is dropped, when a test panics, and also when the
//! test process itself is killed; see [`crate::leash`]. In that last case empty control groups stay until
//! the next run. Cages of several test processes can exist together; then, too, empty folders
//! may stay where this machine had none.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::Duration;

use super::programs::said_by;
use crate::clock;
use crate::leash::Leash;

/// Fixed places of containerd, kubelet and the GPU Operator. In the cage each is an empty file system, so that
/// a containerd, kubelet or driver of this machine is not met.
const PRIVATE: [&str; 7] = [
    "/run/containerd",
    "/run/netns",
    "/run/nvidia",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/containers",
];

/// What kubelet sets of the kernel. In the cage it sets copies.
const SETTINGS: &str = "vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
                        kernel/keys/root_maxkeys kernel/keys/root_maxbytes";

/// The first process. It writes its id to file $1, and stays. A shell, because it has to reap the
/// processes whose parents have ended.
const FIRST: &str = r#"
set -e
read -r pid rest </proc/self/stat
mount -t proc proc /proc
told="$1"; copies="$2"; settings="$3"; shift 3
mkdir -p "$copies"
for setting in $settings; do
    [ -e "/proc/sys/$setting" ] || continue
    copy="$copies/$(basename "$setting")"
    cat "/proc/sys/$setting" >"$copy"
    mount --bind "$copy" "/proc/sys/$setting"
done
for place in "$@"; do mount -t tmpfs tmpfs "$place"; done
echo "$pid" >"$told.new"
mv "$told.new" "$told"
sleep infinity &
wait
"#;

/// How long the namespaces, and the end of the last process in them, may take.
const LIMIT: Duration = Duration::from_secs(20);

/// Running namespaces.
pub(crate) struct Cage {
    first: Leash,
    pid: u32,
    /// Fixed places that this machine did not have.
    made: Vec<&'static str>,
    /// Shared by all cages of this machine; see [`Cage::drop`].
    users: File,
}

impl Cage {
    /// Makes the namespaces. The error says what this machine does not allow.
    pub(crate) fn new(work: &Path) -> Result<Self, String> {
        let users = File::open("/var/lib").and_then(|users| users.lock_shared().map(|()| users));
        let users = users.map_err(|error| format!("cannot lock /var/lib: {error}"))?;
        let mut made = Vec::new();
        for place in PRIVATE.into_iter().filter(|place| !Path::new(place).is_dir()) {
            std::fs::create_dir_all(place)
                .map_err(|error| format!("cannot make {place}: {error}"))?;
            made.push(place);
        }
        let reported = work.join("cage.pid");
        let _absent = std::fs::remove_file(&reported);
        let log = work.join("cage.log");
        let _absent = std::fs::remove_file(&log);
        let mut arguments: Vec<String> =
            ["--pid", "--fork", "--kill-child", "--mount", "sh", "-c"].map(str::to_owned).to_vec();
        arguments.extend([FIRST, "cage"].map(str::to_owned));
        arguments
            .extend([&reported, &work.join("settings")].map(|path| path.display().to_string()));
        arguments.push(SETTINGS.to_owned());
        arguments.extend(PRIVATE.map(str::to_owned));
        let first = Leash::start("cage", Path::new("unshare"), &arguments, &log);
        let mut cage = Self { first, pid: 0, made, users };
        let started = clock::now();
        while cage.pid == 0 {
            if let Some(status) = cage.first.ended() {
                let why = std::fs::read_to_string(&log).unwrap_or_default();
                return Err(format!("namespaces cannot be made ({status}): {}", why.trim()));
            }
            assert!(started.elapsed() < LIMIT, "no namespaces after {LIMIT:?}");
            std::thread::sleep(Duration::from_millis(20));
            let text = std::fs::read_to_string(&reported).unwrap_or_default();
            cage.pid = text.trim().parse().unwrap_or(0);
        }
        Ok(cage)
    }

    /// A program that is to run in the cage.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid.to_string(), "--pid", "--mount", "--"]).arg(program);
        command
    }

    /// Starts a program that ends with the cage at the latest; what it prints goes to `log`. The answer
    /// is finished when the program has ended.
    pub(crate) fn start(&self, program: &Path, arguments: &[String], log: &Path) -> JoinHandle<()> {
        let out =
            File::options().create(true).append(true).open(log).expect("a log can be written");
        let err = out.try_clone().expect("a file handle can be duplicated");
        let mut command = self.command(program);
        command.args(arguments).stdin(std::process::Stdio::null()).stdout(out).stderr(err);
        let mut child = command.spawn().expect("nsenter was found just before");
        // Collected when it ends, with the cage.
        std::thread::spawn(move || drop(child.wait()))
    }

    /// What a command in the cage prints.
    pub(crate) fn said(&self, program: &str, arguments: &[&str]) -> Result<String, String> {
        said_by(self.command(program).args(arguments))
    }
}

impl Drop for Cage {
    fn drop(&mut self) {
        self.first.kill();
        let started = clock::now();
        while Path::new(&format!("/proc/{}", self.pid)).exists() && started.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(20));
        }
        // Removing a folder removes what is mounted on it in other namespaces: only the last cage may.
        let is_last = self.users.unlock().is_ok() && self.users.try_lock().is_ok();
        for place in self.made.iter().filter(|_| is_last) {
            // Only if it is empty, as we left it.
            let _kept = std::fs::remove_dir(place);
        }
    }
}

/// The control groups of a node: one group in each hierarchy, under which kubelet makes the others.
pub(crate) struct ControlGroups {
    name: String,
}

impl ControlGroups {
    /// Groups of this process; those of test processes that have ended are removed first.
    pub(crate) fn new() -> Result<Self, String> {
        for root in hierarchies() {
            for old in std::fs::read_dir(&root).into_iter().flatten().flatten() {
                let name = old.file_name().to_string_lossy().into_owned();
                let process = name.strip_prefix("gpupack-e2e-");
                if process.is_some_and(|id| !Path::new("/proc").join(id).exists()) {
                    remove(&old.path());
                }
            }
        }
        let groups = Self { name: format!("gpupack-e2e-{}", std::process::id()) };
        for root in hierarchies() {
            allow_controllers(&root);
            let group = root.join(&groups.name);
            let made = std::fs::create_dir_all(&group).map_err(|error| error.to_string());
            made.and_then(|()| has_controllers(&root, &group)).map_err(|error| {
                format!("no control group can be made in {}: {error}", root.display())
            })?;
        }
        Ok(groups)
    }

    /// As kubelet's `cgroupRoot`.
    pub(crate) fn root(&self) -> String {
        format!("/{}", self.name)
    }
}

impl Drop for ControlGroups {
    fn drop(&mut self) {
        let started = clock::now();
        // The kernel needs a moment to notice that the last process has ended.
        while started.elapsed() < LIMIT {
            let all = hierarchies().into_iter().map(|root| root.join(&self.name));
            let left: Vec<PathBuf> = all.filter(|group| group.exists()).collect();
            if left.is_empty() {
                return;
            }
            left.iter().for_each(|group| remove(group));
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The mounted hierarchies: one on version 2, one for each controller on version 1.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let of_groups = |line: &str| {
        let mut words = line.split(' ').skip(1);
        let (place, kind) = (words.next()?, words.next()?);
        kind.starts_with("cgroup").then(|| PathBuf::from(place))
    };
    mounts.lines().filter_map(of_groups).collect()
}

/// On version 2 a group has the controllers that its parent hands on. What cannot be handed on is left.
fn allow_controllers(root: &Path) {
    let there = std::fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    for controller in there.split_whitespace() {
        let _refused =
            std::fs::write(root.join("cgroup.subtree_control"), format!("+{controller}"));
    }
}

/// On version 2 alone: whether kubelet can limit what is in the group.
fn has_controllers(root: &Path, group: &Path) -> Result<(), String> {
    if root != Path::new("/sys/fs/cgroup") {
        return Ok(()); // version 1, or the second hierarchy beside it
    }
    let there = std::fs::read_to_string(group.join("cgroup.controllers")).unwrap_or_default();
    let is_there = |controller: &&str| there.split_whitespace().any(|it| it == *controller);
    match ["cpu", "cpuset", "memory", "pids"].iter().find(|controller| !is_there(controller)) {
        Some(controller) => Err(format!("it would lack the controller `{controller}`")),
        None => Ok(()),
    }
}

/// Removes a group and those below it; one that has processes stays.
fn remove(group: &Path) {
    for entry in std::fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    let _busy = std::fs::remove_dir(group);
}
