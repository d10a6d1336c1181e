//! What the answers of the API server say about it: how late it is there, and whether it accepts this process.
//!
//! Times of its objects, such as the creation of a pod, are by its clock. They are compared with
//! [`ApiServer::unix_seconds`], never with the wall clock of this machine, which may be wrong, and which people set.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Clock;
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// How many answers say how late it is, together with the newest one. So the median ignores two that are wrong, and
/// after three a clock that was really set is followed.
const VOTES: usize = 5;

/// `401 Unauthorized`: the API server does not know whose the call is. 403 is something else: it knows.
const UNAUTHORIZED: u16 = 401;

/// How long nothing but 401 may be answered until this process is not ready. An API server that starts answers so
/// for some seconds.
const READY_FOR: Duration = Duration::from_secs(30);

/// How long until the process ends: its successor may get another token.
const RUNS_FOR: Duration = Duration::from_secs(300);

/// Longest time between two answers of 401 that belong together. Watches that fail begin again within 4 s.
const TOGETHER: Duration = Duration::from_secs(30);

/// The API server, by its answers. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ApiServer(Arc<ApiServerShared>);

#[derive(Debug)]
struct ApiServerShared {
    clock: Clock,
    seen: Mutex<SeenAnswers>,
}

#[derive(Debug, Default)]
struct SeenAnswers {
    time: ServerTime,
    refused: Option<Refused>,
}

/// The beginning of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub status: u16,
    /// When the server answered by its own clock, if it says so: seconds since 1970.
    pub date: Option<u64>,
}

/// The API server answers nothing but 401.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "for {} s the API server has answered every call with 401 Unauthorized: it does not accept the token of this process",
    lasted.as_secs()
)]
pub struct Unauthorized {
    /// From the first such answer to the last one.
    lasted: Duration,
}

impl Unauthorized {
    /// From the first such answer to the last one.
    pub fn lasted(&self) -> Duration {
        self.lasted
    }

    /// Whether this process is not ready because of it.
    pub fn is_lasting(&self) -> bool {
        self.lasted >= READY_FOR
    }

    /// Whether this process is to end because of it.
    pub fn is_final(&self) -> bool {
        self.lasted >= RUNS_FOR
    }
}

impl ApiServer {
    /// Before the first answer. `clock` is that of this process.
    pub fn new(clock: Clock) -> Self {
        Self(Arc::new(ApiServerShared { clock, seen: Mutex::default() }))
    }

    /// The clock of this process.
    pub fn clock(&self) -> Clock {
        self.0.clock
    }

    /// Notes an answer that comes now, to a request that was sent then.
    pub fn answered(&self, sent: Timestamp, head: Head) {
        let ApiServerShared { clock, seen } = &*self.0;
        let now = clock.now();
        let mut seen = seen.lock();
        seen.refused = (head.status == UNAUTHORIZED).then(|| Refused::again(seen.refused, now));
        if let Some(date) = head.date {
            seen.time.see(date, sent, now, clock.unix_micros() / 1_000);
        }
    }

    /// How late it is there, in seconds since 1970; before its first answer, by the wall clock of this machine.
    pub fn unix_seconds(&self) -> u64 {
        let ApiServerShared { clock, seen } = &*self.0;
        match seen.lock().time.at(clock.now()) {
            Some(seconds) if !mutated(Mutation::OwnClockTrusted) => seconds,
            _ => clock.unix_seconds(),
        }
    }

    /// Since when it answers nothing but 401, if it does.
    pub fn refuses(&self) -> Option<Unauthorized> {
        let Refused { since, last } = self.0.seen.lock().refused?;
        Some(Unauthorized { lasted: last.since(since) })
    }
}

/// Answers of 401, and no other.
#[derive(Clone, Copy, Debug)]
struct Refused {
    since: Timestamp,
    last: Timestamp,
}

