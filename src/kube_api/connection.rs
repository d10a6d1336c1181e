//! The connection to the API server: its token, and what answers say about the API server.
//!
//! The client of `kube` reads a token file once in a minute. A token that is no longer accepted is replaced sooner
//! here: the file is read again at the next call, but not more than once in a second.

use std::fs;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use hyper::header::{AUTHORIZATION, DATE, HeaderMap, HeaderValue};
use hyper::{Request, Response};
use kube::client::{AuthError, Body, ClientBuilder};
use kube::config::AuthInfo;
use kube::{Client, Config};
use tower::{Layer, Service};

use runtime::clock::Clock;
use runtime::step::api_server::{ApiServer, Head};
use wire::units::Timestamp;

/// Shortest time between two reads of a token file.
const READ_EVERY: Duration = Duration::from_secs(1);

/// A client whose answers `api_server` notes. With retries, as `kube` makes them.
///
/// # Errors
/// [`kube::Error`] if `config` makes no client.
pub fn noted(config: Config, api_server: &ApiServer) -> Result<Client, kube::Error> {
    client(config, api_server.clock(), Some(api_server.clone()))
}

/// A client without the default retries of `kube`: they repeat a Binding after a 503 or 504, for
/// minutes, and the caller does not see it. Those that send its calls note the answers.
///
/// # Errors
/// [`kube::Error`] if `config` makes no client.
pub fn without_retries(mut config: Config, clock: Clock) -> Result<Client, kube::Error> {
    config.default_retry = false;
    client(config, clock, None)
}

fn client(
    mut config: Config,
    clock: Clock,
    notes: Option<ApiServer>,
) -> Result<Client, kube::Error> {
    let token = match token_file(&mut config.auth_info) {
        Some(path) => Some(TokenFile::read(path, clock).map_err(kube::Error::Auth)?),
        None => None,
    };
    Ok(ClientBuilder::try_from(config)?.with_layer(&Link { token, notes, clock }).build())
}

/// Takes the token file, if `kube` would use that and nothing else.
fn token_file(auth: &mut AuthInfo) -> Option<PathBuf> {
    let has_other = auth.auth_provider.is_some()
        || auth.token.is_some()
        || auth.username.is_some() && auth.password.is_some();
    if has_other { None } else { auth.token_file.take().map(PathBuf::from) }
}

/// A token in a file, which is replaced before it ends.
#[derive(Clone, Debug)]
struct TokenFile {
    path: PathBuf,
    clock: Clock,
    read: Timestamp,
    header: HeaderValue,
}

impl TokenFile {
    fn read(path: PathBuf, clock: Clock) -> Result<Self, AuthError> {
        let header =
            header_in(&path).map_err(|error| AuthError::ReadTokenFile(error, path.clone()))?;
        Ok(Self { read: clock.now(), path, clock, header })
    }

    /// The header with the newest token. While the file cannot be read, that is the last one.
    fn header(&mut self) -> HeaderValue {
        let now = self.clock.now();
        if now.since(self.read) >= READ_EVERY {
            self.read = now;
            match header_in(&self.path) {
                Ok(header) => self.header = header,
                Err(error) => {
                    tracing::debug!(%error, path = %self.path.display(), "the token file cannot be read");
                }
            }
        }
        self.header.clone()
    }
}

/// The header with the token in a file.
fn header_in(path: &Path) -> std::io::Result<HeaderValue> {
    let text = fs::read_to_string(path)?;
    let token = text.trim();
    if token.is_empty() {
        return Err(invalid("it is empty"));
    }
    let header = HeaderValue::try_from(format!("Bearer {token}"));
    let mut header = header.map_err(|_| invalid("it has no token"))?;
    header.set_sensitive(true);
    Ok(header)
}

fn invalid(what: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, what)
}

/// What is added to a client.
#[derive(Clone, Debug)]
struct Link {
    token: Option<TokenFile>,
    notes: Option<ApiServer>,
    clock: Clock,
}

impl<S> Layer<S> for Link {
    type Service = Linked<S>;

    fn layer(&self, inner: S) -> Linked<S> {
        Linked { inner, link: self.clone() }
    }
}

/// A client with that.
struct Linked<S> {
    inner: S,
    link: Link,
}

