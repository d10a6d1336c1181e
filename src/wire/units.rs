//! Exact quantities: memory, compute shares, CPU and time.
//!
//! Every amount in the ledger is a whole number behind a type of its own. So no raw `+` or `-` can
//! be written, and two kinds of amounts cannot be mixed up. All arithmetic is checked: a shortfall
//! or an overflow is `None`, never a silent zero.

use std::fmt;
use std::time::Duration;

/// GPU or host memory in MiB (2^20 bytes). Arithmetic is checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemMib(u64);

impl MemMib {
    /// No memory.
    pub const ZERO: Self = Self(0);

    /// An amount of `mib` MiB.
    pub const fn new(mib: u64) -> Self {
        Self(mib)
    }

    /// The amount in MiB.
    pub const fn mib(self) -> u64 {
        self.0
    }

    /// The sum, or `None` on overflow.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// The difference, or `None` if `other` is larger.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }
}

impl fmt::Display for MemMib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0)
    }
}

/// Compute share in millionths of one GPU; a sum over several GPUs may exceed [`Share::WHOLE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Share(u64);

impl Share {
    /// Nothing of a GPU.
    pub const ZERO: Self = Self(0);
    /// One whole GPU.
    pub const WHOLE: Self = Self(1_000_000);

    /// A share of `millionths` millionths of one GPU.
    pub const fn from_millionths(millionths: u64) -> Self {
        Self(millionths)
    }

    /// The share in millionths of one GPU.
    pub const fn millionths(self) -> u64 {
        self.0
    }

    /// The sum, or `None` on overflow.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// The difference, or `None` if `other` is larger.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }

    /// This share of `memory`, rounded down, so shares that sum to one always fit together.
    ///
    /// # Panics
    /// Never for shares up to [`Share::WHOLE`]: the result is at most `memory`.
    pub fn of(self, memory: MemMib) -> MemMib {
        let mib = u128::from(self.0) * u128::from(memory.0) / u128::from(Self::WHOLE.0);
        MemMib(u64::try_from(mib).expect("a share of at most a whole GPU is at most its memory"))
    }

    /// `part` as a share of `whole`, rounded down, so an exact fit in memory also fits in compute.
    /// `None` if `whole` is zero or the result is out of range.
    pub fn ratio(part: MemMib, whole: MemMib) -> Option<Self> {
        let scaled = u128::from(part.0) * u128::from(Self::WHOLE.0);
        scaled.checked_div(u128::from(whole.0)).and_then(|v| u64::try_from(v).ok()).map(Self)
    }
}

impl fmt::Display for Share {
    /// As in annotations: a decimal fraction of one GPU without trailing zeros.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / Self::WHOLE.0, self.0 % Self::WHOLE.0);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        let digits = format!("{rest:06}");
        write!(f, "{whole}.{}", digits.trim_end_matches('0'))
    }
}

/// CPU in thousandths of one core, as Kubernetes counts it (`500m`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MilliCpu(u64);

impl MilliCpu {
    /// No CPU.
    pub const ZERO: Self = Self(0);

    /// An amount of `milli` thousandths of a core.
    pub const fn new(milli: u64) -> Self {
        Self(milli)
    }

    /// The amount in thousandths of a core.
    pub const fn milli(self) -> u64 {
        self.0
    }

    /// The sum, or `None` on overflow.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// The difference, or `None` if `other` is larger.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }
}

/// CPU and host memory: what a node offers or a pod requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostAmount {
    /// CPU.
    pub cpu: MilliCpu,
    /// Host memory.
    pub memory: MemMib,
}

impl HostAmount {
    /// Nothing.
    pub const ZERO: Self = Self { cpu: MilliCpu::ZERO, memory: MemMib::ZERO };

