//! Images as the OCI image specification writes them: blobs under their digests, and an index.
//!
//! `serde_json` and four media types are all that this takes of the specification.

use std::collections::BTreeMap;
use std::io::{self, Write};

use flate2::{Compression, GzBuilder};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

use crate::tree::{Tree, TreeError};

/// The operating system byte of a gzip header: unknown, on every machine.
const UNKNOWN_SYSTEM: u8 = 255;

/// `sha256:` is not part of it.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How the files of a layer are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// As tar.
    Plain,
    /// Compressed, too.
    Gzip,
}

impl Packing {
    fn kind(self) -> &'static str {
        match self {
            Self::Plain => "layer.v1.tar",
            Self::Gzip => "layer.v1.tar+gzip",
        }
    }
}

/// Files of an image, packed.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    packed: Vec<u8>,
    packing: Packing,
    /// Digest of the files before they were compressed.
    diff_id: String,
}

impl Layer {
    /// The same files give the same bytes. `modified` is the time of all files, in seconds since 1970.
    pub(crate) fn new(tree: &Tree, modified: u64, packing: Packing) -> io::Result<Self> {
        let files = tree.to_tar(modified)?;
        let diff_id = format!("sha256:{}", sha256(&files));
        if packing == Packing::Plain {
            return Ok(Self { packed: files, packing, diff_id });
        }
        let packed = GzBuilder::new().mtime(0).operating_system(UNKNOWN_SYSTEM);
        let mut packed = packed.write(Vec::new(), Compression::best());
        packed.write_all(&files)?;
        Ok(Self { packed: packed.finish()?, packing, diff_id })
    }
}

/// What an image says about itself.
#[derive(Debug, Default)]
pub(crate) struct About<'a> {
    /// As Go calls it: `amd64`, `arm64`.
    pub(crate) architecture: &'a str,
    /// RFC 3339, if it is said.
    pub(crate) created: Option<&'a str>,
    /// What a runtime takes: keys `User`, `Env`, `Entrypoint`, `Cmd`, `Labels`.
    pub(crate) config: Value,
}

/// Some images that share blobs.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// By digest.
    blobs: BTreeMap<String, Vec<u8>>,
    /// By full name, one for each machine.
    images: BTreeMap<String, Vec<Value>>,
}

impl Layout {
    /// Adds an image under its full name, such as `registry.example/gpupack:1.0`, and returns its digest. Images of
    /// several machines may have one name.
    pub(crate) fn add_image(&mut self, name: &str, layers: &[Layer], about: &About<'_>) -> String {
        let diff_ids: Vec<&String> = layers.iter().map(|layer| &layer.diff_id).collect();
        let mut config = json!({
            "architecture": about.architecture, "os": "linux", "config": about.config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        if let Some(created) = about.created {
            config["created"] = created.into();
        }
        let of_layer = |it: &Layer| self.add_blob(it.packed.clone(), it.packing.kind());
        let blobs: Vec<Value> = layers.iter().map(of_layer).collect();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.add_blob(config.to_string().into_bytes(), "config.v1+json"),
            "layers": blobs,
        });
        let mut entry = self.add_blob(manifest.to_string().into_bytes(), "manifest.v1+json");
        entry["platform"] = json!({"architecture": about.architecture, "os": "linux"});
        let digest = entry["digest"].as_str().unwrap_or_default().to_owned();
        self.images.entry(name.to_owned()).or_default().push(entry);
        digest
    }

