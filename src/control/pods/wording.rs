//! The words for why a pod waits and what would help: the same in pod events, `/v1/explain`,
//! `/v1/waiting`, the page and the command line.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use engine::hardware::pool::Borrow;
use engine::hardware::spots::Spot;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::search::{Change, Ends, Lever, Suggestion};
use engine::model::device_state::Origin;
use engine::model::node_state::{NodeReporting, NodeState};
use engine::model::rejection::Rejection;
use engine::model::request::{Amount, GpuRequest, Isolation};
use engine::model::reservation::{PodRef, Reservation, ReservationState};
use kube_api::pod::seen_pod::SeenPod;
use kube_api::request::placement::PLACEMENT;
use wire::api::waiting::Obstacle;
use wire::ids::{DeviceId, MigProfile, NodeName};
use wire::units::{Demand, Share};

/// Why a pod still waits that fits.
pub(crate) const FITS_NOW: &str = "a node fits: kube-scheduler's own filters refuse it, or kube-scheduler has not called again yet";

/// Why a pod waits that no node has refused.
pub(crate) const NOT_REFUSED: &str =
    "kube-scheduler has not called for it yet, or not since a node fitted";

/// Why a pod waits that has a place.
pub(crate) const BEING_BOUND: &str = "it is being bound";

/// Why a pod waits that has scheduling gates.
pub(crate) const GATED: &str =
    "it has scheduling gates: kube-scheduler ignores it until they are removed";

/// What to do about a request that cannot be read.
pub const SUGGESTION_REQUEST: &str =
    "fix the annotation in the pod's template and create the pod again";

/// What to do about a pod that runs without a placement that counts.
pub const SUGGESTION_UNPLACED: &str = "create the pod again, so that gpupack places it";

/// What to do about a request for a MIG instance in a cluster without any.
const NO_MIG: &str = "no GPU of the cluster has MIG instances, and none can be made: request `gpu-memory` or \
                      `gpu-fraction` instead";

/// Most MIG profiles in one sentence.
const MOST_PROFILES: usize = 8;

/// Most obstacles in one sentence.
const MOST_OBSTACLES: usize = 4;

/// Most suggestions in one sentence.
const MOST_SUGGESTIONS: usize = 3;

/// Most pods in one suggestion.
const MOST_PODS: usize = 5;

/// A number with its noun.
pub fn counted(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// An amount of GPUs: `0.5 GPU`, `1 GPU`, `2 GPUs`.
pub(crate) fn gpus(share: Share) -> String {
    format!("{share} {}", if is_plural(share) { "GPUs" } else { "GPU" })
}

fn is_plural(share: Share) -> bool {
    share == Share::ZERO || share > Share::WHOLE
}

/// What is said of the part of a kept room that is not free. What takes it need not be a pod.
pub(crate) fn not_free(lacks: Share) -> String {
    match lacks {
        Share::ZERO => "all of that is free".to_owned(),
        lacks => {
            format!(
                "{} of that {} not free yet",
                gpus(lacks),
                if is_plural(lacks) { "are" } else { "is" }
            )
        }
    }
}

/// Says that no node fits.
fn none_of(nodes: usize) -> String {
    if nodes == 1 {
        return "the only node tried does not fit".to_owned();
    }
    format!("none of {nodes} nodes fits")
}

/// One sentence on why a pod waits.
pub(crate) fn verdict(fitting: usize, nodes: usize, closest: Option<Rejection>) -> String {
    match (fitting, closest) {
        (0, None) => "no node is known".to_owned(),
        (0, Some(rejection)) => {
            format!("{}; the closest obstacle: {}", none_of(nodes), rejection.reason())
        }
        (_, _) => {
            let nodes = counted(nodes, "node", "nodes");
            let (fit, them) = if fitting == 1 { ("fits", "it") } else { ("fit", "them") };
            format!(
                "{fitting} of {nodes} {fit} now; if the pod still waits, kube-scheduler's own filters \
                 refuse {them} (see its events)"
            )
        }
    }
}

/// All that fits into an event: how many nodes refuse for which reason, and what would help.
pub(crate) fn sentence(rejections: &BTreeMap<Rejection, usize>, suggestions: &[String]) -> String {
    let nodes: usize = rejections.values().sum();
    let mut sentence = none_of(nodes);
    let mut closest: Vec<_> = rejections.iter().collect();
    closest.sort_by_key(|(rejection, _)| std::cmp::Reverse(rejection.closeness()));
    for (rejection, nodes) in closest.into_iter().take(MOST_OBSTACLES) {
        sentence += &format!("; {nodes}: {}", rejection.reason());
        let missing = rejection.missing();
        if missing != rejection.reason() {
            sentence += &format!(" ({missing})");
        }
    }
    with_suggestions(sentence, suggestions)
}

/// A sentence, and the first suggestions.
pub(crate) fn with_suggestions(mut sentence: String, suggestions: &[String]) -> String {
    for (suggestion, how) in
        suggestions.iter().take(MOST_SUGGESTIONS).zip(["; suggestion", "; or", "; or"])
    {
        sentence += &format!("{how}: {suggestion}");
    }
    sentence
}

/// The MIG profiles of a cluster. To find them takes a look at all nodes, which few pods need.
pub type Profiles<'a> =
    LazyCell<BTreeSet<MigProfile>, Box<dyn FnOnce() -> BTreeSet<MigProfile> + 'a>>;

/// The same by the ledger, once they are needed.
pub fn profiles(ledger: &Ledger) -> Profiles<'_> {
    LazyCell::new(Box::new(|| ledger.mig_profiles()))
}

