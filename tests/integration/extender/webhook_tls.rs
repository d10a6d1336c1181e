//! The webhook as the API server calls it: over TLS.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use kube_api::admission::rules::Admission;
use kube_api::config::file::Config;
use kube_api::config::webhook::WebhookConfig;
use kube_api::pod::seen_parts::MAX_ANNOTATIONS;
use runtime::certificates::{CertificateFiles, Certificates};
use rustls::pki_types::ServerName;
use serde::Deserialize;
use serde_json::{Value, json};
use server::api::webhook::serve;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsConnector;

use crate::harness::authority::{Authority, client_config};

/// What the service is called in the shipped manifests.
const NAME: &str = "gpupack-webhook.gpu-system.svc";

/// The parts of its Secret.
struct Pair {
    authority: String,
    certificate: String,
    key: String,
}

fn fresh_pair() -> Pair {
    let authority = Authority::new();
    let made = authority.pair(NAME);
    Pair { authority: authority.certificate, certificate: made.certificate, key: made.key }
}

/// A running webhook.
struct Bed {
    address: SocketAddr,
    folder: TempDir,
    stop: watch::Sender<bool>,
    serving: tokio::task::JoinHandle<()>,
}

impl Bed {
    async fn start(pair: &Pair) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), pair);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let certificates = Certificates::read(files(folder.path())).unwrap();
        let rules = Admission::new(WebhookConfig::default(), vec!["gpupack".to_owned()]);
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(serve(listener, certificates, Arc::new(rules), stopped));
        Self { address, folder, stop, serving }
    }

    /// One call by a client that trusts only this authority. Returns the error of its handshake.
    async fn call(
        &self,
        authority: &str,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Vec<u8>), String> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let stream =
            connector(authority).connect(ServerName::try_from(NAME).unwrap(), stream).await;
        let stream = TokioIo::new(stream.map_err(|error| error.to_string())?);
        let (mut sender, connection) = http1::handshake(stream).await.unwrap();
        let running = tokio::spawn(connection);
        let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let status = answer.status();
        let body = answer.into_body().collect().await.unwrap().to_bytes().to_vec();
        running.abort();
        Ok((status, body))
    }

    async fn post(&self, pair: &Pair, body: impl Into<Bytes>) -> (StatusCode, String) {
        let request = Request::post("/webhook")
            .header("host", NAME)
            .header("content-type", "application/json")
            .body(Full::new(body.into()));
        let (status, body) = self.call(&pair.authority, request.unwrap()).await.unwrap();
        (status, String::from_utf8(body).unwrap())
    }
}

/// A client that trusts only this authority.
fn connector(authority: &str) -> TlsConnector {
    TlsConnector::from(Arc::new(client_config(authority, None)))
}

fn files(folder: &Path) -> CertificateFiles {
    CertificateFiles {
        own: Some((folder.join("tls.crt"), folder.join("tls.key"))),
        ca: None,
        read_every: Duration::from_millis(5),
    }
}

fn write(folder: &Path, pair: &Pair) {
    std::fs::write(folder.join("tls.crt"), &pair.certificate).unwrap();
    std::fs::write(folder.join("tls.key"), &pair.key).unwrap();
}

fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(path).header("host", NAME).body(Full::default()).unwrap()
}

fn review(fraction: &str) -> String {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "4711", "name": "a", "namespace": "team-a", "operation": "CREATE",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "userInfo": {}, "dryRun": false,
            "object": {"metadata": {"name": "a", "annotations": {"gpu-fraction": fraction}},
                "spec": {"containers": [{"name": "main"}]}},
        },
    })
    .to_string()
}

#[tokio::test]
async fn pods_are_answered_over_tls() {
    let pair = fresh_pair();
    let bed = Bed::start(&pair).await;
    let (status, body) = bed.post(&pair, review("0.5")).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &answer["response"]["allowed"]), (StatusCode::OK, &json!(true)));
    assert!(answer["response"]["patch"].is_array(), "{body}");
    let (status, body) = bed.post(&pair, review("1.5")).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &answer["response"]["allowed"]), (StatusCode::OK, &json!(false)));
    assert!(body.contains("for instance `0.5`"), "{body}");
    bed.stop.send_replace(true);
    bed.serving.await.unwrap();
}

