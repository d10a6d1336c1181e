//! The version before this one, this one, and that one again, with pods that run through both changes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::checker::{Load, annotation};
use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::manifests;
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario_with};
use crate::watching::Pods;

/// The commit that this version must be exchangeable with: that of the last release. Raise it with
/// each release. Until there is one: that before the mechanisms were deleted that `src/kube_api/config/gone.rs` lists.
const PREVIOUS: &str = "22ebc973";

/// A checkout may lack the history.
pub(super) const REQUIRED: &str = "GPUPACK_PREVIOUS_REQUIRED";

const LIMIT: Duration = Duration::from_secs(30);

/// The program of the version before: the one that `GPUPACK_E2E_PREVIOUS_BINARY` names, or one built
/// from the history of this repository.
pub(super) fn previous() -> Result<PathBuf, String> {
    if let Some(given) = clock::path_variable("GPUPACK_E2E_PREVIOUS_BINARY") {
        return Ok(given.into());
    }
    static ONE_BUILD: Mutex<()> = Mutex::new(());
    let _one = ONE_BUILD.lock().unwrap_or_else(PoisonError::into_inner);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_BIN_EXE_gpupack")).with_file_name("gpupack_previous");
    let target = program.parent().and_then(Path::parent).ok_or("no target folder")?;
    let source = target.join("previous").join(PREVIOUS);
    if source.join("built").exists() && program.exists() {
        return Ok(program);
    }
    let unpack = format!(
        "rm -rf '{to}' && mkdir -p '{to}' && git -C '{from}' archive {PREVIOUS} | tar -x -C '{to}' && \
         printf '[[bin]]\\nname = \"gpupack_previous\"\\npath = \"src/main.rs\"\\n' >> '{to}/Cargo.toml'",
        to = source.display(),
        from = root.display(),
    );
    run(Command::new("sh").args(["-c", &unpack]))?;
    let features = ["--features", "e2e,page", "--bin", "gpupack_previous"];
    let mut build = Command::new(env!("CARGO"));
    build.current_dir(&source).args(["build", "--locked"]).args(features);
    run(build.arg("--target-dir").arg(target))?;
    std::fs::write(source.join("built"), "").map_err(|error| error.to_string())?;
    Ok(program)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(()).ok_or_else(|| format!("{command:?}: {said}"))
}

#[test]
fn pods_run_through_an_upgrade_and_back() {
    scenario_with(
        "upgrade",
        REQUIRED,
        |_| previous(),
        |bed, previous| async move {
            // With it, which another scenario may have left, the guest would get home.
            manifests::delete(&bed.cluster.client, "moves.yaml", &["ClusterRoleBinding"]).await;
            let mut stage = bed.stage(Setup::of(Fleet::new().with("gone", 3, (2, A100)))).await;
            placed_by_each_version(&mut stage, &previous).await;
            stage.judge().await;
            stage.cluster.delete_all_pods().await;
            let all_gone = |pods: &Pods| pods.values().all(|seen| seen.gone.is_some());
            stage.watching.until("all pods gone", LIMIT, all_gone).await;
            stage.watching.forget_gone();
            stay_in_the_middle_of_what_is_gone(&mut stage, &previous).await;
            stage.watching.verdict();
        },
    );
}

async fn placed_by_each_version(stage: &mut Stage, previous: &Path) {
    let mut bound = 0;
    for (version, program) in [(0, Some(previous)), (1, None), (2, Some(previous))] {
        stage.stop_gpupack();
        stage.run_program(program.map(Path::to_owned));
        stage.start_gpupack(&json!({})).await;
        stage.until_ledgers_agree().await;
        bound = more_pods(stage, version, bound).await;
        stage.until_ledgers_agree().await;
    }
    // The room of one that ends under another version than that which placed it is free again.
    stage.cluster.set_phase("share-0", "Succeeded").await;
    stage.until_ledgers_agree().await;
    stage.figure(&format!("{bound} pods, placed by three processes of two versions"));
}

/// Pods of each form of request, some of which wait while there is no room.
async fn more_pods(stage: &Stage, version: usize, bound: usize) -> usize {
    let plans = [
        PodPlan::fraction(format!("share-{version}"), "0.25"),
        PodPlan::memory(format!("memory-{version}"), 5_000),
        PodPlan::fraction(format!("pair-{version}"), "0.2")
            .annotated("gpu-fraction-num-devices", "2"),
    ];
    stage.cluster.add_pods(&plans).await;
    stage.watching.until_bound(bound + plans.len(), Duration::from_secs(30)).await;
    bound + plans.len()
}

