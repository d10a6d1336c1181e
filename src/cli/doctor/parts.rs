//! The cluster's version and namespaces, the parts of gpupack that run in it, and what containers, quotas and
//! classes of workloads need.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::version::Info;

use crate::base::reader::{Read, Unread};
use crate::doctor::finding::{Findings, Found, count, known, names, or_ok, short, there};
use crate::doctor::objects::{OwnPod, WorkloadSummary};
use crate::doctor::table::*;
use kube_api::config::file::Config;
use kube_api::config::webhook::{MemoryLimit, THREAD_CAP, ThreadCap};
use kube_api::request::resources::{MARKERS, WHOLE};
use wire::api::commands::Check;

/// From this minor version on, the API server has the policies.
const POLICIES: u32 = 30;

/// From this minor version on, a bind makes kube-scheduler look at the other waiting pods.
const QUEUEING_HINTS: u32 = 32;

/// A Lease that was not renewed for so long is not held, whatever its length; clocks differ.
const STALE_SECONDS: i64 = 30;

/// Label of namespaces: the Pod Security standard that is enforced there.
const ENFORCED: &str = "pod-security.kubernetes.io/enforce";

/// Kubernetes is new enough.
pub(crate) fn kubernetes(version: &Read<Info>) -> Found {
    let info = known(version, &VERSION)?;
    let (Some(major), Some(minor)) = (leading_number(&info.major), leading_number(&info.minor))
    else {
        return Err(NO_VERSION.with([&short(&info.major), &short(&info.minor)]));
    };
    let row = match (major, minor) {
        (1, ..POLICIES) => OLD_VERSION,
        (1, ..QUEUEING_HINTS) => NO_HINTS,
        _ => VERSION_OK,
    };
    Ok(vec![row.with([&major, &minor, &short(&info.git_version)])])
}

fn leading_number(text: &str) -> Option<u32> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().ok()
}

/// A namespace exists, with the Pod Security standard of the shipped file.
pub(crate) fn namespace(
    name: &str,
    labels: &Read<BTreeMap<String, String>>,
    standard: &str,
) -> Check {
    let labels = match labels {
        Ok(labels) => labels,
        Err(Unread::Absent) => return NO_NAMESPACE.with([&name]),
        Err(why) => return NAMESPACE.unread([&name], why),
    };
    let enforced = labels.get(ENFORCED).map(String::as_str);
    let row = match enforced {
        Some(enforced) if enforced == standard => STANDARD_OK,
        Some(_) if standard == "privileged" => STANDARD_FORBIDS,
        None if standard == "privileged" => STANDARD_FREE,
        Some(_) => STANDARD_OTHER,
        None => NO_STANDARD,
    };
    row.with([&name, &standard, &short(enforced.unwrap_or_default())])
}

/// A Deployment is there, and all of its replicas are ready.
pub(crate) fn deployment(check: &'static str, found: &Read<WorkloadSummary>) -> Found {
    let found = there(found, DEPLOYMENT.of(check), NO_DEPLOYMENT.of(check))?;
    let WorkloadSummary { name, component, wanted, ready, .. } = found;
    let row = match ready {
        _ if *wanted == 0 => SCALED_DOWN,
        0 => NONE_READY,
        _ if ready < wanted => FEW_READY,
        _ => ALL_READY,
    };
    Ok(vec![row.of(check).with([name, ready, wanted, component])])
}

/// The Lease is held by a replica that renews it, and that replica's pod has the label.
pub(crate) fn leader(
    extender: &WorkloadSummary,
    lease: &Read<Lease>,
    pods: &Read<Vec<OwnPod>>,
    now_unix_seconds: i64,
) -> Found {
    if !extender.arguments().any(|argument| argument.starts_with("--replica")) {
        return Err(ALONE.with([]));
    }
    let lease = there(lease, LEASE, NO_LEASE)?.spec.clone().unwrap_or_default();
    let holder = lease.holder_identity.as_deref().unwrap_or_default();
    if holder.is_empty() {
        return Err(NOT_HELD.with([]));
    }
    let renewed = lease.renew_time.as_ref().map(|time| time.0.as_second());
    let age = renewed.map_or(i64::MAX, |at| now_unix_seconds.saturating_sub(at));
    let longest = i64::from(lease.lease_duration_seconds.unwrap_or(0)).saturating_mul(3);
    let mut found = Findings::new();
    let holder = holder.rsplit_once('_').map_or(holder, |(pod, _)| pod);
    if age > longest.max(STALE_SECONDS) {
        let ago = if renewed.is_none() { "never".to_owned() } else { format!("{age} s ago") };
        found.push(NOT_RENEWED.with([&short(holder), &ago]));
    }
    match pods {
        Err(why) => found.push(LEADER_LABEL.unread([], why)),
        Ok(pods) => {
            let labeled = pods.iter().filter(|pod| pod.is_leader);
            let labeled: Vec<&str> = labeled.map(|pod| pod.name.as_str()).collect();
            if labeled != [holder] {
                let none = "no pod".to_owned();
                let labeled = if labeled.is_empty() { none } else { names(&labeled) };
                found.push(NOT_LABELED.with([&short(holder), &labeled]));
            }
        }
    }
    or_ok(found, || LEADER_OK.with([&short(holder)]))
}