/// What to do about a request for MIG instances that no GPU can ever serve, or only few, by the profiles that the
/// GPUs have. `None` if pods that end could help.
fn about_mig(
    query: &PlacementRequest,
    profiles: &Profiles<'_>,
    rejections: &[Rejection],
) -> Option<String> {
    let Amount::MigInstance(wanted) = &query.gpu.as_ref()?.amount else { return None };
    // Where a node has the profile, its rejection is a closer one.
    let is_unknown =
        rejections.iter().all(|rejection| rejection.closeness() <= Rejection::Kind.closeness());
    let lacks_devices =
        rejections.iter().any(|rejection| rejection.obstacle() == Obstacle::Devices);
    // What nodes have that did not report yet is not known.
    let is_open = rejections
        .iter()
        .any(|rejection| matches!(rejection, Rejection::UnknownNode | Rejection::NeverReported));
    if rejections.is_empty() || is_open || !(is_unknown || wanted.has_media() && lacks_devices) {
        return None;
    }
    if profiles.is_empty() {
        return Some(NO_MIG.to_owned());
    }
    if !profiles.iter().any(|profile| wanted.means(profile)) {
        let there: Vec<String> = profiles.iter().take(MOST_PROFILES).map(resource).collect();
        return Some(format!(
            "no GPU of the cluster has the MIG profile `{wanted}`: request one that is there, such as {}",
            there.join(" or ")
        ));
    }
    let plain = profiles.iter().find(|profile| profile.as_str() == wanted.plain())?;
    lacks_devices.then(|| {
        format!(
            "one MIG instance of each GPU can have the media engines: request {} if the pod does without them",
            resource(plain)
        )
    })
}

/// A profile as container resources name it.
fn resource(profile: &MigProfile) -> String {
    format!("`nvidia.com/mig-{}`", profile.as_str().replace('+', "."))
}

/// Suggestions, the cheapest first: the ledger's suggestions, then what an operator could do. They name
/// only pods of namespaces that their reader `sees`.
pub(crate) fn suggestions(
    query: &PlacementRequest,
    profiles: &Profiles<'_>,
    suggestions: &[Suggestion],
    rejections: impl IntoIterator<Item = Rejection>,
    sees: &dyn Fn(&str) -> bool,
) -> Vec<String> {
    let rejections: Vec<Rejection> = rejections.into_iter().collect();
    let about_mig = about_mig(query, profiles, &rejections);
    let found = suggestions.iter().map(|suggestion| words(query, suggestion, sees));
    let mut seen = BTreeSet::new();
    let of_operator = rejections.into_iter().filter_map(Rejection::suggestion).map(str::to_owned);
    about_mig
        .into_iter()
        .chain(found)
        .chain(of_operator)
        .filter(|suggestion| seen.insert(suggestion.clone()))
        .collect()
}

/// One suggestion in words.
pub(crate) fn words(
    query: &PlacementRequest,
    suggestion: &Suggestion,
    sees: &dyn Fn(&str) -> bool,
) -> String {
    let node = &suggestion.node;
    match &suggestion.change {
        Change::HeldElsewhere => format!(
            "wait some seconds: the room on node {node} is held for a pod that is being bound"
        ),
        Change::KeptForFirst => format!(
            "wait: the room on node {node} is kept for the first pod of the line (`gpupack waiting`), or \
             give this one a higher priority"
        ),
        Change::Ending(pods) => format!(
            "wait some seconds: processes of {} may still hold the room on node {node}",
            named(pods, sees)
        ),
        Change::Request(lever, changed) => {
            format!("{}: it fits on node {node} now", requesting(query, *lever, changed))
        }
        Change::End(Ends { way, pods, instances }) => {
            let instances: Vec<String> = instances.iter().map(instance).collect();
            let what = match instances.is_empty() {
                true => gpus(way.moved),
                false => instances.join(", "),
            };
            format!("end {} ({what}): it fits on node {node} then", named(pods, sees))
        }
        Change::Kubelet(devices) => format!(
            "{} to kubelet (a device plugin allocates them), for example on node {node}: turn off the \
             plugin there to give them to gpupack, or request `nvidia.com/gpu` without gpupack",
            counted(*devices, "GPU that would take it belongs", "GPUs that would take it belong")
        ),
        Change::Heal(devices) => format!(
            "{} unhealthy, for example on node {node}: see `fault` in /v1/state",
            counted(*devices, "GPU that would take it is", "GPUs that would take it are")
        ),
    }
}

