//! The requests of a seed. All policies get the same ones.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::mig::mig_worlds::MigWorld;
use sim::trace::exponential::{MEAN_TICKS, exponential};

/// A request before it is placed. Times are in mean lifetimes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Request {
    pub(crate) at: f64,
    pub(crate) stays: f64,
    /// Position of its type among those of the world.
    pub(crate) kind: usize,
}

/// Types by weight, and how often they come per mean lifetime, until some time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrivals<'a> {
    pub(crate) weights: &'a [u32],
    pub(crate) rate: f64,
    pub(crate) until: f64,
}

/// Requests of one stretch after the other, with Poisson arrivals and exponential lifetimes of mean 1.
pub(crate) fn requests(world: MigWorld, seed: u64, stretches: &[Arrivals<'_>]) -> Vec<Request> {
    let mut chance = ChaCha8Rng::seed_from_u64(seed);
    chance.set_stream(world.number());
    let (mut requests, mut at) = (Vec::new(), 0.0);
    for stretch in stretches {
        loop {
            let next = at + drawn_time(&mut chance) / stretch.rate;
            if next >= stretch.until {
                // arrivals without memory: what is left may be drawn again
                at = stretch.until;
                break;
            }
            at = next;
            let kind = drawn(&mut chance, stretch.weights);
            requests.push(Request { at, stays: drawn_time(&mut chance), kind });
        }
    }
    requests
}

/// An exponential time of mean 1.
fn drawn_time(chance: &mut ChaCha8Rng) -> f64 {
    exponential(chance) as f64 / MEAN_TICKS as f64
}

/// A position, by weight.
pub(crate) fn drawn(chance: &mut ChaCha8Rng, weights: &[u32]) -> usize {
    let all: u64 = weights.iter().copied().map(u64::from).sum();
    let mut number = (u64::from(chance.next_u32()) * all) >> 32;
    let position = weights.iter().position(|weight| {
        let weight = u64::from(*weight);
        let is_drawn = number < weight;
        number = number.saturating_sub(weight);
        is_drawn
    });
    position.expect("what is drawn is below the sum")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_as_often_as_their_weights_say() {
        let stretches = [
            Arrivals { weights: &[1, 3], rate: 1_000.0, until: 10.0 },
            Arrivals { weights: &[1, 0], rate: 500.0, until: 20.0 },
        ];
        let all = requests(MigWorld::Models, 7, &stretches);
        assert!(all.windows(2).all(|two| two[0].at <= two[1].at));
        let (first, second): (Vec<&Request>, Vec<&Request>) =
            all.iter().partition(|request| request.at < 10.0);
        assert!(first.len().abs_diff(10_000) < 400 && second.len().abs_diff(5_000) < 300);
        let ones = first.iter().filter(|request| request.kind == 1).count();
        assert!(ones.abs_diff(7_500) < 300, "{ones}");
        assert!(second.iter().all(|request| request.kind == 0));
        let mean = all.iter().map(|request| request.stays).sum::<f64>() / all.len() as f64;
        assert!((mean - 1.0).abs() < 0.04, "{mean}");
        assert_eq!(all, requests(MigWorld::Models, 7, &stretches));
        assert_ne!(all, requests(MigWorld::Models, 8, &stretches));
        assert_ne!(all, requests(MigWorld::Mix(0), 7, &stretches), "each world has its own");
    }
}
