//! The cluster of one node that runs containers, and everything of gpupack around it: webhook,
//! policies, extender and the node's own agent on a stand-in for NVML.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use wire::api::state::{IsolationMode, State, Tenant};

use super::driver::Driver;
use super::image::BOX;
use super::programs;
use super::runtime::{NODE, Runtime};
use super::toolkit::Toolkit;
use crate::checker::annotation;
use crate::clock;
use crate::cluster::Cluster;
use crate::control_plane::{ControlPlane, Identity};
use crate::extender::{Extender, gpupack_agent};
use crate::fleet::{A100, Fleet};
use crate::schedulers::{Scheduler, SchedulerPlan};
use crate::testbed::{Testbed, figure, scenario_with, until_divided, until_known, until_shown};
use crate::watching::Watching;
use crate::webhook::{Webhook, policies};

/// How long anything on the node may take: starts of containers, restarts, kubelet's retries.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// What starts the containers of GPU pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GpuRuntime {
    /// runc: variables stay as kubelet wrote them.
    Plain,
    /// NVIDIA's runtime, from its Go module.
    Nvidia,
}

/// The node with its driver, before gpupack is there.
pub(crate) struct Parts {
    runtime: Runtime,
    driver: Driver,
    toolkit: Option<Toolkit>,
    fleet: Fleet,
    work: PathBuf,
}

/// The node, and gpupack around it.
pub(crate) struct Machine {
    /// containerd and kubelet.
    pub(crate) runtime: Runtime,
    /// The GPUs.
    pub(crate) driver: Driver,
    /// NVIDIA's runtime, if it is installed.
    pub(crate) toolkit: Option<Toolkit>,
    /// The GPUs for the checker.
    pub(crate) fleet: Fleet,
    /// The administrator's hands.
    pub(crate) cluster: Cluster,
    /// `gpupack extender`.
    pub(crate) extender: Extender,
    /// The checker.
    pub(crate) watching: Watching,
    /// The folder of all files of the scenario.
    pub(crate) work: PathBuf,
    /// etcd and the API server.
    pub(crate) plane: &'static ControlPlane,
    name: &'static str,
    _webhook: Webhook,
    _scheduler: Scheduler,
}

/// Whether the GPUs are in MIG mode, and the instances of the first one after a boot.
type Mig = (bool, &'static [(&'static str, u32)]);

