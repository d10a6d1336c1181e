//! `gpupack clear` through the API server: who may clear a GPU, and that it takes tenants again. The agent is the one of
//! a real node, on a stand-in for NVML.

use std::path::Path;
use std::time::Duration;

use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::identities::api_service;
use crate::clock;
use crate::control_plane::Identity;
use crate::extender::queried;
use crate::fleet::{A100, Fleet, FleetGpu};
use crate::manifests::{self, Mode};
use crate::node::driver::built_library;
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::{Pods, is_bound};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn who_may_clear_a_gpu_lets_it_take_tenants_again_after_an_xid() {
    scenario("clear", |bed| async move {
        let fleet = Fleet::new().with("clear", 1, (1, A100));
        let setup = Setup { has_identities: true, ..Setup::of(fleet) };
        let plane = bed.plane;
        let mut stage = bed.stage(setup).await;
        manifests::apply(&stage.cluster.client, "rbac.yaml", Mode::Keep).await;
        for object in rights() {
            manifests::keep(&stage.cluster.client, "rights", &object).await;
        }
        api_service(&stage).await;
        let (folder, node) = (stage.folder(), stage.fleet.nodes[0].name.clone());
        std::fs::create_dir_all(folder.join("proc")).expect("a folder");
        let library = folder.join("libnvidia-ml.so.1");
        std::fs::copy(built_library().expect("cargo builds it"), &library).expect("a copy");
        play(&stage, &json!([]));
        stage.stop_agents();
        let _agent = stage.start_real_agent(&node, flags(&folder)).await;
        let kubeconfig = plane.kubeconfig(Identity::Admin);
        let kubeconfig = kubeconfig.to_str().expect("the target folder is UTF-8");
        let ask = async |what: &[&str], user: &str| {
            queried(&[what, &["--kubeconfig", kubeconfig, "--as", user]].concat()).await
        };
        // The Xid comes once the agent listens to events.
        until(async || ask(&["top", "gpus"], "mechanic").await, "0%").await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        play(&stage, &json!([{"gpu": 0, "kind": 8, "data": 63}]));
        until(async || ask(&["top", "gpus", "-o", "json"], "mechanic").await, "\"Xid\"").await;
        stage.cluster.add_pods(&[PodPlan::fraction("tenant", "0.5")]).await;
        let clear = ["clear", &node, "0"];
        for (user, verb, role) in [
            ("stranger", "cannot get resource \"cluster/state\"", "gpupack-view"),
            ("reader", "cannot update resource \"gpus\"", "gpupack-clear"),
        ] {
            let (code, text) = ask(&clear, user).await;
            assert!(
                code == Some(1) && text.contains(verb) && text.contains(role),
                "{user}: {text}"
            );
            stage.figure(&format!("{user}: {}", text.trim()));
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(stage.watching.ask(|pods| !is_bound(pods, "tenant")), "its GPU has a fault");
        let started = clock::now();
        let (code, text) = ask(&clear, "mechanic").await;
        assert!(code == Some(0) && text.contains("Cleared"), "{text}");
        stage.figure(&format!("cleared after {} ms", clock::ms(started.elapsed())));
        let is_there = |pods: &Pods| is_bound(pods, "tenant");
        stage.watching.until("the GPU takes a tenant", LIMIT, is_there).await;
        let (code, text) = ask(&clear, "mechanic").await;
        assert!(code == Some(0) && text.contains("NothingToClear"), "{text}");
        stage.judge().await;
    });
}

/// Waits until the command says this.
async fn until(ask: impl AsyncFn() -> (Option<i32>, String), part: &str) {
    let started = clock::now();
    loop {
        let (code, text) = ask().await;
        if code == Some(0) && text.contains(part) {
            return;
        }
        assert!(started.elapsed() < LIMIT, "no {part}: {text}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Changes what the driver has sent: the GPU is that of the fleet.
fn play(stage: &Stage, events: &Value) {
    let folder = stage.folder();
    let FleetGpu { uuid, model, memory_mib, reserved_mib } = &stage.fleet.nodes[0].gpus[0];
    let gpu = json!({"uuid": uuid, "name": model, "total_mib": memory_mib,
        "reserved_mib": reserved_mib, "used_mib": 0, "recovery_action": 0});
    let scenario = json!({"gpus": [gpu], "events": events});
    // In one step: the library reads at any time.
    std::fs::write(folder.join("next.json"), scenario.to_string()).expect("a file");
    std::fs::rename(folder.join("next.json"), folder.join("scenario.json")).expect("a file");
}

/// The flags of an agent on that driver.
fn flags(folder: &Path) -> Vec<String> {
    let path = |name: &str| folder.join(name).to_str().expect("UTF-8").to_owned();
    vec![
        format!("--nvml-library={}", path("libnvidia-ml.so.1")),
        format!("--proc-root={}", path("proc")),
        format!("--kubelet-socket={}", path("kubelet.sock")),
        "--metrics-listen=127.0.0.1:0".to_owned(),
        "--period-ms=500".to_owned(),
    ]
}

/// `mechanic` and `reader` may query, and `mechanic` may clear GPUs.
fn rights() -> Vec<DynamicObject> {
    let group = "rbac.authorization.k8s.io";
    let binding = |role: &str, users: &[&str]| {
        let subjects: Vec<Value> = users
            .iter()
            .map(|name| json!({"kind": "User", "name": name, "apiGroup": group}))
            .collect();
        let object = json!({"apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding",
            "metadata": {"name": format!("{role}-here")}, "subjects": subjects,
            "roleRef": {"kind": "ClusterRole", "name": role, "apiGroup": group}});
        serde_json::from_value(object).expect("an object")
    };
    vec![binding("gpupack-view", &["mechanic", "reader"]), binding("gpupack-clear", &["mechanic"])]
}
