//! The kernel's list of the MIG instances of a node: `/proc/driver/nvidia/capabilities` of the host.
//!
//! The driver shows a folder `gpu<minor>/mig/gi<id>` there for each GPU instance, with a folder `ci<id>` for each of its
//! compute instances. Everybody may read it, whatever the library lets a process see. In a container it may be another
//! folder: NVIDIA's legacy runtime puts an empty file system over `/proc/driver/nvidia`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Most entries of a folder that are read; a GPU has at most 15 GPU instances.
const MAX_ENTRIES: usize = 256;

/// GPU instances that have a compute instance, by the minor number of their GPU. Others are no MIG devices yet.
pub(crate) type ListedInstances = BTreeMap<u32, BTreeSet<u32>>;

/// The instances of all GPUs; `None` if there is no list.
pub(crate) fn all(capabilities: &Path) -> Option<ListedInstances> {
    let gpus = numbered(capabilities, "gpu")?;
    Some(gpus.into_iter().filter_map(|gpu| Some((gpu, of_gpu(capabilities, gpu)?))).collect())
}

/// The instances of the GPU with this minor number; `None` if it is not in the list.
pub(crate) fn of_gpu(capabilities: &Path, minor: u32) -> Option<BTreeSet<u32>> {
    let folder = capabilities.join(format!("gpu{minor}/mig"));
    let instances = numbered(&folder, "gi")?;
    let has_compute = |id: &u32| {
        let computes = numbered(&folder.join(format!("gi{id}")), "ci");
        computes.is_some_and(|computes| !computes.is_empty())
    };
    Some(instances.into_iter().filter(has_compute).collect())
}

/// The numbers of the entries whose names are `prefix` and a number; `None` if the folder cannot be read.
fn numbered(folder: &Path, prefix: &str) -> Option<BTreeSet<u32>> {
    let entries = std::fs::read_dir(folder).ok()?.take(MAX_ENTRIES);
    let number = |name: &str| name.strip_prefix(prefix)?.parse().ok();
    Some(entries.filter_map(|entry| number(entry.ok()?.file_name().to_str()?)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_instances_with_a_compute_instance_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(all(&folder.path().join("none")), None);
        for path in ["mig", "gpu0/mig", "gpu3/mig/gi1/ci0", "gpu3/mig/gi12/ci1", "gpu3/mig/gi2"] {
            std::fs::create_dir_all(folder.path().join(path)).unwrap();
        }
        std::fs::create_dir_all(folder.path().join("gpu3/mig/gix/ci0")).unwrap();
        let expected = [(0, BTreeSet::new()), (3, BTreeSet::from([1, 12]))];
        assert_eq!(all(folder.path()), Some(expected.into()));
        assert_eq!(of_gpu(folder.path(), 1), None);
    }
}
