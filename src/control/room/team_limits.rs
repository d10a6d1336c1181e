//! A pod whose team was at its limit is called again when the team may have more.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::control::room::standing::{Facts, StandingHolds, Step};
use crate::hardware::units::Timestamp;
use crate::ledger::suggest::waiting::WaitingState;

/// A pod whose call does not come within this time is called again.
const CALLED_WITHIN: Duration = Duration::from_secs(10);

impl StandingHolds {
    /// Has kube-scheduler call for the pods whose team was at its limit and is not any more: of each team
    /// the first ones that it may have together.
    pub(crate) fn call_teams(
        &mut self,
        (waiting, _, ledger, _): Facts<'_>,
        now: Timestamp,
        step: &mut Step,
    ) {
        if ledger.teams.rules().is_none() {
            return;
        }
        let mut limited: Vec<WaitingState> = Vec::new();
        waiting.look_at_each(|state| {
            if state.is_at_team_limit() && state.is_answered {
                limited.push(state.clone());
            }
        });
        limited.sort_by(|a, b| a.waiting.order().cmp(&b.waiting.order()));
        self.team_calls.retain(|uid, _| waiting.has(uid));
        let mut left = BTreeMap::new();
        for state in limited {
            let (pod, uid) = (&state.waiting, &state.waiting.pod.uid);
            let Some(gpu) = &pod.query.gpu else { continue };
            let team = ledger.teams.team_of(&pod.namespace);
            let left = left.entry(team).or_insert_with(|| ledger.teams.left(&pod.namespace));
            let charge = ledger.teams.charge(gpu).millionths();
            let Some(rest) = left.map_or(Some(u64::MAX), |left| left.checked_sub(charge)) else {
                *left = Some(0); // smaller pods behind it do not pass it
                continue;
            };
            *left = left.map(|_| rest);
            let called = self.team_calls.get(uid);
            let is_called = called.is_some_and(|(call, since)| {
                *call == state.called_at && now.since(*since) < CALLED_WITHIN
            });
            if !is_called {
                self.team_calls.insert(uid.clone(), (state.called_at, now));
                step.call_again.push(pod.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests;
