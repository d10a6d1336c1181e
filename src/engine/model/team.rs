//! What teams may have of the GPUs: how much is guaranteed to each, and how much it may have at most.
//!
//! A pod counts as its [charge](crate::model::charge), which depends on its request alone. So it is
//! known before the pod has a place, and equals what the pod counts against quotas.

use std::collections::BTreeMap;

use wire::units::Share;

/// What one team may have, in GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TeamShare {
    /// It gets this back from over-quota pods of other teams.
    pub guaranteed: Share,
    /// It gets no more than this; `None`: as much as there is.
    pub at_most: Option<Share>,
}

/// What all teams may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TeamRules {
    /// The label of namespaces whose value is the team; empty: each namespace is a team.
    pub label: String,
    /// The teams that are named.
    pub teams: BTreeMap<String, TeamShare>,
    /// Each other team.
    pub others: TeamShare,
}

impl TeamRules {
    /// What a team may have.
    pub fn of(&self, team: &str) -> TeamShare {
        self.teams.get(team).copied().unwrap_or(self.others)
    }

    /// What is guaranteed to the named teams in sum.
    pub fn guaranteed(&self) -> Share {
        let shares = self.teams.values().map(|team| team.guaranteed.millionths());
        Share::from_millionths(shares.fold(0, u64::saturating_add))
    }
}
