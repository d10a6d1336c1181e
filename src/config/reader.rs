//! Reads values of the configuration and collects their faults.

use serde_yaml_ng::Mapping;
use serde_yaml_ng::Value;
use std::time::Duration;

/// Takes values out of the document and collects their faults.
pub(crate) struct Reader {
    pub(crate) mapping: Mapping,
    /// Prefix of its keys in messages.
    pub(crate) section: String,
    pub(crate) faults: Vec<String>,
}

impl Reader {
    /// Reads a section; keys that it does not have get their defaults.
    pub(crate) fn section<T>(
        &mut self,
        section: &'static str,
        keys: &[&str],
        read: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let name = section.trim_end_matches('.');
        let mapping = match self.take(name) {
            None => Mapping::new(),
            Some(Value::Mapping(mapping)) => mapping,
            Some(value) => {
                self.fault(name, &value, "a mapping of keys to values");
                Mapping::new()
            }
        };
        let mut reader = Self { mapping, section: section.to_owned(), faults: Vec::new() };
        let values = read(&mut reader);
        reader.unknown_keys(keys);
        self.faults.append(&mut reader.faults);
        values
    }

    pub(crate) fn unknown_keys(&mut self, known: &[&str]) {
        for key in self.mapping.keys() {
            let key = key.as_str().map_or_else(|| format!("{key:?}"), str::to_owned);
            let (section, known) = (&self.section, known.join(", "));
            self.faults.push(format!("key `{section}{key}` is unknown: known are {known}"));
        }
    }

    pub(crate) fn take(&mut self, key: &str) -> Option<Value> {
        self.mapping.remove(key).filter(|value| !value.is_null())
    }

    pub(crate) fn fault(&mut self, key: &str, value: &Value, allowed: &str) {
        let shown = serde_yaml_ng::to_string(value).unwrap_or_default();
        let shown = shown.trim().replace('\n', " ");
        let section = &self.section;
        self.faults.push(format!("`{section}{key}: {shown}` is not allowed: it must be {allowed}"));
    }

    pub(crate) fn text(&mut self, key: &str) -> Option<String> {
        let value = self.take(key)?;
        match value.as_str() {
            Some(text) if !text.trim().is_empty() => Some(text.to_owned()),
            _ => {
                self.fault(key, &value, "a text that is not empty");
                None
            }
        }
    }

    pub(crate) fn parsed<T: std::str::FromStr>(
        &mut self,
        key: &str,
        allowed: &str,
        default: T,
    ) -> T {
        let Some(value) = self.take(key) else { return default };
        match value.as_str().and_then(|text| text.parse().ok()) {
            Some(parsed) => parsed,
            None => {
                self.fault(key, &value, allowed);
                default
            }
        }
    }

    pub(crate) fn number(
        &mut self,
        key: &str,
        range: std::ops::RangeInclusive<u64>,
        default: u64,
    ) -> u64 {
        self.number_or_none(key, range).unwrap_or(default)
    }

    pub(crate) fn number_or_none(
        &mut self,
        key: &str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Option<u64> {
        let value = self.take(key)?;
        let number = value.as_u64().filter(|number| range.contains(number));
        if number.is_none() {
            let allowed = format!("a whole number from {} to {}", range.start(), range.end());
            self.fault(key, &value, &allowed);
        }
        number
    }

    pub(crate) fn seconds(
        &mut self,
        key: &str,
        range: std::ops::RangeInclusive<u64>,
        default: Duration,
    ) -> Duration {
        Duration::from_secs(self.number(key, range, default.as_secs()))
    }

    pub(crate) fn names(&mut self, key: &str, default: Vec<String>) -> Vec<String> {
        let Some(value) = self.take(key) else { return default };
        let names: Option<Vec<String>> = value
            .as_sequence()
            .and_then(|items| items.iter().map(|item| item.as_str().map(str::to_owned)).collect());
        match names {
            Some(names) if !names.is_empty() && names.iter().all(|name| !name.is_empty()) => names,
            _ => {
                self.fault(key, &value, "a list of at least one name");
                default
            }
        }
    }

    /// The value for one of several words.
    pub(crate) fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T)], default: T) -> T {
        let Some(value) = self.take(key) else { return default };
        let found = words.iter().find(|(word, _)| value.as_str() == Some(word));
        if found.is_none() {
            let names: Vec<String> = words.iter().map(|(word, _)| format!("`{word}`")).collect();
            let (last, first) = names.split_last().expect("a key has words to choose from");
            self.fault(key, &value, &format!("{} or {last}", first.join(", ")));
        }
        found.map_or(default, |(_, meaning)| *meaning)
    }

    /// The value for `false` or `true`.
    pub(crate) fn switch<T: Copy>(&mut self, key: &str, meanings: [T; 2], default: T) -> T {
        let Some(value) = self.take(key) else { return default };
        let [off, on] = meanings;
        match value.as_bool() {
            Some(true) => on,
            Some(false) => off,
            None => {
                self.fault(key, &value, "`true` or `false`");
                default
            }
        }
    }
}
