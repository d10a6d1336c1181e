//! Commands to a control daemon of MPS, and its answers.
//!
//! NVIDIA's control program has two roles. With `-f` it is the daemon of its pipe directory.
//! Without, it reads commands and passes them to the daemon there.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use wire::api::condition::MpsState;

/// Longest time of one command.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Most bytes of an answer that are read: a list of servers has a few lines.
const MAX_ANSWER_BYTES: u64 = 16 << 10;

/// Most servers of one daemon that are checked: one per user, and one user under a shared server.
const MAX_SERVERS: usize = 16;

/// Arguments of a daemon in the foreground whose server takes clients of all users, since
/// containers run under many.
const DAEMON: [&str; 2] = ["-f", "-multiuser-server"];

/// The control program for the daemon with these pipes.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    pub(crate) program: PathBuf,
    /// Folder of the daemon's pipes.
    pub(crate) pipes: PathBuf,
    /// Folder of the daemon's logs.
    pub(crate) logs: PathBuf,
}

impl Control {
    /// Starts the daemon for the GPU `uuid`. Dropping the returned child kills it.
    ///
    /// # Errors
    /// The error of the operating system.
    pub(crate) fn start(&self, uuid: &str) -> std::io::Result<Child> {
        let mut daemon = self.command();
        daemon.args(DAEMON).env("CUDA_VISIBLE_DEVICES", uuid);
        daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    }

    /// The state of the daemon.
    pub(crate) async fn state(&self) -> MpsState {
        let servers = match self.query("get_server_list").await {
            Some(answer) => servers(&answer),
            None => return MpsState::Absent,
        };
        let Some(servers) = servers else { return MpsState::Absent };
        let mut state = MpsState::Idle;
        for server in servers {
            let answer = self.query(&format!("get_server_status {server}")).await;
            let found = answer.map_or(MpsState::Faulted, |answer| status(&answer));
            // The worst state of all counts: a client may be on that server.
            state = state.max(found);
        }
        state
    }

    /// Whether a server of the daemon has clients: one that does not say may. `None` if the daemon does not say which
    /// servers it has.
    pub(crate) async fn has_clients(&self) -> Option<bool> {
        for server in servers(&self.query("get_server_list").await?)? {
            let clients = self.query(&format!("get_client_list {server}")).await;
            if clients.is_none_or(|clients| !clients.trim().is_empty()) {
                return Some(true);
            }
        }
        Some(false)
    }

    /// Makes the daemon end itself and its servers, whatever their clients do.
    pub(crate) async fn quit(&self) {
        let _ = self.query("quit -t 1").await;
    }

    /// The answer to a command; `None` if no daemon answers in time.
    async fn query(&self, command: &str) -> Option<String> {
        tokio::time::timeout(TIMEOUT, self.exchange(command)).await.ok()?
    }

    async fn exchange(&self, command: &str) -> Option<String> {
        if !is_folder(&self.pipes) {
            return None;
        }
        let mut front = self.command();
        front.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut front = front.spawn().ok()?;
        let (mut input, output) = (front.stdin.take()?, front.stdout.take()?);
        input.write_all(format!("{command}\n").as_bytes()).await.ok()?;
        drop(input);
        let mut answer = Vec::new();
        output.take(MAX_ANSWER_BYTES).read_to_end(&mut answer).await.ok()?;
        let is_well = front.wait().await.ok()?.success();
        String::from_utf8(answer).ok().filter(|_| is_well)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env("CUDA_MPS_PIPE_DIRECTORY", &self.pipes);
        command.env("CUDA_MPS_LOG_DIRECTORY", &self.logs);
        command.kill_on_drop(true);
        command
    }
}

fn is_folder(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_dir())
}

/// The process ids in a list of servers; `None` if it is no such list.
fn servers(answer: &str) -> Option<Vec<u32>> {
    let lines = answer.lines().map(str::trim).filter(|line| !line.is_empty());
    let servers: Option<Vec<u32>> = lines.map(|line| line.parse().ok()).collect();
    servers.filter(|servers| servers.len() <= MAX_SERVERS)
}

/// The state that a server reports. An unknown one counts as faulted.
fn status(answer: &str) -> MpsState {
    match answer.trim() {
        "ACTIVE" => MpsState::Serving,
        "INITIALIZING" => MpsState::Starting,
        _ => MpsState::Faulted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_lists_of_numbers_and_known_words() {
        for (answer, expected) in [
            ("", Some(vec![])),
            ("\n", Some(vec![])),
            ("3421\n", Some(vec![3_421])),
            (" 1 \n2\n", Some(vec![1, 2])),
            ("Cannot find MPS control daemon process\n", None),
            ("-1\n", None),
            ("1 2\n", None),
            ("99999999999\n", None),
        ] {
            assert_eq!(servers(answer), expected, "{answer}");
        }
        assert_eq!(servers(&"7\n".repeat(17)), None);
        for (answer, expected) in [
            ("ACTIVE\n", MpsState::Serving),
            ("INITIALIZING\n", MpsState::Starting),
            ("FAULT\n", MpsState::Faulted),
            ("", MpsState::Faulted),
            ("ACTIVE\nFAULT\n", MpsState::Faulted),
            ("Invalid command\n", MpsState::Faulted),
        ] {
            assert_eq!(status(answer), expected, "{answer}");
        }
    }
}
