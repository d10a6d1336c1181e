//! Packages of Debian: found by the lock file, verified, unpacked.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::oci::sha256;

/// Machines that images are built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Architecture {
    /// 64-bit x86.
    Amd64,
    /// 64-bit ARM.
    Arm64,
}

impl Architecture {
    /// As Debian and Go call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The folder of its libraries in Debian.
    pub(crate) fn triplet(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-gnu",
            Self::Arm64 => "aarch64-linux-gnu",
        }
    }

    /// As Rust calls it.
    pub(crate) fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// Whether its programs run on this machine.
    pub(crate) fn is_here(self) -> bool {
        self.target().starts_with(std::env::consts::ARCH)
    }

    /// The `objcopy` for its programs.
    fn objcopy(self) -> String {
        if self.is_here() { "objcopy".to_owned() } else { format!("{}-objcopy", self.triplet()) }
    }

    /// The program loader, and where programs look for it.
    pub(crate) fn loader(self) -> (&'static str, &'static str) {
        match self {
            Self::Amd64 => ("ld-linux-x86-64.so.2", "usr/lib64/ld-linux-x86-64.so.2"),
            Self::Arm64 => ("ld-linux-aarch64.so.1", "usr/lib/ld-linux-aarch64.so.1"),
        }
    }

    /// What a program is built for: field `e_machine` of its ELF header.
    pub(crate) fn of_program(bytes: &[u8]) -> Result<Self> {
        ensure!(bytes.get(..6) == Some(b"\x7fELF\x02\x01"), "it is no 64-bit program of Linux");
        match bytes.get(18..20) {
            Some([62, 0]) => Ok(Self::Amd64),
            Some([183, 0]) => Ok(Self::Arm64),
            _ => bail!("it is built for another machine than amd64 and arm64"),
        }
    }
}

/// One pinned package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Package {
    /// Name of the binary package.
    pub(crate) name: String,
    /// Its machine.
    pub(crate) architecture: Architecture,
    /// Debian's version.
    pub(crate) version: String,
    /// The source package, with its version if that differs.
    pub(crate) source: String,
    /// Bytes of the file.
    pub(crate) size: u64,
    /// Of the file, in hexadecimal.
    pub(crate) sha256: String,
}

/// `lock.yaml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lock {
    /// Debian's release, for people.
    pub(crate) release: String,
    /// Sorted by machine and name.
    pub(crate) packages: Vec<Package>,
}

impl Lock {
    /// Reads it.
    pub(crate) fn read(file: &Path) -> Result<Self> {
        let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        serde_yaml_ng::from_str(&text).with_context(|| format!("read {}", file.display()))
    }

    /// The package for this machine.
    pub(crate) fn package(&self, name: &str, architecture: Architecture) -> Result<&Package> {
        let mut all = self.packages.iter();
        let found = all.find(|it| it.name == name && it.architecture == architecture);
        found.with_context(|| {
            let on = architecture.name();
            format!("lock.yaml has no `{name}` for {on}: `dpkg --add-architecture {on}`, `apt-get update` and \
                 `deploy/images/build --lock` add it")
        })
    }
}

impl Package {
    /// Name of its file, as apt writes it.
    fn file_name(&self) -> String {
        let version = self.version.replace(':', "%3a");
        format!("{}_{version}_{}.deb", self.name, self.architecture.name())
    }

    /// The verified file: from `given` if that is a folder of packages, or from apt, which keeps it in
    /// `kept`.
    pub(crate) fn fetch(&self, given: Option<&Path>, kept: &Path) -> Result<PathBuf> {
        let file = given.unwrap_or(kept).join(self.file_name());
        if given.is_none() && !file.is_file() {
            download(
                &format!("{}:{}={}", self.name, self.architecture.name(), self.version),
                kept,
            )?;
        }
        self.verify(&file)?;
        Ok(file)
    }

