//! Routes of the page: its files, the snapshot, and the queries behind its boxes.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::http::respond::{ReadPath, ReadQuery, refusal};
use crate::page::service::{Service, look};
use crate::page::stream;
use crate::views::viewer::Viewer;
use crate::views::{fits, search};
use kube_api::protocol::messages::to_json;
use wire::api::error::Error;
use wire::api::fit::{Fit, Fragmentation};
use wire::api::page::Summary;
use wire::api::search::{SearchQuery, SearchResults};

/// Content security policy: the page may load only from its own origin.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src data:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The files of the page.
const FILES: [(&str, &str, &str); 11] = [
    ("index.html", HTML, include_str!("assets/index.html")),
    ("style.css", STYLE, include_str!("assets/style.css")),
    ("main.js", SCRIPT, include_str!("assets/main.js")),
    ("words.js", SCRIPT, include_str!("assets/words.js")),
    ("fleet.js", SCRIPT, include_str!("assets/fleet.js")),
    ("stream.js", SCRIPT, include_str!("assets/stream.js")),
    ("map.js", SCRIPT, include_str!("assets/map.js")),
    ("trend.js", SCRIPT, include_str!("assets/trend.js")),
    ("lists.js", SCRIPT, include_str!("assets/lists.js")),
    ("waste.js", SCRIPT, include_str!("assets/waste.js")),
    ("drawer.js", SCRIPT, include_str!("assets/drawer.js")),
];

/// The routes of the page.
pub(crate) fn routes() -> Router<Service> {
    Router::new()
        .route("/", get(|headers: HeaderMap| async move { file("index.html", &headers) }))
        .route("/page/{file}", get(named_file))
        .route("/v1/summary", get(summary))
        .route("/v1/events", get(stream::events))
        .route("/v1/fit", get(fit))
        .route("/v1/fragmentation", get(fragmentation))
        .route("/v1/search", get(search))
}

async fn named_file(ReadPath(name): ReadPath, headers: HeaderMap) -> Response {
    file(&name, &headers)
}

/// A file of the page. The browser revalidates it each time, so an upgrade shows at once.
fn file(name: &str, headers: &HeaderMap) -> Response {
    let Some((_, kind, text)) = FILES.iter().find(|(known, _, _)| *known == name) else {
        return refusal(StatusCode::NOT_FOUND, "there is no such file: the page is at /");
    };
    let protection: [(HeaderName, &str); 3] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (protection, packed(headers, kind, text.as_bytes().to_vec())).into_response()
}

/// The snapshot that the page starts with. Its `ETag` is the name of the snapshot.
#[utoipa::path(get, path = "/v1/summary", operation_id = "getSummary", tag = "page", params(
    ("If-None-Match" = Option<String>, Header, description = "The `ETag` of the snapshot that the client has."),
), responses(
    (status = 200, description = "The snapshot; gzip if that is accepted.", body = Summary<'static>),
    (status = 304, description = "The client has this snapshot."),
))]
pub(crate) async fn summary(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
    headers: HeaderMap,
) -> Response {
    let live = Arc::clone(&service.live);
    let answer = look(&service.app, move |app| {
        let (snapshot, at) = live.snapshot(app, &viewer);
        let tag = format!("W/\"{at}\"");
        if headers
            .get(header::IF_NONE_MATCH)
            .is_some_and(|known| known.as_bytes() == tag.as_bytes())
        {
            return (tag, StatusCode::NOT_MODIFIED.into_response());
        }
        (tag, packed(&headers, "application/json", snapshot))
    });
    match answer.await {
        Err(refused) => refused,
        Ok((tag, mut response)) => {
            if let Ok(tag) = HeaderValue::from_str(&tag) {
                response.headers_mut().insert(header::ETAG, tag);
            }
            response
        }
    }
}

/// Where a request would fit now, by the fit function that places pods.
///
/// Free CPU and host memory do not matter. It makes no hold, and nothing is learned from it. Give
/// `pod` alone, or one of the others.
#[utoipa::path(get, path = "/v1/fit", tag = "people", params(
    ("fraction" = Option<String>, Query, description = "As the annotation `gpu-fraction`."),
    ("memory" = Option<String>, Query, description = "As `gpu-memory`, in MiB or with a unit."),
    ("count" = Option<u32>, Query, minimum = 1, maximum = 64, description = "As `gpu-fraction-num-devices`."),
    ("model" = Option<String>, Query, description = "As `gpupack.dev/gpu-model`."),
    ("isolation" = Option<String>, Query, description = "As `gpupack.dev/isolation`."),
    ("mig" = Option<String>, Query, description = "A MIG profile, such as `1g.10gb`."),
    ("pod" = Option<String>, Query, description = "The request of this waiting pod: `namespace/name`."),
), responses(
    (status = 200, description = "Where it fits.", body = Fit),
    (status = 400, description = "The request cannot be read, or the pod does not wait.", body = Error),
))]
pub(crate) async fn fit(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
    ReadQuery(query): ReadQuery<BTreeMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    let answer = look(&service.app, move |app| match fits::fits(app, &query, &viewer) {
        Ok(found) => packed(&headers, "application/json", to_json(&found)),
        Err(error) => refusal(StatusCode::BAD_REQUEST, &error),
    });
    answer.await.unwrap_or_else(|refused| refused)
}

/// The free share of each node that no typical request can use.
#[utoipa::path(get, path = "/v1/fragmentation", operation_id = "getFragmentation", tag = "people", responses(
    (status = 200, description = "The nodes with any.", body = Fragmentation),
))]
pub(crate) async fn fragmentation(State(service): State<Service>, headers: HeaderMap) -> Response {
    let answer = look(&service.app, move |app| {
        packed(&headers, "application/json", to_json(&fits::fragmentation(app)))
    });
    answer.await.unwrap_or_else(|refused| refused)
}

/// Pods, nodes and namespaces with a text in their name.
#[utoipa::path(get, path = "/v1/search", tag = "people", params(SearchQuery), responses(
    (status = 200, description = "The first 20 of each.", body = SearchResults),
    (status = 400, description = "The text is missing or too long.", body = Error),
))]
pub(crate) async fn search(
    State(service): State<Service>,
    Extension(viewer): Extension<Viewer>,
    ReadQuery(query): ReadQuery<SearchQuery>,
) -> Response {
    let text = query.q.map(|text| text.trim().to_owned()).unwrap_or_default();
    if text.is_empty() || text.len() > search::MAX_TEXT {
        let error = format!(
            "name what to look for, in 1 to {} bytes: /v1/search?q=PART-OF-A-NAME",
            search::MAX_TEXT
        );
        return refusal(StatusCode::BAD_REQUEST, &error);
    }
    let found = look(&service.app, move |app| search::search(app, &text, &viewer)).await;
    let json = [(header::CONTENT_TYPE, "application/json")];
    found.map_or_else(|refused| refused, |found| (json, to_json(&found)).into_response())
}

/// A response body, compressed if the browser can read that.
fn packed(headers: &HeaderMap, kind: &'static str, body: Vec<u8>) -> Response {
    let accepted = headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok());
    let fixed = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-cache"),
        (header::VARY, "accept-encoding"),
    ];
    let is_gzip =
        accepted.is_some_and(|accepted| accepted.split(',').any(|one| one.trim() == "gzip"));
    let pressed = is_gzip.then(|| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&body).and_then(|()| encoder.finish())
    });
    match pressed {
        Some(Ok(pressed)) => (fixed, [(header::CONTENT_ENCODING, "gzip")], pressed).into_response(),
        Some(Err(_)) | None => (fixed, body).into_response(),
    }
}
