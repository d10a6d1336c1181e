//! The cluster's version and namespaces, and the parts of gpupack that run in it.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::apimachinery::pkg::version::Info;

use crate::api::commands::Check;
use crate::cli::base::reader::{Read, Unread};
use crate::cli::doctor::finding::{Findings, Of, count, names, short};
use crate::cli::doctor::objects::{OwnPod, Workload};
use crate::config::file::Config;

/// From this minor version on, the API server has the policies.
const POLICIES: u32 = 30;

/// From this minor version on, a bind makes kube-scheduler look at the other waiting pods.
const QUEUEING_HINTS: u32 = 32;

/// A Lease that was not renewed for so long is not held, whatever its length; clocks differ.
const STALE_SECONDS: i64 = 30;

/// Label of namespaces: the Pod Security standard that is enforced there.
const ENFORCED: &str = "pod-security.kubernetes.io/enforce";

/// Kubernetes is new enough.
pub(crate) fn kubernetes(version: &Read<Info>) -> Findings {
    let of = Of("Kubernetes version");
    let info = match version {
        Ok(info) => info,
        Err(why) => return vec![of.unread("the version of the API server", why)],
    };
    let number = |text: &str| {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        text[..digits].parse::<u32>().ok()
    };
    let (Some(major), Some(minor)) = (number(&info.major), number(&info.minor)) else {
        let found = format!("`{}.{}` is no version", short(&info.major), short(&info.minor));
        return vec![of.not_checked(found, "compare it with docs/operations.md")];
    };
    let found = format!("{major}.{minor} ({})", short(&info.git_version));
    vec![match (major, minor) {
        (1, ..POLICIES) => of.problem(
            format!("{found}: it has no admission policies, and tokens of agents name no node"),
            "upgrade to 1.32; until then any client that may patch pods can edit placements",
        ),
        (1, ..QUEUEING_HINTS) => of.warning(
            format!("{found}: a bind does not make kube-scheduler look at other waiting pods"),
            "upgrade to 1.32, or with 1.31 turn on the feature gate SchedulerQueueingHints",
        ),
        _ => of.ok(found),
    }]
}

/// A namespace exists, with the Pod Security standard of the shipped file.
pub(crate) fn namespace(
    name: &str,
    labels: &Read<BTreeMap<String, String>>,
    standard: &str,
) -> Check {
    let of = Of("namespaces");
    let labels = match labels {
        Ok(labels) => labels,
        Err(Unread::Absent) => {
            return of.problem(
                format!("namespace {name} does not exist"),
                "kubectl apply -f deploy/rbac.yaml, or name yours with --system-namespace",
            );
        }
        Err(why) => return of.unread(&format!("namespace {name}"), why),
    };
    let set = format!("kubectl label namespace {name} {ENFORCED}={standard} --overwrite");
    match labels.get(ENFORCED).map(String::as_str) {
        Some(enforced) if enforced == standard => of.ok(format!("{name} enforces {standard}")),
        Some(enforced) if standard == "privileged" => of.problem(
            format!("{name} enforces {}, which forbids the agents' hostPID", short(enforced)),
            set,
        ),
        None if standard == "privileged" => of.ok(format!("{name} enforces no standard")),
        Some(other) => of.warning(format!("{name} enforces {}", short(other)), set),
        None => of.warning(format!("{name} enforces no Pod Security standard"), set),
    }
}

/// A Deployment is there, and all of its replicas are ready.
pub(crate) fn deployment(check: &'static str, found: &Read<Workload>) -> Check {
    let of = Of(check);
    let found = match found {
        Ok(found) => found,
        Err(Unread::Absent) => {
            return of.problem(
                "there is no Deployment with this part of gpupack",
                "install it (docs/operations.md), or name its namespace with --system-namespace",
            );
        }
        Err(why) => return of.unread("its Deployment", why),
    };
    let Workload { name, wanted, ready, .. } = found;
    let text = format!("Deployment {name}: {ready} of {wanted} replicas ready");
    let look = format!(
        "kubectl describe pods -A -l app.kubernetes.io/name=gpupack,app.kubernetes.io/component={}",
        found.component
    );
    match ready {
        _ if *wanted == 0 => of.problem(text, "scale it up, with `kubectl scale`"),
        0 => of.problem(text, look),
        _ if ready < wanted => of.warning(text, look),
        _ => of.ok(text),
    }
}

