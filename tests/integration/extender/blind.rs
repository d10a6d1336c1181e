//! Pods whose containers do not get the driver, from the agent's report to what people see; and the node that would
//! draw all others.

use std::sync::Arc;
use std::time::Duration;

use crate::harness::extender::{Bed, hello, is_declared, pod, read};
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::{PodWatch, Sink, WatchEvent};
use kube_api::write::events::NoticeReason;
use serde_json::{Value, json};
use server::api::background;
use tokio::sync::watch;
use wire::api::explain::Explanation;
use wire::api::state::State;
use wire::ids::PodUid;

/// What *filter* says of the node.
const REFUSED: &str = "containers on the node do not get their GPU";

/// Two pods with half of the GPU of `gpu-a` each, and the watch of pods.
struct Stage {
    bed: Bed,
    watch: PodWatch,
    sequence: u64,
}

impl Stage {
    async fn new() -> Self {
        let bed = Bed::warm().await;
        let sink: Arc<dyn Sink> = Arc::clone(&bed.app) as _;
        let watch = PodWatch::new(Arc::clone(&bed.app.ledger), sink, bed.app.clock);
        Self { bed, watch, sequence: 1 }
    }

    /// Binds a pod with a fifth of the GPU.
    async fn bind(&self, uid: &str) -> Value {
        self.bed.filter(request(uid), &["gpu-a"]).await;
        let body = json!({"PodName": uid, "PodNamespace": "team", "PodUID": uid, "Node": "gpu-a"});
        self.bed.post("/v1/bind", body.to_string()).await.1
    }

