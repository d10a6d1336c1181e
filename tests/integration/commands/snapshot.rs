//! `gpupack snapshot` as its users run it: a live extender or an API server on one side, the files that
//! `gpupack simulate` reads on the other.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::harness::extender::{Bed, pod};
use axum::Router;
use axum::extract::Query;
use axum::response::Json;
use axum::routing::get;
use engine::model::request::Amount;
use serde_json::{Value, json};
use sim::trace::read::{TraceNode, TracePod, read_nodes, read_pods};
use tempfile::TempDir;
use tokio::net::TcpListener;
use wire::units::MemMib;

/// `gpupack snapshot` with these flags, writing into `folder`.
fn snapshot(folder: &Path, flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack"));
    command.arg("snapshot").arg("--nodes").arg(folder.join("nodes.csv"));
    command.arg("--pods").arg(folder.join("pods.csv")).args(flags);
    // A test that runs in a cluster must not meet its API server.
    command.env_remove("KUBERNETES_SERVICE_HOST").output().expect("the program starts")
}

/// What a call writes, and what it says on standard error.
fn written(folder: &TempDir, flags: &[&str]) -> (Vec<TraceNode>, Vec<TracePod>, String) {
    let output = snapshot(folder.path(), flags);
    let said = String::from_utf8(output.stderr).expect("the program writes UTF-8");
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b""[..]), "{said}");
    let nodes = read_nodes(&folder.path().join("nodes.csv")).expect("the node file is a trace");
    let pods = read_pods(&folder.path().join("pods.csv")).expect("the pod file is a trace");
    (nodes, pods, said)
}

/// What a call that must fail complains about; it writes nothing.
fn refused(flags: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let output = snapshot(folder.path(), flags);
    assert_eq!(output.status.code(), Some(1), "{flags:?}");
    assert_eq!(fs::read_dir(folder.path()).expect("it is there").count(), 0, "{flags:?}");
    String::from_utf8(output.stderr).expect("the program writes UTF-8")
}

