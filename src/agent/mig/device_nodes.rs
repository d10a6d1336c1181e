//! The device nodes of MIG instances: without them a container on an instance starts and sees no GPU.
//!
//! The driver's kernel module makes none. NVIDIA's programs make them where they run, so those of an instance that was
//! made in a container are missing on the node. Container runtimes look for them in `/dev` of the driver root, and
//! leave out what is missing there. So nodes are made in `/dev` of the node and in that of each other driver root, with
//! what the driver says in `/proc/driver/nvidia/capabilities`.
//!
//! All of it is the node's own, as its first process sees it: `--proc-root`, then `1/root`. A container has another
//! `/dev`, and a runtime may hide the driver's files in its `/proc`. A link is never followed, and only a device node
//! that is not right is replaced. No node is removed, as with NVIDIA's programs: the next instance at this place has
//! the same one.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Uid, chmodat, chownat, fchmod, major,
    makedev, minor, mkdirat, mknodat, openat, renameat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;

/// The driver's name for these nodes, in `/proc/devices` and as a folder in `/dev`.
const CAPS: &str = "nvidia-caps";

/// Longest file of the driver that is read, in bytes; it has three lines.
const MAX_ACCESS_BYTES: u64 = 4 << 10;

/// Longest `/proc/devices` that is read, in bytes.
const MAX_DEVICES_BYTES: u64 = 256 << 10;

/// Most entries of the folder of a GPU instance that are looked at. It has one for each compute instance, eight at most.
const MAX_ENTRIES: usize = 64;

/// Greatest numbers of a device node that the kernel has.
const MAX_MAJOR: u32 = (1 << 12) - 1;
const MAX_MINOR: u32 = (1 << 20) - 1;

/// The driver root of the GPU Operator's driver container.
pub const OPERATORS_ROOT: &str = "/run/nvidia/driver";

/// Makes the device nodes of the instances of a node.
#[derive(Clone, Debug)]
pub struct DeviceNodes {
    /// The process table of the node.
    proc_root: PathBuf,
    /// Driver roots beside `/`, as the node has them.
    driver_roots: Vec<PathBuf>,
}

/// A GPU instance, as the driver's files name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InstanceNumber {
    /// The minor number of its GPU.
    pub gpu: u32,
    /// The driver's number for it.
    pub id: u32,
}

/// Why the nodes of an instance are not there. Each is a sentence for the report of the node.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The files of the node are not readable.
    #[error(
        "the agent cannot look into `/{path}` of the node ({cause}): its container needs `hostPID` and `privileged`"
    )]
    NoNode { path: String, cause: io::Error },
    /// The driver has no such instance, or another one has no compute instance.
    #[error(
        "the driver has no file `capabilities/gpu{}/mig/gi{}/{file}` for the device nodes of the instance", .instance.gpu, .instance.id
    )]
    NoInstance { instance: InstanceNumber, file: String },
    /// A file of the driver does not say what is needed.
    #[error("the driver's file `{file}` does not say which device node an instance has")]
    Unclear { file: String },
    /// The operator does not let programs make nodes.
    #[error(
        "the device node `{path}` is missing, and the driver lets no program make it: make it, or load the module \
         with `NVreg_ModifyDeviceFiles=1`"
    )]
    Forbidden { path: String },
    /// Something else has the name of a node, or of a folder on the way to it.
    #[error(
        "`{path}` of the node is {there}: remove it, so that the agent can make a device node there"
    )]
    InTheWay { path: String, there: &'static str },
    /// The operating system refuses.
    #[error("the device node `{path}` cannot be made on the node: {cause}")]
    Refused { path: String, cause: io::Error },
}

/// A device node that is to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CapabilityNode {
    major: u32,
    minor: u32,
    /// Who may do what with it, as bits.
    mode: u32,
    /// Whether programs may make it.
    may_be_made: bool,
}

