//! Daemons of MPS and their clients, against a stand-in for NVIDIA's control program.

use std::ffi::OsStr;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::time::Duration;

use agent::gpu::sample::{Probe, ProcessSampling};
use agent::mps::daemons::{Duty, MpsDaemons, MpsLoops, MpsSettings};
use agent::nvml::probe::NvmlProbe;
use runtime::clock::Clock;
use serde_json::{Value, json};
use wire::api::condition::MpsState;

use super::loops::Loops;
use crate::harness::agent::bed::{Bed, POD, a100, h200_in_mig_mode, with};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::process::AgentProcess;

/// The stand-in for the control program. No test writes it: a file that is written while another test starts a
/// process cannot always be run ("text file busy").
const CONTROL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/harness/mps_control");

/// A node whose daemons are supervised, with short pauses.
struct Node {
    bed: Bed,
    daemons: MpsDaemons,
    probe: NvmlProbe,
    clock: Clock,
    loops: Option<MpsLoops>,
    threads: tokio::runtime::Runtime,
}

impl Node {
    fn start(scenario: &Value, duty: Duty) -> Self {
        let bed = Bed::new(scenario);
        let program = PathBuf::from(CONTROL);
        let clock = Clock::start();
        let query_every = Duration::from_millis(100);
        let folder = bed.path("mps");
        let proc_root = bed.proc_root();
        std::fs::create_dir_all(proc_root.join("self")).unwrap();
        let own = "20 1 254:0 / / rw - ext4 /dev/vda rw\n";
        std::fs::write(proc_root.join("self/mountinfo"), own).unwrap();
        let settings = MpsSettings { folder, program, duty, query_every, proc_root };
        let daemons = MpsDaemons::new(settings, clock);
        let threads =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let threads = threads.unwrap();
        let loops = threads.block_on(async { daemons.start() });
        let probe = bed.probe().with_mps(daemons.clone());
        Self { bed, daemons, probe, clock, loops: Some(loops), threads }
    }

    /// Waits until the daemon of a GPU is so.
    fn until(&mut self, uuid: &str, state: Option<MpsState>) {
        let found = || self.daemons.state(uuid, self.clock.now());
        until(&format!("{state:?} of {uuid}"), || (found() == state).then_some(()));
    }

