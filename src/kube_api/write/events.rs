//! Events on pods: they show in `kubectl describe` what was decided about a pod.
//!
//! A verb queues a notice and goes on. A full queue drops notices and counts them. The same notice
//! about the same pod is sent at most once a minute. The recorder of `kube` counts repeats of a
//! text within some minutes in one Event object.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::write::target::PodKey;
use wire::ids::PodUid;
use wire::units::Timestamp;

/// The reporting controller.
pub const CONTROLLER: &str = "gpupack.dev/extender";

/// After a notice, the same notice about the same pod is muted for this long.
const MUTE: Duration = Duration::from_secs(60);

/// Most notices that are kept for muting. The oldest are dropped first, so that a burst causes
/// repeats and does not grow the memory.
const MAX_REMEMBERED: usize = 16_384;

/// Most Events that can still be counted up, some kilobytes each. The oldest are dropped first.
const MAX_RECORDERS: usize = 2_048;

/// A later repeat is a new Event: the recorder of `kube` drops its own after the same time.
const COUNTED_FOR: Duration = Duration::from_secs(360);

/// Time between two Events: at most 50 a second, far below what an API server takes.
const PACE: Duration = Duration::from_millis(20);

/// Longest note of an Event that the API server accepts, in bytes.
const MAX_NOTE_BYTES: usize = 1024;

/// What a notice is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoticeReason {
    /// The pod is bound, with its devices.
    GpuPlaced,
    /// It is bound with so little memory that a CUDA program can hardly start.
    GpuMemorySmall,
    /// Its GPU request is invalid.
    GpuRequestRefused,
    /// No node has room for it now.
    NoGpuFits,
    /// What becomes free of its room on a node is kept for it.
    GpuRoomKept,
    /// Another client bound it, and its annotations have no placement.
    PlacedByOthers,
    Overallocated,
    /// Its placement annotations cannot be trusted.
    PlacementUnreadable,
    /// Another client changed or removed its placement annotations.
    PlacementEdited,
    /// A device of its placement is missing or unhealthy.
    DeviceLost,
    /// It uses more of a device than it may.
    GpuOverLimit,
    /// Its device is used by processes of no pod that holds anything there.
    GpuUntrackedMemory,
    /// A container could not be started with its device.
    GpuStartFailed,
    /// The isolation that is configured for its memory is not verified.
    IsolationNotVerified,
    /// It was evicted because it used more than it may.
    GpuEvicted,
    /// Others are evicted for it.
    GpuRoomMade,
    /// It was evicted for a more important pod.
    GpuPreempted,
    /// It runs on another GPU of its node now, because another pod needs the room.
    GpuMoved,
    /// It could not be moved, so it is allocated the room where it runs; or a process of it is left where it ran.
    GpuMoveFailed,
    /// Memory above the pod's request is taken back.
    GpuMemoryTakenBack,
    /// It should have ended, and still holds its devices.
    GpuNotReleased,
}

impl NoticeReason {
    /// The reason as the Event shows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::GpuPlaced => "GpuPlaced",
            Self::GpuMemorySmall => "GpuMemorySmall",
            Self::GpuRequestRefused => "GpuRequestRefused",
            Self::NoGpuFits => "NoGpuFits",
            Self::GpuRoomKept => "GpuRoomKept",
            Self::PlacedByOthers => "PlacedByOthers",
            Self::Overallocated => "Overallocated",
            Self::PlacementUnreadable => "PlacementUnreadable",
            Self::PlacementEdited => "PlacementEdited",
            Self::DeviceLost => "DeviceLost",
            Self::GpuOverLimit => "GpuOverLimit",
            Self::GpuUntrackedMemory => "GpuUntrackedMemory",
            Self::GpuStartFailed => "GpuStartFailed",
            Self::IsolationNotVerified => "IsolationNotVerified",
            Self::GpuEvicted => "GpuEvicted",
            Self::GpuRoomMade => "GpuRoomMade",
            Self::GpuPreempted => "GpuPreempted",
            Self::GpuMoved => "GpuMoved",
            Self::GpuMoveFailed => "GpuMoveFailed",
            Self::GpuMemoryTakenBack => "GpuMemoryTakenBack",
            Self::GpuNotReleased => "GpuNotReleased",
        }
    }

    /// The action that the Event shows.
    fn action(self) -> &'static str {
        match self {
            Self::GpuPlaced
            | Self::GpuMemorySmall
            | Self::NoGpuFits
            | Self::GpuRoomKept
            | Self::GpuRoomMade => "Scheduling",
            Self::GpuRequestRefused => "Parsing",
            Self::PlacedByOthers
            | Self::Overallocated
            | Self::PlacementUnreadable
            | Self::PlacementEdited
            | Self::DeviceLost => "Allocation",
            Self::GpuOverLimit | Self::GpuUntrackedMemory | Self::IsolationNotVerified => {
                "Monitoring"
            }
            Self::GpuStartFailed => "Starting",
            Self::GpuEvicted | Self::GpuPreempted => "Evicting",
            Self::GpuNotReleased => "Ending",
            Self::GpuMoved | Self::GpuMoveFailed | Self::GpuMemoryTakenBack => "Moving",
        }
    }

    fn severity(self) -> EventType {
        match self {
            Self::GpuPlaced
            | Self::GpuRoomKept
            | Self::GpuRoomMade
            | Self::GpuMoved
            | Self::GpuMemoryTakenBack => EventType::Normal,
            Self::GpuMemorySmall
            | Self::GpuRequestRefused
            | Self::NoGpuFits
            | Self::PlacedByOthers
            | Self::Overallocated
            | Self::PlacementUnreadable
            | Self::PlacementEdited
            | Self::DeviceLost
            | Self::GpuOverLimit
            | Self::GpuUntrackedMemory
            | Self::GpuStartFailed
            | Self::IsolationNotVerified
            | Self::GpuEvicted
            | Self::GpuPreempted
            | Self::GpuMoveFailed
            | Self::GpuNotReleased => EventType::Warning,
        }
    }
}

