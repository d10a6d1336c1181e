//! The files of an image: in the order of their paths, with fixed owners and times.
//!
//! What comes out of a package is checked here. Nothing is ever written through it to this machine's
//! disk: the files stay in memory until they are a layer.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Component, Path};

use tar::{EntryType, Header};

/// What a path is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    /// A folder.
    Folder,
    /// A regular file.
    File(Vec<u8>),
    /// A symbolic link, with its target.
    Link(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    mode: u32,
    content: Content,
}

/// Why a path or an entry of a package is not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TreeError {
    /// It is absolute, climbs, or is no text.
    #[error("`{0}` is no path inside of an image")]
    Path(String),
    /// A device, a hard link, or anything else that no package of ours has.
    #[error("`{0}` is neither a file, a folder nor a symbolic link")]
    Kind(String),
    /// It would run with the rights of its owner.
    #[error("`{0}` has the set-user-ID or set-group-ID bit")]
    SetId(String),
    /// Two packages have it, and differ.
    #[error("`{0}` is there already, and differs")]
    Twice(String),
    /// Something lies inside of what is no folder.
    #[error("`{0}` lies inside of a file or of a link")]
    Parent(String),
    /// The archive cannot be read.
    #[error("the archive cannot be read")]
    Archive(#[from] io::Error),
}

/// Folders that Debian moved into `/usr`: its packages still name the old places.
const MOVED: [&str; 4] = ["bin", "lib", "lib64", "sbin"];

/// The files of one layer, by path without a slash at the beginning. All belong to root.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tree {
    entries: BTreeMap<String, Entry>,
}

impl Tree {
    /// Adds a folder. One that is there keeps its mode.
    pub(crate) fn add_folder(&mut self, path: &str, mode: u32) -> Result<(), TreeError> {
        let path = inside(path)?;
        if self.entries.get(&path).is_some_and(|it| it.content == Content::Folder) {
            return Ok(());
        }
        self.add(path, mode, Content::Folder)
    }

    /// Adds a file.
    pub(crate) fn add_file(
        &mut self,
        path: &str,
        mode: u32,
        bytes: &[u8],
    ) -> Result<(), TreeError> {
        self.add(inside(path)?, mode, Content::File(bytes.to_vec()))
    }

    /// Adds a symbolic link. Its target is text for the container, where it cannot climb.
    pub(crate) fn add_link(&mut self, path: &str, target: &str) -> Result<(), TreeError> {
        self.add(inside(path)?, 0o777, Content::Link(target.to_owned()))
    }

    /// Adds the links of a merged `/usr`, under which [`Tree::add_package`] puts what is in the old places.
    pub(crate) fn merge_usr(&mut self) -> Result<(), TreeError> {
        for name in MOVED {
            self.add_folder(&format!("usr/{name}"), 0o755)?;
            self.add_link(name, &format!("usr/{name}"))?;
        }
        Ok(())
    }

