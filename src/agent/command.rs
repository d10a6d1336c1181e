//! Flags of the agent, and its start and end as a process.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use rustls::pki_types::ServerName;
use tokio::sync::watch;

use crate::driver::DriverArgs;
use crate::gpu::clearing::Clearing;
use crate::gpu::lent_limits::LentLimits;
use crate::gpu::library_gate::LibraryGate;
use crate::mig::on_demand::MigOnDemand;
use crate::node::client::Proof;
use crate::node::config::AgentConfig;
use crate::node::kubelet::{KubeletDevices, SOCKET};
use crate::node::metrics::AgentMetrics;
use crate::node::metrics_port::{self, Shown};
use crate::node::run::{AgentError, run_node};
use crate::relay::agent_part::{self, AgentPart, run_agent_part};
use crate::relay::driver_part::{DriverPart, run_driver_part};
use crate::relay::watchdog;
use crate::upkeep::renewal::MADE_AGAIN;
use runtime::certificates::{
    CertificateFiles, Certificates, READ_EVERY, REPLICA_NAME, ServerProof,
};
use runtime::clock::Clock;
use runtime::process::logging::{self, LogArgs};
use runtime::process::signals::stop_signal;
use wire::ids::is_name;

/// How long a read of the driver may delay the end of the process.
pub const GRACE: Duration = Duration::from_secs(2);

/// Reports the GPUs of a node to the extender.
#[derive(Clone, Debug, clap::Args)]
pub struct AgentArgs {
    /// Address of the extender; a name that resolves to several addresses stands for as many replicas,
    /// each of which gets every report. May be given several times.
    #[arg(long, value_name = "URL", required = true)]
    pub extender: Vec<String>,

    /// Certificate in PEM of the CA of the extender, whose addresses are then `https://…`.
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,

    /// Projected token of this pod, made for the audience `gpupack`.
    #[arg(long, value_name = "FILE", requires = "ca_file")]
    pub token_file: Option<PathBuf>,

    /// What is read and done on the node.
    #[command(flatten)]
    pub driver: DriverArgs,

    /// Socket of kubelet's `PodResources` service, which reports the devices of kubelet.
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    pub kubelet_socket: PathBuf,

    /// Socket on which this process waits for the part of the agent that has the driver, another process. Flags about
    /// the driver, MPS and MIG are then those of that process.
    #[arg(long, value_name = "PATH")]
    pub driver_socket: Option<PathBuf>,

    /// Address and port of the GPU metrics for Prometheus, for instance `0.0.0.0:9410`; by default
    /// there are none.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics_listen: Option<SocketAddr>,

    /// Address and port of the answers to kubelet's probes, `/livez` and `/readyz`, for instance
    /// `0.0.0.0:9411`; the port of the metrics has them, too.
    #[arg(long, value_name = "ADDRESS")]
    pub probes_listen: Option<SocketAddr>,

    /// Level and format of the log lines.
    #[command(flatten)]
    pub log: LogArgs,
}

impl AgentArgs {
    /// What all its loops share. It needs a runtime: it follows the file of the CA from now on.
    ///
    /// # Errors
    /// A certificate that cannot be used.
    pub fn config(&self, clock: Clock) -> anyhow::Result<AgentConfig> {
        Ok(AgentConfig {
            extenders: self.extender.clone(),
            proof: proof(self)?,
            metrics: self.metrics_listen.map(|_| AgentMetrics::new()),
            ..self.driver.config(clock)
        })
    }
}

/// The part of an agent that has the driver and the rights that it needs: reads GPUs and carries out orders for the
/// part that reports, another process on the same node. It opens no port.
#[derive(Clone, Debug, clap::Args)]
pub struct DriverPartArgs {
    /// Socket on which the part that reports waits: its `--driver-socket`.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,

    /// What is read and done on the node.
    #[command(flatten)]
    pub driver: DriverArgs,

    /// Level and format of the log lines.
    #[command(flatten)]
    pub log: LogArgs,
}

/// A name that needs no escaping in the path of a report.
///
/// # Errors
/// What it must be.
pub fn node_name(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err("write the name of the Node object, such as gpu-node-1".to_owned()),
    }
}

