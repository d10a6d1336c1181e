//! MIG on demand on a real GPU that is in MIG mode. The mode is never changed, and the instances that
//! are there stay.

use std::collections::BTreeSet;
use std::process::{Child, Command};
use std::time::Duration;

use gpupack::api::state::DeviceKind;
use gpupack::report::wire::{DeviceReport, MigProfileReport};

use crate::orders::Replica;
use crate::{first_sample, report, say};

/// The agent on this machine; killed when it is dropped.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// UUIDs of the MIG instances of an inventory.
fn instances(inventory: &[DeviceReport]) -> BTreeSet<String> {
    let all = inventory.iter().filter(|it| it.kind == DeviceKind::MigInstance);
    all.map(|it| it.uuid.clone()).collect()
}

/// The smallest profile of a GPU for which there are free units, and the first of these.
fn free<'a>(
    inventory: &'a [DeviceReport],
    gpu: &'a DeviceReport,
) -> Option<(&'a MigProfileReport, u32)> {
    let of_gpu = inventory.iter().filter(|it| it.parent.as_ref() == Some(&gpu.uuid));
    let taken: Vec<_> = of_gpu.map(|it| it.mig_placement).collect::<Option<_>>()?;
    let smallest =
        gpu.mig_profiles.iter().min_by_key(|it| (it.size, it.memory_mib, &it.profile))?;
    let is_free = |start: &&u32| {
        taken.iter().all(|it| it.start + it.size <= **start || **start + smallest.size <= it.start)
    };
    smallest.starts.iter().find(is_free).map(|start| (smallest, *start))
}

#[test]
fn mig_instance_is_made_reported_and_removed() {
    let what = "a MIG instance on a real GPU";
    let Some((probe, sample)) = first_sample(what) else { return };
    drop(probe);
    if sample.inventory.iter().all(|it| it.kind != DeviceKind::MigParent) {
        return say(&format!("skipped: {what} (no GPU is in MIG mode, which is not changed here)"));
    }
    let folder = tempfile::tempdir().unwrap();
    let replica = Replica::start();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack"));
    command.args(["agent", "--node", "n", "--extender", &replica.url(), "--mig-on-demand"]);
    command.arg("--mig-folder").arg(folder.path().join("mig"));
    command.arg("--kubelet-socket").arg(folder.path().join("none")).env("NO_COLOR", "1");
    let _agent = Agent(command.spawn().unwrap());
    replica.until("an inventory", |it| !it.inventory().is_empty());
    let inventory = replica.inventory();
    let before = instances(&inventory);
    let mut gpus = inventory.iter().filter(|it| it.kind == DeviceKind::MigParent);
    let Some((gpu, (profile, start))) = gpus.find_map(|it| Some((it, free(&inventory, it)?)))
    else {
        return say(&format!("skipped: {what} (no right to make one, or no room for one)"));
    };
    replica.give(1, (&gpu.uuid, &[(&profile.profile, start)]), &[]);
    let made = || {
        let now = replica.inventory();
        now.into_iter().find(|it| it.made_here && it.healthy)
    };
    replica.until("the instance", |it| made().is_some() || !it.failures().is_empty());
    let took = replica.since_ordered();
    let made = made().unwrap_or_else(|| panic!("it was refused: {:?}", replica.failures()));
    report(&sample, &format!("{made:?}, {} ms after the order", took.as_millis()));
    // It goes before anything is checked, so that a fault leaves nothing behind.
    replica.give(1, (&gpu.uuid, &[]), &[&made.uuid]);
    replica.until("its end", |it| {
        !instances(&it.inventory()).contains(&made.uuid) || !it.failures().is_empty()
    });
    report(&sample, &format!("removed {} ms after the order", replica.since_ordered().as_millis()));
    assert_eq!(replica.failures(), []);
    assert_eq!(instances(&replica.inventory()), before, "the others are as they were");
    assert_eq!(made.mig_profile.as_ref(), Some(&profile.profile));
    assert_eq!(made.mig_placement.map(|it| (it.start, it.size)), Some((start, profile.size)));
    assert!(took < Duration::from_secs(10), "{took:?}");
}
