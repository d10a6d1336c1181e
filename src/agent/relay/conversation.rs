//! One connection between the two parts of an agent, the same at both ends.
//!
//! Each message is one line of JSON. A side writes what is newest when it has changed; what it had no time to write
//! is replaced. An empty line says that it is alive. Whatever the other side sends, memory is bounded by the longest
//! line, and nothing panics.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use runtime::clock::Clock;
use wire::units::Timestamp;

/// Time between two signs of life.
const ALIVE_EVERY: Duration = Duration::from_secs(2);

/// A side that sends nothing for so long, or takes nothing, is not alive.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(10);

/// A connection to the other part.
#[derive(Debug)]
pub(crate) struct Conversation {
    reader: BufReader<OwnedReadHalf>,
    /// What has come of a line so far.
    line: Vec<u8>,
    /// Longest line that is read, in bytes.
    reads: usize,
    /// The task that writes; it ends with the conversation.
    writer: AbortHandle,
    clock: Clock,
    /// When anything came.
    heard: Timestamp,
}

/// Longest lines of a conversation, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) reads: usize,
    pub(crate) writes: usize,
}

/// Why a conversation ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Ended {
    #[error("it was closed")]
    Closed,
    #[error("{cause}")]
    Failed { cause: String },
    #[error("a message of it has more than {most} bytes")]
    TooLong { most: usize },
    /// What the message has is left out: it may be anything.
    #[error("a message of it cannot be read (column {column})")]
    Unreadable { column: usize },
    #[error("a message of it has too many devices, processes or containers")]
    Absurd,
    #[error("it sent nothing for {} s", SILENT_AFTER.as_secs())]
    Silent,
}

impl Conversation {
    /// Begins one that says what `newest` has, now and after each change.
    pub(crate) fn begin<Out>(
        stream: UnixStream,
        ends: Ends,
        newest: watch::Receiver<Out>,
        clock: Clock,
    ) -> Self
    where
        Out: Serialize + Send + Sync + 'static,
    {
        let (reader, half) = stream.into_split();
        let writer = tokio::spawn(write(half, ends.writes, newest)).abort_handle();
        let reader = BufReader::new(reader);
        Self { reader, line: Vec::new(), reads: ends.reads, writer, clock, heard: clock.now() }
    }

    /// The next message. It may be dropped and called again: nothing is lost.
    ///
    /// # Errors
    /// [`Ended`]: no further message can be read.
    pub(crate) async fn next<In: DeserializeOwned>(&mut self) -> Result<In, Ended> {
        loop {
            let filled = self.reader.fill_buf().await;
            let part = filled.map_err(|error| Ended::Failed { cause: error.to_string() })?;
            if part.is_empty() {
                return Err(Ended::Closed);
            }
            self.heard = self.clock.now();
            let end = part.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(part.len(), |end| end + 1);
            if self.line.len() + used > self.reads {
                return Err(Ended::TooLong { most: self.reads });
            }
            self.line.extend_from_slice(&part[..used]);
            self.reader.consume(used);
            if end.is_some() {
                let line = std::mem::take(&mut self.line);
                if line != b"\n" {
                    let read = serde_json::from_slice(&line);
                    return read.map_err(|error| Ended::Unreadable { column: error.column() });
                }
            }
        }
    }

    /// Whether the other side has sent nothing for too long.
    pub(crate) fn is_silent(&self) -> bool {
        self.clock.now().since(self.heard) >= SILENT_AFTER
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        self.writer.abort();
    }
}

/// The next message of a conversation, if there is one.
pub(crate) async fn next<In: DeserializeOwned>(
    conversation: &mut Option<Conversation>,
) -> Result<In, Ended> {
    match conversation {
        Some(conversation) => conversation.next().await,
        None => std::future::pending().await,
    }
}

/// Writes what is newest, now and after each change, until the other side takes no more. Then it sees the end.
async fn write<Out: Serialize>(
    mut half: OwnedWriteHalf,
    most: usize,
    mut newest: watch::Receiver<Out>,
) {
    newest.mark_changed();
    loop {
        let line = match timeout(ALIVE_EVERY, newest.changed()).await {
            Ok(Ok(())) => line(&*newest.borrow_and_update(), most),
            Ok(Err(_)) => return,
            Err(_) => b"\n".to_vec(),
        };
        if !matches!(timeout(SILENT_AFTER, half.write_all(&line)).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// A message as a line. One that is too long is left out: the other side would end the conversation.
fn line<Out: Serialize>(message: &Out, most: usize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    if line.is_empty() || line.len() >= most {
        tracing::error!(bytes = line.len(), "a message between the parts of the agent is left out");
        line.clear();
    }
    line.push(b'\n');
    line
}
