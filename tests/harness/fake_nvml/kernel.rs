//! What the driver's kernel module shows of MIG, in the folder that the scenario names as `proc_root`:
//!
//! * `driver/nvidia/capabilities/gpu<minor>/mig/gi<id>/access` and `…/ci<id>/access` of what exists, and those of
//!   `mig/config` and `mig/monitor`, in step with the instances. A GPU without a `minor` has its position as one;
//! * `driver/nvidia-caps/mig-minors`, which names all that can exist;
//! * `devices`, with the major number of `nvidia-caps`, for which no machine has a driver.
//!
//! Names, texts and minor numbers are those of the open module 595.45 (`nv-caps.c`, `os.c`).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_uint;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::instances::Made;
use super::scenario::{Gpu, Scenario};

/// The major number of capability nodes.
pub(crate) const MAJOR: u32 = 510;

/// The first minor number of a GPU: those of NVLink, `mig/config` and `mig/monitor` are before it.
const FIRST: u32 = 3;

/// Compute instances of a GPU instance, and GPU instances of a GPU, for which there are minor numbers.
const COMPUTES: u32 = 8;
const INSTANCES: u32 = 15;
const GPUS: u32 = 32;

/// Compute instances by GPU instance.
type Instances = BTreeMap<c_uint, BTreeSet<c_uint>>;

/// The minor number of a GPU instance's node; those of its compute instances follow.
fn minor_of(gpu: u32, instance: u32) -> u32 {
    FIRST + (gpu * INSTANCES + instance) * (1 + COMPUTES)
}

/// Brings the folder in step with what exists.
pub(crate) fn show(scenario: &Scenario, made: Option<&Made>) {
    let Some(proc_root) = &scenario.proc_root else { return };
    let all = (0..)
        .zip(&scenario.gpus)
        .map(|(position, gpu)| (gpu.minor.unwrap_or(position), instances_of(gpu, made)));
    let all: BTreeMap<u32, Instances> = all.collect();
    // A test that removes its folder has ended.
    let _ = write_all(proc_root, &all);
}

fn instances_of(gpu: &Gpu, made: Option<&Made>) -> Instances {
    if gpu.mig_model.is_some() {
        let of_gpu = made.map_or(&[][..], |made| made.of(gpu)).iter();
        return of_gpu.map(|it| (it.id, it.computes.iter().map(|it| it.id).collect())).collect();
    }
    let mut instances = Instances::new();
    for device in gpu.mig.iter().flatten().flatten() {
        if let Some((id, ..)) = device.slot {
            instances.entry(id).or_default().insert(device.compute);
        }
    }
    instances
}

fn write_all(proc_root: &Path, all: &BTreeMap<u32, Instances>) -> io::Result<()> {
    let root = proc_root.join("driver/nvidia/capabilities");
    fs::create_dir_all(&root)?;
    let lock = fs::File::create(proc_root.join("driver/lock"))?;
    lock.lock()?;
    for (name, minor) in [("config", 1), ("monitor", 2)] {
        fs::create_dir_all(root.join("mig"))?;
        write(&root.join("mig").join(name), &access(minor, 0o400))?;
    }
    write_numbers(proc_root)?;
    let gpus: BTreeSet<String> = all.keys().map(|minor| format!("gpu{minor}")).collect();
    remove_others(&root, "gpu", &gpus)?;
    for (gpu, instances) in all {
        let folder = root.join(format!("gpu{gpu}/mig"));
        fs::create_dir_all(&folder)?;
        let names = instances.keys().map(|id| format!("gi{id}")).collect();
        remove_others(&folder, "gi", &names)?;
        for (id, computes) in instances {
            let minor = minor_of(*gpu, *id);
            let folder = folder.join(format!("gi{id}"));
            add(&folder, minor)?;
            let names = computes.iter().map(|id| format!("ci{id}")).collect();
            remove_others(&folder, "ci", &names)?;
            for id in computes {
                add(&folder.join(format!("ci{id}")), minor + 1 + id)?;
            }
        }
    }
    Ok(())
}

/// The text of a capability's file.
fn access(minor: u32, mode: u32) -> String {
    format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n")
}

/// Adds the folder of an instance in one step.
fn add(folder: &Path, minor: u32) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let name = folder.file_name().unwrap_or_default();
    let next: PathBuf = folder.with_file_name("next").join(name);
    fs::create_dir_all(&next)?;
    write(&next.join("access"), &access(minor, 0o444))?;
    fs::rename(&next, folder)?;
    fs::remove_dir(folder.with_file_name("next"))
}

/// Removes the folders that begin so, but those with these names.
fn remove_others(folder: &Path, start: &str, names: &BTreeSet<String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(start) && !names.contains(&name) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Writes the numbers of what can exist, once.
fn write_numbers(proc_root: &Path) -> io::Result<()> {
    let minors = proc_root.join("driver/nvidia-caps/mig-minors");
    if !minors.exists() {
        let mut text = "config 1\nmonitor 2\n".to_owned();
        for (gpu, instance) in (0..GPUS).flat_map(|gpu| (0..INSTANCES).map(move |it| (gpu, it))) {
            let minor = minor_of(gpu, instance);
            let _ = writeln!(text, "gpu{gpu}/gi{instance}/access {minor}");
            for compute in 0..COMPUTES {
                let minor = minor + 1 + compute;
                let _ = writeln!(text, "gpu{gpu}/gi{instance}/ci{compute}/access {minor}");
            }
        }
        fs::create_dir_all(minors.with_file_name(""))?;
        write(&minors, &text)?;
    }
    let devices = proc_root.join("devices");
    let line = format!("{MAJOR} nvidia-caps\n");
    match fs::read_to_string(&devices) {
        Ok(text) if text.contains(&line) => Ok(()),
        Ok(text) => write(&devices, &format!("{text}{line}")),
        Err(_) => {
            write(&devices, &format!("Character devices:\n195 nvidia\n511 nvidia-uvm\n{line}"))
        }
    }
}

fn write(file: &Path, text: &str) -> io::Result<()> {
    if fs::read_to_string(file).is_ok_and(|known| known == text) {
        return Ok(());
    }
    let next = file.with_extension("next");
    fs::write(&next, text)?;
    fs::rename(next, file)
}