/// The version in the name of an image: its tag, or its digest.
fn version_of(image: &str) -> &str {
    let file = image.rsplit_once('/').map_or(image, |(_, file)| file);
    match file.split_once('@') {
        Some((named, digest)) => named.split_once(':').map_or(digest, |(_, tag)| tag),
        None => file.split_once(':').map_or("latest", |(_, tag)| tag),
    }
}

/// The images of a part.
pub(crate) struct Images<'a> {
    pub(crate) part: &'static str,
    /// Its images; none if it is not installed or not known.
    pub(crate) images: Vec<&'a str>,
}

impl Images<'_> {
    /// Their versions, each once.
    fn versions(&self) -> Vec<String> {
        let all: BTreeSet<&str> = self.images.iter().map(|image| version_of(image)).collect();
        all.into_iter().map(short).collect()
    }
}

/// All parts are of one release, and so is this program.
pub(crate) fn versions(program: &str, parts: &[Images<'_>]) -> Found {
    let all = parts.iter().map(|part| (part.part, part.versions()));
    let all: Vec<(&str, Vec<String>)> = all.filter(|(_, found)| !found.is_empty()).collect();
    let (_, first) = all.first().ok_or_else(|| NO_IMAGE.with([]))?;
    let mixed = all.iter().filter(|(_, versions)| versions.len() > 1);
    let mixed = mixed.filter_map(|(part, versions)| MIXED.about_with(versions, [part]));
    let mut found: Findings = mixed.collect();
    // Images of several repositories have digests that say nothing about each other.
    for (part, versions) in all[1..].iter().filter(|_| !are_digests(first)) {
        let is_same = versions.iter().any(|version| first.contains(version));
        if !is_same && !are_digests(versions) {
            found.extend(OTHER_RELEASE.about_with(versions, [part, &names(first)]));
        }
    }
    let other = first.iter().find(|version| is_other_release(version, program));
    found.extend(other.map(|version| OTHER_PROGRAM.with([&program, version])));
    let parts: Vec<&str> = all.iter().map(|(part, _)| *part).collect();
    or_ok(found, || VERSIONS_OK.with([&parts.join(", "), &names(first), &program]))
}

fn are_digests(versions: &[String]) -> bool {
    versions.iter().all(|version| version.contains(':'))
}

/// Whether this is the number of a release, and another one than that of this program.
fn is_other_release(version: &str, program: &str) -> bool {
    let version = version.trim_start_matches('v');
    let is_number = version.starts_with(|c: char| c.is_ascii_digit()) && version.contains('.');
    is_number && version != program
}

/// The extender's configuration, with all of its faults.
pub(crate) fn configuration(file: &Read<String>) -> (Findings, Option<Config>) {
    let text = match there(file, CONFIG, NO_CONFIG) {
        Ok(text) => text,
        Err(check) => return (vec![check], None),
    };
    match Config::from_yaml(text) {
        Err(faults) => {
            let faults = faults.faults;
            let first = faults.iter().take(20).map(|fault| CONFIG_FAULT.with([&short(fault)]));
            let more = faults.len().checked_sub(20).filter(|more| *more > 0);
            let more = more.map(|more| CONFIG_FAULT.with([&count(more, "more fault")]));
            (first.chain(more).collect(), None)
        }
        Ok(config) => {
            let way = match (config.exposure_fault(), &config.tls, config.plain_text) {
                (Some(fault), ..) => CONFIG_FAULT.with([&fault]),
                (None, Some(_), _) => CONFIG_OK.with([]),
                (None, None, true) => CONFIG_PLAIN.with([]),
                (None, None, false) => CONFIG_LOCAL.with([]),
            };
            let caps = config.webhook.memory_limit == MemoryLimit::Mps
                && config.webhook.thread_cap == ThreadCap::Share;
            let cap = caps.then(|| CONFIG_THREADS.with([&THREAD_CAP]));
            (std::iter::once(way).chain(cap).collect(), Some(config))
        }
    }
}

/// RuntimeClasses that pods of gpupack name.
pub(crate) fn runtime_classes(classes: &[(String, Read<()>)], config: Option<&Config>) -> Found {
    if classes.is_empty() {
        let row = if config.is_some() { DEFAULT_RUNTIME } else { UNKNOWN_RUNTIME };
        return Err(row.with([]));
    }
    let missing = classes.iter().filter_map(|(name, read)| match read {
        Ok(()) => None,
        Err(Unread::Absent) => Some(NO_RUNTIME_CLASS.with([&short(name)])),
        Err(why) => Some(RUNTIME_CLASS.unread([&short(name)], why)),
    });
    let missing: Findings = missing.collect();
    let all: Vec<&String> = classes.iter().map(|(name, _)| name).collect();
    Ok(if missing.is_empty() { RUNTIME_OK.about(&all).into_iter().collect() } else { missing })
}

/// Events of containers that did not start because of their GPU: their pods and texts.
pub(crate) fn start_failures(events: &Read<Vec<(String, String)>>) -> Found {
    let events = known(events, &START_FAILURES)?;
    let pods: Vec<&String> = events.iter().map(|(pod, _)| pod).collect();
    let first = events.first().map(|(_, text)| short(text)).unwrap_or_default();
    let found = NOT_STARTED.about_with(&pods, [&first]);
    or_ok(found.into_iter().collect(), || STARTS_OK.with([]))
}

/// ResourceQuotas that count no GPU pod of gpupack: as `namespace/name` with their keys.
pub(crate) fn quotas(quotas: &Read<Vec<(String, Vec<String>)>>) -> Found {
    let quotas = known(quotas, &QUOTAS)?;
    let useless = quotas.iter().flat_map(|(name, keys)| {
        keys.iter().filter(|key| counts_nothing(key)).map(move |key| format!("{name}: {key}"))
    });
    let (theirs, ours) = (format!("requests.{WHOLE}"), "requests.gpupack.dev/gpu-");
    let is_blind =
        |keys: &[String]| keys.contains(&theirs) && !keys.iter().any(|key| key.starts_with(ours));
    let blind = quotas.iter().filter(|(_, keys)| is_blind(keys)).map(|(name, _)| name);
    let found = USELESS_KEYS.about(&useless.collect::<Vec<_>>());
    let found = found.or_else(|| BLIND_QUOTAS.about(&blind.collect::<Vec<_>>()));
    Ok(vec![found.unwrap_or_else(|| QUOTAS_OK.with([]))])
}

/// The PriorityClasses, by name and value, that the classes of workloads in the configuration need.
pub(crate) fn workload_classes(
    config: Option<&Config>,
    classes: &Read<Vec<(String, i32)>>,
) -> Found {
    let config = config.ok_or_else(|| UNKNOWN_WORKLOADS.with([]))?;
    let classes = known(classes, &PRIORITY_CLASSES)?;
    let wrong = config.workloads.iter().filter_map(|(name, keys)| {
        let class = keys.class(name);
        let value = classes.iter().find(|(name, _)| *name == class).map(|(_, value)| value);
        match (value, keys.priority) {
            (None, _) => Some(format!("{class} does not exist")),
            (Some(found), Some(said)) if *found != said => {
                Some(format!("{class} has the value {found}, not {said}"))
            }
            (Some(_), _) => None,
        }
    });
    let found = WRONG_CLASSES.about(&wrong.collect::<Vec<_>>());
    let all: Vec<&String> = config.workloads.keys().collect();
    let found = found.or_else(|| WORKLOADS_OK.about(&all));
    Ok(vec![found.unwrap_or_else(|| NO_WORKLOADS.with([]))])
}

/// Whether a key of a quota is meant for a marker, but is none that the API server counts.
fn counts_nothing(key: &str) -> bool {
    let marker = key.strip_prefix("requests.");
    key.contains("gpupack.dev/") && !marker.is_some_and(|marker| MARKERS.contains(&marker))
}

#[cfg(test)]
mod tests;
