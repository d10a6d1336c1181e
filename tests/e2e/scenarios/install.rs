//! From nothing to a running fraction: images built and imported, `helm install`, a GPU pod; then upgrade,
//! rollback and removal under the running pod. On a whole cluster: kubelet and containerd, controllers,
//! kube-proxy and DNS are real; the driver is a stand-in.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus, Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Client;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::runtime;
use wire::api::commands::{Check, CheckState, Diagnosis};

use crate::binaries::{self, Binaries, ClusterPrograms};
use crate::chart::{folder, helm, missing as helm_missing};
use crate::checker::annotation;
use crate::clock;
use crate::control_plane::{ControlPlane, Identity};
use crate::extender::gpupack;
use crate::fleet::{A100, Fleet};
use crate::manifests;
use crate::node::driver::{Driver, MINORS};
use crate::node::image::{BOX, write_program};
use crate::node::machine::{LIMIT, Reported};
use crate::node::network::{self, ClusterParts, Network, play_inside};
use crate::node::programs::{self, Programs, said_by};
use crate::node::runtime::{NODE, Runtime};
use crate::node::toolkit::Toolkit;
use crate::scenarios::doctor::rights_to_forward;
use crate::schedulers::{Scheduler, SchedulerPlan};
use crate::testbed::{alone, figure};

const NAME: &str = "install";

/// Set to run it.
const WANTED: &str = "GPUPACK_E2E_INSTALL";

/// Set where it is a failure that it cannot run.
const REQUIRED: &str = "GPUPACK_INSTALL_REQUIRED";

/// For everything.
const WALK_LIMIT: Duration = Duration::from_secs(900);

/// For one command of helm, which waits for pods.
const HELM_LIMIT: &str = "300s";

/// Everything that the walk is made with.
struct Equipment {
    binaries: Binaries,
    cluster: ClusterPrograms,
    programs: Programs,
    toolkit: PathBuf,
    builder: PathBuf,
}

fn equipment() -> Result<Equipment, String> {
    let is_wanted = [WANTED, REQUIRED].iter().any(|name| clock::variable(name).is_some());
    if !is_wanted {
        return Err(format!("{WANTED}=1 is not set, and it takes minutes"));
    }
    helm_missing().map_or(Ok(()), |why| Err(why.to_owned()))?;
    network::missing().map_or(Ok(()), Err)?;
    let test = std::env::current_exe().map_err(|error| format!("no path of the test: {error}"))?;
    // `target/debug/deps/e2e-…`
    let builder = test.ancestors().nth(2).map(|folder| folder.join("examples/images"));
    let builder = builder.filter(|builder| builder.is_file());
    Ok(Equipment {
        binaries: binaries::find()?,
        programs: programs::find()?,
        toolkit: programs::toolkit()?,
        cluster: binaries::cluster_programs()?,
        builder: builder
            .ok_or("the builder of the images is not built; run `cargo build --features e2e --example images`")?,
    })
}

#[test]
fn a_new_cluster_gets_to_a_running_fraction_and_keeps_it() {
    let equipment = match equipment() {
        Ok(equipment) => equipment,
        Err(reason) => {
            let is_required = clock::variable(REQUIRED).is_some();
            assert!(!is_required, "{REQUIRED} is set, but {NAME} cannot run: {reason}");
            return binaries::say(&format!("skipped: {NAME} because {reason}"));
        }
    };
    let Some(network) = Network::here() else {
        let _whole = alone();
        build_images(&equipment); // packages come from outside of the namespace
        let test = "scenarios::install::a_new_cluster_gets_to_a_running_fraction_and_keeps_it";
        return play_inside(test, WALK_LIMIT);
    };
    let threads = runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    threads.expect("threads can be started").block_on(async {
        let walk = Walk::start(&equipment, network).await;
        walk.images(&equipment);
        walk.installed().await;
        walk.tested();
        walk.diagnosed();
        walk.diagnosed_without_secrets().await;
        let before = walk.running_fraction("first").await;
        walk.helm("upgraded to another policy", &["upgrade", "--set", "config.policy=binpack"]);
        walk.same_as(&before, "upgrade").await;
        walk.beside(&before).await;
        walk.helm("rolled back", &["rollback"]);
        walk.same_as(&before, "rollback").await;
        walk.helm("removed", &["uninstall"]);
        walk.nothing_left().await;
        walk.same_as(&before, "uninstall").await;
    });
}

