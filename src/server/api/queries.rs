//! Queries of the page and the command line. They change nothing, and slow ones wait for a permit.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use serde::Serialize;
use tokio::sync::Semaphore;

use crate::http::respond::{ReadQuery, encoded, json, refusal};
use crate::page::routes;
use crate::page::service::{Service, look, look_with_permit, permit_of, too_long};
use crate::views::explain::explain_named;
use crate::views::viewer::Viewer;
use crate::views::{advice, state as state_view, teams as team_views, waiting};
use control::pods::proposals;
use control::shared::app::App;
use kube_api::pod::seen_pod::{LONGEST_NAME, LONGEST_NAMESPACE};
use wire::api::advice::{Advice, AdviseQuery};
use wire::api::error::Error;
use wire::api::explain::{ExplainQuery, Explanation};
use wire::api::moves::MoveProposals;
use wire::api::page::TeamList;
use wire::api::state::{State as LedgerState, StateQuery};
use wire::api::waiting::{WaitingPodList, WaitingQuery};

/// Routes of the queries by the page and the command line. They change nothing.
pub(crate) fn routes() -> Router<Service> {
    Router::new()
        .route("/v1/state", get(state))
        .route("/v1/explain", get(explain))
        .route("/v1/waiting", get(waiting_pods))
        .route("/v1/teams", get(teams))
        .route("/v1/moves", get(moves))
        .route("/v1/advise", get(advise))
        .merge(routes::routes())
}

/// The ledger: all nodes and pods, or one node with its pods.
#[utoipa::path(get, path = "/v1/state", operation_id = "getState", tag = "people", params(StateQuery), responses(
    (status = 200, description = "The ledger. For 5,000 nodes about 40 MB.", body = LedgerState),
    (status = 400, description = "The query cannot be read.", body = Error),
    (status = 404, description = "No node has this name.", body = Error),
))]
pub(crate) async fn state(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
    ReadQuery(query): ReadQuery<StateQuery>,
) -> Response {
    let Some(name) = query.node else {
        let turn = match permit_of(&WHOLE).await {
            Ok(permit) => permit,
            Err(refused) => return refused,
        };
        let found = look(&service.app, move |app| {
            let _turn = turn;
            state_view::state(app, &viewer)
        });
        return found.await.map_or_else(|refused| refused, |found| json(StatusCode::OK, found));
    };
    if name.len() > LONGEST_NAME {
        return too_long("node", LONGEST_NAME);
    }
    match state_view::state_of(&service.app, &name, &viewer) {
        Some(state) => encoded(&state),
        None => refusal(StatusCode::NOT_FOUND, &format!("node `{name}` is not known here")),
    }
}

/// Allows one caller at a time to write the whole ledger as JSON: it takes tens of megabytes.
static WHOLE: Semaphore = Semaphore::const_new(1);

/// The same for Prometheus, which must not wait behind queries by people.
static SCRAPES: Semaphore = Semaphore::const_new(2);

/// Runs `look` for a scrape, under its own permits.
pub(crate) async fn scrape(
    app: &Arc<App>,
    look: impl FnOnce(&App) -> Vec<u8> + Send + 'static,
) -> Result<Vec<u8>, Response> {
    look_with_permit(&SCRAPES, app, look).await
}

/// Answers with what `view` shows of the app.
async fn seen<T: Serialize + Send + 'static>(
    app: &Arc<App>,
    view: impl FnOnce(&App) -> T + Send + 'static,
) -> Response {
    look(app, view).await.map_or_else(|refused| refused, |found| encoded(&found))
}

/// What each team has of the GPUs, and what it may have. Empty unless the configuration gives shares to
/// teams.
#[utoipa::path(get, path = "/v1/teams", operation_id = "listTeams", tag = "people", responses(
    (status = 200, description = "The teams of which the caller sees a namespace.", body = TeamList),
))]
pub(crate) async fn teams(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
) -> Response {
    seen(&service.app, move |app| team_views::list(app, &viewer)).await
}

/// Moves of running pods that would make room for waiting pods, or empty a GPU while none waits.
///
/// gpupack moves nothing itself.
#[utoipa::path(get, path = "/v1/moves", operation_id = "listMoves", tag = "people", responses(
    (status = 200, description = "The proposals.", body = MoveProposals),
))]
pub(crate) async fn moves(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
) -> Response {
    seen(&service.app, move |app| {
        let mut found = proposals::proposals(app, &|namespace| viewer.sees(namespace));
        viewer.hide_proposals(&mut found);
        found
    })
    .await
}

/// Which pods hold GPUs without need, what request would have been enough, and how finely each pool
/// could be shared.
#[utoipa::path(get, path = "/v1/advise", tag = "people", params(AdviseQuery), responses(
    (status = 200, description = "The advice.", body = Advice),
    (status = 400, description = "The query cannot be read.", body = Error),
))]
pub(crate) async fn advise(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
    ReadQuery(query): ReadQuery<AdviseQuery>,
) -> Response {
    if is_long(query.namespace.as_deref()) {
        return too_long("namespace", LONGEST_NAMESPACE);
    }
    seen(&service.app, move |app| advice::advise(app, &query, &viewer)).await
}

