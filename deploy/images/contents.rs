//! What lies in the images, and what they say about themselves.

use anyhow::Result;
use serde_json::{Value, json};

use crate::debian::Architecture;
use crate::tree::Tree;

/// Where licenses and the bill of materials are.
pub(crate) const PAPERS: &str = "usr/share/doc/gpupack";

/// The user of the images. Nothing in them belongs to it.
const USER: u32 = 65532;

/// One of the two images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Image {
    /// For `gpupack extender`, `webhook`, and the commands for people. No shell.
    Extender,
    /// For `gpupack-agent`.
    Agent,
}

impl Image {
    pub(crate) const ALL: [Self; 2] = [Self::Extender, Self::Agent];

    /// The last part of its name in a registry, which is also the name of its program.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Extender => "gpupack",
            Self::Agent => "gpupack-agent",
        }
    }

    /// Where its program is.
    pub(crate) fn program(self) -> String {
        format!("usr/local/bin/{}", self.name())
    }

    /// Crates of ours, and all that only they need, that its program does not have.
    pub(crate) fn lacks(self) -> &'static [&'static str] {
        match self {
            Self::Extender => &[],
            Self::Agent => &["gpupack-cli", "gpupack-kube-api"],
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::Extender => "gpupack: extender, webhook and command line",
            Self::Agent => "gpupack: agent, which reports the GPUs of a node",
        }
    }

    /// Packages of Debian that it has files of. `gcc-12-base` has the license of `libgcc-s1`, and
    /// `base-files` the name of the release, by which scanners know where to look, and the GNU licenses.
    pub(crate) fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Extender => &["base-files", "gcc-12-base", "libc6", "libgcc-s1"],
            // For the scripts that wait for a toolkit, and prepare a node for MPS.
            Self::Agent => &["base-files", "busybox-static", "gcc-12-base", "libc6", "libgcc-s1"],
        }
    }

    /// Whether it has this file of the package. Of documentation, all have the licenses alone.
    pub(crate) fn wants(self, package: &str, path: &str, architecture: Architecture) -> bool {
        if path.starts_with("usr/share/") {
            let name = path.rsplit('/').next().unwrap_or_default();
            let is_license = path.starts_with("usr/share/doc/") && name == "copyright";
            let is_of_package = path == format!("usr/share/doc/{package}");
            return is_license || is_of_package || path.starts_with("usr/share/common-licenses/");
        }
        match (self, package) {
            (_, "base-files") => ["usr/lib/os-release", "etc/debian_version"].contains(&path),
            // The driver's libraries may take any part of the C library.
            (Self::Agent, "libc6") | (_, "libgcc-s1") => true,
            (Self::Extender, "libc6") => {
                let (loader, link) = architecture.loader();
                let library = path.strip_prefix(&format!("usr/lib/{}/", architecture.triplet()));
                library.is_some_and(|name| [loader, "libc.so.6", "libm.so.6"].contains(&name))
                    || path == link
            }
            (Self::Agent, "busybox-static") => path == "usr/bin/busybox",
            _ => false,
        }
    }

    /// Adds what is in no package.
    pub(crate) fn complete(self, tree: &mut Tree) -> Result<()> {
        tree.add_folder("tmp", 0o1777)?;
        for folder in ["dev", "proc", "run", "sys"] {
            tree.add_folder(folder, 0o755)?;
        }
        tree.add_link("etc/os-release", "../usr/lib/os-release")?;
        let users =
            format!("root:x:0:0:root:/:/sbin/nologin\ngpupack:x:{USER}:{USER}::/:/sbin/nologin\n");
        tree.add_file("etc/passwd", 0o644, users.as_bytes())?;
        tree.add_file("etc/group", 0o644, format!("root:x:0:\ngpupack:x:{USER}:\n").as_bytes())?;
        tree.add_file("etc/nsswitch.conf", 0o644, b"hosts: files dns\n")?;
        if self == Self::Agent {
            // NVIDIA's runtime adds the driver's folder to those that this file includes.
            tree.add_file("etc/ld.so.conf", 0o644, b"include /etc/ld.so.conf.d/*.conf\n")?;
            for command in ["mkdir", "mount", "mountpoint", "sh", "sleep"] {
                tree.add_link(&format!("usr/bin/{command}"), "busybox")?;
            }
        }
        Ok(())
    }

    /// What a container runtime and people read. `revision` is the commit, if it is known.
    pub(crate) fn config(self, version: &str, created: &str, revision: Option<&str>) -> Value {
        let mut labels = json!({
            "org.opencontainers.image.title": self.name(),
            "org.opencontainers.image.description": self.description(),
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.created": created,
            "org.opencontainers.image.licenses": "Apache-2.0",
        });
        if let Some(revision) = revision {
            labels["org.opencontainers.image.revision"] = revision.into();
        }
        json!({
            "User": format!("{USER}:{USER}"), "WorkingDir": "/",
            "Env": ["PATH=/usr/local/bin:/usr/bin"],
            "Entrypoint": [format!("/{}", self.program())], "Labels": labels,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON: Architecture = Architecture::Amd64;

    #[test]
    fn the_image_of_the_extender_has_no_shell_and_few_libraries() {
        let wants = |package: &str, path: &str| Image::Extender.wants(package, path, ON);
        assert!(wants("libc6", "usr/lib/x86_64-linux-gnu/libc.so.6"));
        assert!(wants("libc6", "usr/lib64/ld-linux-x86-64.so.2"));
        assert!(wants("libgcc-s1", "usr/lib/x86_64-linux-gnu/libgcc_s.so.1"));
        for path in
            ["usr/lib/x86_64-linux-gnu/gconv/UTF-16.so", "usr/lib/x86_64-linux-gnu/libnsl.so.1"]
        {
            assert!(!wants("libc6", path) && Image::Agent.wants("libc6", path, ON), "{path}");
        }
        assert!(!Image::Extender.packages().contains(&"busybox-static"));
        let mut tree = Tree::default();
        Image::Extender.complete(&mut tree).unwrap();
        assert!(!tree.paths().any(|path| path.starts_with("usr/bin")), "{tree:?}");
    }

    #[test]
    fn licenses_are_kept_and_other_documentation_is_not() {
        for image in Image::ALL {
            for package in image.packages() {
                assert!(image.wants(package, &format!("usr/share/doc/{package}/copyright"), ON));
                assert!(!image.wants(
                    package,
                    &format!("usr/share/doc/{package}/changelog.gz"),
                    ON
                ));
            }
            assert!(image.wants("base-files", "usr/share/common-licenses/GPL-3", ON));
            assert!(
                image.wants("libgcc-s1", "usr/share/doc/libgcc-s1", ON),
                "a link to gcc-12-base"
            );
            let config = image.config("1", "x", None);
            assert_eq!(config["User"], "65532:65532");
            assert_eq!(config["Entrypoint"], json!([format!("/usr/local/bin/{}", image.name())]));
        }
    }
}
