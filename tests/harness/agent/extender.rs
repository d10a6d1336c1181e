//! A real extender on the loopback without an API server, with one node `n`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use cli::serve::extender::settings;
use control::clearing::{Ended, NewOrder, Standing, Wanted};
use control::shared::app::App;
use engine::hardware::pool::ConfiguredIsolation;
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::nodes::state::{Ledger, Settings};
use engine::model::request::{Amount, GpuRequest, Limit, Movable};
use engine::model::reservation::{PlacedDevice, Placement, PodRef, Tenure};
use engine::usage::starts::{ContainerChoice, WantedContainer, WantedContainers};
use http_body_util::BodyExt;
use kube_api::config::file::Config;
use runtime::clock::Clock;
use serde_json::Value;
use server::api::server::router;
use server::page::service::Service;
use server::views::viewer::Viewer;
use server::views::{explain, state as state_view};
use tokio::runtime::Runtime;
use tower::ServiceExt;
use wire::driver_work::{DriverWork, MigChange, UpgradeState};
use wire::ids::{DeviceId, NodeName, PodUid, PoolName};
use wire::units::{Demand, HostAmount, MemMib, Share};

/// A running extender; its threads end with it.
pub(crate) struct Extender {
    app: Arc<App>,
    address: SocketAddr,
    threads: Option<Runtime>,
}

impl Extender {
    pub(crate) fn start() -> Self {
        Self::start_at("127.0.0.1:0")
    }

    /// Ends this one, and starts another one that knows nothing at the same address.
    pub(crate) fn restart(self) -> Self {
        let address = self.address.to_string();
        drop(self);
        // Its threads end in the background, and with them its listener.
        while std::net::TcpListener::bind(&address).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Self::start_at(&address)
    }

    /// One with this configuration.
    pub(crate) fn configured(text: &str) -> Self {
        Self::start_as("127.0.0.1:0", Config::from_yaml(text).unwrap())
    }

    /// Starts one at this address.
    pub(crate) fn start_at(address: &str) -> Self {
        Self::start_as(address, Config::default())
    }

