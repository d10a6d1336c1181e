//! A network of pods with services and names, in a network namespace of its own: everything of a cluster,
//! the test included, lives in it, so the network of this machine is neither used nor changed.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::binaries::ClusterPrograms;
use crate::clock;
use crate::control_plane::{ControlPlane, Identity, free_ports};
use crate::leash::Leash;

/// Where Debian has the plugins of the container network interface.
pub(crate) const PLUGINS: &str = "/usr/lib/cni";

/// Those that this network needs.
const NEEDED: [&str; 3] = ["bridge", "host-local", "loopback"];

/// The node, in its own namespace.
const NODE: Ipv4Addr = Ipv4Addr::new(10, 90, 0, 1);

/// Addresses of pods.
const PODS: &str = "10.91.0.0/24";

/// Variable of the test in the namespace.
const INSIDE: &str = "GPUPACK_INSIDE_NETWORK";

/// Makes the interface of the node, then starts the program ($@) in place of this shell.
const SETUP: &str = r#"
set -e
node="$1"; shift
ip link set lo up
ip link add node0 type veth peer name node1
ip address add "$node/24" dev node0
ip link set node0 up
ip link set node1 up
# Packets for a service need some route before they are turned to a pod.
ip route add default dev node0
echo 1 >/proc/sys/net/ipv4/ip_forward
exec "$@"
"#;

/// What is to be known of the network.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Network {
    /// Address of the node, and of the cluster's DNS.
    pub(crate) node: Ipv4Addr,
}

impl Network {
    /// The network of this process, if [`play_inside`] started it.
    pub(crate) fn here() -> Option<Self> {
        clock::variable(INSIDE).map(|_| Self { node: NODE })
    }

    /// For containerd: a bridge, and addresses kept in the folder of the test.
    pub(crate) fn list(&self, work: &Path) -> Value {
        json!({"cniVersion": "0.4.0", "name": "pods", "plugins": [{
            "type": "bridge", "bridge": "pods0", "isGateway": true, "ipMasq": true,
            "ipam": {"type": "host-local", "dataDir": work.join("cni-addresses"),
                     "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}]},
        }]})
    }
}

/// Why this machine cannot have such a network, if so.
pub(crate) fn missing() -> Option<String> {
    let absent = NEEDED.into_iter().find(|name| !Path::new(PLUGINS).join(name).is_file());
    let absent = absent.map(|name| {
        format!("{PLUGINS}/{name} is not there; Debian has it as containernetworking-plugins")
    });
    let needs = ["ip", "iptables", "unshare"];
    let programs = || needs.into_iter().find_map(|it| super::programs::on_path(it).err());
    absent.or_else(programs)
}

/// Runs the test of this name again, in a process in a new network namespace, until it ends. Its output is
/// printed.
pub(crate) fn play_inside(test: &str, limit: Duration) {
    let program = std::env::current_exe().expect("a test is a program");
    let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join("install.log");
    let _absent = std::fs::remove_file(&log);
    let node = NODE.to_string();
    let mut arguments: Vec<String> =
        ["--net", "--", "sh", "-c", SETUP, "setup", &node].map(str::to_owned).to_vec();
    arguments.extend(["env".to_owned(), format!("{INSIDE}=1"), program.display().to_string()]);
    arguments.extend(["--exact", test, "--nocapture", "--test-threads=1"].map(str::to_owned));
    let mut inner = Leash::start("the test", Path::new("unshare"), &arguments, &log);
    let started = clock::now();
    let status = loop {
        if let Some(status) = inner.ended() {
            break status;
        }
        assert!(started.elapsed() < limit, "{test} has not ended after {limit:?}; see its log");
        std::thread::sleep(Duration::from_millis(100));
    };
    let said = std::fs::read_to_string(&log).unwrap_or_default();
    println!("{said}");
    assert!(status.success(), "{test} has failed in its network; see {}", log.display());
    assert!(said.contains("1 passed"), "{test} has not run in its network");
}

/// What turns a control plane into a cluster; it ends when this is dropped.
pub(crate) struct ClusterParts {
    _running: Vec<Leash>,
}

impl ClusterParts {
    /// Starts kube-controller-manager, kube-proxy and CoreDNS.
    pub(crate) fn start(plane: &ControlPlane, programs: &ClusterPrograms, node: &str) -> Self {
        let work = plane.work();
        let kubeconfig = plane.kubeconfig(Identity::Admin);
        let [healthy, metrics] = free_ports();
        let controllers = plane.start_controllers(&programs.controllers, "*");

        let never = "0s";
        let config = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": kubeconfig}, "hostnameOverride": node,
            "mode": "iptables", "clusterCIDR": PODS,
            // Pods on one bridge then answer through the node, where addresses are turned back.
            "iptables": {"masqueradeAll": true, "localhostNodePorts": false},
            // Settings of the whole machine stay as they are.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": never,
                          "tcpCloseWaitTimeout": never},
            "healthzBindAddress": format!("127.0.0.1:{healthy}"),
            "metricsBindAddress": format!("127.0.0.1:{metrics}"),
        });
        let file = work.join("kube-proxy.json");
        std::fs::write(&file, config.to_string()).expect("the work folder is writable");
        let flags = [format!("--config={}", file.display())];
        let proxy = Leash::start("kube-proxy", &programs.proxy, &flags, &plane.log("kube-proxy"));

        let zone = format!(
            ".:53 {{\n    errors\n    kubernetes cluster.local {{\n        kubeconfig {} testbed\n    }}\n}}\n",
            kubeconfig.display()
        );
        let file = work.join("Corefile");
        std::fs::write(&file, zone).expect("the work folder is writable");
        let flags = ["-conf".to_owned(), file.display().to_string()];
        let dns = Leash::start("coredns", &programs.dns, &flags, &plane.log("coredns"));
        Self { _running: vec![controllers, proxy, dns] }
    }
}
