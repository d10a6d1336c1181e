//! How values of the configuration are read: numbers in a range with a unit, and rules for texts.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use rustls::pki_types::ServerName;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use runtime::process::logging;
use wire::units::MemMib;

/// A whole number from `LEAST` to `MOST`.
pub(crate) fn number<'de, const LEAST: u64, const MOST: u64, T, D>(from: D) -> Result<T, D::Error>
where
    T: TryFrom<u64>,
    D: Deserializer<'de>,
{
    let number = u64::deserialize(from).ok().filter(|number| (LEAST..=MOST).contains(number));
    number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
        D::Error::custom(format_args!("it must be a whole number from {LEAST} to {MOST}"))
    })
}

/// The same in seconds.
pub(crate) fn seconds<'de, const LEAST: u64, const MOST: u64, D: Deserializer<'de>>(
    from: D,
) -> Result<Duration, D::Error> {
    number::<LEAST, MOST, _, D>(from).map(Duration::from_secs)
}

/// The same in MiB.
pub(crate) fn mib<'de, const LEAST: u64, const MOST: u64, D: Deserializer<'de>>(
    from: D,
) -> Result<MemMib, D::Error> {
    number::<LEAST, MOST, _, D>(from).map(MemMib::new)
}

/// The same for a key without a default.
pub(crate) fn some_mib<'de, const LEAST: u64, const MOST: u64, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<MemMib>, D::Error> {
    mib::<LEAST, MOST, D>(from).map(Some)
}

/// What a type reads from a text; its error says what is allowed.
pub(crate) fn parsed<'de, T, D>(from: D) -> Result<T, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    String::deserialize(from)?.parse().map_err(D::Error::custom)
}

/// The address of a listener.
pub(crate) fn address<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
    let address = String::deserialize(from).ok().and_then(|text| text.parse().ok());
    address.ok_or_else(|| D::Error::custom("it must be an address such as `0.0.0.0:8080`"))
}

/// What a rule gets besides the value.
pub(crate) type NoContext = ();

/// A rule for a list of texts, each of which is `legal`; `allowed` says what the list must be.
pub(crate) fn each(
    legal: impl Fn(&str) -> bool,
    allowed: &str,
) -> impl FnOnce(&[String], &()) -> garde::Result {
    move |texts, ()| match texts.iter().all(|text| legal(text)) {
        true => Ok(()),
        false => Err(garde::Error::new(format!("it must be {allowed}"))),
    }
}

/// A rule for a list of names.
pub(crate) fn names(names: &[String], _: &NoContext) -> garde::Result {
    match names.is_empty() || !names.iter().all(|name| is_plain(name)) {
        true => Err(garde::Error::new("it must be a list of at least one name, without spaces")),
        false => Ok(()),
    }
}

/// Whether a text can be a name in a certificate. No certificate fits one with a dot at its end.
pub(crate) fn is_dns_name(text: &str) -> bool {
    !text.ends_with('.') && matches!(ServerName::try_from(text), Ok(ServerName::DnsName(_)))
}

/// Whether the group of a key is Kubernetes' own, or one below it.
pub fn is_key_of_kubernetes(key: &str) -> bool {
    let group = key.split_once('/').map_or("", |(group, _)| group);
    group.strip_suffix("kubernetes.io").is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Whether a text is a name without spaces, such as those of schedulers and the keys of labels.
pub(crate) fn is_plain(text: &str) -> bool {
    (1..=253).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-._/".contains(c))
}

/// A rule for the key of a label.
pub(crate) fn label(text: &str, _: &NoContext) -> garde::Result {
    match is_plain(text) {
        true => Ok(()),
        false => Err(garde::Error::new("it must be the key of a label")),
    }
}

/// A rule for the name of an object.
pub(crate) fn plain_name(text: &str, _: &NoContext) -> garde::Result {
    match is_plain(text) && !text.contains('/') {
        true => Ok(()),
        false => {
            Err(garde::Error::new("it must be a name: lower-case letters, digits, `-` and `.`"))
        }
    }
}

/// A rule for a log level, or a filter.
pub(crate) fn log_filter(text: &str, _: &NoContext) -> garde::Result {
    logging::check(text).map_err(garde::Error::new)
}

/// A rule for a text or a path.
pub(crate) fn filled(text: &impl AsRef<Path>, _: &NoContext) -> garde::Result {
    match text.as_ref().to_string_lossy().trim().is_empty() {
        true => Err(garde::Error::new("it must be a text that is not empty")),
        false => Ok(()),
    }
}
