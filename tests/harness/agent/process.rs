//! `gpupack agent` as it runs on a node.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use runtime::clock::Clock;

use super::bed::Bed;
use super::extender::Extender;

/// The running agent of a test bed; killed when it is dropped.
pub(crate) struct AgentProcess {
    child: Child,
    metrics: String,
    /// The lines of its log so far.
    log: Arc<Mutex<Vec<String>>>,
}

impl AgentProcess {
    /// Starts it, and waits until it shows its metrics.
    pub(crate) fn start(bed: &Bed, extender: &Extender) -> Self {
        Self::start_with(bed, extender, &[])
    }

    /// Starts it with further flags.
    pub(crate) fn start_with(bed: &Bed, extender: &Extender, flags: &[&OsStr]) -> Self {
        Self::start_at(bed, &extender.url(), flags)
    }

    /// Starts it with further flags, for the extender at this address.
    pub(crate) fn start_at(bed: &Bed, url: &str, flags: &[&OsStr]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack-agent"));
        command.args(["--extender", url, "--metrics-listen", "127.0.0.1:0"]);
        command.arg("--kubelet-socket").arg(bed.proc_root().join("kubelet.sock"));
        Self::spawn(bed, command.args(flags), "showing metrics")
    }

    /// Starts the part of an agent that reports; the part with the driver is another process.
    pub(crate) fn start_reporting(bed: &Bed, url: &str, flags: &[&OsStr]) -> Self {
        let socket = bed.path("driver.sock");
        let own = [OsStr::new("--driver-socket"), socket.as_os_str()];
        Self::start_at(bed, url, &[&own, flags].concat())
    }

    /// Starts the part of an agent that has the driver.
    pub(crate) fn start_driver(bed: &Bed, flags: &[&OsStr]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack-agent"));
        command.arg("driver").arg("--socket").arg(bed.path("driver.sock"));
        Self::spawn(bed, command.args(flags), "connect")
    }

    /// Starts it, and waits until its log has this text.
    fn spawn(bed: &Bed, command: &mut Command, awaited: &str) -> Self {
        let mut child = command
            .args(["--node", "n"])
            .arg("--nvml-library")
            .arg(bed.library())
            .arg("--proc-root")
            .arg(bed.proc_root())
            .env("NO_COLOR", "1")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let shown = lines.by_ref().map(Result::unwrap).find(|line| line.contains(awaited));
        let shown = shown.expect("it starts, or says on stderr why not");
        let metrics = shown.rsplit_once("address=").map_or("", |(_, address)| address);
        let metrics = metrics.trim().to_owned();
        let log = Arc::<Mutex<Vec<String>>>::default();
        let kept = Arc::clone(&log);
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| kept.lock().unwrap().push(line));
        });
        Self { child, metrics, log }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What Prometheus would read.
    pub(crate) fn metrics(&self) -> String {
        let answer = self.asked("/metrics");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        answer
    }

    /// The whole answer to a request for this path.
    pub(crate) fn asked(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.metrics).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// The lines of its log that have this text.
    pub(crate) fn logged(&self, text: &str) -> Vec<String> {
        let lines = self.log.lock().unwrap();
        lines.iter().filter(|line| line.contains(text)).cloned().collect()
    }

    /// The last line of its log.
    pub(crate) fn last_line(&self) -> String {
        self.log.lock().unwrap().last().cloned().unwrap_or_default()
    }

    /// The exit code, if it ends within this time, and how long that took.
    pub(crate) fn ends_within(&mut self, most: Duration) -> Option<(Option<i32>, Duration)> {
        let clock = Clock::start();
        while clock.precise() < most {
            if let Some(status) = self.child.try_wait().unwrap() {
                let took = clock.precise();
                // The thread that reads the log sees the end of the pipe.
                std::thread::sleep(Duration::from_millis(100));
                return Some((status.code(), took));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        None
    }

    /// The value of the series whose line has all `parts`.
    pub(crate) fn metric(&self, parts: &[&str]) -> Option<String> {
        let text = self.metrics();
        let line = text.lines().find(|line| parts.iter().all(|part| line.contains(part)));
        line.and_then(|line| line.rsplit_once(' ')).map(|(_, value)| value.to_owned())
    }

    /// Stops it with a signal, as kubelet does, and waits until it has ended.
    pub(crate) fn end(mut self) -> ExitStatus {
        self.signal("-TERM");
        self.child.wait().unwrap()
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// Memory that it has, or had at most (`VmRSS`, `VmHWM`), in KiB.
    pub(crate) fn memory_kib(&self, kind: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(kind)).unwrap();
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