/// What to say of a word of the command line that is not known, if it was there in the version before.
/// Kept for this version alone.
pub fn gone(word: &str) -> Option<String> {
    let advice = match word {
        "agent" => "leave it out; this program is the agent",
        "--mig-switch" => "leave it out; the agent makes instances on GPUs that are in MIG mode",
        "--mig-reset" => "leave it out; the agent switches no MIG mode",
        "--server-name" => {
            "leave it out; the certificate of every replica needs `gpupack-extender`"
        }
        "--mps-protocol" => "leave it out; the agent speaks protocol 2 with daemons of MPS",
        _ => return None,
    };
    Some(format!("`{word}` is gone: {advice}"))
}

/// Ends when the process is asked to end.
///
/// # Errors
/// The error of the operating system.
pub fn stop() -> anyhow::Result<impl Future<Output = ()>> {
    let requested = stop_signal()?;
    Ok(async {
        requested.await;
        tracing::info!("stopping on a signal");
    })
}

/// How the agent ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// As it was asked to.
    Stopped,
    /// So that its container is made again.
    Outdated,
}

impl Ended {
    /// The exit code of the process.
    pub fn code(self) -> u8 {
        match self {
            Self::Stopped => 0,
            Self::Outdated => MADE_AGAIN,
        }
    }
}

/// Reports the node of this name, and carries out orders on it, until SIGTERM or SIGINT, or until only a new container
/// helps.
///
/// # Errors
/// An address or a file that cannot be used.
pub fn run(args: AgentArgs, node: &str, clock: Clock) -> anyhow::Result<Ended> {
    logging::start(args.log.level(), args.log.format())?;
    match args.driver_socket.clone() {
        Some(socket) => turning(report_for_driver_part(args, node, &socket, clock)),
        None => turning(report(args, node, clock)),
    }
}

/// The same of the part that has the driver.
///
/// # Errors
/// An error of the operating system.
pub fn run_driver(args: DriverPartArgs, node: &str, clock: Clock) -> anyhow::Result<Ended> {
    logging::start(args.log.level(), args.log.format())?;
    turning(drive(args, node, clock))
}

/// Turns an event loop until this is done.
fn turning(done: impl Future<Output = anyhow::Result<Ended>>) -> anyhow::Result<Ended> {
    // One node is little work: a second thread would only cost memory.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the event loop")?;
    let result = runtime.block_on(done);
    // A call of a hanging driver cannot be interrupted.
    runtime.shutdown_timeout(GRACE);
    result
}

/// One process that reports and has the driver.
async fn report(args: AgentArgs, node: &str, clock: Clock) -> anyhow::Result<Ended> {
    let stop = stop()?;
    let config = args.driver.with_driver(args.config(clock)?);
    show(&args, &config)?;
    let kubelet = watched(&args.kubelet_socket).await;
    let started = args.driver.start(&config, kubelet.owned());
    let result = run_node(&config, node, started.probe, stop).await;
    if let Some(daemons) = started.daemons {
        daemons.end().await;
    }
    ended(result)
}

/// The part that reports.
async fn report_for_driver_part(
    args: AgentArgs,
    node: &str,
    socket: &Path,
    clock: Clock,
) -> anyhow::Result<Ended> {
    let stop = stop()?;
    // All orders are passed on: the other part carries out what its flags say.
    let config = AgentConfig {
        mig: Some(MigOnDemand::of_others()),
        limits: Some(LentLimits::default()),
        clearing: Some(Clearing::default()),
        gate: Some(LibraryGate::default()),
        ..args.config(clock)?
    };
    let listener = agent_part::listen(socket).with_context(|| {
        format!("cannot listen on the socket `{}` (`--driver-socket`)", socket.display())
    })?;
    show(&args, &config)?;
    let kubelet = watched(&args.kubelet_socket).await;
    let part = AgentPart { socket: listener, of_kubelet: kubelet.owned() };
    ended(run_agent_part(&config, node, part, stop).await)
}

