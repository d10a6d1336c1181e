//! The commands that query a running extender, as users run them: the real program against a real
//! router, directly and through an API server's service proxy.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::harness::extender::{Bed, is_declared, pod, read};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use wire::api::advice::Advice;
use wire::api::commands::{DeviceList, NodeList, TenantList};
use wire::api::explain::Explanation;
use wire::api::waiting::WaitingPodList;
use wire::ids::{NodeName, PoolName};
use wire::units::{HostAmount, MemMib, MilliCpu};

/// Where the API server has the extender of the shipped manifests.
const PROXIED: &str = "/api/v1/namespaces/gpu-system/services/gpupack:page/proxy";

pub(super) fn gpupack(arguments: &[&str]) -> Output {
    gpupack_as(Path::new(env!("CARGO_BIN_EXE_gpupack")), arguments)
}

fn gpupack_as(program: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    // A test must meet no cluster but its own.
    for name in ["KUBERNETES_SERVICE_HOST", "KUBECONFIG", "HOME", "GPUPACK_SERVER", "NO_COLOR"] {
        command.env_remove(name);
    }
    command.args(arguments).output().expect("the program starts")
}

pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes UTF-8")
}

/// What a call prints that must succeed, saying nothing else.
pub(super) fn printed(arguments: &[&str]) -> String {
    let output = gpupack(arguments);
    assert_eq!((output.status.code(), &*text(&output.stderr)), (Some(0), ""), "{arguments:?}");
    text(&output.stdout)
}

/// The one line of a call that must end with this code, printing nothing.
pub(super) fn refused(code: i32, arguments: &[&str]) -> String {
    let output = gpupack(arguments);
    let line = text(&output.stderr);
    assert_eq!((output.status.code(), &*text(&output.stdout)), (Some(code), ""), "{line}");
    assert_eq!(line.lines().count(), 1, "{line}");
    assert!(line.starts_with("gpupack: ") && !line.trim_end().contains(char::is_control), "{line}");
    line
}

