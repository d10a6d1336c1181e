//! What gpupack needs of a `KubeSchedulerConfiguration`. Unknown fields are left alone.

use std::time::Duration;

use serde::Deserialize;

use crate::causes::shown_long;

/// kube-scheduler's default of `httpTimeout` (`DefaultExtenderTimeout`).
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// The file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct SchedulerFile {
    /// Always `KubeSchedulerConfiguration`.
    pub(crate) kind: String,
    /// How many percent of the nodes are scored at least.
    pub(crate) percentage_of_nodes_to_score: Option<u32>,
    /// One for each `schedulerName`.
    pub(crate) profiles: Vec<Profile>,
    /// All extenders.
    pub(crate) extenders: Vec<Extender>,
}

/// A profile.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Profile {
    /// Its name; kube-scheduler's default is `default-scheduler`.
    scheduler_name: Option<String>,
    plugins: Plugins,
    plugin_config: Vec<PluginConfig>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Plugins {
    post_filter: PluginSet,
    multi_point: PluginSet,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct PluginSet {
    disabled: Vec<Plugin>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Plugin {
    name: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct PluginConfig {
    name: String,
    args: Args,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Args {
    ignored_resources: Vec<String>,
    ignored_resource_groups: Vec<String>,
}

/// An extender.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Extender {
    /// The address before the verbs.
    pub(crate) url_prefix: String,
    /// Verb *filter*.
    pub(crate) filter_verb: String,
    /// Verb *prioritize*.
    pub(crate) prioritize_verb: String,
    /// Verb *bind*.
    pub(crate) bind_verb: String,
    /// Verb *preempt*.
    pub(crate) preempt_verb: String,
    /// How much its scores count.
    pub(crate) weight: i64,
    /// A Go duration.
    pub(crate) http_timeout: Option<String>,
    /// Whether only names of nodes are sent.
    pub(crate) node_cache_capable: bool,
    /// Whether pods are placed without its answer.
    pub(crate) ignorable: bool,
    /// Whether it is called over TLS.
    #[serde(rename = "enableHTTPS")]
    pub(crate) enable_https: bool,
    /// How it and kube-scheduler prove themselves.
    pub(crate) tls_config: Option<TlsConfig>,
    /// Only pods that name one of these are sent, if there is any.
    pub(crate) managed_resources: Vec<Managed>,
}

/// Files of certificates, or their contents.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct TlsConfig {
    /// Whether the server's certificate is not verified.
    pub(crate) insecure: bool,
    /// The name in the server's certificate.
    pub(crate) server_name: String,
    ca_file: String,
    cert_file: String,
    key_file: String,
    ca_data: String,
    cert_data: String,
    key_data: String,
}

impl TlsConfig {
    /// Whether it knows the CA of the server.
    pub(crate) fn has_ca(&self) -> bool {
        !self.ca_file.is_empty() || !self.ca_data.is_empty()
    }

    /// Whether kube-scheduler has a certificate of its own.
    pub(crate) fn has_own(&self) -> bool {
        let is_given = |file: &str, data: &str| !file.is_empty() || !data.is_empty();
        is_given(&self.cert_file, &self.cert_data) && is_given(&self.key_file, &self.key_data)
    }
}

/// A resource of an extender.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Managed {
    /// Its name.
    pub(crate) name: String,
    /// Whether kube-scheduler does not count it.
    pub(crate) ignored_by_scheduler: bool,
}

impl SchedulerFile {
    /// Reads the file.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub(crate) fn from_yaml(text: &str) -> Result<Self, String> {
        let file: Self = serde_yaml_ng::from_str(text).map_err(|error| shown_long(&error))?;
        if file.kind != "KubeSchedulerConfiguration" {
            let kind: String = file.kind.chars().take(80).collect();
            return Err(format!("its kind is `{kind}`, not `KubeSchedulerConfiguration`"));
        }
        Ok(file)
    }
}

impl Profile {
    /// The `schedulerName` of its pods.
    pub(crate) fn name(&self) -> &str {
        self.scheduler_name.as_deref().unwrap_or("default-scheduler")
    }

