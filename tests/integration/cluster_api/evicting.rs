//! Evictions: requested once, and what each answer means.

use kube_api::write::evict::{EvictOutcome, EvictionRun};
use kube_api::write::target::PodKey;
use wire::ids::PodUid;

use crate::harness::fake_api_server::{Fake, Fault};

/// The outcome of an eviction of the pod with this UID, in one word.
async fn evict(fake: &Fake, uid: &str) -> String {
    let key = PodKey::new("team-a", "infer").unwrap();
    match fake.writer().evict(&key, &PodUid::new(uid), EvictionRun::Real).await {
        EvictOutcome::Evicted => "evicted".to_owned(),
        EvictOutcome::Blocked { message } => format!("blocked: {message}"),
        EvictOutcome::Gone => "gone".to_owned(),
        EvictOutcome::Refused { code, .. } => format!("refused {code}"),
        EvictOutcome::Undecided { .. } => "undecided".to_owned(),
    }
}

#[tokio::test]
async fn a_pod_is_evicted_by_name_and_uid() {
    let fake = Fake::with_pod();
    assert_eq!(evict(&fake, "u2").await, "gone", "another pod of that name");
    assert_eq!(evict(&fake, "u1").await, "evicted");
    assert_eq!(evict(&fake, "u1").await, "gone");
    let eviction = "POST /api/v1/namespaces/team-a/pods/infer/eviction";
    fake.bed(|bed| assert_eq!(bed.requests, [eviction; 3], "nothing is deleted"));
}

#[tokio::test]
async fn rejections_are_classified_and_nothing_is_retried() {
    for (fault, outcome, stays) in [
        (Fault::Answer(429), "blocked: scripted", true),
        (Fault::Answer(403), "refused 403", true),
        (Fault::Answer(422), "refused 422", true),
        (Fault::Answer(500), "undecided", true),
        (Fault::Answer(503), "undecided", true),
        (Fault::CutAfterCommit, "undecided", false),
        (Fault::SilentAfterCommit, "undecided", false),
        (Fault::HalfBody, "evicted", false),
    ] {
        let fake = Fake::with_pod();
        fake.bed(|bed| bed.on_evict.push_back(fault));
        assert_eq!(evict(&fake, "u1").await, outcome, "{fault:?}");
        fake.bed(|bed| {
            assert_eq!((bed.pod.is_some(), bed.requests.len()), (stays, 1), "{fault:?}");
        });
    }
}
