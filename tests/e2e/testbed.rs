//! A few control planes for the whole run, one scenario at a time on each.

use std::future::Future;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use kube::Client;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::binaries::{self, Binaries};
use crate::clock;
use crate::cluster::Cluster;
use crate::control_plane::{ControlPlane, Identity};
use crate::extender::{Extender, gpupack, gpupack_agent, start_agents, start_agents_of};
use crate::fleet::Fleet;
use crate::identities::Identities;
use crate::leash::Leash;
use crate::manifests::{self, Mode};
use crate::proxy::{Faults, Proxy};
use crate::schedulers::{Scheduler, SchedulerPlan};
use crate::watching::Watching;

/// The default time limit of a scenario; one that hangs fails.
const SCENARIO_LIMIT: Duration = Duration::from_secs(600);

/// The cluster of one scenario.
pub(crate) struct Testbed {
    /// etcd and the API server.
    pub(crate) plane: &'static ControlPlane,
    /// Empty at the start, with a namespace for the scenario.
    pub(crate) cluster: Cluster,
    /// The scenario's name.
    pub(crate) name: &'static str,
}

/// Runs a scenario on an empty cluster of its own, or says why it is skipped.
pub(crate) fn scenario<F, S>(name: &'static str, play: S)
where
    S: FnOnce(Testbed) -> F,
    F: Future<Output = ()>,
{
    scenario_within(name, SCENARIO_LIMIT, play);
}

/// The same with its own time limit.
pub(crate) fn scenario_within<F, S>(name: &'static str, limit: Duration, play: S)
where
    S: FnOnce(Testbed) -> F,
    F: Future<Output = ()>,
{
    run(name, limit, "GPUPACK_E2E_REQUIRED", |_| Ok(()), |bed, ()| play(bed));
}

/// The same with something more that this machine may not be able to give: `prepare` makes it, or says
/// why it cannot. Where the variable `required` is set, that is a failure.
pub(crate) fn scenario_with<T, F, P, S>(name: &'static str, required: &str, prepare: P, play: S)
where
    P: FnOnce(&ControlPlane) -> Result<T, String>,
    S: FnOnce(Testbed, T) -> F,
    F: Future<Output = ()>,
{
    run(name, SCENARIO_LIMIT, required, prepare, play);
}

/// Waits until no other scenario runs, and keeps others waiting: for what takes the whole machine, or is
/// about its speed.
pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    MACHINE.write().unwrap_or_else(PoisonError::into_inner)
}

/// Held by each scenario, and whole by one that runs alone.
static MACHINE: RwLock<()> = RwLock::new(());

/// What only those do that run alone: they measure, so that other scenarios would spoil their figures.
const ALONE: [&str; 3] = ["attacks", "replicas-burst", "throughput"];

fn run<T, F, P, S>(name: &'static str, limit: Duration, required: &str, prepare: P, play: S)
where
    P: FnOnce(&ControlPlane) -> Result<T, String>,
    S: FnOnce(Testbed, T) -> F,
    F: Future<Output = ()>,
{
    // First, so that those that wait for one keep no other waiting that runs alone.
    let lane = Lane::free();
    let is_alone = ALONE.contains(&name);
    let _whole = is_alone.then(alone);
    let _part = (!is_alone).then(|| MACHINE.read().unwrap_or_else(PoisonError::into_inner));
    let skip = |reason: &str| {
        let is_required = clock::variable(required).is_some_and(|value| value != "0");
        assert!(!is_required, "{required} is set, but {name} cannot run: {reason}");
        // Not `println`, which the test harness hides in tests that pass.
        binaries::say(&format!("skipped: {name} because {reason}"));
    };
    let plane = match lane.control_plane() {
        Ok(plane) => plane,
        Err(reason) => return skip(reason),
    };
    runtime().block_on(async {
        let client = plane.client(Identity::Admin).await;
        let cluster = Cluster::fresh(client, name).await;
        let more = match prepare(plane) {
            Ok(more) => more,
            Err(reason) => return skip(&reason),
        };
        let played = play(Testbed { plane, cluster, name }, more);
        let in_time = tokio::time::timeout(limit, played).await;
        assert!(in_time.is_ok(), "{name} has not ended after {limit:?}");
    });
}

/// A control plane that no other scenario uses while this is there.
struct Lane(usize);

/// Most control planes of a run, however many threads the tests have. A scenario waits most of its time.
const LANES: usize = 3;

/// Which lanes are in use, and the news that one is free.
static LANES_IN_USE: Mutex<[bool; LANES]> = Mutex::new([false; LANES]);
static LANE_IS_FREE: Condvar = Condvar::new();

impl Lane {
    fn free() -> Self {
        let lanes = LANE_IS_FREE.wait_while(lanes_in_use(), |lanes| !lanes.contains(&false));
        let mut lanes = lanes.unwrap_or_else(PoisonError::into_inner);
        let lane = lanes.iter().position(|is_in_use| !is_in_use).expect("one is free");
        lanes[lane] = true;
        Self(lane)
    }

    fn control_plane(&self) -> Result<&'static ControlPlane, &'static str> {
        static PLANES: [OnceLock<Result<ControlPlane, String>>; LANES] =
            [const { OnceLock::new() }; LANES];
        let started = PLANES[self.0].get_or_init(|| {
            static BINARIES: OnceLock<Result<Binaries, String>> = OnceLock::new();
            let binaries = BINARIES.get_or_init(binaries::find).clone()?;
            Ok(runtime().block_on(async {
                let plane = ControlPlane::start(binaries, self.0).await;
                let admin = plane.client(Identity::Admin).await;
                // The rights of every extender and scheduler of the tests: those of the shipped files.
                manifests::apply(&admin, "rbac.yaml", Mode::Keep).await;
                plane
            }))
        });
        started.as_ref().map_err(String::as_str)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        lanes_in_use()[self.0] = false;
        LANE_IS_FREE.notify_one();
    }
}

fn lanes_in_use() -> MutexGuard<'static, [bool; LANES]> {
    LANES_IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints a figure of a scenario, also where the test harness hides the output of passing tests.
pub(crate) fn figure(scenario: &str, text: &str) {
    let _shown = writeln!(std::io::stdout().lock(), "figure: {scenario}: {text}");
}

/// Connections belong to the runtime that opened them, so all scenarios share one.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(LANES + 1)
            .enable_all()
            .build()
            .expect("threads can be started")
    })
}

