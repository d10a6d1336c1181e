//! Who may call which port, over TLS: kube-scheduler and replicas by certificate, agents by token.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use agent::node::client::{ExtenderClient, Proof};
use agent::node::session::ExtenderAnswer;
use axum::Json;
use axum::extract::{Path as UrlPath, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use kube_api::identity::agent_tokens::AgentTokens;
use kube_api::identity::front_proxy;
use kube_api::identity::people::People;
use runtime::certificates::{CertificateFiles, Certificates, ServerProof};
use runtime::clock::Clock;
use rustls::HandshakeKind;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use server::api::agents::AgentAccess;
use server::api::people::PeopleAccess;
use server::api::server::{Identities, serve_apart};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use wire::driver_work::{DriverWork, UpgradeState};
use wire::ids::NodeName;
use wire::report::bodies::Report;

use super::people::{people_server, review_of_person};
use crate::harness::authority::{Authority, Pair, client_config};
use crate::harness::extender::{Bed, data, hello, listeners};

const SCHEDULER: &str = "gpupack-scheduler";
pub(super) const REPLICA: &str = "gpupack-extender";

fn files(folder: &Path) -> CertificateFiles {
    CertificateFiles {
        own: Some((folder.join("tls.crt"), folder.join("tls.key"))),
        ca: Some(folder.join("ca.crt")),
        read_every: Duration::from_millis(5),
    }
}

/// An API server that knows tokens such as `n1.agent-1`: of the pod `agent-1` on node `n1`. Pods are as
/// many seconds old as their number says. Once they are `deleted` it knows none.
async fn token_server(
    front_proxy: &str,
    deleted: Arc<AtomicBool>,
) -> (kube::Client, Arc<AtomicUsize>) {
    let reviews = Arc::new(AtomicUsize::new(0));
    let review = move |state, Json(mut asked): Json<Value>| {
        if deleted.load(Ordering::SeqCst) {
            asked["spec"]["token"] = "of-a-deleted-pod".into();
        }
        review(state, Json(asked))
    };
    let router = people_server(front_proxy)
        .route("/apis/authentication.k8s.io/v1/tokenreviews", post(review))
        .route("/api/v1/namespaces/gpupack-agents/pods/{name}", get(pod))
        .with_state(Arc::clone(&reviews));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    (kube::Client::try_from(kube::Config::new(uri)).unwrap(), reviews)
}

async fn review(State(reviews): State<Arc<AtomicUsize>>, Json(review): Json<Value>) -> Json<Value> {
    reviews.fetch_add(1, Ordering::SeqCst);
    let token = review["spec"]["token"].as_str().unwrap();
    if review["spec"]["audiences"].is_null() {
        return Json(review_of_person(token));
    }
    assert_eq!(review["spec"]["audiences"], json!(["gpupack"]));
    let user = |account: &str, extra: Value| {
        json!({"authenticated": true, "audiences": ["gpupack"],
            "user": {"username": format!("system:serviceaccount:{account}"), "extra": extra}})
    };
    let status = match token.split_once('.') {
        Some(("tenant", _)) => user("team:default", json!({})),
        Some(("unbound", _)) => user("gpupack-agents:gpupack-agent", json!({})),
        Some(("other-audience", _)) => {
            let mut status = user("gpupack-agents:gpupack-agent", json!({}));
            status["audiences"] = json!(["else"]);
            status
        }
        Some((node, pod)) => user(
            "gpupack-agents:gpupack-agent",
            json!({"authentication.kubernetes.io/node-name": [node],
                "authentication.kubernetes.io/pod-name": [pod],
                "authentication.kubernetes.io/pod-uid": [format!("uid-of-{pod}")]}),
        ),
        None => json!({"authenticated": false, "error": "invalid bearer token"}),
    };
    Json(json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "metadata": {}, "spec": review["spec"], "status": status}))
}

async fn pod(UrlPath(name): UrlPath<String>) -> Json<Value> {
    let number: u32 = name.rsplit('-').next().unwrap().parse().unwrap();
    Json(json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name,
        "uid": format!("uid-of-{name}"),
        "creationTimestamp": format!("2026-01-01T00:00:{number:02}Z")}}))
}

/// An extender whose clients prove who they are.
pub(super) struct Guarded {
    pub(super) bed: Bed,
    pub(super) authority: Arc<Authority>,
    /// The CA by which the API server proves itself.
    pub(super) front_proxy: Authority,
    /// Of verbs, agents, page and metrics.
    pub(super) at: [std::net::SocketAddr; 4],
    reviews: Arc<AtomicUsize>,
    deleted: Arc<AtomicBool>,
    folder: TempDir,
    _stop: watch::Sender<bool>,
}

