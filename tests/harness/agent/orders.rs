//! A replica of the extender that gives orders about MIG instances, and believes every report.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::extract::State;
use axum::routing::put;
use axum::{Json, Router};
use runtime::clock::Clock;
use server::reports::checked_report::CheckedReport;
use tokio::runtime::Runtime;
use wire::api::condition::DeviceFault;
use wire::api::kind::{ApiVersion, ReplyKind};
use wire::api::state::DeviceKind;
use wire::report::bodies::{
    ClearOrder, ClearOrders, ClearOutcome, DeviceReport, MakeInstance, MigFailure, MigOrders,
    MigPromise, MigPromises, Outcome, Reply, Report,
};

/// How the replies are.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Replies {
    /// They answer the newest report.
    #[default]
    New,
    /// They say that the report was repeated.
    Repeated,
    /// Each is of another session than the report.
    OtherSession,
}

/// What it has seen, and what it says.
#[derive(Default)]
struct Told {
    orders: Option<MigOrders>,
    /// Which GPU is to be cleared.
    clear: Option<ClearOrders>,
    /// What became of that, by the newest report.
    cleared: Option<ClearOutcome>,
    /// The newest event that is a fault of the first device.
    fault_event: Option<u64>,
    replies: Replies,
    /// When the orders were first in a reply.
    ordered: Option<Duration>,
    inventory: Vec<DeviceReport>,
    failures: Vec<MigFailure>,
    /// What the agent says that was promised.
    promised: Option<MigPromises>,
    /// When each report came.
    reports: Vec<Duration>,
    /// The faults of devices in any report so far.
    faults: BTreeSet<String>,
    /// The devices with a fault by the newest report.
    faulty: BTreeMap<String, DeviceFault>,
    /// Why a report cannot be.
    fault: Option<String>,
}

/// The replica; its threads end with it.
pub(crate) struct Replica {
    told: Arc<Mutex<Told>>,
    clock: Clock,
    address: SocketAddr,
    threads: Option<Runtime>,
}

/// A MIG instance as it is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Instance {
    pub(crate) uuid: String,
    pub(crate) profile: String,
    pub(crate) start: u32,
    pub(crate) made_here: bool,
}

async fn take(
    State((told, clock)): State<(Arc<Mutex<Told>>, Clock)>,
    Json(report): Json<Report>,
) -> Json<Reply> {
    let mut told = told.lock().unwrap();
    if let Err(error) = CheckedReport::of(report.clone()) {
        told.fault = Some(error.to_string());
    }
    told.reports.push(clock.precise());
    let faults = report.devices.iter().filter_map(|device| device.fault);
    told.faults.extend(faults.map(|fault| format!("{fault:?}")));
    let faulty = report.devices.iter().filter_map(|it| Some((it.uuid.clone(), it.fault?)));
    told.faulty = faulty.collect();
    told.failures = report.mig_failures;
    told.cleared = report.clear_outcome;
    told.fault_event = report.devices.first().and_then(|device| device.fault_event);
    told.promised = report.mig_promises;
    if let Some(inventory) = report.inventory {
        told.inventory = inventory;
    }
    let named = report.session.unwrap_or(1);
    let session = if told.replies == Replies::OtherSession { named + 1 } else { named };
    if told.orders.is_some() {
        told.ordered.get_or_insert(clock.precise());
    }
    Json(Reply {
        api_version: ApiVersion::default(),
        kind: ReplyKind::default(),
        session,
        outcome: match told.replies {
            Replies::Repeated => Outcome::Ignored,
            Replies::New | Replies::OtherSession => Outcome::Accepted,
        },
        allocations_version: Some(1),
        allocations: Some(Vec::new()),
        mig_orders: told.orders.clone(),
        memory_limits: None,
        clear_orders: told.clear.clone().map(Box::new),
        close_library: None,
    })
}

