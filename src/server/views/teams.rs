//! `GET /v1/teams`: what each team has of the GPUs, and what it may have.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::views::viewer::Viewer;
use control::shared::app::App;
use wire::api::page::{Team, TeamList};
use wire::units::Share;

/// The teams of which a viewer sees a namespace, by name. None if the configuration says nothing of
/// teams.
pub(crate) fn teams(app: &App, viewer: &Viewer) -> Vec<Team> {
    if app.ledger.teams.rules().is_none() {
        return Vec::new();
    }
    let mut waiting: BTreeMap<Arc<str>, usize> = BTreeMap::new();
    app.waiting.look_at_each(|state| {
        if state.refused.is_some() {
            *waiting.entry(state.waiting.namespace.as_str().into()).or_default() += 1;
        }
    });
    let all = app.ledger.teams.all(waiting.keys().cloned()).into_iter();
    let seen = all.filter(|team| {
        *viewer == Viewer::All || team.namespaces.iter().any(|namespace| viewer.sees(namespace))
    });
    seen.map(|team| Team {
        guaranteed_millionths: team.share.guaranteed.millionths(),
        at_most_millionths: team.share.at_most.map(Share::millionths),
        used_millionths: team.used.millionths(),
        over_quota_millionths: team.over_quota.millionths(),
        pods: team.pods,
        waiting: team.namespaces.iter().filter_map(|namespace| waiting.get(namespace)).sum(),
        team: team.name.to_string(),
    })
    .collect()
}

/// The same as a list.
pub fn list(app: &App, viewer: &Viewer) -> TeamList {
    TeamList { items: teams(app, viewer), ..TeamList::default() }
}
