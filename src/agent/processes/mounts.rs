//! Where a path of another process lies, by that process's table of mounts.
//!
//! The owner of a container decides what is mounted there, and a file system may never answer. So
//! nothing below `/proc/<pid>/root` is opened. The kernel writes `/proc/<pid>/mountinfo` without
//! any file system. Links are not in it: a path through a link counts as one without.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use wire::ids::PodUid;

/// Most mounts on the way to a path; real ones have a handful.
const MAX_MOUNTS_ON_PATH: usize = 100;

/// How the names of the driver's libraries begin, one for compute and one for utilities. The names of the files that
/// are mounted end with the version of the driver.
const LIBRARIES: [&[u8]; 2] = [b"libcuda.so", b"libnvidia-ml.so"];

/// The kernel's mark on a folder that was mounted and then removed. No other path has two slashes.
const DELETED: &[u8] = b"//deleted";

/// A file or folder, named alike in every container of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FilePlace {
    /// Major and minor number of its file system.
    device: (u32, u32),
    /// Its path in that file system, whatever part of it is mounted.
    path: PathBuf,
}

/// The mounts that a process can reach.
#[derive(Debug)]
pub(crate) struct Mounts {
    /// The kernel's text, one line each.
    table: Vec<u8>,
}

/// One mount.
#[derive(Debug)]
struct Mount {
    id: u64,
    /// The mount below it; often not in the table for the outermost one.
    parent: u64,
    /// What is mounted; `None` for a removed folder.
    place: Option<FilePlace>,
    /// The path where the process sees it.
    point: PathBuf,
}

impl Mounts {
    /// The mounts of the process with the folder `process` in the process table.
    ///
    /// # Errors
    /// The error of the operating system, [`ErrorKind::NotFound`] for a process that has ended, and
    /// [`ErrorKind::InvalidData`] if they take more than `most` bytes.
    pub(crate) fn of(process: &Path, most: u64) -> io::Result<Self> {
        let mut table = Vec::new();
        let file = File::open(process.join("mountinfo")).map_err(|error| match error.kind() {
            // The kernel's error for a process that has ended and is still in its table.
            ErrorKind::InvalidInput => ErrorKind::NotFound.into(),
            _ => error,
        })?;
        file.take(most.saturating_add(1)).read_to_end(&mut table)?;
        if table.len() as u64 > most {
            return Err(io::Error::new(ErrorKind::InvalidData, "too many mounts"));
        }
        Ok(Self { table })
    }

    /// Where an absolute path without `..` lies; `None` if it is unknown.
    pub(crate) fn place(&self, path: &Path) -> Option<FilePlace> {
        let mount = self.mount_of(path)?;
        let FilePlace { device, path: root } = mount.place?;
        Some(FilePlace { device, path: root.join(path.strip_prefix(mount.point).ok()?) })
    }

    /// Whether something is mounted at exactly this path: then it passes no link.
    pub(crate) fn is_mount_point(&self, path: &Path) -> bool {
        self.mount_of(path).is_some_and(|mount| mount.point == path)
    }

    /// Whether a file or folder, or something below or above it, is mounted anywhere.
    pub(crate) fn are_near(&self, place: &FilePlace) -> bool {
        self.all().filter_map(|mount| mount.place).any(|mounted| {
            let is_near =
                mounted.path.starts_with(&place.path) || place.path.starts_with(&mounted.path);
            mounted.device == place.device && is_near
        })
    }

    /// Where the root of the process lies; `None` if it is no mount, as after `chroot`.
    pub(crate) fn root(&self) -> Option<FilePlace> {
        self.place(Path::new("/"))
    }

