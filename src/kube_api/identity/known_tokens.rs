//! Whose a token is: the API server says it. Answers are kept for a while, by the digest of the token.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::api::PostParams;
use kube::{Api, Client};
use moka::future::Cache;
use tokio::sync::Semaphore;

/// How long it is remembered whose a token is.
pub(crate) const KNOWN_FOR: Duration = Duration::from_secs(60);

/// How long a refusal is remembered.
const REFUSED_FOR: Duration = Duration::from_secs(10);

/// Most tokens that are remembered of each kind.
const MOST_TOKENS: u64 = 20_000;

/// How long it is remembered that a token was accepted once: the life of an agent's token.
const ACCEPTED_FOR: Duration = Duration::from_secs(3_600);

/// Refused tokens that an address may send in this time. Then its unknown tokens are not reviewed: they
/// would make the API server busy.
const MOST_REFUSED: u32 = 50;
const REFUSED_IN: Duration = Duration::from_secs(10);

/// Most addresses whose refused tokens are counted.
const MOST_ADDRESSES: u64 = 20_000;

/// Longest token. Those of ServiceAccounts have about 1 KiB.
const LONGEST_TOKEN: usize = 16 << 10;

/// Reviews at a time: any client may send tokens.
const REVIEWS_AT_ONCE: usize = 16;

/// Longest time of a question to the API server.
pub(crate) const ASKED_WITHIN: Duration = Duration::from_secs(3);

/// Why a token is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefusal {
    /// No token, or no text that could be one.
    #[error("send a token, as `Authorization: Bearer …`")]
    None,
    /// The API server does not know it.
    #[error("the API server does not accept this token{purpose}: {cause}")]
    Unknown {
        /// For whom it must have been made, in words; empty for the API server itself.
        purpose: String,
        /// What the API server says.
        cause: String,
    },
    #[error("this is the token of `{user}`, and only `{expected}` may report")]
    OtherUser { user: String, expected: String },
    /// It is not bound to a pod on a node.
    #[error("this token names no node: mount it as a projected token (Kubernetes 1.30 or later)")]
    Unbound,
    /// The address has sent too many that were refused.
    #[error("this address has sent too many unknown tokens: try again in some seconds")]
    TooMany,
    /// It cannot be found out now.
    #[error("the API server cannot be asked about this token: {0}")]
    Unreviewed(String),
}

type Digest = [u8; 32];

/// Who sends a token, as far as it was found out.
pub(crate) struct KnownTokens<T> {
    known: Cache<Digest, Arc<T>>,
    refused: Cache<Digest, TokenRefusal>,
    accepted: Cache<Digest, ()>,
    refused_of: Cache<IpAddr, Arc<AtomicU32>>,
    reviews: Semaphore,
}

impl<T: Send + Sync + 'static> KnownTokens<T> {
    /// Nothing is known yet; whose a token is will be remembered for `known_for`.
    pub(crate) fn new(known_for: Duration) -> Self {
        Self {
            known: Cache::builder().max_capacity(MOST_TOKENS).time_to_live(known_for).build(),
            refused: Cache::builder().max_capacity(MOST_TOKENS).time_to_live(REFUSED_FOR).build(),
            accepted: Cache::builder().max_capacity(MOST_TOKENS).time_to_live(ACCEPTED_FOR).build(),
            refused_of: Cache::builder()
                .max_capacity(MOST_ADDRESSES)
                .time_to_live(REFUSED_IN)
                .build(),
            reviews: Semaphore::new(REVIEWS_AT_ONCE),
        }
    }

    /// Who sends this header, from this address. `ask` finds out whose an unknown token is.
    ///
    /// # Errors
    /// [`TokenRefusal`].
    pub(crate) async fn sender<'a, F>(
        &self,
        authorization: Option<&'a str>,
        address: IpAddr,
        ask: impl FnOnce(&'a str) -> F,
    ) -> Result<Arc<T>, TokenRefusal>
    where
        F: Future<Output = Result<T, TokenRefusal>>,
    {
        let token = authorization.and_then(|text| text.strip_prefix("Bearer "));
        let token = token.filter(|token| is_token(token)).ok_or(TokenRefusal::None)?;
        let digest: Digest = ring::digest::digest(&ring::digest::SHA256, token.as_bytes())
            .as_ref()
            .try_into()
            .expect("SHA-256 has 32 bytes");
        if let Some(refusal) = self.refused.get(&digest).await {
            return Err(refusal);
        }
        let refused = self.refused_of.get_with(address, async { Arc::default() }).await;
        let is_busy = || refused.load(Ordering::Relaxed) >= MOST_REFUSED;
        let was_accepted = self.accepted.get(&digest).await.is_some();
        if is_busy() && !was_accepted {
            return Err(TokenRefusal::TooMany);
        }
        // One review for all concurrent calls with this token.
        let reviewed = self.known.try_get_with(digest, async {
            let _turn = self.reviews.acquire().await.expect("the semaphore is never closed");
            // Others of this address, which came at the same time, were refused meanwhile.
            if is_busy() && !was_accepted {
                return Err(TokenRefusal::TooMany);
            }
            let answer = tokio::time::timeout(ASKED_WITHIN, ask(token)).await;
            let answer = answer.unwrap_or_else(|_| Err(late()));
            if answer.as_ref().is_err_and(is_about_the_token) {
                refused.fetch_add(1, Ordering::Relaxed); // before the next one has its turn
            }
            answer.map(Arc::new)
        });
        let refusal = match reviewed.await {
            Ok(sender) => {
                self.accepted.insert(digest, ()).await;
                return Ok(sender);
            }
            Err(refusal) => TokenRefusal::clone(&refusal),
        };
        if is_about_the_token(&refusal) {
            self.refused.insert(digest, refusal.clone()).await;
        }
        Err(refusal)
    }
}

