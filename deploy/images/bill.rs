//! What an image is made of: the crates in the program and the packages of Debian, as an SPDX 2.3
//! document, and the licenses of the crates with their texts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::contents::Image;
use crate::debian::{Architecture, Package, output};
use crate::oci::sha256;

/// Beginnings of names of files with licenses, in capitals.
const LICENSES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// What `cargo metadata` prints, as far as it matters.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Crate>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    root: String,
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Debug, Deserialize)]
struct Kind {
    kind: Option<String>,
}

/// A crate in the program, or one that takes part in its build.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Crate {
    id: String,
    /// Name of the package.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    license: Option<String>,
    repository: Option<String>,
    manifest_path: PathBuf,
    source: Option<String>,
}

/// The crates of the program of an image, for this machine, sorted. The first is gpupack, which stands for
/// all of its own. Crates of the tests are not among them.
pub(crate) fn crates(
    manifest: &Path,
    architecture: Architecture,
    image: Image,
) -> Result<Vec<Crate>> {
    let mut cargo = Command::new("cargo");
    cargo.args(["metadata", "--format-version=1", "--locked"]);
    cargo.args(["--filter-platform", architecture.target(), "--manifest-path"]).arg(manifest);
    let metadata: Metadata =
        serde_json::from_slice(&output(&mut cargo)?).context("cargo metadata")?;
    Ok(reached(metadata, image))
}

fn reached(metadata: Metadata, image: Image) -> Vec<Crate> {
    let nodes: BTreeMap<&str, &Node> =
        metadata.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
    let is_built = |dependency: &&Dependency| {
        dependency.dep_kinds.iter().any(|kind| kind.kind.as_deref() != Some("dev"))
    };
    let is_left_out = |it: &&Crate| image.lacks().contains(&it.name.as_str());
    let mut found: BTreeSet<&str> =
        metadata.packages.iter().filter(is_left_out).map(|it| it.id.as_str()).collect();
    let mut next = vec![metadata.resolve.root.as_str()];
    while let Some(id) = next.pop() {
        if found.insert(id) {
            let of_node = nodes.get(id).into_iter().flat_map(|node| &node.deps);
            next.extend(of_node.filter(is_built).map(|dependency| dependency.pkg.as_str()));
        }
    }
    let root = metadata.resolve.root.as_str();
    let is_listed =
        |it: &&Crate| it.id == root || it.source.is_some() && found.contains(it.id.as_str());
    let mut crates: Vec<Crate> = metadata.packages.iter().filter(is_listed).cloned().collect();
    crates.sort_by_key(|it| (it.id != root, it.name.clone(), it.version.clone()));
    for own in crates.iter_mut().filter(|it| it.id == root) {
        own.name = image.name().to_owned();
    }
    crates
}

/// Checksums of `Cargo.lock`, by name and version.
pub(crate) fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let value = |block: &str, key: &str| {
        let mut lines = block.lines().filter_map(|line| line.split_once(" = "));
        let found = lines.find(|(name, _)| *name == key);
        found.map(|(_, value)| value.trim_matches('"').to_owned())
    };
    let blocks = lock.split("[[package]]").skip(1);
    let of_block = |block| {
        Some(((value(block, "name")?, value(block, "version")?), value(block, "checksum")?))
    };
    blocks.filter_map(of_block).collect()
}

/// Who made an image of what, and when.
pub(crate) struct Bill<'a> {
    /// Full name of the image.
    pub(crate) image: &'a str,
    /// RFC 3339.
    pub(crate) created: &'a str,
    /// The program in it.
    pub(crate) program: &'a [u8],
    /// Its crates.
    pub(crate) crates: &'a [Crate],
    /// Of `Cargo.lock`.
    pub(crate) checksums: &'a BTreeMap<(String, String), String>,
    /// Packages of Debian.
    pub(crate) packages: &'a [&'a Package],
}

/// The SPDX document of an image.
pub(crate) fn spdx(bill: &Bill<'_>) -> Value {
    let program = sha256(bill.program);
    let mut packages = Vec::new();
    let mut relations = vec![
        json!({"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-image"}),
    ];
    let (name, version) = bill.image.rsplit_once(':').unwrap_or((bill.image, ""));
    packages.push(json!({
        "SPDXID": "SPDXRef-image", "name": name, "versionInfo": version, "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false, "primaryPackagePurpose": "CONTAINER", "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION", "copyrightText": "NOASSERTION",
    }));
    let parts = bill.crates.iter().map(|it| of_crate(it, bill, &program));
    for part in parts.chain(bill.packages.iter().map(|package| of_package(package))) {
        relations.push(json!({"spdxElementId": "SPDXRef-image", "relationshipType": "CONTAINS", "relatedSpdxElement": part["SPDXID"]}));
        packages.push(part);
    }
    json!({
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": bill.image,
        "documentNamespace": format!("https://gpupack.dev/spdx/{name}/{version}/{program}"),
        "creationInfo": {"created": bill.created, "creators": ["Tool: gpupack-images"]},
        "packages": packages, "relationships": relations,
    })
}

