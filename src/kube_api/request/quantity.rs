//! Numbers as pods write them: decimal fractions and Kubernetes quantities, parsed exactly.
//!
//! No float, no rounding of intermediate values: a text is a number that the type can hold, or an
//! error. Digits are ASCII digits, and a text with any number of them is safe to parse.

use wire::units::{MemMib, Share};

/// Most decimals of a fraction. Shares are counted in millionths; users get one digit less.
pub const MAX_FRACTION_DECIMALS: usize = 5;

/// Bytes in one MiB.
const MIB: u128 = 1 << 20;

/// Why a text is not a number of the expected kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NumberError {
    /// The text does not have the form of such a number.
    #[error("not a number in this format")]
    Syntax,
    /// A required unit is missing, or is not a unit of memory.
    #[error("no unit of memory")]
    Unit,
    /// More than the type holds.
    #[error("out of range")]
    Range,
}

/// A share from a decimal from 0 to 1, both included, with at most [`MAX_FRACTION_DECIMALS`]
/// decimals: `0.5`, `1`, `1.00000`, `.25`.
///
/// # Errors
/// [`NumberError`] for a sign, an exponent, a blank, a bare dot, too many decimals, more than 1.
pub fn parse_fraction(text: &str) -> Result<Share, NumberError> {
    let number = Decimal::parse(text).ok_or(NumberError::Syntax)?;
    if number.decimals.len() > MAX_FRACTION_DECIMALS {
        return Err(NumberError::Syntax);
    }
    let (mantissa, scale) = number.mantissa().ok_or(NumberError::Range)?;
    let millionths = mantissa
        .checked_mul(10_u128.pow(6_u32.saturating_sub(scale)))
        .and_then(|value| u64::try_from(value).ok())
        .map(Share::from_millionths)
        .ok_or(NumberError::Range)?;
    if millionths > Share::WHOLE { Err(NumberError::Range) } else { Ok(millionths) }
}

/// A whole number written with ASCII digits only.
///
/// # Errors
/// [`NumberError::Syntax`] for anything but digits, [`NumberError::Range`] beyond `u64`.
pub fn parse_whole(text: &str) -> Result<u64, NumberError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(NumberError::Syntax);
    }
    text.parse().map_err(|_| NumberError::Range)
}

/// Memory from a Kubernetes quantity that names its unit (`8Gi`, `1.5Gi`, `512Mi`, `1G`), rounded
/// *up* to whole MiB, so that the container gets at least what it wrote.
///
/// # Errors
/// [`NumberError::Unit`] without a unit of memory: a bare `8` and `8000m` would both be eight
/// bytes, which no user means.
pub fn parse_memory_with_unit(text: &str) -> Result<MemMib, NumberError> {
    let quantity = Quantity::parse(text)?;
    match quantity.suffix {
        Suffix::Binary(_) | Suffix::Decimal(3..) => {
            quantity.ceil_div(MIB).map(MemMib::new).ok_or(NumberError::Range)
        }
        Suffix::Decimal(_) | Suffix::Exponent(_) => Err(NumberError::Unit),
    }
}

/// Bytes of any Kubernetes quantity, as MiB rounded up.
///
/// # Errors
/// [`NumberError`] for a text that is not a quantity, is negative or exceeds the range of the type.
pub fn parse_memory(text: &str) -> Result<MemMib, NumberError> {
    Quantity::parse(text)?.ceil_div(MIB).map(MemMib::new).ok_or(NumberError::Range)
}

/// Thousandths of any Kubernetes quantity, rounded up as kube-scheduler rounds CPU amounts.
///
/// # Errors
/// [`NumberError`] for a text that is not a quantity, is negative or exceeds the range of the type.
pub fn parse_milli(text: &str) -> Result<u64, NumberError> {
    Quantity::parse(text)?.ceil_ratio(1000, 1).ok_or(NumberError::Range)
}

/// A count from any Kubernetes quantity that is a whole number (`2`, `1k`, `2000m`).
///
/// # Errors
/// [`NumberError`] where it is no quantity, is negative, not whole, or exceeds the type's range.
pub fn parse_count(text: &str) -> Result<u64, NumberError> {
    let (over, under) = Quantity::parse(text)?.ratio(1, 1).ok_or(NumberError::Range)?;
    let count = u64::try_from(over.div_ceil(under)).map_err(|_| NumberError::Range)?;
    if over.is_multiple_of(under) { Ok(count) } else { Err(NumberError::Syntax) }
}

