//! Whether kube-scheduler's configuration fits that of the extender.

use std::collections::BTreeSet;

use hyper::Uri;

use crate::api::commands::Check;
use crate::cli::base::reader::Read;
use crate::cli::doctor::finding::{Findings, Of, count, names, short};
use crate::cli::doctor::scheduler_file::{Extender, Profile, SchedulerFile};
use crate::config::file::Config;
use crate::kube_api::request::resources::{MARKERS, MIG_PREFIX, SHARED_SLOT, WHOLE};

/// The weight of the shipped files: with less, in-tree scores can outvote gpupack.
const WEIGHT: i64 = 5;

/// All of this file.
const FILE: Of = Of("kube-scheduler configuration");

/// What the file is compared with.
pub(crate) struct Expected<'a> {
    /// The extender's configuration.
    pub(crate) config: &'a Config,
    /// MIG profiles of the nodes, without prefix.
    pub(crate) mig_profiles: &'a BTreeSet<String>,
    /// Addresses of the extender's Service.
    pub(crate) service_ips: &'a Read<Vec<String>>,
}

/// The findings about a file.
pub(crate) fn of_file(text: &str, expected: &Expected<'_>) -> Findings {
    let file = match SchedulerFile::from_yaml(text) {
        Ok(file) => file,
        Err(error) => {
            return vec![FILE.problem(
                format!("it cannot be read: {error}"),
                "begin again with deploy/scheduler.yaml, as deploy/render writes it",
            )];
        }
    };
    let Some(extender) = ours(&file, expected) else {
        return vec![FILE.problem(
            format!("none of its {} is gpupack's", count(file.extenders.len(), "extender")),
            "take the section `extenders` from deploy/scheduler.yaml, as deploy/render writes it",
        )];
    };
    let mut found: Findings = [
        address(extender, expected),
        verbs(extender),
        timeout(extender, expected.config),
        answers(extender),
        tls(extender, expected.config),
    ]
    .concat();
    found.extend(sample(&file));
    found.extend(profiles(&file, extender, expected));
    if found.is_empty() {
        let names: Vec<&str> = file.profiles.iter().map(Profile::name).collect();
        found.push(FILE.ok(format!("it fits the extender; profiles: {}", self::names(&names))));
    }
    found
}

/// The entry that calls the extender.
fn ours<'a>(file: &'a SchedulerFile, expected: &Expected<'_>) -> Option<&'a Extender> {
    let is_named = |extender: &&Extender| {
        let host = extender.url_prefix.parse::<Uri>().ok();
        let host = host.and_then(|uri| uri.host().map(str::to_owned)).unwrap_or_default();
        let ips = expected.service_ips.iter().flatten();
        expected.config.allowed_hosts.contains(&host) || ips.into_iter().any(|ip| *ip == host)
    };
    let found = file.extenders.iter().find(is_named);
    found.or(file.extenders.first().filter(|_| file.extenders.len() == 1))
}

fn address(extender: &Extender, expected: &Expected<'_>) -> Findings {
    let config = expected.config;
    let url = &extender.url_prefix;
    let Some((uri, host)) = url
        .parse::<Uri>()
        .ok()
        .and_then(|uri| uri.host().map(str::to_owned).map(|host| (uri, host)))
    else {
        let found = format!("urlPrefix `{}` is no address", short(url));
        return vec![FILE.problem(found, "set urlPrefix: http://gpupack.gpu-system.svc:8080/v1")];
    };
    let mut found = Findings::new();
    let is_ip = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok();
    match expected.service_ips {
        _ if !is_ip && !config.allowed_hosts.contains(&host.to_ascii_lowercase()) => {
            let name = short(&host);
            found.push(FILE.problem(
                format!("urlPrefix names `{name}`, which the extender does not accept (421)"),
                "name the extender's Service in urlPrefix, or add that name to allowed_hosts",
            ));
        }
        Ok(ips) if is_ip && !ips.iter().any(|ip| *ip == host.trim_matches(['[', ']'])) => {
            found.push(FILE.problem(
                format!(
                    "urlPrefix names {}, which is no address of the Service gpupack",
                    short(&host)
                ),
                "put its address there: kubectl -n gpu-system get service gpupack",
            ));
        }
        Err(why) if is_ip => found.push(FILE.unread("whether urlPrefix is the Service's", why)),
        Ok(_) | Err(_) => {}
    }
    if uri.path().trim_end_matches('/') != "/v1" {
        found.push(FILE.problem(
            format!("urlPrefix `{}` does not end with /v1", short(url)),
            "end urlPrefix with /v1: the verbs are below that path",
        ));
    }
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    if uri.scheme_str() != Some(scheme) {
        let why = if config.tls.is_some() { "has `tls`" } else { "has no `tls`" };
        found.push(FILE.problem(
            format!("urlPrefix `{}` is not {scheme}, but the extender {why}", short(url)),
            format!("begin urlPrefix with {scheme}://"),
        ));
    }
    found
}