impl Guarded {
    pub(super) async fn start() -> Self {
        Self::start_with(Arc::new(Authority::new())).await
    }

    async fn start_with(authority: Arc<Authority>) -> Self {
        Self::start_knowing(authority, Duration::from_secs(60)).await
    }

    /// The same that knows for this time whose a token is.
    async fn start_knowing(authority: Arc<Authority>, known_for: Duration) -> Self {
        let bed = Bed::warm().await;
        let folder = tempfile::tempdir().unwrap();
        authority.write(folder.path(), &authority.pair(REPLICA));
        let certificates = Certificates::read(files(folder.path())).unwrap();
        let front_proxy = Authority::new();
        let deleted = Arc::new(AtomicBool::new(false));
        let (client, reviews) = token_server(&front_proxy.certificate, Arc::clone(&deleted)).await;
        let user = "system:serviceaccount:gpupack-agents:gpupack-agent".to_owned();
        let tokens = AgentTokens::new(client.clone(), "gpupack", "gpupack-agents", user);
        let tokens = tokens.known_for(known_for);
        let name = ServerName::try_from(REPLICA).unwrap();
        let replicas = ServerProof { tls: certificates.current(), name };
        let (current, mut proxies) = watch::channel(None);
        tokio::spawn(front_proxy::follow(client.clone(), current));
        proxies.changed().await.unwrap();
        let people = PeopleAccess::new(bed.app.clone(), People::new(client), proxies);
        let identities = Identities {
            scheduler: ServerName::try_from(SCHEDULER).unwrap(),
            replicas,
            agents: Arc::new(AgentAccess::new(bed.app.clone(), tokens)),
            people: Arc::new(people),
        };
        tokio::spawn(certificates.follow());
        let listeners = listeners().await;
        let all = [&listeners.verbs, &listeners.agents, &listeners.page, &listeners.metrics];
        let at = all.map(|listener| listener.local_addr().unwrap());
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(serve_apart(bed.service.clone(), listeners, Some(identities), stopped));
        Self { bed, authority, front_proxy, at, reviews, deleted, folder, _stop: stop }
    }

    /// Questions that the API server was asked so far.
    pub(super) fn reviews(&self) -> usize {
        self.reviews.load(Ordering::SeqCst)
    }

    /// One call by a client that shows this certificate; an error if there is no connection.
    async fn call(
        &self,
        at: std::net::SocketAddr,
        shown: Option<&Pair>,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Value), String> {
        let (status, body) = self.text(at, shown, request).await?;
        Ok((status, serde_json::from_str(&body).unwrap_or_default()))
    }

    /// The same, with the answer as it is.
    pub(super) async fn text(
        &self,
        at: std::net::SocketAddr,
        shown: Option<&Pair>,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, String), String> {
        let (mut sender, running) = self.open(at, shown).await?;
        let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let status = answer.status();
        let body = answer.into_body().collect().await.map_err(|error| error.to_string())?;
        running.abort();
        Ok((status, String::from_utf8_lossy(&body.to_bytes()).into_owned()))
    }

    /// A connection, and the task that runs it.
    pub(super) async fn open(
        &self,
        at: std::net::SocketAddr,
        shown: Option<&Pair>,
    ) -> Result<(http1::SendRequest<Full<Bytes>>, JoinHandle<()>), String> {
        let stream = TcpStream::connect(at).await.unwrap();
        let name = ServerName::try_from(REPLICA).unwrap();
        let config = client_config(&self.authority.certificate, shown);
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
        let stream = TokioIo::new(stream.map_err(|error| error.to_string())?);
        let (sender, connection) =
            http1::handshake(stream).await.map_err(|error| error.to_string())?;
        let running = async move {
            let _closed = connection.await;
        };
        Ok((sender, tokio::spawn(running)))
    }

    async fn verb(&self, shown: Option<&Pair>, path: &str) -> Result<u16, String> {
        let body = if path == "/v1/filter" { data("filter.json") } else { b"{}".to_vec() };
        let request = Request::post(path).header("content-type", "application/json");
        let request = request.header("host", "localhost").body(Full::from(body)).unwrap();
        let (status, _) = self.call(self.at[0], shown, request).await?;
        Ok(status.as_u16())
    }