/// What runs on the stage besides the API server.
pub(crate) struct Setup {
    /// Nodes and GPUs.
    pub(crate) fleet: Fleet,
    /// kube-scheduler processes.
    pub(crate) schedulers: Vec<SchedulerPlan>,
    /// Keys of the extender's configuration besides its addresses.
    pub(crate) settings: Value,
    /// Time between two reports of one simulated agent.
    pub(crate) report_every: Duration,
    /// A faulty network between extender and API server, with the seed of its chance.
    pub(crate) faults: Option<(Faults, u64)>,
    /// Whether all clients prove who they are.
    pub(crate) has_identities: bool,
}

impl Setup {
    /// One second scheduler, the extender's and the agents' defaults, a sound network.
    pub(crate) fn of(fleet: Fleet) -> Self {
        Self {
            fleet,
            schedulers: vec![SchedulerPlan::second()],
            settings: json!({}),
            report_every: Duration::from_secs(1),
            faults: None,
            has_identities: false,
        }
    }
}

/// A cluster with nodes, extender, agents and schedulers, under the checker's eyes.
pub(crate) struct Stage {
    /// The administrator's hands.
    pub(crate) cluster: Cluster,
    /// Nodes and GPUs.
    pub(crate) fleet: Fleet,
    /// `gpupack extender`.
    pub(crate) extender: Extender,
    /// kube-schedulers.
    pub(crate) schedulers: Vec<Scheduler>,
    /// The checker.
    pub(crate) watching: Watching,
    /// The faulty network, if any.
    pub(crate) proxy: Option<Proxy>,
    plane: &'static ControlPlane,
    name: &'static str,
    agents: Vec<Leash>,
    /// How clients prove who they are, if they do.
    identities: Option<Identities>,
    program: Option<PathBuf>,
    fleet_file: PathBuf,
    report_every: Duration,
}