impl DeviceNodes {
    /// For the node whose process table is at `proc_root`, with these driver roots beside `/`.
    pub fn new(proc_root: &Path, driver_roots: Vec<PathBuf>) -> Self {
        Self { proc_root: proc_root.to_owned(), driver_roots }
    }

    /// Whether the driver has such nodes at all. One of before 2020 has none: rights are those of its files.
    ///
    /// # Errors
    /// The files of the node are not readable.
    pub fn are_needed(&self) -> Result<bool, NodeError> {
        major_number(&open_node(&self.proc_root)?).map(|major| major.is_some())
    }

    /// Lets the nodes of an instance and of its compute instances be there, wherever a runtime looks. A driver root
    /// without `/dev` needs none: no driver is there now.
    ///
    /// # Errors
    /// The first node that is not there then, or what keeps it from being known.
    pub fn ensure(&self, instance: InstanceNumber) -> Result<(), NodeError> {
        let node = open_node(&self.proc_root)?;
        let Some(major) = major_number(&node)? else {
            return Ok(());
        };
        let wanted = capability_nodes(&node, instance, major)?;
        let roots = std::iter::once(Path::new("/"));
        for root in roots.chain(self.driver_roots.iter().map(PathBuf::as_path)) {
            let path = root.join("dev");
            match Folder::at(&node, &path) {
                Ok(dev) => wanted.iter().try_for_each(|node| node.ensure(&dev))?,
                Err(Errno::NOENT) if root != Path::new("/") => {}
                Err(error) => return Err(cannot_open(&path, error)),
            }
        }
        Ok(())
    }
}

/// An open folder, and its path as the node has it.
struct Folder {
    open: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// The folder with this path below `root`. No part of the path may be a link.
    fn at(root: impl AsFd, path: &Path) -> Result<Self, Errno> {
        let mut open = root.as_fd().try_clone_to_owned().map_err(|_| Errno::MFILE)?;
        for part in path.components() {
            if let Component::Normal(name) = part {
                open = open_folder(&open, name)?;
            }
        }
        Ok(Self { open, path: path.to_owned() })
    }

    fn path_of(&self, name: &str) -> String {
        self.path.join(name).display().to_string()
    }

    /// What has this name here, if anything; a link itself.
    fn stat(&self, name: &str) -> Result<Option<Stat>, NodeError> {
        match statat(&self.open, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) => Ok(Some(there)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(refused(self.path_of(name), error)),
        }
    }

    /// Its folder of this name, which is made if it is missing.
    fn inner(&self, name: &str) -> Result<Self, NodeError> {
        let path = self.path.join(name);
        let cannot = |error: Errno| refused(self.path_of(name), error);
        let is_new = match mkdirat(&self.open, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(cannot(error)),
        };
        let open =
            open_folder(&self.open, name.as_ref()).map_err(|error| cannot_open(&path, error))?;
        if is_new {
            fchmod(&open, Mode::from_raw_mode(0o755)).map_err(cannot)?;
        }
        Ok(Self { open, path })
    }
}

impl CapabilityNode {
    fn name(self) -> String {
        format!("nvidia-cap{}", self.minor)
    }

    /// Lets it be there in a folder `dev`.
    fn ensure(&self, dev: &Folder) -> Result<(), NodeError> {
        let (name, caps) = (self.name(), dev.inner(CAPS)?);
        let there = caps.stat(&name)?;
        if there.as_ref().is_some_and(|there| self.is_it(there)) {
            return self.link(dev);
        }
        let kind = there.as_ref().map(|there| FileType::from_raw_mode(there.st_mode));
        match kind {
            None | Some(FileType::CharacterDevice) => {}
            Some(kind) => {
                return Err(NodeError::InTheWay { path: caps.path_of(&name), there: said(kind) });
            }
        }
        if !self.may_be_made {
            let has_numbers = there.is_some_and(|there| self.has_its_numbers(&there));
            let path = caps.path_of(&name);
            return if has_numbers { Ok(()) } else { Err(NodeError::Forbidden { path }) };
        }
        self.replace(&caps, &name).map_err(|error| refused(caps.path_of(&name), error))?;
        self.link(dev)
    }

