//! The connection to a running extender: direct, or through the API server with the user's own
//! kubeconfig, which `kubectl gpupack` uses. There the queries are a resource of the API server, or
//! behind its service proxy where no client proves who it is.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, StatusCode, Uri};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::base::failure::Failure;
use runtime::causes::with_causes;
use runtime::http_client::{HttpClient, plain_address};
use server::api::resources::{GROUP_PATH, RESOURCE_PATH};
use server::http::browser::CLIENT_HEADER;
use wire::api::error::ErrorReason;
use wire::ids::is_name;

/// How requests identify the client.
const CLIENT: &str = concat!("gpupack/", env!("CARGO_PKG_VERSION"));

/// Largest answer that is read; that of `/v1/state` for 5,000 nodes has about 40 MB.
const MAX_BODY_BYTES: usize = 1 << 30;

/// The longest time that a user can allow for an answer.
const MAX_TIMEOUT: Duration = Duration::from_secs(3_600);

/// Flags with the address of the API server.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct ApiServerArgs {
    /// Kubeconfig file; without it KUBECONFIG or ~/.kube/config, or the pod's service account
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// User to act as at the API server
    #[arg(long = "as", value_name = "USER", value_parser = user)]
    acting_as: Option<String>,
    /// Longest time for an answer, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    timeout: u64,
}

/// Flags with the address of the extender.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct ServerArgs {
    /// Use the extender at this address, for instance http://127.0.0.1:8081; without it, connect
    /// through the API server
    #[arg(long, value_name = "URL", env = "GPUPACK_SERVER")]
    server: Option<String>,
    /// The extender's Service, with the name or number of its port, to call it through the service
    /// proxy; gpu-system/gpupack:page if the API server has no group inspection.gpupack.dev
    #[arg(long, value_name = "NAMESPACE/NAME:PORT", value_parser = service)]
    service: Option<ServicePort>,
    /// Address of the API server.
    #[command(flatten)]
    pub(crate) api_server: ApiServerArgs,
}

/// The extender's Service.
#[derive(Clone, Debug)]
struct ServicePort {
    namespace: String,
    /// `name:port`.
    port: String,
}

fn service(text: &str) -> Result<ServicePort, String> {
    let (namespace, port) = text.split_once('/').ok_or("write NAMESPACE/NAME:PORT")?;
    let parts = port.split(':').chain([namespace]);
    if !parts.clone().all(is_name) || port.split(':').count() != 2 {
        return Err("write NAMESPACE/NAME:PORT, for instance gpu-system/gpupack:page".to_owned());
    }
    Ok(ServicePort { namespace: namespace.to_owned(), port: port.to_owned() })
}

/// A connection to a running extender.
pub(crate) struct Server {
    way: Way,
    timeout: Duration,
    /// Namespace of the user's context.
    pub(crate) namespace: String,
}

enum Way {
    Direct { base: String },
    ApiServer { client: Box<kube::Client>, service: Option<ServicePort> },
}

impl ServicePort {
    /// That of the shipped manifests.
    fn shipped() -> Self {
        Self { namespace: "gpu-system".to_owned(), port: "gpupack:page".to_owned() }
    }

    /// Its path in the API server's service proxy.
    fn path(&self) -> String {
        format!("/api/v1/namespaces/{}/services/{}/proxy", self.namespace, self.port)
    }
}

/// An error message of an extender or an API server.
#[derive(Deserialize)]
struct Refusal {
    error: Option<String>,
    /// `Status` in those of an API server.
    kind: Option<String>,
    message: Option<String>,
    reason: Option<ErrorReason>,
}

impl ServerArgs {
    /// The connection that the flags describe. Sends nothing yet.
    ///
    /// # Errors
    /// An address or kubeconfig that cannot be used.
    pub(crate) async fn connect(&self) -> Result<Server, Failure> {
        let timeout = self.api_server.timeout();
        if let Some(url) = &self.server {
            let base =
                plain_address(url).map_err(|fault| Failure::usage(format!("--server {fault}")))?;
            return Ok(Server {
                way: Way::Direct { base },
                timeout,
                namespace: "default".to_owned(),
            });
        }
        let config = self.api_server.kube_config(", or --server for the extender itself").await?;
        let namespace = config.default_namespace.clone();
        let client = Box::new(client_of(config)?);
        let way = Way::ApiServer { client, service: self.service.clone() };
        Ok(Server { way, timeout, namespace })
    }
}

fn client_of(config: kube::Config) -> Result<kube::Client, Failure> {
    kube::Client::try_from(config)
        .map_err(|error| Failure::other(format!("cannot use the kubeconfig: {}", said(&error))))
}