    fn start_as(address: &str, config: Config) -> Self {
        let clock = Clock::start();
        let stale_after = Duration::from_secs(3_600);
        let settings = Settings { stale_after, ..settings(&config, &clock) };
        let ledger = Arc::new(Ledger::new(settings));
        ledger.share_by(config.pools.clone());
        ledger.see_node(&NodeName::new("n"), HostAmount::ZERO, PoolName::new(""));
        ledger.set_listed(clock.now());
        let app = Arc::new(App::alone(ledger, config, clock));
        app.lead.set_fenced();
        let router = router(Service::new(Arc::clone(&app), Arc::new(|_| Ok(()))));
        let threads =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let threads = threads.unwrap();
        let listener = threads.block_on(tokio::net::TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        threads.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { app, address, threads: Some(threads) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Allocates so much of a device to the pod `uid`, as if it were bound.
    pub(crate) fn allocate(&self, uid: &str, device: &str, mib: u64) {
        self.see_pod(uid, (device, mib), false);
    }

    /// The same for a pod that may use all of the device, and be restarted.
    pub(crate) fn lend(&self, uid: &str, device: &str, mib: u64) {
        let mut request = GpuRequest::one(Amount::Memory(MemMib::new(mib)));
        request.limit = Some(Limit::Fraction(Share::WHOLE));
        request.movable = Movable::Restart;
        let known = self.fact(uid, (device, mib), false);
        let fact = PodFact { request: Some(request.into()), ..known };
        self.app.ledger.see_pod(&fact, self.app.clock.now());
    }

    /// Whether a pod may be bound to what it is allocated: the memory is free that it requests.
    pub(crate) fn may_bind(&self, uid: &str) -> bool {
        !self.app.ledger.to_post(&PodUid::new(uid)).unwrap().is_short
    }

    /// The pod that has so much of a device ends.
    pub(crate) fn end(&self, uid: &str, device: &str, mib: u64) {
        self.see_pod(uid, (device, mib), true);
    }

    fn see_pod(&self, uid: &str, part: (&str, u64), is_terminal: bool) {
        self.app.ledger.see_pod(&self.fact(uid, part, is_terminal), self.app.clock.now());
    }

    fn fact(&self, uid: &str, (device, mib): (&str, u64), is_terminal: bool) -> PodFact {
        let id = DeviceId::new(device).unwrap();
        let demand = Demand { memory: MemMib::new(mib), share: Share::from_millionths(100_000) };
        let node = NodeName::new("n");
        let placement = Placement {
            node: node.clone(),
            devices: vec![PlacedDevice { id, demand }],
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: Vec::new(),
        };
        PodFact {
            pod: PodRef { uid: PodUid::new(uid), name: format!("team/{uid}").into() },
            node: Some(node),
            host: HostAmount::ZERO,
            is_terminal,
            wants_gpu: true,
            request: None,
            placement: Some(placement),
            bound_by_us: true,
            moves: MoveFact::default(),
            tenure: Tenure::default(),
        }
    }

    /// The watch shows that NVIDIA's tools do this with the driver of the node.
    pub(crate) fn see_work(&self, upgrade: &str, mig: &str) {
        let upgrade = UpgradeState::ALL.into_iter().find(|state| state.value() == upgrade);
        let mig = MigChange::ALL.into_iter().find(|change| change.value() == mig);
        self.app.ledger.see_driver_work(&NodeName::new("n"), DriverWork { upgrade, mig });
    }

    /// Orders to clear a GPU of what is known of it, and waits for the outcome.
    pub(crate) fn clear(&self, gpu: &str) -> Ended {
        self.clear_of(gpu, self.fault_event(gpu))
    }

    /// The newest event that is a fault of a GPU.
    pub(crate) fn fault_event(&self, gpu: &str) -> Option<u64> {
        let details = self.app.ledger.details("n");
        details.conditions.get(&DeviceId::new(gpu).unwrap())?.fault_event
    }

    /// Orders to clear a GPU of this event and those before it, and waits for the outcome.
    pub(crate) fn clear_of(&self, gpu: &str, fault_event: Option<u64>) -> Ended {
        let (app, gpu) = (&self.app, DeviceId::new(gpu).unwrap());
        let wanted = Wanted { node: "n", gpu: &gpu };
        let term = app.writer.acts_in().unwrap();
        let id = app.clears.give(NewOrder { wanted, fault_event, term }, app.clock.now()).unwrap();
        self.until("the outcome", |_| {
            match app.clears.standing(wanted, id, term, app.clock.now()) {
                Standing::Ended(ended) => Some(ended),
                Standing::GoingOn | Standing::Unknown => None,
            }
        })
    }

    /// The container of the pod `uid` that is to have its devices starts, with an id that begins so.
    pub(crate) fn starts(&self, uid: &str, first: char) {
        let id = Some(format!("{first}{}", "0".repeat(63)));
        let containers = vec![WantedContainer { name: "main".to_owned(), id }];
        let wanted = WantedContainers { containers, choice: ContainerChoice::Marked };
        self.app.ledger.see_containers(&PodUid::new(uid), &wanted, self.app.clock.now());
    }

    /// Whether the pod `uid` sees its GPU, as `/v1/state` shows it.
    pub(crate) fn sight(&self, uid: &str) -> String {
        let state = state_view::state_of(&self.app, "n", &Viewer::All).unwrap();
        let mut pods = state.pods.iter();
        format!("{:?}", pods.find(|pod| pod.pod_uid == uid).unwrap().seen.unwrap())
    }

    /// The node as `/v1/state` shows it.
    pub(crate) fn node(&self) -> Value {
        serde_json::to_value(&state_view::state_of(&self.app, "n", &Viewer::All).unwrap().nodes[0])
            .unwrap()
    }

    /// The sum of the series whose line starts with this, a whole number.
    pub(crate) fn metric(&self, start: &str) -> u64 {
        let threads = self.threads.as_ref().unwrap();
        let text = threads.block_on(async {
            let request = Request::get("/metrics").body(Body::empty()).unwrap();
            let response = self.router().oneshot(request).await.unwrap();
            response.into_body().collect().await.unwrap().to_bytes()
        });
        let text = String::from_utf8(text.to_vec()).unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix(start));
        let value = |rest: &str| rest.trim().parse::<u64>().ok();
        lines.map(|rest| value(rest).unwrap_or_else(|| panic!("{start}{rest}"))).sum()
    }

    /// Why a pod waits, or its node.
    pub(crate) fn explained(&self, namespace: &str, name: &str) -> String {
        explain::explain_named(&self.app, namespace, name, &Viewer::All).unwrap().verdict
    }

    fn router(&self) -> axum::Router {
        let set_log_level = Arc::new(|_: &str| Ok(()));
        router(Service::new(Arc::clone(&self.app), set_log_level))
    }

    /// Waits until `done` finds something in the node, and gives it.
    pub(crate) fn until<T>(&self, what: &str, done: impl Fn(&Value) -> Option<T>) -> T {
        for _ in 0..3_000 {
            if let Some(found) = done(&self.node()) {
                return found;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("not within 30 s: {what}; the node is {}", self.node());
    }

    /// Waits until the first device has this fault, or none.
    pub(crate) fn until_fault(&self, fault: Option<&str>) {
        self.until(&format!("the fault {fault:?}"), |node| {
            let device = node["devices"].get(0)?;
            let is_it = device["fault"].as_str() == fault
                && (device["health"] == "Healthy") == fault.is_none();
            is_it.then_some(())
        });
    }
}

impl Drop for Extender {
    fn drop(&mut self) {
        self.threads.take().unwrap().shutdown_background();
    }
}