/// One notice about one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub key: PodKey,
    pub uid: PodUid,
    pub reason: NoticeReason,
    /// The text with its values, for people; cut to 1 KiB.
    pub note: String,
}

/// What happened to the notices, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoticeCounts {
    /// Written to the API server.
    pub written: u64,
    /// Not sent: the same notice was sent within the last minute.
    pub muted: u64,
    /// Dropped because the queue was full.
    pub dropped: u64,
    /// Refused by the API server, or not answered in time.
    pub failed: u64,
}

#[derive(Default)]
struct Counters {
    written: AtomicU64,
    muted: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
}

/// Takes notices and never waits. Cheap to clone.
#[derive(Clone)]
pub struct NoticeSender {
    queue: mpsc::Sender<(Notice, Timestamp)>,
    sent: Arc<Mutex<BTreeMap<(PodUid, NoticeReason), Timestamp>>>,
    counters: Arc<Counters>,
}

impl NoticeSender {
    /// A queue without a reader.
    #[doc(hidden)] // for tests of what writes no event
    pub fn unread() -> Self {
        let (queue, _) = mpsc::channel(1);
        Self { queue, sent: Arc::default(), counters: Arc::default() }
    }

    /// Queues a notice, unless it is muted or the queue is full.
    pub fn offer(&self, notice: Notice, now: Timestamp) {
        let mut sent = self.sent.lock();
        let key = (notice.uid.clone(), notice.reason);
        if sent.get(&key).is_some_and(|at| now.since(*at) < MUTE) {
            self.counters.muted.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if self.queue.try_send((notice, now)).is_err() {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if sent.len() >= MAX_REMEMBERED {
            sent.retain(|_, at| now.since(*at) < MUTE);
        }
        if sent.len() >= MAX_REMEMBERED {
            sent.clear();
        }
        sent.insert(key, now);
    }

    /// Whether the same notice was sent within the last minute, so that `offer` would drop it.
    pub fn is_muted(&self, uid: &PodUid, reason: NoticeReason, now: Timestamp) -> bool {
        let sent = self.sent.lock();
        sent.get(&(uid.clone(), reason)).is_some_and(|at| now.since(*at) < MUTE)
    }

    /// The number of notices that are kept for muting, at most 16,384.
    pub fn remembered(&self) -> usize {
        self.sent.lock().len()
    }

    /// The counts so far.
    pub fn counts(&self) -> NoticeCounts {
        let Counters { written, muted, dropped, failed } = &*self.counters;
        NoticeCounts {
            written: written.load(Ordering::Relaxed),
            muted: muted.load(Ordering::Relaxed),
            dropped: dropped.load(Ordering::Relaxed),
            failed: failed.load(Ordering::Relaxed),
        }
    }
}

/// Writes the queued notices, one after another.
pub struct NoticeWriter {
    queue: mpsc::Receiver<(Notice, Timestamp)>,
    recorders: Recorders,
    timeout: Duration,
    counters: Arc<Counters>,
}

/// The last text about a pod for a reason, with the recorder that counts it up.
struct Recorders {
    client: Client,
    reporter: Reporter,
    written: BTreeMap<(PodUid, NoticeReason), WrittenEvent>,
}

struct WrittenEvent {
    note: String,
    recorder: Recorder,
    last: Timestamp,
}

/// Both ends of a queue of `capacity` notices. `instance` names this replica.
pub fn notices(
    client: Client,
    instance: String,
    capacity: usize,
    timeout: Duration,
) -> (NoticeSender, NoticeWriter) {
    let (sender, receiver) = mpsc::channel(capacity.max(1));
    let counters = Arc::new(Counters::default());
    let reporter = Reporter { controller: CONTROLLER.to_owned(), instance: Some(instance) };
    let writer = NoticeWriter {
        queue: receiver,
        recorders: Recorders { client, reporter, written: BTreeMap::new() },
        timeout,
        counters: Arc::clone(&counters),
    };
    (NoticeSender { queue: sender, sent: Arc::default(), counters }, writer)
}

impl NoticeWriter {
    /// Writes until all senders are dropped. An Event that fails is counted and lost: no decision
    /// depends on it.
    pub fn run(mut self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            loop {
                let Ok(next) = tokio::time::timeout(COUNTED_FOR, self.queue.recv()).await else {
                    self.recorders.written.clear(); // all are too old by now
                    continue;
                };
                let Some((notice, now)) = next else { return };
                let (event, pod) = (event(&notice), regarding(&notice));
                let recorder = self.recorders.of(&notice, now);
                let written = recorder.publish(&event, &pod);
                let counter = match tokio::time::timeout(self.timeout, written).await {
                    Ok(Ok(())) => &self.counters.written,
                    Ok(Err(error)) => {
                        tracing::debug!(pod_uid = %notice.uid, %error, "event was not written");
                        &self.counters.failed
                    }
                    Err(_) => &self.counters.failed,
                };
                counter.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(PACE).await;
            }
        })
    }
}