/// A MIG instance by where it lies.
fn instance(spot: &Spot) -> String {
    format!("{} at unit {}", spot.profile, spot.start)
}

/// The changed request that a suggestion proposes.
fn requesting(query: &PlacementRequest, lever: Lever, changed: &PlacementRequest) -> String {
    match lever {
        Lever::Cpu => {
            let (named, now) = (query.host.cpu.milli(), changed.host.cpu.milli());
            return format!("request {now}m of CPU, {}m less", named.saturating_sub(now));
        }
        Lever::HostMemory => {
            let (named, now) = (query.host.memory, changed.host.memory);
            let less = named.mib().saturating_sub(now.mib());
            return format!("request {now} of host memory, {less} MiB less");
        }
        Lever::Share
        | Lever::Memory
        | Lever::Devices
        | Lever::Profile
        | Lever::Model
        | Lever::Whole
        | Lever::Isolation => {}
    }
    let (Some(named), Some(now)) = (&query.gpu, &changed.gpu) else { return String::new() };
    match lever {
        Lever::Devices if now.count == NonZeroU32::MIN => {
            format!("request 1 device instead of {}", named.count)
        }
        Lever::Devices => format!("request {} devices instead of {}", now.count, named.count),
        Lever::Model => {
            let new = now.models.names();
            let new = new.filter(|name| !named.models.names().any(|known| known == *name));
            let names: Vec<&str> = new.collect();
            format!("also accept the model {} in `gpupack.dev/gpu-model`", names.join(" or "))
        }
        Lever::Isolation => {
            format!("accept `gpupack.dev/isolation: {}`", now.isolation.name())
        }
        Lever::Share
        | Lever::Memory
        | Lever::Profile
        | Lever::Whole
        | Lever::Cpu
        | Lever::HostMemory => {
            format!("request {} instead of {}", key(&now.amount, lever), amount(&named.amount))
        }
    }
}

/// An amount as an annotation or resource has it; of two dimensions, the one that `lever` changes.
fn key(amount: &Amount, lever: Lever) -> String {
    match (amount, lever) {
        (Amount::FractionAndMemory(share, _), Lever::Share) | (Amount::Fraction(share), _) => {
            format!("`gpu-fraction: \"{share}\"`")
        }
        (Amount::Memory(memory) | Amount::FractionAndMemory(_, memory), _) => {
            format!("`gpu-memory: \"{}\"`", memory.mib())
        }
        (Amount::MigInstance(profile), _) => resource(profile),
        (Amount::Whole, _) => "`gpu-fraction: \"1\"`".to_owned(),
        (Amount::SharedSlot, _) => "`nvidia.com/gpu.shared`".to_owned(),
    }
}

fn named(pods: &[PodRef], sees: &dyn Fn(&str) -> bool) -> String {
    let (seen, hidden): (Vec<_>, Vec<_>) = pods.iter().partition(|pod| sees(pod.namespace()));
    let mut names: Vec<String> =
        seen.iter().take(MOST_PODS).map(|pod| pod.name.to_string()).collect();
    if seen.len() > MOST_PODS {
        names.push(format!("{} more", seen.len() - MOST_PODS));
    }
    if !hidden.is_empty() {
        names.push(counted(hidden.len(), "pod of another team", "pods of other teams"));
    }
    names.join(", ")
}

/// A request in words, for people.
pub fn in_words(request: &GpuRequest) -> String {
    let amount = amount(&request.amount);
    let mut words = match request.count {
        NonZeroU32::MIN => amount,
        count => format!("{count} × {amount}"),
    };
    if !request.models.is_any() {
        words += " on ";
        words += &request.models.names().collect::<Vec<_>>().join(" or ");
    }
    match request.isolation {
        Isolation::None => {}
        Isolation::Memory => words += ", isolation memory",
        Isolation::Hardware => words += ", isolation hardware",
    }
    words
}

fn amount(amount: &Amount) -> String {
    match amount {
        Amount::Fraction(share) => format!("{share} GPU"),
        Amount::Memory(memory) => memory.to_string(),
        Amount::FractionAndMemory(share, memory) => format!("{share} GPU with {memory}"),
        Amount::Whole => "1 whole GPU".to_owned(),
        Amount::MigInstance(profile) => format!("MIG {profile}"),
        Amount::SharedSlot => "a replica slot".to_owned(),
    }
}

