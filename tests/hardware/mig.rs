//! MIG on demand on a real GPU that is in MIG mode. The mode is never changed, and the instances that
//! are there stay.

use std::collections::BTreeSet;
use std::process::{Child, Command};
use std::time::Duration;

use engine::hardware::mig::Geometry;
use wire::api::state::DeviceKind;
use wire::ids::ModelName;
use wire::report::bodies::{DeviceReport, MigProfileReport};
use wire::units::MemMib;

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
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack-agent"));
    command.args(["--node", "n", "--extender", &replica.url(), "--mig-on-demand"]);
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

/// Reads only. The driver lists them in MIG mode and outside it.
#[test]
fn profiles_of_the_driver_are_those_of_the_table() {
    let Some((probe, sample)) = first_sample("MIG profiles of a real GPU") else { return };
    let listed = probe.listed_mig_profiles().unwrap();
    for gpu in sample.inventory.iter().filter(|it| it.kind != DeviceKind::MigInstance) {
        let model = ModelName::new(gpu.model.as_str());
        let profiles = &listed[&gpu.uuid];
        let Some(geometry) = Geometry::of(&model, MemMib::new(gpu.memory_mib)) else {
            say(&format!("skipped: MIG profiles of {model} (the table does not have this model)"));
            continue;
        };
        for known in &geometry.profiles {
            let found = profiles.iter().find(|it| it.profile == known.name);
            let found = found.unwrap_or_else(|| panic!("no {}: {profiles:?}", known.name));
            assert_eq!((&*found.starts, found.size), (&*known.starts, known.size), "{found:?}");
            assert_eq!(found.sm_count, Some(known.multiprocessors), "{found:?}");
            let apart = found.memory_mib.abs_diff(known.memory_mib);
            assert!(apart * 50 <= known.memory_mib, "two drivers differ by less: {found:?}");
            let mib = (known.memory_mib, found.memory_mib);
            report(
                &sample,
                &format!("{}: the table has {} MiB, the driver {}", known.name, mib.0, mib.1),
            );
        }
        let is_known = |it: &&MigProfileReport| {
            let mut all = geometry.profiles.iter();
            all.any(|known| it.profile.split('+').next() == Some(known.name.as_str()))
        };
        let others: Vec<_> = profiles.iter().filter(|it| !is_known(it)).collect();
        assert!(others.is_empty(), "not in the table: {others:?}");
    }
}
