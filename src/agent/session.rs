//! What to say next to an extender: the pure half of the conversation in [`crate::report`].
//!
//! One [`Session`] for each pair of node and extender; [`NodeBooks`] joins what the extenders of one
//! node answer. Neither does I/O or reads a clock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::probe::Sample;
use crate::packing::units::Timestamp;
use crate::report::{
    Booking, BookingState, DeviceReport, DriverReport, Outcome, Reply, Report, SCHEMA_VERSION,
};

/// Pause after the first failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Longest pause while an extender is away. At half the usual rate, retries cannot overload it.
const AWAY_PAUSE_MAX: Duration = Duration::from_secs(2);

/// Pause after a report that was refused for good: the next one will hardly be better.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// An extender that answered nobody for so long is lost.
const LOST_AFTER: Duration = Duration::from_secs(2);

/// What came back for a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was read.
    Reply(Reply),
    /// It belongs to an older session.
    SessionExpired,
    /// It will never be believed.
    Refused {
        /// What the extender says.
        error: String,
    },
    /// No answer, or *later*.
    Away {
        /// What is known.
        error: String,
    },
}

/// What to do after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Report the next sample.
    NextSample,
    /// Report the same sample again: it says hello.
    HelloNow,
    /// Report the newest sample when this time has passed; the caller adds chance to it.
    Pause(Duration),
}

/// The state of the conversation with one extender about one node.
#[derive(Debug)]
pub struct Session {
    /// Random id of this run of the agent.
    agent: String,
    /// The session issued by the extender.
    number: Option<u64>,
    /// Sequence number of the last report.
    sequence: u64,
    /// What the last report said that the node owns, until it is answered.
    sent: Option<Owned>,
    /// What the extender knows that the node owns.
    known: Option<Owned>,
    /// Failures since the last reply.
    failures: u32,
}

/// What a node owns, as far as a report tells it only when it has changed.
#[derive(Debug)]
struct Owned {
    /// Its devices.
    inventory: Arc<[DeviceReport]>,
    /// Its driver.
    driver: Option<DriverReport>,
}

impl Owned {
    /// Whether it is what `sample` shows.
    fn is_in(&self, sample: &Sample) -> bool {
        let is_same = Arc::ptr_eq(&self.inventory, &sample.inventory);
        (is_same || self.inventory == sample.inventory) && self.driver == sample.driver
    }
}

impl Session {
    /// A conversation that begins with hello.
    pub fn new(agent: impl Into<String>) -> Self {
        Self {
            agent: agent.into(),
            number: None,
            sequence: 0,
            sent: None,
            known: None,
            failures: 0,
        }
    }

    /// The report to send about `sample`. It carries the inventory unless the extender has it.
    pub fn report(&mut self, sample: &Sample) -> Report {
        self.sequence += 1;
        let is_known = self.known.as_ref().is_some_and(|known| known.is_in(sample));
        let is_told = self.number.is_some() && is_known;
        let owned =
            || Owned { inventory: Arc::clone(&sample.inventory), driver: sample.driver.clone() };
        self.sent = (!is_told).then(owned);
        Report {
            schema_version: SCHEMA_VERSION,
            agent: self.agent.clone(),
            session: self.number,
            sequence: self.sequence,
            inventory: self.sent.as_ref().map(|owned| owned.inventory.to_vec()),
            driver: self.sent.as_ref().and_then(|owned| owned.driver.clone()),
            devices: sample.uses.clone(),
        }
    }

    /// Learns what came back, and says what to do next.
    pub fn settle(&mut self, answer: &Answer) -> Next {
        let sent = self.sent.take();
        match answer {
            Answer::Reply(reply) => {
                self.number = Some(reply.session);
                self.failures = 0;
                match (reply.send_inventory, reply.outcome, sent) {
                    (true, _, _) => self.known = None,
                    (false, Outcome::Accepted, Some(sent)) => self.known = Some(sent),
                    (false, Outcome::Accepted | Outcome::Ignored, _) => {}
                }
                Next::NextSample
            }
            Answer::SessionExpired => {
                let was_hello = self.number.take().is_none();
                self.known = None;
                if was_hello { self.back_off() } else { Next::HelloNow }
            }
            Answer::Refused { .. } => {
                // Whatever was wrong, begin anew: the extender gets the whole picture again.
                self.number = None;
                self.known = None;
                Next::Pause(REFUSED_PAUSE)
            }
            Answer::Away { .. } => self.back_off(),
        }
    }

    /// The pause after one more failure.
    fn back_off(&mut self) -> Next {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(8));
        self.failures = self.failures.saturating_add(1);
        Next::Pause(pause.min(AWAY_PAUSE_MAX))
    }
}

