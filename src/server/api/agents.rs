//! Which agent may report for a node: one whose token names that node, and of two only the newer.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use dashmap::DashMap;

use crate::http::exchange::PeerAddress;
use crate::http::respond::{ReadPath, refusal};
use control::metrics::labels::ReportResult;
use control::shared::app::App;
use control::shared::log_limit::LogLimit;
use engine::model::node_state::NodeReporting;
use kube_api::identity::agent_tokens::{AgentPod, AgentTokens};
use kube_api::identity::known_tokens::TokenRefusal;

/// Limits how often refused agents are logged.
static LOGGED: LogLimit = LogLimit::new();

/// The agents, by their tokens.
pub struct AgentAccess {
    app: Arc<App>,
    tokens: AgentTokens,
    /// The pod that reports for each node.
    pods: DashMap<String, Arc<AgentPod>>,
}

/// Why an agent may not report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum AgentRefusal {
    #[error("{0}")]
    Token(#[from] TokenRefusal),
    #[error("this agent runs on node `{runs_on}` and may not report for `{node}`")]
    OtherNode { runs_on: String, node: String },
    #[error(
        "another pod reports for node `{node}`, and this one is not newer: two agents run there, or \
         somebody uses the token of an agent that has ended"
    )]
    Second { node: String },
}

impl AgentRefusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Token(TokenRefusal::Unreviewed(_)) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Token(TokenRefusal::TooMany) => StatusCode::TOO_MANY_REQUESTS,
            Self::Token(TokenRefusal::None | TokenRefusal::Unknown { .. }) => {
                StatusCode::UNAUTHORIZED
            }
            Self::Token(_) | Self::OtherNode { .. } | Self::Second { .. } => StatusCode::FORBIDDEN,
        }
    }

    fn result(&self) -> ReportResult {
        match self {
            Self::Second { .. } => ReportResult::SecondAgent,
            Self::Token(_) | Self::OtherNode { .. } => ReportResult::Unproven,
        }
    }
}

impl AgentAccess {
    /// Agents whose tokens these are.
    pub fn new(app: Arc<App>, tokens: AgentTokens) -> Self {
        Self { app, tokens, pods: DashMap::new() }
    }

    async fn check(
        &self,
        authorization: Option<&str>,
        address: IpAddr,
        node: &str,
    ) -> Result<Arc<AgentPod>, AgentRefusal> {
        let pod = self.tokens.agent(authorization, address).await?;
        if pod.node != node {
            let (runs_on, node) = (pod.node.clone(), node.to_owned());
            return Err(AgentRefusal::OtherNode { runs_on, node });
        }
        Ok(pod)
    }

    /// Takes the pod as the one that reports for its node from now on. While that node is heard of, only
    /// a newer one may follow.
    fn take(&self, pod: &Arc<AgentPod>) -> Result<(), AgentRefusal> {
        let mut known = self.pods.entry(pod.node.clone()).or_insert_with(|| Arc::clone(pod));
        if known.uid == pod.uid {
            return Ok(());
        }
        if pod.created_unix_seconds <= known.created_unix_seconds && self.is_heard_of(&pod.node) {
            return Err(AgentRefusal::Second { node: pod.node.clone() });
        }
        *known = Arc::clone(pod);
        Ok(())
    }

    fn is_heard_of(&self, node: &str) -> bool {
        let (now, stale_after) = (self.app.clock.now(), self.app.config.stale_after);
        let node_state = self.app.ledger.node(node);
        node_state.is_some_and(|node_state| {
            node_state.state() == NodeReporting::Reporting && !node_state.is_stale(stale_after, now)
        })
    }
}

/// Passes a report or a question on if its agent runs on that node.
pub(crate) async fn prove(
    State(access): State<Arc<AgentAccess>>,
    Extension(PeerAddress(address)): Extension<PeerAddress>,
    ReadPath(node): ReadPath,
    request: Request,
    next: Next,
) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION);
    let authorization = authorization.and_then(|value| value.to_str().ok());
    let checked = access.check(authorization, address, &node).await;
    // A question changes nothing: not even who reports from now on.
    let is_question = request.method() == Method::GET;
    let checked = checked.and_then(|pod| if is_question { Ok(()) } else { access.take(&pod) });
    match checked {
        Ok(()) => next.run(request).await,
        Err(error) => {
            let app = &access.app;
            app.metrics.report(error.result());
            if let Some(left_out) = LOGGED.admits(("agent", "refused"), app.clock.precise()) {
                tracing::warn!(node, %error, left_out, "an agent may not report");
            }
            refusal(error.status(), &error.to_string())
        }
    }
}
