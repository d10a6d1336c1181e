//! Amounts as floating-point numbers, and back.

use wire::units::Share;

/// The number, to 53 bits.
pub(crate) fn float(value: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "estimates need no more than 53 bits")]
    {
        value as f64
    }
}

/// Rounds to whole parts of 1/`parts`. Estimates are cut at a million, so that costs fit.
pub(crate) fn fixed(value: f64, parts: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "clamped; NaN is zero")]
    {
        libm::round(value.clamp(-1e6, 1e6) * parts) as i64
    }
}

pub(crate) fn gpus(share: Share) -> f64 {
    float(share.millionths()) / 1e6
}
