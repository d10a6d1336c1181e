//! The devices that kubelet hands out: those of a device plugin, read from kubelet's `PodResources`
//! service on a Unix socket (`v1.PodResourcesLister/GetAllocatableResources`). gpupack places no
//! pod there.
//!
//! The call has no arguments, and the answer is a list of names. So gRPC is written by hand here,
//! over HTTP/2, and the two nested messages of the answer are read field by field. Kubelet limits
//! the rate of calls, so there is one every ten seconds.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{CONTENT_TYPE, TE};
use hyper::{HeaderMap, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::watch;

use crate::agent::gpu::probe::{Probe, ProbeError, ProcessSampling, Sample};
use crate::api::condition::DeviceFault;
use crate::hardware::units::Timestamp;
use crate::report::wire::Allocation;

/// Path of kubelet's socket.
pub const SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";

/// Time between two calls.
const QUERY_EVERY: Duration = Duration::from_secs(10);

/// Longest time of one call.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Largest answer that is read; a node of 256 devices in 16 replicas makes 200 KiB.
const MAX_ANSWER_BYTES: usize = 4 << 20;

/// Why kubelet's devices are unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KubeletError {
    /// There is no socket: no kubelet, or it is not mounted.
    #[error("there is no socket")]
    Absent,
    /// The socket exists and cannot be used.
    #[error("{cause}")]
    Connection {
        /// The known details.
        cause: String,
    },
    /// Kubelet refused the call.
    #[error("kubelet answers with gRPC status `{status}`")]
    Refused {
        /// The gRPC status; 8 means too many calls.
        status: String,
    },
    /// The answer is not valid.
    #[error("kubelet's answer cannot be read")]
    Malformed,
}

/// The devices that kubelet hands out; a handle, cheap to copy.
#[derive(Clone, Debug)]
pub struct KubeletDevices {
    socket: PathBuf,
    logged: Arc<Mutex<Logged>>,
    /// UUIDs of GPUs and MIG instances, as far as it is known which these are.
    owned: watch::Sender<Option<BTreeSet<String>>>,
}

/// The answer that is in the log; none before the first call.
type Logged = Option<Result<BTreeSet<String>, KubeletError>>;

impl KubeletDevices {
    /// A handle for the service at `socket`. It knows nothing before the first call.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), logged: Arc::default(), owned: watch::Sender::new(None) }
    }

    /// UUIDs of the devices that kubelet hands out, now and later; `None` before it is known which these are.
    pub fn owned(&self) -> watch::Receiver<Option<BTreeSet<String>>> {
        self.owned.subscribe()
    }

    /// Calls once. Without a socket kubelet has no devices; other failures keep the last state.
    pub async fn refresh(&self) {
        let asked = tokio::time::timeout(TIMEOUT, allocatable(&self.socket)).await;
        let late = KubeletError::Connection { cause: "no answer in time".to_owned() };
        let answer = asked.unwrap_or(Err(late));
        match &answer {
            Ok(devices) => _ = self.owned.send_replace(Some(devices.clone())),
            Err(KubeletError::Absent) => _ = self.owned.send_replace(Some(BTreeSet::new())),
            Err(
                KubeletError::Connection { .. }
                | KubeletError::Refused { .. }
                | KubeletError::Malformed,
            ) => {}
        }
        let mut logged = self.logged.lock();
        if logged.as_ref() != Some(&answer) {
            let socket = self.socket.display();
            match &answer {
                Ok(devices) if devices.is_empty() => {
                    tracing::info!("kubelet hands out no device: all are gpupack's");
                }
                Ok(devices) => tracing::warn!(
                    ?devices,
                    "kubelet hands out these devices: gpupack places no pod there"
                ),
                Err(KubeletError::Absent) => {
                    tracing::info!(%socket, "no kubelet found: no device counts as kubelet's");
                }
                Err(error) => {
                    tracing::warn!(%socket, %error, "which devices kubelet hands out is not known");
                }
            }
            *logged = Some(answer);
        }
    }

    /// Calls forever.
    pub async fn run(self) {
        loop {
            tokio::time::sleep(QUERY_EVERY).await;
            self.refresh().await;
        }
    }

    fn owns(&self, uuid: &str) -> bool {
        self.owned.borrow().as_ref().is_some_and(|devices| devices.contains(uuid))
    }
}

/// A probe that reports kubelet's devices as taken.
#[derive(Debug)]
pub struct BesideKubelet<P> {
    /// Reads the devices.
    pub probe: P,
    /// The devices of kubelet.
    pub kubelet: KubeletDevices,
}

impl<P: Probe> Probe for BesideKubelet<P> {
    fn sample(&mut self, processes: ProcessSampling, now: Timestamp) -> Result<Sample, ProbeError> {
        let mut sample = self.probe.sample(processes, now)?;
        for seen in &mut sample.uses {
            if self.kubelet.owns(&seen.uuid) {
                seen.healthy = false;
                // Any other fault is worse.
                seen.fault = seen.fault.or(Some(DeviceFault::KubeletOwned));
            }
        }
        Ok(sample)
    }

    fn observe(&mut self, allocations: &[Allocation], now: Timestamp) {
        self.probe.observe(allocations, now);
    }

    fn may_block(&self) -> bool {
        self.probe.may_block()
    }
}

