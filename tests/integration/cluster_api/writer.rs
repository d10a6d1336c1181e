//! The writer to the API server, against a fake one with named scenarios.
//!
//! `binding` tests the same for the verb, with the ledger, and `overlapping` for two processes.
//! Each scenario asserts what `bind` says and what `settle` makes of it.

#![expect(clippy::unwrap_used, reason = "test fixtures outside of test functions")]

use std::cmp::Ordering;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use engine::hardware::pool::ConfiguredIsolation;
use engine::model::reservation::{PlacedDevice, Placement};
use kube_api::connection::without_retries;
use kube_api::containers::mps::ClientLimits;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::write::events::{Notice, NoticeCounts, NoticeReason, notices};
use kube_api::write::outcome::{BindOutcome, Cause, PatchOutcome, Settled};
use kube_api::write::target::{BindTarget, PodKey};
use runtime::clock::Clock;
use wire::ids::{DeviceId, NodeName, PodUid};
use wire::units::{Demand, MemMib, Share, Timestamp};

use serde_json::Value;

use crate::harness::fake_api_server::{Fake, Fault, TIMEOUT, connected};

fn target() -> BindTarget {
    let pod = SeenPod::from_json(
        r#"{"metadata":{"uid":"u1","namespace":"team-a","name":"infer","resourceVersion":"7"}}"#,
    )
    .unwrap();
    let demand = Demand { memory: MemMib::new(4), share: Share::from_millionths(5) };
    let devices = vec![PlacedDevice { id: DeviceId::new("GPU-a").unwrap(), demand }];
    let node = NodeName::new("n1");
    let placement = Placement {
        node,
        devices,
        isolation: ConfiguredIsolation::None,
        guest: None,
        spots: Vec::new(),
    };
    BindTarget::new(&pod, &placement, &ClientLimits::default()).unwrap()
}

/// The outcome in one word, with the status if there is one.
fn reported(outcome: &BindOutcome) -> String {
    match outcome {
        BindOutcome::Bound => "bound".to_owned(),
        BindOutcome::Conflict => "conflict".to_owned(),
        BindOutcome::Gone => "gone".to_owned(),
        BindOutcome::Refused { code, .. } => format!("refused {code}"),
        BindOutcome::Undecided { cause: Cause::Status { code, .. } } => format!("undecided {code}"),
        BindOutcome::Undecided { cause: Cause::Timeout } => "undecided timeout".to_owned(),
        BindOutcome::Undecided { cause: Cause::Transport { .. } } => "undecided cut".to_owned(),
        BindOutcome::Undecided { cause: Cause::NotLeading } => "undecided term".to_owned(),
        BindOutcome::Undecided { cause: Cause::Body { .. } } => "undecided body".to_owned(),
    }
}

fn settled_events(settled: &Settled) -> String {
    match settled {
        Settled::Bound { pod } => format!("bound {}", node_of(pod)),
        Settled::NotBound => "not bound".to_owned(),
        Settled::BoundElsewhere { pod } => format!("elsewhere {}", node_of(pod)),
        Settled::Gone => "gone".to_owned(),
        Settled::StillUndecided { .. } => "undecided".to_owned(),
    }
}

fn node_of(pod: &k8s_openapi::api::core::v1::Pod) -> String {
    pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default()
}

/// Binds and settles; what both say.
async fn outcome(fake: &Fake) -> (String, String) {
    let (writer, target) = (fake.writer(), target());
    let bound = reported(&writer.bind(&target).await);
    (bound, settled_events(&writer.settle(&target).await))
}

async fn check(fake: Fake, bound: &str, settled: &str) -> Fake {
    assert_eq!(outcome(&fake).await, (bound.to_owned(), settled.to_owned()));
    fake
}

#[tokio::test]
async fn created_names_node_and_devices_in_one_write() {
    let fake = check(Fake::with_pod(), "bound", "bound n1").await;
    fake.bed(|bed| {
        let pod = bed.pod.as_ref().unwrap();
        let devices = &pod.annotations["placed.gpupack.dev/devices"];
        assert_eq!((pod.version, devices.as_str()), (8, "runtime.nvidia.com/gpu=GPU-a"));
        assert_eq!(bed.requests.len(), 2, "{:?}", bed.requests);
    });
}