    /// A first report of an agent with this token for a node.
    async fn report(&self, token: Option<&str>, node: &str) -> (u16, String) {
        let mut report = hello(node, "Tesla T4", 15_360, 1);
        report["agent"] = format!("agent with {token:?}").into();
        let mut request = Request::put(format!("/v1/nodes/{node}/report"))
            .header("content-type", "application/json")
            .header("host", "localhost");
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(Full::from(report.to_string())).unwrap();
        let (status, answer) = self.call(self.at[1], None, request).await.unwrap();
        (status.as_u16(), answer["error"].as_str().unwrap_or_default().to_owned())
    }

    /// Asks with this token whether the agent of a node may open NVIDIA's library.
    async fn ask_for_library(&self, token: Option<&str>, node: &str) -> (u16, Value) {
        let path = format!("/v1/nodes/{node}/library");
        let mut request = Request::get(path).header("host", "localhost");
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(Full::default()).unwrap();
        let (status, answer) = self.call(self.at[1], None, request).await.unwrap();
        (status.as_u16(), answer)
    }
}

#[tokio::test]
async fn verbs_need_a_certificate_of_the_ca_with_a_known_name() {
    let guarded = Guarded::start().await;
    let (scheduler, replica) = (guarded.authority.pair(SCHEDULER), guarded.authority.pair(REPLICA));
    assert_eq!(guarded.verb(Some(&scheduler), "/v1/filter").await, Ok(200));
    assert_eq!(guarded.verb(Some(&replica), "/v1/filter").await, Ok(200));
    for path in ["/v1/replicas/join", "/v1/replicas/bindings"] {
        assert_eq!(guarded.verb(Some(&scheduler), path).await, Ok(403), "{path}");
        let answered = guarded.verb(Some(&replica), path).await;
        assert_eq!(answered, Ok(400), "{path}: its body is read, and is none");
    }
    let (other_name, other_ca) = (guarded.authority.pair("else"), Authority::new().pair(SCHEDULER));
    for shown in [None, Some(&other_name), Some(&other_ca)] {
        let called = guarded.verb(shown, "/v1/filter").await;
        assert!(called.is_err(), "{called:?}");
    }
    // Plain text gets no answer of HTTP at any port.
    for at in guarded.at {
        let url = format!("http://{at}/healthz").parse().unwrap();
        let client =
            hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
                .build_http::<Full<Bytes>>();
        assert!(client.get(url).await.is_err(), "{at}");
    }
    let health = Request::get("/healthz").header("host", "localhost").body(Full::default());
    let (status, _) = guarded.call(guarded.at[3], None, health.unwrap()).await.unwrap();
    assert_eq!(status, StatusCode::OK, "kubelet shows no certificate");
}

#[tokio::test]
async fn a_connection_does_not_outlive_the_ca_of_its_client() {
    let guarded = Guarded::start().await;
    let (scheduler, other) = (guarded.authority.pair(SCHEDULER), Authority::new());
    let new_scheduler = other.pair(SCHEDULER);
    let (mut open, _running) = guarded.open(guarded.at[0], Some(&scheduler)).await.unwrap();
    let filter = || {
        let request = Request::post("/v1/filter").header("content-type", "application/json");
        request.header("host", "localhost").body(Full::from(data("filter.json"))).unwrap()
    };
    let mut call = async || {
        open.ready().await.unwrap();
        let answer = open.send_request(filter()).await.unwrap();
        let closes = answer.headers().contains_key("connection");
        let status = answer.status().as_u16();
        answer.into_body().collect().await.unwrap();
        (status, closes)
    };
    assert_eq!(call().await, (200, false));
    let write = |text: &str| std::fs::write(guarded.folder.path().join("ca.crt"), text).unwrap();
    let until = async |shown: &Pair, is_accepted: bool| {
        // A client of TLS 1.3 learns only by its first call that it is refused.
        while guarded.verb(Some(shown), "/v1/filter").await.is_ok() != is_accepted {
            tokio::task::yield_now().await;
        }
    };
    write(&format!("{}{}", guarded.authority.certificate, other.certificate));
    until(&new_scheduler, true).await;
    assert_eq!(call().await, (200, false), "its CA is one of two");
    write(&other.certificate);
    until(&scheduler, false).await;
    assert_eq!(call().await, (403, true), "its CA is gone");
}