/// What is said of a pod with a node whose annotations were damaged, as the end of a sentence.
pub fn unreadable(pod: &SeenPod) -> String {
    let placement = match &pod.placement {
        Ok(Some(_)) => String::new(),
        Ok(None) => format!("; it has no annotation `{PLACEMENT}`"),
        Err(error) => format!("; the placement that is written on it is ignored: {error}"),
    };
    let request = match &pod.request {
        Ok(Some(_)) => String::new(),
        Ok(None) => "; its keys request no GPU".to_owned(),
        Err(error) => format!("; its GPU request cannot be read: {error}"),
    };
    placement + &request
}

/// What is said of the containers that are restarted for a pod.
pub(crate) fn restarts(count: usize) -> String {
    match count {
        0 => String::new(),
        1 => "; a pod that borrows its room is restarted first, which takes seconds".to_owned(),
        _ => {
            format!("; {count} pods that borrow its room are restarted first, which takes seconds")
        }
    }
}

/// How much a pod with a limit may use where it runs, in a pool that lends, as the end of a sentence. Limits are
/// whole slots where a device has slots.
pub fn limit(node: &NodeState, held: &Reservation) -> String {
    let [placed] = &held.placement.devices[..] else { return String::new() };
    let on = held.guest_on().filter(|_| !held.is_going_home()).unwrap_or(&placed.id);
    let device = node.devices().iter().find(|device_state| device_state.device().id == *on);
    let has_limit = held.request.as_ref().is_some_and(|request| request.limit.is_some());
    let Some(device) = device.filter(|device| has_limit && device.rule().borrow != Borrow::None)
    else {
        return String::new();
    };
    let share = held.compute_limit(device.rule(), placed.demand);
    let memory = device.memory_limit(&held.pod.uid).unwrap_or(placed.demand.memory);
    match placed.demand == (Demand { memory, share }) {
        true => "; its limit lends it nothing there".to_owned(),
        false => {
            format!("; while that is free there, it may use {share} of the compute and {memory}")
        }
    }
}

/// Where a pod runs, if not on the device that it is allocated, as the end of a sentence.
pub fn guest(held: &Reservation) -> String {
    match held.guest_on() {
        None => String::new(),
        Some(on) if held.is_going_home() => format!("; it is being moved there from {on}"),
        Some(on) => format!("; it runs on {on} until another pod needs that"),
    }
}

/// What is said of a bound pod whose devices are not there any more, as the end of a sentence.
pub fn lost(node: &NodeState, held: &Reservation) -> String {
    if node.state() != NodeReporting::Reporting || held.state != ReservationState::Confirmed {
        return String::new();
    }
    let device_of = |id: &DeviceId| node.devices().iter().find(|found| found.device().id == *id);
    let guest_on = held.guest_on().filter(|_| !held.changes_instances());
    if let Some(on) = guest_on.filter(|on| device_of(on).is_none()) {
        return format!(
            "; the device {on}, where it runs as a guest, is not there any more: its container is restarted on its own \
             one if that one is sound"
        );
    }
    let parts: Vec<_> =
        held.placement.parts().map(|(placed, spot)| (device_of(&placed.id), spot)).collect();
    if parts.iter().any(|(device, spot)| device.is_none() && spot.is_some()) {
        return "; its MIG instance is gone, and is made again once its GPU is in MIG mode, with an agent that makes \
                instances"
            .to_owned();
    }
    if parts.iter().any(|(device, _)| device.is_none()) {
        return "; a device of it is not there any more: delete the pod to get another one"
            .to_owned();
    }
    let mut devices = parts.into_iter().filter_map(|(device, _)| device);
    match devices.any(|device| device.origin() == Origin::Promised) {
        true => "; its MIG instance is gone, and is made again at the same place".to_owned(),
        false => String::new(),
    }
}

/// What helps a pod whose container has no driver.
pub const SUGGESTION_BLIND: &str = "delete the pod, so that its container is made again; if that does not help, check on \
    the node that the NVIDIA driver is loaded, and that the RuntimeClass of the pod, or the runtime's default handler, \
    is NVIDIA's";

/// What is said of a pod whose container has no driver.
pub fn blind(container: &str) -> String {
    format!(
        "container `{container}` runs without its GPU: when it started, the NVIDIA driver was not loaded on the node, or \
         the container runtime was not NVIDIA's"
    )
}

/// The same as an event, with the fix.
pub(crate) fn blind_note(node: &NodeName, container: &str) -> String {
    format!("{} (node {node}): {SUGGESTION_BLIND}", blind(container))
}
