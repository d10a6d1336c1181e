//! Child processes that cannot outlive the test.
//!
//! Each program runs under a small shell that holds the reading end of a pipe. When the pipe
//! closes, the shell kills the program: when the [`Leash`] is dropped, when a test panics, and also
//! when the test process itself is killed, because the kernel closes its pipes. (The control plane
//! lives in a `static`, which Rust never drops.)

use std::fs::File;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Waits for the program ($@); a background reader of the pipe kills it when the pipe closes.
const SHELL: &str = r#"
exec 3<&0
"$@" </dev/null 3<&- &
program=$!
{ read -r _ <&3; kill -9 "$program" 2>/dev/null; } &
reader=$!
wait "$program"
code=$?
kill "$reader" 2>/dev/null
exit "$code"
"#;

/// Ticks in a second of the times in `/proc/<pid>/stat`.
const TICKS: u64 = 100;

/// A running program and the pipe that keeps it alive.
pub(crate) struct Leash {
    name: String,
    shell: Child,
    pipe: Option<ChildStdin>,
    /// The id of the program, once it is known: to look for it takes a millisecond, which is seen where
    /// times are measured.
    program: OnceLock<String>,
}

impl Leash {
    /// Starts `program`; what it prints goes to the end of the file `log`.
    pub(crate) fn start(name: &str, program: &Path, arguments: &[String], log: &Path) -> Self {
        let out = File::options()
            .create(true)
            .append(true)
            .open(log)
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", log.display()));
        let err = out.try_clone().expect("a file handle can be duplicated");
        let mut shell = Command::new("sh")
            .args(["-c", SHELL, "sh"])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(out)
            .stderr(err)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        let pipe = shell.stdin.take();
        Self { name: name.to_owned(), shell, pipe, program: OnceLock::new() }
    }

    /// Kills the program with SIGKILL and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        drop(self.pipe.take());
        let _ended = self.shell.wait();
    }

    /// Sends SIGTERM to the program, and waits for nothing.
    pub(crate) fn stop_gently(&self) {
        self.signal("TERM");
    }

    /// Sends a signal to the program, such as `STOP` and `CONT`.
    pub(crate) fn signal(&self, name: &str) {
        let command = format!("kill -{name} $1");
        let sent = Command::new("sh").args(["-c", &command, "sh", &self.program()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "cannot signal {}", self.name);
    }

    /// Host memory that the program has now, in KiB: Linux's `VmRSS`.
    pub(crate) fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.program()));
        let status = status.expect("the program runs");
        let mut amounts = status.lines().filter_map(|line| line.strip_prefix("VmRSS:"));
        let amount = amounts.next().and_then(|text| text.trim().strip_suffix(" kB"));
        amount.and_then(|number| number.parse().ok()).expect("Linux reports it in KiB")
    }

    /// Lets the program run on one CPU alone.
    pub(crate) fn keep_on(&self, cpu: usize) {
        keep_on(&self.program(), cpu);
    }

    /// What the program has used since its start.
    pub(crate) fn used(&self) -> Used {
        let folder = format!("/proc/{}", self.program());
        let read = |path: &str| std::fs::read_to_string(path).ok();
        // The name in brackets may have spaces; user and system time are the 12th and 13th field after it.
        let stat = read(&format!("{folder}/stat")).expect("the program runs");
        let (_, fields) = stat.rsplit_once(") ").expect("Linux names the program in brackets");
        let times = fields.split(' ').skip(11).take(2);
        let ticks: u64 = times.filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        let threads = std::fs::read_dir(format!("{folder}/task")).expect("the program runs");
        let waits = threads.flatten().filter_map(|thread| {
            let status = read(&thread.path().join("status").display().to_string())?;
            let count =
                status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            count?.trim().parse::<u64>().ok()
        });
        Used { processor: Duration::from_millis(ticks * 1_000 / TICKS), waits: waits.sum() }
    }

    /// The id of the program: the only child of the shell that is no shell.
    fn program(&self) -> String {
        // Another process may have its id by now.
        let known = self.program.get().filter(|id| self.is_program(id));
        let found = known.cloned().or_else(|| {
            let processes = std::fs::read_dir("/proc").expect("Linux has it").flatten();
            let mut ids = processes.filter_map(|process| process.file_name().into_string().ok());
            ids.find(|id| self.is_program(id))
        });
        let found = found.unwrap_or_else(|| panic!("{} does not run", self.name));
        let _known = self.program.set(found.clone());
        found
    }

    fn is_program(&self, id: &str) -> bool {
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{id}/stat")) else { return false };
        let names = stat.split_once(" (").and_then(|(_, rest)| rest.rsplit_once(") "));
        names.is_some_and(|(name, rest)| {
            name != "sh" && rest.split(' ').nth(1) == Some(&self.shell.id().to_string())
        })
    }

    /// How the program ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.shell.try_wait().ok().flatten()
    }

    /// The name given at the start, for messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// What a program has used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Used {
    /// Processor time, that of the kernel for it included.
    pub(crate) processor: Duration,
    /// How often one of the threads that it has now began to wait.
    pub(crate) waits: u64,
}

impl Drop for Leash {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Lets all threads of a process, and those that they start, run on one CPU alone.
pub(crate) fn keep_on(process: &str, cpu: usize) {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).expect("the program runs");
    for thread in threads.flatten() {
        let id = thread.file_name().to_str().and_then(|id| id.parse().ok()).and_then(Pid::from_raw);
        // A thread may have ended meanwhile.
        let _kept =
            sched_setaffinity(Some(id.expect("Linux names threads by numbers")), &only(cpu));
    }
}

/// Lets this thread run on one CPU alone.
pub(crate) fn keep_thread_on(cpu: usize) {
    sched_setaffinity(None, &only(cpu)).expect("a CPU of this machine");
}

fn only(cpu: usize) -> CpuSet {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    cpus
}