    /// Whether its pods evict others.
    pub(crate) fn has_preemption(&self) -> bool {
        let sets = [&self.plugins.post_filter, &self.plugins.multi_point];
        let mut disabled = sets.into_iter().flat_map(|set| &set.disabled);
        !disabled.any(|plugin| ["DefaultPreemption", "*"].contains(&plugin.name.as_str()))
    }

    /// Whether NodeResourcesFit leaves out this resource.
    pub(crate) fn ignores(&self, resource: &str) -> bool {
        let fits = self.plugin_config.iter().filter(|config| config.name == "NodeResourcesFit");
        let group = resource.split_once('/').map_or("", |(group, _)| group);
        fits.into_iter().any(|config| {
            config.args.ignored_resources.iter().any(|name| name == resource)
                || config.args.ignored_resource_groups.iter().any(|name| name == group)
        })
    }
}

impl Extender {
    /// How long kube-scheduler waits for an answer; `None` if that is no Go duration.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        match self.http_timeout.as_deref() {
            None => Some(DEFAULT_TIMEOUT),
            Some(text) => go_duration(text),
        }
    }

    /// Whether kube-scheduler leaves this resource to the extender.
    pub(crate) fn manages(&self, resource: &str) -> bool {
        self.managed_resources.iter().any(|it| it.name == resource && it.ignored_by_scheduler)
    }
}

/// A duration as Go writes it, such as `1m30s`, in whole milliseconds.
pub(crate) fn go_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut sum = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(digits);
        let letters = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, after) = after.split_at(letters);
        let seconds = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3_600.0,
            _ => return None,
        };
        let number: f64 = number.parse().ok()?;
        sum = sum.checked_add(Duration::try_from_secs_f64(number * seconds).ok()?)?;
        rest = after;
    }
    (!text.is_empty()).then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_files_are_read() {
        let second = include_str!("../../../scheduler-config/second-scheduler.yaml");
        let second = SchedulerFile::from_yaml(second).unwrap();
        let (profile, extender) = (&second.profiles[0], &second.extenders[0]);
        assert_eq!((profile.name(), profile.has_preemption()), ("gpupack", true));
        let disabled = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n\
                        profiles: [{plugins: {postFilter: {disabled: [{name: DefaultPreemption}]}}}]";
        let disabled = SchedulerFile::from_yaml(disabled).unwrap();
        assert!(!disabled.profiles[0].has_preemption());
        assert!(profile.ignores("nvidia.com/mig-1g.5gb") && !profile.ignores("nvidia.com/hostdev"));
        assert_eq!((extender.timeout(), extender.weight), (Some(Duration::from_secs(10)), 5));
        let in_place = include_str!("../../../scheduler-config/in-place.yaml");
        let in_place = SchedulerFile::from_yaml(in_place).unwrap();
        assert!(in_place.profiles[0].has_preemption());
        assert!(in_place.extenders[0].manages("gpupack.dev/gpu-share"));
        assert_eq!(in_place.extenders[0].preempt_verb, "preempt");
    }

    #[test]
    fn other_texts_have_an_error() {
        for (text, part) in [
            ("", "its kind is ``"),
            ("a: [", "did not find expected"),
            ("- 1", "invalid type"),
            ("kind: KubeSchedulerConfiguration\nextenders: 7", "invalid type"),
            ("kind: KubeSchedulerConfiguration\nextenders: [{weight: x}]", "invalid type"),
            ("kind: Deployment", "its kind is `Deployment`"),
        ] {
            let error = SchedulerFile::from_yaml(text).unwrap_err();
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn durations_are_those_of_go() {
        for (text, millis) in
            [("10s", 10_000), ("1m30s", 90_000), ("1.5s", 1_500), ("500ms", 500), ("0", 0)]
        {
            assert_eq!(go_duration(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "10", "s", "10 s", "-1s", "1d", "1..s", "99999999999999999999999h"] {
            assert_eq!(go_duration(text), None, "{text}");
        }
    }
}
