//! The memory that daemons and clients of MPS share, as files: it is emptied when no client is left.
//!
//! Clients that end without tidying up leave their files behind, and the folder is everybody's. Which client
//! made a file cannot be told, so nothing is removed while any client lives.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most entries that are removed at once; the rest the next time.
const MAX_REMOVED: usize = 10_000;

/// Most bytes of a process's list of mapped files that are read.
const MAX_MAPS_BYTES: u64 = 4 << 20;

/// Where a container has its shared memory, in its own file system.
const SHARED_MEMORY: &str = "root/dev/shm";

/// Removes what is left in `folder` where no process of another container has it as its shared memory.
/// What is younger than `spared` stays, since a client may have come meanwhile, and so does what a daemon
/// has open. Answers how many entries were removed.
///
/// # Errors
/// What the operating system says, also where it cannot be told whether a process is a client.
pub(super) fn sweep(folder: &Path, proc_root: &Path, spared: Duration) -> io::Result<usize> {
    let shared = identity(&fs::metadata(folder)?);
    let own = proc_root.join(std::process::id().to_string());
    let container = fs::read_link(own.join("ns/mnt"))?;
    let mut used = BTreeSet::new();
    for process in processes(proc_root)? {
        let seen = match absent(fs::metadata(process.join(SHARED_MEMORY)))? {
            Some(seen) if identity(&seen) == shared => {
                absent(fs::read_link(process.join("ns/mnt")))?
            }
            _ => continue,
        };
        match seen {
            Some(of) if of == container => used.extend(used_by(&process)),
            Some(_) => return Ok(0),
            None => {}
        }
    }
    let mut removed = 0;
    for entry in fs::read_dir(folder)?.take(MAX_REMOVED) {
        let entry = entry?;
        let Some(found) = absent(entry.metadata())? else { continue };
        let age = found.modified()?.elapsed().unwrap_or_default();
        if age < spared || used.contains(&found.ino()) {
            continue;
        }
        let path = entry.path();
        let gone = if found.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed += usize::from(absent(gone)?.is_some());
    }
    Ok(removed)
}

/// The folders of all processes.
fn processes(proc_root: &Path) -> io::Result<Vec<PathBuf>> {
    let is_number = |name: &OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    let entries = fs::read_dir(proc_root)?.filter_map(Result::ok);
    Ok(entries.filter(|entry| is_number(&entry.file_name())).map(|entry| entry.path()).collect())
}

/// The inodes of the files that a process has open or mapped; too many rather than too few.
fn used_by(process: &Path) -> BTreeSet<u64> {
    let open = fs::read_dir(process.join("fd")).into_iter().flatten().filter_map(Result::ok);
    let open = open.filter_map(|entry| fs::metadata(entry.path()).ok()).map(|found| found.ino());
    let mut text = Vec::new();
    if let Ok(maps) = File::open(process.join("maps")) {
        // What could be read of it counts.
        let _ = maps.take(MAX_MAPS_BYTES).read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text);
    let mapped = text.lines().filter_map(|line| line.split_whitespace().nth(4)?.parse().ok());
    open.chain(mapped).collect()
}

fn identity(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// `None` for what is not there, as processes and their files come and go.
fn absent<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    // A process that ends while it is looked at.
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
    fn world() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("shm/folder/in")).unwrap();
        fs::write(folder.path().join("shm/a"), "a").unwrap();
        symlink("/etc", folder.path().join("shm/link")).unwrap();
        let own = std::process::id();
        process(folder.path(), own, "shm", "mnt:[1]");
        folder
    }

    fn process(folder: &Path, pid: u32, sees: &str, container: &str) {
        let process = folder.join(format!("proc/{pid}"));
        fs::create_dir_all(process.join("root/dev")).unwrap();
        fs::create_dir_all(process.join("ns")).unwrap();
        fs::create_dir_all(process.join("fd")).unwrap();
        symlink(folder.join(sees), process.join("root/dev/shm")).unwrap();
        symlink(container, process.join("ns/mnt")).unwrap();
    }

    fn swept(folder: &Path, spared: u64) -> (usize, usize) {
        let (shm, proc) = (folder.join("shm"), folder.join("proc"));
        let removed = sweep(&shm, &proc, Duration::from_secs(spared)).unwrap();
        (removed, fs::read_dir(shm).unwrap().count())
    }

    #[test]
    fn what_clients_left_is_removed_once_none_is_there() {
        let world = world();
        process(world.path(), 77, "shm", "mnt:[2]");
        assert_eq!(swept(world.path(), 0), (0, 3), "a client is there");
        fs::remove_dir_all(world.path().join("proc/77")).unwrap();
        process(world.path(), 78, "other", "mnt:[3]");
        fs::create_dir(world.path().join("proc/self")).unwrap();
        fs::create_dir(world.path().join("proc/79")).unwrap();
        assert_eq!(swept(world.path(), 3_600), (0, 3), "too young");
        assert_eq!(swept(world.path(), 0), (3, 0));
        assert!(Path::new("/etc/passwd").exists(), "links are removed, not followed");
        assert_eq!(swept(world.path(), 0), (0, 0));
    }

    #[test]
    fn what_a_daemon_of_the_same_container_uses_stays() {
        let world = world();
        process(world.path(), 80, "shm", "mnt:[1]");
        let inode = |name: &str| fs::metadata(world.path().join("shm").join(name)).unwrap().ino();
        let maps = format!("7f00-7f01 rw-s 00000000 00:17 {} /dev/shm/a\n", inode("a"));
        fs::write(world.path().join("proc/80/maps"), maps).unwrap();
        fs::write(world.path().join("shm/b"), "b").unwrap();
        symlink(world.path().join("shm/b"), world.path().join("proc/80/fd/3")).unwrap();
        assert_eq!(swept(world.path(), 0), (2, 2));
        assert!(inode("a") > 0 && inode("b") > 0);
    }

    #[test]
    fn without_a_look_at_every_process_nothing_is_removed() {
        let world = world();
        let (shm, proc) = (world.path().join("shm"), world.path().join("proc"));
        assert!(sweep(&shm, &world.path().join("none"), Duration::ZERO).is_err());
        let loops = proc.join("81").join("root").join("dev");
        fs::create_dir_all(&loops).unwrap();
        symlink("shm", loops.join("shm")).unwrap();
        assert!(sweep(&shm, &proc, Duration::ZERO).is_err(), "no answer is not `no`");
        assert_eq!(fs::read_dir(shm).unwrap().count(), 3);
    }
}
