//! A pod whose team was at its limit is called again when the team may have more.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::room::standing::{Facts, StandingHolds, Step, TeamCall};
use engine::ledger::suggest::waiting::WaitingState;
use wire::units::Timestamp;

/// A pod whose call does not come within this time is called again; each time after twice as long, up to the
/// second.
const CALLED_WITHIN: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(300);

/// The same of a pod that fits where it counts too much: a change of what its team may have can be missed.
const LONGEST_HERE: Duration = Duration::from_secs(60);

/// Most such pods of a team that are called at a time.
const MOST_HERE: usize = 20;

impl StandingHolds {
    /// Has kube-scheduler call for the pods whose team was at its limit and may have them now: of each team
    /// those that it may have together, the most important and oldest first.
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
            if (state.is_at_team_limit() || state.is_limited_somewhere()) && state.is_answered {
                limited.push(state.clone());
            }
        });
        limited.sort_by(|a, b| a.waiting.order().cmp(&b.waiting.order()));
        self.team_calls.retain(|uid, _| waiting.has(uid));
        let (mut left, mut called) = (BTreeMap::new(), BTreeMap::new());
        for state in limited {
            let (pod, uid) = (&state.waiting, &state.waiting.pod.uid);
            let Some(gpu) = &pod.query.gpu else { continue };
            let now_left = ledger.teams.left(&pod.namespace).unwrap_or(u64::MAX);
            if state.is_limited_somewhere() {
                let called: &mut usize =
                    called.entry(ledger.teams.team_of(&pod.namespace)).or_default();
                if *called < MOST_HERE && self.is_to_call(&state, now_left, now) {
                    *called += 1;
                    step.call_again.push(pod.clone());
                }
                continue;
            }
            let known = self.team_calls.get(uid).filter(|known| known.call == state.called_at);
            if known.is_some_and(|known| now < known.until && known.is_late) {
                continue;
            }
            let team = ledger.teams.team_of(&pod.namespace);
            let left = left.entry(team).or_insert_with(|| ledger.teams.left(&pod.namespace));
            let charge = ledger.teams.charge(gpu).millionths();
            if !ledger.team_may_have(pod) || left.is_some_and(|left| left < charge) {
                continue;
            }
            if known.is_none_or(|known| known.until <= now) {
                // Other filters of kube-scheduler may leave no node, and then no call comes. Such a pod is
                // in the way of none.
                let is_late = known.is_some();
                let pause = known.map_or(CALLED_WITHIN, |known| (2 * known.pause).min(LONGEST));
                let (call, until) = (state.called_at, now.plus(pause));
                let called = TeamCall { call, until, pause, is_late, left: now_left };
                self.team_calls.insert(uid.clone(), called);
                step.call_again.push(pod.clone());
                if is_late {
                    continue;
                }
            }
            *left = left.map(|left| left - charge);
        }
    }

    /// Whether a pod that fits on a node where it counts more than its team may have is to be called again:
    /// when the team may have more than at its last call, and now and then.
    fn is_to_call(&mut self, state: &WaitingState, left: u64, now: Timestamp) -> bool {
        let (call, known) = (state.called_at, self.team_calls.get(&state.waiting.pod.uid));
        let has_more = known.is_some_and(|known| known.left < left);
        let is_noted = known.is_some_and(|known| known.call == call);
        if is_noted && !has_more && known.is_some_and(|known| now < known.until) {
            return false;
        }
        let pause = match known.filter(|_| !has_more) {
            Some(known) if is_noted => (2 * known.pause).min(LONGEST_HERE),
            Some(known) => known.pause,
            None => CALLED_WITHIN,
        };
        let noted = TeamCall { call, until: now.plus(pause), pause, is_late: false, left };
        self.team_calls.insert(state.waiting.pod.uid.clone(), noted);
        is_noted
    }
}

#[cfg(test)]
mod tests;
