//! The extender's configuration: a YAML file and flags, checked before anything starts.
//!
//! All faults are listed at once. Unknown keys are refused, so that no typo is silently ignored.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use garde::Validate;
use serde::{Deserialize, Deserializer};
use serde_path_to_error::Segment;
use serde_yaml_ng::{Mapping, Value};

use crate::config::advice::AdviceConfig;
use crate::config::certificates::CertificatesConfig;
use crate::config::guard::GuardConfig;
use crate::config::identity::{AgentsConfig, TlsConfig};
use crate::config::lease::LeaseConfig;
use crate::config::pods::quota::{QuotaConfig, SharesConfig};
use crate::config::pods::requests::{self, RequestRules};
use crate::config::pods::workloads::{AccessConfig, WorkloadKeys, distinct, known, workloads};
use crate::config::pools::ModelsConfig;
use crate::config::preemption::PreemptionConfig;
use crate::config::values::{
    NoContext, address, filled, is_plain, label, log_filter, mib, names, number, parsed, seconds,
    some_mib,
};
use crate::config::webhook::{MemoryLimit, WebhookConfig};
use crate::config::{gone, pools};
use engine::hardware::pool::PoolRules;
use engine::model::charge::Prices;
use engine::model::policy::Policy;
use runtime::http_client::without_user;
use runtime::process::logging::LogFormat;
use wire::units::{MemMib, Share};

/// Longest time of one call to the API server, if kube-scheduler waits twice as long or more.
const API_TIMEOUT: Duration = Duration::from_secs(5);

