//! The label by which SELinux lets containers use the folders of MPS.
//!
//! A folder that the agent makes under `/run` has a label of the node, which containers may not open: clients would
//! run without MPS, or fail. NVIDIA's device plugin sets the same label (`cmd/mps-control-daemon/mps/daemon.go`).
//! What is made in a labeled folder later inherits its type.

use std::io;
use std::path::Path;

use rustix::fs::{XattrFlags, setxattr};

/// There where the kernel runs SELinux.
pub(crate) const KERNEL: &str = "/sys/fs/selinux";

/// What all containers may read and write.
const LABEL: &str = "system_u:object_r:container_file_t:s0";

/// Labels a folder, if `kernel` is there.
///
/// # Errors
/// The file system or SELinux refuses it.
pub(crate) fn label(folder: &Path, kernel: &Path) -> io::Result<()> {
    if !kernel.exists() {
        return Ok(());
    }
    let labeled = setxattr(folder, "security.selinux", LABEL.as_bytes(), XattrFlags::empty());
    labeled.map_err(|error| {
        let error = io::Error::from(error);
        let text = format!("label {} as {LABEL} for SELinux: {error}", folder.display());
        io::Error::new(error.kind(), text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_labeled_only_where_selinux_runs() {
        let folder = tempfile::tempdir().unwrap();
        let read = || {
            let mut room = [0; 64];
            let read = rustix::fs::getxattr(folder.path(), "security.selinux", &mut room[..]);
            read.map(|length| String::from_utf8_lossy(&room[..length]).into_owned()).ok()
        };
        let before = read();
        label(folder.path(), Path::new("/nowhere")).unwrap();
        assert_eq!(read(), before);
        match label(folder.path(), folder.path()) {
            Ok(()) => assert_eq!(read().as_deref(), Some(LABEL)),
            // Only root may, and not each file system has labels.
            Err(error) => assert!(error.to_string().contains("container_file_t"), "{error}"),
        }
    }
}