#[tokio::test]
async fn a_session_is_not_resumed_when_the_certificate_of_the_client_has_ended() {
    let guarded = Guarded::start().await;
    let clock = Clock::start();
    let short = guarded.authority.pair_until(&[SCHEDULER], clock.unix_seconds() + 3);
    // It keeps sessions from connection to connection.
    let connector =
        TlsConnector::from(Arc::new(client_config(&guarded.authority.certificate, Some(&short))));
    let call = async || -> Result<(u16, bool), String> {
        let words = |error: &dyn std::error::Error| error.to_string();
        let stream = TcpStream::connect(guarded.at[0]).await.unwrap();
        let name = ServerName::try_from(REPLICA).unwrap();
        let stream = connector.connect(name, stream).await.map_err(|error| words(&error))?;
        let is_resumed = stream.get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed);
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| words(&error))?;
        tokio::spawn(async move {
            let _closed = connection.await;
        });
        let request = Request::post("/v1/filter").header("content-type", "application/json");
        let request =
            request.header("host", "localhost").body(Full::<Bytes>::from(data("filter.json")));
        let answer = sender.send_request(request.unwrap()).await.map_err(|error| words(&error))?;
        let status = answer.status().as_u16();
        answer.into_body().collect().await.map_err(|error| words(&error))?;
        Ok((status, is_resumed))
    };
    let mut was_resumed = false;
    while let Ok((status, is_resumed)) = call().await {
        assert_eq!(status, 200);
        was_resumed |= is_resumed;
        assert!(clock.precise() < Duration::from_secs(20), "it has ended long ago");
    }
    assert!(was_resumed, "the first ones were");
}

#[tokio::test]
async fn an_agent_reports_only_for_the_node_that_its_token_names() {
    let guarded = Guarded::start().await;
    for (token, status, part) in [
        (None, 401, "send a token"),
        (Some("nonsense"), 401, "invalid bearer token"),
        (Some("other-audience.x-1"), 401, "audience `gpupack`"),
        (Some("tenant.x-1"), 403, "`system:serviceaccount:team:default`"),
        (Some("unbound.x-1"), 403, "names no node"),
        (Some("gpu-b.agent-1"), 403, "runs on node `gpu-b`"),
        (Some("gpu-a.agent-1"), 200, ""),
    ] {
        let (found, error) = guarded.report(token, "gpu-a").await;
        assert!(found == status && error.contains(part), "{token:?}: {found} {error}");
    }
    let before = guarded.reviews.load(Ordering::SeqCst);
    for _ in 0..5 {
        assert_eq!(guarded.report(Some("gpu-a.agent-1"), "gpu-a").await.0, 200);
        assert_eq!(guarded.report(Some("nonsense"), "gpu-a").await.0, 401);
    }
    assert_eq!(guarded.reviews.load(Ordering::SeqCst), before, "answers are remembered");
    let metrics = guarded.bed.get("/metrics").await.1;
    assert!(metrics.contains("gpupack_reports_total{result=\"unproven\"} 11"), "{metrics}");
}

#[tokio::test]
async fn of_two_agents_of_a_node_only_the_newer_pod_reports() {
    let guarded = Guarded::start().await;
    assert_eq!(guarded.report(Some("gpu-a.agent-5"), "gpu-a").await.0, 200);
    let (status, error) = guarded.report(Some("gpu-a.agent-4"), "gpu-a").await;
    assert!(status == 403 && error.contains("another pod reports"), "{status} {error}");
    assert_eq!(guarded.report(Some("gpu-a.agent-6"), "gpu-a").await.0, 200, "it is newer");
    assert_eq!(guarded.report(Some("gpu-a.agent-5"), "gpu-a").await.0, 403, "it has been replaced");
    assert_eq!(guarded.report(Some("gpu-b.agent-4"), "gpu-b").await.0, 200, "another node");
    let metrics = guarded.bed.get("/metrics").await.1;
    assert!(metrics.contains("gpupack_reports_total{result=\"second_agent\"} 2"), "{metrics}");
}

