//! The log of one test.

use std::sync::{Arc, LazyLock, Mutex};

use tracing::Dispatch;
use tracing::subscriber::DefaultGuard;

/// Never asked. While there is one subscriber only, tracing (tracing-core 0.1) asks that of the current
/// thread whether a new line is of interest, and remembers the answer for all threads: the line of a test
/// that reads its log would be lost if another test wrote it first. With two subscribers it asks both.
static OTHER: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(tracing_subscriber::fmt().with_writer(std::io::sink).finish()));

/// What this thread logs while it lives.
pub(crate) struct Log {
    lines: Lines,
    _default: DefaultGuard,
}

impl Log {
    /// From now on.
    pub(crate) fn new() -> Self {
        LazyLock::force(&OTHER);
        let lines = Lines::default();
        let written = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || written.clone()).finish();
        Self { lines, _default: tracing::subscriber::set_default(subscriber) }
    }

    /// What was written so far.
    pub(crate) fn text(&self) -> String {
        let lines = self.lines.0.lock().expect("no test panics while it writes");
        String::from_utf8(lines.clone()).unwrap()
    }
}

/// What is written.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no test panics while it writes").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
