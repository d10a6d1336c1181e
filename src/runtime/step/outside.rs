//! Tasks without I/O, and the steps that run them.
//!
//! A task is a future that awaits nothing but other tasks and what it requests of the [`Outside`]: an
//! answer of the API server, a time, or work on another thread. [`Outside::step`] takes in one event,
//! runs every task as far as it gets, and returns the actions to carry out. It reads no clock and does
//! no I/O, so a simulation that owns time, chance and the API server replays a run exactly. The runtime
//! that carries actions out is `carry_out` of the crate `kube_api`.

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::future::{BoxFuture, Either};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::clock::Clock;
use crate::step::api_server::{ApiServer, Head, Unauthorized};
use wire::units::Timestamp;

/// Pause between two looks whether the API server accepts this process.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Names a call until its answer arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId(u64);

/// What the outside is to do.
pub enum Action {
    /// Send a request once, and return its answer as [`StepEvent::Answered`]. It is for the API server,
    /// or for another replica if its address has a host.
    Call {
        id: CallId,
        request: Box<hyper::Request<Vec<u8>>>,
        /// For the whole answer. After that the answer is [`Lost::Timeout`].
        within: Duration,
    },
    /// Run this on a thread that may take long, then step.
    Work(Box<dyn FnOnce() + Send>),
}

/// What happened outside.
#[derive(Debug)]
pub enum StepEvent {
    /// A call is answered, or never will be.
    Answered { id: CallId, answer: Result<ApiAnswer, Lost> },
    /// Time passed, work is done, or another thread changed what tasks look at.
    Changed,
}

/// An answer of the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiAnswer {
    /// HTTP status: it says what was done.
    pub status: u16,
    /// The body, unless it did not arrive in time.
    pub body: Option<Vec<u8>>,
    /// When the server answered by its own clock, if it says so: seconds since 1970.
    pub date: Option<u64>,
}

/// Why there is no answer. The request may have arrived, or still arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lost {
    Timeout,
    Transport {
        /// The error of the client.
        fault: String,
    },
}

/// The outside, as tasks see it. Cheap to clone.
#[derive(Clone)]
pub struct Outside(Arc<OutsideShared>);

struct OutsideShared {
    clock: Clock,
    api_server: ApiServer,
    queue: Mutex<TaskQueue>,
    tasks: Mutex<FuturesUnordered<Task>>,
    bell: Arc<Bell>,
}

type Task = BoxFuture<'static, ()>;

/// What tasks have requested since the last step, and what they wait for.
#[derive(Default)]
struct TaskQueue {
    actions: Vec<Action>,
    /// Tasks that no step has run yet.
    tasks: Vec<Task>,
    calls: BTreeMap<CallId, oneshot::Sender<Result<ApiAnswer, Lost>>>,
    timers: BTreeMap<(Timestamp, u64), oneshot::Sender<()>>,
    count: u64,
}

impl TaskQueue {
    fn next(&mut self) -> u64 {
        self.count += 1;
        self.count
    }
}

/// Notes that a task can go on. Another thread may ring it.
#[derive(Default)]
struct Bell {
    rung: Notify,
}

impl Bell {
    /// Whether it has rung since it was last taken.
    fn take(&self) -> bool {
        self.rung.notified().now_or_never().is_some()
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.rung.notify_one();
    }
}

impl Outside {
    /// No task yet. `clock` is the one whose times the steps get.
    pub fn new(clock: Clock) -> Self {
        let inner = OutsideShared {
            clock,
            api_server: ApiServer::new(clock),
            queue: Mutex::default(),
            tasks: Mutex::default(),
            bell: Arc::default(),
        };
        Self(Arc::new(inner))
    }

    /// The clock of the tasks.
    pub fn clock(&self) -> Clock {
        self.0.clock
    }

    /// The API server, by its answers.
    pub fn api_server(&self) -> &ApiServer {
        &self.0.api_server
    }

    /// Waits until the API server has answered nothing but 401 for so long that the process is to end.
    pub async fn refused(&self) -> Unauthorized {
        let mut looks = self.every(LOOK_EVERY);
        loop {
            looks.tick().await;
            if let Some(refusal) = self.0.api_server.refuses().filter(Unauthorized::is_final) {
                return refusal;
            }
        }
    }