impl Replica {
    pub(crate) fn start() -> Self {
        let threads =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let threads = threads.unwrap();
        let (told, clock) = (Arc::<Mutex<Told>>::default(), Clock::start());
        let listener = threads.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/v1/nodes/{node}/report", put(take))
            .with_state((Arc::clone(&told), clock));
        threads.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { told, clock, address, threads: Some(threads) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap()
    }

    /// Orders these instances of the GPU `GPU-a` from now on: profile and start. The others go.
    pub(crate) fn order(&self, term: u64, make: &[(&str, u32)], remove: &[&str]) {
        self.give(term, ("GPU-a", make), remove);
    }

    /// The same of another GPU.
    pub(crate) fn give(&self, term: u64, (gpu, make): (&str, &[(&str, u32)]), remove: &[&str]) {
        let make = make.iter().map(|(profile, start)| MakeInstance {
            gpu: gpu.to_owned(),
            profile: (*profile).to_owned(),
            start: *start,
        });
        let remove = remove.iter().map(|uuid| (*uuid).to_owned()).collect();
        let mut told = self.told();
        let make = make.collect();
        told.orders = Some(MigOrders { term, make, remove, ..MigOrders::default() });
        told.ordered = None;
    }

    /// The same orders promise these instances of `GPU-a` from now on: pod, profile and start.
    pub(crate) fn promise(&self, promises: &[(&str, &str, u32)]) {
        let promises = promises.iter().map(|(pod, profile, start)| MigPromise {
            pod_uid: (*pod).to_owned(),
            gpu: "GPU-a".to_owned(),
            profile: (*profile).to_owned(),
            start: *start,
        });
        self.told().orders.as_mut().unwrap().promises = promises.collect();
    }

    /// What the newest report says that was promised: term, pod and start.
    pub(crate) fn promised(&self) -> Vec<(u64, String, u32)> {
        let told = self.told().promised.clone().unwrap_or_default();
        told.instances.into_iter().map(|it| (told.term, it.pod_uid, it.start)).collect()
    }

    /// Orders in this term to clear `GPU-a` of what it has reported, if there is a number for that.
    pub(crate) fn clear(&self, term: u64, number: Option<u64>) {
        let fault_event = self.told().fault_event;
        let order =
            number.map(|number| ClearOrder { number, gpu: "GPU-a".to_owned(), fault_event });
        self.told().clear = Some(ClearOrders { term, order });
    }

    /// What became of that, by the newest report.
    pub(crate) fn cleared(&self) -> Option<ClearOutcome> {
        self.told().cleared.clone()
    }

    /// Gives no orders from now on.
    pub(crate) fn withdraw(&self) {
        self.told().orders = None;
    }

    /// How its replies are from now on.
    pub(crate) fn reply(&self, replies: Replies) {
        self.told().replies = replies;
    }

    /// Time since the orders were first in a reply.
    pub(crate) fn since_ordered(&self) -> Duration {
        self.clock.precise() - self.told().ordered.unwrap()
    }

    /// The newest inventory.
    pub(crate) fn inventory(&self) -> Vec<DeviceReport> {
        self.told().inventory.clone()
    }

    /// The MIG instances of the newest inventory, by their start.
    pub(crate) fn instances(&self) -> Vec<Instance> {
        let mut all: Vec<Instance> = self
            .inventory()
            .into_iter()
            .filter(|it| it.kind == DeviceKind::MigInstance)
            .map(|it| Instance {
                uuid: it.uuid,
                profile: it.mig_profile.unwrap(),
                start: it.mig_placement.unwrap().start,
                made_here: it.made_here,
            })
            .collect();
        all.sort_by_key(|it| it.start);
        all
    }

    /// Profile, start and origin of these.
    pub(crate) fn shown(&self) -> Vec<(String, u32, bool)> {
        self.instances().into_iter().map(|it| (it.profile, it.start, it.made_here)).collect()
    }

    /// The failures in the newest report.
    pub(crate) fn failures(&self) -> Vec<MigFailure> {
        self.told().failures.clone()
    }

    /// The faults of devices in any report so far.
    pub(crate) fn faults(&self) -> Vec<String> {
        self.told().faults.iter().cloned().collect()
    }

    /// The devices with a fault by the newest report.
    pub(crate) fn faulty(&self) -> BTreeMap<String, DeviceFault> {
        self.told().faulty.clone()
    }

    /// When each report came, since the start.
    pub(crate) fn reports(&self) -> Vec<Duration> {
        self.told().reports.clone()
    }

    /// Waits until `done` holds.
    pub(crate) fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        for _ in 0..3_000 {
            if let Some(fault) = &self.told().fault {
                panic!("the agent sends what cannot be: {fault}");
            }
            if done(self) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let failures = self.failures();
        panic!("not within 30 s: {what}; there are {:?}, {failures:?}", self.instances());
    }

    /// Waits until exactly these instances are reported: profile, start, whether made here.
    pub(crate) fn until_instances(&self, wanted: &[(&str, u32, bool)]) {
        let wanted: BTreeSet<(String, u32, bool)> = wanted
            .iter()
            .map(|(profile, start, here)| ((*profile).to_owned(), *start, *here))
            .collect();
        self.until(&format!("{wanted:?}"), |it| {
            it.shown().into_iter().collect::<BTreeSet<_>>() == wanted
        });
    }

    /// Waits for so many reports after this moment.
    pub(crate) fn more_reports(&self, count: usize) {
        let before = self.reports().len();
        self.until("more reports", |it| it.reports().len() >= before + count);
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.threads.take().unwrap().shutdown_background();
    }
}