    /// Adds those files of a package's archive whose path, as it is in a merged `/usr`, is wanted.
    /// Owners and times of the archive are not taken.
    pub(crate) fn add_package(
        &mut self,
        archive: impl Read,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(), TreeError> {
        let mut archive = tar::Archive::new(archive);
        for entry in archive.entries()? {
            let mut entry = entry?;
            let bytes = entry.path_bytes().into_owned();
            let given =
                String::from_utf8(bytes).map_err(|error| TreeError::Path(error.to_string()))?;
            if matches!(given.as_str(), "." | "./") {
                continue;
            }
            let path = merged(&inside(&given)?);
            let mode = entry.header().mode()?;
            let kind = entry.header().entry_type();
            // Of folders, only those that a wanted file needs.
            if kind == EntryType::Directory || !wanted(&path) {
                continue;
            }
            if mode & 0o7000 != 0 {
                return Err(TreeError::SetId(path));
            }
            let mode = mode & 0o777;
            match kind {
                EntryType::Regular => {
                    let mut bytes = Vec::new();
                    entry.read_to_end(&mut bytes)?;
                    self.add(path, mode, Content::File(bytes))?;
                }
                EntryType::Symlink => {
                    let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                    let target =
                        String::from_utf8(target).map_err(|_| TreeError::Path(given.clone()))?;
                    self.add(path, 0o777, Content::Link(target))?;
                }
                _ => return Err(TreeError::Kind(path)),
            }
        }
        Ok(())
    }

    fn add(&mut self, path: String, mode: u32, content: Content) -> Result<(), TreeError> {
        let parents: Vec<&str> = path.match_indices('/').map(|(at, _)| &path[..at]).collect();
        for parent in parents {
            let folder = Entry { mode: 0o755, content: Content::Folder };
            let parent = self.entries.entry(parent.to_owned()).or_insert(folder);
            if parent.content != Content::Folder {
                return Err(TreeError::Parent(path));
            }
        }
        let entry = Entry { mode, content };
        if self.entries.get(&path).is_some_and(|known| *known != entry) {
            return Err(TreeError::Twice(path));
        }
        self.entries.insert(path, entry);
        Ok(())
    }

    /// The paths that are no folders.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &str> {
        let files = self.entries.iter().filter(|(_, entry)| entry.content != Content::Folder);
        files.map(|(path, _)| path.as_str())
    }

    /// A file, not looked for behind links.
    pub(crate) fn file(&self, path: &str) -> Option<&[u8]> {
        match &self.entries.get(path)?.content {
            Content::File(bytes) => Some(bytes),
            Content::Folder | Content::Link(_) => None,
        }
    }

    /// The layer, uncompressed. The same files give the same bytes. `modified` is the time of all files,
    /// in seconds since 1970.
    pub(crate) fn to_tar(&self, modified: u64) -> io::Result<Vec<u8>> {
        let mut archive = tar::Builder::new(Vec::new());
        for (path, entry) in &self.entries {
            let mut header = Header::new_gnu();
            header.set_mode(entry.mode);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(modified);
            header.set_size(0);
            match &entry.content {
                Content::Folder => {
                    header.set_entry_type(EntryType::Directory);
                    archive.append_data(&mut header, format!("{path}/"), io::empty())?;
                }
                Content::File(bytes) => {
                    header.set_entry_type(EntryType::Regular);
                    header.set_size(bytes.len() as u64);
                    archive.append_data(&mut header, path, bytes.as_slice())?;
                }
                Content::Link(target) => {
                    header.set_entry_type(EntryType::Symlink);
                    archive.append_link(&mut header, path, target)?;
                }
            }
        }
        archive.into_inner()
    }
}

/// The path as this file keeps it, if it stays inside of the image.
fn inside(path: &str) -> Result<String, TreeError> {
    let refused = || TreeError::Path(path.to_owned());
    if path.contains(['\0', '\\', '\n']) {
        return Err(refused());
    }
    let mut parts = Vec::new();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(part) => parts.push(part.to_str().ok_or_else(refused)?),
            Component::CurDir => {}
            Component::RootDir | Component::ParentDir | Component::Prefix(_) => {
                return Err(refused());
            }
        }
    }
    if parts.is_empty() { Err(refused()) } else { Ok(parts.join("/")) }
}

