//! What a driver leaves on a node: a folder with its libraries and device nodes. The library is the
//! stand-in for NVML that the agent's tests use, the device nodes lead nowhere.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::cage::Cage;
use super::programs::said_by;
use crate::fleet::FleetGpu;

/// The version it reports: the first branch with memory limits.
pub(crate) const VERSION: &str = "615.43";

/// Minor numbers of the device nodes, by NVML index: deliberately not the index.
pub(crate) const MINORS: [u32; 2] = [3, 1];

/// The model in the tables of the stand-in whose MIG profiles its GPUs have.
pub(crate) const MIG_MODEL: &str = "A100-80";

/// Device nodes that every GPU container gets, with their numbers.
const CONTROL: [(&str, u32, u32); 4] = [
    ("nvidiactl", 195, 255),
    ("nvidia-modeset", 195, 254),
    ("nvidia-uvm", 511, 0),
    ("nvidia-uvm-tools", 511, 1),
];

/// The call that makes a MIG instance, and how long it takes, as on a real GPU, in ms.
pub(crate) const CREATE: (&str, u64) = ("nvmlDeviceCreateGpuInstanceWithPlacement", 150);

/// The driver of one node.
pub(crate) struct Driver {
    root: PathBuf,
    /// Whether the GPUs are in MIG mode.
    mig: bool,
    at_boot: Vec<(&'static str, u32)>,
}

/// The major number of the nodes of MIG instances. The minor number has the digits of GPU and GPU instance, and a 0; that
/// of the compute instance ends with a 1.
pub(crate) const CAPS: u32 = 505;

/// MIG instances as the stand-in has them, by UUID: profile and first unit.
pub(crate) type Instances = BTreeMap<String, (String, u64)>;

impl Driver {
    /// Makes the folder, with these GPUs; `mig` says whether they are in MIG mode, and `at_boot` which instances the
    /// first one has after a boot: profile and start.
    pub(crate) fn new(
        work: &Path,
        gpus: &[FleetGpu],
        (mig, at_boot): (bool, &[(&'static str, u32)]),
    ) -> Result<Self, String> {
        let root = work.join("driver");
        let (libraries, devices) = (root.join("usr/lib64"), root.join("dev"));
        for folder in [&libraries, &devices, &root.join("usr/bin"), &root.join("etc")] {
            std::fs::create_dir_all(folder)
                .map_err(|error| format!("no driver folder: {error}"))?;
        }
        let library = built_library()?;
        for name in ["libnvidia-ml.so", "libcuda.so"] {
            let file = libraries.join(format!("{name}.{VERSION}"));
            std::fs::copy(&library, &file).map_err(|error| format!("no library: {error}"))?;
            let link = libraries.join(format!("{name}.1"));
            let _older = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(format!("{name}.{VERSION}"), &link)
                .map_err(|error| format!("no library: {error}"))?;
        }
        std::fs::write(root.join("usr/bin/nvidia-smi"), "#!/bin/sh\n")
            .map_err(|error| format!("no program: {error}"))?;
        said_by(Command::new("chmod").arg("755").arg(root.join("usr/bin/nvidia-smi")))?;
        let of_gpus = MINORS.map(|minor| (format!("nvidia{minor}"), 195, minor));
        let control = CONTROL.map(|(name, major, minor)| (name.to_owned(), major, minor));
        for (name, major, minor) in of_gpus.into_iter().chain(control) {
            let path = devices.join(name);
            let _older = std::fs::remove_file(&path);
            let numbers = [major, minor].map(|number: u32| number.to_string());
            said_by(Command::new("mknod").args(["-m", "666"]).arg(&path).arg("c").args(numbers))?;
        }
        let driver = Self { root, mig, at_boot: at_boot.to_vec() };
        driver.play(gpus, &[]);
        Ok(driver)
    }

    /// Lets its folder of libraries stand in the place of the machine's, which has the programs' loader.
    pub(crate) fn lead_to_the_loader(&self) -> Result<(), String> {
        let machine =
            std::fs::read_dir("/usr/lib64").map_err(|error| format!("no /usr/lib64: {error}"))?;
        for link in machine.flatten() {
            let target = std::fs::canonicalize(link.path()).map_err(|error| error.to_string())?;
            let here = self.root.join("usr/lib64").join(link.file_name());
            let _older = std::fs::remove_file(&here);
            std::os::unix::fs::symlink(target, here).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Lets the kernel of the cage say which device nodes MIG instances have, and gives the cage a `/dev` of its own:
    /// the agent makes nodes there.
    pub(crate) fn describe_instances(&self, cage: &Cage) -> Result<(), String> {
        let minors = MINORS.map(|minor| minor.to_string()).join(" ");
        cage.said("sh", &["-c", KERNEL_FILES, "kernel", &minors, &CAPS.to_string()]).map(drop)
    }

    /// Its folder.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Whether the GPUs are in MIG mode.
    pub(crate) fn mig(&self) -> bool {
        self.mig
    }

    /// Whether MIG instances are there after a boot.
    pub(crate) fn has_instances(&self) -> bool {
        !self.at_boot.is_empty()
    }

    /// NVML.
    pub(crate) fn library(&self) -> PathBuf {
        self.root.join("usr/lib64/libnvidia-ml.so.1")
    }

    /// Changes the hardware: these GPUs, with these processes (index of the GPU, process, MiB).
    pub(crate) fn play(&self, gpus: &[FleetGpu], processes: &[(usize, u32, u64)]) {
        self.play_those(gpus, processes, |_| true);
    }

    /// Limits of memory that were set, one in a line: UUID, soft and hard limit in bytes, group.
    pub(crate) fn limits(&self) -> String {
        std::fs::read_to_string(self.root.join("usr/lib64/limits")).unwrap_or_default()
    }

    /// What the library keeps about MIG.
    fn kept(&self) -> Value {
        let text = std::fs::read_to_string(self.root.join("usr/lib64/instances.json"));
        serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default()
    }

    /// The MIG instances that are there.
    pub(crate) fn instances(&self) -> Instances {
        instances_of(&self.kept())
    }

    /// The index of its GPU, and the number of a MIG instance there.
    pub(crate) fn numbers(&self, gpus: &[&str], uuid: &str) -> Option<(usize, u64)> {
        let kept = self.kept();
        gpus.iter().enumerate().find_map(|(index, gpu)| {
            let mut there = kept["gpus"][gpu].as_array()?.iter();
            let found = there.find(|it| it["computes"][0]["uuid"] == uuid)?;
            Some((index, found["id"].as_u64()?))
        })
    }

    /// Removes one of the GPUs.
    pub(crate) fn lose(&self, gpus: &[FleetGpu], uuid: &str) {
        self.play_those(gpus, &[], |gpu| gpu.uuid != uuid);
    }

    fn play_those(
        &self,
        gpus: &[FleetGpu],
        processes: &[(usize, u32, u64)],
        is_there: impl Fn(&FleetGpu) -> bool,
    ) {
        let gpu = |(index, gpu): (usize, &FleetGpu)| {
            let here = processes.iter().filter(|(on, ..)| *on == index);
            let here: Vec<Value> = here
                .map(|(_, pid, mib)| json!({"pid": pid, "used_mib": mib, "lists": ["compute"]}))
                .collect();
            let used: u64 = processes.iter().filter(|(on, ..)| *on == index).map(|it| it.2).sum();
            let mut played = json!({
                "uuid": gpu.uuid, "name": gpu.model, "total_mib": gpu.memory_mib,
                "reserved_mib": gpu.reserved_mib, "used_mib": used, "processes": here,
                "minor": MINORS[index], "bus": index + 1, "memory_limits": {},
            });
            if self.mig {
                played["mig"] = json!([]);
                played["mig_model"] = MIG_MODEL.into();
                played["at_boot"] = if index == 0 { json!(self.at_boot) } else { json!([]) };
            }
            played
        };
        let there = gpus.iter().enumerate().filter(|(_, gpu)| is_there(gpu));
        let gpus: Vec<Value> = there.map(gpu).collect();
        let delays: BTreeMap<&str, u64> = [CREATE].into();
        let scenario =
            json!({"driver": VERSION, "cuda": 13_040, "gpus": gpus, "delays_ms": delays});
        let folder = self.root.join("usr/lib64");
        // In one step: the library reads at any time.
        std::fs::write(folder.join("next.json"), scenario.to_string()).expect("a folder of ours");
        let played = std::fs::rename(folder.join("next.json"), folder.join("scenario.json"));
        played.expect("a folder of ours");
        // The runtime mounts it in containers, as it does with every library of this version.
        let mounted = folder.join(format!("libscenario.so.{VERSION}"));
        std::fs::write(mounted, scenario.to_string()).expect("a folder of ours");
    }
}

/// The MIG instances in what the library keeps.
pub(crate) fn instances_of(kept: &Value) -> Instances {
    let gpus = kept["gpus"].as_object().into_iter().flatten();
    let all = gpus.flat_map(|(_, instances)| instances.as_array().into_iter().flatten());
    let named = all.filter_map(|it| {
        let uuid = it["computes"][0]["uuid"].as_str()?.to_owned();
        Some((uuid, (profile(it["profile"].as_u64()?)?, it["start"].as_u64()?)))
    });
    named.collect()
}

/// The name of a profile by its number.
fn profile(id: u64) -> Option<String> {
    let text = include_str!("../../harness/fake_nvml/profiles.json");
    let profiles: Value = serde_json::from_str(text).expect("it is part of the source");
    let mut of_model = profiles[MIG_MODEL].as_array().into_iter().flatten();
    let found = of_model.find(|it| it["id"] == id)?;
    found["name"].as_str().map(str::to_owned)
}

/// The stand-in, as cargo has built it.
pub(crate) fn built_library() -> Result<PathBuf, String> {
    let test = std::env::current_exe().map_err(|error| format!("no path of the test: {error}"))?;
    // `target/debug/deps/e2e-…`
    let library = test.ancestors().nth(2).map(|folder| folder.join("examples/libfake_nvml.so"));
    library.filter(|library| library.is_file()).ok_or_else(|| {
        "the stand-in for NVML is not built; run `cargo build --example fake_nvml` first".to_owned()
    })
}

/// What the module says of all instances that there can be on the GPUs `$1`: files under `/proc`, in the cage alone. As
/// on a node with a driver, `/dev` has no nodes of instances that were made in a container.
const KERNEL_FILES: &str = r#"
set -e
base=/run/nvidia/kernel
mkdir -p $base/new $base/work
for kept in pts shm mqueue; do
    [ -d /dev/$kept ] || continue
    mkdir $base/$kept
    mount --rbind /dev/$kept $base/$kept
done
mount -t overlay overlay -o "lowerdir=/dev,upperdir=$base/new,workdir=$base/work" /dev
for kept in pts shm mqueue; do
    [ -d $base/$kept ] || continue
    mount --rbind $base/$kept /dev/$kept
done
sed "/^Character devices:/a $2 nvidia-caps" /proc/devices >$base/devices
mount --bind $base/devices /proc/devices
mount -t tmpfs tmpfs /proc/driver
mkdir /proc/driver/nvidia-caps
for gpu in $1; do for instance in 1 2 3 4 5 6 7; do
    folder=/proc/driver/nvidia/capabilities/gpu$gpu/mig/gi$instance
    mkdir -p $folder/ci0
    for part in /access.0 /ci0/access.1; do
        minor=$gpu$instance${part##*.}
        printf 'DeviceFileMinor: %s\nDeviceFileMode: 292\nDeviceFileModify: 1\n' $minor >$folder${part%.*}
        echo "gpu$gpu/gi$instance${part%.*} $minor" >>/proc/driver/nvidia-caps/mig-minors
    done
done; done
"#;
