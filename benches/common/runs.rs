//! What every timed bench is run with.

use std::time::Duration;

use criterion::Criterion;

/// Numbers of nodes that every bench is run with.
pub(crate) const SIZES: [usize; 4] = [100, 1000, 5000, 20_000];

/// Short runs: medians are stable to some per cent, and all benches take a minute or two.
pub(crate) fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args()
}