/// The pods that wait: those with a refused request first, then by priority and age, those with
/// scheduling gates last.
///
/// For the first 20 different requests the suggestion is at most 5 s old. Later ones have the one
/// that was found last, as far as it still helps.
#[utoipa::path(get, path = "/v1/waiting", operation_id = "listWaitingPods", tag = "people", params(WaitingQuery), responses(
    (status = 200, description = "The waiting pods.", body = WaitingPodList),
    (status = 400, description = "The query cannot be read.", body = Error),
))]
pub(crate) async fn waiting_pods(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
    ReadQuery(query): ReadQuery<WaitingQuery>,
) -> Response {
    if is_long(query.namespace.as_deref()) {
        return too_long("namespace", LONGEST_NAMESPACE);
    }
    seen(&service.app, move |app| waiting::waiting(app, &query, &viewer)).await
}

/// Why a pod waits and what would help, by the current ledger; or where it is placed.
#[utoipa::path(get, path = "/v1/explain", tag = "people", params(ExplainQuery), responses(
    (status = 200, description = "The explanation.", body = Explanation),
    (status = 400, description = "The query names no pod.", body = Error),
    (status = 404, description = "The pod does not wait for a GPU, and holds none.", body = Error),
))]
pub(crate) async fn explain(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
    ReadQuery(query): ReadQuery<ExplainQuery>,
) -> Response {
    let named = query.pod.as_deref().and_then(|pod| pod.split_once('/'));
    let Some((namespace, name)) = named else {
        let error = "name the pod: /v1/explain?pod=NAMESPACE/NAME";
        return refusal(StatusCode::BAD_REQUEST, error);
    };
    if namespace.len() > LONGEST_NAMESPACE || name.len() > LONGEST_NAME {
        return too_long("pod", LONGEST_NAMESPACE + 1 + LONGEST_NAME);
    }
    let wanted = (namespace.to_owned(), name.to_owned());
    let explained =
        look(&service.app, move |app| explain_named(app, &wanted.0, &wanted.1, &viewer));
    match explained.await {
        Err(refused) => refused,
        Ok(Some(explanation)) => encoded(&explanation),
        Ok(None) => {
            let error = format!(
                "pod `{namespace}/{name}` is not known here: it does not exist, requests no GPU, has \
                 another scheduler than {}, or you may not list the pods of its namespace",
                service.app.config.scheduler_names.join(", ")
            );
            refusal(StatusCode::NOT_FOUND, &error)
        }
    }
}

fn is_long(namespace: Option<&str>) -> bool {
    namespace.is_some_and(|namespace| namespace.len() > LONGEST_NAMESPACE)
}

#[cfg(test)]
mod tests {
    use crate::page::service::LOOKS;
    use axum::body::Body;
    use std::time::Duration;
    use tower::ServiceExt;

    use super::*;
    use crate::api::server::router;
    use engine::ledger::ledger_fixture::settings;
    use engine::ledger::nodes::state::Ledger;
    use kube_api::config::file::Config;
    use runtime::clock::Clock;

    #[tokio::test]
    async fn a_query_keeps_its_permit_when_its_client_has_gone() {
        static PERMITS: Semaphore = Semaphore::const_new(1);
        let ledger = Arc::new(Ledger::new(settings()));
        let app = Arc::new(App::alone(ledger, Config::default(), Clock::start()));
        let (begun, began) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let asked = look_with_permit(&PERMITS, &app, move |_| {
            begun.send(()).unwrap();
            let _ = ended.recv();
        });
        let gone = tokio::time::timeout(Duration::from_millis(20), asked).await;
        assert!(gone.is_err());
        began.recv().unwrap();
        assert_eq!(PERMITS.available_permits(), 0, "the work goes on");
        drop(end);
        let _ = PERMITS.acquire().await.unwrap();
    }

    #[tokio::test]
    async fn long_queries_wait_for_a_permit() {
        let ledger = Arc::new(Ledger::new(settings()));
        let app = App::alone(ledger, Config::default(), Clock::start());
        let routes = router(Service::new(Arc::new(app), Arc::new(|_| Ok(()))));
        let ask = |path: &str| {
            let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
            routes.clone().oneshot(request)
        };
        let paths = ["/v1/state", "/v1/moves", "/v1/advise", "/v1/waiting", "/v1/summary"];
        let scrapes = ["/metrics", "/metrics/gpus"];
        let all = LOOKS.acquire_many(4).await.unwrap();
        for path in paths {
            let answer = tokio::time::timeout(Duration::from_millis(50), ask(path)).await;
            assert!(answer.is_err(), "{path} did not wait");
        }
        for path in scrapes {
            assert_eq!(
                ask(path).await.unwrap().status(),
                StatusCode::OK,
                "{path} waits for people"
            );
        }
        assert_eq!(ask("/v1/moves").await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
        drop(all);
        let all = SCRAPES.acquire_many(2).await.unwrap();
        for path in scrapes {
            let answer = tokio::time::timeout(Duration::from_millis(50), ask(path)).await;
            assert!(answer.is_err(), "{path} did not wait");
        }
        drop(all);
        let whole = WHOLE.acquire().await.unwrap();
        let second = tokio::time::timeout(Duration::from_millis(50), ask("/v1/state")).await;
        assert!(second.is_err(), "two answers with the whole model do not fit");
        drop(whole);
        for path in paths {
            assert_eq!(ask(path).await.unwrap().status(), StatusCode::OK, "{path}");
        }
    }
}
