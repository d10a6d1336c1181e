//! Who sends a token: the API server says it.
//!
//! Answers are kept for a minute, by the digest of the token: reports come every second. A token of a
//! deleted pod may be believed that long.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use moka::future::Cache;
use tokio::sync::Semaphore;

/// How long it is remembered whose a token is.
const KNOWN_FOR: Duration = Duration::from_secs(60);

/// How long a refusal is remembered.
const REFUSED_FOR: Duration = Duration::from_secs(10);

/// Most tokens that are remembered of each kind.
const MOST_TOKENS: u64 = 20_000;

/// Longest token. Those of ServiceAccounts have about 1 KiB.
const LONGEST_TOKEN: usize = 16 << 10;

/// Reviews at a time: any client may send tokens.
const REVIEWS_AT_ONCE: usize = 16;

/// Longest time of a review.
const REVIEWED_WITHIN: Duration = Duration::from_secs(3);

/// What the API server adds to the user of a token that is bound to a pod.
const NODE: &str = "authentication.kubernetes.io/node-name";
const POD: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// Why a token is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefusal {
    /// No token, or no text that could be one.
    #[error("send the token of the agent's pod, as `Authorization: Bearer …`")]
    None,
    /// The API server does not know it.
    #[error("the API server does not accept this token for the audience `{audience}`: {cause}")]
    Unknown {
        /// For whom it must have been made.
        audience: String,
        /// What the API server says.
        cause: String,
    },
    /// It is another client's.
    #[error("this is the token of `{user}`, and only `{expected}` may report")]
    OtherUser {
        /// Whose it is.
        user: String,
        /// Whose it should be.
        expected: String,
    },
    /// It is not bound to a pod on a node.
    #[error("this token names no node: mount it as a projected token (Kubernetes 1.30 or later)")]
    Unbound,
    /// It cannot be found out now.
    #[error("it cannot be found out whose this token is: {0}")]
    Unreviewed(String),
}

/// The pod of an agent, as its token proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentPod {
    /// The node that it runs on.
    pub node: String,
    /// Its UID.
    pub uid: String,
    /// When it was created, in seconds since 1970.
    pub created_unix_seconds: i64,
}

type Digest = [u8; 32];

/// The tokens of agents.
pub struct AgentTokens {
    client: Client,
    audience: String,
    namespace: String,
    /// The user name of the agents' ServiceAccount.
    user: String,
    known: Cache<Digest, Arc<AgentPod>>,
    refused: Cache<Digest, TokenRefusal>,
    reviews: Semaphore,
}

impl AgentTokens {
    /// Tokens for this audience, of pods in `namespace` with that user name.
    pub fn new(client: Client, audience: &str, namespace: &str, user: String) -> Self {
        let (audience, namespace) = (audience.to_owned(), namespace.to_owned());
        let known = Cache::builder().max_capacity(MOST_TOKENS).time_to_live(KNOWN_FOR).build();
        let refused = Cache::builder().max_capacity(MOST_TOKENS).time_to_live(REFUSED_FOR).build();
        let reviews = Semaphore::new(REVIEWS_AT_ONCE);
        Self { client, audience, namespace, user, known, refused, reviews }
    }

    /// The pod that sends this header.
    ///
    /// # Errors
    /// [`TokenRefusal`].
    pub async fn agent(&self, authorization: Option<&str>) -> Result<Arc<AgentPod>, TokenRefusal> {
        let token = authorization.and_then(|text| text.strip_prefix("Bearer "));
        let token = token.filter(|token| is_token(token)).ok_or(TokenRefusal::None)?;
        let digest: Digest = ring::digest::digest(&ring::digest::SHA256, token.as_bytes())
            .as_ref()
            .try_into()
            .expect("SHA-256 has 32 bytes");
        if let Some(refusal) = self.refused.get(&digest).await {
            return Err(refusal);
        }
        // One review for all concurrent calls with this token.
        let reviewed = self.known.try_get_with(digest, self.reviewed(token)).await;
        let refusal = match reviewed {
            Ok(pod) => return Ok(pod),
            Err(refusal) => TokenRefusal::clone(&refusal),
        };
        if !matches!(refusal, TokenRefusal::Unreviewed(_)) {
            self.refused.insert(digest, refusal.clone()).await;
        }
        Err(refusal)
    }

    async fn reviewed(&self, token: &str) -> Result<Arc<AgentPod>, TokenRefusal> {
        let _turn = self.reviews.acquire().await.expect("the semaphore is never closed");
        let asked = tokio::time::timeout(REVIEWED_WITHIN, self.asked(token)).await;
        asked.unwrap_or_else(|_| Err(TokenRefusal::Unreviewed("no answer in time".to_owned())))
    }

    async fn asked(&self, token: &str) -> Result<Arc<AgentPod>, TokenRefusal> {
        let unreviewed = |error: kube::Error| TokenRefusal::Unreviewed(error.to_string());
        let spec = TokenReviewSpec {
            audiences: Some(vec![self.audience.clone()]),
            token: token.to_owned(),
        };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let answer = reviews.create(&PostParams::default(), &review).await.map_err(unreviewed)?;
        let status = answer.status.unwrap_or_default();
        let audiences = status.audiences.unwrap_or_default();
        // An API server that knows no audiences leaves them out.
        if status.authenticated != Some(true) || !audiences.contains(&self.audience) {
            let cause = status.error.unwrap_or_else(|| "it is not valid".to_owned());
            return Err(TokenRefusal::Unknown { audience: self.audience.clone(), cause });
        }
        let (name, node, uid) = self.bound(&status.user.unwrap_or_default())?;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let pod = pods.get(&name).await.map_err(unreviewed)?;
        let created = pod.metadata.creation_timestamp.map(|time| time.0.as_second());
        let is_it = pod.metadata.uid.as_ref() == Some(&uid);
        let Some(created_unix_seconds) = created.filter(|_| is_it) else {
            return Err(TokenRefusal::Unbound);
        };
        Ok(Arc::new(AgentPod { node, uid, created_unix_seconds }))
    }

    /// Name, node and UID of the pod of an agent.
    fn bound(&self, user: &UserInfo) -> Result<(String, String, String), TokenRefusal> {
        let name = user.username.clone().unwrap_or_default();
        if name != self.user {
            return Err(TokenRefusal::OtherUser { user: name, expected: self.user.clone() });
        }
        let extra = |key: &str| user.extra.as_ref()?.get(key)?.first().cloned();
        match (extra(POD), extra(NODE), extra(POD_UID)) {
            (Some(name), Some(node), Some(uid)) => Ok((name, node, uid)),
            _ => Err(TokenRefusal::Unbound),
        }
    }
}

/// Whether a text has the form of a token: RFC 6750, section 2.1.
fn is_token(text: &str) -> bool {
    let is_legal = |c: char| c.is_ascii_alphanumeric() || "-._~+/=".contains(c);
    (1..=LONGEST_TOKEN).contains(&text.len()) && text.chars().all(is_legal)
}
