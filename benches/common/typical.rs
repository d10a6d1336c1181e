//! A request mix with many types.

use std::collections::BTreeMap;

use engine::model::request::{Amount, GpuRequest};
use engine::waste::request_mix::{Mix, RequestType, Tally};
use wire::units::{MemMib, MilliCpu, Share};

/// A mix of 105 types of requests, of which 100 are typical: they cover 95 % of all pods.
pub(crate) fn hundred_typical() -> Mix {
    let kind = |number: u64| {
        let size = 9_000 * (number + 1);
        let amount = match number % 3 {
            0 => Amount::Fraction(Share::from_millionths(size)),
            1 => Amount::Memory(MemMib::new(size / 16)),
            _ => Amount::Fraction(Share::from_millionths(1_000_000 - size)),
        };
        let mut tally = Tally::default();
        tally.count(MemMib::new(8192));
        let cpu = MilliCpu::new(1000 * (1 + number % 8));
        (RequestType::new(Some(&GpuRequest::one(amount)), cpu), tally)
    };
    let mix = Mix::of(&(0..105).map(kind).collect::<BTreeMap<_, _>>());
    assert_eq!(mix.typical().len(), 100);
    mix
}
