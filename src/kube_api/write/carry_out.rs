//! Carries out what the steps of [`runtime::step`] return: on tokio, with the client of `kube`.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use http_body_util::Full;
use kube::Client;
use kube::client::Body;
use tokio::sync::mpsc;

use crate::connection::date_of;
use runtime::certificates::ServerProof;
use runtime::http_client::HttpClient;
use runtime::step::outside::{Action, ApiAnswer, Lost, Outside, StepEvent};

/// Runs the tasks of `outside` until it is dropped. Without a client calls have no answer. With `proof`
/// other replicas prove who they are.
///
/// `client` must not repeat requests automatically: those that wait for an answer decide that.
pub fn run(
    outside: Outside,
    client: Option<Client>,
    proof: Option<ServerProof>,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        // Tokio's own queues would otherwise pause a task in the middle of a step.
        let _stopped = Stopped(outside.clone());
        // Its connections are kept: each Binding waits for an answer.
        let replicas = HttpClient::with(proof, REPLICA_ANSWERS_WITHIN, LONGEST_REPLICA_ANSWER);
        tokio::task::unconstrained(steps(
            outside,
            Receivers { api_server: client, replicas: Arc::new(replicas) },
        ))
        .await;
    })
}

/// Drops the tasks when nothing runs them any more: they own the extender that owns them.
struct Stopped(Outside);

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Whom requests go to.
#[derive(Clone)]
struct Receivers {
    api_server: Option<Client>,
    replicas: Arc<HttpClient>,
}

async fn steps(outside: Outside, receivers: Receivers) {
    let (sender, mut answers) = mpsc::unbounded_channel();
    let clock = outside.clock();
    let mut event = StepEvent::Changed;
    loop {
        for action in outside.step(event, clock.now()) {
            match action {
                Action::Work(work) => drop(tokio::task::spawn_blocking(work)),
                Action::Call { id, request, within } => {
                    let (receivers, sender) = (receivers.clone(), sender.clone());
                    tokio::spawn(async move {
                        let answer = AssertUnwindSafe(exchange(receivers, *request, within));
                        let answer = answer.catch_unwind().await.unwrap_or_else(|_| {
                            Err(Lost::Transport { fault: "a bug in the client".to_owned() })
                        });
                        let _ = sender.send(StepEvent::Answered { id, answer });
                    });
                }
            }
        }
        // Times are to the millisecond: it may be a part of one early.
        let rest = outside
            .due()
            .map_or(Duration::MAX, |due| due.since(clock.now()) + Duration::from_millis(1));
        event = tokio::select! {
            Some(answered) = answers.recv() => answered,
            () = outside.rung() => StepEvent::Changed,
            () = tokio::time::sleep(rest) => StepEvent::Changed,
        };
    }
}

/// Longest time of a call of another replica; each call has a shorter one of its own.
const REPLICA_ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// Largest answer of another replica.
const LONGEST_REPLICA_ANSWER: usize = 64 << 10;

async fn exchange_with_replica(
    replicas: &HttpClient,
    request: hyper::Request<Vec<u8>>,
    within: Duration,
) -> Result<ApiAnswer, Lost> {
    let request = request.map(|body| Full::new(body.into()));
    let answer = tokio::time::timeout(within, replicas.exchange(request)).await;
    let (status, body) =
        answer.map_err(|_| Lost::Timeout)?.map_err(|fault| Lost::Transport { fault })?;
    Ok(ApiAnswer { status: status.as_u16(), body: Some(body.into()), date: None })
}

async fn exchange(
    receivers: Receivers,
    request: hyper::Request<Vec<u8>>,
    within: Duration,
) -> Result<ApiAnswer, Lost> {
    if request.uri().authority().is_some() {
        return exchange_with_replica(&receivers.replicas, request, within).await;
    }
    let client = receivers.api_server.ok_or(Lost::Timeout)?;
    let (mut status, mut date) = (None, None);
    let exchange = async {
        let response = client.send(request.map(Body::from)).await?;
        status = Some(response.status().as_u16());
        date = date_of(response.headers());
        Ok::<_, kube::Error>(response.into_body().collect_bytes().await.ok())
    };
    let body = match tokio::time::timeout(within, exchange).await {
        Ok(body) => {
            body.map_err(|error| Lost::Transport { fault: error.to_string() })?.map(Into::into)
        }
        Err(_) => None,
    };
    // The status says what was done. Without a body only its contents are lost.
    Ok(ApiAnswer { status: status.ok_or(Lost::Timeout)?, body, date })
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::pin::pin;

    use futures::future::{Either, select};

    use super::*;
    use runtime::clock::Clock;

    #[tokio::test]
    async fn a_call_without_an_answer_delays_no_other() {
        let service = tower::service_fn(|request: hyper::Request<Body>| async move {
            match request.uri().path() {
                "/silent" => std::future::pending().await,
                _ => Ok::<_, io::Error>(hyper::Response::new(Body::empty())),
            }
        });
        let outside = Outside::new(Clock::start());
        tokio::spawn(run(outside.clone(), Some(Client::new(service, "default")), None));
        let call = |path: &str, within| {
            let request = hyper::Request::get(path).body(Vec::new()).unwrap();
            outside.call(request, within)
        };
        let hour = Duration::from_secs(3_600);
        let mut silent = pin!(call("/silent", hour));
        for path in ["/first", "/second"] {
            match select(silent, pin!(call(path, hour))).await {
                Either::Left(_) => panic!("a silent server has no answer"),
                Either::Right((answer, unanswered)) => {
                    assert_eq!(answer.unwrap().status, 200, "{path}");
                    silent = unanswered;
                }
            }
        }
        let late = call("/silent", Duration::ZERO).await;
        assert_eq!(late.unwrap_err(), Lost::Timeout, "its own time limit counts");
    }
}
