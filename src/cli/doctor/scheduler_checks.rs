//! Whether kube-scheduler's configuration fits that of the extender.

use std::collections::BTreeSet;

use hyper::Uri;
use k8s_openapi::api::core::v1::Service;

use crate::base::reader::Read;
use crate::doctor::finding::{Findings, Found, count, names, or_ok, short, there};
use crate::doctor::objects::WorkloadSummary;
use crate::doctor::scheduler_file::{Extender, Profile, SchedulerFile, TlsConfig};
use crate::doctor::table::*;
use kube_api::config::file::Config;
use kube_api::config::identity::SCHEDULER_NAME;
use kube_api::request::resources::{MARKERS, MIG_PREFIX, SHARED_SLOT, WHOLE};
use runtime::certificates::REPLICA_NAME;
use wire::api::commands::Check;

/// The weight of the shipped files: with less, in-tree scores can outvote gpupack.
const WEIGHT: i64 = 5;

/// What the file is compared with.
pub(crate) struct ExpectedSettings<'a> {
    pub(crate) config: &'a Config,
    /// MIG profiles of the nodes, without prefix.
    pub(crate) mig_profiles: &'a BTreeSet<String>,
    pub(crate) service: &'a Read<Service>,
}

impl ExpectedSettings<'_> {
    fn has_address(&self, ip: &str) -> bool {
        let specs = self.service.iter().filter_map(|service| service.spec.as_ref());
        specs.flat_map(|spec| spec.cluster_ips.iter().flatten()).any(|own| own == ip)
    }
}

/// The findings about the file of a ConfigMap, where kube-scheduler is one of gpupack's.
pub(crate) fn of_map(
    file: &Read<String>,
    own: &Read<WorkloadSummary>,
    expected: &ExpectedSettings<'_>,
) -> Found {
    let names = &expected.config.scheduler_names;
    let elsewhere = match names.iter().any(|name| name == "default-scheduler") {
        true => IN_PLACE,
        false => NO_SCHEDULER,
    };
    there(own, SCHEDULER, elsewhere)?;
    of_file(there(file, SCHEDULER_MAP, NO_SCHEDULER_MAP)?, expected)
}

/// The findings about a file.
pub(crate) fn of_file(text: &str, expected: &ExpectedSettings<'_>) -> Found {
    let file = SchedulerFile::from_yaml(text).map_err(|error| NO_FILE.with([&error]))?;
    let all = count(file.extenders.len(), "extender");
    let extender = ours(&file, expected).ok_or_else(|| NOT_OURS.with([&all]))?;
    let mut found = address(extender, expected).unwrap_or_else(|only| vec![only]);
    verbs(extender, &mut found);
    found.extend(timeout(extender, expected.config));
    answers(extender, &mut found);
    tls(extender, expected.config, &mut found);
    if file.percentage_of_nodes_to_score != Some(100) {
        found.push(SAMPLED.with([]));
    }
    profiles(&file, extender, expected, &mut found);
    or_ok(found, || {
        let profiles = file.profiles.iter().map(Profile::name);
        SCHEDULER_OK.with([&names(&profiles.collect::<Vec<_>>())])
    })
}

/// The entry that calls the extender.
fn ours<'a>(file: &'a SchedulerFile, expected: &ExpectedSettings<'_>) -> Option<&'a Extender> {
    let named = file.extenders.iter().find(|extender| {
        let host = host_of(&extender.url_prefix).map(|(_, host)| host).unwrap_or_default();
        expected.config.allowed_hosts.contains(&host) || expected.has_address(&host)
    });
    named.or(file.extenders.first().filter(|_| file.extenders.len() == 1))
}

fn host_of(url: &str) -> Option<(Uri, String)> {
    let uri: Uri = url.parse().ok()?;
    let host = uri.host()?.to_owned();
    Some((uri, host))
}

fn address(extender: &Extender, expected: &ExpectedSettings<'_>) -> Found {
    let config = expected.config;
    let url = short(&extender.url_prefix);
    let (uri, host) = host_of(&extender.url_prefix).ok_or_else(|| NO_ADDRESS.with([&url]))?;
    let bare = host.trim_matches(['[', ']']);
    let mut found = Findings::new();
    match (bare.parse::<std::net::IpAddr>(), expected.service) {
        (Err(_), _) if !config.allowed_hosts.contains(&host.to_ascii_lowercase()) => {
            found.push(ODD_HOST.with([&short(&host)]));
        }
        (Ok(_), Ok(_)) if !expected.has_address(bare) => {
            found.push(ODD_IP.with([&short(&host)]));
        }
        (Ok(_), Err(why)) => found.push(SCHEDULER_ADDRESS.unread([], why)),
        _ => {}
    }
    if uri.path().trim_end_matches('/') != "/v1" {
        found.push(ODD_PATH.with([&url]));
    }
    match (config.tls.is_some(), uri.scheme_str()) {
        (true, Some("https")) | (false, Some("http")) => {}
        (true, _) => found.push(NOT_HTTPS.with([&url])),
        (false, _) => found.push(NOT_HTTP.with([&url])),
    }
    Ok(found)
}

