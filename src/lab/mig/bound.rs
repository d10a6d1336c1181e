//! What no policy can exceed, and what none without moves can hope to reach.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::mig::packing::MigPacking;
use crate::mig::play::Blocked;
use crate::mig::requests::Request;

/// The most units of the first `full` requests that GPUs can hold at once, for any policy.
pub(crate) fn filled(packing: &MigPacking, requests: &[Request], full: usize) -> f64 {
    let mut counts = vec![0.0; packing.units().len()];
    requests.iter().take(full).for_each(|request| counts[request.kind] += 1.0);
    packing.most_units(&counts)
}

/// The part of the demand that any policy blocks that does not know lifetimes, in percent.
///
/// All requests run as if none were refused. At each moment at most the best part of them that can be
/// packed is running in truth.
pub(crate) fn least_blocked(
    packing: &MigPacking,
    requests: &[Request],
    measured: &Range<f64>,
) -> f64 {
    let mut counts = vec![0.0; packing.units().len()];
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let (mut wanted, mut possible) = (0.0, 0.0);
    let mut coming = requests.iter().filter(|request| request.at < measured.end).peekable();
    let mut now = 0.0;
    while now < measured.end {
        let comes = coming.peek().map_or(measured.end, |request| request.at);
        let ended = ends.peek().map(|Reverse((time, kind))| (f64::from_bits(*time), *kind));
        let is_end = ended.is_some_and(|(time, _)| time <= comes);
        let next = ended.filter(|_| is_end).map_or(comes, |(time, _)| time).min(measured.end);
        let length = (next - now.max(measured.start)).max(0.0);
        if length > 0.0 {
            let all: f64 = packing.units().iter().zip(&counts).map(|(units, n)| units * n).sum();
            wanted += all * length;
            possible += packing.most_units(&counts) * length;
        }
        now = next;
        if now >= measured.end {
            break;
        }
        if let Some((_, kind)) = ended.filter(|_| is_end) {
            ends.pop();
            counts[kind] -= 1.0;
        } else if let Some(request) = coming.next() {
            counts[request.kind] += 1.0;
            ends.push(Reverse(((request.at + request.stays).to_bits(), request.kind)));
        }
    }
    if wanted > 0.0 { (100.0 * (1.0 - possible / wanted)).max(0.0) } else { 0.0 }
}

/// What is blocked if each request is accepted that fits after all instances are moved at will, in parts.
pub(crate) fn freely_repacked(
    packing: &MigPacking,
    requests: &[Request],
    measured: &Range<f64>,
) -> Blocked {
    let mut counts = vec![0.0; packing.units().len()];
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut blocked = Blocked::default();
    for request in requests.iter().filter(|request| request.at < measured.end) {
        while let Some(Reverse((time, kind))) = ends.peek().copied()
            && f64::from_bits(time) <= request.at
        {
            ends.pop();
            counts[kind] -= 1.0;
        }
        counts[request.kind] += 1.0;
        let fits = packing.holds(&counts);
        if fits {
            ends.push(Reverse(((request.at + request.stays).to_bits(), request.kind)));
        } else {
            counts[request.kind] -= 1.0;
        }
        if request.at >= measured.start {
            blocked.requests += 1;
            blocked.units += packing.units()[request.kind];
            blocked.refused += if fits { 0.0 } else { packing.units()[request.kind] };
        }
    }
    blocked
}