impl Recorders {
    /// The recorder that counts repeats of exactly this text. An Event cannot change its text, and
    /// an old text may no longer be true. Each recorder keeps its whole Event, so only few are
    /// kept: none for a placed pod, which happens once, and none for longer than it counts.
    fn of(&mut self, notice: &Notice, now: Timestamp) -> Recorder {
        let key = (notice.uid.clone(), notice.reason);
        if let Some(written) = self.written.get_mut(&key)
            && written.note == notice.note
        {
            written.last = now;
            return written.recorder.clone();
        }
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        if notice.reason == NoticeReason::GpuPlaced {
            return recorder;
        }
        if self.written.len() >= MAX_RECORDERS {
            self.written.retain(|_, written| now.since(written.last) < COUNTED_FOR);
        }
        if self.written.len() >= MAX_RECORDERS {
            let oldest = self.written.iter().min_by_key(|(_, written)| written.last);
            let oldest = oldest.map(|(key, _)| key.clone());
            oldest.and_then(|oldest| self.written.remove(&oldest));
        }
        let written =
            WrittenEvent { note: notice.note.clone(), recorder: recorder.clone(), last: now };
        self.written.insert(key, written);
        recorder
    }
}

fn event(notice: &Notice) -> Event {
    Event {
        type_: notice.reason.severity(),
        reason: notice.reason.name().to_owned(),
        note: Some(cut(&notice.note)),
        action: notice.reason.action().to_owned(),
        secondary: None,
    }
}

fn regarding(notice: &Notice) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(notice.key.namespace().to_owned()),
        name: Some(notice.key.name().to_owned()),
        uid: Some(notice.uid.to_string()),
        ..ObjectReference::default()
    }
}

/// The beginning of a note that fits into an Event, cut at a character boundary.
fn cut(note: &str) -> String {
    note[..note.floor_char_boundary(MAX_NOTE_BYTES)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorders() -> Recorders {
        let service = tower::service_fn(|_: hyper::Request<kube::client::Body>| async {
            Err::<hyper::Response<kube::client::Body>, _>(std::io::Error::other("none"))
        });
        let reporter = Reporter { controller: CONTROLLER.to_owned(), instance: None };
        let client = Client::new(service, "default");
        Recorders { client, reporter, written: BTreeMap::new() }
    }

    /// The number of recorders that are kept after notices about `pods` pods, one each second.
    fn kept_after(reason: NoticeReason, pods: u64) -> usize {
        let mut recorders = recorders();
        for second in 0..pods {
            let key = PodKey::new("team-a", "infer").unwrap();
            let uid = PodUid::new(format!("{second}"));
            let notice = Notice { key, uid, reason, note: "a note".to_owned() };
            recorders.of(&notice, Timestamp::from_millis(1000 * second));
        }
        recorders.written.len()
    }

    #[tokio::test]
    async fn event_state_does_not_grow_with_the_number_of_past_pods() {
        assert_eq!(kept_after(NoticeReason::GpuPlaced, 10_000), 0);
        assert!(kept_after(NoticeReason::NoGpuFits, 10_000) <= MAX_RECORDERS);
    }

    #[tokio::test]
    async fn mute_state_does_not_grow_with_the_number_of_past_pods() {
        let client = recorders().client;
        let (sender, mut writer) = notices(client, "replica-0".to_owned(), 1, Duration::ZERO);
        for at in 0..=MAX_REMEMBERED {
            let key = PodKey::new("team-a", "infer").unwrap();
            let (uid, note) = (PodUid::new(format!("{at}")), String::new());
            let notice = Notice { key, uid, reason: NoticeReason::GpuPlaced, note };
            sender.offer(notice, Timestamp::START);
            assert!(writer.queue.try_recv().is_ok());
        }
        assert_eq!(sender.remembered(), 1, "a burst costs repeats, not memory");
    }
}