impl Testbed {
    /// Creates the nodes and starts everything; returns when the extender has every GPU.
    pub(crate) async fn stage(self, setup: Setup) -> Stage {
        let Self { plane, cluster, name } = self;
        cluster.add_nodes(&setup.fleet).await;
        let watching = Watching::start(cluster.client.clone(), setup.fleet.clone()).await;
        let proxy = match setup.faults {
            Some((faults, seed)) => {
                let upstream: Client = plane.client(Identity::Extender).await;
                Some(Proxy::start(upstream, faults, seed).await)
            }
            None => None,
        };
        let kubeconfig = match &proxy {
            Some(proxy) => plane.kubeconfig_via(Identity::Extender, "proxied", &proxy.url()),
            None => plane.kubeconfig(Identity::Extender),
        };
        let identities = match setup.has_identities {
            true => Some(Identities::new(plane, &cluster.client, name).await),
            false => None,
        };
        let mut settings = setup.settings;
        identities.iter().for_each(|them| settings["tls"] = them.settings());
        let extender = Extender::start(plane, &kubeconfig, settings).await;
        let fleet_file = setup.fleet.write(plane.work(), name);
        let report_every = setup.report_every;
        let address = extender.agents_address();
        let agents = match &identities {
            None => vec![start_agents(plane, &fleet_file, report_every, &[address])],
            Some(them) => them.start_agents(plane, &setup.fleet, (&fleet_file, address)).await,
        };
        until_known(&extender, setup.fleet.gpus(), report_every).await;
        let mut schedulers = Vec::new();
        for plan in setup.schedulers {
            let admin = &cluster.client;
            let plan = identities.as_ref().map_or(plan, |them| plan.proving(them.folder));
            schedulers.push(Scheduler::start(plane, admin, plan, extender.address()).await);
        }
        let fleet = setup.fleet;
        Stage {
            cluster,
            fleet,
            extender,
            schedulers,
            watching,
            proxy,
            plane,
            name,
            agents,
            identities,
            program: None,
            fleet_file,
            report_every,
        }
    }
}

