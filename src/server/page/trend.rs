//! The last hour of the page: packing of the cluster, point by point, in bounded memory.

use std::collections::VecDeque;
use std::time::Duration;

use crate::page::cells::thousandths;
use control::shared::app::App;
use wire::api::page::TrendPoint;

/// Time between two points.
pub(crate) const POINT_EVERY: Duration = Duration::from_secs(5);

/// Points kept: an hour, at 48 bytes each.
const KEPT: usize = 720;

/// The last hour.
#[derive(Debug, Default)]
pub(crate) struct Trend {
    /// Each point with the number under which it is sent.
    points: VecDeque<(u64, TrendPoint)>,
}

impl Trend {
    /// Adds a point, sent under `number`, and drops the oldest one if necessary.
    pub(crate) fn add(&mut self, number: u64, point: TrendPoint) {
        if self.points.len() == KEPT {
            self.points.pop_front();
        }
        self.points.push_back((number, point));
    }

    /// The points sent after `number`, the oldest first.
    pub(crate) fn after(&self, number: u64) -> Vec<TrendPoint> {
        let fresh = self.points.iter().filter(|(sent, _)| *sent > number);
        fresh.map(|(_, point)| *point).collect()
    }

    /// Sends all points under `number` from now on: the numbers of an earlier map are void.
    pub(crate) fn retell(&mut self, number: u64) {
        self.points.iter_mut().for_each(|(sent, _)| *sent = number);
    }
}

/// The cluster now.
pub(crate) fn point(app: &App) -> TrendPoint {
    let packing = app.ledger.packing();
    let is_there = packing.devices > 0;
    TrendPoint((
        app.clock.unix_seconds(),
        (packing.occupied > 0).then(|| thousandths(packing.efficiency())),
        is_there.then(|| thousandths(packing.fragmentation())),
        is_there.then(|| thousandths(packing.allocation())),
        app.waiting.refused_count(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_hour_is_kept() {
        let mut trend = Trend::default();
        let numbers = 1..=u64::try_from(KEPT).unwrap() + 5;
        numbers.for_each(|number| trend.add(number, TrendPoint((number * 5, None, None, None, 0))));
        let all = trend.after(0);
        assert_eq!((all.len(), all[0].0.0, all[KEPT - 1].0.0), (KEPT, 30, 3_625));
        let last: Vec<u64> = trend.after(723).iter().map(|point| point.0.0).collect();
        assert_eq!(last, [3_620, 3_625]);
        trend.retell(1);
        assert_eq!((trend.after(0).len(), trend.after(1).len()), (KEPT, 0));
    }
}