/// The path in a merged `/usr`.
fn merged(path: &str) -> String {
    let top = path.split('/').next().unwrap_or_default();
    if MOVED.contains(&top) && path != top { format!("usr/{path}") } else { path.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An archive with one entry, whose path is written as it is.
    fn archive(path: &str, kind: EntryType, mode: u32, target: &str) -> Vec<u8> {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(1000);
        header.set_gid(1000);
        header.set_mtime(1_700_000_000);
        let text = if kind == EntryType::Regular { "text" } else { "" };
        header.set_size(text.len() as u64);
        header.set_cksum();
        let mut archive = tar::Builder::new(Vec::new());
        archive.append(&header, text.as_bytes()).unwrap();
        archive.into_inner().unwrap()
    }

    fn added(tree: &mut Tree, archive: &[u8]) -> String {
        let added = tree.add_package(archive, |_| true);
        added.map_or_else(|error| error.to_string(), |()| "taken".to_owned())
    }

    #[test]
    fn a_package_cannot_leave_its_image() {
        let file = |path: &str| archive(path, EntryType::Regular, 0o644, "");
        for path in ["/etc/passwd", "../x", "./usr/../../x", "usr/a\\b", "usr/a\nb"] {
            let said = added(&mut Tree::default(), &file(path));
            assert!(said.contains("no path inside"), "{path:?}: {said}");
        }
        assert_eq!(added(&mut Tree::default(), &file("./usr/x")), "taken");
    }

    #[test]
    fn nothing_is_written_through_a_link() {
        let mut tree = Tree::default();
        assert_eq!(
            added(&mut tree, &archive("./usr/x", EntryType::Symlink, 0o777, "/etc")),
            "taken"
        );
        let said = added(&mut tree, &archive("./usr/x/passwd", EntryType::Regular, 0o644, ""));
        assert!(said.contains("inside of a file or of a link"), "{said}");
    }

    #[test]
    fn devices_hard_links_and_programs_with_rights_are_refused() {
        for kind in [EntryType::Char, EntryType::Block, EntryType::Fifo, EntryType::Link] {
            let said = added(&mut Tree::default(), &archive("./usr/x", kind, 0o644, "usr/y"));
            assert!(said.contains("neither a file"), "{kind:?}: {said}");
        }
        for mode in [0o4755, 0o2755] {
            let said = added(&mut Tree::default(), &archive("./x", EntryType::Regular, mode, ""));
            assert!(said.contains("set-user-ID"), "{said}");
        }
    }

    #[test]
    fn two_packages_may_share_a_file_only_if_it_is_the_same() {
        let mut tree = Tree::default();
        for said in ["taken", "taken"] {
            assert_eq!(added(&mut tree, &archive("./x", EntryType::Regular, 0o644, "")), said);
        }
        let said = added(&mut tree, &archive("./x", EntryType::Regular, 0o755, ""));
        assert!(said.contains("differs"), "{said}");
    }

    #[test]
    fn a_layer_has_sorted_paths_one_owner_one_time_and_the_modes_of_the_packages() {
        let mut tree = Tree::default();
        tree.merge_usr().unwrap();
        tree.add_file("zz/later", 0o600, b"z").unwrap();
        assert_eq!(
            added(&mut tree, &archive("./lib/x.so", EntryType::Regular, 0o755, "")),
            "taken"
        );
        tree.add_folder("tmp", 0o1777).unwrap();
        let layer = tree.to_tar(7).unwrap();
        let mut archive = tar::Archive::new(layer.as_slice());
        let mut seen = Vec::new();
        for entry in archive.entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            let owners = (header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap());
            assert_eq!(owners, (0, 0, 7));
            let path = String::from_utf8(entry.path_bytes().into_owned()).unwrap();
            seen.push(format!("{path} {:o}", header.mode().unwrap()));
        }
        let expected = "bin 777,lib 777,lib64 777,sbin 777,tmp/ 1777,usr/ 755,usr/bin/ 755,usr/lib/ 755,\
                        usr/lib/x.so 755,usr/lib64/ 755,usr/sbin/ 755,zz/ 755,zz/later 600";
        assert_eq!(seen.join(","), expected);
        assert_eq!(layer, tree.to_tar(7).unwrap(), "the same files, the same bytes");
    }

    #[test]
    fn the_order_in_which_files_are_added_does_not_matter() {
        let mut one = Tree::default();
        one.add_file("a/b", 0o644, b"1").unwrap();
        one.add_link("c", "a/b").unwrap();
        let mut other = Tree::default();
        other.add_link("c", "a/b").unwrap();
        other.add_file("a/b", 0o644, b"1").unwrap();
        assert_eq!(one.to_tar(0).unwrap(), other.to_tar(0).unwrap());
    }
}
