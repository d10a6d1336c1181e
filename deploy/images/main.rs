//! Builds the images of gpupack, without a container engine and without a base image: one program each, pinned
//! packages of Debian, and a few small files, written as OCI images. The same input gives the same bytes.
//!
//! Run it as `deploy/images/build`, which builds the program first; `docs/images.md` has the rest.

mod bill;
mod contents;
mod debian;
mod oci;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use k8s_openapi::jiff::Timestamp;

use bill::Bill;
use contents::{Image, PAPERS};
use debian::{Architecture, Lock, Package};
use oci::{About, Layer, Layout, Packing};
use tree::Tree;

/// Build the images of gpupack: OCI archives, an OCI layout, and what they are made of
#[derive(Debug, Parser)]
struct Arguments {
    /// Write the images into this folder
    #[arg(long, required_unless_present = "lock")]
    output: Option<PathBuf>,
    /// Folder of the programs, as `cargo build --release` made them; once for each machine
    #[arg(long, default_value = "target/release")]
    programs: Vec<PathBuf>,
    /// Take Debian's packages from this folder, and from nowhere else
    #[arg(long)]
    debs: Option<PathBuf>,
    /// Where the images will lie
    #[arg(long, default_value = "ghcr.io/gpupack")]
    repository: String,
    /// The commit, for a label
    #[arg(long)]
    revision: Option<String>,
    /// The time that images and files get, in seconds since 1970
    #[arg(long, env = "SOURCE_DATE_EPOCH", default_value_t = 0)]
    date: u32,
    /// Leave the layers uncompressed, which is quicker
    #[arg(long)]
    plain: bool,
    /// Only write `deploy/images/lock.yaml`, for what apt offers now
    #[arg(long, conflicts_with = "output")]
    lock: bool,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

const LOCK_HEAD: &str = "\
# Packages of Debian in the images: fetched by name and version, verified by size and SHA-256.
# `deploy/images/build --lock` writes this file; `docs/images.md` says when to run it.
";

/// Everything that the two images of one machine share.
struct Parts<'a> {
    arguments: &'a Arguments,
    root: &'a Path,
    created: String,
    /// Folder of the programs.
    programs: &'a Path,
    architecture: Architecture,
    lock: Lock,
    checksums: BTreeMap<(String, String), String>,
    work: PathBuf,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if arguments.lock { write_lock(root) } else { build(root, &arguments) }
}

fn write_lock(root: &Path) -> Result<()> {
    let file = root.join("deploy/images/lock.yaml");
    let names: BTreeSet<&str> =
        Image::ALL.iter().flat_map(|image| image.packages()).copied().collect();
    let names: Vec<&str> = names.into_iter().collect();
    let lock = debian::lock(&names, Lock::read(&file)?, &root.join("target/images/lock"))?;
    fs::write(&file, format!("{LOCK_HEAD}{}", serde_yaml_ng::to_string(&lock)?))?;
    Ok(())
}

fn build(root: &Path, arguments: &Arguments) -> Result<()> {
    let output = arguments.output.as_ref().context("`--output` names a folder")?;
    fs::create_dir_all(output)?;
    let (mut all, mut machines) = (Layout::default(), Vec::new());
    for programs in &arguments.programs {
        let program = programs.join(Image::Extender.name());
        let architecture = fs::read(&program)
            .map_err(anyhow::Error::new)
            .and_then(|bytes| Architecture::of_program(&bytes))
            .with_context(|| format!("read the program {}", program.display()))?;
        ensure!(!machines.contains(&architecture), "`--programs` names two folders of one machine");
        machines.push(architecture);
        let parts = Parts {
            arguments,
            root,
            created: Timestamp::from_second(arguments.date.into())?.to_string(),
            programs,
            architecture,
            lock: Lock::read(&root.join("deploy/images/lock.yaml"))?,
            checksums: bill::checksums(&fs::read_to_string(root.join("Cargo.lock"))?),
            work: root.join("target/images").join(architecture.name()),
        };
        build_machine(&parts, output, &mut all)?;
    }
    write_folder(&all.into_files()?, &output.join("layout"))
}

