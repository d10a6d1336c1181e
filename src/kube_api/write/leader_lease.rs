//! The Lease that says which replica leads: read, and written in a version that was read.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::Request;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{GetParams, PostParams};

use crate::write::outcome::Cause;
use crate::write::writer::{ApiWriter, cause_of, object_of};

/// The number of the term. It grows with each holder.
const TERM: &str = "gpupack.dev/term";
/// The number of the term whose holder has given the Lease away.
const HANDED_OVER: &str = "gpupack.dev/handed-over";
/// Where the holder takes messages of its followers.
const ADDRESS: &str = "gpupack.dev/address";
/// The followers that know all Bindings that the holder may have on their way, by identity.
const INFORMED: &str = "gpupack.dev/informed";
/// What replicas show each other, so that no client can speak for them.
const SECRET: &str = "gpupack.dev/secret";

/// Most followers that are named.
const MOST_INFORMED: usize = 16;

/// Which Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    pub namespace: String,
    pub name: String,
}

/// What the Lease says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldLease {
    /// The version that was read; empty for a Lease that is to be created.
    pub version: String,
    /// The holder's identity; empty if it is free.
    pub holder: String,
    /// How long a holder that does not renew it keeps it.
    pub holds_for: Duration,
    /// The number of the holder's term.
    pub term: u64,
    /// The term whose holder has given the Lease away.
    pub handed_over: u64,
    /// How often the holder has changed.
    pub transitions: i32,
    /// When the holder began to hold it, in microseconds since 1970.
    pub acquired: i64,
    /// When it was last renewed, in microseconds since 1970. No process decides by it.
    pub renewed: i64,
    /// Where the holder takes messages of its followers.
    pub address: String,
    /// The followers that know all Bindings on their way.
    pub informed: Vec<String>,
    /// The secret of this term.
    pub secret: String,
}

/// The answer to a read or a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// The Lease, as it is now.
    Is(Box<HeldLease>),
    /// There is none.
    Missing,
    /// It has changed since it was read. Nothing was written.
    Changed,
    /// A read failed; or a write did, or it did not, or it will.
    Failed(Cause),
}

impl ApiWriter {
    /// Reads the Lease.
    pub async fn read_lease(&self, of: &LeaseName, within: Duration) -> LeaseAnswer {
        self.lease_answer(leases(of).get(&of.name, &GetParams::default()), within).await
    }

    /// Writes the Lease in the version that `held` has, or creates it.
    pub async fn write_lease(
        &self,
        of: &LeaseName,
        held: &HeldLease,
        within: Duration,
    ) -> LeaseAnswer {
        let params = PostParams::default();
        let request = serde_json::to_vec(&held.to_api(of))
            .map_err(kube::core::request::Error::SerializeBody)
            .and_then(|body| match held.version.is_empty() {
                true => leases(of).create(&params, body),
                false => leases(of).replace(&of.name, &params, body),
            });
        self.lease_answer(request, within).await
    }

    async fn lease_answer(
        &self,
        request: Result<Request<Vec<u8>>, kube::core::request::Error>,
        within: Duration,
    ) -> LeaseAnswer {
        let answer = match self.exchange(request, within).await {
            Ok(answer) => answer,
            Err(cause) => return LeaseAnswer::Failed(cause),
        };
        match answer.status {
            200..=299 => match object_of::<Lease>(&answer) {
                Ok(lease) => LeaseAnswer::Is(Box::new(HeldLease::from_api(&lease))),
                Err(cause) => LeaseAnswer::Failed(cause),
            },
            404 => LeaseAnswer::Missing,
            409 => LeaseAnswer::Changed,
            _ => LeaseAnswer::Failed(cause_of(&answer)),
        }
    }
}