/// Half of a GPU that may use all of it, and may be moved.
fn notebook(name: &str) -> Pod {
    let pod = json!({
        "metadata": {"name": name, "annotations": {"gpu-fraction": "0.5", "gpu-fraction.limit": "1",
            "gpupack.dev/movable": "restart"}},
        "spec": {"schedulerName": "gpupack", "containers": [{"name": "main", "image": "local/none",
            "resources": {"requests": {"cpu": "10m"}},
            "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]}]},
    });
    serde_json::from_value(pod).expect("a pod")
}

/// The keys of the version before that this one refuses, and without them.
fn with_and_without_gone() -> [Value; 2] {
    let pool = json!({"borrow": "compute", "respread_idle_seconds": 60});
    let webhook = json!({"memory_limit": "mps", "mps_thread_percentage": "share_even_on_hopper"});
    [
        json!({"pool_label": "kubernetes.io/hostname", "webhook": webhook,
            "pools": {"gone-00": pool, "gone-02": {"mig": "by_turns"}}}),
        json!({"pool_label": "kubernetes.io/hostname", "webhook": {"memory_limit": "mps"},
            "pools": {"gone-00": {"borrow": "compute"}, "gone-02": {"mig": "on_demand"}}}),
    ]
}

/// Pods that the version before has placed: one with all limits that are gone, and one on a GPU that was shared by
/// turns.
fn tenants_of_gone(limited: &str, shared: &str) -> [PodPlan; 2] {
    let tenant = |name: &str, device: &str, node: &str| {
        PodPlan::fraction(name, "0.25").placed_on(device, 20_330, 250_000).bound_by_others(node)
    };
    let limits = tenant("limits", limited, "gone-01")
        .annotated("placed.gpupack.dev/mps-memory-limit", "0=20330M")
        .annotated("placed.gpupack.dev/mps-thread-percentage", "25")
        .annotated("placed.gpupack.dev/driver-memory-limit", "20330")
        .annotated("placed.gpupack.dev/driver-memory-soft-limit", "4096");
    [limits, tenant("turn", shared, "gone-02")]
}

/// A move home that nothing ends here, a percentage of threads, a soft limit, and a GPU that was shared by turns.
async fn stay_in_the_middle_of_what_is_gone(stage: &mut Stage, previous: &Path) {
    let fleet = stage.fleet.clone();
    let on_node = |node: &str| fleet.uuids(node)[0].to_owned();
    let (limited, shared) = (on_node("gone-01"), on_node("gone-02"));
    let [with_gone, without] = with_and_without_gone();
    stage.stop_gpupack();
    stage.run_program(Some(previous.to_owned()));
    stage.start_gpupack(&with_gone).await;
    for (name, bound) in [("nb-1", 1), ("nb-2", 2)] {
        let mut pod = notebook(name);
        pod.spec.get_or_insert_default().node_selector =
            Some([("kubernetes.io/hostname".to_owned(), "gone-00".to_owned())].into());
        let (pods, parameters) = (stage.cluster.pods(), PostParams::default());
        pods.create(&parameters, &pod).await.expect("a pod");
        stage.watching.until_bound(bound, LIMIT).await;
    }
    stage.cluster.add_pods(&tenants_of_gone(&limited, &shared)).await;
    // The guest is called home, and no kubelet restarts it.
    stage.cluster.add_pods(&[PodPlan::fraction("train", "1").only_on("gone-00")]).await;
    let started = clock::now();
    loop {
        let pod = stage.cluster.pods().get("nb-2").await.expect("it is there");
        let written = annotation(&pod, "placed.gpupack.dev/placement").unwrap_or_default();
        if written.contains("moved") {
            break;
        }
        assert!(started.elapsed() < LIMIT, "{written}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // On its way it is allocated both of its GPUs. `train` may be, too, while its bind waits.
    let left = fleet.uuids("gone-00")[1];
    let on_both = |load: &Load| load.get(left).is_some_and(|it| it.1 == 500_000);
    let before = until_allocated(stage, on_both).await;
    for (version, program, settings) in
        [(1, None, &without), (2, Some(previous), &with_gone), (3, None, &without)]
    {
        stage.stop_gpupack();
        stage.run_program(program.map(Path::to_owned));
        stage.start_gpupack(settings).await;
        stage.figure(&format!("process {version}"));
        until_allocated(stage, |load| *load == before).await;
    }
    let told = stage.cluster.events().await;
    let is_bad = |reason: &str| ["PlacementUnreadable", "Overallocated"].contains(&reason);
    assert!(!told.iter().any(|it| is_bad(&it.reason)), "{told:#?}");
    // Room is free again when they end.
    for name in ["limits", "turn"] {
        stage.cluster.set_phase(name, "Succeeded").await;
    }
    let plans = ["gone-01", "gone-02"].map(|node| {
        PodPlan::fraction(format!("after-{node}"), "1")
            .annotated("gpu-fraction-num-devices", "2")
            .only_on(node)
    });
    stage.cluster.add_pods(&plans).await;
    stage.watching.until_bound(6, LIMIT).await;
    stage.figure("what the version before left half done counts alike in both versions");
}

/// What the extender says is allocated, once it is so.
async fn until_allocated(stage: &Stage, is_so: impl Fn(&Load) -> bool) -> Load {
    let started = clock::now();
    loop {
        let load = stage.extender.allocated().await;
        if is_so(&load) {
            return load;
        }
        assert!(started.elapsed() < LIMIT, "{load:#?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