/// What the client of Kubernetes says, in one line: it quotes a file of several lines, and paths twice.
pub(crate) fn said(error: &dyn Error) -> String {
    let text = with_causes(error);
    let line = text.lines().next().unwrap_or_default();
    let line = line.strip_prefix("ServiceError: ").unwrap_or(line);
    line.replace("'\"", "`").replace("\"'", "`")
}

fn user(text: &str) -> Result<String, String> {
    match HeaderValue::from_str(text) {
        Ok(_) if !text.is_empty() => Ok(text.to_owned()),
        Ok(_) | Err(_) => Err("it is no name of a user".to_owned()),
    }
}

impl ApiServerArgs {
    /// A client of the API server, and the address of that. Sends nothing yet.
    ///
    /// # Errors
    /// A kubeconfig that cannot be used.
    pub(crate) async fn client(&self) -> Result<(kube::Client, String), Failure> {
        let config = self.kube_config("").await?;
        let address = config.cluster_url.to_string();
        Ok((client_of(config)?, address.trim_end_matches('/').to_owned()))
    }

    /// Longest time for an answer.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// `instead` is what a user without a kubeconfig can do instead.
    async fn kube_config(&self, instead: &str) -> Result<kube::Config, Failure> {
        let options = KubeConfigOptions { context: self.context.clone(), ..Default::default() };
        let file = match &self.kubeconfig {
            Some(path) => Kubeconfig::read_from(path),
            None => Kubeconfig::read(),
        };
        let found = match file {
            Ok(file) => kube::Config::from_custom_kubeconfig(file, &options).await,
            Err(error) => Err(error),
        };
        let mut config = match found {
            Ok(config) => config,
            Err(error) => match kube::Config::incluster() {
                Ok(config) if self.kubeconfig.is_none() && self.context.is_none() => config,
                Ok(_) | Err(_) => {
                    return Err(Failure::other(format!(
                        "no usable kubeconfig ({}): name one with --kubeconfig{instead}",
                        said(&error)
                    )));
                }
            },
        };
        if self.acting_as.is_some() {
            config.auth_info.impersonate.clone_from(&self.acting_as);
        }
        config.default_retry = false; // the client would repeat requests after a 503 for minutes
        Ok(config)
    }
}

