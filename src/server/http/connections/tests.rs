//! What goes over one connection, byte by byte.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use axum::http::StatusCode;
use axum::routing::{get, post};
use futures::task::AtomicWaker;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

use super::*;
use crate::http::bell::MOST_POLLS;
use crate::http::tls::ShownCertificate;
use runtime::certificates::Tls;

const SOON: Duration = Duration::from_secs(10);

/// Many times as long as answers on the loopback take.
const A_WHILE: Duration = Duration::from_millis(50);

fn routes() -> Router {
    Router::new()
        .route("/hello", get(|| async { "hello" }))
        .route("/length", post(|body: Bytes| async move { format!("{} bytes", body.len()) }))
        .route("/deaf", post(|| async { "deaf" }))
        .route("/large", get(|| async { vec![b'x'; 8 << 20] }))
        .route("/smuggled", get(|| async { "smuggled" }))
        .route("/nothing", get(|| async { StatusCode::NO_CONTENT }))
        .route(
            "/slow",
            get(|| async {
                tokio::time::sleep(4 * A_WHILE).await;
                "slow"
            }),
        )
}

async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (client, listener.accept().await.unwrap().0)
}

/// A served connection. The sender stops the service.
async fn attended() -> (TcpStream, watch::Sender<bool>, JoinHandle<()>) {
    let (client, server) = pair().await;
    let (stop, stopped) = watch::channel(false);
    (client, stop, tokio::spawn(attend_alone(server, stopped)))
}

fn roomy() -> ListenerLimits {
    ListenerLimits::new(1_000, 64 << 20)
}

/// A connection under limits that are never reached.
fn alone() -> Arc<Connection> {
    Clients::new(roomy()).admit(IpAddr::from([127, 0, 0, 1])).unwrap()
}

async fn attend_alone(stream: TcpStream, stop: watch::Receiver<bool>) {
    attend(stream, &alone(), &routes(), stop).await;
}

async fn talk(stream: TcpStream, stop: watch::Receiver<bool>) -> Option<TcpStream> {
    let (stream, read_ahead) = converse(stream, Bytes::new(), &alone(), &routes(), stop).await?;
    assert!(read_ahead.is_empty());
    Some(stream)
}

/// Reads until `part` has come, and returns everything read.
async fn hear(client: &mut TcpStream, part: &str) -> String {
    let mut heard = Vec::new();
    let all = async {
        let mut bytes = [0; 1_024];
        while !String::from_utf8_lossy(&heard).contains(part) {
            let count = client.read(&mut bytes).await.unwrap();
            assert!(count > 0, "it ended: {}", String::from_utf8_lossy(&heard));
            heard.extend_from_slice(&bytes[..count]);
        }
    };
    timeout(SOON, all).await.unwrap();
    String::from_utf8(heard).unwrap()
}

/// Everything that still comes until the end.
async fn rest(client: &mut TcpStream) -> String {
    let mut heard = String::new();
    // A reset after the answer is an end as well.
    let _ = timeout(SOON, client.read_to_string(&mut heard)).await.unwrap();
    heard
}

#[tokio::test]
async fn an_idle_connection_keeps_only_its_socket() {
    let (mut client, mut server) = pair().await;
    let (_stop, stopped) = watch::channel(false);
    for (request, answer) in [
        ("GET /hello HTTP/1.1\r\nhost: a\r\n\r\n", "hello"),
        ("POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc", "3 bytes"),
        ("GET /slow HTTP/1.1\r\nhost: a\r\n\r\n", "slow"),
        ("GET /nowhere HTTP/1.1\r\nhost: a\r\n\r\n", "404"),
        ("GET /hello HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", "hello"),
    ] {
        client.write_all(request.as_bytes()).await.unwrap();
        server.readable().await.unwrap();
        let talk = timeout(SOON, talk(server, stopped.clone()));
        server = talk.await.unwrap().unwrap_or_else(|| panic!("it ended: {request}"));
        hear(&mut client, answer).await;
    }
    client.write_all(b"GET /hello HTTP/1.0\r\n\r\n").await.unwrap();
    server.readable().await.unwrap();
    let talk = timeout(SOON, talk(server, stopped));
    assert!(talk.await.unwrap().is_none(), "who requests one answer gets one");
    assert!(rest(&mut client).await.ends_with("hello"));
}