/// The part that has the driver.
async fn drive(args: DriverPartArgs, node: &str, clock: Clock) -> anyhow::Result<Ended> {
    let stop = stop()?;
    watchdog::watch();
    let config = args.driver.with_driver(args.driver.config(clock));
    let of_kubelet = watch::Sender::new(None);
    let started = args.driver.start(&config, of_kubelet.subscribe());
    let part = DriverPart { socket: args.socket, of_kubelet };
    let result = run_driver_part(&config, node, part, started.probe, stop).await;
    if let Some(daemons) = started.daemons {
        daemons.end().await;
    }
    ended(result)
}

/// The devices of kubelet, read once before any pod can be placed there.
async fn watched(socket: &Path) -> KubeletDevices {
    let kubelet = KubeletDevices::new(socket);
    kubelet.refresh().await;
    tokio::spawn(kubelet.clone().run());
    kubelet
}

fn ended(result: Result<(), AgentError>) -> anyhow::Result<Ended> {
    match result {
        Ok(()) => Ok(Ended::Stopped),
        Err(AgentError::MadeAgain { cause }) => {
            tracing::error!(code = MADE_AGAIN, "{cause}");
            Ok(Ended::Outdated)
        }
        Err(error) => Err(error.into()),
    }
}

/// Opens the ports for Prometheus and kubelet.
fn show(args: &AgentArgs, config: &AgentConfig) -> anyhow::Result<()> {
    let ports = [
        (args.probes_listen, None, "--probes-listen", "answering probes"),
        (args.metrics_listen, config.metrics.clone(), "--metrics-listen", "showing metrics"),
    ];
    for (address, metrics, flag, what) in ports {
        let Some(address) = address else { continue };
        let listener = metrics_port::listen(address)
            .with_context(|| format!("cannot listen on `{address}` (`{flag}`)"))?;
        let address = listener.local_addr().unwrap_or(address);
        let accepted = config.upkeep.accepted.clone();
        let shown = Shown { metrics, accepted, clock: config.clock };
        tokio::spawn(metrics_port::serve(shown, listener));
        tracing::info!(%address, "{what}");
    }
    Ok(())
}

/// How the extender and this agent prove who they are; follows the file of the CA from now on.
fn proof(args: &AgentArgs) -> anyhow::Result<Proof> {
    let Some(ca) = &args.ca_file else { return Ok(Proof::default()) };
    let name = ServerName::try_from(REPLICA_NAME)?;
    let files = CertificateFiles { own: None, ca: Some(ca.clone()), read_every: READ_EVERY };
    let certificates = Certificates::read(files)?;
    let server = Some(ServerProof { tls: certificates.current(), name });
    tokio::spawn(certificates.follow());
    Ok(Proof { server, token_file: args.token_file.clone() })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn a_gone_flag_says_what_to_do() {
        for word in ["agent", "--mig-switch", "--mig-reset", "--server-name", "--mps-protocol"] {
            let said = gone(word).unwrap();
            assert!(said.starts_with(&format!("`{word}` is gone: leave it out; ")), "{said}");
        }
        assert_eq!(gone("--mig-adopt"), None);
    }

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: AgentArgs,
    }

    #[test]
    fn ignored_xids_are_whole_numbers_with_commas_between_them() {
        let read = |text: &str| {
            let line = Line::try_parse_from(["agent", "--extender=http://e", text]);
            line.ok().map(|line| line.args.driver.ignore_xids)
        };
        assert_eq!(read("--period-ms=100"), Some(Vec::new()));
        assert_eq!(read("--ignore-xids=48,63"), Some(vec![48, 63]));
        for bad in ["", "0", "48,", "48,,63", "48;63", "-1", "65536", "all", "0x30", "4 8"] {
            assert_eq!(read(&format!("--ignore-xids={bad}")), None, "{bad}");
        }
    }

    #[test]
    fn the_name_of_a_node_needs_no_escaping_in_a_path() {
        assert_eq!(node_name("gpu-1.example"), Ok("gpu-1.example".to_owned()));
        assert!(node_name("n1/report?x=").is_err());
    }
}
