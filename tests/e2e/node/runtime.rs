//! containerd and kubelet of one node, in a [`Cage`].

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};

use super::cage::{Cage, ControlGroups};
use super::image;
use super::network::{Network, PLUGINS};
use super::programs::{Programs, said_by};
use crate::clock;
use crate::control_plane::{ControlPlane, Identity, free_ports};

/// Name of the Node object.
pub(crate) const NODE: &str = "machine";

/// containerd's socket, in the cage.
const SOCKET: &str = "/run/containerd/containerd.sock";

/// How long containerd and kubelet may take to answer.
const START_LIMIT: Duration = Duration::from_secs(30);

/// A plugin for networks of pods that makes none: a pod without the node's network has an address that leads
/// nowhere.
const NO_NETWORK: &str = r#"#!/bin/sh
case "$CNI_COMMAND" in
VERSION) echo '{"cniVersion": "0.4.0", "supportedVersions": ["0.3.1", "0.4.0"]}' ;;
ADD) echo '{"cniVersion": "0.4.0", "interfaces": [{"name": "'"$CNI_IFNAME"'", "sandbox": "'"$CNI_NETNS"'"}],
    "ips": [{"version": "4", "address": "192.0.2.77/32", "interface": 0}]}' ;;
esac
"#;

/// containerd and kubelet, while they run.
pub(crate) struct Runtime {
    /// Killed first, so that the groups are empty when they are removed.
    pub(crate) cage: Cage,
    groups: ControlGroups,
    programs: Programs,
    work: PathBuf,
    /// Of pods; without it all pods have the node's.
    network: Option<Network>,
}

impl Runtime {
    /// Starts containerd with the images, and tries whether a container can be run here at all. The
    /// error says why not. Pods of the RuntimeClass `nvidia` are started by `runtime`.
    pub(crate) fn start(
        work: &Path,
        programs: &Programs,
        runtime: &Path,
        network: Option<Network>,
    ) -> Result<Self, String> {
        let archive = image::write(work, &programs.busybox)?;
        let groups = ControlGroups::new()?;
        let cage = Cage::new(work)?;
        let (programs, work) = (programs.clone(), work.to_owned());
        let node = Self { cage, groups, programs, work, network };
        node.start_containerd(runtime)?;
        node.import(&archive)?;
        let group = format!("{}/probe", node.groups.root());
        let probe = ["run", "--rm", "--cgroup", &group, image::BOX, "probe", "/bin/tell", "once"];
        let said = node.ctr(&probe).map_err(|error| format!("no container can be run: {error}"))?;
        if !said.contains("tell|") {
            return Err(format!("a container can be run, but says nothing: {said}"));
        }
        Ok(node)
    }

    /// Takes the images of an archive, as an administrator does without a registry.
    pub(crate) fn import(&self, archive: &Path) -> Result<(), String> {
        self.ctr(&["images", "import", &text(archive)]).map(drop)
    }

    /// `ctr` on the containers of kubelet.
    fn ctr(&self, arguments: &[&str]) -> Result<String, String> {
        let mut all =
            vec!["--connect-timeout", "10s", "--address", SOCKET, "--namespace", "k8s.io"];
        all.extend(arguments);
        self.cage.said("ctr", &all)
    }

