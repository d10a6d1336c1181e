//! The devices that kubelet hands out: those of a device plugin, read from kubelet's `PodResources`
//! service on a Unix socket (`v1.PodResourcesLister/GetAllocatableResources`). gpupack places no
//! pod there.
//!
//! Of the answer, only the ids are declared here. Kubelet limits the rate of calls, so there is one
//! every ten seconds.

use std::collections::BTreeSet;
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::Uri;
use hyper::http::uri::PathAndQuery;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tonic::client::Grpc;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

use crate::gpu::sample::{Probe, ProbeError, ProcessSampling, Sample};
use wire::api::condition::DeviceFault;
use wire::report::bodies::Allocation;
use wire::units::Timestamp;

/// Path of kubelet's socket.
pub const SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";

/// Time between two calls.
const QUERY_EVERY: Duration = Duration::from_secs(10);

/// The method that is called.
const METHOD: &str = "/v1.PodResourcesLister/GetAllocatableResources";

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
    Connection { cause: String },
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
}

/// A probe that reports kubelet's devices as taken.
#[derive(Debug)]
pub struct BesideKubelet<P> {
    pub probe: P,
    /// UUIDs of kubelet's devices, once these are known.
    pub of_kubelet: watch::Receiver<Option<BTreeSet<String>>>,
}

impl<P> BesideKubelet<P> {
    fn is_of_kubelet(&self, uuid: &str) -> bool {
        self.of_kubelet.borrow().as_ref().is_some_and(|devices| devices.contains(uuid))
    }
}

impl<P: Probe> Probe for BesideKubelet<P> {
    fn sample(&mut self, processes: ProcessSampling, now: Timestamp) -> Result<Sample, ProbeError> {
        let mut sample = self.probe.sample(processes, now)?;
        for seen in &mut sample.uses {
            if self.is_of_kubelet(&seen.uuid) {
                seen.healthy = false;
                // Any other fault is worse.
                // A size that the operator gives ends `NoMemory`, and must not give it to other pods.
                let own = seen.fault.filter(|fault| *fault != DeviceFault::NoMemory);
                seen.fault = own.or(Some(DeviceFault::KubeletOwned));
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

    fn is_open(&self) -> bool {
        self.probe.is_open()
    }
}

/// The answer.
#[derive(Clone, PartialEq, prost::Message)]
struct AllocatableResources {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<ContainerDevices>,
}

/// Devices of a resource.
#[derive(Clone, PartialEq, prost::Message)]
struct ContainerDevices {
    #[prost(string, repeated, tag = "2")]
    ids: Vec<String>,
}

impl AllocatableResources {
    /// The devices. A replica's id is that of its device and `::<number>`.
    fn uuids(&self) -> BTreeSet<String> {
        let ids = self.devices.iter().flat_map(|devices| &devices.ids);
        ids.map(|id| id.split("::").next().unwrap_or(id).to_owned()).collect()
    }
}

/// UUIDs of the devices that kubelet may hand out.
///
/// # Errors
/// [`KubeletError`] if they are unknown.
pub async fn allocatable(socket: &Path) -> Result<BTreeSet<String>, KubeletError> {
    let stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => KubeletError::Absent,
        _ => failed(&error),
    })?;
    let connected =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (sender, connection) = connected.await.map_err(|error| failed(&error))?;
    let service = service_fn(move |request| sender.clone().send_request(request));
    let client = Grpc::with_origin(service, Uri::from_static("http://localhost"));
    let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES);
    let codec = ProstCodec::<(), AllocatableResources>::default();
    tokio::select! {
        answer = client.unary(Request::new(()), PathAndQuery::from_static(METHOD), codec) => {
            answer.map(|answer| answer.get_ref().uuids()).map_err(refused)
        }
        ended = connection => Err(KubeletError::Connection {
            cause: ended.err().map_or_else(|| "it was closed".to_owned(), |error| error.to_string()),
        }),
    }
}

fn failed(error: &dyn Error) -> KubeletError {
    KubeletError::Connection { cause: error.to_string() }
}

/// What a status of the call means. Kubelet does not use those for an answer that cannot be read.
fn refused(status: Status) -> KubeletError {
    match (status.source(), status.code()) {
        (Some(error), _) => failed(error),
        (None, Code::Internal | Code::OutOfRange) => KubeletError::Malformed,
        (None, code) => KubeletError::Refused { status: i32::from(code).to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    #[test]
    fn devices_and_replicas_are_read() {
        // `{ devices: [{ resource_name, device_ids, topology: {} }], cpu_ids: [1, 300] }`, and fields
        // that no kubelet has.
        let mut device = b"\x0a\x0envidia.com/gpu".to_vec();
        for id in ["GPU-a", "GPU-b::0", "GPU-b::1"] {
            device.extend([0x12, u8::try_from(id.len()).unwrap()]);
            device.extend(id.as_bytes());
        }
        device.extend(b"\x1a\x00");
        let mut message = vec![0x0a, u8::try_from(device.len()).unwrap()];
        message.extend(device);
        message.extend(b"\x12\x03\x01\xac\x02\x38\x07\x35abcd\x39abcdefgh");
        let answer = AllocatableResources::decode(message.as_slice()).unwrap();
        assert_eq!(answer.uuids().into_iter().collect::<Vec<_>>(), ["GPU-a", "GPU-b"]);
        assert!(AllocatableResources::decode([].as_slice()).unwrap().uuids().is_empty());
        assert!(AllocatableResources::decode(&message[..9]).is_err());
    }
}