/// Waits until the extender has this many GPUs, from agents that report each `report_every`.
pub(crate) async fn until_known(extender: &Extender, devices: usize, report_every: Duration) {
    let limit = Duration::from_secs(30) + report_every;
    let started = clock::now();
    loop {
        let known = extender.known_devices().await;
        if known == devices as f64 {
            return;
        }
        assert!(started.elapsed() < limit, "{known} of {devices} GPUs reported after {limit:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the extender knows what can be made on this many GPUs.
pub(crate) async fn until_divided(extender: &Extender, gpus: usize) {
    until_shown(extender, "\"migUnits\":8", gpus).await;
}

/// Waits until the state of the fleet shows this so often.
pub(crate) async fn until_shown(extender: &Extender, text: &str, times: usize) {
    let started = clock::now();
    while extender.page("/v1/state").await.matches(text).count() < times {
        let is_late = started.elapsed() > Duration::from_secs(60);
        assert!(!is_late, "the agents do not report {text}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// An extender that takes over from the first, with its agents.
pub(crate) struct Successor {
    /// `gpupack extender`.
    pub(crate) extender: Extender,
    _agents: Leash,
}

impl Stage {
    /// A folder of this scenario.
    pub(crate) fn folder(&self) -> PathBuf {
        self.plane.work().join(self.name)
    }

    /// Ends the simulated agents.
    pub(crate) fn stop_agents(&mut self) {
        self.agents.iter_mut().for_each(Leash::kill);
    }

    /// Starts an agent of the extender with these flags.
    pub(crate) fn start_agent(&self, flags: impl Iterator<Item = String>) -> Leash {
        let extender = format!("http://{}", self.extender.agents_address());
        let own = ["agent", "--period-ms=500", "--extender", &extender].map(str::to_owned);
        let arguments: Vec<String> = own.into_iter().chain(flags).collect();
        Leash::start("gpupack agent", &gpupack(), &arguments, &self.plane.log("agent"))
    }

    /// Starts the part of an agent that has the driver, with these flags.
    pub(crate) fn start_driver(&self, flags: impl Iterator<Item = String>) -> Leash {
        let own = ["driver", "--period-ms=500"].map(str::to_owned);
        let arguments: Vec<String> = own.into_iter().chain(flags).collect();
        Leash::start(
            "gpupack-agent driver",
            &gpupack_agent(),
            &arguments,
            &self.plane.log("driver"),
        )
    }

    /// Ends the extender and the agents, as if gpupack were not installed.
    pub(crate) fn stop_gpupack(&mut self) {
        self.agents.iter_mut().for_each(Leash::kill);
        self.extender.kill();
    }

    /// The file with the certificate of the CA by which clients prove who they are.
    pub(crate) fn certificate_of_ca(&self) -> PathBuf {
        let identities = self.identities.as_ref().expect("clients prove who they are");
        identities.folder.join("ca.crt")
    }

    /// Starts another agent for a node, with the token of a new pod there of this ServiceAccount.
    pub(crate) async fn start_other_agent(
        &self,
        node: &str,
        account: &str,
        runs_on: &str,
    ) -> Leash {
        let identities = self.identities.as_ref().expect("clients prove who they are");
        let pod = format!("other-{account}-{node}-{runs_on}");
        let token = identities.token(account, &pod, runs_on).await;
        let at = (&*self.fleet_file, self.extender.agents_address());
        identities.start_agent(self.plane, (node, &token), at)
    }

    /// Starts the agent of a node as it runs there, with these flags and the token of a new pod.
    pub(crate) async fn start_real_agent(&self, node: &str, flags: Vec<String>) -> Leash {
        let identities = self.identities.as_ref().expect("clients prove who they are");
        let token = identities.token("gpupack-agent", &format!("real-{node}"), node).await;
        let at = (flags, self.extender.agents_address());
        identities.start_agent_with(self.plane, (node, &token), at)
    }

    /// The program of both from now on; `None` is the one under test.
    pub(crate) fn run_program(&mut self, program: Option<PathBuf>) {
        self.extender.run_program(program.clone());
        self.program = program;
    }

    /// Starts both again with these keys of the extender's configuration changed; answers when every
    /// GPU is known.
    pub(crate) async fn start_gpupack(&mut self, settings: &Value) {
        self.extender.reconfigure(settings);
        self.extender.start_again().await;
        let address = self.extender.agents_address();
        let program = self.program.clone().unwrap_or_else(gpupack);
        let (file, every) = (&self.fleet_file, self.report_every);
        self.agents = vec![start_agents_of(&program, self.plane, file, every, &[address])];
        until_known(&self.extender, self.fleet.gpus(), self.report_every).await;
    }

    /// Starts a second extender beside the first, on a sound network, with agents of its own; answers when
    /// it is ready and has every GPU.
    pub(crate) async fn start_successor(&self, settings: Value) -> Successor {
        let kubeconfig = self.plane.kubeconfig(Identity::Extender);
        let extender = Extender::start(self.plane, &kubeconfig, settings).await;
        let address = extender.agents_address();
        let agents = start_agents(self.plane, &self.fleet_file, self.report_every, &[address]);
        until_known(&extender, self.fleet.gpus(), self.report_every).await;
        Successor { extender, _agents: agents }
    }

    /// Starts a kube-scheduler that calls the successor.
    pub(crate) async fn start_scheduler_of(
        &self,
        successor: &Successor,
        plan: SchedulerPlan,
    ) -> Scheduler {
        Scheduler::start(self.plane, &self.cluster.client, plan, successor.extender.address()).await
    }

    /// Starts a kube-scheduler. It is killed when it is dropped.
    pub(crate) async fn start_scheduler(&self, plan: SchedulerPlan) -> Scheduler {
        Scheduler::start(self.plane, &self.cluster.client, plan, self.extender.address()).await
    }

    /// Prints a figure of this scenario.
    pub(crate) fn figure(&self, text: &str) {
        figure(self.name, text);
    }

    /// The checker's verdict at the end of a scenario, on the watch and on what the API server
    /// lists now.
    pub(crate) async fn judge(&self) {
        let listed = self.cluster.pods().list(&kube::api::ListParams::default()).await;
        let mut tenancies = Vec::new();
        for pod in listed.expect("pods can be listed") {
            let found = crate::checker::tenancy(&pod, &self.fleet);
            tenancies.extend(found.unwrap_or_else(|fault| panic!("{fault}")));
        }
        let overloads = crate::checker::overloads(&tenancies, &self.fleet);
        assert!(overloads.is_empty(), "{overloads:#?}");
        let events = self.watching.verdict();
        self.figure(&format!("no fault in {events} pod events, {} tenants", tenancies.len()));
    }

    /// Waits until the extender's ledger agrees with the placements of bound pods.
    pub(crate) async fn until_ledgers_agree(&self) {
        self.until_ledger_agrees(&self.extender).await;
    }

    /// The same of another extender.
    pub(crate) async fn until_ledger_agrees(&self, extender: &Extender) {
        let limit = Duration::from_secs(10);
        let started = clock::now();
        loop {
            let (allocated, placed) = (extender.allocated().await, self.watching.load());
            if allocated == placed {
                return;
            }
            let late = started.elapsed() > limit;
            assert!(!late, "ledger and annotations differ:\n{allocated:#?}\n{placed:#?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