pub(super) async fn served(router: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it listens");
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// An extender with tenants on `gpu-a` and `gpu-b`, a node that never reported, and pods that wait: one
/// for more memory than there is, one for a whole GPU of a model that is in use.
async fn busy() -> Bed {
    let bed = Bed::warm().await;
    let nodes = ["gpu-a", "gpu-b", "gpu-c"];
    for (name, annotations, node) in [
        ("half", json!({"gpu-fraction": "0.5"}), "gpu-a"),
        ("mem", json!({"gpu-memory": "20480"}), "gpu-b"),
    ] {
        bed.filter(pod(name, annotations), &nodes).await;
        let bind = json!({"PodName": name, "PodNamespace": "team", "PodUID": name, "Node": node});
        assert_eq!(bed.post("/v1/bind", bind.to_string()).await.1, json!({"Error": ""}));
    }
    bed.filter(pod("huge", json!({"gpu-memory": "90000"})), &nodes).await;
    let whole = json!({"gpu-fraction": "1", "gpupack.dev/gpu-model": "T4"});
    bed.filter(pod("whole", whole), &nodes).await;
    let host = HostAmount { cpu: MilliCpu::new(1_000), memory: MemMib::new(1_000) };
    bed.app.ledger.see_node(&NodeName::new("gpu-late"), host, PoolName::new("late"));
    bed
}

fn fits_80_columns(text: &str) {
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn top_shows_nodes_gpus_and_tenants_and_hides_none() {
    let bed = busy().await;
    let url = format!("http://{}", served(bed.router()).await);
    let nodes = printed(&["top", "nodes", "--server", &url]);
    let rows: Vec<Vec<&str>> =
        nodes.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows,
        [
            vec![
                "NAME", "MODEL", "GPUS", "EMPTY", "SHARE", "MEM", "USED", "FREE-MAX", "PODS",
                "STATE"
            ],
            vec!["gpu-a", "T4", "1", "0", "50%", "50%", "0%", "0.50", "1", "ok"],
            vec!["gpu-b", "A100-SXM4-80GB", "2", "1", "13%", "13%", "0%", "1.00", "1", "ok"],
            vec!["gpu-c", "L4", "1", "1", "0%", "0%", "0%", "1.00", "0", "ok"],
            vec!["gpu-late", "-", "0", "0", "-", "-", "-", "0", "0", "NeverReported"],
        ],
        "{nodes}"
    );
    fits_80_columns(&nodes);
    let silent = gpupack(&["top", "nodes", "--require-reports", "--server", &url]);
    let line = text(&silent.stderr);
    assert_eq!((silent.status.code(), &*text(&silent.stdout)), (Some(1), &*nodes), "{line}");
    assert!(line.contains("the agents of these nodes do not report: gpu-late"), "{line}");
    let reporting = ["top", "nodes", "--require-reports", "--node", "gpu-a", "--server", &url];
    assert_eq!(printed(&reporting).lines().count(), 2);
    let gpus = printed(&["top", "gpus", "--no-unicode", "--sort-by", "share", "--server", &url]);
    let rows: Vec<&str> = gpus.lines().collect();
    assert_eq!(rows.len(), 5, "{gpus}");
    assert!(rows[1].starts_with("gpu-a") && rows[1].ends_with("####....  ok"), "{gpus}");
    assert!(rows[2].starts_with("gpu-b") && rows[2].ends_with("##......  ok"), "{gpus}");
    fits_80_columns(&gpus);
    let tenants = printed(&["top", "tenants", "-A", "--server", &url]);
    assert!(tenants.contains("half  gpu-a   0  0.50   7.5Gi  7.5Gi    -"), "{tenants}");
    fits_80_columns(&tenants);
    let nobody = printed(&["top", "tenants", "-n", "other", "--server", &url]);
    assert!(nobody.ends_with("(none)\n"), "{nobody}");
    let one = printed(&["top", "gpus", "--node", "gpu-c", "--server", &url]);
    assert_eq!(one.lines().count(), 2, "{one}");
    let line = refused(5, &["top", "gpus", "--node", "gpu-x", "--server", &url]);
    assert!(line.contains("`gpu-x` is not known"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn json_is_that_of_the_declared_types_in_whole_numbers() {
    let bed = busy().await;
    let url = format!("http://{}", served(bed.router()).await);
    let json = |arguments: &[&str]| {
        let text = printed(&[arguments, &["-o", "json", "--server", &url]].concat());
        assert_is_whole(&read(text.as_bytes()));
        text.into_bytes()
    };
    let nodes: NodeList = is_declared(&json(&["top", "nodes"]));
    assert_eq!(nodes.items.len(), 4);
    let gpus: DeviceList = is_declared(&json(&["top", "gpus", "--sort-by", "share"]));
    let first = &gpus.items[0];
    assert_eq!((first.node.as_str(), gpus.items.len()), ("gpu-a", 4), "{first:?}");
    let tenants: TenantList = is_declared(&json(&["top", "tenants"]));
    assert_eq!(tenants.items.len(), 2);
    let list: WaitingPodList = is_declared(&json(&["waiting"]));
    assert_eq!(list.items.len(), 2);
    let explanation: Explanation = is_declared(&json(&["explain", "-n", "team", "whole"]));
    assert_eq!(explanation.pod, "team/whole");
    is_declared::<Advice>(&json(&["advise"]));
}

fn assert_is_whole(value: &Value) {
    assert_eq!(value["apiVersion"], "gpupack.dev/v1alpha1");
    let mut open = vec![value];
    while let Some(next) = open.pop() {
        assert!(!next.is_f64(), "{next} in {value}");
        open.extend(next.as_array().into_iter().flatten());
        open.extend(next.as_object().into_iter().flat_map(|object| object.values()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_pod_has_the_same_text_in_list_and_explanation() {
    let bed = busy().await;
    let url = format!("http://{}", served(bed.router()).await);
    let list = printed(&["waiting", "--server", &url]);
    fits_80_columns(&list);
    let end = "end team/half (0.5 GPU): it fits on node gpu-a then";
    let size = "request `gpu-fraction: \"0.5\"` instead of 1 whole GPU: it fits on node gpu-a now";
    let joined = list.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        joined.contains(&format!("team/whole 0s 1/1 memory 1 whole GPU on T4 → {size}")),
        "{list}"
    );
    let reported = printed(&["explain", "team/whole", "--server", &url]);
    fits_80_columns(&reported);
    let joined = reported.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "team/whole: none of 4 nodes fits; the closest obstacle: insufficient GPU memory",
        "requests 1 whole GPU on T4; created 0s ago; position 1 of 1 in the queue; blocked by memory",
        "1 memory 7680 MiB of GPU memory gpu-a of 1 × Tesla T4 (15360 MiB), pool gpu-a",
        "1 agent GPU agent has not reported yet gpu-late of no GPU, pool late",
        size,
        end,
        "check the gpupack agent on nodes that are not reporting",
        "1 node has not reported since the extender started (gpu-late)",
    ] {
        assert!(joined.contains(part), "{part} in {reported}");
    }
    let placed = printed(&["explain", "team/half", "--server", &url]);
    assert!(placed.contains("placed on node gpu-a, GPU-gpu-a-0 (Confirmed)"), "{placed}");
    let other = printed(&["waiting", "-n", "other", "--server", &url]);
    assert!(other.ends_with("(none)\n"), "{other}");
    let first = printed(&["waiting", "--limit", "1", "--server", &url]);
    assert!(first.ends_with("1 of 2 pods are not shown: see --limit\n"), "{first}");
}

#[tokio::test(flavor = "multi_thread")]
async fn control_characters_in_names_are_not_printed() {
    let bed = Bed::warm().await;
    let hostile = "a\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}b\r\nteam/fake  0s";
    bed.filter(pod(hostile, json!({"gpu-memory": "90000"})), &["gpu-a"]).await;
    let url = format!("http://{}", served(bed.router()).await);
    for output in ["table", "json"] {
        let text = printed(&["waiting", "-o", output, "--server", &url]);
        let is_command = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!text.contains(is_command), "{text:?}");
        assert!(text.contains("owned"), "{text:?}");
    }
    let list = read(printed(&["waiting", "-o", "json", "--server", &url]).as_bytes());
    assert_eq!(list["items"][0]["pod"], format!("team/{hostile}"), "JSON has the name as it is");
    let hostile_answer = json!({"error": "gone \u{1b}[31m\nfake line"});
    let answer = move || async move { (StatusCode::NOT_FOUND, Json(hostile_answer.clone())) };
    let url = format!("http://{}", served(Router::new().fallback(answer)).await);
    let line = refused(5, &["explain", "a/b", "--server", &url]);
    assert!(line.contains(r"\u{1b}[31m\u{a}fake"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn absurd_figures_are_shown_without_a_failure() {
    let most = || json!({"memoryMib": u64::MAX, "shareMillionths": u64::MAX});
    let tenant = json!({"podUid": "u", "pod": "no-namespace", "state": "Confirmed",
        "allocated": most(), "usedMib": u64::MAX,
        "isolation": {"configured": "None", "verified": "None"}});
    let device = json!({"id": "GPU-a", "index": u32::MAX, "model": "", "kind": "Gpu",
        "isolation": {"configured": "None"}, "health": "Healthy",
        "canLimitMemory": false, "capacityMib": u64::MAX, "allocated": most(), "held": most(),
        "free": most(), "usedMib": u64::MAX, "usedBeyondAllocatedMib": u64::MAX,
        "untrackedMib": u64::MAX, "overallocated": true, "tenants": [tenant, tenant]});
    let host = json!({"cpuMilli": u64::MAX, "memoryMib": u64::MAX});
    let node = json!({"name": "n", "pool": "", "state": "Reporting", "capacity": host, "free": host,
        "devices": [device, device]});
    let state = json!({"apiVersion": "gpupack.dev/v1alpha1", "kind": "State", "nodes": [node],
        "pods": []});
    let url = format!("http://{}", served(Router::new().fallback(|| async { Json(state) })).await);
    for what in ["nodes", "gpus", "tenants"] {
        for output in ["table", "json"] {
            printed(&["top", what, "-o", output, "--server", &url]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_failure_has_its_message_and_exit_code() {
    let bed = Bed::warm().await;
    let url = format!("http://{}", served(bed.router()).await);
    let line = refused(5, &["explain", "team/nobody", "--server", &url]);
    assert!(line.contains("`team/nobody` is not known here"), "{line}");
    let line = refused(2, &["explain", "team/No Body?x", "--server", &url]);
    assert!(line.contains("is not a pod"), "{line}");
    refused(2, &["explain", "a/b", "-n", "c", "--server", &url]);
    let line = refused(2, &["waiting", "--server", "https://127.0.0.1:1"]);
    assert!(line.contains("TLS is not supported yet"), "{line}");
    assert_eq!(gpupack(&["top", "nodes", "--sort-by", "color"]).status.code(), Some(2));
    let line = refused(4, &["top", "nodes", "--server", "http://127.0.0.1:1"]);
    assert!(line.contains("cannot reach the extender at http://127.0.0.1:1"), "{line}");
    let line = refused(1, &["waiting", "--kubeconfig", "/nowhere/kubeconfig"]);
    assert!(line.contains("no usable kubeconfig"), "{line}");
    for (status, code, part) in [
        (StatusCode::SERVICE_UNAVAILABLE, 4, "is not ready: not yet"),
        (StatusCode::INTERNAL_SERVER_ERROR, 1, "500"),
    ] {
        let answer = move || async move { (status, Json(json!({"error": "not yet"}))) };
        let url = format!("http://{}", served(Router::new().fallback(answer)).await);
        let line = refused(code, &["waiting", "--server", &url]);
        assert!(line.contains(part), "{line}");
    }
    let page = Router::new().fallback(|| async { "<html>" });
    let url = format!("http://{}", served(page).await);
    let line = refused(1, &["waiting", "--server", &url]);
    assert!(line.contains("not from a gpupack extender"), "{line}");
    let slow = Router::new().fallback(|| async {
        tokio::time::sleep(std::time::Duration::from_secs(30)).await;
    });
    let url = format!("http://{}", served(slow).await);
    let line = refused(4, &["waiting", "--timeout", "1", "--server", &url]);
    assert!(line.contains("does not answer within 1 s"), "{line}");
}

pub(super) fn kubeconfig(folder: &Path, server: &str) -> String {
    let path = folder.join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [
            {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
            {"name": "d", "context": {"cluster": "c", "user": "u", "namespace": "other"}},
        ],
    });
    fs::write(&path, config.to_string()).expect("a file can be written");
    path.display().to_string()
}

/// An API server's refusal.
pub(super) fn status(code: StatusCode, message: &str) -> (StatusCode, Json<Value>) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
        "message": message, "code": code.as_u16()});
    (code, Json(status))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_is_called_with_the_kubeconfig_of_the_user() {
    let bed = busy().await;
    let router = Router::new().nest(PROXIED, bed.router());
    let router = router.route(
        "/api/v1/namespaces/gpu-system/services/gpupack:closed/proxy/v1/waiting",
        get(|| async { status(StatusCode::SERVICE_UNAVAILABLE, "no endpoints available") }),
    );
    let router = router.route(
        "/api/v1/namespaces/gpu-system/services/gpupack:guarded/proxy/v1/waiting",
        get(|headers: HeaderMap| async move {
            let user = headers.get("impersonate-user").map_or("nobody", |it| it.to_str().unwrap());
            let token = headers["authorization"].to_str().unwrap();
            let text = format!("{user} with {token} cannot get resource services/proxy");
            status(StatusCode::FORBIDDEN, &text)
        }),
    );
    let router = router.fallback(|| async { status(StatusCode::NOT_FOUND, "not found") });
    let folder = tempfile::tempdir().unwrap();
    let config = kubeconfig(folder.path(), &format!("http://{}", served(router).await));
    let kube = |arguments: &[&'static str]| {
        let mut all = arguments.to_vec();
        all.extend(["--kubeconfig", config.leak_to()]);
        all
    };
    let reported = printed(&kube(&["explain", "whole"]));
    assert!(
        reported.starts_with("team/whole: none of 4 nodes fits"),
        "namespace of the context: {reported}"
    );
    let line = refused(5, &kube(&["explain", "whole", "--context", "d"]));
    assert!(line.contains("`other/whole` is not known"), "{line}");
    assert!(printed(&kube(&["top", "gpus"])).contains("gpu-b"));
    let line = refused(4, &kube(&["waiting", "--service", "gpu-system/gpupack:closed"]));
    assert!(line.contains("no endpoints available"), "{line}");
    let line = refused(4, &kube(&["waiting", "--service", "elsewhere/gpupack:page"]));
    assert!(
        line.contains("Service elsewhere/gpupack:page") && line.contains("--service"),
        "{line}"
    );
    let guarded = ["waiting", "--service", "gpu-system/gpupack:guarded", "--as", "jane"];
    let line = refused(1, &kube(&guarded));
    assert!(line.contains("jane with Bearer secret") && line.contains("gpupack-view"), "{line}");
    assert_eq!(gpupack(&kube(&["waiting", "--service", "gpupack"])).status.code(), Some(2));
}

/// Text that lives as long as the test.
trait Leak {
    fn leak_to(&self) -> &'static str;
}

impl Leak for String {
    fn leak_to(&self) -> &'static str {
        self.clone().leak()
    }
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_colors_without_a_terminal_append_each_update() {
    let bed = busy().await;
    let url = format!("http://{}", served(bed.router()).await);
    let child = Command::new(env!("CARGO_BIN_EXE_gpupack"))
        .args(["top", "nodes", "--watch", "1", "--server", &url])
        .stdout(Stdio::piped())
        .spawn();
    let mut child = Running(child.unwrap());
    let lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let twice: Vec<String> = lines.take(10).collect();
    assert_eq!((&twice[0], &twice[5..]), (&twice[5], &twice[..5]), "the same again");
    assert!(!twice.concat().contains('\u{1b}'), "{twice:?}");
    let plain = printed(&["top", "nodes", "--server", &url]);
    let coloured = printed(&["top", "nodes", "--color", "always", "--server", &url]);
    assert!(coloured.contains("\u{1b}[33mNeverReported\u{1b}[0m"), "{coloured:?}");
    let without = coloured.replace("\u{1b}[33m", "").replace("\u{1b}[0m", "");
    assert_eq!(without, plain, "the same columns");
}

#[cfg(unix)]
#[test]
fn the_program_is_a_plugin_of_kubectl_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder.path().join("kubectl-gpupack");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_gpupack"), &plugin).unwrap();
    let help = text(&gpupack_as(&plugin, &["explain", "--help"]).stdout);
    assert!(help.contains("Usage: kubectl gpupack explain"), "{help}");
    let own = printed(&["explain", "--help"]);
    assert!(own.contains("Usage: gpupack explain"), "{own}");
    let script = text(&gpupack_as(&plugin, &["completion", "bash"]).stdout);
    assert!(script.contains("kubectl-gpupack"), "{script}");
}

#[test]
fn completions_and_manual_pages_are_made_from_the_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&["completion", shell]);
        assert!(script.contains("explain") && script.contains("sort-by"), "{shell}: {script}");
    }
    assert_eq!(gpupack(&["completion", "cmd"]).status.code(), Some(2));
    let page = printed(&["man"]);
    assert!(page.contains(".TH gpupack 1") && page.contains("explain"), "{page}");
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().join("man1");
    assert_eq!(printed(&["man", "--dir", into.to_str().unwrap()]), "");
    for page in ["gpupack.1", "gpupack-explain.1", "gpupack-top-gpus.1", "gpupack-waiting.1"] {
        let text =
            fs::read_to_string(into.join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
        assert!(text.contains(".TH"), "{page}: {text}");
    }
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let line = refused(1, &["man", "--dir", file.join("below").to_str().unwrap()]);
    assert!(line.contains("cannot write into"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn advise_names_pods_that_hold_unused_memory() {
    let bed = busy().await;
    let url = format!("http://{}", served(bed.router()).await);
    let early = printed(&["advise", "--server", &url]);
    assert_eq!(early, "No pod has been watched for 10m yet: try again then.\n");
    let pod = |name: &str, is_idle: bool| {
        let mut pod = json!({"pod": name, "node": "gpu-a", "gpus": [0],
            "allocated": {"memoryMib": 8192, "shareMillionths": 500_000}, "peakMib": 1000,
            "medianUseMillionths": 62_500, "p95UseMillionths": 125_000, "watchedSeconds": 7200,
            "idleSeconds": 3700, "idle": is_idle, "sufficientMib": 1280,
            "reclaimableMib": if is_idle { 8192 } else { 6912 }});
        if is_idle {
            pod["meanLoadMillionths"] = json!(31_000);
        }
        pod
    };
    let pool = json!({"pool": "a\u{1b}[2J", "tenants": 3, "replicas": 4,
        "replicasByMemory": 64, "replicasByLoad": 4, "limitedBy": "Load", "borrow": "memory",
        "borrowers": 0});
    let burst = |name: &str, at_limit: bool| {
        json!({"pod": name, "allocatedMib": 1024, "limitMib": 4096, "peakMib": 4000,
            "atLimit": at_limit})
    };
    let answer = json!({"apiVersion": "gpupack.dev/v1alpha1", "kind": "Advice", "watchedPods": 3,
        "idlePods": 1, "watchedForSeconds": 600, "idleAfterSeconds": 600,
        "reclaimable": {"memoryMib": 15_104, "shareMillionths": 920_000}, "wastefulPods": 2,
        "pods": [pod("team/idle", true), pod("team/small\u{1b}[31m", false)], "pools": [pool],
        "bursting": [burst("team/nb\u{1b}[31m", true), burst("team/ok", false)]});
    let expected = answer.clone();
    let router = Router::new().route("/v1/advise", get(move || async { Json(answer) }));
    let url = format!("http://{}", served(router).await);
    let table = printed(&["advise", "-n", "team", "--server", &url]);
    let joined = table.split_whitespace().collect::<Vec<_>>().join(" ");
    let sums = "idle (for 10m and more); 14.7Gi of memory and 0.92 GPUs could be given back.";
    for part in [
        sums,
        "8.0Gi 0.9Gi 12% 3% 61m nothing",
        "12% ? - 1280Mi",
        "3 4 64 4 Load",
        "1.0Gi 4.0Gi 3.9Gi request more: it reaches its limit",
        "team/ok 1.0Gi 4.0Gi 3.9Gi -",
        "lends memory, and no pod of it borrows",
    ] {
        assert!(joined.contains(part), "{part} in {table}");
    }
    assert!(!table.contains('\u{1b}'), "{table}");
    fits_80_columns(&table);
    let text = printed(&["advise", "-o", "json", "--server", &url]);
    assert_eq!(read(text.as_bytes()), expected, "as it came");
    refused(2, &["advise", "-n", "no/name", "--server", &url]);
}

#[test]
fn what_is_gone_of_a_command_is_refused_with_what_to_do() {
    for (line, expected) in [
        (
            "extender --kubeconfig x",
            "`extender --kubeconfig` is gone: set `kubeconfig` in the file",
        ),
        ("extender --listen=x", "`extender --listen` is gone: "),
        ("simulate --bursts=0.5", "`simulate --bursts` is gone: gpupack-lab has it"),
        ("simulate --policy fgd,random", "`simulate --policy random` is gone: gpupack-lab has it"),
        ("simulate --policy without-doubt", "`simulate --policy without-doubt` is gone: "),
        ("webhook-cert --out x", "`webhook-cert` is gone: "),
        ("agent --kubeconfig x", "error: unexpected argument '--kubeconfig'"),
        ("simulate --policy fdg", "error: invalid value 'fdg'"),
        ("", "A fraction-aware GPU scheduler extender"),
    ] {
        let arguments: Vec<&str> = line.split_whitespace().collect();
        let Output { status, stderr, .. } = gpupack(&arguments);
        let said = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(2), "{line}");
        let said = said.strip_prefix("gpupack: ").unwrap_or(&said);
        assert!(said.starts_with(expected), "{line}: {said}");
    }
}