    /// Takes in an event, runs all tasks as far as they get, and returns what is to be done.
    pub fn step(&self, event: StepEvent, now: Timestamp) -> Vec<Action> {
        let inner = &*self.0;
        if let StepEvent::Answered { id, answer } = event {
            let waits = inner.queue.lock().calls.remove(&id);
            waits.map(|waits| waits.send(answer)); // a task that has ended needs none
        }
        while let Some(due) = inner.take_due(now) {
            let _ = due.send(());
        }
        let mut tasks = inner.tasks.lock();
        let waker = Waker::from(Arc::clone(&inner.bell));
        let mut context = Context::from_waker(&waker);
        loop {
            let new = std::mem::take(&mut inner.queue.lock().tasks);
            tasks.extend(new);
            inner.bell.take();
            while let Poll::Ready(Some(())) = tasks.poll_next_unpin(&mut context) {}
            // It may stop early, to be fair to others, and a task may have started another.
            let is_quiet = !inner.bell.take() && inner.queue.lock().tasks.is_empty();
            if is_quiet {
                return std::mem::take(&mut inner.queue.lock().actions);
            }
        }
    }

    /// Waits until a step can do something: a task is new, can go on, or requests something.
    pub async fn rung(&self) {
        self.0.bell.rung.notified().await;
    }

    /// When the next timer is due.
    pub fn due(&self) -> Option<Timestamp> {
        self.0.queue.lock().timers.first_key_value().map(|((due, _), _)| *due)
    }

    /// Drops all tasks: nothing goes on.
    pub fn stop(&self) {
        let new = std::mem::take(&mut self.0.queue.lock().tasks);
        drop(new); // what it owns may use the queue
        self.0.tasks.lock().clear();
    }

    /// Runs a task in the next steps. One that panics ends alone.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let task = AssertUnwindSafe(task).catch_unwind().map(|_| ());
        self.enqueue(|queue| queue.tasks.push(task.boxed()));
    }

    fn enqueue<T>(&self, add: impl FnOnce(&mut TaskQueue) -> T) -> T {
        let added = add(&mut self.0.queue.lock());
        self.0.bell.rung.notify_one();
        added
    }

    /// Sends one request to the API server, once.
    ///
    /// # Errors
    /// [`Lost`] without an answer `within` this time.
    pub async fn call(
        &self,
        request: hyper::Request<Vec<u8>>,
        within: Duration,
    ) -> Result<ApiAnswer, Lost> {
        let (answer, answered) = oneshot::channel();
        let is_for_replica = request.uri().authority().is_some();
        let sent = self.0.clock.now();
        self.enqueue(|queue| {
            let id = CallId(queue.next());
            queue.calls.insert(id, answer);
            queue.actions.push(Action::Call { id, request: Box::new(request), within });
        });
        let answer = answered.await.unwrap_or(Err(Lost::Timeout));
        if let Ok(ApiAnswer { status, date, .. }) = answer
            && !is_for_replica
        {
            self.0.api_server.answered(sent, Head { status, date });
        }
        answer
    }

    /// Runs `work` off the thread of the steps; `None` if it panicked.
    pub async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (result, done) = oneshot::channel();
        self.work_later(move || drop(result.send(work())));
        done.await.ok()
    }

    /// The same, and waits for nothing.
    pub fn work_later(&self, work: impl FnOnce() + Send + 'static) {
        self.enqueue(|queue| queue.actions.push(Action::Work(Box::new(work))));
    }

    /// Lets this time pass, to the next millisecond.
    pub async fn sleep(&self, time: Duration) {
        self.until(self.0.clock.now().plus(time + Duration::from_micros(999))).await;
    }

    async fn until(&self, due: Timestamp) {
        let (ring, rung) = oneshot::channel();
        let key = self.enqueue(|queue| {
            let key = (due, queue.next());
            queue.timers.insert(key, ring);
            key
        });
        let _timer = Timer { outside: self, key };
        let _ = rung.await;
    }

    /// The result of `task`, if it ends within this time.
    pub async fn within<T>(&self, time: Duration, task: impl Future<Output = T>) -> Option<T> {
        let (task, late) = (std::pin::pin!(task), std::pin::pin!(self.sleep(time)));
        match futures::future::select(task, late).await {
            Either::Left((result, _)) => Some(result),
            Either::Right(_) => None,
        }
    }

    /// Ticks at once, and then this long after each tick at the earliest.
    pub fn every(&self, period: Duration) -> Ticks {
        Ticks { outside: self.clone(), period, next: Timestamp::START }
    }
}

impl OutsideShared {
    fn take_due(&self, now: Timestamp) -> Option<oneshot::Sender<()>> {
        let mut queue = self.queue.lock();
        let first = queue.timers.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }
}

/// Removes a timer that is no longer waited for.
struct Timer<'a> {
    outside: &'a Outside,
    key: (Timestamp, u64),
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        let timer = self.outside.0.queue.lock().timers.remove(&self.key);
        drop(timer);
    }
}

/// Periodic ticks.
pub struct Ticks {
    outside: Outside,
    period: Duration,
    next: Timestamp,
}