/// Serves until the test ends.
async fn served(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it listens");
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// Nodes as `name cpu memory gpus model`.
fn node_rows(nodes: &[TraceNode]) -> Vec<String> {
    let row = |node: &TraceNode| {
        let TraceNode { name, cpu_milli, memory_mib, gpus, model, .. } = node;
        format!("{name} {cpu_milli} {memory_mib} {gpus} {model}")
    };
    nodes.iter().map(row).collect()
}

/// Pods as `name cpu memory gpus milli models`.
fn pod_rows(pods: &[TracePod]) -> Vec<String> {
    let row = |pod: &TracePod| {
        let TracePod { name, cpu_milli, memory_mib, num_gpu, gpu_milli, .. } = pod;
        format!("{name} {cpu_milli} {memory_mib} {num_gpu} {gpu_milli} {}", pod.gpu_spec.join("|"))
    };
    pods.iter().map(row).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ledger_of_an_extender_exports_as_a_trace() {
    let bed = Bed::warm().await;
    let all = ["gpu-a", "gpu-b", "gpu-c"];
    let queried = |uid: &str, annotations: Value, cpu: &str| {
        let mut pod = pod(uid, annotations);
        let requests = json!({"requests": {"cpu": cpu, "memory": "2Gi"}});
        pod["spec"]["containers"][0]["resources"] = requests;
        pod
    };
    for (uid, annotations, node) in [
        ("half", json!({"gpu-fraction": "0.5"}), "gpu-a"),
        ("mem", json!({"gpu-memory": "20480", "gpupack.dev/gpu-model": "A100|L4"}), "gpu-b"),
        ("pair", json!({"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"}), "gpu-b"),
    ] {
        bed.filter(queried(uid, annotations, "1500m"), &all).await;
        let bind = json!({"PodName": uid, "PodNamespace": "team", "PodUID": uid, "Node": node});
        let (_, answer) = bed.post("/v1/bind", bind.to_string()).await;
        assert_eq!(answer, json!({"Error": ""}));
    }
    let model = json!({"gpu-fraction": "0.3", "gpupack.dev/gpu-model": "B200|H100"});
    bed.filter(queried("waits", model, "2"), &all).await;
    let from = format!("http://{}", served(bed.router()).await);
    let folder = tempfile::tempdir().unwrap();
    let (nodes, pods, said) = written(&folder, &["--from", &from]);
    assert_eq!(
        node_rows(&nodes),
        [
            "gpu-a 64000 262144 1 Tesla T4",
            "gpu-b 64000 262144 2 NVIDIA A100-SXM4-80GB",
            "gpu-c 64000 262144 1 NVIDIA L4",
        ]
    );
    assert_eq!(
        pod_rows(&pods),
        [
            "team.half 1500 2048 1 500 ",
            "team.mem 1500 2048 1 0 A100|L4",
            "team.pair 1500 2048 2 250 ",
            "team.waits 2000 2048 1 300 B200|H100",
        ]
    );
    assert_eq!(pods[1].request().unwrap().amount, Amount::Memory(MemMib::new(20_480)));
    assert_eq!(said, "wrote 3 nodes and 4 pods\n");
    // What is free, read back without any rounding.
    let free = folder.path().join("free.csv");
    replayed(&folder, &["--keep-placements", "--write-free", &free.display().to_string()]);
    let expected = "node,device,model,free_memory_mib,free_milli\n\
        gpu-a,0,Tesla T4,7680,500\n\
        gpu-b,0,NVIDIA A100-SXM4-80GB,40960,500\n\
        gpu-b,1,NVIDIA A100-SXM4-80GB,61440,750\n\
        gpu-c,0,NVIDIA L4,23034,1000\n";
    assert_eq!(fs::read_to_string(&free).unwrap(), expected);
    let (nodes, pods, _) = written(&folder, &["--from", &from, "--anonymous"]);
    assert_eq!((nodes[2].name.as_str(), pods[3].name.as_str()), ("node-3", "pod-4"));
    assert_eq!(pods[0].placed().unwrap().node, "node-1");
}

/// `gpupack simulate --as-is` on the files in `folder`: the result as JSON.
fn replayed(folder: &TempDir, flags: &[&str]) -> Value {
    let replay = Command::new(env!("CARGO_BIN_EXE_gpupack"))
        .args(["simulate", "--as-is", "--policy", "fgd", "--output", "json"])
        .arg("--nodes")
        .arg(folder.path().join("nodes.csv"))
        .arg("--pods")
        .arg(folder.path().join("pods.csv"))
        .args(flags)
        .output()
        .expect("the program starts");
    let said = String::from_utf8(replay.stderr).expect("the program writes UTF-8");
    serde_json::from_slice(&replay.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// A demo that ends with the test.
struct Demo(Child);

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_demo_can_be_replayed() {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_gpupack"))
        .args(["demo", "--nodes", "3", "--gpus-per-node", "4", "--fill", "0.6"])
        .args(["--arrival-rate", "0", "--listen", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map(Demo)
        .unwrap();
    let lines = BufReader::new(demo.0.stdout.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let first = lines.next().unwrap();
    let page = first.strip_prefix("page: ").and_then(|rest| rest.split(' ').next()).unwrap();
    lines.find(|line| line.starts_with("base load placed")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (nodes, pods, said) = written(&folder, &["--from", page]);
    assert_eq!(nodes.iter().map(|node| node.gpus).sum::<u32>(), 12);
    assert!(pods.len() > 6, "0.6 of 12 GPUs: {said}");
    let result = replayed(&folder, &[]);
    // The one that waits accepts only models that the demo has not.
    assert_eq!(result["results"][0]["lost"], 1, "{result}");
    // Pods that stay where they are have in the replay what they have in the demo.
    let free = folder.path().join("free.csv");
    let end = folder.path().join("end.csv");
    let (free_file, end_file) = (free.display().to_string(), end.display().to_string());
    let kept = ["--keep-placements", "--write-free", &free_file, "--write-pods", &end_file];
    assert_eq!(replayed(&folder, &kept)["results"][0]["lost"], 1);
    let rows = fs::read_to_string(&free).unwrap();
    assert_eq!(rows.lines().count(), 13, "{rows}");
    let again = read_pods(&end).unwrap();
    let place = |pod: &TracePod| (pod.name.clone(), pod.placed().cloned());
    let mut placed: Vec<_> = pods.iter().map(place).collect();
    let mut ended: Vec<_> = again.iter().map(place).collect();
    placed.sort();
    ended.sort();
    assert_eq!(placed, ended, "what waits fits nowhere, and no other pod has moved");
}

/// An API server with two pages of nodes and one of pods.
fn api_server() -> Router {
    let node = |name: &str, labels: Value, gpus: &str| {
        json!({
            "metadata": {"name": name, "labels": labels},
            "status": {"allocatable": {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": gpus}},
        })
    };
    let gpu = |product: &str| json!({"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": "40000"});
    let first = json!([node("a", gpu("NVIDIA-A100"), "2"), node("cpu", json!({}), "0")]);
    let second = json!([node("m", gpu("NVIDIA-A100-MIG-1g.5gb"), "7")]);
    let pod = |name: &str, annotations: Value, spec: Value, phase: &str| {
        let mut pod = json!({
            "metadata": {"name": name, "namespace": "t", "uid": name, "annotations": annotations,
                "creationTimestamp": "2026-01-01T00:00:10Z"},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]},
            "status": {"phase": phase},
        });
        pod["spec"]["nodeName"] = spec;
        pod
    };
    let mut early = pod("early", json!({"gpu-memory": "10000"}), json!("a"), "Running");
    early["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
    early["spec"]["priority"] = 7.into();
    let pods = json!([
        pod("waits", json!({"gpu-fraction": "0.5"}), Value::Null, "Pending"),
        pod("over", json!({"gpu-fraction": "0.5"}), json!("a"), "Succeeded"),
        pod("typo", json!({"gpu-fraction": "1.5"}), Value::Null, "Pending"),
        pod("daemon", json!({}), json!("a"), "Running"),
        pod("far", json!({}), json!("cpu"), "Running"),
        early,
    ]);
    let list = |kind: &str, items: &Value, more: &str| json!({"kind": kind, "apiVersion": "v1", "metadata": {"continue": more}, "items": items});
    let pages = [list("NodeList", &first, "next"), list("NodeList", &second, "")];
    let pods = list("PodList", &pods, "");
    Router::new()
        .route(
            "/api/v1/nodes",
            get(async move |Query(query): Query<Value>| {
                Json(pages[usize::from(query["continue"] == "next")].clone())
            }),
        )
        .route("/api/v1/pods", get(async move || Json(pods)))
}

fn kubeconfig(folder: &TempDir, server: &str) -> String {
    let path = folder.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    fs::write(&path, config.to_string()).expect("a file can be written");
    path.display().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_has_all_facts_but_mig() {
    let address = served(api_server()).await;
    let folder = tempfile::tempdir().unwrap();
    let config = kubeconfig(&folder, &format!("http://{address}"));
    let (nodes, pods, said) = written(&folder, &["--kubeconfig", &config]);
    assert_eq!(node_rows(&nodes), ["a 32000 131072 2 NVIDIA-A100"]);
    assert_eq!(
        pod_rows(&pods),
        ["t.early 1000 0 1 0 ", "t.daemon 1000 0 0 0 ", "t.waits 1000 0 1 500 "]
    );
    assert_eq!(pods[0].request().unwrap().amount, Amount::Memory(MemMib::new(10_000)));
    assert_eq!((pods[0].priority(), pods[0].placed()), (7, None));
    assert_eq!((pods[0].creation_time, pods[2].creation_time), (Some(0), Some(10)));
    for part in ["7 GPUs are cut", "1 nodes without", "1 pods without"] {
        assert!(said.contains(part), "{part} in {said}");
    }
    assert!(said.contains("1 pods with a rejected GPU request"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_source_is_named_in_the_error() {
    let elsewhere = served(Router::new()).await;
    let old = Router::new().route("/v1/state", get(async || Json(json!({"nodes": []}))));
    let old = served(old).await;
    let empty =
        json!({"apiVersion": "gpupack.dev/v1alpha1", "kind": "State", "nodes": [], "pods": []});
    let empty = served(Router::new().route("/v1/state", get(async || Json(empty)))).await;
    for (from, part) in [
        ("", "--from `` is no address: empty string"),
        ("https://a:1", "--from `https://a:1` is no address: TLS is not supported yet"),
        ("http://a b", "--from `http://a b` is no address: invalid"),
        ("http://127.0.0.1:1", "cannot query the extender at `http://127.0.0.1:1`"),
        (&format!("http://{elsewhere}"), "404 Not Found: is it a gpupack extender?"),
        (
            &format!("http://{old}/"),
            "is not the state of a gpupack extender of this version: missing",
        ),
        (&format!("http://{empty}"), "no node with a GPU there: nothing is written"),
    ] {
        let said = refused(&["--from", from]);
        assert!(said.contains(part), "{part} in {said}");
    }
    assert!(refused(&[]).contains("name a source: --from or --kubeconfig"));
    let folder = tempfile::tempdir().unwrap();
    let config = kubeconfig(&folder, &format!("http://{elsewhere}"));
    assert!(refused(&["--kubeconfig", &config]).contains("cannot list nodes"));
    assert!(refused(&["--kubeconfig", "/nowhere"]).contains("cannot read the kubeconfig /nowhere"));
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_cannot_be_written_leave_the_old_ones() {
    let address = served(api_server()).await;
    let folder = tempfile::tempdir().unwrap();
    let config = kubeconfig(&folder, &format!("http://{address}"));
    fs::write(folder.path().join("nodes.csv"), "old").unwrap();
    fs::create_dir(folder.path().join("pods.csv")).unwrap();
    let output = snapshot(folder.path(), &["--kubeconfig", &config]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot write `") && said.contains("pods.csv`"), "{said}");
    assert_eq!(fs::read_to_string(folder.path().join("nodes.csv")).unwrap(), "old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "nothing is left beside them");
    let same = Command::new(env!("CARGO_BIN_EXE_gpupack"))
        .args(["snapshot", "--nodes", "x.csv", "--pods", "x.csv"])
        .output()
        .unwrap();
    assert!(String::from_utf8(same.stderr).unwrap().contains("name the same file"));
}