/// The digits of an unsigned decimal number.
struct Decimal<'a> {
    whole: &'a str,
    decimals: &'a str,
}

impl<'a> Decimal<'a> {
    /// `12`, `1.5`, `.5` or `5.`; `None` for anything else.
    fn parse(text: &'a str) -> Option<Self> {
        let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
        let has_digits = whole.bytes().chain(decimals.bytes()).all(|byte| byte.is_ascii_digit());
        let is_empty = whole.is_empty() && decimals.is_empty();
        (has_digits && !is_empty).then_some(Self { whole, decimals })
    }

    /// The number as `mantissa / 10^scale`; `None` if more than 30 digits count.
    fn mantissa(&self) -> Option<(u128, u32)> {
        let decimals = self.decimals.trim_end_matches('0');
        let digits = self.whole.trim_start_matches('0').len() + decimals.len();
        if digits > 30 {
            return None;
        }
        let mantissa = self
            .whole
            .bytes()
            .chain(decimals.bytes())
            .fold(0_u128, |value, byte| value * 10 + u128::from(byte - b'0'));
        Some((mantissa, u32::try_from(decimals.len()).ok()?))
    }
}

/// What follows the digits of a quantity.
#[derive(Clone, Copy)]
enum Suffix {
    /// `Ki` to `Ei`: a power of two.
    Binary(u32),
    /// `n` to `E`, or nothing: a power of ten.
    Decimal(i32),
    /// `e3`, `E-2`: a power of ten.
    Exponent(i32),
}

/// An unsigned Kubernetes quantity: `mantissa / 10^scale`, times the suffix.
struct Quantity {
    mantissa: u128,
    scale: u32,
    suffix: Suffix,
}

impl Quantity {
    fn parse(text: &str) -> Result<Self, NumberError> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (digits, suffix) = text.split_at(end);
        let number = Decimal::parse(digits).ok_or(NumberError::Syntax)?;
        let suffix = Suffix::parse(suffix).ok_or(NumberError::Syntax)?;
        let (mantissa, scale) = number.mantissa().ok_or(NumberError::Range)?;
        Ok(Self { mantissa, scale, suffix })
    }

    /// The value divided by `unit`, rounded up; `None` if it exceeds the range.
    fn ceil_div(&self, unit: u128) -> Option<u64> {
        self.ceil_ratio(1, unit)
    }

    /// The value times `factor` divided by `unit`, rounded up; `None` if it exceeds the range.
    fn ceil_ratio(&self, factor: u128, unit: u128) -> Option<u64> {
        let (over, under) = self.ratio(factor, unit)?;
        u64::try_from(over.div_ceil(under)).ok()
    }

    /// The value times `factor` divided by `unit`, as a fraction; `None` if it exceeds the range.
    fn ratio(&self, factor: u128, unit: u128) -> Option<(u128, u128)> {
        let (two, ten) = match self.suffix {
            Suffix::Binary(power) => (power, 0),
            Suffix::Decimal(power) | Suffix::Exponent(power) => (0, power),
        };
        let ten = ten.checked_sub(i32::try_from(self.scale).ok()?)?;
        let power = 10_u128.checked_pow(ten.unsigned_abs())?;
        let scaled = self.mantissa.checked_mul(factor)?.checked_mul(1_u128.checked_shl(two)?)?;
        Some(match ten {
            0.. => (scaled.checked_mul(power)?, unit),
            _ => (scaled, unit.checked_mul(power)?),
        })
    }
}