/// Where gpupack's images are, inside the namespace and outside.
fn images_folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("install-images")
}

/// Builds gpupack's images.
fn build_images(equipment: &Equipment) {
    let (started, output) = (clock::now(), images_folder());
    let _absent = std::fs::remove_dir_all(&output);
    let mut build = Command::new(&equipment.builder);
    let program = gpupack();
    let programs = program.parent().expect("a file lies in a folder");
    build.arg("--plain").arg("--output").arg(&output).arg("--programs").arg(programs);
    build.env("RUST_BACKTRACE", "0");
    let said = said_by(&mut build).unwrap_or_else(|why| panic!("no images: {why}"));
    figure(NAME, &format!("images built, {} ms: {said}", clock::ms(started.elapsed())));
}

/// The cluster and its administrator.
struct Walk {
    client: Client,
    kubeconfig: PathBuf,
    work: PathBuf,
    runtime: Runtime,
    fleet: Fleet,
    values: PathBuf,
    _scheduler: Scheduler,
    _parts: ClusterParts,
    _plane: ControlPlane,
}

/// A GPU pod, as it started.
struct Started {
    pod: Pod,
    container: ContainerStatus,
    uuid: String,
}

impl Walk {
    /// A cluster of one node with two GPUs, that knows nothing of gpupack.
    async fn start(equipment: &Equipment, network: Network) -> Self {
        let started = clock::now();
        let plane = ControlPlane::start_whole(equipment.binaries.clone(), network.node).await;
        let work = plane.work().to_owned();
        let parts = ClusterParts::start(&plane, &equipment.cluster, NODE);
        let client = plane.client(Identity::Admin).await;
        let unused = std::net::SocketAddr::from(([127, 0, 0, 1], 1)); // no extender yet
        let scheduler = Scheduler::start(&plane, &client, SchedulerPlan::plain(), unused).await;
        let fleet = Fleet::new().with(NODE, 1, (2, A100)).named(NODE);
        let driver = Driver::new(&work, &fleet.nodes[0].gpus, (false, &[]))
            .expect("a stand-in for the driver");
        let programs = &equipment.programs;
        let toolkit = Toolkit::new(&equipment.toolkit, &work, programs);
        let toolkit = toolkit.expect("NVIDIA's runtime");
        let runtime = Runtime::start(&work, programs, &toolkit.program(), Some(network));
        let runtime = runtime.unwrap_or_else(|why| panic!("no containers here: {why}"));
        toolkit.enter(&runtime.cage, &driver).unwrap_or_else(|why| panic!("no driver: {why}"));
        runtime.start_kubelet(&plane).unwrap_or_else(|why| panic!("no kubelet here: {why}"));
        let values = work.join("values.yaml");
        std::fs::write(&values, settings(&driver).to_string())
            .expect("the work folder is writable");
        let kubeconfig = plane.kubeconfig(Identity::Admin);
        let walk = Self {
            client,
            kubeconfig,
            work,
            runtime,
            fleet,
            values,
            _scheduler: scheduler,
            _parts: parts,
            _plane: plane,
        };
        walk.node_ready().await;
        figure(NAME, &format!("an empty cluster, {} ms", clock::ms(started.elapsed())));
        walk
    }