/// Whether an extender answers anyone in this process: what the log says once, not once per node.
#[derive(Debug)]
pub struct Contact {
    /// When it last answered.
    answered: Timestamp,
    /// Whether it was found to be lost since.
    is_lost: bool,
}

/// What the log has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContactChange {
    /// It no longer answers.
    Lost {
        /// What is known.
        error: String,
    },
    /// It answers again.
    Found,
}

impl Contact {
    /// An extender that is given its time from `now` on.
    pub fn new(now: Timestamp) -> Self {
        Self { answered: now, is_lost: false }
    }

    /// Learns that `answer` came, or failed to come, at `now`.
    pub fn settle(&mut self, answer: &Answer, now: Timestamp) -> Option<ContactChange> {
        match answer {
            Answer::Away { .. } if self.is_lost || now.since(self.answered) < LOST_AFTER => None,
            Answer::Away { error } => {
                self.is_lost = true;
                Some(ContactChange::Lost { error: error.clone() })
            }
            Answer::Reply(_) | Answer::SessionExpired | Answer::Refused { .. } => {
                self.answered = now;
                std::mem::take(&mut self.is_lost).then_some(ContactChange::Found)
            }
        }
    }
}

/// What the extenders of one node say is booked on it.
#[derive(Debug)]
pub struct NodeBooks {
    /// One entry per extender, in the order of the configuration.
    extenders: Vec<ExtenderBooks>,
}

/// What one extender says.
#[derive(Clone, Debug, Default)]
struct ExtenderBooks {
    /// Whether its last answer was a reply.
    is_live: bool,
    /// Its last bookings.
    bookings: Vec<Booking>,
}

impl NodeBooks {
    /// Nothing heard yet of `extender_count` extenders.
    pub fn new(extender_count: usize) -> Self {
        Self { extenders: vec![ExtenderBooks::default(); extender_count] }
    }

    /// Learns the bookings of the extender at `position`; says whether they are new.
    pub fn learn(&mut self, position: usize, bookings: Vec<Booking>) -> bool {
        let Some(books) = self.extenders.get_mut(position) else { return false };
        let is_new = !books.is_live || books.bookings != bookings;
        *books = ExtenderBooks { is_live: true, bookings };
        is_new
    }

    /// Learns that the extender at `position` did not reply.
    pub fn lose(&mut self, position: usize) {
        if let Some(books) = self.extenders.get_mut(position) {
            books.is_live = false;
        }
    }

    /// One booking per pod, in the furthest state that an extender knows. Only extenders that reply
    /// count; when none does, what was last known stands, so that pods outlive their extenders.
    pub fn merged(&self) -> Vec<Booking> {
        let any_live = self.extenders.iter().any(|books| books.is_live);
        let counted = self.extenders.iter().filter(|books| books.is_live || !any_live);
        let mut merged: BTreeMap<&str, &Booking> = BTreeMap::new();
        for booking in counted.flat_map(|books| &books.bookings) {
            let known = merged.entry(&booking.pod_uid).or_insert(booking);
            if booking.state > known.state {
                *known = booking;
            }
        }
        merged.into_values().cloned().collect()
    }

