//! Images without a registry: archives in the OCI layout, written here.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::programs::said_by;

/// The image of ordinary containers, and of the containers that hold a pod's namespaces.
pub(crate) const BOX: &str = "docker.io/local/box:1";

/// The same, and it requests every GPU, as CUDA images do.
pub(crate) const CUDA: &str = "docker.io/local/cuda:1";

/// Commands of busybox that containers use.
const COMMANDS: [&str; 8] = ["cat", "grep", "ls", "mknod", "sh", "sleep", "tr", "rm"];

/// What a container prints about itself, in one line, before it sleeps forever: its variables,
/// the device nodes that it has, and the minor numbers of NVIDIA's devices that it may open. The last
/// is tried on nodes made here: making one is allowed, opening it is up to the control group.
const TELL: &str = r#"#!/bin/sh
open=""
for minor in 0 1 2 3 4 5 6 7; do
    mknod /node$minor c 195 $minor
    said=$(cat /node$minor 2>&1 >/dev/null </dev/null)
    rm /node$minor
    case "$said" in *"not permitted"*) ;; *) open="$open $minor" ;; esac
done
nodes=$(cd /dev && ls -d nvidia* 2>/dev/null | tr '\n' ' ')
echo "tell|devices=$NVIDIA_VISIBLE_DEVICES|uuids=$GPUPACK_DEVICE_UUIDS|mib=$GPUPACK_MEMORY_MIB|limit=$NVIDIA_GPU_MEMORY_LIMIT|nodes=${nodes% }|open=${open# }"
[ "$1" = once ] || exec sleep 1000000
"#;

/// Writes one archive with both images. Returns its path.
pub(crate) fn write(work: &Path, busybox: &Path) -> Result<PathBuf, String> {
    let files = work.join("image");
    let said = |error: std::io::Error| format!("cannot write the image: {error}");
    let (bin, layout) = (files.join("root/bin"), files.join("layout"));
    std::fs::create_dir_all(&bin).map_err(said)?;
    std::fs::create_dir_all(layout.join("blobs/sha256")).map_err(said)?;
    std::fs::copy(busybox, bin.join("busybox")).map_err(said)?;
    for command in COMMANDS {
        symlink("busybox", bin.join(command)).map_err(said)?;
    }
    let tell = bin.join("tell");
    std::fs::write(&tell, TELL).map_err(said)?;
    said_by(Command::new("chmod").arg("755").arg(&tell))?;
    for folder in ["etc", "tmp"] {
        std::fs::create_dir_all(files.join("root").join(folder)).map_err(said)?;
    }
    let layer = files.join("layer.tar");
    pack(&files.join("root"), &layer)?;
    let layer = add(&layout, &layer)?;
    let mut manifests = Vec::new();
    for (name, variables) in [(BOX, vec![]), (CUDA, vec!["NVIDIA_VISIBLE_DEVICES=all"])] {
        manifests.push(image(&layout, &layer, name, &variables)?);
    }
    let index = json!({"schemaVersion": 2, "manifests": manifests});
    std::fs::write(layout.join("index.json"), index.to_string()).map_err(said)?;
    std::fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).map_err(said)?;
    let archive = files.join("images.tar");
    pack(&layout, &archive)?;
    Ok(archive)
}

/// The files of the image's root, for containers that are started without an image.
pub(crate) fn root(work: &Path) -> PathBuf {
    work.join("image/root")
}

/// Adds an image of one layer. Returns its entry in the index.
fn image(layout: &Path, layer: &Value, name: &str, variables: &[&str]) -> Result<Value, String> {
    let mut env = vec!["PATH=/bin"];
    env.extend(variables);
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({
        "architecture": architecture, "os": "linux",
        "config": {"Env": env, "Cmd": ["/bin/sleep", "1000000"]},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    });
    let of_type = |mut blob: Value, kind: &str| {
        blob["mediaType"] = format!("application/vnd.oci.image.{kind}").into();
        blob
    };
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": of_type(add_text(layout, &config)?, "config.v1+json"),
        "layers": [of_type(layer.clone(), "layer.v1.tar")],
    });
    let mut entry = of_type(add_text(layout, &manifest)?, "manifest.v1+json");
    entry["annotations"] = json!({"io.containerd.image.name": name});
    Ok(entry)
}

fn pack(folder: &Path, archive: &Path) -> Result<(), String> {
    let mut tar = Command::new("tar");
    tar.args(["--owner=0", "--group=0", "--numeric-owner", "-cf"]).arg(archive);
    said_by(tar.arg("-C").arg(folder).arg(".")).map(drop)
}

fn add_text(layout: &Path, text: &Value) -> Result<Value, String> {
    let file = layout.with_file_name("blob.json");
    std::fs::write(&file, text.to_string()).map_err(|error| format!("no blob: {error}"))?;
    add(layout, &file)
}

/// Adds a file under its digest; answers digest and size.
fn add(layout: &Path, file: &Path) -> Result<Value, String> {
    let said = said_by(Command::new("sha256sum").arg(file))?;
    let digest = said.split(' ').next().unwrap_or_default().to_owned();
    let size = std::fs::copy(file, layout.join("blobs/sha256").join(&digest));
    let size = size.map_err(|error| format!("no blob: {error}"))?;
    Ok(json!({"digest": format!("sha256:{digest}"), "size": size}))
}