    /// Whether a library of NVIDIA's driver is mounted as a file: libcuda for compute, libnvidia-ml for utilities. A
    /// volume of the pod is none, whatever it is called.
    /// `None` if something else of NVIDIA is mounted, from which a program may take the driver: some platforms mount
    /// a folder.
    pub(crate) fn has_driver(&self, pod: &PodUid) -> Option<bool> {
        let of_pod = format!("/pods/{pod}/");
        let is_of_pod = |mount: &Mount| {
            mount.place.as_ref().is_some_and(|it| contains(&it.path, of_pod.as_bytes()))
        };
        let points = || self.all().filter(|mount| !is_of_pod(mount)).map(|mount| mount.point);
        if points().any(|point| is_library(&point)) {
            return Some(true);
        }
        let is_any = points().any(|point| contains(&point, b"nvidia"));
        (!is_any).then_some(false)
    }

    /// Whether a file is there that kubelet makes for each container of this pod: its hosts, or where its last words
    /// go. No volume lies in these folders.
    pub(crate) fn has_files_of(&self, pod: &PodUid) -> bool {
        let hosts = format!("/pods/{pod}/etc-hosts");
        let words = format!("/pods/{pod}/containers/");
        let mut places = self.all().filter_map(|mount| mount.place);
        places.any(|it| {
            it.path.as_os_str().as_bytes().ends_with(hosts.as_bytes())
                || contains(&it.path, words.as_bytes())
        })
    }

    /// The mount of a path, searched from the outermost inwards: later mounts hide earlier ones.
    fn mount_of(&self, path: &Path) -> Option<Mount> {
        let mut on_path: Vec<Mount> =
            self.all().filter(|mount| path.starts_with(&mount.point)).collect();
        let ids: BTreeSet<u64> = on_path.iter().map(|mount| mount.id).collect();
        let mut at = on_path.iter().rposition(|mount| {
            let is_outermost = mount.parent == mount.id || !ids.contains(&mount.parent);
            mount.point == Path::new("/") && is_outermost
        })?;
        for _ in 0..MAX_MOUNTS_ON_PATH {
            let inner = on_path.iter().enumerate().rev().filter(|(place, mount)| {
                *place != at && on_path.get(at).is_some_and(|outer| mount.parent == outer.id)
            });
            match inner.min_by_key(|(_, mount)| mount.point.components().count()) {
                Some((inner, _)) => at = inner,
                None => return Some(on_path.swap_remove(at)),
            }
        }
        None
    }

    fn all(&self) -> impl Iterator<Item = Mount> {
        self.table.split(|byte| *byte == b'\n').filter_map(Mount::of)
    }
}

impl Mount {
    /// The mount of a line such as `36 35 98:0 /inside /at rw - ext4 /dev/sda rw`, if it is one.
    fn of(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let mut text = || std::str::from_utf8(fields.next()?).ok();
        let (id, parent) = (text()?.parse().ok()?, text()?.parse().ok()?);
        let (major, minor) = text()?.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        let (root, point) = (fields.next()?, unescaped(fields.next()?));
        let place = FilePlace { device, path: unescaped(root) };
        let place = (!root.ends_with(DELETED)).then_some(place);
        point.is_absolute().then_some(Self { id, parent, place, point })
    }
}

/// Whether a path is that of a library which every use of a GPU needs.
fn is_library(path: &Path) -> bool {
    let name = path.file_name().map_or(b"" as &[u8], OsStr::as_bytes);
    LIBRARIES.iter().any(|library| name.starts_with(library))
}

/// Whether a path has these bytes in it.
fn contains(path: &Path, words: &[u8]) -> bool {
    path.as_os_str().as_bytes().windows(words.len()).any(|part| part == words)
}