/// Runs a scenario on a node of two GPUs with containers, or says why it is skipped. `settings` are
/// those of the file that extender and webhook share.
pub(crate) fn node_scenario<F, S>(name: &'static str, kind: GpuRuntime, settings: Value, play: S)
where
    S: FnOnce(Machine) -> F,
    F: Future<Output = ()>,
{
    let pool = &settings["pools"][""];
    let mig: Mig = match (pool["mig"].as_str(), pool["mig_instances"].as_str()) {
        (Some("on_demand"), _) => (true, &[]),
        (_, Some(_)) => (true, &[("3g.40gb", 0), ("3g.40gb", 4)]),
        (_, None) => (false, &[]),
    };
    // Control groups and the cache of built programs belong to the machine.
    static ONE_NODE: Mutex<()> = Mutex::new(());
    let _one = ONE_NODE.lock().unwrap_or_else(PoisonError::into_inner);
    let prepare = |plane: &ControlPlane| parts(plane, name, kind, mig);
    scenario_with(name, "GPUPACK_NODE_REQUIRED", prepare, |bed, parts| async move {
        let machine = Machine::start(bed, parts, settings).await;
        play(machine).await;
    });
}

fn parts(
    plane: &ControlPlane,
    name: &'static str,
    kind: GpuRuntime,
    mig: Mig,
) -> Result<Parts, String> {
    let programs = programs::find()?;
    let work = plane.work().join(name);
    std::fs::create_dir_all(&work).map_err(|error| format!("no work folder: {error}"))?;
    let fleet = Fleet::new().with(NODE, 1, (2, A100)).named(NODE);
    let driver = Driver::new(&work, &fleet.nodes[0].gpus, mig)?;
    let toolkit = match kind {
        GpuRuntime::Plain => None,
        GpuRuntime::Nvidia => Some(Toolkit::new(&programs::toolkit()?, &work, &programs)?),
    };
    let program = match &toolkit {
        Some(toolkit) => toolkit.program(),
        None => mounting_runc(&work, &programs.runc)?,
    };
    let runtime = Runtime::start(&work, &programs, &program, None)?;
    if driver.mig() {
        driver.describe_instances(&runtime.cage)?;
    }
    if let Some(toolkit) = &toolkit {
        toolkit.enter(&runtime.cage, &driver)?;
    }
    runtime.start_kubelet(plane)?;
    Ok(Parts { runtime, driver, toolkit, fleet, work })
}

/// A runc that mounts a library of the driver in each container with GPUs, as NVIDIA's runtime does: without one the
/// pod did not get its GPU.
fn mounting_runc(work: &Path, runc: &Path) -> Result<PathBuf, String> {
    let (library, program) = (work.join("libcuda.so.580.95.05"), work.join("mounting-runc"));
    let mount = format!(
        r#"{{"destination":"/usr/lib/libcuda.so.580.95.05","type":"bind","source":"{}","options":["rbind","ro"]}},"#,
        library.display()
    );
    let script = format!(
        "#!/bin/sh\nfor word in \"$@\"; do\n\
         \tif [ \"$last\" = --bundle ] && grep -q NVIDIA_VISIBLE_DEVICES= \"$word/config.json\"; then\n\
         \t\tsed -i 's#\"mounts\":\\[#&{mount}#' \"$word/config.json\"\n\
         \tfi\n\
         \tlast=\"$word\"\n\
         done\n\
         exec {} \"$@\"\n",
        runc.display()
    );
    let written = std::fs::write(&library, "").and_then(|()| std::fs::write(&program, script));
    let all = std::fs::Permissions::from_mode(0o755);
    let made = written.and_then(|()| std::fs::set_permissions(&program, all));
    made.map_err(|error| format!("{}: {error}", program.display()))?;
    Ok(program)
}

impl Machine {
    async fn start(bed: Testbed, parts: Parts, settings: Value) -> Self {
        let Testbed { plane, cluster, name } = bed;
        // There is no network of pods here: they all have the node's.
        let mut settings = settings;
        settings["webhook"]["allow_host_network"] = true.into();
        let Parts { runtime, driver, toolkit, fleet, work } = parts;
        let started = clock::now();
        let watching = Watching::start(cluster.client.clone(), fleet.clone()).await;
        let kubeconfig = plane.kubeconfig(Identity::Extender);
        let extender = Extender::start(plane, &kubeconfig, settings.clone()).await;
        start_agent(&runtime, &driver, &extender, &work);
        match driver.mig() {
            true if driver.has_instances() => {
                until_shown(&extender, "\"kind\":\"MigInstance\"", 2).await;
            }
            true => until_divided(&extender, fleet.gpus()).await,
            false => until_known(&extender, fleet.gpus(), Duration::from_secs(1)).await,
        }
        let plan = SchedulerPlan::second();
        let scheduler = Scheduler::start(plane, &cluster.client, plan, extender.address()).await;
        let webhook = Webhook::start(plane, &cluster, settings).await;
        policies(&cluster).await;
        until_ready(&cluster.client, &work).await;
        let ready = clock::ms(started.elapsed());
        figure(name, &format!("webhook, extender, agent and node ready in {ready} ms"));
        Self {
            runtime,
            driver,
            toolkit,
            fleet,
            cluster,
            extender,
            watching,
            work,
            plane,
            name,
            _webhook: webhook,
            _scheduler: scheduler,
        }
    }

    /// Prints a figure of this scenario.
    pub(crate) fn figure(&self, text: &str) {
        figure(self.name, text);
    }

    /// UUIDs of the GPUs, by NVML index.
    pub(crate) fn uuids(&self) -> Vec<&str> {
        self.fleet.uuids(NODE)
    }

    /// The cluster, seen from the namespace of a pod, and the pod's name there. A name without
    /// namespace is one of the scenario's.
    pub(crate) fn place<'a>(&self, name: &'a str) -> (Cluster, &'a str) {
        let here = self.cluster.namespace.as_str();
        let (namespace, name) = name.split_once('/').unwrap_or((here, name));
        let client = self.cluster.client.clone();
        (Cluster { client, namespace: namespace.to_owned() }, name)
    }

    /// Creates a pod, in the scenario's namespace unless it names another.
    pub(crate) async fn create(&self, pod: &Value) {
        let pod: Pod = serde_json::from_value(pod.clone()).expect("a pod");
        let namespace = pod.metadata.namespace.as_deref().unwrap_or(&self.cluster.namespace);
        let api: Api<Pod> = Api::namespaced(self.cluster.client.clone(), namespace);
        let created = api.create(&PostParams::default(), &pod).await;
        created.unwrap_or_else(|error| panic!("cannot create a pod: {error}"));
    }

    /// The pod as it is now.
    pub(crate) async fn pod(&self, name: &str) -> Pod {
        let (cluster, name) = self.place(name);
        let pod = cluster.pods().get(name).await;
        pod.unwrap_or_else(|error| panic!("no pod {name}: {error}"))
    }

    /// Deletes a pod; kubelet ends it.
    pub(crate) async fn delete(&self, name: &str) {
        let (cluster, name) = self.place(name);
        cluster.delete_pod(name).await;
    }

    /// The UUIDs that gpupack's own record gives the pod, without the runtime's prefix.
    pub(crate) async fn placed(&self, name: &str) -> String {
        let pod = self.pod(name).await;
        annotation(&pod, "placed.gpupack.dev/uuids").unwrap_or_default().to_owned()
    }

    /// The tenants of a GPU in `/v1/state`: names of pods.
    pub(crate) async fn tenants(&self, uuid: &str) -> Vec<String> {
        let tenants = self.tenant_views(uuid).await;
        tenants.into_iter().map(|it| it.pod).collect()
    }

    /// Waits until `/v1/state` shows how much of the GPU the pod uses; in MiB.
    pub(crate) async fn until_used(&self, uuid: &str, name: &str) -> u64 {
        let full_name = format!("{}/{name}", self.cluster.namespace);
        let started = clock::now();
        loop {
            let tenants = self.tenant_views(uuid).await;
            let mut of_pod = tenants.iter().filter(|it| it.pod == full_name);
            match of_pod.next().and_then(|it| it.used_mib) {
                Some(used) if used > 0 => return used,
                _ => {}
            }
            assert!(started.elapsed() < LIMIT, "{name} has no usage sample: {tenants:#?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// What `/v1/state` says limits the memory of the pod on the GPU: configured, and verified.
    pub(crate) async fn isolation(&self, uuid: &str, name: &str) -> (IsolationMode, IsolationMode) {
        let full_name = format!("{}/{name}", self.cluster.namespace);
        let tenants = self.tenant_views(uuid).await;
        let tenant = tenants.iter().find(|it| it.pod == full_name).expect("a tenant");
        (tenant.isolation.configured, tenant.isolation.verified)
    }

    async fn tenant_views(&self, uuid: &str) -> Vec<Tenant> {
        let state: State =
            serde_json::from_str(&self.extender.page("/v1/state").await).expect("a state");
        let mut devices = state.nodes.into_iter().flat_map(|node| node.devices);
        devices.find(|device| device.id == uuid).expect("a GPU of the node").tenants
    }

    /// What a container says of itself in its `life`, counted from 0; waits until it has.
    pub(crate) async fn reported(&self, name: &str, container: &str, life: u32) -> Reported {
        let uid = self.pod(name).await.metadata.uid.expect("every object has a UID");
        let (cluster, short) = self.place(name);
        let place = (cluster.namespace.as_str(), short, uid.as_str());
        let started = clock::now();
        loop {
            let printed = self.runtime.printed(place, container, life);
            if let Some(reported) = Reported::of(&printed) {
                return reported;
            }
            if started.elapsed() > LIMIT {
                let status = self.pod(name).await.status;
                panic!(
                    "{name}/{container} says nothing in its life {life}; logs are in {}:\n{status:#?}",
                    self.work.display()
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Kills the first process of a container, which kubelet then restarts in the same pod.
    pub(crate) async fn kill(&self, name: &str, container: &str) {
        let (process, _) = self.process(name, container).await;
        let killed = std::process::Command::new("kill").args(["-9", &process.to_string()]).status();
        assert!(killed.is_ok_and(|status| status.success()), "cannot kill process {process}");
    }

    /// The first process of a container: its id here, and as the node knows it. Waits until kubelet has
    /// told of the container.
    pub(crate) async fn process(&self, name: &str, container: &str) -> (u32, u32) {
        let started = clock::now();
        loop {
            let status = self.pod(name).await.status.unwrap_or_default();
            let all = status.container_statuses.into_iter().flatten();
            let mut ids = all.filter(|it| it.name == container).filter_map(|it| it.container_id);
            let id = ids.next().unwrap_or_default();
            let id = id.trim_start_matches("containerd://");
            match self.runtime.process(id).filter(|_| !id.is_empty()) {
                Some(process) => return process,
                None => assert!(started.elapsed() < LIMIT, "{name}/{container} has no process"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until `query` answers true of the pod.
    pub(crate) async fn until(&self, what: &str, name: &str, query: impl Fn(&Pod) -> bool) -> Pod {
        let started = clock::now();
        loop {
            let pod = self.pod(name).await;
            if query(&pod) {
                return pod;
            }
            let late = started.elapsed() > LIMIT;
            assert!(!late, "not {what} after {LIMIT:?}: {:#?}", pod.status);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// A pod with these annotations whose container says what it sees.
pub(crate) fn pod(name: &str, annotations: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {
            "schedulerName": "gpupack", "hostNetwork": true, "restartPolicy": "Always",
            "automountServiceAccountToken": false, "enableServiceLinks": false,
            "containers": [{"name": "main", "image": BOX, "imagePullPolicy": "Never",
                "command": ["/bin/tell"], "resources": {"requests": {"cpu": "10m"}}}],
        },
    })
}

/// What a container says of itself; see [`super::image`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reported {
    line: String,
}

impl Reported {
    /// What it printed last of itself.
    pub(crate) fn of(printed: &str) -> Option<Self> {
        let line = printed.lines().find(|line| line.starts_with("tell|"))?;
        Some(Self { line: line.to_owned() })
    }

    /// `NVIDIA_VISIBLE_DEVICES`.
    pub(crate) fn devices(&self) -> &str {
        self.value("devices")
    }

    /// `GPUPACK_DEVICE_UUIDS`.
    pub(crate) fn uuids(&self) -> &str {
        self.value("uuids")
    }

    /// `GPUPACK_MEMORY_MIB`.
    pub(crate) fn mib(&self) -> &str {
        self.value("mib")
    }

    /// How many of the driver's libraries are mounted in it.
    pub(crate) fn libraries(&self) -> &str {
        self.value("libraries")
    }

    /// NVIDIA's device nodes under its `/dev`.
    pub(crate) fn nodes(&self) -> Vec<&str> {
        self.value("nodes").split_whitespace().collect()
    }

    /// Minor numbers of NVIDIA's devices that its control group lets it open.
    pub(crate) fn open(&self) -> Vec<&str> {
        self.value("open").split_whitespace().collect()
    }

    /// Device nodes of MIG instances that it has.
    pub(crate) fn instance_nodes(&self) -> Vec<&str> {
        self.value("caps").split_whitespace().collect()
    }

    /// The same that its control group lets it open.
    pub(crate) fn instance_rights(&self) -> Vec<&str> {
        self.value("rights").split_whitespace().collect()
    }

    fn value(&self, key: &str) -> &str {
        let mut parts = self.line.split('|').filter_map(|part| part.split_once('='));
        parts.find(|(name, _)| *name == key).map_or("", |(_, value)| value)
    }
}

/// `gpupack-agent` in the cage, as on a node with `hostPID`: kubelet's socket and the process table are
/// where they are by default.
fn start_agent(runtime: &Runtime, driver: &Driver, extender: &Extender, work: &Path) {
    let mut arguments = vec![
        format!("--node={NODE}"),
        format!("--extender=http://{}", extender.agents_address()),
        format!("--nvml-library={}", driver.library().display()),
    ];
    if driver.mig() {
        arguments.push("--mig-on-demand".to_owned());
        arguments.push(format!("--mig-folder={}", work.join("mig").display()));
        // The module says of all instances that there can be where device nodes are made from.
        arguments.push(format!("--proc-driver={}", work.join("no-list").display()));
    }
    runtime.cage.start(&gpupack_agent(), &arguments, &work.join("agent.log"));
}

/// Waits until kubelet reports the node as ready, and removes the taint of new nodes: there is no
/// controller that would.
async fn until_ready(client: &Client, work: &Path) {
    let nodes: Api<Node> = Api::all(client.clone());
    let started = clock::now();
    loop {
        let node = nodes.get(NODE).await.ok();
        let conditions = node.and_then(|node| node.status).and_then(|status| status.conditions);
        let mut conditions = conditions.into_iter().flatten();
        if conditions.any(|it| it.type_ == "Ready" && it.status == "True") {
            break;
        }
        assert!(started.elapsed() < LIMIT, "the node is not ready; logs are in {}", work.display());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let untainted = Patch::Merge(json!({"spec": {"taints": null}}));
    let patched = nodes.patch(NODE, &PatchParams::default(), &untainted).await;
    patched.unwrap_or_else(|error| panic!("cannot remove the taints of the node: {error}"));
}