    /// Writes a file beside the pipes of a GPU.
    fn write(&self, uuid: &str, file: &str, text: &str) {
        let folder = self.bed.path(&format!("mps/{uuid}/pipe"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("next"), text).unwrap();
        std::fs::rename(folder.join("next"), folder.join(file)).unwrap();
    }

    /// What is in a file beside the pipes of a GPU.
    fn read(&self, uuid: &str, file: &str) -> String {
        let path = self.bed.path(&format!("mps/{uuid}/pipe/{file}"));
        std::fs::read_to_string(path).unwrap_or_default()
    }

    /// Adds a process of the pod with these variables, in a container that mounts the pipes of `uuid`.
    fn client(&self, pid: u32, uuid: &str, variables: &[&str]) {
        self.bed.process(pid, &format!("0::/kubepods/pod{POD}/x\n"));
        let folder = self.bed.proc_root().join(pid.to_string());
        std::fs::write(folder.join("environ"), variables.join("\0")).unwrap();
        let mounts = [(&*format!("mps/{uuid}/pipe"), "/run/gpupack-mps")];
        std::fs::write(folder.join("mountinfo"), mounts_of(&self.bed, &mounts)).unwrap();
    }

    /// What is reported of the pod on the first GPU: whether it is a client, and its limit.
    fn reported(&mut self) -> (bool, Option<u64>) {
        let sample = self.probe.sample(ProcessSampling::List, self.clock.now()).unwrap();
        match &sample.uses[0].tenants[..] {
            [] => (false, None),
            [only] => (only.is_mps_client, only.mps_limit_mib),
            more => panic!("{more:?}"),
        }
    }
}

/// The mounts of a container that has these folders of the test bed at these paths.
fn mounts_of(bed: &Bed, folders: &[(&str, &str)]) -> String {
    let root = bed.path("").canonicalize().unwrap();
    let mut text = "50 49 0:50 / / rw - overlay overlay rw\n".to_owned();
    for (id, (folder, at)) in (51..).zip(folders) {
        let folder = root.join(folder);
        text += &format!("{id} 50 254:0 {} {at} rw - ext4 /dev/vda rw\n", folder.display());
    }
    text
}

fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    for _ in 0..2_000 {
        if let Some(found) = found() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("not within 20 s: {what}");
}

fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// A GPU with processes 10 and 11 of the pod, in these lists.
fn gpu(lists: [&str; 2]) -> Value {
    let process = |(pid, list): (u32, &str)| json!({"pid": pid, "used_mib": 500, "lists": [list]});
    let processes: Vec<Value> = [10, 11].into_iter().zip(lists).map(process).collect();
    json!({"gpus": [with(a100("GPU-a"), "processes", processes.into())]})
}

const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY=/run/gpupack-mps";
const HALF: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=500M";

#[test]
fn each_gpu_has_a_daemon_that_is_started_again_and_ends_with_the_agent() {
    let scenario = json!({"gpus": [a100("GPU-a"), a100("GPU-b"), h200_in_mig_mode()]});
    let mut node = Node::start(&scenario, Duty::Manage);
    node.probe.sample(ProcessSampling::Skip, node.clock.now()).unwrap();
    for uuid in ["GPU-a", "GPU-b"] {
        node.until(uuid, Some(MpsState::Idle));
        assert_eq!(node.read(uuid, "started"), format!("{uuid} -f -multiuser-server\n"));
    }
    node.until("MIG-a", Some(MpsState::Absent));
    assert!(!node.bed.path("mps/GPU-p").exists() && !node.bed.path("mps/MIG-a").exists());
    let mode = std::fs::metadata(node.bed.path("mps/shm")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o1777);

    // One dies: the other is not changed.
    let first = node.read("GPU-a", "pid");
    let other = node.read("GPU-b", "pid");
    std::fs::remove_file(node.bed.path("mps/GPU-a/pipe/pid")).unwrap();
    node.until("GPU-a", Some(MpsState::Absent));
    node.until("GPU-a", Some(MpsState::Idle));
    assert_ne!(node.read("GPU-a", "pid"), first);
    assert_eq!(node.read("GPU-b", "pid"), other);

    // A GPU is put into MIG mode: its daemon ends and is not restarted.
    node.bed.play(&json!({"gpus": [a100("GPU-a"), with(a100("GPU-b"), "mig", json!([]))]}));
    node.probe.sample(ProcessSampling::Skip, node.clock.now()).unwrap();
    node.until("GPU-b", None);
    assert_eq!(node.read("GPU-b", "quit"), "-t 1\n");
    assert!(!is_alive(&other));

    // One goes away and comes back immediately: in the end its daemon runs.
    let inventory = node.probe.sample(ProcessSampling::Skip, node.clock.now()).unwrap().inventory;
    node.daemons.learn(&[]);
    node.daemons.learn(&inventory);
    std::thread::sleep(Duration::from_millis(300));
    node.until("GPU-a", Some(MpsState::Idle));
    let last = node.read("GPU-a", "pid");
    assert!(is_alive(&last));
    node.threads.block_on(node.loops.take().unwrap().end());
    assert!(!is_alive(&last));
    assert_eq!(node.daemons.state("GPU-a", node.clock.now()), None);
}

#[test]
fn a_failing_daemon_is_retried_with_growing_pauses() {
    let mut node = Node::start(&json!({"gpus": [a100("GPU-a")]}), Duty::Manage);
    node.write("GPU-a", "broken", "");
    let started = Duration::from_millis(2_500);
    node.probe.sample(ProcessSampling::Skip, node.clock.now()).unwrap();
    node.until("GPU-a", Some(MpsState::Absent));
    std::thread::sleep(started);
    let tries = node.read("GPU-a", "started").lines().count();
    assert!((1..=3).contains(&tries), "{tries} tries in 2.5 s");
    std::fs::remove_file(node.bed.path("mps/GPU-a/pipe/broken")).unwrap();
    node.until("GPU-a", Some(MpsState::Idle));
    // It hangs: that is no answer, and in the end it is killed.
    let hanging = node.read("GPU-a", "pid");
    node.write("GPU-a", "hang", "");
    node.until("GPU-a", Some(MpsState::Absent));
    until("the end of the daemon that hangs", || (!is_alive(&hanging)).then_some(()));
    std::fs::remove_file(node.bed.path("mps/GPU-a/pipe/hang")).unwrap();
    node.until("GPU-a", Some(MpsState::Idle));
}

#[test]
fn external_daemons_are_only_inspected_and_never_started_or_ended() {
    let mut node = Node::start(&gpu(["mps", "mps"]), Duty::Rely);
    node.probe.sample(ProcessSampling::Skip, node.clock.now()).unwrap();
    node.until("GPU-a", Some(MpsState::Absent));
    let me = std::process::id().to_string();
    for (servers, status, state) in [
        ("", "", MpsState::Idle),
        ("70\n", "ACTIVE", MpsState::Serving),
        ("70\n", "INITIALIZING", MpsState::Starting),
        ("70\n", "FAULT", MpsState::Faulted),
        ("70\n71\n", "ACTIVE", MpsState::Serving),
        ("garbage\n", "ACTIVE", MpsState::Absent),
        ("70\n", "\u{fffd}", MpsState::Faulted),
    ] {
        node.write("GPU-a", "servers", servers);
        node.write("GPU-a", "status-70", status);
        node.write("GPU-a", "pid", &me);
        node.until("GPU-a", Some(state));
    }
    node.threads.block_on(node.loops.take().unwrap().end());
    assert_eq!(node.read("GPU-a", "quit") + &node.read("GPU-a", "started"), "");
    assert_eq!(node.read("GPU-a", "pid"), me);
}

#[test]
fn a_pod_is_limited_when_all_its_processes_are_clients_with_a_limit() {
    let mut node = Node::start(&gpu(["mps", "mps"]), Duty::Rely);
    node.write("GPU-a", "servers", "70\n");
    node.write("GPU-a", "pid", &std::process::id().to_string());
    node.write("GPU-b", "pid", "");
    node.reported();
    node.until("GPU-a", Some(MpsState::Serving));
    let less = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=GPU-a=7M";
    let two = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4G,1=4G";
    for (variables, limit) in [
        (&[PIPE, HALF][..], Some(1_000)),
        (&["A=\u{fffd}", HALF, PIPE], Some(1_000)),
        (&[PIPE, less], Some(507)),
        (&[PIPE], None),
        (&[HALF], None),
        (&[PIPE, two], None),
        (&["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", HALF], None),
        (&[], None),
    ] {
        node.client(10, "GPU-a", &[PIPE, HALF]);
        node.client(11, "GPU-a", variables);
        assert_eq!(node.reported(), (true, limit), "{variables:?}");
    }
    node.client(11, "GPU-b", &[PIPE, HALF]);
    assert_eq!(node.reported(), (true, None), "it is the client of another daemon");
    node.client(11, "GPU-a", &[PIPE, HALF]);
    assert_eq!(node.reported(), (true, Some(1_000)));
    let environ = node.bed.proc_root().join("11/environ");
    std::fs::remove_file(&environ).unwrap();
    std::fs::create_dir(&environ).unwrap();
    assert_eq!(node.reported(), (true, None), "it may not be read");
    std::fs::remove_dir(&environ).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&environ).status().unwrap().success());
    for _ in 0..3 {
        assert_eq!(node.reported(), (true, None), "it never answers, and nothing waits for it");
    }
    // Its parent is notified of its end.
    drop(std::fs::File::options().read(true).write(true).open(&environ).unwrap());
    std::fs::remove_file(&environ).unwrap();
    for lists in [["mps", "compute"], ["compute", "compute"]] {
        node.client(11, "GPU-a", &[PIPE, HALF]);
        node.bed.play(&gpu(lists));
        let is_client = lists.contains(&"mps");
        assert_eq!(node.reported(), (is_client, None), "a process outside MPS can use everything");
    }
}

