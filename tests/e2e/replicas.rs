//! Several replicas of `gpupack extender`, and what stands in for the Service in front of them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
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
use crate::extender::Extender;
use crate::relay::Relay;

/// The namespace of the replicas and of their Lease.
const NAMESPACE: &str = "gpu-system";

/// How long kube-proxy takes to learn of another endpoint.
const ENDPOINTS_AFTER: Duration = Duration::from_millis(100);

/// Addresses of the replicas by the name of their pods.
type Addresses = Arc<Mutex<BTreeMap<String, SocketAddr>>>;

/// Replicas, their pods, and the Service.
pub(crate) struct Replicas {
    /// The processes; one that ended keeps its place.
    pub(crate) extenders: Vec<Extender>,
    /// The network between each of them and the API server.
    pub(crate) relays: Vec<Relay>,
    /// The Service: a new connection goes to the pod with the label of the leader.
    pub(crate) service: SocketAddr,
    plane: &'static ControlPlane,
    client: Client,
    settings: Value,
    addresses: Addresses,
    service_task: JoinHandle<()>,
}

impl Drop for Replicas {
    fn drop(&mut self) {
        self.service_task.abort();
    }
}

impl Replicas {
    /// Starts so many replicas, each when the last one is ready.
    pub(crate) async fn start(
        plane: &'static ControlPlane,
        client: Client,
        settings: Value,
        count: usize,
    ) -> Self {
        let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
        let _ = leases.delete("gpupack", &DeleteParams::default()).await;
        let addresses = Addresses::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let service = listener.local_addr().expect("it listens");
        let serving = serve(listener, client.clone(), Arc::clone(&addresses));
        let mut replicas = Self {
            extenders: Vec::new(),
            relays: Vec::new(),
            service,
            plane,
            client,
            settings,
            addresses,
            service_task: tokio::spawn(serving),
        };
        for _ in 0..count {
            replicas.add().await;
        }
        replicas
    }

    /// Starts one more, with a pod of its own; returns its place when it is ready.
    pub(crate) async fn add(&mut self) -> usize {
        let place = self.extenders.len();
        let name = format!("gpupack-{place}");
        let pod = json!({
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "gpupack",
                "app.kubernetes.io/component": "extender"}},
            "spec": {
                "schedulerName": "nobody", "terminationGracePeriodSeconds": 0,
                "securityContext": {
                    "runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [{
                    "name": "extender", "image": "none",
                    "securityContext": {
                        "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                    },
                }],
            },
        });
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let pods = self.pods();
        let now = DeleteParams::default().grace_period(0);
        let _ = pods.delete(&name, &now).await;
        pods.create(&PostParams::default(), &pod).await.expect("a pod can be created");
        let (plane, settings) = (self.plane, self.settings.clone());
        let relay = Relay::start(plane.address()).await;
        let server = format!("https://{}", relay.address);
        let kubeconfig = plane.kubeconfig_via(Identity::Extender, &name, &server);
        let extender = Extender::start_replica(plane, &kubeconfig, settings, &name).await;
        self.relays.push(relay);
        self.known().insert(name, extender.address());
        self.extenders.push(extender);
        place
    }

    /// Where all replicas listen.
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.extenders.iter().map(Extender::address).collect()
    }

    /// The place of the leader, once the Lease names one that is not `besides`.
    pub(crate) async fn leader(&self, besides: Option<usize>) -> usize {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), NAMESPACE);
        let started = clock::now();
        loop {
            let lease = leases.get_opt("gpupack").await.expect("Leases can be read");
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

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    fn known(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, SocketAddr>> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
                let known = addresses.lock().unwrap_or_else(PoisonError::into_inner);
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
