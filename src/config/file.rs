//! The extender's configuration: a YAML file and flags, checked before anything starts.
//!
//! All faults are listed at once. Unknown keys are refused, so that no typo is silently ignored.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use serde_yaml_ng::{Mapping, Value};

use crate::config::advice::AdviceConfig;
use crate::config::guard::GuardConfig;
use crate::config::port::PortConfig;
use crate::config::reader::Reader;
use crate::config::requests::RequestRules;
use crate::config::webhook::WebhookConfig;
use crate::hardware::pool::PoolRules;
use crate::hardware::units::MemMib;
use crate::model::policy::Policy;

/// The form of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Checked configuration of the extender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Address of the listener for verbs, reports, probes and metrics.
    pub listen: SocketAddr,
    /// Other settings of the listeners.
    pub port: PortConfig,
    /// Kubeconfig file; `None` inside a cluster.
    pub kubeconfig: Option<PathBuf>,
    /// `schedulerName`s of the pending pods that are requeued.
    pub scheduler_names: Vec<String>,
    /// Policy of pods that name none.
    pub policy: Policy,
    /// Node label whose value is the node's pool.
    pub pool_label: String,
    /// Most nodes that *filter* leaves to kube-scheduler if it gets more than 100; `None`: all that
    /// fit.
    pub keep_best: Option<NonZeroUsize>,
    /// Node label whose value is the node's failure domain: the best nodes of several domains stay.
    pub domain_label: String,
    /// How the devices of each pool are shared.
    pub pools: PoolRules,
    /// Rules for requests.
    pub requests: RequestRules,
    /// Longest time of a hold.
    pub claim_for: Duration,
    /// Age of the last report at which a node is silent.
    pub stale_after: Duration,
    /// Longest time that answers wait for the first reports of nodes with pods.
    pub warm_up: Duration,
    /// Longest time that processes of an ended pod keep its devices.
    pub drain_limit: Duration,
    /// Longest time of one call to the API server.
    pub api_timeout: Duration,
    /// How long kube-scheduler waits for an answer; more than `api_timeout`.
    pub scheduler_timeout: Duration,
    /// GPU memory that is used beyond what is allocated counts only above this.
    pub unmanaged_tolerance: MemMib,
    /// Largest request body that is read, in bytes.
    pub max_body_bytes: usize,
    /// Log level, or a filter such as `info,gpupack=debug`.
    pub log_level: String,
    /// The form of log lines.
    pub log_format: LogFormat,
    /// The memory guard.
    pub guard: GuardConfig,
    /// Where to read what pods used before the start.
    pub advice: AdviceConfig,
    /// The admission webhook.
    pub webhook: WebhookConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            port: PortConfig::default(),
            kubeconfig: None,
            scheduler_names: vec!["gpupack".to_owned()],
            policy: Policy::Fragmentation,
            pool_label: "gpupack.dev/pool".to_owned(),
            keep_best: NonZeroUsize::new(50),
            domain_label: "topology.kubernetes.io/zone".to_owned(),
            pools: PoolRules::default(),
            requests: RequestRules::default(),
            claim_for: Duration::from_secs(10),
            stale_after: Duration::from_secs(15),
            warm_up: Duration::from_secs(10),
            drain_limit: Duration::from_secs(30),
            api_timeout: Duration::from_secs(5),
            scheduler_timeout: Duration::from_secs(10),
            unmanaged_tolerance: MemMib::new(128),
            max_body_bytes: 32 << 20,
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            guard: GuardConfig::default(),
            advice: AdviceConfig::default(),
            webhook: WebhookConfig::default(),
        }
    }
}

/// All faults of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFaults {
    /// One line for each fault, with key, value and what is allowed.
    pub faults: Vec<String>,
}

impl fmt::Display for ConfigFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the configuration has {} fault(s)", self.faults.len())?;
        self.faults.iter().try_for_each(|fault| write!(f, "\n  - {fault}"))
    }
}

impl std::error::Error for ConfigFaults {}

/// All keys of the file, in the order of the docs.
pub const KEYS: [&str; 29] = [
    "listen",
    "page_listen",
    "allowed_hosts",
    "max_connections",
    "max_in_flight_mib",
    "log_level_endpoint",
    "kubeconfig",
    "scheduler_names",
    "policy",
    "pool_label",
    "keep_best",
    "domain_label",
    "pools",
    "other_resources",
    "min_memory_mib",
    "max_limit",
    "claim_seconds",
    "report_stale_seconds",
    "warm_up_seconds",
    "drain_seconds",
    "api_timeout_seconds",
    "scheduler_timeout_seconds",
    "unmanaged_tolerance_mib",
    "max_body_mib",
    "log_level",
    "log_format",
    "guard",
    "advice",
    "webhook",
];

