//! Devices that kubelet allocates get no tenants; with a stand-in for kubelet's service.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use agent::gpu::sample::{Probe, ProcessSampling};
use agent::node::kubelet::{BesideKubelet, KubeletDevices, KubeletError, allocatable};
use axum::body::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::net::UnixListener;
use wire::api::condition::DeviceFault;
use wire::units::Timestamp;

use crate::harness::agent::bed::{Bed, a100, t4, with};
use crate::harness::agent::extender::Extender;
use crate::harness::agent::process::AgentProcess;

/// What the stand-in answers: device ids, or a gRPC status.
type Answer = Result<Vec<&'static str>, &'static str>;

/// A `PodResources` service on a socket.
struct Kubelet {
    answer: Arc<Mutex<Answer>>,
    socket: PathBuf,
}

impl Kubelet {
    fn start(folder: &Path, answer: Answer) -> Self {
        let socket = folder.join("kubelet.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let answer = Arc::new(Mutex::new(answer));
        let answers = Arc::clone(&answer);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let answers = Arc::clone(&answers);
                let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                    let answer = answers.lock().unwrap().clone();
                    async move { Ok::<_, std::convert::Infallible>(serve(request, answer).await) }
                });
                let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { answer, socket }
    }
}

type Body =
    StreamBody<futures::stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, std::io::Error>>>>;

async fn serve(request: Request<Incoming>, answer: Answer) -> Response<Body> {
    assert_eq!(request.uri().path(), "/v1.PodResourcesLister/GetAllocatableResources");
    assert_eq!(request.headers()["content-type"], "application/grpc");
    assert_eq!(request.headers()["te"], "trailers");
    let queried = request.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(queried, [0; 5][..], "an empty message");
    let mut frames = Vec::new();
    if let Ok(ids) = &answer {
        let part =
            |tag: u8, bytes: &[u8]| [&[tag, u8::try_from(bytes.len()).unwrap()], bytes].concat();
        let name = part(0x0a, b"nvidia.com/gpu");
        let ids = ids.iter().flat_map(|id| part(0x12, id.as_bytes()));
        let message = part(0x0a, &name.into_iter().chain(ids).collect::<Vec<_>>());
        let head = [0, 0, 0, 0, u8::try_from(message.len()).unwrap()];
        frames.push(Ok(Frame::data(Bytes::from([&head[..], &message].concat()))));
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", answer.err().unwrap_or("0").parse().unwrap());
    frames.push(Ok(Frame::trailers(trailers)));
    Response::new(StreamBody::new(futures::stream::iter(frames)))
}

fn faults(probe: &mut impl Probe) -> Vec<Option<DeviceFault>> {
    let sample = probe.sample(ProcessSampling::List, Timestamp::START).unwrap();
    sample.uses.iter().map(|seen| seen.fault).collect()
}

#[tokio::test]
async fn devices_are_owned_by_kubelet_while_it_lists_them() {
    let bed = Bed::new(&json!({"gpus": [a100("GPU-a"), t4("GPU-b"),
        with(t4("GPU-c"), "failures", json!({"nvmlDeviceGetMemoryInfo_v2": 3}))]}));
    let folder = tempfile::tempdir().unwrap();
    let absent = allocatable(&folder.path().join("kubelet.sock")).await;
    assert_eq!(absent, Err(KubeletError::Absent));
    let kubelet = Kubelet::start(folder.path(), Ok(vec!["GPU-a::0", "GPU-a::1", "GPU-c"]));
    let devices = KubeletDevices::new(&kubelet.socket);
    let mut probe = BesideKubelet { probe: bed.probe(), of_kubelet: devices.owned() };
    let (own, sick) = (Some(DeviceFault::KubeletOwned), Some(DeviceFault::NoMemory));
    assert_eq!(faults(&mut probe), [None, None, sick], "no kubelet was queried");
    devices.refresh().await;
    // The extender may give a size to a GPU without memory: then it is still kubelet's.
    assert_eq!(faults(&mut probe), [own, None, own]);
    for refusal in ["8", "14"] {
        *kubelet.answer.lock().unwrap() = Err(refusal);
        let refused = KubeletError::Refused { status: refusal.to_owned() };
        assert_eq!(allocatable(&kubelet.socket).await, Err(refused));
        devices.refresh().await;
        assert_eq!(faults(&mut probe), [own, None, own], "what was known stays");
    }
    *kubelet.answer.lock().unwrap() = Ok(vec!["GPU-b"]);
    devices.refresh().await;
    assert_eq!(faults(&mut probe), [None, own, sick]);
    std::fs::remove_file(&kubelet.socket).unwrap();
    devices.refresh().await;
    assert_eq!(faults(&mut probe), [None, None, sick], "no kubelet, no devices of its own");
}

#[tokio::test]
async fn a_socket_that_does_not_answer_is_not_kubelet() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("kubelet.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            drop(stream);
        }
    });
    let answer = allocatable(&socket).await;
    assert!(matches!(answer, Err(KubeletError::Connection { .. })), "{answer:?}");
}

#[test]
fn the_extender_places_no_pod_on_a_device_owned_by_kubelet() {
    let bed = Bed::new(&json!({"gpus": [a100("GPU-a")]}));
    let threads =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let threads = threads.unwrap();
    let folder = bed.proc_root();
    std::fs::create_dir_all(&folder).unwrap();
    let _kubelet = threads.block_on(async { Kubelet::start(&folder, Ok(vec!["GPU-a"])) });
    let extender = Extender::start();
    let agent = AgentProcess::start(&bed, &extender);
    extender.until_fault(Some("KubeletOwned"));
    assert_eq!(extender.node()["state"], "Reporting");
    assert!(agent.end().success());
}
