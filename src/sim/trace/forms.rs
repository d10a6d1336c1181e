//! How values of a trace are written, and which are allowed. An empty value is the default one.
//!
//! Amounts are exact: memory in MiB, shares in thousandths of a GPU with up to three decimals.

use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

use engine::hardware::pool::{ConfiguredIsolation, Enforcement, InstanceUse, Replicas};
use engine::model::policy::Policy;
use engine::model::request::Isolation;
use wire::ids::{MAX_DEVICE_MEMORY, MigProfile};
use wire::units::{MemMib, Share};

/// The longest name of a pod or node in Kubernetes.
pub(crate) const NAME_BYTES_MAX: usize = 253;

/// Longest name of a MIG profile.
const PROFILE_BYTES_MAX: usize = 64;

/// A value with a text.
pub(crate) trait Form: PartialEq + Sized {
    /// What is allowed, as errors say it.
    fn allowed() -> String;
    /// The value of a text that is not empty; `None` if it is not allowed.
    fn read(text: &str) -> Option<Self>;
    /// The text of a value that is not the default one.
    fn text(&self) -> String;
}

/// Reads a value.
pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
where
    T: Form + Default,
    D: Deserializer<'de>,
{
    let text = String::deserialize(from)?;
    let read = if text.is_empty() { Some(T::default()) } else { T::read(&text) };
    read.ok_or_else(|| D::Error::custom(T::allowed()))
}

/// Writes a value.
pub(crate) fn serialize<T, S>(value: &T, to: S) -> Result<S::Ok, S::Error>
where
    T: Form + Default,
    S: Serializer,
{
    to.serialize_str(&if *value == T::default() { String::new() } else { value.text() })
}

/// Reads a whole number from `LEAST` to `MOST`, written in digits only.
pub(crate) fn number<'de, const LEAST: u64, const MOST: u64, T, D>(from: D) -> Result<T, D::Error>
where
    T: TryFrom<u64>,
    D: Deserializer<'de>,
{
    let number = some_number::<LEAST, MOST, D>(from)?.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| out_of(LEAST, MOST))
}

/// Reads such a number, or nothing.
pub(crate) fn some_number<'de, const LEAST: u64, const MOST: u64, D>(
    from: D,
) -> Result<Option<u64>, D::Error>
where
    D: Deserializer<'de>,
{
    match String::deserialize(from)?.as_str() {
        "" => Ok(None),
        text => match whole(text).filter(|number| (LEAST..=MOST).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(out_of(LEAST, MOST)),
        },
    }
}

fn out_of<E: Error>(least: u64, most: u64) -> E {
    E::custom(format_args!("a whole number from {least} to {most}"))
}

/// Reads the name of a node or pod.
pub(crate) fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let allowed = "1 to 253 ASCII letters, digits, `-`, `.` or `_`";
    let name = Some(String::deserialize(from)?).filter(|name| is_name(name));
    name.ok_or_else(|| D::Error::custom(allowed))
}

/// Whether a text can be the name of a node or pod.
pub(crate) fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

/// Reads the name of a model, or of a node that is not in this file; it may be empty.
pub(crate) fn model<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    model_name(&text).ok_or_else(|| D::Error::custom(Vec::<String>::allowed()))
}

/// The text, if it can be the name of a model.
fn model_name(text: &str) -> Option<String> {
    let is_legal = text.chars().all(|c| !c.is_control() && c != '|');
    (text.len() <= NAME_BYTES_MAX && is_legal).then(|| text.to_owned())
}

impl<T: Form> Form for Option<T> {
    fn allowed() -> String {
        T::allowed()
    }

    fn read(text: &str) -> Option<Self> {
        T::read(text).map(Some)
    }

    fn text(&self) -> String {
        self.as_ref().map(T::text).unwrap_or_default()
    }
}

/// Implements [`Form`]: what is allowed, how a text is read, and how one is written.
macro_rules! forms {
    ($($kind:ty: $allowed:expr, $read:expr, $text:expr;)*) => {$(
        impl Form for $kind {
            fn allowed() -> String {
                $allowed.to_string()
            }

            fn read(text: &str) -> Option<Self> {
                $read(text)
            }

            fn text(&self) -> String {
                $text(self)
            }
        }
    )*};
}

pub(crate) use forms;

/// The same for values that have names.
macro_rules! named {
    ($($kind:ident: $all:expr;)*) => {forms! {$(
        $kind: $all.map(|value| format!("`{}`", value.name())).join(", "),
            |text: &str| $all.into_iter().find(|value| value.name() == text),
            |value: &$kind| value.name().to_owned();
    )*}};
}

named! {
    Policy: Policy::ALL;
    Isolation: Isolation::ALL;
    Enforcement: [Enforcement::None, Enforcement::Mps, Enforcement::Driver];
    ConfiguredIsolation: [
        ConfiguredIsolation::None, ConfiguredIsolation::Mps, ConfiguredIsolation::Driver,
        ConfiguredIsolation::Hardware,
    ];
}

