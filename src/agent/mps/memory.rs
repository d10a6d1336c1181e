//! The memory that MPS daemons and clients share, as files. It is emptied when no client is left.
//!
//! Clients that end without cleaning up leave files behind, and the folder is open to all users.
//! Which client made a file is unknown, so nothing is removed while any client lives. A process
//! with too many mounts may be a client or not. Then only what it has open or mapped stays: else
//! the owner of one container could keep the node's memory from being emptied. Leftovers may be
//! deeply nested, and other processes may change them meanwhile. So folders are opened one at a
//! time and never through a link, and their content is moved up instead of being followed down.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, OsStr};
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, StatxFlags, openat, renameat, statat, statx,
    unlinkat,
};
use rustix::io::Errno;

use crate::processes::mounts::{FilePlace, Mounts};
use runtime::clock::Clock;

/// Most entries removed or moved at once; the rest follows the next time.
const MAX_REMOVED: usize = 10_000;

/// Most bytes of a process's list of mapped files that are read.
const MAX_MAPS_BYTES: u64 = 4 << 20;

/// Most bytes of the mounts of a process that are read. A node of hundreds of pods makes 1 MiB; a
/// container may make a hundred thousand mounts of its own.
const MAX_MOUNTS_BYTES: u64 = 8 << 20;

/// Path of the shared memory in a container.
const SHARED_MEMORY: &str = "/dev/shm";

/// Removes what is left in `folder`, unless a process of another container has it as its shared
/// memory. It spares what is younger than `spared`, since a client may have come meanwhile, and
/// what a daemon has open. Returns the number of removed entries.
///
/// # Errors
/// The error of the operating system, also if a process may not be read.
pub(crate) fn sweep(folder: &Path, proc_root: &Path, spared: Duration) -> io::Result<usize> {
    let own = proc_root.join("self");
    let container = fs::read_link(own.join("ns/mnt"))?;
    let shared = Mounts::of(&own, MAX_MOUNTS_BYTES)?.place(&folder.canonicalize()?);
    let shared = shared.ok_or_else(|| io::Error::other("it is in none of our mounts"))?;
    // If it is not readable, all processes count as containers.
    let host = fs::read_link(proc_root.join("1/ns/mnt")).ok();
    let (mut used, mut known) = (BTreeSet::new(), BTreeMap::new());
    for process in processes(proc_root)? {
        let Some(of) = absent(fs::read_link(process.join("ns/mnt")))? else { continue };
        // Hundreds of processes see the same mounts. The link is read, not followed.
        let view = (of.clone(), fs::read_link(process.join("root")).ok());
        let is_client = match known.get(&view) {
            Some(is_client) => *is_client,
            None => {
                let is_client = match absent(Mounts::of(&process, MAX_MOUNTS_BYTES)) {
                    Ok(Some(mounts)) => {
                        Some(are_clients(&mounts, &shared, host.as_ref() == Some(&of)))
                    }
                    Ok(None) => continue,
                    Err(error) if error.kind() == ErrorKind::InvalidData => None, // too many
                    Err(error) => return Err(error),
                };
                known.insert(view, is_client);
                is_client
            }
        };
        match is_client {
            Some(true) if of != container => return Ok(0),
            Some(true) | None => used.extend(used_by(&process)),
            Some(false) => {}
        }
    }
    let mut broom =
        Broom { folder: File::open(folder)?, used, moved: Vec::new(), left: MAX_REMOVED };
    for entry in fs::read_dir(folder)?.take(MAX_REMOVED) {
        let entry = entry?;
        let Some(found) = absent(entry.metadata())? else { continue };
        if is_old(&found, spared) {
            broom.moved.push(CString::new(entry.file_name().into_vec())?);
        }
    }
    broom.sweep()
}

/// Whether processes with these mounts have `shared` as their shared memory. A container mounts
/// `SHARED_MEMORY`, and that mount decides. If it is not mounted, it may be a link: then each
/// process that can reach `shared` counts, except on the host, which sees all mounts.
fn are_clients(mounts: &Mounts, shared: &FilePlace, is_host: bool) -> bool {
    let path = Path::new(SHARED_MEMORY);
    let is_sent = is_host || mounts.is_mount_point(path);
    mounts.place(path).as_ref() == Some(shared) || (!is_sent && mounts.are_near(shared))
}

