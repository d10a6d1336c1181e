//! Orders of people that an agent forgets the faults of past events on one GPU.
//!
//! They are in memory alone, of the replica that leads. Each has an id with the term of that replica and ends after
//! a minute, whatever became of it. So no order outlives the leader that gave it.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use parking_lot::Mutex;

use wire::api::condition::{ClearResult, DeviceFault};
use wire::ids::DeviceId;
use wire::report::bodies::{ClearOrder, ClearOutcome};
use wire::units::Timestamp;

/// How long an agent has time to carry an order out: it hears of it within 5 s.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// How long an outcome is kept for the person who waits for it.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// Most orders at a time that have not ended.
pub const MOST_OPEN: usize = 64;

/// Most orders that are kept. Beyond that the oldest one that has ended is forgotten.
const MOST_KEPT: usize = 1_024;

/// The name of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderId {
    /// Term of the leader that gave it.
    pub term: u64,
    /// Counts the orders of a process.
    pub number: u64,
}

impl fmt::Display for OrderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.term, self.number)
    }
}

impl FromStr for OrderId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (term, number) = text.split_once('-').ok_or(())?;
        let read = |text: &str| text.parse().map_err(|_| ());
        Ok(Self { term: read(term)?, number: read(number)? })
    }
}

/// The GPU that a person wants to be cleared.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Its node.
    pub node: &'a str,
    /// Its UUID.
    pub gpu: &'a DeviceId,
}

/// What an order is to say.
#[derive(Clone, Copy, Debug)]
pub struct NewOrder<'a> {
    /// What it is about.
    pub wanted: Wanted<'a>,
    /// The newest event that the leader knows as a fault of the GPU: a later one is not cleared.
    pub fault_event: Option<u64>,
    /// Term of the leader that gives it.
    pub term: u64,
}

/// How an order ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// What became of it.
    pub result: ClearResult,
    /// Why the GPU takes no tenants.
    pub fault: Option<DeviceFault>,
}

/// How an order stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The agent has not answered yet.
    GoingOn,
    /// It has ended.
    Ended(Ended),
    /// Another leader gave it, or it ended a while ago.
    Unknown,
}

/// Why no order is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClearRefusal {
    /// One order for each node.
    #[error("another GPU of this node is being cleared: try again in a minute")]
    Busy,
    /// As many orders as one process keeps.
    #[error("too many GPUs are being cleared: try again in a minute")]
    TooMany,
}

#[derive(Debug)]
struct Order {
    id: OrderId,
    gpu: DeviceId,
    fault_event: Option<u64>,
    given: Timestamp,
    ended: Option<Ended>,
}

impl Order {
    /// How it ended, if it did.
    fn ended(&self, now: Timestamp) -> Option<Ended> {
        let is_late = now.since(self.given) >= DEADLINE;
        let late = Ended { result: ClearResult::NoAnswer, fault: None };
        self.ended.or_else(|| is_late.then_some(late))
    }
}

/// The orders of this process, one for each node.
#[derive(Debug, Default)]
pub struct Clears {
    orders: Mutex<Orders>,
}

#[derive(Debug, Default)]
struct Orders {
    newest: u64,
    by_node: BTreeMap<String, Order>,
}

impl Orders {
    /// How many have not ended.
    fn open(&self, now: Timestamp) -> usize {
        self.by_node.values().filter(|order| order.ended(now).is_none()).count()
    }

    /// Forgets the oldest one that has ended.
    fn forget_oldest(&mut self, now: Timestamp) {
        let ended = self.by_node.iter().filter(|(_, order)| order.ended(now).is_some());
        let oldest = ended.min_by_key(|(_, order)| order.given).map(|(node, _)| node.clone());
        if let Some(node) = oldest {
            self.by_node.remove(&node);
        }
    }
}

impl Clears {
    /// Gives an order. One for the same GPU that is going on is the same order.
    ///
    /// # Errors
    /// [`ClearRefusal`].
    pub fn give(&self, new: NewOrder<'_>, now: Timestamp) -> Result<OrderId, ClearRefusal> {
        let NewOrder { wanted, fault_event, term } = new;
        let mut orders = self.orders.lock();
        orders.by_node.retain(|_, order| {
            order.id.term == term && now.since(order.given) < DEADLINE + KEPT_FOR
        });
        let known = orders.by_node.get(wanted.node);
        match known.filter(|order| order.ended(now).is_none()) {
            Some(order) if order.gpu == *wanted.gpu => return Ok(order.id),
            Some(_) => return Err(ClearRefusal::Busy),
            None if orders.open(now) >= MOST_OPEN => return Err(ClearRefusal::TooMany),
            None => {}
        }
        if known.is_none() && orders.by_node.len() >= MOST_KEPT {
            orders.forget_oldest(now);
        }
        orders.newest += 1;
        let id = OrderId { term, number: orders.newest };
        let order = Order { id, gpu: wanted.gpu.clone(), fault_event, given: now, ended: None };
        orders.by_node.insert(wanted.node.to_owned(), order);
        Ok(id)
    }

    /// What the agent of a node is to do in this term.
    pub fn order_for(&self, node: &str, term: u64, now: Timestamp) -> Option<ClearOrder> {
        let orders = self.orders.lock();
        let order = orders.by_node.get(node)?;
        let stands = order.id.term == term && order.ended(now).is_none();
        stands.then(|| ClearOrder {
            number: order.id.number,
            gpu: order.gpu.to_string(),
            fault_event: order.fault_event,
        })
    }