    /// Whether the file is the one of the lock.
    fn verify(&self, file: &Path) -> Result<()> {
        let size = fs::metadata(file).with_context(|| {
            format!("package {} of lock.yaml is not at {}", self.name, file.display())
        })?;
        let size = size.len();
        ensure!(
            size == self.size,
            "{}: {size} bytes, not the {} of lock.yaml",
            file.display(),
            self.size
        );
        let digest = sha256(&fs::read(file)?);
        ensure!(digest == self.sha256, "{}: its SHA-256 is not that of lock.yaml", file.display());
        Ok(())
    }
}

/// Has apt download one package into a folder.
fn download(wanted: &str, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let mut apt = Command::new("apt-get");
    // Without this option apt warns that its own user may not write there.
    apt.args(["--quiet", "--quiet", "-o", "APT::Sandbox::User=root", "download", wanted]);
    output(apt.current_dir(folder)).with_context(|| {
        format!(
            "fetch {wanted}: run `apt-get update`; if Debian has a newer one, `deploy/images/build --lock` \
             takes that, and `--debs FOLDER` takes files that you kept"
        )
    })?;
    Ok(())
}

/// The lock for what apt offers now on this machine, also for other machines whose packages it knows.
/// Those of the rest stay as they are in `older`.
pub(crate) fn lock(names: &[&str], older: Lock, work: &Path) -> Result<Lock> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let mut packages = older.packages;
    for architecture in known_to_apt()? {
        packages.retain(|package| package.architecture != architecture);
        for name in names {
            packages.push(offered(name, architecture, &work.join(architecture.name()))?);
        }
    }
    packages.sort_by_key(|package| (package.architecture.name(), package.name.clone()));
    Ok(Lock { release: name.unwrap_or(&older.release).to_owned(), packages })
}

/// The machines whose packages apt knows: this one, and those added by `dpkg --add-architecture`.
fn known_to_apt() -> Result<Vec<Architecture>> {
    let here = output(Command::new("dpkg").arg("--print-architecture"))?;
    let others = output(Command::new("dpkg").arg("--print-foreign-architectures"))?;
    let said = String::from_utf8([here, others].concat())?;
    let names = said.split_whitespace();
    Ok([Architecture::Amd64, Architecture::Arm64]
        .into_iter()
        .filter(|known| names.clone().any(|name| name == known.name()))
        .collect())
}

/// The package that apt offers now.
fn offered(name: &str, architecture: Architecture, work: &Path) -> Result<Package> {
    let folder = work.join(name);
    let _older = fs::remove_dir_all(&folder);
    download(&format!("{name}:{}", architecture.name()), &folder)?;
    let file = fs::read_dir(&folder)?.next().context("apt downloads a file")??.path();
    let bytes = fs::read(&file)?;
    let source = field(&file, "Source")?;
    Ok(Package {
        name: name.to_owned(),
        architecture,
        source: if source.is_empty() { name.to_owned() } else { source },
        version: field(&file, "Version")?,
        size: bytes.len() as u64,
        sha256: sha256(&bytes),
    })
}

/// The files of a package, as a tar archive.
pub(crate) fn files(package: &Path) -> Result<Vec<u8>> {
    output(Command::new("dpkg-deb").arg("--fsys-tarfile").arg(package))
}

/// What a package says about itself, for `/var/lib/dpkg/status.d`, where scanners look.
pub(crate) fn control(package: &Path) -> Result<Vec<u8>> {
    output(Command::new("dpkg-deb").arg("--field").arg(package))
}

fn field(package: &Path, name: &str) -> Result<String> {
    let said = output(Command::new("dpkg-deb").arg("--field").arg(package).arg(name))?;
    Ok(String::from_utf8(said)?.trim().to_owned())
}

/// What a command prints. The error has what it complains of.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("start `{name}`"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{name}` failed ({}): {}", output.status, said.trim());
    }
    Ok(output.stdout)
}