/// Whether an entry has not changed for the time `spared`, by its ctime, which its owner cannot
/// set. A time in the future comes from a clock that was set back, and counts as old.
fn is_old(found: &Metadata, spared: Duration) -> bool {
    let [seconds, nanos] =
        [found.ctime(), found.ctime_nsec()].map(|number| u64::try_from(number).unwrap_or(0));
    let since_1970 = Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos));
    Clock::age_of(since_1970).is_none_or(|age| age >= spared)
}

/// Removes entries of a folder with their content, in bounded steps and with two open folders.
struct Broom {
    folder: File,
    /// Inodes of files that stay.
    used: BTreeSet<u64>,
    /// Entries of the folder to remove.
    moved: Vec<CString>,
    left: usize,
}

impl Broom {
    /// Removes the entries; returns their number. An error with one does not stop the others.
    fn sweep(mut self) -> io::Result<usize> {
        let (mut removed, mut fault) = (0, None);
        while let Some(name) = self.moved.pop().filter(|_| self.left > 0) {
            match self.remove(&name) {
                Ok(count) => removed += count,
                // Another process has removed it, or still uses it: then it stays.
                Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => {}
                Err(error) => fault = fault.or(Some(error)),
            }
        }
        fault.map_or(Ok(removed), |error| Err(error.into()))
    }

    fn remove(&mut self, name: &CStr) -> Result<usize, Errno> {
        self.left = self.left.saturating_sub(1);
        let found = statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if self.used.contains(&found.st_ino) {
            return Ok(0);
        }
        if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
            unlinkat(&self.folder, name, AtFlags::empty())?;
            return Ok(1);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let inner = openat(&self.folder, name, flags, Mode::empty())?;
        let mut removed = 0;
        for entry in Dir::read_from(&inner)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            if self.left == 0 {
                return Ok(removed);
            }
            self.left -= 1;
            let found = statat(&inner, name, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
                let up = CString::new(format!(".swept-{}", found.st_ino)).unwrap_or_default();
                renameat(&inner, name, &self.folder, &up)?;
                self.moved.push(up);
            } else if !self.used.contains(&found.st_ino) {
                unlinkat(&inner, name, AtFlags::empty())?;
                removed += 1;
            }
        }
        unlinkat(&self.folder, name, AtFlags::REMOVEDIR)?;
        Ok(removed + 1)
    }
}

/// The folders of all processes.
fn processes(proc_root: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(proc_root)?.filter_map(Result::ok);
    Ok(entries.filter(|entry| is_number(&entry.file_name())).map(|entry| entry.path()).collect())
}

fn is_number(name: &OsStr) -> bool {
    name.as_encoded_bytes().iter().all(u8::is_ascii_digit)
}

/// The inodes of the files that a process has open or mapped; too many rather than too few.
fn used_by(process: &Path) -> BTreeSet<u64> {
    let open = fs::read_dir(process.join("fd")).into_iter().flatten().filter_map(Result::ok);
    // A tenant's file system may never answer, so the kernel's cached state has to do.
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let found = |entry: fs::DirEntry| statx(CWD, entry.path(), flags, StatxFlags::INO).ok();
    let open = open.filter_map(found).map(|found| found.stx_ino);
    let mut text = Vec::new();
    if let Ok(maps) = File::open(process.join("maps")) {
        // What could be read counts.
        let _ = maps.take(MAX_MAPS_BYTES).read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text);
    let mapped = text.lines().filter_map(|line| line.split_whitespace().nth(4)?.parse().ok());
    open.chain(mapped).collect()
}