/// Whether the token is refused for every client and at every time.
fn is_about_the_token(refusal: &TokenRefusal) -> bool {
    !matches!(refusal, TokenRefusal::Unreviewed(_) | TokenRefusal::TooMany)
}

/// The user of a token that was made for this audience; without one, for the API server itself.
///
/// # Errors
/// [`TokenRefusal`].
pub(crate) async fn user_of(
    client: &Client,
    token: &str,
    audience: Option<&str>,
) -> Result<UserInfo, TokenRefusal> {
    let audiences = audience.map(|audience| vec![audience.to_owned()]);
    let spec = TokenReviewSpec { audiences, token: token.to_owned() };
    let review = TokenReview { spec, ..TokenReview::default() };
    let reviews: Api<TokenReview> = Api::all(client.clone());
    let answer = reviews.create(&PostParams::default(), &review).await;
    let status = answer.map_err(unreviewed)?.status.unwrap_or_default();
    let audiences = status.audiences.unwrap_or_default();
    // An API server that knows no audiences leaves them out.
    let is_meant = audience.is_none_or(|audience| audiences.iter().any(|one| one == audience));
    if status.authenticated != Some(true) || !is_meant {
        let purpose = audience.map(|audience| format!(" for the audience `{audience}`"));
        let cause = status.error.unwrap_or_else(|| "it is not valid".to_owned());
        return Err(TokenRefusal::Unknown { purpose: purpose.unwrap_or_default(), cause });
    }
    Ok(status.user.unwrap_or_default())
}

/// No answer of the API server in time.
pub(crate) fn late() -> TokenRefusal {
    TokenRefusal::Unreviewed("no answer in time".to_owned())
}

/// No answer of the API server.
pub(crate) fn unreviewed(error: kube::Error) -> TokenRefusal {
    TokenRefusal::Unreviewed(error.to_string())
}

/// Whether a text has the form of a token: RFC 6750, section 2.1.
fn is_token(text: &str) -> bool {
    (1..=LONGEST_TOKEN).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-._~+/=".contains(c))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[tokio::test]
    async fn unknown_tokens_that_come_at_once_are_limited_like_those_that_come_one_by_one() {
        let tokens: KnownTokens<()> = KnownTokens::new(KNOWN_FOR);
        let (asked, address) = (AtomicU32::new(0), IpAddr::V4(Ipv4Addr::LOCALHOST));
        let send = async |at: u32| {
            let header = format!("Bearer unknown-{at}");
            let ask = async |_: &str| {
                asked.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                Err(TokenRefusal::Unbound)
            };
            tokens.sender(Some(&header), address, ask).await
        };
        let answers = futures::future::join_all((0..1_000).map(send)).await;
        let most = MOST_REFUSED + u32::try_from(REVIEWS_AT_ONCE).unwrap();
        assert!((MOST_REFUSED..=most).contains(&asked.load(Ordering::Relaxed)), "{asked:?}");
        let too_many =
            answers.iter().filter(|answer| **answer == Err(TokenRefusal::TooMany)).count();
        assert_eq!(too_many + asked.load(Ordering::Relaxed) as usize, 1_000);
    }
}
