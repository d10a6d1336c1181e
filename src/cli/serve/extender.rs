//! `gpupack extender`: the service that kube-scheduler calls.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use rustls::pki_types::ServerName;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use control::shared::app::App;
use control::shared::leader::Replica;
use engine::ledger::nodes::state::{Ledger, Settings};
use kube_api::config::file::Config;
use kube_api::config::identity::{AUDIENCE, SCHEDULER_NAME};
use kube_api::config::lease::LEASE_NAME;
use kube_api::connection;
use kube_api::identity::agent_tokens::AgentTokens;
use kube_api::identity::front_proxy;
use kube_api::identity::people::People;
use kube_api::pod::watch as cluster_watch;
use kube_api::pod::watch::NodeLabels;
use kube_api::request::placement::FenceWriter;
use kube_api::write::events::NoticeSender;
use kube_api::write::leader_lease::LeaseName;
use kube_api::write::target::PodKey;
use kube_api::write::term::Term;
use kube_api::write::writer::ApiWriter;
use kube_api::write::{carry_out, events};
use runtime::certificates::{
    CertificateFiles, Certificates, READ_EVERY, REPLICA_NAME, ServerProof,
};
use runtime::clock::Clock;
use runtime::process::logging::{self, LogArgs};
use runtime::process::signals::stop_signal;
use runtime::step::outside::Outside;
use server::api::agents::AgentAccess;
use server::api::background;
use server::api::people::PeopleAccess;
use server::api::server::{Identities, Listeners, serve_apart};
use server::issuing::keeper::{Keeper, keeping};
use server::page::service::Service;
use wire::units::MemMib;

/// Most events in the queue: at 50 a second they take 20 seconds.
const QUEUED_EVENTS: usize = 1000;

/// A connection to the API server that brings nothing for this time is given up: longer than a watch.
const SILENT_FOR: Duration = Duration::from_secs(40);

/// How long work without a caller, such as a search for what would help a pod, may delay the end of
/// the process.
const GRACE: Duration = Duration::from_secs(1);

/// Flags of `gpupack extender`. Those of log lines win over the file.
#[derive(Debug, Args)]
pub struct ExtenderArgs {
    /// Configuration file (YAML); without it everything has its default
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of this pod among the replicas; without it the process acts alone
    #[arg(long, value_name = "POD", requires = "replica_address")]
    replica: Option<String>,
    /// IP address at which the other replicas reach this one
    #[arg(long, value_name = "ADDR", requires = "replica")]
    replica_address: Option<std::net::IpAddr>,
    /// Level and format of the log lines.
    #[command(flatten)]
    log: LogArgs,
}

impl ExtenderArgs {
    /// The configuration from file and flags.
    fn config(&self) -> Result<Config> {
        let mut config = config_file(self.config.as_deref())?;
        if let Some(level) = self.log.level_flag() {
            config.log_level = level.to_owned();
        }
        if let Some(format) = self.log.format_flag() {
            config.log_format = format;
        }
        match config.exposure_fault() {
            Some(fault) => anyhow::bail!(fault),
            None => Ok(config),
        }
    }

    /// This process among its replicas, if it has others.
    fn replica(&self, config: &Config, random: u64) -> Result<Option<Replica>> {
        let (Some(pod), Some(address)) = (&self.replica, self.replica_address) else {
            return Ok(None);
        };
        let lease = &config.lease;
        let scheme = if config.tls.is_some() { "https" } else { "http" };
        let address = std::net::SocketAddr::new(address, config.listen.port());
        Ok(Some(Replica {
            identity: Replica::identity(pod, random),
            pod: PodKey::new(&lease.namespace, pod).context("`--replica`")?,
            lease: LeaseName { namespace: lease.namespace.clone(), name: LEASE_NAME.to_owned() },
            holds_for: lease.holds_for,
            address: format!("{scheme}://{address}"),
            secret: format!("{:032x}", rand::random::<u128>()),
        }))
    }
}

/// The configuration in a file; the default without one.
///
/// # Errors
/// The file cannot be read, or is not valid.
pub(crate) fn config_file(path: Option<&Path>) -> Result<Config> {
    let Some(path) = path else { return Ok(Config::default()) };
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the configuration {}", path.display()))?;
    Config::from_yaml(&text).with_context(|| path.display().to_string())
}

/// After a start, answers wait no longer for the first reports of nodes with pods. Agents report about every 5 s.
const WARM_UP: Duration = Duration::from_secs(10);

/// GPU memory that is used beyond what is allocated counts only above this: the driver's own figures move by some MiB.
const UNMANAGED_TOLERANCE: MemMib = MemMib::new(128);

/// Node label whose value is the node's failure domain.
const DOMAIN_LABEL: &str = "topology.kubernetes.io/zone";

