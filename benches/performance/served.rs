//! A running gpupack server, in a separate process.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use runtime::clock::Clock;

/// Ticks of CPU time a second in `/proc`: the same on all of Linux.
const TICKS: f64 = 100.0;

/// The process. It is killed when this is dropped.
pub(crate) struct Served {
    process: Child,
    /// Of the verbs.
    pub(crate) address: String,
    /// For agents.
    pub(crate) agents: String,
    /// Of metrics and health.
    metrics: String,
}

/// A free address of the loopback interface.
fn free() -> String {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
    port.expect("a port is free").to_string()
}

fn started(arguments: &[&str]) -> Child {
    let mut program = Command::new(env!("CARGO_BIN_EXE_gpupack"));
    program.args(arguments).args(["--log-level", "error"]).stdout(Stdio::null());
    program.spawn().expect("gpupack can be started")
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Served {
    /// Starts a demo with these arguments, with everything on one address. Its errors are shown.
    pub(crate) fn demo(arguments: &[&str]) -> Self {
        let address = free();
        let process = started(&[&["demo", "--listen", &address], arguments].concat());
        Self { process, agents: address.clone(), metrics: address.clone(), address }
    }

    /// Starts an extender with these keys and a kubeconfig, on its own addresses. Its file is in `folder`.
    pub(crate) fn extender(keys: &str, kubeconfig: &str, folder: &Path) -> Self {
        let (address, agents, metrics) = (free(), free(), free());
        let text = format!(
            "{keys}kubeconfig: {kubeconfig}\nlisten: {address}\nagents_listen: {agents}\n\
             metrics_listen: {metrics}\npage_listen: 127.0.0.1:0\n"
        );
        let file = folder.join("config");
        std::fs::write(&file, text).expect("the folder is writable");
        let file = file.to_str().expect("a folder with a plain name");
        let process = started(&["extender", "--config", file]);
        Self { process, address, agents, metrics }
    }

    /// Head and body of the answer to a GET of metrics or health; none while it does not listen.
    pub(crate) fn get(&self, path: &str) -> Option<String> {
        let mut connection = TcpStream::connect(&self.metrics).ok()?;
        connection.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
        let mut text = String::new();
        connection.read_to_string(&mut text).ok()?;
        Some(text)
    }

    fn of_process(&self, file: &str) -> String {
        let path = format!("/proc/{}/{file}", self.process.id());
        std::fs::read_to_string(path).expect("gpupack runs")
    }

    /// CPU time that it has used, in seconds.
    pub(crate) fn cpu(&self) -> f64 {
        let stat = self.of_process("stat");
        let (_, fields) = stat.rsplit_once(')').expect("the name is in brackets");
        let field = |at: usize| fields.split_whitespace().nth(at)?.parse::<f64>().ok();
        let ticks = field(11).zip(field(12)).map(|(user, system)| user + system);
        ticks.expect("times of the process") / TICKS
    }

    /// Most memory that it ever held, in MiB.
    pub(crate) fn peak_mib(&self) -> u64 {
        let status = self.of_process("status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.expect("Linux reports the peak") / 1024
    }

    /// Share of one core that it uses while this thread waits for so long.
    pub(crate) fn load(&self, clock: Clock, wait: Duration) -> f64 {
        let (before, started) = (self.cpu(), clock.precise());
        std::thread::sleep(wait);
        (self.cpu() - before) / (clock.precise() - started).as_secs_f64()
    }
}