    /// Whether this is exactly the node.
    fn is_it(self, there: &Stat) -> bool {
        self.has_its_numbers(there)
            && there.st_mode & 0o7777 == self.mode
            && (there.st_uid, there.st_gid) == (0, 0)
    }

    fn has_its_numbers(self, there: &Stat) -> bool {
        FileType::from_raw_mode(there.st_mode) == FileType::CharacterDevice
            && (major(there.st_rdev), minor(there.st_rdev)) == (self.major, self.minor)
    }

    /// Makes it beside its place, and puts it there in one step: what has it open keeps what it has.
    fn replace(self, caps: &Folder, name: &str) -> Result<(), Errno> {
        let new = format!(".{name}.gpupack");
        let mode = Mode::from_raw_mode(self.mode);
        let number = makedev(self.major, self.minor);
        let make = || mknodat(&caps.open, &new, FileType::CharacterDevice, mode, number);
        match make() {
            // Left by a crash. The name is ours.
            Err(Errno::EXIST) => {
                unlinkat(&caps.open, &new, AtFlags::empty()).and_then(|()| make())?
            }
            made => made?,
        }
        let (root, group) = (Some(Uid::ROOT), Some(Gid::ROOT));
        let made = chmodat(&caps.open, &new, mode, AtFlags::empty())
            .and_then(|()| chownat(&caps.open, &new, root, group, AtFlags::SYMLINK_NOFOLLOW))
            .and_then(|()| renameat(&caps.open, &new, &caps.open, name));
        if made.is_err() {
            let _left = unlinkat(&caps.open, &new, AtFlags::empty());
        }
        made
    }

    /// Lets `dev/char` lead to it, where that is: systemd forgets the rights of containers to devices without such a
    /// link when it is reloaded. One that is there stays.
    fn link(self, dev: &Folder) -> Result<(), NodeError> {
        let Ok(links) = open_folder(&dev.open, "char".as_ref()) else { return Ok(()) };
        let name = format!("{}:{}", self.major, self.minor);
        match symlinkat(format!("../{CAPS}/{}", self.name()), &links, &name) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(refused(dev.path_of(&format!("char/{name}")), error)),
        }
    }
}

/// The root of the node's files.
fn open_node(proc_root: &Path) -> Result<OwnedFd, NodeError> {
    let cannot = |cause| NodeError::NoNode { path: String::new(), cause };
    if std::fs::read_link(proc_root.join("self")).is_ok_and(|own| own == Path::new("1")) {
        return Err(cannot(io::Error::other("process 1 is the agent")));
    }
    // The kernel's own link to the root of a process is the one that is followed.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, proc_root.join("1/root"), flags, Mode::empty())
        .map_err(|error| cannot(error.into()))
}

fn open_folder(folder: impl AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(folder, name, flags, Mode::empty())
}

/// The beginning of a file: `longest` bytes at most.
fn read(folder: &OwnedFd, name: &str, longest: u64) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(openat(folder, name, flags, Mode::empty())?);
    let mut text = Vec::new();
    file.take(longest).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The major number of the driver's nodes; `None` if this driver has none.
fn major_number(node: &OwnedFd) -> Result<Option<u32>, NodeError> {
    let cannot = |cause| NodeError::NoNode { path: "proc/devices".to_owned(), cause };
    let proc = open_folder(node, "proc".as_ref()).map_err(|error| cannot(error.into()))?;
    let text = read(&proc, "devices", MAX_DEVICES_BYTES).map_err(cannot)?;
    Ok(listed_major(&text))
}