    fn add_blob(&mut self, bytes: Vec<u8>, kind: &str) -> Value {
        let name = sha256(&bytes);
        let blob = json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": format!("sha256:{name}"), "size": bytes.len(),
        });
        self.blobs.insert(name, bytes);
        blob
    }

    /// The entry of each name: an image, or an index of those for several machines.
    fn entries(&mut self) -> Vec<Value> {
        let mut entries = Vec::new();
        for (name, mut images) in std::mem::take(&mut self.images) {
            let mut entry = match images.len() {
                1 => images.remove(0),
                _ => self.add_blob(index(images).to_string().into_bytes(), "index.v1+json"),
            };
            let short = name.rsplit('/').next().unwrap_or(&name);
            // The first is read by containerd; the second by skopeo, in a layout with several images.
            entry["annotations"] = json!({
                "io.containerd.image.name": name, "org.opencontainers.image.ref.name": short,
            });
            entries.push(entry);
        }
        entries
    }

    /// The files of the layout.
    pub(crate) fn into_files(mut self) -> Result<Tree, TreeError> {
        let entries = self.entries();
        let mut files = Tree::default();
        for (name, bytes) in &self.blobs {
            files.add_file(&format!("blobs/sha256/{name}"), 0o644, bytes)?;
        }
        files.add_file("index.json", 0o644, index(entries).to_string().as_bytes())?;
        files.add_file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        Ok(files)
    }
}

fn index(manifests: Vec<Value>) -> Value {
    json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        layout_for(&["amd64"])
    }

    fn layout_for(machines: &[&str]) -> Layout {
        let mut files = Tree::default();
        files.add_file("usr/bin/x", 0o755, b"program").unwrap();
        let mut layout = Layout::default();
        let layer = Layer::new(&files, 0, Packing::Gzip).unwrap();
        for architecture in machines {
            let about = About { architecture, created: None, config: json!({"User": "1:1"}) };
            layout.add_image("host:5000/x:1", std::slice::from_ref(&layer), &about);
        }
        layout
    }

    #[test]
    fn an_image_is_the_same_bytes_each_time() {
        let [one, other] = [layout(), layout()].map(|it| it.into_files().unwrap());
        assert_eq!(one, other);
        assert_eq!(one.to_tar(0).unwrap(), other.to_tar(0).unwrap());
    }

    #[test]
    fn each_blob_lies_under_its_digest_and_the_index_leads_to_all() {
        let files = layout().into_files().unwrap();
        let read = |path: &str| -> Value {
            serde_json::from_slice(files.file(path).expect("it is there")).unwrap()
        };
        let blob = |of: &Value| {
            let name = of["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
            let bytes = files.file(&format!("blobs/sha256/{name}")).expect("the blob").to_vec();
            assert_eq!((sha256(&bytes), bytes.len() as u64), (name, of["size"].as_u64().unwrap()));
            bytes
        };
        let entry = &read("index.json")["manifests"][0];
        assert_eq!(entry["annotations"]["io.containerd.image.name"], "host:5000/x:1");
        assert_eq!(entry["annotations"]["org.opencontainers.image.ref.name"], "x:1");
        let manifest: Value = serde_json::from_slice(&blob(entry)).unwrap();
        let config: Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
        assert_eq!(config["config"]["User"], "1:1");
        let mut unpacked = Vec::new();
        let packed = blob(&manifest["layers"][0]);
        assert_eq!(packed[4..8], [0; 4], "no time in the header");
        io::copy(&mut flate2::read::GzDecoder::new(packed.as_slice()), &mut unpacked).unwrap();
        let expected = format!("sha256:{}", sha256(&unpacked));
        assert_eq!(config["rootfs"]["diff_ids"], json!([expected]));
        assert_eq!(files.paths().count(), 5, "three blobs, index and layout");
    }

    #[test]
    fn images_of_two_machines_have_one_name() {
        let files = layout_for(&["amd64", "arm64"]).into_files().unwrap();
        let index: Value = serde_json::from_slice(files.file("index.json").unwrap()).unwrap();
        let [entry] = index["manifests"].as_array().unwrap().as_slice() else { panic!("{index}") };
        assert_eq!(entry["mediaType"], "application/vnd.oci.image.index.v1+json");
        assert_eq!(entry["annotations"]["io.containerd.image.name"], "host:5000/x:1");
        let name = entry["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let both = files.file(&format!("blobs/sha256/{name}")).unwrap();
        let both: Value = serde_json::from_slice(both).unwrap();
        let machines = both["manifests"].as_array().unwrap().iter();
        let machines: Vec<&Value> = machines.map(|it| &it["platform"]["architecture"]).collect();
        assert_eq!(machines, ["amd64", "arm64"]);
        assert_eq!(files.paths().count(), 8, "layer, two of each machine, index of both, and two");
    }
}
