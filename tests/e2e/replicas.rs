//! Several replicas of `gpupack extender`, and what stands in for the Service in front of them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::clock;
use crate::control_plane::{ControlPlane, Identity};
use crate::extender::{Extender, gpupack, start_agents_of};
use crate::fleet::Fleet;
use crate::leash::Leash;
use crate::relay::Relay;
use crate::schedulers::{Scheduler, SchedulerPlan};
use crate::testbed::{Testbed, until_known};

/// The namespace of the replicas and of their Lease.
const NAMESPACE: &str = "gpu-system";

/// How often an agent reports.
const REPORTED_EVERY: Duration = Duration::from_secs(1);

/// How long kube-proxy takes to learn of another endpoint.
const ENDPOINTS_AFTER: Duration = Duration::from_millis(100);

/// Addresses of the replicas by the name of their pods.
type Addresses = Arc<Mutex<BTreeMap<String, SocketAddr>>>;

/// Two replicas, their pods, the Service, the agents that report to both, and a scheduler.
pub(crate) struct Replicas {
    /// The processes; one that ended keeps its place.
    pub(crate) extenders: Vec<Extender>,
    /// The network between each of them and the API server.
    pub(crate) relays: Vec<Relay>,
    /// The agents of all nodes.
    pub(crate) agents: Leash,
    fleet: PathBuf,
    scheduler: Scheduler,
    service: SocketAddr,
    plane: &'static ControlPlane,
    client: Client,
    service_task: JoinHandle<()>,
}

impl Drop for Replicas {
    fn drop(&mut self) {
        self.service_task.abort();
    }
}

impl Replicas {
    /// Starts two replicas, the second when the first is ready, and all that uses them. The leader
    /// knows the fleet when it returns.
    pub(crate) async fn start(bed: &Testbed, fleet: &Fleet) -> Self {
        Self::start_with(bed, fleet, json!({})).await
    }

    /// The same with these settings.
    pub(crate) async fn start_with(bed: &Testbed, fleet: &Fleet, settings: Value) -> Self {
        let (plane, client) = (bed.plane, bed.cluster.client.clone());
        let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
        let _ = leases.delete("gpupack", &DeleteParams::default()).await;
        let addresses = Addresses::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let service = listener.local_addr().expect("it listens");
        let serving = tokio::spawn(serve(listener, client.clone(), Arc::clone(&addresses)));
        let (mut extenders, mut relays) = (Vec::new(), Vec::new());
        for name in ["gpupack-0", "gpupack-1"] {
            let (extender, relay) = start_replica(plane, &client, name, settings.clone()).await;
            known(&addresses).insert(name.to_owned(), extender.address());
            extenders.push(extender);
            relays.push(relay);
        }
        let file = fleet.write(plane.work(), bed.name);
        let agents = agents(&gpupack(), plane, &file, &extenders);
        let plan = SchedulerPlan::second();
        let scheduler = Scheduler::start(plane, &client, plan, service).await;
        let replicas = Self {
            extenders,
            relays,
            agents,
            fleet: file,
            scheduler,
            service,
            plane,
            client,
            service_task: serving,
        };
        let leader = replicas.leader(None).await;
        until_known(&replicas.extenders[leader], fleet.gpus(), REPORTED_EVERY).await;
        replicas
    }

    /// Starts kube-scheduler again if it has ended, as kubelet would.
    pub(crate) async fn keep_scheduler(&mut self) {
        if self.scheduler.has_ended() {
            let plan = SchedulerPlan::second();
            self.scheduler = Scheduler::start(self.plane, &self.client, plan, self.service).await;
        }
    }

    /// Starts the agents again.
    pub(crate) fn start_agents_again(&mut self) {
        self.start_agents_of(&gpupack());
    }

    /// The same with another program.
    pub(crate) fn start_agents_of(&mut self, program: &Path) {
        self.agents = agents(program, self.plane, &self.fleet, &self.extenders);
    }

    /// The place of the leader, once the Lease names one that is not `besides`.
    pub(crate) async fn leader(&self, besides: Option<usize>) -> usize {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), NAMESPACE);
        let started = clock::now();
        loop {
            let lease = leases.get_opt("gpupack").await.ok().flatten(); // all may be broken now
            let holder = lease.and_then(|lease| lease.spec).and_then(|spec| spec.holder_identity);
            let place = holder.as_deref().and_then(|holder| {
                let (pod, _) = holder.strip_prefix("gpupack-")?.split_once('_')?;
                pod.parse().ok()
            });
            if let Some(place) = place.filter(|place| Some(*place) != besides) {
                return place;
            }
            assert!(started.elapsed() < Duration::from_secs(30), "nobody leads: {holder:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn known(addresses: &Addresses) -> std::sync::MutexGuard<'_, BTreeMap<String, SocketAddr>> {
    addresses.lock().unwrap_or_else(PoisonError::into_inner)
}

fn agents(program: &Path, plane: &ControlPlane, fleet: &Path, extenders: &[Extender]) -> Leash {
    let addresses: Vec<SocketAddr> = extenders.iter().map(Extender::agents_address).collect();
    start_agents_of(program, plane, fleet, REPORTED_EVERY, &addresses)
}

/// Makes the pod of a replica.
pub(crate) async fn make_pod(client: &Client, name: &str) {
    let pod = json!({
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "gpupack",
            "app.kubernetes.io/component": "extender"}},
        "spec": {
            "schedulerName": "nobody", "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "extender", "image": "ghcr.io/gpupack/gpupack:0.1.0",
                "securityContext": {
                    "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    });
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let now = DeleteParams::default().grace_period(0);
    let _ = pods.delete(name, &now).await;
    pods.create(&PostParams::default(), &pod).await.expect("a pod can be created");
}

/// Starts a replica with a pod of its own; returns when it is ready.
async fn start_replica(
    plane: &ControlPlane,
    client: &Client,
    name: &str,
    settings: Value,
) -> (Extender, Relay) {
    make_pod(client, name).await;
    let relay = Relay::start(plane.address()).await;
    let server = format!("https://{}", relay.address);
    let kubeconfig = plane.kubeconfig_via(Identity::Extender, name, &server);
    let extender = Extender::start_replica(plane, &kubeconfig, settings, name).await;
    (extender, relay)
}

/// Passes each new connection on to the pod that is labelled as the leader's, as kube-proxy does.
/// Open connections stay where they are.
async fn serve(listener: TcpListener, client: Client, addresses: Addresses) {
    let pods: Api<Pod> = Api::namespaced(client, NAMESPACE);
    let labelled = ListParams::default().labels("gpupack.dev/leader=true");
    let mut endpoint = None;
    let mut look = tokio::time::interval(ENDPOINTS_AFTER);
    loop {
        tokio::select! {
            _ = look.tick() => {
                let Ok(found) = pods.list(&labelled).await else { continue };
                let known = known(&addresses);
                let names = found.into_iter().filter_map(|pod| pod.metadata.name);
                endpoint = names.filter_map(|name| known.get(&name).copied()).next_back();
            }
            Ok((mut from, _)) = listener.accept() => {
                let Some(to) = endpoint else { continue };
                tokio::spawn(async move {
                    if let Ok(mut to) = TcpStream::connect(to).await {
                        let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
                    }
                });
            }
        }
    }
}
