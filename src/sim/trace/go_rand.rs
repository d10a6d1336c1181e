//! Go's seeded `math/rand` generator, number for number.
//!
//! The FGD paper's simulator draws its workload from the global generator of Go's standard library.
//! Replaying the same arrivals needs the same numbers: an additive lagged Fibonacci generator over
//! 607 words, and Go's exact ways to reduce them to a range. The algorithms follow `rng.go` and
//! `rand.go` of Go's package `math/rand` (BSD license, see `NOTICE`). Go promises not to change
//! what a seeded generator returns. It is not fit for secrets.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use crate::trace::go_rand_table::COOKED;

/// Words of the register.
const LENGTH: usize = 607;
/// Distance between the two words that are added.
const TAP: usize = 273;
/// 2^31 - 1: the modulus of the generator that spreads a seed, and Go's largest `int32`.
const INT32_MAX: u32 = i32::MAX as u32;
/// Keeps 63 bits.
const MASK_63: u64 = u64::MAX >> 1;

/// A generator in the state after Go's `rand.Seed`. A clone returns the same numbers.
#[derive(Debug, Clone)]
pub struct GoRand {
    register: Box<[u64; LENGTH]>,
    tap: usize,
    feed: usize,
}

impl GoRand {
    /// The generator after `rand.Seed(seed)`. Seeds that agree modulo 2^31 - 1 give the same.
    #[must_use]
    pub fn new(seed: i64) -> Self {
        let folded = u64::try_from(seed.rem_euclid(i64::from(INT32_MAX)))
            .expect("a remainder modulo a positive number is not negative");
        let mut word = if folded == 0 { 89_482_311 } else { folded };
        let mut next = || {
            word = word * 48_271 % u64::from(INT32_MAX);
            word
        };
        for _ in 0..20 {
            next();
        }
        let register =
            COOKED.map(|cooked| cooked.cast_unsigned() ^ next() << 40 ^ next() << 20 ^ next());
        Self { register: Box::new(register), tap: 0, feed: LENGTH - TAP }
    }

    /// Go's `Uint64`: the next word of the register.
    pub fn uint64(&mut self) -> u64 {
        self.tap = self.tap.checked_sub(1).unwrap_or(LENGTH - 1);
        self.feed = self.feed.checked_sub(1).unwrap_or(LENGTH - 1);
        let sum = self.register[self.feed].wrapping_add(self.register[self.tap]);
        self.register[self.feed] = sum;
        sum
    }

    /// Go's `Int63`: below 2^63.
    pub fn int63(&mut self) -> u64 {
        self.uint64() & MASK_63
    }

    /// Go's `Uint32`: the upper 32 of 63 bits.
    pub fn uint32(&mut self) -> u32 {
        u32::try_from(self.int63() >> 31).expect("63 bits less 31 are 32")
    }

    /// Go's `Int31`: below 2^31.
    pub fn int31(&mut self) -> u32 {
        u32::try_from(self.int63() >> 32).expect("63 bits less 32 are 31")
    }

    /// Go's `Int63n`: uniform below `n`; it draws again if small numbers would be favored.
    ///
    /// # Panics
    /// If `n` is 2^63 or more, which Go's type cannot hold.
    pub fn int63n(&mut self, n: NonZeroU64) -> u64 {
        assert!(n.get() <= MASK_63, "`{n}` does not fit in 63 bits");
        if n.is_power_of_two() {
            return self.int63() & (n.get() - 1);
        }
        let largest_fair = MASK_63 - (1 << 63) % n;
        loop {
            let drawn = self.int63();
            if drawn <= largest_fair {
                return drawn % n;
            }
        }
    }

    /// Go's `Int31n`: as [`Self::int63n`] on 31 bits.
    ///
    /// # Panics
    /// If `n` is 2^31 or more, which Go's type cannot hold.
    pub fn int31n(&mut self, n: NonZeroU32) -> u32 {
        assert!(n.get() <= INT32_MAX, "`{n}` does not fit in 31 bits");
        if n.is_power_of_two() {
            return self.int31() & (n.get() - 1);
        }
        let largest_fair = INT32_MAX - (1 << 31) % n;
        loop {
            let drawn = self.int31();
            if drawn <= largest_fair {
                return drawn % n;
            }
        }
    }

