//! The right to write: who writes, and until when.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::request::placement::FenceWriter;
use runtime::clock::Clock;
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// The term of this process: from when it leads until another one does. Cheap to clone.
///
/// Each write is checked against it. A process that is frozen between that check and its write may
/// still write later: the versions that a successor fences make such a write fail.
#[derive(Clone, Debug)]
pub struct Term(Arc<TermState>);

#[derive(Debug)]
struct TermState {
    clock: Clock,
    /// Separates processes whose terms have the same number.
    random: u64,
    writer: OnceLock<FenceWriter>,
    /// The number of milliseconds on the clock when it ends, unless it is renewed.
    ends: AtomicU64,
}

impl Term {
    /// A process that does not lead yet. `random` separates it from others.
    pub fn none(clock: Clock, random: u64) -> Self {
        let (writer, ends) = (OnceLock::new(), AtomicU64::new(0));
        Self(Arc::new(TermState { clock, random, writer, ends }))
    }

    /// A process without other replicas: it leads from its start, until it ends.
    pub fn alone(clock: Clock, random: u64) -> Self {
        let term = Self::none(clock, random);
        term.begin(clock.unix_seconds(), Timestamp::from_millis(u64::MAX));
        term
    }

    /// Begins the only term of this process. Later terms have larger numbers.
    pub fn begin(&self, number: u64, ends: Timestamp) {
        let _ = self.0.writer.set(FenceWriter::new(number, self.0.random));
        self.renew(ends);
    }

    /// Notes that no other process leads before this time.
    pub fn renew(&self, ends: Timestamp) {
        self.0.ends.fetch_max(ends.millis(), Ordering::AcqRel);
    }

    /// Ends it for good.
    pub fn end(&self) {
        self.0.ends.store(0, Ordering::Release);
    }

    /// Whether this process may write now.
    pub fn is_valid(&self) -> bool {
        let ends = self.0.ends.load(Ordering::Acquire);
        self.0.clock.now().millis() < ends || mutated(Mutation::TermUnchecked)
    }

    /// This process, as it signs what it writes; `None` before it leads.
    pub fn writer(&self) -> Option<FenceWriter> {
        self.0.writer.get().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime::clock::SimulatedTime;

    #[test]
    fn a_term_is_valid_until_it_is_not_renewed() {
        static TIME: SimulatedTime = SimulatedTime::starting(7);
        let at = Timestamp::from_millis;
        let term = Term::none(Clock::simulated(&TIME), 1);
        assert!(!term.is_valid() && term.writer().is_none());
        term.begin(20, at(100));
        assert!(term.is_valid() && term.writer() == Some(FenceWriter::new(20, 1)));
        TIME.set(at(100));
        assert!(!term.is_valid(), "nobody has renewed it");
        term.renew(at(150));
        term.renew(at(120));
        TIME.set(at(149));
        assert!(term.is_valid(), "an earlier renewal shortens nothing");
        term.end();
        assert!(!term.is_valid());
        assert!(Term::alone(Clock::simulated(&TIME), 1).is_valid());
    }
}