/// Checked configuration of the extender; its fields have the order of the docs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Validate)]
#[serde(default, deny_unknown_fields)]
#[garde(allow_unvalidated)]
pub struct Config {
    /// Address of the listener for verbs, and for messages of other replicas.
    #[serde(deserialize_with = "address")]
    pub listen: SocketAddr,
    /// Address of the listener for the reports of agents.
    #[serde(deserialize_with = "address")]
    pub agents_listen: SocketAddr,
    /// Address of the page and of the queries for people.
    #[serde(deserialize_with = "address")]
    pub page_listen: SocketAddr,
    /// Address of the listener for metrics and probes.
    #[serde(deserialize_with = "address")]
    pub metrics_listen: SocketAddr,
    /// Whether these addresses may be reached from other machines without [`Config::tls`].
    pub plain_text: bool,
    /// How this process proves itself; `None`: plain text, and no client proves anything.
    #[garde(dive)]
    pub tls: Option<TlsConfig>,
    /// Who makes the certificates; `None`: others, and nothing is published.
    #[garde(dive)]
    pub certificates: Option<CertificatesConfig>,
    /// Which agents may report.
    #[garde(dive)]
    pub agents: AgentsConfig,
    /// Accepted host names, in lower case; IP addresses and `localhost` are always accepted.
    #[serde(deserialize_with = "hosts")]
    #[garde(custom(host_names))]
    pub allowed_hosts: Vec<String>,
    /// Kubeconfig file; `None` inside a cluster.
    #[garde(inner(custom(filled)))]
    pub kubeconfig: Option<PathBuf>,
    /// `schedulerName`s of the pending pods that are requeued.
    #[garde(custom(names))]
    pub scheduler_names: Vec<String>,
    /// Policy of pods that name none.
    #[serde(deserialize_with = "parsed")]
    pub policy: Policy,
    /// Node label whose value is the node's pool.
    #[garde(custom(label))]
    pub pool_label: String,
    /// Most nodes that *filter* leaves to kube-scheduler if it gets more than 100; `None`: all that
    /// fit.
    #[serde(deserialize_with = "best")]
    pub keep_best: Option<NonZeroUsize>,
    /// How the devices of each pool are shared.
    #[serde(deserialize_with = "pools::read")]
    #[garde(custom(pools::enforceable(self.webhook.memory_limit)))]
    pub pools: PoolRules,
    /// The size of GPUs that have no memory of their own.
    #[garde(dive)]
    pub models: ModelsConfig,
    /// Container resources that only look like GPUs: full names, or prefixes that end in `*`.
    #[garde(custom(requests::resources))]
    pub other_resources: Vec<String>,
    /// Least memory that a part of a GPU can have.
    #[serde(rename = "min_memory_mib", deserialize_with = "mib::<1, 65_536, _>")]
    pub min_memory: MemMib,
    /// Largest limit of a pod, as a share of the GPU.
    #[serde(deserialize_with = "requests::share")]
    pub max_limit: Share,
    /// Of how much memory a fraction is meant; `None`: of that of the GPU that the pod gets.
    #[serde(rename = "fraction_of_mib", deserialize_with = "some_mib::<1_024, 16_777_216, _>")]
    pub fraction_of: Option<MemMib>,
    /// Whether a whole MIG instance may serve an amount of memory.
    #[garde(custom(not_under_mps(self.webhook.memory_limit)))]
    pub memory_by_instance: bool,
    /// Longest time of a hold.
    #[serde(rename = "hold_seconds", deserialize_with = "seconds::<1, 300, _>")]
    pub hold_for: Duration,
    /// How long the first pod of a line waits until room is kept for it; zero: none ever is.
    #[serde(rename = "standing_hold_after_seconds", deserialize_with = "seconds::<0, 86_400, _>")]
    pub standing_hold_after: Duration,
    /// Most devices of a pool that are kept for it; one always may be.
    #[serde(deserialize_with = "requests::share")]
    pub standing_hold_at_most: Share,
    /// Age of the last report from which a node is not reporting; at least two heartbeats of an agent.
    #[serde(rename = "report_stale_seconds", deserialize_with = "seconds::<10, 3_600, _>")]
    pub stale_after: Duration,
    /// How long a bind waits until pods that borrow its room have left.
    /// No key: tests have other values.
    #[serde(skip)]
    pub recall: Duration,
    /// Longest time that processes of an ended pod keep its devices.
    #[serde(rename = "drain_seconds", deserialize_with = "seconds::<10, 600, _>")]
    pub drain_limit: Duration,
    /// Longest time of one call to the API server: 5 s, and at most half of `scheduler_timeout`.
    #[serde(skip)]
    pub api_timeout: Duration,
    /// How long kube-scheduler waits for an answer.
    #[serde(rename = "scheduler_timeout_seconds", deserialize_with = "seconds::<2, 120, _>")]
    pub scheduler_timeout: Duration,
    /// Largest request body that is read, in bytes.
    #[serde(rename = "max_body_mib", deserialize_with = "mib_in_bytes")]
    pub max_body_bytes: usize,
    /// Whether each placement is an event of the pod, too.
    pub placed_events: bool,
    /// Log level, or a filter such as `info,gpupack=debug`.
    #[garde(custom(log_filter))]
    pub log_level: String,
    /// The form of log lines.
    pub log_format: LogFormat,
    /// How several replicas agree on the one that acts.
    #[garde(dive)]
    pub lease: LeaseConfig,
    /// Evictions for more important pods.
    pub preemption: PreemptionConfig,
    pub guard: GuardConfig,
    /// Where to read what pods used before the start.
    pub advice: AdviceConfig,
    /// What GPU pods count against quotas.
    #[garde(dive)]
    pub quota: QuotaConfig,
    /// What teams may have.
    #[garde(dive)]
    pub shares: SharesConfig,
    /// Classes of workloads, by name.
    #[garde(custom(distinct))]
    pub workloads: BTreeMap<String, WorkloadKeys>,
    /// What pods of a namespace may use.
    #[garde(custom(known(&self.workloads)))]
    pub access: AccessConfig,
    /// The admission webhook.
    #[garde(dive)]
    pub webhook: WebhookConfig,
}