#[tokio::test]
async fn requests_may_arrive_in_pieces_or_pipelined() {
    let (mut client, stop, task) = attended().await;
    for piece in ["GET /hel", "lo HTTP/1.1\r\nho", "st: a\r\n\r", "\n"] {
        client.write_all(piece.as_bytes()).await.unwrap();
        tokio::time::sleep(A_WHILE).await;
    }
    hear(&mut client, "\r\n\r\nhello").await;
    let head = "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\n";
    client.write_all(format!("{head}abcd{head}ab").as_bytes()).await.unwrap();
    hear(&mut client, "4 bytes").await;
    client.write_all(format!("cd{head}").as_bytes()).await.unwrap();
    hear(&mut client, "4 bytes").await;
    client.write_all(b"abcdGET /hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    hear(&mut client, "\r\n\r\nhello").await;
    stop.send_replace(true);
    timeout(SOON, task).await.unwrap().unwrap();
}

#[tokio::test]
async fn many_requests_may_come_concurrently() {
    let (mut client, stop, task) = attended().await;
    let count = 100;
    let all = "GET /hello HTTP/1.1\r\nhost: a\r\n\r\n".repeat(count - 1);
    client.write_all(all.as_bytes()).await.unwrap();
    client.write_all(b"GET /hello HTTP/1.0\r\n\r\n").await.unwrap();
    assert_eq!(rest(&mut client).await.matches("\r\n\r\nhello").count(), count);
    stop.send_replace(true);
    timeout(SOON, task).await.unwrap().unwrap();
}

/// hyper rests before it has read all of it.
#[tokio::test]
async fn all_that_was_read_ahead_is_answered() {
    let (mut client, mut server) = pair().await;
    let (_stop, stopped) = watch::channel(false);
    let count = 1_000;
    let mut read_ahead = Bytes::from("GET /hello HTTP/1.1\r\nhost: a\r\n\r\n".repeat(count));
    while !read_ahead.is_empty() {
        let talk = converse(server, read_ahead, &alone(), &routes(), stopped.clone()).await;
        (server, read_ahead) = talk.expect("the connection stays");
    }
    drop(server);
    assert_eq!(rest(&mut client).await.matches("\r\n\r\nhello").count(), count);
}

#[tokio::test]
async fn requests_before_shutdown_are_answered() {
    let (mut client, server) = pair().await;
    client.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    server.readable().await.unwrap();
    let (_stop, stopped) = watch::channel(true);
    timeout(SOON, attend_alone(server, stopped)).await.unwrap();
    assert!(rest(&mut client).await.ends_with("hello"));
}

#[tokio::test]
async fn answers_without_a_body_are_terminated() {
    let (mut client, mut server) = pair().await;
    let (_stop, stopped) = watch::channel(false);
    for (request, answer) in [
        ("HEAD /hello HTTP/1.1\r\nhost: a\r\n\r\n", "content-length: 5"),
        ("GET /nothing HTTP/1.1\r\nhost: a\r\n\r\n", "204"),
    ] {
        client.write_all(request.as_bytes()).await.unwrap();
        server.readable().await.unwrap();
        let talk = timeout(SOON, talk(server, stopped.clone()));
        server = talk.await.unwrap().unwrap_or_else(|| panic!("it ended: {request}"));
        hear(&mut client, answer).await;
    }
}

#[tokio::test]
async fn body_is_read_on_demand() {
    let (mut client, stop, task) = attended().await;
    let head =
        "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n";
    for _ in 0..2 {
        client.write_all(head.as_bytes()).await.unwrap();
        hear(&mut client, "100 Continue").await;
        tokio::time::sleep(A_WHILE).await;
        client.write_all(b"abc").await.unwrap();
        hear(&mut client, "3 bytes").await;
    }
    stop.send_replace(true);
    timeout(SOON, task).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_unread_body_is_never_parsed_as_a_request() {
    let smuggled = "GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n";
    let head =
        format!("POST /deaf HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", smuggled.len());
    for (first, later) in [(smuggled.len(), 0), (0, smuggled.len()), (9, smuggled.len() - 9)] {
        let (mut client, stop, task) = attended().await;
        client.write_all(format!("{head}{}", &smuggled[..first]).as_bytes()).await.unwrap();
        let mut heard = hear(&mut client, "deaf").await;
        tokio::time::sleep(A_WHILE).await;
        // A client that does not read may also hang up.
        let _ = client.write_all(&smuggled.as_bytes()[smuggled.len() - later..]).await;
        let _ = client.write_all(b"GET /hello HTTP/1.0\r\n\r\n").await;
        heard.push_str(&rest(&mut client).await);
        assert!(!heard.contains("smuggled"), "{first} {later}: {heard}");
        stop.send_replace(true);
        timeout(SOON, task).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_slow_reader_gets_the_whole_answer() {
    let (mut client, stop, task) = attended().await;
    for _ in 0..2 {
        client.write_all(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        tokio::time::sleep(A_WHILE).await;
        let (mut length, mut bytes) = (0, vec![0; 1 << 20]);
        while length < 8 << 20 {
            let count = timeout(SOON, client.read(&mut bytes)).await.unwrap().unwrap();
            assert!(count > 0, "it ended after {length} bytes");
            length += bytes[..count].iter().filter(|byte| **byte == b'x').count();
        }
    }
    stop.send_replace(true);
    timeout(SOON, task).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_invalid_http_request_gets_an_error_and_is_closed() {
    for nonsense in ["\u{16}\u{3}\u{1}\r\n\r\n", "GET\r\n\r\n", "POST / HTTP/9.9\r\n\r\n"] {
        let (mut client, _stop, task) = attended().await;
        client.write_all(nonsense.as_bytes()).await.unwrap();
        assert!(rest(&mut client).await.starts_with("HTTP/1.1 400"), "{nonsense:?}");
        timeout(SOON, task).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn shutdown_waits_for_answers_and_not_for_idle_connections() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = watch::channel(false);
    let serving = tokio::spawn(serve(listener, None, routes(), roomy(), stopped));
    let mut clients = Vec::new();
    for said in ["", "GET /hel", "GET /hello HTTP/1.1\r\nhost: a\r\n\r\n"] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(said.as_bytes()).await.unwrap();
        clients.push(client);
    }
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    tokio::time::sleep(A_WHILE).await;
    stop.send_replace(true);
    assert!(rest(&mut slow).await.ends_with("slow"), "it was under way");
    let mut heard = Vec::new();
    for client in &mut clients {
        heard.push(rest(client).await);
    }
    assert_eq!(heard[..2], ["", ""], "they have sent no request yet");
    assert!(heard[2].ends_with("hello"));
    timeout(SOON, serving).await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "the listener is closed");
}

/// A service with these limits: its address, and what stops it.
async fn served(limits: ListenerLimits) -> (std::net::SocketAddr, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(serve(listener, None, routes(), limits, stopped));
    (address, stop)
}

#[tokio::test]
async fn each_phase_has_a_time_limit_and_work_has_none() {
    let soon = A_WHILE / 10;
    let limits = ListenerLimits { head: soon, body: soon, answer: soon, idle: soon, ..roomy() };
    let (address, _stop) = served(limits).await;
    let mut all = Vec::new();
    for said in [
        "",
        "GET /hel",
        "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nabc",
        "GET /hello HTTP/1.1\r\nhost: a\r\n\r\n",
    ] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(said.as_bytes()).await.unwrap();
        all.push(client);
    }
    let mut deaf = TcpStream::connect(address).await.unwrap();
    deaf.write_all(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET /slow HTTP/1.0\r\n\r\n").await.unwrap();
    assert!(rest(&mut slow).await.ends_with("slow"));
    let mut heard = Vec::new();
    for client in &mut all {
        heard.push(rest(client).await);
    }
    assert_eq!(heard[..2], ["", ""]);
    assert!(heard[2].starts_with("HTTP/1.1 400") && heard[2].contains("timeout"), "{}", heard[2]);
    assert!(heard[3].ends_with("hello"));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(rest(&mut deaf).await.len() < 8 << 20, "shutdown did not wait until it ended");
}

#[tokio::test]
async fn a_head_that_arrives_with_the_previous_request_gets_no_extra_time() {
    let limits = ListenerLimits { head: A_WHILE / 10, ..roomy() };
    let (address, _stop) = served(limits).await;
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\nGET /he").await.unwrap();
    assert!(rest(&mut client).await.ends_with("hello"), "closed long before it counts as idle");
    let mut client = TcpStream::connect(address).await.unwrap();
    for _ in 0..2 {
        client.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        hear(&mut client, "hello").await;
        tokio::time::sleep(A_WHILE).await;
    }
}

/// How a listener and its client talk over TLS.
fn certified() -> (Handshake, rustls::ClientConnection) {
    let made = rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap();
    let (certificate, key) = (made.cert.der().clone(), made.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key.try_into().unwrap())
        .unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate).unwrap();
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let client = rustls::ClientConnection::new(client.into(), "a".try_into().unwrap()).unwrap();
    let tls = watch::Sender::new(Arc::new(Tls::of_server(server))).subscribe();
    (Handshake { tls, clients: ShownCertificate::Nothing }, client)
}

/// Sends what the session has to send, and `more` with the end of the handshake.
async fn shake(session: &mut rustls::ClientConnection, socket: &mut TcpStream, more: &[u8]) {
    while session.is_handshaking() {
        let (mut said, mut heard) = (Vec::new(), [0; 4_096]);
        while session.wants_write() {
            session.write_tls(&mut said).unwrap();
        }
        socket.write_all(&said).await.unwrap();
        let count = socket.read(&mut heard).await.unwrap();
        session.read_tls(&mut &heard[..count]).unwrap();
        session.process_new_packets().unwrap();
    }
    let mut end = Vec::new();
    while session.wants_write() {
        session.write_tls(&mut end).unwrap();
    }
    socket.write_all(&[&end, more].concat()).await.unwrap();
}

#[tokio::test]
async fn what_tls_keeps_of_an_unfinished_record_is_counted_and_gets_no_extra_time() {
    let (handshake, mut session) = certified();
    let clients = Clients::new(ListenerLimits { head: A_WHILE, ..roomy() });
    let (_stop, stop) = watch::channel(false);
    let (handshake, routes) = (Some(handshake), routes());
    let port = Port { handshake, clients: Arc::clone(&clients), routes, stop };
    let (mut client, server) = pair().await;
    let connection = clients.admit(IpAddr::from([127, 0, 0, 1])).unwrap();
    let meeting = tokio::spawn(Arc::new(port).meet(server, connection));
    let record = [&[23, 3, 3, 0x40, 0][..], &[0; 12_000]].concat();
    shake(&mut session, &mut client, &record).await;
    let counted = async |bytes| {
        while !(bytes..bytes + 2_000).contains(&clients.held().1) {
            tokio::time::sleep(A_WHILE / 50).await;
        }
    };
    timeout(SOON, counted(12_000)).await.expect("the record is counted beside the handshake");
    client.write_all(&[0; 4_000]).await.unwrap();
    timeout(SOON, meeting).await.expect("its head ends in time").unwrap();
    assert_eq!(clients.held(), (0, 0));
}

#[tokio::test]
async fn a_request_head_has_a_maximum_length() {
    let (mut client, _stop, _task) = attended().await;
    let head = format!("GET /hello HTTP/1.1\r\nhost: a\r\nx: {}", "x".repeat(LONGEST_HEAD));
    client.write_all(head.as_bytes()).await.unwrap();
    assert!(rest(&mut client).await.starts_with("HTTP/1.1 431"));
}

#[tokio::test]
async fn the_newest_connection_replaces_one_when_the_server_is_full() {
    let (address, _stop) = served(ListenerLimits { connections: 3, ..roomy() }).await;
    let mut all = Vec::new();
    for _ in 0..10 {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        hear(&mut client, "\r\n\r\nhello").await;
        all.push(client);
        tokio::time::sleep(A_WHILE / 10).await; // so that one is idle for longer than the other
    }
    for client in &mut all[..7] {
        assert_eq!(rest(client).await, "", "the oldest are closed");
    }
    for client in &mut all[7..] {
        client.write_all(b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        hear(client, "\r\n\r\nhello").await;
    }
}

#[tokio::test]
async fn oversized_bodies_are_rejected_and_short_requests_are_answered() {
    let (address, _stop) = served(ListenerLimits::new(1_000, 1 << 20)).await;
    let body = vec![b'x'; 600 << 10];
    let head =
        |length| format!("POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n");
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(head(body.len() + 1).as_bytes()).await.unwrap();
        let _ = timeout(SOON, client.write_all(&body)).await.unwrap();
        held.push(client);
    }
    let mut short = TcpStream::connect(address).await.unwrap();
    short.write_all(b"GET /hello HTTP/1.0\r\n\r\n").await.unwrap();
    assert!(rest(&mut short).await.ends_with("hello"));
    let mut answered = 0;
    for client in &mut held {
        let _ = client.write_all(b"x").await;
        let mut heard = [0; 12];
        let _ = timeout(Duration::from_secs(1), client.read_exact(&mut heard)).await;
        answered += usize::from(heard == *b"HTTP/1.1 200");
    }
    assert!(answered < 2, "{answered} bodies fit");
    let mut alone = TcpStream::connect(address).await.unwrap();
    drop(held);
    alone.write_all(head(3).as_bytes()).await.unwrap();
    alone.write_all(b"abc").await.unwrap();
    hear(&mut alone, "3 bytes").await;
}

#[tokio::test]
async fn held_bytes_are_returned_with_each_answer() {
    let clients = Clients::new(ListenerLimits::new(10, 17 << 20));
    let connection = clients.admit(IpAddr::from([10, 0, 0, 1])).unwrap();
    let (mut client, server) = pair().await;
    let (stop, stopped) = watch::channel(false);
    let attended = Arc::clone(&connection);
    let task = tokio::spawn(async move { attend(server, &attended, &routes(), stopped).await });
    // One answer fits, two do not.
    for _ in 0..5 {
        client.write_all(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let (mut length, mut bytes) = (0, vec![0; 1 << 20]);
        while length < 8 << 20 {
            let count = timeout(SOON, client.read(&mut bytes)).await.unwrap().unwrap();
            assert!(count > 0, "it ended after {length} bytes");
            length += bytes[..count].iter().filter(|byte| **byte == b'x').count();
        }
    }
    stop.send_replace(true);
    timeout(SOON, task).await.unwrap().unwrap();
    assert_eq!(clients.held(), (1, 0));
    drop(connection);
    assert_eq!(clients.held(), (0, 0));
}

/// How often a task was scheduled.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_self_waking_task_runs_again_without_waking_its_parent() {
    let woken = Arc::<Woken>::default();
    let waker = Waker::from(Arc::clone(&woken));
    let (mut polls, called) = (0, AtomicWaker::new());
    let mut future = pin!(awake(|context| {
        polls += 1;
        called.register(context.waker());
        match polls {
            1..=3 => context.waker().wake_by_ref(),
            4 => {}
            _ => return Poll::Ready(polls),
        }
        Poll::Pending
    }));
    let mut context = Context::from_waker(&waker);
    assert_eq!(future.as_mut().poll(&mut context), Poll::Pending);
    assert_eq!(woken.0.load(Ordering::SeqCst), 0, "it was polled again immediately");
    called.wake();
    assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    assert_eq!(future.as_mut().poll(&mut context), Poll::Ready(5));
}

#[test]
fn an_endless_task_lets_others_run() {
    let woken = Arc::<Woken>::default();
    let waker = Waker::from(Arc::clone(&woken));
    let mut polls = 0;
    let poll = pin!(awake(|context| {
        polls += 1;
        context.waker().wake_by_ref();
        Poll::<()>::Pending
    }))
    .poll(&mut Context::from_waker(&waker));
    assert_eq!((poll, polls), (Poll::Pending, MOST_POLLS));
    assert_eq!(woken.0.load(Ordering::SeqCst), 1, "it is scheduled again");
}

#[tokio::test]
async fn no_call_from_another_thread_is_missed() {
    const CALLS: usize = 20_000;
    let (said, heard) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let bell = Arc::<AtomicWaker>::default();
    let caller = {
        let (said, heard, bell) = (Arc::clone(&said), Arc::clone(&heard), Arc::clone(&bell));
        std::thread::spawn(move || {
            for call in 1..=CALLS {
                said.store(call, Ordering::SeqCst);
                bell.wake();
                while call % 7 == 0 && heard.load(Ordering::SeqCst) < call {
                    std::thread::yield_now(); // until it sleeps again, or nearly
                }
            }
        })
    };
    let all = awake(|context| {
        bell.register(context.waker());
        let call = said.load(Ordering::SeqCst);
        heard.store(call, Ordering::SeqCst);
        if call == CALLS { Poll::Ready(()) } else { Poll::Pending }
    });
    timeout(SOON, all).await.expect("each call is heard");
    caller.join().unwrap();
}
