//! `gpupack demo`: the extender at work without Kubernetes. It has a simulated fleet, an API server in
//! memory with a stream of pods, and a caller that does what kube-scheduler does, over real HTTP.

use std::convert::Infallible;
use std::io;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use clap::Args;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};

use crate::base::plain::Output;
use crate::demo::api_server::ApiServer;
use crate::demo::drive::{Arrivals, DemoFigures, Drive};
use crate::demo::kubelet::Kubelet;
use crate::demo::pods::{lending, pools, shares};
use crate::demo::scheduler;
use crate::demo::scheduler::Scheduler;
use crate::demo::summary;
use crate::demo::summary::progress;
use crate::simulated::fleet::Fleet;
use crate::simulated::probe::SimulatedProbe;
use crate::simulated::programs::Programs;
use crate::simulated::run::{run_fleet, run_probes};
use agent::gpu::sample::{Probe, ProcessSampling};
use agent::node::client::Proof;
use agent::node::config::AgentConfig;
use agent::node::metrics::AgentMetrics;
use agent::node::metrics_port::{self, Shown};
use agent::node::replicas::Resolver;
use agent::node::session::Session;
use agent::upkeep::condition::{LastAccepted, Upkeep};
use control::shared::app::App;
use engine::hardware::pool::PoolRules;
use engine::ledger::nodes::state::Ledger;
use engine::model::node_state::NodeReporting;
use kube_api::config::file::Config;
use kube_api::config::pods::quota::SharesConfig;
use kube_api::request::quantity::parse_fraction;
use runtime::clock::Clock;
use runtime::process::logging::{self, LogArgs, SetLogLevel};
use runtime::process::signals::stop_signal;
use server::api::server::{ALL_PATHS, all_routes, guarded, serve};
use server::api::{background, reports};
use server::http::respond::refusal;
use server::page::service::Service;
use wire::ids::PoolName;
use wire::units::Share;

/// Most reports a second of all simulated agents together, for a small machine.
const REPORT_RATE: u32 = 500;

/// Most nodes whose base load and first reports go over HTTP. With more it would take minutes.
const HTTP_FILL_MAX_NODES: usize = 200;

/// Age of a report above which a node counts as not reporting. It is long: the simulated agents live in
/// this process, and a busy machine does not mean a dead node.
const STALE_AFTER: Duration = Duration::from_secs(600);

/// How long the first reports may take.
const FIRST_REPORTS_WITHIN: Duration = Duration::from_secs(60);

/// Time between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// How long open calls may take at the end.
const GRACE: Duration = Duration::from_secs(2);

/// Flags of `gpupack demo`.
///
/// The demo needs no Kubernetes and no GPU. It schedules pods as kube-scheduler does: filter with
/// the names of all nodes that have the CPU and host memory, prioritize with the nodes that are left,
/// bind to the best; one pod after the other, over HTTP on a kept-alive connection. The simulated
/// nodes report as agents do, over HTTP. An API server in memory has the pods: gpupack watches them
/// there, and binds, requeues and moves them by the same writes as in a cluster.
///
/// In a fleet of more than 200 nodes the base load (`--fill`) and the first report of each node go
/// straight into the ledger, by the functions that the HTTP handlers call. All later pods and
/// reports go over HTTP.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Nodes of the fleet, of mixed models
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,
    /// GPUs of each node
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    gpus_per_node: u32,
    /// Part of all compute share to allocate before pods start to come and go, 0 to 1
    #[arg(long, default_value = "0.75", value_parser = fill)]
    fill: Share,
    /// Pods that come after the base load [default: no end, with --once none]
    #[arg(long, value_parser = clap::value_parser!(u64).range(..=10_000_000))]
    pods: Option<u64>,
    /// Pods that come each second; 0 for none [default: by the size of the fleet, with --once as
    /// many as can be placed]
    #[arg(long, value_name = "PER_SECOND", value_parser = rate)]
    arrival_rate: Option<f64>,
    /// Seed of the fleet and the stream; the same seed gives the same placements under --once
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Put one node into a pool with four slots a GPU and one into a pool with shared MIG
    /// instances, and send pods that request them; for three nodes and more
    #[arg(long)]
    pools: bool,
    /// Guarantee GPUs to teams, and limit what one of them may have
    #[arg(long)]
    teams: bool,
    /// Let notebooks use more than they request while that is free, on other GPUs of their node and in
    /// memory; their containers are restarted when others need it. For at most 200 nodes
    #[arg(long, conflicts_with = "once")]
    bursts: bool,
    /// Address to listen on [default: a free port of the loopback interface]
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Address on which the simulated agents show their metrics [default: none]
    #[arg(long, value_name = "ADDR")]
    agent_metrics: Option<SocketAddr>,
    /// Place everything, print the summary and exit; pods do not end
    #[arg(long)]
    once: bool,
    /// Form of the summary; with json nothing else goes to stdout
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Level and format of the log lines.
    #[command(flatten)]
    log: LogArgs,
}