    /// The merged bookings as far as haste goes: without extenders that reply, nobody waits for the
    /// end of a process.
    pub fn draining(&self) -> Vec<Booking> {
        let live = self.extenders.iter().filter(|books| books.is_live);
        let bookings = live.flat_map(|books| &books.bookings);
        bookings.filter(|it| it.state == BookingState::Draining).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Kind;

    fn sample(uuid: &str) -> Sample {
        let model = "M".to_owned();
        let device = DeviceReport::new(uuid.to_owned(), 0, model, Kind::Gpu);
        Sample {
            inventory: vec![device].into(),
            uses: Vec::new(),
            driver: None,
            xids: BTreeMap::new(),
            unreadable: 0,
        }
    }

    fn reply(session: u64, outcome: Outcome) -> Reply {
        Reply { schema_version: 1, session, outcome, send_inventory: false, bookings: Vec::new() }
    }

    /// Session, sequence, and whether the inventory is there.
    fn said(session: &mut Session, sample: &Sample) -> (Option<u64>, u64, bool) {
        let report = session.report(sample);
        (report.session, report.sequence, report.inventory.is_some())
    }

    #[test]
    fn the_inventory_goes_with_hello_when_it_changed_and_when_asked() {
        let mut session = Session::new("a");
        let (one, two) = (sample("GPU-a"), sample("GPU-b"));
        let accepted = Answer::Reply(reply(7, Outcome::Accepted));
        assert_eq!(said(&mut session, &one), (None, 1, true));
        assert_eq!(session.settle(&accepted), Next::NextSample);
        assert_eq!(said(&mut session, &sample("GPU-a")), (Some(7), 2, false), "the same again");
        session.settle(&accepted);
        assert_eq!(said(&mut session, &two), (Some(7), 3, true), "changed");
        session.settle(&Answer::Away { error: String::new() });
        assert_eq!(said(&mut session, &two), (Some(7), 4, true), "it may not have arrived");
        session.settle(&Answer::Reply(reply(7, Outcome::Ignored)));
        assert_eq!(said(&mut session, &two), (Some(7), 5, true), "it was not taken in");
        session.settle(&accepted);
        let asks = Reply { send_inventory: true, ..reply(7, Outcome::Accepted) };
        assert_eq!(said(&mut session, &two), (Some(7), 6, false));
        session.settle(&Answer::Reply(asks));
        assert_eq!(said(&mut session, &two), (Some(7), 7, true), "asked for");
    }

    #[test]
    fn an_expired_session_says_hello_at_once_and_only_once() {
        let mut session = Session::new("a");
        let one = sample("GPU-a");
        said(&mut session, &one);
        session.settle(&Answer::Reply(reply(7, Outcome::Accepted)));
        said(&mut session, &one);
        assert_eq!(session.settle(&Answer::SessionExpired), Next::HelloNow);
        assert_eq!(said(&mut session, &one), (None, 3, true));
        let next = session.settle(&Answer::SessionExpired);
        assert!(matches!(next, Next::Pause(_)), "a hello that expires is no reason to hurry");
        assert_eq!(said(&mut session, &one), (None, 4, true));
    }

    #[test]
    fn pauses_grow_while_the_extender_is_away_and_end_with_a_reply() {
        let mut session = Session::new("a");
        let away = Answer::Away { error: "refused".to_owned() };
        let mut pauses = Vec::new();
        for _ in 0..100 {
            let Next::Pause(pause) = session.settle(&away) else { panic!("no pause") };
            pauses.push(pause.as_millis());
        }
        assert_eq!(pauses[..5], [250, 500, 1_000, 2_000, 2_000]);
        assert_eq!(pauses[99], 2_000);
        session.settle(&Answer::Reply(reply(1, Outcome::Accepted)));
        assert_eq!(session.settle(&away), Next::Pause(FIRST_PAUSE));
        let refused = Answer::Refused { error: "absurd".to_owned() };
        assert_eq!(session.settle(&refused), Next::Pause(REFUSED_PAUSE));
    }

    #[test]
    fn an_extender_is_lost_once_when_it_answers_nobody_for_a_while() {
        let mut contact = Contact::new(Timestamp::START);
        let lost = ContactChange::Lost { error: "e".to_owned() };
        let (away, reply) =
            (Answer::Away { error: "e".to_owned() }, Answer::Reply(reply(1, Outcome::Accepted)));
        for (millis, answer, change) in [
            (1_999, &away, None),
            (2_000, &away, Some(lost.clone())),
            (9_000, &away, None),
            (9_001, &reply, Some(ContactChange::Found)),
            (9_002, &away, None),
            (9_003, &reply, None),
            (11_003, &away, Some(lost)),
        ] {
            let now = Timestamp::from_millis(millis);
            assert_eq!(contact.settle(answer, now), change, "{millis}");
        }
    }

    #[test]
    fn the_books_of_several_extenders_are_joined_by_pod() {
        let booking = |uid: &str, state| Booking {
            pod_uid: uid.to_owned(),
            pod: format!("d/{uid}"),
            state,
            devices: Vec::new(),
        };
        let shown = |books: &NodeBooks| {
            let merged = books.merged();
            let rows = merged.iter().map(|it| format!("{} {:?}", it.pod_uid, it.state));
            rows.collect::<Vec<_>>().join(", ")
        };
        let mut books = NodeBooks::new(2);
        let (assumed, confirmed) = (BookingState::Assumed, BookingState::Confirmed);
        assert!(books.learn(0, vec![booking("p", confirmed), booking("q", assumed)]));
        assert!(books.learn(1, vec![booking("p", BookingState::Draining)]));
        assert!(!books.learn(1, vec![booking("p", BookingState::Draining)]));
        assert_eq!(shown(&books), "p Draining, q Assumed");
        assert_eq!(books.draining().len(), 1);
        books.lose(1);
        assert_eq!(shown(&books), "p Confirmed, q Assumed", "only who replies counts");
        assert!(books.draining().is_empty());
        books.lose(0);
        assert_eq!(shown(&books), "p Draining, q Assumed", "nobody replies: the last word stands");
        assert!(books.draining().is_empty(), "and nobody waits");
    }
}
