//! The limit of an MPS client, by the environment of its process.
//!
//! This is the environment at the start of the process. A program may have changed or overwritten
//! it since, so this finds mistakes, not malice. What cannot be understood counts as no limit.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use parking_lot::Mutex;

use crate::processes::mounts::Mounts;

/// Most bytes of an environment that are read. Thousands of services make a few hundred KiB.
const MAX_ENVIRONMENT_BYTES: u64 = 2 << 20;

/// Most bytes of a container's mounts that are read. A hundred volumes make about 30 KiB.
const MAX_MOUNTS_BYTES: u64 = 1 << 20;

/// Longest wait for one read about a client, which takes less than a millisecond.
const ANSWERS_WITHIN: Duration = Duration::from_millis(250);

/// Most reads without an answer at a time: 2 seconds of waiting in all.
const MAX_UNANSWERED: usize = 8;

/// Where a client looks for its daemon by default.
const DEFAULT_PIPES: &str = "/tmp/nvidia-mps";

/// Clients with a read in progress. An environment is memory of its process, which can map a file
/// there whose file system never answers. Such a reader is left behind, and gets no second one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unanswered(Arc<Mutex<BTreeSet<PathBuf>>>);

impl Unanswered {
    /// Runs `read` about a process; `None` if it takes too long, or too many others still do.
    pub(crate) fn query<T: Send + 'static>(
        &self,
        process: PathBuf,
        read: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> Option<T> {
        {
            let mut all = self.0.lock();
            if all.len() >= MAX_UNANSWERED || !all.insert(process.clone()) {
                return None;
            }
        }
        let (answer, answered) = sync_channel(1);
        let (all, reader) = (self.clone(), std::thread::Builder::new());
        let asked = process.clone();
        let started = reader.spawn(move || {
            let found = read();
            all.forget(&process);
            // The caller may have stopped waiting.
            let _ = answer.send(found);
        });
        if started.is_err() {
            self.forget(&asked);
        }
        answered.recv_timeout(ANSWERS_WITHIN).ok()?
    }

    fn forget(&self, process: &Path) {
        self.0.lock().remove(process);
    }
}

/// A client as its environment describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Client {
    /// Where it looks for its daemon, in its own file system.
    pipes: PathBuf,
    /// Its memory limit on the device, in MiB.
    memory_mib: u64,
}

/// The memory limit in MiB on the device `uuid` of the process with the folder `process` in the
/// process table, as a client of the daemon with these `pipes`. This process sees `pipes`; its
/// folder is `own`.
///
/// `None` if its environment is not readable, sets no such limit, or leads to another daemon.
/// Mounts alone tell where its path leads. The path is never opened: the client chose it, and it
/// may lead to a file system that does not answer, or by a link to what only the agent sees there.
pub(crate) fn limit_mib(process: &Path, uuid: &str, pipes: &Path, own: &Path) -> Option<u64> {
    let client = Client::of(&environment(process)?, uuid)?;
    let mut parts = client.pipes.strip_prefix("/").ok()?.components();
    // A path with `..` may pass a link.
    let is_plain = parts.all(|part| matches!(part, Component::Normal(_)));
    let mounts = |process| Mounts::of(process, MAX_MOUNTS_BYTES).ok();
    let ours = mounts(own)?.place(&pipes.canonicalize().ok()?)?;
    let is_same = is_plain && mounts(process)?.place(&client.pipes)? == ours;
    is_same.then_some(client.memory_mib)
}

/// The environment of a process; `None` if it is not readable or above the limit.
fn environment(process: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(process.join("environ")).ok()?;
    file.take(MAX_ENVIRONMENT_BYTES + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= MAX_ENVIRONMENT_BYTES).then_some(bytes)
}

impl Client {
    /// The client that these variables describe, with the device `uuid` alone. If a variable occurs
    /// twice, programs take the first or the last: all must agree.
    fn of(environment: &[u8], uuid: &str) -> Option<Self> {
        let mut memory_mib = None;
        for value in values(environment, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") {
            memory_mib = memory_mib.max(Some(allowed_mib(value?, uuid)?));
        }
        let mut pipes: Vec<Option<&str>> = values(environment, "CUDA_MPS_PIPE_DIRECTORY").collect();
        pipes.dedup();
        let pipes = match pipes[..] {
            [] => DEFAULT_PIPES,
            [only] => only?,
            _ => return None,
        };
        Some(Self { pipes: PathBuf::from(pipes), memory_mib: memory_mib? })
    }
}

