//! The version before this one, this one, and that one again, with pods that run through both changes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use serde_json::json;

use crate::checker::annotation;
use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario_with};

/// The commit that this version must be exchangeable with: that of the last release. Raise it with
/// each release. Until there is one: replicas had a Lease, and no pod was a guest.
const PREVIOUS: &str = "fa920d8a";

/// A checkout may lack the history.
pub(super) const REQUIRED: &str = "GPUPACK_PREVIOUS_REQUIRED";

const LIMIT: Duration = Duration::from_secs(30);

/// The program of the version before: the one that `GPUPACK_E2E_PREVIOUS_BINARY` names, or one built
/// from the history of this repository.
pub(super) fn previous() -> Result<PathBuf, String> {
    if let Some(given) = clock::path_variable("GPUPACK_E2E_PREVIOUS_BINARY") {
        return Ok(given.into());
    }
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
            let fleet = Fleet::new().with("upgrade", 2, (2, A100));
            let mut stage = bed.stage(Setup::of(fleet)).await;
            let mut bound = 0;
            for (version, program) in [(0, Some(&previous)), (1, None), (2, Some(&previous))] {
                stage.stop_gpupack();
                stage.run_program(program.cloned());
                stage.start_gpupack(&json!({})).await;
                stage.until_ledgers_agree().await;
                bound = more_pods(&stage, version, bound).await;
                stage.until_ledgers_agree().await;
            }
            // The room of one that ends under another version than that which placed it is free again.
            stage.cluster.set_phase("share-0", "Succeeded").await;
            stage.until_ledgers_agree().await;
            stage.judge().await;
            stage.figure(&format!("{bound} pods, placed by three processes of two versions"));
        },
    );
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

#[test]
fn the_version_before_allocates_guests_what_they_run_on() {
    scenario_with(
        "upgrade-guests",
        REQUIRED,
        |_| previous(),
        |bed, previous| async move {
            let fleet = Fleet::new().with("guests", 1, (2, A100));
            let settings = json!({"pools": {"": {"borrow": "compute"}}});
            let mut stage = bed.stage(Setup { settings, ..Setup::of(fleet) }).await;
            for (name, bound) in [("nb-1", 1), ("nb-2", 2)] {
                let (pods, parameters) = (stage.cluster.pods(), PostParams::default());
                pods.create(&parameters, &notebook(name)).await.expect("a pod");
                stage.watching.until_bound(bound, LIMIT).await;
            }
            let guest = stage.cluster.pods().get("nb-2").await.expect("it is there");
            let written = annotation(&guest, "placed.gpupack.dev/placement").unwrap_or_default();
            assert!(written.contains("home"), "{written}");
            // The key is unknown to it.
            stage.stop_gpupack();
            stage.run_program(Some(previous.clone()));
            stage.start_gpupack(&json!({"pools": null})).await;
            stage.until_ledgers_agree().await;
            stage.cluster.add_pods(&[PodPlan::fraction("train", "1")]).await;
            tokio::time::sleep(Duration::from_secs(5)).await;
            let train = stage.cluster.pods().get("train").await.expect("it is there");
            let node = train.spec.and_then(|spec| spec.node_name);
            assert_eq!(node, None, "each GPU has half of a notebook");
            let told = stage.cluster.events().await;
            let is_bad = |reason: &str| ["PlacementUnreadable", "Overallocated"].contains(&reason);
            assert!(!told.iter().any(|it| is_bad(&it.reason)), "{told:#?}");
            stage.judge().await;
            stage.figure("the version before allocates a guest the GPU on which it runs");
        },
    );
}
