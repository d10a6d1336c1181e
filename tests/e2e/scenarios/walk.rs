//! One pod that waits, from its event to its suggestion, as its owner walks: what `kubectl describe` shows,
//! `gpupack explain` through the API server's service proxy with rights to that alone, the suggestion, and the
//! pod runs.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

use crate::clock;
use crate::control_plane::Identity;
use crate::extender::queried;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::is_bound;

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn docs_lead_from_the_event_of_a_waiting_pod_to_its_suggestion() {
    scenario("walk", |bed| async move {
        let plane = bed.plane;
        let stage = bed.stage(Setup::of(Fleet::new().with("walk", 1, (1, A100)))).await;
        stage.cluster.add_pods(&[PodPlan::fraction("first", "0.6")]).await;
        stage.watching.until("the first is bound", LIMIT, |pods| is_bound(pods, "first")).await;
        stage.cluster.add_pods(&[PodPlan::fraction("second", "0.5")]).await;
        let smaller =
            "request `gpu-fraction: \"0.4\"` instead of 0.5 GPU: it fits on node walk-00 now";
        let end = "end walk/first (0.6 GPU): it fits on node walk-00 then";
        let message = reported(&stage, "second").await;
        assert!(
            message.starts_with("the only node tried does not fit; 1: insufficient GPU memory"),
            "{message}"
        );
        assert!(message.contains(&format!("; suggestion: {smaller}; or: {end}")), "{message}");
        stage.figure(&format!("the event says: {message}"));

        let jane = plane.kubeconfig(Identity::Jane);
        match own_address() {
            Some(address) => {
                let port = serve_at(&stage, address).await;
                through_the_api_server(&stage, &jane, [smaller, end]).await;
                let client = plane.client(Identity::Jane).await;
                page_through_the_api_server(&stage, &client, port).await;
            }
            None => {
                stage.figure("this machine has only loopback addresses: the proxy is not tested")
            }
        }
        let url = format!("http://{}", stage.extender.page_address());
        let direct = queried(&["explain", "walk/second", "--server", &url]).await;
        let joined = direct.1.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            direct.0 == Some(0) && joined.contains(smaller) && joined.contains(end),
            "{}",
            direct.1
        );

        // The first suggestion, in a pod of its own, as requests may not change; then the second.
        stage.cluster.add_pods(&[PodPlan::fraction("smaller", "0.4")]).await;
        let took = stage
            .watching
            .until("the smaller is bound", LIMIT, |pods| is_bound(pods, "smaller"))
            .await;
        stage.figure(&format!("the smaller one is bound in {} ms", clock::ms(took)));
        stage.cluster.delete_pod("first").await;
        let took = stage
            .watching
            .until("the second is bound", LIMIT, |pods| is_bound(pods, "second"))
            .await;
        stage.figure(&format!("bound {} ms after the tenant's end", clock::ms(took)));
        let (code, text) = queried(&["waiting", "--server", &url]).await;
        assert!(code == Some(0) && text.ends_with("(none)\n"), "{text}");
        stage.until_ledgers_agree().await;
        stage.judge().await;
    });
}

