//! Whether this process may make MIG instances, as far as files of the driver tell. NVML says so only when it is asked
//! to make one.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::mig::device_nodes::minor_number;

/// The driver's file of the right, below the process table.
const CONFIG: &str = "driver/nvidia/capabilities/mig/config";

/// Folder of the device files of rights.
pub(crate) const DEVICES: &str = "/dev/nvidia-caps";

/// Most bytes of the file that are read; it has about 60.
const MAX_BYTES: u64 = 4_096;

/// Why the right is missing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MissingRight {
    /// NVIDIA's runtime hides the files of rights that a container does not have.
    #[error("`/proc/{CONFIG}` cannot be read ({0})")]
    Hidden(io::ErrorKind),
    #[error("`{}` may not be opened", .0.display())]
    Denied(PathBuf),
}

/// Checks that the files of the right can be opened. `devices` is the folder of the device files.
///
/// A device file that is not there is no sign: NVIDIA's library makes it.
pub(crate) fn check(proc_root: &Path, devices: &Path) -> Result<(), MissingRight> {
    let hidden = |error: io::Error| MissingRight::Hidden(error.kind());
    let file = File::open(proc_root.join(CONFIG)).map_err(hidden)?;
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).map_err(hidden)?;
    let Some(minor) = minor_number(&text) else { return Ok(()) };
    let device = devices.join(format!("nvidia-cap{minor}"));
    match File::open(&device) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(MissingRight::Denied(device))
        }
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_is_missing_where_the_runtime_hides_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let checked = || check(folder.path(), folder.path()).map_err(|error| error.to_string());
        assert!(checked().unwrap_err().contains("mig/config` cannot be read (entity not found)"));
        let file = folder.path().join(CONFIG);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        for text in ["", "DeviceFileMinor: x\n", "DeviceFileMinor: 1\nDeviceFileMode: 256\n"] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(checked(), Ok(()), "{text}");
        }
        std::fs::write(&file, b"\xff").unwrap();
        assert!(checked().is_err());
    }
}
