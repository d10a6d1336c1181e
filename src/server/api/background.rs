//! Everything that runs beside the answers: the loops of the control core, and figures for people. It
//! ends when `stop` is set.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::history::recall::recalling;
use control::loops;
use control::pods::reasons::{look_again, next_untold, tell};
use control::shared::app::App;

/// Pause between two looks at the pods that wait the longest.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Runs all loops until `stop`.
pub fn run(app: Arc<App>, stop: watch::Receiver<bool>) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let mut stop = stop;
        let mut running = loops::start(&app);
        tokio::select! {
            () = running.failed() => {}
            () = explaining(&app) => {}
            () = async { recalling(&app).await; std::future::pending::<()>().await } => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    })
}

/// Writes events to refused pods why they wait, and keeps the suggestions of the first pods fresh.
async fn explaining(app: &Arc<App>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = app.reasons.refused.notified() => {}
            _ = looks.tick() => rested(app, look_again).await,
        }
        while let Some(uid) = next_untold(app) {
            rested(app, move |app| tell(app, &uid)).await;
        }
    }
}

/// Does work off the threads that answer calls, then rests for as long as it took. So it uses half
/// of one core at most.
async fn rested(app: &Arc<App>, work: impl FnOnce(&App) + Send + 'static) {
    let worker = Arc::clone(app);
    let started = app.clock.precise();
    if tokio::task::spawn_blocking(move || work(&worker)).await.is_err() {
        tracing::error!("a bug in the search for suggestions, please report this");
    }
    tokio::time::sleep(app.clock.precise().saturating_sub(started)).await;
}
