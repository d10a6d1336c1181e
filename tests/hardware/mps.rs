//! MPS under the agent: two clients of different users and limits on one GPU, as pods would be.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use runtime::clock::Clock;
use serde_json::{Value, json};
use wire::api::condition::MpsState;

use crate::extender::Extender;
use crate::{first_sample, report, say};

/// NVIDIA's control program.
const CONTROL: &str = "nvidia-cuda-mps-control";

/// What CUDA takes for itself in each client is less than this, in MiB; it counts in the limit.
const CONTEXT_MIB: u64 = 1_536;

/// The agent on this machine; killed when it is dropped.
struct Agent(Child);

impl Agent {
    fn start(extender: &Extender, folder: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack-agent"));
        command.args(["--node", "n", "--extender", &extender.url()]);
        command.args(["--mps", "manage", "--mps-folder"]).arg(folder.join("mps"));
        command.arg("--kubelet-socket").arg(folder.join("none")).env("NO_COLOR", "1");
        Self(command.spawn().unwrap())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A client of the daemon in a control group, mounts and under a user of its own, as a container has them.
struct Pod {
    child: Child,
    output: BufReader<ChildStdout>,
    /// Its control group, removed at the end.
    group: PathBuf,
}

impl Pod {
    fn start(groups: &Path, folder: &Path, gpu: &str, (uid, user, mib): (&str, u32, u64)) -> Self {
        let group = groups.join(format!("pod{uid}"));
        std::fs::create_dir_all(&group).unwrap();
        let (pipes, shared) = (folder.join("mps").join(gpu).join("pipe"), folder.join("mps/shm"));
        let script = "echo $$ > \"$GROUP/cgroup.procs\" && exec unshare --mount --propagation private sh -c '
            mount --bind \"$PIPES\" \"$CUDA_MPS_PIPE_DIRECTORY\" && mount --bind \"$SHARED\" /dev/shm &&
            exec setpriv --reuid \"$USER_ID\" --regid \"$USER_ID\" --clear-groups env PATH=\"/usr/bin:$PATH\" python3 \"$CLIENT\"'";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .env("GROUP", &group)
            .env("PIPES", pipes)
            .env("SHARED", shared)
            .env("USER_ID", user.to_string())
            .env("CLIENT", folder.join("client.py"))
            .env("CUDA_MPS_PIPE_DIRECTORY", folder.join("seen"))
            .env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={mib}M"))
            .env("CUDA_VISIBLE_DEVICES", gpu)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output, group }
    }

    /// What it could take, in MiB, once CUDA refused more.
    fn taken_mib(&mut self) -> u64 {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().parse().unwrap_or_else(|_| panic!("the client says why on stderr: {line}"))
    }

    /// Takes and frees once more, in MiB.
    fn again_mib(&mut self) -> u64 {
        self.child.stdin.as_mut().unwrap().write_all(b"again\n").unwrap();
        self.taken_mib()
    }

    fn kill(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.kill();
        // The kernel needs a moment to empty it; a folder that is left does no harm.
        let _ = std::fs::remove_dir(&self.group);
    }
}

/// A folder for control groups of this test, in the first hierarchy that takes one.
fn groups() -> Option<PathBuf> {
    let hierarchies = ["", "unified", "pids", "memory", "systemd", "devices"];
    hierarchies.iter().find_map(|hierarchy| {
        let root = Path::new("/sys/fs/cgroup").join(hierarchy);
        let groups = root.join("gpupack-hardware");
        let is_root = root.join("cgroup.procs").exists();
        (is_root && std::fs::create_dir_all(&groups).is_ok()).then_some(groups)
    })
}

/// What this machine lacks for two clients under the agent.
fn lacks() -> Option<&'static str> {
    let is_there = |program: &str| {
        let mut found = Command::new("sh");
        found.args(["-c", "command -v \"$0\" >/dev/null", program]);
        found.status().is_ok_and(|found| found.success())
    };
    if !rustix::process::geteuid().is_root() {
        return Some("root");
    }
    [CONTROL, "python3", "unshare", "setpriv"].into_iter().find(|program| !is_there(program))
}

