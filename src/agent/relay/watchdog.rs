//! Ends a process whose event loop has stopped, so that its container is made again. The part of an agent without
//! ports has no other way to show that. It never depends on NVML: no call of it is made on the event loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time between two turns that are counted, and between two looks.
const TURN_EVERY: Duration = Duration::from_secs(5);

/// Looks without a turn that end the process: after two minutes, as kubelet's probe does.
const LOOKS: u32 = 24;

/// Watches the event loop that calls this, from a thread of its own.
pub(crate) fn watch() {
    let turns = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&turns);
    tokio::spawn(async move {
        loop {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(TURN_EVERY).await;
        }
    });
    std::thread::spawn(move || {
        let mut looks = Looks::default();
        while !looks.look(turns.load(Ordering::Relaxed)) {
            std::thread::sleep(TURN_EVERY);
        }
        tracing::error!("the event loop has stopped: the process ends");
        // Without the handlers of an exit, which may wait for the driver.
        std::process::abort();
    });
}

/// What was seen of an event loop.
#[derive(Debug, Default)]
struct Looks {
    /// Its turns at the last look.
    turns: u64,
    /// Looks since it last turned.
    idle: u32,
}

impl Looks {
    /// Learns how often it has turned. Returns whether it has stopped.
    fn look(&mut self, turns: u64) -> bool {
        self.idle = if turns == self.turns { self.idle + 1 } else { 0 };
        self.turns = turns;
        self.idle >= LOOKS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_minutes_without_a_turn_end_the_process_and_a_slow_loop_does_not() {
        let mut looks = Looks::default();
        assert!((1..200).all(|turns| !looks.look(turns / 20)), "a turn in 100 s");
        let stopped = (0..).find(|_| looks.look(10)).unwrap();
        assert!((20..=24).contains(&stopped), "{stopped}");
    }
}