fn fill(text: &str) -> Result<Share, String> {
    match text.trim_matches('0') {
        "" | "." => Ok(Share::ZERO),
        _ => parse_fraction(text).map_err(|_| "write a decimal from 0 to 1".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| (0.0..=10_000.0).contains(rate));
    rate.filter(|rate| *rate == 0.0 || *rate >= 0.001)
        .ok_or_else(|| "write 0, or a number from 0.001 to 10000".to_owned())
}

impl DemoArgs {
    /// Time between the samples of a node.
    fn period(&self) -> Duration {
        let least = Duration::from_secs(1);
        least.max(least * self.nodes / REPORT_RATE)
    }

    fn gpus(&self) -> u64 {
        u64::from(self.nodes) * u64::from(self.gpus_per_node)
    }

    fn arrivals(&self) -> Arrivals {
        // A fortieth of the GPUs per second: lively, and slow enough to watch.
        let gpus = u32::try_from(self.gpus()).unwrap_or(u32::MAX);
        let lively = (f64::from(gpus) / 40.0).clamp(1.0, 20.0);
        Arrivals {
            pods: if self.once { Some(self.pods.unwrap_or(0)) } else { self.pods },
            per_second: if self.once {
                self.arrival_rate
            } else {
                self.arrival_rate.or(Some(lively))
            },
            is_alive: !self.once,
        }
    }

    /// Prints the state of the demo, except on a stdout for programs. The demo goes on if it is not
    /// read.
    fn say(&self, text: &str) {
        let _ = match self.output {
            Output::Table => writeln!(io::stdout(), "{text}"),
            Output::Json => writeln!(io::stderr(), "{text}"),
        };
    }
}

/// Runs the demo until it is done or stopped (Ctrl-C).
///
/// # Errors
/// An address that cannot be listened on, a call that fails, or a ledger whose sums are wrong.
pub fn run(args: &DemoArgs, clock: Clock) -> Result<()> {
    let nodes = usize::try_from(args.nodes).unwrap_or(usize::MAX);
    if args.bursts && nodes > HTTP_FILL_MAX_NODES {
        bail!("`--bursts` is for at most {HTTP_FILL_MAX_NODES} nodes, not {nodes}");
    }
    let level = args.log.level_flag().unwrap_or("error");
    let set_log_level = logging::start(level, args.log.format())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(demo(args, clock, set_log_level));
    runtime.shutdown_timeout(GRACE);
    result
}

/// All routes. The pod of a call of *filter* that others make by hand is created first, as the API server has it
/// before kube-scheduler calls.
fn routes(service: Service, api: ApiServer) -> Router {
    let of_others = middleware::from_fn_with_state(api, create_called);
    guarded(all_routes(&service).layer(of_others), ALL_PATHS, service)
}

async fn create_called(State(api): State<ApiServer>, request: Request, next: Next) -> Response {
    if request.method() != Method::POST || request.uri().path() != "/v1/filter" {
        return next.run(request).await;
    }
    let (head, body) = request.into_parts();
    let Ok(body) = to_bytes(body, Config::default().max_body_bytes).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    match api.create_called(&body) {
        Ok(()) => next.run(Request::from_parts(head, Body::from(body))).await,
        Err(refused) => refusal(StatusCode::UNPROCESSABLE_ENTITY, &refused),
    }
}

async fn demo(args: &DemoArgs, clock: Clock, set_log_level: Arc<SetLogLevel>) -> Result<()> {
    let requested = args.listen.unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let listener = TcpListener::bind(requested)
        .await
        .with_context(|| format!("cannot listen on {requested}"))?;
    let listen = listener.local_addr()?;
    let base = format!("http://{}", own_address(listen));
    let api = ApiServer::default();
    let app = app(args, listen, &api, clock);
    let fleet = fleet(args);
    let programs = args.bursts.then(|| Arc::new(Programs::new(&fleet)));
    let kubelet =
        programs.map(|programs| Arc::new(Kubelet::new(Arc::clone(&app), api.clone(), programs)));
    let figures = watch::Sender::new(DemoFigures::default());
    let (stop, stopped) = watch::channel(false);
    let service = Service::new(Arc::clone(&app), set_log_level);
    let routes = routes(service.clone(), api.clone());
    let serving = tokio::spawn(serve(service, routes, listener, stopped.clone()));
    let ticking = tokio::spawn(background::run(Arc::clone(&app), stopped.clone()));
    let stopping = stop.clone();
    let signal = stop_signal()?;
    tokio::spawn(async move {
        signal.await;
        stopping.send_replace(true);
    });
    let end = if args.once { "" } else { "; Ctrl-C ends the demo" };
    args.say(&format!("page: {base}/ ({} nodes, seed {}{end})", args.nodes, args.seed));
    if !listen.ip().is_loopback() {
        args.say("Any client of this address can bind the demo's pods.");
    }
    let cluster = DemoCluster { app: &app, api: &api, fleet: &fleet, kubelet: kubelet.as_ref() };
    let result = tokio::select! {
        result = live(args, &cluster, &figures, &base, &stopped) => result,
        never = show_progress(args, &app, &figures) => match never {},
        never = run_kubelet(kubelet.as_deref()) => match never {},
    };
    // A call that the end of the service cut off is no failure.
    let was_stopped = *stopped.borrow();
    let result = if was_stopped { Ok(()) } else { result };
    let summary = summary::summary(&app, &figures.borrow(), kubelet.as_deref(), args.seed);
    stop.send_replace(true);
    let _ = tokio::time::timeout(GRACE, serving).await;
    let _ = ticking.await;
    result?;
    let text = match args.output {
        Output::Table => format!("\n{}", summary::text(&summary)),
        Output::Json => serde_json::to_string_pretty(&summary)? + "\n",
    };
    let _ = write!(io::stdout(), "{text}");
    if !summary.faults.is_empty() {
        bail!(
            "the sums of the ledger are wrong, please report this: {}",
            summary.faults.join("; ")
        );
    }
    Ok(())
}

/// An extender of the API server.
fn app(args: &DemoArgs, listen: SocketAddr, api: &ApiServer, clock: Clock) -> Arc<App> {
    let pools = if args.pools { pools() } else { PoolRules::default() };
    let pools = if args.bursts { lending(&pools) } else { pools };
    let gpus = u64::from(args.nodes) * u64::from(args.gpus_per_node);
    let shares = if args.teams { shares(gpus) } else { SharesConfig::default() };
    let stale_after = STALE_AFTER;
    // The demo's kube-scheduler waits so long, so binds can wait for guests.
    let scheduler_timeout =
        if args.bursts { scheduler::TIMEOUT } else { Config::default().scheduler_timeout };
    let config = Config::default();
    // Where the same seed gives the same placements, none may depend on time.
    let standing_hold_after = if args.once { Duration::ZERO } else { config.standing_hold_after };
    let config = Config {
        listen,
        pools,
        shares,
        stale_after,
        scheduler_timeout,
        standing_hold_after,
        ..config
    };
    let ledger = Arc::new(Ledger::new(crate::serve::extender::settings(&config, &clock)));
    ledger.share_by(config.pools.clone());
    api.extender(ledger, config, clock)
}

/// The simulated nodes.
fn fleet(args: &DemoArgs) -> Fleet {
    let count = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
    let fleet = Fleet::mixed(count(args.nodes), count(args.gpus_per_node), args.seed);
    if args.pools { fleet.pooled() } else { fleet }
}

/// Runs the kubelets, if there are any.
async fn run_kubelet(kubelet: Option<&Kubelet>) -> Infallible {
    match kubelet {
        Some(kubelet) => kubelet.run().await,
        None => std::future::pending().await,
    }
}

/// The extender, and what plays its cluster.
struct DemoCluster<'a> {
    app: &'a Arc<App>,
    api: &'a ApiServer,
    fleet: &'a Fleet,
    /// Plays kubelet, if pods are to use more than they request.
    kubelet: Option<&'a Arc<Kubelet>>,
}

