//! Who may query what: a person by a token, or as the API server names him, and Prometheus.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use futures::StreamExt;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::http::exchange::PeerAddress;
use crate::http::listener_limits::PeerProof;
use crate::http::respond::refusal;
use crate::page::service::look;
use crate::views::viewer::{Viewer, namespaces};
use control::shared::app::App;
use kube_api::identity::front_proxy::FrontProxy;
use kube_api::identity::known_tokens::TokenRefusal;
use kube_api::identity::people::{People, Person, Right};
use wire::units::Timestamp;

/// How long the list of namespaces is used.
const LISTED_FOR: Duration = Duration::from_secs(5);

/// Questions about namespaces at a time, for one caller.
const ASKED_AT_ONCE: usize = 8;

/// Why a call is refused.
#[derive(Debug, thiserror::Error)]
enum PersonRefusal {
    #[error("{0}, or call through the API server")]
    Token(#[from] TokenRefusal),
    #[error("`{user}` may not {what}")]
    Forbidden { user: String, what: &'static str },
    #[error("the namespaces cannot be listed now")]
    Busy,
}

impl PersonRefusal {
    fn response(&self) -> Response {
        let status = match self {
            Self::Token(TokenRefusal::Unreviewed(_)) | Self::Busy => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Token(TokenRefusal::TooMany) => StatusCode::TOO_MANY_REQUESTS,
            Self::Token(_) => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
        };
        refusal(status, &self.to_string())
    }
}

/// A user who may clear GPUs: an extension of the calls that such a user makes.
#[derive(Clone, Debug)]
pub(crate) struct MayClear {
    pub(crate) user: String,
}

/// When the namespaces were listed, and which there were.
type Listed = (Timestamp, Arc<BTreeSet<String>>);

/// The people, and what they may see.
pub struct PeopleAccess {
    app: Arc<App>,
    people: People,
    front_proxy: watch::Receiver<Option<Arc<FrontProxy>>>,
    listed: Mutex<Option<Listed>>,
}

impl PeopleAccess {
    /// People whom the API server knows, who call directly, or through it.
    pub fn new(
        app: Arc<App>,
        people: People,
        front_proxy: watch::Receiver<Option<Arc<FrontProxy>>>,
    ) -> Self {
        Self { app, people, front_proxy, listed: Mutex::default() }
    }

    /// Who makes a call.
    async fn caller(&self, parts: &Parts) -> Result<Arc<Person>, TokenRefusal> {
        let headers = &parts.headers;
        if let Some(PeerProof { chain, .. }) = parts.extensions.get() {
            let front_proxy = self.front_proxy.borrow().clone();
            let front_proxy = front_proxy.filter(|front_proxy| front_proxy.is_api_server(chain));
            if let Some(person) = front_proxy.and_then(|front_proxy| front_proxy.person(headers)) {
                return Ok(Arc::new(person));
            }
        }
        self.sender(parts).await
    }

    /// Who sends the token of a call.
    async fn sender(&self, parts: &Parts) -> Result<Arc<Person>, TokenRefusal> {
        let header = parts.headers.get(header::AUTHORIZATION);
        let authorization = header.and_then(|value| value.to_str().ok());
        let address = parts.extensions.get().map(|PeerAddress(address)| *address);
        let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        self.people.sender(authorization, address).await
    }

    async fn must(
        &self,
        person: &Arc<Person>,
        right: Right,
        what: &'static str,
    ) -> Result<(), PersonRefusal> {
        if self.people.may(person, right).await? {
            return Ok(());
        }
        Err(PersonRefusal::Forbidden { user: person.name.clone(), what })
    }

    /// What a person may see.
    async fn viewer(&self, person: &Arc<Person>) -> Result<Viewer, PersonRefusal> {
        if self.people.may(person, Right::ListPods(None)).await? {
            return Ok(Viewer::All);
        }
        let all = self.namespaces().await?;
        let questions: Vec<_> =
            all.iter().map(|namespace| self.seen(person, namespace.clone())).collect();
        let mut answers = futures::stream::iter(questions).buffer_unordered(ASKED_AT_ONCE);
        let mut seen = BTreeSet::new();
        while let Some(answer) = answers.next().await {
            seen.extend(answer?);
        }
        Ok(Viewer::Namespaces(Arc::new(seen)))
    }

    /// The namespace, if a person may see its pods.
    async fn seen(
        &self,
        person: &Arc<Person>,
        namespace: String,
    ) -> Result<Option<String>, TokenRefusal> {
        let right = Right::ListPods(Some(namespace.as_str().into()));
        Ok(self.people.may(person, right).await?.then_some(namespace))
    }

    async fn namespaces(&self) -> Result<Arc<BTreeSet<String>>, PersonRefusal> {
        let now = self.app.clock.now();
        if let Some((at, listed)) = &*self.listed.lock()
            && now.since(*at) < LISTED_FOR
        {
            return Ok(Arc::clone(listed));
        }
        let found = look(&self.app, namespaces).await.map_err(|_| PersonRefusal::Busy)?;
        let found = Arc::new(found);
        *self.listed.lock() = Some((now, Arc::clone(&found)));
        Ok(found)
    }

    async fn admit(&self, parts: &mut Parts) -> Result<(), PersonRefusal> {
        let person = self.caller(parts).await?;
        let what = "query gpupack: grant the ClusterRole gpupack-view";
        self.must(&person, Right::Inspect, what).await?;
        let viewer = self.viewer(&person).await?;
        parts.extensions.insert(viewer);
        Ok(())
    }

    async fn admit_clear(&self, parts: &mut Parts) -> Result<(), PersonRefusal> {
        let person = self.caller(parts).await?;
        let what = "clear GPUs: grant the ClusterRole gpupack-clear";
        self.must(&person, Right::ClearGpus, what).await?;
        parts.extensions.insert(MayClear { user: person.name.clone() });
        Ok(())
    }

    async fn admit_scrape(&self, parts: &Parts) -> Result<(), PersonRefusal> {
        let person = self.sender(parts).await?;
        let (right, what) = if parts.method == Method::PUT {
            let what = "set the log level: grant `put` on the non-resource URL /v1/log-level";
            (Right::Path("put", "/v1/log-level"), what)
        } else {
            let what = "read metrics: grant `get` on the non-resource URL /metrics";
            (Right::Path("get", "/metrics"), what)
        };
        self.must(&person, right, what).await
    }
}

/// Passes a query on, with what its sender may see.
pub(crate) async fn identify(
    State(access): State<Arc<PeopleAccess>>,
    request: Request,
    next: Next,
) -> Response {
    let (mut parts, body) = request.into_parts();
    match access.admit(&mut parts).await {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(refused) => refused.response(),
    }
}

/// Passes a call on that clears a GPU, if its sender may do that.
pub(crate) async fn identify_clear(
    State(access): State<Arc<PeopleAccess>>,
    request: Request,
    next: Next,
) -> Response {
    let (mut parts, body) = request.into_parts();
    match access.admit_clear(&mut parts).await {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(refused) => refused.response(),
    }
}

/// Passes a call of the port of metrics on, if its sender may make it.
pub(crate) async fn identify_scrape(
    State(access): State<Arc<PeopleAccess>>,
    request: Request,
    next: Next,
) -> Response {
    let (parts, body) = request.into_parts();
    match access.admit_scrape(&parts).await {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(refused) => refused.response(),
    }
}
