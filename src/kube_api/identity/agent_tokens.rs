//! Which agent sends a token. One of a deleted pod may be believed for a minute.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};

use crate::identity::known_tokens::{KNOWN_FOR, KnownTokens, TokenRefusal, unreviewed, user_of};

/// What the API server adds to the user of a token that is bound to a pod.
const NODE: &str = "authentication.kubernetes.io/node-name";
const POD: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// The pod of an agent, as its token proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentPod {
    /// The node that it runs on.
    pub node: String,
    pub uid: String,
    /// When it was created, in seconds since 1970.
    pub created_unix_seconds: i64,
}

/// The tokens of agents.
pub struct AgentTokens {
    client: Client,
    audience: String,
    namespace: String,
    /// The user name of the agents' ServiceAccount.
    user: String,
    known: KnownTokens<AgentPod>,
}

impl AgentTokens {
    /// Tokens for this audience, of pods in `namespace` with that user name.
    pub fn new(client: Client, audience: &str, namespace: &str, user: String) -> Self {
        let (audience, namespace) = (audience.to_owned(), namespace.to_owned());
        Self { client, audience, namespace, user, known: KnownTokens::new(KNOWN_FOR) }
    }

    /// The same that asks the API server about each token again after another time than a minute.
    #[must_use]
    pub fn known_for(self, time: Duration) -> Self {
        Self { known: KnownTokens::new(time), ..self }
    }

    /// The pod that sends this header, from this address. Boxed: otherwise the code that reads its pod would be
    /// built again in each crate that waits for this.
    ///
    /// # Errors
    /// [`TokenRefusal`].
    pub fn agent<'a>(
        &'a self,
        authorization: Option<&'a str>,
        address: IpAddr,
    ) -> BoxFuture<'a, Result<Arc<AgentPod>, TokenRefusal>> {
        self.known.sender(authorization, address, |token| self.reviewed(token)).boxed()
    }

    async fn reviewed(&self, token: &str) -> Result<AgentPod, TokenRefusal> {
        let user = user_of(&self.client, token, Some(&self.audience)).await?;
        let (name, node, uid) = self.bound(&user)?;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let pod = pods.get(&name).await.map_err(unreviewed)?;
        let created = pod.metadata.creation_timestamp.map(|time| time.0.as_second());
        let is_same = pod.metadata.uid.as_ref() == Some(&uid);
        let created_unix_seconds = created.filter(|_| is_same).ok_or(TokenRefusal::Unbound)?;
        Ok(AgentPod { node, uid, created_unix_seconds })
    }

    /// Name, node and UID of the pod of an agent.
    fn bound(&self, user: &UserInfo) -> Result<(String, String, String), TokenRefusal> {
        let name = user.username.clone().unwrap_or_default();
        if name != self.user {
            return Err(TokenRefusal::OtherUser { user: name, expected: self.user.clone() });
        }
        match (extra(user, POD), extra(user, NODE), extra(user, POD_UID)) {
            (Some(name), Some(node), Some(uid)) => Ok((name, node, uid)),
            _ => Err(TokenRefusal::Unbound),
        }
    }
}

fn extra(user: &UserInfo, key: &str) -> Option<String> {
    user.extra.as_ref()?.get(key)?.first().cloned()
}