impl<S, B> Service<Request<Body>> for Linked<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(token) = &mut self.link.token {
            request.headers_mut().insert(AUTHORIZATION, token.header());
        }
        let (sent, notes) = (self.link.clock.now(), self.link.notes.clone());
        let answer = self.inner.call(request);
        async move {
            let answer = answer.await?;
            if let Some(api_server) = notes {
                let (status, date) = (answer.status().as_u16(), date_of(answer.headers()));
                api_server.answered(sent, Head { status, date });
            }
            Ok(answer)
        }
        .boxed()
    }
}

/// When a server answered by its own clock: RFC 9110, section 6.6.1. Servers written in Go always say it.
pub(crate) fn date_of(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(DATE)?.to_str().ok()?;
    let date = httpdate::parse_http_date(text).ok()?;
    date.duration_since(std::time::UNIX_EPOCH).ok().map(|since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tower::{ServiceExt, service_fn};

    use super::*;
    use runtime::clock::SimulatedTime;

    /// What an API server got and answers.
    #[derive(Default)]
    struct Server {
        tokens: Vec<String>,
        accepts: String,
        date: u64,
    }

    async fn call(
        link: &mut Linked<
            impl Service<
                Request<Body>,
                Response = Response<Body>,
                Error = io::Error,
                Future: Send + 'static,
            >,
        >,
    ) -> u16 {
        let request = Request::get("/api/v1/pods").body(Body::empty()).unwrap();
        link.ready().await.unwrap().call(request).await.unwrap().status().as_u16()
    }

    fn served(
        server: &Arc<Mutex<Server>>,
    ) -> impl Service<
        Request<Body>,
        Response = Response<Body>,
        Error = io::Error,
        Future: Send + 'static,
    > + use<> {
        let server = Arc::clone(server);
        service_fn(move |request: Request<Body>| {
            let mut server = server.lock();
            let token = request.headers()[AUTHORIZATION].to_str().unwrap().to_owned();
            let status = if token == format!("Bearer {}", server.accepts) { 200 } else { 401 };
            server.tokens.push(token);
            let date = std::time::UNIX_EPOCH + Duration::from_secs(server.date);
            let answer =
                Response::builder().status(status).header(DATE, httpdate::fmt_http_date(date));
            async move { Ok::<_, io::Error>(answer.body(Body::empty()).unwrap()) }
        })
    }

    #[tokio::test]
    async fn a_new_token_file_is_taken_up_within_a_second_and_answers_are_noted() {
        static TIME: SimulatedTime = SimulatedTime::starting(1_000);
        let (clock, folder) = (Clock::simulated(&TIME), tempfile::tempdir().unwrap());
        let path = folder.path().join("token");
        fs::write(&path, "first\n").unwrap();
        let mut auth =
            AuthInfo { token_file: Some(path.display().to_string()), ..AuthInfo::default() };
        let taken = token_file(&mut auth).unwrap();
        assert!(auth.token_file.is_none(), "kube adds no other one");
        let api_server = ApiServer::new(clock);
        let token = Some(TokenFile::read(taken, clock).unwrap());
        let link = Link { token, notes: Some(api_server.clone()), clock };
        let server = Arc::new(Mutex::new(Server { date: 5_000, ..Server::default() }));
        let mut link = link.layer(served(&server));
        server.lock().accepts = "second".to_owned();
        for seconds in [0, 15, 31] {
            TIME.set(Timestamp::from_millis(seconds * 1_000));
            server.lock().date = 5_000 + seconds;
            assert_eq!(call(&mut link).await, 401);
        }
        assert!(api_server.refuses().unwrap().is_lasting());
        assert_eq!(api_server.unix_seconds(), 5_031);
        fs::write(&path, "").unwrap(); // while it is written
        TIME.set(Timestamp::from_millis(32_000));
        assert_eq!(call(&mut link).await, 401);
        fs::write(&path, "second").unwrap();
        TIME.set(Timestamp::from_millis(33_000));
        assert_eq!((call(&mut link).await, api_server.refuses()), (200, None));
        fs::remove_file(&path).unwrap();
        TIME.set(Timestamp::from_millis(40_000));
        assert_eq!(call(&mut link).await, 200, "the last one stays");
        assert_eq!(server.lock().tokens.len(), 6);
    }

    #[test]
    fn the_token_file_is_used_where_kube_would_use_it() {
        let file = || Some("/token".to_owned());
        let of = |mut auth: AuthInfo| token_file(&mut auth).is_some();
        assert!(of(AuthInfo { token_file: file(), ..AuthInfo::default() }));
        assert!(!of(AuthInfo {
            token: Some("inline".to_owned().into()),
            token_file: file(),
            ..AuthInfo::default()
        }));
        assert!(!of(AuthInfo::default()));
    }
}