#[tokio::test]
async fn a_question_about_the_library_needs_the_token_of_the_node_and_changes_nothing() {
    let guarded = Guarded::start().await;
    for (token, status) in [(None, 401), (Some("gpu-b.agent-1"), 403), (Some("gpu-a.agent-1"), 200)]
    {
        assert_eq!(guarded.ask_for_library(token, "gpu-a").await.0, status, "{token:?}");
    }
    assert_eq!(
        guarded.ask_for_library(Some("gpu-z.agent-1"), "gpu-z").await.0,
        503,
        "no such node is listed"
    );
    let (node, work) = (NodeName::new("gpu-a"), Some(UpgradeState::Drain));
    guarded.bed.app.ledger.see_driver_work(&node, DriverWork { upgrade: work, mig: None });
    assert_eq!(guarded.report(Some("gpu-a.agent-5"), "gpu-a").await.0, 200);
    let (status, answer) = guarded.ask_for_library(Some("gpu-a.agent-6"), "gpu-a").await;
    assert_eq!((status, &answer["kind"]), (200, &json!("LibraryAnswer")));
    assert_eq!(answer["closeLibrary"], "nvidia.com/gpu-driver-upgrade-state=drain-required");
    assert_eq!(guarded.report(Some("gpu-a.agent-5"), "gpu-a").await.0, 200, "it still reports");
}

#[tokio::test]
async fn the_token_of_a_deleted_pod_is_believed_only_until_it_is_asked_about_again() {
    let authority = Arc::new(Authority::new());
    let guarded = Guarded::start_knowing(authority, Duration::from_millis(100)).await;
    let (kept, forgets) = (Guarded::start().await, guarded);
    for guarded in [&kept, &forgets] {
        assert_eq!(guarded.report(Some("gpu-a.agent-1"), "gpu-a").await.0, 200);
        guarded.deleted.store(true, Ordering::SeqCst);
    }
    while forgets.report(Some("gpu-a.agent-1"), "gpu-a").await.0 != 401 {
        tokio::task::yield_now().await;
    }
    assert_eq!(kept.report(Some("gpu-a.agent-1"), "gpu-a").await.0, 200, "for a minute");
    assert_eq!(kept.report(Some("gpu-b.agent-1"), "gpu-b").await.0, 401, "it was not asked about");
}

#[tokio::test]
async fn an_agent_reports_only_to_an_extender_that_proves_who_it_is() {
    let (own, other) = (Guarded::start().await, Guarded::start().await);
    let token = own.folder.path().join("token");
    std::fs::write(&token, "gpu-a.agent-1").unwrap();
    let certificates = Certificates::read(files(own.folder.path())).unwrap();
    for (extender, name, is_proven) in
        [(&own, REPLICA, true), (&own, "else", false), (&other, REPLICA, false)]
    {
        let name = ServerName::try_from(name).unwrap();
        let server = Some(ServerProof { tls: certificates.current(), name });
        let proof = Proof { token_file: Some(token.clone()), server };
        let client = ExtenderClient::new(&format!("https://{}", extender.at[1]), proof).unwrap();
        let report = hello("gpu-a", "Tesla T4", 15_360, 1).to_string();
        let report = || serde_json::from_str::<Report>(&report).unwrap();
        let answer = client.put("gpu-a", report).await;
        match is_proven {
            true => assert!(matches!(answer, ExtenderAnswer::Reply(_)), "{answer:?}"),
            false => assert!(matches!(answer, ExtenderAnswer::Away { .. }), "{answer:?}"),
        }
    }
}

#[tokio::test]
async fn a_long_chain_of_certificates_is_refused_at_every_port() {
    let guarded = Guarded::start().await;
    let page = async |shown: &Pair| {
        let request = Request::get("/v1/state").header("host", "localhost");
        let request = request.header("authorization", "Bearer person.guest").body(Full::default());
        let called = guarded.call(guarded.at[2], Some(shown), request.unwrap()).await;
        called.map(|(status, _)| status.as_u16())
    };
    let strangers: Vec<String> = (0..4).map(|_| Authority::new().certificate).collect();
    // One certificate of 20 KiB: its names take the room.
    let names: Vec<String> = (0..300).map(|at| format!("{at}.{}", "a".repeat(60))).collect();
    let names: Vec<&str> = [SCHEDULER, "front-proxy-client"]
        .into_iter()
        .chain(names.iter().map(String::as_str))
        .collect();
    let large = guarded.authority.pair_of(&names);
    for (others, is_short) in [(&strangers[..3], true), (&strangers[..4], false)] {
        let Pair { certificate, key } = guarded.authority.pair(SCHEDULER);
        let shown = Pair { certificate: certificate + &others.concat(), key };
        assert_eq!(guarded.verb(Some(&shown), "/v1/filter").await.is_ok(), is_short);
        assert_eq!(page(&shown).await.is_ok(), is_short);
    }
    assert!(guarded.verb(Some(&large), "/v1/filter").await.is_err());
    assert!(page(&large).await.is_err());
    assert_eq!(page(&guarded.authority.pair(SCHEDULER)).await, Ok(200));
}
