//! One process of the extender: everything that is shipped but the sockets.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use gpupack::cli::serve::extender::settings;
use gpupack::clock::{Clock, SimulatedTime};
use gpupack::config::file::Config;
use gpupack::control::loops;
use gpupack::control::shared::app::{App, ClusterTruth, Truth};
use gpupack::hardware::units::Timestamp;
use gpupack::kube_api::pod::watch::{NodeLabels, NodeWatch, PodWatch, Sink};
use gpupack::kube_api::write::events::{NoticeSender, notices};
use gpupack::kube_api::write::writer::ApiWriter;
use gpupack::ledger::nodes::state::Ledger;
use gpupack::step::outside::{Action, Event, Outside};
use kube::Client;
use kube::client::Body;

/// The wall clock when a simulation begins.
const BEGAN: u64 = 1_767_225_600;

/// A sender of pod events that nobody writes. Its client takes a runtime of tokio that never runs.
static NOTICES: LazyLock<NoticeSender> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let _entered = runtime.enter();
    let silent = tower::service_fn(|_: hyper::Request<Body>| async {
        std::future::pending::<Result<hyper::Response<Body>, std::io::Error>>().await
    });
    let client = Client::new(silent, "default");
    let (sender, _) = notices(client, "simulated".to_owned(), 1, Duration::from_secs(1));
    drop(_entered);
    std::mem::forget(runtime);
    sender
});

pub(crate) struct Replica {
    /// Distinguishes the lives of this replica: an answer to an earlier one is lost.
    pub(crate) life: u64,
    pub(crate) app: Arc<App>,
    pub(crate) pods: PodWatch,
    pub(crate) nodes: NodeWatch,
    /// How much of the API server's log its watch has shown.
    pub(crate) seen: usize,
    pub(crate) is_listed: bool,
    pub(crate) is_frozen: bool,
    started: u64,
    time: &'static SimulatedTime,
    _running: loops::Running,
}

impl Replica {
    /// A process that starts now. `drift` seconds are what its wall clock is ahead.
    pub(crate) fn start(life: u64, now: u64, drift: u64) -> Self {
        let unix = BEGAN + now / 1_000 + drift;
        // One simulation has few lives, so their clocks may stay forever.
        let time = Box::leak(Box::new(SimulatedTime::starting(unix)));
        let clock = Clock::simulated(time);
        let config = Config::default();
        let outside = Outside::new(clock);
        let writer = ApiWriter::new(outside, config.api_timeout, life);
        let truth = Truth::Cluster(Box::new(ClusterTruth { writer, notices: NOTICES.clone() }));
        let ledger = Arc::new(Ledger::new(settings(&config, &clock)));
        let app = Arc::new(App::new(Arc::clone(&ledger), clock, config, truth));
        let sink: Arc<dyn Sink> = app.clone();
        let labels = NodeLabels { pool: app.config.pool_label.clone(), domain: String::new() };
        let running = loops::start(&app);
        Self {
            life,
            pods: PodWatch::new(Arc::clone(&ledger), Arc::clone(&sink), clock),
            nodes: NodeWatch::new(ledger, sink, labels),
            app,
            seen: 0,
            is_listed: false,
            is_frozen: false,
            started: now,
            time,
            _running: running,
        }
    }

    /// The process sees this time from now on.
    pub(crate) fn set_time(&self, now: u64) {
        self.time.set(Timestamp::from_millis(now - self.started));
    }

    pub(crate) fn step(&self, event: Event, now: u64) -> Vec<Action> {
        self.set_time(now);
        self.app.outside.step(event, Timestamp::from_millis(now - self.started))
    }

    /// When its next timer is due.
    pub(crate) fn due(&self) -> Option<u64> {
        self.app.outside.due().map(|due| self.started + due.millis())
    }
}

impl Drop for Replica {
    /// The process dies.
    fn drop(&mut self) {
        self.app.outside.stop();
    }
}
