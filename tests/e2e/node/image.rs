//! Images without a registry, written by the code that writes those of gpupack.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::driver::VERSION;
use super::programs::said_by;
use crate::oci::{About, Layer, Layout, Packing};
use crate::tree::{Tree, TreeError};

/// The image of ordinary containers, and of the containers that hold a pod's namespaces.
pub(crate) const BOX: &str = "docker.io/local/box:1";

/// The same, and it requests every GPU, as CUDA images do.
pub(crate) const CUDA: &str = "docker.io/local/cuda:1";

/// Commands of busybox that containers use.
const COMMANDS: [&str; 8] = ["cat", "grep", "ls", "mknod", "sh", "sleep", "tr", "rm"];

/// What a container prints about itself, in one line, before it sleeps forever: its variables,
/// how many of the driver's libraries and which device nodes it has, and the minor numbers of NVIDIA's devices that it may open. The last
/// is tried on nodes made here: making one is allowed, opening it is up to the control group. The same of the nodes of
/// MIG instances, where it has any; their numbers are those of [`super::driver::CAPS`].
const TELL: &str = r#"#!/bin/sh
open=""
for minor in 0 1 2 3 4 5 6 7; do
    mknod /node$minor c 195 $minor
    said=$(cat /node$minor 2>&1 >/dev/null </dev/null)
    rm /node$minor
    case "$said" in *"not permitted"*) ;; *) open="$open $minor" ;; esac
done
caps=$(cd /dev/nvidia-caps 2>/dev/null && ls | tr '\n' ' ')
rights=""
[ -z "$caps" ] || for gpu in 1 3; do for instance in 1 2 3 4 5 6 7; do for compute in 0 1; do
    minor=$gpu$instance$compute
    mknod /cap c 505 $minor
    said=$(cat /cap 2>&1 >/dev/null </dev/null)
    rm /cap
    case "$said" in *"not permitted"*) ;; *) rights="$rights nvidia-cap$minor" ;; esac
done; done; done
libraries=$(grep -cE '/(libcuda|libnvidia-ml)\.so' /proc/self/mountinfo)
nodes=$(cd /dev && ls -d nvidia* 2>/dev/null | tr '\n' ' ')
echo "tell|devices=$NVIDIA_VISIBLE_DEVICES|uuids=$GPUPACK_DEVICE_UUIDS|mib=$GPUPACK_MEMORY_MIB|limit=$NVIDIA_GPU_MEMORY_LIMIT|libraries=$libraries|nodes=${nodes% }|open=${open# }|caps=${caps% }|rights=${rights# }"
[ "$1" = once ] || exec sleep 1000000
"#;

/// Writes one archive with both images. Returns its path.
pub(crate) fn write(work: &Path, busybox: &Path) -> Result<PathBuf, String> {
    let busybox = std::fs::read(busybox).map_err(|error| format!("no busybox: {error}"))?;
    let files = files(&busybox).map_err(|error| format!("cannot make the image: {error}"))?;
    let said = |error: std::io::Error| format!("cannot write the image: {error}");
    // For containers that are started without an image.
    let packed = files.to_tar(0).map_err(said)?;
    let mut unpacked = tar::Archive::new(packed.as_slice());
    unpacked.unpack(root(work)).map_err(said)?;
    let mut layout = Layout::default();
    let layers = [Layer::new(&files, 0, Packing::Plain).map_err(said)?];
    for (name, variables) in [(BOX, vec![]), (CUDA, vec!["NVIDIA_VISIBLE_DEVICES=all"])] {
        let mut env = vec!["PATH=/bin"];
        env.extend(variables);
        let config = json!({"Env": env, "Cmd": ["/bin/sleep", "1000000"]});
        let about = About { architecture: architecture(), created: None, config };
        layout.add_image(name, &layers, &about);
    }
    archive(layout, &work.join("image/images.tar"))
}

fn files(busybox: &[u8]) -> Result<Tree, TreeError> {
    let mut files = Tree::default();
    files.add_file("bin/busybox", 0o755, busybox)?;
    for command in COMMANDS {
        files.add_link(&format!("bin/{command}"), "busybox")?;
    }
    files.add_file("bin/tell", 0o755, TELL.as_bytes())?;
    files.add_folder("etc", 0o755)?;
    files.add_folder("tmp", 0o755)?;
    Ok(files)
}

/// The files of the image's root, for containers that are started without an image.
pub(crate) fn root(work: &Path) -> PathBuf {
    work.join("image/root")
}

/// Writes an archive with one program of this machine and its libraries, under the name of an image.
pub(crate) fn write_program(work: &Path, program: &Path, name: &str) -> Result<PathBuf, String> {
    let mut files = Tree::default();
    let mut add = |path: &str, file: &Path| {
        let bytes = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
        files.add_file(path, 0o755, &bytes).map_err(|error| error.to_string())
    };
    let called = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    add(&format!("usr/local/bin/{called}"), program)?;
    let libraries = said_by(Command::new("ldd").arg(program)).unwrap_or_default(); // a static one
    for path in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        add(path.trim_start_matches('/'), Path::new(path))?;
    }
    files.add_folder("tmp", 0o1777).map_err(|error| error.to_string())?;
    // `ldconfig` makes this link in a container by the name in NVIDIA's library; the stand-in has none.
    let library = format!("/usr/lib64/libnvidia-ml.so.{VERSION}");
    files.add_link("usr/lib/libnvidia-ml.so.1", &library).map_err(|error| error.to_string())?;
    let layer = Layer::new(&files, 0, Packing::Plain);
    let layer = layer.map_err(|error| format!("cannot write {name}: {error}"))?;
    let config = json!({"Env": ["PATH=/usr/local/bin"], "Entrypoint": [called]});
    let mut layout = Layout::default();
    layout.add_image(
        name,
        &[layer],
        &About { architecture: architecture(), created: None, config },
    );
    archive(layout, &work.join(format!("{called}.tar")))
}

fn architecture() -> &'static str {
    if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }
}

fn archive(layout: Layout, file: &Path) -> Result<PathBuf, String> {
    let files = layout.into_files().map_err(|error| format!("no layout: {error}"))?;
    let packed = files.to_tar(0).and_then(|bytes| std::fs::write(file, bytes));
    packed.map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    Ok(file.to_owned())
}