fn leases(of: &LeaseName) -> kube::core::Request {
    let namespace = &of.namespace;
    kube::core::Request::new(format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"))
}

impl HeldLease {
    /// Whether its last holder has given it away. One that a person has emptied expires instead.
    pub fn is_handed_over(&self) -> bool {
        self.holder.is_empty() && self.handed_over == self.term && self.term > 0
    }

    /// Reads a Lease. What is missing or cannot be read is empty or zero.
    fn from_api(lease: &Lease) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        let annotation = |key: &str| {
            let annotations = lease.metadata.annotations.as_ref();
            annotations.and_then(|all| all.get(key)).cloned().unwrap_or_default()
        };
        let seconds = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
        Self {
            version: lease.metadata.resource_version.clone().unwrap_or_default(),
            holder: spec.holder_identity.unwrap_or_default(),
            holds_for: Duration::from_secs(seconds),
            term: annotation(TERM).parse().unwrap_or(0),
            handed_over: annotation(HANDED_OVER).parse().unwrap_or(0),
            transitions: spec.lease_transitions.unwrap_or(0),
            acquired: spec.acquire_time.map_or(0, |time| time.0.as_microsecond()),
            renewed: spec.renew_time.map_or(0, |time| time.0.as_microsecond()),
            address: annotation(ADDRESS),
            informed: annotation(INFORMED)
                .split_whitespace()
                .take(MOST_INFORMED)
                .map(str::to_owned)
                .collect(),
            secret: annotation(SECRET),
        }
    }

    fn to_api(&self, of: &LeaseName) -> Lease {
        let annotations = [
            (TERM, self.term.to_string()),
            (HANDED_OVER, self.handed_over.to_string()),
            (ADDRESS, self.address.clone()),
            (INFORMED, self.informed.join(" ")),
            (SECRET, self.secret.clone()),
        ];
        let annotations: BTreeMap<String, String> =
            annotations.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        Lease {
            metadata: ObjectMeta {
                name: Some(of.name.clone()),
                namespace: Some(of.namespace.clone()),
                resource_version: Some(self.version.clone()).filter(|version| !version.is_empty()),
                annotations: Some(annotations),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.holder.clone()),
                lease_duration_seconds: i32::try_from(self.holds_for.as_secs().max(1)).ok(),
                lease_transitions: Some(self.transitions),
                acquire_time: Timestamp::from_microsecond(self.acquired).ok().map(MicroTime),
                renew_time: Timestamp::from_microsecond(self.renewed).ok().map(MicroTime),
                ..LeaseSpec::default()
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_read_as_it_was_written() {
        let of = LeaseName { namespace: "a".to_owned(), name: "b".to_owned() };
        let held = HeldLease {
            version: "7".to_owned(),
            holder: "pod-a_1f".to_owned(),
            holds_for: Duration::from_secs(3),
            term: 1_767_225_600,
            handed_over: 1_767_225_500,
            transitions: 2,
            acquired: 1_767_225_600_000_001,
            renewed: 1_767_225_601_000_002,
            address: "http://10.0.0.7:8080".to_owned(),
            informed: vec!["pod-b_2e".to_owned(), "pod-c_3d".to_owned()],
            secret: "s".to_owned(),
        };
        let text = serde_json::to_string(&held.to_api(&of)).unwrap();
        assert_eq!(HeldLease::from_api(&serde_json::from_str(&text).unwrap()), held);
        let given = HeldLease { holder: String::new(), handed_over: held.term, ..held.clone() };
        let emptied = HeldLease { holder: String::new(), ..held.clone() };
        let is_given = [&given, &emptied, &held].map(HeldLease::is_handed_over);
        assert_eq!(is_given, [true, false, false]);
        assert!(!HeldLease::default().is_handed_over());
        // One of another program, or one that people edited.
        let other = serde_json::json!({"metadata": {"annotations": {TERM: "x"}}, "spec": {"holderIdentity": "y"}});
        let seen = HeldLease::from_api(&serde_json::from_value(other).unwrap());
        assert_eq!(seen, HeldLease { holder: "y".to_owned(), ..HeldLease::default() });
    }
}
