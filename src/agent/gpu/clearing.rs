//! Orders to forget the faults that past events stand for, of one GPU.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::gpu::leader_orders::{Orders, StandingOrders};
use wire::api::condition::{ClearResult, DeviceFault};
use wire::report::bodies::{ClearOrder, ClearOrders, ClearOutcome};
use wire::units::Timestamp;

impl Orders for ClearOrders {
    const ABOUT: &'static str = "past faults of GPUs";

    fn term(&self) -> u64 {
        self.term
    }

    fn count(&self) -> usize {
        1
    }
}

/// What the loops of the agent share about such orders; a handle, cheap to copy. Its locks are short: no call of the
/// driver is made under one, and none is held across an await.
#[derive(Clone, Debug, Default)]
pub struct Clearing {
    shared: Arc<SharedClearing>,
}

#[derive(Debug, Default)]
struct SharedClearing {
    standing: Mutex<StandingOrders<ClearOrders>>,
    /// What became of the last order.
    outcome: Mutex<Option<ClearOutcome>>,
    /// Notified when there is something to do.
    ordered: Notify,
}

impl Clearing {
    /// Learns what the replica with this link orders now.
    pub fn learn(&self, link: usize, orders: Option<ClearOrders>, now: Timestamp) {
        self.shared.standing.lock().learn(link, orders, now);
        if self.gpu().is_some() {
            self.shared.ordered.notify_one();
        }
    }

    /// Learns that the replica with this link did not answer.
    pub fn lose(&self, link: usize) {
        self.shared.standing.lock().lose(link);
    }

    /// Waits until there is something to do.
    pub(crate) async fn ordered(&self) {
        self.shared.ordered.notified().await;
    }

    /// The order that is to be carried out: it stands, and that was not done.
    pub fn open_order(&self) -> Option<ClearOrder> {
        let (_, order) = self.order().filter(|_| self.outcome().is_none())?;
        Some(order)
    }

    /// The GPU that is to be cleared.
    pub fn gpu(&self) -> Option<String> {
        self.open_order().map(|order| order.gpu)
    }

    /// What became of the order that stands.
    pub fn outcome(&self) -> Option<ClearOutcome> {
        let (term, order) = self.order()?;
        let outcome = self.shared.outcome.lock().clone();
        outcome.filter(|outcome| (outcome.term, outcome.number) == (term, order.number))
    }

    /// Notes what became of the order about this GPU, if it still stands.
    pub fn settle(&self, gpu: &str, result: ClearResult, fault: Option<DeviceFault>) {
        let Some((term, order)) = self.order().filter(|(_, order)| order.gpu == gpu) else {
            return;
        };
        tracing::info!(gpu, ?result, ?fault, "the leader orders to clear this GPU");
        let outcome = ClearOutcome { term, number: order.number, result, fault };
        *self.shared.outcome.lock() = Some(outcome);
    }

    /// Notes what became of an order elsewhere.
    pub(crate) fn note(&self, outcome: ClearOutcome) {
        *self.shared.outcome.lock() = Some(outcome);
    }

    /// Notes that no GPU can be read.
    pub(crate) fn refuse(&self, fault: DeviceFault) {
        if let Some(gpu) = self.gpu() {
            self.settle(&gpu, ClearResult::Refused, Some(fault));
        }
    }

    /// The orders that stand.
    pub(crate) fn standing(&self) -> Option<ClearOrders> {
        self.shared.standing.lock().orders().cloned()
    }

    fn order(&self) -> Option<(u64, ClearOrder)> {
        let orders = self.standing()?;
        orders.order.map(|order| (orders.term, order))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(term: u64, number: u64) -> Option<ClearOrders> {
        let order = Some(ClearOrder { number, gpu: "GPU-a".to_owned(), fault_event: None });
        Some(ClearOrders { term, order })
    }

    #[test]
    fn an_order_is_carried_out_once() {
        let (clearing, now) = (Clearing::default(), Timestamp::START);
        clearing.learn(1, orders(5, 1), now);
        assert_eq!(clearing.gpu().as_deref(), Some("GPU-a"));
        clearing.settle("GPU-b", ClearResult::Cleared, None);
        assert!(clearing.gpu().is_some(), "another GPU");
        clearing.settle("GPU-a", ClearResult::Cleared, None);
        let number = |clearing: &Clearing| clearing.outcome().map(|outcome| outcome.number);
        assert_eq!((clearing.gpu(), number(&clearing)), (None, Some(1)));
        clearing.lose(1);
        assert_eq!((clearing.gpu(), number(&clearing)), (None, None));
        clearing.learn(1, orders(5, 1), now);
        assert_eq!((clearing.gpu(), number(&clearing)), (None, Some(1)), "it was done");
        clearing.learn(1, orders(5, 2), now);
        clearing.refuse(DeviceFault::DriverAway);
        let outcome = clearing.outcome().unwrap();
        assert_eq!((outcome.number, outcome.result), (2, ClearResult::Refused));
    }

    #[test]
    fn an_order_of_an_earlier_leader_is_ignored() {
        let (clearing, now) = (Clearing::default(), Timestamp::START);
        clearing.learn(1, Some(ClearOrders { term: 6, order: None }), now);
        clearing.learn(2, orders(5, 1), now);
        assert_eq!(clearing.gpu(), None);
        clearing.learn(1, orders(6, 1), now);
        assert!(clearing.gpu().is_some());
    }
}