/// `None` for what does not exist, as processes and their files come and go.
fn absent<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    // The error of a process that ends while it is read.
    const NO_SUCH_PROCESS: i32 = 3;
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == ErrorKind::NotADirectory => Ok(None),
        Err(error) if error.raw_os_error() == Some(NO_SUCH_PROCESS) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A process table with this process in it, and shared memory with three entries.
    fn host() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("shm/folder/in")).unwrap();
        fs::write(folder.path().join("shm/a"), "a").unwrap();
        symlink("/etc", folder.path().join("shm/link")).unwrap();
        process(folder.path(), "self", "shm", "mnt:[1]");
        process(folder.path(), "1", "host", "mnt:[0]");
        folder
    }

    /// A process that sees a folder of this test as its shared memory. It has only what the kernel
    /// writes about it, and no root folder.
    fn process(folder: &Path, pid: &str, sees: &str, container: &str) {
        let seen = folder.canonicalize().unwrap().join(sees);
        let mounts = format!(
            "21 20 0:201 / /dev rw - tmpfs tmpfs rw\n\
             22 21 254:0 {} /dev/shm rw - ext4 /dev/vda rw\n",
            seen.display()
        );
        with_mounts(folder, pid, &mounts, container);
    }

    /// A process with these mounts beside that of its root.
    fn with_mounts(folder: &Path, pid: &str, mounts: &str, container: &str) {
        let process = folder.join("proc").join(pid);
        fs::create_dir_all(process.join("ns")).unwrap();
        fs::create_dir_all(process.join("fd")).unwrap();
        let device = if pid == "self" { "254:0" } else { "0:200" };
        let mounts = format!("20 19 {device} / / rw - any any rw\n{mounts}");
        fs::write(process.join("mountinfo"), mounts).unwrap();
        symlink(container, process.join("ns/mnt")).unwrap();
    }

    fn swept(folder: &Path, spared: u64) -> (usize, usize) {
        let (shm, proc) = (folder.join("shm"), folder.join("proc"));
        let removed = sweep(&shm, &proc, Duration::from_secs(spared)).unwrap();
        (removed, fs::read_dir(shm).unwrap().count())
    }

    #[test]
    fn client_leftovers_are_removed_after_the_last_client() {
        let host = host();
        process(host.path(), "77", "shm", "mnt:[2]");
        assert_eq!(swept(host.path(), 0), (0, 3), "a client is there");
        fs::remove_dir_all(host.path().join("proc/77")).unwrap();
        process(host.path(), "78", "other", "mnt:[3]");
        fs::create_dir(host.path().join("proc/79")).unwrap();
        assert_eq!(swept(host.path(), 3_600), (0, 3), "too young");
        assert_eq!(swept(host.path(), 0), (4, 0));
        assert!(Path::new("/etc/passwd").exists(), "links are removed, not followed");
        assert_eq!(swept(host.path(), 0), (0, 0));
    }

    #[test]
    fn use_by_a_daemon_of_the_same_container_is_kept() {
        let host = host();
        process(host.path(), "80", "shm", "mnt:[1]");
        let inode = |name: &str| fs::metadata(host.path().join("shm").join(name)).unwrap().ino();
        let maps = format!("7f00-7f01 rw-s 00000000 00:17 {} /dev/shm/a\n", inode("a"));
        fs::write(host.path().join("proc/80/maps"), maps).unwrap();
        fs::write(host.path().join("shm/b"), "b").unwrap();
        symlink(host.path().join("shm/b"), host.path().join("proc/80/fd/3")).unwrap();
        assert_eq!(swept(host.path(), 0), (3, 2));
        assert!(inode("a") > 0 && inode("b") > 0);
    }

    #[test]
    fn nothing_is_removed_unless_every_process_was_checked() {
        let host = host();
        let (shm, proc) = (host.path().join("shm"), host.path().join("proc"));
        assert!(sweep(&shm, &host.path().join("none"), Duration::ZERO).is_err());
        process(host.path(), "81", "shm", "mnt:[4]");
        let namespace = proc.join("81/ns/mnt");
        fs::remove_file(&namespace).unwrap();
        fs::write(namespace, "no link").unwrap();
        assert!(sweep(&shm, &proc, Duration::ZERO).is_err(), "no answer is not `no`");
        fs::remove_dir_all(proc.join("81")).unwrap();
        process(host.path(), "82", "other", "mnt:[5]");
        let mounts = proc.join("82/mountinfo");
        fs::remove_file(&mounts).unwrap();
        fs::create_dir(&mounts).unwrap();
        assert!(sweep(&shm, &proc, Duration::ZERO).is_err(), "they may not be read");
        assert_eq!(fs::read_dir(shm).unwrap().count(), 3);
    }

    #[test]
    fn a_process_with_too_many_mounts_keeps_only_what_it_uses() {
        let host = host();
        let (shm, proc) = (host.path().join("shm"), host.path().join("proc"));
        for pid in ["81", "82"] {
            process(host.path(), pid, "other", "mnt:[5]");
            fs::write(proc.join(pid).join("mountinfo"), vec![b'\n'; 10 << 20]).unwrap();
        }
        for name in ["b", "c"] {
            fs::write(shm.join(name), name).unwrap();
        }
        let inode = fs::metadata(shm.join("a")).unwrap().ino();
        let maps = format!("7f00-7f01 rw-s 00000000 00:17 {inode} /dev/shm/a\n");
        fs::write(proc.join("81/maps"), maps).unwrap();
        symlink(shm.join("b"), proc.join("82/fd/3")).unwrap();
        process(host.path(), "83", "shm", "mnt:[6]");
        assert_eq!(swept(host.path(), 0), (0, 5), "a client is there");
        fs::remove_dir_all(proc.join("83")).unwrap();
        assert_eq!(swept(host.path(), 0), (4, 2));
        assert!(shm.join("a").exists() && shm.join("b").exists());
        fs::remove_dir_all(proc.join("81")).unwrap();
        assert_eq!(swept(host.path(), 0), (1, 1));
    }

    #[test]
    fn a_process_with_a_dangling_path_keeps_nothing() {
        let host = host();
        for (pid, target) in [("81", "shm".to_owned()), ("82", "x".repeat(300))] {
            with_mounts(host.path(), pid, "", "mnt:[6]");
            let dev = host.path().join("proc").join(pid).join("root/dev");
            fs::create_dir_all(&dev).unwrap();
            symlink(target, dev.join("shm")).unwrap();
        }
        assert_eq!(swept(host.path(), 0).1, 0);
    }

    #[test]
    fn a_process_with_link_access_to_the_memory_counts_as_a_client() {
        let folder = |host: &tempfile::TempDir| host.path().canonicalize().unwrap();
        let mounted = |what: &Path, at: &str| {
            format!("23 20 254:0 {} {at} rw - ext4 /dev/vda rw\n", what.display())
        };
        let own = "24 20 0:24 / /dev/shm rw - tmpfs shm rw\n";
        for (inner, at, others, container, is_kept) in [
            ("shm", "/run/shm", "", "mnt:[2]", true),
            ("shm/folder", "/run/shm", "", "mnt:[2]", true),
            ("", "/all", "", "mnt:[2]", true),
            ("other", "/run/shm", "", "mnt:[2]", false),
            // Its shared memory is a mount and no link: a view of the whole node, for monitoring.
            ("", "/host", own, "mnt:[2]", false),
            ("shm", "/host/run/gpupack/mps/shm", own, "mnt:[2]", false),
            // What is mounted over it counts.
            ("shm", "/dev/shm", "24 23 0:24 / /dev/shm rw - nfs s:/ rw\n", "mnt:[2]", false),
            // The host sees all mounts.
            ("shm", "/run/gpupack/mps/shm", "", "mnt:[0]", false),
            ("shm", "/dev/shm", "", "mnt:[0]", true),
        ] {
            let host = host();
            let mounts = mounted(&folder(&host).join(inner), at) + others;
            with_mounts(host.path(), "90", &mounts, container);
            let left = if is_kept { 3 } else { 0 };
            assert_eq!(swept(host.path(), 0).1, left, "{inner} {at} {container}");
        }
    }

    #[test]
    fn a_file_time_set_by_its_owner_does_not_make_it_recent() {
        let host = host();
        let day = Duration::from_secs(86_400);
        let tomorrow = fs::metadata(host.path()).unwrap().modified().unwrap() + day;
        File::options()
            .write(true)
            .open(host.path().join("shm/a"))
            .unwrap()
            .set_modified(tomorrow)
            .unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let (shm, proc) = (host.path().join("shm"), host.path().join("proc"));
        sweep(&shm, &proc, Duration::from_millis(20)).unwrap();
        assert_eq!(fs::read_dir(shm).unwrap().count(), 0);
    }

    #[test]
    fn folders_in_folders_are_removed_however_deep() {
        const DEPTH: usize = 12_000;
        let host = host();
        let mut inner = std::os::fd::OwnedFd::from(File::open(host.path().join("shm")).unwrap());
        for _ in 0..DEPTH {
            rustix::fs::mkdirat(&inner, "d", Mode::RWXU).unwrap();
            rustix::fs::symlinkat("/etc", &inner, "link").unwrap_or_default();
            inner = openat(&inner, "d", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        let sweeps: Vec<(usize, usize)> = (0..9).map(|_| swept(host.path(), 0)).collect();
        assert!(sweeps.iter().all(|(removed, _)| *removed <= MAX_REMOVED), "{sweeps:?}");
        assert_eq!(sweeps.iter().map(|(removed, _)| removed).sum::<usize>(), 2 * DEPTH + 3);
        assert_eq!(sweeps.last(), Some(&(0, 0)));
        assert!(Path::new("/etc/passwd").exists(), "links are removed, not followed");
    }
}