impl Config {
    /// Reads a YAML document. A key that it does not have gets its default.
    ///
    /// # Errors
    /// [`ConfigFaults`] with every fault of the document.
    pub fn from_yaml(text: &str) -> Result<Self, ConfigFaults> {
        let one = |fault: String| ConfigFaults { faults: vec![fault] };
        let value: Value = serde_yaml_ng::from_str(text)
            .map_err(|error| one(format!("the file is not valid YAML: {error}")))?;
        let mapping = match value {
            Value::Null => Mapping::new(),
            Value::Mapping(mapping) => mapping,
            _ => return Err(one("the file must be a mapping of keys to values".to_owned())),
        };
        let mut reader = Reader { mapping, section: String::new(), faults: Vec::new() };
        let config = read(&mut reader);
        check_timeouts(&mut reader, &config);
        reader.unknown_keys(&KEYS);
        if reader.faults.is_empty() {
            Ok(config)
        } else {
            Err(ConfigFaults { faults: reader.faults })
        }
    }
}

fn read(reader: &mut Reader) -> Config {
    let default = Config::default();
    let webhook = reader.section("webhook.", &crate::config::webhook::KEYS, WebhookConfig::read);
    let max_body = reader.number("max_body_mib", 1..=1024, 32) << 20;
    let max_body_bytes = usize::try_from(max_body).unwrap_or(default.max_body_bytes);
    Config {
        listen: reader.parsed("listen", "an address such as `0.0.0.0:8080`", default.listen),
        port: PortConfig::read(reader, max_body_bytes),
        kubeconfig: reader.text("kubeconfig").map(PathBuf::from),
        scheduler_names: reader.names("scheduler_names", default.scheduler_names),
        policy: reader.parsed("policy", "`binpack`, `spread` or `fragmentation`", default.policy),
        pool_label: reader.text("pool_label").unwrap_or(default.pool_label),
        keep_best: match reader.number_or_none("keep_best", 0..=10_000) {
            Some(most) => usize::try_from(most).ok().and_then(NonZeroUsize::new),
            None => default.keep_best,
        },
        domain_label: reader.text("domain_label").unwrap_or(default.domain_label),
        requests: RequestRules::read(reader),
        claim_for: reader.seconds("claim_seconds", 1..=300, default.claim_for),
        stale_after: reader.seconds("report_stale_seconds", 2..=3600, default.stale_after),
        warm_up: reader.seconds("warm_up_seconds", 0..=60, default.warm_up),
        drain_limit: reader.seconds("drain_seconds", 1..=600, default.drain_limit),
        api_timeout: reader.seconds("api_timeout_seconds", 1..=60, default.api_timeout),
        scheduler_timeout: reader.seconds(
            "scheduler_timeout_seconds",
            2..=120,
            default.scheduler_timeout,
        ),
        unmanaged_tolerance: MemMib::new(reader.number(
            "unmanaged_tolerance_mib",
            0..=65_536,
            default.unmanaged_tolerance.mib(),
        )),
        max_body_bytes,
        log_level: reader.text("log_level").unwrap_or(default.log_level),
        log_format: reader.word(
            "log_format",
            &[("text", LogFormat::Text), ("json", LogFormat::Json)],
            default.log_format,
        ),
        guard: reader.section("guard.", &crate::config::guard::KEYS, GuardConfig::read),
        advice: reader.section("advice.", &crate::config::advice::KEYS, AdviceConfig::read),
        pools: crate::config::pools::read(reader, webhook.memory_limit),
        webhook,
    }
}

/// Checks the timeouts: a Binding is posted only if kube-scheduler can get its answer in time.
fn check_timeouts(reader: &mut Reader, config: &Config) {
    let (api, scheduler) = (config.api_timeout.as_secs(), config.scheduler_timeout.as_secs());
    if scheduler <= api {
        reader.faults.push(format!(
            "`scheduler_timeout_seconds: {scheduler}` is not allowed: it must be more than \
             `api_timeout_seconds: {api}`, and is the `httpTimeout` of kube-scheduler"
        ));
    }
}

#[cfg(test)]
mod tests;