/// Starts the fleet, places the base load, and lets pods come.
async fn live(
    args: &DemoArgs,
    cluster: &DemoCluster<'_>,
    figures: &watch::Sender<DemoFigures>,
    base: &str,
    stopped: &watch::Receiver<bool>,
) -> Result<()> {
    let DemoCluster { app, api, fleet, kubelet } = *cluster;
    for node in &fleet.nodes {
        let pool = PoolName::new(node.pool.as_deref().unwrap_or_default());
        app.ledger.see_node(&node.node_name(), node.host(), pool);
    }
    app.ledger.set_listed(app.clock.now());
    let scheduler = Scheduler::new(base.to_owned(), &fleet.nodes, args.seed);
    let (figures_shown, stop) = (figures.clone(), stopped.clone());
    let mut drive =
        Drive::new(Arc::clone(app), api.clone(), figures_shown, scheduler, args.seed, stop);
    if args.pools {
        drive.request_of_pools();
    }
    if let Some(kubelet) = kubelet {
        drive.lend(Arc::clone(kubelet));
    }
    let target = Share::from_millionths(args.fill.millionths() * args.gpus());
    let is_large = fleet.nodes.len() > HTTP_FILL_MAX_NODES;
    let filled = Notify::new();
    let agents = async {
        if is_large {
            filled.notified().await;
        }
        let config = AgentConfig {
            extenders: vec![base.to_owned()],
            proof: Proof::default(),
            resolver: Resolver::default(),
            period: args.period(),
            clock: app.clock,
            metrics: args.agent_metrics.map(|at| agent_metrics(at, app.clock)).transpose()?,
            mig: None,
            limits: None,
            clearing: None,
            upkeep: Upkeep::default(),
            gate: None,
        };
        let never = std::future::pending();
        let ended = match kubelet {
            None => run_fleet(&config, fleet, never).await,
            Some(kubelet) => run_probes(&config, fleet, |node| kubelet.probe(node), never).await,
        };
        ended.map_err(anyhow::Error::from)
    };
    let life = async {
        if is_large {
            report_all(app, fleet)?;
            all_reported(app).await?;
            drive.fill_directly(&fleet.nodes, args.fill).await?;
        } else {
            all_reported(app).await?;
            drive.fill(target).await?;
        }
        let filled_after = app.clock.precise();
        figures.send_modify(|figures| figures.filled_after = filled_after);
        if !args.once {
            filled.notify_one();
            args.say(&format!("base load placed after {:.1} s", filled_after.as_secs_f64()));
        }
        drive.run(args.arrivals()).await
    };
    tokio::select! {
        result = life => result,
        ended = agents => {
            ended?;
            bail!("the simulated agents ended")
        }
    }
}