#[tokio::test]
async fn a_conflict_with_our_own_earlier_binding_is_bound() {
    let fake = Fake::with_pod().on_bind(Fault::SilentAfterCommit);
    let (writer, target) = (fake.writer(), target());
    assert_eq!(reported(&writer.bind(&target).await), "undecided timeout");
    check(fake, "conflict", "bound n1").await;
}

#[tokio::test]
async fn a_conflict_with_another_binding_is_bound_elsewhere() {
    let fake = Fake::with_pod();
    fake.bed(|bed| bed.pod.as_mut().unwrap().node = Some("n2".to_owned()));
    check(fake, "conflict", "elsewhere n2").await;
    // The same node without our placement is not our Binding either.
    let fake = Fake::with_pod();
    fake.bed(|bed| bed.pod.as_mut().unwrap().node = Some("n1".to_owned()));
    check(fake, "conflict", "elsewhere n1").await;
}

#[tokio::test]
async fn a_conflict_with_a_newer_version_is_not_bound_and_writes_nothing() {
    let fake = Fake::with_pod();
    fake.bed(|bed| bed.pod.as_mut().unwrap().version = 9);
    let fake = check(fake, "conflict", "not bound").await;
    fake.bed(|bed| assert_eq!(bed.pod.as_ref().unwrap().version, 9));
}

#[tokio::test]
async fn a_deleted_pod_is_gone() {
    check(Fake::default(), "gone", "gone").await;
}

#[tokio::test]
async fn a_replaced_pod_of_the_same_name_is_gone() {
    let fake = Fake::with_pod();
    fake.bed(|bed| bed.pod.as_mut().unwrap().uid = "u2".to_owned());
    check(fake, "conflict", "gone").await;
    // Replaced between the read and the fence: the fence names the UID and is rejected.
    let fake = Fake::with_pod().on_bind(Fault::Answer(500));
    let (writer, target) = (fake.writer(), target());
    assert_eq!(reported(&writer.bind(&target).await), "undecided 500");
    fake.bed(|bed| bed.pod.as_mut().unwrap().uid = "u2".to_owned());
    let fenced = writer.write_fence(target.key(), target.uid(), None, "x").await;
    assert!(matches!(fenced, PatchOutcome::Refused { code: 422, .. }), "{fenced:?}");
    fake.bed(|bed| assert!(bed.pod.as_ref().unwrap().annotations.is_empty()));
}

#[tokio::test]
async fn definite_rejections_differ_from_undecided_answers() {
    for (code, bound) in [
        (400, "refused 400"),
        (401, "refused 401"),
        (403, "refused 403"),
        (422, "refused 422"),
        (302, "undecided 302"),
        (408, "undecided 408"),
        (429, "undecided 429"),
        (500, "undecided 500"),
        (503, "undecided 503"),
        (504, "undecided 504"),
    ] {
        let fake = check(Fake::with_pod().on_bind(Fault::Answer(code)), bound, "not bound").await;
        fake.bed(|bed| {
            let posts = bed.requests.iter().filter(|reported| reported.starts_with("POST")).count();
            assert_eq!(posts, 1, "{code} is not tried again");
        });
    }
}

#[tokio::test]
async fn a_cut_connection_or_a_lost_answer_after_the_commit_is_bound() {
    check(Fake::with_pod().on_bind(Fault::CutAfterCommit), "undecided cut", "bound n1").await;
    let fake = Fake::with_pod().on_bind(Fault::SilentAfterCommit);
    check(fake, "undecided timeout", "bound n1").await;
    // A success whose body is broken off is a success.
    check(Fake::with_pod().on_bind(Fault::HalfBody), "bound", "bound n1").await;
}

#[tokio::test]
async fn a_late_binding_fails_after_the_fence() {
    let fake = Fake::with_pod().on_bind(Fault::LateAfterFence);
    let fake = check(fake, "undecided timeout", "not bound").await;
    fake.bed(|bed| {
        assert_eq!(bed.late_answers, [409]);
        assert_eq!(bed.pod.as_ref().unwrap().node, None);
    });
}