#[test]
fn two_clients_are_held_to_limits_of_different_size() {
    const SMALL: (&str, u32, u64) = ("0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f01", 20_001, 2_048);
    const LARGE: (&str, u32, u64) = ("0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f02", 20_002, 8_192);
    const THIRD: (&str, u32, u64) = ("0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f03", 20_003, 2_048);
    let what = "limits of two MPS clients under the agent";
    let Some((_, sample)) = first_sample(what) else { return };
    if let Some(lacking) = lacks() {
        return say(&format!("skipped: {what} (this needs {lacking})"));
    }
    let Some(groups) = groups() else {
        return say(&format!("skipped: {what} (no control group can be made here)"));
    };
    if sample.uses[0].used_mib.is_none_or(|used| used > 1_024) {
        return say(&format!("skipped: {what} (the GPU is in use)"));
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    // Clients are no root, and reach their script and the mount point.
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::create_dir(folder.join("seen")).unwrap();
    std::fs::write(folder.join("client.py"), include_str!("client.py")).unwrap();

    let gpu = sample.inventory[0].uuid.clone();
    let extender = Extender::start();
    let mut agent = Agent::start(&extender, &folder);
    let is = |node: &Value, state: MpsState| node["devices"][0]["mps"] == json!(state);
    extender.until("a daemon", |node| is(node, MpsState::Idle).then_some(()));
    for (uid, _, mib) in [SMALL, LARGE] {
        extender.allocate(uid, &gpu, mib);
    }
    let clock = Clock::start();
    let mut pods = [SMALL, LARGE].map(|pod| Pod::start(&groups, &folder, &gpu, pod));
    let taken = [0, 1].map(|of: usize| pods[of].taken_mib());
    report(&sample, &format!("limits 2048 and 8192 MiB: {taken:?} MiB could be taken"));
    let shown = extender.until("two verified clients", |node| {
        let tenants = node["devices"][0]["tenants"].as_array()?;
        let verified = |tenant: &Value| tenant["isolation"]["verified"] == "Mps";
        (is(node, MpsState::Serving) && tenants.len() == 2 && tenants.iter().all(verified))
            .then(|| tenants.clone())
    });
    let seconds = clock.now().since(wire::units::Timestamp::START).as_millis();
    report(&sample, &format!("both verified within {seconds} ms of their start"));
    for tenant in shown {
        report(&sample, &format!("tenant {tenant}"));
    }
    for (taken, (_, _, limit)) in taken.iter().zip([SMALL, LARGE]) {
        assert!((limit - CONTEXT_MIB..limit).contains(taken), "{taken} of {limit}");
    }
    // One is killed: the other goes on, and so does its limit.
    pods[0].kill();
    let again = pods[1].again_mib();
    report(&sample, &format!("after one client was killed the other takes {again} MiB"));
    assert_eq!(again, taken[1]);
    // A newcomer is served as well.
    let mut third = Pod::start(&groups, &folder, &gpu, THIRD);
    let newcomer = third.taken_mib();
    report(&sample, &format!("a client after it takes {newcomer} MiB"));
    assert_eq!(newcomer, taken[0]);

    let asked = clock.now();
    let id = agent.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert!(agent.0.wait().unwrap().success());
    let end = clock.now().since(asked).as_millis();
    report(&sample, &format!("the agent and its daemon end in {end} ms, with two clients"));
    let control = Command::new("sh")
        .args(["-c", "echo get_server_list | nvidia-cuda-mps-control"])
        .env("CUDA_MPS_PIPE_DIRECTORY", folder.join("mps").join(&gpu).join("pipe"))
        .output();
    assert!(!control.unwrap().status.success(), "the daemon is gone");
    drop((pods, third));
    // Empty folders of ended processes; the kernel may need a moment.
    let _ = std::fs::remove_dir(groups);
}
