//! `GET /v1/events`: changes as server-sent events, which the page shows as they come.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use tokio::sync::mpsc;

use crate::http::exchange::PeerAddress;
use crate::http::respond::{ReadQuery, refusal};
use crate::page::live::{LOOK_EVERY, News};
use crate::page::service::Service;
use crate::views::viewer::Viewer;
use wire::api::error::Error;
use wire::api::page::{EventsQuery, SummaryDelta};

/// After this time without a message a comment is sent, because proxies close silent connections.
const COMMENT_EVERY: Duration = Duration::from_secs(15);

/// A browser that takes nothing for this time is dropped. It reconnects for the newest content.
const STALLED: Duration = Duration::from_secs(30);

/// Shortest time after which a browser reconnects. Up to twice that, so that not all come at once.
const RETRY: Duration = Duration::from_secs(2);

/// After this time a browser must ask again: what its user may see can have changed.
const LONGEST_STREAM: Duration = Duration::from_secs(300);

/// How soon it does.
const NEXT_STREAM: Duration = Duration::from_millis(100);

/// Server-sent events: what is newer than a snapshot, at most four times a second.
///
/// Each `delta` has the name of the snapshot to which it leads as its `id`. `reload` says that the
/// snapshot is of another process: read `/v1/summary` again.
#[utoipa::path(get, path = "/v1/events", operation_id = "listenToEvents", tag = "page", params(
    EventsQuery,
    ("Last-Event-ID" = Option<String>, Header, description = "As `after`, before which it counts; browsers send it."),
), responses(
    (status = 200, description = "A stream; the data of a `delta` is a `SummaryDelta`.",
        body = SummaryDelta<'static>, content_type = "text/event-stream"),
    (status = 503, description = "The service stops.", body = Error),
))]
pub(crate) async fn events(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
    from: Option<Extension<PeerAddress>>,
    ReadQuery(query): ReadQuery<EventsQuery>,
    headers: HeaderMap,
) -> Response {
    let nowhere = Ipv4Addr::UNSPECIFIED.into(); // over no connection
    let from = from.map_or(nowhere, |Extension(PeerAddress(from))| from);
    let Some(place) = service.live.listen(from) else {
        let error = "the service stops: read /v1/summary now and then";
        let refused = refusal(StatusCode::SERVICE_UNAVAILABLE, error);
        return ([(header::RETRY_AFTER, "30")], refused).into_response();
    };
    let resumed = headers.get("last-event-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let after = resumed.or(query.after).unwrap_or_default();
    let (sender, receiver) = mpsc::channel(1);
    let feed = feed(service, viewer, after, sender);
    tokio::spawn(async move { place.unless_closed(feed).await });
    let events = futures::stream::unfold(receiver, |mut receiver| async {
        Some((Ok::<Event, Infallible>(receiver.recv().await?), receiver))
    });
    let alive = KeepAlive::new().interval(COMMENT_EVERY);
    let unbuffered: [(HeaderName, &str); 1] =
        [(HeaderName::from_static("x-accel-buffering"), "no")];
    (unbuffered, Sse::new(events).keep_alive(alive)).into_response()
}

/// Makes each message only after the browser has taken the one before.
async fn feed(service: Service, viewer: Viewer, mut after: String, sender: mpsc::Sender<Event>) {
    let Service { app, live, .. } = service;
    let began = app.clock.now();
    let (mut news, mut closing) = (live.news(), live.closing());
    let jitter = Duration::from_millis(u64::from(app.clock.precise().subsec_micros()) % 2_000);
    if sender.send(Event::default().retry(RETRY + jitter).comment("gpupack")).await.is_err() {
        return;
    }
    loop {
        let Ok(Ok(room)) = tokio::time::timeout(STALLED, sender.reserve()).await else {
            tracing::debug!("a browser has gone, or took nothing for long");
            return;
        };
        news.borrow_and_update();
        if app.clock.now().since(began) > LONGEST_STREAM {
            return room.send(Event::default().retry(NEXT_STREAM).comment("ask again"));
        }
        let (worker, page, from) = (Arc::clone(&app), Arc::clone(&live), after.clone());
        let viewer = viewer.clone();
        let found = tokio::task::spawn_blocking(move || page.since(&worker, &from, &viewer));
        match found.await {
            Ok(News::Nothing) => drop(room),
            Ok(News::Delta(delta, at)) => {
                let event = Event::default().event("delta").id(&at);
                room.send(event.data(String::from_utf8_lossy(&delta)));
                after = at;
            }
            Ok(News::Reload) => return room.send(Event::default().event("reload").data("{}")),
            Err(_) => return,
        }
        tokio::time::sleep(LOOK_EVERY).await;
        tokio::select! {
            _ = news.changed() => {}
            _ = closing.wait_for(|is_closed| *is_closed) => return,
            () = sender.closed() => return,
        }
    }
}