#[tokio::test]
async fn a_late_binding_before_the_fence_is_detected() {
    let fake = Fake::with_pod().on_bind(Fault::LateBeforeFence);
    let fake = check(fake, "undecided timeout", "bound n1").await;
    fake.bed(|bed| assert_eq!(bed.late_answers, [201]));
}

#[tokio::test]
async fn nothing_is_settled_while_the_api_server_does_not_answer() {
    let fake = Fake::with_pod().on_bind(Fault::LateBeforeFence);
    fake.bed(|bed| bed.on_read.push_back(Fault::SilentAfterCommit));
    check(fake, "undecided timeout", "undecided").await;
    // A fence without an answer is read back: it was written.
    let fake = Fake::with_pod().on_bind(Fault::Answer(503));
    fake.bed(|bed| bed.on_fence.push_back(Fault::CutAfterCommit));
    check(fake, "undecided 503", "not bound").await;
    // A fence without effect settles nothing.
    for code in [409, 422, 429, 500] {
        let fake = Fake::with_pod().on_bind(Fault::Answer(503));
        fake.bed(|bed| bed.on_fence.push_back(Fault::Answer(code)));
        check(fake, "undecided 503", "undecided").await;
    }
    let fake = Fake::with_pod().on_bind(Fault::Answer(503));
    fake.bed(|bed| bed.on_fence.push_back(Fault::HalfBody));
    check(fake, "undecided 503", "not bound").await;
}

#[tokio::test]
async fn a_fence_with_a_version_changes_only_that_version() {
    let fake = Fake::with_pod();
    let (writer, target) = (fake.writer(), target());
    let stale = writer.write_fence(target.key(), target.uid(), Some("6"), "a").await;
    assert_eq!(stale, PatchOutcome::Conflict);
    let fenced = writer.write_fence(target.key(), target.uid(), Some("7"), "a").await;
    assert!(matches!(fenced, PatchOutcome::Patched { .. }), "{fenced:?}");
    assert_eq!(reported(&writer.bind(&target).await), "conflict");
    let pod = writer.read_back(target.key()).await.unwrap().unwrap();
    let value = &pod.metadata.annotations.as_ref().unwrap()["placed.gpupack.dev/fence"];
    assert!(value.ends_with(" a"), "{value}");
    let seen = SeenPod::from_api(&pod);
    assert_eq!(writer.fenced(seen.fence), Ordering::Equal, "who made it stands before it");
    assert_ne!(fake.writer().fenced(seen.fence), Ordering::Equal, "another process");
}

#[tokio::test]
async fn a_fence_does_not_overwrite_the_fence_of_another_process() {
    let fake = Fake::with_pod().on_bind(Fault::Answer(503));
    fake.bed(|bed| bed.on_fence.push_back(Fault::FencedBefore("1-1 start-1")));
    let fake = check(fake, "undecided 503", "not bound").await;
    fake.bed(|bed| {
        let fence = &bed.pod.as_ref().unwrap().annotations["placed.gpupack.dev/fence"];
        assert_eq!(fence, "1-1 start-1");
    });
}

/// A server on a real socket that gives every request the same answer, or cuts it where that is
/// empty; it stops at the word `stop` and returns how many requests came.
fn socket(answer: &'static str) -> (SocketAddr, std::thread::JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serve = move || {
        let mut requests = 0;
        loop {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = [0; 8192];
            let length = stream.read(&mut buffer).unwrap();
            if buffer.starts_with(b"stop") {
                return requests;
            }
            requests += usize::from(length > 0);
            stream.write_all(answer.as_bytes()).unwrap();
        }
    };
    (address, std::thread::spawn(serve))
}

#[tokio::test]
async fn no_request_is_repeated_without_the_caller() {
    for (answer, expected) in [
        ("HTTP/1.1 503 no\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", "undecided 503"),
        ("HTTP/1.1 504 no\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", "undecided 504"),
        ("", "undecided cut"),
    ] {
        let (address, server) = socket(answer);
        let config = kube::Config::new(format!("http://{address}").parse().unwrap());
        let client = without_retries(config, Clock::start()).unwrap();
        let writer = connected(client, Duration::from_secs(2), Clock::start());
        assert_eq!(reported(&writer.bind(&target()).await), expected);
        TcpStream::connect(address).unwrap().write_all(b"stop").unwrap();
        assert_eq!(server.join().unwrap(), 1, "{expected}");
    }
}