/// The major number of the driver's nodes in a `/proc/devices`.
fn listed_major(text: &str) -> Option<u32> {
    let of_characters = text.lines().skip_while(|line| line.trim() != "Character devices:").skip(1);
    let mut lines = of_characters.take_while(|line| !line.trim().is_empty());
    lines.find_map(|line| {
        let (number, name) = line.trim().split_once(' ')?;
        let number = number.parse().ok().filter(|number| (1..=MAX_MAJOR).contains(number));
        number.filter(|_| name.trim() == CAPS)
    })
}

/// The nodes of a GPU instance and of its compute instances.
fn capability_nodes(
    node: &OwnedFd,
    instance: InstanceNumber,
    major: u32,
) -> Result<Vec<CapabilityNode>, NodeError> {
    let InstanceNumber { gpu, id } = instance;
    let path = format!("proc/driver/nvidia/capabilities/gpu{gpu}/mig/gi{id}");
    let absent = |file: &str| NodeError::NoInstance { instance, file: file.to_owned() };
    let folder = match Folder::at(node, Path::new(&path)) {
        Ok(folder) => folder,
        Err(Errno::NOENT) => return Err(absent("access")),
        Err(error) => return Err(NodeError::NoNode { path, cause: error.into() }),
    };
    let named = |inner: &OwnedFd, name: &str| {
        let file = format!("/{path}/{name}");
        let text = read(inner, "access", MAX_ACCESS_BYTES);
        let text = text.map_err(|_| absent(name))?;
        parsed(&text, major).ok_or(NodeError::Unclear { file })
    };
    let mut nodes = vec![named(&folder.open, "access")?];
    for compute in computes(&folder.open).map_err(|error| refused(path.clone(), error))? {
        let inner = open_folder(&folder.open, compute.as_ref());
        let inner = inner.map_err(|_| absent(&format!("{compute}/access")))?;
        nodes.push(named(&inner, &format!("{compute}/access"))?);
    }
    if nodes.len() < 2 { Err(absent("ci*/access")) } else { Ok(nodes) }
}

/// Names of the folders of compute instances.
fn computes(folder: &OwnedFd) -> Result<Vec<String>, Errno> {
    let entries: Result<Vec<_>, Errno> = Dir::read_from(folder)?.take(MAX_ENTRIES).collect();
    let names = entries?.into_iter().filter_map(|entry| {
        let name = entry.file_name().to_str().ok()?.to_owned();
        let number = name.strip_prefix("ci")?;
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then_some(name)
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    Ok(names)
}

/// The node that a file of the driver describes, in lines such as `DeviceFileMinor: 30`.
fn parsed(text: &str, major: u32) -> Option<CapabilityNode> {
    let minor = minor_number(text)?;
    // As the driver has it: everybody may read, which is all that the library does.
    let mode = value(text, "DeviceFileMode").unwrap_or(0o444) & 0o777;
    let may_be_made = value(text, "DeviceFileModify") != Some(0);
    Some(CapabilityNode { major, minor, mode, may_be_made })
}

/// The minor number of the node that a file of the driver describes.
pub(crate) fn minor_number(text: &str) -> Option<u32> {
    value(text, "DeviceFileMinor").filter(|minor| *minor <= MAX_MINOR)
}

/// The number in a line of such a file.
fn value(text: &str, key: &str) -> Option<u32> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let mut values = lines.filter(|(name, _)| name.trim() == key).map(|(_, value)| value.trim());
    values.next()?.parse().ok()
}

fn cannot_open(path: &Path, error: Errno) -> NodeError {
    let path = path.display().to_string();
    match error {
        Errno::NOTDIR | Errno::LOOP => NodeError::InTheWay { path, there: "a link, or no folder" },
        error => refused(path, error),
    }
}

fn refused(path: String, error: Errno) -> NodeError {
    NodeError::Refused { path, cause: error.into() }
}

fn said(kind: FileType) -> &'static str {
    match kind {
        FileType::Symlink => "a link",
        FileType::Directory => "a folder",
        FileType::RegularFile => "a file",
        _ => "no device node of this kind",
    }
}

#[cfg(test)]
mod tests;
