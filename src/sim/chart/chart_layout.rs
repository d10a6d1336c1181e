//! The layout of a chart: the ends of its axes, and how much of a text fits.
//!
//! Arithmetic only; [`crate::chart::draw`] does the drawing.

use std::ops::Range;

/// A range that contains `values` and ends on round numbers, in about `parts` steps.
///
/// It starts at 0 unless that would leave the lower half of the panel empty.
pub(crate) fn axis(values: impl Iterator<Item = f64>, parts: f64) -> Range<f64> {
    let (mut low, mut high) =
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    if low > 0.0 && low < high / 2.0 {
        low = 0.0;
    }
    if high - low < 1e-9 * high.abs().max(1.0) {
        (low, high) = if low == 0.0 { (0.0, 1.0) } else { (low - 0.5, high + 0.5) };
    }
    let step = round_step((high - low) / parts);
    (low / step).floor() * step..(high / step).ceil() * step
}

/// The smallest of 1, 2, 5 times a power of ten that is not below `step`.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|n| n * power).find(|n| *n >= step).unwrap_or(10.0 * power)
}

/// How many decimals the marks of an axis need to differ.
pub(crate) fn decimals(range: &Range<f64>) -> usize {
    let span = range.end - range.start;
    let thresholds = (0..12).map(|digits| 8.0 * 0.1_f64.powi(digits));
    thresholds.take_while(|threshold| span < *threshold).count()
}

/// `text` cut to `room` at the font size `size`, without control characters.
pub(crate) fn shorten(text: &str, room: f64, size: f64) -> String {
    let printable = || text.chars().map(|c| if is_printable(c) { c } else { ' ' });
    if printable().map(width).sum::<f64>() * size <= room {
        return printable().collect();
    }
    let mut used = width('…') * size;
    let mut short: String = printable()
        .take_while(|c| {
            used += width(*c) * size;
            used <= room
        })
        .collect();
    short.push('…');
    short
}

/// The width of a character at font size 1. There is no font to measure with, so widths are upper
/// estimates for a sans-serif one.
fn width(c: char) -> f64 {
    match c {
        'i' | 'j' | 'l' | 'I' | '.' | ',' | ':' | ';' | '|' | '\'' | ' ' => 0.34,
        'm' | 'w' | 'M' | 'W' | '@' | '%' => 1.0,
        'A'..='Z' => 0.78,
        ' '..='~' => 0.65,
        _ => 1.05,
    }
}

/// Whether `c` is allowed in XML and does not change the direction of the text around it.
pub(crate) fn is_printable(c: char) -> bool {
    let turns = matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
    !c.is_control() && !turns && !matches!(c, '\u{FFFE}' | '\u{FFFF}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_cut_to_its_available_width() {
        for (text, expected) in [
            ("fgd", "fgd"),
            ("", ""),
            ("a policy with a very long name that nobody requested", "a policy with a very l…"),
            ("WWWWWWWWWWWWWWWWWWWWWWWWWWW", "WWWWWWWWWWWW…"),
            ("装箱装箱装箱装箱装箱装箱装箱装箱", "装箱装箱装箱装箱装箱装…"),
        ] {
            assert_eq!(shorten(text, 174.0, 13.0), expected);
        }
    }

    #[test]
    fn an_axis_ends_on_round_numbers_and_starts_at_zero_unless_half_would_be_empty() {
        for (values, expected) in [
            (vec![0.0, 130.0], 0.0..140.0),
            (vec![0.4, 95.38], 0.0..100.0),
            (vec![88.2, 96.17], 88.0..97.0),
            (vec![0.0], 0.0..1.0),
            (vec![7.0, 7.0], 6.4..7.6),
            (vec![-3.0, 3.0], -3.0..3.0),
            (vec![-1e12, 1e12], -1e12..1e12),
        ] {
            let range = axis(values.iter().copied(), 8.0);
            let near = |a: f64, b: f64| (a - b).abs() < 1e-9 * b.abs().max(1.0);
            let equal = near(range.start, expected.start) && near(range.end, expected.end);
            assert!(equal, "{values:?} gave {range:?}");
        }
    }

    #[test]
    fn tick_labels_have_enough_decimals_to_differ() {
        for (range, expected) in [(0.0..100.0, 0), (0.0..8.0, 0), (95.0..96.5, 1), (0.0..0.5, 2)] {
            assert_eq!(decimals(&range), expected, "{range:?}");
        }
    }
}