/// The ledger's part of a configuration. Session numbers start above all of an earlier run.
pub fn settings(config: &Config, clock: &Clock) -> Settings {
    Settings {
        hold_for: config.hold_for,
        stale_after: config.stale_after,
        drain_limit: config.drain_limit,
        warm_up: WARM_UP,
        unmanaged_tolerance: UNMANAGED_TOLERANCE,
        first_session: clock.unix_seconds() << 20,
    }
}

/// Runs the extender until SIGTERM or SIGINT.
///
/// # Errors
/// An invalid configuration, an unreadable kubeconfig, or an address that cannot be listened on.
pub fn run(args: &ExtenderArgs) -> Result<()> {
    let config = args.config()?;
    let identity = Identity::new(args, &config)?;
    let set_log_level = logging::start(&config.log_level, config.log_format)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async move {
        let clock = Clock::start();
        let requested = stop_signal()?;
        let keeper = tokio::select! {
            keeper = kept_certificates(&config, clock) => keeper?,
            () = requested => return Ok(()),
        };
        let proofs = Proofs::read(&config)?;
        let proof = proofs.as_ref().map(|proofs| proofs.replicas.clone());
        let Connected { client, writer, notices, replica, acting, writing } =
            connect(&config, identity, proof, clock).await?;
        let ledger = Arc::new(Ledger::new(settings(&config, &clock)));
        ledger.share_by(config.pools.clone());
        let listeners = listen(&config).await?;
        let labels =
            NodeLabels { pool: config.pool_label.clone(), domain: DOMAIN_LABEL.to_owned() };
        let app = App::new(ledger, config, writer, notices);
        let app = Arc::new(match replica {
            Some(replica) => app.among(replica),
            None => app,
        });
        let (stop, stopped) = watch::channel(false);
        let identities = proofs.map(|proofs| proofs.identities(&app, client.clone()));
        let service = Service::new(Arc::clone(&app), set_log_level);
        let beating = tokio::spawn(background::run(Arc::clone(&app), stopped.clone()));
        let watching = tokio::spawn(cluster_watch::run(
            client,
            Arc::clone(&app.ledger),
            app.clone(),
            clock,
            labels,
            Arc::clone(&app.pods.lists),
            stopped.clone(),
        ));
        stop_at_signal(Arc::clone(&app), stop)?;
        let keeping = tokio::spawn(keeping(Arc::clone(&app), keeper));
        let has_stopped = stopped.clone();
        let replaced = Arc::clone(&app);
        let outside = app.outside.clone();
        let serving = serve_apart(service, listeners, identities, stopped);
        tokio::pin!(serving);
        // Without its loops the ledger gets out of date unnoticed: a restart is better.
        let ended = tokio::select! {
            () = &mut serving => return Ok(()),
            () = replaced.lead.replaced() => return Ok(()), // kubelet starts it again
            refusal = outside.refused() => return Err(refusal.into()), // with another token, perhaps
            ended = acting => ("control core", ended),
            ended = writing => ("writer of events", ended),
            ended = beating => ("background loops", ended),
            ended = watching => ("watch of pods and nodes", ended),
            ended = keeping => ("keeper of certificates", ended),
        };
        match ended {
            (_, Ok(_)) if *has_stopped.borrow() => {
                serving.await;
                Ok(())
            }
            (name, Ok(_)) => anyhow::bail!("the {name} ended unexpectedly"),
            (name, Err(fault)) => Err(fault).with_context(|| format!("the {name} failed")),
        }
    });
    runtime.shutdown_timeout(GRACE);
    ended
}

/// At SIGTERM or SIGINT hands over, and stops.
fn stop_at_signal(app: Arc<App>, stop: watch::Sender<bool>) -> Result<()> {
    let requested = stop_signal()?;
    tokio::spawn(async move {
        requested.await;
        tracing::info!("stopping");
        app.lead.leave();
        app.lead.stopped().await;
        stop.send_replace(true);
    });
    Ok(())
}

/// The keeper of the certificates, which has written the files of `tls` when it makes them; `None`
/// without `certificates`.
async fn kept_certificates(config: &Config, clock: Clock) -> Result<Option<Keeper>> {
    if config.certificates.is_none() {
        return Ok(None);
    }
    let kube = kube_config(config.kubeconfig.as_deref()).await?;
    let client = connection::without_retries(kube, clock);
    let client = client.context("cannot make a Kubernetes client")?;
    // Of its own: it writes before a replica leads, and each write names the version that it saw.
    let outside = Outside::new(clock);
    tokio::spawn(carry_out::run(outside.clone(), Some(client), None));
    let term = Term::alone(clock, FenceWriter::random());
    let mut keeper =
        Keeper::new(config, ApiWriter::new(outside.clone(), config.api_timeout, term), clock);
    if let Some(keeper) = &mut keeper {
        tokio::select! {
            () = keeper.start() => {}
            refusal = outside.refused() => return Err(refusal.into()),
        }
    }
    Ok(keeper)
}