    /// Learns what an agent reports of an order. The first report of it counts, within its time.
    pub fn learn(&self, node: &str, outcome: &ClearOutcome, now: Timestamp) {
        let ClearOutcome { term, number, result, fault } = *outcome;
        let mut orders = self.orders.lock();
        let order = orders.by_node.get_mut(node);
        let id = OrderId { term, number };
        if let Some(order) = order.filter(|order| order.id == id && order.ended(now).is_none()) {
            order.ended = Some(Ended { result, fault });
        }
    }

    /// How an order for this GPU stands, in this term.
    pub fn standing(&self, wanted: Wanted<'_>, id: OrderId, term: u64, now: Timestamp) -> Standing {
        let orders = self.orders.lock();
        let known = orders.by_node.get(wanted.node);
        let same = known.filter(|it| it.id == id && id.term == term && it.gpu == *wanted.gpu);
        same.map_or(Standing::Unknown, |order| {
            order.ended(now).map_or(Standing::GoingOn, Standing::Ended)
        })
    }

    /// How many orders are kept.
    pub fn count(&self) -> usize {
        self.orders.lock().by_node.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(seconds * 1_000)
    }

    fn in_term(term: u64, wanted: Wanted<'_>) -> NewOrder<'_> {
        NewOrder { wanted, fault_event: Some(63), term }
    }

    fn outcome(id: OrderId) -> ClearOutcome {
        let OrderId { term, number } = id;
        ClearOutcome { term, number, result: ClearResult::Cleared, fault: None }
    }

    #[test]
    fn an_order_stands_until_its_outcome_or_its_deadline() {
        let (clears, gpu) = (Clears::default(), DeviceId::new("GPU-a").unwrap());
        let wanted = Wanted { node: "n", gpu: &gpu };
        let id = clears.give(in_term(7, wanted), at(0)).unwrap();
        assert_eq!(clears.give(in_term(7, wanted), at(1)), Ok(id), "the same order");
        assert_eq!(id.to_string().parse(), Ok(id));
        let order = clears.order_for("n", 7, at(59)).unwrap();
        assert_eq!((order.number, &*order.gpu), (id.number, "GPU-a"));
        assert_eq!(order.fault_event, Some(63), "what was known when it was given");
        assert_eq!(clears.order_for("m", 7, at(1)), None);
        clears.learn("m", &outcome(id), at(1));
        clears.learn("n", &outcome(OrderId { number: id.number + 1, ..id }), at(1));
        clears.learn("n", &outcome(OrderId { term: 6, ..id }), at(1));
        assert_eq!(clears.standing(wanted, id, 7, at(1)), Standing::GoingOn);
        clears.learn("n", &outcome(id), at(59));
        let ended = Standing::Ended(Ended { result: ClearResult::Cleared, fault: None });
        assert_eq!(clears.standing(wanted, id, 7, at(100)), ended);
        assert_eq!(clears.order_for("n", 7, at(59)), None, "it is done");
        let late = clears.give(in_term(7, wanted), at(100)).unwrap();
        assert_ne!(late, id);
        assert_eq!(clears.standing(wanted, id, 7, at(100)), Standing::Unknown);
        clears.learn("n", &outcome(late), at(160));
        let ended = Standing::Ended(Ended { result: ClearResult::NoAnswer, fault: None });
        assert_eq!(clears.standing(wanted, late, 7, at(160)), ended);
        assert_eq!(clears.order_for("n", 7, at(160)), None, "its time is over");
    }

    #[test]
    fn an_order_ends_with_the_term_of_its_leader() {
        let (clears, gpu) = (Clears::default(), DeviceId::new("GPU-a").unwrap());
        let wanted = Wanted { node: "n", gpu: &gpu };
        let id = clears.give(in_term(7, wanted), at(0)).unwrap();
        assert_eq!(clears.order_for("n", 8, at(1)), None);
        assert_eq!(clears.standing(wanted, id, 8, at(1)), Standing::Unknown);
        assert_ne!(clears.give(in_term(8, wanted), at(1)), Ok(id));
    }

    #[test]
    fn orders_are_bounded_by_node_and_in_all() {
        let (clears, gpu) = (Clears::default(), DeviceId::new("GPU-a").unwrap());
        for node in 0..MOST_OPEN {
            let node = node.to_string();
            clears.give(in_term(7, Wanted { node: &node, gpu: &gpu }), at(0)).unwrap();
        }
        let other = DeviceId::new("GPU-b").unwrap();
        let of_same_node = clears.give(in_term(7, Wanted { node: "0", gpu: &other }), at(1));
        assert_eq!(of_same_node, Err(ClearRefusal::Busy));
        let more = in_term(7, Wanted { node: "n", gpu: &gpu });
        assert_eq!(clears.give(more, at(59)), Err(ClearRefusal::TooMany));
        assert!(clears.give(more, at(60)).is_ok(), "those that have ended do not count");
        assert_eq!(clears.count(), MOST_OPEN + 1);
        let last = in_term(7, Wanted { node: "m", gpu: &gpu });
        assert!(clears.give(last, at(120)).is_ok());
        assert_eq!(clears.count(), 2, "the others are forgotten");
    }

    #[test]
    fn many_orders_that_end_at_once_are_given_and_the_oldest_forgotten() {
        let (clears, gpu) = (Clears::default(), DeviceId::new("GPU-a").unwrap());
        for number in 0..2 * MOST_KEPT {
            let node = number.to_string();
            let wanted = Wanted { node: &node, gpu: &gpu };
            let now = Timestamp::from_millis(number as u64);
            let id = clears.give(in_term(7, wanted), now).unwrap();
            clears.learn(&node, &outcome(id), now);
            assert!(clears.count() <= MOST_KEPT, "{number}");
            assert!(matches!(clears.standing(wanted, id, 7, now), Standing::Ended(_)));
        }
    }
}