/// What the API server has as event about why a pod waits.
async fn reported(stage: &Stage, pod: &str) -> String {
    let started = clock::now();
    loop {
        let events = stage.cluster.events().await.into_iter();
        let mut ours = events.filter(|event| event.pod == pod && event.reason == "NoGpuFits");
        if let Some(event) = ours.next() {
            assert_eq!(ours.count(), 0, "one event for one text");
            return event.message;
        }
        assert!(started.elapsed() < LIMIT, "no event with the reason why {pod} waits");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn through_the_api_server(stage: &Stage, jane: &Path, suggestions: [&str; 2]) {
    let jane = jane.to_str().expect("the target folder is UTF-8");
    let of_jane = ["explain", "-n", "walk", "second", "--kubeconfig", jane];
    let (code, line) = queried(&of_jane).await;
    assert!(code == Some(1) && line.contains("gpupack-view"), "without any right: {code:?} {line}");
    let subject = json!({"kind": "User", "name": "jane", "apiGroup": "rbac.authorization.k8s.io"});
    let role =
        json!({"kind": "Role", "name": "gpupack-view", "apiGroup": "rbac.authorization.k8s.io"});
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": "jane", "namespace": "gpu-system"}, "roleRef": role, "subjects": [subject]});
    keep(stage, binding).await;
    let started = clock::now();
    let text = loop {
        let (code, text) = queried(&of_jane).await;
        if code == Some(0) {
            break text;
        }
        assert!(started.elapsed() < LIMIT, "{code:?} {text}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for suggestion in suggestions {
        assert!(joined.contains(suggestion), "{suggestion} in {text}");
    }
    let (code, line) = queried(&["explain", "-n", "walk", "nobody", "--kubeconfig", jane]).await;
    assert!(code == Some(5) && line.contains("`walk/nobody` is not known"), "{line}");
    let (code, line) =
        queried(&["waiting", "--service", "walk/gpupack:page", "--kubeconfig", jane]).await;
    assert!(code == Some(1), "no right to other Services: {line}");
    let (code, text) = queried(&["top", "gpus", "--kubeconfig", jane]).await;
    assert!(code == Some(0) && text.contains("walk-0"), "{text}");
    stage.figure(
        "explain, top and refusals through the API server's proxy, with rights to that alone",
    );
}

/// The page with all its files and data, below the prefixes that the API server puts before it: through
/// the Service by the user's own rights, and through the pod.
async fn page_through_the_api_server(stage: &Stage, jane: &Client, port: u16) {
    let mut loaded = 0;
    for (client, prefix) in [
        (jane, "services/gpupack:page/proxy/".to_owned()),
        (&stage.cluster.client, format!("pods/gpupack-0:{port}/proxy/")),
    ] {
        let base = format!("/api/v1/namespaces/gpu-system/{prefix}");
        let page = text_at(client, &base).await;
        let named: Vec<&str> = ["href=\"", "src=\""]
            .into_iter()
            .flat_map(|key| page.split(key).skip(1).filter_map(|rest| rest.split('"').next()))
            .filter(|name| !name.starts_with(['#']) && !name.starts_with("data:"))
            .collect();
        assert!(named.len() > 10, "{named:?}");
        for name in named.into_iter().chain(["v1/advise?limit=1", "v1/fit?fraction=0.4"]) {
            // A server that rewrites links may have made them whole; they must lead back below it.
            let path = match name.strip_prefix('/') {
                None => format!("{base}{name}"),
                Some(_) => name.to_owned(),
            };
            assert!(path.starts_with(&base), "{name} points outside {base}");
            let text = text_at(client, &path).await;
            assert!(!text.is_empty(), "{path}");
            loaded += 1;
            let lines = text.lines().filter(|line| line.starts_with("import "));
            for import in lines.filter_map(|line| line.split(" from \"./").nth(1)) {
                let file = import.split('"').next().expect("a split has a first part");
                assert!(page.contains(&format!("page/{file}\"")), "{file} is not loaded early");
            }
        }
    }
    stage.figure(&format!("{loaded} files and answers of the page through both proxies"));
}

async fn text_at(client: &Client, path: &str) -> String {
    let request = axum::http::Request::get(path).body(Vec::new()).expect("a path");
    client.request_text(request).await.unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Makes the extender's Service lead to it. The API server goes to no loopback address, and only to
/// those of pods, so there is a relay at an address of this machine, and a pod that is said to have it.
async fn serve_at(stage: &Stage, address: IpAddr) -> u16 {
    let listener = TcpListener::bind((address, 0)).await.expect("an address of our own");
    let port = listener.local_addr().expect("it listens").port();
    let extender: SocketAddr = stage.extender.page_address();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            tokio::spawn(async move {
                if let Ok(mut far) = TcpStream::connect(extender).await {
                    let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                }
            });
        }
    });
    let named = |name: &str| json!({"name": name, "namespace": "gpu-system"});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": named("gpupack-0"),
        "spec": {"nodeName": "walk-00", "securityContext": {"runAsNonRoot": true,
            "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "extender", "image": "none", "securityContext": {
                "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}]}});
    keep(stage, pod).await;
    let status = json!({"status": {"podIP": address, "podIPs": [{"ip": address}]}});
    let pods: Api<Pod> = Api::namespaced(stage.cluster.client.clone(), "gpu-system");
    let (merge, status) = (PatchParams::default(), Patch::Merge(status));
    pods.patch_status("gpupack-0", &merge, &status).await.expect("a status can be written");
    let ports = json!([{"name": "page", "port": 8081, "targetPort": port, "protocol": "TCP"}]);
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": named("gpupack"),
        "spec": {"ports": ports}});
    keep(stage, service).await;
    let target = json!({"kind": "Pod", "name": "gpupack-0", "namespace": "gpu-system"});
    let subset = json!({"addresses": [{"ip": address, "targetRef": target}],
        "ports": [{"name": "page", "port": port, "protocol": "TCP"}]});
    let endpoints = json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": named("gpupack"),
        "subsets": [subset]});
    keep(stage, endpoints).await;
    port
}

async fn keep(stage: &Stage, object: Value) {
    let object: DynamicObject = serde_json::from_value(object).expect("an object");
    let types = object.types.clone().expect("it names its kind");
    let (group, version) = types.api_version.split_once('/').unwrap_or(("", &types.api_version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind));
    let api: Api<DynamicObject> =
        Api::namespaced_with(stage.cluster.client.clone(), "gpu-system", &resource);
    let name = object.metadata.name.clone().unwrap_or_default();
    let kept = api.patch(&name, &PatchParams::apply("walk").force(), &Patch::Apply(&object)).await;
    kept.unwrap_or_else(|error| panic!("{} {name}: {error}", types.kind));
}

/// An address of this machine that is not loopback: the source address of a packet to the outside.
/// None is sent.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind(("0.0.0.0", 0)).ok()?;
    socket.connect(("192.0.2.1", 9)).ok()?; // for documents (RFC 5737)
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}