fn verbs(extender: &Extender) -> Findings {
    let verbs = [
        ("filterVerb", &extender.filter_verb, "filter"),
        ("prioritizeVerb", &extender.prioritize_verb, "prioritize"),
        ("bindVerb", &extender.bind_verb, "bind"),
    ];
    let wrong = verbs.into_iter().filter(|(_, is, must)| is != must);
    let mut found: Findings = wrong
        .map(|(key, is, must)| {
            let is = if is.is_empty() { "missing".to_owned() } else { format!("`{}`", short(is)) };
            FILE.problem(format!("{key} is {is}"), format!("set {key}: {must}"))
        })
        .collect();
    if !["", "preempt"].contains(&extender.preempt_verb.as_str()) {
        let found_verb = format!("preemptVerb is `{}`", short(&extender.preempt_verb));
        found.push(FILE.problem(found_verb, "set preemptVerb: preempt, or leave it out"));
    }
    found
}

fn timeout(extender: &Extender, config: &Config) -> Findings {
    let expected = config.scheduler_timeout;
    let is = match extender.timeout() {
        Some(is) if is == expected => return Vec::new(),
        Some(_) => extender.http_timeout.as_deref().unwrap_or("not set, so 5s"),
        None => extender.http_timeout.as_deref().unwrap_or_default(),
    };
    let seconds = expected.as_secs();
    vec![FILE.problem(
        format!("httpTimeout is {}, but scheduler_timeout_seconds is {seconds}", short(is)),
        format!(
            "set httpTimeout: {seconds}s in the ConfigMap and restart kube-scheduler, or change \
             scheduler_timeout_seconds of the extender"
        ),
    )]
}

fn answers(extender: &Extender) -> Findings {
    let mut found = Findings::new();
    if extender.weight < WEIGHT {
        found.push(FILE.warning(
            format!("weight is {}: other scores can outvote gpupack", extender.weight),
            format!("set weight: {WEIGHT}"),
        ));
    }
    if !extender.node_cache_capable {
        found.push(FILE.warning(
            "nodeCacheCapable is not true: kube-scheduler sends whole nodes with each call",
            "set nodeCacheCapable: true",
        ));
    }
    if extender.ignorable {
        found.push(FILE.problem(
            "ignorable is true: without an answer, pods are placed unchecked",
            "set ignorable: false",
        ));
    }
    found
}

fn tls(extender: &Extender, config: &Config) -> Findings {
    let settings = extender.tls_config.clone().unwrap_or_default();
    let Some(expected) = &config.tls else {
        return match extender.enable_https {
            true => vec![FILE.problem(
                "enableHTTPS is true, but the extender has no `tls`",
                "set `tls` in the extender's configuration, or enableHTTPS: false",
            )],
            false => Vec::new(),
        };
    };
    let mut found = Findings::new();
    if !extender.enable_https {
        found.push(FILE.problem(
            "enableHTTPS is not true, but the extender has `tls`",
            "set enableHTTPS: true and tlsConfig, as in deploy/scheduler.yaml",
        ));
        return found;
    }
    if settings.insecure || !settings.has_ca() {
        found.push(FILE.problem(
            "tlsConfig does not verify the extender's certificate",
            "set tlsConfig.caFile, and insecure: false",
        ));
    }
    if !settings.has_own() {
        found.push(FILE.problem(
            "tlsConfig has no certFile and keyFile: the extender refuses kube-scheduler",
            format!("give it a certificate with the name {}", expected.scheduler_name),
        ));
    }
    let name = &settings.server_name;
    if !name.is_empty() && *name != expected.replica_name && !config.allowed_hosts.contains(name) {
        found.push(FILE.warning(
            format!("tlsConfig.serverName is `{}`", short(name)),
            format!(
                "set serverName: {}, unless the certificate has that name",
                expected.replica_name
            ),
        ));
    }
    found
}

fn sample(file: &SchedulerFile) -> Option<Check> {
    (file.percentage_of_nodes_to_score != Some(100)).then(|| {
        FILE.warning(
            "percentageOfNodesToScore is not 100: in 100 nodes and more, only a sample is tried",
            "set percentageOfNodesToScore: 100",
        )
    })
}