    /// Waits until controllers have taken the taints of a new node away, and gives it what the GPU operator
    /// gives it.
    async fn node_ready(&self) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        until("a node without taints", &self.work, async || {
            let node = nodes.get(NODE).await.ok()?;
            let conditions = node.status?.conditions.unwrap_or_default();
            let is_ready = conditions.iter().any(|it| it.type_ == "Ready" && it.status == "True");
            (is_ready && node.spec?.taints.is_none_or(|taints| taints.is_empty())).then_some(())
        })
        .await;
        let labels = json!({"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}});
        let labeled = nodes.patch(NODE, &PatchParams::default(), &Patch::Merge(labels)).await;
        labeled.unwrap_or_else(|error| panic!("the node cannot be labeled: {error}"));
        let class = json!({"metadata": {"name": "nvidia"}, "handler": "nvidia"});
        let class: RuntimeClass = serde_json::from_value(class).expect("a RuntimeClass");
        let classes: Api<RuntimeClass> = Api::all(self.client.clone());
        let made = classes.create(&PostParams::default(), &class).await;
        made.unwrap_or_else(|error| panic!("no RuntimeClass: {error}"));
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), "default");
        until("a service account", &self.work, async || accounts.get("default").await.ok()).await;
    }

    /// Imports gpupack's images and kube-scheduler's.
    fn images(&self, equipment: &Equipment) {
        let output = images_folder();
        let scheduler = &equipment.binaries.kube_scheduler;
        let name = self.scheduler_image();
        let scheduler = write_program(&self.work, scheduler, &name);
        let started = clock::now();
        let archives = std::fs::read_dir(&output).expect("a folder").flatten().map(|it| it.path());
        let archives = archives.filter(|path| path.extension().is_some_and(|it| it == "tar"));
        let archives = archives.chain(scheduler).map(|archive| {
            self.runtime.import(&archive).unwrap_or_else(|why| panic!("not imported: {why}"));
        });
        let count = archives.count();
        assert_eq!(count, 3, "extender, agent, kube-scheduler");
        figure(NAME, &format!("{count} images imported, {} ms", clock::ms(started.elapsed())));
    }

    /// As the chart names it, with the version of the API server.
    fn scheduler_image(&self) -> String {
        let values = std::fs::read_to_string(folder().join("values.yaml")).expect("the chart");
        let values: Value = serde_yaml_ng::from_str(&values).expect("YAML");
        let image = &values["scheduler"]["image"];
        let text = |key: &str| image[key].as_str().expect("a text").to_owned();
        assert_eq!(text("tag"), "", "the chart takes the version of the API server");
        format!("{}:{}", text("repository"), binaries::kubernetes_version())
    }

    /// Runs a command of helm on the release, and waits for what it waits for.
    fn helm(&self, what: &str, arguments: &[&str]) {
        let started = clock::now();
        let chart = folder().display().to_string();
        let values = format!("--values={}", self.values.display());
        let kubeconfig = format!("--kubeconfig={}", self.kubeconfig.display());
        let (verb, rest) = arguments.split_first().expect("a verb");
        let mut all = vec![*verb, "gpupack", "--namespace=gpu-system", &kubeconfig];
        let limit = format!("--timeout={HELM_LIMIT}");
        all.push(&limit);
        if *verb != "test" {
            all.push("--wait");
        }
        if ["install", "upgrade"].contains(verb) {
            all.extend([chart.as_str(), &values]);
        }
        all.extend(rest);
        let said = helm(&all).unwrap_or_else(|why| {
            panic!("helm {verb}: {why}\nlogs are in {}", self.work.display())
        });
        std::fs::write(self.work.join(format!("helm-{verb}.txt")), said).expect("a folder of ours");
        figure(NAME, &format!("helm {verb}: {what}, {} ms", clock::ms(started.elapsed())));
    }

    async fn installed(&self) {
        self.helm("all pods ready", &["install", "--create-namespace"]);
        // As `docs/install.md` says. All later pods there, that of `helm test` too, must satisfy it.
        let labels =
            json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let patch = Patch::Merge(labels);
        let patched = namespaces.patch("gpu-system", &PatchParams::default(), &patch).await;
        patched.unwrap_or_else(|error| panic!("the namespace cannot be labeled: {error}"));
        let pods: Api<Pod> = Api::all(self.client.clone());
        let ours = ListParams::default().labels("app.kubernetes.io/part-of=gpupack");
        let listed = pods.list(&ours).await.expect("pods can be listed");
        let mut names: Vec<String> = Vec::new();
        for pod in listed {
            let component = pod
                .metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get("app.kubernetes.io/component"));
            let statuses = pod.status.and_then(|status| status.container_statuses);
            let mut statuses = statuses.into_iter().flatten();
            assert!(statuses.all(|status| status.ready), "{component:?}");
            names.push(component.cloned().unwrap_or_default());
        }
        names.sort();
        let expected =
            ["agent", "extender", "extender", "scheduler", "scheduler", "webhook", "webhook"];
        assert_eq!(names, expected);
    }

    fn tested(&self) {
        self.helm("passed", &["test"]);
    }

    /// `gpupack doctor` finds nothing to fix.
    fn diagnosed(&self) {
        let mut doctor = Command::new(gpupack());
        doctor.arg("doctor").arg("--kubeconfig").arg(&self.kubeconfig);
        let output = doctor.output().expect("gpupack can be started");
        let said = String::from_utf8_lossy(&output.stdout);
        let of_note = said.lines().filter(|line| !line.starts_with("ok "));
        of_note.for_each(|line| figure(NAME, &format!("doctor: {line}")));
        let wrong = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "gpupack doctor: {}\n{said}{wrong}", output.status);
    }

    /// A user who may read no Secret, but forward ports, sees which certificates pods serve.
    async fn diagnosed_without_secrets(&self) {
        for object in rights_to_forward() {
            let object: DynamicObject = serde_json::from_value(object).expect("an object");
            manifests::keep(&self.client, "rights", &object).await;
        }
        let seen = until("certificates seen in handshakes", &self.work, async || {
            let mut doctor = Command::new(gpupack());
            doctor.arg("doctor").arg("--kubeconfig").arg(&self.kubeconfig);
            let output = doctor.args(["--as", "forwarder", "-o", "json"]).output();
            let output = output.expect("gpupack can be started");
            let found: Diagnosis = serde_json::from_slice(&output.stdout).ok()?;
            let seen = found.items.into_iter().filter(|it| it.check.starts_with("certificate of "));
            let seen: Vec<Check> = seen.filter(|it| it.state == CheckState::Ok).collect();
            (seen.len() == 2).then_some(seen)
        })
        .await;
        for Check { check, found, .. } in seen {
            assert!(found.starts_with("pod gpupack-"), "{check}: {found}");
            figure(NAME, &format!("without the right to Secrets: {check}: {found}"));
        }
    }

    /// Creates a pod with half a GPU, and waits until its container says what it has.
    async fn running_fraction(&self, name: &str) -> Started {
        let pods: Api<Pod> = Api::default_namespaced(self.client.clone());
        let pod = json!({
            "metadata": {"name": name, "annotations": {"gpu-fraction": "0.5"}},
            "spec": {"schedulerName": "gpupack", "terminationGracePeriodSeconds": 0,
                     "containers": [{"name": "main", "image": BOX, "imagePullPolicy": "Never", "command": ["/bin/tell"]}]},
        });
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let started = clock::now();
        let created = pods.create(&PostParams::default(), &pod).await;
        let created = created.unwrap_or_else(|error| panic!("no pod: {error}"));
        let uid = created.metadata.uid.expect("every object has a UID");
        let reported = until("a running fraction", &self.work, async || {
            Reported::of(&self.runtime.printed(("default", name, &uid), "main", 0))
        })
        .await;
        let took = clock::ms(started.elapsed());
        let (pod, container) = until("a started container", &self.work, async || {
            let pod = pods.get(name).await.ok()?;
            let status = main_container(&pod)?;
            (status.started == Some(true)).then_some((pod, status))
        })
        .await;
        let uuid = annotation(&pod, "placed.gpupack.dev/uuids").expect("it is placed").to_owned();
        let index = self.fleet.uuids(NODE).iter().position(|known| *known == uuid);
        let minor = MINORS[index.expect("a GPU of the node")].to_string();
        assert_eq!(reported.open(), [minor.as_str()], "the GPU of its placement alone");
        assert!(reported.nodes().contains(&format!("nvidia{minor}").as_str()), "{reported:?}");
        figure(
            NAME,
            &format!(
                "pod `{name}` with gpu-fraction 0.5 has its GPU, {took} ms after it was created"
            ),
        );
        Started { pod, container, uuid }
    }

    /// The pod runs on, untouched.
    async fn same_as(&self, before: &Started, what: &str) {
        let pods: Api<Pod> = Api::default_namespaced(self.client.clone());
        let name = before.pod.metadata.name.as_deref().expect("a name");
        let pod = pods.get(name).await.unwrap_or_else(|error| panic!("after {what}: {error}"));
        assert_eq!(pod.metadata.uid, before.pod.metadata.uid, "after {what}");
        let container = main_container(&pod).expect("a container");
        assert_eq!(container.container_id, before.container.container_id, "after {what}");
        assert_eq!(container.restart_count, 0, "after {what}");
        assert!(container.state.is_some_and(|state| state.running.is_some()), "after {what}");
        let id = container.container_id.unwrap_or_default();
        let process = self.runtime.process(id.trim_start_matches("containerd://"));
        assert!(process.is_some(), "its process runs, after {what}");
        assert_eq!(annotation(&pod, "placed.gpupack.dev/uuids"), Some(before.uuid.as_str()));
        figure(NAME, &format!("after {what}: the same container runs, no restart"));
    }

    /// After the upgrade, the new policy fills the same GPU.
    async fn beside(&self, before: &Started) {
        let second = self.running_fraction("second").await;
        assert_eq!(second.uuid, before.uuid, "binpack fills the GPU that is in use");
    }

    /// Nothing of gpupack runs, and pods are created without it.
    async fn nothing_left(&self) {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let ours = ListParams::default()
            .labels("app.kubernetes.io/part-of=gpupack,app.kubernetes.io/component!=test");
        until("no pod of gpupack", &self.work, async || {
            pods.list(&ours).await.ok()?.items.is_empty().then_some(())
        })
        .await;
    }
}

