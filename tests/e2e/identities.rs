//! Certificates and tokens by which kube-scheduler, agents and the extender prove who they are.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::{Api, DeleteParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use crate::authority::Authority;
use crate::control_plane::ControlPlane;
use crate::extender::gpupack;
use crate::fleet::Fleet;
use crate::leash::Leash;

/// The Service by which the API server calls the extender.
pub(crate) const SERVICE: &str = "gpupack-people";

/// Where the agents are.
const NAMESPACE: &str = "gpupack-agents";

/// The files of a CA, and the tokens that the API server makes.
pub(crate) struct Identities {
    /// The folder of all files.
    pub(crate) folder: &'static Path,
    client: Client,
}

impl Identities {
    /// A new CA with certificates of extender and kube-scheduler.
    pub(crate) async fn new(plane: &ControlPlane, client: &Client, name: &str) -> Self {
        let folder: &Path = Box::leak(plane.work().join(format!("{name}-tls")).into_boxed_path());
        std::fs::create_dir_all(folder).expect("the work folder is writable");
        let authority = Authority::new();
        let service = format!("{SERVICE}.gpu-system.svc");
        authority.write(folder, &authority.pair_of(&["gpupack-extender", &service]));
        let scheduler = authority.pair("gpupack-scheduler");
        let files = [("scheduler.crt", scheduler.certificate), ("scheduler.key", scheduler.key)];
        for (name, text) in files {
            std::fs::write(folder.join(name), text).expect("the folder is writable");
        }
        Self::of(folder, client).await
    }

    /// With files that others make.
    pub(crate) async fn of(folder: &'static Path, client: &Client) -> Self {
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
        for name in ["gpupack-agent", "intruder"] {
            let account = json!({"metadata": {"name": name}});
            let account = serde_json::from_value(account).expect("a service account");
            let _exists = accounts.create(&PostParams::default(), &account).await;
        }
        Self { folder, client: client.clone() }
    }

    /// The section `tls` of the extender.
    pub(crate) fn settings(&self) -> Value {
        let file = |name: &str| self.folder.join(name);
        json!({"certificate_file": file("tls.crt"), "key_file": file("tls.key"),
            "ca_file": file("ca.crt")})
    }

    /// The projected token of a new pod of this account on a node, in a file.
    pub(crate) async fn token(&self, account: &str, pod: &str, node: &str) -> PathBuf {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), NAMESPACE);
        let now = DeleteParams::default().grace_period(0);
        let _absent = pods.delete(pod, &now).await;
        let object = json!({"metadata": {"name": pod}, "spec": {"serviceAccountName": account,
            "nodeName": node, "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": "none"}]}});
        let object = serde_json::from_value(object).expect("a pod");
        let made = pods.create(&PostParams::default(), &object).await.expect("it can be created");
        let request = json!({"spec": {"audiences": ["gpupack"], "expirationSeconds": 600,
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": made.uid()}}});
        let request: TokenRequest = serde_json::from_value(request).expect("a request");
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), NAMESPACE);
        let answer = accounts.create_token_request(account, &PostParams::default(), &request).await;
        let token = answer.expect("a token").status.expect("the answer has it").token;
        let file = self.folder.join(format!("{pod}.token"));
        std::fs::write(&file, token.expect("the answer has it")).expect("the folder is writable");
        file
    }

    /// An agent for each node, each with the token of its own pod.
    pub(crate) async fn start_agents(
        &self,
        plane: &ControlPlane,
        fleet: &Fleet,
        (file, extender): (&Path, SocketAddr),
    ) -> Vec<Leash> {
        let mut agents = Vec::new();
        for node in &fleet.nodes {
            let name = format!("agent-{}", node.name);
            let token = self.token("gpupack-agent", &name, &node.name).await;
            agents.push(self.start_agent(plane, (&node.name, &token), (file, extender)));
        }
        agents
    }

    /// An agent for a node with this token.
    pub(crate) fn start_agent(
        &self,
        plane: &ControlPlane,
        (node, token): (&str, &Path),
        (fleet, extender): (&Path, SocketAddr),
    ) -> Leash {
        let fleet = fleet.to_str().expect("the target folder is UTF-8");
        let flags = vec![format!("--simulate={fleet}")];
        self.start_agent_with(plane, (node, token), (flags, extender))
    }

    /// The same with these flags.
    pub(crate) fn start_agent_with(
        &self,
        plane: &ControlPlane,
        (node, token): (&str, &Path),
        (flags, extender): (Vec<String>, SocketAddr),
    ) -> Leash {
        let path = |path: &Path| path.to_str().expect("the target folder is UTF-8").to_owned();
        let own = [
            "agent".to_owned(),
            format!("--node={node}"),
            format!("--extender=https://{extender}"),
            format!("--ca-file={}", path(&self.folder.join("ca.crt"))),
            format!("--token-file={}", path(token)),
        ];
        let arguments: Vec<String> = own.into_iter().chain(flags).collect();
        Leash::start("gpupack agent", &gpupack(), &arguments, &plane.log(&format!("agent-{node}")))
    }
}