/// A path in the table, where blanks and the like are `\` and three octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, others @ ..] = rest {
        let (byte, after) = match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] => {
                ((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'), after)
            }
            _ => (*first, others),
        };
        plain.push(byte);
        rest = after;
    }
    PathBuf::from(OsString::from_vec(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts(table: &[u8]) -> Mounts {
        Mounts { table: table.to_vec() }
    }

    /// Where a path lies, such as `0:9 /inside`; `-` if it is unknown.
    fn place(table: &[u8], path: &str) -> String {
        let place = mounts(table).place(Path::new(path));
        place.map_or("-".to_owned(), |FilePlace { device: (major, minor), path }| {
            let parts: PathBuf = path.components().collect();
            format!("{major}:{minor} {}", parts.display())
        })
    }

    const CONTAINER: &str = "\
        700 699 0:200 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/a\\040b\n\
        701 700 0:201 / /dev rw - tmpfs tmpfs rw\n\
        702 701 0:99 / /dev/shm rw - tmpfs gpupack-mps rw,size=4g\n\
        703 700 0:24 /gpupack/mps/GPU-a/pipe /run/gpupack-mps rw - tmpfs tmpfs rw\n\
        704 700 259:1 /srv/a\\040b\\134c /with\\040blank ro shared:3 master:4 - ext4 /dev/x rw\n\
        705 700 0:24 /gone//deleted /run/gone rw - tmpfs tmpfs rw\n\
        706 700 0:4 mnt:[4026531840] /run/ns rw - nsfs nsfs rw\n";

    #[test]
    fn a_path_belongs_to_its_innermost_mount() {
        for (path, found) in [
            ("/dev/shm", "0:99 /"),
            ("/dev/shm/a/b", "0:99 /a/b"),
            ("/dev/shm2", "0:201 /shm2"),
            ("/run/gpupack-mps", "0:24 /gpupack/mps/GPU-a/pipe"),
            ("/run/gpupack-mps/", "0:24 /gpupack/mps/GPU-a/pipe"),
            ("/run/gpupack-mps/x", "0:24 /gpupack/mps/GPU-a/pipe/x"),
            ("/run/gpupack-mpsx", "0:200 /run/gpupack-mpsx"),
            ("/with blank/d", "259:1 /srv/a b\\c/d"),
            ("/run/gone", "-"),
            ("/run/gone/x", "-"),
            ("/", "0:200 /"),
            ("", "-"),
            ("run", "-"),
        ] {
            assert_eq!(place(CONTAINER.as_bytes(), path), found, "{path}");
        }
        let mounts = mounts(CONTAINER.as_bytes());
        assert!(mounts.is_mount_point(Path::new("/dev/shm")));
        assert!(!mounts.is_mount_point(Path::new("/dev/shm/a")));
    }

    #[test]
    fn a_mount_over_others_hides_them() {
        // In the kernel's order or not.
        let lines = [
            "1 1 0:1 / / rw - rootfs r rw",
            "2 1 0:2 / / rw - ext4 r rw",
            "3 2 0:3 / /a/b rw - tmpfs r rw",
            "4 2 0:4 / /a rw - tmpfs r rw",
            "5 2 0:5 / /c rw - tmpfs r rw",
            "6 5 0:6 / /c rw - tmpfs r rw",
        ];
        let reversed: Vec<&str> = lines.into_iter().rev().collect();
        for table in [lines.join("\n"), reversed.join("\n")] {
            for (path, found) in [("/a/b", "0:4 /b"), ("/c", "0:6 /"), ("/d", "0:2 /d")] {
                assert_eq!(place(table.as_bytes(), path), found, "{table}");
            }
        }
        assert_eq!(place(b"7 6 0:7 / /a rw - tmpfs r rw", "/a"), "-", "a root that is not a mount");
    }

    #[test]
    fn a_path_is_near_its_parents_and_children() {
        let ours = |path: &str| FilePlace { device: (0, 24), path: PathBuf::from(path) };
        let mounts = mounts(CONTAINER.as_bytes());
        for (path, is_near) in [
            ("/gpupack/mps", true),
            ("/gpupack/mps/GPU-a/pipe", true),
            ("/gpupack/mps/GPU-a/pipe/x", true),
            ("/gpupack/mps/GPU-a/pipex", false),
            ("/gpupack/mps/shm", false),
        ] {
            assert_eq!(mounts.are_near(&ours(path)), is_near, "{path}");
        }
    }

    #[test]
    fn invalid_lines_are_skipped() {
        let good = "1 0 0:1 / / rw - tmpfs t rw\n";
        for bad in [
            "",
            " ",
            "2",
            "2 1",
            "2 1 0:2",
            "2 1 0:2 /",
            "2 1 0:2 / ",
            "2 1 0:2 / relative rw",
            "2 1 02 / /a rw - tmpfs t rw",
            "2 1 0:x / /a rw - tmpfs t rw",
            "2 1 0:99999999999 / /a rw - tmpfs t rw",
            "-2 1 0:2 / /a rw - tmpfs t rw",
            "2  1 0:2 / /a rw - tmpfs t rw",
            "99999999999999999999999 1 0:2 / /a rw",
            "\u{fffd} \0 \\ \\0 \\04",
        ] {
            let table = format!("{bad}\n{good}{bad}\n");
            assert_eq!(place(table.as_bytes(), "/a"), "0:1 /a", "{bad}");
        }
        for (odd, plain) in
            [("\\", "\\"), ("\\04", "\\04"), ("\\400", "\\400"), ("\\777x", "\\777x")]
        {
            assert_eq!(unescaped(odd.as_bytes()), Path::new(plain));
        }
        assert_eq!(unescaped(b"\\377\\000\\040").into_os_string().into_vec(), [255, 0, 32]);
        // A circle, and a deep chain.
        let circle =
            "1 2 0:1 / / rw\n2 1 0:1 / / rw\n3 3 0:1 / / rw\n4 3 0:1 / / rw\n3 4 0:1 / / rw\n";
        assert_eq!(place(circle.as_bytes(), "/a"), "-");
        let deep: String = (1..5_000).map(|id| format!("{id} {} 0:1 / / rw\n", id - 1)).collect();
        assert_eq!(place(deep.as_bytes(), "/a"), "-");
    }

    #[test]
    fn a_table_of_any_size_takes_bounded_memory() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("mountinfo");
        assert_eq!(Mounts::of(folder.path(), 9).unwrap_err().kind(), ErrorKind::NotFound);
        for line in [b"\\" as &[u8], b"1 1 0:1 / / ", b"\n", b"\xff", CONTAINER.as_bytes()] {
            let table = line.repeat((10 << 20) / line.len() + 1);
            std::fs::write(&file, &table).unwrap();
            let error = Mounts::of(folder.path(), 8 << 20).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData);
            let length = u64::try_from(table.len()).unwrap();
            let whole = Mounts::of(folder.path(), length).unwrap();
            // No lines cause a panic.
            whole.place(Path::new("/dev/shm"));
            whole.are_near(&FilePlace { device: (0, 1), path: PathBuf::from("/") });
        }
    }

    #[test]
    fn a_process_that_has_ended_has_no_mounts() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let folder = PathBuf::from(format!("/proc/{}", child.id()));
        // It stays in the table until its parent reads its exit status.
        let ended = (0..1_000).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            Mounts::of(&folder, 8 << 20).err()
        });
        assert!(folder.exists());
        assert_eq!(ended.unwrap().kind(), ErrorKind::NotFound);
        child.wait().unwrap();
    }

    #[test]
    fn the_kernel_mount_table_is_parsed() {
        use std::os::unix::fs::MetadataExt;
        let own = Mounts::of(Path::new("/proc/self"), 8 << 20).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap();
        let place = own.place(&path).unwrap();
        let device = std::fs::metadata(&path).unwrap().dev();
        // The bits as in `stat`.
        let major = (device >> 8 & 0xfff) | (device >> 32 & 0xffff_f000);
        let minor = (device & 0xff) | (device >> 12 & 0xffff_ff00);
        assert_eq!((u64::from(place.device.0), u64::from(place.device.1)), (major, minor));
        assert!(place.path.ends_with(path.file_name().unwrap()));
        assert!(own.is_mount_point(Path::new("/proc")));
    }
}
