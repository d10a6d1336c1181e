//! What gpupack needs of a `KubeSchedulerConfiguration`. Unknown fields are left alone.

use std::time::Duration;

use serde::Deserialize;

use runtime::causes::shown_long;

/// kube-scheduler's default of `httpTimeout` (`DefaultExtenderTimeout`).
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

macro_rules! sections {
    ($($(#[$more:meta])* $name:ident { $($(#[$key:meta])* $field:ident: $type:ty,)* })*) => {
        $($(#[$more])*
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub(crate) struct $name { $($(#[$key])* pub(crate) $field: $type,)* })*
    };
}

sections! {
    SchedulerFile {
        kind: String,
        percentage_of_nodes_to_score: Option<u32>,
        profiles: Vec<Profile>,
        extenders: Vec<Extender>,
    }
    /// What applies to the pods with one `schedulerName`.
    Profile {
        scheduler_name: Option<String>,
        plugins: Plugins,
        plugin_config: Vec<PluginConfig>,
    }
    Plugins { post_filter: PluginSet, multi_point: PluginSet, }
    PluginSet { disabled: Vec<Plugin>, }
    Plugin { name: String, }
    PluginConfig { name: String, args: Args, }
    Args { ignored_resources: Vec<String>, ignored_resource_groups: Vec<String>, }
    Extender {
        url_prefix: String,
        filter_verb: String,
        prioritize_verb: String,
        bind_verb: String,
        preempt_verb: String,
        weight: i64,
        http_timeout: Option<String>,
        /// Whether only names of nodes are sent.
        node_cache_capable: bool,
        /// Whether pods are placed without its answer.
        ignorable: bool,
        #[serde(rename = "enableHTTPS")]
        enable_https: bool,
        tls_config: Option<TlsConfig>,
        /// Only pods that name one of these are sent, if there is any.
        managed_resources: Vec<Managed>,
    }
    /// Files of certificates, or their contents.
    TlsConfig {
        /// Whether the server's certificate is not verified.
        insecure: bool,
        server_name: String,
        ca_file: String,
        cert_file: String,
        key_file: String,
        ca_data: String,
        cert_data: String,
        key_data: String,
    }
    /// A resource of an extender, and whether kube-scheduler does not count it.
    Managed { name: String, ignored_by_scheduler: bool, }
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
        let group = resource.split_once('/').map_or("", |(group, _)| group);
        let mut fits = self.plugin_config.iter().filter(|plugin| plugin.name == "NodeResourcesFit");
        fits.any(|PluginConfig { args, .. }| {
            args.ignored_resources.iter().any(|name| name == resource)
                || args.ignored_resource_groups.iter().any(|name| name == group)
        })
    }
}

impl Extender {
    /// How long kube-scheduler waits for an answer; `None` if that is no Go duration.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.http_timeout.as_deref().map_or(Some(DEFAULT_TIMEOUT), go_duration)
    }

    /// Whether kube-scheduler leaves this resource to the extender.
    pub(crate) fn manages(&self, resource: &str) -> bool {
        let mut managed = self.managed_resources.iter();
        managed.any(|known| known.name == resource && known.ignored_by_scheduler)
    }
}

/// A duration as Go writes it, such as `1m30s`. That of `kube` panics on sums that are too long.
pub(crate) fn go_duration(text: &str) -> Option<Duration> {
    let mut rest = if text == "0" { "0s" } else { text };
    let mut sum = Duration::ZERO;
    while !rest.is_empty() {
        let (number, after) = rest.split_at(rest.find(|c: char| c.is_ascii_lowercase())?);
        let letters = after.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(after.len());
        let (unit, after) = after.split_at(letters);
        let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3_600.0)];
        let (_, seconds) = units.into_iter().find(|(name, _)| *name == unit)?;
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
