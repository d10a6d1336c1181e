//! Evictions: they end a pod only if disruption budgets allow it. gpupack never deletes a pod.

use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::api::PostParams;

use crate::write::outcome::Cause;
use crate::write::target::PodKey;
use crate::write::writer::{ApiWriter, cause_of, is_definite, message_of, pods};
use wire::ids::PodUid;

/// The outcome of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvictOutcome {
    /// The API server ends the pod.
    Evicted,
    /// A disruption budget forbids it now, or the API server limits requests (429).
    Blocked { message: String },
    /// There is no such pod (404), or another pod has its name (409).
    Gone,
    /// Refused for good (4xx, except those above and 408).
    Refused { code: u16, message: String },
    /// It may have been evicted, or may still be.
    Undecided {
        /// Why the outcome is not known.
        cause: Cause,
    },
}

/// Whether an eviction is only tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionRun {
    /// The API server answers as it would, and does nothing.
    Dry,
    Real,
}

impl ApiWriter {
    /// Requests an eviction once, with the pod's own grace period.
    pub async fn evict(&self, key: &PodKey, uid: &PodUid, run: EvictionRun) -> EvictOutcome {
        let reply = match self.write(eviction_request(key, uid, run)).await {
            Ok(reply) => reply,
            Err(cause) => return EvictOutcome::Undecided { cause },
        };
        match reply.status {
            200..=299 => EvictOutcome::Evicted,
            404 | 409 => EvictOutcome::Gone,
            429 => EvictOutcome::Blocked { message: message_of(&reply) },
            code if is_definite(code) => {
                EvictOutcome::Refused { code, message: message_of(&reply) }
            }
            _ => EvictOutcome::Undecided { cause: cause_of(&reply) },
        }
    }
}

fn eviction_request(
    key: &PodKey,
    uid: &PodUid,
    run: EvictionRun,
) -> Result<hyper::Request<Vec<u8>>, kube::core::request::Error> {
    let preconditions = Preconditions { uid: Some(uid.to_string()), ..Preconditions::default() };
    let eviction = Eviction {
        metadata: ObjectMeta {
            name: Some(key.name().to_owned()),
            namespace: Some(key.namespace().to_owned()),
            ..ObjectMeta::default()
        },
        delete_options: Some(DeleteOptions {
            preconditions: Some(preconditions),
            dry_run: (run == EvictionRun::Dry).then(|| vec!["All".to_owned()]),
            ..DeleteOptions::default()
        }),
    };
    let body = serde_json::to_vec(&eviction).map_err(kube::core::request::Error::SerializeBody)?;
    pods(key).create_subresource("eviction", key.name(), &PostParams::default(), body)
}