/// Writes the images of one machine, and adds them to those of all.
fn build_machine(parts: &Parts<'_>, output: &Path, all: &mut Layout) -> Result<()> {
    for image in Image::ALL {
        let name = format!("{}-{}", image.name(), parts.architecture.name());
        let made = parts.image(image, &output.join(format!("{name}.debug")))?;
        let mut alone = Layout::default();
        let digest = made.add_to(&mut alone, parts);
        made.add_to(all, parts);
        let archive = alone.into_files()?.to_tar(0)?;
        fs::write(output.join(format!("{name}.tar")), &archive)?;
        fs::write(output.join(format!("{name}.spdx.json")), &made.bill)?;
        fs::write(output.join(format!("{name}.licenses.txt")), &made.licenses)?;
        let size = archive.len();
        writeln!(io::stdout(), "{}\n    {name}.tar {size} bytes, {digest}", made.name)?;
    }
    Ok(())
}

/// An image before it is in a layout.
struct Made {
    image: Image,
    name: String,
    layers: [Layer; 2],
    bill: String,
    licenses: String,
}

impl Made {
    /// Returns its digest.
    fn add_to(&self, layout: &mut Layout, parts: &Parts<'_>) -> String {
        let revision = parts.arguments.revision.as_deref();
        let about = About {
            architecture: parts.architecture.name(),
            created: Some(&parts.created),
            config: self.image.config(VERSION, &parts.created, revision),
        };
        layout.add_image(&self.name, &self.layers, &about)
    }
}

impl Parts<'_> {
    /// One layer of Debian, which changes with `lock.yaml` alone, and one of gpupack. The debug information
    /// of its program goes to the file `symbols`.
    fn image(&self, image: Image, symbols: &Path) -> Result<Made> {
        let name = format!("{}/{}:{VERSION}", self.arguments.repository, image.name());
        let packages: Vec<&Package> = image
            .packages()
            .iter()
            .map(|name| self.lock.package(name, self.architecture))
            .collect::<Result<_>>()?;
        let debian = self.debian(image, &packages)?;
        let stripped = self.work.join(image.name());
        let program = self.programs.join(image.name());
        debian::symbols_apart(&program, symbols, &stripped, self.architecture)?;
        if self.architecture.is_here() {
            debian::has_its_libraries(&stripped, &debian, self.architecture, &self.work)?;
        }
        let program = fs::read(&stripped)?;
        let crates = bill::crates(&self.root.join("Cargo.toml"), self.architecture, image)?;
        let bill = bill::spdx(&Bill {
            image: &name,
            created: &self.created,
            program: &program,
            crates: &crates,
            checksums: &self.checksums,
            packages: &packages,
        });
        let bill = format!("{bill:#}\n");
        let licenses = bill::licenses(&crates)?;
        let mut ours = Tree::default();
        for name in ["LICENSE", "NOTICE"] {
            let text = fs::read(self.root.join(name))?;
            ours.add_file(&format!("{PAPERS}/{name}"), 0o644, &text)?;
        }
        ours.add_file(&format!("{PAPERS}/licenses.txt"), 0o644, licenses.as_bytes())?;
        ours.add_file(&image.program(), 0o755, &program)?;
        ours.add_file(&format!("{PAPERS}/sbom.spdx.json"), 0o644, bill.as_bytes())?;
        let date = self.arguments.date.into();
        let packing = if self.arguments.plain { Packing::Plain } else { Packing::Gzip };
        let layers = [Layer::new(&debian, date, packing)?, Layer::new(&ours, date, packing)?];
        Ok(Made { image, name, layers, bill, licenses })
    }

    fn debian(&self, image: Image, packages: &[&Package]) -> Result<Tree> {
        let mut tree = Tree::default();
        tree.merge_usr()?;
        for package in packages {
            let kept = self.work.join("packages");
            let file = package.fetch(self.arguments.debs.as_deref(), &kept)?;
            let name = &package.name;
            tree.add_package(debian::files(&file)?.as_slice(), |path| {
                image.wants(name, path, self.architecture)
            })
            .with_context(|| format!("unpack {name}"))?;
            let status = format!("var/lib/dpkg/status.d/{name}");
            tree.add_file(&status, 0o644, &debian::control(&file)?)?;
        }
        image.complete(&mut tree)?;
        Ok(tree)
    }
}

/// Replaces a folder by these files.
fn write_folder(files: &Tree, folder: &Path) -> Result<()> {
    let is_ours = !folder.exists() || folder.join("oci-layout").is_file();
    ensure!(is_ours, "{} is there, and is no OCI layout: remove it", folder.display());
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    for path in files.paths() {
        let file = folder.join(path);
        fs::create_dir_all(file.parent().context("a file in a folder")?)?;
        fs::write(file, files.file(path).context("a layout has regular files alone")?)?;
    }
    Ok(())
}