impl Suffix {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "" => Self::Decimal(0),
            "n" => Self::Decimal(-9),
            "u" => Self::Decimal(-6),
            "m" => Self::Decimal(-3),
            "k" => Self::Decimal(3),
            "M" => Self::Decimal(6),
            "G" => Self::Decimal(9),
            "T" => Self::Decimal(12),
            "P" => Self::Decimal(15),
            "E" => Self::Decimal(18),
            "Ki" => Self::Binary(10),
            "Mi" => Self::Binary(20),
            "Gi" => Self::Binary(30),
            "Ti" => Self::Binary(40),
            "Pi" => Self::Binary(50),
            "Ei" => Self::Binary(60),
            _ => return Self::parse_exponent(text),
        })
    }

    /// `e` or `E`, an optional sign, one or two digits.
    fn parse_exponent(text: &str) -> Option<Self> {
        let power = text.strip_prefix(['e', 'E'])?;
        let (sign, digits) = match power.strip_prefix('-') {
            Some(digits) => (-1, digits),
            None => (1, power.strip_prefix('+').unwrap_or(power)),
        };
        if digits.is_empty() || digits.len() > 2 || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        digits.parse::<i32>().ok().map(|power| Self::Exponent(sign * power))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_fraction_is_exact_to_the_fifth_decimal() {
        for (text, millionths) in [
            ("1", 1_000_000),
            ("1.0", 1_000_000),
            ("1.00000", 1_000_000),
            ("0.00001", 10),
            ("0.33333", 333_330),
            (".5", 500_000),
            ("0.5", 500_000),
            ("000.5", 500_000),
            ("0.0", 0),
        ] {
            assert_eq!(parse_fraction(text).map(Share::millionths), Ok(millionths), "{text}");
        }
    }

    #[test]
    fn only_plain_decimals_are_fractions() {
        let long = "9".repeat(4000);
        for text in [
            "", ".", " 0.5", "0.5 ", "+0.5", "-0.5", "5e-1", "0,5", "NaN", "inf", "0.500000",
            "1.000001", "1.1", "2", "٠.٥", "0.٥", "0x1", "1_0", "0..5", "0.5.", "1.0.0", &long,
            "½",
        ] {
            assert!(parse_fraction(text).is_err(), "{text}");
        }
    }

    #[test]
    fn memory_with_a_unit_is_rounded_up_to_whole_mib() {
        for (text, mib) in [
            ("8Gi", 8192),
            ("1.5Gi", 1536),
            ("512Mi", 512),
            ("1G", 954),
            ("1Ki", 1),
            ("1048576k", 1000),
            ("0.1Mi", 1),
            ("0Gi", 0),
            ("16Ti", 16 << 20),
        ] {
            assert_eq!(parse_memory_with_unit(text).map(MemMib::mib), Ok(mib), "{text}");
        }
        for text in ["8", "8192", "8000m", "8e9", "1E3", "0"] {
            assert_eq!(parse_memory_with_unit(text), Err(NumberError::Unit), "{text}");
        }
        for text in ["8gi", "8 Gi", "-8Gi", "+8Gi", "8GiB", "Gi", "8MB", "", "८Gi", "8e", "8e+"] {
            assert_eq!(parse_memory_with_unit(text), Err(NumberError::Syntax), "{text}");
        }
    }

    #[test]
    fn every_response_form_of_the_api_server_is_parsed() {
        for (text, milli) in
            [("100m", 100), ("1", 1000), ("1.5", 1500), ("1e1", 10_000), ("1u", 1), ("1E-3", 1)]
        {
            assert_eq!(parse_milli(text), Ok(milli), "{text}");
        }
        assert_eq!(parse_memory("1073741824").map(MemMib::mib), Ok(1024));
        assert_eq!(parse_count("2"), Ok(2));
        assert_eq!(parse_count("2000m"), Ok(2));
        assert_eq!(parse_count("1500m"), Err(NumberError::Syntax));
        // A thousand times this number is beyond the type.
        let part = ".23372036817758079223372036815Gi";
        assert_eq!(parse_count(part), Err(NumberError::Syntax));
    }

    #[test]
    fn absurdly_long_numbers_are_out_of_range() {
        let nines = "9".repeat(100_000);
        let small = format!("0.{}1", "0".repeat(100_000));
        for text in [&nines, &small, &format!("{nines}Ei"), &format!("{nines}.{nines}E")] {
            assert!(parse_memory(text).is_err());
            assert!(parse_milli(text).is_err());
            assert!(parse_count(text).is_err());
        }
        assert_eq!(parse_whole(&nines), Err(NumberError::Range));
        assert_eq!(parse_memory("1e99"), Err(NumberError::Range));
        assert_eq!(parse_memory("1e-99"), Err(NumberError::Range));
        assert_eq!(parse_memory(&format!("{}8Mi", "0".repeat(5000))), Ok(MemMib::new(8)));
    }

    proptest! {
        #[test]
        fn no_text_makes_a_parser_panic(text in "[0-9.eEiKMGTPmnuk+-]{0,40}|.{0,12}") {
            let _ = parse_fraction(&text);
            let _ = parse_memory(&text);
            let _ = parse_memory_with_unit(&text);
            let _ = parse_milli(&text);
            let _ = parse_count(&text);
        }

        #[test]
        fn a_share_reads_back_as_it_prints(steps in 1_u64..=100_000) {
            let share = Share::from_millionths(steps * 10);
            prop_assert_eq!(parse_fraction(&share.to_string()), Ok(share));
        }
    }
}