forms! {
    bool: "`true` or `false`", |text: &str| text.parse().ok(), bool::to_string;
    i32: "a whole number of 32 bits", signed, i32::to_string;
    Replicas: format_args!("a whole number from {} to {}", Replicas::MIN, Replicas::MAX),
        |text| Replicas::new(whole(text)?), |replicas: &Replicas| replicas.count().to_string();
    InstanceUse: "`whole` or `shared`", instance_use, |_| "shared".to_owned();
    MigProfile: "the name of a MIG profile, such as `3g.40gb`", profile, MigProfile::to_string;
    Share: "thousandths above 0 up to 1000, with at most three decimals",
        share, |share: &Share| share_text(*share);
    MemMib: format_args!("MiB from 0 to {}", MAX_DEVICE_MEMORY.mib()),
        |text| device_memory(text, 0), |memory: &MemMib| memory.mib().to_string();
    Vec<MemMib>: format_args!(
            "MiB from 1 to {}, one number for all GPUs or one for each", MAX_DEVICE_MEMORY.mib()
        ),
        |text| parts(text, |part| device_memory(part, 1)), |all: &Vec<MemMib>| list(all, MemMib::text);
    Vec<String>: "at most 253 bytes without `|` or control characters",
        |text| parts(text, model_name), |all: &Vec<String>| all.join("|");
}

/// The values between `|`.
pub(crate) fn parts<T, C: FromIterator<T>>(text: &str, read: fn(&str) -> Option<T>) -> Option<C> {
    text.split('|').map(|part| read(part.trim())).collect()
}

/// The text that [`parts`] reads.
pub(crate) fn list<'a, T: 'a>(
    all: impl IntoIterator<Item = &'a T>,
    text: fn(&T) -> String,
) -> String {
    all.into_iter().map(text).collect::<Vec<String>>().join("|")
}

/// A whole number in digits.
pub(crate) fn whole<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

fn signed(text: &str) -> Option<i32> {
    whole::<u64>(text.strip_prefix('-').unwrap_or(text)).and_then(|_| text.parse().ok())
}

fn instance_use(text: &str) -> Option<InstanceUse> {
    match text {
        "whole" => Some(InstanceUse::Whole),
        "shared" => Some(InstanceUse::Shared),
        _ => None,
    }
}

/// Memory of a device in MiB, at least `least`.
pub(crate) fn device_memory(text: &str, least: u64) -> Option<MemMib> {
    let most = MAX_DEVICE_MEMORY.mib();
    whole(text).filter(|mib| (least..=most).contains(mib)).map(MemMib::new)
}

/// The profile of that name.
pub(crate) fn profile(name: &str) -> Option<MigProfile> {
    let is_legal = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".+-_".contains(&byte));
    let fits = (1..=PROFILE_BYTES_MAX).contains(&name.len()) && is_legal;
    fits.then(|| MigProfile::new(name))
}

/// A share in thousandths with up to three decimals, at most 1000.
pub(crate) fn share(text: &str) -> Option<Share> {
    let (milli, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let micro: u64 =
        whole(&format!("{decimals:0<3}")).filter(|_| (1..=3).contains(&decimals.len()))?;
    let millionths = whole::<u64>(milli)?.checked_mul(1000)?.checked_add(micro)?;
    Some(Share::from_millionths(millionths)).filter(|share| *share <= Share::WHOLE)
}

/// The text that [`share`] reads.
pub(crate) fn share_text(share: Share) -> String {
    let (milli, micro) = (share.millionths() / 1000, share.millionths() % 1000);
    match micro {
        0 => milli.to_string(),
        _ => format!("{milli}.{micro:03}").trim_end_matches('0').to_owned(),
    }
}

/// A share in whole thousandths, rounded up.
pub(crate) fn milli_up(share: Share) -> u32 {
    u32::try_from(share.millionths().div_ceil(1000)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_thousandths_with_up_to_three_decimals() {
        for (text, millionths) in
            [("0", 0), ("1", 1000), ("333.33", 333_330), ("0.001", 1), ("1000", 1_000_000)]
        {
            assert_eq!(share(text), Some(Share::from_millionths(millionths)));
            assert_eq!(share_text(Share::from_millionths(millionths)), text);
        }
        for bad in
            ["", ".5", "1.", "1.0001", "1000.001", "-1", "1e2", "0x1", "99999999999999999999"]
        {
            assert_eq!(share(bad), None, "{bad}");
        }
        let [none, some, most] =
            [0, 1, 999_001].map(|millionths| milli_up(Share::from_millionths(millionths)));
        assert_eq!((none, some, most), (0, 1, 1000));
    }
}
