//! One run: the requests of a seed under one policy.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::mig::fleet::{Instance, MigFleet};
use crate::mig::mig_worlds::MigStage;
use crate::mig::moves::one_move;
use crate::mig::policy::{Chooser, MigPolicy};
use crate::mig::requests::Request;

/// What became of the requests that count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Blocked {
    /// Units of memory that were requested.
    pub(crate) units: f64,
    /// Of these, what fit nowhere.
    pub(crate) refused: f64,
    pub(crate) requests: u64,
    /// Requests for which another instance was moved.
    pub(crate) moves: u64,
}

impl Blocked {
    /// Units refused, in percent of those requested.
    pub(crate) fn percent(&self) -> f64 {
        if self.units > 0.0 { 100.0 * self.refused / self.units } else { 0.0 }
    }
}

/// What arrivals without an end gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Filled {
    /// Units of memory allocated when load 1.0 had come.
    pub(crate) units: f64,
    /// Units requested when a request was refused first, in percent of those of load 1.0; all units if none
    /// was.
    pub(crate) first_loss: f64,
}

/// Lets requests come and end. Those that come in `measured` count.
pub(crate) fn churn(
    stage: &MigStage,
    requests: &[Request],
    measured: &Range<f64>,
    policy: MigPolicy,
) -> Blocked {
    let mut fleet = MigFleet::new(stage);
    let mut chooser = Chooser::new(policy, stage);
    // times are not negative: their bits have the same order
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut blocked = Blocked::default();
    let units = stage.units();
    let coming = requests.iter().take_while(|request| request.at < measured.end);
    for (number, request) in coming.enumerate() {
        while let Some(Reverse((time, ended))) = ends.peek().copied()
            && f64::from_bits(time) <= request.at
        {
            ends.pop();
            fleet.end(ended);
        }
        chooser.observe(number, request.kind);
        let counts = request.at >= measured.start;
        let mut place = chooser.choose(&fleet, request.kind);
        if place.is_none() && policy == MigPolicy::OursWithMove {
            place = one_move(&mut fleet, &mut chooser, request.kind);
            blocked.moves += u64::from(counts && place.is_some());
        }
        if let Some((gpu, start)) = place {
            fleet.put(number, Instance { gpu, start, kind: request.kind });
            ends.push(Reverse(((request.at + request.stays).to_bits(), number)));
        }
        if counts {
            blocked.requests += 1;
            blocked.units += units[request.kind];
            blocked.refused += if place.is_none() { units[request.kind] } else { 0.0 };
        }
    }
    blocked
}

/// The requests of load 1.0: what the GPUs can hold at best.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FullLoad {
    pub(crate) requests: usize,
    /// Units of memory that they have on average, together.
    pub(crate) units: f64,
}

/// Lets requests come that do not end.
pub(crate) fn fill(
    stage: &MigStage,
    requests: &[Request],
    full: FullLoad,
    policy: MigPolicy,
) -> Filled {
    let mut fleet = MigFleet::new(stage);
    let mut chooser = Chooser::new(policy, stage);
    let units = stage.units();
    let (mut came, mut allocated, mut first) = (0.0, 0.0, None);
    for (number, request) in requests.iter().enumerate() {
        if number >= full.requests && first.is_some() {
            break;
        }
        came += units[request.kind];
        chooser.observe(number, request.kind);
        match chooser.choose(&fleet, request.kind) {
            Some((gpu, start)) => {
                fleet.put(number, Instance { gpu, start, kind: request.kind });
                allocated += if number < full.requests { units[request.kind] } else { 0.0 };
            }
            None => first = first.or(Some(came)),
        }
    }
    Filled { units: allocated, first_loss: 100.0 * first.unwrap_or(came) / full.units }
}