    /// The sum in both dimensions, or `None` on overflow.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        Some(Self {
            cpu: self.cpu.checked_add(other.cpu)?,
            memory: self.memory.checked_add(other.memory)?,
        })
    }

    /// What is left without `other`; zero in a dimension with a shortfall. Host use comes from
    /// outside (pods of any scheduler), so an excess is no fault of our arithmetic. It leaves
    /// nothing free.
    pub fn left_after(self, other: Self) -> Self {
        Self {
            cpu: self.cpu.checked_sub(other.cpu).unwrap_or(MilliCpu::ZERO),
            memory: self.memory.checked_sub(other.memory).unwrap_or(MemMib::ZERO),
        }
    }
}

/// A point in time on the monotonic clock of this process, in milliseconds since its start.
///
/// The core never reads a clock: its callers pass `now`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The start of the process.
    pub const START: Self = Self(0);

    /// The time `milliseconds` after the start of the process.
    pub const fn from_millis(milliseconds: u64) -> Self {
        Self(milliseconds)
    }

    /// Milliseconds since the start of the process.
    pub const fn millis(self) -> u64 {
        self.0
    }

    /// The time `duration` later; the maximum on overflow.
    pub fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    /// How long ago `earlier` was; zero if it is in the future.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// An amount of one device: memory and compute share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Demand {
    /// Memory.
    pub memory: MemMib,
    /// Compute share.
    pub share: Share,
}

impl Demand {
    /// Nothing.
    pub const ZERO: Self = Self { memory: MemMib::ZERO, share: Share::ZERO };

    /// The sum in both dimensions, or `None` on overflow.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        Some(Self {
            memory: self.memory.checked_add(other.memory)?,
            share: self.share.checked_add(other.share)?,
        })
    }

    /// The difference in both dimensions, or `None` if either falls short.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        Some(Self {
            memory: self.memory.checked_sub(other.memory)?,
            share: self.share.checked_sub(other.share)?,
        })
    }
}

/// A tenant's part of the time in which kernels ran on a device, in GPUs. The driver does not say
/// whose kernels they were. So each tenant with processes there gets the part that it has of the
/// share of all such tenants.
pub fn busy_part(busy_percent: u8, own: Share, present: Share) -> Share {
    let busy = u128::from(busy_percent) * u128::from(Share::WHOLE.millionths()) / 100;
    let part = match u128::from(present.millionths()) {
        0 => busy,
        present => busy * u128::from(own.millionths()) / present,
    };
    Share::from_millionths(u64::try_from(part.min(busy)).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_prints_as_the_user_wrote_it() {
        for (millionths, text) in
            [(500_000, "0.5"), (333_330, "0.33333"), (1_000_000, "1"), (10, "0.00001")]
        {
            assert_eq!(Share::from_millionths(millionths).to_string(), text);
        }
        assert_eq!(Share::from_millionths(2_250_000).to_string(), "2.25");
    }

    #[test]
    fn shares_that_sum_to_one_fit_into_any_memory() {
        let memory = MemMib::new(81_559);
        let parts = [200_000, 500_000, 300_000].map(|m| Share::from_millionths(m).of(memory));
        let sum = parts.iter().try_fold(MemMib::ZERO, |sum, part| sum.checked_add(*part)).unwrap();
        assert!(sum <= memory, "{sum} of {memory}");
    }

    #[test]
    fn an_exact_memory_fit_is_at_most_a_full_share() {
        let memory = MemMib::new(15_360);
        assert_eq!(Share::ratio(memory, memory), Some(Share::WHOLE));
        assert_eq!(Share::ratio(MemMib::new(1), MemMib::ZERO), None);
        assert_eq!(Share::ratio(MemMib::new(1), MemMib::new(3)).unwrap().millionths(), 333_333);
    }

    #[test]
    fn a_missing_shortfall_is_none_and_never_zero() {
        assert_eq!(MemMib::new(1).checked_sub(MemMib::new(2)), None);
        assert_eq!(Share::ZERO.checked_sub(Share::WHOLE), None);
        assert_eq!(MilliCpu::new(u64::MAX).checked_add(MilliCpu::new(1)), None);
    }
}
