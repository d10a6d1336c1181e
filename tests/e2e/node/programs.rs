//! What a node needs that this machine may not have: root, containerd, runc, a static shell; and
//! NVIDIA's container toolkit, which is built from its Go module.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::toolkit::Release;
use crate::binaries;
use crate::clock;

/// The programs of a node.
#[derive(Debug, Clone)]
pub(crate) struct Programs {
    /// kubelet.
    pub(crate) kubelet: PathBuf,
    /// containerd; `ctr` and the shim are found beside it by name.
    pub(crate) containerd: PathBuf,
    /// runc.
    pub(crate) runc: PathBuf,
    /// A busybox that needs no library.
    pub(crate) busybox: PathBuf,
}

/// Finds or builds the programs. The error says why the tests must be skipped.
pub(crate) fn find() -> Result<Programs, String> {
    let user = said_by(Command::new("id").arg("-u"))?;
    if user != "0" {
        return Err("containers are started by root alone, and this is another user".to_owned());
    }
    for program in ["unshare", "nsenter", "ctr", "containerd-shim-runc-v2"] {
        on_path(program)?;
    }
    let containerd = on_path("containerd")?;
    let runc = on_path("runc")?;
    let busybox = on_path("busybox")?;
    if !is_static(&busybox) {
        let path = busybox.display();
        return Err(format!("{path} needs libraries; Debian has one without as busybox-static"));
    }
    Ok(Programs { kubelet: binaries::kubelet()?, containerd, runc, busybox })
}

/// Builds NVIDIA's container toolkit unless the cache has it. Returns its folder.
pub(crate) fn toolkit() -> Result<PathBuf, String> {
    let release = Release::wanted();
    let (version, programs) = (format!("v{}", release.version), release.programs());
    let folder = binaries::cache()?.join(format!("nvidia-container-toolkit-{version}"));
    if programs.iter().all(|program| folder.join(program).is_file()) {
        return Ok(folder);
    }
    binaries::say("building NVIDIA's container toolkit, once: a minute or two on two cores");
    let module = "github.com/NVIDIA/nvidia-container-toolkit/cmd";
    let mut build = Command::new("go");
    build.arg("install");
    build.args(programs.iter().map(|program| format!("{module}/{program}@{version}")));
    build.env("GOBIN", &folder).env("CGO_ENABLED", "1");
    // It warns of deprecated functions at length; that is shown only with an error.
    said_by(&mut build)?;
    Ok(folder)
}

/// The file that the shell would start.
pub(crate) fn on_path(program: &str) -> Result<PathBuf, String> {
    let path = clock::path_variable("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(program));
    found
        .into_iter()
        .find(|file| file.is_file())
        .ok_or_else(|| format!("`{program}` is not installed"))
}

/// Whether the program names no loader: an ELF file without the segment `PT_INTERP` has no such text.
fn is_static(program: &Path) -> bool {
    let bytes = std::fs::read(program).unwrap_or_default();
    let loader = b"/ld-linux";
    !bytes.windows(loader.len()).any(|part| part == loader)
}

/// What a command prints; the error has its last words.
pub(crate) fn said_by(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output =
        command.output().map_err(|error| format!("`{name}` cannot be started: {error}"))?;
    match output {
        Output { status, stdout, .. } if status.success() => {
            Ok(String::from_utf8_lossy(&stdout).trim().to_owned())
        }
        Output { status, stderr, .. } => {
            let text = String::from_utf8_lossy(&stderr);
            let lines: Vec<&str> = text.lines().rev().take(3).collect();
            let last: Vec<&str> = lines.into_iter().rev().collect();
            Err(format!("`{name}` failed ({status}): {}", last.join(" / ")))
        }
    }
}