#[tokio::test]
async fn an_invalid_review_is_rejected_with_a_clear_status() {
    let pair = fresh_pair();
    let bed = Bed::start(&pair).await;
    for (body, status, part) in [
        (Bytes::from("{"), StatusCode::BAD_REQUEST, "not an AdmissionReview"),
        (Bytes::from("{\"kind\":\"Pod\"}"), StatusCode::BAD_REQUEST, "`Pod`"),
        (Bytes::from(vec![0xff; 9]), StatusCode::BAD_REQUEST, "not an AdmissionReview"),
        (Bytes::from(vec![b' '; (8 << 20) + 1]), StatusCode::PAYLOAD_TOO_LARGE, "limit"),
    ] {
        let (found, text) = bed.post(&pair, body).await;
        assert!(found == status && text.contains(part), "{found}: {text}");
    }
    for (path, expected) in [
        ("/webhook", StatusCode::METHOD_NOT_ALLOWED),
        ("/metrics", StatusCode::NOT_FOUND),
        ("/healthz", StatusCode::OK),
    ] {
        assert_eq!(bed.call(&pair.authority, get(path)).await.unwrap().0, expected, "{path}");
    }
    // A caller without TLS is rejected, and disturbs no other client.
    let address = bed.address;
    let answer = tokio::task::spawn_blocking(move || {
        let mut plain = std::net::TcpStream::connect(address).unwrap();
        plain.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        let _closed = plain.read_to_end(&mut answer);
        answer
    });
    assert!(!answer.await.unwrap().starts_with(b"HTTP"), "answered without TLS");
    assert_eq!(bed.post(&pair, review("0.5")).await.0, StatusCode::OK);
}

#[tokio::test]
async fn thousands_of_idle_connections_do_not_block_the_server() {
    let pair = fresh_pair();
    let bed = Bed::start(&pair).await;
    let connector = connector(&pair.authority);
    let mut idle = Vec::new();
    // Some have finished the handshake and send nothing, some have not even begun.
    for at in 0..2_000 {
        let stream = TcpStream::connect(bed.address).await.unwrap();
        if at % 4 == 0 {
            let name = ServerName::try_from(NAME).unwrap();
            idle.push(Ok(connector.connect(name, stream).await.unwrap()));
        } else {
            idle.push(Err(stream));
        }
        if at % 500 == 499 {
            let call =
                tokio::time::timeout(Duration::from_secs(20), bed.post(&pair, review("0.5")));
            assert_eq!(call.await.expect("it is reachable").0, StatusCode::OK, "beside {at}");
        }
    }
    // What shakes no hands is closed in time.
    let silent = idle.iter_mut().find_map(|stream| stream.as_mut().err()).unwrap();
    let ended =
        tokio::time::timeout(Duration::from_secs(60), tokio::io::AsyncReadExt::read_u8(silent));
    assert!(ended.await.expect("it ends").is_err());
}

#[tokio::test]
async fn only_json_is_reviewed() {
    let pair = fresh_pair();
    let bed = Bed::start(&pair).await;
    let request =
        Request::post("/webhook").header("host", NAME).header("content-type", "text/plain");
    let request = request.body(Full::new(review("0.5").into())).unwrap();
    let (status, _) = bed.call(&pair.authority, request).await.unwrap();
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
}

#[tokio::test]
async fn a_changed_certificate_is_reloaded_and_a_broken_one_is_rejected() {
    let (old, new) = (fresh_pair(), fresh_pair());
    let bed = Bed::start(&old).await;
    assert!(bed.call(&new.authority, get("/healthz")).await.is_err(), "not signed by that one");
    // Half of the new pair: no key goes with it.
    std::fs::write(bed.folder.path().join("tls.crt"), &new.certificate).unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(bed.call(&old.authority, get("/healthz")).await.is_ok(), "the old pair stays in use");
    write(bed.folder.path(), &new);
    let taken = async {
        while bed.call(&new.authority, get("/healthz")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), taken).await.unwrap();
    assert!(bed.call(&old.authority, get("/healthz")).await.is_err());
    std::fs::remove_file(bed.folder.path().join("tls.key")).unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(bed.call(&new.authority, get("/healthz")).await.is_ok(), "still the last good pair");
}

#[tokio::test]
async fn an_unusable_certificate_is_named() {
    let pair = fresh_pair();
    let folder = tempfile::tempdir().unwrap();
    let started = async || {
        let fault = Certificates::read(files(folder.path())).err();
        fault.map_or_else(String::new, |fault| fault.to_string())
    };
    assert!(started().await.contains("tls.crt"));
    write(folder.path(), &pair);
    assert_eq!(started().await, "");
    for (file, text, part) in [
        ("tls.crt", "", "holds no certificate"),
        ("tls.crt", &*pair.key, "holds no certificate"),
        ("tls.key", "nonsense", "holds no private key"),
        ("tls.key", &fresh_pair().key, "cannot be used together"),
    ] {
        write(folder.path(), &pair);
        std::fs::write(folder.path().join(file), text).unwrap();
        let fault = started().await;
        assert!(fault.contains(part), "{fault}");
    }
}