fn of_crate(it: &Crate, bill: &Bill<'_>, program: &str) -> Value {
    let id = format!("SPDXRef-crate-{}-{}", it.name, it.version).replace(['_', '+'], "-");
    let key = (it.name.clone(), it.version.clone());
    let checksum = match bill.checksums.get(&key) {
        Some(checksum) if it.source.is_some() => checksum.as_str(),
        // gpupack itself: what is known of it is the program.
        _ => program,
    };
    let mut part = json!({
        "SPDXID": id, "name": it.name, "versionInfo": it.version,
        "downloadLocation": "NOASSERTION", "filesAnalyzed": false, "licenseConcluded": "NOASSERTION",
        "licenseDeclared": it.license.as_deref().map_or("NOASSERTION".to_owned(), expression),
        "copyrightText": "NOASSERTION",
        "checksums": [{"algorithm": "SHA256", "checksumValue": checksum}],
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                          "referenceLocator": format!("pkg:cargo/{}@{}", it.name, it.version)}],
    });
    if let Some(repository) = &it.repository {
        part["homepage"] = repository.as_str().into();
    }
    part
}

/// `MIT/Apache-2.0`, as old crates write it, in the words of SPDX.
fn expression(license: &str) -> String {
    license.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ")
}

fn of_package(package: &Package) -> Value {
    let (name, version) = (&package.name, &package.version);
    let architecture = package.architecture.name();
    let purl = format!("pkg:deb/debian/{name}@{}?arch={architecture}", version.replace('+', "%2B"));
    json!({
        "SPDXID": format!("SPDXRef-deb-{name}"), "name": name, "versionInfo": version,
        "supplier": "Organization: Debian", "downloadLocation": "NOASSERTION", "filesAnalyzed": false,
        "sourceInfo": format!("built from the source package {}", package.source),
        "licenseConcluded": "NOASSERTION", "licenseDeclared": "NOASSERTION",
        "licenseComments": format!("/usr/share/doc/{name}/copyright in the image"),
        "copyrightText": "NOASSERTION",
        "checksums": [{"algorithm": "SHA256", "checksumValue": package.sha256}],
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                          "referenceLocator": purl}],
    })
}

/// The licenses of all crates: a list, then each text once with the crates that come with it.
pub(crate) fn licenses(crates: &[Crate]) -> Result<String> {
    let mut list = "The program contains these crates.\n\n".to_owned();
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for it in crates {
        let license = it.license.as_deref().unwrap_or("see its texts below");
        let name = format!("{} {}", it.name, it.version);
        let _infallible = writeln!(list, "{name}: {license}");
        let folder = it.manifest_path.parent().context("a manifest lies in a folder")?;
        for text in license_texts(folder)? {
            texts.entry(text).or_default().insert(name.clone());
        }
    }
    for (text, names) in texts {
        let names: Vec<String> = names.into_iter().collect();
        let line = "=".repeat(80);
        let _infallible = write!(list, "\n{line}\n{}\n{line}\n\n{text}\n", names.join(", "));
    }
    Ok(list)
}

fn license_texts(folder: &Path) -> Result<BTreeSet<String>> {
    let mut texts = BTreeSet::new();
    let entries = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_file() && LICENSES.iter().any(|start| name.starts_with(start)) {
            let text = String::from_utf8_lossy(&fs::read(&path)?).replace("\r\n", "\n");
            texts.insert(text.trim_end().to_owned());
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_of_the_tests_are_not_in_the_program() {
        let dependency =
            |on: &str, kind: Option<&str>| json!({"pkg": on, "dep_kinds": [{"kind": kind}]});
        let package = |id: &str| {
            json!({"id": id, "name": id, "version": "1", "license": null, "repository": null, "manifest_path": "/",
            "source": (!id.starts_with("gpupack")).then_some("registry")})
        };
        let packages = ["gpupack", "gpupack-cli", "used", "deep", "built", "tested"].map(package);
        let metadata = json!({
            "packages": packages,
            "resolve": {"root": "gpupack", "nodes": [
                {"id": "gpupack", "deps": [dependency("gpupack-cli", None), dependency("tested", Some("dev")), dependency("built", Some("build"))]},
                {"id": "gpupack-cli", "deps": [dependency("used", None)]},
                {"id": "used", "deps": [dependency("deep", None)]},
                {"id": "deep", "deps": []}, {"id": "built", "deps": []},
                {"id": "tested", "deps": []},
            ]},
        });
        let names = |image| -> Vec<String> {
            let crates = reached(serde_json::from_value(metadata.clone()).unwrap(), image);
            crates.into_iter().map(|it| it.name).collect()
        };
        assert_eq!(names(Image::Extender), ["gpupack", "built", "deep", "used"]);
        assert_eq!(names(Image::Agent), ["gpupack-agent", "built"], "without the command line");
    }

    #[test]
    fn checksums_are_those_of_the_lock_file() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0\"\nchecksum = \"12\"\n\n\
                    [[package]]\nname = \"b\"\nversion = \"2.0\"\ndependencies = [\n \"a\",\n]\n";
        let found: Vec<_> = checksums(lock).into_iter().collect();
        assert_eq!(found, [(("a".to_owned(), "1.0".to_owned()), "12".to_owned())]);
    }

    #[test]
    fn old_license_texts_become_expressions() {
        assert_eq!(expression("MIT/Apache-2.0"), "MIT OR Apache-2.0");
        assert_eq!(expression("MIT OR Apache-2.0"), "MIT OR Apache-2.0");
    }
}