/// Profiles and the resources that they must leave to gpupack.
fn profiles(file: &SchedulerFile, extender: &Extender, expected: &Expected<'_>) -> Findings {
    let default = [Profile::default()];
    let all = if file.profiles.is_empty() { &default[..] } else { &file.profiles };
    let known = &expected.config.scheduler_names;
    let (served, others): (Vec<&Profile>, Vec<&Profile>) =
        all.iter().partition(|profile| known.iter().any(|name| name == profile.name()));
    if served.is_empty() {
        let others: Vec<&str> = others.iter().map(|profile| profile.name()).collect();
        return vec![FILE.problem(
            format!(
                "its profiles ({}) are not in scheduler_names ({})",
                names(&others),
                names(known)
            ),
            "give profile and scheduler_names the same name",
        )];
    }
    let mut found = Findings::new();
    let is_marked = !extender.managed_resources.is_empty();
    for profile in served {
        found.extend(preemption(profile, extender, expected.config));
        let mut needed: Vec<String> = MARKERS.map(str::to_owned).into();
        if !is_marked {
            needed.extend([WHOLE.to_owned(), SHARED_SLOT.to_owned()]);
            let profiles = expected.mig_profiles.iter();
            needed.extend(profiles.map(|profile| format!("{MIG_PREFIX}{profile}")));
        }
        needed.retain(|name| !profile.ignores(name) && !extender.manages(name));
        if !needed.is_empty() {
            found.push(FILE.problem(
                format!(
                    "profile {} counts {}: pods that request it wait forever",
                    short(profile.name()),
                    names(&needed)
                ),
                "add it to ignoredResources of NodeResourcesFit (in place: to managedResources with \
                 ignoredByScheduler: true), and restart kube-scheduler",
            ));
        }
    }
    let managed = |name| extender.managed_resources.iter().any(|it| it.name == name);
    if is_marked && !MARKERS.into_iter().all(managed) {
        found.push(FILE.problem(
            "managedResources lacks a marker: pods with it are placed without gpupack",
            format!("list {} in managedResources", names(&MARKERS)),
        ));
    }
    found
}

