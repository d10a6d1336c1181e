//! The figures of the page: how well the cluster is packed, and which pods wait.

use crate::views::state as state_view;
use crate::views::teams::teams;
use crate::views::viewer::Viewer;
use crate::views::waiting;
use crate::views::waiting::since;
use control::pods::why::kept_reason;
use control::shared::app::App;
use engine::ledger::query::reading::Readiness;
use engine::ledger::suggest::waiting as ledger;
use kube_api::protocol::messages::to_json;
use wire::api::page;
use wire::api::page::{Figures, KeptRoom, Team};
use wire::api::waiting::WaitingPod;

/// Teams, rooms and waiting pods in the list: those with the highest priority, then the oldest.
const NAMED: usize = 100;

/// The waiting pods that a viewer sees.
pub(crate) fn waiting_of(app: &App, viewer: &Viewer) -> Vec<WaitingPod> {
    waiting::refused(app, NAMED, viewer)
}

/// The room that is kept for waiting pods that a viewer sees, in their order.
pub fn kept_rooms_of(app: &App, viewer: &Viewer) -> Vec<KeptRoom> {
    let kept = app.ledger.standing_nodes().into_keys();
    let waiting = kept.filter_map(|uid| Some(app.waiting.pod(&uid)?.waiting));
    let mut waiting: Vec<ledger::WaitingPod> =
        waiting.filter(|pod| viewer.sees(&pod.namespace)).collect();
    waiting.sort_by(|a, b| a.order().cmp(&b.order()));
    let rooms = waiting.iter().filter_map(|pod| {
        let uid = &pod.pod.uid;
        let standing = app.ledger.standing(uid, &pod.query)?;
        Some(KeptRoom {
            pod: pod.pod.to_string(),
            node: standing.node.to_string(),
            reason: kept_reason(app, pod),
            lacks_millionths: standing.lacks,
        })
    });
    rooms.take(NAMED).collect()
}

/// The teams that a viewer sees.
pub(crate) fn teams_of(app: &App, viewer: &Viewer) -> Vec<Team> {
    let mut teams = teams(app, viewer);
    teams.truncate(NAMED);
    teams
}

/// The current figures: O(nodes + waiting pods).
pub(crate) fn figures(app: &App) -> Figures {
    let (readiness, awaited_nodes) = match app.readiness() {
        Readiness::Ready => (page::Readiness::Ready, 0),
        Readiness::NotListed => (page::Readiness::NotListed, 0),
        Readiness::AwaitingReports { nodes } => (page::Readiness::AwaitingReports, nodes),
    };
    let (mut waiting, mut longest) = (0, 0);
    let now = app.api_seconds();
    app.waiting.look_at_each(|state| {
        if state.refused.is_some() {
            waiting += 1;
            longest = since(state.waiting.created_unix_seconds, now).max(longest);
        }
    });
    let packing = app.ledger.packing();
    Figures {
        readiness,
        awaited_nodes,
        packing: state_view::packing(&packing),
        fragmented_share_millionths: packing.fragmented_share().millionths(),
        waiting,
        longest_wait_seconds: longest,
        waiting_pods: waiting_of(app, &Viewer::All),
        kept_rooms: kept_rooms_of(app, &Viewer::All),
        teams: teams_of(app, &Viewer::All),
    }
}

/// The figures as JSON without ages: equal if nothing but time has changed.
pub(crate) fn ageless(figures: &mut Figures) -> Vec<u8> {
    let longest = std::mem::take(&mut figures.longest_wait_seconds);
    let each = figures.waiting_pods.iter_mut().map(|pod| std::mem::take(&mut pod.age_seconds));
    let ages: Vec<u64> = each.collect();
    let text = to_json(figures);
    figures.longest_wait_seconds = longest;
    figures.waiting_pods.iter_mut().zip(ages).for_each(|(pod, age)| pod.age_seconds = age);
    text
}
