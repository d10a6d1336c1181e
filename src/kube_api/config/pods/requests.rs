//! Rules for requests: the keys `other_resources`, `min_memory_mib`, `max_limit`, `fraction_of_mib`
//! and `memory_by_instance`.

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_yaml_ng::Value;

use crate::config::values::{NoContext, each};
use engine::model::charge::Prices;
use engine::model::request::{Amount, GpuRequest, Limit};
use engine::model::workload::{AccessRules, Workloads};
use wire::units::{MemMib, Share};

/// Checked rules for requests. The webhook and the extender read them from one configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRules {
    /// Container resources that only look like GPUs: full names, or prefixes that end in `*`.
    pub other_resources: Vec<String>,
    /// Least memory that a part of a GPU can have.
    pub min_memory: MemMib,
    /// Largest limit of a pod, as a share of the GPU.
    pub max_limit: Share,
    /// Of how much memory a fraction is meant; `None`: of that of the GPU that the pod gets.
    pub fraction_of: Option<MemMib>,
    /// Whether a whole MIG instance may serve an amount of memory.
    pub by_instance: bool,
    /// What requests count against quotas.
    pub prices: Prices,
    /// Whether a waiting pod needs markers of at least what it counts.
    pub needs_markers: bool,
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
            fraction_of: None,
            by_instance: false,
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

    /// What a pod's own request means here.
    ///
    /// With `fraction_of_mib` a fraction below 1 is that part of so much memory, rounded down to whole MiB,
    /// on each GPU; and so is the limit of one. A whole GPU stays one. With `memory_by_instance` one amount of
    /// memory may be a whole MIG instance.
    pub fn meant(&self, request: &GpuRequest) -> GpuRequest {
        let mut meant = request.clone();
        if let (Some(of), Amount::Fraction(share)) = (self.fraction_of, &request.amount) {
            meant.amount = Amount::Memory(share.of(of));
            meant.limit = request.limit.map(|limit| match limit {
                Limit::Fraction(limit) if limit < Share::WHOLE => Limit::Memory(limit.of(of)),
                other => other,
            });
        }
        let is_amount = matches!(meant.amount, Amount::Memory(_)) && meant.count.get() == 1;
        meant.by_instance = self.by_instance && is_amount;
        meant
    }
}

/// Whether `name` equals `pattern`, or begins with the part of `pattern` before a final `*`.
pub fn is_like(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == name, |prefix| name.starts_with(prefix))
}

/// A rule for `other_resources`. The group is required, so that no pattern matches every resource.
pub(crate) fn resources(names: &[String], _: &NoContext) -> garde::Result {
    let allowed = "a list of resource names with their group, such as `nvidia.com/hostdev`, or of \
                   prefixes such as `nvidia.com/hostdev*`";
    each(is_pattern, allowed)(names, &())
}

/// Whether a text is the name of a resource with its group, or a prefix of some that ends in `*`.
fn is_pattern(text: &str) -> bool {
    let name = text.strip_suffix('*').unwrap_or(text);
    let group = name.split_once('/').map_or("", |(group, _)| group);
    !group.is_empty() && !name.contains('*') && !name.contains(char::is_whitespace)
}

/// A share above zero.
pub(crate) fn share<'de, D: Deserializer<'de>>(from: D) -> Result<Share, D::Error> {
    let text = match Value::deserialize(from)? {
        Value::Number(number) => number.to_string(),
        other => other.as_str().unwrap_or_default().to_owned(),
    };
    let share =
        decimal(&text).filter(|share| (Share::from_millionths(1)..=Share::WHOLE).contains(share));
    share.ok_or_else(|| {
        D::Error::custom(
            "it must be a share of a GPU above 0 and up to 1 with at most 5 decimals, such as `0.5`",
        )
    })
}

/// The exact share of a decimal with at most five decimals.
pub(crate) fn decimal(text: &str) -> Option<Share> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let has_digits = whole.bytes().chain(decimals.bytes()).all(|byte| byte.is_ascii_digit());
    if decimals.len() > 5 || whole.is_empty() || !has_digits {
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
            max_limit: 0.25\nfraction_of_mib: 81920\n\
            memory_by_instance: true";
        let rules = read(text).unwrap();
        let expected = RequestRules {
            other_resources: vec!["nvidia.com/hostdev".to_owned(), "nvidia.com/rdma*".to_owned()],
            min_memory: MemMib::new(1),
            max_limit: Share::from_millionths(250_000),
            fraction_of: Some(MemMib::new(81_920)),
            by_instance: true,
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
        assert!(read("fraction_of_mib: 1023").unwrap_err().contains("1024 to 16777216"));
        assert!(read("fraction_of_mib: none").unwrap_err().contains("1024 to 16777216"));
    }

    #[test]
    fn a_fraction_can_mean_the_same_amount_on_each_gpu() {
        let share = Share::from_millionths;
        let memory = |mib| Amount::Memory(MemMib::new(mib));
        let limited = |amount, limit| GpuRequest { limit: Some(limit), ..GpuRequest::one(amount) };
        let rules = read("fraction_of_mib: 81919").unwrap();
        let third = Amount::Fraction(share(333_330));
        for (written, meant) in [
            (GpuRequest::one(third.clone()), GpuRequest::one(memory(27_306))), // 27,306.06
            (
                limited(third.clone(), Limit::Fraction(share(500_000))),
                limited(memory(27_306), Limit::Memory(MemMib::new(40_959))),
            ),
            (
                limited(third.clone(), Limit::Fraction(Share::WHOLE)),
                limited(memory(27_306), Limit::Fraction(Share::WHOLE)),
            ),
        ] {
            assert_eq!(rules.meant(&written), meant);
            assert_eq!(rules.meant(&meant), meant, "twice is the same");
            assert_eq!(RequestRules::default().meant(&written), written);
        }
        let both = Amount::FractionAndMemory(share(333_330), MemMib::new(9));
        for other in [Amount::Whole, memory(9), both, Amount::SharedSlot] {
            let other = GpuRequest::one(other);
            assert_eq!(rules.meant(&other), other);
        }
    }

    #[test]
    fn a_whole_instance_may_serve_one_amount_of_memory() {
        let rules = read("fraction_of_mib: 2048\nmemory_by_instance: true").unwrap();
        let memory = Amount::Memory(MemMib::new(1_024));
        let half = Amount::Fraction(Share::from_millionths(500_000));
        let two = GpuRequest::several(memory.clone(), 2.try_into().unwrap());
        for (written, by_instance) in [
            (GpuRequest::one(memory.clone()), true),
            (GpuRequest::one(half), true),
            (GpuRequest::one(Amount::Whole), false),
            (two, false),
        ] {
            assert_eq!(rules.meant(&written).by_instance, by_instance, "{written:?}");
            assert!(!RequestRules::default().meant(&written).by_instance);
        }
    }
}