fn preemption(profile: &Profile, extender: &Extender, config: &Config) -> Option<Check> {
    let is_called = !extender.preempt_verb.is_empty();
    let name = short(profile.name());
    match (profile.has_preemption(), is_called) {
        (true, false) => Some(FILE.problem(
            format!("profile {name} evicts pods without asking gpupack"),
            "set preemptVerb: preempt, and restart kube-scheduler",
        )),
        (false, _) if config.preemption.enabled => Some(FILE.problem(
            format!("profile {name} has no DefaultPreemption: gpupack does not learn where CPU is short"),
            "remove DefaultPreemption from `disabled`, set preemptVerb: preempt, and restart kube-scheduler",
        )),
        (false, _) | (true, true) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::commands::CheckState;

    const SECOND: &str = include_str!("../../../scheduler-config/second-scheduler.yaml");
    const IN_PLACE: &str = include_str!("../../../scheduler-config/in-place.yaml");

    fn check(text: &str, config: &str, mig: &[&str]) -> Findings {
        let config = Config::from_yaml(config).unwrap();
        let mig_profiles = mig.iter().map(ToString::to_string).collect();
        let service_ips = Ok(vec!["10.96.0.7".to_owned()]);
        let expected =
            Expected { config: &config, mig_profiles: &mig_profiles, service_ips: &service_ips };
        of_file(text, &expected)
    }

    #[test]
    fn the_shipped_files_fit_the_shipped_configuration() {
        let found = check(SECOND, "", &["1g.5gb", "7g.141gb"]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].state, CheckState::Ok);
        let found = check(IN_PLACE, "scheduler_names: [default-scheduler]", &["1g.5gb"]);
        assert_eq!((found.len(), found[0].state), (1, CheckState::Ok), "{found:?}");
        let by_ip = SECOND.replace("gpupack.gpu-system.svc", "10.96.0.7");
        assert_eq!(check(&by_ip, "", &[])[0].state, CheckState::Ok);
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table")]
    fn each_fault_is_named_with_its_fix() {
        for (from, to, part, fix) in [
            ("httpTimeout: 10s", "httpTimeout: 30s", "httpTimeout is 30s", "httpTimeout: 10s"),
            ("    httpTimeout: 10s\n", "", "httpTimeout is not set, so 5s", "httpTimeout: 10s"),
            ("httpTimeout: 10s", "httpTimeout: ten", "httpTimeout is ten", "httpTimeout: 10s"),
            ("filterVerb: filter", "filterVerb: filters", "filterVerb is `filters`", "filter"),
            ("    bindVerb: bind\n", "", "bindVerb is missing", "set bindVerb: bind"),
            ("    weight: 5\n", "    weight: 1\n", "weight is 1", "weight: 5"),
            ("nodeCacheCapable: true", "nodeCacheCapable: false", "nodeCacheCapable", "true"),
            ("ignorable: false", "ignorable: true", "ignorable is true", "ignorable: false"),
            ("gpupack.gpu-system.svc:8080", "10.96.0.8:8080", "no address of the Service", "get"),
            (
                "percentageOfNodesToScore: 100",
                "percentageOfNodesToScore: 50",
                "percentageOfNodesToScore",
                "100",
            ),
            (":8080/v1", ":8080/v2", "does not end with /v1", "/v1"),
            ("urlPrefix: http:", "urlPrefix: https:", "is not http", "http://"),
            (
                "urlPrefix: http:",
                "urlPrefix: 'no address'\n    x: http:",
                "is no address",
                "urlPrefix",
            ),
            ("http://gpupack.gpu-system", "http://elsewhere.b", "421", "allowed_hosts"),
            (
                "- schedulerName: gpupack",
                "- schedulerName: gpu",
                "are not in scheduler_names",
                "same",
            ),
            (
                "            - gpupack.dev/gpu-memory\n",
                "",
                "gpupack.dev/gpu-memory",
                "ignoredResources",
            ),
            (
                "    preemptVerb: preempt\n",
                "",
                "evicts pods without asking",
                "preemptVerb: preempt",
            ),
            (
                "- schedulerName: gpupack\n",
                "- schedulerName: gpupack\n    plugins: {postFilter: {disabled: [{name: DefaultPreemption}]}}\n",
                "has no DefaultPreemption",
                "remove DefaultPreemption",
            ),
            (
                "    ignorable: false",
                "    ignorable: false\n    enableHTTPS: true",
                "no `tls`",
                "tls",
            ),
            (
                "    ignorable: false",
                "    ignorable: false\n    managedResources: [{name: gpupack.dev/gpu-share}]",
                "managedResources lacks a marker",
                "gpupack.dev/gpu-memory",
            ),
            (
                "extenders:\n",
                "others:\n",
                "none of its 0 extenders is gpupack's",
                "deploy/scheduler.yaml",
            ),
        ] {
            let text = SECOND.replacen(from, to, 1);
            assert_ne!(text, SECOND, "{from}");
            let found = check(&text, "", &[]);
            let named = found.iter().find(|finding| finding.found.contains(part));
            let named = named.unwrap_or_else(|| panic!("{part}: {found:?}"));
            assert!(named.fix.as_ref().is_some_and(|text| text.contains(fix)), "{fix}: {named:?}");
        }
        let found = check(SECOND, "", &["9g.999gb"]);
        assert!(found[0].found.contains("nvidia.com/mig-9g.999gb"), "{found:?}");
    }

    #[test]
    fn tls_must_fit_on_both_sides() {
        let tls = "tls: {certificate_file: /c, key_file: /k, ca_file: /a}";
        let parts = |text: &str| -> Vec<String> {
            check(text, tls, &[]).into_iter().map(|finding| finding.found).collect()
        };
        let found = parts(SECOND);
        assert!(found.iter().any(|text| text.contains("is not https")), "{found:?}");
        assert!(found.iter().any(|text| text.contains("enableHTTPS is not true")), "{found:?}");
        let https =
            SECOND.replacen("urlPrefix: http:", "enableHTTPS: true\n    urlPrefix: https:", 1);
        let found = parts(&https);
        assert!(found.iter().any(|text| text.contains("does not verify")), "{found:?}");
        assert!(found.iter().any(|text| text.contains("no certFile")), "{found:?}");
        let whole = https.replacen(
            "enableHTTPS: true",
            "tlsConfig: {caFile: /a, certFile: /c, keyFile: /k, serverName: gpupack-extender}\n    \
             enableHTTPS: true",
            1,
        );
        assert!(parts(&whole)[0].starts_with("it fits"), "{:?}", parts(&whole));
        let other = whole.replacen("serverName: gpupack-extender", "serverName: other", 1);
        assert!(parts(&other)[0].contains("serverName is `other`"), "{:?}", parts(&other));
    }

    #[test]
    fn of_several_extenders_that_of_the_service_is_checked() {
        let text = SECOND.replacen(
            "extenders:\n",
            "extenders:\n  - {urlPrefix: 'http://other.b:1/x', filterVerb: f}\n",
            1,
        );
        assert_eq!(check(&text, "", &[])[0].state, CheckState::Ok);
    }
}