/// Values of the chart. The stand-in for the driver's library has no SONAME, so NVIDIA's runtime makes no
/// link to it, and it reads from a file beside it which GPUs there are: both are mounted where
/// the image has its libraries.
fn settings(driver: &Driver) -> Value {
    let folder = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let library = driver.library();
    let files = [library.with_file_name("scenario.json"), library];
    let names = ["scenario.json", "libnvidia-ml.so.1"];
    let volume = |(name, path): (&str, &PathBuf)| json!({"name": volume_name(name), "hostPath": {"path": path, "type": "File"}});
    let mount = |name: &str| json!({"name": volume_name(name), "mountPath": format!("{folder}/{name}"), "readOnly": true});
    let volumes: Vec<Value> = names.into_iter().zip(&files).map(volume).collect();
    json!({"agents": {"extraVolumes": volumes, "extraVolumeMounts": names.map(mount)}})
}

fn volume_name(file: &str) -> String {
    file.replace('.', "-")
}

fn main_container(pod: &Pod) -> Option<ContainerStatus> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == "main").cloned()
}

/// Waits until there is an answer.
async fn until<T>(what: &str, work: &Path, query: impl AsyncFn() -> Option<T>) -> T {
    let started = clock::now();
    loop {
        if let Some(answer) = query().await {
            return answer;
        }
        let late = started.elapsed() > LIMIT;
        assert!(!late, "no {what} after {LIMIT:?}; logs are in {}", work.display());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
