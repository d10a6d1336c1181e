//! The shipped core in steps, for tests that set the time themselves.

use control::shared::app::App;
use runtime::step::outside::{Action, ApiAnswer, StepEvent};
use serde_json::Value;
use wire::units::Timestamp;

/// Carries out what the core wants at a time, until it wants nothing more; `answer` is the API server.
pub(crate) fn carry_out(
    app: &App,
    now: Timestamp,
    answer: impl FnMut(&hyper::Request<Vec<u8>>) -> (u16, Value),
) {
    carry_out_at(app, now, None, answer);
}

/// The same; the API server says that it is so late, in seconds since 1970.
pub(crate) fn carry_out_at(
    app: &App,
    now: Timestamp,
    date: Option<u64>,
    mut answer: impl FnMut(&hyper::Request<Vec<u8>>) -> (u16, Value),
) {
    let mut actions = app.outside.step(StepEvent::Changed, now);
    while let Some(action) = actions.pop() {
        let event = match action {
            Action::Work(work) => {
                work();
                StepEvent::Changed
            }
            Action::Call { id, request, .. } => {
                let (status, body) = answer(&request);
                let body = Some(body.to_string().into_bytes());
                StepEvent::Answered { id, answer: Ok(ApiAnswer { status, body, date }) }
            }
        };
        actions.extend(app.outside.step(event, now));
    }
}
