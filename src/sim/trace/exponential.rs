//! Exponential times without a logarithm, so that every machine draws the same ones.

use rand_chacha::rand_core::RngCore;

/// Mean of [`exponential`]: times are whole multiples of its 2^32nd part.
pub const MEAN_TICKS: u64 = 1 << 32;

/// A time with exponential distribution and mean [`MEAN_TICKS`], by comparisons of whole numbers:
/// von Neumann, "Various Techniques Used in Connection With Random Digits" (1951), section 4.
///
/// The first of a falling run of uniform numbers of odd length is exponential below the mean. Each
/// run of even length adds one mean; its probability is 1/e.
pub fn exponential(chance: &mut impl RngCore) -> u64 {
    let mut means = 0;
    loop {
        let first = chance.next_u64();
        let mut least = first;
        let mut length = 1_u32;
        loop {
            let next = chance.next_u64();
            if next >= least {
                break;
            }
            least = next;
            length += 1;
        }
        if length % 2 == 1 {
            return means * MEAN_TICKS + (first >> 32);
        }
        means += 1;
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn a_seed_gives_the_same_times_on_every_machine() {
        let mut chance = ChaCha8Rng::seed_from_u64(42);
        let drawn = [(); 4].map(|()| exponential(&mut chance));
        assert_eq!(drawn, [2_928_721_845, 1_836_168_968, 7_747_574_541, 3_873_215_131]);
    }

    #[test]
    fn times_are_exponential() {
        let mut chance = ChaCha8Rng::seed_from_u64(1);
        let draws = 200_000_u32;
        let mean = MEAN_TICKS as f64;
        let drawn: Vec<f64> = (0..draws).map(|_| exponential(&mut chance) as f64 / mean).collect();
        let average = drawn.iter().sum::<f64>() / f64::from(draws);
        assert!((average - 1.0).abs() < 0.01, "{average}");
        for beyond in [0.1, 0.5, 1.0, 2.0, 4.0] {
            let share = drawn.iter().filter(|time| **time > beyond).count() as f64;
            let off = share / f64::from(draws) - f64::exp(-beyond);
            assert!(off.abs() < 0.004, "{beyond}: {off}");
        }
    }
}