impl Refused {
    /// One more. After a long time without any answer it is the first one.
    fn again(before: Option<Self>, now: Timestamp) -> Self {
        let before = before.filter(|refused| now.since(refused.last) <= TOGETHER);
        Self { since: before.map_or(now, |refused| refused.since), last: now }
    }
}

/// The clock of the API server, as far ahead of the monotonic clock of this process as the median of its last
/// answers says. So nothing changes when somebody sets the wall clock of this machine.
///
/// An answer has whole seconds, and was given at some time between the request and its arrival. It only counts
/// as far as that is not so by what is known: one that comes late says nothing.
#[derive(Debug, Default)]
struct ServerTime {
    /// How far it is ahead in milliseconds, by each of the last answers; the first is by the wall clock of this
    /// machine.
    votes: VecDeque<i64>,
}

impl ServerTime {
    /// Takes in a date in seconds since 1970, of an answer to a request that was sent and answered at these times.
    /// The wall clock of this machine shows `wall`, in milliseconds.
    fn see(&mut self, date: u64, sent: Timestamp, answered: Timestamp, wall: i64) {
        let date = i64::try_from(date).unwrap_or(i64::MAX).saturating_mul(1_000);
        let least = date.saturating_sub(millis(answered));
        let most = date.saturating_add(999).saturating_sub(millis(sent));
        if self.votes.is_empty() {
            self.votes.push_back(wall.saturating_sub(millis(answered)));
        }
        let known = self.ahead().expect("there is a vote");
        self.votes.push_back(known.clamp(least, most.max(least)));
        if self.votes.len() > VOTES {
            self.votes.pop_front();
        }
    }

    /// The median; of two the smaller one, by which everything is younger.
    fn ahead(&self) -> Option<i64> {
        let mut votes: Vec<i64> = self.votes.iter().copied().collect();
        votes.sort_unstable();
        votes.get(votes.len().saturating_sub(1) / 2).copied()
    }

    /// Seconds since 1970 there; `None` before the first answer.
    fn at(&self, now: Timestamp) -> Option<u64> {
        let millis = millis(now).saturating_add(self.ahead()?);
        Some(u64::try_from(millis / 1_000).unwrap_or(0))
    }
}