/// The values of a variable in an environment; `None` for one that is no text.
fn values<'a>(environment: &'a [u8], name: &'a str) -> impl Iterator<Item = Option<&'a str>> {
    environment.split(|byte| *byte == 0).filter_map(move |variable| {
        let value = variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some(std::str::from_utf8(value).ok())
    })
}

/// The largest amount that a list of limits, such as `0=4096M`, allows on the device `uuid`, in
/// MiB. `None` if an entry names another device: then MPS drops all limits, as the process cannot
/// see that device.
fn allowed_mib(limits: &str, uuid: &str) -> Option<u64> {
    let mut most = None;
    for entry in limits.split(',') {
        let (device, amount) = entry.split_once('=')?;
        if device != "0" && device != uuid {
            return None;
        }
        let (digits, unit) = match (amount.strip_suffix('M'), amount.strip_suffix('G')) {
            (Some(digits), _) => (digits, 1),
            (None, Some(digits)) => (digits, 1 << 10),
            (None, None) => return None,
        };
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let mib = digits.parse::<u64>().ok().filter(|_| is_number)?.checked_mul(unit)?;
        most = most.max(Some(mib).filter(|mib| *mib > 0));
        most?;
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_where_every_entry_names_this_device() {
        for (limits, mib) in [
            ("0=4096M", Some(4_096)),
            ("0=4G", Some(4_096)),
            ("GPU-a=1M", Some(1)),
            ("0=1M,GPU-a=7M", Some(7)),
            ("0=8G,0=1M", Some(8_192)),
            ("0=4G,1=4G", None),
            ("1=4G", None),
            ("GPU-b=4G", None),
            ("GPU-=4G", None),
            ("", None),
            ("0", None),
            ("0=", None),
            ("0=M", None),
            ("0=4", None),
            ("0=4096", None),
            ("0=4K", None),
            ("0=4g", None),
            ("0=+4G", None),
            ("0=-4G", None),
            ("0=4.5G", None),
            ("0= 4G", None),
            (" 0=4G", None),
            ("0=4G,", None),
            (",0=4G", None),
            ("0=0M", None),
            ("0=0M,0=4M", None),
            ("0=4G=1", None),
            ("0=99999999999999999999G", None),
            ("0=18446744073709551615G", None),
            ("0=4G;rm", None),
        ] {
            assert_eq!(allowed_mib(limits, "GPU-a"), mib, "{limits}");
        }
    }

    #[test]
    fn a_false_or_odd_environment_makes_no_client() {
        let client = |text: &[u8]| {
            let client = Client::of(text, "GPU-a")?;
            Some((client.pipes.to_str().unwrap().to_owned(), client.memory_mib))
        };
        let at = |pipes: &str, mib| Some((pipes.to_owned(), mib));
        for (text, found) in [
            (&b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4G\0"[..], at("/tmp/nvidia-mps", 4_096)),
            (
                b"A=\xff\xfe\0CUDA_MPS_PIPE_DIRECTORY=/p\0CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1M",
                at("/p", 1),
            ),
            (
                b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1M\0CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=9M\0",
                at("/tmp/nvidia-mps", 9),
            ),
            (
                b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1M\0CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=1=9M\0",
                None,
            ),
            (
                b"CUDA_MPS_PIPE_DIRECTORY=/a\0CUDA_MPS_PIPE_DIRECTORY=/b\0\
                  CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1M\0",
                None,
            ),
            (b"CUDA_MPS_PIPE_DIRECTORY=/\xff\0CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1M\0", None),
            (b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1M\xff\0", None),
            (b"XCUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1M\0", None),
            (b"CUDA_MPS_PINNED_DEVICE_MEM_LIMITS=0=1M\0", None),
            (b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT\0", None),
            (b"CUDA_MPS_PIPE_DIRECTORY=/p\0", None),
            (b"", None),
            (b"\0\0\0", None),
        ] {
            assert_eq!(client(text), found, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn clients_that_never_answer_are_skipped_and_queried_once() {
        let unanswered = Unanswered::default();
        let (end, silence) = std::sync::mpsc::channel::<()>();
        let silence = Arc::new(Mutex::new(silence));
        let path = |pid: usize| PathBuf::from(pid.to_string());
        for pid in 0..MAX_UNANSWERED {
            assert_eq!(
                unanswered.query(path(100), move || Some(pid)),
                Some(pid),
                "others are queried"
            );
            let silence = Arc::clone(&silence);
            let silent = move || silence.lock().recv().ok().map(|()| 0);
            assert_eq!(unanswered.query(path(pid), silent), None);
            assert_eq!(unanswered.query(path(pid), || Some(1)), None, "not twice");
        }
        assert_eq!(unanswered.query(path(100), || Some(1)), None, "too many are silent");
        drop(end);
        let found = (0..1_000).find_map(|_| {
            std::thread::sleep(Duration::from_millis(5));
            unanswered.query(path(0), || Some(1))
        });
        assert_eq!(found, Some(1), "it answers again");
    }

    #[test]
    fn a_client_of_another_daemon_has_no_memory_limit() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let at = |path: &str| root.join(path);
        for made in ["mps/pipe", "mps/other", "proc/7", "proc/self"] {
            std::fs::create_dir_all(at(made)).unwrap();
        }
        let own = "20 1 254:0 / / rw - ext4 /dev/vda rw\n";
        std::fs::write(at("proc/self/mountinfo"), own).unwrap();
        let mounted = root.display();
        let theirs = format!(
            "50 49 0:50 / / rw - overlay overlay rw\n\
             51 50 254:0 {mounted}/mps/pipe /run/mine rw - ext4 /dev/vda rw\n\
             52 50 254:0 {mounted}/mps/other /run/other rw - ext4 /dev/vda rw\n\
             53 50 254:1 {mounted}/mps/pipe /run/alike rw - ext4 /dev/vdb rw\n\
             54 50 254:0 {mounted}/mps/pipe//deleted /run/gone rw - ext4 /dev/vda rw\n\
             55 50 254:0 {mounted}/mps/pipe /run/covered rw - ext4 /dev/vda rw\n\
             56 55 0:56 / /run/covered rw - nfs server:/ rw\n"
        );
        std::fs::write(at("proc/7/mountinfo"), theirs).unwrap();
        let own = at("proc/self");
        let limit = |pipes: &str| {
            let text =
                format!("CUDA_MPS_PIPE_DIRECTORY={pipes}\0CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5M\0");
            std::fs::write(at("proc/7/environ"), text).unwrap();
            limit_mib(&at("proc/7"), "GPU-a", &at("mps/pipe"), &own)
        };
        assert_eq!(limit("/run/mine"), Some(5));
        let outside = at("mps/pipe").display().to_string();
        for bad in ["/run/other", "/run/none", "run/mine", "", "/", "/../../../mps/pipe", &outside]
        {
            assert_eq!(limit(bad), None, "{bad}");
        }
        for bad in ["/run/alike", "/run/gone", "/run/covered", "/run/mine/x", "/run/../run/mine"] {
            assert_eq!(limit(bad), None, "{bad}");
        }
        // If the agent followed them, these links would lead to the daemon's own folder.
        let run = at("proc/7").join("root").join("run");
        std::fs::create_dir_all(&run).unwrap();
        std::os::unix::fs::symlink(at("mps/pipe"), run.join("link")).unwrap();
        std::os::unix::fs::symlink("/", run.join("up")).unwrap();
        assert_eq!(limit("/run/link"), None, "an absolute link is not followed in our own root");
        assert_eq!(limit(&format!("/run/up{outside}")), None);
        let limit_of =
            |process: &str, pipes: &str| limit_mib(&at(process), "GPU-a", &at(pipes), &own);
        assert_eq!(limit("/run/mine"), Some(5));
        assert_eq!(limit_of("proc/8", "mps/pipe"), None, "it has ended");
        assert_eq!(limit_of("proc/7", "mps/gone"), None, "no daemon was there");
        std::fs::write(at("proc/7/environ"), vec![b'A'; (2 << 20) + 1]).unwrap();
        assert_eq!(limit_of("proc/7", "mps/pipe"), None, "longer than any");
    }
}