impl Default for Config {
    fn default() -> Self {
        let hosts = ["", ".gpu-system", ".gpu-system.svc", ".gpu-system.svc.cluster.local"];
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            agents_listen: SocketAddr::from(([127, 0, 0, 1], 8082)),
            page_listen: SocketAddr::from(([127, 0, 0, 1], 8081)),
            metrics_listen: SocketAddr::from(([127, 0, 0, 1], 8083)),
            plain_text: false,
            tls: None,
            certificates: None,
            agents: AgentsConfig::default(),
            allowed_hosts: hosts.map(|rest| format!("gpupack{rest}")).to_vec(),
            kubeconfig: None,
            scheduler_names: vec!["gpupack".to_owned()],
            policy: Policy::Fragmentation,
            pool_label: "gpupack.dev/pool".to_owned(),
            keep_best: NonZeroUsize::new(50),
            pools: PoolRules::default(),
            models: ModelsConfig::default(),
            other_resources: Vec::new(),
            min_memory: MemMib::new(64),
            max_limit: Share::WHOLE,
            fraction_of: None,
            memory_by_instance: false,
            hold_for: Duration::from_secs(10),
            standing_hold_after: Duration::from_secs(60),
            standing_hold_at_most: Share::from_millionths(250_000),
            stale_after: Duration::from_secs(15),
            recall: Duration::from_secs(8),
            drain_limit: Duration::from_secs(30),
            api_timeout: API_TIMEOUT,
            scheduler_timeout: Duration::from_secs(10),
            max_body_bytes: 32 << 20,
            placed_events: true,
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            lease: LeaseConfig::default(),
            preemption: PreemptionConfig::default(),
            guard: GuardConfig::default(),
            advice: AdviceConfig::default(),
            quota: QuotaConfig::default(),
            shares: SharesConfig::default(),
            workloads: BTreeMap::new(),
            access: AccessConfig::default(),
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

impl Config {
    /// Whether pods that name this scheduler are ours.
    pub fn serves(&self, scheduler_name: &str) -> bool {
        self.scheduler_names.iter().any(|name| name == scheduler_name)
    }

    /// Reads a YAML document. A key that it does not have gets its default.
    ///
    /// serde stops at the first key that it cannot read. That key is noted and taken out of the
    /// document, and the rest is read again, so every fault is listed.
    ///
    /// # Errors
    /// [`ConfigFaults`] with every fault of the document.
    pub fn from_yaml(text: &str) -> Result<Self, ConfigFaults> {
        let value: Value = serde_yaml_ng::from_str(text).map_err(|error| ConfigFaults {
            faults: vec![format!("the file is not valid YAML: {error}")],
        })?;
        let mut document = match value {
            Value::Null => Mapping::new(),
            Value::Mapping(mapping) => mapping,
            _ => {
                let fault = "the file must be a mapping of keys to values".to_owned();
                return Err(ConfigFaults { faults: vec![fault] });
            }
        };
        let mut faults = Vec::new();
        drop_empty(&mut document, &mut faults);
        faults.extend(gone::take(&mut document));
        let config: Self = loop {
            let error = match serde_path_to_error::deserialize(&Value::from(document.clone())) {
                Ok(config) => break config,
                Err(error) => error,
            };
            let keys = error.path().iter().map_while(|segment| match segment {
                Segment::Map { key } => Some(key.as_str()),
                Segment::Seq { .. } | Segment::Enum { .. } | Segment::Unknown => None,
            });
            let keys: Vec<&str> = keys.collect();
            let value = remove(&mut document, &keys);
            faults.push(fault(&keys.join("."), value.as_ref(), error.inner()));
            if value.is_none() {
                return Err(ConfigFaults { faults });
            }
        };
        for (path, error) in config.validate().err().iter().flat_map(garde::Report::iter) {
            let path = path.to_string();
            let (first, rest) = path.split_once('.').unwrap_or((&path, ""));
            let section = document.get(first);
            let value = if rest.is_empty() {
                section
            } else {
                section.and_then(|section| section.get(rest))
            };
            faults.push(fault(&path, value, error));
        }
        if config.certificates.is_some() && config.tls.is_none() {
            faults.push("`certificates` is not allowed without `tls`".to_owned());
        }
        let is_limited = config.webhook.memory_limit == MemoryLimit::Driver;
        let pools = config.pools.capped(config.max_limit).limited_by_driver(is_limited);
        let api_timeout = API_TIMEOUT.min(config.scheduler_timeout / 2);
        let config = Self { pools, api_timeout, ..config };
        if faults.is_empty() { Ok(config) } else { Err(ConfigFaults { faults }) }
    }

    /// Why these addresses may not be listened on, if they may not.
    pub fn exposure_fault(&self) -> Option<String> {
        let all = [
            ("listen", self.listen),
            ("agents_listen", self.agents_listen),
            ("page_listen", self.page_listen),
            ("metrics_listen", self.metrics_listen),
        ];
        let (key, address) = all.iter().find(|(_, address)| !address.ip().is_loopback())?;
        (self.tls.is_none() && !self.plain_text).then(|| {
            format!(
                "`{key}: {address}` can be reached from other machines, in plain text: set `tls`, or \
                 `plain_text: true` where the network is trusted"
            )
        })
    }

    /// Most bytes that connections may hold: requests, and answers that clients have not read. Two
    /// bodies fit, because a complete body is copied once.
    pub fn max_in_flight_bytes(&self) -> usize {
        (64 << 20).max(2 * self.max_body_bytes)
    }

    /// The rules for requests.
    pub fn request_rules(&self) -> RequestRules {
        RequestRules {
            other_resources: self.other_resources.clone(),
            min_memory: self.min_memory,
            max_limit: self.max_limit,
            fraction_of: self.fraction_of,
            by_instance: self.memory_by_instance,
            prices: Prices {
                reference: self.quota.reference,
                models: self.quota.models(),
                replicas: self.pools.iter().filter_map(|(_, rule)| rule.replicas).collect(),
            },
            needs_markers: self.quota.required,
            workloads: workloads(&self.workloads),
            access: self.access.rules(),
        }
    }
}

/// Takes out keys without a value, which have their defaults, and keys that are no text.
fn drop_empty(mapping: &mut Mapping, faults: &mut Vec<String>) {
    mapping.retain(|key, value| {
        if let Value::Mapping(section) = value {
            drop_empty(section, faults);
        }
        if !key.is_string() {
            faults.push(fault("", Some(key), &"a key must be a text"));
        }
        if let (Some(key), Value::Tagged(_)) = (key.as_str(), &*value) {
            faults.push(fault(key, Some(value), &"a value must have no tag"));
        }
        key.is_string() && !matches!(value, Value::Null | Value::Tagged(_))
    });
}

/// Takes the value at this path out of the document.
fn remove(document: &mut Mapping, path: &[&str]) -> Option<Value> {
    match path {
        [] => None,
        [key] => document.remove(*key),
        [section, rest @ ..] => remove(document.get_mut(*section)?.as_mapping_mut()?, rest),
    }
}

fn fault(path: &str, value: Option<&Value>, allowed: &dyn fmt::Display) -> String {
    let shown = value.map(|value| serde_yaml_ng::to_string(value).unwrap_or_default());
    let shown = without_user(&shown.unwrap_or_default().trim().replace('\n', " "));
    format!("`{}: {shown}` is not allowed: {allowed}", path.escape_debug())
}

fn hosts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let mut hosts = Vec::<String>::deserialize(from)?;
    hosts.iter_mut().for_each(|host| host.make_ascii_lowercase());
    Ok(hosts)
}

/// A rule for hosts of requests: names, or IP addresses of any version.
fn host_names(hosts: &[String], _: &NoContext) -> garde::Result {
    let are_hosts = hosts
        .iter()
        .all(|host| host.parse::<IpAddr>().is_ok() || is_plain(host) && !host.contains('/'));
    match !hosts.is_empty() && are_hosts {
        true => Ok(()),
        false => Err(garde::Error::new("it must be a list of at least one name without a port")),
    }
}

fn best<'de, D: Deserializer<'de>>(from: D) -> Result<Option<NonZeroUsize>, D::Error> {
    number::<0, 10_000, usize, D>(from).map(NonZeroUsize::new)
}

/// A client of MPS on a MIG instance would find no daemon.
fn not_under_mps(limit: MemoryLimit) -> impl FnOnce(&bool, &()) -> garde::Result {
    move |by_instance, ()| match *by_instance && limit == MemoryLimit::Mps {
        true => Err(garde::Error::new(
            "instances have no MPS daemon: it must be `false` with `webhook.memory_limit: mps`",
        )),
        false => Ok(()),
    }
}

fn mib_in_bytes<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    number::<1, 1_024, usize, D>(from).map(|mib| mib << 20)
}

#[cfg(test)]
pub(crate) mod tests;