/// The Lease is held by a replica that renews it, and that replica's pod has the label.
pub(crate) fn leader(
    extender: &Workload,
    lease: &Read<LeaseSpec>,
    pods: &Read<Vec<OwnPod>>,
    now_unix_seconds: i64,
) -> Findings {
    let of = Of("leader");
    if !extender.arguments().any(|argument| argument.starts_with("--replica")) {
        return vec![of.ok("the extender runs without replicas, and needs no Lease")];
    }
    let logs = "read the extender's log, and the chapter GpupackNoLeader of docs/runbook.md";
    let lease = match lease {
        Ok(lease) => lease,
        Err(Unread::Absent) => {
            return vec![of.problem("there is no Lease: no replica leads", logs)];
        }
        Err(why) => return vec![of.unread("the Lease", why)],
    };
    let holder = lease.holder_identity.as_deref().unwrap_or_default();
    if holder.is_empty() {
        return vec![of.problem("no replica holds the Lease", logs)];
    }
    let renewed = lease.renew_time.as_ref().map(|time| time.0.as_second());
    let age = renewed.map_or(i64::MAX, |at| now_unix_seconds.saturating_sub(at));
    let longest = i64::from(lease.lease_duration_seconds.unwrap_or(0)).saturating_mul(3);
    let mut found = Findings::new();
    let holder_pod = holder.rsplit_once('_').map_or(holder, |(pod, _)| pod);
    if age > longest.max(STALE_SECONDS) {
        let ago = if renewed.is_none() { "never".to_owned() } else { format!("{age} s ago") };
        found.push(of.problem(format!("{} renewed the Lease {ago}", short(holder_pod)), logs));
    }
    let pods = match pods {
        Ok(pods) => pods,
        Err(why) => {
            found.push(of.unread("the label of the leader's pod", why));
            return found;
        }
    };
    let labeled: Vec<&str> =
        pods.iter().filter(|pod| pod.is_leader).map(|pod| pod.name.as_str()).collect();
    if labeled != [holder_pod] {
        let labeled = if labeled.is_empty() { "no pod".to_owned() } else { names(&labeled) };
        found.push(of.problem(
            format!(
                "{} holds the Lease, but {labeled} has the label gpupack.dev/leader",
                short(holder_pod)
            ),
            "run it again in some seconds; then check the policy gpupack-extender and the rights of \
             deploy/rbac.yaml",
        ));
    }
    if found.is_empty() {
        found.push(of.ok(format!("{} holds the Lease and has the label", short(holder_pod))));
    }
    found
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
    /// The part.
    pub(crate) part: &'static str,
    /// Its images; none if it is not installed or not known.
    pub(crate) images: Vec<&'a str>,
}

/// All parts are of one release, and so is this program.
pub(crate) fn versions(program: &str, parts: &[Images<'_>]) -> Findings {
    let of = Of("versions");
    let of_part = |part: &Images<'_>| -> BTreeSet<String> {
        part.images.iter().map(|image| short(version_of(image))).collect()
    };
    let all: Vec<(&str, BTreeSet<String>)> =
        parts.iter().map(|part| (part.part, of_part(part))).collect();
    let known: Vec<&(&str, BTreeSet<String>)> =
        all.iter().filter(|(_, versions)| !versions.is_empty()).collect();
    let mut found = Findings::new();
    for (part, versions) in known.iter().filter(|(_, versions)| versions.len() > 1) {
        let versions: Vec<&String> = versions.iter().collect();
        found.push(of.warning(
            format!("the pods of the {part} are of several versions: {}", names(&versions)),
            "wait until the rollout has ended (kubectl rollout status)",
        ));
    }
    let Some((_, first)) = known.first() else {
        return vec![of.not_checked("no image of gpupack is known", "see the checks above")];
    };
    // Images of several repositories have digests that say nothing about each other.
    let is_digest = |versions: &BTreeSet<String>| versions.iter().all(|it| it.contains(':'));
    for (part, versions) in &known[1..] {
        if versions.is_disjoint(first) && !is_digest(versions) && !is_digest(first) {
            let (is, must): (Vec<_>, Vec<_>) = (versions.iter().collect(), first.iter().collect());
            found.push(of.problem(
                format!("the {part} is {}, the extender {}", names(&is), names(&must)),
                "use images of one release for all parts: see Upgrade in docs/install.md",
            ));
        }
    }
    let is_this = |version: &String| version.trim_start_matches('v') == program;
    let is_number = |version: &&String| {
        version.trim_start_matches('v').starts_with(|c: char| c.is_ascii_digit())
            && version.contains('.')
    };
    if let Some(other) = first.iter().find(|it| is_number(it) && !is_this(it)) {
        found.push(of.warning(
            format!("this program is {program}, the extender {other}"),
            "use the program of the extender's release",
        ));
    }
    if found.is_empty() {
        let first: Vec<&String> = first.iter().collect();
        let parts: Vec<&str> = known.iter().map(|(part, _)| *part).collect();
        found.push(of.ok(format!(
            "{}: {}; this program: {program}",
            parts.join(", "),
            names(&first)
        )));
    }
    found
}

/// The extender's configuration, with all of its faults.
pub(crate) fn configuration(file: &Read<String>) -> (Findings, Option<Config>) {
    let of = Of("extender configuration");
    let text = match file {
        Ok(text) => text,
        Err(Unread::Absent) => {
            let fix = "helm upgrade with your values, or deploy/render and kubectl apply -f deploy/extender.yaml";
            return (vec![of.problem("its ConfigMap or the file in it is missing", fix)], None);
        }
        Err(why) => return (vec![of.unread("its ConfigMap", why)], None),
    };
    let fix = "correct it in the ConfigMap (docs/configuration.md), and restart the extender";
    match Config::from_yaml(text) {
        Err(faults) => {
            let many = faults.faults.len();
            let first = faults.faults.iter().take(20).map(|fault| of.problem(short(fault), fix));
            let mut found: Findings = first.collect();
            if many > found.len() {
                found.push(of.problem(count(many - found.len(), "more fault"), fix));
            }
            (found, None)
        }
        Ok(config) => match config.exposure_fault() {
            Some(fault) => (vec![of.problem(fault, fix)], Some(config)),
            None => {
                let way = match (&config.tls, config.plain_text) {
                    (Some(_), _) => of.ok("valid; clients prove who they are (`tls`)"),
                    (None, true) => of.warning(
                        "valid; plain text: no client proves who it is",
                        "set `tls`, or apply deploy/network-policy.yaml where policies are enforced",
                    ),
                    (None, false) => of.warning(
                        "valid; its ports can be reached on its own machine only",
                        "set listen, page_listen, agents_listen and metrics_listen",
                    ),
                };
                (vec![way], Some(config))
            }
        },
    }
}

#[cfg(test)]
mod tests;