    /// The watch shows the pod on its node, with this container.
    fn show(&mut self, uid: &str, container: char, state: Value) {
        let held = self.bed.app.ledger.reservation(&PodUid::new(uid)).expect("it is bound");
        let mut shown = request(uid);
        for (key, value) in kube_api::request::placement::encode(&held.placement).expect("small") {
            shown["metadata"]["annotations"][key] = value.into();
        }
        shown["spec"]["nodeName"] = "gpu-a".into();
        let path = "metadata.annotations['placed.gpupack.dev/devices']";
        shown["spec"]["containers"] = json!([
            {"name": "main", "env": [{"name": "NVIDIA_VISIBLE_DEVICES",
                "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}]},
            {"name": "side"},
        ]);
        let ended = state.get("terminated").is_some();
        shown["status"] = json!({"phase": if ended { "Failed" } else { "Running" }, "containerStatuses": [
            {"name": "side", "containerID": format!("containerd://{}", id('0'))},
            {"name": "main", "containerID": format!("containerd://{}", id(container)), "state": state},
        ]});
        let seen = SeenPod::from_json(&shown.to_string()).expect("a pod");
        self.watch.take(WatchEvent::Seen(seen));
    }

    fn run(&mut self, uid: &str, container: char) {
        self.show(uid, container, json!({"running": {}}));
    }

    /// The agent of `gpu-a` reports these containers: pod, first digit of the id, and whether it has the driver.
    async fn report(&mut self, containers: &[(&str, char, bool)]) {
        self.sequence += 1;
        let mut report = hello("gpu-a", "Tesla T4", 15_360, 1);
        let container = |(uid, container, has_driver): &(&str, char, bool)| json!({"podUid": uid, "id": id(*container), "hasDriver": has_driver});
        report["sequence"] = self.sequence.into();
        report["containers"] = containers.iter().map(container).collect();
        let (status, reply) = self.bed.report("gpu-a", &report).await;
        assert!(status.is_success(), "{reply}");
    }

    /// Why *filter* refuses the node for another pod; empty if it fits.
    async fn refusal(&self) -> String {
        let answer = self.bed.filter(request("next"), &["gpu-a"]).await;
        assert!(answer["FailedNodes"].as_object().is_none_or(|nodes| nodes.is_empty()), "{answer}");
        answer["FailedAndUnresolvableNodes"]["gpu-a"].as_str().unwrap_or_default().to_owned()
    }

    async fn state(&self) -> Value {
        let text = self.bed.get("/v1/state?node=gpu-a").await.1;
        let _: State = is_declared(text.as_bytes());
        read(text.as_bytes())
    }

    /// What is seen of a pod.
    async fn sight(&self, uid: &str) -> Value {
        let mut state = self.state().await;
        let pods = state["pods"].as_array_mut().expect("a list");
        pods.iter_mut().find(|pod| pod["podUid"] == uid).expect("it is there")["seen"].take()
    }

    async fn metric(&self, name: &str) -> u64 {
        let text = self.bed.get("/metrics").await.1;
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        lines.next().and_then(|value| value.parse().ok()).expect("a series")
    }

    /// Waits until an event says that the pod has started without its GPU.
    async fn until_told(&self, uid: &str) {
        let is_told = || !self.bed.app.is_due(&PodUid::new(uid), NoticeReason::GpuStartFailed);
        let told = async {
            while !is_told() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert!(tokio::time::timeout(Duration::from_secs(20), told).await.is_ok(), "{uid}");
    }
}

fn request(uid: &str) -> Value {
    pod(uid, json!({"gpu-fraction": "0.2"}))
}

/// The id of a container, by its first digit.
fn id(first: char) -> String {
    format!("{first}{}", "0".repeat(63))
}

#[tokio::test]
async fn a_pod_without_its_gpu_is_shown_counted_and_told_of() {
    let mut stage = Stage::new().await;
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(Arc::clone(&stage.bed.app), stopped));
    stage.bind("p").await;
    assert_eq!(stage.sight("p").await, "Unknown");
    stage.run("p", 'a');
    stage.report(&[("p", '0', false)]).await;
    assert_eq!(stage.sight("p").await, "Unknown", "a container beside it");
    assert!(stage.bed.app.is_due(&PodUid::new("p"), NoticeReason::GpuStartFailed));
    stage.report(&[("p", '0', false), ("p", 'a', false)]).await;
    assert_eq!(stage.sight("p").await, "Blind");
    assert_eq!(stage.metric("gpupack_blind_pods").await, 1);
    assert_eq!(stage.metric("gpupack_blind_nodes").await, 0);
    stage.until_told("p").await;
    let explained = stage.bed.get("/v1/explain?pod=team/p").await.1;
    let explanation: Explanation = is_declared(explained.as_bytes());
    assert!(
        explanation.verdict.contains("; container `main` runs without its GPU: when it started"),
        "{explained}"
    );
    assert!(explanation.suggestions[0].starts_with("delete the pod"), "{explained}");
    // Its container is made again, and gets the driver.
    stage.run("p", 'b');
    assert_eq!(stage.sight("p").await, "Unknown");
    stage.report(&[("p", '0', false), ("p", 'a', false), ("p", 'b', true)]).await;
    assert_eq!(stage.sight("p").await, "Seen");
    assert_eq!(stage.metric("gpupack_blind_pods").await, 0);
    let explained = stage.bed.get("/v1/explain?pod=team/p").await.1;
    assert!(!explained.contains("without its GPU"), "{explained}");
    stop.send_replace(true);
    running.await.expect("it ends");
}

#[tokio::test]
async fn a_node_whose_pods_fail_for_lack_of_their_gpu_does_not_draw_the_queue() {
    let mut stage = Stage::new().await;
    for (uid, container) in [("p", 'a'), ("q", 'b')] {
        assert_eq!(stage.refusal().await, "");
        stage.bind(uid).await;
        stage.run(uid, container);
        stage.report(&[(uid, container, false)]).await;
        // It fails, and its room is free after two reports.
        stage.show(uid, container, json!({"terminated": {"exitCode": 1}}));
        stage.report(&[]).await;
        stage.report(&[]).await;
        assert!(stage.bed.app.ledger.reservation(&PodUid::new(uid)).is_none());
    }
    assert_eq!(stage.refusal().await, REFUSED);
    let refused = stage.bind("r").await;
    assert!(refused["Error"].as_str().expect("an error").contains(REFUSED), "{refused}");
    assert_eq!(stage.state().await["nodes"][0]["blindStarts"], "Closed");
    assert_eq!(stage.metric("gpupack_blind_nodes").await, 1);
    // Another agent, in a container that was made again: it has the driver.
    let mut report = hello("gpu-a", "Tesla T4", 15_360, 1);
    report["agent"] = "made again".into();
    report["sequence"] = 900.into();
    assert!(stage.bed.report("gpu-a", &report).await.0.is_success());
    assert_eq!(stage.refusal().await, "");
    assert!(stage.state().await["nodes"][0].get("blindStarts").is_none());
    assert_eq!(stage.bind("r").await["Error"], "");
}
