//! Carries out what the steps of [`crate::step`] return: on tokio, with the client of `kube`.

use std::time::Duration;

use kube::client::Body;
use kube::{Client, Config};
use tokio::sync::mpsc;

use crate::hardware::units::Timestamp;
use crate::step::outside::{Action, Answer, Event, Lost, Outside};

/// Runs the tasks of `outside` until it is dropped. Without a client calls have no answer.
///
/// `client` must not repeat requests automatically: those that wait for an answer decide that.
pub async fn run(outside: Outside, client: Option<Client>) {
    // Tokio's own queues would otherwise pause a task in the middle of a step.
    tokio::task::unconstrained(steps(outside, client)).await;
}

/// A client without the default retries of `kube`: they repeat a Binding after a 503 or 504, for
/// minutes, and the caller does not see it.
///
/// # Errors
/// [`kube::Error`] if `config` makes no client.
pub fn without_retries(mut config: Config) -> Result<Client, kube::Error> {
    config.default_retry = false;
    Client::try_from(config)
}

async fn steps(outside: Outside, client: Option<Client>) {
    let (sender, mut answers) = mpsc::unbounded_channel();
    let clock = outside.clock();
    let mut event = Event::Changed;
    loop {
        for action in outside.step(event, clock.now()) {
            match action {
                Action::Work(work) => drop(tokio::task::spawn_blocking(work)),
                Action::Call { id, request, within } => {
                    let (client, sender) = (client.clone(), sender.clone());
                    tokio::spawn(async move {
                        let answer = exchange(client, *request, within).await;
                        let _ = sender.send(Event::Answered { id, answer });
                    });
                }
            }
        }
        // Times are to the millisecond: it may be a part of one early.
        let rest = |due: Timestamp| due.since(clock.now()) + Duration::from_millis(1);
        let rest = outside.due().map_or(Duration::MAX, rest);
        event = tokio::select! {
            Some(answered) = answers.recv() => answered,
            () = outside.rung() => Event::Changed,
            () = tokio::time::sleep(rest) => Event::Changed,
        };
    }
}

async fn exchange(
    client: Option<Client>,
    request: hyper::Request<Vec<u8>>,
    within: Duration,
) -> Result<Answer, Lost> {
    let client = client.ok_or(Lost::Timeout)?;
    let mut status = None;
    let exchange = async {
        let response = client.send(request.map(Body::from)).await?;
        status = Some(response.status().as_u16());
        Ok::<_, kube::Error>(response.into_body().collect_bytes().await.ok())
    };
    let body = match tokio::time::timeout(within, exchange).await {
        Ok(body) => {
            body.map_err(|error| Lost::Transport { fault: error.to_string() })?.map(Into::into)
        }
        Err(_) => None,
    };
    // The status says what was done. Without a body only its contents are lost.
    Ok(Answer { status: status.ok_or(Lost::Timeout)?, body })
}
