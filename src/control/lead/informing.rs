//! Messages between the leader and its followers.

use std::sync::Arc;
use std::time::Duration;

use futures::future::select;
use hyper::Request;
use serde::Serialize;

use crate::shared::app::App;
use crate::shared::in_flight::{HeldPod, Join, Message};
use crate::shared::leader::Replica;
use crate::shared::log_limit::LogLimit;
use kube_api::write::leader_lease::HeldLease;
use runtime::http_client::address_with;

/// Where a follower takes messages.
const BINDINGS_PATH: &str = "/v1/replicas/bindings";
/// Where a leader takes followers.
const JOIN_PATH: &str = "/v1/replicas/join";

/// Time for a message and its answer: a Binding waits for it.
const ANSWERED_WITHIN: Duration = Duration::from_millis(500);

/// Pause after which a follower gets a message although there is nothing new: holds change.
const AT_LEAST_EVERY: Duration = Duration::from_secs(1);

/// Notes a follower as lost when nothing informs it any more.
struct Informs<'a>(&'a App, &'a str);

impl Drop for Informs<'_> {
    fn drop(&mut self) {
        self.0.binding.in_flight.lost(self.1, self.0.clock.now());
    }
}

static LOGGED: LogLimit = LogLimit::new();

/// Sends messages to a follower until one is not answered.
async fn inform(app: &App, replica: &Replica, term: u64, follower: &str) {
    let _informs = Informs(app, follower);
    while let Some((address, number, bindings)) =
        app.binding.in_flight.news_for(follower, |uid| app.ledger.is_over(uid))
    {
        let secret = replica.secret.clone();
        let to = follower.to_owned();
        let message = Message { term, secret, to, bindings, holds: holds(app) };
        if !post(app, &address, BINDINGS_PATH, &message).await {
            if let Some(left_out) = LOGGED.admits(("follower", "silent"), app.clock.precise()) {
                tracing::warn!(follower, address, left_out, "a follower takes no messages now");
            }
            return;
        }
        app.binding.in_flight.knows(follower, number);
        let news = std::pin::pin!(app.binding.in_flight.news(follower));
        let pause = std::pin::pin!(app.outside.sleep(AT_LEAST_EVERY));
        select(news, pause).await;
    }
}

fn holds(app: &App) -> Vec<HeldPod> {
    let nodes = app.ledger.held_nodes();
    let held = nodes.into_iter().map(|(uid, node)| (uid.to_string(), node.to_string()));
    held.map(|(uid, node)| HeldPod { uid, node }).collect()
}

/// Whether the other replica took a message in.
async fn post(app: &App, address: &str, path: &str, message: &impl Serialize) -> bool {
    let request =
        Request::post(format!("{address}{path}")).header("content-type", "application/json");
    let body = serde_json::to_vec(message).unwrap_or_default();
    let Ok(request) = request.body(body) else { return false };
    let answer = app.outside.call(request, ANSWERED_WITHIN).await;
    answer.is_ok_and(|answer| (200..=299).contains(&answer.status))
}

/// Asks the leader for its messages.
pub(crate) async fn join(app: &App, replica: &Replica, leader: &HeldLease) {
    let join = Join {
        term: leader.term,
        secret: leader.secret.clone(),
        replica: replica.identity.clone(),
        address: replica.address.clone(),
    };
    let address = &leader.address;
    if !post(app, address, JOIN_PATH, &join).await
        && let Some(left_out) = LOGGED.admits(("leader", "unjoined"), app.clock.precise())
    {
        tracing::warn!(
            address,
            left_out,
            "cannot join the leader yet: it fences, or its port cannot be reached from here"
        );
    }
}

/// Takes in a follower; false if it may not join now. A leader that fences is not complete itself.
pub fn take_follower(app: &Arc<App>, join: Join) -> bool {
    let Some(replica) = &app.lead.replica else { return false };
    let term = app.writer.term();
    let is_current = term.writer().is_some_and(|writer| writer.term() == join.term);
    let is_ours = is_current && join.secret == replica.secret && term.is_valid();
    let (scheme, _) = replica.address.split_once(':').unwrap_or_default();
    let is_sound =
        Replica::is_identity(&join.replica) && address_with(scheme, &join.address).is_ok();
    if !is_ours || !is_sound || !app.lead.leading.is_here() || !app.lead.is_fenced() {
        return false;
    }
    if app.binding.in_flight.join(&join.replica, &join.address, app.clock.now()) {
        let (worker, replica, join) = (Arc::clone(app), replica.clone(), join.clone());
        app.outside.spawn(async move {
            inform(&worker, &replica, join.term, &join.replica).await;
        });
    }
    app.binding.in_flight.has_joined(&join.replica)
}

/// Takes in a message of the leader; false if this replica does not follow it.
pub fn take_message(app: &App, message: Message) -> bool {
    let (ledger, now) = (&app.ledger, app.clock.now());
    let is_for_us = app.lead.replica.as_ref().is_some_and(|own| own.identity == message.to);
    is_for_us
        && ledger.is_listed()
        && app.lead.heard.take(
            message,
            &app.pods.lists,
            |uid| ledger.reservation(uid).is_some(),
            now,
        )
}