impl Ticks {
    /// Waits for the next tick.
    pub async fn tick(&mut self) {
        // Also when it is late: each step ends, whatever the work between two ticks takes.
        self.outside.until(self.next).await;
        self.next = self.outside.0.clock.now().plus(self.period);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What happened, in order.
    type Log = Arc<Mutex<Vec<&'static str>>>;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn calls(actions: Vec<Action>) -> Vec<CallId> {
        let id = |action| match action {
            Action::Call { id, .. } => Some(id),
            Action::Work(_) => None,
        };
        actions.into_iter().filter_map(id).collect()
    }

    fn request() -> hyper::Request<Vec<u8>> {
        hyper::Request::new(Vec::new())
    }

    fn step(outside: &Outside, at: u64) -> Vec<Action> {
        outside.step(StepEvent::Changed, Timestamp::from_millis(at))
    }

    #[test]
    fn a_task_goes_on_with_the_answer_to_its_call() {
        let (outside, log) = (Outside::new(Clock::start()), Log::default());
        let (task, seen) = (outside.clone(), Arc::clone(&log));
        outside.spawn(async move {
            for expected in ["first", "second"] {
                let answer = task.call(request(), ms(1)).await;
                assert_eq!(answer.is_ok(), expected == "first");
                seen.lock().push(expected);
            }
        });
        let first = calls(step(&outside, 0));
        assert_eq!((first.len(), calls(step(&outside, 0)).len()), (1, 0), "once");
        let answer = Ok(ApiAnswer { status: 200, body: None, date: None });
        let second =
            calls(outside.step(StepEvent::Answered { id: first[0], answer }, Timestamp::START));
        assert_eq!((second.len(), log.lock().clone()), (1, vec!["first"]));
        let answer = Err(Lost::Timeout);
        outside
            .step(StepEvent::Answered { id: first[0], answer: answer.clone() }, Timestamp::START);
        assert_eq!(log.lock().len(), 1, "an answer that arrives twice is for no other call");
        outside.step(StepEvent::Answered { id: second[0], answer }, Timestamp::START);
        assert_eq!(*log.lock(), ["first", "second"]);
    }

    #[test]
    fn times_pass_in_order_and_only_by_steps() {
        let (outside, log) = (Outside::new(Clock::start()), Log::default());
        for (name, time) in [("late", 60_000), ("early", 20_000)] {
            let (task, seen) = (outside.clone(), Arc::clone(&log));
            outside.spawn(async move {
                task.sleep(ms(time)).await;
                seen.lock().push(name);
            });
        }
        let (task, seen) = (outside.clone(), Arc::clone(&log));
        outside.spawn(async move {
            assert_eq!(task.within(ms(30_000), std::future::pending::<()>()).await, None);
            assert_eq!(task.within(ms(90_000), async { 7 }).await, Some(7));
            seen.lock().push("limit");
        });
        step(&outside, 0);
        assert!(outside.due().is_some_and(|due| due.millis() >= 20_000) && log.lock().is_empty());
        step(&outside, 25_000);
        assert_eq!(*log.lock(), ["early"]);
        step(&outside, 100_000);
        assert_eq!(*log.lock(), ["early", "limit", "late"]);
        assert_eq!(outside.due(), None, "the time limit of an ended task is removed");
    }

    #[test]
    fn a_task_that_panics_ends_alone_and_its_spawned_tasks_go_on() {
        let (outside, log) = (Outside::new(Clock::start()), Log::default());
        let (task, seen) = (outside.clone(), Arc::clone(&log));
        outside.spawn(async move {
            let child = task.clone();
            task.spawn(async move {
                assert_eq!(child.work(|| 7).await, Some(7));
                assert_eq!(child.work(|| panic!("as this test wants")).await, None::<()>);
                seen.lock().push("child");
            });
            panic!("as this test wants");
        });
        for _ in 0..2 {
            for action in step(&outside, 0) {
                let Action::Work(work) = action else { panic!("no call") };
                let _ = std::panic::catch_unwind(AssertUnwindSafe(work));
            }
        }
        assert!(step(&outside, 0).is_empty());
        assert_eq!(*log.lock(), ["child"]);
    }

    #[test]
    fn stopped_tasks_are_dropped() {
        let outside = Outside::new(Clock::start());
        let (task, log) = (outside.clone(), Log::default());
        let seen = Arc::clone(&log);
        outside.spawn(async move {
            task.sleep(ms(10)).await;
            seen.lock().push("too late");
        });
        step(&outside, 0);
        outside.stop();
        step(&outside, 100_000);
        assert_eq!((log.lock().len(), Arc::strong_count(&log)), (0, 1));
    }
}