    /// Go's `Intn`: uniform below `n`, from 31 bits if they suffice.
    pub fn intn(&mut self, n: NonZeroUsize) -> usize {
        let drawn = match NonZeroU32::try_from(n) {
            Ok(small) if small.get() <= INT32_MAX => u64::from(self.int31n(small)),
            _ => self.int63n(NonZeroU64::try_from(n).expect("no platform has wider indices")),
        };
        usize::try_from(drawn).expect("a value below an index is an index")
    }

    /// Go's `Perm`: the numbers 0 to `n - 1` in random order.
    pub fn perm(&mut self, n: usize) -> Vec<usize> {
        let mut order = Vec::with_capacity(n);
        for i in 0..n {
            // Go draws for the first number too, although it has only one choice.
            let j = self.intn(NonZeroUsize::MIN.saturating_add(i));
            order.push(i);
            order.swap(i, j);
        }
        order
    }

    /// Go's `Shuffle` with a function that swaps two items of `items`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let choices = NonZeroUsize::MIN.saturating_add(i);
            let j = match NonZeroU32::try_from(choices) {
                Ok(small) if small.get() <= INT32_MAX => {
                    usize::try_from(self.scaled(small)).expect("indices have at least 32 bits")
                }
                _ => self.intn(choices),
            };
            items.swap(i, j);
        }
    }

    /// Go's unexported `int31n`: it multiplies instead of dividing, so it gives other numbers.
    fn scaled(&mut self, n: NonZeroU32) -> u32 {
        // (2^32 - n) % n, which is 2^32 % n.
        let unfair_below = n.get().wrapping_neg() % n;
        loop {
            let product = u64::from(self.uint32()) * u64::from(n.get());
            if product & u64::from(u32::MAX) >= u64::from(unfair_below) {
                return u32::try_from(product >> 32).expect("64 bits less 32 are 32");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a Go 1.26 program printed for a seed, in this order of calls: `Int63`, `Uint32`,
    /// `Int31`, `Intn(1213)`, `Intn(1024)`, `Int63n(3e18)`, `Perm(8)`, `Shuffle` of 0..10, 2000
    /// times `Int63`, `Int63`.
    type Printed = (i64, u64, u32, u32, [u64; 3], [usize; 8], [usize; 10], u64);

    #[rustfmt::skip]
    const PRINTED: [Printed; 10] = [
        (0, 8717895732742165505, 1052117029, 1408655353, [989, 251, 2669985732393126063], [3, 1, 0, 4, 7, 5, 2, 6], [7, 8, 5, 1, 3, 4, 0, 9, 2, 6], 6184151192408979914),
        (1, 5577006791947779410, 4039455774, 1427131847, [34, 385, 334824724549167320], [3, 7, 0, 1, 6, 2, 4, 5], [9, 6, 5, 0, 1, 8, 7, 2, 4, 3], 3261581130745412396),
        (42, 3440579354231278675, 283469975, 1297281668, [780, 991, 534334367214237261], [1, 0, 6, 3, 7, 5, 2, 4], [2, 3, 1, 0, 8, 9, 7, 5, 4, 6], 8307037221458163135),
        (-1, 3644962268338389676, 256193504, 720391224, [609, 639, 2885068457955727142], [4, 2, 6, 1, 5, 3, 7, 0], [2, 0, 7, 9, 3, 1, 8, 5, 4, 6], 5947988730210780331),
        (-42, 5782451830478893995, 4010108777, 850588028, [149, 32, 2687054151578388913], [3, 4, 6, 7, 5, 1, 0, 2], [8, 7, 6, 9, 5, 0, 1, 2, 4, 3], 905382609093773848),
        (89482311, 8717895732742165505, 1052117029, 1408655353, [989, 251, 2669985732393126063], [3, 1, 0, 4, 7, 5, 2, 6], [7, 8, 5, 1, 3, 4, 0, 9, 2, 6], 6184151192408979914),
        (2147483647, 8717895732742165505, 1052117029, 1408655353, [989, 251, 2669985732393126063], [3, 1, 0, 4, 7, 5, 2, 6], [7, 8, 5, 1, 3, 4, 0, 9, 2, 6], 6184151192408979914),
        (2147483648, 5577006791947779410, 4039455774, 1427131847, [34, 385, 334824724549167320], [3, 7, 0, 1, 6, 2, 4, 5], [9, 6, 5, 0, 1, 8, 7, 2, 4, 3], 3261581130745412396),
        (i64::MAX, 5577006791947779410, 4039455774, 1427131847, [34, 385, 334824724549167320], [3, 7, 0, 1, 6, 2, 4, 5], [9, 6, 5, 0, 1, 8, 7, 2, 4, 3], 3261581130745412396),
        (i64::MIN, 7681445645332086223, 3155860137, 2036803875, [190, 663, 670304280163639074], [3, 2, 1, 6, 4, 5, 7, 0], [9, 7, 5, 1, 8, 2, 6, 4, 0, 3], 7345017769492976964),
    ];

    fn index(n: usize) -> NonZeroUsize {
        NonZeroUsize::new(n).unwrap()
    }

    #[test]
    fn every_call_yields_what_go_yields() {
        for (seed, int63, uint32, int31, [odd, power, wide], perm, shuffled, later) in PRINTED {
            let mut rand = GoRand::new(seed);
            assert_eq!(rand.int63(), int63, "Int63, seed {seed}");
            assert_eq!(rand.uint32(), uint32, "Uint32, seed {seed}");
            assert_eq!(rand.int31(), int31, "Int31, seed {seed}");
            assert_eq!(rand.intn(index(1213)) as u64, odd, "Intn(1213), seed {seed}");
            assert_eq!(rand.intn(index(1024)) as u64, power, "Intn(1024), seed {seed}");
            assert_eq!(rand.intn(index(3_000_000_000_000_000_000)) as u64, wide, "seed {seed}");
            assert_eq!(rand.perm(8), perm, "Perm(8), seed {seed}");
            let mut items: Vec<usize> = (0..10).collect();
            rand.shuffle(&mut items);
            assert_eq!(items, shuffled, "Shuffle, seed {seed}");
            for _ in 0..2000 {
                rand.int63();
            }
            assert_eq!(rand.int63(), later, "after the register has wrapped, seed {seed}");
        }
    }

    #[test]
    fn draws_that_must_be_repeated_are_repeated_as_in_go() {
        // Nearly every third draw below this bound is unfair and repeated.
        let mut rand = GoRand::new(7);
        let folded =
            (0..1000).fold(0, |sum, _| (sum * 31 + rand.intn(index(1_431_655_766))) % 1_000_003);
        assert_eq!((folded, rand.int63()), (720_636, 7_384_505_937_903_913_752));
    }

    #[test]
    fn a_long_shuffle_ends_in_go_s_order_and_state() {
        let mut rand = GoRand::new(7);
        let mut items: Vec<usize> = (0..100_000).collect();
        rand.shuffle(&mut items);
        let folded = items.iter().fold(0, |sum, item| (sum * 31 + item) % 1_000_003);
        assert_eq!(items[..5], [34_405, 17_057, 85_632, 91_131, 17_599]);
        assert_eq!((folded, rand.int63()), (135_478, 7_218_731_097_698_017_584));
    }

    #[test]
    fn an_empty_shuffle_draws_as_go_does() {
        let mut rand = GoRand::new(42);
        rand.shuffle(&mut [0; 1]);
        assert_eq!(rand.perm(0), Vec::<usize>::new());
        assert_eq!(rand.int63(), 3_440_579_354_231_278_675, "neither drew a number");
        let mut rand = GoRand::new(42);
        assert_eq!(rand.perm(1), [0]);
        assert_ne!(rand.int63(), 3_440_579_354_231_278_675, "Perm(1) draws one");
    }
}