fn millis(time: Timestamp) -> i64 {
    i64::try_from(time.millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SimulatedTime;

    const BEGAN: u64 = 1_900_000_000;
    const YEARS: i64 = 10 * 365 * 86_400;

    /// A process whose wall clock is so far ahead.
    struct Bed {
        time: &'static SimulatedTime,
        now: u64,
        clock: Clock,
        api: ApiServer,
    }

    impl Bed {
        fn new(ahead: i64) -> Self {
            let wall = BEGAN.saturating_add_signed(ahead);
            let time: &'static SimulatedTime = Box::leak(Box::new(SimulatedTime::starting(wall)));
            let clock = Clock::simulated(time);
            Self { time, now: 0, clock, api: ApiServer::new(clock) }
        }

        fn pass(&mut self, millis: u64) {
            self.now += millis;
            self.time.set(Timestamp::from_millis(self.now));
        }

        fn is_sent(&self) -> Timestamp {
            self.clock.now()
        }

        /// The server answers now, by a clock that is so far ahead of the right time; the answer comes later.
        fn answers(&mut self, sent: Timestamp, ahead: i64, comes_after: u64) {
            let date = (BEGAN + self.now / 1_000).saturating_add_signed(ahead);
            self.pass(comes_after);
            self.api.answered(sent, Head { status: 200, date: Some(date) });
        }

        /// How far the time is ahead of the right one.
        fn error(&self) -> i64 {
            self.api.unix_seconds().cast_signed() - (BEGAN + self.now / 1_000).cast_signed()
        }

        fn check(&self, what: &str) {
            assert!((-1..=1).contains(&self.error()), "{what}: {} s", self.error());
        }
    }

    #[test]
    fn the_time_is_that_of_the_api_server_whatever_this_machine_says() {
        for ahead in [0, -90, 90, -YEARS, YEARS] {
            let mut bed = Bed::new(ahead);
            assert_eq!(bed.error(), ahead, "nothing else is known before the first answer");
            bed.answers(bed.is_sent(), 0, 3);
            assert!(bed.error() <= 1, "{ahead}: nothing is too old after one answer");
            bed.answers(bed.is_sent(), 0, 3);
            for _ in 0..100 {
                bed.check(&format!("{ahead} ahead"));
                bed.pass(1_234);
                bed.answers(bed.is_sent(), 0, 7);
            }
            bed.time.step_wall(-YEARS);
            bed.check("the wall clock is set back");
            bed.time.step_wall(2 * YEARS);
            bed.answers(bed.is_sent(), 0, 7);
            bed.check("the wall clock is set forward");
        }
    }

    #[test]
    fn an_answer_that_comes_late_says_nothing() {
        let mut bed = Bed::new(0);
        for _ in 0..10 {
            bed.answers(bed.is_sent(), 0, 30_000);
            bed.check("from the first one on");
        }
        let mut bed = Bed::new(-90);
        for _ in 0..2 {
            bed.answers(bed.is_sent(), 0, 0);
        }
        let sent = bed.is_sent();
        bed.pass(20_000);
        bed.answers(sent, 0, 20_000);
        bed.check("the request and its answer were late");
    }

    #[test]
    fn two_wrong_dates_in_a_row_change_nothing_and_a_clock_that_was_set_is_followed() {
        let mut bed = Bed::new(0);
        for _ in 0..5 {
            bed.answers(bed.is_sent(), 0, 0);
        }
        for wrong in [-600, 600, -YEARS, YEARS] {
            for _ in 0..2 {
                bed.answers(bed.is_sent(), wrong, 0);
                bed.check(&format!("{wrong}"));
            }
            for _ in 0..3 {
                bed.answers(bed.is_sent(), 0, 0);
            }
        }
        for _ in 0..3 {
            bed.answers(bed.is_sent(), 600, 0);
        }
        assert!((599..=601).contains(&bed.error()), "{}", bed.error());
    }

    #[test]
    fn a_first_answer_that_is_wrong_makes_nothing_older() {
        for wrong in [-600, 600] {
            let mut bed = Bed::new(0);
            bed.answers(bed.is_sent(), wrong, 0);
            assert!(bed.error() <= 0, "{wrong}: {}", bed.error());
            bed.answers(bed.is_sent(), 0, 0);
            bed.check(&format!("{wrong}"));
        }
    }

    #[test]
    fn only_401_without_any_other_answer_lasts() {
        let mut bed = Bed::new(0);
        let answer = |bed: &Bed, status| {
            bed.api.answered(bed.is_sent(), Head { status, date: None });
            bed.api.refuses().map(|refusal| {
                (refusal.lasted().as_secs(), refusal.is_lasting(), refusal.is_final())
            })
        };
        assert_eq!(bed.api.refuses(), None, "before any answer");
        for other in [200, 403, 404, 409, 503] {
            assert_eq!(answer(&bed, 401), Some((0, false, false)));
            bed.pass(29_000);
            assert_eq!(answer(&bed, 401), Some((29, false, false)));
            assert_eq!(answer(&bed, other), None, "{other}");
            bed.pass(2_000);
        }
        for seconds in 0..=300_u64 {
            let expected = (seconds, seconds >= 30, seconds >= 300);
            assert_eq!(answer(&bed, 401), Some(expected));
            bed.pass(1_000);
        }
        assert_eq!(answer(&bed, 200), None, "one accepted call resets everything");
        answer(&bed, 401);
        bed.pass(600_000);
        assert_eq!(
            answer(&bed, 401),
            Some((0, false, false)),
            "there was no answer for ten minutes"
        );
    }
}
