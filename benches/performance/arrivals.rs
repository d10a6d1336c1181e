//! Pods that arrive while others are measured: the calls that kube-scheduler would make for each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use super::agents::Connection;
use super::api::Stage;
use super::objects::PodText;

/// Time between two pods: 50 a second.
const EVERY: Duration = Duration::from_millis(20);

/// Pods that wait before the first call, so that the watch has shown each.
const AHEAD: usize = 5;

/// A stream of pods, until it is dropped.
pub(crate) struct Arrivals {
    task: JoinHandle<()>,
    bound: Arc<AtomicU64>,
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Arrivals {
    /// Lets pods come that are bound by the extender at `address`, one after the other.
    pub(crate) fn start(stage: Arc<Stage>, address: &str, names: &[String]) -> Self {
        let bound = Arc::<AtomicU64>::default();
        let all = serde_json::to_string(names).expect("a list of texts");
        let (counter, address) = (Arc::clone(&bound), address.to_owned());
        let task = tokio::spawn(async move {
            let mut connection = Connection::open(&address).await;
            let mut tick = tokio::time::interval(EVERY);
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            (0..AHEAD).for_each(|number| stage.arrive(PodText::arriving(number)));
            for number in 0.. {
                tick.tick().await;
                stage.arrive(PodText::arriving(number + AHEAD));
                schedule(&mut connection, &PodText::arriving(number), &all).await;
                counter.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { task, bound }
    }

    /// Pods that were bound so far.
    ///
    /// # Panics
    /// When one could not be: the stream has ended.
    pub(crate) fn bound(&self) -> u64 {
        assert!(!self.task.is_finished(), "a pod could not be bound");
        self.bound.load(Ordering::Relaxed)
    }
}

async fn schedule(connection: &mut Connection, pod: &PodText, all: &str) {
    let object = pod.pending();
    let query = |names: &str| format!(r#"{{"Pod":{object},"Nodes":null,"NodeNames":{names}}}"#);
    let left = answer(connection, "filter", query(all)).await;
    let scores = answer(connection, "prioritize", query(&left["NodeNames"].to_string())).await;
    let scores = scores.as_array().expect("a list of scores");
    let best = scores.iter().max_by_key(|score| score["Score"].as_i64());
    let args = json!({"PodName": pod.name, "PodNamespace": "team-a", "PodUID": pod.uid,
        "Node": best.expect("a node fits")["Host"]});
    let result = answer(connection, "bind", args.to_string()).await;
    assert_eq!(result["Error"], "", "bind of {}", pod.name);
}

async fn answer(connection: &mut Connection, verb: &str, body: impl Into<Bytes>) -> Value {
    let called = connection.call(Method::POST, &format!("/v1/{verb}"), body).await;
    let (status, body) = called.expect("the extender answers");
    assert_eq!(status, StatusCode::OK, "{verb}: {}", String::from_utf8_lossy(&body));
    serde_json::from_slice(&body).expect("an answer of a verb")
}