impl Server {
    /// The answer to `path`, read as a `T`.
    ///
    /// # Errors
    /// No answer, a refusal, or an answer of another form.
    pub(crate) async fn ask<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.answer(&Call { group: RESOURCE_PATH, path, body: None }).await
    }

    /// The answer to `body`, which is put to `path` and may change something.
    ///
    /// # Errors
    /// No answer, a refusal, or an answer of another form.
    pub(crate) async fn order<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T, Failure> {
        let body = serde_json::to_vec(body).map_err(Failure::other)?;
        self.answer(&Call { group: GROUP_PATH, path, body: Some(body.into()) }).await
    }

    async fn answer<T: DeserializeOwned>(&self, call: &Call<'_>) -> Result<T, Failure> {
        let requested = tokio::time::timeout(self.timeout, self.exchange(call)).await;
        let (status, body) = requested.map_err(|_| {
            let seconds = self.timeout.as_secs();
            Failure::unreachable(format!("{} does not answer within {seconds} s", self.name()))
        })??;
        if !status.is_success() {
            return Err(self.refusal(call, status, &body));
        }
        serde_json::from_slice(&body).map_err(|error| {
            Failure::other(format!(
                "the answer of {} is not from a gpupack extender of this version: {error}",
                self.name()
            ))
        })
    }

    async fn exchange(&self, call: &Call<'_>) -> Result<(StatusCode, Bytes), Failure> {
        let away =
            |error: String| Failure::unreachable(format!("cannot reach {}: {error}", self.name()));
        match &self.way {
            Way::Direct { base } => {
                let address = format!("{base}{}", call.path);
                let address: Uri = address.parse().map_err(Failure::usage)?;
                direct(call.request(address, Full::new)).await.map_err(away)
            }
            Way::ApiServer { client, service } => {
                let base =
                    service.as_ref().map_or_else(|| call.group.to_owned(), ServicePort::path);
                let found = through(client, &base, call).await.map_err(away)?;
                let is_elsewhere = [StatusCode::NOT_FOUND, StatusCode::FORBIDDEN]
                    .contains(&found.0)
                    && is_of_api_server(&found.1);
                if service.is_some() || !is_elsewhere {
                    return Ok(found);
                }
                // An API server without the group says so only to those who may call any.
                let base = ServicePort::shipped().path();
                let behind = through(client, &base, call).await.map_err(away)?;
                let is_refused = is_of_api_server(&behind.1) && found.0 == StatusCode::FORBIDDEN;
                Ok(if is_refused { found } else { behind })
            }
        }
    }

    /// The server, for messages.
    fn name(&self) -> String {
        match &self.way {
            Way::Direct { base } => format!("the extender at {base}"),
            Way::ApiServer { service, .. } => {
                let ServicePort { namespace, port } =
                    service.clone().unwrap_or_else(ServicePort::shipped);
                format!("the extender behind Service {namespace}/{port}, through the API server")
            }
        }
    }

    fn refusal(&self, call: &Call<'_>, status: StatusCode, body: &[u8]) -> Failure {
        let said: Option<Refusal> = serde_json::from_slice(body).ok();
        let is_of_api_server = is_of_api_server(body);
        let reason = said.as_ref().and_then(|said| said.reason);
        let text = said.and_then(|said| said.error.or(said.message));
        let text: String = text.unwrap_or_else(|| status.to_string()).chars().take(500).collect();
        match status {
            StatusCode::FORBIDDEN if call.body.is_some() && is_of_api_server => {
                Failure::other(format!(
                    "the API server rejects the call: {text}; you need the ClusterRole gpupack-clear (see \
                     deploy/rbac.yaml), or, where the extender has no certificates, `kubectl port-forward` and --server"
                ))
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if call.body.is_some() => {
                Failure::other(format!("the call is rejected: {text}")) // that says what is missing
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::other(format!(
                "the API server rejects the call: {text}; you need the ClusterRole gpupack-view, or the \
                 Role of that name where the extender has no certificates (see deploy/rbac.yaml)"
            )),
            StatusCode::NOT_FOUND if is_of_api_server => Failure::unreachable(format!(
                "{} is not there ({text}): name --service or --server",
                self.name()
            )),
            StatusCode::NOT_FOUND if reason != Some(ErrorReason::UnknownPath) => {
                Failure::not_found(text)
            }
            StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::BAD_GATEWAY
            | StatusCode::GATEWAY_TIMEOUT => {
                Failure::unreachable(format!("{} is not ready: {text}", self.name()))
            }
            _ => Failure::other(format!("{} answers with {status}: {text}", self.name())),
        }
    }
}

/// Whether the API server itself says this, and not the extender.
fn is_of_api_server(body: &[u8]) -> bool {
    let said: Option<Refusal> = serde_json::from_slice(body).ok();
    said.is_some_and(|said| said.kind.as_deref() == Some("Status"))
}

/// A call of the extender: a GET, or a PUT of a body of JSON.
struct Call<'a> {
    /// What is before the path at the API server.
    group: &'static str,
    path: &'a str,
    body: Option<Bytes>,
}

impl Call<'_> {
    /// The request at this address, with a body of the client's kind.
    fn request<B>(
        &self,
        address: Uri,
        body: impl FnOnce(Bytes) -> B,
    ) -> Result<Request<B>, hyper::http::Error> {
        let request = match self.body {
            None => Request::get(address),
            Some(_) => Request::put(address).header(CONTENT_TYPE, "application/json"),
        };
        let content = self.body.clone().unwrap_or_default();
        request.header(CLIENT_HEADER, CLIENT).body(body(content))
    }
}

/// Status and body of a call through the API server, whatever the status.
async fn through(
    client: &kube::Client,
    base: &str,
    call: &Call<'_>,
) -> Result<(StatusCode, Bytes), String> {
    let address: Uri =
        format!("{base}{}", call.path).parse().map_err(|error| format!("{error}"))?;
    let request = call.request(address, |body| kube::client::Body::from(body.to_vec()));
    let request = request.map_err(|error| error.to_string())?;
    let answer = client.send(request).await.map_err(|error| said(&error))?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_BODY_BYTES).collect().await;
    Ok((status, body.map_err(|error| with_causes(&*error))?.to_bytes()))
}

/// Status and body of a GET, whatever the status. The caller limits its time.
///
/// # Errors
/// What failed on the way.
pub(crate) async fn get(address: Uri) -> Result<(StatusCode, Bytes), String> {
    direct(Call { group: "", path: "", body: None }.request(address, Full::new)).await
}

async fn direct(
    request: Result<Request<Full<Bytes>>, hyper::http::Error>,
) -> Result<(StatusCode, Bytes), String> {
    let request = request.map_err(|error| error.to_string())?;
    HttpClient::new(MAX_TIMEOUT, MAX_BODY_BYTES).exchange(request).await
}

/// Runs a conversation with a server to its end.
///
/// # Errors
/// The error of the conversation.
pub(crate) fn run(talk: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(Failure::other)?.block_on(talk)
}