/// The metrics of all simulated agents, served on an address of their own.
fn agent_metrics(address: SocketAddr, clock: Clock) -> Result<AgentMetrics> {
    let listener = metrics_port::listen(address)
        .with_context(|| format!("cannot listen on `{address}` (`--agent-metrics`)"))?;
    let metrics = AgentMetrics::new();
    let (shown, accepted) = (Some(metrics.clone()), LastAccepted::default());
    tokio::spawn(metrics_port::serve(Shown { metrics: shown, accepted, clock }, listener));
    Ok(metrics)
}

/// The first report of each node, without HTTP: it calls the handler directly.
fn report_all(app: &App, fleet: &Fleet) -> Result<()> {
    for node in &fleet.nodes {
        let mut probe = SimulatedProbe::new(fleet, node);
        let sample = probe.sample(ProcessSampling::List, app.clock.now())?;
        let report = Session::new("demo-first-report", 0).report(&sample);
        let (status, body) = reports::answer(app, &node.name, &serde_json::to_vec(&report)?);
        if !status.is_success() {
            bail!("the report of {} is refused: {}", node.name, String::from_utf8_lossy(&body));
        }
    }
    Ok(())
}

/// Waits until each node has reported over HTTP, and the extender answers calls.
async fn all_reported(app: &App) -> Result<()> {
    let started = app.clock.now();
    while !app.lead.is_fenced()
        || app.ledger.node_states().iter().any(|state| *state != NodeReporting::Reporting)
    {
        if app.clock.now().since(started) > FIRST_REPORTS_WITHIN {
            bail!("some of the simulated nodes are not reporting");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// The address at which this process reaches its own service.
fn own_address(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// Prints progress periodically.
async fn show_progress(
    args: &DemoArgs,
    app: &App,
    figures: &watch::Sender<DemoFigures>,
) -> Infallible {
    loop {
        tokio::time::sleep(PROGRESS_EVERY).await;
        let pods = figures.borrow().pods;
        args.say(&progress(app, &pods));
    }
}

#[cfg(test)]
mod tests;