fn verbs(extender: &Extender, found: &mut Findings) {
    for (key, is, must) in [
        ("filterVerb", &extender.filter_verb, "filter"),
        ("prioritizeVerb", &extender.prioritize_verb, "prioritize"),
        ("bindVerb", &extender.bind_verb, "bind"),
    ] {
        let shown = if is.is_empty() { "missing".to_owned() } else { format!("`{}`", short(is)) };
        found.extend((is != must).then(|| ODD_VERB.with([&key, &shown, &must])));
    }
    if !["", "preempt"].contains(&extender.preempt_verb.as_str()) {
        found.push(ODD_PREEMPT.with([&short(&extender.preempt_verb)]));
    }
}

fn timeout(extender: &Extender, config: &Config) -> Option<Check> {
    let expected = config.scheduler_timeout;
    let is = short(extender.http_timeout.as_deref().unwrap_or("not set, so 5s"));
    (extender.timeout() != Some(expected)).then(|| ODD_TIMEOUT.with([&is, &expected.as_secs()]))
}

fn answers(extender: &Extender, found: &mut Findings) {
    if extender.weight < WEIGHT {
        found.push(LIGHT.with([&extender.weight, &WEIGHT]));
    }
    if !extender.node_cache_capable {
        found.push(WHOLE_NODES.with([]));
    }
    if extender.ignorable {
        found.push(IGNORABLE.with([]));
    }
}

fn tls(extender: &Extender, config: &Config, found: &mut Findings) {
    let settings = extender.tls_config.clone().unwrap_or_default();
    let TlsConfig { insecure, server_name: name, ca_file, ca_data, .. } = &settings;
    match (&config.tls, extender.enable_https) {
        (None, true) => return found.push(ONLY_SCHEDULER_TLS.with([])),
        (None, false) => return,
        (Some(_), false) => return found.push(ONLY_EXTENDER_TLS.with([])),
        (Some(_), true) => {}
    }
    if *insecure || !is_given(ca_file, ca_data) {
        found.push(NOT_VERIFIED.with([]));
    }
    let has_certificate = is_given(&settings.cert_file, &settings.cert_data);
    if !has_certificate || !is_given(&settings.key_file, &settings.key_data) {
        found.push(NO_CLIENT_CERTIFICATE.with([&SCHEDULER_NAME]));
    }
    if !name.is_empty() && name != REPLICA_NAME && !config.allowed_hosts.contains(name) {
        found.push(ODD_SERVER_NAME.with([&short(name), &REPLICA_NAME]));
    }
}

/// Whether kube-scheduler gets something in one of both ways.
fn is_given(file: &str, data: &str) -> bool {
    !file.is_empty() || !data.is_empty()
}

/// Profiles and the resources that they must leave to gpupack.
fn profiles(
    file: &SchedulerFile,
    extender: &Extender,
    to: &ExpectedSettings<'_>,
    found: &mut Findings,
) {
    let default = [Profile::default()];
    let all = if file.profiles.is_empty() { &default[..] } else { &file.profiles };
    let known = &to.config.scheduler_names;
    let is_served = |profile: &&Profile| known.iter().any(|name| name == profile.name());
    let (served, others): (Vec<&Profile>, Vec<&Profile>) = all.iter().partition(is_served);
    if served.is_empty() {
        let others: Vec<&str> = others.iter().map(|profile| profile.name()).collect();
        return found.push(NO_PROFILE.with([&names(&others), &names(known)]));
    }
    let is_marked = !extender.managed_resources.is_empty();
    let of_mig = to.mig_profiles.iter().map(|profile| format!("{MIG_PREFIX}{profile}"));
    let devices = [WHOLE, SHARED_SLOT].map(str::to_owned).into_iter().chain(of_mig);
    let unmarked = devices.filter(|_| !is_marked);
    let needed: Vec<String> = MARKERS.map(str::to_owned).into_iter().chain(unmarked).collect();
    for profile in served {
        let name = short(profile.name());
        match (profile.has_preemption(), extender.preempt_verb.is_empty()) {
            (true, true) => found.push(EVICTS_UNASKED.with([&name])),
            (false, _) if to.config.preemption.enabled => found.push(NO_PREEMPTION.with([&name])),
            (false, _) | (true, false) => {}
        }
        let counted = needed.iter().filter(|resource| !profile.ignores(resource));
        let counted: Vec<&String> =
            counted.filter(|resource| !extender.manages(resource)).collect();
        found.extend(COUNTED.about_with(&counted, [&name]));
    }
    let managed: BTreeSet<&str> =
        extender.managed_resources.iter().map(|resource| resource.name.as_str()).collect();
    if is_marked && !MARKERS.iter().all(|marker| managed.contains(marker)) {
        found.push(UNMANAGED.with([&names(&MARKERS)]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::lines;
    use wire::api::commands::CheckState;

    const SECOND: &str = include_str!("../../../scheduler-config/second-scheduler.yaml");
    const IN_PLACE: &str = include_str!("../../../scheduler-config/in-place.yaml");

    fn check(text: &str, config: &str, mig: &[&str]) -> Findings {
        let config = Config::from_yaml(config).unwrap();
        let mig_profiles = mig.iter().map(ToString::to_string).collect();
        let service = serde_json::json!({"spec": {"clusterIPs": ["10.96.0.7"]}});
        let service = Ok(serde_json::from_value(service).unwrap());
        let expected =
            ExpectedSettings { config: &config, mig_profiles: &mig_profiles, service: &service };
        lines(of_file(text, &expected))
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
