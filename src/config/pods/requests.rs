//! Rules for requests: the keys `other_resources`, `min_memory_mib` and `max_limit`.

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_yaml_ng::Value;

use crate::config::values::each;
use crate::hardware::units::{MemMib, Share};
use crate::model::charge::Prices;
use crate::model::workload::{AccessRules, Workloads};

/// Checked rules for requests. The webhook and the extender read them from one configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRules {
    /// Container resources that only look like GPUs: full names, or prefixes that end in `*`.
    pub other_resources: Vec<String>,
    /// Least memory that a part of a GPU can have.
    pub min_memory: MemMib,
    /// Largest limit of a pod, as a share of the GPU.
    pub max_limit: Share,
    /// What requests count against quotas.
    pub prices: Prices,
    /// Whether a waiting pod needs markers of at least what it counts.
    pub needs_markers: bool,
    /// Classes of workloads.
    pub workloads: Workloads,
    /// What pods of each namespace may use.
    pub access: AccessRules,
}

impl Default for RequestRules {
    fn default() -> Self {
        Self {
            other_resources: Vec::new(),
            min_memory: MemMib::new(64),
            max_limit: Share::WHOLE,
            prices: Prices::default(),
            needs_markers: false,
            workloads: Workloads::default(),
            access: AccessRules::default(),
        }
    }
}

impl RequestRules {
    /// Whether the operator says that this container resource is not a GPU.
    pub fn is_other(&self, resource: &str) -> bool {
        self.other_resources.iter().any(|pattern| is_like(pattern, resource))
    }
}

/// Whether `name` equals `pattern`, or begins with the part of `pattern` before a final `*`.
pub fn is_like(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == name, |prefix| name.starts_with(prefix))
}

/// A rule for `other_resources`. The group is required, so that no pattern matches every resource.
pub(crate) fn resources(names: &[String], (): &()) -> garde::Result {
    let is_legal = |text: &str| {
        let name = text.strip_suffix('*').unwrap_or(text);
        let group = name.split_once('/').map_or("", |(group, _)| group);
        !group.is_empty() && !name.contains('*') && !name.contains(char::is_whitespace)
    };
    let allowed = "a list of resource names with their group, such as `nvidia.com/hostdev`, or of \
                   prefixes such as `nvidia.com/hostdev*`";
    each(is_legal, allowed)(names, &())
}

/// A share above zero.
pub(crate) fn share<'de, D: Deserializer<'de>>(from: D) -> Result<Share, D::Error> {
    let text = match Value::deserialize(from)? {
        Value::Number(number) => number.to_string(),
        other => other.as_str().unwrap_or_default().to_owned(),
    };
    let share = decimal(&text).filter(|it| (Share::from_millionths(1)..=Share::WHOLE).contains(it));
    share.ok_or_else(|| {
        D::Error::custom(
            "it must be a share of a GPU above 0 and up to 1 with at most 5 decimals, such as `0.5`",
        )
    })
}

/// The exact share of a decimal with at most five decimals.
pub(crate) fn decimal(text: &str) -> Option<Share> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if decimals.len() > 5 || whole.is_empty() || !is_digits(whole) || !is_digits(decimals) {
        return None;
    }
    let millionths: u64 = format!("{decimals:0<6}").parse().ok()?;
    let whole: u64 = whole.parse().ok()?;
    Some(Share::from_millionths(whole.checked_mul(1_000_000)?.checked_add(millionths)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;

    fn read(text: &str) -> Result<RequestRules, String> {
        Config::from_yaml(text)
            .map(|config| config.request_rules())
            .map_err(|faults| faults.to_string())
    }

    #[test]
    fn every_key_is_read() {
        let text = "other_resources: [nvidia.com/hostdev, 'nvidia.com/rdma*']\nmin_memory_mib: 1\n\
            max_limit: 0.25";
        let rules = read(text).unwrap();
        let expected = RequestRules {
            other_resources: vec!["nvidia.com/hostdev".to_owned(), "nvidia.com/rdma*".to_owned()],
            min_memory: MemMib::new(1),
            max_limit: Share::from_millionths(250_000),
            ..RequestRules::default()
        };
        assert_eq!(rules, expected);
        for (resource, is_other) in [
            ("nvidia.com/hostdev", true),
            ("nvidia.com/hostdevs", false),
            ("nvidia.com/rdma_a", true),
            ("nvidia.com/gpumem", false),
        ] {
            assert_eq!(rules.is_other(resource), is_other, "{resource}");
        }
        for (text, millionths) in [("1", 1_000_000), ("1.0", 1_000_000), ("'0.00001'", 10)] {
            let rules = read(&format!("max_limit: {text}")).unwrap();
            assert_eq!(rules.max_limit.millionths(), millionths, "{text}");
        }
    }

    #[test]
    fn rules_that_match_everything_or_are_out_of_range_are_rejected() {
        for bad in ["'*'", "hostdev", "'/a'", "'nvidia.com/*a'", "nvidia.com/a b", "7"] {
            let fault = read(&format!("other_resources: [{bad}]")).unwrap_err();
            assert!(fault.contains("`other_resources:"), "{fault}");
        }
        for bad in ["0", "1.1", "-0.5", "0.123456", ".nan", "half", "[1]"] {
            let fault = read(&format!("max_limit: {bad}")).unwrap_err();
            assert!(fault.contains("`max_limit:"), "{bad}: {fault}");
        }
        assert!(read("min_memory_mib: 0").unwrap_err().contains("1 to 65536"));
    }
}