/// The objects of a file in `deploy/`.
fn shipped(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents.map(|document| Value::deserialize(document).unwrap()).collect()
}

#[test]
fn the_shipped_files_agree_with_each_other() {
    let extender = shipped("extender.yaml");
    let config = extender.iter().find(|object| object["kind"] == "ConfigMap").unwrap();
    let config = Config::from_yaml(config["data"]["gpupack.yaml"].as_str().unwrap()).unwrap();
    let objects = shipped("webhook.yaml");
    let of_kind = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
    let pod = &of_kind("Deployment")["spec"]["template"]["spec"];
    assert!(!config.webhook.listen.ip().is_loopback(), "the API server is elsewhere");
    assert_eq!(pod["containers"][0]["ports"][0]["containerPort"], config.webhook.listen.port());
    let folder = config.webhook.certificate_file.parent().unwrap().to_str().unwrap();
    let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
    assert!(mounts.iter().any(|m| m["mountPath"] == folder && m["name"] == "tls"));
    assert_eq!(pod["volumes"][1]["secret"]["secretName"], "gpupack-webhook-tls");
    let called = &of_kind("MutatingWebhookConfiguration")["webhooks"][0];
    let service = &called["clientConfig"]["service"];
    assert_eq!(service["name"], of_kind("Service")["metadata"]["name"]);
    let condition = called["matchConditions"][0]["expression"].as_str().unwrap();
    for name in &config.scheduler_names {
        assert!(condition.contains(&format!("'{name}'")), "{name} is not in the condition");
    }
    // Pods of any other RuntimeClass are sent, also those with NVIDIA's.
    let listed = &config.webhook.runtime_classes_without_gpus;
    assert!(config.webhook.runtime_class.iter().all(|class| !listed.contains(class)));
    let classes: Vec<String> = listed.iter().map(|class| format!("'{class}'")).collect();
    let classes = format!("in ['', {}])", classes.join(", "));
    assert!(condition.contains(&classes), "{classes} is not in the condition");
}

/// The time of a loop in CEL grows with the square of what it runs over.
#[test]
fn the_shipped_policies_have_no_loop_over_a_large_pod() {
    let most = format!("variables.annotations.size() > {MAX_ANNOTATIONS} ||");
    let text = shipped("policies.yaml").iter().map(Value::to_string).collect::<String>();
    assert!(text.contains(&most), "gpupack writes on pods that others may not write");
    for policy in shipped("policies.yaml") {
        let spec = &policy["spec"];
        for rule in spec["validations"].as_array().into_iter().flatten() {
            let rule = rule["expression"].as_str().unwrap();
            let loops = rule.contains(".all(") || rule.contains(".exists(");
            assert!(!loops || rule.contains("variables.isLarge ||"), "{rule}");
        }
        let Some(conditions) = spec["matchConditions"].as_array() else { continue };
        let skips = |condition: &Value| {
            let name = condition["name"].as_str().unwrap();
            name.ends_with("-change") || name == "gpupack-itself"
        };
        assert!(conditions.iter().any(skips), "{policy}");
    }
    let objects = shipped("webhook.yaml");
    let webhook = objects.iter().find(|o| o["kind"] == "MutatingWebhookConfiguration").unwrap();
    let condition = webhook["webhooks"][0]["matchConditions"][0]["expression"].as_str().unwrap();
    for part in ["annotations.size() > 1000", "labels.size() > 1000", "limits.size() > 100"] {
        assert!(condition.contains(part), "{part} is not in the condition");
    }
}

#[test]
fn the_program_names_missing_requirements() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("gpupack.yaml");
    let text = "webhook:\n  listen: 127.0.0.1:0\n  certificate_file: /nowhere/tls.crt\n";
    std::fs::write(&config, text).unwrap();
    let run = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack"));
        let output = command.arg("webhook").arg("--config").arg(&config).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run().contains("cannot read `/nowhere/tls.crt`"));
    std::fs::write(&config, "webhook:\n  memory_limit: cgroup\n").unwrap();
    assert!(run().contains("`webhook.memory_limit: cgroup` is not allowed"));
}