#[test]
fn the_extender_shows_a_client_as_limited_only_while_its_daemon_runs() {
    let node = Node::start(&gpu(["mps", "mps"]), Duty::Manage);
    for pid in [10, 11] {
        node.client(pid, "GPU-a", &[PIPE, HALF]);
    }
    node.write("GPU-a", "servers", "70\n");
    let extender = Extender::start();
    extender.allocate(POD, "GPU-a", 1_000);
    let probe = node.bed.probe().with_mps(node.daemons.clone());
    let _loops = Loops::start_with(probe, &extender, Duration::from_millis(100));
    let wait = |daemon: &str, verified: &str| {
        extender.until(&format!("{daemon}, {verified}"), |shown| {
            let device = &shown["devices"][0];
            let tenant = &device["tenants"][0];
            let is_it = device["mps"] == daemon && tenant["isolation"]["configured"] == "Mps";
            (is_it && tenant["isolation"]["verified"] == verified).then_some(())
        });
    };
    wait("Serving", "Mps");
    // A server that lost its GPU vanishes, and its clients continue without limits.
    node.write("GPU-a", "servers", "");
    wait("Idle", "None");
    node.write("GPU-a", "servers", "70\n");
    wait("Serving", "Mps");
    node.client(11, "GPU-a", &[PIPE, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=501M"]);
    wait("Serving", "None");
}

#[test]
fn the_agent_process_runs_the_daemons_and_ends_them_on_signal() {
    let bed = Bed::new(&json!({"gpus": [a100("GPU-a")]}));
    let folder = bed.path("mps");
    let extender = Extender::start();
    let flags = ["--mps", "manage", "--mps-control"].map(OsStr::new);
    let flags =
        [&flags[..], &[OsStr::new(CONTROL), OsStr::new("--mps-folder"), folder.as_os_str()]];
    let agent = AgentProcess::start_with(&bed, &extender, &flags.concat());
    let pid = until("a daemon", || {
        let pid = std::fs::read_to_string(folder.join("GPU-a/pipe/pid")).ok();
        pid.filter(|pid| pid.ends_with('\n'))
    });
    extender.until("the daemon", |node| (node["devices"][0]["mps"] == "Idle").then_some(()));
    assert!(is_alive(&pid));
    assert!(agent.end().success());
    assert!(!is_alive(&pid));
}

#[test]
fn leftover_shared_memory_is_removed_after_the_last_client() {
    let node = Node::start(&json!({"gpus": [a100("GPU-a")]}), Duty::Manage);
    let shm = node.bed.path("mps/shm");
    std::fs::create_dir_all(&shm).unwrap();
    std::fs::write(shm.join("left"), "x").unwrap();
    container(&node.bed, "self", "mnt:[1]");
    // A client in another container.
    container(&node.bed, "10", "mnt:[2]");
    let mounts = mounts_of(&node.bed, &[("mps/shm", "/dev/shm")]);
    std::fs::write(node.bed.proc_root().join("10/mountinfo"), mounts).unwrap();
    std::thread::sleep(Duration::from_millis(3_000));
    assert!(shm.join("left").exists(), "a client is there");
    std::fs::remove_dir_all(node.bed.proc_root().join("10")).unwrap();
    until("the end of the file", || (!shm.join("left").exists()).then_some(()));
}

/// Puts a process into a container.
fn container(bed: &Bed, pid: &str, namespace: &str) {
    let folder = bed.proc_root().join(pid).join("ns");
    std::fs::create_dir_all(&folder).unwrap();
    symlink(namespace, folder.join("mnt")).unwrap();
}

#[test]
fn a_hanging_client_check_delays_neither_daemons_nor_shutdown() {
    let mut node = Node::start(&json!({"gpus": [a100("GPU-a")]}), Duty::Manage);
    std::fs::create_dir_all(node.bed.path("mps/shm")).unwrap();
    container(&node.bed, "self", "mnt:[1]");
    container(&node.bed, "10", "mnt:[2]");
    // A pipe without a writer: opening it blocks.
    let silent = node.bed.proc_root().join("10/mountinfo");
    assert!(std::process::Command::new("mkfifo").arg(&silent).status().unwrap().success());
    let write = || {
        use std::os::unix::fs::OpenOptionsExt;
        const NONBLOCK: i32 = 0o4000;
        // Opens only where somebody waits at the other end.
        std::fs::File::options().write(true).custom_flags(NONBLOCK).open(&silent).ok()
    };
    let waiting = until("a look that hangs", write);
    node.probe.sample(ProcessSampling::Skip, node.clock.now()).unwrap();
    node.until("GPU-a", Some(MpsState::Idle));
    let pid = node.read("GPU-a", "pid");
    let end = node.loops.take().unwrap().end();
    node.threads
        .block_on(async { tokio::time::timeout(Duration::from_secs(4), end).await.unwrap() });
    assert!(!is_alive(&pid), "the daemon got the signal to end");
    drop(waiting);
}

/// The container of `deploy/agent-privileged.yaml` that creates the file system, in its own namespace.
#[test]
fn the_shared_memory_of_the_manifest_is_limited() {
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/agent-privileged.yaml");
    let patch: Value = serde_yaml_ng::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let container = &patch["spec"]["template"]["spec"]["initContainers"][0];
    assert_eq!(container["command"], json!(["/bin/sh", "-ec"]));
    let script = container["args"][0].as_str().unwrap();
    let shell = |script: &str, folder: &std::path::Path| {
        let mut command = std::process::Command::new("unshare");
        command.args(["--mount", "/bin/sh", "-ec", script]).env("FOLDER", folder).env("SIZE", "1m");
        command.output()
    };
    let folder = tempfile::tempdir().unwrap();
    if !shell("true", folder.path()).is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no mount name space can be made here");
        return;
    }
    let is_full = |bytes: u32| {
        let file = "\"$FOLDER/shm/a\"";
        format!("head -c {bytes} /dev/zero >{file} && exit 9; rm {file}")
    };
    // The second time, as after an upgrade, with less.
    let (full, full_of_less) = (is_full(2_000_000), is_full(800_000));
    let checked = format!(
        "{script}\n{full}\nSIZE=512k\n{script}\n{full_of_less}\nstat -f -c %T \"$FOLDER/shm\"; \
        stat -c %a \"$FOLDER/shm\"; grep -c \"$FOLDER/shm\" /proc/self/mounts"
    );
    let output = shell(&checked, folder.path()).unwrap();
    let reported = String::from_utf8_lossy(&output.stdout);
    let faults = String::from_utf8_lossy(&output.stderr);
    assert_eq!(reported, "tmpfs\n1777\n1\n", "{faults}");
    assert!(faults.contains("No space left"), "{faults}");
}
