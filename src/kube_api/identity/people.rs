//! What a person, or Prometheus, may see: the API server says it, as for its own resources.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use moka::future::Cache;
use tokio::sync::Semaphore;

use crate::identity::known_tokens::{
    ASKED_WITHIN, KNOWN_FOR as TOKENS_KNOWN_FOR, KnownTokens, TokenRefusal, late, unreviewed,
    user_of,
};

/// The API group of the queries.
pub const GROUP: &str = "inspection.gpupack.dev";

/// The resource that a person must be allowed to get.
pub const RESOURCE: &str = "cluster";

/// The resource that a person must be allowed to update, to clear a GPU.
pub const GPUS: &str = "gpus";

/// How long an answer about a right is remembered.
const KNOWN_FOR: Duration = Duration::from_secs(30);

/// Most answers that are remembered.
const MOST_RIGHTS: u64 = 100_000;

/// Questions at a time.
const ASKED_AT_ONCE: usize = 32;

/// What the API server knows of a token, not of its user. With it each token of a user would be another
/// person, with reviews of its own.
const TOKEN_NAME: &str = "authentication.kubernetes.io/credential-id";

/// A user of the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Person {
    pub name: String,
    /// UID, which few API servers know.
    pub uid: Option<String>,
    pub groups: Vec<String>,
    /// What else the API server knows of the user.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl From<UserInfo> for Person {
    fn from(user: UserInfo) -> Self {
        let mut extra = user.extra.unwrap_or_default();
        extra.remove(TOKEN_NAME);
        Self {
            name: user.username.unwrap_or_default(),
            uid: user.uid.filter(|uid| !uid.is_empty()),
            groups: user.groups.unwrap_or_default(),
            extra,
        }
    }
}

/// Something that not everyone may do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// To query the cluster, by page or command line.
    Inspect,
    /// To clear GPUs.
    ClearGpus,
    /// To list the pods of a namespace; without one, of all.
    ListPods(Option<Arc<str>>),
    /// To call a path of the port of metrics: verb and path.
    Path(&'static str, &'static str),
}

/// People by their tokens, and what they may do.
pub struct People {
    client: Client,
    known: KnownTokens<Person>,
    rights: Cache<(Arc<Person>, Right), bool>,
    questions: Semaphore,
}

impl People {
    /// The users of this API server.
    pub fn new(client: Client) -> Self {
        let rights = Cache::builder().max_capacity(MOST_RIGHTS).time_to_live(KNOWN_FOR).build();
        Self {
            client,
            known: KnownTokens::new(TOKENS_KNOWN_FOR),
            rights,
            questions: Semaphore::new(ASKED_AT_ONCE),
        }
    }

    /// The user who sends this header, from this address.
    ///
    /// # Errors
    /// [`TokenRefusal`].
    pub fn sender<'a>(
        &'a self,
        authorization: Option<&'a str>,
        address: IpAddr,
    ) -> BoxFuture<'a, Result<Arc<Person>, TokenRefusal>> {
        self.known.sender(authorization, address, |token| self.reviewed(token)).boxed()
    }

    async fn reviewed(&self, token: &str) -> Result<Person, TokenRefusal> {
        user_of(&self.client, token, None).await.map(Person::from)
    }

    /// Whether a user has a right.
    ///
    /// # Errors
    /// The API server does not say.
    pub fn may<'a>(
        &'a self,
        person: &'a Arc<Person>,
        right: Right,
    ) -> BoxFuture<'a, Result<bool, TokenRefusal>> {
        self.known_right(person, right).boxed()
    }

    async fn known_right(&self, person: &Arc<Person>, right: Right) -> Result<bool, TokenRefusal> {
        let question = review(person, &right);
        let answer = self.rights.try_get_with((Arc::clone(person), right), async {
            let _turn = self.questions.acquire().await.expect("the semaphore is never closed");
            let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
            let params = PostParams::default();
            let created = reviews.create(&params, &question);
            let answer = tokio::time::timeout(ASKED_WITHIN, created).await.map_err(|_| late())?;
            let status = answer.map_err(unreviewed)?.status;
            Ok(status.is_some_and(|status| status.allowed && status.denied != Some(true)))
        });
        answer.await.map_err(|refusal: Arc<TokenRefusal>| TokenRefusal::clone(&refusal))
    }
}

fn review(person: &Person, right: &Right) -> SubjectAccessReview {
    let resource = match right {
        Right::Inspect => Some(("get", GROUP, RESOURCE, None)),
        Right::ClearGpus => Some(("update", GROUP, GPUS, None)),
        Right::ListPods(namespace) => Some(("list", "", "pods", namespace.as_deref())),
        Right::Path(..) => None,
    };
    let resource_attributes =
        resource.map(|(verb, group, resource, namespace)| ResourceAttributes {
            verb: Some(verb.to_owned()),
            group: Some(group.to_owned()),
            resource: Some(resource.to_owned()),
            namespace: namespace.map(str::to_owned),
            ..ResourceAttributes::default()
        });
    let non_resource_attributes = match right {
        Right::Path(verb, path) => Some(NonResourceAttributes {
            verb: Some((*verb).to_owned()),
            path: Some((*path).to_owned()),
        }),
        Right::Inspect | Right::ClearGpus | Right::ListPods(_) => None,
    };
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(person.name.clone()),
            uid: person.uid.clone(),
            groups: Some(person.groups.clone()),
            extra: Some(person.extra.clone()),
            resource_attributes,
            non_resource_attributes,
        },
        ..SubjectAccessReview::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_of_a_user_are_one_person() {
        let user = |extra: [&str; 2]| {
            let extra = extra.map(|name| (name.to_owned(), vec!["x".to_owned()]));
            let name = Some("a".to_owned());
            UserInfo { username: name, extra: Some(extra.into()), ..UserInfo::default() }
        };
        let pod = "authentication.kubernetes.io/pod-name";
        let person = Person::from(user([TOKEN_NAME, pod]));
        assert_eq!(person.extra.keys().collect::<Vec<_>>(), [pod]);
    }
}