/// Takes the debug information of a program apart: into `symbols`, beside a program that names that file.
/// The names of functions stay: a backtrace has them.
pub(crate) fn symbols_apart(
    program: &Path,
    symbols: &Path,
    stripped: &Path,
    architecture: Architecture,
) -> Result<()> {
    let folder = stripped.parent().context("a file lies in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    let objcopy = architecture.objcopy();
    output(Command::new(&objcopy).arg("--only-keep-debug").arg(program).arg(symbols))?;
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(symbols);
    output(Command::new(&objcopy).arg("--strip-debug").arg(link).arg(program).arg(stripped))?;
    Ok(())
}

/// Starts the program of an image with the image's own loader and libraries, as far as to resolve
/// them: a library that is missing, or older than the program needs, is an error here and not on a node.
pub(crate) fn has_its_libraries(
    program: &Path,
    tree: &crate::tree::Tree,
    architecture: Architecture,
    work: &Path,
) -> Result<()> {
    let folder = work.join("libraries");
    let _older = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let libraries = format!("usr/lib/{}/", architecture.triplet());
    for path in tree.paths() {
        let name = path.strip_prefix(&libraries).filter(|name| !name.contains('/'));
        if let (Some(name), Some(bytes)) = (name, tree.file(path)) {
            fs::File::create(folder.join(name))?.write_all(bytes)?;
        }
    }
    let loader = folder.join(architecture.loader().0);
    output(Command::new("chmod").arg("755").arg(&loader))?;
    let mut list = Command::new(&loader);
    list.args(["--inhibit-cache", "--list", "--library-path"]).arg(&folder).arg(program);
    let said = output(&mut list).context("the image lacks what the program needs")?;
    let said = String::from_utf8(said)?;
    for line in said.lines().filter_map(|line| line.split_once(" => ")) {
        let (name, found) = (line.0.trim(), line.1.trim());
        ensure!(
            Path::new(found).starts_with(&folder) || found.starts_with(&*folder.to_string_lossy()),
            "the image lacks `{name}`, which the program needs"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(bytes: &[u8]) -> Package {
        Package {
            name: "x".to_owned(),
            architecture: Architecture::Amd64,
            version: "1:2-3".to_owned(),
            source: "x".to_owned(),
            size: bytes.len() as u64,
            sha256: sha256(bytes),
        }
    }

    #[test]
    fn a_package_that_is_not_the_locked_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let locked = package(b"the package");
        let file = folder.path().join("x_1%3a2-3_amd64.deb");
        let fetched = |text: &[u8]| {
            fs::write(&file, text).unwrap();
            let fetched = locked.fetch(Some(folder.path()), Path::new("unused"));
            fetched.map_or_else(|error| error.to_string(), |file| file.display().to_string())
        };
        assert_eq!(fetched(b"the package"), file.display().to_string());
        assert!(fetched(b"the packagE").contains("SHA-256"));
        assert!(fetched(b"the package and more").contains("bytes"));
        fs::remove_file(&file).unwrap();
        let missing = locked.fetch(Some(folder.path()), Path::new("unused")).unwrap_err();
        assert!(missing.to_string().contains("is not at"), "{missing}");
    }

    #[test]
    fn the_machine_of_a_program_is_read_from_the_program() {
        let here = fs::read(std::env::current_exe().unwrap()).unwrap();
        let expected =
            if cfg!(target_arch = "x86_64") { Architecture::Amd64 } else { Architecture::Arm64 };
        assert_eq!(Architecture::of_program(&here).unwrap(), expected);
        for other in [&b"#!/bin/sh"[..], b"", b"\x7fELF\x02\x01"] {
            assert!(Architecture::of_program(other).is_err());
        }
    }

    #[test]
    fn a_package_that_is_not_locked_for_this_machine_is_an_error() {
        let lock = Lock { release: "x".to_owned(), packages: vec![package(b"")] };
        assert!(lock.package("x", Architecture::Amd64).is_ok());
        let missing = lock.package("x", Architecture::Arm64).unwrap_err().to_string();
        assert!(missing.contains("no `x` for arm64"), "{missing}");
    }
}