/// This process among others.
struct Identity {
    /// Separates it from processes of the same second.
    random: u64,
    replica: Option<Replica>,
}

impl Identity {
    fn new(args: &ExtenderArgs, config: &Config) -> Result<Self> {
        let random = FenceWriter::random();
        Ok(Self { random, replica: args.replica(config, random)? })
    }
}

/// The ways to the API server, and the tasks that use them.
struct Connected {
    client: Client,
    writer: ApiWriter,
    notices: NoticeSender,
    replica: Option<Replica>,
    acting: JoinHandle<()>,
    writing: JoinHandle<()>,
}

async fn connect(
    config: &Config,
    identity: Identity,
    proof: Option<ServerProof>,
    clock: Clock,
) -> Result<Connected> {
    let Identity { random, replica } = identity;
    let mut kube = kube_config(config.kubeconfig.as_deref()).await?;
    kube.read_timeout = Some(SILENT_FOR);
    let outside = Outside::new(clock);
    let client = connection::noted(kube.clone(), outside.api_server());
    let client = client.context("cannot make a Kubernetes client")?;
    let once = connection::without_retries(kube, clock);
    let once = once.context("cannot make a Kubernetes client")?;
    let acting = tokio::spawn(carry_out::run(outside.clone(), Some(once), proof));
    let term = match &replica {
        Some(_) => Term::none(clock, random),
        None => Term::alone(clock, random),
    };
    let writer = ApiWriter::new(outside, config.api_timeout, term);
    let name = "gpupack".to_owned();
    let (notices, notice_writer) =
        events::notices(client.clone(), name, QUEUED_EVENTS, config.api_timeout);
    let writing = tokio::spawn(notice_writer.run());
    Ok(Connected { client, writer, notices, replica, acting, writing })
}

/// The certificates, and the names in those of others.
struct Proofs {
    certificates: Certificates,
    replicas: ServerProof,
    scheduler: ServerName<'static>,
}

impl Proofs {
    /// Reads them; `None` without `tls`.
    fn read(config: &Config) -> Result<Option<Self>> {
        let Some(tls) = &config.tls else { return Ok(None) };
        let made = config.certificates.as_ref().filter(|certificates| certificates.make);
        let read_every =
            made.map_or(READ_EVERY, |certificates| certificates.look_every().min(READ_EVERY));
        let own = Some((tls.certificate_file.clone(), tls.key_file.clone()));
        let ca = Some(tls.ca_file.clone());
        let files = CertificateFiles { own, ca, read_every };
        let certificates = Certificates::read(files)?;
        let name = ServerName::try_from(REPLICA_NAME)?;
        Ok(Some(Self {
            replicas: ServerProof { tls: certificates.current(), name },
            scheduler: ServerName::try_from(SCHEDULER_NAME)?,
            certificates,
        }))
    }

    /// How clients prove who they are. From now on the files are followed.
    fn identities(self, app: &Arc<App>, client: Client) -> Identities {
        tokio::spawn(self.certificates.follow());
        let agents = &app.config.agents;
        let tokens = AgentTokens::new(client.clone(), AUDIENCE, &agents.namespace, agents.user());
        let agents = Arc::new(AgentAccess::new(Arc::clone(app), tokens));
        let (current, front_proxy) = watch::channel(None);
        tokio::spawn(front_proxy::follow(client.clone(), current));
        let (people, replicas) = (People::new(client), self.replicas);
        let people = PeopleAccess::new(Arc::clone(app), people, front_proxy);
        Identities { scheduler: self.scheduler, replicas, agents, people: Arc::new(people) }
    }
}

/// Opens all ports, and logs where they are.
async fn listen(config: &Config) -> Result<Listeners> {
    let listeners = Listeners {
        verbs: listener(config.listen).await?,
        agents: listener(config.agents_listen).await?,
        page: listener(config.page_listen).await?,
        metrics: listener(config.metrics_listen).await?,
    };
    let (verbs, agents) = (listeners.verbs.local_addr()?, listeners.agents.local_addr()?);
    let (page, metrics) = (listeners.page.local_addr()?, listeners.metrics.local_addr()?);
    tracing::info!(%verbs, %agents, %page, %metrics, policy = %config.policy, "listening");
    Ok(listeners)
}

async fn listener(address: std::net::SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

/// The connection to the API server: a kubeconfig file, or the pod's service account.
///
/// # Errors
/// Neither can be read.
pub(crate) async fn kube_config(kubeconfig: Option<&Path>) -> Result<kube::Config> {
    match kubeconfig {
        None => kube::Config::incluster()
            .context("no service account is mounted: run inside a pod, or set --kubeconfig"),
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .with_context(|| format!("cannot read the kubeconfig {}", path.display()))?;
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("the kubeconfig {} is not usable", path.display()))
        }
    }
}
