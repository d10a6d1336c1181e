//! The policies that pods and operators may name.

use std::fmt;
use std::str::FromStr;

/// How to choose among the placements of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Policy {
    /// Fill the fullest GPU that still fits.
    BinPack,
    /// Prefer the emptiest GPU and node.
    Spread,
    /// Keep the free room usable for the typical requests (FGD).
    #[default]
    Fragmentation,
}

impl Policy {
    /// All policies that pods and operators may name, in the order of their documentation.
    pub const ALL: [Self; 3] = [Self::BinPack, Self::Spread, Self::Fragmentation];

    /// The name in annotations, configuration and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::BinPack => "binpack",
            Self::Spread => "spread",
            Self::Fragmentation => "fragmentation",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A policy name that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy `{name}` is unknown: use `binpack`, `spread` or `fragmentation`")]
pub struct UnknownPolicy {
    /// The offending name.
    pub name: String,
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownPolicy { name: name.to_owned() })
    }
}