fn notice(uid: &str, reason: NoticeReason, note: &str) -> Notice {
    let key = PodKey::new("team-a", "infer").unwrap();
    Notice { key, uid: PodUid::new(uid), reason, note: note.to_owned() }
}

#[tokio::test]
async fn a_notice_is_logged_once_a_minute_and_never_blocks() {
    let fake = Fake::with_pod();
    let (sender, writer) = notices(fake.client(), "replica-0".to_owned(), 3, TIMEOUT);
    let at = |seconds: u64| Timestamp::from_millis(seconds * 1000);
    let refused = |uid| notice(uid, NoticeReason::GpuRequestRefused, &"ä".repeat(2000));
    for second in [0, 1, 59] {
        sender.offer(refused("u1"), at(second));
    }
    sender.offer(notice("u1", NoticeReason::NoGpuFits, "no room"), at(59));
    sender.offer(refused("u1"), at(60));
    sender.offer(refused("u2"), at(60));
    assert_eq!(sender.counts(), NoticeCounts { muted: 2, dropped: 1, ..NoticeCounts::default() });
    let counts = sender.clone();
    drop(sender);
    let writing = tokio::spawn(writer.run());
    tokio::time::timeout(Duration::from_secs(5), async {
        while counts.counts().written < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    drop(counts);
    writing.await.unwrap();
    fake.bed(|bed| {
        let [first, second, repeat] = &bed.events[..] else { panic!("{:?}", bed.events) };
        assert_eq!(first["reason"], "GpuRequestRefused");
        assert_eq!(first["reportingController"], "gpupack.dev/extender");
        assert_eq!(first["regarding"]["uid"], "u1");
        assert_eq!(
            (first["type"].as_str(), first["action"].as_str()),
            (Some("Warning"), Some("Parsing"))
        );
        assert_eq!(first["note"].as_str().unwrap().len(), 1024);
        assert_eq!(second["reason"], "NoGpuFits");
        assert_eq!(repeat["series"]["count"], 2, "a repeat is counted up in the same Event");
    });
}

#[tokio::test]
async fn a_changed_text_is_a_new_event() {
    let fake = Fake::with_pod();
    let (sender, writer) = notices(fake.client(), "replica-0".to_owned(), 9, TIMEOUT);
    let texts = [
        "suggestion: request 0.4",
        "suggestion: request 0.4",
        "suggestion: request 0.2",
        "suggestion: request 0.2",
    ];
    for (text, minute) in texts.into_iter().zip(0..) {
        let now = Timestamp::from_millis(minute * 60_000);
        let is_muted = sender.is_muted(&PodUid::new("u1"), NoticeReason::NoGpuFits, now);
        assert!(!is_muted, "a minute has passed");
        sender.offer(notice("u1", NoticeReason::NoGpuFits, text), now);
        assert!(sender.is_muted(&PodUid::new("u1"), NoticeReason::NoGpuFits, now));
    }
    drop(sender);
    tokio::time::timeout(Duration::from_secs(5), writer.run()).await.unwrap();
    fake.bed(|bed| {
        let reported = |event: &Value| (event["note"].clone(), event["series"]["count"].clone());
        let [first, repeat, other, again] = &bed.events[..] else { panic!("{:?}", bed.events) };
        assert_eq!(reported(first), (texts[0].into(), Value::Null));
        assert_eq!(reported(repeat), (texts[0].into(), 2.into()));
        assert_eq!(
            reported(other),
            (texts[2].into(), Value::Null),
            "an old text is not counted up"
        );
        assert_eq!(reported(again), (texts[2].into(), 2.into()));
        assert_eq!(repeat["metadata"]["name"], first["metadata"]["name"]);
        assert_ne!(other["metadata"]["name"], first["metadata"]["name"]);
    });
}