    fn start_containerd(&self, runtime: &Path) -> Result<(), String> {
        let folder = self.work.join("cni");
        std::fs::create_dir_all(&folder).map_err(|error| format!("no folder: {error}"))?;
        // kubelet takes a node without any network for one that is not ready.
        let none = || json!({"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "none"}]});
        for plugin in ["none", "loopback"] {
            let file = folder.join(plugin);
            std::fs::write(&file, NO_NETWORK).map_err(|error| format!("no plugin: {error}"))?;
            said_by(Command::new("chmod").arg("755").arg(file))?;
        }
        let list = self.network.as_ref().map_or_else(none, |it| it.list(&self.work));
        std::fs::write(folder.join("pods.conflist"), list.to_string())
            .map_err(|error| format!("no network file: {error}"))?;
        let plugins = self.network.as_ref().map_or(folder.as_path(), |_| Path::new(PLUGINS));
        let config = self.work.join("containerd.toml");
        let settings = settings((&folder, plugins), &self.programs.runc, runtime);
        std::fs::write(&config, settings).map_err(|error| format!("no configuration: {error}"))?;
        let log = self.work.join("containerd.log");
        let arguments = ["--config".to_owned(), text(&config)];
        let running = self.cage.start(&self.programs.containerd, &arguments, &log);
        until(&running, "containerd", &log, || self.ctr(&["version"]).is_ok())
    }

    /// The control group above all others of the node.
    pub(crate) fn group(&self) -> String {
        self.groups.root()
    }

    /// Starts kubelet, which creates the Node object, and waits until it is healthy. The error has its
    /// last words.
    pub(crate) fn start_kubelet(&self, plane: &ControlPlane) -> Result<(), String> {
        let [port, health] = free_ports();
        let config = self.work.join("kubelet.json");
        let logs = self.work.join("pods");
        let address = self.network.as_ref().map_or(Ipv4Addr::LOCALHOST, |it| it.node);
        let mut settings = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": format!("unix://{SOCKET}"),
            "cgroupRoot": self.groups.root(), "cgroupDriver": "cgroupfs", "failCgroupV1": false,
            "enforceNodeAllocatable": [], "failSwapOn": false,
            "address": address, "port": port, "healthzPort": health,
            // In a network of its own the API server forwards ports of pods: it shows no certificate.
            "authentication": {"anonymous": {"enabled": self.network.is_some()},
                               "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "resolvConf": "", "makeIPTablesUtilChains": false,
            "podLogsDir": text(&logs), "volumePluginDir": text(&self.work.join("plugins")),
            "nodeStatusUpdateFrequency": "2s", "syncFrequency": "2s",
            "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
            "localStorageCapacityIsolation": false,
            // A container that ends is started again immediately, not ten seconds later.
            "featureGates": {"KubeletCrashLoopBackOffMax": true},
            "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        });
        // For any state of the disk of this machine.
        let never = [
            "imagefs.available",
            "imagefs.inodesFree",
            "memory.available",
            "nodefs.available",
            "nodefs.inodesFree",
            "pid.available",
        ];
        settings["evictionHard"] =
            never.map(|signal| (signal.to_owned(), Value::from("0%"))).into_iter().collect();
        if let Some(network) = &self.network {
            settings["clusterDNS"] = json!([network.node]);
            settings["clusterDomain"] = "cluster.local".into();
        }
        std::fs::write(&config, settings.to_string()).expect("the work folder is writable");
        let mut arguments = vec![
            format!("--config={}", config.display()),
            format!("--kubeconfig={}", plane.kubeconfig(Identity::Kubelet).display()),
            format!("--cert-dir={}", self.work.join("kubelet.certificates").display()),
            format!("--hostname-override={NODE}"),
        ];
        arguments.extend(self.network.iter().map(|it| format!("--node-ip={}", it.node)));
        let log = self.work.join("kubelet.log");
        let running = self.cage.start(&self.programs.kubelet, &arguments, &log);
        until(&running, "kubelet", &log, || is_healthy(health))
    }

    /// The lines that a container has printed in its `life`, counted from 0: by namespace, name and
    /// UID of its pod.
    pub(crate) fn printed(&self, pod: (&str, &str, &str), container: &str, life: u32) -> String {
        let (namespace, name, uid) = pod;
        let folder = self.work.join("pods").join(format!("{namespace}_{name}_{uid}"));
        let file = folder.join(container).join(format!("{life}.log"));
        let text = std::fs::read_to_string(file).unwrap_or_default();
        // `2026-01-01T00:00:00Z stdout F the line`
        let lines = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3));
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The first process of a container: its id on this machine, and in the cage, which is the id that
    /// the node's own programs know.
    pub(crate) fn process(&self, container: &str) -> Option<(u32, u32)> {
        let processes = std::fs::read_dir("/proc").expect("a process table").flatten();
        let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let ids_of = |pid: u32| {
            let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
            groups.contains(container).then_some(())?;
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
            let ids: Vec<u32> = line.split_whitespace().filter_map(|id| id.parse().ok()).collect();
            // Outside, in the cage, in the container.
            (ids.len() == 3 && ids[2] == 1).then(|| (ids[0], ids[1]))
        };
        ids.filter_map(ids_of).next()
    }
}

/// Waits until a program works. If it ends or takes too long, the error has its last output.
fn until(
    running: &JoinHandle<()>,
    name: &str,
    log: &Path,
    works: impl Fn() -> bool,
) -> Result<(), String> {
    let started = clock::now();
    while !works() {
        if running.is_finished() || started.elapsed() > START_LIMIT {
            let said = std::fs::read_to_string(log).unwrap_or_default();
            let last = said.lines().last().unwrap_or("nothing");
            return Err(format!("{name} does not start here, it says: {last}"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Whether kubelet says so.
fn is_healthy(port: u16) -> bool {
    let ask = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: kubelet\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok::<_, std::io::Error>(answer)
    };
    ask().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// containerd's configuration (version 2 of it, which releases 1.6 to 2 read).
fn settings((network, plugins): (&Path, &Path), runc: &Path, nvidia: &Path) -> String {
    let cri = r#"plugins."io.containerd.grpc.v1.cri""#;
    let runtime = |name: &str, program: &Path| {
        format!(
            "[{cri}.containerd.runtimes.{name}]\nruntime_type = \"io.containerd.runc.v2\"\n\
             [{cri}.containerd.runtimes.{name}.options]\nBinaryName = \"{}\"\n",
            program.display()
        )
    };
    format!(
        "version = 2\n\
         disabled_plugins = [\"io.containerd.internal.v1.opt\"]\n\
         [{cri}]\nrestrict_oom_score_adj = true\nsandbox_image = \"{}\"\n\
         [{cri}.cni]\nconf_dir = \"{}\"\nbin_dir = \"{}\"\n\
         {}{}",
        image::BOX,
        network.display(),
        plugins.display(),
        runtime("runc", runc),
        runtime("nvidia", nvidia),
    )
}

fn text(path: &Path) -> String {
    path.to_str().expect("the target folder is UTF-8").to_owned()
}