/// UUIDs of the devices that kubelet may hand out.
///
/// # Errors
/// [`KubeletError`] if they are unknown.
pub async fn allocatable(socket: &Path) -> Result<BTreeSet<String>, KubeletError> {
    let failed =
        |error: &dyn std::error::Error| KubeletError::Connection { cause: error.to_string() };
    let stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => KubeletError::Absent,
        _ => failed(&error),
    })?;
    let connected =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = connected.await.map_err(|error| failed(&error))?;
    let request = Request::post("http://localhost/v1.PodResourcesLister/GetAllocatableResources")
        .header(CONTENT_TYPE, "application/grpc")
        .header(TE, "trailers")
        .body(Full::new(Bytes::from_static(&[0; FRAME_HEAD]))) // one message, not compressed, empty
        .map_err(|error| failed(&error))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(|error| failed(&error))?;
        let head = status(answer.headers());
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| KubeletError::Connection { cause: error.to_string() })?;
        let status = head.or_else(|| body.trailers().and_then(status));
        match status.as_deref() {
            Some("0") => devices(&body.to_bytes()).ok_or(KubeletError::Malformed),
            Some(status) => Err(KubeletError::Refused { status: status.to_owned() }),
            None => Err(KubeletError::Malformed),
        }
    };
    tokio::select! {
        answer = exchange => answer,
        ended = connection => Err(KubeletError::Connection {
            cause: ended.err().map_or_else(|| "it was closed".to_owned(), |it| it.to_string()),
        }),
    }
}

/// The gRPC status, before the body if there is none, otherwise after it; at most 16 characters.
fn status(headers: &HeaderMap) -> Option<String> {
    let value = headers.get("grpc-status")?.to_str().unwrap_or("unreadable");
    Some(value.chars().take(16).collect())
}

/// Bytes before a gRPC message: the compression flag and the length.
const FRAME_HEAD: usize = 5;

/// Device ids of an `AllocatableResourcesResponse` in its frame; `None` if it is not one. A
/// replica's id is that of its device and `::<number>`.
pub fn devices(frame: &[u8]) -> Option<BTreeSet<String>> {
    let (head, message) = frame.split_at_checked(FRAME_HEAD)?;
    let [0, length @ ..] = head else { return None };
    let length = u32::from_be_bytes(length.try_into().ok()?);
    if usize::try_from(length).ok()? != message.len() {
        return None;
    }
    let mut ids = BTreeSet::new();
    for (number, container_devices) in fields(message)? {
        let is_devices = number == 1;
        for (number, id) in fields(container_devices).filter(|_| is_devices).unwrap_or_default() {
            if number == 2 {
                let id = std::str::from_utf8(id).ok()?;
                ids.insert(id.split("::").next().unwrap_or(id).to_owned());
            }
        }
    }
    Some(ids)
}

/// The fields with a length of a protobuf message, with their numbers; others are skipped. `None`
/// if it is not a message.
fn fields(mut rest: &[u8]) -> Option<Vec<(u64, &[u8])>> {
    let mut found = Vec::new();
    while !rest.is_empty() {
        let key = varint(&mut rest)?;
        let length = match key & 7 {
            0 => {
                varint(&mut rest)?;
                0
            }
            1 => 8,
            2 => usize::try_from(varint(&mut rest)?).ok()?,
            5 => 4,
            _ => return None,
        };
        let (value, after) = rest.split_at_checked(length)?;
        rest = after;
        if key & 7 == 2 {
            found.push((key >> 3, value));
        }
    }
    Some(found)
}

/// Takes a number of 7 bits per byte, the lowest first, off the front.
fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `AllocatableResourcesResponse { devices: [{ resource_name, device_ids, topology: {} }],
    /// cpu_ids: [1, 300] }` in its frame.
    fn answer() -> Vec<u8> {
        let mut device = b"\x0a\x0envidia.com/gpu".to_vec();
        for id in ["GPU-a", "GPU-b::0", "GPU-b::1"] {
            device.extend([0x12, u8::try_from(id.len()).unwrap()]);
            device.extend(id.as_bytes());
        }
        device.extend(b"\x1a\x00");
        let mut message = vec![0x0a, u8::try_from(device.len()).unwrap()];
        message.extend(device);
        message.extend(b"\x12\x03\x01\xac\x02\x18\x07\x25abcd\x29abcdefgh");
        let mut frame = vec![0, 0, 0, 0, u8::try_from(message.len()).unwrap()];
        frame.extend(message);
        frame
    }

    #[test]
    fn devices_and_replicas_are_read() {
        let ids: Vec<_> = devices(&answer()).unwrap().into_iter().collect();
        assert_eq!(ids, ["GPU-a", "GPU-b"]);
        assert_eq!(devices(&[0; 5]), Some(BTreeSet::new()));
    }

    #[test]
    fn any_kubelet_answer_is_decoded_without_a_panic() {
        let whole = answer();
        for end in 0..whole.len() {
            assert_eq!(devices(&whole[..end]), None, "cut at {end}");
        }
        for at in 0..whole.len() {
            for flip in [1, 0x80, 0xff] {
                let mut broken = whole.clone();
                broken[at] ^= flip;
                let _ = devices(&broken);
            }
        }
        assert_eq!(fields(&[0xff; 20]), None, "a number without end");
        assert_eq!(fields(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]), None, "longer than it is");
    }
}
